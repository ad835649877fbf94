"""The least mean over scenarios, against enumeration, and what is claimed of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.calibration import MEMORY_FACTORS, NAMES, Factors
from meshwright.costmodel.estimate import estimate_layout
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.plan.best_plan import expectation
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.texts import group_placement
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.pricing import Outcome
from tests.planner.runs.calibration.own_runs import stack

SLOW_NETWORK, SLOW_NODES = Factors(network=0.05), Factors(scale_up=0.1)


def request(**options: object) -> PlanRequest:
    settings = {"global_batch": 32, "seq_len": 2048, "pin": "micro_batch=1,cp=1,vpp=1,zero_stage=1"}
    return read_request(model="llama-2-7b", cluster="dgx-a100", gpus=8, **settings | options)  # type: ignore[arg-type]


def few_choices() -> PlanRequest:
    """The same with the same plan, of a space that is enumerated in seconds."""
    return request(
        calibration=stack(Factors()),
        pin="micro_batch=1,cp=1,vpp=1,zero_stage=1,recompute=none",
        forbid="optimizer-offload,shard-groups",
    )


def searched(asked: PlanRequest, likely: object = None) -> Outcome:
    return search_executions(asked, CostModelPricing)


@pytest.mark.soak
def test_no_layout_has_a_mean_below_the_bound_and_the_choice_is_near_it() -> None:
    """Every layout of the space is enumerated, and priced in every scenario as it stands."""
    scenarios = [stack(SLOW_NETWORK), stack(SLOW_NODES), stack(Factors())]
    asked = few_choices()
    found = expectation(asked, searched(asked), searched, scenarios)
    everything = searched(replace(asked, method="exhaustive", top_k=200)).best
    assert 100 < len(everything) < 200, "none is left out"
    means = []
    for plan in everything:
        seconds = []
        for scenario in scenarios:
            work = replace(asked, calibration=scenario).workload(plan.execution)
            work = work.on(int(plan.layout.gpus))
            placed = group_placement(work, plan.layout, plan.stages, plan.matrix, None)
            priced = estimate_layout(work, plan.layout, placed, plan.stages)
            seconds.append(float(np.asarray(priced.step_time_s)))
        means.append(float(np.mean(seconds)))
    assert min(means) >= found.document.lower_bound_s * (1 - 1e-9)
    assert found.document.step_time_s <= means[0]
    assert found.document.lower_bound_s <= found.document.step_time_s
    assert found.document.gap < 0.2
    assert not found.document.same_as_nominal


@pytest.mark.slow
def test_one_scenario_is_the_plan_itself() -> None:
    asked = request(calibration=stack(Factors()))
    outcome = searched(asked)
    found = expectation(asked, outcome, searched, [stack(Factors())])
    assert found.document.same_as_nominal
    assert found.document.gap == pytest.approx(0.0, abs=1e-9)
    assert found.document.step_time_s == pytest.approx(outcome.best[0].step_time_s)


def test_what_is_chosen_says_how_it_differs() -> None:
    """A scenario whose winner is the nominal one with another bucket: both have the same degrees."""
    asked = request(calibration=stack(Factors()))
    outcome = searched(asked)
    winner = outcome.best[0]
    execution = replace(winner.execution, dp_overlap=True, bucket_mb=7.0)
    slower = replace(winner, execution=replace(winner.execution, dp_overlap=False))
    nominal = replace(outcome, best=(slower,))
    other = replace(outcome, best=(replace(winner, execution=execution),))
    scenario = stack(Factors())
    found = expectation(asked, nominal, lambda request, likely: other, [scenario])
    degrees, *further = found.document.chosen.split(", ")
    assert degrees.startswith(f"tp {winner.layout.tp} ")
    assert "bucket_mb 7.0" in further
    assert not found.document.same_as_nominal


@pytest.mark.slow
def test_a_plan_for_the_mean_is_verified_and_says_so() -> None:
    asked = request(calibration=stack(Factors()), objective="expected")
    plan = make_plan(asked, robustness=False, choices=False)
    assert plan.expected is not None
    assert plan.expected.scenarios == 8
    assert plan.expected.step_time_s <= plan.expected.nominal_step_time_s
    assert (plan.status == "optimal") == plan.expected.same_as_nominal
    assert plan.inputs.objective == "expected"


def test_samples_have_the_posterior_s_mean_and_leave_memory_alone() -> None:
    posterior = stack(Factors(state_memory=1.0))
    samples = posterior.scenarios(400, 3)
    assert samples == posterior.scenarios(400, 3)
    gemm = np.log([sample.factors.gemm for sample in samples])
    assert gemm.mean() == pytest.approx(0.0, abs=1e-12)
    assert gemm.std() == pytest.approx(0.1 * 0.1, rel=0.15)
    for name in MEMORY_FACTORS:
        values = {getattr(sample.factors, name) for sample in samples}
        assert len(values) == 1, name
    assert len(NAMES) == 21
