"""Which pipeline schedules a framework runs, and in which shapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import IntArray, as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.pipeline.schedules import Schedule, schedule_name, schedule_named, traits
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS, planned, stack_named
from meshwright.frameworks.record import Framework


class ScheduleShape(Rule):
    """Every schedule has its own numbers of virtual stages and of micro-batches (`schedules.Traits`)."""

    name = "schedule-shape"
    unit = "conditions"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        codes = column(table, "schedule")
        pp, vpp, m = (column(table, name) for name in ("pp", "vpp", "num_micro_batches"))
        found = ((codes != Schedule.ONE_F_ONE_B) & (pp == 1)).astype(np.int64)
        for schedule in Schedule:
            mine, known = codes == schedule, traits(schedule)
            if not mine.any():
                continue
            most = known.most_chunks if known.most_chunks is not None else np.iinfo(np.int64).max
            found += mine & ((vpp < known.fewest_chunks) | (vpp > most))
            found += mine & (m < known.least_fill * pp)
            found += mine & known.pairs_of_ranks & ((pp % 2 > 0) | (m % 2 > 0))
        return as_excess(found)

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        schedule = Schedule(int(one.schedule))
        pp, vpp, m = int(one.pp), int(one.vpp), int(one.num_micro_batches)
        # Whether groups of micro-batches divide is another rule's (interleaved-micro-batches).
        broken = [words for words in traits(schedule).faults(pp, vpp, m) if "multiple" not in words]
        if schedule is not Schedule.ONE_F_ONE_B and pp == 1:
            broken.append(f"pp: 1, {traits(schedule).name} is a schedule of a pipeline")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words="; ".join(broken),
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


class TorchtitanFilledPipeline(Rule):
    """1F1B takes at least as many micro-batches as stages (`Schedule1F1B.__init__` in torch 2.13)."""

    name = "torchtitan-1f1b-micro-batches"
    unit = "micro-batches"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        plain = (column(table, "schedule") == Schedule.ONE_F_ONE_B) & (column(table, "vpp") == 1)
        missing = column(table, "pp") - column(table, "num_micro_batches")
        return as_excess(np.where(plain & (column(table, "pp") > 1), missing, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        pp, m = int(one.pp), int(one.num_micro_batches)
        if schedule_name(int(one.schedule), int(one.vpp)) != "1f1b" or m >= pp or pp == 1:
            return None
        return self.finding(
            value=m,
            limit=pp,
            words=f"1F1B with {m} micro-batches on {pp} stages",
            remedy=f"Give it at least {pp} micro-batches (lower dp or micro_batch), or pin schedule=gpipe.",
        )


class TorchtitanSplitBackward(Rule):
    """Schedules that split the backward pass refuse compiled layers (`_check_torch_compile_compatibility` in
    torch 2.13), which quantised training needs."""

    name = "torchtitan-split-backward"
    unit = "schedules"

    def applies(self, workload: Workload) -> bool:
        return workload.precision != "bf16" or stack_named(workload.framework).compiled

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(splits_backward(column(table, "schedule")) & self.applies(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        schedule = int(plan.layout.schedule)
        if not self.applies(plan.workload) or not traits(schedule).splits_backward:
            return None
        return self.finding(
            value=1,
            words=f"{traits(schedule).name} with compiled layers ({plan.workload.precision})",
            remedy="Train in bf16 without compilation, or choose 1f1b, interleaved-1f1b or breadth-first.",
        )


def splits_backward(codes: IntArray) -> NDArray[np.bool_]:
    """Which schedules run gradients of weights apart."""
    apart = [int(schedule) for schedule in Schedule if traits(schedule).splits_backward]
    return np.isin(codes, apart)


class TorchtitanSeveralChunks(Rule):
    """zb-h1 is torch's InterleavedZeroBubble: torchtitan gives it two or more virtual stages a rank."""

    name = "torchtitan-zero-bubble-chunks"
    unit = "virtual stages"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mine = column(table, "schedule") == Schedule.ZB_H1
        return as_excess(np.where(mine, 2 - column(table, "vpp"), 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if schedule_name(int(one.schedule), int(one.vpp)) != "zb-h1" or int(one.vpp) > 1:
            return None
        return self.finding(
            value=int(one.vpp),
            limit=2,
            words="zb-h1 with one virtual stage a rank",
            remedy="Set vpp to 2 or more.",
        )


TORCHTITAN_SCHEDULE_RULES: tuple[Rule, ...] = (
    TorchtitanFilledPipeline(),
    TorchtitanSplitBackward(),
    TorchtitanSeveralChunks(),
)
