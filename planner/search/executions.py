"""The search over execution choices and layouts together.

Every execution has layouts and prices of its own. With T* the best step time so far (or the k-th best), it is
left out where a bound on all of its layouts is T* or more; else its search starts with T* as cutoff.
Executions come in the order of their bounds, so most end after a scan of their degrees. The bound of all is
the least over executions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from meshwright.constraints.registry import rules_for
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.exhaustive import search_exhaustively
from meshwright.planner.search.loop import Certificate, LayoutSearch, Outcome, Progress
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.space import space_of

PricingOf = Callable[..., Pricing]


def search_executions(
    request: PlanRequest,
    pricing_of: PricingOf,
    progress: Progress | None = None,
    *,
    begin_with: Layout | None = None,
    most_priced: int | None = None,
) -> Outcome:
    """The best layouts of a request under any execution that it may choose.

    Parameters
    ----------
    request
        What to plan.
    pricing_of
        Makes the prices of a workload.
    progress
        Called with one line whenever a better plan is found.
    begin_with
        A layout that is likely good, priced first.
    most_priced
        Layouts that the search of each execution may price.
    """
    began = time.monotonic()
    ordered = _by_bound(request)
    outcomes: list[Outcome] = []
    best: list[Priced] = []
    for bound_s, execution in ordered:
        cutoff_s = best[request.top_k - 1].step_time_s if len(best) >= request.top_k else inf
        if bound_s >= cutoff_s and request.method != "exhaustive":
            outcomes.append(_left_out(request, execution, cutoff_s))
            continue
        left_s = None
        if request.time_limit_s is not None:
            left_s = max(request.time_limit_s - (time.monotonic() - began), 0.0)
        outcome = _searched(
            replace(request, time_limit_s=left_s),
            execution,
            pricing_of,
            cutoff_s=cutoff_s,
            begin_with=begin_with,
            most_priced=most_priced,
            progress=progress,
        )
        if outcome.lower_bound_s is None and outcome.status == "unknown":
            outcome = replace(outcome, lower_bound_s=bound_s)
        outcomes.append(outcome)
        best += [replace(priced, execution=execution) for priced in outcome.best]
        best.sort(key=lambda priced: priced.step_time_s)
        del best[request.top_k :]
    return _joined(outcomes, best)


def _by_bound(request: PlanRequest) -> list[tuple[float, Execution]]:
    """Executions with the least that a step can take under each, rising; equal ones plainest first."""
    executions = request.execution_options.executions()
    if len(executions) == 1:
        return [(0.0, executions[0])]
    bounds = [_least_s(request, execution) for execution in executions]
    return sorted(zip(bounds, executions, strict=True), key=lambda pair: pair[0])


def _least_s(request: PlanRequest, execution: Execution) -> float:
    """A bound on all layouts, from GPUs times seconds of their compute; infinite without any layout."""
    space = space_of(request, execution)
    if not space.recompute:
        return inf
    return CostModelPricing(space.workload).gpu_seconds(space.shapes()) * (1 - 1e-9) / request.gpus


def _left_out(request: PlanRequest, execution: Execution, cutoff_s: float) -> Outcome:
    """An execution whose layouts are all slower by their bound."""
    space = space_of(request, execution)
    layouts = int(space.layouts_per_degrees(space.degrees(request.gpus)).sum())
    certificate = Certificate(layouts=layouts, bounded_out=layouts)
    return Outcome(status="slower", best=(), lower_bound_s=cutoff_s, certificate=certificate)


def _searched(
    request: PlanRequest,
    execution: Execution,
    pricing_of: PricingOf,
    *,
    cutoff_s: float,
    begin_with: Layout | None,
    most_priced: int | None,
    progress: Progress | None,
) -> Outcome:
    """The search of one execution's layouts."""
    space = space_of(request, execution)
    if not space.recompute:
        return Outcome(status="infeasible", best=(), lower_bound_s=None, certificate=Certificate())
    pricing, rules = pricing_of(space.workload), rules_for(space.workload)
    if request.method == "exhaustive":
        return search_exhaustively(
            space, pricing, rules, top_k=request.top_k, time_limit_s=request.time_limit_s
        )
    return LayoutSearch(
        space,
        pricing,
        rules,
        top_k=request.top_k,
        seed=request.seed,
        time_limit_s=request.time_limit_s,
        cutoff_s=cutoff_s,
        begin_with=begin_with,
        most_priced=most_priced,
        progress=progress,
        routing=None if request.expert_loads is None else request.expert_loads.routing(),
    ).run()


def _joined(outcomes: list[Outcome], best: list[Priced]) -> Outcome:
    """The outcome over all executions."""
    certificate = _summed(outcome.certificate for outcome in outcomes)
    undecided = [outcome for outcome in outcomes if outcome.status in ("feasible", "unknown")]
    bounds = [outcome.lower_bound_s for outcome in outcomes if outcome.status != "infeasible"]
    known = [bound for bound in bounds if bound is not None]
    bound_s = min(known) if known and len(known) == len(bounds) else None
    if not best:
        status = "unknown" if undecided else "infeasible"
        return Outcome(status=status, best=(), lower_bound_s=bound_s, certificate=certificate)
    least_s = best[0].step_time_s
    proven = bound_s is not None and bound_s >= least_s * (1 - 1e-9)
    cut_short = any(outcome.status == "unknown" for outcome in outcomes)
    status = "optimal" if proven and not cut_short else "feasible"
    if len(outcomes) == 1:
        status = outcomes[0].status
    bound_s = None if bound_s is None else min(bound_s, least_s)
    return Outcome(status=status, best=tuple(best), lower_bound_s=bound_s, certificate=certificate)


def _summed(certificates: Iterable[Certificate]) -> Certificate:
    """What all searches together looked at; `fewest_gpus` is the least of theirs."""
    parts = list(certificates)
    total = Certificate(
        layouts=sum(part.layouts for part in parts),
        bounded_out=sum(part.bounded_out for part in parts),
        priced=sum(part.priced for part in parts),
        rounds=sum(part.rounds for part in parts),
        executions=len(parts),
        fewest_gpus=min(part.fewest_gpus for part in parts),
    )
    for part in parts:
        for name, count in part.ruled_out.items():
            total.rule_out(name, count)
    return total
