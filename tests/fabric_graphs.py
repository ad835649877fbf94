"""Fabrics as graphs, and their minimum cuts by maximum flow: what the product sums up link by link.

Capacities are GB/s in one direction. Blocks that switches join hang on a vertex of their level, those that
links of their own join are joined edge by edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.links import (
    Joint,
    halves_cut_gb_per_s,
    level_joints,
    listed_fabric,
    listed_joints,
    outline_of,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import free_of


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """A node with its free GPUs."""

    name: str
    gpus: int
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

    A node carries `gpus` and `path`; a block's vertex `level` and `gpus`. A block with
    rails is a vertex for each rail, `name/rail0` and so on. With `apart` nothing joins a node's rails, and
    the node is a vertex for each of them too, named in its `ports`. Edges carry `capacity`.
    """
    graph: nx.Graph[str] = nx.Graph()
    above: dict[str, tuple[int, str]] = {}
    gpus: dict[tuple[int, str], int] = defaultdict(int)
    for terminal in terminals:
        names = tuple(name for _, name in terminal.path)
        graph.add_node(terminal.name, gpus=terminal.gpus, path=names)
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


def fabric_graph(cluster: ClusterSpec, gpus: int) -> nx.Graph[str]:
    """The levels under an allocation: nodes `node0`, `node1`, ..., blocks `pod/3`, the outermost `root`.

    See `draw`. An edge's `capacity` is the GPUs below it times their rate at the level above it. With
    rails, `scalable-unit/0/rail3` is what GPU 3 of each node hangs on; between groups that are joined
    directly there are edges instead of a root.
    """
    outline = outline_of(cluster, fabric_levels(cluster, gpus))
    up: dict[str, float] = {}
    terminals = []
    for start in range(0, gpus, outline.node_gpus):
        names = outline.names_at(start)
        up.update(zip(names, outline.up_gb_per_s, strict=False))
        terminals.append(
            Terminal(
                name=names[0],
                gpus=outline.node_gpus,
                path=tuple(enumerate(names[1:])),
            )
        )
    return draw(terminals, outline.joints, up, apart=not cluster.crosses_rails_inside)


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


def cut_between_gb_per_s(
    graph: nx.Graph[str], first: Collection[str], second: Collection[str]
) -> float:
    """Minimum cut between two sets of nodes, GB/s in one direction.

    Nodes that are in neither set pass nothing on. A node whose rails do not meet may be named whole or by
    rail (`node0/rail3`).
    """
    sides = [
        {port for name in side for port in graph.nodes[name].get("ports", (name,))}
        for side in (first, second)
    ]
    flow: nx.Graph[str] = graph.copy()
    ends = sides[0] | sides[1]
    nodes = [name for name, data in graph.nodes(data=True) if "level" not in data]
    flow.remove_nodes_from([name for name in nodes if name not in ends])
    # An edge without a capacity is unlimited to networkx.
    flow.add_edges_from(("one side of the cut", name) for name in sides[0])
    flow.add_edges_from(("other side of the cut", name) for name in sides[1])
    return float(nx.minimum_cut_value(flow, "one side of the cut", "other side of the cut"))


def node_graph(cluster: ClusterSpec) -> nx.Graph[str]:
    """The free GPUs of nodes, their leaves and pods, and the core. See `draw`."""
    listed, joints = listed_fabric(cluster), listed_joints(cluster)
    terminals = []
    for node in cluster.nodes:
        path = listed.paths[node.name]
        # What lies around a node of a list without leaves is the outermost level.
        outer = range(len(joints) - len(path), len(joints))
        free = free_of(node, cluster.gpus_per_node)
        terminals.append(
            Terminal(name=node.name, gpus=free, path=tuple(zip(outer, path, strict=True)))
        )
    apart = not cluster.crosses_rails_inside
    return draw(terminals, joints, listed.up_gb_per_s, apart=apart)
