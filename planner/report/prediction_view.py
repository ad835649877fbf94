"""The layout and the prediction of a plan or a run, as blocks of a view."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from meshwright.costmodel.execution_names import DEFAULT_MEMORY_RISK
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES
from meshwright.costmodel.rates import peak_memory_band
from meshwright.costmodel.records import memory_margin
from meshwright.costmodel.workload import Workload
from meshwright.errors import InputError
from meshwright.planner.drawing import count, counted, percent, ranges, rounded_seconds, seconds
from meshwright.planner.mixed.document import AnyPlan, MixedPlan, mixed_document
from meshwright.planner.plan.document import BaselineDoc, Mapping, MoreBlocksDoc, ScriptDiff
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.view import (
    BAR,
    BYTES,
    COUNT,
    NUMBER,
    PERCENT,
    Bullets,
    Column,
    Columns,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    Words,
    decimals,
    line,
    section,
    table,
)
from meshwright.planner.request.choices import EXPERT_DEGREES
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted

MOST_MEMORY_ROWS = 8
SMALLEST_SHARE = 0.0005
"""Parts of the step below this share are counted together."""
_PART_SECONDS = Kind(lambda part_s: seconds(part_s) if part_s > 0 else f"{part_s:.3f} s")


def layout_view(
    layout: LayoutDoc, mapping: Mapping | None, predicted: Predicted | None = None
) -> View:
    """Degrees, how they lie on the fabric, and the choices of the schedule.

    Parameters
    ----------
    layout
        Of a plan or a run.
    mapping
        How it lies on the fabric; None where that is not shown.
    predicted
        Of a plan, for what more blocks than needed bring.
    """
    degrees = {axis: int(getattr(layout, axis)) for axis in AXES}
    gpus = degrees["tp"] * degrees["cp"] * degrees["dp"] * degrees["pp"]
    product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    view: View = [
        Heading("Layout"),
        line(f"{product} = {count(gpus)} GPUs"),
        Facts(_choices(layout)),
    ]
    if mapping is None:
        return view
    if mapping.matrix and len(mapping.levels) > 1:
        view += [line(), _matrix(degrees, mapping)]
    if mapping.more_blocks is not None and predicted is not None:
        view.append(line(more_blocks_text(mapping.more_blocks, predicted.step_time_s)))
    order = Words("rank order, innermost first: ", "dim")
    return [*view, line(order, " ".join(mapping.order))]


def more_blocks_text(blocks_doc: MoreBlocksDoc, step_time_s: float) -> str:
    """What equal parts in more blocks than needed bring: the step on as few, and on these.

    Parameters
    ----------
    blocks_doc
        Blocks in use, and the fewest that would do.
    step_time_s
        Of the plan, above 0.
    """
    blocks = ", ".join(
        f"{count(n)} of {name} for {count(blocks_doc.fewest[name])}"
        for name, n in blocks_doc.used.items()
    )
    share = blocks_doc.step_time_s_on_fewest / step_time_s - 1.0
    on_fewest = f"{seconds(blocks_doc.step_time_s_on_fewest)}, {100 * share:+.2g} %"
    return f"more blocks than needed ({blocks}), in equal parts: on the fewest the step takes {on_fewest}"


def _matrix(degrees: dict[str, int], mapping: Mapping) -> Table:
    """How many members of a group lie inside one block of each level, beyond those inside the level below."""
    columns = [Column("axis"), Column("degree", COUNT)]
    columns += [Column(f"in {name}", NUMBER) for name in mapping.levels]
    rows = []
    for axis, degree in degrees.items():
        if axis in mapping.matrix:
            factors = [None if factor == 1 else factor for factor in mapping.matrix[axis]]
            rows.append([axis, degree, *factors])
    return Table(columns, rows)


def _choices(layout: LayoutDoc) -> list[tuple[str, str]]:
    sequences = counted(layout.micro_batch, "sequence")
    micro_batches = counted(layout.num_micro_batches, "micro-batch", "micro-batches")
    virtual = f", {layout.vpp} virtual stages a rank" if layout.vpp > 1 else ""
    experts = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in EXPERT_DEGREES)
    return [
        ("experts", experts if layout.expert_group > 1 else ""),
        ("micro-batch", f"{sequences} x {micro_batches} x dp {count(layout.dp)}"),
        ("schedule", layout.schedule + virtual if layout.pp > 1 else "no pipeline"),
        ("layers", stages_text(layout.stages)),
        ("recompute", recompute_text(layout)),
        ("ZeRO stage", sharding_text(layout)),
        ("sequence parallel", "yes" if layout.sequence_parallel else "no"),
    ]


def sharding_text(layout: LayoutDoc) -> str:
    """The ZeRO stage, the groups of replicas that shard by themselves and what is offloaded: `1 in 4 groups
    of 8, 50 % of the optimizer offloaded`.

    Parameters
    ----------
    layout
        Of a plan or a run.
    """
    words = str(layout.zero_stage)
    if layout.shard_groups > 1:
        ranks = layout.dp * layout.cp // layout.shard_groups
        words = f"{words} in {layout.shard_groups} groups of {ranks}"
    if layout.optimizer_offload:
        words = f"{words}, {layout.optimizer_offload} % of the optimizer offloaded"
    return words


def recompute_text(layout: LayoutDoc) -> str:
    """What is computed again in the backward pass.

    Parameters
    ----------
    layout
        Of a plan or a run; one without its stages does not say if every layer is meant.
    """
    if layout.recompute == "selective":
        return f"selective ({', '.join(layout.recompute_modules)})"
    if layout.recompute == "full":
        # What-if plans come without their stages: whether that is every layer is then not known.
        longest = max((max(rank) for rank in layout.stages), default=None)
        if longest is not None and layout.recompute_layers >= longest:
            return "full, every layer"
        parts = "virtual stage" if layout.vpp > 1 else "stage"
        words = f"full, {counted(layout.recompute_layers, 'layer')}"
        return words if layout.pp == 1 else f"{words} of each {parts}"
    return "none"


def stages_text(stages: list[list[int]]) -> str:
    """Layers of every pipeline rank; equal neighbours are counted: `rank 0: 7; ranks 1-15: 8`.

    Parameters
    ----------
    stages
        Layers of each [pipeline rank][virtual stage].
    """
    if len(stages) == 1 and len(stages[0]) == 1:
        return f"{stages[0][0]}, all on one stage"
    if len({tuple(rank) for rank in stages}) == 1:
        return f"{'+'.join(map(str, stages[0]))} on each of {count(len(stages))} ranks"
    parts = []
    for sizes, members in groupby(range(len(stages)), key=lambda rank: tuple(stages[rank])):
        ranks = list(members)
        name = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{name} {ranges(ranks)}: {'+'.join(map(str, sizes))}")
    return "; ".join(parts)


def prediction_view(predicted: Predicted, workload: Workload) -> View:
    """Rates, the step's breakdown, memory and traffic.

    Parameters
    ----------
    predicted
        What the cost model expects.
    workload
        That it is of.
    """
    step_s, band = predicted.step_time_s, predicted.error_band
    per_gpu = count(predicted.tokens_per_s_per_gpu)
    tokens_per_s = count(workload.tokens_per_step / step_s)
    low, high = (seconds(step_s * edge) for edge in (band.low, band.high))
    mfu = f"MFU {percent(predicted.mfu)}"
    rows = [
        ("step time", seconds(step_s)),
        ("throughput", f"{tokens_per_s} tokens/s, {per_gpu} tokens/s per GPU"),
        ("compute", f"{predicted.tflops_per_gpu:.1f} TFLOP/s per GPU, {mfu}"),
        ("likely", f"{low} to {high}, {band_text(predicted)}"),
    ]
    title = "Traffic that one GPU sends across each fabric level in a step"
    return [
        Heading("Predicted"),
        Facts(rows),
        *breakdown_view(predicted.breakdown_s),
        *_memory(predicted, workload),
        *section(title, predicted.level_traffic, _TRAFFIC),
    ]


def band_text(predicted: Predicted) -> str:
    """What lay in the band of a prediction: `as 90 % of 129 measured steps on h100 with megatron`.

    Parameters
    ----------
    predicted
        What the cost model expects.
    """
    band = predicted.error_band
    words = {
        "own runs": f"by {band.basis}",
        "optima": f"as 90 %: {band.basis}",
        "measured runs": f"as 90 % of {count(band.rows)} measured steps on {band.basis}",
    }
    return words[predicted.band_of]


_TRAFFIC: Columns = {
    "level": "level",
    "bytes_per_step": Column("mean GPU", BYTES),
    "most_bytes_per_step": Column(
        "fullest", BYTES, value=lambda level: level.most_bytes_per_step or level.bytes_per_step
    ),
    "busy_s": "links busy",
    "utilisation": Column("of step", PERCENT),
    "mean_s": "mean busy",
}


def breakdown_view(breakdown_s: dict[str, float]) -> View:
    """Where the seconds of a step go, by parts that add up to it; the largest first.

    Parameters
    ----------
    breakdown_s
        Seconds by the name of the part; parts below 0.05 % of the step are put together.
    """
    step_s = sum(breakdown_s.values())
    parts = [
        (name.replace("_", " "), part_s)
        for name, part_s in breakdown_s.items()
        if abs(part_s) >= SMALLEST_SHARE * step_s
    ]
    parts.sort(key=lambda part: -part[1])
    rest_s = step_s - sum(part_s for _, part_s in parts)
    if rest_s > SMALLEST_SHARE * step_s / 10:
        parts.append(("everything else", rest_s))
    columns = [Column("part"), Column("time", _PART_SECONDS), Column("share", PERCENT)]
    rows = [[name, part_s, part_s / step_s, part_s / step_s] for name, part_s in parts]
    title = Heading("Where the step's time goes")
    return [title, Table([*columns, Column("", BAR)], rows)]


def _memory(predicted: Predicted, workload: Workload) -> View:
    """GiB of each pipeline stage against what a GPU has to give; many stages are put together."""
    limit_gib, hbm_gib = usable_hbm_gib(workload), workload.cluster.device.hbm_gib
    columns = [
        Column("stage"),
        Column("peak", Kind("{:.1f} GiB".format)),
        Column("of usable", PERCENT),
        Column("", BAR),
    ]
    rows = [
        [stages, gib, gib / limit_gib, gib / limit_gib]
        for stages, gib in memory_groups(predicted.memory_gib)
    ]
    view: View = [
        Heading(f"Memory per GPU: {limit_gib:.1f} GiB usable of {hbm_gib:g} GiB HBM"),
        Table(columns, rows),
    ]
    if workload.memory_margin == 1.0:
        margin = memory_margin(DEFAULT_MEMORY_RISK, peak_memory_band(workload))
        plans_gib = usable_hbm_gib(replace(workload, memory_margin=margin))
        words = f"no room is kept for errors of the prediction; a plan fills {plans_gib:.1f} GiB at most"
        view.append(line(f"{words} (--memory-risk {DEFAULT_MEMORY_RISK:g})"))
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    if fullest < len(predicted.memory_parts_gib):
        words = _memory_parts(predicted, fullest)
        view.append(line(Words(f"stage {fullest} holds (GiB): ", "dim"), words))
    if predicted.host_memory_gib:
        on_host = f"{predicted.host_memory_gib:.0f} GiB of what is offloaded"
        view.append(line(f"the host of a node holds {on_host}"))
    over_gib = predicted.memory_gib[fullest] - limit_gib
    if over_gib > 0:
        words = f"stage {fullest} is {over_gib:.1f} GiB over the limit"
        view.append(line(Words(words, "bold red")))
    return view


def _memory_parts(predicted: Predicted, stage: int) -> str:
    parts = sorted(predicted.memory_parts_gib[stage].items(), key=lambda part: -part[1])
    words = ", ".join(f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in parts if gib >= 0.05)
    if predicted.memory_context_gib is not None:
        words += f"; outside the allocator: context {predicted.memory_context_gib:.1f}"
    return words


def memory_parts_view(predicted: Predicted, workload: Workload) -> View:
    """GiB of each pipeline stage part by part, with the share that they take of what may be used.

    Parameters
    ----------
    predicted
        What the cost model expects.
    workload
        That it is of.
    """
    limit_gib, gib = usable_hbm_gib(workload), decimals(1)
    groups = _few_groups(predicted.memory_gib)
    fullest = [max(group, key=lambda stage: predicted.memory_gib[stage]) for group in groups]
    parts = predicted.memory_parts_gib
    listed = [parts[stage] for stage in fullest] if parts else []
    names = {name: None for row in listed for name, part_gib in row.items() if part_gib >= 0.05}
    rows = [
        {
            "stage": ranges(group),
            **(parts[stage] if parts else {}),
            "peak": predicted.memory_gib[stage],
            "share": predicted.memory_gib[stage] / limit_gib,
        }
        for group, stage in zip(groups, fullest, strict=True)
    ]
    columns: Columns = {
        "stage": "stage",
        **{name: Column(name.replace("_", " "), gib) for name in names},
        "peak": Column("peak", gib, unit="GiB"),
        "share": Column("of usable", PERCENT),
    }
    context_gib = predicted.memory_context_gib
    outside = [] if context_gib is None else [f"context {context_gib:.1f} outside the allocator"]
    host_gib = predicted.host_memory_gib
    hosts = [f"{host_gib:.0f} on the host of a node"] if host_gib else []
    notes = [*outside, *hosts]
    return [table(rows, columns), *([line(f"GiB; {'; '.join(notes)}")] if notes else [])]


def memory_groups(memory_gib: list[float]) -> list[tuple[str, float]]:
    """(stages, GiB of the fullest): neighbours that print alike together, coarser until the rows are few.

    Parameters
    ----------
    memory_gib
        Of the fullest GPU of each pipeline rank.
    """
    groups = _few_groups(memory_gib)
    return [(ranges(group), max(memory_gib[stage] for stage in group)) for group in groups]


def _few_groups(memory_gib: list[float]) -> list[list[int]]:
    tolerance = 0.05
    while True:
        groups = _alike(memory_gib, tolerance)
        if len(groups) <= MOST_MEMORY_ROWS:
            return groups
        tolerance *= 2


def _alike(memory_gib: list[float], tolerance: float) -> list[list[int]]:
    """Stages in runs whose figures lie within a tolerance of each other."""
    groups: list[list[int]] = []
    for stage, gib in enumerate(memory_gib):
        values = [gib, *(memory_gib[member] for member in groups[-1])] if groups else []
        if groups and max(values) - min(values) <= tolerance:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


# A plan against what is run today: the speed-up first, then what each change brings and what to edit.


_SIGNED_SECONDS = Kind("{:+,.3f} s".format)
_PLAIN_SECONDS = Kind("{:,.3f} s".format)


_NOT_COMPARED = (
    "what is not read changes today's step, or may: take it out of the file where it does nothing to "
    "the speed, or say today's run in full (estimate FILE --from-launch -o run.yaml, then --baseline "
    "run.yaml); what follows compares with what was read"
)


def headline(plan: AnyPlan) -> str:
    """`14.03 s against 18.71 s today: 1.33 x`, that today's is as good, or why they are not compared.

    Parameters
    ----------
    plan
        With a baseline and a prediction.
    """
    baseline, predicted = plan.baseline, plan.predicted
    assert baseline is not None
    assert predicted is not None
    today, planned = rounded_seconds(baseline.step_time_s), rounded_seconds(predicted.step_time_s)
    if baseline.speed_up is None:
        name, *further = baseline.unread
        verb = f" and {len(further)} more are" if further else " is"
        return f"{planned} planned, not compared with today: {name}{verb} not read"
    speed_up = f"{baseline.speed_up:.2f} x"
    if baseline.tokens_per_step != plan.inputs.tokens_per_step:
        planned_rate = plan.inputs.tokens_per_step / predicted.step_time_s
        rates = f"{count(planned_rate)} tokens/s against {count(baseline.tokens_per_s)} today"
        return f"{rates}: {speed_up}"
    if baseline.verdict == "breaks a rule":
        why = "breaks a rule" if baseline.fits else "does not fit into memory"
        return f"{today} today, {planned} planned: today's layout {why} as predicted"
    if baseline.verdict == "optimal":
        return f"{today} today, {planned} planned: today's layout is optimal"
    if baseline.verdict == "no faster":
        return f"{today} today, {planned} planned: keep today's layout"
    return f"{planned} against {today} today: {speed_up}"


def baseline_document(plan: AnyPlan) -> dict[str, Any]:
    """What `compare --json` prints of a plan and a baseline, without `schema`."""
    document = mixed_document(plan) if isinstance(plan, MixedPlan) else plan_document(plan)
    return {
        name: document[name] for name in ("status", "objective", "layout", "execution", "baseline")
    }


def patch_of(plan: AnyPlan) -> str:
    """The edits of the baseline's file as a unified diff. Raises InputError where there is none."""
    diff = None if plan.baseline is None else plan.baseline.diff
    if diff is not None and diff.patch:
        return diff.patch
    why = "the file is no launch script" if diff is None else diff.note or "nothing is to change"
    raise InputError(f"there is no patch to write: {why}", where="--output")


