"""How slow the slowest pipeline rank must be at the least, given what every rank has room for.

Memory forces layers from the first ranks, which hold the most activations, onto later ones. Bounds that know
it rule out most layouts that only memory makes slow, many at once and before any of their splits is priced.
Where ranks are in step the pace of the slowest chunks takes the place of the slowest rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import inf
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.estimate import LayerCosts, stage_memory_gib
from meshwright.costmodel.footprint import (
    GIB,
    LayerRooms,
    UnlikeRooms,
    first_chunk_gib,
    layer_bytes,
    layer_rooms,
    least_held,
    least_in_parts,
    offloaded_states_gib,
    unlike_layer_bytes,
    unlike_rooms,
    usable_hbm_gib,
)
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.rank_load import (
    Stages,
    cheapest_layer_s,
    cheapest_recompute_s,
    chunk_counts,
    counts_between,
    counts_in_order,
    counts_of_parts,
    distinct_columns,
    kinds_ahead,
    last_rank_s,
    layer_counts,
    least_busiest_in_order_s,
    least_busiest_in_rooms_s,
    least_recomputed_s,
    least_work_s,
    unlike_counts,
)
from meshwright.costmodel.schedules import (
    Schedule,
    has_trait,
    is_v_shaped,
    last_rank,
    least_in_flight,
    traits,
)
from meshwright.costmodel.simulator import longest_way
from meshwright.costmodel.states import (
    kind_parameters_on_gpu,
    layer_parameters_on_gpu,
    offloaded_bytes,
    rank_parameters,
)
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import (
    ALL_LAYERS,
    BackwardSeconds,
    Order,
    SplitCosts,
    any_stages,
    balanced_stages,
    level_splits,
)

# Which layers a pipeline rank has room for, and what splitting layers over ranks costs, for one layout.


class HostRow(NamedTuple):
    """What a GPU of a pipeline rank keeps on its host, in GiB: `fixed + layer n + leading d`."""

    fixed_gib: float = 0.0
    layer_gib: float = 0.0
    """Of each of the rank's n layers."""
    leading_gib: float = 0.0
    """More, or less, for each of the d leading dense layers among them."""


def host_limit_gib(workload: Workload) -> float:
    """What one GPU may keep on its host, if all in use of a node do; infinite where nothing is said.

    Parameters
    ----------
    workload
        With the number of GPUs in use.
    """
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


def _cheapest(orders: Sequence[Order]) -> Order:
    """What every layer takes at the least, on any rank."""
    columns = zip(*orders, strict=True)
    return tuple((min(s for s, _ in each), min(again for _, again in each)) for each in columns)


def _leading(workload: Workload) -> int:
    """Dense layers ahead of those with experts."""
    return workload.model.dense_layers if workload.model.moe_layers else 0


