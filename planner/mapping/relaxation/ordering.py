"""From bundles to counts: which stages the parts belong to, in an order of the stages that costs no more.

A small CP-SAT model: parts of every stage add up to its slots, and a leaf with several parts follows one
of the patterns of its bundle (`bundles.patterns_of`). As many leaves as possible do; the parts of the
others go where there is room for them.

    parts of size k over the stages of a class          sum_s m_{s,k} = parts of k hosted
    every stage has its slots                           sum_k k m_{s,k} = slots
    leaves that follow patterns find their parts        sum_{p: n_{p,s} = k} z_p <= m_{s,k}
    as many as possible                                 max sum_p z_p
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.bundles import Bundle, patterns_of
from meshwright.planner.mapping.relaxation.partitions import STAGE_CLASSES, class_of_stages
from meshwright.planner.mapping.relaxation.patterns import BlockKind
from meshwright.planner.mapping.relaxation.selection import BundleCounts
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

WORK = 4.0
"""CP-SAT's deterministic time, about seconds; the models of docs/fabric.md take a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class _Followers:
    """Leaves of one bundle that follow patterns."""

    bundle: Bundle
    patterns: IntArray
    """Shape [patterns, stages]."""
    leaves: list[Any]
    """How many leaves follow each; variables of the model."""


def ordered_counts(
    problem: MappingProblem, kinds: list[BlockKind], selected: BundleCounts
) -> IntArray | None:
    """Counts [leaves, stages] of a mapping with the selected bundles.

    None where their parts do not add up to stages, or no order is found.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    parts = _stage_parts(model, problem, selected)
    followers = [
        _followers(model, problem, bundle, copies)
        for bundle, copies in selected
        if bundle.count > 1
    ]
    for stage, by_size in enumerate(parts):
        for size, count in by_size.items():
            here = [
                leaves
                for group in followers
                for pattern, leaves in zip(group.patterns, group.leaves, strict=True)
                if pattern[stage] == size
            ]
            if here:
                model.add(sum(here) <= count)
    model.maximize(sum(leaves for group in followers for leaves in group.leaves))
    solver = repeatable_solver(work=WORK)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    wanted = [
        {size: int(solver.value(count)) for size, count in by_size.items()} for by_size in parts
    ]
    counts = _Counts(problem, kinds, wanted)
    copies_of = dict(selected)
    for group in followers:
        for pattern, leaves in zip(group.patterns, group.leaves, strict=True):
            for _ in range(solver.value(leaves)):
                counts.follow(group.bundle, pattern)
                copies_of[group.bundle] -= 1
    for bundle, copies in copies_of.items():
        for _ in range(copies):
            counts.fill(bundle)
    return counts.counts


def _stage_parts(
    model: cp_model.CpModel, problem: MappingProblem, selected: BundleCounts
) -> list[dict[int, Any]]:
    """How many parts of each size make up each stage: variables by stage and size."""
    parts: list[dict[int, Any]] = [{} for _ in range(problem.stages)]
    classes = class_of_stages(problem.stages)
    for stage_class in STAGE_CLASSES:
        hosted: dict[int, int] = {}
        for bundle, copies in selected:
            for size in bundle.parts(stage_class):
                hosted[size] = hosted.get(size, 0) + copies
        stages = [parts[stage] for stage in np.flatnonzero(classes == stage_class)]
        for size, total in sorted(hosted.items(), reverse=True):
            for by_size in stages:
                by_size[size] = model.new_int_var(0, min(total, problem.slots // size), "")
            model.add(sum(by_size[size] for by_size in stages) == total)
    for by_size in parts:
        model.add(sum(size * count for size, count in by_size.items()) == problem.slots)
    return parts


def _followers(
    model: cp_model.CpModel, problem: MappingProblem, bundle: Bundle, copies: int
) -> _Followers:
    patterns = patterns_of(problem, bundle)
    leaves = [model.new_int_var(0, copies, "") for _ in patterns]
    model.add(sum(leaves) <= copies)
    return _Followers(bundle=bundle, patterns=patterns, leaves=leaves)


class _Counts:
    """Counts [leaves, stages] that are filled leaf by leaf."""

    def __init__(
        self, problem: MappingProblem, kinds: list[BlockKind], wanted: list[dict[int, int]]
    ) -> None:
        """`wanted` are the parts that each stage still lacks, by size."""
        self.counts = np.zeros((len(problem.leaf_slots), problem.stages), dtype=np.int64)
        self._class_of = class_of_stages(problem.stages)
        self._free = [list(kind.members) for kind in kinds]
        self._wanted = wanted

    def follow(self, bundle: Bundle, pattern: IntArray) -> None:
        """Gives a leaf the parts of a bundle in the stages of a pattern."""
        leaf = self._free[bundle.kind].pop(0)
        self.counts[leaf] = pattern
        for stage in np.flatnonzero(pattern):
            self._wanted[stage][int(pattern[stage])] -= 1

    def fill(self, bundle: Bundle) -> None:
        """Gives a leaf the parts of a bundle wherever one of their size is still wanted."""
        leaf = self._free[bundle.kind].pop(0)
        for stage_class in STAGE_CLASSES:
            stages = np.flatnonzero(self._class_of == stage_class).tolist()
            for size in bundle.parts(stage_class):
                lacking = [stage for stage in stages if self._wanted[stage].get(size, 0)]
                stage = min(lacking, key=lambda stage: (self.counts[leaf, stage] > 0, stage))
                self.counts[leaf, stage] += size
                self._wanted[stage][size] -= 1
