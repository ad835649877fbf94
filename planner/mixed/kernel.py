"""A kernel on a mixed cluster: a layout, its execution, and how many pipeline ranks each part has.

Each rank holds one part of the sequence of layers, with the seconds and bytes that these take on its own part
of the cluster. `best_split` finds the partition of the sequence and the number of recomputed layers that make
the step shortest, as 1F1B is played. No step is below the longest sequence of passes that turns round at some
rank (`schedules.longest_way_s`); where the places between the parts of the cluster are fixed, so is what lies
ahead of a rank and behind it, and the least of the longest ways comes from a shortest path over the ranks.
Partitions whose ways leave room for a faster step are listed and played.

A launch names one number k of layers that each rank recomputes in full. Of the splits, those count in which
the ranks of a part have all k layers or more, or all k or fewer, which they then recompute all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.estimate import LayerCosts, costs_of_times
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import ROUNDING, Floats, Layout
from meshwright.costmodel.mixed import (
    PipelineLoad,
    PlacedPart,
    Segment,
    SegmentHolds,
    hand_overs_s,
    hosts_short_gib,
    mixed_memory_gib,
    mixed_step,
    mixed_step_of_loads,
    played_pipeline_s,
    slower_on_nodes,
)
from meshwright.costmodel.schedules import least_by_work, least_of_segments_s, longest_way_s
from meshwright.costmodel.states import kind_parameters_on_gpu, layer_parameters_on_gpu
from meshwright.costmodel.workload import Execution
from meshwright.errors import InternalError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import (
    ALL_LAYERS,
    BackwardSeconds,
    Parts,
    SplitCosts,
    may_begin,
    of_backward,
    partitions_of,
    parts_of,
)
from meshwright.planner.bounds.mappings import divisors_suffice
from meshwright.planner.bounds.paces import MemoryFit, host_limit_gib

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Rooms(NamedTuple):
    """One way to deal layers to the ranks of a part."""

    fewest: int
    most: int
    """Layers of each rank; with k recomputed ones either both k or more, or both k or fewer."""
    by_rank: tuple[tuple[int, ...], ...]
    """The most that fit, [leading dense layers among them][rank of the pipeline]; 0 where not even the
    fewest do. Only the first ranks have leading layers.
    """


# Partitions of the layers among the ranks of a kernel.


class PlayedSplit(NamedTuple):
    """A split that fits, and the seconds of its step."""

    layout: Layout
    counts: tuple[int, ...]
    seconds: float


class _Caps(NamedTuple):
    """Parameters outside experts, and in them, that a rank of each segment may have at the most."""

    dense: tuple[float, ...]
    experts: tuple[float, ...]


class _Borders(NamedTuple):
    """Places between the segments, and what a step takes with these."""

    bound_s: float
    """At the least."""
    rest_s: float
    """What follows the pipeline, at the least."""
    places: tuple[int, ...]
    """Where each segment begins, and where the last one ends."""
    has_one_work: bool
    """Whether all ranks together work as long in every partition."""


_PLAYED_FIRST = 64
"""Partitions with the least longest way that are played before others."""
_MOST_PLAYED = 2000
"""Partitions within a limit that are played one by one."""
_MOST_CAPS = 50
"""Limits on parameters under which the partitions with the same borders are looked at."""


class Partitions:
    """Every partition of the layers among the ranks of some segments, so many recomputed in one way."""

    def __init__(
        self,
        segments: Sequence[Segment],
        layout: Layout,
        ranks: Sequence[Parts],
        sent_s: FloatArray,
        slower: float,
    ) -> None:
        """`ranks`: what each rank of the pipeline may hold, hand-overs apart, which are `sent_s`; on many
        nodes a step is so many times longer.
        """
        self.unlisted_s = inf
        """What the partitions take at the least that were too many to be played."""
        self._segments, self._layout, self._pp = segments, layout, len(ranks)
        self._flushes = segments[0].part.workload.flushes
        self._each_m = int(layout.num_micro_batches) // self._flushes
        self._slower = slower
        self._sent_s = float(sent_s.sum())
        self._ranks = [
            each._replace(seconds=each.seconds + sum(sent), backward_s=each.backward_s + sent[1])
            for each, sent in zip(ranks, sent_s.T.tolist(), strict=True)
        ]

    def best(self, cutoff_s: float, rest_s: float = 0.0) -> PlayedSplit | None:
        """The fastest partition below a cutoff; None where none is, or none fits.

        What follows the pipeline takes `rest_s` or more, before what a step loses on many nodes.

        Parameters
        ----------
        cutoff_s
            Seconds of a step that a partition must beat; infinite where any will do.
        rest_s
            What follows the pipeline at the least, seconds.
        """
        best: PlayedSplit | None = None
        limit_s = cutoff_s
        for borders in self._borders(cutoff_s, rest_s):
            if borders.bound_s >= limit_s:
                break
            found = self._best_between(borders, limit_s)
            if found is not None:
                best, limit_s = found, found.seconds
        return best

    # Places between the segments, those of the least bounds first.

    def _borders(self, cutoff_s: float, rest_s: float) -> list[_Borders]:
        """All places where a partition may beat the cutoff, the least bounds first."""
        most_s = (cutoff_s / self._slower * (1 + ROUNDING) - rest_s) / self._flushes
        longest_s = most_s / self._each_m
        tables = [
            [
                np.where(each.may_be & (each.seconds <= longest_s), column, inf)
                for column in (each.seconds, -each.seconds, each.load, each.experts)
            ]
            for each in self._ranks
        ]
        of_segments = [tables[each.own] for each in self._segments]
        layers = self._ranks[0].may_be.shape[0] - 1
        places, columns = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 0, 5))
        for own in of_segments[:-1]:
            begins, row_of = np.unique(places[:, -1], return_inverse=True)
            reached = _least_along(own, begins)
            row, end = np.nonzero(np.isfinite(reached[0])[row_of])
            places = np.concatenate([places[row], end[:, None]], axis=1)
            own_columns = reached[:, row_of[row], end].T[:, None, :]
            columns = np.concatenate([columns[row], own_columns], axis=1)
        turned = [[column.T for column in rank] for rank in reversed(of_segments[-1])]
        reached = _least_along(turned, np.array([layers]))[:, 0]
        row = np.flatnonzero(np.isfinite(reached[0])[places[:, -1]])
        places, columns = places[row], columns[row]
        columns = np.concatenate([columns, reached[:, places[:, -1]].T[:, None, :]], axis=1)
        of_ranks = np.array([each.ranks for each in self._segments])
        pipeline_s = least_of_segments_s(of_ranks, self._each_m, columns[..., 0], columns[..., 2])
        pipeline_s *= 1 - ROUNDING
        good = np.flatnonzero(pipeline_s < most_s)
        if not len(good):
            return []
        ends = np.column_stack([places[good], np.full(len(good), layers)])
        return self._bounded(ends, columns[good], self._flushes * pipeline_s[good])

    def _bounded(
        self, ends: IntArray, columns: FloatArray, pipeline_s: FloatArray
    ) -> list[_Borders]:
        """Borders [k, segments + 1] with what each segment takes at the least, [k, segments, 5], and all
        micro-batches.
        """
        work_s = columns[..., 0].sum(axis=1)
        less_most_s = columns[..., 1].sum(axis=1)
        taken = np.diff(ends, axis=1).astype(np.float64)
        holdings = [
            SegmentHolds(columns[:, at, 3], columns[:, at, 4], taken[:, at])
            for at in range(len(self._segments))
        ]
        nothing_s = np.zeros(len(ends))
        rest_s = self._steps_s(work_s - self._sent_s, nothing_s, holdings)
        differs = np.abs(work_s + less_most_s) > ROUNDING * work_s
        if np.any(differs):
            # What is exposed falls with the window until it is hidden, and rises by interference at most.
            of_most_s = self._steps_s(-less_most_s - self._sent_s, nothing_s, holdings)
            slow_down = self._segments[0].part.context.constants.framework.dp_interference
            less_s = np.minimum(rest_s, of_most_s) * (1.0 - slow_down)
            rest_s = np.where(differs, less_s, rest_s)
        bound_s = (rest_s + self._slower * pipeline_s) * (1 - ROUNDING)
        order = np.argsort(bound_s, kind="stable")
        return [
            _Borders(
                float(bound_s[row]),
                float(rest_s[row] * (1 - ROUNDING)),
                tuple(ends[row].tolist()),
                not differs[row],
            )
            for row in order.tolist()
        ]

    def _steps_s(
        self, work_s: FloatArray, played_s: FloatArray, holdings: Sequence[SegmentHolds]
    ) -> FloatArray:
        """Steps of some partitions, [k]."""
        load = PipelineLoad(work_s, played_s)
        nothing: dict[str, Floats] = {"ranks": np.zeros(len(work_s))}
        step = mixed_step_of_loads(self._segments, nothing, load, holdings, layout=self._layout)
        return np.broadcast_to(np.asarray(step.seconds, dtype=np.float64), work_s.shape)

    # Partitions with given borders.

    def _best_between(self, borders: _Borders, limit_s: float) -> PlayedSplit | None:
        """The fastest partition with some borders below a limit.

        Of those whose ways leave room for a faster step all are played where they are few. Else the step is
        no less than that of the least longest way with what follows the fastest that was played, unless some
        segment's ranks have fewer parameters: that is looked at with limits on these.
        """
        best: PlayedSplit | None = None
        between = _Between(self._ranks, self._segments, borders.places, self._each_m)
        number = len(self._segments)
        waiting = [_Caps((inf,) * number, (inf,) * number)]
        looked_at = set[_Caps]()
        while waiting:
            caps = waiting.pop()
            if caps in looked_at:
                continue
            looked_at.add(caps)
            ways = between.ways(caps)
            least_s = ways.least_s * self._flushes * self._slower * (1 - ROUNDING)
            if borders.rest_s + least_s >= limit_s:
                continue
            if len(looked_at) > _MOST_CAPS:
                self.unlisted_s = min(self.unlisted_s, borders.rest_s + least_s)
                continue
            cuts, _ = ways.listed(ways.least_s * (1 + ROUNDING), _PLAYED_FIRST)
            first = self._fastest(cuts, limit_s)
            if first.split is not None:
                best, limit_s = first.split, first.split.seconds
            if borders.rest_s + least_s >= limit_s:
                continue
            room_s = (limit_s - borders.rest_s) / self._slower / self._flushes
            cuts, is_every = ways.listed(room_s * (1 + ROUNDING), _MOST_PLAYED)
            played = self._fastest(cuts, limit_s)
            if played.split is not None:
                best, limit_s = played.split, played.split.seconds
            if is_every:
                continue
            rest_s = first.rest_s if borders.has_one_work else borders.rest_s
            of_same_s = rest_s + least_s
            if of_same_s < limit_s * (1 - ROUNDING):
                self.unlisted_s = min(self.unlisted_s, of_same_s)
            waiting += _lower(caps, first.holds)
        return best

    def _fastest(self, cuts: IntArray, limit_s: float) -> _Fastest:
        """The fastest of some partitions, [k, pp + 1] places, that fits in a step below a limit."""
        parts = [(cuts[:, rank], cuts[:, rank + 1]) for rank in range(self._pp)]
        seconds, backward_s, dense, experts = (
            np.stack(
                [getattr(each, name)[at] for each, at in zip(self._ranks, parts, strict=True)],
                axis=-1,
            )
            for name in ("seconds", "backward_s", "load", "experts")
        )
        played_s = played_pipeline_s(self._segments, seconds - backward_s, backward_s)
        holdings = [
            SegmentHolds(
                dense[:, each.own].max(axis=1),
                experts[:, each.own].max(axis=1),
                (cuts[:, each.own.stop] - cuts[:, each.own.start]).astype(np.float64),
            )
            for each in self._segments
        ]
        steps_s = self._steps_s(seconds.sum(axis=1) - self._sent_s, played_s, holdings)
        order = np.argsort(steps_s, kind="stable")
        at = int(order[0])
        holds = [(float(each.dense[at]), float(each.expert[at])) for each in holdings]  # type: ignore[index]
        rest_s = float(steps_s[at] - self._slower * played_s[at])
        for row in order.tolist():
            if steps_s[row] >= limit_s:
                break
            counts = tuple(np.diff(cuts[row]).tolist())
            if self._fits(counts):
                split = PlayedSplit(self._layout, counts, float(steps_s[row]))
                return _Fastest(split, rest_s, holds)
        return _Fastest(None, rest_s, holds)

    def _fits(self, counts: tuple[int, ...]) -> bool:
        """Whether a split fits into the HBM and onto the hosts of every part."""
        stages, segments = tuple((count,) for count in counts), self._segments
        limits = np.concatenate([np.full(each.ranks, each.part.limit_gib) for each in segments])
        fits = bool(np.all(mixed_memory_gib(segments, stages) <= limits))
        return fits and not any(hosts_short_gib(segments, stages))


class _Fastest(NamedTuple):
    """The fastest of some partitions."""

    split: PlayedSplit | None
    """None where none that fits beats the limit."""
    rest_s: float
    """What follows the pipeline of the fastest, whether or not it fits."""
    holds: list[tuple[float, float]]
    """Parameters outside experts and in them on the fullest ranks of each segment then."""


def _lower(caps: _Caps, holds: Sequence[tuple[float, float]]) -> Iterator[_Caps]:
    """Caps within which some segment's ranks hold less than these; nothing is less than none."""
    for at, held in enumerate(holds):
        for name, parameters in zip(_Caps._fields, held, strict=True):
            if parameters > 0:
                column = list(getattr(caps, name))
                column[at] = parameters * (1 - ROUNDING)
                yield caps._replace(**{name: tuple(column)})


