"""What a training takes, as views show it: days, dollars, kWh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.drawing.quantities import amount, count
from meshwright.planner.plan.baseline_document import CostDoc
from meshwright.planner.report.view import COUNT, Column, decimals

COST_COLUMNS = {
    "days": Column("days", decimals(1), absent=""),
    "dollars": Column("dollars", COUNT, absent=""),
    "kwh": Column("kWh", COUNT, absent=""),
}
"""Of tables whose rows carry a training's cost, by the names of their figures."""


def cost_rows(cost: CostDoc | None) -> list[tuple[str, str]]:
    """Days, dollars and kWh of a training; nothing where it was not asked for."""
    if cost is None:
        return []
    plan = cost.plan
    days = f"{plan.days:,.1f} for {amount(cost.tokens)} tokens, {count(plan.gpu_hours)} GPU hours"
    if cost.days_asked is not None:
        days += f"; {cost.days_asked:g} asked: {'in time' if cost.in_time else 'too late'}"
    rows = [("days", days)]
    if plan.dollars is not None:
        price = cost.gpu_hour_price
        at = "at each part's price" if price is None else f"at {price:g} a GPU hour"
        rows.append(("dollars", f"{count(plan.dollars)} {at}"))
    if plan.kwh is not None:
        what = f"GPUs at {cost.gpu_power_w:g} W each, without hosts, network, cooling"
        rows.append(("kWh", f"{count(plan.kwh)}: {what}"))
    return rows


def cost_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Those of `COST_COLUMNS` of which some row has a figure."""
    return {
        name: column
        for name, column in COST_COLUMNS.items()
        if any(row.get(name) is not None for row in rows)
    }
