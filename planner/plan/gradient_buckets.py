"""How many parameters' gradients are reduced together: the size that the price of a layout assumes.

The search prices every layout with the best of the sizes (`costmodel.bucket_sizes`); here the plans that it
returns are told which one that is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from meshwright.costmodel.bucket_sizes import LEAST_GAIN, size_range
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.choice.cut_limit import pricing_of
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.executions import search_executions
from meshwright.planner.search.loop import Progress
from meshwright.planner.search.params import SearchParams


def search_with_buckets(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    begin_with: Layout | None = None,
    most_priced: int | None = None,
    params: SearchParams | None = None,
    own_buckets: bool = False,
) -> Outcome:
    """The best layouts of a request, with the best size of their gradient buckets.

    Answers come from `best_plan`, which also decides on nodes.

    Parameters
    ----------
    request
        What to plan.
    progress
        Called with one line whenever a better plan is found.
    begin_with, most_priced, params, own_buckets
        As `search_executions` takes them.

    Returns
    -------
    Outcome
        As `with_gradient_buckets` says.
    """
    outcome = search_executions(
        request,
        pricing_of,
        progress,
        begin_with=begin_with,
        most_priced=most_priced,
        params=params,
        own_buckets=own_buckets,
    )
    return outcome if own_buckets else with_gradient_buckets(request, outcome)


def with_gradient_buckets(request: PlanRequest, outcome: Outcome) -> Outcome:
    """The layouts of a search with the best size of their gradient buckets.

    Parameters
    ----------
    request
        What was searched.
    outcome
        Priced with the best size.

    Returns
    -------
    Outcome
        No layout is slower than before.
    """
    # As in the search: see `branches_of`.
    if not outcome.best or request.max_cut_use < 1:
        return outcome
    best = sorted(
        (_with_best_bucket(request, priced) for priced in outcome.best),
        key=lambda priced: priced.step_time_s,
    )
    bound_s = outcome.lower_bound_s
    if outcome.status == "optimal":
        bound_s = best[0].step_time_s  # summed up again, it may differ in its last digit
    elif bound_s is not None:
        bound_s = min(bound_s, best[0].step_time_s)
    return replace(outcome, best=tuple(best), lower_bound_s=bound_s)


def _with_best_bucket(request: PlanRequest, priced: Priced) -> Priced:
    layout = priced.layout
    workload = request.workload(priced.execution.of_layout(layout)).on(int(layout.gpus))
    placement = group_placement(workload, layout, priced.stages, priced.matrix, priced.ranks)
    context = make_context(replace(workload, chooses_buckets=True), layout, placement)
    sizes = size_range(context)
    if sizes is None:
        return priced
    in_mb = context.constants.framework.gradients_mb
    wanted = [in_mb(float(size)) for size in sizes.others()[1]]
    seconds_of = partial(_step_s, context, kind_times(context), priced)
    step_s = {size_mb: seconds_of(size_mb) for size_mb in wanted}
    best_mb = min(step_s, key=lambda size_mb: step_s[size_mb])
    # Rounding must not keep a plan from the size that its price assumes.
    if step_s[best_mb] > (1.0 - LEAST_GAIN) * seconds_of(None) * (1.0 + 1e-9):
        return priced
    chosen = replace(priced.execution, bucket_mb=best_mb)
    return replace(priced, execution=chosen, step_time_s=step_s[best_mb])


def _step_s(context: Context, times: KindTimes, priced: Priced, size_mb: float | None) -> float:
    workload = replace(context.workload, bucket_mb=size_mb, chooses_buckets=False)
    step = exact_step(replace(context, workload=workload), priced.stages, times)
    return float(np.asarray(step.seconds))
