"""HBM of each pipeline rank, by component. Bytes unless said.

States, activations and buffers are counted in `states.py`, `activations.py` and `buffers.py`; this module
puts them together per rank, and bounds them over all splits of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.activations import (
    SavedActivations,
    offloaded_per_layer,
    offloads_any,
    offloads_inputs,
    saved_activations,
    saved_of_kinds,
)
from meshwright.costmodel.adapters import frozen
from meshwright.costmodel.buffers import Transients, transients, workspace_bytes
from meshwright.costmodel.image_encoder import encoder_of, encoder_saved_bytes
from meshwright.costmodel.layout import ROUNDING, Floats, Layout, in_shape
from meshwright.costmodel.optimizers import keeps_more_of_tables
from meshwright.costmodel.rank_load import (
    Stages,
    byte_counts,
    counts_between,
    counts_in_order,
    recomputed_layers,
)
from meshwright.costmodel.schedules import (
    Schedule,
    first_chunk_excess,
    in_flight,
    is_v_shaped,
    last_rank,
    least_in_flight,
    on_both_ranks,
)
from meshwright.costmodel.stacks import memory_profile
from meshwright.costmodel.states import (
    encoder_parameters_on_gpu,
    end_parameters,
    frozen_encoder_bytes,
    kind_parameters_on_gpu,
    layer_parameters_on_gpu,
    offloaded_bytes,
    optimizer_shards,
    rank_parameters,
    state_bytes,
    state_bytes_per_parameter,
    table_excess,
    table_parameters,
)
from meshwright.costmodel.workload import Workload, rank_tokens, sequence_shards

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
    second needs beyond it. Of gradients that come as activations go, `gradients` are those beside both, and
    the blocks of the others `fragmentation`.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout; or several with one pipeline, fields of shape [n, 1] but for ranks, virtual stages,
        schedule and recomputed layers, which are one number each.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    dict of str to array of float, shape [pp] or [n, pp]
        GiB, at least 0; docs/cost_model.md, "Memory", has every component with its source.
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
    buffers = buffers + _beside_passes(workload, layout, rank)
    states = _states(workload, layout, stages)
    kinds = saved_of_kinds(workload, layout) or (saved.dense, saved.main)
    activations = _in_all_micro_batches(workload, layout, stages, kinds, saved.module)
    activations = activations + head_input
    stranded = extra.stranded + np.minimum(tables, 1) * extra.stranded_table
    arrive = _gradients_arrive(workload, layout)
    if np.any(arrive):
        made = np.asarray(states["gradients"])
        at_peak = _gradients_at_peak(made, activations, _moments(workload, layout, extra, saved))
        met = np.where(arrive, at_peak, made)
        states["gradients"], stranded = met, stranded + made - met
    parts: dict[str, object] = {
        **states,
        "activations": activations,
        "logits": logits,
        "work": np.maximum(work - logits, 0.0),
        "buffers": buffers,
        "fragmentation": stranded,
        "workspace": workspace_bytes(workload),
    }
    if encoder_of(workload) is not None:
        parts["image_encoder"] = _encoder_in_all_micro_batches(workload, layout, rank)
    shape = np.broadcast_shapes((pp,), layout.broadcast_shape())
    return {name: np.broadcast_to(np.asarray(part) / GIB, shape) for name, part in parts.items()}


def _gradients_arrive(workload: Workload, layout: Layout) -> NDArray[np.bool_]:
    """Whether a step begins without gradients, and its only backward pass makes them.

    One rank has all layers, and one micro-batch. Under FSDP a layer's shard of gradients is made after its
    backward pass, and `zero_grad` frees it (torch 2.13, optim/optimizer.py, set_to_none); its block stays
    with the stream that reduced it (fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce), of no use to
    activations. Replicas that hold all states have buckets of the gradients' size from the first step on
    (torch/csrc/distributed/c10d/reducer.cpp, initialize_buckets).
    """
    once = (np.asarray(layout.pp) == 1) & (np.asarray(layout.num_micro_batches) == 1)
    alone = np.asarray(layout.dp) * np.asarray(layout.cp) == 1
    come = once & ((np.asarray(layout.zero_stage) >= 2) | alone)
    return np.asarray(come & memory_profile(workload.framework).gradients_arrive)


class _Moments(NamedTuple):
    """What one rank with all layers holds at moments of a backward pass, bytes."""

    largest: Floats
    """The larger of loss and work, beside all activations."""
    work: Floats
    """Of one layer's way back, or of the token table's."""
    last: Floats
    """Of the first layer, whose backward pass is the last, or of the token table: activations and work."""
    head_gradient: Floats
    """Of the head, before a layer's backward pass begins."""


def _moments(
    workload: Workload, layout: Layout, extra: Transients, saved: SavedActivations
) -> _Moments:
    table = np.asarray(table_parameters(workload.model, layout))
    kept, dropped = saved.dense if workload.model.dense_layers else saved.main
    work = np.maximum(extra.layer, extra.embedding_first)
    trained = 0.0 if frozen(workload) else 1.0
    of_table = 2.0 * table * trained
    _, reduced, _ = state_bytes(workload, layout, optimizer_shards(layout)[0])
    return _Moments(
        largest=np.maximum(extra.loss_last, work),
        work=work,
        last=np.maximum(np.where(layout.recomputes_layers, dropped, kept) + work, of_table),
        head_gradient=np.maximum(of_table, np.asarray(reduced) * table * trained),
    )


def _gradients_at_peak(gradients: Floats, activations: Floats, moments: _Moments) -> Floats:
    """Gradients that lie beside all activations and the larger of loss and work at the peak.

    They come as activations go, layer by layer, so that memory is linear in the layers that are behind, and
    largest at an end: at the loss, without any; at the last layer, with the head's; or at the first, with all
    of them beside one layer.
    """
    at_head = moments.head_gradient + moments.work - moments.largest
    at_end = gradients + moments.last - activations - moments.largest
    met: Floats = np.clip(np.maximum(at_head, at_end), 0.0, gradients)
    return met