class MemoryFit:
    """Memory of one rank as a function of its layers, anchored at the balanced split's memory."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload = workload
        self.layout = layout
        self.limit_gib = usable_hbm_gib(workload)
        offloads = int(layout.optimizer_offload) > 0 or workload.offload_parameters
        self.host_limit_gib = host_limit_gib(workload) if offloads else inf
        self.leading = _leading(workload)
        self.even_gib: FloatArray | None = None
        """Memory of each rank of `any_stages`, where the caller has it."""
        self.layer_gib: tuple[float, ...] | None = None
        """`layer_bytes` in GiB, where the caller has them."""

    @cached_property
    def _fixed_gib(self) -> list[float]:
        """What every rank holds beside its layers: the balanced split's memory less its layers'."""
        stages = any_stages(self.workload, self.layout)
        if stages is None:
            raise ValueError("a virtual stage would have no layer")
        memory = self.even_gib
        if memory is None:
            memory = stage_memory_gib(self.workload, self.layout, stages)
        memory = memory - self._in_first_chunk_gib(stages)
        if self._unlike is not None:
            return [float(gib) for gib in memory - self._unlike.of_stages_gib(stages)]
        return [
            float(memory[rank]) - self._layers_gib(rank, layers, leading)
            for rank, (layers, leading) in enumerate(self._counts(stages))
        ]

    def _in_first_chunk_gib(self, stages: Stages) -> FloatArray:
        """What ranks of a split hold of a first virtual stage alone, [pp]."""
        alone = np.zeros(int(self.layout.pp))
        alone[0] = first_chunk_gib(self.workload, self.layout, stages)
        return alone

    @cached_property
    def _unlike(self) -> _UnlikeBytes | None:
        """None where all main layers hold equal bytes."""
        if not self.workload.model.unlike_bytes:
            return None
        return _UnlikeBytes(self.workload, self.layout, self._recomputed_layers)

    def _counts(self, stages: Stages) -> list[tuple[float, float]]:
        """(layers, leading ones among them) of each rank of a split."""
        leading = layer_counts(self.leading, stages, 0).dense.tolist()
        return [(float(sum(own)), of_own) for own, of_own in zip(stages, leading, strict=True)]

    @cached_property
    def _host_rows(self) -> list[HostRow]:
        """What every rank keeps on its host, as a linear function of its layers."""
        pp, layout = int(self.layout.pp), self.layout
        if self.host_limit_gib == inf:
            return [HostRow()] * pp
        stages = any_stages(self.workload, layout)
        assert stages is not None
        if self._unlike is not None:
            fixed_gib, each_gib = self._host_of_unlike
            layer_gib, beyond_gib = self._unlike.line_gib(each_gib)
            return [HostRow(float(fixed) - beyond_gib, layer_gib) for fixed in fixed_gib]
        of_dense, of_expert = self.offloaded_gib
        dense, rest, experts = layer_parameters_on_gpu(self.workload.model, layout)
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
    def offloaded_gib(self) -> tuple[float, float]:
        """What the host keeps of a parameter outside experts, and of one in them."""
        of_dense, of_expert = offloaded_bytes(self.workload, self.layout)
        return float(np.asarray(of_dense)) / GIB, float(np.asarray(of_expert)) / GIB

    @cached_property
    def _host_of_unlike(self) -> tuple[FloatArray, FloatArray]:
        """What each rank keeps on its host beside layers, [pp], and of a layer of each kind, [kinds]."""
        stages = any_stages(self.workload, self.layout)
        assert stages is not None
        assert self._unlike is not None
        each_gib = self._unlike.offloaded_gib(*self.offloaded_gib)
        held_gib = offloaded_states_gib(self.workload, self.layout, stages)
        return held_gib - self._unlike.in_stages(each_gib, stages), each_gib

    @cached_property
    def _in_flight(self) -> list[float]:
        ranks = np.arange(int(self.layout.pp))
        micro_batches = np.asarray(least_in_flight(self.layout, ranks), dtype=np.float64)
        return [float(count) for count in micro_batches]

    @cached_property
    def _per_layer(self) -> tuple[float, ...]:
        if self.layer_gib is not None:
            return self.layer_gib
        saved = saved_activations(self.workload, self.layout)
        return tuple(float(x) / GIB for x in layer_bytes(self.workload, self.layout, saved))

    @cached_property
    def _least_gib(self) -> list[FloatArray]:
        """What layers of unlike bytes hold on each rank at the least, by their number."""
        assert self._unlike is not None
        of_flying = {flying: self._unlike.least_gib(flying) for flying in set(self._in_flight)}
        return [of_flying[flying] for flying in self._in_flight]

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
        return int(self.layout.recompute_layers) if self.layout.recomputes_layers else 0

    def rank_rows(self) -> list[RankRow]:
        """The memory of every rank as a linear function of its layers, below it where they are unlike."""
        if self._unlike is not None:
            unlike, relief_gib = self._unlike, self._unlike.relief_gib
            lines = [unlike.line_gib(unlike.kept_gib(flying)) for flying in self._in_flight]
            return [
                RankRow(
                    fixed_gib=fixed_gib - beyond_gib,
                    layer_gib=layer_gib,
                    leading_gib=0.0,
                    relief_gib=relief_gib * flying,
                    host=host,
                )
                for fixed_gib, (layer_gib, beyond_gib), flying, host in zip(
                    self._fixed_gib, lines, self._in_flight, self._host_rows, strict=True
                )
            ]
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
        """Peak of one rank in GiB; a bound on it from below where layers hold unlike bytes.

        Parameters
        ----------
        rank
            Of the pipeline, from 0.
        layers
            Of all its virtual stages together.
        leading
            Dense layers at the front of the model among them, 0 to `layers`.
        """
        if self._unlike is not None:
            return self._fixed_gib[rank] + float(self._least_gib[rank][layers])
        return self._fixed_gib[rank] + self._layers_gib(rank, layers, leading)

    def fits(self, rank: int, layers: int, leading: int) -> bool:
        """Whether that rank stays within the limit; a rounding error over it is left to the exact check.

        So does what it keeps on the host, where that is limited.

        Parameters
        ----------
        rank
            Of the pipeline, from 0.
        layers
            Of all its virtual stages together.
        leading
            Dense layers at the front of the model among them, 0 to `layers`.
        """
        if self.rank_gib(rank, layers, leading) > self.limit_gib * (1 + 1e-9):
            return False
        host = self._host_rows[rank]
        held_gib = host.fixed_gib + host.layer_gib * layers + host.leading_gib * leading
        return held_gib <= self.host_limit_gib * (1 + 1e-9)

    def fits_part(self, rank: int) -> NDArray[np.bool_]:
        """Whether the layers from one place of the model to another fit on a rank, [begin, end].

        Of models whose layers hold unlike bytes, in one virtual stage a rank.

        Parameters
        ----------
        rank
            Of the pipeline, from 0.
        """
        assert self._unlike is not None
        held_gib = self._fixed_gib[rank] + self._unlike.of_parts_gib(self._in_flight[rank])
        fits = held_gib <= self.limit_gib * (1 + 1e-9)
        if self.host_limit_gib < inf:
            fixed_gib, each_gib = self._host_of_unlike
            on_host_gib = fixed_gib[rank] + self._unlike.in_parts(each_gib)
            fits &= on_host_gib <= self.host_limit_gib * (1 + 1e-9)
        return np.asarray(fits)

    def fits_stages(self, stages: Stages) -> bool:
        """Whether every rank of a split may stay within the limit on its HBM.

        A rounding error over it is left to the exact check. So are all splits where layers hold equal bytes.

        Parameters
        ----------
        stages
            Layers of every [rank][virtual stage].
        """
        if self._unlike is None:
            return True
        held_gib = np.array(self._fixed_gib) + self._unlike.of_stages_gib(stages)
        held_gib = held_gib + self._in_first_chunk_gib(stages)
        return bool(np.max(held_gib) <= self.limit_gib * (1 + 1e-9))

    def rooms(self, limit: int) -> list[list[int]]:
        """The most layers that each rank has room for, [rank][leading layers on it], up to `limit`.

        Less than the leading ones where even they do not fit. Ranks behind the first ones have no leading
        layers.

        Parameters
        ----------
        limit
            Layers above which the room of a rank makes no difference.
        """
        rooms = []
        # The leading layers begin a rank further on where the first chunk of several is empty.
        may_begin_later = int(self.layout.vpp) > 1 and may_have_empty_ends(self.workload)
        for rank in range(int(self.layout.pp)):
            most_leading = self.leading if rank < self.leading + may_begin_later else 0
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
        self,
        costs: LayerCosts,
        kinds: Sequence[tuple[float, float]] = (),
        backward: BackwardSeconds | None = None,
        by_stage: Sequence[Sequence[tuple[float, float]]] = (),
    ) -> SplitCosts:
        """The layer costs as the split sees them: main layers, leading dense ones, and the ends.

        Parameters
        ----------
        costs
            Seconds of one layer of each kind, under one mapping.
        kinds
            Of each kind of layers the seconds, and what recomputing one adds; of dense ones and of those with
            experts, where layers are alike.
        backward
            What their backward passes take.
        by_stage
            As `kinds` on each stage, where stages differ.
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
        orders = self._orders(kinds, by_stage)
        return SplitCosts(
            pp=int(layout.pp),
            vpp=int(layout.vpp),
            layers=model.layers,
            leading=self.leading,
            num_micro_batches=int(layout.num_micro_batches),
            flushes=self.workload.flushes,
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
            last_experts=model.mtp_weights * round(model.mtp_kind.blocks.experts),
            order=_cheapest(orders) if by_stage else self._order(kinds),
            order_of_ranks=orders,
            order_loads=self._unlike.order_loads if self._unlike is not None else (),
            begins=model.stage_begins,
            backward=self._backward(backward),
            forward_first=self._is_forward_first,
        )

    def _backward(self, each: BackwardSeconds | None) -> BackwardSeconds | None:
        """That of every layer in place of every kind, where a step goes by it (`SplitCosts.backward`)."""
        is_plain = int(self.layout.vpp) == 1 and int(self.layout.schedule) == Schedule.ONE_F_ONE_B
        is_plain &= bool(self.workload.model.unlike_layers)
        if each is None or not each.layers or not (is_plain or self._is_forward_first):
            return None
        kinds_of_ranks = each.of_ranks or [each.layers] * int(self.layout.pp)
        of_ranks = tuple(
            tuple(_in_order(self.workload.model, kinds, behind=rank > 0))
            for rank, kinds in enumerate(kinds_of_ranks)
        )
        differ = len(set(of_ranks)) > 1
        return each._replace(layers=of_ranks[0], of_ranks=of_ranks if differ else ())

    def _orders(
        self,
        kinds: Sequence[tuple[float, float]],
        by_stage: Sequence[Sequence[tuple[float, float]]],
    ) -> tuple[Order, ...]:
        """`SplitCosts.order_of_ranks`."""
        if not by_stage and not kinds_ahead(self.workload.model.unlike_layers):
            return ()
        kinds_of_ranks = by_stage or [kinds] * int(self.layout.pp)
        return tuple(
            _in_order(self.workload.model, of_rank, behind=rank > 0)
            for rank, of_rank in enumerate(kinds_of_ranks)
        )

    def _order(self, kinds: Sequence[tuple[float, float]]) -> Order:
        """`SplitCosts.order`, where it decides."""
        decides = bool(self.workload.model.unlike_layers) or self._is_forward_first
        return _in_order(self.workload.model, kinds) if decides and kinds else ()

    @property
    def _is_forward_first(self) -> bool:
        return int(self.layout.schedule) == Schedule.GPIPE

    def _end_loads(self, dense: float, rest: float) -> tuple[float, float]:
        """Parameters outside experts that the first and the last rank hold beside their layers."""
        model, pp = self.workload.model, int(self.layout.pp)
        each = model.layers // pp
        stages = tuple((each + (rank < model.layers % pp),) for rank in range(pp))
        loads = np.asarray(rank_parameters(model, self.layout, stages)[0], dtype=np.float64)
        if self._unlike is not None:
            beside = loads - self._unlike.loads(stages)
        else:
            counts = layer_counts(model.dense_layers, stages, 0)
            beside = loads - (counts.dense * dense + counts.moe * rest)
        return float(beside[0]), float(beside[-1]) if pp > 1 else 0.0


