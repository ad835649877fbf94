"""What a rank holds beside states and saved activations: loss, one layer at work, buffers, stranded blocks.

Bytes, shaped like the layout. None of it depends on how layers are dealt out to ranks, so that memory stays
linear in a rank's layers. Symbols: T tokens of a micro-batch on a rank, h hidden, V vocabulary, t tensor
parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.constants.stacks import stack_constants
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.memory.activations import (
    SavedActivations,
    activation_bytes_per_layer,
    offloaded_per_layer,
    rank_tokens,
    sequence_shards,
)
from meshwright.costmodel.memory.buffers import (
    gathered_ahead,
    layers_of_a_rank,
    offload_buffers,
    reduction_buffers,
    shards_weights,
    widest_columns,
)
from meshwright.costmodel.memory.graphs import graph_bytes
from meshwright.costmodel.memory.offloaded_activations import LAYERS_AT_HAND, offloads_any
from meshwright.costmodel.memory.profile import MemoryProfile, memory_profile
from meshwright.costmodel.memory.states import (
    layer_parameters_on_gpu,
    optimizer_shards,
    table_parameters,
)
from meshwright.costmodel.memory.token_buffers import dispatch_buffers
from meshwright.costmodel.token_dispatch import (
    GATHERS,
    SUM_BYTES,
    TOKEN_BYTES,
    gathered_ranks,
)
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.parameters import dense_mlp_parameters, expert_parameters
from meshwright.model_specs.schema import ModelSpec

FIXED_BYTES = 0.25 * 2**30
"""GEMM and attention workspaces, rotary tables, masks (cuBLAS: 32 MiB a stream on Hopper)."""

_FUSED_LOGIT_BYTES, _PLAIN_LOGIT_BYTES = 2.0, 6.0
"""Of runs that name their loss: `logit_bytes` of `costmodel/data/memory.yaml` with and without Transformer
Engine's cross entropy."""

_SCORE_FORWARD_BYTES, _PLAIN_SCORE_FORWARD_BYTES = 4.0, 12.0
"""Of a score on its way forward: scores and softmax at 16 bits; with PyTorch's operators both at 16 bits and
at 32 (Aleph-Alpha/scaling, core/nn/masked_softmax, MaskedSoftmaxTorch)."""
_SCORE_GRADIENT_BYTES, _PLAIN_SCORE_GRADIENT_BYTES = 4.0, 8.0
"""Of a score on its way back: the gradients of softmax's output and input, at 16 bits or at 32."""


