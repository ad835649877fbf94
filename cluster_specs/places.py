"""Which GPUs an allocation has, in the order in which the levels of the fabric are filled."""

from __future__ import annotations

from meshwright.cluster_specs.allocation import expand_nodes
from meshwright.cluster_specs.fabric import fabric_levels, is_irregular
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.cluster_specs.uplinks import free_of, uplinks

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
        found = _leaf_by_leaf(cluster, gpus)
        if len(found) == gpus:
            return found
    used = dict(expand_nodes(cluster, gpus))
    return [
        (at, gpu) for at, node in enumerate(cluster.nodes) for gpu in range(used.get(node.name, 0))
    ]


def _leaf_by_leaf(cluster: ClusterSpec, gpus: int) -> list[Place]:
    pods: dict[str, dict[str, list[tuple[int, NodeSpec]]]] = {}
    for at, node in enumerate(cluster.nodes):
        pods.setdefault(node.pod or "", {}).setdefault(node.leaf or "", []).append((at, node))
    of_leaf, of_pod = _quotas(cluster, gpus)
    found: list[Place] = []
    for leaves in pods.values():
        in_pod: list[Place] = []
        for nodes in leaves.values():
            in_leaf = [
                (at, gpu)
                for at, node in nodes
                for gpu in range(free_of(node, cluster.gpus_per_node))
            ]
            in_pod += in_leaf[:of_leaf]
        found += in_pod[:of_pod]
    return found[:gpus]


def _quotas(cluster: ClusterSpec, gpus: int) -> tuple[int, int]:
    """GPUs to take of a leaf and of a pod: the largest block of the allocation that either has free."""
    fitted, links = fabric_levels(cluster, gpus).blocks.tolist(), uplinks(cluster)
    of_leaf, of_pod = (
        max((block for block in fitted if block <= next(iter(found.values())).free), default=gpus)
        for found in (links.leaves, links.pods)
    )
    return of_leaf, of_pod
