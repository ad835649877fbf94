"""Which job gets how much, where, and when.

Let x[j, k] say that job j gets its k-th size: u[j, k] units of one part of the cluster, on which it trains
r[j, k] tokens/s; U[p] units of part p are free. Every job gets one size, or none if it may wait.

Throughput: maximise sum of weight[j] * r[j, k] / max r[j] * x[j, k] with the sum of u[j, k] * x[j, k] over
the sizes on part p <= U[p]. A multiple-choice knapsack: of one part exact by dynamic programming over the
units in use, of several by CP-SAT.

Schedules (makespan, deadlines): job j runs once, for tokens[j] / r[j, k]; at no time do the running jobs
exceed U[p]. The last end is least; with deadlines the weighted time past them first. List schedules, and
CP-SAT for what they leave open.

Priorities are lexicographic: the value of a class is fixed before the next one is looked at.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from meshwright.cluster_specs.allocation import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import free_of
from meshwright.costmodel.layout import ROUNDING
from meshwright.errors import InfeasibleError, InputError, OutOfTimeError, near_miss
from meshwright.planner.drawing import counted
from meshwright.planner.many.jobs import Job, JobDoc, read_jobs
from meshwright.planner.solvers.clock import Shares, is_over
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


# The jobs of a fleet, the sizes that each can choose from, and what it makes of each.


MOST_FLEET_JOBS = 500
HOURS_PER_DAY = 24
Gpus = Annotated[int, Field(ge=1, le=1_048_576)]


class FleetJobDoc(JobDoc):
    """A job that shares the cluster. `gpus` fixes its size; `cluster` is the shared one, or left out."""

    cluster: str = ""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """What the job at its fastest counts, against others of its priority."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs of higher priority are served first, whatever that costs the others."""
    min_gpus: Gpus | None = None
    max_gpus: Gpus | None = None
    tokens: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Left to train; the objectives makespan and deadlines need it."""
    deadline_h: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Hours from now."""
    may_wait: bool = False
    """Whether the job may get nothing now; under makespan and deadlines every job may start later."""


def read_fleet(
    path: Path,
    cluster: str,
    calibration: Path | None = None,
    budget: Mapping[str, float | None] | None = None,
) -> list[FleetJobDoc]:
    """The jobs of a fleet, on its cluster. Raises InputError with every mistake.

    Parameters
    ----------
    path
        The jobs file.
    cluster
        What all jobs share: catalog name or file.
    calibration
        The stack file of jobs that name none.
    budget
        `tokens`, `days` and `gpu_hour_price` of jobs that name none; days become deadlines.
    """
    jobs = read_jobs(path, FleetJobDoc, calibration, budget)
    mistakes = [words for job in jobs if (words := _mistake(job, str(path), cluster))]
    if mistakes:
        raise InputError("\n".join(mistakes[:20]))
    if len(jobs) > MOST_FLEET_JOBS:
        what = f"at most {MOST_FLEET_JOBS} jobs share a cluster"
        raise InputError(what, where=str(path), value=len(jobs))
    return [_on(cluster, job.document) for job in jobs if isinstance(job.document, FleetJobDoc)]


def _on(cluster: str, job: FleetJobDoc) -> FleetJobDoc:
    size = {} if job.gpus is None else {"min_gpus": job.gpus, "max_gpus": job.gpus, "gpus": None}
    deadline_h = job.deadline_h
    if deadline_h is None and job.days is not None:
        deadline_h = HOURS_PER_DAY * job.days
    return job.model_copy(update={"cluster": cluster, "deadline_h": deadline_h, **size})


def _mistake(job: Job, where: str, cluster: str) -> str | None:
    document = job.document
    if not isinstance(document, FleetJobDoc):
        return job.mistake
    place = f"{where}: {job.name}"
    if document.cluster and job.fields.get("cluster") != cluster and document.cluster != cluster:
        return f"{place}.cluster: {document.cluster!r} is not the shared cluster, {cluster!r}; leave it out"
    if document.nodes is not None:
        return f"{place}.nodes: which nodes a job gets is the answer; --busy leaves some out"
    if document.gpus is not None and (document.min_gpus or document.max_gpus):
        return f"{place}.gpus: a fixed size leaves no room for min_gpus and max_gpus; give one or the other"
    if document.min_gpus and document.max_gpus and document.min_gpus > document.max_gpus:
        return f"{place}.min_gpus: {document.min_gpus} is more than max_gpus {document.max_gpus}"
    return None


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """A job on so many units of one part of the cluster."""

    units: int
    part: int = 0
    tokens_per_s: float
    result: dict[str, Any]
    """The row and the files of its plan."""


@dataclass(frozen=True, kw_only=True)
class SizedJob:
    """A job and the sizes at which it has a plan, part by part in rising order; larger ones are faster."""

    job: FleetJobDoc
    sizes: tuple[JobSize, ...]

    @property
    def best_tokens_per_s(self) -> float:
        """At its fastest size."""
        return max(size.tokens_per_s for size in self.sizes)

    def train_s(self, size: int) -> float:
        """Seconds that the job's tokens take at one of its sizes, by index.

        Parameters
        ----------
        size
            Index into `sizes`.
        """
        assert self.job.tokens is not None
        return self.job.tokens / self.sizes[size].tokens_per_s


