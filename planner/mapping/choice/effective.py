"""What an irregular mapping means to the cost model: members of groups inside the blocks of each level.

The cost model prices a group by how many of its members share the up-links of a block. Under an irregular
mapping that differs from block to block; the worst one paces a collective, so it is the one that counts:
GPUs in use in the block over the groups that it cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import FabricLevels, fabric_levels, full_levels
from meshwright.costmodel.layout import Ints, Placement
from meshwright.costmodel.workload import Workload
from meshwright.planner.mapping.instance import Instance
from meshwright.planner.mapping.problem import IntArray, cut_groups, held_by

NAMES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Members of a group of each axis inside the block of a level that paces it: all that its price knows of
    a mapping.
    """

    dp_cp: Ints
    cp: Ints
    ep: Ints
    edp: Ints
    together: bool | NDArray[np.bool_]
    """Whether every pipeline lies in one block."""


def placement_of(workload: Workload, instance: Instance, assignment: IntArray) -> Placement:
    """The members inside a block of every level, rounded down; arrays [levels]."""
    return placement_with(workload, instance, *reaches_of(instance, assignment))


def reaches_of(instance: Instance, assignment: IntArray) -> tuple[Reach, Reach]:
    """In leaves and in pods, with the GPUs that are in use there: idle ones lend their adapters to nobody."""
    problem = instance.problem
    leaf_slots = np.bincount(assignment.ravel(), minlength=len(problem.leaf_slots))
    leaf_gpus = leaf_slots.astype(np.int64) * instance.slots.gpus
    pod_gpus = np.zeros(problem.pods, dtype=np.int64)
    np.add.at(pod_gpus, problem.pod_of, leaf_gpus)
    return (
        _reach(instance, assignment, leaf_gpus),
        _reach(instance, problem.pod_of[assignment], pod_gpus),
    )


def free_gpus(instance: Instance) -> tuple[IntArray, IntArray]:
    """Free GPUs, in whole slots, of each leaf and of each pod."""
    problem = instance.problem
    leaves = np.asarray(problem.leaf_slots, dtype=np.int64) * instance.slots.gpus
    pods = np.zeros(problem.pods, dtype=np.int64)
    np.add.at(pods, problem.pod_of, leaves)
    return leaves, pods


def placement_with(workload: Workload, instance: Instance, leaf: Reach, pod: Reach) -> Placement:
    """The placement of any assignment that reaches so far in leaves and pods; arrays [..., levels]."""
    levels = fabric_levels(workload.cluster, workload.gpus)
    sizes = _degrees(instance)
    at_leaf, at_pod = _depths(workload, levels)
    at_full_size = full_levels(workload.cluster)
    full = dict(zip(at_full_size.names, at_full_size.blocks.tolist(), strict=True))
    members: dict[str, list[Ints]] = {name: [] for name in NAMES}
    for depth in range(len(levels.blocks)):
        in_block: Mapping[str, Ints] = sizes
        if depth < len(levels.blocks) - 1:
            if depth == at_leaf:
                in_block = _members(instance, sizes, leaf)
            elif depth == at_pod:
                in_block = _members(instance, sizes, pod)
            else:
                in_block = _within(instance, full[levels.names[depth]])
        for name, inside in members.items():
            below = inside[-1] if inside else 1
            inside.append(np.maximum(below, np.minimum(in_block[name], sizes[name])))
    return Placement(
        **{
            name: np.stack(np.broadcast_arrays(*inside, leaf.dp_cp, pod.dp_cp)[:-2], axis=-1)
            for name, inside in members.items()
        }
    )


