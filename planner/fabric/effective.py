"""What an irregular mapping means to the cost model: members of groups inside the blocks of each level.

The cost model prices a group by how many of its members share the up-links of a block. Under an irregular
mapping that differs from block to block; the worst one paces a collective, so it is the one that counts: free
GPUs of the block over the groups that it cuts.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from cluster_specs.fabric import FabricLevels, fabric_levels, full_levels
from costmodel.layout import Placement
from costmodel.workload import Workload
from planner.fabric.instance import Instance
from planner.fabric.problem import IntArray, cut_groups, held_by

NAMES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp")


def placement_of(workload: Workload, instance: Instance, assignment: IntArray) -> Placement:
    """The members inside a block of every level, rounded down; arrays [levels]."""
    levels = fabric_levels(workload.cluster, workload.gpus)
    sizes = _degrees(instance)
    leaf, pod = _depths(workload, levels)
    members = {name: np.ones(len(levels.blocks), dtype=np.int64) for name in NAMES}
    at_full_size = full_levels(workload.cluster)
    full = dict(zip(at_full_size.names, at_full_size.blocks.tolist(), strict=True))
    for depth in range(len(levels.blocks)):
        if depth == len(levels.blocks) - 1:
            found = sizes
        elif depth == leaf:
            found = _across(instance, assignment, len(instance.problem.leaf_slots), _free(instance))
        elif depth == pod:
            where = instance.problem.pod_of[assignment]
            pods, free = instance.problem.pods, np.zeros(instance.problem.pods)
            np.add.at(free, instance.problem.pod_of, _free(instance))
            found = _across(instance, where, pods, free)
        else:
            found = _within(instance, full[levels.names[depth]])
        for name in NAMES:
            below = members[name][depth - 1] if depth else 1
            members[name][depth] = max(below, min(found[name], sizes[name]))
    return Placement(**members)


def _degrees(instance: Instance) -> dict[str, int]:
    layout = instance.layout
    found = {name: int(getattr(layout, name)) for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
    return found | {"dp_cp": found["dp"] * found["cp"]}


def _depths(workload: Workload, levels: FabricLevels) -> tuple[int, int]:
    """The levels whose blocks are leaves and pods; those above the node, inside out."""
    outside = [k for k, block in enumerate(levels.blocks) if block > workload.cluster.gpus_per_node]
    return (*outside, -1, -1)[0], (*outside, -1, -1)[1]


def _free(instance: Instance) -> NDArray[np.float64]:
    """Free GPUs of each leaf."""
    return np.asarray(instance.problem.leaf_slots, dtype=np.float64) * instance.slots.gpus


def _within(instance: Instance, block: int) -> dict[str, int]:
    """Inside a slot the axes nest in Megatron's order."""
    inside, stride = instance.inside, 1
    found: dict[str, int] = {}
    for axis in ("tp", "cp", "dp", "pp"):
        degree = getattr(inside, axis)
        held = gcd(block, stride * degree)
        found[axis] = held // stride if held % stride == 0 else 1
        found[axis] = degree if block >= stride * degree else max(found[axis], 1)
        stride *= degree
    layout, dense = instance.layout, found["tp"] * found["cp"] * found["dp"]
    etp = gcd(int(layout.etp), found["tp"])
    expert = gcd(int(layout.etp) * int(layout.ep), dense)
    return found | {
        "etp": etp,
        "ep": max(expert // etp, 1),
        "edp": max(dense // expert, 1),
        "dp_cp": found["dp"] * found["cp"],
    }


def _across(instance: Instance, where: IntArray, blocks: int, free: NDArray[np.float64]) -> dict[str, int]:
    """Members of groups inside the worst block, for the block of every slot and the free GPUs of blocks."""
    inside, traffic, layout = instance.inside, instance.problem.traffic, instance.layout
    sizes, stages = _degrees(instance), len(where)
    rings = inside.tp * inside.pp

    def worst(groups: IntArray, per_group: int, degree: int) -> int:
        cut = cut_groups(groups, blocks) * per_group
        if not cut.any():
            return degree
        return max(1, min(int(np.min(free[cut > 0] / cut[cut > 0])), degree - 1))

    dp_cp = worst(where, rings, sizes["dp_cp"])
    cp = worst(where.reshape(-1, traffic.context_slots), rings * inside.dp, sizes["cp"])
    per_stage = inside.tp * inside.cp * inside.dp
    experts = int(layout.ep) * int(layout.etp)
    by_slot = where.reshape(stages, -1, traffic.expert_slots)
    edp_groups = by_slot.transpose(0, 2, 1).reshape(-1, by_slot.shape[1])
    edp = worst(edp_groups, min(experts, per_stage) * inside.pp, sizes["edp"])
    apart = stages > 1 and bool(np.any(where[:-1] != where[1:]) or np.any(where[0] != where[-1]))
    return {
        "tp": sizes["tp"],
        "cp": cp,
        "dp": max(1, dp_cp // cp),
        "dp_cp": dp_cp,
        "pp": inside.pp if apart else sizes["pp"],
        "etp": sizes["etp"],
        "ep": _expert_members(instance, by_slot, blocks, sizes["ep"]),
        "edp": edp,
    }


def _expert_members(instance: Instance, by_slot: IntArray, blocks: int, degree: int) -> int:
    """As many as leave the share of an all-to-all outside that the worst block sends out, rounded down."""
    size = by_slot.shape[2]
    if size == 1:
        return degree
    held = held_by(by_slot.reshape(-1, size), blocks)
    slots = np.maximum(held.sum(axis=0), 1)
    share = np.max(np.sum(held * (size - held), axis=0) / size / slots)
    if share == 0:
        return degree
    return max(1, min(int((1.0 - share) * degree), degree - 1))
