"""The mapping with the least traffic: stages and replicas go where up-links are busy for the least time.

    min   sum over leaves and pods b of   s_per_byte_b * bytes_b(assignment)
    over  assignments of S stages x N slots to leaves, at most free_l slots in leaf l

bytes_b counts what every group of ranks sends up the link of b (`problem.loads_of`). A pattern of a leaf,
its slots of each stage, has a separable cost, so the problem is one of choosing patterns
(`relax`).

One pod: column generation over leaf patterns and stage partitions gives a bound; from it, everything that a
mapping within delta of the bound can be made of is listed, and an integer programme selects from it or
raises the bound by delta (`deepened`). Several pods: what leaves cost and what pods cost add
up, so the least of one plus the least of the other is a bound; mappings begin with the best for leaves
alone, in which whole leaves then change stages for the sake of the pods (`exchanged`). Small
instances that are not proven by then are one CP-SAT model of slots.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, pairwise
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.mapping.patterns import relax
from meshwright.planner.mapping.pods import deepened, exchanged, slot_bound_s
from meshwright.planner.mapping.problem import (
    FloatArray,
    IntArray,
    MappingProblem,
    Traffic,
    check_assignment,
    counts_of,
    loads_of,
    pod_counts_of,
)
from meshwright.planner.mapping.slots import (
    PROVEN,
    Incumbent,
    Instance,
    MappingRound,
    MappingSolution,
    WorkLimits,
    idle_nodes,
    ranks_of,
    regular_orders,
)
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


__all__ = ["TIME_LIMIT_S", "MappingProblem", "Traffic", "least_traffic"]


# One CP-SAT model of a small mapping problem: a leaf for every slot of the grid, priced group by group.
#
#     each slot of the grid is in one leaf       sum_l x_{s,j,l} = 1
#     in the room of every leaf                  sum_{s,j} x_{s,j,l} <= free_l
#     what a group sends up a block              table[k] for its k members inside it
#
# It says what `problem.loads_of` says of an assignment, for every kind of group.


UNITS = 10**9
"""Range of objectives that are times: far finer than the tolerance of a proof."""


# Which instances one model holds, and how long it is solved.


LARGEST_CELLS = 200
"""Stages times slots times leaves; larger models prove nothing in seconds."""
SLOT_MODEL_WORK = 2.0
"""CP-SAT's deterministic time for one objective, about seconds."""


def is_small(problem: MappingProblem) -> bool:
    """Whether one model holds the instance.

    Parameters
    ----------
    problem
        Counted by `LARGEST_CELLS`.
    """
    return problem.needed * len(problem.leaf_slots) <= LARGEST_CELLS


