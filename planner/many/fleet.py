"""A fleet from its jobs file to its plans: price every job at every size, share out, place, write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from meshwright.cluster_specs.allocation import allocated_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.documents import csv_text
from meshwright.errors import InputError, OutOfTimeError
from meshwright.planner.drawing import Drawing, distinct_colour, ink_on, shortened, text_width
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.many.engines import Task, local_engine
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.many.places import FleetPlaces, place_jobs
from meshwright.planner.many.sharing import (
    OBJECTIVES,
    Allocation,
    FleetJobDoc,
    FleetParams,
    FleetSolution,
    FreeUnits,
    JobSize,
    SizedJob,
    Unit,
    UnplannedJob,
    candidate_units,
    free_units,
    read_fleet,
    share_over_time,
    share_throughput,
    sized_job,
)
from meshwright.planner.plan.document import Plan, with_digest
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures
from meshwright.planner.solvers.clock import current_end_s, limit_left_s, within
from meshwright.planner.solvers.processes import usable_cores

# Pictures of a fleet: which nodes each job has, and when it runs.


CELL, GAP, ROW = 14, 3, 26
LABEL_WIDTH, CHART_WIDTH = 190, 760
CHART_TOP = 44
UNITS_IN_A_ROW = 48
_SIZE, _TITLE_SIZE, _LATE, _FRAME = 11, 15, "#b3261e", "#8a8f98"
_CLOCKS = (("days", 86400.0, 3 * 86400.0), ("hours", 3600.0, 7200.0), ("s", 1.0, 0.0))
"""Name, seconds in one, and the seconds from which it is the unit of a chart."""

Document = Mapping[str, Any]


def nodes_svg(document: Document, free: FreeUnits, units: Sequence[Sequence[int]]) -> str:
    """Leaves as rows, units as squares in the colour of their job; idle ones are hollow.

    Parameters
    ----------
    document
        Of the fleet, as `fleet_document` makes it.
    free
        The units that were shared out.
    units
        Those of each job, as indices. Where jobs follow each other on a unit, the first one colours it.
    """
    drawing = Drawing(LABEL_WIDTH + UNITS_IN_A_ROW * (CELL + GAP) + 10)
    job_of = {unit: job for job in reversed(range(len(units))) for unit in units[job]}
    y = 40.0
    has_pods = len(set(free.pod_of.values())) > 1
    for leaf, members in free.by_leaf.items():
        _label(drawing, y + 11, f"{free.pod_of[leaf]} {leaf}" if has_pods else leaf)
        for position, unit in enumerate(members):
            row, column = divmod(position, UNITS_IN_A_ROW)
            job = job_of.get(unit)
            name = "idle" if job is None else document["jobs"][job]["name"]
            drawing.rect(
                LABEL_WIDTH + column * (CELL + GAP),
                y + row * (CELL + GAP),
                CELL,
                CELL,
                fill="none" if job is None else distinct_colour(job),
                stroke=_FRAME,
                radius=2,
                tip=f"{free.units[unit].nodes[0]}: {name}",
            )
        y += ((len(members) - 1) // UNITS_IN_A_ROW + 1) * (CELL + GAP) + 6
    y = _legend(drawing, document, y + 14)
    title = f"Which nodes each job has: {free.gpus_per_unit} GPUs a square; leaves are rows"
    return _page(drawing, y + 10, title)


def gantt_svg(document: Document) -> str:
    """A bar for each job that has a time, from its start to its end, with how many GPUs it has."""
    drawing = Drawing(LABEL_WIDTH + CHART_WIDTH + 130)
    timed = (job for job in document["jobs"] if job["end_s"] is not None)
    jobs = sorted(timed, key=lambda job: (job["start_s"], job["name"]))
    colours = {job["name"]: distinct_colour(k) for k, job in enumerate(document["jobs"])}
    end_s = max((job["end_s"] for job in jobs), default=0.0) or 1.0
    unit, unit_s = next((name, size_s) for name, size_s, from_s in _CLOCKS if end_s > from_s)
    clock = _Clock(unit, unit_s, end_s)
    bottom = CHART_TOP + ROW * len(jobs)
    step = _tick(clock.shown(end_s))
    for tick in range(int(clock.shown(end_s) / step) + 1):
        x = clock.across(tick * step * clock.unit_s)
        drawing.path([(x, CHART_TOP - 4), (x, bottom)], stroke="#d5d8dd")
        drawing.text(x, CHART_TOP - 8, f"{tick * step:g}", size=_SIZE, anchor="middle")
    for row, job in enumerate(jobs):
        _bar(drawing, job, CHART_TOP + row * ROW, colours[job["name"]], clock)
    gpus = document["units"] * document["gpus_per_unit"]
    return _page(drawing, bottom + 16, f"When each job runs, in {clock.unit}, on {gpus} GPUs")


@dataclass(frozen=True)
class _Clock:
    """The time axis of a chart: 0 to `end_s`, read in `unit`s of `unit_s` seconds."""

    unit: str
    unit_s: float
    end_s: float

    def shown(self, time_s: float) -> float:
        return time_s / self.unit_s

    def across(self, time_s: float) -> float:
        return LABEL_WIDTH + time_s / self.end_s * CHART_WIDTH


def _bar(drawing: Drawing, job: Document, y: float, fill: str, clock: _Clock) -> None:
    start_s, end_s, late_s = job["start_s"], job["end_s"], job["late_s"]
    x = clock.across(start_s)
    width = max(1.0, clock.across(end_s) - x)
    words = f"{job['gpus']} GPUs"
    if late_s:
        words += f", {clock.shown(late_s):.1f} {clock.unit} late"
    times = f"{clock.shown(start_s):.2f} to {clock.shown(end_s):.2f} {clock.unit}"
    _label(drawing, y + 16, job["name"])
    drawing.rect(
        x,
        y + 3,
        width,
        ROW - 6,
        fill=fill,
        stroke=_LATE if late_s else None,
        stroke_width=2,
        radius=3,
        tip=f"{job['name']}: {words}, {times}",
    )
    if width > text_width(words, _SIZE) + 12:
        drawing.text(x + 6, y + 17, words, size=_SIZE, ink=ink_on(fill))
    else:
        drawing.text(x + width + 4, y + 17, words, size=_SIZE)


def _tick(span: float) -> float:
    """A round step that cuts a span into 4 to 10."""
    step = 1.0
    while span / step > 10:
        step *= 10
    while span / step < 4:
        step /= 2 if span / step >= 2 else 10
    return step


def _legend(drawing: Drawing, document: Document, y: float) -> float:
    """Draws names and colours of the jobs that run; returns the base line of the last row."""
    x = 8.0
    for index, job in enumerate(document["jobs"]):
        if not job["nodes"]:
            continue
        words = f"{job['name']} ({job['gpus']})"
        width = 24 + text_width(words, _SIZE)
        if x + width > drawing.width and x > 8:
            x, y = 8.0, y + 20
        drawing.rect(x, y - 10, 12, 12, fill=distinct_colour(index), radius=2)
        drawing.text(x + 17, y, words, size=_SIZE)
        x += width
    return y


def _label(drawing: Drawing, y: float, words: str) -> None:
    """The name of a row, left of it."""
    drawing.text(8, y, shortened(words, LABEL_WIDTH - 12, _SIZE), size=_SIZE)


def _page(drawing: Drawing, height: float, title: str) -> str:
    drawing.text(8, 20, title, size=_TITLE_SIZE, ink="#1b1e23", bold=True)
    return drawing.document(height, title)


FLEET_FILES = ("fleet.json", "fleet.csv", "nodes.svg", "gantt.svg", "plans")
"""What is written to a folder; some of it only where there is something to say."""
SHARING_SHARE = 0.3
"""Part of the time limit that is kept for sharing out, after the plans."""
Progress = Callable[[int, int], None]
"""Hears (sizes planned, sizes in all)."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How a fleet is shared out."""

    cluster: str
    """Catalog name or cluster file."""
    gpus: int | None = None
    """The first so many GPUs of it; all when None."""
    objective: str = "throughput"
    """One of `OBJECTIVES`."""
    busy: tuple[str, ...] = ()
    """Nodes in use already."""
    workers: int | None = None
    """Processes; one for every core when None."""
    cache: Path | None = None
    """Folder of kept answers; None keeps nothing."""
    time_limit_s: float | None = None
    """For everything: sizes that are not planned in time are left out. None for no limit."""
    seed: int = 0
    calibration: Path | None = None
    """The stack file of jobs that name none."""
    tokens: float | None = None
    """Left to train of jobs that name none."""
    days: float | None = None
    """The deadline of jobs that name none."""
    gpu_hour_price: float | None = None
    """Dollars, of jobs that name none; the cluster file's when None."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Which job got what."""

    free: FreeUnits
    objective: str
    jobs: tuple[SizedJob, ...]
    without_plan: tuple[UnplannedJob, ...]
    """Jobs that the others were shared out without."""
    solution: FleetSolution
    places: FleetPlaces
    cluster: ClusterSpec
    planned: int
    """Plans that were looked at."""
    unplanned: int
    """Sizes that the time limit left out: others might share out better."""
    planning_s: float
    solving_s: float

    @property
    def unproven(self) -> int:
        """Sizes with a plan that was not proven to be the best: others might share out better."""
        sizes = [size for job in self.jobs for size in job.sizes]
        return sum(size.result["row"]["status"] != "optimal" for size in sizes)

    def outcome(self, index: int) -> tuple[JobSize | None, Allocation, list[Unit]]:
        """(size, time, units) of a job; no size if it waits."""
        allocation = self.solution.allocations[index]
        size = None
        if allocation.size is not None:
            size = self.jobs[index].sizes[allocation.size]
        return size, allocation, [self.free.units[unit] for unit in self.places.units[index]]


