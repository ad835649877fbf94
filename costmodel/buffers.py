"""Buffers of a rank beside its tensors: in which weights are gathered, gradients reduced or sent to the host.

Bytes, or elements, shaped like the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.activations import (
    SavedActivations,
    activation_bytes_per_layer,
    is_masked,
    layers_at_hand,
    offloaded_per_layer,
    offloads_any,
)
from meshwright.costmodel.adapters import adapted_outputs, frozen, normed_bytes
from meshwright.costmodel.execution_names import Dispatcher
from meshwright.costmodel.layer_kinds import (
    CAST_KERNELS,
    DENSE_KERNELS,
    EXPERT_KERNELS,
    ROUTER_KERNELS,
)
from meshwright.costmodel.layout import Bools, Floats, Layout, Recompute, recomputes_experts
from meshwright.costmodel.losses import chunk_bytes, loss_held_bytes
from meshwright.costmodel.stacks import MemoryProfile, memory_profile, stack_constants
from meshwright.costmodel.states import (
    layer_parameters_on_gpu,
    optimizer_shards,
    queued_sharding,
    rank_parameters,
    reference_setting,
    table_parameters,
)
from meshwright.costmodel.workload import (
    GATHERS,
    SUM_BYTES,
    TOKEN_BYTES,
    Workload,
    gathered_ranks,
    rank_tokens,
    sequence_shards,
)
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.blocks import BlockShares
from meshwright.model_specs.parameters import dense_mlp_parameters, expert_parameters
from meshwright.model_specs.schema import ModelSpec


def _shards_weights(layout: Layout) -> Bools:
    """Whether weights are gathered before use."""
    ranks = np.asarray(layout.dp) * layout.cp
    sharded: Bools = (np.asarray(layout.zero_stage) == 3) & (ranks > 1)
    return sharded


def _widest_columns(model: ModelSpec) -> float:
    """Outputs, over all tensor ranks, of the widest product ahead of an activation function or a scan."""
    matrices = 2.0 if model.gated else 1.0
    projected = 0 if model.state_space is None else model.state_space.projected_width
    return max(matrices * model.widest_feed_forward, float(projected))


def _mean_rank_parameters(
    model: ModelSpec, layout: Layout, shares: tuple[float, float] = (1.0, 1.0)
) -> Floats:
    """Parameters of the layers of the mean pipeline rank on one GPU, before data-parallel sharding.

    `shares`: of dense parameters, and of experts', that count.
    """
    dense, rest, experts = layer_parameters_on_gpu(model, layout)
    if shares != (1.0, 1.0):
        of_dense, of_experts = shares
        dense, rest, experts = of_dense * dense, of_dense * rest, of_experts * experts
    layers = model.dense_layers * dense + model.moe_layers * (rest + experts)
    return layers / layout.pp


def _trained_on_mean_rank(workload: Workload, layout: Layout) -> Floats:
    """Parameters that have gradients: of the layers of the mean pipeline rank, with a trained token table."""
    own = _mean_rank_parameters(workload.model, layout, workload.trained_shares)
    if frozen(workload):
        return own
    return own + np.asarray(table_parameters(workload.model, layout))


def _gathered_ahead(
    model: ModelSpec, layout: Layout, profile: MemoryProfile, largest_layer: Floats
) -> Floats:
    """Weights that DeepSpeed's ZeRO 3 holds gathered, in elements.

    What is used again within the reuse distance stays: at the end of the forward pass the last layers, which
    the distance meets twice, so that they are at most half of it. Beside them are the matrix in use and the
    weights that were gathered ahead, up to a bucket and the matrix that fills it; these also in the buffer
    that they came in, from which each is copied. Its limit of live weights stops gathering ahead alone, and
    is twice what stays (DeepSpeed 0.19.8, partitioned_param_coordinator.py, __params_to_release and
    _fetch_sub_module_impl; partition_parameters.py, AllGatherCoalescedHandle).
    """
    widest = _widest_columns(model) * model.hidden / np.asarray(layout.tp)
    in_use = np.minimum(widest, largest_layer)
    whole = _mean_rank_parameters(model, layout)
    ahead = np.minimum(profile.prefetch_elements + in_use, whole)
    at_hand: Floats = np.minimum(profile.reuse_elements / 2.0 + in_use + ahead, whole) + ahead
    return at_hand


def _reduction_buffers(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """What gradients are collected in to be reduced together.

    Under ZeRO 3 a 16-bit bucket, and beside it what it holds once more, in the order of the ranks that get it
    (DeepSpeed 0.19.8, stage3.py, IPGBucketZ3; coalesced_collectives.py, reduce_scatter_coalesced). Buckets of
    Megatron-FSDP stay until the queue behind them is full or the backward pass ends (megatron-core 0.19.2,
    megatron_fsdp/param_and_grad_buffer.py, GradReducePipeline.wait_for_previous_grad_reduce and reset).
    """
    queued = queued_sharding(workload)
    if queued is not None:
        return _queued_gradients(workload, layout, queued.queue_elements)
    elements = profile.bucket_elements
    if elements and workload.bucket_mb is not None:
        elements = stack_constants(workload).gradients_in(workload.bucket_mb)
    whole = _trained_on_mean_rank(workload, layout)
    copied = np.where(_shards_weights(layout), np.minimum(elements, whole), 0.0)
    element = 4.0 if workload.precision == "bf16" else 2.0
    unsharded = np.asarray(layout.zero_stage) < 3
    return np.where(unsharded, element * elements, 2.0 * (elements + copied))


def _queued_gradients(workload: Workload, layout: Layout, queue_elements: int) -> Floats:
    """Whole gradients of ZeRO 2 and 3 that wait for their reduction, and those of the layer at work."""
    ranks = np.asarray(layout.dp) * layout.cp
    queue = queue_elements + np.asarray(_largest_layer(workload.model, layout))
    whole = _trained_on_mean_rank(workload, layout)
    waiting = float(stack_constants(workload).gradient_bytes) * np.minimum(queue, whole)
    return np.where((np.asarray(layout.zero_stage) >= 2) & (ranks > 1), waiting, 0.0)


def _largest_layer(model: ModelSpec, layout: Layout) -> Floats:
    """Parameters on one GPU, before data-parallel sharding, of the largest of unlike layers."""
    largest: Floats = 0.0
    for blocks, kind in product(model.blocks.kinds(), model.kinds_apart.values() or (model,)):
        dense, rest, experts = layer_parameters_on_gpu(kind, layout, blocks)
        largest = np.maximum(largest, np.maximum(dense, rest + experts))
    return largest


_UPLOADED_WEIGHT_BYTES = 2.0
"""Of a shard that `offload_param` keeps on the host, on its way to where it is gathered."""


def _offload_buffers(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """What an offloaded optimizer's gradients and weights pass through between the GPU and the host.

    Gradients: as much as the largest matrix (DeepSpeed). Weights under FSDP2: the shards of two layers, or of
    a token table, one being gathered and the next one's copied ahead (torch 2.13, `_fsdp_param_group.py`);
    frozen ones as they are, a token table's of 16 bits.
    """
    model = workload.model
    widest = _widest_columns(model) * model.hidden / np.asarray(layout.tp)
    largest = np.maximum(np.asarray(table_parameters(model, layout)), widest)
    offloads, stage = np.asarray(layout.optimizer_offload) > 0, np.asarray(layout.zero_stage)
    layer = _mean_rank_parameters(model, layout) * layout.pp / model.layers
    of_dense, _ = optimizer_shards(layout)
    table = np.asarray(table_parameters(model, layout))
    uploaded = np.maximum(2.0 * layer, table) / of_dense
    states = profile.upload_bytes * uploaded
    if workload.adapters is not None and profile.upload_bytes:
        trained, frozen = workload.trained_shares[0], workload.frozen_weight_bytes[0]
        of_layers = 2.0 * layer * (frozen + trained * profile.upload_bytes)
        states = np.maximum(of_layers, 2.0 * table) / of_dense
    # Two layers' shards in 16 bits, one in use and one on its way.
    parameters = _UPLOADED_WEIGHT_BYTES * uploaded if workload.offload_parameters else 0.0
    return np.where(
        offloads & (stage < 3),
        profile.offload_buffer_bytes * largest,
        np.where(offloads, states, 0.0) + parameters,
    )


# Buffers in HBM through which DeepEP and HybridEP send tokens, one set for all layers of a process.


_CHANNELS = 10
"""Half of the 20 multiprocessors that Megatron gives DeepEP (--moe-deepep-num-sms)."""
_PEERS = 8
"""LEGACY_NUM_MAX_NVL_PEERS of DeepEP."""
_NVLINK_TOKENS = ((8, 256), (64, 288), (96, 480), (128, 560), (160, 720))
"""Tokens of a channel and peer by the most ranks: get_dispatch_config of DeepEP's buffers/legacy.py."""
_RDMA_TOKENS = 128
_TOPK, _SCALES = 128, 128
_META_BYTES = 8 + _TOPK * (8 + 4) + 4 * _SCALES
"""Beside a token: its source, indices and weights of experts, and scales, at their widest."""
_BF16_BYTES, _FP32_BYTES = 2.0, 4.0
_SCALED = 128
"""Elements of a token that share a scaling factor of HybridEP."""


