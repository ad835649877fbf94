"""The fabric of a cluster whose nodes are listed, node by node, as a graph; cuts by maximum flow."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

from cluster_specs.errors import ClusterError, shown
from cluster_specs.fabric import full_levels
from cluster_specs.schema import ClusterSpec

if TYPE_CHECKING:
    import networkx as nx

CORE = "core"
MOST_NODES = 16_384


def node_graph(cluster: ClusterSpec) -> nx.Graph[str]:
    """Nodes, their leaves and pods, and the core, as a tree.

    A node carries `gpus` (free ones), an inner vertex `level` and `gpus`. An edge's `capacity` is in GB/s and
    one direction: a node's free GPUs times their NICs, above it the free GPUs times what one of them has at
    the level above; the rest of an up-link belongs to other jobs. Leaves differ in size, nodes in free GPUs.
    A node without a leaf hangs on the core. Raises ClusterError where no nodes are listed, or more than
    `MOST_NODES`.
    """
    import networkx as nx

    if not cluster.nodes:
        raise ClusterError(f"nodes: cluster {cluster.name!r} lists none; `fabric_graph` draws its levels")
    if len(cluster.nodes) > MOST_NODES:
        raise ClusterError(f"nodes: {len(cluster.nodes)} are more than the {MOST_NODES} that are drawn")
    levels = full_levels(cluster)
    rates = [
        float(rate)
        for rate, medium in zip(levels.gb_per_s, levels.media, strict=True)
        if medium not in ("nvlink", "xgmi", "pcie")
    ]
    into_leaf, into_pod, into_core = (rates[min(k, len(rates) - 1)] for k in range(3))
    nics: dict[str, float] = {}
    graph: nx.Graph[str] = nx.Graph()
    graph.add_node(CORE, level=CORE, gpus=0)
    for node in cluster.nodes:
        free = cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        path = [f"pod/{node.pod or ''}", f"leaf/{node.pod or ''}/{node.leaf}"] if node.leaf else []
        graph.add_node(node.name, gpus=free)
        graph.nodes[CORE]["gpus"] += free
        for vertex in path:
            if vertex not in graph:
                graph.add_node(vertex, level=vertex.split("/")[0], gpus=0)
            graph.nodes[vertex]["gpus"] += free
        nics[node.name] = (node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu) / 8
        chain = [CORE, *path, node.name]
        for above, below in pairwise(chain):
            graph.add_edge(above, below)
    for above, below in graph.edges:
        inner, outer = sorted((above, below), key=lambda vertex: _depth(graph, vertex))
        rate = {"leaf": into_leaf, "pod": into_pod, CORE: into_core}[graph.nodes[outer]["level"]]
        rate = nics.get(inner, rate)
        graph.edges[inner, outer]["capacity"] = graph.nodes[inner]["gpus"] * rate
    return graph


def _depth(graph: nx.Graph[str], vertex: str) -> int:
    return {"leaf": 1, "pod": 2, CORE: 3}.get(graph.nodes[vertex].get("level", ""), 0)


def cut_between_gb_per_s(graph: nx.Graph[str], first: Collection[str], second: Collection[str]) -> float:
    """Minimum cut between two sets of nodes, GB/s in one direction, by networkx.

    Raises ClusterError where a name is in both, or not in the graph.
    """
    import networkx as nx

    both = set(first) & set(second)
    unknown = [name for name in (*first, *second) if name not in graph]
    if both or unknown:
        name = min(both) if both else unknown[0]
        raise ClusterError(
            f"{shown(name)} is {'on both sides of the cut' if both else 'no node of the fabric'}"
        )
    flow: nx.Graph[str] = graph.copy()
    # An edge without a capacity is unlimited to networkx.
    flow.add_edges_from(("one side of the cut", name) for name in first)
    flow.add_edges_from(("other side of the cut", name) for name in second)
    return float(nx.minimum_cut_value(flow, "one side of the cut", "other side of the cut"))
