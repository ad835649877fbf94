"""Bounds of many layouts on an irregular allocation under each profile of their mappings, in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives.on_levels import best_beyond
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.step_time import make_context, optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.alike import (
    GROUPS_OF_LAYERS,
    GROUPS_OF_TRAFFIC,
    rows_of_context,
    shared_times,
    shared_traffic,
)
from meshwright.planner.bounds.room_bound import busiest_in_rooms_s
from meshwright.planner.bounds.shard_groups import useful_groups

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

TOGETHER = 8192
"""Profiles that are bounded in one array operation."""


class Placements(Protocol):
    """Placements of one layout."""

    @property
    def placement(self) -> Placement:
        """Arrays [k, levels]."""
        ...

    @property
    def apart(self) -> bool:
        """Whether each stands for mappings that lie alike."""
        ...


def _count(placements: Placements) -> int:
    return len(placements.placement.tp)


def profile_bounds(
    workload: Workload,
    layouts: Layout,
    profiles: Sequence[Placements],
    limit_gib: float,
    numbers_of_groups: Sequence[int] = (),
    *,
    or_less: bool = False,
) -> list[FloatArray]:
    """`optimistic_step` of layouts under each of their profiles.

    Parameters
    ----------
    workload
        On any number of GPUs.
    layouts
        Shape [n].
    profiles
        Of each layout.
    limit_gib
        What the peak on one GPU may reach.
    numbers_of_groups
        Numbers of shard groups that the layouts could have instead.
    or_less
        Whether a placement also stands for all that reach less far in some group. Where an outer level is
        faster than an inner one, these may be the faster ones (`best_beyond`).

    Returns
    -------
    list[FloatArray]
        Seconds, [profiles] of each layout; infinite where no split fits, or where one shard group under the
        same mapping is no slower.
    """
    bounds: list[FloatArray] = [np.zeros(0)] * len(profiles)
    gpus = np.broadcast_to(np.asarray(layouts.gpus), layouts.broadcast_shape())
    order = np.argsort(gpus, kind="stable").tolist()
    for own_gpus, rows in groupby(order, key=lambda row: int(gpus[row])):
        for part in _parts(list(rows), profiles):
            counts = [_count(profiles[row]) for row in part]
            if not any(counts):
                continue  # no mapping is left of any of them, as where none keeps its shard groups
            context = _context(workload.on(own_gpus), layouts, profiles, part)
            if or_less:
                context = replace(context, links=best_beyond(context.links))
            seconds = _seconds(context, layouts.take(part), counts, limit_gib)
            if 1 in numbers_of_groups:
                apart = np.repeat([profiles[row].apart for row in part], counts)
                seconds[apart & _no_better_than_one(context)] = np.inf
            for row, own in zip(part, np.split(seconds, np.cumsum(counts)[:-1]), strict=True):
                bounds[row] = own
    return bounds


def _parts(rows: list[int], profiles: Sequence[Placements]) -> Iterator[list[int]]:
    """Layouts whose profiles are bounded together, one at least."""
    part: list[int] = []
    size = 0
    for row in rows:
        count = _count(profiles[row])
        if part and size + count > TOGETHER:
            yield part
            part, size = [], 0
        part.append(row)
        size += count
    if part:
        yield part


def _context(
    workload: Workload, layouts: Layout, profiles: Sequence[Placements], rows: list[int]
) -> Context:
    """Of all profiles of the first layout, then of the next."""
    placed = [vars(profiles[row].placement) for row in rows]
    placement = Placement(
        **{name: np.concatenate([one[name] for one in placed]) for name in placed[0]}
    )
    counts = [_count(profiles[row]) for row in rows]
    return make_context(workload, layouts.take(np.repeat(rows, counts)), placement)


def _seconds(context: Context, layouts: Layout, counts: list[int], limit_gib: float) -> FloatArray:
    times = shared_times(context, GROUPS_OF_LAYERS)
    if times is None:  # No layout has a mapping that keeps its groups where they have to lie.
        return np.zeros(0)
    busiest_s = busiest_in_rooms_s(context, times, layouts, counts, limit_gib)
    fits = np.isfinite(busiest_s)
    traffic = shared_traffic(context, GROUPS_OF_TRAFFIC)
    step = optimistic_step(context, times, np.where(fits, busiest_s, 0.0), traffic)
    return np.where(fits, np.asarray(step.seconds, dtype=np.float64), np.inf)


def _no_better_than_one(context: Context) -> BoolArray:
    """Where replicas that shard as a whole are no slower, as they lie; so they may lie wherever groups do.

    Of other divisors of a number this cannot be said: a leaf may hold its groups whole, but not larger ones.
    """
    numbers = np.broadcast_to(
        np.asarray(context.layout.shard_groups), context.placement.tp.shape[:1]
    )
    worse = np.zeros(len(numbers), dtype=bool)
    for number in np.unique(numbers[numbers > 1]).tolist():
        rows = np.flatnonzero(numbers == number)
        worse[rows] = ~useful_groups(rows_of_context(context, rows), (1, number))
    return worse
