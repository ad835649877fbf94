"""A bound on the traffic of few large blocks, such as pods: column generation over their patterns alone.

    min  sum_p cost_p x_p
    every stage has its slots           sum_p n_{p,s} x_p = slots
    every block has a pattern           sum_{p of kind k} x_p <= blocks of kind k

Partitions of stages, as `patterns` has them, would have hundreds of part sizes here. The bound is Lagrange's
at the duals of a round, valid whatever columns are missing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.costmodel.layout import ROUNDING
from meshwright.planner.mapping.patterns import (
    CLOSE,
    ENDS,
    INNER,
    MOST_ROUNDS,
    PATTERNS_A_ROUND,
    SLACK_COST,
    STAGE_CLASSES,
    BlockKind,
    PatternMaster,
    PatternPricing,
    Relaxation,
    cheapest_partition,
    class_of_stages,
    most_parts,
    partitions_within,
    pattern_bytes,
    stages_of_classes,
)
from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.slots import PROVEN, Incumbent, MappingRound, WorkLimits
from meshwright.planner.solvers.programmes import (
    Row,
    TreeLimits,
    repeatable_solver,
    solved_by_highs,
)

if TYPE_CHECKING:
    from ortools.math_opt.python import mathopt

    from meshwright.planner.solvers.or_tools import cp_model


# What a leaf hosts whatever the order of the inner stages, and what that costs in the best order.
#
# A *bundle* is a part of the first and of the last stage, or none, and parts of inner stages. In the best
# order the parts follow each other: they rise to the largest and fall again, from one of the ends where the
# leaf has a part there. All patterns of the same parts cost as much or more, so a choice of bundles bounds
# every mapping, and has none of the ways to swap stages.


# How many orders of parts are tried.


MOST_PERMUTED = 5
"""Inner parts of which all orders are tried; 6 would be 720 orders."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Parts that a leaf of one kind hosts, and their least cost."""

    kind: int
    ends: tuple[int, int]
    """Sizes, 0 for none; the larger first."""
    inner: tuple[int, ...]
    """Sizes, largest first."""
    cost_s: float

    def parts(self, stage_class: int) -> tuple[int, ...]:
        """Sizes of the parts of stages of a class.

        Parameters
        ----------
        stage_class
            `ENDS` or `INNER`.
        """
        if stage_class == INNER:
            return self.inner
        return tuple(size for size in self.ends if size)

    @property
    def count(self) -> int:
        """Parts."""
        return len(self.parts(ENDS)) + len(self.inner)


def least_hops(ends: tuple[int, int], inner: tuple[int, ...], stages: int) -> int:
    """Least sum of |n_s - n_{s+1}| over the orders of the parts.

    Parameters
    ----------
    ends
        Parts of the first and of the last stage, 0 for none; the same in either order.
    inner
        Parts of inner stages, largest first; those that are not named have none here.
    stages
        Pipeline stages, at least 1.

    Returns
    -------
    int
        Slots of neighbouring stages that are not both here, over all pairs of stages.
    """
    first, last = ends
    if stages == 1:
        return 0
    if not inner:
        return abs(first - last) if stages == 2 else first + last
    high, low = inner[0], inner[-1]
    if len(inner) < stages_of_classes(stages)[INNER]:
        return _hops_with_gap(first, last, high)
    rising = abs(first - high) + (high - low) + abs(low - last)
    falling = abs(first - low) + (high - low) + abs(high - last)
    return min(rising, falling)


def _hops_with_gap(first: int, last: int, high: int) -> int:
    """Where an inner stage has no part here: all parts next to one of the ends, up to `high`."""
    beside_first = 2 * max(first, high) - first + last
    beside_last = first + 2 * max(last, high) - last
    return min(beside_first, beside_last)


def bundles_within(
    problem: MappingProblem,
    kinds: list[BlockKind],
    part_duals: FloatArray,
    ceiling_s: FloatArray,
    limit: int,
) -> list[Bundle] | None:
    """Every bundle whose reduced cost is at most its kind's ceiling; None above `limit`.

    Parameters
    ----------
    part_duals
        What a part earns by class of stages and size, s; shape [classes, sizes].
    ceiling_s
        Shape [kinds].
    limit
        Bundles listed at most. The empty bundle is left out.
    """
    listed: list[Bundle] = []
    for kind, block in enumerate(kinds):
        enumeration = _Enumeration(problem, kind, block, part_duals)
        for bundle in enumeration.within(float(ceiling_s[kind])):
            listed.append(bundle)
            if len(listed) > limit:
                return None
    return listed


