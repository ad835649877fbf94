"""Layouts on a mixed cluster that may beat a price: enumerated, asked of the rules of every part, bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, pairwise, permutations
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.fabric import keeps_inside
from meshwright.constraints.memory import HbmCapacity, HostMemory
from meshwright.constraints.registry import rules_for
from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.collectives import point_to_point_s
from meshwright.costmodel.data_parallel import data_parallel_traffic, largest_useful_window_s
from meshwright.costmodel.footprint import (
    GIB,
    KindBytes,
    LayerBytes,
    bytes_on_every_rank,
    layer_bytes,
    main_layer_rooms,
    peak_memory_gib,
    unlike_layer_bytes,
    usable_hbm_gib,
)
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTime, KindTimes
from meshwright.costmodel.layout import ROUNDING, Floats, Layout
from meshwright.costmodel.mixed import PlacedPart, Segment, crossing_context
from meshwright.costmodel.rank_load import counts_in_order, last_rank_s, longer_pass_share
from meshwright.costmodel.schedules import in_flight, least_by_work, least_of_segments_s
from meshwright.costmodel.stacks import memory_profile
from meshwright.costmodel.states import layer_parameters_on_gpu
from meshwright.costmodel.step_time import RankParameters, imbalance_s, scale_share, step_of_loads
from meshwright.costmodel.workload import Execution, Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.mappings import packed_context, rows_of_context, shared_times
from meshwright.planner.mixed.document import MixedRequest
from meshwright.planner.mixed.kernel import (
    Composition,
    MixedKernel,
    PartCosts,
    borders_of,
    gains_by_grouping,
)
from meshwright.planner.request.choices import DEGREES
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import Space, space_of

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Pattern = tuple[int, ...]
"""Leading dense layers of each of the first ranks, 1 or more; empty without any."""

# Bounds on steps on a mixed cluster, for many layouts with pipeline ranks on each part.
#
# With l_s the seconds of a layer on part s, packed as closely as its fabric allows, k_s ranks on it and e the
# least that the ends of the pipeline take, a step takes at least
#
#     x P(tau, W) + rest,   sum_s k_s floor(tau / l_s) >= L,   W >= sum_s n_s l_s + e,
#
# P what 1F1B takes at the least for each of x flushes (`schedules.least_by_work`), and n_s layers on part
# s, at most k_s tau / l_s. Dense layers in front of those with experts are no part of L: they count as an end
# of the pipeline does, for what they take on the part that is fastest at them. A rank sends over one link or
# more, and all of them over p - 1 both ways. Each line of P is least where all layers just find a place, or
# where a slow part is just no longer needed: between, W falls in straight lines. Whole layers stay where they
# are until tau takes in one more of some part. The rest is what follows the pipeline on the part that needs
# least for it, with as few parameters on a rank as an even split of the layers in L has: some rank of some
# part has as many or more.
#
# `seconds_in_memory` also counts the layers that each rank has room for, at its place along the pipeline,
# under each way in which the first ranks may hold the leading layers; these are taken as recomputed there
# at no cost.
#
# Layers that differ count in units: as many of each kind as it takes mean layers on the part that is fastest
# at them, so that L layers are L units. Then l_s is the least that a unit of any kind takes on part s, and
# whole numbers of layers say nothing. A rank that has room for n layers has it for n + a units, a being the
# most by which any run of layers exceeds its number. Where layers differ in bytes, n of them hold n times the
# mean less the most by which any run falls short of that.


_HALVINGS = 24
"""Of the interval in which the busiest rank's time lies; the lower end of what remains is the bound."""
_HALVINGS_IN_ORDER = 10
"""The same where the interval is about a layer wide."""
_IN_ORDER_TOGETHER = 1 << 12
"""Rows of which the layers are cut up in one array operation."""


class _Ranks(NamedTuple):
    """The ranks of k pipelines, as many as the deepest has: rows of the layouts, [k]; on which part each rank
    lies, [k, ranks]; and whether there is such a rank, [k, ranks].
    """

    rows: IntArray
    part: IntArray
    is_used: NDArray[np.bool_]


# The dense layers at the front of a mixture-of-experts model lie on the first ranks, as the model's order has
# it: all but the last of the ranks that have some hold nothing else. Which ranks hold how many is one of
# `leading_patterns`.


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


