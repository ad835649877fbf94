"""The fabric under an allocation as a graph, and its minimum cuts by maximum flow.

Capacities are GB/s in one direction. Blocks that switches join hang on a vertex of their level. The groups of
a dragonfly are joined edge by edge: each global link has two end points, so the links carry half of what the
groups' up-links sum to, and a cut through the middle meets about half of the links.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.drawing import Joint, Terminal, draw
from meshwright.cluster_specs.fabric import FabricLevels, fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, shown

if TYPE_CHECKING:
    import networkx as nx

ROOT = "root"
_INSIDE_A_NODE = ("nvlink", "xgmi", "pcie")


def fabric_graph(cluster: ClusterSpec, gpus: int) -> nx.Graph[str]:
    """The levels under an allocation: nodes `node0`, `node1`, ..., blocks `pod/3`, the outermost `root`.

    See `drawing.draw`. An edge's `capacity` is the GPUs below it times their rate at the level above it. With
    rails, `scalable-unit/0/rail3` is what GPU 3 of each node hangs on; between groups that are joined
    directly there are edges instead of a root.
    """
    outline = outline_of(cluster, gpus)
    up: dict[str, float] = {}
    terminals = []
    for start in range(0, gpus, outline.node_gpus):
        names = outline.names_at(start)
        up.update(zip(names, outline.up_gb_per_s, strict=False))
        terminals.append(
            Terminal(
                name=names[0],
                gpus=outline.node_gpus,
                inside_gb_per_s=outline.inside_gb_per_s,
                path=tuple(enumerate(names[1:])),
            )
        )
    return draw(terminals, outline.joints, up, apart=not cluster.crosses_rails_inside)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The levels from the node outwards: sizes, names and links of their blocks, which are all alike."""

    levels: FabricLevels
    node_gpus: int
    """GPUs of a node, or of the piece of it that an allocation with part-filled nodes counts by."""
    inside_gb_per_s: float
    outer: tuple[int, ...]
    """The levels that join nodes and what is larger, by their place in `levels`."""
    joints: tuple[Joint, ...]
    up_gb_per_s: tuple[float, ...]
    """Links of a node, then of a block of each outer level but the last, to the level above."""

    def names_at(self, gpu: int) -> list[str]:
        """The node of a GPU of the allocation, and its blocks."""
        last = len(self.levels.blocks) - 1
        names = [f"node{gpu // self.node_gpus}"]
        for depth in self.outer:
            block = gpu // int(self.levels.blocks[depth])
            names.append(ROOT if depth == last else f"{self.levels.names[depth]}/{block}")
        return names


def outline_of(cluster: ClusterSpec, gpus: int) -> Outline:
    """What `fabric_graph` draws."""
    levels = fabric_levels(cluster, gpus)
    node = _leaf_gpus(cluster, levels)
    within = np.flatnonzero(levels.blocks <= node)
    outer = tuple(int(depth) for depth in np.flatnonzero(levels.blocks > node))
    below = [node, *(int(levels.blocks[depth]) for depth in outer)]
    return Outline(
        levels=levels,
        node_gpus=node,
        inside_gb_per_s=float(levels.gb_per_s[within[-1] if within.size else 0]),
        outer=outer,
        joints=tuple(level_joints(cluster, [levels.names[depth] for depth in outer])),
        up_gb_per_s=tuple(
            size * float(levels.gb_per_s[depth]) for size, depth in zip(below, outer, strict=False)
        ),
    )


def level_joints(cluster: ClusterSpec, names: Sequence[str]) -> list[Joint]:
    """How the blocks inside some levels, given by name, are joined."""
    joints: dict[str, Joint] = {}
    below = max(cluster.nvlink_domain, cluster.gpus_per_node)
    for level in cluster.levels:
        direct = level.gpus // below if level.joined == "direct" else 0
        joints[level.name] = Joint(level=level.name, rails=level.rails, direct=direct)
        below = level.gpus
    return [joints.get(name, Joint(level=name)) for name in names]


