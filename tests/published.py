"""The published rows of the repository, read and scored once for all tests of a process."""

from __future__ import annotations

from functools import cache

from meshwright.planner.runs.prediction import validation_report
from meshwright.planner.runs.run_file import Run, read_runs
from meshwright.planner.runs.validation import ValidationReport
from tests.places import DATA

RUNS = DATA / "published_runs.yaml"


@cache
def published_runs() -> tuple[Run, ...]:
    """Every row; runs are frozen, so that no test can change what another reads."""
    return tuple(read_runs(RUNS))


@cache
def published_report() -> ValidationReport:
    """Predicted against measured."""
    return validation_report(RUNS)
