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
from meshwright.planner.runs.calibration.robust_fit import Bools, Floats
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
        logs = fit(problem, ~inside, start=best, known=known, exact=exact)
        seconds[inside] = problem.predict(logs, inside)
    return LeftOut(groups, seconds)


def members(groups: Sequence[str], name: str) -> Bools:
    """Which rows are in a group."""
    return np.array([group == name for group in groups], dtype=bool)
