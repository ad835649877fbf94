"""The fast part: a first answer for every row, then other replica counts and splits where a gap is open."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import balance_bound
from meshwright.planner.experts.balance.chains import pass_on
from meshwright.planner.experts.balance.count_bound import count_bound, pair_bound
from meshwright.planner.experts.balance.counts import SPARE, counts_within, nearby_counts
from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    greedy_counts,
    pack,
)
from meshwright.planner.experts.balance.recount import by_patterns, recount
from meshwright.planner.experts.balance.repartition import share_anew
from meshwright.planner.experts.balance.rows import AIM, OPEN, Rows, State, broken, value_of
from meshwright.planner.experts.problem import Loads, Slots

_ROUNDS = 600
_LIMITS = (0.0005, 0.02, 0.06, 0.15, 0.3, 0.6)
"""Limits on the GPU load whose counts are tried, as shares of the way from the bound to the value."""
_TRIES = 6
_HOT = 0.3
"""Load over the mean GPU load above which an expert may crowd others out."""
_COUNT_WORK = 0.1
_CHEAP_SLOTS = 64
"""Slots up to which the bound without a solver is quick; so it is where nothing is replicated."""
_PATIENCE = 3
_ROUNDING = 1e-9
"""A limit ruled out closes the row by a hair, not almost."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much work each open row gets."""

    generations: int
    """Rounds of counts near the best; 0 for the first search."""
    limits: int
    """Limits on the GPU load whose counts the first search tries."""
    bound_steps: int
    """Limits tried for the bound by replica counts; 0 for none."""
    programmes: int
    """Linear programmes of patterns on a row of few slots; 0 for none."""


def first_answer(rows: Rows, gap: float) -> State:
    """Counts with the smallest largest replica, longest processing time first, exchanges."""
    shares = rows.loads.max(axis=1)
    counts = greedy_counts(shares, rows.slots, rows.gpus)
    bound = balance_bound(rows.loads, rows.slots, rows.gpus)
    aim = np.maximum(bound, rows.floor) * (1 + AIM * gap)
    slots = _packed(rows, counts, aim)
    value = value_of(rows, slots)
    value[broken(rows, slots)] = np.inf
    return State(slots=slots, value=value, bound=np.minimum(bound, value))


def _packed(rows: Rows, counts: Slots, aim: Loads) -> Slots:
    packing = pack(rows.loads, counts, rows.gpus, rows.spread_nodes)
    exchange_to_improve(packing, _ROUNDS, aim, rows.spread_nodes)
    return packing.slots


def sharpen(rows: Rows, state: State, gap: float) -> None:
    """The cheap part of the search: a sharper bound and new splits of GPU pairs, for open rows in place."""
    left = state.open(rows, gap * OPEN)
    if not len(left):
        return
    if rows.slots <= _CHEAP_SLOTS or rows.slots == rows.loads.shape[2]:
        best = np.where(np.isfinite(state.value[left]), state.value[left], 2 * state.bound[left])
        state.bound[left] = balance_bound(rows.take(left).loads, rows.slots, rows.gpus, best)
    _split_anew(rows, state, gap, chains=False)


def search(rows: Rows, state: State, *, gap: float, budget: Budget, seed: int) -> None:
    """Betters open rows in place; every row by itself, so that the split over processes changes nothing.

    First the bound by counts where experts are hot and counts for lower limits on the GPU load; with
    generations in the budget also counts near the best, and patterns where slots are few.
    """
    if not budget.generations:
        _first_search(rows, state, gap, budget)
        return
    _count_bounds(rows, state, gap, budget.bound_steps)
    tried = state.value.copy()
    recount(rows, state, gap=gap, tries=_TRIES * budget.generations, seed=seed)
    _near(rows, state, gap=gap, generations=budget.generations, seed=seed)
    _count_bounds(rows, state, gap, budget.bound_steps, tried)
    by_patterns(rows, state, gap=gap, tries=budget.programmes, seed=seed)


def _first_search(rows: Rows, state: State, gap: float, budget: Budget) -> None:
    seen: list[set[bytes]] = [set() for _ in state.value]
    _count_bounds(rows, state, gap, budget.bound_steps)
    for spare_to, fraction in [(s, f) for s in SPARE for f in _LIMITS][: budget.limits]:
        left = state.open(rows, gap * OPEN)
        if not len(left):
            return
        part = rows.take(left)
        low = np.maximum(state.bound[left], part.floor)
        top = np.where(np.isfinite(state.value[left]), state.value[left], 2 * low)
        limit = low + fraction * (top - low)
        shares = part.loads.max(axis=1)
        counts = np.stack(
            [
                counts_within(share, rows.slots, rows.gpus, t, spare_to)
                for share, t in zip(shares, limit, strict=True)
            ]
        )
        fresh = np.array([_new(seen[row], c) for row, c in zip(left, counts, strict=True)])
        if fresh.any():
            aim = low[fresh] * (1 + AIM * gap)
            state.offer(rows, left[fresh], _packed(rows.take(left[fresh]), counts[fresh], aim))
    _split_anew(rows, state, gap)


