"""Which layers a pipeline rank has room for, and what splitting layers over ranks costs, for one layout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.estimate import LayerCosts, Stages, stage_memory_gib
from meshwright.costmodel.footprint import GIB, layer_bytes, offloaded_states_gib, usable_hbm_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.schedules import in_flight, traits
from meshwright.costmodel.states import (
    layer_parameters_on_gpu,
    offloaded_bytes,
    optimizer_shards,
    rank_parameters,
)
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.layer_split import SplitCosts, any_stages


def hbm_limit_gib(workload: Workload) -> float:
    """What the peak on one GPU may reach."""
    return usable_hbm_gib(workload)


class HostRow(NamedTuple):
    """What a GPU of a pipeline rank keeps on its host, in GiB: `fixed + layer n + leading d`."""

    fixed_gib: float = 0.0
    layer_gib: float = 0.0
    """Of each of the rank's n layers."""
    leading_gib: float = 0.0
    """More, or less, for each of the d leading dense layers among them."""


def host_limit_gib(workload: Workload) -> float:
    """What one GPU may keep on its host, if all in use of a node do; infinite where nothing is said."""
    cluster = workload.cluster
    if cluster.host_memory_gib is None:
        return inf
    return cluster.host_memory_gib / min(cluster.gpus_per_node, workload.gpus)


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """What one pipeline rank holds, in GiB: `fixed + layer n + leading d - relief k`."""

    fixed_gib: float
    layer_gib: float
    """Of each of the rank's n layers."""
    leading_gib: float
    """More, or less, for each of the d leading dense layers among them."""
    relief_gib: float
    """At most, for each of the k layers that are recomputed in full."""
    host: HostRow
    """What one of its GPUs keeps on the host."""