def baseline_view(plan: AnyPlan) -> View:
    """The whole comparison; nothing without a baseline."""
    baseline = plan.baseline
    if baseline is None or plan.predicted is None:
        return []
    # What is wrong with today's layout, and what of its file was not read.
    items = [f"today's layout breaks {rule.rule}: {rule.words}" for rule in baseline.broken_rules]
    items += baseline.remarks
    if not baseline.fits:
        peak = f"{max(baseline.memory_gib):.1f} of {baseline.usable_hbm_gib:.1f} usable GiB"
        words = f"today's layout does not fit into memory as predicted: {peak}; priced as if it did"
        items.insert(0, words)
    return [
        line(Words(headline(plan), "bold")),
        *_verdict(baseline),
        Facts(_costs(plan, baseline)),
        *([Bullets(items)] if items else []),
        *_waterfall(baseline),
        *([] if baseline.diff is None else _diff(baseline.diff, baseline.file)),
    ]


def against_today(plan: AnyPlan) -> View:
    """The comparison under a heading, behind a screen that begins with the headline."""
    view = baseline_view(plan)
    return [Heading("Against today"), *view[1:]] if view else []


def _verdict(baseline: BaselineDoc) -> View:
    if baseline.verdict == "faster":
        return []
    if baseline.verdict == "not compared":
        return [line(_NOT_COMPARED)]
    words = "no layout of the space is faster by more than 0.1 %"
    if baseline.verdict == "breaks a rule":
        words = "no layout that keeps every rule is faster; if today's runs as it is, keep it"
    elif baseline.verdict == "no faster":
        words = (
            "the plan may not take today's layout, or its search ended before it: today's has other GPUs "
            "or another batch, is pinned or forbidden away, or leaves less memory for errors than a plan "
            "must (--memory-risk 0.5 asks for none)"
        )
    elif baseline.verdict == "within error":
        words = "less than the cost model may be off by: measure both before you change anything"
    return [line(words)]


