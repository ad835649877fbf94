"""Patterns: how many slots of each stage a block hosts, and the cheapest of them under duals, exactly.

A pattern n_1 ... n_S of a block costs sum_s g(n_s) + hop sum_s |n_s - n_{s+1}|, g from
`MappingProblem.group_bytes`: the slots of neighbouring stages that a block hosts alike are matched inside
it. Block by block this is a lower bound of `problem.loads_of`, tight where groups are single slots.

Stages cut into parts: the cheapest integer partition of a stage's slots, and all that cost little more.

A *part* is what one leaf hosts of one stage; its size is its slots. Stages come in two classes: the first
and the last, whose activations leave on one side only, and the inner ones. Stages of a class are cut into
the same parts at the same cost, so they need not be told apart. A *partition* counts the parts of each
size that make up a stage: sizes times counts are its slots.

>>> value, partition = cheapest_partition(np.array([0.0, 3.0, 4.0]), slots=5, most_parts=5)
>>> value, partition.tolist()
(11.0, [0, 1, 2])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.solvers.programmes import LinearProgram, Row

LARGEST_TABLE = 4_000_000
"""States of one stage in the tables of `PatternPricing`, 32 MB; beyond it what wraps round costs nothing in
the bound."""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """Blocks that are alike: the same room and the same cost of their up-link."""

    room: int
    """Slots."""
    s_per_byte: float
    members: tuple[int, ...]
    """Leaves, or pods."""


def leaf_kinds(problem: MappingProblem) -> list[BlockKind]:
    """Leaves with free slots by their number and cost, in the order of their first leaves.

    Parameters
    ----------
    problem
        Leaves without a free slot are left out; room beyond all slots in use is not counted.
    """
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
    ) -> None:
        self._stages, self._kinds = problem.stages, kinds
        self._room = np.array([kind.room for kind in kinds])
        s_per_byte = np.array([kind.s_per_byte for kind in kinds])
        self._largest = int(min(self._room.max(), problem.slots))
        self._width = int(self._room.max())
        self._sizes = np.arange(self._largest + 1)
        states = len(kinds) * (self._width + 1) * len(self._sizes)
        virtual = problem.traffic.wrap_bytes > 0 and problem.stages > 1
        self._wraps = virtual and states * len(self._sizes) <= LARGEST_TABLE
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
        # The last table with what wraps round; infinite above the room of a kind.
        apart = np.abs(np.arange(self._firsts)[:, None] - self._sizes)
        wrap_s = self._wrap_s[:, None, None] * apart
        closed = tables[-1] + wrap_s[:, :, None, :]
        last = np.where(self._outside[:, None, :, None], np.inf, closed)
        by_use = last.min(axis=(1, 3))
        cheapest = np.argsort(by_use, axis=1, kind="stable")[:, :ways]
        possible = np.isfinite(np.take_along_axis(by_use, cheapest, axis=1))
        kind, rank = np.nonzero(possible)
        used = cheapest[kind, rank]
        ends = last[kind, :, used].reshape(len(kind), -1).argmin(axis=1)
        first, size = np.divmod(ends, len(self._sizes))
        patterns = self._traced(tables, kind, first, used, size)
        yield from zip(kind.tolist(), by_use[kind, used].tolist(), patterns, strict=True)

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


ENDS, INNER = 0, 1
STAGE_CLASSES = (ENDS, INNER)

SizeCounts = tuple[tuple[int, int], ...]
"""(size, parts of that size) of a partition."""


def class_of_stages(stages: int) -> IntArray:
    """The class of each stage, shape [stages].

    Parameters
    ----------
    stages
        Pipeline stages, at least 1; a single one counts among the ends.
    """
    classes = np.full(stages, INNER, dtype=np.int64)
    classes[[0, -1]] = ENDS
    return classes


def stages_of_classes(stages: int) -> tuple[int, int]:
    """Stages of each class.

    Parameters
    ----------
    stages
        Pipeline stages, at least 1.

    Returns
    -------
    tuple of (int, int)
        Ends, at most 2, and inner stages.
    """
    ends = min(stages, 2)
    return ends, stages - ends


def largest_part(problem: MappingProblem) -> int:
    """Slots of one stage that a leaf can host."""
    return min(max(problem.leaf_slots), problem.slots)


def most_parts(problem: MappingProblem) -> int:
    """Parts that a stage can be cut into: every leaf hosts one at most.

    Parameters
    ----------
    problem
        Leaves without a free slot host no part.
    """
    leaves = sum(1 for slots in problem.leaf_slots if slots)
    return min(leaves, problem.slots)


def cheapest_partition(values: FloatArray, slots: int, most_parts: int) -> tuple[float, IntArray]:
    """Least sum of values of a partition, and its parts by size.

    An equality knapsack over the number of parts.

    Parameters
    ----------
    values
        Of a part of each size from 0, shape [sizes].
    slots
        Of a stage.
    most_parts
        Parts at most.
    """
    before = np.arange(slots + 1)[:, None] - np.arange(1, len(values))
    least_value = np.full(slots + 1, np.inf)
    least_value[0] = 0.0
    choices: list[IntArray] = []
    for _ in range(most_parts):
        reached = least_value[np.maximum(before, 0)] + values[1:]
        reached = np.where(before >= 0, reached, np.inf)
        value = reached.min(axis=1)
        better = value < least_value
        if not better.any():
            break
        choices.append(np.where(better, reached.argmin(axis=1) + 1, 0))
        least_value = np.where(better, value, least_value)
    partition = np.zeros(len(values), dtype=np.int64)
    rest = slots
    for choice in reversed(choices):
        size = int(choice[rest])
        if size:
            partition[size] += 1
            rest -= size
    return float(least_value[slots]), partition


def partitions_within(
    values: FloatArray, slots: int, most_parts: int, ceiling: float, limit: int
) -> IntArray | None:
    """Every partition whose values sum to at most `ceiling`, shape [partitions, sizes]; None above `limit`.

    Depth first from the largest part; what the smaller parts add at the least is known but for their
    number.

    Parameters
    ----------
    values
        Of a part of each size from 0, shape [sizes]; may be below 0.
    slots
        Of a stage, which the parts add up to.
    most_parts
        Parts of one partition at most.
    ceiling
        In the unit of `values`.
    limit
        Partitions listed at most.
    """
    sizes = list(range(min(len(values) - 1, slots), 0, -1))
    least_rest = _least_rest(values, sizes, slots)
    complete: list[SizeCounts] = []
    waiting: list[tuple[int, int, int, float, SizeCounts]] = [(0, slots, most_parts, 0.0, ())]
    while waiting:
        depth, rest, parts, value, chosen = waiting.pop()
        if depth == len(sizes):
            complete.append(chosen)
            if len(complete) > limit:
                return None
            continue
        size = sizes[depth]
        for count in range(min(rest // size, parts) + 1):
            next_value = value + count * float(values[size])
            next_rest = rest - count * size
            if next_value + least_rest[depth + 1][next_rest] <= ceiling:
                extended = chosen
                if count:
                    extended = (*chosen, (size, count))
                waiting.append((depth + 1, next_rest, parts - count, next_value, extended))
    partitions = np.zeros((len(complete), len(values)), dtype=np.int64)
    for row, chosen in enumerate(complete):
        for size, count in chosen:
            partitions[row, size] = count
    return partitions


def _least_rest(values: FloatArray, sizes: list[int], slots: int) -> list[list[float]]:
    """Least value of exactly so many slots in parts of `sizes[depth:]`, [depth][slots]."""
    values_left = np.full((len(sizes) + 1, slots + 1), np.inf)
    values_left[-1, 0] = 0.0
    for depth in range(len(sizes) - 1, -1, -1):
        size = sizes[depth]
        values_left[depth] = values_left[depth + 1]
        for rest in range(size, slots + 1):
            with_part = values_left[depth, rest - size] + values[size]
            values_left[depth, rest] = min(values_left[depth, rest], with_part)
    rows: list[list[float]] = values_left.tolist()
    return rows


# A bound on the traffic of one pod by column generation: leaf patterns and partitions of stages.
#
#     min  sum_p cost_p x_p
#     parts that leaves host are parts of stages, by class f of stages and size k:
#          sum_p (stages of f with k slots)_p x_p = sum_c (parts of size k)_c y_{f,c}
#     every stage has a partition     sum_c y_{f,c} = stages of f
#     every leaf has a pattern        sum_{p of kind k} x_p <= leaves of kind k
#
# x_p counts leaves, so equal leaves are never told apart. Leaf patterns alone mix leaves freely: a third of
# each of three that have a slot to spare fill a stage. Partitions are whole, so what does not add up is
# paid for. The bound is Lagrange's at the duals of a round: it holds whether or not the columns are all
# there, and whatever the rounding of the linear programme (Desrosiers, Lübbecke 2005, "A Primer in Column
# Generation", section 3).


MOST_ROUNDS = 400
CLOSE = 1e-7
"""Of the linear programme's value: columns that could gain less are not generated."""
PATTERNS_A_ROUND = 3
"""Patterns of different sums added for each kind of leaf in a round."""
SLACK_COST = 10.0
"""Of a slot that no column provides, beside the dearest slot, which costs 1."""