class _Enumeration:
    """Bundles of one kind of leaf, depth first by falling size."""

    def __init__(
        self, problem: MappingProblem, kind: int, block: BlockKind, part_duals: FloatArray
    ) -> None:
        self._kind, self._room, self._stages = kind, block.room, problem.stages
        self._inner_stages = stages_of_classes(problem.stages)[INNER]
        self._largest = min(block.room, problem.slots)
        group_s = block.s_per_byte * problem.group_bytes(self._largest)
        self._group_s: list[float] = group_s.tolist()
        self._hop_s = block.s_per_byte * problem.traffic.hop_bytes
        wraps = problem.stages > 1
        self._wrap_s = block.s_per_byte * problem.traffic.wrap_bytes if wraps else 0.0
        reduced_s = group_s - part_duals[:, : self._largest + 1]
        self._end_s: list[float] = reduced_s[ENDS].tolist()
        self._inner_s: list[float] = reduced_s[INNER].tolist()
        # The least that parts of at most a size add, in at most so many slots: [size][slots].
        table = np.zeros((self._largest + 1, self._room + 1))
        for size in range(1, self._largest + 1):
            table[size] = table[size - 1]
            for slots in range(size, self._room + 1):
                with_part = table[size, slots - size] + self._inner_s[size]
                table[size, slots] = min(table[size, slots], with_part)
        rows: list[list[float]] = table.tolist()
        self._least_rest = rows

    def within(self, ceiling_s: float) -> Iterator[Bundle]:
        """Those of at most this reduced cost."""
        largest = self._largest
        largest_last = largest if self._stages > 1 else 0
        for last in range(largest_last + 1):
            for first in range(last, min(largest, self._room - last) + 1):
                yield from self._with_ends((first, last), ceiling_s)

    def _with_ends(self, ends: tuple[int, int], ceiling_s: float) -> Iterator[Bundle]:
        first, last = ends
        rest = self._room - first - last
        cost_s = self._end_s[first] + self._end_s[last] + self._wrap_s * (first - last)
        if first and self._reduced_s(ends, (), cost_s) <= ceiling_s:
            yield self._bundle(ends, ())
        if self._inner_stages:
            for high in range(1, min(self._largest, rest) + 1):
                yield from self._with_largest(ends, high, rest - high, cost_s, ceiling_s)

    def _with_largest(
        self, ends: tuple[int, int], high: int, rest: int, cost_s: float, ceiling_s: float
    ) -> Iterator[Bundle]:
        hops = _hops_with_gap(*ends, high)
        if self._room >= self._stages - (not ends[0]) - (not ends[1]):
            # Every inner stage may have a part here.
            hops = min(hops, 2 * max(*ends, high) - sum(ends))
        ceiling_of_parts = ceiling_s - self._hop_s * hops
        waiting: list[tuple[int, float, tuple[int, ...]]] = []
        waiting.append((rest, cost_s + self._inner_s[high], (high,)))
        while waiting:
            rest, cost_s, inner = waiting.pop()
            smallest = inner[-1]
            if cost_s + self._least_rest[smallest][rest] > ceiling_of_parts:
                continue
            if self._reduced_s(ends, inner, cost_s) <= ceiling_s:
                yield self._bundle(ends, inner)
            if len(inner) < self._inner_stages:
                for size in range(1, min(smallest, rest) + 1):
                    waiting.append((rest - size, cost_s + self._inner_s[size], (*inner, size)))

    def _reduced_s(self, ends: tuple[int, int], inner: tuple[int, ...], parts_s: float) -> float:
        return parts_s + self._hop_s * least_hops(ends, inner, self._stages)

    def _bundle(self, ends: tuple[int, int], inner: tuple[int, ...]) -> Bundle:
        cost_s = sum(self._group_s[size] for size in (*ends, *inner))
        cost_s += self._wrap_s * (ends[0] - ends[1])
        cost_s += self._hop_s * least_hops(ends, inner, self._stages)
        return Bundle(kind=self._kind, ends=ends, inner=inner, cost_s=cost_s)


