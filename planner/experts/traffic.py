"""Which blocks of the fabric a token's experts lie in, and fewer of them by exchanging replicas.

A token's choice of a replicated expert goes to its replicas in turn: the n-th token that chose it
takes replica n mod c. So what is modelled is a count over the trace, and the two agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.experts.problem import Loads, Shape, Slots

MOST_TOKENS = 16_384
"""Tokens of a trace that the search looks at; more are thinned evenly. Reports count all."""
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of the fabric: blocks of `gpus` GPUs, and what touching one more of them costs a token."""

    name: str
    gpus: int
    weight: float


def slot_choices(tokens: NDArray[np.int32], slots: Slots, experts: int) -> Ids:
    """The slot each choice goes to, [tokens, top-k], for tokens [tokens, top-k] and slots [gpus, per GPU].

    Replicas take turns in the order of the tokens; -1 where the choice was dropped.
    """
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    chosen = tokens.ravel()
    turn = np.zeros(len(chosen), dtype=np.int64)
    by_expert = np.argsort(chosen, kind="stable")
    ordered = chosen[by_expert]
    starts = np.searchsorted(ordered, ordered)
    turn[by_expert] = np.arange(len(ordered)) - starts
    safe = np.maximum(chosen, 0)
    slot = order[first[safe] + turn % counts[safe]]
    return np.where(chosen >= 0, slot, -1).reshape(tokens.shape)


def blocks_per_token(tokens: NDArray[np.int32], slots: Slots, experts: int, block_gpus: int) -> float:
    """Mean number of different blocks of `block_gpus` GPUs that a token's experts lie in."""
    choice = slot_choices(tokens, slots, experts)
    block = choice // (slots.shape[1] * block_gpus)
    return float(_distinct(block).mean())


