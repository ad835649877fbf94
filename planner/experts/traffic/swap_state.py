"""Replicas on GPUs while they change places: what their traffic costs, and loads, kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.problem import Ids, Loads, Slots
from meshwright.planner.experts.traffic.swap_terms import Term


@dataclass(frozen=True, kw_only=True)
class Room:
    """How often an expert may lie in a block of `gpus` GPUs, [experts]."""

    gpus: int
    most_replicas: Slots


class SwapState:
    """Where every replica (or other unit, such as a group of experts) is."""

    def __init__(self, gpu: Ids, *, expert: Ids, weight: Loads, terms: tuple[Term, ...]) -> None:
        """`gpu` and `expert` [units]; `weight` [windows, units] is load over the mean GPU load."""
        self.gpu = gpu.copy()
        self._expert, self._weight, self._terms = expert, weight, terms
        self._gpus = int(gpu.max()) + 1
        self._same = expert[:, None] == expert[None, :]

    def cost(self) -> float:
        """The terms' sum."""
        return sum(term.cost() for term in self._terms)

    def change(self) -> Loads:
        """What the terms' sum is more if two units change places, [units, units]."""
        return np.asarray(sum(term.change() for term in self._terms))

    def loads(self, size: int) -> Loads:
        """Load of every block of `size` GPUs in mean GPU loads, [windows, blocks]."""
        index = self.gpu // size
        return np.stack(
            [np.bincount(index, weights=w, minlength=self._gpus // size) for w in self._weight]
        )

    def overload(self, cap: float, size: int) -> float:
        """Load above `cap` of blocks of `size` GPUs, summed over blocks and windows, in mean GPU loads."""
        return float(np.maximum(self.loads(size) - cap, 0).sum())

    def overload_change(self, cap: float, size: int) -> Loads:
        """Overload more if two units change places, [units, units]."""
        place = self.gpu // size
        total = np.zeros((len(place), len(place)))
        for weight, load in zip(self._weight, self.loads(size), strict=True):
            above = load[place] - cap
            after = (above - weight)[:, None] + weight[None, :]
            np.maximum(after, 0.0, out=after)
            after -= np.maximum(above, 0.0)[:, None]
            total += after
            total += after.T
        total[place[:, None] == place[None, :]] = 0.0
        return total

    def barred(self, rooms: tuple[Room, ...]) -> NDArray[np.bool_]:
        """Pairs that may not change places: one's expert has no room where the other is, [units, units]."""
        expert, bad = self._expert, self._same
        for room in rooms:
            place = self.gpu // room.gpus
            replicas = np.zeros((self._gpus // room.gpus, len(room.most_replicas)), dtype=np.int64)
            np.add.at(replicas, (place, expert), 1)
            full = replicas >= room.most_replicas
            stuck = full[place[None, :], expert[:, None]] & (place[:, None] != place[None, :])
            bad = bad | stuck | stuck.T
        return np.asarray(bad)

    def swap(self, a: int, b: int) -> None:
        """Units a and b change places."""
        for term in self._terms:
            term.swap(a, b)
        self.gpu[a], self.gpu[b] = self.gpu[b], self.gpu[a]
