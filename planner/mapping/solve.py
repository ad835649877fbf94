"""The best mapping that is found, what it is measured against, and how good any mapping could be."""

from __future__ import annotations

import time

import numpy as np

from meshwright.errors import InternalError
from meshwright.planner.mapping.problem import IntArray, MappingProblem, check_assignment, loads_of
from meshwright.planner.mapping.relaxation.columns import (
    Pool,
    Relaxation,
    counts_of,
    pod_states,
    relax,
)
from meshwright.planner.mapping.relaxation.deepening import deepened
from meshwright.planner.mapping.relaxation.integer import Effort, whole_mapping
from meshwright.planner.mapping.relaxation.patterns import Pricer
from meshwright.planner.mapping.relaxation.pods import improve, pods_bound_s
from meshwright.planner.mapping.relaxation.two_sided import relax_two_sided
from meshwright.planner.mapping.slot_model import is_small, least_sum
from meshwright.planner.mapping.solution import (
    PROVEN,
    Incumbent,
    Limits,
    MappingRound,
    MappingSolution,
)
from meshwright.planner.mapping.starts import blocked_orders

TIME_LIMIT_S = 30.0
"""Processor seconds; what is measured in docs/fabric.md ends long before."""
LARGEST_JOINT = 300_000
"""Entries of the pods' dynamic programme; beyond it leaves and pods are not priced together."""
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


def least_traffic(
    problem: MappingProblem, *, time_limit_s: float = TIME_LIMIT_S
) -> MappingSolution:
    """The assignment with the least busy seconds over all up-links, with a bound.

    `time_limit_s` is processor time, so that a busy machine does not change the answer.

    One pod: the two-sided relaxation, holdings step by step (`deepening`), and, where no order of stages was
    found for the best of them, all patterns whose reduced cost leaves room below the incumbent.
    """
    start = time.monotonic()
    problem.check_room()
    best = Incumbent(problem)
    rounds: list[MappingRound] = []
    bound = 0.0
    if best.price_s > 0:
        orders = list(blocked_orders(problem))
        for order in orders:
            best.consider(order)
        limits = Limits(time_limit_s)
        solve = _one_pod if problem.pods == 1 else _several_pods
        bound = solve(problem, best, [best.assignment, *orders], rounds, limits)
    return _solution(problem, best, bound, rounds, start=start)


def _one_pod(
    problem: MappingProblem,
    best: Incumbent,
    orders: list[IntArray],
    rounds: list[MappingRound],
    limits: Limits,
) -> float:
    """Offers the best mapping that is found; returns a bound."""
    found = relax_two_sided(problem, [counts_of(problem, order) for order in orders], limits.stop)
    bound = deepened(problem, found, best, rounds, limits)
    return _whole(problem, found, best, rounds, bound_s=bound, limits=limits)


def _several_pods(
    problem: MappingProblem,
    best: Incumbent,
    orders: list[IntArray],
    rounds: list[MappingRound],
    limits: Limits,
) -> float:
    """The same with pods: small instances as one model; else leaves alone and pods alone first, both together
    where they are few.
    """
    small = is_small(problem) and best.price_s > 0
    exact = least_sum(problem, best.assignment, best.price_s) if small else None
    if exact is not None:
        best.consider(exact[0])
        if best.price_s <= exact[1] * (1 + PROVEN):
            return exact[1]
    leaves, steps = problem.without_pods(), list[MappingRound]()
    alone = Incumbent(leaves)
    for order in orders:
        alone.consider(order)
    starts = [counts_of(problem, order) for order in orders]
    bound = deepened(leaves, relax_two_sided(leaves, starts, limits.stop), alone, steps, limits)
    bound += pods_bound_s(problem, orders, limits.stop)
    improve(problem, best, orders, alone.assignment, bound_s=bound, limits=limits)
    if pod_states(problem) > LARGEST_JOINT:
        return min(bound, best.price_s)
    starts.append(counts_of(problem, best.assignment))
    found = relax(problem, starts, stop=limits.stop, enough=CLOSE_ENOUGH)
    bound = max(bound, found.bound_s)
    return _whole(problem, found, best, rounds, bound_s=bound, limits=limits)


def _whole(
    problem: MappingProblem,
    found: Relaxation,
    best: Incumbent,
    rounds: list[MappingRound],
    *,
    bound_s: float,
    limits: Limits,
) -> float:
    """Integer programmes over growing sets of columns; returns the bound that they prove."""
    bound = min(bound_s, best.price_s)
    demand = np.full(problem.stages, problem.slots)
    leaves, pods, slack = found.leaves, found.pods, 0.0
    for limit, effort in EFFORT:
        left_s, gap_s = limits.left_s, best.price_s - bound
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
        columns, wall_s = len(leaves.kind), limits.elapsed_s
        rounds.append(
            MappingRound(
                columns=columns, exhaustive=exhaustive, price_s=best.price_s, wall_s=wall_s
            )
        )
        if exhaustive and whole.complete:
            break
    return bound


def _enumerated(
    problem: MappingProblem, found: Relaxation, best: Incumbent, limit: int
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
    best: Incumbent,
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
        raise InternalError("a mapping worse than hostname order was kept")
    return solution
