"""The mapping whose groups reach the fewest pods, then leaves, and among those found the least traffic.

He et al., arXiv 2509.15940 ("Arnold"), section 5.2, equation 2, minimise alpha times the most pods that a
data-parallel group touches plus beta times the most that a pipeline touches. Here the larger of the two
weighted figures comes first and their sum second, for pods, then for leaves, then traffic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.least_traffic import TIME_LIMIT_S, SlotModel, is_small, least_sum_in
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    check_assignment,
    loads_of,
    spread_of,
)
from meshwright.planner.mapping.slots import MappingSolution, regular_orders
from meshwright.planner.mapping.spread_build import (
    Reach,
    ReachBound,
    ReachWeights,
    Shape,
    banded,
    gathered,
    shapes,
)
from meshwright.planner.solvers.clock import is_over

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


# The least spread of a small instance by CP-SAT, and the least traffic among the mappings that have it.
#
#     what stages and replicas touch             rows_{s,b} >= x_{s,j,l},  columns_{j,b} >= x_{s,j,l},  l in b
#     the most of each kind, at each level       sum_b rows_{s,b} <= D,  sum_b columns_{j,b} <= P
#
# with b the pods, or the leaves, and x as in `least_traffic`. Levels are minimised one after the other, pods
# first, and then the traffic of all groups.


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
        """The expression's value for a reach.

        Parameters
        ----------
        reach
            Blocks of this level.
        """
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


EQUAL = ReachWeights()


# How much is tried.


SHAPES_TRIED = 20
"""Shapes that are built, those first that may reach least far."""

LEVELS = (0, 1)
"""Pods and leaves, in the order in which they are minimised."""

Key = tuple[int, int, int, int]
"""What is minimised: the most and both together, of pods, then of leaves."""


@dataclass(frozen=True, kw_only=True)
class LevelReach:
    """How far groups reach at one level: data-parallel groups, pipelines."""

    reached: Reach
    """By the mapping."""
    hostname: Reach
    bound: Reach
    """In the order of the weights, no assignment comes before it."""
    proven: bool
    """Whether none comes before `reached`, given the reach at the level above."""


@dataclass(frozen=True, kw_only=True)
class SpreadSolution(MappingSolution):
    """A mapping by its spread; `price_s` is the time of all up-links, the last thing that is minimised.

    `bound_s` holds for mappings of the same reach, and is 0 where none is known.
    """

    weights: ReachWeights
    pods: LevelReach
    leaves: LevelReach

    @property
    def bounded(self) -> bool:
        """Whether `bound_s` says anything."""
        return self.bound_s > 0 or self.price_s == 0

    @property
    def proven(self) -> bool:
        """Whether no mapping reaches less far, and none that reaches as far sends less."""
        return self.pods.proven and self.leaves.proven and super().proven


def reach_of(problem: MappingProblem, assignment: IntArray) -> tuple[Reach, Reach]:
    """The most pods, and the most leaves, that a data-parallel group and a pipeline touch.

    Parameters
    ----------
    problem
        Says in which pod a leaf is.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    pods, leaves = spread_of(problem.pod_of[assignment]), spread_of(assignment)
    return (
        (pods.data_parallel_max, pods.pipeline_max),
        (leaves.data_parallel_max, leaves.pipeline_max),
    )


def least_spread(
    problem: MappingProblem,
    *,
    weights: ReachWeights = EQUAL,
    time_limit_s: float = TIME_LIMIT_S,
) -> SpreadSolution:
    """The mapping of the least spread that is found; exact where one CP-SAT model holds the instance.

    Never worse than hostname order by its own measure.

    Parameters
    ----------
    problem
        With any number of pods.
    weights
        What a block counts that a data-parallel group, or a pipeline, touches.
    time_limit_s
        Processor seconds.

    Raises
    ------
    InfeasibleError
        Where fewer slots are free than needed.
    """
    start, deadline = time.monotonic(), time.process_time() + time_limit_s
    problem.check_room()
    hostname = problem.hostname_assignment()
    # What counting says of pods and of leaves, each for itself.
    rooms = np.bincount(problem.pod_of, weights=problem.leaf_slots, minlength=problem.pods)
    bounds = []
    for blocks in (rooms.astype(int).tolist(), problem.leaf_slots):
        bounds.append(ReachBound(blocks, problem.stages, problem.slots).least(weights))
    best = _Best(problem, weights, bounds, [hostname, *regular_orders(problem)])
    best.bands(deadline)
    reached, before = reach_of(problem, best.assignment), reach_of(problem, hostname)
    levels_proven, bound_s = 0, 0.0
    if is_small(problem):
        exact = least_reach(problem, best.assignment, weights, reached=reached, known=bounds)
        best.consider(exact.assignment)
        # Fewer pods may have cost leaves: what was known of the reach before is not of this one.
        reached, levels_proven = reach_of(problem, best.assignment), exact.levels_proven
        bound_s = exact.traffic_bound_s or 0.0
    check_assignment(problem, best.assignment)
    pods, leaves = (
        LevelReach(
            reached=reached[level],
            hostname=before[level],
            bound=bounds[level],
            proven=level < levels_proven
            or weights.key(reached[level]) == weights.key(bounds[level]),
        )
        for level in LEVELS
    )
    loads = loads_of(problem, best.assignment)
    return SpreadSolution(
        objective="spread",
        assignment=best.assignment,
        loads=loads,
        hostname_loads=loads_of(problem, hostname),
        bound_s=min(bound_s, loads.total_s),
        rounds=(),
        wall_s=time.monotonic() - start,
        weights=weights,
        pods=pods,
        leaves=leaves,
    )