class RowBounds:
    """Bounds on the steps of some layouts of a pipeline, for any ranks on the parts of a cluster."""

    def __init__(
        self,
        workloads: Sequence[Workload],
        layouts: Layout,
        cutoff_s: float,
        *,
        is_pipeline_alone: bool = False,
    ) -> None:
        """`cutoff_s`: bounds need not hold for steps that take longer. Of the pipeline alone, they leave out
        what follows it, which takes most of the time that bounds take.
        """
        self._workloads, self._layouts, self._cutoff_s = workloads, layouts, cutoff_s
        self._model, self._flushes = workloads[0].model, workloads[0].flushes
        self._unlike = bool(self._model.unlike_layers)
        # Layers in front are part of a sequence of unlike ones.
        is_apart = self._model.moe_layers and not self._unlike
        self._leading = self._model.dense_layers if is_apart else 0
        self._main = self._model.layers - self._leading
        known: list[tuple[Context, KindTimes]] = []
        for workload in workloads:
            context = packed_context(workload, layouts)
            times = shared_times(context)
            assert times is not None
            known.append((context, times))
        self._known = known
        self._backward_share = np.min(
            [self._on_all(longer_pass_share(times)) for _, times in known], axis=0
        )
        """Of a rank's seconds what its backward pass takes at the least, [n]."""
        self._sent_s = np.min(
            [self._on_all(_least_sent_s(context)) for context, _ in known], axis=0
        )
        """What a rank takes at the least to send a micro-batch one way, [n]."""
        kinds = [_kinds_of(times) for _, times in known]
        each_s = np.array([[self._on_all(kind.seconds) for kind in own] for own in kinds])
        self._each_s = each_s
        """Of a layer of each kind, [parts, kinds, n]."""
        self._cheapest_s = np.min(each_s, axis=1)
        """Of a layer of any kind, [parts, n]."""
        self._longest_s = np.max(np.min(each_s, axis=0), axis=0)
        """Of a layer of the longest kind on the part that is fastest at it, [n]."""
        self._units = self._units_of_kinds(each_s)
        self._layer_s = np.min(each_s / self._units, axis=1)
        again_s = [[self._on_all(kind.recompute_s) for kind in own] for own in kinds]
        self._again_s = np.min(np.array(again_s), axis=1)
        ends = [_ends_s(self._model.mtp_layers, times) for _, times in known]
        self._at_ends_s = at_ends_s = np.array(
            [[self._on_all(seconds) for seconds in own] for own in ends]
        )
        """Beside layers on the first rank, and on the last, [parts, 2, n]."""
        leads = [times.dense if self._leading else None for _, times in known]
        self._lead_s = np.stack([self._on_all(0.0 if k is None else k.seconds) for k in leads])
        # Of each end, and of each leading layer, the least on any part: they need not lie on the same one.
        ends_s = np.sum(np.min(at_ends_s, axis=0), axis=0)
        self.least_ends_s = ends_s + self._leading * np.min(self._lead_s, axis=0)
        """What a micro-batch takes on all ranks beside main layers, at the least; [n]."""
        in_layers = np.sum(np.min(at_ends_s / self._layer_s[:, None], axis=0), axis=0)
        each_lead = np.min(self._lead_s / self._layer_s, axis=0)
        self._end_layers = in_layers + self._leading * each_lead
        rest_s = self._waits_s = self._on_all(0.0)
        if not is_pipeline_alone:
            # Every layer waits for the slowest of unlike packs: no less than on the part that waits least.
            waits_s = [imbalance_s(context, fully_recomputed=False) for context, _ in known]
            self._waits_s = np.min([self._on_all(seconds) for seconds in waits_s], axis=0)
            rest_s = self._waits_s + self._least_rest_s(known)
        self.rest_s = rest_s * (1 - ROUNDING)
        """What follows the pipeline, at the least, before what a step loses on many nodes; [n]."""
        shares = [scale_share(c.workload, layouts, c.constants) for c, _ in known]
        self.scale = 1.0 + np.max([self._on_all(share) for share in shares], axis=0)
        """What that multiplies the step by; [n]."""

    def _units_of_kinds(self, each_s: FloatArray) -> FloatArray:
        """How many mean layers a layer of each kind counts as, [kinds, n], from seconds [parts, kinds, n]."""
        if not self._unlike:
            return np.ones(each_s.shape[1:])
        number = counts_in_order(self._model.unlike_layers)[:, -1]
        mean_s = np.tensordot(number, each_s, (0, 1)) / self._main
        fastest = np.argmin(mean_s, axis=0)[None]
        own_s = np.take_along_axis(each_s, fastest[:, None], axis=0)[0]
        return np.asarray(own_s / np.take_along_axis(mean_s, fastest, axis=0))

    def _on_all(self, values: object) -> FloatArray:
        return np.broadcast_to(
            np.asarray(values, dtype=np.float64), self._layouts.broadcast_shape()
        )

    @property
    def most_layers(self) -> FloatArray:
        """Layers, at the most, on a rank of each part in a step below the cutoff, [parts, n]."""
        each_s = np.asarray(self._layouts.num_micro_batches) * self._cheapest_s * self.scale
        saved = self._leading * np.maximum(1.0 - self._lead_s / self._layer_s, 0.0)
        by_time = np.floor((self._cutoff_s / each_s + saved) * (1 + ROUNDING))
        return np.asarray(np.minimum(by_time, self._model.layers + 1.0 - self._layouts.pp))

    def _least_rest_s(self, known: Sequence[tuple[Context, KindTimes]]) -> FloatArray:
        """What follows the pipeline, on the part that needs least for it.

        Traffic hides under a rank's work on a micro-batch, of which a step holds as many as there are.
        """
        pp, longest_s = np.asarray(self._layouts.pp), np.asarray(self._layouts.num_micro_batches)
        longest_s = self._cutoff_s / longest_s
        if not self._differs_in_bytes:
            on_rank = [self._held(context.layout, np.ceil(self._main / pp)) for context, _ in known]
            return self._least_after_s(known, on_rank, longest_s)
        # One rank has as many parameters outside experts as the mean, another as many in them.
        least_s = []
        for of_dense, of_experts in ((1.0, 0.0), (0.0, 1.0)):
            on_rank = []
            for context, _ in known:
                dense, experts = self._in_all_layers(context.layout)
                on_rank.append((of_dense * dense / pp, of_experts * experts / pp))
            least_s.append(self._least_after_s(known, on_rank, longest_s))
        return np.maximum(*least_s)

    def _least_after_s(
        self,
        known: Sequence[tuple[Context, KindTimes]],
        on_rank: Sequence[tuple[FloatArray, FloatArray]],
        longest_s: FloatArray,
    ) -> FloatArray:
        """The same where a rank holds so much on each part."""
        by_part = [
            self._parts_s(*each, parameters, longest_s)
            for each, parameters in zip(known, on_rank, strict=True)
        ]
        after, before = zip(*by_part, strict=True)
        return np.asarray(np.min(after, axis=0) + np.min(before, axis=0))

    @property
    def _differs_in_bytes(self) -> bool:
        """Whether not every layer of a sequence of unlike ones has as many parameters."""
        model = self._model
        in_front = self._unlike and model.moe_layers and model.dense_layers
        return bool(model.unlike_bytes or in_front)

    def _held(self, layouts: Layout, layers: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Parameters outside experts and in them of so many main layers."""
        dense, rest, experts = layer_parameters_on_gpu(self._model, layouts)
        outside = rest if self._model.moe_layers else dense
        return np.asarray(layers * outside), np.asarray(layers * np.asarray(experts))

    def _in_all_layers(self, layouts: Layout) -> tuple[FloatArray, FloatArray]:
        """The same of all layers, those in front too."""
        model = self._model
        dense, rest, experts = layer_parameters_on_gpu(model, layouts)
        outside = model.dense_layers * dense + model.moe_layers * rest
        return np.asarray(outside), np.asarray(model.moe_layers * np.asarray(experts))

    def _parts_s(
        self,
        context: Context,
        times: KindTimes,
        parameters: tuple[FloatArray, FloatArray],
        longest_s: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """What follows the pipeline on a part, and what the host adds, where a rank has so many
        parameters outside experts and in them and takes no longer for a micro-batch, at the least; [k].
        """
        layouts = context.layout
        across = crossing_context(context, context.workload.gpus)
        on_rank = RankParameters(*parameters, across)
        traffic = data_parallel_traffic(context, on_rank.dense, on_rank.expert)
        window_s = np.minimum(largest_useful_window_s(context, traffic), longest_s)
        parts = step_of_loads(context, times, {"ranks": 0.0}, window_s * layouts.pp, on_rank).parts
        shape = layouts.broadcast_shape()
        after = parts["dp_comm"] + np.asarray(parts["optimizer"])
        before = np.asarray(parts["step_overhead"])
        return np.broadcast_to(after, shape), np.broadcast_to(before, shape)

    def rest_on_parts_s(self, rows: IntArray, ranks: IntArray) -> FloatArray:
        """What follows the pipeline, at the least, in a step below the cutoff, for rows of the layouts.

        Some rank of each part has as many main layers as ranks of the others have no time for, or more; what
        follows lasts as long as on the part that needs longest for that.

        Parameters
        ----------
        rows
            Which layouts, [k].
        ranks
            Pipeline ranks on each part, [k, parts], all at least 1.

        Returns
        -------
        array of float, shape [k]
        """
        rest_s = self.rest_s[rows]
        if not len(rows) or not np.isfinite(self._cutoff_s) or self._differs_in_bytes:
            return rest_s
        # The bounds of `_steps`, solved for the busiest rank.
        layer_s = self._layer_s[:, rows].T
        work_s = self._main * layer_s.min(axis=1) + self.least_ends_s[rows]
        pp, m = (
            np.asarray(each)[rows] for each in (self._layouts.pp, self._layouts.num_micro_batches)
        )
        each_m, share = m / self._flushes, self._backward_share[rows]
        left_s = self._cutoff_s / self.scale[rows] * (1 + ROUNDING) - rest_s
        left_s = np.maximum(left_s / self._flushes, 0.0)
        busiest_s = left_s / each_m
        for a, b in least_by_work(pp, each_m, share):
            above_s = np.maximum(left_s - a * work_s, 0.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                busiest_s = np.minimum(busiest_s, np.where(b > 0, above_s / b, np.inf))
        cheapest_s = self._cheapest_s[:, rows].T
        most = np.minimum(np.floor(busiest_s[:, None] / cheapest_s * (1 + ROUNDING)), self._main)
        placed = ranks * most
        fewest = self._main - (placed.sum(axis=1, keepdims=True) - placed)
        fewest = np.ceil(fewest / ranks - ROUNDING)
        after, before = [], []
        for part, (context, times) in enumerate(self._known):
            own = rows_of_context(context, rows)
            held = np.maximum(fewest[:, part], 1.0)
            in_all = self._layouts.broadcast_shape()[0]
            on_rank = self._held(own.layout, held)
            least = self._parts_s(own, times.rows(rows, in_all), on_rank, busiest_s)
            after.append(np.where(fewest[:, part] >= 1, least[0], 0.0))
            before.append(least[1])
        on_parts_s = np.max(after, axis=0) + np.max(before, axis=0) + self._waits_s[rows]
        return np.asarray(np.maximum(rest_s, on_parts_s * (1 - ROUNDING)))

    def seconds_at_best(self, most_ranks: FloatArray) -> FloatArray:
        """Bounds for all layouts, whatever ranks the parts have.

        Parameters
        ----------
        most_ranks
            Pipeline ranks that each part has room for, [parts, n].

        Returns
        -------
        array of float, shape [n]
        """
        order = np.argsort(self._layer_s, axis=0, kind="stable")
        left = np.broadcast_to(np.asarray(self._layouts.pp), self._layouts.broadcast_shape())
        left = left - (len(order) - 1.0)
        ranks = np.ones(self._layer_s.shape)
        columns = np.arange(self._layer_s.shape[1])
        for place in range(len(order)):
            part = order[place]
            given = np.clip(np.minimum(most_ranks[part, columns], left), 1.0, None)
            ranks[part, columns] = given
            left = left - (given - 1.0)
        busiest_s = (self._main + self._end_layers) / np.sum(ranks / self._layer_s, axis=0)
        return self._steps(columns, ranks.T, busiest_s)

    def seconds(self, rows: IntArray, ranks: IntArray) -> FloatArray:
        """Bounds for rows of the layouts.

        Parameters
        ----------
        rows
            Which layouts, [k].
        ranks
            Pipeline ranks on each part, [k, parts], all at least 1.

        Returns
        -------
        array of float, shape [k]
        """
        layer_s, ends = self._layer_s[:, rows].T, self._end_layers[rows]
        if self._unlike:
            busiest_s = (self._main + ends) / np.sum(ranks / layer_s, axis=1)
            return self._steps(rows, ranks, np.maximum(busiest_s, self._longest_s[rows]))
        ends_s = np.moveaxis(self._at_ends_s[:, :, rows], 0, -1)
        busiest_s = _least_busiest_s(self._main, layer_s, ranks, ends_s, ends)
        return self._steps(rows, ranks, busiest_s)

    def _steps(
        self, rows: IntArray, ranks: IntArray | FloatArray, busiest_s: FloatArray
    ) -> FloatArray:
        """Bounds where the busiest rank takes so long or longer."""
        layer_s = self._layer_s[:, rows].T
        order = np.argsort(layer_s, axis=1, kind="stable")
        fast_s = np.take_along_axis(layer_s, order, axis=1)
        own_ranks = np.take_along_axis(ranks, order, axis=1)
        speeds = np.cumsum(own_ranks / fast_s, axis=1)
        pp, m = (
            np.asarray(each)[rows] for each in (self._layouts.pp, self._layouts.num_micro_batches)
        )
        each_m, share = m / self._flushes, self._backward_share[rows]
        lines = least_by_work(pp, each_m, share)
        sent_s, ways = self._sent_s[rows], 2.0 + self._workloads[0].scoring_passes

        def at(reached: FloatArray, until: FloatArray) -> FloatArray:
            """What a flush takes where no rank takes longer, by each line of it, [lines, k]."""
            work_s = np.maximum(self._least_work_s(rows, until, fast_s), reached)
            work_s = work_s + ways * (pp - 1) * sent_s
            busy_s = reached + sent_s
            # By passes of one kind alone a rank need not send more than it does beside its work.
            own_s = np.where(each_m > pp, busy_s, reached), reached, busy_s
            by_lines = zip(lines, own_s, strict=True)
            return np.stack([a * work_s + b * longest_s for (a, b), longest_s in by_lines])

        best_s, further_s = np.full(len(rows), np.inf), busiest_s
        if not self._unlike:
            number = np.floor(busiest_s[:, None] / fast_s + ROUNDING)
            further_s = np.min((number + 1.0) * fast_s, axis=1) * (1 - ROUNDING)
            further_s = np.maximum(further_s, busiest_s)
            best_s = np.max(at(busiest_s, np.cumsum(own_ranks * number, axis=1)), axis=0)
        kinks = np.sort(self._main / speeds, axis=1).T
        points = [further_s, *(np.maximum(further_s, each) for each in kinks)]
        by_points = [at(reached, reached[:, None] * speeds) for reached in points]
        best_s = np.minimum(best_s, np.max(by_points[0], axis=0))
        for before, after in pairwise(by_points):
            best_s = np.minimum(best_s, _least_between(before, after))
        pipeline_s = best_s * self._flushes
        return np.asarray((pipeline_s + self.rest_s[rows]) * self.scale[rows] * (1 - ROUNDING))

    def _least_work_s(self, rows: IntArray, until: FloatArray, fast_s: FloatArray) -> FloatArray:
        """Of all ranks and a micro-batch, from the layers that the parts, the fastest first, take at most."""
        layers = float(self._main)
        until = np.minimum(until, layers)
        until[:, -1] = layers
        placed = np.diff(until, axis=1, prepend=0.0)
        return np.asarray(np.sum(placed * fast_s, axis=1) + self.least_ends_s[rows])

    def seconds_in_order(self, rows: IntArray, ranks: IntArray, order: Sequence[int]) -> FloatArray:
        """The same for parts in their order, with the best number of layers on each.

        Parameters
        ----------
        rows, ranks, order
            As `seconds_in_memory` has them.

        Returns
        -------
        array of float, shape [k]
            0 where rows and places between the parts are too many.
        """
        places = borders_of(self._model.layers, len(order))
        step_s = np.zeros(len(rows))
        if len(rows) * len(places) > _MOST_PLACES:
            return step_s
        each = max(1, _TOGETHER // len(places))
        for start in range(0, len(rows), each):
            some = slice(start, start + each)
            step_s[some] = self._between(rows[some], ranks[some], order, places)
        return step_s

    def _between(
        self, rows: IntArray, ranks: IntArray, order: Sequence[int], places: IntArray
    ) -> FloatArray:
        """The same of the best of some places between the parts, [b, parts + 1]."""
        before = np.arange(self._model.layers + 1.0)
        leading = np.minimum(before, self._leading)
        work_s, busiest_s = [], []
        for at, part in enumerate(order):
            own_s, of_part = self._layer_s[part, rows, None], ranks[:, part, None]
            if self._unlike:
                taken_s = self._each_s[part][:, rows].T @ counts_in_order(self._model.unlike_layers)
            else:
                taken_s = (before - leading) * own_s + leading * self._lead_s[part, rows, None]
            own_work_s = taken_s[:, places[:, at + 1]] - taken_s[:, places[:, at]]
            for end, place in enumerate((0, len(order) - 1)):
                if at == place:
                    own_work_s = own_work_s + self._at_ends_s[part, end, rows, None]
            work_s.append(own_work_s)
            busiest_s.append(own_work_s / of_part)
            if not self._unlike and not self._leading:
                number = np.ceil((places[:, at + 1] - places[:, at]) / of_part)
                busiest_s[-1] = np.maximum(busiest_s[-1], number * own_s)
        each_m = np.asarray(self._layouts.num_micro_batches)[rows] / self._flushes
        pipeline_s = least_of_segments_s(
            ranks[:, None, list(order)],
            each_m[:, None, None],
            np.stack(work_s, axis=-1),
            np.stack(busiest_s, axis=-1),
            self._backward_share[rows, None, None],
        ).min(axis=1)
        step_s = self._flushes * pipeline_s + self.rest_s[rows]
        return np.asarray(step_s * self.scale[rows] * (1 - ROUNDING))

    def seconds_in_memory(
        self, rows: IntArray, ranks: IntArray, order: Sequence[int]
    ) -> FloatArray:
        """The same with the layers that every rank has room for.

        Parameters
        ----------
        rows, ranks
            As `seconds` has them.
        order
            The parts along the pipeline.

        Returns
        -------
        array of float, shape [k]
            Infinite where the layers do not fit.
        """
        ends = np.cumsum(ranks[:, list(order)], axis=1)
        deepest = int(ends[:, -1].max())
        place = np.arange(deepest)
        turn = np.minimum(np.sum(place >= ends[:, :, None], axis=1), len(order) - 1)
        held = _Ranks(rows, np.asarray(order)[turn], place < ends[:, -1:])
        least = np.full(len(rows), np.inf)
        for pattern in leading_patterns(self._leading, deepest):
            least = np.minimum(least, self._busiest_in_memory_s(held, pattern))
        fits = np.isfinite(least)
        if self._unlike:
            bound_s = self._steps(rows, ranks, np.where(fits, least, 0.0))
            may_beat = np.flatnonzero(fits & (bound_s < self._cutoff_s))
            for start in range(0, len(may_beat), _IN_ORDER_TOGETHER):
                chosen = may_beat[start : start + _IN_ORDER_TOGETHER]
                ranks_of_rows = _Ranks(rows[chosen], held.part[chosen], held.is_used[chosen])
                least[chosen] = self._busiest_in_order_s(ranks_of_rows, least[chosen])
        return np.where(fits, self._steps(rows, ranks, np.where(fits, least, 0.0)), np.inf)

    def _busiest_in_memory_s(self, held: _Ranks, pattern: Pattern) -> FloatArray:
        """The least time in which all main layers find room beside the leading ones; [k], or infinite."""
        rows, part, is_used = held
        leading = np.zeros(part.shape[1])
        leading[: len(pattern)] = pattern
        takes_main = is_used & (np.arange(part.shape[1]) >= len(pattern) - 1)
        layer_s = self._layer_s[part, rows[:, None]]
        again_s = self._again_s[part, rows[:, None]]
        lead_s = self._lead_s[part, rows[:, None]] * leading
        room, kept, relief = self._rooms(rows, part, leading)
        beyond = self._beyond[rows, None] if self._unlike else 0.0
        fits = np.all(room >= 0, axis=1) & is_used[:, max(len(pattern) - 1, 0)]
        room = np.where(takes_main, room, 0)

        def placed(limit_s: FloatArray) -> FloatArray:
            """Layers that find a place where no rank takes longer; what has no room is recomputed."""
            limit = limit_s[:, None] * (1 + ROUNDING) - lead_s
            plain = limit / layer_s
            with np.errstate(divide="ignore", invalid="ignore"):
                slower = again_s / relief
                room_s = limit + slower * (kept[0] + beyond * kept[1])
                recomputing = room_s / (layer_s + slower * kept[1])
            recomputing = np.where(relief > 0, recomputing, plain)
            in_time = np.minimum(plain, recomputing)
            if not self._unlike:
                in_time = np.floor(in_time)
            fitting = np.minimum(room + beyond * is_used, in_time * is_used)
            return np.where(np.all(limit >= 0, axis=1), fitting.sum(axis=1), -np.inf)

        low = np.zeros(len(rows))
        high = self._main * (layer_s + again_s).max(axis=1) + lead_s.max(axis=1)
        if self._unlike:
            with np.errstate(divide="ignore", invalid="ignore"):
                again = np.maximum(room * kept[1] - kept[0], 0.0) * (again_s / relief)
            again = np.where(relief > 0, again, 0.0)
            high = np.max((room + beyond) * layer_s + again, axis=1)
        fits &= room.sum(axis=1) >= self._main
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_enough = placed(middle) >= self._main
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return np.where(fits, low, np.inf)

    def _busiest_in_order_s(self, ranks: _Ranks, least_s: FloatArray) -> FloatArray:
        """The least time in which ranks that each take the layers that come next take all of them; [k].

        No other way to cut up a sequence gets further within a limit of seconds, nor of layers that fit. The
        limit is bisected from what is known of it, and one within which not all layers are taken is a bound.
        """
        rows, part, is_used = ranks
        before = counts_in_order(self._model.unlike_layers)
        room, _, _ = self._rooms(rows, part, np.zeros(part.shape[1]))
        before_s = np.stack([kinds_s[:, rows].T @ before for kinds_s in self._each_s])
        beside_s = np.zeros(part.shape)
        beside_s[:, 0] = self._at_ends_s[part[:, 0], 0, rows]
        last = is_used.sum(axis=1) - 1
        at_last = np.arange(len(rows)), last
        beside_s[at_last] += self._at_ends_s[part[at_last], 1, rows]
        columns = np.arange(len(rows))

        def takes_all(limit_s: FloatArray) -> NDArray[np.bool_]:
            place = np.zeros(len(rows), dtype=np.int64)
            for rank in range(part.shape[1]):
                own_s = before_s[part[:, rank], columns]
                until_s = own_s[columns, place] + limit_s * (1 + ROUNDING) - beside_s[:, rank]
                reach = np.count_nonzero(own_s <= until_s[:, None], axis=1) - 1
                reach = np.minimum(reach, place + room[:, rank].astype(np.int64))
                place = np.where(is_used[:, rank], np.maximum(reach, place), place)
            return np.asarray(place == before.shape[1] - 1)

        low = least_s
        high = least_s + np.max(beside_s, axis=1) + self._longest_s[rows]
        low = np.where(takes_all(high), low, high)
        for _ in range(_HALVINGS_IN_ORDER):
            middle = (low + high) / 2
            is_enough = takes_all(middle)
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return low

    def _rooms(
        self, rows: IntArray, part: IntArray, leading: FloatArray
    ) -> tuple[FloatArray, tuple[FloatArray, FloatArray], FloatArray]:
        """Of each row and rank: the most main layers with all recomputed that may be, negative where not even
        the leading ones fit; the bytes for main layers and of one with none recomputed; and what recomputing
        one gives back.
        """
        layouts = self._layouts.take(rows)
        flying = np.asarray(in_flight(layouts.with_axis(), np.arange(part.shape[1])))
        flying = np.maximum(flying, 1.0)
        bytes_of = np.stack([self._memory[index] for index in range(len(self._workloads))])
        taken = (bytes_of[part, k, rows[:, None]] for k in range(6))
        states, saved, dropped, free, lead_states, lead_saved = taken
        full = layouts.recomputes_layers
        whole = states + saved * flying
        if self._unlike:
            short_of = np.stack(self._short_of_mean)
            taken = (short_of[part, k, rows[:, None]] for k in range(4))
            fewer_states, fewer_saved, fewer_dropped, most_relief = taken
            relief = np.where(full[:, None], most_relief * flying, 0.0)
            smallest = states + np.where(full[:, None], dropped, saved) * flying
            spare = np.where(full[:, None], fewer_dropped, fewer_saved) * flying
            room = (free + fewer_states + spare) / np.maximum(smallest, 1.0)
            room = np.floor(np.maximum(room, 0.0) * (1 + ROUNDING))
            room = np.minimum(room, self._main)
            return room, (free + fewer_states + fewer_saved * flying, whole), relief
        relief = np.where(full[:, None], (saved - dropped) * flying, 0.0)
        of_leading = leading * (lead_states + lead_saved * flying)
        beside = free - of_leading
        room = np.floor(np.maximum(beside, 0.0) / (whole - relief) * (1 + ROUNDING))
        room = np.where((leading > 0) & (of_leading > free * (1 + ROUNDING)), -1.0, room)
        return room, (beside, whole), relief

    @cached_property
    def _beyond(self) -> FloatArray:
        """Units, at the most, that a run of unlike layers has beyond its number of layers; [n]."""
        layers = self._model.unlike_layers
        return _most_of_run([self._units[kind] - 1.0 for kind in _numbers(layers)])

    @cached_property
    def _short_of_mean(self) -> list[FloatArray]:
        """Of each part [states, saved, dropped, relief; n]: bytes, at the most, by which a run of layers
        falls short of as many mean ones, and what recomputing a layer of any kind gives back.
        """
        tables = []
        for workload in self._workloads:
            if self._model.unlike_bytes:
                kinds = unlike_layer_bytes(workload, self._layouts)
                order = _numbers(self._model.unlike_bytes)
                relief = np.max([each.saved - each.dropped for each in kinds], axis=0)
                rows = [
                    _most_of_run([-each[kind] for kind in order])
                    for each in self._beside_mean(workload, kinds)
                ]
            else:
                layer = layer_bytes(
                    workload, self._layouts, saved_activations(workload, self._layouts)
                )
                relief = layer.saved - layer.dropped
                if self._differs_in_bytes:
                    relief = np.maximum(relief, layer.leading_saved - layer.leading_dropped)
                rows = [np.zeros(np.shape(relief))] * 3
            tables.append(np.stack([*rows, np.maximum(relief, 0.0)]))
        return tables

    def _beside_mean(
        self, workload: Workload, kinds: Sequence[KindBytes]
    ) -> Iterator[list[FloatArray]]:
        """States, what is saved, and what is where a layer is recomputed: of each kind less the mean."""
        saved = saved_activations(workload, self._layouts)
        mean = layer_bytes(workload, self._layouts, saved)
        yield [np.asarray(each.states - mean.states) for each in kinds]
        yield [np.asarray(each.saved - mean.saved) for each in kinds]
        yield [np.asarray(np.minimum(each.dropped, each.saved) - mean.dropped) for each in kinds]

    @cached_property
    def _memory(self) -> list[FloatArray]:
        """Of each part [states, saved, dropped, free for layers, and at the least states and activations of a
        leading layer; n], in bytes.
        """
        tables = []
        for workload in self._workloads:
            saved = saved_activations(workload, self._layouts)
            layer: LayerBytes = layer_bytes(workload, self._layouts, saved)
            free = usable_hbm_gib(workload) * GIB - self._beside_layers(workload)
            full = self._layouts.recomputes_layers
            dropped = np.minimum(layer.leading_dropped, layer.leading_saved)
            lead_saved = np.where(full, dropped, layer.leading_saved)
            own = (layer.states, layer.saved, layer.dropped, free, layer.leading_states, lead_saved)
            if self._differs_in_bytes and not self._model.unlike_bytes:
                # Dense layers in front of unlike ones: each counts as the smaller kind.
                own = (
                    np.minimum(layer.states, layer.leading_states),
                    np.minimum(layer.saved, layer.leading_saved),
                    np.minimum(layer.dropped, layer.leading_dropped),
                    *own[3:],
                )
            tables.append(np.stack(own))
        return tables

    def _beside_layers(self, workload: Workload) -> FloatArray:
        """Bytes beside the layers on every rank, with one layer recomputed or all."""
        one = replace(
            self._layouts, recompute_layers=self._layouts.recomputes_layers.astype(np.int64)
        )
        beside = [bytes_on_every_rank(workload, each) for each in (self._layouts, one)]
        return np.asarray(np.minimum(*beside))


def _least_between(before: FloatArray, after: FloatArray) -> FloatArray:
    """The least, between two points or at the second, of the largest of some straight lines, [lines, k]: at
    the end, or where two of them cross.
    """
    least = np.max(after, axis=0)
    for first, second in combinations(range(len(before)), 2):
        apart = before[first] - before[second], after[first] - after[second]
        crosses = apart[0] * apart[1] < 0
        share = np.where(crosses, apart[0] / np.where(crosses, apart[0] - apart[1], 1.0), 1.0)
        least = np.minimum(least, np.max(before + share * (after - before), axis=0))
    return np.asarray(least)


def _least_busiest_s(
    layers: int, layer_s: FloatArray, ranks: IntArray, ends_s: FloatArray, end_layers: FloatArray
) -> FloatArray:
    """The least time in which all layers and some ends, in layers, find a rank; [k].

    Layers alone find one only in whole numbers of them, fewer on the ranks that run the ends of the pipeline
    too: each takes `ends_s`, [2, k, parts], and lies where that costs the fewest layers.
    """
    speed = np.sum(ranks / layer_s, axis=1)
    reached = layers / speed
    is_open = np.ones(len(reached), dtype=bool)
    beside_s = np.concatenate([np.zeros((1, *layer_s.shape)), ends_s])
    for _ in range(4 * layer_s.shape[1] + 8):
        left_s = np.maximum(reached[:, None] - beside_s, 0.0)
        following = beside_s + np.ceil(left_s / layer_s - ROUNDING) * layer_s
        following = np.min(
            following, axis=(0, 2), where=following >= reached[:, None], initial=np.inf
        )
        following = np.maximum(following, reached)
        left_s = following[:, None] - beside_s
        whole, *with_ends = np.floor(np.maximum(left_s, 0.0) / layer_s + ROUNDING)
        reached = np.where(is_open, following, reached)
        lost = np.sum([np.min(whole - each, axis=1) for each in with_ends], axis=0)
        is_open &= np.sum(ranks * whole, axis=1) - lost < layers
        if not is_open.any():
            break
        reached = np.where(is_open, reached * (1 + 1e-7), reached)
    return np.asarray(np.maximum((layers + end_layers) / speed, reached * (1 - 1e-6)))


def _kinds_of(times: KindTimes) -> tuple[KindTime, ...]:
    """Of main layers: one kind, or all of unlike ones."""
    kind = times.moe or times.dense
    assert kind is not None
    return times.unlike or (kind,)


def _numbers(layers: tuple[str, ...]) -> list[int]:
    """The kind of each layer by its row of `counts_in_order`."""
    return [int(kind) for kind in np.argmax(np.diff(counts_in_order(layers)), axis=0)]


def _most_of_run(layers: Sequence[FloatArray]) -> FloatArray:
    """The largest sum of any run of neighbours, [n]; at least that of none, 0."""
    largest = ending_here = np.zeros(np.shape(layers[0]))
    for each in layers:
        ending_here = np.maximum(ending_here + each, 0.0)
        largest = np.maximum(largest, ending_here)
    return largest


def _least_sent_s(context: Context) -> Floats:
    """One micro-batch from a stage to the next, at the least: on nodes of their own, or in one domain."""
    layout, cluster = context.layout, context.workload.cluster
    levels = len(context.links.bytes_per_s)
    payload = context.activation_bytes / np.asarray(layout.tp)
    each_s = [point_to_point_s(payload, level, context.links) for level in range(levels)]
    outside_s: Floats = np.minimum.reduce(np.broadcast_arrays(*(each_s[1:] or each_s)))
    stage = np.asarray(layout.gpus) // np.asarray(layout.pp)
    domain = max(cluster.nvlink_domain, cluster.gpus_per_node)
    return np.where(stage >= domain, outside_s, np.minimum(outside_s, each_s[0]))


def _ends_s(mtp_layers: int, times: KindTimes) -> tuple[FloatArray, FloatArray]:
    """Seconds of what the first rank runs beside layers, and of what the last one does."""
    return np.asarray(times.embedding.seconds), np.asarray(last_rank_s(times, mtp_layers))


# Which layouts on a mixed cluster may gain by offloading more of the optimizer: those that memory may limit.
#
# Offloading more makes no step shorter: the host updates its share far slower than a GPU its own. So nothing
# is offloaded where every rank, on any part, has room for all the layers that a step worth having gives it.


_MEMORY_ROUNDING = 1e-6
"""Of a rank's memory, in favour of looking."""


def with_more_offloaded(
    space: Space,
    workloads: Sequence[Workload],
    layouts: Layout,
    most_layers: NDArray[np.float64],
) -> Layout:
    """Every layout that offloads more than one of those given, which may therefore be faster.

    Parameters
    ----------
    space
        Its shares; the least of several is none.
    workloads
        On each part.
    layouts
        With nothing offloaded where there is a choice, [n].
    most_layers
        On a rank of each part, in a step worth having, [parts, n].

    Returns
    -------
    Layout
        Arrays of shape [k], k 0 or more.
    """
    if not space.offloads_several:
        return layouts.take(np.zeros(0, dtype=np.int64))
    limited = np.zeros(layouts.broadcast_shape(), dtype=np.bool_)
    for workload, most in zip(workloads, most_layers, strict=True):
        limited |= _lacks_room(workload, layouts, most)
    every = space.offloaded(layouts.take(limited))
    return every.take(np.asarray(every.optimizer_offload) > 0)


def _lacks_room(
    workload: Workload, layouts: Layout, most: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether some rank, were it on this part, may not hold so many layers, the fewest recomputed."""
    outputs = memory_profile(workload.framework).keeps_stage_outputs
    if outputs != "none" or workload.model.unlike_bytes:
        # What stages keep is beside the rooms, and of layers with unlike bytes these are for the smallest.
        return np.ones(layouts.broadcast_shape(), dtype=np.bool_)
    one = 1 if framework_of_stack(workload.framework).recompute_amount is not None else ALL_LAYERS
    sized = replace(layouts, recompute_layers=np.where(layouts.recomputes_layers, one, 0))
    rooms = main_layer_rooms(workload, sized, usable_hbm_gib(workload) * (1 - _MEMORY_ROUNDING))
    place = np.arange(rooms.shape[1])
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    if leading:
        taken = leading * _more_in_layers(workload, sized)
        rooms = np.where(place < leading, rooms - np.ceil(taken)[:, None], rooms)
    is_rank = place < np.asarray(layouts.pp)[:, None]
    return np.asarray(np.any(is_rank & (rooms < most[:, None]), axis=1))


def _more_in_layers(workload: Workload, layouts: Layout) -> NDArray[np.float64]:
    """How many main layers' room a leading layer takes beyond that of a main one, at the most; [n].

    On the first rank, where most micro-batches are in flight, or with none: between, each kind of layer takes
    a linear amount, whose ratio is largest at one of the ends.
    """
    layer = layer_bytes(workload, layouts, saved_activations(workload, layouts))
    largest = np.zeros(layouts.broadcast_shape())
    least = np.minimum(layer.saved, layer.dropped)
    for flying in (0.0, np.asarray(in_flight(layouts, 0), dtype=np.float64)):
        main = layer.states + least * flying
        for saved, of_leading in (
            (layer.saved, layer.leading_saved),
            (least, layer.leading_dropped),
        ):
            more = layer.leading_states - layer.states + (of_leading - saved) * flying
            largest = np.maximum(largest, more / main)
    return largest


ASKED_OF_PARTS = ("gpu-budget", HbmCapacity.name, HostMemory.name)
"""Rules on what the parts have together, or on a part's own ranks: this search asks the parts itself."""
_TOGETHER = 1 << 16
"""Layouts bounded in one array operation."""
_MOST_PLACES = 1 << 24
"""Rows times places between parts that are bounded, at the most: some seconds."""
_FIRST_DEGREES = 64
"""Degrees of an execution that are expanded before the others, where the price to beat may be far off."""


@dataclass(frozen=True, kw_only=True)
class PromisingRow:
    """A layout under one execution, with ranks on each part, and no price below the bound."""

    bound_s: float
    execution: Execution
    layout: Layout
    composition: Composition
    rest_s: float
    scale: float
    """As `MixedKernel` has them."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of some layouts under one execution, on parts in one order."""

    execution: Execution
    layouts: Layout
    order: tuple[int, ...]
    which: IntArray
    """Of the layouts, [k]."""
    ranks: IntArray
    """Of each part of the cluster, [k, parts]."""
    bound_s: FloatArray
    """Of each row, [k]."""
    rest_s: FloatArray
    """Of each row, [k]."""
    scale: FloatArray
    """Of each layout."""

    def row(self, position: int) -> PromisingRow:
        """One of them."""
        index = int(self.which[position])
        return PromisingRow(
            bound_s=float(self.bound_s[position]),
            execution=self.execution,
            layout=self.layouts.scalar(index),
            composition=tuple((part, int(self.ranks[position, part])) for part in self.order),
            rest_s=float(self.rest_s[position]),
            scale=float(self.scale[index]),
        )


class PromisingRows(Sequence[PromisingRow]):
    """Rows, least bounds first, equal ones as they were found; made when they are asked for."""

    def __init__(self, blocks: Sequence[_Rows] = ()) -> None:
        self._blocks = blocks
        sizes = [len(each.bound_s) for each in blocks]
        self._of = np.repeat(np.arange(len(sizes)), sizes)
        self._position = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, sizes)])
        bound_s = np.concatenate([np.zeros(0), *(each.bound_s for each in blocks)])
        self._order = np.argsort(bound_s, kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> PromisingRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromisingRow]: ...

    def __getitem__(self, index: int | slice) -> PromisingRow | list[PromisingRow]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = int(self._order[index])
        rows = self._blocks[int(self._of[row])]
        return rows.row(int(self._position[row]))


