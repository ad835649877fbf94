"""Why a plan is as it is, and how two plans differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.analysis.neighbours import Neighbour
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.parts import (
    Renderable,
    bullets,
    count,
    grid,
    heading,
    line,
    percent,
    seconds,
)
from meshwright.planner.report.plan_view import (
    alternatives_view,
    binding_view,
    header,
    infeasible_view,
    status_view,
)
from meshwright.planner.report.prediction_view import layout_view, recompute_text, stages_text
from meshwright.planner.runs.prediction import planned_workload

_WAITING = ("pipeline_bubble", "host", "step_overhead", "scale")
_MOVING = ("pipeline_p2p", "dp_comm")


def explain_view(plan: Plan, changes: Sequence[Neighbour] = ()) -> list[Renderable]:
    """The proof, what holds the plan back, what bounds its speed, and what else there was."""
    shown = [*header(plan.inputs), line(""), *status_view(plan)]
    if plan.infeasible is not None:
        shown += infeasible_view(plan)
    if plan.layout is not None:
        shown += layout_view(plan.layout, plan.mapping)
    shown += binding_view(plan.binding)
    if plan.layout is not None and not plan.binding:
        shown += [
            heading("What holds the plan back"),
            line("No rule is at its limit: only the times decide."),
        ]
    reasons = bounds_in_words(plan)
    if reasons:
        shown += [heading("What bounds its speed"), bullets(reasons)]
    return [*shown, *neighbours_view(changes), *alternatives_view(plan)]


def neighbours_view(changes: Sequence[Neighbour]) -> list[Renderable]:
    """What each single change would cost; forbidden ones with the rule."""
    shown: list[Renderable] = []
    allowed = [one for one in changes if one.step_time_s is not None and one.slower_pct is not None]
    if allowed:
        rows = [
            [one.change, seconds(one.step_time_s or 0.0), f"{one.slower_pct:+.2f} %"]
            for one in allowed
        ]
        shown += [heading("What one change would cost"), grid(["change", "step time", ""], rows)]
    forbidden = [one for one in changes if one.broken is not None]
    if forbidden:
        shown += [
            heading("Changes that a rule forbids"),
            grid(["change", "rule"], _forbidden(forbidden), left=(0, 1)),
        ]
    return shown


def _forbidden(changes: Sequence[Neighbour]) -> list[list[str]]:
    return [[one.change, one.broken or ""] for one in changes]


def explain_document(plan: Plan, changes: Sequence[Neighbour]) -> dict[str, Any]:
    """What `explain --json` prints, without `schema`."""
    document = plan_document(plan)
    kept = ("status", "objective", "binding", "infeasible", "warnings", "alternatives")
    return {
        **{key: document[key] for key in kept},
        "bounds": bounds_in_words(plan),
        "changes": [vars(change) for change in changes],
    }


def bounds_in_words(plan: Plan) -> list[str]:
    """What the step's time goes into, the busiest level and the fullest stage, in sentences."""
    predicted = plan.predicted
    if predicted is None:
        return []
    whole = predicted.step_time_s
    parts = sorted(predicted.breakdown_s.items(), key=lambda item: -item[1])
    name, largest = parts[0]
    said = [
        f"{name.replace('_', ' ')} takes {percent(largest / whole)} of the step ({seconds(largest)})"
    ]
    for words, names in (
        ("waits and overheads", _WAITING),
        ("pipeline and gradient traffic", _MOVING),
    ):
        total = sum(predicted.breakdown_s.get(part, 0.0) for part in names)
        if total > 0.001 * whole:
            said.append(f"{words} take {percent(total / whole)} ({seconds(total)})")
    if predicted.level_traffic:
        busiest = max(predicted.level_traffic, key=lambda level: level.utilisation)
        said.append(
            f"{busiest.level}, the busiest fabric level, works {percent(busiest.utilisation)} of the step"
        )
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    peak, limit = predicted.memory_gib[fullest], usable_hbm_gib(planned_workload(plan.inputs))
    room = (
        f"{limit - peak:.1f} GiB free"
        if peak <= limit
        else f"{peak - limit:.1f} GiB over the limit"
    )
    said.append(f"stage {fullest} is the fullest: {peak:.1f} of {limit:.1f} usable GiB, {room}")
    return said


