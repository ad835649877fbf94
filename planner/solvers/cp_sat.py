"""CP-SAT as it is used here: one worker, a fixed seed, work limited rather than time, so that runs repeat."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING
from weakref import WeakSet

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


def repeatable_solver(seed: int = 1, *, work: float | None = None) -> cp_model.CpSolver:
    """A solver that gives the same answer each time; `work` is deterministic time, about a second a unit.

    Where the command has a time limit, the solver ends with it.
    """
    solver = interruptible_solver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if work is not None:
        solver.parameters.max_deterministic_time = work
    if isfinite(remaining_s()):
        solver.parameters.max_time_in_seconds = max(remaining_s(), 0.01)
    return solver
