"""The smallest change of a file, by what its reader makes of it: what all kinds of launch files share."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.costmodel.execution import Execution
from meshwright.errors import InputError
from meshwright.planner.launch.script_text import FlagEdit
from meshwright.planner.plan.baseline_document import ScriptDiff, ScriptEdit
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import launch_of_text, run_of_inputs
from meshwright.planner.runs.prediction import arrangement, predict_run
from meshwright.planner.runs.run_file import Run

SAME_PRICE = 1e-3
"""Relative difference of a step that counts as the plan's own price."""

Edited = Callable[[Sequence[FlagEdit]], str]
"""The text of a file with some edits."""


class FileChange:
    """What both kinds of files have in common: candidates, dropped one by one."""

    def __init__(self, path: Path, text: str, plan: Plan) -> None:
        self._path, self._text, self._plan = path, text, plan

    def _meaning(self, text: str) -> object:
        """What a file says; None where it cannot be read or its settings do not fit together."""
        try:
            launch = launch_of_text(text, self._path, self._plan.inputs.model)
            return launch_meaning(launch, self._plan, self._path)
        except InputError:
            return None

    def _smallest(self, edits: list[FlagEdit], edited: Edited) -> list[FlagEdit]:
        """The edits without those that the file means the same without."""
        target = self._meaning(edited(edits))
        for edit in list(edits):
            others = [other for other in edits if other is not edit]
            if self._meaning(edited(others)) == target:
                edits = others
        return edits

    def _result(self, edits: Sequence[FlagEdit], text: str, note: str) -> ScriptDiff:
        lines = difflib.unified_diff(
            self._text.splitlines(keepends=True),
            text.splitlines(keepends=True),
            fromfile=self._path.name,
            tofile=f"{self._path.name} (planned)",
        )
        step_s = None
        notes = [note] if note else []
        if text != self._text or not edits:
            prediction = predict_run(run_of_file(text, self._path, self._plan))
            step_s = float(prediction.estimate.step_time_s)
            notes += self._what_is_missing(step_s)
        return ScriptDiff(
            edits=[_edit_document(edit) for edit in edits],
            patch="".join(_ended(line) for line in lines),
            step_time_s=step_s,
            note="; ".join(notes),
        )

    def _what_is_missing(self, step_s: float) -> list[str]:
        """What the file cannot say of the plan, where its price is another."""
        assert self._plan.predicted is not None
        planned_s = self._plan.predicted.step_time_s
        if abs(step_s / planned_s - 1) <= SAME_PRICE:
            return []
        rest = "the order of ranks (mapping/ranks.csv of -o DIR) and what the file cannot say"
        return [
            f"the edited file is priced at {step_s:.3f} s, the plan at {planned_s:.3f} s: {rest}"
        ]


def run_of_file(text: str, path: Path, plan: Plan) -> Run:
    return run_of_inputs(launch_of_text(text, path, plan.inputs.model), plan.inputs, path)


def launch_meaning(launch: LaunchRun, plan: Plan, path: Path) -> object:
    """All that prices a launch of a plan's model, in one way of writing: what is alike costs the same.

    Raises InputError where its settings do not fit together.
    """
    run = run_of_inputs(launch, plan.inputs, path)
    workload = run.workload
    try:
        stages, _ = arrangement(run)
    except ValueError:
        return None
    longest = max(max(rank) for rank in stages)
    layout = replace(run.layout, recompute_layers=min(int(run.layout.recompute_layers), longest))
    execution = Execution.within(workload).of_layout(layout)
    names = ("precision", "optimizer", "framework", "gpus", "global_batch", "seq_len")
    settings = [getattr(workload, name) for name in names]
    return layout, stages, execution, run.rank_order, settings, launch.repeats_pipeline


def leaves_of(document: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Values by their dotted path."""
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}{key}"
        if isinstance(value, dict):
            leaves |= leaves_of(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def key_edit(name: str, before: object, after: object) -> FlagEdit:
    texts = (None if value is None else (json.dumps(value),) for value in (before, after))
    first, last = texts
    return FlagEdit(flag=name, before=first, after=last)


def _edit_document(edit: FlagEdit) -> ScriptEdit:
    before, after = (
        None if values is None else " ".join(values) for values in (edit.before, edit.after)
    )
    return ScriptEdit(name=edit.flag, before=before, after=after)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
