"""What the cost model says of measured runs that its constants have never seen: `tests/data/more_runs`.

Other sweeps, stacks, releases and records than the rows of the fit; layouts that ran out of memory among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.frameworks.catalog import stack_named
from meshwright.planner.runs.prediction import prediction_of
from meshwright.planner.runs.run_file import Run, read_runs
from meshwright.planner.runs.validation import (
    ErrorSummary,
    Feasibility,
    RegretGroup,
    ScoredRow,
    feasibility,
    plan_regret,
    score,
    summarise,
    summarise_memory,
)

NVIDIA = "NVIDIA"
"""Maker of stacks which the fit knows in other releases."""


@dataclass(frozen=True)
class Unseen:
    """The scored rows of a file."""

    name: str
    rows: tuple[ScoredRow, ...]

    @property
    def trusted(self) -> list[ScoredRow]:
        """Rows that no source calls odd."""
        return [row for row in self.rows if not _suspect(row)]

    @property
    def step_time(self) -> ErrorSummary:
        """Of rows with a step that no source calls odd."""
        return summarise(self.trusted)

    @property
    def memory(self) -> ErrorSummary:
        """Of rows with a peak that no source calls odd."""
        return summarise_memory(self.trusted)

    @property
    def regret(self) -> tuple[RegretGroup, ...]:
        """Of groups of layouts."""
        return plan_regret(self.trusted)


def unseen_runs(folder: Path) -> list[Unseen]:
    """Every file of a folder, scored; at the end all rows of NVIDIA's stacks, and all of others."""
    files = [
        Unseen(path.stem, score(read_runs(path), prediction_of).rows)
        for path in sorted(folder.glob("*.yaml"))
    ]
    together = [row for file in files for row in file.rows]
    of_maker = tuple(row for row in together if row.run is not None and _is_nvidia(row.run))
    others = tuple(row for row in together if row.run is not None and not _is_nvidia(row.run))
    return [*files, Unseen("stacks of NVIDIA", of_maker), Unseen("other stacks", others)]


def fit_or_not(files: Sequence[Unseen]) -> Feasibility:
    """Rows that ran and that ran out of memory, of sweeps that have both."""
    rows = [row for file in files for row in file.rows if row.run is not None]
    sweeps = {row.run.workload.model.name for row in rows if row.run and _out_of_memory(row)}
    return feasibility([row for row in rows if row.run and row.run.workload.model.name in sweeps])


def _is_nvidia(run: Run) -> bool:
    return stack_named(run.workload.framework).maker == NVIDIA


def _suspect(row: ScoredRow) -> bool:
    return row.run is not None and row.run.suspect is not None


def _out_of_memory(row: ScoredRow) -> bool:
    return row.measured is not None and row.measured.out_of_memory
