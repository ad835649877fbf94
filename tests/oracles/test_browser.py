"""A plan's page in a real browser: it is shown whole, and nothing is refused or missing."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from meshwright.planner.report.plan_page import plan_page
from tests.planner.analysis.test_trace import piped

pytestmark = pytest.mark.oracle

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BROWSER, *fixed, profile, *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(plan_page(piped("1f1b")), encoding="utf-8")
    shown = browse(page, "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    assert "Refused to" not in shown.stderr
    assert "The ranks on the fabric" in shown.stdout
    before, after = (
        re.findall(r"<(\w+)", text) for text in (page.read_text("utf-8"), shown.stdout)
    )
    for tag in ("svg", "rect", "td", "section", "li"):
        assert after.count(tag) == before.count(tag) > 0
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}", "--window-size=1300,2000")
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (1300, 2000)
    assert picture.stat().st_size > 50_000
