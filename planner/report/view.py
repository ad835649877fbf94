"""What a view is made of: headings, lines, facts, lists and tables, whatever they are printed on.

A view is a list of blocks. `console.py` renders them for the terminal and `html.py` for a page, so both show
the same. Tables hold values, not texts; the kind of a column says how its values are written:

>>> table = Table([Column("stage"), Column("peak", decimals(1), unit="GiB")], [["0-3", 61.26], ["4", None]])
>>> table.head, [[str(cell) for cell in row] for row in table.cells]
(['stage', 'peak GiB'], [['0-3', '61.3'], ['4', '-']])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.drawing import quantities


@dataclass(frozen=True)
class Words:
    """A text in a style of the terminal: `bold`, `dim`, `bold red`."""

    text: str
    style: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Bar:
    """A bar filled by a fraction from 0 to 1; more than 1 is shown full and red."""

    fraction: float
    width: int = 20
    """Characters on the terminal."""

    @property
    def filled(self) -> float:
        """The filled share, from 0 to 1."""
        return min(max(self.fraction, 0.0), 1.0)


Cell = Words | Bar


@dataclass(frozen=True)
class Kind:
    """How the values of a column are written."""

    write: Callable[[Any], str | Cell]
    is_left: bool = False
    """Whether the column is flush left."""


TEXT = Kind(str, is_left=True)
NUMBER = Kind(str)
COUNT = Kind(quantities.count)
SECONDS = Kind(quantities.seconds)
BYTES = Kind(quantities.gigabytes)
PERCENT = Kind(quantities.percent)
BAR = Kind(Bar, is_left=True)


def decimals(digits: int, *, sign: bool = False) -> Kind:
    """Numbers with so many digits after the point, and a plus sign where `sign` is set."""
    form = f"{'+' if sign else ''},.{digits}f"
    return Kind(lambda value: format(value, form))


def percents(digits: int) -> Kind:
    """Fractions as percentages with so many digits after the point."""
    return Kind(lambda value: quantities.percent(value, digits))


@dataclass(frozen=True)
class Column:
    """The head of a column, its unit and the kind of its values."""

    title: str
    kind: Kind = TEXT
    unit: str = ""
    absent: str = "-"
    """Stands for a value of None."""

    def cell(self, value: object) -> Cell:
        """A value as it is shown; texts and cells stand as they are."""
        if value is None:
            return Words(self.absent)
        shown = value if isinstance(value, str | Words | Bar) else self.kind.write(value)
        return Words(shown) if isinstance(shown, str) else shown


@dataclass(frozen=True)
class Heading:
    """The title of the section that begins here."""

    title: str


@dataclass(frozen=True)
class Line:
    """A line of text; an empty one keeps things apart."""

    parts: tuple[Words, ...] = ()

    def __str__(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Facts:
    """Names, and what each of them is."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of values under the heads of their columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]

    @property
    def head(self) -> list[str]:
        """The titles of the columns with their units."""
        return [f"{column.title} {column.unit}".strip() for column in self.columns]

    @property
    def cells(self) -> list[list[Cell]]:
        """The values as they are shown."""
        return [
            [column.cell(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


Block = Heading | Line | Facts | Bullets | Table
View = list[Block]


def line(*parts: str | Words) -> Line:
    """A line made of texts, plain or styled."""
    return Line(tuple(Words(part) if isinstance(part, str) else part for part in parts))


def sections(view: Iterable[Block]) -> list[tuple[str, View]]:
    """(title, blocks under it) of each section that has any; the blocks before a heading have no title."""
    parts: list[tuple[str, View]] = [("", [])]
    for block in view:
        if isinstance(block, Heading):
            parts.append((block.title, []))
        else:
            parts[-1][1].append(block)
    return [(title, blocks) for title, blocks in parts if blocks]