class FleetJobRow(BaseModel):
    """What a job gets, in `fleet --json` and fleet.csv."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: str
    status: str
    """`runs`, `waits`, or `scheduled` where it has a time; without a plan at any size `infeasible`,
    `failed`, or `unknown` where the time limit came first."""
    gpus: int = 0
    tokens_per_s: float = 0.0
    share_of_best: float = 0.0
    """Of its throughput at its fastest size."""
    step_time_s: float | None = None
    mfu: float | None = None
    optimizer_offload: int | None = None
    """Percent of the optimizer's states in the hosts' memory."""
    host_memory_gib: float | None = None
    """Of a node, for what is offloaded."""
    tokens: float | None = None
    """Left to train."""
    days: float | None = None
    """That they take, once the job runs."""
    gpu_hours: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""
    start_s: float | None = None
    end_s: float | None = None
    late_s: float | None = None
    """Past its deadline; null without a deadline."""
    leaves: list[str]
    nodes: list[str]
    reason: str = ""
    """Why the job has no plan."""


def run_fleet(path: Path, options: FleetOptions, progress: Progress) -> Fleet:
    """Shares a cluster out among the jobs of a file; one without a plan is left out, and the reason kept.

    Parameters
    ----------
    path
        The jobs file.
    options
        Cluster, objective and how to work.
    progress
        Hears how many sizes are planned.

    Raises
    ------
    InputError
        For bad input.
    InfeasibleError
        Where the jobs that must run do not fit together.
    OutOfTimeError
        Where the time limit came before any job had a plan.
    """
    with within(options.time_limit_s):
        return _run(path, options, progress)


def _run(path: Path, options: FleetOptions, progress: Progress) -> Fleet:
    if options.objective not in OBJECTIVES:
        raise InputError(
            "unknown objective", where="--objective", value=options.objective, allowed=OBJECTIVES
        )
    cluster = read_cluster(options.cluster, options.gpus)
    free = free_units(cluster, allocated_gpus(cluster, options.gpus), options.busy)
    jobs = read_fleet(path, options.cluster, options.calibration, vars(Budget.of(vars(options))))
    if options.objective != "throughput":
        _require_tokens(jobs, path, options.objective)
    began = time.monotonic()
    answered, planned, unplanned = _sized_jobs(jobs, free, options, progress)
    sized_jobs = [job for job in answered if isinstance(job, SizedJob)]
    without_plan = [job for job in answered if isinstance(job, UnplannedJob)]
    late = next((job for job in without_plan if job.status == "unknown"), None)
    if late is not None and not sized_jobs:
        raise OutOfTimeError(f"{late.job.name}: {late.reason}")
    priced = time.monotonic()
    params = FleetParams(seed=options.seed)
    solution = _shared(sized_jobs, len(free.units), options.objective, params)
    return Fleet(
        free=free,
        objective=options.objective,
        jobs=tuple(sized_jobs),
        without_plan=tuple(without_plan),
        solution=solution,
        places=place_jobs(sized_jobs, solution.allocations, free, params),
        cluster=cluster,
        planned=planned,
        unplanned=unplanned,
        planning_s=priced - began,
        solving_s=time.monotonic() - priced,
    )


def _shared(
    jobs: Sequence[SizedJob], units: int, objective: str, params: FleetParams
) -> FleetSolution:
    if not jobs:
        return FleetSolution(allocations=(), value=0.0, bound=0.0, proven=True)
    if objective == "throughput":
        return share_throughput(jobs, units, params)
    return share_over_time(jobs, units, objective, params)


def _require_tokens(jobs: Sequence[FleetJobDoc], path: Path, objective: str) -> None:
    for job in jobs:
        if job.tokens is None:
            what = f"the objective {objective} needs the tokens left to train"
            raise InputError(what, where=f"{path}: {job.name}.tokens")


def _sized_jobs(
    jobs: Sequence[FleetJobDoc], free: FreeUnits, options: FleetOptions, progress: Progress
) -> tuple[list[SizedJob | UnplannedJob], int, int]:
    """(every job with its plans, or why it has none; plans made, plans left out for want of time).

    Equal questions are asked once.
    """
    positions: dict[str, int] = {}
    tasks: list[tuple[int, dict[str, Any]]] = []
    questions: list[list[tuple[int, int]]] = []
    for job in jobs:
        row = []
        named = JobDoc.model_fields.keys() - {"name", *COST_FIELDS}
        plain = {name: getattr(job, name) for name in JobDoc.model_fields if name in named}
        for units in candidate_units(job, free.gpus_per_unit, len(free.units)):
            fields = {**plain, "gpus": units * free.gpus_per_unit, "name": "size"}
            key = json.dumps(fields, sort_keys=True, default=str)
            if key not in positions:
                positions[key] = len(tasks)
                tasks.append((len(tasks), JobDoc(**fields).model_dump(mode="json")))
            row.append((units, positions[key]))
        questions.append(row)
    cache = str(options.cache.absolute()) if options.cache else None
    workers = min(options.workers or usable_cores(), max(1, len(tasks)))
    given_s = limit_left_s()
    reserve_s = 0.0 if given_s is None else SHARING_SHARE * given_s
    engine = local_engine(workers, cache, current_end_s() - reserve_s)
    results: dict[int, dict[str, Any]] = {}
    for position, result in (
        engine(_in_time(_one_of_each(questions), tasks, reserve_s)) if tasks else ()
    ):
        results[position] = result
        progress(len(results), len(tasks))
    sized_jobs = []
    for job, row in zip(jobs, questions, strict=True):
        answers = [(units, results[position]) for units, position in row if position in results]
        sized_jobs.append(sized_job(job, answers, len(row)))
    unplanned = len(tasks) - sum(_is_answered(result) for result in results.values())
    return sized_jobs, len(tasks), unplanned


def _one_of_each(questions: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Positions of the questions, each job's smallest size first, then each one's next."""
    turns = ((turn, position) for row in questions for turn, (_, position) in enumerate(row))
    return list(dict.fromkeys(position for _, position in sorted(turns)))


