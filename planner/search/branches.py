"""Branches of the search: one execution each, with its layouts, prices and rules.

Executions that differ only in dispatchers of one price share a branch; `dispatchers_of` says which dispatcher
a layout has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, reduce
from math import inf
from operator import or_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.fabric import NvlinkDomain
from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.rule import Rule
from meshwright.costmodel.buffers import dispatchers_of
from meshwright.costmodel.estimate import LayerCosts
from meshwright.costmodel.footprint import as_memory_sees
from meshwright.costmodel.layout import LAYER_AXES, Layout, Recompute, is_among
from meshwright.costmodel.measured_settings import OPEN, GainCorrections
from meshwright.costmodel.stacks import memory_profile
from meshwright.costmodel.workload import Execution, RunSettings, Workload
from meshwright.planner.bounds.combination_costs import (
    CombinationCosts,
    ShapeTable,
    compute_bound_s,
    rows_of,
)
from meshwright.planner.bounds.exact_cost import MappingBounds, Matrix, Priced
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.mappings import KeptRows, WorkloadKey, row_keys, rows_by_value
from meshwright.planner.bounds.paces import RankRow
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.request.choices import DEGREES, MAKING_ROOM, OF_LAYOUT
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.pricing import Certificate, SearchParams
from meshwright.planner.search.space import Space

if TYPE_CHECKING:
    from meshwright.planner.experts.training import AssumedImbalance, JointRouting

BoolArray = NDArray[np.bool_]

NARROWED = LAYER_AXES
"""Axes of which an execution may exclude degrees."""
DEGREE_FIELDS = frozenset((*DEGREES, "micro_batch", "num_micro_batches"))
"""Fields that the degrees with a micro-batch decide."""
FEW_VARIANTS = 4096
"""Below which an array operation takes no longer for more variants."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """One execution. Its space is part of the space of all."""

    execution: Execution
    """Where the workload has `other_dispatchers`, with the first of those."""
    space: Space
    pricing: CostModelPricing
    rules: tuple[Rule, ...]
    corrections: GainCorrections | None = None
    """What prices, and all bounds with them, are multiplied by; None for nothing."""

    @property
    def executions(self) -> list[Execution]:
        """Its own, and those with other dispatchers."""
        names = self.pricing.workload.other_dispatchers
        return [self.execution, *(replace(self.execution, moe_dispatch=name) for name in names)]

    def execution_of(self, layout: Layout) -> Execution:
        """How one layout of plain numbers is run."""
        workload = self.pricing.workload
        if not workload.other_dispatchers:
            return self.execution
        return replace(self.execution, moe_dispatch=dispatchers_of(workload, layout)[0])

    def run_as(self, layout: Layout) -> Workload:
        """The workload as one layout of plain numbers is run."""
        name, workload = self.execution_of(layout).moe_dispatch, self.space.workload
        return replace(workload, moe_dispatch=name, other_dispatchers=())

    def refused_outright(self) -> bool:
        """Whether a rule refuses the workload itself, whatever the layout."""
        table = Candidates(
            workload=self.pricing.workload, layouts=Layout().flat(), memory_gib=np.zeros(1)
        )
        return any(rule.of_workload and rule.excess(table)[0] > 0 for rule in self.rules)

    def outside_domain(self, degrees: Layout, most: int, cutoff_s: float) -> Layout:
        """The fastest layouts of some degrees that leave a domain whatever their mapping, [n].

        At most so many, of four times as many degrees, least bounds first; none where nothing has to stay.

        Parameters
        ----------
        degrees
            Of the space of all branches, [n], least bounds first.
        most
            Layouts at most.
        cutoff_s
            Seconds that they must beat in any case.
        """
        rule = next((rule for rule in self.rules if isinstance(rule, NvlinkDomain)), None)
        if rule is None:
            return degrees.take(np.zeros(0, dtype=np.int64))
        table = Candidates(
            workload=self.pricing.workload,
            layouts=degrees,
            memory_gib=np.zeros(degrees.broadcast_shape()),
        )
        outside = np.flatnonzero((rule.excess(table) > 0) & self.has(degrees))
        anywhere = replace(self, rules=tuple(each for each in self.rules if each is not rule))
        first = degrees.take(outside[: 4 * most])
        layouts, _, bound_s = anywhere.expanded(first, cutoff_s, Certificate())
        return layouts.take(np.argsort(bound_s, kind="stable")[:most])

    def corrected(self, bound_s: FloatArray, degrees: Layout) -> FloatArray:
        """Bounds that the pricing did not make, by the least correction of some degrees, [n].

        Parameters
        ----------
        bound_s
            Uncorrected seconds, shape [n].
        degrees
            Shape [n]: what their layouts decide beside them is open.
        """
        if self.corrections is None:
            return bound_s
        return bound_s * self.corrections.factor(self.pricing.workload, degrees, OPEN)

    def has(self, degrees: Layout) -> NDArray[np.bool_]:
        """Which degrees of the space of all are in this branch's, [n].

        Parameters
        ----------
        degrees
            Of the space of all branches, [n].
        """
        own = [is_among(getattr(degrees, name), getattr(self.space, name)) for name in NARROWED]
        return np.asarray(np.logical_and.reduce(own))

    def legal(
        self, layouts: Layout, memory_gib: FloatArray, certificate: Certificate
    ) -> NDArray[np.bool_]:
        """Which layouts no rule forbids; the others are counted under the first rule that does.

        Parameters
        ----------
        layouts
            Shape [n].
        memory_gib
            What the peak on one GPU is at the least, shape [n].
        certificate
            Takes note of what is left out.
        """
        counts = np.ones(len(memory_gib), dtype=np.int64)
        return self._kept(self.rules, layouts, memory_gib, counts, certificate)

    def _kept(
        self,
        rules: Sequence[Rule],
        layouts: Layout,
        memory_gib: FloatArray,
        counts: IntArray,
        certificate: Certificate,
    ) -> NDArray[np.bool_]:
        """Which layouts none of some rules forbids; each stands for so many in the counts."""
        table = Candidates(workload=self.pricing.workload, layouts=layouts, memory_gib=memory_gib)
        keep = np.ones(len(memory_gib), dtype=bool)
        for rule in rules:
            broken = keep & (rule.excess(table) > 0)
            certificate.rule_out(rule.name, int(counts[broken].sum()))
            keep &= ~broken
        return keep

    @cached_property
    def _rules_of_degrees(self) -> tuple[Rule, ...]:
        """Those that say the same of all layouts of some degrees."""
        read = [(rule, rule.fields_read()) for rule in self.rules]
        return tuple(rule for rule, names in read if names is not None and names <= DEGREE_FIELDS)

    def _legal_degrees(self, degrees: Layout, certificate: Certificate) -> BoolArray:
        """Of which degrees no rule forbids every layout, [n]."""
        counts = self.space.layouts_per_degrees(degrees)
        memory_gib = np.zeros(len(counts))
        return self._kept(self._rules_of_degrees, degrees, memory_gib, counts, certificate)

    def _legal_in_any_memory(
        self, layouts: Layout, counts: IntArray, certificate: Certificate
    ) -> Layout:
        """Those that no rule forbids however much memory there is: asked first, as it takes less time.

        As many layers as can be are recomputed: no rule asks for fewer. Each stands for so many in the
        counts.
        """
        recomputed = replace(
            layouts, recompute_layers=np.where(layouts.recomputes_layers, ALL_LAYERS, 0)
        )
        nothing_gib = np.zeros(layouts.broadcast_shape())
        keep = self._kept(self.rules, recomputed, nothing_gib, counts, certificate)
        return layouts.take(keep)

    def expanded(
        self,
        degrees: Layout,
        cutoff_s: float,
        certificate: Certificate,
        fits: BoolArray | None = None,
        few: int = 1,
    ) -> tuple[Layout, FloatArray, FloatArray]:
        """Legal layouts of some degrees that may beat the cutoff, with least memory and bound, [n].

        `fits` is what `fitting` says of the degrees, where that is known. Fewer than `few` layouts are
        bounded at once, without their variants before them.

        Parameters
        ----------
        degrees
            Of this branch, [n].
        cutoff_s
            Seconds that a layout must beat; infinite where there is no price.
        certificate
            Takes note of what is left out, and why.
        fits
            What `fitting` says, shape [n, variants]; None where it is to be asked.
        few
            At least 1.

        Returns
        -------
        tuple of (Layout, array of float, array of float)
            Layouts [k], GiB [k], seconds [k].
        """
        legal = self._legal_degrees(degrees, certificate)
        degrees = degrees.take(legal)
        if not legal.any():
            return degrees, np.zeros(0), np.zeros(0)
        fits = self.fitting(degrees) if fits is None else fits[legal]
        roomy = fits.any(axis=1)
        too_large = self.space.layouts_per_degrees(degrees.take(~roomy))
        certificate.rule_out(HbmCapacity.name, int(too_large.sum()))
        degrees, fits = degrees.take(roomy), fits[roomy]
        if not len(fits):
            return degrees, np.zeros(0), np.zeros(0)
        placed = self._placed(degrees, cutoff_s, certificate)
        degrees, fits = degrees.take(placed), fits[placed]
        layouts = self._promising(degrees, fits, cutoff_s, certificate, few)
        layouts = self._worth_offloading(layouts, cutoff_s, certificate)
        return self.promising_layouts(self.space.offloaded(layouts), cutoff_s, certificate)

    def _worth_offloading(
        self, layouts: Layout, cutoff_s: float, certificate: Certificate
    ) -> Layout:
        """Drops layouts that are illegal or too slow whatever share of the optimizer they offload.

        They have the least share: a larger one only takes more time. Few are left as they are.
        """
        counts = self.space.share_counts(layouts)
        if not self.space.offloads_several or counts.sum() < FEW_VARIANTS:
            return layouts
        layouts = self._legal_in_any_memory(layouts, counts, certificate)
        counts = self.space.share_counts(layouts)
        if not len(counts) or not np.isfinite(cutoff_s):
            return layouts
        fewest_recomputed = replace(
            layouts, recompute_layers=layouts.recomputes_layers.astype(np.int64)
        )
        good = self.pricing.lower_bound_s(fewest_recomputed) < cutoff_s
        certificate.bounded_out += int(counts[~good].sum())
        return layouts.take(good)

    def promising_layouts(
        self, layouts: Layout, cutoff_s: float, certificate: Certificate
    ) -> tuple[Layout, FloatArray, FloatArray]:
        """Those of some layouts that are legal and may beat the cutoff, with least memory and bound, [n].

        Parameters
        ----------
        layouts
            Of this branch, [n], their numbers of recomputed layers open.
        cutoff_s
            Seconds that a layout must beat.
        certificate
            Takes note of what is left out, and why.

        Returns
        -------
        tuple of (Layout, array of float, array of float)
            Layouts [k] with the fewest recomputed layers that fit, GiB [k], seconds [k].
        """
        if not layouts.broadcast_shape()[0]:
            return layouts, np.zeros(0), np.zeros(0)
        if layouts.broadcast_shape()[0] >= FEW_VARIANTS:
            ones = np.ones(layouts.broadcast_shape(), dtype=np.int64)
            layouts = self._legal_in_any_memory(layouts, ones, certificate)
        memory_gib, recomputed_layers = self.pricing.least_memory_gib(layouts)
        layouts = replace(layouts, recompute_layers=recomputed_layers)
        legal = self.legal(layouts, memory_gib, certificate)
        layouts, memory_gib = layouts.take(legal), memory_gib[legal]
        if not len(memory_gib):
            return layouts, memory_gib, memory_gib
        bound_s = self.pricing.lower_bound_s(layouts)
        good = bound_s < cutoff_s
        certificate.bounded_out += int(np.sum(~good))
        return layouts.take(good), memory_gib[good], bound_s[good]

    def mapping_bounds(
        self, layouts: Layout, top_k: int = 1, *, below_s: float = np.inf
    ) -> list[MappingBounds]:
        """Bounds under every mapping, for each of some layouts, as tight as can be below some seconds.

        Where one plan is asked for they are infinite if other shard groups are as good; of several plans a
        layout may be the next best one even so.

        Parameters
        ----------
        layouts
            Of this branch, [n].
        top_k
            Plans that are asked for, at least 1.
        below_s
            Seconds above which bounds need not be tight.
        """
        groups = self.space.shard_groups if top_k == 1 else ()
        return self.pricing.mapping_bounds(layouts, groups, below_s=below_s)

    def relief_bound_s(self, layouts: Layout) -> FloatArray:
        """Bounds under the best mapping for all that layouts may recompute, offload or shard over, [n].

        Parameters
        ----------
        layouts
            Of this branch, [n].
        """
        return self.pricing.relief_bound_s(layouts, self.space.shard_groups)

    def _bound_s(self, layouts: Layout) -> FloatArray:
        """Never above the price with any schedule, and any number of shard groups that the space has, [n]."""
        return self.pricing.lower_bound_s(layouts, self.space.shard_groups, any_schedule=True)

    def _placed(self, degrees: Layout, cutoff_s: float, certificate: Certificate) -> BoolArray:
        """Which degrees are not too slow wherever their groups lie, [n]. Few are left as they are.

        It is asked of those with room alone: a bound of memory takes a fraction of the time and drops most.
        """
        if self._is_few(degrees) or not np.isfinite(cutoff_s):
            return np.ones(degrees.broadcast_shape(), dtype=np.bool_)
        bound_s = self.pricing.degrees_bound_s(degrees, self.space.smallest_bubble)
        too_slow = bound_s >= cutoff_s
        slow_layouts = self.space.layouts_per_degrees(degrees.take(too_slow))
        certificate.bounded_out += int(slow_layouts.sum())
        return ~too_slow

    def _is_few(self, degrees: Layout) -> bool:
        """Whether bounding all variants of some degrees takes no longer than bounding some."""
        count = degrees.broadcast_shape()[0]
        return bool(count * len(self.space.zero) * len(self.space.recompute) < FEW_VARIANTS)

    @cached_property
    def _plain(self) -> Space:
        """Without recomputation."""
        return replace(self.space, recompute=(0,))

    @cached_property
    def _sparing(self) -> Space:
        """With the recomputations that keep least alone."""
        return replace(self.space, recompute=sparing_recompute(self.space))

    def fitting(self, degrees: Layout) -> BoolArray:
        """Which variants of some degrees may fit, however many virtual stages they get, [n, variants].

        Neither virtual stages nor another schedule than 1F1B saves memory. States are asked first, then, for
        many degrees, recomputations that keep least: both take less time and drop most.

        Parameters
        ----------
        degrees
            Of this branch, [n].
        """
        roomy = self._states_that_fit(degrees)
        if not self._is_few(degrees.take(roomy.any(axis=1))):
            roomy = np.asarray(self._ways_that_fit(self._sparing, degrees, roomy).any(axis=2))
        variants = roomy.shape[1] * len(self.space.recompute)
        return self._ways_that_fit(self.space, degrees, roomy).reshape(len(roomy), variants)

    def holds_states(self, degrees: Layout) -> BoolArray:
        """Of which degrees weights, gradients and optimizer states fit with the most offloaded, under some
        ZeRO stage and with no activations, [n].

        Parameters
        ----------
        degrees
            Of this branch, [n].
        """
        return np.asarray(self._states_that_fit(degrees).any(axis=1))

    def _states_that_fit(self, degrees: Layout) -> BoolArray:
        """The same of each ZeRO stage, [n, stages]."""
        plain = self.space.most_offloaded(self._plain.variants(degrees))
        size = (*degrees.broadcast_shape(), len(self.space.shares))
        return self._has_room(self.pricing.states_gib(plain)).reshape(size)

    def _ways_that_fit(self, space: Space, degrees: Layout, roomy: BoolArray) -> BoolArray:
        """Which ways to recompute fit, [n, stages, ways], of the ZeRO stages `roomy` [n, stages]."""
        fits = np.repeat(roomy[:, :, None], len(space.recompute), axis=2)
        rows = roomy.any(axis=1)
        variants = space.variants(degrees.take(rows)).take(fits[rows].ravel())
        if len(np.asarray(variants.pp)):
            fits[fits] = self._has_room(self._least_memory_gib(variants))
        return fits

    def _has_room(self, memory_gib: FloatArray) -> BoolArray:
        """What fits of what needs so much memory, [n]."""
        layouts = Layout(tp=np.ones(len(memory_gib), dtype=np.int64))
        table = Candidates(workload=self.pricing.workload, layouts=layouts, memory_gib=memory_gib)
        fits = np.ones(len(memory_gib), dtype=np.bool_)
        for rule in self.rules:
            if rule.name == HbmCapacity.name:
                fits = rule.excess(table) <= 0
        return fits

    def _least_memory_gib(self, variants: Layout) -> FloatArray:
        """Of some variants with the least share, whatever share of the optimizer they offload, [n].

        The largest share keeps least, but for the buffers through which some frameworks offload.
        """
        least_gib = self.pricing.recomputed_memory_gib(self.space.most_offloaded(variants))
        profile = memory_profile(self.pricing.workload.framework)
        has_buffers = profile.offload_buffer_bytes + profile.upload_bytes > 0
        if has_buffers and self.space.offloads_several:
            return np.minimum(least_gib, self.pricing.recomputed_memory_gib(variants))
        return least_gib

    def _promising(
        self,
        degrees: Layout,
        fits: BoolArray,
        cutoff_s: float,
        certificate: Certificate,
        few: int,
    ) -> Layout:
        """Layouts that fit, with each number of virtual stages that may beat the cutoff and every number of
        shard groups.

        Those of variants of fewer than `few` layouts are all left as they are.

        Of the step T = m a + (S - a) x + ..., with S <= pp a and x = 1 / v for 1F1B, others save at most the
        factor (m + (pp - 1) x) / (m + (pp - 1) / v).
        """
        variants, has_room = self.space.variants(degrees), fits.ravel()
        counts = self.space.layouts_per_variant(variants)
        certificate.rule_out(HbmCapacity.name, int(counts[~has_room].sum()))
        kept = has_room & (counts > 0)
        variants, counts = variants.take(kept), counts[kept]
        if not np.isfinite(cutoff_s) or counts.sum() < few:
            return self.space.grouped(self.space.scheduled(variants))
        rows, stages, bound_s = self._pipeline_bounds_s(variants)
        good = np.zeros((len(counts), int(stages.max(initial=0)) + 1), dtype=np.bool_)
        good[rows, stages] = bound_s < cutoff_s
        pipelines = self.space.pipeline_counts[np.asarray(variants.pp)]
        layouts = self.space.scheduled(variants)
        good_layouts = good[np.repeat(np.arange(len(counts)), pipelines), layouts.vpp]
        left_out = np.repeat(counts // np.maximum(pipelines, 1), pipelines)[~good_layouts]
        certificate.bounded_out += int(left_out.sum())
        return self.space.grouped(layouts.take(good_layouts))

    def _pipeline_bounds_s(self, variants: Layout) -> tuple[IntArray, IntArray, FloatArray]:
        """Every pipeline of the space that some variants go with: which of them it is, its number of virtual
        stages, and its bound; three arrays [k].

        Each number of virtual stages is bounded by itself: more of them hide more data-parallel traffic, so
        that no bound of few holds for many.
        """
        rows, stages, shares = self.space.virtual_rows(np.asarray(variants.pp))
        pipelines = variants.take(rows)
        fewest_recomputed = replace(
            pipelines, vpp=stages, recompute_layers=pipelines.recomputes_layers.astype(np.int64)
        )
        m = np.asarray(pipelines.num_micro_batches, dtype=np.float64)
        others = np.asarray(pipelines.pp, dtype=np.float64) - 1.0
        factor = (m + others * shares) / (m + others / stages)
        return rows, stages, self._bound_s(fewest_recomputed) * factor


def sparing_recompute(space: Space) -> tuple[int, ...]:
    """Masks of which one leaves no more in memory than any of the space's does.

    Each module that is recomputed only drops activations; full recomputation, and that of single operators,
    also bring others back.

    Parameters
    ----------
    space
        Whose ways to recompute they are.
    """
    apart = Recompute.FULL | Recompute.OPERATORS
    modules = [mask for mask in space.recompute if not mask & apart]
    others = tuple(mask for mask in space.recompute if mask & apart)
    every_module = reduce(or_, modules, int(Recompute.NONE))
    return (every_module, *others) if modules else others


def plainest(space: Space) -> Space:
    """The part of a space in which a search looks for a first price.

    It has the fewest shard groups and expert-tensor ranks, and virtual stages with as many layers. Of
    recomputation it has none, that of the modules that leave least in memory, and that of whole layers; of
    the optimizer's offload the least and the most.

    Parameters
    ----------
    space
        Of one execution, or of all.
    """
    shares = space.shares.items()
    ends = {(zero, share) for zero, own in shares for share in (own[0], own[-1])}
    kinds = {int(Recompute.NONE), *sparing_recompute(space)}
    return replace(
        space,
        etp=space.etp[:1],
        shard_groups=space.shard_groups[:1],
        offloads=tuple(sorted(ends)),
        recompute=tuple(mask for mask in space.recompute if mask in kinds),
        uneven_virtual_stages=False,
    )


def representatives(branches: Sequence[Branch]) -> list[Branch]:
    """One branch of all that differ only in overlapped tensor parallelism and in how context is exchanged.

    It is the first that overlaps, or the first of all where none does.

    Parameters
    ----------
    branches
        In their order, the plainest first.
    """
    chosen: dict[Execution, Branch] = {}
    for branch in branches:
        run = branch.execution
        plain = replace(run, tp_overlap=False, cp_comm="p2p", cp_inner=None)
        if plain not in chosen or (run.tp_overlap and not chosen[plain].execution.tp_overlap):
            chosen[plain] = branch
    return list(chosen.values())


# What of degrees fits, asked once for executions and searches that need the same memory.


MOST_KEPT = 1 << 14
"""Degrees of which it is kept what fits."""
OF_MEMORY = (*DEGREES, "micro_batch")
"""What tells degrees with a micro-batch of one request apart."""


HOW_A_STEP_RUNS = (
    *(field.name for field in fields(RunSettings) if field.name.endswith("_overlap")),
    *("moe_dispatch", "cuda_graph"),
    *("cp_comm", "cp_inner", "bucket_mb"),
)
"""Settings that weights, gradients and optimizer states do not depend on."""


def _of_states(branch: Branch) -> tuple[object, ...]:
    """What tells branches of one request apart whose states need unlike memory.

    `footprint.mean_states_gib` reads none of `HOW_A_STEP_RUNS`: branches that differ in these alone, and have
    equal ZeRO stages and offloaded shares, answer for one another.
    """
    names = [f.name for f in fields(RunSettings) if f.name not in HOW_A_STEP_RUNS]
    run, space = branch.pricing.workload, branch.space
    settings = (getattr(run, name) for name in names)
    return (tuple(space.zero), tuple(space.offloads), run.framework, *settings)


class KnownRoom:
    """Which variants of degrees fit, as `Branch.fitting` says, kept for those that come again."""

    def __init__(self) -> None:
        self._kept = KeptRows[BoolArray](MOST_KEPT, lambda *rows: np.concatenate(rows))

    def fits(self, degrees: Layout, fitting: Callable[[Layout], BoolArray]) -> BoolArray:
        """What fits of some degrees, [n, variants], n at least 1; `fitting` is asked for unknown ones.

        Parameters
        ----------
        degrees
            With a micro-batch, [n]; no two alike.
        fitting
            Says the same of degrees that were not asked about before.
        """
        keys = row_keys(degrees, OF_MEMORY)
        known, places = self._kept.of(keys, lambda new: fitting(degrees.take(new)))
        return np.asarray(known[places])


@lru_cache(maxsize=96)
def _known_room(asked: WorkloadKey) -> KnownRoom:
    """Of one request's executions; what is asked about its plan is searched with the same ones."""
    del asked
    return KnownRoom()


