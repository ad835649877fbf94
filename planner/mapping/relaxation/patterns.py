"""Patterns: how many slots of each stage a block holds, and the cheapest of them under prices, exactly.

A pattern n_1 ... n_S of a block costs sum_s g(n_s) + hop sum_s |n_s - n_{s+1}|, g from
`MappingProblem.group_bytes`: the slots of neighbouring stages that a block holds alike are matched inside
it. Block by block this is a lower bound of `problem.loads_of`, tight where groups are single slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that are alike: the same room, the same cost of their up-link, the same parent."""

    room: int
    """Slots."""
    s_per_byte: float
    parent: int
    members: tuple[int, ...]
    """Leaves, or pods."""


def leaf_kinds(problem: MappingProblem) -> list[BlockKind]:
    """Leaves by free slots, cost and pod."""
    found: dict[tuple[int, float, int], list[int]] = {}
    for leaf, key in enumerate(
        zip(problem.leaf_slots, problem.leaf_s_per_byte, problem.leaf_pod, strict=True)
    ):
        if key[0]:
            found.setdefault(key, []).append(leaf)
    return [
        BlockKind(
            room=min(room, problem.needed), s_per_byte=cost, parent=pod, members=tuple(leaves)
        )
        for (room, cost, pod), leaves in sorted(found.items(), key=lambda entry: entry[1])
    ]


def pod_kinds(problem: MappingProblem) -> list[BlockKind]:
    """Every pod for itself."""
    room = np.bincount(problem.pod_of, weights=problem.leaf_slots, minlength=problem.pods)
    return [
        BlockKind(
            room=min(int(room[pod]), problem.needed), s_per_byte=cost, parent=0, members=(pod,)
        )
        for pod, cost in enumerate(problem.pod_s_per_byte)
    ]


def pattern_bytes(problem: MappingProblem, patterns: IntArray) -> FloatArray:
    """Bytes up the link of a block with each pattern [k, stages], never above the true; shape [k]."""
    t = problem.traffic
    table = problem.group_bytes(int(patterns.max(initial=0)))
    out: FloatArray = table[patterns].sum(axis=1)
    out += t.hop_bytes * np.abs(np.diff(patterns, axis=1)).sum(axis=1)
    if patterns.shape[1] > 1:
        out += t.wrap_bytes * np.abs(patterns[:, -1] - patterns[:, 0])
    return out


LARGEST_TABLE = 4_000_000
"""States of one stage; beyond it what wraps round costs nothing in the bound."""


