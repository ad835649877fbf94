"""The mapping with the least traffic: stages and replicas go where up-links are busy for the least time.

    min   sum over leaves and pods b of   s_per_byte_b * bytes_b(assignment)
    over  assignments of S stages x N slots to leaves, at most free_l slots in leaf l

bytes_b counts what every group of ranks sends up the link of b (`problem.loads_of`). A pattern of a leaf,
its slots of each stage, has a separable cost, so the problem is one of choosing patterns
(`relaxation.columns`).

One pod: column generation over leaf patterns and stage partitions gives a bound; from it, everything that a
mapping within delta of the bound can be made of is listed, and an integer programme selects from it or
raises the bound by delta (`relaxation.deepening`). Several pods: what leaves cost and what pods cost add
up, so the least of one plus the least of the other is a bound; mappings begin with the best for leaves
alone, in which whole leaves then change stages for the sake of the pods (`relaxation.exchange`). Small
instances that are not proven by then are one CP-SAT model of slots (`slot_model`).

Two stages of two slots on leaves of 3 and 1: one stage lies whole in the first leaf, the other is cut, so
that both up-links carry its ring, 10 bytes, and one hop, 3 bytes:

>>> problem = MappingProblem(
...     stages=2, slots=2, traffic=Traffic(ring_bytes=10.0, hop_bytes=3.0), leaf_slots=(3, 1),
...     leaf_s_per_byte=(1.0, 1.0), leaf_pod=(0, 0), pod_s_per_byte=(0.0,))
>>> solution = least_traffic(problem)
>>> solution.price_s, solution.proven
(26.0, True)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import comb

import numpy as np

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.mapping.bundles import (
    BundleCandidates,
    candidates_within,
    cheapest_selection,
    ordered_counts,
)
from meshwright.planner.mapping.instance import (
    PROVEN,
    Incumbent,
    Instance,
    MappingRound,
    MappingSolution,
    WorkLimits,
    assignment_of,
    idle_nodes,
    ranks_of,
)
from meshwright.planner.mapping.patterns import PatternPricing, Relaxation, leaf_kinds, relax
from meshwright.planner.mapping.pods import deepened, exchanged, slot_bound_s
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    Traffic,
    check_assignment,
    counts_of,
    loads_of,
    pod_counts_of,
)
from meshwright.planner.mapping.slot_model import UNITS, SlotModel, is_small, least_sum
from meshwright.planner.mapping.slots import regular_orders
from meshwright.planner.solvers.clock import is_over
from meshwright.planner.solvers.linear_program import TreeLimits

__all__ = ["TIME_LIMIT_S", "MappingProblem", "Traffic", "least_traffic"]

TIME_LIMIT_S = 30.0
"""Processor seconds; what is measured in docs/fabric.md ends long before."""


@dataclass(frozen=True, kw_only=True)
class SeveralPodsParams:
    """How much is spent on the pods of one instance."""

    largest_table: int = 30_000_000
    """States of the pods' dynamic programme, 240 MB; beyond it pods cost nothing in the bound."""
    tries_per_cell: int = 300
    """Exchanges tried, by leaf and stage: more did not help on the benchmark cases."""
    tries_per_s: int = 20_000
    """Of the time limit: a short one leaves fewer, whatever the machine."""
    most_tries: int = 300_000


DEFAULT_PODS = SeveralPodsParams()


def least_traffic(
    problem: MappingProblem,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    params: SeveralPodsParams = DEFAULT_PODS,
) -> MappingSolution:
    """The assignment with the least busy seconds over all up-links that is found, with a proven bound.

    Never worse than hostname order.

    Parameters
    ----------
    problem
        With any number of pods.
    time_limit_s
        Processor seconds, so that a busy machine does not change the answer.
    params
        Used with several pods only.

    Raises
    ------
    InfeasibleError
        Where fewer slots are free than needed.
    """
    start = time.monotonic()
    problem.check_room()
    best = Incumbent(problem)
    rounds: list[MappingRound] = []
    bound_s = 0.0
    if best.price_s > 0:
        orders = list(regular_orders(problem))
        for order in orders:
            best.consider(order)
        orders.insert(0, best.assignment)
        limits = WorkLimits(time_limit_s)
        if problem.pods == 1:
            bound_s = _one_pod(problem, best, orders, rounds, limits)
        else:
            bound_s = _several_pods(problem, best, orders, limits, params)
        if best.price_s > bound_s * (1 + PROVEN) and is_small(problem):
            bound_s = max(bound_s, _exact(problem, best))
    return _solution(problem, best, min(bound_s, best.price_s), rounds, start=start)


def _one_pod(
    problem: MappingProblem,
    best: Incumbent,
    orders: Sequence[IntArray],
    rounds: list[MappingRound],
    limits: WorkLimits,
) -> float:
    """Offers mappings to the incumbent; returns a bound, s."""
    relaxation = relax(problem, [counts_of(problem, order) for order in orders], limits.relaxed)
    return deepened(problem, relaxation, best, rounds, limits)


