"""Every command of docs/worked_examples.md is run, and its JSON says what the page says."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from tests.places import ROOT

PAGE = (ROOT / "docs" / "worked_examples.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\|[^|]*\| `meshwright ([^`]+)` \|([^|]*)\|$", flags=re.MULTILINE)
FIELD = re.compile(r"`([\w.-]+)` = ([^;|]+?)\s*(?:;|$)")
ROWS = ROW.findall(PAGE)


def value_at(document: Any, path: str) -> Any:
    """What a document holds at names and indices with dots between them."""
    for name in path.split("."):
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


@pytest.mark.parametrize(("words", "answers"), ROWS, ids=[words for words, _ in ROWS])
def test_a_command_of_the_page_answers_as_shown(
    words: str, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, [*shlex.split(words), "--json"])
    assert done.exit_code == 0, done.output
    document, fields = json.loads(done.stdout), FIELD.findall(answers.strip())
    assert fields, answers
    for path, shown in fields:
        value = value_at(document, path)
        expected = shown if isinstance(value, str) else pytest.approx(float(shown), rel=6e-3)
        assert value == expected, path


def test_the_page_names_no_function() -> None:
    assert len(ROWS) > 40
    reproduced = PAGE.partition("## Errata")[0]
    assert not re.findall(r"`(?:alpha_beta|ratios|memory|collectives)\.\w+`", reproduced)