@dataclass(kw_only=True)
class Relaxation:
    """What column generation ends with."""

    lagrangian_s: float
    """No assignment costs less, by `part_duals`; reduced costs count from here. May be below 0."""
    value_s: float
    """Of the linear programme over the columns."""
    kinds: list[BlockKind]
    part_duals: FloatArray
    """What a part earns by class of stages and size, s; shape [classes, sizes]."""
    leaf_reduced_s: FloatArray
    """Least reduced cost of a leaf of each kind, at most 0; shape [kinds]."""

    @property
    def bound_s(self) -> float:
        """No assignment costs less, s."""
        return max(self.lagrangian_s, 0.0)


class PatternMaster(ABC):
    """A linear programme over patterns of blocks so far; CLP is the simplex that failed on none of these.

    Costs are in units of the dearest slot, so that they are of about the size of the counts.
    """

    def __init__(self, problem: MappingProblem) -> None:
        self._problem, self._program = problem, LinearProgram()
        self.kinds = leaf_kinds(problem)
        self._known: set[tuple[str, int, bytes]] = set()
        self._scale = 1.0 / dearest_slot_s(problem)
        self._block_rows = [self._program.add_row(0, len(kind.members)) for kind in self.kinds]

    @abstractmethod
    def _entries(self, pattern: IntArray) -> list[tuple[Row, float]]:
        """What a block with a pattern, [stages], is in the rows of stages."""

    def add_pattern(self, kind: int, pattern: IntArray) -> bool:
        """Adds what a block of a kind may host of each stage; whether it is new.

        Parameters
        ----------
        kind
            Position in `kinds`.
        pattern
            Slots of each stage, shape [stages].
        """
        is_new = self._is_new("pattern", kind, pattern)
        if is_new:
            sent = float(pattern_bytes(self._problem, pattern[None])[0])
            entries = [(self._block_rows[kind], 1.0), *self._entries(pattern)]
            self._program.add_column(sent * self.kinds[kind].s_per_byte * self._scale, entries)
        return is_new

    def _is_new(self, what: str, kind: int, column: IntArray) -> bool:
        """Whether a column comes for the first time."""
        key = (what, kind, column.tobytes())
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def solve(self) -> float | None:
        """The value, s; None where the simplex gives up."""
        value = self._program.solve()
        return None if value is None else value / self._scale

    def _duals(self, rows: Sequence[Row]) -> FloatArray:
        """What one unit more of each row earns, s; shape [rows]."""
        return np.asarray(self._program.duals(rows) / self._scale, dtype=np.float64)


