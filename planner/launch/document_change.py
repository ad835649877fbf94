"""Keys of a configuration file that a plan changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.launch.file_change import FileChange, key_edit, leaves_of
from meshwright.planner.launch.script_text import FlagEdit
from meshwright.planner.plan.baseline_document import ScriptDiff
from meshwright.planner.plan.document import Plan


class DocumentChange(FileChange):
    """Keys of a DeepSpeed or accelerate configuration."""

    def __init__(
        self, path: Path, text: str, plan: Plan, document: dict[str, Any], wanted: dict[str, Any]
    ) -> None:
        super().__init__(path, text, plan)
        self._has, self._wants = leaves_of(document), leaves_of(wanted)

    def diff(self) -> ScriptDiff:
        """The edits, and the file with them."""
        edits = []
        for name, value in self._wants.items():
            if self._has.get(name) != value:
                edits.append(key_edit(name, self._has.get(name), value))
        edits += [
            key_edit(name, value, None)
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
