"""Several pods: a bound from leaves and pods each for itself, and mappings that suit both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.planner.mapping.problem import IntArray, MappingProblem, loads_of
from meshwright.planner.mapping.relaxation.columns import (
    LARGEST_POD_TABLE,
    counts_of,
    pod_states,
    relax,
)
from meshwright.planner.mapping.relaxation.exchange import exchanged
from meshwright.planner.mapping.relaxation.integer import Effort
from meshwright.planner.mapping.solution import PROVEN, Incumbent, Limits
from meshwright.planner.mapping.starts import pod_by_pod, pod_counts

ORDERS_REFINED = 2
POD_EFFORT = Effort(nodes=50, seconds=10.0)
MOST_TRIES = 300_000
TRIES_PER_CELL = 300
"""Exchanges tried, by leaf and stage."""
TRIES_PER_S = 20_000
"""Of the limit: a short one leaves fewer, whatever the machine."""


def pods_bound_s(
    problem: MappingProblem, orders: Sequence[IntArray], stop: Callable[[], bool]
) -> float:
    """No mapping keeps the pods' up-links less busy; 0 where the tables would be too large."""
    if pod_states(problem) > LARGEST_POD_TABLE:
        return 0.0
    pods = problem.only_pods()
    return relax(pods, [pod_counts(problem, order) for order in orders], stop=stop).bound_s


def improve(
    problem: MappingProblem,
    best: Incumbent,
    orders: Sequence[IntArray],
    alone: IntArray,
    *,
    bound_s: float,
    limits: Limits,
) -> None:
    """Offers mappings that are good for leaves and pods, until one meets the bound. `alone` is the best for
    leaves alone.

    Whole leaves are exchanged between the stages of `alone`; and what that and the best orders put in each
    pod is placed anew inside the pods.
    """
    best.consider(alone)
    tries = min(MOST_TRIES, TRIES_PER_CELL * problem.stages * len(problem.leaf_slots))
    tries = min(tries, int(TRIES_PER_S * limits.limit_s))
    best.offer(exchanged(problem, counts_of(problem, alone), tries))
    ranked = sorted(orders, key=lambda order: loads_of(problem, order).total_s)
    for order in [best.assignment, *ranked[:ORDERS_REFINED]]:
        if limits.left_s > 0 and best.price_s > bound_s * (1 + PROVEN):
            best.offer(pod_by_pod(problem, pod_counts(problem, order), POD_EFFORT))
