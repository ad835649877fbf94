"""Certified lower bounds on the balance of one layer: no placement of these loads is below them."""

from __future__ import annotations

from math import comb

import numpy as np

from meshwright.planner.experts.balance.packing import greedy_counts
from meshwright.planner.experts.problem import Loads
from meshwright.planner.experts.problem import Slots as Counts

_WIDEST = 2_000_000
_WORTH = 1.003
_STEPS = 14
_CLOSE = 1.0005


def balance_bound(loads: Loads, slots: int, gpus: int, best: Loads | None = None) -> Loads:
    """Bound [rows] of the largest GPU load, in the unit of the loads [rows, windows, experts].

    The larger of the mean and the best largest replica (exact counts). With `best` [rows], a balance that is
    reached, the interval up to it is searched by bisection for the largest T that `_impossible` rules out.
    Each window's bound holds for the worst window too.
    """
    rows, windows, experts = loads.shape
    flat = loads.reshape(rows * windows, experts)
    counts = greedy_counts(flat, slots, gpus)
    found = np.maximum(flat.sum(axis=1) / gpus, (flat / counts).max(axis=1))
    bound = np.asarray(found.reshape(rows, windows).max(axis=1))
    if best is None:
        return bound
    for row in range(rows):
        for window in range(windows):
            load = flat[row * windows + window]
            bound[row] = max(bound[row], _bisect(load, slots, gpus, bound[row], best[row]))
    return bound


def _bisect(load: Loads, slots: int, gpus: int, low: float, high: float) -> float:
    """The largest T found in [low, high] such that no placement is below T; low where none is."""
    if high <= low * _WORTH or load.max() < 0.25 * low:
        return low
    if _impossible(load, slots, gpus, high * (1 - 1e-9)):
        return high
    for _ in range(_STEPS):
        if high <= low * _CLOSE:
            break
        middle = (low + high) / 2
        if _impossible(load, slots, gpus, middle):
            low = middle
        else:
            high = middle
    return low


def least_counts(load: Loads, slots: int, gpus: int, limit: float) -> tuple[Counts, int] | None:
    """Replicas that each expert needs so that its GPUs stay within `limit`, and slots to spare; or None.

    An expert of load w with c replicas has c GPUs, whose other (m - 1) c slots hold at least the smallest
    replicas there are: c limit >= w + least((m - 1) c). Spare replicas may split small experts: s of them
    lower a sum of n smallest replicas to no less than that of the n - s smallest unsplit ones. Needs leave
    fewer to spare, which raises the needs: repeated until nothing changes.
    """
    others = slots // gpus - 1
    counts = np.maximum(np.ceil(load / limit - 1e-9), 1).astype(np.int64)
    while True:
        spare = slots - int(counts.sum())
        if spare < 0 or counts.max() > gpus:
            return None
        pieces = np.sort(np.repeat(load / counts, counts))
        least = np.concatenate([[0.0], np.cumsum(pieces)])
        extra = np.arange(spare + 1)
        replicas = counts[:, None] + extra
        certain = np.clip(others * replicas - (spare - extra), 0, len(pieces))
        fits = (replicas <= gpus) & (
            replicas * limit * (1 + 1e-12) >= load[:, None] + least[certain]
        )
        if not fits.any(axis=1).all():
            return None
        more = fits.argmax(axis=1)
        if not more.any():
            return counts, spare
        counts = counts + more


def _impossible(load: Loads, slots: int, gpus: int, limit: float) -> bool:
    """Whether no placement keeps every GPU within `limit`: hot replicas crowd out too many slots.

    Every slot is filled. Let h experts, those with the largest replicas, have K replicas on k GPUs: these
    carry all their load W and m k - K other replicas, so k limit >= W + (the m k - K smallest others). K is
    at least what `least_counts` says and at most that and all spare slots. Where this fails for some h, all
    K and all k, `limit` is below every placement.
    """
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return True
    counts, spare = need
    per_gpu = slots // gpus
    order = np.argsort(-(load / counts), kind="stable")
    hot = order[: min(gpus, int((load / counts > limit / (2 * per_gpu)).sum()))]
    if len(hot) * (spare + 1) * gpus > _WIDEST:
        return False
    small = np.full((len(hot), slots + 1), np.inf)
    for index in range(len(hot)):
        rest = order[index + 1 :]
        pieces = np.sort(np.repeat(load[rest] / counts[rest], counts[rest]))
        small[index, 0] = 0.0
        small[index, 1 : len(pieces) + 1] = np.cumsum(pieces)
    total = np.cumsum(load[hot])[:, None, None]
    extra = np.arange(spare + 1)[None, :, None]
    replicas = np.cumsum(counts[hot])[:, None, None] + extra
    k = np.arange(1, gpus + 1)[None, None, :]
    others = per_gpu * k - replicas
    allowed = (k <= replicas) & (others >= 0)
    certain = np.clip(others - (spare - extra), 0, slots)
    carried = total + small[np.arange(len(hot))[:, None, None], certain]
    possible = (allowed & (carried <= k * limit)).any(axis=(1, 2))
    return bool(not possible.all())


def partitions(groups: int, nodes: int) -> int:
    """Ways to split groups into `nodes` unordered sets of one size."""
    size, ways, left = groups // nodes, 1, groups
    for _ in range(nodes):
        ways *= comb(left - 1, size - 1)
        left -= size
    return ways
