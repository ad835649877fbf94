"""Whether some mapping keeps a need's limits: `Packing` against every assignment of slots to leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.mapping.joint import (
    NO_CUT,
    PATIENT_WORK,
    Grid,
    Limits,
    Need,
    Packing,
    Ratio,
)
from meshwright.planner.mapping.problem import MappingProblem, Traffic


def grid_problem(
    sizes: tuple[int, int], groups: tuple[int, int], free: Sequence[int], pods: Sequence[int]
) -> MappingProblem:
    """(stages, slots), slots of a (context, expert) group, free slots of each leaf and its pod."""
    return MappingProblem(
        stages=sizes[0],
        slots=sizes[1],
        traffic=Traffic(context_slots=groups[0], expert_slots=groups[1]),
        leaf_slots=tuple(free),
        leaf_s_per_byte=(1.0,) * len(free),
        leaf_pod=tuple(pods),
        pod_s_per_byte=(1.0,) * (max(pods) + 1),
    )


def assignments(problem: MappingProblem) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Every leaf for every slot, as far as leaves have room."""
    leaves = range(len(problem.leaf_slots))
    for cells in product(leaves, repeat=problem.needed):
        if all(cells.count(leaf) <= problem.leaf_slots[leaf] for leaf in leaves):
            yield np.array(cells).reshape(problem.stages, problem.slots)


def smallest_part(groups: Sequence[Sequence[int]]) -> int:
    """Slots of the smallest part of a group in a block."""
    return min(list(group).count(block) for group in groups for block in set(group))


def cuts_too_many(limit: Ratio | None, groups: Sequence[Sequence[int]], used: list[int]) -> bool:
    """Whether a block cuts more groups than a ratio allows."""
    if limit is None:
        return False
    blocks = set(used)
    return any(
        limit[0] * sum(block in group and set(group) != {block} for group in groups)
        > limit[1] * used.count(block)
        for block in blocks
    )


def keeps_limits(problem: MappingProblem, where: Any, limits: Limits) -> bool:
    """By counting, group by group: the limits on cuts at one level."""
    context, size = problem.traffic.context_slots, problem.traffic.expert_slots
    used = where.ravel().tolist()
    stages = where.tolist()
    contexts = [row[at : at + context] for row in stages for at in range(0, len(row), context)]
    rings = [row[place::size] for row in stages for place in range(size)]
    return not any(
        cuts_too_many(limit, groups, used)
        for limit, groups in (
            (limits.rings, stages),
            (limits.context, contexts),
            (limits.expert_rings, rings),
        )
    )


def is_kept(problem: MappingProblem, leaves: Any, need: Need) -> bool:
    """With the stages in some order, whether an assignment is what a need asks for."""
    pods, size = problem.pod_of[leaves], problem.traffic.expert_slots
    if not keeps_limits(problem, leaves, need.leaves) or not keeps_limits(problem, pods, need.pods):
        return False
    parts = []
    for stage in range(problem.stages):
        rows = (leaves[stage].reshape(-1, size).tolist(), pods[stage].reshape(-1, size).tolist())
        parts.append(tuple(smallest_part(row) for row in rows))
    ones = (1,) * problem.stages
    asked = zip(need.leaves.expert_parts or ones, need.pods.expert_parts or ones, strict=True)
    wanted = list(asked)
    return any(
        all(
            part[0] >= leaf and part[1] >= pod
            for part, (leaf, pod) in zip(each, wanted, strict=True)
        )
        for each in permutations(parts)
    )


def check(problem: MappingProblem, need: Need) -> bool:
    """A mapping is found where one keeps the need, else it is proven impossible; whether one does."""
    packing, instance = Packing(), SimpleNamespace(problem=problem)
    mapping = packing.find(instance, need)  # type: ignore[arg-type]
    exists = any(is_kept(problem, leaves, need) for leaves in assignments(problem))
    assert (mapping is not None) == exists, need
    assert packing.impossible(need) == (not exists), need
    assert mapping is None or is_kept(problem, mapping, need), need
    return exists


def test_a_question_that_stayed_open_is_asked_again_with_more_work() -> None:
    """Six stages on nine leaves in five pods, each ring with three slots in a leaf and five in a pod."""
    free, pods = [7, 7, 3, 5, 5, 7, 4, 5, 5], [0, 0, 1, 1, 2, 2, 3, 3, 4]
    problem = grid_problem((6, 8), (1, 1), free, pods)
    need = Need(
        grid=Grid.of(problem),
        leaves=Limits(rings=(3, 1)),
        pods=Limits(rings=(5, 1)),
    )
    packing, instance = Packing(), SimpleNamespace(problem=problem)
    packing.question_work = 1e-4
    for _ in range(2):
        assert packing.find(instance, need) is None  # type: ignore[arg-type]
        assert not packing.impossible(need)
    packing.question_work = PATIENT_WORK
    assert packing.find(instance, need) is None  # type: ignore[arg-type]
    assert packing.impossible(need)


def test_stages_that_ask_unlike_things_of_leaves_and_of_pods() -> None:
    """One stage lies in one pod, the other in halves of leaves: neither asks for less than the other."""
    problem = grid_problem((2, 4), (1, 4), [2, 2, 2, 2], [0, 0, 1, 2])
    need = Need(
        grid=Grid.of(problem),
        leaves=Limits(expert_parts=(1, 2)),
        pods=Limits(expert_parts=(4, 1)),
    )
    assert check(problem, need)


def test_context_groups_of_two_slots_beside_expert_groups_of_three() -> None:
    """Groups of three slots cannot change places where that would cut groups of two in other places."""
    problem = grid_problem((1, 12), (2, 3), [11, 7], [0, 0])
    need = Need(
        grid=Grid.of(problem),
        leaves=Limits(context=(2, 1), expert_rings=(4, 1), expert_parts=(1,)),
        pods=Limits(),
    )
    assert check(problem, need)


@pytest.mark.parametrize("seed", range(3))
def test_a_mapping_is_found_where_one_of_all_assignments_keeps_the_need(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [((2, 2), (1, 2)), ((2, 4), (1, 4)), ((1, 6), (2, 3)), ((2, 4), (2, 4))]
    exist = []
    for turn in range(24):
        sizes, groups = kinds[turn % len(kinds)]
        free = rng.integers(1, 5, 3).tolist()
        pods = [0, int(rng.integers(0, 2)), 1]
        problem = grid_problem(sizes, groups, free, pods)
        if problem.needed > sum(free):
            continue

        def ratio() -> Ratio | None:
            ratios = (None, None, NO_CUT, (1, 1), (2, 1), (3, 1))
            return ratios[int(rng.integers(len(ratios)))]

        def limits(problem: MappingProblem = problem) -> Limits:
            size = problem.traffic.expert_slots
            parts = rng.integers(1, size + 1, problem.stages).tolist()
            return Limits(
                rings=ratio(), context=ratio(), expert_rings=ratio(), expert_parts=tuple(parts)
            )

        exist.append(check(problem, Need(grid=Grid.of(problem), leaves=limits(), pods=limits())))
    assert any(exist)
    assert not all(exist)