def dispatch_buffers(workload: Workload, layout: Layout) -> Floats:
    """Bytes of the buffers of tokens on one GPU; 0 with other dispatchers and without experts.

    Of several dispatchers each layout has that of `dispatchers_of`.

    Their sizes are what Megatron-LM asks for (megatron-core 0.19.2, core/transformer/moe/fused_a2a.py,
    get_buffer and init_hybrid_ep_buffer). DeepEP, csrc/legacy/config.hpp, get_nvl_buffer_size_hint and
    get_rdma_buffer_size_hint: a number of tokens for each channel and peer, whatever the batch. HybridEP,
    branch hybrid-ep, intranode.cu and internode_doca.cu in csrc/hybrid_ep/buffer: room for all tokens of all
    ranks of the group, which one rank may have to take, with a probability for each expert of the domain;
    between domains also the tokens of a rank, and three times those that every other domain sends to it.

    Parameters
    ----------
    workload : Workload
        Model, cluster, sequence length and dispatcher of tokens.
    layout : Layout
        One layout, or many of shape [n]; micro_batch, cp, tp, ep and etp are used.

    Returns
    -------
    float or array
        Bytes, shaped like the layout.
    """
    if not workload.other_dispatchers:
        return _buffers_of(workload.moe_dispatch, workload, layout)
    return _least_buffers(workload, layout)[1]


