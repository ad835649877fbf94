"""Raises the bound of one pod step by step until a mapping meets it (`orderless`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.mapping.problem import MappingProblem
from meshwright.planner.mapping.relaxation.arrange import arranged
from meshwright.planner.mapping.relaxation.columns import Relaxation
from meshwright.planner.mapping.relaxation.integer import Effort
from meshwright.planner.mapping.relaxation.orderless import (
    Chosen,
    Listed,
    cheapest_choice,
    listed_within,
)
from meshwright.planner.mapping.solution import PROVEN, Incumbent, Limits, MappingRound

FIRST_STEP = 0.0005
"""Of the bound: the first delta."""
EFFORT = Effort(nodes=20_000, seconds=60.0)


def deepened(
    problem: MappingProblem,
    found: Relaxation,
    best: Incumbent,
    rounds: list[MappingRound],
    limits: Limits,
) -> float:
    """The bound that holdings prove, at most the price of the incumbent; which takes what it finds.

    Ends where they meet, where the best choice of holdings is known but no order of the stages for it, or
    where there is too much to list.
    """
    base = found.priced_bound_s
    bound, delta, listed = found.bound_s, FIRST_STEP * max(found.bound_s, 0.1 * best.price_s), None
    while best.price_s - bound > PROVEN * best.price_s:
        left_s = limits.left_s
        delta = min(delta, best.price_s - base) + 1e-9 * best.price_s
        listed = listed_within(problem, found, delta, listed) if left_s > 0 else None
        if listed is None:
            break
        effort = replace(EFFORT, seconds=max(0.1, min(EFFORT.seconds, left_s)))
        step = _step(problem, found, listed, best, effort)
        bound = max(bound, step.bound_s)
        rounds.append(
            MappingRound(
                columns=len(listed.holdings),
                exhaustive=True,
                price_s=best.price_s,
                wall_s=limits.elapsed_s,
            )
        )
        if step.last:
            break
        delta = step.cost_s - base if step.cost_s - base < 4 * delta else 2 * delta
    return min(bound, best.price_s)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one delta has shown."""

    bound_s: float
    cost_s: float
    """Of the cheapest choice."""
    last: bool
    """Whether a larger delta would show no more."""


def _step(
    problem: MappingProblem, found: Relaxation, listed: Listed, best: Incumbent, effort: Effort
) -> _Step:
    """The cheapest choice; in an order of stages, where no larger delta makes it cheaper.

    Where cuts are too many to list, their number of slots alone is tried first: it is enough where that
    reaches what the list can prove, or can be cut into stages after all.
    """
    ceiling = found.priced_bound_s + listed.delta_s
    unlisted = any(cuts is None for cuts in listed.cuts)
    reached = 0.0
    for flows in (False, True) if unlisted else (False,):
        choice = cheapest_choice(problem, found, listed, effort, flows=flows)
        reached = max(reached, min(choice.bound_s, ceiling))
        last = not choice.complete or choice.cost_s <= ceiling
        possible = found.bound_s * (1 - PROVEN) <= choice.cost_s < best.price_s * (1 - 1e-9)
        if last and possible and choice.holdings:
            _arrange(problem, found, choice, best)
        if not last or best.price_s - reached <= PROVEN * best.price_s:
            break
    return _Step(bound_s=reached, cost_s=choice.cost_s, last=last)


def _arrange(problem: MappingProblem, found: Relaxation, choice: Chosen, best: Incumbent) -> None:
    """Offers the choice in an order of stages: cut as chosen, and if that costs more, cut anew."""
    kinds, anew = found.leaves.kinds, (None, None)
    best.offer(arranged(problem, kinds, choice.holdings, choice.cuts))
    if best.price_s > choice.cost_s * (1 + PROVEN) and choice.cuts != anew:
        best.offer(arranged(problem, kinds, choice.holdings, anew))
