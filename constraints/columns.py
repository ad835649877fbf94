"""Array arithmetic on a table of layouts that several rules need for `excess` (never for `check`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import LayoutTable
from meshwright.costmodel.layout import in_shape

IntArray = NDArray[np.int64]


def column(table: LayoutTable, name: str) -> IntArray:
    """One field of every layout, shape [n]; booleans become 0 and 1."""
    shape, rows = np.shape(table.memory_gib), table.layouts.broadcast_shape()
    if shape != rows:
        shape = np.broadcast_shapes(rows, shape)
    return in_shape(np.asarray(getattr(table.layouts, name), dtype=np.int64), shape)


def as_excess(
    values: NDArray[np.int64] | NDArray[np.bool_] | NDArray[np.float64],
) -> NDArray[np.float64]:
    """A count or a truth value as an excess."""
    return np.asarray(values, dtype=np.float64)


def set_bits(masks: IntArray) -> IntArray:
    """How many bits of each mask are set; masks are 0 or above."""
    count = np.zeros_like(masks)
    union = int(np.bitwise_or.reduce(masks, axis=None, initial=0))
    for bit in range(union.bit_length()):
        count += (masks >> bit) & 1
    return count