MOST_LAYOUTS = 200_000
"""Layouts of which `every_row` asks the rules, at the most."""
MOST_PIPELINES = 5_000
"""Pipelines that it lists, at the most: to price each takes a tenth of a second or more."""


def every_row(request: MixedRequest, on_block: Callable[[], object]) -> Iterator[PromisingRow]:
    """Every layout that no rule of any part forbids, with ranks on each part in every order: no bounds.

    Parameters
    ----------
    request
        What to plan.
    on_block
        Called again and again meanwhile; what it raises ends the enumeration.

    Raises
    ------
    InputError
        If there are more than `MOST_LAYOUTS` or `MOST_PIPELINES`.
    """
    blocks, listed, count = [], 0, 0
    for execution in executions_on_parts(request):
        space = space_on_parts(request, execution)
        if space is None:
            continue
        on_block()
        degrees = space.degrees(request.gpus, on_block=on_block)
        listed += int(space.layouts_per_degrees(degrees).sum())
        _refuse_many(listed, MOST_LAYOUTS, "layout")
        workloads = [part.workload(execution) for part in request.parts]
        layouts = _legal(workloads, space.layouts(degrees), request.gpus)
        if not layouts.broadcast_shape()[0]:
            continue
        which, ranks = with_ranks(request, layouts)
        orders = list(permutations(range(len(workloads))))
        count += len(which) * len(orders)
        _refuse_many(count, MOST_PIPELINES, "pipeline")
        nothing_s = np.zeros(len(which))
        blocks += [
            _Rows(
                execution=execution,
                layouts=layouts,
                order=order,
                which=which,
                ranks=ranks,
                bound_s=nothing_s,
                rest_s=nothing_s,
                scale=np.ones(layouts.broadcast_shape()[0]),
            )
            for order in orders
        ]
    yield from PromisingRows(blocks)


