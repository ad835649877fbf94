"""Pods for a mapping that is good for leaves: whole leaves change places between stages.

A leaf that holds one stage only costs the same in every stage between the first and the last. Two stages
may thus exchange leaves with as many slots, one for one, one for two or two for two, and what changes is
what their pods hold. Simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over such exchanges, and over
exchanges of two whole stages; from a fixed seed, with a fixed number of tries.
"""

from __future__ import annotations

import math
import random

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.patterns import pattern_bytes

HOTTEST, COLDEST = 0.15, 0.01
"""Temperatures, of what a part of a stage costs a pod on average."""
STAGE_TRIES = 0.05
"""Share of tries that exchange stages."""


def exchanged(problem: MappingProblem, counts: IntArray, tries: int, seed: int = 0) -> IntArray:
    """The cheapest counts [leaves, stages] met on the way."""
    state = _State(problem, counts, random.Random(seed))
    part_s = problem.traffic.ring_bytes + problem.traffic.hop_bytes * problem.slots
    part_s *= float(np.mean(problem.pod_s_per_byte))
    if part_s <= 0 or problem.stages < 2:
        return counts
    best, best_s = counts, state.cost_s
    for attempt in range(tries):
        heat = part_s * HOTTEST * (COLDEST / HOTTEST) ** (attempt / tries)
        if state.try_one(heat) and state.cost_s < best_s * (1 - 1e-12):
            best, best_s = state.counts.copy(), state.cost_s
    return best


class _State:
    """Counts and what they cost."""

    def __init__(self, problem: MappingProblem, counts: IntArray, rng: random.Random) -> None:
        self._problem, self._rng, self.counts = problem, rng, counts.copy()
        self._pod_of: list[int] = problem.pod_of.tolist()
        self._leaf_s = np.asarray(problem.leaf_s_per_byte)
        self._pod_s = np.asarray(problem.pod_s_per_byte)
        self._ring: FloatArray = problem.group_bytes(problem.slots)
        alone = np.count_nonzero(counts, axis=1) == 1
        self._alone: list[int] = np.flatnonzero(alone).tolist()
        self._size: list[int] = counts.sum(axis=1).tolist()
        self._stage: list[int] = counts.argmax(axis=1).tolist()
        self._alone_s = self._costs_alone()
        self._shelf: dict[tuple[int, int], list[int]] = {}
        for leaf in self._alone:
            self._shelf.setdefault((self._stage[leaf], self._size[leaf]), []).append(leaf)
        self._held = np.zeros((problem.pods, problem.stages), dtype=np.int64)
        np.add.at(self._held, problem.pod_of, counts)
        self._each_pod = self._pod_costs(self._held, self._pod_s)
        self.cost_s = float(self._leaf_s @ pattern_bytes(problem, counts) + self._each_pod.sum())

    def _costs_alone(self) -> FloatArray:
        """What each leaf costs with all that it holds in one stage, [leaves, stages]."""
        alone = np.array(self._size)[:, None, None] * np.eye(self._problem.stages, dtype=np.int64)
        largest = self._problem.slots
        sent = pattern_bytes(
            self._problem, np.minimum(alone, largest).reshape(-1, self._problem.stages)
        )
        return np.asarray(self._leaf_s[:, None] * sent.reshape(alone.shape[:2]))

    def _pod_costs(self, counts: IntArray, pod_s: FloatArray) -> FloatArray:
        """Of pods with these slots of each stage, [pods]."""
        t = self._problem.traffic
        sent = self._ring[counts].sum(axis=1) + t.hop_bytes * np.abs(np.diff(counts, axis=1)).sum(
            axis=1
        )
        return np.asarray(pod_s * (sent + t.wrap_bytes * np.abs(counts[:, -1] - counts[:, 0])))

    def try_one(self, heat: float) -> bool:
        """Draws an exchange and makes it, if it pays or by chance."""
        if self._rng.random() < STAGE_TRIES:
            return self._try_stages(heat)
        drawn = self._draw()
        return drawn is not None and self._try_leaves(*drawn, heat)

    def _accepts(self, more_s: float, heat: float) -> bool:
        return more_s <= 0 or self._rng.random() < math.exp(-more_s / heat)

    def _draw(self) -> tuple[list[int], list[int]] | None:
        """Leaves of one stage and leaves of another with as many slots."""
        rng = self._rng
        if len(self._alone) < 2:
            return None
        leaf, partner = rng.choice(self._alone), rng.choice(self._alone)
        first, second = self._stage[leaf], self._stage[partner]
        if first == second:
            return None
        short = self._size[leaf] - self._size[partner]
        if short == 0:
            return [leaf], [partner]
        if short < 0:
            leaf, partner, first, second, short = partner, leaf, second, first, -short
        shelf = self._shelf.get((second, short))
        if shelf and rng.random() < 0.5:
            third = rng.choice(shelf)
            return None if third == partner else ([leaf], [partner, third])
        third = rng.choice(self._alone)
        shelf = self._shelf.get((second, self._size[third] + short))
        if self._stage[third] != first or third == leaf or not shelf:
            return None
        fourth = rng.choice(shelf)
        return None if fourth == partner else ([leaf, third], [partner, fourth])

    def _try_leaves(self, here: list[int], there: list[int], heat: float) -> bool:
        first, second = self._stage[here[0]], self._stage[there[0]]
        pods = sorted({self._pod_of[leaf] for leaf in (*here, *there)})
        counts, more_s = self._held[pods], 0.0
        for leaves, old, new in ((here, first, second), (there, second, first)):
            for leaf in leaves:
                row, size = pods.index(self._pod_of[leaf]), self._size[leaf]
                counts[row, old] -= size
                counts[row, new] += size
                more_s += float(self._alone_s[leaf, new] - self._alone_s[leaf, old])
        each = self._pod_costs(counts, self._pod_s[pods])
        more_s += float(each.sum() - self._each_pod[pods].sum())
        if not self._accepts(more_s, heat):
            return False
        self._held[pods], self._each_pod[pods] = counts, each
        for leaves, old, new in ((here, first, second), (there, second, first)):
            for leaf in leaves:
                self._move(leaf, old, new)
        self.cost_s += more_s
        return True

    def _move(self, leaf: int, old: int, new: int) -> None:
        size = self._size[leaf]
        self._shelf[old, size].remove(leaf)
        self._shelf.setdefault((new, size), []).append(leaf)
        self._stage[leaf] = new
        self.counts[leaf, old], self.counts[leaf, new] = 0, size

    def _try_stages(self, heat: float) -> bool:
        stages = self._problem.stages
        order = np.arange(stages)
        first, second = self._rng.sample(range(stages), 2)
        order[[first, second]] = order[[second, first]]
        counts, pod_counts = self.counts[:, order], self._held[:, order]
        each = self._pod_costs(pod_counts, self._pod_s)
        cost_s = float(self._leaf_s @ pattern_bytes(self._problem, counts) + each.sum())
        if not self._accepts(cost_s - self.cost_s, heat):
            return False
        self.counts, self._held, self._each_pod, self.cost_s = counts, pod_counts, each, cost_s
        swap = {first: second, second: first}
        self._stage = [swap.get(stage, stage) for stage in self._stage]
        self._shelf = {
            (swap.get(stage, stage), size): leaves for (stage, size), leaves in self._shelf.items()
        }
        return True
