"""The blocks of the fabric under an allocation, the links between them, and its minimum cuts.

Links are GB/s in one direction. The groups of a dragonfly are joined by links of their own: each has two end
points, so that they carry half of what the groups' up-links sum to, and a cut through the middle meets about
half of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np

from meshwright.cluster_specs.allocation import FabricLevels, full_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import (
    first_outside_a_leaf,
    free_of,
    leaves_are_domains,
    uplinks,
)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """How the blocks, or nodes, inside one block of a level are joined."""

    level: str
    rails: int = 1
    direct: int = 0
    """How many blocks of the machine links of their own join; 0 for switches."""


ROOT = "root"
_INSIDE_A_NODE = ("nvlink", "xgmi", "pcie")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The levels from the node outwards: sizes, names and links of their blocks, which are all alike."""

    levels: FabricLevels
    node_gpus: int
    """GPUs of a node, or of the piece of it that an allocation with part-filled nodes counts by."""
    outer: tuple[int, ...]
    """The levels that join nodes and what is larger, by their place in `levels`."""
    joints: tuple[Joint, ...]
    up_gb_per_s: tuple[float, ...]
    """Links of a node, then of a block of each outer level but the last, to the level above."""

    def names_at(self, gpu: int) -> list[str]:
        """The node of a GPU of the allocation, and its blocks.

        Parameters
        ----------
        gpu
            From 0, in the order of `allocation_of`.

        Returns
        -------
        list of str
            From the node outwards; blocks of a level are numbered from 0, the outermost is `root`.
        """
        last = len(self.levels.blocks) - 1
        names = [f"node{gpu // self.node_gpus}"]
        for depth in self.outer:
            block = gpu // int(self.levels.blocks[depth])
            names.append(ROOT if depth == last else f"{self.levels.names[depth]}/{block}")
        return names


def outline_of(cluster: ClusterSpec, levels: FabricLevels) -> Outline:
    """The levels under an allocation whose nodes are alike.

    Parameters
    ----------
    cluster
        The machine; listed nodes must not be irregular.
    levels
        Of the allocation, or of the whole cluster.
    """
    # GPUs of one leaf: the node, or the piece of it that an allocation with part-filled nodes counts by.
    inside_node = [
        int(block)
        for block, medium in zip(levels.blocks, levels.media, strict=True)
        if medium in _INSIDE_A_NODE and block <= cluster.gpus_per_node
    ]
    node = inside_node[-1] if inside_node else gcd(cluster.gpus_per_node, int(levels.blocks[-1]))
    outer = tuple(int(depth) for depth in np.flatnonzero(levels.blocks > node))
    below = [node, *(int(levels.blocks[depth]) for depth in outer)]
    return Outline(
        levels=levels,
        node_gpus=node,
        outer=outer,
        joints=tuple(level_joints(cluster, [levels.names[depth] for depth in outer])),
        up_gb_per_s=tuple(
            size * float(levels.gb_per_s[depth]) for size, depth in zip(below, outer, strict=False)
        ),
    )


def level_joints(cluster: ClusterSpec, names: Sequence[str]) -> list[Joint]:
    """How the blocks inside some levels, given by name, are joined.

    Parameters
    ----------
    cluster
        Whose `levels` say how their blocks are joined.
    names
        Of levels; one that the cluster does not name, such as `fabric`, is joined by switches.
    """
    joints: dict[str, Joint] = {}
    below = max(cluster.nvlink_domain, cluster.gpus_per_node)
    for level in cluster.levels:
        direct = level.gpus // below if level.joined == "direct" else 0
        joints[level.name] = Joint(level=level.name, rails=level.rails, direct=direct)
        below = level.gpus
    return [joints.get(name, Joint(level=name)) for name in names]


