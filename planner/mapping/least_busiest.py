"""A mapping that keeps the busiest up-link short, with a bound.

    min  max over leaves and pods b of  s_per_byte_b * bytes_b(assignment)

A block whose link is busy for at most t hosts so many slots at most, by the cheapest pattern of each sum of
slots; all leaves together must host the job, and so must all pods. The least t with enough room is a bound.
Mappings begin with the least traffic; then bundles of leaves above a ceiling are forbidden, step by step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.mapping.assign import assignment_of
from meshwright.planner.mapping.least_traffic import TIME_LIMIT_S, least_traffic
from meshwright.planner.mapping.problem import IntArray, MappingProblem, counts_of, loads_of
from meshwright.planner.mapping.regular_orders import regular_orders
from meshwright.planner.mapping.relaxation.columns import Relaxation, relax
from meshwright.planner.mapping.relaxation.ordering import ordered_counts
from meshwright.planner.mapping.relaxation.patterns import PatternPricing, leaf_kinds
from meshwright.planner.mapping.relaxation.selection import (
    BundleCandidates,
    candidates_within,
    cheapest_selection,
)
from meshwright.planner.mapping.slot_model import UNITS, SlotModel, is_small
from meshwright.planner.mapping.solution import PROVEN, MappingSolution
from meshwright.planner.solvers.clock import is_over
from meshwright.planner.solvers.highs import TreeLimits


@dataclass(frozen=True, kw_only=True)
class CeilingParams:
    """How ceilings are tried."""

    steps: int = 6
    """Ceilings: the first just above the bound, then halves of what is left, down to 3 % of it."""
    delta_shares: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    """Of the relaxation's value: bundles up to this reduced cost are listed, if not too many."""
    tree_nodes: int = 1
    """Of one integer programme: 10 or 100 found no shorter link on the benchmark cases."""
    tree_s: float = 10.0
    largest_table: int = 30_000_000
    """States of the pods' dynamic programme, 240 MB; beyond it pods do not count for the bound."""


DEFAULT_CEILINGS = CeilingParams()


def least_busiest(
    problem: MappingProblem,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    params: CeilingParams = DEFAULT_CEILINGS,
) -> MappingSolution:
    """An assignment that keeps the busiest up-link short, never worse than hostname order.

    Parameters
    ----------
    problem
        With any number of pods; small instances are exact by CP-SAT.
    time_limit_s
        Processor seconds; the least traffic, from which this starts, may take half of them.
    params
        How ceilings are tried.

    Raises
    ------
    InfeasibleError
        Where fewer slots are free than needed.
    """
    start, deadline = time.monotonic(), time.process_time() + time_limit_s
    traffic = least_traffic(problem, time_limit_s=0.5 * time_limit_s)
    starts = [problem.hostname_assignment(), traffic.assignment, *regular_orders(problem)]
    best = _BusiestIncumbent(problem, starts)
    links = len(problem.leaf_slots) + (problem.pods if problem.pods > 1 else 0)
    bound_s = traffic.bound_s / links
    if best.price_s > 0:
        bound_s = max(bound_s, bound_by_room(problem, params.largest_table))
    if not best.meets(bound_s) and is_small(problem):
        bound_s = max(bound_s, best.exact())
    if not best.meets(bound_s):
        _try_ceilings(problem, best, bound_s, deadline, params)
    return replace(
        traffic,
        objective="busiest",
        assignment=best.assignment,
        loads=loads_of(problem, best.assignment),
        bound_s=min(bound_s, best.price_s),
        wall_s=time.monotonic() - start,
    )


def bound_by_room(problem: MappingProblem, largest_table: int) -> float:
    """Largest seconds of a link below which the leaves, or the pods, do not host the job."""
    # Where a leaf is does not matter to its own link, so that leaves of all pods are alike.
    bound_s = _least_ceiling(problem.without_pods())
    pods = problem.only_pods()
    if problem.pods > 1 and pods.table_states <= largest_table:
        bound_s = max(bound_s, _least_ceiling(pods))
    return bound_s


