"""The interleaved schedule: when it exists, and which micro-batch counts it takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.pipeline.schedules import has_trait, traits


class InterleavingNeedsPipeline(Rule):
    """vpp > 1 needs pp > 1.

    Megatron (core 0.19.2, training/arguments.py) refuses it. torchtitan and DeepSpeed build no pipeline at
    pp 1, so the plan would not be what runs.
    """

    name = "vpp-needs-pp"
    unit = "virtual stages"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(np.where(column(table, "pp") == 1, column(table, "vpp") - 1, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        if int(plan.layout.vpp) == 1 or int(plan.layout.pp) > 1:
            return None
        return self.finding(
            value=int(plan.layout.vpp),
            limit=1,
            words=f"vpp {plan.layout.vpp} with a single pipeline stage",
            remedy="Set vpp to 1, or raise pp to 2 or more.",
        )


class InterleavedMicroBatches(Rule):
    """vpp > 1, interleaved 1F1B or ZB-H1: num_micro_batches mod pp = 0.

    Micro-batches go round in groups; a last, smaller group must still fill the pipeline. With groups of pp,
    the default, that leaves multiples of pp only (`forward_backward_pipelining_with_interleaving` in
    megatron-core 0.19, schedules.py). PyTorch's ScheduleInterleaved1F1B, which torchtitan uses, also takes
    larger rounds of equal size (6 on 4 stages; torch 2.13, distributed/pipelining/schedules.py): left out by
    choice, the cost model prices rounds of pp.
    """

    name = "interleaved-micro-batches"
    unit = "micro-batches left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        left = column(table, "num_micro_batches") % column(table, "pp")
        grouped = has_trait(column(table, "schedule"), "in_groups")
        return as_excess(np.where((column(table, "vpp") > 1) & grouped, left, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        count, pp = int(plan.layout.num_micro_batches), int(plan.layout.pp)
        left = count - (count // pp) * pp
        if (
            int(plan.layout.vpp) == 1
            or left == 0
            or not traits(int(plan.layout.schedule)).in_groups
        ):
            return None
        return self.finding(
            value=left,
            words=f"the interleaved schedule cannot run {count} micro-batches on {pp} stages",
            remedy=f"Make the micro-batches a multiple of {pp} (change dp or micro_batch), or set vpp to 1.",
        )
