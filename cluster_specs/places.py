"""Which GPUs an allocation has, in the order in which the levels of the fabric are filled."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cluster_specs.allocation import expand_nodes
from meshwright.cluster_specs.fabric import fabric_levels, is_irregular
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.cluster_specs.uplinks import Key, Uplink, free_of, uplinks

Place = tuple[int, int]
"""(node, local GPU), both from 0."""


def allocated_places(cluster: ClusterSpec, gpus: int) -> list[Place]:
    """(node, local GPU) of every GPU of an allocation; consecutive GPUs share the blocks of `fabric_levels`.

    Nodes that are listed with their leaves are taken leaf by leaf, from each as many GPUs as a block has, and
    pod by pod; other lists in their order. Nodes without free GPUs are passed over. Raises InputError if
    the cluster has fewer.
    """
    per_node = cluster.gpus_per_node
    if not cluster.nodes:
        return [(gpu // per_node, gpu % per_node) for gpu in range(gpus)]
    if any(node.leaf is not None for node in cluster.nodes) and not is_irregular(cluster):
        places = _leaf_by_leaf(cluster, gpus)
        if len(places) == gpus:
            return places
    used_gpus = dict(expand_nodes(cluster, gpus))
    return [
        (index, gpu)
        for index, node in enumerate(cluster.nodes)
        for gpu in range(used_gpus.get(node.name, 0))
    ]


def _leaf_by_leaf(cluster: ClusterSpec, gpus: int) -> list[Place]:
    pods: dict[str, dict[str, list[tuple[int, NodeSpec]]]] = {}
    for index, node in enumerate(cluster.nodes):
        leaves = pods.setdefault(node.pod or "", {})
        leaves.setdefault(node.leaf or "", []).append((index, node))
    links = uplinks(cluster)
    gpus_of_a_leaf = _quota(cluster, gpus, links.leaves)
    gpus_of_a_pod = _quota(cluster, gpus, links.pods)
    places: list[Place] = []
    for leaves in pods.values():
        in_pod: list[Place] = []
        for nodes in leaves.values():
            in_leaf = [
                (index, gpu)
                for index, node in nodes
                for gpu in range(free_of(node, cluster.gpus_per_node))
            ]
            in_pod += in_leaf[:gpus_of_a_leaf]
        places += in_pod[:gpus_of_a_pod]
    return places[:gpus]


def _quota(cluster: ClusterSpec, gpus: int, links: Mapping[Key, Uplink]) -> int:
    """GPUs to take of each leaf, or pod: the largest block of the allocation that one has free."""
    free = next(iter(links.values())).free
    blocks = fabric_levels(cluster, gpus).blocks.tolist()
    return max((block for block in blocks if block <= free), default=gpus)
