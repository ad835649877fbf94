"""HBM: the fullest pipeline rank must fit into one GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.memory.footprint import ALLOCATOR_SHARE, CONTEXT_GIB, usable_hbm_gib


class HbmCapacity(Rule):
    """peak memory <= HBM of one GPU, less fragments, the CUDA and NCCL context, and the user's reserve."""

    name = "hbm"
    unit = "GiB"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return np.asarray(table.memory_gib, dtype=np.float64) - usable_hbm_gib(table.workload)

    def check(self, plan: FinishedPlan) -> Finding | None:
        hbm, reserve = plan.workload.cluster.device.hbm_gib, plan.workload.reserve_gib
        margin = plan.workload.memory_margin
        limit = (ALLOCATOR_SHARE * hbm - CONTEXT_GIB - reserve) / margin
        fullest = max(range(len(plan.memory_gib)), key=lambda rank: plan.memory_gib[rank])
        peak = plan.memory_gib[fullest]
        if peak <= limit:
            return None
        reserved = f" and {reserve:g} GiB in reserve" if reserve else ""
        if margin > 1:
            reserved += f" and {margin - 1:.1%} for the error of the prediction"
        return self.finding(
            value=peak,
            limit=limit,
            words=(
                f"pipeline rank {fullest} needs {peak:.1f} GiB, {peak - limit:.1f} more than the {limit:.1f} "
                f"that a {hbm:g} GiB GPU has beside fragments, {CONTEXT_GIB:g} GiB of context{reserved}"
            ),
            remedy="Raise tp, pp, cp or the ZeRO stage, recompute more, or lower micro_batch.",
        )
