"""From loads to slots with a certified bound: heuristic, other replica counts, CP-SAT where a gap is open."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from planner.experts.bound import balance_bound, counts_within
from planner.experts.exact import MOST_LITERALS, Exact, Layer, literals, solve_exactly
from planner.experts.packing import Packing, greedy_counts, has_duplicates, improve, pack
from planner.experts.problem import Loads, NoPlacementError, Slots

_ROUNDS = 600
_EXACT = 1e-6
"""Loads are rounded to a ten-millionth of the mean: a smaller gap is none."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How far to go."""

    gap: float = 0.005
    """Stop where balance is within this of the bound."""
    time_limit_s: float = 60.0
    exact: bool = True
    """Whether CP-SAT may be used."""
    seed: int = 0
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Independent packings of one shape: [rows, windows, experts] loads, [rows, windows] mean GPU loads."""

    loads: Loads
    scale: Loads
    slots: int
    gpus: int
    spread_nodes: int = 1

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return replace(self, loads=self.loads[rows], scale=self.scale[rows])


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Slots [rows, gpus, slots of a GPU], value = largest GPU load over scale [rows], bound on it [rows]."""

    slots: Slots
    value: Loads
    bound: Loads

    @property
    def gap(self) -> Loads:
        """Value over bound, minus 1; 0 below what rounding can tell."""
        gap = self.value / self.bound - 1
        return np.asarray(np.where(gap <= _EXACT, 0.0, gap))


def value_of(rows: Rows, slots: Slots) -> Loads:
    """Largest GPU load over the mean, worst window, [rows]."""
    gpu = Packing(slots=slots, loads=rows.loads).gpu_loads()
    return np.asarray((gpu / rows.scale[:, :, None]).max(axis=(1, 2)))


def solve_rows(rows: Rows, effort: Effort) -> Solved:
    """Heuristic with the best replica counts, other counts for open rows, CP-SAT for those left.

    Raises NoPlacementError if the limits on replicas leave none that was found.
    """
    start = time.monotonic()
    cheap = balance_bound(rows.loads, rows.slots, rows.gpus, rows.scale)
    # The window with the sharpest loads decides the counts; the packing sees all windows.
    shares = (rows.loads / rows.scale[:, :, None]).max(axis=1)
    counts = greedy_counts(shares, rows.slots, rows.gpus)
    slots = _packed(rows, counts, cheap * (1 + effort.gap / 4))
    value = value_of(rows, slots)
    value[_broken(rows, slots)] = np.inf
    bound = np.minimum(cheap, value)
    left = np.flatnonzero(value > bound * (1 + effort.gap))
    if len(left):
        best = np.where(np.isfinite(value[left]), value[left], 2 * cheap[left])
        part = rows.take(left)
        bound[left] = balance_bound(part.loads, rows.slots, rows.gpus, part.scale, best)
        _other_counts(rows, slots, value=value, bound=bound, effort=effort, start=start)
    if effort.exact:
        _close(rows, slots, value=value, bound=bound, effort=effort, start=start)
    if not np.isfinite(value).all():
        raise NoPlacementError(
            f"no placement of {rows.loads.shape[2]} experts in {rows.slots} slots on {rows.gpus} GPUs was "
            "found that keeps replicas apart; use more slots or fewer limits"
        )
    return Solved(slots=slots, value=value, bound=np.minimum(bound, value))


def _packed(rows: Rows, counts: Slots, stop_at: Loads) -> Slots:
    packing = pack(rows.loads, counts, rows.gpus, rows.spread_nodes)
    own = rows.loads.sum(axis=2) / rows.gpus
    improve(packing, _ROUNDS, stop_at * (rows.scale / own).max(axis=1), rows.spread_nodes)
    return packing.slots