class _PartitionMaster(PatternMaster):
    """Over patterns of leaves and partitions of stages."""

    def __init__(self, problem: MappingProblem) -> None:
        super().__init__(problem)
        self._class_of = class_of_stages(problem.stages)
        self._stage_rows = [
            self._program.add_row(count, count) for count in stages_of_classes(problem.stages)
        ]
        sizes = range(largest_part(problem) + 1)
        self._part_rows = [[self._program.add_row(0, 0) for _ in sizes] for _ in STAGE_CLASSES]
        for rows in self._part_rows:
            for size, row in enumerate(rows):
                self._program.add_slack(row, SLACK_COST * size)

    def _entries(self, pattern: IntArray) -> list[tuple[Row, float]]:
        entries: list[tuple[Row, float]] = []
        for stage_class, rows in enumerate(self._part_rows):
            counts = np.bincount(pattern[self._class_of == stage_class])
            entries += [(rows[size], counts[size]) for size in np.flatnonzero(counts) if size]
        return entries

    def add_partition(self, stage_class: int, partition: IntArray) -> bool:
        """Adds a partition of the stages of a class; whether it is new.

        Parameters
        ----------
        stage_class
            `ENDS` or `INNER`.
        partition
            Parts of each size from 0, shape [sizes].
        """
        is_new = self._is_new("partition", stage_class, partition)
        if is_new:
            rows = self._part_rows[stage_class]
            entries = [(rows[size], -partition[size]) for size in np.flatnonzero(partition)]
            self._program.add_column(0.0, [(self._stage_rows[stage_class], 1.0), *entries])
        return is_new

    def add_mapping(self, counts: IntArray) -> None:
        """Adds the patterns and partitions of a mapping, counts [leaves, stages].

        Parameters
        ----------
        counts
            Slots of each stage in each leaf, shape [leaves, stages].
        """
        for kind, block in enumerate(self.kinds):
            for leaf in block.members:
                self.add_pattern(kind, counts[leaf].astype(np.int64))
        sizes = largest_part(self._problem) + 1
        for stage, stage_class in enumerate(self._class_of.tolist()):
            partition = np.bincount(counts[:, stage], minlength=sizes)
            partition[0] = 0
            self.add_partition(stage_class, partition)

    def part_duals(self) -> FloatArray:
        """What a part earns, s; shape [classes, sizes]."""
        duals = np.array([self._duals(rows) for rows in self._part_rows])
        duals[:, 0] = 0.0
        return duals


