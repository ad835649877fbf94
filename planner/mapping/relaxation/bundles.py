"""What a leaf hosts whatever the order of the inner stages, and what that costs in the best order.

A *bundle* is a part of the first and of the last stage, or none, and parts of inner stages. In the best
order the parts follow each other: they rise to the largest and fall again, from one of the ends where the
leaf has a part there. All patterns of the same parts cost as much or more, so a choice of bundles bounds
every mapping, and has none of the ways to swap stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import inf

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.partitions import ENDS, INNER, stages_of_classes
from meshwright.planner.mapping.relaxation.patterns import BlockKind, pattern_bytes


@dataclass(frozen=True, kw_only=True)
class BundleParams:
    """How much is listed."""

    most_examined: int = 200_000
    """Bundles looked at in one listing, about a second."""
    most_permuted: int = 5
    """Inner parts of which all orders are tried; 6 would be 720 orders."""


DEFAULT_BUNDLES = BundleParams()


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Parts that a leaf of one kind hosts, and their least cost."""

    kind: int
    ends: tuple[int, int]
    """Sizes, 0 for none; the larger first."""
    inner: tuple[int, ...]
    """Sizes, largest first."""
    cost_s: float

    def parts(self, stage_class: int) -> tuple[int, ...]:
        """Sizes of the parts of stages of a class."""
        if stage_class == INNER:
            return self.inner
        return tuple(size for size in self.ends if size)

    @property
    def count(self) -> int:
        """Parts."""
        return len(self.parts(ENDS)) + len(self.inner)


def least_hops(ends: tuple[int, int], inner: tuple[int, ...], stages: int) -> int:
    """Least sum of |n_s - n_{s+1}| over the orders of the parts."""
    first, last = ends
    if stages == 1:
        return 0
    if not inner:
        return abs(first - last) if stages == 2 else first + last
    high, low = inner[0], inner[-1]
    if len(inner) < stages_of_classes(stages)[INNER]:
        return _hops_with_gap(first, last, high)
    rising = abs(first - high) + (high - low) + abs(low - last)
    falling = abs(first - low) + (high - low) + abs(high - last)
    return min(rising, falling)


def _hops_with_gap(first: int, last: int, high: int) -> int:
    """Where an inner stage has no part here: all parts next to one of the ends, up to `high`."""
    beside_first = 2 * max(first, high) - first + last
    beside_last = first + 2 * max(last, high) - last
    return min(beside_first, beside_last)


def bundles_within(
    problem: MappingProblem,
    kinds: list[BlockKind],
    part_duals: FloatArray,
    ceiling_s: FloatArray,
    limit: int,
    *,
    most_s: float = inf,
    params: BundleParams = DEFAULT_BUNDLES,
) -> list[Bundle] | None:
    """Every bundle whose reduced cost is at most its kind's ceiling; None above `limit`.

    Parameters
    ----------
    part_duals
        What a part earns by class of stages and size, s; shape [classes, sizes].
    ceiling_s
        Shape [kinds].
    limit
        Bundles listed at most. The empty bundle is left out.
    most_s
        Dearer bundles are left out, whatever their parts earn.
    """
    listed: list[Bundle] = []
    examined = 0
    for kind, block in enumerate(kinds):
        enumeration = _Enumeration(problem, kind, block, part_duals)
        for bundle in enumeration.within(float(ceiling_s[kind])):
            examined += 1
            if bundle.cost_s <= most_s:
                listed.append(bundle)
            if len(listed) > limit or examined > params.most_examined:
                return None
    return listed


