"""Mappings whose groups reach few pods and leaves: bands of stages, filled pod by pod.

The grid of stages and replicas is cut into bands of stages. Pods fill a band column by column, so that all
stages of a band share its pods and a replica is in one of them; bands run to and fro, so that a pod between
two bands holds the same replicas in both. Inside a band, whole leaves go to strips of its stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.mapping.problem import (
    FloatArray,
    IntArray,
    MappingProblem,
    held_by,
    loads_of,
    spread_of,
)
from meshwright.planner.solvers.programmes import repeatable_solver

# How far groups must reach, by counting: no assignment touches fewer pods or leaves.
#
# A block that r stages and c replicas touch holds at most r c slots. With at most D blocks a stage and P a
# replica, over S stages and N replicas,
#
#     sum_b r_b <= S D,   sum_b c_b <= N P,   sum_b min(free_b, r_b c_b) >= S N,
#
# which CP-SAT decides over the blocks' choices of (r, c). For equal blocks it comes to D P >= the number of
# blocks that are filled: reaching less far one way is reaching farther the other.


# How fine and how long the counting is.


MOST_STEPS = 64
"""Values of c by r; beyond it they are taken in steps, which keeps the bound valid."""
REACH_WORK = 4.0
"""CP-SAT's deterministic time for one pair of limits, about seconds."""


@dataclass(frozen=True, kw_only=True)
class ReachWeights:
    """What a block that a group touches counts, per mille: the weights of Arnold's objective.

    He et al., arXiv 2509.15940, section 5.2, equation 2: alpha for data-parallel groups, beta = 1 - alpha for
    pipelines.
    """

    data_parallel: int = 500

    @staticmethod
    def of(share: float) -> ReachWeights:
        """From what data-parallel groups count, 0 to 1. Raises InputError beyond that."""
        if not 0 <= share <= 1:
            raise InputError("must be from 0 to 1", where="dp_weight", value=share)
        return ReachWeights(data_parallel=round(1000 * share))

    @property
    def pipeline(self) -> int:
        """Per mille."""
        return 1000 - self.data_parallel

    def key(self, reach: Reach) -> tuple[int, int]:
        """What is minimised: the most that any group counts, then both kinds' most together.

        Parameters
        ----------
        reach
            Of one level.
        """
        rows, columns = self.data_parallel * reach[0], self.pipeline * reach[1]
        return max(rows, columns), rows + columns


Reach = tuple[int, int]
"""Blocks that a data-parallel group touches at most, and a pipeline."""


