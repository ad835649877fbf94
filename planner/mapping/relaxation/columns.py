"""A bound on the traffic of one pod by column generation: leaf patterns and partitions of stages.

    min  sum_p cost_p x_p
    parts that leaves host are parts of stages, by class f of stages and size k:
         sum_p (stages of f with k slots)_p x_p = sum_c (parts of size k)_c y_{f,c}
    every stage has a partition     sum_c y_{f,c} = stages of f
    every leaf has a pattern        sum_{p of kind k} x_p <= leaves of kind k

x_p counts leaves, so equal leaves are never told apart. Leaf patterns alone mix leaves freely: a third of
each of three that have a slot to spare fill a stage. Partitions are whole, so what does not add up is
paid for. The bound is Lagrange's at the duals of a round: it holds whether or not the columns are all
there, and whatever the rounding of the linear programme (Desrosiers, Lübbecke 2005, "A Primer in Column
Generation", section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.partitions import (
    STAGE_CLASSES,
    cheapest_partition,
    class_of_stages,
    largest_part,
    most_parts,
    stages_of_classes,
)
from meshwright.planner.mapping.relaxation.patterns import (
    BlockKind,
    PatternPricing,
    leaf_kinds,
    pattern_bytes,
)
from meshwright.planner.solvers.linear_program import LinearProgram

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


class _RestrictedMaster:
    """The linear programme over the columns so far; CLP is the simplex that failed on none of these."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self._program = LinearProgram("CLP")
        self.kinds = leaf_kinds(problem)
        self._known: set[tuple[str, int, bytes]] = set()
        self._class_of = class_of_stages(problem.stages)
        self._scale = 1.0 / dearest_slot_s(problem)
        self._leaf_rows = [self._program.add_row(0, len(kind.members)) for kind in self.kinds]
        self._stage_rows = [
            self._program.add_row(count, count) for count in stages_of_classes(problem.stages)
        ]
        sizes = range(largest_part(problem) + 1)
        self._part_rows = [[self._program.add_row(0, 0) for _ in sizes] for _ in STAGE_CLASSES]
        for rows in self._part_rows:
            for size, row in enumerate(rows):
                self._program.add_slack(row, SLACK_COST * size)

    def add_pattern(self, kind: int, pattern: IntArray) -> bool:
        """Adds what a leaf of a kind may host of each stage; whether it is new."""
        key = ("pattern", kind, pattern.tobytes())
        if key in self._known:
            return False
        self._known.add(key)
        entries = [(self._leaf_rows[kind], 1.0)]
        for stage_class, rows in enumerate(self._part_rows):
            counts = np.bincount(pattern[self._class_of == stage_class])
            entries += [(rows[size], counts[size]) for size in np.flatnonzero(counts) if size]
        sent = float(pattern_bytes(self._problem, pattern[None])[0])
        self._program.add_column(sent * self.kinds[kind].s_per_byte * self._scale, entries)
        return True

    def add_partition(self, stage_class: int, partition: IntArray) -> bool:
        """Adds a partition of the stages of a class; whether it is new."""
        key = ("partition", stage_class, partition.tobytes())
        if key in self._known:
            return False
        self._known.add(key)
        rows = self._part_rows[stage_class]
        entries = [(rows[size], -partition[size]) for size in np.flatnonzero(partition)]
        self._program.add_column(0.0, [(self._stage_rows[stage_class], 1.0), *entries])
        return True

    def add_mapping(self, counts: IntArray) -> None:
        """Adds the patterns and partitions of a mapping, counts [leaves, stages]."""
        for kind, block in enumerate(self.kinds):
            for leaf in block.members:
                self.add_pattern(kind, counts[leaf].astype(np.int64))
        sizes = largest_part(self._problem) + 1
        for stage, stage_class in enumerate(self._class_of.tolist()):
            partition = np.bincount(counts[:, stage], minlength=sizes)
            partition[0] = 0
            self.add_partition(stage_class, partition)

    def solve(self) -> float | None:
        """The value, s; None where the simplex gives up."""
        value = self._program.solve()
        return None if value is None else value / self._scale

    def part_duals(self) -> FloatArray:
        """What a part earns, s; shape [classes, sizes]."""
        duals = np.array([self._program.duals(rows) for rows in self._part_rows]) / self._scale
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
    master = _RestrictedMaster(problem)
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
    master: _RestrictedMaster, problem: MappingProblem, pricing: PatternPricing, best: Relaxation
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
    """More than a slot can cost, s."""
    t = problem.traffic
    sent = t.ring_bytes + t.context_bytes + 2 * t.hop_bytes + 2 * t.wrap_bytes
    sent += (t.expert_bytes + t.expert_ring_bytes) * t.expert_slots
    s_per_byte = max(problem.leaf_s_per_byte, default=0.0) + max(problem.pod_s_per_byte)
    return max(sent * s_per_byte, 1e-12)