class SlotModel:
    """Slots in leaves: the variables, and the constraints that every objective shares.

    Attributes
    ----------
    x
        Whether a slot is in a leaf, `x[stage][slot][leaf]`.
    cells
        The rows of `x` one after the other, `cells[stage * slots + slot][leaf]`.
    levels
        The leaves of every pod, and those of every leaf.
    """

    def __init__(self, problem: MappingProblem) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self.problem = problem
        self.model = cp_model.CpModel()
        self.x = [[self._cell() for _ in range(problem.slots)] for _ in range(problem.stages)]
        self.cells = [cell for row in self.x for cell in row]
        for leaf, free in enumerate(problem.leaf_slots):
            self.model.add(sum(cell[leaf] for cell in self.cells) <= free)
        t = problem.traffic
        self._alike = max(t.context_slots, t.expert_slots) == 1
        if self._alike:
            self._order_replicas()
        pods = [np.flatnonzero(problem.pod_of == pod).tolist() for pod in range(problem.pods)]
        leaves = [[leaf] for leaf in range(len(problem.leaf_slots))]
        self.levels: list[list[list[int]]] = [pods, leaves]

    def _cell(self) -> list[cp_model.IntVar]:
        """A slot in one of the leaves."""
        cell = [self.model.new_bool_var("") for _ in self.problem.leaf_slots]
        self.model.add_exactly_one(cell)
        return cell

    def _order_replicas(self) -> None:
        """Replicas may change places: the leaves of the first stage do not fall."""
        first = [sum(leaf * x for leaf, x in enumerate(cell)) for cell in self.x[0]]
        for replica, following in pairwise(first):
            self.model.add(replica <= following)

    def search(self, objective: Any, start: IntArray) -> tuple[IntArray, float, float] | None:
        """An assignment of least objective, its value and the bound; None where nothing was found.

        Parameters
        ----------
        objective
            An expression of the model's variables, minimised.
        start
            The leaf of every slot to begin with, shape [stages, slots]: a hint.
        """
        from meshwright.planner.solvers.or_tools import cp_model

        self.model.clear_hints()  # type: ignore[no-untyped-call]
        if self._alike:
            start = start[:, np.argsort(start[0], kind="stable")]
        for cell, used_leaf in zip(self.cells, start.ravel().tolist(), strict=True):
            for leaf, x in enumerate(cell):
                self.model.add_hint(x, leaf == used_leaf)
        self.model.minimize(objective)
        solver = repeatable_solver(work=SLOT_MODEL_WORK)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        chosen = [[solver.boolean_value(x) for x in cell] for cell in self.cells]
        assignment = np.array(chosen).argmax(axis=1).reshape(start.shape)
        value = solver.objective_value
        bound = value if status == cp_model.OPTIMAL else solver.best_objective_bound
        return assignment, value, bound

    def sent_up(self, unit_s: float) -> Iterator[Any]:
        """What every group sends up the link of each block, in whole units of time.

        Each term is rounded, by half a unit at most.

        Parameters
        ----------
        unit_s
            Seconds that an objective of 1 stands for, above 0.
        """
        costs = (self.problem.pod_s_per_byte, self.problem.leaf_s_per_byte)
        for blocks, level_cost in zip(self.levels, costs, strict=True):
            for block, s_per_byte in zip(blocks, level_cost, strict=True):
                yield from self._sent_by_groups(block, s_per_byte, unit_s)

    def _sent_by_groups(self, block: list[int], s_per_byte: float, unit_s: float) -> list[Any]:
        inside = [sum(cell[leaf] for leaf in block) for cell in self.cells]
        terms = []
        for members, sent in _groups(self.problem):
            table = np.rint(sent * s_per_byte / unit_s).astype(np.int64)
            if table.any():
                terms.append(self._sent(sum(inside[cell] for cell in members), table))
        return terms

    def _sent(self, inside: Any, table: IntArray) -> cp_model.IntVar:
        """table[k] for k members inside a block."""
        members = self.model.new_int_var(0, len(table) - 1, "")
        self.model.add(members == inside)
        sent = self.model.new_int_var(0, int(table.max()), "")
        self.model.add_element(members, table.tolist(), sent)
        return sent


def least_sum_in(
    slots: SlotModel, start: IntArray, start_s: float
) -> tuple[IntArray, float] | None:
    """An assignment whose up-links are busy for the least time in all, and a bound on every other.

    Parameters
    ----------
    slots
        What it must keep to: the constraints that the model has already.
    start
        An assignment to begin with, shape [stages, slots].
    start_s
        What it takes, s; the unit of the objective is a fixed part of it.

    Returns
    -------
    tuple[IntArray, float] or None
        The assignment and the bound in s; None where nothing was found in time.
    """
    unit_s = start_s / UNITS
    terms = list(slots.sent_up(unit_s))
    solution = slots.search(sum(terms), start)
    if solution is None:
        return None
    assignment, _, bound = solution
    return assignment, max(0.0, (bound - 0.5 * len(terms)) * unit_s)


def _groups(problem: MappingProblem) -> Iterator[tuple[list[int], FloatArray]]:
    """Every group's cells, stage by stage from 0, and the bytes that k of them in a block send up."""
    for groups, table in _tables(problem):
        for group in groups.tolist():
            yield group, table