@dataclass(frozen=True, kw_only=True)
class UnplannedJob:
    """A job without a plan at any of its sizes: the others are shared out without it."""

    job: FleetJobDoc
    status: str
    """`infeasible`, `failed`, or `unknown` where the time limit came first."""
    reason: str


def sized_job(
    job: FleetJobDoc, answers: Sequence[tuple[int, int, dict[str, Any]]], asked: int
) -> SizedJob | UnplannedJob:
    """A job with the sizes at which it has a plan, or why it has none.

    Parameters
    ----------
    job
        As the file has it.
    answers
        (part, units, result of the plan) of the sizes that were answered, part by part in rising order.
    asked
        Sizes that were to be answered.
    """
    sizes = [
        JobSize(part=part, units=units, tokens_per_s=result["row"]["tokens_per_s"], result=result)
        for part, units, result in answers
        if result["row"].get("tokens_per_s")
    ]
    if sizes:
        return SizedJob(job=job, sizes=faster_sizes(sizes))
    if not asked:
        limits = (("at least min_gpus", job.min_gpus), ("at most max_gpus", job.max_gpus))
        words = " and ".join(f"{name} {gpus}" for name, gpus in limits if gpus is not None)
        reason = f"no number of wholly free nodes or NVLink domains has {words} GPUs; fixed gpus are both"
        return UnplannedJob(job=job, status="infeasible", reason=reason)
    if len(answers) < asked or any(result["row"]["status"] == "unknown" for *_, result in answers):
        reason = "the time limit came before any plan"
        return UnplannedJob(job=job, status="unknown", reason=reason)
    largest = {part: result["row"] for part, _, result in answers}.values()
    reasons = "; ".join(dict.fromkeys(row["message"] for row in largest))
    reason = f"no plan at any size; at the largest: {reasons}"
    return UnplannedJob(job=job, status=answers[-1][2]["row"]["status"], reason=reason)


