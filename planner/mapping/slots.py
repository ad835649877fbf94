"""The nodes of an allocation as slots on leaves and pods, and what one GPU has across them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import level_rates
from meshwright.cluster_specs.uplinks import (
    Uplink,
    first_outside_a_leaf,
    leaves_are_domains,
    link_gb_per_s,
    uplinks,
)
from meshwright.errors import InfeasibleError

Place = tuple[int, int]
"""(node, local GPU), both from 0."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Free slots, each `gpus` GPUs, by leaf in the order of the nodes."""

    gpus: int
    places: tuple[tuple[tuple[Place, ...], ...], ...]
    """`places[leaf][slot]` are the GPUs of a slot."""
    leaf_names: tuple[str, ...]
    leaf_pod: tuple[int, ...]
    pod_names: tuple[str, ...]
    host_leaves: tuple[int, ...]
    """The leaf of every slot in the order of the nodes' names as listed."""
    leaf_links_gb_per_s: tuple[float, ...]
    """What the job has of each leaf's up-links, nominal, one direction."""
    pod_links_gb_per_s: tuple[float, ...]

    @property
    def count(self) -> int:
        """Free slots."""
        return sum(len(leaf) for leaf in self.places)


@dataclass(frozen=True)
class _Node:
    index: int
    free: int
    leaf: str
    pod: str


def slots_of(cluster: ClusterSpec, *, slot_gpus: int, wanted: int) -> Slots:
    """Cuts the cluster's free GPUs into slots of `slot_gpus`; a slot larger than a node takes whole nodes.

    Nodes without a leaf of their own stand under the levels of the cluster, in turn. Raises InfeasibleError
    where fewer than `wanted` slots are free.
    """
    if (
        slot_gpus > cluster.gpus_per_node
        and uplinks(cluster).leaves
        and not leaves_are_domains(cluster)
    ):
        raise InfeasibleError(
            f"groups of {slot_gpus} GPUs span nodes of {cluster.gpus_per_node}, and leaves hold more than an "
            f"NVLink domain of {cluster.nvlink_domain}: list each domain (rack) as a leaf of its own"
        )
    nodes = [node for node in _nodes(cluster) if node.free]
    nodes.sort(key=lambda node: (_natural(node_name(cluster, node.index)), node.index))
    leaves: dict[tuple[str, str], list[tuple[Place, ...]]] = {}
    waiting: dict[tuple[str, str], list[Place]] = {}
    order: list[tuple[str, str]] = []
    for node in nodes:
        key = (node.pod, node.leaf)
        leaves.setdefault(key, [])
        for free_slot in _cut(node, cluster.gpus_per_node, slot_gpus, waiting.setdefault(key, [])):
            leaves[key].append(free_slot)
            order.append(key)
    keys = sorted((key for key in leaves if leaves[key]), key=order.index)
    pods = list(dict.fromkeys(pod for pod, _ in keys))
    leaf_links, pod_links = _links(
        cluster, {key: len(leaves[key]) * slot_gpus for key in keys}, pods
    )
    slots = Slots(
        gpus=slot_gpus,
        places=tuple(tuple(leaves[key]) for key in keys),
        leaf_names=tuple(leaf for _, leaf in keys),
        leaf_pod=tuple(pods.index(pod) for pod, _ in keys),
        pod_names=tuple(pods),
        host_leaves=tuple(keys.index(key) for key in order),
        leaf_links_gb_per_s=leaf_links,
        pod_links_gb_per_s=pod_links,
    )
    if slots.count < wanted:
        raise InfeasibleError(
            f"cluster {cluster.name!r} has {slots.count} free slots of {slot_gpus} GPUs, {wanted} are needed"
        )
    return slots


