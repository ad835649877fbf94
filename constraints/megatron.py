"""What Megatron-LM refuses to start, beyond the general rules (read in megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import Workload


class MegatronShardingNeedsOneStage(Rule):
    """ZeRO 2 and 3 need pp = 1.

    The distributed optimizer shards optimizer states only (ZeRO 1). Megatron-FSDP (`--use-megatron-fsdp`) or
    torch's FSDP2 (`--use-torch-fsdp2`) shard gradients and parameters. The parser refuses the second with
    pp > 1. It accepts the first, but each stage would gather its weights anew for every micro-batch: no plan
    relies on that.
    """

    name = "megatron-zero-needs-pp-1"
    unit = "pipeline stages"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(np.where(column(table, "zero_stage") >= 2, column(table, "pp") - 1, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        if int(plan.layout.zero_stage) < 2 or int(plan.layout.pp) == 1:
            return None
        return self.finding(
            value=int(plan.layout.pp),
            limit=1,
            words=f"ZeRO stage {plan.layout.zero_stage} with pp {plan.layout.pp}",
            remedy="Use ZeRO stage 1 (the distributed optimizer) with a pipeline, or set pp to 1.",
        )


class MegatronShardingOptimizer(Rule):
    """ZeRO 2 and 3 (Megatron-FSDP) step with Adam or SGD."""

    name = "megatron-zero-optimizer"
    unit = "stages of ZeRO"

    def applies(self, workload: Workload) -> bool:
        return workload.optimizer not in ("adam", "sgd")

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess((column(table, "zero_stage") - 1) * self.applies(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        optimizer, stage = plan.workload.optimizer, int(plan.layout.zero_stage)
        if stage < 2 or optimizer in {"sgd", "adam"}:
            return None
        return self.finding(
            value=stage,
            limit=1,
            words=f"ZeRO stage {stage} with the {optimizer} optimizer",
            remedy="Lower the ZeRO stage to 1, or train with adam or sgd.",
        )


class MegatronExpertsNeedSequenceParallel(Rule):
    """Training experts at tp > 1 needs sequence parallelism (MoELayer.forward raises otherwise)."""

    name = "megatron-moe-tp-needs-sp"
    unit = "switches"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        off = (column(table, "tp") > 1) & (column(table, "sequence_parallel") == 0)
        return as_excess(off & (table.workload.model.moe is not None))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if plan.workload.model.moe is None or int(one.tp) == 1 or one.sequence_parallel:
            return None
        return self.finding(
            value=1,
            words=f"experts at tp {one.tp} without sequence parallelism",
            remedy="Turn sequence parallelism on, or set tp to 1.",
        )


class MegatronExpertBiasNeedsWholeExperts(Rule):
    """Experts with bias need etp = 1."""

    name = "megatron-expert-bias-needs-etp-1"
    unit = "ranks"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None and has_linear_bias(workload)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        biased = self.applies(table.workload)
        return as_excess((column(table, "etp") - 1) * biased)

    def check(self, plan: FinishedPlan) -> Finding | None:
        model, etp = plan.workload.model, int(plan.layout.etp)
        if model.moe is None or etp == 1:
            return None
        if not (model.moe.expert_bias or model.mlp_bias or model.attention_output_bias):
            return None
        return self.finding(
            value=etp,
            limit=1,
            words=f"experts with bias cut by etp {etp}",
            remedy="Set etp to 1 and raise ep instead.",
        )


class MegatronExpertOverlap(Rule):
    """Hiding the expert all-to-all needs vpp > 1 with a pipeline, and no full recomputation."""

    name = "megatron-expert-overlap"
    unit = "conditions"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None and workload.overlap.ep

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        plain = (column(table, "pp") > 1) & (column(table, "vpp") == 1)
        full = (column(table, "recompute") & int(Recompute.FULL)) > 0
        asked = self.applies(table.workload) & (column(table, "ep") > 1)
        return as_excess((plain.astype(np.int64) + full) * asked)

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if plan.workload.model.moe is None or not plan.workload.overlap.ep or int(one.ep) == 1:
            return None
        broken = []
        if int(one.pp) > 1 and int(one.vpp) == 1:
            broken.append(f"pp {one.pp} without virtual stages")
        if int(one.recompute) // 32 % 2 == 1:
            broken.append("full recomputation")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"expert communication cannot overlap under {' and '.join(broken)}",
            remedy="Set vpp to 2 or more, recompute single modules only, or turn the overlap off.",
        )


def has_linear_bias(workload: Workload) -> bool:
    """Whether Megatron's single switch for biases (`--disable-bias-linear` absent) has to be on."""
    model = workload.model
    expert_bias = model.moe is not None and model.moe.expert_bias
    return model.mlp_bias or model.attention_output_bias or expert_bias


MEGATRON_RULES: tuple[Rule, ...] = (
    MegatronShardingNeedsOneStage(),
    MegatronShardingOptimizer(),
    MegatronExpertsNeedSequenceParallel(),
    MegatronExpertBiasNeedsWholeExperts(),
    MegatronExpertOverlap(),
)
