"""Seconds of a Gated DeltaNet block, which stands in place of attention, on one rank and micro-batch.

Read in megatron-core 0.19.2 (megatron/core/ssm/gated_delta_net) and in the kernels of flash-linear-attention
that it calls (fla/ops/gated_delta_rule, chunks of 64 positions). Tensor parallelism splits the heads, and
context parallelism swaps tokens for heads by an all-to-all ahead of the convolution and one behind the norm.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.feed_forward import Passes
from meshwright.costmodel.layers.layer_time import LayerTime
from meshwright.costmodel.layers.recurrent import recurrent_block
from meshwright.costmodel.layout import Floats
from meshwright.model_specs.attention import GatedDeltaNetSpec

CHUNK = 64
"""Positions that a kernel works on at once (fla/ops/gated_delta_rule/chunk.py)."""
_DELTA_BACKWARD_FLOPS = 3.0
"""Products of the backward pass over those of the forward: two gradients each, and the states once more."""
_DELTA_CONVOLUTION_BYTES = (4.0, 8.0)
"""An element read and written; backward input and gradient read, gradient written, weights' sums."""
_UNIT_BYTES = (4.0, 6.0)
"""An element of a query or key that is made of unit length, as a norm."""
_COPY_BYTES = (4.0, 4.0)
"""An element of a query or key that is written once for each head of values."""
_GATED_NORM_BYTES = (6.0, 10.0)
"""An element of the output under its norm and gate: two read, one written; backward three and two."""


def linear_attention_block(c: Context) -> LayerTime:
    """Projections, convolution, delta rule, gated norm, its own norm and residual; with TP and CP traffic.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has linear attention.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    model, tp = c.workload.model, np.asarray(c.layout.tp)
    spec = model.linear_attention
    assert spec is not None
    widths = spec.projected_width / tp, spec.value_width / tp
    return recurrent_block(c, widths, delta_rule_s(c, spec), _delta_streamed_bytes(c, spec))


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
    keys, values, rates = float(spec.key_head_dim), float(spec.value_head_dim), c.rates
    positions = c.tokens * spec.value_heads / np.asarray(c.layout.tp)
    state = keys * values / CHUNK
    inside = 2.0 * CHUNK * (3.0 * keys + 2.0 * values) + CHUNK * CHUNK / 3.0
    flops = inside + 6.0 * keys * values
    moved_f = 2.0 * (7.0 * keys + 6.0 * values + 2.0 * state) + 12.0 * CHUNK
    moved_b = 2.0 * (19.0 * keys + 15.0 * values + 4.0 * state) + 4.0 * CHUNK
    compute_f = flops / rates.attention_forward_flops
    compute_b = _DELTA_BACKWARD_FLOPS * flops / rates.attention_backward_flops
    forward = np.hypot(compute_f, moved_f / rates.hbm_bytes_per_s)
    backward = np.hypot(compute_b, moved_b / rates.hbm_bytes_per_s)
    return Passes(positions * forward, positions * backward)


def _delta_streamed_bytes(c: Context, spec: GatedDeltaNetSpec) -> Passes:
    """Bytes of all memory-bound operators, the block's norm and residual among them."""
    tp, hidden, around = np.asarray(c.layout.tp), c.workload.model.hidden, c.element_bytes.around
    convolved = (2.0 * spec.key_width + spec.value_width) / tp
    of_unit_length = 2.0 * spec.key_width / tp
    values = spec.value_width / tp
    copied: Floats = 0.0
    if spec.value_heads > spec.key_heads:
        copied = 2.0 * spec.value_heads * spec.key_head_dim / tp
    elements = (convolved, of_unit_length, copied, values)
    bytes_of = (_DELTA_CONVOLUTION_BYTES, _UNIT_BYTES, _COPY_BYTES, _GATED_NORM_BYTES)
    cast = quantise_bytes(c, c.tokens, hidden + values)
    cast_b = quantise_bytes(c, c.tokens, spec.projected_width / tp + hidden)
    inner_f = sum(count * moved[0] for count, moved in zip(elements, bytes_of, strict=True))
    inner_b = sum(count * moved[1] for count, moved in zip(elements, bytes_of, strict=True))
    return Passes(
        around[0] * c.hidden_elements + c.tokens * inner_f + cast,
        around[1] * c.hidden_elements + c.tokens * inner_b + cast_b,
    )
