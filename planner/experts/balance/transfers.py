"""Replicas moved from expert to expert while what GPUs hold above a limit shrinks, where slots are few.

Counts decide how even a packing can get, and one replica more or less of a hot expert changes all its pieces.
A step draws transfers of one or two replicas, packs each by longest processing time first, and takes the one
with the least sum of fourth powers above the limit: a measure that falls before the largest load does. With
two slots a GPU the packing is first with last of the replicas in falling order, which is the best there is.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from meshwright.planner.experts.balance.packing import pack
from meshwright.planner.experts.params import TRANSFERS
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.clock import is_over


def transferred(
    loads: Loads, candidates: Slots, gpus: int, limit: float, *, steps: int, seed: int
) -> Slots:
    """Counts [n, experts] with the least above `limit`, the best first.

    The search starts from the first of the candidates [ways, experts] and from the best of those that are
    some replicas apart. `loads` [windows, experts] are in the unit of `limit`; the same get the same draws.
    """
    chance = np.random.default_rng((seed, crc32(np.ascontiguousarray(loads).tobytes())))
    search = _Transfers(loads, gpus, limit, chance)
    starts = search.apart(candidates)
    for start in starts:
        search.run(start, steps // len(starts))
    return search.best()


class _Transfers:
    def __init__(self, loads: Loads, gpus: int, limit: float, chance: np.random.Generator) -> None:
        self._loads, self._gpus, self._limit, self._chance = loads, gpus, limit, chance
        self._kept: list[tuple[float, bytes, Slots]] = []

    def best(self) -> Slots:
        """Counts with the least above the limit, of all starts."""
        return np.stack([counts for _, _, counts in self._kept])

    def apart(self, candidates: Slots) -> list[Slots]:
        """The first candidate, and the best of the others that differ by some replicas."""
        above = self._above(candidates)
        starts = [candidates[0]]
        for way in np.argsort(above, kind="stable").tolist():
            if len(starts) == TRANSFERS.starts:
                break
            apart = [int(np.abs(candidates[way] - other).sum()) // 2 for other in starts]
            if min(apart) >= TRANSFERS.apart:
                starts.append(candidates[way])
        return starts

    def run(self, start: Slots, steps: int) -> None:
        """Steps to the best of the transfers drawn; after some without a gain, on from a good one, jolted."""
        current, score = start, float(self._above(start[None])[0])
        pool = [(score, start.tobytes(), start)]
        waited = 0
        for _ in range(steps):
            if pool[0][0] <= 0 or is_over():
                break
            drawn = self._drawn(current)
            above = self._above(drawn)
            least = int(above.argmin())
            waited = 0 if above[least] < pool[0][0] else waited + 1
            if above[least] < score or waited % TRANSFERS.patience:
                if above[least] <= score * TRANSFERS.worse:
                    current, score = drawn[least], float(above[least])
                    pool = _with(pool, score, current)
            else:
                base = pool[int(self._chance.integers(len(pool)))][2]
                current = self._drawn(self._drawn(base)[-1])[-1]
                score = float(self._above(current[None])[0])
        for _, _, counts in pool:
            self._kept = _with(self._kept, float(self._above(counts[None])[0]), counts)

    def _drawn(self, counts: Slots) -> Slots:
        """Counts with one replica, in the second half two, given by one expert and received by another.

        Every second receiver is one whose replicas lie on GPUs above the limit: more of them are smaller.
        """
        givers = np.flatnonzero(counts > 1)
        receivers = np.flatnonzero(counts < self._gpus)
        if not len(givers) or not len(receivers):
            return counts[None]
        crowded = self._crowded(counts)[receivers] + TRANSFERS.least_share
        wanted = 0.5 * crowded / crowded.sum() + 0.5 / len(receivers)
        drawn = np.repeat(counts[None], TRANSFERS.drawn, axis=0)
        every = np.arange(TRANSFERS.drawn)
        for part in (every, every[TRANSFERS.drawn // 2 :]):
            np.add.at(drawn, (part, self._chance.choice(givers, len(part))), -1)
            np.add.at(drawn, (part, self._chance.choice(receivers, len(part), p=wanted)), 1)
        kept = drawn[((drawn >= 1) & (drawn <= self._gpus)).all(axis=1)]
        return kept if len(kept) else counts[None]

    def _crowded(self, counts: Slots) -> Loads:
        """What GPUs of each expert hold above the limit, [experts]."""
        if self._is_paired(counts):
            experts = np.repeat(np.arange(len(counts)), counts)
            replicas = np.repeat(self._loads[0] / counts, counts)
            order = np.argsort(-replicas, kind="stable")
            above = np.maximum(0, replicas[order] + replicas[order[::-1]] - self._limit)
            return np.bincount(experts[order], above, len(counts)).astype(np.float64)
        packing = pack(self._loads[None], counts[None], self._gpus)
        above = np.maximum(0, packing.gpu_loads()[0].max(axis=0) - self._limit)
        by_slot = np.repeat(above, packing.slots.shape[2])
        slots = packing.slots[0].ravel()
        return np.bincount(slots, by_slot, len(counts)).astype(np.float64)

    def _is_paired(self, counts: Slots) -> bool:
        return int(counts.sum()) == 2 * self._gpus and len(self._loads) == 1

    def _above(self, counts: Slots) -> Loads:
        """Sum over GPUs and windows of fourth powers above the limit, [n], of counts [n, experts]."""
        if self._is_paired(counts[0]):
            by_row = np.repeat((self._loads / counts).ravel(), counts.ravel())
            replicas = by_row.reshape(len(counts), -1)
            experts = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
            order = np.argsort(replicas, axis=1, kind="stable")
            rising = np.take_along_axis(replicas, order, axis=1)
            expert = np.take_along_axis(experts.reshape(len(counts), -1), order, axis=1)
            gpu = (rising + rising[:, ::-1])[:, : self._gpus]
            is_twice = (expert == expert[:, ::-1])[:, : self._gpus]
            gpu = np.where(is_twice, np.maximum(gpu, self._limit * TRANSFERS.twice), gpu)
        else:
            loads = np.repeat(self._loads[None], len(counts), axis=0)
            gpu = pack(loads, counts, self._gpus).gpu_loads().reshape(len(counts), -1)
        return np.asarray((np.maximum(0, gpu / self._limit - 1) ** 4).sum(axis=1))


def _with(
    pool: list[tuple[float, bytes, Slots]], score: float, counts: Slots
) -> list[tuple[float, bytes, Slots]]:
    """The best of a pool and one more, each once."""
    mark = counts.tobytes()
    if mark in [kept for _, kept, _ in pool]:
        return pool
    return sorted([*pool, (score, mark, counts)], key=lambda kept: kept[:2])[: TRANSFERS.kept]
