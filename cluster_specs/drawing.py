"""Draws nodes, blocks, rails and the links between them as a networkx graph, for `graph` and `node_graph`.

Capacities are GB/s in one direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx


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
