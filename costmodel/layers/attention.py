"""Seconds of one layer of each kind, on one rank and micro-batch, by named part.

Every function takes a `Context` (workload, layouts, placements, rates) and broadcasts over layouts. T stands
for the tokens of a micro-batch that a rank holds (micro_batch * seq_len / cp), h for the hidden width.
Bytes of memory-bound operators are reads plus writes of 2-byte elements, kernels fused as in Megatron-LM
(norm, bias-dropout-add, rotary, gated activation); backward reads gradient and input, writes a gradient.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.exposed import context_parallel_s, merge_bytes, tensor_parallel_s
from meshwright.costmodel.layers.feed_forward import linear
from meshwright.costmodel.layers.kernels import attention_pair_flops, gemm_s, streamed_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts
from meshwright.costmodel.layout import Floats, Recompute

_NORMS = Recompute.LAYERNORM | Recompute.OPERATORS


SCORE_BYTES_FORWARD = 11.0
"""Unfused attention: score written and read, masked softmax, dropout and its mask, per score."""


SCORE_BYTES_BACKWARD = 16.0


def attention_block(c: Context) -> LayerTime:
    """Projections, attention itself, its norm, rotary embedding and residual; with TP and CP traffic."""
    model, tp, tokens = c.workload.model, np.asarray(c.layout.tp), c.tokens
    heads = model.heads / tp
    q_width = heads * model.qk_head_dim
    if model.attention is not None:
        gemm_f, gemm_b, up_f = _mla_projections(c)
        kv_width = heads * (model.qk_head_dim + model.v_head_dim)
    else:
        kv_width = np.maximum(model.kv_heads / tp, 1.0) * (model.qk_head_dim + model.v_head_dim)
        gemm_f, gemm_b = linear(c, tokens, q_width + kv_width, model.hidden)
        up_f = 0.0 * gemm_f
    out_width = heads * model.v_head_dim
    proj_f, proj_b = linear(c, tokens, model.hidden, out_width)
    core_f, core_b, score_f, score_b = _core_attention(c)
    moved, held = c.element_bytes, tokens * model.hidden / c.sequence_shards
    rotary, normed = _rotary_elements(c, q_width, kv_width), _normed_elements(c, q_width, kv_width)
    cast_f = quantise_bytes(c, tokens, model.hidden + out_width)
    cast_b = quantise_bytes(c, tokens, q_width + kv_width + model.hidden)
    merge_f, merge_b = merge_bytes(c, q_width, out_width)
    inner_f, inner_b = (
        tokens * (moved.rotary[way] * rotary + moved.norm[way] * normed) for way in (0, 1)
    )
    memory_f = streamed_s(moved.around[0] * held + inner_f + cast_f + score_f + merge_f, c.rates)
    memory_b = streamed_s(moved.around[1] * held + inner_b + cast_b + score_b + merge_b, c.rates)
    tp_f, tp_b = tensor_parallel_s(c, gemm_f + proj_f, gemm_b + proj_b, 0.5 * gemm_b)
    cp_f, cp_b = context_parallel_s(c, (q_width, kv_width, out_width), (core_f, core_b))
    forward = {
        "gemm": gemm_f + proj_f,
        "attention": core_f,
        "memory_bound": memory_f,
        "tp_comm": tp_f,
        "cp_comm": cp_f,
    }
    backward = {
        "gemm": gemm_b + proj_b,
        "attention": core_b,
        "memory_bound": memory_b,
        "tp_comm": tp_b,
        "cp_comm": cp_b,
    }
    mask = np.asarray(c.layout.recompute)
    inner = mask & (Recompute.MLA_UP_PROJECTION | Recompute.OPERATORS)
    keys = kv_width * model.qk_head_dim / (model.qk_head_dim + model.v_head_dim)
    every_second = proj_f + gemm_f * keys / (q_width + kv_width)
    again: Parts = {
        "attention": np.where(mask & Recompute.CORE_ATTENTION, core_f, 0.0),
        "memory_bound": np.where(mask & _NORMS, streamed_s(moved.norm[0] * held, c.rates), 0.0)
        + np.where(mask & Recompute.CORE_ATTENTION, streamed_s(score_f, c.rates), 0.0)
        + np.where(inner, streamed_s(inner_f, c.rates), 0.0),
        "gemm": np.where(mask & Recompute.MLA_UP_PROJECTION, up_f, 0.0)
        + np.where(mask & Recompute.OPERATORS, every_second, 0.0),
    }
    return LayerTime(forward, backward, again)


def _rotary_elements(c: Context, q_width: Floats, kv_width: Floats) -> Floats:
    """Elements a token that the rotary embedding reads and writes (2 bytes each way).

    Latent attention rotates the position part of each query in place and writes keys out of the latent, with
    one shared position part, next to the values.
    """
    model = c.workload.model
    mla = model.attention
    if model.position != "rope":
        return 0.0 * np.asarray(q_width)
    if mla is None:
        return np.asarray(q_width + kv_width)
    written = model.qk_head_dim + mla.v_head_dim
    each = mla.qk_rope_head_dim + 0.5 * (mla.qk_nope_head_dim + mla.v_head_dim + written)
    return each * model.heads / np.asarray(c.layout.tp)


def _normed_elements(c: Context, q_width: Floats, kv_width: Floats) -> Floats:
    """Elements a token under the norms of queries and keys, or of the latents that they are made from."""
    model = c.workload.model
    if model.attention is not None:
        ranks = (model.attention.q_lora_rank or 0) + model.attention.kv_lora_rank
        return ranks / np.asarray(c.sequence_shards)
    keys = kv_width * model.qk_head_dim / (model.qk_head_dim + model.v_head_dim)
    return np.asarray(q_width + keys) if model.qk_norm else 0.0 * np.asarray(q_width)


def _mla_projections(c: Context) -> tuple[Floats, Floats, Floats]:
    """Down and up projections of latent attention; the down projections are not split by TP."""
    model, tokens, tp = c.workload.model, c.tokens, np.asarray(c.layout.tp)
    mla = model.attention
    assert mla is not None
    q_out = model.heads / tp * model.qk_head_dim
    kv_out = model.heads / tp * (mla.qk_nope_head_dim + mla.v_head_dim)
    down: list[tuple[Floats, float]] = [(mla.kv_lora_rank + mla.qk_rope_head_dim, model.hidden)]
    up: list[tuple[Floats, float]] = [(kv_out, mla.kv_lora_rank)]
    up.append((q_out, mla.q_lora_rank or model.hidden))
    if mla.q_lora_rank is not None:
        down.append((mla.q_lora_rank, model.hidden))
    local = tokens / c.sequence_shards
    pairs = [linear(c, local, n, k) for n, k in down] + [linear(c, tokens, n, k) for n, k in up]
    up_forward = sum((gemm_s(tokens, n, k, c.rates) for n, k in up), start=np.float64(0.0))
    return sum(p[0] for p in pairs), sum(p[1] for p in pairs), up_forward


def _core_attention(c: Context) -> tuple[Floats, Floats, Floats, Floats]:
    """Forward and backward seconds of attention kernels, and the score bytes that an unfused one moves."""
    model, seq = c.workload.model, c.workload.seq_len
    heads, shard = model.heads / np.asarray(c.layout.tp), np.asarray(c.layout.cp)
    batch = np.asarray(c.layout.micro_batch)
    pairs = (
        batch * attention_pair_flops(seq, seq, heads, model.qk_head_dim, model.v_head_dim) / shard
    )
    if not c.constants.framework.flash_attention:
        scores = batch * heads * float(seq) * seq / shard
        odd = model.qk_head_dim % 8 != 0
        gemm = pairs / c.rates.head_gemm_flops * (5.0 if odd else 1.0)
        depth = model.qk_head_dim / (model.qk_head_dim + c.rates.gemm_half_k)
        gemm = gemm / depth
        return gemm, 2.0 * gemm, SCORE_BYTES_FORWARD * scores, SCORE_BYTES_BACKWARD * scores
    causal = 0.5 * pairs * window_share(c)
    narrow = c.constants.device.narrow_head_factor if model.qk_head_dim <= 64 else 1.0
    if model.attention_sinks:
        narrow *= c.constants.shared["sink_attention_factor"]
    blocks = np.maximum(heads * batch * (seq / shard) / 256.0, 1.0)
    idle_f = 1.0 + c.constants.shared["occupancy_forward"] * c.rates.sms / blocks
    idle_b = 1.0 + c.constants.shared["occupancy_backward"] * c.rates.sms / blocks
    most = 1.0 + c.rates.sms / blocks
    forward = narrow * causal / c.rates.attention_forward_flops * np.minimum(idle_f, most)
    backward = narrow * 2.5 * causal / c.rates.attention_backward_flops * np.minimum(idle_b, most)
    none = 0.0 * forward
    return forward, backward, none, none


def window_share(c: Context) -> float:
    """Score area of the model's layers, windowed and full, over that of full causal attention.

    A window of w keeps w - w^2 / (2 s) of the s / 2 keys that a query sees on average.
    """
    model, seq = c.workload.model, c.workload.seq_len
    if model.sliding_window is None or model.sliding_window >= seq:
        return 1.0
    w = model.sliding_window
    windowed = (w - w * w / (2.0 * seq)) / (seq / 2.0)
    full = model.full_attention_fraction
    return full + (1.0 - full) * windowed
