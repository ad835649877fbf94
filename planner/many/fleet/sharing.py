"""Which job gets how much, and when: CP-SAT over the sizes of every job.

Let x[j, k] say that job j gets its k-th size: u[j, k] units, on which it trains r[j, k] tokens/s; U units are
free. Every job gets one size, or none if it may wait.

Throughput: maximise sum of weight[j] * r[j, k] / max r[j] * x[j, k] with sum of u[j, k] * x[j, k] <= U.

Schedules (makespan, deadlines): job j runs once, for tokens[j] / r[j, k]; at no time do the running jobs
exceed U. The last end is least; with deadlines the weighted time past them first.

Priorities are lexicographic: the value of a class is fixed before the next one is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshwright.errors import InfeasibleError, OutOfTimeError
from meshwright.planner.many.fleet.sizes import SizedJob
from meshwright.planner.solvers.clock import Shares, limit_left_s
from meshwright.planner.solvers.cp_sat import interruptible_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

OBJECTIVES = ("throughput", "makespan", "deadlines")


@dataclass(frozen=True, kw_only=True)
class FleetParams:
    """How the models of a fleet are stated and solved."""

    deterministic_s: float = 15.0
    """CP-SAT's own measure of work for each goal, not seconds of a clock: a slow machine finds the same."""
    seed: int = 0
    workers: int = 8
    """Search strategies that take turns; not threads, so that the answer is the same on any machine."""
    value_scale: int = 1_000_000
    """Integer steps of a job's best throughput in the objective: finer than any figure that is printed."""
    ticks: int = 20_000
    """Steps of time up to the horizon; durations are rounded up to them, 0.005 % of it."""
    lateness_scale: int = 100
    """Integer steps of a weight in the lateness."""
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
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    chosen = [_size_literals(model, index, job) for index, job in enumerate(jobs)]
    for job, row in zip(jobs, chosen, strict=True):
        model.add_at_most_one(row) if job.job.may_wait else model.add_exactly_one(row)
    literals = [literal for row in chosen for literal in row]
    sizes = [size.units for job in jobs for size in job.sizes]
    model.add(cp_model.LinearExpr.weighted_sum(literals, sizes) <= units)
    total = bound = 0.0
    proven = True
    solver = None
    priorities = sorted({job.job.priority for job in jobs}, reverse=True)
    shares = Shares(len(priorities) + 1)
    for priority in priorities:
        terms, values = [], []
        for job, row in zip(jobs, chosen, strict=True):
            if job.job.priority == priority:
                terms += row
                values += [scaled_value(job, size, params) for size in range(len(row))]
        goal = cp_model.LinearExpr.weighted_sum(terms, values)
        model.maximize(goal)
        _hint(model, solver, literals)
        solver = solve_fleet(model, params, shares.next_s())
        total += solver.objective_value / params.value_scale
        bound += solver.best_objective_bound / params.value_scale
        proven = proven and solver.objective_value >= solver.best_objective_bound
        model.add(goal >= round(solver.objective_value))
    assert solver is not None
    allocations = tuple(Allocation(size=_chosen_size(solver, row)) for row in chosen)
    return FleetSolution(allocations=allocations, value=total, bound=bound, proven=proven)


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
    schedule = _Schedule(jobs, units, params)
    goals = schedule.lateness_goals() if objective == "deadlines" else []
    solver, proven, bound = None, True, 0.0
    # One share is kept for placing.
    shares = Shares(len(goals) + 2)
    for goal in [*goals, schedule.makespan]:
        schedule.model.minimize(goal)
        _hint(schedule.model, solver, schedule.hinted)
        solver = solve_fleet(schedule.model, params, shares.next_s())
        proven = proven and solver.objective_value <= solver.best_objective_bound
        bound = solver.best_objective_bound
        if goal is not schedule.makespan:
            schedule.model.add(goal <= round(solver.objective_value))
    assert solver is not None
    return FleetSolution(
        allocations=schedule.allocations(solver),
        value=solver.value(schedule.makespan) * schedule.tick_s,
        bound=bound * schedule.tick_s,
        proven=proven,
    )