def _in_order(model: ModelSpec, kinds: Sequence[T], *, behind: bool = False) -> tuple[T, ...]:
    """What each layer has, by what its kind has, on the first rank or on those behind it."""
    layers = model.unlike_layers
    if not layers:
        in_front = model.dense_layers
        return (kinds[0],) * in_front + (kinds[-1],) * (model.layers - in_front)
    of_ahead = kinds_ahead(layers)
    number = {symbols: at for at, symbols in enumerate(dict.fromkeys(layers))}
    each = [number[symbols] for symbols in layers]
    return tuple(kinds[of_ahead.get(kind, kind) if behind else kind] for kind in each)


class _UnlikeBytes:
    """What layers of one layout hold on a GPU where main layers have unlike bytes, GiB."""

    def __init__(self, workload: Workload, layout: Layout, recomputed: int) -> None:
        self._layers = workload.model.unlike_bytes
        self._recomputed = min(recomputed, workload.model.layers)
        self._vpp, self._v_shaped = int(layout.vpp), is_v_shaped(layout)
        ranks = np.arange(int(layout.pp))
        self._flying = np.asarray(least_in_flight(layout, ranks), dtype=np.float64)
        kinds = unlike_layer_bytes(workload, layout)
        self._states = np.array([float(kind.states) / GIB for kind in kinds])
        self._saved = np.array([float(kind.saved) / GIB for kind in kinds])
        self._dropped = np.array([float(kind.dropped) / GIB for kind in kinds])
        parameters = kind_parameters_on_gpu(workload.model, layout)
        self._dense, self._experts = (
            np.array([float(np.asarray(of_kinds[k])) for of_kinds in parameters]) for k in (0, 1)
        )

    @property
    def relief_gib(self) -> float:
        """What a layer that is recomputed in full saves of a micro-batch at the most."""
        return max(float(np.max(self._saved - self._dropped)), 0.0)

    @property
    def order_loads(self) -> tuple[tuple[float, int], ...]:
        """`SplitCosts.order_loads` of these layers."""
        number = {symbols: place for place, symbols in enumerate(dict.fromkeys(self._layers))}
        of_kinds = [(float(x), int(y > 0)) for x, y in zip(self._dense, self._experts, strict=True)]
        return tuple(of_kinds[number[symbols]] for symbols in self._layers)

    def _of_stages(self, stages: Stages, recomputed: int) -> tuple[FloatArray, FloatArray]:
        """Layers of each kind on every rank, and how many of them are recomputed, [kinds, pp]."""
        counts = unlike_counts(self._layers, stages, recomputed, v_shaped=self._v_shaped)
        number, recomputed_ones = zip(*counts, strict=True)
        return np.sum(number, axis=1), np.sum(recomputed_ones, axis=1)

    def of_stages_gib(self, stages: Stages) -> FloatArray:
        """States and activations of the layers of every rank of a split."""
        number, recomputed = self._of_stages(stages, self._recomputed)
        saved = self._saved @ number + (self._dropped - self._saved) @ recomputed
        return np.asarray(self._states @ number + saved * self._flying)

    def loads(self, stages: Stages) -> FloatArray:
        """Parameters outside experts of the layers of every rank."""
        return self.in_stages(self._dense, stages)

    def in_stages(self, of_kinds: FloatArray, stages: Stages) -> FloatArray:
        """What the layers of every rank have, from what one of each kind has, [pp].

        Parameters
        ----------
        of_kinds
            What one layer of each kind has, [kinds].
        stages
            Layers of every [rank][virtual stage].
        """
        number, _ = self._of_stages(stages, 0)
        return np.asarray(of_kinds @ number)

    def in_parts(self, of_kinds: FloatArray) -> FloatArray:
        """What the layers from one place to another have, from what one of each kind has, [begin, end]."""
        return np.tensordot(of_kinds, counts_of_parts(self._layers), 1)

    def of_parts_gib(self, flying: float) -> FloatArray:
        """States and activations of the layers from one place to another, one virtual stage, [begin, end]."""
        recomputed = counts_of_parts(self._layers, int(self._recomputed))
        spared = np.tensordot(self._saved - self._dropped, recomputed, 1)
        return self.in_parts(self._states + flying * self._saved) - flying * spared

    def least_gib(self, flying: float) -> FloatArray:
        """States and activations of 0 layers, 1, 2, ... at the least, wherever they lie in the model."""
        of_kinds = (self._states, self._saved, self._dropped)
        states, saved = least_in_parts(
            self._layers, self._vpp, of_kinds, np.asarray(self._recomputed)
        )
        return states + flying * saved

    def kept_gib(self, flying: float) -> FloatArray:
        """States and activations of one layer of each kind that is not recomputed in full, [kinds]."""
        return np.asarray(self._states + flying * self._saved)

    def offloaded_gib(self, of_dense: float, of_expert: float) -> FloatArray:
        """What the host keeps of one layer of each kind, from what it keeps of a parameter, [kinds]."""
        return np.asarray(self._dense * of_dense + self._experts * of_expert)

    def line_gib(self, of_kinds: FloatArray) -> tuple[float, float]:
        """Slope, and what to take off, of a line below what any number of layers have together."""
        least_of = least_held(self._layers, self._vpp, list(of_kinds))
        slope = float(least_of[-1]) / len(self._layers)
        return slope, float(np.max(slope * np.arange(len(least_of)) - least_of))


