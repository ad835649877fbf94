"""A plan and a file of what is run today, brought together: prices, changes, edits."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from meshwright.planner.analysis.baseline import Baseline, read_baseline, with_baseline
from meshwright.planner.launch.script_diff import with_script_diff
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import read_feasible_plan
from meshwright.planner.plan.training_cost import Budget


def compare(
    plan: str | PathLike[str] | Plan,
    baseline: str | PathLike[str],
    *,
    tokens: float | None = None,
    days: float | None = None,
    gpu_hour_price: float | None = None,
) -> Plan:
    """What a plan brings over what is run today.

    Parameters
    ----------
    plan
        A plan, its file or its folder.
    baseline
        A launch script, a run file of one run, or another plan.
    tokens
        Of the whole training, from 1: adds its days, GPU hours and kWh.
    days
        With `tokens` the deadline; without, how long is trained.
    gpu_hour_price
        Dollars: adds the price of the training; the cluster file's own when None.

    Returns
    -------
    Plan
        With `baseline`: the speed-up, what each change brings alone and in turn, and for a launch script the
        smallest edit of it that reaches the plan.

    Raises
    ------
    InputError
        If a file cannot be read or priced, or trains another model.
    InfeasibleError
        If the plan has no layout.
    """
    compared = plan if isinstance(plan, Plan) else read_feasible_plan(plan)
    today = read_baseline(Path(baseline), compared.inputs)
    budget = Budget(tokens=tokens, days=days, gpu_hour_price=gpu_hour_price)
    return against(compared, today, budget)


def against(plan: Plan, today: Baseline, budget: Budget | None = None) -> Plan:
    """A plan with its `baseline`, edits included; as it is without a layout. `budget` is of the training."""
    if plan.layout is None:
        return plan
    return with_script_diff(with_baseline(plan, today, budget))