def _broken(rows: Rows, slots: Slots) -> NDArray[np.bool_]:
    """Rows whose slots hold an expert twice on a GPU or break the spread."""
    bad = has_duplicates(slots)
    if rows.spread_nodes > 1:
        nodes = rows.spread_nodes
        experts = rows.loads.shape[2]
        for row, placed in enumerate(slots):
            by_node = placed.reshape(nodes, -1)
            counts = np.stack([np.bincount(node, minlength=experts) for node in by_node])
            bad[row] |= bool((counts.max(axis=0) > -(-counts.sum(axis=0) // nodes)).any())
    return np.asarray(bad)


def _other_counts(
    rows: Rows, slots: Slots, *, value: Loads, bound: Loads, effort: Effort, start: float
) -> None:
    """Packs open rows with the counts that a lower limit on the GPU load asks for; keeps what is better."""
    for fraction in (0.001, 0.3, 0.6):
        left = np.flatnonzero(value > bound * (1 + effort.gap / 3))
        if not len(left) or time.monotonic() - start > effort.time_limit_s:
            return
        part = rows.take(left)
        top = np.where(np.isfinite(value[left]), value[left], 2 * bound[left])
        limit = bound[left] + fraction * (top - bound[left])
        shares = (part.loads / part.scale[:, :, None]).max(axis=1)
        counts = np.stack(
            [counts_within(share, rows.slots, rows.gpus, t) for share, t in zip(shares, limit, strict=True)]
        )
        _keep_better(rows, left, _packed(part, counts, bound[left] * (1 + effort.gap / 8)), slots, value)


def _keep_better(rows: Rows, index: NDArray[np.int64], found: Slots, slots: Slots, value: Loads) -> None:
    part = rows.take(index)
    reached = value_of(part, found)
    reached[_broken(part, found)] = np.inf
    better = reached < value[index]
    slots[index[better]], value[index[better]] = found[better], reached[better]


@dataclass(frozen=True, kw_only=True)
class _Task:
    layer: Layer
    hint: Slots
    below: float
    covers: bool
    """Whether the counts allowed are all there are, so that the solver's bound is the layer's."""
    time_s: float
    work: float
    seed: int


def _close(rows: Rows, slots: Slots, *, value: Loads, bound: Loads, effort: Effort, start: float) -> None:
    """CP-SAT on every row that is still open, widest gap first; the time left is shared out over them."""
    gap = value / bound - 1
    left = [int(row) for row in np.argsort(-gap, kind="stable") if gap[row] > max(effort.gap, _EXACT)]
    left = [row for row in left if np.isfinite(value[row])]
    remaining = effort.time_limit_s - (time.monotonic() - start)
    if not left or remaining < 0.2:
        return
    share = remaining * effort.workers / len(left)
    tasks = [_task(rows, row, slots[row], below=value[row], share_s=share, effort=effort) for row in left]
    for row, found in zip(left, _run(tasks, effort.workers), strict=True):
        if found is None:
            continue
        task, exact = found
        if task.covers:
            bound[row] = max(bound[row], exact.bound)
        if exact.slots is not None:
            _keep_better(rows, np.array([row]), exact.slots[None], slots, value)
            if task.covers and exact.optimal:
                bound[row] = max(bound[row], value[row] * (1 - _EXACT))


def _task(rows: Rows, row: int, hint: Slots, *, below: float, share_s: float, effort: Effort) -> _Task | None:
    experts = rows.loads.shape[2]
    counts = np.bincount(hint.ravel(), minlength=experts)
    most_ever = min(rows.gpus, rows.slots - experts + 1)
    layer = Layer(
        loads=rows.loads[row] / rows.scale[row][:, None],
        slots=rows.slots,
        gpus=rows.gpus,
        spread_nodes=rows.spread_nodes,
        least=np.ones(experts, dtype=np.int64),
        most=np.full(experts, most_ever),
    )
    covers = literals(layer) <= MOST_LITERALS // 4
    if not covers:
        near = replace(layer, least=np.maximum(counts - 1, 1), most=np.minimum(counts + 1, most_ever))
        layer = near if literals(near) <= MOST_LITERALS // 2 else replace(layer, least=counts, most=counts)
        covers = rows.slots == experts
    if literals(layer) > MOST_LITERALS:
        return None
    return _Task(
        layer=layer,
        hint=hint,
        below=float(below),
        covers=covers,
        time_s=share_s,
        work=share_s,
        seed=effort.seed,
    )


def _run(tasks: list[_Task | None], workers: int) -> list[tuple[_Task, Exact] | None]:
    if workers <= 1 or sum(task is not None for task in tasks) < 4:
        return [_solve(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_solve, tasks))


def _solve(task: _Task | None) -> tuple[_Task, Exact] | None:
    if task is None:
        return None
    return task, solve_exactly(
        task.layer, task.hint, task.below, time_s=task.time_s, work=task.work, seed=task.seed
    )
