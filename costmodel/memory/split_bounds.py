"""Bounds on the memory of pipeline ranks over all splits of the layers, for many layouts at once.

docs/cost_model.md, "Memory", has the sources of what is summed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.memory.activations import SavedActivations, saved_activations
from meshwright.costmodel.memory.footprint import GIB, LayerBytes, layer_bytes
from meshwright.costmodel.memory.states import (
    end_parameters,
    optimizer_shards,
    state_bytes_per_parameter,
)
from meshwright.costmodel.memory.transients import transients, workspace_bytes
from meshwright.costmodel.pipeline.schedules import Schedule, in_flight, last_rank
from meshwright.costmodel.workload import Workload

_OF_PIPELINE = ("pp", "vpp", "num_micro_batches", "schedule")
"""What of a layout decides how many micro-batches a rank holds activations of."""
ROUNDING = 1e-9
"""What bounds leave for sums in another order."""


def peak_memory_gib(workload: Workload, layout: Layout) -> Floats:
    """Least peak over ranks that any split of the layers could have.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many.

    Returns
    -------
    float or array
        GiB, shaped like the layout.
    """
    recomputed_layers = np.asarray(layout.flat().recompute_layers)
    peak = peak_bounds(workload, layout).peak_gib(recomputed_layers)
    return np.asarray(peak).reshape(layout.broadcast_shape())


class PeakBounds(NamedTuple):
    """The least peak of some layouts over all splits, as a function of how many layers they recompute.

    The peak is at least any weighted mean of what the ranks hold. With weights in proportion to 1 / B_r, B_r
    bytes of a main layer on rank r, that mean is (main layers + leading ones times min_r C_r / B_r + sum_r
    E_r / B_r) over sum_r 1 / B_r, C_r bytes of a leading dense layer, E_r those of token table, head and MTP
    modules. It holds with every layer recomputed, and with every layer kept, less what the recomputed layers
    of each rank save; the larger of the two counts. Arrays of shape [n].
    """

    kept: NDArray[np.float64]
    """Bytes with every layer kept."""
    relief: NDArray[np.float64]
    """What a recomputed layer of a virtual stage takes off `kept`; 0 without full recomputation."""
    recomputed: NDArray[np.float64]
    """Bytes with every layer recomputed."""
    everywhere: NDArray[np.float64]
    """Bytes beside the layers, on every rank."""

    def peak_gib(self, recomputed_layers: NDArray[np.int64]) -> NDArray[np.float64]:
        """The least peak with so many layers recomputed.

        docs/cost_model.md, "Memory", has the sources.

        Parameters
        ----------
        recomputed_layers : array of int, shape [n]
            Of each virtual stage; more than it has means all.

        Returns
        -------
        array of float, shape [n]
            GiB.
        """
        kept = self.kept - self.relief * recomputed_layers
        peak = np.maximum(np.maximum(kept, self.recomputed), 0.0)
        return np.asarray((peak + self.everywhere) * (1 - ROUNDING) / GIB)

    def rows(self, index: NDArray[np.int64]) -> PeakBounds:
        """Those of some of the layouts.

        Parameters
        ----------
        index : array of int, shape [m]
            Which layouts, 0 to n - 1.

        Returns
        -------
        PeakBounds
            Arrays of shape [m].
        """
        return PeakBounds(*(values[index] for values in self))


def peak_bounds(workload: Workload, layout: Layout) -> PeakBounds:
    """Bounds on the peak of layouts whose recomputed layers are open.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many; n in all.

    Returns
    -------
    PeakBounds
        In bytes.
    """
    layout = layout.flat()
    saved = saved_activations(workload, layout)
    layer = layer_bytes(workload, layout, saved)
    beside = _beside_layers(workload, layout, saved)
    pp = np.asarray(layout.pp)
    pipelines = Layout(**{name: np.asarray(getattr(layout, name)) for name in _OF_PIPELINE})
    kept, relief, recomputed = np.empty(pp.shape), np.empty(pp.shape), np.empty(pp.shape)
    for degree in np.unique(pp):
        rows = np.flatnonzero(pp == degree)
        flying = np.asarray(in_flight(pipelines.take(rows).with_axis(), np.arange(degree)))
        ends = np.zeros(flying.shape)
        ends[:, 0] += beside.first[rows]
        ends[:, -1] += beside.last[rows]
        held = _HeldByRanks(layer.rows(rows), flying, ends)
        kept[rows], relief[rows], recomputed[rows] = _least_peaks(workload, held)
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    relief = np.where(full, relief * layout.vpp, 0.0)
    return PeakBounds(kept, relief, recomputed, beside.everywhere)


class _HeldByRanks(NamedTuple):
    """What the ranks of layouts of one pp hold unequally, bytes."""

    layer: LayerBytes
    """Arrays [n]."""
    flying: NDArray[np.float64]
    """Micro-batches in flight, [n, pp]."""
    ends: NDArray[np.float64]
    """Token table, head and MTP modules, [n, pp]."""


def _least_peaks(workload: Workload, held: _HeldByRanks) -> tuple[NDArray[np.float64], ...]:
    """`kept`, `relief` of a recomputed layer of a rank, and `recomputed` of layouts of one pp."""
    layer, flying, _ = held
    relief = layer.saved - layer.dropped
    if workload.model.moe_layers and workload.model.dense_layers:
        relief = np.maximum(relief, layer.leading_saved - layer.leading_dropped)
    kept, weight = _mean_held(workload, held, layer.saved, layer.leading_saved)
    relief = relief * np.sum(flying * weight, axis=1)
    recomputed, _ = _mean_held(workload, held, layer.dropped, layer.leading_dropped)
    return kept, relief, recomputed


def _mean_held(
    workload: Workload,
    held: _HeldByRanks,
    saved: NDArray[np.float64],
    leading_saved: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weighted mean of what ranks hold, [n], and its weights, [n, pp], which sum to 1."""
    layer, flying, ends = held
    model = workload.model
    leading = model.dense_layers if model.moe_layers else 0
    weight = 1.0 / (layer.states[:, None] + saved[:, None] * flying)
    weight_sum = np.sum(weight, axis=1)
    layers = model.layers - leading + np.sum(ends * weight, axis=1)
    if leading:
        of_leading = layer.leading_states[:, None] + leading_saved[:, None] * flying
        layers = layers + leading * np.min(of_leading * weight, axis=1)
    return layers / weight_sum, weight / weight_sum[:, None]


