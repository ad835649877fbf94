"""What a placement's traffic costs, term by term, and how exchanging two replicas changes it.

Every term answers for all pairs at once, and is told of each exchange, so that a step costs what it touches.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.problem import Ids, Loads, Slots

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
