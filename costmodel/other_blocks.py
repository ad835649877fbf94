"""Seconds of blocks in place of plain attention: Mamba, Gated DeltaNet, attention to chosen positions; and of
what each layer reads beside its input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.costmodel.adapters import frozen
from meshwright.costmodel.collectives import all_reduce_s, all_to_all_s
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.kernels import gemm_s, instructions_per_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layer_context import (
    Context,
    LayerTime,
    Parts,
    Passes,
    block_time,
    quantise_bytes,
    streamed_passes_s,
    tensor_parallel_s,
)
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.workload import Workload, sequences_in_micro_batch
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.adapters import INPUTS_ACROSS, INPUTS_BACK, INPUTS_GATE
from meshwright.model_specs.blocks import (
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    SparseIndexerSpec,
)
from meshwright.model_specs.parameters import attended_positions


def _recurrent_block(
    c: Context,
    widths: tuple[Floats, Floats],
    core: Passes,
    streamed_bytes: Passes,
    *,
    gathers: bool = True,
) -> LayerTime:
    """Projections around a recurrence; context parallelism swaps tokens for heads before and behind it.

    `widths`: outputs of the projection into the block, and inputs of that out of it, on one rank. `core`:
    seconds of the recurrence. `gathers`: whether tensor parallelism gathers the block's input and adds up its
    output.
    """
    projected, width = widths
    hidden = c.workload.model.hidden
    inputs = linear(c, c.tokens, projected, hidden, {"in_proj": projected})
    output = linear(c, c.tokens, hidden, width, {"out_proj": hidden})
    gemm = Passes(inputs.forward + output.forward, inputs.backward + output.backward)
    tp_s = Passes(0.0 * gemm.forward, 0.0 * gemm.backward)
    if gathers:
        tp_s = tensor_parallel_s(c, gemm, 0.5 * inputs.backward)
    swapped = 2.0 * c.tokens * (projected + width)
    cp_s = all_to_all_s(swapped, c.placement.cp, c.links)
    return block_time(
        gemm=gemm,
        attention=core,
        memory_bound=streamed_passes_s(c, streamed_bytes),
        tp_comm=tp_s,
        cp_comm=Passes(cp_s, cp_s),
    )


def _streamed_bytes(
    c: Context,
    elements: Floats,
    operators: Sequence[tuple[Floats, tuple[float, float]]],
    cast: Passes,
) -> Passes:
    """Bytes of all memory-bound operators of a block, its norm, residual and casts among them.

    `elements` pass the norm and the residual. `operators` are those inside the block: elements a token, and
    bytes of one in either pass; `cast`: elements a token of the operands that are cast.
    """
    moved = (
        around * elements
        + c.tokens * sum(count * each[turn] for count, each in operators)
        + quantise_bytes(c, c.tokens, cast[turn])
        for turn, around in enumerate(c.element_bytes.around)
    )
    return Passes(*moved)


_CHUNKED_FLOPS_PER_SM = 0.75e12
"""FLOP/s that an SM reaches in Triton kernels of chunks, whose tiles are small and wait for one another: 0.67
to 0.89 in those of flash-linear-attention 0.5.1 with 32 to 64 heads of 128, forward and backward, on an H200
and a GB200 alike (QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt and _GB200.txt), and 0.75 to 0.82 in
the forward scan of mamba_ssm on an H100 (vllm-project/vllm pull request 27299, before fusion)."""


def _chunked_s(c: Context, positions: Floats, flops: Passes, moved: Passes) -> Passes:
    """The products of chunks or the bytes that kernels move, whichever take longer, times `positions`."""
    rates = c.rates
    of_kernels = _CHUNKED_FLOPS_PER_SM * rates.sms
    forward = np.maximum(
        flops.forward / np.minimum(of_kernels, rates.attention_forward_flops),
        moved.forward / rates.hbm_bytes_per_s,
    )
    backward = np.maximum(
        flops.backward / np.minimum(of_kernels, rates.attention_backward_flops),
        moved.backward / rates.hbm_bytes_per_s,
    )
    return Passes(positions * forward, positions * backward)


# Mamba-2, in place of attention or beside it.


_CONVOLUTION_BYTES = (4.0, 10.0)
"""An element read and written; backward the same again, input and gradient read, gradient written."""
_GATE_BYTES = (4.0, 12.0)
"""An element of the scan's output under its gate, beside what `scan_s` counts: gate read, output written
gated too; backward gate, output, input and gradient read, two gradients written."""
_NORM_BYTES = (4.0, 6.0)
"""An element under a norm: the gated output's, which Megatron runs on its own, or those of step, B and C."""
_COPY_BYTES = (4.0, 4.0)
"""An element that is brought from sequence to batch order or back, where a micro-batch has several, or a
query or key that is written once for each head of values."""


