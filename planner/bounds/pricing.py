"""What layouts cost: lower bounds for many layouts at once, the exact step time of one.

With m micro-batches, t_r the seconds of pipeline rank r for one of them (forward and backward), x the bubble
share of the schedule and v virtual stages, a step takes

    T = m max_r t_r + x (sum_r t_r - max_r t_r) / v + exposed gradient traffic + optimizer + overhead.

Let W = sum_r t_r be the work of all layers and ends, L the layers, c the cheapest layer and e what the last
rank computes besides layers. Three lower bounds on T, each tighter and dearer than the one before:

- `compute_bound_s`, from degrees and micro-batch alone: max_r t_r >= max(W / pp, ceil(L / pp) c, e + c),
  every group packed as far inside the fabric as tp allows, the smallest bubble of any schedule, nothing after
  the pipeline;
- `lower_bound_s`: layers divisible at will, groups packed so, and what comes after the pipeline;
- `mapping_bounds`: the same with the true placement of every mapping, and no more layers on a rank than its
  memory holds.

`exact` then searches mappings, splits of the layers and numbers of recomputed layers of one layout.

>>> from meshwright.planner.request.reader import read_request
>>> request = read_request(
...     model="llama-3-8b", cluster="dgx-h100", gpus=8, global_batch=16, seq_len=8192
... )
>>> pricing = CostModelPricing(request.workload())
>>> layouts = Layout(tp=np.array([8, 4]), dp=np.array([1, 2]), num_micro_batches=np.array([16, 8]))
>>> bounds = pricing.mapping_bounds(layouts)
>>> bool((pricing.lower_bound_s(layouts) <= [one.least_s for one in bounds]).all())
True
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.fabric import dispatcher_reaches
from meshwright.costmodel.data_parallel import DataParallelTraffic
from meshwright.costmodel.footprint import PeakBounds, mean_states_gib, peak_bounds, usable_hbm_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes
from meshwright.costmodel.layout import LAYER_AXES, PLACED_AXES, Layout
from meshwright.costmodel.schedules import has_trait, schedule_named, traits
from meshwright.costmodel.step_time import optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.combination_costs import compute_bound_s
from meshwright.planner.bounds.exact_cost import (
    Asking,
    LayoutPricing,
    MappingBounds,
    PlacedLayout,
    PlacedLayouts,
    Priced,
    worked_out,
    worked_out_together,
)
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.mappings import (
    GROUPS_OF_TRAFFIC,
    KnownTimes,
    Matrices,
    divisors,
    known_traffic,
    least_group_traffic,
    mapped_layouts,
    mappings_of,
    packed_context,
    rows_by_value,
    rows_of_context,
    shared_costs,
    shared_times,
    shared_traffic,
    times_under_mappings,
    useful_groups,
)
from meshwright.planner.bounds.paces import busiest_in_rooms_s, chunk_times, least_level_pace_s

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PricingParams:
    """How many layouts are bounded in one array operation: what fits into a core's cache."""

    chunk: int = 8192
    """Layouts without their mappings."""
    mapping_chunk: int = 1024
    """Layouts with all their mappings."""
    degrees_chunk: int = 2048
    """Degrees with all their mappings."""
    worth_placing: int = 256
    """Degrees on one allocation from which their placements are bounded: arrays of fewer take about as long,
    and what follows bounds those few anyway."""
    worth_placing_groups: int = 3072
    """Degrees on one allocation times divisors of the batch from which placements are bounded, where that is
    less: what follows looks at as many numbers of shard groups for each of the degrees."""


DEFAULT_PRICING = PricingParams()
MOST_TOGETHER = 1 << 16
"""Mappings of layouts that are priced together, about: their times of layers take some 50 MiB."""


