"""The nodes of an allocation as slots on leaves and pods, and what one GPU has across them."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, lcm, prod
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import full_levels, node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import (
    Uplink,
    first_outside_a_leaf,
    leaves_are_domains,
    level_rates,
    link_gb_per_s,
    uplinks,
)
from meshwright.costmodel.collectives import halves_go_by_tree
from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layout import AXES, EXPERT_AXES, STAGE_AXES, Ints, Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import optimizer_shards
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.volumes import (
    GroupTraffic,
    gradients_all_reduced,
    group_traffic,
    tree_over_ring,
)
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT, MEGATRON_TP_PP_DP
from meshwright.planner.mapping.problem import IntArray, Loads, MappingProblem, Traffic, loads_of
from meshwright.planner.solvers.clock import is_over, remaining_s

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

    Nodes of a list without leaves stand under the levels of the cluster, in turn. Raises InfeasibleError
    where fewer than `wanted` slots are free.

    Parameters
    ----------
    cluster
        Listed or not; free GPUs of its nodes, or all of them.
    slot_gpus
        GPUs of a slot, at least 1: a node's at most, or a number of whole nodes.
    wanted
        Slots that must be free at least.
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
    """So many slots of a leaf as one, in turn; leaves with fewer of them drop out.

    Parameters
    ----------
    slots
        As they lie one by one.
    count
        Slots that become one, at least 1; what is left over of a leaf is not used.
    """
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
    """Megatron's default order, or that of `--use-tp-pp-dp-mapping`.

    Parameters
    ----------
    pipeline_before_data
        Whether the framework is run with `--use-tp-pp-dp-mapping`.

    Returns
    -------
    tuple of str
        Axes, the fastest first.
    """
    return MEGATRON_TP_PP_DP if pipeline_before_data else MEGATRON_DEFAULT


def grid_groups(sizes: Mapping[str, int], order: Sequence[str], axes: Sequence[str]) -> Groups:
    """The groups that run along `axes` of a grid, as Megatron's generate_masked_orthogonal_rank_groups lists
    them: ranks count in `order`, its first axis fastest, both among the groups and inside of one.

    Parameters
    ----------
    sizes
        Degree of each axis; the grid has as many ranks as their product.
    order
        All axes of the grid, the fastest first.
    axes
        Along which groups run; one that the order lacks is an error.

    Returns
    -------
    array of int, shape [groups, members]
        Ranks, rising inside of each group.
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

    Parameters
    ----------
    layout
        Degrees of one layout.
    order
        tp, cp, ep, dp and pp, the fastest first.
    experts
        Whether the model has experts, whose groups come with the dense ones then.

    Returns
    -------
    dict of str to array of int
        By axes, joined by dashes ('dp-cp'): ranks, shape [groups, members].
    """
    tp = int(layout.tp)
    cp = int(layout.cp)
    dp = int(layout.dp)
    pp = int(layout.pp)
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
    """The place of every rank inside its group of one axis, shape [ranks].

    Parameters
    ----------
    groups
        As `process_groups` gives them.
    axis
        A key of these groups; every rank is in exactly one group of it.
    """
    table = groups[axis]
    places = np.empty(table.size, dtype=np.int64)
    places[table.ravel()] = np.tile(np.arange(table.shape[1]), table.shape[0])
    return places


# Mappings that run through the leaves in a regular order: what launchers can do without a rank file.


def regular_orders(problem: MappingProblem) -> Iterator[IntArray]:
    """Assignments that run through the leaves, pod by pod, with g stages of a replica next to each other.

    g = 1 is Megatron's default order, g = stages its `tp-cp-ep-pp-dp`. Replicas go in whole groups of expert
    and context slots.

    Parameters
    ----------
    problem
        With as many free slots as are needed, or more.

    Yields
    ------
    array of int, shape [stages, slots]
        The leaf of every slot, for each g that divides the stages.
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


# From a layout and a cluster to the mapping problem, and from its solution back to a GPU for every rank.


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How many ways each axis is spread inside a slot; the product is the slot's GPUs."""

    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def gpus(self) -> int:
        """GPUs of a slot."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A mapping problem and what its slots are."""

    layout: Layout
    inside: Inside
    slots: Slots
    problem: MappingProblem
    traffic: GroupTraffic
    stages_apart: bool = False
    """Whether each pipeline stage is priced by where its own expert groups lie."""


