"""Swaps inside stages: which replica has which of their slots, so that pipelines reach few pods and leaves.

A swap gives two replicas each other's slots in a run of stages. No slot comes to another stage, so that rings
and what stages touch stay as they are; what the two replicas touch changes, and the hops at the run's ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from meshwright.planner.mapping.problem import (
    FloatArray,
    IntArray,
    MappingProblem,
    held_by,
    loads_of,
    spread_of,
)
from meshwright.planner.mapping.spread.bound import Reach

POD_WEIGHT, LEAF_WEIGHT = 1e8, 1e4
"""Of a block too many, beside hops, which come to 1 where all that a swap can touch is apart."""
SWEEPS, MOST_PAIRS = 6, 5_000_000
"""Times that every replica is looked at, fewer where there are more than so many pairs of slots in all."""
LEAST_GAIN = 1e-9
"""Of a swap; less is rounding."""
NO_HOPS, HOPS, HOPS_FIRST = 0.0, 1.0, 1e12
"""What hops weigh: nothing, less than blocks, or more than any block."""
Run = tuple[int, int]
"""Stages from the first to before the second."""


class Swaps:
    """An assignment that changes by swaps, and what each would gain."""

    def __init__(
        self, problem: MappingProblem, assignment: IntArray, limits: Reach, hops: float
    ) -> None:
        """`limits` are the pods and the leaves that a replica may touch."""
        self._problem = problem
        self.leaves, pods = assignment.copy(), problem.pod_of[assignment]
        self._levels = [
            _Level(pods, problem.pods, limits[0], POD_WEIGHT),
            _Level(self.leaves, len(problem.leaf_slots), limits[1], LEAF_WEIGHT),
        ]
        t, costs = problem.traffic, (problem.pod_s_per_byte, problem.leaf_s_per_byte)
        most = 16.0 * max(t.hop_bytes, t.wrap_bytes) * sum(max(cost, default=0.0) for cost in costs)
        self._hop = [hops * np.asarray(cost) / (most or 1.0) for cost in costs] if hops else []
        self.least_gain = LEAST_GAIN * max(1.0, hops)

    def over(self) -> IntArray:
        """Replicas that touch more than they may."""
        return np.flatnonzero(
            np.any([level.touched > level.most for level in self._levels], axis=0)
        )

    def best(self, run: Run, replica: int) -> tuple[float, int]:
        """What the best swap of a replica's run changes (negative is better), and with whose."""
        change = np.zeros(self._problem.slots)
        for level in self._levels:
            if level.most < self._problem.stages:
                change += level.weight * level.change(run, replica)
        if self._hop:
            change += self._hops(run, replica)
        change[replica] = 0.0
        partner = int(np.argmin(change))
        return float(change[partner]), partner

    def swap(self, run: Run, replica: int, partner: int) -> None:
        """Swaps two replicas' slots in a run of stages."""
        for level in self._levels:
            level.swap(run, replica, partner)

    def _hops(self, run: Run, replica: int) -> FloatArray:
        """Hops to the stages before and after the run, by whom it is swapped with."""
        change = np.zeros(self._problem.slots)
        for inside, near, sent in self._ends(run):
            for hop, level in zip(self._hop, self._levels, strict=True):
                row, beside = level.where[inside], level.where[near]
                apart = _apart(hop, row, beside)
                swapped = _apart(hop, row, beside[replica]) + _apart(hop, row[replica], beside)
                change += sent * (swapped - apart - apart[replica])
        return change

    def _ends(self, run: Run) -> Iterator[tuple[int, int, float]]:
        """Stages in a run with their neighbours outside it, and the bytes between them."""
        t, stages = self._problem.traffic, self._problem.stages
        first, last = run[0], run[1] - 1
        if first > 0:
            yield first, first - 1, t.hop_bytes
        if last < stages - 1:
            yield last, last + 1, t.hop_bytes
        if t.wrap_bytes and (first == 0) != (last == stages - 1):
            yield (first, stages - 1, t.wrap_bytes) if first == 0 else (last, 0, t.wrap_bytes)


