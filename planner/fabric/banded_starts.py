"""Mappings to begin with where there are several pods: bands of stages, as for the least spread."""

from __future__ import annotations

from planner.fabric.problem import IntArray, MappingProblem, loads_of
from planner.fabric.spread_build import banded, shapes
from planner.fabric.spread_swaps import settled

ORDERS, KEPT = 12, 3
"""Orders of the pods for every number of bands, and assignments whose hops are made shorter."""
MOST_SLOTS = 10_000
"""Of all assignments that are built for one number of bands: large problems try fewer orders."""
TALLEST = 4
"""Stages of a band. Gradients make taller ones dear."""


def banded_starts(problem: MappingProblem) -> list[IntArray]:
    """Those with the least traffic of every number of bands; none where there is one pod."""
    if problem.pods == 1:
        return []
    made: dict[int, tuple[float, IntArray]] = {}
    for shape in shapes(problem, max(1, min(ORDERS, MOST_SLOTS // problem.needed)), tallest=1):
        if max(shape.heights) <= TALLEST:
            assignment = banded(problem, shape)
            total_s, bands = loads_of(problem, assignment).total_s, len(shape.heights)
            if bands not in made or total_s < made[bands][0]:
                made[bands] = (total_s, assignment)
    kept = sorted(made.values(), key=lambda entry: entry[0])[:KEPT]
    return [settled(problem, assignment) for _, assignment in kept]