def _in_time(positions: Sequence[int], tasks: Sequence[Task], reserve_s: float) -> Iterator[Task]:
    """The tasks in this order, while planning has time; two at once wait for each process."""
    for position in positions:
        left_s = limit_left_s()
        if left_s is None:
            yield tasks[position]
            continue
        if left_s <= reserve_s:
            return
        fields = {**tasks[position][1], "time_limit": (left_s - reserve_s) / 2}
        yield position, fields


def _is_answered(result: Mapping[str, Any]) -> bool:
    """Whether a plan was found, or proven not to exist."""
    return bool(result["row"]["status"] != "unknown")


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """What `fleet --json` prints, without `schema`."""
    solution, places = fleet.solution, fleet.places
    complete = not fleet.unplanned and not fleet.unproven
    return {
        "objective": {
            "name": fleet.objective,
            "value": solution.value,
            "bound": solution.bound if complete else None,
            "gap": solution.gap if complete else None,
            "status": "optimal" if complete and solution.proven else "feasible",
        },
        "sizes_left_out": fleet.unplanned,
        "sizes_not_proven": fleet.unproven,
        "gpus_per_unit": fleet.free.gpus_per_unit,
        "units": len(fleet.free.units),
        "units_used": len({unit for units in places.units for unit in units}),
        "leaves_touched": places.leaves_touched,
        "least_leaves_touched": places.least_leaves,
        "jobs": [
            *(_job_row(fleet, index) for index in range(len(fleet.jobs))),
            *(_unplanned_row(job) for job in fleet.without_plan),
        ],
    }


