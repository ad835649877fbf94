"""What a view is made of: headings, lines, facts, lists and tables, whatever they are printed on.

A view is a list of blocks, printed on the terminal or written into a page, so both show the same. Tables hold
values, not texts: a table is declared once, as the fields of its records and their headings.

>>> stages = [{"stage": "0-3", "peak_gib": 61.26}, {"stage": "4", "peak_gib": None}]
>>> peaks = table(stages, {"stage": "stage", "peak_gib": "peak"})
>>> peaks.head, [[str(cell) for cell in row] for row in peaks.cells]
(['stage', 'peak GiB'], [['0-3', '61.3'], ['4', '-']])
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from rich import box
from rich.table import Table as Grid
from rich.text import Text

from meshwright.planner import drawing


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
PLAIN = Kind("{:g}".format)
COUNT = Kind(drawing.count)
SECONDS = Kind(drawing.seconds)
BYTES = Kind(drawing.gigabytes)
PERCENT = Kind(drawing.percent)
BAR = Kind(Bar, is_left=True)


def decimals(digits: int, *, sign: bool = False) -> Kind:
    """Numbers with so many digits after the point.

    Parameters
    ----------
    digits
        After the point, from 0.
    sign
        Whether numbers above 0 have a plus sign.
    """
    form = f"{'+' if sign else ''},.{digits}f"
    return Kind(lambda value: format(value, form))


def percents(digits: int) -> Kind:
    """Fractions as percentages with so many digits after the point.

    Parameters
    ----------
    digits
        After the point, from 0.
    """
    return Kind(lambda value: drawing.percent(value, digits))


@dataclass(frozen=True)
class Column:
    """The head of a column, its unit and the kind of its values."""

    title: str
    kind: Kind = TEXT
    unit: str = ""
    absent: str = "-"
    """Stands for a value of None."""
    value: Callable[[Any], object] | None = None
    """What a record has in this column, where that is not a field of it."""
    is_optional: bool = False
    """Whether a table of records goes without it where no record has a value."""

    def cell(self, value: object) -> Cell:
        """A value as it is shown; texts and cells stand as they are.

        Parameters
        ----------
        value
            A number or another value of the column's kind; None for an absent one.
        """
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
    """Names, and what each of them is; a name without words is not shown."""

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
Columns = Mapping[str, str | Column]
"""Headings by the fields of the records; a plain heading leaves the kind to the unit in the field's name."""

_BY_UNIT = {
    "s": (SECONDS, ""),
    "bytes": (BYTES, ""),
    "gib": (decimals(1), "GiB"),
    "pct": (decimals(1), "%"),
}


def table(records: Iterable[Any], columns: Columns) -> Table:
    """A table with a row for each record.

    Parameters
    ----------
    records
        Mappings, or objects with attributes. A field that a record lacks is an absent value.
    columns
        By the name of the field. A plain text is a heading over texts, or over numbers of the unit that the
        field's name ends in: `_s`, `_bytes`, `_gib` or `_pct`.
    """
    rows, shown = list(records), []
    for name, column in columns.items():
        head = _column(name, column)
        values = [head.value(row) if head.value else _field(row, name) for row in rows]
        if not head.is_optional or any(value is not None for value in values):
            shown.append((head, values))
    cells = zip(*(values for _, values in shown), strict=True)
    return Table([head for head, _ in shown], list(cells))


def _column(name: str, column: str | Column) -> Column:
    if isinstance(column, Column):
        return column
    kind, unit = _BY_UNIT.get(name.rpartition("_")[2], (TEXT, ""))
    return Column(column, kind, unit)


def _field(record: object, name: str) -> object:
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def section(title: str, records: Collection[Any], columns: Columns, *words: str) -> View:
    """A heading, sentences and a table of records; nothing where there are none.

    Parameters
    ----------
    title
        Of the heading.
    records
        As `table` takes them.
    columns
        As `table` takes them.
    words
        Sentences between the heading and the table.
    """
    return [Heading(title), *map(line, words), table(records, columns)] if records else []


def optional(value: Any, write: Callable[[Any], str]) -> str:
    """A value in words, or no words for None.

    Parameters
    ----------
    value
        None, or what is written.
    write
        Writes it.
    """
    return "" if value is None else write(value)


def line(*parts: str | Words) -> Line:
    """A line made of texts, plain or styled."""
    return Line(tuple(Words(part) if isinstance(part, str) else part for part in parts))


def sections(view: Iterable[Block]) -> list[tuple[str, View]]:
    """(title, blocks under it) of each section that has any; the blocks before a heading have no title.

    Parameters
    ----------
    view
        Its headings begin sections.
    """
    parts: list[tuple[str, View]] = [("", [])]
    for block in view:
        if isinstance(block, Heading):
            parts.append((block.title, []))
        else:
            parts[-1][1].append(block)
    return [(title, blocks) for title, blocks in parts if blocks]


# Views for the terminal, as what `rich` prints; cells that do not fit are folded, never cut.


Printed = Grid | Text


