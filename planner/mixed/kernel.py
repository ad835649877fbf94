"""A kernel on a mixed cluster: a layout, its execution, and how many pipeline ranks each part has.

With t_r(n) the seconds and h_r(n) the bytes of rank r with n layers on the part where it runs, `best_split`
finds the split of the layers over the ranks and the number of recomputed ones that make the step shortest.
Within a part only the most layers of a rank count, apart from the ends of the pipeline, so that a part is
described by few options for each number of layers that it takes; the parts' options are then joined. Dense
layers in front of those with experts go to the first ranks in every way that they can.

Of a model whose layers differ (`ModelSpec.unlike_layers`) each rank holds one part of their sequence, with
the seconds and bytes of its own layers: `ways_in_order` has the ways to cut up what a segment holds.

A launch names one number k of layers that each rank recomputes in full. Of the splits, those count in which
the ranks of a part have all k layers or more, or all k or fewer, which they then recompute all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import hiding_windows
from meshwright.costmodel.estimate import LayerCosts, costs_of_times
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.mixed import (
    PlacedPart,
    Segment,
    SegmentHolds,
    hosts_short_gib,
    mixed_memory_gib,
    mixed_step,
    mixed_step_of_loads,
)
from meshwright.costmodel.states import kind_parameters_on_gpu, layer_parameters_on_gpu
from meshwright.costmodel.workload import Execution
from meshwright.errors import InternalError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import ALL_LAYERS, Parts, SplitCosts, may_begin, parts_of
from meshwright.planner.bounds.mappings import divisors_suffice
from meshwright.planner.bounds.paces import MemoryFit, host_limit_gib

# Ways to deal layers to the pipeline ranks of one part of a cluster, and of all parts together.
#
# The dense layers at the front of a mixture-of-experts model lie on the first ranks, as the model's order has
# it: all but the last of the ranks that have some hold nothing else. Which ranks hold how many is one of
# `leading_patterns`; under a pattern each of these ranks is dealt its layers by itself, as the ends of the
# pipeline are.


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
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
    by_rank: tuple[tuple[int, ...], ...]
    """The most that fit, [leading dense layers among them][rank of the pipeline]; 0 where not even the
    fewest do. Only the first ranks have leading layers.
    """


class _Within(NamedTuple):
    """What the ranks of a segment have room for in a step below a limit."""

    fewest: int
    """Layers that the segment takes at the least, as the others have no room for them."""
    ways: tuple[Rooms, ...]


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


def options_of(
    ranks: SegmentRanks, costs: SplitCosts, ways: Sequence[Rooms], fewest: int = 1
) -> Options:
    """Ways to deal each number of layers to a segment's ranks, less those that another beats in all.

    Parameters
    ----------
    ranks
        Of the segment.
    costs
        Of its part, with as many layers recomputed as the ways assume.
    ways
        What ranks have room for.
    fewest
        Layers that the segment takes at the least.
    """
    tables = [np.zeros((0, len(Options._fields) - 1 + len(ranks.singles)))]
    for way in ways:
        tables.append(_dealt(ranks, costs, way, fewest))
    columns = np.concatenate(tables).T
    plain = len(Options._fields) - 1
    layers, busiest_s, dense, experts, most, work_s, least = columns[:plain]
    return Options(layers, busiest_s, dense, experts, most, work_s, least, columns[plain:].T)


def _dealt(ranks: SegmentRanks, costs: SplitCosts, rooms: Rooms, fewest: int) -> FloatArray:
    """The columns of options under one way, with so many layers or more."""
    most_layers = min(_most_layers(rooms, ranks), costs.layers)
    if most_layers < fewest:
        return np.zeros((0, len(Options._fields) - 1 + len(ranks.singles)))
    inner_rooms = np.array(rooms.by_rank[0][ranks.inner_ranks], dtype=np.int64)
    apart, dealt = _singles_together(ranks.singles, costs, rooms)
    most = _least_most(inner_rooms, rooms.fewest, costs.layers)
    rank_s = np.array([costs.rank_s(-1, n, 0) for n in range(costs.layers + 1)])
    has_inner = float(ranks.inner > 0)
    columns = [np.zeros((0, len(Options._fields) - 1 + len(ranks.singles)))]
    for layers in range(max(fewest, 1), most_layers + 1):
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
        least, total = np.full(len(rows), rooms.fewest), np.full(len(rows), layers)
        columns.append(np.column_stack([total, values, own_most, work, least, dealt[rows]]))
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
        good = sums <= costs.layers
        if len(table) > 1:
            kept = [np.zeros(0, dtype=np.int64)]
            for layers in np.unique(sums[good]):
                equal = np.flatnonzero(sums == layers)
                kept.append(equal[_pareto(joined[equal, 1:])])
            good = np.concatenate(kept)
        table, dealt = joined[good], dealt[good]
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


# Ways to cut up a sequence of unlike layers among the ranks of one segment.
#
# A way is a path from the place where the segment begins to that where it ends, a rank at each step. Of the
# ways between two places those count that no other beats in the seconds of the busiest rank and in what the
# fullest rank holds, and, where a part of each rank's layers is recomputed, in the seconds of all ranks: else
# these are those of the layers between the places.


class InOrder(NamedTuple):
    """Ways to cut up the layers from one place to another among a segment's ranks, arrays of shape [k]."""

    begin: IntArray
    end: IntArray
    busiest_s: FloatArray
    dense: FloatArray
    """Parameters outside experts on the rank that has most of them."""
    experts: FloatArray
    """Parameters of experts on the rank that has most of them."""
    work_s: FloatArray
    """Seconds of all ranks together."""
    counts: IntArray
    """Layers of each rank, [k, ranks]."""

    def take(self, rows: IntArray) -> InOrder:
        """Some of them."""
        seconds = (self.busiest_s[rows], self.dense[rows], self.experts[rows], self.work_s[rows])
        return InOrder(self.begin[rows], self.end[rows], *seconds, self.counts[rows])


