"""The command line with the real search behind it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.planner.plan.texts import read_plan
from tests.places import ROOT

ASKED = ["--gpus", "16", "--global-batch", "32", "--seq-len"]
SMALL = ["plan", "gpt2-xl", "--cluster", "dgx-a100", *ASKED, "1024"]
PLAIN = ["--without", "cuda-graph,tp-overlap"]
"""Leaves the plan one execution."""
WIDER = ["plan", "llama-3-8b", "--cluster", "dgx-h100", *ASKED, "8192"]
"""Its tables have more digits and words."""


def here(*args: object) -> Result:
    """As `meshwright`, without a process of its own."""
    environment = {"COLUMNS": None, "FORCE_COLOR": None}
    return CliRunner(env=environment).invoke(main, list(map(str, args)), prog_name="meshwright")


def meshwright(*args: object) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")
    }
    return subprocess.run(
        [sys.executable, "cli.py", *map(str, args)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
        timeout=120,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a plan and its launch files were written; the printed document lies beside them."""
    place = tmp_path_factory.mktemp("plans")
    done = here(*SMALL, *PLAIN, "--top", 3, "-o", place / "small", "--json")
    assert done.exit_code == 0, done.stderr
    (place / "printed.json").write_text(done.stdout, encoding="utf-8")
    return place


@pytest.mark.slow
def test_a_plan_is_proven_and_written(folder: Path) -> None:
    printed = json.loads((folder / "printed.json").read_text(encoding="utf-8"))
    assert printed["schema"] == 1
    assert printed["status"] == "optimal"
    assert printed["objective"]["gap"] == 0
    layout, predicted = printed["layout"], printed["predicted"]
    assert layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] <= 16
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(predicted["step_time_s"])
    assert len(predicted["memory_gib"]) == layout["pp"]
    assert len(printed["alternatives"]) == 2
    assert read_plan(folder / "small") == read_plan(folder / "printed.json")
    template = (folder / "small" / "hostfile.template").read_text(encoding="utf-8")
    assert template.splitlines()[2:] == ["node-00001", "node-00002"]


@pytest.mark.slow
def test_a_plan_is_explained_compared_and_launched(folder: Path, tmp_path: Path) -> None:
    plan = folder / "small"
    explained = here("explain", plan, "--no-best")
    assert explained.exit_code == 0, explained.stderr
    assert "optimal: no layout in this space is faster" in explained.stdout
    changes = json.loads(here("explain", plan, "--no-best", "--json").stdout)["changes"]
    # A proven plan that nothing was pinned for: no single change can be faster.
    assert (
        min(change["slower_pct"] for change in changes if change["slower_pct"] is not None) > -1e-6
    )
    assert here("compare", plan, folder / "printed.json").exit_code == 0
    launched = here("launch", plan, "--target", "megatron", "-o", tmp_path / "out")
    assert launched.exit_code == 0, launched.stderr
    for name in ("megatron_args.json", "env.json", "hostfile.template", "launch.sh"):
        assert (tmp_path / "out" / name).read_bytes() == (plan / name).read_bytes()


@pytest.mark.soak
def test_the_tables_fit_80_columns_without_colour() -> None:
    done = meshwright(*WIDER, "--pin", "tp=2,pp=2,cp=1,micro_batch=1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


@pytest.mark.slow
def test_what_cannot_be_planned_exits_with_1_and_says_why(tmp_path: Path) -> None:
    big = [
        "plan",
        "llama-3-70b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "4",
        "--global-batch",
        "8",
        "--seq-len",
        "8192",
    ]
    done = here(*big, "--json", "-o", tmp_path / "out")
    assert done.exit_code == 1, done.stderr
    printed = json.loads(done.stdout)
    assert printed["status"] == "infeasible"
    assert printed["layout"] is None
    assert any("hbm" in reason for reason in printed["infeasible"]["conflict"])
    assert printed["infeasible"]["smallest_changes"]
    assert not (tmp_path / "out").exists()


def test_no_time_exits_with_3() -> None:
    done = here(*SMALL, "--time-limit", "0.000001", "--json")
    assert done.exit_code == 3, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["status"], printed["layout"]) == ("unknown", None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("script") is None, reason="needs script(1) for a terminal")
def test_a_terminal_gets_colour_and_keeps_its_results(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"{sys.executable} cli.py catalog devices"
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    subprocess.run(
        ["script", "-qec", command, str(log)],
        cwd=ROOT,
        env=environment,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    text = log.read_text(encoding="utf-8")
    assert "\x1b[1m" in text
    assert "h200-sxm-141gb" in text


@pytest.mark.parametrize(
    ("words", "limit_s"),
    [
        ([], 60.0),
        (["--time-limit", "7"], 7.0),
        (["--method", "exhaustive"], None),
    ],
)
def test_a_plan_has_a_minute_where_nothing_else_is_said(
    words: list[str], limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def noted(model: str, **options: Any) -> None:
        given.update(options)
        raise InputError(f"{model} is enough")

    monkeypatch.setattr("meshwright.api.plan", noted)
    assert CliRunner().invoke(main, [*SMALL, *words]).exit_code == 2
    assert given["time_limit_s"] == limit_s
