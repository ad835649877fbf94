"""Independent packings of one shape, solved together: a row is a layer, or one node of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.packing import SlotPacking, has_duplicates
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.clock import current_end_s, until
from meshwright.planner.solvers.processes import end_pool, process_pool

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


LOAD_ROUNDING = 1e-6
"""Relative. CP-SAT's loads are rounded to a ten-millionth of the mean: a smaller gap is none."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packings of one shape.

    Parameters
    ----------
    loads
        [rows, windows, experts], in units of the mean GPU load of the layer.
    needed
        [rows], value that a row need not be below: what another node of the layer reaches at best.
    spread_nodes
        Nodes over which replicas of an expert are spread; 1 for no such limit.
    """

    loads: Loads
    slots: int
    gpus: int
    needed: Loads
    spread_nodes: int = 1

    def take(self, index: NDArray[np.int64]) -> Rows:
        """The rows of `index`."""
        return replace(self, loads=self.loads[index], needed=self.needed[index])


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Slots [rows, gpus, slots of a GPU], value = largest GPU load over the mean [rows], its bound [rows]."""

    slots: Slots
    value: Loads
    bound: Loads

    @property
    def gap(self) -> Loads:
        """Value over bound, minus 1; 0 below what rounding can tell."""
        gap = self.value / self.bound - 1
        return np.asarray(np.where(gap <= LOAD_ROUNDING, 0.0, gap))


@dataclass
class State:
    """Best slots, value and bound of every row so far."""

    slots: Slots
    value: Loads
    bound: Loads

    def target(self, rows: Rows, index: NDArray[np.int64]) -> Loads:
        """The least value that is worth reaching, for the rows of `index`."""
        return np.maximum(self.bound[index], rows.needed[index])

    def unsolved(self, rows: Rows, gap: float) -> NDArray[np.int64]:
        """Rows with a placement whose value is more than `gap` above their target."""
        target = np.maximum(self.bound, rows.needed)
        return np.flatnonzero(self.value > target * (1 + gap))

    def offer(self, rows: Rows, index: NDArray[np.int64], slots: Slots) -> None:
        """Takes over the valid placements among `slots` that are better than the rows of `index`."""
        part = rows.take(index)
        value = value_of(part, slots)
        value[is_invalid(part, slots)] = np.inf
        better = value < self.value[index]
        self.slots[index[better]] = slots[better]
        self.value[index[better]] = value[better]

    def offer_best(self, rows: Rows, row: int, slots: Slots) -> None:
        """The same for several placements [tries, gpus, slots of a GPU] of one row."""
        for tried in slots:
            self.offer(rows, np.array([row]), tried[None])


def value_of(rows: Rows, slots: Slots) -> Loads:
    """Largest GPU load over the mean, worst window, [rows]."""
    gpu = SlotPacking(slots=slots, loads=rows.loads).gpu_loads()
    return np.asarray(gpu.max(axis=(1, 2)))


def is_invalid(rows: Rows, slots: Slots) -> NDArray[np.bool_]:
    """Rows whose slots hold an expert twice on a GPU or break the spread."""
    invalid = has_duplicates(slots)
    if rows.spread_nodes > 1:
        experts = rows.loads.shape[2]
        for row, row_slots in enumerate(slots):
            by_node = row_slots.reshape(rows.spread_nodes, -1)
            counts = np.stack([np.bincount(node, minlength=experts) for node in by_node])
            allowed = -(-counts.sum(axis=0) // rows.spread_nodes)
            invalid[row] |= bool((counts.max(axis=0) > allowed).any())
    return np.asarray(invalid)


def by_layer(loads: Loads, gpus: int) -> Loads:
    """Loads over the mean GPU load, [layers, windows, experts], from [windows, layers, experts]."""
    relative = loads * (gpus / loads.sum(axis=2, keepdims=True))
    return np.ascontiguousarray(np.swapaxes(relative, 0, 1))


# Processes that share out independent rows. What comes back does not depend on how many there are.


Job = TypeVar("Job")
JobResult = TypeVar("JobResult")


def _done_until(end_s: float, work: Callable[[Job], JobResult], job: Job) -> JobResult:
    """A job in another process, under the time limit of this one."""
    with until(end_s):
        return work(job)


class Crew:
    """Starts its processes when first needed, and ends them on leaving the `with` block."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def map(self, work: Callable[[Job], JobResult], jobs: Sequence[Job]) -> list[JobResult]:
        """`work` done on every job, in their order; here if there is one worker or one job."""
        if self.workers <= 1 or len(jobs) < 2:
            return [work(job) for job in jobs]
        if self._pool is None:
            self._pool = process_pool(self.workers)
        done = partial(_done_until, current_end_s(), work)
        futures = [self._pool.submit(done, job) for job in jobs]
        return [future.result() for future in futures]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            # No job is under way, or nobody wants its result any more.
            end_pool(self._pool)
            self._pool = None
