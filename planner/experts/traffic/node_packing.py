"""Each node's replicas on its GPUs again, more evenly: which node holds what stays."""

from __future__ import annotations

import numpy as np

from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.params import TRAFFIC
from meshwright.planner.experts.problem import Ids, Loads, SlotShape


def packed(gpu: Ids, expert: Ids, weight: Loads, shape: SlotShape) -> Ids:
    """GPU of every replica [replicas], nodes as in `gpu`; weight [windows, replicas] over the mean GPU load.

    The best of the packing as it is, of one from the start and of one dealt out, after exchanges. An expert's
    replicas lie on different GPUs then; there are no more of them on a node than it has GPUs.
    """
    packed_gpu = gpu.copy()
    size = shape.node_gpus
    for node in range(shape.nodes):
        members = np.flatnonzero(gpu // size == node)
        members = members[np.lexsort((members, gpu[members]))]
        node_experts, index = np.unique(expert[members], return_inverse=True)
        # Replicas share evenly: a node's part of an expert is a replica's load times how many it has.
        loads = np.zeros((1, len(weight), len(node_experts)))
        np.add.at(loads[0].T, index, weight[:, members].T)
        now = index.reshape(1, size, -1).astype(np.int64)
        # Dealt out in turn, an expert's replicas lie on different GPUs whatever their counts.
        dealt = np.sort(index).reshape(1, -1, size).swapaxes(1, 2).astype(np.int64)
        tried = [pack(loads, np.bincount(index)[None], size).slots, now.copy(), dealt.copy()]
        best, least_load = None, np.inf
        for slots in tried:
            if has_duplicates(slots)[0]:
                continue
            packing = SlotPacking(slots=slots, loads=loads)
            exchange_to_improve(
                packing, TRAFFIC.packing_exchanges, np.array([loads.sum(axis=2).max() / size])
            )
            value = float(packing.gpu_loads().max())
            if value < least_load - 1e-12:
                best, least_load = packing.slots[0], value
        if best is not None:
            packed_gpu[members[np.argsort(index, kind="stable")]] = (
                _gpus_by_expert(best) + node * size
            )
    return packed_gpu


def _gpus_by_expert(slots: Ids) -> Ids:
    """GPUs of slots [gpus, per GPU] in the order of the experts they hold, then of the GPUs."""
    flat = slots.ravel()
    return np.asarray(np.argsort(flat, kind="stable") // slots.shape[1])
