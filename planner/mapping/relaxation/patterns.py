"""Patterns: how many slots of each stage a block hosts, and the cheapest of them under duals, exactly.

A pattern n_1 ... n_S of a block costs sum_s g(n_s) + hop sum_s |n_s - n_{s+1}|, g from
`MappingProblem.group_bytes`: the slots of neighbouring stages that a block hosts alike are matched inside
it. Block by block this is a lower bound of `problem.loads_of`, tight where groups are single slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem


@dataclass(frozen=True, kw_only=True)
class PatternParams:
    """How large the tables of `PatternPricing` may grow."""

    largest_table: int = 4_000_000
    """States of one stage, 32 MB; beyond it what wraps round costs nothing in the bound."""


DEFAULT_PATTERNS = PatternParams()


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that are alike: the same room and the same cost of their up-link."""

    room: int
    """Slots."""
    s_per_byte: float
    members: tuple[int, ...]
    """Leaves, or pods."""


def leaf_kinds(problem: MappingProblem) -> list[BlockKind]:
    """Leaves with free slots by their number and cost, in the order of their first leaves."""
    members: dict[tuple[int, float], list[int]] = {}
    for leaf, room in enumerate(problem.leaf_slots):
        if room:
            members.setdefault((room, problem.leaf_s_per_byte[leaf]), []).append(leaf)
    kinds = []
    for (room, s_per_byte), leaves in members.items():
        usable = min(room, problem.needed)
        kinds.append(BlockKind(room=usable, s_per_byte=s_per_byte, members=tuple(leaves)))
    return kinds


def pattern_bytes(
    problem: MappingProblem, patterns: IntArray, group_bytes: FloatArray | None = None
) -> FloatArray:
    """Bytes up the link of a block with each pattern, never above the true ones; shape [k].

    Parameters
    ----------
    patterns
        Slots of each stage, shape [k, stages].
    group_bytes
        `problem.group_bytes` of at least the largest number of slots, where it is at hand.
    """
    t = problem.traffic
    if group_bytes is None:
        group_bytes = problem.group_bytes(int(patterns.max(initial=0)))
    sent: FloatArray = group_bytes[patterns].sum(axis=1)
    sent += t.hop_bytes * np.abs(np.diff(patterns, axis=1)).sum(axis=1)
    if t.wrap_bytes and patterns.shape[1] > 1:
        sent += t.wrap_bytes * np.abs(patterns[:, -1] - patterns[:, 0])
    return sent