class RoomOfBranches:
    """What fits of degrees under each branch: those that need as much memory are asked once.

    They may differ in what they recompute: the one that recomputes most ways answers for the others.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self._branches = branches
        groups: dict[WorkloadKey, list[int]] = {}
        for index, branch in enumerate(branches):
            groups.setdefault(_of_memory(branch), []).append(index)
        self._groups = [part for alike in groups.values() for part in self._nested(alike)]
        self._group_of = {index: at for at, group in enumerate(self._groups) for index in group}
        self._leaders = [branches[group[0]] for group in self._groups]
        """By group, the branch that answers for it."""
        self._known = [
            _known_room(_of_memory(each, each.space.recompute)) for each in self._leaders
        ]
        self._alike = [_of_states(leader) for leader in self._leaders]

    def for_states(self, degrees: Layout) -> BoolArray:
        """Of which degrees the states may fit under some branch, [n].

        Parameters
        ----------
        degrees
            Of the space of all branches, [n].
        """
        holds = np.zeros(degrees.broadcast_shape(), dtype=np.bool_)
        for leader in dict(zip(self._alike, self._leaders, strict=True)).values():
            rows = np.flatnonzero(~holds)
            if len(rows):
                holds[rows] = leader.holds_states(degrees.take(rows))
        return holds

    def _nested(self, group: list[int]) -> list[list[int]]:
        """The group with its widest branch first, or each branch apart where none has the ways of all."""
        widest = max(group, key=lambda index: len(self._branches[index].space.recompute))
        ways = set(self._branches[widest].space.recompute)
        if all(ways.issuperset(self._branches[index].space.recompute) for index in group):
            return [[widest, *(index for index in group if index != widest)]]
        return [[index] for index in group]

    def among(self, degrees: Layout) -> Callable[[int, IntArray], BoolArray]:
        """Says of a branch which variants of some rows of the degrees fit, [rows, variants].

        Where states fit is asked of all rows at once, and the rest of those rows alone.

        Parameters
        ----------
        degrees
            Of the space of all branches, [n].

        Returns
        -------
        callable
            Takes the number of a branch and rows of the degrees.
        """
        holding: dict[object, BoolArray] = {}

        def fits(index: int, rows: IntArray) -> BoolArray:
            group = self._group_of[index]
            leader, alike = self._leaders[group], self._alike[group]
            if alike not in holding:
                holding[alike] = leader.holds_states(degrees)
            masks, roomy = leader.space.recompute, holding[alike][rows]
            by_way = np.zeros((len(rows), len(leader.space.shares), len(masks)), np.bool_)
            if roomy.any():
                variants = self._known[group].fits(degrees.take(rows[roomy]), leader.fitting)
                by_way[roomy] = variants.reshape(len(variants), *by_way.shape[1:])
            ways = [masks.index(mask) for mask in self._branches[index].space.recompute]
            return by_way[:, :, ways].reshape(len(rows), by_way.shape[1] * len(ways))

        return fits


def _of_memory(branch: Branch, recompute: tuple[int, ...] = ()) -> WorkloadKey:
    """Equal where variants fit alike; `recompute` tells branches apart that recompute in unlike ways."""
    space, workload = branch.space, as_memory_sees(branch.pricing.workload)
    variants = (tuple(space.zero), tuple(space.offloads), recompute)
    return WorkloadKey(replace(workload, chooses_buckets=False), variants)


# Degrees with a micro-batch, in the order of their bounds, for all executions at once and for each.


DEGREES_TOGETHER = 1 << 16
"""Degrees worked on between two looks at the clock."""


class LeastFirst:
    """Positions of some values in rising order, equal ones as they come, sorted only as far as is asked.

    Of tens of millions of degrees a search looks at the first few hundred thousand.

    >>> LeastFirst(np.array([3.0, 1.0, 2.0, 1.0, 9.0]), below=9.0, together=2).take(1, 3)
    array([3, 2])
    """

    def __init__(
        self, values: FloatArray, below: float = np.inf, together: int = DEGREES_TOGETHER
    ) -> None:
        """`below` leaves out the values that are not; `together` of them are sorted at first."""
        self._values, self._together = values, together
        self._sorted = np.zeros(0, dtype=np.int64)
        self._left = np.flatnonzero(values < below)
        self._size = len(self._left)

    def __len__(self) -> int:
        return self._size

    def take(self, start: int, stop: int) -> IntArray:
        """Those from `start` up to `stop` in the order, fewer at its end.

        Parameters
        ----------
        start, stop
            Places in the order, from 0.
        """
        while len(self._sorted) < min(stop, self._size):
            self._sort_more()
        return self._sorted[start:stop]

    def _sort_more(self) -> None:
        left = self._values[self._left]
        now = np.ones(len(left), dtype=bool)
        if self._together < len(left):
            now = left <= np.partition(left, self._together - 1)[self._together - 1]
        part = self._left[now]
        part = part[np.argsort(left[now], kind="stable")]
        self._sorted = np.concatenate([self._sorted, part])
        self._left = self._left[~now]
        self._together *= 4


class DegreeScan:
    """Degrees of the space of all branches, bounded for all of them at once and for each of them."""

    def __init__(
        self,
        space: Space,
        branches: Sequence[Branch],
        table: ShapeTable,
        degrees: Layout,
        on_block: Callable[[], object],
    ) -> None:
        """`on_block` is called again and again while all degrees are worked on; what it raises ends that."""
        self._space, self._branches, self._table, self._degrees = space, branches, table, degrees
        self._on_block = on_block
        count = degrees.broadcast_shape()[0]
        self._shapes = np.empty(count, dtype=np.int64)
        self.bound_s = np.empty(count)
        """Of the fastest branch, [n]."""
        for rows in self._blocks(count):
            self._shapes[rows] = table.rows(degrees.take(rows))
            bound_s = self._bounds_s(table.least, rows)
            corrected = [
                branch.corrected(bound_s, degrees.take(rows))
                for branch in branches
                if branch.corrections is not None
            ]
            self.bound_s[rows] = reduce(np.minimum, corrected) if corrected else bound_s

    @property
    def degrees(self) -> Layout:
        """All of them, [n]."""
        return self._degrees

    def _blocks(self, count: int) -> Iterator[slice]:
        """Rows in parts that a core's cache holds."""
        for start in range(0, count, DEGREES_TOGETHER):
            self._on_block()
            yield slice(start, start + DEGREES_TOGETHER)

    def _bounds_s(self, costs: LayerCosts, rows: IntArray | slice) -> FloatArray:
        """Of some of the degrees."""
        degrees = self._degrees.take(rows)
        bubble = self._space.smallest_bubble[np.asarray(degrees.pp)]
        own_costs = rows_of(costs, self._table.size, self._shapes[rows])
        return compute_bound_s(self._space.workload, degrees, own_costs, bubble)

    def by_branch(
        self,
        rows: IntArray,
        cutoff_s: Callable[[], float],
        room: RoomOfBranches | None = None,
        has_room: BoolArray | None = None,
        left_out: Collection[int] = (),
    ) -> Iterator[tuple[int, Layout, BoolArray | None, int]]:
        """Each branch, its degrees among some rows that may beat the cutoff, which of their variants fit if
        `room` is asked, and its other layouts.

        Least bounds first. The cutoff is asked for each branch: it falls when one before has a price. Degrees
        without `has_room` [rows] have a part in the order of the branches alone; those `left_out` none.

        Parameters
        ----------
        rows
            Of the degrees.
        cutoff_s
            Seconds that are to be beaten by now.
        room
            Says which variants fit; None where nobody asks.
        has_room
            Of which of the rows the states may fit, shape [rows]; None for all of them.
        left_out
            Numbers of branches.
        """
        degrees = self._degrees.take(rows)
        bounded = []
        for index, branch in enumerate(self._branches):
            in_branch = np.flatnonzero(branch.has(degrees))
            if len(in_branch) and index not in left_out:
                bound_s = self._bounds_s(self._table.costs[index], rows[in_branch])
                bound_s = branch.corrected(bound_s, degrees.take(in_branch))
                least_s = float(bound_s.min())
                if has_room is not None:
                    held = has_room[in_branch]
                    in_branch, bound_s = in_branch[held], bound_s[held]
                bounded.append((least_s, index, in_branch, bound_s))
        fits = None if room is None else room.among(degrees)
        for _, index, in_branch, bound_s in sorted(bounded, key=lambda each: each[:2]):
            good = bound_s < cutoff_s()
            space, promising = self._branches[index].space, in_branch[good]
            others = space.layouts_per_degrees(degrees.take(in_branch[~good]))
            of_variants = fits(index, promising) if fits is not None and len(promising) else None
            yield index, degrees.take(promising), of_variants, int(others.sum())

    def promising(self, cutoff_s: float) -> Layout:
        """Degrees that may beat the cutoff, least bounds first.

        Parameters
        ----------
        cutoff_s
            Seconds that degrees may beat.
        """
        below = np.flatnonzero(self.bound_s < cutoff_s)
        return self._degrees.take(below[np.argsort(self.bound_s[below], kind="stable")])

    def every_layout(self, most_gpus: int, more_than: int) -> int:
        """How many layouts all degrees on so many GPUs have in all branches.

        Parameters
        ----------
        most_gpus, more_than
            GPUs in use: above `more_than`, up to `most_gpus`.
        """
        by_shape = self._space.degrees_by_shape(most_gpus, more_than, of_layouts=True)
        return int((by_shape * self._kinds).sum())

    def layouts(self, rows: IntArray) -> int:
        """How many some of the degrees have.

        Parameters
        ----------
        rows
            Of the degrees.
        """
        blocks = self._blocks(len(rows))
        return sum(self._layouts_of(self._degrees.take(rows[part])) for part in blocks)

    def _layouts_of(self, degrees: Layout) -> int:
        own = tuple(
            positions[np.asarray(getattr(degrees, name))]
            for name, positions in self._positions.items()
        )
        pipelines = self._space.pipeline_counts[np.asarray(degrees.pp)]
        return int((pipelines * self._kinds[own] * self._space.shardings(degrees)).sum())

    @cached_property
    def _positions(self) -> dict[str, IntArray]:
        """By axis that branches narrow, the position of each degree among those of the space."""
        tables = {}
        for name in NARROWED:
            degrees = np.array(getattr(self._space, name), dtype=np.int64)
            tables[name] = np.zeros(int(degrees.max(initial=0)) + 1, dtype=np.int64)
            tables[name][degrees] = np.arange(len(degrees))
        return tables

    @cached_property
    def _kinds(self) -> IntArray:
        """Recomputations of all branches that have some degrees, by the positions of what these narrow."""
        kinds = np.zeros([len(getattr(self._space, name)) for name in NARROWED], dtype=np.int64)
        for branch in self._branches:
            columns = (
                positions[np.array(getattr(branch.space, name), dtype=np.int64)]
                for name, positions in self._positions.items()
            )
            kinds[np.ix_(*columns)] += len(branch.space.recompute)
        return kinds


