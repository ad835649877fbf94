"""Bounds on steps on a mixed cluster, for many layouts with pipeline ranks on each part.

With l_s the seconds of a layer on part s, packed as closely as its fabric allows, k_s ranks on it and e the
least that the ends of the pipeline take, a step takes at least

    (m - x) tau + x W + rest,   sum_s k_s floor(tau / l_s) >= L,   W >= sum_s n_s l_s + e,

n_s layers on part s, at most k_s tau / l_s. Dense layers in front of those with experts are no part of L:
they count as an end of the pipeline does, for what they take on the part that is fastest at them. The least
over tau lies where all layers just find a place, or where a slow part is just no longer needed: between, W
falls in straight lines. The rest is what follows the pipeline on the part that needs least for it, with as
few parameters on a rank as an even split of the layers in L has: some rank of some part has as many or more.

`seconds_in_memory` also counts the layers that each rank has room for, at its place along the pipeline, under
each way in which the first ranks may hold the leading layers; these are taken as recomputed there at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.data_parallel import data_parallel_traffic, largest_useful_window_s
from meshwright.costmodel.footprint import GIB, LayerBytes, layer_bytes, peak_bounds, usable_hbm_gib
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTime, KindTimes
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.mixed import crossing_context
from meshwright.costmodel.rank_load import last_rank_s
from meshwright.costmodel.schedules import in_flight
from meshwright.costmodel.states import layer_parameters_on_gpu
from meshwright.costmodel.step_time import RankParameters, scale_share, step_of_loads
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.alike import shared_times
from meshwright.planner.bounds.mappings import packed_context
from meshwright.planner.mixed.kernel import Pattern, leading_patterns

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROUNDING = 1e-9
_HALVINGS = 24
"""Of the interval in which the busiest rank's time lies; the lower end of what remains is the bound."""


