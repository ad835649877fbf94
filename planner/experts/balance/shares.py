"""Replica counts by how many slots the hot experts get together, where few slots lie on a GPU.

With few slots a GPU is filled by one piece of a hot expert and what is left beside it, so the size of those
pieces decides: on 64 GPUs of two slots an expert of 640 and 63 of 64 reach 1.014 where the hot one has a
piece of 10 on every GPU, and 1.315 where it has as many as its own load asks for. Limits on the load never
ask for pieces that small. Here the experts are cut into a hot and a cold part at each of the widest steps of
their loads, and the slots of the hot part are tried: inside a part the largest replica gets the next slot.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.params import SHARES
from meshwright.planner.experts.problem import Loads, Slots


def shared_counts(load: Loads, slots: int, gpus: int, fewest: Slots) -> Slots:
    """Replica counts [ways, experts] for loads [experts], the ways of one cut side by side.

    `fewest` [experts] are replicas that any placement worth having gives. Of more than
    SHARES.most_ways those with a whole number of hot pieces for every GPU stay, and others evenly spaced.
    """
    order = np.argsort(-load, kind="stable")
    cuts = _cuts(load[order], int((fewest > 1).sum()))
    by_content: dict[bytes, Slots] = {}
    for cut in cuts:
        hot, cold = order[:cut], order[cut:]
        hot_counts = _paths(load[hot], slots - len(cold), gpus)
        cold_counts = _paths(load[cold], slots - len(hot), gpus)
        least = max(int(fewest[hot].sum()), slots - len(cold) - len(cold_counts) + 1)
        most = len(hot) + len(hot_counts) - 1
        for share in _thinned(least, most, gpus, SHARES.most_ways // len(cuts)):
            counts = np.ones(len(load), dtype=np.int64)
            counts[hot] = hot_counts[share - len(hot)]
            counts[cold] = cold_counts[slots - share - len(cold)]
            by_content.setdefault(counts.tobytes(), counts)
    return np.array(list(by_content.values()), dtype=np.int64).reshape(-1, len(load))


def _cuts(falling: Loads, needed: int) -> list[int]:
    """Experts in the hot part: where loads fall by the largest factors, and those that need replicas."""
    fall = falling[:-1] / np.maximum(falling[1:], 1e-12 * max(falling[0], 1e-300))
    widest = np.argsort(-fall, kind="stable")[: SHARES.cuts] + 1
    return sorted({*widest.tolist(), needed} - {0, len(falling)})


def _paths(load: Loads, most_slots: int, most_replicas: int) -> Slots:
    """Counts [n, experts] of n = 0, 1, .. replicas more than one each, the largest replica first."""
    counts = np.ones(len(load), dtype=np.int64)
    path = [counts.copy()]
    heap = [(-float(w), i) for i, w in enumerate(load)]
    heapify(heap)
    for _ in range(min(most_slots, len(load) * most_replicas) - len(load)):
        expert = heap[0][1]
        counts[expert] += 1
        share = float(load[expert]) / int(counts[expert])
        heapreplace(heap, (-share if counts[expert] < most_replicas else np.inf, expert))
        path.append(counts.copy())
    return np.stack(path)


def _thinned(least: int, most: int, gpus: int, ways: int) -> NDArray[np.int64]:
    """Shares from `least` to `most`: all, or whole rounds over the GPUs and evenly spaced ones."""
    every = np.arange(least, most + 1)
    if len(every) <= ways:
        return every
    spaced = every[np.linspace(0, len(every) - 1, ways).astype(np.int64)]
    return np.unique(np.concatenate([spaced, every[every % gpus == 0]]))
