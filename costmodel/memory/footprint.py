"""HBM of each pipeline rank, by component. Bytes unless said.

States, activations and buffers are counted in `states`, `activations` and `transients`; this module puts them
together per rank. `split_bounds` bounds them over all splits of the layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Layout
from meshwright.costmodel.memory.activations import (
    SavedActivations,
    offloaded_per_layer,
    rank_tokens,
    saved_activations,
    sequence_shards,
)
from meshwright.costmodel.memory.offloaded_activations import offloads_any
from meshwright.costmodel.memory.profile import memory_profile
from meshwright.costmodel.memory.states import (
    layer_parameters_on_gpu,
    offloaded_bytes,
    optimizer_shards,
    rank_parameters,
    state_bytes,
    state_bytes_per_parameter,
    v_shaped,
)
from meshwright.costmodel.memory.transients import transients, workspace_bytes
from meshwright.costmodel.pipeline.schedules import in_flight, last_rank, on_both_ranks
from meshwright.costmodel.pipeline.split import Stages, layer_counts, recomputed_layers
from meshwright.costmodel.workload import Workload

GIB = float(2**30)

CONTEXT_GIB = 1.5
"""CUDA context and kernels, outside the framework's allocator: 1,573 MiB on an A100 (bigscience-workshop/
bigscience, tr11-176B-ml/chronicles-prequel.md)."""
ALLOCATOR_SHARE = 0.94
"""Of HBM that an allocator can fill: a caching allocator strands some in fragments, and steps slow down by 12
to 28 % when it runs out and has to flush (measured runs at over 92 % of HBM)."""
_COMMUNICATOR_GIB = 0.25
"""Buffers of one NCCL communicator: 24 channels x 2 neighbours x 5.6 MiB of its three protocols
(NCCL_BUFFSIZE, default 4 MiB for one of them)."""


def stage_memory_parts_gib(
    workload: Workload, layout: Layout, stages: Stages
) -> dict[str, NDArray[np.float64]]:
    """Peak memory of each pipeline rank by component.

    The loss of the last rank and a layer's way back do not meet: `logits` is the first, `work` what the
    second needs beyond it.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    dict of str to array of float, shape [pp]
        GiB; docs/cost_model.md, "Memory", has every component with its source.
    """
    pp = len(stages)
    saved = saved_activations(workload, layout)
    extra = transients(workload, layout, saved)
    rank = np.arange(pp)
    ends = np.stack([rank == 0, rank == last_rank(layout.schedule, pp)]).astype(np.float64)
    first, last = (on_both_ranks(end, layout.schedule) > 0 for end in ends)
    tables = _tables_on_rank(workload, first, last)
    logits = np.where(last, extra.loss_last, 0.0)
    head_input = np.where(last, extra.head_input_last, 0.0)
    work = np.maximum(extra.layer, np.where(first, extra.embedding_first, 0.0))
    buffers = extra.gathered + tables * extra.gathered_table
    buffers = buffers + np.where(first, extra.gathered_leading_first, 0.0) + extra.bucket
    parts: dict[str, object] = {
        **_states(workload, layout, stages),
        "activations": _in_all_micro_batches(workload, layout, stages, saved) + head_input,
        "logits": logits,
        "work": np.maximum(work - logits, 0.0),
        "buffers": buffers,
        "fragmentation": extra.stranded + np.minimum(tables, 1) * extra.stranded_table,
        "workspace": workspace_bytes(workload),
    }
    return {name: np.broadcast_to(np.asarray(part) / GIB, (pp,)) for name, part in parts.items()}


def _tables_on_rank(
    workload: Workload, first: NDArray[np.bool_], last: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Token tables and heads on each rank; a tied one is there once where both ends are."""
    at_both = 1.0 if workload.model.tied_embeddings else 2.0
    tables = np.where(first & last, at_both, 1.0)
    return np.asarray(np.where(first | last, tables, 0.0))


def _states(workload: Workload, layout: Layout, stages: Stages) -> dict[str, Floats]:
    """Weights, gradients and optimizer states of every rank."""
    dense, expert = rank_parameters(workload.model, layout, stages)
    dense_shards, expert_shards = optimizer_shards(layout)
    of_dense = state_bytes(workload, layout, dense_shards)
    of_expert = state_bytes(workload, layout, expert_shards)
    names = ("weights", "gradients", "optimizer")
    return {
        name: dense * np.asarray(of_dense[k]) + expert * np.asarray(of_expert[k])
        for k, name in enumerate(names)
    }


def offloaded_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """What one GPU of each pipeline rank keeps in the host's memory.

    Parameters
    ----------
    workload : Workload
        Model and optimizer.
    layout : Layout
        One layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [pp]
        GiB; `states.offloaded_bytes` and `offloaded_activations` have the sources.
    """
    states_gib = offloaded_states_gib(workload, layout, stages)
    if not offloads_any(workload):
        return states_gib
    return states_gib + _offloaded_activations(workload, layout, stages) / GIB


def offloaded_states_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """What one GPU of each pipeline rank keeps there of parameters, gradients and optimizer states.

    Parameters
    ----------
    workload : Workload
        Model and optimizer.
    layout : Layout
        One layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [pp]
        GiB; `states.offloaded_bytes` has the sources.
    """
    dense, expert = rank_parameters(workload.model, layout, stages)
    of_dense, of_expert = (
        offloaded_bytes(workload, layout, shards) for shards in optimizer_shards(layout)
    )
    together = dense * of_dense + expert * of_expert
    return np.broadcast_to(np.asarray(together / GIB), (len(stages),))


