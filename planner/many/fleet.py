"""A fleet from its jobs file to its plans: price every job at every size, share out, place, write."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from meshwright.cluster_specs.allocation import allocated_gpus, node_name, only_nodes
from meshwright.cluster_specs.reader import is_mixed_cluster, read_cluster, read_mixed_cluster
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.documents import ClosedDocument, csv_text
from meshwright.errors import InputError, OutOfTimeError, check_choice
from meshwright.planner.drawing import Drawing, distinct_colour, ink_on, shortened, text_width
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.many.batch import (
    AS_SEARCHED,
    CLUSTER_SPEC,
    JOBS_PER_PROCESS,
    LIKELY,
    Task,
    local_engine,
)
from meshwright.planner.many.jobs import JobDoc
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
    changed_order,
    free_units,
    read_fleet,
    share_over_time,
    share_throughput,
    sized_job,
    solve_fleet,
)
from meshwright.planner.plan.assemble import cut_binding, predicted_use
from meshwright.planner.plan.document import Plan, with_digest
from meshwright.planner.plan.texts import priced_of
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.solvers.clock import current_end_s, is_over, limit_left_s, within
from meshwright.planner.solvers.processes import ProcessPool, usable_cores

# Leaves dealt out job by job: what CP-SAT starts from, and often all there is to find.
#
# Each job goes into the pod where it touches the fewest leaves, of equal ones into the fullest. In a pod it
# takes the fullest leaf that holds all of it, else the emptiest leaf and then the rest alike (best fit). The
# first orders are by size, by start and by what runs beside a job; then jobs of the best order are moved.


PerLeaf = dict[str, int]
"""Units of one job on each leaf that it touches."""


@dataclass(frozen=True, kw_only=True)
class LeafRoom:
    """The leaves to deal out."""

    capacity: Mapping[str, int]
    """Free units of each leaf."""
    pod_of: Mapping[str, str]

    @classmethod
    def of(cls, free: FreeUnits) -> LeafRoom:
        """The leaves of what is free."""
        capacity = {leaf: len(units) for leaf, units in free.by_leaf.items()}
        return cls(capacity=capacity, pod_of=free.pod_of)

    @property
    def pods(self) -> dict[str, list[str]]:
        """Leaves by pod."""
        by_pod = sorted(self.capacity, key=lambda leaf: self.pod_of[leaf])
        return {
            pod: list(leaves) for pod, leaves in groupby(by_pod, lambda leaf: self.pod_of[leaf])
        }

    def fewest_leaves(self, size: int) -> int:
        """Leaves that `size` units need at least.

        Parameters
        ----------
        size
            Units, from 0; more than are free touch all leaves.
        """
        return _fewest(size, self.capacity.values())

    def fewest_pods(self, size: int) -> int:
        """Pods that `size` units need at least.

        Parameters
        ----------
        size
            Units, from 0; more than are free touch all pods.
        """
        totals = [sum(self.capacity[leaf] for leaf in leaves) for leaves in self.pods.values()]
        return _fewest(size, totals)


def _fewest(size: int, capacities: Iterable[int]) -> int:
    """How many of the largest hold so many units."""
    if not size:
        return 0
    totals = list(accumulate(sorted(capacities, reverse=True)))
    return next((count for count, total in enumerate(totals, 1) if total >= size), len(totals))


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """The best deal found."""

    per_leaf: tuple[PerLeaf, ...]
    cost: int
    """Leaves touched, and `pod_weight` for every pod touched."""


def deal_out(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    ground: LeafRoom,
    *,
    pod_weight: int,
    least: int,
    seed: int,
    most_deals: int,
) -> Dealt | None:
    """The best deal of many orders; None where jobs found no room in any.

    Parameters
    ----------
    wanted
        Units of each job.
    together
        Sets of jobs that run together.
    ground
        What is dealt out.
    pod_weight
        What a pod that a job touches counts, in leaves.
    least
        A lower bound on the cost: a deal that reaches it is the best.
    seed
        Of the changes of order.
    most_deals
        Jobs to be dealt over all orders: the work, which does not depend on the machine.
    """
    moments = [
        [time for time, running in enumerate(together) if job in running]
        for job in range(len(wanted))
    ]
    best: tuple[int, list[PerLeaf]] | None = None
    order: list[int] = []
    orders = _orders(wanted, moments, order, random.Random(seed))
    for _ in range(max(3, most_deals // max(1, len(wanted)))):
        tried = next(orders)
        per_leaf = _Deal(ground, len(together)).all_of(tried, wanted, moments)
        if per_leaf is not None:
            pods = sum(len({ground.pod_of[leaf] for leaf in row}) for row in per_leaf)
            cost = sum(map(len, per_leaf)) + pod_weight * pods
            if best is None or cost <= best[0]:
                best, order[:] = (cost, per_leaf), tried
        if (best is not None and best[0] == least) or is_over():
            break
    return None if best is None else Dealt(per_leaf=tuple(best[1]), cost=best[0])


def _orders(
    wanted: Sequence[int],
    moments: Sequence[Sequence[int]],
    best: Sequence[int],
    chance: random.Random,
) -> Iterator[list[int]]:
    """The first orders, then changes of the best so far."""
    jobs = [job for job, size in enumerate(wanted) if size]
    yield sorted(jobs, key=lambda job: -wanted[job])
    yield sorted(jobs, key=lambda job: (moments[job][0], -wanted[job]))
    yield sorted(jobs, key=lambda job: -wanted[job] * len(moments[job]))
    while True:
        yield changed_order(best or chance.sample(jobs, len(jobs)), chance)


class _Deal:
    """Free units of every leaf at every moment, while jobs take theirs."""

    def __init__(self, ground: LeafRoom, moments: int) -> None:
        self._pods = ground.pods
        self._free = {leaf: [units] * moments for leaf, units in ground.capacity.items()}

    def all_of(
        self, order: Sequence[int], wanted: Sequence[int], moments: Sequence[Sequence[int]]
    ) -> list[PerLeaf] | None:
        """Units of every job by leaf; None where one finds no room.

        Parameters
        ----------
        order
            Jobs by index, those of no units left out.
        wanted
            Units of each job.
        moments
            Of each job the sets of jobs, by index, that it runs in.
        """
        per_leaf: list[PerLeaf] = [{} for _ in wanted]
        for job in order:
            taken = self.taken(wanted[job], moments[job])
            if taken is None:
                return None
            per_leaf[job] = taken
            for leaf, units in taken.items():
                for moment in moments[job]:
                    self._free[leaf][moment] -= units
        return per_leaf

    def taken(self, size: int, moments: Sequence[int]) -> PerLeaf | None:
        """Units of each leaf for one more job that runs at these moments; None where they are not free.

        Parameters
        ----------
        size
            Units, from 1.
        moments
            At which they must be free, by index; at least one.
        """
        free = {
            leaf: min(units[moment] for moment in moments) for leaf, units in self._free.items()
        }
        room = {pod: sum(free[leaf] for leaf in leaves) for pod, leaves in self._pods.items()}
        fits = [
            _from_leaves(size, {leaf: free[leaf] for leaf in leaves})
            for pod, leaves in sorted(self._pods.items(), key=lambda item: room[item[0]])
            if room[pod] >= size
        ]
        if fits:
            return min(fits, key=len)
        taken: PerLeaf = {}
        for pod in sorted(room, key=lambda pod: -room[pod]):
            units = min(size, room[pod])
            taken |= _from_leaves(units, {leaf: free[leaf] for leaf in self._pods[pod]})
            size -= units
        return taken if not size else None


def _from_leaves(size: int, free: dict[str, int]) -> PerLeaf:
    """Units of each leaf for a job that fits into them."""
    taken: PerLeaf = {}
    while size:
        fits = [leaf for leaf, units in free.items() if units >= size]
        leaf = min(fits, key=free.__getitem__) if fits else max(free, key=free.__getitem__)
        taken[leaf] = min(size, free.pop(leaf))
        size -= taken[leaf]
    return taken


# Which nodes a job gets: leaves kept together. Sizes and times are fixed.
#
# Let n[j, l] be the units of job j on leaf l, and y[j, l], z[j, p] say whether it touches leaf l and pod p.
# Minimise the sum of y + `pod_weight` * z, with sum over l of n[j, l] the job's size, and n[j, l] summed over
# jobs that run together at most the units of l. Jobs that run together are looked at at every start: between
# two starts nothing new is taken.
#
# Leaves are dealt out job by job first, in many orders; where that touches more than every job needs by
# itself, CP-SAT goes on from the best of them.


@dataclass(frozen=True, kw_only=True)
class FleetPlaces:
    """Units of every job, by index, and how many leaves the jobs touch in all."""

    units: tuple[tuple[int, ...], ...]
    leaves_touched: int
    least_leaves: int
    """A lower bound on the leaves touched while the pods touched are least."""


def place_jobs(
    jobs: Sequence[SizedJob],
    allocations: Sequence[Allocation],
    free: FreeUnits,
    params: FleetParams,
) -> FleetPlaces:
    """Deals the units out.

    Parameters
    ----------
    jobs, allocations
        What runs, at which size, and when.
    free
        The units, with their leaves and pods.
    params
        Of the model and the solver.
    """
    wanted = [
        0 if allocation.size is None else job.sizes[allocation.size].units
        for job, allocation in zip(jobs, allocations, strict=True)
    ]
    per_leaf, bound = _units_per_leaf(wanted, _running_together(allocations, wanted), free, params)
    return FleetPlaces(
        units=_named_units(wanted, allocations, per_leaf, free.by_leaf),
        leaves_touched=sum(len(leaves) for leaves in per_leaf),
        least_leaves=bound,
    )


def _running_together(allocations: Sequence[Allocation], wanted: Sequence[int]) -> list[list[int]]:
    """The jobs that run together, at every start that is not inside a larger such set."""
    runs = [
        (index, allocation.start_s, inf if allocation.end_s is None else allocation.end_s)
        for index, allocation in enumerate(allocations)
        if wanted[index]
    ]
    sets: list[set[int]] = []
    for moment in sorted({start_s for _, start_s, _ in runs}):
        running = {index for index, start_s, end_s in runs if start_s <= moment < end_s}
        if not any(running <= larger for larger in sets):
            sets = [smaller for smaller in sets if not smaller <= running] + [running]
    return [sorted(running) for running in sets]


def _units_per_leaf(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    free: FreeUnits,
    params: FleetParams,
) -> tuple[list[PerLeaf], int]:
    """(units of every job on each leaf that it touches, a lower bound on the leaves touched in all)."""
    ground = LeafRoom.of(free)
    least_leaves = sum(ground.fewest_leaves(size) for size in wanted)
    least = least_leaves + params.pod_weight * sum(ground.fewest_pods(size) for size in wanted)
    dealt = deal_out(
        wanted, together, ground, pod_weight=params.pod_weight, least=least, seed=params.seed,
        most_deals=params.dealt_jobs,
    )  # fmt: skip
    if dealt is not None and dealt.cost == least:
        return list(dealt.per_leaf), least_leaves
    return _improved(wanted, together, ground, params, dealt=dealt, least_leaves=least_leaves)


def _improved(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    ground: LeafRoom,
    params: FleetParams,
    *,
    dealt: Dealt | None,
    least_leaves: int,
) -> tuple[list[PerLeaf], int]:
    """The same by CP-SAT, from a first deal on where there is one."""
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    capacity, pod_of = ground.capacity, ground.pod_of
    pods = list(dict.fromkeys(pod_of.values()))
    amounts: list[dict[str, cp_model.IntVar]] = []
    cost: list[cp_model.LinearExprT] = []
    for index, size in enumerate(wanted):
        row: dict[str, cp_model.IntVar] = {}
        amounts.append(row)
        if not size:
            continue
        in_pod = {pod: model.new_bool_var(f"pod{index}_{pod}") for pod in pods}
        touched: list[cp_model.IntVar] = []
        for leaf, units in capacity.items():
            limit = min(size, units)
            row[leaf] = model.new_int_var(0, limit, f"{index}_{leaf}")
            touches = model.new_bool_var(f"on{index}_{leaf}")
            if dealt is not None:
                units_before = dealt.per_leaf[index].get(leaf, 0)
                model.add_hint(row[leaf], units_before)
                model.add_hint(touches, units_before > 0)
            model.add(row[leaf] <= limit * touches)
            model.add_implication(touches, in_pod[pod_of[leaf]])
            touched.append(touches)
        model.add(sum(row.values()) == size)
        # What the relaxation does not see: a job needs as many leaves as the largest ones that hold it.
        model.add(sum(touched) >= ground.fewest_leaves(size))
        model.add(sum(in_pod.values()) >= ground.fewest_pods(size))
        cost += touched
        cost += [params.pod_weight * literal for literal in in_pod.values()]
    for running in together:
        for leaf, units in capacity.items():
            model.add(sum(amounts[index][leaf] for index in running) <= units)
    if dealt is not None:
        model.add(sum(cost) <= dealt.cost)
    model.minimize(sum(cost))
    solver = solve_fleet(model, params)
    if solver is None:
        if dealt is None:
            raise OutOfTimeError("no way to place the jobs was found in the time given")
        return list(dealt.per_leaf), least_leaves
    per_leaf = [
        {leaf: solver.value(units) for leaf, units in row.items() if solver.value(units)}
        for row in amounts
    ]
    unproven = round(solver.objective_value - solver.best_objective_bound)
    return per_leaf, max(sum(map(len, per_leaf)) - unproven, least_leaves)


def _named_units(
    wanted: Sequence[int],
    allocations: Sequence[Allocation],
    per_leaf: Sequence[dict[str, int]],
    by_leaf: dict[str, list[int]],
) -> tuple[tuple[int, ...], ...]:
    """Units by index: at its start a job takes the first that are free on its leaves."""
    units_of: list[tuple[int, ...]] = [()] * len(wanted)
    running: list[tuple[float, list[int]]] = []
    taken: Counter[int] = Counter()
    jobs = [index for index, size in enumerate(wanted) if size]
    for index in sorted(jobs, key=lambda index: (allocations[index].start_s, index)):
        start_s, end_s = allocations[index].start_s, allocations[index].end_s
        for _, units in [run for run in running if run[0] <= start_s]:
            taken.subtract(units)
        running = [run for run in running if run[0] > start_s]
        units = []
        for leaf, number in per_leaf[index].items():
            units += [unit for unit in by_leaf[leaf] if not taken[unit]][:number]
        taken.update(units)
        running.append((inf if end_s is None else end_s, units))
        units_of[index] = tuple(sorted(units))
    return tuple(units_of)


# Pictures of a fleet: which nodes each job has, and when it runs.


CELL, GAP, ROW = 14, 3, 26
LABEL_WIDTH, CHART_WIDTH = 190, 760
CHART_TOP = 44
UNITS_IN_A_ROW = 48
_SIZE, _TITLE_SIZE, _LATE, _FRAME = 11, 15, "#b3261e", "#8a8f98"
_CLOCKS = (("days", 86400.0, 3 * 86400.0), ("hours", 3600.0, 7200.0), ("s", 1.0, 0.0))
"""Name, seconds in one, and the seconds from which it is the unit of a chart."""

Document = Mapping[str, Any]


def nodes_svg(document: Document, parts: Sequence[FleetPart]) -> str:
    """Leaves as rows, units as squares in the colour of their job; idle ones are hollow.

    Parameters
    ----------
    document
        Of the fleet, as `fleet_document` makes it.
    parts
        Whose units were shared out. Where jobs follow each other on a unit, the first one colours it.
    """
    drawing = Drawing(LABEL_WIDTH + UNITS_IN_A_ROW * (CELL + GAP) + 10)
    y = 40.0
    for part in parts:
        y = _leaves(drawing, document, part, y, has_parts=len(parts) > 1)
    y = _legend(drawing, document, y + 14)
    sizes = " or ".join(map(str, dict.fromkeys(part.free.gpus_per_unit for part in parts)))
    title = f"Which nodes each job has: {sizes} GPUs a square; leaves are rows"
    return _page(drawing, y + 10, title)


def _leaves(
    drawing: Drawing, document: Document, part: FleetPart, y: float, *, has_parts: bool
) -> float:
    """Draws the leaves of a part; returns where the next ones begin."""
    free, units = part.free, part.places.units
    job_of = {unit: job for job in reversed(range(len(units))) for unit in units[job]}
    has_pods = len(set(free.pod_of.values())) > 1
    for leaf, members in free.by_leaf.items():
        words = (part.name if has_parts else "", free.pod_of[leaf] if has_pods else "", leaf)
        _label(drawing, y + 11, " ".join(filter(None, words)))
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
    return y


def gantt_svg(document: Document) -> str:
    """A bar for each job that has a time, from its start to its end, with how many GPUs it has.

    Parameters
    ----------
    document
        Of the fleet, as `fleet_document` makes it.
    """
    drawing = Drawing(LABEL_WIDTH + CHART_WIDTH + 130)
    timed = (job for job in document["jobs"] if job["end_s"] is not None)
    jobs = sorted(timed, key=lambda job: (job["start_s"], job["name"]))
    colours = {job["name"]: distinct_colour(k) for k, job in enumerate(document["jobs"])}
    end_s = max((job["end_s"] for job in jobs), default=0.0) or 1.0
    unit, unit_s = next((name, size_s) for name, size_s, from_s in _CLOCKS if end_s > from_s)
    clock = _Clock(unit, unit_s, end_s)
    bottom = CHART_TOP + ROW * len(jobs)
    # A round step that cuts a span into 4 to 10.
    span = clock.shown(end_s)
    step = 1.0
    while span / step > 10:
        step *= 10
    while span / step < 4:
        step /= 2 if span / step >= 2 else 10
    for tick in range(int(clock.shown(end_s) / step) + 1):
        x = clock.across(tick * step * clock.unit_s)
        drawing.path([(x, CHART_TOP - 4), (x, bottom)], stroke="#d5d8dd")
        drawing.text(x, CHART_TOP - 8, f"{tick * step:g}", size=_SIZE, anchor="middle")
    for row, job in enumerate(jobs):
        _bar(drawing, job, CHART_TOP + row * ROW, colours[job["name"]], clock)
    gpus = sum(part["units"] * part["gpus_per_unit"] for part in document["parts"])
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
NOT_PLANNED_THERE = (
    "has no plan on its nodes yet; figures are those of as many that are joined best"
)
"""Of a job that time was too short for."""
Progress = Callable[[int, int], None]
"""Hears (sizes planned, sizes in all)."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How a fleet is shared out."""

    cluster: str
    """Catalog name or cluster file; of a mixed one each job gets one part."""
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
class FleetPart:
    """What is shared out of a cluster, or of one part of a mixed one."""

    name: str
    """Of the part; empty where the cluster has none."""
    cluster: ClusterSpec
    address: str
    """What plans call the cluster, or the part."""
    free: FreeUnits
    places: FleetPlaces = FleetPlaces(units=(), leaves_touched=0, least_leaves=0)
    """Of each job the units here."""

    @property
    def is_flat(self) -> bool:
        """Whether all units are alike to a job: neither nodes nor levels of the network are named."""
        return not self.cluster.nodes and not self.cluster.levels

    @property
    def states_background(self) -> bool:
        """Whether the file says what others use of the links of listed nodes, so that their names count."""
        levels = self.cluster.levels
        stated = self.cluster.blocks or any(level.background is not None for level in levels)
        return bool(self.cluster.nodes and stated)

    def together(self, units: int) -> list[Unit]:
        """So many units, on as few pods and leaves as a job needs that has all of them to itself.

        Parameters
        ----------
        units
            From 1 to all that are free.
        """
        free = self.free
        if self.is_flat or units == len(free.units):
            return list(free.units[:units])
        by_leaf = free.by_leaf
        taken = _Deal(LeafRoom.of(free), 1).taken(units, [0]) or {}
        return [free.units[unit] for leaf, count in taken.items() for unit in by_leaf[leaf][:count]]

    def nodes_of(self, units: Iterable[Unit]) -> tuple[NodeSpec, ...]:
        """The nodes of some units: of equal leaves and pods in equal order, whatever these are called.

        Parameters
        ----------
        units
            Free ones of this part.
        """
        per_leaf = Counter((unit.pod, unit.leaf) for unit in units)
        per_pod: dict[str, list[int]] = {}
        for (pod, _), count in per_leaf.items():
            per_pod.setdefault(pod, []).append(-count)

        def shape(unit: Unit) -> tuple[list[int], str, int, str]:
            leaf = (unit.pod, unit.leaf)
            return sorted(per_pod[unit.pod]), unit.pod, -per_leaf[leaf], unit.leaf

        listed = {node.name: node for node in self.cluster.nodes}
        hang_on_leaves = self.cluster.levels or any(node.leaf for node in self.cluster.nodes)
        nodes = []
        for unit in sorted(units, key=shape):
            place = {"leaf": unit.leaf, "pod": unit.pod} if hang_on_leaves else {}
            for name in unit.nodes:
                node = listed.get(name) or NodeSpec(name=name)
                nodes.append(node.model_copy(update=place))
        return tuple(nodes)

    def cluster_of(self, nodes: Sequence[NodeSpec]) -> ClusterSpec:
        """The cluster with these nodes alone; the others stay in the list where their links count.

        Parameters
        ----------
        nodes
            As `nodes_of` has them.
        """
        if self.states_background:
            return only_nodes(self.cluster, [node.name for node in nodes])
        gpus = len(nodes) * self.cluster.gpus_per_node
        fields = {"nodes": tuple(nodes), "gpus": gpus, "elastic": False}
        return self.cluster.model_copy(update=fields)


