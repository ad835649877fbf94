"""Pictures as SVG text: charts of points on two logarithmic axes, waterfalls, and maps of values.

>>> gpus, step_s = LogScale.of_twos([8, 64]), LogScale.of_twos([0.5, 4])
>>> chart = Chart(across=gpus, down=step_s, title="Step time by GPUs")
>>> chart.dot((8, 4.0), "#3b82c4", tip="8 GPUs: 4 s")
>>> chart.document().startswith("<svg")
True

Beside them quantities as people read them, in tables and in pictures:

>>> seconds(0.0345), percent(0.4567), gigabytes(3.2e9), ranges([0, 1, 2, 5])
('34.5 ms', '45.7 %', '3.20 GB', '0-2, 5')
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from math import ceil, floor, log, log2, log10
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Shapes of a picture as SVG text. Every text that comes from outside is escaped here.


FONT = "Inter, 'Helvetica Neue', Arial, sans-serif"
LETTER_WIDTH = 0.61
"""Width of an average letter of a wide sans-serif font, in font sizes."""

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

_GOLDEN = 0.618033988749895

# Nine steps of matplotlib's viridis (CC0), even to the eye, also without colour vision; the ends are cut off.
_RAMP = (
    (71, 39, 119),
    (62, 74, 137),
    (49, 104, 142),
    (38, 130, 142),
    (31, 158, 137),
    (53, 183, 121),
    (109, 205, 89),
    (180, 222, 44),
    (223, 227, 24),
)
_BLUE, _RED, _WHITE = (33, 102, 172), (178, 24, 43), (255, 255, 255)


def ramp_colour(index: int, count: int) -> str:
    """Colour `index` of `count` in order, as #rrggbb.

    Parameters
    ----------
    index
        Place in the order, from 0 to `count` - 1.
    count
        Colours in all, at least 1.
    """
    place = (len(_RAMP) - 1) * index / max(1, count - 1)
    lower = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[lower], _RAMP[lower + 1], place - lower)


def diverging_colour(index: int, count: int) -> str:
    """Colour `index` of `count` from blue over white to red, as #rrggbb.

    Parameters
    ----------
    index
        Place in the order, from 0 to `count` - 1; the middle one is white.
    count
        Colours in all, at least 1.
    """
    place = 2 * index / max(1, count - 1) - 1
    return _mixed(_WHITE, _BLUE if place < 0 else _RED, abs(place))


def _mixed(first: Colour, second: Colour, part: float) -> str:
    """A colour between two, as #rrggbb: the first where `part` is 0, the second where it is 1."""
    mixed = [round(a + (b - a) * part) for a, b in zip(first, second, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def distinct_colour(index: int) -> str:
    """A colour for things without an order: hues step by the golden ratio, so neighbours lie far apart.

    Parameters
    ----------
    index
        Of the thing, from 0; neighbours in number lie far apart in hue.
    """
    hue = (index * _GOLDEN + 0.58) % 1
    lightness = (0.52, 0.66, 0.42)[index % 3]
    red, green, blue = (round(part * 255) for part in colorsys.hls_to_rgb(hue, lightness, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink_on(background: str) -> str:
    """White or near-black, whichever stands out more on a colour (relative luminance, WCAG 2).

    Parameters
    ----------
    background
        As #rrggbb.
    """
    red, green, blue = (_linear(int(background[k : k + 2], 16) / 255) for k in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#0f172a" if luminance > 0.22 else "#ffffff"


def _linear(part: float) -> float:
    """A part of an sRGB colour, 0 to 1, in proportion to light."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def text_width(text: str, size: float) -> float:
    """About how wide a text is.

    Parameters
    ----------
    text
        One line.
    size
        Of the font; widths are in its unit, pixels of the picture.
    """
    return len(text) * LETTER_WIDTH * size


def shortened(text: str, width: float, size: float) -> str:
    """A text that fits a width, with an ellipsis in its middle: names of nodes differ at their ends.

    Parameters
    ----------
    text
        One line.
    width
        Room for it, in pixels.
    size
        Of the font, in pixels.
    """
    room = max(1, int(width / (LETTER_WIDTH * size)))
    if len(text) <= room:
        return text
    head = (room - 1) // 3
    tail = room - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"


@dataclass
class Drawing:
    """Shapes in the order in which they are painted."""

    width: float
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, tip: str | None = None, **style: Any
    ) -> None:
        """A rectangle with `fill`, `stroke`, `stroke_width` and `radius`; the mouse shows `tip`.

        Parameters
        ----------
        x, y
            The upper left corner, in pixels from that of the picture.
        width, height
            In pixels, above 0.
        tip
            What the mouse shows; None for nothing.
        style
            `fill`, `stroke`, `stroke_width` and `radius`, that of the corners.
        """
        self._shape("rect", tip, x=x, y=y, width=width, height=height, **style)

    def circle(
        self, x: float, y: float, radius: float, tip: str | None = None, **style: Any
    ) -> None:
        """A disc around (x, y), styled as a rectangle.

        Parameters
        ----------
        x, y
            The middle, in pixels.
        radius
            In pixels.
        tip
            What the mouse shows; None for nothing.
        style
            `fill`, `stroke` and `stroke_width`.
        """
        self._shape("circle", tip, cx=x, cy=y, r=radius, **style)

    def path(self, points: Sequence[tuple[float, float]], **style: Any) -> None:
        """Straight lines from point to point.

        Parameters
        ----------
        points
            (x, y) in turn, in pixels.
        style
            `stroke` and `stroke_width`; nothing is filled.
        """
        self._shape("polyline", points=_places(points), fill="none", **style)

    def polygon(self, points: Sequence[tuple[float, float]], *, fill: str) -> None:
        """A filled area within straight lines.

        Parameters
        ----------
        points
            (x, y) of the corners in turn, in pixels; the last one is joined to the first.
        fill
            Its colour, as #rrggbb.
        """
        self._shape("polygon", points=_places(points), fill=fill)

    def _shape(
        self,
        name: str,
        tip: str | None = None,
        *,
        fill: str,
        stroke: str | None = None,
        stroke_width: float = 1,
        radius: float = 0,
        **place: str | float,
    ) -> None:
        """An element with its place, its area's and its border's colour, and the radius of its corners."""
        corner = {"rx": radius} if radius else {}
        attributes = {**place, **corner, "fill": fill}
        if stroke is not None:
            width = {} if stroke_width == 1 else {"stroke-width": stroke_width}
            attributes |= {"stroke": stroke, **width}
        words = " ".join(
            f'{key}="{value if isinstance(value, str) else _n(value)}"'
            for key, value in attributes.items()
        )
        inside = "/>" if tip is None else f"><title>{_text(tip)}</title></{name}>"
        self.parts.append(f"<{name} {words}{inside}")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        ink: str = "#334155",
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """A line of text; y is its base line.

        Parameters
        ----------
        x, y
            Where the line begins, or its middle or end by `anchor`, on its base line; in pixels.
        words
            One line; escaped here.
        size
            Of the font, in pixels.
        ink
            Its colour, as #rrggbb.
        bold
            Whether it is heavy.
        anchor
            start, middle or end.
        """
        weight = ' font-weight="600"' if bold else ""
        style = f' text-anchor="{anchor}"' if anchor != "start" else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
        self.parts.append(f'<text {place} fill="{ink}"{weight}{style}>{_text(words)}</text>')

    def document(self, height: float, title: str) -> str:
        """The whole file.

        Parameters
        ----------
        height
            Of the picture, in pixels; its width is the drawing's.
        title
            What screen readers say of it; escaped here.
        """
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(height)}" '
            f'width="{_n(self.width)}" height="{_n(height)}" font-family="{FONT}" role="img">'
        )
        body = "\n".join(self.parts)
        paper = f'<rect width="{_n(self.width)}" height="{_n(height)}" fill="#ffffff"/>'
        return f"{head}\n<title>{_text(title)}</title>\n{paper}\n{body}\n</svg>\n"


def flowed(
    sizes: Sequence[tuple[float, float]], width: float, gap: float
) -> tuple[list[tuple[float, float]], float]:
    """Places of boxes in rows of at most `width`, and the height of all of them.

    Parameters
    ----------
    sizes
        Width and height of each box, in the order of reading.
    width
        Of a row; a box that is wider has a row of its own.
    gap
        Between boxes and between rows.
    """
    places: list[tuple[float, float]] = []
    x = y = row = 0.0
    for box_width, box_height in sizes:
        if x and x + box_width > width:
            x, y, row = 0.0, y + row + gap, 0.0
        places.append((x, y))
        x += box_width + gap
        row = max(row, box_height)
    return places, y + row


def _places(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def one_line(words: str) -> str:
    """Words with a space for every line break and control character.

    Where they stand in a comment of a script, a list of hosts or a drawing, none may end it.

    Parameters
    ----------
    words
        From anywhere: names of a model's file and of parts of a cluster may hold such characters.
    """
    return "".join(letter if letter.isprintable() else " " for letter in words)


def _text(words: str) -> str:
    """Escaped, and without the control characters that XML cannot hold."""
    return escape(one_line(words), quote=False)


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
        """The powers of two that enclose the values, at least one apart.

        Parameters
        ----------
        values
            Above 0, at least one.
        """
        low = floor(log2(min(values)))
        high = max(ceil(log2(max(values))), low + 1)
        powers = [2.0**power for power in range(low, high + 1)]
        return LogScale(powers[0], powers[-1], tuple(powers))

    @staticmethod
    def of_tens(values: Sequence[float], margin: float) -> LogScale:
        """From the least value / `margin` to the largest x `margin`; ticks at 1, 2 and 5 of a decade.

        Parameters
        ----------
        values
            Above 0, at least one.
        margin
            At least 1: how far the axis reaches beyond the values, as a factor.
        """
        low, high = min(values) / margin, max(values) * margin
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        ticks = [first * 10.0**decade for decade in decades for first in (1, 2, 5)]
        inside = [tick for tick in ticks if low <= tick <= high]
        return LogScale(low, high, tuple(inside))

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`.

        Parameters
        ----------
        value
            Above 0; beyond the ends it lies below 0 or above 1.
        """
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
    _series: int = 0

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
        """(x, y) of a point in the picture; larger values lie to the right and above.

        Parameters
        ----------
        point
            (value across, value down), both above 0, in the units of the axes.
        """
        across, down = point
        x = LEFT + self.across.place(across) * WIDTH
        y = _BASE - self.down.place(down) * HEIGHT
        return x, y

    def dot(
        self, point: Point, colour: str, *, size: float = 5, hollow: bool = False, tip: str = ""
    ) -> None:
        """A dot at a point.

        Parameters
        ----------
        point
            (value across, value down), in the units of the axes.
        colour
            As #rrggbb.
        size
            Its radius, in pixels.
        hollow
            Whether only its border is coloured.
        tip
            What the mouse shows; empty for nothing.
        """
        fill = "#ffffff" if hollow else colour
        x, y = self.position(point)
        self.drawing.circle(x, y, size, fill=fill, stroke=colour, tip=tip or None)

    def line(self, points: Sequence[Point], colour: str) -> None:
        """Straight lines from point to point.

        Parameters
        ----------
        points
            (value across, value down) in turn; fewer than two draw nothing.
        colour
            As #rrggbb.
        """
        if len(points) > 1:
            positions = [self.position(point) for point in points]
            self.drawing.path(positions, stroke=colour, stroke_width=1.5)

    def area(self, points: Sequence[Point], colour: str) -> None:
        """A filled polygon.

        Parameters
        ----------
        points
            (value across, value down) of the corners in turn.
        colour
            That fills it, as #rrggbb.
        """
        positions = [self.position(point) for point in points]
        self.drawing.polygon(positions, fill=colour)

    def named_colour(self, words: str) -> str:
        """The colour of the next series, which is named in the legend.

        Parameters
        ----------
        words
            The name of the series.
        """
        colour = distinct_colour(self._series)
        self._series += 1
        self.name(words, colour)
        return colour

    def name(self, words: str, colour: str) -> None:
        """A line of the legend.

        Parameters
        ----------
        words
            Shortened where they are longer than the room right of the chart.
        colour
            Of the dot in front of them, as #rrggbb.
        """
        self._names += 1
        x, y = LEFT + WIDTH + 24, TOP + 20 * self._names
        self.drawing.circle(x, y - 4, 5, fill=colour)
        self.drawing.text(x + 12, y, shortened(words, RIGHT - 40, 11))

    def document(self) -> str:
        """The SVG text."""
        return self.drawing.document(_PICTURE_HEIGHT, self.title)


def empty_chart(title: str, words: str) -> str:
    """The SVG text of a chart without points, and why there are none.

    Parameters
    ----------
    title
        Of the picture.
    words
        Why nothing is drawn.
    """
    drawing = Drawing(LEFT + WIDTH + RIGHT)
    _draw_title(drawing, title)
    drawing.text(LEFT, TOP + 20, words)
    return drawing.document(_PICTURE_HEIGHT, title)


def _draw_title(drawing: Drawing, title: str) -> None:
    drawing.text(LEFT, 26, title, size=15, ink=_TITLE_INK, bold=True)


BAR_HEIGHT, BARS_LEFT, BARS_WIDTH = 26.0, 210.0, 420.0
"""Of a waterfall: its bars, and the room for their names."""
_WHOLE, _MORE, _LESS = "#475569", "#d97706", "#0f766e"


@dataclass(frozen=True)
class FallBar:
    """One bar of a waterfall: from one value to another, both at least 0."""

    name: str
    start: float
    end: float
    label: str
    """The value in words."""
    is_whole: bool = False
    """Whether it stands for a sum, not for a change."""


def waterfall_svg(bars: Sequence[FallBar], title: str) -> str:
    """Bars under one another, each from where the last one ended.

    Parameters
    ----------
    bars
        From the top; at least one.
    title
        Of the picture.

    Returns
    -------
    str
        The SVG text: sums in grey, what adds in orange, what saves in green.
    """
    tallest = max(max(bar.start, bar.end) for bar in bars) or 1.0
    drawing = Drawing(BARS_LEFT + BARS_WIDTH + 130.0)
    drawing.text(10, 22, title, size=14, ink=_TITLE_INK, bold=True)
    scale = BARS_WIDTH / tallest
    for row, bar in enumerate(bars):
        y = 38 + row * BAR_HEIGHT
        low, high = sorted((bar.start, bar.end))
        colour = _WHOLE if bar.is_whole else _MORE if bar.end >= bar.start else _LESS
        drawing.text(
            BARS_LEFT - 10, y + 15, shortened(bar.name, BARS_LEFT - 20, 12), size=12, anchor="end"
        )
        drawing.rect(
            BARS_LEFT + low * scale,
            y + 3,
            max((high - low) * scale, 1.0),
            BAR_HEIGHT - 8,
            fill=colour,
            tip=f"{bar.name}: {bar.label}",
        )
        drawing.text(BARS_LEFT + high * scale + 6, y + 15, bar.label, size=12)
    return drawing.document(46 + len(bars) * BAR_HEIGHT, title)


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


def count(number: float) -> str:
    """A whole number with its thousands apart: 4,096."""
    return f"{number:,.0f}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun in the right number: 1 rank, 8 ranks; `plural` where it is not noun + s.

    Parameters
    ----------
    number
        At least 0.
    noun
        In the singular.
    plural
        Where it is not the noun with an s.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{count(number)} {plural or noun + 's'}"


def batch_words(samples: int, tokens: int, sequences: int = 1) -> str:
    """A batch of samples of so many sequences of so many tokens: 2,048 sequences x 8,192 tokens.

    Parameters
    ----------
    samples
        Of a step, at least 1.
    tokens
        Of a sequence, at least 1.
    sequences
        Of a sample: 2 where samples are pairs.
    """
    words = f"{counted(samples * sequences, 'sequence')} x {counted(tokens, 'token')}"
    return f"{counted(samples, 'pair')} = {words}" if sequences > 1 else words


_DURATIONS = (
    (1000.0, "{:,.0f} s", 1.0),
    (100.0, "{:.2f} s", 1.0),
    (1.0, "{:.3f} s", 1.0),
    (0.1, "{:.0f} ms", 1e3),
    (1e-3, "{:.1f} ms", 1e3),
    (float("-inf"), "{:.1f} us", 1e6),
)
_ROUNDED = ((1000.0, "{:,.0f} s"), (100.0, "{:.1f} s"), (10.0, "{:.2f} s"))
"""From how many seconds on a duration is written how."""


def seconds(value_s: float) -> str:
    """A duration to three or four digits: 12.34 s, 345 ms, 6.7 us.

    Parameters
    ----------
    value_s
        Of any size; below 1 ms it is written in microseconds.
    """
    form, in_a_second = next(row[1:] for row in _DURATIONS if value_s >= row[0])
    return form.format(value_s * in_a_second)


def rounded_seconds(value_s: float) -> str:
    """A duration to the four digits that a prediction can claim: 27.95 s, 118.4 s.

    Parameters
    ----------
    value_s
        Of any size; from 10 to 1,000 s it has a digit less than `seconds` gives.
    """
    forms = (form for least_s, form in _ROUNDED if value_s >= least_s)
    form = next(forms, None)
    return seconds(value_s) if form is None else form.format(value_s)


def hours(value_s: float) -> str:
    """A time of a schedule in days, hours, minutes or seconds: 3.2 h.

    Parameters
    ----------
    value_s
        At least 0.
    """
    for size_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.1f} {name}"
    return f"{value_s:.0f} s"


def amount(number: float) -> str:
    """A large count in thousands, millions, billions (short scale) or trillions: 70.6 B.

    Parameters
    ----------
    number
        At least 0; below a thousand to three digits.
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            digits = ".3g" if number < 999.5 * size else ",.0f"
            return f"{number / size:{digits}} {letter}"
    return f"{number:.3g}"


def gigabytes(number_bytes: float) -> str:
    """Bytes in GB (1e9), or in MB (1e6) while small.

    Parameters
    ----------
    number_bytes
        At least 0; below 1e8 it is written in MB.
    """
    if number_bytes >= 1e8:
        return f"{number_bytes / 1e9:,.2f} GB"
    return f"{number_bytes / 1e6:,.2f} MB"


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage: 0.4567 is 45.7 %.

    Parameters
    ----------
    fraction
        1 is 100 %; may be negative.
    digits
        After the point, from 0.
    """
    return f"{100 * fraction:.{digits}f} %"


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers with runs put together: 0, 1, 2, 5 is `0-2, 5`.

    Parameters
    ----------
    numbers
        Whole, in rising order.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
