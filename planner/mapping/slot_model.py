"""One CP-SAT model of a small mapping problem: a leaf for every slot of the grid, priced group by group.

    each slot of the grid is in one leaf       sum_l x_{s,j,l} = 1
    in the room of every leaf                  sum_{s,j} x_{s,j,l} <= free_l
    what a group sends up a block              table[k] for its k members inside it

It says what `problem.loads_of` says of an assignment, for every kind of group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

UNITS = 10**9
"""Range of objectives that are times: far finer than the tolerance of a proof."""


@dataclass(frozen=True, kw_only=True)
class SlotModelParams:
    """Which instances one model holds, and how long it is solved."""

    largest_cells: int = 200
    """Stages times slots times leaves; larger models prove nothing in seconds."""
    work: float = 2.0
    """CP-SAT's deterministic time for one objective, about seconds."""


DEFAULT_SLOT_MODEL = SlotModelParams()


def is_small(problem: MappingProblem, params: SlotModelParams = DEFAULT_SLOT_MODEL) -> bool:
    """Whether one model holds the instance."""
    return problem.needed * len(problem.leaf_slots) <= params.largest_cells


class SlotModel:
    """Slots in leaves: the variables, and the constraints that every objective shares.

    Attributes
    ----------
    x
        Whether a slot is in a leaf, `x[stage][slot][leaf]`.
    cells
        The rows of `x` one after the other, `cells[stage * slots + slot][leaf]`.
    levels
        The leaves of every pod, and those of every leaf.
    """

    def __init__(
        self, problem: MappingProblem, params: SlotModelParams = DEFAULT_SLOT_MODEL
    ) -> None:
        from meshwright.planner.solvers.or_tools import cp_model

        self.problem, self._params = problem, params
        self.model = cp_model.CpModel()
        self.x = [[self._cell() for _ in range(problem.slots)] for _ in range(problem.stages)]
        self.cells = [cell for row in self.x for cell in row]
        for leaf, free in enumerate(problem.leaf_slots):
            self.model.add(sum(cell[leaf] for cell in self.cells) <= free)
        t = problem.traffic
        self._alike = max(t.context_slots, t.expert_slots) == 1
        if self._alike:
            self._order_replicas()
        pods = [np.flatnonzero(problem.pod_of == pod).tolist() for pod in range(problem.pods)]
        leaves = [[leaf] for leaf in range(len(problem.leaf_slots))]
        self.levels: list[list[list[int]]] = [pods, leaves]

    def _cell(self) -> list[cp_model.IntVar]:
        """A slot in one of the leaves."""
        cell = [self.model.new_bool_var("") for _ in self.problem.leaf_slots]
        self.model.add_exactly_one(cell)
        return cell

    def _order_replicas(self) -> None:
        """Replicas may change places: the leaves of the first stage do not fall."""
        first = [sum(leaf * x for leaf, x in enumerate(cell)) for cell in self.x[0]]
        for replica, following in pairwise(first):
            self.model.add(replica <= following)

    def search(self, objective: Any, start: IntArray) -> tuple[IntArray, float, float] | None:
        """An assignment of least objective, its value and the bound; None where nothing was found."""
        from meshwright.planner.solvers.or_tools import cp_model

        self.model.clear_hints()  # type: ignore[no-untyped-call]
        if self._alike:
            start = start[:, np.argsort(start[0], kind="stable")]
        for cell, used_leaf in zip(self.cells, start.ravel().tolist(), strict=True):
            for leaf, x in enumerate(cell):
                self.model.add_hint(x, leaf == used_leaf)
        self.model.minimize(objective)
        solver = repeatable_solver(work=self._params.work)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        chosen = [[solver.boolean_value(x) for x in cell] for cell in self.cells]
        assignment = np.array(chosen).argmax(axis=1).reshape(start.shape)
        value = solver.objective_value
        bound = value if status == cp_model.OPTIMAL else solver.best_objective_bound
        return assignment, value, bound

    def sent_up(self, unit_s: float) -> Iterator[Any]:
        """What every group sends up the link of each block, in whole units of time.

        Each term is rounded, by half a unit at most.
        """
        costs = (self.problem.pod_s_per_byte, self.problem.leaf_s_per_byte)
        for blocks, level_cost in zip(self.levels, costs, strict=True):
            for block, s_per_byte in zip(blocks, level_cost, strict=True):
                yield from self._sent_by_groups(block, s_per_byte, unit_s)

    def _sent_by_groups(self, block: list[int], s_per_byte: float, unit_s: float) -> list[Any]:
        inside = [sum(cell[leaf] for leaf in block) for cell in self.cells]
        terms = []
        for members, sent in _groups(self.problem):
            table = np.rint(sent * s_per_byte / unit_s).astype(np.int64)
            if table.any():
                terms.append(self._sent(sum(inside[cell] for cell in members), table))
        return terms

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
    """An assignment whose up-links are busy for the least time in all, and a bound on every other.

    Parameters
    ----------
    start
        An assignment to begin with, shape [stages, slots].
    start_s
        What it takes, s; the unit of the objective is a fixed part of it.

    Returns
    -------
    tuple[IntArray, float] or None
        The assignment and the bound in s; None where nothing was found in time.
    """
    return least_sum_in(SlotModel(problem), start, start_s)


def least_sum_in(
    slots: SlotModel, start: IntArray, start_s: float
) -> tuple[IntArray, float] | None:
    """`least_sum` within the constraints that a model has already."""
    unit_s = start_s / UNITS
    terms = list(slots.sent_up(unit_s))
    solution = slots.search(sum(terms), start)
    if solution is None:
        return None
    assignment, _, bound = solution
    return assignment, max(0.0, (bound - 0.5 * len(terms)) * unit_s)


def _groups(problem: MappingProblem) -> Iterator[tuple[list[int], FloatArray]]:
    """Every group's cells, stage by stage from 0, and the bytes that k of them in a block send up."""
    for groups, table in _tables(problem):
        for group in groups.tolist():
            yield group, table


def _tables(problem: MappingProblem) -> Iterator[tuple[IntArray, FloatArray]]:
    """Kinds of groups, cells [groups, members], each with the bytes that k members send up."""
    t = problem.traffic
    grid = np.arange(problem.needed).reshape(problem.stages, problem.slots)
    yield _cut(grid, t.ring_bytes)
    if t.context_slots > 1:
        yield _cut(grid.reshape(-1, t.context_slots), t.context_bytes)
    if t.expert_slots > 1:
        k = np.arange(t.expert_slots + 1)
        table = t.expert_bytes * k * (t.expert_slots - k) / t.expert_slots
        yield grid.reshape(-1, t.expert_slots), table
    if t.expert_ring_bytes:
        rings = grid.reshape(problem.stages, -1, t.expert_slots).transpose(0, 2, 1)
        yield _cut(rings.reshape(-1, problem.slots // t.expert_slots), t.expert_ring_bytes)
    if problem.stages > 1:
        neighbours = np.stack([grid[:-1].ravel(), grid[1:].ravel()], axis=1)
        yield _cut(neighbours, t.hop_bytes)
        yield _cut(np.stack([grid[-1], grid[0]], axis=1), t.wrap_bytes)


def _cut(groups: IntArray, sent: float) -> tuple[IntArray, FloatArray]:
    """Groups that send the same whichever members a block holds, if it holds some but not all."""
    members = groups.shape[1]
    cut = np.arange(members + 1) % members > 0
    return groups, np.where(cut, sent, 0.0)