def _job_row(fleet: Fleet, index: int) -> dict[str, Any]:
    job = fleet.jobs[index]
    size, allocation, units = fleet.outcome(index)
    fields: dict[str, Any] = {
        "name": job.job.name,
        "model": job.job.model,
        "status": "waits",
        "leaves": sorted({unit.leaf for unit in units}),
        "nodes": [name for unit in units for name in unit.nodes],
    }
    if size is not None:
        row = size.result["row"]
        fields |= {
            "status": "runs",
            "gpus": size.units * fleet.free.gpus_per_unit,
            "tokens_per_s": size.tokens_per_s,
            "share_of_best": size.tokens_per_s / job.best_tokens_per_s,
            "step_time_s": row.get("step_time_s"),
            **{name: row.get(name) for name in ("mfu", "optimizer_offload", "host_memory_gib")},
        }
        cost = cost_figures(Budget.of(vars(job.job)), fields, fleet.cluster)
        fields |= {name: figure for name, figure in cost.items() if name != "days_late"}
    if allocation.end_s is not None:
        fields |= {"status": "scheduled", "start_s": allocation.start_s, "end_s": allocation.end_s}
        if job.job.deadline_h is not None:
            fields["late_s"] = max(0.0, allocation.end_s - job.job.deadline_h * 3600)
    return FleetJobRow(**fields).model_dump()


