"""Keys of a torchtitan TOML file that a plan changes, each on the line where it stands."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.planner.launch.file_change import FileChange, key_edit, leaves_of
from meshwright.planner.launch.script_text import FlagEdit
from meshwright.planner.launch.torchtitan_model import pipeline_modules
from meshwright.planner.plan.baseline_document import ScriptDiff
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.torchtitan import CONVERTERS
from meshwright.planner.runs.launches.torchtitan_toml import MODEL_PARTS, OLD_NAMES

_SECTION = re.compile(r"\s*\[([A-Za-z_][\w.]*)\]\s*(?:#.*)?")
_KEY = re.compile(r"(\s*([A-Za-z_]\w*)\s*=\s*)(\"[^\"]*\"|\[[^\]]*\]|[^\s#]+)(.*)", re.DOTALL)
"""What stands before a value of one line, the key, the value, and what follows: a comment."""
_OF_MODULE = ("module", "config")
"""Flags that name a module of Python, which a TOML file has no place for."""


class TomlChange(FileChange):
    """Keys of a TOML file; sections, comments and what the plan says nothing of stay as they are."""

    def __init__(
        self, path: Path, text: str, plan: Plan, document: dict[str, Any], wanted: Sequence[str]
    ) -> None:
        super().__init__(path, text, plan)
        self._has = leaves_of(document)
        self._wants = _keys(wanted, self._has) | self._precision() | self._parts()

    def diff(self) -> ScriptDiff:
        """The edits, and the file with them."""
        edits = [
            key_edit(name, self._has.get(name), value)
            for name, value in self._wants.items()
            if self._has.get(name) != value
        ]
        edits = self._smallest(edits, self._edited)
        text = self._edited(edits)
        if not self._says(text, edits):
            return self._result(edits, self._text, "change the keys by hand")
        return self._result(edits, text, "")

    def _precision(self) -> dict[str, object]:
        """The converters of the model, where they stand for another precision than the plan's."""
        listed = self._has.get("model.converters") or []
        if not isinstance(listed, list):
            return {}
        now = [CONVERTERS[name] for name in map(str, listed) if name in CONVERTERS]
        planned = self._plan.inputs.precision
        if planned == (now[-1] if now else "bf16"):
            return {}
        kept: list[object] = [name for name in listed if str(name) not in CONVERTERS]
        named = [name for name, precision in CONVERTERS.items() if precision == planned]
        return {"model.converters": kept + named[-1:]}

    def _parts(self) -> dict[str, object]:
        """The modules of each chunk, for a pipeline; up to torchtitan 0.2 the head is called output."""
        layout = self._plan.layout
        parts = None if layout is None else pipeline_modules(layout)
        if parts is None:
            return {}
        parts[-1][-1] = "output"
        return {f"parallelism.{MODEL_PARTS}": parts}

    def _edited(self, edits: Sequence[FlagEdit]) -> str:
        text = self._text if self._text.endswith("\n") else f"{self._text}\n"
        for edit in edits:
            text = _with_key(text, edit.flag, _shown(self._wants[edit.flag]))
        return text

    def _says(self, text: str, edits: Sequence[FlagEdit]) -> bool:
        """Whether the edits arrived: a value over several lines is not changed."""
        try:
            leaves = leaves_of(tomllib.loads(text))
        except tomllib.TOMLDecodeError:
            return False
        return all(leaves.get(edit.flag) == self._wants[edit.flag] for edit in edits)


def _shown(value: object) -> str:
    """A value as TOML; a list of lists with a line for each."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "".join(("[\n", *(f"    {json.dumps(part)},\n" for part in value), "]"))
    return json.dumps(value)


def _keys(words: Sequence[str], has: dict[str, Any]) -> dict[str, object]:
    """Values by section and key, of torchtitan's flags; keys by the name that the file has for them."""
    renamed = {new: old for old, new in OLD_NAMES.items() if old in has}
    keys: dict[str, object] = {}
    for index, word in enumerate(words):
        if word.startswith("activation-checkpoint:"):
            keys["activation_checkpoint.mode"] = word.partition(":")[2]
        section, dot, key = word.removeprefix("--").partition(".")
        if not word.startswith("--") or not dot or section in _OF_MODULE:
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        value: object = int(following) if following.isdecimal() else following
        if following.startswith("--") or following.startswith("activation-checkpoint:"):
            value = not key.startswith("no-")
        name = f"{section}.{key.removeprefix('no-')}".replace("-", "_")
        keys[renamed.get(name, name)] = value
    return keys


def _with_key(text: str, name: str, value: str) -> str:
    """A TOML text with one key set: on its line, at the end of its section, or in a new section."""
    section, _, key = name.rpartition(".")
    lines = text.splitlines(keepends=True)
    current, last = "", None
    for number, line in enumerate(lines):
        heading = _SECTION.fullmatch(line.rstrip("\n"))
        if heading:
            current = heading[1]
        if current != section:
            continue
        assigned = _KEY.fullmatch(line)
        if assigned and assigned[2] == key:
            lines[number] = f"{assigned[1]}{value}{assigned[4]}"
            return "".join(lines)
        if line.strip():
            last = number
    if last is None:
        return f"{text}\n[{section}]\n{key} = {value}\n"
    lines.insert(last + 1, f"{key} = {value}\n")
    return "".join(lines)
