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
    empty_chart,
    hours,
    percent,
    rounded_seconds,
    seconds,
)
from meshwright.planner.many.batch import COLUMNS, BatchReport
from meshwright.planner.many.fleet import Fleet, fleet_document
from meshwright.planner.many.recommend import Recommendation, SizedPlan, misses_for_sure, size_row
from meshwright.planner.many.sweep import SweepReport
from meshwright.planner.report.plan_words import (
    COST_COLUMNS,
    claim_words,
    row_host_words,
    status_words,
)
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    TEXT,
    Bullets,
    Column,
    Columns,
    Kind,
    Table,
    View,
    Words,
    decimals,
    line,
    percents,
    table,
)
from meshwright.planner.request.choices import DEGREES

Row = Mapping[str, Any]
MOST_SHOWN = 60
"""Rows of the table; the files hold them all."""
_STYLES = {"optimal": "green", "failed": "red"}


def job_line(row: Row, cached: bool, took_s: float) -> str:
    """A finished job in a line.

    Parameters
    ----------
    row
        Of the results.
    cached
        Whether the answer was there before.
    took_s
        Seconds of the search.
    """
    source = "from the cache" if cached else seconds(took_s)
    outcome = reason_text(row) or "no plan found in time"
    if row.get("step_time_s"):
        outcome = f"{seconds(row['step_time_s'])} a step, {row_layout_text(row)}"
    first = outcome.splitlines()[0]
    return f"{row['name']}: {status_words(row['status'], row.get('gap'))}, {first} ({source})"


def reason_text(row: Row) -> str:
    """Why a job has no plan, without the choices that would be allowed.

    Parameters
    ----------
    row
        Of the results, without a plan or with a message all the same.
    """
    return str(row["message"]).split("; allowed:")[0]


def degrees(row: Row, columns: Sequence[str] = DEGREES_OF_FRAMEWORKS, apart: str = "") -> str:
    """The degrees above 1 of a row: tp8 pp4 dp16.

    Parameters
    ----------
    row
        Of the results.
    columns
        Degrees that are looked at, by name.
    apart
        What stands between a degree's name and its number.
    """
    large = [f"{axis}{apart}{row[axis]}" for axis in columns if (row.get(axis) or 1) > 1]
    return " ".join(large) or "one GPU"


def row_layout_text(row: Row) -> str:
    """The degrees of a row, and what lies on the hosts: tp8; 96 GiB of every host: 50 % of the optimizer.

    Parameters
    ----------
    row
        Of the results, with a plan.
    """
    return "; ".join(filter(None, (degrees(row), row_host_words(row))))


def batch_view(report: BatchReport) -> View:
    """Table and sums; of very many jobs the table shows those without a plan first.

    Parameters
    ----------
    report
        Of a batch that has ended, jobs of earlier runs included.
    """
    rows = report.rows
    if len(rows) > MOST_SHOWN:
        rows = sorted(rows, key=lambda row: row["status"] in ("optimal", "feasible"))[:MOST_SHOWN]
    columns: Columns = {
        "name": "job",
        "status": Column("status", value=_status),
        "gpus": Column("GPUs", NUMBER, absent=""),
        "step_time_s": Column("step", SECONDS, absent=""),
        "mfu": Column("MFU", PERCENT, absent=""),
        "peak_memory_gib": Column("HBM", decimals(1), unit="GiB", absent=""),
        **COST_COLUMNS,
        "outcome": Column(
            "layout, or why there is none",
            value=lambda row: row_layout_text(row) if row.get("step_time_s") else reason_text(row),
        ),
    }
    return [table(rows, columns), line(), *_sums(report, len(rows))]


def _status(row: Row) -> Words:
    words = status_words(row["status"], row.get("gap"))
    return Words(words, _STYLES.get(row["status"], "yellow"))


def _unproven(rows: Sequence[Row], remedy: str) -> View:
    """How many rows are the best that was found, or nothing, since their search ended before the proof."""
    number = sum(row["status"] in ("feasible", "unknown", "not searched") for row in rows)
    return [line(f"{number} not proven: the search ended first; {remedy}.")] if number else []


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
        *_unproven(report.rows, "a job's time_limit, or --time-limit, may be longer"),
        line(f"{report.jobs - report.already} done in {seconds(report.wall_s)}{earlier}."),
        line(f"Cache: {report.cached} of {report.jobs} answers ({hits}). {work}"),
        *(line(f"Written: {path}") for path in report.written),
    ]


# What a fleet shows: which job got what, and how good that is.


