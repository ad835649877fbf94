"""Charts of points on two logarithmic axes, and maps of values, as SVG text.

>>> gpus, step_s = LogScale.of_twos([8, 64]), LogScale.of_twos([0.5, 4])
>>> chart = Chart(across=gpus, down=step_s, title="Step time by GPUs")
>>> chart.dot((8, 4.0), "#3b82c4", tip="8 GPUs: 4 s")
>>> chart.document().startswith("<svg")
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil, floor, log, log2, log10
from typing import TYPE_CHECKING

from meshwright.planner.drawing.svg import Drawing, diverging_colour, shortened

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEFT, TOP, WIDTH, HEIGHT = 80.0, 50.0, 640.0, 380.0
RIGHT, BOTTOM = 220.0, 60.0
_BASE, _MIDDLE = TOP + HEIGHT, LEFT + WIDTH / 2
_PICTURE_HEIGHT = TOP + HEIGHT + BOTTOM
_GRID, _TITLE_INK = "#e2e5ea", "#1b1e23"
_COLOURS = 41
"""Of a map: enough that steps are not seen, few enough that equal neighbours are drawn as one box."""

Point = tuple[float, float]
"""(value across, value down)."""


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis from `low` to `high`, both above 0, with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @staticmethod
    def of_twos(values: Sequence[float]) -> LogScale:
        """The powers of two that enclose the values, at least one apart."""
        low = floor(log2(min(values)))
        high = max(ceil(log2(max(values))), low + 1)
        powers = [2.0**power for power in range(low, high + 1)]
        return LogScale(powers[0], powers[-1], tuple(powers))

    @staticmethod
    def of_tens(values: Sequence[float], margin: float) -> LogScale:
        """From the least value / `margin` to the largest x `margin`; ticks at 1, 2 and 5 of a decade."""
        low, high = min(values) / margin, max(values) * margin
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        ticks = [first * 10.0**decade for decade in decades for first in (1, 2, 5)]
        inside = [tick for tick in ticks if low <= tick <= high]
        return LogScale(low, high, tuple(inside))

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`."""
        return log(value / self.low) / log(self.high / self.low)


@dataclass
class Chart:
    """A chart of points; its grid and axes are drawn first, then what is added, in that order."""

    across: LogScale
    down: LogScale
    title: str
    across_title: str = ""
    down_title: str = ""
    drawing: Drawing = field(default_factory=lambda: Drawing(LEFT + WIDTH + RIGHT))
    _names: int = 0

    def __post_init__(self) -> None:
        _draw_title(self.drawing, self.title)
        for tick in self.across.ticks:
            x, _ = self.position((tick, self.down.low))
            self.drawing.path([(x, TOP), (x, _BASE)], stroke=_GRID)
            self.drawing.text(x, _BASE + 18, f"{tick:g}", anchor="middle")
        for tick in self.down.ticks:
            _, y = self.position((self.across.low, tick))
            self.drawing.path([(LEFT, y), (LEFT + WIDTH, y)], stroke=_GRID)
            self.drawing.text(LEFT - 8, y + 4, f"{tick:g}", anchor="end")
        self.drawing.text(_MIDDLE, _BASE + 42, self.across_title, anchor="middle")
        self.drawing.text(LEFT, TOP - 12, self.down_title, anchor="end")

    def position(self, point: Point) -> Point:
        """(x, y) of a point in the picture; larger values lie to the right and above."""
        across, down = point
        x = LEFT + self.across.place(across) * WIDTH
        y = _BASE - self.down.place(down) * HEIGHT
        return x, y

    def dot(
        self, point: Point, colour: str, *, size: float = 5, hollow: bool = False, tip: str = ""
    ) -> None:
        """A dot at a point."""
        fill = "#ffffff" if hollow else colour
        x, y = self.position(point)
        self.drawing.circle(x, y, size, fill=fill, stroke=colour, tip=tip or None)

    def line(self, points: Sequence[Point], colour: str) -> None:
        """Straight lines from point to point."""
        if len(points) > 1:
            positions = [self.position(point) for point in points]
            self.drawing.path(positions, stroke=colour, stroke_width=1.5)

    def area(self, points: Sequence[Point], colour: str) -> None:
        """A filled polygon."""
        positions = [self.position(point) for point in points]
        self.drawing.polygon(positions, fill=colour)

    def name(self, words: str, colour: str) -> None:
        """A line of the legend."""
        self._names += 1
        x, y = LEFT + WIDTH + 24, TOP + 20 * self._names
        self.drawing.circle(x, y - 4, 5, fill=colour)
        self.drawing.text(x + 12, y, shortened(words, RIGHT - 40, 11))

    def document(self) -> str:
        """The SVG text."""
        return self.drawing.document(_PICTURE_HEIGHT, self.title)