def _encoder_in_all_micro_batches(
    workload: Workload, layout: Layout, rank: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What every rank holds of the image encoder: states, and activations of all micro-batches in flight."""
    held = np.asarray(frozen_encoder_bytes(workload, layout))
    found = encoder_of(workload)
    if found is not None and found[1].trained:
        each = state_bytes_per_parameter(workload, layout, optimizer_shards(layout)[0])
        held = np.asarray(each) * encoder_parameters_on_gpu(found[0], layout)
    saved = np.asarray(encoder_saved_bytes(workload, layout))
    of_first = held + saved * np.asarray(in_flight(layout, rank))
    return np.asarray(on_both_ranks(np.where(rank == 0, of_first, 0.0), layout.schedule))


def _tables_on_rank(
    workload: Workload, first: NDArray[np.bool_], last: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Token tables and heads on each rank; a tied one is there once where both ends are."""
    at_both = 1.0 if workload.model.tied_embeddings else 2.0
    tables = np.where(first & last, at_both, 1.0)
    return np.asarray(np.where(first | last, tables, 0.0))


def _states(workload: Workload, layout: Layout, stages: Stages) -> dict[str, Floats]:
    """Weights, gradients and optimizer states of every rank, without those of an image encoder."""
    language = workload.model
    if language.vision is not None:
        language = language.model_copy(update={"vision": None})
    dense, expert = rank_parameters(language, layout, stages)
    dense_shards, expert_shards = optimizer_shards(layout)
    of_dense = state_bytes(workload, layout, dense_shards)
    of_expert = state_bytes(workload, layout, expert_shards, experts=True)
    names = ("weights", "gradients", "optimizer")
    parts = {
        name: dense * np.asarray(of_dense[k]) + expert * np.asarray(of_expert[k])
        for k, name in enumerate(names)
    }
    if keeps_more_of_tables(workload):
        rank = np.arange(len(stages))
        on_last = rank == last_rank(layout.schedule, len(stages))
        at_table, at_head = table_excess(workload, layout)
        excess = np.where(rank == 0, at_table, 0.0) + np.where(on_last, at_head, 0.0)
        parts["optimizer"] = parts["optimizer"] + on_both_ranks(excess, layout.schedule)
    return parts


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
        GiB, at least 0; `states.offloaded_bytes` and `activations.offloaded_per_layer` have the sources.
    """
    states_gib = offloaded_states_gib(workload, layout, stages)
    if not offloads_any(workload):
        return states_gib
    return states_gib + _offloaded_activations(workload, layout, stages) / GIB


def offloaded_states_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """What one GPU of each pipeline rank keeps in the host's memory of parameters, gradients and states.

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
        GiB, at least 0; `states.offloaded_bytes` has the sources.
    """
    dense, expert = rank_parameters(workload.model, layout, stages)
    dense_shards, expert_shards = optimizer_shards(layout)
    of_dense, of_expert = offloaded_bytes(workload, layout)
    trained = workload.trained_shares
    updated = dense / dense_shards * trained[0] + expert / expert_shards * trained[1]
    together = dense * of_dense + expert * of_expert + _drive_buffers(workload, updated)
    return np.broadcast_to(np.asarray(together / GIB), (len(stages),))


_SUB_GROUP, _STATE_BUFFERS, _WEIGHT_BUFFER_BYTES = 1e9, 4.0 * 4.0, 5.0 * 2.0 * 1e8
"""Parameters that DeepSpeed updates at a time; bytes of each in four fp32 buffers (weight, gradient and two
moments); and five buffers of 1e8 16-bit weights (DeepSpeed 0.19.8, runtime/zero/config.py, sub_group_size;
offload_config.py, buffer_count and buffer_size)."""


def _drive_buffers(workload: Workload, updated: Floats) -> Floats:
    """Bytes of the host's memory through which states and shards of a rank pass to its drives.

    `updated` are the parameters whose states are its own.
    """
    states = _STATE_BUFFERS * np.minimum(updated, _SUB_GROUP) * workload.optimizer_on_drives
    return states + _WEIGHT_BUFFER_BYTES * workload.parameters_on_drives


def _offloaded_activations(
    workload: Workload, layout: Layout, stages: Stages
) -> NDArray[np.float64]:
    """Bytes of activations that the host keeps for one GPU of every rank, of all micro-batches in flight."""
    model = workload.model
    kinds = [model.kind_of(symbols).blocks for symbols in dict.fromkeys(model.unlike_bytes)]
    if not kinds:
        kinds = [model.blocks_of(experts=False), model.blocks_of(experts=model.moe is not None)]
    each = [offloaded_per_layer(workload, layout, blocks).copied for blocks in kinds]
    copied: list[tuple[Floats, Floats]] = [(bytes_copied, 0.0) for bytes_copied in each]
    if offloads_inputs(workload):
        copied = [(0.0, bytes_copied) for bytes_copied in each]
    blocks = model.mtp_kind.blocks if model.mtp_differs else model.blocks
    of_module = offloaded_per_layer(workload, layout, blocks).copied
    of_module = 0.0 if offloads_inputs(workload) else of_module
    return _in_all_micro_batches(workload, layout, stages, copied, of_module)


def _in_all_micro_batches(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    kinds: Sequence[tuple[Floats, Floats]],
    of_module: Floats,
) -> NDArray[np.float64]:
    """Saved activations of every rank, of all its micro-batches in flight.

    `kinds` has bytes of a layer of each kind, kept and recomputed in full, `of_module` of an MTP module.
    """
    model, rank = workload.model, np.arange(len(stages))
    last = rank == last_rank(layout.schedule, len(stages))
    saved: Floats = np.where(last, model.mtp_layers * of_module, 0.0)
    saved = saved + _saved_by_layers(workload, layout, stages, kinds)
    if memory_profile(workload.framework).keeps_stage_outputs != "none" and len(stages) > 1:
        saved = saved + _handed_over(workload, layout) * (np.asarray(layout.vpp) - last)
    saved = on_both_ranks(np.asarray(saved), layout.schedule)
    in_all = np.asarray(saved * np.asarray(in_flight(layout, rank)))
    first, *others = stages[0]
    if not np.any(first_chunk_excess(layout)) or (set(others) == {first} and _alike(workload)):
        return in_all
    of_rank = _saved_by_layers(workload, layout, stages, kinds)[..., :1]
    of_first = _in_first_chunk(workload, layout, stages, kinds)
    # The mean of `in_flight` spreads what the first virtual stage has beyond the others over all of them.
    beyond = of_first - np.asarray(first_chunk_excess(layout) / layout.vpp * of_rank)
    return np.asarray(in_all + np.where(rank == 0, beyond, 0.0))


def _handed_over(workload: Workload, layout: Layout) -> Floats:
    """Bytes of a micro-batch from one stage to the next."""
    handed: Floats = (
        2.0 * rank_tokens(workload, layout) * workload.model.hidden / sequence_shards(layout)
    )
    return handed


def _beside_passes(
    workload: Workload, layout: Layout, rank: NDArray[np.int64]
) -> NDArray[np.float64] | float:
    """What ranks of a pipeline hold of micro-batches that are not in flight, when steady passes end.

    PyTorch has a buffer for everything that a stage receives in a step. Those of activations in flight are
    counted with what the layers save. The gradients that it sent stay beside them
    (`memory.yaml` has the sources). What stages of one rank hand over to each other counts the same.
    """
    profile, pp = memory_profile(workload.framework), len(rank)
    if pp == 1 or not profile.receives_apart:
        return 0.0
    first, last = rank == 0, rank == last_rank(layout.schedule, pp)
    vpp, number = np.asarray(layout.vpp), np.asarray(layout.num_micro_batches)
    done = np.maximum(number - np.asarray(in_flight(layout, rank)), 0.0)
    handed = _handed_over(workload, layout)
    held = handed * (2.0 * (vpp - first) * done + (vpp - last) * number)
    if profile.keeps_stage_outputs == "step":
        logits = 2.0 * rank_tokens(workload, layout) * workload.model.vocab / np.asarray(layout.tp)
        held = held + handed * (vpp - last) * done + np.where(last, logits * (number - 1), 0.0)
    return np.asarray(on_both_ranks(held, layout.schedule))


def _alike(workload: Workload) -> bool:
    """Whether all layers hold equal bytes."""
    model = workload.model
    return not model.unlike_bytes and not (model.dense_layers and model.moe_layers)


def _saved_by_layers(
    workload: Workload, layout: Layout, stages: Stages, kinds: Sequence[tuple[Floats, Floats]]
) -> NDArray[np.float64]:
    """Activations of one micro-batch that the layers of every rank save."""
    model, v_shaped = workload.model, is_v_shaped(layout)
    counts = byte_counts(model, stages, recomputed_layers(layout), v_shaped=v_shaped)
    saved: Floats = 0.0
    for (saved_bytes, dropped_bytes), (number, recomputed) in zip(kinds, counts, strict=True):
        saved = saved + number * saved_bytes + recomputed * (dropped_bytes - saved_bytes)
    return np.asarray(saved)


def _in_first_chunk(
    workload: Workload, layout: Layout, stages: Stages, kinds: Sequence[tuple[Floats, Floats]]
) -> NDArray[np.float64]:
    """What the first virtual stage of rank 0 saves of the micro-batches that it alone has in flight."""
    first = stages[0][0]
    # Of two made-up ranks the first has that stage alone.
    alone = ((first,), (workload.model.layers - first,))
    saved = _saved_by_layers(workload, layout, alone, kinds)[..., :1]
    return np.asarray(first_chunk_excess(layout) * saved)


def first_chunk_gib(workload: Workload, layout: Layout, stages: Stages) -> float:
    """What a rank holds beyond `schedules.least_in_flight` of its layers' activations: rank 0, one layout.

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
    float
        GiB, at least 0; 0 where ranks do not interleave virtual stages.
    """
    if not np.any(first_chunk_excess(layout)):
        return 0.0
    saved = saved_activations(workload, layout)
    kinds = saved_of_kinds(workload, layout) or (saved.dense, saved.main)
    return float(np.sum(_in_first_chunk(workload, layout, stages, kinds))) / GIB


def stage_memory_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """Peak memory of each pipeline rank: the sum of `stage_memory_parts_gib`, which has the sources.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or several with one pipeline, as `stage_memory_parts_gib` takes them.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [pp] or [n, pp]
        GiB, above 0.
    """
    parts = stage_memory_parts_gib(workload, layout, stages)
    return np.asarray(np.sum(list(parts.values()), axis=0), dtype=np.float64)


_ANY_RATES = {"nvlink_gb_per_s": 1.0, "nic_gbps_per_gpu": 1.0}
"""Rates of a cluster that no byte depends on."""
_ANY_DEVICE_RATES = {
    "peak_bf16_tflops": 1.0,
    "peak_fp16_tflops": 1.0,
    "peak_fp8_tflops": 1.0,
    "peak_fp4_tflops": 1.0,
    "hbm_gb_per_s": 1.0,
}
"""The same of a device."""


def as_memory_sees(workload: Workload) -> Workload:
    """A workload that stands for all that need the same memory: rates and what only hides traffic left out.

    Overlapped tensor parallelism matters where a forward pass leaves the gathered input's blocks behind
    (`buffers.transients`); the overlap of expert parallelism nowhere.

    Parameters
    ----------
    workload : Workload
        Any.

    Returns
    -------
    Workload
        Its layouts need as many bytes as the given workload's; equal for workloads that differ in no more.
    """
    leaves_blocks = memory_profile(workload.framework).stranding == "forward"
    cluster = workload.cluster
    device = cluster.device.model_copy(update=_ANY_DEVICE_RATES)
    levels = tuple(level.model_copy(update={"oversubscription": 1.0}) for level in cluster.levels)
    cluster = cluster.model_copy(update={"device": device, "levels": levels, **_ANY_RATES})
    return replace(
        workload,
        cluster=cluster,
        ep_overlap=False,
        tp_overlap=workload.tp_overlap and leaves_blocks,
    )


def usable_hbm_gib(workload: Workload) -> float:
    """What `stage_memory_gib` may reach on one GPU: (0.94 HBM - 1.5 GiB - the user's reserve) / margin.

    `ALLOCATOR_SHARE` and `CONTEXT_GIB` have their sources (docs/cost_model.md, "Memory"); the margin is for
    the error of the prediction (`records.memory_margin`).

    Parameters
    ----------
    workload : Workload
        Its device, reserve and margin are used.

    Returns
    -------
    float
        GiB; below 0 where the reserve is larger than the HBM.
    """
    room_gib = workload.cluster.device.hbm_gib * ALLOCATOR_SHARE - CONTEXT_GIB
    return (room_gib - workload.reserve_gib) / workload.memory_margin


def hbm_gib_for(workload: Workload, usable_gib: float) -> float:
    """The HBM of a GPU on which `usable_hbm_gib` is a given amount: the inverse of that function.

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

    1.5 GiB of CUDA context and 0.25 GiB for each NCCL communicator; `CONTEXT_GIB` has its source, and
    NCCL_BUFFSIZE is NCCL's (docs/cost_model.md, "Memory").

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
    """`states` of a leading dense layer of a mixture-of-experts model; else of the main layer."""
    leading_saved: NDArray[np.float64]
    """`saved` of that layer."""
    leading_dropped: NDArray[np.float64]
    """`dropped` of that layer."""

    def rows(self, index: NDArray[np.intp]) -> LayerBytes:
        """The bytes for some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions of layouts, 0 to n - 1.

        Returns
        -------
        LayerBytes
            Arrays of shape [k].
        """
        return LayerBytes(*(values[index] for values in self))


def layer_bytes(workload: Workload, layout: Layout, saved: SavedActivations) -> LayerBytes:
    """Bytes of one main layer, and of one leading dense layer, on one GPU.

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
        Bytes; `state_bytes` and `activation_bytes_per_layer` have the sources.
    """
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    per_dense, per_expert = _bytes_per_parameter(workload, layout)
    leading = (dense * per_dense, *saved.dense)
    main = leading
    if model.moe_layers:
        states = rest * per_dense + experts * per_expert
        main = (states, *saved.main)
    shape = layout.broadcast_shape()
    return LayerBytes(
        *(in_shape(np.asarray(x, dtype=np.float64), shape) for x in (*main, *leading))
    )


def _bytes_per_parameter(workload: Workload, layout: Layout) -> tuple[Floats, Floats]:
    """States of a parameter outside experts, and of one in them, 0 in models without."""
    dense_shards, expert_shards = optimizer_shards(layout)
    of_dense = state_bytes_per_parameter(workload, layout, dense_shards)
    if workload.model.moe is None:
        return of_dense, 0.0
    return of_dense, state_bytes_per_parameter(workload, layout, expert_shards, experts=True)


class KindBytes(NamedTuple):
    """Bytes of layers of one kind on one GPU, arrays in the shape of the layouts."""

    number: int
    """How many the model has."""
    states: NDArray[np.float64]
    """Weights, gradients and optimizer states of one."""
    saved: NDArray[np.float64]
    """Activations of one, of one micro-batch, as the layout saves them."""
    dropped: NDArray[np.float64]
    """The same where the layer is recomputed in full."""

    def rows(self, index: NDArray[np.intp]) -> KindBytes:
        """The bytes for some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions of layouts, 0 to n - 1.

        Returns
        -------
        KindBytes
            Arrays of shape [k].
        """
        return KindBytes(self.number, *(values[index] for values in self[1:]))


def unlike_layer_bytes(workload: Workload, layout: Layout) -> list[KindBytes]:
    """Bytes of a layer of each kind in `ModelSpec.unlike_bytes`, which `layer_bytes` has the mean of.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    list of KindBytes
        In the order in which kinds first appear; `state_bytes` and `activation_bytes_per_layer` have the
        sources.
    """
    layers = workload.model.unlike_bytes
    per_dense, per_expert = _bytes_per_parameter(workload, layout)
    shape = layout.broadcast_shape()
    kinds = zip(
        dict.fromkeys(layers),
        kind_parameters_on_gpu(workload.model, layout),
        saved_of_kinds(workload, layout),
        strict=True,
    )
    return [
        KindBytes(
            layers.count(symbols),
            *(
                in_shape(np.asarray(x, dtype=np.float64), shape)
                for x in (dense * per_dense + experts * per_expert, *saved)
            ),
        )
        for symbols, (dense, experts), saved in kinds
    ]


@lru_cache(maxsize=256)
def fewest_of_each(layers: tuple[str, ...], parts: int) -> NDArray[np.float64]:
    """The fewest layers of each kind among so many layers that lie in some parts of a sequence.

    Derived here: in one part they are counted, in several they are at least the fewest sum over ways to share
    the layers among parts, and of a kind no more can be missing than layers are.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_bytes`).
    parts : int
        Into how many runs of neighbours the layers may fall, at least 1.

    Returns
    -------
    array of float, shape [kinds, layers + 1]
        Read-only; kinds in the order in which they first appear, for 0 layers, 1, 2, ... of all.
    """
    before = counts_in_order(layers)
    size = before.shape[1]
    in_one = np.stack(
        [np.min(before[:, n:] - before[:, : size - n], axis=1) for n in range(size)], axis=1
    )
    fewest: NDArray[np.float64] = in_one
    for _ in range(parts - 1):
        fewest = np.stack(
            [np.min(fewest[:, : n + 1] + in_one[:, n::-1], axis=1) for n in range(size)], axis=1
        )
    # No more can be missing than layers are.
    fewest = np.asarray(np.maximum(fewest, before[:, -1:] - np.arange(size)[::-1]))
    fewest.flags.writeable = False
    return fewest


def least_held(
    layers: tuple[str, ...], parts: int, of_kinds: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The least that so many layers in some parts of a sequence hold together.

    Derived here: of each kind at least `fewest_of_each`, and all others of the kind that holds least.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_bytes`).
    parts : int
        Into how many runs of neighbours the layers may fall, at least 1.
    of_kinds : sequence of array of float, shape [...]
        What a layer of each kind holds, in any unit, kinds in the order in which they first appear.

    Returns
    -------
    array of float, shape [..., layers + 1]
        In the unit of `of_kinds`, never falling, for 0 layers, 1, 2, ... of all.
    """
    fewest, of_layer = fewest_of_each(layers, parts), np.stack(of_kinds, axis=-1)
    at_the_least = np.arange(fewest.shape[1]) - fewest.sum(axis=0)
    return np.asarray(of_layer @ fewest + np.min(of_layer, axis=-1)[..., None] * at_the_least)


def least_in_parts(
    layers: tuple[str, ...],
    parts: int,
    of_kinds: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]],
    recomputed: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least states of so many layers of a rank, and the least that they save of a micro-batch.

    Derived here: they save at least the least of so many layers kept, less what each recomputed one spares at
    the most, and at least the least of them with all recomputed.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_bytes`).
    parts : int
        Virtual stages of the rank, at least 1.
    of_kinds : tuple of three arrays of float, shape [kinds, ...]
        States of a layer, what it saves, and what it saves where it is recomputed in full.
    recomputed : array of int, shape [...]
        Layers of every virtual stage that are recomputed in full, at least 0.

    Returns
    -------
    tuple of two arrays of float, shape [..., layers + 1]
        In the unit of `of_kinds`, for 0 layers, 1, 2, ... of all.
    """
    states, saved, dropped = of_kinds
    smaller = np.minimum(saved, dropped)
    fixed, as_saved, as_recomputed = (
        least_held(layers, parts, list(each)) for each in (states, saved, smaller)
    )
    most_recomputed = np.minimum(np.arange(len(layers) + 1), recomputed[..., None] * parts)
    spared = most_recomputed * np.max(saved - smaller, axis=0)[..., None]
    return fixed, np.maximum(as_saved - spared, as_recomputed)


# Bounds on the memory of pipeline ranks over all splits of the layers, for many layouts at once.


OF_PIPELINE = ("pp", "vpp", "num_micro_batches", "schedule")
"""What of a layout decides how many micro-batches a rank holds activations of."""


def peak_memory_gib(workload: Workload, layout: Layout) -> Floats:
    """Least peak over ranks that any split of the layers could have.

    A lower bound, by the weighted mean that `PeakBounds` explains, of what `stage_memory_gib` counts.

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

    Derived here: the peak is at least any weighted mean of what the ranks hold. With weights in proportion to
    1 / B_r, B_r bytes of a main layer on rank r, that mean is (main layers + leading ones times min_r C_r /
    B_r + sum_r E_r / B_r) over sum_r 1 / B_r, C_r bytes of a leading dense layer, E_r those of token table,
    head and MTP modules. Where main layers hold unlike bytes, B_r is their mean and each kind counts as
    leading ones do. It holds with every layer recomputed, and with every layer kept, less what the
    recomputed layers of each rank save; the larger of the two counts. Arrays of shape [n].
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
        """The least peak with a given number of layers recomputed, as the text of `PeakBounds` derives it.

        Parameters
        ----------
        recomputed_layers : array of int, shape [n]
            Layers of each virtual stage, at least 0; more than it has means all.

        Returns
        -------
        array of float, shape [n]
            GiB.
        """
        kept = self.kept - self.relief * recomputed_layers
        peak = np.maximum(np.maximum(kept, self.recomputed), 0.0)
        return np.asarray((peak + self.everywhere) * (1 - ROUNDING) / GIB)

    def rows(self, index: NDArray[np.int64]) -> PeakBounds:
        """The bounds of some of the layouts.

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
    """Bounds on the peak of layouts for any number of recomputed layers.

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
    other_kinds = _other_kinds(workload, layout, layer)
    beside = _beside_layers(workload, layout, saved)
    pp = np.asarray(layout.pp)
    pipelines = Layout(**{name: np.asarray(getattr(layout, name)) for name in OF_PIPELINE})
    kept = np.empty(pp.shape)
    relief = np.empty(pp.shape)
    recomputed = np.empty(pp.shape)
    for degree in np.unique(pp):
        rows = np.flatnonzero(pp == degree)
        flying = np.asarray(least_in_flight(pipelines.take(rows).with_axis(), np.arange(degree)))
        ends = np.zeros(flying.shape)
        ends[:, 0] += beside.first[rows]
        ends[:, -1] += beside.last[rows]
        kinds_here = [kind.rows(rows) for kind in other_kinds]
        on_ranks = _HeldByRanks(layer.rows(rows), kinds_here, flying, ends)
        kept[rows], relief[rows], recomputed[rows] = _least_peaks(workload, on_ranks)
    relief = np.where(layout.recomputes_layers, relief * layout.vpp, 0.0)
    return PeakBounds(kept, relief, recomputed, beside.everywhere)


def mean_states_gib(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """Weights, gradients and optimizer states that the mean pipeline rank holds on one GPU.

    Some rank holds as much under every split, beside activations: a bound on the peak that takes a small part
    of the time of `peak_bounds`.

    Parameters
    ----------
    workload : Workload
        Model, precision and software.
    layout : Layout
        Layouts of shape [n]; what they recompute has no part in it.

    Returns
    -------
    array of float, shape [n]
        GiB, at least 0.
    """
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    first, last, end_experts = end_parameters(model, layout)
    per_dense, per_expert = _bytes_per_parameter(workload, layout)
    layers = model.dense_layers * dense + model.moe_layers * rest
    states = (layers + first + last) * per_dense
    states = states + (model.moe_layers * experts + end_experts) * per_expert
    if keeps_more_of_tables(workload):
        states = states + sum(table_excess(workload, layout))
    mean = states / np.asarray(layout.pp) * (1 - ROUNDING) / GIB
    return np.broadcast_to(np.asarray(mean), layout.broadcast_shape())


_LEAST_BYTES = 1e-3
"""Of a layer in a bound: far below the rounding that bounds allow for."""


class _HeldByRanks(NamedTuple):
    """What the ranks of layouts of one pp hold unequally, bytes."""

    layer: LayerBytes
    """Arrays [n]."""
    others: list[KindBytes]
    """Kinds other than the main layer, arrays [n]; all of them where main layers hold unlike bytes."""
    flying: NDArray[np.float64]
    """Micro-batches in flight, [n, pp]."""
    ends: NDArray[np.float64]
    """Token table, head and MTP modules, [n, pp]."""


def _other_kinds(workload: Workload, layout: Layout, layer: LayerBytes) -> list[KindBytes]:
    """Layers that are no main ones: the leading dense ones, or all where main layers hold unlike bytes."""
    model = workload.model
    if model.unlike_bytes:
        return unlike_layer_bytes(workload, layout)
    leading = model.dense_layers if model.moe_layers else 0
    return [KindBytes(leading, *layer[3:])] if leading else []


def _least_peaks(workload: Workload, held: _HeldByRanks) -> tuple[NDArray[np.float64], ...]:
    """`kept`, `relief` of a recomputed layer of a rank, and `recomputed` of layouts of one pp."""
    layer, flying = held.layer, held.flying
    relief = layer.saved - layer.dropped
    for kind in held.others:
        relief = np.maximum(relief, kind.saved - kind.dropped)
    kept, weight = _mean_held(workload, held, recomputes=False)
    relief = relief * np.sum(flying * weight, axis=1)
    recomputed, _ = _mean_held(workload, held, recomputes=True)
    return kept, relief, recomputed


def _mean_held(
    workload: Workload, held: _HeldByRanks, *, recomputes: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weighted mean of what ranks hold, [n], and its weights, [n, pp], which sum to 1."""
    layer, others, flying, ends = held
    saved = layer.dropped if recomputes else layer.saved
    # Where states and saved inputs are the host's, a layer has no byte on the GPU.
    weight = 1.0 / np.maximum(layer.states[:, None] + saved[:, None] * flying, _LEAST_BYTES)
    weight_sum = np.sum(weight, axis=1)
    layers = workload.model.layers - sum(kind.number for kind in others)
    layers = layers + np.sum(ends * weight, axis=1)
    for kind in others:
        saved = kind.dropped if recomputes else kind.saved
        own = kind.states[:, None] + saved[:, None] * flying
        layers = layers + kind.number * np.min(own * weight, axis=1)
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
    head_rank = last_rank(layout.schedule, layout.pp)
    both = np.asarray(head_rank) == 0
    first, last, experts = end_parameters(workload.model, layout)
    per_dense, per_expert = _bytes_per_parameter(workload, layout)
    mtp_saved = workload.model.mtp_layers * saved.module * in_flight(layout, head_rank)
    table_more, head_more = table_excess(workload, layout)
    at_table = first * per_dense + table_more + extra.gathered_leading_first
    if encoder_of(workload) is not None:
        at_table = at_table + frozen_encoder_bytes(workload, layout)
        at_table = at_table + encoder_saved_bytes(workload, layout) * in_flight(layout, 0)
    at_head = last * per_dense + experts * per_expert + mtp_saved + extra.head_input_last
    at_head = at_head + head_more
    table_work = np.maximum(extra.embedding_first - extra.layer, 0.0)
    head_work = np.maximum(extra.loss_last - extra.layer, 0.0)
    beside_table = extra.gathered_table + extra.stranded_table
    other_table = 0.0 if workload.model.tied_embeddings else 1.0
    at_both = at_table + at_head + beside_table + other_table * extra.gathered_table
    at_both = at_both + np.maximum(table_work, head_work)
    plain = np.where(np.asarray(layout.schedule) == int(Schedule.DUALPIPE), 0.0, 1.0)
    ends = (
        plain * np.where(both, at_both, at_table + beside_table + table_work),
        plain * np.where(both, 0.0, at_head + beside_table + head_work),
    )
    shape = layout.broadcast_shape()
    rows = (_on_every_rank(workload, extra), *ends)
    return _BesideLayers(*(in_shape(row, shape) for row in rows))


def bytes_on_every_rank(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """`PeakBounds.everywhere` alone, which takes a small part of the time of all four.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        Layouts of shape [n].

    Returns
    -------
    array of float, shape [n]
        Bytes, at least 0.
    """
    extra = transients(workload, layout, saved_activations(workload, layout))
    return in_shape(_on_every_rank(workload, extra), layout.broadcast_shape())


def _on_every_rank(workload: Workload, extra: Transients) -> NDArray[np.float64]:
    everywhere = extra.gathered + extra.layer + extra.bucket + extra.stranded
    return np.asarray(everywhere + workspace_bytes(workload))


def main_layer_rooms(
    workload: Workload,
    layout: Layout,
    limit_gib: float,
    in_front: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """An upper bound on the main layers that each pipeline rank can hold within a limit.

    The room beside what `stage_memory_parts_gib` counts apart from layers, over the bytes of a layer. Leading
    dense layers are left out where `in_front` does not put them on rank 0, so there may be less room.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        Layouts of shape [n].
    limit_gib : float
        What a rank may hold, GiB, above 0.
    in_front : array of bool, shape [n], optional
        Layouts of which rank 0 holds all leading dense layers beside its main ones; none by default.

    Returns
    -------
    array of float, shape [n, most pp]
        Layers, at least 0; ranks beyond a layout's pp hold none.
    """
    unlike = unlike_rooms(workload, layout, limit_gib)
    if unlike is not None:
        return unlike.most_layers()
    return layer_rooms(workload, layout, limit_gib, in_front).most


def layer_rooms(
    workload: Workload,
    layout: Layout,
    limit_gib: float,
    in_front: NDArray[np.bool_] | None = None,
) -> LayerRooms:
    """`main_layer_rooms` of a model whose main layers hold equal bytes, and what a first virtual stage takes.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        Layouts of shape [n].
    limit_gib : float
        What a rank may hold, GiB, above 0.
    in_front : array of bool, shape [n], optional
        As `main_layer_rooms` takes it.

    Returns
    -------
    LayerRooms
        Of n layouts.
    """
    saved = saved_activations(workload, layout)
    layer = layer_bytes(workload, layout, saved)
    pp, vpp, per_stage, fixed, flying = _beside_layers_on_ranks(workload, layout, saved)
    recomputed = per_stage[:, None] * vpp[:, None]
    if in_front is not None:
        again = np.minimum(per_stage, workload.model.dense_layers)
        relief = np.maximum(layer.leading_saved - layer.leading_dropped, 0.0)
        kept = workload.model.dense_layers * layer.leading_saved - again * relief
        leading = workload.model.dense_layers * layer.leading_states + kept * flying[:, 0]
        fixed[:, 0] += np.where(in_front, leading, 0.0)
        recomputed = np.broadcast_to(recomputed, fixed.shape).copy()
        recomputed[:, 0] -= np.where(in_front, again, 0)
    room = limit_gib * GIB - fixed * (1 - ROUNDING)
    smaller = np.minimum(layer.dropped, layer.saved)
    # A layer without a byte on the GPU, as where everything is offloaded, is taken to have one.
    small = np.maximum(layer.states[:, None] + smaller[:, None] * flying, 1.0)
    large = np.maximum(layer.states[:, None] + layer.saved[:, None] * flying, 1.0)
    beyond = recomputed + (room - recomputed * small) / large
    layers = np.where(room < recomputed * small, room / small, beyond)
    layers = np.maximum(layers, 0.0) * (1 + ROUNDING)
    excess = first_chunk_excess(layout) * (1 - ROUNDING) / large[:, 0]
    return LayerRooms(
        np.where(np.arange(fixed.shape[1]) < pp[:, None], np.floor(layers), 0.0),
        layers[:, 0],
        excess * layer.saved,
        excess * smaller,
        per_stage,
    )


class LayerRooms(NamedTuple):
    """An upper bound on the main layers that pipeline ranks of layouts [n] can hold."""

    most: NDArray[np.float64]
    """Of every rank, [n, ranks]."""
    first: NDArray[np.float64]
    """Of rank 0 before rounding, [n]."""
    more: NDArray[np.float64]
    """Layers beyond one, at the least, for which a layer of the first virtual stage counts: its activations
    are of more micro-batches (`schedules.first_chunk_excess`), [n].
    """
    more_again: NDArray[np.float64]
    """The same of a layer that is recomputed in full, [n]."""
    recomputed: NDArray[np.int64]
    """Layers of every virtual stage that are recomputed in full, [n]."""

    def take(self, rows: NDArray[np.int64]) -> LayerRooms:
        """Those of some layouts.

        Parameters
        ----------
        rows : array of int, shape [k]
            Which layouts, 0 to n - 1.

        Returns
        -------
        LayerRooms
            Of k layouts.
        """
        return self._replace(
            most=self.most[rows],
            first=self.first[rows],
            more=self.more[rows],
            more_again=self.more_again[rows],
            recomputed=self.recomputed[rows],
        )

    def hold(
        self, main_layers: NDArray[np.float64], in_first: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether ranks may have room for all of their layers; where that is False, they have not.

        Parameters
        ----------
        main_layers : array of float, shape [splits, ranks]
            Of each rank of some splits.
        in_first : array of float, shape [splits]
            Main layers of the first virtual stage.

        Returns
        -------
        array of bool, shape [splits, n]
            Of each split and layout.
        """
        roomy = main_layers[:, None] <= self.most[None, :, : main_layers.shape[1]]
        again = np.minimum(in_first[:, None], self.recomputed)
        taken = main_layers[:, :1] + self.more * (in_first[:, None] - again)
        return np.asarray(roomy.all(axis=2) & (taken + self.more_again * again <= self.first))


class _OnRanks(NamedTuple):
    """What ranks of layouts [n] hold beside layers, and what decides what they hold of layers."""

    pp: NDArray[np.int64]
    vpp: NDArray[np.int64]
    recomputed: NDArray[np.int64]
    """Layers of every virtual stage that are recomputed in full, [n]."""
    fixed: NDArray[np.float64]
    """Bytes beside layers, [n, most pp]."""
    flying: NDArray[np.float64]
    """Micro-batches in flight, [n, most pp]."""


def _beside_layers_on_ranks(
    workload: Workload, layout: Layout, saved: SavedActivations
) -> _OnRanks:
    shape = layout.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layout.pp, layout.vpp))
    ranks = np.arange(int(pp.max(initial=1)))
    beside = _beside_layers(workload, layout, saved)
    fixed = np.broadcast_to(beside.everywhere[:, None], (*shape, len(ranks))).copy()
    fixed[:, 0] += beside.first
    fixed[ranks == pp[:, None] - 1] += beside.last
    flying = np.asarray(least_in_flight(layout.with_axis(), ranks))
    return _OnRanks(
        pp,
        vpp,
        np.broadcast_to(np.where(layout.recomputes_layers, layout.recompute_layers, 0), shape),
        fixed,
        np.broadcast_to(flying, fixed.shape),
    )


def unlike_rooms(workload: Workload, layout: Layout, limit_gib: float) -> UnlikeRooms | None:
    """What pipeline ranks have room for within a limit where layers hold unlike bytes.

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
    UnlikeRooms or None
        Of the layouts, ranks beyond a layout's pp without room; None where all layers hold equal bytes.
    """
    if not workload.model.unlike_bytes:
        return None
    on = _beside_layers_on_ranks(workload, layout, saved_activations(workload, layout))
    room = limit_gib * GIB - on.fixed * (1 - ROUNDING)
    return UnlikeRooms(
        workload.model.unlike_bytes,
        tuple(unlike_layer_bytes(workload, layout)),
        on.flying,
        in_shape(np.asarray(first_chunk_excess(layout)), layout.broadcast_shape()),
        np.where(np.arange(room.shape[1]) < on.pp[:, None], room, 0.0),
        on.vpp,
        on.recomputed,
    )


class UnlikeRooms(NamedTuple):
    """What ranks hold of layers with unlike bytes, and how much room they have, for layouts [n]."""

    layers: tuple[str, ...]
    """The kind of each layer (`ModelSpec.unlike_bytes`)."""
    kinds: tuple[KindBytes, ...]
    """Arrays of shape [n], kinds in the order in which they first appear."""
    flying: NDArray[np.float64]
    """Micro-batches in flight of every virtual stage, [n, ranks]."""
    excess: NDArray[np.float64]
    """Those that the first virtual stage of rank 0 has beyond, [n]."""
    room: NDArray[np.float64]
    """Bytes of each rank for its layers, [n, ranks]."""
    vpp: NDArray[np.int64]
    recomputed: NDArray[np.int64]
    """Layers of every virtual stage that are recomputed in full, [n]."""

    def take(self, rows: NDArray[np.int64]) -> UnlikeRooms:
        """Those of some layouts.

        Parameters
        ----------
        rows : array of int, shape [k]
            Which layouts, 0 to n - 1.

        Returns
        -------
        UnlikeRooms
            Of k layouts.
        """
        return self._replace(
            kinds=tuple(kind.rows(rows) for kind in self.kinds),
            flying=self.flying[rows],
            excess=self.excess[rows],
            room=self.room[rows],
            vpp=self.vpp[rows],
            recomputed=self.recomputed[rows],
        )

    def _of_kinds(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """States of a layer, what it saves and what it saves where it is recomputed, [kinds, n] each."""
        return (
            np.stack([kind.states for kind in self.kinds]),
            np.stack([kind.saved for kind in self.kinds]),
            np.stack([kind.dropped for kind in self.kinds]),
        )

    def most_layers(self) -> NDArray[np.float64]:
        """The most layers of every rank, wherever they lie in the model.

        Derived here: `least_in_parts` is never above what so many layers hold, and never falls with them.

        Returns
        -------
        array of float, shape [n, ranks]
            Layers, at least 0.
        """
        of_kinds = self._of_kinds()
        rooms = np.zeros(self.room.shape)
        numbers = np.arange(len(self.layers) + 1)
        for parts in np.unique(self.vpp).tolist():
            for rows in _in_pieces(self.vpp == parts, self.room.shape[1] * len(numbers)):
                states, saved, dropped = (each[:, rows] for each in of_kinds)
                fixed, moving = least_in_parts(
                    self.layers, parts, (states, saved, dropped), self.recomputed[rows]
                )
                bytes_held = fixed[:, None] + moving[:, None] * self.flying[rows, :, None]
                fits = bytes_held * (1 - ROUNDING) <= self.room[rows, :, None]
                rooms[rows] = np.sum(fits, axis=2) - 1
        return np.maximum(rooms, 0.0)

    def hold(self, splits: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether ranks have room for all of their layers.

        Parameters
        ----------
        splits : array of int, shape [splits, virtual stages, ranks]
            Layers of each virtual stage; of as many ranks and virtual stages as all of the layouts have.

        Returns
        -------
        array of bool, shape [splits, n]
            Of each split and layout.
        """
        flat = splits.reshape(len(splits), -1)
        first = (np.cumsum(flat, axis=1) - flat).reshape(splits.shape)
        # [kinds, splits, virtual stages, ranks], and over virtual stages
        in_chunks = counts_between(self.layers, first, first + splits)
        number = in_chunks.sum(axis=2)
        states, saved, dropped = self._of_kinds()
        holds = np.zeros((len(splits), len(self.vpp)), dtype=bool)
        ranks = splits.shape[2]
        for amount in np.unique(self.recomputed).tolist():
            to = first + np.minimum(splits, amount)
            again = counts_between(self.layers, first, to)
            recomputed = again.sum(axis=2)
            for rows in _in_pieces(self.recomputed == amount, number[0].size):
                moving = np.tensordot(saved[:, rows], number, (0, 0))  # [n, splits, ranks]
                moving -= np.tensordot((saved - dropped)[:, rows], recomputed, (0, 0))
                bytes_held = np.tensordot(states[:, rows], number, (0, 0))
                bytes_held += moving * self.flying[rows, None, :ranks]
                alone = np.tensordot(saved[:, rows], in_chunks[..., 0, 0], (0, 0))  # [n, splits]
                alone -= np.tensordot((saved - dropped)[:, rows], again[..., 0, 0], (0, 0))
                bytes_held[:, :, 0] += alone * self.excess[rows, None]
                fits = bytes_held * (1 - ROUNDING) <= self.room[rows, None, :ranks]
                holds[:, rows] = fits.all(axis=2).T
        return holds


_MOST_AT_ONCE = 1 << 21
"""Numbers in an array of what layers of many ranks hold."""


def _in_pieces(of: NDArray[np.bool_], numbers_each: int) -> list[NDArray[np.int64]]:
    """The places that are true, as many at a time as their arrays may have numbers."""
    places = np.flatnonzero(of)
    at_once = max(1, _MOST_AT_ONCE // numbers_each)
    return [places[begin : begin + at_once] for begin in range(0, len(places), at_once)]
