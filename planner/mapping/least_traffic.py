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
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.mapping.instance import (
    PROVEN,
    Incumbent,
    Instance,
    MappingRound,
    MappingSolution,
    WorkLimits,
    idle_nodes,
    ranks_of,
)
from meshwright.planner.mapping.patterns import relax
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
from meshwright.planner.mapping.slot_model import is_small, least_sum
from meshwright.planner.mapping.slots import regular_orders

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
