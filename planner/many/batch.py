"""A batch from its jobs file to its results, and where jobs are done: processes of this machine, or Ray.

What is done stays done, whatever happens to the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from pydantic import TypeAdapter

from meshwright.cluster_specs.reader import is_mixed_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.workload import Execution
from meshwright.documents import (
    ClosedDocument,
    csv_text,
    frame_of,
    refuse_taken,
    uninterrupted,
    write_files,
)
from meshwright.errors import InputError, check_choice, message_of
from meshwright.planner.many.jobs import (
    JOURNAL,
    PLANS,
    AnswerCache,
    Job,
    JobDoc,
    Journal,
    code_fingerprint,
    read_jobs,
    remove_folder,
    request_key,
)
from meshwright.planner.mixed.document import MixedRequest, read_mixed_request
from meshwright.planner.mixed.service import figures_on_parts, make_mixed_plan, with_mixed_cost
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.solvers.clock import limit_left_s, until
from meshwright.planner.solvers.processes import MOST_ATTEMPTS, ProcessPool, usable_cores

if TYPE_CHECKING:
    import pandas

# A row of a batch's results: what was asked, how it ended, and the figures of the plan.


class JobRow(ClosedDocument):
    """The columns of results.csv, results.json and results.parquet; what there is none of is null."""

    name: str
    status: str
    """That of the plan, or `failed`."""
    model: str | None = None
    cluster: str | None = None
    gpus: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    framework: str | None = None
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    """Of the fullest GPU."""
    host_memory_gib: float | None = None
    """Of a node, for what is offloaded; null where nothing is."""
    runs_on: str | None = None
    """The parts along the pipeline, where the cluster has several; null elsewhere."""
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    zero_stage: int | None = None
    shard_groups: int | None = None
    optimizer_offload: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    tokens: float | None = None
    """Of the whole training."""
    days: float | None = None
    """That the training takes."""
    gpu_hours: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""
    days_late: float | None = None
    """Past the days that were asked for; null without a deadline."""
    message: str = ""
    """Why there is no plan."""


COLUMNS = tuple(JobRow.model_fields)
_ASKED = tuple(
    name for name in COLUMNS if name in JobDoc.model_fields and name not in ("name", "days")
)


def column_type(name: str) -> type:
    """The type of a column's values, beside null: str, int or float.

    Parameters
    ----------
    name
        Of `COLUMNS`.
    """
    annotation = JobRow.model_fields[name].annotation
    for kind in (str, int, float):
        if annotation is kind or kind in get_args(annotation):
            return kind
    raise TypeError(f"column {name} is of type {annotation}")


def failed_row(fields: Mapping[str, Any], message: str) -> dict[str, Any]:
    """The row of a job without an answer.

    Parameters
    ----------
    fields
        Of the job as its author wrote them; values of a wrong type are left out of the row.
    message
        What went wrong.
    """
    fitting = {
        name: fields[name] for name in _ASKED if isinstance(fields.get(name), column_type(name))
    }
    row = JobRow(**fitting, name=str(fields["name"]), status="failed", message=message)
    return row.model_dump()


def job_row(job: JobDoc, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a job: what it asks for, under its own names, and the figures of its answer.

    Parameters
    ----------
    job
        Whose fields stand under their own names where the answer has none of these.
    figures
        Of the answer, by column; `status` at the least.
    """
    fields = {name: getattr(job, name) for name in _ASKED}
    return JobRow(**{**fields, **figures, "name": job.name}).model_dump()


# One job from its fields to its files, in plain data, so that any process or machine can do it.


_OF_A_JOB = {"name", "top", "time_limit", *COST_FIELDS}
"""Fields of a job that a request does not read under the same name."""


CLUSTER_SPEC = "cluster_spec"
"""Beside the fields of a JobDoc: a ClusterSpec in place of `cluster`, for nodes that no file lists."""


LIKELY = "likely"
"""Beside them: what `do_job` said in `ran` of the same work on other GPUs, the likeliest first; layouts like
those are priced first.
"""
AS_SEARCHED = "as_searched"
"""Beside them: whether the plan keeps the mapping that its search found, which need not be the one that sends
least, and says nothing of all GPUs where it leaves some idle; its step is the same.
"""
_BESIDE = (CLUSTER_SPEC, LIKELY, AS_SEARCHED)