def _new(seen: set[bytes], counts: Slots) -> bool:
    """Whether the counts were not tried yet; they are now."""
    mark = counts.tobytes()
    fresh = mark not in seen
    seen.add(mark)
    return fresh


def _count_bounds(
    rows: Rows, state: State, gap: float, steps: int, tried: Loads | None = None
) -> None:
    """The bound by replica counts where an expert is hot; the counts it finds are packed too.

    Rows that still have their value in `tried` are left out.
    """
    left = state.open(rows, gap * OPEN)
    if tried is not None:
        left = left[state.value[left] < tried[left]]
    left = left[np.isfinite(state.value[left]) & (rows.loads[left].max(axis=(1, 2)) > _HOT)]
    offers: list[tuple[int, Slots]] = []
    for row in left.tolist() if steps else ():
        load = rows.loads[row, int(rows.loads[row].max(axis=1).argmax())]
        found = pair_bound(load, rows.slots, rows.gpus) or count_bound(
            load,
            rows.slots,
            rows.gpus,
            low=state.bound[row],
            high=state.value[row] / (1 + OPEN * gap) * (1 + _ROUNDING),
            work=_COUNT_WORK,
            steps=steps,
        )
        state.bound[row] = max(state.bound[row], found.bound)
        offers += [(row, counts) for counts in found.counts]
    if offers:
        many = np.array([row for row, _ in offers])
        part = rows.take(many)
        aim = np.maximum(state.bound[many], part.floor) * (1 + AIM * gap)
        packed = _packed(part, np.stack([counts for _, counts in offers]), aim)
        if rows.spread_nodes == 1:
            pass_on(SlotPacking(slots=packed, loads=part.loads), _ROUNDS, aim)
        for i, row in enumerate(many):
            state.offer(rows, np.array([row]), packed[i : i + 1])
    _split_anew(rows, state, gap)


def _split_anew(rows: Rows, state: State, gap: float, *, chains: bool = True) -> None:
    left = state.open(rows, gap * OPEN)
    left = left[np.isfinite(state.value[left])]
    if not len(left) or rows.spread_nodes > 1:
        return
    part = rows.take(left)
    packing = SlotPacking(slots=state.slots[left].copy(), loads=part.loads)
    aim = np.maximum(state.bound[left], part.floor) * (1 + AIM * gap)
    share_anew(packing, _ROUNDS, aim)
    if chains:
        pass_on(packing, _ROUNDS, aim)
    state.offer(rows, left, packing.slots)


def _near(rows: Rows, state: State, *, gap: float, generations: int, seed: int) -> None:
    """Counts that differ from the best in a few replicas; a row that stays without gain is left."""
    experts = rows.loads.shape[2]
    idle = np.zeros(len(state.value), dtype=np.int64)
    if rows.slots == experts:
        return
    for generation in range(generations):
        left = state.open(rows, gap * OPEN)
        left = left[(idle[left] < _PATIENCE) & np.isfinite(state.value[left])]
        if not len(left):
            return
        counts = np.concatenate([_nearby(rows, state, int(row), generation, seed) for row in left])
        many = np.repeat(left, _TRIES)
        part = rows.take(many)
        aim = np.maximum(state.bound[many], part.floor) * (1 + AIM * gap)
        found = _packed(part, counts, aim)
        reached = value_of(part, found)
        reached[broken(part, found)] = np.inf
        pick = reached.reshape(len(left), _TRIES).argmin(axis=1)
        chosen = found.reshape(len(left), _TRIES, *found.shape[1:])[np.arange(len(left)), pick]
        better = state.offer(rows, left, chosen)
        idle[left] = np.where(better, 0, idle[left] + 1)
    _split_anew(rows, state, gap)


def _nearby(rows: Rows, state: State, row: int, generation: int, seed: int) -> NDArray[np.int64]:
    load = rows.loads[row].max(axis=0)
    counts = np.bincount(state.slots[row].ravel(), minlength=len(load))
    # Seeded by the loads themselves: the same row gets the same tries wherever it is solved.
    mark = crc32(np.ascontiguousarray(load).tobytes())
    chance = np.random.default_rng((seed, generation, mark))
    return nearby_counts(load, counts, rows.gpus, _TRIES, chance)
