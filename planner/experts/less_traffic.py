"""Placements with less traffic between nodes and leaves, under a cap on the balance.

What a token touches follows from the nodes alone (every level above is made of whole nodes), so nodes are
decided first, under a cap on their loads, by tabu search. Then each node packs its GPUs, and a
second search under the cap on GPU loads mends what no packing of those nodes could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import ROUNDING
from meshwright.planner.experts.bound import balance_bound, partitions
from meshwright.planner.experts.inputs import Flows, Level, slot_choices
from meshwright.planner.experts.packing import (
    Crew,
    SlotPacking,
    Solved,
    exchange_to_improve,
    has_duplicates,
    pack,
)
from meshwright.planner.experts.problem import (
    GROUPS,
    TRAFFIC,
    Ids,
    Loads,
    PlacementLimits,
    Slots,
    SlotShape,
)
from meshwright.planner.experts.solve import PlacementEffort, solve_nodes, splits
from meshwright.planner.solvers.clock import is_over

# What a placement's traffic costs, term by term, and how exchanging two replicas changes it.
#
# Every term answers for all pairs at once, and is told of each exchange, so that a step costs what it
# touches.


_NO_BLOCK = 100
"""Replicas in the column of no block: neither none nor one."""


class Term(Protocol):
    """One part of the cost of a state."""

    def cost(self) -> float:
        """As things are."""

    def change(self) -> Loads:
        """More of it if u and v change places, [units, units]."""

    def swap(self, a: int, b: int) -> None:
        """Units a and b change places.

        Parameters
        ----------
        a, b
            Their numbers, from 0.
        """


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
        old_alone, old_pairs = self._lonely(part, [(home, before[0]), (away, before[1])])
        self._block[a], self._block[b] = away, home
        new_alone, new_pairs = self._lonely(part, [(home, after[0]), (away, after[1])])
        self._alone += new_alone - old_alone
        self._pairs += new_pairs - old_pairs
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
        self._sources = sources.T
        self._expert = expert
        self._block = block.copy()
        self._weight = weight
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
    """Co-activation of experts [experts, experts] shared evenly by their replicas, [slots, slots].

    Parameters
    ----------
    pairs
        How many tokens chose two experts together, [experts, experts].
    slots
        Expert of each slot, [gpus, slots of a GPU].
    """
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
        """Load of every block of `size` GPUs in mean GPU loads, [windows, blocks].

        Parameters
        ----------
        size
            GPUs of a block, a divisor of all.
        """
        index = self.gpu // size
        return np.stack(
            [np.bincount(index, weights=w, minlength=self._gpus // size) for w in self._weight]
        )

    def overload(self, cap: float, size: int) -> float:
        """Load above `cap` of blocks of `size` GPUs, summed over blocks and windows, in mean GPU loads.

        Parameters
        ----------
        cap
            Most of a block, in loads of a mean GPU.
        size
            GPUs of a block.
        """
        return float(np.maximum(self.loads(size) - cap, 0).sum())

    def overload_change(self, cap: float, size: int) -> Loads:
        """Overload more if two units change places, [units, units].

        Parameters
        ----------
        cap
            Most of a block, in loads of a mean GPU.
        size
            GPUs of a block.
        """
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
        """Pairs that may not change places: one's expert has no room where the other is, [units, units].

        Parameters
        ----------
        rooms
            How often an expert may lie in blocks of some sizes; none where any exchange may be.
        """
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
        """Units a and b change places.

        Parameters
        ----------
        a, b
            Their numbers, from 0.
        """
        for term in self._terms:
            term.swap(a, b)
        self.gpu[a], self.gpu[b] = self.gpu[b], self.gpu[a]


# Tabu search over exchanges of replicas: less traffic, under caps on loads.


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

    Parameters
    ----------
    state
        Where every unit is.
    cap
        What a state must keep to, and the price of not doing so on the way.
    steps
        Exchanges at most.
    patience
        Of them without a better state.
    seed
        Of how long places stay shut.
    """
    chance = np.random.default_rng(seed)
    places = int(state.gpu.max()) // cap.gpus + 1
    until = np.zeros((len(state.gpu), places), dtype=np.int64)
    now, over = state.cost(), cap.overload(state)
    least_change = ROUNDING * max(abs(now), 1.0)
    best = state.gpu.copy() if over <= ROUNDING else None
    least_cost = now if over <= ROUNDING else np.inf
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
        now = now + float(change[a, b])
        over = max(over + float(overload[a, b]), 0.0)
        if now + cap.price * over < lowest - least_change:
            lowest, since = now + cap.price * over, 0
        if over <= ROUNDING and now < least_cost - least_change:
            best, least_cost = state.gpu.copy(), now
    return SwapResult(gpu=best, cost=least_cost, steps=step)


