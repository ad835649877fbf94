"""The smallest change of a launch file that people have to one that starts a plan.

Flags and keys that the plan's own launch files set otherwise are candidates. Each is dropped again where the
file says the same without it, as its reader understands it; flags of one subject stay together.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.costmodel.execution import Execution
from meshwright.documents.reader import read_text
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.launch.script_text import FlagEdit, edited_text
from meshwright.planner.plan.baseline_document import ScriptDiff, ScriptEdit
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.bridge_recipes import is_recipe_name
from meshwright.planner.runs.launches.flags import CommandLine, words_of
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import (
    launch_document,
    launch_of_text,
    run_of_inputs,
)
from meshwright.planner.runs.launches.torchtitan_toml import is_toml
from meshwright.planner.runs.prediction import arrangement, predict_run
from meshwright.planner.runs.run_file import MAX_FILE_BYTES, Run

_ARGUMENTS = ("megatron_args.json", "torchtitan_args.json")
_DOCUMENTS = ("ds_config.json", "accelerate.yaml")
_ANCHORS = (
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--global-batch-size",
    "--seq-length",
    "--parallelism.tensor-parallel-degree",
    "--training.local-batch-size",
    "--training.seq-len",
    "--config",
)
"""Flags behind which new ones are written."""
_FAMILIES = {"recompute", "cuda", "fp8", "fp4", "checkpoint"}
"""First words of flags that are refused or mean nothing without one another."""
SAME_PRICE = 1e-3
"""Relative difference of a step that counts as the plan's own price."""

Edited = Callable[[Sequence[FlagEdit]], str]
"""The text of a file with some edits."""


def with_script_diff(plan: Plan) -> Plan:
    """A plan whose baseline is a launch file, with the smallest change of that file that reaches the plan.

    Any other plan is returned as it is. Raises InputError where the file cannot be read.
    """
    if plan.baseline is None or plan.baseline.kind != "launch":
        return plan
    path = Path(plan.baseline.file)
    if is_recipe_name(path):
        note = "a recipe is no file: launch --target bridge writes its overrides"
        diff = ScriptDiff(note=note)
    else:
        diff = script_diff(path, plan)
    return plan.model_copy(update={"baseline": plan.baseline.model_copy(update={"diff": diff})})


def script_diff(path: Path, plan: Plan) -> ScriptDiff:
    """The smallest change of a launch file that starts a plan's layout.

    Parameters
    ----------
    path
        A launch file of the plan's framework.
    plan
        With a layout.

    Returns
    -------
    ScriptDiff
        Without edits, and with a note, where the file is of another framework.

    Raises
    ------
    InputError
        A file that cannot be read.
    """
    text = read_text(path, MAX_FILE_BYTES)
    ours = framework_of_stack(plan.inputs.framework).name
    theirs = framework_of_stack(_run(text, path, plan).workload.framework).name
    if ours != theirs:
        note = f"the file is {theirs}'s, the plan {ours}'s: -o DIR writes that framework's files"
        return ScriptDiff(note=note)
    document = launch_document(path, text)
    try:
        files = plan_files(plan)
    except InfeasibleError as error:
        return ScriptDiff(note=str(error))
    names = _DOCUMENTS if isinstance(document, dict) else _ARGUMENTS
    wanted = next((files[name] for name in names if name in files), None)
    if wanted is None or is_toml(text):
        return ScriptDiff(note="the plan's files are of another kind: -o DIR writes them")
    if isinstance(document, dict):
        return _DocumentChange(path, text, plan, document, yaml.safe_load(wanted)).diff()
    diff = _ScriptChange(path, text, plan, json.loads(wanted)).diff()
    exports = [
        f"{name}={value}"
        for name, value in json.loads(files["env.json"]).items()
        if name not in text
    ]
    if not exports:
        return diff
    environment = f"in the environment: {' '.join(exports)}"
    return diff.model_copy(update={"note": "; ".join(filter(None, (diff.note, environment)))})