def _costs(plan: AnyPlan, baseline: BaselineDoc) -> list[tuple[str, str]]:
    """Memory, days and dollars of both."""
    today_gib, planned_gib = max(baseline.memory_gib), plan.figures()["peak_memory_gib"]
    change = f"{planned_gib - today_gib:+.1f}"
    usable = f"of {baseline.usable_hbm_gib:.1f} without room for error"
    memory = f"{today_gib:.1f} -> {planned_gib:.1f} GiB on the fullest GPU ({change}, {usable})"
    rows = [("memory", memory)]
    cost = baseline.cost
    if cost is None:
        return rows
    today, planned = cost.today, cost.plan
    days = f"{today.days:,.1f} -> {planned.days:,.1f} for {cost.tokens:.3g} tokens"
    rows.append(("days", f"{days} ({planned.days - today.days:+,.1f})"))
    if today.dollars is not None and planned.dollars is not None:
        dollars = f"{count(today.dollars)} -> {count(planned.dollars)}"
        difference = f"{planned.dollars - today.dollars:+,.0f}"
        rows.append(("dollars", f"{dollars} at {cost.gpu_hour_price:g} a GPU hour ({difference})"))
    if today.kwh is not None and planned.kwh is not None:
        kwh = f"{count(today.kwh)} -> {count(planned.kwh)}"
        rows.append(("kWh", f"{kwh} ({planned.kwh - today.kwh:+,.0f}; GPUs alone)"))
    return rows


