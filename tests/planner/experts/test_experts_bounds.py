"""Bounds of expert placement by counts and by patterns, rows solved by enumeration, chains of exchanges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.experts.balance.chains import pass_on
from meshwright.planner.experts.balance.count_bound import count_bound
from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    greedy_counts,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.balance.patterns import counts_ruled_out, ruling_out
from meshwright.planner.experts.balance.place import place_layers
from meshwright.planner.experts.balance.recount import by_patterns, recount
from meshwright.planner.experts.balance.rows import Rows, State, value_of
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.problem import PlacementLimits, SlotShape

GRID = 8192
SLOW_MACHINE = settings(max_examples=15, deadline=None)


def skewed(seed: int, experts: int, gpus: int) -> np.ndarray:
    load = np.random.default_rng(seed).lognormal(0, 1.3, experts)
    return np.asarray(load * (gpus / load.sum()))


@SLOW_MACHINE
@given(st.integers(0, 10_000), st.sampled_from([(7, 9, 3), (6, 8, 4), (6, 10, 5), (5, 8, 2)]))
def test_no_bound_is_above_the_optimum_of_all_counts(
    seed: int, sizes: tuple[int, int, int]
) -> None:
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
    assert not counts_ruled_out(load, slots, gpus, best * (1 + 1e-9), tries=20, work=0.2).none


def test_patterns_rule_out_counts_by_hand() -> None:
    """Of four replicas on two GPUs three exceed half of the limit: no pattern has two of them."""
    sizes = np.array([0.6, 0.4]) * GRID
    worth = ruling_out(sizes.astype(np.int64), np.array([3, 1]), 2, 2, smallest=int(0.4 * GRID))
    assert worth is not None
    f = worth.at(sizes.astype(np.int64))
    assert 3 * f[0] + f[1] > 2
    assert max(f[0] + f[1], 2 * f[1]) <= 1 + 1e-9
    # Were there smaller replicas, two of 0.6 would still not share a GPU: f of a small one counts too.
    tiny = ruling_out(sizes.astype(np.int64), np.array([3, 1]), 2, 2, smallest=10)
    assert tiny is not None
    assert tiny.at(np.array([10, *sizes.astype(np.int64)]))[[0, 1]].sum() <= 1 + 1e-9
    half = np.array([GRID // 2], dtype=np.int64)
    assert ruling_out(half, np.array([4]), 2, 2, smallest=100) is None


def test_patterns_close_what_counts_leave_open() -> None:
    # One expert of 4.702 GPUs, one of 1.087, one of 0.846: a zipf layer's hottest node, 40 slots on 8 GPUs.
    small = (
        "279 137 123 80 58 55 51 46 40 33 32 31 30 30 29 29 28 25 24 24 23 23 23 21 20 20 18 17 16"
    )
    load = np.array([4.702, 1.087, 0.846, *(int(x) / 1000 for x in small.split())])
    load *= 8 / load.sum()
    shape = SlotShape(slots=40, gpus=8, nodes=1)
    solved = place_layers(
        load[None, None], shape, PlacementLimits(), PlacementEffort(exact=False, time_limit_s=5.0)
    )
    assert solved.gap[0] < 0.003
    assert solved.bound[0] > 1.015
    without = count_bound(
        load, 40, 8, low=1.0, high=float(solved.value[0]) * 0.999, work=0.2, steps=8
    )
    assert without.bound < 1.005


def three_gpus() -> tuple[np.ndarray, np.ndarray]:
    """The first must get the second GPU's 0.0388 for 0.0427; the second then gives 0.0615 to the third."""
    load = np.array(
        [
            0.9696,
            0.0427,
            0.0377,
            0.0367,
            0.9365,
            0.0615,
            0.0489,
            0.0388,
            0.8941,
            0.0784,
            0.0565,
            0.0476,
        ]
    )
    return load[None, None], np.arange(12).reshape(1, 3, 4)


def test_two_exchanges_in_a_row_where_one_does_not_help() -> None:
    loads, slots = three_gpus()
    packing = SlotPacking(slots=slots.copy(), loads=loads)
    exchange_to_improve(packing, 100, np.array([1.0]))
    stuck = packing.gpu_loads().max()
    assert stuck == pytest.approx(1.0867)
    pass_on(packing, 100, np.array([1.0]))
    assert packing.gpu_loads().max() < 1.0855


@SLOW_MACHINE
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_chains_keep_the_counts_and_never_raise_the_largest_load(seed: int, windows: int) -> None:
    loads = np.random.default_rng(seed).lognormal(0, 1, (2, windows, 20))
    counts = greedy_counts(loads.max(axis=1), 32, 8)
    packing = pack(loads, counts, 8)
    before = packing.gpu_loads().max(axis=(1, 2))
    pass_on(packing, 50, np.zeros(2))
    assert (packing.gpu_loads().max(axis=(1, 2)) <= before * (1 + 1e-12)).all()
    assert packing.counts.tolist() == counts.tolist()
    assert not has_duplicates(packing.slots).any()


@pytest.mark.parametrize("tries", [2, 12])
def test_other_counts_better_open_rows_only(tries: int) -> None:
    loads = np.stack([skewed(s, 24, 8)[None] for s in range(3)])
    rows = Rows(loads=loads, slots=32, gpus=8, floor=np.array([0.0, 0.0, 50.0]))
    slots = pack(loads, greedy_counts(loads[:, 0], 32, 8), 8).slots
    before = value_of(rows, slots)
    state = State(slots.copy(), before.copy(), np.ones(3))
    recount(rows, state, gap=0.005, tries=tries, seed=0)
    by_patterns(rows, state, gap=0.005, tries=tries, seed=0)
    assert value_of(rows, state.slots) == pytest.approx(state.value)
    assert (state.value <= before).all()
    assert (state.value[:2] < before[:2]).any()
    # The third row's value is below what another node of its layer reaches.
    assert state.slots[2].tolist() == slots[2].tolist()
    assert (state.bound <= state.value).all()
