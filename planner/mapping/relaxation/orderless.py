"""Integer programmes over holdings and cuts: how cheap a mapping could be, stages between not told apart.

Whatever costs less than a bound plus delta holds in every leaf something that costs at most delta above what
the prices say, and cuts every stage so. For small delta that is little: all of it is listed, and a programme
over it either finds the best mapping or raises the bound by delta; then delta grows. Where the cuts are too
many to list, their linear relaxation stands in, a flow from 0 slots to a whole stage (Valerio de Carvalho
1999, "Exact solution of bin-packing problems using column generation and branch-and-bound", section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import Relaxation
from meshwright.planner.mapping.relaxation.holdings import Holding, holdings_within
from meshwright.planner.mapping.relaxation.integer import Effort, by_highs
from meshwright.planner.mapping.relaxation.pieces import (
    cheapest_cut,
    cuts_within,
    family_sizes,
    most_pieces,
)

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

MOST_HOLDINGS = 8_000
MOST_CUTS = 6_500
"""Of each family of stages."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What a mapping less than `delta_s` above the bound can be made of."""

    delta_s: float
    holdings: list[Holding]
    cuts: list[IntArray | None]
    """By family, [cuts, size]; None where they are too many."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice of holdings, the cheapest where it is complete."""

    holdings: list[tuple[Holding, int]]
    """With the number of leaves."""
    cuts: tuple[list[tuple[IntArray, int]] | None, ...]
    """By family, with the number of stages; None where they were not listed."""
    cost_s: float
    bound_s: float
    """No choice from the list costs less."""
    complete: bool


def listed_within(
    problem: MappingProblem, found: Relaxation, delta_s: float, before: Listed | None
) -> Listed | None:
    """What costs at most `delta_s` more than the prices say; None where holdings are too many.

    Cuts that were too many for a smaller delta, `before`, are not listed again.
    """
    prices = found.piece_prices
    assert prices is not None
    ceiling = found.leaf_rent_s + delta_s
    holdings = holdings_within(problem, found.leaves.kinds, prices, ceiling, MOST_HOLDINGS)
    if holdings is None:
        return None
    most = most_pieces(problem)
    cuts: list[IntArray | None] = []
    for family, stages in enumerate(family_sizes(problem.stages)):
        if before is not None and before.cuts[family] is None:
            cuts.append(None)
        elif stages:
            floor, _ = cheapest_cut(prices[family], problem.slots, most)
            cuts.append(
                cuts_within(prices[family], problem.slots, most, floor + delta_s, MOST_CUTS)
            )
        else:
            cuts.append(np.zeros((0, prices.shape[1]), dtype=np.int64))
    return Listed(delta_s=delta_s, holdings=holdings, cuts=cuts)


def cheapest_choice(
    problem: MappingProblem, found: Relaxation, listed: Listed, effort: Effort, *, flows: bool
) -> Chosen:
    """Holdings for the leaves whose pieces can be put together to stages.

    Without `flows` a family whose cuts are not listed only gets as many slots as it has.
    """
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    members = [len(kind.members) for kind in found.leaves.kinds]
    taken = [model.add_integer_variable(lb=0, ub=members[held.kind]) for held in listed.holdings]
    for kind, leaves in enumerate(members):
        mine = [x for x, held in zip(taken, listed.holdings, strict=True) if held.kind == kind]
        model.add_linear_constraint(mathopt.fast_sum(mine) <= leaves)
    chosen: list[list[Any]] = []
    for family, stages in enumerate(family_sizes(problem.stages)):
        pieces = _pieces(listed.holdings, taken, family)
        cuts = listed.cuts[family]
        chosen.append([] if cuts is None else _list_cuts(model, pieces, cuts, stages))
        if cuts is not None:
            continue
        if flows:
            _flow(model, pieces, problem.slots, stages)
        else:
            slots = [size * n * x for size, uses in pieces.items() for n, x in uses]
            model.add_linear_constraint(mathopt.fast_sum(slots) == problem.slots * stages)
    scale = 1.0 / max(max((held.cost_s for held in listed.holdings), default=0.0), 1e-12)
    costs = [held.cost_s * scale * x for x, held in zip(taken, listed.holdings, strict=True)]
    model.minimize(mathopt.fast_sum(costs))
    return _read(listed, taken, chosen, by_highs(model, effort), scale)


