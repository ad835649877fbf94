"""What others start with: experts in order, and the greedy balancer of DeepSeek's EPLB.

The greedy is written from its description (github.com/deepseek-ai/EPLB): the hottest replica gets the next
slot, then replicas go by falling load to the least loaded GPU with room; groups go to nodes first, whole.
It does not forbid two replicas of an expert on one GPU.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.problem import Ids, Loads, Slots, SlotShape


def in_order(layers: int, experts: int, shape: SlotShape) -> Slots:
    """Slot s holds expert s modulo their number, as vLLM, SGLang and Megatron start.

    Returns
    -------
    Slots
        [layers, gpus, slots of a GPU].
    """
    row = np.arange(shape.slots) % experts
    return np.tile(row, (layers, 1)).reshape(layers, shape.gpus, shape.per_gpu)


def greedy_placement(load: Loads, shape: SlotShape, groups: int = 1) -> Slots:
    """The greedy balancer's placement of one layer.

    Parameters
    ----------
    load
        Of each expert, [experts].
    shape
        Slots, GPUs and nodes.
    groups
        Routing groups kept whole on a node; 1 for none. They divide evenly over the nodes.

    Returns
    -------
    Slots
        [gpus, slots of a GPU].
    """
    nodes = shape.nodes if groups > 1 else 1
    size = len(load) // groups
    of_groups = load.reshape(groups, size).sum(axis=1)
    rows = []
    for part in _least_loaded(of_groups, nodes):
        own = np.concatenate([np.arange(group * size, (group + 1) * size) for group in part])
        counts = greedy_counts(load[own][None], shape.slots // nodes, shape.slots)[0]
        replicas = np.repeat(own, counts)
        weights = np.repeat(load[own] / counts, counts)
        rows += [replicas[gpu] for gpu in _least_loaded(weights, shape.gpus // nodes)]
    return np.stack(rows)


def _least_loaded(weights: Loads, bins: int) -> list[Ids]:
    """Items to bins of one size: falling weights, each to the lightest bin with room."""
    room = np.full(bins, len(weights) // bins)
    load = np.zeros(bins)
    chosen: list[list[int]] = [[] for _ in range(bins)]
    for item in np.argsort(-weights, kind="stable"):
        target = int(np.argmin(np.where(room > 0, load, np.inf)))
        chosen[target].append(int(item))
        room[target] -= 1
        load[target] += weights[item]
    return [np.array(items, dtype=np.int64) for items in chosen]
