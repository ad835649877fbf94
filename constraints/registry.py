"""Which rules bind a workload: the general ones, and those of its framework."""

from __future__ import annotations

from meshwright.constraints import deepspeed, fsdp2, megatron, torchtitan
from meshwright.constraints.attention_heads import HeadsByTensor, KvHeadsByTensor
from meshwright.constraints.batch import BatchSplit
from meshwright.constraints.experts import (
    ExpertAxesNeedExperts,
    ExpertGrid,
    ExpertsByExpertParallel,
)
from meshwright.constraints.feed_forward import ExpertWidthByExpertTensor, FeedForwardByTensor
from meshwright.constraints.gpu_budget import GpuBudget
from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.pipeline_schedules import ScheduleShape
from meshwright.constraints.precision import PrecisionOnDevice
from meshwright.constraints.recomputation import FullRecomputeStandsAlone, RecomputedModulesExist
from meshwright.constraints.rule import Rule
from meshwright.constraints.scale_up import ScaleUpAxis, ScaleUpDomain
from meshwright.constraints.schedule import InterleavedMicroBatches, InterleavingNeedsPipeline
from meshwright.constraints.sequence import (
    SequenceByContext,
    SequenceByTensor,
    SequenceParallelNeedsTensor,
)
from meshwright.constraints.stages import LayersByStages
from meshwright.costmodel.workload import Workload

GENERAL: tuple[Rule, ...] = (
    HbmCapacity(),
    GpuBudget(),
    ScaleUpDomain(("tp",)),
    ScaleUpDomain(("etp",)),
    HeadsByTensor(),
    KvHeadsByTensor(),
    FeedForwardByTensor(),
    SequenceByContext(),
    SequenceByTensor(),
    SequenceParallelNeedsTensor(),
    LayersByStages(),
    ExpertAxesNeedExperts(),
    ExpertsByExpertParallel(),
    ExpertWidthByExpertTensor(),
    ExpertGrid(),
    BatchSplit(),
    InterleavingNeedsPipeline(),
    InterleavedMicroBatches(),
    ScheduleShape(),
    RecomputedModulesExist(),
    FullRecomputeStandsAlone(),
    PrecisionOnDevice(),
)
"""Rules of arithmetic and hardware, which bind every framework."""

FRAMEWORKS: dict[str, tuple[Rule, ...]] = {
    "megatron": megatron.RULES,
    "torchtitan": torchtitan.RULES,
    "deepspeed": deepspeed.RULES,
    "fsdp2": fsdp2.RULES,
}


def framework_family(framework: str) -> str | None:
    """The key of `FRAMEWORKS` whose rules bind a software profile; None for one with no rules of its own.

    Profiles are named after their family ("torchtitan-compile"). Megatron-DeepSpeed left Megatron before
    most of the rules read here, so neither family binds it.
    """
    if framework == "megatron-deepspeed":
        return None
    family = framework.split("-", maxsplit=1)[0]
    return family if family in FRAMEWORKS else None


def rules_for(
    workload: Workload, inside_domain: tuple[tuple[ScaleUpAxis, ...], ...] = ()
) -> tuple[Rule, ...]:
    """The rules that have something to say about a workload.

    `inside_domain` names further products of degrees that may not leave the scale-up domain, such as
    `(("tp", "cp"), ("ep",))`; tp and etp never may.
    """
    family = framework_family(workload.framework)
    strict = tuple(ScaleUpDomain(axes) for axes in inside_domain)
    own = FRAMEWORKS[family] if family is not None else ()
    return tuple(rule for rule in GENERAL + strict + own if rule.applies(workload))