Pieces = dict[int, list[tuple[int, Any]]]
"""By size: (pieces of that size, variable) of every holding with some."""


def _pieces(holdings: list[Holding], taken: list[Any], family: int) -> Pieces:
    out: Pieces = {}
    for x, held in zip(taken, holdings, strict=True):
        mine = held.pieces(family)
        for size in sorted(set(mine), reverse=True):
            out.setdefault(size, []).append((mine.count(size), x))
    return out


def _list_cuts(model: mathopt.Model, pieces: Pieces, cuts: IntArray, stages: int) -> list[Any]:
    """Every stage has one of the cuts, the pieces held are those of the cuts; how often each is chosen."""
    from ortools.math_opt.python import mathopt

    chosen = [model.add_integer_variable(lb=0, ub=stages) for _ in cuts]
    model.add_linear_constraint(mathopt.fast_sum(chosen) == stages)
    for size in range(1, cuts.shape[1]):
        wanted = [int(cuts[c, size]) * chosen[c] for c in np.flatnonzero(cuts[:, size])]
        held = [n * x for n, x in pieces.get(size, [])]
        if wanted or held:
            model.add_linear_constraint(mathopt.fast_sum(held) == mathopt.fast_sum(wanted))
    return chosen


def _flow(model: mathopt.Model, pieces: Pieces, slots: int, stages: int) -> None:
    """As many units as stages flow from 0 to `slots`, along arcs as long as the pieces held."""
    from ortools.math_opt.python import mathopt

    levels = {0}
    for size in sorted(pieces, reverse=True):
        for level in sorted(levels):
            levels.update(range(level, slots + 1, size))
    balance: dict[int, list[Any]] = {level: [] for level in sorted(levels)}
    for size, uses in sorted(pieces.items()):
        arcs = []
        for level in sorted(levels):
            if level + size in levels:
                arc = model.add_variable(lb=0, ub=stages)
                arcs.append(arc)
                balance[level].append(arc)
                balance[level + size].append(-arc)
        held = mathopt.fast_sum([n * x for n, x in uses])
        model.add_linear_constraint(mathopt.fast_sum(arcs) == held)
    for level, terms in balance.items():
        out = stages if level == 0 else -stages if level == slots else 0
        model.add_linear_constraint(mathopt.fast_sum(terms) == out)


def _read(
    listed: Listed,
    taken: list[Any],
    chosen: list[list[Any]],
    result: mathopt.SolveResult,
    scale: float,
) -> Chosen:
    from ortools.math_opt.python import mathopt

    reasons, reason = mathopt.TerminationReason, result.termination.reason
    bound_s = result.termination.objective_bounds.dual_bound / scale
    if not result.has_primal_feasible_solution():
        empty = reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED)
        nothing = np.inf if empty else bound_s
        return Chosen(
            holdings=[], cuts=(None, None), cost_s=np.inf, bound_s=nothing, complete=empty
        )
    values = result.variable_values()
    holdings = [(held, round(values[x])) for held, x in zip(listed.holdings, taken, strict=True)]
    return Chosen(
        holdings=[(held, number) for held, number in holdings if number],
        cuts=tuple(
            None
            if cuts is None
            else [
                (cut, round(values[y])) for cut, y in zip(cuts, ys, strict=True) if round(values[y])
            ]
            for cuts, ys in zip(listed.cuts, chosen, strict=True)
        ),
        cost_s=sum(held.cost_s * number for held, number in holdings),
        bound_s=bound_s,
        complete=reason == reasons.OPTIMAL,
    )
