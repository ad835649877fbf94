"""One priced run, and predicted against measured over many runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.rates import step_time_band
from meshwright.errors import InputError
from meshwright.planner.drawing import Chart, LogScale, batch_words, count, seconds
from meshwright.planner.report.plan_words import trained_line, training_text
from meshwright.planner.report.prediction_view import layout_view, prediction_view
from meshwright.planner.report.view import (
    BAR,
    COUNT,
    NUMBER,
    Bar,
    Block,
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
from meshwright.planner.runs.calibration.machine import MachineReport
from meshwright.planner.runs.calibration.service import CalibrationReport, three_digits
from meshwright.planner.runs.prediction import PricedRun, peak_as_measured
from meshwright.planner.runs.run_terms import layout_document
from meshwright.planner.runs.validation import KINDS, ValidationReport

Document = Mapping[str, Any]
_SIGNED = decimals(1, sign=True)
MOST_ROWS = 12
"""Rows of a validation that are shown unless all are asked for: the worst ones."""
LONGEST_LABEL = 31
FULL_BAR_PCT = 50.0
"""Regret that fills its bar."""
_ERRORS = {
    "mean_error_pct": "mean",
    "median_error_pct": "median",
    "p90_error_pct": "90th",
    "worst_error_pct": "worst",
}


def run_view(priced: PricedRun) -> View:
    """A run's layout and prices, measured beside predicted where both are known.

    Parameters
    ----------
    priced
        With the measurement, where the run has one.
    """
    run, workload = priced.run, priced.run.workload
    cluster = workload.cluster
    predicted = priced.predicted
    rows = [
        ("run", run.id),
        ("model", workload.model.name),
        ("cluster", f"{cluster.name}: {count(workload.gpus)} GPUs, {cluster.device.name}"),
        (
            "batch",
            batch_words(workload.global_batch, workload.seq_len, workload.step_kind.sequences),
        ),
        ("training", training_text(workload)),
        *trained_line(workload),
    ]
    return [
        Facts(rows),
        *layout_view(layout_document(run.layout, priced.prediction.stages), None),
        *prediction_view(predicted, workload),
        *_measured(priced),
    ]


def _measured(priced: PricedRun) -> View:
    run, predicted, step_time_s = priced.run, priced.predicted, priced.predicted.step_time_s
    measured = run.measured
    if measured is None:
        return []
    if measured.out_of_memory:
        memory_gib = max(predicted.memory_gib)
        limit_gib = usable_hbm_gib(run.workload)
        fits = "to fit, wrongly" if memory_gib <= limit_gib else "not to fit, rightly"
        said = f"predicted {fits}: {memory_gib:.1f} of {limit_gib:.1f} usable GiB"
        return [Heading("Against the measurement"), line(f"the run ended out of memory; {said}")]
    parts_gib, context_gib = priced.prediction.memory_parts_gib, priced.prediction.context_gib
    peak_gib = peak_as_measured(parts_gib, context_gib, measured)
    whose = "memory of rank 0" if measured.first_rank else "memory"
    pairs: list[tuple[str, Callable[[float], str], float, float | None]] = [
        ("step time", seconds, step_time_s, measured.step_time_s),
        (whose, "{:.1f} GiB".format, peak_gib, measured.memory_gib),
    ]
    rows = [
        [name, write(predicted), write(actual), f"{100 * (predicted / actual - 1):+.1f} %"]
        for name, write, predicted, actual in pairs
        if actual is not None
    ]
    columns = [Column(""), *(Column(title, NUMBER) for title in ("predicted", "measured", "error"))]
    view: View = [Heading("Against the measurement"), Table(columns, rows)]
    band = step_time_band(run.workload)
    if measured.step_time_s is not None and measured.step_time_s > band.high * step_time_s:
        view.append(
            line(
                "Slower than 19 of 20 measured steps beside their prices: settings that the file leaves "
                "out, or the machine (network, clocks, hosts, data), take what the price does not have."
            )
        )
    if run.suspect:
        view.append(line(Words("suspect row: ", "yellow"), run.suspect))
    return view


_SUMS: Columns = {
    "label": "",
    "count": Column("rows", COUNT),
    "failed": Column("failed", NUMBER),
    **{name: Column(title, decimals(1)) for name, title in _ERRORS.items()},
    "bias_pct": Column("bias", decimals(1, sign=True), unit="%"),
}


def validation_view(document: Document, *, every_row: bool) -> View:
    """The view of what `validate --json` prints: sums, then the worst rows, or all that are asked for.

    Parameters
    ----------
    document
        What `validate --json` prints.
    every_row
        Whether all rows are shown, not the worst alone.
    """
    summary = document["summary"]
    if not document["rows"]:
        return _pairs(summary["pairs"], summary["gains"]) + _unpriced(document["unpriced_pairs"])
    memory = summary["memory"]
    totals = {"all rows": summary}
    if summary["suspects"]["count"]:
        totals["without suspects"] = summary["without_suspects"]
        totals["suspects"] = summary["suspects"]
    view: View = [Heading("Step time, error of the prediction"), _sums(totals)]
    view += _sums_by_kind("By", summary)
    if memory["count"]:
        view += [Heading("Memory, error of the prediction"), _sums({"all rows": memory})]
        view += _sums_by_kind("Memory by", memory)
    view += _feasibility(summary["feasibility"])
    view += _pairs(summary["pairs"], summary["gains"])
    view += _regret(document["regret"], summary["regret"])
    fits = summary["feasibility"]
    if not any((summary["count"], memory["count"], fits["ran"], fits["out_of_memory"])):
        words = "no row has both a figure under `measured` and a price: nothing is compared"
        view.append(line(Words(words, "yellow")))
    return [*view, *_rows(document["rows"], every_row=every_row)]


def _sums_by_kind(title: str, summary: Document) -> View:
    """A table for each way of telling rows apart that tells any apart."""
    view: View = []
    for name, groups in summary.items():
        if name.startswith("by_") and len(groups) > 1:
            kind = name.removeprefix("by_").replace("_", " ")
            view += [Heading(f"{title} {kind}"), _sums(groups)]
    return view


def _sums(groups: Mapping[str, Document]) -> Block:
    labels = {
        name: name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 3]}..."
        for name in groups
    }
    return table([{**sums, "label": labels[name]} for name, sums in groups.items()], _SUMS)


def _feasibility(sums: Document) -> View:
    """How many rows are told right, where some ran out of memory."""
    if not sums["out_of_memory"]:
        return []
    ran = f"{count(sums['ran_told_fit'])} of {count(sums['ran'])} runs that ran are told to fit"
    foreseen, all_rows = count(sums["out_of_memory_told"]), count(sums["out_of_memory"])
    words = f"{foreseen} of {all_rows} runs that ran out of memory are told not to"
    return [Heading("Fit or not"), line(ran), line(words)]


def _pairs(sums: Document, gains: Sequence[Document]) -> View:
    """How well ratios of times are predicted, and what single settings bring."""
    if not sums["n"]:
        return []
    said = (
        f"{count(sums['n'])} pairs of one source that differ in layout or settings: ratio of times off by "
        f"{100 * sums['error']:.1f} %, the faster one told in {100 * sums['direction']:.0f} %"
    )
    columns: Columns = {
        "knob": "setting, more of it",
        "device": "device",
        "pairs": Column("pairs", COUNT),
        "predicted": Column("predicted", decimals(3)),
        "measured": Column("measured", decimals(3)),
    }
    listed = sorted(gains, key=lambda row: (-row["pairs"], row["knob"], row["device"]))[:MOST_ROWS]
    shown: View = [table(listed, columns)] if listed else []
    return [Heading("What choosing needs: ratios of times"), line(said), *shown]


def _unpriced(pairs: Sequence[Document]) -> View:
    """Why pairs of a list are only counted, most frequent reason first."""
    if not pairs:
        return []
    reasons = Counter(pair["reason"] for pair in pairs)
    rows = [
        {"reason": reason, "pairs": number} for reason, number in reasons.most_common(MOST_ROWS)
    ]
    columns: Columns = {"reason": "reason", "pairs": Column("pairs", COUNT)}
    return [Heading("Pairs without a price"), table(rows, columns)]


def _regret(groups: list[Document], sums: Document) -> View:
    columns: Columns = {
        "model": "model",
        "device": "device",
        "gpus": Column("GPUs", COUNT),
        "rows": Column("rows", NUMBER),
        "regret_pct": "regret",
        "bar": Column("", BAR, value=lambda row: Bar(row["regret_pct"] / FULL_BAR_PCT, width=10)),
    }
    if not sums["groups"]:
        return []
    worst = sorted(groups, key=lambda group: -group["regret_pct"])[:MOST_ROWS]
    mean, largest = f"mean {sums['mean_pct']:.2f} %", f"worst {sums['worst_pct']:.2f} %"
    return [
        Heading("Plan regret: the row predicted fastest against the fastest row"),
        line(f"{sums['groups']} groups, {mean}, {largest}"),
        table(worst, columns),
    ]


def _rows(rows: list[Document], *, every_row: bool) -> View:
    title = "Rows"
    if not every_row and len(rows) > MOST_ROWS:
        title = f"The {MOST_ROWS} worst of {count(len(rows))} rows (--rows shows all)"
        rows = sorted(rows, key=lambda row: -abs(row["error_pct"] or 0.0))[:MOST_ROWS]
    columns: Columns = {
        "id": "row",
        "predicted": Column("pred.", Kind(_plain_seconds), "s", value=partial(_step, "predicted")),
        "measured": Column("meas.", Kind(_plain_seconds), "s", value=partial(_step, "measured")),
        "error_s": Column("error", Kind(partial(_plain_seconds, sign="+")), "s"),
        "error_pct": Column(
            "err.", _SIGNED, "%", value=lambda row: "failed" if row["failed"] else row["error_pct"]
        ),
        "memory_error_pct": Column("mem.", _SIGNED, unit="%"),
    }
    failures = [
        line(Words(f"{row['id']}: ", "red"), row["failed"]) for row in rows if row["failed"]
    ]
    return [Heading(title), table(rows, columns), *failures]


def _step(side: str, row: Document) -> object:
    return row[side] and row[side]["step_time_s"]


def _plain_seconds(value_s: float, sign: str = "") -> str:
    """Seven characters or fewer below 10,000 s, so that long names keep their line."""
    return f"{value_s:{sign}.{3 if abs(value_s) < 100 else 1}f}"


# Predicted against measured, drawn: one dot a row.


BAND = 0.1
"""Half-width of the grey band round the diagonal."""
MARGIN = 1.4
"""The axes reach this far beyond the points."""
_GREY, _PALE = "#8a8f98", "#e5e7eb"
Dot = tuple[str, float, float]
"""Group, measured seconds, predicted seconds."""


def check_picture(path: Path) -> None:
    """Raises InputError where a picture could not be written to a path, before any work is done for it.

    Parameters
    ----------
    path
        As the user gave it.
    """
    if path.suffix.lower() != ".svg":
        raise InputError("a picture is written as .svg; name it so", where=str(path))
    if path.exists() and not path.is_file():
        raise InputError("not a file; name a file that ends in .svg", where=str(path))
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}; make it first", where=str(path))


def validation_svg(report: ValidationReport) -> str:
    """The rows of a report by device, as SVG text.

    Parameters
    ----------
    report
        Of measured runs; rows without either step are not drawn.

    Raises
    ------
    InputError
        Where no row has both a measured and a predicted step.
    """
    device = KINDS["device"]
    dots = [
        (device(row.run), row.measured.step_time_s, row.predicted.step_time_s)
        for row in report.rows
        if row.run is not None
        and row.measured is not None
        and row.predicted is not None
        and row.measured.step_time_s is not None
    ]
    if not dots:
        raise InputError(
            "no row has both a measured and a predicted step, there is nothing to draw"
        )
    measured = [row.measured for row in report.rows if row.measured is not None]
    missing = sum(measurement.step_time_s is not None for measurement in measured) - len(dots)
    failed = f", {missing} failed" if missing else ""
    return scatter_svg(dots, f"Step time of {len(dots)} measured runs{failed}")


def scatter_svg(dots: Sequence[Dot], title: str) -> str:
    """Predicted over measured seconds, both logarithmic, as SVG text.

    Parameters
    ----------
    dots
        Group, measured and predicted seconds, above 0; a colour for each group.
    title
        Of the picture.
    """
    scale = LogScale.of_tens([value for _, *values in dots for value in values], MARGIN)
    chart = Chart(
        across=scale,
        down=scale,
        title=title,
        across_title="measured step, s",
        down_title="predicted, s",
    )
    low, high = scale.low, scale.high
    below, above = 1 - BAND, 1 + BAND
    band = [(low, low), (low, above * low), (high / above, high)]
    band += [(high, high), (high, below * high), (low / below, low)]
    chart.area(band, _PALE)
    chart.line([(low, low), (high, high)], _GREY)
    chart.name("within 10 %", _PALE)
    for group in sorted({name for name, _, _ in dots}):
        colour = chart.named_colour(group)
        for name, measured_s, predicted_s in dots:
            if name == group:
                tip = f"{name}: measured {seconds(measured_s)}, predicted {seconds(predicted_s)}"
                chart.dot((measured_s, predicted_s), colour, size=3, tip=tip)
    return chart.document()


# What a calibration learned: errors before and after, constants, the run to measure next.


MOVED_PCT = 1.0
"""Mean change of predictions from which a constant is said to have moved."""
_MOST_CALIBRATED_ROWS = 20
_THREE = Kind(three_digits)


def calibration_view(report: CalibrationReport) -> View:
    """The blocks that `meshwright calibrate` prints.

    Parameters
    ----------
    report
        Of the calibration.
    """
    stack = report.calibration
    low, high = (f"{edge:.2f}" for edge in (stack.step_time.low, stack.step_time.high))
    facts = [
        ("stack", f"{stack.name}, begun from {stack.framework}, on {stack.device}"),
        *_errors(report),
        ("band", f"measured steps within {low} to {high} of predicted ones, 9 times in 10"),
    ]
    return [
        Facts(facts),
        *map(line, report.benchmarks),
        *_moved(report),
        *section("Constants", report.learned, _CONSTANTS),
        *section("Predicted against measured", report.rows[:_MOST_CALIBRATED_ROWS], _CALIBRATED),
        *_next(report),
    ]


def machine_view(report: MachineReport) -> View:
    """The blocks that `meshwright calibrate --measure` prints without runs.

    Parameters
    ----------
    report
        Of the machine.
    """
    stack = report.calibration
    machine = stack.measured
    facts = [("stack", f"{stack.name}, on {stack.device}; launches as of {stack.framework}")]
    if machine is not None:
        facts += [
            ("machine", f"{machine.device}, {machine.software}"),
            (
                "timed",
                f"{len(machine.points)} shapes of {machine.model} in {seconds(machine.wall_s)}",
            ),
        ]
    sentences = [each.sentence for each in report.moved if abs(each.moved_pct) >= _HARDLY_PCT]
    columns: Columns = {
        "name": "constant",
        "assumed": Column("assumed", _THREE),
        "value": Column("yours", _THREE),
        "unit": "unit",
        "moved_pct": Column("moved", _SIGNED, unit="%"),
        "points": Column("times", COUNT),
        "scatter_pct": Column("scatter", decimals(1), unit="%"),
    }
    moved: View = []
    if sentences:
        moved = [Heading("What moved"), *[line(f"- {words}") for words in sentences]]
    return [Facts(facts), *moved, *section("Classes of operations", report.moved, columns)]


_HARDLY_PCT = 2.0
"""A class that moved by less lies where it was assumed."""


_CONSTANTS: Columns = {
    "name": "constant",
    "assumed": Column("assumed", _THREE),
    "value": Column("yours", _THREE),
    "low": Column("from", _THREE),
    "high": Column("to", _THREE),
    "unit": "unit",
    "effect_pct": Column("predictions", _SIGNED, unit="%"),
}


_CALIBRATED: Columns = {
    "id": "run",
    "what": "of",
    "measured": Column("measured", _THREE),
    "before_pct": Column("before", _SIGNED, unit="%"),
    "after_pct": Column("after", _SIGNED, unit="%"),
    "left_out_pct": Column("left out", _SIGNED, unit="%"),
}


def _errors(report: CalibrationReport) -> list[tuple[str, str]]:
    facts = []
    for what in ("step time", "memory"):
        before = report.mean_error_pct(what, "before")
        after = report.mean_error_pct(what, "left_out")
        if before is not None and after is not None:
            words = f"{before:.1f} % before, {after:.1f} % after, each run left out in turn"
            facts.append((what, f"mean error {words}"))
    return facts


UNEXPLAINED_PCT = 15.0
"""Mean error of runs that cannot be said to agree: three times that of the published ones."""


def _moved(report: CalibrationReport) -> View:
    moved = [constant for constant in report.learned if abs(constant.effect_pct) >= MOVED_PCT]
    error = report.mean_error_pct("step time", "before")
    if not moved and error is not None and error > UNEXPLAINED_PCT:
        return [
            line("No constant explains what was measured: look at the rows that are furthest off.")
        ]
    if not moved:
        if not report.rows:
            return [line("No run has a measured step or peak: nothing was learned.")]
        return [line("The runs agree with the shipped constants.")]
    return [Heading("What moved"), *[line(f"- {constant.sentence}") for constant in moved]]


def _next(report: CalibrationReport) -> View:
    if not report.suggestions:
        return []
    first = report.suggestions[0]
    columns: Columns = {
        **{name: Column(name, NUMBER) for name in first.layout},
        "step_time_s": Column("predicted", _THREE, unit="s"),
        "spread_pct": "own spread",
        "spread_after_pct": "doubt of all",
    }
    doubt = f"all layouts are in doubt by {first.spread_before_pct:.1f} % now."
    words = f"Measured next, these would teach most; {doubt}"
    rows = [{**vars(run), **run.layout} for run in report.suggestions]
    return section("What to measure next", rows, columns, words)
