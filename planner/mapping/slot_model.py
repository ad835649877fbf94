"""One CP-SAT model of a small mapping problem: a leaf for every slot of the grid, priced group by group.

    each slot of the grid is in one leaf       sum_l x_{s,j,l} = 1
    in the room of every leaf                  sum_{s,j} x_{s,j,l} <= free_l
    what a group sends up a block              table[k] for its k members inside it

It says what `problem.loads_of` says of an assignment, for every kind of group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST_CELLS = 200
"""Stages times slots times leaves; larger models prove nothing in seconds."""
WORK = 2.0
"""CP-SAT's deterministic time for one objective."""
UNITS = 10**9
"""Range of objectives that are times."""


def is_small(problem: MappingProblem) -> bool:
    """Whether one model holds the instance."""
    return problem.needed * len(problem.leaf_slots) <= LARGEST_CELLS


class SlotModel:
    """Slots in leaves."""

    def __init__(self, problem: MappingProblem) -> None:
        from ortools.sat.python import cp_model

        self.problem = problem
        self.model = model = cp_model.CpModel()
        stages, slots, leaves = (
            range(problem.stages),
            range(problem.slots),
            range(len(problem.leaf_slots)),
        )
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
            for replica, following in pairwise(first):
                model.add(replica <= following)
        pods = [np.flatnonzero(problem.pod_of == pod).tolist() for pod in range(problem.pods)]
        self.levels: list[list[list[int]]] = [pods, [[leaf] for leaf in leaves]]
        """The leaves of every pod, and those of every leaf."""

    def search(self, objective: Any, start: IntArray) -> tuple[IntArray, float, float] | None:
        """An assignment of least objective, its value and the bound; None where nothing was found."""
        from ortools.sat.python import cp_model

        self.model.clear_hints()  # type: ignore[no-untyped-call]
        if self._alike:
            start = start[:, np.argsort(start[0], kind="stable")]
        for row, leaves in zip(self.x, start.tolist(), strict=True):
            for cell, used_leaf in zip(row, leaves, strict=True):
                for leaf, x in enumerate(cell):
                    self.model.add_hint(x, leaf == used_leaf)
        self.model.minimize(objective)
        solver = repeatable_solver(work=WORK)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        where = [
            [[solver.boolean_value(x) for x in cell].index(True) for cell in row] for row in self.x
        ]
        value = solver.objective_value
        bound = value if status == cp_model.OPTIMAL else solver.best_objective_bound
        return np.array(where, dtype=np.int64), value, bound

    def sent_up(self, unit_s: float) -> Iterator[list[Any]]:
        """What every group sends up the link of each block, in whole units of time; block by block.

        Each term is rounded, by half a unit at most.
        """
        problem = self.problem
        costs = (problem.pod_s_per_byte, problem.leaf_s_per_byte)
        for blocks, level_cost in zip(self.levels, costs, strict=True):
            for block, cost in zip(blocks, level_cost, strict=True):
                inside = [sum(cell[leaf] for leaf in block) for row in self.x for cell in row]
                terms = []
                for members, sent in _groups(problem):
                    table = np.rint(sent * cost / unit_s).astype(np.int64)
                    if table.any():
                        terms.append(self._sent(sum(inside[cell] for cell in members), table))
                yield terms

    def _sent(self, inside: Any, table: IntArray) -> cp_model.IntVar:
        """table[k] for k members inside a block."""
        members = self.model.new_int_var(0, len(table) - 1, "")
        self.model.add(members == inside)
        sent = self.model.new_int_var(0, int(table.max()), "")
        self.model.add_element(members, table.tolist(), sent)
        return sent


def least_sum(
    problem: MappingProblem, start: IntArray, start_s: float
) -> tuple[IntArray, float] | None:
    """An assignment whose up-links are busy for the least time in all, and a bound on every other; from one
    that takes `start_s`. None where nothing was found in time.
    """
    slots, unit_s = SlotModel(problem), start_s / UNITS
    terms = [term for block in slots.sent_up(unit_s) for term in block]
    solution = slots.search(sum(terms), start)
    return (
        None
        if solution is None
        else (solution[0], max(0.0, (solution[2] - 0.5 * len(terms)) * unit_s))
    )


def _groups(problem: MappingProblem) -> Iterator[tuple[list[int], FloatArray]]:
    """Every group's cells, stage by stage from 0, and the bytes that k of them in a block send up."""
    t = problem.traffic
    grid = np.arange(problem.needed).reshape(problem.stages, problem.slots)

    def cut(groups: IntArray, sent: float) -> Iterator[tuple[list[int], FloatArray]]:
        members = groups.shape[1]
        table = np.where(np.arange(members + 1) % members > 0, sent, 0.0)
        yield from ((group, table) for group in groups.tolist())

    yield from cut(grid, t.ring_bytes)
    if t.context_slots > 1:
        yield from cut(grid.reshape(-1, t.context_slots), t.context_bytes)
    if t.expert_slots > 1:
        k = np.arange(t.expert_slots + 1)
        table = t.expert_bytes * k * (t.expert_slots - k) / t.expert_slots
        yield from ((group, table) for group in grid.reshape(-1, t.expert_slots).tolist())
    if t.expert_ring_bytes:
        rings = grid.reshape(problem.stages, -1, t.expert_slots).transpose(0, 2, 1)
        yield from cut(rings.reshape(-1, problem.slots // t.expert_slots), t.expert_ring_bytes)
    if problem.stages > 1:
        yield from cut(np.stack([grid[:-1].ravel(), grid[1:].ravel()], axis=1), t.hop_bytes)
        yield from cut(np.stack([grid[-1], grid[0]], axis=1), t.wrap_bytes)
