"""A batch from its jobs file to its results: what is done stays done, whatever happens to the process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.documents import csv_text, frame_of, uninterrupted, write_files
from meshwright.errors import InputError
from meshwright.planner.many.engines import (
    COLUMNS,
    Engine,
    Task,
    column_type,
    failed_row,
    local_engine,
    request_of,
)
from meshwright.planner.many.jobs import Job, Journal, code_fingerprint, read_jobs
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.solvers.processes import usable_cores

if TYPE_CHECKING:
    import pandas

# The results of a batch as tables: CSV, JSON, Parquet.


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


PLANS = "plans"
_STAGING = ".staging"
MOST_MISTAKES = 20
"""Mistakes that --strict prints."""


class BatchListener(Protocol):
    """Hears how a batch gets on."""

    def start(self, jobs: int, already: int) -> None:
        """`already` of the jobs are in the journal."""

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        """A job is finished."""


class SilentListener:
    """Hears everything, says nothing."""

    def start(self, jobs: int, already: int) -> None:
        """Nothing."""

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch is done; nothing but formats and calibration changes its results."""

    workers: int | None = None
    """Processes; one for every core when None."""
    engine: str = "local"
    ray_address: str | None = None
    resume: bool = False
    strict: bool = False
    """Whether a job with a mistake stops the batch before it starts."""
    cache: Path | None = None
    formats: tuple[str, ...] = ("csv", "json")
    calibration: Path | None = None
    """The stack file of jobs that name none."""
    budget: Budget | None = None
    """Tokens, days and price of a GPU hour of jobs that name none."""


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchReport:
    """How a batch ended."""

    jobs: int
    by_status: Mapping[str, int]
    already: int
    """Jobs that an earlier run had finished."""
    cached: int
    """Jobs of all runs whose answer came from the cache."""
    work_s: float
    """Seconds of work of all runs, over all workers."""
    wall_s: float
    rows: list[dict[str, Any]]
    written: list[str]

    def __repr__(self) -> str:
        return f"BatchReport({self.jobs} jobs: {dict(self.by_status)}, {self.wall_s:.1f} s)"

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table of pandas, a job in each. Raises InputError where pandas is not installed."""
        return frame_of(self.rows)


def run_batch(
    path: Path, folder: Path, options: BatchOptions, listener: BatchListener
) -> BatchReport:
    """Does the jobs of a file, and writes plans and results under a folder.

    Raises InputError where file, folder or options cannot be used.
    """
    began = time.monotonic()
    check_formats(options.formats)
    jobs = read_jobs(path, calibration=options.calibration, budget=vars(options.budget or Budget()))
    if options.strict:
        _refuse_mistakes(jobs)
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file, not a folder; choose another with -o", where=str(folder))
    cache = str(options.cache.absolute()) if options.cache else None
    with Journal(folder, _identity(jobs), resume=options.resume) as journal:
        _clear_staging(folder)
        done = journal.done()
        listener.start(len(jobs), len(done))
        for position, job in enumerate(jobs):
            if job.document is None and position not in done:
                row = failed_row({**job.fields, "name": job.name}, job.mistake or "")
                journal.add(position, row, cached=False, seconds=0.0)
                listener.done(row, False, 0.0)
        tasks = list(_tasks(jobs, done))
        if tasks:
            _work(tasks, _engine(options, len(tasks), cache), folder, journal, listener)
        rows = list(journal.rows())
        written = _write_results(folder, rows, options.formats)
        _clear_staging(folder)
        count, cached, seconds = journal.totals()
    statuses = [str(row["status"]) for row in rows]
    return BatchReport(
        jobs=count,
        by_status={status: statuses.count(status) for status in dict.fromkeys(statuses)},
        already=len(done),
        cached=cached,
        work_s=seconds,
        wall_s=time.monotonic() - began,
        rows=rows,
        written=written,
    )


def _refuse_mistakes(jobs: list[Job]) -> None:
    """Raises InputError with the jobs that cannot be planned as they stand."""
    mistakes = []
    for job in jobs:
        if job.document is None:
            mistakes.append(job.mistake or job.name)
            continue
        try:
            request_of(job.document)
        except ValueError as error:
            mistakes.append(f"{job.name}: {error}")
    if not mistakes:
        return
    lines = mistakes[:MOST_MISTAKES]
    if len(mistakes) > MOST_MISTAKES:
        lines.append(f"and {len(mistakes) - MOST_MISTAKES} more jobs")
    raise InputError("\n".join(lines))


def _engine(options: BatchOptions, tasks: int, cache: str | None) -> Engine:
    if options.engine == "ray":
        from meshwright.planner.many.engines import ray_engine

        return ray_engine(options.ray_address, cache)
    return local_engine(min(options.workers or usable_cores(), tasks), cache)


def _tasks(jobs: list[Job], done: set[int]) -> Iterator[Task]:
    """Jobs of one model follow each other: in a worker, splits found for one serve the next."""
    waiting = [
        (job.document.model, position, job.document)
        for position, job in enumerate(jobs)
        if job.document and position not in done
    ]
    for _, position, document in sorted(waiting, key=lambda entry: entry[:2]):
        yield position, document.model_dump(mode="json")


def _work(
    tasks: list[Task], engine: Engine, folder: Path, journal: Journal, listener: BatchListener
) -> None:
    names = {position: str(fields["name"]) for position, fields in tasks}
    with closing(engine(tasks)) as results:  # type: ignore[type-var]
        for position, result in results:
            if result["files"]:
                _write_plan(folder, names[position], result["files"])
            journal.add(position, result["row"], cached=result["cached"], seconds=result["seconds"])
            listener.done(result["row"], result["cached"], result["seconds"])


def _identity(jobs: list[Job]) -> str:
    """Of a batch: what its results depend on."""
    text = json.dumps([dict(job.fields) for job in jobs], sort_keys=True, default=str)
    return hashlib.sha256((code_fingerprint() + text).encode()).hexdigest()


def _write_plan(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """A plan's folder appears whole: it is written under another name, then renamed."""
    staging = folder / _STAGING
    staging.mkdir(exist_ok=True)
    half = Path(tempfile.mkdtemp(dir=staging))
    write_files(half, files)
    half.chmod(0o755)
    target = folder / PLANS / name
    target.parent.mkdir(exist_ok=True)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"{target} is not a folder: it is not replaced. Remove it first.")
    if target.exists():
        # Written before a kill, but not yet in the journal.
        shutil.rmtree(target)
    half.rename(target)


def _clear_staging(folder: Path) -> None:
    staging = folder / _STAGING
    if staging.is_dir() and not staging.is_symlink():
        shutil.rmtree(staging)


def _write_results(folder: Path, rows: list[dict[str, Any]], formats: tuple[str, ...]) -> list[str]:
    written = []
    for name in formats:
        data = RESULT_FORMATS[name](rows)
        target = folder / f"results.{name}"
        temporary = folder / f".results.{name}.part"
        try:
            with uninterrupted():
                with temporary.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        written.append(str(target))
    return written
