"""The names of nodes, as hostfiles and start scripts write them."""

from __future__ import annotations

from meshwright.cluster_specs.schema import ClusterSpec


def node_name(cluster: ClusterSpec, index: int) -> str:
    """The name of a node, counted from 0: as listed, or by the cluster's pattern, which counts from 1."""
    if cluster.nodes:
        return cluster.nodes[index].name
    return cluster.node_name_pattern.format(index + 1)
