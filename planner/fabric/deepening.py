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
    delta, listed = FIRST_STEP * found.bound_s, None
    while best.price_s - bound > PROVEN * best.price_s:
        left_s = deadline - time.process_time()
        delta = min(delta, best.price_s - base) + 1e-9 * best.price_s
        listed = listed_within(problem, found, delta, listed) if left_s > 0 else None
        if listed is None:
            break
        effort = replace(EFFORT, seconds=max(0.1, min(EFFORT.seconds, left_s)))
        choice = _cheapest(problem, found, listed, effort)
        last = not choice.complete or choice.cost_s <= base + delta
        bound = max(bound, min(choice.bound_s, base + delta, best.price_s))
        if choice.holdings and choice.cost_s < best.price_s * (1 - 1e-9) and last:
            best.offer(arranged(problem, found.leaves.kinds, choice.holdings, choice.cuts))
        wall_s = time.monotonic() - start
        columns = len(listed.holdings)
        rounds.append(
            MappingRound(columns=columns, exhaustive=True, price_s=best.price_s, wall_s=wall_s)
        )
        if last:
            break
        delta = choice.cost_s - base if choice.cost_s - base < 4 * delta else 2 * delta
    return bound


def _cheapest(problem: MappingProblem, found: Relaxation, listed: Listed, effort: Effort) -> Chosen:
    """The cheapest choice. Where cuts are too many to list, their number of slots alone is tried first: it
    is enough where that reaches what the list can prove.
    """
    choice = cheapest_choice(problem, found, listed, effort, flows=False)
    if any(cuts is None for cuts in listed.cuts) and choice.bound_s < found.priced_bound_s + listed.delta_s:
        choice = cheapest_choice(problem, found, listed, effort, flows=True)
    return choice
