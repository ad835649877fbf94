"""The least spread of a small instance by CP-SAT, and the least traffic among the mappings that have it.

    what stages and replicas touch             rows_{s,b} >= x_{s,j,l},  columns_{j,b} >= x_{s,j,l},  l in b
    the most of each kind, at each level       sum_b rows_{s,b} <= D,  sum_b columns_{j,b} <= P

with b the pods, or the leaves, and x as in `slot_model`. Levels are minimised one after the other, pods
first, and then the traffic of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.planner.mapping.problem import IntArray, MappingProblem, loads_of
from meshwright.planner.mapping.slot_model import SlotModel, least_sum_in
from meshwright.planner.mapping.spread.bound import Reach, ReachWeights

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


@dataclass(frozen=True, kw_only=True)
class ExactReach:
    """The assignment that the model ends with, and what is proven of it."""

    assignment: IntArray
    levels_proven: int
    """Levels whose reach is proven least given that of the ones before, pods first."""
    traffic_bound_s: float | None
    """No assignment with this reach sends less; None where that was not asked, or not found."""


def least_reach(
    problem: MappingProblem,
    start: IntArray,
    weights: ReachWeights,
    *,
    reached: Sequence[Reach],
    known: Sequence[Reach],
) -> ExactReach:
    """The least reach level by level, pods first, and then the least traffic.

    Parameters
    ----------
    start
        An assignment to begin with, shape [stages, slots].
    reached
        How far its groups reach, [pods, leaves].
    known
        Bounds: no assignment comes before them in the order of the weights, [pods, leaves].
    """
    slots = SlotModel(problem)
    reaches = [_LevelKey(slots, weights, blocks) for blocks in slots.levels]
    best, moved = start, False
    for level, (key, reach, bound) in enumerate(zip(reaches, reached, known, strict=True)):
        value = key.code(reach)
        if moved or weights.key(reach) != weights.key(bound):
            solution = slots.search(key.expression, best)
            if solution is None or solution[1] != solution[2]:
                return ExactReach(assignment=best, levels_proven=level, traffic_bound_s=None)
            best, value, moved = solution[0], round(solution[1]), True
        slots.model.add(key.expression <= value)
    return _with_traffic(slots, best)


class _LevelKey:
    """How far groups reach at one level, as one expression."""

    def __init__(
        self, slots: SlotModel, weights: ReachWeights, blocks: Sequence[Sequence[int]]
    ) -> None:
        self._weights, self._span = weights, 1000 * len(blocks) + 1
        model = slots.model
        columns = [[row[slot] for row in slots.x] for slot in range(slots.problem.slots)]
        counted = []
        for groups, weight in ((slots.x, weights.data_parallel), (columns, weights.pipeline)):
            most_blocks = model.new_int_var(1, len(blocks), "")
            for group in groups:
                model.add(sum(_touches(model, group, block) for block in blocks) <= most_blocks)
            counted.append(weight * most_blocks)
        worst = model.new_int_var(0, self._span, "")
        model.add_max_equality(worst, counted)
        self.expression: Any = worst * self._span + sum(counted)
        """The most that a group counts, and then both kinds' most together."""

    def code(self, reach: Reach) -> int:
        """The expression's value for a reach."""
        worst, together = self._weights.key(reach)
        return worst * self._span + together


def _touches(
    model: cp_model.CpModel, group: Sequence[Sequence[cp_model.IntVar]], block: Sequence[int]
) -> cp_model.IntVar:
    touches = model.new_bool_var("")
    for cell in group:
        for leaf in block:
            model.add_implication(cell[leaf], touches)
    return touches


def _with_traffic(slots: SlotModel, best: IntArray) -> ExactReach:
    """The least traffic within the reach that the model now keeps to."""
    problem = slots.problem
    most_s = loads_of(problem, best).total_s
    if most_s <= 0:
        return ExactReach(assignment=best, levels_proven=2, traffic_bound_s=0.0)
    solution = least_sum_in(slots, best, most_s)
    if solution is None:
        return ExactReach(assignment=best, levels_proven=2, traffic_bound_s=None)
    assignment, bound_s = solution
    if loads_of(problem, assignment).total_s > most_s:
        assignment = best
    return ExactReach(assignment=assignment, levels_proven=2, traffic_bound_s=bound_s)
