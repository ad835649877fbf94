"""How full a plan may make the cuts of the fabric, where the user leaves room for others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload

ROUNDING = 1.0 + 1e-9


class Bisection(Rule):
    """Bytes over a cut in a phase, those of other jobs too, <= its capacity x the phase x `--max-cut-use`.

    Overlap hides time, not bytes: what is hidden counts. A layout is judged with its mapping, by the exact
    price; before it is mapped no layout breaks this.
    """

    name = "bisection"
    unit = "share of capacity"

    def applies(self, workload: Workload) -> bool:
        return workload.max_cut_use < 1

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(0 * column(table, "tp"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        limit = plan.workload.max_cut_use
        if plan.cut_use is None or plan.cut_use <= limit * ROUNDING:
            return None
        return self.finding(
            value=plan.cut_use,
            limit=limit,
            words=f"a cut of the fabric is used to {plan.cut_use:.1%}, {limit:.1%} are allowed",
            remedy="Keep talkative groups further inside, or raise --max-cut-use.",
        )