def _distinct(block: Ids) -> Ids:
    """Different non-negative numbers in each row."""
    ordered = np.sort(np.where(block >= 0, block, -1), axis=1)
    fresh = np.concatenate(
        [ordered[:, :1] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)], axis=1
    )
    return np.asarray(fresh.sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Search:
    """One layer's exchange of replicas between blocks."""

    tokens: NDArray[np.int32]
    experts: int
    shape: Shape
    levels: tuple[Level, ...]
    cap: float
    """Largest load of a node over the mean."""
    loads: Loads
    """[windows, experts]."""


def fewer_blocks(search: Search, slots: Slots, passes: int = 40, kicks: int = 2) -> Slots:
    """Slots [gpus, per GPU] with replicas exchanged between nodes, so that tokens touch fewer blocks.

    Each pass prices every exchange of two replicas at once, then takes those that still help one by one, by
    their exact count. A node's load stays within `cap`, an expert on a node at most once per GPU. Only the
    node of a slot is meant: the GPUs inside a node are packed afterwards. Where no exchange helps, a few at
    random that the limits allow are made and the search goes on, `kicks` times; the best state is returned.
    """
    shape = search.shape
    step = max(1, len(search.tokens) // MOST_TOKENS)
    choice = slot_choices(search.tokens[::step], slots, search.experts)
    member = np.zeros((shape.slots, len(choice)), dtype=np.float32)
    row = np.broadcast_to(np.arange(len(choice))[:, None], choice.shape)
    member[choice[choice >= 0], row[choice >= 0]] = 1.0
    state = _State(search, slots.ravel().copy(), member)
    chance = np.random.default_rng(0)
    best, least = state.by_node(), state.blocks()
    for _ in range(kicks + 1):
        for _ in range(passes):
            if not state.one_pass():
                break
        if state.blocks() < least:
            best, least = state.by_node(), state.blocks()
        state.kick(chance)
    return best.reshape(slots.shape)


class _State:
    """Replicas are numbered as the slots were; `node` says where each is now."""

    def __init__(self, search: Search, expert: Slots, member: NDArray[np.float32]) -> None:
        self._search, self._expert, self._member = search, expert, member
        shape = search.shape
        self._node = np.arange(shape.slots) // shape.node_slots
        counts = np.bincount(expert, minlength=search.experts)
        mean = search.loads.sum(axis=1) / shape.nodes
        self._weight = (search.loads / counts / mean[:, None])[:, expert]
        self._levels = [
            (level.weight, max(level.gpus // shape.node_gpus, 1))
            for level in search.levels
            if level.weight > 0
        ]

    def _cost_matrix(self) -> NDArray[np.float64]:
        """Change of the weighted number of blocks if two replicas change places, [slots, slots]."""
        total = np.zeros((len(self._node), len(self._node)))
        for weight, nodes in self._levels:
            block = self._node // nodes
            here = self._touching(block)
            mine = here[block]
            alone = self._member * (mine == 1)
            leaves = alone.sum(axis=1)
            enters = self._member @ (here == 0).T.astype(np.float32)
            both = alone @ self._member.T
            delta = -leaves[:, None] - leaves[None, :] + enters[:, block] + enters[:, block].T + both + both.T
            total += weight * np.where(block[:, None] == block[None, :], 0.0, delta)
        return total

    def blocks(self) -> float:
        """Weighted number of blocks that all tokens touch."""
        return sum(weight * _blocks(self._member, self._node // n) for weight, n in self._levels)

    def kick(self, chance: np.random.Generator, size: int = 6) -> None:
        """Exchanges up to `size` pairs at random, within the limits."""
        for a, b in chance.integers(0, len(self._node), (4 * size, 2))[: 4 * size]:
            if size > 0 and self._allowed(int(a), int(b)):
                self._node[a], self._node[b] = self._node[b], self._node[a]
                size -= 1

    def _touching(self, block: Ids) -> NDArray[np.float32]:
        """Replicas of each token in each block, [blocks, tokens]."""
        sums = np.zeros((int(block.max()) + 1, self._member.shape[1]), dtype=np.float32)
        for b in range(len(sums)):
            sums[b] = self._member[block == b].sum(axis=0)
        return sums

    def one_pass(self) -> bool:
        """Takes the exchanges that help; False if there was none."""
        cost = np.triu(self._cost_matrix(), 1)
        order = np.argsort(cost, axis=None, kind="stable")[:400]
        taken = 0
        touched: set[int] = set()
        for index in order:
            a, b = divmod(int(index), len(self._node))
            if cost[a, b] >= -0.5 * min(weight for weight, _ in self._levels):
                break
            if a in touched or b in touched or not self._allowed(a, b):
                continue
            if taken and self._exact(a, b) >= 0:
                continue
            self._node[a], self._node[b] = self._node[b], self._node[a]
            touched |= {a, b}
            taken += 1
        return taken > 0

    def _exact(self, a: int, b: int) -> float:
        """The change of the weighted number of blocks, counted over the tokens of the two replicas."""
        rows = np.flatnonzero(self._member[a] != self._member[b])
        part = self._member[:, rows]
        after = self._node.copy()
        after[a], after[b] = after[b], after[a]
        return sum(
            weight * (_blocks(part, after // n) - _blocks(part, self._node // n))
            for weight, n in self._levels
        )

    def _allowed(self, a: int, b: int) -> bool:
        node_a, node_b = self._node[a], self._node[b]
        if node_a == node_b:
            return False
        shape, cap = self._search.shape, self._search.cap
        for replica, target, leaving in ((a, node_b, b), (b, node_a, a)):
            there = self._node == target
            held = int((self._expert[there] == self._expert[replica]).sum()) - int(
                self._expert[leaving] == self._expert[replica]
            )
            if held >= shape.node_gpus:
                return False
            load = self._weight[:, there].sum(axis=1) + self._weight[:, replica] - self._weight[:, leaving]
            before = self._weight[:, there].sum(axis=1)
            if (load > np.maximum(cap, before)).any():
                return False
        return True

    def by_node(self) -> Slots:
        """Experts in the order of their nodes."""
        return np.asarray(self._expert[np.argsort(self._node, kind="stable")])


def _blocks(member: NDArray[np.float32], block: Ids) -> float:
    return float(sum((member[block == b].sum(axis=0) > 0).sum() for b in range(int(block.max()) + 1)))
