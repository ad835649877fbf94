"""Seconds of the attention block of a layer, on one rank and micro-batch, by named part.

Everything broadcasts over layouts. T stands for the tokens of a micro-batch that a rank holds
(micro_batch * seq_len / cp), h for the hidden width. Bytes of memory-bound operators are reads plus writes of
2-byte elements, kernels fused as in Megatron-LM (norm, bias-dropout-add, rotary, gated activation); backward
reads gradient and input, writes a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.costmodel.activations import is_masked, norm_before_attention_apart
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.kernels import OPERAND_BYTES, attention_pair_flops, gemm_s, streamed_s
from meshwright.costmodel.layer_context import (
    CastProduct,
    Context,
    LayerTime,
    Parts,
    Passes,
    block_time,
    cast_passes,
    context_parallel_s,
    merge_bytes,
    streamed_passes_s,
    tensor_parallel_s,
)
from meshwright.costmodel.layout import Floats, Recompute
from meshwright.costmodel.lengths import share_in_window
from meshwright.costmodel.other_blocks import sparse_core_s
from meshwright.costmodel.workload import Workload, sequences_in_micro_batch
from meshwright.frameworks.catalog import framework_of_stack

_FUSED_SOFTMAX_BYTES = (11.0, 16.0)
"""Score written and read, masked softmax, dropout and its mask, per score, forward and backward."""
_UNFUSED_BYTES = (33.0, 35.0)
"""Bytes a score one operator at a time (megatron/core/fusions/fused_softmax.py, forward_torch_softmax).
Forward: score written (2), cast up (6), masked (9), softmax (8), cast down (6), read (2). Backward: gradient
written (2), cast (6), softmax (12), mask (9), cast (6). The product of queries and keys scales them (alpha of
baddbmm, megatron/core/transformer/dot_product_attention.py); by a pass of its own only layers' numbers do."""
_ODD_HEAD_FACTOR = 5.0
"""Time of an unfused GEMM whose head width is not a multiple of 8: no tensor cores."""
_GATE_BYTES = (6.0, 10.0)
"""An element of the output's gate: gate and output read, product written; backward three read, two written
(megatron/core/transformer/attention.py, _apply_output_gate)."""
_HEAD_GATE_BYTES = (4.0, 12.0)
"""An element of the output under gates of one number a head: output read, product written; backward the
gradient read and that of the output written, then both read, their product written and read for the sum over
a head (transformers 5.23, models/laguna/modeling_laguna.py, LagunaAttention, and autograd)."""
_UNDER_A_MASK = 2.0
"""Scores that a kernel computes which computes all, over those of causal attention."""
_FURTHER_PRODUCTS = 2
"""Matrices of keys and values beside that of queries."""


_PROJECTIONS = 3
"""Matrices in front of attention: queries, keys and values."""


class _Widths(NamedTuple):
    """Elements a token on one rank."""

    query: Floats
    key_value: Floats
    output: Floats
    keys: Floats
    """The keys among `key_value`."""
    gate: Floats
    """Of the gate on the output; 0 without."""
    head_gates: Floats
    """Of gates that are one number for each head; 0 without."""
    made_keys: Floats
    """Of the keys that the layer makes: all, or 0 where it reuses those of an earlier layer."""
    projected: Floats
    """Of the projections in front of attention together."""


class _Projections(NamedTuple):
    """GEMMs before and behind attention, seconds."""

    inputs: Passes
    output: Passes
    up_forward: Floats
    """Of `inputs`, the up projections of latent attention; 0 without."""


class _Core(NamedTuple):
    """Attention itself: seconds of its kernels, and score bytes that an unfused one moves besides."""

    seconds: Passes
    score_bytes: Passes


