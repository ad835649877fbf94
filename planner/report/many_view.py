"""What a batch shows: a line per job, and the table and sums at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.documents import csv_text
from meshwright.frameworks.record import DEGREES_OF_FRAMEWORKS
from meshwright.planner.drawing import (
    Chart,
    LogScale,
    amount,
    count,
    counted,
    distinct_colour,
    empty_chart,
    hours,
    percent,
    rounded_seconds,
    seconds,
)
from meshwright.planner.many.batch import BatchReport
from meshwright.planner.many.engines import COLUMNS
from meshwright.planner.many.fleet import Fleet, fleet_document
from meshwright.planner.many.recommend import Recommendation, SizedPlan
from meshwright.planner.many.sweep import SweepReport
from meshwright.planner.report.plan_words import (
    claim_words,
    cost_columns,
    row_host_words,
    status_words,
)
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Bullets,
    Column,
    Kind,
    Table,
    View,
    Words,
    decimals,
    line,
    percents,
)
from meshwright.planner.request.choices import DEGREES

Row = Mapping[str, Any]
MOST_SHOWN = 60
"""Rows of the table; the files hold them all."""
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
    large = [f"{axis}{row[axis]}" for axis in DEGREES_OF_FRAMEWORKS if (row.get(axis) or 1) > 1]
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


# What a fleet shows: which job got what, and how good that is.


Document = Mapping[str, Any]


def fleet_view(fleet: Fleet) -> View:
    """The jobs in a table, then the objective with its proof, the leaves, and what it took."""
    document = fleet_document(fleet)
    leaves = document["leaves_touched"]
    bound = document["least_leaves_touched"]
    proof = "the fewest" if bound == leaves else f"at least {bound}"
    planning, solving = seconds(fleet.planning_s), seconds(fleet.solving_s)
    hosts = [
        f"{job['name']} needs {words}" for job in document["jobs"] if (words := row_host_words(job))
    ]
    return [
        _jobs(document["jobs"], scheduled=fleet.objective != "throughput"),
        *_reasons(document["jobs"]),
        line(),
        *map(line, hosts),
        line(_objective(document)),
        line(f"Leaves that jobs touch, in all: {leaves}, {proof} for these sizes."),
        line(f"{fleet.planned} plans in {planning}, shared out in {solving}."),
    ]


def _jobs(jobs: list[Document], *, scheduled: bool) -> Table:
    columns = {
        "name": Column("job"),
        "gpus": Column("GPUs", NUMBER),
        "tokens_per_s": Column("tokens/s", COUNT),
        "share_of_best": Column("of its best", percents(0)),
    }
    if scheduled:
        columns["start_s"] = Column("start", Kind(hours), absent="")
        columns["end_s"] = Column("end", Kind(hours), absent="")
        columns["late_s"] = Column("late", Kind(hours), absent="")
    else:
        columns["step_time_s"] = Column("step", SECONDS, absent="")
    columns |= cost_columns(jobs)
    columns["leaves"] = Column("leaves", Kind(lambda leaves: str(len(leaves))))
    rows = []
    for job in jobs:
        row = {name: job[name] for name in columns}
        if not job["gpus"] and not job["reason"]:
            row["name"] += f" ({job['status']})"
        if not job["late_s"] and scheduled:
            row["late_s"] = None
        rows.append(list(row.values()))
    return Table(list(columns.values()), rows)


def _reasons(jobs: list[Document]) -> View:
    """Why jobs have no plan; the others were shared out without them."""
    return [
        line(f"{job['name']} ({job['status']}): {job['reason']}") for job in jobs if job["reason"]
    ]


def _objective(document: Document) -> str:
    jobs, objective = document["jobs"], document["objective"]
    value = objective["value"]
    proof = "optimal"
    if document["sizes_left_out"]:
        proof = f"of the sizes planned in time, {document['sizes_left_out']} were left out"
    elif document["sizes_not_proven"]:
        proof = f"of the plans found, {document['sizes_not_proven']} are not proven to be the best"
    elif objective["status"] != "optimal":
        proof = f"within {percent(objective['gap'], 2)} of the best"
    results = {
        "throughput": f"weighted throughput {value:.4g}, {proof}",
        "makespan": f"all done after {hours(value)}, {proof}",
        "deadlines": f"all done after {hours(value)}; time past deadlines comes first; {proof}",
    }
    blocks = f"{document['units_used']} of {document['units']} blocks"
    size = document["gpus_per_unit"]
    result = results[objective["name"]]
    planned = counted(sum(not job["reason"] for job in jobs), "job")
    return f"{planned} on {blocks} of {size} GPUs: {result}."


# What a recommendation shows: the answer with its proof, then the sweep.


def recommend_view(answer: Recommendation) -> View:
    """The recommendation with its proof, then the sweep."""
    view: View = []
    target_s = answer.request.target_s
    if target_s is not None:
        view += [line(sentence) for sentence in _verdict(answer, target_s)]
        if len(answer.reached) > 1:
            view += [line(), _sizes_table(answer.reached, ())]
    if answer.sweep:
        legend = "Sweep; * marks the Pareto front of step time, GPUs and free memory."
        view += [line(), line(legend), _sizes_table(answer.sweep, answer.front)]
    return view


def _verdict(answer: Recommendation, target_s: float) -> list[str]:
    sentences = []
    if answer.reached:
        best = answer.reached[0]
        price = "" if best.usd_per_h is None else f", {best.usd_per_h:,.2f} USD an hour"
        sentences.append(f"{counted(best.gpus, 'GPU')} of {best.cluster}{price}: {_speed(best)}.")
        sentences += _cost(best)
        sentences.append(_fewest(answer, best))
    for point in answer.missed:
        misses = f"{point.cluster} misses {seconds(target_s)} with all {point.gpus} GPUs"
        proof = "" if answer.misses_for_sure(point) else " (not proven: a faster plan may exist)"
        sentences.append(f"{misses}: {_speed(point)}{proof}.")
    return sentences


def _cost(point: SizedPlan) -> list[str]:
    """What the training takes, where that was asked."""
    row = point.row
    if row.get("days") is None:
        return []
    dollars = "" if row["dollars"] is None else f", {row['dollars']:,.0f} dollars"
    energy = f", {row['kwh']:,.0f} kWh (GPUs at board power, without hosts, network, cooling)"
    return [f"{amount(row['tokens'])} tokens take {row['days']:,.1f} days{dollars}{energy}."]


def _fewest(answer: Recommendation, best: SizedPlan) -> str:
    """Why fewer GPUs do not reach the target, or that this was not proven."""
    smaller = answer.smaller[best.cluster]
    if smaller is None:
        return "That is the smallest size there is."
    is_proven = answer.misses_for_sure(smaller)
    if not smaller.has_plan:
        how = "The fewest" if is_proven else "Not proven to be the fewest"
        return f"{how}: on {smaller.gpus} GPUs there is {_speed(smaller)}."
    fewer = f"{smaller.gpus} GPUs need {seconds(smaller.step_time_s)}"
    if smaller.row["status"] == "optimal":
        return f"The fewest: {fewer} at best, proven."
    words = status_words(smaller.row["status"], smaller.row.get("gap"))
    if is_proven:
        return f"The fewest: {fewer}, {words}, and none reaches it, proven."
    return f"{fewer}, {words}: that they cannot reach it is not proven."


def _speed(point: SizedPlan) -> str:
    row = point.row
    if not point.has_plan:
        return f"no plan ({row['message']})"
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{seconds(point.step_time_s)} a step, {rate}, MFU {percent(row['mfu'])}, {row_layout_text(row)}"


def _sizes_table(points: Sequence[SizedPlan], front: Sequence[SizedPlan]) -> Table:
    columns = [
        Column("cluster"),
        Column("GPUs", NUMBER),
        Column("step", SECONDS, absent=""),
        Column("tokens/s", COUNT, absent=""),
        Column("MFU", PERCENT, absent=""),
        Column("free", decimals(1), unit="GiB", absent=""),
        Column("USD/h", decimals(2), absent=""),
        Column("USD/1e9 tokens", decimals(2), absent=""),
        Column(""),
        Column("layout"),
    ]
    rows = [_cells(point, any(point is best for best in front)) for point in points]
    costs = cost_columns([point.row for point in points])
    columns[-2:-2] = costs.values()
    for cells, point in zip(rows, points, strict=True):
        cells[-2:-2] = [point.row.get(name) for name in costs]
    if all(point.usd_per_h is None for point in points):
        columns = [column for column in columns if not column.title.startswith("USD")]
        rows = [[*row[:6], *row[8:]] for row in rows]
    return Table(columns, rows)


def _cells(point: SizedPlan, on_front: bool) -> list[object]:
    row = point.row
    return [
        point.cluster,
        point.gpus,
        row.get("step_time_s"),
        row.get("tokens_per_s"),
        row.get("mfu"),
        point.headroom_gib,
        point.usd_per_h,
        point.usd_per_billion_tokens,
        "*" if on_front else "",
        row_layout_text(row) if point.has_plan else str(row["message"]).split(";")[0],
    ]


# A sweep of plans as one table, as CSV and as a picture.


SWEEP_FILES = ("sweep.csv", "sweep.json", "sweep.svg")
"""What is written to a folder; some of it only where there is something to say."""
_TITLE = "Tokens per second by {name}"


def sweep_view(report: SweepReport) -> View:
    """A row for each combination, then why some have no plan."""
    columns = [Column(name, NUMBER) for name in report.axes]
    columns += [
        Column("step", Kind(rounded_seconds)),
        Column("tokens/s a GPU", COUNT),
        Column("MFU", PERCENT),
        Column("GiB", decimals(1)),
        Column("that is"),
    ]
    costs = cost_columns(report.rows)
    columns += [*costs.values(), Column("layout")]
    rows, failures = [], []
    for row in report.rows:
        values = [row[name] for name in report.axes]
        names = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib")
        words = claim_words(row["status"], row.get("step_time_s"), row.get("lower_bound_s"))
        layout = "; ".join(filter(None, (_layout(row), row_host_words(row))))
        figures = [*(row.get(name) for name in names), words, *(row.get(name) for name in costs)]
        rows.append([*values, *figures, layout])
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
    degrees = [f"{name} {row[name]}" for name in DEGREES if row.get(name) not in (None, 1)]
    return " ".join(degrees) or ("one GPU" if row.get("tp") else "")