def all_in_order(ways: Sequence[InOrder]) -> InOrder:
    """Several lists of ways of one segment, at least one, as one."""
    columns: list[Any] = [np.concatenate(column) for column in zip(*ways, strict=True)]
    return InOrder(*columns)


WorkCounts = Literal["not", "less", "any"]
"""What the work of all ranks together means for ways between the same places: nothing; that less of it is
better; or that of two which differ in it neither is better."""


def ways_in_order(
    ranks: Sequence[Parts], begins: BoolArray, ends: BoolArray, work_counts: WorkCounts
) -> InOrder:
    """Ways to cut up the layers between places among ranks, less those that another beats in all.

    Parameters
    ----------
    ranks
        What each rank may hold.
    begins, ends
        Places between layers, those at both ends among them, where the ranks may begin and end; [places].
    work_counts
        What is kept of ways with unlike work.

    Returns
    -------
    InOrder
        k 0 or more.
    """
    is_turned = np.count_nonzero(ends) < np.count_nonzero(begins)
    if is_turned:
        ranks, begins, ends = [each.turned() for each in reversed(ranks)], ends, begins
    behind = [ends]
    for each in reversed(ranks):
        behind.append(np.any(each.may_be[:, behind[-1]], axis=1))
    behind.reverse()
    nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
    no_counts = np.zeros((0, len(ranks)), dtype=np.int64)
    ways = [InOrder(none, none, nothing, nothing, nothing, nothing, no_counts)]
    for source in np.flatnonzero(begins & behind[0]).tolist():
        state = _Reached(np.array([source]), np.zeros((1, 4)), np.zeros((1, 0), dtype=np.int64))
        for each, reachable in zip(ranks, behind[1:], strict=True):
            state = _one_further(state, each, reachable, work_counts)
        if is_turned:
            state = state._replace(counts=state.counts[:, ::-1])
        sources = np.full(len(state.place), source)
        first, last = (state.place, sources) if is_turned else (sources, state.place)
        busiest_s, dense, experts, work_s = state.values.T
        ways.append(InOrder(first, last, busiest_s, dense, experts, work_s, state.counts))
    return all_in_order(ways)


class _Reached(NamedTuple):
    """Ways for the ranks so far: where each ends, [k]; seconds of the busiest, most parameters outside
    experts and in them, and work, [k, 4]; and the layers of each rank, [k, ranks].
    """

    place: IntArray
    values: FloatArray
    counts: IntArray


def _one_further(
    state: _Reached, parts: Parts, reachable: BoolArray, work_counts: WorkCounts
) -> _Reached:
    """The ways with one rank more, which ends at a place from which the others reach the end."""
    places, values, counts = [], [], []
    for place in np.flatnonzero(reachable).tolist():
        rows = np.flatnonzero(parts.may_be[state.place, place])
        if not len(rows):
            continue
        begin = state.place[rows]
        taken = np.stack([column[begin, place] for column in parts[:3]], axis=1)
        grown = np.column_stack(
            [np.maximum(state.values[rows, :3], taken), state.values[rows, 3] + taken[:, 0]]
        )
        unbeaten = _unbeaten(grown, work_counts)
        places.append(np.full(len(unbeaten), place))
        values.append(grown[unbeaten])
        layers = np.abs(place - begin[unbeaten])
        counts.append(np.column_stack([state.counts[rows[unbeaten]], layers]))
    if not places:
        width = state.counts.shape[1] + 1
        none = np.zeros(0, dtype=np.int64)
        return _Reached(none, np.zeros((0, 4)), np.zeros((0, width), dtype=np.int64))
    return _Reached(np.concatenate(places), np.concatenate(values), np.concatenate(counts))


def _unbeaten(values: FloatArray, work_counts: WorkCounts) -> IntArray:
    """Rows that no other beats or equals, work apart where that does not count."""
    columns = [values[:, :3]]
    if work_counts != "not":
        # Sums in another order are no other work.
        work = np.round(values[:, 3:] / np.max(values[:, 3:]), 12)
        columns += [work] if work_counts == "less" else [work, -work]
    looked_at = np.column_stack(columns)
    order = np.lexsort(looked_at.T[::-1])
    return np.sort(order[_first_unbeaten(looked_at[order])])


_TOGETHER = 256
"""Rows that are compared at once."""


