"""The front of the cost model: time, memory and traffic of layouts.

>>> from meshwright.cluster_specs.reader import read_cluster
>>> from meshwright.costmodel.layout import Layout
>>> from meshwright.costmodel.placement import nested_placement
>>> from meshwright.costmodel.workload import Workload
>>> from meshwright.model_specs.reader import load_catalog_model
>>> work = Workload(
...     model=load_catalog_model("llama-3-8b"),
...     cluster=read_cluster("dgx-h100"),
...     gpus=8,
...     global_batch=128,
...     seq_len=8192,
... )
>>> layout = Layout(tp=2, pp=2, dp=2, num_micro_batches=64, zero_stage=1)
>>> priced = estimate_layout(work, layout, nested_placement(work.cluster, layout), ((16,), (16,)))
>>> abs(sum(priced.breakdown_s.values()) - priced.step_time_s) < 1e-9
True
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshwright.costmodel.footprint import peak_memory_gib, stage_memory_gib, stage_memory_parts_gib
from meshwright.costmodel.layer_context import Context, Parts
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Floats, Layout, Placement
from meshwright.costmodel.rank_load import (
    Stages,
    cheapest_layer_s,
    cheapest_recompute_s,
    layer_bubble_share,
    longer_pass_share,
)
from meshwright.costmodel.rates import Constants
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.volumes import LevelBytes, level_traffic
from meshwright.costmodel.workload import Workload

__all__ = [
    "Estimate",
    "LayerCosts",
    "Stages",
    "estimate_layout",
    "layer_costs",
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
    `mtp_s` is that of all multi-token-prediction modules together.
    """

    dense_layer_s: Floats
    moe_layer_s: Floats
    embedding_s: Floats
    head_s: Floats
    mtp_s: Floats
    dense_recompute_s: Floats
    moe_recompute_s: Floats
    bubble_share: Floats = 1.0
    """Of the layout's schedule (`meshwright.costmodel.schedules.bubble_share`)."""
    least_layer_s: Floats = 0.0
    """Of the cheapest kind of layer, where dense ones and those with experts are means of unlike ones."""
    least_recompute_s: Floats = 0.0
    """What the kind that is recomputed the fastest adds."""
    longer_pass_share: Floats = 0.5
    """Of a rank's seconds what the longer of its two passes takes, where layers are unlike
    (`rank_load.longer_pass_share`)."""


def estimate_layout(
    workload: Workload,
    layout: Layout,
    placement: Placement,
    stages: Stages,
    constants: Constants | None = None,
) -> Estimate:
    """Prices one layout with its split of layers, under one placement or k of them.

    `step_time.exact_step` has the formula of the step, docs/cost_model.md every part with its source.

    Parameters
    ----------
    workload : Workload
        Model, cluster, batch and software.
    layout : Layout
        One layout.
    placement : Placement
        Arrays of shape [levels], or [k, levels].
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    constants : Constants, optional
        Those of the workload by default.

    Returns
    -------
    Estimate
        Seconds and bytes of one step.
    """
    context = make_context(workload, layout, placement, constants)
    step = exact_step(context, stages)
    if placement.tp.ndim > 1:
        parts: Parts = {name: np.asarray(part) for name, part in step.parts.items()}
        return Estimate(np.asarray(step.seconds), parts, ())
    parts = {name: float(np.asarray(part)) for name, part in step.parts.items()}
    seconds = float(np.asarray(step.seconds))
    return Estimate(seconds, parts, level_traffic(context, stages, seconds))


def layer_costs(workload: Workload, layout: Layout, placement: Placement) -> LayerCosts:
    """Per-layer seconds under a placement, for splitting layers over stages.

    Sources: docs/cost_model.md, "One layer".

    Parameters
    ----------
    workload : Workload
        Model, cluster, batch and software.
    layout : Layout
        One layout, or many of shape [n].
    placement : Placement
        Of each layout, arrays of shape [..., levels].

    Returns
    -------
    LayerCosts
        Seconds; plain numbers for one layout under one placement.
    """
    costs = costs_of_layers(make_context(workload, layout, placement))
    if placement.tp.ndim == 1 and layout.broadcast_shape() == ():
        values = {f.name: float(np.asarray(getattr(costs, f.name))) for f in fields(costs)}
        return LayerCosts(**values)
    return costs


def costs_of_layers(context: Context) -> LayerCosts:
    """`layer_costs` of a context: layouts and placements with the rates that go with them.

    Parameters
    ----------
    context : Context
        Layouts of shape [...].

    Returns
    -------
    LayerCosts
        Arrays that broadcast against the layouts, seconds.
    """
    return costs_of_times(context, kind_times(context))


def costs_of_times(context: Context, times: KindTimes) -> LayerCosts:
    """`layer_costs` from the times of every kind of layer, for callers that have them.

    Parameters
    ----------
    context : Context
        Layouts of shape [...].
    times : KindTimes
        `kind_times(context)`, seconds.

    Returns
    -------
    LayerCosts
        Arrays that broadcast against the layouts, seconds.
    """
    workload = context.workload
    zero = 0.0 * np.asarray(times.head.seconds)
    return LayerCosts(
        dense_layer_s=times.dense.seconds if times.dense else zero,
        moe_layer_s=times.moe.seconds if times.moe else zero,
        embedding_s=times.embedding.seconds,
        head_s=times.head.seconds,
        mtp_s=workload.model.mtp_layers * times.mtp.seconds if times.mtp else zero,
        dense_recompute_s=times.dense.recompute_s if times.dense else zero,
        moe_recompute_s=times.moe.recompute_s if times.moe else zero,
        bubble_share=layer_bubble_share(context, times),
        least_layer_s=cheapest_layer_s(times),
        least_recompute_s=cheapest_recompute_s(times),
        longer_pass_share=longer_pass_share(times) if times.unlike else 0.5,
    )