class FleetPartRow(ClosedDocument):
    """A part in `fleet --json`, or the cluster where it has none."""

    name: str
    gpus_per_unit: int
    units: int
    units_used: int


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Which job got what."""

    parts: tuple[FleetPart, ...]
    """Of a mixed cluster; else the cluster alone."""
    objective: str
    jobs: tuple[SizedJob, ...]
    without_plan: tuple[UnplannedJob, ...]
    """Jobs that the others were shared out without."""
    solution: FleetSolution
    """Of the sizes; with the times that jobs take on the nodes that they got."""
    placed: tuple[Mapping[str, Any] | None, ...]
    """Of each job the row and the files of its plan on its nodes; None where it has none."""
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

    @property
    def placed_value(self) -> float | None:
        """The objective by the plans on the nodes that jobs got; None where one of these is missing."""
        allocations = self.solution.allocations
        sizes = [allocation.size for allocation in allocations]
        if any(
            size is not None and result is None
            for size, result in zip(sizes, self.placed, strict=True)
        ):
            return None
        if self.objective != "throughput":
            return max((allocation.end_s or 0.0 for allocation in allocations), default=0.0)
        return sum(
            job.job.weight * float(result["row"]["tokens_per_s"]) / job.best_tokens_per_s
            for job, result in zip(self.jobs, self.placed, strict=True)
            if result is not None
        )

    def outcome(self, index: int) -> tuple[JobSize | None, Allocation, FleetPart, list[Unit]]:
        """(size, time, part, units) of a job; no size and no units if it waits.

        Parameters
        ----------
        index
            Of a job that has a plan, in `jobs`.
        """
        allocation = self.solution.allocations[index]
        size = None
        if allocation.size is not None:
            size = self.jobs[index].sizes[allocation.size]
        part = self.parts[0 if size is None else size.part]
        return size, allocation, part, [part.free.units[unit] for unit in part.places.units[index]]


class FleetJobRow(ClosedDocument):
    """What a job gets, in `fleet --json` and fleet.csv."""

    name: str
    model: str
    status: str
    """`runs`, `waits`, or `scheduled` where it has a time; without a plan at any size `infeasible`,
    `failed`, or `unknown` where the time limit came first."""
    part: str | None = None
    """Of a mixed cluster; null elsewhere."""
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
    with within(options.time_limit_s), ProcessPool(_processes(options), JOBS_PER_PROCESS) as pool:
        return _run(path, options, progress, pool)


def _processes(options: FleetOptions) -> int:
    return options.workers or usable_cores()


def _run(path: Path, options: FleetOptions, progress: Progress, pool: ProcessPool) -> Fleet:
    check_choice(options.objective, OBJECTIVES, "--objective", "unknown objective")
    parts = _parts(options)
    jobs = read_fleet(path, options.cluster, options.calibration, vars(Budget.of(vars(options))))
    if options.objective != "throughput":
        _require_tokens(jobs, path, options.objective)
    began = time.monotonic()
    plans = _Plans(parts, options, progress, pool)
    answered, unplanned = _sized_jobs(jobs, plans)
    sized_jobs = [job for job in answered if isinstance(job, SizedJob)]
    without_plan = [job for job in answered if isinstance(job, UnplannedJob)]
    late = next((job for job in without_plan if job.status == "unknown"), None)
    if late is not None and not sized_jobs:
        raise OutOfTimeError(f"{late.job.name}: {late.reason}")
    priced = time.monotonic()
    params = FleetParams(seed=options.seed)
    units = [len(part.free.units) for part in parts]
    solution = _shared(sized_jobs, units, options.objective, params)
    shared = Fleet(
        parts=tuple(
            replace(part, places=place_jobs(sized_jobs, here, part.free, params))
            for part, here in zip(parts, _by_part(sized_jobs, solution, len(parts)), strict=True)
        ),
        objective=options.objective,
        jobs=tuple(sized_jobs),
        without_plan=tuple(without_plan),
        solution=solution,
        placed=(None,) * len(sized_jobs),
        planned=plans.asked,
        unplanned=unplanned,
        planning_s=priced - began,
        solving_s=time.monotonic() - priced,
    )
    return _on_its_nodes(shared, plans)


def _on_its_nodes(fleet: Fleet, plans: _Plans) -> Fleet:
    """The same fleet with every job that runs planned on the nodes that it got."""
    began = time.monotonic()
    keys: list[str | None] = []
    like: dict[str, list[str]] = {}
    for index, job in enumerate(fleet.jobs):
        size, _, _, units = fleet.outcome(index)
        key = None if size is None else plans.key(job.job, size.part, units)
        keys.append(key)
        if key is not None and size is not None:
            like[key] = [plans.key_of_size(job.job, size.part, size.units)]
    answers = plans.in_full(like)
    results = [answers.get(key or "") for key in keys]
    placed = tuple(each if each and each["row"].get("tokens_per_s") else None for each in results)
    return replace(
        fleet,
        placed=placed,
        solution=replace(fleet.solution, allocations=tuple(_times(fleet, placed))),
        planned=plans.asked,
        planning_s=fleet.planning_s + time.monotonic() - began,
    )


def _times(fleet: Fleet, placed: Sequence[Mapping[str, Any] | None]) -> list[Allocation]:
    """The schedule by the plans on the nodes that jobs got: none starts before its nodes are free."""
    allocations = list(fleet.solution.allocations)
    free_from_s: dict[tuple[str, ...], float] = {}
    for index in sorted(range(len(allocations)), key=lambda index: allocations[index].start_s):
        allocation, job, result = allocations[index], fleet.jobs[index], placed[index]
        if allocation.size is None or allocation.end_s is None:
            continue
        train_s = job.train_s(allocation.size)
        if result is not None:
            train_s *= job.sizes[allocation.size].tokens_per_s / result["row"]["tokens_per_s"]
        units = [unit.nodes for unit in fleet.outcome(index)[3]]
        start_s = max([allocation.start_s, *(free_from_s.get(nodes, 0.0) for nodes in units)])
        free_from_s |= dict.fromkeys(units, start_s + train_s)
        allocations[index] = replace(allocation, start_s=start_s, end_s=start_s + train_s)
    return allocations


def _parts(options: FleetOptions) -> list[FleetPart]:
    """What there is to share out. Raises InputError."""
    file, busy = options.cluster, frozenset(options.busy)
    if not is_mixed_cluster(file):
        cluster = read_cluster(file, options.gpus)
        free = free_units(cluster, allocated_gpus(cluster, options.gpus), busy)
        return [FleetPart(name="", cluster=cluster, address=file, free=free)]
    mixed = read_mixed_cluster(file)
    if options.gpus is not None:
        what = "a mixed cluster's own file says how many GPUs each part has"
        raise InputError(what, where="--gpus", value=options.gpus)
    for name in busy:
        check_choice(name, mixed.free_by_name, "--busy", "no part lists this node")
    clusters = {name: mixed.part(name) for name in mixed.names}
    return [
        FleetPart(
            name=name,
            cluster=cluster,
            address=f"{file}#{name}",
            free=free_units(cluster, cluster.gpus, busy & {node.name for node in cluster.nodes}),
        )
        for name, cluster in clusters.items()
    ]


def _by_part(
    jobs: Sequence[SizedJob], solution: FleetSolution, parts: int
) -> list[list[Allocation]]:
    """Of each part every job's allocation, without a size where that is on another part."""
    return [
        [
            allocation
            if allocation.size is None or job.sizes[allocation.size].part == part
            else replace(allocation, size=None)
            for job, allocation in zip(jobs, solution.allocations, strict=True)
        ]
        for part in range(parts)
    ]


