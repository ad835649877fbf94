"""A kernel on a mixed cluster: a layout, its execution, and how many pipeline ranks each part has.

With t_r(n) the seconds and h_r(n) the bytes of rank r with n layers on the part where it runs, `best_split`
finds the split of the layers over the ranks and the number of recomputed ones that make the step shortest.
Within a part only the most layers of a rank count, apart from the ends of the pipeline, so that a part is
described by few options for each number of layers that it takes; the parts' options are then joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.estimate import LayerCosts, costs_of_layers
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.states import layer_parameters_on_gpu
from meshwright.costmodel.mixed import (
    PlacedPart,
    Segment,
    mixed_memory_gib,
    mixed_step,
    mixed_step_of_loads,
)
from meshwright.errors import InternalError
from meshwright.planner.bounds.combination_costs import memory_rows
from meshwright.planner.bounds.memory_fit import MemoryFit, RankRow
from meshwright.planner.bounds.stages import ALL_LAYERS, SplitCosts

FloatArray = NDArray[np.float64]
Counts = tuple[int, ...]
"""Layers of each pipeline rank."""
Composition = tuple[tuple[int, int], ...]
"""(part of the cluster, pipeline ranks on it), in the order of the pipeline."""


class _Options(NamedTuple):
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
    _rooms: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def _layer_costs(self) -> LayerCosts:
        return costs_of_layers(self.placed.context)

    def _fit(self, amount: int) -> MemoryFit:
        return MemoryFit(self.placed.workload, replace(self.placed.layout, recompute_layers=amount))

    def costs(self, amount: int) -> SplitCosts:
        """With so many layers of each rank recomputed in full."""
        if amount not in self._costs:
            self._costs[amount] = self._fit(amount).split_costs(self._layer_costs)
        return self._costs[amount]

    def rooms(self, amount: int) -> list[int]:
        """The most layers that each rank of the pipeline has room for here, with so many recomputed."""
        if amount not in self._rooms:
            fit, layers = self._fit(amount), self.placed.workload.model.layers
            fewest = max(1, amount) if amount < layers else 1
            ranks = range(int(self.placed.layout.pp))
            self._rooms[amount] = [_room(fit, rank, fewest, layers) for rank in ranks]
        return self._rooms[amount]

    @cached_property
    def memory(self) -> list[RankRow]:
        """What each rank of the pipeline holds here, as a linear function of its layers."""
        return memory_rows(self.placed.workload, self.placed.layout)


def _room(fit: MemoryFit, rank: int, fewest: int, layers: int) -> int:
    """The most layers that fit on a rank, 0 where not even the fewest do; memory is linear from there on."""
    least_gib = fit.rank_gib(rank, fewest, 0)
    more_gib = fit.rank_gib(rank, fewest + 1, 0) - least_gib
    left_gib = fit.limit_gib * (1 + 1e-9) - least_gib
    return 0 if left_gib < 0 else min(fewest + int(left_gib / more_gib), layers)


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
    bound_s: float = 0.0
    """Of any split."""
    rest_s: float = 0.0
    """What follows the pipeline, at the least, before what a step loses on many nodes."""
    scale: float = 1.0
    """What that multiplies the step by."""
    is_open: bool = True
    """Whether it was not priced yet."""
    price: MixedPrice | None = None
    """Of the best split; None where no split fits or beats what was known."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.segments[0].part.workload.model.layers

    @cached_property
    def full(self) -> bool:
        """Whether it recomputes whole layers."""
        return bool(int(self.layout.recompute) & Recompute.FULL)

    @property
    def costs(self) -> tuple[SplitCosts, ...]:
        """What layers cost on each segment, recomputation apart."""
        return tuple(each.costs(0) for each in self.parts)

    @cached_property
    def memory(self) -> tuple[tuple[RankRow, float], ...]:
        """Of each rank what it holds as a linear function of its layers, and what it may hold, GiB."""
        rows: list[tuple[RankRow, float]] = []
        for segment, part in zip(self.segments, self.parts, strict=True):
            rows += [(row, part.placed.limit_gib) for row in part.memory[segment.own]]
        return tuple(rows)

    def best_split(self, cutoff_s: float) -> MixedPrice | None:
        """The fastest split that fits; None where none fits or beats `cutoff_s`.

        Recomputed layers are tried in rising order: once memory no longer limits a rank, more only cost more.
        """
        best: MixedPrice | None = None
        for amount in self._amounts():
            layout = replace(self.layout, recompute_layers=amount)
            rooms = self._rooms(amount)
            if min(rooms) < 1:
                continue
            limit_s = cutoff_s if best is None else best.step_time_s
            best = self._best_with(layout, rooms, limit_s) or best
            if min(rooms) >= self.layers:
                break
        return best

    def _amounts(self) -> Iterator[int]:
        """Layers of a rank that may be recomputed in full."""
        if not self.full:
            yield 0
            return
        yield from range(1, self.layers // int(self.layout.pp) + 1)
        yield ALL_LAYERS

    def _rooms(self, amount: int) -> list[int]:
        """The most layers that each rank has room for."""
        rooms: list[int] = []
        for segment, part in zip(self.segments, self.parts, strict=True):
            rooms += part.rooms(amount)[segment.own]
        return rooms

    def _best_with(
        self, layout: Layout, rooms: Sequence[int], cutoff_s: float
    ) -> MixedPrice | None:
        costs = tuple(each.costs(int(layout.recompute_layers)) for each in self.parts)
        options = [
            _options_of(self, index, own, rooms[each.own])
            for index, (each, own) in enumerate(zip(self.segments, costs, strict=True))
        ]
        picks = _joined(options, self.layers)
        if not len(picks[0]):
            return None
        rows = [
            _Options(*(column[pick] for column in own))
            for own, pick in zip(options, picks, strict=True)
        ]
        seconds = self._seconds(layout, costs, rows)
        for best in np.argsort(seconds, kind="stable"):
            if seconds[best] >= cutoff_s:
                return None
            chosen = [_Options(*(column[best : best + 1] for column in own)) for own in rows]
            counts = self._counts(costs, chosen, rooms)
            stages = tuple((count,) for count in counts)
            memory_gib = mixed_memory_gib(self.segments_of(layout), stages)
            limits = np.concatenate(
                [np.full(each.ranks, each.part.limit_gib) for each in self.segments]
            )
            if np.all(memory_gib <= limits):
                return self._checked(layout, counts, float(seconds[best]))
        return None

    def _seconds(
        self, layout: Layout, costs: Sequence[SplitCosts], rows: Sequence[_Options]
    ) -> FloatArray:
        """Of the step, for each row of options."""
        work = np.full(len(rows[0].layers), costs[0].first_s + costs[-1].last_s)
        amount = min(int(layout.recompute_layers), self.layers) if self.full else 0
        for each, own, cost in zip(self.segments, rows, costs, strict=True):
            again = np.minimum(amount * each.ranks, own.layers)
            work = work + own.layers * cost.layer_s + again * cost.layer_recompute_s
        busiest = np.max([own.busiest_s for own in rows], axis=0)
        _, _, each_expert = layer_parameters_on_gpu(self.segments[0].part.workload.model, layout)
        held = [(own.dense, own.experts * np.asarray(each_expert)) for own in rows]
        step = mixed_step_of_loads(self.segments, {"ranks": busiest}, work, held)
        return np.broadcast_to(np.asarray(step.seconds, dtype=np.float64), busiest.shape)

    def _counts(
        self, costs: Sequence[SplitCosts], chosen: Sequence[_Options], rooms: Sequence[int]
    ) -> Counts:
        """Layers of each rank, late ranks, which hold fewer micro-batches, first."""
        counts: list[int] = []
        for index, (each, own, cost) in enumerate(zip(self.segments, chosen, costs, strict=True)):
            inner, left, right = _inner_ranks(self, index)
            own_rooms = rooms[each.own]
            at_end, most = int(own.at_end[0]), int(own.most[0])
            dealt = [cost.fewest] * inner
            rest = int(own.layers[0]) - at_end - sum(dealt)
            for level in range(cost.fewest + 1, most + 1):
                for rank in reversed(range(inner)):
                    if rest and own_rooms[rank + left] >= level:
                        dealt[rank] += 1
                        rest -= 1
            counts += [at_end] * left + dealt + [at_end] * right
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


def _inner_ranks(kernel: MixedKernel, index: int) -> tuple[int, int, int]:
    """Ranks of a segment that are no end of the pipeline, and whether it has the first and the last rank."""
    first, last = int(index == 0), int(index == len(kernel.segments) - 1)
    return kernel.segments[index].ranks - first - last, first, last


def _options_of(
    kernel: MixedKernel, index: int, costs: SplitCosts, rooms: Sequence[int]
) -> _Options:
    """Ways to deal each number of layers to a segment's ranks, less those that another beats in all."""
    inner, first, last = _inner_ranks(kernel, index)
    inner_rooms = np.array(rooms[first : len(rooms) - last], dtype=np.int64)
    end_s, end_load = 0.0, 0.0
    end_experts = costs.last_experts * last
    ends = np.zeros(1, dtype=np.int64)
    if first or last:
        end_s = costs.first_s if first else costs.last_s
        end_load = costs.first_load if first else costs.last_load
        ends = np.arange(costs.fewest, rooms[0 if first else -1] + 1)
    most = _least_most(inner_rooms, costs.fewest, costs.layers)
    rank_s = np.array([costs.rank_s(-1, n, 0) for n in range(costs.layers + 1)])
    columns: list[FloatArray] = []
    has_experts = float(costs.experts)
    for layers in range(1, costs.layers + 1):
        rest = layers - ends
        at_end = ends[rest >= 0]
        own_most = most[rest[rest >= 0]]
        at_end, own_most = at_end[own_most >= 0], own_most[own_most >= 0]
        if not len(at_end):
            continue
        is_end = float(first or last)
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
    table = np.concatenate(columns) if columns else np.zeros((0, 6))
    return _Options(*table.T)


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


def _joined(options: Sequence[_Options], layers: int) -> list[NDArray[np.int64]]:
    """Rows of each segment's options that together deal out all layers."""
    picks = [np.arange(len(options[0].layers))]
    dealt = options[0].layers
    for number, own in enumerate(options[1:], start=2):
        sums = dealt[:, None] + own.layers[None, :]
        good = sums == layers if number == len(options) else sums < layers
        left, right = np.nonzero(good)
        picks = [*(pick[left] for pick in picks), right]
        dealt = sums[left, right]
    return picks


def no_price(kernel: MixedKernel) -> float:
    """The price of a kernel; infinite where it has none."""
    return inf if kernel.price is None else kernel.price.step_time_s
