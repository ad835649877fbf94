"""Planning from end to end: search, document, verification, robustness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.planner.mapping.choice.cut_limit import pricing_of
from meshwright.planner.mapping.choice.pricing import MappedPricing
from meshwright.planner.plan.assemble import plan_from_outcome
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.choices import question_of_choices
from meshwright.planner.plan.digest import with_digest
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.exported_model import export_model
from meshwright.planner.plan.infeasible import explain_infeasible
from meshwright.planner.plan.questions import with_answers
from meshwright.planner.plan.robustness import question_of_robustness
from meshwright.planner.plan.verify import verify
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.request_space import space_of
from meshwright.planner.solvers.clock import is_over, remaining_s, within

SEARCH_SHARE = 0.9
"""Part of a time limit that the search may take; the rest is for verifying and writing the plan."""
Progress = Callable[[str], None]


def make_plan(
    request: PlanRequest,
    *,
    robustness: bool = True,
    choices: bool = True,
    progress: Progress | None = None,
    model_file: Path | None = None,
) -> Plan:
    """The whole plan for a request: the fastest one, verified, and what becomes of it under errors of the
    cost model.

    Parameters
    ----------
    request
        What to plan.
    robustness
        Whether to search again under each error of the cost model; this takes about as long as the search
        itself. Left out where many plans are made at once.
    choices
        Whether to search for the best plan without each execution choice of this one.
    progress
        Called with one line whenever a better plan is found.
    model_file
        Where to write the last CP-SAT model of the search; a warning of the plan says where there was none.

    Returns
    -------
    Plan
        Its status says whether it is proven, and without a layout it says why there is none.

    Raises
    ------
    InputError
        If the request cannot be searched as asked.
    InternalError
        If the plan fails its own verification: a fault of the planner.
    """
    with within(request.time_limit_s):
        plan = fastest_plan(request, progress, hedged=robustness, model_file=model_file)
        questions = [question_of_choices(request, plan)] if choices else []
        if robustness:
            chosen = replace(request, cluster=plan.inputs.cluster, gpus=plan.inputs.gpus)
            questions.append(question_of_robustness(chosen, plan))
        return with_digest(with_answers(plan, questions))


def fastest_plan(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    hedged: bool = False,
    model_file: Path | None = None,
) -> Plan:
    """The fastest plan for a request, verified; or the reason why there is none. Parameters and errors are
    those of `make_plan`. `hedged` says of a calibrated plan how it does over the posterior.
    """
    began = time.monotonic()
    if request.time_limit_s is not None:
        # Where the mean over a posterior counts, its scenarios are searched after the nominal one.
        share = 0.5 if request.objective == "expected" and request.calibration else 1.0
        limit_s = SEARCH_SHARE * share * min(request.time_limit_s, remaining_s())
        request = replace(request, time_limit_s=limit_s)
    found = best_plan(request, progress, hedged=hedged)
    request = found.request
    space = space_of(request)
    outcome = _with_least_traffic(request, found.outcome)
    infeasible = (
        explain_infeasible(request, space.workload) if outcome.status == "infeasible" else None
    )
    wall_s = time.monotonic() - began
    plan = plan_from_outcome(
        request, outcome, space, wall_s, infeasible=infeasible, full=found.full
    )
    plan = plan.model_copy(update={"expected": found.expected, "left_out": found.note})
    verify(request, plan)
    unwritten = None if model_file is None else export_model(request, outcome, model_file)
    if unwritten is not None:
        plan = plan.model_copy(update={"warnings": [*plan.warnings, unwritten]})
    return plan


def _with_least_traffic(request: PlanRequest, outcome: Outcome) -> Outcome:
    """The best layout under the mapping that sends least, of those with its price, where time is left."""
    if not outcome.best or is_over():
        return outcome
    pricing = pricing_of(request.workload(outcome.best[0].execution))
    if not isinstance(pricing, MappedPricing):
        return outcome
    return replace(
        outcome, best=(*map(pricing.with_least_traffic, outcome.best[:1]), *outcome.best[1:])
    )