def _several_pods(
    problem: MappingProblem,
    best: Incumbent,
    orders: Sequence[IntArray],
    limits: WorkLimits,
    params: SeveralPodsParams,
) -> float:
    """The bound of leaves alone plus that of pods alone, s; the incumbent takes mappings that suit both."""
    leaves = problem.without_pods()
    leaf_best = Incumbent(leaves)
    for order in orders:
        leaf_best.consider(order)
    bound_s = _one_pod(leaves, leaf_best, orders, [], limits)
    best.consider(leaf_best.assignment)
    pods = problem.only_pods()
    if pods.table_states <= params.largest_table:
        starts = [pod_counts_of(problem, order) for order in orders]
        bound_s += slot_bound_s(pods, starts, limits.relaxed)
    tries = min(
        params.most_tries,
        params.tries_per_cell * problem.stages * len(problem.leaf_slots),
        int(params.tries_per_s * limits.limit_s),
    )
    best.offer(exchanged(problem, counts_of(problem, leaf_best.assignment), tries))
    return bound_s


def _exact(problem: MappingProblem, best: Incumbent) -> float:
    """A bound by one CP-SAT model of all slots, s; the incumbent takes its solution."""
    exact = least_sum(problem, best.assignment, best.price_s)
    if exact is None:
        return 0.0
    assignment, bound_s = exact
    best.consider(assignment)
    return bound_s


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


# Which nodes to keep free: those whose idling costs the least traffic.


Solved = tuple[Instance, MappingSolution]
Solver = Callable[[ClusterSpec, int], Solved]
"""Maps onto a cluster with some slots' worth of nodes left over."""


@dataclass(frozen=True, kw_only=True)
class SpareParams:
    """How many choices of spare nodes are mapped."""

    most_choices: int = 40
    """Ways to take the nodes from the leaves that are all tried; beyond, one node after the other."""


DEFAULT_SPARES = SpareParams()


def with_spares(
    cluster: ClusterSpec, spares: int, solve: Solver, params: SpareParams = DEFAULT_SPARES
) -> Solved:
    """The best mapping that leaves so many whole nodes without a rank.

    Slots that are nodes leave nodes free by themselves, and which ones is part of the mapping. Where a node
    holds several slots, what is left over may be parts of nodes: then whole nodes are taken out, of every
    choice of leaves the best. Raises InfeasibleError where no choice leaves room.
    """
    solved = solve(cluster, spares)
    if spares == 0 or _whole_nodes_free(cluster, solved) >= spares:
        return solved
    leaves = _whole_nodes(cluster)
    if comb(len(leaves) + spares - 1, spares) <= params.most_choices:
        tried = _tried(
            cluster, leaves, combinations_with_replacement(sorted(leaves), spares), solve
        )
        return _best(tried, spares)
    taken: tuple[str, ...] = ()
    for _ in range(spares):
        tried = _tried(cluster, leaves, ((*taken, leaf) for leaf in sorted(leaves)), solve)
        best = min(tried, key=lambda mapping: mapping[1][1].price_s, default=None)
        if best is None:
            return _best([], spares)
        taken, solved = best
    return solved


def _best(tried: list[tuple[tuple[str, ...], Solved]], spares: int) -> Solved:
    if not tried:
        raise InfeasibleError(
            f"no choice of {spares} whole nodes as spares leaves room for the layout"
        )
    return min(tried, key=lambda mapping: mapping[1][1].price_s)[1]


def _tried(
    cluster: ClusterSpec,
    leaves: dict[str, list[int]],
    choices: Iterable[tuple[str, ...]],
    solve: Solver,
) -> list[tuple[tuple[str, ...], Solved]]:
    """The mappings without the last whole nodes of each of the chosen leaves."""
    mappings = []
    for choice in choices:
        if any(choice.count(leaf) > len(leaves[leaf]) for leaf in choice):
            continue
        removed = {node for leaf in set(choice) for node in leaves[leaf][-choice.count(leaf) :]}
        try:
            mappings.append((choice, solve(_without(cluster, removed), 0)))
        except InfeasibleError:
            continue
    return mappings


def _whole_nodes(cluster: ClusterSpec) -> dict[str, list[int]]:
    """Listed nodes with all their GPUs free, by pod and leaf."""
    nodes: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if node.free_gpus in (None, cluster.gpus_per_node):
            nodes.setdefault(f"{node.pod or ''}/{node.leaf or ''}", []).append(index)
    return nodes


def _without(cluster: ClusterSpec, removed: set[int]) -> ClusterSpec:
    """The cluster with nothing free on some nodes."""
    nodes = tuple(
        node.model_copy(update={"free_gpus": 0}) if index in removed else node
        for index, node in enumerate(cluster.nodes)
    )
    free = cluster.gpus - len(removed) * cluster.gpus_per_node
    return cluster.model_copy(update={"nodes": nodes, "gpus": free})


def _whole_nodes_free(cluster: ClusterSpec, solved: Solved) -> int:
    instance, solution = solved
    idle = idle_nodes(cluster, ranks_of(instance, solution.assignment))
    if not cluster.nodes:
        return len(idle)
    return sum(cluster.nodes[node].free_gpus in (None, cluster.gpus_per_node) for node in idle)


# A mapping that keeps the busiest up-link short, with a bound.
#
#     min  max over leaves and pods b of  s_per_byte_b * bytes_b(assignment)
#
# A block whose link is busy for at most t hosts so many slots at most, by the cheapest pattern of each sum of
# slots; all leaves together must host the job, and so must all pods. The least t with enough room is a bound.
# Mappings begin with the least traffic; then bundles of leaves above a ceiling are forbidden, step by step.


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
