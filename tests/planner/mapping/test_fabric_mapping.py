"""Mapping on fragmented allocations: against brute force, and what must not change a cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InfeasibleError
from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.patterns import BlockKind, PatternPricing, pattern_bytes, relax
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    Traffic,
    counts_of,
    loads_of,
    spread_of,
)
from meshwright.planner.mapping.slots import assignment_of
from tests.soaked import examples, some


def random_problem(seed: int, *, experts: bool = False) -> MappingProblem:
    """A few slots on a few uneven leaves, in one or two pods, with or without room to spare."""
    rng = np.random.default_rng(seed)
    stages, slots = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4)][int(rng.integers(6))]
    if experts:
        stages, slots = 2, 4
    leaves, pods = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    free = rng.integers(1, 4, leaves)
    while free.sum() < stages * slots:
        free[int(rng.integers(leaves))] += 1
    traffic = Traffic(
        ring_bytes=float(rng.integers(0, 20)),
        hop_bytes=float(rng.integers(0, 20)),
        wrap_bytes=float(rng.integers(0, 2) * rng.integers(0, 10)),
        expert_slots=2 if experts else 1,
        expert_bytes=float(rng.integers(1, 20)) if experts else 0.0,
        expert_ring_bytes=float(rng.integers(0, 5)) if experts else 0.0,
    )
    pod_of = np.sort(np.append(rng.integers(0, pods, leaves - 1), 0))
    return MappingProblem(
        stages=stages,
        slots=slots,
        traffic=traffic,
        leaf_slots=tuple(int(x) for x in free),
        leaf_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, leaves)),
        leaf_pod=tuple(int(x) for x in pod_of),
        pod_s_per_byte=tuple(float(x) for x in rng.integers(1, 4, pods)),
        host_leaves=tuple(int(x) for x in rng.permutation(np.repeat(np.arange(leaves), free))),
    )


def every_assignment(problem: MappingProblem) -> Iterator[IntArray]:
    """Every way to give leaves to slots."""

    def fill(left: tuple[int, ...], row: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(row) == problem.needed:
            yield row
            return
        for leaf, free in enumerate(left):
            if free:
                yield from fill((*left[:leaf], free - 1, *left[leaf + 1 :]), (*row, leaf))

    for row in fill(problem.leaf_slots, ()):
        yield np.array(row).reshape(problem.stages, problem.slots)


def brute(problem: MappingProblem) -> float:
    """Least seconds of all up-links over all assignments."""
    return min(loads_of(problem, one).total_s for one in every_assignment(problem))


SMALL = [seed for seed in range(400) if random_problem(seed).needed <= 6]


@pytest.mark.parametrize(
    "block",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((*range(4, 12), 2, 3))),
    ],
)
def test_brute_force_agrees(block: int) -> None:
    checked = proven = 0
    for seed in SMALL[block * 10 : block * 10 + 10]:
        problem = random_problem(seed)
        total = brute(problem)
        found = least_traffic(problem)
        assert found.bound_s <= total * (1 + 1e-9) + 1e-9
        assert found.price_s >= total - 1e-9
        if found.proven:
            assert found.price_s == pytest.approx(total)
            proven += 1
        if problem.pods == 1 and problem.traffic.wrap_bytes == 0:
            assert found.proven, seed
        checked += 1
    assert checked == 10
    assert proven >= 5


@pytest.mark.slow
def test_groups_of_several_slots_are_bounded_and_no_worse_than_hostname_order() -> None:
    for seed in range(8):
        problem = random_problem(seed, experts=True)
        if problem.needed * len(problem.leaf_slots) > 24:
            continue
        total = brute(problem)
        found = least_traffic(problem)
        assert found.bound_s <= total * (1 + 1e-9) <= found.price_s * (1 + 2e-9)
        assert found.price_s <= found.hostname_s * (1 + 1e-9)


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_relabelling_equal_leaves_changes_no_cost(seed: int) -> None:
    problem = replace(random_problem(seed), host_leaves=())
    rng = np.random.default_rng(seed)
    turn = rng.permutation(len(problem.leaf_slots))
    turned = replace(
        problem,
        leaf_slots=tuple(problem.leaf_slots[i] for i in turn),
        leaf_s_per_byte=tuple(problem.leaf_s_per_byte[i] for i in turn),
        leaf_pod=tuple(problem.leaf_pod[i] for i in turn),
    )
    one, other = least_traffic(problem), least_traffic(turned)
    if one.proven and other.proven:
        assert one.price_s == pytest.approx(other.price_s, rel=1e-5)
    back = np.argsort(turn)
    moved = back[one.assignment]
    assert loads_of(turned, moved).total_s == pytest.approx(one.price_s)


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(1.0, 8.0), leaf=st.integers(0, 4))
def test_more_bandwidth_never_worsens_the_optimum(seed: int, factor: float, leaf: int) -> None:
    problem = random_problem(seed)
    faster = list(problem.leaf_s_per_byte)
    faster[leaf % len(faster)] /= factor
    one, other = (
        least_traffic(problem),
        least_traffic(replace(problem, leaf_s_per_byte=tuple(faster))),
    )
    if other.proven:
        assert other.price_s <= one.price_s * (1 + 1e-5)
    assert other.bound_s <= one.price_s * (1 + 1e-5)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 100_000))
def test_counts_bound_every_assignment(seed: int) -> None:
    """What patterns cost is never above what the assignment sends, group by group."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, experts=bool(seed % 2))
    free = np.repeat(np.arange(len(problem.leaf_slots)), problem.leaf_slots)
    assignment = rng.permutation(free)[: problem.needed].reshape(problem.stages, problem.slots)
    loads, counts = loads_of(problem, assignment), counts_of(problem, assignment)
    assert np.all(pattern_bytes(problem, counts) <= loads.leaf_bytes + 1e-9)
    again = assignment_of(problem, counts)
    assert np.array_equal(counts_of(problem, again), counts)
    if problem.traffic.expert_slots == 1 and not problem.traffic.wrap_bytes:
        assert loads_of(problem, again).leaf_bytes == pytest.approx(pattern_bytes(problem, counts))


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 100_000), wrap=st.booleans())
def test_the_dynamic_programme_finds_the_cheapest_pattern(seed: int, wrap: bool) -> None:
    rng = np.random.default_rng(seed)
    traffic = Traffic(ring_bytes=5.0, hop_bytes=float(rng.integers(0, 4)), wrap_bytes=2.0 * wrap)
    problem = MappingProblem(
        stages=3, slots=3, traffic=traffic, leaf_slots=(9, 4), leaf_s_per_byte=(1.0, 2.0), leaf_pod=(0, 0),
        pod_s_per_byte=(0.0,),
    )  # fmt: skip
    kinds = [
        BlockKind(room=9, s_per_byte=1.0, members=(0,)),
        BlockKind(room=4, s_per_byte=2.0, members=(1,)),
    ]
    prices = rng.uniform(0, 6, (2, 3))
    every = np.array(np.meshgrid(*[range(4)] * 3)).reshape(3, -1).T
    pricing = PatternPricing(problem, kinds)
    for kind, value, pattern in pricing.best(prices[:, :, None] * np.arange(10)):
        block = kinds[kind]
        fitting = every[every.sum(axis=1) <= block.room]
        costs = block.s_per_byte * pattern_bytes(problem, fitting) - fitting @ prices[kind]
        assert value == pytest.approx(costs.min())
        mine = block.s_per_byte * pattern_bytes(problem, pattern[None])[0] - pattern @ prices[kind]
        assert mine == pytest.approx(value)


