"""What part of a cluster a job takes: how many GPUs, and which nodes."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, shown


def check_gpus(cluster: ClusterSpec, gpus: int) -> None:
    """Raises InputError, with both numbers, if the cluster has not that many GPUs."""
    if not 1 <= gpus <= cluster.gpus:
        raise InputError(
            f"gpus: {shown(gpus)} asked for, but cluster {cluster.name!r} has {cluster.gpus}; "
            f"choose 1 to {cluster.gpus}"
        )


def allocated_gpus(cluster: ClusterSpec, gpus: int | None) -> int:
    """The GPUs to plan for: those asked for, or all of a cluster that has a size of its own.

    Raises InputError if the cluster has fewer, or is a kind of node in any number and `gpus` is not given.
    """
    if gpus is None and cluster.elastic:
        raise InputError(
            f"gpus: missing; {cluster.name!r} is a kind of node, not one machine; "
            f"say how many GPUs with --gpus (1 to {cluster.gpus})"
        )
    if gpus is not None:
        check_gpus(cluster, gpus)
    return cluster.gpus if gpus is None else gpus


def expand_nodes(cluster: ClusterSpec, gpus: int) -> list[tuple[str, int]]:
    """(name, GPUs to use) of the first nodes that together hold `gpus` GPUs; the last may be part-filled.

    The nodes of an allocation are numbered without gaps, also where racks are not filled (64 of 72 GPUs).
    Raises InputError if the cluster has fewer.
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


def first_gpus(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The same cluster with only the first `gpus` GPUs of its listed nodes free; itself without a list.

    Nodes keep their places in the list. Raises InputError if the cluster has fewer.
    """
    if not cluster.nodes or gpus == cluster.gpus:
        return cluster
    used = dict(expand_nodes(cluster, gpus))
    nodes = tuple(
        node.model_copy(update={"free_gpus": used.get(node.name, 0)}) for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes, "gpus": gpus})


def _nodes(cluster: ClusterSpec) -> Iterator[tuple[str, int]]:
    """Every node and its free GPUs; a cluster of 20 GPUs on nodes of 8 ends with a node of 4."""
    if cluster.nodes:
        for node in cluster.nodes:
            yield node.name, cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        return
    for index, start in enumerate(range(0, cluster.gpus, cluster.gpus_per_node)):
        yield node_name(cluster, index), min(cluster.gpus_per_node, cluster.gpus - start)
