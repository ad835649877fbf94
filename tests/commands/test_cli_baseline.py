"""`plan --baseline` and `compare`: the speed-up comes first, the document has the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from meshwright import cli
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.request.choices import WITHOUT
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


WINDOWED = """\
torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2880 \\
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 \\
  --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --ffn-hidden-size 2880 --swiglu \\
  --window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable --seq-length 8192 \\
  --micro-batch-size 1 --global-batch-size 16 --context-parallel-size 2 --expert-model-parallel-size 8 \\
  --bf16 --use-distributed-optimizer
"""


def test_a_ring_under_windows_is_priced_and_named(tmp_path: Path) -> None:
    """Transformer Engine refuses it: once it was priced without a word."""
    script = tmp_path / "today.sh"
    script.write_text(WINDOWED, encoding="utf-8")
    asked = ("estimate", str(script), "--from-launch", "--with", "cluster=dgx-h100")
    done = run(*asked)
    assert done.exit_code == 0, done.output
    assert "megatron-context-windows: a ring of 2 ranks" in done.stderr
    assert "megatron-context-sinks: cp 2 without a swap" in done.stderr
    for words, broken in ((" --cp-comm-type all_gather", ("sinks",)), (" --cp-comm-type a2a", ())):
        script.write_text(WINDOWED.rstrip() + words, encoding="utf-8")
        said = run(*asked).stderr
        named = [what for what in ("windows", "sinks") if f"megatron-context-{what}" in said]
        assert tuple(named) == broken


def test_a_baseline_that_cannot_start_says_so(tmp_path: Path) -> None:
    script = tmp_path / "today.sh"
    script.write_text(WINDOWED, encoding="utf-8")
    plan = priced_plan("gpt-oss-20b", dp=8, ep=8, num_micro_batches=2, seq_len=8192)
    (tmp_path / "plan.yaml").write_text(plan_text(plan), encoding="utf-8")
    done = run("compare", str(tmp_path), str(script), "--json")
    assert done.exit_code == 0, done.output
    broken = json.loads(done.stdout)["baseline"]["broken_rules"]
    names = {rule["rule"]: rule["words"] for rule in broken}
    assert "which Transformer Engine refuses" in names["megatron-context-windows"]


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
    few = ("--without", ",".join(WITHOUT))
    done = run(*words, *pins, *few, "--baseline", str(folder / "today.yaml"), "--json")
    document = json.loads(done.stdout)
    assert document["baseline"]["kind"] == "run"
    difference_s = document["objective"]["step_time_s"] - document["baseline"]["step_time_s"]
    assert document["baseline"]["difference_s"] == pytest.approx(difference_s)
