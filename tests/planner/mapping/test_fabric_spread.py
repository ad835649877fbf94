"""Spread of groups: against brute force, its bounds, and that it costs what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.mapping.least_traffic import SlotModel, is_small
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    Traffic,
    check_assignment,
    loads_of,
)
from meshwright.planner.mapping.spread import ExactReach, least_spread, reach_of
from meshwright.planner.mapping.spread_build import (
    ReachBound,
    ReachWeights,
    banded,
    gathered,
    shapes,
    shorter_hops,
    with_short_pipelines,
)
from tests.planner.mapping.test_fabric_mapping import every_assignment, random_problem
from tests.soaked import examples, some

WEIGHTS = (500, 300, 0, 1000, 700)
SMALL = [
    seed
    for seed in range(400)
    if (one := random_problem(seed, experts=seed % 5 == 0)).needed * len(one.leaf_slots) <= 18
]


def weights_of(seed: int) -> ReachWeights:
    return ReachWeights(data_parallel=WEIGHTS[seed % 5])


def scattered(pods: int, leaves: int, stages: int, slots: int, seed: int) -> MappingProblem:
    """Uneven leaves, exactly as many slots as needed, names that say nothing about the place."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, stages * slots), pods * leaves - 1, replace=False))
    free = np.diff([0, *cuts, stages * slots])
    return MappingProblem(
        stages=stages,
        slots=slots,
        traffic=Traffic(ring_bytes=80.0, hop_bytes=1.0),
        leaf_slots=tuple(free.tolist()),
        leaf_s_per_byte=tuple((1.0 / free).tolist()),
        leaf_pod=tuple(np.repeat(np.arange(pods), leaves).tolist()),
        pod_s_per_byte=(0.2,) * pods,
        host_leaves=tuple(rng.permutation(np.repeat(np.arange(pods * leaves), free)).tolist()),
    )


def key_of(problem: MappingProblem, weights: ReachWeights, assignment: IntArray) -> tuple[int, ...]:
    pods, leaves = (weights.key(reach) for reach in reach_of(problem, assignment))
    return (*pods, *leaves)


@pytest.mark.parametrize(
    "block",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((*range(4, 12), 2, 3))),
    ],
)
def test_brute_force_agrees(block: int) -> None:
    """Pods, leaves and traffic, in this order, with every weighting, over 120 irregular cases."""
    assert len(SMALL) >= 120
    for seed in SMALL[block * 10 : block * 10 + 10]:
        problem, weights = random_problem(seed, experts=seed % 5 == 0), weights_of(seed)
        every = [
            (*key_of(problem, weights, one), loads_of(problem, one).total_s)
            for one in every_assignment(problem)
        ]
        best = min(every)
        found = least_spread(problem, weights=weights)
        assert key_of(problem, weights, found.assignment) == best[:4], seed
        least_s = min(one[4] for one in every if one[:4] == best[:4])
        assert found.price_s == pytest.approx(least_s, rel=1e-6, abs=1e-9)
        assert found.proven
        assert weights.key(found.pods.bound) <= best[:2]
        assert weights.key(found.leaves.bound) <= min(one[2:4] for one in every)


def test_pods_are_shared_by_neighbouring_stages_where_that_reaches_less_far() -> None:
    """Four pods of 4, four stages of 4: a pod for each stage makes pipelines touch 4 pods, a pod for all
    stages of a replica makes stages touch 4, and two stages in each half of the pods make it 2 of both.
    """
    problem = MappingProblem(
        stages=4,
        slots=4,
        traffic=Traffic(ring_bytes=10.0, hop_bytes=1.0),
        leaf_slots=(4,) * 4,
        leaf_s_per_byte=(1.0,) * 4,
        leaf_pod=(0, 1, 2, 3),
        pod_s_per_byte=(1.0,) * 4,
    )
    found = least_spread(problem)
    assert found.pods.hostname == (1, 4)
    assert found.pods.reached == found.pods.bound == (2, 2)
    assert found.proven
    pipelines = least_spread(problem, weights=ReachWeights(data_parallel=0))
    assert pipelines.pods.reached == (4, 1)


def test_leaves_are_proven_of_the_mapping_that_fewer_pods_led_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer pods are found by a mapping that touches more leaves than the one before, and then the solver
    gives up: that the one before touched the fewest leaves says nothing of this one.
    """
    problem = MappingProblem(
        stages=3,
        slots=4,
        traffic=Traffic(ring_bytes=1.0, hop_bytes=1.0),
        leaf_slots=(5, 2, 5, 4, 5),
        leaf_s_per_byte=(1.0,) * 5,
        leaf_pod=(0, 0, 1, 2, 2),
        pod_s_per_byte=(1.0,) * 3,
    )
    proven = least_spread(problem)
    assert proven.leaves.proven
    solve, asked = SlotModel.search, iter(range(9))
    monkeypatch.setattr(
        SlotModel, "search", lambda *args: solve(*args) if next(asked) == 0 else None
    )
    given_up = least_spread(problem)
    assert given_up.pods.reached == proven.pods.reached
    assert given_up.leaves.reached > proven.leaves.reached
    assert given_up.pods.proven
    assert not given_up.leaves.proven


def test_traffic_has_a_bound_where_one_model_holds_the_instance_alone() -> None:
    """Without that model nothing is known of the traffic of other mappings that reach as far."""
    large = scattered(3, 4, 4, 18, seed=1)
    found = least_spread(large)
    assert not is_small(large)
    assert found.bound_s == 0 < found.price_s
    assert not found.bounded
    assert not found.proven


def test_the_bound_on_traffic_is_never_above_the_traffic_that_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solver rounds; and it stops at a bound that is below, which is printed as it is."""
    problem = random_problem(SMALL[0], experts=False)
    exact = least_spread(problem)
    assert exact.proven
    for factor, share in ((2.0, 1.0), (0.5, 0.5)):

        def of_solver(*_: Any, factor: float = factor, **__: Any) -> ExactReach:
            return ExactReach(
                assignment=exact.assignment,
                levels_proven=2,
                traffic_bound_s=factor * exact.price_s,
            )

        monkeypatch.setattr("meshwright.planner.mapping.spread.least_reach", of_solver)
        found = least_spread(problem)
        assert found.bound_s == share * found.price_s > 0


