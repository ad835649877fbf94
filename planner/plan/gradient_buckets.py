"""How many parameters' gradients are reduced together: chosen for the layouts that a search returns.

Few large buckets start few collectives; the last one of a step has nothing left to hide under. The exposed
seconds fall with the size while start-ups keep the links busy longer than the backward pass, and rise with it
once the last bucket is the longer part, so that the first size that is no better than the one before ends the
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.memory.states import rank_parameters, table_parameters
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.record import GradientBuckets
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.choice.cut_limit import pricing_of
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.executions import search_executions
from meshwright.planner.search.loop import Progress
from meshwright.planner.search.params import SearchParams

LEAST_GAIN = 5e-4
"""Share of the step that another size must save before a launch file sets it."""
_LEADING = (10, 15, 20, 30, 50, 70)
"""First two digits of the sizes that are tried: each is 1.3 to 1.7 times the one before."""


def search_with_buckets(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    begin_with: Layout | None = None,
    most_priced: int | None = None,
    params: SearchParams | None = None,
) -> Outcome:
    """The best layouts of a request, with the best size of their gradient buckets.

    Parameters
    ----------
    request
        What to plan.
    progress
        Called with one line whenever a better plan is found.
    begin_with, most_priced, params
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
    )
    return with_gradient_buckets(request, outcome)


def with_gradient_buckets(request: PlanRequest, outcome: Outcome) -> Outcome:
    """The layouts of a search with the best size of their gradient buckets.

    Parameters
    ----------
    request
        What was searched.
    outcome
        Priced with the framework's own sizes.

    Returns
    -------
    Outcome
        No layout is slower than before. The bound holds for layouts with the framework's own sizes.
    """
    buckets = framework_named(request.framework).gradient_buckets
    # Other sizes shorten the phase in which a limited cut is used, so that it may be used too much.
    if buckets is None or not outcome.best or request.max_cut_use < 1:
        return outcome
    improved = [_with_best_bucket(request, priced, buckets) for priced in outcome.best]
    improved.sort(key=lambda priced: priced.step_time_s)
    bound_s = outcome.lower_bound_s
    if bound_s is not None:
        bound_s = min(bound_s, improved[0].step_time_s)
    return replace(outcome, best=tuple(improved), lower_bound_s=bound_s)


def _with_best_bucket(request: PlanRequest, priced: Priced, buckets: GradientBuckets) -> Priced:
    layout = priced.layout
    execution = priced.execution.of_layout(layout)
    if not execution.dp_overlap or int(layout.zero_stage) not in buckets.zero_stages:
        return priced
    # Of several virtual stages only the first has buckets (megatron/training/training.py,
    # per_chunk_bucket_sizes): the price counts on them in all, and would promise too much.
    if int(layout.vpp) > 1:
        return priced
    workload = request.workload(priced.execution).on(int(layout.gpus))
    placement = group_placement(workload, layout, priced.stages, priced.matrix, priced.ranks)
    context = make_context(workload, layout, placement)
    if context.constants.framework.reduces_after_backward and int(layout.pp) > 1:
        return priced
    own_s = best_s = _step_s(context, priced, None)
    best_mb = None
    for parameters in _sizes(context, priced, buckets):
        size_mb = context.constants.framework.gradients_mb(parameters)
        step_s = _step_s(context, priced, size_mb)
        if best_mb is not None and step_s >= best_s:
            break
        if step_s < best_s:
            best_s, best_mb = step_s, size_mb
    if best_mb is None or best_s > own_s * (1.0 - LEAST_GAIN):
        return priced
    chosen = replace(priced.execution, bucket_mb=best_mb)
    return replace(priced, execution=chosen, step_time_s=best_s)


def _step_s(context: Context, priced: Priced, size_mb: float | None) -> float:
    workload = replace(context.workload, bucket_mb=size_mb)
    step = exact_step(replace(context, workload=workload), priced.stages)
    return float(np.asarray(step.seconds))


def _sizes(context: Context, priced: Priced, buckets: GradientBuckets) -> Iterator[int]:
    """Round numbers of parameters, rising, up to all of a rank.

    A token table is reduced whole and its gradient comes last, so that smaller buckets than it would not make
    the last one smaller.
    """
    model, layout = context.workload.model, priced.layout
    own = float(
        np.asarray(bucket_parameters(context.workload, context.constants.framework, layout))
    )
    least = min(own, float(np.asarray(table_parameters(model, layout))))
    most = max(float(np.max(part)) for part in rank_parameters(model, layout, priced.stages))
    if buckets.reserved:
        most = min(most, own)
    for exponent in range(5, 12):
        for leading in _LEADING:
            size = leading * 10**exponent
            if least <= size <= most:
                yield size
