"""The node pool: layouts that may still be the optimum, with their lower bounds."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.planner.bounds.exact_cost import MappingBounds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


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
        self.mappings += [None] * len(bound_s)
        self.is_bounded = np.concatenate([self.is_bounded, np.zeros(len(bound_s), dtype=bool)])

    def take(self, rows: IntArray) -> Layout:
        """Some of the layouts, as arrays."""
        return Layout(**{name: column[rows] for name, column in self._columns.items()})  # type: ignore[arg-type]

    def scalar(self, row: int) -> Layout:
        """One of the layouts, in plain numbers."""
        return Layout(**{name: column[row].item() for name, column in self._columns.items()})

    def least_s(self) -> float:
        """The least bound; infinite when the pool is empty."""
        return float(self.bound_s.min()) if len(self.bound_s) else float("inf")

    def by_bound(self) -> IntArray:
        """Rows of the layouts in the pool, least bound first."""
        order = np.argsort(self.bound_s, kind="stable")
        return order[np.isfinite(self.bound_s[order])]

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
            self.is_bounded = self.is_bounded[keep]
            self.mappings = [
                bounds for bounds, stays in zip(self.mappings, keep, strict=True) if stays
            ]
        return dropped
