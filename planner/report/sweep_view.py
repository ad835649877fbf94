"""A sweep of plans as one table, as CSV and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.documents.tables import csv_text
from meshwright.planner.drawing.charts import Chart, LogScale, empty_chart
from meshwright.planner.drawing.quantities import count, rounded_seconds
from meshwright.planner.drawing.svg import distinct_colour
from meshwright.planner.many.batch.rows import COLUMNS
from meshwright.planner.many.sweep.service import SweepReport
from meshwright.planner.report.cost_words import cost_columns
from meshwright.planner.report.plan_words import row_host_words
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    Bullets,
    Column,
    Kind,
    Table,
    View,
    decimals,
    line,
)

SWEEP_FILES = ("sweep.csv", "sweep.json", "sweep.svg")
"""What is written to a folder; some of it only where there is something to say."""
_TITLE = "Tokens per second by {name}"
_DEGREES = ("tp", "cp", "pp", "dp", "ep")


def sweep_view(report: SweepReport) -> View:
    """A row for each combination, then why some have no plan."""
    columns = [Column(name, NUMBER) for name in report.axes]
    columns += [
        Column("step", Kind(rounded_seconds)),
        Column("tokens/s a GPU", COUNT),
        Column("MFU", PERCENT),
        Column("GiB", decimals(1)),
    ]
    costs = cost_columns(report.rows)
    columns += [*costs.values(), Column("layout")]
    rows, failures = [], []
    for row in report.rows:
        values = [row[name] for name in report.axes]
        names = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib", *costs)
        layout = "; ".join(filter(None, (_layout(row), row_host_words(row)))) or row["status"]
        rows.append([*values, *(row.get(name) for name in names), layout])
        if row.get("message"):
            failures.append(f"{', '.join(map(str, values))}: {row['message']}")
    view: View = [Table(columns, rows)]
    if len(report.axes.get("precision", ())) > 1:
        view.append(line("MFU is of the peak of each row's own precision"))
    return [*view, Bullets(failures)] if failures else view


def sweep_files(report: SweepReport) -> dict[str, str]:
    """Texts by name, of `SWEEP_FILES`."""
    columns = list(dict.fromkeys([*report.axes, *COLUMNS]))
    document = {"schema": 1, **report.document()}
    return {
        "sweep.csv": csv_text([name for name in columns if name != "name"], report.rows),
        "sweep.json": json.dumps(document, indent=1) + "\n",
        "sweep.svg": sweep_chart(report),
    }


def sweep_chart(report: SweepReport) -> str:
    """Tokens per second against the first option that is a number, a line for each of the others' values."""
    across = next((name for name, values in report.axes.items() if _is_numeric(values)), None)
    planned = [row for row in report.rows if row.get("tokens_per_s")]
    if across is None or not planned or min(row[across] for row in planned) <= 0:
        return empty_chart("Tokens per second", "no option with numbers, or no plan")
    chart = Chart(
        across=LogScale.of_twos([row[across] for row in planned]),
        down=LogScale.of_tens([row["tokens_per_s"] for row in planned], 1.2),
        title=_TITLE.format(name=across),
        across_title=across,
        down_title="tokens/s",
    )
    series: dict[str, list[dict[str, Any]]] = {}
    for row in planned:
        others = [str(row[name]) for name in report.axes if name != across]
        series.setdefault(", ".join(others) or "plan", []).append(row)
    for index, (name, rows) in enumerate(series.items()):
        colour = distinct_colour(index)
        points = [(float(row[across]), float(row["tokens_per_s"])) for row in rows]
        chart.line(points, colour)
        for row, point in zip(rows, points, strict=True):
            chart.dot(point, colour, tip=f"{name}, {point[0]:g}: {count(point[1])}, {_layout(row)}")
        chart.name(name, colour)
    return chart.document()


def _is_numeric(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _layout(row: Mapping[str, Any]) -> str:
    """Degrees above 1, and the micro-batch."""
    degrees = [f"{name} {row[name]}" for name in _DEGREES if row.get(name) not in (None, 1)]
    return " ".join(degrees) or ("one GPU" if row.get("tp") else "")
