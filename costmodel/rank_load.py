"""Seconds per micro-batch of each pipeline rank under a split, and bounds on the busiest over all splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layer_context import Context, Parts, add
from meshwright.costmodel.layer_kinds import KindTime, KindTimes, kind_times
from meshwright.costmodel.layout import ROUNDING, Floats, Ints, Layout
from meshwright.costmodel.schedules import Schedule, bubble_share, has_trait, is_v_shaped, last_rank
from meshwright.model_specs.blocks import AHEAD
from meshwright.model_specs.schema import ModelSpec

# How many layers of each kind a split puts on every pipeline rank.


Stages = tuple[tuple[int, ...], ...]
"""Layers of each [pipeline rank][virtual stage]; chunk c of the model is stages[c % pp][c // pp]. In a
V-shaped schedule the second half runs back: stages[2 pp - 1 - c][1]."""


@dataclass(frozen=True)
class LayerCounts:
    """Layers of each kind by pipeline rank, arrays of shape [pp], or by chunk, [virtual stages, pp]."""

    dense: NDArray[np.float64]
    moe: NDArray[np.float64]
    """Layers with experts; all main layers of a model that has any."""
    dense_recomputed: NDArray[np.float64]
    """Dense layers that are recomputed in full, among `dense`."""
    moe_recomputed: NDArray[np.float64]
    """Such layers among `moe`."""


def recomputed_layers(layout: Layout) -> int:
    """Layers of every virtual stage that are recomputed in full.

    Parameters
    ----------
    layout : Layout
        One layout, or several that recompute equally many.

    Returns
    -------
    int
        0 where it recomputes none in full; may be larger than a stage, which means all.
    """
    if not np.asarray(layout.recomputes_layers).item(0):
        return 0
    return int(np.asarray(layout.recompute_layers).item(0))


@lru_cache(maxsize=4096)
def layer_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """Layers of each kind on every pipeline rank.

    Parameters
    ----------
    dense_layers : int
        How many of the model's first layers are dense, from 0; the others have experts.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    LayerCounts
        Read-only arrays of shape [pp].
    """
    chunks = chunk_counts(dense_layers, stages, recomputed, v_shaped=v_shaped)
    return _read_only([np.sum(x, axis=0) for x in vars(chunks).values()])


@lru_cache(maxsize=4096)
def chunk_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """Layers of each kind in every chunk of the model.

    Parameters
    ----------
    dense_layers : int
        How many of the model's first layers are dense, from 0; the others have experts.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    LayerCounts
        Read-only arrays of shape [virtual stages, pp].
    """
    sizes, first = (layers.astype(np.float64) for layers in _chunks(stages, v_shaped=v_shaped))
    dense = np.clip(dense_layers - first, 0.0, sizes)
    full = np.minimum(sizes, recomputed)
    dense_full = np.minimum(full, dense)
    return _read_only([dense, sizes - dense, dense_full, full - dense_full])


KindCounts = tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...]
"""Of each kind of layer, how many every chunk has, and how many of these are recomputed in full."""


@lru_cache(maxsize=4096)
def unlike_counts(
    layers: tuple[str, ...], stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> KindCounts:
    """Layers of each kind in every chunk of a model whose layers are unlike.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_layers`).
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    tuple of pairs of array, shape [virtual stages, pp]
        Read-only; kinds in the order in which they first appear.
    """
    sizes, first = _chunks(stages, v_shaped=v_shaped)
    in_chunks = counts_between(layers, first, first + sizes)
    again = counts_between(layers, first, first + np.minimum(sizes, recomputed))
    in_chunks.flags.writeable = again.flags.writeable = False
    return tuple(zip(in_chunks, again, strict=True))


def byte_counts(
    model: ModelSpec, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> KindCounts:
    """Layers of every pipeline rank by what decides their bytes.

    Parameters
    ----------
    model : ModelSpec
        Its layers, in their order.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    tuple of pairs of array, shape [pp]
        Of each kind in `ModelSpec.unlike_bytes`, in the order in which they first appear; without any, of
        dense layers and of those with experts.
    """
    if model.unlike_bytes:
        chunks = unlike_counts(model.unlike_bytes, stages, recomputed, v_shaped=v_shaped)
        return tuple(
            (number.sum(axis=0), recomputed_ones.sum(axis=0)) for number, recomputed_ones in chunks
        )
    counts = layer_counts(model.dense_layers, stages, recomputed, v_shaped=v_shaped)
    return (counts.dense, counts.dense_recomputed), (counts.moe, counts.moe_recomputed)


def _chunks(stages: Stages, *, v_shaped: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Layers of every chunk, and those in front of it, [virtual stages, pp]."""
    sizes = np.array(stages, dtype=np.int64).T
    in_order = _in_model_order(sizes) if v_shaped else sizes
    first = (np.cumsum(in_order) - in_order.ravel()).reshape(sizes.shape)
    return sizes, _in_model_order(first) if v_shaped else first


def _in_model_order(chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """[virtual stages, pp] with every second row turned round; its own inverse."""
    return np.stack([row[::-1] if v % 2 else row for v, row in enumerate(chunks)])


def _read_only(rows: list[NDArray[np.float64]]) -> LayerCounts:
    for row in rows:
        row.flags.writeable = False
    return LayerCounts(*rows)


def rank_counts(c: Context, stages: Stages) -> LayerCounts:
    """Layers that each pipeline rank of a split runs per micro-batch.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    LayerCounts
        Arrays of shape [pp].
    """
    v_shaped = is_v_shaped(c.layout)
    dense_layers = c.workload.model.dense_layers
    return layer_counts(dense_layers, stages, recomputed_layers(c.layout), v_shaped=v_shaped)


LayersOfKind = tuple[KindTime, NDArray[np.float64], NDArray[np.float64]]
"""Seconds of a kind of layer, how many there are, and how many of these are recomputed in full."""


def split_parts(c: Context, times: KindTimes, stages: Stages) -> Parts:
    """Seconds by part of each rank and micro-batch: the t_r of docs/cost_model.md, "The step".

    Layers of each kind times their seconds, the token table on rank 0, head and MTP modules on the rank with
    the last chunk.

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
    dict of str to array, shape [..., pp]
        Seconds by part; `head` is a part of its own.
    """
    by_stage, own = times.by_stage is not None, times.by_stage or times
    if own.unlike:
        layers = [
            (kind, number.sum(axis=0), recomputed.sum(axis=0))
            for kind, number, recomputed in _kinds_of_chunks(c, own, stages)
        ]
    else:
        layers = _means(own, rank_counts(c, stages))
    rank = np.arange(len(stages))
    first = (rank == 0).astype(np.float64)
    last = (rank == last_rank(c.layout.schedule, len(stages))).astype(np.float64)

    def on_ranks(parts: Parts, number: NDArray[np.float64]) -> Parts:
        axis = ... if by_stage else (..., None)
        return {name: np.asarray(seconds)[axis] * number for name, seconds in parts.items()}

    rows: list[Parts] = [on_ranks({"head": own.head.seconds}, last)]
    for kind, number, recomputed in layers:
        rows.append(on_ranks(kind.parts, number))
        rows.append(on_ranks(kind.full_recompute, recomputed))
    rows.append(on_ranks(own.embedding.parts, first))
    if own.mtp is not None:
        rows.append(on_ranks(own.mtp.parts, c.workload.model.mtp_layers * last))
    return add(*rows)


def _means(times: KindTimes, counts: LayerCounts) -> list[LayersOfKind]:
    """Layers without experts, and layers with them."""
    kinds = (
        (times.dense, counts.dense, counts.dense_recomputed),
        (times.moe, counts.moe, counts.moe_recomputed),
    )
    return [(kind, number, again) for kind, number, again in kinds if kind is not None]


def _kinds_of_chunks(c: Context, times: KindTimes, stages: Stages) -> list[LayersOfKind]:
    """Layers of every kind in each chunk of a split, [virtual stages, pp]."""
    model, recomputed, v_shaped = (
        c.workload.model,
        recomputed_layers(c.layout),
        is_v_shaped(c.layout),
    )
    if not times.unlike:
        counts = chunk_counts(model.dense_layers, stages, recomputed, v_shaped=v_shaped)
        return _means(times, counts)
    by_kind = unlike_counts(model.unlike_layers, stages, recomputed, v_shaped=v_shaped)
    return [(kind, *numbers) for kind, numbers in zip(times.unlike, by_kind, strict=True)]


def cheapest_layer_s(times: KindTimes) -> Floats:
    """Seconds of one micro-batch, forward and backward, through the cheapest kind of layer.

    Parameters
    ----------
    times : KindTimes
        Seconds of a layer of each kind.

    Returns
    -------
    float or array
        Seconds, shaped like the times.
    """
    return reduce(np.minimum, [kind.seconds for kind in times.layers])


def cheapest_recompute_s(times: KindTimes) -> Floats:
    """Seconds that recomputing a layer in full takes at the least, whatever its kind.

    Parameters
    ----------
    times : KindTimes
        Seconds of a layer of each kind.

    Returns
    -------
    float or array
        Seconds of a micro-batch, shaped like the times.
    """
    return reduce(np.minimum, [kind.recompute_s for kind in times.layers])


def longer_pass_share(times: KindTimes) -> Floats:
    """The share that the longer of a rank's two passes takes at the least, whatever it runs.

    Derived here: a mean of shares of either pass is no less than the least of them.

    Parameters
    ----------
    times : KindTimes
        Seconds of a layer of each kind.

    Returns
    -------
    float or array
        Without unit, 0.5 to 1, shaped like the times.
    """
    kinds = (*times.layers, times.embedding, times.head, times.mtp)
    shares = [
        np.asarray(kind.backward_s) / np.maximum(kind.seconds, 1e-30)
        for kind in kinds
        if kind is not None
    ]
    return np.maximum(reduce(np.minimum, shares), 0.5)


def last_rank_s(times: KindTimes, mtp_layers: int) -> Floats:
    """Seconds of one micro-batch in what the last rank runs beside its layers.

    Parameters
    ----------
    times : KindTimes
        Seconds of the head with its loss, and of a multi-token-prediction module.
    mtp_layers : int
        Multi-token-prediction modules, at least 0.

    Returns
    -------
    float or array
        Seconds, shaped like the times.
    """
    head_s = times.head.seconds
    return head_s if times.mtp is None else head_s + mtp_layers * times.mtp.seconds


def least_recomputed_s(c: Context, times: KindTimes, recomputed: Ints | Floats) -> Floats:
    """What recomputing so many of the model's unlike layers takes at the least: those that take it best.

    Parameters
    ----------
    c : Context
        Its workload has the model.
    times : KindTimes
        Seconds of a layer of each kind, shape [n].
    recomputed : int or array, shape [n]
        Layers that are recomputed in full, at least 0; more than there are count as all.

    Returns
    -------
    float or array, shape [n]
        Seconds of a micro-batch, at least 0.
    """
    layers = c.workload.model.unlike_layers
    numbers = np.array([layers.count(symbols) for symbols in dict.fromkeys(layers)])
    again = np.stack(np.broadcast_arrays(*(kind.recompute_s for kind in times.unlike)))
    order = np.argsort(again, axis=0)
    again, own = np.take_along_axis(again, order, axis=0), numbers[order]
    before = np.cumsum(own, axis=0) - own
    seconds: Floats = np.sum(again * np.clip(recomputed - before, 0, own), axis=0)
    return seconds


def least_busiest_s(layers: int, layer_s: Floats, end_s: Floats, ranks: Ints | Floats) -> Floats:
    """Least load of the busiest of ranks that share equal layers, the last of which also carries the end.

    Derived here: with k layers on every rank but the last, that one is left with x = L - (pp - 1) k, and the
    busiest has max(k t, end + x t). More than ceil(L / pp) elsewhere pay only until k t covers the end, at
    k = (end / t + L) / pp.

    Parameters
    ----------
    layers : int
        L, at least 0.
    layer_s : float or array
        t, seconds of a layer, more than 0.
    end_s : float or array
        Seconds of what the last rank runs besides, at least 0.
    ranks : int or array
        pp, at least 1.

    Returns
    -------
    float or array
        Seconds, the least over all numbers of layers on the ranks.
    """
    pp, t = np.asarray(ranks, dtype=np.float64), np.asarray(layer_s, dtype=np.float64)
    even = np.ceil(layers / pp)
    covered = np.maximum(np.ceil((np.asarray(end_s) / t + layers) / pp), even)

    def _busiest(k: Floats) -> Floats:
        """Load of the busiest rank with k layers on each rank but the last."""
        last: Floats = end_s + np.maximum(layers - (pp - 1) * k, 0.0) * t
        return np.maximum(np.where(pp > 1, k * t, 0.0), last)

    fewer = np.maximum(covered - 1, even)
    load: Floats = np.minimum(_busiest(covered), _busiest(fewer))
    return load


def least_busiest_in_rooms_s(
    rooms: NDArray[np.float64],
    layers: int,
    layer_s: Floats,
    end_s: Floats,
    end_rank: Ints,
    *,
    first_s: Floats = 0.0,
) -> NDArray[np.float64]:
    """`least_busiest_s` where each rank has room for a limited number of layers.

    Derived here: in less than (k + 1) t every rank gets k layers at most, and one with something besides at
    most those that begin before (k + 1) t less that. With the least k for which this makes L the busiest rank
    takes k t, or as long as a rank with something besides and some layers, where that lies between: the
    least of these in which L find a place.

    Parameters
    ----------
    rooms : array of float, shape [n, ranks]
        Layers that fit on each rank, at least 0.
    layers : int
        L, at least 0.
    layer_s : float or array, shape [n]
        t, seconds of a layer, more than 0.
    end_s : float or array, shape [n]
        Seconds of what one rank runs besides, at least 0.
    end_rank : int or array of int, shape [n]
        That rank, 0 to ranks - 1.
    first_s : float or array, shape [n]
        Seconds of what rank 0 runs besides, at least 0.

    Returns
    -------
    array of float, shape [n]
        Seconds, a lower bound on the busiest rank; infinite where the layers do not fit.
    """
    shape = rooms.shape[:1]
    t = np.broadcast_to(np.asarray(layer_s, dtype=np.float64), shape)[:, None]
    end = np.broadcast_to(np.asarray(end_s, dtype=np.float64), shape)[:, None]
    with_end = np.broadcast_to(np.asarray(end_rank), shape)[:, None]
    beside = np.where(np.arange(rooms.shape[1]) == with_end, end, 0.0)
    beside[:, 0] += first_s
    is_beside = beside > 0

    def _placed(k: NDArray[np.float64]) -> NDArray[np.float64]:
        """Layers that find a place within less than (k + 1) t."""
        per_rank = k[:, None]
        after = np.clip(np.ceil(per_rank + 1 - beside / t) - 1, 0, None)
        fitting = np.minimum(rooms, np.where(is_beside, after, per_rank))
        return np.asarray(fitting.sum(axis=1))

    over = float(layers) + float(np.max(beside / t, initial=0.0))
    low, high = np.zeros(shape), np.full(shape, np.ceil(over) + 1.0)
    possible = _placed(high) >= layers
    while np.any(high - low > 1):
        middle = np.floor((low + high) / 2)
        sufficient = _placed(middle) >= layers
        low = np.where(sufficient, low, middle)
        high = np.where(sufficient, middle, high)
    least_s = high * t[:, 0]
    # Columns of the two ranks that may have something besides; one rank counts once.
    columns = np.stack([np.zeros(shape, dtype=np.int64), with_end[:, 0]], axis=1)
    end_beside, room = (np.take_along_axis(values, columns, axis=1) for values in (beside, rooms))
    most = np.clip(np.ceil(high[:, None] + 1 - end_beside / t) - 1, 0, None)
    ends_s = (end_beside + most * t) * (1 - ROUNDING)
    is_later = (end_beside > 0) & (most > 0) & (most <= room) & (ends_s > least_s[:, None])
    is_later[:, 1] &= columns[:, 1] > 0
    missing = layers - (_placed(high) - is_later.sum(axis=1))
    ends_s = np.sort(np.where(is_later, ends_s, np.inf), axis=1)
    least_s = np.where(missing > 0, ends_s[:, 0], least_s)
    least_s = np.where(missing > 1, ends_s[:, 1], least_s)
    return np.asarray(np.where(possible, least_s, np.inf))


_FINENESS = 2.0**-10
"""Share of the busiest rank by which the bound may be below the least one."""
_TOGETHER = 128
"""Limits that are tried at once: arrays of fewer take about as long."""


def least_busiest_in_order_s(
    before_s: NDArray[np.float64],
    first_s: NDArray[np.float64],
    last_s: NDArray[np.float64],
    ranks: int,
    *,
    rooms: NDArray[np.float64] | None = None,
    leading: int = 0,
    again_s: NDArray[np.float64] | None = None,
    begins: tuple[int, ...] = (),
) -> NDArray[np.float64]:
    """Least load of the busiest of ranks that each hold one part of a sequence of unlike layers.

    Within a limit of seconds each rank takes the layers that come next as long as they keep to it, which no
    other way of dealing out in order surpasses: the limit is bisected, and one at which that does not place
    every layer is a bound.

    Parameters
    ----------
    before_s : array of float, shape [n, places] or [n, ranks, places]
        Seconds of the layers in front of each place between them, from 0 for the begin of the sequence to
        those of all layers at its end; on each rank where these differ.
    first_s, last_s : array of float, shape [n]
        What the first and the last rank run besides, seconds, at least 0.
    ranks : int
        At least 1.
    rooms : array of float, shape [n, ranks], optional
        By how many places the part of each rank may reach, at least 0; without a limit by default.
    leading : int
        Places at the begin of the sequence that take none of a rank's room.
    again_s : array of float, shape [n, places], optional
        What a part that begins at each place computes again, seconds, at least 0; nothing by default.
    begins : tuple of int, optional
        Places at which a part may begin, 0 among them; all by default.

    Returns
    -------
    array of float, shape [n]
        Seconds, never above those of the busiest rank of any partition.
    """
    end = before_s.shape[-1] - 1
    cuts = np.array([*begins, end] if begins else range(end + 1))
    is_by_rank = before_s.ndim == 3
    parts_s = np.diff(before_s[..., cuts], axis=-1)
    least_s, most_s = (
        (parts_s.min(axis=1), parts_s.max(axis=1)) if is_by_rank else (parts_s, parts_s)
    )
    total_s = most_s.sum(axis=-1) + first_s + last_s
    low = np.maximum((least_s.sum(axis=-1) + first_s + last_s) / ranks, least_s.max(axis=-1))
    low = low * (1 - 1e-12)
    high = low + most_s.max(axis=-1) + np.maximum(first_s, last_s)
    from_s = before_s
    if again_s is not None:
        # A part that begins later may compute less again, and reach further: it counts as if it began there.
        from_s = np.maximum.accumulate(before_s - again_s, axis=1)
        high = high + np.max(again_s, axis=1)
    reaches = None if rooms is None else rooms.astype(np.int64)
    if rooms is not None or again_s is not None or is_by_rank:
        placed = _placed_in_order(
            (before_s, from_s), high, (first_s, last_s), ranks, reaches, cuts=cuts, leading=leading
        )
        all_s = total_s if again_s is None else total_s + np.max(again_s, axis=1)
        low = np.where(placed, low, high)
        high = np.where(placed, high, np.maximum(all_s, high))
    tried = max(_TOGETHER // max(len(low), 1), 1)
    share = np.arange(tried + 2) / (tried + 1)
    every = np.repeat(np.arange(len(low)), tried)
    while np.any(high - low > _FINENESS * low):
        limits = low[:, None] + (high - low)[:, None] * share
        placed = _placed_in_order(
            (before_s[every], from_s[every]),
            limits[:, 1:-1].ravel(),
            (first_s[every], last_s[every]),
            ranks,
            None if reaches is None else reaches[every],
            cuts=cuts,
            leading=leading,
        )
        at = np.sum(~placed.reshape(len(low), tried), axis=1)[:, None]
        low = np.take_along_axis(limits, at, axis=1)[:, 0]
        high = np.take_along_axis(limits, at + 1, axis=1)[:, 0]
    return np.asarray(low)


def _placed_in_order(
    places_s: tuple[NDArray[np.float64], NDArray[np.float64]],
    limit_s: NDArray[np.float64],
    ends_s: tuple[NDArray[np.float64], NDArray[np.float64]],
    ranks: int,
    rooms: NDArray[np.int64] | None,
    *,
    cuts: NDArray[np.int64],
    leading: int,
) -> NDArray[np.bool_]:
    """Whether ranks that each take as many layers as a limit of seconds allows take all of them, [n].

    `places_s` has the seconds in front of each place, and those from which a part that begins there counts;
    `cuts` has the places, rising, between which parts may lie.
    """
    cut_at = cuts[np.searchsorted(cuts, np.arange(cuts[-1] + 1), side="right") - 1]
    (before_s, from_s), (first_s, last_s) = places_s, ends_s
    rows = np.arange(len(before_s))
    place, holds = np.zeros(len(rows), dtype=np.int64), first_s <= limit_s
    limit_s = limit_s * (1 + 1e-12)
    for rank in range(ranks):
        own_s, from_own_s = (
            each[:, rank] if each.ndim == 3 else each for each in (before_s, from_s)
        )
        until_s = from_own_s[rows, place] + limit_s
        if rank == 0:
            until_s = until_s - first_s
        if rank == ranks - 1:
            until_s, holds = until_s - last_s, holds & (last_s <= limit_s)
        reach = np.count_nonzero(own_s <= until_s[:, None], axis=1) - 1
        if rooms is not None:
            reach = np.minimum(reach, np.maximum(place, leading) + rooms[:, rank])
        place = cut_at[np.maximum(reach, place)]
    return np.asarray(holds & (place == before_s.shape[-1] - 1))


def least_way_in_order_s(
    both_s: NDArray[np.float64],
    backward_s: NDArray[np.float64],
    ranks: int,
    num_micro_batches: NDArray[np.int64],
    *,
    begins: tuple[int, ...] = (),
) -> NDArray[np.float64]:
    """What 1F1B takes at the least beyond the work of all ranks, over all partitions of unlike layers.

    Derived here, from two of the ways of `schedules.longest_way_s`. Beyond that work, all backward passes of
    a rank take w b + (m - 1 - w) t, and both ways with the ranks behind it twice take Z + (m - 1 - w) t where
    m - w >= 2. No layer that takes longer makes one of them shorter. Either limits how far the part of a rank
    may reach, the further the later it begins: no other partition surpasses ranks that each take as many
    layers as a limit of seconds allows. The limit is bisected, and one at which they do not place every layer
    is a bound.

    Parameters
    ----------
    both_s, backward_s : array of float, shape [n, places]
        Seconds of one micro-batch, forward and backward, and of them the backward pass, in front of each
        place between layers, from 0 for the begin of the sequence to those of all of it at its end; what the
        first and the last rank run besides counts as the first and the last layer's.
    ranks : int
        p, at least 1 and no more than the places at which a part may begin.
    num_micro_batches : array of int, shape [n]
        m of one flush, at least 1.
    begins : tuple of int, optional
        Places at which a part may begin, 0 among them; all by default.

    Returns
    -------
    array of float, shape [n]
        Seconds of a flush, at least 0.
    """
    end = both_s.shape[1] - 1
    cuts = np.array([*begins, end] if begins else range(end + 1))
    cut_at = cuts[np.searchsorted(cuts, np.arange(end + 1), side="right") - 1]
    m, total_s, count = num_micro_batches, both_s[:, -1], len(both_s)
    # Of each rank, from the first: m - 1 - w, and what its backward passes take in front of a place.
    further = [m - 1 - np.minimum(ranks - 1 - rank, m - 1) for rank in range(ranks)]
    down_s = [(m - 1 - x)[:, None] * backward_s + x[:, None] * both_s for x in further]

    def _are_placed(limits_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether all layers are, with each of some limits, [limits, n]."""
        limit_s, rows = limits_s * (1 + ROUNDING), np.arange(count)
        place = np.zeros(limit_s.shape, dtype=np.int64)
        holds = np.ones(limit_s.shape, dtype=bool)
        for rank, (more, way_s) in enumerate(zip(further, down_s, strict=True)):
            fits = way_s <= (way_s[rows, place] + limit_s)[..., None]
            # Nothing where m - w is 1, so that the limit holds.
            twice_s = np.where(more < 1, -np.inf, total_s - more * both_s[rows, place])
            beyond_s = np.maximum(more - 1, 0)[:, None] * both_s
            fits &= beyond_s <= (limit_s - twice_s)[..., None]
            reach = cut_at[np.maximum(np.count_nonzero(fits, axis=-1) - 1, 0)]
            reach = np.minimum(reach, cuts[len(cuts) - ranks + rank])
            holds, place = holds & (reach > place), reach
        return np.asarray(holds & (place == end))

    low, high = np.zeros(count), total_s * m
    tried = max(_TOGETHER // max(count, 1), 1)
    share = np.arange(tried + 2)[:, None] / (tried + 1)
    while np.any(high - low > _FINENESS * total_s):
        limits_s = low + (high - low) * share
        at = np.sum(~_are_placed(limits_s[1:-1]), axis=0)
        low = limits_s[at, np.arange(count)]
        high = limits_s[at + 1, np.arange(count)]
    return np.asarray(low)


def _least_in_order_s(c: Context, times: KindTimes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """`least_busiest_in_order_s` of the model's unlike layers; 0 where ranks hold more than one part, [n]."""
    model, layout = c.workload.model, c.layout
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layout.pp, layout.vpp))
    busiest_s = np.zeros(shape)
    own = np.flatnonzero((vpp == 1) & (pp > 1))
    if not len(own):
        return busiest_s
    again = np.where(_recomputes_all(c), 1.0, 0.0)
    columns = _columns_in_order(times, model.mtp_layers, again, shape)
    columns = np.concatenate([columns, pp[None]])[:, own]
    first, back = distinct_columns(columns)
    distinct = columns[:, first]
    least_s, counts = (
        np.empty(distinct.shape[1]),
        counts_in_order(model.unlike_layers),
    )
    for ranks in np.unique(distinct[-1]):
        rows = np.flatnonzero(distinct[-1] == ranks)
        *seconds, first_s, last_s, _ = distinct[:, rows]
        least_s[rows] = least_busiest_in_order_s(
            np.stack(seconds, axis=1) @ counts,
            first_s,
            last_s,
            int(ranks),
            begins=model.stage_begins,
        )
    busiest_s[own] = least_s[back]
    return busiest_s


def least_ways_s(c: Context, times: KindTimes) -> NDArray[np.float64]:
    """`least_way_in_order_s` of the model's unlike layers under 1F1B with one part a rank.

    Parameters
    ----------
    c : Context
        Workload and layouts of shape [n].
    times : KindTimes
        Seconds of a layer of each kind, from `kind_times(c)`.

    Returns
    -------
    array of float, shape [n]
        Seconds of a flush beyond the work of all ranks; 0 where another schedule runs, or none.
    """
    model, layout, shape = c.workload.model, c.layout, c.layout.broadcast_shape() or (1,)
    pp, vpp, schedule, m = (
        np.broadcast_to(np.asarray(each), shape)
        for each in (layout.pp, layout.vpp, layout.schedule, layout.num_micro_batches)
    )
    ways_s = np.zeros(shape)
    is_asked = (vpp == 1) & (pp > 1) & (schedule == int(Schedule.ONE_F_ONE_B))
    # A single micro-batch goes through all ranks, and that is all.
    is_asked &= m > c.workload.flushes
    own = np.flatnonzero(is_asked & (pp <= (len(model.stage_begins) or model.layers)))
    if len(own):
        again = np.where(_recomputes_all(c), 1.0, 0.0)
        both_s, backward_s = (
            _columns_in_order(times, model.mtp_layers, again, shape, which)
            for which in ("seconds", "backward_s")
        )
        columns = np.concatenate([both_s, backward_s, [m // c.workload.flushes, pp]])
        columns = columns[:, own]
        first, back = distinct_columns(columns)
        *seconds, flush, ranks = columns[:, first]
        half, least_s = len(both_s), np.empty(len(first))
        both_s, backward_s = (_in_front_s(model, x) for x in (seconds[:half], seconds[half:]))
        for number in np.unique(ranks).tolist():
            rows = np.flatnonzero(ranks == number)
            least_s[rows] = least_way_in_order_s(
                both_s[rows],
                backward_s[rows],
                int(number),
                flush[rows].astype(np.int64),
                begins=model.stage_begins,
            )
        ways_s[own] = least_s[back]
    return ways_s.reshape(c.layout.broadcast_shape())


def _in_front_s(model: ModelSpec, columns: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Seconds in front of each place between layers, from `_columns_in_order`, [n, places]."""
    *kinds_s, first_s, last_s = columns
    before_s = np.stack(kinds_s, axis=1) @ counts_in_order(model.unlike_layers)
    before_s[:, 1:] += first_s[:, None]
    before_s[:, -1] += last_s
    return np.asarray(before_s)


def distinct_columns(columns: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Columns of which hardly two are equal, and for each column one of them that equals it.

    By a sum of their bits that few unlike columns share; where some do, all columns are taken as they are.

    Parameters
    ----------
    columns : array of float, shape [rows, n]
        Any numbers.

    Returns
    -------
    tuple of two arrays of int
        Which columns are taken, [k], and for each column which of these it equals, [n].
    """
    weights = 2 * np.arange(len(columns), dtype=np.int64)[:, None] + 0x9E3779B97F4A7C1
    with np.errstate(over="ignore"):
        mixed = np.sum(np.ascontiguousarray(columns).view(np.int64) * weights * weights, axis=0)
    _, first, back = np.unique(mixed, return_index=True, return_inverse=True)
    if np.array_equal(columns[:, first[back]], columns):
        return first, back.reshape(-1)
    every = np.arange(columns.shape[1])
    return every, every


def _recomputes_all(c: Context) -> NDArray[np.bool_]:
    """Which layouts compute all layers of every virtual stage again."""
    return np.asarray(
        c.layout.recomputes_layers
        & (np.asarray(c.layout.recompute_layers) >= c.workload.model.layers)
    )


def _columns_in_order(
    times: KindTimes,
    mtp_layers: int,
    again: Floats,
    shape: tuple[int, ...],
    passes: Literal["seconds", "backward_s"] = "seconds",
) -> NDArray[np.float64]:
    """Seconds of each kind of unlike layer with a share of its recomputation, of the embedding, and of what
    the last rank runs besides, [kinds + 2, n]; of all passes, or of backward ones alone.
    """
    first_s, last_s = (getattr(kind, passes) for kind in (times.embedding, times.head))
    if times.mtp is not None:
        last_s = last_s + mtp_layers * getattr(times.mtp, passes)
    kinds = [getattr(kind, passes) + again * np.asarray(kind.recompute_s) for kind in times.unlike]
    each = (*kinds, first_s, last_s)
    return np.stack([np.broadcast_to(np.asarray(row, dtype=np.float64), shape) for row in each])


@lru_cache(maxsize=64)
def counts_in_order(layers: tuple[str, ...]) -> NDArray[np.float64]:
    """Layers of each kind in front of every place between layers.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_layers`).

    Returns
    -------
    array of float, shape [kinds, places]
        Read-only; kinds in the order in which they first appear, places from the begin to the end.
    """
    own = np.array([[layer == kind for layer in layers] for kind in dict.fromkeys(layers)])
    counts = np.concatenate([np.zeros((len(own), 1)), np.cumsum(own, axis=1)], axis=1)
    counts.flags.writeable = False
    return counts


@lru_cache(maxsize=64)
def counts_of_parts(layers: tuple[str, ...], first: int | None = None) -> NDArray[np.float64]:
    """Layers of each kind from every place between layers to every other.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_layers`).
    first : int, optional
        Of each part only so many layers from its begin, such as those recomputed; at least 0.

    Returns
    -------
    array of float, shape [kinds, begin, end]
        Read-only, kinds and places as in `counts_in_order`. Below 0 where the end lies in front of the begin,
        0 there where `first` is given.
    """
    begin = np.arange(len(layers) + 1)[:, None]
    end = np.arange(len(layers) + 1)[None, :]
    if first is not None:
        end = np.maximum(np.minimum(begin + first, end), begin)
    counts = counts_between(layers, begin, end)
    counts.flags.writeable = False
    return counts


@lru_cache(maxsize=64)
def kinds_ahead(layers: tuple[str, ...]) -> Mapping[int, int]:
    """Kinds that run forward alone, each with the kind that it is behind the first chunk of a pipeline.

    What a stage receives has a gradient, whether the stage before it wants that or not (megatron/core/
    pipeline_parallel/p2p_communication.py, requires_grad of received tensors).

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_layers`).

    Returns
    -------
    mapping of int to int
        Read-only; numbers of kinds in the order in which they first appear, without kinds that have no like
        one behind.
    """
    number = {symbols: at for at, symbols in enumerate(dict.fromkeys(layers))}
    behind = {symbols: symbols.removesuffix(AHEAD) for symbols in number if AHEAD in symbols}
    return MappingProxyType(
        {number[ahead]: number[like] for ahead, like in behind.items() if like in number}
    )


def counts_between(
    layers: tuple[str, ...], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Layers of each kind in parts of a model.

    Layers that run forward alone do so in a part that begins the model; elsewhere they count as the same kind
    with a backward pass.

    Derived here: what lies ahead of the end less what lies ahead of the begin; `kinds_ahead` has the source.

    Parameters
    ----------
    layers : tuple of str
        The kind of each layer, in their order (`ModelSpec.unlike_layers`).
    begin, end : array of int
        Places between layers, 0 to their number, shapes that broadcast.

    Returns
    -------
    array of float, shape [kinds, ...]
        Kinds in the order in which they first appear; below 0 where the end lies in front of the begin.
    """
    before = counts_in_order(layers)
    counts = np.asarray(before[:, end] - before[:, begin])
    for ahead, behind in kinds_ahead(layers).items():
        with_gradient = np.where(begin == 0, 0.0, counts[ahead])
        counts[ahead] -= with_gradient
        counts[behind] += with_gradient
    return counts


