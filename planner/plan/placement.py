"""Where the groups of a plan document lie, as the cost model reads it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import Matrix, Stages
from meshwright.planner.bounds.matrices import Matrices
from meshwright.planner.mapping.choice.counted import counted_placement
from meshwright.planner.mapping.slots import Place
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.prediction import planned_workload


def workload_of_plan(plan: Plan) -> Workload:
    """What the cost model prices of a plan, run as it says, on all GPUs that were asked for."""
    return planned_workload(plan.inputs, plan.execution)


def matrix_arrays(matrix: Matrix) -> Matrices:
    """A parallelism matrix as the cost model reads it."""
    return {axis: np.asarray(row, dtype=np.int64) for axis, row in matrix.items()}


def group_placement(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    matrix: Matrix,
    ranks: Sequence[Place] | None,
) -> Placement:
    """Where groups lie: by the matrix, or rank by rank where there is none."""
    if matrix or ranks is None:
        return placement_on(workload.cluster, layout, matrix_arrays(matrix))
    return counted_placement(workload.cluster, layout, ranks)


def plan_placement(workload: Workload, layout: Layout, plan: Plan) -> tuple[Stages, Placement]:
    """The stages of a plan that has a layout, and where its groups lie on a workload's cluster."""
    assert plan.layout is not None
    assert plan.mapping is not None
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    matrix = {axis: tuple(row) for axis, row in plan.mapping.matrix.items()}
    return stages, group_placement(workload, layout, stages, matrix, plan.mapping.ranks)
