"""Replica counts to try: what a limit on the GPU load needs, and where the spare slots may go."""

from __future__ import annotations

import numpy as np

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.problem import Loads, Slots

SPARE_SLOT_RULES = ("hottest", "middle", "smallest")
"""Who gets the slots that the limit does not need: the hottest replicas; the hottest experts that need only
one replica, whose parts then fill gaps; or the smallest experts, so that hot replicas lie alone."""


def counts_within(load: Loads, slots: int, gpus: int, limit: float, rule: str) -> Slots:
    """Replica counts [experts] for a limit on the GPU load, by one load vector [experts].

    The counts with the smallest largest replica where the limit is out of reach.
    """
    needed = least_counts(load, slots, gpus, limit)
    if needed is None:
        return np.asarray(greedy_counts(load[None], slots, gpus)[0])
    counts, spare = needed
    if rule == "smallest":
        return _spare_to_smallest(load, counts, spare, gpus)
    single = counts == 1
    for _ in range(spare):
        replica = np.where(counts < gpus, load / counts, -1.0)
        preferred = np.where(single, replica, -1.0)
        if rule == "middle" and preferred.max() >= 0:
            replica = preferred
        counts[replica.argmax()] += 1
    return counts


def _spare_to_smallest(load: Loads, counts: Slots, spare: int, gpus: int) -> Slots:
    order = np.argsort(load, kind="stable")
    while spare:
        receivers = order[counts[order] < gpus][:spare]
        counts[receivers] += 1
        spare -= len(receivers)
    return counts
