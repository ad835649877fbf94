"""Tensor parallelism cuts the feed-forward width into equal slices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.experts import has_experts
from meshwright.constraints.kinds import Divides, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class FeedForwardByTensor(Rule):
    """ffn_hidden mod tp = 0 where a layer is dense, and the shared experts' width mod tp = 0."""

    name = "ffn-by-tp"
    unit = "columns left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model, tp = table.workload.model, column(table, "tp")
        dense = model.ffn_hidden if model.has_dense_feed_forward else 0
        shared = model.moe.shared_width if model.moe is not None else 0
        return as_excess(np.maximum(dense % tp, shared % tp))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model, tp = plan.workload.model, int(plan.layout.tp)
        widths = {}
        dense = model.moe is None or model.moe.dense_layers > 0 or model.moe.every > 1
        if model.hybrid_pattern is not None:
            dense = model.hybrid_pattern.count("-") > 0
        if dense:
            widths["ffn_hidden"] = model.ffn_hidden
        if model.moe is not None and model.moe.shared_width > 0:
            widths["shared expert width"] = model.moe.shared_width
        for what, width in widths.items():
            remainder = width - (width // tp) * tp
            if remainder:
                return self.finding(
                    value=remainder,
                    words=f"{what} {width} does not divide by tp {tp}",
                    remedy=f"Take a tp that divides {width}.",
                )
        return None


EXPERT_WIDTH_BY_EXPERT_TENSOR = Divides(
    name="expert-ffn-by-etp",
    sentence="moe_ffn_hidden mod etp = 0",
    unit="columns left over",
    binds=has_experts,
    number=of(number=lambda work: 0 if work.model.moe is None else work.model.moe.moe_ffn_hidden),
    by=of("etp"),
    words="expert width {number} does not divide by etp {etp}",
    remedy="Take an etp that divides {number}; 1 always does.",
)
