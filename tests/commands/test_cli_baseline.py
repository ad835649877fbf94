"""`plan --baseline` and `compare`: the speed-up comes first, the document has the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright import cli
from meshwright.planner.plan.texts import plan_text
from tests.priced_plans import priced_plan

RUN = """\
model: llama-3-8b
cluster: dgx-h100
run: {seq_len: 4096, global_batch: 64, tp: 4, dp: 2, sequence_parallel: true, zero_stage: 1, recompute: full}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    (tmp_path / "today.yaml").write_text(RUN, encoding="utf-8")
    return tmp_path


def test_the_speed_up_is_the_first_line(folder: Path) -> None:
    done = run("compare", str(folder), str(folder / "today.yaml"))
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    shown = json.loads(run("compare", str(folder), str(folder / "today.yaml"), "--json").stdout)
    assert " s today: " in first
    assert first.endswith(f"{shown['baseline']['speed_up']:.2f} x")


def test_days_need_tokens(folder: Path) -> None:
    words = ("compare", str(folder), str(folder / "today.yaml"), "--gpu-hour-price", "2")
    cost = json.loads(run(*words, "--tokens", "1e12", "--json").stdout)["baseline"]["cost"]
    assert cost["today"]["dollars"] == pytest.approx(2 * cost["today"]["gpu_hours"])
    assert json.loads(run(*words, "--json").stdout)["baseline"]["cost"] is None


def test_a_patch_needs_a_script(folder: Path) -> None:
    out = folder / "x.diff"
    done = run("compare", str(folder), str(folder / "today.yaml"), "-o", str(out))
    assert done.exit_code == 2
    assert "no launch script" in done.stderr
    assert not out.exists()


def test_a_baseline_that_cannot_be_read_ends_before_the_search(folder: Path) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--seq-len", "4096")
    bad = folder / "bad.sh"
    bad.write_text("torchrun pretrain_gpt.py --num-layers many", encoding="utf-8")
    done = run(*words, "--global-batch", "64", "--baseline", str(bad))
    assert done.exit_code == 2
    assert "--num-layers" in done.stderr


def test_a_plan_with_its_baseline(folder: Path) -> None:
    words = ("plan", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--seq-len", "4096")
    pins = ("--global-batch", "64", "--pin", "tp=2,pp=1,cp=1,recompute=none")
    done = run(*words, *pins, "--baseline", str(folder / "today.yaml"), "--json")
    document = json.loads(done.stdout)
    assert document["baseline"]["kind"] == "run"
    difference_s = document["objective"]["step_time_s"] - document["baseline"]["step_time_s"]
    assert document["baseline"]["difference_s"] == pytest.approx(difference_s)