def _open(state: SwapState, cost: Loads, cap: Cap) -> Loads:
    place = state.gpu // cap.gpus
    shut = (place[:, None] == place[None, :]) | state.barred(cap.rooms)
    return np.where(shut, np.inf, cost)


def step_cost_s(units: int, windows: int, levels: int, tokens_per_unit: float, rooms: int) -> float:
    """About what a step takes on one core: the work that a time limit is shared out by.

    Parameters
    ----------
    units
        That may change places.
    windows
        Of loads.
    levels
        Of the fabric that count.
    tokens_per_unit
        Choices of a unit; 0 without a trace.
    rooms
        Limits on replicas in a block.
    """
    pairs_s = units**2 * (1.4e-8 * windows + 2.5e-8 * levels + 2e-8 * rooms)
    return 2e-4 + pairs_s + levels * (2e-4 + 5e-7 * tokens_per_unit)


# Each node's replicas on its GPUs again, more evenly: which node holds what stays.


def packed(gpu: Ids, expert: Ids, weight: Loads, shape: SlotShape) -> Ids:
    """GPU of every replica [replicas], nodes as in `gpu`; weight [windows, replicas] over the mean GPU load.

    The best of the packing as it is, of one from the start and of one dealt out, after exchanges. An expert's
    replicas lie on different GPUs then; there are no more of them on a node than it has GPUs.

    Parameters
    ----------
    gpu
        Of every replica now, [replicas].
    expert
        Of every replica, [replicas].
    weight
        Loads over the mean GPU load, [windows, replicas].
    shape
        Of slots, GPUs and nodes.
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
            # GPUs of slots [gpus, per GPU] in the order of the experts they hold, then of the GPUs.
            flat = best.ravel()
            packed_gpu[members[np.argsort(index, kind="stable")]] = (
                np.asarray(np.argsort(flat, kind="stable") // best.shape[1]) + node * size
            )
    return packed_gpu


@dataclass(frozen=True, kw_only=True)
class NodeExchange:
    """One layer's exchange of replicas between nodes."""

    flows: Flows
    experts: int
    shape: SlotShape
    levels: tuple[Level, ...]
    cap: float
    """Largest load of a GPU over the mean."""
    node_cap: float
    """The same of a node."""
    loads: Loads
    """Over the mean GPU load, [windows, experts]."""
    spread: bool = False
    """Whether replicas of an expert are kept on different nodes, as far as there are nodes."""
    near: bool = False
    """Whether tokens take replicas in nodes that they touch anyway."""
    steps: int = TRAFFIC.most_steps

    @property
    def scale(self) -> float:
        """Tokens; 1 where only shares are known."""
        return 1.0 if self.flows.tokens is None else float(self.flows.tokens.shape[1])

    def choices(self, slots: Slots) -> Ids | None:
        """Replica of each choice [tokens, top-k], replicas numbered by their slots.

        Parameters
        ----------
        slots
            Expert of each slot, [gpus, slots of a GPU].
        """
        if self.flows.tokens is None:
            return None
        near = self.shape.node_gpus if self.near else None
        return slot_choices(self.flows.tokens[0], slots, self.experts, near)

    def terms(self, slots: Slots, choice: Ids | None, gpu: Ids) -> tuple[Term, ...]:
        """What is minimised, for replicas as numbered by `slots` on `gpu` [replicas].

        Blocks that tokens touch, or else the share of pairs apart; and the share of choices that leave their
        source's block, for each token, as a token's copy to its own block is free.

        Parameters
        ----------
        slots
            By which replicas are numbered, [gpus, slots of a GPU].
        choice
            Replica of each choice of the tokens, [tokens, top-k]; None without a trace.
        gpu
            Of every replica, [replicas].
        """
        terms: list[Term] = []
        for level in self.levels:
            if level.weight <= 0:
                continue
            block = gpu // level.gpus
            if choice is not None:
                terms.append(Touched(choice, block, level.weight))
            elif self.flows.pairs is not None:
                pairs = replica_pairs(self.flows.pairs[0], slots)
                terms.append(Apart(pairs, block, level.weight * 2 / max(pairs.sum(), 1e-300)))
            if self.flows.sources is not None:
                at_block = (
                    self.flows.sources[0]
                    .reshape(int(block.max()) + 1, -1, self.experts)
                    .sum(axis=1)
                )
                weight = level.weight * self.scale / max(at_block.sum(), 1e-300)
                terms.append(FromSources(at_block, slots.ravel(), block, weight))
        return tuple(terms)

    def cost(self, slots: Slots) -> float:
        """Of a placement, replicas of an expert taken anew.

        Parameters
        ----------
        slots
            Expert of each slot, [gpus, slots of a GPU].
        """
        gpu = np.arange(self.shape.slots) // self.shape.per_gpu
        return sum(term.cost() for term in self.terms(slots, self.choices(slots), gpu))