def _offloaded_activations(
    workload: Workload, layout: Layout, stages: Stages
) -> NDArray[np.float64]:
    """Bytes of activations that the host keeps for one GPU of every rank, of all micro-batches in flight."""
    model = workload.model
    dense, main = (
        offloaded_per_layer(workload, layout, model.blocks_of(experts=experts)).copied
        for experts in (False, model.moe is not None)
    )
    copied = SavedActivations((dense, 0.0), (main, 0.0))
    return _in_all_micro_batches(workload, layout, stages, copied)


def _in_all_micro_batches(
    workload: Workload, layout: Layout, stages: Stages, layer: SavedActivations
) -> NDArray[np.float64]:
    """Saved activations of every rank, of all its micro-batches in flight."""
    model, rank = workload.model, np.arange(len(stages))
    counts = layer_counts(
        model.dense_layers, stages, recomputed_layers(layout), v_shaped=v_shaped(layout)
    )
    (dense, dense_full), (main, main_full) = layer.dense, layer.main
    last = rank == last_rank(layout.schedule, len(stages))
    saved = counts.dense * dense + counts.dense_recomputed * (dense_full - dense)
    saved = saved + counts.moe * main + counts.moe_recomputed * (main_full - main)
    saved = saved + np.where(last, model.mtp_layers * main, 0.0)
    if memory_profile(workload.framework).keeps_stage_outputs and len(stages) > 1:
        sent = 2.0 * rank_tokens(workload, layout) * model.hidden / sequence_shards(layout)
        saved = saved + np.where(last, 0.0, sent)
    saved = on_both_ranks(np.asarray(saved), layout.schedule)
    return np.asarray(saved * np.asarray(in_flight(layout, rank)))


def stage_memory_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """Peak memory of each pipeline rank.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [pp]
        GiB, the sum of `stage_memory_parts_gib`.
    """
    parts = stage_memory_parts_gib(workload, layout, stages)
    return np.asarray(np.sum(list(parts.values()), axis=0), dtype=np.float64)


def usable_hbm_gib(workload: Workload) -> float:
    """What `stage_memory_gib` may reach on one GPU: HBM less fragments, context and the user's reserve, over
    the margin for the error of the prediction.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Its device, reserve and margin are used.

    Returns
    -------
    float
        GiB.
    """
    room_gib = workload.cluster.device.hbm_gib * ALLOCATOR_SHARE - CONTEXT_GIB
    return (room_gib - workload.reserve_gib) / workload.memory_margin


def hbm_gib_for(workload: Workload, usable_gib: float) -> float:
    """The HBM of a GPU on which `usable_hbm_gib` is a given amount.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Its reserve and margin are used.
    usable_gib : float
        GiB, at least 0.

    Returns
    -------
    float
        GiB.
    """
    room_gib = usable_gib * workload.memory_margin
    return (room_gib + CONTEXT_GIB + workload.reserve_gib) / ALLOCATOR_SHARE


def context_gib(layout: Layout) -> Floats:
    """What the driver shows beside the allocator's blocks.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        GiB of the context, and of a communicator of the world and of each axis with more than one rank.
    """
    axes = (layout.tp, layout.pp, np.asarray(layout.dp) * np.asarray(layout.cp), layout.ep)
    groups = 1 + sum((np.asarray(size) > 1).astype(np.int64) for size in axes)
    gib: Floats = CONTEXT_GIB + _COMMUNICATOR_GIB * np.asarray(groups)
    return gib


class LayerBytes(NamedTuple):
    """Bytes of one layer on one GPU, arrays in the shape of the layouts."""

    states: NDArray[np.float64]
    """Weights, gradients and optimizer states of a main layer."""
    saved: NDArray[np.float64]
    """Activations of one micro-batch as the layout saves them."""
    dropped: NDArray[np.float64]
    """Activations of one micro-batch when the layer is recomputed in full."""
    leading_states: NDArray[np.float64]
    """The same of a leading dense layer of a mixture-of-experts model; else of the main layer."""
    leading_saved: NDArray[np.float64]
    leading_dropped: NDArray[np.float64]

    def rows(self, index: NDArray[np.intp]) -> LayerBytes:
        """The bytes for some layouts.

        Parameters
        ----------
        index : array of int
            Positions of layouts.

        Returns
        -------
        LayerBytes
            Arrays shaped like `index`.
        """
        return LayerBytes(*(values[index] for values in self))


def layer_bytes(workload: Workload, layout: Layout, saved: SavedActivations) -> LayerBytes:
    """Bytes of one main layer, and of one leading dense layer.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many of shape [n].
    saved : SavedActivations
        From `saved_activations` of the same layouts.

    Returns
    -------
    LayerBytes
        `state_bytes` and `activation_bytes_per_layer` have the sources.
    """
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    dense_shards, expert_shards = optimizer_shards(layout)
    per_dense = state_bytes_per_parameter(workload, layout, dense_shards)
    leading = (dense * per_dense, *saved.dense)
    main = leading
    if model.moe_layers:
        per_expert = state_bytes_per_parameter(workload, layout, expert_shards)
        states = rest * per_dense + experts * per_expert
        main = (states, *saved.main)
    shape = layout.broadcast_shape()
    return LayerBytes(
        *(np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (*main, *leading))
    )