def mamba_block(c: Context) -> LayerTime:
    """A Mamba-2 block: projections, convolution, scan, gated norm, its own norm and residual.

    Read in megatron-core 0.19.2 (megatron/core/ssm/mamba_mixer.py, mamba_context_parallel.py) and in the
    kernels of state-spaces/mamba that it calls (mamba_ssm/ops/triton/ssd_combined.py). Tensor parallelism
    splits heads and groups, and context parallelism swaps tokens for heads by an all-to-all ahead of the
    convolution and one behind the norm.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has Mamba-2.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch on one rank.
    """
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    spec = model.mamba
    assert spec is not None
    widths = spec.projected_width / tp, spec.width / tp
    # One gather of the input and one sum of the output serve both, and attention has them.
    gathers = not model.mamba_beside_attention
    streamed = _mamba_streamed_bytes(c, spec)
    return _recurrent_block(c, widths, scan_s(c, spec), streamed, gathers=gathers)


def scan_s(c: Context, spec: Mamba2Spec) -> Passes:
    """The scan in chunks: its products or what they move, whichever takes longer.

    With states of n, head channels of p and chunks of q positions (Dao and Gu 2024, arXiv 2405.21060,
    section 6, listing 1), a position takes 4 n p + 2 q p FLOP a head (chunk states, their use, and the
    products inside a chunk) and 2 q n a group (C by B). Blocks are as wide as the chunk, so causal masks save
    nothing. Backward, with the states and C by B once more: 10 n p + 6 q p and 6 q n. Each kernel goes
    through HBM: 6 p + 12 n p / q + 26 bytes a head and 8 n + 8 q a group; backward 22 p + 34 n p / q + 88 and
    38 n + 24 q (state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd and
    _bwd, kernel by kernel; states, C by B and step sizes are of 4 bytes).

    Parameters
    ----------
    c : Context
        Tokens of a rank, tp and rates. Context parallelism gives a rank whole sequences of fewer heads, so
        heads times tokens are the same.
    spec : Mamba2Spec
        Heads, groups and their widths.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch.
    """
    positions_at_once = framework_of_stack(c.workload.framework).scan_positions or spec.chunk
    n, p, q = float(spec.state_dim), float(spec.head_dim), float(positions_at_once)
    heads, groups = float(spec.heads), float(spec.groups)
    flops_f = heads * (4.0 * n * p + 2.0 * q * p) + groups * 2.0 * q * n
    flops_b = heads * (10.0 * n * p + 6.0 * q * p) + groups * 6.0 * q * n
    state = n * p / q
    moved_f = heads * (6.0 * p + 12.0 * state + 26.0) + groups * (8.0 * n + 8.0 * q)
    moved_b = heads * (22.0 * p + 34.0 * state + 88.0) + groups * (38.0 * n + 24.0 * q)
    positions = c.tokens / np.asarray(c.layout.tp)
    return _chunked_s(c, positions, Passes(flops_f, flops_b), Passes(moved_f, moved_b))


def _mamba_streamed_bytes(c: Context, spec: Mamba2Spec) -> Passes:
    """As `_streamed_bytes`. megatron/core/ssm/mamba_mixer.py, _ssm_training: its fused norm is not used."""
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    width = spec.width / tp
    several = sequences_in_micro_batch(c.workload, c.layout) > 1
    operators = (
        (spec.convolved_width / tp, _CONVOLUTION_BYTES),
        (width, _GATE_BYTES),
        (width if spec.gated_norm else 0.0 * width, _NORM_BYTES),
        (np.where(several, spec.projected_width / tp + width, 0.0), _COPY_BYTES),
    )
    cast = Passes(model.hidden + width, spec.projected_width / tp + model.hidden)
    has_norm = 0.0 if model.mamba_beside_attention else 1.0
    return _streamed_bytes(c, has_norm * c.hidden_elements, operators, cast)


# Mamba-1, in place of attention.


_SCAN_BYTES = (10.0, 16.0)
"""A channel in the scan: input, step, gate read, output written bare and gated; backward gradient, input,
step, gate and output read, three gradients written."""
_SCAN_INSTRUCTIONS = (12.0, 46.0)
"""Of 32 bits, a channel and number of its state. Forward (selective_scan_fwd_kernel.cuh): B and C cast (2),
decay scaled and brought into range for the exponential (4), input times B (1), the scan by threads and back
(4), output (1). Backward (selective_scan_bwd_kernel.cuh): those 11 again, the reverse scan and its input (5),
the gradients of input, step, decay, B and C (14), and two atomic additions at an eighth of the rate (16)."""


def mamba1_block(c: Context) -> LayerTime:
    """A Mamba-1 block: four projections, convolution, scan and gate, its own norm and residual.

    Read in transformers 5.23 (models/jamba/modeling_jamba.py, JambaMambaMixer) and in the kernels of
    state-spaces/mamba that it calls (csrc/selective_scan, mamba_ssm/ops/selective_scan_interface.py). No
    framework cuts it by tensor or context parallelism.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has Mamba-1.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch on one rank.
    """
    spec, hidden = c.workload.model.mamba1, c.workload.model.hidden
    assert spec is not None
    channels, step = spec.channels, spec.step_rank
    shapes = (
        ("in_proj", spec.projected_width, hidden),
        ("x_proj", spec.selected_width, channels),
        ("dt_proj", channels, step),
        ("out_proj", hidden, channels),
    )
    return _uncut_block(c, shapes, selective_scan_s(c, spec), _mamba1_streamed_bytes(c, spec))


