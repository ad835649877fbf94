"""What a schedule's closed form needs to know of the layers: the work of every chunk, the split of a backward
pass into gradients of inputs and of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTime, KindTimes, kind_times
from meshwright.costmodel.layout import Floats, Recompute
from meshwright.costmodel.pipeline.schedules import bubble_share, has_trait
from meshwright.costmodel.pipeline.split import Stages, chunk_counts

_GEMMS = ("gemm", "expert_gemm")


def weight_gradient_s(kind: KindTime) -> Floats:
    """Gradients of weights in one micro-batch of a layer: one of the three GEMMs that each matrix has."""
    out: Floats = (
        sum((np.asarray(kind.parts[name]) for name in _GEMMS if name in kind.parts), 0.0) / 3.0
    )
    return out


def layer_bubble_share(c: Context, times: KindTimes) -> Floats:
    """`schedules.bubble_share` of the average layer of the model, shaped like the layouts.

    Recomputed layers run their forward pass again before they give gradients of inputs.
    """
    schedule = np.asarray(c.layout.schedule)
    if not has_trait(schedule, "splits_backward").any():
        return 1.0
    model = c.workload.model
    full = (np.asarray(c.layout.recompute) & Recompute.FULL) != 0
    forward: Floats = 0.0
    backward: Floats = 0.0
    weight: Floats = 0.0
    for kind, number in ((times.dense, model.dense_layers), (times.moe, model.moe_layers)):
        if kind is not None and number:
            forward = forward + number * (np.asarray(kind.seconds) - kind.backward_s)
            backward = backward + number * (kind.backward_s + np.where(full, kind.recompute_s, 0.0))
            weight = weight + number * weight_gradient_s(kind)
    return bubble_share(schedule, c.layout.pp, forward, backward, weight)


def chunk_loads(c: Context, times: KindTimes, stages: Stages) -> NDArray[np.float64]:
    """Seconds per micro-batch of every chunk of a split, forward and backward, [..., virtual stages, pp]."""
    return _over_chunks(c, times, stages, lambda kind: kind.seconds, lambda kind: kind.recompute_s)


@dataclass(frozen=True)
class ChunkPasses:
    """Seconds of one micro-batch through every chunk, shape [virtual stages, pp]."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    """With what is computed again."""
    weight_s: NDArray[np.float64]
    """The part of the backward pass that gradients of weights take."""


def chunk_passes(c: Context, stages: Stages) -> ChunkPasses:
    """`chunk_loads` pass by pass, of one layout under one placement."""
    times = kind_times(c)
    both = chunk_loads(c, times, stages)
    backward = _over_chunks(
        c, times, stages, lambda kind: kind.backward_s, lambda kind: kind.recompute_s
    )
    weight = _over_chunks(c, times, stages, weight_gradient_s, lambda _: 0.0)
    return ChunkPasses(both - backward, backward, weight)


def _over_chunks(
    c: Context,
    times: KindTimes,
    stages: Stages,
    every: Callable[[KindTime], Floats],
    again: Callable[[KindTime], Floats],
) -> NDArray[np.float64]:
    """Sums over the layers of every chunk: `every` of each, and `again` of each that is fully recomputed."""
    full = bool(int(np.asarray(c.layout.recompute)) & Recompute.FULL)
    recomputed_layers = int(np.asarray(c.layout.recompute_layers)) if full else 0
    v_shaped = bool(has_trait(c.layout.schedule, "v_shaped").any())
    model = c.workload.model
    counts = chunk_counts(model.dense_layers, stages, recomputed_layers, v_shaped=v_shaped)
    shape = np.shape(np.asarray(times.head.seconds))
    sums = np.zeros((*shape, *counts.dense.shape))
    kinds = (
        (times.dense, counts.dense, counts.dense_recomputed),
        (times.moe, counts.moe, counts.moe_recomputed),
    )
    for kind, number, recomputed in kinds:
        if kind is not None:
            sums = sums + np.asarray(every(kind))[..., None, None] * number
            sums = sums + np.asarray(again(kind))[..., None, None] * recomputed
    sums[..., 0, 0] += every(times.embedding)
    end = np.asarray(every(times.head)) + (
        0.0 if times.mtp is None else model.mtp_layers * every(times.mtp)
    )
    sums[..., -1, 0 if v_shaped else -1] += end
    return sums
