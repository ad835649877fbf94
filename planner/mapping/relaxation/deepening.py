"""Raises the bound of one pod step by step until a mapping meets it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.mapping.problem import MappingProblem
from meshwright.planner.mapping.relaxation.columns import Relaxation
from meshwright.planner.mapping.relaxation.ordering import ordered_counts
from meshwright.planner.mapping.relaxation.selection import (
    BundleCandidates,
    candidates_within,
    cheapest_selection,
)
from meshwright.planner.mapping.solution import (
    PROVEN,
    Incumbent,
    MappingRound,
    WorkLimits,
)
from meshwright.planner.solvers.highs import TreeLimits

ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class DeepeningParams:
    """How delta grows and how long a step may take."""

    first_share: float = 0.0005
    """The first delta, of the bound: half the steps to a proof are this small on the benchmark cases."""
    least_share: float = 0.1
    """Of the price: counts for the bound where that is lower, so that delta is never 0."""
    largest_growth: float = 4.0
    """A cheapest selection beyond this many deltas is not jumped to; delta doubles."""
    tree_nodes: int = 20_000
    """Of one integer programme; the largest of docs/fabric.md takes a tenth of it."""
    tree_s: float = 60.0


DEFAULT_DEEPENING = DeepeningParams()


def deepened(
    problem: MappingProblem,
    relaxation: Relaxation,
    best: Incumbent,
    rounds: list[MappingRound],
    limits: WorkLimits,
    *,
    params: DeepeningParams = DEFAULT_DEEPENING,
) -> float:
    """The bound that selections of bundles prove, s, at most the price of the incumbent.

    The incumbent takes every mapping on the way. Ends where price and bound meet, where the cheapest
    selection is known but no order of the stages for it, or where there is too much to list.
    """
    base_s = relaxation.lagrangian_s
    bound_s = relaxation.bound_s
    delta_s = params.first_share * max(bound_s, params.least_share * best.price_s)
    candidates: BundleCandidates | None = None
    while best.price_s - bound_s > PROVEN * best.price_s and limits.left_s > 0:
        tree_s = max(0.1, min(params.tree_s, limits.left_s))
        delta_s = min(delta_s, best.price_s - base_s) + ROUNDING * best.price_s
        candidates = candidates_within(problem, relaxation, delta_s, candidates)
        if candidates is None:
            break
        tree = TreeLimits(nodes=params.tree_nodes, seconds=tree_s)
        step = _step(problem, relaxation, candidates, best, tree)
        bound_s = max(bound_s, step.bound_s)
        rounds.append(
            MappingRound(
                columns=len(candidates.bundles), price_s=best.price_s, wall_s=limits.elapsed_s
            )
        )
        if step.last:
            break
        above_s = step.cost_s - base_s
        delta_s = above_s if above_s < params.largest_growth * delta_s else 2 * delta_s
    return min(bound_s, best.price_s)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one delta has shown."""

    bound_s: float
    cost_s: float
    """Of the cheapest selection."""
    last: bool
    """Whether a larger delta would show no more."""


def _step(
    problem: MappingProblem,
    relaxation: Relaxation,
    candidates: BundleCandidates,
    best: Incumbent,
    tree: TreeLimits,
) -> _Step:
    """The cheapest selection; put in an order of stages where no larger delta makes it cheaper."""
    ceiling_s = relaxation.lagrangian_s + candidates.delta_s
    selection = cheapest_selection(problem, relaxation, candidates, tree)
    last = not selection.complete or selection.cost_s <= ceiling_s
    credible = selection.cost_s >= relaxation.bound_s * (1 - PROVEN)
    better = selection.cost_s < best.price_s * (1 - ROUNDING)
    if last and credible and better and selection.bundles:
        best.offer(ordered_counts(problem, relaxation.kinds, selection.bundles))
    return _Step(bound_s=min(selection.bound_s, ceiling_s), cost_s=selection.cost_s, last=last)
