"""Predicted against measured, drawn: one dot a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import InputError
from meshwright.planner.drawing.charts import Chart, LogScale
from meshwright.planner.drawing.quantities import seconds
from meshwright.planner.drawing.svg import distinct_colour
from meshwright.planner.runs.validation import KINDS, ValidationReport

BAND = 0.1
"""Half-width of the grey band round the diagonal."""
MARGIN = 1.4
"""The axes reach this far beyond the points."""
_GREY, _PALE = "#8a8f98", "#e5e7eb"
Dot = tuple[str, float, float]
"""Group, measured seconds, predicted seconds."""


def check_picture(path: Path) -> None:
    """Raises InputError where a picture could not be written to a path, before any work is done for it."""
    if path.suffix.lower() != ".svg":
        raise InputError("a picture is written as .svg; name it so", where=str(path))
    if path.exists() and not path.is_file():
        raise InputError("not a file; name a file that ends in .svg", where=str(path))
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}; make it first", where=str(path))


def validation_svg(report: ValidationReport) -> str:
    """The rows of a report by device, as SVG text.

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
    missing = sum(known.step_time_s is not None for known in measured) - len(dots)
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
    for index, group in enumerate(sorted({name for name, _, _ in dots})):
        colour = distinct_colour(index)
        for name, measured_s, predicted_s in dots:
            if name == group:
                tip = f"{name}: measured {seconds(measured_s)}, predicted {seconds(predicted_s)}"
                chart.dot((measured_s, predicted_s), colour, size=3, tip=tip)
        chart.name(group, colour)
    return chart.document()
