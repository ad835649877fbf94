"""Seconds of one layer of each kind, on one rank and micro-batch, by named part.

Every function takes a `Context` (workload, layouts, placements, rates) and broadcasts over layouts. T stands
for the tokens of a micro-batch that a rank holds (micro_batch * seq_len / cp), h for the hidden width.
Bytes of memory-bound operators are reads plus writes of 2-byte elements, kernels fused as in Megatron-LM
(norm, bias-dropout-add, rotary, gated activation); backward reads gradient and input, writes a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.costmodel.collectives.layer_traffic import (
    context_parallel_s,
    merge_bytes,
    tensor_parallel_s,
)
from meshwright.costmodel.collectives.on_levels import Links, all_reduce_s, ring_pass_s
from meshwright.costmodel.constants.rates import Constants
from meshwright.costmodel.layers.elementwise import ElementBytes, element_bytes
from meshwright.costmodel.layers.kernels import (
    Rates,
    attention_pair_flops,
    gemm_s,
    streamed_s,
    weight_gradient_s,
)
from meshwright.costmodel.layers.precision import GATHERED_SHARE, cast_bytes_per_element
from meshwright.costmodel.layout import Floats, Layout, Placement, Recompute
from meshwright.costmodel.workload import Workload

PARTS = ("gemm", "expert_gemm", "attention", "memory_bound", "tp_comm", "cp_comm", "ep_comm")
Parts = dict[str, Floats]

_NORMS = Recompute.LAYERNORM | Recompute.OPERATORS

SCORE_BYTES_FORWARD = 11.0
"""Unfused attention: score written and read, masked softmax, dropout and its mask, per score."""
SCORE_BYTES_BACKWARD = 16.0
LOGIT_BYTES_FORWARD = 12.0
"""Cross entropy on 32-bit logits: cast, max, exponent-sum, pick."""
LOGIT_BYTES_BACKWARD = 18.0
FUSED_LOSS_BYTES = (6.0, 4.0)
"""Transformer Engine's cross entropy on 16-bit logits: read for the sum, read and replaced by the gradient;
the backward pass scales it (transformer_engine/pytorch/triton/cross_entropy.py)."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the operators of a layer need to know."""

    workload: Workload
    layout: Layout
    placement: Placement
    constants: Constants
    rates: Rates
    links: Links

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of a micro-batch on one rank."""
        out: Floats = (
            np.asarray(self.layout.micro_batch) * self.workload.seq_len / np.asarray(self.layout.cp)
        )
        return out

    @cached_property
    def cast_bytes(self) -> float:
        """Bytes moved per element of a GEMM operand that is cast to the run's precision."""
        work, current = self.workload, self.constants.framework.current_scaling
        architecture = work.cluster.device.architecture
        return cast_bytes_per_element(work.precision, architecture, current_scaling=current)

    @cached_property
    def element_bytes(self) -> ElementBytes:
        """Bytes that the stack's memory-bound operators move."""
        stack = self.constants.framework
        return element_bytes(
            self.workload, fused=stack.fused_elementwise, eager=stack.eager_operators
        )

    @property
    def gathered_weight_bytes(self) -> float:
        """Bytes of a parameter in an all-gather; MXFP8 gathers 16 bits: rows and columns are cast apart."""
        narrow = self.constants.framework.narrow_gathers and self.workload.precision == "fp8"
        return 1.0 if narrow else 2.0

    @property
    def gathered_share(self) -> float:
        """Bytes of a gathered activation over those at 16 bits."""
        return GATHERED_SHARE.get(self.workload.precision, 1.0)

    @property
    def tp_overlaps(self) -> bool:
        """Whether GEMMs run beside their tensor-parallel transfers; Megatron-Bridge never does with NVFP4."""
        return self.workload.overlap.tp and self.workload.precision != "nvfp4"

    @cached_property
    def sequence_shards(self) -> Floats:
        """Ways that norms, residuals and dropout are split: tp with sequence parallelism, else 1."""
        out: Floats = np.where(self.layout.sequence_parallel, self.layout.tp, 1)
        return out

    @cached_property
    def tensor_pass_s(self) -> Floats:
        """One gather or scatter of a micro-batch's activations, T h of 2 bytes, over the tensor group."""
        return ring_pass_s(
            2.0 * self.tokens * self.workload.model.hidden, self.placement.tp, self.links
        )

    @cached_property
    def tensor_wait_s(self) -> Floats:
        """Wait at a blocking collective of the tensor group."""
        return np.where(
            np.asarray(self.layout.tp) > 1, self.constants.framework.collective_wait_s, 0.0
        )

    @cached_property
    def tensor_sum_s(self) -> Floats:
        """After a row-parallel product: an all-reduce; with sequence parallelism a scatter and a gather."""
        volume = 2.0 * self.tokens * self.workload.model.hidden
        reduced = all_reduce_s(volume, self.placement.tp, self.links)
        passes = (1.0 + self.gathered_share) * self.tensor_pass_s
        return self.tensor_wait_s + np.where(self.layout.sequence_parallel, passes, reduced)


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward seconds of one layer by part, and what selective recomputation runs again."""

    forward: Parts
    backward: Parts
    recompute: Parts


def add(*many: Parts) -> Parts:
    """Part-wise sum."""
    out: Parts = {}
    for parts in many:
        for name, seconds in parts.items():
            out[name] = out[name] + seconds if name in out else seconds
    return out


def scaled(parts: Parts, factor: Floats) -> Parts:
    """Part-wise product."""
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: Parts) -> Floats:
    """Sum over the parts."""
    out: Floats = sum(parts.values(), start=np.float64(0.0))
    return out


def _linear(c: Context, tokens: Floats, n: Floats, k: Floats) -> tuple[Floats, Floats]:
    """Forward, and backward (input and weight gradients), of y[tokens, n] = x[tokens, k] W."""
    forward = gemm_s(tokens, n, k, c.rates)
    return forward, gemm_s(tokens, k, n, c.rates) + weight_gradient_s(k, n, tokens, c.rates)


def quantise_bytes(c: Context, tokens: Floats, elements: Floats) -> Floats:
    """Bytes that casting GEMM operands to the run's narrower format moves; 0 at 16 bits."""
    return c.cast_bytes * tokens * elements


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
        gemm_f, gemm_b = _linear(c, tokens, q_width + kv_width, model.hidden)
        up_f = 0.0 * gemm_f
    out_width = heads * model.v_head_dim
    proj_f, proj_b = _linear(c, tokens, model.hidden, out_width)
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
    pairs = [_linear(c, local, n, k) for n, k in down] + [_linear(c, tokens, n, k) for n, k in up]
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


