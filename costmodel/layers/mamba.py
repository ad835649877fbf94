"""Seconds of a Mamba-2 block, which stands in place of attention or beside it, on one rank and micro-batch.

Read in megatron-core 0.19.2 (megatron/core/ssm/mamba_mixer.py, mamba_context_parallel.py) and in the kernels
of state-spaces/mamba that it calls (mamba_ssm/ops/triton/ssd_combined.py). Tensor parallelism splits heads
and groups, and context parallelism swaps tokens for heads by an all-to-all ahead of the convolution and one
behind the norm.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.feed_forward import Passes
from meshwright.costmodel.layers.layer_time import LayerTime
from meshwright.costmodel.layers.recurrent import recurrent_block
from meshwright.costmodel.layout import Floats
from meshwright.model_specs.hybrid import Mamba2Spec

_CONVOLUTION_BYTES = (4.0, 10.0)
"""An element read and written; backward the same again, input and gradient read, gradient written."""
_GATE_BYTES = (4.0, 12.0)
"""An element of the scan's output under its gate, beside what `scan_s` counts: gate read, output written
gated too; backward gate, output, input and gradient read, two gradients written."""
_NORM_BYTES = (4.0, 6.0)
"""An element of the gated output under the norm, which Megatron runs on its own."""
_COPY_BYTES = (4.0, 4.0)
"""An element that is brought from sequence to batch order or back, where a micro-batch has several."""


def mamba_block(c: Context) -> LayerTime:
    """Projections, convolution, scan, gated norm, its own norm and residual; with TP and CP traffic.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has Mamba-2.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    spec = model.mamba
    assert spec is not None
    widths = spec.projected_width / tp, spec.width / tp
    # One gather of the input and one sum of the output serve both, and attention has them.
    gathers = not model.mamba_beside_attention
    streamed = _streamed_bytes(c, spec)
    return recurrent_block(c, widths, scan_s(c, spec), streamed, gathers=gathers)


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
    rates, heads, groups = c.rates, float(spec.heads), float(spec.groups)
    flops_f = heads * (4.0 * n * p + 2.0 * q * p) + groups * 2.0 * q * n
    flops_b = heads * (10.0 * n * p + 6.0 * q * p) + groups * 6.0 * q * n
    state = n * p / q
    moved_f = heads * (6.0 * p + 12.0 * state + 26.0) + groups * (8.0 * n + 8.0 * q)
    moved_b = heads * (22.0 * p + 34.0 * state + 88.0) + groups * (38.0 * n + 24.0 * q)
    positions = c.tokens / np.asarray(c.layout.tp)
    streams = rates.hbm_bytes_per_s
    forward = np.hypot(flops_f / rates.attention_forward_flops, moved_f / streams)
    backward = np.hypot(flops_b / rates.attention_backward_flops, moved_b / streams)
    return Passes(positions * forward, positions * backward)


def _streamed_bytes(c: Context, spec: Mamba2Spec) -> Passes:
    """Bytes of all memory-bound operators, the block's norm and residual among them.

    megatron/core/ssm/mamba_mixer.py, _ssm_training: the kernels' fused norm is not used.
    """
    model, tp, around = c.workload.model, np.asarray(c.layout.tp), c.element_bytes.around
    convolved, width = spec.convolved_width / tp, spec.width / tp
    cast = quantise_bytes(c, c.tokens, model.hidden + width)
    cast_b = quantise_bytes(c, c.tokens, spec.projected_width / tp + model.hidden)
    elements: Floats = c.hidden_elements
    if model.mamba_beside_attention:
        elements = 0.0 * elements
    several = np.asarray(c.layout.micro_batch) > 1
    copied = np.where(several, spec.projected_width / tp + width, 0.0)
    normed = width if spec.gated_norm else 0.0 * width
    elements_of = (convolved, width, normed, copied)
    bytes_of = (_CONVOLUTION_BYTES, _GATE_BYTES, _NORM_BYTES, _COPY_BYTES)
    inner_f = sum(count * moved[0] for count, moved in zip(elements_of, bytes_of, strict=True))
    inner_b = sum(count * moved[1] for count, moved in zip(elements_of, bytes_of, strict=True))
    return Passes(
        around[0] * elements + c.tokens * inner_f + cast,
        around[1] * elements + c.tokens * inner_b + cast_b,
    )