def patterns_of(problem: MappingProblem, bundle: Bundle) -> IntArray:
    """The patterns of a bundle that cost no more than it, shape [patterns, stages], without repeats.

    Parameters
    ----------
    problem
        Prices the patterns.
    bundle
        With up to `MOST_PERMUTED` inner parts all their orders are tried, else falling and rising ones.
    """
    stages, inner = problem.stages, bundle.inner
    if stages == 1:
        return np.array([bundle.ends[:1]], dtype=np.int64)
    orders = {inner, inner[::-1]}
    if len(inner) <= MOST_PERMUTED:
        orders = set(permutations(inner))
    rows = []
    for first, last in {bundle.ends, bundle.ends[::-1]}:
        for order in orders:
            for start in range(1, max(stages - len(inner), 2)):
                row = np.zeros(stages, dtype=np.int64)
                row[start : start + len(inner)] = order
                row[0], row[-1] = first, last
                rows.append(row)
    patterns: IntArray = np.unique(np.array(rows), axis=0)
    sent = pattern_bytes(problem, patterns)
    cheapest: IntArray = patterns[sent <= sent.min() * (1 + 1e-9)]
    return cheapest


# Integer programmes over bundles and partitions: how cheap a mapping could be, inner stages not told apart.
#
# Whatever costs less than a bound plus delta hosts in every leaf a bundle of reduced cost at most delta,
# and cuts every stage by such a partition. For small delta these are few: all are listed, and a programme
# over them either selects the cheapest mapping or raises the bound by delta.
#
#     min  sum_b cost_b x_b                               x_b leaves with bundle b
#     every leaf has one bundle at most                   sum_{b of kind k} x_b <= leaves of kind k
#     parts of size k that leaves host are those of partitions, by class of stages:
#                                                         sum_b (parts of k)_b x_b = sum_c (parts of k)_c y_c
#     every stage has a partition                         sum_c y_c = stages of the class
#
# Where the partitions are too many to list, only the slots of the class are counted.


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
) -> BundleCandidates | None:
    """Bundles and partitions of reduced cost at most `delta_s`; None where bundles are too many.

    Partitions that were too many for a smaller delta, `before`, are not listed again.

    Parameters
    ----------
    problem
        With one pod.
    relaxation
        Its duals and reduced costs are what costs count from.
    delta_s
        Seconds above the bound of the relaxation, above 0.
    before
        What a smaller delta gave; None for the first one.
    """
    duals = relaxation.part_duals
    ceiling_s = relaxation.leaf_reduced_s + delta_s
    bundles = bundles_within(problem, relaxation.kinds, duals, ceiling_s, MOST_BUNDLES)
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

    Parameters
    ----------
    problem
        With one pod.
    relaxation
        Says how many leaves of each kind there are.
    candidates
        Bundles and partitions to choose from.
    limits
        Where the integer programme ends.
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


# From bundles to counts: which stages the parts belong to, in an order of the stages that costs no more.
#
# A small CP-SAT model: parts of every stage add up to its slots, and a leaf with several parts follows one
# of the patterns of its bundle (`patterns_of`). As many leaves as possible do; the parts of the
# others go where there is room for them.
#
#     parts of size k over the stages of a class          sum_s m_{s,k} = parts of k hosted
#     every stage has its slots                           sum_k k m_{s,k} = slots
#     leaves that follow patterns find their parts        sum_{p: n_{p,s} = k} z_p <= m_{s,k}
#     as many as possible                                 max sum_p z_p


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

    Parameters
    ----------
    problem
        Prices the patterns that leaves may follow.
    kinds
        Of leaves, as bundles number them.
    selected
        How many leaves host each bundle; no more of a kind than it has.
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
        """Gives a leaf the parts of a bundle in the stages of a pattern.

        Parameters
        ----------
        bundle
            Its kind says which leaf is next.
        pattern
            Slots of each stage, shape [stages]: one of `patterns_of` the bundle.
        """
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


class _SlotMaster(PatternMaster):
    """Over patterns alone."""

    def __init__(self, problem: MappingProblem) -> None:
        super().__init__(problem)
        slots = problem.slots
        self._stage_rows = [self._program.add_row(slots, slots) for _ in range(problem.stages)]
        for row in self._stage_rows:
            self._program.add_slack(row, SLACK_COST)

    def _entries(self, pattern: IntArray) -> list[tuple[Row, float]]:
        return [(self._stage_rows[stage], pattern[stage]) for stage in np.flatnonzero(pattern)]

    def slot_duals(self) -> FloatArray:
        """What a slot of each stage earns, s; shape [stages]."""
        return self._duals(self._stage_rows)


