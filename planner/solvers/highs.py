"""HiGHS as it is used here, by OR-Tools' MathOpt: work limited by nodes of the tree, so that runs repeat.

On columns whose linear relaxation is all but tight it proves in a second what takes CP-SAT ten or more.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.solvers.clock import remaining_s

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

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
