"""Replica counts to try: what a limit on the GPU load needs, and where the spare slots may go."""

from __future__ import annotations

from heapq import heapify, heapreplace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.bound import least_counts
from meshwright.planner.experts.packing import greedy_counts, pack
from meshwright.planner.experts.problem import SHARES, TRANSFERS, Loads, Slots
from meshwright.planner.solvers.clock import is_over

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


# Replica counts by how many slots the hot experts get together, where few slots lie on a GPU.
#
# With few slots a GPU is filled by one piece of a hot expert and what is left beside it, so the size of
# those pieces decides: on 64 GPUs of two slots an expert of 640 and 63 of 64 reach 1.014 where the hot one
# has a piece of 10 on every GPU, and 1.315 where it has as many as its own load asks for. Limits on the load
# never ask for pieces that small. Here the experts are cut into a hot and a cold part at each of the widest
# steps of their loads, and the slots of the hot part are tried: inside a part the largest replica gets the
# next slot.


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


# Replicas moved from expert to expert while what GPUs hold above a limit shrinks, where slots are few.
#
# Counts decide how even a packing can get, and one replica more or less of a hot expert changes all its
# pieces. A step draws transfers of one or two replicas, packs each by longest processing time first, and
# takes the one with the least sum of fourth powers above the limit: a measure that falls before the largest
# load does. With two slots a GPU the packing is first with last of the replicas in falling order, which is
# the best there is.


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
