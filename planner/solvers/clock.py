"""The time limit of a command, which every stage of it looks at.

Stages are limited by work, so that the same input gives the same answer on any machine; each gets its share
of the user's limit by an estimate. Where the estimate is too low, or the machine busy, this clock ends them:
what is best so far is the answer. Without a limit nothing here has an effect.

>>> with within(60.0):
...     over = is_over()
>>> over, remaining_s()
(False, inf)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf, isfinite

_end_s: ContextVar[float] = ContextVar("end_s", default=inf)
"""When the innermost limit is over, by the machine's monotonic clock, which all its processes share."""


@contextmanager
def within(limit_s: float | None) -> Iterator[None]:
    """What runs inside ends so many seconds from now, or with a limit around it where that is sooner.

    Parameters
    ----------
    limit_s
        Seconds of the clock on the wall; None for no limit of its own.
    """
    end_s = inf if limit_s is None else time.monotonic() + limit_s
    with until(min(end_s, _end_s.get())):
        yield


@contextmanager
def until(end_s: float) -> Iterator[None]:
    """The same with the end that another process says: `end_s` as its `current_end_s` returned it.

    Parameters
    ----------
    end_s
        Seconds on the monotonic clock; infinite for no end.
    """
    token = _end_s.set(end_s)
    try:
        yield
    finally:
        _end_s.reset(token)


def current_end_s() -> float:
    """When the limit is over, in seconds of the monotonic clock; infinite without one."""
    return _end_s.get()


def remaining_s() -> float:
    """Seconds that are left, at least 0; infinite without a limit."""
    return max(_end_s.get() - time.monotonic(), 0.0)


def limit_left_s() -> float | None:
    """`remaining_s` as an option of a search: None without a limit."""
    left_s = remaining_s()
    return left_s if isfinite(left_s) else None


def is_over() -> bool:
    """Whether nothing is left."""
    return time.monotonic() >= _end_s.get()


class Shares:
    """What is left of the limit, shared out evenly over stages that follow each other.

    Parameters
    ----------
    stages
        How many there will be at most. What one does not use falls to those after it.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages

    def next_s(self) -> float | None:
        """Seconds for the next stage; None without a limit."""
        left_s = limit_left_s()
        stages, self._stages = max(self._stages, 1), self._stages - 1
        return None if left_s is None else left_s / stages
