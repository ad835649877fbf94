"""What one job has of the up-links of leaves and pods: the links, less what other jobs send over them.

Capacities are GB/s in one direction. `oversubscription` is that of the links of a block whose GPUs all have
the cluster's NIC; a slower node sends less, but its switches keep their links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec

Key = tuple[str, str]
"""(pod, leaf); the leaf is '' for a pod."""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """The links from one leaf or pod to the level above it."""

    free: int
    """Free GPUs of the block."""
    gb_per_s: float
    """The job's share."""
    stated: bool
    """Whether a `background` says so; otherwise it is the share of the free GPUs."""


@dataclass(frozen=True, kw_only=True)
class Uplinks:
    """By leaf, and by pod, of the blocks with free GPUs; in the order of the nodes."""

    leaves: dict[Key, Uplink]
    pods: dict[Key, Uplink]

    @property
    def differ(self) -> bool:
        """Whether leaves, or pods, differ in free GPUs or in what is left of their links."""
        return any(
            len({(link.free, round(link.gb_per_s, 6)) for link in links.values()}) > 1
            for links in (self.leaves, self.pods)
        )


def nominal_nic_gb_per_s(cluster: ClusterSpec) -> float:
    """Of one GPU: the rate that levels divide by their oversubscription. 8 gigabit are a gigabyte."""
    return max(cluster.nic_gbps_per_gpu, cluster.slowest_nic_gbps_per_gpu) / 8


def free_of(node: NodeSpec, gpus_per_node: int) -> int:
    """Free GPUs of a node."""
    return gpus_per_node if node.free_gpus is None else node.free_gpus


def leaves_are_domains(cluster: ClusterSpec) -> bool:
    """Whether the leaves of listed nodes are scale-up domains: racks of several nodes, no leaf larger."""
    if cluster.nvlink_domain <= cluster.gpus_per_node:
        return False
    sizes: dict[Key, int] = {}
    for node in cluster.nodes:
        if node.leaf is not None:
            key = (node.pod or "", node.leaf)
            sizes[key] = sizes.get(key, 0) + cluster.gpus_per_node
    return bool(sizes) and max(sizes.values()) <= cluster.nvlink_domain


def first_outside_a_leaf(cluster: ClusterSpec) -> int:
    """Which of the cluster's levels the up-links of a leaf run in; those of a pod run in the next."""
    return 0 if leaves_are_domains(cluster) else 1


def link_gb_per_s(cluster: ClusterSpec, level: int) -> float:
    """Of one GPU, the links that join the blocks below level `level` of the cluster, whoever uses them.

    What crosses a level crosses all inside it, so the worst oversubscription so far counts.
    """
    inside = cluster.levels[: level + 1]
    worst = max((inner.oversubscription for inner in inside), default=1.0)
    return nominal_nic_gb_per_s(cluster) / worst


class SameCluster:
    """A cluster as a key: the same object is the same cluster, without hashing its nodes."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameCluster) and self.cluster is other.cluster


def uplinks(cluster: ClusterSpec) -> Uplinks:
    """The up-links of the leaves and pods that listed nodes hang on.

    Without a `background`, a job has the share of its free GPUs: the others' GPUs use theirs. With one it has
    what that leaves of the whole link, but no more than the NICs of its free GPUs.
    """
    return _uplinks(SameCluster(cluster))


@lru_cache(maxsize=16)
def _uplinks(same: SameCluster) -> Uplinks:
    cluster = same.cluster
    gpus_per_node, nic = cluster.gpus_per_node, cluster.slowest_nic_gbps_per_gpu / 8
    first = first_outside_a_leaf(cluster)
    stated = [level.background for level in cluster.levels[:-1]]
    of_level = [stated[k] if 0 <= k < len(stated) else None for k in (first - 1, first)]
    counts: tuple[dict[Key, list[int]], dict[Key, list[int]]] = ({}, {})
    for node in cluster.nodes:
        if node.leaf is None:
            continue
        pod = node.pod or ""
        for blocks, key in zip(counts, ((pod, node.leaf), (pod, "")), strict=True):
            count = blocks.setdefault(key, [0, 0])
            count[0] += free_of(node, gpus_per_node)
            count[1] += gpus_per_node
    of_block = {(block.pod, block.leaf or ""): block.background for block in cluster.blocks}
    sides: list[dict[Key, Uplink]] = []
    for step, blocks in enumerate(counts):
        rate = link_gb_per_s(cluster, first + step)
        links = {}
        for key, (free, all_gpus) in blocks.items():
            anywhere = of_block.get((None, key[1]), of_level[step])
            if free:
                links[key] = _link(free, all_gpus, nic, rate, of_block.get(key, anywhere))
        sides.append(links)
    return Uplinks(leaves=sides[0], pods=sides[1])


def _link(free: int, all_gpus: int, nic: float, rate: float, background: float | None) -> Uplink:
    if background is None:
        return Uplink(free=free, gb_per_s=free * min(nic, rate), stated=False)
    return Uplink(
        free=free, gb_per_s=min((1.0 - background) * all_gpus * rate, free * nic), stated=True
    )
