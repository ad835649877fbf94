"""The results of a batch as tables: CSV, JSON, Parquet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshwright.documents.tables import csv_text
from meshwright.errors import InputError
from meshwright.planner.many.batch.rows import COLUMNS, column_type

Row = Mapping[str, Any]


def csv_bytes(rows: Iterable[Row]) -> bytes:
    """RFC 4180 with a header; what there is none of is empty."""
    return csv_text(COLUMNS, rows).encode()


def json_bytes(rows: Iterable[Row]) -> bytes:
    """`jobs`, a list with every column, and `summary`, jobs by status; one job on a line."""
    ordered = [{name: row.get(name) for name in COLUMNS} for row in rows]
    summary = json.dumps(dict(sorted(Counter(row["status"] for row in ordered).items())))
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in ordered)
    return f'{{"schema": 1, "summary": {summary}, "jobs": [\n{lines}\n]}}\n'.encode()


def parquet_bytes(rows: Iterable[Row]) -> bytes:
    """The same columns. Raises InputError where pyarrow is not installed."""
    pyarrow, parquet = _pyarrow()
    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    ordered = list(rows)
    columns = {
        name: pyarrow.array([row.get(name) for row in ordered], types[column_type(name)])
        for name in COLUMNS
    }
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    table: bytes = sink.getvalue().to_pybytes()
    return table


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        words = "Parquet needs pyarrow: pip install 'meshwright[parquet]'"
        raise InputError(words, where="--format") from None
    return pyarrow, parquet


RESULT_FORMATS: dict[str, Callable[[Iterable[Row]], bytes]] = {
    "csv": csv_bytes,
    "json": json_bytes,
    "parquet": parquet_bytes,
}


def check_formats(names: Sequence[str]) -> None:
    """Raises InputError for a format that there is not, or that lacks its library."""
    for name in names:
        if name not in RESULT_FORMATS:
            raise InputError("unknown format", where="--format", value=name, allowed=RESULT_FORMATS)
        if name == "parquet":
            _pyarrow()
