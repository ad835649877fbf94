"""The jobs file: explicit jobs, and matrices of values that are multiplied out."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from meshwright.cluster_specs.reader import cluster_names
from meshwright.costmodel.execution_names import (
    DEFAULT_MEMORY_RISK,
    PRETRAINING,
    ReferencePlace,
    StepKindName,
)
from meshwright.costmodel.losses import LossName
from meshwright.documents import (
    LARGE_FILE_BYTES,
    ClosedDocument,
    path_text,
    read_mapping,
    validated,
)
from meshwright.errors import InputError
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.model_specs.adapters import EVERY_PARAMETER
from meshwright.model_specs.reader import catalog_names
from meshwright.planner.request.plan_request import (
    CutUse,
    Degree,
    Gibibytes,
    MemoryRiskShare,
    PlanRequest,
    Sequences,
    Tokens,
)

MOST_JOBS = 100_000
LONGEST_NAME = 120
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_NAMED_BY = ("model", "cluster", "gpus", "global_batch", "seq_len", "precision", "framework")

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class JobDoc(ClosedDocument):
    """One job: the options of `meshwright plan` by their names, and a name of its own."""

    name: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None
    """Also the folder of its plan; made of the other fields when absent."""
    model: Text
    """Catalog name, model YAML or config.json; a relative path starts at the jobs file."""
    cluster: Text
    """Catalog name or cluster YAML; a relative path starts at the jobs file."""
    gpus: Degree | None = None
    """The first N GPUs; all of the cluster's when absent."""
    nodes: str | tuple[str, ...] | None = None
    """Only these of the cluster file's nodes: a host list, or a list; the Slurm job's when absent."""
    global_batch: Sequences
    """Sequences per step."""
    seq_len: Tokens
    """Tokens per sequence."""
    precision: str = "bf16"
    optimizer: str = "adam"
    framework: str = DEFAULT_FRAMEWORK
    pin: str | dict[str, int | str] = ""
    """`tp=8,pp=4`, or a mapping."""
    forbid: str | tuple[str, ...] = ()
    """`cp,full-recompute`, or a list."""
    without: str | tuple[str, ...] = ()
    """Software that is not there: `deepep,cuda-graph`, or a list."""
    allow: str | tuple[str, ...] = ()
    """What may change the numbers of the run: `bf16-grads,fp8-params`, `all`, or a list."""
    inside_domain: str | tuple[str, ...] = ()
    """Axes whose groups each lie in one NVLink domain: `tp,cp`, or a list."""
    max_cut_use: CutUse = 1.0
    """Share of the capacity of every cut of the fabric that may be used in a phase."""
    moe_dispatch: str | None = None
    """Pins the dispatcher of tokens."""
    calibration: Text | None = None
    """A stack file that `meshwright calibrate` wrote; a relative path starts at the jobs file."""
    train: str = EVERY_PARAMETER
    """Or `lora`, `qlora` and their kin: adapters beside frozen weights."""
    lora_rank: int | None = None
    """Width of the adapters; 16 when absent."""
    lora_targets: str | tuple[str, ...] | None = None
    """Matrices that have one: `q_proj,v_proj`, or a list; all-linear when absent."""
    image_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Of all images of a sequence, as the language model reads them; 0: text alone."""
    images_per_sequence: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Images that share them evenly; one, or as many as a fixed size makes, when absent."""
    freeze_encoder: bool = False
    """Whether the image encoder and its projector are left as they are."""
    loss: LossName | None = None
    """Head and cross-entropy chunk by chunk; the framework's own when absent."""
    kind: StepKindName = PRETRAINING
    """What a step does with a sample, a sequence or a pair."""
    reference: ReferencePlace | None = None
    """Where the reference model of dpo and kto is; `resident` when absent."""
    objective: str = "nominal"
    """Or `expected`: the mean over the posterior of the calibration."""
    reserve_gib: Gibibytes = 0.0
    memory_risk: MemoryRiskShare = DEFAULT_MEMORY_RISK
    """Share of measured errors of memory with which the plan may not fit."""
    method: str = "cp-sat"
    top: Annotated[int, Field(ge=1, le=1000)] = 1
    time_limit: Annotated[float, Field(ge=0, le=31_536_000)] | None = None
    """Seconds for the search; a plan that it cuts short depends on the machine."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    tokens: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Of the whole training, for its days, dollars and kWh."""
    days: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """With tokens the deadline; without, how long is trained."""
    gpu_hour_price: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Dollars; the cluster file's when absent."""


