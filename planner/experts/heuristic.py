"""The fast part: a first answer for every row, then other replica counts and splits where a gap is left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from heapq import heapify, heapreplace
from itertools import combinations, combinations_with_replacement
from math import comb
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import ROUNDING
from meshwright.planner.experts.bound import balance_bound, count_bound, least_counts, pair_bound
from meshwright.planner.experts.packing import (
    Rows,
    SlotPacking,
    State,
    exchange_to_improve,
    greedy_counts,
    has_duplicates,
    is_invalid,
    pack,
    slot_loads,
    value_of,
)
from meshwright.planner.experts.problem import BALANCE, RECOUNT, SHARES, TRANSFERS, Loads, Slots
from meshwright.planner.solvers.clock import is_over

# Two GPUs shared out anew: every way to split the replicas of the fullest GPU and of another at once.
#
# A larger step than one exchange; it pays where slots per GPU are few and exchanges alone get stuck.


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

    GPUs of more slots stay.

    Parameters
    ----------
    packing
        Slots and loads of all rows.
    rounds
        Splits that a row gets, at most.
    stop_at
        Largest GPU loads that are good enough, [rows].
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


# Other replica counts for rows of few slots: every way to give the spare replicas, or many drawn at random.
#
# With few slots on a GPU the counts decide how even a packing can get, and packing is cheap.


def recount(rows: Rows, state: State, gap: float, tries: int, seed: int) -> None:
    """Up to `tries` counts for every unsolved row, the best few improved further; `state` changes in place.

    Rows of more slots than RECOUNT allows stay: too small a part of their counts could be tried.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    gap
        Relative: rows as near to their bound count as solved.
    tries
        Replica counts of a row that are packed, at most.
    seed
        Of the draws; equal loads draw the same.
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
        """Slots [few, gpus, slots of a GPU] of the best counts.

        Parameters
        ----------
        load
            Of each expert in its worst window, [experts].
        fewest
            Replicas that each expert gets at the least, [experts].
        spare
            Replicas to give beyond these, 0 or more.
        tries
            Counts that are packed, about: all of them where there are no more.
        """
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
            values.append(largest + _BIG * has_duplicates(packing.slots))
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
    """Counts with the smallest largest replica, longest processing time first, exchanges.

    Where an expert is twice on a GPU then, or the spread is broken, replicas are dealt out and exchanged.

    Parameters
    ----------
    rows
        Layers to place, each in its windows.
    gap
        Share above the bound with which a row counts as solved, from 0.
    """
    counts = greedy_counts(rows.loads.max(axis=1), rows.slots, rows.gpus)
    bound = balance_bound(rows.loads, rows.slots, rows.gpus)
    target = np.maximum(bound, rows.needed)
    slots = _packed(rows, counts, target, gap)
    invalid = np.flatnonzero(is_invalid(rows, slots))
    if len(invalid):
        dealt = np.stack([_dealt(each, rows.gpus, rows.spread_nodes) for each in counts[invalid]])
        packing = SlotPacking(slots=dealt, loads=rows.loads[invalid])
        stop_at = target[invalid] * (1 + BALANCE.stop_share * gap)
        exchange_to_improve(packing, BALANCE.exchange_rounds, stop_at, rows.spread_nodes)
        slots[invalid] = packing.slots
    value = value_of(rows, slots)
    value[is_invalid(rows, slots)] = np.inf
    return State(slots=slots, value=value, bound=np.minimum(bound, value))


def search_limits(rows: Rows, state: State, gap: float, budget: SearchBudget) -> None:
    """Betters unsolved rows in place by the replica counts that lower limits on the GPU load ask for.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    gap
        Relative: rows as near to their bound count as solved.
    budget
        Work for each row.
    """
    _bound_by_counts(rows, state, gap, budget.bound_steps)
    _try_limits(rows, state, gap, budget.limits)
    split_gpu_pairs(rows, state, gap)
    _try_shares(rows, state, gap)


def search_counts(rows: Rows, state: State, gap: float, budget: SearchBudget, seed: int) -> None:
    """Betters unsolved rows in place by counts drawn at random, and bounds again what fell.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    gap
        Relative: rows as near to their bound count as solved.
    budget
        Work for each row.
    seed
        Of the draws.
    """
    _try_transfers(rows, state, gap, budget, seed)
    _bound_by_counts(rows, state, gap, budget.bound_steps)
    before = state.value.copy()
    recount(rows, state, gap, budget.recounts, seed)
    _bound_by_counts(rows, state, gap, budget.bound_steps, before)


