"""What a batch shows: a line per job, and the table and sums at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from meshwright.planner.many.batch.service import BatchReport
from meshwright.planner.report.parts import Renderable, counted, percent, seconds

MOST_SHOWN = 60
"""Rows of the table; the files hold them all."""
_STYLES = {
    "optimal": "green",
    "feasible": "yellow",
    "infeasible": "yellow",
    "unknown": "yellow",
    "failed": "red",
}


def job_line(row: Mapping[str, Any], cached: bool, took_s: float) -> str:
    """A finished job in a line."""
    how = "from the cache" if cached else seconds(took_s)
    if row.get("step_time_s"):
        what = f"{seconds(row['step_time_s'])} a step, {degrees(row)}"
    else:
        first = str(row["message"]).splitlines()[0] if row["message"] else "no plan found in time"
        what = first.split("; allowed:")[0]
    return f"{row['name']}: {row['status']}, {what} ({how})"


def degrees(row: Mapping[str, Any]) -> str:
    """The degrees above 1 of a row: tp8 pp4 dp16."""
    axes = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")
    shown = [f"{axis}{row[axis]}" for axis in axes if (row.get(axis) or 1) > 1]
    return " ".join(shown) or "one GPU"


def batch_view(report: BatchReport) -> list[Renderable]:
    """Table and sums; of very many jobs the table shows those without a plan first."""
    rows = report.rows
    if len(rows) > MOST_SHOWN:
        rows = sorted(rows, key=lambda row: row["status"] in ("optimal", "feasible"))[:MOST_SHOWN]
    return [_table(rows), Text(), *_sums(report, len(rows))]


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "status"):
        table.add_column(name, overflow="fold")
    for name in ("GPUs", "step", "MFU", "HBM GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout, or why there is none", overflow="fold")
    for row in rows:
        status = Text(row["status"], _STYLES.get(row["status"], "yellow"))
        if row.get("step_time_s"):
            numbers = [
                str(row["gpus"]),
                seconds(row["step_time_s"]),
                percent(row["mfu"]),
                f"{row['peak_memory_gib']:.1f}",
            ]
            table.add_row(row["name"], status, *numbers, degrees(row))
        else:
            words = str(row["message"]).split("; allowed:")[0]
            table.add_row(row["name"], status, str(row.get("gpus") or ""), "", "", "", words)
    return table


def _sums(report: BatchReport, shown: int) -> list[Text]:
    by_status = ", ".join(f"{count} {status}" for status, count in report.by_status.items())
    lines = [f"{counted(report.jobs, 'job')}: {by_status}."]
    if shown < report.jobs:
        lines[0] += f" {shown} of them are shown; the files hold all."
    jobs = max(report.jobs, 1)
    earlier = f", {report.already} before" if report.already else ""
    lines.append(f"{report.jobs - report.already} done in {seconds(report.wall_s)}{earlier}.")
    hits, work_s = percent(report.cached / jobs, 0), seconds(report.work_s / jobs)
    lines.append(f"Cache: {report.cached} of {report.jobs} answers ({hits}). Work: {work_s} a job.")
    lines += [f"Written: {path}" for path in report.written]
    return [Text(line) for line in lines]
