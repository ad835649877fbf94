"""The one table of what is sent across the levels of the fabric, added up rank by rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cluster_specs.places import Place
from meshwright.costmodel.estimate import Estimate, Stages
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.traffic.level_traffic import LevelBytes
from meshwright.costmodel.workload import Workload
from meshwright.planner.mapping.crossing.cuts import MappingUse, mapping_use
from meshwright.planner.mapping.crossing.flows import by_axis


def traffic_of_ranks(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    *,
    placement: Placement,
    priced: Estimate,
    places: Sequence[Place],
) -> list[LevelBytes]:
    """`level_table` of a layout on the GPUs `places`, counted in Megatron's default order."""
    use = mapping_use(workload, layout, stages, placement=placement, priced=priced, places=places)
    return level_table(use, float(np.asarray(priced.step_time_s)))


def level_table(use: MappingUse, step_time_s: float) -> list[LevelBytes]:
    """Every level under a mapping, inside out: bytes of the mean GPU and of the one that sends most.

    Links are busy as long as that GPU's are: a ring or an all-to-all is not done before it.
    """
    table = []
    for level in use.levels:
        crossing = {axis: flow.crossing for axis, flow in level.flows.items()}
        each = sum(crossing.values(), np.zeros(len(level.positions.sub)))
        axes = by_axis(crossing)
        mean, most = sum(axes.values()), float(np.max(each))
        busy_s = max(most, mean) / level.bytes_per_s
        table.append(
            LevelBytes(
                level=level.positions.level,
                bytes_per_step=mean,
                busy_s=busy_s,
                utilisation=busy_s / step_time_s,
                most_bytes_per_step=max(most, mean),
                mean_busy_s=mean / level.bytes_per_s,
                by_axis=axes,
            )
        )
    return table
