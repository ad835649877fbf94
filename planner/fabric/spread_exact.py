"""The least spread of a small instance by CP-SAT, and the least traffic among the mappings that have it.

    each slot of the grid is in one leaf       sum_l x_{s,j,l} = 1
    in the room of every leaf                  sum_{s,j} x_{s,j,l} <= free_l
    what stages and replicas touch             rows_{s,b} >= x_{s,j,l},  columns_{j,b} >= x_{s,j,l},  l in b
    the most of each kind, at each level       sum_b rows_{s,b} <= D,  sum_b columns_{j,b} <= P

with b the pods, or the leaves. Levels are minimised one after the other, pods first; traffic is then stated
group by group, as `problem.loads_of` counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.fabric.problem import FloatArray, IntArray, MappingProblem, loads_of
from planner.fabric.spread_bound import Reach, ReachWeights

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST_CELLS = 200
"""Stages times slots times leaves; larger models prove nothing in seconds."""
WORK = 2.0
"""CP-SAT's deterministic time for one objective."""
UNITS = 10**9
"""Range of the traffic objective."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What the model found."""

    assignment: IntArray
    levels_proven: int
    """Levels whose reach is proven least given that of the ones before, pods first."""
    traffic_bound_s: float | None
    """No assignment with this reach sends less; None where that was not asked, or not found."""


def is_small(problem: MappingProblem) -> bool:
    """Whether one model holds the instance."""
    return problem.needed * len(problem.leaf_slots) <= LARGEST_CELLS


def least_reach(
    problem: MappingProblem,
    start: IntArray,
    weights: ReachWeights,
    *,
    reached: Sequence[Reach],
    known: Sequence[Reach],
) -> Exact:
    """Level by level from a start, then traffic.

    `reached` is how far the start's groups reach, [pods, leaves]; none reach less far than `known`.
    """
    model = _Model(problem, weights)
    best, moved = start, False
    for level, (key, at, least) in enumerate(zip(model.keys, reached, known, strict=True)):
        value = model.code(level, at)
        if moved or weights.key(at) != weights.key(least):
            solved = model.least(key, best)
            if solved is None:
                return Exact(assignment=best, levels_proven=level, traffic_bound_s=None)
            best, value, moved = solved[0], round(solved[1]), True
        model.model.add(key <= value)
    return _with_traffic(model, best)


class _Model:
    """Slots in leaves, and how far groups reach at each level."""

    def __init__(self, problem: MappingProblem, weights: ReachWeights) -> None:
        from ortools.sat.python import cp_model

        self.problem, self._weights = problem, weights
        self.model = model = cp_model.CpModel()
        stages, slots, leaves = range(problem.stages), range(problem.slots), range(len(problem.leaf_slots))
        self.x = [[[model.new_bool_var("") for _ in leaves] for _ in slots] for _ in stages]
        for row in self.x:
            for cell in row:
                model.add_exactly_one(cell)
        for leaf, free in enumerate(problem.leaf_slots):
            model.add(sum(cell[leaf] for row in self.x for cell in row) <= free)
        t = problem.traffic
        self._alike = max(t.context_slots, t.expert_slots) == 1
        if self._alike:  # replicas may change places
            first = [sum(leaf * x for leaf, x in enumerate(cell)) for cell in self.x[0]]
            for one, other in pairwise(first):
                model.add(one <= other)
        pods = [np.flatnonzero(problem.pod_of == pod).tolist() for pod in range(problem.pods)]
        self.blocks: list[list[list[int]]] = [pods, [[leaf] for leaf in leaves]]
        self.keys = [self._key(level) for level in (0, 1)]

    def code(self, level: int, reach: Reach) -> int:
        """A reach at a level as its key expression counts it."""
        worst, together = self._weights.key(reach)
        return worst * self._span(level) + together

    def _span(self, level: int) -> int:
        return 1000 * len(self.blocks[level]) + 1

    def _key(self, level: int) -> Any:
        """The most that a group counts, and then both kinds' most together, in one number."""
        model, blocks = self.model, self.blocks[level]
        columns = [[row[at] for row in self.x] for at in range(self.problem.slots)]
        counted = []
        for groups, weight in ((self.x, self._weights.data_parallel), (columns, self._weights.pipeline)):
            most = model.new_int_var(1, len(blocks), "")
            for group in groups:
                model.add(sum(self._touches(group, block) for block in blocks) <= most)
            counted.append(weight * most)
        worst = model.new_int_var(0, self._span(level), "")
        model.add_max_equality(worst, counted)
        return worst * self._span(level) + sum(counted)

    def _touches(self, group: Sequence[Sequence[cp_model.IntVar]], block: Sequence[int]) -> cp_model.IntVar:
        touches = self.model.new_bool_var("")
        for cell in group:
            for leaf in block:
                self.model.add_implication(cell[leaf], touches)
        return touches

    def least(self, objective: Any, start: IntArray) -> tuple[IntArray, float] | None:
        """The proven least assignment and its value; None where CP-SAT does not get there."""
        found = self.search(objective, start)
        return None if found is None or found[1] != found[2] else found[:2]

    def search(self, objective: Any, start: IntArray) -> tuple[IntArray, float, float] | None:
        """An assignment, its value and the bound; None where nothing was found."""
        from ortools.sat.python import cp_model

        self.model.clear_hints()  # type: ignore[no-untyped-call]
        if self._alike:
            start = start[:, np.argsort(start[0], kind="stable")]
        for row, leaves in zip(self.x, start.tolist(), strict=True):
            for cell, held in zip(row, leaves, strict=True):
                for leaf, x in enumerate(cell):
                    self.model.add_hint(x, leaf == held)
        self.model.minimize(objective)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = WORK
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        where = [[[solver.boolean_value(x) for x in cell].index(True) for cell in row] for row in self.x]
        value = solver.objective_value
        bound = value if status == cp_model.OPTIMAL else solver.best_objective_bound
        return np.array(where, dtype=np.int64), value, bound


