"""Ctrl-C and SIGTERM end a command at once and in order: files are whole, processes end, exit code 130."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.planner.solvers.threads import start_thread


@contextmanager
def interruptible(interrupted: threading.Event) -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as SIGINT does, and solvers that are at work stop for either.

    Python acts on a signal only between two of its own instructions, so a solver would run to its end first:
    a thread hears of the signal through a pipe and stops it. In another thread than the main one nothing is
    changed, as signals are not delivered there.

    Parameters
    ----------
    interrupted
        Set when a signal came: what it interrupts may end in another error than KeyboardInterrupt, such as
        the import of a compiled module.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    wakeup_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    start_thread(_stop_solvers_when_told, heard, interrupted)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGTERM, before)
        os.close(told)


def end_children() -> None:
    """Ends the processes that this one started, also those that an interrupt kept from being noted down."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()


def _stop_solvers_when_told(heard: int, interrupted: threading.Event) -> None:
    """A byte is a signal; the end of the pipe is the end of the command."""
    ends = {signal.SIGINT, signal.SIGTERM}
    while number := os.read(heard, 1):
        if number[0] in ends:
            interrupted.set()
            from meshwright.planner.solvers.cp_sat import stop_solvers

            stop_solvers()
    os.close(heard)
