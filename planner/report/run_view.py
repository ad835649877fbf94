"""One priced run, and predicted against measured over many runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from meshwright.planner.report.parts import (
    Renderable,
    bar,
    count,
    facts,
    grid,
    heading,
    line,
    seconds,
)
from meshwright.planner.report.prediction_view import layout_view, prediction_view
from meshwright.planner.runs.predicted import layout_document
from meshwright.planner.runs.prediction import PricedRun, predicted_document
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.validation import KINDS, ScoredRow, ValidationReport

MOST_ROWS = 12
"""Rows of a validation that are shown unless all are asked for: the worst ones."""


def run_view(priced: PricedRun) -> list[Renderable]:
    """A run's layout and prices, measured beside predicted where both are known."""
    run, found = priced.run, priced.found
    work = run.workload
    cluster = work.cluster
    batch = f"{count(work.global_batch)} sequences x {count(work.seq_len)} tokens"
    rows = [
        ("run", run.id),
        ("model", work.model.name),
        ("cluster", f"{cluster.name}: {count(work.gpus)} GPUs, {cluster.device.name}"),
        ("batch", batch),
        ("training", f"{work.precision}, {work.optimizer}, {work.framework}"),
    ]
    shown: list[Renderable] = [facts(rows)]
    shown += layout_view(layout_document(run.layout, found.stages), None)
    predicted = predicted_document(work, found)
    shown += prediction_view(predicted, work)
    if run.measured is not None:
        shown += _measured(run, predicted.step_time_s, max(predicted.memory_gib))
    return shown


def _measured(run: Run, step_time_s: float, memory_gib: float) -> list[Renderable]:
    assert run.measured is not None
    measured = run.measured
    rows = [
        [
            "step time",
            seconds(step_time_s),
            seconds(measured.step_time_s),
            _error(step_time_s, measured.step_time_s),
        ]
    ]
    if measured.memory_gib is not None:
        known = measured.memory_gib
        rows.append(
            ["memory", f"{memory_gib:.1f} GiB", f"{known:.1f} GiB", _error(memory_gib, known)]
        )
    shown: list[Renderable] = [heading("Against the measurement")]
    shown.append(grid(["", "predicted", "measured", "error"], rows))
    if run.suspect:
        shown.append(line(("suspect row: ", "yellow"), run.suspect))
    return shown


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def validation_view(report: ValidationReport, *, every_row: bool) -> list[Renderable]:
    """The sums first, the rows after them; the worst rows only, unless all are asked for."""
    summary = report.summary()
    shown: list[Renderable] = [
        heading("Step time, error of the prediction"),
        _sums(_groups(summary)),
    ]
    for kind in KINDS:
        groups = summary[f"by_{kind}"]
        if len(groups) > 1:
            shown += [heading(f"By {kind.replace('_', ' ')}"), _sums(groups)]
    if summary["memory"]["count"]:
        memory = summary["memory"]
        shown += [heading("Memory, error of the prediction"), _sums({"all rows": memory})]
        for kind in KINDS:
            if len(memory[f"by_{kind}"]) > 1:
                shown += [
                    heading(f"Memory by {kind.replace('_', ' ')}"),
                    _sums(memory[f"by_{kind}"]),
                ]
    shown += _regret(report, summary)
    return [*shown, *_rows(report.rows, every_row=every_row)]


def _groups(summary: Mapping[str, Any]) -> dict[str, Any]:
    groups = {"all rows": summary}
    if summary["suspects"]["count"]:
        groups |= {"without suspects": summary["without_suspects"], "suspects": summary["suspects"]}
    return groups


def _sums(groups: Mapping[str, Mapping[str, Any]]) -> Any:
    names = ("mean", "median", "p90", "worst")
    rows = []
    for name, sums in groups.items():
        errors = [_percent(sums[f"{key}_error_pct"]) for key in names]
        label = name if len(name) <= 31 else f"{name[:28]}..."
        rows.append(
            [
                label,
                count(sums["count"]),
                str(sums["failed"]),
                *errors,
                _percent(sums["bias_pct"], sign=True),
            ]
        )
    return grid(["", "rows", "failed", "mean", "median", "90th", "worst", "bias %"], rows)


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1f}" if sign else f"{value:.1f}"


def _regret(report: ValidationReport, summary: Mapping[str, Any]) -> list[Renderable]:
    sums = summary["regret"]
    if not sums["groups"]:
        return []
    groups = sorted(report.regret, key=lambda group: -group.regret_pct)[:MOST_ROWS]
    rows: list[list[str | Text]] = [
        [
            group.model,
            group.device,
            count(group.gpus),
            str(group.rows),
            f"{group.regret_pct:.1f}",
            bar(group.regret_pct / 50, 10),
        ]
        for group in groups
    ]
    title = "Plan regret: the row predicted fastest against the fastest row"
    words = (
        f"{sums['groups']} groups, mean {sums['mean_pct']:.2f} %, worst {sums['worst_pct']:.2f} %"
    )
    table = grid(["model", "device", "GPUs", "rows", "regret %", ""], rows, left=(0, 1, 5))
    return [heading(title), line(words), table]


def _rows(rows: tuple[ScoredRow, ...], *, every_row: bool) -> list[Renderable]:
    chosen = list(rows)
    title = "Rows"
    if not every_row and len(rows) > MOST_ROWS:
        chosen = sorted(rows, key=lambda row: -abs(row.error_pct or 0.0))[:MOST_ROWS]
        title = f"The {MOST_ROWS} worst of {count(len(rows))} rows (--rows shows all)"
    table = grid(
        ["row", "pred. s", "meas. s", "error s", "err. %", "mem. %"], [_row(row) for row in chosen]
    )
    failed = [line((f"{row.id}: ", "red"), row.failed) for row in chosen if row.failed]
    return [heading(title), table, *failed]


def _row(row: ScoredRow) -> list[str]:
    return [
        row.id,
        "-" if row.predicted is None else _plain_seconds(row.predicted.step_time_s),
        "-" if row.measured is None else _plain_seconds(row.measured.step_time_s),
        "-" if row.error_s is None else _plain_seconds(row.error_s, sign="+"),
        _percent(row.error_pct, sign=True) if row.failed is None else "failed",
        _percent(row.memory_error_pct, sign=True),
    ]


def _plain_seconds(value: float, sign: str = "") -> str:
    """Seven characters or fewer below 10,000 s, so that long names keep their line."""
    return f"{value:{sign}.{3 if abs(value) < 100 else 1}f}"
