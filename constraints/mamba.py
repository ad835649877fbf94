"""How the layers of hybrid models can be cut, and what Megatron-LM runs of them (megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import Divides, of
from meshwright.constraints.precision import is_narrow
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload


def mamba_heads(workload: Workload) -> int:
    """Heads of Mamba-2 layers; 0 without such layers."""
    mamba = workload.model.mamba
    return 0 if mamba is None else mamba.heads


MAMBA_HEADS = Divides(
    name="mamba-heads-by-tp-cp",
    sentence="heads of Mamba-2 mod (tp cp) = 0",
    unit="heads left over",
    binds=lambda work: work.model.mamba is not None,
    number=of(number=mamba_heads),
    by=of("tp", "cp"),
    words="{number} heads of Mamba-2 do not divide by tp {tp} x cp {cp}",
    remedy="Lower cp or tp.",
)
"""Asserted by Megatron's mixer and its context parallelism, which swaps tokens for these heads
(megatron/core/ssm/mamba_mixer.py, nheads; mamba_context_parallel.py, nheads_local_tp)."""


class MambaGroups(Rule):
    """groups of Mamba-2 mod tp = 0; groups / tp and cp divide one another, as cp may copy groups.

    megatron/core/ssm/mamba_mixer.py (ngroups) and mamba_context_parallel.py (ngroups_local_tp) assert it.
    """

    name = "mamba-groups-by-tp-cp"
    unit = "groups left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.mamba is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mamba, tp, cp = table.workload.model.mamba, column(table, "tp"), column(table, "cp")
        if mamba is None:
            return as_excess(np.zeros_like(tp))
        local = np.maximum(mamba.groups // tp, 1)
        return as_excess(mamba.groups % tp + np.minimum(local % cp, cp % local))

    def check(self, plan: FinishedPlan) -> Finding | None:
        mamba, tp, cp = plan.workload.model.mamba, int(plan.layout.tp), int(plan.layout.cp)
        if mamba is None:
            return None
        left_over = mamba.groups - mamba.groups // tp * tp
        if left_over:
            return self.finding(
                value=left_over,
                words=f"{mamba.groups} groups of Mamba-2 do not divide by tp {tp}",
                remedy=f"Take a tp that divides {mamba.groups}.",
            )
        small, large = sorted((mamba.groups // tp, cp))
        left_over = large - large // small * small
        if not left_over:
            return None
        return self.finding(
            value=left_over,
            words=f"{mamba.groups} groups of Mamba-2 over tp {tp} neither divide cp {cp} nor by it",
            remedy="Lower cp, or take a power of two.",
        )


class MegatronHybrid(Rule):
    """No Mamba-1, no Mamba-2 beside attention; no expert overlap under a pattern; FP8 in whole 16 columns.

    megatron/core/ssm has no mixer of Mamba-1, megatron/core/models/hybrid/hybrid_block.py builds one block a
    layer, hybrid_model.py has no schedule plan for the overlap, and mamba_mixer.py asserts the last.
    """

    name = "megatron-hybrid"
    unit = "conditions"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return workload.model.state_space is not None or workload.model.hybrid_pattern is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work = table.workload
        model, broken = work.model, 0
        if self.applies(work):
            odd = model.mamba is not None and model.mamba.projected_width % 16 > 0
            broken = int(model.mamba_beside_attention) + int(odd and is_narrow(work))
            broken += int(model.mamba1 is not None)
            broken += int(work.overlap.ep and model.hybrid_pattern is not None)
        return as_excess(np.full_like(column(table, "tp"), broken))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, broken = plan.workload, []
        mamba = work.model.mamba
        if work.model.mamba_beside_attention:
            broken.append("Mamba-2 beside attention in a layer")
        if work.model.mamba1 is not None:
            broken.append("layers of Mamba-1")
        if mamba is not None and is_narrow(work):
            columns = mamba.projected_width
            if columns != columns // 16 * 16:
                broken.append(f"{columns} columns of a Mamba-2 projection in {work.precision}")
        if work.model.hybrid_pattern is not None and work.overlap.ep:
            broken.append("expert traffic hidden under a pattern of layers")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"Megatron-LM has no {' and no '.join(broken)}",
            remedy=_remedy(work),
        )


def _remedy(workload: Workload) -> str:
    """What runs the model instead: another framework, or another setting of this one."""
    model = workload.model
    if model.mamba1 is not None or model.mamba_beside_attention:
        return "Choose --framework fsdp2: transformers, which accelerate trains, have these layers."
    return "Plan in bf16 without the expert overlap."
