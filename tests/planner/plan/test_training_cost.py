"""Days, GPU hours, dollars and kWh of a training: by hand, and wherever plans are printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import meshwright
from meshwright.api import plan_batch, recommend
from meshwright.cli import main
from meshwright.cluster_specs.reader import read_cluster
from meshwright.errors import InputError
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest

PINS = "tp=1,pp=1,cp=1,dp=8,micro_batch=1,recompute=none"
ASKED: dict[str, Any] = {
    "cluster": "dgx-h100",
    "gpus": 8,
    "global_batch": 32,
    "seq_len": 1024,
    "pin": PINS,
}
H100_W = 700


def by_hand(tokens: float, tokens_per_s: float, gpus: int, price: float) -> dict[str, float]:
    seconds = tokens / tokens_per_s
    hours = gpus * seconds / 3600
    return {
        "days": seconds / 86400,
        "gpu_hours": hours,
        "dollars": hours * price,
        "kwh": hours * H100_W / 1000,
    }


def figures(row: Any) -> dict[str, float]:
    return {name: row[name] for name in ("days", "gpu_hours", "dollars", "kwh")}


def test_a_budget_by_hand() -> None:
    """1e9 tokens at 1e4 a second: 1e5 s, on 64 GPUs 1,777.8 hours of 0.7 kW."""
    cluster = read_cluster("dgx-h100")
    cost = Budget(tokens=1e9, days=1, gpu_hour_price=3).cost(1e4, 64, cluster)
    assert cost is not None
    assert cost.plan.days == pytest.approx(100_000 / 86_400)
    assert cost.plan.kwh == pytest.approx(64 * 100_000 / 3600 * 0.7)
    assert cost.in_time is False
    long = Budget(days=10).cost(1e4, 64, cluster)
    assert long is not None
    assert long.tokens == pytest.approx(10 * 86_400 * 1e4)
    assert long.plan.days == pytest.approx(10)
    assert (long.in_time, long.plan.dollars) == (None, None)
    priced = cluster.model_copy(update={"usd_per_gpu_hour": 5.0})
    own = Budget(tokens=1e9).cost(1e4, 64, priced)
    assert own is not None
    assert own.plan.dollars == pytest.approx(5 * own.plan.gpu_hours)
    assert Budget(gpu_hour_price=2).cost(1e4, 64, cluster) is None
    for wrong in ({"tokens": -1.0}, {"days": 0.0}, {"gpu_hour_price": float("nan")}):
        with pytest.raises(InputError):
            Budget(**wrong)


def test_plan_says_what_a_training_takes_without_a_baseline() -> None:
    plan = meshwright.plan(
        "gpt2-xl", **ASKED, robustness=False, tokens=3e11, days=5, gpu_hour_price=2.5
    )
    assert plan.cost is not None
    assert plan.predicted is not None
    tokens_per_s = 32 * 1024 / plan.predicted.step_time_s
    expected = by_hand(3e11, tokens_per_s, 8, 2.5)
    assert figures(plan.cost.plan.model_dump()) == pytest.approx(expected)
    assert plan.cost.in_time is (expected["days"] <= 5)
    request = PlanRequest.of_inputs(plan.inputs)
    assert list(faults(request, plan)) == []
    halved = plan.cost.plan.model_copy(update={"kwh": (plan.cost.plan.kwh or 0.0) / 2})
    edited = plan.model_copy(update={"cost": plan.cost.model_copy(update={"plan": halved})})
    assert [words.split()[0] for words in faults(request, edited)] == ["kwh"]


def test_a_price_alone_is_answered_with_what_is_missing() -> None:
    plan = meshwright.plan("gpt2-xl", **ASKED, robustness=False, gpu_hour_price=2.5)
    assert plan.cost is None
    assert any("--tokens or --days" in words for words in plan.warnings)


@pytest.mark.slow
def test_rows_of_a_batch_a_sweep_and_a_recommendation_say_the_same(tmp_path: Path) -> None:
    job = {"name": "a", "model": "gpt2-xl", **ASKED}
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump({"jobs": [job, {**job, "name": "b", "tokens": 1e10}]}))
    batch = plan_batch(
        file, tmp_path / "out", tokens=3e11, gpu_hour_price=2, workers=1, no_cache=True
    )
    first, second = batch.rows
    expected = by_hand(3e11, first["tokens_per_s"], 8, 2)
    assert figures(first) == pytest.approx(expected)
    assert second["days"] == pytest.approx(expected["days"] / 30)
    options = {name: value for name, value in ASKED.items() if name != "gpus"}
    report = meshwright.sweep("gpt2-xl", over="gpus=8", **options, tokens=3e11, gpu_hour_price=2)
    assert figures(report.rows[0]) == pytest.approx(expected)
    # Days are a target: half of what 8 GPUs take needs more of them.
    answer = recommend(
        "gpt2-xl",
        **{**ASKED, "pin": "tp=1,pp=1,cp=1,recompute=none", "gpus": 32},
        tokens=3e11,
        days=expected["days"] / 1.5,
        gpu_hour_price=2,
        no_cache=True,
    )
    best = answer.reached[0]
    assert best.gpus > 8
    assert best.row["days"] <= expected["days"] / 1.5
    assert best.row["dollars"] == pytest.approx(2 * best.row["gpu_hours"])
    with pytest.raises(InputError, match="--tokens"):
        recommend("gpt2-xl", **ASKED, days=3)


def test_a_fleet_says_what_each_job_takes(tmp_path: Path) -> None:
    job = {"model": "gpt2-xl", "global_batch": 32, "seq_len": 1024, "gpus": 8}
    job["pin"] = PINS
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump({"jobs": [{**job, "name": "a"}, {**job, "name": "b"}]}))
    words = ["fleet", str(file), "--cluster", "dgx-h100", "--gpus", "16", "--no-cache"]
    more = ["--tokens", "3e11", "--days", "1", "--gpu-hour-price", "2", "--workers", "1"]
    done = CliRunner().invoke(main, [*words, *more, "--objective", "deadlines", "--json"])
    assert done.exit_code == 0, done.stderr
    for row in json.loads(done.stdout)["jobs"]:
        assert figures(row) == pytest.approx(by_hand(3e11, row["tokens_per_s"], 8, 2))
        assert row["late_s"] > 0
    shown = CliRunner().invoke(main, [*words, *more])
    assert all(name in shown.stdout for name in ("days", "dollars", "kWh"))


def test_tokens_in_another_unit_are_doubted() -> None:
    """Fifteen tokens took 0.0 days."""
    with pytest.raises(InputError, match=r"15 T are 15e12, 15 B are 15e9, got 15"):
        Budget(tokens=15)
    assert Budget(tokens=1e4).tokens == 1e4
