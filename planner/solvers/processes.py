"""Pools of processes that end with this one: by its `with`, by an interrupt, or by its death."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
WATCH_S = 1.0
"""Seconds between two looks at whether the parent is still there."""


def process_pool(workers: int, most_tasks: int | None = None) -> ProcessPoolExecutor:
    """A pool of fresh interpreters, one thread each, that leave interrupts to this process.

    Parameters
    ----------
    workers
        Processes.
    most_tasks
        Tasks after which a process is replaced; None for never.
    """
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(os.getpid(),),
        max_tasks_per_child=most_tasks,
    )


def end_pool(pool: ProcessPoolExecutor) -> None:
    """Ends the processes at once, whatever they are at; what they had not handed over is lost."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    queue = getattr(pool, "_call_queue", None)
    for process in processes:
        process.kill()
    # Not cancelled: a pool whose processes are gone sets every future's exception, and must be able to.
    pool.shutdown(wait=False)
    if queue is not None:
        # Else this process, when it ends, would wait for somebody to read what is in the queue.
        queue.cancel_join_thread()


def _prepare(parent: int) -> None:
    """As many processes as cores need no threads below them; set before numpy is loaded."""
    for name in THREAD_COUNTS:
        os.environ[name] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A process whose parent was killed would otherwise wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
