"""A bound by what a GPU can hold: values of replicas such that no GPU within a load limit holds more than 1.

Any function f of a replica's load with that property bounds the counts: sum_e c_e f(w_e / c_e) <= GPUs. The
f that rules out given counts is the dual of the linear programme of patterns (Gilmore and Gomory, A linear
programming approach to the cutting-stock problem, 1961), here with exactly m replicas a pattern, found by
column generation. What f says holds for all counts, because f of a load that has no value is that of the next
smaller one. So CP-SAT looks for counts that keep to every f found so far, and the programme of the counts it
finds gives the next f, until there are no counts: then the limit is below every placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import least_counts
from meshwright.planner.experts.balance.count_bound import one_of_each, solved
from meshwright.planner.experts.problem import Loads, Slots

_GRID = 8192
"""Loads are rounded down to this part of the limit: a relaxation, so the bound stays one."""
_ROUNDS = 60
_SMOOTH = 0.7
_TINY = 1e-7
_UNIT = 1_000_000
_MOST_CHOICES = 2000
_MOST_ALLOWED = 4
_LOW = -1e30

Sizes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Worth:
    """f as a staircase: `value` from each of the rising `size`s on; the first is the least there is."""

    size: Sizes
    value: Loads

    def at(self, size: Sizes) -> Loads:
        """f of each size."""
        return np.asarray(self.value[np.searchsorted(self.size, size, side="right") - 1])


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What is known of a limit on the GPU load."""

    none: bool
    """No placement is within it."""
    allowed: tuple[Slots, ...] = ()
    """Counts that patterns allow."""
    tries: int = 1
    """Counts that were looked into."""


def counts_ruled_out(
    load: Loads, slots: int, gpus: int, limit: float, *, tries: int, work: float
) -> Ruling:
    """Looks into up to `tries` counts of loads [experts]; `work` is CP-SAT's deterministic time for each."""
    need = least_counts(load, slots, gpus, limit)
    if need is None:
        return Ruling(none=True)
    least, spare = need
    ways = np.minimum(spare, gpus - least) + 1
    if ways.sum() > _MOST_CHOICES or slots // gpus < 2:
        return Ruling(none=False, tries=tries)
    start = np.concatenate([[0], np.cumsum(ways)])
    expert = np.repeat(np.arange(len(load)), ways)
    count = least[expert] + np.arange(start[-1]) - start[expert]
    size = np.floor(load[expert] / count / limit * _GRID).astype(np.int64)
    cuts: list[Worth] = [Worth(size=np.arange(_GRID + 1), value=np.arange(_GRID + 1) / _GRID)]
    allowed: list[Slots] = []
    for tried in range(tries):
        parts = np.stack([count * worth.at(size) for worth in cuts])
        chosen = _chosen(
            parts, start, count, slots=slots, gpus=gpus, work=work, barred=allowed, least=least
        )
        if chosen is None:
            return Ruling(none=not allowed, allowed=tuple(allowed), tries=tried + 1)
        if isinstance(chosen, bool):
            break
        worth = ruling_out(
            size[chosen], count[chosen], slots // gpus, gpus, smallest=int(size.min())
        )
        if worth is None:
            allowed.append(count[chosen])
            if len(allowed) >= _MOST_ALLOWED:
                return Ruling(none=False, allowed=tuple(allowed), tries=tried + 1)
        else:
            cuts.append(worth)
    return Ruling(none=False, allowed=tuple(allowed), tries=tries)


