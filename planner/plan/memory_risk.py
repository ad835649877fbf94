"""How likely a plan is to run out of memory, and what it pays for being unlikely to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.costmodel.constants.calibrated import peak_memory_band
from meshwright.costmodel.constants.measured import POINT_ESTIMATE, fit_probability
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.plan.document import MemoryRisk, Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import Predicted
from meshwright.planner.search.certificate import Outcome

_LEAST_GIB = 1e-3
"""Room that is taken where a reserve leaves none: a probability needs a positive one."""
_ROUNDING = 1e-9


def memory_risk_document(request: PlanRequest, predicted: Predicted) -> MemoryRisk:
    """The risk that remains, by the measured errors of predicted memory."""
    workload = _as_predicted(request).workload()
    room_gib = usable_hbm_gib(workload)
    peak_gib = max(predicted.memory_gib)
    fits = fit_probability(peak_gib, max(room_gib, _LEAST_GIB), peak_memory_band(workload))
    return MemoryRisk(asked=request.memory_risk, remains=1.0 - fits, room_gib=room_gib)


def risk_with_cost(
    request: PlanRequest, plan: Plan, searched: Callable[[PlanRequest], Outcome] | None
) -> MemoryRisk | None:
    """A plan's risk with what its margin for memory costs; None for a plan without a layout.

    Parameters
    ----------
    request
        What was planned.
    plan
        The plan.
    searched
        Searches a request, beginning from the plan's layout; None where that would take long.
    """
    risk, step_time_s = plan.memory_risk, plan.objective.step_time_s
    if risk is None or step_time_s is None:
        return risk
    if request.memory_risk >= POINT_ESTIMATE:
        without_s, proven = step_time_s, plan.status == "optimal"
    elif searched is None:
        return risk
    else:
        outcome = searched(_as_predicted(request))
        times = [priced.step_time_s for priced in outcome.best]
        without_s = min([*times, step_time_s])
        bound_s = outcome.lower_bound_s
        proven = bound_s is not None and bound_s >= without_s * (1 - _ROUNDING)
    cost = step_time_s / without_s - 1.0
    return risk.model_copy(
        update={"step_time_s_without": without_s, "cost": cost, "proven": proven}
    )


def _as_predicted(request: PlanRequest) -> PlanRequest:
    return replace(request, memory_risk=POINT_ESTIMATE)