# The node pool: layouts that may still be the optimum, with their lower bounds.


_OF_FAMILY = tuple(
    f.name for f in fields(Layout) if f.name != "recompute_layers" and f.name not in MAKING_ROOM
)
"""Layouts that agree in these differ in what makes room alone."""


class LayoutPool:
    """Layouts with their bounds. Rows stay valid until the next `drop`."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[np.int64]] = {}
        self.branch: IntArray = np.zeros(0, dtype=np.int64)
        """Which execution each layout is for."""
        self.bound_s: FloatArray = np.zeros(0)
        """Seconds; infinite once a layout is closed."""
        self.mappings: list[MappingBounds | None] = []
        self.is_bounded: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """Whether the bounds of a layout's mappings are known."""
        self.family: IntArray = np.zeros(0, dtype=np.int64)
        """A number for all layouts of one execution that differ in what makes room alone."""
        self._families: dict[tuple[int, ...], int] = {}
        self._family_bound_s: FloatArray = np.zeros(0)
        """Seconds, by family; not a number before it is known."""

    def __len__(self) -> int:
        return int(np.sum(np.isfinite(self.bound_s)))

    def add(self, branch: int, layouts: Layout, bound_s: FloatArray) -> None:
        """Adds array layouts of one execution with their bounds, shape [n] each.

        Parameters
        ----------
        branch
            The number of their execution.
        layouts
            Shape [n].
        bound_s
            Seconds, shape [n].
        """
        if not len(bound_s):
            return
        for f in fields(layouts):
            new = np.broadcast_to(np.asarray(getattr(layouts, f.name)), bound_s.shape)
            old = self._columns.get(f.name)
            self._columns[f.name] = new if old is None else np.concatenate([old, new])
        self.branch = np.concatenate([self.branch, np.full(len(bound_s), branch)])
        self.bound_s = np.concatenate([self.bound_s, bound_s])
        self.family = np.concatenate([self.family, self._family_of(branch, layouts)])
        self.mappings += [None] * len(bound_s)
        self.is_bounded = np.concatenate([self.is_bounded, np.zeros(len(bound_s), dtype=bool)])

    def _family_of(self, branch: int, layouts: Layout) -> IntArray:
        first, back = rows_by_value(layouts, _OF_FAMILY)
        columns = [np.asarray(getattr(layouts.take(first), name)) for name in _OF_FAMILY]
        keys = np.stack(columns, axis=1).astype(np.int64).tolist()
        numbers = [self._families.setdefault((branch, *key), len(self._families)) for key in keys]
        unknown = np.full(len(self._families) - len(self._family_bound_s), np.nan)
        self._family_bound_s = np.concatenate([self._family_bound_s, unknown])
        return np.array(numbers, dtype=np.int64)[back]

    def one_of_each_family(self, rows: IntArray) -> IntArray:
        """Of some rows, one of each family whose bound is not known.

        Parameters
        ----------
        rows
            Of the pool.
        """
        unknown = rows[np.isnan(self._family_bound_s[self.family[rows]])]
        _, first = np.unique(self.family[unknown], return_index=True)
        return unknown[first]

    def bound_families(self, rows: IntArray, bound_s: FloatArray) -> None:
        """Raises the bounds of all layouts of the families of some rows to theirs, [rows].

        Parameters
        ----------
        rows
            Of the pool, one of each family in question.
        bound_s
            Seconds, shape [rows].
        """
        self._family_bound_s[self.family[rows]] = bound_s
        raised = np.nan_to_num(self._family_bound_s)[self.family]
        self.bound_s = np.maximum(self.bound_s, raised)

    def take(self, rows: IntArray) -> Layout:
        """Some of the layouts, as arrays.

        Parameters
        ----------
        rows
            Of the pool.
        """
        return Layout(**{name: column[rows] for name, column in self._columns.items()})  # type: ignore[arg-type]

    def scalar(self, row: int) -> Layout:
        """One of the layouts, in plain numbers."""
        return Layout(**{name: column[row].item() for name, column in self._columns.items()})

    def least_s(self) -> float:
        """The least bound; infinite when the pool is empty."""
        return float(self.bound_s.min()) if len(self.bound_s) else float("inf")

    def by_bound(self, most: int, *, bounded: bool = False) -> IntArray:
        """The first so many rows of the layouts in the pool, or of those `bounded`, least bound first.

        Parameters
        ----------
        most
            Rows at most.
        bounded
            Whether only those count whose mappings have bounds.
        """
        is_open = np.isfinite(self.bound_s)
        rows = np.flatnonzero(is_open & self.is_bounded if bounded else is_open)
        bound_s = self.bound_s[rows]
        if most < len(rows):
            # With all that tie with the last: a partition keeps no order among them.
            last_s = np.partition(bound_s, most)[most]
            near = bound_s <= last_s
            rows, bound_s = rows[near], bound_s[near]
        return rows[np.argsort(bound_s, kind="stable")][:most]

    def set_mappings(self, row: int, bounds: MappingBounds) -> None:
        """Replaces a layout's bound by that of its mappings.

        Parameters
        ----------
        row
            Of the pool.
        bounds
            Of its mappings; one below the layout's own bound lowers nothing.
        """
        self.mappings[row] = bounds
        self.is_bounded[row] = True
        self.bound_s[row] = max(float(self.bound_s[row]), bounds.least_s)

    def close(self, row: int) -> None:
        """Takes a layout out of the pool."""
        self.bound_s[row] = np.inf

    def drop(self, cutoff_s: float) -> int:
        """Forgets closed layouts and those whose bound is at or above the cutoff; returns how many of the
        latter.

        Parameters
        ----------
        cutoff_s
            Seconds that a layout must beat to stay.
        """
        keep = np.isfinite(self.bound_s) & (self.bound_s < cutoff_s)
        dropped = int(np.sum(np.isfinite(self.bound_s) & ~keep))
        if not keep.all():
            self._columns = {name: column[keep] for name, column in self._columns.items()}
            self.branch, self.bound_s = self.branch[keep], self.bound_s[keep]
            self.is_bounded, self.family = self.is_bounded[keep], self.family[keep]
            self.mappings = [
                bounds for bounds, stays in zip(self.mappings, keep, strict=True) if stays
            ]
        return dropped