def _uncut_block(
    c: Context, shapes: Sequence[tuple[str, int, int]], core: Passes, streamed_bytes: Passes
) -> LayerTime:
    """A block that no framework cuts by tensor or context parallelism: products by name, outputs and inputs,
    the seconds of its core, and the bytes of its memory-bound operators."""
    products = [linear(c, c.tokens, np.float64(n), k, {name: n}) for name, n, k in shapes]
    none = 0.0 * core.forward
    return block_time(
        gemm=Passes(*(sum(seconds, start=none) for seconds in zip(*products, strict=True))),
        attention=core,
        memory_bound=streamed_passes_s(c, streamed_bytes),
    )


def selective_scan_s(c: Context, spec: Mamba1Spec) -> Passes:
    """The selective scan: sqrt(C^2 + M^2) of its instructions outside tensor cores and of what it moves.

    With D channels and states of N a token takes 12 D N instructions of 32 bits forward and 46 D N backward,
    and moves 10 D and 16 D bytes, 4 N of B and C, and 8 N D a chunk of 2,048 positions (csrc/selective_scan
    of state-spaces/mamba; Gu and Dao 2023, arXiv 2312.00752, section 3.3.2).

    Parameters
    ----------
    c : Context
        Tokens of a rank, and the device.
    spec : Mamba1Spec
        Channels and states.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch.
    """
    per_second = instructions_per_s(c.workload.cluster.device.architecture, c.rates)
    states = float(spec.channels) * spec.state_dim
    of_chunk = 8.0 * states / 2048.0
    seconds = []
    for instructions, channel_bytes in zip(_SCAN_INSTRUCTIONS, _SCAN_BYTES, strict=True):
        moved = channel_bytes * spec.channels + 4.0 * spec.state_dim + of_chunk
        per_token = np.hypot(instructions * states / per_second, moved / c.rates.hbm_bytes_per_s)
        seconds.append(c.tokens * per_token)
    return Passes(*seconds)


def _mamba1_streamed_bytes(c: Context, spec: Mamba1Spec) -> Passes:
    """As `_streamed_bytes`, the scan's own bytes aside."""
    hidden = c.workload.model.hidden
    operators = (
        (spec.channels, _CONVOLUTION_BYTES),
        (spec.selected_width * spec.inner_norms, _NORM_BYTES),
    )
    cast = Passes(hidden + spec.width, spec.projected_width + hidden)
    return _streamed_bytes(c, c.hidden_elements, operators, cast)


def saved_bytes(spec: Mamba1Spec, narrow: float) -> float:
    """Bytes a token that one Mamba-1 block keeps.

    The first projection's output, what the channels are projected to, the scan's output, and its state each
    2,048 positions (selective_scan_interface.py, SelectiveScanFn and MambaInnerFn, ctx.save_for_backward).
    With inner norms, which the fused function has no place for, also the convolution's output, the steps, the
    gated output and the normed values; without, the backward pass computes them again.

    Parameters
    ----------
    spec : Mamba1Spec
        Channels and states.
    narrow : float
        Bytes of an element of a saved GEMM input, 1 or 2.

    Returns
    -------
    float
        Bytes, above 0.
    """
    states = 8.0 * spec.channels * spec.state_dim / 2048.0
    saved = 2.0 * spec.projected_width + 2.0 * spec.selected_width + 2.0 * spec.channels + states
    if not spec.inner_norms:
        return saved
    kept_besides: Floats = (2.0 + 2.0 + narrow) * spec.channels + 2.0 * spec.selected_width
    return saved + float(kept_besides)


# Gated DeltaNet, in place of attention.


CHUNK = 64
"""Positions that a kernel works on at once (fla/ops/gated_delta_rule/chunk.py)."""
_DELTA_BACKWARD_FLOPS = 3.0
"""Products of the backward pass over those of the forward: two gradients each, and the states once more."""
_DELTA_CONVOLUTION_BYTES = (4.0, 8.0)
"""An element read and written; backward input and gradient read, gradient written, weights' sums."""
_UNIT_BYTES = (4.0, 6.0)
"""An element of a query or key that is made of unit length, as a norm."""
_GATED_NORM_BYTES = (6.0, 10.0)
"""An element of the output under its norm and gate: two read, one written; backward three and two."""


