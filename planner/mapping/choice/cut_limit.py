"""Prices under `--max-cut-use`: a mapping that fills a cut beyond it is ruled out, the next best is taken.

A mapping is judged at its fastest split: a step is not slowed down on purpose so that its cuts look emptier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from meshwright.cluster_specs.fabric import is_irregular
from meshwright.constraints.bisection import ROUNDING
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.matrices import ranks_on, rows_under
from meshwright.planner.bounds.pricing import (
    DEFAULT_PRICING,
    CostModelPricing,
    PricingParams,
)
from meshwright.planner.mapping.choice.pricing import MappedPricing
from meshwright.planner.mapping.crossing.cuts import mapping_use


def pricing_of(workload: Workload) -> CostModelPricing:
    """Prices by every mapping of a regular fabric, or by a mapping of each layout on an irregular one."""
    if is_irregular(workload.cluster):
        return MappedPricing(workload)
    return CutLimitedPricing(workload) if workload.max_cut_use < 1 else CostModelPricing(workload)


class CutLimitedPricing(CostModelPricing):
    """Prices by the best mapping of a regular fabric that keeps to the workload's `max_cut_use`."""

    def __init__(self, workload: Workload, params: PricingParams = DEFAULT_PRICING) -> None:
        super().__init__(workload, params)
        self._overfull: list[Priced] = []

    @property
    def overfull(self) -> Sequence[Priced]:
        """Mappings of the layout priced last that would be faster, but fill a cut beyond the limit."""
        return self._overfull

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """As without the limit, but of the mappings that keep to it; bounds stay bounds of what is left."""
        limit, bound_s = self._workload.max_cut_use * ROUNDING, np.array(mappings.bound_s)
        self._overfull = []
        while True:
            left = replace(mappings, bound_s=bound_s)
            priced = super().exact(layout, left, cutoff_s)
            if priced is None:
                return None
            priced = replace(priced, cut_uses=tuple(cut_uses(self._workload, priced).items()))
            if max((use for _, use in priced.cut_uses), default=0.0) <= limit:
                return priced
            self._overfull.append(priced)
            bound_s[rows_under(mappings.matrices, priced.matrix)] = inf


def largest_cut_use(workload: Workload, priced: Priced) -> float:
    """The largest of `cut_uses`; 0 where nothing crosses a cut."""
    return max(cut_uses(workload, priced).values(), default=0.0)


def cut_uses(workload: Workload, priced: Priced) -> dict[str, float]:
    """The share of each cut's capacity that the job and what levels state of others use in each phase.

    Parameters
    ----------
    workload
        Run as the price assumes, on any number of GPUs.
    priced
        A layout on a regular fabric.

    Returns
    -------
    dict[str, float]
        By level, kind of cut and phase: 'leaf_uplink_gradients'.
    """
    workload = workload.on(int(priced.layout.gpus))
    rows = {axis: np.asarray(row, dtype=np.int64) for axis, row in priced.matrix.items()}
    placement = placement_on(workload.cluster, priced.layout, rows)
    use = mapping_use(
        workload,
        priced.layout,
        priced.stages,
        placement=placement,
        priced=estimate_layout(workload, priced.layout, placement, priced.stages),
        places=ranks_on(workload.cluster, priced.matrix),
    )
    return {f"{cut.level}_{cut.cut}_{cut.phase}": cut.total_use for cut in use.cuts}