def request_of(job: JobDoc, cluster: ClusterSpec | None = None) -> PlanRequest:
    """The plan request of a job, on a cluster of its own where it has one. Raises InputError.

    Parameters
    ----------
    job
        On a cluster of equal nodes.
    cluster
        In place of the one that the job names; its nodes that are not free are left out. None for the job's
        own.
    """
    from meshwright.planner.request.reader import read_request

    options = job.model_dump(exclude=_OF_A_JOB)
    if cluster is not None:
        options |= {
            "cluster": cluster,
            "nodes": [node.name for node in cluster.nodes if node.free_gpus != 0],
        }
    return read_request(**options, top_k=job.top, time_limit_s=job.time_limit)


def asked_of(job: JobDoc) -> PlanRequest | MixedRequest:
    """The request of a job, on a cluster of equal nodes or with parts. Raises InputError.

    Parameters
    ----------
    job
        As read; its cluster says which kind of request it is.
    """
    if not is_mixed_cluster(job.cluster):
        return request_of(job)
    options = job.model_dump(exclude=_OF_A_JOB)
    return read_mixed_request(**options, top_k=job.top, time_limit_s=job.time_limit)


def do_job(
    fields: Mapping[str, Any], cache_folder: str | None, end_s: float = inf
) -> dict[str, Any]:
    """Plans one job.

    Parameters
    ----------
    fields
        Those of a JobDoc, and `CLUSTER_SPEC`, `LIKELY` and `AS_SEARCHED` where it has them.
    cache_folder
        Where answers are kept; None keeps nothing.
    end_s
        When the job has to end, in seconds of the machine's monotonic clock.

    Returns
    -------
    dict
        Its `row` of results, its `files` by name, its layout and execution in `ran`, whether it was `cached`,
        and its `seconds`. Whatever goes wrong is said in the row, status `failed`.
    """
    began = time.monotonic()
    cluster = fields.get(CLUSTER_SPEC)
    how = {name: fields[name] for name in (LIKELY, AS_SEARCHED) if fields.get(name)}
    named = {name: value for name, value in fields.items() if name not in _BESIDE}
    job = JobDoc.model_validate(named)
    cached, cost = False, {}
    try:
        request = asked_of(job) if cluster is None else request_of(job, cluster)
        budget = Budget.of(job.model_dump(include=set(COST_FIELDS)))
        if isinstance(request, MixedRequest):
            with until(end_s):
                return _done(job, _answer_on_parts(request, budget), began)
        cache = AnswerCache(Path(cache_folder)) if cache_folder else None
        # An answer that took its time is as good for a job with a time limit.
        key = request_key(replace(request, time_limit_s=None))
        if how:
            # Of equally fast layouts it may be another one, and its search counts less.
            key = hashlib.sha256(json.dumps([key, how], sort_keys=True).encode()).hexdigest()
        answer = cache.get(key) if cache else None
        if request.time_limit_s is not None:
            # A limit divides the work of a search otherwise, whose proven answer is kept apart.
            key = hashlib.sha256(f"{key} {request.time_limit_s}".encode()).hexdigest()
            answer = answer or (cache.get(key) if cache else None)
        cached = answer is not None
        if answer is None:
            with until(end_s):
                answer = _answer(request, how)
            is_final = answer["figures"]["status"] in ("optimal", "infeasible")
            if cache and (is_final or request.time_limit_s is None):
                cache.put(key, answer)
        cost = cost_figures(budget, answer["figures"], request.cluster)
    except Exception as error:  # noqa: BLE001 - one job must not stop the others
        figures = {"status": "failed", "message": message_of(error)[0]}
        answer = {"figures": figures, "files": {}, "ran": None}
    answer = {**answer, "figures": {**answer["figures"], **cost}}
    return _done(job, answer, began, is_cached=cached)


def _done(
    job: JobDoc, answer: Mapping[str, Any], began_s: float, *, is_cached: bool = False
) -> dict[str, Any]:
    """What comes of a job, begun at a time of the monotonic clock."""
    return {
        "row": job_row(job, answer["figures"]),
        "files": answer["files"],
        "ran": answer.get("ran"),
        "cached": is_cached,
        "seconds": time.monotonic() - began_s,
    }


