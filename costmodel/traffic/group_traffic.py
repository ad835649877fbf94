"""Bytes of a step that one GPU puts into each group it belongs to, wherever the group lies.

The counterpart of `traffic` in this folder, which spreads the same bytes over the levels of a regular fabric.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.experts import routed_copies
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.costmodel.pipeline.rank_load import rank_counts
from meshwright.costmodel.pipeline.split import Stages
from meshwright.costmodel.traffic.level_traffic import (
    ADDED_PER_LAYER,
    context_volume,
    gradient_element_bytes,
    tensor_passes,
)


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Bytes of one step, one direction, of one GPU; a ring's are what passes every member of the group."""

    tensor: float
    """Ring passes over the tensor group."""
    context: float
    """Ring passes of keys and values over the context group; with `a2a`, what is sent to the whole group."""
    gradients: float
    """Ring passes of dense gradients and parameters over the data-parallel group (with context)."""
    expert_gradients: float
    """The same of the experts, over the ranks that hold the same ones."""
    expert_tensor: float
    """Ring passes of gathered tokens over the expert-tensor group."""
    experts: float
    """All-to-all: sent to the whole expert group, itself among the receivers, one copy a receiver block."""
    boundary: float
    """To the next pipeline rank, and as much back from it."""
    wrap: float
    """From the last pipeline rank to the first, with virtual stages."""


def group_traffic(c: Context, stages: Stages, expert_blocks: int = 1) -> GroupTraffic:
    """Of the rank with the most parameters, and the mean layer. `expert_blocks` is how many blocks (slots,
    nodes) an expert group spans: tokens that go to several experts of a block are sent there once.
    """
    model, layout = c.workload.model, c.layout
    tp, cp, dp, pp, vpp, m = (
        int(np.asarray(x))
        for x in (layout.tp, layout.cp, layout.dp, layout.pp, layout.vpp, layout.num_micro_batches)
    )
    hidden = 2.0 * float(np.asarray(c.tokens)) * model.hidden
    counts = rank_counts(c, stages)
    layers = m * model.layers / pp
    again = m * float(np.sum(counts.dense_recomputed + counts.moe_recomputed)) / pp
    again_moe = m * float(np.sum(counts.moe_recomputed)) / pp
    moe_layers = m * model.moe_layers / pp
    blocks, blocks_again = 2.0 * layers - moe_layers, 2.0 * again - again_moe
    dense, expert = (float(np.max(x)) for x in rank_parameters(model, layout, stages))
    each = gradient_element_bytes(c, m)
    hop = hidden / tp * m * vpp if pp > 1 else 0.0
    experts = expert_tensor = 0.0
    if model.moe is not None:
        passes = ADDED_PER_LAYER * moe_layers + 2.0 * again_moe
        routed = hidden / tp * float(c.workload.imbalance(int(np.asarray(layout.ep)))) * passes
        etp = int(np.asarray(layout.etp))
        expert_tensor = _ring(routed * model.moe.top_k * etp, etp)
    if model.moe is not None and int(np.asarray(layout.ep)) > 1:
        spanned = np.array([float(expert_blocks)])
        experts = routed * float(np.max(routed_copies(c.workload, spanned, layout.ep)))
    return GroupTraffic(
        tensor=_ring(hidden, tp) * tensor_passes(c, blocks, blocks_again),
        context=context_volume(c, layers, again)
        * (1.0 if c.workload.cp_comm == "a2a" else (cp - 1) / cp)
        if cp > 1
        else 0.0,
        gradients=_ring(dense * each, dp * cp),
        expert_gradients=_ring(expert * each, int(np.asarray(layout.edp))),
        expert_tensor=expert_tensor,
        experts=experts,
        boundary=hop,
        wrap=hop * (vpp - 1) / vpp,
    )


def _ring(volume: float, members: int) -> float:
    """What passes every member in one ring pass of a buffer of `volume` bytes in all."""
    return volume * (members - 1) / members
