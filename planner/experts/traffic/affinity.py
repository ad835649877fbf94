"""Which node of a placement stands where: tokens of a source rank find their experts on its node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.errors import InputError
from meshwright.planner.experts.balance.rows import Solved
from meshwright.planner.experts.problem import Loads, Slots, SlotShape

_UNIT = 10**9


def check_affinity(affinity: Loads, layers: int, experts: int, shape: SlotShape) -> None:
    """Raises InputError unless affinity is finite, not negative, of shape [layers, GPUs, experts]."""
    expected = (layers, shape.gpus, experts)
    if affinity.shape != expected:
        raise InputError(
            f"affinity: must have the shape [layers, source ranks, experts], one rank for each GPU, "
            f"{list(expected)}; got {list(affinity.shape)}"
        )
    if not np.isfinite(affinity).all() or affinity.min() < 0:
        raise InputError("affinity: token counts must be finite and not negative")


def local_choices(slots: Slots, affinity: Loads, nodes: int) -> Loads:
    """Choices that stay if the experts of a node stood at a source's node, [sources' nodes, experts' nodes].

    For one layer's slots [gpus, per GPU]. Replicas serve even shares, near sources first.
    """
    experts = affinity.shape[1]
    replicas = np.stack([np.bincount(node, minlength=experts) for node in slots.reshape(nodes, -1)])
    at_node = affinity.reshape(nodes, -1, experts).sum(axis=1)
    share = replicas * (at_node.sum(axis=0) / np.maximum(replicas.sum(axis=0), 1))
    return np.stack([np.minimum(source, share).sum(axis=1) for source in at_node])


def cross_node_share(slots: Slots, affinity: Loads, nodes: int) -> float:
    """Part of all choices of one layer that leave the source's node, replicas serving near sources first."""
    local = np.trace(local_choices(slots, affinity, nodes))
    return float(1 - local / max(affinity.sum(), 1e-300))


def near_sources(solved: Solved, affinity: Loads, shape: SlotShape) -> Solved:
    """The placement with whole nodes in the order in which the most choices stay: an assignment problem.

    Nodes are alike: balance, bound, replicas and the nodes that a token touches stay as they are.
    """
    slots = solved.slots.copy()
    for layer, counts in enumerate(affinity):
        order = best_order(local_choices(slots[layer], counts, shape.nodes))
        blocks = slots[layer].reshape(shape.nodes, shape.node_gpus, -1)
        slots[layer] = blocks[order].reshape(slots[layer].shape)
    return replace(solved, slots=slots)


def best_order(benefit: Loads) -> Slots:
    """Which node goes to each place, for the largest sum of kept [places, nodes]; who stays, among equals."""
    from ortools.graph.python import linear_sum_assignment

    nodes = len(benefit)
    cost = np.rint((1 - benefit / max(float(benefit.max()), 1e-300)) * _UNIT).astype(np.int64)
    cost[np.arange(nodes), np.arange(nodes)] -= 1
    place, node = (x.ravel() for x in np.indices(cost.shape))
    problem = linear_sum_assignment.SimpleLinearSumAssignment()
    problem.add_arcs_with_cost(place, node, cost.ravel())
    if problem.solve() != problem.OPTIMAL:
        raise RuntimeError("the assignment of nodes to sources did not end with an optimum")
    return np.array([problem.right_mate(i) for i in range(nodes)], dtype=np.int64)