def _answer_on_parts(request: MixedRequest, budget: Budget) -> dict[str, Any]:
    """The same of a job on a cluster with parts, with what the training takes; it is not kept."""
    from meshwright.planner.launch.plan_files import mixed_files

    left_s = [each for each in (request.time_limit_s, limit_left_s()) if each is not None]
    limited = replace(request, time_limit_s=min(left_s, default=None))
    result = with_mixed_cost(make_mixed_plan(limited), budget)
    solver = result.document.solver.model_copy(update={"wall_s": 0.0})
    document = result.document.model_copy(update={"solver": solver})
    files = mixed_files(replace(result, document=document)) if document.runs_on else {}
    return {"figures": figures_on_parts(result), "files": files}


def _answer(request: PlanRequest, how: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a plan: its figures and its files, without how long it took, which always differs."""
    from meshwright.planner.launch.plan_files import plan_files
    from meshwright.planner.plan.best_plan import likely_as
    from meshwright.planner.plan.make_plan import make_plan
    from meshwright.planner.runs.run_terms import LayoutDoc, layout_from_document

    execution = TypeAdapter(Execution | None)
    plans = [
        (
            layout_from_document(LayoutDoc.model_validate(each["layout"])),
            execution.validate_python(each["execution"]),
        )
        for each in how.get(LIKELY, ())
    ]
    plan = make_plan(
        request,
        robustness=False,
        choices=False,
        likely=likely_as(request, plans),
        as_searched=bool(how.get(AS_SEARCHED)),
    )
    solver = plan.solver.model_copy(update={"wall_s": None})
    plan = plan.model_copy(update={"solver": solver})
    if plan.layout is None:
        return {"figures": plan.figures(), "files": {}, "ran": None}
    ran = {
        "layout": plan.layout.model_dump(mode="json"),
        "execution": execution.dump_python(plan.execution, mode="json"),
    }
    return {"figures": plan.figures(), "files": plan_files(plan), "ran": ran}


Task = tuple[int, Mapping[str, Any]]
"""(position of the job, its fields)."""
Done = tuple[int, dict[str, Any]]
"""(position of the job, what `do_job` returned)."""
Engine = Callable[[Iterable[Task]], Iterator[Done]]

JOBS_PER_PROCESS = 250
"""After that many a worker process is replaced, so that nothing it keeps grows with the batch."""


def given_up(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job whose worker ended every time.

    Parameters
    ----------
    fields
        Of the job, its `name` among them.
    """
    words = f"its worker process ended {MOST_ATTEMPTS} times (killed, or out of memory)"
    row = failed_row(fields, words)
    return {"row": row, "files": {}, "ran": None, "cached": False, "seconds": 0.0}


def local_engine(
    workers: int,
    cache_folder: str | None,
    end_s: float = inf,
    pool: ProcessPool | None = None,
) -> Engine:
    """Processes of this machine; one worker is this process itself.

    A job whose worker ends is done again, alone, and given up when that was so every time.

    Parameters
    ----------
    workers
        Processes, from 1; one is this process itself.
    cache_folder
        Where answers are kept; None keeps nothing.
    end_s
        When every job has to end, in seconds of the machine's monotonic clock.
    pool
        Processes to use in place of new ones; their owner ends them.
    """

    def here(tasks: Iterable[Task]) -> Iterator[Done]:
        for position, fields in tasks:
            yield position, do_job(fields, cache_folder, end_s)

    def pooled(tasks: Iterable[Task]) -> Iterator[Done]:
        named = ((task, partial(do_job, dict(task[1]), cache_folder, end_s)) for task in tasks)
        lasting = nullcontext(pool) if pool is not None else ProcessPool(workers, JOBS_PER_PROCESS)
        with lasting as processes:
            for task, done in processes.results(named, lambda task: given_up(task[1])):
                yield task[0], done

    return here if workers == 1 else pooled


# The jobs of a batch on a Ray cluster. Needs `pip install meshwright[ray]` on every machine of it.


CONNECT_S = 5.0
AHEAD = 2
"""Jobs handed out for each core of the cluster, so that none waits for the next."""


def ray_engine(address: str | None, cache_folder: str | None) -> Engine:
    """Tasks on the cluster at `address` (`auto`: the one this machine belongs to; None: one of its own).

    A job whose worker or machine is lost is done again elsewhere, up to three times. Answers are cached on
    the machine that finds them. Raises InputError where Ray is missing or the cluster cannot be reached.

    Parameters
    ----------
    address
        HOST:PORT or a ray:// address of a cluster, `auto`, or None.
    cache_folder
        Where answers are kept on each machine; None keeps nothing.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            "Ray is not installed: pip install 'meshwright[ray]'", where="--engine ray"
        ) from None
    _check_address(address)
    # A worker finds this program by its installation, not by a copy of the folder the user stands in.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster there ({error})", where="--ray-address", value=address
        ) from None

    def engine(tasks: Iterable[Task]) -> Iterator[Done]:
        try:
            yield from _run(ray, tasks, cache_folder)
        finally:
            ray.shutdown()

    return engine


def _check_address(address: str | None) -> None:
    """Ray waits for minutes where nobody answers. Raises InputError within seconds."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster there ({error})", where="--ray-address", value=address
        ) from None