def _members(instance: Instance, sizes: dict[str, int], reach: Reach) -> dict[str, Ints]:
    return {
        "tp": sizes["tp"],
        "cp": reach.cp,
        "dp": np.maximum(1, reach.dp_cp // reach.cp),
        "dp_cp": reach.dp_cp,
        "pp": np.where(reach.together, sizes["pp"], instance.inside.pp),
        "etp": sizes["etp"],
        "ep": reach.ep,
        "edp": reach.edp,
    }


def _degrees(instance: Instance) -> dict[str, int]:
    layout = instance.layout
    degrees = {
        name: int(getattr(layout, name)) for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
    }
    return degrees | {"dp_cp": degrees["dp"] * degrees["cp"]}


def levels_seen(workload: Workload) -> tuple[bool, bool]:
    """Whether the price of a layout on these GPUs sees in which leaf, and in which pod, a slot is."""
    levels = fabric_levels(workload.cluster, workload.gpus)
    leaf, pod = _depths(workload, levels)
    last = len(levels.blocks) - 1
    return 0 <= leaf < last, 0 <= pod < last


def _depths(workload: Workload, levels: FabricLevels) -> tuple[int, int]:
    """The levels whose blocks are leaves and pods; -1 where an allocation has no such level."""
    full = full_levels(workload.cluster)
    outside = [
        name for name, block in zip(full.names, full.blocks, strict=True)
        if block > workload.cluster.gpus_per_node
    ]  # fmt: skip
    depths = [levels.names.index(name) if name in levels.names else -1 for name in outside]
    return (*depths, -1, -1)[0], (*depths, -1, -1)[1]


def _within(instance: Instance, block: int) -> dict[str, int]:
    """Inside a slot the axes nest in Megatron's order."""
    inside, stride = instance.inside, 1
    degrees: dict[str, int] = {}
    for axis in ("tp", "cp", "dp", "pp"):
        degree = getattr(inside, axis)
        ranks = gcd(block, stride * degree)
        degrees[axis] = ranks // stride if ranks % stride == 0 else 1
        degrees[axis] = degree if block >= stride * degree else max(degrees[axis], 1)
        stride *= degree
    layout, dense = instance.layout, degrees["tp"] * degrees["cp"] * degrees["dp"]
    etp = gcd(int(layout.etp), dense)
    expert = gcd(int(layout.etp) * int(layout.ep), dense)
    return degrees | {
        "etp": etp,
        "ep": max(expert // etp, 1),
        "edp": max(dense // expert, 1),
        "dp_cp": degrees["dp"] * degrees["cp"],
    }


def rings_per_slot(instance: Instance) -> tuple[int, int, int]:
    """Groups that one cut of slots cuts at once: dense rings of a stage, context groups, expert rings."""
    inside, layout = instance.inside, instance.layout
    rings = inside.tp * inside.pp
    experts = min(int(layout.ep) * int(layout.etp), inside.tp * inside.cp * inside.dp)
    return rings, rings * inside.dp, experts * inside.pp


def _reach(instance: Instance, where: IntArray, free: IntArray) -> Reach:
    """For the block of every slot and the GPUs of blocks that count."""
    traffic, layout, blocks = instance.problem.traffic, instance.layout, len(free)
    sizes, stages = _degrees(instance), len(where)
    dense, context, expert = rings_per_slot(instance)

    def worst(groups: IntArray, per_group: int, degree: int) -> int:
        cut = cut_groups(groups, blocks) * per_group
        if not cut.any():
            return degree
        return max(1, min(int(np.min(free[cut > 0] // cut[cut > 0])), degree - 1))

    by_slot = where.reshape(stages, -1, traffic.expert_slots)
    edp_groups = by_slot.transpose(0, 2, 1).reshape(-1, by_slot.shape[1])
    return Reach(
        dp_cp=worst(where, dense, sizes["dp_cp"]),
        cp=worst(where.reshape(-1, traffic.context_slots), context, sizes["cp"]),
        ep=_expert_members(by_slot, blocks, int(layout.ep)),
        edp=worst(edp_groups, expert, sizes["edp"]),
        together=stages == 1 or not bool(np.any(where[:-1] != where[1:])),
    )


def _expert_members(by_slot: IntArray, blocks: int, degree: int) -> int:
    """As many as leave the share of an all-to-all outside that the worst block sends out, rounded down."""
    size = by_slot.shape[2]
    if size == 1:
        return degree
    members = held_by(by_slot.reshape(-1, size), blocks)
    crossing = np.sum(members * (size - members), axis=0)
    if not crossing.any():
        return degree
    everything = size * members.sum(axis=0)
    used = everything > 0
    inside = np.min(degree * (everything - crossing)[used] // everything[used])
    return max(1, min(int(inside), degree - 1))
