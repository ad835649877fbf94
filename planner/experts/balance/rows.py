"""Independent packings of one shape, solved together: a row is a layer, or one node of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.packing import SlotPacking, has_duplicates
from meshwright.planner.experts.problem import Loads, Slots

EXACT = 1e-6
"""Loads are rounded to a ten-millionth of the mean: a smaller gap is none."""

OPEN = 0.25
"""Share of the gap that was asked for above which a row is searched further: the mean ends well within it."""
AIM = 0.15
"""Share of that gap at which a packing is not improved further."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Loads [rows, windows, experts] in units of the mean GPU load of the layer; `floor` [rows]."""

    loads: Loads
    slots: int
    gpus: int
    floor: Loads
    """What the row's value need not be below: what another node of the layer reaches at best."""
    spread_nodes: int = 1

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return replace(self, loads=self.loads[rows], floor=self.floor[rows])


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Slots [rows, gpus, slots of a GPU], value = largest GPU load over the mean [rows], its bound [rows]."""

    slots: Slots
    value: Loads
    bound: Loads

    @property
    def gap(self) -> Loads:
        """Value over bound, minus 1; 0 below what rounding can tell."""
        gap = self.value / self.bound - 1
        return np.asarray(np.where(gap <= EXACT, 0.0, gap))


@dataclass
class State:
    """Best slots, value and bound of every row so far."""

    slots: Slots
    value: Loads
    bound: Loads

    def open(self, rows: Rows, gap: float) -> NDArray[np.int64]:
        """Rows whose value is more than `gap` above what is known to be needed."""
        return np.flatnonzero(self.value > np.maximum(self.bound, rows.floor) * (1 + gap))

    def offer(self, rows: Rows, index: NDArray[np.int64], found: Slots) -> NDArray[np.bool_]:
        """Keeps what is better and whole; says where that was."""
        part = rows.take(index)
        reached = value_of(part, found)
        reached[broken(part, found)] = np.inf
        better = np.asarray(reached < self.value[index])
        self.slots[index[better]], self.value[index[better]] = found[better], reached[better]
        return better


def value_of(rows: Rows, slots: Slots) -> Loads:
    """Largest GPU load over the mean, worst window, [rows]."""
    return np.asarray(SlotPacking(slots=slots, loads=rows.loads).gpu_loads().max(axis=(1, 2)))


def broken(rows: Rows, slots: Slots) -> NDArray[np.bool_]:
    """Rows whose slots hold an expert twice on a GPU or break the spread."""
    bad = has_duplicates(slots)
    if rows.spread_nodes > 1:
        nodes = rows.spread_nodes
        experts = rows.loads.shape[2]
        for row, placed in enumerate(slots):
            by_node = placed.reshape(nodes, -1)
            counts = np.stack([np.bincount(node, minlength=experts) for node in by_node])
            bad[row] |= bool((counts.max(axis=0) > -(-counts.sum(axis=0) // nodes)).any())
    return np.asarray(bad)


def by_layer(loads: Loads, gpus: int) -> Loads:
    """Loads over the mean GPU load, [layers, windows, experts], from [windows, layers, experts]."""
    return np.ascontiguousarray(
        np.swapaxes(loads * (gpus / loads.sum(axis=2, keepdims=True)), 0, 1)
    )