def _refuse_many(count: int, most: int, what: str) -> None:
    if count > most:
        raise InputError(
            f"method: exhaustive prices every {what} one by one, and there are {count} or more; at most "
            f"{most} are allowed. Pin some choices (--pin tp=8,pp=4), or use --method cp-sat"
        )


@dataclass(frozen=True, kw_only=True)
class _Degrees:
    """Degrees under one execution, [n], and what a pipeline with them takes at the least."""

    execution: Execution
    space: Space
    workloads: Sequence[Workload]
    degrees: Layout
    least_s: FloatArray


def promising_rows(
    request: MixedRequest,
    cutoff_s: float,
    on_block: Callable[[], object],
    look_at: Callable[[PromisingRows], float] | None = None,
) -> PromisingRows:
    """Every layout that may beat a price, least bounds first.

    Parameters
    ----------
    request
        What to plan.
    cutoff_s
        The price to beat; infinite where there is none.
    on_block
        Called again and again meanwhile; what it raises ends the enumeration.
    look_at
        Called with the rows of each execution, the most promising one first, and of its fastest degrees alone
        while nothing has beaten the price; returns the price to beat from then on.
    """
    groups = sorted(
        _groups(request, cutoff_s, on_block), key=lambda each: float(each.least_s.min())
    )
    rows: list[_Rows] = []
    limit_s = cutoff_s
    for group in groups:
        order, first = np.argsort(group.least_s, kind="stable"), 0
        while first < len(order) and group.least_s[order[first]] < limit_s:
            is_loose = look_at is not None and not first and limit_s == cutoff_s < np.inf
            width = _FIRST_DEGREES if is_loose else len(order)
            taken = order[first : first + width]
            degrees = group.degrees.take(np.sort(taken[group.least_s[taken] < limit_s]))
            found = list(_rows_of(request, group, degrees, limit_s, on_block))
            rows += found
            first += width
            if look_at is not None:
                limit_s = min(limit_s, look_at(PromisingRows(found)))
    return PromisingRows(rows)