def candidate_units(job: FleetJobDoc, gpus_per_unit: int, most_units: int) -> tuple[int, ...]:
    """Sizes to plan, in units: 1, 2, 3, 4, 6, 8, 12, 16, ... and the job's own limits.

    Parameters
    ----------
    job
        With the limits of its size, in GPUs.
    gpus_per_unit
        From 1; limits are rounded inwards to whole units.
    most_units
        That are free in the part.
    """
    low = -(-(job.min_gpus or 1) // gpus_per_unit)
    high = most_units
    if job.max_gpus is not None:
        high = min(most_units, job.max_gpus // gpus_per_unit)
    sizes = {low, high}
    for power in range(high.bit_length()):
        sizes |= {1 << power, 3 << power}
    return tuple(sorted(size for size in sizes if low <= size <= high))


def faster_sizes(sizes: Sequence[JobSize]) -> tuple[JobSize, ...]:
    """Part by part in rising order, without the sizes at which a smaller one of the part is as fast.

    Parameters
    ----------
    sizes
        In any order, of one part or of several.
    """
    faster: list[JobSize] = []
    for size in sorted(sizes, key=lambda size: (size.part, size.units, -size.tokens_per_s)):
        first_of_part = not faster or size.part != faster[-1].part
        if first_of_part or size.tokens_per_s > faster[-1].tokens_per_s:
            faster.append(size)
    return tuple(faster)


# What a fleet shares out: whole nodes, or whole NVLink domains, and where they hang.


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The least that a job can get: a node, or the nodes of an NVLink domain."""

    nodes: tuple[str, ...]
    leaf: str
    pod: str


@dataclass(frozen=True, kw_only=True)
class FreeUnits:
    """The free units of a cluster, in its order."""

    gpus_per_unit: int
    units: tuple[Unit, ...]

    @property
    def by_leaf(self) -> dict[str, list[int]]:
        """Units by leaf, as indices into `units`."""
        leaves: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            leaves.setdefault(unit.leaf, []).append(index)
        return leaves

    @property
    def pod_of(self) -> dict[str, str]:
        """The pod of each leaf."""
        return {unit.leaf: unit.pod for unit in self.units}


@dataclass(frozen=True)
class _Node:
    name: str
    free_gpus: int
    leaf: str
    pod: str


def free_units(cluster: ClusterSpec, gpus: int, busy: Collection[str] = ()) -> FreeUnits:
    """The units that are wholly free.

    Parameters
    ----------
    cluster
        With its nodes, or a kind of node.
    gpus
        The first so many GPUs are looked at.
    busy
        Names of nodes in use already; their units are left out.

    Raises
    ------
    InputError
        For a busy node that there is not, or if nothing is free.
    """
    per_node = cluster.gpus_per_node
    gpus_per_unit = max(per_node, cluster.nvlink_domain)
    nodes_per_unit = gpus_per_unit // per_node
    nodes = _nodes(cluster, gpus)
    names = {node.name for node in nodes}
    for name in busy:
        if name not in names:
            hint = near_miss(name, names)
            raise InputError("no such node", where="--busy", value=name, did_you_mean=hint)
    free = [node.name for node in nodes if node.free_gpus >= per_node][: gpus // per_node]
    usable = set(free) - set(busy)
    units: list[Unit] = []
    # Which nodes share an NVLink domain follows from their places in the list, the used ones among them.
    for (leaf, pod), group in groupby(nodes, key=lambda node: (node.leaf, node.pod)):
        together = [node.name for node in group]
        for first in range(0, len(together) - nodes_per_unit + 1, nodes_per_unit):
            members = tuple(together[first : first + nodes_per_unit])
            if usable.issuperset(members):
                units.append(Unit(nodes=members, leaf=leaf, pod=pod))
    if not units:
        kind = "node" if nodes_per_unit == 1 else "NVLink domain"
        raise InputError(f"no {kind} is wholly free", where=f"cluster {cluster.name}")
    return FreeUnits(gpus_per_unit=gpus_per_unit, units=tuple(units))


def _nodes(cluster: ClusterSpec, gpus: int) -> list[_Node]:
    """The nodes of a cluster; of a kind of node those of the first GPUs.

    Where no leaf is named, they fill the levels in turn.
    """
    per_node = cluster.gpus_per_node
    if cluster.nodes and (not cluster.levels or any(node.leaf for node in cluster.nodes)):
        return [
            _Node(node.name, free_of(node, per_node), node.leaf or "fabric", node.pod or "fabric")
            for node in cluster.nodes
        ]
    blocks = [level.gpus for level in cluster.levels[:-1]] or [cluster.gpus]
    leaf_gpus = blocks[0]
    pod_gpus = blocks[1] if len(blocks) > 1 else cluster.gpus
    nodes = []
    for index in range(len(cluster.nodes) or -(-gpus // per_node)):
        first_gpu = index * per_node
        leaf = f"leaf-{first_gpu // leaf_gpus + 1:03d}"
        pod = f"pod-{first_gpu // pod_gpus + 1:02d}"
        free = free_of(cluster.nodes[index], per_node) if cluster.nodes else per_node
        nodes.append(_Node(node_name(cluster, index), free, leaf, pod))
    return nodes


# Schedules made job by job: what CP-SAT starts from, and often all there is to find.
#
# Jobs are taken in some order. Each gets the size and the earliest start that make it least late, then end
# before a wished makespan, then take the least units (by their worth) times ticks (serial schedule
# generation: Kolisch and Hartmann 1999, Heuristic algorithms for the resource-constrained project scheduling
# problem, section 2.1).
# The first orders are by slack, by due date, by length and by area; then jobs of the best order are moved.


PATIENCE = 20
"""Orders in a row without a better schedule, for each job, after which the search ends."""
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Values = tuple[int, ...]
"""What a schedule is judged by, in order: lateness of each priority that has due dates, last end."""


@dataclass(frozen=True, kw_only=True)
class TimedJob:
    """What the schedule knows of a job; time is in ticks."""

    demands: tuple[int, ...]
    """Units of each size."""
    parts: tuple[int, ...]
    """Where each size is."""
    ticks: tuple[int, ...]
    """Length of each size."""
    due: int | None
    late_weight: int
    """What a tick past `due` counts."""
    priority: int

    @property
    def shortest(self) -> int:
        """Ticks at its fastest size."""
        return min(self.ticks)

    @property
    def least_area(self) -> int:
        """Units times ticks at the size that takes the least."""
        return min(demand * ticks for demand, ticks in zip(self.demands, self.ticks, strict=True))

    def lateness(self, end: int) -> int:
        """Weighted ticks past the due date.

        Parameters
        ----------
        end
            Of the job, in ticks.
        """
        return 0 if self.due is None else self.late_weight * max(0, end - self.due)


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """When a job runs, and at which of its sizes."""

    size: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ListSchedule:
    """The best schedule found, and what no schedule is below."""

    runs: tuple[TimedRun, ...]
    values: Values
    bounds: Values


def due_priorities(jobs: Sequence[TimedJob]) -> list[int]:
    """Priorities of jobs with due dates, highest first: one lateness each."""
    return sorted({job.priority for job in jobs if job.due is not None}, reverse=True)


def values_of(jobs: Sequence[TimedJob], runs: Sequence[TimedRun]) -> Values:
    """What a schedule is judged by.

    Parameters
    ----------
    jobs
        With their due dates and weights.
    runs
        One of each job, in ticks.
    """
    pairs = list(zip(jobs, runs, strict=True))
    late = (
        sum(job.lateness(run.end) for job, run in pairs if job.priority == priority)
        for priority in due_priorities(jobs)
    )
    return *late, max(run.end for run in runs)


def least_values(jobs: Sequence[TimedJob], units: Sequence[int]) -> Values:
    """Lower bounds on each value: every job at its fastest from the start; the last end also by areas that
    are packed without a gap.

    A last end T leaves each job the sizes that take no longer. With any weights w of the parts, the least
    w * area of these, summed over jobs, is at most T times the sum of w * units: with equal weights, and
    with `part_weights`.

    Parameters
    ----------
    jobs
        At least one, with all sizes that they may have.
    units
        Free ones of each part.
    """
    alone = [TimedRun(size=0, start=0, end=job.shortest) for job in jobs]
    *late, longest = values_of(jobs, alone)
    most_sizes = max(len(job.ticks) for job in jobs)
    ticks, areas = np.full((2, len(jobs), most_sizes), inf)
    parts = np.zeros((len(jobs), most_sizes), dtype=np.int64)
    for index, job in enumerate(jobs):
        sizes = slice(len(job.ticks))
        ticks[index, sizes], parts[index, sizes] = job.ticks, job.parts
        areas[index, sizes] = ticks[index, sizes] * job.demands
    horizon = sum(max(job.ticks) for job in jobs)
    for weights in (np.ones(len(units)), np.array(part_weights(jobs, len(units)))):
        taken = areas * weights[parts]
        room = float(weights @ units) * (1 + 1e-9)
        fits = partial(_fits, ticks, taken, room)
        longest += bisect_left(range(longest, horizon), True, key=fits)
    return *late, longest


def _fits(ticks: FloatArray, taken: FloatArray, room: float, end: int) -> bool:
    """Whether the least that jobs take at sizes that end in time is not above the room until then."""
    return bool(np.where(ticks <= end, taken, inf).min(axis=1).sum() <= room * end)


def part_weights(jobs: Sequence[TimedJob], parts: int) -> tuple[float, ...]:
    """What a unit of each part is worth: so that jobs take as much of one part as of another.

    Parameters
    ----------
    jobs
        Those that fit each part are compared.
    parts
        How many there are.
    """
    areas = [0.0] * parts
    for job in jobs:
        least = [inf] * parts
        for demand, part, ticks in zip(job.demands, job.parts, job.ticks, strict=True):
            least[part] = min(least[part], demand * ticks)
        if inf not in least:
            areas = [area + more for area, more in zip(areas, least, strict=True)]
    return tuple(areas[0] / area if area else 1.0 for area in areas)


def list_schedule(
    jobs: Sequence[TimedJob], units: Sequence[int], *, seed: int, most_runs: int
) -> ListSchedule:
    """The best schedule of many orders.

    Parameters
    ----------
    jobs
        At least one; each has a size that fits.
    units
        Of each part, that jobs share.
    seed
        Of the changes of order.
    most_runs
        Runs to be placed over all orders: the work, which does not depend on the machine. The search ends
        before that where nothing can be better, or with the command's time limit.
    """
    bounds = least_values(jobs, units)
    best: tuple[Values, list[TimedRun]] | None = None
    order: list[int] = []
    orders = _orders(jobs, order, random.Random(seed))
    weights = part_weights(jobs, len(units))
    in_vain = 0
    for _ in range(max(4, most_runs // len(jobs))):
        tried = next(orders)
        runs = _runs(jobs, tried, units, weights, bounds[-1])
        values = values_of(jobs, runs)
        in_vain = 0 if best is None or values < best[0] else in_vain + 1
        if best is None or values <= best[0]:
            best, order[:] = (values, runs), tried
        if values == bounds or in_vain == PATIENCE * len(jobs) or is_over():
            break
    assert best is not None
    return ListSchedule(runs=tuple(best[1]), values=best[0], bounds=bounds)


def _orders(
    jobs: Sequence[TimedJob], best: Sequence[int], chance: random.Random
) -> Iterator[list[int]]:
    """The first orders, then changes of the best so far."""
    indices = range(len(jobs))

    def slack(index: int) -> tuple[bool, int]:
        job = jobs[index]
        return job.due is None, (job.due or 0) - job.shortest

    def due(index: int) -> tuple[bool, int]:
        return jobs[index].due is None, jobs[index].due or 0

    keys = (slack, due, lambda index: -jobs[index].shortest, lambda index: -jobs[index].least_area)
    for key in keys:
        by_key = sorted(indices, key=key)
        yield sorted(by_key, key=lambda index: -jobs[index].priority)
    while True:
        yield changed_order(best, chance)


def changed_order(best: Sequence[int], chance: random.Random) -> list[int]:
    """An order with one, two or four of its jobs moved elsewhere.

    Parameters
    ----------
    best
        Indices of at least one job.
    chance
        The source of chance, which decides how many are moved and where.
    """
    order = list(best)
    for _ in range(chance.choice((1, 1, 2, 4))):
        moved = order.pop(chance.randrange(len(order)))
        order.insert(chance.randrange(len(order) + 1), moved)
    return order


def _runs(
    jobs: Sequence[TimedJob],
    order: Sequence[int],
    units: Sequence[int],
    weights: Sequence[float],
    wished_end: int,
) -> list[TimedRun]:
    """Every job's run, placed in this order."""
    profiles = [_Profile(of_part) for of_part in units]
    runs: dict[int, TimedRun] = {}
    for index in order:
        job = jobs[index]
        best: tuple[tuple[int, int, float, int], TimedRun] | None = None
        sizes = zip(job.demands, job.parts, job.ticks, strict=True)
        for size, (demand, part, ticks) in enumerate(sizes):
            if demand > units[part]:
                continue
            start = profiles[part].earliest_start(demand, ticks)
            end = start + ticks
            area = demand * ticks * weights[part]
            rank = (job.lateness(end), max(0, end - wished_end), area, end)
            if best is None or rank < best[0]:
                best = rank, TimedRun(size=size, start=start, end=end)
        assert best is not None
        runs[index] = best[1]
        profiles[job.parts[best[1].size]].add(best[1], job.demands[best[1].size])
    return [runs[index] for index in range(len(jobs))]


class _Profile:
    """Units in use over time: `_used[i]` from `_times[i]` to the next; in the end none."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._times = [0]
        self._used = [0]

    def earliest_start(self, demand: int, ticks: int) -> int:
        """First moment from which so many units are free for so long.

        Parameters
        ----------
        demand
            Units, at most all.
        ticks
            Length, above 0.
        """
        most_used = self._units - demand
        start: int | None = None
        for begin, used in zip(self._times, self._used, strict=True):
            if start is not None and begin - start >= ticks:
                return start
            if used > most_used:
                start = None
            elif start is None:
                start = begin
        assert start is not None, "in the end nothing is in use"
        return start

    def add(self, run: TimedRun, demand: int) -> None:
        """Takes units for a run.

        Parameters
        ----------
        run
            From its start to its end, for which the units are free.
        demand
            Units.
        """
        for index in range(self._index(run.start), self._index(run.end)):
            self._used[index] += demand

    def _index(self, moment: int) -> int:
        """Of the segment that begins there, which is made where there is none."""
        index = bisect_left(self._times, moment)
        if index == len(self._times) or self._times[index] != moment:
            self._times.insert(index, moment)
            self._used.insert(index, self._used[index - 1])
        return index


TOO_LARGE = "the jobs that must run do not fit the cluster together, even at their smallest sizes"
UNREACHABLE = np.int64(-1)
"""Value of so many units in use where no choice of sizes uses them."""
WAITS = -1
FleetObjective = Literal["throughput", "makespan", "deadlines"]
OBJECTIVES: tuple[str, ...] = get_args(FleetObjective)


@dataclass(frozen=True, kw_only=True)
class FleetParams:
    """How the models of a fleet are stated and solved."""

    deterministic_s: float = 1.0
    """CP-SAT's own measure of work for each goal that list schedules leave open, not seconds of a clock: a
    slow machine finds the same. With 50 jobs one took 14 s of the processor.
    """
    parts_s: float = 10.0
    """The same for each priority's throughput on several parts: 300 jobs on two took 3 s of the processor."""
    seed: int = 0
    value_scale: int = 1_000_000
    """Integer steps of a job's best throughput in the objective: finer than any figure that is printed."""
    ticks: int = 20_000
    """Steps of time up to the horizon; durations are rounded up to them, 0.005 % of it."""
    lateness_scale: int = 100
    """Integer steps of a weight in the lateness."""
    listed_runs: int = 100_000
    """Runs that are placed to list schedules, before any solver: about four seconds."""
    dealt_jobs: int = 20_000
    """Jobs that are dealt out over leaves, before any solver: about a second."""
    pod_weight: int = 1000
    """What a pod that a job touches counts, against a leaf: more than all the leaves of a job."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one job gets."""

    size: int | None
    """Index into its sizes; None if it waits."""
    start_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class FleetSolution:
    """What every job gets. `value` and `bound` are of the objective: a sum, or seconds to minimise.

    A schedule is proven where none is shorter by more than the rounding of durations to ticks; its bound
    holds without that rounding.
    """

    allocations: tuple[Allocation, ...]
    value: float
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Relative to the value."""
        return abs(self.bound - self.value) / abs(self.value) if self.value else 0.0


def share_throughput(
    jobs: Sequence[SizedJob], units: Sequence[int], params: FleetParams
) -> FleetSolution:
    """The sizes with the greatest weighted throughput.

    Parameters
    ----------
    jobs
        With the sizes that each can have.
    units
        That are free, of each part.
    params
        Of the model and the solver.

    Raises
    ------
    InfeasibleError
        Where not all jobs that must run fit together.
    OutOfTimeError
        Where there are several parts, and the solver came to no sharing in its time.
    """
    priorities = sorted({job.job.priority for job in jobs}, reverse=True)
    classes = [
        [index for index, job in enumerate(jobs) if job.job.priority == priority]
        for priority in priorities
    ]
    if len(units) > 1:
        return _shared_by_parts(jobs, classes, units, params)
    return _shared_units(jobs, classes, units[0], params)


def _shared_units(
    jobs: Sequence[SizedJob], classes: Sequence[Sequence[int]], units: int, params: FleetParams
) -> FleetSolution:
    """The same of one part, by dynamic programming."""
    needed = [sum(_least_units(jobs[index]) for index in members) for members in classes]
    values: IntArray = np.full(units + 1, UNREACHABLE)
    values[0] = 0
    taken: dict[int, IntArray] = {}
    total = 0
    for place, members in enumerate(classes):
        for index in members:
            values, taken[index] = _with_job(values, jobs[index], params)
        most = units - sum(needed[place + 1 :])
        best = values[: most + 1].max() if most >= 0 else UNREACHABLE
        if best < 0:
            raise InfeasibleError(_too_large(jobs, (units,)))
        total += int(best)
        units_used = int(np.flatnonzero(values[: most + 1] == best)[0])
        values = np.where(values == best, 0, UNREACHABLE)
    sizes: dict[int, int | None] = {}
    for index in reversed([index for members in classes for index in members]):
        size = int(taken[index][units_used])
        sizes[index] = None if size == WAITS else size
        units_used -= 0 if size == WAITS else jobs[index].sizes[size].units
    allocations = tuple(Allocation(size=sizes[index]) for index in range(len(jobs)))
    value = total / params.value_scale
    return FleetSolution(allocations=allocations, value=value, bound=value, proven=True)


def _shared_by_parts(
    jobs: Sequence[SizedJob],
    classes: Sequence[Sequence[int]],
    units: Sequence[int],
    params: FleetParams,
) -> FleetSolution:
    """The same of several parts, by CP-SAT, class after class; each bound holds while the values before it
    stay as they are.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    chosen = [_size_literals(model, index, len(job.sizes)) for index, job in enumerate(jobs)]
    on_part: list[list[cp_model.LinearExprT]] = [[] for _ in units]
    for job, row in zip(jobs, chosen, strict=True):
        (model.add_at_most_one if job.job.may_wait else model.add_exactly_one)(row)
        for size, literal in zip(job.sizes, row, strict=True):
            on_part[size.part].append(size.units * literal)
    for terms, most in zip(on_part, units, strict=True):
        model.add(sum(terms) <= most)
    value = bound = 0
    sizes: list[int | None] = []
    for members in classes:
        goal = sum(
            scaled_value(jobs[index], size, params) * literal
            for index in members
            for size, literal in enumerate(chosen[index])
        )
        model.maximize(goal)
        try:
            solver = solve_fleet(model, replace(params, deterministic_s=params.parts_s))
        except InfeasibleError:
            raise InfeasibleError(_too_large(jobs, units)) from None
        if solver is None:
            raise OutOfTimeError("no way to share the parts out was found in the time given")
        best = round(solver.objective_value)
        value, bound = value + best, bound + round(solver.best_objective_bound)
        model.add(goal >= best)
        sizes = [_chosen_size(solver, row) for row in chosen]
        model.clear_hints()  # type: ignore[no-untyped-call]
        for row, taken in zip(chosen, sizes, strict=True):
            for index, literal in enumerate(row):
                model.add_hint(literal, index == taken)
    return FleetSolution(
        allocations=tuple(Allocation(size=size) for size in sizes),
        value=value / params.value_scale,
        bound=bound / params.value_scale,
        proven=value == bound,
    )


def _too_large(jobs: Sequence[SizedJob], units: Sequence[int]) -> str:
    """That jobs do not fit together, with the least that each takes and what would help."""
    blocks = {job.job.name: _least_units(job) for job in jobs}
    takes = ", ".join(f"{name} {count}" for name, count in blocks.items() if count)
    return (
        f"{TOO_LARGE}: {takes}, in all {sum(blocks.values())} of {_free_blocks(units)}. `gpus` of a job is a "
        "fixed size: give max_gpus in its place, or may_wait"
    )


def _free_blocks(units: Sequence[int]) -> str:
    in_parts = f" in parts of {' and '.join(map(str, units))}" if len(units) > 1 else ""
    return counted(sum(units), "free block") + in_parts


def _least_units(job: SizedJob) -> int:
    return 0 if job.job.may_wait else min(size.units for size in job.sizes)


def _with_job(values: IntArray, job: SizedJob, params: FleetParams) -> tuple[IntArray, IntArray]:
    """(best value with this job too by units in use, the size that it has there)."""
    best = values if job.job.may_wait else np.full_like(values, UNREACHABLE)
    taken = np.full_like(values, WAITS)
    for size, option in enumerate(job.sizes):
        if option.units >= len(values):
            continue
        more = np.full_like(values, UNREACHABLE)
        more[option.units :] = values[: len(values) - option.units]
        more = np.where(more >= 0, more + scaled_value(job, size, params), UNREACHABLE)
        taken = np.where(more > best, size, taken)
        best = np.maximum(best, more)
    return best, taken


def scaled_value(job: SizedJob, size: int, params: FleetParams) -> int:
    """What a job contributes to the objective at one of its sizes, in steps of 1 / `value_scale`.

    Parameters
    ----------
    job
        With its weight.
    size
        Index into its sizes.
    params
        With the steps.
    """
    share = job.sizes[size].tokens_per_s / job.best_tokens_per_s
    return round(job.job.weight * share * params.value_scale)


def durations(jobs: Sequence[SizedJob], params: FleetParams) -> tuple[float, list[list[int]]]:
    """(seconds of a tick, ticks that each job needs at each of its sizes).

    Jobs one after the other at their fastest, or one alone at its slowest, take at most `params.ticks`.

    Parameters
    ----------
    jobs
        All have `tokens`.
    params
        With the ticks of the horizon.
    """
    times_s = [[job.train_s(size) for size in range(len(job.sizes))] for job in jobs]
    slowest_s = max(max(row) for row in times_s)
    in_turns_s = sum(min(row) for row in times_s)
    tick_s = max(slowest_s, in_turns_s) / params.ticks
    return tick_s, [[ceil(time_s / tick_s - 1e-9) for time_s in row] for row in times_s]


def share_over_time(
    jobs: Sequence[SizedJob], units: Sequence[int], objective: str, params: FleetParams
) -> FleetSolution:
    """Sizes and start times: the least makespan, or the least weighted lateness and then makespan.

    Parameters
    ----------
    jobs
        With the sizes that each can have; all must have `tokens`.
    units
        That are free, of each part.
    objective
        `makespan` or `deadlines`.
    params
        Of the model and the solver.

    Raises
    ------
    InfeasibleError
        Where a job does not fit the cluster.
    """
    tick_s, timed = timed_jobs(jobs, params, with_due=objective == "deadlines")
    if any(all(size.units > units[size.part] for size in job.sizes) for job in jobs):
        raise InfeasibleError(TOO_LARGE)
    first = list_schedule(timed, units, seed=params.seed, most_runs=params.listed_runs)
    runs, values, bounds = first.runs, first.values, list(first.bounds)
    if values != first.bounds:
        runs, values, bounds = _improved(timed, units, first, params)
    finer = replace(params, ticks=params.ticks * _FINER)
    finer_s, exact = timed_jobs(jobs, finer, with_due=False)
    runs = _moved_up(exact, runs, units)
    value_s = max(run.end for run in runs) * finer_s
    # Rounded up, each job of a schedule lasts less than a tick more.
    bound_s = (bounds[-1] - len(jobs)) * tick_s
    bound_s = max(bound_s, least_values(exact, units)[-1] * finer_s * (1 - ROUNDING))
    return FleetSolution(
        allocations=tuple(
            Allocation(size=run.size, start_s=run.start * finer_s, end_s=run.end * finer_s)
            for run in runs
        ),
        value=value_s,
        bound=value_s if bound_s >= value_s * (1 - 2 * ROUNDING) else bound_s,
        proven=list(values) == bounds,
    )


_FINER = 10**9
"""Parts of a tick in which a schedule is told, once its sizes and its order are decided."""


def _moved_up(
    jobs: Sequence[TimedJob], runs: Sequence[TimedRun], units: Sequence[int]
) -> tuple[TimedRun, ...]:
    """The same sizes in the same order, each run as early as can be, for jobs timed in finer ticks."""
    profiles = [_Profile(of_part) for of_part in units]
    moved = list(runs)
    for index in sorted(range(len(jobs)), key=lambda index: runs[index].start):
        job, size = jobs[index], runs[index].size
        profile = profiles[job.parts[size]]
        demand = job.demands[size]
        ticks = job.ticks[size]
        start = profile.earliest_start(demand, ticks)
        moved[index] = TimedRun(size=size, start=start, end=start + ticks)
        profile.add(moved[index], demand)
    return tuple(moved)


def timed_jobs(
    jobs: Sequence[SizedJob], params: FleetParams, *, with_due: bool
) -> tuple[float, list[TimedJob]]:
    """(seconds of a tick, what a schedule knows of each job), with its deadlines or without.

    Parameters
    ----------
    jobs
        All have `tokens`.
    params
        With the ticks of the horizon and the steps of a weight.
    with_due
        Whether deadlines count, rounded down to ticks.
    """
    tick_s, ticks = durations(jobs, params)
    horizon = sum(max(row) for row in ticks)
    timed = []
    for job, row in zip(jobs, ticks, strict=True):
        due = None
        if with_due and job.job.deadline_h is not None:
            due = min(int(job.job.deadline_h * 3600 / tick_s), horizon)
        timed.append(
            TimedJob(
                demands=tuple(size.units for size in job.sizes),
                parts=tuple(size.part for size in job.sizes),
                ticks=tuple(row),
                due=due,
                late_weight=max(1, round(params.lateness_scale * job.job.weight)),
                priority=job.job.priority,
            )
        )
    return tick_s, timed


def _improved(
    jobs: Sequence[TimedJob], units: Sequence[int], first: ListSchedule, params: FleetParams
) -> tuple[tuple[TimedRun, ...], Values, list[int]]:
    """(runs, their values, lower bounds): CP-SAT for each value of the first schedule above its bound.

    A bound holds while the values before it stay as they are.
    """
    schedule = _Schedule(jobs, units)
    runs, values, bounds = first.runs, first.values, list(first.bounds)
    goals = [*schedule.lateness_goals(), schedule.makespan]
    # One share is kept for placing.
    shares = Shares(len(goals) + 1)
    for place, goal in enumerate(goals):
        share_s = shares.next_s()
        schedule.model.add(goal <= values[place])
        if values[place] == bounds[place]:
            continue
        schedule.model.minimize(goal)
        schedule.hint(runs)
        solver = solve_fleet(schedule.model, params, share_s)
        if solver is None:
            continue
        runs = schedule.runs(solver)
        values = values_of(jobs, runs)
        bounds[place] = max(bounds[place], ceil(solver.best_objective_bound - 1e-6))
        schedule.model.add(goal <= values[place])
    return runs, values, bounds


class _Schedule:
    """The model of jobs over time: a start, an end and one size for each."""

    def __init__(self, jobs: Sequence[TimedJob], units: Sequence[int]) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self._jobs = jobs
        self._horizon = sum(max(job.ticks) for job in jobs)
        self.model = model = cp_model.CpModel()
        indices = range(len(jobs))
        self._starts = [model.new_int_var(0, self._horizon, f"start{index}") for index in indices]
        self._ends = [model.new_int_var(0, self._horizon, f"end{index}") for index in indices]
        self._chosen = [
            _size_literals(model, index, len(job.ticks)) for index, job in enumerate(jobs)
        ]
        self.makespan = self._post_capacity(units)

    def _post_capacity(self, units: Sequence[int]) -> cp_model.IntVar:
        """At no time do the running jobs exceed the units of a part; returns the last end."""
        model = self.model
        parts: list[list[tuple[cp_model.IntervalVar, int, cp_model.LinearExprT]]] = [
            [] for _ in units
        ]
        for index, row in enumerate(self._chosen):
            model.add_exactly_one(row)
            job = self._jobs[index]
            start = self._starts[index]
            end = self._ends[index]
            sizes = zip(job.ticks, job.demands, job.parts, strict=True)
            for size, (ticks, demand, part) in enumerate(sizes):
                literal, name = row[size], f"run{index}_{size}"
                interval = model.new_optional_interval_var(start, ticks, end, literal, name)
                parts[part].append((interval, demand, literal * (demand * ticks)))
        for runs, most in zip(parts, units, strict=True):
            model.add_cumulative([run[0] for run in runs], [run[1] for run in runs], most)
        makespan = model.new_int_var(0, self._horizon, "makespan")
        model.add_max_equality(makespan, self._ends)
        for runs, most in zip(parts, units, strict=True):
            # What an area bound knows and the cumulative does not.
            model.add(sum(area for *_, area in runs) <= most * makespan)
        return makespan

    def lateness_goals(self) -> list[cp_model.LinearExprT]:
        """Weighted ticks past the deadlines, for each priority that has any, highest first."""
        goals: list[cp_model.LinearExprT] = []
        for priority in due_priorities(self._jobs):
            terms: list[cp_model.LinearExprT] = []
            for index, job in enumerate(self._jobs):
                if job.priority != priority or job.due is None:
                    continue
                late = self.model.new_int_var(0, self._horizon, f"late{index}")
                self.model.add(late >= self._ends[index] - job.due)
                terms.append(late * job.late_weight)
            goals.append(sum(terms))
        return goals

    def hint(self, runs: Sequence[TimedRun]) -> None:
        """The solver starts from these runs."""
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for row, start, run in zip(self._chosen, self._starts, runs, strict=True):
            self.model.add_hint(start, run.start)
            for size, literal in enumerate(row):
                self.model.add_hint(literal, size == run.size)

    def runs(self, solver: cp_model.CpSolver) -> tuple[TimedRun, ...]:
        """What the solver gives each job."""
        runs = []
        for job, row, start in zip(self._jobs, self._chosen, self._starts, strict=True):
            size, begin = _chosen_size(solver, row), solver.value(start)
            assert size is not None
            runs.append(TimedRun(size=size, start=begin, end=begin + job.ticks[size]))
        return tuple(runs)


def _size_literals(model: cp_model.CpModel, index: int, sizes: int) -> list[cp_model.IntVar]:
    return [model.new_bool_var(f"{index}_{size}") for size in range(sizes)]


def _chosen_size(solver: cp_model.CpSolver, literals: Sequence[cp_model.IntVar]) -> int | None:
    """The size whose literal is true; None if the job waits."""
    return next((size for size, x in enumerate(literals) if solver.boolean_value(x)), None)


def solve_fleet(
    model: cp_model.CpModel, params: FleetParams, share_s: float | None = None
) -> cp_model.CpSolver | None:
    """The solver after its work, or after `share_s` seconds; None where it came to no solution in that.

    Raises InfeasibleError where there is none.

    Parameters
    ----------
    model
        With an objective.
    params
        With the work and the seed of the solver.
    share_s
        Seconds of the clock; None where the work alone ends it.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = repeatable_solver(params.seed, work=params.deterministic_s)
    if share_s is not None:
        solver.parameters.max_time_in_seconds = max(share_s, 0.01)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(TOO_LARGE)
    return solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