# The least pace of ranks in step over all splits that a search looks at.
#
# Ranks that interleave work on chunks of the same number at the same time, so the slowest chunk of each
# number sets the pace (`schedules.pace_excess_s`). The splits that are looked at there
# (`stages.level_splits`) are few enough to add all of them up for many layouts at once.


T = TypeVar("T")
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROUNDING = 1e-12
"""What bounds leave for sums in another order."""
_Chunk = tuple[float, ...]
"""Dense layers, layers with experts, whether it is the first of the model, whether the last."""
_MOST_STAGES = 1 << 20
"""More virtual stages than any model has layers."""


class _Splits(NamedTuple):
    """All splits of a model over so many ranks and virtual stages, by what is in their chunks."""

    chunks: FloatArray
    """Distinct chunks, [chunks, 4], as `_Chunk` has them."""
    rounds: IntArray
    """Rows of `chunks` that stand in each distinct set of chunks of one number, one set after the other."""
    starts: IntArray
    """Where each set begins, [sets]."""
    counts: FloatArray
    """How often each split has each set, [splits, sets]."""
    main_layers: FloatArray
    """Layers of each rank, leading dense ones left out, [splits, pp]."""
    in_first: FloatArray
    """Layers of the first virtual stage of rank 0, leading dense ones left out, [splits]."""


class ChunkTimes(NamedTuple):
    """Seconds of a micro-batch, forward and backward, of what chunks consist of, arrays of shape [n]."""

    dense_s: FloatArray
    """A layer without experts."""
    moe_s: FloatArray
    first_s: FloatArray
    """The embedding."""
    last_s: FloatArray
    """Head, loss and multi-token-prediction modules."""

    def take(self, rows: IntArray) -> ChunkTimes:
        """Those of some layouts.

        Parameters
        ----------
        rows
            Positions, 0 to n - 1.
        """
        return ChunkTimes(*(column[rows] for column in self))


class UnlikeTimes(NamedTuple):
    """`ChunkTimes` where layers are unlike: seconds of every kind of layer, in `KindTimes.unlike`'s order."""

    work_s: FloatArray
    """Of a layer of each kind, of what recomputing one adds, of the embedding and of the model's last chunk
    beside its layers, [2 kinds + 2, n]."""
    fill_s: FloatArray
    """What a rank waits for in ranks above it, over the micro-batches of a flush; rows as in `work_s`."""
    backward_s: FloatArray
    """What backward passes take of the work; rows as in `work_s`."""
    recomputed: IntArray
    """Layers of every virtual stage that are computed again at the least, [n]."""

    @property
    def last_s(self) -> FloatArray:
        """Head, loss and multi-token-prediction modules, [n]."""
        return np.asarray(self.work_s[-1])

    def take(self, rows: IntArray) -> UnlikeTimes:
        """Those of some layouts.

        Parameters
        ----------
        rows
            Positions, 0 to n - 1.
        """
        work_s, fill_s, backward_s = (
            each[:, rows] for each in (self.work_s, self.fill_s, self.backward_s)
        )
        return UnlikeTimes(work_s, fill_s, backward_s, self.recomputed[rows])


def chunk_times(context: Context, times: KindTimes) -> ChunkTimes | UnlikeTimes:
    """Seconds of what chunks consist of.

    Parameters
    ----------
    context
        Workload and layouts of shape [n].
    times
        `kind_times(context)`.
    """
    if times.unlike:
        return _unlike_times(context, times)
    last_s = np.asarray(last_rank_s(times, context.workload.model.mtp_layers), dtype=np.float64)
    kinds = (times.dense, times.moe, times.embedding)
    seconds = (0.0 if kind is None else kind.seconds for kind in kinds)
    shape = context.layout.broadcast_shape()
    columns = (np.asarray(column, dtype=np.float64) for column in (*seconds, last_s))
    return ChunkTimes(*(np.broadcast_to(column, shape) for column in columns))


def _unlike_times(context: Context, times: KindTimes) -> UnlikeTimes:
    """Where the backward pass is split, gradients of weights may fill the drain: it counts as nothing."""
    layout, shape = context.layout, context.layout.broadcast_shape()
    modules, kinds = context.workload.model.mtp_layers, len(times.unlike)

    def _seconds(passes: Literal["seconds", "backward_s"]) -> FloatArray:
        again = [kind.recompute_s for kind in times.unlike]
        own = [getattr(kind, passes) for kind in (*times.unlike, times.embedding, times.head)]
        if times.mtp is not None:
            own[-1] = own[-1] + modules * getattr(times.mtp, passes)
        return np.stack([np.broadcast_to(x, shape) for x in (*own[:kinds], *again, *own[kinds:])])

    work_s, backward_s = _seconds("seconds"), _seconds("backward_s")
    splits = has_trait(layout.schedule, "splits_backward")
    share = context.workload.flushes / np.asarray(layout.num_micro_batches, dtype=np.float64)
    fill_s = np.where(splits, work_s - backward_s, work_s) * share
    fill_s[-1] = 0.0
    recomputed = np.where(layout.recomputes_layers, layout.recompute_layers, 0)
    return UnlikeTimes(
        work_s, fill_s, backward_s, np.broadcast_to(recomputed, shape).astype(np.int64)
    )


