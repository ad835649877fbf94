"""Prices of layouts whose mappings onto parts of nodes are listed and counted; bounds of all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.constraints.nvlink_domain import keeps_inside
from meshwright.costmodel.collectives.on_levels import best_beyond
from meshwright.costmodel.constants.calibrated import calibrated_constants
from meshwright.costmodel.constants.rates import links_of
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.workload import Workload
from meshwright.errors import OutOfTimeError
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.mapping.choice.counted import (
    CountedMappings,
    counted_mappings,
    takes_parts_of_nodes,
)
from meshwright.planner.mapping.choice.placed_as import PROFILE, PlacedAs
from meshwright.planner.mapping.choice.profile_bounds import profile_bounds
from meshwright.planner.mapping.instance import Instance

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Placements of one layout, each of which stands for itself."""

    placement: Placement
    apart: bool = True


class PartsOfNodes:
    """The mappings of layouts that `takes_parts_of_nodes`, under one execution."""

    def __init__(self, workload: Workload, limit_gib: float) -> None:
        self._workload, self._limit_gib = workload, limit_gib
        self.unlisted_s = inf
        """Of the layouts bounded so far: no mapping that is not listed is faster than this."""
        self._is_monotone: dict[int, bool] = {}
        self.deadline = inf
        """On the clock of `time.monotonic`; behind it no mappings are counted for bounds."""

    def has(self, layout: Layout, slots_of: Callable[[Layout], Instance | None]) -> bool:
        """Whether a layout's mappings are counted; `slots_of` has its slots, asked where they matter."""
        return takes_parts_of_nodes(self._workload.cluster, layout, slots_of)

    def counted(self, layout: Layout) -> CountedMappings | None:
        """None where no mapping keeps tensor groups inside nodes."""
        experts = self._workload.model.moe is not None
        return counted_mappings(self._workload.cluster, layout, experts=experts)

    def bounds(
        self, layouts: Layout, packed_s: FloatArray, numbers_of_groups: Sequence[int]
    ) -> list[MappingBounds]:
        """Bounds of every listed mapping of some layouts, [n]; the others lower `unlisted_s`.

        `packed_s` are bounds of the layouts, whatever their mapping. Raises OutOfTimeError behind the
        deadline.
        """
        rows = range(layouts.broadcast_shape()[0])
        found = {}
        for row in rows:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            found[row] = self.counted(layouts.scalar(row))
        counted = {row: one for row, one in found.items() if one is not None}
        own = layouts.take(np.array(list(counted), dtype=np.int64))
        listed = [_Rows(placement=one.placement) for one in counted.values()]
        seconds = profile_bounds(self._workload, own, listed, self._limit_gib, numbers_of_groups)
        every = [np.zeros(0)] * len(rows)
        for (row, one), bound_s in zip(counted.items(), seconds, strict=True):
            inside = keeps_inside(self._workload, layouts.scalar(row), one.placement)
            every[row] = np.where(inside, np.maximum(bound_s, packed_s[row]), inf)
        open_rows = [row for row, one in counted.items() if not self._is_all(layouts, row, one)]
        others = self._others_s(
            layouts, {row: counted[row] for row in open_rows}, numbers_of_groups
        )
        for row, bound_s in zip(open_rows, others, strict=True):
            self.unlisted_s = min(self.unlisted_s, max(bound_s, float(packed_s[row])))
        return [
            MappingBounds(matrices={PROFILE: np.arange(len(bound_s))[:, None]}, bound_s=bound_s)
            for bound_s in every
        ]

    def _others_s(
        self,
        layouts: Layout,
        counted: dict[int, CountedMappings],
        numbers_of_groups: Sequence[int],
    ) -> list[float]:
        """Never above the price of any mapping at all, of some of the layouts."""
        own = layouts.take(np.array(list(counted), dtype=np.int64))
        most = [_Rows(placement=one.most) for one in counted.values()]
        bounds = profile_bounds(
            self._workload, own, most, self._limit_gib, numbers_of_groups, or_less=True
        )
        return [float(bound_s[0]) for bound_s in bounds]

    def _is_all(self, layouts: Layout, row: int, counted: CountedMappings) -> bool:
        """Whether no mapping that is not listed is faster than all that are.

        One of these reaches as far as any, and nothing is faster for reaching less far.
        """
        gpus = int(layouts.scalar(row).gpus)
        if gpus not in self._is_monotone:
            levels = fabric_levels(self._workload.cluster, gpus)
            links = links_of(levels, calibrated_constants(self._workload))
            best = best_beyond(links)
            self._is_monotone[gpus] = links.rails is None and all(
                np.array_equal(getattr(links, name), getattr(best, name))
                for name in ("bytes_per_s", "all_to_all_bytes_per_s", "latency_s", "half_bytes")
            )
        return counted.most_is_reached and self._is_monotone[gpus]

    def exact(
        self, layout: Layout, mappings: MappingBounds, cutoff_s: float
    ) -> tuple[Priced | None, float]:
        """The fastest listed mapping, None where it does not beat the cutoff; and a bound of all others."""
        counted = self.counted(layout)
        if counted is None:
            return None, inf
        one = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
        others_s = inf
        if not self._is_all(one, 0, counted):
            others_s = self._others_s(one, {0: counted}, ())[0]
        inside = keeps_inside(self._workload, layout, counted.placement)
        bound_s = np.where(inside, mappings.bound_s, inf)
        pricing = PlacedAs(self._workload, counted.placement)
        priced = pricing.exact(layout, replace(mappings, bound_s=bound_s), cutoff_s)
        if priced is None:
            return None, others_s
        ranks = counted.ranks(priced.matrix[PROFILE][0])
        return replace(priced, matrix={}, ranks=ranks), others_s
