"""What each execution choice of a plan brings: the proven best plan with the plain value in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.plan.document import ExecutionChoice, Plan
from meshwright.planner.plan.gradient_buckets import search_with_own_buckets
from meshwright.planner.plan.installs import choice_setting
from meshwright.planner.plan.questions import Question
from meshwright.planner.request.executions import EXECUTION_PINS, PLAIN, SWITCH, choices_made
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import layout_from_document
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.solvers.clock import is_over, limit_left_s

Search = Callable[[PlanRequest, Layout], Outcome]
"""The best plan for a request; the layout is likely good and priced first."""
Task = Callable[[], ExecutionChoice]


def question_of_choices(request: PlanRequest, plan: Plan, search: Search) -> Question:
    """What each of a plan's execution choices brings, the largest gain first.

    Pinned choices are left out, and those that the framework always makes: there is no plan without them.
    """
    if plan.layout is None or plan.execution is None:
        return Question()
    tasks = [*_choices(request, plan, search), *_bucket_choice(request, plan)]
    return Question(tasks=tasks, answered=_with_choices)


def _with_choices(plan: Plan, choices: list[ExecutionChoice]) -> Plan:
    choices = sorted(choices, key=lambda choice: -(choice.step_time_s_without or inf))
    return plan.model_copy(update={"choices": choices})


def _choices(request: PlanRequest, plan: Plan, search: Search) -> Iterator[Task]:
    assert plan.layout is not None
    assert plan.execution is not None
    names: list[tuple[str, int | str]] = [
        (name, "off" if EXECUTION_PINS[name] == SWITCH else str(PLAIN[name]))
        for name in choices_made(plan.execution)
    ]
    if plan.layout.shard_groups > 1:
        names.append(("shard_groups", 1))
    if plan.layout.optimizer_offload > 0:
        names.append(("optimizer_offload", 0))
    for name, plain in names:
        without = _pinned(request, name, plain)
        if name not in request.pins and without is not None:
            yield partial(_choice, plan, name, without, search)


def _choice(plan: Plan, name: str, without: PlanRequest, search: Search) -> ExecutionChoice:
    """A choice of the plan with the best plan for the request without it."""
    assert plan.layout is not None
    likely = replace(layout_from_document(plan.layout), recompute_layers=0)
    outcome, of_layout = None, hasattr(plan.layout, name)
    value = getattr(plan.layout if of_layout else plan.execution, name)
    if name == "shard_groups":
        likely = replace(likely, shard_groups=1)
    if name == "optimizer_offload":
        likely = replace(likely, optimizer_offload=0)
    if not is_over():
        outcome = search(replace(without, time_limit_s=limit_left_s(), top_k=1), likely)
    setting = choice_setting(framework_named(without.framework), name, str(value))
    return ExecutionChoice(
        choice=name,
        value=value,
        step_time_s_without=outcome.best[0].step_time_s if outcome and outcome.best else None,
        proven=outcome is not None and outcome.status in ("optimal", "infeasible"),
        installs=setting.installs if setting else "",
    )


def loses_by_tensor_overlap(plan: Plan, found: object) -> bool:
    """Whether the best plan without tensor-parallel overlap, which the search takes as on, is faster.

    Parameters
    ----------
    plan
        The plan with it.
    found
        What was found out about the plan: one of its choices, or anything else.
    """
    step_s = plan.objective.step_time_s
    return (
        isinstance(found, ExecutionChoice)
        and found.choice == "tp_overlap"
        and step_s is not None
        and found.step_time_s_without is not None
        and found.step_time_s_without < step_s * (1 - 1e-9)
    )


def _pinned(request: PlanRequest, name: str, word: int | str) -> PlanRequest | None:
    """The request with a choice pinned; None where it cannot have that value."""
    try:
        return replace(request, pins={**request.pins, name: word})
    except InputError:
        return None


def _bucket_choice(request: PlanRequest, plan: Plan) -> Iterator[Task]:
    if plan.execution is not None and plan.execution.bucket_mb is not None:
        yield partial(_own_buckets, request, plan, plan.execution.bucket_mb)


def _own_buckets(request: PlanRequest, plan: Plan, bucket_mb: float) -> ExecutionChoice:
    """What buckets of the chosen size bring: the best plan with the framework's own in their place."""
    assert plan.layout is not None
    outcome = None
    if not is_over():
        likely = replace(layout_from_document(plan.layout), recompute_layers=0)
        alone = replace(request, time_limit_s=limit_left_s(), top_k=1)
        outcome = search_with_own_buckets(alone, likely)
    return ExecutionChoice(
        choice="bucket_mb",
        value=bucket_mb,
        step_time_s_without=outcome.best[0].step_time_s if outcome and outcome.best else None,
        proven=outcome is not None and outcome.status in ("optimal", "infeasible"),
    )
