"""Pieces: what one leaf holds of one stage; and how a stage is cut into them, exactly.

Stages come in two families, the first and the last, whose activations leave on one side only, and those
between. Stages of a family are cut into the same pieces at the same cost, so they need not be told apart.
A *cut* says how many pieces of each size make up a stage: sizes times numbers are its slots, to the last.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem

FAMILIES = 2
"""0: the first and the last stage. 1: those between."""


def family_of(stages: int) -> IntArray:
    """The family of each stage."""
    family = np.ones(stages, dtype=np.int64)
    family[[0, -1]] = 0
    return family


def family_sizes(stages: int) -> tuple[int, int]:
    """Stages of each family."""
    ends = min(stages, 2)
    return ends, stages - ends


def largest_piece(problem: MappingProblem) -> int:
    """Slots that a leaf can hold of one stage."""
    return min(max(problem.leaf_slots), problem.slots)


def most_pieces(problem: MappingProblem) -> int:
    """Pieces that a stage can be cut into: every leaf holds one at most."""
    return min(sum(1 for slots in problem.leaf_slots if slots), problem.slots)


def cheapest_cut(values: FloatArray, slots: int, most: int) -> tuple[float, IntArray]:
    """The least value of a cut, and its pieces by size; `values` [size], of sizes up to its length - 1.

    An equality knapsack over the number of pieces, `most` at most.
    """
    before = np.arange(slots + 1)[:, None] - np.arange(1, len(values))
    least = np.where(np.arange(slots + 1) > 0, np.inf, 0.0)
    picks: list[IntArray] = []
    for _ in range(most):
        through = np.where(before >= 0, least[np.maximum(before, 0)] + values[1:], np.inf)
        value = through.min(axis=1)
        better = value < least
        if not better.any():
            break
        picks.append(np.where(better, through.argmin(axis=1) + 1, 0))
        least = np.where(better, value, least)
    cut, left = np.zeros(len(values), dtype=np.int64), slots
    for pick in reversed(picks):
        size = int(pick[left])
        if size:
            cut[size] += 1
            left -= size
    return float(least[slots]), cut


def cuts_within(
    values: FloatArray, slots: int, most: int, ceiling: float, limit: int
) -> IntArray | None:
    """Every cut worth at most `ceiling`, shape [cuts, size]; None above `limit`.

    Depth first from the largest piece; what is still to come is known but for the number of pieces.
    """
    sizes = list(range(min(len(values) - 1, slots), 0, -1))
    least = np.full((len(sizes) + 1, slots + 1), np.inf)
    least[-1, 0] = 0.0
    for at in range(len(sizes) - 1, -1, -1):
        size = sizes[at]
        least[at] = least[at + 1]
        for left in range(size, slots + 1):
            least[at, left] = min(least[at, left], least[at, left - size] + values[size])
    rest = least.tolist()
    found: list[tuple[tuple[int, int], ...]] = []
    waiting: list[tuple[int, int, int, float, tuple[tuple[int, int], ...]]] = [
        (0, slots, most, 0.0, ())
    ]
    while waiting:
        at, left, pieces, value, done = waiting.pop()
        if at == len(sizes):
            found.append(done)
            if len(found) > limit:
                return None
            continue
        size = sizes[at]
        for number in range(min(left // size, pieces) + 1):
            worth = value + number * float(values[size])
            if worth + rest[at + 1][left - number * size] <= ceiling:
                more = (*done, (size, number)) if number else done
                waiting.append((at + 1, left - number * size, pieces - number, worth, more))
    out = np.zeros((len(found), len(values)), dtype=np.int64)
    for row, cut in enumerate(found):
        for size, number in cut:
            out[row, size] = number
    return out