def _run(ray: Any, tasks: Iterable[Task], cache_folder: str | None) -> Iterator[Done]:
    remote = ray.remote(num_cpus=1, max_retries=MOST_ATTEMPTS - 1)(do_job)
    waiting = iter(tasks)
    under_way: dict[Any, Task] = {}
    while True:
        limit = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        for task in islice(waiting, max(0, limit - len(under_way))):
            under_way[remote.remote(dict(task[1]), cache_folder)] = task
        if not under_way:
            return
        finished, _ = ray.wait(list(under_way), num_returns=1)
        for reference in finished:
            position, fields = under_way.pop(reference)
            try:
                yield position, ray.get(reference)
            except ray.exceptions.RayError:
                yield position, given_up(fields)


# A batch from its jobs file to its results: what is done stays done, whatever happens to the process.


# The results of a batch as tables: CSV, JSON, Parquet.


Row = Mapping[str, Any]


def json_bytes(rows: Iterable[Row]) -> bytes:
    """`jobs`, a list with every column, and `summary`, jobs by status; one job on a line.

    Parameters
    ----------
    rows
        By column; each has a `status`.
    """
    ordered = [{name: row.get(name) for name in COLUMNS} for row in rows]
    summary = json.dumps(dict(sorted(Counter(row["status"] for row in ordered).items())))
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in ordered)
    return f'{{"schema": 1, "summary": {summary}, "jobs": [\n{lines}\n]}}\n'.encode()


def parquet_bytes(rows: Iterable[Row]) -> bytes:
    """The same columns. Raises InputError where pyarrow is not installed.

    Parameters
    ----------
    rows
        By column; a column that a row lacks is null.
    """
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
    "csv": lambda rows: csv_text(COLUMNS, rows).encode(),
    "json": json_bytes,
    "parquet": parquet_bytes,
}


def check_formats(names: Sequence[str]) -> None:
    """Raises InputError for a format that there is not, or that lacks its library.

    Parameters
    ----------
    names
        Of `RESULT_FORMATS`.
    """
    for name in names:
        check_choice(name, RESULT_FORMATS, "--format", "unknown format")
        if name == "parquet":
            _pyarrow()


_STAGING = ".staging"
MOST_MISTAKES = 20
"""Mistakes that --strict prints."""


class BatchListener(Protocol):
    """Hears how a batch gets on."""

    def start(self, jobs: int, already: int) -> None:
        """`already` of the jobs are in the journal.

        Parameters
        ----------
        jobs
            Of the whole batch.
        already
            Of these, done by an earlier run that is gone on with.
        """

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        """A job is finished.

        Parameters
        ----------
        row
            Of the results.
        cached
            Whether the answer was kept from before.
        seconds
            That the job took.
        """


