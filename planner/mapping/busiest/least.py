"""A mapping that keeps the busiest up-link short, with a bound from ceilings that no mapping keeps to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from meshwright.planner.mapping.assign import assignment_of
from meshwright.planner.mapping.busiest.bound import CeilingBound, ceiling_bounds
from meshwright.planner.mapping.problem import IntArray, MappingProblem, loads_of
from meshwright.planner.mapping.relaxation.columns import Pool, counts_of, relax
from meshwright.planner.mapping.relaxation.integer import Effort, whole_mapping
from meshwright.planner.mapping.relaxation.patterns import Pricer
from meshwright.planner.mapping.slot_model import UNITS, SlotModel, is_small
from meshwright.planner.mapping.solution import PROVEN, MappingRound, MappingSolution
from meshwright.planner.mapping.solve import TIME_LIMIT_S, least_traffic
from meshwright.planner.mapping.starts import blocked_orders

STEPS = 6
EFFORT = Effort(nodes=100, seconds=10.0)
MOST_COLUMNS = 4_000
SHARES = (0.1, 0.03, 0.01, 0.003, 0.001, 3e-4)
"""Of the relaxation's value: patterns this much dearer than the best of their kind are tried."""
BELOW = 1 - 0.4 * PROVEN
"""Of a price: what is refuted at this ceiling proves the price."""


def least_busiest(
    problem: MappingProblem, *, time_limit_s: float = TIME_LIMIT_S
) -> MappingSolution:
    """An assignment that keeps the busiest up-link short, never worse than hostname order.

    Starts from the least traffic, in half the time, and then forbids leaf patterns above a ceiling, step by
    step; small instances are exact by CP-SAT. `time_limit_s` is processor time.
    """
    start, deadline = time.monotonic(), time.process_time() + time_limit_s
    traffic = least_traffic(problem, time_limit_s=0.5 * time_limit_s)
    best = _Least(
        problem, [problem.hostname_assignment(), traffic.assignment, *blocked_orders(problem)]
    )
    rounds = list(traffic.rounds)
    links = len(problem.leaf_slots) + (problem.pods if problem.pods > 1 else 0)
    ceilings = ceiling_bounds(problem) if best.price_s > 0 else []
    bound_s = max([traffic.bound_s / links, *(one.by_room() for one in ceilings)])
    if not best.within(bound_s) and is_small(problem):
        bound_s = max(bound_s, best.exact())
    if not best.within(bound_s):
        bound_s = _refuted(ceilings, bound_s, best.price_s)
        rounds += _lower(problem, ceilings[0], best, bound_s, deadline)
        if not best.within(bound_s):
            bound_s = _refuted(ceilings, bound_s, best.price_s, steps=0)
    return replace(
        traffic,
        objective="busiest",
        assignment=best.assignment,
        loads=loads_of(problem, best.assignment),
        bound_s=min(bound_s, best.price_s),
        rounds=tuple(rounds),
        wall_s=time.monotonic() - start,
    )


class _Least:
    """The assignment with the least busy busiest link so far, and of equal ones the least traffic."""

    def __init__(self, problem: MappingProblem, starts: Iterable[IntArray]) -> None:
        self._problem = problem
        self.price_s = self._total_s = np.inf
        for start in starts:
            self.consider(start)

    def within(self, bound_s: float) -> bool:
        """Whether nothing better is left above the bound."""
        return self.price_s <= bound_s * (1 + PROVEN)

    def consider(self, assignment: IntArray) -> bool:
        """Takes an assignment if it is better; whether its busiest link is less busy."""
        loads = loads_of(self._problem, assignment)
        shorter = loads.busiest_s < self.price_s * (1 - 1e-12)
        if shorter or (loads.busiest_s <= self.price_s and loads.total_s < self._total_s):
            self.assignment, self.price_s, self._total_s = (
                assignment,
                loads.busiest_s,
                loads.total_s,
            )
        return shorter

    def exact(self) -> float:
        """The best of all, by CP-SAT; returns what none is below."""
        slots, unit_s = SlotModel(self._problem), self.price_s / UNITS
        busiest = slots.model.new_int_var(0, 2 * UNITS, "")
        terms = 0
        for block in slots.sent_up(unit_s):
            slots.model.add(sum(block) <= busiest)
            terms = max(terms, len(block))
        found = slots.search(busiest, self.assignment)
        if found is None:
            return 0.0
        self.consider(found[0])
        return max(0.0, (found[2] - 0.5 * terms) * unit_s)


def _refuted(ceilings: list[CeilingBound], low_s: float, price_s: float, steps: int = 8) -> float:
    """The highest ceiling that is refuted: just below the price, or by bisection from a known one."""
    if any(one.refutes(price_s * BELOW) for one in ceilings):
        return price_s * BELOW
    high_s = price_s
    for _ in range(steps):
        middle_s = 0.5 * (low_s + high_s)
        if any(one.refutes(middle_s) for one in ceilings):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def _lower(
    problem: MappingProblem, ceilings: CeilingBound, best: _Least, bound_s: float, deadline: float
) -> list[MappingRound]:
    """Bisection between bound and price: an integer programme over leaf patterns that keep to a ceiling."""
    start, rounds, low_s = time.monotonic(), list[MappingRound](), bound_s
    every = _likely(problem, [counts_of(problem, best.assignment)])
    demand = np.full(problem.stages, problem.slots)
    for _ in range(STEPS):
        if time.process_time() > deadline or best.price_s - low_s <= 0.001 * best.price_s:
            break
        # At first just above the bound: where blocks have few patterns it is often met.
        ceiling_s = 0.5 * (low_s + best.price_s) if rounds else low_s * (1 + PROVEN)
        ceilings.refutes(ceiling_s)
        for kind, pattern in ceilings.columns:
            every.add(problem, kind, pattern)
        pool = _below(problem, every, ceiling_s)
        whole = whole_mapping(problem, pool, None, demand=demand, effort=EFFORT)
        if whole.counts is None or not best.consider(assignment_of(problem, whole.counts)):
            low_s = ceiling_s
        wall_s = time.monotonic() - start
        rounds.append(
            MappingRound(
                columns=len(pool.kind), exhaustive=False, price_s=best.price_s, wall_s=wall_s
            )
        )
    return rounds


def _likely(problem: MappingProblem, starts: list[IntArray]) -> Pool:
    """The relaxation's columns and the patterns whose reduced cost is least, as many as are still handled."""
    found = relax(problem.without_pods(), starts)
    pricer = Pricer(problem, found.leaves.kinds)
    for share in SHARES:
        slack_s = found.leaf_rent_s + share * found.value_s
        more = pricer.within(found.leaf_prices, slack_s, MOST_COLUMNS)
        if more is not None:
            found.leaves.add_all(problem, more)
            break
    return found.leaves


def _below(problem: MappingProblem, every: Pool, ceiling_s: float) -> Pool:
    """The columns that keep a leaf's up-link below the ceiling; leaving a leaf empty always does."""
    pool = Pool(every.kinds)
    for kind in range(len(every.kinds)):
        pool.add(problem, kind, np.zeros(problem.stages, dtype=np.int64))
    for kind, pattern, cost in zip(every.kind, every.patterns, every.cost_s, strict=True):
        if cost <= ceiling_s:
            pool.add(problem, kind, pattern)
    return pool