def dispatchers_of(workload: Workload, layout: Layout) -> list[Dispatcher]:
    """Which dispatcher each layout has: of those of one price that take its ranks, the one of the smallest
    buffers, so that no other leaves room for a faster step. The first where they are equal, or none does.

    Parameters
    ----------
    workload : Workload
        With `moe_dispatch` and `other_dispatchers`.
    layout : Layout
        Shape [n]; degrees and micro_batch are used.

    Returns
    -------
    list of str
        n names.
    """
    names = (workload.moe_dispatch, *workload.other_dispatchers)
    return [names[number] for number in np.atleast_1d(_least_buffers(workload, layout)[0])]


def _least_buffers(workload: Workload, layout: Layout) -> tuple[NDArray[np.int64], Floats]:
    """The number of the dispatcher of each layout, and its buffers; 0 where no dispatcher takes its ranks."""
    ranks, domain = np.asarray(layout.ep * layout.etp), workload.cluster.nvlink_domain
    records = framework_of_stack(workload.framework).dispatchers
    chosen, smallest = np.zeros((), dtype=np.int64), np.full((), np.inf)
    for number, name in enumerate((workload.moe_dispatch, *workload.other_dispatchers)):
        joins = records[name].joins(ranks, domain)
        size = np.where(joins, _buffers_of(name, workload, layout), np.inf)
        chosen = np.where(size < smallest, number, chosen)
        smallest = np.asarray(np.minimum(size, smallest))
    return chosen, np.where(np.isfinite(smallest), smallest, 0.0)


def _buffers_of(name: Dispatcher, workload: Workload, layout: Layout) -> Floats:
    """Of one dispatcher, 0 for those that have none."""
    moe = workload.model.moe
    ranks = np.asarray(layout.ep, dtype=np.float64) * layout.etp
    if moe is None or name not in ("deepep", "hybridep"):
        return 0.0 * ranks
    width = float(workload.model.routed_width)
    if name == "deepep":
        return np.where(ranks > 1, _deepep(ranks, width), 0.0)
    tokens = rank_tokens(workload, layout) / sequence_shards(layout)
    local = moe.experts / np.asarray(layout.ep)
    domain = max(workload.cluster.nvlink_domain, 1)
    return np.where(
        ranks > 1, _hybridep(tokens, ranks, np.minimum(ranks, domain), local, width), 0.0
    )


def _deepep(ranks: Floats, width: float) -> Floats:
    token = _BF16_BYTES * width + _META_BYTES
    tokens = np.select(
        [np.asarray(ranks) <= most for most, _ in _NVLINK_TOKENS],
        [float(count) for _, count in _NVLINK_TOKENS],
        float(_NVLINK_TOKENS[-1][1]),
    )
    nvlink = _CHANNELS * np.minimum(ranks, _PEERS) * tokens * token
    nodes = np.where(np.asarray(ranks) > _PEERS, np.asarray(ranks) / _PEERS, 0.0)
    rdma = 2.0 * _CHANNELS * nodes * _RDMA_TOKENS * (token + 16.0)
    return np.asarray(nvlink + rdma, dtype=np.float64)


def _hybridep(tokens: Floats, ranks: Floats, inside: Floats, local: Floats, width: float) -> Floats:
    """`inside`: ranks of the group in one domain; `local`: experts of a rank; `width` of what is sent."""
    scales = _FP32_BYTES * width / _SCALED
    token, chosen = _BF16_BYTES * width, _FP32_BYTES * np.asarray(local)
    at_worst = tokens * ranks * (token + chosen * inside + scales)
    others = np.asarray(ranks) / inside - 1.0
    own = np.where(others > 0, tokens * (token + chosen * ranks + scales), 0.0)
    received = tokens * others * (3.0 * (token + chosen * inside) + scales)
    return at_worst + own + received


