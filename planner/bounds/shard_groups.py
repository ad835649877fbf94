"""Numbers of shard groups: which can be best, and the least that any of them sends.

More groups hold larger shards: they need more memory, and their optimizers take longer. A number of groups
is worth having only if it sends less than every divisor of it. Divisors are legal wherever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.data_parallel import DataParallelTraffic, traffic_by_kind
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Ints, Placement
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.planner.bounds.degree_bound import rows_by_value

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_OF_TRAFFIC = (
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
"""Fields of a layout on which its data-parallel traffic depends, beside the groups."""


class _ByGroups(NamedTuple):
    """Traffic of some layouts with each number of groups, parameters spread evenly over the ranks."""

    seconds: FloatArray
    """[kinds of parameters, layouts, numbers]; infinite where replicas do not divide so."""
    tail_s: FloatArray
    is_proportional: BoolArray
    """Whether it grows in proportion to the parameters, [layouts, numbers]."""


def divides_into(groups: Ints, dp: Ints, cp: Ints) -> BoolArray:
    """Whether replicas divide into so many groups, of two ranks or more where there are several."""
    number, ranks = np.asarray(groups), np.asarray(dp) * np.asarray(cp)
    return np.asarray((dp % number == 0) & ((number == 1) | (ranks >= 2 * number)))


def useful_groups(context: Context, numbers: Sequence[int]) -> BoolArray:
    """Whether the shard groups of some layouts may be the best of some numbers of groups, as they lie.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    numbers
        Of groups that the layouts could have instead.

    Returns
    -------
    BoolArray
        [n]
    """
    own = np.asarray(context.layout.shard_groups)
    useful = np.ones(len(own), dtype=bool)
    rows = np.flatnonzero(own > min(numbers, default=1))
    if not len(rows):
        return useful
    by_groups = _by_groups(_rows(context, rows), numbers)
    column = np.searchsorted(numbers, own[rows])
    for other, divisor in enumerate(numbers):
        divides = (own[rows] % divisor == 0) & (divisor < own[rows])
        useful[rows] &= ~(divides & _sends_no_more(by_groups, other, column))
    return useful


def least_group_traffic(context: Context, numbers: Sequence[int]) -> DataParallelTraffic:
    """Never more than the traffic of any split with any of some numbers of groups.

    Parameters
    ----------
    context
        Layouts [n] that shard over all replicas, on placements that are bounds.
    numbers
        Of groups; one at least goes with each of the layouts.

    Returns
    -------
    DataParallelTraffic
        Seconds, arrays [n].
    """
    few, back = _distinct(context)
    by_groups = _by_groups(few, numbers)
    seconds = by_groups.seconds.sum(axis=0).min(axis=1)
    tail_s = by_groups.tail_s.sum(axis=0).min(axis=1)
    return DataParallelTraffic(seconds[back], tail_s[back])


def _distinct(context: Context) -> tuple[Context, NDArray[np.int64]]:
    """The layouts that traffic can tell apart, and which of them each layout is like.

    Placements follow from the layouts.
    """
    first, back = rows_by_value(context.layout, _OF_TRAFFIC)
    return _rows(context, first), back


def _rows(context: Context, rows: NDArray[np.int64]) -> Context:
    placed = {name: np.asarray(column)[rows] for name, column in vars(context.placement).items()}
    return replace(context, layout=context.layout.take(rows), placement=Placement(**placed))


def _by_groups(context: Context, numbers: Sequence[int]) -> _ByGroups:
    layouts, groups = context.layout.with_axis(), np.array(numbers)
    placed = {name: np.asarray(rows)[:, None] for name, rows in vars(context.placement).items()}
    grouped = replace(
        context,
        layout=replace(layouts, shard_groups=groups),
        placement=Placement(**placed),
    )
    dense, expert = rank_parameters(context.workload.model, layouts, None)
    dp, cp = np.asarray(layouts.dp), np.asarray(layouts.cp)
    goes = divides_into(groups, dp, cp)
    kinds = traffic_by_kind(grouped, dense, expert)
    full = [np.broadcast_to(is_full, goes.shape) for _, is_full in kinds]
    return _ByGroups(
        seconds=np.stack([np.where(goes, traffic.seconds, np.inf) for traffic, _ in kinds]),
        tail_s=np.stack([np.where(goes, traffic.tail_s, np.inf) for traffic, _ in kinds]),
        is_proportional=np.logical_and.reduce(full),
    )


def _sends_no_more(by_groups: _ByGroups, other: int, column: NDArray[np.int64]) -> BoolArray:
    """Whether one number of groups sends no more than each layout's own under any split, [layouts]."""
    rows = np.arange(len(column))
    no_longer = by_groups.seconds[:, :, other] <= by_groups.seconds[:, rows, column]
    no_later = by_groups.tail_s[:, :, other] <= by_groups.tail_s[:, rows, column]
    full = by_groups.is_proportional
    return np.asarray((no_longer & no_later).all(axis=0) & full[:, other] & full[rows, column])
