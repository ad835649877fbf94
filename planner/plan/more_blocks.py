"""Blocks of the machine that a mapping takes beyond the fewest, and what that brings."""

from __future__ import annotations

import numpy as np

from meshwright.cluster_specs.fabric import full_levels, is_irregular
from meshwright.cluster_specs.places import allocation_of, nodes_in_turn
from meshwright.costmodel.counted_members import members_by_level, position_of_ranks
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import AXES, Placement
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.document import MoreBlocksDoc


def more_blocks(workload: Workload, best: Priced) -> MoreBlocksDoc | None:
    """The levels at which a mapping by equal parts takes more blocks than its GPUs need, with the step on
    as few; None where it takes the fewest of all, or nodes are listed.
    """
    cluster, layout, gpus = workload.cluster, best.layout, workload.gpus
    if cluster.nodes or best.ranks is not None or is_irregular(cluster):
        return None
    places = allocation_of(cluster, gpus).places
    numbers = places[:, 0] * cluster.gpus_per_node + places[:, 1]
    full = full_levels(cluster)
    sizes = dict(zip(full.names[:-1], full.blocks[:-1].tolist(), strict=True))
    if len(full.names) == 1:
        sizes = {}
    used = {name: len(np.unique(numbers // size)) for name, size in sizes.items()}
    fewest = {name: -(-gpus // size) for name, size in sizes.items()}
    more = [
        name
        for name, size in sizes.items()
        if size > cluster.gpus_per_node and used[name] > fewest[name]
    ]
    if not more:
        return None
    matrix = tuple(tuple(best.matrix[axis]) for axis in AXES)
    where = nodes_in_turn(cluster, gpus).blocks[:, position_of_ranks(matrix)]
    degrees = (int(layout.tp), int(layout.cp), int(layout.dp), int(layout.pp))
    members = members_by_level(where, degrees, int(layout.etp), int(layout.ep))
    in_turn = estimate_layout(workload, layout, Placement(**members), best.stages)
    return MoreBlocksDoc(
        used={name: used[name] for name in more},
        fewest={name: fewest[name] for name in more},
        step_time_s_on_fewest=float(np.asarray(in_turn.step_time_s)),
    )
