"""Pods for a mapping that is good for leaves: whole leaves change places between stages.

A leaf that holds one stage only costs the same in every stage between the first and the last. Two stages
may thus exchange leaves with as many slots, one for one, one for two or two for two, and what changes is
what their pods hold. Simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over such exchanges, and over
exchanges of two whole stages; from a fixed seed, with a fixed number of tries.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.mapping.relaxation.patterns import pattern_bytes

LeafLists = tuple[list[int], list[int]]
"""Leaves of one stage, and leaves of another with as many slots."""


@dataclass(frozen=True, kw_only=True)
class ExchangeParams:
    """The schedule of the annealing; temperatures fall by the same factor from try to try."""

    first_temperature: float = 0.15
    """Of what a part of a stage costs a pod on average, above 0."""
    last_temperature: float = 0.01
    """In the same unit: an exchange that costs a tenth of a part is then as good as never made."""
    stage_share: float = 0.05
    """Share of tries, 0 to 1, that exchange two whole stages."""


DEFAULT_EXCHANGE = ExchangeParams()


def exchanged(
    problem: MappingProblem,
    counts: IntArray,
    tries: int,
    *,
    seed: int = 0,
    params: ExchangeParams = DEFAULT_EXCHANGE,
) -> IntArray:
    """The cheapest counts that are met on the way, leaves and pods together.

    Parameters
    ----------
    counts
        Slots of each stage in each leaf to begin with, shape [leaves, stages].
    tries
        Exchanges that are drawn.
    seed
        Of the random numbers.
    """
    part_bytes = problem.traffic.ring_bytes + problem.traffic.hop_bytes * problem.slots
    part_s = part_bytes * float(np.mean(problem.pod_s_per_byte))
    if part_s <= 0 or problem.stages < 2:
        return counts
    state = _State(problem, counts, random.Random(seed), params.stage_share)
    best, best_s = counts, state.cost_s
    cooling = params.last_temperature / params.first_temperature
    for attempt in range(tries):
        temperature_s = part_s * params.first_temperature * cooling ** (attempt / tries)
        if state.try_exchange(temperature_s) and state.cost_s < best_s * (1 - 1e-12):
            best, best_s = state.counts.copy(), state.cost_s
    return best


class _State:
    """Counts and what they cost."""

    def __init__(
        self, problem: MappingProblem, counts: IntArray, rng: random.Random, stage_share: float
    ) -> None:
        self._problem, self._rng, self._stage_share = problem, rng, stage_share
        self.counts = counts.copy()
        self._pod_of: list[int] = problem.pod_of.tolist()
        self._leaf_s = np.asarray(problem.leaf_s_per_byte)
        self._pod_s = np.asarray(problem.pod_s_per_byte)
        self._group_bytes = problem.group_bytes(problem.slots)
        one_stage = np.count_nonzero(counts, axis=1) == 1
        self._one_stage: list[int] = np.flatnonzero(one_stage).tolist()
        """Leaves that hold one stage only; these may change places."""
        self._size: list[int] = counts.sum(axis=1).tolist()
        self._stage: list[int] = counts.argmax(axis=1).tolist()
        self._one_stage_s = self._one_stage_costs()
        self._leaves_with: dict[tuple[int, int], list[int]] = {}
        """Leaves of one stage, by the stage and the slots."""
        for leaf in self._one_stage:
            key = (self._stage[leaf], self._size[leaf])
            self._leaves_with.setdefault(key, []).append(leaf)
        self._pod_counts = np.zeros((problem.pods, problem.stages), dtype=np.int64)
        np.add.at(self._pod_counts, problem.pod_of, counts)
        self._pod_costs_s = self._pod_costs(self._pod_counts, self._pod_s)
        leaves_s = self._leaf_s @ pattern_bytes(problem, counts)
        self.cost_s = float(leaves_s + self._pod_costs_s.sum())

    def _one_stage_costs(self) -> FloatArray:
        """What each leaf costs with all that it holds in one stage, [leaves, stages]."""
        stages = self._problem.stages
        sizes = np.minimum(self._size, self._problem.slots)
        patterns = sizes[:, None, None] * np.eye(stages, dtype=np.int64)
        sent = pattern_bytes(self._problem, patterns.reshape(-1, stages))
        return np.asarray(self._leaf_s[:, None] * sent.reshape(-1, stages))

    def _pod_costs(self, counts: IntArray, s_per_byte: FloatArray) -> FloatArray:
        """Of pods with these slots of each stage, [pods]."""
        return np.asarray(s_per_byte * pattern_bytes(self._problem, counts, self._group_bytes))

    def try_exchange(self, temperature_s: float) -> bool:
        """Draws an exchange and makes it if it pays, or by chance; whether it was made."""
        if self._rng.random() < self._stage_share:
            return self._try_stages(temperature_s)
        drawn = self._draw()
        return drawn is not None and self._try_leaves(*drawn, temperature_s)

    def _accepts(self, added_s: float, temperature_s: float) -> bool:
        return added_s <= 0 or self._rng.random() < math.exp(-added_s / temperature_s)

    def _draw(self) -> LeafLists | None:
        """Leaves to exchange; None where those drawn do not match."""
        if len(self._one_stage) < 2:
            return None
        leaf, partner = self._rng.choice(self._one_stage), self._rng.choice(self._one_stage)
        if self._stage[leaf] == self._stage[partner]:
            return None
        missing = self._size[leaf] - self._size[partner]
        if missing == 0:
            return [leaf], [partner]
        if missing > 0:
            return self._draw_more(leaf, partner, missing)
        return self._draw_more(partner, leaf, -missing)

    def _draw_more(self, larger: int, smaller: int, missing: int) -> LeafLists | None:
        """Adds a leaf to the smaller one that makes up for the slots missing, or one to each of both."""
        rng, second = self._rng, self._stage[smaller]
        fitting = self._leaves_with.get((second, missing))
        if fitting and rng.random() < 0.5:
            addition = rng.choice(fitting)
            return None if addition == smaller else ([larger], [smaller, addition])
        companion = rng.choice(self._one_stage)
        fitting = self._leaves_with.get((second, self._size[companion] + missing))
        if self._stage[companion] != self._stage[larger] or companion == larger or not fitting:
            return None
        addition = rng.choice(fitting)
        return None if addition == smaller else ([larger, companion], [smaller, addition])

    def _try_leaves(self, here: list[int], there: list[int], temperature_s: float) -> bool:
        first, second = self._stage[here[0]], self._stage[there[0]]
        moves = [(leaf, first, second) for leaf in here]
        moves += [(leaf, second, first) for leaf in there]
        pods = sorted({self._pod_of[leaf] for leaf, _, _ in moves})
        counts = self._pod_counts[pods]
        added_s = 0.0
        for leaf, old, new in moves:
            row = pods.index(self._pod_of[leaf])
            counts[row, old] -= self._size[leaf]
            counts[row, new] += self._size[leaf]
            added_s += float(self._one_stage_s[leaf, new] - self._one_stage_s[leaf, old])
        costs_s = self._pod_costs(counts, self._pod_s[pods])
        added_s += float(costs_s.sum() - self._pod_costs_s[pods].sum())
        if not self._accepts(added_s, temperature_s):
            return False
        self._pod_counts[pods] = counts
        self._pod_costs_s[pods] = costs_s
        for leaf, old, new in moves:
            self._move(leaf, old, new)
        self.cost_s += added_s
        return True

    def _move(self, leaf: int, old: int, new: int) -> None:
        size = self._size[leaf]
        self._leaves_with[old, size].remove(leaf)
        self._leaves_with.setdefault((new, size), []).append(leaf)
        self._stage[leaf] = new
        self.counts[leaf, old], self.counts[leaf, new] = 0, size

    def _try_stages(self, temperature_s: float) -> bool:
        stages = self._problem.stages
        order = np.arange(stages)
        first, second = self._rng.sample(range(stages), 2)
        order[[first, second]] = order[[second, first]]
        counts, pod_counts = self.counts[:, order], self._pod_counts[:, order]
        costs_s = self._pod_costs(pod_counts, self._pod_s)
        cost_s = float(self._leaf_s @ pattern_bytes(self._problem, counts) + costs_s.sum())
        if not self._accepts(cost_s - self.cost_s, temperature_s):
            return False
        self.counts, self._pod_counts = counts, pod_counts
        self._pod_costs_s, self.cost_s = costs_s, cost_s
        # A permutation that is its own inverse: `order` also says where each stage went.
        self._stage = order[self._stage].tolist()
        moved = {}
        for (stage, size), leaves in self._leaves_with.items():
            moved[int(order[stage]), size] = leaves
        self._leaves_with = moved
        return True