def least_level_pace_s(
    workload: Workload,
    layouts: Layout,
    times: ChunkTimes | UnlikeTimes,
    rooms: LayerRooms | UnlikeRooms | None = None,
    *,
    by_passes: bool = False,
) -> FloatArray:
    """The least sum_v max_r t_vr of the splits that a search looks at, where ranks are in step.

    Where layers are unlike, paces are no bound. There it is the least over these splits of what some rank
    takes at the least: its own work, and once a flush what the ranks above it take for a micro-batch. They
    hand it the first one, and take the last one back. Or it is what some passes take of which each waits for
    the one before it (`simulator.longest_way`).

    Parameters
    ----------
    workload
        Its model and framework.
    layouts
        Shape [n].
    times
        Of the layouts.
    rooms
        What ranks of the n layouts have room for; without a limit by default.
    by_passes
        Whether to look for such passes. Not where the times are the least of several places: their forward
        and backward passes may be those of unlike ones.

    Returns
    -------
    FloatArray
        Seconds per micro-batch, [n]; 0 where ranks are not in step or have one virtual stage, infinite where
        no split fits.
    """
    shape = layouts.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layouts.pp, layouts.vpp))
    pace_s = np.zeros(shape)
    own = np.flatnonzero((vpp > 1) & has_trait(layouts.schedule, "in_step"))
    if not len(own):
        return pace_s
    if isinstance(times, UnlikeTimes):
        pace_s[own] = _least_of_unlike_s(
            workload,
            layouts.take(own),
            times.take(own),
            None if rooms is None else rooms.take(own),
            by_passes=by_passes,
        )
        return pace_s
    values, back = np.unique(pp[own] * _MOST_STAGES + vpp[own], return_inverse=True)
    for which, value in enumerate(values.tolist()):
        splits = _splits(_pipeline_of(workload, *divmod(value, _MOST_STAGES)))
        rows = own[back == which]
        if splits is None:
            pace_s[rows] = np.inf
            continue
        seconds = splits.chunks @ np.stack(times.take(rows))
        slowest_s = np.maximum.reduceat(seconds[splits.rounds], splits.starts, axis=0)
        paces_s = splits.counts @ slowest_s
        if isinstance(rooms, LayerRooms):
            holds = rooms.take(rows).hold(splits.main_layers, splits.in_first)
            paces_s = np.where(holds, paces_s, np.inf)
        pace_s[rows] = paces_s.min(axis=0) * (1 - _ROUNDING)
    return pace_s


def _least_of_unlike_s(
    workload: Workload,
    layouts: Layout,
    times: UnlikeTimes,
    rooms: LayerRooms | UnlikeRooms | None,
    *,
    by_passes: bool,
) -> FloatArray:
    """`least_level_pace_s` of unlike layers in several virtual stages, [n]."""
    shape = layouts.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layouts.pp, layouts.vpp))
    pace_s = np.empty(len(pp))
    recomputed = np.minimum(times.recomputed, workload.model.layers)
    key = (pp * _MOST_STAGES + vpp) * _MOST_STAGES + recomputed
    values, back = np.unique(key, return_inverse=True)
    for which, value in enumerate(values.tolist()):
        of_stages, again = divmod(value, _MOST_STAGES)
        rows = np.flatnonzero(back == which)
        ranks, stages = divmod(of_stages, _MOST_STAGES)
        pipeline = _pipeline_of(workload, ranks, stages)
        splits = _unlike_splits(pipeline, workload.model.unlike_layers, again)
        if splits is None:
            pace_s[rows] = np.inf
            continue
        slowest_s = splits.slowest_s(np.concatenate([times.work_s, times.fill_s])[:, rows])
        if isinstance(rooms, UnlikeRooms):
            slowest_s = np.where(rooms.take(rows).hold(splits.sizes), slowest_s, np.inf)
        elif rooms is not None:
            holds = rooms.take(rows).hold(splits.main_layers, splits.in_first)
            slowest_s = np.where(holds, slowest_s, np.inf)
        if by_passes:
            ways_s = _ways_s(splits, workload.flushes, layouts.take(rows), times.take(rows))
            slowest_s = np.maximum(slowest_s, ways_s)
        pace_s[rows] = slowest_s.min(axis=0) * (1 - _ROUNDING)
    return pace_s


_STEP = 1.25
"""Ratio by which seconds of kinds of layers may differ that share their sequences of passes."""
_NEAR = 1.02
"""Ratio to the fastest split's seconds up to which another one is played too."""
_MOST_PASSES = 4096
"""Passes of a step, at most, in which such sequences are looked for: some milliseconds for some splits."""


