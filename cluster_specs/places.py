"""Which GPUs an allocation has, in the order in which the levels of the fabric are filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import expand_nodes
from meshwright.cluster_specs.fabric import fabric_levels, full_levels, is_irregular
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.cluster_specs.uplinks import (
    Key,
    SameCluster,
    Uplink,
    first_outside_a_leaf,
    free_of,
    uplinks,
)

Place = tuple[int, int]
"""(node, local GPU), both from 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatedBlocks:
    """The GPUs of an allocation and the blocks of the machine that they stand in."""

    places: NDArray[np.int64]
    """(node, local GPU) of every GPU, [gpus, 2]; consecutive ones share the blocks of `fabric_levels`."""
    blocks: NDArray[np.int64]
    """The block of the machine that every GPU is in, by level of `fabric_levels`; shape [levels, gpus]."""
    even: bool
    """Whether every block of `fabric_levels` has a block of the machine to itself."""


def allocation_of(cluster: ClusterSpec, gpus: int) -> AllocatedBlocks:
    """The GPUs that an allocation uses, and where they stand.

    Each block of `fabric_levels` takes a block of the machine: 128 GPUs of NVL72 racks are 64 of one rack and
    64 of the next, 8 of each idle. Where the machine has too few blocks for that, several share one, and the
    allocation is not even. Nodes that are listed with their leaves are taken leaf by leaf, from each as many
    GPUs as a block has, and pod by pod; lists without leaves and with part-filled nodes in their order. Nodes
    without free GPUs are passed over.

    Raises InputError if the cluster has fewer than `gpus`.
    """
    return _allocation(SameCluster(cluster), gpus)


def allocated_places(cluster: ClusterSpec, gpus: int) -> list[Place]:
    """(node, local GPU) of every GPU of `allocation_of`."""
    return [(node, gpu) for node, gpu in allocation_of(cluster, gpus).places.tolist()]


