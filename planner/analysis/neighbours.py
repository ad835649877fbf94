"""What one change to a plan would cost, or which rule forbids it: the reasons behind every choice.

A neighbour differs in one choice (or trades a factor of two between two degrees), has its layers split evenly
and the best of all mappings of the fabric. Only the plan itself is proven; these are prices, not proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cluster_specs.fabric import is_irregular
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.estimate import Stages, estimate_layout, stage_memory_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import schedule_name, schedule_named, traits
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import binding_framework, framework_of_stack, planned
from meshwright.planner.analysis.printed_space import PrintedSpace
from meshwright.planner.bounds.any_stages import suiting_stages
from meshwright.planner.bounds.matrices import matrices
from meshwright.planner.bounds.shard_groups import divides_into
from meshwright.planner.bounds.stages import ALL_LAYERS
from meshwright.planner.mapping.choice.pricing import seconds_in_best_order
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.runs.predicted import layout_document, layout_from_document

_NUMBERS = (
    "tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch", "zero_stage", "shard_groups", "optimizer_offload",
)  # fmt: skip
_TRADES = (("tp", "dp"), ("pp", "dp"), ("cp", "dp"), ("tp", "pp"))


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One changed choice, and what comes of it."""

    change: str
    """Such as `tp 8 -> 4, dp 16 -> 32`."""
    step_time_s: float | None
    """None where a rule forbids it."""
    slower_pct: float | None
    """Against the plan's step time; negative where faster."""
    broken: str | None
    """The first rule that is broken, in words."""
    settings: dict[str, int | str]
    """The choices that differ from the plan's, such as `{"tp": 4, "dp": 32}`."""
    outside: str | None = None
    """Why it is none of the layouts that the plan was chosen from, in words: it may then be faster."""


def neighbours(plan: Plan) -> list[Neighbour]:
    """Changes to a plan's layout, cheapest first, then those that a rule forbids; none without a layout."""
    if plan.layout is None or plan.predicted is None:
        return []
    workload, layout = workload_of_plan(plan), layout_from_document(plan.layout)
    space = PrintedSpace.of_plan(plan)
    priced = [
        replace(
            _neighbour(workload, change, changed, plan),
            outside=space.outside(layout_document(changed, ((0,),))),
        )
        for change, changed in layout_changes(layout, workload)
    ]
    return sorted(
        priced,
        key=lambda neighbour: (
            neighbour.step_time_s is None,
            neighbour.step_time_s or 0.0,
            neighbour.change,
        ),
    )


