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
from costmodel.schedules import has_trait, in_flight, last_rank, on_both_ranks
from costmodel.split import Stages, layer_counts
from costmodel.workload import Workload
from model_specs.parameters import (
    attention_parameters,
    dense_layer_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    expert_parameters,
    moe_layer_parameters,
    mtp_parameters,
    norm_parameters_per_layer,
    router_parameters,
    shared_expert_parameters,
)
from model_specs.schema import ModelSpec

GIB = float(2**30)


def layer_parameters_on_gpu(model: ModelSpec, layout: Layout) -> tuple[Floats, Floats, Floats]:
    """Parameters of one layer on one GPU: (dense layer, MoE layer without experts, its experts)."""
    tp, ep, etp = (np.asarray(x) for x in (layout.tp, layout.ep, layout.etp))
    common = attention_parameters(model) / tp + norm_parameters_per_layer(model)
    dense = common + dense_mlp_parameters(model) / tp if model.dense_layers else 0.0 * tp
    if model.moe is None:
        return dense, 0.0 * tp, 0.0 * tp
    rest = common + shared_expert_parameters(model) / tp + router_parameters(model)
    return dense, rest, model.moe.experts * expert_parameters(model) / (ep * etp)


def rank_parameters(model: ModelSpec, layout: Layout, stages: Stages | None) -> tuple[Floats, Floats]:
    """Parameters on one GPU of each rank, (dense, expert), before data-parallel sharding.

    With stages: arrays [pp]. Without: the mean over ranks, a lower bound on the largest, shaped like the
    layout. The last rank holds the MTP modules and, to feed them, its own copy of the token table
    (megatron-core gpt_model.py builds an embedding on the first rank and on that of the MTP modules).
    """
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    tp, pp = np.asarray(layout.tp), np.asarray(layout.pp)
    table = embedding_parameters(model) / tp
    mtp_dense = model.mtp_layers * (dense if model.moe is None else rest) + mtp_join_parameters(model) / tp
    mtp_experts = model.mtp_layers * experts
    untied = 0 if model.tied_embeddings else 1
    tables = np.where(pp > 1, max(1, untied + (model.mtp_layers > 0)), untied)
    last = tables * table + mtp_dense
    if stages is None:
        of_dense = model.dense_layers * dense + model.moe_layers * rest + table + last
        return of_dense / pp, (model.moe_layers * experts + mtp_experts) / pp
    counts = layer_counts(model.dense_layers, stages, 0, v_shaped=_v_shaped(layout))
    rank = np.arange(len(stages))
    on_last = rank == last_rank(layout.schedule, len(stages))
    ends = np.where(rank == 0, table, 0.0) + np.where(on_last, last, 0.0)
    of_experts = counts.moe * experts + np.where(on_last, mtp_experts, 0.0)
    of_dense = counts.dense * dense + counts.moe * rest + ends
    return on_both_ranks(of_dense, layout.schedule), on_both_ranks(of_experts, layout.schedule)


def _v_shaped(layout: Layout) -> bool:
    return bool(has_trait(layout.schedule, "v_shaped").any())


def mtp_join_parameters(model: ModelSpec) -> int:
    """What joins the MTP modules to the model: a projection from 2 h to h and three norms each."""
    if not model.mtp_layers:
        return 0
    layer = moe_layer_parameters(model) if model.moe_layers else dense_layer_parameters(model)
    return mtp_parameters(model) - model.mtp_layers * layer


def state_bytes_per_parameter(workload: Workload, layout: Layout, shards: Ints) -> Floats:
    """Weights, gradients and optimizer states of one parameter on one GPU.

    Mixed-precision Adam: a 2-byte weight, a gradient, fp32 master weight and two moments (12). Megatron keeps
    the gradient in fp32 (4 bytes), stacks that reduce in 16 bits in 2. FP8 kernels keep a quantised copy of
    the weight and its transpose (1 byte each; half of that in FP4). DeepSpeed's
    BF16 optimizer accumulates gradients in fp32 beside the 16-bit ones, and flattens them once more.
    """
    stack = framework_constants(workload.framework)
    flat = stack.bf16_gradient_copies_bytes if workload.precision == "bf16" else 0.0
    grad = float(stack.gradient_bytes)
    copies = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 1.0}.get(workload.precision, 0.0)
    d = np.asarray(shards, dtype=np.float64)
    stage = np.asarray(layout.zero_stage)
    optimizer = OPTIMIZER_BYTES[workload.optimizer]
    plain = 2.0 + grad + flat + optimizer
    one = 2.0 + grad + flat + optimizer / d
    two = 2.0 + (grad + flat + optimizer) / d
    three = (4.0 + optimizer) / d
    out: Floats = np.select(
        [stage == 0, stage == 1, stage == 2], [plain, one, two], three
    ) + copies / np.where(stage == 3, d, 1.0)
    return out