def even_layout_load(c: Context, times: KindTimes) -> tuple[Floats, Floats]:
    """Lower bounds, over all splits, on the busiest rank and on the sum of the ranks.

    Derived here: the busiest rank has at least the mean load, ceil(layers / pp) of the cheaper layers, and
    what the best split of the main layers alone gives (`least_busiest_s`). The last rank has at least one
    layer per virtual stage under the head, but for the last of several, which ranks in step may leave to the
    head.

    Parameters
    ----------
    c : Context
        Workload and layouts of shape [n].
    times : KindTimes
        Seconds of a layer of each kind, from `kind_times(c)`.

    Returns
    -------
    tuple of two floats or arrays, shape [n]
        Seconds per micro-batch of the busiest rank, and of all ranks together.
    """
    model, layout = c.workload.model, c.layout
    pp, vpp = np.asarray(layout.pp), np.asarray(layout.vpp)
    kinds = _kinds_of_model(c, times)
    work = least_work_s(c, times)
    cheapest: Floats = np.inf
    for kind in times.unlike or [kind for kind, _ in kinds]:
        cheapest = np.minimum(cheapest, kind.seconds)
    end = last_rank_s(times, model.mtp_layers)
    main, number = kinds[-1]
    busiest = np.maximum(work / pp, np.ceil(model.layers / pp) * cheapest)
    layer_s = cheapest if times.unlike else main.seconds
    split = least_busiest_s(number, layer_s, end, pp)
    busiest = np.maximum(busiest, split)
    if times.unlike:
        shape = np.broadcast_shapes(np.shape(busiest), np.shape(vpp), np.shape(layout.schedule))
        busiest = np.maximum(busiest, _least_in_order_s(c, times, shape) if shape else 0.0)
    stages = np.where(vpp > 1, vpp - 1, vpp)
    return np.maximum(busiest, end + stages * cheapest), work


