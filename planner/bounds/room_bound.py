"""How slow the slowest pipeline rank must be at the least, given what every rank has room for.

Memory forces layers from the first ranks, which hold the most activations, onto later ones. Bounds that know
it rule out most layouts that only memory makes slow, many at once and before any of their splits is priced.
Where ranks are in step the pace of the slowest chunks takes the place of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.split_bounds import main_layer_rooms
from meshwright.costmodel.pipeline.rank_load import least_busiest_in_rooms_s
from meshwright.costmodel.pipeline.schedules import Schedule, last_rank
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.level_pace import chunk_times, least_level_pace_s
from meshwright.planner.bounds.stages import ALL_LAYERS

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RoomBoundParams:
    """How fine the bound is."""

    recompute_ranges: int = 8
    """Into which the numbers of recomputed layers are put: the fewest of a range cost, the most make room."""


DEFAULT_ROOM_BOUND = RoomBoundParams()


def busiest_in_rooms_s(
    context: Context,
    times: KindTimes,
    layouts: Layout,
    counts: Sequence[int] | IntArray,
    limit_gib: float,
) -> FloatArray:
    """A lower bound on the pace of every split that fits, for any number of recomputed layers.

    That is the slowest rank's time, or the sum of the slowest chunks' where ranks are in step.

    Parameters
    ----------
    context, times
        Of every mapping, shape [mappings]: those of the first layout, then those of the next.
    layouts
        Shape [layouts].
    counts
        Mappings of each layout.
    limit_gib
        What the peak on one GPU may reach.

    Returns
    -------
    FloatArray
        Seconds for one micro-batch, [mappings]; infinite where no split fits.
    """
    workload = context.workload
    model = workload.model
    main = times.moe if model.moe_layers else times.dense
    assert main is not None
    group = model.layers_in_group
    groups = (model.moe_layers or model.dense_layers) // group
    leading = model.dense_layers if model.moe_layers else 0
    owner = np.repeat(np.arange(len(counts)), counts)
    end_rank = last_rank(context.layout.schedule, context.layout.pp)
    # A DualPipe rank works for its mirror's stage too: what it holds says nothing of its own load.
    mirrored = (np.asarray(layouts.schedule) == Schedule.DUALPIPE)[:, None]
    again_s, layer_s, vpp, end_rank = (
        np.broadcast_to(np.asarray(value), owner.shape)
        for value in (
            main.recompute_s,
            main.seconds,
            context.layout.vpp,
            end_rank,
        )
    )
    # Leading dense layers may stand among the recomputed ones: each costs at least its own time instead.
    spared_s = np.zeros(len(owner))
    if leading and times.dense is not None:
        spared_s = leading * np.maximum(again_s - np.asarray(times.dense.seconds), 0.0)
    seconds, again_at_least_s = chunk_times(context, times), _least_again_s(times, owner.shape)
    best_s = np.full(len(owner), np.inf)
    for fewest, largest in _amounts(workload, layouts):
        rows = np.flatnonzero(fewest >= 0)
        recomputed = replace(layouts.take(rows), recompute_layers=largest[rows])
        rooms = main_layer_rooms(workload, recomputed, limit_gib)
        rooms = np.where(mirrored[rows], float(groups), rooms // group)
        mappings = np.flatnonzero(np.isin(owner, rows))
        owners, mapping_again_s = owner[mappings], again_s[mappings]
        every, each = fewest[owners] == ALL_LAYERS, seconds.take(mappings)
        own_rooms = rooms[np.searchsorted(rows, owners)]
        busiest_s = least_busiest_in_rooms_s(
            own_rooms,
            groups,
            group * (layer_s[mappings] + np.where(every, mapping_again_s, 0.0)),
            each.last_s,
            end_rank[mappings],
        )
        recomputed_layers = np.where(every, 0, fewest[owners] * vpp[mappings])
        added_s = np.maximum(mapping_again_s * recomputed_layers - spared_s[mappings], 0.0)
        own_again_s = again_at_least_s[mappings]
        each = each.with_every_layer_taking(np.where(every, own_again_s, 0.0))
        own_layouts = context.layout.take(mappings)
        pace_s = least_level_pace_s(workload, own_layouts, each, group * own_rooms)
        pace_s = pace_s + own_again_s * recomputed_layers
        slowest_s = np.maximum(busiest_s + added_s, pace_s)
        best_s[mappings] = np.minimum(best_s[mappings], slowest_s)
    return best_s


def _least_again_s(times: KindTimes, shape: tuple[int, ...]) -> FloatArray:
    """What recomputing a layer of any kind takes at the least."""
    kinds = [np.asarray(kind.recompute_s) for kind in (times.dense, times.moe) if kind is not None]
    return np.broadcast_to(np.minimum(kinds[0], kinds[-1]), shape)


def _amounts(
    workload: Workload, layouts: Layout, params: RoomBoundParams = DEFAULT_ROOM_BOUND
) -> Iterator[tuple[IntArray, IntArray]]:
    """Ranges (fewest, most) of the numbers of recomputed layers that are tried, [n]; -1 for an empty one."""
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    every = np.where(full, ALL_LAYERS, 0)
    yield every, every
    framework = framework_of_stack(workload.framework)
    if framework.recompute_amount is None or not full.any():
        return
    shortest = workload.model.layers // (np.asarray(layouts.pp) * np.asarray(layouts.vpp))
    low = np.asarray(layouts.recompute_layers)
    step = np.maximum(-(-(shortest - low + 1) // params.recompute_ranges), 1)
    for _ in range(params.recompute_ranges):
        remaining = full & (low <= shortest)
        if remaining.any():
            high = np.minimum(low + step - 1, shortest)
            yield np.where(remaining, low, -1), np.where(remaining, high, -1)
        low = low + step
