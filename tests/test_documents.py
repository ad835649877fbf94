"""What the documents name of this repository is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_map_of_the_house_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]
    modules = {path for path in paths if not any(part.startswith(".") for part in path.parts)}
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) > 50
    ends = {"/".join(path.parts[i:]) for path in modules for i in range(len(path.parts))}
    assert [name for name in named if name not in ends] == []


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
