"""Which nodes a job gets: leaves kept together. Sizes and times are fixed.

Let n[j, l] be the units of job j on leaf l, and y[j, l], z[j, p] say whether it touches leaf l and pod p.
Minimise the sum of y + `pod_weight` * z, with sum over l of n[j, l] the job's size, and n[j, l] summed over
jobs that run together at most the units of l. Jobs that run together are looked at at every start: between
two starts nothing new is taken.

Leaves are dealt out job by job first, in many orders; where that touches more than every job needs by itself,
CP-SAT goes on from the best of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from meshwright.errors import OutOfTimeError
from meshwright.planner.many.fleet.dealing import Dealt, LeafRoom, PerLeaf, deal_out
from meshwright.planner.many.fleet.sharing import Allocation, FleetParams, solve_fleet
from meshwright.planner.many.fleet.sizes import SizedJob
from meshwright.planner.many.fleet.units import FreeUnits


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
