"""Work of every chunk of the model, and its split into gradients of inputs and of weights.

This is what the closed form of a schedule, and a simulation of it, need to know of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTime, KindTimes, kind_times
from meshwright.costmodel.layout import Floats, Recompute
from meshwright.costmodel.pipeline.schedules import bubble_share, has_trait
from meshwright.costmodel.pipeline.split import Stages, chunk_counts, recomputed_layers

_GEMMS = ("gemm", "expert_gemm")
_WAITS = ("tp_comm", "cp_comm", "ep_comm")
"""Parts of a layer in which it waits for the other ranks of a group."""


def _weight_gradient_s(kind: KindTime) -> Floats:
    """Gradients of weights in one micro-batch of a layer: one of the three GEMMs that each matrix has."""
    gemms = [np.asarray(kind.parts[name]) for name in _GEMMS if name in kind.parts]
    seconds: Floats = sum(gemms, 0.0) / 3.0
    return seconds


def layer_bubble_share(c: Context, times: KindTimes) -> Floats:
    """`schedules.bubble_share` of the average layer of the model.

    Recomputed layers run their forward pass again before they give gradients of inputs.

    docs/cost_model.md, "Pipeline schedules", has the sources.

    Parameters
    ----------
    c : Context
        Workload and layouts.
    times : KindTimes
        Seconds of a layer of each kind, from `kind_times(c)`.

    Returns
    -------
    float or array
        Without unit, 0 to 1, shaped like the layouts; 1 where no schedule splits the backward pass.
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
        if kind is None or not number:
            continue
        recompute = np.where(full, kind.recompute_s, 0.0)
        forward = forward + number * (np.asarray(kind.seconds) - kind.backward_s)
        backward = backward + number * (kind.backward_s + recompute)
        weight = weight + number * _weight_gradient_s(kind)
    return bubble_share(schedule, c.layout.pp, forward, backward, weight)


def chunk_loads(c: Context, times: KindTimes, stages: Stages) -> NDArray[np.float64]:
    """Forward and backward seconds per micro-batch of every chunk of a split.

    docs/cost_model.md, "Pipeline schedules", has the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    times : KindTimes
        Seconds of a layer of each kind, shape [...].
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    array of float, shape [..., virtual stages, pp]
        Seconds.
    """
    return _over_chunks(c, times, stages, lambda kind: kind.seconds, lambda kind: kind.recompute_s)


@dataclass(frozen=True)
class ChunkPasses:
    """Seconds of one micro-batch through every chunk, shape [virtual stages, pp]."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    """With what is computed again."""
    weight_s: NDArray[np.float64]
    """The part of the backward pass that gradients of weights take."""
    waits_s: dict[str, NDArray[np.float64]]
    """By part: what layers wait for others of their group, forward and backward together."""


def chunk_passes(c: Context, stages: Stages) -> ChunkPasses:
    """Seconds per micro-batch of every chunk, pass by pass.

    docs/cost_model.md, "Pipeline schedules", has the sources.

    Parameters
    ----------
    c : Context
        Workload, one layout and one placement.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    ChunkPasses
        Seconds, arrays of shape [virtual stages, pp].
    """
    times = kind_times(c)
    both = chunk_loads(c, times, stages)
    backward = _over_chunks(
        c, times, stages, lambda kind: kind.backward_s, lambda kind: kind.recompute_s
    )
    weight = _over_chunks(c, times, stages, _weight_gradient_s, lambda _: 0.0)
    waits = {
        name: _over_chunks(c, times, stages, partial(_part_s, name), lambda _: 0.0)
        for name in _WAITS
    }
    return ChunkPasses(both - backward, backward, weight, waits)


def _part_s(name: str, kind: KindTime) -> Floats:
    return kind.parts.get(name, 0.0)


def _over_chunks(
    c: Context,
    times: KindTimes,
    stages: Stages,
    per_layer: Callable[[KindTime], Floats],
    per_recomputed: Callable[[KindTime], Floats],
) -> NDArray[np.float64]:
    """Sums over the layers of every chunk, with what each fully recomputed layer adds."""
    v_shaped = bool(has_trait(c.layout.schedule, "v_shaped").any())
    model = c.workload.model
    counts = chunk_counts(
        model.dense_layers, stages, recomputed_layers(c.layout), v_shaped=v_shaped
    )
    shape = np.shape(np.asarray(times.head.seconds))
    sums = np.zeros((*shape, *counts.dense.shape))
    kinds = (
        (times.dense, counts.dense, counts.dense_recomputed),
        (times.moe, counts.moe, counts.moe_recomputed),
    )
    for kind, number, recomputed in kinds:
        if kind is not None:
            sums = sums + np.asarray(per_layer(kind))[..., None, None] * number
            sums = sums + np.asarray(per_recomputed(kind))[..., None, None] * recomputed
    sums[..., 0, 0] += per_layer(times.embedding)
    end = np.asarray(per_layer(times.head))
    if times.mtp is not None:
        end = end + model.mtp_layers * per_layer(times.mtp)
    sums[..., -1, 0 if v_shaped else -1] += end
    return sums
