"""How busy the busiest up-link must be: ceilings on every link that no mapping keeps to.

Two refutations of a ceiling t, each for leaves and for pods:

- by room: a block whose link is busy for at most t holds so many slots at most; all blocks together must
  hold what is needed;
- by stages: patterns of blocks that keep to t cannot give every stage its slots. This is a linear programme
  over patterns with the least shortage as its objective, by column generation. Blocks with few patterns have
  them listed, and those above t are out; of the others only the mean over the patterns in use keeps to t,
  priced by a multiplier mu in the same dynamic programme as traffic (`patterns.Pricer`).

The shortage is bounded from the prices alone, so that no rounding of the linear programme matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import LARGEST_POD_TABLE, pod_states
from meshwright.planner.mapping.relaxation.patterns import (
    BlockKind,
    Pricer,
    leaf_kinds,
    pattern_bytes,
    pod_kinds,
)

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp

LISTED = 5_000
"""Patterns of a kind of block that are listed one by one."""
MOST_ROUNDS = 60
SHORTAGE = 1e-6
"""Slots; a bound of the shortage above it refutes a ceiling."""


class CeilingBound:
    """Refutes ceilings for the blocks of one level."""

    def __init__(self, problem: MappingProblem, kinds: list[BlockKind]) -> None:
        self._problem, self._kinds = problem, kinds
        self._pricer = Pricer(problem, kinds)
        self._least = self._least_by_use()
        self._listed = [self._patterns_of(kind) for kind in kinds]
        self.columns: list[tuple[int, IntArray]] = []
        """(kind, pattern) of what the last ceiling was tried with."""

    def _least_by_use(self) -> list[FloatArray]:
        """The least seconds with u slots in use, for every kind, [room + 1]."""
        none = np.zeros((len(self._kinds), self._problem.stages))
        out = [np.full(kind.room + 1, np.inf) for kind in self._kinds]
        for kind, cost_s, pattern in self._pricer.best(
            none, ways=max(kind.room for kind in self._kinds) + 1
        ):
            used = int(pattern.sum())
            out[kind][used] = min(out[kind][used], cost_s)
        return out

    def _patterns_of(self, kind: BlockKind) -> tuple[IntArray, FloatArray] | None:
        """All patterns of a kind and their seconds; None where they are many."""
        stages = self._problem.stages
        if comb(kind.room + stages, stages) > LISTED:
            return None
        rows = [
            np.bincount(np.array(chosen, dtype=np.int64), minlength=stages + 1)[:stages]
            for chosen in combinations_with_replacement(range(stages + 1), kind.room)
        ]
        patterns = np.array(rows, dtype=np.int64).reshape(-1, stages)
        patterns = patterns[patterns.max(axis=1) <= self._problem.slots]
        return patterns, kind.s_per_byte * pattern_bytes(self._problem, patterns)

    def by_room(self) -> float:
        """The largest ceiling below which the blocks do not hold enough."""
        steps = sorted(
            {float(cost) for least in self._least for cost in least if np.isfinite(cost)}
        )
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._room(steps[middle]) >= self._problem.needed:
                high = middle
            else:
                low = middle + 1
        return steps[low]

    def _room(self, ceiling_s: float) -> int:
        held = (np.flatnonzero(least <= ceiling_s * (1 + 1e-12)) for least in self._least)
        return sum(
            len(kind.members) * int(h.max(initial=0))
            for kind, h in zip(self._kinds, held, strict=True)
        )

    def refutes(self, ceiling_s: float) -> bool:
        """Whether no assignment keeps all of these links at most this busy."""
        master = _Shortage(
            self._problem, self._kinds, ceiling_s, [one is None for one in self._listed]
        )
        self.columns = []
        for _ in range(MOST_ROUNDS):
            solved = master.solve()
            if solved is None or solved[0] <= SHORTAGE:
                return False
            fresh, bound = self._price(master, ceiling_s, *solved[1:])
            if bound > SHORTAGE:
                return True
            if not fresh:
                return False
        return False

    def _price(
        self, master: _Shortage, ceiling_s: float, prices: FloatArray, paid: FloatArray
    ) -> tuple[int, float]:
        """Adds the best column of each kind; how many are new, and what the shortage is at least.

        `prices` are those of a slot by stage, `paid` those of a second of a kind's links.
        """
        bound, fresh = self._problem.slots * float(prices.sum()), 0
        for kind, (block, listed) in enumerate(zip(self._kinds, self._listed, strict=True)):
            if listed is None:
                continue
            worth = np.where(listed[1] <= ceiling_s, listed[0] @ prices, -np.inf)
            at = int(np.argmax(worth))
            bound -= len(block.members) * max(0.0, float(worth[at]))
            if worth[at] > 0:
                fresh += self._add(master, kind, listed[0][at], float(listed[1][at]))
        if all(listed is not None for listed in self._listed):
            return fresh, bound
        mu = np.maximum(paid, 1e-6 / max(ceiling_s, 1e-300))
        best: dict[int, float] = {}
        for kind, value, pattern in self._pricer.best(prices / mu[:, None], ways=2):
            if self._listed[kind] is None:
                best[kind] = min(best.get(kind, 0.0), value)
                cost_s = self._kinds[kind].s_per_byte * float(
                    pattern_bytes(self._problem, pattern[None])[0]
                )
                fresh += self._add(master, kind, pattern, cost_s)
        for kind, value in best.items():
            bound -= len(self._kinds[kind].members) * float(mu[kind]) * (ceiling_s - value)
        return fresh, bound

    def _add(self, master: _Shortage, kind: int, pattern: IntArray, cost_s: float) -> bool:
        if not master.add(kind, pattern, cost_s):
            return False
        self.columns.append((kind, pattern))
        return True


class _Shortage:
    """The linear programme: slots that stages lack, or have too many, when blocks keep to a ceiling."""

    def __init__(
        self,
        problem: MappingProblem,
        kinds: Sequence[BlockKind],
        ceiling_s: float,
        mean: Sequence[bool],
    ) -> None:
        from ortools.linear_solver import pywraplp

        self._solver: pywraplp.Solver = pywraplp.Solver.CreateSolver("GLOP")
        self._ceiling_s = max(ceiling_s, 1e-300)
        self._need = [
            self._solver.Constraint(problem.slots, problem.slots) for _ in range(problem.stages)
        ]
        self._members = [self._solver.Constraint(0, len(kind.members)) for kind in kinds]
        self._busy: list[Any] = [
            self._solver.Constraint(-self._solver.infinity(), len(kind.members)) if yes else None
            for kind, yes in zip(kinds, mean, strict=True)
        ]
        self._seen: set[tuple[int, bytes]] = set()
        for row in self._need:
            for sign in (1, -1):
                spare = self._solver.NumVar(0, self._solver.infinity(), "")
                row.SetCoefficient(spare, sign)
                self._solver.Objective().SetCoefficient(spare, 1.0)
        self._solver.Objective().SetMinimization()

    def add(self, kind: int, pattern: IntArray, cost_s: float) -> bool:
        """Adds a pattern; whether it is new."""
        key = (kind, pattern.tobytes())
        if key in self._seen:
            return False
        self._seen.add(key)
        column = self._solver.NumVar(0, self._solver.infinity(), "")
        for row, n in zip(self._need, pattern.tolist(), strict=True):
            if n:
                row.SetCoefficient(column, n)
        self._members[kind].SetCoefficient(column, 1.0)
        if self._busy[kind] is not None:
            self._busy[kind].SetCoefficient(column, cost_s / self._ceiling_s)
        return True

    def solve(self) -> tuple[float, FloatArray, FloatArray] | None:
        """The shortage, prices of a slot by stage, and what a second of each kind's links is worth."""
        from ortools.linear_solver import pywraplp

        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        prices = np.array([row.dual_value() for row in self._need])
        busy = [0.0 if row is None else max(0.0, -row.dual_value()) for row in self._busy]
        return float(self._solver.Objective().Value()), prices, np.array(busy) / self._ceiling_s


def ceiling_bounds(problem: MappingProblem) -> list[CeilingBound]:
    """Those of the leaves, and of the pods where there are several and their tables are not too large."""
    # Where a leaf is does not matter to its own link, so that leaves of all pods are alike.
    flat = problem.without_pods()
    found = [CeilingBound(flat, leaf_kinds(flat))]
    if problem.pods > 1 and pod_states(problem) <= LARGEST_POD_TABLE:
        found.append(CeilingBound(problem, pod_kinds(problem)))
    return found
