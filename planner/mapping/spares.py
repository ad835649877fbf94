"""Which nodes to keep free: those whose idling costs the least traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InfeasibleError
from meshwright.planner.mapping.instance import Instance, idle_nodes, ranks_of
from meshwright.planner.mapping.solution import MappingSolution

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