@lru_cache(maxsize=256)
def _allocation(same: SameCluster, gpus: int) -> AllocatedBlocks:
    cluster = same.cluster
    levels = fabric_levels(cluster, gpus)
    places = _places(cluster, gpus)
    blocks = blocks_of(cluster, gpus, places)
    positions = np.arange(gpus, dtype=np.int64)
    even = all(
        _one_to_one(positions // size, row)
        for size, row in zip(levels.blocks.tolist(), blocks, strict=True)
    )
    return AllocatedBlocks(places=places, blocks=blocks, even=even)


def blocks_of(cluster: ClusterSpec, gpus: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block of the machine that each of some GPUs is in, by level of an allocation.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    gpus : int
        Size of the allocation whose `fabric_levels` count.
    places : array of int, shape [n, 2]
        (node, local GPU), both from 0; any GPUs of the machine.

    Returns
    -------
    array of int, shape [levels, n]
        Numbers from 0; the last level is one block.
    """
    names = fabric_levels(cluster, gpus).names
    rows = [_blocks_at(cluster, name, places) for name in names[:-1]]
    return np.stack([*rows, np.zeros(len(places), dtype=np.int64)])


def _one_to_one(parts: NDArray[np.int64], blocks: NDArray[np.int64]) -> bool:
    """Whether every part of an allocation is in one block that holds no other part."""
    pairs = len(np.unique(parts * (int(blocks.max()) + 1) + blocks))
    return pairs == len(np.unique(parts)) == len(np.unique(blocks))


def _blocks_at(cluster: ClusterSpec, level: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block of a level that each GPU is in: by its leaf and pod where they are listed."""
    full = full_levels(cluster)
    depth = full.names.index(level)
    listed = uplinks(cluster)
    leaf = len(full.names) - len(cluster.levels) + first_outside_a_leaf(cluster) - 1
    named = {leaf: listed.leaves, leaf + 1: listed.pods}.get(depth)
    if not named or depth == len(full.names) - 1:
        numbers = places[:, 0] * cluster.gpus_per_node + places[:, 1]
        return np.asarray(numbers // int(full.blocks[depth]))
    number_of = {key: number for number, key in enumerate(named)}
    keys = [(node.pod or "", node.leaf or "" if depth == leaf else "") for node in cluster.nodes]
    return np.array([number_of[keys[node]] for node in places[:, 0].tolist()], dtype=np.int64)


def _places(cluster: ClusterSpec, gpus: int) -> NDArray[np.int64]:
    per_node = cluster.gpus_per_node
    in_turn = all(free_of(node, per_node) == per_node for node in cluster.nodes)
    if any(node.leaf is not None for node in cluster.nodes) and not is_irregular(cluster):
        places = _leaf_by_leaf(cluster, gpus)
        if len(places) == gpus:
            return np.array(places, dtype=np.int64)
    elif in_turn and not is_irregular(cluster):
        return _block_by_block(cluster, gpus)
    used_gpus = dict(expand_nodes(cluster, gpus))
    in_order = [
        (index, gpu)
        for index, node in enumerate(cluster.nodes)
        for gpu in range(used_gpus.get(node.name, 0))
    ]
    return np.array(in_order, dtype=np.int64)


def _block_by_block(cluster: ClusterSpec, gpus: int) -> NDArray[np.int64]:
    """The nodes of a machine whose blocks are filled in turn, without straddling one if that can be."""
    per_node = cluster.gpus_per_node
    nodes = list(range(-(-gpus // per_node)))
    if gpus % per_node == 0:
        steps = _steps(cluster, gpus)
        for apart in (True, False):
            spread = _spread(len(nodes), steps, apart)
            if spread[-1] < cluster.gpus // per_node:
                nodes = spread
                break
    numbers = np.arange(gpus, dtype=np.int64)
    return np.stack([np.array(nodes)[numbers // per_node], numbers % per_node], axis=1)


def _steps(cluster: ClusterSpec, gpus: int) -> list[tuple[int, int]]:
    """(nodes of a part, nodes of the block that it stands in) of every level that parts the allocation."""
    levels, full = fabric_levels(cluster, gpus), full_levels(cluster)
    parts = dict(zip(levels.names, levels.blocks.tolist(), strict=True))
    steps, part = [], cluster.gpus_per_node
    for name, size in zip(full.names, full.blocks.tolist(), strict=True):
        part = max(part, parts.get(name, part))
        if cluster.gpus_per_node < size < full.blocks[-1] and part < gpus and name in parts:
            steps.append((part // cluster.gpus_per_node, size // cluster.gpus_per_node))
    return steps


def _spread(count: int, steps: Sequence[tuple[int, int]], apart: bool) -> list[int]:
    """Nodes of an allocation: every part begins a block of its own, or only where it would straddle one."""
    nodes, node = [], 0
    for index in range(count):
        for part, block in steps:
            begins = index % part == 0
            if begins and node % block and (apart or node % block + part > block):
                node += block - node % block
        nodes.append(node)
        node += 1
    return nodes


def _leaf_by_leaf(cluster: ClusterSpec, gpus: int) -> list[Place]:
    pods: dict[str, dict[str, list[tuple[int, NodeSpec]]]] = {}
    for index, node in enumerate(cluster.nodes):
        leaves = pods.setdefault(node.pod or "", {})
        leaves.setdefault(node.leaf or "", []).append((index, node))
    links = uplinks(cluster)
    gpus_of_a_leaf = _quota(cluster, gpus, links.leaves)
    gpus_of_a_pod = _quota(cluster, gpus, links.pods)
    places: list[Place] = []
    for leaves in pods.values():
        in_pod: list[Place] = []
        for nodes in leaves.values():
            in_leaf = [
                (index, gpu)
                for index, node in nodes
                for gpu in range(free_of(node, cluster.gpus_per_node))
            ]
            in_pod += in_leaf[:gpus_of_a_leaf]
        places += in_pod[:gpus_of_a_pod]
    return places[:gpus]


def _quota(cluster: ClusterSpec, gpus: int, links: Mapping[Key, Uplink]) -> int:
    """GPUs to take of each leaf, or pod: the largest block of the allocation that one has free."""
    free = next(iter(links.values())).free
    blocks = fabric_levels(cluster, gpus).blocks.tolist()
    return max((block for block in blocks if block <= free), default=gpus)
