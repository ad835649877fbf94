"""What the cost model says of rows that its constants were not fitted on: a source, or a model family, left out.

Every group is left out in turn, the free constants are refitted on the other rows, and the group is predicted
with them. The refit starts at the fit on all rows and its slopes; each step is checked by real predictions, and
corrects the slopes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.calibration import Linearisation, Problem, fit
from meshwright.planner.runs.calibration.evidence import MOST_STEPS, Bools, Floats
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.validation import KINDS

FAMILIES = (
    (r"GPT-OSS", "GPT-OSS"),
    (r"GPT|BLOOM", "GPT and BLOOM"),
    (r"Llama", "Llama"),
    (r"MPT", "MPT"),
    (r"Qwen3", "Qwen3"),
    (r"DeepSeek", "DeepSeek"),
    (r"Nemotron", "Nemotron"),
    (r"Mixtral|Mistral", "Mistral"),
)
"""Families by the beginning of the model's name, the first that matches; any other name is its own family up to
the first digit. BLOOM is a GPT with ALiBi, measured by the same stack as most GPT rows: one family, the harder
test. Truncated and proxy models belong with the model that they stand for."""


QUICK_STEPS = 3
"""Steps of a refit along known slopes; further ones gain next to nothing."""


def family_of(run: Run) -> str:
    """The model family of a run."""
    name = run.workload.model.name
    for pattern, family in FAMILIES:
        if re.match(pattern, name, re.IGNORECASE):
            return family
    return re.split(r"[-_ ]?\d", name, maxsplit=1)[0] or name


def source_of(run: Run) -> str:
    """Who measured a run: what stands before the first semicolon of its source."""
    return KINDS["source"](run)


def stack_of(run: Run) -> str:
    """The software stack that a run is priced as."""
    return KINDS["framework"](run)


@dataclass(frozen=True)
class LeftOut:
    """Predictions of every row by constants that were fitted without the group the row is in."""

    groups: tuple[str, ...]
    """Of each row."""
    seconds: Floats


def leave_out(
    problem: Problem,
    group_of: Callable[[Run], str],
    best: Floats,
    known: Linearisation,
    *,
    exact: bool = False,
) -> LeftOut:
    """Predicts each group with constants fitted on the rest.

    `best` are the logarithms of the constants fitted on all rows, `known` the slopes there. `exact` works the
    slopes out anew for every refit, for several times the time.
    """
    groups = tuple(group_of(run) for run in problem.runs)
    seconds = np.zeros(len(groups))
    for name in sorted(set(groups)):
        inside = members(groups, name)
        logs = _refitted(problem, ~inside, best, known, exact=exact)
        seconds[inside] = problem.predict(logs, inside)
    return LeftOut(groups, seconds)


def leave_out_both(
    problem: Problem, best: Floats, known: Linearisation, *, exact: bool = False
) -> LeftOut:
    """Predicts each row with constants fitted on rows of neither its source nor its family.

    The hardest of the three, and the nearest to a row of a stranger: nothing like it was fitted on.
    """
    sources = [source_of(run) for run in problem.runs]
    families = [family_of(run) for run in problem.runs]
    pairs = tuple(zip(sources, families, strict=True))
    seconds = np.zeros(len(pairs))
    for source, family in sorted(set(pairs)):
        in_source, in_family = members(sources, source), members(families, family)
        inside = in_source & in_family
        logs = _refitted(problem, ~(in_source | in_family), best, known, exact=exact)
        seconds[inside] = problem.predict(logs, inside)
    return LeftOut(tuple(f"{source}, {family}" for source, family in pairs), seconds)


def _refitted(
    problem: Problem, rows: Bools, best: Floats, known: Linearisation, *, exact: bool
) -> Floats:
    """Constants fitted on some rows, from the fit on all of them."""
    steps = MOST_STEPS if exact else QUICK_STEPS
    return fit(problem, rows, start=best, known=known, exact=exact, steps=steps)


def members(groups: Sequence[str], name: str) -> Bools:
    """Which rows are in a group."""
    return np.array([group == name for group in groups], dtype=bool)