def least_work_s(c: Context, times: KindTimes) -> Floats:
    """What all ranks work for a micro-batch at the least, over all splits.

    Parameters
    ----------
    c : Context
        Workload and layouts of shape [n].
    times : KindTimes
        Seconds of a layer of each kind, from `kind_times(c)`.

    Returns
    -------
    float or array, shape [n]
        Seconds; splits differ in how many layers they recompute, and in which.
    """
    model = c.workload.model
    kinds = _kinds_of_model(c, times)
    work = times.embedding.seconds + times.head.seconds
    cheapest_recompute: Floats = np.inf
    for kind, number in kinds:
        work = work + number * kind.seconds
        cheapest_recompute = np.minimum(cheapest_recompute, kind.recompute_s)
    fewest = _fewest_recomputed(model.layers, c.layout)
    again = least_recomputed_s(c, times, fewest) if times.unlike else cheapest_recompute * fewest
    work = work + again
    if times.mtp is not None:
        work = work + model.mtp_layers * times.mtp.seconds
    return work


def _kinds_of_model(c: Context, times: KindTimes) -> list[tuple[KindTime, int]]:
    """The kinds of layer that the model has, with how many, main layers last."""
    model = c.workload.model
    kinds = ((times.dense, model.dense_layers), (times.moe, model.moe_layers))
    return [(kind, number) for kind, number in kinds if kind is not None and number]


