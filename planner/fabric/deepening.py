"""Raises the bound of one pod step by step until a mapping meets it (`orderless`)."""

from __future__ import annotations

import time
from dataclasses import replace

from planner.fabric.arrange import arranged
from planner.fabric.columns import Relaxation
from planner.fabric.integer import Effort
from planner.fabric.orderless import Chosen, Listed, cheapest_choice, listed_within
from planner.fabric.problem import MappingProblem
from planner.fabric.solution import PROVEN, Incumbent, MappingRound

FIRST_STEP = 0.0005
"""Of the bound: the first delta."""
EFFORT = Effort(nodes=20_000, seconds=60.0)


def deepened(
    problem: MappingProblem, found: Relaxation, best: Incumbent, rounds: list[MappingRound], deadline: float
) -> float:
    """The bound that holdings prove, at most the price of the incumbent; which takes what it finds.

    Ends where they meet, where the best choice of holdings is known but no order of the stages for it, or
    where there is too much to list. `deadline` is in processor seconds.
    """
    start, base = time.monotonic(), found.priced_bound_s
    bound = min(found.bound_s, best.price_s)
    delta = FIRST_STEP * found.bound_s
    while best.price_s - bound > PROVEN * best.price_s:
        left_s = deadline - time.process_time()
        delta = min(delta, best.price_s - base) + 1e-9 * best.price_s
        listed = listed_within(problem, found, delta) if left_s > 0 else None
        if listed is None:
            break
        effort = replace(EFFORT, seconds=max(0.1, min(EFFORT.seconds, left_s)))
        choice, reached = _cheapest(problem, found, listed, best, effort)
        bound = max(bound, min(reached, best.price_s))
        wall_s = time.monotonic() - start
        rounds.append(
            MappingRound(
                columns=len(listed.holdings), exhaustive=True, price_s=best.price_s, wall_s=wall_s
            )
        )
        if not choice.complete or choice.cost_s <= base + delta:
            break
        delta = choice.cost_s - base if choice.cost_s - base < 4 * delta else 2 * delta
    return bound


def _cheapest(
    problem: MappingProblem, found: Relaxation, listed: Listed, best: Incumbent, effort: Effort
) -> tuple[Chosen, float]:
    """The cheapest choice and the bound that it proves.

    Where cuts are too many to list, their number of slots alone is tried first.
    """
    ceiling = found.priced_bound_s + listed.delta_s
    unlisted = any(cuts is None for cuts in listed.cuts)
    choice = cheapest_choice(problem, found, listed, effort, flows=False)
    _offer(problem, found, choice, best)
    reached = min(choice.bound_s, ceiling)
    if unlisted and best.price_s - reached > PROVEN * best.price_s:
        choice = cheapest_choice(problem, found, listed, effort, flows=True)
        _offer(problem, found, choice, best)
        reached = max(reached, min(choice.bound_s, ceiling))
    return choice, reached


def _offer(problem: MappingProblem, found: Relaxation, choice: Chosen, best: Incumbent) -> None:
    """Puts the holdings in an order of stages, if they are worth it."""
    worth = found.bound_s * (1 - PROVEN) <= choice.cost_s < best.price_s * (1 - 1e-9)
    if choice.holdings and worth:
        best.offer(arranged(problem, found.leaves.kinds, choice.holdings))
