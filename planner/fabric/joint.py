"""Layout and mapping chosen together: best first at scale, one CP-SAT model on small instances.

A candidate is a layout with its step time on a fabric whose up-links cost nothing (`base_s`, a lower bound)
and its mapping problem; `per_uplink_s` says what a busy second of an up-link adds to the step. The time to
minimise, base + per_uplink * busy seconds of all up-links, is linear in the mapping's counts:

    exactly one layout                      sum_i layout_i = 1
    its stages have their slots             sum_l n_{i,l,s} = slots_i layout_i
    in the room of every leaf               sum_s n_{i,l,s} <= free_{i,l} layout_i
    a leaf or pod that a stage is cut by    cut_{i,b,s} = [0 < n_{i,b,s} < slots_i]
    neighbours that are not matched in it   apart_{i,b,s} >= |n_{i,b,s} - n_{i,b,s+1}|

The counts are exact where groups are single slots and no virtual stage wraps round; `solve_jointly` refuses
others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.fabric.problem import IntArray, MappingError, MappingProblem
from planner.fabric.solution import PROVEN, MappingSolution
from planner.fabric.solve import least_traffic

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST_CELLS = 2_000
"""Counts (leaf, stage) of all candidates in one model."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that is in the race."""

    base_s: float
    problem: MappingProblem
    per_uplink_s: float = 1.0

    def price_s(self, busy_s: float) -> float:
        """The step with the up-links busy for so long."""
        return self.base_s + self.per_uplink_s * busy_s


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What was chosen. `status` is optimal where bound and price have met."""

    candidate: int
    price_s: float
    bound_s: float
    mapping: MappingSolution | None
    evaluated: int
    """Candidates whose mapping was solved."""

    @property
    def gap(self) -> float:
        """Of the price."""
        return (self.price_s - self.bound_s) / self.price_s if self.price_s > 0 else 0.0

    @property
    def status(self) -> str:
        """optimal, or feasible with `gap`."""
        return "optimal" if self.gap <= PROVEN else "feasible"


Solver = Callable[[MappingProblem], MappingSolution]


def best_first(
    candidates: Sequence[Candidate], solver: Solver = least_traffic, *, time_limit_s: float = 600.0
) -> Joined:
    """Solves the mapping of one candidate after the other, the least bound first, until no bound is better.

    Raises MappingError where no candidate fits its leaves.
    """
    start = time.monotonic()
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].base_s, i))
    best: tuple[float, int, MappingSolution | None] = (float("inf"), -1, None)
    bound_s, evaluated = float("inf"), 0
    for at in order:
        one = candidates[at]
        if one.base_s >= best[0] or time.monotonic() - start > time_limit_s:
            bound_s = min(bound_s, one.base_s)
            break
        try:
            one.problem.check_room()
        except MappingError:
            continue
        evaluated += 1
        found = solver(one.problem)
        bound_s = min(bound_s, one.price_s(found.bound_s))
        price = one.price_s(found.price_s)
        if price < best[0]:
            best = (price, at, found)
    if best[1] < 0:
        raise MappingError("no layout fits the free slots")
    return Joined(
        candidate=best[1],
        price_s=best[0],
        bound_s=min(bound_s, best[0]),
        mapping=best[2],
        evaluated=evaluated,
    )


@dataclass(frozen=True, kw_only=True)
class JointChoice:
    """What the one model chose."""

    candidate: int
    counts: IntArray
    """Slots of each stage in each leaf, [leaves, stages]."""
    price_s: float
    proven: bool


def solve_jointly(
    candidates: Sequence[Candidate], *, seed: int = 0, work: float = 60.0, units: int = 10**9
) -> JointChoice:
    """The whole choice in one model; `work` is CP-SAT's deterministic time, `units` the objective's range.

    Raises MappingError where the instance is too large or not exact in counts, or nothing fits.
    """
    from ortools.sat.python import cp_model

    _check(candidates)
    model = cp_model.CpModel()
    ceiling = max(c.base_s for c in candidates) + sum(c.per_uplink_s * _most_s(c.problem) for c in candidates)
    unit = max(ceiling, 1e-12) / units
    layouts = [model.new_bool_var(f"layout_{i}") for i in range(len(candidates))]
    model.add_exactly_one(layouts)
    objective = [round(c.base_s / unit) * y for c, y in zip(candidates, layouts, strict=True)]
    cells: list[list[list[cp_model.IntVar]]] = []
    for index, (one, chosen) in enumerate(zip(candidates, layouts, strict=True)):
        cells.append(_post_counts(model, one.problem, chosen, index))
        objective += _post_cost(model, one, cells[-1], one.per_uplink_s / unit)
    model.minimize(sum(objective))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise MappingError(f"the joint model is {solver.status_name(status).lower()}")
    index = next(i for i, y in enumerate(layouts) if solver.boolean_value(y))
    counts = np.array([[solver.value(n) for n in row] for row in cells[index]], dtype=np.int64)
    return JointChoice(
        candidate=index,
        counts=counts,
        price_s=solver.objective_value * unit,
        proven=status == cp_model.OPTIMAL,
    )


def _check(candidates: Sequence[Candidate]) -> None:
    cells = sum(len(c.problem.leaf_slots) * c.problem.stages for c in candidates)
    if cells > LARGEST_CELLS:
        raise MappingError(f"{cells} counts are more than the {LARGEST_CELLS} of one model")
    for one in candidates:
        t = one.problem.traffic
        if t.wrap_bytes or t.context_slots > 1 or t.expert_slots > 1 or t.expert_ring_bytes:
            raise MappingError("groups of several slots, or virtual stages, are not exact in counts")


def _most_s(problem: MappingProblem) -> float:
    """More than any mapping costs."""
    t = problem.traffic
    each = problem.stages * t.ring_bytes + 2.0 * problem.needed * t.hop_bytes
    return each * (sum(problem.leaf_s_per_byte) + sum(problem.pod_s_per_byte))


def _post_counts(
    model: cp_model.CpModel, problem: MappingProblem, chosen: cp_model.IntVar, index: int
) -> list[list[cp_model.IntVar]]:
    counts = [
        [
            model.new_int_var(0, min(free, problem.slots), f"n_{index}_{leaf}_{stage}")
            for stage in range(problem.stages)
        ]
        for leaf, free in enumerate(problem.leaf_slots)
    ]
    for row, free in zip(counts, problem.leaf_slots, strict=True):
        model.add(sum(row) <= free * chosen)
    for column in zip(*counts, strict=True):
        model.add(sum(column) == problem.slots * chosen)
    return counts


def _post_cost(
    model: cp_model.CpModel, one: Candidate, counts: list[list[cp_model.IntVar]], scale: float
) -> list[Any]:
    """Cuts and hops of every leaf, and of every pod, whose counts are the sums of its leaves'."""
    problem = one.problem
    blocks: list[tuple[list[Any], float]] = [
        (list(row), cost) for row, cost in zip(counts, problem.leaf_s_per_byte, strict=True)
    ]
    for pod, cost in enumerate(problem.pod_s_per_byte):
        mine = [row for row, p in zip(counts, problem.leaf_pod, strict=True) if p == pod]
        blocks.append(([sum(column) for column in zip(*mine, strict=True)], cost))
    terms: list[Any] = []
    for held, cost in blocks:
        for stage, n in enumerate(held):
            ring = round(problem.traffic.ring_bytes * cost * scale)
            if ring:
                terms.append(ring * _cut(model, n, problem.slots))
            hop = round(problem.traffic.hop_bytes * cost * scale)
            if hop and stage:
                apart = model.new_int_var(0, problem.slots, "")
                model.add(apart >= n - held[stage - 1])
                model.add(apart >= held[stage - 1] - n)
                terms.append(hop * apart)
    return terms


def _cut(model: cp_model.CpModel, n: Any, slots: int) -> cp_model.IntVar:
    """Whether a block holds some but not all slots of a stage; free to be false at 0 and at all."""
    some, whole = model.new_bool_var(""), model.new_bool_var("")
    model.add(n <= (slots - 1) * some + slots * whole)
    model.add(n >= slots * whole)
    return some
