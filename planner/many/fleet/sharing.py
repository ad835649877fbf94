"""Which job gets how much, and when.

Let x[j, k] say that job j gets its k-th size: u[j, k] units, on which it trains r[j, k] tokens/s; U units are
free. Every job gets one size, or none if it may wait.

Throughput: maximise sum of weight[j] * r[j, k] / max r[j] * x[j, k] with sum of u[j, k] * x[j, k] <= U. A
multiple-choice knapsack: exact by dynamic programming over the units in use.

Schedules (makespan, deadlines): job j runs once, for tokens[j] / r[j, k]; at no time do the running jobs
exceed U. The last end is least; with deadlines the weighted time past them first. List schedules, and CP-SAT
for what they leave open.

Priorities are lexicographic: the value of a class is fixed before the next one is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InfeasibleError
from meshwright.planner.many.fleet.list_schedule import (
    ListSchedule,
    TimedJob,
    TimedRun,
    Values,
    due_priorities,
    list_schedule,
    values_of,
)
from meshwright.planner.many.fleet.sizes import SizedJob
from meshwright.planner.solvers.clock import Shares
from meshwright.planner.solvers.cp_sat import repeatable_solver

IntArray = NDArray[np.int64]

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

TOO_LARGE = "the jobs that must run do not fit the cluster together, even at their smallest sizes"
UNREACHABLE = np.int64(-1)
"""Value of so many units in use where no choice of sizes uses them."""
WAITS = -1
OBJECTIVES = ("throughput", "makespan", "deadlines")


@dataclass(frozen=True, kw_only=True)
class FleetParams:
    """How the models of a fleet are stated and solved."""

    deterministic_s: float = 1.0
    """CP-SAT's own measure of work for each goal that list schedules leave open, not seconds of a clock: a
    slow machine finds the same. With 50 jobs one took 14 s of the processor.
    """
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
    """What every job gets. `value` and `bound` are of the objective: a sum, or seconds to minimise."""

    allocations: tuple[Allocation, ...]
    value: float
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Relative to the value."""
        return abs(self.bound - self.value) / abs(self.value) if self.value else 0.0


def share_throughput(jobs: Sequence[SizedJob], units: int, params: FleetParams) -> FleetSolution:
    """The sizes with the greatest weighted throughput.

    Parameters
    ----------
    jobs
        With the sizes that each can have.
    units
        That are free.
    params
        Of the model and the solver.

    Raises
    ------
    InfeasibleError
        Where not all jobs that must run fit together.
    """
    priorities = sorted({job.job.priority for job in jobs}, reverse=True)
    classes = [
        [index for index, job in enumerate(jobs) if job.job.priority == priority]
        for priority in priorities
    ]
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
            raise InfeasibleError(TOO_LARGE)
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
    """What a job contributes to the objective at one of its sizes, in steps of 1 / `value_scale`."""
    share = job.sizes[size].tokens_per_s / job.best_tokens_per_s
    return round(job.job.weight * share * params.value_scale)


def durations(jobs: Sequence[SizedJob], params: FleetParams) -> tuple[float, list[list[int]]]:
    """(seconds of a tick, ticks that each job needs at each of its sizes).

    Jobs one after the other at their fastest, or one alone at its slowest, take at most `params.ticks`.
    """
    times_s = [[job.train_s(size) for size in range(len(job.sizes))] for job in jobs]
    slowest_s = max(max(row) for row in times_s)
    in_turns_s = sum(min(row) for row in times_s)
    tick_s = max(slowest_s, in_turns_s) / params.ticks
    return tick_s, [[ceil(time_s / tick_s - 1e-9) for time_s in row] for row in times_s]


def share_over_time(
    jobs: Sequence[SizedJob], units: int, objective: str, params: FleetParams
) -> FleetSolution:
    """Sizes and start times: the least makespan, or the least weighted lateness and then makespan.

    Parameters
    ----------
    jobs
        With the sizes that each can have; all must have `tokens`.
    units
        That are free.
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
    if any(min(job.demands) > units for job in timed):
        raise InfeasibleError(TOO_LARGE)
    first = list_schedule(timed, units, seed=params.seed, most_runs=params.listed_runs)
    runs, values, bounds = first.runs, first.values, list(first.bounds)
    if values != first.bounds:
        runs, values, bounds = _improved(timed, units, first, params)
    allocations = (
        Allocation(size=run.size, start_s=run.start * tick_s, end_s=run.end * tick_s)
        for run in runs
    )
    return FleetSolution(
        allocations=tuple(allocations),
        value=values[-1] * tick_s,
        bound=bounds[-1] * tick_s,
        proven=list(values) == bounds,
    )


def timed_jobs(
    jobs: Sequence[SizedJob], params: FleetParams, *, with_due: bool
) -> tuple[float, list[TimedJob]]:
    """(seconds of a tick, what a schedule knows of each job), with its deadlines or without."""
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
                ticks=tuple(row),
                due=due,
                late_weight=max(1, round(params.lateness_scale * job.job.weight)),
                priority=job.job.priority,
            )
        )
    return tick_s, timed


def _improved(
    jobs: Sequence[TimedJob], units: int, first: ListSchedule, params: FleetParams
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

    def __init__(self, jobs: Sequence[TimedJob], units: int) -> None:
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

    def _post_capacity(self, units: int) -> cp_model.IntVar:
        """At no time do the running jobs exceed the units; returns the last end."""
        model = self.model
        intervals, demands, areas = [], [], []
        for index, row in enumerate(self._chosen):
            model.add_exactly_one(row)
            job, start, end = self._jobs[index], self._starts[index], self._ends[index]
            for size, (ticks, demand) in enumerate(zip(job.ticks, job.demands, strict=True)):
                literal, name = row[size], f"run{index}_{size}"
                intervals.append(model.new_optional_interval_var(start, ticks, end, literal, name))
                demands.append(demand)
                areas.append(literal * (demand * ticks))
        model.add_cumulative(intervals, demands, units)
        makespan = model.new_int_var(0, self._horizon, "makespan")
        model.add_max_equality(makespan, self._ends)
        # What an area bound knows and the cumulative does not.
        model.add(sum(areas) <= units * makespan)
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
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = repeatable_solver(params.seed, work=params.deterministic_s)
    if share_s is not None:
        solver.parameters.max_time_in_seconds = max(share_s, 0.01)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(TOO_LARGE)
    return solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
