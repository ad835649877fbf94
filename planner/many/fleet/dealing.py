"""Leaves dealt out job by job: what CP-SAT starts from, and often all there is to find.

Each job goes into the pod where it touches the fewest leaves, of equal ones into the fullest. In a pod it
takes the fullest leaf that holds all of it, else the emptiest leaf and then the rest alike (best fit). The
first orders are by size, by start and by what runs beside a job; then jobs of the best order are moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from meshwright.planner.solvers.clock import is_over

PerLeaf = dict[str, int]
"""Units of one job on each leaf that it touches."""


@dataclass(frozen=True, kw_only=True)
class LeafRoom:
    """The leaves to deal out."""

    capacity: Mapping[str, int]
    """Free units of each leaf."""
    pod_of: Mapping[str, str]

    @property
    def pods(self) -> dict[str, list[str]]:
        """Leaves by pod."""
        by_pod = sorted(self.capacity, key=lambda leaf: self.pod_of[leaf])
        return {
            pod: list(leaves) for pod, leaves in groupby(by_pod, lambda leaf: self.pod_of[leaf])
        }

    def fewest_leaves(self, size: int) -> int:
        """Leaves that `size` units need at least."""
        return _fewest(size, self.capacity.values())

    def fewest_pods(self, size: int) -> int:
        """Pods that `size` units need at least."""
        totals = [sum(self.capacity[leaf] for leaf in leaves) for leaves in self.pods.values()]
        return _fewest(size, totals)


def _fewest(size: int, capacities: Iterable[int]) -> int:
    """How many of the largest hold so many units."""
    if not size:
        return 0
    totals = list(accumulate(sorted(capacities, reverse=True)))
    return next((count for count, total in enumerate(totals, 1) if total >= size), len(totals))


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """The best deal found."""

    per_leaf: tuple[PerLeaf, ...]
    cost: int
    """Leaves touched, and `pod_weight` for every pod touched."""


def deal_out(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    ground: LeafRoom,
    *,
    pod_weight: int,
    least: int,
    seed: int,
    most_deals: int,
) -> Dealt | None:
    """The best deal of many orders; None where jobs found no room in any.

    Parameters
    ----------
    wanted
        Units of each job.
    together
        Sets of jobs that run together.
    ground
        What is dealt out.
    pod_weight
        What a pod that a job touches counts, in leaves.
    least
        A lower bound on the cost: a deal that reaches it is the best.
    seed
        Of the changes of order.
    most_deals
        Jobs to be dealt over all orders: the work, which does not depend on the machine.
    """
    moments = [
        [time for time, running in enumerate(together) if job in running]
        for job in range(len(wanted))
    ]
    best: tuple[int, list[PerLeaf]] | None = None
    order: list[int] = []
    orders = _orders(wanted, moments, order, random.Random(seed))
    for _ in range(max(3, most_deals // max(1, len(wanted)))):
        tried = next(orders)
        per_leaf = _Deal(ground, len(together)).all_of(tried, wanted, moments)
        if per_leaf is not None:
            cost = _cost(per_leaf, ground, pod_weight)
            if best is None or cost <= best[0]:
                best, order[:] = (cost, per_leaf), tried
        if (best is not None and best[0] == least) or is_over():
            break
    return None if best is None else Dealt(per_leaf=tuple(best[1]), cost=best[0])


def _cost(per_leaf: Sequence[PerLeaf], ground: LeafRoom, pod_weight: int) -> int:
    pods = sum(len({ground.pod_of[leaf] for leaf in row}) for row in per_leaf)
    return sum(map(len, per_leaf)) + pod_weight * pods


def _orders(
    wanted: Sequence[int],
    moments: Sequence[Sequence[int]],
    best: Sequence[int],
    chance: random.Random,
) -> Iterator[list[int]]:
    """The first orders, then changes of the best so far."""
    jobs = [job for job, size in enumerate(wanted) if size]
    yield sorted(jobs, key=lambda job: -wanted[job])
    yield sorted(jobs, key=lambda job: (moments[job][0], -wanted[job]))
    yield sorted(jobs, key=lambda job: -wanted[job] * len(moments[job]))
    while True:
        order = list(best) if best else chance.sample(jobs, len(jobs))
        for _ in range(chance.choice((1, 1, 2, 4))):
            moved = order.pop(chance.randrange(len(order)))
            order.insert(chance.randrange(len(order) + 1), moved)
        yield order


class _Deal:
    """Free units of every leaf at every moment, while jobs take theirs."""

    def __init__(self, ground: LeafRoom, moments: int) -> None:
        self._pods = ground.pods
        self._free = {leaf: [units] * moments for leaf, units in ground.capacity.items()}

    def all_of(
        self, order: Sequence[int], wanted: Sequence[int], moments: Sequence[Sequence[int]]
    ) -> list[PerLeaf] | None:
        """Units of every job by leaf; None where one finds no room."""
        per_leaf: list[PerLeaf] = [{} for _ in wanted]
        for job in order:
            taken = self._taken(wanted[job], moments[job])
            if taken is None:
                return None
            per_leaf[job] = taken
            for leaf, units in taken.items():
                for moment in moments[job]:
                    self._free[leaf][moment] -= units
        return per_leaf

    def _taken(self, size: int, moments: Sequence[int]) -> PerLeaf | None:
        free = {
            leaf: min(units[moment] for moment in moments) for leaf, units in self._free.items()
        }
        room = {pod: sum(free[leaf] for leaf in leaves) for pod, leaves in self._pods.items()}
        fits = [
            _from_leaves(size, {leaf: free[leaf] for leaf in leaves})
            for pod, leaves in sorted(self._pods.items(), key=lambda item: room[item[0]])
            if room[pod] >= size
        ]
        if fits:
            return min(fits, key=len)
        taken: PerLeaf = {}
        for pod in sorted(room, key=lambda pod: -room[pod]):
            units = min(size, room[pod])
            taken |= _from_leaves(units, {leaf: free[leaf] for leaf in self._pods[pod]})
            size -= units
        return taken if not size else None


def _from_leaves(size: int, free: dict[str, int]) -> PerLeaf:
    """Units of each leaf for a job that fits into them."""
    taken: PerLeaf = {}
    while size:
        fits = [leaf for leaf, units in free.items() if units >= size]
        leaf = min(fits, key=free.__getitem__) if fits else max(free, key=free.__getitem__)
        taken[leaf] = min(size, free.pop(leaf))
        size -= taken[leaf]
    return taken