def joined_slots(slots: Slots, count: int) -> Slots:
    """So many slots of a leaf as one, in turn; leaves with fewer of them drop out."""
    kept = [leaf for leaf, places in enumerate(slots.places) if len(places) >= count]
    pods = list(dict.fromkeys(slots.leaf_pod[leaf] for leaf in kept))
    passed: Counter[int] = Counter()
    hosts = []
    for leaf in slots.host_leaves:
        passed[leaf] += 1
        if passed[leaf] % count == 0:
            hosts.append(kept.index(leaf))
    return replace(
        slots,
        gpus=slots.gpus * count,
        places=tuple(
            tuple(
                tuple(place for slot in places[first : first + count] for place in slot)
                for first in range(0, len(places) - count + 1, count)
            )
            for places in (slots.places[leaf] for leaf in kept)
        ),
        leaf_names=tuple(slots.leaf_names[leaf] for leaf in kept),
        leaf_pod=tuple(pods.index(slots.leaf_pod[leaf]) for leaf in kept),
        pod_names=tuple(slots.pod_names[pod] for pod in pods),
        host_leaves=tuple(hosts),
        leaf_links_gb_per_s=tuple(slots.leaf_links_gb_per_s[leaf] for leaf in kept),
        pod_links_gb_per_s=tuple(slots.pod_links_gb_per_s[pod] for pod in pods),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts names as people do: node-9 before node-10."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def _cut(
    node: _Node, per_node: int, slot_gpus: int, waiting: list[Place]
) -> list[tuple[Place, ...]]:
    """The slots that a node completes. Only whole nodes of one leaf are joined to a larger slot."""
    gpus = [(node.index, gpu) for gpu in range(node.free)]
    if slot_gpus <= per_node:
        count = len(gpus) // slot_gpus
        return [tuple(gpus[index * slot_gpus : (index + 1) * slot_gpus]) for index in range(count)]
    if node.free < per_node:
        return []
    waiting.extend(gpus)
    if len(waiting) < slot_gpus:
        return []
    slot = tuple(waiting[:slot_gpus])
    del waiting[:slot_gpus]
    return [slot]


def _nodes(cluster: ClusterSpec) -> list[_Node]:
    per_node = cluster.gpus_per_node
    inner = max(per_node, cluster.nvlink_domain)
    steps = [level.gpus for level in cluster.levels if level.gpus > inner][:-1]
    if cluster.nvlink_domain > per_node:  # racks of several nodes are what a leaf is elsewhere
        steps = [cluster.nvlink_domain, *steps]
    leaf_gpus = steps[0] if steps else None
    pod_gpus = steps[1] if len(steps) > 1 else None

    def block(index: int, gpus: int | None, name: str) -> str:
        return "" if gpus is None else f"{name}-{index * per_node // gpus:03d}"

    if not cluster.nodes:
        count = -(-cluster.gpus // per_node)
        return [
            _Node(
                index,
                min(per_node, cluster.gpus - index * per_node),
                block(index, leaf_gpus, "leaf"),
                block(index, pod_gpus, "pod"),
            )
            for index in range(count)
        ]
    labelled = any(node.leaf is not None for node in cluster.nodes)
    nodes = []
    for index, node in enumerate(cluster.nodes):
        free = per_node if node.free_gpus is None else node.free_gpus
        leaf = node.leaf if labelled else block(index, leaf_gpus, "leaf")
        pod = node.pod if labelled else block(index, pod_gpus, "pod")
        nodes.append(_Node(index, free, leaf or "", pod or ""))
    return nodes


def _links(
    cluster: ClusterSpec, gpus: dict[tuple[str, str], int], pods: list[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the job has of the up-links of leaves, and of pods, in GB/s; `gpus` are those in slots.

    As `uplinks` has it, but the share of free GPUs is that of those in slots.
    """
    listed = uplinks(cluster)
    racks = cluster.nvlink_domain > cluster.gpus_per_node
    first = first_outside_a_leaf(cluster) if listed.leaves else 0 if racks else 1
    nic = cluster.slowest_nic_gbps_per_gpu / 8
    rates = [*level_rates(cluster), nic] if not cluster.levels else level_rates(cluster)

    def link(count: int, uplink: Uplink | None, depth: int) -> float:
        if uplink is not None and uplink.stated:
            return uplink.gb_per_s
        if uplink is not None:
            return min(nic, link_gb_per_s(cluster, depth)) * count
        return rates[min(depth, len(rates) - 1)] * count

    of_pod = {pod: sum(count for key, count in gpus.items() if key[0] == pod) for pod in pods}
    return (
        tuple(link(count, listed.leaves.get(key), first) for key, count in gpus.items()),
        tuple(link(count, listed.pods.get((pod, "")), first + 1) for pod, count in of_pod.items()),
    )