def _groups(
    request: MixedRequest, cutoff_s: float, on_block: Callable[[], object]
) -> Iterator[_Degrees]:
    """The degrees of each execution of which some layout may beat a price."""
    for execution in executions_on_parts(request):
        space = space_on_parts(request, execution)
        if space is None:
            continue
        workloads = [part.workload(execution) for part in request.parts]
        degrees = space.degrees(request.gpus, on_block=on_block)
        degrees, least_s = _worth_expanding(request, workloads, degrees, cutoff_s, on_block)
        if len(least_s):
            yield _Degrees(
                execution=execution,
                space=space,
                workloads=workloads,
                degrees=degrees,
                least_s=least_s,
            )


def _rows_of(
    request: MixedRequest,
    group: _Degrees,
    degrees: Layout,
    cutoff_s: float,
    on_block: Callable[[], object],
) -> Iterator[_Rows]:
    """The rows of some degrees of a group that may beat a price."""
    for block in _blocks(group.space, degrees):
        on_block()
        layouts = _that_may_beat(request, group.space, group.workloads, block, cutoff_s)
        on_block()
        yield from _rows_below(request, group.workloads, group.execution, layouts, cutoff_s)


def executions_on_parts(request: MixedRequest) -> list[Execution]:
    """What every part can run.

    Parameters
    ----------
    request
        What to plan.
    """
    first, *others = (part.execution_options.executions() for part in request.parts)
    return [each for each in first if all(each in own for own in others)]


