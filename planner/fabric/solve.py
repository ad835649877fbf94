"""The best mapping that is found, what it is measured against, and how good any mapping could be."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.fabric.assign import assignment_of
from planner.fabric.banded_starts import banded_starts
from planner.fabric.columns import Pool, Relaxation, counts_of, relax
from planner.fabric.integer import Effort, whole_mapping
from planner.fabric.patterns import Pricer
from planner.fabric.problem import IntArray, Loads, MappingError, MappingProblem, check_assignment, loads_of
from planner.fabric.starts import blocked_orders, pod_by_pod, pod_counts

MappingObjective = Literal["traffic", "busiest", "spread"]
PROVEN = 1e-6
"""Relative difference of price and bound below which they count as equal: sums of floats."""


@dataclass(frozen=True, kw_only=True)
class MappingRound:
    """One integer programme: its columns, whether they were all that could matter, and what came of it."""

    columns: int
    exhaustive: bool
    price_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class MappingSolution:
    """An assignment with its certificate. `bound_s` holds for every assignment."""

    objective: MappingObjective
    assignment: IntArray
    loads: Loads
    hostname_loads: Loads
    bound_s: float
    rounds: tuple[MappingRound, ...]
    wall_s: float

    @property
    def price_s(self) -> float:
        """The objective: seconds of all up-links, or of the busiest."""
        return self.loads.busiest_s if self.objective == "busiest" else self.loads.total_s

    @property
    def hostname_s(self) -> float:
        """The objective in hostname order."""
        loads = self.hostname_loads
        return loads.busiest_s if self.objective == "busiest" else loads.total_s

    @property
    def gap(self) -> float:
        """Of the price."""
        return (self.price_s - self.bound_s) / self.price_s if self.price_s > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no assignment is better."""
        return self.gap <= PROVEN


ORDERS_REFINED = 2
POD_EFFORT = Effort(nodes=50, seconds=10.0)
CLOSE_ENOUGH = 0.002
"""Of the relaxation's value: with several pods, further columns are left ungenerated within this."""
EFFORT = (
    (0, Effort(nodes=400, seconds=20.0)),
    (3_000, Effort(nodes=2_000, seconds=40.0)),
    (20_000, Effort(nodes=10_000, seconds=60.0)),
)
"""(columns added, where the integer programme stops), round by round."""
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 0.003, 1e-6)
"""Of the gap: patterns that no solution this much better than the incumbent can do without are enumerated."""


