"""Exposed seconds of a layer's own collectives: tensor and context parallelism, and what compute hides."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.collectives.on_levels import all_to_all_s, ring_pass_s
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Floats


def tensor_parallel_s(
    c: Context, hide_f: Floats, hide_b: Floats, each_b: Floats
) -> tuple[Floats, Floats]:
    """One all-reduce forward and one backward (or gathers and scatters) of T h, less what compute hides.

    With user buffers that is any GEMM, `hide_f` and `hide_b`. Without, Megatron runs the collectives of a
    column-parallel product beside one GEMM of its backward pass each, `each_b` seconds: the all-reduce (or
    scatter) of the input's gradient under the weight gradient, and the gather of the saved input that
    sequence parallelism repeats under the input gradient (Korthikanti et al. 2022, section 4.2.2;
    megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication). Launches that
    block leave nothing to run beside.
    """
    whole, stack = c.tensor_sum_s, c.constants.framework
    beside = stack.async_tensor_backward and not c.workload.launch_blocking
    if c.tp_overlaps or not beside:
        return less_hidden(c.tp_overlaps, stack.tp_hidden, whole, hide_f, hide_b)

    def exposed(seconds: Floats) -> Floats:
        return np.maximum(seconds - each_b, 0.0) + stack.dp_interference * np.minimum(
            seconds, each_b
        )

    gathered = c.gathered_share * c.tensor_pass_s
    scattered = c.tensor_wait_s + gathered + exposed(gathered) + exposed(c.tensor_pass_s)
    return whole, np.where(c.layout.sequence_parallel, scattered, exposed(whole))


def less_hidden(
    overlaps: bool, most: float, seconds: Floats, under_f: Floats, under_b: Floats
) -> tuple[Floats, Floats]:
    """Exposed seconds, forward and backward, of a transfer whose share `most` can hide under compute."""
    if not overlaps:
        return seconds, seconds
    least = seconds * (1.0 - most)
    return np.maximum(least, seconds - under_f), np.maximum(least, seconds - under_b)


def context_parallel_s(
    c: Context, widths: tuple[Floats, Floats, Floats], core: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Exposed seconds, forward and backward; `widths` of query, key with value, and output on one rank.

    Ring attention passes keys and values round the group under the attention of the block before (Liu et al.
    2023, arXiv 2310.01889, section 3), backward with their gradients; all-to-all swaps heads for tokens and
    is exposed (Ulysses, 2309.14509).
    """
    held, (query, key_value, out) = 2.0 * c.tokens, widths
    if c.workload.cp_comm == "a2a":
        once = all_to_all_s(held * (query + key_value + out), c.placement.cp, c.links)
        return once, once
    cp = np.asarray(c.layout.cp)
    ring = ring_pass_s(held * key_value * cp, c.placement.cp, c.links)
    return np.maximum(ring - core[0], ring / cp), np.maximum(2.0 * ring - core[1], ring / cp)


def merge_bytes(c: Context, q_width: Floats, out_width: Floats) -> tuple[Floats, Floats]:
    """What ring attention moves through HBM to merge the partial results of its steps, forward and backward.

    Each step after the first reads a 2-byte partial output and rescales a 4-byte sum by the new log-sum-exp
    (Liu et al. 2023, arXiv 2310.01889, appendix A); backward the gradient of the queries is summed likewise.
    """
    if c.workload.cp_comm == "a2a":
        return 0.0 * c.tokens, 0.0 * c.tokens
    steps = np.asarray(c.layout.cp) - 1.0
    return 10.0 * steps * c.tokens * out_width, 10.0 * steps * c.tokens * q_width
