"""Seconds per micro-batch of each kind of layer, with the host's share, and the load of pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.kernels import gemm_s, weight_gradient_s
from meshwright.costmodel.layers.moe_operators import hide_expert_traffic, moe_mlp
from meshwright.costmodel.layers.operators import (
    Context,
    LayerTime,
    Parts,
    add,
    attention_block,
    dense_mlp,
    embedding,
    head,
    joined,
    scaled,
    total,
)
from meshwright.costmodel.layout import Floats, Ints, Recompute
from meshwright.costmodel.pipeline.schedules import has_trait
from meshwright.costmodel.pipeline.split import LayerCounts, Stages, layer_counts


@dataclass(frozen=True)
class KindTime:
    """One micro-batch through one layer: parts that add up, and what full recomputation would add."""

    parts: Parts
    backward_s: Floats
    full_recompute: Parts

    @property
    def seconds(self) -> Floats:
        """Forward, backward and selective recomputation."""
        return total(self.parts)

    @property
    def recompute_s(self) -> Floats:
        """Extra seconds when the layer is fully recomputed."""
        return total(self.full_recompute)

    def rows(self, index: NDArray[np.intp], size: int) -> KindTime:
        """The times at an index into arrays of `size` layouts."""

        def taken(seconds: Floats) -> Floats:
            return np.broadcast_to(np.asarray(seconds, dtype=np.float64), (size,))[index]

        return KindTime(
            {name: taken(part) for name, part in self.parts.items()},
            taken(self.backward_s),
            {name: taken(part) for name, part in self.full_recompute.items()},
        )


@dataclass(frozen=True)
class KindTimes:
    """All kinds of a model; `moe` and `mtp` are None without such layers."""

    dense: KindTime | None
    moe: KindTime | None
    embedding: KindTime
    head: KindTime
    mtp: KindTime | None

    def rows(self, index: NDArray[np.intp], size: int) -> KindTimes:
        """The times at an index into arrays of `size` layouts."""
        dense, moe, mtp = (
            None if kind is None else kind.rows(index, size)
            for kind in (self.dense, self.moe, self.mtp)
        )
        return KindTimes(
            dense, moe, self.embedding.rows(index, size), self.head.rows(index, size), mtp
        )


def kind_times(c: Context) -> KindTimes:
    """Prices every kind of layer of the model."""
    model = c.workload.model
    attention = attention_block(c)
    dense = moe = mtp = None
    launch = c.constants.framework.launch_layer_s
    if model.dense_layers:
        dense = _with_host(c, joined(attention, dense_mlp(c, model.ffn_hidden)), launch)
    if model.moe is not None and (model.moe_layers or model.mtp_layers):
        layer = hide_expert_traffic(c, joined(attention, moe_mlp(c)))
        stack = c.constants.framework
        moe = _with_host(c, layer, stack.launch_moe_layer_s, stack.moe_sync_s)
    top = head(c)
    head_time = _with_host(c, top, launch / 2)
    if model.mtp_layers:
        main = moe or dense
        assert main is not None
        join, join_backward_s = _mtp_projection(c)
        mtp = KindTime(
            add(main.parts, head_time.parts, join),
            main.backward_s + head_time.backward_s + join_backward_s,
            main.full_recompute,
        )
    return KindTimes(dense, moe, _with_host(c, embedding(c), launch / 4), head_time, mtp)


def _mtp_projection(c: Context) -> tuple[Parts, Floats]:
    """The GEMM from 2 h to h that joins a multi-token-prediction module to the model: parts, and backward."""
    h, n = c.workload.model.hidden, c.workload.model.hidden / np.asarray(c.layout.tp)
    backward = gemm_s(c.tokens, 2 * h, n, c.rates) + weight_gradient_s(2 * h, n, c.tokens, c.rates)
    return {"gemm": gemm_s(c.tokens, n, 2 * h, c.rates) + backward}, backward


def _with_host(c: Context, layer: LayerTime, launch_s: float, sync_s: float = 0.0) -> KindTime:
    """Adds what the host costs: the GPU and the host run side by side, and the slower one paces a layer.

    A p-norm of the two stands for their jitter; a CUDA graph of the whole step takes the host out.
    Once per layer and micro-batch the GPU idles for `sync_s`, unless a graph lets the host run ahead again;
    where the host is the slower one, its launches hide that wait.
    """
    framework, power = c.constants.framework, c.constants.shared["launch_norm"]
    parts = add(layer.forward, layer.backward, layer.recompute)
    share = _host_share(c)
    passes = 3.0
    waits = (
        sync_s * c.constants.device.host_factor
        if c.workload.cuda_graph in ("none", "feed_forward")
        else 0.0
    )
    extra = _host_excess(total(parts) + waits, (launch_s * passes + _pieces_s(c)) * share, power)
    gap = framework.serial_launch_s + (
        framework.launch_blocking_s if c.workload.launch_blocking else 0.0
    )
    parts = add(parts, {"host": extra + waits + gap * passes * share})
    forward_s = total(layer.forward)
    again_extra = _host_excess(forward_s, launch_s * share, power) + gap * share
    full = scaled(add(layer.forward, {"host": again_extra}), framework.recompute_fraction)
    backward_share = total(layer.backward) / np.maximum(forward_s + total(layer.backward), 1e-12)
    return KindTime(parts, total(parts) * backward_share, {"recompute": total(full)})


def _host_share(c: Context) -> float:
    """Host work that the run's CUDA graphs leave, times the pace of the device's host."""
    shared = c.constants.shared
    left = {"full": 0.0, "partial": shared["partial_graph_host_share"], "feed_forward": 1.0}
    return left.get(c.workload.cuda_graph, 1.0) * c.constants.device.host_factor


def _pieces_s(c: Context) -> Floats:
    """Host seconds for the pieces that a layer is cut into, each a GEMM or attention call and a transfer.

    Overlapped tensor parallelism cuts six of a layer's GEMMs (four forward, two backward) into tp. Ring
    attention runs in cp steps of a kernel, a transfer and corrections: about six pieces in each direction.
    """
    tp, cp = np.asarray(c.layout.tp), np.asarray(c.layout.cp)
    split = 6.0 * np.where(tp > 1, tp, 0) if c.tp_overlaps else 0.0
    steps = 0.0 if c.workload.cp_comm == "a2a" else 12.0 * np.where(cp > 1, cp, 0)
    return c.constants.framework.piece_launch_s * (split + steps)


def _host_excess(device_s: Floats, host_s: Floats, power: float) -> Floats:
    larger, smaller = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    out: Floats = larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power) - device_s
    return out


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