def _least_along(ranks: Sequence[Sequence[FloatArray]], begins: IntArray) -> FloatArray:
    """From some places to every other: the least of the sum of seconds, of less that sum, of the longest, and
    of the most parameters outside experts and in them, of any way over some ranks; [5, begins, places].

    Of each rank the tables [begin, end] of seconds, less seconds and both parameters, infinite where it may
    not hold what lies between.
    """
    places = ranks[0][0].shape[0]
    reached = np.full((5, len(begins), places), inf)
    reached[:, np.arange(len(begins)), begins] = 0.0
    together = (np.add, np.add, np.maximum, np.maximum, np.maximum)
    for seconds, less_s, dense, experts in ranks:
        tables = (seconds, less_s, seconds, dense, experts)
        before = reached
        reached = np.stack(
            [
                np.min(both(own[:, :, None], table[None]), axis=1)
                for both, own, table in zip(together, before, tables, strict=True)
            ]
        )
    return reached


class _Between:
    """Partitions whose segments lie between certain places."""

    def __init__(
        self,
        ranks: Sequence[Parts],
        segments: Sequence[Segment],
        borders: Sequence[int],
        micro_batches: int,
    ) -> None:
        self._segment_of = [at for at, each in enumerate(segments) for _ in range(each.ranks)]
        pp, places = len(ranks), ranks[0].may_be.shape[0]
        fixed = {each.first: place for each, place in zip(segments, borders, strict=False)}
        fixed[pp] = borders[-1]
        ahead = [_only(places, 0)]
        for rank, own in enumerate(ranks):
            reached = np.any(own.may_be[ahead[-1]], axis=0)
            ahead.append(reached & _only(places, fixed.get(rank + 1)))
        behind = [ahead[-1]]
        for rank, own in zip(reversed(range(pp)), reversed(ranks), strict=True):
            reached = np.any(own.may_be[:, behind[-1]], axis=1)
            behind.append(reached & ahead[rank])
        self._places = [np.flatnonzero(each) for each in reversed(behind)]
        """Where each rank may begin, and where the last one ends."""
        around = [np.ix_(*pair) for pair in pairwise(self._places)]
        own_s, self._dense, self._experts, self._may_be, backward_s = (
            [np.asarray(column[at]) for column, at in zip(columns, around, strict=True)]
            for columns in zip(*ranks, strict=True)
        )
        seconds = [
            np.where(may_be, each, inf) for may_be, each in zip(self._may_be, own_s, strict=True)
        ]
        ahead_s = [np.zeros(len(self._places[0]))]
        behind_s = [np.zeros(1)]
        for each in seconds:
            ahead_s.append(np.min(ahead_s[-1][:, None] + each, axis=0))
        for each in reversed(seconds):
            behind_s.append(np.min(each + behind_s[-1][None], axis=1))
        behind_s.reverse()
        self._way_s = [
            longest_way_s(
                own - back,
                back,
                ahead_s=ahead_s[rank][:, None],
                behind_s=behind_s[rank + 1][None],
                warm_up=pp - 1 - rank,
                num_micro_batches=micro_batches,
            )
            for rank, (own, back) in enumerate(zip(own_s, backward_s, strict=True))
        ]

    def ways(self, caps: _Caps) -> _Ways:
        """The longest ways that turn round at each rank, within caps.

        Parameters
        ----------
        caps
            Parameters that ranks of each segment may have at the most.
        """
        way_s = []
        for rank, seconds in enumerate(self._way_s):
            at = self._segment_of[rank]
            may_be = self._may_be[rank] & (self._dense[rank] <= caps.dense[at])
            may_be &= self._experts[rank] <= caps.experts[at]
            way_s.append(np.where(may_be, seconds, inf))
        return _Ways(self._places, way_s)


