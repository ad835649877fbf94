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
from meshwright.planner.experts.balance.heuristic import (
    SearchBudget,
    first_answer,
    search_counts,
    search_limits,
    split_gpu_pairs,
)
from meshwright.planner.experts.balance.rows import LOAD_ROUNDING, Rows, Solved, State
from meshwright.planner.experts.params import BALANCE
from meshwright.planner.experts.problem import Slots
from meshwright.planner.solvers.clock import is_over


@dataclass(frozen=True, kw_only=True)
class PlacementEffort:
    """How far to go. All limits are amounts of work, so the answer does not depend on the machine's speed.

    Parameters
    ----------
    gap
        Stop where balance is within this of the bound, relative.
    time_limit_s
        Shared out over the rows as work: about so long on an idle machine of 2 cores.
    exact
        Whether CP-SAT may be used on whole layers.
    crew
        Processes that are at hand; `place_layers` starts them.
    on_first
        Called with the first answer, before it is bettered.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    exact: bool = True
    seed: int = 0
    workers: int = 1
    crew: Crew | None = None
    on_first: Callable[[State], None] | None = None


def solve_rows(rows: Rows, effort: PlacementEffort) -> Solved:
    """First answer, search, CP-SAT. Raises InfeasibleError if none was found within the limits."""
    state = first_answer(rows, effort.gap)
    if effort.on_first is not None:
        effort.on_first(state)
    if is_enumerable(rows):
        enumerate_rows(rows, state)
    improve_rows(rows, state, effort)
    if effort.exact:
        close_gaps(rows, state, effort, BALANCE.exact_share)
    if not np.isfinite(state.value).all():
        raise InfeasibleError(
            f"no placement of {rows.loads.shape[2]} experts in {rows.slots} slots on {rows.gpus} GPUs was "
            "found that keeps replicas apart; use more slots or fewer limits"
        )
    return Solved(slots=state.slots, value=state.value, bound=np.minimum(state.bound, state.value))


def search_budget(rows: Rows, count: int, effort: PlacementEffort) -> SearchBudget:
    """Work for each of `count` unsolved rows, by what its parts cost on one core."""
    total_s = 2 * effort.time_limit_s / max(count, 1)
    round_s = 24e-6 * rows.slots * (1 + rows.slots / 300)
    transfer_s = (2e-5 if rows.slots == 2 * rows.gpus else 2e-4) * rows.slots
    bound_s = 0.003 + 0.007 * rows.slots / 300
    return SearchBudget(
        limits=int(np.clip(1.2 * total_s / round_s, 1, 18)),
        bound_steps=int(np.clip(0.35 * total_s / bound_s + 0.5, 0, 10)),
        recounts=int(np.clip(5 * total_s / round_s, 6, 20_000)),
        transfers=int(np.clip(0.3 * total_s / transfer_s, 0, 2400)),
    )


def improve_rows(rows: Rows, state: State, effort: PlacementEffort) -> None:
    """The search, first on all unsolved rows, then more of it on those that stay so; changes `state`."""
    split_gpu_pairs(rows, state, effort.gap)
    for step in (_search_limits, _search_counts):
        unsolved = state.unsolved(rows, effort.gap * BALANCE.search_share)
        if not len(unsolved) or is_over():
            return
        budget = search_budget(rows, len(unsolved), effort)
        crew = effort.crew or Crew(1)
        parts = [unsolved]
        if crew.workers > 1 and len(unsolved) * rows.slots >= BALANCE.parallel_slots:
            count = min(2 * crew.workers, len(unsolved))
            parts = [unsolved[i::count] for i in range(count)]
        jobs = [
            _Job(
                rows=rows.take(part),
                state=State(state.slots[part], state.value[part], state.bound[part]),
                gap=effort.gap,
                budget=budget,
                seed=effort.seed,
            )
            for part in parts
        ]
        for part, result in zip(parts, crew.map(step, jobs), strict=True):
            state.slots[part] = result.slots
            state.value[part] = result.value
            state.bound[part] = result.bound


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Rows for one process."""

    rows: Rows
    state: State
    gap: float
    budget: SearchBudget
    seed: int


def _search_limits(job: _Job) -> State:
    search_limits(job.rows, job.state, job.gap, job.budget)
    return job.state


def _search_counts(job: _Job) -> State:
    search_counts(job.rows, job.state, job.gap, job.budget, job.seed)
    return job.state


@dataclass(frozen=True, kw_only=True)
class _Task:
    layer: Layer
    hint: Slots
    below: float
    covers: bool
    """Whether the counts allowed are all there are, so that the solver's bound is the layer's."""
    work: float
    seed: int


def close_gaps(rows: Rows, state: State, effort: PlacementEffort, share: float) -> None:
    """CP-SAT on unsolved rows, widest gap first; `share` of the time limit is shared out over them."""
    gap = state.value / np.maximum(state.bound, rows.needed) - 1
    widest_first = np.argsort(-gap, kind="stable")
    wide = (gap > max(effort.gap, LOAD_ROUNDING)) & np.isfinite(state.value)
    total = share * effort.time_limit_s * 2
    unsolved = [int(row) for row in widest_first if wide[row]]
    unsolved = unsolved[: int(total / BALANCE.least_exact_work)]
    if not unsolved:
        return
    work = total / len(unsolved)
    tasks = [_task(rows, state, row, work=work, seed=effort.seed) for row in unsolved]
    for row, task, packing in zip(unsolved, tasks, _run(tasks, effort.crew), strict=True):
        if task is None or packing is None:
            continue
        if task.covers:
            state.bound[row] = max(state.bound[row], packing.bound)
        if packing.slots is not None:
            state.offer(rows, np.array([row]), packing.slots[None])
            if task.covers and packing.optimal:
                state.bound[row] = max(state.bound[row], state.value[row] * (1 - LOAD_ROUNDING))


def _task(rows: Rows, state: State, row: int, *, work: float, seed: int) -> _Task | None:
    """Counts as free as the model's size allows; None where even fixed counts are too large a model."""
    experts = rows.loads.shape[2]
    hint = state.slots[row]
    counts = np.bincount(hint.ravel(), minlength=experts)
    most_replicas = min(rows.gpus, rows.slots - experts + 1)
    layer = Layer(
        loads=rows.loads[row],
        slots=rows.slots,
        gpus=rows.gpus,
        spread_nodes=rows.spread_nodes,
        least_replicas=np.ones(experts, dtype=np.int64),
        most_replicas=np.full(experts, most_replicas),
    )
    covers = literals(layer) <= MOST_LITERALS // 4
    if not covers:
        covers = rows.slots == experts
        layer = replace(
            layer,
            least_replicas=np.maximum(counts - 1, 1),
            most_replicas=np.minimum(counts + 1, most_replicas),
        )
        if literals(layer) > MOST_LITERALS // 2:
            layer = replace(layer, least_replicas=counts, most_replicas=counts)
    if literals(layer) > MOST_LITERALS:
        return None
    below = float(state.value[row])
    return _Task(layer=layer, hint=hint, below=below, covers=covers, work=work, seed=seed)


def _run(tasks: list[_Task | None], crew: Crew | None) -> list[ExactPacking | None]:
    if crew is None or sum(task is not None for task in tasks) < 4:
        return [_solve(task) for task in tasks]
    return crew.map(_solve, tasks)


def _solve(task: _Task | None) -> ExactPacking | None:
    if task is None or is_over():
        return None
    return solve_exactly(task.layer, task.hint, task.below, work=task.work, seed=task.seed)
