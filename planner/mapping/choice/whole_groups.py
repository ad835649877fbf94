"""Slots that hold whole shard groups: the mappings that are looked at where there are several of them.

A shard group is consecutive ranks of one stage. Where a slot holds whole ones, members of the data-parallel
group in a block say all: m of them are whole groups of s, so min(m, s) of a group and m // s of those with
the same shard are there (`data_parallel`), which is what counting them finds. Larger groups get slots of
several nodes of a leaf. Mappings in which a leaf or a part of a node cuts a group are not looked at.
"""

from __future__ import annotations

from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.mapping.instance import (
    Instance,
    instance_of,
    instance_on,
    whole_groups_in,
)
from meshwright.planner.mapping.slots import joined_slots


def choice_instance(workload: Workload, layout: Layout, stages: Stages) -> Instance:
    """The problem of placing a layout so that no block above a slot cuts a shard group.

    Raises InfeasibleError where the free nodes do not hold it so.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage].
    """
    plain = instance_of(workload, layout, stages)
    return with_whole_groups(workload, layout, stages, plain)


def with_whole_groups(
    workload: Workload, layout: Layout, stages: Stages, plain: Instance
) -> Instance:
    """The same from the problem with any number of shard groups, which is returned where its slots do.

    Raises InfeasibleError as `choice_instance` does.
    """
    joined = slots_of_a_group(workload, layout, plain)
    if joined is None:
        raise InfeasibleError(
            f"{int(layout.shard_groups)} shard groups of dp {int(layout.dp)} fill neither equal parts of a "
            "slot nor whole nodes"
        )
    if joined == 1:
        return plain
    slots = joined_slots(plain.slots, joined)
    wanted = int(layout.gpus) // slots.gpus
    if slots.count < wanted:
        raise InfeasibleError(
            f"leaves hold {slots.count} shard groups of {slots.gpus} GPUs whole, {wanted} are needed"
        )
    return instance_on(workload, layout, stages, slots)


def slots_of_a_group(workload: Workload, layout: Layout, plain: Instance) -> int | None:
    """Slots that are joined to one so that it holds whole shard groups, 1 where each does; None if none do.

    Those of several slots fill whole nodes with ranks that follow each other.
    """
    inside, number = plain.inside, int(layout.shard_groups)
    if whole_groups_in(layout, inside):
        return 1
    tp, cp, dp = (int(getattr(layout, axis)) for axis in ("tp", "cp", "dp"))
    replicas, rest = divmod(dp, number)
    in_turn = inside.pp == 1 and (inside.cp == cp or inside.dp == 1)
    whole_nodes = plain.slots.gpus % workload.cluster.gpus_per_node == 0
    experts = (tp * cp * replicas) % (int(layout.ep) * int(layout.etp))
    if rest or experts or not in_turn or not whole_nodes or replicas % inside.dp:
        return None
    return replicas * cp // (inside.dp * inside.cp)
