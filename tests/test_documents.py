"""What docs/architecture.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

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
