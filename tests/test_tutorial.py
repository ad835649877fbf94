"""The tutorial's commands run as they stand, one after the other, and the site's pages are all listed."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from meshwright import api, cli
from meshwright.planner.plan import make_plan as making
from tests.places import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```', re.M | re.S
)


def commands() -> list[list[str]]:
    """The words of every command in the page's sh blocks."""
    blocks = [
        block["text"] for block in _BLOCK.finditer(PAGE.read_text("utf-8")) if block["kind"] == "sh"
    ]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # How robust a plan is and what its choices bring take as long again, and are asked in tests of their own.
    monkeypatch.setattr(api, "plan", partial(api.plan, robustness=False))
    monkeypatch.setattr(making, "make_plan", partial(making.make_plan, choices=False))
    (tmp_path / "qwen3-8b").mkdir()
    shutil.copy(ROOT / "tests/data/hf_configs/qwen3-8b.json", tmp_path / "qwen3-8b/config.json")
    for block in _BLOCK.finditer(PAGE.read_text("utf-8")):
        if block["title"]:
            (tmp_path / block["title"]).write_text(block["text"], encoding="utf-8")
    assert len(commands()) >= 8
    outputs = []
    for words in commands():
        assert words[0] == "meshwright"
        done = CliRunner().invoke(cli.main, words[1:])
        assert done.exit_code == 0, f"{words}\n{done.output}"
        outputs.append(done.stdout)
    compared = next(
        text for words, text in zip(commands(), outputs, strict=True) if "compare" in words
    )
    assert " s today: " in compared.splitlines()[0]
    assert (tmp_path / "today.diff").read_text(encoding="utf-8").startswith("--- today.sh")


def pages_of(menu: object) -> Iterator[str]:
    """The pages of a menu, of its sections and of theirs."""
    if isinstance(menu, str):
        yield menu
    elif isinstance(menu, dict | list):
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from pages_of(part)


def test_every_page_is_in_the_sites_menu() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(pages_of(site["nav"])) == sorted(pages)
