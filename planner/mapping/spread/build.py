"""Mappings whose groups reach few pods and leaves: bands of stages, filled pod by pod.

The grid of stages and replicas is cut into bands of stages. Pods fill a band column by column, so that all
stages of a band share its pods and a replica is in one of them; bands run to and fro, so that a pod between
two bands holds the same replicas in both. Inside a band, whole leaves go to strips of its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.mapping.problem import IntArray, MappingProblem
from meshwright.planner.mapping.spread.bound import Reach

Bits = NDArray[np.bool_]
Piece = tuple[int, int]
"""(leaf, slots of it)."""

ORDERS, ORDERS_TRIED = 16, 400
LEAF_COUNTS = 4.0
"""What a leaf more or fewer than meant counts, beside a slot by which a pod's share is uneven."""
CUTS = 2.0
"""Replicas that are cut between two pods of a band, about, for each that is not its last."""
WINDOW, LEAF_WINDOW = 12, 2
"""Slots and leaves by which a pod's share of a strip may differ from an even one."""


@dataclass(frozen=True, kw_only=True)
class PodShare:
    """What a band or a strip has of one pod."""

    pod: int
    pieces: tuple[Piece, ...]

    @property
    def slots(self) -> int:
        """All of them."""
        return sum(slots for _, slots in self.pieces)


