"""Integer programmes over bundles and partitions: how cheap a mapping could be, inner stages not told apart.

Whatever costs less than a bound plus delta hosts in every leaf a bundle of reduced cost at most delta,
and cuts every stage by such a partition. For small delta these are few: all are listed, and a programme
over them either selects the cheapest mapping or raises the bound by delta.

    min  sum_b cost_b x_b                               x_b leaves with bundle b
    every leaf has one bundle at most                   sum_{b of kind k} x_b <= leaves of kind k
    parts of size k that leaves host are those of partitions, by class of stages:
                                                        sum_b (parts of k)_b x_b = sum_c (parts of k)_c y_c
    every stage has a partition                         sum_c y_c = stages of the class

Where the partitions are too many to list, only the slots of the class are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.bundles import Bundle, bundles_within
from meshwright.planner.mapping.relaxation.columns import Relaxation
from meshwright.planner.mapping.relaxation.partitions import (
    STAGE_CLASSES,
    cheapest_partition,
    most_parts,
    partitions_within,
    stages_of_classes,
)
from meshwright.planner.solvers.highs import TreeLimits, solved_by_highs

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

MOST_BUNDLES = 8_000
MOST_PARTITIONS = 6_500
"""Of each class of stages."""

BundleCounts = list[tuple[Bundle, int]]
"""Bundles with the number of leaves that host each."""
PartUses = dict[int, list[tuple[int, Any]]]
"""By size: (parts of that size, variable) of every bundle with some."""


@dataclass(frozen=True, kw_only=True)
class BundleCandidates:
    """What a mapping less than `delta_s` above the bound can be made of."""

    delta_s: float
    bundles: list[Bundle]
    partitions: list[IntArray | None]
    """By class of stages, [partitions, sizes]; None where they are too many."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cheapest choice of bundles that was found."""

    bundles: BundleCounts
    cost_s: float
    """Infinite where no choice was found."""
    bound_s: float
    """No choice among the candidates costs less."""
    complete: bool
    """Whether no choice is cheaper, or none exists."""


def candidates_within(
    problem: MappingProblem,
    relaxation: Relaxation,
    delta_s: float,
    before: BundleCandidates | None = None,
    *,
    most_s: float = inf,
) -> BundleCandidates | None:
    """Bundles and partitions of reduced cost at most `delta_s`; None where bundles are too many.

    Partitions that were too many for a smaller delta, `before`, are not listed again. Bundles that keep a
    leaf's link busy for more than `most_s` are left out.
    """
    duals = relaxation.part_duals
    ceiling_s = relaxation.leaf_reduced_s + delta_s
    bundles = bundles_within(
        problem, relaxation.kinds, duals, ceiling_s, MOST_BUNDLES, most_s=most_s
    )
    if bundles is None:
        return None
    parts = most_parts(problem)
    partitions: list[IntArray | None] = []
    for stage_class, stages in enumerate(stages_of_classes(problem.stages)):
        if before is not None and before.partitions[stage_class] is None:
            partitions.append(None)
        elif stages:
            values = duals[stage_class]
            least_value, _ = cheapest_partition(values, problem.slots, parts)
            ceiling = least_value + delta_s
            partitions.append(
                partitions_within(values, problem.slots, parts, ceiling, MOST_PARTITIONS)
            )
        else:
            partitions.append(np.zeros((0, duals.shape[1]), dtype=np.int64))
    return BundleCandidates(delta_s=delta_s, bundles=bundles, partitions=partitions)


