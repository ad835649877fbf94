"""Predicted against measured, drawn: one dot a row, or one bar a group. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from meshwright.errors import InputError
from meshwright.planner.runs.validation import KINDS, ValidationReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
NEAR = 0.1
"""Half-width of the grey band round the diagonal."""
Point = tuple[str, float, float]
"""Group, measured seconds, predicted seconds."""


def check_plot(path: Path) -> None:
    """Raises InputError where a picture could not be written to a path, before any work is done for it."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: a plot is written as {' or '.join(FORMATS)}; name it so.")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a file. Name a file that ends in {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}. Make it first.")
    if find_spec("matplotlib") is None:
        raise InputError(
            "a plot needs matplotlib, which is not installed: pip install 'meshwright[plot]'"
        )


def write_scatter(report: ValidationReport, path: Path) -> None:
    """Draws a report's rows by device and writes the picture. Raises InputError."""
    points = [
        (KINDS["device"](row.run), row.measured.step_time_s, row.predicted.step_time_s)
        for row in report.rows
        if row.run is not None and row.measured is not None and row.predicted is not None
    ]
    missing = sum(row.measured is not None for row in report.rows) - len(points)
    if not points:
        raise InputError(
            f"{path}: no row has both a measured and a predicted step, there is nothing to draw."
        )
    title = f"Step time of {len(points)} measured runs" + (f", {missing} failed" if missing else "")
    write_picture(scatter(points, title), path)


def scatter(points: Sequence[Point], title: str) -> Figure:
    """Predicted over measured seconds, both logarithmic, a colour for each group; grey is within 10 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 6.5), layout="constrained")
    axes = figure.add_subplot()
    low = 0.7 * min(min(m, p) for _, m, p in points)
    high = 1.4 * max(max(m, p) for _, m, p in points)
    ends = [low, high]
    below, above = [(1 - NEAR) * x for x in ends], [(1 + NEAR) * x for x in ends]
    axes.fill_between(ends, below, above, color="0.88", linewidth=0.0, label="within 10 %")
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, measured, predicted in points:
        groups[name].append((measured, predicted))
    for name in sorted(groups):
        axes.plot(*zip(*groups[name], strict=True), "o", markersize=3.5, alpha=0.75, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
    axes.set(xlabel="measured step, s", ylabel="predicted step, s")
    axes.legend(frameon=False, fontsize=8)
    return figure


def group_bars(
    errors: Mapping[str, tuple[float, ...]], series: Sequence[str], title: str
) -> Figure:
    """Horizontal bars of mean absolute errors in percent: a group a row, a series a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.42 * len(errors)), layout="constrained")
    axes = figure.add_subplot()
    thick = 0.8 / len(series)
    names = list(errors)
    for index, label in enumerate(series):
        places = [row + (index - (len(series) - 1) / 2) * thick for row in range(len(names))]
        axes.barh(places, [errors[name][index] for name in names], height=thick, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="mean absolute error of the step time, %")
    axes.legend(frameon=False, fontsize=8)
    return figure


def write_picture(figure: Figure, path: Path) -> None:
    """Writes a picture whole, in the format of the path's ending; equal pictures give equal bytes."""
    import matplotlib as mpl

    kind, picture = path.suffix.lower().lstrip("."), io.BytesIO()
    # A fixed salt for the ids, no date, and text as text: the same on every machine.
    with mpl.rc_context({"svg.hashsalt": "meshwright", "svg.fonttype": "none"}):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
    beside = None
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            beside = Path(file.name)
            file.write(picture.getvalue())
        beside.chmod(0o644)
        os.replace(beside, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if beside is not None:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