def printed(block: Block) -> Printed:
    """What stands for a block of a view on the terminal."""
    match block:
        case Heading():
            return Text.assemble("\n", (block.title, "bold"))
        case Line():
            return Text.assemble(*map(_text, block.parts))
        case Facts():
            return _pairs(block.rows, apart=2)
        case Bullets():
            return _pairs([("-", item) for item in block.items], apart=1)
        case Table():
            return _table(block)


def _pairs(rows: Sequence[tuple[str, str]], apart: int) -> Grid:
    """Two columns; what is long is wrapped under itself."""
    grid = Grid.grid(padding=(0, apart))
    grid.add_column(no_wrap=True, style="dim" if apart > 1 else "")
    grid.add_column(overflow="fold")
    for name, words in rows:
        if words:
            grid.add_row(printable(name), printable(words))
    return grid


_NARROWEST_WORDS = 4
"""Characters to which a column of words is folded before numbers are."""
_UNBOUNDED = 10_000


class _FoldedGrid(Grid):
    """A table that folds words and headings and moves columns closer before numbers, where that is enough."""

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        wide = console.measure(self, options=options.update(max_width=_UNBOUNDED)).maximum
        needed, numbers = wide, [column for column in self.columns if column.justify == "right"]
        for column in self.columns:
            head = str(column.header)
            cells = max((console.measure(cell).maximum for cell in column.cells), default=0)
            folded = max(cells, *map(len, head.split()), 0)
            needed -= max(cells, len(head))
            needed += folded if column in numbers else min(folded, _NARROWEST_WORDS)
        between = len(self.columns) - 1
        if needed - between <= options.max_width < wide:
            if needed > options.max_width:
                self.padding = 0
            for column in numbers:
                column.no_wrap = True
                column.header = "\n".join(str(column.header).split())
        yield from super().__rich_console__(console, options)


def _table(table: Table) -> Grid:
    grid = _FoldedGrid(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for title, column in zip(table.head, table.columns, strict=True):
        grid.add_column(title, justify="left" if column.kind.is_left else "right", overflow="fold")
    for row in table.cells:
        grid.add_row(*map(_text, row))
    return grid


def _text(cell: Cell) -> Text:
    if isinstance(cell, Words):
        return Text(printable(cell.text), cell.style)
    full = round(cell.filled * cell.width)
    colour = "red" if cell.fraction > 1 else "cyan"
    return Text.assemble(("█" * full, colour), ("·" * (cell.width - full), "dim"))


def printable(text: str) -> str:
    """The text without control characters, which a file could use to steer the terminal.

    Parameters
    ----------
    text
        From anywhere; line breaks stay.
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


# Views as Markdown, for programs that read words.


def view_text(view: Iterable[Block]) -> str:
    """The blocks of a view one below the other, tables with bars between cells.

    Parameters
    ----------
    view
        Blocks from top to bottom.
    """
    return "\n".join(filter(None, map(_block_text, view)))


def _block_text(block: Block) -> str:
    match block:
        case Heading():
            return f"\n## {printable(block.title)}"
        case Line():
            return printable(str(block)).strip()
        case Facts():
            return "\n".join(
                f"- {printable(f'{name}: {words}')}" for name, words in block.rows if words
            )
        case Bullets():
            return "\n".join(f"- {printable(item)}" for item in block.items)
        case Table():
            shares = [[_share(cell) for cell in row] for row in block.cells]
            lines = [block.head, ["---"] * len(block.columns), *shares]
            return "\n".join(f"| {' | '.join(map(_in_a_row, cells))} |" for cells in lines)


def _in_a_row(words: str) -> str:
    return printable(" ".join(words.splitlines())).replace("|", "\\|")


def _share(cell: Cell) -> str:
    """A cell in words: of a bar, how full it is."""
    return f"{100 * cell.fraction:.0f} %" if isinstance(cell, Bar) else cell.text


# Views as HTML, in a page that needs nothing else: it loads nothing, and runs what lies in it alone.


LIBRARY, STYLE, SCRIPT = "echarts.min.js", "page.css", "page.js"
"""Files of the `page` folder that every page holds; the first is Apache ECharts as it is published."""


@dataclass(frozen=True)
class Card:
    """A figure of the answer, and where it may lie."""

    what: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under its title: a sentence, controls, charts, and the tables behind them, folded."""

    key: str
    """Of its place in the page."""
    title: str
    words: str = ""
    before: str = ""
    """HTML above the charts."""
    charts: Sequence[tuple[str, int]] = ()
    """(name in the page's script, height in pixels)."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the charts draw, by name."""
    more: str = ""
    """HTML that unfolds below the charts."""
    fold: str = "Figures"
    """What is unfolded, in a word or two."""
    half: bool = False
    """Whether two of them stand side by side where there is room."""

    def html(self) -> str:
        """The text of the section."""
        parts = [f"<h2>{escape(self.title)}</h2>"]
        parts += [f"<p>{_with_units(self.words)}</p>"] if self.words else []
        parts.append(self.before)
        if self.charts:
            label = escape(f"{self.title}. {self.words}", quote=True)
            places = (
                f'<div class="chart" id="chart-{name}" role="img" aria-label="{label}" '
                f'style="height:{height}px"></div>'
                for name, height in self.charts
            )
            parts.append(f'<div class="charts">{"".join(places)}</div>')
        if self.more:
            more = wide(f"{self.title}: {self.fold}", self.more)
            parts.append(f"<details><summary>{escape(self.fold)}</summary>{more}</details>")
        kind = ' class="half"' if self.half else ""
        return f'<section id="{self.key}"{kind}>{"".join(parts)}</section>'


def page(
    title: str,
    words: str,
    headline: str,
    cards: Sequence[Card],
    parts: Sequence[Section],
    *,
    files: Mapping[str, str],
) -> str:
    """A whole page.

    Parameters
    ----------
    title, words
        What it is about, in a few words and in a line.
    headline
        The answer, in a sentence.
    cards
        Figures of the answer.
    parts
        The sections; where none has figures the page holds no script.
    files
        Texts by the names under which the page saves them.
    """
    figures = {name: figure for part in parts for name, figure in part.figures.items()}
    cards_html = "".join(map(_card, cards))
    links = "".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in parts)
    links += "".join(f"<li>{_saved(name, text)}</li>" for name, text in files.items())
    body = "\n".join(part.html() for part in parts)
    scripts = [_asset(LIBRARY), _asset(SCRIPT)] if figures else []
    data = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")
    tail = f'<script type="application/json" id="figures">{data}</script>\n' if figures else ""
    tail += "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_asset(STYLE)}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1><p class="soft">{escape(words)}</p>'
        f'<p class="headline">{escape(headline)}</p><div class="cards">{cards_html}</div>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<div class="sections">\n{body}\n</div></main>\n{tail}</body></html>\n'
    )


