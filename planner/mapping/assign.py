"""From slots counted per leaf and stage to a leaf for every slot, groups and neighbours kept together."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.mapping.problem import IntArray, MappingProblem


def assignment_of(problem: MappingProblem, counts: IntArray) -> IntArray:
    """A leaf for slot j of stage s, shape [stages, slots], from counts [leaves, stages].

    The slots of a stage are cut into groups of expert or context slots, each as far as possible in one
    leaf, else one pod. Stage by stage, groups are then matched with those of the stage before, leaf by
    leaf first, pod by pod next, so that as few neighbours as the counts allow lie apart.
    """
    size = max(problem.traffic.expert_slots, problem.traffic.context_slots)
    if size == 1:
        return _single_slots(problem, counts)
    before = _flat(_groups(problem, counts[:, 0], size))
    rows = [before]
    for stage in range(1, problem.stages):
        groups = _groups(problem, counts[:, stage], size)
        before = _matched(problem, before.reshape(-1, size), groups)
        rows.append(before)
    return np.stack(rows)


def _single_slots(problem: MappingProblem, counts: IntArray) -> IntArray:
    """Slot by slot: who can stays, those first that began here, so that virtual stages wrap round at home."""
    origin = np.repeat(np.arange(len(counts)), counts[:, 0])
    rows = [origin]
    for stage in range(1, problem.stages):
        rows.append(_next_row(problem, origin, rows[-1], counts[:, stage].copy()))
    return np.stack(rows)


def _next_row(
    problem: MappingProblem, origin: IntArray, before: IntArray, free: IntArray
) -> IntArray:
    """A leaf for every slot of the next stage; `left` are the slots of that stage in each leaf."""
    row = np.full(len(before), -1, dtype=np.int64)
    pod = problem.pod_of

    def settle(wanted: IntArray, who: NDArray[np.bool_]) -> None:
        for slot in np.flatnonzero(who & (row < 0)):
            if free[wanted[slot]] > 0:
                row[slot] = wanted[slot]
                free[wanted[slot]] -= 1

    everyone = np.ones(len(before), dtype=bool)
    settle(before, before == origin)
    settle(before, everyone)
    settle(origin, pod[origin] == pod[before])
    waiting = {
        p: [leaf for leaf in np.flatnonzero(pod == p) for _ in range(free[leaf])] for p in set(pod)
    }
    for slot in np.flatnonzero(row < 0):
        if waiting[pod[before[slot]]]:
            row[slot] = waiting[pod[before[slot]]].pop(0)
    rest = [leaf for p in sorted(waiting) for leaf in waiting[p]]
    for slot in np.flatnonzero(row < 0):
        row[slot] = rest.pop(0)
    return row


def _flat(groups: list[list[int]]) -> IntArray:
    return np.array([leaf for group in groups for leaf in group], dtype=np.int64)


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
    """Groups from rests (slots, leaf), the largest fitting rest next; and what is left over."""
    waiting = sorted(rests, key=lambda rest: (-rest[0], rest[1]))
    groups: list[list[int]] = []
    while sum(rest[0] for rest in waiting) >= size:
        room, group, taken = size, [], []
        for rest in list(waiting):
            if rest[0] <= room:
                waiting.remove(rest)
                taken.append(rest)
                group += [rest[1]] * rest[0]
                room -= rest[0]
        if room and whole_only and not waiting:
            return groups, [*waiting, *taken]
        if room:  # no rest fits as it is: split the smallest
            slots, leaf = waiting.pop()
            group += [leaf] * room
            if slots > room:
                waiting.append((slots - room, leaf))
                waiting.sort(key=lambda rest: (-rest[0], rest[1]))
        groups.append(group)
    return groups, waiting


def _matched(problem: MappingProblem, before: IntArray, groups: list[list[int]]) -> IntArray:
    """The groups in the order of the stage before, and inside a group slot by slot."""
    matched: list[list[int] | None] = [None] * len(before)
    free = list(range(len(groups)))
    for key in (_leaves, _pods):
        waiting: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for place in free:
            waiting.setdefault(key(problem, groups[place]), []).append(place)
        for place in range(len(before)):
            same = waiting.get(key(problem, before[place].tolist()))
            if matched[place] is None and same:
                matched[place] = groups[same.pop(0)]
        free = [place for rest in waiting.values() for place in rest]
        if before.shape[1] > 1 and key is _leaves:
            free = _closest(before, groups, matched, free)
    free.sort()
    for place in range(len(before)):
        if matched[place] is None:
            matched[place] = groups[free.pop(0)]
    return _flat(
        [
            _aligned(problem, old.tolist(), new or [])
            for old, new in zip(before, matched, strict=True)
        ]
    )


def _closest(
    before: IntArray, groups: list[list[int]], matched: list[list[int] | None], free: list[int]
) -> list[int]:
    """Gives cut groups the places where most of their slots have their neighbour."""
    pairs = []
    for place in range(len(before)):
        if matched[place] is None:
            before_leaves = Counter(before[place].tolist())
            for candidate in free:
                overlap = sum((before_leaves & Counter(groups[candidate])).values())
                if overlap:
                    pairs.append((-overlap, place, candidate))
    unplaced = set(free)
    for _, place, candidate in sorted(pairs):
        if matched[place] is None and candidate in unplaced:
            matched[place] = groups[candidate]
            unplaced.discard(candidate)
    return sorted(unplaced)


def _leaves(problem: MappingProblem, group: list[int]) -> tuple[tuple[int, int], ...]:
    del problem
    return tuple(sorted(Counter(group).items()))


def _pods(problem: MappingProblem, group: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(problem.leaf_pod[leaf] for leaf in group).items()))


def _aligned(problem: MappingProblem, old: list[int], new: list[int]) -> list[int]:
    """The slots of a group next to those of the same leaf, then of the same pod, in the group before it."""
    aligned: list[int | None] = [None] * len(old)
    unplaced = list(new)
    for same in (lambda a, b: a == b, lambda a, b: problem.leaf_pod[a] == problem.leaf_pod[b]):
        for place, leaf in enumerate(old):
            leaf_alike = next(
                (x for x in unplaced if aligned[place] is None and same(leaf, x)), None
            )
            if leaf_alike is not None:
                aligned[place] = leaf_alike
                unplaced.remove(leaf_alike)
    return [unplaced.pop(0) if leaf is None else leaf for leaf in aligned]
