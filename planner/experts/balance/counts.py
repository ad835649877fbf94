"""Replica counts to try: what a limit on the GPU load needs, and where the spare slots may go."""

from __future__ import annotations

import numpy as np

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.problem import Loads, Slots

SPARE = ("hottest", "middle", "smallest")
"""Who gets the slots that the limit does not need: the hottest replicas, the hottest experts that need one
replica only (pieces that fill gaps), or the smallest (so that hot replicas lie alone)."""


def counts_within(
    load: Loads, slots: int, gpus: int, limit: float, spare_to: str = "hottest"
) -> Slots:
    """Replica counts [experts] for a limit on the GPU load, by one load vector [experts].

    The counts with the smallest largest replica where the limit is out of reach.
    """
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return np.asarray(greedy_counts(load[None], slots, gpus)[0])
    counts, spare = need
    if spare_to == "smallest":
        order = np.argsort(load, kind="stable")
        while spare:
            room = order[counts[order] < gpus][:spare]
            counts[room] += 1
            spare -= len(room)
        return counts
    single = counts == 1
    for _ in range(spare):
        share = np.where(counts < gpus, load / counts, -1.0)
        if spare_to == "middle" and single.any():
            share = np.where(single & (counts < gpus), share, -1.0)
        if share.max() < 0:
            share = np.where(counts < gpus, load / counts, -1.0)
        counts[share.argmax()] += 1
    return counts


def nearby_counts(
    load: Loads, counts: Slots, gpus: int, tries: int, chance: np.random.Generator
) -> Slots:
    """Counts that give one to three replicas to other experts, [tries, experts]; hot ones more often."""
    out = np.repeat(counts[None], tries, axis=0)
    replica = load / counts
    ends = [(np.sqrt(replica) + 1e-12), (1 / (1e-3 + replica / replica.max()))]
    for row in out:
        for _ in range(int(chance.integers(1, 4))):
            givers = np.flatnonzero(row > 1)
            takers = np.flatnonzero(row < gpus)
            if not len(givers) or not len(takers):
                break
            row[chance.choice(givers)] -= 1
            pull = ends[int(chance.random() < 0.25)][takers]
            row[chance.choice(takers, p=pull / pull.sum())] += 1
    return out