def empty_chart(title: str, words: str) -> str:
    """The SVG text of a chart without points, and why there are none."""
    drawing = Drawing(LEFT + WIDTH + RIGHT)
    _draw_title(drawing, title)
    drawing.text(LEFT, TOP + 20, words)
    return drawing.document(_PICTURE_HEIGHT, title)


def _draw_title(drawing: Drawing, title: str) -> None:
    drawing.text(LEFT, 26, title, size=15, ink=_TITLE_INK, bold=True)


def value_map(
    values: NDArray[np.float64], *, middle: float, title: str, across_title: str, down_title: str
) -> str:
    """A matrix as a map of colours: blue below `middle`, red above it.

    Parameters
    ----------
    values
        [rows, columns]; the first row is drawn on top.
    middle
        The value that is drawn white.
    title, across_title, down_title
        Of the picture, its columns and its rows.

    Returns
    -------
    str
        The SVG text. Neighbours of one colour in a row are one box.
    """
    rows, columns = values.shape
    spread = max(float(abs(values - middle).max()), 0.01)
    drawing = Drawing(LEFT + WIDTH + RIGHT)
    _draw_title(drawing, title)
    height = HEIGHT / rows
    steps = ((values - middle) / spread + 1) / 2 * (_COLOURS - 1)
    for row, colours in enumerate(steps.round().astype(int).tolist()):
        _draw_row(drawing, colours, TOP + row * height, height)
    drawing.text(_MIDDLE, _BASE + 42, across_title, anchor="middle")
    drawing.text(LEFT - 8, TOP + HEIGHT / 2, down_title, anchor="end")
    drawing.text(LEFT, _BASE + 18, "0", anchor="middle")
    drawing.text(LEFT + WIDTH, _BASE + 18, str(columns - 1), anchor="middle")
    drawing.text(LEFT - 8, TOP + 10, "0", anchor="end")
    drawing.text(LEFT - 8, _BASE, str(rows - 1), anchor="end")
    _colour_bar(drawing, middle, spread)
    return drawing.document(_PICTURE_HEIGHT, title)


def _draw_row(drawing: Drawing, colours: Sequence[int], y: float, height: float) -> None:
    """A row of a map; neighbours of one colour are one box."""
    width = WIDTH / len(colours)
    column = 0
    for colour, run in groupby(colours):
        length = len(list(run))
        fill = diverging_colour(colour, _COLOURS)
        drawing.rect(LEFT + column * width, y, length * width, height, fill=fill)
        column += length


def _colour_bar(drawing: Drawing, middle: float, spread: float) -> None:
    """What the colours of a map stand for, right of it."""
    x, step = LEFT + WIDTH + 30, HEIGHT / _COLOURS
    for colour in range(_COLOURS):
        y = _BASE - (colour + 1) * step
        drawing.rect(x, y, 18, step, fill=diverging_colour(colour, _COLOURS))
    for part in (-1, 0, 1):
        y = TOP + HEIGHT * (1 - part) / 2
        drawing.text(x + 26, y + 4, f"{middle + part * spread:.3f}")
