"""The home page of the documents: its picture is what its command draws."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright import api, cli
from meshwright.planner.plan import make_plan as making
from tests.places import ROOT


@pytest.mark.soak
def test_the_picture_is_that_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The picture says nothing of how robust the plan is, nor of what its choices bring.
    monkeypatch.setattr(api, "plan", partial(api.plan, robustness=False))
    monkeypatch.setattr(making, "make_plan", partial(making.make_plan, choices=False))
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    command = re.search(r"^meshwright (plan .*) -o run$", page, re.M)
    assert command is not None
    done = CliRunner().invoke(cli.main, [*shlex.split(command[1]), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    picture = re.search(r"!\[.*\]\((.*\.svg)\)", page)
    assert picture is not None
    drawn = (tmp_path / "run" / "mapping" / "fabric.svg").read_text(encoding="utf-8")
    assert (ROOT / "docs" / picture[1]).read_text(encoding="utf-8") == drawn
