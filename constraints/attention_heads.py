"""Tensor parallelism gives every rank whole attention heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.frameworks.record import Framework


class HeadsByTensor(Rule):
    """heads mod tp = 0.

    Megatron's parser and torchtitan's decoder refuse it; transformers 5.23 (LlamaAttention.forward) and
    Megatron-DeepSpeed (4efb479, megatron/core/utils.py `divide`) fail as the model is built or run.
    """

    name = "heads-by-tp"
    unit = "heads left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(table.workload.model.heads % column(table, "tp"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        heads, tp = plan.workload.model.heads, int(plan.layout.tp)
        left = heads - (heads // tp) * tp
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{heads} attention heads do not divide by tp {tp}",
            remedy=f"Take a tp that divides {heads}.",
        )


class KvHeadsByTensor(Rule):
    """kv_heads mod tp = 0 or, with the heads copied, tp mod kv_heads = 0."""

    name = "kv-heads-by-tp"
    unit = "heads left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        groups, tp = table.workload.model.kv_heads, column(table, "tp")
        return as_excess(np.minimum(groups % tp, tp % groups))

    def check(self, plan: FinishedPlan) -> Finding | None:
        groups, tp = plan.workload.model.kv_heads, int(plan.layout.tp)
        small, large = sorted((groups, tp))
        left = large - (large // small) * small
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{groups} key-value heads are neither a multiple nor a divisor of tp {tp}",
            remedy=f"Take a tp that divides {groups} or is a multiple of it.",
        )


class WholeKvHeads(Rule):
    """kv_heads mod tp = 0: key and value heads are never copied.

    torchtitan 0.3.0 refuses it (models/common/decoder.py). transformers 5.23, which accelerate trains with,
    splits the projection evenly and then cannot view a rank's part as heads (LlamaAttention.forward).
    """

    unit = "heads left over"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-kv-heads"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(table.workload.model.kv_heads % column(table, "tp"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        heads, tp = plan.workload.model.kv_heads, int(plan.layout.tp)
        left = heads - (heads // tp) * tp
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{heads} key-value heads do not divide by tp {tp}",
            remedy=f"Take a tp that divides {heads}.",
        )
