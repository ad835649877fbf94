"""Whole patterns for every leaf: the columns of the relaxation once more, as an integer programme.

HiGHS by way of OR-Tools' MathOpt: on these columns it proved in a second what took CP-SAT ten or more
(512 nodes on 40 leaves, `benchmarks/fabric.py`), because the linear relaxation is all but tight.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import Pool

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Where an integer programme stops: nodes of its tree, so that the same input gives the same answer.

    The seconds are a safety net for a machine much slower than those the nodes were chosen on.
    """

    nodes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WholeMapping:
    """What the integer programme found."""

    counts: IntArray | None
    """Slots of each stage in each leaf, [leaves, stages]; None where nothing was found."""
    bound_s: float
    """No choice among the columns costs less; minus infinity where nothing is known."""
    complete: bool


def whole_mapping(
    problem: MappingProblem, leaves: Pool, pods: Pool | None, *, demand: IntArray, effort: Effort
) -> WholeMapping:
    """The cheapest choice of columns."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    dearest = max(*leaves.cost_s, *([] if pods is None else pods.cost_s), 0.0)
    scale = 1.0 / dearest if dearest > 0 else 1.0
    taken = [
        model.add_integer_variable(lb=0, ub=len(leaves.kinds[kind].members)) for kind in leaves.kind
    ]
    chosen = [model.add_binary_variable() for _ in pods.kind] if pods is not None else []
    for kind, block in enumerate(leaves.kinds):
        mine = [x for x, k in zip(taken, leaves.kind, strict=True) if k == kind]
        model.add_linear_constraint(mathopt.fast_sum(mine) <= len(block.members))
    if pods is None:
        _cover(model, leaves.patterns, taken, demand)
    else:
        _cover(model, pods.patterns, chosen, demand)
        _link(model, problem, (leaves, taken), (pods, chosen))
    costs = [c * scale * x for c, x in zip(leaves.cost_s, taken, strict=True)]
    if pods is not None:
        costs += [c * scale * y for c, y in zip(pods.cost_s, chosen, strict=True)]
    model.minimize(mathopt.fast_sum(costs))
    return _read(problem, leaves, taken, by_highs(model, effort), scale)


def by_highs(model: mathopt.Model, effort: Effort) -> mathopt.SolveResult:
    """An integer programme solved by HiGHS, as far as the effort goes."""
    from ortools.math_opt.python import mathopt

    parameters = mathopt.SolveParameters(
        node_limit=effort.nodes,
        time_limit=datetime.timedelta(seconds=effort.seconds),
        relative_gap_tolerance=1e-7,
    )
    return mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)


def _cover(
    model: mathopt.Model, patterns: Sequence[IntArray], columns: list[Any], demand: IntArray
) -> None:
    """Every stage gets its slots."""
    from ortools.math_opt.python import mathopt

    table = np.array(patterns)
    for stage, slots in enumerate(demand):
        rows = np.flatnonzero(table[:, stage])
        provided = mathopt.fast_sum([int(table[r, stage]) * columns[r] for r in rows])
        model.add_linear_constraint(provided == int(slots))


def _link(
    model: mathopt.Model,
    problem: MappingProblem,
    of_leaves: tuple[Pool, list[Any]],
    of_pods: tuple[Pool, list[Any]],
) -> None:
    """The leaves of a pod hold what the pod holds. Pools come with their variables."""
    from ortools.math_opt.python import mathopt

    (leaves, taken), (pods, chosen) = of_leaves, of_pods
    for pod in range(problem.pods):
        mine = [at for at, kind in enumerate(leaves.kind) if leaves.kinds[kind].parent == pod]
        theirs = [at for at, p in enumerate(pods.kind) if p == pod]
        model.add_linear_constraint(mathopt.fast_sum([chosen[at] for at in theirs]) <= 1)
        for stage in range(problem.stages):
            held = mathopt.fast_sum([int(leaves.patterns[at][stage]) * taken[at] for at in mine])
            wanted = mathopt.fast_sum([int(pods.patterns[at][stage]) * chosen[at] for at in theirs])
            model.add_linear_constraint(held == wanted)


def _read(
    problem: MappingProblem,
    leaves: Pool,
    taken: list[Any],
    result: mathopt.SolveResult,
    scale: float,
) -> WholeMapping:
    from ortools.math_opt.python import mathopt

    reason = result.termination.reason
    complete = reason == mathopt.TerminationReason.OPTIMAL
    if not result.has_primal_feasible_solution():
        # The columns hold a whole mapping, so that nothing fits is never an answer.
        return WholeMapping(counts=None, bound_s=-float("inf"), complete=False)
    values = result.variable_values()
    counts = _spread_out(problem, leaves, [round(values[x]) for x in taken])
    bound = result.termination.objective_bounds.dual_bound / scale
    return WholeMapping(counts=counts, bound_s=bound, complete=complete)


def _spread_out(problem: MappingProblem, leaves: Pool, copies: Sequence[int]) -> IntArray:
    """Counts of every leaf by name: equal leaves get the chosen patterns in the order of the columns."""
    counts = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
    free = [list(kind.members) for kind in leaves.kinds]
    for at, number in enumerate(copies):
        for _ in range(number):
            counts[free[leaves.kind[at]].pop(0)] = leaves.patterns[at]
    return counts