def slot_bound_s(
    problem: MappingProblem, starts: Iterable[IntArray], stop: Callable[[], bool]
) -> float:
    """Seconds that the leaves' up-links are busy at the least, all together.

    Parameters
    ----------
    problem
        Its leaves are the blocks; pods are not seen.
    starts
        Counts [leaves, stages] of mappings to begin with.
    stop
        Asked after each round whether to end early.
    """
    master = _SlotMaster(problem)
    for counts in starts:
        for kind, block in enumerate(master.kinds):
            for leaf in block.members:
                master.add_pattern(kind, counts[leaf].astype(np.int64))
    pricing = PatternPricing(problem, master.kinds)
    members = np.array([len(kind.members) for kind in master.kinds])
    sizes = np.arange(problem.slots + 1)
    bound_s = 0.0
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        duals = master.slot_duals()
        earned = duals[:, None] * sizes
        reduced_s = np.zeros(len(master.kinds))
        added = 0
        by_kind = np.broadcast_to(earned, (len(master.kinds), *earned.shape))
        for kind, reduced, pattern in pricing.best(by_kind, ways=PATTERNS_A_ROUND):
            reduced_s[kind] = min(reduced_s[kind], reduced)
            added += master.add_pattern(kind, pattern)
            added += master.add_pattern(kind, pattern[::-1].copy())
        bound_s = max(bound_s, problem.slots * float(duals.sum()) + float(members @ reduced_s))
        if not added or value_s - bound_s <= CLOSE * value_s or stop():
            break
    return bound_s


# Pods for a mapping that is good for leaves: whole leaves change places between stages.
#
# A leaf that holds one stage only costs the same in every stage between the first and the last. Two stages
# may thus exchange leaves with as many slots, one for one, one for two or two for two, and what changes is
# what their pods hold. Simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over such exchanges, and over
# exchanges of two whole stages; from a fixed seed, with a fixed number of tries.


LeafLists = tuple[list[int], list[int]]
"""Leaves of one stage, and leaves of another with as many slots."""


# The schedule of the annealing; temperatures fall by the same factor from try to try.


FIRST_TEMPERATURE = 0.15
"""Of what a part of a stage costs a pod on average, above 0."""
LAST_TEMPERATURE = 0.01
"""In the same unit: an exchange that costs a tenth of a part is then as good as never made."""
STAGE_SHARE = 0.05
"""Share of tries, 0 to 1, that exchange two whole stages."""


def exchanged(
    problem: MappingProblem,
    counts: IntArray,
    tries: int,
) -> IntArray:
    """The cheapest counts that are met on the way, leaves and pods together.

    Parameters
    ----------
    counts
        Slots of each stage in each leaf to begin with, shape [leaves, stages].
    tries
        Exchanges that are drawn.
    """
    part_bytes = problem.traffic.ring_bytes + problem.traffic.hop_bytes * problem.slots
    part_s = part_bytes * float(np.mean(problem.pod_s_per_byte))
    if part_s <= 0 or problem.stages < 2:
        return counts
    state = _State(problem, counts)
    best, best_s = counts, state.cost_s
    cooling = LAST_TEMPERATURE / FIRST_TEMPERATURE
    for attempt in range(tries):
        temperature_s = part_s * FIRST_TEMPERATURE * cooling ** (attempt / tries)
        if state.try_exchange(temperature_s) and state.cost_s < best_s * (1 - 1e-12):
            best, best_s = state.counts.copy(), state.cost_s
    return best


