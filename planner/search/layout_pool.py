"""The node pool: layouts that may still be the optimum, with their lower bounds."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds.alike import rows_by_value
from meshwright.planner.bounds.exact_cost import MappingBounds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


_OF_FAMILY = tuple(
    f.name
    for f in fields(Layout)
    if f.name not in ("recompute", "recompute_layers", "optimizer_offload", "shard_groups")
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
        """Adds array layouts of one execution with their bounds, shape [n] each."""
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
        """Of some rows, one of each family whose bound is not known."""
        unknown = rows[np.isnan(self._family_bound_s[self.family[rows]])]
        _, first = np.unique(self.family[unknown], return_index=True)
        return unknown[first]

    def bound_families(self, rows: IntArray, bound_s: FloatArray) -> None:
        """Raises the bounds of all layouts of the families of some rows to theirs, [rows]."""
        self._family_bound_s[self.family[rows]] = bound_s
        raised = np.nan_to_num(self._family_bound_s)[self.family]
        self.bound_s = np.maximum(self.bound_s, raised)

    def take(self, rows: IntArray) -> Layout:
        """Some of the layouts, as arrays."""
        return Layout(**{name: column[rows] for name, column in self._columns.items()})  # type: ignore[arg-type]

    def scalar(self, row: int) -> Layout:
        """One of the layouts, in plain numbers."""
        return Layout(**{name: column[row].item() for name, column in self._columns.items()})

    def least_s(self) -> float:
        """The least bound; infinite when the pool is empty."""
        return float(self.bound_s.min()) if len(self.bound_s) else float("inf")

    def by_bound(self, most: int, *, bounded: bool = False) -> IntArray:
        """The first so many rows of the layouts in the pool, or of those `bounded`, least bound first."""
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
        """Replaces a layout's bound by that of its mappings."""
        self.mappings[row] = bounds
        self.is_bounded[row] = True
        self.bound_s[row] = max(float(self.bound_s[row]), bounds.least_s)

    def close(self, row: int) -> None:
        """Takes a layout out of the pool."""
        self.bound_s[row] = np.inf

    def drop(self, cutoff_s: float) -> int:
        """Forgets closed layouts and those whose bound is at or above the cutoff; returns how many of the
        latter.
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