def _fewest_recomputed(layers: int, layout: Layout) -> NDArray[np.float64]:
    """Fewest layers that a split can have recomputed in full.

    The sum over chunks of min(r, layers) is least when all but one chunk hold a single layer.
    """
    chunks = np.asarray(layout.pp) * layout.vpp
    per_chunk = np.asarray(layout.recompute_layers)
    in_one = np.minimum(per_chunk, layers - chunks + 1)
    fewest = np.minimum(chunks - 1 + in_one, layers)
    return np.where(layout.recomputes_layers & (per_chunk > 0), fewest, 0)


# Work of every chunk of the model, and its split into gradients of inputs and of weights.


_GEMMS = ("gemm", "expert_gemm")
_WAITS = ("tp_comm", "cp_comm", "ep_comm")
"""Parts of a layer in which it waits for the other ranks of a group."""


def _weight_gradient_s(kind: KindTime) -> Floats:
    """Gradients of weights in one micro-batch of a layer: one of the three GEMMs that each matrix has.

    Schedules that run them apart are not planned for frozen weights, which have none.
    """
    gemms = [np.asarray(kind.parts[name]) for name in _GEMMS if name in kind.parts]
    seconds: Floats = sum(gemms, 0.0) / 3.0
    return seconds


def layer_bubble_share(c: Context, times: KindTimes) -> Floats:
    """`schedules.bubble_share` of the average layer of the model; that function has the sources.

    Gradients of weights are one of the three products that each matrix has. Recomputed layers run their
    forward pass again before they give gradients of inputs.

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
    forward: Floats = 0.0
    backward: Floats = 0.0
    weight: Floats = 0.0
    for kind, number in _kinds_of_model(c, times):
        recompute = np.where(c.layout.recomputes_layers, kind.recompute_s, 0.0)
        forward = forward + number * (np.asarray(kind.seconds) - kind.backward_s)
        backward = backward + number * (kind.backward_s + recompute)
        weight = weight + number * _weight_gradient_s(kind)
    return bubble_share(schedule, c.layout.pp, forward, backward, weight)


def chunk_loads(c: Context, times: KindTimes, stages: Stages) -> NDArray[np.float64]:
    """Forward and backward seconds per micro-batch of every chunk of a split, together.

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
        Seconds, at least 0.
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


