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
from meshwright.planner.mapping.spread.build import DEFAULT_BANDS, BandParams, Shape, banded, shapes
from meshwright.planner.mapping.spread.exact import least_reach
from meshwright.planner.mapping.spread.swaps import gathered
from meshwright.planner.solvers.clock import is_over

EQUAL = ReachWeights()


@dataclass(frozen=True, kw_only=True)
class SpreadParams:
    """How much is tried."""

    shapes_tried: int = 20
    """Shapes that are built, those first that may reach least far."""
    bands: BandParams = DEFAULT_BANDS


DEFAULT_SPREAD = SpreadParams()

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
    problem: MappingProblem,
    *,
    weights: ReachWeights = EQUAL,
    time_limit_s: float = TIME_LIMIT_S,
    params: SpreadParams = DEFAULT_SPREAD,
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
    params
        How much is tried.

    Raises
    ------
    InfeasibleError
        Where fewer slots are free than needed.
    """
    start, deadline = time.monotonic(), time.process_time() + time_limit_s
    problem.check_room()
    hostname = problem.hostname_assignment()
    bounds = _bounds(problem, weights)
    best = _Best(problem, weights, bounds, [hostname, *regular_orders(problem)])
    best.bands(deadline, params)
    reached = reach_of(problem, best.assignment)
    proven = [weights.key(reached[level]) == weights.key(bounds[level]) for level in LEVELS]
    bound_s = 0.0
    if is_small(problem):
        exact = least_reach(problem, best.assignment, weights, reached=reached, known=bounds)
        best.consider(exact.assignment)
        proven = [proven[level] or level < exact.levels_proven for level in LEVELS]
        bound_s = exact.traffic_bound_s or 0.0
    check_assignment(problem, best.assignment)
    reached, before = reach_of(problem, best.assignment), reach_of(problem, hostname)
    pods, leaves = (
        LevelReach(
            reached=reached[level],
            hostname=before[level],
            bound=bounds[level],
            proven=proven[level],
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


def _bounds(problem: MappingProblem, weights: ReachWeights) -> list[Reach]:
    """What counting says of pods and of leaves, each for itself."""
    rooms = np.bincount(problem.pod_of, weights=problem.leaf_slots, minlength=problem.pods)
    bounds = []
    for blocks in (rooms.astype(int).tolist(), problem.leaf_slots):
        bounds.append(ReachBound(blocks, problem.stages, problem.slots).least(weights))
    return bounds


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
        """Takes an assignment if it is better."""
        key = self._key_of(assignment)
        if key <= self._key:
            total_s = loads_of(self._problem, assignment).total_s
            if (key, total_s) < (self._key, self._total_s):
                self.assignment, self._key, self._total_s = assignment, key, total_s

    def bands(self, deadline: float, params: SpreadParams) -> None:
        """Bands of stages, those first that may reach least far; ends early at the bounds."""
        if self._key == self._bound:
            return
        candidates = [
            (self._optimistic_key(shape), shape) for shape in shapes(self._problem, params.bands)
        ]
        candidates.sort(key=lambda candidate: candidate[0])
        tried = 0
        for key, shape in candidates:
            finished = tried == params.shapes_tried or self._key == self._bound
            if finished or time.process_time() > deadline or is_over():
                break
            if key <= self._key:
                assignment = banded(self._problem, shape, params.bands)
                self.consider(self._gathered(assignment, shape.heights))
                tried += 1

    def _optimistic_key(self, shape: Shape) -> Key:
        """The key of a shape if no replica is cut; the bounds where these are larger."""
        key = _key(self._weights, shape.expected_reach)
        pods, leaves = max(key[:2], self._bound[:2]), max(key[2:], self._bound[2:])
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