def space_on_parts(request: MixedRequest, execution: Execution) -> Space | None:
    """The layouts that every part can run a stage of; None without any.

    One virtual stage each under 1F1B: where pins ask for others there is no pipeline through parts. Every
    part shards in as many groups, as a launch names one number.

    Parameters
    ----------
    request
        What to plan.
    execution
        One that every part can run.
    """
    spaces = [space_of(part, execution) for part in request.parts]
    first = spaces[0]
    degrees = (name for name in DEGREES if name != "pp")
    names = (*degrees, "zero", "recompute", "shard_groups")
    common: dict[str, Any] = {
        name: tuple(v for v in getattr(first, name) if all(v in getattr(o, name) for o in spaces))
        for name in names
    }
    model = request.first.model
    vpp = first.vpp is None or 1 in first.vpp
    offloads = tuple(each for each in first.offloads if all(each in own.offloads for own in spaces))
    is_plain = vpp and "1f1b" in first.schedules and bool(offloads)
    if not is_plain or not all(common.values()) or "pp" in request.first.forbids:
        return None
    pinned, largest = request.first.pins.get("pp"), min(model.most_stages, request.gpus)
    depths = [int(pinned)] if pinned is not None else range(2, largest + 1)
    return replace(
        first,
        **common,
        pp=tuple(pp for pp in depths if 2 <= pp <= largest),
        vpp=None,
        interleaving=False,
        offloads=offloads,
        schedules=("1f1b",),
        fewest_gpus=1,
    )