class _Ranks(NamedTuple):
    """The ranks of k pipelines, as many as the deepest has: rows of the layouts, [k]; on which part each rank
    lies, [k, ranks]; and whether there is such a rank, [k, ranks].
    """

    rows: IntArray
    part: IntArray
    is_used: NDArray[np.bool_]


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
        self._leading = self._model.dense_layers if self._model.moe_layers else 0
        self._main = self._model.layers - self._leading
        known: list[tuple[Context, KindTimes]] = []
        for workload in workloads:
            context = packed_context(workload, layouts)
            times = shared_times(context)
            assert times is not None
            known.append((context, times))
        kinds = [_kind_of(times) for _, times in known]
        self._layer_s = np.stack([self._on_all(kind.seconds) for kind in kinds])
        self._again_s = np.stack([self._on_all(kind.recompute_s) for kind in kinds])
        ends = [_ends_s(self._model.mtp_layers, times) for _, times in known]
        at_ends_s = np.array([[self._on_all(seconds) for seconds in own] for own in ends])
        leads = [times.dense if self._leading else None for _, times in known]
        self._lead_s = np.stack([self._on_all(0.0 if k is None else k.seconds) for k in leads])
        # Of each end, and of each leading layer, the least on any part: they need not lie on the same one.
        ends_s = np.sum(np.min(at_ends_s, axis=0), axis=0)
        self.least_ends_s = ends_s + self._leading * np.min(self._lead_s, axis=0)
        """What a micro-batch takes on all ranks beside main layers, at the least; [n]."""
        in_layers = np.min(at_ends_s / self._layer_s[:, None], axis=0)
        self._end_layers = np.sum(in_layers, axis=0)
        in_layers = np.min(self._lead_s / self._layer_s, axis=0)
        self._end_layers = self._end_layers + self._leading * in_layers
        rest_s = self._on_all(0.0) if is_pipeline_alone else self._least_rest_s(known)
        self.rest_s = rest_s * (1 - _ROUNDING)
        """What follows the pipeline, at the least, before what a step loses on many nodes; [n]."""
        shares = [scale_share(c.workload, layouts, c.constants) for c, _ in known]
        self.scale = 1.0 + np.max([self._on_all(share) for share in shares], axis=0)
        """What that multiplies the step by; [n]."""

    def _on_all(self, values: object) -> FloatArray:
        return np.broadcast_to(
            np.asarray(values, dtype=np.float64), self._layouts.broadcast_shape()
        )

    @property
    def most_layers(self) -> FloatArray:
        """Layers, at the most, on a rank of each part in a step below the cutoff, [parts, n]."""
        each_s = np.asarray(self._layouts.num_micro_batches) * self._layer_s * self.scale
        saved = self._leading * np.maximum(1.0 - self._lead_s / self._layer_s, 0.0)
        by_time = np.floor((self._cutoff_s / each_s + saved) * (1 + _ROUNDING))
        return np.asarray(np.minimum(by_time, self._model.layers + 1.0 - self._layouts.pp))

    def _least_rest_s(self, known: Sequence[tuple[Context, KindTimes]]) -> FloatArray:
        """What follows the pipeline, on the part that needs least for it.

        Traffic hides under a rank's work on a micro-batch, of which a step holds as many as there are.
        """
        layouts, model = self._layouts, self._model
        dense, rest, experts = layer_parameters_on_gpu(model, layouts)
        layers = np.ceil(self._main / np.asarray(layouts.pp))
        held = rest if model.moe_layers else dense
        longest_s = self._cutoff_s / np.asarray(layouts.num_micro_batches)
        after, before = [], []
        for context, times in known:
            across = crossing_context(context, context.workload.gpus)
            on_rank = RankParameters(layers * held, layers * np.asarray(experts), across)
            traffic = data_parallel_traffic(context, on_rank.dense, on_rank.expert)
            window_s = np.minimum(largest_useful_window_s(context, traffic), longest_s)
            work_s = window_s * layouts.pp
            parts = step_of_loads(context, times, {"ranks": 0.0}, work_s, on_rank).parts
            after.append(self._on_all(parts["dp_comm"] + np.asarray(parts["optimizer"])))
            before.append(self._on_all(parts["pipeline_p2p"] + np.asarray(parts["step_overhead"])))
        return np.asarray(np.min(after, axis=0) + np.min(before, axis=0))

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
        busiest_s = _least_busiest_s(self._main, layer_s, ranks, ends)
        return self._steps(rows, ranks, busiest_s)

    def _steps(
        self, rows: IntArray, ranks: IntArray | FloatArray, busiest_s: FloatArray
    ) -> FloatArray:
        """Bounds where the busiest rank takes so long or longer."""
        layer_s = self._layer_s[:, rows].T
        order = np.argsort(layer_s, axis=1, kind="stable")
        fast_s = np.take_along_axis(layer_s, order, axis=1)
        speeds = np.cumsum(np.take_along_axis(ranks, order, axis=1) / fast_s, axis=1)
        best = np.full(len(rows), np.inf)
        for tried in (busiest_s, *(self._main / speeds).T):
            reached = np.maximum(tried, busiest_s)
            best = np.minimum(best, self._pipeline_s(rows, reached, fast_s, speeds))
        return np.asarray((best + self.rest_s[rows]) * self.scale[rows] * (1 - _ROUNDING))

    def _pipeline_s(
        self, rows: IntArray, busiest_s: FloatArray, fast_s: FloatArray, speeds: FloatArray
    ) -> FloatArray:
        """All micro-batches and the fill, the fastest parts taking as many layers as their ranks can."""
        layers = float(self._main)
        until = np.minimum(busiest_s[:, None] * speeds, layers)
        until[:, -1] = layers
        placed = np.diff(until, axis=1, prepend=0.0)
        work = np.sum(placed * fast_s, axis=1) + self.least_ends_s[rows]
        m = np.asarray(self._layouts.num_micro_batches)[rows]
        filled = self._flushes * np.maximum(work, busiest_s)
        return np.asarray((m - self._flushes) * busiest_s + filled)

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
        return np.where(fits, self._steps(rows, ranks, np.where(fits, least, 0.0)), np.inf)

    def _busiest_in_memory_s(self, held: _Ranks, pattern: Pattern) -> FloatArray:
        """The least time in which all main layers find room beside the leading ones; [k], or infinite."""
        rows, part, is_used = held
        leading = np.zeros(part.shape[1])
        leading[: len(pattern)] = pattern
        takes_main = is_used & (np.arange(part.shape[1]) >= len(pattern) - 1)
        layer_s, again_s = self._layer_s[part, rows[:, None]], self._again_s[part, rows[:, None]]
        lead_s = self._lead_s[part, rows[:, None]] * leading
        room, kept, relief = self._rooms(rows, part, leading)
        fits = np.all(room >= 0, axis=1) & is_used[:, max(len(pattern) - 1, 0)]
        room = np.where(takes_main, room, 0)

        def placed(limit_s: FloatArray) -> FloatArray:
            """Layers that find a place where no rank takes longer; what has no room is recomputed."""
            limit = limit_s[:, None] * (1 + _ROUNDING) - lead_s
            plain = limit / layer_s
            with np.errstate(divide="ignore", invalid="ignore"):
                slower = again_s / relief
                recomputing = (limit + slower * kept[0]) / (layer_s + slower * kept[1])
            recomputing = np.where(relief > 0, recomputing, plain)
            fitting = np.minimum(room, np.floor(np.minimum(plain, recomputing)))
            return np.where(np.all(limit >= 0, axis=1), fitting.sum(axis=1), -np.inf)

        low = np.zeros(len(rows))
        high = self._main * (layer_s + again_s).max(axis=1) + lead_s.max(axis=1)
        fits &= room.sum(axis=1) >= self._main
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_enough = placed(middle) >= self._main
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return np.where(fits, low, np.inf)

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
        full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
        relief = np.where(full[:, None], (saved - dropped) * flying, 0.0)
        whole = states + saved * flying
        of_leading = leading * (lead_states + lead_saved * flying)
        beside = free - of_leading
        room = np.floor(np.maximum(beside, 0.0) / (whole - relief) * (1 + _ROUNDING))
        room = np.where((leading > 0) & (of_leading > free * (1 + _ROUNDING)), -1.0, room)
        return room, (beside, whole), relief

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
            full = (np.asarray(self._layouts.recompute) & int(Recompute.FULL)) != 0
            dropped = np.minimum(layer.leading_dropped, layer.leading_saved)
            lead_saved = np.where(full, dropped, layer.leading_saved)
            own = (layer.states, layer.saved, layer.dropped, free, layer.leading_states, lead_saved)
            tables.append(np.stack(own))
        return tables

    def _beside_layers(self, workload: Workload) -> FloatArray:
        """Bytes beside the layers on every rank, with one layer recomputed or all."""
        full = (np.asarray(self._layouts.recompute) & int(Recompute.FULL)) != 0
        one = replace(self._layouts, recompute_layers=full.astype(np.int64))
        beside = [peak_bounds(workload, each).everywhere for each in (self._layouts, one)]
        return np.asarray(np.minimum(*beside))