def _dealt(counts: Slots, gpus: int, nodes: int) -> Slots:
    """Slots [gpus, slots of a GPU] of counts [experts], none twice on a GPU, as many on each node as can be.

    Of c replicas every node gets the whole part of c / nodes; what is left over of one expert after the other
    goes round the nodes. Those of a node go round its GPUs, of which there are no fewer.
    """
    rest = counts % nodes
    first = np.cumsum(rest) - rest
    by_node = []
    for node in range(nodes):
        here = np.repeat(np.arange(len(counts)), counts // nodes + ((node - first) % nodes < rest))
        by_node.append(here.reshape(-1, gpus // nodes).T)
    return np.concatenate(by_node)


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
        marks = [(seen[row], each.tobytes()) for row, each in zip(index, counts, strict=True)]
        is_new = np.array([mark not in before for before, mark in marks])
        for before, mark in marks:
            before.add(mark)
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
            below = state.value[row] / (1 + BALANCE.search_share * gap) * (1 + ROUNDING)
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
    """Splits the replicas of GPU pairs in a better way, for unsolved rows.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    gap
        Relative: rows as near to their bound count as solved.
    """
    index: NDArray[np.int64] = state.unsolved(rows, gap * BALANCE.search_share)
    index = index[np.isfinite(state.value[index])]
    if not len(index) or rows.spread_nodes > 1:
        return
    part = rows.take(index)
    packing = SlotPacking(slots=state.slots[index].copy(), loads=part.loads)
    stop_at = state.target(rows, index) * (1 + BALANCE.stop_share * gap)
    split_pairs(packing, BALANCE.exchange_rounds, stop_at)
    state.offer(rows, index, packing.slots)


# Replica counts to try: what a limit on the GPU load needs, and where the spare slots may go.


SPARE_SLOT_RULES = ("hottest", "middle", "smallest")
"""Who gets the slots that the limit does not need: the hottest replicas; the hottest experts that need only
one replica, whose parts then fill gaps; or the smallest experts, so that hot replicas lie alone."""


def counts_within(load: Loads, slots: int, gpus: int, limit: float, rule: str) -> Slots:
    """Replica counts [experts] for a limit on the GPU load, by one load vector [experts].

    The counts with the smallest largest replica where the limit is out of reach.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    limit
        Largest load of a GPU that is aimed at, in the unit of the loads.
    rule
        One of `SPARE_SLOT_RULES`: who gets the slots that are left.
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

    Of more than SHARES.most_ways those with a whole number of hot pieces for every GPU stay, and others
    evenly spaced.

    Parameters
    ----------
    load
        Of each expert, [experts].
    slots
        In all.
    gpus
        That they are divided over, evenly.
    fewest
        Replicas that any placement worth having gives, [experts].
    """
    order = np.argsort(-load, kind="stable")
    cuts = _cuts(load[order], int((fewest > 1).sum()))
    by_content: dict[bytes, Slots] = {}
    for cut in cuts:
        hot, cold = order[:cut], order[cut:]
        hot_counts = _paths(load[hot], slots - len(cold), gpus)
        cold_counts = _paths(load[cold], slots - len(hot), gpus)
        fewest_slots = max(int(fewest[hot].sum()), slots - len(cold) - len(cold_counts) + 1)
        most_slots = len(hot) + len(hot_counts) - 1
        for share in _thinned(fewest_slots, most_slots, gpus, SHARES.most_ways // len(cuts)):
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


def _thinned(fewest: int, largest: int, gpus: int, ways: int) -> NDArray[np.int64]:
    """Shares from `fewest` to `largest`: all, or whole rounds over the GPUs and evenly spaced ones."""
    every = np.arange(fewest, largest + 1)
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

    The search starts from the first of the candidates and from the best of those that are some replicas
    apart. The same loads get the same draws.

    Parameters
    ----------
    loads
        In the unit of `limit`, [windows, experts].
    candidates
        Counts to begin from, [ways, experts].
    gpus
        That the slots are divided over.
    limit
        Largest load of a GPU that is aimed at.
    steps
        Replicas that are moved, at most.
    seed
        Of the draws.
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
        """The first candidate, and the best of the others that differ by some replicas.

        Parameters
        ----------
        candidates
            Counts, [ways, experts]; the first is always among the starts.
        """
        above = self._above(candidates)
        starts = [candidates[0]]
        for way in np.argsort(above, kind="stable").tolist():
            if len(starts) == TRANSFERS.starts:
                break
            apart = [int(np.abs(candidates[way] - start).sum()) // 2 for start in starts]
            if min(apart) >= TRANSFERS.apart:
                starts.append(candidates[way])
        return starts

    def run(self, start: Slots, steps: int) -> None:
        """Steps to the best of the transfers drawn; after some without a gain, on from a good one, jolted.

        Parameters
        ----------
        start
            Counts to begin from, [experts].
        steps
            Transfers that are taken, at most.
        """
        current, score = start, float(self._above(start[None])[0])
        pool = [(score, start.tobytes(), start)]
        waited = 0
        for _ in range(steps):
            if pool[0][0] <= 0 or is_over():
                break
            drawn = self._drawn(current)
            above = self._above(drawn)
            best = int(above.argmin())
            waited = 0 if above[best] < pool[0][0] else waited + 1
            if above[best] < score or waited % TRANSFERS.patience:
                if above[best] <= score * TRANSFERS.worse:
                    current, score = drawn[best], float(above[best])
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
        valid = drawn[((drawn >= 1) & (drawn <= self._gpus)).all(axis=1)]
        return valid if len(valid) else counts[None]

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
    if mark in [entry for _, entry, _ in pool]:
        return pool
    return sorted([*pool, (score, mark, counts)], key=lambda entry: entry[:2])[: TRANSFERS.kept]
