"""Processes that share out independent rows. What comes back does not depend on how many there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import TypeVar

Job = TypeVar("Job")
JobResult = TypeVar("JobResult")


def _one_thread_each() -> None:
    """Before numpy is loaded: as many processes as cores need no threads below them."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


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
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_one_thread_each
            )
        return list(self._pool.map(work, jobs))

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
