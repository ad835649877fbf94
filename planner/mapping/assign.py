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
    problem: MappingProblem, origin: IntArray, before: IntArray, left: IntArray
) -> IntArray:
    """A leaf for every slot of the next stage; `left` are the slots of that stage in each leaf."""
    row = np.full(len(before), -1, dtype=np.int64)
    pod = problem.pod_of

    def settle(wanted: IntArray, who: NDArray[np.bool_]) -> None:
        for at in np.flatnonzero(who & (row < 0)):
            if left[wanted[at]] > 0:
                row[at] = wanted[at]
                left[wanted[at]] -= 1

    everyone = np.ones(len(before), dtype=bool)
    settle(before, before == origin)
    settle(before, everyone)
    settle(origin, pod[origin] == pod[before])
    waiting = {
        p: [leaf for leaf in np.flatnonzero(pod == p) for _ in range(left[leaf])] for p in set(pod)
    }
    for at in np.flatnonzero(row < 0):
        if waiting[pod[before[at]]]:
            row[at] = waiting[pod[before[at]]].pop(0)
    rest = [leaf for p in sorted(waiting) for leaf in waiting[p]]
    for at in np.flatnonzero(row < 0):
        row[at] = rest.pop(0)
    return row


def _flat(groups: list[list[int]]) -> IntArray:
    return np.array([leaf for group in groups for leaf in group], dtype=np.int64)


def _groups(problem: MappingProblem, held: IntArray, size: int) -> list[list[int]]:
    """Groups of `size` leaves: whole ones first, then the rests, pod by pod, largest first."""
    groups: list[list[int]] = []
    rests: dict[int, list[tuple[int, int]]] = {}
    for leaf in np.flatnonzero(held).tolist():
        whole, rest = divmod(int(held[leaf]), size)
        groups += [[leaf] * size for _ in range(whole)]
        if rest:
            rests.setdefault(problem.leaf_pod[leaf], []).append((rest, leaf))
    left: list[tuple[int, int]] = []
    for pod in sorted(rests):
        made, over = _packed(rests[pod], size, whole_only=True)
        groups += made
        left += over
    made, _ = _packed(left, size, whole_only=False)
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
    out: list[list[int] | None] = [None] * len(before)
    free = list(range(len(groups)))
    for key in (_leaves, _pods):
        waiting: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for at in free:
            waiting.setdefault(key(problem, groups[at]), []).append(at)
        for at in range(len(before)):
            same = waiting.get(key(problem, before[at].tolist()))
            if out[at] is None and same:
                out[at] = groups[same.pop(0)]
        free = [at for rest in waiting.values() for at in rest]
        if before.shape[1] > 1 and key is _leaves:
            free = _closest(before, groups, out, free)
    free.sort()
    for at in range(len(before)):
        if out[at] is None:
            out[at] = groups[free.pop(0)]
    return _flat(
        [_aligned(problem, old.tolist(), new or []) for old, new in zip(before, out, strict=True)]
    )


def _closest(
    before: IntArray, groups: list[list[int]], out: list[list[int] | None], free: list[int]
) -> list[int]:
    """Gives cut groups the places where most of their slots have their neighbour."""
    pairs = []
    for at in range(len(before)):
        if out[at] is None:
            mine = Counter(before[at].tolist())
            for other in free:
                overlap = sum((mine & Counter(groups[other])).values())
                if overlap:
                    pairs.append((-overlap, at, other))
    left = set(free)
    for _, at, other in sorted(pairs):
        if out[at] is None and other in left:
            out[at] = groups[other]
            left.discard(other)
    return sorted(left)


def _leaves(problem: MappingProblem, group: list[int]) -> tuple[tuple[int, int], ...]:
    del problem
    return tuple(sorted(Counter(group).items()))


def _pods(problem: MappingProblem, group: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(problem.leaf_pod[leaf] for leaf in group).items()))


def _aligned(problem: MappingProblem, old: list[int], new: list[int]) -> list[int]:
    """The slots of a group next to those of the same leaf, then of the same pod, in the group before it."""
    out: list[int | None] = [None] * len(old)
    left = list(new)
    for same in (lambda a, b: a == b, lambda a, b: problem.leaf_pod[a] == problem.leaf_pod[b]):
        for at, leaf in enumerate(old):
            found = next((x for x in left if out[at] is None and same(leaf, x)), None)
            if found is not None:
                out[at] = found
                left.remove(found)
    return [left.pop(0) if leaf is None else leaf for leaf in out]
