"""What each execution choice of a plan brings: the best plan with the plain value in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.claims import is_closed
from meshwright.planner.plan.document import ExecutionChoice, Plan
from meshwright.planner.plan.installs import choice_setting
from meshwright.planner.plan.questions import Question
from meshwright.planner.request.executions import EXECUTION_PINS, PLAIN, SWITCH, choices_made
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import layout_from_document
from meshwright.planner.solvers.clock import is_over, limit_left_s

Task = Callable[[], ExecutionChoice]


def question_of_choices(request: PlanRequest, plan: Plan) -> Question:
    """What each of a plan's execution choices brings, the largest gain first.

    Pinned choices are left out, and those that the framework always makes: there is no plan without them.
    Each figure is that of `plan` for the same request with the plain value pinned: by the same search, over
    all nodes that were asked for.

    Parameters
    ----------
    request
        As it was asked.
    plan
        Its plan.
    """
    if plan.layout is None or plan.execution is None:
        return Question()
    tasks = [*_choices(request, plan), *_bucket_choice(request, plan)]
    return Question(tasks=tasks, answered=_with_choices)


def _with_choices(plan: Plan, choices: list[ExecutionChoice]) -> Plan:
    choices = sorted(choices, key=_gain, reverse=True)
    return plan.model_copy(update={"choices": choices})


def _gain(choice: ExecutionChoice) -> float:
    """What a choice is ordered by: seconds without it, infinite without a plan, last where unknown."""
    if choice.status == "not searched":
        return 0.0
    return choice.step_time_s_without or inf


def _choices(request: PlanRequest, plan: Plan) -> Iterator[Task]:
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
            yield partial(_choice, plan, name, plain, without)


def _choice(plan: Plan, name: str, plain: int | str, without: PlanRequest) -> ExecutionChoice:
    """A choice of the plan with the best plan for the request without it."""
    likely = _likely(plan)
    value = getattr(plan.layout if hasattr(plan.layout, name) else plan.execution, name)
    if name == "shard_groups":
        likely = replace(likely, shard_groups=1)
    if name == "optimizer_offload":
        likely = replace(likely, optimizer_offload=0)
    setting = choice_setting(framework_named(without.framework), name, str(value))
    found = _answered(name, value, without, likely)
    installs = setting.installs if setting else ""
    return found.model_copy(update={"pin": f"{name}={plain}", "installs": installs})


def _likely(plan: Plan) -> Layout:
    """The layout of a plan, with as many layers recomputed as it then needs."""
    assert plan.layout is not None
    return replace(layout_from_document(plan.layout), recompute_layers=0)


def _answered(
    name: str,
    value: str | bool | float,
    without: PlanRequest,
    likely: Layout,
    *,
    own_buckets: bool = False,
) -> ExecutionChoice:
    """A choice with the best plan of a request that has another; the search is left out behind the limit."""
    found = None
    if not is_over():
        asked = replace(without, time_limit_s=limit_left_s(), top_k=1)
        found = best_plan(asked, begin_with=likely, own_buckets=own_buckets)
    claim = "not searched" if found is None else found.claim
    return ExecutionChoice(
        choice=name,
        value=value,
        step_time_s_without=None if found is None else found.step_time_s,
        lower_bound_s_without=None if found is None else found.outcome.lower_bound_s,
        status=claim,
        proven=is_closed(claim),
    )


def _pinned(request: PlanRequest, name: str, word: int | str) -> PlanRequest | None:
    """The request with a choice pinned; None where it cannot have that value."""
    try:
        return replace(request, pins={**request.pins, name: word})
    except InputError:
        return None


def _bucket_choice(request: PlanRequest, plan: Plan) -> Iterator[Task]:
    if plan.execution is not None and plan.execution.bucket_mb is not None:
        bucket_mb = plan.execution.bucket_mb
        likely = _likely(plan)
        yield partial(_answered, "bucket_mb", bucket_mb, request, likely, own_buckets=True)
