"""The mapping whose groups reach the fewest pods, then leaves, and among those found the least traffic.

He et al., arXiv 2509.15940 ("Arnold"), section 5.2, equation 2, minimise alpha times the most pods that a
data-parallel group touches plus beta times the most that a pipeline touches. Here the larger of the two
weighted figures comes first and their sum second, for pods, then for leaves, then traffic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.mapping.least_traffic import TIME_LIMIT_S
from meshwright.planner.mapping.problem import (
    IntArray,
    MappingProblem,
    check_assignment,
    loads_of,
    spread_of,
)
from meshwright.planner.mapping.regular_orders import regular_orders
from meshwright.planner.mapping.slot_model import is_small
from meshwright.planner.mapping.solution import MappingSolution
from meshwright.planner.mapping.spread.bound import Reach, ReachBound, ReachWeights
from meshwright.planner.mapping.spread.build import Shape, banded, shapes
from meshwright.planner.mapping.spread.exact import least_reach
from meshwright.planner.mapping.spread.swaps import gathered

EQUAL = ReachWeights()
MOST_TRIED = 20
"""Shapes that are built."""

Key = tuple[int, int, int, int]
"""What is minimised: the most and both together, of pods, then of leaves."""


@dataclass(frozen=True, kw_only=True)
class LevelReach:
    """How far groups reach at one level: data-parallel groups, pipelines."""

    found: Reach
    hostname: Reach
    bound: Reach
    """In the order of the weights, no assignment comes before it."""
    proven: bool
    """Whether none comes before `found`, given the reach at the level above."""


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
    def reach_proven(self) -> bool:
        """Whether no groups reach less far."""
        return self.pods.proven and self.leaves.proven

    @property
    def proven(self) -> bool:
        """Whether no mapping reaches less far, and none that reaches as far sends less."""
        return self.reach_proven and super().proven


def reach_of(problem: MappingProblem, assignment: IntArray) -> tuple[Reach, Reach]:
    """The most pods, and the most leaves, that a data-parallel group and a pipeline touch."""
    pods, leaves = spread_of(problem.pod_of[assignment]), spread_of(assignment)
    return (
        (pods.data_parallel_max, pods.pipeline_max),
        (leaves.data_parallel_max, leaves.pipeline_max),
    )


def least_spread(
    problem: MappingProblem, *, weights: ReachWeights = EQUAL, time_limit_s: float = TIME_LIMIT_S
) -> SpreadSolution:
    """The mapping of the least spread that is found; exact where one CP-SAT model holds the instance.

    Never worse than hostname order by its own measure. `time_limit_s` is processor time.
    """
    start, deadline = time.monotonic(), time.process_time() + time_limit_s
    problem.check_room()
    hostname = problem.hostname_assignment()
    bounds = _bounds(problem, weights)
    best = _Best(problem, weights, bounds, [hostname, *regular_orders(problem)])
    best.bands(deadline)
    reached = reach_of(problem, best.assignment)
    proven = [
        weights.key(reach) == weights.key(bound)
        for reach, bound in zip(reached, bounds, strict=True)
    ]
    bound_s = 0.0
    if is_small(problem):
        exact = least_reach(problem, best.assignment, weights, reached=reached, known=bounds)
        best.consider(exact.assignment)
        proven = [
            proven_before or level < exact.levels_proven
            for level, proven_before in enumerate(proven)
        ]
        bound_s = exact.traffic_bound_s or 0.0
    reached, before = reach_of(problem, best.assignment), reach_of(problem, hostname)
    check_assignment(problem, best.assignment)
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
        pods=LevelReach(found=reached[0], hostname=before[0], bound=bounds[0], proven=proven[0]),
        leaves=LevelReach(found=reached[1], hostname=before[1], bound=bounds[1], proven=proven[1]),
    )


def _bounds(problem: MappingProblem, weights: ReachWeights) -> list[Reach]:
    """What counting says of pods and of leaves, each for itself."""
    rooms = np.bincount(problem.pod_of, weights=problem.leaf_slots, minlength=problem.pods).astype(
        int
    )
    blocks = (rooms.tolist(), list(problem.leaf_slots))
    return [ReachBound(rooms, problem.stages, problem.slots).least(weights) for rooms in blocks]


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
        pods, leaves = (weights.key(bound) for bound in bounds)
        self._bound: Key = (*pods, *leaves)
        self.assignment = starts[0]
        self._key = self._key_of(starts[0])
        self._total_s = loads_of(problem, starts[0]).total_s
        for start in starts[1:]:
            self.consider(start)

    def _key_of(self, assignment: IntArray) -> Key:
        pods, leaves = (self._weights.key(reach) for reach in reach_of(self._problem, assignment))
        return *pods, *leaves

    def consider(self, assignment: IntArray) -> None:
        """Takes an assignment if it is better."""
        key = self._key_of(assignment)
        if key <= self._key:
            total_s = loads_of(self._problem, assignment).total_s
            if (key, total_s) < (self._key, self._total_s):
                self.assignment, self._key, self._total_s = assignment, key, total_s

    def bands(self, deadline: float) -> None:
        """Bands of stages, those first that may reach least far; ends early at the bounds."""
        if self._key == self._bound:
            return
        hopes = [
            (self._hope(shape), number, shape) for number, shape in enumerate(shapes(self._problem))
        ]
        tried = 0
        for hope, _, shape in sorted(hopes, key=lambda entry: entry[:2]):
            if time.process_time() > deadline or tried == MOST_TRIED or self._key == self._bound:
                break
            if hope <= self._key:
                self.consider(self._gathered(banded(self._problem, shape), shape.heights))
                tried += 1

    def _hope(self, shape: Shape) -> Key:
        """The key of a shape if all goes well; its bounds where that is too good to be true."""
        pods, leaves = (self._weights.key(reach) for reach in shape.hoped)
        return *max(pods, self._bound[:2]), *max(leaves, self._bound[2:])

    def _gathered(self, made: IntArray, heights: Sequence[int]) -> IntArray:
        """Replicas that touch the most pods, then leaves, made to touch fewer, as far as swaps go."""
        problem = self._problem
        pods, leaves = reach_of(problem, made)
        while pods[1] > 1:
            tighter = gathered(problem, made, (pods[1] - 1, problem.stages), heights)
            if tighter is None:
                break
            made, pods = tighter, (pods[0], pods[1] - 1)
        if self._weights.key(pods) > self._key[:2]:
            return made
        _, leaves = reach_of(problem, made)
        while leaves[1] > pods[1]:
            tighter = gathered(problem, made, (pods[1], leaves[1] - 1), heights)
            if tighter is None:
                break
            made, leaves = tighter, (leaves[0], leaves[1] - 1)
        return made
