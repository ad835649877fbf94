"""docs/run_files.md names every field of a run file, with its default, and its examples are priced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from meshwright.cli import main
from meshwright.planner.runs.run_schema import MeasuredDoc, OverlapDoc, RunDoc, SettingsDoc
from tests.places import ROOT

TEXT = (ROOT / "docs" / "run_files.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type[BaseModel]] = {
    "A run": RunDoc,
    "Settings": SettingsDoc,
    "Measured": MeasuredDoc,
}


def rows(title: str) -> dict[str, str]:
    """Every field of a table with the second cell of its row."""
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    fields = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`(\w+)`", cells[0]) if line.startswith("| `") else ():
            fields[name] = cells[1]
    return fields


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_has_its_row_and_no_other(title: str) -> None:
    known = {name.rstrip("_") for name in SECTIONS[title].model_fields}
    assert set(rows(title)) == known


def test_defaults_are_those_of_the_schema() -> None:
    for name, said in rows("Settings").items():
        default = SettingsDoc.model_fields[name].default
        if SettingsDoc.model_fields[name].is_required():
            assert said == "required", name
        elif isinstance(default, bool):
            assert said == str(default).lower(), name
        elif isinstance(default, int | float | str):
            assert said.strip("`") == str(default), name
    for name in OverlapDoc.model_fields:
        assert f"`{name}`" in TEXT


def test_the_examples_are_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```', TEXT, re.M | re.S):
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = re.findall(r"^meshwright (.+)$", TEXT, re.M)
    assert commands == ["estimate run.yaml", "validate runs.yaml"]
    for command in commands:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
