"""Every command of docs/worked_examples.md is run, and its JSON says what the page says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from meshwright import api
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


LONG = ("--slots 128", "--slots 4096")
"""Of placements of experts, those that are searched for long."""
LONGEST = ("--gpus 64 --slots 128", "traffic dragonfly/plan.yaml", "traffic gpt3/plan.yaml")
"""Commands of rows that take two seconds and more."""


def cases() -> Iterator[Any]:
    """Every row; those that plan first are slow, and those that place experts for long. `make slow` runs the
    longest.
    """
    for commands, answers in ROWS:
        is_slow = commands[0].startswith("plan ") or commands[0].endswith(LONG)
        marks = (pytest.mark.slow,) if is_slow else ()
        if commands[-1].endswith(LONGEST):
            marks = (pytest.mark.soak,)
        yield pytest.param(commands, answers, id=commands[-1], marks=marks)


def answer(words: str) -> str:
    """What a command prints as JSON."""
    done = CliRunner().invoke(main, [*shlex.split(words), "--json"])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Answers of `plan` by its words, with the folder that holds the plan: rows ask for the same ones."""

    @cache
    def plan(words: str) -> tuple[str, Path]:
        place = tmp_path_factory.mktemp("planned")
        # No row asks how robust a plan is, which takes as long again.
        with patch.object(api, "plan", partial(api.plan, robustness=False)):
            return answer(f"{words} -o {place / 'plan'}"), place / "plan"

    return plan


@pytest.mark.parametrize(("commands", "answers"), list(cases()))
def test_a_command_of_the_page_answers_as_shown(
    commands: list[str],
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    planned: Callable[[str], tuple[str, Path]],
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    for words in commands:
        if words.startswith("plan "):
            asked, _, name = words.partition(" -o ")
            text, folder = planned(asked)
            if name:
                (tmp_path / name).symlink_to(folder)
        else:
            text = answer(words)
    document, fields = json.loads(text), FIELD.findall(answers.strip())
    assert fields, answers
    for path, relation, shown in fields:
        value = value_at(document, path)
        assert holds(value, relation, shown), f"{path} is {value}, the page says {relation} {shown}"


def test_the_page_names_no_function() -> None:
    assert len(ROWS) > 50
    reproduced = PAGE.partition("## Errata")[0]
    assert not re.findall(r"`(?:textbook|memory|collectives)\.\w+`", reproduced)