def _tables(problem: MappingProblem) -> Iterator[tuple[IntArray, FloatArray]]:
    """Kinds of groups, cells [groups, members], each with the bytes that k members send up."""
    t = problem.traffic
    grid = np.arange(problem.needed).reshape(problem.stages, problem.slots)
    yield _cut(grid, t.ring_bytes)
    if t.context_slots > 1:
        yield _cut(grid.reshape(-1, t.context_slots), t.context_bytes)
    if t.expert_slots > 1:
        k = np.arange(t.expert_slots + 1)
        table = t.expert_bytes * k * (t.expert_slots - k) / t.expert_slots
        yield grid.reshape(-1, t.expert_slots), table
    if t.expert_ring_bytes:
        rings = grid.reshape(problem.stages, -1, t.expert_slots).transpose(0, 2, 1)
        yield _cut(rings.reshape(-1, problem.slots // t.expert_slots), t.expert_ring_bytes)
    if problem.stages > 1:
        neighbours = np.stack([grid[:-1].ravel(), grid[1:].ravel()], axis=1)
        yield _cut(neighbours, t.hop_bytes)
        yield _cut(np.stack([grid[-1], grid[0]], axis=1), t.wrap_bytes)


def _cut(groups: IntArray, sent: float) -> tuple[IntArray, FloatArray]:
    """Groups that send the same whichever members a block holds, if it holds some but not all."""
    members = groups.shape[1]
    cut = np.arange(members + 1) % members > 0
    return groups, np.where(cut, sent, 0.0)


TIME_LIMIT_S = 30.0
"""Processor seconds; what is measured in docs/fabric.md ends long before."""


# How much is spent on the pods of one instance.


LARGEST_POD_TABLE = 30_000_000
"""States of the pods' dynamic programme, 240 MB; beyond it pods cost nothing in the bound."""
TRIES_PER_CELL = 300
"""Exchanges tried, by leaf and stage: more did not help on the benchmark cases."""
TRIES_PER_S = 20_000
"""Of the time limit: a short one leaves fewer, whatever the machine."""
MOST_TRIES = 300_000


def least_traffic(
    problem: MappingProblem,
    *,
    time_limit_s: float = TIME_LIMIT_S,
) -> MappingSolution:
    """The assignment with the least busy seconds over all up-links that is found, with a proven bound.

    Never worse than hostname order.

    Parameters
    ----------
    problem
        With any number of pods.
    time_limit_s
        Processor seconds, so that a busy machine does not change the answer.

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
            bound_s = _several_pods(problem, best, orders, limits)
        if best.price_s > bound_s * (1 + PROVEN) and is_small(problem):
            bound_s = max(bound_s, _exact(problem, best))
    check_assignment(problem, best.assignment)
    solution = MappingSolution(
        objective="traffic",
        assignment=best.assignment,
        loads=loads_of(problem, best.assignment),
        hostname_loads=loads_of(problem, problem.hostname_assignment()),
        bound_s=min(bound_s, best.price_s),
        rounds=tuple(rounds),
        wall_s=time.monotonic() - start,
    )
    if solution.price_s > solution.hostname_s * (1 + 1e-9):
        raise InternalError("a mapping worse than hostname order was kept")
    return solution


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
) -> float:
    """The bound of leaves alone plus that of pods alone, s; the incumbent takes mappings that suit both."""
    leaves = problem.without_pods()
    leaf_best = Incumbent(leaves)
    for order in orders:
        leaf_best.consider(order)
    bound_s = _one_pod(leaves, leaf_best, orders, [], limits)
    best.consider(leaf_best.assignment)
    pods = problem.only_pods()
    if pods.table_states <= LARGEST_POD_TABLE:
        starts = [pod_counts_of(problem, order) for order in orders]
        bound_s += slot_bound_s(pods, starts, limits.relaxed)
    tries = min(
        MOST_TRIES,
        TRIES_PER_CELL * problem.stages * len(problem.leaf_slots),
        int(TRIES_PER_S * limits.limit_s),
    )
    best.offer(exchanged(problem, counts_of(problem, leaf_best.assignment), tries))
    return bound_s


def _exact(problem: MappingProblem, best: Incumbent) -> float:
    """A bound by one CP-SAT model of all slots, s; the incumbent takes its solution."""
    exact = least_sum_in(SlotModel(problem), best.assignment, best.price_s)
    if exact is None:
        return 0.0
    assignment, bound_s = exact
    best.consider(assignment)
    return bound_s


# Which nodes to keep free: those whose idling costs the least traffic.


Solved = tuple[Instance, MappingSolution]
Solver = Callable[[ClusterSpec, int], Solved]
"""Maps onto a cluster with some slots' worth of nodes left over."""


# How many choices of spare nodes are mapped.


MOST_SPARE_CHOICES = 40
"""Ways to take the nodes from the leaves that are all tried; beyond, one node after the other."""


def with_spares(cluster: ClusterSpec, spares: int, solve: Solver) -> Solved:
    """The best mapping that leaves so many whole nodes without a rank.

    Slots that are nodes leave nodes free by themselves, and which ones is part of the mapping. Where a node
    holds several slots, what is left over may be parts of nodes: then whole nodes are taken out, of every
    choice of leaves the best. Raises InfeasibleError where no choice leaves room.

    Parameters
    ----------
    cluster
        Listed, where whole nodes may have to be taken out.
    spares
        Nodes that stay without a rank, at least 0.
    solve
        Maps onto a cluster that leaves room for so many nodes; raises InfeasibleError where it does not.
    """
    solved = solve(cluster, spares)
    if spares == 0 or _whole_nodes_free(cluster, solved) >= spares:
        return solved
    # Listed nodes with all their GPUs free, by pod and leaf.
    leaves: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if node.free_gpus in (None, cluster.gpus_per_node):
            leaves.setdefault(f"{node.pod or ''}/{node.leaf or ''}", []).append(index)
    if comb(len(leaves) + spares - 1, spares) <= MOST_SPARE_CHOICES:
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
