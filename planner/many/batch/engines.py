"""Where jobs are done: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from math import inf
from typing import Any

from meshwright.planner.many.batch.rows import failed_row
from meshwright.planner.many.batch.work import do_job
from meshwright.planner.solvers.processes import end_pool, process_pool

Task = tuple[int, Mapping[str, Any]]
"""(position of the job, its fields)."""
Done = tuple[int, dict[str, Any]]
"""(position of the job, what `do_job` returned)."""
Engine = Callable[[Iterable[Task]], Iterator[Done]]

MOST_ATTEMPTS = 3
JOBS_PER_PROCESS = 250
"""After that many a worker process is replaced, so that nothing it keeps grows with the batch."""


def given_up(fields: Mapping[str, Any], attempts: int) -> dict[str, Any]:
    """The result of a job whose worker ended every time."""
    words = f"its worker process ended {attempts} times (killed, or out of memory)"
    return {"row": failed_row(fields, words), "files": {}, "cached": False, "seconds": 0.0}


def local_engine(workers: int, cache_folder: str | None, end_s: float = inf) -> Engine:
    """Processes of this machine; one worker is this process itself.

    Jobs end at `end_s` of the monotonic clock.

    A worker that ends takes the others of its pool with it: a new pool goes on with what was under way,
    each of those jobs alone, so that the one at fault is found.
    """

    def here(tasks: Iterable[Task]) -> Iterator[Done]:
        for position, fields in tasks:
            yield position, do_job(fields, cache_folder, end_s)

    def pooled(tasks: Iterable[Task]) -> Iterator[Done]:
        return _Pool(workers, cache_folder, end_s).run(tasks)

    return here if workers == 1 else pooled


class _Pool:
    """A pool of processes that is made anew when a worker ends."""

    def __init__(self, workers: int, cache_folder: str | None, end_s: float) -> None:
        self._workers, self._cache_folder, self._end_s = workers, cache_folder, end_s
        self._under_way: dict[Future[dict[str, Any]], Task] = {}
        self._attempts: Counter[int] = Counter()
        self._suspects: deque[Task] = deque()

    def run(self, tasks: Iterable[Task]) -> Iterator[Done]:
        waiting = iter(tasks)
        pool = self._new_pool()
        try:
            while True:
                self._fill(pool, waiting)
                if not self._under_way:
                    return
                finished, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
                broken = False
                for future in finished:
                    task = self._under_way.pop(future)
                    try:
                        yield task[0], future.result()
                    except BrokenProcessPool:
                        self._suspects.append(task)
                        broken = True
                if broken:
                    self._suspects.extend(self._under_way.values())
                    self._under_way.clear()
                    pool.shutdown(wait=False, cancel_futures=True)
                    pool = self._new_pool()
                    yield from self._given_up()
        finally:
            # All is done, or nobody wants the rest any more.
            end_pool(pool)

    def _new_pool(self) -> ProcessPoolExecutor:
        return process_pool(self._workers, JOBS_PER_PROCESS)

    def _fill(self, pool: ProcessPoolExecutor, waiting: Iterator[Task]) -> None:
        """Keeps every worker busy and one job waiting for each; a job under suspicion runs alone."""
        if self._suspects:
            if not self._under_way:
                self._submit(pool, self._suspects.popleft())
            return
        while len(self._under_way) < 2 * self._workers:
            task = next(waiting, None)
            if task is None:
                return
            self._submit(pool, task)

    def _submit(self, pool: ProcessPoolExecutor, task: Task) -> None:
        future = pool.submit(do_job, dict(task[1]), self._cache_folder, self._end_s)
        self._under_way[future] = task

    def _given_up(self) -> Iterator[Done]:
        """Counts an attempt of every suspect; those with too many are given up."""
        suspects = list(self._suspects)
        self._suspects.clear()
        for task in suspects:
            self._attempts[task[0]] += 1
            if self._attempts[task[0]] >= MOST_ATTEMPTS:
                yield task[0], given_up(task[1], MOST_ATTEMPTS)
            else:
                self._suspects.append(task)
