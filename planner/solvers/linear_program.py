"""Linear programmes that grow by columns: the restricted master of a column generation.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solvers.clock import remaining_s

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt


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
