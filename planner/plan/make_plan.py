"""Planning from end to end: search, document, verification, robustness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshwright.costmodel.layout import Layout
from meshwright.planner.mapping.choice.cut_limit import pricing_of
from meshwright.planner.mapping.choice.pricing import MappedPricing
from meshwright.planner.plan.assemble import plan_from_outcome, predict
from meshwright.planner.plan.choices import loses_by_tensor_overlap, question_of_choices
from meshwright.planner.plan.digest import with_digest
from meshwright.planner.plan.document import Expected, Plan
from meshwright.planner.plan.expected import SCENARIOS, expectation, is_quick
from meshwright.planner.plan.exported_model import export_model
from meshwright.planner.plan.gradient_buckets import search_with_buckets
from meshwright.planner.plan.infeasible import explain_infeasible
from meshwright.planner.plan.nodes import decide_on_nodes
from meshwright.planner.plan.questions import Question, with_answers
from meshwright.planner.plan.robustness import question_of_robustness
from meshwright.planner.plan.verify import verify
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.request_space import space_of
from meshwright.planner.solvers.clock import is_over, limit_left_s, remaining_s, within

SEARCH_SHARE = 0.9
"""Part of a time limit that the search may take; the rest is for verifying and writing the plan."""
WITHOUT_OVERLAP = (
    "overlap of tensor-parallel traffic would make the step longer: this is the best plan without it "
    "(pin tp_overlap=off), and the best plan with it is slower"
)
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
        # On the nodes that were chosen.
        request = replace(request, cluster=plan.inputs.cluster, gpus=plan.inputs.gpus)
        asked = partial(_questions, choices=choices, robustness=robustness)
        slower = partial(loses_by_tensor_overlap, plan)
        whole = with_answers(plan, asked(request, plan), slower)
        if whole is None:
            pins = {**request.pins, "tp_overlap": "off"}
            request = replace(request, pins=pins, time_limit_s=limit_left_s())
            plan = fastest_plan(request, progress, hedged=robustness, model_file=model_file)
            plan = plan.model_copy(update={"warnings": [*plan.warnings, WITHOUT_OVERLAP]})
            whole = with_answers(plan, asked(request, plan))
    return with_digest(whole or plan)


def _questions(
    request: PlanRequest, plan: Plan, *, choices: bool, robustness: bool
) -> list[Question]:
    """What is asked of a plan, the choices first: one of them may say that there is a faster plan."""
    asked = [question_of_choices(request, plan, _searched_again)] if choices else []
    return [*asked, question_of_robustness(request, plan)] if robustness else asked


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
    decision = decide_on_nodes(request, lambda searched: _searched(searched, progress))
    request, settled = decision.request, decision.settled
    space = space_of(request)
    outcome = _with_least_traffic(request, settled.outcome)
    expected = None
    if outcome.best and (request.objective == "expected" or (hedged and is_quick(outcome))):
        outcome, expected = _over_posterior(request, outcome)
    infeasible = (
        explain_infeasible(request, space.workload) if outcome.status == "infeasible" else None
    )
    wall_s = time.monotonic() - began
    plan = plan_from_outcome(
        request, outcome, space, wall_s, infeasible=infeasible, full=settled.full
    )
    plan = plan.model_copy(update={"expected": expected, "left_out": decision.note})
    verify(request, plan)
    unwritten = None if model_file is None else export_model(request, outcome, model_file)
    if unwritten is not None:
        plan = plan.model_copy(update={"warnings": [*plan.warnings, unwritten]})
    return plan


def _over_posterior(request: PlanRequest, outcome: Outcome) -> tuple[Outcome, Expected | None]:
    """With a calibration, what its posterior says; the outcome is changed if that is the objective."""
    if request.calibration is None:
        return outcome, None
    scenarios = request.calibration.scenarios(SCENARIOS, request.seed)
    expected = expectation(request, outcome, _searched_again, scenarios)
    if request.objective == "nominal" or expected.document.same_as_nominal:
        return outcome, expected.document
    workload = request.workload(expected.chosen.execution).on(int(expected.chosen.layout.gpus))
    nominal_s = predict(workload, expected.chosen).step_time_s
    chosen = replace(expected.chosen, step_time_s=nominal_s)
    others = tuple(plan for plan in outcome.best if plan.step_time_s >= nominal_s)
    changed = replace(outcome, status="feasible", best=(chosen, *others))
    return changed, expected.document


def _searched(request: PlanRequest, progress: Callable[[str], None] | None) -> Outcome:
    return search_with_buckets(request, progress)


def _searched_again(request: PlanRequest, likely: Layout) -> Outcome:
    return search_with_buckets(request, begin_with=likely)


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