def trimmed(problem: MappingProblem, multiple: int) -> IntArray | None:
    """Slots of each leaf that are used, as many as needed in all: small pods and leaves are left first.

    Leaves give multiples of `multiple` where that leaves enough; None where it does not.
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
    crowd: float
    """Leaves of a band by its stages, at most."""


def good_orders(
    problem: MappingProblem, caps: IntArray, heights: Sequence[int], keep: int
) -> list[Order]:
    """Orders of the pods in which a band touches few of them and bands are about equal in leaves."""
    room = np.bincount(problem.pod_of, weights=caps, minlength=problem.pods).astype(np.int64)
    leaves = np.bincount(problem.pod_of[caps > 0], minlength=problem.pods)
    # By size, so that what the pods are called changes nothing.
    used = np.flatnonzero(room)
    used = used[np.lexsort((leaves[used], room[used]))]
    rng = np.random.default_rng(0)
    ends = np.cumsum([height * problem.slots for height in heights])
    starts = ends - [height * problem.slots for height in heights]
    ranked = []
    for order in [
        used,
        *(rng.permutation(used) for _ in range(ORDERS_TRIED if len(used) > 1 else 0)),
    ]:
        after = np.cumsum(room[order])
        hosted = np.minimum(after, ends[:, None]) - np.maximum(after - room[order], starts[:, None])
        hosted = np.maximum(hosted, 0)
        crowd = np.max((hosted / room[order] * leaves[order]).sum(axis=1) / np.asarray(heights))
        touched = (hosted > 0).sum(axis=1)
        # Replicas that are in one pod in two bands make up for those that are cut inside a band.
        shared = np.sum(
            np.minimum(hosted[:-1], hosted[1:]) / np.maximum(heights[:-1], heights[1:])[:, None]
        )
        wanting = max(0.0, CUTS * float(np.sum(touched - 1)) - float(shared))
        candidate = Order(
            pods=tuple(order.tolist()), touched=int(np.max(touched)), crowd=float(crowd)
        )
        ranked.append((candidate.touched, wanting, candidate.crowd, candidate))
    ranked.sort(key=lambda entry: entry[:3])
    return [order for *_, order in ranked[:keep]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Bands of stages, each in strips of at most `strip` stages, filled in an order of the pods."""

    heights: tuple[int, ...]
    strip: int
    order: Order
    multiple: int
    """Leaves give multiples of this many slots."""

    @property
    def hoped(self) -> tuple[Reach, Reach]:
        """About how far groups reach, pods and leaves, where no replica is cut in a band or a strip."""
        strips = sum(-(-height // self.strip) for height in self.heights)
        pods = (self.order.touched, min(len(self.heights), len(self.order.pods)))
        return pods, (int(self.order.crowd * self.strip), strips)


def shapes(problem: MappingProblem) -> Iterator[Shape]:
    """Every number of bands and size of strips, each with the best orders of the pods."""
    stages = np.arange(problem.stages)
    for bands in range(1, problem.stages + 1 if problem.pods > 1 else 2):
        heights = tuple(len(part) for part in np.array_split(stages, bands))
        strips = range(1, max(heights) + 1)
        for multiple in strips:
            caps = trimmed(problem, multiple)
            if caps is None:
                continue
            for order in good_orders(problem, caps, heights, ORDERS):
                for strip in strips if multiple == 1 else (multiple,):
                    yield Shape(heights=heights, strip=strip, order=order, multiple=multiple)


def banded(problem: MappingProblem, shape: Shape) -> IntArray:
    """The assignment of a shape."""
    caps = trimmed(problem, shape.multiple)
    assert caps is not None
    heights, strip = shape.heights, shape.strip
    assignment = np.full((problem.stages, problem.slots), -1, dtype=np.int64)
    first = 0
    for band_number, band in enumerate(_bands(problem, caps, heights, shape.order.pods)):
        shares, rows = list(band), heights[band_number]
        sizes = [len(part) for part in np.array_split(np.arange(rows), -(-rows // strip))]
        for done, size in enumerate(sizes):
            taken, shares = _strip(shares, size * problem.slots, size / sum(sizes[done:]))
            cells = np.concatenate([np.repeat(*np.array(share.pieces).T) for share in taken])
            filled = cells.reshape(problem.slots, size).T
            assignment[first : first + size] = filled[:, ::-1] if band_number % 2 else filled
            first += size
    return assignment


def _bands(
    problem: MappingProblem, caps: IntArray, heights: Sequence[int], order: Sequence[int]
) -> Iterator[list[PodShare]]:
    """What each band has of each pod; a pod that does not fit a band is cut between leaves if it can be."""
    waiting = []
    for pod in order:
        leaves = np.flatnonzero((problem.pod_of == pod) & (caps > 0))
        waiting.append(
            PodShare(pod=pod, pieces=tuple((int(leaf), int(caps[leaf])) for leaf in leaves))
        )
    leaves_left, stages = sum(len(share.pieces) for share in waiting), problem.stages
    for height in heights:
        need, band = height * problem.slots, list[PodShare]()
        meant = leaves_left * height / stages
        while need:
            share = waiting.pop(0)
            if share.slots > need:
                count = meant - sum(len(share_taken.pieces) for share_taken in band)
                (share,), (rest,) = _cut([share], [need], need, max(count, 1.0))
                waiting.insert(0, rest)
            band.append(share)
            need -= share.slots
        leaves_left, stages = (
            leaves_left - sum(len(share.pieces) for share in band),
            stages - height,
        )
        yield band


def _strip(shares: list[PodShare], need: int, part: float) -> tuple[list[PodShare], list[PodShare]]:
    """What one strip takes of each pod, about its part of it, and what it leaves."""
    if part >= 1:
        return shares, []
    targets = [share.slots * part for share in shares]
    count = sum(len(share.pieces) for share in shares) * part
    taken, rest = _cut(shares, targets, need, count)
    return [share for share in taken if share.pieces], [share for share in rest if share.pieces]


def _cut(
    shares: Sequence[PodShare], targets: Sequence[float], need: int, count: float
) -> tuple[list[PodShare], list[PodShare]]:
    """Takes `need` slots in whole leaves, about the target of each pod; where none add up, cuts some."""
    total, wanted = _whole_leaves(shares, targets, need, count)
    short, taken, rest = need - total, list[PodShare](), list[PodShare]()
    for share, wanted_leaves in zip(shares, wanted, strict=True):
        taken_parts, rest_parts = list[Piece](), list[Piece]()
        for (leaf, slots), yes in zip(share.pieces, wanted_leaves, strict=True):
            part = slots if yes else min(short, slots)
            short -= 0 if yes else part
            if part:
                taken_parts.append((leaf, part))
            if part < slots:
                rest_parts.append((leaf, slots - part))
        taken.append(PodShare(pod=share.pod, pieces=tuple(taken_parts)))
        rest.append(PodShare(pod=share.pod, pieces=tuple(rest_parts)))
    return taken, rest


def _whole_leaves(
    shares: Sequence[PodShare], targets: Sequence[float], need: int, count: float
) -> tuple[int, list[list[bool]]]:
    """Leaves that add up to as much of `need` as they can, pods near their targets, about `count` of them.

    Dynamic programming, pod by pod, over (slots, leaves) so far.
    """
    most_leaves = min(int(np.ceil(count)) + 4, sum(len(share.pieces) for share in shares))
    tables = [_subset_tables([slots for _, slots in share.pieces], most_leaves) for share in shares]
    cost = np.full((need + 1, most_leaves + 1), np.inf)
    cost[0, 0] = 0.0
    steps: list[tuple[list[tuple[int, int]], IntArray]] = []
    for share, table, target in zip(shares, tables, targets, strict=True):
        leaves = len(share.pieces) * target / share.slots
        near = [
            (int(slots), int(number))
            for slots, number in np.argwhere(table[-1])
            if len(shares) == 1
            or (abs(slots - target) <= WINDOW and abs(number - leaves) <= LEAF_WINDOW)
        ]
        options = sorted({(0, 0), *near})
        best, choice = np.full_like(cost, np.inf), np.full(cost.shape, -1, dtype=np.int64)
        for option, (slots, number) in enumerate(options):
            if slots > need or number > most_leaves:
                continue
            moved = cost[: need + 1 - slots, : most_leaves + 1 - number] + abs(slots - target)
            view, mark = best[slots:, number:], choice[slots:, number:]
            better = moved < view
            view[better], mark[better] = moved[better], option
        cost = best
        steps.append((options, choice))
    total = int(np.flatnonzero(np.isfinite(cost).any(axis=1))[-1])
    number = int(np.argmin(cost[total] + LEAF_COUNTS * np.abs(np.arange(most_leaves + 1) - count)))
    chosen: list[list[bool]] = []
    slots = total
    for share, table, (options, choice) in reversed(list(zip(shares, tables, steps, strict=True))):
        took = options[int(choice[slots, number])]
        chosen.insert(0, _subset(table, [size for _, size in share.pieces], *took))
        slots, number = slots - took[0], number - took[1]
    return total, chosen


def _subset_tables(sizes: Sequence[int], most_sizes: int) -> list[Bits]:
    """Whether the first i sizes have a subset of n with this sum, [sum, n], for every i."""
    most_sizes = min(most_sizes, len(sizes))
    tables = [np.zeros((sum(sizes) + 1, most_sizes + 1), dtype=np.bool_)]
    tables[0][0, 0] = True
    for size in sizes:
        table = tables[-1].copy()
        table[size:, 1:] |= tables[-1][: len(table) - size, :-1]
        tables.append(table)
    return tables


def _subset(tables: Sequence[Bits], sizes: Sequence[int], total: int, number: int) -> list[bool]:
    """A subset with this sum and number."""
    chosen = [False] * len(sizes)
    for index in range(len(sizes) - 1, -1, -1):
        if not tables[index][total, number]:
            chosen[index] = True
            total, number = total - sizes[index], number - 1
    return chosen
