"""Which pipeline schedules a framework runs, and in which shapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import AtLeast, Requires, When, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.pipeline.schedules import Schedule, schedule_name, schedule_named, traits
from meshwright.frameworks.catalog import RECORDS, planned, stack_named
from meshwright.frameworks.record import Framework


class ScheduleShape(Rule):
    """Every schedule has its own numbers of virtual stages and of micro-batches (`schedules.Traits`)."""

    name = "schedule-shape"
    unit = "conditions"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        codes = column(table, "schedule")
        pp, vpp, m = (column(table, name) for name in ("pp", "vpp", "num_micro_batches"))
        faults = ((codes != Schedule.ONE_F_ONE_B) & (pp == 1)).astype(np.int64)
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
        if not faults:
            return None
        return self.finding(
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
        return as_excess(~np.isin(column(table, "schedule"), list(codes)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        name = schedule_name(int(plan.layout.schedule), 1)
        if name in self.allowed:
            return None
        return self.finding(
            value=1,
            words=f"{self.framework.name} has no {name} schedule",
            remedy=f"Choose one of {', '.join(self.allowed)}, or a framework that has it "
            f"({', '.join(_frameworks_with(name)) or 'none of those known here'}).",
        )


def _frameworks_with(name: str) -> list[str]:
    return [record.name for record in RECORDS if name in planned(record.schedules)]


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
