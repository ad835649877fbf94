"""What a leaf holds whatever the order of the stages between the first and the last, and what that costs.

A *holding* is a piece of the first and of the last stage, or none, and pieces of stages between. In the best
order they follow each other: they rise to the largest and fall again, from one of the ends where it has a
piece there. All patterns of a leaf that hold the same pieces cost as much or more, so an assignment of
holdings bounds every mapping, and has none of the ways to swap stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.patterns import BlockKind, pattern_bytes
from meshwright.planner.mapping.relaxation.pieces import family_sizes

MOST_ORDERED = 5
"""Pieces between the ends of which all orders are tried."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Pieces of a leaf of one kind, and their least cost."""

    kind: int
    ends: tuple[int, int]
    inner: tuple[int, ...]
    """Largest first."""
    cost_s: float

    def pieces(self, family: int) -> tuple[int, ...]:
        """Sizes of the pieces of stages of a family."""
        return self.inner if family else tuple(size for size in self.ends if size)

    @property
    def count(self) -> int:
        """Pieces."""
        return len(self.inner) + sum(1 for size in self.ends if size)


def least_hops(ends: tuple[int, int], inner: tuple[int, ...], stages: int) -> int:
    """Least sum of |n_s - n_{s+1}| over the orders of the pieces."""
    one, other = ends
    between = family_sizes(stages)[1]
    if stages == 1:
        return 0
    if not inner:
        return abs(one - other) if stages == 2 else one + other
    high, low = inner[0], inner[-1]
    if len(inner) == between:  # no stage without a piece lies between the ends
        up = abs(one - high) + (high - low) + abs(low - other)
        return min(up, abs(one - low) + (high - low) + abs(high - other))
    return _apart(one, other, high)


def _apart(one: int, other: int, high: int) -> int:
    """With a stage between that has no piece: all pieces next to one of the ends, up to `high`."""
    return min(2 * max(one, high) - one + other, one + 2 * max(other, high) - other)


def holdings_within(
    problem: MappingProblem,
    kinds: list[BlockKind],
    piece_prices: FloatArray,
    ceiling_s: FloatArray,
    limit: int,
) -> list[Holding] | None:
    """Every holding whose cost, less what its pieces earn, is at most its kind's ceiling; None above `limit`.

    The empty holding is left out.
    """
    out: list[Holding] = []
    for kind in range(len(kinds)):
        for held in _Enumeration(problem, kind, kinds[kind], piece_prices).within(
            float(ceiling_s[kind])
        ):
            out.append(held)
            if len(out) > limit:
                return None
    return out


class _Enumeration:
    """Holdings of one kind of leaf, depth first by falling size."""

    def __init__(
        self, problem: MappingProblem, kind: int, block: BlockKind, piece_prices: FloatArray
    ) -> None:
        self._kind, self._room, self._stages = kind, block.room, problem.stages
        self._between = family_sizes(problem.stages)[1]
        self._most = min(block.room, problem.slots)
        group_s = block.s_per_byte * problem.group_bytes(self._most)
        self._group: list[float] = group_s.tolist()
        self._hop = block.s_per_byte * problem.traffic.hop_bytes
        self._wrap = block.s_per_byte * problem.traffic.wrap_bytes if problem.stages > 1 else 0.0
        ends, inner = (
            group_s - piece_prices[of, : self._most + 1] for of in range(len(piece_prices))
        )
        self._ends: list[float] = ends.tolist()
        self._inner: list[float] = inner.tolist()
        self._rest = self._knapsacks(inner)

    def _knapsacks(self, inner: FloatArray) -> list[list[float]]:
        """The least that pieces of at most a size add, in at most so many slots: [size][slots]."""
        table = np.zeros((self._most + 1, self._room + 1))
        for size in range(1, self._most + 1):
            table[size] = table[size - 1]
            for slots in range(size, self._room + 1):
                table[size, slots] = min(
                    table[size, slots], table[size, slots - size] + inner[size]
                )
        rows: list[list[float]] = table.tolist()
        return rows

    def within(self, ceiling_s: float) -> Iterator[Holding]:
        """Those at most so expensive, what they earn deducted."""
        most = self._most
        seconds = range(most + 1) if self._stages > 1 else range(1)
        for other in seconds:
            for one in range(other, min(most, self._room - other) + 1):
                ends, left = (one, other), self._room - one - other
                paid = self._ends[one] + self._ends[other] + self._wrap * (one - other)
                if one and self._reduced(ends, (), paid) <= ceiling_s:
                    yield self._holding(ends, ())
                for high in range(1, min(most, left) + 1) if self._between else ():
                    yield from self._with_largest(ends, high, left - high, paid, ceiling_s)

    def _with_largest(
        self, ends: tuple[int, int], high: int, left: int, paid: float, ceiling_s: float
    ) -> Iterator[Holding]:
        hops = _apart(*ends, high)
        if self._room >= self._stages - (not ends[0]) - (not ends[1]):
            hops = min(
                hops, 2 * max(*ends, high) - sum(ends)
            )  # should every stage between have a piece
        floor = ceiling_s - self._hop * hops
        first: tuple[int, ...] = (high,)
        waiting = [(high, left, paid + self._inner[high], first)]
        while waiting:
            size, left, paid, inner = waiting.pop()
            if paid + self._rest[size][left] > floor:
                continue
            if self._reduced(ends, inner, paid) <= ceiling_s:
                yield self._holding(ends, inner)
            if len(inner) < self._between:
                for less in range(1, min(size, left) + 1):
                    waiting.append((less, left - less, paid + self._inner[less], (*inner, less)))

    def _reduced(self, ends: tuple[int, int], inner: tuple[int, ...], paid: float) -> float:
        return paid + self._hop * least_hops(ends, inner, self._stages)

    def _holding(self, ends: tuple[int, int], inner: tuple[int, ...]) -> Holding:
        cost_s = sum(self._group[size] for size in (*ends, *inner)) + self._wrap * (
            ends[0] - ends[1]
        )
        cost_s += self._hop * least_hops(ends, inner, self._stages)
        return Holding(kind=self._kind, ends=ends, inner=inner, cost_s=cost_s)


def patterns_of(problem: MappingProblem, held: Holding) -> IntArray:
    """The patterns of a holding that cost no more than it, [patterns, stages], without repeats."""
    stages, inner = problem.stages, held.inner
    if stages == 1:
        return np.array([held.ends[:1]], dtype=np.int64)
    orders = set(permutations(inner)) if len(inner) <= MOST_ORDERED else {inner, inner[::-1]}
    rows = []
    for one, other in {held.ends, held.ends[::-1]}:
        for order in orders:
            for start in range(1, max(stages - len(inner), 2)):
                row = np.zeros(stages, dtype=np.int64)
                row[start : start + len(inner)] = order
                row[0], row[-1] = one, other
                rows.append(row)
    patterns: IntArray = np.unique(np.array(rows), axis=0)
    sent = pattern_bytes(problem, patterns)
    cheapest: IntArray = patterns[sent <= sent.min() * (1 + 1e-9)]
    return cheapest
