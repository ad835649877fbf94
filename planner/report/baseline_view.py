"""A plan against what is run today: the speed-up first, then what each change brings and what to edit."""

from __future__ import annotations

from typing import Any

from meshwright.errors import InputError
from meshwright.planner.drawing.quantities import count, counted, percent, rounded_seconds
from meshwright.planner.plan.baseline_document import BaselineDoc, ScriptDiff
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.view import (
    Bullets,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    Words,
    decimals,
    line,
)

SHORTEST_GAIN = 0.0005
"""Single changes below this share of today's step are counted together."""
_SIGNED_SECONDS = Kind(lambda value: f"{value:+,.3f} s")
_PLAIN_SECONDS = Kind(lambda value: f"{value:,.3f} s")


_NOT_COMPARED = (
    "what is not read changes today's step, or may: take it out of the file where it does nothing to "
    "the speed, or say today's run in full (estimate FILE --from-launch -o run.yaml, then --baseline "
    "run.yaml); what follows compares with what was read"
)


def headline(plan: Plan) -> str:
    """`14.03 s against 18.71 s today: 1.33 x`, that today's is as good, or why they are not compared."""
    baseline, predicted = plan.baseline, plan.predicted
    assert baseline is not None
    assert predicted is not None
    today, planned = rounded_seconds(baseline.step_time_s), rounded_seconds(predicted.step_time_s)
    if baseline.speed_up is None:
        name, *others = baseline.unread
        more = f" and {len(others)} more are" if others else " is"
        return f"{planned} planned, not compared with today: {name}{more} not read"
    speed_up = f"{baseline.speed_up:.2f} x"
    if baseline.tokens_per_step != plan.inputs.global_batch * plan.inputs.seq_len:
        planned_rate = plan.inputs.global_batch * plan.inputs.seq_len / predicted.step_time_s
        rates = f"{count(planned_rate)} tokens/s against {count(baseline.tokens_per_s)} today"
        return f"{rates}: {speed_up}"
    if baseline.verdict == "breaks a rule":
        why = "breaks a rule" if baseline.fits else "does not fit into memory"
        return f"{today} today, {planned} planned: today's layout {why} as predicted"
    if baseline.verdict == "optimal":
        return f"{today} today, {planned} planned: today's layout is optimal"
    return f"{planned} against {today} today: {speed_up}"


def baseline_document(plan: Plan) -> dict[str, Any]:
    """What `compare --json` prints of a plan and a baseline, without `schema`."""
    document = plan_document(plan)
    return {
        name: document[name] for name in ("status", "objective", "layout", "execution", "baseline")
    }


def patch_of(plan: Plan) -> str:
    """The edits of the baseline's file as a unified diff. Raises InputError where there is none."""
    diff = None if plan.baseline is None else plan.baseline.diff
    if diff is not None and diff.patch:
        return diff.patch
    why = "the file is no launch script" if diff is None else diff.note or "nothing is to change"
    raise InputError(f"there is no patch to write: {why}", where="--output")


def baseline_view(plan: Plan) -> View:
    """The whole comparison; nothing without a baseline."""
    baseline = plan.baseline
    if baseline is None or plan.predicted is None:
        return []
    return [
        line(Words(headline(plan), "bold")),
        *_verdict(baseline),
        Facts(_costs(plan, baseline)),
        *_troubles(baseline),
        *_waterfall(baseline),
        *([] if baseline.diff is None else _diff(baseline.diff, baseline.file)),
    ]


def _verdict(baseline: BaselineDoc) -> View:
    if baseline.verdict == "faster":
        return []
    if baseline.verdict == "not compared":
        return [line(_NOT_COMPARED)]
    words = "no layout of the space is faster by more than 0.1 %"
    if baseline.verdict == "breaks a rule":
        words = "no layout that keeps every rule is faster; if today's runs as it is, keep it"
    elif baseline.verdict == "within error":
        words = "less than the cost model may be off by: measure both before you change anything"
    return [line(words)]


