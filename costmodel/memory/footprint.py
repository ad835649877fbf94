"""HBM of each pipeline rank, by component. Bytes unless said.

States, activations and buffers are counted in `memory_states`, `memory_activations` and `memory_transients`;
this module puts them together per rank, and bounds them over all splits of the layers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.memory.activations import (
    SavedActivations,
    activation_bytes_per_layer,
    rank_tokens,
    saved_activations,
    sequence_shards,
)
from meshwright.costmodel.memory.profile import memory_profile
from meshwright.costmodel.memory.states import (
    layer_parameters_on_gpu,
    rank_parameters,
    state_bytes,
    state_bytes_per_parameter,
    v_shaped,
)
from meshwright.costmodel.memory.transients import FIXED_BYTES, transients
from meshwright.costmodel.pipeline.schedules import in_flight, last_rank, on_both_ranks
from meshwright.costmodel.pipeline.split import Stages, layer_counts
from meshwright.costmodel.workload import Workload

GIB = float(2**30)


def stage_memory_parts_gib(
    workload: Workload, layout: Layout, stages: Stages
) -> dict[str, NDArray[np.float64]]:
    """Peak GiB of each pipeline rank by component, arrays [pp], for one layout and split.

    The loss of the last rank and a layer's way back do not meet: `logits` is the first, `work` what the
    second needs beyond it.
    """
    pp = len(stages)
    saved = saved_activations(workload, layout)
    extra = transients(workload, layout, saved)
    rank = np.arange(pp)
    ends = np.stack([rank == 0, rank == last_rank(layout.schedule, pp)]).astype(np.float64)
    first, last = (on_both_ranks(end, layout.schedule) > 0 for end in ends)
    tables = _tables_held(workload, first, last)
    logits = np.where(last, extra.loss_last, 0.0)
    head_input = np.where(last, extra.head_input_last, 0.0)
    work = np.maximum(extra.layer, np.where(first, extra.embedding_first, 0.0))
    parts: dict[str, object] = {
        **_states(workload, layout, stages),
        "activations": _in_all_micro_batches(workload, layout, stages, saved) + head_input,
        "logits": logits,
        "work": np.maximum(work - logits, 0.0),
        "buffers": extra.gathered
        + tables * extra.gathered_table
        + np.where(first, extra.gathered_leading_first, 0.0)
        + extra.bucket,
        "fragmentation": extra.stranded + np.minimum(tables, 1) * extra.stranded_table,
        "workspace": FIXED_BYTES,
    }
    return {name: np.broadcast_to(np.asarray(held) / GIB, (pp,)) for name, held in parts.items()}


def _tables_held(
    workload: Workload, first: NDArray[np.bool_], last: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Token tables and heads on each rank; a tied one is held once where both ends are."""
    both = np.where(first & last, 1.0 if workload.model.tied_embeddings else 2.0, 1.0)
    return np.asarray(np.where(first | last, both, 0.0))


def _states(workload: Workload, layout: Layout, stages: Stages) -> dict[str, Floats]:
    """Weights, gradients and optimizer states of every rank."""
    dense, expert = rank_parameters(workload.model, layout, stages)
    of_dense = state_bytes(workload, layout, np.asarray(layout.dp) * np.asarray(layout.cp))
    of_expert = state_bytes(workload, layout, layout.edp)
    names = ("weights", "gradients", "optimizer")
    return {
        name: dense * np.asarray(of_dense[k]) + expert * np.asarray(of_expert[k])
        for k, name in enumerate(names)
    }


def _in_all_micro_batches(
    workload: Workload, layout: Layout, stages: Stages, each: SavedActivations
) -> NDArray[np.float64]:
    """Saved activations of every rank, of all its micro-batches in flight."""
    model, rank = workload.model, np.arange(len(stages))
    full = bool(int(np.asarray(layout.recompute)) & Recompute.FULL)
    again = int(np.asarray(layout.recompute_layers)) if full else 0
    counts = layer_counts(model.dense_layers, stages, again, v_shaped=v_shaped(layout))
    (kept, dropped), (kept_moe, dropped_moe) = each.dense, each.main
    last = rank == last_rank(layout.schedule, len(stages))
    saved = counts.dense * kept + counts.dense_recomputed * (dropped - kept)
    saved = saved + counts.moe * kept_moe + counts.moe_recomputed * (dropped_moe - kept_moe)
    saved = saved + np.where(last, model.mtp_layers * kept_moe, 0.0)
    if memory_profile(workload.framework).keeps_stage_outputs and len(stages) > 1:
        sent = 2.0 * rank_tokens(workload, layout) * model.hidden / sequence_shards(layout)
        saved = saved + np.where(last, 0.0, sent)
    saved = on_both_ranks(np.asarray(saved), layout.schedule)
    return np.asarray(saved * np.asarray(in_flight(layout, rank)))


def stage_memory_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """Peak GiB of each pipeline rank, [pp]."""
    parts = stage_memory_parts_gib(workload, layout, stages)
    return np.asarray(np.sum(list(parts.values()), axis=0), dtype=np.float64)


CONTEXT_GIB = 1.5
"""CUDA context and kernels, outside the framework's allocator: 1,573 MiB on an A100 (bigscience-workshop/
bigscience, tr11-176B-ml/chronicles-prequel.md)."""
COMMUNICATOR_GIB = 0.25
"""Buffers of one NCCL communicator: 24 channels x 2 neighbours x 5.6 MiB of its three protocols
(NCCL_BUFFSIZE, default 4 MiB for one of them)."""
ALLOCATOR_SHARE = 0.94
"""Of HBM that an allocator can fill: a caching allocator strands some in fragments, and steps slow down by 12
to 28 % when it runs out and has to flush (measured runs at over 92 % of HBM)."""


