"""Seconds per micro-batch of each kind of layer, with the host's share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layers.activation_copies import with_copies
from meshwright.costmodel.layers.attention import attention_block
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.ends import embedding, head
from meshwright.costmodel.layers.experts import hide_expert_traffic, moe_mlp
from meshwright.costmodel.layers.exposed import ring_steps
from meshwright.costmodel.layers.feed_forward import dense_mlp
from meshwright.costmodel.layers.kernels import gemm_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import (
    LayerTime,
    Parts,
    add,
    joined,
    portion,
    scaled,
    shared_out,
    total,
)
from meshwright.costmodel.layers.linear_attention import linear_attention_block
from meshwright.costmodel.layers.mamba import mamba_block
from meshwright.costmodel.layers.selective_scan import mamba1_block
from meshwright.costmodel.layers.sparse_attention import indexer_block
from meshwright.costmodel.layout import Floats
from meshwright.model_specs.hybrid import BlockShares


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
        """The times of some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions, 0 to size - 1.
        size : int
            Layouts that the times are of, at least 1.

        Returns
        -------
        KindTime
            Arrays of shape [k].
        """

        def taken(seconds: Floats) -> Floats:
            values = np.asarray(seconds, dtype=np.float64)
            return np.broadcast_to(values, (size,))[index]

        return KindTime(
            {name: taken(part) for name, part in self.parts.items()},
            taken(self.backward_s),
            {name: taken(part) for name, part in self.full_recompute.items()},
        )

    def beside(self, other: KindTime) -> KindTime:
        """The times of these layouts and of others after them.

        Parameters
        ----------
        other : KindTime
            Of the same model run the same way, arrays of shape [k].

        Returns
        -------
        KindTime
            Arrays of shape [n + k], for these of shape [n].
        """

        def both(these: Parts, others: Parts) -> Parts:
            return {name: np.append(part, others[name]) for name, part in these.items()}

        return KindTime(
            both(self.parts, other.parts),
            np.append(self.backward_s, other.backward_s),
            both(self.full_recompute, other.full_recompute),
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
        """The times of some layouts.

        Parameters
        ----------
        index : array of int, shape [k]
            Positions, 0 to size - 1.
        size : int
            Layouts that the times are of, at least 1.

        Returns
        -------
        KindTimes
            Arrays of shape [k].
        """
        return KindTimes(
            dense=None if self.dense is None else self.dense.rows(index, size),
            moe=None if self.moe is None else self.moe.rows(index, size),
            embedding=self.embedding.rows(index, size),
            head=self.head.rows(index, size),
            mtp=None if self.mtp is None else self.mtp.rows(index, size),
        )

    def beside(self, other: KindTimes) -> KindTimes:
        """The times of these layouts and of others after them.

        Parameters
        ----------
        other : KindTimes
            Of the same model run the same way, arrays of shape [k].

        Returns
        -------
        KindTimes
            Arrays of shape [n + k], for these of shape [n].
        """

        def both(these: KindTime | None, others: KindTime | None) -> KindTime | None:
            return None if these is None or others is None else these.beside(others)

        return KindTimes(
            dense=both(self.dense, other.dense),
            moe=both(self.moe, other.moe),
            embedding=self.embedding.beside(other.embedding),
            head=self.head.beside(other.head),
            mtp=both(self.mtp, other.mtp),
        )


def kind_times(c: Context) -> KindTimes:
    """Prices every kind of layer of the model.

    Layers that differ in their attention alone, by a window or by linear attention, have their mean time, and
    so have the layers of a hybrid pattern, and those of a group that ends with a layer with experts.
    docs/cost_model.md, "One layer", has the source.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    KindTimes
        Seconds of one micro-batch, shaped like the layouts broadcast against the placements.
    """
    model, stack = c.workload.model, c.constants.framework
    mixers = _mixers(c)
    dense = moe = mtp = None
    if model.dense_layers:
        dense = _mean_layer(c, mixers, model.blocks_of(experts=False))
    if model.moe is not None and model.moe.every > 1:
        moe = _mean_of_group(c, mixers, model.moe.every)
    elif model.moe is not None and (model.moe_layers or model.mtp_layers):
        moe = _mean_layer(c, mixers, model.blocks_of(experts=True))
    head_time = _with_host(c, head(c), stack.launch_layer_s / 2)
    if model.mtp_layers:
        main = moe or dense
        assert main is not None
        mtp = _mtp_module(c, main, head_time)
    embedding_time = _with_host(c, embedding(c), stack.launch_layer_s / 4)
    return KindTimes(dense, moe, embedding_time, head_time, mtp)


def _mixers(c: Context) -> tuple[LayerTime, ...]:
    """Attention and Mamba, each by its share of the layers, those of them that the model has."""
    model = c.workload.model
    blocks: list[LayerTime] = []
    if model.blocks.attention:
        attention = attention_block(c)
        if model.indexer is not None:
            attention = joined(attention, indexer_block(c))
        if model.linear_layers:
            linear = linear_attention_block(c)
            attention = shared_out(linear, attention, model.linear_fraction)
        blocks.append(portion(attention, model.blocks.attention))
    if model.blocks.mamba:
        mamba = mamba_block(c) if model.mamba1 is None else mamba1_block(c)
        blocks.append(portion(mamba, model.blocks.mamba))
    return tuple(blocks)


def _mean_layer(c: Context, mixers: tuple[LayerTime, ...], shares: BlockShares) -> KindTime:
    """A layer of these mixers and its share of feed-forward and experts, with the host's work for all of it.

    A layer of a pattern is one block, half of what a transformer's layer launches.
    """
    stack = c.constants.framework
    blocks = list(mixers)
    launch_s = 0.5 * shares.tensor_parallel * stack.launch_layer_s
    if shares.feed_forward:
        blocks.append(portion(dense_mlp(c, c.workload.model.ffn_hidden), shares.feed_forward))
    if not shares.experts:
        layer = joined(*blocks)
        layer = with_copies(c, layer, layer, shares)
        return _with_host(c, layer, launch_s, shares=shares)
    blocks.append(portion(moe_mlp(c), shares.experts))
    # A layer of attention and experts launches `launch_moe_layer_s`, half a layer of it for attention.
    beside_attention = 0.5 * (shares.tensor_parallel - shares.experts)
    launch_s = shares.experts * stack.launch_moe_layer_s + beside_attention * stack.launch_layer_s
    layer = joined(*blocks)
    layer = with_copies(c, layer, hide_expert_traffic(c, layer), shares)
    return _with_host(c, layer, launch_s, shares.experts * stack.moe_sync_s, shares=shares)


def _mean_of_group(c: Context, mixers: tuple[LayerTime, ...], layers: int) -> KindTime:
    """The mean of so many layers, of which the last has experts."""
    dense, experts = (_mean_layer(c, mixers, kind) for kind in c.workload.model.blocks.kinds())
    share = 1.0 / layers
    return KindTime(
        add(scaled(dense.parts, 1.0 - share), scaled(experts.parts, share)),
        (1.0 - share) * np.asarray(dense.backward_s) + share * np.asarray(experts.backward_s),
        add(scaled(dense.full_recompute, 1.0 - share), scaled(experts.full_recompute, share)),
    )


def _mtp_module(c: Context, main: KindTime, head_time: KindTime) -> KindTime:
    """A multi-token-prediction module: a main layer, a head, and the GEMM from 2 h to h that joins it."""
    h, n = c.workload.model.hidden, c.workload.model.hidden / c.layout.tp
    backward = gemm_s(c.tokens, 2 * h, n, c.rates) + weight_gradient_s(2 * h, n, c.tokens, c.rates)
    join: Parts = {"gemm": gemm_s(c.tokens, n, 2 * h, c.rates) + backward}
    return KindTime(
        add(main.parts, head_time.parts, join),
        main.backward_s + head_time.backward_s + backward,
        main.full_recompute,
    )


_PASSES = 3.0
"""Launches of a layer in forward passes: one forward, and a backward pass that launches twice as much."""
_OVERLAPPED_GEMMS = 3.0
"""GEMMs of a block that overlapped tensor parallelism cuts into tp: two forward, one backward."""
_RING_STEP_LAUNCHES = 12.0
"""Launches of a step of ring attention: a kernel, a transfer and corrections, about six in each direction."""
_TRANSFORMER = BlockShares(attention=1.0, mamba=0.0, feed_forward=1.0, experts=0.0)


def _with_host(
    c: Context,
    layer: LayerTime,
    launch_s: float,
    sync_s: float = 0.0,
    *,
    shares: BlockShares = _TRANSFORMER,
) -> KindTime:
    """Adds what the host costs: the GPU and the host run side by side, and the slower one paces a layer.

    A p-norm of the two stands for their jitter; a CUDA graph of the whole step takes the host out.
    Once per layer and micro-batch the GPU idles for `sync_s`, unless a graph lets the host run ahead again;
    where the host is the slower one, its launches hide that wait.
    """
    framework, power = c.constants.framework, c.constants.shared["launch_norm"]
    parts = add(layer.forward, layer.backward, layer.recompute)
    share = _host_share(c)
    waits = 0.0
    if c.workload.cuda_graph in ("none", "feed_forward"):
        waits = sync_s * c.constants.device.host_factor
    host_s = (launch_s * _PASSES + _cut_launches_s(c, shares)) * share
    excess = _host_excess_s(total(parts) + waits, host_s, power)
    gap = framework.serial_launch_s
    if c.workload.launch_blocking:
        gap += framework.launch_blocking_s
    gap *= 0.5 * shares.total
    parts = add(parts, {"host": excess + waits + gap * _PASSES * share})
    forward_s, backward_s = total(layer.forward), total(layer.backward)
    forward_host = _host_excess_s(forward_s, launch_s * share, power) + gap * share
    forward_again = add(layer.forward, {"host": forward_host})
    full = scaled(forward_again, framework.recompute_fraction)
    backward_share = backward_s / np.maximum(forward_s + backward_s, 1e-12)
    return KindTime(parts, total(parts) * backward_share, {"recompute": total(full)})


def _host_share(c: Context) -> float:
    """Host work that the run's CUDA graphs leave, times the pace of the device's host."""
    partial = c.constants.shared["partial_graph_host_share"]
    share = {"full": 0.0, "partial": partial}.get(c.workload.cuda_graph, 1.0)
    return share * c.constants.device.host_factor


def _cut_launches_s(c: Context, shares: BlockShares) -> Floats:
    """Host seconds to launch what a layer is cut into: GEMMs beside transfers, steps of ring attention."""
    tp, in_ring = np.asarray(c.layout.tp), ring_steps(c)
    gemms: Floats = 0.0
    if c.tp_overlaps:
        gemms = _OVERLAPPED_GEMMS * shares.total * np.where(tp > 1, tp, 0)
    steps = _RING_STEP_LAUNCHES * shares.attention * np.where(in_ring > 1, in_ring, 0)
    return c.constants.framework.piece_launch_s * (gemms + steps)


def _host_excess_s(device_s: Floats, host_s: Floats, power: float) -> Floats:
    """What the p-norm of device and host takes longer than the device."""
    larger, smaller = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    together = larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)
    excess: Floats = together - device_s
    return excess
