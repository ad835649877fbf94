"""Layouts under each of their mappings on a regular fabric, as one table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.nvlink_domain import binds_mappings, keeps_inside
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layout import AXES, Layout, Placement
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.alike import rows_by_value
from meshwright.planner.bounds.matrices import Matrices, matrices, matrices_of, pick

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

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
    inside: BoolArray
    """Which of these mappings keep in a domain what the workload wants there."""

    def by_layout(self, seconds: FloatArray) -> list[FloatArray]:
        """Of the mappings of each layout."""
        return np.split(seconds, np.cumsum(self.counts)[:-1])

    def least(self, seconds: FloatArray) -> FloatArray:
        """The least of each layout's mappings that keep inside what they must, [layouts].

        0 where it has no mapping, infinite where all leave a domain.
        """
        least_s, has_any = np.zeros(len(self.counts)), self.counts > 0
        starts = np.cumsum(self.counts) - self.counts
        own = np.where(self.inside, seconds, np.inf)
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
    degrees = np.stack([np.asarray(getattr(layouts, axis))[first] for axis in AXES], axis=1)
    factors = level_factors(workload.cluster, gpus)
    tables = [matrices_of(each, factors, inside=("tp",)) for each in degrees.tolist()]
    sizes = np.array([len(table["tp"]) for table in tables])
    counts = sizes[table_of]
    own = [tables[index] for index in table_of]
    if not counts.sum():
        return MappedLayouts(own, counts, None, np.zeros(0, dtype=np.bool_))
    joined = {axis: np.concatenate([table[axis] for table in tables]) for axis in AXES}
    placement = placement_on(workload.cluster, layouts.take(np.repeat(first, sizes)), joined)
    # Row of the joined tables that each mapping of each layout is.
    starts, own_starts = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(starts[table_of] - own_starts, counts)
    placed = {name: column[rows] for name, column in vars(placement).items()}
    each = layouts.take(np.repeat(np.arange(len(counts)), counts))
    context = make_context(workload.on(gpus), each, Placement(**placed))
    return MappedLayouts(own, counts, context, keeps_inside(workload, each, context.placement))


def mappings_of(workload: Workload, layout: Layout) -> Matrices:
    """Every parallelism matrix of a layout that keeps tensor groups inside the innermost level, and those
    that the workload names.
    """
    factors = level_factors(workload.cluster, int(layout.gpus))
    table = matrices(layout, factors, inside=("tp",))
    if not binds_mappings(workload):
        return table
    placement = placement_on(workload.cluster, layout, table)
    return pick(table, np.flatnonzero(keeps_inside(workload, layout, placement)))
