"""Prices of a layout under placements that are given."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import LayoutPricing
from meshwright.planner.bounds.matrices import Matrices
from meshwright.planner.bounds.pricing import CostModelPricing

PROFILE = "profile"
"""The table of a layout's mappings has one column: the number of its placement."""


class PlacedAs(CostModelPricing):
    """Prices of a layout under given placements, arrays [k, levels]; its mappings are their numbers."""

    def __init__(self, workload: Workload, placement: Placement) -> None:
        super().__init__(workload)
        self._placement = placement

    def _pricing_of(self, layout: Layout) -> LayoutPricing:
        return _PlacedPricing(self._workload.on(int(layout.gpus)), layout, self._placement)


class _PlacedPricing(LayoutPricing):
    def __init__(self, workload: Workload, layout: Layout, placement: Placement) -> None:
        super().__init__(workload, layout)
        self._placement = placement

    def _placed(self, table: Matrices) -> Placement:
        rows = table[PROFILE][:, 0]
        return Placement(**{name: np.asarray(m)[rows] for name, m in vars(self._placement).items()})
