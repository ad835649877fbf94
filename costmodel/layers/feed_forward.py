"""Seconds of a dense feed-forward block, and of the linear layers that blocks are made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.exposed import tensor_parallel_s
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts, add, scaled
from meshwright.costmodel.layout import Floats, Recompute


class Passes(NamedTuple):
    """A forward and a backward amount, seconds or bytes."""

    forward: Floats
    backward: Floats


def linear(c: Context, tokens: Floats, n: Floats, k: Floats) -> Passes:
    """The GEMMs of y[tokens, n] = x[tokens, k] W: one forward; input and weight gradient backward.

    Parameters
    ----------
    c : Context
        Its rates are used.
    tokens : float or array
        Rows, at least 0.
    n, k : float or array
        Width of the output and of the input on one rank, above 0.

    Returns
    -------
    Passes
        Seconds; `kernels.gemm_s` and `kernels.weight_gradient_s` have the formula and its source.
    """
    forward = gemm_s(tokens, n, k, c.rates)
    backward = gemm_s(tokens, k, n, c.rates) + weight_gradient_s(k, n, tokens, c.rates)
    return Passes(forward, backward)


def dense_mlp(c: Context, width: float, *, norm: bool = True) -> LayerTime:
    """A dense feed-forward with its norm and residual; also the shared experts of a layer, then without.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.
    width : float
        Of the feed-forward over all tensor ranks, more than 0.
    norm : bool
        Whether norm and residual are its own.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    model, tokens = c.workload.model, c.tokens
    matrices = 2 if model.gated else 1
    local = width / c.layout.tp
    up = linear(c, tokens, matrices * local, model.hidden)
    down = linear(c, tokens, model.hidden, local)
    moved = c.element_bytes
    elements = c.hidden_elements * norm
    activation_f = tokens * local * moved.activation[0]
    activation_b = tokens * local * moved.activation[1]
    cast_f = quantise_bytes(c, tokens, model.hidden + local)
    cast_b = quantise_bytes(c, tokens, matrices * local + model.hidden)
    gemm_f, gemm_b = up.forward + down.forward, up.backward + down.backward
    tp_f, tp_b = tensor_parallel_s(c, gemm_f, gemm_b, 0.5 * up.backward)
    forward: Parts = {
        "gemm": gemm_f,
        "memory_bound": streamed_s(moved.around[0] * elements + activation_f + cast_f, c.rates),
        "tp_comm": tp_f,
    }
    backward: Parts = {
        "gemm": gemm_b,
        "memory_bound": streamed_s(moved.around[1] * elements + activation_b + cast_b, c.rates),
        "tp_comm": tp_b,
    }
    recomputed = _recomputed(c, forward, up.forward, moved.norm[0] * elements, activation_f)
    return LayerTime(forward, backward, recomputed)


def _recomputed(
    c: Context, forward: Parts, up_s: Floats, norm_bytes: Floats, activation_bytes: Floats
) -> Parts:
    """What selective recomputation runs again of a dense feed-forward.

    Operator-level recomputation runs every second matrix product again: of a gated block the second input;
    else the last, which checkpointing that stops early leaves out.
    """
    mask = np.asarray(c.layout.recompute)
    by_operators = mask & Recompute.OPERATORS
    streamed = np.where(by_operators, norm_bytes + activation_bytes, 0.0)
    gemm = 0.0 * up_s
    if c.workload.model.gated:
        gemm = np.where(by_operators, 0.5 * up_s, 0.0)
    all_of_it = np.where((mask & Recompute.MLP) != 0, 1.0, 0.0)
    parts: Parts = {"memory_bound": streamed_s(streamed, c.rates), "gemm": gemm}
    return add(scaled(forward, all_of_it), parts)
