"""The nodes of an allocation by name, as hostfiles and start scripts list them."""

from __future__ import annotations

from collections.abc import Iterator

from cluster_specs.fabric import check_gpus
from cluster_specs.schema import ClusterSpec


def node_name(cluster: ClusterSpec, index: int) -> str:
    """The name of a node, counted from 0: as listed, or by the cluster's pattern, which counts from 1."""
    if cluster.nodes:
        return cluster.nodes[index].name
    return cluster.node_name_pattern.format(index + 1)


def expand_nodes(cluster: ClusterSpec, gpus: int) -> list[tuple[str, int]]:
    """(name, GPUs to use) of the first nodes that together hold `gpus` GPUs; the last may be part-filled.

    The nodes of an allocation are numbered without gaps, also where racks are not filled (64 of 72 GPUs).
    Raises ClusterError if the cluster has fewer.
    """
    check_gpus(cluster, gpus)
    taken: list[tuple[str, int]] = []
    for name, free in _nodes(cluster):
        used = min(free, gpus)
        if used:
            taken.append((name, used))
        gpus -= used
        if not gpus:
            break
    return taken


def _nodes(cluster: ClusterSpec) -> Iterator[tuple[str, int]]:
    if cluster.nodes:
        for node in cluster.nodes:
            yield node.name, cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        return
    for index in range(-(-cluster.gpus // cluster.gpus_per_node)):
        yield node_name(cluster, index), cluster.gpus_per_node
