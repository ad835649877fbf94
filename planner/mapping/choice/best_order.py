"""What a layout takes under the regular orders of its ranks: what launchers can do without a search."""

from __future__ import annotations

import contextlib

import numpy as np

from meshwright.costmodel.estimate import Stages, estimate_layout
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.mapping.choice.counted import counted_mappings, takes_parts_of_nodes
from meshwright.planner.mapping.choice.effective import placement_of
from meshwright.planner.mapping.choice.whole_groups import choice_instance
from meshwright.planner.mapping.instance import Instance
from meshwright.planner.mapping.regular_orders import regular_orders


def seconds_in_best_order(workload: Workload, layout: Layout, stages: Stages) -> float | None:
    """The step under the best of the regular orders; None where the layout's groups do not fit."""
    instance: Instance | None = None
    with contextlib.suppress(InfeasibleError):
        instance = choice_instance(workload, layout, stages)
    if takes_parts_of_nodes(workload.cluster, layout, lambda _: instance):
        experts = workload.model.moe is not None
        counted = counted_mappings(workload.cluster, layout, experts=experts)
        if counted is None or not counted.gpus:
            return None
        priced = estimate_layout(workload, layout, counted.placement, stages)
        return float(np.min(priced.step_time_s))
    if instance is None:
        return None
    orders = [instance.problem.hostname_assignment(), *regular_orders(instance.problem)]
    placed = (placement_of(workload, instance, order) for order in orders)
    return min(
        float(np.asarray(estimate_layout(workload, layout, placement, stages).step_time_s))
        for placement in placed
    )