class ReachBound:
    """Which reaches are possible at one level, as far as counting says."""

    def __init__(
        self,
        blocks: Sequence[int],
        stages: int,
        slots: int,
    ) -> None:
        """`blocks` are the free slots of each block; the job has `slots` in each of its stages."""
        self._free = sorted((free for free in blocks if free), reverse=True)
        self.stages, self.slots = stages, slots
        self._most = (min(len(self._free), slots), min(len(self._free), stages))
        """Blocks that a stage and a replica touch where each slot is in a block of its own."""
        self._refuted: list[Reach] = []

    def least(self, weights: ReachWeights) -> Reach:
        """The first reach, in the order of the weights, that is not refuted.

        Parameters
        ----------
        weights
            In which order reaches come.
        """
        # Every reach that single groups allow: a stage and a replica need so many of the largest blocks.
        rows = range(self._fewest(self.slots), self._most[0] + 1)
        columns = range(self._fewest(self.stages), self._most[1] + 1)
        pairs = sorted(product(rows, columns), key=lambda pair: (weights.key(pair), pair))
        first = 0
        while True:
            level = weights.key(pairs[first])[0]
            end = first
            while end < len(pairs) and weights.key(pairs[end])[0] == level:
                end += 1
            # Where even the most of both kinds is refuted, so is every pair up to this level.
            corner = (max(row for row, _ in pairs[:end]), max(column for _, column in pairs[:end]))
            if end == len(pairs) or self.possible(corner):
                for pair in pairs[first:end]:
                    if self.possible(pair):
                        return pair
            first = end

    def _fewest(self, members: int) -> int:
        slots = 0
        for number, free in enumerate(self._free, start=1):
            slots += free
            if slots >= members:
                return number
        return len(self._free)

    def possible(self, reach: Reach) -> bool:
        """False where counting refutes it.

        Parameters
        ----------
        reach
            Blocks that stages, and replicas, touch at most; at least 1 each.
        """
        if reach[0] >= self._most[0] and reach[1] >= self._most[1]:
            return True
        if any(reach[0] <= row and reach[1] <= column for row, column in self._refuted):
            return False
        if self._refutes(reach):
            self._refuted.append(reach)
            return False
        return True

    def _refutes(self, reach: Reach) -> bool:
        from meshwright.planner.solvers.or_tools import cp_model

        model = cp_model.CpModel()
        rows, columns, hosted = [], [], []
        idle = sum(self._free) - self.stages * self.slots
        for free, blocks in Counter(self._free).items():
            numbers = []
            for r, c, slots in self._choices(free, idle):
                number = model.new_int_var(0, blocks, "")
                numbers.append(number)
                rows.append(r * number)
                columns.append(c * number)
                hosted.append(slots * number)
            model.add(sum(numbers) <= blocks)
        model.add(sum(rows) <= self.stages * reach[0])
        model.add(sum(columns) <= self.slots * reach[1])
        model.add(sum(hosted) >= self.stages * self.slots)
        solver = repeatable_solver(work=REACH_WORK)
        return solver.solve(model) == cp_model.INFEASIBLE

    def _choices(self, free: int, idle: int) -> Iterator[tuple[int, int, int]]:
        """(r, c, slots held) of a block that are of use: it is filled but for `idle` slots at most."""
        for r in range(1, min(self.stages, free) + 1):
            largest = min(-(-free // r), self.slots)
            fewest = max(1, -(-(free - idle) // r))
            step = max(1, (largest - fewest + 1) // MOST_STEPS)
            for c in range(fewest, largest + 1, step):
                yield r, c, min(free, r * min(c + step - 1, largest))


Bits = NDArray[np.bool_]
LeafSlots = tuple[int, int]
"""(leaf, slots of it)."""


# How bands are built.


ORDERS_OF_PODS = 16
"""Orders of the pods that are kept for each number of bands and size of strips: the best ones."""
ORDERS_TRIED = 400
"""Random orders, from a fixed seed, of which they are the best."""
CUTS_PER_POD = 2.0
"""Replicas that are cut between two pods of a band, about, for each pod that is not its last."""
UNEVEN_LEAF_WEIGHT = 4.0
"""What a leaf more or fewer than meant counts, beside a slot by which a pod's share is uneven."""
SLOT_WINDOW = 12
"""Slots by which a pod's share of a strip may differ from an even one."""
LEAF_WINDOW = 2
"""Leaves by which it may differ."""


@dataclass(frozen=True, kw_only=True)
class PodShare:
    """What a band or a strip has of one pod."""

    pod: int
    leaves: tuple[LeafSlots, ...]

    @property
    def slots(self) -> int:
        """All of them."""
        return sum(slots for _, slots in self.leaves)


def trimmed(problem: MappingProblem, multiple: int) -> IntArray | None:
    """Slots of each leaf that are used, as many as needed in all: small pods and leaves are left first.

    Leaves give multiples of `multiple` where that leaves enough; None where it does not.

    Parameters
    ----------
    problem
        Its free slots are what is trimmed.
    multiple
        At least 1.
    """
    caps = np.minimum(np.asarray(problem.leaf_slots, dtype=np.int64), problem.needed)
    caps = caps // multiple * multiple
    spare = int(caps.sum()) - problem.needed
    if spare < 0:
        return None
    room = np.bincount(problem.pod_of, weights=caps, minlength=problem.pods)
    for pod in np.argsort(room, kind="stable"):
        if room[pod] <= spare:
            spare -= int(room[pod])
            caps[problem.pod_of == pod] = 0
    for leaf in np.argsort(caps, kind="stable"):
        if caps[leaf] <= spare:
            spare -= int(caps[leaf])
            caps[leaf] = 0
    for leaf in np.argsort(caps, kind="stable"):
        taken = min(int(caps[leaf]), spare)
        caps[leaf] -= taken
        spare -= taken
    return caps


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order of the pods, and what bands that are filled in it come to."""

    pods: tuple[int, ...]
    touched: int
    """Pods of a band at most."""
    cut_replicas: float
    """About how many are cut inside a band, less those that are in one pod in two bands."""
    crowd: float
    """Leaves of a band by its stages, at most."""


def good_orders(problem: MappingProblem, caps: IntArray, heights: Sequence[int]) -> list[Order]:
    """Orders of the pods in which a band touches few of them and bands are about equal in leaves.

    Parameters
    ----------
    caps
        Slots of each leaf that are used, shape [leaves].
    heights
        Stages of each band.
    """
    room = np.bincount(problem.pod_of, weights=caps, minlength=problem.pods).astype(np.int64)
    leaves = np.bincount(problem.pod_of[caps > 0], minlength=problem.pods)
    # By size, so that what the pods are called changes nothing.
    used = np.flatnonzero(room)
    used = used[np.lexsort((leaves[used], room[used]))]
    permutations = [used]
    if len(used) > 1:
        rng = np.random.default_rng(0)
        permutations += [rng.permutation(used) for _ in range(ORDERS_TRIED)]
    orders = []
    for pods in permutations:
        hosted = _hosted(room[pods], np.asarray(heights) * problem.slots)
        shares = hosted / room[pods]
        crowd = np.max((shares * leaves[pods]).sum(axis=1) / np.asarray(heights))
        touched = (hosted > 0).sum(axis=1)
        cut_replicas = CUTS_PER_POD * float(np.sum(touched - 1))
        # Replicas that are in one pod in two bands; they make up for those that are cut inside a band.
        in_both = np.minimum(hosted[:-1], hosted[1:])
        taller = np.maximum(heights[:-1], heights[1:])
        order = Order(
            pods=tuple(pods.tolist()),
            touched=int(np.max(touched)),
            cut_replicas=max(0.0, cut_replicas - float(np.sum(in_both / taller[:, None]))),
            crowd=float(crowd),
        )
        orders.append(order)
    orders.sort(key=lambda order: (order.touched, order.cut_replicas, order.crowd))
    return orders[:ORDERS_OF_PODS]


def _hosted(room: IntArray, slots: IntArray) -> IntArray:
    """Slots of each band in each pod, [bands, pods], where pods of this room fill the bands in turn."""
    band_ends = np.cumsum(slots)[:, None]
    band_starts = band_ends - slots[:, None]
    pod_ends = np.cumsum(room)
    hosted = np.minimum(pod_ends, band_ends) - np.maximum(pod_ends - room, band_starts)
    return np.asarray(np.maximum(hosted, 0))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Bands of stages, each in strips of at most `strip` stages, filled in an order of the pods."""

    heights: tuple[int, ...]
    strip: int
    order: Order
    multiple: int
    """Leaves give multiples of this many slots."""

    @property
    def expected_reach(self) -> tuple[Reach, Reach]:
        """About how far groups reach, pods and leaves, where no replica is cut in a band or a strip."""
        strips = sum(-(-height // self.strip) for height in self.heights)
        bands = min(len(self.heights), len(self.order.pods))
        leaves_of_stage = int(self.order.crowd * self.strip)
        return (self.order.touched, bands), (leaves_of_stage, strips)


def shapes(problem: MappingProblem) -> Iterator[Shape]:
    """Every number of bands and size of strips, each with the best orders of the pods.

    Parameters
    ----------
    problem
        With one pod all stages are one band.
    """
    stages = np.arange(problem.stages)
    most_bands = problem.stages if problem.pods > 1 else 1
    for bands in range(1, most_bands + 1):
        heights = tuple(len(part) for part in np.array_split(stages, bands))
        for multiple in range(1, max(heights) + 1):
            caps = trimmed(problem, multiple)
            if caps is None:
                continue
            strips = range(1, max(heights) + 1) if multiple == 1 else (multiple,)
            for order in good_orders(problem, caps, heights):
                for strip in strips:
                    yield Shape(heights=heights, strip=strip, order=order, multiple=multiple)


def banded(problem: MappingProblem, shape: Shape) -> IntArray:
    """The assignment of a shape, [stages, slots].

    Parameters
    ----------
    problem
        Of the shape.
    shape
        One of `shapes`.
    """
    caps = trimmed(problem, shape.multiple)
    assert caps is not None
    assignment = np.full((problem.stages, problem.slots), -1, dtype=np.int64)
    first = 0
    for number, shares in enumerate(_bands(problem, caps, shape)):
        stages = np.arange(shape.heights[number])
        strips = np.array_split(stages, -(-len(stages) // shape.strip))
        sizes = [len(strip) for strip in strips]
        rest = shares
        for index, size in enumerate(sizes):
            part = size / sum(sizes[index:])
            taken, rest = _strip(rest, size * problem.slots, part)
            filled = _filled(taken, size)
            assignment[first : first + size] = filled[:, ::-1] if number % 2 else filled
            first += size
    return assignment


def _filled(shares: Sequence[PodShare], stages: int) -> IntArray:
    """The leaf of every slot of a strip, [stages, slots], column by column."""
    leaves = [leaf for share in shares for leaf, _ in share.leaves]
    sizes = [slots for share in shares for _, slots in share.leaves]
    return np.repeat(np.array(leaves), sizes).reshape(-1, stages).T


def _bands(problem: MappingProblem, caps: IntArray, shape: Shape) -> Iterator[list[PodShare]]:
    """What each band has of each pod; a pod that does not fit a band is cut between leaves if it can be."""
    waiting = []
    for pod in shape.order.pods:
        leaves = np.flatnonzero((problem.pod_of == pod) & (caps > 0)).tolist()
        waiting.append(PodShare(pod=pod, leaves=tuple((leaf, int(caps[leaf])) for leaf in leaves)))
    leaves_left, stages_left = _leaf_count(waiting), problem.stages
    for height in shape.heights:
        band: list[PodShare] = []
        need = height * problem.slots
        meant = leaves_left * height / stages_left
        while need:
            share = waiting.pop(0)
            if share.slots > need:
                count = max(meant - _leaf_count(band), 1.0)
                (share,), (rest,) = _cut([share], [need], need, count)
                waiting.insert(0, rest)
            band.append(share)
            need -= share.slots
        leaves_left -= _leaf_count(band)
        stages_left -= height
        yield band


def _leaf_count(shares: Sequence[PodShare]) -> int:
    return sum(len(share.leaves) for share in shares)


def _strip(shares: list[PodShare], need: int, part: float) -> tuple[list[PodShare], list[PodShare]]:
    """What one strip takes of each pod, about its part of it, and what it leaves."""
    if part >= 1:
        return shares, []
    targets = [share.slots * part for share in shares]
    taken, rest = _cut(shares, targets, need, _leaf_count(shares) * part)
    return [share for share in taken if share.leaves], [share for share in rest if share.leaves]


def _cut(
    shares: Sequence[PodShare],
    targets: Sequence[float],
    need: int,
    count: float,
) -> tuple[list[PodShare], list[PodShare]]:
    """Takes `need` slots in whole leaves, about the target of each pod; where none add up, cuts some."""
    total, chosen = _whole_leaves(shares, targets, need, count)
    short = need - total
    taken: list[PodShare] = []
    rest: list[PodShare] = []
    for share, whole in zip(shares, chosen, strict=True):
        taken_leaves: list[LeafSlots] = []
        rest_leaves: list[LeafSlots] = []
        for (leaf, slots), is_whole in zip(share.leaves, whole, strict=True):
            part = slots if is_whole else min(short, slots)
            if not is_whole:
                short -= part
            if part:
                taken_leaves.append((leaf, part))
            if part < slots:
                rest_leaves.append((leaf, slots - part))
        taken.append(PodShare(pod=share.pod, leaves=tuple(taken_leaves)))
        rest.append(PodShare(pod=share.pod, leaves=tuple(rest_leaves)))
    return taken, rest


def _whole_leaves(
    shares: Sequence[PodShare],
    targets: Sequence[float],
    need: int,
    count: float,
) -> tuple[int, list[list[bool]]]:
    """Leaves that add up to as much of `need` as they can, pods near their targets, about `count` of them.

    Dynamic programming, pod by pod, over (slots, leaves) so far.
    """
    most_leaves = min(int(np.ceil(count)) + 4, _leaf_count(shares))
    tables = [_subset_tables(share, most_leaves) for share in shares]
    cost = np.full((need + 1, most_leaves + 1), np.inf)
    cost[0, 0] = 0.0
    options: list[list[LeafSlots]] = []
    choices: list[IntArray] = []
    for share, table, target in zip(shares, tables, targets, strict=True):
        sums = np.argwhere(table[-1])
        if len(shares) > 1:
            uneven_leaves = np.abs(sums[:, 1] - len(share.leaves) * target / share.slots)
            even = np.abs(sums[:, 0] - target) <= SLOT_WINDOW
            sums = sums[even & (uneven_leaves <= LEAF_WINDOW)]
        options.append(sorted({(0, 0), *((slots, number) for slots, number in sums.tolist())}))
        cost, choice = _with_pod(cost, options[-1], target)
        choices.append(choice)
    slots = total = int(np.flatnonzero(np.isfinite(cost).any(axis=1))[-1])
    uneven = np.abs(np.arange(most_leaves + 1) - count)
    number = int(np.argmin(cost[total] + UNEVEN_LEAF_WEIGHT * uneven))
    chosen: list[list[bool]] = []
    for pod in reversed(range(len(shares))):
        pod_slots, pod_leaves = options[pod][int(choices[pod][slots, number])]
        chosen.insert(0, _subset(tables[pod], shares[pod], pod_slots, pod_leaves))
        slots -= pod_slots
        number -= pod_leaves
    return total, chosen


def _with_pod(
    cost: FloatArray, options: Sequence[tuple[int, int]], target: float
) -> tuple[FloatArray, IntArray]:
    """Least cost of (slots, leaves) with one pod more, and the option that it takes; both [slots, leaves]."""
    best = np.full_like(cost, np.inf)
    choice = np.full(cost.shape, -1, dtype=np.int64)
    rows, columns = cost.shape
    for option, (slots, leaves) in enumerate(options):
        if slots >= rows or leaves >= columns:
            continue
        moved = cost[: rows - slots, : columns - leaves] + abs(slots - target)
        view, mark = best[slots:, leaves:], choice[slots:, leaves:]
        better = moved < view
        view[better], mark[better] = moved[better], option
    return best, choice


def _subset_tables(share: PodShare, most_leaves: int) -> list[Bits]:
    """Whether the first i leaves have a subset of n with this sum of slots, [sum, n], for every i."""
    most_leaves = min(most_leaves, len(share.leaves))
    tables = [np.zeros((share.slots + 1, most_leaves + 1), dtype=np.bool_)]
    tables[0][0, 0] = True
    for _, slots in share.leaves:
        table = tables[-1].copy()
        table[slots:, 1:] |= tables[-1][: len(table) - slots, :-1]
        tables.append(table)
    return tables


def _subset(tables: Sequence[Bits], share: PodShare, total: int, number: int) -> list[bool]:
    """A subset of the leaves with this sum of slots and number."""
    chosen = [False] * len(share.leaves)
    for index in range(len(share.leaves) - 1, -1, -1):
        if not tables[index][total, number]:
            chosen[index] = True
            total -= share.leaves[index][1]
            number -= 1
    return chosen


# Swaps inside stages: which replica has which of their slots, so that pipelines reach few pods and leaves.
#
# A swap gives two replicas each other's slots in a run of stages. No slot comes to another stage, so that
# rings and what stages touch stay as they are; what the two replicas touch changes, and the hops at the
# run's ends.


NO_HOPS, HOPS, HOPS_FIRST = 0.0, 1.0, 1e12
"""What hops weigh: nothing, less than blocks, or more than any block."""
Run = tuple[int, int]
"""Stages from the first to before the second."""


# What swaps weigh, and how many are looked at.


POD_WEIGHT = 1e8
"""Of a pod too many, beside hops, which come to 1 where all that a swap can touch is apart."""
LEAF_WEIGHT = 1e4
"""Of a leaf too many: less than any pod, more than all hops."""
SWEEPS = 6
"""Times that every replica is looked at."""
MOST_PAIRS = 5_000_000
"""Pairs of slots in one sweep times sweeps: more pairs leave fewer sweeps, but one at least."""
LEAST_GAIN = 1e-9
"""Of a swap; less is rounding."""


class Swaps:
    """An assignment that changes by swaps, and what each would gain."""

    def __init__(
        self,
        problem: MappingProblem,
        assignment: IntArray,
        limits: Reach,
        hops: float,
    ) -> None:
        """`limits` are the pods and the leaves that a replica may touch; `hops` is what hops weigh."""
        self._problem = problem
        self.leaves = assignment.copy()
        pods = problem.pod_of[assignment]
        self._levels = [
            _Level(pods, problem.pods, limits[0], POD_WEIGHT),
            _Level(self.leaves, len(problem.leaf_slots), limits[1], LEAF_WEIGHT),
        ]
        self._hop_weights = _hop_weights(problem, hops) if hops else []
        self.least_gain = LEAST_GAIN * max(1.0, hops)

    def over(self) -> IntArray:
        """Replicas that touch more than they may."""
        pods, leaves = self._levels
        return np.flatnonzero((pods.touched > pods.most) | (leaves.touched > leaves.most))

    def best(self, run: Run, replica: int) -> tuple[float, int]:
        """What the best swap of a replica's run changes (negative is better), and with whose.

        Parameters
        ----------
        run
            Stages whose slots change hands.
        replica
            Number of the slot in its stage, from 0.

        Returns
        -------
        tuple of (float, int)
            The change, below 0 where that helps, and the other replica.
        """
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
        """Swaps two replicas' slots in a run of stages.

        Parameters
        ----------
        run
            Stages whose slots change hands.
        replica, partner
            Numbers of slots in their stage, from 0.
        """
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
        """Blocks beyond the limit, both replicas', by whom the run is swapped with.

        Parameters
        ----------
        run
            Stages whose slots change hands.
        replica
            Number of the slot in its stage.

        Returns
        -------
        array of float, shape [replicas]
            Below 0 where fewer blocks are touched beyond the limit.
        """
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
        """Exchanges the blocks of two replicas in a run of stages.

        Parameters
        ----------
        run
            Stages whose slots change hands.
        replica, partner
            Numbers of slots in their stage.
        """
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
    state = Swaps(problem, assignment, limits, hops)
    ends = np.cumsum([0, *heights]).tolist()
    runs = sorted({*pairwise(ends), *_single_stages(problem)})
    for _ in range(SWEEPS):
        over = state.over()
        if not len(over):
            return state.leaves
        # Where most replicas are over, bands do not fit and swaps hardly help.
        if (not hops and 2 * len(over) > problem.slots) or not _sweep(state, over, runs):
            return None
    return None if len(state.over()) else state.leaves


def _single_stages(problem: MappingProblem) -> list[Run]:
    return [(stage, stage + 1) for stage in range(problem.stages)]


def shorter_hops(problem: MappingProblem, assignment: IntArray) -> IntArray:
    """The assignment after swaps that shorten hops while no replica comes to touch more than the most do now.

    Where groups span several slots of a stage the assignment stays as it is.

    Parameters
    ----------
    problem
        Prices hops by the up-links that they cross.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    if max(problem.traffic.expert_slots, problem.traffic.context_slots) > 1:
        return assignment
    if loads_of(problem, assignment).total_s == 0:
        return assignment
    state = Swaps(problem, assignment, _pipeline_reach(problem, assignment), HOPS)
    affordable = MOST_PAIRS // (problem.needed * problem.slots)
    for _ in range(max(1, min(SWEEPS, affordable))):
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

    Parameters
    ----------
    problem
        Of the assignment.
    assignment
        The leaf of every slot, shape [stages, slots].
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
