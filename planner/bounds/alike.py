"""Layouts and mappings that layers, or data-parallel traffic, cannot tell apart are priced once.

Many layouts share their degrees, and many mappings differ only in where other groups lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import DataParallelTraffic, data_parallel_traffic
from meshwright.costmodel.estimate import LayerCosts, costs_of_layers
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.memory.states import rank_parameters

IntArray = NDArray[np.int64]

OF_LAYERS = ("tp", "cp", "ep", "etp", "micro_batch", "sequence_parallel", "recompute")
"""Fields of a layout on which the time of a layer depends, beside its groups."""
GROUPS_OF_LAYERS = ("tp", "cp", "ep", "etp")
"""Groups that the layers of a micro-batch talk within."""
OF_TRAFFIC = (
    "tp",
    "cp",
    "pp",
    "dp",
    "ep",
    "etp",
    "vpp",
    "num_micro_batches",
    "zero_stage",
    "schedule",
)
"""Fields of a layout on which its data-parallel traffic depends, beside its groups and shard groups."""
GROUPS_OF_TRAFFIC = ("dp_cp", "edp")
"""Groups over which gradients are reduced."""

_LARGEST_KEY = 1 << 62


def rows_by_value(
    layouts: Layout,
    names: Sequence[str],
    placement: Placement | None = None,
    groups: Sequence[str] = (),
) -> tuple[IntArray, IntArray]:
    """Which layouts agree in some fields, and in where some of their groups lie.

    Parameters
    ----------
    layouts
        Shape [n].
    names
        Fields of a layout, integers from 0 on.
    placement
        Of the layouts, arrays [n, levels]; not needed without `groups`.
    groups
        Fields of a placement.

    Returns
    -------
    tuple of two arrays of int
        Rows with distinct values, and for each layout which of them it equals, [n].
    """
    shape = layouts.broadcast_shape()
    columns = [
        np.broadcast_to(np.asarray(getattr(layouts, name), dtype=np.int64), shape) for name in names
    ]
    for group in groups:
        columns += list(np.asarray(getattr(placement, group)).T)
    key, size = np.zeros(shape, dtype=np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if size * values > _LARGEST_KEY:
            distinct, key = np.unique(key, return_inverse=True)
            size = len(distinct)
        key, size = key * values + column, size * values
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back


def rows_of_context(context: Context, rows: IntArray) -> Context:
    """Some of the layouts [n] of a context, as they lie."""
    placed = {name: np.asarray(column)[rows] for name, column in vars(context.placement).items()}
    return replace(context, layout=context.layout.take(rows), placement=Placement(**placed))


def shared_times(context: Context, groups: Sequence[str] = ()) -> KindTimes | None:
    """Times of layers, priced once for layouts that a layer cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    groups
        `GROUPS_OF_LAYERS` where placements do not follow from the layouts.

    Returns
    -------
    KindTimes
        Seconds, [n]; None where there are no layouts.
    """
    if not len(np.atleast_1d(np.asarray(context.layout.tp))):
        return None
    first, back = rows_by_value(context.layout, OF_LAYERS, context.placement, groups)
    return kind_times(rows_of_context(context, first)).rows(back, len(first))


def shared_costs(context: Context) -> LayerCosts:
    """Costs of layers under mappings, priced once for those that a layer cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n], n at least 1, and their placements.

    Returns
    -------
    LayerCosts
        Seconds, [n].
    """
    first, back = rows_by_value(context.layout, OF_LAYERS, context.placement, GROUPS_OF_LAYERS)
    costs = costs_of_layers(rows_of_context(context, first))
    columns = (np.broadcast_to(np.asarray(column), first.shape) for column in vars(costs).values())
    return LayerCosts(*(column[back] for column in columns))


def shared_traffic(context: Context) -> DataParallelTraffic:
    """Data-parallel traffic under mappings, priced once for those that it cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n] and their placements.

    Returns
    -------
    DataParallelTraffic
        Of parameters spread evenly over the ranks, seconds, [n].
    """
    fields = (*OF_TRAFFIC, "shard_groups")
    first, back = rows_by_value(context.layout, fields, context.placement, GROUPS_OF_TRAFFIC)
    few = rows_of_context(context, first)
    dense, expert = rank_parameters(few.workload.model, few.layout, None)
    traffic = data_parallel_traffic(few, dense, expert)
    columns = (np.broadcast_to(np.asarray(column), first.shape) for column in traffic)
    return DataParallelTraffic(*(column[back] for column in columns))
