"""What a plan on a mixed cluster states of its proof and of each part alone, held against itself."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from meshwright.planner.mixed.document import AloneDoc, MixedPlan

ROUNDING = 1e-9
"""Relative: figures are written with all their digits."""


def objective_faults(plan: MixedPlan) -> Iterator[str]:
    """Status, step, bound and gap that contradict each other or what the plan consists of, in words."""
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    gap = plan.objective.gap
    if (price_s is not None) != (plan.status in ("optimal", "feasible")):
        yield f"status {plan.status} with a step of {price_s} s"
    if price_s is None:
        if gap is not None or plan.layout is not None or plan.runs_on:
            yield "no step, but a gap, a layout or parts that it runs on"
        return
    if bound_s is None:
        if gap is not None:
            yield f"gap {gap} without a lower bound"
    elif bound_s > price_s:
        yield f"lower bound {bound_s} above the price {price_s}"
    elif gap is None or not isclose(gap, (price_s - bound_s) / price_s, abs_tol=ROUNDING):
        yield f"gap {gap} at price {price_s} and bound {bound_s}"
    is_met = bound_s is not None and bound_s >= price_s * (1 - ROUNDING)
    if (plan.status == "optimal") != is_met:
        yield f"called {plan.status} at price {price_s} and bound {bound_s}"
    yield from _shape_faults(plan, price_s)


def _shape_faults(plan: MixedPlan, price_s: float) -> Iterator[str]:
    """A pipeline through parts has all of its sections, a part alone none of them."""
    sections = (plan.layout, plan.execution, plan.predicted)
    if plan.layout is None:
        if any(each is not None for each in sections) or plan.ranks or plan.nodes:
            yield "no layout, but an execution, a prediction, ranks or nodes"
        if len(plan.runs_on) != 1:
            yield f"no layout, yet it runs on {plan.runs_on}: must be one part alone"
            return
        own_s = [each.step_time_s for each in plan.alone if each.part == plan.runs_on[0]]
        if own_s != [price_s]:
            yield f"the step is {price_s} s, that of {plan.runs_on[0]} alone {own_s}"
    elif plan.execution is None or plan.predicted is None:
        yield "a layout without an execution or a prediction"
    elif not isclose(price_s, plan.predicted.step_time_s, rel_tol=ROUNDING):
        yield f"objective {price_s} is not the predicted {plan.predicted.step_time_s}"


def alone_faults(plan: MixedPlan) -> Iterator[str]:
    """What is said of each part alone against the cluster, the plan's step and its bound, in words."""
    parts = plan.cluster.parts
    wanted = [
        (plan.cluster.name_of(i), part.cluster.device.name, part.gpus)
        for i, part in enumerate(parts)
    ]
    stated = [(each.part, each.device, each.gpus) for each in plan.alone]
    if stated != wanted:
        yield f"alone: parts {stated}, the cluster has {wanted}"
    for alone in plan.alone:
        yield from _one_alone_faults(plan, alone)


def _one_alone_faults(plan: MixedPlan, alone: AloneDoc) -> Iterator[str]:
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    step_s, own_bound_s = alone.step_time_s, alone.lower_bound_s
    where = f"alone, {alone.part}"
    if (step_s is not None) != (alone.status in ("optimal", "feasible")):
        yield f"{where}: status {alone.status} with a step of {step_s} s"
    if step_s is not None and (price_s is None or price_s > step_s):
        yield f"{where}: {step_s} s a step, less than the plan's {price_s}"
    if step_s is not None and own_bound_s is not None and own_bound_s > step_s:
        yield f"{where}: lower bound {own_bound_s} above its step of {step_s} s"
    is_met = (
        step_s is not None and own_bound_s is not None and own_bound_s >= step_s * (1 - ROUNDING)
    )
    if alone.status == "optimal" and not is_met:
        yield f"{where}: called optimal at price {step_s} and bound {own_bound_s}"
    # Nothing on a part alone is left out of what the bound is on.
    nothing_known = own_bound_s is None and alone.status != "infeasible"
    if bound_s is not None and (
        nothing_known or (own_bound_s or bound_s) < bound_s * (1 - ROUNDING)
    ):
        yield f"{where}: its lower bound {own_bound_s} does not carry the plan's {bound_s}"
