"""Cuts, holdings, the two-sided relaxation and exchanges: against enumeration, and what they must keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.patterns import (
    cheapest_partition,
    class_of_stages,
    leaf_kinds,
    partitions_within,
    pattern_bytes,
    relax,
)
from meshwright.planner.mapping.pods import (
    Bundle,
    bundles_within,
    exchanged,
    ordered_counts,
    patterns_of,
)
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    Traffic,
    counts_of,
    loads_of,
)
from tests.soaked import examples


def one_pod(
    stages: int, slots: int, leaf_slots: tuple[int, ...], traffic: Traffic
) -> MappingProblem:
    """Leaves whose share of an up-link is that of their slots."""
    return MappingProblem(
        stages=stages,
        slots=slots,
        traffic=traffic,
        leaf_slots=leaf_slots,
        leaf_s_per_byte=tuple(1.0 / n for n in leaf_slots),
        leaf_pod=(0,) * len(leaf_slots),
        pod_s_per_byte=(0.0,),
    )


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 8), largest=st.integers(1, 5))
def test_cuts_are_those_of_an_enumeration(seed: int, slots: int, largest: int) -> None:
    rng = np.random.default_rng(seed)
    largest, most = (
        min(largest, slots),
        int(rng.integers(-(-slots // min(largest, slots)), slots + 1)),
    )
    values = np.append(0.0, rng.normal(size=largest))
    every = [
        cut
        for cut in product(*[range(slots + 1)] * largest)
        if sum(n * size for size, n in enumerate(cut, 1)) == slots and sum(cut) <= most
    ]
    worth = np.array([sum(n * values[size] for size, n in enumerate(cut, 1)) for cut in every])
    value, cut = cheapest_partition(values, slots, most)
    assert value == pytest.approx(worth.min())
    assert cut @ np.arange(largest + 1) == slots
    assert cut @ values == pytest.approx(value)
    ceiling = float(np.median(worth)) + 1e-9
    found = partitions_within(values, slots, most, ceiling, 10_000)
    assert found is not None
    wanted = {cut for cut, value in zip(every, worth, strict=True) if value <= ceiling}
    assert {tuple(row[1:].tolist()) for row in found} == wanted
    assert len(found) == len(wanted)
    assert partitions_within(values, slots, most, ceiling, len(wanted) - 1) is None


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 5), wrap=st.booleans())
def test_holdings_cost_what_their_best_order_costs(seed: int, stages: int, wrap: bool) -> None:
    rng = np.random.default_rng(seed)
    traffic = Traffic(
        ring_bytes=5.0, hop_bytes=float(rng.integers(1, 4)), wrap_bytes=2.0 * wrap * (stages > 1)
    )
    problem = one_pod(stages, 3, (6,) * stages, traffic)
    kinds, family = leaf_kinds(problem), class_of_stages(stages)
    prices = np.append(np.zeros((2, 1)), rng.uniform(0, 2, (2, 3)), axis=1)
    least: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    for pattern in product(range(4), repeat=stages):
        if 0 < sum(pattern) <= 6:
            row = np.array(pattern)
            ends = (row[0], row[-1]) if stages > 1 else (row[0], 0)
            inner = sorted((n for n in pattern[1:-1] if n), reverse=True)
            key = (tuple(sorted(map(int, ends), reverse=True)), tuple(inner))
            cost = float(pattern_bytes(problem, row[None])[0]) / 6
            least[key] = min(least.get(key, np.inf), cost)

    def earned(ends: tuple[int, ...], inner: tuple[int, ...]) -> float:
        return float(sum(prices[0, n] for n in ends) + sum(prices[1, n] for n in inner))

    ceiling = float(np.median([cost - earned(*key) for key, cost in least.items()])) + 1e-9
    found = bundles_within(problem, kinds, prices, np.array([ceiling]), 10_000)
    assert found is not None
    assert {(held.ends, held.inner) for held in found} == {
        key for key, cost in least.items() if cost - earned(*key) <= ceiling
    }
    for held in found:
        assert held.cost_s == pytest.approx(least[held.ends, held.inner])
        for pattern in patterns_of(problem, held):
            assert pattern_bytes(problem, pattern[None])[0] / 6 == pytest.approx(held.cost_s)
            assert sorted(pattern[family == 1][pattern[family == 1] > 0].tolist()) == sorted(
                held.inner
            )


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_relaxation_is_below_the_proven_price(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, slots = int(rng.integers(2, 6)), int(rng.integers(2, 9))
    free = rng.integers(1, 7, 3)
    while free.sum() < stages * slots:
        free = np.append(free, rng.integers(1, 7))
    traffic = Traffic(ring_bytes=20.0, hop_bytes=float(rng.integers(0, 4)))
    problem = one_pod(stages, slots, tuple(int(n) for n in free), traffic)
    starts = [counts_of(problem, problem.hostname_assignment())]
    relaxation, solution = relax(problem, starts), least_traffic(problem)
    assert relaxation.bound_s <= solution.price_s * (1 + 1e-9) + 1e-9
    assert relaxation.value_s == pytest.approx(relaxation.bound_s, rel=1e-5, abs=1e-9)
    assert solution.proven


@pytest.mark.parametrize(
    "free",
    [
        (3, 3, 5, 5, 6, 7, 10, 11, 14),
        (1, 2, 3, 6, 7, 8, 10, 13, 14),
        (2, 2, 5, 5, 6, 7, 8, 14, 15),
    ],
)
def test_stages_that_almost_fit_leaves_are_proven(free: tuple[int, ...]) -> None:
    """64 nodes, 8 stages of 8: patterns of leaves alone left up to 15 % here, and took minutes."""
    problem = one_pod(8, 8, free, Traffic(ring_bytes=23.49, hop_bytes=1.0))
    found, again = least_traffic(problem), least_traffic(problem)
    assert found.proven
    assert found.price_s < found.hostname_s
    assert np.array_equal(found.assignment, again.assignment)


def test_a_choice_of_holdings_is_put_in_order() -> None:
    """Four stages of 4 on leaves of 6, 6 and 4: two leaves hold a whole stage and half of one between."""
    problem = one_pod(4, 4, (6, 6, 4), Traffic(ring_bytes=10.0, hop_bytes=1.0))
    kinds = leaf_kinds(problem)
    big = next(at for at, kind in enumerate(kinds) if kind.room == 6)
    chosen = [
        (Bundle(kind=big, ends=(4, 0), inner=(2,), cost_s=0.0), 2),
        (Bundle(kind=1 - big, ends=(0, 0), inner=(4,), cost_s=0.0), 1),
    ]
    counts = ordered_counts(problem, kinds, chosen)
    assert counts is not None
    assert counts.sum(axis=0).tolist() == [4, 4, 4, 4]
    assert sorted(counts.sum(axis=1).tolist()) == [4, 6, 6]
    short = [(Bundle(kind=big, ends=(4, 0), inner=(3,), cost_s=0.0), 2)]
    assert ordered_counts(problem, kinds, short) is None


def two_pods(seed: int) -> tuple[MappingProblem, IntArray]:
    """Whole leaves in random stages, on two pods."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in np.repeat([2, 2, 4], 4)]
    problem = replace(
        one_pod(4, 8, tuple(sizes), Traffic(ring_bytes=10.0, hop_bytes=1.0)),
        leaf_pod=tuple(int(pod) for pod in rng.permutation(np.repeat([0, 1], 6))),
        pod_s_per_byte=(1.0, 2.0),
    )
    counts = np.zeros((12, 4), dtype=np.int64)
    for stage in range(4):
        counts[[stage, 4 + stage, 8 + stage], stage] = (2, 2, 4)
    return problem, counts


