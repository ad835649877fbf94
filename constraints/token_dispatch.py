"""What Megatron-LM's all-gather dispatcher of tokens does not go with (megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.precision import is_narrow
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.token_dispatch import GATHERS
from meshwright.costmodel.workload import Workload


class MegatronAllGather(Rule):
    """The all-gather dispatcher goes without overlap of expert communication and in 16 bits.

    megatron/core/transformer/transformer_config.py asserts the first, and refuses tokens padded for FP8 and
    narrower formats (moe_router_padding_for_quantization), as launch files have them.
    """

    name = "megatron-allgather-dispatcher"
    unit = "conditions"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None and workload.moe_dispatch == GATHERS

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work = table.workload
        broken = int(work.overlap.ep) + int(is_narrow(work)) if self.applies(work) else 0
        return as_excess(np.full_like(column(table, "tp"), broken))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        if work.model.moe is None or work.moe_dispatch != "allgather":
            return None
        broken = ["overlap of expert communication"] if work.overlap.ep else []
        if work.precision not in ("bf16", "fp16"):
            broken.append(f"tokens in {work.precision}")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"the all-gather dispatcher does not go with {' and with '.join(broken)}",
            remedy="Dispatch with alltoall.",
        )