def _waterfall(baseline: BaselineDoc) -> View:
    bars = baseline.waterfall
    if not bars:
        return []
    start_s = bars[0].step_time_s - bars[0].in_turn_s
    total_s, peak_gib = baseline.difference_s, max(baseline.memory_gib)
    rows = [
        {"change": "today", "step_time_s": start_s, "memory_gib": peak_gib, "fits": baseline.fits},
        *map(vars, bars),
        {"change": "together", "alone_s": baseline.interactions_s},
        {
            "change": "plan",
            "alone_s": total_s,
            "in_turn_s": total_s,
            "step_time_s": bars[-1].step_time_s,
        },
    ]
    title = f"From today to the plan, change by change ({percent(total_s / start_s)})"
    return section(title, rows, _WATERFALL)


def _fit_words(row: dict[str, Any]) -> str:
    if row.get("fits", True):
        return ""
    return "does not fit" if row["change"] == "today" else "does not fit yet"


_WATERFALL: Columns = {
    "change": "change",
    "alone_s": Column("alone", _SIGNED_SECONDS),
    "in_turn_s": Column("in turn", _SIGNED_SECONDS),
    "step_time_s": Column("step", _PLAIN_SECONDS),
    "memory_gib": Column("GiB", decimals(1)),
    "fits": Column("", value=_fit_words),
}


def _diff(diff: ScriptDiff, file: str) -> View:
    columns: Columns = {
        "name": "flag",
        "before": Column("today", absent="not set", value=lambda edit: _set(edit.before)),
        "after": Column("plan", absent="take out", value=lambda edit: _set(edit.after)),
    }
    note = [line(diff.note)] if diff.note else []
    return [*section(f"{counted(len(diff.edits), 'edit')} of {file}", diff.edits, columns), *note]


def _set(value: str | None) -> str | None:
    """A flag's values; a flag without any is set."""
    return "set" if value == "" else value
