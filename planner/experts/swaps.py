"""What a placement's traffic costs, term by term, and how exchanging two replicas changes it.

Every term answers for all pairs at once, and is told of each exchange, so that a step costs what it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.packing import (
    SlotPacking,
    exchange_to_improve,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.problem import TRAFFIC, Ids, Loads, Slots, SlotShape
from meshwright.planner.solvers.clock import is_over

_NO_BLOCK = 100
"""Replicas in the column of no block: neither none nor one."""


class Term(Protocol):
    """One part of the cost of a state."""

    def cost(self) -> float:
        """As things are."""

    def change(self) -> Loads:
        """More of it if u and v change places, [units, units]."""

    def swap(self, a: int, b: int) -> None:
        """Units a and b change places."""


class Touched:
    """Blocks that tokens touch.

    What an exchange does follows from three counts: tokens of u for which u is alone in its block (they leave
    it), tokens of u that touch nothing in block b (they enter it), and tokens of both u and v in which u is
    alone (they stay, v comes). An exchange alters them only for the tokens of the two.
    """

    def __init__(self, chosen: Ids, block: Ids, weight: float) -> None:
        """Units that each token chose [tokens, top-k], each at most once, -1 for none; `block` [units]."""
        units, blocks = len(block), int(block.max()) + 1
        self._weight, self._units = weight, units
        self._chosen = np.where(chosen < 0, units, chosen)
        everyone = np.arange(len(chosen))
        self._member = np.zeros((units + 1, len(chosen)), dtype=bool)
        self._member[self._chosen, everyone[:, None]] = True
        self._block = np.append(block, blocks)
        self._here = np.zeros((len(chosen), blocks + 1), dtype=np.int16)
        np.add.at(self._here, (everyone[:, None], self._block[self._chosen]), 1)
        self._here[:, blocks] = _NO_BLOCK
        self._absent = np.zeros((units + 1, blocks), dtype=np.int64)
        for b in range(blocks):
            missing = self._chosen[self._here[:, b] == 0].ravel()
            self._absent[:, b] = np.bincount(missing, minlength=units + 1)
        ends = [(b, self._here[:, b]) for b in range(blocks)]
        self._alone, self._pairs = self._lonely(self._chosen, ends)

    def cost(self) -> float:
        """Weighted blocks that all tokens touch."""
        return self._weight * int((self._here[:, :-1] > 0).sum())

    def change(self) -> Loads:
        """See Term; 0 within a block."""
        block, n = self._block[:-1], self._units
        moved = self._absent[:n][:, block] - self._alone[:n, None]
        both = self._pairs[:n, :n]
        total = moved + moved.T + both + both.T
        total[block[:, None] == block[None, :]] = 0
        return np.asarray(self._weight * total)

    def swap(self, a: int, b: int) -> None:
        """See Term."""
        home, away = int(self._block[a]), int(self._block[b])
        if home == away:
            return
        of_a, of_b = self._member[a], self._member[b]
        rows = np.flatnonzero(of_a | of_b)
        part = self._chosen[rows]
        # Tokens of both keep their counts: one goes, one comes.
        comes = of_b[rows].astype(np.int16) - of_a[rows]
        before = [self._here[rows, home], self._here[rows, away]]
        after = [before[0] + comes, before[1] - comes]
        alone, pairs = self._lonely(part, [(home, before[0]), (away, before[1])])
        self._block[a], self._block[b] = away, home
        alone_now, pairs_now = self._lonely(part, [(home, after[0]), (away, after[1])])
        self._alone += alone_now - alone
        self._pairs += pairs_now - pairs
        for block, old, new in ((home, before[0], after[0]), (away, before[1], after[1])):
            self._here[rows, block] = new
            for sign, fresh in ((1, (new == 0) & (old > 0)), (-1, (old == 0) & (new > 0))):
                entered = part[fresh].ravel()
                self._absent[:, block] += sign * np.bincount(entered, minlength=self._units + 1)

    def _lonely(self, chosen: Ids, ends: list[tuple[int, NDArray[np.int16]]]) -> tuple[Ids, Ids]:
        """Tokens where u is alone in its block, [units]; and v with it, [units, units].

        For tokens `chosen` [tokens, top-k], in the blocks of `ends`, each with its replicas of every token.
        """
        size = self._units + 1
        units, tokens = [], []
        for block, here in ends:
            rows = np.flatnonzero(here == 1)
            token = chosen[rows]
            column = (self._block[token] == block).argmax(axis=1)
            units.append(token[np.arange(len(rows)), column])
            tokens.append(token)
        alone = np.concatenate(units)
        index = (alone[:, None] * size + np.concatenate(tokens)).ravel()
        pairs = np.bincount(index, minlength=size * size).reshape(size, size)
        return np.bincount(alone, minlength=size), pairs


class Apart:
    """Weight of the pairs of units that lie in different blocks: the cut of their co-activation."""

    def __init__(self, pairs: Loads, block: Ids, weight: float) -> None:
        """Pairs [units, units], symmetric with a zero diagonal; `block` [units]."""
        self._pairs, self._block, self._weight = pairs, block.copy(), weight
        inside = np.eye(int(block.max()) + 1)[block]
        self._to = pairs @ inside

    def cost(self) -> float:
        """Each pair counts once."""
        inside = self._to[np.arange(len(self._block)), self._block].sum()
        return float(self._weight * (self._pairs.sum() - inside) / 2)

    def change(self) -> Loads:
        """See Term; 0 within a block (Kernighan and Lin, 1970: external less internal)."""
        block = self._block
        inside = self._to[np.arange(len(block)), block]
        moved = inside[:, None] - self._to[:, block]
        total = moved + moved.T + 2 * self._pairs
        total[block[:, None] == block[None, :]] = 0
        return np.asarray(self._weight * total)

    def swap(self, a: int, b: int) -> None:
        """See Term."""
        home, away = int(self._block[a]), int(self._block[b])
        shift = self._pairs[:, b] - self._pairs[:, a]
        self._to[:, home] += shift
        self._to[:, away] -= shift
        self._block[a], self._block[b] = away, home


class FromSources:
    """Choices that leave the block of the token's source, replicas serving the nearest sources first.

    Of w choices of an expert with c replicas, a from sources in a block that holds r of them, min(a, r w / c)
    stay, as replicas serve even shares; what is left finds room elsewhere, as the shares add up to w.
    """

    def __init__(self, sources: Loads, expert: Ids, block: Ids, weight: float) -> None:
        """Choices [blocks, experts] from sources in each block; `expert` and `block` [units]."""
        self._sources, self._expert, self._block, self._weight = (
            sources.T,
            expert,
            block.copy(),
            weight,
        )
        self._held = np.zeros(self._sources.shape, dtype=np.int64)
        np.add.at(self._held, (expert, block), 1)
        self._share = self._sources.sum(axis=1) / np.maximum(self._held.sum(axis=1), 1)

    def cost(self) -> float:
        """Weighted choices that leave."""
        stay = np.minimum(self._sources, self._held * self._share[:, None])
        return float(self._weight * (self._sources.sum() - stay.sum()))

    def change(self) -> Loads:
        """See Term; 0 within a block. Exact for different experts."""
        replicas, share = self._held, self._share[:, None]
        stay = np.minimum(self._sources, replicas * share)
        gained = np.minimum(self._sources, (replicas + 1) * share) - stay
        lost = stay - np.minimum(self._sources, (replicas - 1) * share)
        block, expert = self._block, self._expert
        moved = lost[expert, block][:, None] - gained[expert][:, block]
        total = moved + moved.T
        total[block[:, None] == block[None, :]] = 0
        return np.asarray(self._weight * total)

    def swap(self, a: int, b: int) -> None:
        """See Term."""
        home, away = int(self._block[a]), int(self._block[b])
        for unit, old, new in ((a, home, away), (b, away, home)):
            self._held[self._expert[unit], old] -= 1
            self._held[self._expert[unit], new] += 1
        self._block[a], self._block[b] = away, home


def replica_pairs(pairs: Loads, slots: Slots) -> Loads:
    """Co-activation of experts [experts, experts] shared evenly by their replicas, [slots, slots]."""
    expert = slots.ravel()
    counts = np.bincount(expert, minlength=len(pairs))
    even = pairs / np.outer(np.maximum(counts, 1), np.maximum(counts, 1))
    shared = even[np.ix_(expert, expert)]
    shared[expert[:, None] == expert[None, :]] = 0.0
    return np.asarray(shared)


# Replicas on GPUs while they change places: what their traffic costs, and loads, kept up to date.


@dataclass(frozen=True, kw_only=True)
class Room:
    """How often an expert may lie in a block of `gpus` GPUs, [experts]."""

    gpus: int
    most_replicas: Slots


class SwapState:
    """Where every replica (or other unit, such as a group of experts) is."""

    def __init__(self, gpu: Ids, *, expert: Ids, weight: Loads, terms: tuple[Term, ...]) -> None:
        """`gpu` and `expert` [units]; `weight` [windows, units] is load over the mean GPU load."""
        self.gpu = gpu.copy()
        self._expert, self._weight, self._terms = expert, weight, terms
        self._gpus = int(gpu.max()) + 1
        self._same = expert[:, None] == expert[None, :]

    def cost(self) -> float:
        """The terms' sum."""
        return sum(term.cost() for term in self._terms)

    def change(self) -> Loads:
        """What the terms' sum is more if two units change places, [units, units]."""
        return np.asarray(sum(term.change() for term in self._terms))

    def loads(self, size: int) -> Loads:
        """Load of every block of `size` GPUs in mean GPU loads, [windows, blocks]."""
        index = self.gpu // size
        return np.stack(
            [np.bincount(index, weights=w, minlength=self._gpus // size) for w in self._weight]
        )

    def overload(self, cap: float, size: int) -> float:
        """Load above `cap` of blocks of `size` GPUs, summed over blocks and windows, in mean GPU loads."""
        return float(np.maximum(self.loads(size) - cap, 0).sum())

    def overload_change(self, cap: float, size: int) -> Loads:
        """Overload more if two units change places, [units, units]."""
        place = self.gpu // size
        total = np.zeros((len(place), len(place)))
        for weight, load in zip(self._weight, self.loads(size), strict=True):
            above = load[place] - cap
            after = (above - weight)[:, None] + weight[None, :]
            np.maximum(after, 0.0, out=after)
            after -= np.maximum(above, 0.0)[:, None]
            total += after
            total += after.T
        total[place[:, None] == place[None, :]] = 0.0
        return total

    def barred(self, rooms: tuple[Room, ...]) -> NDArray[np.bool_]:
        """Pairs that may not change places: one's expert has no room where the other is, [units, units]."""
        expert, bad = self._expert, self._same
        for room in rooms:
            place = self.gpu // room.gpus
            replicas = np.zeros((self._gpus // room.gpus, len(room.most_replicas)), dtype=np.int64)
            np.add.at(replicas, (place, expert), 1)
            full = replicas >= room.most_replicas
            stuck = full[place[None, :], expert[:, None]] & (place[:, None] != place[None, :])
            bad = bad | stuck | stuck.T
        return np.asarray(bad)

    def swap(self, a: int, b: int) -> None:
        """Units a and b change places."""
        for term in self._terms:
            term.swap(a, b)
        self.gpu[a], self.gpu[b] = self.gpu[b], self.gpu[a]


# Tabu search over exchanges of replicas: less traffic, under caps on loads.


_NONE = 1e-9
_LEAST = 1e-9
"""Of the start's cost: what is an improvement, as sums round."""


@dataclass(frozen=True, kw_only=True)
class Cap:
    """What a state must keep to."""

    loads: tuple[tuple[int, float], ...]
    """GPUs of a block, and the most load of such a block in mean GPU loads; the smallest blocks first."""
    rooms: tuple[Room, ...]
    price: float
    """Cost of a mean GPU load above the caps, while the search passes through such states."""

    @property
    def gpus(self) -> int:
        """Units that lie together in a block of so many GPUs need not change places."""
        return self.loads[0][0]

    def overload(self, state: SwapState) -> float:
        """Load above the caps."""
        return sum(state.overload(load, gpus) for gpus, load in self.loads)

    def overload_change(self, state: SwapState) -> Loads:
        """The same, more if two units change places, [units, units]."""
        return np.asarray(sum(state.overload_change(load, gpus) for gpus, load in self.loads))


@dataclass(frozen=True, kw_only=True)
class SwapResult:
    """GPUs of the best state within the cap [units], None if there was none; its cost; the steps taken."""

    gpu: Ids | None
    cost: float
    steps: int


def tabu_search(state: SwapState, cap: Cap, *, steps: int, patience: int, seed: int) -> SwapResult:
    """The best exchange of two units at every step, better or not; `state` ends where the search stopped.

    A unit does not go back to a place for some steps, unless that betters the best (Glover, Tabu Search part
    I, 1989). Ends after `steps`, or `patience` steps without a better state.
    """
    chance = np.random.default_rng(seed)
    places = int(state.gpu.max()) // cap.gpus + 1
    until = np.zeros((len(state.gpu), places), dtype=np.int64)
    now, over = state.cost(), cap.overload(state)
    least_change = _LEAST * max(abs(now), 1.0)
    best = state.gpu.copy() if over <= _NONE else None
    least_cost = now if over <= _NONE else np.inf
    lowest, since, step = now + cap.price * over, 0, 0
    while step < steps and since < patience and not is_over():
        step, since = step + 1, since + 1
        change, overload = state.change(), cap.overload_change(state)
        cost = _open(state, change + cap.price * overload, cap)
        place = state.gpu // cap.gpus
        tabu = until[:, place] > step
        cost[(tabu | tabu.T) & (now + cap.price * over + cost >= lowest - least_change)] = np.inf
        a, b = divmod(int(cost.argmin()), len(place))
        if not np.isfinite(cost[a, b]):
            break
        until[a, place[a]] = until[b, place[b]] = step + int(chance.integers(*TRAFFIC.tenure))
        state.swap(a, b)
        now, over = now + float(change[a, b]), max(over + float(overload[a, b]), 0.0)
        if now + cap.price * over < lowest - least_change:
            lowest, since = now + cap.price * over, 0
        if over <= _NONE and now < least_cost - least_change:
            best, least_cost = state.gpu.copy(), now
    return SwapResult(gpu=best, cost=least_cost, steps=step)


def _open(state: SwapState, cost: Loads, cap: Cap) -> Loads:
    place = state.gpu // cap.gpus
    shut = (place[:, None] == place[None, :]) | state.barred(cap.rooms)
    return np.where(shut, np.inf, cost)


def step_cost_s(units: int, windows: int, levels: int, tokens_per_unit: float, rooms: int) -> float:
    """About what a step takes on one core: the work that a time limit is shared out by."""
    pairs_s = units**2 * (1.4e-8 * windows + 2.5e-8 * levels + 2e-8 * rooms)
    return 2e-4 + pairs_s + levels * (2e-4 + 5e-7 * tokens_per_unit)


# Each node's replicas on its GPUs again, more evenly: which node holds what stays.


def packed(gpu: Ids, expert: Ids, weight: Loads, shape: SlotShape) -> Ids:
    """GPU of every replica [replicas], nodes as in `gpu`; weight [windows, replicas] over the mean GPU load.

    The best of the packing as it is, of one from the start and of one dealt out, after exchanges. An expert's
    replicas lie on different GPUs then; there are no more of them on a node than it has GPUs.
    """
    packed_gpu = gpu.copy()
    size = shape.node_gpus
    for node in range(shape.nodes):
        members = np.flatnonzero(gpu // size == node)
        members = members[np.lexsort((members, gpu[members]))]
        node_experts, index = np.unique(expert[members], return_inverse=True)
        # Replicas share evenly: a node's part of an expert is a replica's load times how many it has.
        loads = np.zeros((1, len(weight), len(node_experts)))
        np.add.at(loads[0].T, index, weight[:, members].T)
        now = index.reshape(1, size, -1).astype(np.int64)
        # Dealt out in turn, an expert's replicas lie on different GPUs whatever their counts.
        dealt = np.sort(index).reshape(1, -1, size).swapaxes(1, 2).astype(np.int64)
        tried = [pack(loads, np.bincount(index)[None], size).slots, now.copy(), dealt.copy()]
        best, least_load = None, np.inf
        for slots in tried:
            if has_duplicates(slots)[0]:
                continue
            packing = SlotPacking(slots=slots, loads=loads)
            exchange_to_improve(
                packing, TRAFFIC.packing_exchanges, np.array([loads.sum(axis=2).max() / size])
            )
            value = float(packing.gpu_loads().max())
            if value < least_load - 1e-12:
                best, least_load = packing.slots[0], value
        if best is not None:
            packed_gpu[members[np.argsort(index, kind="stable")]] = (
                _gpus_by_expert(best) + node * size
            )
    return packed_gpu


def _gpus_by_expert(slots: Ids) -> Ids:
    """GPUs of slots [gpus, per GPU] in the order of the experts they hold, then of the GPUs."""
    flat = slots.ravel()
    return np.asarray(np.argsort(flat, kind="stable") // slots.shape[1])