def linear_attention_block(c: Context) -> LayerTime:
    """A block of linear attention. Gated DeltaNet: projections, convolution, delta rule, gated norm, its own
    norm and residual; other kinds as `_kda_block`, `_lightning_block`, `_short_convolution_block` have them.

    Read in megatron-core 0.19.2 (megatron/core/ssm/gated_delta_net) and in the kernels of
    flash-linear-attention that it calls (fla/ops/gated_delta_rule, chunks of 64 positions). Tensor
    parallelism splits the heads, and context parallelism swaps tokens for heads by an all-to-all ahead of the
    convolution and one behind the norm.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has linear attention.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch on one rank.
    """
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    spec = model.linear_attention
    assert spec is not None
    if spec.type == "kda":
        return _kda_block(c, spec)
    if spec.type == "lightning":
        return _lightning_block(c, spec)
    if spec.type == "short_conv":
        return _short_convolution_block(c, spec)
    widths = spec.projected_width / tp, spec.value_width / tp
    return _recurrent_block(c, widths, delta_rule_s(c, spec), _delta_streamed_bytes(c, spec))


def delta_rule_s(c: Context, spec: LinearAttentionSpec) -> Passes:
    """The gated delta rule in chunks: its products or what they move, whichever takes longer.

    Per head of values and position, with keys of k, values of v and chunks of c positions (Yang et al. 2024,
    arXiv 2412.06464, section 3.3): the products inside a chunk take 2 c (3 k + 2 v) + c^2 / 3 FLOP (keys by
    keys, the inverse of its triangle, that times keys and times values, queries by keys, and these times
    values), the three with the state 6 k v. Every kernel reads and writes HBM: 7 k + 6 v elements, two of a
    state each chunk, and 12 c bytes of the triangle; backward 19 k + 15 v elements, four of a state, and 4 c
    bytes (fla/ops/gated_delta_rule/chunk.py, chunk_gated_delta_rule_fwd and _bwd, kernel by kernel).

    Parameters
    ----------
    c : Context
        Tokens of a rank, tp and rates. Context parallelism gives a rank whole sequences of fewer heads, so
        heads times tokens are the same.
    spec : LinearAttentionSpec
        Heads and their widths.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch.
    """
    keys, values = float(spec.key_head_dim), float(spec.value_head_dim)
    positions = c.tokens * spec.value_heads / np.asarray(c.layout.tp)
    state = keys * values / CHUNK
    inside = 2.0 * CHUNK * (3.0 * keys + 2.0 * values) + CHUNK * CHUNK / 3.0
    flops = inside + 6.0 * keys * values
    moved_f = 2.0 * (7.0 * keys + 6.0 * values + 2.0 * state) + 12.0 * CHUNK
    moved_b = 2.0 * (19.0 * keys + 15.0 * values + 4.0 * state) + 4.0 * CHUNK
    both = Passes(flops, _DELTA_BACKWARD_FLOPS * flops)
    return _chunked_s(c, positions, both, Passes(moved_f, moved_b))


def _delta_streamed_bytes(c: Context, spec: LinearAttentionSpec) -> Passes:
    """As `_streamed_bytes`."""
    tp = np.asarray(c.layout.tp)
    hidden = c.workload.model.hidden
    values = spec.value_width
    copied = (
        2.0 * spec.value_heads * spec.key_head_dim if spec.value_heads > spec.key_heads else 0.0
    )
    operators = (
        ((2.0 * spec.key_width + values) / tp, _DELTA_CONVOLUTION_BYTES),
        (2.0 * spec.key_width / tp, _UNIT_BYTES),
        (copied / tp, _COPY_BYTES),
        (values / tp, _GATED_NORM_BYTES),
    )
    cast = Passes(hidden + values / tp, spec.projected_width / tp + hidden)
    return _streamed_bytes(c, c.hidden_elements, operators, cast)


def _uncut_linear_attention(
    c: Context,
    spec: LinearAttentionSpec,
    shapes: Sequence[tuple[str, int, int]],
    operators: Sequence[tuple[float, tuple[float, float]]],
    core: Passes,
) -> LayerTime:
    """As `_uncut_block`; `operators` are as `_streamed_bytes` takes them."""
    hidden = c.workload.model.hidden
    cast = Passes(hidden + spec.value_width, spec.projected_width + hidden)
    return _uncut_block(c, shapes, core, _streamed_bytes(c, c.hidden_elements, operators, cast))


# Kimi Delta Attention, in place of attention.


_SUB_CHUNK = 16
"""Positions of a block inside a chunk; those above the diagonal are left out (fla/ops/kda/chunk_intra.py)."""
_DECAY_BYTES = (64.0, 88.0)
"""An element of the decays, made at 32 bits one operator at a time: a cast (6), sum (8), exponential (8), sum
(8), logarithm (8), comparison (5), choice (13), product (8). Backward: product and its factor's gradient
(24), choice (18), logarithm (12), exponential (12), sum (12), cast and the bias's gradient (10)."""
_KDA_KEPT_DECAY_BYTES = 21.0
"""An element of the decays: themselves and their running sums, which the kernels keep (4 + 4), and what
exponential, logarithm, choice and product keep (4 + 4 + 1 + 4)."""


