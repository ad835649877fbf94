"""The placement of every layer: groups or not, one window or several, in one call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.planner.experts.balance.crew import Crew
from meshwright.planner.experts.balance.groups import solve_grouped
from meshwright.planner.experts.balance.rows import Rows, Solved, by_layer
from meshwright.planner.experts.balance.solve import PlacementEffort, solve_rows
from meshwright.planner.experts.problem import (
    Loads,
    PlacementLimits,
    SlotShape,
    check_loads,
    check_shape,
)


def place_layers(
    loads: Loads, shape: SlotShape, limits: PlacementLimits, effort: PlacementEffort
) -> Solved:
    """The placement with the least worst balance over the windows, for loads [windows, layers, experts].

    Slots come back as [layers, gpus, slots of a GPU], in rising order on a GPU. Raises InputError and
    InfeasibleError.
    """
    check_loads(loads, "loads")
    check_shape(loads.shape[2], shape, limits)
    with Crew(effort.workers) as crew:
        effort = replace(effort, crew=crew)
        if limits.groups > 1 and shape.nodes > 1:
            solved = solve_grouped(by_layer(loads, shape.gpus), shape, limits, effort)
        else:
            rows = Rows(
                loads=by_layer(loads, shape.gpus),
                needed=np.zeros(loads.shape[1]),
                slots=shape.slots,
                gpus=shape.gpus,
                spread_nodes=shape.nodes if limits.spread else 1,
            )
            solved = solve_rows(rows, effort)
    return Solved(slots=np.sort(solved.slots, axis=2), value=solved.value, bound=solved.bound)