def comparison(plans: tuple[Plan, Plan]) -> dict[str, Any]:
    """The two plans' figures side by side, and the second over the first: plain data."""
    keys = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
    sides: list[dict[str, Any]] = []
    for plan in plans:
        predicted = plan.predicted
        figures = {key: None if predicted is None else getattr(predicted, key) for key in keys}
        peak = None if predicted is None else max(predicted.memory_gib)
        layout = None if plan.layout is None else plan.layout.model_dump(mode="json")
        sides.append({"status": plan.status, **figures, "peak_memory_gib": peak, "layout": layout})
    ratio = {
        key: sides[1][key] / sides[0][key] if sides[0][key] and sides[1][key] is not None else None
        for key in (*keys, "peak_memory_gib")
    }
    first, second = (plan.inputs.model_dump(mode="json") for plan in plans)
    return {
        "plans": sides,
        "second_over_first": ratio,
        "differing_inputs": sorted(k for k in first if first[k] != second[k]),
    }


def compare_view(names: tuple[str, str], plans: tuple[Plan, Plan]) -> list[Renderable]:
    """A table of what differs, figures first; equal choices are left out."""
    data = comparison(plans)
    shown: list[Renderable] = [
        line(("first:  ", "dim"), names[0]),
        line(("second: ", "dim"), names[1]),
    ]
    if data["differing_inputs"]:
        differing = ", ".join(data["differing_inputs"])
        shown.append(
            line(("the plans answer different questions: ", "bold yellow"), f"{differing} differ")
        )
    rows = [["status", plans[0].status, plans[1].status, ""]]
    for key, label in _FIGURES:
        one, two = (side[key] for side in data["plans"])
        ratio = data["second_over_first"][key]
        change = "" if ratio is None else f"{100 * (ratio - 1):+.2f} %"
        rows.append([label, _figure(key, one), _figure(key, two), change])
    rows += _part_rows(plans)
    rows += [row for row in _choice_rows(plans) if row[1] != row[2]]
    return [*shown, grid(["", "first", "second", "change"], rows)]


_FIGURES = (
    ("step_time_s", "step time"),
    ("tokens_per_s_per_gpu", "tokens/s per GPU"),
    ("tflops_per_gpu", "TFLOP/s per GPU"),
    ("mfu", "MFU"),
    ("peak_memory_gib", "peak memory, GiB"),
)


def _figure(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "step_time_s":
        return seconds(value)
    if key == "mfu":
        return percent(value)
    return count(value) if key == "tokens_per_s_per_gpu" else f"{value:.1f}"


def _part_rows(plans: tuple[Plan, Plan]) -> list[list[str]]:
    """Parts of the step that differ by at least 0.1 % of the first step, largest first."""
    one, two = (plan.predicted for plan in plans)
    if one is None or two is None:
        return []
    names = dict.fromkeys([*one.breakdown_s, *two.breakdown_s])
    changes = {
        name: two.breakdown_s.get(name, 0.0) - one.breakdown_s.get(name, 0.0) for name in names
    }
    shown = sorted(
        (n for n in names if abs(changes[n]) >= 0.001 * one.step_time_s),
        key=lambda n: -abs(changes[n]),
    )
    return [
        [
            f"  {name.replace('_', ' ')}",
            f"{one.breakdown_s.get(name, 0.0):.3f} s",
            f"{two.breakdown_s.get(name, 0.0):.3f} s",
            f"{changes[name]:+.3f} s",
        ]
        for name in shown
    ]


def _choice_rows(plans: tuple[Plan, Plan]) -> list[list[str]]:
    one, two = (plan.layout for plan in plans)
    if one is None or two is None:
        return []
    axes = (
        "tp",
        "cp",
        "pp",
        "dp",
        "ep",
        "etp",
        "vpp",
        "micro_batch",
        "num_micro_batches",
        "zero_stage",
        "sequence_parallel",
    )
    rows = [
        [name.replace("_", " "), str(getattr(one, name)), str(getattr(two, name)), ""]
        for name in axes
    ]
    rows.append(["recompute", recompute_text(one), recompute_text(two), ""])
    rows.append(["layers", stages_text(one.stages), stages_text(two.stages), ""])
    return rows
