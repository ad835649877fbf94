"""The stack file: written, read back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright
from meshwright.costmodel.calibration import NAMES, Factors
from meshwright.costmodel.rates import step_time_band
from meshwright.errors import InputError
from meshwright.planner.audit import stated_figure_faults
from meshwright.planner.plan.make_plan import make_plan, repriced
from meshwright.planner.plan.texts import plan_text, read_plan
from meshwright.planner.plan.training_cost import Budget, with_cost
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import calibration_text, read_calibration, read_request
from tests.planner.runs.calibration.own_runs import stack

FACTORS = Factors(gemm=0.5, network=0.8, activation_memory=1.1)


def request(**options: Any) -> Any:
    return read_request(
        model="llama-2-7b", cluster="dgx-a100", gpus=8, global_batch=64, seq_len=2048, **options
    )


def written(path: Path, **changes: object) -> Path:
    """A stack file with some fields replaced; None takes one out."""
    document = yaml.safe_load(calibration_text(stack(FACTORS)))
    for key, value in changes.items():
        document[key] = value
    kept = {key: value for key, value in document.items() if value is not None}
    path.write_text(yaml.safe_dump(kept), encoding="utf-8")
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text(calibration_text(stack(FACTORS)), encoding="utf-8")
    assert read_calibration(path) == stack(FACTORS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "schema"),
        ({"schema": None}, "schema"),
        ({"constants": "0" * 64}, "other constants"),
        ({"framework": "nemmo"}, "framework"),
        ({"factors": {"gemm": -1.0}}, "factors.gemm"),
        ({"factors": {"gemm": float("nan")}}, "factors.gemm"),
        ({"factors": {"warp": 1.0}}, "warp"),
        ({"mean": [0.0]}, "mean"),
        ({"covariance": [[0.0] * 3 for _ in range(16)]}, "covariance"),
        ({"surprise": 1}, "surprise"),
        ({"step_time": {"low": 2.0, "high": 1.0, "rows": 1}}, "step_time"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        read_calibration(written(tmp_path / "stack.yaml", **changes))


def test_a_covariance_that_is_none_is_refused(tmp_path: Path) -> None:
    matrix = [[0.1 if i == j else 0.0 for j in range(len(NAMES))] for i in range(len(NAMES))]
    matrix[0][1] = matrix[1][0] = 0.5
    with pytest.raises(InputError, match="positive semidefinite"):
        read_calibration(written(tmp_path / "stack.yaml", covariance=matrix))


@pytest.mark.slow
def test_a_plan_is_priced_with_the_calibration_and_carries_it(tmp_path: Path) -> None:
    """Matrix products at half the rate: slower, proven again, and the same once read back."""
    few: dict[str, Any] = {"pin": "micro_batch=1,cp=1", "without": WITHOUT}
    plain = make_plan(request(**few), robustness=False)
    slow = make_plan(request(calibration=stack(FACTORS), **few), robustness=False)
    assert slow.status == "optimal"
    assert plain.predicted is not None
    assert slow.predicted is not None
    assert slow.predicted.step_time_s > 1.5 * plain.predicted.step_time_s
    assert slow.predicted.error_band.basis == "7 own runs of my-stack"
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(slow), encoding="utf-8")
    assert read_plan(path).inputs.calibration == stack(FACTORS)


@pytest.mark.slow
def test_exhaustive_search_agrees_under_a_calibration() -> None:
    pin = "micro_batch=1,pp=1,cp=1,zero_stage=1"
    options = {"calibration": stack(FACTORS), "pin": pin, "without": WITHOUT}
    options["forbid"] = "optimizer-offload"
    by_force = make_plan(request(method="exhaustive", **options), robustness=False)
    by_model = make_plan(request(**options), robustness=False)
    assert by_force.objective.step_time_s == pytest.approx(by_model.objective.step_time_s)


def test_a_finished_plan_is_priced_anew() -> None:
    plain = make_plan(request(pin="micro_batch=1,cp=1", without=WITHOUT), robustness=False)
    again = repriced(plain, stack(Factors()))
    assert again.predicted is not None
    assert again.predicted.step_time_s == pytest.approx(plain.objective.step_time_s)
    assert again.status == "feasible"
    assert again.objective.lower_bound_s is None
    assert repriced(plain, None) is plain


def test_all_that_a_calibration_moves_is_worked_out_again() -> None:
    """Marks, limits and memory are those of the new prices, as `verify` counts them."""
    plain = make_plan(request(pin="micro_batch=1,cp=1", without=WITHOUT), robustness=False)
    again = repriced(with_cost(plain, Budget(tokens=1e12)), stack(FACTORS))
    assert list(stated_figure_faults(again)) == []
    assert again.grades != plain.grades
    assert again.cost is not None
    assert again.predicted is not None
    seconds = again.predicted.step_time_s / again.inputs.tokens_per_step * 1e12
    assert again.cost.plan.days == pytest.approx(seconds / 86_400)


def test_the_band_of_another_device_stays_the_shipped_one() -> None:
    own = request(calibration=stack(FACTORS)).workload()
    assert step_time_band(own).rows == 7
    other = read_request(
        model="llama-2-7b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=2048,
        calibration=stack(FACTORS),
    )
    assert step_time_band(other.workload()).rows != 7


@pytest.mark.slow
def test_the_search_keeps_its_proof_under_terms_of_head_and_virtual_stages() -> None:
    """A millisecond of each micro-batch at each virtual stage, and a slow head: brute force agrees."""
    own = stack(Factors(head=1.8, virtual_stage_s=1e-3, exchange=0.7, grouped_gemm=0.8))
    asked: dict[str, Any] = {"cluster": "dgx-a100", "gpus": 8, "global_batch": 32, "seq_len": 2048}
    asked |= {"robustness": False, "pin": "pp=4,tp=2,recompute=none", "without": WITHOUT}
    asked["forbid"] = "optimizer-offload"
    proven = meshwright.plan("llama-2-7b", **asked, calibration=own)
    listed = meshwright.plan("llama-2-7b", **asked, calibration=own, method="exhaustive")
    assert proven.status == "optimal"
    assert proven.objective.step_time_s == pytest.approx(listed.objective.step_time_s, rel=1e-12)
    assert proven.layout is not None
    assert proven.predicted is not None
    waits_s = 1e-3 * proven.layout.vpp * proven.layout.num_micro_batches
    assert proven.predicted.breakdown_s["pipeline_p2p"] > waits_s > 0.01
