"""Prices under `--max-cut-use`: a mapping that fills a cut beyond it is ruled out, the next best is taken.

A mapping is judged at its fastest split: a step is not slowed down on purpose so that its cuts look emptier.
"""

from __future__ import annotations

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
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.choice.pricing import MappedPricing
from meshwright.planner.mapping.crossing.cuts import mapping_use


def pricing_of(workload: Workload) -> CostModelPricing:
    """Prices by every mapping of a regular fabric, or by a mapping of each layout on an irregular one."""
    if is_irregular(workload.cluster):
        return MappedPricing(workload)
    return CutLimitedPricing(workload) if workload.max_cut_use < 1 else CostModelPricing(workload)


class CutLimitedPricing(CostModelPricing):
    """Prices by the best mapping of a regular fabric that keeps to the workload's `max_cut_use`."""

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """As without the limit, but of the mappings that keep to it; bounds stay bounds of what is left."""
        limit, bound_s = self._workload.max_cut_use * ROUNDING, np.array(mappings.bound_s)
        while True:
            left = replace(mappings, bound_s=bound_s)
            priced = super().exact(layout, left, cutoff_s)
            if priced is None or largest_cut_use(self._workload, priced) <= limit:
                return priced
            same = [
                np.all(mappings.matrices[axis] == row, axis=1)
                for axis, row in priced.matrix.items()
            ]
            bound_s[np.logical_and.reduce(same)] = inf


def largest_cut_use(workload: Workload, priced: Priced) -> float:
    """The largest share of a cut's capacity that the job and what levels state of others use in a phase.

    Parameters
    ----------
    workload
        Run as the price assumes, on any number of GPUs.
    priced
        A layout on a regular fabric.
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
    return max((cut.total_use for cut in use.cuts), default=0.0)