class _Incumbent:
    """The best assignment so far."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self.assignment = problem.hostname_assignment()
        self.price_s = loads_of(problem, self.assignment).total_s

    @property
    def counts(self) -> IntArray:
        return counts_of(self._problem, self.assignment)

    def offer(self, counts: IntArray | None) -> None:
        """Takes an assignment with these counts if it is better."""
        if counts is not None:
            self.consider(assignment_of(self._problem, counts))

    def consider(self, assignment: IntArray) -> None:
        """Takes an assignment if it is better."""
        price = loads_of(self._problem, assignment).total_s
        if price < self.price_s * (1 - 1e-12):
            self.assignment, self.price_s = assignment, price


def least_traffic(problem: MappingProblem, *, time_limit_s: float = 60.0) -> MappingSolution:
    """The assignment with the least busy seconds over all up-links, with a bound.

    `time_limit_s` is processor time, so that a busy machine does not change the answer.

    Columns of the relaxation first, then all patterns whose reduced cost leaves room below the incumbent:
    when those are complete and the integer programme over them is, the incumbent is optimal.
    """
    start = time.monotonic()
    problem.check_room()
    best = _Incumbent(problem)
    rounds: list[MappingRound] = []
    bound = 0.0
    if best.price_s > 0:
        orders = [*blocked_orders(problem), *banded_starts(problem)]
        for order in orders:
            best.consider(order)
        deadline = time.process_time() + time_limit_s
        found = relax(
            problem,
            [counts_of(problem, order) for order in [best.assignment, *orders]],
            stop=lambda: time.process_time() > deadline - 0.6 * time_limit_s,
            enough=CLOSE_ENOUGH if problem.pods > 1 else 0.0,
        )
        if problem.pods > 1:
            _fill_pods(problem, best, orders)
        bound = _whole(problem, found, best, rounds, deadline=deadline)
    return _solution(problem, best, bound, rounds, start=start)


def _fill_pods(problem: MappingProblem, best: _Incumbent, orders: list[IntArray]) -> None:
    """Keeps what the best orders put in each pod, and places it inside the pods anew."""
    ranked = sorted(orders, key=lambda order: loads_of(problem, order).total_s)
    for order in [best.assignment, *ranked[:ORDERS_REFINED]]:
        best.offer(pod_by_pod(problem, pod_counts(problem, order), POD_EFFORT))


def _whole(
    problem: MappingProblem,
    found: Relaxation,
    best: _Incumbent,
    rounds: list[MappingRound],
    *,
    deadline: float,
) -> float:
    """Integer programmes over growing sets of columns; returns the bound that they prove."""
    start = time.monotonic()
    bound = min(found.bound_s, best.price_s)
    demand = np.full(problem.stages, problem.slots)
    leaves, pods, slack = found.leaves, found.pods, 0.0
    for limit, effort in EFFORT:
        left_s, gap_s = deadline - time.process_time(), best.price_s - bound
        if gap_s <= PROVEN * best.price_s or left_s <= 0:
            break
        full_s = best.price_s - found.priced_bound_s
        if limit:
            before = len(leaves.kind)
            leaves, pods, slack = _enumerated(problem, found, best, limit)
            if slack < full_s and len(leaves.kind) <= before:
                continue
        limited = Effort(nodes=effort.nodes, seconds=max(0.1, min(effort.seconds, left_s)))
        whole = whole_mapping(problem, leaves, pods, demand=demand, effort=limited)
        best.offer(whole.counts)
        exhaustive = slack >= full_s and (pods is not None or problem.pods == 1)
        if exhaustive and whole.complete:
            # Patterns outside the pools are in no assignment below the price that the slack was taken from.
            bound = max(bound, min(whole.bound_s, best.price_s))
        wall_s = time.monotonic() - start
        rounds.append(
            MappingRound(columns=len(leaves.kind), exhaustive=exhaustive, price_s=best.price_s, wall_s=wall_s)
        )
        if exhaustive and whole.complete:
            break
    return bound


def _enumerated(
    problem: MappingProblem, found: Relaxation, best: _Incumbent, limit: int
) -> tuple[Pool, Pool | None, float]:
    """The relaxation's columns, the incumbent's, and as many of the others as the limit lets in.

    Returns the pools and the slack: every pattern is in them whose cost, prices paid, is at most this above
    the least.
    """
    leaf_pricer = Pricer(problem, found.leaves.kinds)
    pod_pricer = None if found.pods is None else Pricer(problem, found.pods.kinds)
    leaves, pods = found.leaves.copy(), None if found.pods is None else found.pods.copy()
    counts = best.counts
    for kind, block in enumerate(leaves.kinds):
        for leaf in block.members:
            leaves.add(problem, kind, counts[leaf])
    if pods is not None:
        for pod in range(problem.pods):
            pods.add(problem, pod, counts[problem.pod_of == pod].sum(axis=0))
    if not np.isfinite(found.priced_bound_s):
        return leaves, pods, 0.0
    for share in SHARES:
        slack = (best.price_s - found.priced_bound_s) * share + 1e-9 * best.price_s
        more = leaf_pricer.within(found.leaf_prices, found.leaf_rent_s + slack, limit)
        pod_more = None
        if more is not None and pod_pricer is not None:
            pod_more = pod_pricer.within(found.pod_prices, found.pod_rent_s + slack, limit)
        if more is not None and (pod_pricer is None or pod_more is not None):
            leaves.add_all(problem, more)
            if pods is not None and pod_more is not None:
                pods.add_all(problem, pod_more)
            return leaves, pods, slack
    return leaves, pods, 0.0


def _solution(
    problem: MappingProblem,
    best: _Incumbent,
    bound_s: float,
    rounds: list[MappingRound],
    *,
    start: float,
) -> MappingSolution:
    check_assignment(problem, best.assignment)
    solution = MappingSolution(
        objective="traffic",
        assignment=best.assignment,
        loads=loads_of(problem, best.assignment),
        hostname_loads=loads_of(problem, problem.hostname_assignment()),
        bound_s=bound_s,
        rounds=tuple(rounds),
        wall_s=time.monotonic() - start,
    )
    if solution.price_s > solution.hostname_s * (1 + 1e-9):
        raise MappingError("a mapping worse than hostname order was kept")
    return solution
