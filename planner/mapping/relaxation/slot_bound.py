"""A bound on the traffic of few large blocks, such as pods: column generation over their patterns alone.

    min  sum_p cost_p x_p
    every stage has its slots           sum_p n_{p,s} x_p = slots
    every block has a pattern           sum_{p of kind k} x_p <= blocks of kind k

Partitions of stages, as in `columns`, would have hundreds of part sizes here. The bound is Lagrange's at the
duals of a round, valid whatever columns are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import (
    CLOSE,
    MOST_ROUNDS,
    SLACK_COST,
    dearest_slot_s,
)
from meshwright.planner.mapping.relaxation.patterns import (
    PatternPricing,
    leaf_kinds,
    pattern_bytes,
)
from meshwright.planner.solvers.linear_program import LinearProgram

PATTERNS_A_ROUND = 3


class _PatternMaster:
    """The linear programme over the patterns so far."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self._program = LinearProgram("CLP")
        self.kinds = leaf_kinds(problem)
        self._known: set[tuple[int, bytes]] = set()
        self._scale = 1.0 / dearest_slot_s(problem)
        self._block_rows = [self._program.add_row(0, len(kind.members)) for kind in self.kinds]
        slots = problem.slots
        self._stage_rows = [self._program.add_row(slots, slots) for _ in range(problem.stages)]
        for row in self._stage_rows:
            self._program.add_slack(row, SLACK_COST)

    def add_pattern(self, kind: int, pattern: IntArray) -> bool:
        """Adds a pattern of a kind of block; whether it is new."""
        key = (kind, pattern.tobytes())
        if key in self._known:
            return False
        self._known.add(key)
        sent = float(pattern_bytes(self._problem, pattern[None])[0])
        cost_s = sent * self.kinds[kind].s_per_byte
        entries = [(self._block_rows[kind], 1.0)]
        entries += [(self._stage_rows[stage], pattern[stage]) for stage in np.flatnonzero(pattern)]
        self._program.add_column(cost_s * self._scale, entries)
        return True

    def solve(self) -> float | None:
        """The value, s; None where the simplex gives up."""
        value = self._program.solve()
        return None if value is None else value / self._scale

    def slot_duals(self) -> FloatArray:
        """What a slot of each stage earns, s; shape [stages]."""
        return np.asarray(self._program.duals(self._stage_rows) / self._scale, dtype=np.float64)


def slot_bound_s(
    problem: MappingProblem, starts: Iterable[IntArray], stop: Callable[[], bool]
) -> float:
    """Seconds that the leaves' up-links are busy at the least, all together.

    Parameters
    ----------
    problem
        Its leaves are the blocks; pods are not seen.
    starts
        Counts [leaves, stages] of mappings to begin with.
    stop
        Asked after each round whether to end early.
    """
    master = _PatternMaster(problem)
    for counts in starts:
        for kind, block in enumerate(master.kinds):
            for leaf in block.members:
                master.add_pattern(kind, counts[leaf].astype(np.int64))
    pricing = PatternPricing(problem, master.kinds)
    members = np.array([len(kind.members) for kind in master.kinds])
    sizes = np.arange(problem.slots + 1)
    bound_s = 0.0
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        duals = master.slot_duals()
        earned = duals[:, None] * sizes
        reduced_s = np.zeros(len(master.kinds))
        added = 0
        by_kind = np.broadcast_to(earned, (len(master.kinds), *earned.shape))
        for kind, reduced, pattern in pricing.best(by_kind, ways=PATTERNS_A_ROUND):
            reduced_s[kind] = min(reduced_s[kind], reduced)
            added += master.add_pattern(kind, pattern)
            added += master.add_pattern(kind, pattern[::-1].copy())
        bound_s = max(bound_s, problem.slots * float(duals.sum()) + float(members @ reduced_s))
        if not added or value_s - bound_s <= CLOSE * value_s or stop():
            break
    return bound_s