def inside_slot(layout: Layout, slot_gpus: int) -> Inside:
    """Axes nested in Megatron's default order, tensor groups first, as far as a slot holds them.

    Raises InfeasibleError where it does not hold tensor groups whole, of experts too: what reaches how far is
    asked of the other axes alone; and where it cuts an expert group that does not fill whole slots.

    Parameters
    ----------
    layout
        Degrees of one layout.
    slot_gpus
        GPUs of a slot, at least 1.
    """
    rest = slot_gpus
    degrees: dict[str, int] = {}
    for axis in AXES:
        degrees[axis] = gcd(int(getattr(layout, axis)), rest)
        rest //= degrees[axis]
    inside = Inside(**degrees)
    is_cut = inside.tp != int(layout.tp) or inside.tp * inside.cp * inside.dp % int(layout.etp)
    if rest > 1 or is_cut or not _fill_slots(layout, inside):
        raise InfeasibleError(
            f"slots of {slot_gpus} GPUs cannot hold tp {int(layout.tp)}, etp {int(layout.etp)}, ep "
            f"{int(layout.ep)} and whole parts of the other axes"
        )
    return inside


def _fill_slots(layout: Layout, inside: Inside) -> bool:
    """Whether each expert group, consecutive ranks of a stage, lies in one slot or fills whole ones."""
    group, cp = int(layout.expert_group), int(layout.cp)
    is_cut = inside.cp < cp
    in_turn = inside.tp * inside.cp * (1 if is_cut else inside.dp)
    whole_slots = in_turn if inside.dp == 1 else inside.tp * cp * inside.dp
    return in_turn % group == 0 or group % whole_slots == 0


