"""What DeepSpeed 0.19 refuses to start, or starts and fails in, beyond the general rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import AtMost, When, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload

DEEPSPEED_PIPELINE_SHARDING = AtMost(
    name="deepspeed-pipeline-zero",
    sentence="zero_stage <= 1 where pp > 1: the pipeline engine accumulates whole gradients",
    unit="stages of ZeRO",
    when=(When("pp", least=2),),
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with pp {pp}",
    remedy="Lower the ZeRO stage to 1, or set pp to 1.",
)
"""Asserted as the engine is made, not by the parser (DeepSpeed 0.19.8, runtime/pipe/engine.py)."""


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
        remainder = dp - dp // ep * ep
        if remainder == 0 and pp == 1:
            return None
        return self.finding(
            value=remainder + pp - 1,
            words=f"experts on ep {ep} of dp {dp} replicas and pp {pp} stages",
            remedy="Set pp to 1 and take an ep that divides dp.",
        )


DEEPSPEED_RULES: tuple[Rule, ...] = (
    DEEPSPEED_PIPELINE_SHARDING,
    DeepspeedExpertGroups(),
)