def layout_changes(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """(words, changed layout) of each single change; none that cannot even be written down (fractions, the
    same again)."""
    for up, down in (*_TRADES, *((b, a) for a, b in _TRADES)):
        have, give = int(getattr(layout, up)), int(getattr(layout, down))
        if give % 2 == 0:
            words = f"{up} {have} -> {2 * have}, {down} {give} -> {give // 2}"
            yield from _with(layout, workload, words, **{up: 2 * have, down: give // 2})
    scaled = ["micro_batch", "vpp"] + (["ep"] if workload.model.moe is not None else [])
    for name in scaled:
        now = int(getattr(layout, name))
        if name != "vpp" or int(layout.pp) > 1:
            yield from _with(layout, workload, f"{name} {now} -> {2 * now}", **{name: 2 * now})
        if now % 2 == 0:
            yield from _with(layout, workload, f"{name} {now} -> {now // 2}", **{name: now // 2})
    yield from _schedules(layout, workload)
    full = bool(int(layout.recompute) & Recompute.FULL)
    if int(layout.recompute):
        yield from _with(layout, workload, "recompute -> none", recompute=0, recompute_layers=0)
    if (
        not full
        or int(layout.recompute_layers) * int(layout.vpp) * int(layout.pp) < workload.model.layers
    ):
        every = {"recompute": int(Recompute.FULL), "recompute_layers": ALL_LAYERS}
        yield from _with(layout, workload, "recompute -> full, every layer", **every)
    yield from _groups(layout, workload)
    yield from _offloads(layout, workload)
    for stage in (0, 1, 2, 3):
        if abs(stage - int(layout.zero_stage)) == 1:
            yield from _with(
                layout, workload, f"zero_stage {layout.zero_stage} -> {stage}", zero_stage=stage
            )


def _groups(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Twice and half as many shard groups, where the framework has them and something is sharded."""
    record = framework_of_stack(workload.framework).shard_groups
    if record is None or int(layout.zero_stage) not in record.zero_stages:
        return
    now = int(layout.shard_groups)
    numbers = [2 * now] if now % 2 else [2 * now, now // 2]
    for number in numbers:
        if divides_into(number, layout.dp, layout.cp):
            yield from _with(
                layout, workload, f"shard_groups {now} -> {number}", shard_groups=number
            )


def _offloads(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """The next smaller and larger share of the optimizer's states in the host's memory."""
    record = framework_of_stack(workload.framework).optimizer_offload
    if record is None or int(layout.zero_stage) not in record.zero_stages:
        return
    now = int(layout.optimizer_offload)
    smaller = [share for share in (0, *record.percents) if share < now]
    larger = [share for share in record.percents if share > now]
    for share in (*smaller[-1:], *larger[:1]):
        yield from _with(
            layout, workload, f"optimizer_offload {now} -> {share} %", optimizer_offload=share
        )


def _schedules(layout: Layout, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Other schedules that the framework has, with the virtual stages of the plan or the fewest they take."""
    framework = binding_framework(workload.framework)
    now = schedule_name(int(layout.schedule), int(layout.vpp))
    if int(layout.pp) == 1 or framework is None:
        return
    for name in planned(framework.schedules):
        schedule = schedule_named(name)
        shape = traits(schedule)
        vpp = min(
            max(int(layout.vpp), shape.fewest_chunks), shape.most_chunks or int(layout.vpp) + 1
        )
        if schedule != int(layout.schedule):
            words = f"schedule {now} -> {name}" + (f", vpp {vpp}" if vpp != int(layout.vpp) else "")
            yield from _with(layout, workload, words, schedule=int(schedule), vpp=vpp)


def _with(
    layout: Layout, workload: Workload, words: str, **fields: Any
) -> Iterator[tuple[str, Layout]]:
    changed = replace(layout, **fields)
    sequences = int(changed.micro_batch) * int(changed.dp)
    replicas = int(changed.dp) * int(changed.cp)
    if replicas % int(changed.shard_groups):
        return
    if workload.global_batch % sequences or (
        int(changed.tp) * int(changed.cp) * int(changed.dp)
    ) % (int(changed.etp) * int(changed.ep)):
        return
    framework = framework_of_stack(workload.framework)
    in_sequence = int(changed.tp) > 1 and framework.sequence_parallel is not None
    yield (
        words,
        replace(
            changed,
            num_micro_batches=workload.global_batch // sequences,
            sequence_parallel=in_sequence if "tp" in fields else layout.sequence_parallel,
            vpp=1 if int(changed.pp) == 1 else changed.vpp,
            schedule=0 if int(changed.pp) == 1 else changed.schedule,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EvenPrice:
    """A layout with its layers split evenly, under the best of all mappings."""

    step_time_s: float | None
    """None where a rule forbids it."""
    memory_gib: float | None
    """Of the fullest GPU; None where the layers cannot be split."""
    broken: str | None
    """The first rule that is broken, in words."""


def _neighbour(workload: Workload, change: str, layout: Layout, plan: Plan) -> Neighbour:
    assert plan.predicted is not None
    assert plan.layout is not None
    price = price_evenly(workload, layout)
    slower = None
    if price.step_time_s is not None:
        slower = 100.0 * (price.step_time_s / plan.predicted.step_time_s - 1.0)
    return Neighbour(
        change=change,
        step_time_s=price.step_time_s,
        slower_pct=slower,
        broken=price.broken,
        settings=_settings_of(layout, layout_from_document(plan.layout)),
    )


def price_evenly(workload: Workload, layout: Layout) -> EvenPrice:
    """A layout's price and memory, its layers split evenly, under its best mapping.

    Parameters
    ----------
    workload
        What is trained; the layout's GPUs are the first of its cluster.
    layout
        One layout, in plain numbers.
    """
    stages = suiting_stages(workload, layout)
    if stages is None:
        chunks = int(layout.pp) * int(layout.vpp)
        words = f"pp x vpp = {chunks} virtual stages for {workload.model.layers} layers"
        return EvenPrice(step_time_s=None, memory_gib=None, broken=words)
    workload = workload.on(int(layout.gpus))
    memory_gib = tuple(float(gib) for gib in stage_memory_gib(workload, layout, stages))
    broken = _broken(workload, layout, stages, memory_gib)
    step_time_s = None
    if broken is None:
        step_time_s, broken = _best_mapping_s(workload, layout, stages)
    return EvenPrice(step_time_s=step_time_s, memory_gib=max(memory_gib), broken=broken)


def _best_mapping_s(
    workload: Workload, layout: Layout, stages: Stages
) -> tuple[float | None, str | None]:
    """Seconds under the best mapping, or why there is none."""
    if is_irregular(workload.cluster):
        step_time_s = seconds_in_best_order(workload, layout, stages)
        return step_time_s, None if step_time_s else "its groups do not fit the free nodes"
    sizes = level_factors(workload.cluster, workload.gpus).tolist()
    table = matrices(layout, sizes, inside=("tp",))
    if not len(table["tp"]):
        return None, f"tp {layout.tp} does not fit into the innermost level of the fabric"
    placement = placement_on(workload.cluster, layout, table)
    priced = estimate_layout(workload, layout, placement, stages)
    return float(np.min(priced.step_time_s)), None


def _settings_of(layout: Layout, before: Layout) -> dict[str, int | str]:
    """The choices of a layout that differ from those of another, by name."""
    changed: dict[str, int | str] = {}
    for name in _NUMBERS:
        value = int(getattr(layout, name))
        if value != int(getattr(before, name)):
            changed[name] = value
    if int(layout.recompute) != int(before.recompute):
        kind = "full" if int(layout.recompute) & Recompute.FULL else "selective"
        changed["recompute"] = kind if int(layout.recompute) else "none"
    return changed


def _broken(
    workload: Workload, layout: Layout, stages: Stages, memory_gib: tuple[float, ...]
) -> str | None:
    finished = FinishedPlan(
        workload=workload, layout=layout, stages=stages, memory_gib=memory_gib, spans={}
    )
    return next((f"{finding.rule}: {finding.words}" for finding in findings(finished)), None)