def layer_caps(best: Loads, cap: float) -> Loads:
    """Cap of every layer [layers] such that their mean is at most `cap`, for the balance reached, [layers].

    A layer that one hot expert keeps above the cap stays where it is; the others make up for it as far as
    they can, all with one cap.

    Parameters
    ----------
    best
        The least load of the busiest GPU over the mean that each layer reached, [layers].
    cap
        Most of their mean.
    """
    if best.max() <= cap:
        return np.full(len(best), cap)
    low, high = 1.0, cap
    for _ in range(40):
        middle = (low + high) / 2
        if np.maximum(best, middle).mean() > cap:
            high = middle
        else:
            low = middle
    return np.maximum(best, low)


def less_traffic(
    flows: Flows,
    loads: Loads,
    solved: Solved,
    *,
    shape: SlotShape,
    levels: tuple[Level, ...],
    cap: float,
    spread: bool,
    workers: int,
    near: bool = False,
    time_limit_s: float = 30.0,
) -> Solved:
    """The placement with replicas exchanged within the cap; a layer where nothing helps stays as it is.

    The time limit is shared out over the layers as steps of the search, about what 2 cores do in it.

    Parameters
    ----------
    flows
        Ways of the tokens, of all layers.
    loads
        Over the mean GPU load, [layers, windows, experts].
    solved
        The placement to begin from.
    shape
        Of slots, GPUs and nodes.
    levels
        Of the fabric, with what touching a block costs.
    cap
        Mean balance that may be reached.
    spread
        Whether replicas of an expert are kept on different nodes.
    workers
        Processes.
    near
        Whether tokens take replicas in nodes that they touch anyway.
    time_limit_s
        Shared out over the layers.
    """
    caps = layer_caps(solved.value, cap)
    rounds = TRAFFIC.rounds if near and shape.slots > loads.shape[2] else 1
    # Steps of a layer's first search; the second takes about half as many.
    choices = (
        0
        if flows.tokens is None
        else min(flows.tokens.shape[1], TRAFFIC.most_tokens) * flows.tokens.shape[2]
    )
    rooms = 2 if shape.slots > loads.shape[2] else 0
    each_s = step_cost_s(shape.slots, loads.shape[1], len(levels), choices / shape.slots, rooms)
    steps = int(
        np.clip(2 * (time_limit_s / rounds) / (1.6 * len(loads) * each_s), 10, TRAFFIC.most_steps)
    )
    jobs = [
        (
            NodeExchange(
                flows=flows.layer(layer),
                experts=loads.shape[2],
                shape=shape,
                levels=levels,
                cap=float(caps[layer]),
                node_cap=1 + (cap - 1) / 2,
                loads=loads[layer],
                spread=spread,
                near=near,
                steps=steps,
            ),
            solved.slots[layer],
            rounds,
        )
        for layer in range(len(loads))
    ]
    with Crew(workers) as crew:
        slots: Slots = np.stack(crew.map(_layer, jobs))
    value = SlotPacking(slots=slots, loads=loads).gpu_loads().max(axis=(1, 2))
    return Solved(slots=slots, value=value, bound=np.minimum(solved.bound, value))