def chunk_passes(c: Context, stages: Stages, times: KindTimes | None = None) -> ChunkPasses:
    """Seconds per micro-batch of every chunk, pass by pass, for `simulator.simulate`.

    Sums of `layer_kinds.kind_times` over the chunk's layers; docs/cost_model.md, "Pipeline schedules", says
    how the backward pass is split.

    Parameters
    ----------
    c : Context
        Workload, one layout and one placement.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    times : KindTimes, optional
        `kind_times(c)`, where the caller has them.

    Returns
    -------
    ChunkPasses
        Seconds, arrays of shape [..., virtual stages, pp].
    """
    times = times or kind_times(c)
    both = chunk_loads(c, times, stages)
    backward = _over_chunks(
        c, times, stages, lambda kind: kind.backward_s, lambda kind: kind.recompute_s
    )
    weight = _over_chunks(c, times, stages, _weight_gradient_s, lambda _: 0.0)
    return ChunkPasses(both - backward, backward, weight)


@dataclass(frozen=True)
class PassParts:
    """The passes of `ChunkPasses`, each by the parts of its price, shape [virtual stages, pp] a part."""

    forward_s: dict[str, NDArray[np.float64]]
    backward_s: dict[str, NDArray[np.float64]]
    weight_s: dict[str, NDArray[np.float64]]
    """The part of `backward_s` that gradients of weights take."""