def _first_unbeaten(values: FloatArray) -> IntArray:
    """`_pareto` of rows that rise column by column, so that only earlier rows beat later ones."""
    unbeaten = np.zeros(0, dtype=np.int64)
    for start in range(0, len(values), _TOGETHER):
        rows = np.arange(start, min(start + _TOGETHER, len(values)))
        compared = values[rows]
        beaten = np.any(np.all(values[unbeaten][:, None] <= compared[None], axis=2), axis=0)
        rows = rows[~beaten]
        unbeaten = np.concatenate([unbeaten, rows[_pareto(values[rows])]])
    return unbeaten


def least_of_ways(
    segments: Sequence[Sequence[Sequence[Parts]]], together: np.ufunc, sign: float = 1.0
) -> float:
    """The least that the seconds of all ranks come to, of any way to cut up all layers.

    Parameters
    ----------
    segments
        Of each segment one or more lists of what its ranks may hold, of which one holds for all of them.
    together
        What the seconds of ranks come to: `np.maximum` for those of the busiest, `np.add` for their sum.
    sign
        What each rank's seconds are multiplied by: -1 for less the most instead of the least.

    Returns
    -------
    float
        Infinite where there is no way.
    """
    until = np.full(segments[0][0][0].may_be.shape[0], inf)
    until[0] = 0.0
    for ways in segments:
        of_ways = []
        for ranks in ways:
            reached = until
            for each in ranks:
                taken = np.where(each.may_be, sign * each.seconds, inf)
                reached = np.min(together(reached[:, None], taken), axis=0)
            of_ways.append(reached)
        until = np.min(of_ways, axis=0)
    return float(until[-1])


def joined_in_order(segments: Sequence[InOrder]) -> list[IntArray]:
    """Rows of each segment's ways that follow each other.

    Parameters
    ----------
    segments
        Of each segment, in the order of the pipeline.
    """
    picks = [np.arange(len(segments[0].end))]
    ends = segments[0].end
    for ways in segments[1:]:
        left, right = np.nonzero(ends[:, None] == ways.begin[None, :])
        picks = [*(pick[left] for pick in picks), right]
        ends = ways.end[right]
    return picks


Counts = tuple[int, ...]
"""Layers of each pipeline rank."""
Composition = tuple[tuple[int, int], ...]
"""(part of the cluster, pipeline ranks on it), in the order of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class MixedPrice:
    """The best split of a kernel."""

    layout: Layout
    """With `recompute_layers` decided."""
    counts: Counts
    step_time_s: float

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each [pipeline rank][virtual stage]."""
        return tuple((count,) for count in self.counts)


