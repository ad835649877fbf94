"""A bound on the traffic of few large blocks, such as pods: column generation over their patterns alone.

    min  sum_p cost_p x_p
    every stage has its slots           sum_p n_{p,s} x_p = slots
    every block has a pattern           sum_{p of kind k} x_p <= blocks of kind k

Partitions of stages, as in `columns`, would have hundreds of part sizes here. The bound is Lagrange's at the
duals of a round, valid whatever columns are missing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.planner.mapping.bundles import (
    BundleCandidates,
    candidates_within,
    cheapest_selection,
    ordered_counts,
)
from meshwright.planner.mapping.instance import PROVEN, Incumbent, MappingRound, WorkLimits
from meshwright.planner.mapping.patterns import (
    CLOSE,
    MOST_ROUNDS,
    SLACK_COST,
    PatternPricing,
    Relaxation,
    dearest_slot_s,
    leaf_kinds,
    pattern_bytes,
)
from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem
from meshwright.planner.solvers.linear_program import LinearProgram, TreeLimits

PATTERNS_A_ROUND = 3


class _PatternMaster:
    """The linear programme over the patterns so far."""

    def __init__(self, problem: MappingProblem) -> None:
        self._problem = problem
        self._program = LinearProgram("CLP")
        self.kinds = leaf_kinds(problem)
        self._known: set[tuple[int, bytes]] = set()
        self._scale = 1.0 / dearest_slot_s(problem)
        self._block_rows = [self._program.add_row(0, len(kind.members)) for kind in self.kinds]
        slots = problem.slots
        self._stage_rows = [self._program.add_row(slots, slots) for _ in range(problem.stages)]
        for row in self._stage_rows:
            self._program.add_slack(row, SLACK_COST)

    def add_pattern(self, kind: int, pattern: IntArray) -> bool:
        """Adds a pattern of a kind of block; whether it is new."""
        key = (kind, pattern.tobytes())
        if key in self._known:
            return False
        self._known.add(key)
        sent = float(pattern_bytes(self._problem, pattern[None])[0])
        cost_s = sent * self.kinds[kind].s_per_byte
        entries = [(self._block_rows[kind], 1.0)]
        entries += [(self._stage_rows[stage], pattern[stage]) for stage in np.flatnonzero(pattern)]
        self._program.add_column(cost_s * self._scale, entries)
        return True

    def solve(self) -> float | None:
        """The value, s; None where the simplex gives up."""
        value = self._program.solve()
        return None if value is None else value / self._scale

    def slot_duals(self) -> FloatArray:
        """What a slot of each stage earns, s; shape [stages]."""
        return np.asarray(self._program.duals(self._stage_rows) / self._scale, dtype=np.float64)


def slot_bound_s(
    problem: MappingProblem, starts: Iterable[IntArray], stop: Callable[[], bool]
) -> float:
    """Seconds that the leaves' up-links are busy at the least, all together.

    Parameters
    ----------
    problem
        Its leaves are the blocks; pods are not seen.
    starts
        Counts [leaves, stages] of mappings to begin with.
    stop
        Asked after each round whether to end early.
    """
    master = _PatternMaster(problem)
    for counts in starts:
        for kind, block in enumerate(master.kinds):
            for leaf in block.members:
                master.add_pattern(kind, counts[leaf].astype(np.int64))
    pricing = PatternPricing(problem, master.kinds)
    members = np.array([len(kind.members) for kind in master.kinds])
    sizes = np.arange(problem.slots + 1)
    bound_s = 0.0
    for _ in range(MOST_ROUNDS):
        value_s = master.solve()
        if value_s is None:
            break
        duals = master.slot_duals()
        earned = duals[:, None] * sizes
        reduced_s = np.zeros(len(master.kinds))
        added = 0
        by_kind = np.broadcast_to(earned, (len(master.kinds), *earned.shape))
        for kind, reduced, pattern in pricing.best(by_kind, ways=PATTERNS_A_ROUND):
            reduced_s[kind] = min(reduced_s[kind], reduced)
            added += master.add_pattern(kind, pattern)
            added += master.add_pattern(kind, pattern[::-1].copy())
        bound_s = max(bound_s, problem.slots * float(duals.sum()) + float(members @ reduced_s))
        if not added or value_s - bound_s <= CLOSE * value_s or stop():
            break
    return bound_s


# Pods for a mapping that is good for leaves: whole leaves change places between stages.
#
# A leaf that holds one stage only costs the same in every stage between the first and the last. Two stages
# may thus exchange leaves with as many slots, one for one, one for two or two for two, and what changes is
# what their pods hold. Simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) over such exchanges, and over
# exchanges of two whole stages; from a fixed seed, with a fixed number of tries.


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


# Raises the bound of one pod step by step until a mapping meets it.


ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class DeepeningParams:
    """How delta grows and how long a step may take."""

    first_share: float = 0.0005
    """The first delta, of the bound: half the steps to a proof are this small on the benchmark cases."""
    least_share: float = 0.1
    """Of the price: counts for the bound where that is lower, so that delta is never 0."""
    largest_growth: float = 4.0
    """A cheapest selection beyond this many deltas is not jumped to; delta doubles."""
    tree_nodes: int = 20_000
    """Of one integer programme; the largest of docs/fabric.md takes a tenth of it."""
    tree_s: float = 60.0


DEFAULT_DEEPENING = DeepeningParams()


def deepened(
    problem: MappingProblem,
    relaxation: Relaxation,
    best: Incumbent,
    rounds: list[MappingRound],
    limits: WorkLimits,
    *,
    params: DeepeningParams = DEFAULT_DEEPENING,
) -> float:
    """The bound that selections of bundles prove, s, at most the price of the incumbent.

    The incumbent takes every mapping on the way. Ends where price and bound meet, where the cheapest
    selection is known but no order of the stages for it, or where there is too much to list.
    """
    base_s = relaxation.lagrangian_s
    bound_s = relaxation.bound_s
    delta_s = params.first_share * max(bound_s, params.least_share * best.price_s)
    candidates: BundleCandidates | None = None
    while best.price_s - bound_s > PROVEN * best.price_s and limits.left_s > 0:
        tree_s = max(0.1, min(params.tree_s, limits.left_s))
        delta_s = min(delta_s, best.price_s - base_s) + ROUNDING * best.price_s
        candidates = candidates_within(problem, relaxation, delta_s, candidates)
        if candidates is None:
            break
        tree = TreeLimits(nodes=params.tree_nodes, seconds=tree_s)
        step = _step(problem, relaxation, candidates, best, tree)
        bound_s = max(bound_s, step.bound_s)
        rounds.append(
            MappingRound(
                columns=len(candidates.bundles), price_s=best.price_s, wall_s=limits.elapsed_s
            )
        )
        if step.last:
            break
        above_s = step.cost_s - base_s
        delta_s = above_s if above_s < params.largest_growth * delta_s else 2 * delta_s
    return min(bound_s, best.price_s)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one delta has shown."""

    bound_s: float
    cost_s: float
    """Of the cheapest selection."""
    last: bool
    """Whether a larger delta would show no more."""


def _step(
    problem: MappingProblem,
    relaxation: Relaxation,
    candidates: BundleCandidates,
    best: Incumbent,
    tree: TreeLimits,
) -> _Step:
    """The cheapest selection; put in an order of stages where no larger delta makes it cheaper."""
    ceiling_s = relaxation.lagrangian_s + candidates.delta_s
    selection = cheapest_selection(problem, relaxation, candidates, tree)
    last = not selection.complete or selection.cost_s <= ceiling_s
    credible = selection.cost_s >= relaxation.bound_s * (1 - PROVEN)
    better = selection.cost_s < best.price_s * (1 - ROUNDING)
    if last and credible and better and selection.bundles:
        best.offer(ordered_counts(problem, relaxation.kinds, selection.bundles))
    return _Step(bound_s=min(selection.bound_s, ceiling_s), cost_s=selection.cost_s, last=last)
