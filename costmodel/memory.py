"""HBM of each pipeline rank, by component. Bytes unless said.

Parameters and optimizer states follow Megatron-LM's distributed-optimizer table (docs/source/api-guide/
dist_optimizer.md): 6 + 12/d bytes a parameter, 18 without. Activations are counted tensor by tensor for fused
attention, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4) do for unfused attention.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.constants import framework_constants
from costmodel.layout import Floats, Ints, Layout, Recompute
from costmodel.workload import Workload
from model_specs.parameters import (
    attention_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    expert_parameters,
    norm_parameters_per_layer,
    router_parameters,
    shared_expert_parameters,
)
from model_specs.schema import ModelSpec

GIB = float(2**30)
Stages = tuple[tuple[int, ...], ...]


def layer_parameters_on_gpu(model: ModelSpec, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """Parameters of one layer that one GPU holds: (dense layer, MoE layer without experts, experts of a layer)."""
    tp, ep, etp = (np.asarray(x) for x in (layout.tp, layout.ep, layout.etp))
    common = attention_parameters(model) / tp + norm_parameters_per_layer(model)
    dense = common + dense_mlp_parameters(model) / tp if model.dense_layers else 0.0 * tp
    if model.moe is None:
        return dense, 0.0 * tp, 0.0 * tp
    rest = common + shared_expert_parameters(model) / tp + router_parameters(model)
    return dense, rest, model.moe.experts * expert_parameters(model) / (ep * etp)


def _layer_counts(model: ModelSpec, stages: Stages) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Dense and MoE layers of each rank; the MTP modules count on the last rank."""
    pp, vpp = len(stages), len(stages[0])
    dense, moe, first = np.zeros(pp), np.zeros(pp), 0
    for chunk in range(pp * vpp):
        size = stages[chunk % pp][chunk // pp]
        number = min(max(model.dense_layers - first, 0), size)
        dense[chunk % pp] += number
        moe[chunk % pp] += size - number
        first += size
    if model.moe is None:
        dense[-1] += model.mtp_layers
    else:
        moe[-1] += model.mtp_layers
    return dense, moe


def rank_parameters(model: ModelSpec, layout: Layout, stages: Stages | None) -> tuple[Floats, Floats]:
    """Parameters on one GPU of each rank, (dense, expert), before data-parallel sharding.

    With stages: arrays [pp]. Without: the mean over ranks without embedding and head, a lower bound on the
    largest, shaped like the layout.
    """
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    if stages is None:
        pp = np.asarray(layout.pp)
        mtp_dense = model.mtp_layers if model.moe is None else 0
        mtp_moe = model.mtp_layers - mtp_dense
        of_dense = (model.dense_layers + mtp_dense) * dense + (model.moe_layers + mtp_moe) * rest
        return of_dense / pp, (model.moe_layers + mtp_moe) * experts / pp
    number_dense, number_moe = _layer_counts(model, stages)
    table = embedding_parameters(model) / np.asarray(layout.tp)
    ends = np.zeros(len(stages))
    ends[0] += table
    if len(stages) > 1 or not model.tied_embeddings:
        ends[-1] += table
    return number_dense * dense + number_moe * rest + ends, number_moe * experts


def state_bytes_per_parameter(workload: Workload, layout: Layout, shards: Ints) -> Floats:
    """Weights, gradients and optimizer states of one parameter on one GPU.

    Mixed-precision Adam: a 2-byte weight, a gradient, fp32 master weight and two moments (12). The gradient is kept
    in fp32 by Megatron (4 bytes) and in 2 bytes by stacks that reduce in 16 bits. FP8 kernels keep a quantised copy
    of the weight and its transpose (1 byte each; half of that in FP4).
    """
    grad = float(framework_constants(workload.framework).gradient_bytes)
    copies = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 1.0}.get(workload.precision, 0.0)
    d = np.asarray(shards, dtype=np.float64)
    stage = np.asarray(layout.zero_stage)
    optimizer = OPTIMIZER_BYTES[workload.optimizer]
    plain = 2.0 + grad + optimizer
    one = 2.0 + grad + optimizer / d
    two = 2.0 + (grad + optimizer) / d
    three = (4.0 + optimizer) / d
    out: Floats = np.select(
        [stage == 0, stage == 1, stage == 2], [plain, one, two], three
    ) + copies / np.where(stage == 3, d, 1.0)
    return out


OPTIMIZER_BYTES = {"adam": 12.0, "sgd": 8.0, "muon": 8.0}
"""fp32 master weight and moments: two for Adam, one for momentum SGD and Muon (arXiv 2502.16982)."""


