"""Bytes of a step that one GPU puts into each group it belongs to, wherever the group lies.

The counterpart of `level_traffic`, which spreads the same bytes over the levels of a regular fabric.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.context_groups import one_ring
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.experts import routed_copies
from meshwright.costmodel.memory.states import optimizer_shards, rank_parameters
from meshwright.costmodel.pipeline.split import Stages
from meshwright.costmodel.token_dispatch import GATHERS, gathered_ranks
from meshwright.costmodel.traffic.volumes import (
    RankWork,
    context_volumes,
    expert_passes,
    gathered_bytes,
    gradient_element_bytes,
    mean_rank_work,
    reduced_shard_bytes,
    routed_bytes,
    tensor_passes,
)


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Bytes of one step, one direction, of one GPU; a ring's are what passes every member of the group."""

    tensor: float
    """Ring passes over the tensor group."""
    context: float
    """Ring passes of keys and values over the context group; with `a2a`, what is sent to the whole group;
    with `a2a+p2p`, what layers with linear attention or Mamba send to it."""
    context_swaps: float
    """What `a2a+p2p` sends to the neighbours that swap heads for tokens, itself among them."""
    context_rings: float
    """Ring passes of `a2a+p2p` over every A-th rank of the context group."""
    gradients: float
    """Ring passes of dense gradients and parameters over the data-parallel group (with context), or over a
    shard group where there are several."""
    gradients_between: float
    """Ring passes of a rank's own dense shard over the shard groups; 0 where there is one."""
    expert_gradients: float
    """As `gradients` of the experts, over the ranks that hold the same ones."""
    expert_gradients_between: float
    expert_tensor: float
    """Ring passes of gathered tokens over the expert-tensor group."""
    experts: float
    """All-to-all: sent to the whole expert group, itself among the receivers, one copy a receiver block."""
    expert_gathers: float
    """Ring passes of the all-gather dispatcher over the etp ep ranks of a group, in place of both."""
    boundary: float
    """To the next pipeline rank, and as much back from it."""
    wrap: float
    """From the last pipeline rank to the first, with virtual stages."""


def group_traffic(c: Context, stages: Stages, expert_blocks: int = 1) -> GroupTraffic:
    """Bytes of a step that one GPU puts into each of its groups.

    Gradients are those of the rank with the most parameters, the others of the mean layer.

    docs/cost_model.md, "Collectives", has the sources.

    Parameters
    ----------
    c : Context
        Workload and one layout.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    expert_blocks : int
        Blocks (slots, nodes) that an expert group spans, at least 1: tokens that go to several experts of a
        block are sent there once.

    Returns
    -------
    GroupTraffic
        Bytes, one direction.
    """
    layout = c.layout
    tp, pp, vpp = (int(np.asarray(x)) for x in (layout.tp, layout.pp, layout.vpp))
    work = mean_rank_work(c, stages)
    hop = work.activation_bytes / tp * work.micro_batches * vpp if pp > 1 else 0.0
    experts, expert_tensor = _expert_bytes(c, work, expert_blocks)
    return GroupTraffic(
        tensor=_ring(work.activation_bytes, tp) * tensor_passes(c, work),
        **_context_bytes(c, work),
        **_gradient_bytes(c, stages),
        expert_tensor=expert_tensor,
        experts=experts,
        expert_gathers=_ring(gathered_bytes(c, work), int(gathered_ranks(layout))),
        boundary=hop,
        wrap=hop * (vpp - 1) / vpp,
    )


def _gradient_bytes(c: Context, stages: Stages) -> dict[str, float]:
    """Ring passes over the ranks that shard together, and of the shard of each over their groups."""
    groups = int(np.asarray(c.layout.shard_groups))
    kinds = zip(
        ("gradients", "expert_gradients"),
        rank_parameters(c.workload.model, c.layout, stages),
        (int(np.asarray(size)) for size in optimizer_shards(c.layout)),
        strict=True,
    )
    element, reduced, moved = gradient_element_bytes(c), reduced_shard_bytes(c), {}
    for name, parameters, shards in kinds:
        most = float(np.max(parameters))
        moved[name] = _ring(most * element, shards)
        moved[f"{name}_between"] = _ring(most / shards * reduced, groups)
    return moved


def _context_bytes(c: Context, work: RankWork) -> dict[str, float]:
    """Ring passes over the context group, or what is sent to all of it, and both of its parts."""
    cp, moved = int(np.asarray(c.layout.cp)), context_volumes(c, work)
    if cp == 1:
        return {"context": 0.0, "context_swaps": 0.0, "context_rings": 0.0}
    share = (cp - 1) / cp if one_ring(c.workload) else 1.0
    return {
        "context": moved.whole * share,
        "context_swaps": moved.swapped,
        "context_rings": _ring(moved.ring, cp // moved.neighbours),
    }


def _expert_bytes(c: Context, work: RankWork, blocks: int) -> tuple[float, float]:
    """Bytes of the expert group's all-to-all, and of the expert-tensor group's rings."""
    moe = c.workload.model.moe
    if moe is None or c.workload.moe_dispatch == GATHERS:
        return 0.0, 0.0
    etp = int(np.asarray(c.layout.etp))
    routed = routed_bytes(c, work) * expert_passes(work)
    expert_tensor = _ring(routed * moe.top_k * etp, etp)
    if int(np.asarray(c.layout.ep)) == 1:
        return 0.0, expert_tensor
    copies = routed_copies(c.workload, np.array([float(blocks)]), c.layout.ep)
    return routed * float(np.max(copies)), expert_tensor


def _ring(volume: float, members: int) -> float:
    """What passes every member in one ring pass of a buffer of `volume` bytes in all."""
    return volume * (members - 1) / members
