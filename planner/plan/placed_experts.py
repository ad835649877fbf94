"""The experts of a plan in its document: where they lie, and what that brings in the plan's step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.request.plan_request import PlanRequest


def placed_experts(
    request: PlanRequest, workload: Workload, best: Priced
) -> dict[str, object] | None:
    """The plan document's `expert_placement`.

    Parameters
    ----------
    request
        With the measured loads that experts were placed by.
    workload
        What the plan is priced with.
    best
        The plan.

    Returns
    -------
    dict or None
        The placement, and under `step_time_s` the plan's step with experts in their own order (`in_order`),
        placed by their loads alone (`by_load`), and as placed (`as_placed`): with a token trace the third is
        less than the second by what affinity brings, tokens finding their experts in fewer blocks of GPUs.
        The first is the plan's own step, which its launch runs; the third where a placement is allowed.
        None where nothing is placed.
    """
    loads, ep = request.expert_loads, int(best.layout.ep)
    document = None if loads is None else loads.document(ep)
    if loads is None or document is None:
        return None
    steps: dict[str, float] = {}
    for name, measured in {"as_placed": loads.as_placed(ep), **loads.other_orders(ep)}.items():
        elsewhere = replace(
            workload,
            expert_imbalance_by_ep=((ep, measured.imbalance),),
            expert_copies_by_ep=tuple((ep, *copies) for copies in measured.copies),
        )
        steps[name] = _step_s(elsewhere, best)
    return {**document, "step_time_s": steps}


def _step_s(workload: Workload, best: Priced) -> float:
    placement = group_placement(workload, best.layout, best.stages, best.matrix, best.ranks)
    estimate = estimate_layout(workload, best.layout, placement, best.stages)
    return float(np.asarray(estimate.step_time_s))