def dense_mlp(c: Context, width: float, *, norm: bool = True) -> LayerTime:
    """A dense feed-forward of `width`, its norm and residual; also the shared experts (then without norm)."""
    model, tokens, tp = c.workload.model, c.tokens, np.asarray(c.layout.tp)
    matrices = 2 if model.gated else 1
    local = width / tp
    up_f, up_b = _linear(c, tokens, matrices * local, model.hidden)
    down_f, down_b = _linear(c, tokens, model.hidden, local)
    moved, held = c.element_bytes, tokens * model.hidden / c.sequence_shards * norm
    act_f, act_b = tokens * local * moved.activation[0], tokens * local * moved.activation[1]
    cast_f = quantise_bytes(c, tokens, model.hidden + local)
    cast_b = quantise_bytes(c, tokens, matrices * local + model.hidden)
    none = (0.0 * up_f, 0.0 * up_f)
    tp_f, tp_b = tensor_parallel_s(c, up_f + down_f, up_b + down_b, 0.5 * up_b) if norm else none
    forward = {
        "gemm": up_f + down_f,
        "memory_bound": streamed_s(moved.around[0] * held + act_f + cast_f, c.rates),
        "tp_comm": tp_f,
    }
    backward = {
        "gemm": up_b + down_b,
        "memory_bound": streamed_s(moved.around[1] * held + act_b + cast_b, c.rates),
        "tp_comm": tp_b,
    }
    mask = np.asarray(c.layout.recompute)
    mlp = (mask & Recompute.MLP) != 0
    some = mask & Recompute.OPERATORS
    streamed = np.where(mask & _NORMS, moved.norm[0] * held, 0.0) + np.where(some, act_f, 0.0)
    # Every second matrix product runs again: of a gated block the second input; else the last, which
    # checkpointing that stops early leaves out.
    every_second = np.where(some, 0.5 * up_f, 0.0) if model.gated else 0.0 * up_f
    again = add(
        scaled(forward, np.where(mlp, 1.0, 0.0)),
        {"memory_bound": streamed_s(streamed, c.rates), "gemm": every_second},
    )
    return LayerTime(forward, backward, again)


def embedding(c: Context) -> LayerTime:
    """Table look-up and its gradient scatter; with TP the partial rows are reduced."""
    volume = c.tokens * c.workload.model.hidden
    reduce = 2.0 * c.tensor_pass_s
    forward: Parts = {"memory_bound": streamed_s(4.0 * volume, c.rates), "tp_comm": reduce}
    backward: Parts = {"memory_bound": streamed_s(8.0 * volume, c.rates), "tp_comm": 0.0 * reduce}
    return LayerTime(forward, backward, {})


def head(c: Context) -> LayerTime:
    """Final norm, LM head and vocabulary-parallel cross entropy, at 16 and 32 bits."""
    model, tokens = c.workload.model, c.tokens
    vocab = model.vocab / np.asarray(c.layout.tp)
    forward_gemm = gemm_s(tokens, vocab, model.hidden, c.rates, sixteen_bit=True)
    backward_gemm = gemm_s(
        tokens, model.hidden, vocab, c.rates, sixteen_bit=True
    ) + weight_gradient_s(model.hidden, vocab, tokens, c.rates, sixteen_bit=True)
    norm = 4.0 * tokens * model.hidden / c.sequence_shards
    logits = tokens * vocab
    fused = c.constants.framework.fused_loss
    loss_f, loss_b = FUSED_LOSS_BYTES if fused else (LOGIT_BYTES_FORWARD, LOGIT_BYTES_BACKWARD)
    gather = c.tensor_pass_s
    forward: Parts = {
        "gemm": forward_gemm,
        "memory_bound": streamed_s(norm + loss_f * logits, c.rates),
        "tp_comm": gather,
    }
    backward: Parts = {
        "gemm": backward_gemm,
        "memory_bound": streamed_s(1.5 * norm + loss_b * logits, c.rates),
        "tp_comm": 2.0 * gather,
    }
    return LayerTime(forward, backward, {})


def joined(*blocks: LayerTime) -> LayerTime:
    """Blocks run one after the other."""
    return LayerTime(
        add(*(b.forward for b in blocks)),
        add(*(b.backward for b in blocks)),
        add(*(b.recompute for b in blocks)),
    )
