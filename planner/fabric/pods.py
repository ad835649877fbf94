"""Several pods: a bound from leaves and pods each for itself, and mappings that suit both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.fabric.columns import LARGEST_POD_TABLE, counts_of, pod_states, relax
from planner.fabric.exchange import exchanged
from planner.fabric.integer import Effort
from planner.fabric.problem import IntArray, MappingProblem, loads_of
from planner.fabric.solution import Incumbent
from planner.fabric.starts import pod_by_pod, pod_counts

ORDERS_REFINED = 2
POD_EFFORT = Effort(nodes=50, seconds=10.0)
MOST_TRIES = 300_000
TRIES_PER_CELL = 300
"""Exchanges tried, by leaf and stage."""


def pods_bound_s(problem: MappingProblem, orders: Sequence[IntArray], stop: Callable[[], bool]) -> float:
    """No mapping keeps the pods' up-links less busy; 0 where the tables would be too large."""
    if pod_states(problem) > LARGEST_POD_TABLE:
        return 0.0
    pods = problem.only_pods()
    return relax(pods, [pod_counts(problem, order) for order in orders], stop=stop).bound_s


def improve(problem: MappingProblem, best: Incumbent, orders: Sequence[IntArray], alone: IntArray) -> None:
    """Offers mappings that are good for leaves and pods. `alone` is the best for leaves alone.

    What the best orders put in each pod is placed anew inside the pods; and whole leaves are exchanged
    between the stages of `alone`.
    """
    best.consider(alone)
    ranked = sorted(orders, key=lambda order: loads_of(problem, order).total_s)
    for order in ranked[:ORDERS_REFINED]:
        _refill(problem, best, order)
    tries = min(MOST_TRIES, TRIES_PER_CELL * problem.stages * len(problem.leaf_slots))
    best.offer(exchanged(problem, counts_of(problem, alone), tries))
    _refill(problem, best, best.assignment)


def _refill(problem: MappingProblem, best: Incumbent, order: IntArray) -> None:
    best.offer(pod_by_pod(problem, pod_counts(problem, order), POD_EFFORT))
