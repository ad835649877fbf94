"""Seconds of a dense feed-forward block."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.exposed import tensor_parallel_s
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, add, scaled
from meshwright.costmodel.layout import Floats, Recompute

_NORMS = Recompute.LAYERNORM | Recompute.OPERATORS


def linear(c: Context, tokens: Floats, n: Floats, k: Floats) -> tuple[Floats, Floats]:
    """Forward, and backward (input and weight gradients), of y[tokens, n] = x[tokens, k] W."""
    forward = gemm_s(tokens, n, k, c.rates)
    return forward, gemm_s(tokens, k, n, c.rates) + weight_gradient_s(k, n, tokens, c.rates)


def dense_mlp(c: Context, width: float, *, norm: bool = True) -> LayerTime:
    """A dense feed-forward of `width`, its norm and residual; also the shared experts (then without norm)."""
    model, tokens, tp = c.workload.model, c.tokens, np.asarray(c.layout.tp)
    matrices = 2 if model.gated else 1
    local = width / tp
    up_f, up_b = linear(c, tokens, matrices * local, model.hidden)
    down_f, down_b = linear(c, tokens, model.hidden, local)
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
