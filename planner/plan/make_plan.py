"""Planning from end to end: search, document, verification, robustness."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.calibration import Calibration
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.pricing import MappedPricing, pricing_of
from meshwright.planner.mapping.slots import Place
from meshwright.planner.plan.assemble import (
    bindings,
    cut_binding,
    lengths_of_plan,
    mapping_of_layout,
    memory_risk_document,
    objective_of,
    plan_from_outcome,
    predicted_use,
    warnings,
)
from meshwright.planner.plan.best_plan import (
    BestPlan,
    Likely,
    Question,
    adopted,
    answers_to,
    beside_all_gpus,
    best_plan,
    export_model,
)
from meshwright.planner.plan.document import IdleDoc, Infeasible, Plan, with_digest
from meshwright.planner.plan.infeasible import explain_infeasible
from meshwright.planner.plan.measured_share import evidence_of
from meshwright.planner.plan.nodes import unused_nodes
from meshwright.planner.plan.robustness import (
    AnsweredAhead,
    plan_to_adopt,
    question_of_choices,
    question_of_robustness,
    survey_of,
)
from meshwright.planner.plan.texts import priced_of, workload_of_plan
from meshwright.planner.plan.training_cost import Budget, with_cost
from meshwright.planner.plan.verify import faults, verify
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.prediction import grades
from meshwright.planner.runs.run_terms import layout_document
from meshwright.planner.search.pricing import Outcome
from meshwright.planner.search.space import space_of
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
    likely: Likely | None = None,
    as_searched: bool = False,
) -> Plan:
    """The whole plan for a request: the fastest one, verified, and what becomes of it under errors of the
    cost model.

    A faster plan that is met where its choices are asked about takes its place. Where it leaves GPUs idle,
    the best layout on all of them is searched for beside these questions.

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
    likely
        Layouts that are priced first; the answer does not depend on them, but for which of equally fast
        layouts it is.
    as_searched
        Whether, of the mappings with the price of the plan, the one that sends least is not looked for, and a
        plan that leaves GPUs idle is not held against the best one on all of them: its step is the same.

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
    began = time.monotonic()
    with within(request.time_limit_s), ExitStack() as until:
        asks, ahead = choices or robustness, AnsweredAhead(request, until)
        ended, plan = _searched(
            request,
            progress,
            hedged=robustness,
            compares_later=asks,
            on_first=ahead.begin if choices else None,
            likely=likely,
            as_searched=as_searched,
        )
        unwritten = _unwritten(ended, model_file)
        if progress is not None and plan.objective.step_time_s is not None:
            words = "errors of the prediction" if robustness else "its choices one by one"
            progress(f"{plan.objective.step_time_s:.4g} s a step; {words}")
        earlier, every = ahead.answers(plan), [len(request.execution_options.executions())]
        survey = survey_of(_as_chosen(request, plan), plan) if choices and robustness else None
        while True:
            questions = [question_of_choices(request, plan, earlier, survey)] if choices else []
            if robustness:
                questions.append(question_of_robustness(_as_chosen(request, plan), plan, survey))
            comparison, before = ended.comparison, ended.outcome
            beside = [] if comparison is None else [Question(tasks=(comparison,), sizes=every)]
            answers = answers_to([*beside, *questions])
            if beside:
                ended = beside_all_gpus(ended, answers.pop(0)[0])
                plan = _document(ended, plan.solver.wall_s or 0.0)
            if choices:
                earlier |= {answer.choice.choice: answer for answer in answers[0]}
            if ended.outcome is not before:
                continue  # a layout on all GPUs is as fast: it is asked about instead
            faster = plan_to_adopt(request, plan, answers[0]) if choices else None
            if faster is None:
                break
            ended = adopted(request, ended, faster, hedged=robustness)
            plan = _document(ended, time.monotonic() - began)
        for question, results in zip(questions, answers, strict=True):
            plan = question.answered(plan, results)
        plan = plan.model_copy(update={"warnings": [*plan.warnings, *unwritten]})
        return with_digest(plan)


def _as_chosen(request: PlanRequest, plan: Plan) -> PlanRequest:
    """A request on the nodes that its plan takes."""
    return replace(request, cluster=plan.inputs.cluster, gpus=plan.inputs.gpus)


def fastest_plan(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    explained: bool = True,
) -> Plan:
    """The fastest plan for a request, verified; or the reason why there is none. Parameters and errors are
    those of `make_plan`. Without `explained` no reason is searched for.
    """
    return _searched(request, progress, hedged=False, explained=explained)[1]


def _searched(
    request: PlanRequest,
    progress: Progress | None,
    *,
    hedged: bool,
    explained: bool = True,
    compares_later: bool = False,
    on_first: Callable[[Priced], None] | None = None,
    likely: Likely | None = None,
    as_searched: bool = False,
) -> tuple[BestPlan, Plan]:
    """How the search ended, and its plan."""
    began = time.monotonic()
    if request.time_limit_s is not None:
        # Where the mean over a posterior counts, it is searched for after the nominal one.
        share = 0.5 if request.objective == "expected" else 1.0
        limit_s = SEARCH_SHARE * share * min(request.time_limit_s, remaining_s())
        request = replace(request, time_limit_s=limit_s)
    ended = best_plan(
        request,
        progress,
        on_first=on_first,
        hedged=hedged,
        begin_with=None if likely is None else likely.layouts,
        run_as=None if likely is None else likely.run_as,
        compares=not as_searched,
        compares_later=compares_later,
        counts=True,
    )
    infeasible = None
    if explained and ended.outcome.status == "infeasible":
        infeasible = explain_infeasible(ended.request, space_of(ended.request).workload)
    wall_s = time.monotonic() - began
    return ended, _document(ended, wall_s, infeasible, least_traffic=not as_searched)


