"""Seconds per micro-batch of each pipeline rank under a split, and bounds on the busiest over all splits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes
from meshwright.costmodel.layers.layer_time import Parts, add
from meshwright.costmodel.layout import Floats, Ints, Recompute
from meshwright.costmodel.pipeline.schedules import has_trait
from meshwright.costmodel.pipeline.split import LayerCounts, Stages, layer_counts


def rank_counts(c: Context, stages: Stages) -> LayerCounts:
    """Layers that each pipeline rank of a split runs per micro-batch, for one layout."""
    full = bool(int(np.asarray(c.layout.recompute)) & Recompute.FULL)
    recomputed = int(np.asarray(c.layout.recompute_layers)) if full else 0
    v_shaped = bool(has_trait(c.layout.schedule, "v_shaped").any())
    return layer_counts(c.workload.model.dense_layers, stages, recomputed, v_shaped=v_shaped)


def rank_parts(
    times: KindTimes, counts: LayerCounts, mtp_layers: int, head_rank: Ints = -1
) -> Parts:
    """Seconds by part of each rank and micro-batch, arrays [..., pp]; the head and the MTP modules run on
    `head_rank`."""
    rank = np.arange(len(counts.dense))
    first, last = (rank == 0).astype(np.float64), (rank == rank[head_rank]).astype(np.float64)
    kinds = (
        (times.dense, counts.dense, counts.dense_recomputed),
        (times.moe, counts.moe, counts.moe_recomputed),
        (times.embedding, first, None),
        (times.mtp, mtp_layers * last, None),
    )
    rows: list[Parts] = [{"head": np.asarray(times.head.seconds)[..., None] * last}]
    for kind, number, again in kinds:
        if kind is None:
            continue
        rows.append(
            {name: np.asarray(seconds)[..., None] * number for name, seconds in kind.parts.items()}
        )
        if again is not None:
            rows.append(
                {n: np.asarray(s)[..., None] * again for n, s in kind.full_recompute.items()}
            )
    return add(*rows)


def cheapest_layer_s(times: KindTimes) -> Floats:
    """One micro-batch, forward and backward, through the cheapest kind of layer."""
    kinds = [kind.seconds for kind in (times.dense, times.moe) if kind is not None]
    out: Floats = kinds[0] if len(kinds) == 1 else np.minimum(kinds[0], kinds[1])
    return out


def least_busiest_s(layers: int, layer_s: Floats, end_s: Floats, ranks: Ints | Floats) -> Floats:
    """Load of the busiest of `ranks` (pp) that share equal layers, the last of which also carries `end_s`.

    With k layers on each other rank the last one is left with x = L - (pp - 1) k: max(k t, end + x t).
    More than ceil(L / pp) elsewhere pay only until k t covers the end, at k = (end / t + L) / pp.
    """
    pp, t = np.asarray(ranks, dtype=np.float64), np.asarray(layer_s, dtype=np.float64)
    even = np.ceil(layers / pp)
    covered = np.maximum(np.ceil((np.asarray(end_s) / t + layers) / pp), even)

    def with_others_at(k: Floats) -> Floats:
        last: Floats = end_s + np.maximum(layers - (pp - 1) * k, 0.0) * t
        return np.maximum(np.where(pp > 1, k * t, 0.0), last)

    out: Floats = np.minimum(with_others_at(covered), with_others_at(np.maximum(covered - 1, even)))
    return out


def least_busiest_in_rooms_s(
    rooms: NDArray[np.float64], layers: int, layer_s: Floats, end_s: Floats, end_rank: Ints
) -> NDArray[np.float64]:
    """`least_busiest_s` where rank r has room for `rooms[..., r]` layers; infinite where all have too few.

    In less than (k + 1) t every rank gets k layers at most, and the one with the end at most those that begin
    before (k + 1) t - end: the least k for which this makes `layers` bounds the busiest rank by k t. Arrays
    [n], rooms [n, ranks].
    """
    shape = rooms.shape[:1]
    t, end = (
        np.broadcast_to(np.asarray(x, dtype=np.float64), shape)[:, None] for x in (layer_s, end_s)
    )
    last = np.arange(rooms.shape[1]) == np.broadcast_to(np.asarray(end_rank), shape)[:, None]

    def held(k: NDArray[np.float64]) -> NDArray[np.float64]:
        most = np.where(last, np.clip(np.ceil(k[:, None] + 1 - end / t) - 1, 0, None), k[:, None])
        return np.asarray(np.minimum(rooms, most).sum(axis=1))

    over = float(layers) + float(np.max(end / t, initial=0.0))
    low, high = np.zeros(shape), np.full(shape, np.ceil(over) + 1.0)
    possible = held(high) >= layers
    while np.any(high - low > 1):
        middle = np.floor((low + high) / 2)
        enough = held(middle) >= layers
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.asarray(np.where(possible, high * t[:, 0], np.inf))


def even_layout_load(c: Context, times: KindTimes) -> tuple[Floats, Floats]:
    """Least possible (busiest rank, sum of ranks) per micro-batch over all splits; arrays [n].

    Every virtual stage has a layer. So the busiest rank has at least the mean load, ceil(layers / pp) of the
    cheaper layers, and what the best split of the main layers alone gives; the last rank has at least one
    layer per virtual stage under the head.
    """
    model, layout = c.workload.model, c.layout
    pp, vpp = np.asarray(layout.pp), np.asarray(layout.vpp)
    full = (np.asarray(layout.recompute) & Recompute.FULL) != 0
    chunks = pp * vpp
    # Sum over chunks of min(r, layers) is least when all but one chunk hold a single layer.
    asked = np.asarray(layout.recompute_layers)
    least = np.minimum(chunks - 1 + np.minimum(asked, model.layers - chunks + 1), model.layers)
    again = np.where(full & (asked > 0), least, 0)
    whole = times.embedding.seconds + times.head.seconds
    cheapest: Floats = np.inf
    rec_cheapest: Floats = np.inf
    for kind, number in ((times.dense, model.dense_layers), (times.moe, model.moe_layers)):
        if kind is not None and number:
            whole = whole + number * kind.seconds
            cheapest = np.minimum(cheapest, kind.seconds)
            rec_cheapest = np.minimum(rec_cheapest, kind.recompute_s)
    whole = whole + rec_cheapest * again
    end = times.head.seconds
    if times.mtp is not None:
        whole = whole + model.mtp_layers * times.mtp.seconds
        end = end + model.mtp_layers * times.mtp.seconds
    main, number = (
        (times.moe, model.moe_layers) if model.moe_layers else (times.dense, model.dense_layers)
    )
    assert main is not None
    busiest = np.maximum(whole / pp, np.ceil(model.layers / pp) * cheapest)
    busiest = np.maximum(busiest, least_busiest_s(number, main.seconds, end, pp))
    return np.maximum(busiest, end + vpp * cheapest), whole
