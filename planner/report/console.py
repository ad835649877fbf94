"""Views for the terminal, as what `rich` prints; cells that do not fit are folded, never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table as Grid
from rich.text import Text

from meshwright.planner.report.view import (
    Bar,
    Block,
    Bullets,
    Cell,
    Facts,
    Heading,
    Line,
    Table,
    Words,
)

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
        grid.add_row(printable(name), printable(words))
    return grid


def _table(table: Table) -> Grid:
    grid = Grid(
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
    return _bar(cell)


def _bar(bar: Bar) -> Text:
    full = round(bar.filled * bar.width)
    colour = "red" if bar.fraction > 1 else "cyan"
    return Text.assemble(("█" * full, colour), ("·" * (bar.width - full), "dim"))


def printable(text: str) -> str:
    """The text without control characters, which a file could use to steer the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