@lru_cache(maxsize=1024)
def halves_cut_gb_per_s(first: tuple[float, ...], second: tuple[float, ...], joint: Joint) -> float:
    """Minimum cut between some sub-blocks of a block and some others, by their up-links in GB/s.

    Switches make the block a star, or one for each rail with its share of every link: what one side's links
    carry, or the other's. Direct links are spread evenly over the other blocks of the machine: those between
    the two sides are cut, and of the detours over blocks that are on neither the links of the side that has
    less. Infinite where one side has none.

    Parameters
    ----------
    first, second
        Up-links of the sub-blocks on either side, GB/s in one direction, above 0.
    joint
        How the block joins its sub-blocks.

    Returns
    -------
    float
        GB/s in one direction.
    """
    if not first or not second:
        return float("inf")
    on_a_side = min(sum(first), sum(second))
    if not joint.direct:
        return on_a_side
    other_blocks = max(joint.direct - 1, len(first) + len(second) - 1)
    absent = other_blocks + 1 - len(first) - len(second)
    between = sum(min(links) for links in product(first, second))
    return (between + on_a_side * absent) / other_blocks


# The fabric of a cluster whose nodes are listed, node by node.


CORE = "core"


@dataclass(frozen=True, kw_only=True)
class ListedFabric:
    """The blocks that nodes are in, and their links."""

    paths: Mapping[str, tuple[str, ...]]
    """By node, from the inside out: `leaf/POD/LEAF`, `pod/POD` where there are pods, `core`."""
    up_gb_per_s: Mapping[str, float]
    """Of every node and block to the level above."""


def listed_fabric(cluster: ClusterSpec) -> ListedFabric:
    """The blocks of a cluster that lists its nodes.

    A node's link is that of its free GPUs' NICs (inside a rack, NVLink); those of leaves and pods are what
    the job has of them (`uplinks`). Nodes of a list without leaves hang on the core.

    Parameters
    ----------
    cluster
        That lists its nodes.
    """
    links, pods, racks = uplinks(cluster), _has_pods(cluster), leaves_are_domains(cluster)
    inside_gb_per_s = float(full_levels(cluster).gb_per_s[0])
    up = {f"leaf/{pod}/{leaf}": link.gb_per_s for (pod, leaf), link in links.leaves.items()}
    up |= {f"pod/{pod}": link.gb_per_s for (pod, _), link in links.pods.items()}
    paths = {}
    for node in cluster.nodes:
        free = free_of(node, cluster.gpus_per_node)
        paths[node.name] = (CORE,)
        if node.leaf is not None and free:
            pod = (f"pod/{node.pod or ''}",) if pods else ()
            paths[node.name] = (f"leaf/{node.pod or ''}/{node.leaf}", *pod, CORE)
        nic_gb_per_s = (node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu) / 8
        in_rack = racks and node.leaf is not None
        up[node.name] = free * (inside_gb_per_s if in_rack else nic_gb_per_s)
    return ListedFabric(paths=paths, up_gb_per_s=up)


def _has_pods(cluster: ClusterSpec) -> bool:
    """Whether something lies between leaves and core: several pods, or a level for the only one."""
    return len(uplinks(cluster).pods) > 1 or first_outside_a_leaf(cluster) < len(cluster.levels) - 1


def listed_joints(cluster: ClusterSpec) -> list[Joint]:
    """How nodes are joined in leaves, leaves in pods (or in the core, where there are none), pods in it.

    Parameters
    ----------
    cluster
        That lists its nodes.

    Returns
    -------
    list of Joint
        From the inside out: of leaves, of pods where there are any, of the core.
    """
    first = first_outside_a_leaf(cluster)
    names = [level.name for level in cluster.levels]
    joints = []
    tiers = ("leaf", "pod", CORE) if _has_pods(cluster) else ("leaf", CORE)
    for depth, tier in enumerate(tiers, start=first - 1):
        joint = Joint(level=tier)
        if 0 <= depth < len(names):
            (stated,) = level_joints(cluster, [names[depth]])
            joint = replace(stated, level=tier)
        joints.append(joint)
    return joints