def _card(card: Card) -> str:
    note = f"<small>{_with_units(card.note)}</small>" if card.note else ""
    value, what = _with_units(card.value), escape(card.what)
    return f'<div class="card"><b>{value}</b><span>{what}</span>{note}</div>'


_SLASH_OF_A_PATH = re.compile(r"(?<=\w\w)/(?=\w\w)")
_UNIT_BEHIND = re.compile(r"(?<=\d) (?=(?:%|s|ms|us|x|[KMGT]i?B|tokens)(?:\W|$))")


def _with_units(words: str) -> str:
    """Escaped, with figures that keep their unit on their line."""
    return _UNIT_BEHIND.sub("&nbsp;", escape(words))


def wide(label: str, html: str) -> str:
    """HTML that scrolls sideways where it is too wide, by keys too.

    Parameters
    ----------
    label
        What screen readers say of it.
    html
        A table or a drawing.
    """
    name = escape(label, quote=True)
    return f'<div class="wide" role="region" tabindex="0" aria-label="{name}">{html}</div>'


def _saved(name: str, text: str) -> str:
    """A link that saves a text as a file; it is loaded from nowhere."""
    data = b64encode(text.encode()).decode()
    return (
        f'<a download="{escape(name, quote=True)}" href="data:text/plain;charset=utf-8;base64,{data}">'
        f"Save {escape(name)}</a>"
    )


def _asset(name: str) -> str:
    """A file of the `page` folder."""
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Nothing is loaded, and nothing runs but these scripts."""
    hashes = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


def section_html(title: str, view: View) -> str:
    """The blocks of a part of a section under its title.

    Parameters
    ----------
    title
        Of the part; empty for none.
    view
        Its blocks.
    """
    parts = [f"<h3>{escape(title)}</h3>"] if title else []
    return "\n".join([*parts, *map(block_html, view)])


def block_html(block: Block) -> str:
    """One block of a view."""
    match block:
        case Heading():
            return f"<h3>{escape(block.title)}</h3>"
        case Line():
            words = _prose(str(block))
            return f"<p>{words}</p>" if words.strip() else ""
        case Facts():
            rows = (
                f"<dt>{escape(name)}</dt><dd>{_prose(words)}</dd>"
                for name, words in block.rows
                if words
            )
            return f"<dl>{''.join(rows)}</dl>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{_prose(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            kinds = [' class="left"' if column.kind.is_left else "" for column in block.columns]
            head = _row("th", kinds, map(escape, block.head))
            body = "".join(_row("td", kinds, map(_cell, row)) for row in block.cells)
            return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _prose(words: str) -> str:
    """Words of a paragraph. The path of a file may break behind its slashes, on a narrow screen."""
    return _SLASH_OF_A_PATH.sub("/<wbr>", escape(words))


def _row(tag: str, kinds: Sequence[str], cells: Iterable[str]) -> str:
    parts = (f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(parts)}</tr>"


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Bar):
        return escape(cell.text)
    over = " over" if cell.fraction > 1 else ""
    return f'<span class="bar{over}"><i style="width:{100 * cell.filled:.0f}%"></i></span>'