def _price(problem: MappingProblem, counts: IntArray) -> float:
    pods = np.zeros((problem.pods, problem.stages), dtype=np.int64)
    np.add.at(pods, problem.pod_of, counts)
    leaf_s = np.asarray(problem.leaf_s_per_byte) @ pattern_bytes(problem, counts)
    return float(leaf_s + np.asarray(problem.pod_s_per_byte) @ pattern_bytes(problem, pods))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_exchanges_keep_stages_and_leaves_and_do_not_cost_more(seed: int) -> None:
    problem, counts = two_pods(seed)
    found = exchanged(problem, counts, 3_000)
    assert found.sum(axis=0).tolist() == [8] * 4
    assert np.array_equal(found.sum(axis=1), counts.sum(axis=1))
    assert _price(problem, found) <= _price(problem, counts) + 1e-9
    assert np.array_equal(found, exchanged(problem, counts, 3_000))


@pytest.mark.slow
def test_exchanges_find_the_pods() -> None:
    """All stages are cut by the pods at first; each pod could hold two whole ones."""
    problem, counts = two_pods(0)
    problem = replace(problem, leaf_pod=(0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1))
    assert _price(problem, exchanged(problem, counts, 20_000)) < 0.8 * _price(problem, counts)


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_leaves_and_pods_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem, _ = two_pods(seed)
    assignment = rng.permutation(np.repeat(np.arange(12), problem.leaf_slots)).reshape(4, 8)
    pods, leaves = problem.only_pods(), problem.without_pods()
    assert loads_of(pods, problem.pod_of[assignment]).leaf_bytes == pytest.approx(
        loads_of(problem, assignment).pod_bytes
    )
    both = loads_of(pods, problem.pod_of[assignment]).total_s + loads_of(leaves, assignment).total_s
    assert both == pytest.approx(loads_of(problem, assignment).total_s)