class SilentListener:
    """Hears everything, says nothing."""

    def start(self, jobs: int, already: int) -> None:
        """Nothing."""

    def done(self, row: Mapping[str, Any], cached: bool, seconds: float) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch is done; nothing but formats, calibration and time limit changes its results."""

    workers: int | None = None
    """Processes; one for every core when None."""
    engine: str = "local"
    ray_address: str | None = None
    resume: bool = False
    force: bool = False
    """Whether the batch that is in the folder gives way to this one."""
    strict: bool = False
    """Whether a job with a mistake stops the batch before it starts."""
    cache: Path | None = None
    formats: tuple[str, ...] = ("csv", "json")
    time_limit_s: float | None = None
    """For each search of a job that has no limit, 0 or more; not for the exhaustive method."""
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

    Parameters
    ----------
    path
        Of the jobs file.
    folder
        For `plans`, results and the journal; made where there is none.
    options
        How the batch is done.
    listener
        Hears of each job when it is finished.
    """
    began = time.monotonic()
    check_formats(options.formats)
    jobs = read_jobs(path, calibration=options.calibration, budget=vars(options.budget or Budget()))
    if options.strict:
        _refuse_mistakes(jobs)
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file, not a folder; choose another with -o", where=str(folder))
    if options.resume and options.force:
        raise InputError("goes on with a batch that --force begins anew: say one", where="--resume")
    if not (folder / JOURNAL).exists():
        taken = (PLANS, *(f"results.{name}" for name in options.formats))
        refuse_taken(folder, taken, options.force)
    cache = str(options.cache.absolute()) if options.cache else None
    opened = Journal(folder, _identity(jobs), resume=options.resume, force=options.force)
    with opened as journal:
        remove_folder(folder / _STAGING)
        done = journal.done()
        listener.start(len(jobs), len(done))
        for position, job in enumerate(jobs):
            if job.document is None and position not in done:
                row = failed_row({**job.fields, "name": job.name}, job.mistake or "")
                journal.add(position, row, cached=False, seconds=0.0)
                listener.done(row, False, 0.0)
        tasks = list(_tasks(jobs, done, options.time_limit_s))
        if tasks:
            _work(tasks, _engine(options, len(tasks), cache), folder, journal, listener)
        rows = list(journal.rows())
        written = _write_results(folder, rows, options.formats)
        remove_folder(folder / _STAGING)
        count, cached, seconds = journal.totals()
    return BatchReport(
        jobs=count,
        by_status=dict(Counter(str(row["status"]) for row in rows)),
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
            asked_of(job.document)
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
        return ray_engine(options.ray_address, cache)
    return local_engine(min(options.workers or usable_cores(), tasks), cache)


def _tasks(jobs: list[Job], done: set[int], limit_s: float | None) -> Iterator[Task]:
    """Jobs of one model follow each other: in a worker, splits found for one serve the next."""
    waiting = [
        (job.document.model, position, job.document)
        for position, job in enumerate(jobs)
        if job.document and position not in done
    ]
    for _, position, document in sorted(waiting, key=lambda entry: entry[:2]):
        fields = document.model_dump(mode="json")
        if document.method == "cp-sat" and document.time_limit is None:
            fields["time_limit"] = limit_s
        yield position, fields


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
    """Of a batch: what its results depend on, the files that its jobs name included."""
    text = json.dumps([dict(job.fields) for job in jobs], sort_keys=True, default=str)
    digest = hashlib.sha256((code_fingerprint() + text).encode())
    documents = [job.document for job in jobs if job.document is not None]
    named = {name for each in documents for name in (each.model, each.cluster, each.calibration)}
    # A part of a mixed cluster is FILE#PART; names of catalogs are no files.
    for path in sorted({path for name in named if name for path in (name, name.partition("#")[0])}):
        with suppress(OSError, ValueError):
            digest.update(f"{Path(path).name}\0".encode() + Path(path).read_bytes())
    return digest.hexdigest()


def _write_plan(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """A plan's folder appears whole: it is written under another name, then renamed."""
    staging = _own_folder(folder / _STAGING)
    half = staging / secrets.token_hex(8)
    write_files(half, files)
    target = _own_folder(folder / PLANS) / name
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"{target} is not a folder: it is not replaced. Remove it first.")
    remove_folder(target)  # Written before a kill, but not yet in the journal.
    half.rename(target)


def _own_folder(path: Path) -> Path:
    """A folder in a batch's own, made if need be; a link would have others' files removed."""
    if path.is_symlink():
        raise InputError(f"{path} is a link out of the batch's folder. Remove it first.")
    path.mkdir(exist_ok=True)
    return path


def _write_results(folder: Path, rows: list[dict[str, Any]], formats: tuple[str, ...]) -> list[str]:
    written = []
    for name in formats:
        data = RESULT_FORMATS[name](rows)
        target = folder / f"results.{name}"
        temporary = _own_folder(folder / _STAGING) / target.name
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
