"""The nodes of an allocation as slots on leaves and pods, and what one GPU has across them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import (
    Uplink,
    first_outside_a_leaf,
    leaves_are_domains,
    level_rates,
    link_gb_per_s,
    uplinks,
)
from meshwright.costmodel.layout import AXES, EXPERT_AXES, Ints
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT, MEGATRON_TP_PP_DP
from meshwright.planner.mapping.problem import IntArray, MappingProblem

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


# Process groups of every axis, as the framework makes them from the same degrees and order.
#
# Megatron-core 0.19 builds two grids (`RankGenerator` in `parallel_state`): a dense one of tp, cp, dp, pp,
# and one of the experts in which etp stands for tp, edp for dp, and cp is 1. torchtitan's and DeepSpeed's
# meshes, tp innermost and pp outermost, are the same grid in the default order.


Groups = NDArray[np.int64]
"""Shape [groups, ranks in a group]."""

DENSE_GROUPS: Mapping[str, tuple[str, ...]] = {
    name: tuple(name.split("-")) for name in (*AXES, "dp-cp", "tp-cp", "tp-pp", "tp-dp-cp")
}
_IN_PLACE_OF = {"etp": "tp", "edp": "dp"}
"""Axes of the dense grid whose place the experts' take in theirs."""
EXPERT_GROUPS: Mapping[str, tuple[str, ...]] = {
    name: tuple(_IN_PLACE_OF.get(axis, axis) for axis in name.split("-"))
    for name in (*EXPERT_AXES, "etp-ep", "etp-ep-pp")
}


class Degrees(Protocol):
    """The parallel degrees of one layout."""

    @property
    def tp(self) -> Ints: ...
    @property
    def cp(self) -> Ints: ...
    @property
    def dp(self) -> Ints: ...
    @property
    def pp(self) -> Ints: ...
    @property
    def ep(self) -> Ints: ...
    @property
    def etp(self) -> Ints: ...


def megatron_order(pipeline_before_data: bool) -> tuple[str, ...]:
    """Megatron's default order, or that of `--use-tp-pp-dp-mapping`."""
    return MEGATRON_TP_PP_DP if pipeline_before_data else MEGATRON_DEFAULT


def grid_groups(sizes: Mapping[str, int], order: Sequence[str], axes: Sequence[str]) -> Groups:
    """The groups that run along `axes` of a grid, as Megatron's generate_masked_orthogonal_rank_groups lists
    them: ranks count in `order`, its first axis fastest, both among the groups and inside of one.
    """
    shape = [sizes[axis] for axis in order]
    ranks = np.arange(prod(shape), dtype=np.int64).reshape(shape[::-1])
    # Array axes run the other way round: the last is the fastest.
    position = {axis: len(order) - 1 - index for index, axis in enumerate(order)}
    along = sorted(position[axis] for axis in axes)
    across = sorted(set(position.values()) - set(along))
    members = prod(sizes[axis] for axis in axes)
    return ranks.transpose([*across, *along]).reshape(-1, members)


def process_groups(
    layout: Degrees, order: Sequence[str] = MEGATRON_DEFAULT, *, experts: bool
) -> dict[str, Groups]:
    """Every group by name: the dense axes and their products, and with `experts` the expert axes.

    `order` names tp, cp, ep, dp and pp. Raises InfeasibleError where Megatron could not make the expert
    grid: it wants as many expert as dense replicas if pp is not outermost.
    """
    tp, cp, dp, pp = int(layout.tp), int(layout.cp), int(layout.dp), int(layout.pp)
    etp, ep = int(layout.etp), int(layout.ep)
    axes = (*AXES, "ep")
    dense = dict(zip(axes, (tp, cp, dp, pp, 1), strict=True))
    groups = {name: grid_groups(dense, order, own) for name, own in DENSE_GROUPS.items()}
    if not experts:
        return groups
    expert_replicas, rest = divmod(tp * cp * dp, etp * ep)
    if rest:
        raise InfeasibleError(
            f"etp {etp} x ep {ep} does not divide tp x cp x dp, {tp} x {cp} x {dp}."
        )
    if pp > 1 and order[-1] != "pp" and expert_replicas != dp:
        raise InfeasibleError(
            f"the order {'-'.join(order)} needs as many expert replicas as dp: "
            f"{expert_replicas}, not {dp}."
        )
    expert = dict(zip(axes, (etp, 1, expert_replicas, pp, ep), strict=True))
    return groups | {name: grid_groups(expert, order, own) for name, own in EXPERT_GROUPS.items()}


def coordinates(groups: Mapping[str, Groups], axis: str) -> NDArray[np.int64]:
    """The place of every rank inside its group of one axis, shape [ranks]."""
    table = groups[axis]
    places = np.empty(table.size, dtype=np.int64)
    places[table.ravel()] = np.tile(np.arange(table.shape[1]), table.shape[0])
    return places


# Mappings that run through the leaves in a regular order: what launchers can do without a rank file.


def regular_orders(problem: MappingProblem) -> Iterator[IntArray]:
    """Assignments that run through the leaves, pod by pod, with g stages of a replica next to each other.

    g = 1 is Megatron's default order, g = stages its `tp-cp-ep-pp-dp`. Replicas go in whole groups of expert
    and context slots.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    by_pod = np.argsort(problem.pod_of, kind="stable")
    free = np.array(problem.leaf_slots)[by_pod]
    leaves = np.repeat(by_pod, free)[: problem.needed]
    for together in range(1, problem.stages + 1):
        if problem.stages % together == 0:
            shape = (problem.stages // together, problem.slots // size, together, size)
            turned = leaves.reshape(shape).transpose(0, 2, 1, 3)
            yield turned.reshape(problem.stages, problem.slots)