class CostModelPricing:
    """What a search asks: prices by `costmodel`, seconds of a step, here on a regular fabric."""

    def __init__(self, workload: Workload, params: PricingParams = DEFAULT_PRICING) -> None:
        self._workload, self._params = workload, params
        self._limit_gib, self._known = usable_hbm_gib(workload), KnownTimes()
        framework = framework_of_stack(workload.framework)
        self._some_layers = framework.recompute_amount is not None
        self._deadline = float("inf")
        self._undecided_s = float("inf")

    @property
    def workload(self) -> Workload:
        """What is priced."""
        return self._workload

    def stop_at(self, deadline: float) -> None:
        """Nothing is asked of solvers, nor priced by `exact_each`, behind this time of `time.monotonic`."""
        self._deadline = deadline

    @property
    def undecided_s(self) -> float:
        """Of the layout priced last: no mapping or split that `exact` could not decide on is faster.

        After `exact_each`, of all its layouts.
        """
        return self._undecided_s

    @property
    def unlisted_s(self) -> float:
        """Of all layouts whose mappings were bounded: no mapping that is not listed is faster than this."""
        return float("inf")

    def beyond_the_list(self, cutoff_s: float) -> Iterable[Priced]:
        """Mappings that are not listed, each faster than the cutoff and those before; raises `unlisted_s`."""
        del cutoff_s
        return ()

    def apart_bounds_s(self, layouts: Layout) -> FloatArray:
        """Never above `exact_apart`, infinite where that is no less than `exact`; [n]."""
        return np.full(layouts.broadcast_shape()[0], float("inf"))

    def exact_apart(self, layout: Layout, least_s: float, cutoff_s: float) -> Priced | None:
        """The best mapping with pipeline stages priced by their own places, where that is less than `exact`.

        None where none beats the cutoff; `least_s` is a bound of the layout.

        Parameters
        ----------
        layout
            Scalars.
        least_s
            A bound of the layout.
        cutoff_s
            Seconds of a step; only what is faster is looked for.

        Returns
        -------
        Priced or None
            None where no mapping beats the cutoff, as on regular fabrics, whose stages lie alike.
        """
        del layout, least_s, cutoff_s
        return None

    @property
    def overfull(self) -> Sequence[Priced]:
        """Of the layout priced last: mappings that would be faster, but fill a cut beyond what is allowed."""
        return ()

    @property
    def prices_matrices(self) -> bool:
        """Whether mappings are parallelism matrices: on regular fabrics."""
        return True

    def tightened(self, layout: Layout, mappings: MappingBounds) -> MappingBounds:
        """Bounds of a layout, infinite for the mappings that are known to be impossible by now.

        Parameters
        ----------
        layout
            Scalars.
        mappings
            With bounds so far; they come back where there is no news, as on regular fabrics.
        """
        del layout
        return mappings

    def needs(self, layout: Layout) -> Sequence[Any]:
        """What each mapping asks of the slots of an irregular allocation; empty where it asks nothing."""
        return ()

    def use_assignment(self, layout: Layout, cells: Any, value: Callable[[Any], int]) -> None:
        """Takes the assignment of slots to leaves that the one model found for a layout."""

    def lower_bound_s(
        self,
        layouts: Layout,
        numbers_of_groups: Sequence[int] = (),
        *,
        any_schedule: bool = False,
    ) -> FloatArray:
        """Bounds on a step that no mapping or split of a layout beats; never above `exact`, shape [n].

        All allocations at once, on the fabric at its full size: no allocation packs groups better.

        Parameters
        ----------
        layouts
            Arrays of shape [n].
        numbers_of_groups
            Of shard groups, of which a layout may take any; its own by default.
        any_schedule
            Whether another schedule of as many virtual stages may take the place of a layout's own.
        """
        count, several = layouts.broadcast_shape()[0], [n > 1 for n in numbers_of_groups]
        bound_s = np.empty(count)
        for part in np.array_split(np.arange(count), max(1, -(-count // self._params.chunk))):
            chunk = layouts.take(part)
            context = packed_context(self._workload, chunk)
            traffic: tuple[DataParallelTraffic, ...] = ()
            numbers = numbers_of_groups if any(several) else ()
            if count and numbers:
                traffic = known_traffic(self._workload, numbers).least(context)
            elif count:
                traffic = shared_traffic(context)
            times, pace_s = self._known.times(context), np.zeros(len(part))
            if times is not None and (not any_schedule or self._one_way(times)):
                pace_s = least_level_pace_s(self._workload, chunk, chunk_times(context, times))
            step = optimistic_step(context, times, pace_s, traffic, numbers_of_groups=numbers)
            seconds = step.seconds
            bound_s[part] = np.broadcast_to(np.asarray(seconds), (len(part),))
        return bound_s

    def _one_way(self, times: KindTimes) -> bool:
        """Whether virtual stages with unlike layers are run in one way only, by whole backward passes."""
        names = framework_of_stack(self._workload.framework).schedules
        own = [traits(schedule_named(name)) for name in names]
        return bool(times.unlike) and all(
            each.most_chunks == 1 or (each.in_step and not each.splits_backward) for each in own
        )

    def least_memory_gib(self, layouts: Layout) -> tuple[FloatArray, IntArray]:
        """Bounds on memory, and how many layers must be recomputed for it.

        Parameters
        ----------
        layouts
            Arrays of shape [n].

        Returns
        -------
        tuple[FloatArray, IntArray]
            Never above the peak of any split, in GiB, with the recomputed layers that follow or more of
            them; and the fewest layers of a virtual stage that full recomputation must take for some split
            to fit, or `ALL_LAYERS`. Both [n].
        """
        full = layouts.recomputes_layers
        recomputed_layers = np.where(full, 1 if self._some_layers else ALL_LAYERS, 0)
        bounds = peak_bounds(self._workload, layouts)
        peak = bounds.peak_gib(recomputed_layers)
        rows = np.flatnonzero((recomputed_layers == 1) & (peak > self._limit_gib))
        if len(rows):
            fewest = self._fewest_recomputed(layouts.take(rows), bounds.rows(rows))
            recomputed_layers[rows] = fewest
            peak = bounds.peak_gib(recomputed_layers)
        every = bounds.peak_gib(np.full(len(peak), ALL_LAYERS))
        return np.where(full, np.minimum(peak, every), peak), recomputed_layers

    def recomputed_memory_gib(self, layouts: Layout) -> FloatArray:
        """Never above the peak of any split, with as much recomputed as the layout may; shape [n]."""
        return peak_bounds(self._workload, layouts).peak_gib(
            np.where(layouts.recomputes_layers, ALL_LAYERS, 0)
        )

    def states_gib(self, layouts: Layout) -> FloatArray:
        """Never above the peak of any split, whatever is recomputed; shape [n]."""
        return mean_states_gib(self._workload, layouts)

    def _fewest_recomputed(self, layouts: Layout, bounds: PeakBounds) -> IntArray:
        """Bisects the recomputed layers per virtual stage; ALL_LAYERS where fewer cannot fit."""
        shortest = self._workload.model.layers // (np.asarray(layouts.pp) * np.asarray(layouts.vpp))
        low, high = np.ones(len(shortest), dtype=np.int64), np.maximum(shortest, 1)
        partial = bounds.peak_gib(high) <= self._limit_gib
        while np.any(high - low > 1):
            middle = (low + high) // 2
            fits = bounds.peak_gib(middle) <= self._limit_gib
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return np.where(partial, high, ALL_LAYERS)

    def mapping_bounds(
        self,
        layouts: Layout,
        numbers_of_groups: Sequence[int] = (),
        *,
        below_s: float = float("inf"),
    ) -> list[MappingBounds]:
        """`optimistic_step` under the true placements, all layouts of an allocation at once.

        Parameters
        ----------
        layouts
            Arrays of shape [n].
        numbers_of_groups
            Of shard groups: bounds are infinite where another of these is no slower under the same mapping.
        below_s
            Seconds of a step; bounds at or above it are not made tighter.

        Returns
        -------
        list of MappingBounds
            One for each layout.
        """
        all_bounds: list[MappingBounds | None] = [None] * layouts.broadcast_shape()[0]
        in_two = bool(self._workload.model.unlike_layers) and below_s < float("inf")
        for gpus, part in _parts(layouts, self._params.mapping_chunk):
            bounds_on = partial(self._bounds_on, gpus, numbers_of_groups=numbers_of_groups)
            own = layouts.take(part)
            part_bounds = list(bounds_on(own, by_passes=not in_two))
            # Sequences of passes take most of the time, and leave hardly more out than the rest does.
            several = np.broadcast_to(np.asarray(own.vpp) > 1, part.shape)
            least_s = np.array([each.least_of_all_s for each in part_bounds])
            near = np.flatnonzero(several & (least_s < below_s) & in_two)
            if len(near):
                for at, bounds in zip(near, bounds_on(own.take(near), by_passes=True), strict=True):
                    part_bounds[at] = bounds
            for row, bounds in zip(part, part_bounds, strict=True):
                all_bounds[row] = bounds
        return [bounds for bounds in all_bounds if bounds is not None]

    def degrees_bound_s(self, degrees: Layout, smallest_bubble: FloatArray) -> FloatArray:
        """`compute_bound_s` of some degrees under the true placement of the mapping that is best for each.

        Parameters
        ----------
        degrees
            Of n layouts, as a space has them: nothing is recomputed or offloaded.
        smallest_bubble
            As `compute_bound_s` has it.

        Returns
        -------
        array, shape [n]
            0 where degrees have no mapping, or share their number of GPUs with few others.
        """
        bound_s, params = np.zeros(degrees.broadcast_shape()), self._params
        numbers = len(divisors(self._workload.global_batch))
        fewest = min(params.worth_placing, params.worth_placing_groups // numbers)
        for gpus, part in _parts(degrees, params.degrees_chunk):
            if len(part) < fewest:
                continue
            bound_s[part] = self._degrees_bound_on(gpus, degrees.take(part), smallest_bubble)
        return bound_s

    def _degrees_bound_on(
        self, gpus: int, degrees: Layout, smallest_bubble: FloatArray
    ) -> FloatArray:
        """Of degrees on one allocation; `smallest_bubble` is by pipeline size."""
        mapped = mapped_layouts(self._workload, gpus, degrees)
        if mapped.context is None:
            return np.zeros(len(mapped.counts))
        layouts = mapped.context.layout
        bubble = smallest_bubble[np.asarray(layouts.pp)]
        costs = shared_costs(mapped.context)
        bound_s = compute_bound_s(mapped.context.workload, layouts, costs, bubble)
        return mapped.least(bound_s)

    def relief_bound_s(self, layouts: Layout, numbers_of_groups: Sequence[int]) -> FloatArray:
        """Bounds under the best mapping, whatever is recomputed or offloaded.

        Parameters
        ----------
        layouts
            Arrays of shape [n]; their own recomputation, offload and groups do not count.
        numbers_of_groups
            Of shard groups, of which each layout may take any.

        Returns
        -------
        array, shape [n]
            0 for schedules that split the backward pass: what they wait depends on what is recomputed.
        """
        plain = replace(layouts, recompute=0, recompute_layers=0)
        plain = replace(plain, optimizer_offload=0, shard_groups=1)
        bound_s = np.zeros(layouts.broadcast_shape())
        for gpus, part in _parts(plain, self._params.mapping_chunk):
            bound_s[part] = self._relief_bound_on(gpus, plain.take(part), numbers_of_groups)
        splits = has_trait(np.asarray(layouts.schedule), "splits_backward")
        return np.where(splits, 0.0, bound_s)

    def _relief_bound_on(
        self, gpus: int, layouts: Layout, numbers_of_groups: Sequence[int]
    ) -> FloatArray:
        mapped = mapped_layouts(self._workload, gpus, layouts)
        if mapped.context is None:
            return np.zeros(len(mapped.counts))
        context = mapped.context
        times = shared_times(context, LAYER_AXES)
        assert times is not None
        numbers = numbers_of_groups or (1,)
        traffic = least_group_traffic(context, numbers, GROUPS_OF_TRAFFIC)
        seconds_of = chunk_times(context, times)
        pace_s = least_level_pace_s(self._workload, context.layout, seconds_of)
        step = optimistic_step(
            context, times, pace_s, traffic, numbers_of_groups=numbers, any_relief=True
        )
        return mapped.least(np.asarray(step.seconds))

    def _bounds_on(
        self, gpus: int, layouts: Layout, *, numbers_of_groups: Sequence[int], by_passes: bool
    ) -> Iterator[MappingBounds]:
        mapped = mapped_layouts(self._workload, gpus, layouts)
        context, bound = mapped.context, np.zeros(0)
        if context is not None:
            busiest_s, times = self._busiest_under(
                context, layouts, mapped.counts, by_passes=by_passes
            )
            fits = np.isfinite(busiest_s)
            slowest_s = np.where(fits, busiest_s, 0.0)
            traffic = shared_traffic(context, GROUPS_OF_TRAFFIC)
            seconds = optimistic_step(context, times, slowest_s, traffic).seconds
            bound = np.where(fits, np.asarray(seconds, dtype=np.float64), np.inf)
            if numbers_of_groups and self._workload.max_cut_use >= 1:
                bound[~useful_groups(context, numbers_of_groups)] = np.inf
            reached = dispatcher_reaches(self._workload, context.layout, context.placement)
            bound = np.where(reached, bound, np.inf)
        if not self._workload.inside_domain:
            for table, part in zip(mapped.tables, mapped.by_layout(bound), strict=True):
                yield MappingBounds(matrices=table, bound_s=part)
            return
        kept, outside = (np.where(mapped.inside == is_in, bound, np.inf) for is_in in (True, False))
        parts = (mapped.tables, mapped.by_layout(kept), mapped.by_layout(outside))
        for table, bound_s, outside_s in zip(*parts, strict=True):
            yield MappingBounds(matrices=table, bound_s=bound_s, outside_s=outside_s)

    def _busiest_under(
        self, context: Context, layouts: Layout, counts: IntArray, *, by_passes: bool
    ) -> tuple[FloatArray, KindTimes]:
        """`busiest_in_rooms_s` of mappings and the times of their layers, each different ones once."""
        owner = np.repeat(np.arange(len(counts)), counts)
        times, rows, equal = times_under_mappings(context, owner)
        busiest_s = busiest_in_rooms_s(
            rows_of_context(context, rows),
            times.rows(rows, len(owner)),
            layouts,
            np.bincount(owner[rows], minlength=len(counts)),
            self._limit_gib,
            by_passes=by_passes,
        )
        return busiest_s[equal], times

    def mappings(self, layout: Layout) -> Matrices:
        """Every parallelism matrix of a layout that keeps tensor groups inside the innermost level, and those
        that the workload names.

        Parameters
        ----------
        layout
            Scalars.

        Returns
        -------
        Matrices
            By axis how many ways it is spread at each level, [k, levels]; k may be 0.
        """
        return mappings_of(self._workload, layout)

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """The best mapping, split and recomputation of one layout.

        The recomputed layers are tried in rising order. Once memory no longer limits the split, more of them
        only cost more; all of them are tried even so, because then a virtual stage may be shorter than the
        number. While no plan is known, recomputing all comes first: where that does not fit, nothing does.

        Parameters
        ----------
        layout
            Scalars.
        mappings
            With bounds; minus infinity means that nothing is to be left out for its bound.
        cutoff_s
            Seconds of a step; only what is faster is looked for.

        Returns
        -------
        Priced or None
            None where nothing fits or beats the cutoff.
        """
        self._undecided_s = float("inf")
        if not len(mappings.bound_s):
            return None
        workload, fewest = self._workload.on(int(layout.gpus)), 0
        if self._some_layers and layout.recomputes_layers:
            fewest = int(self.least_memory_gib(layout.flat())[1][0])
        every = self._pricing_of(workload, layout).under(mappings.matrices)
        amounts = self._recompute_amounts(layout, fewest)
        return worked_out(self._best(workload, mappings, every, amounts, cutoff_s))

    def exact_each(self, layouts: Layout) -> Iterator[tuple[int, Priced | None]]:
        """`exact` of each of some layouts [n], with its number, under every mapping and without a cutoff.

        Without those that are not priced by the time of `stop_at`. As many are priced together as have
        `MOST_TOGETHER` mappings.

        Parameters
        ----------
        layouts
            Arrays of shape [n].
        """
        self._undecided_s = float("inf")
        first, degrees = rows_by_value(layouts, PLACED_AXES)
        counts = [len(self.mappings(layouts.scalar(row))["tp"]) for row in first]
        part_of = np.cumsum(np.array(counts)[degrees]) // MOST_TOGETHER
        for part in np.split(np.arange(len(part_of)), np.flatnonzero(np.diff(part_of)) + 1):
            works = dict(zip(part.tolist(), self._works(layouts.take(part)), strict=True))
            for at, priced in sorted(
                worked_out_together(list(works.values()), self._deadline).items()
            ):
                yield int(part[at]), priced

    def _works(self, layouts: Layout) -> list[Asking[Priced | None]]:
        """The prices of some layouts [n] under every mapping."""
        works: dict[int, Asking[Priced | None]] = {}
        _, fewest = self.least_memory_gib(layouts)
        for gpus, rows in _by_gpus(layouts):
            workload = self._workload.on(gpus)
            mapped = mapped_layouts(self._workload, gpus, layouts.take(rows))
            among = None
            if mapped.context is not None:
                times = shared_times(mapped.context, LAYER_AXES)
                assert times is not None
                among = PlacedLayouts(context=mapped.context, times=times)
            bounds = mapped.by_layout(np.where(mapped.inside, -np.inf, np.inf))
            ends = np.cumsum(mapped.counts).tolist()
            for row, table, bound_s, end in zip(
                rows.tolist(), mapped.tables, bounds, ends, strict=True
            ):
                layout, every = layouts.scalar(row), None
                if among is not None and len(bound_s):
                    index = np.arange(end - len(bound_s), end)
                    every = PlacedLayout(layout=layout, among=among, index=index)
                mappings = MappingBounds(matrices=table, bound_s=bound_s)
                amounts = self._recompute_amounts(layout, int(fewest[row]))
                works[row] = self._best(workload, mappings, every, amounts)
        return [works[row] for row in range(len(works))]

    def _each_alone(self, layouts: Layout) -> Iterator[tuple[int, Priced | None]]:
        """`exact_each` where what is known of a layout's mappings changes with every price."""
        for row in range(layouts.broadcast_shape()[0]):
            if time.monotonic() > self._deadline:
                return
            layout = layouts.scalar(row)
            table = self.mappings(layout)
            every_s = np.full(len(next(iter(table.values()))), -np.inf)
            yield row, self.exact(layout, MappingBounds(matrices=table, bound_s=every_s), np.inf)

    def _best(
        self,
        workload: Workload,
        mappings: MappingBounds,
        every: PlacedLayout | None,
        amounts: Sequence[int],
        cutoff_s: float = np.inf,
    ) -> Asking[Priced | None]:
        """`exact` on one allocation, with `amounts` of recomputed layers; None without mappings."""
        best: Priced | None = None
        memory_suffices = False
        if every is None:
            return None
        if not np.isfinite(cutoff_s) and len(amounts) > 1:
            amounts = [ALL_LAYERS, *amounts[:-1]]
        for recomputed_layers in amounts:
            if memory_suffices and recomputed_layers != ALL_LAYERS:
                continue
            limit = cutoff_s if best is None else min(cutoff_s, best.step_time_s)
            pricing = self._pricing_of(
                workload, replace(every.layout, recompute_layers=recomputed_layers)
            )
            priced = yield from pricing.best(mappings, every, limit)
            self._undecided_s = min(self._undecided_s, pricing.undecided_s)
            if priced is not None and priced.step_time_s < limit:
                best = priced
            if pricing.nothing_fits and recomputed_layers == ALL_LAYERS:
                return best
            if not pricing.memory_limits and recomputed_layers != ALL_LAYERS:
                memory_suffices = True
        return best

    def _pricing_of(self, workload: Workload, layout: Layout) -> LayoutPricing:
        return LayoutPricing(workload, layout)

    def _recompute_amounts(self, layout: Layout, fewest: int) -> list[int]:
        """Numbers of recomputed layers to try for one layout, from the fewest that memory asks for."""
        if not layout.recomputes_layers:
            return [0]
        if not self._some_layers:
            return [ALL_LAYERS]
        shortest = self._workload.model.layers // (int(layout.pp) * int(layout.vpp))
        return [*range(fewest, shortest + 1), ALL_LAYERS]


def _parts(layouts: Layout, size: int) -> Iterator[tuple[int, IntArray]]:
    """(GPUs in use, rows) of at most so many layouts on one allocation, equal degrees together."""
    for gpus, rows in _by_gpus(layouts):
        _, degrees = rows_by_value(layouts.take(rows), (*PLACED_AXES, "micro_batch"))
        alike = rows[np.argsort(degrees, kind="stable")]
        for part in np.array_split(alike, -(-len(rows) // size)):
            yield gpus, part


def _by_gpus(layouts: Layout) -> Iterator[tuple[int, IntArray]]:
    """(GPUs in use, rows) of every allocation size among the layouts."""
    gpus = np.broadcast_to(np.asarray(layouts.gpus), layouts.broadcast_shape())
    if not len(gpus):
        return
    values, back = np.unique(gpus, return_inverse=True)
    order = np.argsort(back, kind="stable")
    ends = np.cumsum(np.bincount(back))
    for value, rows in zip(values, np.split(order, ends[:-1]), strict=True):
        yield int(value), rows
