"""Prices of layouts on an irregular allocation, each under a mapping of its own.

A layout's bound packs every group as far inside the fabric as it could be on leaves at their full size; its
price is that of a real mapping, found by `solve.least_traffic` where the layout is promising. The two need
not meet: the search then ends with a gap.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from costmodel.estimate import Stages, estimate
from costmodel.layout import AXES, Layout, Placement
from costmodel.placement import level_factors
from costmodel.workload import Workload
from planner.fabric.effective import placement_of
from planner.fabric.instance import Instance, instance_of, ranks_of
from planner.fabric.problem import IntArray, MappingError, MappingProblem, loads_of
from planner.fabric.solve import least_traffic
from planner.fabric.starts import blocked_orders
from planner.layout_pricing import LayoutPricing, MappingBounds, Priced
from planner.mapping import Matrices
from planner.pricing import CostModelPricing
from planner.stages import balanced_stages

PROMISING = 1.05
"""A layout whose price under a regular order is within this of the best gets a mapping of its own."""
MAPPING_LIMIT_S = 5.0


class MappedPricing(CostModelPricing):
    """Prices by `costmodel` under one mapping of each layout."""

    @property
    def proves_mappings(self) -> bool:
        """A mapping with less traffic is not always the faster one, and no bound says by how much."""
        return False

    def mappings(self, layout: Layout) -> Matrices:
        """One entry that stands for whatever mapping is found."""
        levels = len(level_factors(self.workload.cluster, int(layout.gpus)))
        rows = {axis: np.ones((1, levels), dtype=np.int64) for axis in AXES}
        for axis in AXES:
            rows[axis][0, -1] = int(getattr(layout, axis))
        return rows

    def mapping_bounds(self, layouts: Layout) -> list[MappingBounds]:
        """The bound of the layout itself; infinite where no slots hold it."""
        bounds = self.lower_bound_s(layouts)
        found = []
        for row, bound in enumerate(bounds):
            layout = layouts.scalar(row)
            fits = self.instance(layout) is not None
            value = np.array([bound if fits else np.inf])
            found.append(MappingBounds(matrices=self.mappings(layout), bound_s=value))
        return found

    def instance(self, layout: Layout) -> Instance | None:
        """The mapping problem of a layout; None where its groups do not fit the free slots."""
        stages = balanced_stages(self.workload.model.layers, int(layout.pp), int(layout.vpp))
        if stages is None:
            return None
        try:
            return instance_of(self.on(int(layout.gpus)), layout, stages)
        except MappingError:
            return None

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """Under the best of the regular orders; if that is close to the cutoff, under its own mapping too."""
        instance = self.instance(layout)
        if instance is None:
            return None
        order = _best_order(instance.problem)
        limit = cutoff_s * PROMISING
        first = self._under(instance, order, layout, mappings, limit)
        if first is None:
            return None
        second = self._under(instance, _solved(instance.problem), layout, mappings, limit)
        best = min((p for p in (first, second) if p is not None), key=lambda p: p.step_time_s)
        return best if best.step_time_s < cutoff_s else None

    def _under(
        self,
        instance: Instance,
        assignment: IntArray,
        layout: Layout,
        mappings: MappingBounds,
        cutoff_s: float,
    ) -> Priced | None:
        placement = placement_of(self.on(int(layout.gpus)), instance, assignment)
        fixed = _FixedPricing(self._workload, placement)
        found = fixed.exact(layout, mappings, cutoff_s)
        if found is None:
            return None
        return replace(found, matrix={}, ranks=tuple(ranks_of(instance, assignment)))


class _FixedPricing(CostModelPricing):
    """Prices of layouts under one placement."""

    def __init__(self, workload: Workload, placement: Placement) -> None:
        super().__init__(workload)
        self._placement = placement

    def _pricing_of(self, layout: Layout) -> LayoutPricing:
        return _PlacedPricing(self.on(int(layout.gpus)), layout, self._placement)


class _PlacedPricing(LayoutPricing):
    def __init__(self, workload: Workload, layout: Layout, placement: Placement) -> None:
        super().__init__(workload, layout)
        self._placement = placement

    def _placed(self, table: Matrices) -> Placement:
        size = len(table["tp"])
        return Placement(**{n: np.tile(np.asarray(m), (size, 1)) for n, m in vars(self._placement).items()})


def seconds_in_best_order(workload: Workload, layout: Layout, stages: Stages) -> float | None:
    """The step under the best of the regular orders; None where the layout's groups do not fit."""
    try:
        instance = instance_of(workload, layout, stages)
    except MappingError:
        return None
    placement = placement_of(workload, instance, _best_order(instance.problem))
    return float(np.asarray(estimate(workload, layout, placement, stages).step_time_s))


def _best_order(problem: MappingProblem) -> IntArray:
    """Of hostname order and the orders through the leaves, the one with the least traffic."""
    orders = [problem.hostname_assignment(), *blocked_orders(problem)]
    return min(orders, key=lambda order: loads_of(problem, order).total_s)


@lru_cache(maxsize=256)
def _solved(problem: MappingProblem) -> IntArray:
    return least_traffic(problem, time_limit_s=MAPPING_LIMIT_S).assignment
