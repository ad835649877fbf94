"""How two plans differ: their figures side by side, then parts of the step and choices that differ."""

from __future__ import annotations

from typing import Any

from meshwright.planner.plan.document import Plan
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.prediction_view import recompute_text, stages_text
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Cell,
    Column,
    Table,
    View,
    Words,
    decimals,
    line,
)
from meshwright.planner.runs.predicted import LayoutDoc

SMALLEST_CHANGE = 0.001
"""Parts of the step that change by less than this share of the first step are left out."""
_FIGURES = {
    "step_time_s": Column("step time", SECONDS),
    "tokens_per_s_per_gpu": Column("tokens/s per GPU", COUNT),
    "tflops_per_gpu": Column("TFLOP/s per GPU", decimals(1)),
    "mfu": Column("MFU", PERCENT),
    "peak_memory_gib": Column("peak memory, GiB", decimals(1)),
}
_IN_WORDS = ("recompute", "recompute_modules", "recompute_layers", "schedule", "stages")
"""Fields of a layout that are not compared as they stand."""


def comparison(plans: tuple[Plan, Plan]) -> dict[str, Any]:
    """The two plans' figures side by side, and the second over the first: plain data."""
    sides = [_side(plan) for plan in plans]
    ratios: dict[str, float | None] = {}
    for name in _FIGURES:
        first, second = (side[name] for side in sides)
        ratios[name] = second / first if first and second is not None else None
    inputs, other_inputs = (plan.inputs.model_dump(mode="json") for plan in plans)
    return {
        "plans": sides,
        "second_over_first": ratios,
        "differing_inputs": sorted(name for name in inputs if inputs[name] != other_inputs[name]),
    }


def _side(plan: Plan) -> dict[str, Any]:
    predicted, layout = plan.predicted, plan.layout
    figures: dict[str, float | None] = dict.fromkeys(_FIGURES)
    if predicted is not None:
        figures = {name: getattr(predicted, name, None) for name in _FIGURES}
        figures["peak_memory_gib"] = max(predicted.memory_gib)
    document = None if layout is None else layout.model_dump(mode="json")
    return {"status": plan.status, **figures, "layout": document}


def compare_view(names: tuple[str, str], plans: tuple[Plan, Plan]) -> View:
    """A table of what differs, figures first; equal choices are left out."""
    document = comparison(plans)
    view: View = [
        line(Words("first:  ", "dim"), names[0]),
        line(Words("second: ", "dim"), names[1]),
    ]
    if document["differing_inputs"]:
        warning = Words("the plans answer different questions: ", "bold yellow")
        view.append(line(warning, f"{', '.join(document['differing_inputs'])} differ"))
    columns = [
        Column(""),
        Column("first", NUMBER),
        Column("second", NUMBER),
        Column("change", NUMBER, absent=""),
    ]
    rows: list[list[str | Cell | None]] = [
        ["status", *(status_words(plan.status, plan.objective.gap) for plan in plans), None]
    ]
    for name, figure in _FIGURES.items():
        ratio = document["second_over_first"][name]
        change = None if ratio is None else f"{100 * (ratio - 1):+.2f} %"
        first, second = (figure.cell(side[name]) for side in document["plans"])
        rows.append([figure.title, first, second, change])
    return [*view, Table(columns, [*rows, *_part_rows(plans), *_choice_rows(plans)])]


def _part_rows(plans: tuple[Plan, Plan]) -> list[list[str | None]]:
    """Parts of the step that change, largest change first."""
    first, second = (plan.predicted for plan in plans)
    if first is None or second is None:
        return []
    rows = []
    for name in dict.fromkeys([*first.breakdown_s, *second.breakdown_s]):
        before_s = first.breakdown_s.get(name, 0.0)
        after_s = second.breakdown_s.get(name, 0.0)
        if abs(after_s - before_s) >= SMALLEST_CHANGE * first.step_time_s:
            rows.append((name, before_s, after_s))
    rows.sort(key=lambda row: -abs(row[2] - row[1]))
    return [
        [
            f"  {name.replace('_', ' ')}",
            f"{before_s:.3f} s",
            f"{after_s:.3f} s",
            f"{after_s - before_s:+.3f} s",
        ]
        for name, before_s, after_s in rows
    ]


def _choice_rows(plans: tuple[Plan, Plan]) -> list[list[str | None]]:
    """Choices of the layouts that differ."""
    first, second = (plan.layout for plan in plans)
    if first is None or second is None:
        return []
    before, after = _choices(first), _choices(second)
    return [
        [name, before[name], after[name], None] for name in before if before[name] != after[name]
    ]


def _choices(layout: LayoutDoc) -> dict[str, str]:
    """Every choice of a layout in words, by name."""
    plain = {
        name.replace("_", " "): str(getattr(layout, name))
        for name in LayoutDoc.model_fields
        if name not in _IN_WORDS
    }
    return plain | {
        "recompute": recompute_text(layout),
        "schedule": layout.schedule,
        "layers": stages_text(layout.stages),
    }
