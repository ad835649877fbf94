"""Layouts under each of their mappings on a regular fabric, as one table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.nvlink_domain import keeps_inside
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import AXES, Layout, Placement
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.alike import rows_by_value
from meshwright.planner.bounds.matrices import Matrices, matrices, matrices_of, pick

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

OF_PLACEMENTS = (*AXES, "ep", "etp")
"""Fields of a layout on which its mappings and placements depend."""


class MappedLayouts(NamedTuple):
    """Layouts under each of their mappings."""

    tables: list[Matrices]
    """Of each layout."""
    counts: IntArray
    """Mappings of each layout."""
    context: Context | None
    """Of all mappings of the first layout, then of the next; None where there are none."""

    def least(self, seconds: FloatArray) -> FloatArray:
        """The least of each layout's mappings, [layouts]; 0 where it has none."""
        least_s, has_any = np.zeros(len(self.counts)), self.counts > 0
        starts = np.cumsum(self.counts) - self.counts
        own = np.broadcast_to(seconds, (int(self.counts.sum()),))
        least_s[has_any] = np.minimum.reduceat(own, starts[has_any])
        return least_s


def mapped_layouts(workload: Workload, gpus: int, layouts: Layout) -> MappedLayouts:
    """Some layouts under each of their mappings.

    Parameters
    ----------
    workload
        Its cluster, and the axes that are to stay inside a domain.
    gpus
        Of the allocation that all of the layouts use.
    layouts
        Shape [n].

    Returns
    -------
    MappedLayouts
        Layouts with the same degrees share their placements.
    """
    first, table_of = rows_by_value(layouts, OF_PLACEMENTS)
    tables = _tables(workload, gpus, layouts.take(first))
    sizes = np.array([len(table["tp"]) for table in tables])
    counts = sizes[table_of]
    own = [tables[index] for index in table_of]
    if not counts.sum():
        return MappedLayouts(own, counts, None)
    joined = {axis: np.concatenate([table[axis] for table in tables]) for axis in AXES}
    placement = placement_on(workload.cluster, layouts.take(np.repeat(first, sizes)), joined)
    # Row of the joined tables that each mapping of each layout is.
    starts, own_starts = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(starts[table_of] - own_starts, counts)
    placed = {name: column[rows] for name, column in vars(placement).items()}
    each = layouts.take(np.repeat(np.arange(len(counts)), counts))
    return MappedLayouts(own, counts, make_context(workload.on(gpus), each, Placement(**placed)))


def mappings_of(workload: Workload, layout: Layout) -> Matrices:
    """Every parallelism matrix of a layout that keeps tensor groups inside the innermost level, and those
    that the workload names.
    """
    factors = level_factors(workload.cluster, int(layout.gpus))
    table = matrices(layout, factors, inside=("tp",))
    if not workload.inside_domain:
        return table
    placement = placement_on(workload.cluster, layout, table)
    return pick(table, np.flatnonzero(keeps_inside(workload, layout, placement)))


def _tables(workload: Workload, gpus: int, layouts: Layout) -> list[Matrices]:
    """`mappings_of` each of some layouts on one allocation."""
    if workload.inside_domain:
        rows = range(layouts.broadcast_shape()[0])
        return [mappings_of(workload, layouts.scalar(row)) for row in rows]
    factors = level_factors(workload.cluster, gpus)
    degrees = np.stack([np.asarray(getattr(layouts, axis)) for axis in AXES], axis=1)
    return [matrices_of(each, factors, inside=("tp",)) for each in degrees.tolist()]