class JobsDoc(ClosedDocument):
    """The jobs file: `jobs`, `matrix` (a mapping of lists, or several of them), and fields for all jobs."""

    schema_: Annotated[int, Field(ge=1, le=1)] = Field(default=1, alias="schema")
    defaults: dict[str, Any] = Field(default_factory=dict)
    jobs: list[dict[str, Any]] = Field(default_factory=list)
    matrix: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as read. One that cannot be planned carries its mistake instead of a document."""

    name: str
    fields: Mapping[str, Any]
    """As given, defaults included."""
    document: JobDoc | None
    mistake: str | None


def read_jobs(
    path: Path,
    kind: type[JobDoc] = JobDoc,
    calibration: Path | None = None,
    budget: Mapping[str, float | None] | None = None,
) -> list[Job]:
    """The jobs of a file in its order, those of `matrix` after `jobs`; no two names are equal, case ignored.

    A job with a bad field is returned with its mistake. Raises InputError where the file as a whole cannot be
    used, or a name is bad or given twice.

    Parameters
    ----------
    path
        A YAML or JSON file with `jobs` or `matrix`.
    kind
        The document that each job is held against.
    calibration
        A stack file, for jobs that name none; None for none.
    budget
        `tokens`, `days` and `gpu_hour_price` of jobs that name none; None where nothing is to be said of
        them.
    """
    where = path_text(path)
    data = read_mapping(path, LARGE_FILE_BYTES)
    document = validated(JobsDoc, data, where)
    if calibration is not None:
        defaults = {"calibration": str(calibration.absolute()), **document.defaults}
        document = document.model_copy(update={"defaults": defaults})
    given = {name: value for name, value in (budget or {}).items() if value is not None}
    if given:
        document = document.model_copy(update={"defaults": {**given, **document.defaults}})
    entries = [*_listed(document), *_multiplied(document, where)]
    if not entries:
        raise InputError(
            "no job: give `jobs`, a list, or `matrix`, lists to multiply out", where=where
        )
    names = _names(entries, where)
    return [
        _job(f"{where}: {place} ({name})", {**fields, "name": name}, path.parent, kind)
        for (place, fields), name in zip(entries, names, strict=True)
    ]


_Entry = tuple[str, dict[str, Any]]
"""(place in the file, fields) of a job."""


def _listed(document: JobsDoc) -> Iterator[_Entry]:
    for index, fields in enumerate(document.jobs):
        yield f"jobs[{index}]", {**document.defaults, **fields}


def _multiplied(document: JobsDoc, where: str) -> Iterator[_Entry]:
    """Every combination of a matrix' values, the last list running fastest."""
    if isinstance(document.matrix, list):
        matrices = {f"matrix[{index}]": matrix for index, matrix in enumerate(document.matrix)}
    else:
        matrices = {"matrix": document.matrix}
    jobs = len(document.jobs)
    for place, matrix in matrices.items():
        axes = _axes(matrix, f"{where}: {place}")
        if not axes:
            continue
        jobs += prod(len(values) for values in axes.values())
        if jobs > MOST_JOBS:
            raise InputError(f"more than {MOST_JOBS} jobs; split the file", where=where, value=jobs)
        for combination in product(*axes.values()):
            yield place, {**document.defaults, **dict(zip(axes, combination, strict=True))}


