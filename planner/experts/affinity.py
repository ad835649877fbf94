"""Which node of a placement stands where: tokens of a source rank find their experts on its node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.experts.problem import ExpertError, Loads, Shape, Slots
from planner.experts.rows import Solved


def check_affinity(affinity: Loads, layers: int, experts: int, shape: Shape) -> None:
    """Raises ExpertError unless affinity is finite, not negative, of shape [layers, GPUs, experts]."""
    asked = (layers, shape.gpus, experts)
    if affinity.shape != asked:
        raise ExpertError(
            f"affinity: must have the shape [layers, source ranks, experts], one rank for each GPU, "
            f"{list(asked)}; got {list(affinity.shape)}"
        )
    if not np.isfinite(affinity).all() or affinity.min() < 0:
        raise ExpertError("affinity: token counts must be finite and not negative")


def local_choices(slots: Slots, affinity: Loads, nodes: int) -> Loads:
    """Choices [sources' nodes, experts' nodes] of one layer; slots [gpus, per GPU].

    A rank's choices of an expert are shared evenly over its replicas, as everywhere here.
    """
    experts = affinity.shape[1]
    here = np.stack([np.bincount(node, minlength=experts) for node in slots.reshape(nodes, -1)])
    share = here / np.maximum(here.sum(axis=0), 1)
    return np.asarray(affinity.reshape(nodes, -1, experts).sum(axis=1) @ share.T)


def cross_node_share(slots: Slots, affinity: Loads, nodes: int) -> float:
    """Part of all choices of one layer whose expert is not on the source's node."""
    choices = local_choices(slots, affinity, nodes)
    return float(1 - np.trace(choices) / max(choices.sum(), 1e-300))


def near_sources(solved: Solved, affinity: Loads, shape: Shape) -> Solved:
    """The placement with whole nodes exchanged, in pairs, while more choices stay on the source's node.

    Nodes are alike: balance, bound, replicas and the nodes that a token touches stay as they are.
    """
    size = shape.gpus // shape.nodes
    slots = solved.slots.copy()
    for layer, counts in enumerate(affinity):
        choices = local_choices(slots[layer], counts, shape.nodes)
        order = np.arange(shape.nodes)
        while True:
            now = choices[:, order]
            kept = np.diag(now)
            gain = np.triu(now + now.T - kept[:, None] - kept[None, :], 1)
            a, b = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[a, b] <= 1e-9 * choices.sum():
                break
            order[[a, b]] = order[[b, a]]
        blocks = slots[layer].reshape(shape.nodes, size, -1)
        slots[layer] = blocks[order].reshape(slots[layer].shape)
    return replace(solved, slots=slots)