def _with_traffic(model: _Model, best: IntArray) -> Exact:
    """The least traffic within the keys that the model now keeps to."""
    problem = model.problem
    most_s = loads_of(problem, best).total_s
    if most_s <= 0:
        return Exact(assignment=best, levels_proven=2, traffic_bound_s=0.0)
    unit = most_s / UNITS
    terms = [*_terms(model, unit)]
    found = model.search(sum(terms), best)
    if found is None:
        return Exact(assignment=best, levels_proven=2, traffic_bound_s=None)
    assignment = min((found[0], best), key=lambda one: loads_of(problem, one).total_s)
    rounding = 0.5 * len(terms) * problem.slots
    bound_s = max(0.0, (found[2] - rounding) * unit)
    return Exact(assignment=assignment, levels_proven=2, traffic_bound_s=bound_s)


def _terms(model: _Model, unit: float) -> Iterator[Any]:
    """What every group sends up every block, in units; `problem._sent_up` says the same of an assignment."""
    problem = model.problem
    costs = (problem.pod_s_per_byte, problem.leaf_s_per_byte)
    grid = np.arange(problem.needed).reshape(problem.stages, problem.slots)
    for blocks, level_cost in zip(model.blocks, costs, strict=True):
        for block, cost in zip(blocks, level_cost, strict=True):
            inside = np.array(
                [[sum(cell[leaf] for leaf in block) for cell in row] for row in model.x], dtype=object
            ).ravel()
            for members, sent in _groups(problem, grid):
                table = np.rint(sent * cost / unit).astype(np.int64)
                if table.any():
                    yield _sent(model.model, sum(inside[members.ravel()]), table)


def _groups(problem: MappingProblem, grid: IntArray) -> Iterator[tuple[IntArray, FloatArray]]:
    """Every group's cells, and the bytes that k of them in a block send up, [members + 1]."""
    t = problem.traffic

    def cut(members: int, sent: float) -> FloatArray:
        return np.where((np.arange(members + 1) % members) > 0, sent, 0.0)

    yield from ((row, cut(problem.slots, t.ring_bytes)) for row in grid)
    if t.context_slots > 1:
        yield from (
            (group, cut(t.context_slots, t.context_bytes)) for group in grid.reshape(-1, t.context_slots)
        )
    if t.expert_slots > 1:
        k = np.arange(t.expert_slots + 1)
        table = t.expert_bytes * k * (t.expert_slots - k) / t.expert_slots
        yield from ((group, table) for group in grid.reshape(-1, t.expert_slots))
    if t.expert_ring_bytes:
        rings = grid.reshape(problem.stages, -1, t.expert_slots).transpose(0, 2, 1)
        size = problem.slots // t.expert_slots
        yield from ((ring, cut(size, t.expert_ring_bytes)) for ring in rings.reshape(-1, size))
    if problem.stages > 1:
        pairs = [(grid[at], grid[at + 1], t.hop_bytes) for at in range(problem.stages - 1)]
        for one, other, sent in [*pairs, (grid[-1], grid[0], t.wrap_bytes)]:
            yield from ((np.array(pair), cut(2, sent)) for pair in zip(one, other, strict=True))


def _sent(model: cp_model.CpModel, inside: Any, table: IntArray) -> Any:
    """table[k] for k members inside a block."""
    held = model.new_int_var(0, len(table) - 1, "")
    model.add(held == inside)
    sent = model.new_int_var(0, int(table.max()), "")
    model.add_element(held, table.tolist(), sent)
    return sent
