"""The time limit that stages share, pools of processes, and solvers that an interrupt ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from math import inf

import numpy as np
import pytest

from meshwright.planner.experts.packing import Crew
from meshwright.planner.solvers.clock import (
    Shares,
    current_end_s,
    is_over,
    limit_left_s,
    remaining_s,
    within,
)
from meshwright.planner.solvers.programmes import repeatable_solver, stop_solvers
from tests.places import ROOT


def test_without_a_limit_nothing_ends() -> None:
    assert not is_over()
    assert remaining_s() == inf
    assert limit_left_s() is None
    assert Shares(3).next_s() is None
    with within(None):
        assert current_end_s() == inf


def test_the_nearer_of_two_limits_holds() -> None:
    with within(100.0):
        outer_s = current_end_s()
        with within(1000.0):
            assert current_end_s() == outer_s
        with within(0.0):
            assert is_over()
            assert remaining_s() == 0.0
        assert not is_over()
    assert current_end_s() == inf


def test_what_a_stage_leaves_falls_to_the_next_ones() -> None:
    with within(100.0):
        shares = Shares(2)
        first_s, second_s, third_s = (shares.next_s() for _ in range(3))
    assert first_s == pytest.approx(50.0, abs=1.0)
    # Nothing was used of the first, and no stage after the last gets more than is left.
    assert second_s == pytest.approx(100.0, abs=1.0)
    assert third_s == pytest.approx(100.0, abs=1.0)


def _end_s(_: int) -> float:
    return current_end_s()


def test_other_processes_keep_to_the_same_limit() -> None:
    with within(300.0), Crew(2) as crew:
        assert crew.map(_end_s, [1, 2]) == [current_end_s()] * 2


def _hard_model() -> object:
    """A partition of 60 numbers into 8 equal parts, which takes CP-SAT hours."""
    from ortools.sat.python import cp_model

    model, chance = cp_model.CpModel(), np.random.default_rng(1)
    sizes = chance.integers(1000, 9999, 60).tolist()
    places = [[model.new_bool_var("") for _ in range(8)] for _ in sizes]
    for row in places:
        model.add_exactly_one(row)
    top = model.new_int_var(0, sum(sizes), "")
    for part in range(8):
        model.add(sum(size * row[part] for size, row in zip(sizes, places, strict=True)) <= top)
    model.minimize(top)
    return model


def test_a_solver_ends_with_the_limit_and_when_it_is_told() -> None:
    model = _hard_model()
    with within(0.3):
        solver = repeatable_solver()
    solver.solve(model)  # type: ignore[arg-type]
    assert solver.wall_time < 20.0
    told = repeatable_solver()
    threading.Timer(0.3, stop_solvers).start()
    told.solve(model)  # type: ignore[arg-type]
    assert told.best_objective_bound < told.objective_value


def _ended(script: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, as its end left it."""
    return subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


INTERRUPTED_IN_A_SOLVE = """
import os, signal, threading
from tests.planner.solvers.test_clock import _hard_model
from meshwright.commands.terminal import interruptible
from meshwright.planner.solvers.programmes import repeatable_solver
model, solver = _hard_model(), repeatable_solver()
with interruptible(threading.Event()):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.{name})).start()
    try:
        solver.solve(model)
        print("swallowed")
    except KeyboardInterrupt:
        print("heard")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_reaches_python_out_of_a_solve(name: str) -> None:
    """CP-SAT's own handler once took Ctrl-C for itself, and the search went on."""
    script = INTERRUPTED_IN_A_SOLVE.replace("{name}", name)
    done = _ended(script)
    assert done.stdout.split() == ["heard"], done.stderr


INTERRUPTED_WHERE_NOTHING_CAN_BE_RAISED = """
import signal, threading, time
from meshwright.commands.terminal import interruptible

class Destructor:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

with interruptible(threading.Event()):
    try:
        Destructor()
        for _ in range(1000):
            time.sleep(0.01)
        print("swallowed")
    except KeyboardInterrupt:
        print("heard")
"""


def test_an_interrupt_comes_again_where_python_could_not_raise_it() -> None:
    """In a destructor, as in a callback of a compiled library, Python prints it and goes on."""
    done = _ended(INTERRUPTED_WHERE_NOTHING_CAN_BE_RAISED)
    assert done.stdout.split() == ["heard"]
    assert done.stderr == ""


POOL_OF_A_KILLED_PARENT = """
import os, time
from meshwright.planner.solvers.processes import ProcessPool
pool = ProcessPool(1)
print(dict(pool.results([("number", os.getpid)], str))["number"], flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_processes_end_with_a_parent_that_was_killed() -> None:
    done = _ended(POOL_OF_A_KILLED_PARENT)
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the process waits for work from a parent that is gone")


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


INTERRUPTED_IN_AN_IMPORT = """
import os, signal, time
from meshwright import cli

def import_that_turns_the_interrupt_into_another_error(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        time.sleep(0.5)
        raise ImportError("numpy failed to import")

cli.main.commands["schema"].callback = import_that_turns_the_interrupt_into_another_error
cli.main(["schema", "cluster"])
"""


def test_an_interrupt_that_ends_in_another_error_is_still_one() -> None:
    done = _ended(INTERRUPTED_IN_AN_IMPORT)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n"), done.stderr
