"""What a batch shows: a line per job, and the table and sums at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.drawing.quantities import counted, percent, seconds
from meshwright.planner.many.batch.service import BatchReport
from meshwright.planner.report.cost_words import cost_columns
from meshwright.planner.report.plan_words import row_host_words, status_words
from meshwright.planner.report.view import (
    NUMBER,
    PERCENT,
    SECONDS,
    Column,
    Table,
    View,
    Words,
    decimals,
    line,
)

Row = Mapping[str, Any]
MOST_SHOWN = 60
"""Rows of the table; the files hold them all."""
_AXES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")
_STYLES = {"optimal": "green", "failed": "red"}


def job_line(row: Row, cached: bool, took_s: float) -> str:
    """A finished job in a line."""
    source = "from the cache" if cached else seconds(took_s)
    outcome = reason_text(row) or "no plan found in time"
    if row.get("step_time_s"):
        outcome = f"{seconds(row['step_time_s'])} a step, {row_layout_text(row)}"
    first = outcome.splitlines()[0]
    return f"{row['name']}: {status_words(row['status'], row.get('gap'))}, {first} ({source})"


def reason_text(row: Row) -> str:
    """Why a job has no plan, without the choices that would be allowed."""
    return str(row["message"]).split("; allowed:")[0]


def degrees(row: Row) -> str:
    """The degrees above 1 of a row: tp8 pp4 dp16."""
    large = [f"{axis}{row[axis]}" for axis in _AXES if (row.get(axis) or 1) > 1]
    return " ".join(large) or "one GPU"


def row_layout_text(row: Row) -> str:
    """The degrees of a row, and what lies on the hosts: tp8; 96 GiB of every host: 50 % of the optimizer."""
    return "; ".join(filter(None, (degrees(row), row_host_words(row))))


def batch_view(report: BatchReport) -> View:
    """Table and sums; of very many jobs the table shows those without a plan first."""
    rows = report.rows
    if len(rows) > MOST_SHOWN:
        rows = sorted(rows, key=lambda row: row["status"] in ("optimal", "feasible"))[:MOST_SHOWN]
    return [_table(rows), line(), *_sums(report, len(rows))]


def _table(rows: Sequence[Row]) -> Table:
    columns = [
        Column("job"),
        Column("status"),
        Column("GPUs", NUMBER, absent=""),
        Column("step", SECONDS, absent=""),
        Column("MFU", PERCENT, absent=""),
        Column("HBM", decimals(1), unit="GiB", absent=""),
    ]
    costs = cost_columns(rows)
    columns += [*costs.values(), Column("layout, or why there is none")]
    figures = ("gpus", "step_time_s", "mfu", "peak_memory_gib", *costs)
    cells = []
    for row in rows:
        status = Words(
            status_words(row["status"], row.get("gap")), _STYLES.get(row["status"], "yellow")
        )
        outcome = row_layout_text(row) if row.get("step_time_s") else reason_text(row)
        cells.append([row["name"], status, *(row.get(name) for name in figures), outcome])
    return Table(columns, cells)


def _sums(report: BatchReport, shown: int) -> View:
    by_status = ", ".join(f"{number} {status}" for status, number in report.by_status.items())
    jobs = f"{counted(report.jobs, 'job')}: {by_status}."
    if shown < report.jobs:
        jobs += f" {shown} of them are shown; the files hold all."
    earlier = f", {report.already} before" if report.already else ""
    per_job = max(report.jobs, 1)
    hits = percent(report.cached / per_job, 0)
    work = f"Work: {seconds(report.work_s / per_job)} a job."
    return [
        line(jobs),
        line(f"{report.jobs - report.already} done in {seconds(report.wall_s)}{earlier}."),
        line(f"Cache: {report.cached} of {report.jobs} answers ({hits}). {work}"),
        *(line(f"Written: {path}") for path in report.written),
    ]