def _kda_block(c: Context, spec: LinearAttentionSpec) -> LayerTime:
    """Nine projections, convolution, decays, the delta rule, gated norm, its own norm and residual.

    Gates without a rank come from one projection each, seven in all (models/bailing_hybrid).
    Read in transformers 5.23 (models/kimi_linear/modeling_kimi_linear.py, KimiLinearDeltaAttention) and in
    the kernels of flash-linear-attention that it calls (fla/ops/kda at bc3b101d).
    """
    hidden, rank = c.workload.model.hidden, spec.gate_rank
    keys, values, heads = spec.key_width, spec.value_width, spec.value_heads
    gates: tuple[tuple[str, int, int], ...] = (
        ("f_proj", keys, hidden),
        ("output_gate", values, hidden),
    )
    if rank is not None:
        gates = (
            ("f_a_proj", rank, hidden),
            ("f_b_proj", keys, rank),
            ("g_a_proj", rank, hidden),
            ("g_b_proj", values, rank),
        )
    shapes = (
        ("linear_q_proj", keys, hidden),
        ("linear_k_proj", keys, hidden),
        ("linear_v_proj", values, hidden),
        ("b_proj", heads, hidden),
        *gates,
        ("linear_o_proj", hidden, values),
    )
    operators = (
        (2.0 * keys + values, _COPY_BYTES),
        (2.0 * keys + values, _DELTA_CONVOLUTION_BYTES),
        (2.0 * keys + values, _COPY_BYTES),
        (2.0 * keys, _UNIT_BYTES),
        (keys, _DECAY_BYTES),
        (values, _GATED_NORM_BYTES),
    )
    return _uncut_linear_attention(c, spec, shapes, operators, kda_rule_s(c, spec))


def kda_rule_s(c: Context, spec: LinearAttentionSpec) -> Passes:
    """The delta rule with a decay for each channel of keys, in chunks: max(C, M), as `delta_rule_s`.

    Per head and position, with keys of k, values of v, chunks of c positions and of b in a block of one
    (arXiv 2510.26692, section 3.2): the two products of queries and of keys by keys take 4 c k r FLOP, r =
    (1 + b / c) / 2 of the blocks of a chunk; what else is inside it 2 c (k + 2 v) + c^2 / 3, and the three
    with the state 6 k v. Backward these of the state run again (4 k v), and with the gradients it is c (6 k +
    8 k r + 10 v) + 4 c^2 + 16 k v. Kernels move 44 k + 12 v + 8 c + 96 bytes, decays being of 4, and two
    states a chunk; backward 96 k + 30 v + 22 c and four (fla/ops/kda/chunk_fwd.py, chunk_bwd.py and
    chunk_intra.py, kernel by kernel).

    Parameters
    ----------
    c : Context
        Tokens of a rank and rates.
    spec : LinearAttentionSpec
        Heads and their widths.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch.
    """
    keys, values, size = float(spec.key_head_dim), float(spec.value_head_dim), float(CHUNK)
    blocks = 0.5 * (1.0 + _SUB_CHUNK / size)
    state = keys * values / size
    flops_f = 4.0 * size * keys * blocks + 2.0 * size * (keys + 2.0 * values) + size * size / 3.0
    flops_f += 6.0 * keys * values
    flops_b = size * (6.0 * keys + 8.0 * keys * blocks + 10.0 * values) + 4.0 * size * size
    flops_b += 16.0 * keys * values
    moved_f = 44.0 * keys + 12.0 * values + 8.0 * size + 96.0 + 4.0 * state
    moved_b = 96.0 * keys + 30.0 * values + 22.0 * size + 8.0 * state
    positions = c.tokens * spec.value_heads
    return _chunked_s(c, positions, Passes(flops_f, flops_b), Passes(moved_f, moved_b))


# Lightning attention, in place of attention.


_BLOCK_SCORE_BYTES = (20.0, 32.0)
"""A score inside a block: written (2), times its decay at 32 bits (2 + 4 read, 4 written), cast (6), read by
the product (2). Backward: gradient written (2), cast (6), times the decay (12), cast (6), three products read
it or the score (6)."""
_DECAYED_BYTES = (14.0, 22.0)
"""An element of queries or keys: decayed at 32 bits (6), cast (6), read by the product (2); backward the
gradients of both products (4), cast (6), decayed (8) and added (4)."""
_ACTIVATED_BYTES = (8.0, 10.0)
"""An element of queries, keys or values under SiLU (4) and copied to the order of heads (4); backward."""
_BLOCK_OUTPUT_BYTES = (14.0, 12.0)
"""An element of the output: the two parts written (4), added (6), laid side by side (4); backward."""
_OUTPUT_GATE_BYTES = (10.0, 16.0)
"""An element of the output: sigmoid of the gate (4), and its product with the output (6); backward."""
_BLOCK_STATE_BYTES = (24.0, 32.0)
"""An element of a state, once a block: decayed, added to, cast, and read by the product."""
_BLOCK_LAUNCHES = 16.0
"""Kernels of a block forward: four products, five products with decays, four casts, two sums, an exponential
(transformers, MiniMaxLightningAttention.forward, the loop over blocks)."""