def _unplanned_row(left_out: UnplannedJob) -> dict[str, Any]:
    job = left_out.job
    row = FleetJobRow(
        name=str(job.name),
        model=job.model,
        status=left_out.status,
        leaves=[],
        nodes=[],
        reason=left_out.reason,
    )
    return row.model_dump()


def fleet_files(fleet: Fleet) -> dict[str, str]:
    """Texts by name: the answer, its pictures, and the plan and launch files of every job that runs."""
    document = fleet_document(fleet)
    files = {
        "fleet.json": json.dumps({"schema": 1, **document}, indent=1) + "\n",
        "fleet.csv": csv_text(list(FleetJobRow.model_fields), document["jobs"]),
        "nodes.svg": nodes_svg(document, fleet.free, fleet.places.units),
    }
    if fleet.objective != "throughput":
        files["gantt.svg"] = gantt_svg(document)
    for index, job in enumerate(fleet.jobs):
        size, _, units = fleet.outcome(index)
        if size is not None:
            plan = _plan_on_units(fleet.cluster, size.result["files"], units)
            for name, text in plan_files(plan).items():
                files[f"plans/{job.job.name}/{name}"] = text
    return files


def _plan_on_units(cluster: ClusterSpec, files: Mapping[str, str], units: Sequence[Unit]) -> Plan:
    """The plan of a size, on the nodes that the job got."""
    plan = Plan.model_validate(yaml.safe_load(files["plan.yaml"]))
    nodes = tuple(
        NodeSpec(name=name, leaf=unit.leaf, pod=unit.pod) for unit in units for name in unit.nodes
    )
    fields = {"nodes": nodes, "gpus": len(nodes) * cluster.gpus_per_node, "elastic": False}
    inputs = plan.inputs.model_copy(update={"cluster": cluster.model_copy(update=fields)})
    return with_digest(plan.model_copy(update={"inputs": inputs}))