def usable_hbm_gib(workload: Workload) -> float:
    """What `stage_memory_gib` may reach on one GPU: HBM less fragments, context and the user's reserve."""
    return workload.cluster.device.hbm_gib * ALLOCATOR_SHARE - CONTEXT_GIB - workload.reserve_gib


def hbm_gib_for(workload: Workload, usable_gib: float) -> float:
    """The HBM of a GPU on which `usable_hbm_gib` is `usable_gib`."""
    return (usable_gib + CONTEXT_GIB + workload.reserve_gib) / ALLOCATOR_SHARE


def context_gib(layout: Layout) -> Floats:
    """What the driver shows beside the allocator's blocks: the context, and a communicator of the world and
    of each axis with more than one rank."""
    axes = (layout.tp, layout.pp, np.asarray(layout.dp) * np.asarray(layout.cp), layout.ep)
    groups = 1 + sum((np.asarray(size) > 1).astype(np.int64) for size in axes)
    out: Floats = CONTEXT_GIB + COMMUNICATOR_GIB * np.asarray(groups)
    return out


def peak_memory_gib(workload: Workload, layout: Layout) -> Floats:
    """Least peak over ranks that any split of the layers could have, GiB, shaped like the layout.

    The peak is at least any weighted mean of what the ranks hold. With weights in proportion to 1 / B_r, B_r
    bytes of a main layer on rank r, that mean is (main layers + leading ones times min_r C_r / B_r) over
    sum_r 1 / B_r, C_r bytes of a leading dense layer. It holds with every layer recomputed, and with every
    layer kept, less what the recomputed layers of each rank save; the larger of the two counts. Embedding,
    head and MTP come on top on single ranks and are left out.
    """
    shape = layout.broadcast_shape()
    flat = layout.flat()
    state, kept, dropped, state_l, kept_l, dropped_l = layer_bytes(workload, flat)
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    main = workload.model.layers - leading
    full = (np.asarray(flat.recompute) & Recompute.FULL) != 0
    again = np.where(full, np.asarray(flat.recompute_layers) * np.asarray(flat.vpp), 0)
    relief = again * np.maximum(kept - dropped, kept_l - dropped_l if leading else 0.0)
    out = np.empty(full.shape)
    for pp in np.unique(np.asarray(flat.pp)):
        rows = np.flatnonzero(np.asarray(flat.pp) == pp)
        flying = np.asarray(in_flight(flat.take(rows).with_axis(), np.arange(pp)))
        bound = np.zeros(len(rows))
        for held, held_l, less in ((kept, kept_l, relief), (dropped, dropped_l, 0.0 * relief)):
            share = 1.0 / (state[rows, None] + held[rows, None] * flying)
            ratio = (state_l[rows, None] + held_l[rows, None] * flying) * share
            saved = np.sum(less[rows, None] * flying * share, axis=1)
            worth = main + leading * np.min(ratio, axis=1) - saved
            bound = np.maximum(bound, worth / np.sum(share, axis=1))
        out[rows] = bound
    extra = transients(workload, flat, saved_activations(workload, flat))
    every = np.asarray(extra.gathered + extra.layer + extra.bucket + extra.stranded)
    return np.asarray((out + every + FIXED_BYTES) / GIB).reshape(shape)


def main_layer_rooms(workload: Workload, layout: Layout, limit_gib: float) -> NDArray[np.float64]:
    """Never fewer main layers than each pipeline rank can hold within a limit, shape [n, most pp].

    Ranks beyond a layout's pp hold none. Leading dense layers, embedding and head are left out, so there may
    be less room. `layout` has shape [n].
    """
    state, kept, dropped, *_ = layer_bytes(workload, layout)
    pp, vpp = (
        np.broadcast_to(np.asarray(x), state.shape)[:, None] for x in (layout.pp, layout.vpp)
    )
    ranks = np.arange(int(pp.max(initial=1)))
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    again = np.broadcast_to(np.where(full, layout.recompute_layers, 0), state.shape)[:, None] * vpp
    extra = transients(workload, layout, saved_activations(workload, layout))
    every = np.asarray(extra.gathered + extra.layer + extra.bucket + extra.stranded) + FIXED_BYTES
    flying = np.broadcast_to(
        np.asarray(in_flight(layout.with_axis(), ranks)), (*state.shape, len(ranks))
    )
    left = np.broadcast_to(limit_gib * GIB - every, state.shape)[:, None]
    first, rest = (
        state[:, None] + held[:, None] * flying for held in (np.minimum(dropped, kept), kept)
    )
    rooms = np.where(left < again * first, left / first, again + (left - again * first) / rest)
    rooms = np.floor(np.maximum(rooms, 0.0) * (1 + 1e-9))
    return np.asarray(np.where(ranks < pp, rooms, 0.0))


def layer_bytes(workload: Workload, layout: Layout) -> tuple[NDArray[np.float64], ...]:
    """Bytes of one layer: (states, activations kept, activations when recomputed in full) of a main layer,
    then of a leading dense layer of a mixture-of-experts model."""
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    per_dense = state_bytes_per_parameter(
        workload, layout, np.asarray(layout.dp) * np.asarray(layout.cp)
    )
    leading = (dense * per_dense, *activation_bytes_per_layer(workload, layout, experts=False))
    main = leading
    if model.moe_layers:
        states = rest * per_dense + experts * state_bytes_per_parameter(
            workload, layout, layout.edp
        )
        main = (states, *activation_bytes_per_layer(workload, layout, experts=True))
    shape = layout.broadcast_shape()
    return tuple(np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (*main, *leading))