def activation_bytes_per_layer(workload: Workload, layout: Layout, *, experts: bool) -> tuple[Floats, Floats]:
    """Saved for one layer and micro-batch on one GPU: (with the layout's selective recomputation, with full)."""
    model, mask = workload.model, np.asarray(layout.recompute)
    tokens = np.asarray(layout.micro_batch) * workload.seq_len / np.asarray(layout.cp)
    tp = np.asarray(layout.tp)
    sequence = np.where(layout.sequence_parallel, tp, 1)
    narrow = 1.0 if workload.precision in ("fp8", "mxfp8", "nvfp4") else 2.0
    norms_out = np.where(mask & Recompute.LAYERNORM, 0.0, narrow * model.hidden) / sequence
    saved = 2.0 * model.hidden / sequence + norms_out + _attention_saved(workload, layout, narrow)
    mlp = 2.0 * model.hidden / sequence + norms_out
    if experts:
        mlp = mlp + _moe_saved(model, layout, narrow)
    else:
        mlp = mlp + _dense_saved(model.ffn_hidden, model, layout, narrow)
        mlp = np.where(mask & Recompute.MLP, 2.0 * model.hidden / sequence, mlp)
    return tokens * (saved + mlp), tokens * 2.0 * model.hidden / sequence


def _attention_saved(workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Bytes a token: query, key, value, output and log-sum-exp; latents of MLA; scores of unfused attention."""
    model, mask, tp = workload.model, np.asarray(layout.recompute), np.asarray(layout.tp)
    heads = model.heads / tp
    query = 2.0 * heads * model.qk_head_dim
    out = narrow * heads * model.v_head_dim + 4.0 * heads
    if model.attention is not None:
        keys = 2.0 * heads * (model.qk_head_dim + model.v_head_dim)
        latent = 2.0 * 2.0 * ((model.attention.q_lora_rank or 0) + model.attention.kv_lora_rank)
        up = np.where(mask & Recompute.MLA_UP_PROJECTION, 0.0, query + keys)
        return up + latent + out
    keys = 2.0 * np.maximum(model.kv_heads / tp, 1.0) * (model.qk_head_dim + model.v_head_dim)
    scores = 0.0
    if not framework_constants(workload.framework).flash_attention:
        scores = np.where(
            mask & Recompute.CORE_ATTENTION, 0.0, 5.0 * heads * workload.seq_len / np.asarray(layout.cp)
        )
    rope = query + keys if model.position == "rope" and model.qk_norm else 0.0
    return query + keys + out + scores + rope


def _dense_saved(width: float, model: ModelSpec, layout: Layout, narrow: float) -> Floats:
    matrices = 2.0 if model.gated else 1.0
    out: Floats = (2.0 * matrices + narrow) * width / np.asarray(layout.tp)
    return out


def _moe_saved(model: ModelSpec, layout: Layout, narrow: float) -> Floats:
    """Routed activations scale with top_k and do not shrink with ep: what leaves a rank comes back from another."""
    moe, mask = model.moe, np.asarray(layout.recompute)
    assert moe is not None
    matrices = 2.0 if model.gated else 1.0
    routed = moe.top_k / np.asarray(layout.tp)
    width = moe.moe_ffn_hidden
    activated = np.where(mask & Recompute.MOE_ACTIVATION, 0.0, narrow * width)
    saved: Floats = routed * (narrow * model.hidden + 2.0 * matrices * width + activated)
    router = 8.0 * moe.experts / np.asarray(layout.tp)
    return (
        saved + router + (_dense_saved(moe.shared_width, model, layout, narrow) if moe.shared_width else 0.0)
    )


def in_flight(layout: Layout, rank: Ints) -> Floats:
    """Micro-batches whose activations a rank holds at the peak, in units of all its virtual stages.

    1F1B: min(m, p - r). Interleaved: the warm-up runs 2 (p - r - 1) + (v - 1) p chunks ahead, plus the one in work
    (Narayanan et al. 2021, section 2.2; megatron-core schedules.py).
    """
    pp, vpp, m = (np.asarray(x) for x in (layout.pp, layout.vpp, layout.num_micro_batches))
    plain = np.minimum(m, pp - rank)
    chunks = np.minimum(2 * (pp - np.asarray(rank) - 1) + (vpp - 1) * pp + 1, m * vpp)
    out: Floats = np.where(vpp > 1, chunks / vpp, plain)
    return out


FIXED_GIB = 0.5
"""Workspaces and small buffers of the framework's allocator (SimuMax B200 rows)."""


def _transient_bytes(workload: Workload, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """(logits on the last rank, largest weight's fp32 gradient and gathered copies, one layer's work under full recompute)."""
    model = workload.model
    tokens = np.asarray(layout.micro_batch) * workload.seq_len / np.asarray(layout.cp)
    logits = 6.0 * tokens * model.vocab / np.asarray(layout.tp)
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    largest = 4.0 * model.vocab * model.hidden / np.asarray(layout.tp)
    gathered = np.where(
        np.asarray(layout.zero_stage) == 3, 2.0 * 2.0 * np.maximum(dense, rest + experts), 0.0
    )
    selective, _ = activation_bytes_per_layer(workload, layout, experts=model.moe is not None)
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    return logits, largest + gathered, np.where(full, selective, 0.0)


def stage_memory_parts_gib(
    workload: Workload, layout: Layout, stages: Stages
) -> dict[str, NDArray[np.float64]]:
    """Peak GiB of each pipeline rank by component, arrays [pp], for one layout and split."""
    model = workload.model
    dense, expert = rank_parameters(model, layout, stages)
    states = dense * state_bytes_per_parameter(
        workload, layout, np.asarray(layout.dp) * np.asarray(layout.cp)
    )
    states_expert = expert * state_bytes_per_parameter(workload, layout, layout.edp)
    pp, vpp = len(stages), len(stages[0])
    saved = np.zeros(pp)
    full = bool(int(np.asarray(layout.recompute)) & Recompute.FULL)
    again = int(np.asarray(layout.recompute_layers)) if full else 0
    of_dense = activation_bytes_per_layer(workload, layout, experts=False)
    of_moe = activation_bytes_per_layer(workload, layout, experts=True) if model.moe is not None else of_dense
    first = 0
    for chunk in range(pp * vpp):
        size = stages[chunk % pp][chunk // pp]
        for index in range(size):
            kind = of_dense if first + index < model.dense_layers else of_moe
            saved[chunk % pp] += float(kind[1 if index < again else 0])
        first += size
    saved[-1] += model.mtp_layers * float(of_moe[0])
    logits, buffers, work = _transient_bytes(workload, layout)
    last = np.arange(pp) == pp - 1
    return {
        "states": np.asarray(states) / GIB,
        "expert_states": np.asarray(states_expert) / GIB,
        "activations": saved * np.asarray(in_flight(layout, np.arange(pp))) / GIB,
        "logits": np.where(last, float(logits) * (1 + model.mtp_layers), 0.0) / GIB,
        "buffers": np.where(last | (np.arange(pp) == 0), float(buffers), 0.0) / GIB,
        "recompute_work": np.full(pp, float(work)) / GIB,
        "fixed": np.full(pp, FIXED_GIB),
    }


CONTEXT_GIB = 1.5
"""What a process holds outside the framework's allocator: CUDA context and kernels, NCCL channels."""
ALLOCATOR_SHARE = 0.96
"""Of HBM that an allocator can fill: a caching allocator strands some in fragments, and steps slow down by 12 to 28 %
when it runs out and has to flush (measured runs at over 92 % of HBM)."""


def usable_hbm_gib(workload: Workload) -> float:
    """What the peak of `stage_memory_gib` may reach on one GPU: HBM less fragments, context and the user's reserve."""
    return workload.cluster.device.hbm_gib * ALLOCATOR_SHARE - CONTEXT_GIB - workload.reserve_gib


def stage_memory_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """Peak GiB of each pipeline rank, [pp]."""
    return np.sum(list(stage_memory_parts_gib(workload, layout, stages).values()), axis=0)


def peak_memory_gib(workload: Workload, layout: Layout) -> Floats:
    """Least peak over ranks that any split of the layers could have, GiB, shaped like the layout.

    With n_r layers of b_r bytes each on rank r, max_r n_r b_r is least when all are equal: L / sum_r (1 / b_r).
    Embedding, head and MTP come on top on single ranks and are left out, so this is a lower bound.
    """
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    d = np.asarray(layout.dp) * np.asarray(layout.cp)
    per_dense = state_bytes_per_parameter(workload, layout, d)
    per_expert = state_bytes_per_parameter(workload, layout, layout.edp)
    share = model.dense_layers / model.layers
    state = (share * dense + (1 - share) * rest) * per_dense + (1 - share) * experts * per_expert
    pp, vpp = np.asarray(layout.pp), np.asarray(layout.vpp)
    chunk = model.layers / (pp * vpp)
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    again = np.where(full, np.minimum(np.asarray(layout.recompute_layers) / chunk, 1.0), 0.0)
    saved = 0.0
    for part, experts_kind in ((share, False), (1 - share, True)):
        if part > 0:
            kept, dropped = activation_bytes_per_layer(workload, layout, experts=experts_kind)
            saved = saved + part * ((1 - again) * kept + again * dropped)
    shape = np.broadcast_shapes(
        np.shape(state), np.shape(saved), np.shape(pp), np.shape(layout.num_micro_batches)
    )
    inverse = np.zeros(shape)
    for rank in range(int(np.max(pp))):
        inverse += np.where(
            rank < pp, 1.0 / (state + saved * in_flight(layout, np.minimum(rank, pp - 1))), 0.0
        )
    _, _, work = _transient_bytes(workload, layout)
    out: Floats = (model.layers / inverse + work) / GIB + FIXED_GIB
    return out
