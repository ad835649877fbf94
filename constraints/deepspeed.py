"""What DeepSpeed 0.19 refuses to start, or starts and fails in, beyond the general rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload


class DeepspeedPipelineSharding(Rule):
    """pp > 1 needs ZeRO 0 or 1: the pipeline engine accumulates whole gradients.

    Asserted as the engine is made, not by the parser (DeepSpeed 0.19.8, runtime/pipe/engine.py).
    """

    name = "deepspeed-pipeline-zero"
    unit = "stages of ZeRO"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(np.where(column(table, "pp") > 1, column(table, "zero_stage") - 1, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        if int(plan.layout.pp) == 1 or plan.layout.zero_stage in (0, 1):
            return None
        return self.finding(
            value=int(plan.layout.zero_stage),
            limit=1,
            words=f"ZeRO stage {plan.layout.zero_stage} with pp {plan.layout.pp}",
            remedy="Lower the ZeRO stage to 1, or set pp to 1.",
        )


class DeepspeedExpertGroups(Rule):
    """dp mod ep = 0, and experts stand on one pipeline stage: expert groups are cut from the replicas.

    DeepSpeed 0.19.8 asserts (dp tp) mod ep = 0 (utils/groups.py) and experts mod ep = 0 (moe/layer.py). It
    could also spread experts over tensor ranks, and over every stage of a pipeline: left out by choice, its
    all-to-all over copied tokens is not what the cost model prices.
    """

    name = "deepspeed-experts"
    unit = "replicas left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(column(table, "dp") % column(table, "ep") + column(table, "pp") - 1)

    def check(self, plan: FinishedPlan) -> Finding | None:
        dp, ep, pp = int(plan.layout.dp), int(plan.layout.ep), int(plan.layout.pp)
        left = dp - dp // ep * ep
        if left == 0 and pp == 1:
            return None
        return self.finding(
            value=left + pp - 1,
            words=f"experts on ep {ep} of dp {dp} replicas and pp {pp} stages",
            remedy="Set pp to 1 and take an ep that divides dp.",
        )


DEEPSPEED_RULES: tuple[Rule, ...] = (
    DeepspeedPipelineSharding(),
    DeepspeedExpertGroups(),
)