Document = Mapping[str, Any]


def fleet_view(fleet: Fleet) -> View:
    """The jobs in a table, then the objective with its proof, the leaves, and what it took."""
    document = fleet_document(fleet)
    jobs = document["jobs"]
    time = Kind(hours)
    times = {
        "start_s": Column("start", time, absent=""),
        "end_s": Column("end", time, absent=""),
        "late_s": Column("late", time, absent="", value=lambda job: job["late_s"] or None),
    }
    if fleet.objective == "throughput":
        times = {"step_time_s": Column("step", SECONDS, absent="")}
    columns: Columns = {
        "name": Column("job", value=_job_name),
        **({"part": Column("on", absent="")} if len(fleet.parts) > 1 else {}),
        "gpus": Column("GPUs", NUMBER),
        "tokens_per_s": Column("tokens/s", COUNT),
        "share_of_best": Column("of its best", percents(0)),
        **times,
        **COST_COLUMNS,
        "leaves": Column("leaves", NUMBER, value=lambda job: len(job["leaves"])),
    }
    touched, bound = document["leaves_touched"], document["least_leaves_touched"]
    proof = "the fewest" if bound == touched else f"at least {bound}"
    planning, solving = seconds(fleet.planning_s), seconds(fleet.solving_s)
    reasons = [f"{job['name']} ({job['status']}): {job['reason']}" for job in jobs if job["reason"]]
    hosts = [f"{job['name']} needs {words}" for job in jobs if (words := row_host_words(job))]
    return [
        table(jobs, columns),
        *map(line, [*reasons, "", *hosts, _objective(document)]),
        *([line(_ON_ONE_PART)] if len(fleet.parts) > 1 else []),
        line(f"Leaves that jobs touch, in all: {touched}, {proof} for these sizes."),
        line(f"{fleet.planned} plans in {planning}, shared out in {solving}."),
    ]


def _job_name(job: Document) -> str:
    unplaced = not job["gpus"] and not job["reason"]
    return f"{job['name']} ({job['status']})" if unplaced else job["name"]


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
    placed = objective["on_nodes"]
    if placed is not None and abs(placed - value) > NOTABLE_SHARE * abs(value):
        shown = f"{placed:.4g}" if objective["name"] == "throughput" else hours(placed)
        results = {
            name: f"{words}; {shown} on the nodes that jobs got" for name, words in results.items()
        }
    blocks = [
        f"{part['units_used']} of {part['units']} blocks of {part['gpus_per_unit']} GPUs"
        + (f" of {part['name']}" if len(document["parts"]) > 1 else "")
        for part in document["parts"]
    ]
    planned = counted(sum(not job["reason"] for job in jobs), "job")
    return f"{planned} on {' and '.join(blocks)}: {results[objective['name']]}."


