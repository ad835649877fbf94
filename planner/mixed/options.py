"""Ways to deal layers to the pipeline ranks of one part of a cluster, and of all parts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.bounds.stages import SplitCosts

FloatArray = NDArray[np.float64]
InnerEnds = tuple[int, int, int]
"""Ranks of a segment that are no end of the pipeline, and whether it has the first and the last rank."""


class Rooms(NamedTuple):
    """One way to deal layers to the ranks of a part."""

    fewest: int
    most: int
    """Layers of each rank; with k recomputed ones either both k or more, or both k or fewer."""
    by_rank: Sequence[int]
    """The most that fit on each rank of the pipeline; 0 where not even the fewest do."""


class Options(NamedTuple):
    """Ways to deal layers to the ranks of one segment, arrays of shape [k]."""

    layers: FloatArray
    """In all."""
    busiest_s: FloatArray
    dense: FloatArray
    """Parameters outside experts on the rank that has most of them."""
    experts: FloatArray
    """Layers with experts on the rank that has most of them."""
    most: FloatArray
    """Layers of a rank that is no end of the pipeline, at most."""
    at_end: FloatArray
    """Layers of the rank that is an end of the pipeline; 0 where the segment has none."""
    again: FloatArray
    """Layers recomputed in full, in all."""
    fewest: FloatArray
    """Layers of each rank, at least."""


def options_of(ends: InnerEnds, own: slice, costs: SplitCosts, ways: Sequence[Rooms]) -> Options:
    """Ways to deal each number of layers to a segment's ranks, less those that another beats in all.

    Parameters
    ----------
    ends
        The segment's ranks that are no end of the pipeline, and whether it has the first and the last one.
    own
        Its ranks among all.
    costs
        Of its part, with as many layers recomputed as the ways assume.
    ways
        What ranks have room for.
    """
    amount, ranks = costs.recompute_layers, sum(ends)
    tables = [np.zeros((0, len(Options._fields)))]
    for way in ways:
        rooms = way._replace(by_rank=way.by_rank[own])
        if min(rooms.by_rank) >= rooms.fewest:
            rows = _dealt(ends, costs, rooms)
            layers = rows[:, 0]
            again = layers if rooms.most <= amount else np.full(len(layers), amount * ranks)
            fewest = np.full(len(layers), rooms.fewest)
            tables.append(np.column_stack([rows, again, fewest]))
    return Options(*np.concatenate(tables).T)


def _dealt(inner_ends: InnerEnds, costs: SplitCosts, rooms: Rooms) -> FloatArray:
    """The columns of options up to `at_end`, [k, 6]."""
    inner, first, last = inner_ends
    by_rank, fewest = rooms.by_rank, rooms.fewest
    inner_rooms = np.array(by_rank[first : len(by_rank) - last], dtype=np.int64)
    is_end = float(first or last)
    end_s, end_load = 0.0, 0.0
    end_experts = costs.last_experts * last
    ends = np.zeros(1, dtype=np.int64)
    if is_end:
        end_s = costs.first_s if first else costs.last_s
        end_load = costs.first_load if first else costs.last_load
        ends = np.arange(fewest, by_rank[0 if first else -1] + 1)
    most = _least_most(inner_rooms, fewest, costs.layers)
    rank_s = np.array([costs.rank_s(-1, n, 0) for n in range(costs.layers + 1)])
    has_experts = float(costs.experts)
    columns = [np.zeros((0, 6))]
    for layers in range(1, costs.layers + 1):
        at_end = ends[layers - ends >= 0]
        own_most = most[layers - at_end]
        at_end, own_most = at_end[own_most >= 0], own_most[own_most >= 0]
        if not len(at_end):
            continue
        busiest = np.maximum(rank_s[own_most] * (inner > 0), is_end * (rank_s[at_end] + end_s))
        dense = np.maximum(
            own_most * costs.layer_load, is_end * (at_end * costs.layer_load + end_load)
        )
        experts = has_experts * np.maximum(own_most, at_end) + 0.0 * busiest
        experts = np.maximum(experts, is_end * (has_experts * at_end + end_experts))
        rows = np.stack(
            [np.full(len(at_end), layers), busiest, dense, experts, own_most, at_end], axis=1
        )
        columns.append(rows[_pareto(rows[:, 1:4])])
    return np.concatenate(columns)


def _least_most(rooms: NDArray[np.int64], fewest: int, layers: int) -> NDArray[np.int64]:
    """For 0, 1, ... layers the least number that no rank needs to exceed; -1 where they do not go in.

    Every rank has `fewest` or more.
    """
    least = np.full(layers + 1, -1, dtype=np.int64)
    if not len(rooms):
        least[0] = 0
        return least
    if rooms.min() < fewest:
        return least
    reach = len(rooms) * fewest
    if reach <= layers:
        least[reach] = fewest
    for cap in range(fewest + 1, int(rooms.max()) + 1):
        more = int(np.minimum(rooms, cap).sum())
        least[reach + 1 : more + 1] = cap
        reach = more
    return least


def _pareto(values: FloatArray) -> NDArray[np.int64]:
    """Rows, [k, columns], that no other row beats or equals in all columns; of equal ones the first."""
    no_more = np.all(values[:, None, :] <= values[None, :, :], axis=2)
    equal = no_more & no_more.T
    earlier = np.triu(np.ones(equal.shape, dtype=bool), 1)
    beaten = np.any(no_more & (~equal | earlier), axis=0)
    return np.flatnonzero(~beaten)


def options_together(options: Sequence[Options], layers: int) -> list[NDArray[np.int64]]:
    """Rows of each segment's options that together deal out all layers.

    Parameters
    ----------
    options
        Of each segment.
    layers
        Of the model.
    """
    picks = [np.arange(len(options[0].layers))]
    dealt = options[0].layers
    for number, own in enumerate(options[1:], start=2):
        sums = dealt[:, None] + own.layers[None, :]
        good = sums == layers if number == len(options) else sums < layers
        left, right = np.nonzero(good)
        picks = [*(pick[left] for pick in picks), right]
        dealt = sums[left, right]
    return picks
