"""Ways to deal layers to the pipeline ranks of one part of a cluster, and of all parts together.

The dense layers at the front of a mixture-of-experts model lie on the first ranks, as the model's order has
it: all but the last of the ranks that have some hold nothing else. Which ranks hold how many is one of
`leading_patterns`; under a pattern each of these ranks is dealt its layers by itself, as the ends of the
pipeline are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.bounds.stages import SplitCosts

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Pattern = tuple[int, ...]
"""Leading dense layers of each of the first ranks, 1 or more; empty without any."""


@cache
def leading_patterns(leading: int, ranks: int) -> tuple[Pattern, ...]:
    """Every way in which the first ranks may hold the leading dense layers, those on fewest ranks first.

    Parameters
    ----------
    leading
        Such layers, at least 0.
    ranks
        Of the pipeline, at least 1.
    """
    if not leading:
        return ((),)
    patterns: list[Pattern] = [(leading,)]
    if ranks > 1:
        for own in range(1, leading):
            patterns += [(own, *rest) for rest in leading_patterns(leading - own, ranks - 1)]
    return tuple(sorted(patterns, key=len))


class Single(NamedTuple):
    """A rank whose layers are counted by themselves: an end of the pipeline, or one with leading layers."""

    rank: int
    """Of the pipeline."""
    leading: int
    """Leading dense layers among its layers."""
    only_leading: bool
    """Whether it has no others, as the next rank has leading ones too."""


class SegmentRanks(NamedTuple):
    """The ranks of one segment under a pattern: singles in front, equal ranks, the last rank of all."""

    first: int
    """Of the pipeline."""
    singles: tuple[Single, ...]
    inner: int
    """Ranks that are no singles."""
    in_front: int
    """Singles before the inner ranks."""

    @property
    def inner_ranks(self) -> slice:
        """The inner ranks among all."""
        start = self.first + self.in_front
        return slice(start, start + self.inner)


def segment_ranks(own: slice, pp: int, pattern: Pattern) -> SegmentRanks:
    """The ranks of a segment under a pattern.

    Parameters
    ----------
    own
        The segment's ranks among all.
    pp
        Ranks of the pipeline.
    pattern
        Leading dense layers of the first of them.
    """
    singles = []
    for rank in range(own.start, own.stop):
        leading = pattern[rank] if rank < len(pattern) else 0
        if leading or rank in (0, pp - 1):
            singles.append(Single(rank, leading, rank < len(pattern) - 1))
    in_front = sum(each.rank < max(len(pattern), 1) for each in singles)
    return SegmentRanks(own.start, tuple(singles), own.stop - own.start - len(singles), in_front)


class Rooms(NamedTuple):
    """One way to deal layers to the ranks of a part."""

    fewest: int
    most: int
    """Layers of each rank; with k recomputed ones either both k or more, or both k or fewer."""
    by_rank: Sequence[Sequence[int]]
    """The most that fit, [leading dense layers among them][rank of the pipeline]; 0 where not even the
    fewest do. Only the first ranks have leading layers.
    """


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
    """Layers of an inner rank, at most."""
    work_s: FloatArray
    """Seconds of all ranks together."""
    fewest: FloatArray
    """Layers of each rank, at least."""
    singles: FloatArray
    """Layers of each single, [k, singles]."""


def options_of(ranks: SegmentRanks, costs: SplitCosts, ways: Sequence[Rooms]) -> Options:
    """Ways to deal each number of layers to a segment's ranks, less those that another beats in all.

    Parameters
    ----------
    ranks
        Of the segment.
    costs
        Of its part, with as many layers recomputed as the ways assume.
    ways
        What ranks have room for.
    """
    tables = [np.zeros((0, len(Options._fields) - 1 + len(ranks.singles)))]
    for way in ways:
        tables.append(_dealt(ranks, costs, way))
    columns = np.concatenate(tables).T
    plain = len(Options._fields) - 1
    layers, busiest_s, dense, experts, most, work_s, fewest = columns[:plain]
    return Options(layers, busiest_s, dense, experts, most, work_s, fewest, columns[plain:].T)


def _dealt(ranks: SegmentRanks, costs: SplitCosts, rooms: Rooms) -> FloatArray:
    """The columns of options under one way."""
    inner_rooms = np.array(rooms.by_rank[0][ranks.inner_ranks], dtype=np.int64)
    apart, dealt = _singles_together(ranks.singles, costs, rooms)
    most = _least_most(inner_rooms, rooms.fewest, costs.layers)
    rank_s = np.array([costs.rank_s(-1, n, 0) for n in range(costs.layers + 1)])
    has_inner = float(ranks.inner > 0)
    columns = [np.zeros((0, len(Options._fields) - 1 + len(ranks.singles)))]
    for layers in range(1, costs.layers + 1):
        rows = np.flatnonzero(apart[:, 0] <= layers)
        own_most = most[layers - apart[rows, 0].astype(np.int64)]
        rows, own_most = rows[own_most >= 0], own_most[own_most >= 0]
        if not len(rows):
            continue
        inner = [rank_s[own_most] * has_inner, own_most * costs.layer_load]
        inner.append(own_most * float(costs.experts))
        values = np.maximum(np.stack(inner, axis=1), apart[rows, 1:])
        kept = _pareto(values)
        rows, values, own_most = rows[kept], values[kept], own_most[kept]
        work = np.full(len(rows), _work_s(ranks, costs, rooms, layers))
        fewest, total = np.full(len(rows), rooms.fewest), np.full(len(rows), layers)
        columns.append(np.column_stack([total, values, own_most, work, fewest, dealt[rows]]))
    return np.concatenate(columns)


def _work_s(ranks: SegmentRanks, costs: SplitCosts, rooms: Rooms, layers: int) -> float:
    """Seconds of all ranks of a segment with so many layers: how they are dealt does not matter.

    Under a way all ranks recompute as many layers, or all of theirs; leading ones come first.
    """
    amount, singles = costs.recompute_layers, ranks.singles
    again = layers if rooms.most <= amount else amount * (ranks.inner + len(singles))
    leading = sum(each.leading for each in singles)
    again_leading = sum(min(amount, each.leading) for each in singles)
    seconds = (layers - leading) * costs.layer_s + leading * costs.leading_s
    seconds += (again - again_leading) * costs.layer_recompute_s
    seconds += again_leading * costs.leading_recompute_s
    of_first = costs.first_s * any(each.rank == 0 for each in singles)
    return seconds + of_first + costs.last_s * any(each.rank == costs.pp - 1 for each in singles)


def _singles_together(
    singles: Sequence[Single], costs: SplitCosts, rooms: Rooms
) -> tuple[FloatArray, FloatArray]:
    """Ways to deal layers to all singles: (layers in all, seconds of the busiest, most parameters outside
    experts, most layers with experts), [k, 4], and the layers of each, [k, singles].
    """
    table, dealt = np.zeros((1, 4)), np.zeros((1, 0))
    for single in singles:
        rows = _single(single, costs, rooms)
        left, right = (each.ravel() for each in np.indices((len(table), len(rows))))
        sums = table[left, 0] + rows[right, 0]
        joined = np.column_stack([sums, np.maximum(table[left, 1:], rows[right, 1:])])
        dealt = np.column_stack([dealt[left], rows[right, 0]])
        kept = [np.zeros(0, dtype=np.int64)]
        for layers in np.unique(sums[sums <= costs.layers]):
            equal = np.flatnonzero(sums == layers)
            kept.append(equal[_pareto(joined[equal, 1:])])
        index = np.concatenate(kept)
        table, dealt = joined[index], dealt[index]
    return table, dealt


def _single(single: Single, costs: SplitCosts, rooms: Rooms) -> FloatArray:
    """(layers, seconds, parameters outside experts, layers with experts) of one rank, [k, 4]."""
    rank, leading, only_leading = single
    room = rooms.by_rank[leading][rank]
    fewest = max(rooms.fewest, leading)
    most = min(room, leading) if only_leading else room
    rows = [
        (
            layers,
            costs.rank_s(rank, layers, leading),
            costs.rank_load(rank, layers, leading),
            costs.rank_experts(rank, layers, leading),
        )
        for layers in range(fewest, most + 1)
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _least_most(rooms: IntArray, fewest: int, layers: int) -> IntArray:
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


def _pareto(values: FloatArray) -> IntArray:
    """Rows, [k, columns], that no other row beats or equals in all columns; of equal ones the first."""
    no_more = np.all(values[:, None, :] <= values[None, :, :], axis=2)
    equal = no_more & no_more.T
    earlier = np.triu(np.ones(equal.shape, dtype=bool), 1)
    beaten = np.any(no_more & (~equal | earlier), axis=0)
    return np.flatnonzero(~beaten)


def options_together(options: Sequence[Options], layers: int) -> list[IntArray]:
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
