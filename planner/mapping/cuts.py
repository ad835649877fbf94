"""The bisection rule on a mapping: what must cross a cut within a phase of the step takes no longer than it.

A step has two phases: the micro-batches, in which tensor, context, expert and pipeline groups talk, and the
synchronisation of gradients and parameters, which may run beside the last micro-batch (all of them with
ZeRO-3) and then alone. Groups that are active in one phase share the links, so their bytes add up.

At every level two kinds of cuts: the up-link of each sub-block, and the two halves of each block, by
their minimum cut. The busiest of each kind stands for its level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from meshwright.cluster_specs.allocation import (
    FabricLevels,
    Place,
    allocated_places,
    fabric_levels,
    full_levels,
)
from meshwright.cluster_specs.links import (
    Joint,
    Outline,
    halves_cut_gb_per_s,
    listed_fabric,
    listed_joints,
    outline_of,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster, leaves_are_domains, level_rates
from meshwright.costmodel.collectives import Links, halves_go_by_tree
from meshwright.costmodel.estimate import Estimate, Stages
from meshwright.costmodel.feed_forward import routed_copies
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import ROUNDING, Layout, Placement
from meshwright.costmodel.mixed import Segment
from meshwright.costmodel.rates import calibrated_constants, links_of
from meshwright.costmodel.step_time import StepTime, make_context
from meshwright.costmodel.volumes import (
    CutUse,
    GroupTraffic,
    LevelBytes,
    gradients_all_reduced,
    group_traffic,
    phase_seconds,
    tensor_all_reduced,
    tree_over_ring,
)
from meshwright.costmodel.workload import (
    HIERARCHICAL,
    Workload,
    deduplicates,
    one_ring,
    swapping_ranks,
)
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.mapping.slots import process_groups

# Where the ranks of a mapping stand in the fabric: the block of every level, and the up-links they share.


@dataclass(frozen=True, kw_only=True)
class LevelPositions:
    """One level: the blocks that ranks are in, and the sub-blocks that the level joins."""

    level: str
    depth: int
    """Its place among the fabric's levels; of the level below where the allocation does not span it."""
    joint: Joint
    sub: IntArray
    """The sub-block of every rank, shape [ranks]; at the innermost level a GPU."""
    block: IntArray
    """Its block."""
    sub_links_gb_per_s: FloatArray
    """Nominal, of the up-links of every sub-block in one direction, as far as they are the job's."""
    name_of: Callable[[int], str]
    """Of a sub-block."""
    rails: int = 1
    """Rails that a sub-block's up-links are spread over."""
    rail: IntArray | None = None
    """The rail of every rank, where there are some."""
    rail_apart: bool = False
    """Whether only this level joins the rails that the sub-blocks hold."""

    @property
    def unit(self) -> IntArray:
        """The up-link that every rank uses: that of its sub-block, or of its sub-block and rail."""
        return self.sub if self.rail is None else self.sub * self.rails + self.rail

    @property
    def links_gb_per_s(self) -> FloatArray:
        """Of every such up-link."""
        return np.repeat(self.sub_links_gb_per_s / self.rails, self.rails)

    def unit_name(self, unit: int) -> str:
        """Whose up-link it is.

        Parameters
        ----------
        unit
            A number of `unit`.
        """
        sub, rail = divmod(unit, self.rails)
        return self.name_of(sub) + (f" rail {rail}" if self.rails > 1 else "")


@dataclass(frozen=True, kw_only=True)
class RankPositions:
    """A mapping on a fabric."""

    levels: FabricLevels
    by_level: tuple[LevelPositions, ...]
    """From the inside out."""
    node: IntArray
    """The node of every rank."""


@dataclass(frozen=True, kw_only=True)
class _NodesInUse:
    """The nodes in use, and which of them every rank is in."""

    levels: FabricLevels
    node: IntArray
    """The node of every rank, counted through those in use."""
    within: IntArray
    """Its GPU there."""
    size: int
    """GPUs of a node."""
    nodes: int
    node_name: Callable[[int], str]
    outer: tuple[LevelPositions, ...]
    """Levels that join nodes or what is larger, with every node in use in place of the ranks."""


def rank_positions(cluster: ClusterSpec, places: Sequence[Place]) -> RankPositions:
    """The levels that a mapping touches; `places[r]` is the GPU of rank r.

    Links are those of `listed_fabric` where nodes are listed with their leaves, of `outline_of` otherwise.

    Parameters
    ----------
    cluster
        The machine.
    places
        (node, local GPU) of every rank.
    """
    return _rank_positions(SameCluster(cluster), tuple(map(tuple, places)))