def _unwritten(ended: BestPlan, model_file: Path | None) -> list[str]:
    """Writes the last model of a search where a file is named; a warning where there was none."""
    if model_file is None:
        return []
    why = export_model(ended.request, ended.outcome, model_file)
    return [] if why is None else [why]


def _document(
    ended: BestPlan,
    wall_s: float,
    infeasible: Infeasible | None = None,
    *,
    least_traffic: bool = True,
) -> Plan:
    """The verified plan of a search that took so many seconds."""
    request = ended.request
    outcome = _with_least_traffic(request, ended.outcome) if least_traffic else ended.outcome
    plan = plan_from_outcome(
        request, outcome, space_of(request), wall_s, infeasible=infeasible, full=ended.full
    )
    update = {"expected_by_pairs": ended.expected_by_pairs, "left_out": ended.note}
    plan = plan.model_copy(update={"expected": ended.expected, **update})
    plan = plan.model_copy(update={"evidence": evidence_of(plan)})
    verify(request, plan)
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


# A finished plan with the prices of another calibration, or of other places.


def repriced(plan: Plan, calibration: Calibration | None) -> Plan:
    """The same layout and mapping, priced anew.

    Parameters
    ----------
    plan
        With a layout.
    calibration
        What the user's own runs say of the constants.

    Returns
    -------
    Plan
        As `_worked_out_again` says. The plan itself where there is no calibration.
    """
    if calibration is None:
        return plan
    inputs = plan.inputs.model_copy(update={"calibration": calibration})
    return _worked_out_again(plan, inputs, priced_of(plan), "priced")


def placed_on(plan: Plan, cluster: ClusterSpec, ranks: Sequence[Place]) -> Plan:
    """The same layout, run in the same way, with its ranks on other GPUs.

    Parameters
    ----------
    plan
        With a layout.
    cluster
        Where the ranks are, with the GPUs free that the plan may use.
    ranks
        (node, local GPU) of every rank in the order tp, cp, dp, pp.

    Returns
    -------
    Plan
        As `_worked_out_again` says.

    Raises
    ------
    InfeasibleError
        Where a rule does not hold there, memory included.
    """
    before = priced_of(plan)
    gpus = max(int(before.layout.gpus), min(cluster.gpus, plan.inputs.gpus))
    inputs = plan.inputs.model_copy(update={"cluster": cluster, "gpus": gpus})
    priced = replace(before, matrix={}, ranks=tuple(ranks), stage_ep=None)
    moved = _worked_out_again(plan, inputs, priced, "placed")
    broken = list(faults(PlanRequest.of_inputs(inputs), moved))
    if broken:
        raise InfeasibleError(f"on these nodes of {cluster.name!r}: {'; '.join(broken)}")
    return moved


def _worked_out_again(plan: Plan, inputs: PlanInputs, priced: Priced, how: str) -> Plan:
    """A plan's layout under other inputs, or with its ranks on other GPUs, and all that follows from these.

    It is feasible, without a bound: whether another layout is faster now was not asked. What takes another
    search, the plan's loads of experts or today's run is left out; days and dollars are those of as many
    tokens.
    """
    request, layout = PlanRequest.of_inputs(inputs), priced.layout
    moved = plan.model_copy(update={"inputs": inputs})
    workload = workload_of_plan(moved).on(int(layout.gpus))
    predicted, use = predicted_use(workload, priced)
    idle = None
    if inputs.gpus > int(layout.gpus):
        idle = IdleDoc(
            gpus=inputs.gpus - int(layout.gpus),
            nodes=unused_nodes(request, priced),
            full_step_time_s=None,
            full_lower_bound_s=None,
            reason=f"the plan was {how} as it is; a layout on all GPUs of these nodes was not looked for",
        )
    experts = plan.expert_placement or {}
    update = {
        "status": "feasible",
        "objective": objective_of(predicted.step_time_s, None),
        "predicted": predicted,
        "grades": grades(layout_document(layout, priced.stages), predicted),
        "mapping": mapping_of_layout(workload, priced),
        "expert_placement": {name: experts[name] for name in experts if name != "step_time_s"}
        or None,
        "lengths": lengths_of_plan(request, workload, priced),
        "idle": idle,
        "memory_risk": memory_risk_document(request, predicted),
        "binding": [
            *bindings(request, workload, priced, predicted),
            *cut_binding(use),
        ],
        "warnings": list(warnings(request, priced, predicted, idle)),
        "solver": plan.solver.model_copy(update={"proof": None}),
        "left_out": None,
        "robustness": None,
        "choices": None,
        "evidence": None,
        "expected": None,
        "expected_by_pairs": None,
        "baseline": None,
        "alternatives": [],
    }
    moved, cost = moved.model_copy(update=update), plan.cost
    if cost is None:
        return moved
    budget = Budget(tokens=cost.tokens, days=cost.days_asked, gpu_hour_price=cost.gpu_hour_price)
    return with_cost(moved, budget)
