"""Stages cut into parts: the cheapest integer partition of a stage's slots, and all that cost little more.

A *part* is what one leaf hosts of one stage; its size is its slots. Stages come in two classes: the first
and the last, whose activations leave on one side only, and the inner ones. Stages of a class are cut into
the same parts at the same cost, so they need not be told apart. A *partition* counts the parts of each
size that make up a stage: sizes times counts are its slots.

>>> value, partition = cheapest_partition(np.array([0.0, 3.0, 4.0]), slots=5, most_parts=5)
>>> value, partition.tolist()
(11.0, [0, 1, 2])
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem

ENDS, INNER = 0, 1
STAGE_CLASSES = (ENDS, INNER)

SizeCounts = tuple[tuple[int, int], ...]
"""(size, parts of that size) of a partition."""


def class_of_stages(stages: int) -> IntArray:
    """The class of each stage, shape [stages]."""
    classes = np.full(stages, INNER, dtype=np.int64)
    classes[[0, -1]] = ENDS
    return classes


def stages_of_classes(stages: int) -> tuple[int, int]:
    """Stages of each class."""
    ends = min(stages, 2)
    return ends, stages - ends


def largest_part(problem: MappingProblem) -> int:
    """Slots of one stage that a leaf can host."""
    return min(max(problem.leaf_slots), problem.slots)


def most_parts(problem: MappingProblem) -> int:
    """Parts that a stage can be cut into: every leaf hosts one at most."""
    leaves = sum(1 for slots in problem.leaf_slots if slots)
    return min(leaves, problem.slots)


def cheapest_partition(values: FloatArray, slots: int, most_parts: int) -> tuple[float, IntArray]:
    """Least sum of values of a partition, and its parts by size.

    An equality knapsack over the number of parts.

    Parameters
    ----------
    values
        Of a part of each size from 0, shape [sizes].
    slots
        Of a stage.
    most_parts
        Parts at most.
    """
    before = np.arange(slots + 1)[:, None] - np.arange(1, len(values))
    least_value = np.full(slots + 1, np.inf)
    least_value[0] = 0.0
    choices: list[IntArray] = []
    for _ in range(most_parts):
        reached = least_value[np.maximum(before, 0)] + values[1:]
        reached = np.where(before >= 0, reached, np.inf)
        value = reached.min(axis=1)
        better = value < least_value
        if not better.any():
            break
        choices.append(np.where(better, reached.argmin(axis=1) + 1, 0))
        least_value = np.where(better, value, least_value)
    partition = np.zeros(len(values), dtype=np.int64)
    rest = slots
    for choice in reversed(choices):
        size = int(choice[rest])
        if size:
            partition[size] += 1
            rest -= size
    return float(least_value[slots]), partition


def partitions_within(
    values: FloatArray, slots: int, most_parts: int, ceiling: float, limit: int
) -> IntArray | None:
    """Every partition whose values sum to at most `ceiling`, shape [partitions, sizes]; None above `limit`.

    Depth first from the largest part; what the smaller parts add at the least is known but for their
    number.
    """
    sizes = list(range(min(len(values) - 1, slots), 0, -1))
    least_rest = _least_rest(values, sizes, slots)
    complete: list[SizeCounts] = []
    waiting: list[tuple[int, int, int, float, SizeCounts]] = [(0, slots, most_parts, 0.0, ())]
    while waiting:
        depth, rest, parts, value, chosen = waiting.pop()
        if depth == len(sizes):
            complete.append(chosen)
            if len(complete) > limit:
                return None
            continue
        size = sizes[depth]
        for count in range(min(rest // size, parts) + 1):
            next_value = value + count * float(values[size])
            next_rest = rest - count * size
            if next_value + least_rest[depth + 1][next_rest] <= ceiling:
                extended = chosen
                if count:
                    extended = (*chosen, (size, count))
                waiting.append((depth + 1, next_rest, parts - count, next_value, extended))
    partitions = np.zeros((len(complete), len(values)), dtype=np.int64)
    for row, chosen in enumerate(complete):
        for size, count in chosen:
            partitions[row, size] = count
    return partitions


def _least_rest(values: FloatArray, sizes: list[int], slots: int) -> list[list[float]]:
    """Least value of exactly so many slots in parts of `sizes[depth:]`, [depth][slots]."""
    values_left = np.full((len(sizes) + 1, slots + 1), np.inf)
    values_left[-1, 0] = 0.0
    for depth in range(len(sizes) - 1, -1, -1):
        size = sizes[depth]
        values_left[depth] = values_left[depth + 1]
        for rest in range(size, slots + 1):
            with_part = values_left[depth, rest - size] + values[size]
            values_left[depth, rest] = min(values_left[depth, rest], with_part)
    rows: list[list[float]] = values_left.tolist()
    return rows
