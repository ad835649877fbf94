"""Which layers a pipeline rank has room for, and what splitting layers over ranks costs, for one layout."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from costmodel.estimate import LayerCosts, stage_memory_gib
from costmodel.layout import Layout, Recompute
from costmodel.memory import (
    FIXED_GIB,
    GIB,
    activation_bytes_per_layer,
    layer_parameters_on_gpu,
    rank_parameters,
    state_bytes_per_parameter,
    usable_hbm_gib,
)
from costmodel.schedules import in_flight, traits
from costmodel.workload import Workload
from planner.stages import SplitCosts, balanced_stages


def hbm_limit_gib(workload: Workload) -> float:
    """What the peak on one GPU may reach."""
    return usable_hbm_gib(workload)


def least_peak_gib(workload: Workload, layouts: Layout) -> NDArray[np.float64]:
    """Never above the peak over ranks of any split of the layers; array layouts, shape [n].

    With weights w_r that add up to 1 the peak is at least sum_r w_r (memory of rank r). For w_r in
    proportion to 1 / B_r, where B_r is what one main layer takes on rank r, that is (main + leading min_r
    C_r / B_r - relief) / sum_r 1 / B_r, with C_r for a leading layer, and relief for the recomputed layers
    of every rank. Embedding, head and MTP modules are left out.
    """
    model = workload.model
    leading = model.dense_layers if model.moe_layers else 0
    state, kept, dropped, state_l, kept_l, dropped_l = layer_gib(workload, layouts)
    pp, vpp = (np.asarray(x, dtype=np.int64) for x in (layouts.pp, layouts.vpp))
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    again = np.where(full, np.asarray(layouts.recompute_layers), 0)
    everything = again * pp * vpp >= model.layers
    kept, kept_l = np.where(everything, dropped, kept), np.where(everything, dropped_l, kept_l)
    saved = np.maximum(kept - dropped, (kept_l - dropped_l) if leading else 0.0)
    relief = np.where(everything, 0.0, again * vpp * saved)
    out = np.empty(np.shape(pp))
    for stages in np.unique(pp):
        rows = np.flatnonzero(pp == stages)
        flying = np.asarray(in_flight(layouts.take(rows).with_axis(), np.arange(stages)))
        main = state[rows, None] + kept[rows, None] * flying
        other = np.min((state_l[rows, None] + kept_l[rows, None] * flying) / main, axis=1) if leading else 0.0
        relieved = np.sum(relief[rows, None] * flying / main, axis=1)
        out[rows] = (model.layers - leading + leading * other - relieved) / np.sum(1.0 / main, axis=1)
    work = np.where(full, layer_work_gib(workload, layouts), 0.0)
    return np.asarray(np.maximum(out, 0.0) + work + FIXED_GIB, dtype=np.float64)


def layer_work_gib(workload: Workload, layouts: Layout) -> NDArray[np.float64]:
    """Activations of the one layer that full recomputation brings back at a time, shape [n]."""
    kept, _ = activation_bytes_per_layer(workload, layouts, experts=workload.model.moe is not None)
    return np.asarray(kept) / GIB


def layer_gib(workload: Workload, layouts: Layout) -> tuple[NDArray[np.float64], ...]:
    """GiB of one layer, shape [n] each: (states, activations kept, activations under full recomputation) of
    main layers, then of the leading dense layers of a mixture-of-experts model.
    """
    model, shape = workload.model, layouts.broadcast_shape()
    dense, rest, experts = layer_parameters_on_gpu(model, layouts)
    shards = np.asarray(layouts.dp) * np.asarray(layouts.cp)
    per_dense = state_bytes_per_parameter(workload, layouts, shards)
    of_dense = activation_bytes_per_layer(workload, layouts, experts=False)
    main = (dense * per_dense, *of_dense)
    if model.moe_layers:
        per_expert = state_bytes_per_parameter(workload, layouts, layouts.edp)
        of_moe = activation_bytes_per_layer(workload, layouts, experts=True)
        main = (rest * per_dense + experts * per_expert, *of_moe)
    values = (*main, dense * per_dense, *of_dense)
    return tuple(np.broadcast_to(np.asarray(x, dtype=np.float64) / GIB, shape) for x in values)


class MemoryFit:
    """Memory of one rank as a function of its layers, anchored at the balanced split's memory."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload = workload
        self.layout = layout
        self.limit_gib = hbm_limit_gib(workload)
        self.leading = workload.model.dense_layers if workload.model.moe_layers else 0

    @cached_property
    def _fixed_gib(self) -> list[float]:
        """What every rank holds beside its layers: the balanced split's memory less its layers'."""
        stages = balanced_stages(self.workload.model.layers, int(self.layout.pp), int(self.layout.vpp))
        if stages is None:
            raise ValueError("a virtual stage would have no layer")
        memory = stage_memory_gib(self.workload, self.layout, stages)
        counts = np.array([sum(rank) for rank in stages], dtype=np.float64)
        leading, first = np.zeros(len(stages)), 0
        for chunk in range(len(stages) * len(stages[0])):
            size = stages[chunk % len(stages)][chunk // len(stages)]
            leading[chunk % len(stages)] += min(max(self.leading - first, 0), size)
            first += size
        return [
            float(memory[rank]) - self._layers_gib(rank, float(counts[rank]), float(leading[rank]))
            for rank in range(len(stages))
        ]

    @cached_property
    def _in_flight(self) -> list[float]:
        return [float(x) for x in np.asarray(in_flight(self.layout, np.arange(int(self.layout.pp))))]

    @cached_property
    def _per_layer(self) -> tuple[float, ...]:
        return tuple(float(x) for x in layer_gib(self.workload, self.layout))

    def _layers_gib(self, rank: int, layers: float, leading: float) -> float:
        """States and activations of a rank's layers."""
        state, kept, again_gib, state_l, kept_l, again_l = self._per_layer
        again_all = min(self._again * int(self.layout.vpp), layers)
        again_leading = min(self._again, leading)
        again_main = again_all - again_leading
        saved = (layers - leading - again_main) * kept + again_main * again_gib
        saved += (leading - again_leading) * kept_l + again_leading * again_l
        return (layers - leading) * state + leading * state_l + saved * self._in_flight[rank]

    @cached_property
    def _again(self) -> int:
        full = int(self.layout.recompute) & Recompute.FULL
        return int(self.layout.recompute_layers) if full else 0

    def rank_gib(self, rank: int, layers: int, leading: int) -> float:
        """Peak of one rank with `layers` layers, `leading` of them dense ones at the front of the model."""
        return self._fixed_gib[rank] + self._layers_gib(rank, layers, leading)

    def fits(self, rank: int, layers: int, leading: int) -> bool:
        """Whether that rank stays within the limit; a rounding error over it is left to the exact check."""
        return self.rank_gib(rank, layers, leading) <= self.limit_gib * (1 + 1e-9)

    def split_costs(self, costs: LayerCosts) -> SplitCosts:
        """The layer costs as the split sees them: main layers, leading dense ones, and the ends."""
        model, layout = self.workload.model, self.layout
        dense, rest, _ = (float(np.asarray(x)) for x in layer_parameters_on_gpu(model, layout))
        has_main_dense = not model.moe_layers
        main = (
            (costs.dense_layer_s, costs.dense_recompute_s)
            if has_main_dense
            else (costs.moe_layer_s, costs.moe_recompute_s)
        )
        ends = self._end_loads(dense, rest)
        shape = traits(int(layout.schedule))
        last_s = float(costs.head_s) + float(costs.mtp_s)
        return SplitCosts(
            pp=int(layout.pp),
            vpp=int(layout.vpp),
            layers=model.layers,
            leading=self.leading,
            num_micro_batches=int(layout.num_micro_batches),
            bubble_share=float(costs.bubble_share),
            in_step=shape.in_step,
            layer_s=float(main[0]),
            leading_s=float(costs.dense_layer_s) if self.leading else 0.0,
            first_s=float(costs.embedding_s) + (last_s if shape.v_shaped else 0.0),
            last_s=0.0 if shape.v_shaped else last_s,
            layer_recompute_s=float(main[1]),
            leading_recompute_s=float(costs.dense_recompute_s) if self.leading else 0.0,
            recompute_layers=self._again,
            layer_load=dense if has_main_dense else rest,
            leading_load=dense if self.leading else 0.0,
            first_load=ends[0],
            last_load=ends[1],
            experts=model.moe_layers > 0,
            last_experts=model.mtp_layers if model.moe is not None else 0,
        )

    def _end_loads(self, dense: float, rest: float) -> tuple[float, float]:
        """Parameters outside experts that the first and the last rank hold beside their layers."""
        model, pp = self.workload.model, int(self.layout.pp)
        each = model.layers // pp
        stages = tuple((each + (rank < model.layers % pp),) for rank in range(pp))
        loads = np.asarray(rank_parameters(model, self.layout, stages)[0], dtype=np.float64)
        before, own = 0, []
        for (size,) in stages:
            leading = min(max(model.dense_layers - before, 0), size)
            own.append(leading * dense + (size - leading) * rest)
            before += size
        return float(loads[0] - own[0]), (float(loads[-1] - own[-1]) if pp > 1 else 0.0)
