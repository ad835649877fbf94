"""Which nodes a job gets: leaves kept together. Sizes and times are given; CP-SAT deals out the leaves.

A job that touches fewer pods is better, then one that touches fewer leaves. At the start of every job the
running ones must fit every leaf; between two starts nothing new is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.many.fleet.floor import Floor
from meshwright.planner.many.fleet.model import Effort, Share, solved
from meshwright.planner.many.fleet.options import Choices

POD_WEIGHT = 1000


@dataclass(frozen=True, kw_only=True)
class Places:
    """Units of every job, by index, and how many leaves the jobs touch in all."""

    units: tuple[tuple[int, ...], ...]
    leaves_touched: int
    least_leaves: int
    """No dealing touches fewer while the pods touched are least; equal to `leaves_touched` where proven."""


def place(jobs: Sequence[Choices], shares: Sequence[Share], floor: Floor, effort: Effort) -> Places:
    """Deals the units out."""
    leaves = floor.leaves
    wanted = [
        job.options[s.option].units if s.option is not None else 0
        for job, s in zip(jobs, shares, strict=True)
    ]
    active = _active(shares, wanted)
    counts, touched, least = _dealt(wanted, active, leaves, floor.pod_of, effort)
    return Places(
        units=_named(wanted, shares, counts, leaves), leaves_touched=touched, least_leaves=least
    )


def _active(shares: Sequence[Share], wanted: Sequence[int]) -> list[list[int]]:
    """The jobs that run together, at every start that is not inside a larger such set."""
    sets: list[set[int]] = []
    for moment in sorted(
        {share.start_s for share, size in zip(shares, wanted, strict=True) if size}
    ):
        running = {
            at
            for at, share in enumerate(shares)
            if wanted[at]
            and share.start_s <= moment
            and (share.end_s is None or moment < share.end_s)
        }
        if not any(running <= other for other in sets):
            sets = [other for other in sets if not other <= running] + [running]
    return [sorted(running) for running in sets]


def _dealt(
    wanted: Sequence[int],
    active: Sequence[Sequence[int]],
    leaves: dict[str, list[int]],
    pod_of: dict[str, str],
    effort: Effort,
) -> tuple[list[dict[str, int]], int, int]:
    """(units of every job on every leaf, leaves touched, a bound on them)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    pods = list(dict.fromkeys(pod_of.values()))
    amounts: list[dict[str, cp_model.IntVar]] = []
    cost: list[cp_model.LinearExprT] = []
    for at, size in enumerate(wanted):
        row: dict[str, cp_model.IntVar] = {}
        in_pod = {pod: model.new_bool_var(f"pod{at}_{pod}") for pod in pods} if size else {}
        on: list[cp_model.IntVar] = []
        for leaf, units in leaves.items() if size else ():
            most = min(size, len(units))
            row[leaf] = model.new_int_var(0, most, f"{at}_{leaf}")
            there = model.new_bool_var(f"on{at}_{leaf}")
            model.add(row[leaf] <= most * there)
            model.add_implication(there, in_pod[pod_of[leaf]])
            on.append(there)
        if size:
            model.add(sum(row.values()) == size)
            # What the relaxation does not see: a job needs as many leaves as the largest ones that hold it.
            model.add(sum(on) >= fewest_leaves(size, [len(units) for units in leaves.values()]))
            cost += on
            cost += [POD_WEIGHT * literal for literal in in_pod.values()]
        amounts.append(row)
    for running in active:
        for leaf, units in leaves.items():
            model.add(sum(amounts[at][leaf] for at in running) <= len(units))
    model.minimize(sum(cost))
    solver = solved(model, effort)
    counts = [
        {leaf: solver.value(v) for leaf, v in row.items() if solver.value(v)} for row in amounts
    ]
    touched = sum(len(row) for row in counts)
    slack = round(solver.objective_value - solver.best_objective_bound)
    return counts, touched, max(touched - slack, 0)


def fewest_leaves(size: int, room: Sequence[int]) -> int:
    """Leaves that `size` units need at least."""
    held = 0
    for count, most in enumerate(sorted(room, reverse=True), start=1):
        held += most
        if held >= size:
            return count
    return len(room)


def _named(
    wanted: Sequence[int],
    shares: Sequence[Share],
    counts: Sequence[dict[str, int]],
    leaves: dict[str, list[int]],
) -> tuple[tuple[int, ...], ...]:
    """Units by index: at its start a job takes the first that are free on its leaves."""
    found: list[tuple[int, ...]] = [()] * len(wanted)
    held: list[tuple[float, list[int]]] = []
    taken: Counter[int] = Counter()
    for at in sorted(
        (at for at, size in enumerate(wanted) if size), key=lambda at: (shares[at].start_s, at)
    ):
        for end_s, units in [entry for entry in held if entry[0] <= shares[at].start_s]:
            taken.subtract(units)
            held.remove((end_s, units))
        mine: list[int] = []
        for leaf, count in counts[at].items():
            mine += [unit for unit in leaves[leaf] if not taken[unit]][:count]
        taken.update(mine)
        end = shares[at].end_s
        held.append((float("inf") if end is None else end, mine))
        found[at] = tuple(sorted(mine))
    return tuple(found)
