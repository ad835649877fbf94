"""Numbers of shard groups: which can be best, and the least that any of them sends.

More groups hold larger shards: they need more memory, and their optimizers take longer. A number of groups
is worth having only if it sends less than every divisor of it. Divisors are legal wherever it is. Where the
size of gradient buckets is to choose, it is worth having if that is so with some size: with every other size
a divisor of it is as fast with that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.bucket_sizes import size_range
from meshwright.costmodel.data_parallel import DataParallelTraffic, traffic_by_kind
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Floats, Ints, Placement
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.planner.bounds.alike import (
    GROUPS_OF_TRAFFIC,
    OF_TRAFFIC,
    joined_traffic,
    rows_by_value,
    rows_of_context,
)

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class _ByGroups(NamedTuple):
    """Traffic of some layouts with each number of groups, parameters spread evenly over the ranks."""

    seconds: FloatArray
    """[kinds of parameters, layouts, numbers]; infinite where replicas do not divide so."""
    tail_s: FloatArray
    is_proportional: BoolArray
    """Whether it grows in proportion to the parameters, or no split changes these; [layouts, numbers]."""

    def rows(self, layouts: NDArray[np.int64]) -> _ByGroups:
        """Those of some layouts."""
        seconds, tail_s = self.seconds[:, layouts], self.tail_s[:, layouts]
        return _ByGroups(seconds, tail_s, self.is_proportional[layouts])


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
    few = rows_of_context(context, rows)
    first, back = rows_by_value(few.layout, OF_TRAFFIC, few.placement, GROUPS_OF_TRAFFIC)
    each = rows_of_context(few, first)
    useful[rows] = _are_useful(_by_groups(each, numbers).rows(back), numbers, own[rows])
    sizes = size_range(each)
    if sizes is None:
        return useful
    for has, size in zip(*sizes.others(), strict=True):
        asked = np.flatnonzero(has[back] & ~useful[rows])
        if len(asked):
            distinct, of_asked = np.unique(back[asked], return_inverse=True)
            part = _by_groups(rows_of_context(each, distinct), numbers, size[distinct, None])
            useful[rows[asked]] = _are_useful(part.rows(of_asked), numbers, own[rows[asked]])
    return useful


def _are_useful(by_groups: _ByGroups, numbers: Sequence[int], own: NDArray[np.int64]) -> BoolArray:
    """Whether each layout's own number of groups sends less than every divisor of it, [layouts]."""
    useful = np.ones(len(own), dtype=bool)
    column = np.searchsorted(numbers, own)
    for other, divisor in enumerate(numbers):
        divides = (own % divisor == 0) & (divisor < own)
        useful &= ~(divides & _sends_no_more(by_groups, other, column))
    return useful


def least_group_traffic(
    context: Context, numbers: Sequence[int], groups: Sequence[str] = ()
) -> tuple[DataParallelTraffic, ...]:
    """Some of it is never more than the traffic of any split with any of some numbers of groups.

    Parameters
    ----------
    context
        Layouts [n] that shard over all replicas, on placements that are bounds.
    numbers
        Of groups; one at least goes with each of the layouts.
    groups
        `GROUPS_OF_TRAFFIC` where placements do not follow from the layouts.

    Returns
    -------
    tuple of DataParallelTraffic
        Seconds, arrays [n]; as `bucket_sizes.open_traffic` has it.
    """
    first, back = rows_by_value(context.layout, OF_TRAFFIC, context.placement, groups)

    def traffic_of(part: Context, size: Floats | None) -> DataParallelTraffic:
        if size is None:
            return least(_by_groups(part, numbers))
        # Larger buckets send no longer in all, smaller ones no longer at last: two sizes stand for any.
        ends = np.stack([np.max(size, axis=0), np.min(size, axis=0)])
        by_size = least(_by_groups(part, numbers, ends[..., None]))
        seconds, tail_s = np.asarray(by_size.seconds), np.asarray(by_size.tail_s)
        return DataParallelTraffic(seconds[:1], tail_s[1:])

    def least(by_groups: _ByGroups) -> DataParallelTraffic:
        seconds = by_groups.seconds.sum(axis=0).min(axis=-1)
        return DataParallelTraffic(seconds, by_groups.tail_s.sum(axis=0).min(axis=-1))

    return joined_traffic(rows_of_context(context, first), traffic_of, back)


def _by_groups(context: Context, numbers: Sequence[int], bucket: Floats | None = None) -> _ByGroups:
    """With `bucket` parameters reduced together, a number or [layouts, 1]; else the stack's own."""
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
    kinds = traffic_by_kind(grouped, dense, expert, bucket)
    keeps_parameters = goes & (np.asarray(layouts.pp) == 1)
    full = [is_full | keeps_parameters for _, is_full in kinds]
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
