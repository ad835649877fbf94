"""A tighter relaxation of one pod: patterns of leaves on one side, cuts of stages on the other.

    min  sum_p cost_p x_p
    pieces that leaves hold are pieces that stages are cut into, by family f of stages and size k:
         sum_p (stages of f with k slots)_p x_p = sum_c (pieces of k)_c y_{f,c}
    every stage is cut              sum_c y_{f,c} = stages of f
    every leaf has a pattern        sum_{p of kind k} x_p <= leaves of kind k

Leaf patterns alone mix leaves freely: a third of each of three that leave over a slot fill a stage. Cuts are
whole, so what does not add up is paid for. Duals are drawn towards those of the best bound so far (Wentges
1997, "Weighted Dantzig-Wolfe decomposition for linear mixed-integer programming", section 3), which takes
half the rounds or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.columns import (
    CLOSE,
    MOST_ROUNDS,
    Pool,
    Relaxation,
    dearest_slot_s,
)
from meshwright.planner.mapping.relaxation.patterns import Pricer, leaf_kinds
from meshwright.planner.mapping.relaxation.pieces import (
    FAMILIES,
    cheapest_cut,
    family_of,
    family_sizes,
    largest_piece,
    most_pieces,
)

if TYPE_CHECKING:
    from ortools.linear_solver import pywraplp

SMOOTHING = 0.7
"""Weight of the best prices so far."""
STEP = 0.2
"""By how much less they weigh after a round without a new column."""


class _Master:
    """The linear programme over the columns so far; COIN-OR CLP, the simplex that failed on none of these."""

    def __init__(self, problem: MappingProblem) -> None:
        from ortools.linear_solver import pywraplp

        self._problem = problem
        self._solver: pywraplp.Solver = pywraplp.Solver.CreateSolver("CLP")
        self._objective = self._solver.Objective()
        self._objective.SetMinimization()
        self.leaves = Pool(leaf_kinds(problem))
        self._cuts: set[tuple[int, bytes]] = set()
        self._family = family_of(problem.stages)
        self._scale = 1.0 / dearest_slot_s(problem)
        most = largest_piece(problem)
        self._leaf_rows = [
            self._solver.Constraint(0, len(kind.members)) for kind in self.leaves.kinds
        ]
        self._whole = [self._solver.Constraint(n, n) for n in family_sizes(problem.stages)]
        self._links = [
            [self._solver.Constraint(0, 0) for _ in range(most + 1)] for _ in range(FAMILIES)
        ]
        # Pieces that no column provides: dearer by the slot than any.
        for rows in self._links:
            for size, row in enumerate(rows):
                for sign in (1, -1):
                    self._column([(row, sign)], 10.0 * size)

    def _column(self, entries: list[tuple[Any, int]], cost: float) -> None:
        column = self._solver.NumVar(0, self._solver.infinity(), "")
        for row, n in entries:
            row.SetCoefficient(column, float(n))
        self._objective.SetCoefficient(column, cost)

    def add_leaf(self, kind: int, pattern: IntArray) -> bool:
        """Adds a leaf pattern; whether it is new."""
        if not self.leaves.add(self._problem, kind, pattern):
            return False
        entries = [(self._leaf_rows[kind], 1)]
        for family, rows in enumerate(self._links):
            held = np.bincount(pattern[self._family == family])
            entries += [(rows[size], int(held[size])) for size in np.flatnonzero(held) if size]
        self._column(entries, self.leaves.cost_s[-1] * self._scale)
        return True

    def add_cut(self, family: int, cut: IntArray) -> bool:
        """Adds a cut of the stages of a family; whether it is new."""
        key = (family, cut.tobytes())
        if key in self._cuts:
            return False
        self._cuts.add(key)
        rows = self._links[family]
        entries = [(rows[size], -int(cut[size])) for size in np.flatnonzero(cut)]
        self._column([(self._whole[family], 1), *entries], 0.0)
        return True

    def solve(self) -> float | None:
        """The value, in seconds; None where CLP gives up."""
        from ortools.linear_solver import pywraplp

        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        return float(self._objective.Value()) / self._scale

    def prices(self) -> FloatArray:
        """What a piece earns, [families, size], in seconds."""
        out = np.array([[row.dual_value() for row in rows] for rows in self._links]) / self._scale
        out[:, 0] = 0.0
        return out


def relax_two_sided(
    problem: MappingProblem, starts: Iterable[IntArray], stop: Callable[[], bool] = lambda: False
) -> Relaxation:
    """Generates columns of both sides until none helps. `starts` are counts [leaves, stages] that fit."""
    master = _Master(problem)
    for counts in starts:
        _add_counts(master, problem, counts)
    pricer = Pricer(problem, master.leaves.kinds)
    kinds, most = len(master.leaves.kinds), largest_piece(problem)
    best = Relaxation(
        priced_bound_s=-np.inf, value_s=np.inf, leaves=master.leaves, pods=None, rounds=0,
        leaf_prices=np.zeros((kinds, problem.stages, most + 1)), leaf_rent_s=np.zeros(kinds),
        pod_prices=np.zeros((0, 0)), pod_rent_s=np.zeros(0), piece_prices=np.zeros((FAMILIES, most + 1)),
    )  # fmt: skip
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        best.rounds, best.value_s = best.rounds + 1, value_s
        now, weight = master.prices(), SMOOTHING if np.isfinite(best.priced_bound_s) else 0.0
        while (
            not (fresh := _price(master, problem, pricer, best, _between(best, now, weight)))
            and weight
        ):
            weight = max(0.0, weight - STEP)
        if not fresh or best.value_s - best.bound_s <= CLOSE * best.value_s or stop():
            break
    return best


def _between(best: Relaxation, now: FloatArray, weight: float) -> FloatArray:
    assert best.piece_prices is not None
    return weight * best.piece_prices + (1 - weight) * now if weight else now


def _price(
    master: _Master, problem: MappingProblem, pricer: Pricer, best: Relaxation, prices: FloatArray
) -> int:
    """Adds columns at these prices, keeps the bound if it is the best so far; how many are new."""
    kinds, family = master.leaves.kinds, family_of(problem.stages)
    earned = np.broadcast_to(prices[family], (len(kinds), problem.stages, prices.shape[1]))
    rent, fresh, bound = np.zeros(len(kinds)), 0, 0.0
    for kind, reduced, pattern in pricer.best(earned, ways=3):
        rent[kind] = min(rent[kind], reduced)
        fresh += master.add_leaf(kind, pattern)
    bound += sum(len(kind.members) * float(r) for kind, r in zip(kinds, rent, strict=True))
    for of, stages in enumerate(family_sizes(problem.stages)):
        if stages:
            value, cut = cheapest_cut(prices[of], problem.slots, most_pieces(problem))
            fresh += master.add_cut(of, cut)
            bound += stages * value
    if bound > best.priced_bound_s:
        best.priced_bound_s = bound
        best.leaf_prices, best.leaf_rent_s, best.piece_prices = earned, rent, prices
    return fresh


def _add_counts(master: _Master, problem: MappingProblem, counts: IntArray) -> None:
    """Adds the patterns and cuts of a whole mapping, counts [leaves, stages]."""
    for kind, block in enumerate(master.leaves.kinds):
        for leaf in block.members:
            master.add_leaf(kind, counts[leaf].astype(np.int64))
    for stage, of in enumerate(family_of(problem.stages)):
        cut = np.bincount(counts[:, stage], minlength=largest_piece(problem) + 1)
        cut[0] = 0
        master.add_cut(int(of), cut)