def _axes(matrix: Mapping[str, Any], place: str) -> dict[str, list[Any]]:
    """The values of each field of a matrix; one that is no list is a list of one."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in matrix.items()}
    if "name" in axes:
        what = "jobs of a matrix are named by their values; leave it out"
        raise InputError(what, where=f"{place}.name")
    for key, values in axes.items():
        if not values:
            raise InputError("an empty list makes no job", where=f"{place}.{key}")
    return axes


def _names(entries: list[_Entry], where: str) -> list[str]:
    """The jobs' own names; the others are named by their values, with a number where that is taken."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for index, (place, fields) in enumerate(entries):
        if "name" not in fields:
            continue
        name = _checked(fields["name"], f"{where}: {place}")
        if name.lower() in taken:
            what = "two jobs have this name, and plans are kept by name"
            raise InputError(what, where=f"{where}: {place}.name", value=name)
        names[index] = name
        taken.add(name.lower())
    waiting: dict[str, Iterator[str]] = {}
    for index, (_, fields) in enumerate(entries):
        if index not in names:
            values = [fields.get(key) for key in _NAMED_BY]
            plain = "-".join(_slug(value) for value in values if value is not None) or "job"
            numbered = waiting.setdefault(plain, _numbered(plain))
            names[index] = next(name for name in numbered if name.lower() not in taken)
            taken.add(names[index].lower())
    return [names[index] for index in range(len(entries))]


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def _checked(name: object, place: str) -> str:
    if isinstance(name, str) and len(name) <= LONGEST_NAME and _NAME.fullmatch(name):
        return name
    what = f"a name is a folder too: letters, digits and . _ + -, at most {LONGEST_NAME}, no sign first"
    raise InputError(what, where=f"{place}.name", value=name)


def _slug(value: object) -> str:
    """What a folder can be named after a value: of a path the last part, plain characters."""
    text = str(value)
    if text.lower().endswith((".yaml", ".yml", ".json")):
        path = Path(text)
        text = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("._-")[:40] or "x"


def _job(where: str, fields: dict[str, Any], folder: Path, kind: type[JobDoc]) -> Job:
    name = str(fields["name"])
    try:
        document = validated(kind, fields, where)
    except InputError as error:
        return Job(name=name, fields=fields, document=None, mistake=str(error))
    beside = {
        "model": _path(document.model, folder, catalog_names()),
        "cluster": _path(document.cluster, folder, cluster_names()),
    }
    if document.calibration is not None:
        beside["calibration"] = _path(document.calibration, folder, ())
    return Job(name=name, fields=fields, document=document.model_copy(update=beside), mistake=None)


def _path(text: str, folder: Path, names: Collection[str]) -> str:
    """A relative path starts at the jobs file; a name stays as it is."""
    try:
        beside = folder / text
        there = beside.exists() or (folder / text.rpartition("#")[0]).is_file()
        return str(beside) if text and text not in names and there else text
    except (OSError, ValueError):
        return text


# What a batch has done so far, in an SQLite file that survives a kill at any moment.


JOURNAL = "journal.sqlite"
PLANS = "plans"
"""Folder of the plans of a batch, a folder for each job."""


