"""Two GPUs shared out anew: every way to split the replicas of the fullest GPU and of another at once.

A larger step than one exchange; it pays where slots per GPU are few and exchanges alone get stuck.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.packing import SlotPacking, slot_loads
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.clock import is_over

MOST_SLOTS_PER_GPU = 6
"""Slots per GPU above which the splits (462 at 6) are too many."""
_BIG = 1e30
_PART = 4_000_000


@cache
def _splits(per_gpu: int) -> NDArray[np.int64]:
    """Every split of two GPUs' slots into halves, [splits, per_gpu]: those of the half with slot 0."""
    rest = combinations(range(1, 2 * per_gpu), per_gpu - 1)
    return np.array([(0, *chosen) for chosen in rest], dtype=np.int64)


def split_pairs(packing: SlotPacking, rounds: int, stop_at: Loads) -> None:
    """Improves every row in place, the fullest GPU with the partner where both end lowest, until none helps.

    `stop_at` [rows] is a largest GPU load that is good enough. GPUs of more slots stay.
    """
    per_gpu = packing.slots.shape[2]
    if per_gpu > MOST_SLOTS_PER_GPU or packing.slots.shape[1] < 2:
        return
    replica = packing.loads / packing.counts[:, None, :]
    weight = slot_loads(replica, packing.slots)
    size = weight[0].size // per_gpu * len(_splits(per_gpu))
    step = max(1, _PART // size)
    open_rows = np.arange(len(packing.slots))
    for _ in range(rounds):
        top = weight[open_rows].sum(axis=3).max(axis=(1, 2))
        open_rows = open_rows[top > stop_at[open_rows]]
        if not len(open_rows) or is_over():
            return
        parts = [open_rows[i : i + step] for i in range(0, len(open_rows), step)]
        open_rows = np.concatenate([_round(packing.slots, weight, rows) for rows in parts])


def _round(slots: Slots, weight: Loads, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """One new split in each row; returns the rows where there was one that helps."""
    w, s = weight[rows], slots[rows]
    n, per_gpu = len(rows), w.shape[3]
    splits = _splits(per_gpu)
    load = w.sum(axis=3)
    top = load.max(axis=(1, 2))
    every = np.arange(n)
    worst = load.max(axis=1).argmax(axis=1)
    worst_weight = np.broadcast_to(w[every, :, worst][:, :, None, :], w.shape)
    both = np.concatenate([worst_weight, w], axis=3)
    member = np.zeros((len(splits), 2 * per_gpu))
    np.put_along_axis(member, splits, 1.0, axis=1)
    # Added column by column: a matrix product would round by the size of the batch.
    half = np.zeros((*both.shape[:3], len(splits)))
    for column in range(2 * per_gpu):
        half += both[..., column, None] * member[:, column]
    pair_load = both.sum(axis=3)[..., None]
    after = np.maximum(half, pair_load - half).max(axis=1)
    after += _BIG * _clashes(s[every, worst], s, member)
    after[every, worst] = _BIG
    flat = after.reshape(n, -1)
    best = flat.argmin(axis=1)
    helps = flat[every, best] < top * (1 - 1e-9)
    for i in np.flatnonzero(helps):
        row, a = rows[i], worst[i]
        g, k = divmod(int(best[i]), len(splits))
        here = member[k] > 0
        experts = np.concatenate([slots[row, a], slots[row, g]])
        loads = np.concatenate([weight[row, :, a], weight[row, :, g]], axis=1)
        slots[row, a], slots[row, g] = experts[here], experts[~here]
        weight[row, :, a], weight[row, :, g] = loads[:, here], loads[:, ~here]
    return np.asarray(rows[helps])


def _clashes(worst_experts: Slots, slots: Slots, member: Loads) -> NDArray[np.bool_]:
    """Splits that put an expert that both hold on one side twice, [rows, gpus, splits]."""
    per_gpu = slots.shape[2]
    same = worst_experts[:, None, :, None] == slots[:, :, None, :]
    together = member[:, :per_gpu, None] == member[:, None, per_gpu:]
    return np.asarray(np.tensordot(same, together.astype(np.float32), axes=([2, 3], [1, 2])) > 0)
