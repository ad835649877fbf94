"""Seconds per micro-batch of each kind of layer, with the host's share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.attention import attention_block
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.ends import embedding, head
from meshwright.costmodel.layers.experts import hide_expert_traffic, moe_mlp
from meshwright.costmodel.layers.feed_forward import dense_mlp
from meshwright.costmodel.layers.kernels import gemm_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts, add, joined, scaled, total
from meshwright.costmodel.layout import Floats


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
