"""What becomes of a pipeline through parts where the cost model is off, against plans made from scratch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.costmodel.rates import peak_memory_band, step_time_band
from meshwright.planner.mixed.document import MixedPlan, MixedRequest
from meshwright.planner.mixed.service import _faster_on_parts, make_mixed_plan
from meshwright.planner.mixed.verify import mixed_faults
from meshwright.planner.plan.document import ExecutionChoice
from meshwright.planner.plan.robustness import changes
from meshwright.planner.report.mixed_view import mixed_view
from meshwright.planner.report.view import view_text
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.mixed.test_mixed_optimum import tight


def on_parts(asked: MixedRequest, parts: tuple[PlanRequest, ...]) -> MixedRequest:
    """The same question on other parts."""
    stated = tuple(
        part.model_copy(update={"cluster": own.cluster})
        for part, own in zip(asked.cluster.parts, parts, strict=True)
    )
    cluster = asked.cluster.model_copy(update={"parts": stated})
    return replace(asked, parts=parts, cluster=cluster)


@pytest.fixture(scope="module")
def asked() -> MixedRequest:
    return tight(11.0)


@pytest.fixture(scope="module")
def plan(asked: MixedRequest) -> MixedPlan:
    return make_mixed_plan(asked, robustness=True).document


@pytest.mark.soak
def test_each_change_is_answered_by_the_plan_that_is_best_then(
    asked: MixedRequest, plan: MixedPlan
) -> None:
    """The same thing is off on all parts; what is proven is what a search on the changed parts finds."""
    assert plan.robustness is not None
    bands = [step_time_band(part.workload()) for part in asked.parts]
    memory = [peak_memory_band(part.workload()) for part in asked.parts]
    widest, most = (
        replace(each[0], low=min(band.low for band in each), high=max(band.high for band in each))
        for each in (bands, memory)
    )
    assert plan.robustness.step_time_band == (widest.low, widest.high)
    by_words = {scenario.change: scenario for scenario in plan.robustness.scenarios}
    first, second = (
        {change.words: change for change in changes(part, widest, most)} for part in asked.parts
    )
    assert set(by_words) == set(first) | set(second)
    for words in set(first) & set(second):
        parts = (first[words].applied(asked.parts[0]), second[words].applied(asked.parts[1]))
        best = make_mixed_plan(on_parts(asked, parts)).document.objective
        scenario = by_words[words]
        assert scenario.proven == (scenario.status in ("optimal", "infeasible"))
        if best.step_time_s is None:
            assert scenario.step_time_s is None
            assert scenario.best_step_time_s is None
            continue
        assert scenario.best_step_time_s is not None
        assert scenario.best_step_time_s >= best.step_time_s * (1 - 1e-3)
        if scenario.proven:
            assert scenario.best_step_time_s == pytest.approx(best.step_time_s, rel=1e-3)
        if scenario.step_time_s is not None and scenario.loss_at_most is not None:
            lost = scenario.step_time_s / best.step_time_s - 1
            assert lost <= scenario.loss_at_most + 1e-9
        assert (scenario.winner is not None) == (
            scenario.step_time_s is None
            or scenario.best_step_time_s < scenario.step_time_s * (1 - 1e-3)
        )


def test_slower_parts_make_no_step_shorter(plan: MixedPlan) -> None:
    assert plan.robustness is not None
    assert plan.objective.step_time_s is not None
    for scenario in plan.robustness.scenarios:
        if scenario.change.endswith("slower") and scenario.step_time_s is not None:
            assert scenario.step_time_s >= plan.objective.step_time_s


def test_it_is_verified_and_printed(plan: MixedPlan) -> None:
    assert list(mixed_faults(plan)) == []
    assert "If the prediction is off" in view_text(mixed_view(plan))
    without = plan.model_copy(update={"robustness": None})
    assert "robustness" not in without.model_dump()


@pytest.mark.parametrize(("share", "is_told"), [(0.9, True), (0.9999, False), (1.1, False)])
def test_a_faster_plan_without_a_choice_is_not_kept_quiet(
    plan: MixedPlan, share: float, *, is_told: bool
) -> None:
    assert plan.objective.step_time_s is not None
    choice = ExecutionChoice(
        choice="tp_overlap",
        value=True,
        step_time_s_without=share * plan.objective.step_time_s,
        pin="tp_overlap=off",
        proven=False,
    )
    told = list(_faster_on_parts(plan, [choice]))
    assert [words.split(": ")[1].split(";")[0] for words in told] == (
        ["of pipelines through parts its seconds alone are kept"] if is_told else []
    )
    assert all("--pin tp_overlap=off" in words for words in told)
