"""The fabric under an allocation as a graph, and its minimum cuts by maximum flow.

Capacities are GB/s in one direction. Blocks that switches join hang on a vertex of their level. The groups of
a dragonfly are joined edge by edge: each global link has two end points, so the links carry half of what the
groups' up-links sum to, and a cut through the middle meets about half of the links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import FabricLevels, fabric_levels, full_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import (
    first_outside_a_leaf,
    free_of,
    leaves_are_domains,
    uplinks,
)
from meshwright.errors import InputError, shown

if TYPE_CHECKING:
    import networkx as nx


# Draws nodes, blocks, rails and the links between them as a networkx graph, for `graph` and `node_graph`.
#
# Capacities are GB/s in one direction.


@dataclass(frozen=True, kw_only=True)
class Joint:
    """How the blocks, or nodes, inside one block of a level are joined."""

    level: str
    rails: int = 1
    direct: int = 0
    """How many blocks of the machine links of their own join; 0 for switches."""


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A node with its free GPUs."""

    name: str
    gpus: int
    inside_gb_per_s: float
    """Of one GPU inside the node."""
    path: tuple[tuple[int, str], ...]
    """The blocks that it is in, from the inside out: (which joint, name)."""


def draw(
    terminals: Sequence[Terminal],
    joints: Sequence[Joint],
    up_gb_per_s: Mapping[str, float],
    *,
    apart: bool,
) -> nx.Graph[str]:
    """The graph of some nodes; `up_gb_per_s` has the links of every node and block to the level above.

    A node carries `gpus`, `inside_gb_per_s` and `path`; a block's vertex `level` and `gpus`. A block with
    rails is a vertex for each rail, `name/rail0` and so on. With `apart` nothing joins a node's rails, and
    the node is a vertex for each of them too, named in its `ports`. Edges carry `capacity`, the graph
    `up_gb_per_s` and `joints`.
    """
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph(up_gb_per_s=dict(up_gb_per_s), joints=tuple(joints))
    above: dict[str, tuple[int, str]] = {}
    gpus: dict[tuple[int, str], int] = defaultdict(int)
    for terminal in terminals:
        names = tuple(name for _, name in terminal.path)
        graph.add_node(
            terminal.name, gpus=terminal.gpus, inside_gb_per_s=terminal.inside_gb_per_s, path=names
        )
        inner = terminal.name
        for step in terminal.path:
            above.setdefault(inner, step)
            gpus[step] += terminal.gpus
            inner = step[1]
    rails = {block: joints[depth].rails for depth, block in gpus}
    for (depth, block), count in gpus.items():
        if not joints[depth].direct:
            for vertex in vertices(block, rails[block]):
                graph.add_node(vertex, level=joints[depth].level, gpus=count // rails[block])
    inside: dict[tuple[int, str], list[str]] = defaultdict(list)
    for inner, (depth, block) in above.items():
        inside[depth, block].append(inner)
        if joints[depth].direct:
            continue
        lower = vertices(inner, rails.get(inner, 1))
        if inner not in rails and apart and rails[block] > 1:
            lower = vertices(inner, rails[block])
            graph.add_nodes_from(lower, node=inner)
            graph.nodes[inner]["ports"] = tuple(lower)
        _connect(graph, lower, vertices(block, rails[block]), up_gb_per_s[inner])
    for (depth, _), members in inside.items():
        if joints[depth].direct:
            _join_directly(graph, members, joints[depth], up_gb_per_s)
    return graph


def vertices(block: str, rails: int) -> list[str]:
    """The vertices of a block: itself, or its rails."""
    return [block] if rails == 1 else [f"{block}/rail{rail}" for rail in range(rails)]


def _connect(
    graph: nx.Graph[str], lower: Sequence[str], upper: Sequence[str], gb_per_s: float
) -> None:
    """Links between the vertices of two blocks, spread evenly; rail i meets rail i."""
    count = max(len(lower), len(upper))
    for index in range(count):
        graph.add_edge(
            lower[index % len(lower)], upper[index % len(upper)], capacity=gb_per_s / count
        )


def _join_directly(
    graph: nx.Graph[str], members: Sequence[str], joint: Joint, up_gb_per_s: Mapping[str, float]
) -> None:
    """Links spread evenly over the other blocks of the machine; those to blocks that are not drawn meet in
    one vertex, over which traffic may take a detour.
    """
    other_blocks = max(joint.direct - 1, len(members) - 1, 1)
    for first, second in combinations(members, 2):
        graph.add_edge(
            first, second, capacity=min(up_gb_per_s[first], up_gb_per_s[second]) / other_blocks
        )
    absent = other_blocks + 1 - len(members)
    if absent > 0:
        vertex = f"{joint.level}/others"
        graph.add_node(vertex, level=joint.level, gpus=0)
        for member in members:
            graph.add_edge(member, vertex, capacity=up_gb_per_s[member] * absent / other_blocks)


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
    # GPUs of one leaf: the node, or the piece of it that an allocation with part-filled nodes counts by.
    inside_node = [
        int(block)
        for block, medium in zip(levels.blocks, levels.media, strict=True)
        if medium in _INSIDE_A_NODE and block <= cluster.gpus_per_node
    ]
    node = inside_node[-1] if inside_node else gcd(cluster.gpus_per_node, int(levels.blocks[-1]))
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


# The fabric of a cluster whose nodes are listed, node by node, as a graph.


CORE = "core"


def node_graph(cluster: ClusterSpec) -> nx.Graph[str]:
    """The free GPUs of nodes, their leaves and pods, and the core: `leaf/POD/LEAF`, `pod/POD`, `core`.

    See `drawing.draw`. A node's link is that of its free GPUs' NICs (inside a rack, NVLink); those of leaves
    and pods are what the job has of them (`uplinks`). A node without a leaf hangs on the core. Raises
    InputError where no nodes are listed.
    """
    if not cluster.nodes:
        raise InputError(
            f"nodes: cluster {cluster.name!r} lists none; `fabric_graph` draws its levels"
        )
    levels, links = full_levels(cluster), uplinks(cluster)
    inside = float(levels.gb_per_s[0])
    pods = _has_pods(cluster)
    racks = leaves_are_domains(cluster)
    up = {f"leaf/{pod}/{leaf}": link.gb_per_s for (pod, leaf), link in links.leaves.items()}
    up |= {f"pod/{pod}": link.gb_per_s for (pod, _), link in links.pods.items()}
    terminals = []
    for node in cluster.nodes:
        free = free_of(node, cluster.gpus_per_node)
        path: tuple[tuple[int, str], ...] = ((2 if pods else 1, CORE),)
        if node.leaf is not None and free:
            pod = ((1, f"pod/{node.pod or ''}"),) if pods else ()
            path = ((0, f"leaf/{node.pod or ''}/{node.leaf}"), *pod, *path)
        nic = (node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu) / 8
        up[node.name] = free * (inside if racks and node.leaf is not None else nic)
        terminals.append(Terminal(name=node.name, gpus=free, inside_gb_per_s=inside, path=path))
    return draw(terminals, listed_joints(cluster), up, apart=not cluster.crosses_rails_inside)


def _has_pods(cluster: ClusterSpec) -> bool:
    """Whether something lies between leaves and core: several pods, or a level for the only one."""
    return len(uplinks(cluster).pods) > 1 or first_outside_a_leaf(cluster) < len(cluster.levels) - 1


def listed_joints(cluster: ClusterSpec) -> list[Joint]:
    """How nodes are joined in leaves, leaves in pods (or in the core, where there are none), pods in it."""
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