class PatternPricing:
    """The pricing problem: for every kind of block the pattern of least cost minus duals of its slots.

    Dynamic programming over the stages with the slots used and the slots of the last stage as state; the L1
    distance to the next stage's is a min-plus product by two running minima (Felzenszwalb, Huttenlocher
    2012, "Distance transforms of sampled functions", section 3). With virtual stages the last stage also
    feeds the first: then there is a table for each number of slots of the first. Where those tables would
    be too large, what wraps round is left out, which keeps the bound valid.

    Tables have the axes [kind, slots of the first stage, slots used, slots of the last stage so far].
    """

    def __init__(
        self,
        problem: MappingProblem,
        kinds: list[BlockKind],
        params: PatternParams = DEFAULT_PATTERNS,
    ) -> None:
        self._stages, self._kinds = problem.stages, kinds
        self._room = np.array([kind.room for kind in kinds])
        s_per_byte = np.array([kind.s_per_byte for kind in kinds])
        self._largest = int(min(self._room.max(), problem.slots))
        self._width = int(self._room.max())
        self._sizes = np.arange(self._largest + 1)
        states = len(kinds) * (self._width + 1) * len(self._sizes)
        virtual = problem.traffic.wrap_bytes > 0 and problem.stages > 1
        self._wraps = virtual and states * len(self._sizes) <= params.largest_table
        self._firsts = len(self._sizes) if self._wraps else 1
        self._group_s = s_per_byte[:, None] * problem.group_bytes(self._largest)
        self._hop_s = s_per_byte * problem.traffic.hop_bytes
        self._wrap_s = s_per_byte * problem.traffic.wrap_bytes * self._wraps
        used = np.arange(self._width + 1)
        self._before = used[:, None] - self._sizes[None, :]
        """Slots used before a stage of n slots brought them to `used`, [used, n]."""
        self._outside: NDArray[np.bool_] = used[None, :] > self._room[:, None]

    def best(self, duals: FloatArray, ways: int = 1) -> Iterator[tuple[int, float, IntArray]]:
        """(kind, reduced cost in s, pattern [stages]) of the cheapest; `ways` of them with different sums.

        Parameters
        ----------
        duals
            What n slots of a stage earn in a block of a kind, s; shape [kinds, stages, n].
        ways
            Patterns for each kind at most; equal sums of slots are not listed twice.
        """
        earned = duals[:, :, : self._largest + 1]
        tables = self._tables(self._group_s[:, None, :] - earned)
        last = self._closed(tables)
        by_use = last.min(axis=(1, 3))
        cheapest = np.argsort(by_use, axis=1, kind="stable")[:, :ways]
        possible = np.isfinite(np.take_along_axis(by_use, cheapest, axis=1))
        kind, rank = np.nonzero(possible)
        used = cheapest[kind, rank]
        ends = last[kind, :, used].reshape(len(kind), -1).argmin(axis=1)
        first, size = np.divmod(ends, len(self._sizes))
        patterns = self._traced(tables, kind, first, used, size)
        yield from zip(kind.tolist(), by_use[kind, used].tolist(), patterns, strict=True)

    def least_by_use(self) -> FloatArray:
        """Least cost of a block of each kind with u slots in use, s; infinite above its room, [kinds, u]."""
        by_stage = np.repeat(self._group_s[:, None, :], self._stages, axis=1)
        last = self._closed(self._tables(by_stage))
        return np.asarray(last.min(axis=(1, 3)), dtype=np.float64)

    def _tables(self, reduced: FloatArray) -> FloatArray:
        """Least cost up to each stage, a table for each, [stages, ...].

        `reduced` is the cost of n slots less what they earn, [kinds, stages, n].
        """
        table_shape = (self._firsts, self._width + 1, len(self._sizes))
        tables = np.full((self._stages, len(self._kinds), *table_shape), np.inf)
        for size in self._sizes:
            first = size if self._wraps else 0
            tables[0, :, first, size, size] = reduced[:, 0, size]
        possible = self._before >= 0
        before = np.maximum(self._before, 0)
        for stage in range(1, self._stages):
            reached = self._reached(tables[stage - 1])[:, :, before, self._sizes]
            reached = np.where(possible, reached, np.inf)
            tables[stage] = reached + reduced[:, stage, None, None, :]
        return tables

    def _reached(self, costs: FloatArray) -> FloatArray:
        """min over m of cost[.., m] + hop |m - n|."""
        slope = self._hop_s[:, None, None, None] * self._sizes
        from_smaller = np.minimum.accumulate(costs - slope, axis=-1) + slope
        backwards = (costs + slope)[..., ::-1]
        from_larger = np.minimum.accumulate(backwards, axis=-1)[..., ::-1] - slope
        return np.minimum(from_smaller, from_larger)

    def _closed(self, tables: FloatArray) -> FloatArray:
        """The last table with what wraps round; infinite above the room of a kind."""
        apart = np.abs(np.arange(self._firsts)[:, None] - self._sizes)
        wrap_s = self._wrap_s[:, None, None] * apart
        closed = tables[-1] + wrap_s[:, :, None, :]
        return np.where(self._outside[:, None, :, None], np.inf, closed)

    def _traced(
        self, tables: FloatArray, kind: IntArray, first: IntArray, used: IntArray, size: IntArray
    ) -> IntArray:
        """The patterns that lead to states of the last stage, [states, stages]."""
        patterns = np.zeros((len(kind), self._stages), dtype=np.int64)
        patterns[:, -1] = size
        for stage in range(self._stages - 1, 0, -1):
            used = used - size
            hop_s = self._hop_s[kind, None] * np.abs(self._sizes - size[:, None])
            size = np.argmin(tables[stage - 1, kind, first, used] + hop_s, axis=1)
            patterns[:, stage - 1] = size
        return patterns
