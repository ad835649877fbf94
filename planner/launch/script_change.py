"""Flags of a launch script that a plan changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import InputError
from meshwright.planner.launch.file_change import FileChange, launch_meaning
from meshwright.planner.launch.script_text import FlagEdit, edited_text
from meshwright.planner.plan.baseline_document import ScriptDiff
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.flags import CommandLine, words_of
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.reader import launch_document, launch_of_text

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


class ScriptChange(FileChange):
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
            return launch_meaning(launch, self._plan, self._path)
        except InputError:
            return None

    def _launch(self, words: list[str]) -> LaunchRun | None:
        """What some words say, on as many GPUs as the script; None where they cannot be read."""
        try:
            launch = launch_of_text(json.dumps(words), self._path.with_suffix(".json"))
        except InputError:
            return None
        return replace(launch, settings={**launch.settings, **self._gpus})


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
