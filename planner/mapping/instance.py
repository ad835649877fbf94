"""From a layout and a cluster to the mapping problem, and from its solution back to a GPU for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.memory.states import optimizer_shards
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.traffic.group_traffic import GroupTraffic, group_traffic
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.mapping.problem import IntArray, MappingProblem, Traffic
from meshwright.planner.mapping.slots import Place, Slots, slots_of


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


def inside_slot(layout: Layout, slot_gpus: int) -> Inside:
    """Axes nested in Megatron's default order, tensor groups first, as far as a slot holds them."""
    rest = slot_gpus
    degrees: dict[str, int] = {}
    for axis in ("tp", "cp", "dp", "pp"):
        degrees[axis] = gcd(int(getattr(layout, axis)), rest)
        rest //= degrees[axis]
    if rest > 1 or degrees["tp"] != int(layout.tp):
        raise InfeasibleError(
            f"slots of {slot_gpus} GPUs cannot hold tp {int(layout.tp)} and whole parts of the other axes"
        )
    return Inside(**degrees)


def whole_groups_in(layout: Layout, inside: Inside) -> int:
    """Shard groups of replicas that lie in each slot, experts' among them; 0 where slots cut some.

    One group counts as whole: it is what slots spread.
    """
    number = int(layout.shard_groups)
    tp, cp, dp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp"))
    if number == 1:
        return 1
    if dp % number or (tp * cp * dp) % (number * int(layout.ep) * int(layout.etp)):
        return 0
    is_whole = inside.cp == cp and inside.dp % (dp // number) == 0
    return inside.dp // (dp // number) if is_whole else 0


def slot_sizes(cluster: ClusterSpec, layout: Layout) -> list[int]:
    """GPUs that a slot may have, largest first: a node, a part of one, or the nodes of a tensor group."""
    per_node, tp, world = cluster.gpus_per_node, int(layout.tp), int(layout.gpus)
    if tp > per_node:
        return [tp] if tp % per_node == 0 else []
    sizes = []
    for size in range(per_node, tp - 1, -1):
        if size % tp == 0 and world % size == 0:
            try:
                inside_slot(layout, size)
            except InfeasibleError:
                continue
            sizes.append(size)
    return sizes


def instance_of(workload: Workload, layout: Layout, stages: Stages, spares: int = 0) -> Instance:
    """The problem of placing a layout on the free nodes of the workload's cluster.

    `spares` nodes at least stay free beside it. Slots are as large as leaves enough of them. Raises
    InfeasibleError where no size does.
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
    """
    inside = inside_slot(layout, slots.gpus)
    whole = whole_groups_in(layout, inside)
    per_stage = inside.tp * inside.cp * inside.dp
    expert_slots = max(1, int(layout.ep) * int(layout.etp) // per_stage)
    context_slots = int(layout.cp) // inside.cp
    on = replace(workload, gpus=int(layout.gpus))
    counted = layout if whole else replace(layout, shard_groups=1)
    placement = nested_placement(on.cluster, counted)
    moved = group_traffic(make_context(on, counted, placement), stages, expert_slots)
    groups = inside.tp * inside.pp
    dense, experts = moved.gradients, moved.expert_gradients
    if int(counted.shard_groups) > 1:
        # Each rank of a group has a ring to those with its shard in the others.
        of_dense, of_experts = (int(size) for size in optimizer_shards(counted))
        dense, experts = (
            moved.gradients_between * of_dense,
            moved.expert_gradients_between * of_experts,
        )
    traffic = Traffic(
        ring_bytes=dense * groups,
        hop_bytes=moved.boundary * per_stage,
        wrap_bytes=moved.wrap * per_stage,
        context_slots=context_slots,
        context_bytes=moved.context * groups * inside.dp if context_slots > 1 else 0.0,
        expert_slots=expert_slots,
        expert_bytes=moved.experts * slots.gpus if expert_slots > 1 else 0.0,
        expert_ring_bytes=experts * min(int(layout.ep) * int(layout.etp), per_stage) * inside.pp,
    )
    per_leaf = [len(leaf) for leaf in slots.places]
    problem = MappingProblem(
        stages=int(layout.pp) // inside.pp,
        slots=int(layout.cp) * int(layout.dp) // (inside.cp * inside.dp),
        traffic=traffic,
        leaf_slots=tuple(per_leaf),
        leaf_s_per_byte=tuple(1e-9 / link for link in slots.leaf_links_gb_per_s),
        leaf_pod=slots.leaf_pod,
        pod_s_per_byte=tuple(1e-9 / link for link in slots.pod_links_gb_per_s),
        host_leaves=slots.host_leaves,
    )
    return Instance(layout=layout, inside=inside, slots=slots, problem=problem, traffic=moved)


def slot_choice(instance: Instance, assignment: IntArray) -> IntArray:
    """Which slot of its leaf each cell of the grid takes, in turn; shape [stages, slots]."""
    choice = np.zeros_like(assignment)
    taken = [0] * len(instance.slots.places)
    for stage, row in enumerate(assignment.tolist()):
        for slot, leaf in enumerate(row):
            choice[stage, slot] = taken[leaf]
            taken[leaf] += 1
    return choice


def ranks_of(instance: Instance, assignment: IntArray) -> list[Place]:
    """(node, local GPU) of every rank, ranks in Megatron's default order (tp, cp, dp, pp from the inside)."""
    layout, inside = instance.layout, instance.inside
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp", "pp"))
    choice = slot_choice(instance, assignment)
    ranks: list[Place] = []
    for p, d, c in product(range(pp), range(dp), range(cp)):
        stage, column = p // inside.pp, c // inside.cp + cp // inside.cp * (d // inside.dp)
        leaf = instance.slots.places[int(assignment[stage, column])]
        slot = leaf[int(choice[stage, column])]
        group = c % inside.cp + inside.cp * (d % inside.dp + inside.dp * (p % inside.pp))
        ranks += slot[tp * group : tp * (group + 1)]
    return ranks


def assignment_of_ranks(instance: Instance, ranks: Sequence[Place]) -> IntArray:
    """The leaf of every slot under a mapping. Raises InfeasibleError where a slot's ranks are on several."""
    leaf_of: dict[Place, int] = {}
    for leaf, slots in enumerate(instance.slots.places):
        for slot in slots:
            leaf_of |= dict.fromkeys(slot, leaf)
    layout, inside, problem = instance.layout, instance.inside, instance.problem
    tp, cp, dp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp"))
    assignment = np.full((problem.stages, problem.slots), -1, dtype=np.int64)
    for rank, place in enumerate(ranks):
        t_out = rank // tp
        c, d, p = t_out % cp, t_out // cp % dp, t_out // (cp * dp)
        column = c // inside.cp + cp // inside.cp * (d // inside.dp)
        stage, leaf = p // inside.pp, leaf_of.get((place[0], place[1]), -1)
        if leaf < 0 or assignment[stage, column] not in (-1, leaf):
            raise InfeasibleError(
                f"rank {rank} is not on a free GPU of the leaf that its slot is on"
            )
        assignment[stage, column] = leaf
    return assignment


def idle_nodes(cluster: ClusterSpec, ranks: list[Place]) -> list[int]:
    """Nodes with free GPUs of which none is used."""
    used = {node for node, _ in ranks}
    if cluster.nodes:
        free = [number for number, node in enumerate(cluster.nodes) if node.free_gpus != 0]
    else:
        free = list(range(-(-cluster.gpus // cluster.gpus_per_node)))
    return [node for node in free if node not in used]