# Layouts with one execution each that may be the plan, and what is known of them.


KERNEL = tuple(choice.name for choice in OF_LAYOUT if choice.decided in ("degrees", "pipeline"))
"""What of a layout is enumerated; the rest is decided for each."""


def kernel_degrees(layout: Layout) -> tuple[int, ...]:
    """The values of `KERNEL` of a layout of plain numbers."""
    return tuple(int(getattr(layout, name)) for name in KERNEL)


@dataclass(eq=False)
class Candidate:
    """A layout with one execution, and the bounds of its mappings."""

    branch: int
    layout: Layout
    """Plain numbers; the number of recomputed layers is open."""
    mappings: MappingBounds
    is_open: bool = True
    """Whether it is neither priced nor proven to be no better than the cutoff."""
    priced: Priced | None = None
    """Its exact price, where that matters."""
    overfull: Sequence[Priced] = ()
    """Mappings that would be faster, but fill a cut beyond what is allowed."""

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """What is enumerated of its layout."""
        return kernel_degrees(self.layout)

    @property
    def bound_s(self) -> float:
        """Of all its mappings."""
        return self.mappings.least_s


class Chooser(ABC):
    """Chooses among candidates which one is priced next, and proves the last one."""

    prices_beside: int = 0
    """Further candidates that are priced with each chosen one at the least, least bounds first."""

    def __init__(
        self,
        branches: Sequence[Branch],
        params: SearchParams,
        routing: JointRouting | None,
        seed: int,
        certificate: Certificate,
    ) -> None:
        self._branches, self._params, self._routing = branches, params, routing
        self._seed, self._certificate = seed, certificate
        self.candidates: list[Candidate] = []
        self.is_settled = False
        """Whether no candidate is left that may beat the cutoff, and nothing changed since."""

    def add(self, branch: int, layout: Layout, mappings: MappingBounds) -> Candidate:
        """Takes in a layout with the bounds of its mappings.

        Parameters
        ----------
        branch
            The number of its execution.
        layout
            Plain numbers; the number of recomputed layers is open.
        mappings
            Their bounds.
        """
        self.is_settled = False
        candidate = Candidate(branch=branch, layout=layout, mappings=mappings)
        self.candidates.append(candidate)
        return candidate

    def _imbalance(self, workload: Workload, ranks: int) -> AssumedImbalance | None:
        """What prices assume of the loads of so many ranks with experts; None where none are placed."""
        if self._routing is None or ranks == 1:
            return None
        from meshwright.planner.experts.training import AssumedImbalance

        return AssumedImbalance(ranks, float(workload.imbalance(ranks)))

    @property
    def opened(self) -> list[Candidate]:
        """Those that may be the next choice, least bounds first."""
        waiting = [each for each in self.candidates if each.is_open]
        return sorted(waiting, key=lambda each: each.bound_s)

    def least_s(self) -> float:
        """The least bound of those that may be the next choice; infinite without any."""
        return min((each.bound_s for each in self.candidates if each.is_open), default=inf)

    def learn(
        self, candidate: Candidate, priced: Priced | None, overfull: Sequence[Priced] = ()
    ) -> None:
        """What an exact price says; None where no split fits or beats the cutoff.

        `overfull` are mappings that would be faster, but fill a cut beyond what is allowed.

        Parameters
        ----------
        candidate
            What was priced.
        priced
            Its price; None where there is none below the cutoff.
        overfull
            With `--max-cut-use`, the mappings that were refused for it.
        """
        candidate.is_open, candidate.priced, self.is_settled = False, priced, False
        candidate.overfull = overfull

    def settle(self, candidates: Iterable[Candidate], cutoff_s: float) -> None:
        """None of these beats the cutoff; others may still.

        Parameters
        ----------
        candidates
            Which are out.
        cutoff_s
            Seconds that the others must beat to keep the choice open.
        """
        for each in candidates:
            each.is_open = False
        self.is_settled = self.least_s() >= cutoff_s

    def likely(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """A candidate that may beat the cutoff, as fast as can be; as `choose` otherwise.

        Parameters
        ----------
        cutoff_s
            Seconds that a candidate must beat.
        best
            The best prices so far, rising.
        wanted
            How many best ones are asked for.
        time_limit_s
            Seconds that are left; None without a limit.
        """
        return self.choose(cutoff_s, best, wanted, time_limit_s)

    @abstractmethod
    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """The candidate to be priced next; None where none of those looked at beats the cutoff.

        `is_settled` then says whether all were looked at.

        Parameters
        ----------
        cutoff_s
            Seconds that a candidate must beat.
        best
            The best prices so far, rising; the last of `wanted` is the cutoff.
        wanted
            How many best ones are asked for.
        time_limit_s
            Seconds that are left.

        Raises
        ------
        OutOfTimeError
            If that is too little.
        """


# What the model of the search chooses among: a kernel with every choice but the split of the layers.


@dataclass(eq=False)
class Combination:
    """A kernel with every choice but the split of the layers."""

    layout: Layout
    """Plain numbers; `recompute_layers` open."""
    execution: Execution
    matrix: Matrix
    bound_s: float
    """Of any split."""
    costs: CombinationCosts
    memory: Sequence[RankRow]
    limit_gib: float
    imbalance: AssumedImbalance | None = None
    is_open: bool = True
    """Whether it was not priced yet."""
    is_settled: bool = False
    """Whether a model proved that it does not beat the cutoff."""
    priced: Priced | None = None
    """Its exact price; None where it is not known, or where the combination is out."""
    inside: Mapping[str, int] = field(default_factory=dict)
    """By axis that is to stay inside: members of a group that share a domain."""
    is_barred: bool = False
    """Whether a group leaves its domain or a cut is too full: then a row of the model keeps it out."""
    on_parts: str = ""
    """On a mixed cluster, the parts along the pipeline with the ranks of each."""

    @property
    def is_waiting(self) -> bool:
        """Whether it may still be the choice, for all that was proven."""
        return self.is_open and not self.is_settled and not self.is_barred

    @cached_property
    def kernel(self) -> Hashable:
        """What is enumerated."""
        return kernel_degrees(self.layout), tuple(self.matrix.items()), self.on_parts

    @cached_property
    def full(self) -> bool:
        """Whether it recomputes whole layers."""
        return bool(self.layout.recomputes_layers)
