"""What blocks with a state in place of attention share: two projections, and their way over tp and cp."""

from __future__ import annotations

from meshwright.costmodel.collectives.on_levels import all_to_all_s
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.exposed import tensor_parallel_s
from meshwright.costmodel.layers.feed_forward import Passes, linear
from meshwright.costmodel.layers.kernels import streamed_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts
from meshwright.costmodel.layout import Floats


def recurrent_block(
    c: Context,
    widths: tuple[Floats, Floats],
    core: Passes,
    streamed_bytes: Passes,
    *,
    gathers: bool = True,
) -> LayerTime:
    """Projections around a recurrence; context parallelism swaps tokens for heads before and behind it.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    widths : tuple of two floats or arrays
        Outputs of the projection into the block, and inputs of that out of it, on one rank.
    core : Passes
        Seconds of the recurrence.
    streamed_bytes : Passes
        Bytes of its memory-bound operators.
    gathers : bool
        Whether tensor parallelism gathers its input and adds up its output.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    projected, width = widths
    hidden = c.workload.model.hidden
    inputs = linear(c, c.tokens, projected, hidden)
    output = linear(c, c.tokens, hidden, width)
    gemm_f, gemm_b = inputs.forward + output.forward, inputs.backward + output.backward
    tp_f, tp_b = 0.0 * gemm_f, 0.0 * gemm_b
    if gathers:
        tp_f, tp_b = tensor_parallel_s(c, gemm_f, gemm_b, 0.5 * inputs.backward)
    swapped = 2.0 * c.tokens * (projected + width)
    cp_s = all_to_all_s(swapped, c.placement.cp, c.links)
    forward: Parts = {
        "gemm": gemm_f,
        "attention": core.forward,
        "memory_bound": streamed_s(streamed_bytes.forward, c.rates),
        "tp_comm": tp_f,
        "cp_comm": cp_s,
    }
    backward: Parts = {
        "gemm": gemm_b,
        "attention": core.backward,
        "memory_bound": streamed_s(streamed_bytes.backward, c.rates),
        "tp_comm": tp_b,
        "cp_comm": cp_s,
    }
    return LayerTime(forward, backward, {})
