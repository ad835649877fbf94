"""HBM: the fullest pipeline rank must fit into one GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class HbmCapacity(Rule):
    """peak memory <= HBM of one GPU - what the plan must leave free."""

    name = "hbm"
    unit = "GiB"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        workload = table.workload
        limit_gib = workload.cluster.device.hbm_gib - workload.reserve_gib
        return np.asarray(table.memory_gib, dtype=np.float64) - limit_gib

    def check(self, plan: FinishedPlan) -> Finding | None:
        hbm, reserve = plan.workload.cluster.device.hbm_gib, plan.workload.reserve_gib
        fullest = max(range(len(plan.memory_gib)), key=lambda rank: plan.memory_gib[rank])
        peak = plan.memory_gib[fullest]
        if peak <= hbm - reserve:
            return None
        kept = f" less {reserve:g} GiB in reserve" if reserve else ""
        return Finding(
            rule=self.name,
            value=peak,
            limit=hbm - reserve,
            unit=self.unit,
            words=f"pipeline rank {fullest} needs {peak:.1f} GiB of a {hbm:g} GiB GPU{kept}",
            remedy="Raise tp, pp, cp or the ZeRO stage, recompute more, or lower micro_batch.",
        )