class _Change:
    """What both kinds of files have in common: candidates, dropped one by one."""

    def __init__(self, path: Path, text: str, plan: Plan) -> None:
        self._path, self._text, self._plan = path, text, plan

    def _meaning(self, text: str) -> object:
        """What a file says; None where it cannot be read or its settings do not fit together."""
        try:
            return _meaning_of(_run(text, self._path, self._plan))
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
            prediction = predict_run(_run(text, self._path, self._plan))
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


class _ScriptChange(_Change):
    """Flags of a script, or of a JSON list of arguments."""

    def __init__(self, path: Path, text: str, plan: Plan, wanted: list[str]) -> None:
        super().__init__(path, text, plan)
        listed = launch_document(path, text)
        self._listed = [str(word) for word in listed] if isinstance(listed, list) else None
        line = words_of(text, str(path)) if self._listed is None else None
        words = self._listed if line is None else line.words
        self._now = launch_of_text(text, path).settings
        self._gpus = {key: self._now[key] for key in ("gpus",) if key in self._now}
        self._has = _flags(words or [])
        self._wants = _flags(wanted)

    def diff(self) -> ScriptDiff:
        """The edits, written into the text where that is possible."""
        candidates = [*self._sets(), *self._removals()]
        target = self._meaning_of_words(self._edited_words(candidates))
        edits = self._needed(candidates, target)
        text = self._written(edits, target)
        if text is None:
            return self._result(
                edits, self._text, "change the flags by hand: the script computes them"
            )
        return self._result(edits, text, "")

    def _sets(self) -> list[FlagEdit]:
        """Flags that the plan's arguments have and the script has not, or has with other values."""
        edits = []
        for flag, after in self._wants.items():
            before = self._has.get(flag)
            if before is not None:
                before = before[: max(len(after), 1)] if after else ()
            if before != after:
                edits.append(FlagEdit(flag=flag, before=before, after=after))
        return edits

    def _removals(self) -> list[FlagEdit]:
        """Flags of the script that the plan's arguments do without and that the reader takes note of."""
        removed = set()
        for flag in self._has:
            words = _words({key: value for key, value in self._has.items() if key != flag})
            launch = self._launch(words)
            if flag not in self._wants and launch is not None and launch.settings != self._now:
                removed.add(flag)
        families = {_subject(flag) for flag in removed} & _FAMILIES
        edits = []
        for flag, values in self._has.items():
            companion = _subject(flag) in families and flag not in self._wants
            if flag in removed or companion:
                edits.append(FlagEdit(flag=flag, before=values, after=None))
        return edits

    def _needed(self, edits: list[FlagEdit], target: object) -> list[FlagEdit]:
        """The fewest edits with the meaning of all; flags that begin with the same word stay together."""
        subjects = [_subject(edit.flag) for edit in edits]
        kept = list(edits)
        for subject in dict.fromkeys(subjects):
            others = [edit for edit in kept if _subject(edit.flag) != subject]
            if self._meaning_of_words(self._edited_words(others)) == target:
                kept = others
        for edit in list(kept):
            if edit.before is not None or edit.after in ((), None):
                continue
            others = [other for other in kept if other is not edit]
            if (
                self._is_default(edit)
                and self._meaning_of_words(self._edited_words(others)) == target
            ):
                kept = others
        return kept

    def _is_default(self, edit: FlagEdit) -> bool:
        """Whether a new flag says what holds without it."""
        return edit.after in (("1",), ("none",), ("adam",), ("0",))

    def _written(self, edits: Sequence[FlagEdit], target: object) -> str | None:
        """The file with the edits, in the first way of writing them that its reader understands."""
        if self._listed is not None:
            return json.dumps(self._edited_words(edits), indent=1) + "\n"
        anchors = [edit.flag for edit in edits if edit.before and edit.after]
        for through_variables in (True, False):
            text = edited_text(
                self._text, edits, [*anchors, *_ANCHORS], through_variables=through_variables
            )
            if self._meaning(text) == target:
                return text
        return None

    def _edited_words(self, edits: Iterable[FlagEdit]) -> list[str]:
        flags = dict(self._has)
        for edit in edits:
            if edit.after is None:
                flags.pop(edit.flag, None)
            else:
                flags[edit.flag] = edit.after
        return _words(flags)

    def _meaning_of_words(self, words: list[str]) -> object:
        launch = self._launch(words)
        if launch is None:
            return None
        try:
            return _meaning_of(run_of_inputs(launch, self._plan.inputs, self._path))
        except InputError:
            return None

    def _launch(self, words: list[str]) -> LaunchRun | None:
        """What some words say, on as many GPUs as the script; None where they cannot be read."""
        try:
            launch = launch_of_text(json.dumps(words), self._path.with_suffix(".json"))
        except InputError:
            return None
        return replace(launch, settings={**self._gpus, **launch.settings})