class _Schedule:
    """The model of jobs over time: a start, an end and one size for each."""

    def __init__(self, jobs: Sequence[SizedJob], units: int, params: FleetParams) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self._jobs, self._params = jobs, params
        self.tick_s, self._ticks = durations(jobs, params)
        self._horizon = sum(max(row) for row in self._ticks)
        self.model = model = cp_model.CpModel()
        indices = range(len(jobs))
        self._starts = [model.new_int_var(0, self._horizon, f"start{index}") for index in indices]
        self._ends = [model.new_int_var(0, self._horizon, f"end{index}") for index in indices]
        self._chosen = [_size_literals(model, index, job) for index, job in enumerate(jobs)]
        self.makespan = self._post_capacity(units)

    @property
    def hinted(self) -> list[cp_model.IntVar]:
        """The variables whose values carry over from goal to goal."""
        return [*(literal for row in self._chosen for literal in row), *self._starts]

    def _post_capacity(self, units: int) -> cp_model.IntVar:
        """At no time do the running jobs exceed the units; returns the last end."""
        model = self.model
        intervals, demands, areas = [], [], []
        for index, row in enumerate(self._chosen):
            model.add_exactly_one(row)
            start, end = self._starts[index], self._ends[index]
            for size, literal in enumerate(row):
                ticks, demand = self._ticks[index][size], self._jobs[index].sizes[size].units
                name = f"run{index}_{size}"
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
        for priority in sorted({job.job.priority for job in self._jobs}, reverse=True):
            terms: list[cp_model.LinearExprT] = []
            for index, job in enumerate(self._jobs):
                if job.job.priority != priority or job.job.deadline_h is None:
                    continue
                due = min(int(job.job.deadline_h * 3600 / self.tick_s), self._horizon)
                late = self.model.new_int_var(0, self._horizon, f"late{index}")
                self.model.add(late >= self._ends[index] - due)
                terms.append(late * max(1, round(self._params.lateness_scale * job.job.weight)))
            if terms:
                goals.append(sum(terms))
        return goals

    def allocations(self, solver: cp_model.CpSolver) -> tuple[Allocation, ...]:
        """What the solver gives each job."""
        return tuple(
            Allocation(
                size=_chosen_size(solver, row),
                start_s=solver.value(start) * self.tick_s,
                end_s=solver.value(end) * self.tick_s,
            )
            for row, start, end in zip(self._chosen, self._starts, self._ends, strict=True)
        )


def _size_literals(model: cp_model.CpModel, index: int, job: SizedJob) -> list[cp_model.IntVar]:
    return [model.new_bool_var(f"{index}_{size}") for size in range(len(job.sizes))]


def _chosen_size(solver: cp_model.CpSolver, literals: Sequence[cp_model.IntVar]) -> int | None:
    """The size whose literal is true; None if the job waits."""
    return next((size for size, x in enumerate(literals) if solver.boolean_value(x)), None)


def _hint(
    model: cp_model.CpModel, solver: cp_model.CpSolver | None, variables: Sequence[cp_model.IntVar]
) -> None:
    """The answer to the last goal is where the next one starts."""
    if solver is None:
        return
    model.clear_hints()  # type: ignore[no-untyped-call]
    for variable in variables:
        model.add_hint(variable, solver.value(variable))


def solve_fleet(
    model: cp_model.CpModel, params: FleetParams, share_s: float | None = None
) -> cp_model.CpSolver:
    """The solver after its work, or after `share_s` seconds. Raises InfeasibleError without a solution,
    OutOfTimeError where none was found in time.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = interruptible_solver()
    solver.parameters.random_seed = params.seed
    solver.parameters.num_workers = params.workers
    solver.parameters.interleave_search = True
    solver.parameters.max_deterministic_time = params.deterministic_s
    limit_s = limit_left_s() if share_s is None else share_s
    if limit_s is not None:
        solver.parameters.max_time_in_seconds = max(limit_s, 0.01)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(
            "the jobs that must run do not fit the cluster together, even at their smallest sizes"
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise OutOfTimeError(
            f"no way to share the cluster was found in the time given ({solver.status_name(status)})"
        )
    return solver
