"""The fast part: a first answer for every row, then other replica counts and splits where a gap is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import balance_bound, least_counts
from meshwright.planner.experts.balance.count_bound import count_bound, pair_bound
from meshwright.planner.experts.balance.counts import SPARE_SLOT_RULES, counts_within
from meshwright.planner.experts.balance.packing import (
    SlotPacking,
    exchange_to_improve,
    greedy_counts,
    pack,
)
from meshwright.planner.experts.balance.recount import recount
from meshwright.planner.experts.balance.repartition import split_pairs
from meshwright.planner.experts.balance.rows import Rows, State, is_invalid, value_of
from meshwright.planner.experts.balance.shares import shared_counts
from meshwright.planner.experts.balance.transfers import transferred
from meshwright.planner.experts.params import BALANCE, SHARES, TRANSFERS
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.clock import is_over

_ROUNDING = 1e-9
"""Relative. A limit that is ruled out closes the row by a hair, not almost."""


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """How much work each unsolved row gets.

    Parameters
    ----------
    limits
        Limits on the GPU load whose counts are tried, at most 18.
    bound_steps
        Limits tried for the bound by replica counts; 0 for no such bound.
    recounts
        Replica counts tried on a row of few slots.
    transfers
        Steps of replicas moved from expert to expert; 0 for none.
    """

    limits: int
    bound_steps: int
    recounts: int
    transfers: int = 0


def first_answer(rows: Rows, gap: float) -> State:
    """Counts with the smallest largest replica, longest processing time first, exchanges."""
    counts = greedy_counts(rows.loads.max(axis=1), rows.slots, rows.gpus)
    bound = balance_bound(rows.loads, rows.slots, rows.gpus)
    slots = _packed(rows, counts, np.maximum(bound, rows.needed), gap)
    value = value_of(rows, slots)
    value[is_invalid(rows, slots)] = np.inf
    return State(slots=slots, value=value, bound=np.minimum(bound, value))


def search_limits(rows: Rows, state: State, gap: float, budget: SearchBudget) -> None:
    """Betters unsolved rows in place by the replica counts that lower limits on the GPU load ask for."""
    _bound_by_counts(rows, state, gap, budget.bound_steps)
    _try_limits(rows, state, gap, budget.limits)
    split_gpu_pairs(rows, state, gap)
    _try_shares(rows, state, gap)


def search_counts(rows: Rows, state: State, gap: float, budget: SearchBudget, seed: int) -> None:
    """Betters unsolved rows in place by counts drawn at random, and bounds again what fell."""
    _try_transfers(rows, state, gap, budget, seed)
    _bound_by_counts(rows, state, gap, budget.bound_steps)
    before = state.value.copy()
    recount(rows, state, gap, budget.recounts, seed)
    _bound_by_counts(rows, state, gap, budget.bound_steps, before)


def _packed(rows: Rows, counts: Slots, target: Loads, gap: float) -> Slots:
    packing = pack(rows.loads, counts, rows.gpus, rows.spread_nodes)
    stop_at = target * (1 + BALANCE.stop_share * gap)
    exchange_to_improve(packing, BALANCE.exchange_rounds, stop_at, rows.spread_nodes)
    return packing.slots


def _try_limits(rows: Rows, state: State, gap: float, limits: int) -> None:
    """Packs the counts that lower limits on the GPU load ask for, until a row is solved."""
    seen: list[set[bytes]] = [set() for _ in state.value]
    tries = [(rule, fraction) for rule in SPARE_SLOT_RULES for fraction in BALANCE.limit_fractions]
    for rule, fraction in tries[:limits]:
        index = state.unsolved(rows, gap * BALANCE.search_share)
        if not len(index) or is_over():
            return
        low = state.target(rows, index)
        high = np.where(np.isfinite(state.value[index]), state.value[index], 2 * low)
        limit = low + fraction * (high - low)
        largest = rows.loads[index].max(axis=1)
        counts = np.stack(
            [
                counts_within(load, rows.slots, rows.gpus, float(load_limit), rule)
                for load, load_limit in zip(largest, limit, strict=True)
            ]
        )
        is_new = np.array(
            [
                row_counts.tobytes() not in seen[row]
                for row, row_counts in zip(index, counts, strict=True)
            ]
        )
        for row, row_counts in zip(index, counts, strict=True):
            seen[row].add(row_counts.tobytes())
        if is_new.any():
            chosen = index[is_new]
            slots = _packed(rows.take(chosen), counts[is_new], low[is_new], gap)
            state.offer(rows, chosen, slots)


def _try_shares(rows: Rows, state: State, gap: float) -> None:
    """Packs the counts of every share of the slots that hot experts can have, for rows with a gap."""
    if rows.slots in (rows.gpus, rows.loads.shape[2]):
        return
    for row in state.unsolved(rows, gap).tolist():
        if is_over():
            return
        _offer_finalists(rows, state, row, _shared_counts(rows, state, row, gap), gap)


def _shared_counts(rows: Rows, state: State, row: int, gap: float) -> Slots:
    """Counts [ways, experts] of every share of the slots that hot experts can have."""
    load = rows.loads[row].max(axis=0)
    target = float(state.target(rows, np.array([row]))[0])
    needed = least_counts(load, rows.slots, rows.gpus, target * (1 + gap))
    fewest = np.ones(len(load), dtype=np.int64) if needed is None else needed[0]
    return shared_counts(load, rows.slots, rows.gpus, fewest)


def _try_transfers(rows: Rows, state: State, gap: float, budget: SearchBudget, seed: int) -> None:
    """Moves replicas from expert to expert in rows with a gap, from the counts that they have."""
    if rows.slots in (rows.gpus, rows.loads.shape[2]) or rows.spread_nodes > 1:
        return
    index = state.unsolved(rows, gap)
    for row in index[np.isfinite(state.value[index])].tolist() if budget.transfers else ():
        if is_over():
            return
        now = np.bincount(state.slots[row].ravel(), minlength=rows.loads.shape[2])
        starts = np.concatenate([now[None], _shared_counts(rows, state, row, gap)])
        limit = float(state.target(rows, np.array([row]))[0]) * (1 + TRANSFERS.above * gap)
        counts = transferred(
            rows.loads[row], starts, rows.gpus, limit, steps=budget.transfers, seed=seed
        )
        _offer_finalists(rows, state, row, counts, gap)


def _offer_finalists(rows: Rows, state: State, row: int, counts: Slots, gap: float) -> None:
    """Packs counts [ways, experts] for one row and improves the best few."""
    if not len(counts):
        return
    part = rows.take(np.full(len(counts), row))
    packing = pack(part.loads, counts, rows.gpus, rows.spread_nodes)
    value = value_of(part, packing.slots)
    value[is_invalid(part, packing.slots)] = np.inf
    best = np.argsort(value, kind="stable")[: SHARES.finalists]
    finalists = SlotPacking(slots=packing.slots[best], loads=part.loads[best])
    target = float(state.target(rows, np.array([row]))[0])
    stop_at = np.full(len(best), target * (1 + BALANCE.stop_share * gap))
    exchange_to_improve(finalists, BALANCE.exchange_rounds, stop_at, rows.spread_nodes)
    if rows.spread_nodes == 1:
        split_pairs(finalists, BALANCE.exchange_rounds, stop_at)
    state.offer_best(rows, row, finalists.slots)


def _bound_by_counts(
    rows: Rows, state: State, gap: float, steps: int, before: Loads | None = None
) -> None:
    """The bound by replica counts where an expert is hot; the counts it comes upon are packed too.

    Rows that still have their value in `before` are left out.
    """
    index = state.unsolved(rows, gap * BALANCE.search_share)
    if before is not None:
        index = index[state.value[index] < before[index]]
    hot = rows.loads[index].max(axis=(1, 2)) > BALANCE.hot_load
    index = index[np.isfinite(state.value[index]) & hot]
    for row in index.tolist() if steps else ():
        if is_over():
            break
        load = rows.loads[row, int(rows.loads[row].max(axis=1).argmax())]
        result = pair_bound(load, rows.slots, rows.gpus)
        if result is None:
            below = state.value[row] / (1 + BALANCE.search_share * gap) * (1 + _ROUNDING)
            result = count_bound(
                load,
                rows.slots,
                rows.gpus,
                low=state.bound[row],
                high=below,
                work=BALANCE.count_work,
                steps=steps,
            )
        state.bound[row] = max(state.bound[row], result.bound)
        if result.counts:
            repeated = np.full(len(result.counts), row)
            target = state.target(rows, repeated)
            slots = _packed(rows.take(repeated), np.stack(result.counts), target, gap)
            state.offer_best(rows, row, slots)
    split_gpu_pairs(rows, state, gap)


def split_gpu_pairs(rows: Rows, state: State, gap: float) -> None:
    """Splits the replicas of GPU pairs in a better way, for unsolved rows."""
    index: NDArray[np.int64] = state.unsolved(rows, gap * BALANCE.search_share)
    index = index[np.isfinite(state.value[index])]
    if not len(index) or rows.spread_nodes > 1:
        return
    part = rows.take(index)
    packing = SlotPacking(slots=state.slots[index].copy(), loads=part.loads)
    stop_at = state.target(rows, index) * (1 + BALANCE.stop_share * gap)
    split_pairs(packing, BALANCE.exchange_rounds, stop_at)
    state.offer(rows, index, packing.slots)