def attention_block(
    c: Context, score_share: float | None = None, *, full_rows: float = 1.0
) -> LayerTime:
    """Projections, attention itself, its norm, rotary embedding and residual; with TP and CP traffic.

    Fused attention takes the causal half of 2 b s^2 heads (d_qk + d_v) FLOP forward and 2.5 times that
    backward (Dao 2023, arXiv 2307.08691, section 4.1); unfused attention both products in full and its scores
    through HBM (Korthikanti et al. 2022, arXiv 2205.05198; megatron/core/fusions/fused_softmax.py).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    score_share : float, optional
        Score area of the layer over that of full causal attention, above 0; that of the mean of the model's
        layers by default (`window_share`). 2 where a kernel computes what the mask hides.
    full_rows : float
        Share of the rows of queries that no window cuts, 0 to 1; that of the mean layer where the area is.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch, shaped like the layouts broadcast against the
        placements.
    """
    widths = _widths(c)
    gemms = _projections(c, widths)
    if score_share is None:
        score_share = window_share(c)
        full_rows = c.workload.model.full_attention_fraction if window_cuts_rows(c) else 1.0
    core = _core_attention(c, score_share, full_rows)
    inner = _inner_bytes(c, widths)
    moved = _streamed_bytes(c, widths, inner, core.score_bytes)
    gemm = Passes(
        gemms.inputs.forward + gemms.output.forward, gemms.inputs.backward + gemms.output.backward
    )
    sent = (widths.query, widths.key_value, widths.output)
    further_sums = _FURTHER_PRODUCTS * c.constants.framework.reduces_each_input
    return block_time(
        _recomputed(c, widths, gemms, core, inner.forward),
        gemm=gemm,
        attention=core.seconds,
        memory_bound=streamed_passes_s(c, moved),
        tp_comm=tensor_parallel_s(c, gemm, 0.5 * gemms.inputs.backward, further_sums),
        cp_comm=context_parallel_s(c, sent, core.seconds),
    )


def _widths(c: Context) -> _Widths:
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    heads = model.heads / tp
    both = model.qk_head_dim + model.v_head_dim
    key_value = heads * both
    if model.attention is None:
        key_value = np.maximum(model.kv_heads / tp, 1.0) * both
    query, keys = heads * model.qk_head_dim, key_value * model.qk_head_dim / both
    gate = query * model.attention_output_gate
    head_gates = heads * model.attention_head_gates
    makes = 0.0 if model.reuses and model.attention is None else 1.0
    made = makes * (keys if model.values_are_keys else key_value)
    return _Widths(
        query=query,
        key_value=key_value,
        output=heads * model.v_head_dim,
        keys=keys,
        gate=gate,
        head_gates=head_gates,
        made_keys=makes * keys,
        projected=query + made + gate + head_gates,
    )


def _projections(c: Context, widths: _Widths) -> _Projections:
    hidden = c.workload.model.hidden
    output = linear(c, c.tokens, hidden, widths.output, {"o_proj": hidden})
    if c.workload.model.attention is not None:
        inputs, up_forward = _latent_projections(c)
        return _Projections(inputs, output, up_forward)
    inputs = linear(c, c.tokens, widths.projected, hidden, projected_outputs(c))
    return _Projections(inputs, output, 0.0 * inputs.forward)


def projected_outputs(c: Context) -> dict[str, Floats]:
    """Outputs on one rank of each matrix in front of attention, which share an input.

    Names are those of transformers (models/llama/modeling_llama.py).

    Parameters
    ----------
    c : Context
        Of a model without latent attention.

    Returns
    -------
    dict of str to float or array
        Elements a token by the name of the matrix, above 0.
    """
    widths, model = _widths(c), c.workload.model
    projected = {"q_proj": widths.query + widths.gate}
    if not model.reuses:
        projected["k_proj"] = widths.keys
        if not model.values_are_keys:
            projected["v_proj"] = widths.key_value - widths.keys
    if model.attention_head_gates:
        projected["g_proj"] = widths.head_gates
    return projected


_Matrices = list[tuple[str, Floats, float]]
"""Name of each, and widths of its output and its input."""


