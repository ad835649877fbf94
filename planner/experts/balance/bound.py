"""Certified lower bounds on the balance of one layer: no placement of these loads is below them."""

from __future__ import annotations

from math import comb

import numpy as np

from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.problem import Loads
from meshwright.planner.experts.problem import Slots as Counts


def balance_bound(loads: Loads, slots: int, gpus: int) -> Loads:
    """The larger of the mean and the best largest replica, whose counts are exact.

    Parameters
    ----------
    loads
        [rows, windows, experts], at least 0, in any unit. A window's bound holds for the worst window too.
    slots
        Slots of all GPUs.
    gpus
        GPUs, a divisor of `slots`.

    Returns
    -------
    Loads
        Bound of the largest GPU load [rows], in the unit of the loads.
    """
    rows, windows, experts = loads.shape
    flat = loads.reshape(rows * windows, experts)
    largest_replica = (flat / greedy_counts(flat, slots, gpus)).max(axis=1)
    bound = np.maximum(flat.sum(axis=1) / gpus, largest_replica)
    return np.asarray(bound.reshape(rows, windows).max(axis=1))


def least_counts(load: Loads, slots: int, gpus: int, limit: float) -> tuple[Counts, int] | None:
    """Replicas that each expert needs so that its GPUs stay within `limit`, and slots to spare; or None.

    An expert of load w with c replicas has c GPUs, whose other (m - 1) c slots hold at least the smallest
    replicas there are: c limit >= w + least((m - 1) c). Spare replicas may split small experts: s of them
    lower a sum of n smallest replicas to no less than that of the n - s smallest unsplit ones. Needs leave
    fewer to spare, which raises the needs: repeated until nothing changes.
    """
    other_slots = slots // gpus - 1
    counts = np.maximum(np.ceil(load / limit - 1e-9), 1).astype(np.int64)
    while True:
        spare = slots - int(counts.sum())
        if spare < 0 or counts.max() > gpus:
            return None
        replicas_by_load = np.sort(np.repeat(load / counts, counts))
        smallest_sums = np.concatenate([[0.0], np.cumsum(replicas_by_load)])
        extra = np.arange(spare + 1)
        replicas = counts[:, None] + extra
        unsplit = np.clip(other_slots * replicas - (spare - extra), 0, len(replicas_by_load))
        fits = (replicas <= gpus) & (
            replicas * limit * (1 + 1e-12) >= load[:, None] + smallest_sums[unsplit]
        )
        if not fits.any(axis=1).all():
            return None
        added = fits.argmax(axis=1)
        if not added.any():
            return counts, spare
        counts = counts + added


def partitions(groups: int, nodes: int) -> int:
    """Ways to split groups into `nodes` unordered sets of one size."""
    size, ways, remaining = groups // nodes, 1, groups
    for _ in range(nodes):
        ways *= comb(remaining - 1, size - 1)
        remaining -= size
    return ways
