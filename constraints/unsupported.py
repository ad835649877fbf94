"""Degrees, precisions and recomputation that a framework has no setting for, as rules with data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute


class AllowedValues(Rule):
    """Every named field of the layout takes one of the values given for it."""

    unit = "fields"

    def __init__(
        self, name: str, framework: str, allowed: Mapping[str, tuple[int, ...]], remedy: str
    ) -> None:
        self.name = name
        self.framework = framework
        self.allowed = dict(allowed)
        self.remedy = remedy

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        wrong = [~np.isin(column(table, field), values) for field, values in self.allowed.items()]
        return as_excess(np.sum(wrong, axis=0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        wrong = []
        for field, values in self.allowed.items():
            value = int(getattr(plan.layout, field))
            if value not in values:
                wrong.append(f"{field} {value} (only {', '.join(map(str, values))})")
        if not wrong:
            return None
        return self.finding(
            value=len(wrong),
            words=f"{self.framework} cannot run {'; '.join(wrong)}",
            remedy=self.remedy,
        )


class AllowedPrecisions(Rule):
    """The number format is one that the framework trains in."""

    unit = "formats"

    def __init__(self, framework: str, precisions: tuple[str, ...]) -> None:
        self.name = f"{framework}-precision"
        self.framework = framework
        self.precisions = precisions

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        missing = 0 if table.workload.precision in self.precisions else 1
        return as_excess(np.full_like(column(table, "tp"), missing))

    def check(self, plan: FinishedPlan) -> Finding | None:
        wanted = plan.workload.precision
        if any(wanted == known for known in self.precisions):
            return None
        return self.finding(
            value=1,
            words=f"{self.framework} has no training in {wanted}",
            remedy=f"Choose one of {', '.join(self.precisions)}, or the megatron framework.",
        )


class WholeModelRecompute(Rule):
    """Recomputation is off, or covers every layer: the framework wraps whole layers, all alike."""

    unit = "settings"

    def __init__(self, framework: str) -> None:
        self.name = f"{framework}-recompute"
        self.framework = framework

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mask = column(table, "recompute")
        chunks = column(table, "pp") * column(table, "vpp")
        # Division, because "a large number means all" may be too large to multiply.
        covered = column(table, "recompute_layers") >= -(-table.workload.model.layers // chunks)
        legal = (mask == 0) | ((mask == int(Recompute.FULL)) & covered)
        return as_excess(~legal)

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if int(one.recompute) == 0:
            return None
        chunks = int(one.pp) * int(one.vpp)
        whole = int(one.recompute) == 32
        if whole and int(one.recompute_layers) * chunks >= plan.workload.model.layers:
            return None
        words = "recomputes some layers only" if whole else "recomputes single modules"
        return self.finding(
            value=1,
            words=f"the plan {words}, {self.framework} recomputes every layer in full or none",
            remedy="Choose no recomputation or all of it.",
        )
