"""Branches of the search: one execution each, with its layouts, prices and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import inf
from operator import or_

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.nvlink_domain import NvlinkDomain
from meshwright.constraints.rule import Rule
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.profile import memory_profile
from meshwright.planner.bounds.exact_cost import MappingBounds
from meshwright.planner.bounds.stages import ALL_LAYERS
from meshwright.planner.search.certificate import Certificate
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.pricing import Pricing
from meshwright.planner.search.space import Space

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NARROWED = ("tp", "cp", "ep", "etp")
"""Axes of which an execution may exclude degrees."""
DEGREES = frozenset(("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "num_micro_batches"))
"""Fields that the degrees with a micro-batch decide."""
FEW_VARIANTS = 4096
"""Below which an array operation takes no longer for more variants."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """One execution. Its space is part of the space of all."""

    execution: Execution
    space: Space
    pricing: Pricing
    rules: tuple[Rule, ...]

    def refused_outright(self) -> bool:
        """Whether a rule refuses the workload itself, whatever the layout."""
        default_layout = as_array(Layout())
        table = Candidates(
            workload=self.pricing.workload, layouts=default_layout, memory_gib=np.zeros(1)
        )
        return any(rule.of_workload and rule.excess(table)[0] > 0 for rule in self.rules)

    def outside_domain(self, degrees: Layout, most: int, cutoff_s: float) -> Layout:
        """The fastest layouts of some degrees that leave a domain whatever their mapping, [n].

        At most so many, of four times as many degrees, least bounds first; none where nothing has to stay.
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

    def has(self, degrees: Layout) -> NDArray[np.bool_]:
        """Which degrees of the space of all are in this branch's, [n]."""
        own = [
            np.isin(np.asarray(getattr(degrees, name)), getattr(self.space, name))
            for name in NARROWED
        ]
        return np.asarray(np.logical_and.reduce(own))

    def legal(
        self, layouts: Layout, memory_gib: FloatArray, certificate: Certificate
    ) -> NDArray[np.bool_]:
        """Which layouts no rule forbids; the others are counted under the first rule that does."""
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
        return tuple(rule for rule, names in read if names is not None and names <= DEGREES)

    def _legal_degrees(self, degrees: Layout, certificate: Certificate) -> Layout:
        """Degrees of which no rule forbids every layout."""
        counts = self.space.layouts_per_degrees(degrees)
        memory_gib = np.zeros(len(counts))
        rules = self._rules_of_degrees
        return degrees.take(self._kept(rules, degrees, memory_gib, counts, certificate))

    def _legal_in_any_memory(
        self, layouts: Layout, counts: IntArray, certificate: Certificate
    ) -> Layout:
        """Those that no rule forbids however much memory there is: asked first, as it takes less time.

        As many layers as can be are recomputed: no rule asks for fewer. Each stands for so many in the
        counts.
        """
        full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
        recomputed = replace(layouts, recompute_layers=np.where(full, ALL_LAYERS, 0))
        nothing_gib = np.zeros(layouts.broadcast_shape())
        keep = self._kept(self.rules, recomputed, nothing_gib, counts, certificate)
        return layouts.take(keep)

    def expanded(
        self, degrees: Layout, cutoff_s: float, certificate: Certificate
    ) -> tuple[Layout, FloatArray, FloatArray]:
        """Legal layouts of some degrees that may beat the cutoff, with least memory and bound, [n]."""
        degrees = self._legal_degrees(degrees, certificate)
        if not degrees.broadcast_shape()[0]:
            return degrees, np.zeros(0), np.zeros(0)
        degrees = self._roomy(self._placed(degrees, cutoff_s, certificate), certificate)
        variants = self._promising(self.space.variants(degrees), cutoff_s, certificate)
        layouts = self.space.grouped(self.space.scheduled(variants))
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
        full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
        fewest_recomputed = replace(layouts, recompute_layers=full.astype(np.int64))
        good = self.pricing.lower_bound_s(fewest_recomputed) < cutoff_s
        certificate.bounded_out += int(counts[~good].sum())
        return layouts.take(good)

    def promising_layouts(
        self, layouts: Layout, cutoff_s: float, certificate: Certificate
    ) -> tuple[Layout, FloatArray, FloatArray]:
        """Those of some layouts that are legal and may beat the cutoff, with least memory and bound, [n]."""
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

    def mapping_bounds(self, layouts: Layout) -> list[MappingBounds]:
        """Bounds under every mapping, for each of some layouts; infinite where others are as good."""
        return self.pricing.mapping_bounds(layouts, self.space.shard_groups)

    def relief_bound_s(self, layouts: Layout) -> FloatArray:
        """Bounds under the best mapping for all that layouts may recompute, offload or shard over, [n]."""
        return self.pricing.relief_bound_s(layouts, self.space.shard_groups)

    def _bound_s(self, layouts: Layout) -> FloatArray:
        """Never above the price with any schedule, and any number of shard groups that the space has, [n]."""
        return self.pricing.lower_bound_s(layouts, self.space.shard_groups, any_schedule=True)

    def _placed(self, degrees: Layout, cutoff_s: float, certificate: Certificate) -> Layout:
        """Drops degrees that are too slow wherever their groups lie. Few are left as they are."""
        if self._is_few(degrees) or not np.isfinite(cutoff_s):
            return degrees
        bound_s = self.pricing.degrees_bound_s(degrees, self.space.smallest_bubble)
        too_slow = bound_s >= cutoff_s
        slow_layouts = self.space.layouts_per_degrees(degrees.take(too_slow))
        certificate.bounded_out += int(slow_layouts.sum())
        return degrees.take(~too_slow)

    def _is_few(self, degrees: Layout) -> bool:
        """Whether bounding all variants of some degrees takes no longer than bounding some."""
        count = degrees.broadcast_shape()[0]
        return bool(count * len(self.space.zero) * len(self.space.recompute) < FEW_VARIANTS)

    def _roomy(self, degrees: Layout, certificate: Certificate) -> Layout:
        """Drops degrees of which no layout fits, by those recomputations that keep least.

        Few are left as they are.
        """
        count = degrees.broadcast_shape()[0]
        if self._is_few(degrees):
            return degrees
        sparing = replace(self.space, recompute=sparing_recompute(self.space)).variants(degrees)
        least_gib = self._least_memory_gib(sparing).reshape(count, -1).min(axis=1)
        table = Candidates(workload=self.pricing.workload, layouts=degrees, memory_gib=least_gib)
        for rule in self.rules:
            if rule.name == HbmCapacity.name:
                fits = rule.excess(table) <= 0
                too_large = self.space.layouts_per_degrees(degrees.take(~fits))
                certificate.rule_out(rule.name, int(too_large.sum()))
                return degrees.take(fits)
        return degrees

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

    def _promising(self, variants: Layout, cutoff_s: float, certificate: Certificate) -> Layout:
        """Drops layouts that, however many virtual stages they get, cannot fit or beat the cutoff.

        Neither virtual stages nor another schedule than 1F1B saves memory. Of the step T = m a + (S - a) x +
        ..., with S <= pp a and x = 1 / v for 1F1B, others save at most the factor
        (m + (pp - 1) x) / (m + (pp - 1) / v).
        """
        counts = self.space.layouts_per_variant(variants)
        variants, counts = variants.take(counts > 0), counts[counts > 0]
        if not len(counts):
            return variants
        memory_gib = self._least_memory_gib(variants)
        table = Candidates(workload=self.pricing.workload, layouts=variants, memory_gib=memory_gib)
        for rule in self.rules:
            if rule.name == HbmCapacity.name:
                fits = rule.excess(table) <= 0
                certificate.rule_out(rule.name, int(counts[~fits].sum()))
                variants, counts = variants.take(fits), counts[fits]
        if not np.isfinite(cutoff_s) or not len(counts):
            return variants
        bound_s = self._any_pipeline_bound_s(variants)
        good = bound_s < cutoff_s
        certificate.bounded_out += int(counts[~good].sum())
        return variants.take(good)

    def _any_pipeline_bound_s(self, variants: Layout) -> FloatArray:
        """Bounds over every pipeline of the space, [n].

        Each number of virtual stages is bounded by itself: more of them hide more data-parallel traffic, so
        that no bound of few holds for many.
        """
        pp = np.asarray(variants.pp)
        rows, stages, shares = self.space.virtual_rows(pp)
        pipelines = variants.take(rows)
        full = (np.asarray(pipelines.recompute) & int(Recompute.FULL)) != 0
        fewest_recomputed = replace(pipelines, vpp=stages, recompute_layers=full.astype(np.int64))
        m = np.asarray(pipelines.num_micro_batches, dtype=np.float64)
        others = np.asarray(pipelines.pp, dtype=np.float64) - 1.0
        factor = (m + others * shares) / (m + others / stages)
        bound_s = np.full(len(pp), inf)
        np.minimum.at(bound_s, rows, self._bound_s(fewest_recomputed) * factor)
        return bound_s


def sparing_recompute(space: Space) -> tuple[int, ...]:
    """Masks of which one leaves no more in memory than any of the space's does.

    Each module that is recomputed only drops activations; full recomputation, and that of single operators,
    also bring others back.
    """
    apart = Recompute.FULL | Recompute.OPERATORS
    modules = [mask for mask in space.recompute if not mask & apart]
    others = tuple(mask for mask in space.recompute if mask & apart)
    every_module = reduce(or_, modules, int(Recompute.NONE))
    return (every_module, *others) if modules else others


def as_array(layout: Layout) -> Layout:
    """One layout as an array of one."""
    return Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
