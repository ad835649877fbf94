"""The fabric as a graph, and its cuts by maximum flow: a second opinion on the level table."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster_specs.fabric import FabricLevels, fabric_levels
from cluster_specs.schema import ClusterSpec

if TYPE_CHECKING:
    import networkx as nx

ROOT = "root"
COARSEST = 128
_INSIDE_A_NODE = ("nvlink", "xgmi", "pcie")


def fabric_graph(cluster: ClusterSpec, gpus: int) -> nx.Graph[str]:
    """The fabric under an allocation as a tree: nodes are leaves, the blocks of every level inner vertices.

    Leaves `node0`, `node1`, ... stand for a node's GPUs together and carry `gpus` and `inside_gb_per_s`, what
    one of its GPUs has inside the node. An inner vertex `pod/3` is what joins the blocks below it and carries
    `level` and `gpus`; the one of the outermost level is `root`. An edge's `capacity` is in GB/s and one
    direction: the GPUs below it times their rate at the level above it.

    A tree keeps the convention of the level table: up-links are counted at their end points. Where switches
    are joined directly (the groups of a dragonfly), each global link has two end points, so the links carry
    half of what the end points sum to, and that half is the cut between two halves of the machine.
    """
    import networkx as nx

    levels = fabric_levels(cluster, gpus)
    graph: nx.Graph[str] = nx.Graph()
    leaf = _leaf_gpus(cluster, levels)
    within = np.flatnonzero(levels.blocks <= leaf)
    inside = float(levels.gb_per_s[within[-1] if within.size else 0])
    for start in range(0, gpus, leaf):
        graph.add_node(f"node{start // leaf}", gpus=leaf, inside_gb_per_s=inside)
    below, prefix = leaf, "node"
    for depth in np.flatnonzero(levels.blocks > leaf):
        block, last = int(levels.blocks[depth]), depth == len(levels.blocks) - 1
        for start in range(0, gpus, block):
            graph.add_node(_vertex(levels, int(depth), start // block), level=levels.names[depth], gpus=block)
        capacity = below * float(levels.gb_per_s[depth])
        for start in range(0, gpus, below):
            above = ROOT if last else _vertex(levels, int(depth), start // block)
            graph.add_edge(f"{prefix}{start // below}", above, capacity=capacity)
        below, prefix = block, f"{levels.names[depth]}/"
    return graph


def cut_gb_per_s(cluster: ClusterSpec, gpus: int) -> NDArray[np.float64]:
    """Minimum cut between the two halves of one block of each level, GB/s in one direction, shape [levels].

    Maximum flow from the first half of the sub-blocks to the others, by networkx. With an odd number of
    sub-blocks the first half is the smaller one; a block of a single GPU has no cut: its entry is infinite.
    """
    levels = fabric_levels(cluster, gpus)
    below = np.concatenate([[1], levels.blocks[:-1]])
    return np.array(
        [
            _star_cut(int(count), int(size) * float(rate))
            for count, size, rate in zip(levels.blocks // below, below, levels.gb_per_s, strict=True)
        ]
    )


def _star_cut(count: int, capacity: float) -> float:
    """Minimum cut between the first half and the rest of `count` sub-blocks, each joined by `capacity`."""
    import networkx as nx

    if count < 2:
        return float("inf")
    graph: nx.DiGraph[str] = nx.DiGraph()
    # An edge without a capacity is unlimited to networkx.
    for index, size in enumerate(_runs(count // 2)):
        graph.add_edge("source", f"first{index}")
        graph.add_edge(f"first{index}", ROOT, capacity=size * capacity)
    for index, size in enumerate(_runs(count - count // 2)):
        graph.add_edge(ROOT, f"second{index}", capacity=size * capacity)
        graph.add_edge(f"second{index}", "sink")
    return float(nx.minimum_cut_value(graph, "source", "sink"))


def _runs(count: int) -> list[int]:
    """Sub-blocks of one half in at most COARSEST vertices: as good for the cut, as they all go one way."""
    vertices = min(count, COARSEST)
    return [count // vertices + (index < count % vertices) for index in range(vertices)]


def _leaf_gpus(cluster: ClusterSpec, levels: FabricLevels) -> int:
    """GPUs of one leaf: the node, or the piece of it that an allocation with part-filled nodes counts by."""
    inside_node = [
        int(block)
        for block, medium in zip(levels.blocks, levels.media, strict=True)
        if medium in _INSIDE_A_NODE and block <= cluster.gpus_per_node
    ]
    return inside_node[-1] if inside_node else gcd(cluster.gpus_per_node, int(levels.blocks[-1]))


def _vertex(levels: FabricLevels, depth: int, index: int) -> str:
    return ROOT if depth == len(levels.blocks) - 1 else f"{levels.names[depth]}/{index}"