class Journal:
    """The results of a batch by position, one transaction each.

    The file stays locked while the journal is open, so that two batches never write one folder; the lock
    goes with the process that holds it. Raises InputError where the folder belongs to a running batch, with
    `resume` to another one, and with neither `resume` nor `force` to any.
    """

    def __init__(self, folder: Path, batch: str, *, resume: bool, force: bool = False) -> None:
        self._path = folder / JOURNAL
        if self._path.is_symlink():
            raise InputError("a link out of the batch's folder; remove it", where=str(self._path))
        if self._path.exists() and not resume and not force:
            what = (
                "there is a batch in this folder: say --resume to go on with it, --force to begin "
                "anew in its place, or choose another folder"
            )
            raise InputError(what, where=str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(self._path, isolation_level=None, timeout=0.5)
        try:
            self._open(batch, force=force)
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

    def _open(self, batch: str, *, force: bool) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA synchronous = FULL")
        run("BEGIN EXCLUSIVE")
        run("CREATE TABLE IF NOT EXISTS batch (id TEXT NOT NULL)")
        run(
            "CREATE TABLE IF NOT EXISTS results (position INTEGER PRIMARY KEY, cached INTEGER NOT NULL,"
            " seconds REAL NOT NULL, result TEXT NOT NULL)"
        )
        if force:
            # Those of jobs that are gone would stand beside the new ones; only a batch's own are touched.
            for row in self.rows():
                remove_folder(self._path.parent / PLANS / Path(str(row["name"])).name)
            run("DELETE FROM results")
            run("DELETE FROM batch")
        batches = run("SELECT id FROM batch").fetchone()
        if batches is None:
            run("INSERT INTO batch VALUES (?)", (batch,))
        run("COMMIT")
        if batches is not None and batches[0] != batch:
            self._connection.close()
            what = (
                "the batch in this folder has other jobs, options or another version of this program; "
                "--resume needs the same ones; --force begins anew, else choose another folder"
            )
            raise InputError(what, where=str(self._path))

    def add(self, position: int, row: dict[str, Any], *, cached: bool, seconds: float) -> None:
        """Notes a finished job, whose files are in place. Raises InputError where there is no room.

        Parameters
        ----------
        position
            Of the job in its file, from 0; what stood there is replaced.
        row
            Of the results, plain data.
        cached
            Whether the answer was kept from before.
        seconds
            That the job took.
        """
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

    def __exit__(self, *error: object) -> None:
        self._connection.close()


def remove_folder(folder: Path) -> None:
    """Removes a folder with all in it; a link or a file stays, and so does what is not there."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


# Answers kept on disk under a name that says all they depend on.


LARGEST_ENTRY_BYTES = 256 * 2**20


def default_cache_folder() -> Path:
    """`meshwright` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path.home() / ".cache"
    return folder / "meshwright"


def chosen_folder(folder: Path | None, off: bool) -> Path | None:
    """Where answers are kept: a folder, by default the user's; None where nothing is to be kept.

    Parameters
    ----------
    folder
        That the user names; None for the default.
    off
        Whether nothing is to be kept.
    """
    if off:
        return None
    return folder or default_cache_folder()


class AnswerCache:
    """Entries of plain data by key, one file each.

    A file is written under another name and renamed, so processes may share a folder: two that answer the
    same question write the same entry. An entry that cannot be read, or whose digest is wrong, counts as
    absent. A folder that cannot be written to only means that nothing is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry, or None.

        Parameters
        ----------
        key
            From `request_key`, hexadecimal.
        """
        path = self._path(key)
        try:
            if path.stat().st_size > LARGEST_ENTRY_BYTES:
                return None
            data = path.read_bytes()
            digest, packed = data[:32], data[32:]
            if hashlib.sha256(packed).digest() != digest:
                return None
            entry = json.loads(gzip.decompress(packed))
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        return entry if isinstance(entry, dict) else None

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keeps an entry.

        Parameters
        ----------
        key
            From `request_key`, hexadecimal.
        entry
            Plain data, which JSON can hold.
        """
        text = json.dumps(entry, separators=(",", ":")).encode()
        packed = gzip.compress(text, compresslevel=4, mtime=0)
        path = self._path(key)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(packed).digest() + packed)
            Path(temporary).replace(path)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / "answers" / key[:2] / f"{key[2:]}.json.gz"


# What a result depends on: the request, and the code and data that answer it.


ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package."""
_NOT_ANSWERING = {"tests", "benchmarks", "docs", "build"}
"""Folders beside the program, where it runs from its repository."""


def code_files() -> list[Path]:
    """Every file of code and data of this program, in order."""
    tops = [
        path
        for path in sorted(ROOT.iterdir())
        if path.name not in _NOT_ANSWERING and not path.name.startswith(".")
    ]
    files = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return [path for path in files if path.suffix in (".py", ".yaml")]


@cache
def code_fingerprint() -> str:
    """Changes with any line of code or data of this program, and with the versions of solver and arrays."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"ortools {version('ortools')} numpy {np.__version__}".encode())
    for path in code_files():
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def request_key(request: PlanRequest) -> str:
    """A name for the answer to a request: equal requests have equal keys, whatever their jobs are called.

    Parameters
    ----------
    request
        With what it names already read: the key does not look into files.
    """
    document = {
        "inputs": request.inputs().model_dump(mode="json"),
        "method": request.method,
        "top_k": request.top_k,
        "time_limit_s": request.time_limit_s,
        "seed": request.seed,
        "code": code_fingerprint(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
