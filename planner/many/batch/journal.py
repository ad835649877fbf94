"""What a batch has done so far, in an SQLite file that survives a kill at any moment."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.errors import InputError

JOURNAL = "journal.sqlite"


class Journal:
    """The results of a batch by position, one transaction each.

    The file stays locked while the journal is open, so that two batches never write one folder; the lock
    goes with the process that holds it. Raises InputError where the folder belongs to another batch, to a
    running one, or, without `resume`, to any.
    """

    def __init__(self, folder: Path, batch: str, *, resume: bool) -> None:
        self._path = folder / JOURNAL
        fresh = not self._path.exists()
        if not fresh and not resume:
            what = "there is a batch in this folder: say --resume to go on with it, or choose another folder"
            raise InputError(what, where=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=0.5)
        try:
            self._open(batch)
        except sqlite3.OperationalError as error:
            self._connection.close()
            what = (
                f"another process is at work in this folder, or it cannot be written to ({error})"
            )
            raise InputError(what, where=str(folder)) from None
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise InputError(
                f"not a journal of a batch ({error}); choose another folder", where=str(self._path)
            ) from None

    def _open(self, batch: str) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA synchronous = FULL")
        run("BEGIN EXCLUSIVE")
        run("CREATE TABLE IF NOT EXISTS batch (id TEXT NOT NULL)")
        run(
            "CREATE TABLE IF NOT EXISTS results (position INTEGER PRIMARY KEY, cached INTEGER NOT NULL,"
            " seconds REAL NOT NULL, result TEXT NOT NULL)"
        )
        batches = run("SELECT id FROM batch").fetchone()
        if batches is None:
            run("INSERT INTO batch VALUES (?)", (batch,))
        run("COMMIT")
        if batches is not None and batches[0] != batch:
            self._connection.close()
            what = (
                "the batch in this folder has other jobs, options or another version of this program; "
                "--resume needs the same ones, else choose another folder"
            )
            raise InputError(what, where=str(self._path))

    def add(self, position: int, row: dict[str, Any], *, cached: bool, seconds: float) -> None:
        """Notes a finished job, whose files are in place. Raises InputError where there is no room."""
        values = (position, int(cached), seconds, json.dumps(row))
        try:
            self._connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", values)
        except sqlite3.OperationalError as error:
            what = f"cannot be written to ({error}); make room, then --resume goes on"
            raise InputError(what, where=str(self._path)) from None

    def done(self) -> set[int]:
        """Positions of the finished jobs."""
        return {row[0] for row in self._connection.execute("SELECT position FROM results")}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Results in the order of the jobs."""
        for (text,) in self._connection.execute("SELECT result FROM results ORDER BY position"):
            yield json.loads(text)

    def totals(self) -> tuple[int, int, float]:
        """(results, how many of them came from the cache, seconds of work)."""
        query = "SELECT COUNT(*), COALESCE(SUM(cached), 0), COALESCE(SUM(seconds), 0) FROM results"
        count, cached, seconds = self._connection.execute(query).fetchone()
        return int(count), int(cached), float(seconds)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