def _ways_s(splits: _UnlikeSplits, flushes: int, layouts: Layout, times: UnlikeTimes) -> FloatArray:
    """The longest of some sequences of passes, for each split of some layouts with one pipeline.

    They are the longest ones with about the times of the layouts, and with those times to the digit none is
    longer than the schedule takes. Seconds per micro-batch, [splits, n]; 0 where none is looked for.
    """
    (_, vpp, pp), shape = splits.sizes.shape, layouts.broadcast_shape()
    seconds = np.concatenate([times.work_s - times.backward_s, times.backward_s])
    of_kinds_s = times.work_s[: (len(times.work_s) - 2) // 2]
    about = np.round(
        np.log(np.maximum(times.work_s / of_kinds_s.mean(axis=0), 1e-3)) / np.log(_STEP)
    )
    about[~splits.chunks.any(axis=(0, 1))] = 0.0  # of what no layer recomputes
    of_flush = np.broadcast_to(np.asarray(layouts.num_micro_batches), shape) // flushes
    schedule = np.broadcast_to(np.asarray(layouts.schedule), shape)
    keys, back = np.unique(np.stack([schedule, of_flush, *about]), axis=1, return_inverse=True)
    ways_s = np.zeros((len(splits.sizes), *shape))
    for which, (name, number, *each) in enumerate(keys.T.astype(int).tolist()):
        shapes = traits(name)
        too_many = 2 * pp * vpp * number > _MOST_PASSES
        if too_many or shapes.splits_backward or shapes.faults(pp, vpp, number):
            continue
        rows = np.flatnonzero(back.reshape(-1) == which)
        passes = splits.longest_ways(Schedule(name), number, tuple(each))
        ways_s[:, rows] = np.max(passes @ seconds[:, rows], axis=0) / number
    return ways_s


class _Pipeline(NamedTuple):
    """All that the splits follow from."""

    layers: int
    dense_layers: int
    """The first ones, all where there are no experts."""
    leading: int
    """The dense layers in front of others."""
    uneven_stages: bool
    empty_ends: bool
    pp: int
    vpp: int
    begins: tuple[int, ...]
    """`ModelSpec.stage_begins`."""


@dataclass(frozen=True, eq=False)
class _UnlikeSplits:
    """All splits of a model with unlike layers over so many ranks and virtual stages, by what ranks have."""

    ranks: FloatArray
    """Distinct ranks, [ranks, 2 (2 kinds + 2)]: what one has, and what those above it have in their first
    virtual stages, as `UnlikeTimes` has it."""
    rows: IntArray
    """Rows of `ranks` that a split has, one split after the other."""
    starts: IntArray
    """Where each split begins, [splits]."""
    main_layers: FloatArray
    in_first: FloatArray
    """As `_Splits` has them."""
    sizes: IntArray
    """Layers of each virtual stage, [splits, virtual stages, pp]."""
    chunks: FloatArray
    """What each chunk has, as `UnlikeTimes` has it, [splits, chunks, 2 kinds + 2]."""
    _ways: dict[tuple[Schedule, int, tuple[int, ...]], FloatArray] = field(default_factory=dict)

    def longest_ways(
        self, schedule: Schedule, num_micro_batches: int, about: tuple[int, ...]
    ) -> FloatArray:
        """What passes have in sequence that are longest with some times, powers of `_STEP`, of which backward
        passes take two thirds.

        Those of each split that may be the fastest with them, in every split: [sequences, splits,
        2 (2 kinds + 2)], forward passes first.
        """
        asked = (schedule, num_micro_batches, about)
        if asked not in self._ways:
            self._ways[asked] = self._longest_ways(*asked)
        return self._ways[asked]

    def _longest_ways(
        self, schedule: Schedule, num_micro_batches: int, about: tuple[int, ...]
    ) -> FloatArray:
        work_s = _STEP ** np.array(about, dtype=np.float64)
        fill_s = np.append(work_s[:-1], 0.0) / num_micro_batches
        both_s, ways, least_s = self.chunks @ work_s, {}, inf
        bounds_s = (
            num_micro_batches * self.slowest_s(np.concatenate([work_s, fill_s])[:, None])[:, 0]
        )
        for split in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[split] > least_s * _NEAR:
                break
            way = longest_way(
                (both_s[split] / 3).tolist(),
                (both_s[split] * 2 / 3).tolist(),
                pp=self.sizes.shape[2],
                num_micro_batches=num_micro_batches,
                schedule=schedule,
            )
            least_s = min(least_s, float((way.T @ [1 / 3, 2 / 3]) @ both_s[split]))
            ways[way.tobytes()] = way
        passes = np.stack(list(ways.values()))
        each = [np.tensordot(passes[:, k], self.chunks, (1, 1)) for k in range(2)]
        return np.concatenate(each, axis=-1)

    def slowest_s(self, seconds: FloatArray) -> FloatArray:
        """What the slowest rank of each split takes with what it waits once, [splits, n], from the work and
        the waits of `UnlikeTimes`, [2 (2 kinds + 2), n].
        """
        of_ranks = self.ranks @ seconds
        return np.maximum.reduceat(of_ranks[self.rows], self.starts, axis=0)


@lru_cache(maxsize=4096)
def _unlike_splits(
    pipeline: _Pipeline, layers: tuple[str, ...], recomputed: int
) -> _UnlikeSplits | None:
    stages, leading = _stages(pipeline), pipeline.leading
    if not stages:
        return None
    sizes = np.array(stages, dtype=np.int64).transpose(0, 2, 1)  # [splits, virtual stages, pp]
    flat = sizes.reshape(len(stages), -1)
    first = (np.cumsum(flat, axis=1) - flat).reshape(sizes.shape)
    again = np.minimum(sizes, recomputed)
    columns = [counts_between(layers, first, first + number) for number in (sizes, again)]
    ends = np.zeros((2, *sizes.shape))
    ends[0, :, 0, 0] = ends[1, :, -1, -1] = 1.0
    held = np.stack([*columns[0], *columns[1], *ends], axis=-1)
    in_front = held[:, 0]
    above = np.cumsum(in_front, axis=1) - in_front
    ranks = np.concatenate([held.sum(axis=1), above], axis=-1)  # [splits, pp, columns]
    covered = np.all(ranks[:, :, None] <= ranks[:, None], axis=-1)
    # Of equal ranks the last one stays.
    equal = covered & covered.transpose(0, 2, 1)
    later = np.triu(np.ones(covered.shape[1:], dtype=bool), 1)
    stays = ~np.any(covered & (~equal | later), axis=2)
    distinct, back = np.unique(ranks[stays], axis=0, return_inverse=True)
    counts = stays.sum(axis=1)
    main_layers = np.clip(first + sizes - leading, 0, sizes).astype(np.float64)
    return _UnlikeSplits(
        distinct,
        back.reshape(-1),
        np.cumsum(counts) - counts,
        main_layers.sum(axis=1),
        main_layers[:, 0, 0],
        sizes,
        held.reshape(len(stages), -1, held.shape[-1]),
    )


def _pipeline_of(workload: Workload, pp: int, vpp: int) -> _Pipeline:
    model = workload.model
    return _Pipeline(
        layers=model.layers,
        dense_layers=model.dense_layers,
        leading=_leading(workload),
        uneven_stages=framework_of_stack(workload.framework).uneven_stages,
        empty_ends=may_have_empty_ends(workload),
        pp=pp,
        vpp=vpp,
        begins=model.stage_begins,
    )


@lru_cache(maxsize=4096)
def _stages(pipeline: _Pipeline) -> tuple[Stages, ...]:
    """Splits of ranks in step that a search looks at; none where some virtual stage would be empty."""
    layers, _, _, uneven_stages, empty_ends, pp, vpp, begins = pipeline
    if uneven_stages:
        return level_splits(layers, pp, vpp, empty_ends=empty_ends, begins=begins)
    even = balanced_stages(layers, pp, vpp, begins)
    return () if even is None else (even,)


@lru_cache(maxsize=4096)
def _splits(pipeline: _Pipeline) -> _Splits | None:
    """The splits of ranks in step; None where some virtual stage would be empty."""
    dense_layers, leading, found = pipeline.dense_layers, pipeline.leading, _stages(pipeline)
    if not found:
        return None
    chunks: dict[_Chunk, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    of_splits, main_layers = [], []
    for stages in found:
        rounds = _rounds(dense_layers, stages)
        rows = (
            tuple(sorted(chunks.setdefault(one, len(chunks)) for one in each)) for each in rounds
        )
        of_splits.append([sets.setdefault(each, len(sets)) for each in rows])
        main_layers.append(layer_counts(leading, stages, 0).moe)
    sizes = np.array([len(each) for each in sets])
    counts = np.stack([np.bincount(own, minlength=len(sets)) for own in of_splits])
    return _Splits(
        chunks=np.array(list(chunks), dtype=np.float64),
        rounds=np.array(list(chain.from_iterable(sets))),
        starts=np.cumsum(sizes) - sizes,
        counts=counts.astype(np.float64),
        main_layers=np.array(main_layers, dtype=np.float64),
        in_first=np.array([max(stages[0][0] - leading, 0.0) for stages in found]),
    )


def _rounds(dense_layers: int, stages: Stages) -> list[set[_Chunk]]:
    """The chunks of each number, without those that hold no more than another one beside them."""
    counts = chunk_counts(dense_layers, stages, 0)
    ends = np.zeros((2, *counts.dense.shape))
    ends[0, 0, 0] = ends[1, -1, -1] = 1.0
    held = np.stack([counts.dense, counts.moe, *ends], axis=-1)
    rounds = [set(map(tuple, each)) for each in held.tolist()]
    return [{one for one in each if not _is_less(one, each)} for each in rounds]


def _is_less(chunk: _Chunk, others: set[_Chunk]) -> bool:
    """Whether another chunk holds as much of everything."""
    return any(
        other != chunk and all(a <= b for a, b in zip(chunk, other, strict=True))
        for other in others
    )


_RECOMPUTE_RANGES = 8
"""Into which the numbers of recomputed layers are put: the fewest of a range cost, the most make room."""


def busiest_in_rooms_s(
    context: Context,
    times: KindTimes,
    layouts: Layout,
    counts: Sequence[int] | IntArray,
    limit_gib: float,
    *,
    by_passes: bool = True,
) -> FloatArray:
    """A lower bound on the pace of every split that fits, for any number of recomputed layers.

    That is the slowest rank's time, or the sum of the slowest chunks' where ranks are in step.

    Parameters
    ----------
    context, times
        Of every mapping, shape [mappings]: those of the first layout, then those of the next.
    layouts
        Shape [layouts].
    counts
        Mappings of each layout.
    limit_gib
        What the peak on one GPU may reach.
    by_passes
        As `least_level_pace_s` has it.

    Returns
    -------
    FloatArray
        Seconds for one micro-batch, [mappings]; infinite where no split fits.
    """
    workload = context.workload
    model = workload.model
    main = times.moe if model.moe_layers else times.dense
    assert main is not None
    main_layers = model.moe_layers or model.dense_layers
    leading, owner = _leading(workload), np.repeat(np.arange(len(counts)), counts)
    end_rank = last_rank(context.layout.schedule, context.layout.pp)
    again_s, layer_s, vpp, end_rank = (
        np.broadcast_to(np.asarray(value), owner.shape)
        for value in (
            cheapest_recompute_s(times) if times.unlike else main.recompute_s,
            cheapest_layer_s(times) if times.unlike else main.seconds,
            context.layout.vpp,
            end_rank,
        )
    )
    # Leading dense layers may stand among the recomputed ones: each costs at least its own time instead.
    spared_s = np.zeros(len(owner))
    if leading and times.dense is not None:
        dense_s = cheapest_layer_s(times) if times.unlike else times.dense.seconds
        spared_s = leading * np.maximum(again_s - np.asarray(dense_s), 0.0)
    front = _front(times, layouts, owner, leading, again_s)
    seconds = chunk_times(context, times)
    again_at_least_s = np.broadcast_to(np.asarray(cheapest_recompute_s(times)), owner.shape)
    best_s = np.full(len(owner), np.inf)
    for fewest, largest in _amounts(workload, layouts):
        rows = np.flatnonzero(fewest >= 0)
        recomputed = replace(layouts.take(rows), recompute_layers=largest[rows])
        in_front = None if front is None else front.is_of[rows]
        rooms, most = _rooms(workload, recomputed, limit_gib, in_front)
        mappings = np.flatnonzero(np.isin(owner, rows))
        owners, mapping_again_s = owner[mappings], again_s[mappings]
        every, each = fewest[owners] == ALL_LAYERS, seconds.take(mappings)
        own_rows = np.searchsorted(rows, owners)
        own_rooms = most[own_rows]
        busiest_s = least_busiest_in_rooms_s(
            own_rooms,
            main_layers,
            layer_s[mappings] + np.where(every, mapping_again_s, 0.0),
            each.last_s,
            end_rank[mappings],
            first_s=0.0 if front is None else front.seconds(mappings, every),
        )
        recomputed_layers = np.where(every, 0, fewest[owners] * vpp[mappings])
        added_s = np.maximum(mapping_again_s * recomputed_layers - spared_s[mappings], 0.0)
        own_again_s = again_at_least_s[mappings]
        own_layouts = context.layout.take(mappings)
        if isinstance(each, UnlikeTimes):
            each, own_again_s = each._replace(recomputed=fewest[owners]), 0.0 * own_again_s
        else:
            more_s = np.where(every, own_again_s, 0.0)
            each = each._replace(dense_s=each.dense_s + more_s, moe_s=each.moe_s + more_s)
        own_rooms_of = rooms.take(own_rows)
        pace_s = least_level_pace_s(workload, own_layouts, each, own_rooms_of, by_passes=by_passes)
        if isinstance(each, UnlikeTimes):
            in_order_s = _in_order_and_rooms_s(workload, own_layouts, each, leading + own_rooms)
            pace_s = np.maximum(pace_s, in_order_s)
        pace_s = pace_s + own_again_s * recomputed_layers
        slowest_s = np.maximum(busiest_s + added_s, pace_s)
        if times.unlike:
            mean_s = _mean_of_ranks_s(
                context, times, np.where(fewest == ALL_LAYERS, model.layers, fewest)[owner]
            )
            slowest_s = np.maximum(slowest_s, mean_s[mappings])
        best_s[mappings] = np.minimum(best_s[mappings], slowest_s)
    return best_s


def _rooms(
    workload: Workload, layouts: Layout, limit_gib: float, in_front: NDArray[np.bool_] | None
) -> tuple[LayerRooms | UnlikeRooms, FloatArray]:
    """What ranks have room for, and the main layers that are, [n, ranks]; 0 where no split can fit."""
    unlike = unlike_rooms(workload, layouts, limit_gib)
    rooms = unlike or layer_rooms(workload, layouts, limit_gib, in_front)
    most = rooms.most if isinstance(rooms, LayerRooms) else rooms.most_layers()
    lacks = _lacks_room_for_one(layouts, most, _leading(workload))
    return rooms, np.where(lacks[:, None], 0.0, most)


def _lacks_room_for_one(layouts: Layout, most: FloatArray, leading: int) -> NDArray[np.bool_]:
    """Layouts of one virtual stage a rank in which some rank has no room for a main layer, [n].

    Every rank has a layer, and one behind as many ranks as there are leading layers has a main one.
    """
    rank, pp = np.arange(most.shape[1]), np.asarray(layouts.pp)
    needs_one = (rank >= leading) & (rank < pp[..., None])
    lacks = np.any(needs_one & (most < 1), axis=1)
    return np.asarray(lacks & (np.asarray(layouts.vpp) == 1))


class _Front(NamedTuple):
    """What rank 0 runs beside main layers where it holds all leading ones, seconds of [mappings].

    Ranks of one part each hold no main layer ahead of a leading one: no split has more main layers in some
    time or room than rank 0 beside all leading ones and the ranks behind it.
    """

    is_of: NDArray[np.bool_]
    """Layouts of which this is known, [layouts]; nothing counts for the others."""
    some_s: FloatArray
    """Where some layers are recomputed and each of them counts as a main one."""
    every_s: FloatArray
    """Where all are."""

    def seconds(self, mappings: IntArray, every: NDArray[np.bool_]) -> FloatArray:
        """Of some mappings, of which `every` says where all layers are recomputed."""
        return np.where(every, self.every_s[mappings], self.some_s[mappings])


def _front(
    times: KindTimes, layouts: Layout, owner: IntArray, leading: int, again_s: FloatArray
) -> _Front | None:
    """Of mappings of the layouts `owner`; None without leading dense layers, or where layers are unlike."""
    if not leading or times.dense is None or times.unlike:
        return None
    is_of = np.broadcast_to(np.asarray(layouts.vpp) == 1, layouts.broadcast_shape())
    first_s, dense_s = (
        np.asarray(times.embedding.seconds),
        leading * np.asarray(times.dense.seconds),
    )
    recompute_s = leading * np.asarray(times.dense.recompute_s)
    spared_s = np.maximum(leading * again_s - recompute_s, 0.0)
    some_s = first_s + np.maximum(dense_s - spared_s, 0.0)
    every_s = first_s + dense_s + recompute_s
    return _Front(is_of, *(np.where(is_of[owner], each, 0.0) for each in (some_s, every_s)))


def _in_order_and_rooms_s(
    workload: Workload, layouts: Layout, times: UnlikeTimes, rooms: FloatArray
) -> FloatArray:
    """The busiest of ranks with one part each of unlike layers, and with room for so many layers, [n].

    0 where they hold several parts.
    """
    model, shape = workload.model, layouts.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layouts.pp, layouts.vpp))
    own = (vpp == 1) & (pp > 1)
    counts, busiest_s = counts_in_order(model.unlike_layers), np.zeros(shape)
    recomputed = np.minimum(times.recomputed, model.layers)
    kinds, places = len(counts), np.arange(0, model.layers + 1)
    for ranks, amount in sorted(set(zip(pp[own].tolist(), recomputed[own].tolist(), strict=True))):
        rows = np.flatnonzero(own & (pp == ranks) & (recomputed == amount))
        own_rooms = np.minimum(rooms[rows, :ranks], model.layers)
        columns = np.concatenate([times.work_s[:, rows], own_rooms.T])
        first, back = distinct_columns(columns)
        *work_s, first_s, last_s = columns[: 2 * kinds + 2, first]
        kinds_s = np.stack(work_s[:kinds], axis=1)
        kinds_again_s = np.stack(work_s[kinds:], axis=1)
        again_s = None
        if amount == model.layers:
            kinds_s = kinds_s + kinds_again_s
        elif amount:
            to = np.minimum(places + amount, model.layers)
            again_s = kinds_again_s @ (counts[:, to] - counts[:, places])
        least_s = least_busiest_in_order_s(
            kinds_s @ counts,
            first_s,
            last_s,
            ranks,
            rooms=own_rooms[first],
            again_s=again_s,
            begins=model.stage_begins,
        )
        busiest_s[rows] = least_s[back]
    return busiest_s


