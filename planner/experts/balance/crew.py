"""Processes that share out independent rows. What comes back does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from meshwright.planner.solvers.clock import current_end_s, until
from meshwright.planner.solvers.processes import end_pool, process_pool

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

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
