"""The front of the cost model: time, memory and traffic of layouts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives.on_levels import best_beyond
from meshwright.costmodel.constants.rates import Constants
from meshwright.costmodel.layers.kinds import kind_times
from meshwright.costmodel.layers.layer_time import Parts
from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.memory.footprint import (
    peak_memory_gib,
    stage_memory_gib,
    stage_memory_parts_gib,
)
from meshwright.costmodel.pipeline.chunk_work import layer_bubble_share
from meshwright.costmodel.pipeline.split import Stages
from meshwright.costmodel.placement import optimistic_placement
from meshwright.costmodel.step_time import exact_step, make_context, optimistic_step
from meshwright.costmodel.traffic.level_traffic import LevelBytes, level_traffic
from meshwright.costmodel.workload import Workload

__all__ = [
    "Estimate",
    "LayerCosts",
    "Stages",
    "estimate",
    "layer_costs",
    "lower_bound_s",
    "peak_memory_gib",
    "stage_memory_gib",
    "stage_memory_parts_gib",
]


@dataclass(frozen=True)
class Estimate:
    """What the model expects of one layout; floats, or arrays [k] over k placements."""

    step_time_s: Floats
    breakdown_s: Parts
    """Parts that add up to `step_time_s`."""
    level_traffic: tuple[LevelBytes, ...]
    """Empty when many placements are priced at once."""


@dataclass(frozen=True)
class LayerCosts:
    """Seconds per micro-batch of one layer of each kind: forward, backward, selective recomputation.

    The `*_recompute_s` are added for a layer that is fully recomputed. 0 where the model has no such layer.
    """

    dense_layer_s: Floats
    moe_layer_s: Floats
    embedding_s: Floats
    head_s: Floats
    mtp_s: Floats
    dense_recompute_s: Floats
    moe_recompute_s: Floats
    bubble_share: Floats = 1.0
    """Of the layout's schedule (`meshwright.costmodel.pipeline.schedules.bubble_share`)."""


def estimate(
    workload: Workload,
    layout: Layout,
    placement: Placement,
    stages: Stages,
    constants: Constants | None = None,
) -> Estimate:
    """Prices one layout with its split, under one placement or k of them (leading axis of the placement)."""
    context = make_context(workload, layout, placement, constants)
    step = exact_step(context, stages)
    single = placement.tp.ndim == 1
    parts: Parts = {
        n: float(np.asarray(s)) if single else np.asarray(s) for n, s in step.parts.items()
    }
    seconds = float(np.asarray(step.seconds)) if single else np.asarray(step.seconds)
    return Estimate(
        seconds, parts, level_traffic(context, stages, float(seconds)) if single else ()
    )


def lower_bound_s(
    workload: Workload, layout: Layout, constants: Constants | None = None
) -> NDArray[np.float64]:
    """Never above the step time of each layout under any placement and any split; shape [n]."""
    placement = optimistic_placement(workload.cluster, workload.gpus, layout)
    context = make_context(workload, layout, placement, constants)
    step = optimistic_step(replace(context, links=best_beyond(context.links)))
    return np.broadcast_to(np.asarray(step.seconds), layout.broadcast_shape()).astype(np.float64)


def layer_costs(
    workload: Workload, layout: Layout, placement: Placement, constants: Constants | None = None
) -> LayerCosts:
    """Per-layer seconds under a placement, for splitting layers over stages."""
    context = make_context(workload, layout, placement, constants)
    times = kind_times(context)
    zero = 0.0 * np.asarray(times.head.seconds)
    costs = LayerCosts(
        dense_layer_s=times.dense.seconds if times.dense else zero,
        moe_layer_s=times.moe.seconds if times.moe else zero,
        embedding_s=times.embedding.seconds,
        head_s=times.head.seconds,
        mtp_s=workload.model.mtp_layers * times.mtp.seconds if times.mtp else zero,
        dense_recompute_s=times.dense.recompute_s if times.dense else zero,
        moe_recompute_s=times.moe.recompute_s if times.moe else zero,
        bubble_share=layer_bubble_share(context, times),
    )
    if placement.tp.ndim == 1 and layout.broadcast_shape() == ():
        return LayerCosts(
            **{f.name: float(np.asarray(getattr(costs, f.name))) for f in fields(costs)}
        )
    return costs
