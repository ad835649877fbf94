"""`meshwright calibrate`, and `--calibration` on the commands that price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import meshwright
from meshwright import cli
from meshwright.costmodel.calibration import Factors
from tests.planner.runs.calibration.own_runs import LAYOUTS, document, measured_runs

TRUTH = Factors(gemm=0.8, network=0.7)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args], prog_name="meshwright")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run file with four measured runs."""
    rows: list[dict[str, Any]] = []
    for settings, known in zip(LAYOUTS[::2], measured_runs(TRUTH, 8), strict=True):
        row = document(settings)
        assert known.measured is not None
        rows.append(row | {"measured": {"step_time_s": known.measured.step_time_s}})
    path = tmp_path / "runs.yaml"
    path.write_text(json.dumps({"runs": rows[:4]}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_calibrate_writes_a_stack_that_validate_and_estimate_take(
    runs: Path, tmp_path: Path
) -> None:
    stack = tmp_path / "stack.yaml"
    made = run("calibrate", runs, "-o", stack, "--name", "ours")
    assert made.exit_code == 0, made.output
    assert "your matrix products reach" in " ".join(made.stdout.split())
    assert "What to measure next" in made.stdout
    before = json.loads(run("validate", runs, "--json").stdout)["summary"]["mean_error_pct"]
    validated = run("validate", runs, "--calibration", stack, "--json")
    assert json.loads(validated.stdout)["summary"]["mean_error_pct"] < before / 4.0
    priced = json.loads(run("estimate", runs, "--calibration", stack, "--json").stdout)
    assert priced["runs"][0]["predicted"]["error_band"]["basis"] == "4 own runs of ours"


def test_a_stack_is_not_replaced_unasked(runs: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("mine\n", encoding="utf-8")
    assert run("calibrate", runs, "-o", stack).exit_code == 2
    assert stack.read_text(encoding="utf-8") == "mine\n"


def test_a_log_alone_is_not_enough(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("nothing\n", encoding="utf-8")
    result = run("calibrate", log, "-o", tmp_path / "stack.yaml")
    assert result.exit_code == 2
    assert "no run file" in result.output


@pytest.mark.soak
def test_a_log_of_nccl_tests_moves_the_network_and_all_is_one_document(
    runs: Path, tmp_path: Path
) -> None:
    """An all-reduce over four nodes at half of what is usual."""
    names = "\n".join(
        f"#  Rank {rank:2d} Group  0 Pid   1 on  node{rank // 8} device  {rank % 8} [0x07] NVIDIA A100"
        for rank in range(32)
    )
    row = "  8589934592    2147483648     float     sum      -1   80000.0  107.37   12.00      0"
    log = tmp_path / "all_reduce.log"
    log.write_text(
        f"# Collective test starting: all_reduce_perf\n{names}\n{row}\n", encoding="utf-8"
    )
    stack = tmp_path / "stack.yaml"
    made = run("calibrate", runs, log, "-o", stack, "--json")
    assert made.exit_code == 0, made.output
    assert yaml.safe_load(stack.read_text(encoding="utf-8"))["factors"]["network"] < 0.7
    printed = json.loads(made.stdout)
    assert printed["schema"] == 1
    assert printed["stack"]["device"] == "a100-sxm-80gb"
    assert (
        printed["errors"]["step_time"]["left_out_pct"]
        < printed["errors"]["step_time"]["before_pct"]
    )
    assert len(printed["rows"]) == 4
    assert printed["measure_next"][0]["layout"]["tp"] >= 1


@pytest.mark.soak
def test_the_api_takes_the_same(runs: Path) -> None:
    rows = json.loads(runs.read_text(encoding="utf-8"))["runs"]
    runs.write_text(json.dumps({"runs": rows[:2]}), encoding="utf-8")
    learned = meshwright.calibrate(runs, like="megatron-lm")
    assert learned is not None
    assert learned.calibration.framework == "megatron-lm"
    (first, *_) = meshwright.estimate(runs, calibration=learned.calibration)
    assert first.predicted.step_time_s > 0
