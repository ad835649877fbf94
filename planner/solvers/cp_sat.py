"""CP-SAT as it is used here: one worker, a fixed seed, work limited rather than time, so that runs repeat."""

from __future__ import annotations

import time
from math import inf, isfinite
from typing import TYPE_CHECKING
from weakref import WeakSet

from meshwright.errors import InternalError
from meshwright.planner.solvers.clock import remaining_s

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


_at_work: WeakSet[cp_model.CpSolver] = WeakSet()


def stop_solvers() -> None:
    """Ends every solve that is under way, from any thread; what each has by then is its answer."""
    for solver in list(_at_work):
        solver.stop_search()


def interruptible_solver() -> cp_model.CpSolver:
    """A solver that `stop_solvers` ends.

    Of itself CP-SAT would take Ctrl-C for its own and go on with what it has, as if nothing had been said.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False
    _at_work.add(solver)
    return solver


def repeatable_solver(
    seed: int = 1, *, work: float | None = None, deadline: float = inf
) -> cp_model.CpSolver:
    """A solver that gives the same answer each time; `work` is deterministic time, about a second a unit.

    Where the command has a time limit, the solver ends with it, or at a deadline on the clock of
    `time.monotonic`.

    Parameters
    ----------
    seed
        Of CP-SAT's random numbers.
    work
        Units after which the solver ends; None for no limit.
    deadline
        Seconds on the clock of `time.monotonic`; infinite for none.
    """
    solver = interruptible_solver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if work is not None:
        solver.parameters.max_deterministic_time = work
    left_s = min(remaining_s(), deadline - time.monotonic())
    if isfinite(left_s):
        solver.parameters.max_time_in_seconds = max(left_s, 0.01)
    return solver


def solved_in_two_attempts(
    model: cp_model.CpModel, *, seed: int, work: float, most_conflicts: int, deadline: float
) -> tuple[cp_model.CpSolver, str]:
    """The solver with its answer, and optimal, feasible, infeasible or unknown.

    First with quick restarts, then by default search: others crawl on some models, from one solution to the
    next or from bound to bound. Each attempt has so much work and so many conflicts, and ends at the
    deadline on the clock of `time.monotonic`, which may be infinite. Raises InternalError for an invalid
    model.

    Parameters
    ----------
    model
        With an objective.
    seed
        Of CP-SAT's random numbers.
    work
        Of one attempt, in CP-SAT's deterministic time.
    most_conflicts
        Of one attempt.
    deadline
        Seconds on the clock of `time.monotonic`.

    Returns
    -------
    tuple of (cp_model.CpSolver, str)
        That of the last attempt.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = repeatable_solver(seed, work=work)
    solver.parameters.max_number_of_conflicts = most_conflicts
    quick_restarts = cp_model.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
    for branching, level in ((quick_restarts, 1), (cp_model.AUTOMATIC_SEARCH, 2)):
        solver.parameters.search_branching = branching
        solver.parameters.linearization_level = level
        if isfinite(deadline):
            solver.parameters.max_time_in_seconds = max(deadline - time.monotonic(), 0.01)
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
            break
    names = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "feasible",
        cp_model.INFEASIBLE: "infeasible",
        cp_model.UNKNOWN: "unknown",
    }
    if status not in names:
        reason = model.validate() or "no reason given"
        raise InternalError(f"CP-SAT answered {solver.status_name(status)}: {reason}")
    return solver, names[status]
