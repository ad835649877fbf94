"""What every process group of a mapping sends over every level: group by group, then added up.

Bytes are those of one step in one direction. A ring's volume passes every block that holds some but not all
of its members once, spread over the members there; a member of an all-to-all sends an equal part to each of
the others; neighbours of a pipeline send an activation on and a gradient back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from meshwright.costmodel.context_groups import HIERARCHICAL, one_ring, swapping_ranks
from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.experts import routed_copies
from meshwright.costmodel.token_dispatch import deduplicates
from meshwright.costmodel.traffic.group_traffic import GroupTraffic, group_traffic
from meshwright.planner.mapping.crossing.positions import LevelPositions, RankPositions
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.mapping.process_groups import process_groups

Kind = Literal["ring", "all-to-all", "chain"]
MICRO_BATCHES, GRADIENTS = "micro-batches", "gradients"
PARTS = {
    "edp": "dp", "dp-between": "dp", "edp-between": "dp",
    "cp-rings": "cp", "cp-swaps": "cp", "ep-gathers": "ep",
}  # fmt: skip
"""Flows that are a part of what an axis sends."""


@dataclass(frozen=True, kw_only=True)
class AxisFlow:
    """The process groups of one axis and what each member sends."""

    axis: str
    """tp, cp, pp, ep, etp; dp for dense gradients, edp for those of experts, with shard groups inside of one,
    and `dp-between` and `edp-between` over them; of a2a+p2p `cp-rings` and `cp-swaps`, of the all-gather
    dispatcher `ep-gathers`."""
    kind: Kind
    phase: str
    groups: IntArray
    """Ranks, shape [groups, members]."""
    volume: float
    """Of a ring, the bytes that pass every member; of an all-to-all, those that a member sends to the whole
    group, itself among the receivers, for one copy of a token; of a chain, those between neighbours."""
    wrap: float = 0.0
    """Of a chain, from the last member to the first."""
    relayed: bool = True
    """Whether an all-to-all changes rails inside nodes only."""

    @property
    def members(self) -> int:
        """Ranks in a group."""
        return int(self.groups.shape[1])


@dataclass(frozen=True, kw_only=True)
class LevelFlow:
    """What one axis sends over one level."""

    crossing: FloatArray
    """From every rank to other sub-blocks, where its group lies in several of this block; shape [ranks]."""
    leaving: FloatArray
    """From every rank over its sub-block's up-link, wherever it goes."""


def axis_flows(c: Context, stages: Stages) -> list[AxisFlow]:
    """Every axis that sends something, of ranks counted in Megatron's default order."""
    moe = c.workload.model.moe is not None
    groups = process_groups(c.layout, experts=moe)
    moved = group_traffic(c, stages)
    cluster = c.workload.cluster
    context: Kind = "ring" if one_ring(c.workload) else "all-to-all"
    has_nvlink = cluster.nvlink_domain >= cluster.gpus_per_node > 1
    deduplicated = deduplicates(c.workload) and has_nvlink

    def flow(axis: str, kind: Kind, volume: float, *, name: str = "") -> AxisFlow:
        return AxisFlow(
            axis=axis, kind=kind, phase=MICRO_BATCHES, groups=groups[name or axis], volume=volume
        )

    flows = [
        flow("tp", "ring", moved.tensor),
        replace(flow("cp", context, moved.context), relayed=cluster.crosses_rails_inside),
        *_hierarchical_flows(c, groups["cp"], moved),
        *_gradient_flows(c, "dp", groups["dp-cp"], moved.gradients, moved.gradients_between),
        replace(flow("pp", "chain", moved.boundary), wrap=moved.wrap),
    ]
    if moe:
        one_copy = float(np.max(routed_copies(c.workload, np.ones(1), c.layout.ep)))
        flows += [
            replace(
                flow("ep", "all-to-all", moved.experts / one_copy),
                relayed=deduplicated or cluster.crosses_rails_inside,
            ),
            flow("etp", "ring", moved.expert_tensor),
            flow("ep-gathers", "ring", moved.expert_gathers, name="etp-ep"),
            *_gradient_flows(
                c, "edp", groups["edp"], moved.expert_gradients, moved.expert_gradients_between
            ),
        ]
    return [flow for flow in flows if flow.members > 1 and flow.volume > 0]