def busiest_by_place_s(
    workload: Workload, layout: Layout, times: KindTimes, limit_gib: float
) -> FloatArray:
    """The slowest of ranks that hold one part each, at the least, where each stage has times of its own.

    Parameters
    ----------
    workload
        On the layout's GPUs.
    layout
        Shape [1], of one virtual stage a rank.
    times
        On each stage, under each of n mappings: arrays [n * pp].
    limit_gib
        What the peak on one GPU may reach.

    Returns
    -------
    FloatArray
        Seconds for one micro-batch, [n], for any number of recomputed layers.
    """
    model, ranks = workload.model, int(np.asarray(layout.pp).item())
    layers = model.unlike_layers or (
        *("dense",) * model.dense_layers,
        *("moe",) * model.moe_layers,
    )
    kinds_s = np.stack([np.asarray(kind.seconds) for kind in times.layers], axis=-1)
    before_s = (kinds_s @ counts_in_order(layers)).reshape(-1, ranks, len(layers) + 1)
    ends = (times.embedding.seconds, last_rank_s(times, model.mtp_layers))
    first_s, last_s = (
        np.broadcast_to(np.asarray(each), kinds_s.shape[:1]).reshape(-1, ranks)[:, at]
        for each, at in zip(ends, (0, -1), strict=True)
    )
    rooms, leading = None, 0 if model.unlike_layers else _leading(workload)
    if not np.asarray(layout.recomputes_layers).item(0):
        _, most = _rooms(workload, layout, limit_gib, np.array([leading > 0]))
        # Of unlike layers the leading ones may lie on any rank.
        held = np.minimum(most[:, :ranks] + _leading(workload) - leading, model.layers)
        rooms = np.repeat(held, len(before_s), axis=0)
    return least_busiest_in_order_s(
        before_s, first_s, last_s, ranks, rooms=rooms, leading=leading, begins=model.stage_begins
    )