@dataclass(eq=False)
class PartCosts:
    """What layers cost on the ranks that a part runs, for any place of them along the pipeline."""

    placed: PlacedPart
    _costs: dict[int, SplitCosts] = field(default_factory=dict)
    _rooms: dict[int, tuple[Rooms, ...]] = field(default_factory=dict)
    _tables: dict[int, dict[tuple[bool, bool], Parts]] = field(default_factory=dict)

    @cached_property
    def _layer_costs(self) -> LayerCosts:
        return costs_of_times(self.placed.context, self.placed.times)

    def _fit(self, amount: int) -> MemoryFit:
        return MemoryFit(self.placed.workload, replace(self.placed.layout, recompute_layers=amount))

    def costs(self, amount: int) -> SplitCosts:
        """With so many layers of each rank recomputed in full."""
        if amount not in self._costs:
            unlike = [
                (float(np.asarray(kind.seconds)), float(np.asarray(kind.recompute_s)))
                for kind in self.placed.times.unlike
            ]
            self._costs[amount] = self._fit(amount).split_costs(self._layer_costs, unlike)
        return self._costs[amount]

    def in_order(self, amount: int, ranks: range) -> list[list[Parts]]:
        """What each of some ranks may hold of a sequence of unlike layers, with so many of its own
        recomputed: where all of these ranks have as many or more, and where all have as many or fewer.
        """
        costs, model, layout = self.costs(amount), self.placed.workload.model, self.placed.layout
        kinds = [inside for _, inside in kind_parameters_on_gpu(model, layout)]
        of_experts = kinds or [layer_parameters_on_gpu(model, layout)[2]]
        each = max(float(np.asarray(parameters)) for parameters in of_experts)
        ends = [(rank == 0, rank == costs.pp - 1) for rank in ranks]
        tables = self._tables.setdefault(amount, {})
        for rank, end in zip(ranks, ends, strict=True):
            if end not in tables:
                table = parts_of(costs, rank)
                tables[end] = table._replace(experts=each * table.experts)
        return [
            [tables[end]._replace(may_be=may_be) for end, may_be in zip(ends, way, strict=True)]
            for way in self._may_hold(amount, ranks)
        ]

    def _may_hold(self, amount: int, ranks: range) -> list[list[BoolArray]]:
        """Of each way and rank, whether it may hold the layers from one place to another."""
        pp, layers = int(self.placed.layout.pp), self.placed.workload.model.layers
        place = np.arange(layers + 1)
        number = place[None, :] - place[:, None]
        fits = {rank: self._fits_in_order(amount, rank) for rank in ranks}
        begins = may_begin(self.costs(amount).begins, layers)[:, None]
        ways = []
        for fewest, most in ways_of_recomputing(amount, layers):
            of_way = []
            for rank in ranks:
                may_be = (number >= fewest) & (number <= most) & fits[rank] & begins
                may_be &= (place[:, None] == 0) if rank == 0 else (place[:, None] >= rank)
                behind = layers - (pp - 1 - rank)
                is_end = (place == layers) if rank == pp - 1 else (place <= behind)
                of_way.append(np.asarray(may_be & is_end[None, :]))
            ways.append(of_way)
        return ways

    def _fits_in_order(self, amount: int, rank: int) -> BoolArray:
        """Whether a rank has HBM and room on its host for the layers from one place to another."""
        fit, model = self._fit(amount), self.placed.workload.model
        if model.unlike_bytes:
            return fit.fits_part(rank)
        place = np.arange(model.layers + 1)
        number = np.maximum(place[None, :] - place[:, None], 0)
        leading = np.minimum(np.maximum(fit.leading - place[:, None], 0), number)
        rooms = [
            self._room(fit, rank, 1, model.layers, in_front) for in_front in range(fit.leading + 1)
        ]
        return np.asarray(number <= np.array(rooms)[leading])

    def rooms(self, amount: int) -> tuple[Rooms, ...]:
        """What each rank of the pipeline has room for here, with so many layers recomputed."""
        if amount not in self._rooms:
            fit, layers = self._fit(amount), self.placed.workload.model.layers
            ways = ways_of_recomputing(amount, layers)
            self._rooms[amount] = tuple(self._way(fit, *way) for way in ways)
        return self._rooms[amount]

    def _way(self, fit: MemoryFit, fewest: int, most: int) -> Rooms:
        """What each rank has room for with so many layers; with leading ones too, where it may have some."""
        ranks, leading = range(int(self.placed.layout.pp)), fit.leading
        by_rank = [tuple(self._room(fit, rank, fewest, most, 0) for rank in ranks)]
        for own in range(1, leading + 1):
            rooms = (self._room(fit, rank, fewest, most, own) for rank in ranks[:leading])
            by_rank.append(tuple(rooms))
        return Rooms(fewest, most, tuple(by_rank))

    def _room(self, fit: MemoryFit, rank: int, fewest: int, most: int, leading: int) -> int:
        """The most layers for which a rank has HBM and room on its host, 0 where the fewest do not fit."""
        room = _room(fit, rank, fewest, most, leading)
        limit_gib = host_limit_gib(self.placed.workload) * (1 + 1e-9)
        if limit_gib == inf or not room:
            return room
        costs, fewest = self.costs(0), max(fewest, leading)
        _, _, parameters = layer_parameters_on_gpu(self.placed.workload.model, self.placed.layout)
        of_dense, of_expert = fit.offloaded_gib
        of_experts = of_expert * float(np.asarray(parameters))
        counts = range(fewest, room + 1)
        within = bisect_right(
            counts,
            limit_gib,
            key=lambda layers: (
                of_dense * costs.rank_load(rank, layers, leading)
                + of_experts * costs.rank_experts(rank, layers, leading)
            ),
        )
        return counts[within - 1] if within else 0

    def least_rooms(self, amount: int) -> list[int]:
        """Layers that fit on each rank of the pipeline, as many or more recomputed, however many lead, and
        whichever they are of unlike ones.
        """
        if self.placed.workload.model.unlike_layers:
            ranks = range(int(self.placed.layout.pp))
            return [_any_that_fit(self._fits_in_order(amount, rank)) for rank in ranks]
        plain, *leading = self.rooms(amount)[0].by_rank
        return [
            min([room, *(own[rank] for own in leading if rank < len(own))])
            for rank, room in enumerate(plain)
        ]


def ways_of_recomputing(amount: int, layers: int) -> list[tuple[int, int]]:
    """The fewest and the most layers of a rank in each way to recompute so many of them: as many or more, and
    as many or fewer, which are recomputed all then.
    """
    ways = [(max(amount, 1), layers)] if amount <= layers else []
    return [*ways, (1, min(amount, layers))] if amount > 1 else ways


def _any_that_fit(fits: BoolArray) -> int:
    """The most layers that fit wherever they lie in the model."""
    fitting = 0
    for layers in range(1, len(fits)):
        if not np.diagonal(fits, layers).all():
            break
        fitting = layers
    return fitting


def _room(fit: MemoryFit, rank: int, fewest: int, most: int, leading: int) -> int:
    """The most layers that fit on a rank, 0 where not even the fewest do; memory is linear in between."""
    fewest = max(fewest, leading)
    if fewest > most:
        return 0
    least_gib = fit.rank_gib(rank, fewest, leading)
    more_gib = fit.rank_gib(rank, fewest + 1, leading) - least_gib
    left_gib = fit.limit_gib * (1 + 1e-9) - least_gib
    return 0 if left_gib < 0 else min(fewest + int(left_gib / more_gib), most)


