"""Rows so small that every choice of replica counts and every packing can be looked at: proven optimal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import partitions
from meshwright.planner.experts.balance.rows import LOAD_ROUNDING, Rows, State
from meshwright.planner.experts.problem import Loads, Slots

_MOST_PACKINGS = 20_000
_MOST_COUNTS = 5_000
_PART = 4_000_000
_BIG = 1e30


def is_enumerable(rows: Rows) -> bool:
    """Whether all packings of all counts are few enough."""
    experts = rows.loads.shape[2]
    few = partitions(rows.slots, rows.gpus) <= _MOST_PACKINGS
    return few and comb(rows.slots - 1, experts - 1) <= _MOST_COUNTS and rows.spread_nodes == 1


def enumerate_rows(rows: Rows, state: State) -> None:
    """The best placement of every row with a gap, in place; value and bound meet."""
    counts = _all_counts(rows.loads.shape[2], rows.slots, rows.gpus)
    for row in state.unsolved(rows, LOAD_ROUNDING).tolist():
        best = _best(rows.loads[row], counts, rows.gpus, state.value[row] * (1 - LOAD_ROUNDING / 2))
        if best is not None:
            state.offer(rows, np.array([row]), best[None])
        # Nothing is below the value by more than rounding.
        state.bound[row] = max(state.bound[row], state.value[row] * (1 - LOAD_ROUNDING / 2))


def _all_counts(experts: int, slots: int, gpus: int) -> Slots:
    """Counts [ways, experts] of at least one replica and at most one on a GPU, that fill the slots."""
    marks = np.array(list(combinations(range(slots - 1), experts - 1)), dtype=np.int64)
    edges = np.pad(
        marks.reshape(-1, experts - 1), ((0, 0), (1, 1)), constant_values=((0, 0), (-1, slots - 1))
    )
    counts = np.diff(edges, axis=1)
    return np.asarray(counts[(counts <= gpus).all(axis=1)])


@cache
def _packings(slots: int, gpus: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sets of slots that a GPU can hold [sets, slots of a GPU]; sets of every packing [packings, gpus]."""
    size = slots // gpus
    sets = list(combinations(range(slots), size))
    index = {gpu_set: i for i, gpu_set in enumerate(sets)}

    def split(remaining: tuple[int, ...]) -> Iterator[list[int]]:
        if not remaining:
            yield []
            return
        for rest in combinations(remaining[1:], size - 1):
            gpu_set = (remaining[0], *rest)
            for other_sets in split(tuple(i for i in remaining if i not in gpu_set)):
                yield [index[gpu_set], *other_sets]

    return np.array(sets, dtype=np.int64), np.array(
        list(split(tuple(range(slots)))), dtype=np.int64
    )


def _best(loads: Loads, counts: Slots, gpus: int, below: float) -> Slots | None:
    """Slots [gpus, slots of a GPU] with the least largest load, if there are any with less than `below`."""
    sets, packings = _packings(int(counts[0].sum()), gpus)
    best: tuple[float, Slots | None] = (below, None)
    step = max(1, _PART // packings.size)
    for part in (counts[i : i + step] for i in range(0, len(counts), step)):
        expert = np.stack(
            [np.repeat(np.arange(len(row_counts)), row_counts) for row_counts in part]
        )
        replica = np.take_along_axis(loads[None] / part[:, None], expert[:, None], axis=2)
        set_experts = expert[:, sets]
        is_doubled = (set_experts[..., 1:] == set_experts[..., :-1]).any(axis=2)
        load = replica[:, :, sets].sum(axis=3).max(axis=1) + _BIG * is_doubled
        # A slot whose lightest set is too heavy rules the counts out before their packings are looked at.
        lightest = np.stack(
            [load[:, (sets == i).any(axis=1)].min(axis=1) for i in range(sets.max() + 1)]
        )
        for way in np.flatnonzero(lightest.max(axis=0) < best[0]):
            top = load[way][packings].max(axis=1)
            lightest_packing = int(top.argmin())
            if top[lightest_packing] < best[0]:
                best = (float(top[lightest_packing]), expert[way][sets[packings[lightest_packing]]])
    return best[1]
