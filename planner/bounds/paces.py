"""How slow the slowest pipeline rank must be at the least, given what every rank has room for.

Memory forces layers from the first ranks, which hold the most activations, onto later ones. Bounds that know
it rule out most layouts that only memory makes slow, many at once and before any of their splits is priced.
Where ranks are in step the pace of the slowest chunks takes the place of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.footprint import main_layer_rooms
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.rank_load import (
    Stages,
    cheapest_layer_s,
    cheapest_recompute_s,
    chunk_counts,
    even_layout_load,
    least_busiest_in_rooms_s,
    least_recomputed_s,
)
from meshwright.costmodel.schedules import Schedule, has_trait, last_rank
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import ALL_LAYERS, balanced_stages, level_splits

# The least pace of ranks in step over all splits that a search looks at.
#
# Ranks that interleave work on chunks of the same number at the same time, so the slowest chunk of each
# number sets the pace (`schedules.pace_excess_s`). The splits that are looked at there
# (`stages.level_splits`) are few enough to add all of them up for many layouts at once.


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROUNDING = 1e-12
"""What bounds leave for sums in another order."""
_Chunk = tuple[float, ...]
"""Dense layers, layers with experts, whether it is the first of the model, whether the last."""
_MOST_STAGES = 1 << 20
"""More virtual stages than any model has layers."""


class _Splits(NamedTuple):
    """All splits of a model over so many ranks and virtual stages, by what is in their chunks."""

    chunks: FloatArray
    """Distinct chunks, [chunks, 4], as `_Chunk` has them."""
    rounds: IntArray
    """Rows of `chunks` that stand in each distinct set of chunks of one number, one set after the other."""
    starts: IntArray
    """Where each set begins, [sets]."""
    counts: FloatArray
    """How often each split has each set, [splits, sets]."""
    main_layers: FloatArray
    """Of each rank, leading dense ones left out, [splits, pp]."""


class ChunkTimes(NamedTuple):
    """Seconds of a micro-batch, forward and backward, of what chunks consist of, arrays of shape [n]."""

    dense_s: FloatArray
    """A layer without experts."""
    moe_s: FloatArray
    first_s: FloatArray
    """The embedding."""
    last_s: FloatArray
    """Head, loss and multi-token-prediction modules."""

    def take(self, rows: IntArray) -> ChunkTimes:
        """Those of some layouts."""
        return ChunkTimes(*(column[rows] for column in self))

    def with_every_layer_taking(self, more_s: FloatArray) -> ChunkTimes:
        """The same where each layer takes so many seconds more, [n]."""
        return self._replace(dense_s=self.dense_s + more_s, moe_s=self.moe_s + more_s)


def chunk_times(context: Context, times: KindTimes) -> ChunkTimes:
    """Seconds of what chunks consist of.

    Parameters
    ----------
    context
        Workload and layouts of shape [n].
    times
        `kind_times(context)`.
    """
    last_s = np.asarray(times.head.seconds, dtype=np.float64)
    if times.mtp is not None:
        last_s = last_s + context.workload.model.mtp_layers * np.asarray(times.mtp.seconds)
    # Where unlike chunks interleave, their paces are no bound: only what fits is asked there.
    kinds = (None,) * 3 if times.unlike else (times.dense, times.moe, times.embedding)
    seconds = (0.0 if kind is None else kind.seconds for kind in kinds)
    shape = context.layout.broadcast_shape()
    columns = (np.asarray(column, dtype=np.float64) for column in (*seconds, last_s))
    return ChunkTimes(*(np.broadcast_to(column, shape) for column in columns))


def least_level_pace_s(
    workload: Workload, layouts: Layout, times: ChunkTimes, rooms: FloatArray | None = None
) -> FloatArray:
    """The least sum_v max_r t_vr of the splits that a search looks at, where ranks are in step.

    Parameters
    ----------
    workload
        Its model and framework.
    layouts
        Shape [n].
    times
        Of the layouts.
    rooms
        Main layers that each rank has room for, [n, ranks]; without a limit by default.

    Returns
    -------
    FloatArray
        Seconds per micro-batch, [n]; 0 where ranks are not in step or have one virtual stage, infinite where
        no split fits.
    """
    shape = layouts.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layouts.pp, layouts.vpp))
    pace_s = np.zeros(shape)
    own = np.flatnonzero((vpp > 1) & has_trait(layouts.schedule, "in_step"))
    if not len(own):
        return pace_s
    values, back = np.unique(pp[own] * _MOST_STAGES + vpp[own], return_inverse=True)
    for which, value in enumerate(values.tolist()):
        splits, rows = _splits_of(workload, *divmod(value, _MOST_STAGES)), own[back == which]
        if splits is None:
            pace_s[rows] = np.inf
            continue
        seconds = splits.chunks @ np.stack(times.take(rows))
        slowest_s = np.maximum.reduceat(seconds[splits.rounds], splits.starts, axis=0)
        paces_s = splits.counts @ slowest_s
        if rooms is not None:
            roomy = (
                splits.main_layers[:, None, :] <= rooms[None, rows, : splits.main_layers.shape[1]]
            )
            paces_s = np.where(roomy.all(axis=2), paces_s, np.inf)
        pace_s[rows] = paces_s.min(axis=0) * (1 - _ROUNDING)
    return pace_s


class _Pipeline(NamedTuple):
    """All that the splits follow from."""

    layers: int
    dense_layers: int
    """The first ones, all where there are no experts."""
    leading: int
    """The dense layers in front of others."""
    group: int
    uneven_stages: bool
    empty_ends: bool
    pp: int
    vpp: int


def _splits_of(workload: Workload, pp: int, vpp: int) -> _Splits | None:
    model = workload.model
    return _splits(
        _Pipeline(
            layers=model.layers,
            dense_layers=model.dense_layers,
            leading=model.dense_layers if model.moe_layers else 0,
            group=model.layers_in_group,
            uneven_stages=framework_of_stack(workload.framework).uneven_stages,
            empty_ends=may_have_empty_ends(workload),
            pp=pp,
            vpp=vpp,
        )
    )


@lru_cache(maxsize=4096)
def _splits(pipeline: _Pipeline) -> _Splits | None:
    """The splits of ranks in step; None where some virtual stage would be empty."""
    layers, dense_layers, leading, group, uneven_stages, empty_ends, pp, vpp = pipeline
    even = balanced_stages(layers, pp, vpp, group)
    found: Sequence[Stages] = () if even is None else (even,)
    if uneven_stages:
        found = level_splits(layers, pp, vpp, group, empty_ends=empty_ends)
    if not found:
        return None
    chunks: dict[_Chunk, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    of_splits, main_layers = [], []
    for stages in found:
        rounds = _rounds(dense_layers, stages)
        rows = (
            tuple(sorted(chunks.setdefault(one, len(chunks)) for one in each)) for each in rounds
        )
        of_splits.append([sets.setdefault(each, len(sets)) for each in rows])
        main_layers.append(
            np.sum(stages, axis=1) - chunk_counts(leading, stages, 0).dense.sum(axis=0)
        )
    sizes = np.array([len(each) for each in sets])
    counts = np.stack([np.bincount(own, minlength=len(sets)) for own in of_splits])
    return _Splits(
        chunks=np.array(list(chunks), dtype=np.float64),
        rounds=np.array(list(chain.from_iterable(sets))),
        starts=np.cumsum(sizes) - sizes,
        counts=counts.astype(np.float64),
        main_layers=np.array(main_layers, dtype=np.float64),
    )


def _rounds(dense_layers: int, stages: Stages) -> list[set[_Chunk]]:
    """The chunks of each number, without those that hold no more than another one beside them."""
    counts = chunk_counts(dense_layers, stages, 0)
    ends = np.zeros((2, *counts.dense.shape))
    ends[0, 0, 0] = ends[1, -1, -1] = 1.0
    held = np.stack([counts.dense, counts.moe, *ends], axis=-1)
    rounds = [set(map(tuple, each)) for each in held.tolist()]
    return [{one for one in each if not _is_less(one, each)} for each in rounds]


def _is_less(chunk: _Chunk, others: set[_Chunk]) -> bool:
    """Whether another chunk holds as much of everything."""
    return any(
        other != chunk and all(a <= b for a, b in zip(chunk, other, strict=True))
        for other in others
    )


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
            cheapest_recompute_s(times) if times.unlike else main.recompute_s,
            cheapest_layer_s(times) if times.unlike else main.seconds,
            context.layout.vpp,
            end_rank,
        )
    )
    # Leading dense layers may stand among the recomputed ones: each costs at least its own time instead.
    spared_s = np.zeros(len(owner))
    if leading and times.dense is not None:
        dense_s = cheapest_layer_s(times) if times.unlike else times.dense.seconds
        spared_s = leading * np.maximum(again_s - np.asarray(dense_s), 0.0)
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
        if times.unlike:
            pace_s = np.where(np.isfinite(pace_s), 0.0, np.inf)
        pace_s = pace_s + own_again_s * recomputed_layers
        slowest_s = np.maximum(busiest_s + added_s, pace_s)
        if times.unlike:
            mean_s = _mean_of_ranks_s(
                context, times, np.where(fewest == ALL_LAYERS, model.layers, fewest)[owner]
            )
            slowest_s = np.maximum(slowest_s, mean_s[mappings])
        best_s[mappings] = np.minimum(best_s[mappings], slowest_s)
    return best_s


def _mean_of_ranks_s(context: Context, times: KindTimes, recomputed: IntArray) -> FloatArray:
    """What the ranks work in the mean, with so many layers of each virtual stage recomputed, [n]."""
    chunks = np.asarray(context.layout.pp) * context.layout.vpp
    plain = replace(context, layout=replace(context.layout, recompute=0))
    _, work_s = even_layout_load(plain, times)
    again_s = least_recomputed_s(context, times, np.maximum(recomputed, 0) * chunks)
    return np.asarray((work_s + again_s) / context.layout.pp * (1 - _ROUNDING))


def _least_again_s(times: KindTimes, shape: tuple[int, ...]) -> FloatArray:
    """What recomputing a layer of any kind takes at the least."""
    return np.broadcast_to(np.asarray(cheapest_recompute_s(times)), shape)


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
