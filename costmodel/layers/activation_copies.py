"""Seconds that copies of activations to the host and back keep a layer waiting."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.layer_time import LayerTime, Parts, total
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.memory.activations import offloaded_per_layer
from meshwright.costmodel.memory.offloaded_activations import offloads_any
from meshwright.model_specs.hybrid import BlockShares

COPY_SHARE = 0.8
"""Of PCIe's nominal rate that copies between a GPU and pinned memory of its host attain: 52.8 of 64 GB/s on
H100 (NVIDIA/nvbandwidth, issue 24, device to host), 25 of 32 on A100 (ZaidQureshi/bam, issue 54)."""


def with_copies(c: Context, sent: LayerTime, layer: LayerTime, shares: BlockShares) -> LayerTime:
    """The layer with what its own seconds do not hide of the copies of its offloaded tensors.

    They run on streams of their own, forward to the host and backward from it, and take as long either way.
    What is not on the host when the layer ends is still in HBM; what is not back keeps its backward pass
    waiting: either pass lasts at least as long as its copies. Where experts exchange tokens over the network,
    those pass the same PCIe link between GPU and NIC, whether compute hides them or not.

    Parameters
    ----------
    c : Context
        Workload, layouts and the cluster's device.
    sent : LayerTime
        The layer with all that experts exchange as `ep_comm`.
    layer : LayerTime
        With what of it nothing hides, and without what the host's launches cost.
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    LayerTime
        With a part `offload` in both passes where anything is offloaded.
    """
    if not offloads_any(c.workload):
        return layer
    rate = COPY_SHARE * c.workload.cluster.device.pcie_gb_per_s * 1e9
    copy_s = np.asarray(offloaded_per_layer(c.workload, c.layout, shares).copied) / rate
    forward_s, backward_s = total(layer.forward), total(layer.backward) + total(layer.recompute)
    busy_f, busy_b = (copy_s + _over_network_s(c, parts) for parts in (sent.forward, sent.backward))
    return LayerTime(
        {**layer.forward, "offload": np.maximum(busy_f - forward_s, 0.0)},
        {**layer.backward, "offload": np.maximum(busy_b - backward_s, 0.0)},
        layer.recompute,
    )


def _over_network_s(c: Context, parts: Parts) -> Floats:
    """Seconds of the exchange of experts' tokens, 0 where their group lies in one scale-up domain."""
    members, exchanged_s = c.placement.ep, parts.get("ep_comm", 0.0)
    return np.where(members[..., 0] < members[..., -1], exchanged_s, 0.0)
