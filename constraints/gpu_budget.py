"""The GPUs that a layout takes, against those there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class GpuBudget(Rule):
    """tp * cp * pp * dp <= gpus."""

    name = "gpu-budget"
    unit = "GPUs"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        used = column(table, "tp") * column(table, "cp") * column(table, "pp") * column(table, "dp")
        return as_excess(used - table.workload.gpus)

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        used = int(one.tp) * int(one.cp) * int(one.pp) * int(one.dp)
        if used <= plan.workload.gpus:
            return None
        return self.finding(
            value=used,
            limit=plan.workload.gpus,
            words=f"tp {one.tp} x cp {one.cp} x pp {one.pp} x dp {one.dp} = {used} GPUs, "
            f"of {plan.workload.gpus} there are",
            remedy="Lower one of the degrees, dp first, or give more GPUs.",
        )
