"""Independent tasks on copies of the process: the same results, whatever becomes of the copies."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from meshwright.planner.solvers import processes
from meshwright.planner.solvers.processes import (
    MOST_ATTEMPTS,
    ProcessPool,
    copies_at,
    copies_for,
    on_processes,
    results_until,
    side_by_side,
)


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 4)


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def ends_in_a_copy(parent: int, number: int) -> int:
    if os.getpid() != parent:
        os._exit(1)
    return number


def refused(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


@pytest.mark.usefixtures("_four_cores")
def test_results_come_in_order() -> None:
    with on_processes(3):
        results = side_by_side([partial(squared, number) for number in range(20)])
    assert [square for square, _ in results] == [number * number for number in range(20)]


def test_without_leave_nothing_is_copied() -> None:
    results = side_by_side([partial(squared, number) for number in range(5)])
    assert {process for _, process in results} == {os.getpid()}


@pytest.mark.usefixtures("_four_cores")
def test_what_a_lost_copy_had_taken_is_computed_again() -> None:
    with on_processes(4):
        results = side_by_side([partial(ends_in_a_copy, os.getpid(), n) for n in range(9)])
    assert results == list(range(9))


@pytest.mark.usefixtures("_four_cores")
def test_an_error_of_a_task_is_raised_here() -> None:
    with on_processes(2), pytest.raises(ValueError, match="three"):
        side_by_side([partial(refused, number) for number in range(6)])


def test_no_task_is_no_result() -> None:
    with on_processes(2):
        assert side_by_side([]) == []


@pytest.mark.usefixtures("_four_cores")
@pytest.mark.parametrize("most", [1, 3])
def test_no_task_begins_once_a_result_is_enough(most: int) -> None:
    with on_processes(most):
        tasks = [partial(squared, number) for number in range(1000)]
        results = results_until(lambda result: result[0] == 0, tasks)
    assert results[0][0] == 0
    assert len(results) < 1000
    assert all(square == number * number for number, (square, _) in results.items())


def waits(begins: Event, ends: Event) -> int:
    begins.set()
    ends.wait()
    return os.getpid()


@pytest.mark.usefixtures("_four_cores")
def test_a_copy_works_ahead_and_leaves_out_what_it_has_not_begun() -> None:
    context = multiprocessing.get_context("fork")
    begins, ends = context.Event(), context.Event()
    tasks: list[Callable[[], int]] = [partial(waits, begins, ends), os.getpid, os.getpid]
    with on_processes(2):
        assert copies_for(5) == 1
        with copies_at(tasks, 1) as results:
            begins.wait()
            assert results([1, 2], True) == {}
            ends.set()
            assert results([0], True).keys() == {0}
    assert copies_for(5) == 0


# A pool of fresh interpreters.


def ends_at(bad: tuple[int, ...], folder: Path, number: int) -> int:
    """Notes that a task has begun; some end their process in the midst of it."""
    with (folder / str(number)).open("a") as notes:
        notes.write("begun ")
    if number in bad:
        os._exit(1)
    return number * number


def begun(folder: Path) -> Counter[str]:
    return Counter({path.name: path.read_text().count("begun") for path in folder.iterdir()})


@pytest.mark.slow
@pytest.mark.parametrize("most_tasks", [1, 100])
def test_a_process_that_ends_takes_one_task_with_it(tmp_path: Path, most_tasks: int) -> None:
    tasks = ((number, partial(ends_at, (2, 5), tmp_path, number)) for number in range(7))
    with ProcessPool(2, most_tasks) as pool:
        results = dict(pool.results(tasks, lambda number: -number))
    assert results == {0: 0, 1: 1, 2: -2, 3: 9, 4: 16, 5: -5, 6: 36}
    assert begun(tmp_path) == {str(n): MOST_ATTEMPTS if n in (2, 5) else 1 for n in range(7)}


@pytest.mark.slow
def test_what_a_task_of_a_pool_raises_is_raised_here_and_the_rest_ends() -> None:
    tasks = [(number, partial(refused, number)) for number in range(6)]
    with ProcessPool(2) as pool, pytest.raises(ValueError, match="three"):
        list(pool.results(tasks, int))
    for process in multiprocessing.active_children():
        process.join(10)
        assert not process.is_alive()


def ends_while_it_answers(size_bytes: int) -> bytes:
    answer = bytes(size_bytes)
    threading.Timer(0.01, os._exit, (1,)).start()
    return answer


@pytest.mark.slow
def test_half_an_answer_is_none() -> None:
    """The standard library's pool waits for the other half for ever."""
    with ProcessPool(1) as pool:
        results = pool.results(
            [("large", partial(ends_while_it_answers, 300_000_000))], lambda _: b""
        )
        assert dict(results) == {"large": b""}
