"""Seconds of blocks in place of plain attention: Mamba, Gated DeltaNet, attention to chosen positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.costmodel.adapters import frozen
from meshwright.costmodel.collectives import all_reduce_s, all_to_all_s
from meshwright.costmodel.feed_forward import linear
from meshwright.costmodel.kernels import gemm_s, streamed_s, weight_gradient_s
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
from meshwright.model_specs.blocks import (
    GatedDeltaNetSpec,
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


def _chunked_s(c: Context, positions: Floats, flops: Passes, moved: Passes) -> Passes:
    """sqrt(C^2 + M^2) of the products at attention's rate and of the bytes moved, times `positions`."""
    rates = c.rates
    forward = np.hypot(
        flops.forward / rates.attention_forward_flops, moved.forward / rates.hbm_bytes_per_s
    )
    backward = np.hypot(
        flops.backward / rates.attention_backward_flops, moved.backward / rates.hbm_bytes_per_s
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
    """The scan in chunks: sqrt(C^2 + M^2) of its products and of what they move.

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
    n, p, q = float(spec.state_dim), float(spec.head_dim), float(spec.chunk)
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
_LANES = {"volta": 64.0, "ampere": 64.0}
"""Instructions of 32 bits that an SM begins in a cycle, where not 128 (CUDA C++ Programming Guide, arithmetic
instructions, throughput of native 32-bit additions; A100 of compute capability 8.0)."""
_CLOCK_HZ = 1.6e9
"""Between the boost clocks of 1.41 GHz of an A100 and 1.83 GHz of an H100."""


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
    products = [linear(c, c.tokens, np.float64(n), k, {name: n}) for name, n, k in shapes]
    scan = selective_scan_s(c, spec)
    none = 0.0 * scan.forward
    return block_time(
        gemm=Passes(*(sum(seconds, start=none) for seconds in zip(*products, strict=True))),
        attention=scan,
        memory_bound=streamed_passes_s(c, _mamba1_streamed_bytes(c, spec)),
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
    device = c.workload.cluster.device
    per_second = c.rates.sms * _LANES.get(device.architecture, 128.0) * _CLOCK_HZ
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
    """A Gated DeltaNet block: projections, convolution, delta rule, gated norm, its own norm and residual.

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
    widths = spec.projected_width / tp, spec.value_width / tp
    return _recurrent_block(c, widths, delta_rule_s(c, spec), _delta_streamed_bytes(c, spec))


def delta_rule_s(c: Context, spec: GatedDeltaNetSpec) -> Passes:
    """The gated delta rule in chunks: sqrt(C^2 + M^2) of its products and of what they move.

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
    spec : GatedDeltaNetSpec
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


def _delta_streamed_bytes(c: Context, spec: GatedDeltaNetSpec) -> Passes:
    """As `_streamed_bytes`."""
    tp, hidden, values = np.asarray(c.layout.tp), c.workload.model.hidden, spec.value_width
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
    gathered = 2.0 * (model.hidden + (latent.q_lora_rank or model.hidden))
    inputs = np.where(np.asarray(tp) > 1, gathered, 0.0)
    saved: Floats = of_heads + of_indexer + 4.0 * _chosen(workload) + inputs
    return saved