OPTIMIZER_BYTES = {"adam": 12.0, "sgd": 8.0, "muon": 8.0}
"""fp32 master weight and moments: two for Adam, one for momentum SGD and Muon (arXiv 2502.16982)."""


def activation_bytes_per_layer(workload: Workload, layout: Layout, *, experts: bool) -> tuple[Floats, Floats]:
    """Saved for one layer and micro-batch on one GPU, two numbers: as the layout has it, and when the layer
    is fully recomputed."""
    model, mask = workload.model, np.asarray(layout.recompute)
    tokens = np.asarray(layout.micro_batch) * workload.seq_len / np.asarray(layout.cp)
    tp = np.asarray(layout.tp)
    sequence = np.where(layout.sequence_parallel, tp, 1)
    narrow = 1.0 if workload.precision in ("fp8", "mxfp8", "nvfp4") else 2.0
    norms_out = (
        np.where(mask & (Recompute.LAYERNORM | Recompute.OPERATORS), 0.0, narrow * model.hidden) / sequence
    )
    saved = 2.0 * model.hidden / sequence + norms_out + _attention_saved(workload, layout, narrow)
    mlp = 2.0 * model.hidden / sequence + norms_out
    if experts:
        mlp = mlp + _moe_saved(model, layout, narrow)
    else:
        mlp = mlp + _dense_saved(model.ffn_hidden, model, layout, narrow)
        mlp = np.where(mask & Recompute.MLP, 2.0 * model.hidden / sequence, mlp)
    return tokens * (saved + mlp), tokens * 2.0 * model.hidden / sequence