@lru_cache(maxsize=2)
def _rank_positions(same: SameCluster, places: tuple[Place, ...]) -> RankPositions:
    """The same for the traffic of a plan and for its fullest cut."""
    cluster = same.cluster
    listed = any(node.leaf is not None for node in cluster.nodes)
    in_use = _listed(cluster, places) if listed else _regular(cluster, places)
    levels = [*_inside(in_use), *_outside(in_use)]
    levels += _joining(cluster, levels, len(places))
    gpu = np.array([gpu for _, gpu in places], dtype=np.int64)
    railed = tuple(
        _with_rails(cluster, level, gpu, levels[:depth]) for depth, level in enumerate(levels)
    )
    node = np.array([node for node, _ in places], dtype=np.int64)
    return RankPositions(levels=in_use.levels, by_level=railed, node=node)


def _regular(cluster: ClusterSpec, places: Sequence[Place]) -> _NodesInUse:
    """GPUs count through the allocation that plans take; of others, through the whole cluster."""
    gpus, per_node = len(places), cluster.gpus_per_node
    order = {place: index for index, place in enumerate(allocated_places(cluster, gpus))}
    is_allocated = order.keys() >= set(places)
    levels = fabric_levels(cluster, gpus) if is_allocated else full_levels(cluster)
    outline = outline_of(cluster, levels)
    numbers = (order[p] if is_allocated else p[0] * per_node + p[1] for p in places)
    position = np.fromiter(numbers, dtype=np.int64, count=gpus)
    size = outline.node_gpus
    first = np.arange(-(-int(position.max() + 1) // size)) * size
    below, outer = size, []
    for step, depth in enumerate(outline.outer):
        block = int(outline.levels.blocks[depth])
        sub = first // below
        outer.append(
            LevelPositions(
                level=outline.levels.names[depth],
                depth=depth,
                joint=outline.joints[step],
                sub=sub,
                block=first // block,
                sub_links_gb_per_s=np.full(int(sub[-1]) + 1, outline.up_gb_per_s[step]),
                name_of=_block_of(outline, below, step),
            )
        )
        below = block
        if position.min() // block == position.max() // block:
            break
    return _NodesInUse(
        levels=outline.levels,
        node=position // size,
        within=position % size,
        size=size,
        nodes=len(first),
        node_name=lambda index: f"node{index}",
        outer=tuple(outer),
    )


def _listed(cluster: ClusterSpec, places: Sequence[Place]) -> _NodesInUse:
    fabric, joints, levels = listed_fabric(cluster), listed_joints(cluster), full_levels(cluster)
    used = sorted({node for node, _ in places})
    index = {node: index for index, node in enumerate(used)}
    names = [cluster.nodes[node].name for node in used]
    paths = [[name, *fabric.paths[name]] for name in names]
    outer = []
    for step, depth in enumerate(_outer_depths(cluster, levels, len(joints))):
        subs = list(dict.fromkeys(path[step] for path in paths))
        blocks = {
            name: index
            for index, name in enumerate(dict.fromkeys(path[step + 1] for path in paths))
        }
        number = {name: index for index, name in enumerate(subs)}
        outer.append(
            LevelPositions(
                level=levels.names[depth],
                depth=depth,
                joint=joints[step],
                sub=np.array([number[path[step]] for path in paths], dtype=np.int64),
                block=np.array([blocks[path[step + 1]] for path in paths], dtype=np.int64),
                sub_links_gb_per_s=np.array([fabric.up_gb_per_s[name] for name in subs]),
                name_of=_listed_name(subs),
            )
        )
    return _NodesInUse(
        levels=levels,
        node=np.array([index[node] for node, _ in places], dtype=np.int64),
        within=np.array([gpu for _, gpu in places], dtype=np.int64),
        size=cluster.gpus_per_node,
        nodes=len(names),
        node_name=names.__getitem__,
        outer=tuple(outer),
    )


def _block_of(outline: Outline, gpus: int, step: int) -> Callable[[int], str]:
    return lambda sub: outline.names_at(sub * gpus)[step]


def _listed_name(names: Sequence[str]) -> Callable[[int], str]:
    return lambda sub: _shown(names[sub])


def _outer_depths(cluster: ClusterSpec, levels: FabricLevels, joints: int) -> list[int]:
    """The levels that join nodes, leaves and pods; the last joins all."""
    last = len(levels.names) - 1
    network = list(range(len(levels.names) - len(cluster.levels), len(levels.names))) or [last]
    reached = [0, *network] if leaves_are_domains(cluster) else network
    return [*(reached[min(step, len(reached) - 1)] for step in range(joints - 1)), last]


def _inside(in_use: _NodesInUse) -> list[LevelPositions]:
    """Levels up to the node; sub-blocks count through the nodes in use."""
    levels, below = [], 1
    blocks, rates = in_use.levels.blocks.tolist(), in_use.levels.gb_per_s.tolist()
    for depth in range(min((level.depth for level in in_use.outer), default=len(blocks))):
        block = min(blocks[depth], in_use.size)
        each = -(-in_use.size // below)
        what = "GPU" if below == 1 else in_use.levels.names[depth - 1]
        levels.append(
            LevelPositions(
                level=in_use.levels.names[depth],
                depth=depth,
                joint=Joint(level=in_use.levels.names[depth]),
                sub=in_use.node * each + in_use.within // below,
                block=in_use.node * -(-in_use.size // block) + in_use.within // block,
                sub_links_gb_per_s=np.full(in_use.nodes * each, below * rates[depth]),
                name_of=_part_of(in_use, what, each),
            )
        )
        below = block
    return levels


def _part_of(in_use: _NodesInUse, what: str, each: int) -> Callable[[int], str]:
    return lambda sub: f"{in_use.node_name(sub // each)} {what} {sub % each}"


def _outside(in_use: _NodesInUse) -> list[LevelPositions]:
    """Levels that join nodes and what lies around them."""
    levels = []
    for outer in in_use.outer:
        level = replace(outer, sub=outer.sub[in_use.node], block=outer.block[in_use.node])
        if outer.depth == 0:  # NVLink reaches beyond the node: what it joins are GPUs, not nodes
            gpus, gb_per_s = in_use.nodes * in_use.size, float(in_use.levels.gb_per_s[0])
            level = replace(
                level,
                sub=in_use.node * in_use.size + in_use.within,
                sub_links_gb_per_s=np.full(gpus, gb_per_s),
                name_of=_part_of(in_use, "GPU", in_use.size),
            )
        levels.append(level)
    return levels


def _shown(vertex: str) -> str:
    """A block of `listed_fabric` in words: leaf/pod-1/leaf-a is leaf-a of pod-1."""
    kind, _, rest = vertex.partition("/")
    pod, parted, leaf = rest.partition("/")
    if kind == "leaf" and parted:
        return f"{leaf} of {pod}" if pod else leaf
    return pod or vertex if kind == "pod" else vertex


def _joining(
    cluster: ClusterSpec, levels: Sequence[LevelPositions], ranks: int
) -> list[LevelPositions]:
    """The level that joins rails, where the allocation lies inside one set of them and does not span it."""
    last = levels[-1]
    if cluster.crosses_rails_inside or last.joint.rails == 1:
        return []
    outer_level = next(k for k, level in enumerate(cluster.levels) if level.rails == 1)
    all_ranks = np.zeros(ranks, dtype=np.int64)
    return [
        LevelPositions(
            level=cluster.levels[outer_level].name,
            depth=last.depth,
            joint=Joint(level=cluster.levels[outer_level].name),
            sub=all_ranks,
            block=all_ranks,
            sub_links_gb_per_s=np.array([ranks * level_rates(cluster)[outer_level]]),
            name_of=lambda _: last.level,
        )
    ]


def _with_rails(
    cluster: ClusterSpec, level: LevelPositions, gpu: IntArray, inner: Sequence[LevelPositions]
) -> LevelPositions:
    """Up-links by rail, where the sub-blocks have rails or hang on some."""
    below = inner[-1].joint.rails if inner else 1
    rails = below if below > 1 else level.joint.rails
    if rails == 1 or not inner:
        return level
    apart = below > 1 and level.joint.rails == 1 and not cluster.crosses_rails_inside
    return replace(level, rails=rails, rail=gpu % rails, rail_apart=apart)


# What every process group of a mapping sends over every level: group by group, then added up.
#
# Bytes are those of one step in one direction. A ring's volume passes every block that holds some but not all
# of its members once, spread over the members there; a member of an all-to-all sends an equal part to each of
# the others; neighbours of a pipeline send an activation on and a gradient back.


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
    all_reduced: float = 0.0
    """Of a ring, the share of its volume that all-reduces move, 0 to 1."""
    by_group: FloatArray | None = None
    """The volume of every group of a ring, shape [groups], where they differ."""
    wrap: float = 0.0
    """Of a chain, from the last member to the first."""
    relayed: bool = True
    """Whether an all-to-all changes rails inside nodes only."""
    to_other_parts: IntArray | None = None
    """Of a chain, the ranks that hand `volume` on to another part of a mixed cluster, once for each."""

    @property
    def members(self) -> int:
        """Ranks in a group."""
        return int(self.groups.shape[1])

    @property
    def volumes(self) -> FloatArray:
        """The volume of every group, shape [groups]."""
        return np.full(len(self.groups), self.volume) if self.by_group is None else self.by_group


@dataclass(frozen=True, kw_only=True)
class LevelFlow:
    """What one axis sends over one level."""

    crossing: FloatArray
    """From every rank to other sub-blocks, where its group lies in several of this block; shape [ranks]."""
    leaving: FloatArray
    """From every rank over its sub-block's up-link, wherever it goes."""


def axis_flows(c: Context, stages: Stages, own: slice | None = None) -> list[AxisFlow]:
    """Every axis that sends something, of ranks counted in Megatron's default order.

    With `own`, the pipeline ranks of one part of a mixed cluster, `c` being the whole layout there: their
    groups alone, ranks counted from the first of them, with what leaves the part.

    Parameters
    ----------
    c
        The layout under its mapping.
    stages
        Layers of each [pipeline rank][virtual stage].
    own
        Pipeline ranks of one part; None for all of them.
    """
    moe = c.workload.model.moe is not None
    groups = process_groups(c.layout, experts=moe)
    if own is not None:
        groups = {axis: _within(c, rows, own) for axis, rows in groups.items()}
    moved = group_traffic(c, stages, ranks=own)
    cluster = c.workload.cluster
    context: Kind = "ring" if one_ring(c.workload) else "all-to-all"
    has_nvlink = cluster.nvlink_domain >= cluster.gpus_per_node > 1
    deduplicated = deduplicates(c.workload) and has_nvlink

    def flow(axis: str, kind: Kind, volume: float, *, name: str = "") -> AxisFlow:
        return AxisFlow(
            axis=axis, kind=kind, phase=MICRO_BATCHES, groups=groups[name or axis], volume=volume
        )

    flows = [
        replace(flow("tp", "ring", moved.tensor), all_reduced=tensor_all_reduced(c)),
        replace(flow("cp", context, moved.context), relayed=cluster.crosses_rails_inside),
        *_hierarchical_flows(c, groups["cp"], moved),
        *_gradient_flows(c, "dp", groups["dp-cp"], moved.gradients, moved.gradients_between),
        replace(
            flow("pp", "chain", moved.boundary),
            wrap=moved.wrap,
            to_other_parts=None if own is None else _at_edges(c, own),
        ),
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
    return [
        flow
        for flow in flows
        if flow.volume > 0 and (flow.members > 1 or flow.to_other_parts is not None)
    ]


def _at_edges(c: Context, own: slice) -> IntArray:
    """Ranks of a part, counted from its first, that hand over to the pipeline rank before or behind it."""
    pp = int(np.asarray(c.layout.pp))
    each = int(np.asarray(c.layout.gpus)) // pp
    ranks = np.arange((own.stop - own.start) * each)
    before = ranks[: each * (own.start > 0)]
    behind = ranks[len(ranks) - each * (own.stop < pp) :]
    return np.concatenate([before, behind])


def _within(c: Context, groups: IntArray, own: slice) -> IntArray:
    """The groups of some pipeline ranks, and what those of a pipeline group have there."""
    each = int(np.asarray(c.layout.gpus)) // int(np.asarray(c.layout.pp))
    inside = (groups >= own.start * each) & (groups < own.stop * each)
    touching = inside.any(axis=1)
    within: IntArray = groups[touching][:, inside[touching][0]] - own.start * each
    return within


def _gradient_flows(
    c: Context, axis: str, groups: IntArray, within: float, between: float
) -> list[AxisFlow]:
    """Rings over the ranks that shard together, neighbours each, and over those with the same shard."""
    members, shard_groups = groups.shape[1], int(np.asarray(c.layout.shard_groups))
    number = shard_groups if members % shard_groups == 0 else 1
    apart = groups.reshape(len(groups), number, -1)
    rings = (
        (axis, apart.reshape(-1, apart.shape[2]), within, gradients_all_reduced(c)),
        (f"{axis}-between", apart.transpose(0, 2, 1).reshape(-1, number), between, 1.0),
    )
    return [
        AxisFlow(
            axis=name, kind="ring", phase=GRADIENTS, groups=ranks, volume=volume, all_reduced=share
        )
        for name, ranks, volume, share in rings
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


def _with_trees(flow: AxisFlow, on: RankPositions, links: Links) -> AxisFlow:
    """A flow whose all-reduces go by tree in groups that lie in two of the fabric's innermost blocks.

    `collectives.all_reduce_s` has the source, and says where they do not.
    """
    innermost = [level.block for level in on.by_level if level.depth == 0]
    if flow.all_reduced == 0 or not innermost or not halves_go_by_tree(flow.members, links):
        return flow
    blocks = np.sort(innermost[-1][flow.groups], axis=1)
    in_two = np.sum(np.diff(blocks, axis=1) > 0, axis=1) == 1
    of_ring = np.where(in_two, tree_over_ring(flow.members, flow.all_reduced), 1.0)
    return replace(flow, by_group=of_ring * flow.volume)


def level_flow(
    c: Context, flow: AxisFlow, positions: RankPositions, level: LevelPositions
) -> LevelFlow:
    """What each rank of an axis sends over a level.

    Parameters
    ----------
    c
        Of the flow.
    flow
        What each member of a group sends.
    positions
        Of all ranks.
    level
        One of its levels.

    Returns
    -------
    LevelFlow
        Bytes of a step, shape [ranks] each.
    """
    if flow.kind == "chain":
        return _chain(flow, level)
    members = flow.members
    in_sub, in_block = _members_beside(flow, level.sub), _members_beside(flow, level.block)
    if flow.kind == "ring":
        leaving = np.where(in_sub < members, flow.volumes[:, None] / in_sub, 0.0)
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
    if flow.to_other_parts is not None:
        np.add.at(leaving, flow.to_other_parts, flow.volume)
    return LevelFlow(crossing=crossing, leaving=leaving)


def _hops(flow: AxisFlow) -> list[tuple[int, int, float]]:
    """(member, next member, bytes between them) of a chain; the last one leads back to the first."""
    hops = [(member, member + 1, flow.volume) for member in range(flow.members - 1)]
    return [*hops, (-1, 0, flow.wrap)]


def _members_beside(flow: AxisFlow, *of: IntArray) -> IntArray:
    """For every member, how many of its group share its block (of several kinds at once); groups' shape."""
    key = np.zeros(flow.groups.shape, dtype=np.int64)
    for blocks in of:
        key = key * (int(blocks.max()) + 1) + blocks[flow.groups]
    order = np.argsort(key, axis=1)
    in_order = np.take_along_axis(key, order, axis=1)
    begins = np.diff(in_order, axis=1, prepend=-1) != 0
    counts = np.diff(np.flatnonzero(begins), append=key.size)
    beside = np.empty_like(key)
    np.put_along_axis(beside, order, np.repeat(counts, counts).reshape(key.shape), axis=1)
    return beside


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

    Parameters
    ----------
    c
        Of the flow.
    flow
        What each member of a group sends.
    side
        Half of its block that each rank is in, 0 or 1; shape [ranks].
    level
        Whose blocks are halved.
    blocks
        How many blocks the level has.
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
        volumes = flow.volumes[group_blocks[cut] // blocks]
        passed = np.bincount(group_blocks[cut] % blocks, weights=volumes, minlength=blocks)
        return np.asarray(passed, dtype=np.float64)
    copies = _copies(c, flow, _members_beside(flow, level.sub))
    sent = flow.volume * copies / flow.members * np.ones(flow.groups.shape)
    passed = np.where(second.ravel() == 0, sent.ravel() * on_second[back], 0.0)
    bytes_of_blocks = np.bincount(block.ravel(), weights=passed, minlength=blocks)
    return np.asarray(bytes_of_blocks, dtype=np.float64)


def by_axis(flows: Mapping[str, FloatArray]) -> dict[str, float]:
    """Mean bytes of a rank, dense and expert gradients together as `dp`, all of context as `cp`.

    Parameters
    ----------
    flows
        Bytes of a step from each rank, by axis as `AxisFlow` names it; shape [ranks] each.
    """
    mean_bytes: dict[str, float] = {}
    for axis, sent in flows.items():
        name = PARTS.get(axis, axis)
        mean_bytes[name] = mean_bytes.get(name, 0.0) + float(np.mean(sent))
    return {axis: mean for axis, mean in mean_bytes.items() if mean > 0}


@dataclass(frozen=True, kw_only=True)
class LevelUse:
    """One level under a mapping."""

    positions: LevelPositions
    attained: float
    """Of nominal rates."""
    detour: float
    """Links that a ring's or chain's byte takes between blocks that are joined directly; else 1."""
    bytes_per_s: float
    """What one GPU attains in a ring across the level, in one direction."""
    flows: dict[str, LevelFlow]
    """By axis; dense and expert gradients apart."""


@dataclass(frozen=True, kw_only=True)
class MappingUse:
    """What a mapping does to the fabric."""

    context: Context
    positions: RankPositions
    axes: tuple[AxisFlow, ...]
    levels: tuple[LevelUse, ...]
    cuts: tuple[CutUse, ...]


def mapping_use(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    *,
    placement: Placement,
    priced: Estimate,
    places: Sequence[Place],
) -> MappingUse:
    """Every group of a layout on the GPUs `places`, level by level, and every cut that something crosses.

    Parameters
    ----------
    workload
        Run as the layout is, on its GPUs.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage].
    placement
        Of the mapping, arrays [levels].
    priced
        The step with its parts, whose phases the traffic has.
    places
        (node, local GPU) of every rank.
    """
    context = make_context(workload, layout, placement)
    parts = {name: float(np.asarray(s)) for name, s in priced.breakdown_s.items()}
    return use_of_flows(context, axis_flows(context, stages), parts, places)


def use_of_flows(
    context: Context,
    axes: Sequence[AxisFlow],
    breakdown_s: dict[str, float],
    places: Sequence[Place],
) -> MappingUse:
    """Flows on the GPUs `places`, level by level, and every cut that something crosses.

    Parameters
    ----------
    context
        What the flows are of; its cluster has the GPUs.
    axes
        As `axis_flows` counts them.
    breakdown_s
        Parts of the step, seconds: how long its phases take.
    places
        (node, local GPU) of every rank.
    """
    workload = context.workload
    on = rank_positions(workload.cluster, places)
    axes = [_with_trees(flow, on, context.links) for flow in axes]
    attained, shares = _rates(workload, on)
    levels = []
    for positions in on.by_level:
        depth = positions.depth
        nominal_bytes_per_s = on.levels.gb_per_s[depth] * 1e9
        use = LevelUse(
            positions=positions,
            attained=float(attained[depth]),
            detour=1.0 / float(shares[depth]) if positions.joint.direct else 1.0,
            bytes_per_s=float(nominal_bytes_per_s * attained[depth] * shares[depth]),
            flows={flow.axis: level_flow(context, flow, on, positions) for flow in axes},
        )
        levels.append(use)
    phases = phase_seconds(context, breakdown_s)
    cuts = [
        replace(cut, others_share=_others_share(workload, use.positions.level))
        for use in levels
        for phase in phases
        for cut in _cuts(context, axes, use, phase, phases[phase])
    ]
    return MappingUse(
        context=context, positions=on, axes=tuple(axes), levels=tuple(levels), cuts=tuple(cuts)
    )


def parts_use(
    segments: Sequence[Segment], stages: Stages, breakdown_s: dict[str, float]
) -> tuple[list[MappingUse], list[CutUse]]:
    """What a pipeline through parts of a mixed cluster does to the fabric of each, and between them.

    Groups but those of the pipeline lie inside a part; each part's ranks run through its nodes in turn.

    Parameters
    ----------
    segments
        In the order of the pipeline.
    stages
        Layers of each [pipeline rank][virtual stage].
    breakdown_s
        Parts of the step, seconds: how long its phases take.

    Returns
    -------
    tuple of (list of MappingUse, list of CutUse)
        One for each segment; and one for each two that follow each other, whose slower NICs are the cut.
    """
    uses: list[MappingUse] = []
    for segment in segments:
        context, workload = segment.part.context, segment.part.workload
        flows = axis_flows(context, stages, segment.own)
        places = allocated_places(workload.cluster, workload.gpus)
        uses.append(use_of_flows(context, flows, breakdown_s, places))
    between: list[CutUse] = []
    for before, after in pairwise(segments):
        volume = group_traffic(before.part.context, stages, ranks=before.own).boundary
        rates = [float(side.part.crossing.links.bytes_per_s[-1]) / 1e9 for side in (before, after)]
        between.append(
            CutUse(
                level="handed-on",
                cut="uplink",
                phase=MICRO_BATCHES,
                block=f"rank {after.first - 1} and {after.first}",
                bytes_per_gpu=volume,
                gb_per_s=min(rates),
                busy_s=volume / (min(rates) * 1e9),
                phase_s=phase_seconds(before.part.context, breakdown_s)[MICRO_BATCHES],
            )
        )
    return uses, between


def parts_cut_uses(
    segments: Sequence[Segment], names: Sequence[str], stages: Stages, step: StepTime
) -> dict[str, float]:
    """The share of each cut's capacity that a pipeline through parts and others use in each phase.

    Parameters
    ----------
    segments, stages
        As `parts_use` takes them.
    names
        Of the segments' parts.
    step
        What the pipeline takes.

    Returns
    -------
    dict of str to float
        By part, level, kind of cut and phase: 'new_leaf_uplink_gradients'; what a part hands on under its own
        name. Never empty.
    """
    seconds = {name: float(np.asarray(part)) for name, part in step.parts.items()}
    uses, between = parts_use(segments, stages, seconds)
    rows = [(name, cut) for name, use in zip(names, uses, strict=True) for cut in use.cuts]
    rows += zip(names, between, strict=False)
    return {f"{part}_{cut.level}_{cut.cut}_{cut.phase}": cut.total_use for part, cut in rows}


def _others_share(workload: Workload, level: str) -> float:
    """What other jobs use of the links that a level joins blocks with: the `background` of those blocks."""
    inside = [entry.background for entry in workload.cluster.levels]
    names = [entry.name for entry in workload.cluster.levels]
    below = names.index(level) - 1 if level in names else -1
    return inside[below] or 0.0 if below >= 0 else 0.0


def _rates(workload: Workload, on: RankPositions) -> tuple[FloatArray, FloatArray]:
    """(share of the nominal rate that rings attain without detours, what detours leave), by level."""
    levels = on.levels
    links = links_of(levels, calibrated_constants(workload))
    shares = np.where(np.isnan(levels.attained), levels.neighbour_share, 1.0)
    return links.bytes_per_s / (levels.gb_per_s * 1e9 * shares), shares


def _cuts(
    c: Context, axes: Sequence[AxisFlow], use: LevelUse, phase: str, phase_s: float
) -> list[CutUse]:
    phase_axes = [flow for flow in axes if flow.phase == phase]
    if not any(np.any(use.flows[flow.axis].leaving > 0) for flow in phase_axes):
        return []
    return [
        _busiest_uplink(use, phase_axes, phase, phase_s),
        *_busiest_halves(c, use, phase_axes, phase, phase_s),
    ]


def _busiest_uplink(use: LevelUse, axes: Sequence[AxisFlow], phase: str, phase_s: float) -> CutUse:
    positions, unit, links = use.positions, use.positions.unit, use.positions.links_gb_per_s
    sent, with_detours = np.zeros(len(links)), np.zeros(len(links))
    for flow in axes:
        load = np.bincount(unit, weights=use.flows[flow.axis].leaving, minlength=len(sent))
        sent += load
        with_detours += load * (use.detour if flow.kind != "all-to-all" else 1.0)
    seconds = with_detours / (links * 1e9 * use.attained)
    worst = int(np.argmax(seconds))
    return CutUse(
        level=positions.level,
        cut="uplink",
        phase=phase,
        block=positions.unit_name(worst),
        bytes_per_gpu=float(sent[worst]) / max(int(np.sum(unit == worst)), 1),
        gb_per_s=float(links[worst]),
        busy_s=float(seconds[worst]),
        phase_s=phase_s,
    )


def _busiest_halves(
    c: Context, use: LevelUse, axes: Sequence[AxisFlow], phase: str, phase_s: float
) -> list[CutUse]:
    """The block whose halves are busiest; the sums of links find it, the cut may be less."""
    positions, halves = use.positions, _halves(use.positions)
    crossing = np.zeros(halves.blocks)
    for flow in axes:
        crossing += between_halves(c, flow, halves.side, positions, halves.blocks)
    if not np.any(crossing > 0):
        return []
    links = positions.sub_links_gb_per_s[halves.subs]
    sums = [
        np.bincount(halves.sub_block[on], weights=links[on], minlength=halves.blocks)
        for on in (halves.sub_side == 0, halves.sub_side == 1)
    ]
    narrow = np.maximum(np.minimum(*sums), 1e-9)
    worst = int(np.argmax(crossing / narrow))
    in_worst = halves.sub_block == worst
    first, second = (
        tuple(sorted(links[in_worst & (halves.sub_side == side)].tolist())) for side in (0, 1)
    )
    capacity = halves_cut_gb_per_s(first, second, positions.joint)
    name = positions.level
    if halves.blocks > 1:
        name += f" {worst + 1} of {halves.blocks}"
    return [
        CutUse(
            level=positions.level,
            cut="bisection",
            phase=phase,
            block=name,
            bytes_per_gpu=2 * float(crossing[worst]) / int(np.sum(positions.block == worst)),
            gb_per_s=capacity,
            busy_s=float(crossing[worst]) / (capacity * 1e9 * use.attained),
            phase_s=phase_s,
        )
    ]


@dataclass(frozen=True, kw_only=True)
class _Halves:
    """Every block of a level cut in two between sub-blocks."""

    side: IntArray
    """0 or 1 by rank."""
    blocks: int
    subs: IntArray
    """The sub-blocks in use, with their side and block."""
    sub_side: IntArray
    sub_block: IntArray


def _halves(positions: LevelPositions) -> _Halves:
    """Sub-blocks go to the first half in turn while it holds at most half of the block's ranks."""
    blocks = int(positions.block.max()) + 1
    subs, first, back, counts = np.unique(
        positions.sub, return_index=True, return_inverse=True, return_counts=True
    )
    block = positions.block[first]
    order = np.lexsort((subs, block))
    total = np.bincount(block, weights=counts, minlength=blocks)
    before = np.cumsum(total) - total
    run = np.cumsum(counts[order]) - before[block[order]]
    second = np.zeros(len(subs), dtype=np.int64)
    second[order] = run > total[block[order]] / 2
    # The first sub-block of a block is never alone outside.
    second[order[np.flatnonzero(np.diff(block[order], prepend=-1))]] = 0
    return _Halves(
        side=second[back.reshape(-1)], blocks=blocks, subs=subs, sub_side=second, sub_block=block
    )


def binding_cut(cuts: Sequence[CutUse]) -> CutUse | None:
    """The cut with the highest utilisation.

    Parameters
    ----------
    cuts
        Any number of them; None is returned for none.
    """
    return max(cuts, key=lambda cut: cut.utilisation, default=None)


def broken_cuts(cuts: Sequence[CutUse]) -> list[str]:
    """Cuts that what must cross them in a phase keeps busy for longer than the phase.

    Parameters
    ----------
    cuts
        Of one mapping.

    Returns
    -------
    list of str
        A sentence for each; empty where all cuts keep to their phase.
    """
    return [
        f"{cut.level}, {cut.cut} of {cut.block}: {cut.busy_s:.4g} s of traffic in the {cut.phase}, "
        f"which take {cut.phase_s:.4g} s"
        for cut in cuts
        if cut.utilisation > 1 + ROUNDING
    ]


# The one table of what is sent across the levels of the fabric, added up rank by rank.


def level_table(use: MappingUse, step_time_s: float) -> list[LevelBytes]:
    """Every level under a mapping, inside out: bytes of the mean GPU and of the one that sends most.

    Links are busy as long as that GPU's are: a ring or an all-to-all is not done before it.

    Parameters
    ----------
    use
        What `mapping_use` counted.
    step_time_s
        Seconds of a step, above 0: utilisation is of this.
    """
    table = []
    for level in use.levels:
        crossing = {axis: flow.crossing for axis, flow in level.flows.items()}
        each = sum(crossing.values(), np.zeros(len(level.positions.sub)))
        axes = by_axis(crossing)
        mean, most = sum(axes.values()), float(np.max(each))
        busy_s = max(most, mean) / level.bytes_per_s
        table.append(
            LevelBytes(
                level=level.positions.level,
                bytes_per_step=mean,
                busy_s=busy_s,
                utilisation=busy_s / step_time_s,
                most_bytes_per_step=max(most, mean),
                mean_busy_s=mean / level.bytes_per_s,
                by_axis=axes,
            )
        )
    return table
