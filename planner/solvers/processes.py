"""Processes that end with this one: by its `with`, by an interrupt, or by its death."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import InfeasibleError, OutOfTimeError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


# Threads of this package, told apart from those of a program that uses it.


_NAME = "meshwright"


def start_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Starts a thread that nobody waits for."""
    threading.Thread(target=work, args=arguments, name=_NAME, daemon=True).start()


def others_run() -> bool:
    """Whether there are threads beside this one that the package has not started."""
    this = threading.current_thread()
    return any(thread is not this and thread.name != _NAME for thread in threading.enumerate())


THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
WATCH_S = 1.0
"""Seconds between two looks at whether the parent is still there."""
MOST_PROCESSES = 4
"""Of one command. Each holds the tables of a search, which may take half a GiB."""
Result = TypeVar("Result")
_most_processes: ContextVar[int] = ContextVar("most_processes", default=1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def on_processes(most: int = MOST_PROCESSES) -> Iterator[None]:
    """What runs inside may spread over so many processes, as far as there are cores.

    Parameters
    ----------
    most
        This process included, at least 1. A library's caller may hold locks or devices that a copy of the
        process would share, so only a command allows more than one.
    """
    token = _most_processes.set(most)
    try:
        yield
    finally:
        _most_processes.reset(token)


def side_by_side(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of independent tasks in their order, computed by copies of this process where allowed.

    What a copy could not compute, because it failed or was ended, this process computes itself.

    Parameters
    ----------
    tasks
        Without effects beside their results, which can be pickled.
    """
    results = results_until(lambda _: False, tasks)
    return [results[index] if index in results else task() for index, task in enumerate(tasks)]


def results_until(
    is_enough: Callable[[Result], bool], tasks: Sequence[Callable[[], Result]]
) -> dict[int, Result]:
    """The same, by the number of the task, without what a copy could not compute.

    Parameters
    ----------
    is_enough
        Whether a result makes the others needless: no further task begins then.
    tasks
        As `side_by_side` takes them; the first ones begin first.
    """
    copies = copies_for(len(tasks) - 1)
    if copies < 1:
        return dict(_results(iter(range(len(tasks))), is_enough, tasks))
    with copies_at(tasks, copies, is_enough) as results:
        return results(range(len(tasks)), False)


def copies_for(tasks: int) -> int:
    """How many copies of this process may work on so many tasks while it is at something else."""
    # A copy has all modules loaded already; elsewhere than on Linux copying a process is not safe.
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 0
    return min(_most_processes.get() - 1, usable_cores() - 1, tasks)


@contextmanager
def copies_at(
    tasks: Sequence[Callable[[], Result]],
    copies: int,
    is_enough: Callable[[Result], bool] = lambda _: False,
) -> Iterator[Callable[[Sequence[int], bool], dict[int, Result]]]:
    """Copies of this process take tasks in turn, until the end of the `with`.

    Parameters
    ----------
    tasks, is_enough
        As `results_until` takes them.
    copies
        At least 1, at most `copies_for`.

    Yields
    ------
    callable
        Takes numbers of tasks, and returns the results of these and perhaps of others. This process takes
        part in those that no copy has begun, or leaves them out where it is told to.
    """
    context = multiprocessing.get_context("fork")
    turn = context.Value("i", 0)
    connections: list[Connection] = []
    processes: list[Any] = []

    def ends(result: Result) -> bool:
        if is_enough(result):
            turn.value = len(tasks)
            return True
        return False

    def results(wanted: Sequence[int], begun_alone: bool) -> dict[int, Result]:
        if begun_alone:
            with turn.get_lock():
                begun, turn.value = turn.value, len(tasks)
            wanted = [index for index in wanted if index < begun]
        computed = dict(_results(_turns(turn, len(tasks)), ends, tasks))
        for receiver in connections if set(wanted) - computed.keys() else ():
            with suppress(EOFError, OSError):
                computed |= receiver.recv()
        return computed

    try:
        for _ in range(copies):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(turn, ends, tasks, sender, os.getpid()), daemon=True
            )
            process.start()
            sender.close()
            connections.append(receiver)
            processes.append(process)
        yield results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(
    turns: Iterator[int],
    is_enough: Callable[[Result], bool],
    tasks: Sequence[Callable[[], Result]],
) -> Iterator[tuple[int, Result]]:
    """The results of some tasks with their numbers, until one is enough."""
    for index in turns:
        result = tasks[index]()
        yield index, result
        if is_enough(result):
            return


def _turns(turn: Any, count: int) -> Iterator[int]:
    """Numbers of tasks that no other process has taken."""
    while True:
        with turn.get_lock():
            index = turn.value
            turn.value = index + 1
        if index >= count:
            return
        yield index


def _work(
    turn: Any,
    is_enough: Callable[[Any], bool],
    tasks: Sequence[Callable[[], Any]],
    sender: Connection,
    parent: int,
) -> None:
    """What a copy does: it says what it computed, and leaves errors to its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prepare(parent)
    results = {}
    for index in _turns(turn, len(tasks)):
        with suppress(Exception):
            results[index] = tasks[index]()
            is_enough(results[index])
    sender.send(results)


def process_pool(workers: int, most_tasks: int | None = None) -> ProcessPoolExecutor:
    """A pool of fresh interpreters, one thread each, that leave interrupts to this process.

    Parameters
    ----------
    workers
        Processes.
    most_tasks
        Tasks after which a process is replaced; None for never.
    """
    # Its module takes as long to load as a small placement.
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(os.getpid(),),
        max_tasks_per_child=most_tasks,
    )


Say = Callable[[Any], None]
"""Tells whoever waits for a task how it gets on: anything that can be pickled."""


class Answerer:
    """A fresh interpreter that does one task after another, says how each gets on, and can be ended.

    Parameters
    ----------
    most_bytes
        Of memory that it, and each copy that it makes of itself, may take; None for no limit. Only where
        the system has such limits.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        self._process = context.Process(target=_answer_tasks, args=(end, os.getpid(), most_bytes))
        self._is_ended = False
        self._process.start()
        end.close()
        # This process waits for its children when it ends, and they for tasks.
        multiprocessing.util.Finalize(self, self._process.kill, exitpriority=0)

    def answer(self, task: Callable[[Say], Result], hear: Say, limit_s: float) -> Result:
        """The result of a task; one at a time.

        Parameters
        ----------
        task
            Can be pickled, as its result can; it raises nothing but MemoryError.
        hear
            Is called with whatever the task says.
        limit_s
            Seconds after which the process is ended.

        Raises
        ------
        OutOfTimeError
            If the limit came before the result. The process has ended.
        InfeasibleError
            If the process ended, or the task took too much memory.
        """
        end_s = time.monotonic() + limit_s
        try:
            self._connection.send(task)
            while self._connection.poll(max(0.0, end_s - time.monotonic())):
                is_result, message = self._connection.recv()
                if is_result:
                    result: Result = message
                    return result
                hear(message)
        except (EOFError, OSError):
            self.end()
            what = (
                "the process ended: it took more memory than a task may, or was ended from outside"
            )
            raise InfeasibleError(what) from None
        self.end()
        raise OutOfTimeError(f"no answer within {limit_s:g} s")

    def end(self) -> None:
        """Ends the process at once, whatever it is at; also from another thread."""
        self._is_ended = True
        self._process.kill()

    @property
    def is_alive(self) -> bool:
        """Whether it takes another task."""
        return not self._is_ended and self._process.is_alive()


def _answer_tasks(connection: Connection, parent: int, most_bytes: int | None) -> None:
    """What an `Answerer` does: a task that takes too much memory ends it."""
    _prepare(parent)
    if most_bytes is not None:
        with suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    with suppress(EOFError, MemoryError):
        while True:
            task = connection.recv()
            connection.send((True, task(lambda message: connection.send((False, message)))))


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
    start_thread(_end_with, parent)


def _end_with(parent: int) -> None:
    """A process whose parent was killed would otherwise wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
