"""The names of nodes, as hostfiles and start scripts write them."""

from __future__ import annotations

from meshwright.cluster_specs.schema import ClusterSpec


def node_name(cluster: ClusterSpec, index: int) -> str:
    """The name of a node, counted from 0: as listed, or by the cluster's pattern, which counts from 1."""
    if cluster.nodes:
        return cluster.nodes[index].name
    return cluster.node_name_pattern.format(index + 1)


def names_are_known(cluster: ClusterSpec) -> bool:
    """Whether node names are those of hosts: listed, or by a pattern of the cluster's own.

    The default pattern only counts nodes: there are no hosts of these names.
    """
    default = ClusterSpec.model_fields["node_name_pattern"].default
    return bool(cluster.nodes) or cluster.node_name_pattern != default
