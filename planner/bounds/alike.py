"""Layouts and mappings that layers, or data-parallel traffic, cannot tell apart are priced once.

Many layouts share their degrees, and many mappings differ only in where other groups lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import (
    DataParallelTraffic,
    data_parallel_traffic,
    size_range,
)
from meshwright.costmodel.estimate import LayerCosts, costs_of_layers
from meshwright.costmodel.footprint import OF_PIPELINE
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import LAYER_AXES, Floats, Layout, Placement
from meshwright.costmodel.states import rank_parameters

IntArray = NDArray[np.int64]

SHAPE = (*LAYER_AXES, "micro_batch")
"""Fields of a layout on which the least time of a layer depends."""
OF_LAYERS = (*SHAPE, "sequence_parallel", "recompute")
"""Fields of a layout on which the time of a layer depends, beside its groups."""
OF_TRAFFIC = (*LAYER_AXES, "dp", *OF_PIPELINE, "zero_stage")
"""Fields of a layout on which its data-parallel traffic depends, beside its groups and shard groups."""
GROUPS_OF_TRAFFIC = ("dp_cp", "edp")
"""Groups over which gradients are reduced."""

MOST_KEPT = 4096
"""Times of layers that are kept, and looked for: those of more take no longer to price."""
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
        `LAYER_AXES` where placements do not follow from the layouts.

    Returns
    -------
    KindTimes
        Seconds, [n]; None where there are no layouts.
    """
    if not len(np.atleast_1d(np.asarray(context.layout.tp))):
        return None
    first, back = rows_by_value(context.layout, OF_LAYERS, context.placement, groups)
    return kind_times(rows_of_context(context, first)).rows(back, len(first))


def times_under_mappings(context: Context, owner: IntArray) -> tuple[KindTimes, IntArray, IntArray]:
    """Times of layers under mappings, and which mappings of a layout they tell apart.

    Parameters
    ----------
    context
        Layouts [n], n at least 1, and their placements.
    owner
        Which layout's mapping each of them is, rising, [n].

    Returns
    -------
    tuple of KindTimes and two arrays of int
        Seconds, [n]; rows of which no two have one owner and the same times, in the order of their owners,
        [k]; and for each row which of these it equals, [n].
    """
    first, back = rows_by_value(context.layout, OF_LAYERS, context.placement, LAYER_AXES)
    times = kind_times(rows_of_context(context, first)).rows(back, len(first))
    _, rows, equal = np.unique(owner * len(first) + back, return_index=True, return_inverse=True)
    return times, rows, equal


class KnownTimes:
    """Times of layers as well placed as they can be, kept for those that come again.

    Of one workload, whose placements follow from the layouts.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._times: KindTimes | None = None

    def times(self, context: Context) -> KindTimes | None:
        """`shared_times` of layouts [n]; None where there are none."""
        if not len(np.atleast_1d(np.asarray(context.layout.tp))):
            return None
        first, back = rows_by_value(context.layout, OF_LAYERS)
        distinct = rows_of_context(context, first)
        if len(first) > MOST_KEPT:
            return kind_times(distinct).rows(back, len(first))
        columns = [np.asarray(getattr(distinct.layout, name), np.int64) for name in OF_LAYERS]
        keys = [key.tobytes() for key in np.stack(columns, axis=1)]
        if len(self._places) > MOST_KEPT:
            self._places, self._times = {}, None
        new = [row for row, key in enumerate(keys) if key not in self._places]
        if new:
            times = kind_times(rows_of_context(distinct, np.array(new)))
            times = times.rows(np.arange(len(new)), len(new))
            self._times = times if self._times is None else self._times.beside(times)
            self._places |= {keys[row]: len(self._places) + at for at, row in enumerate(new)}
        assert self._times is not None
        places = np.array([self._places[key] for key in keys])
        return self._times.rows(places[back], len(self._places))


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
    first, back = rows_by_value(context.layout, OF_LAYERS, context.placement, LAYER_AXES)
    costs = costs_of_layers(rows_of_context(context, first))
    columns = (np.broadcast_to(np.asarray(column), first.shape) for column in vars(costs).values())
    return LayerCosts(*(column[back] for column in columns))


def shared_traffic(context: Context, groups: Sequence[str] = ()) -> tuple[DataParallelTraffic, ...]:
    """Data-parallel traffic, priced once for layouts that it cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    groups
        `GROUPS_OF_TRAFFIC` where placements do not follow from the layouts.

    Returns
    -------
    tuple of DataParallelTraffic
        Of parameters spread evenly over the ranks, seconds, [n]; as `bucket_sizes.open_traffic` has it.
    """
    fields = (*OF_TRAFFIC, "shard_groups")
    first, back = rows_by_value(context.layout, fields, context.placement, groups)

    def traffic_of(part: Context, size: Floats | None) -> DataParallelTraffic:
        dense, expert = rank_parameters(part.workload.model, part.layout, None)
        return data_parallel_traffic(part, dense, expert, size)

    return joined_traffic(rows_of_context(context, first), traffic_of, back)


def joined_traffic(
    context: Context,
    traffic_of: Callable[[Context, Floats | None], DataParallelTraffic],
    back: IntArray,
) -> tuple[DataParallelTraffic, ...]:
    """Traffic of layouts from that of distinct ones, with each size of gradient buckets.

    Parameters
    ----------
    context
        Distinct layouts [k] and their placements.
    traffic_of
        Of some of the layouts [m] with each of some sizes [sizes, m] of buckets, or less than with any of
        them, arrays [..., m]; None for the framework's own.
    back
        Which of the distinct layouts each layout is, [n].

    Returns
    -------
    tuple of DataParallelTraffic
        As `bucket_sizes.open_traffic` has it, seconds, [n].
    """
    sizes, count = size_range(context), context.layout.broadcast_shape()
    own = _rows_of_traffic(traffic_of(context, None), count, back)
    if sizes is None:
        return (own,)
    chooses = np.flatnonzero(sizes.is_open)
    _, size = sizes.rows(chooses).others()
    with_others = traffic_of(rows_of_context(context, chooses), size)
    rows = np.flatnonzero(sizes.is_open[back])
    among = np.cumsum(sizes.is_open) - 1
    columns = []
    for of_own, of_others in zip(own, with_others, strict=True):
        column = np.repeat(np.asarray(of_own)[None], len(np.asarray(of_others)), axis=0)
        column[:, rows] = np.asarray(of_others)[:, among[back[rows]]]
        columns.append(column)
    return own, DataParallelTraffic(*columns)


def _rows_of_traffic(
    traffic: DataParallelTraffic, count: tuple[int, ...], back: IntArray
) -> DataParallelTraffic:
    columns = (np.broadcast_to(np.asarray(column), count) for column in traffic)
    return DataParallelTraffic(*(column[back] for column in columns))
