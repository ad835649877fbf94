"""Processes that end with this one: by its `with`, by an interrupt, or by its death."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Self, TypeVar

from meshwright.errors import InfeasibleError, OutOfTimeError

# Threads of this package, told apart from those of a program that uses it.


_NAME = "meshwright"


def start_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Starts a thread that nobody waits for.

    Parameters
    ----------
    work
        What it does.
    *arguments
        What `work` is called with.
    """
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
Key = TypeVar("Key")
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
    """How many copies of this process may work on so many tasks while it is at something else.

    Parameters
    ----------
    tasks
        Beside what this process does itself; below 1 there are none.

    Returns
    -------
    int
        0 where copying this process is not safe or not allowed, or there is no core to spare.
    """
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
            with _interrupts_held():
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


Say = Callable[[Any], None]
"""Tells whoever waits for a task how it gets on: anything that can be pickled."""


class Answerer:
    """A fresh interpreter that does one task after another, says how each gets on, and can be ended.

    Parameters
    ----------
    most_bytes
        Of memory that it, and each copy that it makes of itself, may take; None for no limit. Only where
        the system has such limits.

    Attributes
    ----------
    connection
        Takes tasks; says (whether it is a result, the result or what a task says).
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, end = context.Pipe()
        self._process = context.Process(target=_answer_tasks, args=(end, os.getpid(), most_bytes))
        self._is_ended = False
        with _interrupts_held():
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
            self.connection.send(task)
            while self.connection.poll(max(0.0, end_s - time.monotonic())):
                is_result, message = self.connection.recv()
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


MOST_ATTEMPTS = 3
"""Processes that may end at a task before it is given up."""


@dataclass
class _Turn(Generic[Key, Result]):
    """A task of a pool, and how many processes have ended at it."""

    key: Key
    task: Callable[[], Result]
    attempts: int = 0


@dataclass
class _Worker:
    """A process of a pool, and how many tasks it has done."""

    answerer: Answerer
    done: int = 0


class ProcessPool:
    """Fresh interpreters that share out tasks, one thread each, and leave interrupts to this process.

    Each has a pipe of its own and one task at a time, and is started when first needed. So a process that
    ends takes one task with it, and all can be ended at once, whatever they are at.

    Parameters
    ----------
    most
        Processes.
    most_tasks
        Tasks after which a process is replaced.
    """

    def __init__(self, most: int, most_tasks: float = inf) -> None:
        self._most, self._most_tasks = most, most_tasks
        self._idle: list[_Worker] = []
        # By connection, with the task under way.
        self._at_work: dict[object, tuple[_Worker, Any]] = {}

    def results(
        self, tasks: Iterable[tuple[Key, Callable[[], Result]]], lost: Callable[[Key], Result]
    ) -> Iterator[tuple[Key, Result]]:
        """The results of tasks, in the order in which they are done.

        A task whose process ends is begun again, alone: it may have taken more memory than there is.

        Parameters
        ----------
        tasks
            With what names them; they are taken as processes become free, and can be pickled, as their
            results can. What a task raises is raised here.
        lost
            What stands for the result of a task at which every process ended.
        """
        waiting = (_Turn(key, task) for key, task in tasks)
        again: deque[_Turn[Key, Result]] = deque()
        while True:
            self._begin(waiting, again)
            if not self._at_work:
                return
            for connection in wait([one.answerer.connection for one, _ in self._at_work.values()]):
                worker, turn = self._at_work.pop(connection)
                try:
                    _, (error, result) = worker.answerer.connection.recv()
                except (EOFError, OSError):
                    worker.answerer.end()
                    turn.attempts += 1
                    if turn.attempts < MOST_ATTEMPTS:
                        again.append(turn)
                    else:
                        yield turn.key, lost(turn.key)
                    continue
                self._free(worker)
                if error is not None:
                    raise error
                # The process has its next task before its last result is made use of.
                self._begin(waiting, again)
                yield turn.key, result

    def _begin(
        self, waiting: Iterator[_Turn[Key, Result]], again: deque[_Turn[Key, Result]]
    ) -> None:
        """Gives tasks to all processes that are free, or one alone to which a process was lost."""
        while len(self._at_work) < self._most and not (again and self._at_work):
            turn = again.popleft() if again else next(waiting, None)
            if turn is None:
                return
            worker = self._idle.pop() if self._idle else _Worker(Answerer())
            connection = worker.answerer.connection
            self._at_work[connection] = worker, turn
            # One that has ended says so when it is waited for.
            with suppress(OSError):
                connection.send(partial(_attempt, turn.task))

    def _free(self, worker: _Worker) -> None:
        worker.done += 1
        if worker.done < self._most_tasks:
            self._idle.append(worker)
        else:
            worker.answerer.end()

    def end(self) -> None:
        """Ends the processes at once, whatever they are at; what they had not handed over is lost."""
        for worker in (*self._idle, *(worker for worker, _ in self._at_work.values())):
            worker.answerer.end()
        self._idle.clear()
        self._at_work.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _attempt(task: Callable[[], Result], _: Say) -> tuple[Exception | None, Result | None]:
    """The result of a task of a pool, or what it raised."""
    try:
        return None, task()
    except Exception as error:  # noqa: BLE001 - it is raised where the result is waited for
        return error, None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that is started inside never hears of SIGINT; this one does at the end of the `with`.

    Ctrl-C in a terminal goes to every process there, also to one that has just begun. SIGTERM waits too: a
    process whose parent ended while it handed over what to run would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare(parent: int) -> None:
    """As many processes as cores need no threads below them; set before numpy is loaded."""
    for name in THREAD_COUNTS:
        os.environ[name] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    start_thread(_end_with, parent)


def _end_with(parent: int) -> None:
    """A process whose parent was killed would otherwise wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