class _Best:
    """The best assignment so far, and where to look for better ones."""

    def __init__(
        self,
        problem: MappingProblem,
        weights: ReachWeights,
        bounds: list[Reach],
        starts: list[IntArray],
    ) -> None:
        self._problem, self._weights = problem, weights
        self._bound = _key(weights, bounds)
        self.assignment = starts[0]
        self._key = self._key_of(starts[0])
        self._total_s = loads_of(problem, starts[0]).total_s
        for start in starts[1:]:
            self.consider(start)

    def _key_of(self, assignment: IntArray) -> Key:
        return _key(self._weights, reach_of(self._problem, assignment))

    def consider(self, assignment: IntArray) -> None:
        """Takes an assignment if it is better.

        Parameters
        ----------
        assignment
            The leaf of every slot, shape [stages, slots].
        """
        key = self._key_of(assignment)
        if key <= self._key:
            total_s = loads_of(self._problem, assignment).total_s
            if (key, total_s) < (self._key, self._total_s):
                self.assignment, self._key, self._total_s = assignment, key, total_s

    def bands(self, deadline: float) -> None:
        """Bands of stages, those first that may reach least far; ends early at the bounds.

        Parameters
        ----------
        deadline
            On the clock of `time.process_time`, looked at before each shape.
        """
        if self._key == self._bound:
            return
        candidates = [(self._optimistic_key(shape), shape) for shape in shapes(self._problem)]
        candidates.sort(key=lambda candidate: candidate[0])
        tried = 0
        for key, shape in candidates:
            finished = tried == SHAPES_TRIED or self._key == self._bound
            if finished or time.process_time() > deadline or is_over():
                break
            if key <= self._key:
                assignment = banded(self._problem, shape)
                self.consider(self._gathered(assignment, shape.heights))
                tried += 1

    def _optimistic_key(self, shape: Shape) -> Key:
        """The key of a shape if no replica is cut; the bounds where these are larger."""
        key = _key(self._weights, shape.expected_reach)
        pods = max(key[:2], self._bound[:2])
        leaves = max(key[2:], self._bound[2:])
        return *pods, *leaves

    def _gathered(self, assignment: IntArray, heights: Sequence[int]) -> IntArray:
        """Replicas that touch the most pods, then leaves, made to touch fewer, as far as swaps go."""
        problem = self._problem
        pods, _ = reach_of(problem, assignment)
        while pods[1] > 1:
            tighter = gathered(problem, assignment, (pods[1] - 1, problem.stages), heights)
            if tighter is None:
                break
            assignment, pods = tighter, (pods[0], pods[1] - 1)
        if self._weights.key(pods) > self._key[:2]:
            return assignment
        leaves_of_pipeline = reach_of(problem, assignment)[1][1]
        while leaves_of_pipeline > pods[1]:
            limits = (pods[1], leaves_of_pipeline - 1)
            tighter = gathered(problem, assignment, limits, heights)
            if tighter is None:
                break
            assignment, leaves_of_pipeline = tighter, leaves_of_pipeline - 1
        return assignment


def _key(weights: ReachWeights, reaches: Sequence[Reach]) -> Key:
    """What is minimised, from the reaches of pods and of leaves."""
    pods, leaves = (weights.key(reach) for reach in reaches)
    return *pods, *leaves
