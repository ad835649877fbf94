"""Which rules bind a workload: the general ones, and those of its framework."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from meshwright.constraints import fabric, frameworks, layers, megatron, memory, pipeline
from meshwright.constraints.rule import DeclaredRule, Finding, FinishedPlan, Rule
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS, binding_framework
from meshwright.frameworks.record import Framework
from meshwright.model_specs.blocks import LINEAR_TITLES

GENERAL: tuple[Rule, ...] = (
    memory.HbmCapacity(),
    memory.HostMemory(),
    fabric.GPU_BUDGET,
    fabric.ScaleUpDomain(("tp",)),
    fabric.ScaleUpDomain(("etp",)),
    fabric.NvlinkDomain(),
    fabric.Bisection(),
    layers.HEADS_BY_TENSOR,
    layers.KvHeadsByTensor(),
    layers.HEADS_BY_CONTEXT,
    layers.KV_HEADS_BY_CONTEXT,
    layers.LINEAR_HEADS,
    layers.MAMBA_HEADS,
    layers.MambaGroups(),
    layers.FeedForwardByTensor(),
    layers.SEQUENCE_BY_CONTEXT,
    layers.SEQUENCE_BY_TENSOR,
    layers.SEQUENCE_PARALLEL_NEEDS_TENSOR,
    pipeline.LayersByStages(),
    layers.EXPERT_AXES_NEED_EXPERTS,
    layers.EXPERTS_BY_EXPERT_PARALLEL,
    layers.EXPERT_WIDTH_BY_EXPERT_TENSOR,
    layers.EXPERT_GRID,
    fabric.BATCH_SPLIT,
    fabric.REPLICAS_BY_SHARD_GROUPS,
    fabric.SHARD_GROUPS_NEED_SHARDS,
    fabric.SHARD_GROUPS_OF_SEVERAL,
    memory.OFFLOADED_SHARE,
    pipeline.INTERLEAVING_NEEDS_PIPELINE,
    pipeline.INTERLEAVED_MICRO_BATCHES,
    pipeline.ScheduleShape(),
    memory.RecomputedModulesExist(),
    memory.FullRecomputeStandsAlone(),
    layers.PrecisionOnDevice(),
)
"""Rules of arithmetic and hardware, which bind every framework."""

FRAMEWORK_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *megatron.MEGATRON_RULES,
        layers.MegatronDispatcherDevice(),
        layers.MEGATRON_DISPATCHER_REACH,
        layers.MegatronDispatcherRanks(),
        layers.MEGATRON_ALL_GATHER,
        *megatron.MEGATRON_EXECUTION_RULES,
        *megatron.MEGATRON_DEALT_RULES,
        *fabric.MEGATRON_GROUP_RULES,
        *memory.MEGATRON_OFFLOAD_RULES,
        *memory.MEGATRON_ACTIVATION_RULES,
        megatron.MEGATRON_DELAYED_SCALING,
        megatron.MEGATRON_TENSOR_OVERLAP,
        layers.WINDOWS_IN_CONTEXT,
        layers.SINKS_IN_CONTEXT,
        layers.UNFUSED_IN_CONTEXT,
        layers.HierarchicalContext(),
        layers.MegatronHybrid(),
        layers.MEGATRON_TOKEN_PREDICTION,
        layers.MEGATRON_SPARSE_ATTENTION,
        layers.MEGATRON_LATENT_EXPERTS,
        frameworks.ENCODER_CONTEXT,
        frameworks.ENCODER_HEADS,
        *frameworks.TORCHTITAN_RULES,
        *fabric.TORCHTITAN_GROUP_RULES,
        frameworks.TORCHTITAN_TOKEN_PREDICTION,
        *frameworks.DEEPSPEED_RULES,
        *memory.DEEPSPEED_OFFLOAD_RULES,
        memory.OFFLOADED_PARAMETERS_ZERO,
        *memory.INPUT_OFFLOAD_RULES,
        *frameworks.FSDP2_RULES,
        *fabric.FSDP2_GROUP_RULES,
        *memory.FSDP_OFFLOAD_RULES,
    )
}
"""Rules by name that bind a framework only where its record names them, in the order of questions."""


@cache
def rules_of(framework: Framework) -> tuple[Rule, ...]:
    """The rules that follow from the fields of a framework's record, and those that the record names.

    Parameters
    ----------
    framework : Framework
        Its record.

    Returns
    -------
    tuple of Rule
        In the order of questions, without the general ones.
    """
    rules: list[Rule] = [pipeline.AllowedSchedules(framework)]
    bound = framework.rules
    rules += [rule for name, rule in FRAMEWORK_RULES.items() if name in bound]
    degrees = frameworks.AllowedDegrees(framework)
    precisions = frameworks.allowed_precisions(framework)
    if degrees.allowed:
        rules.append(degrees)
    if precisions is not None:
        rules.append(precisions)
    rules.append(frameworks.allowed_optimizers(framework))
    linear = framework.linear_attention
    lacking = (
        (frameworks.no_linear_attention, frameworks.DELTA_NET not in linear),
        (frameworks.other_linear_attention, linear.keys() < LINEAR_TITLES.keys()),
        (frameworks.no_sparse_attention, framework.sparse_attention is None),
        (frameworks.no_hybrid_layers, framework.hybrid_layers is None),
        (frameworks.no_latent_experts, framework.latent_experts is None),
        (frameworks.no_window_heads, framework.window_heads is None),
        (frameworks.WholeModelRecompute, framework.recompute_amount is None),
    )
    rules += [rule_of(framework) for rule_of, lacks in lacking if lacks]
    return tuple(rules)


def sentence_of(rule: Rule) -> str:
    """What a rule says, without the stop."""
    if isinstance(rule, DeclaredRule):
        return rule.sentence
    paragraph = (rule.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def rule_named(name: str) -> Rule | None:
    """The rule that refusals and plans call so, of any framework.

    Parameters
    ----------
    name : str
        Such as heads-by-tp.

    Returns
    -------
    Rule or None
        None for a name that none has.
    """
    of_frameworks = (rule for record in RECORDS for rule in rules_of(record))
    return next((rule for rule in (*GENERAL, *of_frameworks) if rule.name == name), None)


def findings(plan: FinishedPlan, *, without: Collection[str] = ()) -> Iterator[Finding]:
    """What the rules for a plan's workload find wrong with it, by their plain arithmetic.

    Parameters
    ----------
    plan : FinishedPlan
        With plain numbers.
    without : collection of str
        Names of rules that are not asked: those whose figures the caller has not.

    Returns
    -------
    iterator of Finding
        Empty where the plan keeps all of them.
    """
    rules = (rule for rule in rules_for(plan.workload) if rule.name not in without)
    checked = (rule.check(plan) for rule in rules)
    return (finding for finding in checked if finding is not None)


def rules_for(workload: Workload) -> tuple[Rule, ...]:
    """The rules that have something to say about a workload.

    Parameters
    ----------
    workload : Workload
        Where no record's rules bind its software stack, only the general ones may.
    """
    framework = binding_framework(workload.framework)
    of_framework = rules_of(framework) if framework is not None else ()
    return tuple(rule for rule in GENERAL + of_framework if rule.applies(workload))