def _lightning_block(c: Context, spec: LinearAttentionSpec) -> LayerTime:
    """Projections, products block by block, norm over all heads, gate, its own norm and residual.

    Read in transformers 5.23 (models/minimax/modeling_minimax.py, MiniMaxLightningAttention), which runs
    PyTorch's own operators in a loop over blocks: no kernel of lightning attention is called.
    """
    hidden, keys, values = c.workload.model.hidden, spec.key_width, spec.value_width
    shapes = (
        ("linear_qkv_proj", 2 * keys + values, hidden),
        ("output_gate", values, hidden),
        ("linear_o_proj", hidden, values),
    )
    state = float(spec.value_width) * spec.key_head_dim / spec.block
    operators = (
        (2.0 * keys + values, _ACTIVATED_BYTES),
        (2.0 * keys, _DECAYED_BYTES),
        (float(spec.value_heads) * spec.block, _BLOCK_SCORE_BYTES),
        (state, _BLOCK_STATE_BYTES),
        (values, _BLOCK_OUTPUT_BYTES),
        (values, _COPY_BYTES),
        (values, _NORM_BYTES),
        (values, _OUTPUT_GATE_BYTES),
    )
    return _uncut_linear_attention(c, spec, shapes, operators, lightning_products_s(c, spec))


def lightning_products_s(c: Context, spec: LinearAttentionSpec) -> Passes:
    """The four products of lightning attention in every block, at the rate of unfused attention.

    With blocks of b positions and heads of d a position takes 2 b (d + d) FLOP inside its block, all of it
    computed and half of it masked, and 4 d d with the state; backward twice that (arXiv 2501.08313,
    section 2.2.2; transformers, MiniMaxLightningAttention).

    Parameters
    ----------
    c : Context
        Tokens of a rank and rates.
    spec : LinearAttentionSpec
        Heads, their widths and the block.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch.
    """
    keys, values = float(spec.key_head_dim), float(spec.value_head_dim)
    size = float(min(spec.block, c.workload.seq_len))
    flops = 2.0 * size * (keys + values) + 4.0 * keys * values
    seconds = c.tokens * spec.value_heads * flops / c.rates.head_gemm_flops
    return Passes(seconds, 2.0 * seconds)


