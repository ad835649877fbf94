"""What a plan's communication hides beside its compute, axis by axis."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from meshwright.costmodel.constants.stacks import stack_constants
from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.memory.states import rank_parameters
from meshwright.costmodel.ratios import overlap_ratio
from meshwright.errors import InfeasibleError
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.runs.predicted import Predicted, layout_from_document

COMPUTE_PARTS = ("gemm", "attention", "memory_bound", "head", "recompute", "optimizer")
"""Parts of the breakdown in which a GPU computes."""
EXPOSED_PARTS = {
    "tp": ("tp_comm",),
    "cp": ("cp_comm",),
    "ep": ("ep_comm",),
    "dp": ("dp_comm",),
    "pp": ("pipeline_p2p",),
}
"""Parts of the breakdown in which nothing hides an axis' communication."""


def plan_overlap(plan: Plan) -> dict[str, Any]:
    """R = T_comm / T_comp of every axis that sends, and how much of it runs beside compute.

    T_comm is the time that a GPU's share of the links carries the axis' bytes, over all levels; T_comp what
    the mean GPU computes in a step; hidden is 1 less exposed over T_comm, at least 0: start-ups and waiting
    for the slowest member are exposed without keeping a link busy.

    Parameters
    ----------
    plan
        A finished plan.

    Returns
    -------
    dict
        `compute_s`; under `axes` by axis `communication_s`, which a step would wait for were nothing done at
        once (for context parallelism: with a single buffer), `exposed_s`, `overlap_ratio` and `hidden_share`;
        `gradient_buckets`, None where they are not of a set size.

    Raises
    ------
    InfeasibleError
        Where the plan has no layout.
    """
    predicted = plan.predicted
    if predicted is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status}): nothing is sent")
    compute_s = sum(predicted.breakdown_s.get(name, 0.0) for name in COMPUTE_PARTS)
    busy_s = _busy_by_axis(predicted)
    return {
        "compute_s": compute_s,
        "axes": {axis: _axis_row(predicted, axis, busy_s[axis], compute_s) for axis in busy_s},
        "gradient_buckets": _gradient_buckets(plan),
    }


def _gradient_buckets(plan: Plan) -> dict[str, Any] | None:
    """Size and number of the collectives that reduce a rank's gradients, and who chose the size."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    stack = stack_constants(workload)
    parameters = float(np.asarray(bucket_parameters(workload, stack, layout)))
    if not parameters or not workload.overlap.dp:
        return None
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    most = max(float(np.max(part)) for part in rank_parameters(workload.model, layout, stages))
    return {
        "bucket_mb": stack.gradients_mb(min(parameters, most)),
        "count": ceil(most / parameters),
        "chosen_by": "framework" if workload.bucket_mb is None else "plan",
    }


def _axis_row(
    predicted: Predicted, axis: str, communication_s: float, compute_s: float
) -> dict[str, float]:
    parts = EXPOSED_PARTS.get(axis, ())
    exposed_s = sum(predicted.breakdown_s.get(name, 0.0) for name in parts)
    return {
        "communication_s": communication_s,
        "exposed_s": exposed_s,
        "overlap_ratio": float(overlap_ratio(communication_s, compute_s)),
        "hidden_share": max(0.0, 1.0 - exposed_s / communication_s),
    }


def _busy_by_axis(predicted: Predicted) -> dict[str, float]:
    """Seconds that a GPU's share of the links carries each axis, summed over the levels."""
    busy_s: dict[str, float] = {}
    for level in predicted.level_traffic:
        for axis, sent_bytes in level.by_axis.items():
            share = sent_bytes / level.bytes_per_step
            busy_s[axis] = busy_s.get(axis, 0.0) + level.mean_s * share
    return {axis: seconds for axis, seconds in sorted(busy_s.items()) if seconds > 0}