def _mean_of_ranks_s(context: Context, times: KindTimes, recomputed: IntArray) -> FloatArray:
    """What the ranks work in the mean, with so many layers of each virtual stage recomputed, [n]."""
    chunks = np.asarray(context.layout.pp) * context.layout.vpp
    plain = replace(context, layout=replace(context.layout, recompute=0))
    work_s = least_work_s(plain, times)
    again_s = least_recomputed_s(context, times, np.maximum(recomputed, 0) * chunks)
    return np.asarray((work_s + again_s) / context.layout.pp * (1 - _ROUNDING))


def _amounts(workload: Workload, layouts: Layout) -> Iterator[tuple[IntArray, IntArray]]:
    """Ranges (fewest, most) of the numbers of recomputed layers that are tried, [n]; -1 for an empty one."""
    full = layouts.recomputes_layers
    every = np.where(full, ALL_LAYERS, 0)
    yield every, every
    framework = framework_of_stack(workload.framework)
    if framework.recompute_amount is None or not full.any():
        return
    shortest = workload.model.layers // (np.asarray(layouts.pp) * np.asarray(layouts.vpp))
    low = np.asarray(layouts.recompute_layers)
    step = np.maximum(-(-(shortest - low + 1) // _RECOMPUTE_RANGES), 1)
    for _ in range(_RECOMPUTE_RANGES):
        remaining = full & (low <= shortest)
        if remaining.any():
            high = np.minimum(low + step - 1, shortest)
            yield np.where(remaining, low, -1), np.where(remaining, high, -1)
        low = low + step
