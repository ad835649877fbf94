"""Bounds of expert placement by counts, and rows solved by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.experts.bound import count_bound
from meshwright.planner.experts.heuristic import SearchBudget, search_counts, search_limits
from meshwright.planner.experts.packing import Rows, State, greedy_counts, pack, value_of
from meshwright.planner.experts.problem import PlacementLimits, SlotShape
from meshwright.planner.experts.solve import PlacementEffort, place_layers
from tests.soaked import examples

SIZES = ((7, 9, 3), (6, 8, 4), (6, 10, 5), (5, 8, 2))


def skewed(seed: int, experts: int, gpus: int) -> np.ndarray:
    load = np.random.default_rng(seed).lognormal(0, 1.3, experts)
    return np.asarray(load * (gpus / load.sum()))


@pytest.mark.soak
@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(SIZES))
def test_no_bound_is_above_the_optimum_of_all_counts(
    seed: int, sizes: tuple[int, int, int]
) -> None:
    check_count_bound(seed, sizes)


@pytest.mark.slow
def test_a_bound_is_not_above_the_optimum_of_all_counts() -> None:
    check_count_bound(0, SIZES[1])


def check_count_bound(seed: int, sizes: tuple[int, int, int]) -> None:
    experts, slots, gpus = sizes
    load = skewed(seed, experts, gpus)
    solved = place_layers(
        load[None, None],
        SlotShape(slots=slots, gpus=gpus, nodes=1),
        PlacementLimits(),
        PlacementEffort(gap=0.0),
    )
    best = float(solved.value[0])
    assert solved.gap[0] == 0
    assert (
        count_bound(load, slots, gpus, low=1.0, high=1.1 * best, work=0.2, steps=8).bound
        <= best + 1e-9
    )


@pytest.mark.parametrize("tries", [2, 12])
def test_the_search_betters_unsolved_rows_only(tries: int) -> None:
    loads = np.stack([skewed(s, 24, 8)[None] for s in range(3)])
    rows = Rows(loads=loads, slots=32, gpus=8, needed=np.array([0.0, 0.0, 50.0]))
    slots = pack(loads, greedy_counts(loads[:, 0], 32, 8), 8).slots
    before = value_of(rows, slots)
    state = State(slots.copy(), before.copy(), np.ones(3))
    budget = SearchBudget(limits=18, bound_steps=4, recounts=tries)
    search_limits(rows, state, 0.005, budget)
    search_counts(rows, state, 0.005, budget, 0)
    assert value_of(rows, state.slots) == pytest.approx(state.value)
    assert (state.value <= before).all()
    assert (state.value[:2] < before[:2]).any()
    # The third row's value is below what another node of its layer reaches.
    assert state.slots[2].tolist() == slots[2].tolist()
    assert (state.bound <= state.value).all()
