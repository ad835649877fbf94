"""What a calibration learned: errors before and after, constants, the run to measure next."""

from __future__ import annotations

from meshwright.planner.report.view import (
    NUMBER,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
    line,
)
from meshwright.planner.runs.calibration.report import CalibrationReport

MOVED_PCT = 1.0
"""Mean change of predictions from which a constant is said to have moved."""
_MOST_CALIBRATED_ROWS = 20
_THREE = Kind(lambda value: f"{value:.3g}")
_SIGNED = decimals(1, sign=True)


def calibration_view(report: CalibrationReport) -> View:
    """The blocks that `meshwright calibrate` prints.

    Parameters
    ----------
    report
        Of the calibration.
    """
    stack = report.calibration
    facts = [
        ("stack", f"{stack.name}, begun from {stack.framework}, on {stack.device}"),
        *_errors(report),
        ("band", f"measured steps within {stack.step_time.low:.2f} to {stack.step_time.high:.2f} "
                 "of predicted ones, 9 times in 10"),
    ]  # fmt: skip
    return [
        Facts(facts),
        *[line(text) for text in report.benchmarks],
        *_moved(report),
        *_constants(report),
        *_calibrated_rows(report),
        *_next(report),
    ]


def _errors(report: CalibrationReport) -> list[tuple[str, str]]:
    facts = []
    for what in ("step time", "memory"):
        before = report.mean_error_pct(what, "before")
        after = report.mean_error_pct(what, "left_out")
        if before is not None and after is not None:
            words = (
                f"mean error {before:.1f} % before, {after:.1f} % after, each run left out in turn"
            )
            facts.append((what, words))
    return facts


def _moved(report: CalibrationReport) -> View:
    moved = [constant for constant in report.learned if abs(constant.effect_pct) >= MOVED_PCT]
    if not moved:
        return [line("The runs agree with the shipped constants.")]
    return [Heading("What moved"), *[line(f"- {constant.sentence}") for constant in moved]]


def _constants(report: CalibrationReport) -> View:
    if not report.learned:
        return []
    columns = [
        Column("constant"),
        Column("assumed", _THREE),
        Column("yours", _THREE),
        Column("from", _THREE),
        Column("to", _THREE),
        Column("unit"),
        Column("predictions", _SIGNED, unit="%"),
    ]
    rows = [
        [
            constant.name,
            constant.assumed,
            constant.value,
            constant.low,
            constant.high,
            constant.unit,
            constant.effect_pct,
        ]
        for constant in report.learned
    ]
    return [Heading("Constants"), Table(columns, rows)]


def _calibrated_rows(report: CalibrationReport) -> View:
    columns = [
        Column("run"),
        Column("of"),
        Column("measured", _THREE),
        Column("before", _SIGNED, unit="%"),
        Column("after", _SIGNED, unit="%"),
        Column("left out", _SIGNED, unit="%"),
    ]
    rows = [
        [row.id, row.what, row.measured, row.before_pct, row.after_pct, row.left_out_pct]
        for row in report.rows[:_MOST_CALIBRATED_ROWS]
    ]
    return [Heading("Predicted against measured"), Table(columns, rows)] if rows else []


def _next(report: CalibrationReport) -> View:
    if not report.suggestions:
        return []
    names = list(report.suggestions[0].layout)
    columns = [
        *[Column(name, NUMBER) for name in names],
        Column("predicted", _THREE, unit="s"),
        Column("own spread", decimals(1), unit="%"),
        Column("doubt of all", decimals(1), unit="%"),
    ]
    rows = [
        [
            *[str(suggestion.layout[name]) for name in names],
            suggestion.step_time_s,
            suggestion.spread_pct,
            suggestion.spread_after_pct,
        ]
        for suggestion in report.suggestions
    ]
    now = report.suggestions[0].spread_before_pct
    words = f"Measured next, these would teach most; all layouts are in doubt by {now:.1f} % now."
    return [Heading("What to measure next"), line(words), Table(columns, rows)]