def latent_shapes(c: Context) -> tuple[_Matrices, _Matrices]:
    """Down and up projections of latent attention on one rank; TP splits the latter.

    Parameters
    ----------
    c : Context
        Of a model with latent attention.

    Returns
    -------
    tuple of two lists
        Name of each matrix, and the widths of its output and its input. Ranks that share a sequence take its
        down projections for their part of the tokens.
    """
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    mla = model.attention
    assert mla is not None
    q_out = model.heads / tp * model.qk_head_dim
    kv_out = model.heads / tp * (mla.qk_nope_head_dim + mla.v_head_dim)
    down: _Matrices = [
        ("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, model.hidden)
    ]
    if mla.q_lora_rank is not None:
        down.append(("q_a_proj", mla.q_lora_rank, model.hidden))
    up: _Matrices = [
        ("kv_b_proj", kv_out, mla.kv_lora_rank),
        ("q_b_proj" if mla.q_lora_rank else "q_proj", q_out, mla.q_lora_rank or model.hidden),
    ]
    if model.attention_head_gates:
        up.append(("g_proj", model.heads / tp, model.hidden))
    return down, up


def _latent_projections(c: Context) -> tuple[Passes, Floats]:
    """Down and up projections of latent attention, and the up projections forward alone."""
    (down, up), tokens = latent_shapes(c), c.tokens
    local = tokens / c.sequence_shards
    passes = [linear(c, local, n, k, {name: n}) for name, n, k in down]
    passes += [linear(c, tokens, n, k, {name: n}) for name, n, k in up]
    forward: Floats = sum(p.forward for p in passes)
    backward: Floats = sum(p.backward for p in passes)
    up_forward = sum((gemm_s(tokens, n, k, c.rates) for _, n, k in up), start=np.float64(0.0))
    return Passes(forward, backward), up_forward


_STEPWISE_ROTARY = (20.0, 30.0)
"""Of an element of queries and keys, over what one kernel moves: products with cosine and sine (8), half of
the elements negated (2), both halves joined (4), the sum (6) and a copy beside an empty rest (4); backward
the same products and negation, halves joined (4), two sums of gradients (12) and the gradients of both slices
(8); less 4 either way (megatron/core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd, and
autograd of its operators)."""


def turns_stepwise(workload: Workload) -> bool:
    """Whether rotary embeddings are one operator of PyTorch after the other beside fused ones.

    As Megatron runs them without `apply_rope_fusion` (megatron/core/models/common/embeddings/rope_utils.py,
    apply_rotary_pos_emb), and always under YaRN (megatron/training/arguments.py, validate_args). Latent
    attention turns a part of each head alone, and is priced as one kernel.

    Parameters
    ----------
    workload : Workload
        Its `stepwise_rotary`, its model and its framework are used.

    Returns
    -------
    bool
        False where neither the run nor its framework asks for it.
    """
    model = workload.model
    if model.position != "rope" or model.attention is not None:
        return False
    scaling = model.rope.scaling
    unfused = framework_of_stack(workload.framework).unfused_rope
    return bool(workload.stepwise_rotary) or (scaling is not None and scaling.type in unfused)


def _inner_bytes(c: Context, widths: _Widths) -> Passes:
    """Bytes that rotary embeddings, the norms of queries, keys or latents, and the output's gate move."""
    rotary, normed = _rotary_elements(c, widths), _normed_elements(c, widths)
    turned = (widths.query + widths.made_keys) * turns_stepwise(c.workload)
    gated = widths.output * c.workload.model.attention_head_gates
    of_each = zip(
        (*zip(c.element_bytes.rotary, c.element_bytes.norm, strict=True),),
        zip(_GATE_BYTES, _HEAD_GATE_BYTES, strict=True),
        _STEPWISE_ROTARY,
        strict=True,
    )
    return Passes(
        *(
            c.tokens
            * (
                turn * rotary
                + norm * normed
                + gate * widths.gate
                + per_head * gated
                + more * turned
            )
            for (turn, norm), (gate, per_head), more in of_each
        )
    )


def _streamed_bytes(c: Context, widths: _Widths, inner: Passes, score: Passes) -> Passes:
    """Bytes of all memory-bound operators."""
    around = c.element_bytes.around
    elements = c.hidden_elements
    further = c.workload.model.further_norms * elements
    norm_f, norm_b = c.element_bytes.norm
    cast_f, cast_b = _casts(c, widths)[0]
    if c.workload.fp8_attention:
        cast_f = cast_f + _attended_bytes(c) * (widths.query + widths.key_value)
        cast_b = cast_b + _attended_bytes(c) * widths.output
    merge_f, merge_b = merge_bytes(c, widths.query, widths.output)
    return Passes(
        around[0] * elements + norm_f * further + inner.forward + cast_f + score.forward + merge_f,
        around[1] * elements
        + norm_b * further
        + inner.backward
        + cast_b
        + score.backward
        + merge_b,
    )


def _casts(c: Context, widths: _Widths) -> tuple[Passes, Floats]:
    """Bytes of casts, and those that recomputed operators move again (`layer_context.cast_passes`)."""
    hidden = c.workload.model.hidden
    shared = Passes(hidden + widths.output, widths.projected + hidden)
    projections = [CastProduct(widths.projected, hidden, _PROJECTIONS)]
    if c.workload.model.attention is not None:
        down, up = latent_shapes(c)
        projections = [CastProduct(n, k, 1) for _, n, k in (*down, *up)]
    return cast_passes(c, c.tokens, shared, [*projections, CastProduct(hidden, widths.output, 1)])


def _attended_bytes(c: Context) -> Floats:
    """Bytes of a micro-batch to cast an element that attention in FP8 takes.

    Read at 16 bits and written at 8, in MXFP8 along rows and along columns (Transformer Engine, pull requests
    768 and 2719).
    """
    ways, written = (2.0, OPERAND_BYTES["mxfp8"]) if c.workload.precision == "mxfp8" else (1.0, 1.0)
    return c.tokens * (2.0 + ways * written)


def _recomputed(
    c: Context, widths: _Widths, gemms: _Projections, core: _Core, inner_bytes: Floats
) -> Parts:
    """What selective recomputation runs again.

    Operator-level recomputation runs every second matrix product again: the keys' and the output's.
    """
    mask = np.asarray(c.layout.recompute)
    norm_bytes = c.element_bytes.norm[0] * c.hidden_elements
    of_norm = mask & int(Recompute.OPERATORS)
    if norm_before_attention_apart(c.workload.model):
        of_norm = mask & int(Recompute.OPERATORS | Recompute.LAYERNORM)
    of_core = mask & int(Recompute.CORE_ATTENTION)
    of_inner = mask & int(Recompute.MLA_UP_PROJECTION | Recompute.OPERATORS)
    keys_s = gemms.inputs.forward * widths.made_keys / widths.projected
    every_second = gemms.output.forward + keys_s
    streamed = np.where(of_norm, streamed_s(norm_bytes, c.rates), 0.0)
    by_operators = mask & int(Recompute.OPERATORS)
    streamed = streamed + np.where(by_operators, streamed_s(_casts(c, widths)[1], c.rates), 0.0)
    streamed = streamed + np.where(of_core, streamed_s(core.score_bytes.forward, c.rates), 0.0)
    streamed = streamed + np.where(of_inner, streamed_s(inner_bytes, c.rates), 0.0)
    up_s = np.where(mask & int(Recompute.MLA_UP_PROJECTION), gemms.up_forward, 0.0)
    return {
        "attention": np.where(of_core, core.seconds.forward, 0.0),
        "memory_bound": streamed,
        "gemm": up_s + np.where(by_operators, every_second, 0.0),
    }


def _rotary_elements(c: Context, widths: _Widths) -> Floats:
    """Elements a token that the rotary embedding reads and writes (2 bytes each way).

    Latent attention rotates the position part of each query in place and writes keys out of the latent, with
    one shared position part, next to the values.
    """
    model = c.workload.model
    mla = model.attention
    if model.position != "rope":
        return 0.0 * np.asarray(widths.query)
    if mla is None:
        return np.asarray(widths.query + widths.key_value * (not model.reuses))
    if mla.indexer is not None:
        # Queries that absorbed the up-projection are copied behind their rotated part.
        return (2.0 * mla.qk_rope_head_dim + mla.kv_lora_rank) * model.heads / c.layout.tp
    written = model.qk_head_dim + mla.v_head_dim
    per_head = mla.qk_rope_head_dim + 0.5 * (mla.qk_nope_head_dim + mla.v_head_dim + written)
    return per_head * model.heads / c.layout.tp


def _normed_elements(c: Context, widths: _Widths) -> Floats:
    """Elements a token under the norms of queries and keys, or of the latents that they are made from."""
    model = c.workload.model
    if model.attention is not None:
        ranks = (model.attention.q_lora_rank or 0) + model.attention.kv_lora_rank
        return ranks / np.asarray(c.sequence_shards)
    if model.qk_norm:
        values = (widths.key_value - widths.keys) * (model.value_norm and not model.reuses)
        return np.asarray(widths.query + widths.made_keys + values)
    return 0.0 * np.asarray(widths.query)


def _core_attention(c: Context, score_share: float, full_rows: float) -> _Core:
    model, seq = c.workload.model, c.workload.seq_len
    if model.indexer is not None:
        seconds = sparse_core_s(c)
        none = 0.0 * seconds.forward
        return _Core(seconds, Passes(none, none))
    heads, shards = model.heads / c.layout.tp, np.asarray(c.layout.cp)
    batch = sequences_in_micro_batch(c.workload, c.layout)
    flops = attention_pair_flops(seq, seq, heads, model.qk_head_dim, model.v_head_dim)
    flops = batch * flops / shards
    if c.constants.framework.memory_efficient:
        return _memory_efficient_core(c, flops * score_share, score_share > 1.0)
    if c.constants.framework.flash_attention:
        return _fused_core(c, flops, (score_share, full_rows), heads * batch * (seq / shards))
    scores = batch * heads * float(seq) * seq / shards
    odd = _ODD_HEAD_FACTOR if model.qk_head_dim % 8 != 0 else 1.0
    depth = model.qk_head_dim / (model.qk_head_dim + c.rates.gemm_half_k)
    gemm = flops / c.rates.head_gemm_flops * odd / depth
    moved = _FUSED_SOFTMAX_BYTES if c.constants.framework.fused_softmax else _UNFUSED_BYTES
    score_bytes = Passes(moved[0] * scores, moved[1] * scores)
    return _Core(Passes(gemm, 2.0 * gemm), score_bytes)


_QUERY_BLOCK = 128.0
"""Queries of a head that one thread block of fused attention works on."""


def _fused_core(c: Context, flops: Floats, shares: tuple[float, float], queries: Floats) -> _Core:
    """Fused attention: a share of the causal half of `flops`, slower with few queries for the SMs.

    The backward pass has 2.5 times the FLOP (Dao 2023, arXiv 2307.08691, section 4.1). A row of queries that
    no window cuts takes as long as some keys more, however many it has (`Rates.attention_forward_keys`);
    `shares` are those of the area and of such rows.
    """
    model, rates, shared = c.workload.model, c.rates, c.constants.shared
    causal = 0.5 * flops
    # FlashAttention-2 issues Ampere's instructions: products bind it, not the exponentials of narrow heads.
    waits_for_exponentials = model.qk_head_dim <= 64 and c.constants.framework.flash_generation > 2
    narrow = c.constants.device.narrow_head_factor if waits_for_exponentials else 1.0
    if model.attention_sinks:
        narrow *= shared["sink_attention_factor"]
    # SMs idle for half of the last wave in the mean.
    idle = 1.0 + 0.5 * rates.sms * _QUERY_BLOCK / np.maximum(queries, _QUERY_BLOCK)
    area, full_rows = shares
    of_all = area + full_rows * rates.attention_forward_keys / c.workload.seq_len
    of_all_backward = area + full_rows * rates.attention_backward_keys / c.workload.seq_len
    forward = idle * narrow * of_all * causal / rates.attention_forward_flops
    backward = idle * narrow * of_all_backward * 2.5 * causal / rates.attention_backward_flops
    none = 0.0 * forward
    return _Core(Passes(forward, backward), Passes(none, none))


_MASK_BYTES = 1.0 + 2.0
"""Of a score under a mask: its truth value is read, and written as what is added to the score at 16 bits
(torch, aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask)."""


def _memory_efficient_core(c: Context, flops: Floats, masked: bool) -> _Core:
    """PyTorch's memory-efficient kernel, with keys and values repeated for every query head of theirs.

    The kernel knows causal masks, and computes half of the scores under one; under any other mask, which is
    a matrix, it computes all (transformers 5.23, integrations/sdpa_attention.py, use_gqa_in_sdpa and
    repeat_kv; masking_utils.py, _ignore_causal_mask_sdpa). Its rate has the FLOP of both passes.
    """
    model, rates = c.workload.model, c.rates
    causal = 0.5 * flops
    forward = causal / rates.attention_forward_flops
    backward = 2.5 * causal / rates.attention_backward_flops
    both = model.qk_head_dim + model.v_head_dim
    key_value = np.maximum(model.kv_heads / np.asarray(c.layout.tp), 1.0) * both
    repeated = 2.0 * c.tokens * (key_value + model.heads / np.asarray(c.layout.tp) * both)
    mask = _MASK_BYTES * c.tokens * c.workload.seq_len * masked
    return _Core(Passes(forward, backward), Passes(repeated + mask, repeated))


def unlike_attention_s(c: Context, *, fully_recomputed: bool = True) -> Floats:
    """Seconds of a micro-batch in which packs of unlike samples differ: those of fused softmax attention.

    Of all layers, spread evenly over the pipeline, with what selective or full recomputation computes again.
    Unfused attention computes every score of a pack, masked or not, and so does the memory-efficient kernel:
    its packs are alike.

    Parameters
    ----------
    c : Context
        Workload, layouts and rates.
    fully_recomputed : bool
        Whether the layers count that are computed again in full.

    Returns
    -------
    float or array
        Of one pipeline rank, at least 0; 0 where packs are alike.
    """
    model, layout, lengths = c.workload.model, c.layout, c.workload.lengths
    stack = c.constants.framework
    if lengths is None or lengths.alike or stack.memory_efficient or not stack.flash_attention:
        return 0.0
    full, windowed = model.full_attention_layers, model.windowed_layers
    if not full + windowed:
        return 0.0
    share = (full * full_share(c) + windowed * one_window_share(c)) / (full + windowed)
    # What rows take beside their keys is the same in every pack.
    core = _core_attention(c, share, 0.0).seconds
    mask = np.asarray(layout.recompute)
    chunks = np.asarray(layout.pp) * np.asarray(layout.vpp)
    recomputed = (
        np.minimum(np.asarray(layout.recompute_layers) * chunks, model.layers) / model.layers
    )
    recomputed = recomputed * c.constants.framework.recompute_fraction
    forward_passes = 1.0 + np.where(mask & int(Recompute.FULL), recomputed, 0.0) * fully_recomputed
    forward_passes = forward_passes + np.where(mask & int(Recompute.CORE_ATTENTION), 1.0, 0.0)
    layers = full + windowed + model.mtp_layers * model.mtp_kind.blocks.attention
    seconds: Floats = layers * (forward_passes * core.forward + core.backward) / layout.pp
    return seconds


def full_share(c: Context) -> float:
    """Score area of a layer without a window over that of full causal attention of the whole sequence.

    Parameters
    ----------
    c : Context
        Its workload says what a sequence holds.

    Returns
    -------
    float
        Above 0, at most 1; 1 where a sequence is one sample. 2 where a pack has a mask that a kernel computes
        in full.
    """
    if c.constants.framework.memory_efficient and c.workload.lengths is not None:
        return _UNDER_A_MASK
    return 1.0 if c.workload.lengths is None else c.workload.lengths.attended_share


def window_share(c: Context) -> float:
    """Score area of the model's layers, windowed and full, over that of full causal attention.

    Derived here: a window of w keeps w - w^2 / (2 s) of the s / 2 keys that a query sees on average; chunks
    of w keep w / 2; `one_window_share` adds what blocks of queries compute beside them.

    Parameters
    ----------
    c : Context
        Its workload has the model and the sequence length s.

    Returns
    -------
    float
        Above 0, at most 1; 1 without windows.
    """
    full = c.workload.model.full_attention_fraction
    windowed, share = one_window_share(c), full_share(c)
    return share if windowed == share else full * share + (1.0 - full) * windowed


def window_cuts_rows(c: Context) -> bool:
    """Whether layers with a window attend to less than those without.

    Parameters
    ----------
    c : Context
        Its workload has the model, the sequence length and the packs.

    Returns
    -------
    bool
        False where no window is shorter than what is attended to.
    """
    return one_window_share(c) < full_share(c)


def one_window_share(c: Context) -> float:
    """Score area of a layer with a window over that of full causal attention (`lengths.share_in_window`).

    Parameters
    ----------
    c : Context
        Its workload has the model and the sequence length.

    Returns
    -------
    float
        Above 0, at most 1; 1 without windows. 2 where its mask is one that a kernel computes in full.
    """
    model, seq = c.workload.model, c.workload.seq_len
    if c.constants.framework.memory_efficient and is_masked(c.workload, windowed=True):
        return _UNDER_A_MASK
    if c.workload.lengths is not None:
        return c.workload.lengths.windowed_share
    chunked = model.chunked_windows and not framework_of_stack(c.workload.framework).slides_chunks
    return share_in_window(seq, model.sliding_window, chunked=chunked)