# What CUDA graphs hold in HBM.


_NODE_BYTES = 10.0 * 1024.0
"""Of a kernel in an instantiated graph (NVIDIA/cccl pull request 3768: 'around 10KB per kernel node')."""
_PROJECTION_NODES = 3.0
"""Of a projection around experts that have them: a product forward and two backward. The one ahead of the
dispatch is captured with its preparation."""


def graph_bytes(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """Records of the kernels in the CUDA graphs of a pipeline rank with its mean share of layers.

    10 KiB a kernel (NVIDIA/cccl pull request 3768). A graph of the whole step holds every micro-batch. Graphs
    of single layers are captured for each micro-batch of a pipeline, and once without
    (megatron/core/transformer/cuda_graphs.py, TECudaGraphHelper).

    Parameters
    ----------
    workload : Workload
        Its graphs, model and precision are used.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of float
        Bytes on one GPU, shaped like the layout; 0 without graphs.
    """
    layers = workload.model.layers / np.asarray(layout.pp, dtype=np.float64)
    captured = np.where(np.asarray(layout.pp) > 1, layout.num_micro_batches, 1)
    if workload.cuda_graph == "full":
        captured = np.asarray(layout.num_micro_batches)
    return np.asarray(_NODE_BYTES * _nodes_per_layer(workload) * layers * captured)


def _nodes_per_layer(workload: Workload) -> float:
    """Kernels of a layer and micro-batch that graphs launch."""
    scope, experts = workload.cuda_graph, workload.model.moe is not None
    if scope == "none":
        return 0.0
    blocks = workload.model.blocks
    router = blocks.experts * ROUTER_KERNELS if experts else 0.0
    if scope == "feed_forward":
        return router or blocks.feed_forward * DENSE_KERNELS / 2.0
    casts = CAST_KERNELS if workload.precision not in ("bf16", "fp16") else 0.0
    attention = 0.5 * blocks.total * (DENSE_KERNELS + casts) + router
    if workload.model.moe is None:
        return attention
    projections = _PROJECTION_NODES * (workload.model.latent_size is not None)
    if scope != "full":
        return attention + blocks.experts * projections
    return attention + blocks.experts * (EXPERT_KERNELS + 2.0 * projections)


# What a rank holds beside states and saved activations: loss, one layer at work, buffers, stranded blocks.
#
# None of it depends on how layers are dealt out to ranks, so that memory stays linear in a rank's layers.
# Symbols: T tokens of a micro-batch on a rank, h hidden, V vocabulary, t tensor parallel degree.


FIXED_BYTES = 0.25 * 2**30
"""GEMM and attention workspaces, rotary tables, masks (cuBLAS: 32 MiB a stream on Hopper)."""

_FUSED_LOGIT_BYTES = 2.0
"""Of a logit at the peak of Transformer Engine's cross entropy, whose gradient overwrites 16-bit ones."""
_STEPWISE_LOGIT_BYTES = 6.0
"""Of a logit at the peak of Megatron's cross entropy run step by step: a 32-bit copy that becomes softmax and
gradient in its place, and the gradient at 16 bits (megatron/core/tensor_parallel/cross_entropy.py)."""
_COMPILED_LOGIT_BYTES = 10.0
"""Of a logit at the peak of the same compiled: softmax at 32 bits, a second tensor of 32 bits which the
compiler makes for the gradient, as that is scattered into, and the gradient at 16 bits (megatron-core 0.19.2,
core/fusions/fused_cross_entropy.py, calculate_gradients, as torch 2.13 compiles it; Megatron-LM at 0cb4a9c8
says so in that file, and avoids it)."""
_ONE_KERNEL_LOGIT_BYTES = 4.0
"""Of a logit at the peak of PyTorch's cross entropy in one kernel: logits and their gradient at 16 bits, no
copy at 32 (torchtitan 0.1.0, components/loss.py, under torch.compile)."""
_SOFTMAX_BYTES = 4.0
"""Of a logit that Megatron's own cross entropy keeps until its backward pass."""

_SCORE_FORWARD_BYTES, _PLAIN_SCORE_FORWARD_BYTES = 4.0, 12.0
"""Of a score on its way forward: scores and softmax at 16 bits; with PyTorch's operators both at 16 bits and
at 32 (Aleph-Alpha/scaling, core/nn/masked_softmax, MaskedSoftmaxTorch)."""
_SCORE_GRADIENT_BYTES, _PLAIN_SCORE_GRADIENT_BYTES = 4.0, 8.0
"""Of a score on its way back: the gradients of softmax's output and input, at 16 bits or at 32."""


def workspace_bytes(workload: Workload) -> float:
    """Memory of every GPU that no tensor of the model explains: workspaces, rotary tables and masks.

    0.25 GiB (`FIXED_BYTES`; docs/cost_model.md, "Memory"); a calibration adds what the user's own runs
    showed.

    Parameters
    ----------
    workload : Workload
        The factors of its calibration are used.

    Returns
    -------
    float
        Bytes, at least 0.25 GiB.
    """
    if workload.factors is None:
        return FIXED_BYTES
    return FIXED_BYTES + workload.factors.fixed_memory_gib * 2**30


@dataclass(frozen=True)
class Transients:
    """Bytes on one GPU; `first`, `last` mark what only the rank with the token table, or the head, has."""

    loss_last: Floats
    """Logits and, where it can exist beside them, the gradient of the head."""
    head_input_last: Floats
    """Input of the head, kept for its backward pass."""
    layer: Floats
    """One layer on its way back: what full recomputation brings back, and gradients of activations."""
    embedding_first: Floats
    """Gradient of the token table of one micro-batch, less the activations that are gone by then."""
    gathered: Floats
    """Weights, placeholders and CUDA graphs that every rank holds."""
    gathered_table: Floats
    """Gathered weights of a token table or a head."""
    gathered_leading_first: Floats
    """Placeholders of the weights of leading dense layers."""
    bucket: Floats
    """Buffers in which gradients are reduced, those on their way to the host, and those of tokens."""
    stranded: Floats
    """Blocks that a caching allocator cannot use again."""
    stranded_table: Floats
    """More of it on a rank with a token table or a head."""


def transients(workload: Workload, layout: Layout, saved: SavedActivations) -> Transients:
    """Everything on a GPU beside states and saved activations, each part as large as at its peak.

    Sources: docs/cost_model.md, "Memory", and `costmodel/data/memory.yaml`.

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
    Transients
        Bytes on one GPU, shaped like the layout.
    """
    profile, model = memory_profile(workload.framework), workload.model
    as_laid_out, dropped = saved.main
    full = layout.recomputes_layers
    largest_layer = as_laid_out
    if model.has_mean_layers:
        largest_layer = _largest_saved(workload, layout)
    brought_back = np.where(full, largest_layer, _experts_again(workload, layout))
    layer = _layer_at_work(workload, layout, profile, brought_back)
    layer = layer + _offloaded_at_hand(workload, layout)
    zero = 0.0 * np.asarray(layer)
    table_gradient = 2.0 * np.asarray(table_parameters(model, layout))
    freed = np.where(full, dropped, as_laid_out) * (model.layers // layout.pp)
    unsharded = np.maximum(table_gradient - freed, 0.0) * (not frozen(workload))
    embedding = np.where(_shards_weights(layout), 0.0, unsharded)
    gathered, gathered_table, gathered_leading = _weights_at_hand(workload, layout, profile)
    if workload.keeps_reference and reference_setting(workload).gathers_whole:
        tables = 1.0 if model.tied_embeddings else 2.0
        beside = gathered + tables * gathered_table
        layer = np.maximum(layer, _whole_reference(workload, layout) - beside)
    stranded, stranded_table = _stranded(workload, layout, profile)
    buffers = _reduction_buffers(workload, layout, profile)
    buffers = buffers + _offload_buffers(workload, layout, profile)
    buffers = buffers + dispatch_buffers(workload, layout)
    return Transients(
        loss_last=_loss_bytes(workload, layout, profile),
        head_input_last=2.0 * rank_tokens(workload, layout) * model.hidden + zero,
        layer=layer,
        embedding_first=embedding,
        gathered=gathered + graph_bytes(workload, layout),
        gathered_table=gathered_table,
        gathered_leading_first=gathered_leading,
        bucket=buffers + zero,
        stranded=stranded + zero,
        stranded_table=stranded_table + zero,
    )


def _largest_saved(workload: Workload, layout: Layout) -> Floats:
    """Saved bytes of the largest of unlike layers: recomputation brings back one at a time."""
    experts = workload.model.moe is not None
    saved: Floats = 0.0
    attends = workload.model.attention_kinds
    for blocks, attention in product(workload.model.blocks.kinds(), attends):
        kept, _ = activation_bytes_per_layer(
            workload, layout, experts=experts, blocks=blocks, attention=attention
        )
        saved = np.maximum(saved, kept)
    return saved


def _experts_again(workload: Workload, layout: Layout) -> Floats:
    """Saved bytes of one layer's experts where they are recomputed: they are back for its backward pass."""
    if not recomputes_experts(layout).any():
        return 0.0
    plain = replace(layout, recompute=np.asarray(layout.recompute) & ~int(Recompute.EXPERTS))
    experts = BlockShares(attention=0.0, mamba=0.0, feed_forward=0.0, experts=1.0)
    saved, saved_recomputed = (
        activation_bytes_per_layer(workload, each, experts=True, blocks=experts)[0]
        for each in (plain, layout)
    )
    return saved - saved_recomputed


def _offloaded_at_hand(workload: Workload, layout: Layout) -> Floats:
    """Offloaded tensors that are in HBM all the same: of the layer at work, and of its neighbours."""
    largest: Floats = 0.0
    if offloads_any(workload):
        for shares in workload.model.blocks.kinds():
            largest = np.maximum(largest, offloaded_per_layer(workload, layout, shares).freed)
    return layers_at_hand(workload) * largest


def _loss_bytes(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """max(bytes of a logit x T V / t, logits' 16-bit gradient and the head's 16-bit gradient 2 V h / t)."""
    model, tp = workload.model, np.asarray(layout.tp)
    if not workload.step_kind.has_vocabulary_head:
        return 0.0 * rank_tokens(workload, layout)
    if workload.loss is not None:
        held = loss_held_bytes(workload, rank_tokens(workload, layout))
        return held if workload.factors is None else held * workload.factors.loss_memory
    shards = 1 if stack_constants(workload).whole_logits else tp
    logits = rank_tokens(workload, layout) * model.vocab / shards
    per_logit = _bytes_of_logit(workload, layout, profile)
    losses = workload.step_kind.losses * logits
    head_gradient = 2.0 * model.vocab * model.hidden / tp * (not frozen(workload))
    peak = np.maximum(per_logit * losses, 2.0 * logits + head_gradient)
    with_mtp: Floats = peak + np.minimum(per_logit, _SOFTMAX_BYTES) * losses * model.mtp_layers
    if workload.factors is not None:
        return with_mtp * workload.factors.loss_memory
    return with_mtp


def _bytes_of_logit(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """At the peak of the loss; where the stack's profile does not say it, by how Megatron runs the loss.

    A run may say that its loss is one kernel where the stack's own is not. What is known of losses whose
    logits tensor-parallel ranks share (torch.distributed.tensor, loss_parallel) stays the stack's.
    """
    if profile.logit_bytes:
        fewer = _ONE_KERNEL_LOGIT_BYTES if workload.te_loss else np.inf
        whole = np.minimum(profile.logit_bytes, fewer)
        return np.where(np.asarray(layout.tp) > 1, profile.split_logit_bytes, whole)
    stack = stack_constants(workload)
    if stack.fused_loss:
        return _FUSED_LOGIT_BYTES
    return _STEPWISE_LOGIT_BYTES if stack.stepwise_loss else _COMPILED_LOGIT_BYTES


def _whole_reference(workload: Workload, layout: Layout) -> Floats:
    """A reference that is gathered whole, at its peak, when the trained model has saved all its activations.

    What is gathered is copied out of its buffer first (2, 2), then the pass has logits beside those of the
    trained model, which are kept at 32 bits (trl/trainer/dpo_trainer.py, _compute_loss: the trained model
    runs first; accelerate/utils/operations.py, convert_outputs_to_fp32): 4 a logit kept, and 6 as the 16-bit
    ones are widened. A loss by chunks keeps none and has a chunk's.
    """
    dense, expert = rank_parameters(workload.model, layout, None)
    parameters = np.asarray(dense) + np.asarray(expert)
    weights = np.where(_shards_weights(layout), 2.0 * parameters, 0.0)
    if workload.loss is not None:
        at_hand: Floats = weights + chunk_bytes(workload, rank_tokens(workload, layout))
        return np.maximum(2.0 * weights, at_hand)
    logits = rank_tokens(workload, layout) * workload.model.vocab / np.asarray(layout.tp)
    peak: Floats = np.maximum(2.0 * weights, weights + 6.0 * logits) + 4.0 * logits
    return peak


def _layer_at_work(
    workload: Workload, layout: Layout, profile: MemoryProfile, restored: Floats
) -> Floats:
    """Gradients of one layer's widest activations, and under full recomputation what that brings back.

    The gradient of the activation function's input exists beside everything saved, but for the input of the
    last GEMM, freed by then. `restored` is what recomputation brings back; where blocks do not merge, each of
    its tensors has a gradient of its size.
    """
    model, tp = workload.model, np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    widest: Floats = 2.0 * _widest_columns(model)
    if model.moe is not None and model.moe_layers > 0:
        gathered = 2.0 * model.routed_width * np.asarray(layout.etp)
        per_copy = 2.0 * matrices * model.moe.moe_ffn_hidden + gathered
        of_experts = workload.imbalance(layout.ep) * model.moe.top_k * per_copy
        at_work = _with_gathered(workload, layout, of_experts)
        widest = np.maximum(widest, at_work) if model.has_mean_layers else at_work
    per_token = np.asarray(widest / tp + 2.0 * model.hidden)
    stack = stack_constants(workload)
    if not stack.flash_attention:
        per_score = _SCORE_GRADIENT_BYTES if stack.fused_softmax else _PLAIN_SCORE_GRADIENT_BYTES
        scores = per_score * model.most_heads / tp * workload.seq_len
        per_token = np.maximum(per_token, scores)
    if stack.memory_efficient:
        per_token = np.maximum(per_token, _memory_efficient_at_work(model) / tp)
        if is_masked(workload, windowed=model.windowed_layers > 0):
            per_token = per_token + workload.seq_len
    gradients = rank_tokens(workload, layout) * per_token
    if profile.stranding == "step":
        gradients = np.maximum(gradients, restored)
    both: Floats = restored + gradients
    return both


def _memory_efficient_at_work(model: ModelSpec) -> float:
    """Bytes a token that the backward pass of PyTorch's memory-efficient kernel has at work.

    Gradients of queries, repeated keys and values at 16 bits, sums of them at 32 where heads are wider than a
    block of the kernel, and the gradient of the output (torch/include/ATen/native/transformers/cuda/
    mem_eff_attention/kernel_backward.h, kOutputInRF and workspace_elements_gk). Beside them lies the mask
    that all layers share, a byte a score, where there is one.
    """
    each = model.heads * (2 * model.qk_head_dim + model.v_head_dim)
    return (2.0 + 4.0) * each + 2.0 * model.heads * model.v_head_dim


def _with_gathered(workload: Workload, layout: Layout, of_experts: Floats) -> Floats:
    """Bytes for each token that a rank sends: experts at work, beside tokens gathered from all others.

    The gathered tokens have a buffer of their own that stays (megatron/core/tensor_parallel/mappings.py,
    use_global_buffer). Before the experts' own gradients exist, those of the gathered sums are there at 32
    bits and at 16.
    """
    if workload.moe_dispatch != GATHERS:
        return of_experts
    ranks = gathered_ranks(layout)
    each = np.where(ranks > 1, ranks * workload.model.routed_width, 0.0)
    gradients = (SUM_BYTES + TOKEN_BYTES) * each
    at_work: Floats = np.maximum(of_experts, gradients) + TOKEN_BYTES * each
    return at_work


def _weights_at_hand(
    workload: Workload, layout: Layout, profile: MemoryProfile
) -> tuple[Floats, Floats, Floats]:
    """16-bit weights and weight-shaped buffers: on every rank, for a table, for leading dense layers.

    Fully sharded: one layer in use, one gathered on its way, one copied out; tables stay gathered, beside
    their gather buffer (PyTorch FSDP2, _fsdp_param_group.py: the root group is not resharded after forward).
    DeepSpeed gathers as `_gathered_ahead` says. Megatron-FSDP gathers up to half its queue ahead of the layer
    in use, into the weights themselves, and has that layer's 16-bit gradients beside it before they go into
    their bucket (megatron-core 0.19.2, megatron_fsdp.py, suggested_AG_prefetch_size and _grad_acc). Else
    placeholders of the shapes of one layer, and one expert, where the stack keeps them.
    """
    model = workload.model
    largest = _largest_layer(model, layout)
    table = np.asarray(table_parameters(model, layout))
    sharded = _shards_weights(layout)
    at_hand = 3.0 * np.asarray(largest)
    if profile.reuse_elements:
        at_hand = np.asarray(_gathered_ahead(model, layout, profile, largest))
    tables = 2.0 * table
    queued = queued_sharding(workload)
    if queued is not None:
        ahead = queued.queue_elements / 2.0 + np.asarray(largest)
        at_hand = np.minimum(ahead, _mean_rank_parameters(model, layout)) + np.asarray(largest)
        tables = table
    _, element = workload.frozen_weight_bytes
    gathered = np.where(sharded, element * at_hand, 0.0)
    if workload.adapters is not None and workload.adapters.base_bits < 16:
        widened = _widest_columns(model) * model.hidden / np.asarray(layout.tp)
        gathered = gathered + np.maximum(2.0 * widened, normed_bytes(workload))
    else:
        gathered = gathered + normed_bytes(workload)
    gathered_table = np.where(sharded, 2.0 * tables, 0.0)
    if not profile.placeholder_gradients or frozen(workload):
        return gathered, gathered_table, 0.0 * gathered
    shapes = _one_of_each_shape(model, layout)
    leading = 0.0
    if model.moe_layers and model.dense_layers:
        leading = 2.0 * dense_mlp_parameters(model)
    first: Floats = np.where(sharded, 0.0, leading / layout.tp)
    return np.where(sharded, gathered, 2.0 * shapes), gathered_table, first


def _one_of_each_shape(model: ModelSpec, layout: Layout) -> Floats:
    """Parameters of one main layer, of its experts only one; of unlike layers, each kind of block."""
    if model.moe is not None and model.moe.every > 1:
        one_of_each = model.blocks._replace(feed_forward=1.0, experts=1.0)
        _, rest, _ = layer_parameters_on_gpu(model, layout, one_of_each)
        return rest + expert_parameters(model) / layout.etp
    shapes: Floats = 0.0
    for blocks in model.blocks.kinds():
        dense, rest, _ = layer_parameters_on_gpu(model, layout, blocks)
        shapes = shapes + (rest if model.moe_layers else dense)
    if model.moe_layers:
        return shapes + expert_parameters(model) / layout.etp
    return shapes


def _stranded(workload: Workload, layout: Layout, profile: MemoryProfile) -> tuple[Floats, Floats]:
    """Blocks that the allocator keeps and cannot use at the peak: on every rank, more with a table."""
    if profile.stranding == "none" or (profile.stranding == "step" and frozen(workload)):
        return 0.0, 0.0
    if profile.stranding == "forward":
        if workload.loss is not None or not workload.step_kind.has_vocabulary_head:
            # Only a tensor of all logits is larger than the blocks that a layer's forward pass leaves.
            return 0.0, 0.0
        stranded = _stranded_forward(workload, layout)
        return stranded, 0.0 * stranded
    return _stranded_by_step(workload, layout)


def _stranded_forward(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """A layer's forward pass leaves blocks that are each smaller than a tensor of logits.

    Activation input and output, the gathered input and the partial output: 2 (m + 1) f / t + 4 h a token. The
    gathered two are not there with asynchronous tensor parallelism, which moves them in pieces. Beside an
    adapter the frozen output, the adapter's and their sum are there at a time (peft/tuners/lora/layer.py,
    Linear.forward): 2 f more beside a matrix ahead of the activation function, 2 h beside an output or down
    projection.
    """
    model, tp = workload.model, np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    widest = model.widest_feed_forward
    inner = (matrices + 1.0) * widest
    if model.state_space is not None:
        inner = max(inner, float(model.state_space.projected_width + model.state_space.width))
    gathered = 4.0 * model.hidden * (0.0 if workload.tp_overlap else 1.0)
    around = np.where(tp > 1, gathered, 4.0 * model.hidden / sequence_shards(layout))
    per_token = 2.0 * inner / tp + around
    if adapted_outputs(workload, dict.fromkeys(("gate_proj", "up_proj"), 1.0)):
        per_token = per_token + 2.0 * widest / tp
    if any(adapted_outputs(workload, {name: 1.0}) for name in ("o_proj", "down_proj")):
        per_token = per_token + 2.0 * model.hidden / sequence_shards(layout)
    of_layer = np.asarray(rank_tokens(workload, layout) * per_token)
    return of_layer + _stranded_scores(workload, layout)


def _stranded_scores(workload: Workload, layout: Layout) -> Floats:
    """Blocks of attention scores that a layer's forward pass leaves, where they are smaller than the logits.

    Larger ones serve the logits (PyTorch, CUDACachingAllocator.cpp: the smallest block that is large enough).
    """
    stack, tp = stack_constants(workload), np.asarray(layout.tp)
    if stack.flash_attention:
        return 0.0
    tokens = rank_tokens(workload, layout)
    scores = tokens * workload.model.most_heads / tp * workload.seq_len
    logits = tokens * workload.model.vocab / (1 if stack.whole_logits else tp)
    per_score = _SCORE_FORWARD_BYTES if stack.fused_softmax else _PLAIN_SCORE_FORWARD_BYTES
    return np.where(scores < logits, per_score * scores, 0.0)


def _stranded_by_step(workload: Workload, layout: Layout) -> tuple[Floats, Floats]:
    """Contiguous copies of the largest gradient that the optimizer step makes.

    Overflow check and norm copy it to 4, then 8 bytes an element (DeepSpeed stage_1_and_2.py,
    _has_inf_or_nan and get_grad_norm_direct), at most a rank's partition.
    """
    model = workload.model
    table = np.asarray(table_parameters(model, layout))
    if workload.precision == "bf16":
        return 0.0, 2.0 * table
    widest = np.asarray(model.hidden * model.widest_feed_forward / layout.tp)
    share = _mean_rank_parameters(model, layout)
    shards, _ = optimizer_shards(layout)
    copies = 12.0 * np.minimum(widest, share / shards)
    with_table = 12.0 * np.minimum(table, (share + table) / shards) + 2.0 * table
    return copies, np.maximum(with_table - copies, 0.0)
