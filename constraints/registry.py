"""Which rules bind a workload: the general ones, and those of its framework."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from meshwright.constraints.fabric import (
    BATCH_SPLIT,
    FSDP2_GROUP_RULES,
    GPU_BUDGET,
    MEGATRON_GROUP_RULES,
    REPLICAS_BY_SHARD_GROUPS,
    SHARD_GROUPS_NEED_SHARDS,
    SHARD_GROUPS_OF_SEVERAL,
    TORCHTITAN_GROUP_RULES,
    Bisection,
    NvlinkDomain,
    ScaleUpDomain,
)
from meshwright.constraints.frameworks import (
    DEEPSPEED_RULES,
    ENCODER_CONTEXT,
    ENCODER_HEADS,
    FSDP2_RULES,
    TORCHTITAN_RULES,
    TORCHTITAN_TOKEN_PREDICTION,
    AllowedDegrees,
    AllowedOptimizers,
    AllowedPrecisions,
    NoHybridLayers,
    NoLinearAttention,
    NoSparseAttention,
    WholeModelRecompute,
)
from meshwright.constraints.layers import (
    ARCHITECTURES,
    EXPERT_AXES_NEED_EXPERTS,
    EXPERT_GRID,
    EXPERT_WIDTH_BY_EXPERT_TENSOR,
    EXPERTS_BY_EXPERT_PARALLEL,
    HEADS_BY_CONTEXT,
    HEADS_BY_TENSOR,
    KV_HEADS_BY_CONTEXT,
    LINEAR_HEADS,
    MAMBA_HEADS,
    SEQUENCE_BY_CONTEXT,
    SEQUENCE_BY_TENSOR,
    SEQUENCE_PARALLEL_NEEDS_TENSOR,
    SINKS_IN_CONTEXT,
    WINDOWS_IN_CONTEXT,
    FeedForwardByTensor,
    HierarchicalContext,
    KvHeadsByTensor,
    MambaGroups,
    MegatronAllGather,
    MegatronDispatcherDevice,
    MegatronDispatcherRanks,
    MegatronDispatcherReach,
    MegatronHybrid,
    MegatronSparseAttention,
    MegatronTokenPrediction,
    PrecisionOnDevice,
)
from meshwright.constraints.megatron import (
    MEGATRON_DELAYED_SCALING,
    MEGATRON_EXECUTION_RULES,
    MEGATRON_RULES,
    MEGATRON_TENSOR_OVERLAP,
)
from meshwright.constraints.memory import (
    DEEPSPEED_OFFLOAD_RULES,
    FSDP_OFFLOAD_RULES,
    INPUT_OFFLOAD_RULES,
    MEGATRON_ACTIVATION_RULES,
    MEGATRON_OFFLOAD_RULES,
    OFFLOADED_PARAMETERS_ZERO,
    OFFLOADED_SHARE,
    FullRecomputeStandsAlone,
    HbmCapacity,
    HostMemory,
    RecomputedModulesExist,
)
from meshwright.constraints.pipeline import (
    INTERLEAVED_MICRO_BATCHES,
    INTERLEAVING_NEEDS_PIPELINE,
    AllowedSchedules,
    LayersByStages,
    ScheduleShape,
)
from meshwright.constraints.rule import DeclaredRule, Finding, FinishedPlan, Rule
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS, binding_framework
from meshwright.frameworks.record import Framework

GENERAL: tuple[Rule, ...] = (
    HbmCapacity(),
    HostMemory(),
    GPU_BUDGET,
    ScaleUpDomain(("tp",)),
    ScaleUpDomain(("etp",)),
    NvlinkDomain(),
    Bisection(),
    HEADS_BY_TENSOR,
    KvHeadsByTensor(),
    HEADS_BY_CONTEXT,
    KV_HEADS_BY_CONTEXT,
    LINEAR_HEADS,
    MAMBA_HEADS,
    MambaGroups(),
    FeedForwardByTensor(),
    SEQUENCE_BY_CONTEXT,
    SEQUENCE_BY_TENSOR,
    SEQUENCE_PARALLEL_NEEDS_TENSOR,
    LayersByStages(),
    EXPERT_AXES_NEED_EXPERTS,
    EXPERTS_BY_EXPERT_PARALLEL,
    EXPERT_WIDTH_BY_EXPERT_TENSOR,
    EXPERT_GRID,
    BATCH_SPLIT,
    REPLICAS_BY_SHARD_GROUPS,
    SHARD_GROUPS_NEED_SHARDS,
    SHARD_GROUPS_OF_SEVERAL,
    OFFLOADED_SHARE,
    INTERLEAVING_NEEDS_PIPELINE,
    INTERLEAVED_MICRO_BATCHES,
    ScheduleShape(),
    RecomputedModulesExist(),
    FullRecomputeStandsAlone(),
    PrecisionOnDevice(),
)
"""Rules of arithmetic and hardware, which bind every framework."""

FRAMEWORK_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *MEGATRON_RULES,
        MegatronDispatcherDevice(),
        MegatronDispatcherReach(),
        MegatronDispatcherRanks(),
        MegatronAllGather(),
        *MEGATRON_EXECUTION_RULES,
        *MEGATRON_GROUP_RULES,
        *MEGATRON_OFFLOAD_RULES,
        *MEGATRON_ACTIVATION_RULES,
        MEGATRON_DELAYED_SCALING,
        MEGATRON_TENSOR_OVERLAP,
        WINDOWS_IN_CONTEXT,
        SINKS_IN_CONTEXT,
        HierarchicalContext(),
        MegatronHybrid(),
        MegatronTokenPrediction(),
        MegatronSparseAttention(),
        ENCODER_CONTEXT,
        ENCODER_HEADS,
        *TORCHTITAN_RULES,
        *TORCHTITAN_GROUP_RULES,
        TORCHTITAN_TOKEN_PREDICTION,
        *DEEPSPEED_RULES,
        *DEEPSPEED_OFFLOAD_RULES,
        OFFLOADED_PARAMETERS_ZERO,
        *INPUT_OFFLOAD_RULES,
        *FSDP2_RULES,
        *FSDP2_GROUP_RULES,
        *FSDP_OFFLOAD_RULES,
        *INPUT_OFFLOAD_RULES,
    )
}
"""Rules by name that bind a framework only where its record names them, in the order of questions."""


@cache
def rules_of(framework: Framework) -> tuple[Rule, ...]:
    """The rules that follow from the fields of a framework's record, and those that the record names."""
    rules: list[Rule] = [AllowedSchedules(framework)]
    bound = framework.rules
    rules += [rule for name, rule in FRAMEWORK_RULES.items() if name in bound]
    degrees, precisions = AllowedDegrees(framework), AllowedPrecisions(framework)
    if degrees.allowed:
        rules.append(degrees)
    if set(precisions.precisions) < set(ARCHITECTURES):
        rules.append(precisions)
    rules.append(AllowedOptimizers(framework))
    if framework.linear_attention is None:
        rules.append(NoLinearAttention(framework))
    if framework.sparse_attention is None:
        rules.append(NoSparseAttention(framework))
    if framework.hybrid_layers is None:
        rules.append(NoHybridLayers(framework))
    if framework.recompute_amount is None:
        rules.append(WholeModelRecompute(framework))
    return tuple(rules)


def sentence_of(rule: Rule) -> str:
    """What a rule says, without the stop."""
    if isinstance(rule, DeclaredRule):
        return rule.sentence
    paragraph = (rule.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def rule_named(name: str) -> Rule | None:
    """The rule that refusals and plans call so, of any framework; None for a name that none has."""
    of_frameworks = (rule for record in RECORDS for rule in rules_of(record))
    return next((rule for rule in (*GENERAL, *of_frameworks) if rule.name == name), None)


def findings(plan: FinishedPlan, *, without: Collection[str] = ()) -> Iterator[Finding]:
    """What the rules for a plan's workload find wrong with it, by their plain arithmetic.

    `without` names rules that are not asked: those whose figures the caller has not.
    """
    rules = (rule for rule in rules_for(plan.workload) if rule.name not in without)
    checked = (rule.check(plan) for rule in rules)
    return (finding for finding in checked if finding is not None)


def rules_for(workload: Workload) -> tuple[Rule, ...]:
    """The rules that have something to say about a workload."""
    framework = binding_framework(workload.framework)
    own = rules_of(framework) if framework is not None else ()
    return tuple(rule for rule in GENERAL + own if rule.applies(workload))
