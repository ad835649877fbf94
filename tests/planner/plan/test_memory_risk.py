"""Plans that fit although memory is predicted too low, and what that costs them."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest
from click.testing import CliRunner

import meshwright
from meshwright.cli import main
from meshwright.cluster_specs.reader import load_cluster
from meshwright.costmodel.footprint import hbm_gib_for, usable_hbm_gib
from meshwright.costmodel.records import fit_probability, memory_band, memory_margin
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.many.batch import request_of
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.report.plan_view import memory_risk_view
from meshwright.planner.request.plan_request import PlanRequest

SMALL = [
    "llama-3-8b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "8",
    "--global-batch",
    "64",
    "--seq-len",
    "8192",
]
PINNED = {"pp": 1, "cp": 1, "vpp": 1, "micro_batch": 2, "zero_stage": 1}


def request(**changes: object) -> PlanRequest:
    asked = PlanRequest(
        model=load_catalog_model("llama-3-8b"),
        cluster=load_cluster("dgx-h100"),
        gpus=8,
        global_batch=64,
        seq_len=8192,
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_the_margin_is_the_measured_quantile() -> None:
    assert memory_margin(0.5) == 1.0
    assert memory_margin(0.05) == pytest.approx(memory_band().high)
    risks = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.5)
    margins = [memory_margin(risk) for risk in risks]
    assert margins == sorted(margins, reverse=True)
    for risk, margin in zip(risks[:-1], margins, strict=False):
        assert 1.0 - fit_probability(70.0, 70.0 * margin) == pytest.approx(risk)


def test_a_margin_by_hand() -> None:
    """The band's ends are the quantiles at 5 and 95 %: a tenth lies 1.2816 spreads above the middle."""
    band = memory_band()
    middle = (band.low * band.high) ** 0.5
    spread = (band.high / middle) ** (1 / NormalDist().inv_cdf(0.95))
    assert memory_margin(0.1) == pytest.approx(middle * spread**1.2815515655)


def test_capacity_is_divided_by_the_margin() -> None:
    as_predicted, safe = (request(memory_risk=risk).workload() for risk in (0.5, 0.05))
    assert usable_hbm_gib(safe) == pytest.approx(usable_hbm_gib(as_predicted) / memory_band().high)
    hbm_gib = safe.cluster.device.hbm_gib
    assert hbm_gib_for(safe, usable_hbm_gib(safe)) == pytest.approx(hbm_gib)
    assert request().memory_risk == 0.05


def test_plans_keep_to_the_risk() -> None:
    asked = request(pins={**PINNED, "tp": 2})
    as_predicted = fastest_plan(replace(asked, memory_risk=0.5))
    safe = fastest_plan(asked)
    for answer, risk in ((safe, 0.05), (as_predicted, 0.5)):
        assert answer.predicted is not None
        assert answer.memory_risk is not None
        assert answer.memory_risk.asked == answer.inputs.memory_risk == risk
        peak_gib = max(answer.predicted.memory_gib)
        assert peak_gib * memory_margin(risk) <= answer.memory_risk.room_gib
    assert safe.memory_risk is not None
    assert safe.memory_risk.remains <= 0.05
    assert safe.objective.step_time_s is not None
    assert as_predicted.objective.step_time_s is not None
    assert safe.objective.step_time_s > as_predicted.objective.step_time_s


@pytest.mark.soak
def test_what_safety_costs_is_printed() -> None:
    asked = request(pins={**PINNED, "tp": 2})
    safe, as_predicted = (
        make_plan(replace(asked, memory_risk=risk), robustness=True, choices=False)
        for risk in (0.05, 0.5)
    )
    assert safe.memory_risk is not None
    assert safe.memory_risk.step_time_s_without == as_predicted.objective.step_time_s
    assert safe.memory_risk.cost == pytest.approx(0.066, abs=0.03)
    assert as_predicted.memory_risk is not None
    assert as_predicted.memory_risk.cost == 0
    words = " ".join(str(block) for block in memory_risk_view(safe))
    assert "of measured errors would not fit" in words
    assert "the safety costs" in words


@pytest.mark.slow
def test_where_only_the_margin_is_missing_the_answer_says_so() -> None:
    asked = request(seq_len=4096, pins={**PINNED, "tp": 1, "optimizer_offload": 0})
    assert fastest_plan(replace(asked, memory_risk=0.5)).layout is not None
    safe = fastest_plan(asked)
    assert safe.infeasible is not None
    words = "take a memory risk of 0.5 (the prediction as it stands), not 0.05"
    assert words in safe.infeasible.smallest_changes


@pytest.mark.parametrize("value", ["0", "0.6", "-1", "nan"])
def test_other_risks_are_refused(value: str) -> None:
    result = CliRunner().invoke(main, ["plan", *SMALL, "--memory-risk", value])
    assert result.exit_code == 2
    assert "--memory-risk" in result.stderr


def test_jobs_have_a_risk_of_their_own() -> None:
    fields = {"name": "a", "model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    fields |= {"global_batch": 64, "seq_len": 8192}
    assert request_of(JobDoc.model_validate(fields)).memory_risk == 0.05
    assert request_of(JobDoc.model_validate(fields | {"memory_risk": 0.2})).memory_risk == 0.2


def test_published_runs_are_judged_as_predicted() -> None:
    """Room for the error of the prediction is a wish of plans, not a rule of runs."""
    settings = {"seq_len": 8192, "global_batch": 64, "micro_batch": 1, "tp": 8}
    run = {
        "model": "llama-3-8b",
        "cluster": {"device": "h100-sxm-80gb", "gpus": 8},
        "run": settings,
    }
    (priced,) = meshwright.estimate(run)
    assert priced.run.workload.memory_margin == 1.0
