"""From what leaves hold to which stages these are pieces of: an order of the stages that costs no more.

Where stand the pieces, stage by stage, is a small CP-SAT model: pieces of every stage add up to its slots,
and a leaf with several pieces follows one of the patterns of its holding (`holdings.patterns_of`). As many
leaves as possible do; the pieces of the others go where there is room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.holdings import Holding, patterns_of
from meshwright.planner.mapping.relaxation.patterns import BlockKind
from meshwright.planner.mapping.relaxation.pieces import FAMILIES, family_of
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

DETERMINISTIC_LIMIT = 4.0
"""CP-SAT's deterministic time: about seconds."""

Holdings = list[tuple[Holding, int]]
"""With the number of leaves."""
Cuts = list[tuple[IntArray, int]]
"""With the number of stages."""


@dataclass(frozen=True)
class _Group:
    """Leaves of one holding that follow patterns."""

    at: int
    patterns: IntArray
    leaves: list[Any]
    """How many leaves follow each."""


def arranged(
    problem: MappingProblem, kinds: list[BlockKind], chosen: Holdings, cuts: Sequence[Cuts | None]
) -> IntArray | None:
    """Counts [leaves, stages] of an arrangement; None where the pieces do not add up to stages, or none is
    found.

    `cuts`, by family, are kept where given and possible.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    pieces = _stage_pieces(model, problem, chosen, cuts)
    groups = _groups(model, problem, chosen)
    for stage, sizes in enumerate(pieces):
        for size, number in sizes.items():
            there = [
                leaves
                for group in groups
                for pattern, leaves in zip(group.patterns, group.leaves, strict=True)
                if pattern[stage] == size
            ]
            if there:
                model.add(sum(there) <= number)
    model.maximize(sum(leaves for group in groups for leaves in group.leaves))
    solver = repeatable_solver(work=DETERMINISTIC_LIMIT)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    held = [{size: int(solver.value(n)) for size, n in sizes.items()} for sizes in pieces]
    follow = [
        (group.at, group.patterns, [int(solver.value(n)) for n in group.leaves]) for group in groups
    ]
    return _counts(problem, kinds, chosen, held, follow)


def _stage_pieces(
    model: cp_model.CpModel, problem: MappingProblem, chosen: Holdings, cuts: Sequence[Cuts | None]
) -> list[dict[int, Any]]:
    """How many pieces of each size make up each stage: variables, or by which of the cuts it has."""
    out: list[dict[int, Any]] = [{} for _ in range(problem.stages)]
    family = family_of(problem.stages)
    for of in range(FAMILIES):
        total: dict[int, int] = {}
        for held, copies in chosen:
            for size in held.pieces(of):
                total[size] = total.get(size, 0) + copies
        mine, given = np.flatnonzero(family == of).tolist(), cuts[of]
        if given is None:
            _free_pieces(model, problem, total, [out[stage] for stage in mine])
        else:
            has = [[model.new_bool_var("") for _ in given] for _ in mine]
            for row in has:
                model.add_exactly_one(row)
            for at, (_, number) in enumerate(given):
                model.add(sum(row[at] for row in has) == number)
            for stage, row in zip(mine, has, strict=True):
                for size in total:
                    out[stage][size] = sum(
                        int(cut[size]) * x for (cut, _), x in zip(given, row, strict=True)
                    )
    return out


def _free_pieces(
    model: cp_model.CpModel,
    problem: MappingProblem,
    total: dict[int, int],
    stages: list[dict[int, Any]],
) -> None:
    """Pieces of every stage add up to its slots; over the stages, they are all that are held."""
    for size, number in sorted(total.items(), reverse=True):
        for sizes in stages:
            sizes[size] = model.new_int_var(0, min(number, problem.slots // size), "")
        model.add(sum(sizes[size] for sizes in stages) == number)
    for sizes in stages:
        model.add(sum(size * number for size, number in sizes.items()) == problem.slots)


def _groups(model: cp_model.CpModel, problem: MappingProblem, chosen: Holdings) -> list[_Group]:
    out = []
    for at, (held, copies) in enumerate(chosen):
        if held.count > 1:
            patterns = patterns_of(problem, held)
            leaves = [model.new_int_var(0, copies, "") for _ in patterns]
            model.add(sum(leaves) <= copies)
            out.append(_Group(at, patterns, leaves))
    return out


def _counts(
    problem: MappingProblem,
    kinds: list[BlockKind],
    chosen: Holdings,
    held: list[dict[int, int]],
    follow: list[tuple[int, IntArray, list[int]]],
) -> IntArray:
    """Leaves that follow patterns first, then every other piece where one of its size is still wanted."""
    counts = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
    free = [list(kind.members) for kind in kinds]
    copies = [number for _, number in chosen]
    for at, patterns, leaves in follow:
        for pattern, number in zip(patterns, leaves, strict=True):
            for _ in range(number):
                counts[free[chosen[at][0].kind].pop(0)] = pattern
                copies[at] -= 1
                for stage in np.flatnonzero(pattern):
                    held[stage][int(pattern[stage])] -= 1
    family = family_of(problem.stages)
    for (holding, _), number in zip(chosen, copies, strict=True):
        for _ in range(number):
            leaf = free[holding.kind].pop(0)
            for of in range(FAMILIES):
                for size in holding.pieces(of):
                    wanting = [s for s in np.flatnonzero(family == of) if held[s].get(size, 0)]
                    stage = min(wanting, key=lambda s: (counts[leaf, s] > 0, s))
                    counts[leaf, stage] += size
                    held[stage][size] -= 1
    return counts
