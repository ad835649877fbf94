"""The exact price of one layout: every mapping, every split that can be best."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.estimate import LayerCosts, costs_of_times, stage_memory_gib
from meshwright.costmodel.footprint import offloaded_states_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.step_time import (
    StepTime,
    exact_step,
    least_interleaved_s,
    make_context,
    optimistic_step,
)
from meshwright.costmodel.workload import Execution, Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import (
    FitsRank,
    Split,
    SplitCosts,
    balanced_stages,
    frontier,
    least_busiest_rank_s,
    level_splits,
)
from meshwright.planner.bounds.mappings import Matrices, pick
from meshwright.planner.bounds.paces import MemoryFit, hbm_limit_gib

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Stages = tuple[tuple[int, ...], ...]
Matrix = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The best that one layout can do."""

    layout: Layout
    """With `recompute_layers` decided."""
    matrix: Matrix
    stages: Stages
    step_time_s: float
    ranks: tuple[tuple[int, int], ...] | None = None
    """On an irregular allocation, (node, local GPU) of every rank; the matrix is empty then."""
    execution: Execution = field(default_factory=Execution)
    """How it is run."""
    cut_uses: tuple[tuple[str, float], ...] = ()
    """Cuts of the fabric with the share of each that is used, where the workload limits that."""


@dataclass(frozen=True, kw_only=True)
class MappingBounds:
    """Bounds of one layout under each of its mappings."""

    matrices: Matrices
    bound_s: FloatArray
    """Shape [k]; k is 0 where no mapping exists, and a bound infinite where a mapping is out."""
    outside_s: FloatArray | None = None
    """Bounds of the mappings that are out because a group leaves its domain, [k]; infinite for others."""

    @property
    def least_s(self) -> float:
        """The bound of the layout; infinite without a mapping."""
        return float(self.bound_s.min()) if len(self.bound_s) else float("inf")


@dataclass(frozen=True, kw_only=True)
class PlacedLayout:
    """A layout under some of its mappings, and what its layers take there: computed once for all uses.

    What they take does not depend on how many of them are recomputed.
    """

    context: Context
    """Placements [k, levels]; an array field of the layout gives every part of a step its axis of k."""
    times: KindTimes
    """Seconds, [k]."""

    def rows(self, rows: IntArray) -> PlacedLayout:
        """Under some of the mappings."""
        own, k = vars(self.context.placement), len(self.context.placement.tp)
        placement = Placement(**{name: np.asarray(column)[rows] for name, column in own.items()})
        layout = replace(
            self.context.layout, micro_batch=np.asarray(self.context.layout.micro_batch)[rows]
        )
        context = replace(self.context, layout=layout, placement=placement)
        return PlacedLayout(context=context, times=self.times.rows(rows, k))

    def recomputing(self, layers: int) -> PlacedLayout:
        """With so many layers of each virtual stage recomputed."""
        layout = replace(self.context.layout, recompute_layers=layers)
        return replace(self, context=replace(self.context, layout=layout))


_WHATEVER_THE_SPLIT = ("pipeline_p2p", "optimizer", "step_overhead")
"""Parts of `optimistic_step` that no split of the layers has less of, whatever is hidden under its work."""