def relax(
    problem: MappingProblem, starts: Iterable[IntArray], stop: Callable[[], bool] = lambda: False
) -> Relaxation:
    """Generates patterns and partitions until none helps.

    Parameters
    ----------
    problem
        With one pod: what pods' up-links cost is not seen.
    starts
        Counts [leaves, stages] of mappings to begin with.
    stop
        Asked after each round whether to end early; the bound holds all the same.
    """
    master = _PartitionMaster(problem)
    for counts in starts:
        master.add_mapping(counts)
    pricing = PatternPricing(problem, master.kinds)
    best = Relaxation(
        lagrangian_s=-np.inf,
        value_s=np.inf,
        kinds=master.kinds,
        part_duals=np.zeros((len(STAGE_CLASSES), largest_part(problem) + 1)),
        leaf_reduced_s=np.zeros(len(master.kinds)),
    )
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        best.value_s = value_s
        added = _price(master, problem, pricing, best)
        if not added or value_s - best.bound_s <= CLOSE * value_s or stop():
            break
    return best


def _price(
    master: _PartitionMaster, problem: MappingProblem, pricing: PatternPricing, best: Relaxation
) -> int:
    """Adds the best columns at the duals of this round, keeps its bound if it is higher; columns added."""
    duals = master.part_duals()
    earned = duals[class_of_stages(problem.stages)]
    earned = np.broadcast_to(earned, (len(master.kinds), *earned.shape))
    reduced_s = np.zeros(len(master.kinds))
    added = 0
    for kind, reduced, pattern in pricing.best(earned, ways=PATTERNS_A_ROUND):
        reduced_s[kind] = min(reduced_s[kind], reduced)
        added += master.add_pattern(kind, pattern)
    bound = float(
        sum(len(kind.members) * r for kind, r in zip(master.kinds, reduced_s, strict=True))
    )
    for stage_class, stages in enumerate(stages_of_classes(problem.stages)):
        if stages:
            value, partition = cheapest_partition(
                duals[stage_class], problem.slots, most_parts(problem)
            )
            added += master.add_partition(stage_class, partition)
            bound += stages * value
    if bound > best.lagrangian_s:
        best.lagrangian_s, best.leaf_reduced_s, best.part_duals = bound, reduced_s, duals
    return added


def dearest_slot_s(problem: MappingProblem) -> float:
    """More than a slot can cost, s.

    Parameters
    ----------
    problem
        Whatever leaf and pod the slot is in: the dearest up-links of both count.

    Returns
    -------
    float
        Seconds, above 0 also where nothing is sent, so that it can be divided by.
    """
    t = problem.traffic
    sent = t.ring_bytes + t.context_bytes + 2 * t.hop_bytes + 2 * t.wrap_bytes
    sent += (t.expert_bytes + t.expert_ring_bytes) * t.expert_slots
    s_per_byte = max(problem.leaf_s_per_byte, default=0.0) + max(problem.pod_s_per_byte)
    return max(sent * s_per_byte, 1e-12)
