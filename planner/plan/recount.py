"""Members of every group by block of the fabric, as prices see them, from a rank list alone.

This shares nothing with the code that chooses mappings. A rank's groups follow from its number (tp, cp, dp,
pp from the inside; etp, ep, edp from the inside of a stage: megatron-core parallel_state), its blocks from
its node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.uplinks import first_outside_a_leaf
from meshwright.costmodel.layout import Layout, Placement

Place = tuple[int, int]
"""(node, local GPU), both from 0."""
Block = tuple[str, ...] | int
Groups = dict[int, list[Block]]
"""The block of every member, in the order of ranks, by group."""


def recounted_placement(cluster: ClusterSpec, layout: Layout, ranks: Sequence[Place]) -> Placement:
    """Members of a group inside one block of each level, as `Placement` means them.

    Of a ring: the GPUs in use in a block over the rings that leave it, least over blocks. Of an all-to-all:
    the share that a block keeps to itself, least over blocks. Of a pipeline: stages between two crossings, on
    average, of the pipeline that crosses most. Every group's whole size where no group leaves a block.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    layout : Layout
        Degrees of one layout.
    ranks : sequence of (node, local GPU)
        Where each rank runs.

    Returns
    -------
    Placement
        Arrays of shape [levels of `fabric_levels`].
    """
    names = fabric_levels(cluster, len(ranks)).names
    members: dict[str, list[int]] = defaultdict(list)
    for level in names:
        block_of = _block_of(cluster, level, outermost=level == names[-1])
        blocks = [block_of(node, gpu) for node, gpu in ranks]
        for axis, count in _members(layout, blocks):
            inside = members[axis]
            inside.append(max(count, *inside[-1:], 1))
    return Placement(**{axis: np.array(counts) for axis, counts in members.items()})


def _block_of(cluster: ClusterSpec, level: str, outermost: bool) -> Callable[[int, int], Block]:
    """The block of a level that (node, local GPU) is in."""
    per_node, switches = cluster.gpus_per_node, [entry.name for entry in cluster.levels]
    leaf = first_outside_a_leaf(cluster) - 1
    depth = switches.index(level) if level in switches else -1
    if outermost or (depth < 0 and level == "fabric"):
        return lambda node, gpu: 0
    labelled = any(node.leaf is not None for node in cluster.nodes)
    if labelled and depth == leaf and (depth >= 0 or cluster.nvlink_domain > per_node):
        return lambda node, gpu: (cluster.nodes[node].pod or "", cluster.nodes[node].leaf or "")
    if labelled and depth == leaf + 1:
        return lambda node, gpu: (cluster.nodes[node].pod or "",)
    size = cluster.nvlink_domain if depth < 0 else cluster.levels[depth].gpus
    if level == "node":
        size = per_node
    return lambda node, gpu: (node * per_node + gpu) // size


def _members(layout: Layout, blocks: Sequence[Block]) -> Iterator[tuple[str, int]]:
    """(axis, members) of one level, for the block of every rank."""
    tp, cp, dp, pp = (int(x) for x in (layout.tp, layout.cp, layout.dp, layout.pp))
    etp, ep = int(layout.etp), int(layout.ep)
    stage = tp * cp * dp
    rings: dict[str, Groups] = defaultdict(lambda: defaultdict(list))
    for rank, block in enumerate(blocks):
        t, c, d = rank % tp, rank // tp % cp, rank // (tp * cp) % dp
        p, within = rank // stage, rank % stage
        rings["tp"][rank - t].append(block)
        rings["cp"][rank - c * tp].append(block)
        rings["dp"][rank - d * tp * cp].append(block)
        rings["pp"][within].append(block)
        rings["etp"][rank - within % etp].append(block)
        rings["ep"][rank - within // etp % ep * etp].append(block)
        rings["edp"][p * stage + within % (etp * ep)].append(block)
        rings["dp_cp"][p * tp + t].append(block)
    for axis, groups in rings.items():
        if axis == "pp":
            yield axis, _pipeline(groups, pp)
        elif axis == "ep":
            yield axis, _exchange(groups, ep)
        else:
            yield axis, _ring(groups)


def _ring(groups: Groups) -> int:
    used: Counter[Block] = Counter()
    leaving: Counter[Block] = Counter()
    size = 1
    for group in groups.values():
        size = len(group)
        held = Counter(group)
        used.update(held)
        leaving.update(block for block, count in held.items() if count < size)
    if not leaving:
        return size
    shares = (used[block] // rings for block, rings in leaving.items())
    return max(1, min(*shares, size - 1)) if len(leaving) > 1 else size


def _exchange(groups: Groups, size: int) -> int:
    kept: Counter[Block] = Counter()
    sent: Counter[Block] = Counter()
    for group in groups.values():
        for block, count in Counter(group).items():
            kept[block] += count * count
            sent[block] += count * size
    if kept == sent:
        return size
    share = min(size * kept[block] // sent[block] for block in sent)
    return max(1, min(share, size - 1))


def _pipeline(groups: Groups, stages: int) -> int:
    crossings = 0
    for group in groups.values():
        apart = sum(first != second for first, second in pairwise(group))
        crossings = max(crossings, apart)
    return stages // (crossings + 1)