def _least_busiest_s(
    layers: int, layer_s: FloatArray, ranks: IntArray, ends: FloatArray
) -> FloatArray:
    """The least time in which all layers and some ends, in layers, find a rank; [k].

    Layers alone find one only in whole numbers of them.
    """
    speed = np.sum(ranks / layer_s, axis=1)
    reached = layers / speed
    is_open = np.ones(len(reached), dtype=bool)
    for _ in range(2 * layer_s.shape[1] + 6):
        steps = np.ceil(reached[:, None] / layer_s - _ROUNDING)
        following = np.min(steps * layer_s, axis=1)
        whole = np.floor(following[:, None] / layer_s + _ROUNDING)
        reached = np.where(is_open, following, reached)
        is_open &= np.sum(ranks * whole, axis=1) < layers
        if not is_open.any():
            break
        reached = np.where(is_open, reached * (1 + 1e-7), reached)
    return np.asarray(np.maximum((layers + ends) / speed, reached * (1 - 1e-6)))


def _kind_of(times: KindTimes) -> KindTime:
    kind = times.moe or times.dense
    assert kind is not None
    return kind


def _ends_s(mtp_layers: int, times: KindTimes) -> tuple[FloatArray, FloatArray]:
    """Seconds of what the first rank runs beside layers, and of what the last one does."""
    return np.asarray(times.embedding.seconds), np.asarray(last_rank_s(times, mtp_layers))