def _layer(job: tuple[NodeExchange, Slots, int]) -> Slots:
    search, slots, rounds = job
    for _ in range(rounds):
        if is_over():
            break
        slots = less_of(search, slots)
    return slots


def less_of(search: NodeExchange, slots: Slots) -> Slots:
    """Slots [gpus, per GPU] with replicas exchanged so that traffic costs less, within the caps.

    `slots` where nothing helps. An expert stays at most once on a GPU.

    Parameters
    ----------
    search
        The layer, its traffic and its caps.
    slots
        Expert of each slot to begin from, [gpus, slots of a GPU].
    """
    layer = _Layer(search, slots)
    best = slots
    least_cost = search.cost(slots)
    for candidate in layer.mended(layer.gpus_by_node()):
        if not layer.within(candidate):
            continue
        cost = search.cost(candidate)
        if cost < least_cost * (1 - 1e-12):
            best = candidate
            least_cost = cost
    return np.sort(best, axis=1)


class _Layer:
    """A layer's replicas by number; which token goes to which replica is that of the start."""

    def __init__(self, search: NodeExchange, slots: Slots) -> None:
        self._search, self._start = search, slots
        self._expert = slots.ravel()
        self._gpu: Ids = np.arange(len(self._expert)) // slots.shape[1]
        self._choice = search.choices(slots)
        counts = np.bincount(self._expert, minlength=search.experts)
        self._weight = (search.loads / counts)[:, self._expert]
        shape = search.shape
        on_node = (
            -(-counts // shape.nodes) if search.spread else np.full(search.experts, shape.node_gpus)
        )
        once = np.ones(search.experts, dtype=np.int64)
        replicas = shape.slots > search.experts
        self._node_rooms = (Room(gpus=shape.node_gpus, most_replicas=on_node),) if replicas else ()
        self._gpu_rooms = (Room(gpus=1, most_replicas=once), *self._node_rooms) if replicas else ()
        load = self._state(self._gpu).loads(shape.node_gpus).max()
        self._node_load = max(search.node_cap * shape.node_gpus, float(load))
        """The most load of a node, in mean GPU loads; no less than that of the start."""

    def within(self, slots: Slots) -> bool:
        """Whether no GPU and no node is above its cap and no GPU holds an expert twice."""
        counts = np.bincount(slots.ravel(), minlength=self._search.experts)
        load = (self._search.loads / counts)[:, slots].sum(axis=2)
        node = load.reshape(len(load), self._search.shape.nodes, -1).sum(axis=2)
        even = load.max() <= self._search.cap + 1e-9 and node.max() <= self._node_load + 1e-9
        return bool(even) and not has_duplicates(slots[None])[0]

    def gpus_by_node(self) -> Ids:
        """First search: GPUs [replicas] whose nodes cause little traffic, node loads under their cap."""
        search = self._search
        if search.shape.nodes == 1:
            return self._gpu
        cap = self._cap(((search.shape.node_gpus, self._node_load),), self._node_rooms)
        result = tabu_search(
            self._state(self._gpu), cap, steps=search.steps, patience=search.steps, seed=0
        )
        return self._gpu if result.gpu is None else result.gpu

    def mended(self, gpu: Ids) -> list[Slots]:
        """Second search: from those nodes, packed, to GPUs under the cap; the placements on the way."""
        search = self._search
        gpu = self._packed(gpu)
        placements = [self._slots(gpu)]
        # Where there are no nodes to decide first, this is the whole search.
        stages = TRAFFIC.mending if search.shape.nodes > 1 else ((0.0, 1.0),)
        for turn, (looser, share) in enumerate(stages):
            if is_over():
                break
            state = self._state(gpu)
            loads = ((1, search.cap + looser), (search.shape.node_gpus, self._node_load))
            steps = int(share * search.steps) + 5
            result = tabu_search(
                state,
                self._cap(loads, self._gpu_rooms),
                steps=steps,
                patience=TRAFFIC.patience,
                seed=turn,
            )
            gpu = self._packed(state.gpu if result.gpu is None else result.gpu)
            placements.append(self._slots(gpu))
        return placements

    def _cap(self, loads: tuple[tuple[int, float], ...], rooms: tuple[Room, ...]) -> Cap:
        return Cap(loads=loads, rooms=rooms, price=TRAFFIC.overload * self._search.scale)

    def _state(self, gpu: Ids) -> SwapState:
        terms = self._search.terms(self._start, self._choice, gpu)
        return SwapState(gpu, expert=self._expert, weight=self._weight, terms=terms)

    def _packed(self, gpu: Ids) -> Ids:
        finest = min(level.gpus for level in self._search.levels)
        blocks = self._search.shape.gpus // min(finest, self._search.shape.node_gpus)
        if blocks == self._search.shape.gpus:
            return gpu
        return packed(gpu, self._expert, self._weight, replace(self._search.shape, nodes=blocks))

    def _slots(self, gpu: Ids) -> Slots:
        by_gpu = self._expert[np.argsort(gpu, kind="stable")]
        return np.asarray(by_gpu.reshape(self._search.shape.gpus, -1))


# Less traffic where routing groups stay whole: which groups share a node, and which nodes share a leaf.
#
# Replicas of an expert then lie on one node, so what a token touches depends on the groups' nodes alone.


@dataclass(frozen=True, kw_only=True)
class _Ties:
    """Which units (groups, or whole nodes) go together: in tokens, or in counts of pairs."""

    touched: NDArray[np.bool_] | None
    """[tokens, units]."""
    pairs: Loads | None
    """[units, units], zero diagonal."""

    def cost(self, members: Slots) -> float:
        """A set's part of the traffic: tokens that touch it, or, below 0, pairs that it keeps together.

        Parameters
        ----------
        members
            Numbers of the units of one set.
        """
        if self.touched is not None:
            return float(self.touched[:, members].any(axis=1).sum())
        return (
            -float(self.pairs[np.ix_(members, members)].sum()) / 2
            if self.pairs is not None
            else 0.0
        )

    def term(self, block: Ids, weight: float) -> Term:
        """The same for the search.

        Parameters
        ----------
        block
            Where each unit lies, [units].
        weight
            What touching one more block, or a pair apart, costs.
        """
        if self.touched is not None:
            # Columns that are true in each row, [rows, the most in a row], -1 beyond.
            row, column = np.nonzero(self.touched)
            first = np.searchsorted(row, row)
            width = max(int(self.touched.sum(axis=1).max(initial=1)), 1)
            columns = np.full((len(self.touched), width), -1, dtype=np.int64)
            columns[row, np.arange(len(row)) - first] = column
            return Touched(columns, block, weight)
        return Apart(
            np.zeros((len(block),) * 2) if self.pairs is None else self.pairs, block, weight
        )


def _ties(flows: Flows, layer: int, unit_of: Ids) -> _Ties:
    """Of the units that experts belong to, `unit_of` [experts]."""
    units = int(unit_of.max()) + 1
    if flows.tokens is not None:
        tokens = flows.layer(layer).tokens
        touched = np.zeros((0 if tokens is None else tokens.shape[1], units), dtype=bool)
        if tokens is not None:
            row, column = np.nonzero(tokens[0] >= 0)
            touched[row, unit_of[tokens[0][row, column]]] = True
        return _Ties(touched=touched, pairs=None)
    if flows.pairs is None:
        return _Ties(touched=None, pairs=None)
    inside = np.eye(units)[unit_of]
    pairs = inside.T @ flows.pairs[layer] @ inside
    np.fill_diagonal(pairs, 0.0)
    return _Ties(touched=None, pairs=pairs)


def less_grouped_traffic(
    flows: Flows,
    loads: Loads,
    solved: Solved,
    *,
    shape: SlotShape,
    limits: PlacementLimits,
    effort: PlacementEffort,
    levels: tuple[Level, ...],
    caps: Loads,
) -> Solved:
    """The placement with groups on other nodes, tokens touching fewer, within the caps [layers].

    Partitions are tried by rising traffic (all of them where there are few, else what a search finds), until
    one's packing keeps to the cap. Then whole nodes change leaves.

    Parameters
    ----------
    flows
        Ways of the tokens, of all layers.
    loads
        Over the mean GPU load, [layers, windows, experts].
    solved
        The placement to begin from.
    shape
        Of slots, GPUs and nodes.
    limits
        With the number of groups.
    effort
        For the packing of each node.
    levels
        Of the fabric, with what touching a block costs.
    caps
        Largest GPU load of each layer, [layers].
    """
    if not flows.by_token:
        return solved
    layers, _, experts = loads.shape
    per_group = experts // limits.groups
    effort = replace(
        effort,
        exact=False,
        time_limit_s=effort.time_limit_s / TRAFFIC.partitions_tried,
        on_first=None,
    )
    now = solved.slots.reshape(layers, shape.nodes, -1) // per_group
    candidates = [
        _candidates(
            _ties(flows, layer, np.arange(experts) // per_group),
            loads[layer],
            np.array([np.unique(node) for node in now[layer]]),
            cap=float(caps[layer]),
            shape=shape,
        )
        for layer in range(layers)
    ]
    slots = _first_within_caps(
        candidates, loads, solved.slots, caps, shape=shape, limits=limits, effort=effort
    )
    for layer in range(layers):
        slots[layer] = nodes_to_leaves(flows, layer, slots[layer], shape, levels)
    value = SlotPacking(slots=slots, loads=loads).gpu_loads().max(axis=(1, 2))
    return Solved(slots=slots, value=value, bound=np.minimum(solved.bound, value))


def _first_within_caps(
    candidates: list[list[Slots]],
    loads: Loads,
    slots: Slots,
    caps: Loads,
    *,
    shape: SlotShape,
    limits: PlacementLimits,
    effort: PlacementEffort,
) -> Slots:
    """Slots with the first candidate of every layer whose packing keeps to the cap; else as they are."""
    slots = slots.copy()
    pending = list(range(len(loads)))
    for turn in range(TRAFFIC.partitions_tried):
        pending = [layer for layer in pending if turn < len(candidates[layer])]
        if not pending or is_over():
            break
        groups = np.stack([candidates[layer][turn] for layer in pending])
        packed_slots, value = solve_nodes(loads[pending], groups, shape, limits, effort)
        good = value <= caps[pending] * (1 + 1e-9)
        for i in np.flatnonzero(good).tolist():
            slots[pending[i]] = np.sort(packed_slots[i], axis=1)
        pending = [layer for i, layer in enumerate(pending) if not good[i]]
    return slots


def _candidates(
    ties: _Ties, load: Loads, now: Slots, *, cap: float, shape: SlotShape
) -> list[Slots]:
    """Groups of the nodes [nodes, groups of a node] with less traffic than `now`, least first.

    Left out is what the bound of a node's packing rules out.
    """
    groups, size = now.size, now.shape[1]
    if partitions(groups, shape.nodes) > GROUPS.most_partitions:
        return _searched(ties, load, now, cap=cap, shape=shape)
    every = np.array(list(splits(tuple(range(groups)), size)))
    sets, index = np.unique(every.reshape(-1, size), axis=0, return_inverse=True)
    per_group = load.shape[1] // groups
    members = (sets[..., None] * per_group + np.arange(per_group)).reshape(len(sets), -1)
    bound = balance_bound(np.swapaxes(load[:, members], 0, 1), shape.node_slots, shape.node_gpus)
    index = index.reshape(len(every), shape.nodes)
    total = np.array([ties.cost(members) for members in sets])[index].sum(axis=1)
    current_cost = sum(ties.cost(node) for node in now)
    better = np.flatnonzero(
        (bound[index].max(axis=1) <= cap * (1 + 1e-9))
        & (total < current_cost - 1e-9 * abs(current_cost))
    )
    return [
        every[k]
        for k in better[np.argsort(total[better], kind="stable")][: TRAFFIC.partitions_tried]
    ]


def _searched(ties: _Ties, load: Loads, now: Slots, *, cap: float, shape: SlotShape) -> list[Slots]:
    """The same where partitions are too many to list: what searches from `now` find, the cap and tighter."""
    node = np.argsort(now.ravel(), kind="stable") // now.shape[1]
    by_group = load.reshape(len(load), now.size, -1).sum(axis=2)
    candidates: list[tuple[float, Slots]] = []
    for part in (1.0, 0.5, 0.0):
        state = _state(ties, node, by_group, weights=((1.0, 1),))
        start = state.cost()
        most_load = max((1 + part * (cap - 1)) * shape.node_gpus, float(state.loads(1).max()))
        reached = _best(state, most_load)
        if reached is not None and reached[0] < start:
            candidates.append(
                (reached[0], np.argsort(reached[1], kind="stable").reshape(now.shape))
            )
    return [groups for _, groups in sorted(candidates, key=lambda pair: pair[0])]


def _state(
    ties: _Ties, place: Ids, weight: Loads, weights: tuple[tuple[float, int], ...]
) -> SwapState:
    units = np.arange(len(place))
    terms = tuple(ties.term(place // size, share) for share, size in weights)
    return SwapState(place, expert=units, weight=weight, terms=terms)


def _best(state: SwapState, most_load: float) -> tuple[float, Ids] | None:
    cap = Cap(loads=((1, most_load),), rooms=(), price=20.0 * max(abs(state.cost()), 1.0))
    result = tabu_search(
        state, cap, steps=TRAFFIC.group_steps, patience=TRAFFIC.group_steps // 4, seed=0
    )
    return None if result.gpu is None else (result.cost, result.gpu)


def nodes_to_leaves(
    flows: Flows, layer: int, slots: Slots, shape: SlotShape, levels: tuple[Level, ...]
) -> Slots:
    """One layer's slots [gpus, per GPU] with whole nodes exchanged so that tokens touch fewer leaves.

    For experts whose replicas lie on one node. Nodes are alike: balance and nodes touched stay.

    Parameters
    ----------
    flows
        Ways of the tokens, of all layers.
    layer
        Whose placement it is.
    slots
        Of it, [gpus, slots of a GPU].
    shape
        Of slots, GPUs and nodes.
    levels
        Of the fabric, nodes first, with what touching a block costs.
    """
    above = tuple(
        (level.weight, level.gpus // shape.node_gpus) for level in levels[1:] if level.weight > 0
    )
    if not above or shape.nodes < 3:
        return slots
    node_of = np.zeros(int(slots.max()) + 1, dtype=np.int64)
    node_of[slots.ravel()] = np.arange(shape.slots) // shape.node_slots
    state = _state(
        _ties(flows, layer, node_of), np.arange(shape.nodes), np.zeros((1, shape.nodes)), above
    )
    start = state.cost()
    reached = _best(state, np.inf)
    if reached is None or reached[0] >= start * (1 - 1e-12):
        return slots
    blocks = slots.reshape(shape.nodes, -1)
    return np.asarray(blocks[np.argsort(reached[1], kind="stable")].reshape(slots.shape))