class _State:
    """Counts and what they cost."""

    def __init__(self, problem: MappingProblem, counts: IntArray) -> None:
        self._problem, self._rng = problem, random.Random(0)
        self.counts = counts.copy()
        self._pod_of: list[int] = problem.pod_of.tolist()
        self._leaf_s = np.asarray(problem.leaf_s_per_byte)
        self._pod_s = np.asarray(problem.pod_s_per_byte)
        self._group_bytes = problem.group_bytes(problem.slots)
        one_stage = np.count_nonzero(counts, axis=1) == 1
        self._one_stage: list[int] = np.flatnonzero(one_stage).tolist()
        """Leaves that hold one stage only; these may change places."""
        self._size: list[int] = counts.sum(axis=1).tolist()
        self._stage: list[int] = counts.argmax(axis=1).tolist()
        # What each leaf costs with all that it holds in one stage, [leaves, stages].
        stages = self._problem.stages
        sizes = np.minimum(self._size, self._problem.slots)
        patterns = sizes[:, None, None] * np.eye(stages, dtype=np.int64)
        sent = pattern_bytes(self._problem, patterns.reshape(-1, stages))
        self._one_stage_s = np.asarray(self._leaf_s[:, None] * sent.reshape(-1, stages))
        self._leaves_with: dict[tuple[int, int], list[int]] = {}
        """Leaves of one stage, by the stage and the slots."""
        for leaf in self._one_stage:
            key = (self._stage[leaf], self._size[leaf])
            self._leaves_with.setdefault(key, []).append(leaf)
        self._pod_counts = np.zeros((problem.pods, problem.stages), dtype=np.int64)
        np.add.at(self._pod_counts, problem.pod_of, counts)
        self._pod_costs_s = self._pod_costs(self._pod_counts, self._pod_s)
        leaves_s = self._leaf_s @ pattern_bytes(problem, counts)
        self.cost_s = float(leaves_s + self._pod_costs_s.sum())

    def _pod_costs(self, counts: IntArray, s_per_byte: FloatArray) -> FloatArray:
        """Of pods with these slots of each stage, [pods]."""
        return np.asarray(s_per_byte * pattern_bytes(self._problem, counts, self._group_bytes))

    def try_exchange(self, temperature_s: float) -> bool:
        """Draws an exchange and makes it if it pays, or by chance; whether it was made.

        Parameters
        ----------
        temperature_s
            Seconds, above 0: what costs as much more is made by a chance of 1 / e.
        """
        if self._rng.random() < STAGE_SHARE:
            return self._try_stages(temperature_s)
        drawn = self._draw()
        return drawn is not None and self._try_leaves(*drawn, temperature_s)

    def _accepts(self, added_s: float, temperature_s: float) -> bool:
        return added_s <= 0 or self._rng.random() < math.exp(-added_s / temperature_s)

    def _draw(self) -> LeafLists | None:
        """Leaves to exchange; None where those drawn do not match."""
        if len(self._one_stage) < 2:
            return None
        leaf, partner = self._rng.choice(self._one_stage), self._rng.choice(self._one_stage)
        if self._stage[leaf] == self._stage[partner]:
            return None
        missing = self._size[leaf] - self._size[partner]
        if missing == 0:
            return [leaf], [partner]
        if missing > 0:
            return self._draw_more(leaf, partner, missing)
        return self._draw_more(partner, leaf, -missing)

    def _draw_more(self, larger: int, smaller: int, missing: int) -> LeafLists | None:
        """Adds a leaf to the smaller one that makes up for the slots missing, or one to each of both."""
        rng, second = self._rng, self._stage[smaller]
        fitting = self._leaves_with.get((second, missing))
        if fitting and rng.random() < 0.5:
            addition = rng.choice(fitting)
            return None if addition == smaller else ([larger], [smaller, addition])
        companion = rng.choice(self._one_stage)
        fitting = self._leaves_with.get((second, self._size[companion] + missing))
        if self._stage[companion] != self._stage[larger] or companion == larger or not fitting:
            return None
        addition = rng.choice(fitting)
        return None if addition == smaller else ([larger, companion], [smaller, addition])

    def _try_leaves(self, here: list[int], there: list[int], temperature_s: float) -> bool:
        first, second = self._stage[here[0]], self._stage[there[0]]
        moves = [(leaf, first, second) for leaf in here]
        moves += [(leaf, second, first) for leaf in there]
        pods = sorted({self._pod_of[leaf] for leaf, _, _ in moves})
        counts = self._pod_counts[pods]
        added_s = 0.0
        for leaf, old, new in moves:
            row = pods.index(self._pod_of[leaf])
            counts[row, old] -= self._size[leaf]
            counts[row, new] += self._size[leaf]
            added_s += float(self._one_stage_s[leaf, new] - self._one_stage_s[leaf, old])
        costs_s = self._pod_costs(counts, self._pod_s[pods])
        added_s += float(costs_s.sum() - self._pod_costs_s[pods].sum())
        if not self._accepts(added_s, temperature_s):
            return False
        self._pod_counts[pods] = counts
        self._pod_costs_s[pods] = costs_s
        for leaf, old, new in moves:
            size = self._size[leaf]
            self._leaves_with[old, size].remove(leaf)
            self._leaves_with.setdefault((new, size), []).append(leaf)
            self._stage[leaf] = new
            self.counts[leaf, old], self.counts[leaf, new] = 0, size
        self.cost_s += added_s
        return True

    def _try_stages(self, temperature_s: float) -> bool:
        stages = self._problem.stages
        order = np.arange(stages)
        first, second = self._rng.sample(range(stages), 2)
        order[[first, second]] = order[[second, first]]
        counts, pod_counts = self.counts[:, order], self._pod_counts[:, order]
        costs_s = self._pod_costs(pod_counts, self._pod_s)
        cost_s = float(self._leaf_s @ pattern_bytes(self._problem, counts) + costs_s.sum())
        if not self._accepts(cost_s - self.cost_s, temperature_s):
            return False
        self.counts, self._pod_counts = counts, pod_counts
        self._pod_costs_s, self.cost_s = costs_s, cost_s
        # A permutation that is its own inverse: `order` also says where each stage went.
        self._stage = order[self._stage].tolist()
        moved = {}
        for (stage, size), leaves in self._leaves_with.items():
            moved[int(order[stage]), size] = leaves
        self._leaves_with = moved
        return True