def whole_groups_in(layout: Layout, inside: Inside) -> int:
    """Shard groups of replicas that lie in each slot, experts' among them; 0 where slots cut some.

    One group counts as whole: it is what slots spread.

    Parameters
    ----------
    layout
        Degrees and number of shard groups of one layout.
    inside
        How its axes are spread inside a slot.
    """
    number = int(layout.shard_groups)
    tp, cp, dp = (int(getattr(layout, axis)) for axis in STAGE_AXES)
    if number == 1:
        return 1
    if dp % number or (tp * cp * dp) % (number * int(layout.expert_group)):
        return 0
    is_whole = inside.cp == cp and inside.dp % (dp // number) == 0
    return inside.dp // (dp // number) if is_whole else 0


def slot_sizes(cluster: ClusterSpec, layout: Layout) -> list[int]:
    """GPUs that a slot may have, largest first: a node, a part of one, or the nodes of a tensor group.

    Where expert groups do not fill the nodes of tensor groups, the nodes that both fill are one slot.

    Parameters
    ----------
    cluster
        Its nodes' GPUs count alone.
    layout
        One layout; sizes divide its GPUs and hold whole tensor groups.
    """
    per_node, world = cluster.gpus_per_node, int(layout.gpus)
    group = lcm(int(layout.tp), int(layout.etp))

    def fits(size: int) -> bool:
        if size % group or world % size:
            return False
        try:
            inside_slot(layout, size)
        except InfeasibleError:
            return False
        return True

    if group <= per_node:
        return [size for size in range(per_node, group - 1, -1) if fits(size)]
    joined = (group, lcm(group, int(layout.expert_group)))
    return [size for size in joined if size % per_node == 0 and fits(size)][:1]


def instance_of(workload: Workload, layout: Layout, stages: Stages, spares: int = 0) -> Instance:
    """The problem of placing a layout on the free nodes of the workload's cluster.

    `spares` nodes at least stay free beside it. Slots are as large as leaves enough of them. Raises
    InfeasibleError where no size does.

    Parameters
    ----------
    workload
        Run on the layout's GPUs.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage], by which boundaries are sent.
    spares
        Nodes that stay free, at least 0.
    """
    cluster, world = workload.cluster, int(layout.gpus)
    per_node = cluster.gpus_per_node
    failure = f"no part of a node of {per_node} GPUs holds whole groups of tp {int(layout.tp)}"
    for size in slot_sizes(cluster, layout):
        reserve = spares * (per_node // size) if size <= per_node else -(-spares * per_node // size)
        try:
            slots = slots_of(cluster, slot_gpus=size, wanted=world // size + reserve)
        except InfeasibleError as error:
            failure = str(error)
            continue
        return instance_on(workload, layout, stages, slots)
    raise InfeasibleError(failure + (f" with {spares} spare nodes" if spares else ""))


def instance_on(workload: Workload, layout: Layout, stages: Stages, slots: Slots) -> Instance:
    """The problem of placing a layout on some slots.

    Where several shard groups do not lie in slots each, rings count as if all replicas sharded together.
    All-reduces of two slots go by tree; those of more count as rings, also where these lie on two nodes.

    Parameters
    ----------
    workload
        Run on any number of GPUs; the layout's count.
    layout
        One layout, whose tensor groups slots hold whole.
    stages
        Layers of each [pipeline rank][virtual stage].
    slots
        As many as the layout needs, or more.

    Raises
    ------
    InfeasibleError
        Where a slot cuts tensor groups.
    """
    inside = inside_slot(layout, slots.gpus)
    whole = whole_groups_in(layout, inside)
    per_stage = inside.tp * inside.cp * inside.dp
    expert_slots = max(1, int(layout.expert_group) // per_stage)
    context_slots = int(layout.cp) // inside.cp
    on = replace(workload, gpus=int(layout.gpus))
    counted = layout if whole else replace(layout, shard_groups=1)
    placement = nested_placement(on.cluster, counted)
    context = make_context(on, counted, placement)
    moved = group_traffic(context, stages, expert_slots)
    groups = inside.tp * inside.pp
    dense, experts = moved.gradients, moved.expert_gradients
    members, summed = optimizer_shards(counted), gradients_all_reduced(context)
    if (number := int(counted.shard_groups)) > 1:
        # Each rank of a group has a ring to those with its shard in the others.
        of_dense, of_experts = (int(size) for size in members)
        dense = moved.gradients_between * of_dense
        experts = moved.expert_gradients_between * of_experts
        members, summed = (number, number), 1.0
    per_group = int(layout.cp) * int(layout.dp) // (inside.cp * inside.dp)
    if slots.gpus <= int(full_levels(on.cluster).blocks[0]):
        of_dense, of_experts = (int(size) for size in members)
        if per_group == 2 and halves_go_by_tree(of_dense, context.links):
            dense *= tree_over_ring(of_dense, summed)
        if per_group == 2 * expert_slots and halves_go_by_tree(of_experts, context.links):
            experts *= tree_over_ring(of_experts, summed)
    traffic = Traffic(
        ring_bytes=dense * groups,
        hop_bytes=moved.boundary * per_stage,
        wrap_bytes=moved.wrap * per_stage,
        context_slots=context_slots,
        context_bytes=moved.context * groups * inside.dp if context_slots > 1 else 0.0,
        expert_slots=expert_slots,
        expert_bytes=moved.experts * slots.gpus if expert_slots > 1 else 0.0,
        expert_ring_bytes=experts * min(int(layout.expert_group), per_stage) * inside.pp,
    )
    per_leaf = [len(leaf) for leaf in slots.places]
    problem = MappingProblem(
        stages=int(layout.pp) // inside.pp,
        slots=per_group,
        traffic=traffic,
        leaf_slots=tuple(per_leaf),
        leaf_s_per_byte=tuple(1e-9 / link for link in slots.leaf_links_gb_per_s),
        leaf_pod=slots.leaf_pod,
        pod_s_per_byte=tuple(1e-9 / link for link in slots.pod_links_gb_per_s),
        host_leaves=slots.host_leaves,
    )
    return Instance(layout=layout, inside=inside, slots=slots, problem=problem, traffic=moved)


def slot_choice(instance: Instance, assignment: IntArray) -> IntArray:
    """Which slot of its leaf each cell of the grid takes, in turn; shape [stages, slots].

    Parameters
    ----------
    instance
        Whose slots they are.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    choice = np.zeros_like(assignment)
    taken = [0] * len(instance.slots.places)
    for stage, row in enumerate(assignment.tolist()):
        for slot, leaf in enumerate(row):
            choice[stage, slot] = taken[leaf]
            taken[leaf] += 1
    return choice


def ranks_of(instance: Instance, assignment: IntArray) -> list[Place]:
    """(node, local GPU) of every rank, ranks in Megatron's default order (tp, cp, dp, pp from the inside).

    Parameters
    ----------
    instance
        Whose slots they are.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    layout, inside = instance.layout, instance.inside
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in AXES)
    choice = slot_choice(instance, assignment)
    ranks: list[Place] = []
    for p, d, c in product(range(pp), range(dp), range(cp)):
        stage = p // inside.pp
        column = c // inside.cp + cp // inside.cp * (d // inside.dp)
        leaf = instance.slots.places[int(assignment[stage, column])]
        slot = leaf[int(choice[stage, column])]
        group = c % inside.cp + inside.cp * (d % inside.dp + inside.dp * (p % inside.pp))
        ranks += slot[tp * group : tp * (group + 1)]
    return ranks


def assignment_of_ranks(instance: Instance, ranks: Sequence[Place]) -> IntArray:
    """The leaf of every slot under a mapping. Raises InfeasibleError where a slot's ranks are on several.

    Parameters
    ----------
    instance
        Whose slots they are.
    ranks
        (node, local GPU) of every rank, in Megatron's default order.

    Returns
    -------
    array of int, shape [stages, slots]
        As `ranks_of` takes it.
    """
    leaf_of: dict[Place, int] = {}
    for leaf, slots in enumerate(instance.slots.places):
        for slot in slots:
            leaf_of |= dict.fromkeys(slot, leaf)
    layout, inside, problem = instance.layout, instance.inside, instance.problem
    tp, cp, dp = (int(getattr(layout, axis)) for axis in STAGE_AXES)
    assignment = np.full((problem.stages, problem.slots), -1, dtype=np.int64)
    for rank, place in enumerate(ranks):
        t_out = rank // tp
        c = t_out % cp
        d = t_out // cp % dp
        p = t_out // (cp * dp)
        column = c // inside.cp + cp // inside.cp * (d // inside.dp)
        stage = p // inside.pp
        leaf = leaf_of.get((place[0], place[1]), -1)
        if leaf < 0 or assignment[stage, column] not in (-1, leaf):
            raise InfeasibleError(
                f"rank {rank} is not on a free GPU of the leaf that its slot is on"
            )
        assignment[stage, column] = leaf
    return assignment


def idle_nodes(cluster: ClusterSpec, ranks: list[Place]) -> list[int]:
    """Nodes with free GPUs of which none is used.

    Parameters
    ----------
    cluster
        Listed or not.
    ranks
        (node, local GPU) of every rank.

    Returns
    -------
    list of int
        Numbers of nodes from 0, rising.
    """
    used = {node for node, _ in ranks}
    if cluster.nodes:
        free = [number for number, node in enumerate(cluster.nodes) if node.free_gpus != 0]
    else:
        free = list(range(-(-cluster.gpus // cluster.gpus_per_node)))
    return [node for node in free if node not in used]


# From slots counted per leaf and stage to a leaf for every slot, groups and neighbours kept together.


BlockCounts = tuple[tuple[int, int], ...]
"""(block, slots in it), by block."""


def assignment_of(problem: MappingProblem, counts: IntArray) -> IntArray:
    """A leaf for slot j of stage s, shape [stages, slots], from counts [leaves, stages].

    The slots of a stage are cut into groups of expert or context slots, each as far as possible in one
    leaf, else one pod. Stage by stage, groups are then matched with those of the stage before, leaf by
    leaf first, pod by pod next, so that as few neighbours as the counts allow lie apart.

    Parameters
    ----------
    problem
        Says which slots follow each other in a group.
    counts
        Slots of each stage in each leaf, shape [leaves, stages]; each stage's add up to its slots.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    if size == 1:
        return _single_slots(problem, counts)
    before = np.array(_groups(problem, counts[:, 0], size), dtype=np.int64).ravel()
    rows = [before]
    for stage in range(1, problem.stages):
        groups = _groups(problem, counts[:, stage], size)
        before = _matched(problem, before.reshape(-1, size), groups)
        rows.append(before)
    return np.stack(rows)


def _single_slots(problem: MappingProblem, counts: IntArray) -> IntArray:
    """Slot by slot: what can stay stays, so that few neighbours lie apart.

    First come slots that are where they were in the first stage: virtual stages then wrap round in one leaf.
    """
    origin = np.repeat(np.arange(len(counts)), counts[:, 0])
    rows = [origin]
    for stage in range(1, problem.stages):
        rows.append(_next_row(problem, origin, rows[-1], counts[:, stage].copy()))
    return np.stack(rows)


def _next_row(
    problem: MappingProblem, origin: IntArray, before: IntArray, free: IntArray
) -> IntArray:
    """A leaf for every slot of the next stage; `free` are the slots of that stage in each leaf."""
    row = np.full(len(before), -1, dtype=np.int64)
    pod = problem.pod_of
    everyone = np.ones(len(before), dtype=bool)
    # (the leaf that each slot would go to, which slots would), in the order in which they are served.
    wishes = (
        (before, before == origin),
        (before, everyone),
        (origin, pod[origin] == pod[before]),
    )
    for leaves, wishing in wishes:
        for slot in np.flatnonzero(wishing & (row < 0)):
            leaf = leaves[slot]
            if free[leaf] > 0:
                row[slot] = leaf
                free[leaf] -= 1
    waiting: dict[int, list[int]] = {number: [] for number in range(problem.pods)}
    for leaf in np.flatnonzero(free).tolist():
        waiting[problem.leaf_pod[leaf]] += [leaf] * int(free[leaf])
    for slot in np.flatnonzero(row < 0):
        in_pod = waiting[int(pod[before[slot]])]
        if in_pod:
            row[slot] = in_pod.pop(0)
    row[row < 0] = [leaf for in_pod in waiting.values() for leaf in in_pod]
    return row


def _groups(problem: MappingProblem, counts: IntArray, size: int) -> list[list[int]]:
    """Groups of `size` leaves: whole ones first, then the rests, pod by pod, largest first."""
    groups: list[list[int]] = []
    rests: dict[int, list[tuple[int, int]]] = {}
    for leaf in np.flatnonzero(counts).tolist():
        whole_groups, rest = divmod(int(counts[leaf]), size)
        groups += [[leaf] * size for _ in range(whole_groups)]
        if rest:
            rests.setdefault(problem.leaf_pod[leaf], []).append((rest, leaf))
    rests_over: list[tuple[int, int]] = []
    for pod in sorted(rests):
        made, over = _packed(rests[pod], size, whole_only=True)
        groups += made
        rests_over += over
    made, _ = _packed(rests_over, size, whole_only=False)
    return groups + made


def _packed(
    rests: list[tuple[int, int]], size: int, *, whole_only: bool
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Groups from rests (slots, leaf), the largest fitting rest next; and the rests of no group."""
    waiting = sorted(rests, key=_largest_first)
    groups: list[list[int]] = []
    while sum(slots for slots, _ in waiting) >= size:
        room, group, taken = size, [], []
        for rest in list(waiting):
            slots, leaf = rest
            if slots <= room:
                waiting.remove(rest)
                taken.append(rest)
                group += [leaf] * slots
                room -= slots
        if room and whole_only and not waiting:
            return groups, taken
        if room:  # no rest fits as it is: split the smallest
            slots, leaf = waiting.pop()
            group += [leaf] * room
            if slots > room:
                waiting.append((slots - room, leaf))
                waiting.sort(key=_largest_first)
        groups.append(group)
    return groups, waiting


def _largest_first(rest: tuple[int, int]) -> tuple[int, int]:
    slots, leaf = rest
    return -slots, leaf


def _matched(problem: MappingProblem, before: IntArray, groups: list[list[int]]) -> IntArray:
    """The groups in the order of the stage before, and inside a group slot by slot."""
    number_at = [-1] * len(before)
    free = list(range(len(groups)))
    for block_of in _blocks_of_leaves(problem):
        waiting: dict[BlockCounts, list[int]] = {}
        for number in free:
            waiting.setdefault(_counted(groups[number], block_of), []).append(number)
        for place, group in enumerate(before.tolist()):
            alike = waiting.get(_counted(group, block_of))
            if number_at[place] < 0 and alike:
                number_at[place] = alike.pop(0)
        free = [number for alike in waiting.values() for number in alike]
        if block_of is not problem.leaf_pod:
            free = _closest(before, groups, number_at, free)
    free.sort()
    flat: list[int] = []
    for place, group in enumerate(before.tolist()):
        number = number_at[place] if number_at[place] >= 0 else free.pop(0)
        flat += _aligned(problem, group, groups[number])
    return np.array(flat, dtype=np.int64)


def _closest(
    before: IntArray, groups: list[list[int]], number_at: list[int], free: list[int]
) -> list[int]:
    """Gives cut groups the places where most of their slots have their neighbour; what is free then."""
    pairs = []
    for place, group in enumerate(before.tolist()):
        if number_at[place] < 0:
            for candidate in free:
                overlap = (Counter(group) & Counter(groups[candidate])).total()
                if overlap:
                    pairs.append((-overlap, place, candidate))
    unplaced = set(free)
    for _, place, candidate in sorted(pairs):
        if number_at[place] < 0 and candidate in unplaced:
            number_at[place] = candidate
            unplaced.discard(candidate)
    return sorted(unplaced)


def _blocks_of_leaves(problem: MappingProblem) -> tuple[Sequence[int], Sequence[int]]:
    """The block of every leaf: first the leaf itself, then its pod."""
    return range(len(problem.leaf_pod)), problem.leaf_pod


def _counted(group: list[int], block_of: Sequence[int]) -> BlockCounts:
    """(block, slots in it) of a group."""
    return tuple(sorted(Counter(block_of[leaf] for leaf in group).items()))


def _aligned(problem: MappingProblem, before: list[int], group: list[int]) -> list[int]:
    """The slots of a group next to those of the same leaf, then of the same pod, in the group before it."""
    aligned = [-1] * len(before)
    unplaced = list(group)
    for block_of in _blocks_of_leaves(problem):
        for place, neighbour in enumerate(before):
            if aligned[place] >= 0:
                continue
            alike = [leaf for leaf in unplaced if block_of[leaf] == block_of[neighbour]]
            if alike:
                aligned[place] = alike[0]
                unplaced.remove(alike[0])
    return [unplaced.pop(0) if leaf < 0 else leaf for leaf in aligned]


# What solving a mapping problem gives, and the best mapping on the way there.


MappingObjective = Literal["traffic", "spread"]
PROVEN = 1e-6
"""Relative difference of price and bound below which they count as equal: sums of floats."""


@dataclass(frozen=True, kw_only=True)
class MappingRound:
    """One integer programme: its columns, and what came of it."""

    columns: int
    price_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class MappingSolution:
    """An assignment with its certificate. `bound_s` holds for every assignment."""

    objective: MappingObjective
    assignment: IntArray
    loads: Loads
    hostname_loads: Loads
    bound_s: float
    rounds: tuple[MappingRound, ...]
    wall_s: float

    @property
    def price_s(self) -> float:
        """Seconds that all up-links are busy in a step."""
        return self.loads.total_s

    @property
    def hostname_s(self) -> float:
        """Seconds that all up-links are busy in hostname order."""
        return self.hostname_loads.total_s

    @property
    def gap(self) -> float:
        """Of the price."""
        return (self.price_s - self.bound_s) / self.price_s if self.price_s > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no assignment is better."""
        return self.gap <= PROVEN


class Incumbent:
    """The assignment with the least traffic so far."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self.assignment = problem.hostname_assignment()
        self.price_s = loads_of(problem, self.assignment).total_s

    def offer(self, counts: IntArray | None) -> None:
        """Takes an assignment with these counts if it is better.

        Parameters
        ----------
        counts
            Slots of each stage in each leaf, shape [leaves, stages]; None is passed over.
        """
        if counts is not None:
            self.consider(assignment_of(self._problem, counts))

    def consider(self, assignment: IntArray) -> None:
        """Takes an assignment if it is better.

        Parameters
        ----------
        assignment
            The leaf of every slot, shape [stages, slots].
        """
        price = loads_of(self._problem, assignment).total_s
        if price < self.price_s * (1 - 1e-12):
            self.assignment, self.price_s = assignment, price


class WorkLimits:
    """Where a search ends: processor seconds, so that a busy machine changes no answer but that of a command
    with a time limit.
    """

    def __init__(self, time_limit_s: float) -> None:
        now, self.limit_s = time.process_time(), time_limit_s
        self._start = time.monotonic()
        self._deadline, self._relaxed = now + time_limit_s, now + 0.4 * time_limit_s

    @property
    def left_s(self) -> float:
        """Processor seconds left."""
        return min(self._deadline - time.process_time(), remaining_s())

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds since the beginning."""
        return time.monotonic() - self._start

    def relaxed(self) -> bool:
        """Whether relaxations should end: at 40 % of the limit."""
        return time.process_time() > self._relaxed or is_over()