def cut_gb_per_s(cluster: ClusterSpec, gpus: int) -> NDArray[np.float64]:
    """Minimum cut between the two halves of one block of each level, GB/s in one direction, shape [levels].

    From the first half of the sub-blocks to the others. With an odd number of
    sub-blocks the first half is the smaller one; a block of a single GPU has no cut: its entry is infinite.
    """
    levels = fabric_levels(cluster, gpus)
    below = np.concatenate([[1], levels.blocks[:-1]])
    joints = level_joints(cluster, levels.names)
    cuts = []
    for block, size, rate, joint in zip(levels.blocks, below, levels.gb_per_s, joints, strict=True):
        links = (float(size) * float(rate),) * int(block // size)
        half = len(links) // 2
        cuts.append(halves_cut_gb_per_s(links[:half], links[half:], joint))
    return np.array(cuts)


@lru_cache(maxsize=1024)
def halves_cut_gb_per_s(first: tuple[float, ...], second: tuple[float, ...], joint: Joint) -> float:
    """Minimum cut between some sub-blocks of a block and some others, by their up-links in GB/s.

    Switches make the block a star, or one for each rail with its share of every link: what one side's links
    carry, or the other's. Direct links need a maximum flow. Infinite where one side has none.
    """
    if not first or not second:
        return float("inf")
    if not joint.direct:
        return min(sum(first), sum(second))
    sides = [
        [f"{side}/{index}" for index in range(len(links))]
        for side, links in enumerate((first, second))
    ]
    up = dict(zip((*sides[0], *sides[1]), (*first, *second), strict=True))
    terminals = [Terminal(name=name, gpus=1, inside_gb_per_s=0.0, path=((0, ROOT),)) for name in up]
    graph = draw(terminals, [joint], up, apart=False)
    return cut_between_gb_per_s(graph, *sides)


def cut_between_gb_per_s(
    graph: nx.Graph[str], first: Collection[str], second: Collection[str]
) -> float:
    """Minimum cut between two sets of nodes, GB/s in one direction, by networkx.

    Nodes that are in neither set pass nothing on. A node whose rails do not meet may be named whole or by
    rail (`node0/rail3`). Raises InputError where a name is in both sets, or no node of the graph.
    """
    import networkx as nx

    sides = [{port for name in side for port in _ports(graph, name)} for side in (first, second)]
    both = sides[0] & sides[1]
    if both:
        raise InputError(f"{shown(min(both))} is on both sides of the cut")
    flow: nx.Graph[str] = graph.copy()
    ends = sides[0] | sides[1]
    nodes = [name for name, data in graph.nodes(data=True) if "level" not in data]
    flow.remove_nodes_from([name for name in nodes if name not in ends])
    # An edge without a capacity is unlimited to networkx.
    flow.add_edges_from(("one side of the cut", name) for name in sides[0])
    flow.add_edges_from(("other side of the cut", name) for name in sides[1])
    return float(nx.minimum_cut_value(flow, "one side of the cut", "other side of the cut"))


def _ports(graph: nx.Graph[str], name: str) -> tuple[str, ...]:
    if name not in graph or "level" in graph.nodes[name]:
        raise InputError(f"{shown(name)} is no node of the fabric")
    ports: tuple[str, ...] = graph.nodes[name].get("ports", (name,))
    return ports


def _leaf_gpus(cluster: ClusterSpec, levels: FabricLevels) -> int:
    """GPUs of one leaf: the node, or the piece of it that an allocation with part-filled nodes counts by."""
    inside_node = [
        int(block)
        for block, medium in zip(levels.blocks, levels.media, strict=True)
        if medium in _INSIDE_A_NODE and block <= cluster.gpus_per_node
    ]
    return inside_node[-1] if inside_node else gcd(cluster.gpus_per_node, int(levels.blocks[-1]))