NOTABLE_SHARE = 0.001
"""By which plans on the nodes that jobs got must differ from those of sizes to be spoken of."""
_ON_ONE_PART = "Each job is on one part: pipelines through several parts are not looked at."


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
        through = f", on {best.row['runs_on']}" if best.row.get("runs_on") else ""
        racks = ""
        if best.rack_gpus is not None:
            domains = counted(-(-best.gpus // best.rack_gpus), "NVLink domain")
            racks = f" in {domains} of {best.rack_gpus}"
        gpus = f"{counted(best.gpus, 'GPU')} of {best.cluster}{racks}"
        sentences.append(f"{gpus}{through}{price}: {_speed(best)}.")
        sentences += _cost(best)
        sentences.append(_fewest(answer, best))
    for point in answer.missed:
        misses = f"{point.cluster} misses {seconds(target_s)} with all {point.gpus} GPUs"
        proof = "" if misses_for_sure(point, target_s) else " (not proven: a faster plan may exist)"
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
    if smaller is None and best.row.get("runs_on"):
        return "No part alone reaches it; fewer nodes of several parts together were not tried."
    if smaller is None:
        return "That is the smallest size there is."
    is_proven = misses_for_sure(smaller, answer.request.target_s)
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


_NO_TIME = "the time limit came first"


def _speed(point: SizedPlan) -> str:
    row = point.row
    if not point.has_plan:
        return f"no plan ({row['message'] or _NO_TIME})"
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"{seconds(point.step_time_s)} a step, {rate}, MFU {percent(row['mfu'])}, {row_layout_text(row)}"


def _sizes_table(points: Sequence[SizedPlan], front: Sequence[SizedPlan]) -> Table:
    rows = [
        {
            **(row := size_row(point, front)),
            # Dollars of the tokens asked for say the same.
            "usd_per_billion_tokens": None
            if row.get("dollars") is not None
            else row["usd_per_billion_tokens"],
            "front": "*" if row["pareto"] else None,
            "layout": row_layout_text(point.row) if point.has_plan else _first_part(point.row),
        }
        for point in points
    ]
    price = decimals(2)
    columns: Columns = {
        "cluster": "cluster",
        "gpus": Column("GPUs", NUMBER),
        "step_time_s": Column("step", SECONDS, absent=""),
        "tokens_per_s": Column("tokens/s", COUNT, absent=""),
        "mfu": Column("MFU", PERCENT, absent=""),
        "headroom_gib": Column("free", decimals(1), unit="GiB", absent=""),
        "usd_per_h": Column("USD/h", price, absent="", is_optional=True),
        "usd_per_billion_tokens": Column("USD/1e9 tokens", price, absent="", is_optional=True),
        **COST_COLUMNS,
        "front": Column("", absent="", is_optional=True),
        "layout": "layout",
    }
    return table(rows, columns)


def _first_part(row: Row) -> str:
    """The reason why there is no plan, without what would be allowed."""
    return str(row["message"]).split(";")[0] or _NO_TIME


# A sweep of plans as one table, as CSV and as a picture.


SWEEP_FILES = ("sweep.csv", "sweep.json", "sweep.svg")
"""What is written to a folder; some of it only where there is something to say."""
_TITLE = "Tokens per second by {name}"


def sweep_view(report: SweepReport) -> View:
    """A row for each combination, then why some have no plan."""
    columns: Columns = {
        **{
            name: Column(name, NUMBER if _is_numeric(values) else TEXT)
            for name, values in report.axes.items()
        },
        "step_time_s": Column("step", Kind(rounded_seconds)),
        "tokens_per_s_per_gpu": Column("tokens/s a GPU", COUNT),
        "mfu": Column("MFU", PERCENT),
        "peak_memory_gib": Column("GiB", decimals(1)),
        "status": Column("that is", value=_claim),
        **({"runs_on": "runs on"} if _has_parts(report) else {}),
        **COST_COLUMNS,
        "layout": Column(
            "layout", value=lambda row: "; ".join(filter(None, (_layout(row), row_host_words(row))))
        ),
    }
    failures = [
        f"{', '.join(str(row[name]) for name in report.axes)}: {row['message']}"
        for row in report.rows
        if row.get("message")
    ]
    view: View = [table(report.rows, columns)]
    if len(report.axes.get("precision", ())) > 1:
        view.append(line("MFU is of the peak of each row's own precision"))
    view += _unproven(report.rows, "--time-limit may be longer")
    return [*view, Bullets(failures)] if failures else view


def _has_parts(report: SweepReport) -> bool:
    """Whether some rows are of a mixed cluster."""
    return any("runs_on" in row for row in report.rows)


def _claim(row: Row) -> str:
    return claim_words(row["status"], row.get("step_time_s"), row.get("lower_bound_s"))


def sweep_files(report: SweepReport) -> dict[str, str]:
    """Texts by name, of `SWEEP_FILES`."""
    parts = ["runs_on"] if _has_parts(report) else []
    columns = list(dict.fromkeys([*report.axes, *COLUMNS, *parts]))
    document = {"schema": 1, **report.document()}
    return {
        "sweep.csv": csv_text([name for name in columns if name != "name"], report.rows),
        "sweep.json": json.dumps(document, indent=1) + "\n",
        "sweep.svg": sweep_chart(report),
    }


def sweep_chart(report: SweepReport) -> str:
    """Tokens per second against the first option that is a number, a line for each of the others' values.

    Parameters
    ----------
    report
        Of a sweep over one option or several, with or without plans.
    """
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
        series_words = [str(row[name]) for name in report.axes if name != across]
        series.setdefault(", ".join(series_words) or "plan", []).append(row)
    for name, rows in series.items():
        colour = chart.named_colour(name)
        points = [(float(row[across]), float(row["tokens_per_s"])) for row in rows]
        chart.line(points, colour)
        for row, point in zip(rows, points, strict=True):
            chart.dot(point, colour, tip=f"{name}, {point[0]:g}: {count(point[1])}, {_layout(row)}")
    return chart.document()


def _is_numeric(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _layout(row: Mapping[str, Any]) -> str:
    """Degrees above 1; nothing of a row without a plan."""
    return degrees(row, DEGREES, " ") if row.get("tp") else ""
