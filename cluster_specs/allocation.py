"""What part of a cluster a job takes: how many GPUs, and which nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.uplinks import Key, Uplink, free_of, uplinks
from meshwright.errors import InputError, require_whole, shown, suggestion


def check_gpus(cluster: ClusterSpec, gpus: int) -> None:
    """Raises InputError, with both numbers, if the cluster has not that many GPUs."""
    require_whole("gpus", gpus)
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
    """(name, GPUs to use) of the nodes of an allocation, as listed; one of them may be part-filled.

    Without a list, the first nodes: they are numbered without gaps, also where racks are not filled (64 of
    72 GPUs). Of listed nodes those with the most free GPUs, so that their order in the list decides nothing.
    Raises InputError if the cluster has fewer.
    """
    check_gpus(cluster, gpus)
    nodes = list(_nodes(cluster, gpus))
    used = [0] * len(nodes)
    for index in _fullest_first(cluster) if cluster.nodes else range(len(nodes)):
        used[index] = min(nodes[index][1], gpus)
        gpus -= used[index]
        if not gpus:
            break
    return [(name, count) for (name, _), count in zip(nodes, used, strict=True) if count]


def _fullest_first(cluster: ClusterSpec) -> list[int]:
    """Listed nodes, those with the most free GPUs first; of equal ones a pod's, then a leaf's, together.

    Pods and leaves come in the order of their free GPUs, then of what is left of their links.
    """
    links = uplinks(cluster)

    def most_first(blocks: Mapping[Key, Uplink]) -> dict[Key, int]:
        """Position of each block; of equal ones in the order of the list."""
        order = sorted(blocks, key=lambda key: (-blocks[key].free, -blocks[key].gb_per_s))
        return {key: position for position, key in enumerate(order)}

    pods, leaves = most_first(links.pods), most_first(links.leaves)

    def rank(index: int) -> tuple[int, int, int, int]:
        """What the nodes are sorted by."""
        node = cluster.nodes[index]
        pod = node.pod or ""
        free = free_of(node, cluster.gpus_per_node)
        return -free, pods.get((pod, ""), 0), leaves.get((pod, node.leaf or ""), 0), index

    return sorted(range(len(cluster.nodes)), key=rank)


def first_gpus(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The same cluster with only the GPUs of `expand_nodes` free; itself without a list.

    Nodes keep their places in the list. Raises InputError if the cluster has fewer.
    """
    if not cluster.nodes or gpus == cluster.gpus:
        return cluster
    used = dict(expand_nodes(cluster, gpus))
    nodes = tuple(
        node.model_copy(update={"free_gpus": used.get(node.name, 0)}) for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes, "gpus": gpus})


def only_nodes(cluster: ClusterSpec, names: Collection[str]) -> ClusterSpec:
    """The same cluster with only the nodes of these names free; they keep their places in the list.

    Raises InputError where the cluster lists no nodes, or none of a name, or nothing of them is free.
    """
    listed_names = {node.name for node in cluster.nodes}
    if not listed_names:
        raise InputError(
            f"cluster {cluster.name!r} lists no nodes to choose from: give a cluster file with `nodes`",
            where="nodes",
        )
    for name in names:
        if name not in listed_names:
            near = suggestion(name, listed_names)
            raise InputError(
                f"cluster {cluster.name!r} has no node {shown(name)}{near}", where="nodes"
            )
    wanted = set(names)
    nodes = tuple(
        node if node.name in wanted else node.model_copy(update={"free_gpus": 0})
        for node in cluster.nodes
    )
    free = sum(free_of(node, cluster.gpus_per_node) for node in nodes)
    if not free:
        raise InputError(
            f"no GPU of these nodes of cluster {cluster.name!r} is free", where="nodes"
        )
    return cluster.model_copy(update={"nodes": nodes, "gpus": free})


def _nodes(cluster: ClusterSpec, gpus: int) -> Iterator[tuple[str, int]]:
    """Every listed node and its free GPUs; without a list the nodes that the first `gpus` GPUs stand on. A
    cluster of 20 GPUs on nodes of 8 ends with a node of 4.
    """
    if cluster.nodes:
        for node in cluster.nodes:
            yield node.name, free_of(node, cluster.gpus_per_node)
        return
    for index, start in enumerate(range(0, gpus, cluster.gpus_per_node)):
        yield node_name(cluster, index), min(cluster.gpus_per_node, cluster.gpus - start)
