"""Which nodes a job gets: leaves kept together. Sizes and times are fixed.

Let n[j, l] be the units of job j on leaf l, and y[j, l], z[j, p] say whether it touches leaf l and pod p.
Minimise the sum of y + `pod_weight` * z, with sum over l of n[j, l] the job's size, and n[j, l] summed over
jobs that run together at most the units of l. Jobs that run together are looked at at every start: between
two starts nothing new is taken.

Leaves are dealt out job by job first, in many orders; where that touches more than every job needs by itself,
CP-SAT goes on from the best of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf

from meshwright.errors import OutOfTimeError
from meshwright.planner.many.sharing import (
    Allocation,
    FleetParams,
    FreeUnits,
    SizedJob,
    solve_fleet,
)
from meshwright.planner.solvers.clock import is_over

# Leaves dealt out job by job: what CP-SAT starts from, and often all there is to find.
#
# Each job goes into the pod where it touches the fewest leaves, of equal ones into the fullest. In a pod it
# takes the fullest leaf that holds all of it, else the emptiest leaf and then the rest alike (best fit). The
# first orders are by size, by start and by what runs beside a job; then jobs of the best order are moved.


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


@dataclass(frozen=True, kw_only=True)
class FleetPlaces:
    """Units of every job, by index, and how many leaves the jobs touch in all."""

    units: tuple[tuple[int, ...], ...]
    leaves_touched: int
    least_leaves: int
    """A lower bound on the leaves touched while the pods touched are least."""


def place_jobs(
    jobs: Sequence[SizedJob],
    allocations: Sequence[Allocation],
    free: FreeUnits,
    params: FleetParams,
) -> FleetPlaces:
    """Deals the units out.

    Parameters
    ----------
    jobs, allocations
        What runs, at which size, and when.
    free
        The units, with their leaves and pods.
    params
        Of the model and the solver.
    """
    wanted = [
        0 if allocation.size is None else job.sizes[allocation.size].units
        for job, allocation in zip(jobs, allocations, strict=True)
    ]
    per_leaf, bound = _units_per_leaf(wanted, _running_together(allocations, wanted), free, params)
    return FleetPlaces(
        units=_named_units(wanted, allocations, per_leaf, free.by_leaf),
        leaves_touched=sum(len(leaves) for leaves in per_leaf),
        least_leaves=bound,
    )


def _running_together(allocations: Sequence[Allocation], wanted: Sequence[int]) -> list[list[int]]:
    """The jobs that run together, at every start that is not inside a larger such set."""
    runs = [
        (index, allocation.start_s, inf if allocation.end_s is None else allocation.end_s)
        for index, allocation in enumerate(allocations)
        if wanted[index]
    ]
    sets: list[set[int]] = []
    for moment in sorted({start_s for _, start_s, _ in runs}):
        running = {index for index, start_s, end_s in runs if start_s <= moment < end_s}
        if not any(running <= larger for larger in sets):
            sets = [smaller for smaller in sets if not smaller <= running] + [running]
    return [sorted(running) for running in sets]


def _units_per_leaf(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    free: FreeUnits,
    params: FleetParams,
) -> tuple[list[PerLeaf], int]:
    """(units of every job on each leaf that it touches, a lower bound on the leaves touched in all)."""
    ground = LeafRoom(
        capacity={leaf: len(units) for leaf, units in free.by_leaf.items()}, pod_of=free.pod_of
    )
    least_leaves = sum(ground.fewest_leaves(size) for size in wanted)
    least = least_leaves + params.pod_weight * sum(ground.fewest_pods(size) for size in wanted)
    dealt = deal_out(
        wanted, together, ground, pod_weight=params.pod_weight, least=least, seed=params.seed,
        most_deals=params.dealt_jobs,
    )  # fmt: skip
    if dealt is not None and dealt.cost == least:
        return list(dealt.per_leaf), least_leaves
    return _improved(wanted, together, ground, params, dealt=dealt, least_leaves=least_leaves)


def _improved(
    wanted: Sequence[int],
    together: Sequence[Sequence[int]],
    ground: LeafRoom,
    params: FleetParams,
    *,
    dealt: Dealt | None,
    least_leaves: int,
) -> tuple[list[PerLeaf], int]:
    """The same by CP-SAT, from a first deal on where there is one."""
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    capacity, pod_of = ground.capacity, ground.pod_of
    pods = list(dict.fromkeys(pod_of.values()))
    amounts: list[dict[str, cp_model.IntVar]] = []
    cost: list[cp_model.LinearExprT] = []
    for index, size in enumerate(wanted):
        row: dict[str, cp_model.IntVar] = {}
        amounts.append(row)
        if not size:
            continue
        in_pod = {pod: model.new_bool_var(f"pod{index}_{pod}") for pod in pods}
        touched: list[cp_model.IntVar] = []
        for leaf, units in capacity.items():
            limit = min(size, units)
            row[leaf] = model.new_int_var(0, limit, f"{index}_{leaf}")
            touches = model.new_bool_var(f"on{index}_{leaf}")
            if dealt is not None:
                units_before = dealt.per_leaf[index].get(leaf, 0)
                model.add_hint(row[leaf], units_before)
                model.add_hint(touches, units_before > 0)
            model.add(row[leaf] <= limit * touches)
            model.add_implication(touches, in_pod[pod_of[leaf]])
            touched.append(touches)
        model.add(sum(row.values()) == size)
        # What the relaxation does not see: a job needs as many leaves as the largest ones that hold it.
        model.add(sum(touched) >= ground.fewest_leaves(size))
        model.add(sum(in_pod.values()) >= ground.fewest_pods(size))
        cost += touched
        cost += [params.pod_weight * literal for literal in in_pod.values()]
    for running in together:
        for leaf, units in capacity.items():
            model.add(sum(amounts[index][leaf] for index in running) <= units)
    if dealt is not None:
        model.add(sum(cost) <= dealt.cost)
    model.minimize(sum(cost))
    solver = solve_fleet(model, params)
    if solver is None:
        if dealt is None:
            raise OutOfTimeError("no way to place the jobs was found in the time given")
        return list(dealt.per_leaf), least_leaves
    per_leaf = [
        {leaf: solver.value(units) for leaf, units in row.items() if solver.value(units)}
        for row in amounts
    ]
    unproven = round(solver.objective_value - solver.best_objective_bound)
    return per_leaf, max(sum(map(len, per_leaf)) - unproven, least_leaves)


def _named_units(
    wanted: Sequence[int],
    allocations: Sequence[Allocation],
    per_leaf: Sequence[dict[str, int]],
    by_leaf: dict[str, list[int]],
) -> tuple[tuple[int, ...], ...]:
    """Units by index: at its start a job takes the first that are free on its leaves."""
    units_of: list[tuple[int, ...]] = [()] * len(wanted)
    running: list[tuple[float, list[int]]] = []
    taken: Counter[int] = Counter()
    jobs = [index for index, size in enumerate(wanted) if size]
    for index in sorted(jobs, key=lambda index: (allocations[index].start_s, index)):
        start_s, end_s = allocations[index].start_s, allocations[index].end_s
        for _, units in [run for run in running if run[0] <= start_s]:
            taken.subtract(units)
        running = [run for run in running if run[0] > start_s]
        units = []
        for leaf, number in per_leaf[index].items():
            units += [unit for unit in by_leaf[leaf] if not taken[unit]][:number]
        taken.update(units)
        running.append((inf if end_s is None else end_s, units))
        units_of[index] = tuple(sorted(units))
    return tuple(units_of)