class MemoryFit:
    """Memory of one rank as a function of its layers, anchored at the balanced split's memory."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload = workload
        self.layout = layout
        self.limit_gib = hbm_limit_gib(workload)
        self.host_limit_gib = host_limit_gib(workload) if int(layout.optimizer_offload) else inf
        self.leading = workload.model.dense_layers if workload.model.moe_layers else 0

    @cached_property
    def _fixed_gib(self) -> list[float]:
        """What every rank holds beside its layers: the balanced split's memory less its layers'."""
        stages = any_stages(self.workload, self.layout)
        if stages is None:
            raise ValueError("a virtual stage would have no layer")
        memory = stage_memory_gib(self.workload, self.layout, stages)
        return [
            float(memory[rank]) - self._layers_gib(rank, layers, leading)
            for rank, (layers, leading) in enumerate(self._counts(stages))
        ]

    def _counts(self, stages: Stages) -> list[tuple[float, float]]:
        """(layers, leading ones among them) of each rank of a split."""
        leading = [0.0] * len(stages)
        leading_left = self.leading
        for virtual_stage in zip(*stages, strict=True):
            for rank, size in enumerate(virtual_stage):
                placed = min(leading_left, size)
                leading[rank] += placed
                leading_left -= placed
        return [(float(sum(own)), leading[rank]) for rank, own in enumerate(stages)]

    @cached_property
    def _host_rows(self) -> list[HostRow]:
        """What every rank keeps on its host, as a linear function of its layers."""
        pp, layout = int(self.layout.pp), self.layout
        if self.host_limit_gib == inf:
            return [HostRow()] * pp
        stages = any_stages(self.workload, layout)
        assert stages is not None
        dense, rest, experts = layer_parameters_on_gpu(self.workload.model, layout)
        of_dense, of_expert = (
            float(np.asarray(offloaded_bytes(self.workload, layout, shards))) / GIB
            for shards in optimizer_shards(layout)
        )
        layer_gib = float(np.asarray(rest * of_dense + experts * of_expert))
        leading_gib = float(np.asarray(dense * of_dense)) - layer_gib
        if not self.workload.model.moe_layers:
            layer_gib, leading_gib = layer_gib + leading_gib, 0.0
        held = offloaded_states_gib(self.workload, layout, stages)
        return [
            HostRow(
                float(held[rank]) - layers * layer_gib - leading * leading_gib,
                layer_gib,
                leading_gib,
            )
            for rank, (layers, leading) in enumerate(self._counts(stages))
        ]

    @cached_property
    def _in_flight(self) -> list[float]:
        ranks = np.arange(int(self.layout.pp))
        micro_batches = np.asarray(in_flight(self.layout, ranks), dtype=np.float64)
        return [float(count) for count in micro_batches]

    @cached_property
    def _per_layer(self) -> tuple[float, ...]:
        saved = saved_activations(self.workload, self.layout)
        return tuple(float(x) / GIB for x in layer_bytes(self.workload, self.layout, saved))

    def _layers_gib(self, rank: int, layers: float, leading: float) -> float:
        """States and activations of a rank's layers."""
        state, saved_gib, again_gib, state_l, kept_l, again_l = self._per_layer
        again_all = min(self._recomputed_layers * int(self.layout.vpp), layers)
        again_leading = min(self._recomputed_layers, leading)
        again_main = again_all - again_leading
        saved = (layers - leading - again_main) * saved_gib + again_main * again_gib
        saved += (leading - again_leading) * kept_l + again_leading * again_l
        return (layers - leading) * state + leading * state_l + saved * self._in_flight[rank]

    @cached_property
    def _recomputed_layers(self) -> int:
        full = int(self.layout.recompute) & Recompute.FULL
        return int(self.layout.recompute_layers) if full else 0

    def rank_rows(self) -> list[RankRow]:
        """The memory of every rank as a linear function of its layers."""
        state, saved_gib, again_gib, state_l, kept_l, again_l = self._per_layer
        relief_gib = saved_gib - again_gib
        if self.leading:
            relief_gib = max(relief_gib, kept_l - again_l)
        return [
            RankRow(
                fixed_gib=fixed_gib,
                layer_gib=state + saved_gib * flying,
                leading_gib=state_l - state + (kept_l - saved_gib) * flying,
                relief_gib=relief_gib * flying,
                host=host,
            )
            for fixed_gib, flying, host in zip(
                self._fixed_gib, self._in_flight, self._host_rows, strict=True
            )
        ]

    def rank_gib(self, rank: int, layers: int, leading: int) -> float:
        """Peak of one rank with `layers` layers, `leading` of them dense ones at the front of the model."""
        return self._fixed_gib[rank] + self._layers_gib(rank, layers, leading)

    def fits(self, rank: int, layers: int, leading: int) -> bool:
        """Whether that rank stays within the limit; a rounding error over it is left to the exact check.

        So does what it keeps on the host, where that is limited.
        """
        if self.rank_gib(rank, layers, leading) > self.limit_gib * (1 + 1e-9):
            return False
        host = self._host_rows[rank]
        held_gib = host.fixed_gib + host.layer_gib * layers + host.leading_gib * leading
        return held_gib <= self.host_limit_gib * (1 + 1e-9)

    def rooms(self, limit: int) -> list[list[int]]:
        """The most layers that each rank has room for, [rank][leading layers on it], up to `limit`.

        Less than the leading ones where even they do not fit. Ranks behind the first ones have no leading
        layers.
        """
        rooms = []
        for rank in range(int(self.layout.pp)):
            most_leading = self.leading if rank < self.leading else 0
            rooms.append([self._room(rank, leading, limit) for leading in range(most_leading + 1)])
        return rooms

    def _room(self, rank: int, leading: int, limit: int) -> int:
        """The most layers that fit: memory grows with them."""
        counts = range(max(leading, 1), limit + 1)
        too_many = bisect_left(
            counts, True, key=lambda layers: not self.fits(rank, layers, leading)
        )
        return max(leading, 1) - 1 + too_many

    def split_costs(
        self, costs: LayerCosts, unlike: Sequence[tuple[float, float]] = ()
    ) -> SplitCosts:
        """The layer costs as the split sees them: main layers, leading dense ones, and the ends.

        Of unlike layers, `unlike` has the seconds of each kind, and what recomputing one adds.
        """
        model, layout = self.workload.model, self.layout
        dense, rest, _ = (float(np.asarray(x)) for x in layer_parameters_on_gpu(model, layout))
        main_s, main_recompute_s, main_load = costs.moe_layer_s, costs.moe_recompute_s, rest
        if not model.moe_layers:
            main_s, main_recompute_s, main_load = (
                costs.dense_layer_s,
                costs.dense_recompute_s,
                dense,
            )
        first_load, last_load = self._end_loads(dense, rest)
        shape = traits(int(layout.schedule))
        last_s = float(costs.head_s) + float(costs.mtp_s)
        return SplitCosts(
            pp=int(layout.pp),
            vpp=int(layout.vpp),
            layers=model.layers,
            leading=self.leading,
            group=model.layers_in_group,
            num_micro_batches=int(layout.num_micro_batches),
            bubble_share=float(costs.bubble_share),
            in_step=shape.in_step,
            empty_ends=may_have_empty_ends(self.workload),
            layer_s=float(main_s),
            leading_s=float(costs.dense_layer_s) if self.leading else 0.0,
            first_s=float(costs.embedding_s) + (last_s if shape.v_shaped else 0.0),
            last_s=0.0 if shape.v_shaped else last_s,
            layer_recompute_s=float(main_recompute_s),
            leading_recompute_s=float(costs.dense_recompute_s) if self.leading else 0.0,
            recompute_layers=self._recomputed_layers,
            layer_load=main_load,
            leading_load=dense if self.leading else 0.0,
            first_load=first_load,
            last_load=last_load,
            experts=model.moe_layers > 0,
            last_experts=model.mtp_layers if model.moe is not None else 0,
            order=self._order(unlike),
        )

    def _order(self, unlike: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        """Seconds of every layer of a model with unlike ones, and what recomputing it adds."""
        layers = self.workload.model.unlike_layers
        number = {symbols: at for at, symbols in enumerate(dict.fromkeys(layers))}
        return tuple(unlike[number[symbols]] for symbols in layers)

    def _end_loads(self, dense: float, rest: float) -> tuple[float, float]:
        """Parameters outside experts that the first and the last rank hold beside their layers."""
        model, pp = self.workload.model, int(self.layout.pp)
        each = model.layers // pp
        stages = tuple((each + (rank < model.layers % pp),) for rank in range(pp))
        loads = np.asarray(rank_parameters(model, self.layout, stages)[0], dtype=np.float64)
        before, own_layers = 0, []
        for (size,) in stages:
            leading = min(max(model.dense_layers - before, 0), size)
            own_layers.append(leading * dense + (size - leading) * rest)
            before += size
        beside = loads - np.array(own_layers)
        return float(beside[0]), float(beside[-1]) if pp > 1 else 0.0
