"""Degrees with a micro-batch, in the order of their bounds, for all executions at once and for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.estimate import LayerCosts
from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds.degree_bound import ShapeTable, compute_bound_s, rows_of
from meshwright.planner.search.branches import NARROWED, Branch
from meshwright.planner.search.space import Space

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

DEGREES_TOGETHER = 1 << 16
"""Degrees worked on between two looks at the clock."""


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
            self.bound_s[rows] = self._bounds_s(table.least, rows)

    def _blocks(self, count: int) -> Iterator[slice]:
        """Rows in parts that a core's cache holds."""
        for start in range(0, count, DEGREES_TOGETHER):
            self._on_block()
            yield slice(start, start + DEGREES_TOGETHER)

    def _bounds_s(self, costs: LayerCosts, rows: IntArray | slice) -> FloatArray:
        """Of some of the degrees."""
        degrees = self._degrees.take(rows)
        bubble = self._space.smallest_bubble[np.asarray(degrees.pp)]
        own_costs = rows_of(costs, self._shapes[rows])
        return compute_bound_s(self._space.workload, degrees, own_costs, bubble)

    def by_branch(
        self, rows: IntArray, cutoff_s: Callable[[], float]
    ) -> Iterator[tuple[int, Layout, int]]:
        """Each branch, its degrees among some rows that may beat the cutoff, and its other layouts.

        Least bounds first. The cutoff is asked for each branch: it falls when one before has a price.
        """
        degrees = self._degrees.take(rows)
        bounded = []
        for index, branch in enumerate(self._branches):
            own = rows[branch.has(degrees)]
            if len(own):
                bound_s = self._bounds_s(self._table.costs[index], own)
                bounded.append((float(bound_s.min()), index, own, bound_s))
        for _, index, own, bound_s in sorted(bounded, key=lambda each: each[:2]):
            good = bound_s < cutoff_s()
            space = self._branches[index].space
            others = space.layouts_per_degrees(self._degrees.take(own[~good]))
            yield index, self._degrees.take(own[good]), int(others.sum())

    def promising(self, cutoff_s: float) -> Layout:
        """Degrees that may beat the cutoff, least bounds first."""
        order = np.argsort(self.bound_s, kind="stable")
        return self._degrees.take(order[self.bound_s[order] < cutoff_s])

    def every_layout(self) -> int:
        """How many layouts all of the degrees have in all branches."""
        blocks = self._blocks(self._degrees.broadcast_shape()[0])
        return sum(self._layouts_of(self._degrees.take(rows)) for rows in blocks)

    def layouts(self, rows: IntArray) -> int:
        """How many some of the degrees have."""
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
