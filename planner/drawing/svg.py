"""Shapes of a picture as SVG text. Every text that comes from outside is escaped here."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

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
    """Colour `index` of `count` in order, as #rrggbb."""
    place = (len(_RAMP) - 1) * index / max(1, count - 1)
    lower = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[lower], _RAMP[lower + 1], place - lower)


def diverging_colour(index: int, count: int) -> str:
    """Colour `index` of `count` from blue over white to red, as #rrggbb."""
    place = 2 * index / max(1, count - 1) - 1
    return _mixed(_WHITE, _BLUE if place < 0 else _RED, abs(place))


def _mixed(first: Colour, second: Colour, part: float) -> str:
    """A colour between two, as #rrggbb: the first where `part` is 0, the second where it is 1."""
    mixed = [round(a + (b - a) * part) for a, b in zip(first, second, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def distinct_colour(index: int) -> str:
    """A colour for things without an order: hues step by the golden ratio, so neighbours lie far apart."""
    hue = (index * _GOLDEN + 0.58) % 1
    lightness = (0.52, 0.66, 0.42)[index % 3]
    red, green, blue = (round(part * 255) for part in colorsys.hls_to_rgb(hue, lightness, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink_on(background: str) -> str:
    """White or near-black, whichever stands out more on a colour (relative luminance, WCAG 2)."""
    red, green, blue = (_linear(int(background[k : k + 2], 16) / 255) for k in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#0f172a" if luminance > 0.22 else "#ffffff"


def _linear(part: float) -> float:
    """A part of an sRGB colour, 0 to 1, in proportion to light."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def text_width(text: str, size: float) -> float:
    """About how wide a text is."""
    return len(text) * LETTER_WIDTH * size


def shortened(text: str, width: float, size: float) -> str:
    """A text that fits a width, with an ellipsis in its middle: names of nodes differ at their ends."""
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
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str | None = None,
        stroke_width: float = 1,
        radius: float = 0,
        tip: str | None = None,
    ) -> None:
        """A rectangle; `tip` is shown where the mouse rests on it."""
        line = _stroke(stroke, stroke_width)
        corner = f' rx="{_n(radius)}"' if radius else ""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._shape("rect", f'{place}{corner} fill="{fill}"{line}', tip)

    def circle(
        self,
        x: float,
        y: float,
        radius: float,
        *,
        fill: str,
        stroke: str | None = None,
        tip: str | None = None,
    ) -> None:
        """A disc around (x, y)."""
        place = f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"'
        self._shape("circle", f'{place} fill="{fill}"{_stroke(stroke, 1)}', tip)

    def path(
        self, points: Sequence[tuple[float, float]], *, stroke: str, stroke_width: float = 1
    ) -> None:
        """Straight lines from point to point."""
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._shape(
            "polyline", f'points="{places}" fill="none"{_stroke(stroke, stroke_width)}', None
        )

    def polygon(self, points: Sequence[tuple[float, float]], *, fill: str) -> None:
        """A filled area within straight lines."""
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._shape("polygon", f'points="{places}" fill="{fill}"', None)

    def _shape(self, name: str, attributes: str, tip: str | None) -> None:
        inside = "/>" if tip is None else f"><title>{_text(tip)}</title></{name}>"
        self.parts.append(f"<{name} {attributes}{inside}")

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
        """A line of text; y is its base line."""
        weight = ' font-weight="600"' if bold else ""
        style = f' text-anchor="{anchor}"' if anchor != "start" else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
        self.parts.append(f'<text {place} fill="{ink}"{weight}{style}>{_text(words)}</text>')

    def document(self, height: float, title: str) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(height)}" '
            f'width="{_n(self.width)}" height="{_n(height)}" font-family={quoteattr(FONT)} role="img">'
        )
        body = "\n".join(self.parts)
        paper = f'<rect width="{_n(self.width)}" height="{_n(height)}" fill="#ffffff"/>'
        return f"{head}\n<title>{_text(title)}</title>\n{paper}\n{body}\n</svg>\n"


def flowed(
    sizes: Sequence[tuple[float, float]], width: float, gap: float
) -> tuple[list[tuple[float, float]], float]:
    """Places of boxes in rows of at most `width`, and the height of all of them."""
    places: list[tuple[float, float]] = []
    x = y = row = 0.0
    for box_width, box_height in sizes:
        if x and x + box_width > width:
            x, y, row = 0.0, y + row + gap, 0.0
        places.append((x, y))
        x += box_width + gap
        row = max(row, box_height)
    return places, y + row


def _stroke(colour: str | None, width: float) -> str:
    if colour is None:
        return ""
    line = f' stroke="{colour}"'
    return line if width == 1 else f'{line} stroke-width="{_n(width)}"'


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _text(words: str) -> str:
    """Escaped, and without the control characters that XML cannot hold."""
    printable = [letter if letter.isprintable() else " " for letter in words]
    return escape("".join(printable))
