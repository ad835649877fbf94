"""A kernel on a mixed cluster: a layout, its execution, and how many pipeline ranks each part has.

With t_r(n) the seconds and h_r(n) the bytes of rank r with n layers on the part where it runs, `best_split`
finds the split of the layers over the ranks and the number of recomputed ones that make the step shortest.
Within a part only the most layers of a rank count, apart from the ends of the pipeline, so that a part is
described by few options for each number of layers that it takes; the parts' options are then joined.

A launch names one number k of layers that each rank recomputes in full. Of the splits, those count in which
the ranks of a part have all k layers or more, or all k or fewer, which they then recompute all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

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
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.combination_costs import memory_rows
from meshwright.planner.bounds.memory_fit import MemoryFit, RankRow
from meshwright.planner.bounds.stages import ALL_LAYERS, SplitCosts
from meshwright.planner.mixed.options import InnerEnds, Options, Rooms, options_of, options_together

FloatArray = NDArray[np.float64]
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

    def rooms(self, amount: int) -> tuple[Rooms, ...]:
        """What each rank of the pipeline has room for here, with so many layers recomputed."""
        if amount not in self._rooms:
            fit, layers = self._fit(amount), self.placed.workload.model.layers
            ranks = range(int(self.placed.layout.pp))
            ways = []
            if amount <= layers:
                own = max(amount, 1)
                ways.append(Rooms(own, layers, [_room(fit, r, own, layers) for r in ranks]))
            if amount > 1:
                most = min(amount, layers)
                ways.append(Rooms(1, most, [_room(fit, r, 1, most) for r in ranks]))
            self._rooms[amount] = tuple(ways)
        return self._rooms[amount]

    @cached_property
    def memory(self) -> list[RankRow]:
        """What each rank of the pipeline holds here, as a linear function of its layers."""
        return memory_rows(self.placed.workload, self.placed.layout)


def _room(fit: MemoryFit, rank: int, fewest: int, most: int) -> int:
    """The most layers that fit on a rank, 0 where not even the fewest do; memory is linear in between."""
    least_gib = fit.rank_gib(rank, fewest, 0)
    more_gib = fit.rank_gib(rank, fewest + 1, 0) - least_gib
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

    @property
    def price_s(self) -> float:
        """Seconds of its best split; infinite where it has no price."""
        return inf if self.price is None else self.price.step_time_s

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
        for amount in self.amounts():
            layout = replace(self.layout, recompute_layers=amount)
            limit_s = cutoff_s if best is None else best.step_time_s
            if not self._may_fit(amount) or self._least_s(amount, limit_s) >= limit_s:
                continue
            best = self._best_with(layout, limit_s) or best
            if amount <= 1 and not self._memory_limits(amount):
                break
        return best

    def _may_fit(self, amount: int) -> bool:
        """Whether the ranks have room for all layers, with so many recomputed."""
        room = 0
        for segment, part in zip(self.segments, self.parts, strict=True):
            ways = (way.by_rank[segment.own] for way in part.rooms(amount))
            room += max(sum(own) for own in ways)
        return room >= self.layers

    def _least_s(self, amount: int, limit_s: float) -> float:
        """Never above a step that takes no longer than a limit, with so many layers recomputed.

        A rank has at most n = limit / (m l) layers, so that of any n_r layers
        min(k, n_r) >= n_r min(1, k / n) are recomputed.
        """
        micro_batches = int(self.layout.num_micro_batches)
        most = limit_s / micro_batches / min(own.layer_s for own in self.costs)
        share = min(1.0, amount / max(most, 1.0)) if self.full else 0.0
        layer_s = [own.layer_s + share * own.layer_recompute_s for own in self.costs]
        speed = sum(s.ranks / own for s, own in zip(self.segments, layer_s, strict=True))
        pipeline_s = (micro_batches - 1) * self.layers / speed + self.layers * min(layer_s)
        return (pipeline_s + self.rest_s) * self.scale * (1 - 1e-9)

    def _memory_limits(self, amount: int) -> bool:
        """Whether some rank could not hold all layers with so many recomputed."""
        return any(
            min(part.rooms(amount)[0].by_rank[segment.own]) < self.layers
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

    def _best_with(self, layout: Layout, cutoff_s: float) -> MixedPrice | None:
        amount = int(layout.recompute_layers)
        costs = tuple(each.costs(amount) for each in self.parts)
        options = [
            options_of(_inner_ranks(self, index), segment.own, own, part.rooms(amount))
            for index, (segment, own, part) in enumerate(
                zip(self.segments, costs, self.parts, strict=True)
            )
        ]
        picks = options_together(options, self.layers)
        if not len(picks[0]):
            return None
        rows = [
            Options(*(column[pick] for column in own))
            for own, pick in zip(options, picks, strict=True)
        ]
        seconds = self._seconds(layout, costs, rows)
        for best in np.argsort(seconds, kind="stable"):
            if seconds[best] >= cutoff_s:
                return None
            chosen = [Options(*(column[best : best + 1] for column in own)) for own in rows]
            counts = self._counts(amount, chosen)
            stages = tuple((count,) for count in counts)
            memory_gib = mixed_memory_gib(self.segments_of(layout), stages)
            limits = np.concatenate(
                [np.full(each.ranks, each.part.limit_gib) for each in self.segments]
            )
            if np.all(memory_gib <= limits):
                return self._checked(layout, counts, float(seconds[best]))
        return None

    def _seconds(
        self, layout: Layout, costs: Sequence[SplitCosts], rows: Sequence[Options]
    ) -> FloatArray:
        """Of the step, for each row of options."""
        work = np.full(len(rows[0].layers), costs[0].first_s + costs[-1].last_s)
        for own, cost in zip(rows, costs, strict=True):
            work = work + own.layers * cost.layer_s + own.again * cost.layer_recompute_s
        busiest = np.max([own.busiest_s for own in rows], axis=0)
        _, _, each_expert = layer_parameters_on_gpu(self.segments[0].part.workload.model, layout)
        held = [(own.dense, own.experts * np.asarray(each_expert)) for own in rows]
        step = mixed_step_of_loads(self.segments, {"ranks": busiest}, work, held)
        return np.broadcast_to(np.asarray(step.seconds, dtype=np.float64), busiest.shape)

    def _counts(self, amount: int, chosen: Sequence[Options]) -> Counts:
        """Layers of each rank, late ranks, which hold fewer micro-batches, first."""
        counts: list[int] = []
        for index, (own, part) in enumerate(zip(chosen, self.parts, strict=True)):
            inner, left, right = _inner_ranks(self, index)
            at_end, most, fewest = int(own.at_end[0]), int(own.most[0]), int(own.fewest[0])
            rooms = next(way for way in part.rooms(amount) if way.fewest == fewest)
            inner_rooms = rooms.by_rank[self.segments[index].own][left:]
            dealt = [fewest] * inner
            rest = int(own.layers[0]) - at_end - sum(dealt)
            for level in range(fewest + 1, most + 1):
                for rank in reversed(range(inner)):
                    if rest and inner_rooms[rank] >= level:
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


def _inner_ranks(kernel: MixedKernel, index: int) -> InnerEnds:
    """Ranks of a segment that are no end of the pipeline, and whether it has the first and the last rank."""
    first, last = int(index == 0), int(index == len(kernel.segments) - 1)
    return kernel.segments[index].ranks - first - last, first, last