def _costs(plan: Plan, baseline: BaselineDoc) -> list[tuple[str, str]]:
    """Memory, days and dollars of both."""
    assert plan.predicted is not None
    today_gib, planned_gib = max(baseline.memory_gib), max(plan.predicted.memory_gib)
    change_gib = planned_gib - today_gib
    usable = f"of {baseline.usable_hbm_gib:.1f} without room for error"
    memory = (
        f"{today_gib:.1f} -> {planned_gib:.1f} GiB on the fullest GPU ({change_gib:+.1f}, {usable})"
    )
    rows = [("memory", memory)]
    cost = baseline.cost
    if cost is None:
        return rows
    saved_days = cost.today.days - cost.plan.days
    days = f"{cost.today.days:,.1f} -> {cost.plan.days:,.1f} for {cost.tokens:.3g} tokens"
    rows.append(("days", f"{days} ({-saved_days:+,.1f})"))
    if cost.today.dollars is not None and cost.plan.dollars is not None:
        dollars = f"{count(cost.today.dollars)} -> {count(cost.plan.dollars)}"
        saved = cost.today.dollars - cost.plan.dollars
        rows.append(
            ("dollars", f"{dollars} at {cost.gpu_hour_price:g} a GPU hour ({-saved:+,.0f})")
        )
    if cost.today.kwh is not None and cost.plan.kwh is not None:
        kwh = f"{count(cost.today.kwh)} -> {count(cost.plan.kwh)}"
        rows.append(("kWh", f"{kwh} ({cost.plan.kwh - cost.today.kwh:+,.0f}; GPUs alone)"))
    return rows


def _troubles(baseline: BaselineDoc) -> View:
    """What is wrong with today's layout, and what of its file was not read."""
    items = []
    if not baseline.fits:
        peak = f"{max(baseline.memory_gib):.1f} of {baseline.usable_hbm_gib:.1f} usable GiB"
        items.append(
            f"today's layout does not fit into memory as predicted: {peak}; priced as if it did"
        )
    items += [f"today's layout breaks {rule.rule}: {rule.words}" for rule in baseline.broken_rules]
    items += baseline.remarks
    return [Bullets(items)] if items else []


def _waterfall(baseline: BaselineDoc) -> View:
    if not baseline.waterfall:
        return []
    columns = [
        Column("change"),
        Column("alone", _SIGNED_SECONDS),
        Column("in turn", _SIGNED_SECONDS),
        Column("step", _PLAIN_SECONDS),
        Column("GiB", decimals(1)),
        Column("", absent=""),
    ]
    start_s = baseline.waterfall[0].step_time_s - baseline.waterfall[0].in_turn_s
    note = None if baseline.fits else "does not fit"
    rows: list[list[object]] = [["today", None, None, start_s, max(baseline.memory_gib), note]]
    for bar in baseline.waterfall:
        note = None if bar.fits else "does not fit yet"
        rows.append([bar.change, bar.alone_s, bar.in_turn_s, bar.step_time_s, bar.memory_gib, note])
    rows.append(["together", baseline.interactions_s, None, None, None, None])
    end_s = baseline.waterfall[-1].step_time_s
    total_s = baseline.difference_s
    rows.append(["plan", total_s, total_s, end_s, None, None])
    share = percent(baseline.difference_s / start_s)
    title = f"From today to the plan, change by change ({share})"
    return [Heading(title), Table(columns, rows)]


def _diff(diff: ScriptDiff, file: str) -> View:
    if not diff.edits:
        return [line(diff.note)] if diff.note else []
    columns = [Column("flag"), Column("today", absent="not set"), Column("plan", absent="take out")]
    rows = []
    for edit in diff.edits:
        today, planned = (_set(value) for value in (edit.before, edit.after))
        rows.append([edit.name, today, planned])
    title = f"{counted(len(diff.edits), 'edit')} of {file}"
    view: View = [Heading(title), Table(columns, rows)]
    return [*view, line(diff.note)] if diff.note else view


def _set(value: str | None) -> str | None:
    """A flag's values; a flag without any is set."""
    return "set" if value == "" else value
