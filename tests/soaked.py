"""How much of the long suites runs: `make slow` takes a share of their cases, `make soak` all of them.

Property tests draw a share of their examples, and all of them in `make soak`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
SHARE = int(os.environ.get("MESHWRIGHT_SOAK_SHARE", "24"))
"""One case in so many."""


def some(cases: Iterable[Case], first: int = 0) -> list[Case]:
    """The share of some cases that runs, always the same ones.

    It is counted from the case at place `first`, and goes on with those before it: a share of cases that take
    less time than others. Where all run, none is left out.
    """
    every = list(cases)
    return [*every[first:], *every[:first]][::SHARE]


def examples(most: int, one_in: int = 4) -> int:
    """How many examples of a property are drawn: all where all cases run, else one in so many."""
    return most if SHARE == 1 else most // one_in