def _only(places: int, place: int | None) -> BoolArray:
    """True of one place, or of all."""
    return np.ones(places, dtype=np.bool_) if place is None else np.arange(places) == place


class _Ways:
    """Longest ways of a step that turn round at each rank, by where it begins and ends."""

    def __init__(self, places: Sequence[IntArray], way_s: Sequence[FloatArray]) -> None:
        self._places, self._way_s = places, way_s
        ahead_s = [np.zeros(len(places[0]))]
        behind_s = [np.zeros(len(places[-1]))]
        for each in way_s:
            ahead_s.append(np.min(np.maximum(ahead_s[-1][:, None], each), axis=0))
        for each in reversed(way_s):
            behind_s.append(np.min(np.maximum(each, behind_s[-1][None]), axis=1))
        behind_s.reverse()
        self._through_s = [
            np.maximum(np.maximum(ahead_s[rank][:, None], each), behind_s[rank + 1][None])
            for rank, each in enumerate(way_s)
        ]
        self.least_s = float(np.min(ahead_s[-1], initial=inf))
        """The least that the longest way of any partition comes to; infinite without one."""

    def listed(self, limit_s: float, most: int) -> tuple[IntArray, bool]:
        """Partitions with no way longer than a limit, [k, pp + 1] places; so many of them where these are
        more, and whether these are all.

        Parameters
        ----------
        limit_s
            Longest way that a partition may have, seconds of a flush.
        most
            Partitions that come back; of more, some spread evenly over all.
        """
        within = [each <= limit_s for each in self._through_s]
        positions, is_every = partitions_of(within, most)
        columns = zip(self._places, positions.T, strict=True)
        return np.stack([places[at] for places, at in columns], axis=1), is_every


