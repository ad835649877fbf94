"""The placement of every layer: groups or not, one window or several, in one call.

A layer has experts e of load w_e, and M GPUs of m slots. A placement gives every expert c_e >= 1 replicas,
sum c_e = m M, on c_e different GPUs; a replica carries w_e / c_e. With load(g) the sum over what GPU g holds,

    balance = max_g load(g) / (sum_e w_e / M)

is minimised; over several windows of loads, the worst window counts. No placement is below the mean, nor
below the largest replica of the counts that make it smallest:

    balance >= max(1, min_c max_e (w_e / c_e) M / sum_e w_e)

which is the first bound; sharper ones stand in `bound`, `count_bound` and `exact`.

>>> import numpy as np
>>> loads = np.array([[[4.0, 2.0, 1.0, 1.0]]])
>>> shape = SlotShape(slots=6, gpus=2, nodes=1)
>>> solved = place_layers(loads, shape, PlacementLimits(), PlacementEffort())
>>> solved.slots.tolist(), float(solved.value[0])
([[[0, 1, 2], [0, 1, 3]]], 1.0)
"""

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
    """The placement with the least worst balance over the windows, and a bound that none is below.

    Parameters
    ----------
    loads
        Tokens of each expert, [windows, layers, experts], at least 0, in any unit.
    shape
        Slots, GPUs and nodes; slots divide evenly over GPUs, GPUs over nodes.
    limits
        Groups that stay on a node, or replicas that are spread.
    effort
        Gap and work.

    Returns
    -------
    Solved
        Slots [layers, gpus, slots of a GPU], in rising order on a GPU; balance and bound [layers].

    Raises
    ------
    InputError
        Where loads or counts cannot be used.
    InfeasibleError
        Where no placement keeps to the limits.
    """
    check_loads(loads, "loads")
    check_shape(loads.shape[2], shape, limits)
    relative = by_layer(loads, shape.gpus)
    with Crew(effort.workers) as crew:
        effort = replace(effort, crew=crew)
        if limits.groups > 1 and shape.nodes > 1:
            solved = solve_grouped(relative, shape, limits, effort)
        else:
            rows = Rows(
                loads=relative,
                needed=np.zeros(len(relative)),
                slots=shape.slots,
                gpus=shape.gpus,
                spread_nodes=shape.nodes if limits.spread else 1,
            )
            solved = solve_rows(rows, effort)
    return replace(solved, slots=np.sort(solved.slots, axis=2))
