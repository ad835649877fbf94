"""What Megatron-LM refuses to start, beyond the general rules (read in megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.experts import has_experts
from meshwright.constraints.kinds import AtMost, Requires, When, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import Workload


def has_linear_bias(workload: Workload) -> bool:
    """Whether Megatron's single switch for biases (`--disable-bias-linear` absent) has to be on."""
    model = workload.model
    expert_bias = model.moe is not None and model.moe.expert_bias
    return model.mlp_bias or model.attention_output_bias or expert_bias


MEGATRON_SHARDING_NEEDS_ONE_STAGE = AtMost(
    name="megatron-zero-needs-pp-1",
    sentence="pp <= 1 under ZeRO 2 and 3",
    unit="pipeline stages",
    when=(When("zero_stage", least=2),),
    value=of("pp"),
    words="ZeRO stage {zero_stage} with pp {pp}",
    remedy="Use ZeRO stage 1 (the distributed optimizer) with a pipeline, or set pp to 1.",
)
"""The distributed optimizer shards optimizer states only (ZeRO 1). Megatron-FSDP (`--use-megatron-fsdp`) or
torch's FSDP2 (`--use-torch-fsdp2`) shard gradients and parameters. The parser refuses the second with pp >
1. It accepts the first, but each stage would gather its weights anew for every micro-batch: no plan relies
on that."""

MEGATRON_SHARDING_OPTIMIZER = AtMost(
    name="megatron-zero-optimizer",
    sentence="zero_stage <= 1 unless the optimizer is Adam or SGD",
    unit="stages of ZeRO",
    binds=lambda work: work.optimizer not in ("adam", "sgd"),
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with the {optimizer} optimizer",
    remedy="Lower the ZeRO stage to 1, or train with adam or sgd.",
)
"""Megatron-FSDP steps with no other."""

MEGATRON_EXPERTS_NEED_SEQUENCE_PARALLEL = Requires(
    name="megatron-moe-tp-needs-sp",
    sentence="sequence parallelism where experts are trained at tp > 1",
    unit="switches",
    binds=has_experts,
    when=(When("tp", least=2),),
    needs=When("sequence_parallel", least=1),
    words="experts at tp {tp} without sequence parallelism",
    remedy="Turn sequence parallelism on, or set tp to 1.",
)
"""MoELayer.forward raises otherwise."""

MEGATRON_EXPERT_BIAS_NEEDS_WHOLE_EXPERTS = AtMost(
    name="megatron-expert-bias-needs-etp-1",
    sentence="etp <= 1 where experts have biases",
    unit="ranks",
    binds=lambda work: has_experts(work) and has_linear_bias(work),
    value=of("etp"),
    words="experts with bias cut by etp {etp}",
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
        layout = plan.layout
        if plan.workload.model.moe is None or not plan.workload.overlap.ep or int(layout.ep) == 1:
            return None
        broken = []
        if int(layout.pp) > 1 and int(layout.vpp) == 1:
            broken.append(f"pp {layout.pp} without virtual stages")
        if int(layout.recompute) // 32 % 2 == 1:
            broken.append("full recomputation")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"expert communication cannot overlap under {' and '.join(broken)}",
            remedy="Set vpp to 2 or more, recompute single modules only, or turn the overlap off.",
        )


MEGATRON_RULES: tuple[Rule, ...] = (
    MEGATRON_SHARDING_NEEDS_ONE_STAGE,
    MEGATRON_SHARDING_OPTIMIZER,
    MEGATRON_EXPERTS_NEED_SEQUENCE_PARALLEL,
    MEGATRON_EXPERT_BIAS_NEEDS_WHOLE_EXPERTS,
    MegatronExpertOverlap(),
)