def _shared(
    jobs: Sequence[SizedJob], units: Sequence[int], objective: str, params: FleetParams
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


class _Plans:
    """Plans of jobs on units of a cluster, each question asked once.

    Units that hang on as many leaves and pods, as many on each, are one question, whatever they are called.
    """

    def __init__(
        self,
        parts: Sequence[FleetPart],
        options: FleetOptions,
        progress: Progress,
        pool: ProcessPool,
    ) -> None:
        self.parts, self._pool = parts, pool
        self.results: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, dict[str, Any]] = {}
        self._alone: dict[tuple[int, int], tuple[Sequence[NodeSpec], str]] = {}
        self._progress = progress
        self._workers = _processes(options)
        self._cache = str(options.cache.absolute()) if options.cache else None

    @property
    def asked(self) -> int:
        """Plans that were to be made."""
        return len(self._tasks)

    @property
    def unanswered(self) -> int:
        """Of these, how many are neither found nor proven not to exist."""
        return self.asked - sum(_is_answered(result) for result in self.results.values())

    def key_of_size(self, job: FleetJobDoc, part: int, units: int) -> str:
        """The name of a question: what a job makes of so many units, where it is alone on the cluster.

        Parameters
        ----------
        job
            Whose plan is asked for.
        part
            By index.
        units
            From 1 to all that are free in the part.
        """
        if (part, units) not in self._alone:
            self._alone[part, units] = self._shape(part, self.parts[part].together(units))
        return self._key(job, part, units, *self._alone[part, units])

    def key(self, job: FleetJobDoc, part: int, units: Sequence[Unit]) -> str:
        """The name of a question: what a job makes of these units.

        Parameters
        ----------
        job
            Whose plan is asked for.
        part
            By index.
        units
            Free ones of the part.
        """
        return self._key(job, part, len(units), *self._shape(part, units))

    def _shape(self, part: int, units: Sequence[Unit]) -> tuple[Sequence[NodeSpec], str]:
        """(the nodes of units, what is the same of others that are as good)."""
        each = self.parts[part]
        if each.is_flat:
            return (), ""
        nodes = each.nodes_of(units)
        number_of: dict[str, int] = {}
        blocks = [
            (*(number_of.setdefault(str(name), len(number_of)) for name in place), rate)
            for *place, rate in (
                (node.pod, (node.pod, node.leaf), node.nic_gbps_per_gpu) for node in nodes
            )
        ]
        alike = [(*block, len(list(group))) for block, group in groupby(blocks)]
        names = [node.name for node in nodes] if each.states_background else []
        return nodes, json.dumps([alike, names])

    def _key(
        self, job: FleetJobDoc, part: int, units: int, nodes: Sequence[NodeSpec], shape: str
    ) -> str:
        each = self.parts[part]
        named = JobDoc.model_fields.keys() - {"name", *COST_FIELDS}
        fields = {
            **{name: getattr(job, name) for name in JobDoc.model_fields if name in named},
            "cluster": each.address,
            "gpus": units * each.free.gpus_per_unit,
            "name": "size",
        }
        key = json.dumps([fields, shape], sort_keys=True, default=str)
        if key not in self._tasks:
            task = JobDoc(**fields).model_dump(mode="json")
            self._tasks[key] = {**task, **({CLUSTER_SPEC: each.cluster_of(nodes)} if nodes else {})}
        return key

    def make(self, like: Mapping[str, Sequence[str]], reserve_s: float) -> None:
        """Answers questions in this order, as far as time allows when so many seconds of it are kept.

        `like` has for each question those whose answers are likely much the same, the likeliest first: of
        those that were answered before this call the layouts are where the search begins.

        Parameters
        ----------
        like
            By question, in the order in which they are answered.
        reserve_s
            Seconds of the time limit that are kept for what follows.
        """
        tasks = {
            key: {**self._tasks[key], LIKELY: self._ran(others), AS_SEARCHED: True}
            for key, others in like.items()
            if key not in self.results
        }
        for key, result in self._answers(tasks, reserve_s):
            self.results[key] = result

    def in_full(self, like: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """Answers to questions with the mapping that sends least; where time is short, the earlier answer.

        Parameters
        ----------
        like
            As `make` has it.
        """
        tasks = {
            key: {**self._tasks[key], LIKELY: self._ran(others)} for key, others in like.items()
        }
        answers = {key: result for key, result in self._answers(tasks, 0.0) if _is_answered(result)}
        return {
            key: answers.get(key) or self.results[key]
            for key in like
            if key in answers or key in self.results
        }

    def _ran(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """How plans run that answered some questions."""
        results = (self.results.get(key) for key in keys)
        return [result["ran"] for result in results if result is not None and result["ran"]]

    def _answers(
        self, tasks: Mapping[str, Mapping[str, Any]], reserve_s: float
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if not tasks:
            return
        keys, end_s = list(tasks), current_end_s() - reserve_s
        engine = local_engine(self._workers, self._cache, end_s, self._pool)
        done = set(self.results)
        for position, result in engine(_in_time(enumerate(tasks.values()), reserve_s)):
            done.add(keys[position])
            yield keys[position], result
            self._progress(len(done), len(self._tasks))


def _sized_jobs(
    jobs: Sequence[FleetJobDoc], plans: _Plans
) -> tuple[list[SizedJob | UnplannedJob], int]:
    """(every job with its plans, or why it has none; sizes left out for want of time)."""
    questions = [
        [
            (part, units, plans.key_of_size(job, part, units))
            for part, each in enumerate(plans.parts)
            for units in candidate_units(job, each.free.gpus_per_unit, len(each.free.units))
        ]
        for job in jobs
    ]
    given_s = limit_left_s()
    for like in _one_of_each(questions):
        plans.make(like, 0.0 if given_s is None else SHARING_SHARE * given_s)
    results = plans.results
    sized_jobs = []
    for job, row in zip(jobs, questions, strict=True):
        answers = [(part, units, results[key]) for part, units, key in row if key in results]
        sized_jobs.append(sized_job(job, answers, len(row)))
    return sized_jobs, plans.unanswered


def _one_of_each(
    questions: Sequence[Sequence[tuple[int, int, str]]],
) -> Iterator[dict[str, list[str]]]:
    """Names of the questions, each job's smallest size first, then each one's next; beside each those of its
    smaller sizes on the same part: the largest that divides it, and the largest.
    """
    rows = [sorted(row, key=itemgetter(1)) for row in questions]
    for turn in range(max(map(len, rows), default=0)):
        like: dict[str, list[str]] = {}
        for row in rows:
            if turn < len(row):
                part, units, name = row[turn]
                smaller = [each for each in row[:turn] if each[0] == part and each[1] < units]
                parted = [each for each in smaller if units % each[1] == 0]
                names = [each[2] for each in (*parted[-1:], *smaller[-1:])]
                like.setdefault(name, list(dict.fromkeys(names)))
        yield like


def _in_time(tasks: Iterable[Task], reserve_s: float) -> Iterator[Task]:
    """The tasks in this order, while planning has time; two at once wait for each process."""
    for position, fields in tasks:
        remaining_s = limit_left_s()
        if remaining_s is None:
            yield position, fields
            continue
        if remaining_s <= reserve_s:
            return
        yield position, {**fields, "time_limit": (remaining_s - reserve_s) / 2}


def _is_answered(result: Mapping[str, Any]) -> bool:
    """Whether a plan was found, or proven not to exist."""
    return bool(result["row"]["status"] != "unknown")


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """What `fleet --json` prints, without `schema`.

    Parameters
    ----------
    fleet
        With plans on the nodes that jobs got, as far as time allowed.
    """
    solution, places = fleet.solution, [part.places for part in fleet.parts]
    parts = [_part_row(part) for part in fleet.parts]
    per_unit = {part["gpus_per_unit"] for part in parts}
    complete = not fleet.unplanned and not fleet.unproven
    return {
        "objective": {
            "name": fleet.objective,
            "value": solution.value,
            "bound": solution.bound if complete else None,
            "gap": solution.gap if complete else None,
            "status": "optimal" if complete and solution.proven else "feasible",
            "on_nodes": fleet.placed_value,
        },
        "sizes_left_out": fleet.unplanned,
        "sizes_not_proven": fleet.unproven,
        "gpus_per_unit": per_unit.pop() if len(per_unit) == 1 else None,
        "units": sum(part["units"] for part in parts),
        "units_used": sum(part["units_used"] for part in parts),
        "parts": parts,
        "leaves_touched": sum(each.leaves_touched for each in places),
        "least_leaves_touched": sum(each.least_leaves for each in places),
        "jobs": [
            *(_job_row(fleet, index) for index in range(len(fleet.jobs))),
            *(_unplanned_row(job) for job in fleet.without_plan),
        ],
    }


def _part_row(part: FleetPart) -> dict[str, Any]:
    return FleetPartRow(
        name=part.name or part.cluster.name,
        gpus_per_unit=part.free.gpus_per_unit,
        units=len(part.free.units),
        units_used=len({unit for units in part.places.units for unit in units}),
    ).model_dump()


def _job_row(fleet: Fleet, index: int) -> dict[str, Any]:
    job = fleet.jobs[index]
    size, allocation, part, units = fleet.outcome(index)
    fields: dict[str, Any] = {
        "name": job.job.name,
        "model": job.job.model,
        "status": "waits",
        "leaves": sorted({unit.leaf for unit in units}),
        "nodes": [name for unit in units for name in unit.nodes],
    }
    if size is not None:
        placed = fleet.placed[index]
        row = (placed or size.result)["row"]
        fields |= {
            "status": "runs",
            "part": part.name or None,
            "gpus": size.units * part.free.gpus_per_unit,
            "tokens_per_s": row["tokens_per_s"],
            "share_of_best": row["tokens_per_s"] / job.best_tokens_per_s,
            "step_time_s": row.get("step_time_s"),
            "reason": "" if placed else NOT_PLANNED_THERE,
            **{name: row.get(name) for name in ("mfu", "optimizer_offload", "host_memory_gib")},
        }
        cost = cost_figures(Budget.of(vars(job.job)), fields, part.cluster)
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
    """Texts by name: the answer, its pictures, and the plan and launch files of every job that runs.

    Parameters
    ----------
    fleet
        As `run_fleet` returns it.
    """
    document = fleet_document(fleet)
    files = {
        "fleet.json": json.dumps({"schema": 1, **document}, indent=1) + "\n",
        "fleet.csv": csv_text(list(FleetJobRow.model_fields), document["jobs"]),
        "nodes.svg": nodes_svg(document, fleet.parts),
    }
    if fleet.objective != "throughput":
        files["gantt.svg"] = gantt_svg(document)
    for index, (job, result) in enumerate(zip(fleet.jobs, fleet.placed, strict=True)):
        if result is not None:
            _, _, part, units = fleet.outcome(index)
            plan = _plan_on_units(part, result["files"], units)
            for name, text in plan_files(plan).items():
                files[f"plans/{job.job.name}/{name}"] = text
    return files


def _plan_on_units(part: FleetPart, files: Mapping[str, str], units: Sequence[Unit]) -> Plan:
    """A plan on units of this shape, on those that the job got."""
    plan = Plan.model_validate(yaml.safe_load(files["plan.yaml"]))
    if part.states_background:
        return plan
    nodes = part.nodes_of(units)
    planned = plan.inputs.cluster
    name_of = {node_name(planned, index): node.name for index, node in enumerate(nodes)}
    cluster = part.cluster_of(nodes)
    if planned.nodes:
        # A plan may leave nodes of slower adapters or links alone.
        free_of_name = {name_of[node.name]: node.free_gpus for node in planned.nodes}
        own = (
            node.model_copy(update={"free_gpus": free_of_name[node.name]}) for node in cluster.nodes
        )
        cluster = cluster.model_copy(update={"nodes": tuple(own), "gpus": planned.gpus})
    inputs = plan.inputs.model_copy(update={"cluster": cluster})
    plan = plan.model_copy(update={"inputs": inputs})
    if plan.idle is not None:
        names = [name_of[name] for name in plan.idle.nodes]
        plan = plan.model_copy(update={"idle": plan.idle.model_copy(update={"nodes": names})})
    if plan.mapping is not None and plan.layout is not None:
        # What holds it back names a node or a leaf.
        priced = priced_of(plan)
        execution = priced.execution.of_layout(priced.layout)
        request = PlanRequest.of_inputs(inputs)
        workload = execution.applied(request.workload().on(int(priced.layout.gpus)))
        cut = cut_binding(predicted_use(workload, priced)[1])
        elsewhere = [each for each in plan.binding if each.rule != "bisection"]
        plan = plan.model_copy(update={"binding": [*elsewhere, *cut]})
    return with_digest(plan)