def test_a_hand_worked_case() -> None:
    """Two stages of two slots on leaves of 3 and 1: one stage whole in the first leaf, the other cut.

    The whole stage costs nothing; the cut one puts its ring on both up-links. One of its slots has its
    neighbour in the first leaf, the other is one hop away from it: 10 + 3 on each of the two up-links.
    """
    problem = MappingProblem(
        stages=2,
        slots=2,
        traffic=Traffic(ring_bytes=10.0, hop_bytes=3.0),
        leaf_slots=(3, 1),
        leaf_s_per_byte=(1.0, 1.0),
        leaf_pod=(0, 0),
        pod_s_per_byte=(0.0,),
        host_leaves=(0, 1, 0, 0),
    )
    found = least_traffic(problem)
    assert found.proven
    assert found.price_s == pytest.approx(26.0)
    assert found.loads.leaf_bytes.tolist() == [13.0, 13.0]


def test_too_few_slots_are_refused() -> None:
    problem = replace(
        random_problem(0), leaf_slots=(1,) * len(random_problem(0).leaf_slots), host_leaves=()
    )
    if problem.needed > sum(problem.leaf_slots):
        with pytest.raises(InfeasibleError, match="slots needed"):
            least_traffic(problem)


def test_spread_counts_blocks() -> None:
    spread = spread_of(np.array([[0, 0, 1], [0, 2, 3]]))
    assert (spread.data_parallel_max, spread.pipeline_max, spread.most) == (3, 2, 3)


def test_the_relaxation_meets_its_bound() -> None:
    problem = random_problem(5).without_pods()
    found = relax(problem, [counts_of(problem, problem.hostname_assignment())])
    assert found.bound_s <= found.value_s * (1 + 1e-9)
    assert found.bound_s == pytest.approx(found.value_s, rel=1e-5, abs=1e-9)


def test_permutations_of_a_small_stage_cost_the_same() -> None:
    """Order inside a stage is free while all stages are permuted alike."""
    problem = random_problem(1)
    assignment = problem.hostname_assignment()
    costs = {
        round(loads_of(problem, assignment[:, list(turn)]).total_s, 9)
        for turn in permutations(range(problem.slots))
    }
    assert len(costs) == 1


def test_a_bound_below_zero_is_no_bound_to_count_from() -> None:
    """Patterns were enumerated from a bound that had been raised to 0, so a mapping for nothing was proven
    impossible: 21 was called optimal.
    """
    problem = MappingProblem(
        stages=2,
        slots=4,
        traffic=Traffic(hop_bytes=7.0),
        leaf_slots=(4, 3, 1, 1, 2),
        leaf_s_per_byte=(1.0, 1.0, 2.0, 3.0, 1.0),
        leaf_pod=(0, 0, 0, 0, 1),
        pod_s_per_byte=(1.0, 1.0),
    )
    found = least_traffic(problem)
    assert found.price_s == 0
    assert found.bound_s == 0