def pass_parts(c: Context, stages: Stages) -> PassParts:
    """What the passes of every chunk are made of, by the parts of a step's breakdown.

    The parts of a pass add up to it. Every part of a kind of layer lies in the forward and in the backward
    pass as the kind does as a whole, which is how `layer_kinds.kind_times` prices passes; what is computed
    again lies in the backward pass. The LM head with its loss is one part.

    Parameters
    ----------
    c : Context
        Workload, one layout and one placement.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    PassParts
        Seconds of one micro-batch; compute first, then what waits for other ranks.
    """
    times = kind_times(c)
    heads = [each.head for each in (times, times.by_stage) if each is not None]
    ends = (times.embedding, *((times.mtp,) if times.mtp is not None else ()))
    names = dict.fromkeys(name for kind in (*times.layers, *ends) for name in kind.parts)
    compute = [name for name in names if name not in _WAITS]
    listed = [*compute, "head", "recompute", *(name for name in _WAITS if name in names)]

    def _part_s(name: str, kind: KindTime) -> Floats:
        if any(kind is head for head in heads):
            return kind.seconds if name == "head" else 0.0
        return kind.parts.get(name, 0.0)

    def _forward(name: str, kind: KindTime) -> Floats:
        return _part_s(name, kind) * (1.0 - kind.backward_s / kind.seconds)

    def _backward(name: str, kind: KindTime) -> Floats:
        return _part_s(name, kind) * (kind.backward_s / kind.seconds)

    def _weight(name: str, kind: KindTime) -> Floats:
        if any(kind is head for head in heads):
            return _weight_gradient_s(kind) if name == "head" else 0.0
        return np.asarray(kind.parts.get(name, 0.0)) / 3.0 if name in _GEMMS else 0.0

    def _again(name: str, kind: KindTime) -> Floats:
        return kind.recompute_s if name == "recompute" else 0.0

    def _summed(
        per_layer: Callable[[str, KindTime], Floats], again: Callable[[str, KindTime], Floats]
    ) -> dict[str, NDArray[np.float64]]:
        return {
            name: _over_chunks(c, times, stages, partial(per_layer, name), partial(again, name))
            for name in listed
        }

    def _nothing(_name: str, _kind: KindTime) -> Floats:
        return 0.0

    return PassParts(
        _summed(_forward, _nothing), _summed(_backward, _again), _summed(_weight, _nothing)
    )