def _gradient_flows(
    c: Context, axis: str, groups: IntArray, within: float, between: float
) -> list[AxisFlow]:
    """Rings over the ranks that shard together, neighbours each, and over those with the same shard."""
    members, shard_groups = groups.shape[1], int(np.asarray(c.layout.shard_groups))
    number = shard_groups if members % shard_groups == 0 else 1
    apart = groups.reshape(len(groups), number, -1)
    rings = (
        (axis, apart.reshape(-1, apart.shape[2]), within),
        (f"{axis}-between", apart.transpose(0, 2, 1).reshape(-1, number), between),
    )
    return [
        AxisFlow(axis=name, kind="ring", phase=GRADIENTS, groups=ranks, volume=volume)
        for name, ranks, volume in rings
    ]


def _hierarchical_flows(c: Context, groups: IntArray, moved: GroupTraffic) -> list[AxisFlow]:
    """The rings and the swaps of a context group in `a2a+p2p`.

    Neighbours swap, every A-th rank is in a ring (megatron/core/parallel_state.py,
    create_hierarchical_groups).
    """
    if c.workload.cp_comm != HIERARCHICAL or moved.context_swaps == 0:
        return []
    size = int(swapping_ranks(c.workload, c.layout))
    apart = groups.reshape(len(groups), -1, size)
    rings = AxisFlow(
        axis="cp-rings",
        kind="ring",
        phase=MICRO_BATCHES,
        groups=apart.transpose(0, 2, 1).reshape(-1, apart.shape[1]),
        volume=moved.context_rings,
    )
    swaps = AxisFlow(
        axis="cp-swaps",
        kind="all-to-all",
        phase=MICRO_BATCHES,
        groups=apart.reshape(-1, size),
        volume=moved.context_swaps,
        relayed=c.workload.cluster.crosses_rails_inside,
    )
    return [rings, swaps]


def level_flow(
    c: Context, flow: AxisFlow, positions: RankPositions, level: LevelPositions
) -> LevelFlow:
    """What each rank of an axis sends over a level."""
    if flow.kind == "chain":
        return _chain(flow, level)
    members = flow.members
    in_sub, in_block = _members_beside(flow, level.sub), _members_beside(flow, level.block)
    if flow.kind == "ring":
        leaving = np.where(in_sub < members, flow.volume / in_sub, 0.0)
    else:
        sent = flow.volume * _copies(c, flow, in_sub)
        leaving = sent * (members - in_sub) / members
    crossing = np.where(in_block > in_sub, leaving, 0.0)
    if flow.kind == "all-to-all" and level.rail_apart and not flow.relayed:
        detoured = sent * _on_other_rails(flow, positions, level) / members
        leaving, crossing = leaving + detoured, crossing + detoured
    ranks = len(level.sub)
    return LevelFlow(
        crossing=_by_rank(flow, crossing, ranks), leaving=_by_rank(flow, leaving, ranks)
    )


def _copies(c: Context, flow: AxisFlow, in_sub: IntArray) -> FloatArray | float:
    """Copies of a token for all blocks of a group, one for each that holds a receiver."""
    if flow.axis != "ep":
        return 1.0
    return routed_copies(c.workload, flow.members / in_sub, c.layout.ep)


def _chain(flow: AxisFlow, level: LevelPositions) -> LevelFlow:
    leaving, crossing = np.zeros(len(level.sub)), np.zeros(len(level.sub))
    for before, after, volume in _hops(flow):
        first, second = flow.groups[:, before], flow.groups[:, after]
        apart = level.sub[first] != level.sub[second]
        here = apart & (level.block[first] == level.block[second])
        for end in (first, second):
            np.add.at(leaving, end[apart], volume)
            np.add.at(crossing, end[here], volume)
    return LevelFlow(crossing=crossing, leaving=leaving)


