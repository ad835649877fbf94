"""Tables as text files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV (RFC 4180) under a header.

    Parameters
    ----------
    columns
        Keys of the rows, in the order of the file.
    rows
        Plain values by column. None, or a column that a row lacks, is an empty cell; a list is its items with
        spaces between them; a text that a spreadsheet would take for a formula gets an apostrophe before it.

    Returns
    -------
    str
        The text, one row a line.
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return stream.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA_SIGNS):
        return f"'{value}"
    return value
