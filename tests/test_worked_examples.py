"""Every command of docs/worked_examples.md is run, and its JSON says what the page says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from tests.places import ROOT

PAGE = (ROOT / "docs" / "worked_examples.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\|[^|]*\|((?: `meshwright [^`]+`)+) \|([^|]*)\|$", flags=re.MULTILINE)
COMMAND = re.compile(r"`meshwright ([^`]+)`")
FIELD = re.compile(r"`([\w.-]+)` ([=<>]) ([^;|]+?)\s*(?:;|$)")
ROWS = [(COMMAND.findall(cell), answers) for cell, answers in ROW.findall(PAGE)]


def value_at(document: Any, path: str) -> Any:
    """What a document holds at names and indices with dots between them."""
    for name in path.split("."):
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def holds(value: Any, relation: str, shown: str) -> bool:
    """Whether a value is what the page shows, to 0.6 %, or on the side of it that the page says."""
    if isinstance(value, str):
        return relation == "=" and value == shown
    if relation == "<":
        return bool(value < float(shown))
    if relation == ">":
        return bool(value > float(shown))
    return bool(value == pytest.approx(float(shown), rel=6e-3, abs=1e-12))


def cases() -> Iterator[Any]:
    """Every row; those that plan first are slow."""
    for commands, answers in ROWS:
        marks = (pytest.mark.slow,) if commands[0].startswith("plan ") else ()
        yield pytest.param(commands, answers, id=commands[-1], marks=marks)


@pytest.mark.parametrize(("commands", "answers"), list(cases()))
def test_a_command_of_the_page_answers_as_shown(
    commands: list[str], answers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    for words in commands:
        done = CliRunner().invoke(main, [*shlex.split(words), "--json"])
        assert done.exit_code == 0, done.output
    document, fields = json.loads(done.stdout), FIELD.findall(answers.strip())
    assert fields, answers
    for path, relation, shown in fields:
        value = value_at(document, path)
        assert holds(value, relation, shown), f"{path} is {value}, the page says {relation} {shown}"


def test_the_page_names_no_function() -> None:
    assert len(ROWS) > 50
    reproduced = PAGE.partition("## Errata")[0]
    assert not re.findall(r"`(?:textbook|memory|collectives)\.\w+`", reproduced)
