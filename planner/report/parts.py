"""Pieces that every view is made of: numbers in words, bars, tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

Renderable = Table | Text
"""What the views return, in order; printing is the command line's business."""


def count(number: float) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """A count with its noun in the right number: 1 rank, 8 ranks."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def seconds(value_s: float) -> str:
    """A duration to three or four digits: 12.34 s, 345 ms, 6.7 us."""
    if value_s >= 1000:
        return f"{value_s:,.0f} s"
    if value_s >= 1:
        return f"{value_s:.{2 if value_s >= 100 else 3}f} s"
    if value_s >= 1e-3:
        return f"{value_s * 1e3:.{1 if value_s < 0.1 else 0}f} ms"
    return f"{value_s * 1e6:.1f} us"


def amount(number: float) -> str:
    """A large count in thousands, millions, billions (short scale) or trillions."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return (
                f"{number / size:.3g} {letter}"
                if number < 999.5 * size
                else f"{number / size:,.0f} {letter}"
            )
    return f"{number:.3g}"


def gigabytes(number_bytes: float) -> str:
    """Bytes in GB (1e9), or in MB while small."""
    return (
        f"{number_bytes / 1e9:,.2f} GB" if number_bytes >= 1e8 else f"{number_bytes / 1e6:,.2f} MB"
    )


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return f"{100 * fraction:.{digits}f} %"


def bar(fraction: float, width: int = 20) -> Text:
    """A bar of `width` cells, filled by a fraction from 0 to 1; more than 1 is shown full and red."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    style = "red" if fraction > 1 else "cyan"
    return Text.assemble(("█" * filled, style), ("·" * (width - filled), "dim"))


def printable(text: str) -> str:
    """The text without control characters, which a file could use to steer the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def line(*parts: str | tuple[str, str]) -> Text:
    """A line of text; parts are texts or (text, style)."""
    return Text.assemble(
        *((printable(p), "") if isinstance(p, str) else (printable(p[0]), p[1]) for p in parts)
    )


def heading(title: str) -> Text:
    """The title of a section, after an empty line."""
    return Text.assemble("\n", (title, "bold"))


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: Sequence[int] = (0,)
) -> Table:
    """A table with a line under its head. Columns are flush right but for those numbered in `left`.

    Cells that do not fit are folded, never cut.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def bullets(lines: Iterable[str], mark: str = "-") -> Table:
    """A list whose longer items are wrapped under themselves."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for text in lines:
        table.add_row(mark, Text(printable(text)))
    return table


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names on the left, what is known of them on the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value)) if isinstance(value, str) else value)
    return table


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