def workspace_bytes(workload: Workload) -> float:
    """Memory of every GPU that no tensor of the model explains.

    docs/cost_model.md, "Memory", has the sources.

    Parameters
    ----------
    workload : Workload
        What its own runs say is used.

    Returns
    -------
    float
        Bytes.
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
    """The same for a token table or a head."""
    gathered_leading_first: Floats
    """The same for leading dense layers."""
    bucket: Floats
    """Buffers in which gradients are reduced, those on their way to the host, and those of tokens."""
    stranded: Floats
    """What a caching allocator can not use again."""
    stranded_table: Floats
    """More of it on a rank with a token table or a head."""


def transients(workload: Workload, layout: Layout, saved: SavedActivations) -> Transients:
    """Everything on a GPU beside states and saved activations.

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
        Bytes; docs/cost_model.md, "Memory", and `costmodel/data/memory.yaml` have the sources.
    """
    profile, model = memory_profile(workload.framework), workload.model
    as_laid_out, dropped = saved.main
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    largest_layer = as_laid_out
    if model.has_mean_layers:
        largest_layer = _largest_saved(workload, layout)
    layer = _layer_at_work(workload, layout, profile, np.where(full, largest_layer, 0.0))
    layer = layer + _offloaded_at_hand(workload, layout)
    zero = 0.0 * np.asarray(layer)
    table_gradient = 2.0 * np.asarray(table_parameters(model, layout))
    freed = np.where(full, dropped, as_laid_out) * (model.layers // layout.pp)
    embedding = np.where(shards_weights(layout), 0.0, np.maximum(table_gradient - freed, 0.0))
    gathered, gathered_table, gathered_leading = _weights_at_hand(workload, layout, profile)
    stranded, stranded_table = _stranded(workload, layout, profile)
    buffers = reduction_buffers(workload, layout, profile)
    buffers = buffers + offload_buffers(workload, layout, profile)
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
    for blocks in workload.model.blocks.kinds():
        kept, _ = activation_bytes_per_layer(workload, layout, experts=experts, blocks=blocks)
        saved = np.maximum(saved, kept)
    return saved


def _offloaded_at_hand(workload: Workload, layout: Layout) -> Floats:
    """Offloaded tensors that are in HBM all the same: of the layer at work, and of its neighbour."""
    largest: Floats = 0.0
    if offloads_any(workload):
        for shares in workload.model.blocks.kinds():
            largest = np.maximum(largest, offloaded_per_layer(workload, layout, shares).freed)
    return LAYERS_AT_HAND * largest


def _loss_bytes(workload: Workload, layout: Layout, profile: MemoryProfile) -> Floats:
    """max(bytes of a logit x T V / t, logits' 16-bit gradient and the head's 16-bit gradient 2 V h / t)."""
    model, tp = workload.model, np.asarray(layout.tp)
    shards = 1 if stack_constants(workload).whole_logits else tp
    logits = rank_tokens(workload, layout) * model.vocab / shards
    per_logit = np.where(tp > 1, profile.split_logit_bytes, profile.logit_bytes)
    if workload.fused_loss is not None:
        per_logit = np.asarray(_FUSED_LOGIT_BYTES if workload.fused_loss else _PLAIN_LOGIT_BYTES)
    logit_bytes = per_logit * logits
    head_gradient = 2.0 * model.vocab * model.hidden / tp
    peak = np.maximum(logit_bytes, 2.0 * logits + head_gradient)
    with_mtp: Floats = peak + logit_bytes * model.mtp_layers
    if workload.factors is not None:
        return with_mtp * workload.factors.loss_memory
    return with_mtp


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
    widest: Floats = 2.0 * widest_columns(model)
    if model.moe is not None and model.moe_layers > 0:
        gathered = 2.0 * model.hidden * np.asarray(layout.etp)
        per_copy = 2.0 * matrices * model.moe.moe_ffn_hidden + gathered
        of_experts = workload.imbalance(layout.ep) * model.moe.top_k * per_copy
        at_work = _with_gathered(workload, layout, of_experts)
        widest = np.maximum(widest, at_work) if model.has_mean_layers else at_work
    per_token = np.asarray(widest / tp + 2.0 * model.hidden)
    stack = stack_constants(workload)
    if not stack.flash_attention:
        per_score = _SCORE_GRADIENT_BYTES if stack.fused_softmax else _PLAIN_SCORE_GRADIENT_BYTES
        scores = per_score * model.heads / tp * workload.seq_len
        per_token = np.maximum(per_token, scores)
    gradients = rank_tokens(workload, layout) * per_token
    if profile.stranding == "step":
        gradients = np.maximum(gradients, restored)
    both: Floats = restored + gradients
    return both


def _with_gathered(workload: Workload, layout: Layout, of_experts: Floats) -> Floats:
    """Bytes for each token that a rank sends: experts at work, beside tokens gathered from all others.

    The gathered tokens have a buffer of their own that stays (megatron/core/tensor_parallel/mappings.py,
    use_global_buffer). Before the experts' own gradients exist, those of the gathered sums are there at 32
    bits and at 16.
    """
    if workload.moe_dispatch != GATHERS:
        return of_experts
    ranks = gathered_ranks(layout)
    each = np.where(ranks > 1, ranks * workload.model.hidden, 0.0)
    gradients = (SUM_BYTES + TOKEN_BYTES) * each
    at_work: Floats = np.maximum(of_experts, gradients) + TOKEN_BYTES * each
    return at_work


def _weights_at_hand(
    workload: Workload, layout: Layout, profile: MemoryProfile
) -> tuple[Floats, Floats, Floats]:
    """16-bit weights and weight-shaped buffers: on every rank, for a table, for leading dense layers.

    Fully sharded: one layer in use, one gathered on its way, one copied out; tables stay gathered, beside
    their gather buffer (PyTorch FSDP2, _fsdp_param_group.py: the root group is not resharded after forward).
    DeepSpeed gathers as `gathered_ahead` says. Else placeholders of the shapes of one layer, and one expert,
    where the stack keeps them.
    """
    model = workload.model
    largest: Floats = 0.0
    for blocks in model.blocks.kinds():
        dense, rest, experts = layer_parameters_on_gpu(model, layout, blocks)
        largest = np.maximum(largest, np.maximum(dense, rest + experts))
    table = np.asarray(table_parameters(model, layout))
    sharded = shards_weights(layout)
    at_hand = 3.0 * np.asarray(largest)
    if profile.reuse_elements:
        at_hand = np.asarray(gathered_ahead(model, layout, profile, largest))
    gathered = np.where(sharded, 2.0 * at_hand, 0.0)
    gathered_table = np.where(sharded, 2.0 * 2.0 * table, 0.0)
    if not profile.placeholder_gradients:
        return gathered, gathered_table, 0.0 * gathered
    shapes = _one_of_each_shape(model, layout)
    leading = 0.0
    if model.moe_layers and model.dense_layers:
        leading = 2.0 * dense_mlp_parameters(model)
    first: Floats = np.where(sharded, 0.0, leading / layout.tp)
    return np.where(sharded, gathered, 2.0 * shapes), gathered_table, first


def _one_of_each_shape(model: ModelSpec, layout: Layout) -> Floats:
    """Parameters of one main layer, of its experts only one; of unlike layers, each kind of block."""
    if model.layers_in_group > 1:
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
    if profile.stranding == "none":
        return 0.0, 0.0
    if profile.stranding == "forward":
        stranded = _stranded_forward(workload, layout)
        return stranded, 0.0 * stranded
    return _stranded_by_step(workload, layout)


def _stranded_forward(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """A layer's forward pass leaves blocks that are each smaller than a tensor of logits.

    Activation input and output, the gathered input and the partial output: 2 (m + 1) f / t + 4 h a token. The
    gathered two are not there with asynchronous tensor parallelism, which moves them in pieces.
    """
    model, tp = workload.model, np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    inner = (matrices + 1.0) * model.ffn_hidden
    if model.state_space is not None:
        inner = max(inner, float(model.state_space.projected_width + model.state_space.width))
    gathered = 4.0 * model.hidden * (0.0 if workload.overlap.tp else 1.0)
    around = np.where(tp > 1, gathered, 4.0 * model.hidden / sequence_shards(layout))
    per_token = 2.0 * inner / tp + around
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
    scores = tokens * workload.model.heads / tp * workload.seq_len
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
    widest = np.asarray(model.hidden * model.ffn_hidden / layout.tp)
    share = layers_of_a_rank(model, layout)
    shards, _ = optimizer_shards(layout)
    copies = 12.0 * np.minimum(widest, share / shards)
    with_table = 12.0 * np.minimum(table, (share + table) / shards) + 2.0 * table
    return copies, np.maximum(with_table - copies, 0.0)
