"""Other replica counts for rows of few slots: every way to give the spare replicas, or many drawn at random.

With few slots on a GPU the counts decide how even a packing can get, and the packing of some counts is cheap.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import comb
from zlib import crc32

import numpy as np

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.balance.chains import pass_on
from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.balance.patterns import counts_ruled_out
from meshwright.planner.experts.balance.repartition import share_anew
from meshwright.planner.experts.balance.rows import AIM, EXACT, OPEN, Rows, State
from meshwright.planner.experts.problem import Loads, Slots

MOST_SLOTS = 96
"""Slots of a row above which too small a part of the counts could be tried."""
_FINALISTS = 12
_STARTS = 12
_LIMITS = 6
_COUNT_WORK = 0.2
_PARENTS = 4
_STAGES = 3
_ROUNDS = 600
_BIG = 1e30
_PART = 120_000
"""Slots packed at once."""


def recount(rows: Rows, state: State, *, gap: float, tries: int, seed: int) -> None:
    """Up to `tries` counts for every open row; the best few are improved further. State changes in place."""
    if rows.slots > MOST_SLOTS or rows.slots == rows.loads.shape[2] or rows.spread_nodes > 1:
        return
    for row in state.open(rows, gap * OPEN).tolist():
        if not np.isfinite(state.value[row]):
            continue
        floor = max(state.bound[row], rows.floor[row])
        load = rows.loads[row].max(axis=0)
        need = least_counts(
            load, rows.slots, rows.gpus, max(floor, state.value[row] * (1 - OPEN * gap))
        )
        if need is not None:
            # Seeded by the loads themselves: the same row gets the same tries wherever it is solved.
            chance = np.random.default_rng((seed, crc32(np.ascontiguousarray(load).tobytes())))
            search = _Recount(rows.loads[row : row + 1], rows.gpus, floor * (1 + AIM * gap), chance)
            found = search.run(load, *need, tries)
            state.offer(rows, np.full(len(found), row), found)


def by_patterns(rows: Rows, state: State, *, gap: float, tries: int, seed: int) -> None:
    """Rules limits out by patterns, or packs the counts that patterns allow; `tries` programmes in all.

    First just under the value, where it closes the row; then half way to the bound.
    """
    if rows.slots > MOST_SLOTS or rows.spread_nodes > 1:
        return
    for row in state.open(rows, gap * OPEN).tolist() if tries else ():
        if not np.isfinite(state.value[row]):
            continue
        loads = rows.loads[row]
        chance = np.random.default_rng((seed, crc32(np.ascontiguousarray(loads).tobytes())))
        load, share = loads[int(loads.max(axis=1).argmax())], 1.0
        left = tries
        for _ in range(_LIMITS):
            floor = max(state.bound[row], rows.floor[row])
            if left <= 0 or state.value[row] <= floor * (1 + OPEN * gap):
                break
            under = state.value[row] / (1 + OPEN * gap) * (1 + EXACT / 1000)
            limit = float(floor + share * (under - floor))
            ruling = counts_ruled_out(
                load, rows.slots, rows.gpus, limit, tries=left, work=_COUNT_WORK
            )
            left -= ruling.tries
            if ruling.none:
                state.bound[row] = limit
                continue
            before = state.value[row]
            if ruling.allowed:
                counts = np.stack(ruling.allowed)
                found = _repacked(rows.loads[row : row + 1], counts, rows.gpus, limit, chance)
                state.offer(rows, np.full(len(found), row), found)
            if state.value[row] == before:
                share /= 2


def _repacked(
    loads: Loads, counts: Slots, gpus: int, aim: float, chance: np.random.Generator
) -> Slots:
    """Packings of counts [ways, experts] from many starts, which are packed by loads off by a tenth."""
    every = np.repeat(counts, _STARTS, axis=0)
    known = np.repeat(loads, len(every), axis=0)
    noise = chance.lognormal(0, 0.1, known.shape)
    noise[::_STARTS] = 1.0
    packing = SlotPacking(slots=pack(known * noise, every, gpus).slots, loads=known)
    good = np.full(len(every), aim)
    exchange_to_improve(packing, _ROUNDS, good)
    share_anew(packing, _ROUNDS, good)
    pass_on(packing, _ROUNDS, good)
    best = np.argsort(packing.gpu_loads().max(axis=(1, 2)), kind="stable")[:_FINALISTS]
    return packing.slots[best]


class _Recount:
    """One row: counts drawn above what each expert needs, then counts near the best of them."""

    def __init__(self, loads: Loads, gpus: int, aim: float, chance: np.random.Generator) -> None:
        """`loads` [1, windows, experts], `aim` a largest GPU load that is good enough."""
        self._loads, self._gpus, self._aim, self._chance = loads, gpus, aim, chance
        self._seen: set[bytes] = set()

    def run(self, load: Loads, least: Slots, spare: int, tries: int) -> Slots:
        """Slots [few, gpus, slots of a GPU] of the best counts."""
        experts = len(load)
        if comb(experts + spare - 1, spare) <= tries:
            ways = list(combinations_with_replacement(range(experts), spare))
            given = np.array(ways, dtype=np.int64).reshape(len(ways), spare)
            return self._last(*self._packed(_with(least, given)))
        tries = max(tries, 2 * _FINALISTS)
        draw = _chances(load / least)
        slots, value = self._packed(
            _with(least, self._chance.choice(experts, (tries // 2, spare), p=draw))
        )
        for _ in range(_STAGES):
            if value[0] <= self._aim:
                break
            best = [np.bincount(placed.ravel(), minlength=experts) for placed in slots[:_PARENTS]]
            near = [
                self._near(counts, least, draw, max(tries // (2 * _STAGES * len(best)), 2))
                for counts in best
            ]
            if not sum(map(len, near)):
                break
            more = self._packed(np.concatenate(near))
            slots, value = np.concatenate([slots, more[0]]), np.concatenate([value, more[1]])
            order = np.argsort(value, kind="stable")[:_FINALISTS]
            slots, value = slots[order], value[order]
        return self._last(slots, value)

    def _near(self, counts: Slots, least: Slots, draw: Loads, tries: int) -> Slots:
        """Counts with one or two of the spare replicas given to others."""
        out = np.repeat(counts[None], tries, axis=0)
        taken = self._chance.choice(len(draw), (tries, 2), p=draw)
        givers = np.flatnonzero(counts > least)
        given = givers[self._chance.integers(0, len(givers), (tries, 2))]
        given[tries // 2 :, 1] = taken[tries // 2 :, 1]
        every = np.arange(tries)[:, None]
        np.add.at(out, (every, taken), 1)
        np.add.at(out, (every, given), -1)
        return out[(out >= least).all(axis=1)]

    def _packed(self, counts: Slots) -> tuple[Slots, Loads]:
        """Packings of counts that were not tried yet, the best first, and their values."""
        fresh = [i for i, one in enumerate(counts) if self._new(one)]
        total = int(counts[0].sum())
        slots = [np.zeros((0, self._gpus, total // self._gpus), dtype=np.int64)]
        values = [np.zeros(0)]
        step = max(1, _PART // (total * self._loads.shape[1]))
        for part in (counts[fresh[i : i + step]] for i in range(0, len(fresh), step)):
            packing = pack(np.repeat(self._loads, len(part), axis=0), part, self._gpus)
            exchange_to_improve(packing, _ROUNDS, np.full(len(part), self._aim))
            value = packing.gpu_loads().max(axis=(1, 2)) + _BIG * has_duplicates(packing.slots)
            slots.append(packing.slots)
            values.append(value)
        value = np.concatenate(values)
        order = np.argsort(value, kind="stable")[:_FINALISTS]
        return np.concatenate(slots)[order], value[order]

    def _new(self, counts: Slots) -> bool:
        mark = counts.tobytes()
        fresh = mark not in self._seen and bool((counts <= self._gpus).all())
        self._seen.add(mark)
        return fresh

    def _last(self, slots: Slots, value: Loads) -> Slots:
        packing = SlotPacking(slots=slots, loads=np.repeat(self._loads, len(slots), axis=0))
        good = np.full(len(value), self._aim)
        share_anew(packing, _ROUNDS, good)
        pass_on(packing, _ROUNDS, good)
        return packing.slots


def _chances(replica: Loads) -> Loads:
    """How often an expert gets a spare replica: large replicas more often, small ones as gap fillers."""
    large = np.sqrt(replica)
    return np.asarray(0.75 * large / large.sum() + 0.25 / len(replica))


def _with(least: Slots, given: Slots) -> Slots:
    counts = np.repeat(least[None], len(given), axis=0)
    np.add.at(counts, (np.arange(len(given))[:, None], given), 1)
    return counts