def cheapest_selection(
    problem: MappingProblem,
    relaxation: Relaxation,
    candidates: BundleCandidates,
    limits: TreeLimits,
) -> Selection:
    """Bundles for the leaves whose parts can be put together to stages.

    A class of stages whose partitions are not listed only gets as many slots as it has.
    """
    from ortools.math_opt.python import mathopt

    model = mathopt.Model()
    bundles = candidates.bundles
    members = [len(kind.members) for kind in relaxation.kinds]
    hosts = [model.add_integer_variable(lb=0, ub=members[bundle.kind]) for bundle in bundles]
    for kind, leaves in enumerate(members):
        of_kind = [x for x, bundle in zip(hosts, bundles, strict=True) if bundle.kind == kind]
        model.add_linear_constraint(mathopt.fast_sum(of_kind) <= leaves)
    for stage_class, stages in zip(STAGE_CLASSES, stages_of_classes(problem.stages), strict=True):
        uses = _part_uses(bundles, hosts, stage_class)
        partitions = candidates.partitions[stage_class]
        if partitions is not None:
            _add_partitions(model, uses, partitions, stages)
        else:
            _add_slot_sum(model, uses, problem.slots * stages)
    dearest_s = max((bundle.cost_s for bundle in bundles), default=0.0)
    scale = 1.0 / max(dearest_s, 1e-12)
    costs = [bundle.cost_s * scale * x for x, bundle in zip(hosts, bundles, strict=True)]
    model.minimize(mathopt.fast_sum(costs))
    return _selection(bundles, hosts, solved_by_highs(model, limits), scale)


def _part_uses(bundles: list[Bundle], hosts: list[Any], stage_class: int) -> PartUses:
    uses: PartUses = {}
    for host, bundle in zip(hosts, bundles, strict=True):
        parts = bundle.parts(stage_class)
        for size in sorted(set(parts), reverse=True):
            uses.setdefault(size, []).append((parts.count(size), host))
    return uses


def _hosted(uses: list[tuple[int, Any]]) -> Any:
    """Parts of one size that leaves host."""
    from ortools.math_opt.python import mathopt

    return mathopt.fast_sum([count * host for count, host in uses])


def _add_partitions(
    model: mathopt.Model, uses: PartUses, partitions: IntArray, stages: int
) -> None:
    """Every stage has one of the partitions, and the parts hosted are those of the partitions."""
    from ortools.math_opt.python import mathopt

    taken = [model.add_integer_variable(lb=0, ub=stages) for _ in partitions]
    model.add_linear_constraint(mathopt.fast_sum(taken) == stages)
    for size in range(1, partitions.shape[1]):
        rows = np.flatnonzero(partitions[:, size])
        wanted = [int(partitions[row, size]) * taken[row] for row in rows]
        if wanted or size in uses:
            hosted = _hosted(uses.get(size, []))
            model.add_linear_constraint(hosted == mathopt.fast_sum(wanted))


def _add_slot_sum(model: mathopt.Model, uses: PartUses, slots: int) -> None:
    """The parts hosted have as many slots as the stages together."""
    from ortools.math_opt.python import mathopt

    hosted = [size * _hosted(of_size) for size, of_size in uses.items()]
    model.add_linear_constraint(mathopt.fast_sum(hosted) == slots)


def _selection(
    bundles: list[Bundle], hosts: list[Any], result: mathopt.SolveResult | None, scale: float
) -> Selection:
    """What HiGHS says; where it failed, nothing: no bundles, and no bound from here."""
    from ortools.math_opt.python import mathopt

    if result is None:
        return Selection(bundles=[], cost_s=np.inf, bound_s=-np.inf, complete=False)
    reasons, reason = mathopt.TerminationReason, result.termination.reason
    bound_s = result.termination.objective_bounds.dual_bound / scale
    if not result.has_primal_feasible_solution():
        empty = reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED)
        if empty:
            bound_s = np.inf
        return Selection(bundles=[], cost_s=np.inf, bound_s=bound_s, complete=empty)
    values = result.variable_values()
    counts = [(bundle, round(values[x])) for bundle, x in zip(bundles, hosts, strict=True)]
    return Selection(
        bundles=[(bundle, count) for bundle, count in counts if count],
        cost_s=sum(bundle.cost_s * count for bundle, count in counts),
        bound_s=bound_s,
        complete=reason == reasons.OPTIMAL,
    )
