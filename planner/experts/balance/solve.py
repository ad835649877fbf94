"""From loads to slots with a certified bound: heuristic first, then CP-SAT where a gap is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from meshwright.errors import InfeasibleError
from meshwright.planner.experts.balance.crew import Crew
from meshwright.planner.experts.balance.enumerated import enumerate_rows, is_enumerable
from meshwright.planner.experts.balance.exact import (
    MOST_LITERALS,
    ExactPacking,
    Layer,
    literals,
    solve_exactly,
)
from meshwright.planner.experts.balance.heuristic import Budget, first_answer, search, sharpen
from meshwright.planner.experts.balance.rows import EXACT, OPEN, Rows, Solved, State
from meshwright.planner.experts.problem import Slots

_LEAST_WORK = 0.05
"""CP-SAT's deterministic time below which a row is not worth the model."""
_PROGRAMME_S = 0.025
"""Seconds for one set of counts on a row of few slots, until patterns rule it out or allow it."""
_PROCESS_COST = 4000
"""Slots of open rows above which other processes are worth their start."""


@dataclass(frozen=True, kw_only=True)
class PlacementEffort:
    """How far to go. All limits are amounts of work, so the answer does not depend on the machine's speed."""

    gap: float = 0.005
    """Stop where balance is within this of the bound."""
    time_limit_s: float = 60.0
    """Shared out over the rows as work: about so long on an idle machine of 2 cores."""
    exact: bool = True
    """Whether CP-SAT may be used."""
    seed: int = 0
    workers: int = 1
    crew: Crew | None = None
    """Processes that are at hand; `place` starts them."""
    on_first: Callable[[State], None] | None = None
    """Told the first answer, before it is bettered."""


def solve_rows(rows: Rows, effort: PlacementEffort) -> Solved:
    """First answer, search, CP-SAT. Raises InfeasibleError if none was found within the limits."""
    state = first_answer(rows, effort.gap)
    if effort.on_first is not None:
        effort.on_first(state)
    if is_enumerable(rows):
        enumerate_rows(rows, state)
    better(rows, state, effort)
    if effort.exact:
        close(rows, state, effort)
    if not np.isfinite(state.value).all():
        raise InfeasibleError(
            f"no placement of {rows.loads.shape[2]} experts in {rows.slots} slots on {rows.gpus} GPUs was "
            "found that keeps replicas apart; use more slots or fewer limits"
        )
    return Solved(slots=state.slots, value=state.value, bound=np.minimum(state.bound, state.value))


def budget_of(rows: Rows, count: int, effort: PlacementEffort, *, first: bool) -> Budget:
    """Work for each of `count` open rows, by what its parts cost on one core."""
    total_s = 2 * effort.time_limit_s / max(count, 1)
    round_s = 24e-6 * rows.slots * (1 + rows.slots / 300)
    bound_s = 0.003 + 0.007 * rows.slots / 300
    return Budget(
        generations=0 if first else int(np.clip(0.15 * total_s / round_s, 1, 300)),
        limits=int(np.clip(1.2 * total_s / round_s, 1, 18)),
        bound_steps=int(np.clip(0.35 * total_s / bound_s + 0.5, 0, 10)),
        programmes=0 if first else int(np.clip(0.6 * total_s / _PROGRAMME_S, 0, 200)),
    )


def better(rows: Rows, state: State, effort: PlacementEffort) -> None:
    """The search, its open rows over processes: first on all of them, then more on those that stay open."""
    sharpen(rows, state, effort.gap)
    for first in (True, False):
        left = state.open(rows, effort.gap * OPEN)
        if not len(left):
            return
        budget = budget_of(rows, len(left), effort, first=first)
        crew = effort.crew
        if crew is None or crew.workers <= 1 or len(left) * rows.slots < _PROCESS_COST:
            parts = [left]
        else:
            parts = [left[i :: 2 * crew.workers] for i in range(min(2 * crew.workers, len(left)))]
        jobs = [
            (
                rows.take(p),
                State(state.slots[p], state.value[p], state.bound[p]),
                effort.gap,
                budget,
                effort.seed,
            )
            for p in parts
        ]
        for part, found in zip(parts, (crew or Crew(1)).map(_search_part, jobs), strict=True):
            state.slots[part], state.value[part], state.bound[part] = (
                found.slots,
                found.value,
                found.bound,
            )


def _search_part(job: tuple[Rows, State, float, Budget, int]) -> State:
    rows, state, gap, budget, seed = job
    search(rows, state, gap=gap, budget=budget, seed=seed)
    return state


@dataclass(frozen=True, kw_only=True)
class _Task:
    layer: Layer
    hint: Slots
    below: float
    covers: bool
    """Whether the counts allowed are all there are, so that the solver's bound is the layer's."""
    work: float
    seed: int


def close(rows: Rows, state: State, effort: PlacementEffort, share: float = 0.25) -> None:
    """CP-SAT on rows that are still open, widest gap first; `share` of the limit is shared out over them."""
    gap = state.value / np.maximum(state.bound, rows.floor) - 1
    left = [
        int(row) for row in np.argsort(-gap, kind="stable") if gap[row] > max(effort.gap, EXACT)
    ]
    left = [row for row in left if np.isfinite(state.value[row])]
    total = share * effort.time_limit_s * 2
    left = left[: int(total / _LEAST_WORK)]
    if not left:
        return
    tasks = [
        _task(
            rows,
            row,
            state.slots[row],
            below=state.value[row],
            work=total / len(left),
            seed=effort.seed,
        )
        for row in left
    ]
    for row, found in zip(left, _run(tasks, effort.crew), strict=True):
        if found is None:
            continue
        task, exact = found
        if task.covers:
            state.bound[row] = max(state.bound[row], exact.bound)
        if exact.slots is not None:
            state.offer(rows, np.array([row]), exact.slots[None])
            if task.covers and exact.optimal:
                state.bound[row] = max(state.bound[row], state.value[row] * (1 - EXACT))


def _task(
    rows: Rows, row: int, hint: Slots, *, below: float, work: float, seed: int
) -> _Task | None:
    experts = rows.loads.shape[2]
    counts = np.bincount(hint.ravel(), minlength=experts)
    most_ever = min(rows.gpus, rows.slots - experts + 1)
    layer = Layer(
        loads=rows.loads[row],
        slots=rows.slots,
        gpus=rows.gpus,
        spread_nodes=rows.spread_nodes,
        least=np.ones(experts, dtype=np.int64),
        most=np.full(experts, most_ever),
    )
    covers = literals(layer) <= MOST_LITERALS // 4
    if not covers:
        near = replace(
            layer, least=np.maximum(counts - 1, 1), most=np.minimum(counts + 1, most_ever)
        )
        layer = (
            near
            if literals(near) <= MOST_LITERALS // 2
            else replace(layer, least=counts, most=counts)
        )
        covers = rows.slots == experts
    if literals(layer) > MOST_LITERALS:
        return None
    return _Task(layer=layer, hint=hint, below=float(below), covers=covers, work=work, seed=seed)


def _run(tasks: list[_Task | None], crew: Crew | None) -> list[tuple[_Task, ExactPacking] | None]:
    if crew is None or sum(task is not None for task in tasks) < 4:
        return [_solve(task) for task in tasks]
    return crew.map(_solve, tasks)


def _solve(task: _Task | None) -> tuple[_Task, ExactPacking] | None:
    if task is None:
        return None
    return task, solve_exactly(task.layer, task.hint, task.below, work=task.work, seed=task.seed)