class Pricer:
    """Finds, for every kind of block at once, the pattern of least cost minus prices of its slots.

    Dynamic programming over the stages with the slots used and the slots of the last stage as state; the
    L1 distance to the next stage's is a min-plus product by two running minima (Felzenszwalb, Huttenlocher
    2012, "Distance transforms of sampled functions", section 3). With virtual stages the last stage also
    feeds the first: then there is a table for each number of slots of the first. Where those tables would be
    too large, what wraps round is left out, which keeps the bound valid.
    """

    def __init__(self, problem: MappingProblem, kinds: list[BlockKind]) -> None:
        self._stages, self._kinds = problem.stages, kinds
        self._room = np.array([kind.room for kind in kinds])
        cost = np.array([kind.s_per_byte for kind in kinds])
        self._most = int(min(self._room.max(), problem.slots))
        self._width = int(self._room.max())
        states = len(kinds) * (self._width + 1) * (self._most + 1)
        wraps = problem.traffic.wrap_bytes > 0 and problem.stages > 1
        self._wraps = wraps and states * (self._most + 1) <= LARGEST_TABLE
        self._firsts = self._most + 1 if self._wraps else 1
        self._group_s = cost[:, None] * problem.group_bytes(self._most)
        self._hop_s = cost * problem.traffic.hop_bytes
        self._wrap_s = cost * problem.traffic.wrap_bytes * self._wraps
        n, used = np.arange(self._most + 1), np.arange(self._width + 1)
        self._before = used[:, None] - n[None, :]
        """Slots used before a stage of n slots brought them to `used`."""
        self._n = n
        self._outside: NDArray[np.bool_] = used[None, :] > self._room[:, None]

    def _gain(self, prices: FloatArray) -> FloatArray:
        """What n slots of a stage cost in a block of a kind, prices paid; shape [kinds, stages, n]."""
        earned = prices[:, :, None] * self._n if prices.ndim == 2 else prices
        return np.asarray(self._group_s[:, None, :] - earned, dtype=np.float64)

    def _tables(self, gain: FloatArray) -> FloatArray:
        """Least cost up to each stage by kind, slots of the first stage, slots used, slots of the stage.

        Shape [stages, kinds, firsts, used, n].
        """
        kinds, stages = len(self._kinds), self._stages
        out = np.full((stages, kinds, self._firsts, self._width + 1, self._most + 1), np.inf)
        for n in range(self._most + 1):
            out[0, :, n if self._wraps else 0, n, n] = gain[:, 0, n]
        possible = self._before >= 0
        for stage in range(1, stages):
            moved = self._reached(out[stage - 1])[:, :, np.maximum(self._before, 0), self._n]
            out[stage] = np.where(possible, moved, np.inf) + gain[:, stage, None, None, :]
        return out

    def _reached(self, costs: FloatArray) -> FloatArray:
        """min over m of cost[.., m] + hop |m - n|."""
        slope = self._hop_s[:, None, None, None] * self._n
        up = np.minimum.accumulate(costs - slope, axis=-1) + slope
        down = np.minimum.accumulate((costs + slope)[..., ::-1], axis=-1)[..., ::-1] - slope
        return np.minimum(up, down)

    def _closed(self, tables: FloatArray) -> FloatArray:
        """Cost of whole patterns by kind, slots of the first stage, slots used, slots of the last stage."""
        wrap = self._wrap_s[:, None, None] * np.abs(np.arange(self._firsts)[:, None] - self._n)
        last = tables[-1] + wrap[:, :, None, :]
        return np.where(self._outside[:, None, :, None], np.inf, last)

    def best(self, prices: FloatArray, ways: int = 1) -> Iterator[tuple[int, float, IntArray]]:
        """(kind, cost minus prices, pattern) of the cheapest, and for `ways` > 1 of others with other sums.

        `prices` are those of a slot, [kinds, stages], or of n of them together, [kinds, stages, n].
        """
        tables = self._tables(self._gain(prices))
        last = self._closed(tables)
        by_use = last.min(axis=(1, 3))
        used = np.argsort(by_use, axis=1, kind="stable")[:, :ways]
        kind, rank = np.nonzero(np.isfinite(np.take_along_axis(by_use, used, axis=1)))
        used = used[kind, rank]
        ends = last[kind, :, used].reshape(len(kind), -1).argmin(axis=1)
        first, n = np.divmod(ends, self._most + 1)
        patterns = self._walk(tables, kind, first, used, n)
        yield from zip(kind.tolist(), by_use[kind, used].tolist(), patterns, strict=True)

    def _walk(
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

    def within(
        self, prices: FloatArray, slack_s: FloatArray, limit: int
    ) -> list[list[IntArray]] | None:
        """Every pattern of each kind at most `slack_s[kind]` in cost minus prices; None above `limit`."""
        gain = self._gain(prices)
        tables = self._tables(gain)
        last = self._closed(tables)
        found: list[list[IntArray]] = []
        left = limit
        for kind in range(len(self._kinds)):
            mine: list[IntArray] = []
            for first in range(self._firsts):
                ends = np.argwhere(last[kind, first] <= slack_s[kind])
                wrap = float(self._wrap_s[kind])
                starts = [(int(used), int(n), wrap * abs(int(n) - first)) for used, n in ends]
                steps = _Steps(
                    table=tables[:, kind, first],
                    gain=gain[kind],
                    hop=float(self._hop_s[kind]) * np.abs(self._n[:, None] - self._n),
                    slack=float(slack_s[kind]),
                )
                more = _enumerate(steps, starts, left)
                if more is None:
                    return None
                mine += more
                left -= len(more)
            found.append(mine)
        return found


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """What an enumeration of patterns of one kind needs."""

    table: FloatArray
    """Least cost up to a stage, [stages, used, n]."""
    gain: FloatArray
    """Of n slots of a stage, [stages, n]."""
    hop: FloatArray
    """Between n slots of a stage and m of the next, [n, m]."""
    slack: float


def _enumerate(
    steps: _Steps, ends: list[tuple[int, int, float]], limit: int
) -> list[IntArray] | None:
    """Every pattern within the slack, None above `limit`; `ends` are slots used, slots of the last stage and
    what closing the pattern costs.

    Depth first from the last stage; what is still to come is known exactly, so no branch is empty.
    """
    found: list[IntArray] = []
    last = len(steps.table) - 1
    waiting: list[tuple[int, int, float, tuple[int, ...]]] = [
        (u, n, wrap, ()) for u, n, wrap in ends
    ]
    while waiting:
        used, n, behind, done = waiting.pop()
        pattern = (n, *done)
        stage = last - len(done)
        if stage == 0:
            found.append(np.array(pattern, dtype=np.int64))
            if len(found) > limit:
                return None
            continue
        behind += float(steps.gain[stage, n])
        step = steps.hop[n]
        for m in np.flatnonzero(steps.table[stage - 1, used - n] + step + behind <= steps.slack):
            waiting.append((used - n, int(m), behind + float(step[m]), pattern))
    return found