@dataclass(eq=False, kw_only=True)
class MixedKernel:
    """One layout under one execution, with so many pipeline ranks on each part."""

    layout: Layout
    """Plain numbers; the number of recomputed layers is open."""
    execution: Execution
    composition: Composition
    segments: tuple[Segment, ...]
    parts: tuple[PartCosts, ...]
    """Of each segment."""
    rest_s: float = 0.0
    """What follows the pipeline, at the least, before what a step loses on many nodes."""
    scale: float = 1.0
    """What that multiplies the step by."""
    price: MixedPrice | None = None
    """Of the best split; None where no split fits or beats what was known."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.segments[0].part.workload.model.layers

    @property
    def leading(self) -> int:
        """Dense layers at the front of the model, where others have experts."""
        return self.costs[0].leading

    @property
    def is_in_order(self) -> bool:
        """Whether layers differ, so that each rank holds a part of their sequence."""
        return bool(self.segments[0].part.workload.model.unlike_layers)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """Ways in which the first ranks may hold the leading layers."""
        return leading_patterns(self.leading, int(self.layout.pp))

    def ranks(self, pattern: Pattern) -> list[SegmentRanks]:
        """The ranks of each segment under a pattern."""
        pp = int(self.layout.pp)
        return [segment_ranks(each.own, pp, pattern) for each in self.segments]

    @property
    def price_s(self) -> float:
        """Seconds of its best split; infinite where it has no price."""
        return inf if self.price is None else self.price.step_time_s

    @cached_property
    def full(self) -> bool:
        """Whether it recomputes whole layers."""
        return bool(int(self.layout.recompute) & Recompute.FULL)

    @cached_property
    def costs(self) -> tuple[SplitCosts, ...]:
        """What layers cost on each segment, recomputation apart."""
        return tuple(each.costs(0) for each in self.parts)

    def best_split(self, cutoff_s: float) -> MixedPrice | None:
        """The fastest split that fits; None where none fits or beats `cutoff_s`.

        Recomputed layers are tried in rising order: once memory no longer limits a rank, more only cost more.
        """
        best: MixedPrice | None = None
        for amount in self.amounts():
            layout = replace(self.layout, recompute_layers=amount)
            if self.is_in_order:
                limit_s = cutoff_s if best is None else best.step_time_s
                best = self._best_in_order(layout, limit_s) or best
                if amount <= 1 and not self._memory_limits(amount):
                    break
                continue
            known: dict[tuple[SegmentRanks, _Within], Options] = {}
            for pattern in self.patterns:
                limit_s = cutoff_s if best is None else best.step_time_s
                within = self._within(amount, pattern, limit_s)
                if within is not None:
                    best = self._best_with(layout, pattern, limit_s, within, known) or best
            if amount <= 1 and not self._memory_limits(amount):
                break
        return best

    def _within(self, amount: int, pattern: Pattern, limit_s: float) -> list[_Within] | None:
        """What the ranks of each segment have room for in a step below a limit; None where that is not all
        layers.
        """
        busiest_s = self._most_busiest_s(amount, pattern, limit_s)
        if busiest_s <= 0:
            return None
        dealt = self.ranks(pattern)
        ways: list[tuple[Rooms, ...]] = []
        for ranks, part in zip(dealt, self.parts, strict=True):
            costs = part.costs(amount)
            ways.append(tuple(_in_time(way, ranks, costs, busiest_s) for way in part.rooms(amount)))
        most = [
            max(_most_layers(way, ranks) for way in rooms)
            for ranks, rooms in zip(dealt, ways, strict=True)
        ]
        spare = sum(most) - self.layers
        if spare < 0:
            return None
        return [
            _Within(max(layers - spare, 1), rooms) for layers, rooms in zip(most, ways, strict=True)
        ]

    def _most_busiest_s(self, amount: int, pattern: Pattern, limit_s: float) -> float:
        """Seconds of the busiest rank, at the most, in a step below a limit with so many layers recomputed;
        0 where no step is below it.

        A rank has at most n = limit / (m l) layers, l those of the shorter kind, so that of any n_r layers
        min(k, n_r) >= n_r min(1, k / n) are recomputed, each for no less than its cheaper kind. Ranks with
        leading layers alone take no others; elsewhere a leading layer, and what an end of the pipeline runs
        beside layers, is worth its share of another one.
        """
        micro_batches = int(self.layout.num_micro_batches)
        most = limit_s / micro_batches / min(shortest_s(costs) for costs in self.costs)
        share = min(1.0, amount / max(most, 1.0)) if self.full else 0.0
        again_s = [share * least_again_s(costs) for costs in self.costs]
        layer_s = [
            costs.layer_s + extra_s for costs, extra_s in zip(self.costs, again_s, strict=True)
        ]
        speed, units = 0.0, float(self.layers - self.leading)
        work_s = units * min(layer_s)
        rows = zip(self.ranks(pattern), self.costs, layer_s, again_s, strict=True)
        for ranks, costs, main_s, more_s in rows:
            alone = sum(each.only_leading for each in ranks.singles)
            speed += (ranks.inner + len(ranks.singles) - alone) / main_s
            for each in ranks.singles:
                beside_s = each.leading * (costs.leading_s + more_s)
                beside_s += costs.first_s * (each.rank == 0)
                beside_s += costs.last_s * (each.rank == int(self.layout.pp) - 1)
                work_s += beside_s
                units += 0.0 if each.only_leading else beside_s / main_s
        left_s = limit_s / self.scale * (1 + 1e-9) - self.rest_s - work_s
        most_s = left_s / (micro_batches - 1) if micro_batches > 1 else inf
        return most_s if left_s > 0 and units / speed <= most_s else 0.0

    def _memory_limits(self, amount: int) -> bool:
        """Whether some rank could not hold all layers with so many recomputed."""
        return any(
            min(part.least_rooms(amount)[segment.own]) < self.layers
            for segment, part in zip(self.segments, self.parts, strict=True)
        )

    def amounts(self) -> Iterator[int]:
        """Layers of a rank that may be recomputed in full, rising."""
        if not self.full:
            yield 0
            return
        workload = self.segments[0].part.workload
        if framework_of_stack(workload.framework).recompute_amount is not None:
            yield from range(1, self.layers)
        yield ALL_LAYERS

    def _best_with(
        self,
        layout: Layout,
        pattern: Pattern,
        cutoff_s: float,
        within: Sequence[_Within],
        known: dict[tuple[SegmentRanks, _Within], Options],
    ) -> MixedPrice | None:
        """The fastest split under a pattern; `known` has the options of segments, and learns them."""
        amount = int(layout.recompute_layers)
        costs = tuple(each.costs(amount) for each in self.parts)
        dealt = self.ranks(pattern)
        options = []
        for ranks, columns, room in zip(dealt, costs, within, strict=True):
            key = ranks, room
            if key not in known:
                known[key] = options_of(ranks, columns, room.ways, room.fewest)
            options.append(known[key])
        picks = options_together(options, self.layers)
        if not len(picks[0]):
            return None
        rows = [
            Options(*(column[pick] for column in columns))
            for columns, pick in zip(options, picks, strict=True)
        ]
        seconds = self._seconds(layout, rows)
        for best in np.argsort(seconds, kind="stable"):
            if seconds[best] >= cutoff_s:
                return None
            chosen = [Options(*(column[best : best + 1] for column in columns)) for columns in rows]
            counts = self._counts(amount, dealt, chosen)
            if self._fits(layout, counts):
                return self._checked(layout, counts, float(seconds[best]))
        return None

    def _fits(self, layout: Layout, counts: Counts) -> bool:
        """Whether a split fits into the HBM and onto the hosts of every part."""
        stages, segments = tuple((count,) for count in counts), self.segments_of(layout)
        limits = np.concatenate([np.full(each.ranks, each.part.limit_gib) for each in segments])
        fits = bool(np.all(mixed_memory_gib(segments, stages) <= limits))
        return fits and not any(hosts_short_gib(segments, stages))

    def _best_in_order(self, layout: Layout, cutoff_s: float) -> MixedPrice | None:
        """The fastest way to cut up unlike layers: first of those with the least busiest rank, then of all
        that may be faster.
        """
        amount = int(layout.recompute_layers)
        of_segments = [
            part.in_order(amount, range(each.first, each.first + each.ranks))
            for each, part in zip(self.segments, self.parts, strict=True)
        ]
        least_s = least_of_ways(of_segments, np.maximum)
        if least_s == inf:
            return None
        first = self._best_within(layout, of_segments, least_s * (1 + 1e-12), cutoff_s)
        limit_s = cutoff_s if first is None else first.step_time_s
        widest_s = self._longest_in_order_s(layout, of_segments, least_s, limit_s)
        if widest_s <= least_s:
            return first
        return self._best_within(layout, of_segments, widest_s, limit_s) or first

    def _longest_in_order_s(
        self,
        layout: Layout,
        of_segments: Sequence[Sequence[Sequence[Parts]]],
        least_s: float,
        limit_s: float,
    ) -> float:
        """Seconds of the busiest rank, at the most, in a step below a limit.

        The step grows by m less the fill with the busiest rank. It is counted with the least that ranks may
        work in all and hold, and with the least traffic that stays exposed for any work: what a window hides
        falls with it until all but a tail is hidden, and rises no more than the two slow each other down.
        """
        micro_batches = int(layout.num_micro_batches)
        weight = micro_batches - self.segments[0].part.workload.flushes
        if limit_s == inf or weight <= 0:
            return inf
        least_work_s = least_of_ways(of_segments, np.add)
        most_work_s = -least_of_ways(of_segments, np.add, -1.0)
        holdings = []
        for ways in of_segments:
            ranks = [each for way in ways for each in way if each.may_be.any()]
            dense = min(float(each.load[each.may_be].min()) for each in ranks)
            experts = min(float(each.experts[each.may_be].min()) for each in ranks)
            holdings.append(SegmentHolds(dense, experts, 1.0))
        busiest: dict[str, Floats] = {"ranks": least_s}
        steps = [
            mixed_step_of_loads(self.segments, busiest, work_s, holdings, layout=layout).parts
            for work_s in (least_work_s, most_work_s)
        ]
        exposed_s = min(float(np.asarray(parts["dp_comm"])) for parts in steps)
        slow_down = self.segments[0].part.context.constants.framework.dp_interference
        seconds = {name: float(np.asarray(part)) for name, part in steps[0].items()}
        scale = 1.0 + seconds["scale"] / (sum(seconds.values()) - seconds["scale"])
        left_out = ("scale", "dp_comm", "length_imbalance")
        at_least_s = sum(part for name, part in seconds.items() if name not in left_out)
        at_least_s = (at_least_s + exposed_s * (1.0 - slow_down)) * scale
        return least_s + (limit_s * (1 + 1e-9) - at_least_s) / (weight * scale)

    def _work_counts(self, layout: Layout) -> WorkCounts:
        """Whether ways between the same places differ in the work of all ranks, and in which sense.

        More work fills the pipeline for longer, and hides more traffic: of each second of a rank, in as many
        windows as there are.
        """
        if not 0 < int(layout.recompute_layers) < self.layers:
            return "not"
        windows = max(float(np.max(hiding_windows(each.part.context))) for each in self.segments)
        flushes = self.segments[0].part.workload.flushes
        return "less" if windows <= int(layout.pp) * flushes else "any"

    def _best_within(
        self,
        layout: Layout,
        of_segments: Sequence[Sequence[Sequence[Parts]]],
        busiest_s: float,
        cutoff_s: float,
    ) -> MixedPrice | None:
        """The fastest way below a cutoff in which no rank takes longer for a micro-batch."""
        work_counts = self._work_counts(layout)
        within = [
            [[each.no_longer_than(busiest_s) for each in way] for way in ways]
            for ways in of_segments
        ]
        starts, ends = self._borders(within)
        options = []
        for ways, begins, stops in zip(within, starts, ends, strict=True):
            each = [ways_in_order(way, begins, stops, work_counts) for way in ways]
            options.append(all_in_order(each))
        picks = joined_in_order(options)
        if not len(picks[0]):
            return None
        rows = [ways.take(pick) for ways, pick in zip(options, picks, strict=True)]
        holdings = [
            SegmentHolds(each.dense, each.experts, (each.end - each.begin).astype(np.float64))
            for each in rows
        ]
        work_s = np.sum([each.work_s for each in rows], axis=0)
        slowest_s = np.max([each.busiest_s for each in rows], axis=0)
        seconds = self._seconds_of(layout, slowest_s, work_s, holdings)
        for best in np.argsort(seconds, kind="stable"):
            if seconds[best] >= cutoff_s:
                return None
            counts = tuple(int(n) for each in rows for n in each.counts[best])
            if self._fits(layout, counts):
                return self._checked(layout, counts, float(seconds[best]))
        return None

    def _borders(
        self, of_segments: Sequence[Sequence[Sequence[Parts]]]
    ) -> tuple[list[BoolArray], list[BoolArray]]:
        """Places where each segment may begin, and where it may end, [places] each."""
        first = np.zeros(self.layers + 1, dtype=np.bool_)
        first[0] = True
        reached = [first]
        for ways in of_segments:
            ends = []
            for ranks in ways:
                places = reached[-1]
                for each in ranks:
                    places = np.any(each.may_be[places], axis=0)
                ends.append(places)
            reached.append(np.any(ends, axis=0))
        last = np.zeros(self.layers + 1, dtype=np.bool_)
        last[-1] = True
        behind = [last & reached[-1]]
        for ways, begins in zip(reversed(of_segments), reversed(reached[:-1]), strict=True):
            starts = []
            for ranks in ways:
                places = behind[-1]
                for each in reversed(ranks):
                    places = np.any(each.may_be[:, places], axis=1)
                starts.append(places)
            behind.append(np.any(starts, axis=0) & begins)
        behind.reverse()
        return behind[:-1], behind[1:]

    def _seconds(self, layout: Layout, rows: Sequence[Options]) -> FloatArray:
        """Of the step, for each row of options."""
        work = np.sum([options.work_s for options in rows], axis=0)
        busiest = np.max([options.busiest_s for options in rows], axis=0)
        _, _, each_expert = layer_parameters_on_gpu(self.segments[0].part.workload.model, layout)
        holdings = [
            SegmentHolds(options.dense, options.experts * np.asarray(each_expert), options.layers)
            for options in rows
        ]
        return self._seconds_of(layout, busiest, work, holdings)

    def _seconds_of(
        self,
        layout: Layout,
        busiest_s: FloatArray,
        work_s: FloatArray,
        holdings: Sequence[SegmentHolds],
    ) -> FloatArray:
        """Of the step, from the busiest rank, the work of all, and what the ranks of segments hold."""
        step = mixed_step_of_loads(
            self.segments, {"ranks": busiest_s}, work_s, holdings, layout=layout
        )
        return np.broadcast_to(np.asarray(step.seconds, dtype=np.float64), busiest_s.shape)

    def _counts(
        self, amount: int, dealt: Sequence[SegmentRanks], chosen: Sequence[Options]
    ) -> Counts:
        """Layers of each rank, late ranks, which hold fewer micro-batches, first."""
        counts: list[int] = []
        for ranks, option, part in zip(dealt, chosen, self.parts, strict=True):
            singles = [int(layers) for layers in option.singles[0]]
            most, fewest = int(option.most[0]), int(option.fewest[0])
            rooms = next(way for way in part.rooms(amount) if way.fewest == fewest)
            inner_rooms = rooms.by_rank[0][ranks.inner_ranks]
            inner = [fewest] * ranks.inner
            rest = int(option.layers[0]) - sum(singles) - sum(inner)
            for level in range(fewest + 1, most + 1):
                for rank in reversed(range(ranks.inner)):
                    if rest and inner_rooms[rank] >= level:
                        inner[rank] += 1
                        rest -= 1
            counts += singles[: ranks.in_front] + inner + singles[ranks.in_front :]
        return tuple(counts)

    def segments_of(self, layout: Layout) -> list[Segment]:
        """The segments with the number of recomputed layers decided."""
        return [replace(each, part=replace(each.part, layout=layout)) for each in self.segments]

    def _checked(self, layout: Layout, counts: Counts, seconds: float) -> MixedPrice:
        """The split with its price by the cost model as it stands. Raises InternalError where they differ."""
        amount = min(int(layout.recompute_layers), max(counts))
        decided = replace(layout, recompute_layers=amount)
        stages = tuple((count,) for count in counts)
        step_s = float(np.asarray(mixed_step(self.segments_of(decided), stages).seconds))
        if sum(counts) != self.layers or abs(step_s - seconds) > 1e-9 * step_s:
            raise InternalError(f"layers {counts} cost {step_s!r} s, the search said {seconds!r}")
        return MixedPrice(layout=decided, counts=counts, step_time_s=step_s)


def _most_layers(way: Rooms, ranks: SegmentRanks) -> int:
    """Layers that a segment has room for under a way; 0 where a rank has none for its fewest."""
    rooms = list(way.by_rank[0][ranks.inner_ranks])
    for single in ranks.singles:
        room = way.by_rank[single.leading][single.rank]
        rooms.append(min(room, single.leading) if single.only_leading else room)
    return sum(rooms) if min(rooms) >= way.fewest else 0


def _in_time(way: Rooms, ranks: SegmentRanks, costs: SplitCosts, limit_s: float) -> Rooms:
    """The way with no more layers on any rank of a segment than it works off in time."""
    by_rank = [list(rooms) for rooms in way.by_rank]
    if ranks.inner:
        most = _most_in_time(costs, -1, 0, way.fewest, limit_s)
        inner = ranks.inner_ranks
        by_rank[0][inner] = [min(room, most) for room in by_rank[0][inner]]
    for rank, leading, _ in ranks.singles:
        most = _most_in_time(costs, rank, leading, max(way.fewest, leading), limit_s)
        by_rank[leading][rank] = min(by_rank[leading][rank], most)
    return way._replace(by_rank=tuple(tuple(rooms) for rooms in by_rank))


def _most_in_time(costs: SplitCosts, rank: int, leading: int, fewest: int, limit_s: float) -> int:
    """Layers that a rank works off in time, 0 where it does not the fewest."""
    counts = range(fewest, costs.layers + 1)
    within = bisect_right(counts, limit_s, key=lambda layers: costs.rank_s(rank, layers, leading))
    return counts[within - 1] if within else 0


def shortest_s(costs: SplitCosts) -> float:
    """Of a layer of either kind, or of the shortest of unlike ones."""
    if costs.order:
        return min(seconds for seconds, _ in costs.order)
    return min(costs.layer_s, costs.leading_s) if costs.leading else costs.layer_s


def least_again_s(costs: SplitCosts) -> float:
    """Of recomputing a layer of either kind, or the cheapest of unlike ones."""
    if costs.order:
        return min(again_s for _, again_s in costs.order)
    if not costs.leading:
        return costs.layer_recompute_s
    return min(costs.layer_recompute_s, costs.leading_recompute_s)


# Numbers of shard groups that no pipeline through parts is faster with than with a divisor of them: on every
# part that divisor sends no more. A part's ranks hold any number of layers, one at the least: from where a
# layer fills its buckets, traffic grows in proportion to parameters, and what is no longer for one layer is
# so for any number of them.


def gains_by_grouping(contexts: Iterable[Context]) -> bool:
    """Whether a layout may be faster than with fewer shard groups.

    Parameters
    ----------
    contexts
        One layout, in plain numbers, as it lies on each part.

    Returns
    -------
    bool
        False where some divisor of its number of groups sends no more on any part.
    """
    suffice = [divisors_suffice(each, *_least_parameters(each)) for each in contexts]
    return not bool(np.any(np.all(suffice, axis=0)))


def _least_parameters(context: Context) -> tuple[float, float]:
    """The least parameters outside experts and in them, as far as it has some, of any layer on a GPU."""
    model = context.workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, context.layout)
    kinds = kind_parameters_on_gpu(model, context.layout)
    if not kinds:
        both = ((dense, 0.0, model.dense_layers), (rest, experts, model.moe_layers))
        kinds = tuple((outside, inside) for outside, inside, layers in both if layers)
    of_kinds = [(float(np.asarray(outside)), float(np.asarray(x))) for outside, x in kinds]
    inside = [own for _, own in of_kinds if own]
    return min(outside for outside, _ in of_kinds), min(inside, default=0.0)