class _Level:
    """The blocks of one level: where every slot is, and what every replica holds and touches."""

    def __init__(self, where: IntArray, blocks: int, most: int, weight: float) -> None:
        self.where, self.most, self.weight = where, most, weight
        self._blocks = blocks
        self._held = held_by(where.T, blocks)
        self.touched = np.asarray((self._held > 0).sum(axis=1), dtype=np.int64)

    def change(self, run: Run, replica: int) -> FloatArray:
        """Blocks beyond the limit, both replicas', by whom the run is swapped with."""
        part = held_by(self.where[run[0] : run[1]].T, self._blocks)
        touched = (self._held[replica] - part[replica] + part > 0).sum(axis=1)
        touched_by_partner = (self._held - part + part[replica] > 0).sum(axis=1)
        before = np.maximum(self.touched[replica] - self.most, 0) + np.maximum(
            self.touched - self.most, 0
        )
        after = np.maximum(touched - self.most, 0) + np.maximum(touched_by_partner - self.most, 0)
        return np.asarray(after - before, dtype=np.float64)

    def swap(self, run: Run, replica: int, partner: int) -> None:
        rows = slice(*run)
        self.where[rows, [replica, partner]] = self.where[rows, [partner, replica]]
        self._held[[replica, partner]] = held_by(self.where[:, [replica, partner]].T, self._blocks)
        self.touched[[replica, partner]] = (self._held[[replica, partner]] > 0).sum(axis=1)


def _apart(hop: FloatArray, first: IntArray, second: IntArray) -> FloatArray:
    return np.where(first == second, 0.0, hop[first] + hop[second])


def gathered(
    problem: MappingProblem,
    assignment: IntArray,
    limits: Reach,
    heights: Sequence[int],
    hops: float = NO_HOPS,
) -> IntArray | None:
    """Swaps until no replica touches more pods and leaves than it may; None where swaps do not get there.

    Single stages are swapped, and bands of these heights.
    """
    state = Swaps(problem, assignment, limits, hops)
    ends = np.cumsum([0, *heights]).tolist()
    runs = sorted({*pairwise(ends), *((s, s + 1) for s in range(problem.stages))})
    for _ in range(SWEEPS):
        over = state.over()
        if not len(over):
            return state.leaves
        # Where most replicas are over, bands do not fit and swaps hardly help.
        if (not hops and 2 * len(over) > problem.slots) or not _sweep(state, over, runs):
            return None
    return None if len(state.over()) else state.leaves


def settled(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Swaps that shorten hops while no replica comes to touch more than the most do now.

    Where groups span several slots of a stage the assignment stays as it is.
    """
    if max(problem.traffic.expert_slots, problem.traffic.context_slots) > 1:
        return assignment
    limits = (
        spread_of(problem.pod_of[assignment]).pipeline_max,
        spread_of(assignment).pipeline_max,
    )
    if loads_of(problem, assignment).total_s == 0:
        return assignment
    state = Swaps(problem, assignment, limits, HOPS)
    runs = [(stage, stage + 1) for stage in range(problem.stages)]
    for _ in range(max(1, min(SWEEPS, MOST_PAIRS // (problem.needed * problem.slots)))):
        if not _sweep(state, np.arange(problem.slots), runs):
            break
    return state.leaves


def tidied(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """Pipelines that touch the most pods, or leaves, made to touch fewer while no hop grows longer.

    What is sent stays the same, or less. Where groups span several slots the assignment stays as it is.
    """
    best = settled(problem, assignment)
    if max(problem.traffic.expert_slots, problem.traffic.context_slots) > 1:
        return best
    most_s = loads_of(problem, best).total_s * (1 + 1e-12)
    for pods in (True, False):
        while True:
            most = (spread_of(problem.pod_of[best]).pipeline_max, spread_of(best).pipeline_max)
            limits = (most[0] - 1, problem.stages) if pods else (most[0], most[1] - 1)
            tighter = (
                None
                if min(limits) < 1
                else gathered(problem, best, limits, [problem.stages], HOPS_FIRST)
            )
            if tighter is None or loads_of(problem, tighter).total_s > most_s:
                break
            best = tighter
    return best


def _sweep(state: Swaps, replicas: IntArray, runs: Sequence[Run]) -> bool:
    """The best swap of each of these replicas, one after the other; whether any helped."""
    gained = False
    for replica in replicas.tolist():
        moves = [(*state.best(run, replica), run) for run in runs]
        change, partner, run = min(moves, key=lambda move: move[0])
        if change < -state.least_gain:
            state.swap(run, replica, partner)
            gained = True
    return gained
