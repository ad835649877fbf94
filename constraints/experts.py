"""The expert axes: the experts are dealt over the GPUs of one pipeline stage as etp * ep * edp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload


class ExpertsByExpertParallel(Rule):
    """experts mod ep = 0."""

    name = "experts-by-ep"
    unit = "experts left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        moe, ep = table.workload.model.moe, column(table, "ep")
        return as_excess(np.zeros_like(ep) if moe is None else moe.experts % ep)

    def check(self, plan: FinishedPlan) -> Finding | None:
        moe, ep = plan.workload.model.moe, int(plan.layout.ep)
        if moe is None:
            return None
        left = moe.experts - (moe.experts // ep) * ep
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{moe.experts} experts do not divide by ep {ep}",
            remedy=f"Take an ep that divides {moe.experts}.",
        )


class ExpertGrid(Rule):
    """(tp cp dp) mod (etp ep) = 0: whole replicas of the experts fill the stage."""

    name = "expert-grid"
    unit = "GPUs left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        stage = column(table, "tp") * column(table, "cp") * column(table, "dp")
        return as_excess(stage % (column(table, "etp") * column(table, "ep")))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        stage, group = int(one.tp) * int(one.cp) * int(one.dp), int(one.etp) * int(one.ep)
        left = stage - (stage // group) * group
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"etp {one.etp} x ep {one.ep} = {group} does not divide the {stage} GPUs of a stage",
            remedy=f"Take etp and ep whose product divides tp x cp x dp = {stage}.",
        )


class ExpertAxesNeedExperts(Rule):
    """A dense model has ep = etp = 1.

    Megatron (core 0.19.2, training/arguments.py) refuses ep and takes etp; torchtitan 0.3.0 takes ep; neither
    cuts anything. A plan that says so would not be what runs.
    """

    name = "expert-axes-need-experts"
    unit = "ranks"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        group = column(table, "ep") * column(table, "etp")
        return as_excess(group - 1 if table.workload.model.moe is None else np.zeros_like(group))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if plan.workload.model.moe is not None or (one.ep == 1 and one.etp == 1):
            return None
        return self.finding(
            value=int(one.ep) * int(one.etp),
            limit=1,
            words=f"ep {one.ep} and etp {one.etp} on a model without experts",
            remedy="Set ep and etp to 1.",
        )
