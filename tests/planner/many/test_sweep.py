"""Sweeps: what the words mean, and that every row is the plan that `plan` would give."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import meshwright
from meshwright import cli
from meshwright.errors import InputError
from meshwright.planner.many.sweep import SweepReport, combinations_of, read_axes
from meshwright.planner.request.choices import WITHOUT

ASKED: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 64, "seq_len": 4096}
FEW: dict[str, Any] = {"pin": "tp=2,pp=1,micro_batch=1", "without": WITHOUT}
"""Few layouts and one execution."""
WORDS = ["plan", "llama-3-8b", "--cluster", "dgx-h100", "--global-batch", "64", "--seq-len", "4096"]


def test_ranges_and_lists() -> None:
    axes = read_axes("gpus=8:40:x2, seq-len=4096:12288:+4096,precision=bf16+fp8,hbm_gib=80+141.5")
    assert axes == {
        "gpus": (8, 16, 32),
        "seq_len": (4096, 8192, 12288),
        "precision": ("bf16", "fp8"),
        "hbm_gib": (80.0, 141.5),
    }
    assert len(combinations_of(axes)) == 36
    assert combinations_of({"gpus": (8, 16), "precision": ("bf16", "fp8")})[1] == {
        "gpus": 8,
        "precision": "fp8",
    }


def test_one_value_is_a_list_of_one() -> None:
    axes = read_axes({"gpus": 8, "precision": "fp8", "seq_len": [4096, 8192]})
    assert axes == {"gpus": (8,), "precision": ("fp8",), "seq_len": (4096, 8192)}


@pytest.mark.parametrize("text", ["gpus=8,gpus=16", "gpus=8+12.5"])
def test_no_value_is_dropped_or_rounded_in_silence(text: str) -> None:
    with pytest.raises(InputError, match=r"given twice|whole numbers"):
        read_axes(text)


def test_steps_may_begin_at_nothing() -> None:
    """`reserve_gib=0:20:+10` was said not to rise."""
    assert read_axes("reserve_gib=0:20:+10")["reserve_gib"] == (0, 10, 20)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu=8", "did you mean 'gpus'"),
        ("gpus", "OPTION=VALUES"),
        ("gpus=8:64:x1", "must rise"),
        ("gpus=64:8:x2", "must rise"),
        ("reserve_gib=0:8:x2", "must rise"),
        ("gpus=many", "must be numbers"),
        ("gpus=1:100000:+1", "more than 512 combinations; give 1 to 512"),
    ],
)
def test_what_cannot_be_swept(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_axes(text)


def test_a_row_is_the_plan_of_its_values() -> None:
    report = meshwright.sweep("llama-3-8b", over={"gpus": [8, 16]}, **FEW, **ASKED)
    alone = meshwright.plan("llama-3-8b", gpus=16, robustness=False, **FEW, **ASKED)
    assert alone.predicted is not None
    assert report.rows[1]["step_time_s"] == alone.predicted.step_time_s
    assert report.rows[1]["gpus"] == 16


@pytest.mark.slow
def test_a_sweep_over_packs_has_the_tokens_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({str(n): 9 for n in range(32, 2048, 4)}), encoding="utf-8")
    asked = ASKED | {"seq_len": None, "lengths": path, "gpus": 8, "pin": "tp=2,pp=1,cp=1"}
    asked["without"] = WITHOUT
    over = "pack_size=2048:4096:x2,packing=sequential+first-fit"
    rows = meshwright.sweep("llama-3-8b", over=over, **asked).rows
    assert [row["seq_len"] for row in rows] == [2048, 2048, 4096, 4096]
    alone = meshwright.plan(
        "llama-3-8b", pack_size=4096, packing="first-fit", robustness=False, **asked
    )
    assert alone.lengths is not None
    assert rows[3]["step_time_s"] == alone.objective.step_time_s
    assert rows[3]["tokens_per_s"] == pytest.approx(alone.lengths.planned.tokens_per_s)
    assert rows[1]["tokens_per_s"] > rows[0]["tokens_per_s"]
    kept = meshwright.sweep("llama-3-8b", over="seq_len=4096", **asked).rows
    assert "does not go with --lengths" in kept[0]["message"]


@pytest.mark.slow
def test_more_hbm_or_network_is_never_slower() -> None:
    report = meshwright.sweep(
        "llama-3-8b", over="hbm_gib=60+120,nic_gbps=100+400", gpus=16, **FEW, **ASKED
    )
    steps = [row["step_time_s"] for row in report.rows]
    assert steps[0] >= steps[1]
    assert steps[2] >= steps[3]
    assert steps[0] >= steps[2]


def test_the_table_and_the_files(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = [
        *WORDS,
        "--pin",
        FEW["pin"],
        "--without",
        ",".join(WITHOUT),
        "--sweep",
        "gpus=8:16:x2,precision=bf16+int3",
    ]
    done = CliRunner().invoke(cli.main, [*words, "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["status"] for row in rows] == ["optimal", "failed", "optimal", "failed"]
    assert "int3" in rows[1]["message"]
    text = (out / "sweep.csv").read_text(encoding="utf-8")
    written = list(csv.DictReader(text.splitlines()))
    assert [row["gpus"] for row in written] == ["8", "8", "16", "16"]
    assert json.loads((out / "sweep.json").read_text(encoding="utf-8"))["rows"] == rows
    assert "tokens/s" in (out / "sweep.svg").read_text(encoding="utf-8")
    shown = CliRunner().invoke(cli.main, words).stdout
    assert "tokens/s a GPU" in shown


def test_plans_of_a_sweep_share_a_limit_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def swept(*_: object, **options: object) -> SweepReport:
        asked.append(options["time_limit_s"])
        row = {"gpus": 8, "status": "feasible", "step_time_s": 2.0, "lower_bound_s": 1.0}
        return SweepReport(axes={"gpus": (8,)}, rows=[row, {"gpus": 16, "status": "optimal"}])

    monkeypatch.setattr(meshwright, "sweep", swept)
    words = [*WORDS, "--sweep", "gpus=8+16,precision=bf16+fp8"]
    for more in ([], ["--time-limit", "7"], ["--method", "exhaustive"]):
        done = CliRunner().invoke(cli.main, [*words, *more])
        assert "1 not proven: the search ended first; --time-limit may be longer." in done.output
    assert asked == [240.0, 7.0, None]


def test_a_baseline_does_not_go_with_a_sweep(tmp_path: Path) -> None:
    words = [*WORDS, "--sweep", "gpus=8", "--baseline", str(tmp_path / "x.sh")]
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 2
    assert "--baseline" in done.stderr
