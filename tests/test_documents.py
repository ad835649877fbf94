"""What the documents name of this repository is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_map_of_the_house_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) > 50
    assert [name for name in named if Path(name).name not in modules] == []
    paths = [name for name in named if "/" in name]
    found = [name for name in paths if (ROOT / name).exists() or list(ROOT.rglob(name))]
    assert paths == found


ROOMS = (
    "cluster_specs|commands|constraints|costmodel|frameworks|model_specs|planner|tests|benchmarks"
)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.name != "CHANGELOG.md"
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_files_that_exist(page: str) -> None:
    """Files in code marks; NAME and * stand for what the reader puts there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{ROOMS})/[\w./-]*)`", text)
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
