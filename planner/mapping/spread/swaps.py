"""Swaps inside stages: which replica has which of their slots, so that pipelines reach few pods and leaves.

A swap gives two replicas each other's slots in a run of stages. No slot comes to another stage, so that rings
and what stages touch stay as they are; what the two replicas touch changes, and the hops at the run's ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

NO_HOPS, HOPS, HOPS_FIRST = 0.0, 1.0, 1e12
"""What hops weigh: nothing, less than blocks, or more than any block."""
Run = tuple[int, int]
"""Stages from the first to before the second."""


@dataclass(frozen=True, kw_only=True)
class SwapParams:
    """What swaps weigh, and how many are looked at."""

    pod_weight: float = 1e8
    """Of a pod too many, beside hops, which come to 1 where all that a swap can touch is apart."""
    leaf_weight: float = 1e4
    """Of a leaf too many: less than any pod, more than all hops."""
    sweeps: int = 6
    """Times that every replica is looked at."""
    most_pairs: int = 5_000_000
    """Pairs of slots in one sweep times sweeps: more pairs leave fewer sweeps, but one at least."""
    least_gain: float = 1e-9
    """Of a swap; less is rounding."""


DEFAULT_SWAPS = SwapParams()


class Swaps:
    """An assignment that changes by swaps, and what each would gain."""

    def __init__(
        self,
        problem: MappingProblem,
        assignment: IntArray,
        limits: Reach,
        hops: float,
        params: SwapParams = DEFAULT_SWAPS,
    ) -> None:
        """`limits` are the pods and the leaves that a replica may touch; `hops` is what hops weigh."""
        self._problem = problem
        self.leaves = assignment.copy()
        pods = problem.pod_of[assignment]
        self._levels = [
            _Level(pods, problem.pods, limits[0], params.pod_weight),
            _Level(self.leaves, len(problem.leaf_slots), limits[1], params.leaf_weight),
        ]
        self._hop_weights = _hop_weights(problem, hops) if hops else []
        self.least_gain = params.least_gain * max(1.0, hops)

    def over(self) -> IntArray:
        """Replicas that touch more than they may."""
        pods, leaves = self._levels
        return np.flatnonzero((pods.touched > pods.most) | (leaves.touched > leaves.most))

    def best(self, run: Run, replica: int) -> tuple[float, int]:
        """What the best swap of a replica's run changes (negative is better), and with whose."""
        change = np.zeros(self._problem.slots)
        for level in self._levels:
            if level.most < self._problem.stages:
                change += level.weight * level.change(run, replica)
        if self._hop_weights:
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
            for weights, level in zip(self._hop_weights, self._levels, strict=True):
                row, beside = level.where[inside], level.where[near]
                before = _apart(weights, row, beside)
                swapped = _apart(weights, row, beside[replica])
                swapped += _apart(weights, row[replica], beside)
                change += sent * (swapped - before - before[replica])
        return change

    def _ends(self, run: Run) -> Iterator[tuple[int, int, float]]:
        """Stages in a run with their neighbours outside it, and the bytes between them."""
        t, stages = self._problem.traffic, self._problem.stages
        first, last = run[0], run[1] - 1
        if first > 0:
            yield first, first - 1, t.hop_bytes
        if last < stages - 1:
            yield last, last + 1, t.hop_bytes
        if t.wrap_bytes and first == 0 and last < stages - 1:
            yield first, stages - 1, t.wrap_bytes
        if t.wrap_bytes and first > 0 and last == stages - 1:
            yield last, 0, t.wrap_bytes


class _Level:
    """The blocks of one level: where every slot is, and what every replica holds and touches."""

    def __init__(self, where: IntArray, blocks: int, most: int, weight: float) -> None:
        self.where, self.most, self.weight = where, most, weight
        self._blocks = blocks
        self._slots = held_by(where.T, blocks)
        """Slots of each replica in each block, [replicas, blocks]."""
        self.touched = np.asarray((self._slots > 0).sum(axis=1), dtype=np.int64)

    def change(self, run: Run, replica: int) -> FloatArray:
        """Blocks beyond the limit, both replicas', by whom the run is swapped with."""
        part = held_by(self.where[slice(*run)].T, self._blocks)
        rest = self._slots - part
        touched = (rest[replica] + part > 0).sum(axis=1)
        touched_by_partner = (rest + part[replica] > 0).sum(axis=1)
        before = self._beyond(self.touched[replica]) + self._beyond(self.touched)
        after = self._beyond(touched) + self._beyond(touched_by_partner)
        return np.asarray(after - before, dtype=np.float64)

    def _beyond(self, touched: IntArray) -> IntArray:
        return np.maximum(touched - self.most, 0)

    def swap(self, run: Run, replica: int, partner: int) -> None:
        """Exchanges the blocks of two replicas in a run of stages."""
        rows, pair = slice(*run), [replica, partner]
        self.where[rows, pair] = self.where[rows, pair[::-1]]
        slots = held_by(self.where[:, pair].T, self._blocks)
        self._slots[pair] = slots
        self.touched[pair] = (slots > 0).sum(axis=1)


