"""Who gets how much, and when: CP-SAT over the sizes of every job.

Throughput: each job takes one size, or none if it may wait; sizes fit the cluster; the sum of
weight x tokens/s over the job's best tokens/s is greatest. Schedules (makespan, deadlines): each job runs
once, at one size, for tokens / (tokens/s); at no time do the running jobs exceed the cluster. Priorities
are lexicographic: the value of a class is fixed before the next one is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from meshwright.errors import InfeasibleError
from meshwright.planner.many.fleet.options import Choices

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

OBJECTIVES = ("throughput", "makespan", "deadlines")
VALUE_SCALE = 1_000_000
"""Steps of a job's best throughput in the objective."""
TICKS = 20_000
"""Steps of time up to the horizon; durations are rounded up to them."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one job gets."""

    option: int | None
    """Index into its choices; None if it waits."""
    start_s: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """An answer. `value` and `bound` are of the objective: a sum to maximise, or seconds to minimise."""

    shares: tuple[Share, ...]
    value: float
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Relative to the value."""
        return abs(self.bound - self.value) / abs(self.value) if self.value else 0.0


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long the solver may work; deterministic, so that a slow machine finds the same."""

    deterministic_s: float = 15.0
    wall_s: float | None = None
    seed: int = 0


def share_throughput(jobs: Sequence[Choices], units: int, effort: Effort) -> Sharing:
    """The sizes with the greatest weighted throughput. Raises InfeasibleError where the jobs do not fit."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = [
        [model.new_bool_var(f"{at}_{k}") for k in range(len(job.options))]
        for at, job in enumerate(jobs)
    ]
    for job, literals in zip(jobs, chosen, strict=True):
        model.add_at_most_one(literals) if job.job.may_wait else model.add_exactly_one(literals)
    sizes = [option.units for job in jobs for option in job.options]
    literals = [literal for row in chosen for literal in row]
    model.add(cp_model.LinearExpr.weighted_sum(literals, sizes) <= units)
    values = [[value_of(job, k) for k in range(len(job.options))] for job in jobs]
    total = bound = 0.0
    proven = True
    solver = None
    for priority in sorted({job.job.priority for job in jobs}, reverse=True):
        rows = [at for at, job in enumerate(jobs) if job.job.priority == priority]
        terms = [literal for at in rows for literal in chosen[at]]
        weights = [value for at in rows for value in values[at]]
        goal = cp_model.LinearExpr.weighted_sum(terms, weights)
        model.maximize(goal)
        _hint(model, solver, literals)
        solver = solved(model, effort)
        total += solver.objective_value / VALUE_SCALE
        bound += solver.best_objective_bound / VALUE_SCALE
        proven = proven and solver.objective_value >= solver.best_objective_bound
        model.add(goal >= round(solver.objective_value))
    assert solver is not None
    shares = tuple(
        Share(
            option=next((k for k, literal in enumerate(row) if solver.boolean_value(literal)), None)
        )
        for row in chosen
    )
    return Sharing(shares=shares, value=total, bound=bound, proven=proven)


def value_of(job: Choices, option: int) -> int:
    """A job's contribution to the objective in steps of 1 / VALUE_SCALE."""
    share = job.options[option].tokens_per_s / job.best_tokens_per_s
    return round(job.job.weight * share * VALUE_SCALE)


def ticks_of(jobs: Sequence[Choices]) -> tuple[float, list[list[int]]]:
    """(seconds of a tick, ticks that each job needs at each of its sizes)."""
    slowest = [max(seconds_of(job, k) for k in range(len(job.options))) for job in jobs]
    fastest = [min(seconds_of(job, k) for k in range(len(job.options))) for job in jobs]
    tick_s = max(*slowest, sum(fastest)) / TICKS
    return tick_s, [
        [ceil(seconds_of(job, k) / tick_s - 1e-9) for k in range(len(job.options))] for job in jobs
    ]


def seconds_of(job: Choices, option: int) -> float:
    """How long a job trains at a size."""
    assert job.job.tokens is not None
    return job.job.tokens / job.options[option].tokens_per_s


