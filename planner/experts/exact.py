"""CP-SAT on one layer: replica counts and packing together, to proof where it is small.

Variables: chosen[e, c], expert e has c replicas; on[e, c, g], one of them is on GPU g. Loads are scaled so
that the mean GPU load is 10**7 and rounded down, so the bound stays a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.bound import partitions
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.experts.rows import LOAD_ROUNDING, Rows, State
from meshwright.planner.solvers.cp_sat import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


MEAN_LOAD = 10_000_000
MOST_LITERALS = 10_000


@dataclass(frozen=True, kw_only=True)
class ExactPacking:
    """What the solver found: slots [gpus, slots of a GPU] or None, and a bound on the largest GPU load."""

    slots: Slots | None
    bound: float
    optimal: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One packing: loads over the mean GPU load, [windows, experts], and the counts that are allowed."""

    loads: Loads
    slots: int
    gpus: int
    spread_nodes: int
    least_replicas: Slots
    """Fewest and most replicas of each expert, [experts]; the bound holds over this range."""
    most_replicas: Slots


def literals(layer: Layer) -> int:
    """Size of the model."""
    return int((layer.most_replicas - layer.least_replicas + 1).sum()) * (layer.gpus + 1)


def solve_exactly(
    layer: Layer, hint: Slots, below: float, *, work: float, seed: int
) -> ExactPacking:
    """Minimises the largest GPU load, starting from `hint` with load `below` over the mean.

    `work` is CP-SAT's deterministic time (about a second each), which ends the search at the same point on
    every machine. Any solver status but the known ones raises.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    chosen, on = replica_literals(model, layer)
    post_packing(model, layer, chosen, on)
    top = model.new_int_var(0, int(np.ceil(below * MEAN_LOAD)) + layer.slots, "top")
    post_top(model, layer, on, top)
    model.minimize(top)
    if layer.spread_nodes == 1:
        hint = _hottest_first(model, layer, chosen, on, hint)
    hint_at(model, layer, chosen, on, hint)
    solver = repeatable_solver(seed, work=work)
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        return ExactPacking(slots=None, bound=0.0, optimal=False)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(
            f"CP-SAT ended with {solver.status_name(status)} on a packing that has a solution"
        )
    return ExactPacking(
        slots=solution_slots(solver, layer, on),
        bound=solver.best_objective_bound / MEAN_LOAD,
        optimal=status == cp_model.OPTIMAL,
    )


Chosen = dict[tuple[int, int], "cp_model.IntVar"]
On = dict[tuple[int, int, int], "cp_model.IntVar"]


def replica_literals(model: cp_model.CpModel, layer: Layer) -> tuple[Chosen, On]:
    """chosen[e, c]: expert e has c replicas; on[e, c, g]: one of them is on GPU g."""
    chosen: Chosen = {}
    on: On = {}
    for e in range(layer.loads.shape[1]):
        for c in range(int(layer.least_replicas[e]), int(layer.most_replicas[e]) + 1):
            chosen[e, c] = model.new_bool_var("")
            for g in range(layer.gpus):
                on[e, c, g] = model.new_bool_var("")
    return chosen, on


def post_packing(model: cp_model.CpModel, layer: Layer, chosen: Chosen, on: On) -> None:
    """One count for each expert, that many GPUs; every slot filled; replicas spread over nodes if asked."""
    gpus, per_gpu = layer.gpus, layer.slots // layer.gpus
    for e in range(layer.loads.shape[1]):
        model.add_exactly_one(literal for (i, _), literal in chosen.items() if i == e)
    for (e, c), literal in chosen.items():
        model.add(sum(on[e, c, g] for g in range(gpus)) == c * literal)
        for g in range(gpus):
            model.add_implication(on[e, c, g], literal)
        size = gpus // layer.spread_nodes
        for start in range(0, gpus if layer.spread_nodes > 1 else 0, size):
            here = [on[e, c, g] for g in range(start, start + size)]
            model.add(sum(here) <= -(-c // layer.spread_nodes))
    for gpu in range(gpus):
        model.add(sum(on[e, c, gpu] for e, c in chosen) == per_gpu)


def post_top(model: cp_model.CpModel, layer: Layer, on: On, top: cp_model.IntVar) -> None:
    """No GPU's load is above `top`, in any window."""
    from meshwright.planner.solvers.or_tools import cp_model

    weights = np.floor(layer.loads * MEAN_LOAD).astype(np.int64)
    for gpu in range(layer.gpus):
        replicas = [(e, c, literal) for (e, c, g), literal in on.items() if g == gpu]
        literals_here = [literal for _, _, literal in replicas]
        for window in weights:
            shares = [int(window[e] // c) for e, c, _ in replicas]
            model.add(cp_model.LinearExpr.weighted_sum(literals_here, shares) <= top)


def solution_slots(solver: cp_model.CpSolver, layer: Layer, on: On) -> Slots:
    """Slots [gpus, slots of a GPU] of the solver's solution."""
    by_gpu: list[list[int]] = [[] for _ in range(layer.gpus)]
    for (expert, _, gpu), literal in on.items():
        if solver.value(literal):
            by_gpu[gpu].append(expert)
    return np.array(by_gpu, dtype=np.int64)


def _hottest_first(
    model: cp_model.CpModel, layer: Layer, chosen: Chosen, on: On, hint: Slots
) -> Slots:
    """GPUs are alike: the hottest expert's replicas are on the first ones. Returns the hint in that order."""
    hot = int(layer.loads.max(axis=0).argmax())
    for (e, c), literal in chosen.items():
        if e == hot:
            for g in range(layer.gpus):
                model.add(on[e, c, g] == (literal if g < c else 0))
    return np.asarray(hint[np.argsort(~(hint == hot).any(axis=1), kind="stable")])


def hint_at(model: cp_model.CpModel, layer: Layer, chosen: Chosen, on: On, hint: Slots) -> None:
    """Hints every literal at slots [gpus, slots of a GPU]."""
    counts = np.bincount(hint.ravel(), minlength=layer.loads.shape[1])
    gpu_experts = [set(row.tolist()) for row in hint]
    for (e, c), literal in chosen.items():
        model.add_hint(literal, bool(counts[e] == c))
    for (e, c, g), literal in on.items():
        model.add_hint(literal, bool(counts[e] == c and e in gpu_experts[g]))


# Rows so small that every choice of replica counts and every packing can be looked at: proven optimal.


_MOST_PACKINGS = 20_000
_MOST_COUNTS = 5_000
_PART = 4_000_000
_BIG = 1e30


def is_enumerable(rows: Rows) -> bool:
    """Whether all packings of all counts are few enough."""
    experts = rows.loads.shape[2]
    few = partitions(rows.slots, rows.gpus) <= _MOST_PACKINGS
    return few and comb(rows.slots - 1, experts - 1) <= _MOST_COUNTS and rows.spread_nodes == 1


def enumerate_rows(rows: Rows, state: State) -> None:
    """The best placement of every row with a gap, in place; value and bound meet."""
    counts = _all_counts(rows.loads.shape[2], rows.slots, rows.gpus)
    for row in state.unsolved(rows, LOAD_ROUNDING).tolist():
        best = _best(rows.loads[row], counts, rows.gpus, state.value[row] * (1 - LOAD_ROUNDING / 2))
        if best is not None:
            state.offer(rows, np.array([row]), best[None])
        # Nothing is below the value by more than rounding.
        state.bound[row] = max(state.bound[row], state.value[row] * (1 - LOAD_ROUNDING / 2))


def _all_counts(experts: int, slots: int, gpus: int) -> Slots:
    """Counts [ways, experts] of at least one replica and at most one on a GPU, that fill the slots."""
    marks = np.array(list(combinations(range(slots - 1), experts - 1)), dtype=np.int64)
    edges = np.pad(
        marks.reshape(-1, experts - 1), ((0, 0), (1, 1)), constant_values=((0, 0), (-1, slots - 1))
    )
    counts = np.diff(edges, axis=1)
    return np.asarray(counts[(counts <= gpus).all(axis=1)])


@cache
def _packings(slots: int, gpus: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sets of slots that a GPU can hold [sets, slots of a GPU]; sets of every packing [packings, gpus]."""
    size = slots // gpus
    sets = list(combinations(range(slots), size))
    index = {gpu_set: i for i, gpu_set in enumerate(sets)}

    def split(remaining: tuple[int, ...]) -> Iterator[list[int]]:
        if not remaining:
            yield []
            return
        for rest in combinations(remaining[1:], size - 1):
            gpu_set = (remaining[0], *rest)
            for other_sets in split(tuple(i for i in remaining if i not in gpu_set)):
                yield [index[gpu_set], *other_sets]

    return np.array(sets, dtype=np.int64), np.array(
        list(split(tuple(range(slots)))), dtype=np.int64
    )


def _best(loads: Loads, counts: Slots, gpus: int, below: float) -> Slots | None:
    """Slots [gpus, slots of a GPU] with the least largest load, if there are any with less than `below`."""
    sets, packings = _packings(int(counts[0].sum()), gpus)
    best: tuple[float, Slots | None] = (below, None)
    step = max(1, _PART // packings.size)
    for part in (counts[i : i + step] for i in range(0, len(counts), step)):
        expert = np.stack(
            [np.repeat(np.arange(len(row_counts)), row_counts) for row_counts in part]
        )
        replica = np.take_along_axis(loads[None] / part[:, None], expert[:, None], axis=2)
        set_experts = expert[:, sets]
        is_doubled = (set_experts[..., 1:] == set_experts[..., :-1]).any(axis=2)
        load = replica[:, :, sets].sum(axis=3).max(axis=1) + _BIG * is_doubled
        # A slot whose lightest set is too heavy rules the counts out before their packings are looked at.
        lightest = np.stack(
            [load[:, (sets == i).any(axis=1)].min(axis=1) for i in range(sets.max() + 1)]
        )
        for way in np.flatnonzero(lightest.max(axis=0) < best[0]):
            top = load[way][packings].max(axis=1)
            lightest_packing = int(top.argmin())
            if top[lightest_packing] < best[0]:
                best = (float(top[lightest_packing]), expert[way][sets[packings[lightest_packing]]])
    return best[1]
