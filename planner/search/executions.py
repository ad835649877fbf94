"""The search over execution choices and layouts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.constraints.registry import rules_for
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout
from meshwright.planner.experts.joint import JointRouting
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.branches import Branch
from meshwright.planner.search.certificate import Certificate, Outcome
from meshwright.planner.search.exhaustive import search_exhaustively
from meshwright.planner.search.loop import LayoutSearch, Progress
from meshwright.planner.search.params import SearchParams
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.request_space import space_of
from meshwright.planner.search.space import Space

PricingOf = Callable[..., Pricing]


def search_executions(
    request: PlanRequest,
    pricing_of: PricingOf,
    progress: Progress | None = None,
    *,
    begin_with: Layout | None = None,
    most_priced: int | None = None,
    params: SearchParams | None = None,
    own_buckets: bool = False,
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
        Layouts that the search may price.
    params
        How far the search goes at a time.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    """
    branches = branches_of(request, pricing_of, own_buckets=own_buckets)
    if not branches:
        return Outcome(status="infeasible", best=(), lower_bound_s=None, certificate=Certificate())
    if request.method == "exhaustive":
        return search_exhaustively(branches, top_k=request.top_k, time_limit_s=request.time_limit_s)
    return LayoutSearch(
        space_of(request),
        branches,
        top_k=request.top_k,
        seed=request.seed,
        time_limit_s=request.time_limit_s,
        begin_with=begin_with,
        most_priced=most_priced,
        progress=progress,
        params=params,
        routing=_routing(request),
    ).run()


def _routing(request: PlanRequest) -> JointRouting | None:
    """Loads whose placement the model may choose; None where experts stay in their own order."""
    loads = request.expert_loads
    return None if loads is None or not request.places_experts else loads.routing()


def branches_of(
    request: PlanRequest, pricing_of: PricingOf, *, own_buckets: bool = False
) -> list[Branch]:
    """A branch for each execution that goes with some layout, the plainest first.

    Under a limited cut gradient buckets keep the framework's own size: another one shortens the phase in
    which the cut is used, so that it may be used too much.
    """
    is_open = not own_buckets and request.max_cut_use >= 1
    spaces = [
        (execution, space_of(request, execution))
        for execution in request.execution_options.executions()
    ]
    return [
        branch_of(space, pricing_of(replace(space.workload, chooses_buckets=is_open)), execution)
        for execution, space in spaces
        if space.recompute and space.cp and space.ep and space.etp
    ]


def branch_of(space: Space, pricing: Pricing, execution: Execution | None = None) -> Branch:
    """A branch with the rules of its workload."""
    return Branch(
        execution=execution or Execution(),
        space=space,
        pricing=pricing,
        rules=tuple(rules_for(space.workload)),
    )