# Raises the bound of one pod step by step until a mapping meets it.


# How delta grows and how long a step may take.


FIRST_SHARE = 0.0005
"""The first delta, of the bound: half the steps to a proof are this small on the benchmark cases."""
LEAST_SHARE = 0.1
"""Of the price: counts for the bound where that is lower, so that delta is never 0."""
LARGEST_GROWTH = 4.0
"""A cheapest selection beyond this many deltas is not jumped to; delta doubles."""
TREE_NODES = 20_000
"""Of one integer programme; the largest of docs/fabric.md takes a tenth of it."""
TREE_S = 60.0


def deepened(
    problem: MappingProblem,
    relaxation: Relaxation,
    best: Incumbent,
    rounds: list[MappingRound],
    limits: WorkLimits,
) -> float:
    """The bound that selections of bundles prove, s, at most the price of the incumbent.

    The incumbent takes every mapping on the way. Ends where price and bound meet, where the cheapest
    selection is known but no order of the stages for it, or where there is too much to list.

    Parameters
    ----------
    problem
        With one pod.
    relaxation
        Where the bound begins.
    best
        Is offered every mapping; its price is where the bound ends.
    rounds
        Each integer programme is added to it.
    limits
        Processor seconds; looked at before each step.
    """
    base_s = relaxation.lagrangian_s
    bound_s = relaxation.bound_s
    delta_s = FIRST_SHARE * max(bound_s, LEAST_SHARE * best.price_s)
    candidates: BundleCandidates | None = None
    while best.price_s - bound_s > PROVEN * best.price_s and limits.left_s > 0:
        tree_s = max(0.1, min(TREE_S, limits.left_s))
        delta_s = min(delta_s, best.price_s - base_s) + ROUNDING * best.price_s
        candidates = candidates_within(problem, relaxation, delta_s, candidates)
        if candidates is None:
            break
        tree = TreeLimits(nodes=TREE_NODES, seconds=tree_s)
        step = _step(problem, relaxation, candidates, best, tree)
        bound_s = max(bound_s, step.bound_s)
        rounds.append(
            MappingRound(
                columns=len(candidates.bundles), price_s=best.price_s, wall_s=limits.elapsed_s
            )
        )
        if step.last:
            break
        above_s = step.cost_s - base_s
        delta_s = above_s if above_s < LARGEST_GROWTH * delta_s else 2 * delta_s
    return min(bound_s, best.price_s)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one delta has shown."""

    bound_s: float
    cost_s: float
    """Of the cheapest selection."""
    last: bool
    """Whether a larger delta would show no more."""


def _step(
    problem: MappingProblem,
    relaxation: Relaxation,
    candidates: BundleCandidates,
    best: Incumbent,
    tree: TreeLimits,
) -> _Step:
    """The cheapest selection; put in an order of stages where no larger delta makes it cheaper."""
    ceiling_s = relaxation.lagrangian_s + candidates.delta_s
    selection = cheapest_selection(problem, relaxation, candidates, tree)
    last = not selection.complete or selection.cost_s <= ceiling_s
    credible = selection.cost_s >= relaxation.bound_s * (1 - PROVEN)
    better = selection.cost_s < best.price_s * (1 - ROUNDING)
    if last and credible and better and selection.bundles:
        best.offer(ordered_counts(problem, relaxation.kinds, selection.bundles))
    return _Step(bound_s=min(selection.bound_s, ceiling_s), cost_s=selection.cost_s, last=last)