@settings(max_examples=examples(16, 8), deadline=None)
@given(seed=st.integers(0, 10_000), weight=st.sampled_from(WEIGHTS))
def test_never_worse_than_hostname_order_and_never_below_the_bound(seed: int, weight: int) -> None:
    rng = np.random.default_rng(seed)
    pods, leaves, stages, slots = (
        int(rng.integers(*span)) for span in ((2, 5), (3, 5), (3, 6), (14, 24))
    )
    problem = scattered(pods, leaves, stages, slots, seed)
    weights = ReachWeights(data_parallel=weight)
    found = least_spread(problem, weights=weights)
    check_assignment(problem, found.assignment)
    key = key_of(problem, weights, found.assignment)
    assert key <= key_of(problem, weights, problem.hostname_assignment())
    assert weights.key(found.pods.bound) <= key[:2]
    assert weights.key(found.leaves.bound) <= key[2:]


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_counting_refutes_nothing_that_is_there(seed: int) -> None:
    """Whatever a random assignment reaches is possible, at both levels."""
    rng = np.random.default_rng(seed)
    problem = scattered(3, 3, int(rng.integers(2, 5)), int(rng.integers(6, 9)), seed)
    slots = rng.permutation(np.repeat(np.arange(9), problem.leaf_slots)).reshape(problem.stages, -1)
    slots = np.sort(slots, axis=int(rng.integers(2)))
    rooms = np.bincount(problem.pod_of, weights=problem.leaf_slots).astype(int).tolist()
    for blocks, reach in zip((rooms, problem.leaf_slots), reach_of(problem, slots), strict=True):
        assert ReachBound(blocks, problem.stages, problem.slots).possible(reach)


def test_the_bound_by_hand() -> None:
    """Twelve pods of 100 under 8 stages of 150: D stages' and P replicas' blocks need D P >= 12."""
    bound = ReachBound([100] * 12, 8, 150)
    assert bound.least(ReachWeights()) == (3, 4)
    assert not bound.possible((3, 3))
    assert not bound.possible((5, 2))
    assert bound.possible((6, 2))
    assert ReachBound([101, 99] * 6, 8, 150).least(ReachWeights()) == (4, 4)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_bands_place_every_slot_once(seed: int) -> None:
    problem = scattered(3, 4, 6, 15, seed)
    for shape in list(shapes(problem))[::7]:
        made = banded(problem, shape)
        check_assignment(problem, made)
        assert np.bincount(made.ravel()).tolist() == list(problem.leaf_slots)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_swaps_change_no_stage(seed: int) -> None:
    problem = scattered(3, 4, 6, 15, seed)
    before = problem.hostname_assignment()
    after = shorter_hops(problem, before)
    assert loads_of(problem, after).total_s < loads_of(problem, before).total_s
    assert reach_of(problem, after)[0][1] <= reach_of(problem, before)[0][1]
    most = reach_of(problem, before)[0][1] - 1
    tight = gathered(problem, before, (most, problem.stages), [problem.stages])
    assert np.array_equal(np.sort(after, axis=1), np.sort(before, axis=1))
    if tight is not None:
        assert np.array_equal(np.sort(tight, axis=1), np.sort(before, axis=1))
        assert reach_of(problem, tight)[0][1] <= most


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_ties_go_to_pipelines_that_touch_less(seed: int) -> None:
    problem = scattered(3, 4, 6, 15, seed)
    before = shorter_hops(problem, problem.hostname_assignment())
    after = with_short_pipelines(problem, before)
    assert loads_of(problem, after).total_s <= loads_of(problem, before).total_s * (1 + 1e-9)
    assert np.array_equal(np.sort(after, axis=1), np.sort(before, axis=1))
    assert reach_of(problem, after)[0][1] <= reach_of(problem, before)[0][1]


def test_a_tie_by_hand() -> None:
    """Both replicas meet in the pod between: with the last stage swapped each goes back where it came from,
    and as many hops cross.
    """
    problem = MappingProblem(
        stages=3,
        slots=2,
        traffic=Traffic(ring_bytes=10.0, hop_bytes=1.0),
        leaf_slots=(2,) * 3,
        leaf_s_per_byte=(1.0,) * 3,
        leaf_pod=(0, 1, 2),
        pod_s_per_byte=(1.0,) * 3,
    )
    before = np.array([[0, 1], [2, 2], [1, 0]])
    after = with_short_pipelines(problem, before)
    assert (reach_of(problem, before)[0], reach_of(problem, after)[0]) == ((2, 3), (2, 2))
    assert loads_of(problem, after).total_s == loads_of(problem, before).total_s