def _most_ranks(request: MixedRequest, layouts: Layout) -> IntArray:
    """Pipeline ranks that each part has room for, [parts, n]."""
    stage = np.asarray(layouts.gpus) // np.asarray(layouts.pp)
    return np.asarray(np.array([part.gpus for part in request.parts])[:, None] // stage)


def _has_room(most_ranks: IntArray, layouts: Layout) -> NDArray[np.bool_]:
    """Whether each part has room for a rank, and all together for as many as there are; [n]."""
    has_room = np.all(most_ranks >= 1, axis=0)
    return np.asarray(has_room & (most_ranks.sum(axis=0) >= np.asarray(layouts.pp)))


def _worth_expanding(
    request: MixedRequest,
    workloads: Sequence[Workload],
    degrees: Layout,
    cutoff_s: float,
    on_block: Callable[[], object],
) -> tuple[Layout, FloatArray]:
    """Degrees of which some layout may beat a price, and what their pipelines take at the least.

    Recomputing modules makes no layer shorter, and neither a ZeRO stage nor what is offloaded changes its
    time: the pipeline takes as long as without any of these, or longer.
    """
    degrees = degrees.take(np.flatnonzero(_has_room(_most_ranks(request, degrees), degrees)))
    kept, known_s = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for start in range(0, degrees.broadcast_shape()[0], _TOGETHER):
        on_block()
        rows = np.arange(start, min(start + _TOGETHER, degrees.broadcast_shape()[0]))
        own = degrees.take(rows)
        bounds = RowBounds(workloads, own, cutoff_s, is_pipeline_alone=True)
        least_s = bounds.seconds_at_best(_most_ranks(request, own).astype(np.float64))
        kept.append(rows[least_s < cutoff_s])
        known_s.append(least_s[least_s < cutoff_s])
    return degrees.take(np.concatenate(kept)), np.concatenate(known_s)


def _blocks(space: Space, degrees: Layout) -> Iterator[Layout]:
    """All layouts of the degrees, with the least that each may offload, some at a time."""
    count = degrees.broadcast_shape()[0]
    variants = len(space.zero) * len(space.recompute) * len(space.shard_groups)
    each = max(1, _TOGETHER // max(1, variants))
    for start in range(0, count, each):
        own = degrees.take(np.arange(start, min(start + each, count)))
        layouts = space.grouped(space.scheduled(space.variants(own)))
        if layouts.broadcast_shape()[0]:
            yield layouts


def _that_may_beat(
    request: MixedRequest,
    space: Space,
    workloads: Sequence[Workload],
    layouts: Layout,
    cutoff_s: float,
) -> Layout:
    """Layouts that may beat a price with the ranks that suit them best, then those that offload more of the
    optimizer, where that may help.
    """
    layouts = _legal(workloads, layouts, request.gpus)
    if not layouts.broadcast_shape()[0]:
        return layouts
    most_ranks = _most_ranks(request, layouts)
    bounds = RowBounds(workloads, layouts, cutoff_s)
    may_beat = bounds.seconds_at_best(most_ranks.astype(np.float64)) < cutoff_s
    good = np.flatnonzero(_has_room(most_ranks, layouts) & may_beat)
    kept = layouts.take(good)
    # Among the next best plans, and those that spare a cut, are some that offload without need, too.
    most_layers = (
        bounds.most_layers[:, good]
        if request.top_k == 1 and request.first.max_cut_use >= 1
        else np.full((len(workloads), len(good)), np.inf)
    )
    more = with_more_offloaded(space, workloads, kept, most_layers)
    if not more.broadcast_shape()[0]:
        return kept
    return kept.followed_by(_legal(workloads, more, request.gpus))


def _rows_below(
    request: MixedRequest,
    workloads: Sequence[Workload],
    execution: Execution,
    layouts: Layout,
    cutoff_s: float,
) -> Iterator[_Rows]:
    if not layouts.broadcast_shape()[0]:
        return
    layouts = _that_may_fit(workloads, layouts)
    if not layouts.broadcast_shape()[0]:
        return
    bounds = RowBounds(workloads, layouts, cutoff_s)
    which, ranks = with_ranks(request, layouts)
    if not len(which):
        return
    bound_s = bounds.seconds(which, ranks)
    good = np.flatnonzero(bound_s < cutoff_s)
    which, ranks, bound_s = which[good], ranks[good], bound_s[good]
    rest_s = bounds.rest_on_parts_s(which, ranks)
    more_s = (rest_s - bounds.rest_s[which]) * bounds.scale[which] * (1 - ROUNDING)
    good = np.flatnonzero(bound_s + more_s < cutoff_s)
    which, ranks, bound_s = which[good], ranks[good], bound_s[good]
    rest_s, more_s = rest_s[good], more_s[good]
    for order in permutations(range(len(workloads))):
        if not len(which):
            return
        tighter_s = np.maximum(bound_s, bounds.seconds_in_memory(which, ranks, order)) + more_s
        rows = np.flatnonzero(tighter_s < cutoff_s)
        in_order_s = bounds.seconds_in_order(which[rows], ranks[rows], order) + more_s[rows]
        tighter_s[rows] = np.maximum(tighter_s[rows], in_order_s)
        rows = np.flatnonzero(tighter_s < cutoff_s)
        yield _Rows(
            execution=execution,
            layouts=layouts,
            order=order,
            which=which[rows],
            ranks=ranks[rows],
            bound_s=tighter_s[rows],
            rest_s=rest_s[rows],
            scale=bounds.scale,
        )


def _legal(workloads: Sequence[Workload], layouts: Layout, gpus: int) -> Layout:
    """Layouts that no rule of any part forbids, with as many layers recomputed as can be."""
    full = layouts.recomputes_layers
    layouts = replace(layouts, recompute_layers=np.where(full, ALL_LAYERS, 0))
    for workload in workloads:
        together = replace(workload, gpus=gpus)
        for rule in rules_for(together):
            if rule.name in ASKED_OF_PARTS:
                continue
            nothing_gib = np.zeros(layouts.broadcast_shape())
            table = Candidates(workload=together, layouts=layouts, memory_gib=nothing_gib)
            is_legal = rule.excess(table) <= 0
            if not np.all(is_legal):
                layouts = layouts.take(is_legal)
    return layouts


def _that_may_fit(workloads: Sequence[Workload], layouts: Layout) -> Layout:
    """Layouts of which some split may fit on the part with the most memory."""
    peaks = [np.asarray(peak_memory_gib(each, layouts)) for each in workloads]
    least_gib = np.min(peaks, axis=0)
    most_gib = max(usable_hbm_gib(each) for each in workloads)
    return layouts.take(least_gib <= most_gib)


def with_ranks(request: MixedRequest, layouts: Layout) -> tuple[IntArray, IntArray]:
    """(row of the layouts, ranks on each part) of every way to give the parts ranks on whole nodes.

    Parameters
    ----------
    request
        What to plan.
    layouts
        Arrays of shape [n], n at least 1.
    """
    capacities = tuple(part.gpus for part in request.parts)
    per_node = request.first.cluster.gpus_per_node
    stage = np.asarray(layouts.gpus) // np.asarray(layouts.pp)
    keys, back = np.unique(
        np.stack([np.asarray(layouts.pp), stage], axis=1), axis=0, return_inverse=True
    )
    which, ranks = [], []
    back = back.reshape(-1)
    for index, (pp, gpus) in enumerate(keys.tolist()):
        ways = _ways(pp, tuple(capacity // gpus for capacity in capacities))
        ways = ways[np.all(ways * gpus % per_node == 0, axis=1)]
        rows = np.flatnonzero(back == index)
        which.append(np.repeat(rows, len(ways)))
        ranks.append(np.tile(ways, (len(rows), 1)))
    return np.concatenate(which), np.concatenate(ranks)


@cache
def _ways(ranks: int, most: tuple[int, ...]) -> IntArray:
    """Every way to write a number of ranks as a sum with 1 to so many in each place."""
    if len(most) == 1:
        rows = [[ranks]] if 1 <= ranks <= most[0] else []
        return np.array(rows, dtype=np.int64).reshape(-1, 1)
    found = [np.zeros((0, len(most)), dtype=np.int64)]
    for first in range(1, min(most[0], ranks - 1) + 1):
        rest = _ways(ranks - first, most[1:])
        found.append(np.column_stack([np.full(len(rest), first), rest]))
    return np.concatenate(found)


@dataclass(eq=False)
class KernelMaker:
    """Makes kernels, which share what they have in common."""

    request: MixedRequest
    _parts: dict[tuple[int, int, Execution, Layout], PartCosts] = field(default_factory=dict)

    def kernel(self, row: PromisingRow) -> MixedKernel:
        """The kernel of a row.

        Parameters
        ----------
        row
            A layout, its execution, and how many ranks each part has.
        """
        segments, parts, first = [], [], 0
        for part, ranks in row.composition:
            own = self._part(part, ranks, row)
            parts.append(own)
            segments.append(Segment(part=own.placed, first=first))
            first += ranks
        return MixedKernel(
            layout=row.layout,
            execution=row.execution,
            composition=row.composition,
            segments=tuple(segments),
            parts=tuple(parts),
            rest_s=row.rest_s,
            scale=row.scale,
        )

    def keeps_inside(self, row: PromisingRow) -> bool:
        """Whether groups that were asked to lie in one NVLink domain each do so on every part.

        Parameters
        ----------
        row
            A layout, its execution, and how many ranks each part has.
        """
        if not self.request.first.inside_domain:
            return True
        parts = [self._part(part, ranks, row).placed for part, ranks in row.composition]
        return all(
            bool(keeps_inside(each.workload, each.layout, each.context.placement)) for each in parts
        )

    def gains_by_grouping(self, row: PromisingRow) -> bool:
        """Whether a row may be faster than with fewer shard groups, which are looked at by themselves.

        Parameters
        ----------
        row
            A layout, its execution, and how many ranks each part has.
        """
        is_pinned = "shard_groups" in self.request.first.pins
        is_sparing = self.request.first.max_cut_use < 1
        if int(row.layout.shard_groups) == 1 or is_pinned or self.request.top_k > 1 or is_sparing:
            return True
        parts = (self._part(part, ranks, row).placed for part, ranks in row.composition)
        return gains_by_grouping(part.context for part in parts)

    def _part(self, part: int, ranks: int, row: PromisingRow) -> PartCosts:
        key = part, ranks, row.execution, row.layout
        if key not in self._parts:
            stage = int(row.layout.gpus) // int(row.layout.pp)
            workload = self.request.parts[part].workload(row.execution).on(ranks * stage)
            self._parts[key] = PartCosts(
                PlacedPart(
                    workload=workload,
                    layout=row.layout,
                    ranks=ranks,
                    part_gpus=self.request.parts[part].gpus,
                    between_gbps_per_gpu=self.request.cluster.between_gbps_per_gpu,
                )
            )
        return self._parts[key]
