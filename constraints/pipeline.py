"""The pipeline split: every virtual stage holds at least one layer, but for the ends of ranks in step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import (
    AtLeast,
    AtMost,
    Divides,
    Finding,
    FinishedPlan,
    LayoutTable,
    Requires,
    Rule,
    When,
    as_excess,
    column,
    of,
)
from meshwright.costmodel.layout import Ints, is_among
from meshwright.costmodel.schedules import (
    Schedule,
    has_trait,
    schedule_name,
    schedule_named,
    traits,
)
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS, framework_of_stack, planned, stack_named
from meshwright.frameworks.record import Framework


def may_have_empty_ends(workload: Workload) -> bool:
    """Whether the first chunk may hold the embedding alone, and the last one the head alone.

    Ranks in step need it to be even: Llama 3's 405B has 126 layers for it (arXiv 2407.21783, section 3.3.2),
    and Megatron-Bridge runs DeepSeek-V3 as `Et|(tt|)*30mL`. A hybrid pattern has no words for it.

    Parameters
    ----------
    workload
        Its framework must take any split.
    """
    is_pattern = workload.model.hybrid_pattern is not None
    return framework_of_stack(workload.framework).uneven_stages and not is_pattern


class LayersByStages(Rule):
    """pp vpp <= layers, 2 more where ends may be empty. On a finished plan: pp ranks of vpp chunks
    with all layers, none empty but these, none that begins with a layer that reuses what an earlier one made.

    Where ranks with several virtual stages are in step, the first chunk of the model may hold the embedding
    alone, and the last one the head.
    """

    name = "layers-by-stages"
    unit = "layers"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model = table.workload.model
        pp, vpp = column(table, "pp"), column(table, "vpp")
        empty = 2 * _has_empty_ends(table.workload, pp, vpp, column(table, "schedule"))
        return as_excess(pp * vpp - model.most_stages - empty)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layers = plan.workload.model.layers
        pp = int(plan.layout.pp)
        vpp = int(plan.layout.vpp)
        chunks = [count for rank in plan.stages for count in rank]
        empty_ends = _has_empty_ends(plan.workload, pp, vpp, plan.layout.schedule)
        inner = chunks[1:-1] if empty_ends else chunks
        lengths = sorted({len(rank) for rank in plan.stages})
        if len(plan.stages) != pp or lengths != [vpp]:
            value, limit = len(chunks), pp * vpp
            shape = f"{len(plan.stages)} ranks with {lengths} chunks"
            words = f"the stages are {shape}, not pp {pp} x vpp {vpp}"
        elif min(inner, default=1) < 1 or min(chunks) < 0:
            value, limit = len(chunks), layers
            words = f"pp {pp} x vpp {vpp} leaves a virtual stage without a layer"
        elif sum(chunks) != layers:
            value, limit = sum(chunks), layers
            words = f"the stages hold {sum(chunks)} layers, the model has {layers}"
        else:
            return self._check_begins(plan)
        return self.finding(
            value=value,
            limit=limit,
            words=words,
            remedy=f"Give each of the pp x vpp stages at least one of the {layers} layers; "
            "lower pp or vpp.",
        )

    def _check_begins(self, plan: FinishedPlan) -> Finding | None:
        """What layers reuse of an earlier one is made in their own stage.

        Read from the order of layers, not from the `stage_begins` that searches go by.
        """
        order, begin = plan.workload.model.attention_order or "", 0
        for chunk in (size for level in zip(*plan.stages, strict=True) for size in level):
            inside = order[begin : begin + chunk]
            for layer, letter in enumerate(inside):
                if letter.islower() and letter.upper() not in inside[:layer]:
                    return self.finding(
                        value=begin + layer,
                        limit=begin + layer - 1,
                        words=f"layer {begin + layer} reuses what a layer of an earlier stage made",
                        remedy="Let each stage begin ahead of the layer that makes what it reuses "
                        "(attention_order).",
                    )
            begin += chunk
        return None


def _has_empty_ends(workload: Workload, pp: Ints, vpp: Ints, schedule: Ints) -> NDArray[np.bool_]:
    """Which pipelines may have them: those whose ranks are in step."""
    several = (np.asarray(pp) > 1) & (np.asarray(vpp) > 1)
    return several & has_trait(schedule, "in_step") & may_have_empty_ends(workload)


# The interleaved schedule: when it exists, and which micro-batch counts it takes.


IN_GROUPS = tuple(int(schedule) for schedule in Schedule if traits(schedule).in_groups)
"""Schedules whose micro-batches go round in groups of pp."""

INTERLEAVING_NEEDS_PIPELINE = AtMost(
    name="vpp-needs-pp",
    sentence="vpp <= 1 where pp = 1",
    unit="virtual stages",
    when=(When("pp", most=1),),
    value=of("vpp"),
    words="vpp {vpp} with a single pipeline stage",
    remedy="Set vpp to 1, or raise pp to 2 or more.",
)
"""Megatron (core 0.19.2, training/arguments.py) refuses it. torchtitan and DeepSpeed build no pipeline at
pp 1, so the plan would not be what runs."""

INTERLEAVED_MICRO_BATCHES = Divides(
    name="interleaved-micro-batches",
    sentence="num_micro_batches mod pp = 0 where vpp > 1, for interleaved 1F1B and ZB-H1",
    unit="micro-batches left over",
    when=(When("vpp", least=2), When("schedule", among=IN_GROUPS)),
    number=of("num_micro_batches"),
    by=of("pp"),
    words="the interleaved schedule cannot run {number} micro-batches on {pp} stages",
    remedy="Make the micro-batches a multiple of {pp} (change dp or micro_batch), or set vpp to 1.",
)
"""Micro-batches go round in groups; a last, smaller group must still fill the pipeline. With groups of pp,
the default, that leaves multiples of pp only (`forward_backward_pipelining_with_interleaving` in
megatron-core 0.19, schedules.py). PyTorch's ScheduleInterleaved1F1B, which torchtitan uses, also takes
larger rounds of equal size (6 on 4 stages; torch 2.13, distributed/pipelining/schedules.py): left out by
choice, the cost model prices rounds of pp."""


# Which pipeline schedules a framework runs, and in which shapes.


class ScheduleShape(Rule):
    """Every schedule has its own numbers of virtual stages and of micro-batches (`schedules.Traits`)."""

    name = "schedule-shape"
    unit = "conditions"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        codes = column(table, "schedule")
        pp, vpp = column(table, "pp"), column(table, "vpp")
        m = column(table, "num_micro_batches")
        faults = ((codes != int(Schedule.ONE_F_ONE_B)) & (pp == 1)).astype(np.int64)
        for schedule in Schedule:
            chosen = codes == schedule
            if not chosen.any():
                continue
            shape = traits(schedule)
            faults += chosen & (vpp < shape.fewest_chunks)
            if shape.most_chunks is not None:
                faults += chosen & (vpp > shape.most_chunks)
            faults += chosen & (m < shape.least_fill * pp)
            if shape.pairs_of_ranks:
                faults += chosen & ((pp % 2 > 0) | (m % 2 > 0))
        return as_excess(faults)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        schedule = Schedule(int(layout.schedule))
        pp, vpp, m = int(layout.pp), int(layout.vpp), int(layout.num_micro_batches)
        # Whether groups of micro-batches divide is another rule's (interleaved-micro-batches).
        faults = [words for words in traits(schedule).faults(pp, vpp, m) if "multiple" not in words]
        if schedule is not Schedule.ONE_F_ONE_B and pp == 1:
            faults.append(f"pp: 1, {traits(schedule).name} is a schedule of a pipeline")
        return self.over(
            value=len(faults),
            words="; ".join(faults),
            remedy="Change the named degree, or choose another schedule (--pin schedule=1f1b).",
        )


class AllowedSchedules(Rule):
    """The schedule is one that the framework has."""

    unit = "schedules"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-schedule"
        self.framework = framework
        self.allowed = planned(framework.schedules)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        codes = {int(schedule_named(name)) for name in self.allowed}
        return as_excess(~is_among(column(table, "schedule"), codes))

    def check(self, plan: FinishedPlan) -> Finding | None:
        name = schedule_name(int(plan.layout.schedule), 1)
        if name in self.allowed:
            return None
        able = [record.name for record in RECORDS if name in planned(record.schedules)]
        return self.finding(
            value=1,
            words=f"{self.framework.name} has no {name} schedule",
            remedy=f"Choose one of {', '.join(self.allowed)}, or a framework that has it "
            f"({', '.join(able) or 'none of those known here'}).",
        )


WHOLE_BACKWARD = tuple(
    int(schedule) for schedule in Schedule if not traits(schedule).splits_backward
)
"""Schedules that do not run the gradients of weights apart."""

TORCHTITAN_FILLED_PIPELINE = AtLeast(
    name="torchtitan-1f1b-micro-batches",
    sentence="num_micro_batches >= pp under 1F1B",
    unit="micro-batches",
    when=(
        When("schedule", among=(Schedule.ONE_F_ONE_B,)),
        When("vpp", most=1),
        When("pp", least=2),
    ),
    value=of("num_micro_batches"),
    limit=of("pp"),
    words="1F1B with {value} micro-batches on {pp} stages",
    remedy="Give it at least {pp} micro-batches (lower dp or micro_batch), or pin schedule=gpipe.",
)
"""`Schedule1F1B.__init__` in torch 2.13."""

TORCHTITAN_SPLIT_BACKWARD = Requires(
    name="torchtitan-split-backward",
    sentence="the backward pass is in one piece where layers are compiled, as quantised training needs",
    unit="schedules",
    binds=lambda work: work.precision != "bf16" or stack_named(work.framework).compiled,
    needs=When("schedule", among=WHOLE_BACKWARD),
    words="{schedule} with compiled layers ({precision})",
    remedy="Train in bf16 without compilation, or choose 1f1b, interleaved-1f1b or breadth-first.",
)
"""`_check_torch_compile_compatibility` in torch 2.13."""

TORCHTITAN_SEVERAL_CHUNKS = AtLeast(
    name="torchtitan-zero-bubble-chunks",
    sentence="vpp >= 2 under zb-h1",
    unit="virtual stages",
    when=(When("schedule", among=(Schedule.ZB_H1,)),),
    value=of("vpp"),
    limit=of(number=2),
    words="{schedule} with one virtual stage a rank",
    remedy="Set vpp to 2 or more.",
)
"""zb-h1 is torch's InterleavedZeroBubble: torchtitan gives it two or more virtual stages a rank."""

TORCHTITAN_SCHEDULE_RULES: tuple[Rule, ...] = (
    TORCHTITAN_FILLED_PIPELINE,
    TORCHTITAN_SPLIT_BACKWARD,
    TORCHTITAN_SEVERAL_CHUNKS,
)