class _Enumeration:
    """Bundles of one kind of leaf, depth first by falling size."""

    def __init__(
        self, problem: MappingProblem, kind: int, block: BlockKind, part_duals: FloatArray
    ) -> None:
        self._kind, self._room, self._stages = kind, block.room, problem.stages
        self._inner_stages = stages_of_classes(problem.stages)[INNER]
        self._largest = min(block.room, problem.slots)
        group_s = block.s_per_byte * problem.group_bytes(self._largest)
        self._group_s: list[float] = group_s.tolist()
        self._hop_s = block.s_per_byte * problem.traffic.hop_bytes
        wraps = problem.stages > 1
        self._wrap_s = block.s_per_byte * problem.traffic.wrap_bytes if wraps else 0.0
        reduced_s = group_s - part_duals[:, : self._largest + 1]
        self._end_s: list[float] = reduced_s[ENDS].tolist()
        self._inner_s: list[float] = reduced_s[INNER].tolist()
        self._least_rest = self._knapsacks()

    def _knapsacks(self) -> list[list[float]]:
        """The least that parts of at most a size add, in at most so many slots: [size][slots]."""
        table = np.zeros((self._largest + 1, self._room + 1))
        for size in range(1, self._largest + 1):
            table[size] = table[size - 1]
            for slots in range(size, self._room + 1):
                with_part = table[size, slots - size] + self._inner_s[size]
                table[size, slots] = min(table[size, slots], with_part)
        rows: list[list[float]] = table.tolist()
        return rows

    def within(self, ceiling_s: float) -> Iterator[Bundle]:
        """Those of at most this reduced cost."""
        largest = self._largest
        largest_last = largest if self._stages > 1 else 0
        for last in range(largest_last + 1):
            for first in range(last, min(largest, self._room - last) + 1):
                yield from self._with_ends((first, last), ceiling_s)

    def _with_ends(self, ends: tuple[int, int], ceiling_s: float) -> Iterator[Bundle]:
        first, last = ends
        rest = self._room - first - last
        cost_s = self._end_s[first] + self._end_s[last] + self._wrap_s * (first - last)
        if first and self._reduced_s(ends, (), cost_s) <= ceiling_s:
            yield self._bundle(ends, ())
        if self._inner_stages:
            for high in range(1, min(self._largest, rest) + 1):
                yield from self._with_largest(ends, high, rest - high, cost_s, ceiling_s)

    def _with_largest(
        self, ends: tuple[int, int], high: int, rest: int, cost_s: float, ceiling_s: float
    ) -> Iterator[Bundle]:
        hops = _hops_with_gap(*ends, high)
        if self._room >= self._stages - (not ends[0]) - (not ends[1]):
            # Every inner stage may have a part here.
            hops = min(hops, 2 * max(*ends, high) - sum(ends))
        ceiling_of_parts = ceiling_s - self._hop_s * hops
        waiting: list[tuple[int, float, tuple[int, ...]]] = []
        waiting.append((rest, cost_s + self._inner_s[high], (high,)))
        while waiting:
            rest, cost_s, inner = waiting.pop()
            smallest = inner[-1]
            if cost_s + self._least_rest[smallest][rest] > ceiling_of_parts:
                continue
            if self._reduced_s(ends, inner, cost_s) <= ceiling_s:
                yield self._bundle(ends, inner)
            if len(inner) < self._inner_stages:
                for size in range(1, min(smallest, rest) + 1):
                    waiting.append((rest - size, cost_s + self._inner_s[size], (*inner, size)))

    def _reduced_s(self, ends: tuple[int, int], inner: tuple[int, ...], parts_s: float) -> float:
        return parts_s + self._hop_s * least_hops(ends, inner, self._stages)

    def _bundle(self, ends: tuple[int, int], inner: tuple[int, ...]) -> Bundle:
        cost_s = sum(self._group_s[size] for size in (*ends, *inner))
        cost_s += self._wrap_s * (ends[0] - ends[1])
        cost_s += self._hop_s * least_hops(ends, inner, self._stages)
        return Bundle(kind=self._kind, ends=ends, inner=inner, cost_s=cost_s)


def patterns_of(
    problem: MappingProblem, bundle: Bundle, params: BundleParams = DEFAULT_BUNDLES
) -> IntArray:
    """The patterns of a bundle that cost no more than it, shape [patterns, stages], without repeats."""
    stages, inner = problem.stages, bundle.inner
    if stages == 1:
        return np.array([bundle.ends[:1]], dtype=np.int64)
    orders = {inner, inner[::-1]}
    if len(inner) <= params.most_permuted:
        orders = set(permutations(inner))
    rows = []
    for first, last in {bundle.ends, bundle.ends[::-1]}:
        for order in orders:
            for start in range(1, max(stages - len(inner), 2)):
                row = np.zeros(stages, dtype=np.int64)
                row[start : start + len(inner)] = order
                row[0], row[-1] = first, last
                rows.append(row)
    patterns: IntArray = np.unique(np.array(rows), axis=0)
    sent = pattern_bytes(problem, patterns)
    cheapest: IntArray = patterns[sent <= sent.min() * (1 + 1e-9)]
    return cheapest
