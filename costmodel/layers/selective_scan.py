"""Seconds and kept bytes of a Mamba-1 block, which stands in place of attention, on one rank and micro-batch.

Read in transformers 5.23 (models/jamba/modeling_jamba.py, JambaMambaMixer) and in the kernels of
state-spaces/mamba that it calls (csrc/selective_scan, mamba_ssm/ops/selective_scan_interface.py). No
framework cuts it by tensor or context parallelism.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.feed_forward import Passes, linear
from meshwright.costmodel.layers.kernels import streamed_s
from meshwright.costmodel.layers.layer_time import LayerTime
from meshwright.costmodel.layout import Floats
from meshwright.model_specs.hybrid import Mamba1Spec

_CONVOLUTION_BYTES = (4.0, 10.0)
"""An element read and written; backward the same again, input and gradient read, gradient written."""
_NORM_BYTES = (4.0, 6.0)
"""An element under the norms of step, B and C."""
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
    """Four projections, convolution, scan and gate, its own norm and residual; not split by TP or CP.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has Mamba-1.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    spec, hidden = c.workload.model.mamba1, c.workload.model.hidden
    assert spec is not None
    channels, step = spec.channels, spec.step_rank
    shapes = (
        (spec.projected_width, hidden),
        (spec.selected_width, channels),
        (channels, step),
        (hidden, channels),
    )
    products = [linear(c, c.tokens, np.float64(n), k) for n, k in shapes]
    scan, moved = selective_scan_s(c, spec), _mamba1_streamed_bytes(c, spec)
    none = 0.0 * scan.forward
    forward = {
        "gemm": sum((product.forward for product in products), start=none),
        "attention": scan.forward,
        "memory_bound": streamed_s(moved.forward, c.rates),
    }
    backward = {
        "gemm": sum((product.backward for product in products), start=none),
        "attention": scan.backward,
        "memory_bound": streamed_s(moved.backward, c.rates),
    }
    return LayerTime(forward, backward, {})


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
    """Bytes of all memory-bound operators beside the scan, the block's norm and residual among them."""
    around, elements = c.element_bytes.around, c.hidden_elements
    hidden, normed = c.workload.model.hidden, spec.selected_width * spec.inner_norms
    cast = quantise_bytes(c, c.tokens, np.float64(hidden + spec.width))
    cast_b = quantise_bytes(c, c.tokens, np.float64(spec.projected_width + hidden))
    inner = [
        spec.channels * convolved + normed * norm
        for convolved, norm in zip(_CONVOLUTION_BYTES, _NORM_BYTES, strict=True)
    ]
    return Passes(
        around[0] * elements + c.tokens * inner[0] + cast,
        around[1] * elements + c.tokens * inner[1] + cast_b,
    )


def saved_bytes(spec: Mamba1Spec, narrow: float) -> float:
    """Bytes a token that one Mamba-1 block keeps.

    The first projection's output, what the channels are projected to, the scan's output, and its state each
    2,048 positions (selective_scan_interface.py, SelectiveScanFn and MambaInnerFn, ctx.save_for_backward).
    With inner norms, which the fused function has no place for, also the convolution's output, the steps, the
    gated output and the normed values; without, backward makes them anew.

    Parameters
    ----------
    spec : Mamba1Spec
        Channels and states.
    narrow : float
        Bytes of an element of a saved GEMM input, 1 or 2.

    Returns
    -------
    float
    """
    states = 8.0 * spec.channels * spec.state_dim / 2048.0
    saved = 2.0 * spec.projected_width + 2.0 * spec.selected_width + 2.0 * spec.channels + states
    if not spec.inner_norms:
        return saved
    kept_besides: Floats = (2.0 + 2.0 + narrow) * spec.channels + 2.0 * spec.selected_width
    return saved + float(kept_besides)
