"""What CUDA graphs hold in HBM: a record of every kernel that they launch. Bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload

_NODE_BYTES = 10.0 * 1024.0
"""Of a kernel in an instantiated graph (NVIDIA/cccl pull request 3768: 'around 10KB per kernel node')."""
_DENSE_NODES = 40.0
"""Kernels of a Transformer Engine layer, forward and backward, at 16 bits: 2 norms, 4 products, rotary
embedding, attention, activation, 2 residual adds and the exchanges of tensor parallelism, and twice that
backward."""
_CAST_NODES = 40.0
"""More of them where operands are cast: two for each operand of its 12 products, scales and transposes."""
_ROUTER_NODES = 30.0
"""Of router, its loss and the preparation of the dispatch."""
_EXPERT_NODES = 50.0
"""Of permutation, dispatch, grouped products, combine and the shared experts."""


def graph_bytes(workload: Workload, layout: Layout) -> NDArray[np.float64]:
    """Records of the kernels in the CUDA graphs of a pipeline rank with its mean share of layers.

    A graph of the whole step holds every micro-batch. Graphs of single layers are captured for each
    micro-batch of a pipeline, and once without (megatron/core/transformer/cuda_graphs.py, TECudaGraphHelper).

    Parameters
    ----------
    workload : Workload
        Its graphs, model and precision are used.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of float
        Bytes, shaped like the layout.
    """
    layers = workload.model.layers / np.asarray(layout.pp, dtype=np.float64)
    captured = np.where(np.asarray(layout.pp) > 1, layout.num_micro_batches, 1)
    if workload.cuda_graph == "full":
        captured = np.asarray(layout.num_micro_batches)
    return np.asarray(_NODE_BYTES * _nodes_per_layer(workload) * layers * captured)


def _nodes_per_layer(workload: Workload) -> float:
    """Kernels of a layer and micro-batch that graphs launch."""
    scope, experts = workload.cuda_graph, workload.model.moe is not None
    if scope == "none":
        return 0.0
    blocks = workload.model.blocks
    router = blocks.experts * _ROUTER_NODES if experts else 0.0
    if scope == "feed_forward":
        return router or blocks.feed_forward * _DENSE_NODES / 2.0
    casts = _CAST_NODES if workload.precision not in ("bf16", "fp16") else 0.0
    attention = 0.5 * blocks.total * (_DENSE_NODES + casts) + router
    return attention + blocks.experts * _EXPERT_NODES if scope == "full" and experts else attention