class _DocumentChange(_Change):
    """Keys of a DeepSpeed or accelerate configuration."""

    def __init__(
        self, path: Path, text: str, plan: Plan, document: dict[str, Any], wanted: dict[str, Any]
    ) -> None:
        super().__init__(path, text, plan)
        self._has, self._wants = _leaves(document), _leaves(wanted)

    def diff(self) -> ScriptDiff:
        """The edits, and the file with them."""
        edits = []
        for name, value in self._wants.items():
            if self._has.get(name) != value:
                edits.append(_key_edit(name, self._has.get(name), value))
        edits += [
            _key_edit(name, value, None)
            for name, value in self._has.items()
            if name not in self._wants
        ]
        edits = self._smallest(edits, self._edited)
        return self._result(edits, self._edited(edits), "")

    def _edited(self, edits: Sequence[FlagEdit]) -> str:
        leaves = dict(self._has)
        for edit in edits:
            if edit.after is None:
                leaves.pop(edit.flag, None)
            else:
                leaves[edit.flag] = self._wants[edit.flag]
        document: dict[str, Any] = {}
        for name, value in leaves.items():
            *sections, key = name.split(".")
            section = document
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = value
        if self._path.suffix == ".json":
            return json.dumps(document, indent=2) + "\n"
        return yaml.safe_dump(document, sort_keys=False)


def _run(text: str, path: Path, plan: Plan) -> Run:
    return run_of_inputs(launch_of_text(text, path, plan.inputs.model), plan.inputs, path)


def _meaning_of(run: Run) -> object:
    """All that prices a run, in one way of writing: runs of equal meaning cost the same."""
    workload = run.workload
    try:
        stages, _ = arrangement(run)
    except ValueError:
        return None
    longest = max(max(rank) for rank in stages)
    layout = replace(run.layout, recompute_layers=min(int(run.layout.recompute_layers), longest))
    execution = Execution.within(workload).of_layout(layout)
    names = ("precision", "optimizer", "framework", "gpus", "global_batch", "seq_len")
    return layout, stages, execution, run.rank_order, [getattr(workload, name) for name in names]


def _flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by flag; what stands before the first flag is under an empty name."""
    flags: dict[str, list[str]] = {}
    flag = ""
    for word in CommandLine(words, "").words:
        if word.startswith("--") and len(word) > 2:
            flag = word
            flags[flag] = []
        else:
            flags.setdefault(flag, []).append(word)
    return {name: tuple(values) for name, values in flags.items()}


def _words(flags: dict[str, tuple[str, ...]]) -> list[str]:
    words = []
    for flag, values in flags.items():
        words += [flag, *values] if flag else list(values)
    return words


def _subject(flag: str) -> str:
    """The first word of a flag, by which flags that go together are named."""
    return flag.removeprefix("--").replace("_", "-").split("-")[0]


def _leaves(document: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Values by their dotted path."""
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{place}{key}"
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def _key_edit(name: str, before: object, after: object) -> FlagEdit:
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