def _least_ceiling(problem: MappingProblem) -> float:
    """The least ceiling on every leaf's link at which the leaves have room for the job, s."""
    kinds = leaf_kinds(problem)
    least_s = PatternPricing(problem, kinds).least_by_use()
    ceilings = np.unique(least_s[np.isfinite(least_s)])
    members = np.array([len(kind.members) for kind in kinds])
    slots = np.arange(least_s.shape[1])

    def room(ceiling_s: float) -> int:
        hosted = np.where(least_s <= ceiling_s * (1 + 1e-12), slots, 0)
        return int(members @ hosted.max(axis=1))

    low, high = 0, len(ceilings) - 1
    while low < high:
        middle = (low + high) // 2
        if room(float(ceilings[middle])) >= problem.needed:
            high = middle
        else:
            low = middle + 1
    return float(ceilings[low])


class _BusiestIncumbent:
    """The assignment with the least busy busiest link so far, and of equal ones the least traffic."""

    def __init__(self, problem: MappingProblem, starts: Iterable[IntArray]) -> None:
        self._problem = problem
        self.price_s = self._total_s = np.inf
        for start in starts:
            self.consider(start)

    def meets(self, bound_s: float) -> bool:
        """Whether nothing better is possible above the bound."""
        return self.price_s <= bound_s * (1 + PROVEN)

    def consider(self, assignment: IntArray) -> bool:
        """Takes an assignment if it is better; whether its busiest link is less busy."""
        loads = loads_of(self._problem, assignment)
        shorter = loads.busiest_s < self.price_s * (1 - 1e-12)
        if shorter or (loads.busiest_s <= self.price_s and loads.total_s < self._total_s):
            self.assignment = assignment
            self.price_s, self._total_s = loads.busiest_s, loads.total_s
        return shorter

    def exact(self) -> float:
        """A bound by one CP-SAT model of all slots, s; takes its solution."""
        slots, unit_s = SlotModel(self._problem), self.price_s / UNITS
        busiest = slots.model.new_int_var(0, 2 * UNITS, "")
        most_terms = 0
        for terms in slots.sent_up(unit_s):
            slots.model.add(sum(terms) <= busiest)
            most_terms = max(most_terms, len(terms))
        solution = slots.search(busiest, self.assignment)
        if solution is None:
            return 0.0
        assignment, _, bound = solution
        self.consider(assignment)
        return max(0.0, (bound - 0.5 * most_terms) * unit_s)


def _try_ceilings(
    problem: MappingProblem,
    best: _BusiestIncumbent,
    bound_s: float,
    deadline: float,
    params: CeilingParams,
) -> None:
    """Looks for mappings between bound and price, in ever shorter lists of bundles and partitions.

    Long lists of bundles leave no room to list the partitions, and what is selected then may not be cut into
    stages; a list with all partitions says all that a shorter one would.
    """
    leaves = problem.without_pods()
    relaxation = relax(leaves, [counts_of(problem, best.assignment)])
    for share in params.delta_shares:
        if best.meets(bound_s) or time.process_time() > deadline or is_over():
            break
        delta_s = share * relaxation.value_s
        candidates = candidates_within(leaves, relaxation, delta_s, most_s=best.price_s)
        if candidates is not None:
            _bisect(
                problem,
                best,
                bound_s,
                deadline=deadline,
                relaxation=relaxation,
                candidates=candidates,
                params=params,
            )
            if all(partitions is not None for partitions in candidates.partitions):
                break


def _bisect(
    problem: MappingProblem,
    best: _BusiestIncumbent,
    bound_s: float,
    *,
    deadline: float,
    relaxation: Relaxation,
    candidates: BundleCandidates,
    params: CeilingParams,
) -> None:
    """Bisection between bound and price: the cheapest selection of bundles that keep to a ceiling."""
    leaves = problem.without_pods()
    tree = TreeLimits(nodes=params.tree_nodes, seconds=params.tree_s)
    low_s = bound_s
    for step in range(params.steps):
        if best.meets(low_s) or time.process_time() > deadline or is_over():
            break
        # At first just above the bound: where leaves have few patterns it is often met.
        ceiling_s = 0.5 * (low_s + best.price_s) if step else low_s * (1 + PROVEN)
        below = [bundle for bundle in candidates.bundles if bundle.cost_s <= ceiling_s]
        selection = cheapest_selection(leaves, relaxation, replace(candidates, bundles=below), tree)
        counts = None
        if selection.bundles:
            counts = ordered_counts(leaves, relaxation.kinds, selection.bundles)
            if counts is None and step:
                break
        if counts is None or not best.consider(assignment_of(problem, counts)):
            low_s = ceiling_s
