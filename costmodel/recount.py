"""Members of every group by block of the fabric, as prices see them, from a rank list alone.

This shares nothing with the code that chooses mappings. A rank's groups follow from its number (tp, cp, dp,
pp from the inside; etp, ep, edp from the inside of a stage: megatron-core parallel_state), its blocks from
its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import first_outside_a_leaf
from meshwright.costmodel.layout import Layout, Placement, StagedPlacement

Place = tuple[int, int]
"""(node, local GPU), both from 0."""
IntArray = NDArray[np.int64]


def recounted_placement(
    cluster: ClusterSpec, layout: Layout, ranks: Sequence[Place], *, by_stage: bool = False
) -> Placement:
    """Members of a group inside one block of each level, as `Placement` means them.

    Of a ring: the GPUs in use in a block over the rings that leave it, least over blocks. Of an all-to-all:
    the members that share a block with the rank that shares it with fewest. Of a pipeline: stages between two
    crossings, on average, of the pipeline that crosses most. Every group's whole size where no group leaves a
    block.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    layout : Layout
        Degrees of one layout.
    ranks : sequence of (node, local GPU)
        Where each rank runs.
    by_stage : bool
        Whether expert groups are counted stage by stage besides.

    Returns
    -------
    Placement
        Arrays of shape [levels of `fabric_levels`], at least 1; a `StagedPlacement` by stage.
    """
    names = fabric_levels(cluster, len(ranks)).names
    node, gpu = np.array(ranks, dtype=np.int64).T
    members: dict[str, list[int]] = defaultdict(list)
    of_stages: list[list[int]] = []
    for level in names:
        blocks = _blocks(cluster, level, node, gpu, outermost=level == names[-1])
        below = of_stages[-1] if of_stages else [1] * int(layout.pp)
        of_stages.append(list(map(max, below, _exchanges(layout, blocks))))
        for axis, count in _members(layout, blocks):
            inside = members[axis]
            inside.append(max(count, *inside[-1:], 1))
    placement = Placement(**{axis: np.array(counts) for axis, counts in members.items()})
    if not by_stage:
        return placement
    return StagedPlacement(**vars(placement), stage_ep=np.array(of_stages).T)


def blocks_left(cluster: ClusterSpec, ranks: Sequence[Place]) -> Iterator[str]:
    """Levels that a price takes to hold all ranks in one block, and that hold them in several; in words.

    Prices know no level above the first that holds the whole allocation: the cluster file may have some.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    ranks : sequence of (node, local GPU)
        Where each rank runs.

    Returns
    -------
    iterator of str
        One sentence a level, inside out.
    """
    outermost = fabric_levels(cluster, len(ranks)).names[-1]
    names = [entry.name for entry in cluster.levels]
    first = names.index(outermost) if outermost in names else 0
    inside_node = outermost not in names and outermost != "fabric"
    node, gpu = np.array(ranks, dtype=np.int64).T
    for level in [*([outermost] if inside_node else []), *names[first:-1]]:
        touched = len(np.unique(_blocks(cluster, level, node, gpu, outermost=False)))
        if touched > 1:
            yield (
                f"the ranks are in {touched} blocks of {level}, the price assumes that one holds them all"
            )


def _blocks(
    cluster: ClusterSpec, level: str, node: IntArray, gpu: IntArray, *, outermost: bool
) -> IntArray:
    """The number of the block of a level that every rank, on a local GPU of a node, is in, [ranks]."""
    per_node, switches = cluster.gpus_per_node, [entry.name for entry in cluster.levels]
    leaf = first_outside_a_leaf(cluster) - 1
    depth = switches.index(level) if level in switches else -1
    if outermost or (depth < 0 and level == "fabric"):
        return np.zeros_like(node)
    labelled = any(each.leaf is not None for each in cluster.nodes)
    in_leaves = depth == leaf and (depth >= 0 or cluster.nvlink_domain > per_node)
    if labelled and (in_leaves or depth == leaf + 1):
        labels = [(each.pod or "", (in_leaves and each.leaf) or "") for each in cluster.nodes]
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return np.array([numbers[label] for label in labels], dtype=np.int64)[node]
    size = cluster.nvlink_domain if depth < 0 else cluster.levels[depth].gpus
    return (node * per_node + gpu) // (per_node if level == "node" else size)


def _members(layout: Layout, blocks: IntArray) -> Iterator[tuple[str, int]]:
    """(axis, members) of one level, for the block of every rank, [ranks]."""
    tp, cp, dp, pp = (int(x) for x in (layout.tp, layout.cp, layout.dp, layout.pp))
    etp, ep = int(layout.etp), int(layout.ep)
    edp = tp * cp * dp // (etp * ep)
    dense = blocks.reshape(pp, dp, cp, tp)
    experts = blocks.reshape(pp, edp, ep, etp)
    yield "tp", _ring(dense.reshape(-1, tp))
    yield "cp", _ring(np.moveaxis(dense, 2, -1).reshape(-1, cp))
    yield "dp", _ring(np.moveaxis(dense, 1, -1).reshape(-1, dp))
    yield "pp", _pipeline(np.moveaxis(dense, 0, -1).reshape(-1, pp))
    yield "etp", _ring(experts.reshape(-1, etp))
    yield "ep", _exchange(np.moveaxis(experts, 2, -1).reshape(-1, ep))
    yield "edp", _ring(np.moveaxis(experts, 1, -1).reshape(-1, edp))
    yield "dp_cp", _ring(np.moveaxis(dense, 3, 1).reshape(-1, dp * cp))


def _inside(groups: IntArray) -> tuple[IntArray, IntArray]:
    """(block, members of a group in it) of every group and each block that it touches, both [entries]."""
    in_order = np.sort(groups, axis=1)
    starts = _starts(in_order)
    return in_order.ravel()[starts], np.diff(starts, append=groups.size)


def _starts(in_order: IntArray) -> IntArray:
    """Where each run of equal blocks begins in groups [groups, size] whose blocks rise, [runs]."""
    is_start = np.ones(in_order.shape, dtype=np.bool_)
    is_start[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    return np.flatnonzero(is_start.ravel())


def _ring(groups: IntArray) -> int:
    """Of groups [groups, size]: GPUs in use in a block over the rings that leave it, least over blocks."""
    size = int(groups.shape[1])
    block, members = _inside(groups)
    leaving = np.bincount(block[members < size], minlength=int(groups.max()) + 1)
    left = np.flatnonzero(leaving)
    if len(left) <= 1:
        return size
    used = np.bincount(groups.ravel())
    shares = used[left] // leaving[left]
    return max(1, min(int(shares.min()), size - 1))


def _exchange(groups: IntArray) -> int:
    """Of groups [groups, size]: members in the block of the rank with the fewest of its group beside it."""
    starts = _starts(np.sort(groups, axis=1))
    return int(np.diff(starts, append=groups.size).min())


def _exchanges(layout: Layout, blocks: IntArray) -> list[int]:
    """`_exchange` of the expert groups of each stage."""
    pp, ep, etp = int(layout.pp), int(layout.ep), int(layout.etp)
    stages = blocks.reshape(pp, -1, ep, etp)
    return [_exchange(np.moveaxis(stage, 1, -1).reshape(-1, ep)) for stage in stages]


def _pipeline(groups: IntArray) -> int:
    """Of pipelines [pipelines, stages]: stages between two crossings of the one that crosses most."""
    crossings = int((groups[:, 1:] != groups[:, :-1]).sum(axis=1).max())
    return int(groups.shape[1]) // (crossings + 1)
