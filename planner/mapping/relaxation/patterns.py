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

LARGEST_TABLE = 4_000_000
"""States of one stage; beyond it (32 MB) what wraps round costs nothing in the bound."""


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
    for leaf, (room, cost) in enumerate(
        zip(problem.leaf_slots, problem.leaf_s_per_byte, strict=True)
    ):
        if room:
            members.setdefault((room, cost), []).append(leaf)
    return [
        BlockKind(room=min(room, problem.needed), s_per_byte=cost, members=tuple(leaves))
        for (room, cost), leaves in members.items()
    ]


def pattern_bytes(problem: MappingProblem, patterns: IntArray) -> FloatArray:
    """Bytes up the link of a block with each pattern [k, stages], never above the true ones; shape [k]."""
    t = problem.traffic
    table = problem.group_bytes(int(patterns.max(initial=0)))
    sent: FloatArray = table[patterns].sum(axis=1)
    sent += t.hop_bytes * np.abs(np.diff(patterns, axis=1)).sum(axis=1)
    if patterns.shape[1] > 1:
        sent += t.wrap_bytes * np.abs(patterns[:, -1] - patterns[:, 0])
    return sent


class PatternPricing:
    """The pricing problem: for every kind of block the pattern of least cost minus duals of its slots.

    Dynamic programming over the stages with the slots used and the slots of the last stage as state; the L1
    distance to the next stage's is a min-plus product by two running minima (Felzenszwalb, Huttenlocher
    2012, "Distance transforms of sampled functions", section 3). With virtual stages the last stage also
    feeds the first: then there is a table for each number of slots of the first. Where those tables would
    be too large, what wraps round is left out, which keeps the bound valid.
    """

    def __init__(self, problem: MappingProblem, kinds: list[BlockKind]) -> None:
        self._stages, self._kinds = problem.stages, kinds
        self._room = np.array([kind.room for kind in kinds])
        cost = np.array([kind.s_per_byte for kind in kinds])
        self._largest = int(min(self._room.max(), problem.slots))
        self._width = int(self._room.max())
        states = len(kinds) * (self._width + 1) * (self._largest + 1)
        wraps = problem.traffic.wrap_bytes > 0 and problem.stages > 1
        self._wraps = wraps and states * (self._largest + 1) <= LARGEST_TABLE
        self._firsts = self._largest + 1 if self._wraps else 1
        self._group_s = cost[:, None] * problem.group_bytes(self._largest)
        self._hop_s = cost * problem.traffic.hop_bytes
        self._wrap_s = cost * problem.traffic.wrap_bytes * self._wraps
        self._n, used = np.arange(self._largest + 1), np.arange(self._width + 1)
        self._before = used[:, None] - self._n[None, :]
        """Slots used before a stage of n slots brought them to `used`."""
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
        tables = self._tables(self._group_s[:, None, :] - duals[:, :, : self._largest + 1])
        last = self._closed(tables)
        by_use = last.min(axis=(1, 3))
        used = np.argsort(by_use, axis=1, kind="stable")[:, :ways]
        kind, rank = np.nonzero(np.isfinite(np.take_along_axis(by_use, used, axis=1)))
        used = used[kind, rank]
        ends = last[kind, :, used].reshape(len(kind), -1).argmin(axis=1)
        first, n = np.divmod(ends, self._largest + 1)
        patterns = self._traced(tables, kind, first, used, n)
        yield from zip(kind.tolist(), by_use[kind, used].tolist(), patterns, strict=True)

    def least_by_use(self) -> FloatArray:
        """Least cost of a block of each kind with u slots in use, s; infinite above its room, [kinds, u]."""
        tables = self._tables(np.repeat(self._group_s[:, None, :], self._stages, axis=1))
        return np.asarray(self._closed(tables).min(axis=(1, 3)), dtype=np.float64)

    def _tables(self, reduced: FloatArray) -> FloatArray:
        """Least cost up to each stage by kind, slots of the first stage, slots used, slots of the stage.

        `reduced` is the cost of n slots less what they earn, [kinds, stages, n]; the tables are
        [stages, kinds, firsts, used, n].
        """
        kinds, stages = len(self._kinds), self._stages
        shape = (stages, kinds, self._firsts, self._width + 1, self._largest + 1)
        tables = np.full(shape, np.inf)
        for n in range(self._largest + 1):
            tables[0, :, n if self._wraps else 0, n, n] = reduced[:, 0, n]
        possible = self._before >= 0
        for stage in range(1, stages):
            reached = self._reached(tables[stage - 1])
            reached = reached[:, :, np.maximum(self._before, 0), self._n]
            here = reduced[:, stage, None, None, :]
            tables[stage] = np.where(possible, reached, np.inf) + here
        return tables

    def _reached(self, costs: FloatArray) -> FloatArray:
        """min over m of cost[.., m] + hop |m - n|."""
        slope = self._hop_s[:, None, None, None] * self._n
        up = np.minimum.accumulate(costs - slope, axis=-1) + slope
        down = np.minimum.accumulate((costs + slope)[..., ::-1], axis=-1)[..., ::-1] - slope
        return np.minimum(up, down)

    def _closed(self, tables: FloatArray) -> FloatArray:
        """Cost of whole patterns by kind, slots of the first stage, slots used, slots of the last stage."""
        apart = np.abs(np.arange(self._firsts)[:, None] - self._n)
        wrap = self._wrap_s[:, None, None] * apart
        last = tables[-1] + wrap[:, :, None, :]
        return np.where(self._outside[:, None, :, None], np.inf, last)

    def _traced(
        self, tables: FloatArray, kind: IntArray, first: IntArray, used: IntArray, n: IntArray
    ) -> IntArray:
        """The patterns that lead to states of the last stage, [states, stages]."""
        patterns = np.zeros((len(kind), self._stages), dtype=np.int64)
        for stage in range(self._stages - 1, -1, -1):
            patterns[:, stage] = n
            used = used - n
            if stage:
                step = self._hop_s[kind, None] * np.abs(self._n - n[:, None])
                n = np.argmin(tables[stage - 1, kind, first, used] + step, axis=1)
        return patterns
