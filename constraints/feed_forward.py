"""Tensor parallelism cuts the feed-forward width into equal slices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload


class FeedForwardByTensor(Rule):
    """ffn_hidden mod tp = 0 where a layer is dense, and the shared experts' width mod tp = 0."""

    name = "ffn-by-tp"
    unit = "columns left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model, tp = table.workload.model, column(table, "tp")
        dense = model.ffn_hidden if model.dense_layers else 0
        shared = model.moe.shared_width if model.moe is not None else 0
        return as_excess(np.maximum(dense % tp, shared % tp))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model, tp = plan.workload.model, int(plan.layout.tp)
        widths = {}
        if model.moe is None or model.moe.dense_layers > 0:
            widths["ffn_hidden"] = model.ffn_hidden
        if model.moe is not None and model.moe.shared_width > 0:
            widths["shared expert width"] = model.moe.shared_width
        for what, width in widths.items():
            left = width - (width // tp) * tp
            if left:
                return self.finding(
                    value=left,
                    words=f"{what} {width} does not divide by tp {tp}",
                    remedy=f"Take a tp that divides {width}.",
                )
        return None


class ExpertWidthByExpertTensor(Rule):
    """moe_ffn_hidden mod etp = 0."""

    name = "expert-ffn-by-etp"
    unit = "columns left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        moe = table.workload.model.moe
        etp = column(table, "etp")
        return as_excess(np.zeros_like(etp) if moe is None else moe.moe_ffn_hidden % etp)

    def check(self, plan: FinishedPlan) -> Finding | None:
        moe, etp = plan.workload.model.moe, int(plan.layout.etp)
        if moe is None:
            return None
        left = moe.moe_ffn_hidden - (moe.moe_ffn_hidden // etp) * etp
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"expert width {moe.moe_ffn_hidden} does not divide by etp {etp}",
            remedy=f"Take an etp that divides {moe.moe_ffn_hidden}; 1 always does.",
        )