def _chosen(
    parts: Loads,
    start: Sizes,
    count: Sizes,
    *,
    slots: int,
    gpus: int,
    work: float,
    barred: list[Slots],
    least: Slots,
) -> Sizes | bool | None:
    """A choice for every expert that keeps to all parts [cuts, choices]; None if none, False if unknown."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    y = [model.new_bool_var("") for _ in count]
    one_of_each(model, y, start)
    model.add(cp_model.LinearExpr.weighted_sum(y, count.tolist()) == slots)
    for part in np.floor(parts * _UNIT).astype(np.int64):
        model.add(cp_model.LinearExpr.weighted_sum(y, part.tolist()) <= gpus * _UNIT)
    for counts in barred:
        model.add_bool_or([~y[i] for i in (start[:-1] + counts - least).tolist()])
    return solved(model, y, work)


def ruling_out(
    size: Sizes, count: Sizes, per_gpu: int, gpus: int, *, smallest: int
) -> Worth | None:
    """An f by which `count` replicas of each `size` are worth more than `gpus`; None if patterns allow them.

    f holds for every replica of at least `smallest`, the least size in any counts: what a GPU holds is
    no less than that, and f of it is part of every pattern's worth.
    The duals are smoothed towards the best so far (Wentges, Weighted Dantzig-Wolfe decomposition, 1997),
    whose first is the load itself.
    """
    sizes, of = np.unique(np.append(size, smallest), return_inverse=True)
    demand = np.bincount(of, weights=np.append(count, 0)).astype(np.float64)
    fits = sizes + (per_gpu - 1) * sizes[0] <= _GRID
    if not fits.all():
        return Worth(size=sizes, value=np.where(fits, 0.0, gpus + 1.0))
    programme = _Programme(sizes, demand, per_gpu)
    best, best_sum = sizes / _GRID, 0.0
    smooth = _SMOOTH
    for _ in range(_ROUNDS):
        dual, needed = programme.solve()
        if dual is None or needed <= gpus * (1 + _TINY):
            return None
        # What holds a smaller replica holds it in place of a larger one: f may rise only.
        f = np.maximum.accumulate(smooth * best + (1 - smooth) * dual)
        worth, patterns = _fullest(sizes, f, per_gpu)
        f = f / worth
        total = float((demand * f).sum())
        if total > gpus * (1 + _TINY):
            return Worth(size=sizes, value=f)
        if total > best_sum:
            best, best_sum = f, total
        if programme.add(patterns):
            smooth = _SMOOTH
        elif smooth == 0.0:
            return None
        else:
            smooth = 0.0
    return None


class _Programme:
    """Fewest patterns that cover the demand, over the patterns added so far."""

    def __init__(self, sizes: Sizes, demand: Loads, per_gpu: int) -> None:
        from ortools.linear_solver import pywraplp

        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = self._solver.infinity()
        self._rows = [self._solver.Constraint(float(d), infinity) for d in demand]
        self._objective = self._solver.Objective()
        self._objective.SetMinimization()
        self._known: set[tuple[int, ...]] = set()
        self.add([(i, *[0] * (per_gpu - 1)) for i in range(len(sizes))])

    def add(self, patterns: list[tuple[int, ...]]) -> int:
        """Adds patterns, as indices of sizes; how many were new."""
        new = 0
        for pattern in patterns:
            key = tuple(sorted(pattern))
            if key in self._known:
                continue
            self._known.add(key)
            new += 1
            variable = self._solver.NumVar(0, self._solver.infinity(), "")
            self._objective.SetCoefficient(variable, 1)
            for i in set(key):
                self._rows[i].SetCoefficient(variable, key.count(i))
        return new

    def solve(self) -> tuple[Loads | None, float]:
        """Duals of the demand and the patterns needed; no duals where GLOP gave up for rounding."""
        if self._solver.Solve() != self._solver.OPTIMAL:
            return None, 0.0
        dual = np.array([max(row.dual_value(), 0.0) for row in self._rows])
        return dual, self._objective.Value()


def _fullest(sizes: Sizes, f: Loads, per_gpu: int) -> tuple[float, list[tuple[int, ...]]]:
    """The most that `per_gpu` replicas within the grid are worth, and a good pattern with each size."""
    steps = np.flatnonzero(np.diff(f, prepend=-1.0) > 0)
    table = np.zeros(_GRID + 1)
    tables, picks = [table], []
    for _ in range(per_gpu):
        now = np.full(_GRID + 1, _LOW)
        pick = np.zeros(_GRID + 1, dtype=np.int64)
        for i in steps.tolist():
            room = table[: _GRID + 1 - sizes[i]] + f[i]
            better = room > now[sizes[i] :]
            now[sizes[i] :][better] = room[better]
            pick[sizes[i] :][better] = i
        table = now
        tables.append(table)
        picks.append(pick)
    patterns = []
    for i in range(len(sizes)):
        room = _GRID - int(sizes[i])
        if tables[per_gpu - 1][room] <= _LOW / 2:
            continue
        pattern: list[int] = [i]
        for pick in reversed(picks[: per_gpu - 1]):
            pattern.append(int(pick[room]))
            room -= int(sizes[pattern[-1]])
        patterns.append(tuple(pattern))
    return float(tables[-1][_GRID]), patterns
