"""Other replica counts for rows of few slots: every way to give the spare replicas, or many drawn at random.

With few slots on a GPU the counts decide how even a packing can get, and packing is cheap.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import comb
from zlib import crc32

import numpy as np

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.balance.repartition import split_pairs
from meshwright.planner.experts.balance.rows import Rows, State
from meshwright.planner.experts.params import BALANCE, RECOUNT
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.clock import is_over

_FORBIDDEN = 1e30


def recount(rows: Rows, state: State, gap: float, tries: int, seed: int) -> None:
    """Up to `tries` counts for every unsolved row, the best few improved further; `state` changes in place.

    Rows of more slots than RECOUNT allows stay: too small a part of their counts could be tried.
    """
    if rows.slots > RECOUNT.most_slots or rows.slots == rows.loads.shape[2]:
        return
    if rows.spread_nodes > 1 or not tries:
        return
    index = state.unsolved(rows, gap * BALANCE.search_share)
    for row in index[np.isfinite(state.value[index])].tolist():
        if is_over():
            return
        target = max(state.bound[row], rows.needed[row])
        load = rows.loads[row].max(axis=0)
        limit = max(target, state.value[row] * (1 - BALANCE.search_share * gap))
        needed = least_counts(load, rows.slots, rows.gpus, limit)
        if needed is None:
            continue
        # Seeded by the loads: the same row gets the same tries in whichever process it is solved.
        chance = np.random.default_rng((seed, crc32(np.ascontiguousarray(load).tobytes())))
        stop_at = target * (1 + BALANCE.stop_share * gap)
        slots = _Recount(rows.loads[row], rows.gpus, stop_at, chance).run(load, *needed, tries)
        state.offer_best(rows, row, slots)


class _Recount:
    """One row: counts drawn above what each expert needs, then counts near the best of them."""

    def __init__(
        self, loads: Loads, gpus: int, stop_at: float, chance: np.random.Generator
    ) -> None:
        """`loads` [windows, experts], `stop_at` a largest GPU load that is good enough."""
        self._loads, self._gpus, self._stop_at, self._chance = loads, gpus, stop_at, chance
        self._seen: set[bytes] = set()

    def run(self, load: Loads, fewest: Slots, spare: int, tries: int) -> Slots:
        """Slots [few, gpus, slots of a GPU] of the best counts."""
        experts = len(load)
        if comb(experts + spare - 1, spare) <= tries:
            ways = list(combinations_with_replacement(range(experts), spare))
            receivers = np.array(ways, dtype=np.int64).reshape(len(ways), spare)
            return self._improved(self._best_packings(_added(fewest, receivers))[0])
        tries = max(tries, 2 * RECOUNT.finalists)
        probability = _draw_probability(load / fewest)
        receivers = self._chance.choice(experts, (tries // 2, spare), p=probability)
        slots, value = self._best_packings(_added(fewest, receivers))
        for _ in range(RECOUNT.stages):
            if value[0] <= self._stop_at or is_over():
                break
            parents = slots[: RECOUNT.parents]
            share = max(tries // (2 * RECOUNT.stages * len(parents)), 2)
            nearby = [
                self._nearby(
                    np.bincount(parent.ravel(), minlength=experts), fewest, probability, share
                )
                for parent in parents
            ]
            if not sum(map(len, nearby)):
                break
            new_slots, new_value = self._best_packings(np.concatenate(nearby))
            slots = np.concatenate([slots, new_slots])
            value = np.concatenate([value, new_value])
            order = np.argsort(value, kind="stable")[: RECOUNT.finalists]
            slots, value = slots[order], value[order]
        return self._improved(slots)

    def _nearby(self, counts: Slots, fewest: Slots, probability: Loads, tries: int) -> Slots:
        """Counts with one or two of the spare replicas at other experts."""
        receivers = self._chance.choice(len(probability), (tries, 2), p=probability)
        replicated = np.flatnonzero(counts > fewest)
        givers = replicated[self._chance.integers(0, len(replicated), (tries, 2))]
        # Half of the tries move a single replica: the second one goes back where it came from.
        givers[tries // 2 :, 1] = receivers[tries // 2 :, 1]
        nearby = np.repeat(counts[None], tries, axis=0)
        every = np.arange(tries)[:, None]
        np.add.at(nearby, (every, receivers), 1)
        np.add.at(nearby, (every, givers), -1)
        return nearby[(nearby >= fewest).all(axis=1)]

    def _best_packings(self, counts: Slots) -> tuple[Slots, Loads]:
        """Packings of the counts that were not tried yet, the best few first, and their values."""
        new = counts[[self._is_new(row) for row in counts]]
        total = int(counts[0].sum())
        slots = [np.zeros((0, self._gpus, total // self._gpus), dtype=np.int64)]
        values = [np.zeros(0)]
        step = max(1, RECOUNT.slots_at_once // (total * len(self._loads)))
        for start in range(0, len(new), step):
            part = new[start : start + step]
            packing = pack(np.repeat(self._loads[None], len(part), axis=0), part, self._gpus)
            stop_at = np.full(len(part), self._stop_at)
            exchange_to_improve(packing, BALANCE.exchange_rounds, stop_at)
            largest = packing.gpu_loads().max(axis=(1, 2))
            slots.append(packing.slots)
            values.append(largest + _FORBIDDEN * has_duplicates(packing.slots))
        value = np.concatenate(values)
        order = np.argsort(value, kind="stable")[: RECOUNT.finalists]
        return np.concatenate(slots)[order], value[order]

    def _is_new(self, counts: Slots) -> bool:
        mark = counts.tobytes()
        is_new = mark not in self._seen and bool((counts <= self._gpus).all())
        self._seen.add(mark)
        return is_new

    def _improved(self, slots: Slots) -> Slots:
        packing = SlotPacking(slots=slots, loads=np.repeat(self._loads[None], len(slots), axis=0))
        split_pairs(packing, BALANCE.exchange_rounds, np.full(len(slots), self._stop_at))
        return packing.slots


def _draw_probability(replica: Loads) -> Loads:
    """How often an expert gets a spare replica: large replicas more often, small ones as gap fillers."""
    large = np.sqrt(replica)
    return np.asarray(0.75 * large / large.sum() + 0.25 / len(replica))


def _added(fewest: Slots, receivers: Slots) -> Slots:
    """Counts [tries, experts] with a replica more for each of the receivers [tries, spare]."""
    counts = np.repeat(fewest[None], len(receivers), axis=0)
    np.add.at(counts, (np.arange(len(receivers))[:, None], receivers), 1)
    return counts
