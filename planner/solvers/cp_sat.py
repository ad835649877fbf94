"""CP-SAT as it is used here: one worker, a fixed seed, work limited rather than time, so that runs repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def repeatable_solver(seed: int = 1, *, work: float | None = None) -> cp_model.CpSolver:
    """A solver that gives the same answer each time; `work` is deterministic time, about a second a unit."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if work is not None:
        solver.parameters.max_deterministic_time = work
    return solver
