"""From slots counted per leaf and stage to a leaf for every slot, groups and neighbours kept together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem

BlockCounts = tuple[tuple[int, int], ...]
"""(block, slots in it), by block."""


def assignment_of(problem: MappingProblem, counts: IntArray) -> IntArray:
    """A leaf for slot j of stage s, shape [stages, slots], from counts [leaves, stages].

    The slots of a stage are cut into groups of expert or context slots, each as far as possible in one
    leaf, else one pod. Stage by stage, groups are then matched with those of the stage before, leaf by
    leaf first, pod by pod next, so that as few neighbours as the counts allow lie apart.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    if size == 1:
        return _single_slots(problem, counts)
    before = np.array(_groups(problem, counts[:, 0], size), dtype=np.int64).ravel()
    rows = [before]
    for stage in range(1, problem.stages):
        groups = _groups(problem, counts[:, stage], size)
        before = _matched(problem, before.reshape(-1, size), groups)
        rows.append(before)
    return np.stack(rows)


def _single_slots(problem: MappingProblem, counts: IntArray) -> IntArray:
    """Slot by slot: what can stay stays, so that few neighbours lie apart.

    First come slots that are where they were in the first stage: virtual stages then wrap round in one leaf.
    """
    origin = np.repeat(np.arange(len(counts)), counts[:, 0])
    rows = [origin]
    for stage in range(1, problem.stages):
        rows.append(_next_row(problem, origin, rows[-1], counts[:, stage].copy()))
    return np.stack(rows)


def _next_row(
    problem: MappingProblem, origin: IntArray, before: IntArray, free: IntArray
) -> IntArray:
    """A leaf for every slot of the next stage; `free` are the slots of that stage in each leaf."""
    row = np.full(len(before), -1, dtype=np.int64)
    pod = problem.pod_of
    everyone = np.ones(len(before), dtype=bool)
    # (the leaf that each slot would go to, which slots would), in the order in which they are served.
    wishes = (
        (before, before == origin),
        (before, everyone),
        (origin, pod[origin] == pod[before]),
    )
    for leaves, wishing in wishes:
        for slot in np.flatnonzero(wishing & (row < 0)):
            leaf = leaves[slot]
            if free[leaf] > 0:
                row[slot] = leaf
                free[leaf] -= 1
    waiting: dict[int, list[int]] = {number: [] for number in range(problem.pods)}
    for leaf in np.flatnonzero(free).tolist():
        waiting[problem.leaf_pod[leaf]] += [leaf] * int(free[leaf])
    for slot in np.flatnonzero(row < 0):
        in_pod = waiting[int(pod[before[slot]])]
        if in_pod:
            row[slot] = in_pod.pop(0)
    row[row < 0] = [leaf for in_pod in waiting.values() for leaf in in_pod]
    return row


def _groups(problem: MappingProblem, counts: IntArray, size: int) -> list[list[int]]:
    """Groups of `size` leaves: whole ones first, then the rests, pod by pod, largest first."""
    groups: list[list[int]] = []
    rests: dict[int, list[tuple[int, int]]] = {}
    for leaf in np.flatnonzero(counts).tolist():
        whole_groups, rest = divmod(int(counts[leaf]), size)
        groups += [[leaf] * size for _ in range(whole_groups)]
        if rest:
            rests.setdefault(problem.leaf_pod[leaf], []).append((rest, leaf))
    rests_over: list[tuple[int, int]] = []
    for pod in sorted(rests):
        made, over = _packed(rests[pod], size, whole_only=True)
        groups += made
        rests_over += over
    made, _ = _packed(rests_over, size, whole_only=False)
    return groups + made


def _packed(
    rests: list[tuple[int, int]], size: int, *, whole_only: bool
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Groups from rests (slots, leaf), the largest fitting rest next; and the rests of no group."""
    waiting = sorted(rests, key=_largest_first)
    groups: list[list[int]] = []
    while sum(slots for slots, _ in waiting) >= size:
        room, group, taken = size, [], []
        for rest in list(waiting):
            slots, leaf = rest
            if slots <= room:
                waiting.remove(rest)
                taken.append(rest)
                group += [leaf] * slots
                room -= slots
        if room and whole_only and not waiting:
            return groups, taken
        if room:  # no rest fits as it is: split the smallest
            slots, leaf = waiting.pop()
            group += [leaf] * room
            if slots > room:
                waiting.append((slots - room, leaf))
                waiting.sort(key=_largest_first)
        groups.append(group)
    return groups, waiting


def _largest_first(rest: tuple[int, int]) -> tuple[int, int]:
    slots, leaf = rest
    return -slots, leaf


def _matched(problem: MappingProblem, before: IntArray, groups: list[list[int]]) -> IntArray:
    """The groups in the order of the stage before, and inside a group slot by slot."""
    number_at = [-1] * len(before)
    free = list(range(len(groups)))
    for block_of in _blocks_of_leaves(problem):
        waiting: dict[BlockCounts, list[int]] = {}
        for number in free:
            waiting.setdefault(_counted(groups[number], block_of), []).append(number)
        for place, group in enumerate(before.tolist()):
            alike = waiting.get(_counted(group, block_of))
            if number_at[place] < 0 and alike:
                number_at[place] = alike.pop(0)
        free = [number for alike in waiting.values() for number in alike]
        if block_of is not problem.leaf_pod:
            free = _closest(before, groups, number_at, free)
    free.sort()
    flat: list[int] = []
    for place, group in enumerate(before.tolist()):
        number = number_at[place] if number_at[place] >= 0 else free.pop(0)
        flat += _aligned(problem, group, groups[number])
    return np.array(flat, dtype=np.int64)


def _closest(
    before: IntArray, groups: list[list[int]], number_at: list[int], free: list[int]
) -> list[int]:
    """Gives cut groups the places where most of their slots have their neighbour; what is free then."""
    pairs = []
    for place, group in enumerate(before.tolist()):
        if number_at[place] < 0:
            for candidate in free:
                overlap = (Counter(group) & Counter(groups[candidate])).total()
                if overlap:
                    pairs.append((-overlap, place, candidate))
    unplaced = set(free)
    for _, place, candidate in sorted(pairs):
        if number_at[place] < 0 and candidate in unplaced:
            number_at[place] = candidate
            unplaced.discard(candidate)
    return sorted(unplaced)


def _blocks_of_leaves(problem: MappingProblem) -> tuple[Sequence[int], Sequence[int]]:
    """The block of every leaf: first the leaf itself, then its pod."""
    return range(len(problem.leaf_pod)), problem.leaf_pod


def _counted(group: list[int], block_of: Sequence[int]) -> BlockCounts:
    """(block, slots in it) of a group."""
    return tuple(sorted(Counter(block_of[leaf] for leaf in group).items()))


def _aligned(problem: MappingProblem, before: list[int], group: list[int]) -> list[int]:
    """The slots of a group next to those of the same leaf, then of the same pod, in the group before it."""
    aligned = [-1] * len(before)
    unplaced = list(group)
    for block_of in _blocks_of_leaves(problem):
        for place, neighbour in enumerate(before):
            if aligned[place] >= 0:
                continue
            alike = [leaf for leaf in unplaced if block_of[leaf] == block_of[neighbour]]
            if alike:
                aligned[place] = alike[0]
                unplaced.remove(alike[0])
    return [unplaced.pop(0) if leaf < 0 else leaf for leaf in aligned]
