"""The results of a batch as tables: CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.many.batch.work import ROW_FIELDS, TEXTS, WHOLE

Row = Mapping[str, Any]


def csv_bytes(rows: Iterable[Row]) -> bytes:
    """RFC 4180 with a header; what there is none of is empty."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ROW_FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: "" if row.get(key) is None else _plain(row[key]) for key in ROW_FIELDS}
        )
    return stream.getvalue().encode()


def _plain(value: object) -> object:
    """Spreadsheets take a text that starts like a formula for one."""
    return (
        f"'{value}"
        if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
        else value
    )


def json_bytes(rows: Iterable[Row]) -> bytes:
    """`jobs`, a list with every column, and `summary`, jobs by status; one job on a line."""
    ordered = [{key: row.get(key) for key in ROW_FIELDS} for row in rows]
    summary = json.dumps(dict(sorted(Counter(row["status"] for row in ordered).items())))
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in ordered)
    return f'{{"schema": 1, "summary": {summary}, "jobs": [\n{lines}\n]}}\n'.encode()


def parquet_bytes(rows: Iterable[Row]) -> bytes:
    """The same columns. Raises InputError where pyarrow is not installed."""
    pyarrow, parquet = _pyarrow()
    ordered = list(rows)
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    kinds = {key: text if key in TEXTS else whole if key in WHOLE else real for key in ROW_FIELDS}
    columns = {
        key: pyarrow.array([row.get(key) for row in ordered], kinds[key]) for key in ROW_FIELDS
    }
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        words = "Parquet needs pyarrow: pip install 'meshwright[parquet]'"
        raise InputError(words, where="--format") from None
    return pyarrow, parquet


FORMATS: dict[str, Callable[[Iterable[Row]], bytes]] = {
    "csv": csv_bytes,
    "json": json_bytes,
    "parquet": parquet_bytes,
}


def check_formats(names: Sequence[str]) -> None:
    """Raises InputError for a format that there is not, or that lacks its library."""
    for name in names:
        if name not in FORMATS:
            raise InputError("unknown format", where="--format", value=name, allowed=FORMATS)
        if name == "parquet":
            _pyarrow()