def share_over_time(jobs: Sequence[Choices], units: int, objective: str, effort: Effort) -> Sharing:
    """Sizes and start times: the least makespan, or the least weighted lateness and then makespan.

    Every job must have `tokens`.
    """
    from ortools.sat.python import cp_model

    tick_s, ticks = ticks_of(jobs)
    horizon = sum(max(row) for row in ticks)
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, horizon, f"start{at}") for at in range(len(jobs))]
    ends = [model.new_int_var(0, horizon, f"end{at}") for at in range(len(jobs))]
    chosen: list[list[cp_model.IntVar]] = []
    intervals, demands, areas = [], [], []
    for at, job in enumerate(jobs):
        row = [model.new_bool_var(f"{at}_{k}") for k in range(len(job.options))]
        model.add_exactly_one(row)
        for k, literal in enumerate(row):
            name = f"run{at}_{k}"
            intervals.append(
                model.new_optional_interval_var(starts[at], ticks[at][k], ends[at], literal, name)
            )
            demands.append(job.options[k].units)
            areas.append(literal * (job.options[k].units * ticks[at][k]))
        chosen.append(row)
    model.add_cumulative(intervals, demands, units)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, ends)
    model.add(
        sum(areas) <= units * makespan
    )  # what an area bound knows and the cumulative does not
    goals: list[cp_model.LinearExprT] = []
    if objective == "deadlines":
        for priority in sorted({job.job.priority for job in jobs}, reverse=True):
            late = _lateness(model, jobs, ends, priority, (tick_s, horizon))
            if late is not None:
                goals.append(late)
    goals.append(makespan)
    literals = [literal for row in chosen for literal in row]
    solver, proven, last = None, True, 0.0
    for goal in goals:
        model.minimize(goal)
        _hint(model, solver, [*literals, *starts])
        solver = solved(model, effort)
        proven = proven and solver.objective_value <= solver.best_objective_bound
        last = solver.best_objective_bound
        if goal is not makespan:
            model.add(goal <= round(solver.objective_value))
    assert solver is not None
    shares = tuple(
        Share(
            option=next(k for k, literal in enumerate(row) if solver.boolean_value(literal)),
            start_s=solver.value(starts[at]) * tick_s,
            end_s=solver.value(ends[at]) * tick_s,
        )
        for at, row in enumerate(chosen)
    )
    return Sharing(
        shares=shares, value=solver.value(makespan) * tick_s, bound=last * tick_s, proven=proven
    )


def _lateness(
    model: cp_model.CpModel,
    jobs: Sequence[Choices],
    ends: Sequence[cp_model.IntVar],
    priority: int,
    ticks: tuple[float, int],
) -> cp_model.LinearExprT | None:
    """Weighted ticks past the deadlines of the jobs of one priority; None if none of them has any."""
    tick_s, horizon = ticks
    terms: list[cp_model.LinearExprT] = []
    for at, job in enumerate(jobs):
        if job.job.priority != priority or job.job.deadline_h is None:
            continue
        due = min(int(job.job.deadline_h * 3600 / tick_s), horizon)
        late = model.new_int_var(0, horizon, f"late{at}")
        model.add(late >= ends[at] - due)
        terms.append(late * max(1, round(100 * job.job.weight)))
    return sum(terms) if terms else None


def _hint(
    model: cp_model.CpModel, solver: cp_model.CpSolver | None, variables: Sequence[cp_model.IntVar]
) -> None:
    model.clear_hints()  # type: ignore[no-untyped-call]
    if solver is not None:
        for variable in variables:
            model.add_hint(variable, solver.value(variable))


def solved(model: cp_model.CpModel, effort: Effort) -> cp_model.CpSolver:
    """The solver after its work. Raises InfeasibleError where it has no solution."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.random_seed = effort.seed
    solver.parameters.num_workers = 8
    solver.parameters.interleave_search = True  # workers take turns: the same answer on any machine
    solver.parameters.max_deterministic_time = effort.deterministic_s
    if effort.wall_s is not None:
        solver.parameters.max_time_in_seconds = effort.wall_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(
            "the jobs that must run do not fit the cluster together, even at their smallest sizes"
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasibleError(
            f"no way to share the cluster was found in the time given ({solver.status_name(status)})"
        )
    return solver