def _hops(flow: AxisFlow) -> list[tuple[int, int, float]]:
    """(member, next member, bytes between them) of a chain; the last one leads back to the first."""
    hops = [(member, member + 1, flow.volume) for member in range(flow.members - 1)]
    return [*hops, (-1, 0, flow.wrap)]


def _members_beside(flow: AxisFlow, *of: IntArray) -> IntArray:
    """For every member, how many of its group share its block (of several kinds at once); groups' shape."""
    key = np.repeat(np.arange(len(flow.groups)), flow.members)
    for blocks in of:
        key = key * (int(blocks.max()) + 1) + blocks[flow.groups].ravel()
    _, back, counts = np.unique(key, return_inverse=True, return_counts=True)
    return np.asarray(counts[back.reshape(-1)], dtype=np.int64).reshape(flow.groups.shape)


def _on_other_rails(flow: AxisFlow, positions: RankPositions, level: LevelPositions) -> IntArray:
    """For every member, those of its group in the sub-block that are on another node and another rail."""
    sub, rail, node = level.sub, level.rail, positions.node
    assert rail is not None
    on_other_nodes = _members_beside(flow, sub) - _members_beside(flow, sub, node)
    on_same_rail = _members_beside(flow, sub, rail) - _members_beside(flow, sub, node, rail)
    return on_other_nodes - on_same_rail


def _by_rank(flow: AxisFlow, per_member: FloatArray, ranks: int) -> FloatArray:
    sent = np.zeros(ranks)
    sent[flow.groups.ravel()] = per_member.ravel()
    return sent


def between_halves(
    c: Context, flow: AxisFlow, side: IntArray, level: LevelPositions, blocks: int
) -> FloatArray:
    """Bytes from the first half of every block to its second, shape [blocks]; `side` is 0 or 1 by rank.

    A ring passes from one half to the other once, however often the halves alternate along it.
    """
    block = level.block[flow.groups]
    second = side[flow.groups]
    if flow.kind == "chain":
        crossing = np.zeros(blocks)
        for first, last, volume in _hops(flow):
            apart = (block[:, first] == block[:, last]) & (second[:, first] != second[:, last])
            np.add.at(crossing, block[apart, first], volume)
        return crossing
    group = np.repeat(np.arange(len(flow.groups)), flow.members)
    group_blocks, back, counts = np.unique(
        group * blocks + block.ravel(), return_inverse=True, return_counts=True
    )
    back = back.reshape(-1)
    on_second = np.bincount(back, weights=second.ravel(), minlength=len(group_blocks))
    if flow.kind == "ring":
        cut = (on_second > 0) & (on_second < counts)
        cut_rings = np.bincount(group_blocks[cut] % blocks, minlength=blocks)
        return np.asarray(flow.volume * cut_rings, dtype=np.float64)
    copies = _copies(c, flow, _members_beside(flow, level.sub))
    sent = flow.volume * copies / flow.members * np.ones(flow.groups.shape)
    passed = np.where(second.ravel() == 0, sent.ravel() * on_second[back], 0.0)
    bytes_of_blocks = np.bincount(block.ravel(), weights=passed, minlength=blocks)
    return np.asarray(bytes_of_blocks, dtype=np.float64)


def by_axis(flows: Mapping[str, FloatArray]) -> dict[str, float]:
    """Mean bytes of a rank, dense and expert gradients together as `dp`, all of context as `cp`."""
    mean_bytes: dict[str, float] = {}
    for axis, sent in flows.items():
        name = PARTS.get(axis, axis)
        mean_bytes[name] = mean_bytes.get(name, 0.0) + float(np.mean(sent))
    return {axis: mean for axis, mean in mean_bytes.items() if mean > 0}
