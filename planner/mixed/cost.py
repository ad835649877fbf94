"""What a whole training takes on a mixed cluster: the parts in use, each at its own power and price."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.mixed.document import MixedPlan
from meshwright.planner.mixed.service import MixedResult
from meshwright.planner.plan.baseline_document import CostDoc, TrainingCost
from meshwright.planner.plan.digest import with_digest
from meshwright.planner.plan.training_cost import Budget, with_cost


def with_mixed_cost(result: MixedResult, budget: Budget) -> MixedResult:
    """A result with what the training takes; as it is where there is no plan, or nothing is asked."""
    cost = _cost(result.document, budget)
    if cost is None:
        return result
    document = with_digest(result.document.model_copy(update={"cost": cost}))
    alone = result.alone
    return replace(
        result,
        document=document,
        alone=None if alone is None else with_digest(with_cost(alone, budget)),
    )


def _cost(plan: MixedPlan, budget: Budget) -> CostDoc | None:
    if plan.objective.step_time_s is None:
        return None
    tokens_per_s = plan.inputs.global_batch * plan.inputs.seq_len / plan.objective.step_time_s
    gpus = {each.part: each.gpus for each in plan.alone}
    parts = [
        (gpus[name], part.cluster)
        for index, part in enumerate(plan.cluster.parts)
        if (name := plan.cluster.name_of(index)) in plan.runs_on
    ]
    each = [(budget.cost(tokens_per_s, number, cluster), number) for number, cluster in parts]
    costs = [(cost, number) for cost, number in each if cost is not None]
    if not costs:
        return None
    first, total = costs[0][0], sum(number for _, number in costs)
    dollars = [cost.plan.dollars for cost, _ in costs]
    prices = {cost.gpu_hour_price for cost, _ in costs}
    return first.model_copy(
        update={
            "gpu_hour_price": first.gpu_hour_price if len(prices) == 1 else None,
            "gpu_power_w": sum(cost.gpu_power_w * number for cost, number in costs) / total,
            "plan": TrainingCost(
                days=first.plan.days,
                gpu_hours=sum(cost.plan.gpu_hours for cost, _ in costs),
                dollars=None if None in dollars else sum(value or 0.0 for value in dollars),
                kwh=sum(cost.plan.kwh or 0.0 for cost, _ in costs),
            ),
        }
    )