def _hop_weights(problem: MappingProblem, hops: float) -> list[FloatArray]:
    """What a byte into or out of a block weighs, by pod and by leaf.

    In units in which all hops that a swap can touch come to 1 at most, times `hops`.
    """
    costs = (problem.pod_s_per_byte, problem.leaf_s_per_byte)
    dearest_s = sum(max(cost, default=0.0) for cost in costs)
    most_s = 16.0 * max(problem.traffic.hop_bytes, problem.traffic.wrap_bytes) * dearest_s
    return [hops * np.asarray(cost) / (most_s or 1.0) for cost in costs]


def _apart(weights: FloatArray, first: IntArray, second: IntArray) -> FloatArray:
    return np.where(first == second, 0.0, weights[first] + weights[second])


def gathered(
    problem: MappingProblem,
    assignment: IntArray,
    limits: Reach,
    heights: Sequence[int],
    *,
    hops: float = NO_HOPS,
    params: SwapParams = DEFAULT_SWAPS,
) -> IntArray | None:
    """An assignment in which no replica touches more pods and leaves than it may; None where swaps fail.

    Parameters
    ----------
    assignment
        To begin with, shape [stages, slots].
    limits
        Pods and leaves that a replica may touch.
    heights
        Stages of the bands that are swapped as one; single stages are swapped too.
    hops
        What hops weigh: `NO_HOPS`, `HOPS` or `HOPS_FIRST`.
    """
    state = Swaps(problem, assignment, limits, hops, params)
    ends = np.cumsum([0, *heights]).tolist()
    runs = sorted({*pairwise(ends), *_single_stages(problem)})
    for _ in range(params.sweeps):
        over = state.over()
        if not len(over):
            return state.leaves
        # Where most replicas are over, bands do not fit and swaps hardly help.
        if (not hops and 2 * len(over) > problem.slots) or not _sweep(state, over, runs):
            return None
    return None if len(state.over()) else state.leaves


def _single_stages(problem: MappingProblem) -> list[Run]:
    return [(stage, stage + 1) for stage in range(problem.stages)]


def shorter_hops(
    problem: MappingProblem, assignment: IntArray, params: SwapParams = DEFAULT_SWAPS
) -> IntArray:
    """The assignment after swaps that shorten hops while no replica comes to touch more than the most do now.

    Where groups span several slots of a stage the assignment stays as it is.
    """
    if max(problem.traffic.expert_slots, problem.traffic.context_slots) > 1:
        return assignment
    if loads_of(problem, assignment).total_s == 0:
        return assignment
    state = Swaps(problem, assignment, _pipeline_reach(problem, assignment), HOPS, params)
    affordable = params.most_pairs // (problem.needed * problem.slots)
    for _ in range(max(1, min(params.sweeps, affordable))):
        if not _sweep(state, np.arange(problem.slots), _single_stages(problem)):
            break
    return state.leaves


def _pipeline_reach(problem: MappingProblem, assignment: IntArray) -> Reach:
    """The most pods, and the most leaves, that a pipeline touches."""
    pods = spread_of(problem.pod_of[assignment])
    return pods.pipeline_max, spread_of(assignment).pipeline_max


def with_short_pipelines(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """The assignment after swaps: pipelines that touch the most pods, or leaves, touch fewer.

    What is sent stays the same, or less: no hop grows longer.
    Where groups span several slots the assignment stays as it is.
    """
    best = shorter_hops(problem, assignment)
    if max(problem.traffic.expert_slots, problem.traffic.context_slots) > 1:
        return best
    most_s = loads_of(problem, best).total_s * (1 + 1e-12)
    for pods_first in (True, False):
        tighter: IntArray | None = best
        while tighter is not None and loads_of(problem, tighter).total_s <= most_s:
            best = tighter
            pods, leaves = _pipeline_reach(problem, best)
            limits = (pods - 1, problem.stages) if pods_first else (pods, leaves - 1)
            tighter = None
            if min(limits) >= 1:
                tighter = gathered(problem, best, limits, [problem.stages], hops=HOPS_FIRST)
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
