"""Bounds on steps on a mixed cluster, for many layouts with pipeline ranks on each part.

With l_s the seconds of a layer on part s, packed as closely as its fabric allows, k_s ranks on it and e the
least that the ends of the pipeline take, a step takes at least

    (m - x) tau + x W + rest,   sum_s k_s floor(tau / l_s) >= L,   W >= sum_s n_s l_s + e,

n_s layers on part s, at most k_s tau / l_s. The least over tau lies where all layers just find a place, or
where a slow part is just no longer needed: between, W falls in straight lines. The rest is what follows the
pipeline on the part that needs least for it, with as few parameters on a rank as an even split has: some rank
of some part has as many or more.

`seconds_in_memory` also counts the layers that each rank has room for, at its place along the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import data_parallel_traffic, largest_useful_window_s
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTime, KindTimes
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.activations import saved_activations
from meshwright.costmodel.memory.footprint import GIB, LayerBytes, layer_bytes, usable_hbm_gib
from meshwright.costmodel.memory.split_bounds import peak_bounds
from meshwright.costmodel.memory.states import layer_parameters_on_gpu
from meshwright.costmodel.mixed import crossing_context
from meshwright.costmodel.pipeline.schedules import in_flight
from meshwright.costmodel.step_time import RankParameters, scale_share, step_of_loads
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.alike import shared_times
from meshwright.planner.bounds.packed import packed_context

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROUNDING = 1e-9
_HALVINGS = 24
"""Of the interval in which the busiest rank's time lies; the lower end of what remains is the bound."""


class RowBounds:
    """Bounds on the steps of some layouts of a pipeline, for any ranks on the parts of a cluster."""

    def __init__(self, workloads: Sequence[Workload], layouts: Layout, cutoff_s: float) -> None:
        """`cutoff_s`: bounds need not hold for steps that take longer."""
        self._workloads, self._layouts, self._cutoff_s = workloads, layouts, cutoff_s
        self._model, self._flushes = workloads[0].model, workloads[0].flushes
        known: list[tuple[Context, KindTimes]] = []
        for workload in workloads:
            context = packed_context(workload, layouts)
            times = shared_times(context)
            assert times is not None
            known.append((context, times))
        kinds = [_kind_of(times) for _, times in known]
        self._layer_s = np.stack([self._on_all(kind.seconds) for kind in kinds])
        self._again_s = np.stack([self._on_all(kind.recompute_s) for kind in kinds])
        self._ends_s = np.stack(
            [self._on_all(_ends_s(self._model.mtp_layers, times)) for _, times in known]
        )
        self.rest_s = self._least_rest_s(known) * (1 - _ROUNDING)
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
        by_time = np.floor(self._cutoff_s / each_s * (1 + _ROUNDING))
        return np.asarray(np.minimum(by_time, self._model.layers + 1.0 - self._layouts.pp))

    def _least_rest_s(self, known: Sequence[tuple[Context, KindTimes]]) -> FloatArray:
        """What follows the pipeline, on the part that needs least for it.

        Traffic hides under a rank's work on a micro-batch, of which a step holds as many as there are.
        """
        layouts, model = self._layouts, self._model
        dense, rest, experts = layer_parameters_on_gpu(model, layouts)
        layers = np.ceil(model.layers / np.asarray(layouts.pp))
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
        busiest_s = self._model.layers / np.sum(ranks / self._layer_s, axis=0)
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
        layer_s, ends_s = self._layer_s[:, rows].T, self._ends_s[:, rows].T
        ends = np.min(ends_s / layer_s, axis=1)
        busiest_s = _least_busiest_s(self._model.layers, layer_s, ranks, ends)
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
        for tried in (busiest_s, *(self._model.layers / speeds).T):
            reached = np.maximum(tried, busiest_s)
            best = np.minimum(best, self._pipeline_s(rows, reached, fast_s, speeds))
        return np.asarray((best + self.rest_s[rows]) * self.scale[rows] * (1 - _ROUNDING))

    def _pipeline_s(
        self, rows: IntArray, busiest_s: FloatArray, fast_s: FloatArray, speeds: FloatArray
    ) -> FloatArray:
        """All micro-batches and the fill, the fastest parts taking as many layers as their ranks can."""
        layers = float(self._model.layers)
        until = np.minimum(busiest_s[:, None] * speeds, layers)
        until[:, -1] = layers
        placed = np.diff(until, axis=1, prepend=0.0)
        work = np.sum(placed * fast_s, axis=1) + np.min(self._ends_s[:, rows], axis=0)
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
        is_used = place < ends[:, -1:]
        turn = np.minimum(np.sum(place >= ends[:, :, None], axis=1), len(order) - 1)
        part = np.asarray(order)[turn]
        layer_s, again_s = self._layer_s[part, rows[:, None]], self._again_s[part, rows[:, None]]
        room, kept, relief = self._rooms(rows, part)
        room = np.where(is_used, room, 0)

        def placed(limit_s: FloatArray) -> FloatArray:
            """Layers that find a place where no rank takes longer; what has no room is recomputed."""
            limit = limit_s[:, None] * (1 + _ROUNDING)
            plain = limit / layer_s
            with np.errstate(divide="ignore", invalid="ignore"):
                slower = again_s / relief
                recomputing = (limit + slower * kept[0]) / (layer_s + slower * kept[1])
            recomputing = np.where(relief > 0, recomputing, plain)
            return np.asarray(
                np.minimum(room, np.floor(np.minimum(plain, recomputing))).sum(axis=1)
            )

        layers = self._model.layers
        low = np.zeros(len(rows))
        high = layers * (layer_s + again_s).max(axis=1)
        fits = room.sum(axis=1) >= layers
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_enough = placed(middle) >= layers
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return np.where(fits, self._steps(rows, ranks, low), np.inf)

    def _rooms(
        self, rows: IntArray, part: IntArray
    ) -> tuple[FloatArray, tuple[FloatArray, FloatArray], FloatArray]:
        """Of each row and rank: the most layers with all recomputed that may be, the bytes for layers and of
        a layer with none recomputed, and what recomputing a layer gives back.
        """
        layouts = self._layouts.take(rows)
        flying = np.asarray(in_flight(layouts.with_axis(), np.arange(part.shape[1])))
        flying = np.maximum(flying, 1.0)
        bytes_of = np.stack([self._memory[index] for index in range(len(self._workloads))])
        states, saved, dropped, free = (bytes_of[part, k, rows[:, None]] for k in range(4))
        full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
        relief = np.where(full[:, None], (saved - dropped) * flying, 0.0)
        whole = states + saved * flying
        room = np.floor(np.maximum(free, 0.0) / (whole - relief) * (1 + _ROUNDING))
        return room, (free, whole), relief

    @cached_property
    def _memory(self) -> list[FloatArray]:
        """Of each part [states, saved, dropped, free for layers; n], in bytes."""
        tables = []
        for workload in self._workloads:
            saved = saved_activations(workload, self._layouts)
            layer: LayerBytes = layer_bytes(workload, self._layouts, saved)
            free = usable_hbm_gib(workload) * GIB - self._beside_layers(workload)
            tables.append(np.stack([layer.states, layer.saved, layer.dropped, free]))
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


def _ends_s(mtp_layers: int, times: KindTimes) -> FloatArray:
    ends = np.asarray(times.embedding.seconds) + np.asarray(times.head.seconds)
    return np.asarray(ends if times.mtp is None else ends + mtp_layers * times.mtp.seconds)