class LayoutPricing:
    """Prices one layout, its recomputed layers given, on the allocation that it uses."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self._workload, self._layout = workload, layout
        self._limit_gib = hbm_limit_gib(workload)
        self._fit = MemoryFit(workload, layout)
        self.memory_limits = False
        """Whether memory kept some mapping from its fastest split."""
        self.nothing_fits = False
        """Whether no split at all was found to fit."""

    def best(self, mappings: MappingBounds, every: PlacedLayout, cutoff_s: float) -> Priced | None:
        """The best mapping and split; None where none fits or beats `cutoff_s`. The layout is as `under` has
        `every` of the mappings, with any number of recomputed layers.
        """
        keep = np.flatnonzero(mappings.bound_s < cutoff_s)
        bound_s, recomputed = mappings.bound_s[keep], int(self._layout.recompute_layers)
        if not len(keep):
            return None
        own = every.rows(keep).recomputing(recomputed)
        if recomputed and np.isfinite(bound_s).any():
            seconds = self._bound(own)
            better = np.flatnonzero(seconds < cutoff_s)
            keep, bound_s, own = keep[better], seconds[better], own.rows(better)
        if not len(keep):
            return None
        table = pick(mappings.matrices, keep)
        best_s, where, stages = self._best_of(own, bound_s, cutoff_s)
        if stages is None:
            return None
        longest = max(max(rank) for rank in stages)
        recomputed_layers = min(int(self._layout.recompute_layers), longest)
        return Priced(
            layout=replace(self._layout, recompute_layers=recomputed_layers),
            matrix={axis: tuple(rows[where].tolist()) for axis, rows in table.items()},
            stages=stages,
            step_time_s=best_s,
        )

    def _best_of(
        self, every: PlacedLayout, bound_s: FloatArray, cutoff_s: float
    ) -> tuple[float, int, Stages | None]:
        """(seconds, number of the mapping, stages) of the fastest; mappings with equal layer costs share
        their splits.
        """
        rooms = self._fit.rooms(self._workload.model.layers)
        groups = _rows_with_equal_costs(costs_of_times(every.context, every.times), bound_s.shape)
        groups.sort(key=lambda group: float(np.min(bound_s[group[1]])))
        best: tuple[float, int, Stages | None] = (cutoff_s, -1, None)
        for group_costs, rows in groups:
            members = rows[bound_s[rows] < best[0]]
            if not len(members):
                continue
            split_costs = self._fit.split_costs(group_costs, _of_unlike(every.rows(rows[:1]).times))
            busiest_s = least_busiest_rank_s(split_costs, rooms)
            if not np.isfinite(busiest_s):
                self.memory_limits = self.nothing_fits = True
                return best
            faster = self._bound(every.rows(members), busiest_s) < best[0]
            # Memory decides here: with more layers recomputed, a mapping may be faster than it allows.
            self.memory_limits = self.memory_limits or not faster.all()
            members = members[faster]
            if not len(members):
                continue
            placed = every.rows(members)
            for split, seconds in self._splits(placed, split_costs, best[0]):
                fastest = int(np.argmin(seconds))
                if seconds[fastest] < best[0]:
                    best = float(seconds[fastest]), int(members[fastest]), split.stages
        return best

    def _splits(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> list[tuple[Split, FloatArray]]:
        """Every split that can be best, with its seconds [k]. Memory is asked only where the free splits
        break it.
        """
        if not framework_of_stack(self._workload.framework).uneven_stages:
            return self._even_split(placed, costs)
        if costs.in_step and costs.vpp > 1 and costs.order:
            return self._splits_of_unlike(placed, costs, cutoff_s)
        if costs.in_step and costs.vpp > 1:
            return self._level_splits(placed, costs, cutoff_s)
        fits: FitsRank | None = None
        for fits in (None, self._fit.fits):
            if fits is not None:
                self.memory_limits = True
            parts = self._fit.fits_part if fits is not None and costs.order_loads else None
            fastest = frontier(costs, 0.0, fits, parts)
            if not fastest:
                self.nothing_fits = fits is not None
                return []
            first = self._step(placed, fastest[0].stages)
            slack_s = self._slack_s(placed, first, costs)
            if np.all(np.asarray(first.seconds) - slack_s * _scale(first) >= cutoff_s):
                return []
            if fits is None and not self._fits(fastest[0].stages):
                continue  # memory matters: the free splits say nothing more
            splits = frontier(costs, _round_up(slack_s), fits, parts)
            fitting = [split for split in splits if self._fits(split.stages)]
            if len(fitting) == len(splits):
                break
        priced_splits = {fastest[0].stages: np.asarray(first.seconds)}
        return [(split, self._seconds(placed, split.stages, priced_splits)) for split in fitting]

    def _even_split(
        self, placed: PlacedLayout, costs: SplitCosts
    ) -> list[tuple[Split, FloatArray]]:
        """The only split of a framework that deals layers out by itself."""
        stages = balanced_stages(costs.layers, costs.pp, costs.vpp)
        if stages is None or (costs.partial and min(map(min, stages)) < costs.recompute_layers):
            return []
        if not self._fits(stages):
            self.memory_limits = self.nothing_fits = True
            return []
        split = Split(stages=stages, time_s=costs.stages_s(stages))
        return [(split, np.asarray(self._step(placed, stages).seconds))]

    def _level_splits(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> list[tuple[Split, FloatArray]]:
        """The same for ranks in step, whose splits are few enough to look at one by one."""
        splits = []
        for stages in level_splits(costs.layers, costs.pp, costs.vpp, empty_ends=costs.empty_ends):
            if not costs.partial or min(map(min, stages)) >= costs.recompute_layers:
                splits.append(Split(stages=stages, time_s=costs.stages_s(stages)))
        splits.sort(key=lambda split: split.time_s)
        priced_splits: list[tuple[Split, FloatArray]] = []
        limit_s = inf
        for split in splits:
            if split.time_s > limit_s:
                break
            if not self._fits(split.stages):
                self.memory_limits = True
                continue
            priced = self._step(placed, split.stages)
            if not priced_splits:
                slack_s = self._slack_s(placed, priced, costs)
                if np.all(np.asarray(priced.seconds) - slack_s * _scale(priced) >= cutoff_s):
                    return []
                limit_s = (split.time_s + slack_s) * (1 + 1e-12)
            priced_splits.append((split, np.asarray(priced.seconds)))
        return priced_splits

    def _splits_of_unlike(
        self, placed: PlacedLayout, costs: SplitCosts, cutoff_s: float
    ) -> list[tuple[Split, FloatArray]]:
        """The same where chunks of ranks in step are unlike: those that may beat the cutoff are played."""
        bounded = []
        for stages in level_splits(costs.layers, costs.pp, costs.vpp, empty_ends=costs.empty_ends):
            if not self._fit.fits_stages(stages):
                self.memory_limits = True
            elif not costs.partial or min(map(min, stages)) >= costs.recompute_layers:
                each_s = least_interleaved_s(placed.context, placed.times, stages)
                bounded.append((float(np.min(each_s)), stages))
        parts = optimistic_step(placed.context, placed.times).parts
        beside_s = float(np.min(sum(np.asarray(parts[name]) for name in _WHATEVER_THE_SPLIT)))
        priced_splits = []
        for pipeline_s, stages in sorted(bounded):
            if pipeline_s + beside_s >= cutoff_s:
                break
            step = exact_step(placed.context, stages, placed.times, played=False)
            if np.min(step.seconds) >= cutoff_s:
                continue
            if not self._fits(stages):
                self.memory_limits = True
                continue
            seconds = np.asarray(self._step(placed, stages).seconds)
            cutoff_s = min(cutoff_s, float(np.min(seconds)))
            priced_splits.append((Split(stages=stages, time_s=pipeline_s), seconds))
        return priced_splits

    def _seconds(
        self, placed: PlacedLayout, stages: Stages, priced_splits: dict[Stages, FloatArray]
    ) -> FloatArray:
        if stages not in priced_splits:
            priced_splits[stages] = np.asarray(self._step(placed, stages).seconds)
        return priced_splits[stages]

    def _slack_s(self, placed: PlacedLayout, first: StepTime, costs: SplitCosts) -> float:
        """How much a split with its parameters spread evenly could save over this one, at most."""
        parts = first.parts
        charged = np.asarray(parts["dp_comm"]) + np.asarray(parts["optimizer"])
        if costs.partial and costs.leading:  # what hides communication then depends on the split
            return float(np.max(charged))
        even = optimistic_step(placed.context, placed.times).parts
        bound = np.asarray(even["dp_comm"]) + np.asarray(even["optimizer"])
        return float(np.max(np.maximum(charged - bound, 0.0)))

    def _bound(self, placed: PlacedLayout, busiest_s: float = 0.0) -> FloatArray:
        """Bounds [k] that know how slow the slowest rank must be."""
        step = optimistic_step(placed.context, placed.times, busiest_s)
        return np.asarray(step.seconds, dtype=np.float64)

    def _placed(self, table: Matrices) -> Placement:
        """The placements of some mappings, arrays [k, levels]."""
        return placement_on(self._workload.cluster, self._layout, table)

    def under(self, table: Matrices) -> PlacedLayout:
        """The layout under some mappings, at least one."""
        placement = self._placed(table)
        size = np.full(len(placement.tp), int(self._layout.micro_batch), dtype=np.int64)
        context = make_context(self._workload, replace(self._layout, micro_batch=size), placement)
        return PlacedLayout(context=context, times=kind_times(context))

    def _step(self, placed: PlacedLayout, stages: Stages) -> StepTime:
        """One split under k placements."""
        return exact_step(placed.context, stages, placed.times)

    def _fits(self, stages: Stages) -> bool:
        peak_gib = np.max(stage_memory_gib(self._workload, self._layout, stages))
        return bool(peak_gib <= self._limit_gib) and self._fits_host(stages)

    def _fits_host(self, stages: Stages) -> bool:
        if self._fit.host_limit_gib == inf:
            return True
        held = offloaded_states_gib(self._workload, self._layout, stages)
        return bool(np.max(held) <= self._fit.host_limit_gib)


def _of_unlike(times: KindTimes) -> list[tuple[float, float]]:
    """Seconds of each kind of unlike layers under the first mapping, and what recomputing one adds."""
    return [
        (float(np.ravel(kind.seconds)[0]), float(np.ravel(kind.recompute_s)[0]))
        for kind in times.unlike
    ]


def _rows_with_equal_costs(
    costs: LayerCosts, shape: tuple[int, ...]
) -> list[tuple[LayerCosts, IntArray]]:
    """Each different set of layer costs with the rows that have it."""
    columns = [np.broadcast_to(np.asarray(column), shape) for column in vars(costs).values()]
    unique, back = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    groups = []
    for group, values in enumerate(unique.tolist()):
        groups.append((LayerCosts(*values), np.flatnonzero(back.reshape(-1) == group)))
    return groups


def _scale(priced: StepTime) -> FloatArray:
    """What the part in proportion to all others multiplies them by."""
    scale, step = np.asarray(priced.parts["scale"]), np.asarray(priced.seconds)
    return np.asarray(step / (step - scale), dtype=np.float64)


def _round_up(seconds: float) -> float:
    """To the next power of two: a little more slack costs little, and shared slacks share their splits."""
    return float(2.0 ** np.ceil(np.log2(seconds))) if seconds > 0 else 0.0
