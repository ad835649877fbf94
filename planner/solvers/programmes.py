"""Solvers as they are used here: CLP for linear programmes, CP-SAT and HiGHS for whole numbers; runs repeat.

A linear programme grows by columns, as the restricted master of a column generation does:

    min  sum_j cost_j x_j   with   low_i <= sum_j a_ij x_j <= high_i,   x_j >= 0

A column generation solves it over the columns so far, reads the dual of every row, prices new columns at
these duals and adds those that would lower the value.

>>> master = LinearProgram()
>>> demand = master.add_row(3.0, 3.0)
>>> master.add_column(2.0, [(demand, 1.0)])
>>> master.solve(), master.duals([demand]).tolist()
(6.0, [2.0])
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InternalError
from meshwright.planner.solvers.clock import remaining_s

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp
    from ortools.math_opt.python import mathopt

    from meshwright.planner.solvers.or_tools import cp_model

# CP-SAT: one worker, a fixed seed, work limited rather than time.


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


# Linear programmes.


Row = Any
"""A row of a programme, as `LinearProgram.add_row` gives it."""


class LinearProgram:
    """A linear programme over the columns so far, by COIN-OR's CLP as it comes with OR-Tools."""

    def __init__(self) -> None:
        from ortools.linear_solver import pywraplp

        self._solver: pywraplp.Solver = pywraplp.Solver.CreateSolver("CLP")
        self._optimal = pywraplp.Solver.OPTIMAL
        self._objective = self._solver.Objective()
        self._objective.SetMinimization()

    def add_row(self, low: float, high: float) -> Row:
        """Adds a row without entries; `low` may be minus infinity, `high` infinity.

        Parameters
        ----------
        low, high
            What the sum of the row's entries lies between.
        """
        return self._solver.Constraint(low, high)

    def add_column(self, cost: float, entries: Iterable[tuple[Row, float]]) -> None:
        """Adds a variable from 0 upwards with its cost and its entries in rows.

        Parameters
        ----------
        cost
            Of a unit in the objective.
        entries
            Rows with the variable's coefficients there; other rows have none.
        """
        column = self._solver.NumVar(0, self._solver.infinity(), "")
        for row, coefficient in entries:
            row.SetCoefficient(column, float(coefficient))
        self._objective.SetCoefficient(column, cost)

    def add_slack(self, row: Row, cost: float) -> None:
        """Lets a row be missed by any amount on either side, at this cost a unit.

        Parameters
        ----------
        row
            Which one.
        cost
            Of a unit by which the row is missed, at least 0.
        """
        self.add_column(cost, [(row, 1.0)])
        self.add_column(cost, [(row, -1.0)])

    def solve(self) -> float | None:
        """The least value; None where the simplex gives up."""
        if self._solver.Solve() != self._optimal:
            return None
        return float(self._objective.Value())

    def duals(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """What one unit more on the right of each row adds to the value; shape [rows].

        Parameters
        ----------
        rows
            After `solve` found the least value.
        """
        return np.array([row.dual_value() for row in rows], dtype=np.float64)


# HiGHS as it is used here, by OR-Tools' MathOpt: work limited by nodes of the tree, so that runs repeat.
#
# On columns whose linear relaxation is all but tight it proves in a second what takes CP-SAT ten or more.


RELATIVE_GAP = 1e-7
"""Between value and bound, below which an integer programme counts as solved."""

_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, ValueError)
"""What `ortools.math_opt.python.errors` and the code that words a failure raise."""


@dataclass(frozen=True, kw_only=True)
class TreeLimits:
    """Where an integer programme stops."""

    nodes: int
    """Nodes of its tree: the same input gives the same answer."""
    seconds: float
    """Wall clock: a safety net for machines much slower than those the nodes were chosen on."""


def solved_by_highs(model: mathopt.Model, limits: TreeLimits) -> mathopt.SolveResult | None:
    """The result of an integer programme, as far as the limits let HiGHS go; None where it fails.

    HiGHS ends some small programmes with a status that is none of its own answers, and OR-Tools 9.15 raises
    an AttributeError while it words that. Whatever was raised, the programme is as open as before.

    Parameters
    ----------
    model
        An integer or a linear programme.
    limits
        Where HiGHS stops; the command's time limit, where it has one, stops it too.
    """
    from ortools.math_opt.python import mathopt

    parameters = mathopt.SolveParameters(
        node_limit=limits.nodes,
        time_limit=datetime.timedelta(seconds=max(min(limits.seconds, remaining_s()), 0.01)),
        relative_gap_tolerance=RELATIVE_GAP,
    )
    try:
        return mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    except _FAILURES:
        return None