class _BesideLayers(NamedTuple):
    """Bytes on one GPU beside states and saved activations of its layers, arrays of shape [n]."""

    everywhere: NDArray[np.float64]
    first: NDArray[np.float64]
    """More on rank 0; where that rank has the head too, all that the ends hold."""
    last: NDArray[np.float64]
    """More on rank pp - 1."""


def _beside_layers(workload: Workload, layout: Layout, saved: SavedActivations) -> _BesideLayers:
    """What `stage_memory_parts_gib` counts beside layers. Of DualPipe, whose ranks hold two stages, without
    the ends.
    """
    extra = transients(workload, layout, saved)
    everywhere = extra.gathered + extra.layer + extra.bucket + extra.stranded
    head_rank = last_rank(layout.schedule, layout.pp)
    both = np.asarray(head_rank) == 0
    first, last, experts = end_parameters(workload.model, layout)
    dense_shards, expert_shards = optimizer_shards(layout)
    per_dense = state_bytes_per_parameter(workload, layout, dense_shards)
    per_expert = state_bytes_per_parameter(workload, layout, expert_shards)
    mtp_saved = workload.model.mtp_layers * saved.main[0] * in_flight(layout, head_rank)
    at_table = first * per_dense + extra.gathered_leading_first
    at_head = last * per_dense + experts * per_expert + mtp_saved + extra.head_input_last
    table_work = np.maximum(extra.embedding_first - extra.layer, 0.0)
    head_work = np.maximum(extra.loss_last - extra.layer, 0.0)
    beside_table = extra.gathered_table + extra.stranded_table
    other_table = 0.0 if workload.model.tied_embeddings else 1.0
    at_both = at_table + at_head + beside_table + other_table * extra.gathered_table
    at_both = at_both + np.maximum(table_work, head_work)
    plain = np.where(np.asarray(layout.schedule) == Schedule.DUALPIPE, 0.0, 1.0)
    ends = (
        plain * np.where(both, at_both, at_table + beside_table + table_work),
        plain * np.where(both, 0.0, at_head + beside_table + head_work),
    )
    shape = layout.broadcast_shape()
    rows = (everywhere + workspace_bytes(workload), *ends)
    return _BesideLayers(*(np.broadcast_to(np.asarray(row), shape) for row in rows))


def main_layer_rooms(workload: Workload, layout: Layout, limit_gib: float) -> NDArray[np.float64]:
    """Never fewer main layers than each pipeline rank can hold within a limit.

    Leading dense layers are left out, so there may be less room.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        Layouts of shape [n].
    limit_gib : float
        What a rank may hold, GiB, above 0.

    Returns
    -------
    array of float, shape [n, most pp]
        Layers; ranks beyond a layout's pp hold none.
    """
    saved = saved_activations(workload, layout)
    layer = layer_bytes(workload, layout, saved)
    shape = layer.states.shape
    pp = np.broadcast_to(np.asarray(layout.pp), shape)[:, None]
    vpp = np.broadcast_to(np.asarray(layout.vpp), shape)[:, None]
    ranks = np.arange(int(pp.max(initial=1)))
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    per_stage = np.broadcast_to(np.where(full, layout.recompute_layers, 0), shape)
    recomputed = per_stage[:, None] * vpp
    beside = _beside_layers(workload, layout, saved)
    fixed = np.broadcast_to(beside.everywhere[:, None], (*shape, len(ranks))).copy()
    fixed[:, 0] += beside.first
    fixed[ranks == pp - 1] += beside.last
    flying = np.asarray(in_flight(layout.with_axis(), ranks))
    flying = np.broadcast_to(flying, (*shape, len(ranks)))
    room = limit_gib * GIB - fixed * (1 - ROUNDING)
    smaller = np.minimum(layer.dropped, layer.saved)
    # A layer without a byte on the GPU, as where everything is offloaded, is taken to have one.
    small = np.maximum(layer.states[:, None] + smaller[:, None] * flying, 1.0)
    large = np.maximum(layer.states[:, None] + layer.saved[:, None] * flying, 1.0)
    beyond = recomputed + (room - recomputed * small) / large
    layers = np.where(room < recomputed * small, room / small, beyond)
    layers = np.floor(np.maximum(layers, 0.0) * (1 + ROUNDING))
    return np.asarray(np.where(ranks < pp, layers, 0.0))