def _attention_saved(workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Bytes a token: query, key, value, output, log-sum-exp; latents of MLA; scores of unfused attention.

    A score takes 5 bytes (softmax output, dropout output and its mask), and a token has one for every key of
    its sequence, also for those that other context-parallel ranks hold.
    """
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
    scores: Floats = 0.0
    if not framework_constants(workload.framework).flash_attention:
        scores = np.where(mask & Recompute.CORE_ATTENTION, 0.0, 5.0 * heads * workload.seq_len)
    rope = query + keys if model.position == "rope" and model.qk_norm else 0.0
    projected = np.where(mask & Recompute.OPERATORS, 0.5 * (query + keys), query + keys + rope)
    return projected + out + scores


def _dense_saved(width: float, model: ModelSpec, layout: Layout, narrow: float) -> Floats:
    matrices = 2.0 if model.gated else 1.0
    some = np.asarray(layout.recompute) & Recompute.OPERATORS
    out: Floats = np.where(some, matrices, 2.0 * matrices + narrow) * width / np.asarray(layout.tp)
    return out


def _moe_saved(model: ModelSpec, layout: Layout, narrow: float) -> Floats:
    """Routed activations scale with top_k and do not shrink with ep: what leaves comes back from others."""
    moe, mask = model.moe, np.asarray(layout.recompute)
    assert moe is not None
    matrices = 2.0 if model.gated else 1.0
    routed = moe.top_k / np.asarray(layout.tp)
    width = moe.moe_ffn_hidden
    activated = np.where(mask & Recompute.MOE_ACTIVATION, 0.0, narrow * width)
    saved: Floats = routed * (narrow * model.hidden + 2.0 * matrices * width + activated)
    router = 8.0 * moe.experts / np.asarray(layout.tp)
    shared = _dense_saved(moe.shared_width, model, layout, narrow) if moe.shared_width else 0.0
    return saved + router + shared


FIXED_GIB = 0.5
"""Workspaces and small buffers of the framework's allocator (SimuMax B200 rows)."""


def _transient_bytes(workload: Workload, layout: Layout) -> tuple[Floats, Floats, Floats, Floats]:
    """Four buffers: logits on the last rank; the fp32 gradient of the token table or the head; the layers
    that ZeRO-3 holds gathered, one in use and one on its way; one layer's work under full recomputation."""
    model = workload.model
    tokens = np.asarray(layout.micro_batch) * workload.seq_len / np.asarray(layout.cp)
    logit = framework_constants(workload.framework).logit_bytes
    logits = logit * tokens * model.vocab / np.asarray(layout.tp)
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    largest = 4.0 * model.vocab * model.hidden / np.asarray(layout.tp)
    sharded = (np.asarray(layout.zero_stage) == 3) & (np.asarray(layout.dp) * np.asarray(layout.cp) > 1)
    gathered = np.where(sharded, 2.0 * 2.0 * np.maximum(dense, rest + experts), 0.0)
    selective, _ = activation_bytes_per_layer(workload, layout, experts=model.moe is not None)
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    return logits, largest, gathered, np.where(full, selective, 0.0)


def stage_memory_parts_gib(
    workload: Workload, layout: Layout, stages: Stages
) -> dict[str, NDArray[np.float64]]:
    """Peak GiB of each pipeline rank by component, arrays [pp], for one layout and split."""
    model, pp = workload.model, len(stages)
    dense, expert = rank_parameters(model, layout, stages)
    shards = np.asarray(layout.dp) * np.asarray(layout.cp)
    states = dense * state_bytes_per_parameter(workload, layout, shards)
    states_expert = expert * state_bytes_per_parameter(workload, layout, layout.edp)
    full = bool(int(np.asarray(layout.recompute)) & Recompute.FULL)
    again = int(np.asarray(layout.recompute_layers)) if full else 0
    counts = layer_counts(model.dense_layers, stages, again, v_shaped=_v_shaped(layout))
    kept, dropped = activation_bytes_per_layer(workload, layout, experts=False)
    kept_moe, dropped_moe = kept, dropped
    if model.moe is not None:
        kept_moe, dropped_moe = activation_bytes_per_layer(workload, layout, experts=True)
    last = np.arange(pp) == last_rank(layout.schedule, pp)
    saved = counts.dense * kept + counts.dense_recomputed * (dropped - kept)
    saved = saved + counts.moe * kept_moe + counts.moe_recomputed * (dropped_moe - kept_moe)
    saved = saved + np.where(last, model.mtp_layers * kept_moe, 0.0)
    saved = on_both_ranks(np.asarray(saved), layout.schedule)
    logits, largest, gathered, work = _transient_bytes(workload, layout)
    parts: dict[str, Floats] = {
        "states": states,
        "expert_states": states_expert,
        "activations": saved * np.asarray(in_flight(layout, np.arange(pp))),
        "logits": np.where(last, logits * (1 + model.mtp_layers), 0.0),
        "buffers": np.where(last | (np.arange(pp) == 0), largest, 0.0) + gathered,
        "recompute_work": work,
        "buckets": _bucket_bytes(workload, layout),
        "fixed": FIXED_GIB * GIB,
    }
    return {name: np.broadcast_to(np.asarray(held) / GIB, (pp,)) for name, held in parts.items()}


def _bucket_bytes(workload: Workload, layout: Layout) -> float:
    bucketed = int(np.asarray(layout.zero_stage)) < 3
    narrow = workload.precision != "bf16"
    return framework_constants(workload.framework).bucket_gib * GIB if bucketed and narrow else 0.0


def stage_memory_gib(workload: Workload, layout: Layout, stages: Stages) -> NDArray[np.float64]:
    """Peak GiB of each pipeline rank, [pp]."""
    parts = stage_memory_parts_gib(workload, layout, stages)
    return np.asarray(np.sum(list(parts.values()), axis=0), dtype=np.float64)


CONTEXT_GIB = 1.5
"""What a process holds outside the framework's allocator: CUDA context and kernels, NCCL channels."""
ALLOCATOR_SHARE = 0.94
"""Of HBM that an allocator can fill: a caching allocator strands some in fragments, and steps slow down by 12
to 28 % when it runs out and has to flush (measured runs at over 92 % of HBM)."""


def usable_hbm_gib(workload: Workload) -> float:
    """What `stage_memory_gib` may reach on one GPU: HBM less fragments, context and the user's reserve."""
    return workload.cluster.device.hbm_gib * ALLOCATOR_SHARE - CONTEXT_GIB - workload.reserve_gib


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
    state, kept, dropped, state_l, kept_l, dropped_l = _layer_bytes(workload, flat)
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
    _, _, gathered, work = _transient_bytes(workload, flat)
    return np.asarray((out + gathered + work) / GIB + FIXED_GIB).reshape(shape)


def _layer_bytes(workload: Workload, layout: Layout) -> tuple[NDArray[np.float64], ...]:
    """Bytes of one layer: (states, activations kept, activations when recomputed in full) of a main layer,
    then of a leading dense layer of a mixture-of-experts model."""
    model = workload.model
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    per_dense = state_bytes_per_parameter(workload, layout, np.asarray(layout.dp) * np.asarray(layout.cp))
    leading = (dense * per_dense, *activation_bytes_per_layer(workload, layout, experts=False))
    main = leading
    if model.moe_layers:
        states = rest * per_dense + experts * state_bytes_per_parameter(workload, layout, layout.edp)
        main = (states, *activation_bytes_per_layer(workload, layout, experts=True))
    shape = layout.broadcast_shape()
    return tuple(np.broadcast_to(np.asarray(x, dtype=np.float64), shape) for x in (*main, *leading))