def _over_chunks(
    c: Context,
    times: KindTimes,
    stages: Stages,
    per_layer: Callable[[KindTime], Floats],
    per_recomputed: Callable[[KindTime], Floats],
) -> NDArray[np.float64]:
    """Sums over the layers of every chunk, with what each fully recomputed layer adds."""
    priced, apart = times.by_stage or times, times.by_stage is not None
    layers, model = _kinds_of_chunks(c, priced, stages), c.workload.model
    shape = np.shape(np.asarray(times.head.seconds))
    sums = np.zeros((*shape, *layers[0][1].shape))

    def of_ranks(seconds: Floats) -> NDArray[np.float64]:
        """Seconds of every rank, [..., pp], or one of them for all."""
        values = np.asarray(seconds, dtype=np.float64)
        return values if apart and values.ndim else values[..., None]

    for kind, number, recomputed in layers:
        sums = sums + of_ranks(per_layer(kind))[..., None, :] * number
        sums = sums + of_ranks(per_recomputed(kind))[..., None, :] * recomputed
    last = 0 if is_v_shaped(c.layout) else -1
    end = per_layer(priced.head)
    if priced.mtp is not None:
        end = end + model.mtp_layers * per_layer(priced.mtp)
    sums[..., 0, 0] += of_ranks(per_layer(priced.embedding))[..., 0]
    sums[..., -1, last] += of_ranks(end)[..., last]
    return sums