@lru_cache(maxsize=16)
def borders_of(layers: int, segments: int) -> IntArray:
    """All places where segments with a layer or more may begin, and the end of the last, [k, segments + 1].

    Parameters
    ----------
    layers
        Of the model.
    segments
        At least 2.
    """
    inner = list(combinations(range(1, layers), segments - 1))
    return np.array([(0, *each, layers) for each in inner], dtype=np.int64)


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

    @cached_property
    def _unlike(self) -> list[tuple[float, float]]:
        """Seconds of each kind of unlike layers, and of recomputing one; empty where layers are alike."""
        return [
            (float(np.asarray(kind.seconds)), float(np.asarray(kind.recompute_s)))
            for kind in self.placed.times.unlike
        ]

    def _fit(self, amount: int) -> MemoryFit:
        return MemoryFit(self.placed.workload, replace(self.placed.layout, recompute_layers=amount))

    def costs(self, amount: int) -> SplitCosts:
        """With so many layers of each rank recomputed in full.

        Parameters
        ----------
        amount
            Layers of each rank that are recomputed in full, 0 or more.
        """
        if amount not in self._costs:
            self._costs[amount] = self._fit(amount).split_costs(self._layer_costs, self._unlike)
        return self._costs[amount]

    def _in_sequence(self, amount: int) -> tuple[SplitCosts, SplitCosts]:
        """The same with the seconds of every layer in order: of both passes, and of backward ones alone."""
        costs, times = self.costs(amount), self.placed.times
        modules = self.placed.workload.model.mtp_layers
        backward_s = [float(np.asarray(kind.backward_s)) for kind in times.layers]
        of_ends = (times.embedding, times.head, times.mtp)
        first_s, head_s, module_s = (
            0.0 if each is None else float(np.asarray(each.backward_s)) for each in of_ends
        )
        last_s = head_s + modules * module_s
        if not costs.order:
            main, leading = costs.layers - costs.leading, costs.leading
            each = (backward_s[0],) * leading + (backward_s[-1],) * main
            ends = BackwardSeconds(first_s, last_s, each)
            costs = replace(costs, order=tuple(_in_turn(costs)), backward=ends)
        else:
            ends = BackwardSeconds(first_s, last_s, tuple(backward_s))
            costs = self._fit(amount).split_costs(self._layer_costs, self._unlike, ends)
        return costs, of_backward(costs)

    def in_order(self, amount: int, way: int, ranks: range) -> list[Parts]:
        """What each of some ranks may hold of the sequence of layers, with so many of its own recomputed in
        one of `ways_of_recomputing`.

        Parameters
        ----------
        amount
            Layers of each rank that are recomputed in full, 0 or more.
        way
            Which of `ways_of_recomputing`, from 0.
        ranks
            Of the pipeline, those that lie on the part.
        """
        model, layout = self.placed.workload.model, self.placed.layout
        kinds = [inside for _, inside in kind_parameters_on_gpu(model, layout)]
        of_experts = kinds or [layer_parameters_on_gpu(model, layout)[2]]
        each = max(float(np.asarray(parameters)) for parameters in of_experts)
        last, tables = int(layout.pp) - 1, self._tables.setdefault(amount, {})
        parts = []
        for rank in ranks:
            end = rank == 0, rank == last
            if end not in tables:
                both, backward = (parts_of(costs, rank) for costs in self._in_sequence(amount))
                tables[end] = both._replace(
                    experts=each * both.experts, backward_s=backward.seconds
                )
            parts.append(tables[end]._replace(may_be=self._may_hold(amount, way, rank)))
        return parts

    def _may_hold(self, amount: int, way: int, rank: int) -> BoolArray:
        """Whether a rank may hold the layers from one place to another."""
        pp, layers = int(self.placed.layout.pp), self.placed.workload.model.layers
        place = np.arange(layers + 1)
        number = place[None, :] - place[:, None]
        fewest, most = ways_of_recomputing(amount, layers)[way]
        may_be = (number >= fewest) & (number <= most)
        may_be &= may_begin(self.costs(amount).begins, layers)[:, None]
        may_be &= self._fits_in_order(amount, way, rank)
        may_be &= (place[:, None] == 0) if rank == 0 else (place[:, None] >= rank)
        is_end = (place == layers) if rank == pp - 1 else (place <= layers - (pp - 1 - rank))
        return np.asarray(may_be & is_end[None, :])

    def _fits_in_order(self, amount: int, way: int, rank: int) -> BoolArray:
        """Whether a rank has HBM and room on its host for the layers from one place to another."""
        model = self.placed.workload.model
        if model.unlike_bytes:
            return self._fit(amount).fits_part(rank)
        by_leading = [each[rank] for each in self.rooms(amount)[way].by_rank if rank < len(each)]
        place = np.arange(model.layers + 1)
        number = np.maximum(place[None, :] - place[:, None], 0)
        in_front = len(by_leading) - 1
        leading = np.minimum(np.maximum(in_front - place[:, None], 0), number)
        return np.asarray(number <= np.array(by_leading)[leading])

    def rooms(self, amount: int) -> tuple[Rooms, ...]:
        """What each rank of the pipeline has room for here, with so many layers recomputed.

        Parameters
        ----------
        amount
            Layers of each rank that are recomputed in full, 0 or more.
        """
        if amount not in self._rooms:
            fit, layers = self._fit(amount), self.placed.workload.model.layers
            ways = ways_of_recomputing(amount, layers)
            self._rooms[amount] = tuple(self._way(fit, *way) for way in ways)
        return self._rooms[amount]

    def most_rooms(self, amount: int, way: int) -> list[int]:
        """The most layers that each rank of the pipeline may have room for, whichever they are.

        Parameters
        ----------
        amount
            Layers of each rank that are recomputed in full, 0 or more.
        way
            Which of `ways_of_recomputing`, from 0.
        """
        model, ranks = self.placed.workload.model, range(int(self.placed.layout.pp))
        if model.unlike_bytes:
            return [model.layers for _ in ranks]
        by_leading = self.rooms(amount)[way].by_rank
        return [max(own[rank] for own in by_leading if rank < len(own)) for rank in ranks]

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

        Parameters
        ----------
        amount
            Layers of each rank that are recomputed in full, 0 or more.
        """
        if self.placed.workload.model.unlike_layers:
            ranks = range(int(self.placed.layout.pp))
            return [_any_that_fit(self._fits_in_order(amount, 0, rank)) for rank in ranks]
        plain, *leading = self.rooms(amount)[0].by_rank
        return [
            min([room, *(own[rank] for own in leading if rank < len(own))])
            for rank, room in enumerate(plain)
        ]


def ways_of_recomputing(amount: int, layers: int) -> list[tuple[int, int]]:
    """The fewest and the most layers of a rank in each way to recompute so many of them: as many or more, and
    as many or fewer, which are recomputed all then.

    Parameters
    ----------
    amount
        Layers of a rank that a launch recomputes in full, 0 or more; `ALL_LAYERS` for all of them.
    layers
        Of the model, from 1.
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
    unlisted_s: float = inf
    """What the splits take at the least that were too many to be played; infinite without any."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.segments[0].part.workload.model.layers

    @property
    def price_s(self) -> float:
        """Seconds of its best split; infinite where it has no price."""
        return inf if self.price is None else self.price.step_time_s

    @cached_property
    def full(self) -> bool:
        """Whether it recomputes whole layers."""
        return bool(self.layout.recomputes_layers)

    @cached_property
    def costs(self) -> tuple[SplitCosts, ...]:
        """What layers cost on each segment, recomputation apart."""
        return tuple(each.costs(0) for each in self.parts)

    def best_split(self, cutoff_s: float) -> MixedPrice | None:
        """The fastest split that fits; None where none fits or beats `cutoff_s`.

        Recomputed layers are tried in rising order: once memory no longer limits a rank, more only cost more.

        Parameters
        ----------
        cutoff_s
            Seconds of a step; infinite where any split will do.
        """
        best: PlayedSplit | None = None
        layers, sent_s = self.layers, hand_overs_s(self.segments)
        slower = 1.0 + slower_on_nodes(self.segments)
        for amount in self.amounts():
            limit_s = cutoff_s if best is None else best.seconds
            pipeline_s = (limit_s / self.scale * (1 + ROUNDING) - self.rest_s) / self._flushes
            if self._least_pipeline_s(amount, pipeline_s, sent_s) > pipeline_s:
                break
            layout = replace(self.layout, recompute_layers=amount)
            segments = self.segments_of(layout)
            ways = ways_of_recomputing(amount, layers)
            for chosen in product(range(len(ways)), repeat=len(segments)):
                if not self._finds_room(amount, chosen, pipeline_s):
                    continue
                ranks = [
                    own
                    for each, part, way in zip(self.segments, self.parts, chosen, strict=True)
                    for own in part.in_order(amount, way, range(each.own.start, each.own.stop))
                ]
                partitions = Partitions(segments, layout, ranks, sent_s, slower)
                found = partitions.best(limit_s if best is None else best.seconds, self.rest_s)
                best = found or best
                self.unlisted_s = min(self.unlisted_s, partitions.unlisted_s)
            if amount <= 1 and not self._memory_limits(amount):
                break
        return None if best is None else self._checked(best)

    @property
    def _flushes(self) -> int:
        return self.segments[0].part.workload.flushes

    @property
    def _each_m(self) -> int:
        return int(self.layout.num_micro_batches) // self._flushes

    def _least_pipeline_s(self, amount: int, limit_s: float, sent_s: FloatArray) -> float:
        """What a flush takes at the least with so many layers of a rank recomputed, or more.

        A rank has at most n = limit / (m l) layers, l those of the shortest kind, so that of any n_r layers
        min(k, n_r) >= n_r min(1, k / n) are recomputed, each for no less than the cheapest.
        """
        share = 0.0
        if self.full and limit_s < inf:
            most = limit_s / self._each_m / min(shortest_s(costs) for costs in self.costs)
            share = min(1.0, amount / max(most, 1.0))
        again_s = [share * least_again_s(costs) for costs in self.costs]
        layers_s = np.array([_layers_s(costs) for costs in self.costs]) + np.array(again_s)[:, None]
        ends_s = np.zeros(int(self.layout.pp))
        ends_s[0], ends_s[-1] = self.costs[0].first_s, self.costs[-1].last_s
        beside_s = ends_s + sent_s.sum(axis=0)
        work_s = float(np.sum(np.min(layers_s, axis=0)) + np.sum(beside_s))
        ranks = np.array([each.ranks for each in self.segments])
        pace_s = np.repeat(np.min(layers_s, axis=1), ranks)
        busiest_s = (self.layers + float(np.sum(beside_s / pace_s))) / float(np.sum(1.0 / pace_s))
        pp = int(self.layout.pp)
        busiest_s = max(busiest_s, work_s / pp)
        lines = least_by_work(pp, self._each_m)
        return max(float(a * work_s + b * busiest_s) for a, b in lines) * (1 - ROUNDING)

    def _finds_room(self, amount: int, chosen: Sequence[int], limit_s: float) -> bool:
        """Whether all layers find a place in one way of recomputing so many on each segment, by what ranks
        have room for, and time in a flush of so many seconds: every layer the shortest of its part.
        """
        m = self._each_m
        rows = list(zip(self.segments, self.parts, chosen, strict=True))
        layer_s = [_layers_s(costs) for costs in self.costs]
        again = [self._again_s(at, amount, way) for at, way in enumerate(chosen)]
        work_s = float(np.sum(np.min(layer_s, axis=0)))
        work_s += sum(each.ranks * own[0] for each, own in zip(self.segments, again, strict=True))
        lines = least_by_work(int(self.layout.pp), m)
        longest_s = min(float((limit_s - a * work_s) / b) for a, b in lines if b > 0)
        bounds = []
        for costs, way, (of_rank_s, of_layer_s) in zip(self.costs, chosen, again, strict=True):
            fewest, most = ways_of_recomputing(amount, self.layers)[way]
            in_time = (longest_s - of_rank_s) / (shortest_s(costs) + of_layer_s) * (1 + ROUNDING)
            bounds.append((fewest, int(min(most, in_time)) if in_time > 0 else 0))
        in_all = sum(
            each.ranks * most for each, (_, most) in zip(self.segments, bounds, strict=True)
        )
        if in_all < self.layers or any(most < fewest for fewest, most in bounds):
            return False
        if self._least_between_s(amount, chosen, bounds) > limit_s:
            return False
        found = 0
        for (each, part, way), (fewest, most) in zip(rows, bounds, strict=True):
            rooms = [min(most, room) for room in part.most_rooms(amount, way)[each.own]]
            if min(rooms) < fewest:
                return False
            found += sum(rooms)
        return found >= self.layers

    def _again_s(self, at: int, amount: int, way: int) -> tuple[float, float]:
        """What recomputing adds at the least on a segment: to each rank, and to each layer."""
        if not self.full:
            return 0.0, 0.0
        again_s, (_, most) = (
            least_again_s(self.costs[at]),
            ways_of_recomputing(amount, self.layers)[way],
        )
        return (0.0, again_s) if most <= amount else (amount * again_s, 0.0)

    def _least_between_s(
        self, amount: int, chosen: Sequence[int], bounds: Sequence[tuple[int, int]]
    ) -> float:
        """What a flush takes at the least with the best places between the segments, each rank with as many
        layers as bounds allow; infinite where these hold not all layers.
        """
        places = borders_of(self.layers, len(self.segments))
        work_s, busiest_s, fits = [], [], np.ones(len(places), dtype=np.bool_)
        for at, (each, costs) in enumerate(zip(self.segments, self.costs, strict=True)):
            fewest, most = bounds[at]
            fixed_s, extra_s = self._again_s(at, amount, chosen[at])
            taken_s = np.concatenate([[0.0], np.cumsum(np.array(_layers_s(costs)) + extra_s)])
            own_s = taken_s[places[:, at + 1]] - taken_s[places[:, at]] + each.ranks * fixed_s
            own_s += costs.first_s * (at == 0) + costs.last_s * (at == len(self.segments) - 1)
            count = places[:, at + 1] - places[:, at]
            whole_s = np.ceil(count / each.ranks) * (shortest_s(costs) + extra_s) + fixed_s
            is_alike = not costs.order and not costs.leading
            work_s.append(own_s)
            busiest_s.append(np.maximum(own_s / each.ranks, whole_s if is_alike else 0.0))
            fits &= (count >= fewest * each.ranks) & (count <= most * each.ranks)
        of_ranks = np.array([each.ranks for each in self.segments])
        least_s = least_of_segments_s(
            of_ranks, self._each_m, np.stack(work_s, axis=-1), np.stack(busiest_s, axis=-1)
        )
        return float(np.min(least_s, where=fits, initial=inf)) * (1 - ROUNDING)

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

    def segments_of(self, layout: Layout) -> list[Segment]:
        """The segments with the number of recomputed layers decided.

        Parameters
        ----------
        layout
            That of the kernel, its number of recomputed layers decided.
        """
        return [replace(each, part=replace(each.part, layout=layout)) for each in self.segments]

    def _checked(self, best: PlayedSplit) -> MixedPrice:
        """The split with its price by the cost model as it stands. Raises InternalError where they differ."""
        counts, seconds = best.counts, best.seconds
        amount = min(int(best.layout.recompute_layers), max(counts))
        decided = replace(best.layout, recompute_layers=amount)
        stages = tuple((count,) for count in counts)
        step_s = float(np.asarray(mixed_step(self.segments_of(decided), stages).seconds))
        if sum(counts) != self.layers or abs(step_s - seconds) > 1e-9 * step_s:
            raise InternalError(f"layers {counts} cost {step_s!r} s, the search said {seconds!r}")
        return MixedPrice(layout=decided, counts=counts, step_time_s=step_s)


def _in_turn(costs: SplitCosts) -> Sequence[tuple[float, float]]:
    """Seconds of every layer in order, nothing recomputed, and of recomputing it."""
    leading = ((costs.leading_s, costs.leading_recompute_s),) * costs.leading
    main = ((costs.layer_s, costs.layer_recompute_s),) * (costs.layers - costs.leading)
    return costs.order or (*leading, *main)


def _layers_s(costs: SplitCosts) -> list[float]:
    return [seconds for seconds, _ in _in_turn(costs)]


def shortest_s(costs: SplitCosts) -> float:
    """Seconds of the shortest layer, nothing recomputed."""
    return min(_layers_s(costs))


def least_again_s(costs: SplitCosts) -> float:
    """Seconds of recomputing the layer that is cheapest to recompute."""
    return min(again_s for _, again_s in _in_turn(costs))


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
