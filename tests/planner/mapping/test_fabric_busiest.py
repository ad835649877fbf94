"""The busiest up-link: against brute force and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.mapping.least_traffic import bound_by_room, least_busiest
from meshwright.planner.mapping.problem import MappingProblem, Traffic, check_assignment, loads_of
from meshwright.planner.mapping.slot_model import is_small
from tests.planner.mapping.test_fabric_mapping import brute, random_problem
from tests.planner.mapping.test_fabric_spread import scattered

SMALL = [
    seed
    for seed in range(400)
    if (one := random_problem(seed, experts=seed % 5 == 0)).needed * len(one.leaf_slots) <= 18
]


@pytest.mark.parametrize(
    "block", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_brute_force_agrees(block: int) -> None:
    """120 irregular cases, with expert groups, virtual stages and pods: the least, and proven."""
    assert len(SMALL) >= 120
    for seed in SMALL[block * 10 : block * 10 + 10]:
        problem = random_problem(seed, experts=seed % 5 == 0)
        _, busiest_s = brute(problem)
        found = least_busiest(problem)
        assert found.price_s == pytest.approx(busiest_s, rel=1e-9, abs=1e-12), seed
        assert found.bound_s <= busiest_s * (1 + 1e-9)
        assert found.proven, seed


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nothing_is_below_the_bound_by_room(seed: int) -> None:
    problem = random_problem(SMALL[seed % len(SMALL)], experts=SMALL[seed % len(SMALL)] % 5 == 0)
    _, busiest_s = brute(problem)
    assert bound_by_room(problem, 1_000_000) <= busiest_s * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_never_worse_than_hostname_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = scattered(
        int(rng.integers(1, 4)), 3, int(rng.integers(2, 5)), int(rng.integers(6, 15)), seed
    )
    found = least_busiest(problem, time_limit_s=4.0)
    check_assignment(problem, found.assignment)
    assert found.price_s == pytest.approx(loads_of(problem, found.assignment).busiest_s)
    assert found.bound_s <= found.price_s <= found.hostname_s * (1 + 1e-12)


def small_leaf_first(stages: int, slots: int) -> MappingProblem:
    """A leaf of 2 among leaves that a stage fills; no room to spare."""
    return MappingProblem(
        stages=stages,
        slots=slots,
        traffic=Traffic(ring_bytes=10.0, hop_bytes=1.0),
        leaf_slots=(2, slots - 2, *(slots,) * (stages - 1)),
        leaf_s_per_byte=(1.0,) * (stages + 1),
        leaf_pod=(0,) * (stages + 1),
        pod_s_per_byte=(0.0,),
    )


def test_the_smallest_leaf_bounds_it_by_hand() -> None:
    """The leaf of 2 cannot stay empty: it cuts a ring, 10, and has the neighbours of two slots outside, 2.

    Leaves of 20 have at least their neighbours outside: 20 hops for the first stage alone.
    """
    problem = replace(small_leaf_first(8, 20), leaf_s_per_byte=(1.0, *(0.1,) * 8))
    assert bound_by_room(problem, 1_000_000) == pytest.approx(12.0)
    assert not is_small(problem)
    found = least_busiest(problem)
    assert found.proven
    assert found.price_s == pytest.approx(12.0)


def test_one_model_proves_what_room_alone_does_not() -> None:
    """Four leaves of 2 want slots of the first or the last stage, which have 6 together: one gets a stage
    between them, with a neighbour outside on either side of both its slots.
    """
    problem = MappingProblem(
        stages=4,
        slots=3,
        traffic=Traffic(ring_bytes=10.0, hop_bytes=1.0),
        leaf_slots=(2, 2, 2, 2, 4),
        leaf_s_per_byte=(1.0, 1.0, 1.0, 1.0, 0.01),
        leaf_pod=(0,) * 5,
        pod_s_per_byte=(0.0,),
    )
    assert bound_by_room(problem, 1_000_000) == pytest.approx(12.0)
    found = least_busiest(problem)
    assert found.proven
    assert found.price_s == pytest.approx(14.0)