def block_launches(c: Context) -> Floats:
    """Kernels that a layer with lightning attention launches forward in its loop over blocks; else 0.

    transformers 5.23, models/minimax/modeling_minimax.py, MiniMaxLightningAttention.forward.

    Parameters
    ----------
    c : Context
        Its workload says how long a sequence is.

    Returns
    -------
    float
        At least 0; the sequences of a micro-batch share them.
    """
    spec = c.workload.model.linear_attention
    if spec is None or spec.type != "lightning":
        return 0.0
    return _BLOCK_LAUNCHES * -(-c.workload.seq_len // spec.block)


# A short convolution between two gates, in place of attention.


_GATING_BYTES = (6.0, 10.0)
"""An element under a gate: two read, one written; backward gradient, element and gate read, two written."""


def _short_convolution_block(c: Context, spec: LinearAttentionSpec) -> LayerTime:
    """Two projections, a gate, the convolution, a second gate and a copy; its own norm and residual.

    Read in transformers 5.23 (models/lfm2/modeling_lfm2.py, Lfm2ShortConv), which calls causal-conv1d.
    """
    hidden, width = c.workload.model.hidden, float(spec.value_width)
    shapes = (("in_proj", spec.projected_width, hidden), ("out_proj", hidden, spec.value_width))
    operators = (
        (2.0 * width, _GATING_BYTES),
        (width, _DELTA_CONVOLUTION_BYTES),
        (width, _COPY_BYTES),
    )
    none = 0.0 * c.tokens
    return _uncut_linear_attention(c, spec, shapes, operators, Passes(none, none))


def uncut_saved_bytes(spec: LinearAttentionSpec, narrow: float) -> float:
    """Bytes a token that one layer with another kind of linear attention than Gated DeltaNet keeps.

    Kimi Delta Attention: inputs and outputs of the convolution, what the decays leave, the two triangles of a
    chunk and four numbers of a head, output, gate and the input of the last projection, and what is between
    the matrices of gates (fla/ops/kda/chunk.py, ctx.save_for_backward). Lightning attention: queries, keys
    and values before and behind SiLU, decayed queries and keys, scores and states of blocks, and of the
    output the input and output of its norm, the gate and its sigmoid, and the input of the last projection. A
    short convolution: its two gates, what they multiply, its input, and the input of the last projection.

    Parameters
    ----------
    spec : LinearAttentionSpec
        Of type kda, lightning or short_conv.
    narrow : float
        Bytes of an element of a saved GEMM input, 1 or 2.

    Returns
    -------
    float
        Bytes, above 0.
    """
    keys, values, heads = spec.key_width, spec.value_width, spec.value_heads
    attended = 2.0 * keys + values
    if spec.type == "short_conv":
        return 2.0 * attended + (2.0 + 2.0 + narrow) * values
    if spec.type == "kda":
        between = 2.0 * narrow * (spec.gate_rank or 0)
        of_heads = heads * (4.0 * CHUNK + 16.0)
        kept = 4.0 * attended + _KDA_KEPT_DECAY_BYTES * keys + of_heads + between
        return kept + (4.0 + narrow) * values
    state = 2.0 * 2.0 * values * spec.key_head_dim / spec.block
    inside = 2.0 * heads * spec.block + state + 2.0 * 2.0 * keys
    return 4.0 * attended + inside + (8.0 + narrow) * values


# Attention to positions that an indexer chooses.


_HEAD_BLOCK = 64.0
"""Heads that the kernels work on at once, or padded to (dsa_cudnn_kernels.py, _flash_mla_head_padding)."""
_SPARSE_BACKWARD_FLOPS = 2.5
"""Products of the backward pass over those of the forward: scores once more, and four gradients."""
_SCORE_BYTES = 16.0
"""A score of 4 bytes, written by the indexer and read by three passes of the selection."""
_INDEXER_BYTES = (8.0, 8.0)
"""An element of the indexer's queries under rotary embedding and Hadamard transform."""


def _parts_of(workload: Workload) -> tuple[MlaSpec, SparseIndexerSpec]:
    latent = workload.model.attention
    assert latent is not None
    assert latent.indexer is not None
    return latent, latent.indexer


def _chosen(workload: Workload) -> float:
    """Positions that the kernels read for each query, those that a causal mask hides among them."""
    return float(min(_parts_of(workload)[1].top_k, workload.seq_len))


def sparse_core_s(c: Context) -> Passes:
    """Attention over the latents of the chosen positions: sqrt(C^2 + M^2) of its products and what they read.

    Read in megatron-core 0.19.2 (megatron/core/transformer/experimental_attention_variant: dsa.py,
    absorbed_mla.py, dsa_cudnn_kernels.py). Tensor parallelism splits the heads. A query makes 2 (2 r + d) k
    FLOP a head with k positions, latents of r and d elements of position, for keys and values are the latent
    itself (absorbed_mla.py); heads are padded to 64. The latents of its positions, 2 (r + d) k bytes, are
    read once for all heads, backward three times (read, read again for the gradient, gradient added).

    Parameters
    ----------
    c : Context
        Workload, layouts and rates; the model has an indexer.

    Returns
    -------
    Passes
        Seconds of one layer and micro-batch, above 0.
    """
    latent, _ = _parts_of(c.workload)
    chosen, rates = _chosen(c.workload), c.rates
    heads = np.maximum(c.workload.model.heads / np.asarray(c.layout.tp), _HEAD_BLOCK)
    keys = latent.kv_lora_rank + latent.qk_rope_head_dim
    flops = 2.0 * heads * (keys + latent.kv_lora_rank) * chosen
    read_s = 2.0 * keys * chosen / rates.hbm_bytes_per_s
    forward = np.hypot(flops / rates.attention_forward_flops, read_s)
    backward = np.hypot(
        _SPARSE_BACKWARD_FLOPS * flops / rates.attention_backward_flops, 3.0 * read_s
    )
    return Passes(c.tokens * forward, c.tokens * backward)


def indexer_block(c: Context) -> LayerTime:
    """Projections, scores of every earlier position, their selection and the loss that trains the indexer.

    Every tensor rank runs the whole indexer, over the tokens of the tensor group. With heads of D elements, H
    of them, s positions and k chosen: 2 H D FLOP an earlier position forward, 6 H D a chosen one backward,
    and once more attention's scores of the chosen ones, which the loss compares with (arXiv 2512.02556,
    equations 1 to 4). The indexer's inputs have no gradients (dsa.py, detach), and the tensor group adds up
    the k probabilities of each query (compute_dsa_indexer_loss).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has an indexer.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch, beside those of attention.
    """
    latent, indexer = _parts_of(c.workload)
    model, rates, chosen = c.workload.model, c.rates, _chosen(c.workload)
    rank = latent.q_lora_rank or model.hidden
    of_hidden = indexer.head_dim + indexer.heads
    shapes = ((indexer.width, rank), (of_hidden, model.hidden))
    gemm_f = sum((gemm_s(c.tokens, n, k, rates) for n, k in shapes), start=np.float64(0.0))
    trained = () if frozen(c.workload) else shapes
    gemm_b = sum((weight_gradient_s(k, n, c.tokens, rates) for n, k in trained), start=0.0 * gemm_f)
    heads = np.maximum(model.heads / np.asarray(c.layout.tp), _HEAD_BLOCK)
    scored = 2.0 * indexer.width * attended_positions(c.workload.seq_len)
    compared = 2.0 * heads * (latent.kv_lora_rank + latent.qk_rope_head_dim) * chosen
    core_f = c.tokens * (scored + compared) / rates.attention_forward_flops
    core_b = c.tokens * 6.0 * indexer.width * chosen / rates.attention_backward_flops
    score_bytes = _SCORE_BYTES * c.workload.seq_len
    moved_f = c.tokens * (score_bytes + _INDEXER_BYTES[0] * indexer.width)
    moved_b = c.tokens * (4.0 * chosen + _INDEXER_BYTES[1] * indexer.width)
    gathered_s = c.tensor_pass_s * (1.0 + rank / model.hidden)
    target_s = all_reduce_s(4.0 * c.tokens * chosen, c.placement.tp, c.links)
    forward: Parts = {
        "gemm": gemm_f,
        "attention": core_f,
        "memory_bound": streamed_s(moved_f, rates),
        "tp_comm": gathered_s + target_s,
    }
    backward: Parts = {
        "gemm": gemm_b,
        "attention": core_b,
        "memory_bound": streamed_s(moved_b, rates),
    }
    return LayerTime(forward, backward, {})


def sparse_saved(workload: Workload, tp: Floats, kept: Floats) -> Floats:
    """Bytes a token that sparse attention keeps in place of expanded queries, keys and values.

    Queries before and after they absorb the up-projection, unless they are recomputed; attention's output
    over the latent; the chosen positions; gradients of the indexer, which the forward pass makes already, and
    its gathered inputs (dsa_cudnn_kernels.py, ctx.save_for_backward). The latents themselves are not counted.
    A layer without an indexer of its own has none of what is that one's.

    Parameters
    ----------
    workload : Workload
        The model has an indexer.
    tp : float or array
        Tensor-parallel degree, at least 1.
    kept : float or array
        1 where the up-projections are kept, 0 where they are recomputed.

    Returns
    -------
    float or array
        Bytes, above 0, in the common shape of `tp` and `kept`.
    """
    latent, indexer = _parts_of(workload)
    model = workload.model
    absorbed = latent.kv_lora_rank + latent.qk_rope_head_dim + latent.qk_nope_head_dim
    of_heads = 2.0 * model.heads / tp * (kept * absorbed + latent.kv_lora_rank)
    of_indexer = 2.0 * (indexer.width + indexer.head_dim + indexer.heads)
    if model.reuses:
        return of_heads + 0.0 * np.asarray(tp)
    gathered = 2.0 * (model.hidden + (latent.q_lora_rank or model.hidden))
    inputs = np.where(np.asarray(tp) > 1, gathered, 0.0)
    saved: Floats = of_heads + of_indexer + 4.0 * _chosen(workload) + inputs
    return saved


# Seconds of what each layer reads beside its input, from a token table of its own.


_INPUT_BYTES = (24.0, 28.0)
"""An element of a layer's inputs: gate read and activated (4), times the input (6), which is the projection
of the embedding, scaled (4), added to the table's (6) and scaled (4); backward the product (10), the
activation (6) and the same steps (12)."""
_SLICE_GRADIENT_BYTES = 8.0
"""An element of the inputs of all layers, for each layer: the gradient of its slice is written among zeros
(2) and added to that of the others (6) (autograd of per_layer_inputs[:, :, i, :])."""
_RESIDUAL_BYTES = 6.0


def layer_inputs_block(c: Context) -> LayerTime:
    """The gate and the projection of a layer's inputs, its residual, and its share of making them.

    Transformers 5.24, models/gemma4/modeling_gemma4.py, Gemma4TextDecoderLayer.forward and
    project_per_layer_inputs. The norm behind it is one of `ModelSpec.further_norms`.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; layers of the model have such inputs.

    Returns
    -------
    LayerTime
        Seconds by part of one layer and micro-batch.
    """
    model, tokens = c.workload.model, c.tokens
    width = model.layer_inputs
    assert width is not None
    of_all = model.layers * width
    across = linear(c, tokens, of_all, model.hidden, {INPUTS_ACROSS: of_all})
    gate = linear(c, tokens, width, model.hidden, {INPUTS_GATE: width})
    back = linear(c, tokens, model.hidden, width, {INPUTS_BACK: model.hidden})
    norm, residual = c.element_bytes.norm, _RESIDUAL_BYTES * model.hidden
    sliced = 0.0 if frozen(c.workload) else _SLICE_GRADIENT_BYTES * of_all
    streamed = Passes(
        tokens * ((_INPUT_BYTES[0] + norm[0]) * width + residual),
        tokens * ((_INPUT_BYTES[1] + norm[1]) * width + residual + sliced),
    )
    share = 1.0 / model.layers
    return block_time(
        gemm=Passes(
            share * across.forward + gate.forward + back.forward,
            share * across.backward + gate.backward + back.backward,
        ),
        memory_bound=streamed_passes_s(c, streamed),
    )
