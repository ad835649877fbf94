"""Every figure of a search is that of `plan` for the request that it speaks of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.layout import Layout, Recompute
from meshwright.planner.analysis.neighbours import neighbours, single_choices
from meshwright.planner.many.batch import do_job
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.many.recommend import SizeRequest, misses_for_sure, plan_sizes
from meshwright.planner.many.sweep import sweep, what_if
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.report.plan_view import execution_view, first_screen
from meshwright.planner.report.plan_words import claim_words
from meshwright.planner.request.plan_request import PlanRequest, parse_pins
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_terms import layout_from_document
from meshwright.planner.search.loop import branches_of
from tests.one_search import differences, request_of
from tests.planner.report.test_views import text
from tests.soaked import examples, some

TENSOR: dict[str, Any] = {
    "model": "olmoe-1b-7b",
    "cluster": "dgx-h100",
    "global_batch": 8,
    "seq_len": 1024,
    "without": "deepep,hybridep,allgather,ep-overlap,cuda-graph",
}
"""With few tokens a GPU, launches of cut GEMMs cost more than the overlap hides."""


def without_overlap(gpus: int = 8) -> PlanRequest:
    """A request whose plan does without tensor-parallel overlap where tp is above 1."""
    return read_request(**TENSOR, gpus=gpus, pin="tp=2,pp=1")


@pytest.mark.soak
@pytest.mark.parametrize("seed", [5])
def test_what_a_choice_brings_is_what_plan_says_without_it(seed: int) -> None:
    plan, found = differences(request_of(seed))
    assert plan.choices
    assert found == []


@pytest.mark.soak
@pytest.mark.parametrize("start", some(range(0, 120, 10)))
def test_tables_of_choices_are_what_plan_says(start: int) -> None:
    """Ten of a case; four where not all cases run."""
    tables = [differences(request_of(seed)) for seed in range(start, start + max(4, examples(10)))]
    assert any(plan.choices for plan, _ in tables)
    assert [words for _, found in tables for words in found] == []


@pytest.mark.slow
def test_every_search_may_do_without_tensor_parallel_overlap() -> None:
    """Rows of a batch, of a sweep and of what-if took the overlap as on, and `plan` alone tried without."""
    asked = without_overlap()
    plan = fastest_plan(asked)
    with_it = fastest_plan(replace(asked, pins={**asked.pins, "tp_overlap": "on"}))
    assert plan.execution is not None
    assert not plan.execution.tp_overlap
    assert plan.objective.step_time_s is not None
    assert with_it.objective.step_time_s is not None
    assert plan.objective.step_time_s < with_it.objective.step_time_s
    job = JobDoc.model_validate({**TENSOR, "name": "a", "gpus": 8, "pin": "tp=2,pp=1"})
    row = do_job(job.model_dump(mode="json"), None)["row"]
    assert row["step_time_s"] == plan.objective.step_time_s
    assert row["status"] == plan.status
    options = {name: TENSOR[name] for name in ("global_batch", "seq_len", "without")}
    rows = sweep("olmoe-1b-7b", over="gpus=8", cluster="dgx-h100", pin="tp=2,pp=1", **options).rows
    assert rows[0]["step_time_s"] == plan.objective.step_time_s
    (same,) = what_if(plan, "gpus=8")["rows"]
    assert same["step_time_s"] == plan.objective.step_time_s


@pytest.mark.soak
def test_single_changes_are_plans() -> None:
    plan = fastest_plan(read_request(**{**TENSOR, "model": "gpt2-xl"}, gpus=4))
    choices = single_choices(plan, neighbours(plan))
    assert choices
    assert plan.objective.step_time_s is not None
    for choice in choices:
        name, value = choice.choice.split()
        pins = {**plan.inputs.pins, **parse_pins(f"{name}={value}")}
        own = fastest_plan(PlanRequest.of_inputs(plan.inputs, pins=pins), explained=False)
        assert choice.status == own.status
        if own.objective.step_time_s is None:
            assert choice.best_pct is None
        else:
            slower_pct = 100.0 * (own.objective.step_time_s / plan.objective.step_time_s - 1.0)
            assert choice.best_pct == slower_pct


@pytest.mark.slow
def test_the_recommended_size_is_the_fewest_by_plan() -> None:
    target_s = fastest_plan(without_overlap(4)).objective.step_time_s
    assert target_s is not None
    fields = {"global_batch": 8, "seq_len": 1024, "pin": "tp=2,pp=1", "without": TENSOR["without"]}
    answer = plan_sizes(
        SizeRequest(
            model=str(TENSOR["model"]),
            clusters=["dgx-h100"],
            plan=fields,
            most_gpus=16,
            step_time_s=target_s,
            workers=1,
        ),
        lambda _: None,
    )
    assert answer.reached[0].gpus == 4
    smaller = answer.smaller["dgx-h100"]
    assert smaller is not None
    assert misses_for_sure(smaller, answer.request.target_s)
    own = fastest_plan(without_overlap(smaller.gpus)).objective
    assert own.step_time_s == smaller.row["step_time_s"]
    assert own.step_time_s is None or own.step_time_s > target_s


def test_a_search_that_was_not_made_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the time limit cut off read 'no plan without it'."""
    monkeypatch.setattr("meshwright.planner.plan.robustness.is_over", lambda: True)
    asked = read_request(**{**TENSOR, "model": "gpt2-xl", "without": ""}, gpus=8)
    plan = make_plan(asked, robustness=False)
    assert plan.choices
    assert {choice.status for choice in plan.choices} == {"not searched"}
    assert not any(choice.proven for choice in plan.choices)
    table = text(*execution_view(plan), width=200)
    assert "not searched" in table
    assert "no plan" not in table
    assert "no plan without it" not in text(*first_screen(plan), width=200)


def test_words_of_a_search_say_how_it_ended() -> None:
    assert claim_words("optimal", 1.0, 1.0) == "optimal"
    assert claim_words("feasible", 1.0001, 1.0) == "within 0.01 % of the best"
    assert claim_words("feasible", 1.0, None) == "feasible"
    assert claim_words("infeasible", None, None) == "no plan exists"
    assert claim_words("unknown", None, 1.0) == "not searched"


@pytest.mark.slow
def test_no_bound_over_pipelines_leaves_out_a_faster_number_of_virtual_stages() -> None:
    """More virtual stages hide more data-parallel traffic: a bound of two of them was no bound of nineteen.

    So the search that began with the plan's own layout took 0.2666 s for the best without the overlap.
    """
    plan = fastest_plan(request_of(8))
    asked = replace(request_of(8), pins={"tp_overlap": "off"})
    assert plan.layout is not None
    likely = replace(layout_from_document(plan.layout), recompute_layers=0)
    begun, anew = best_plan(asked, begin_with=likely), best_plan(asked)
    assert begun.step_time_s == anew.step_time_s
    branch = branches_of(asked, pricing_of)[0]
    degrees = Layout(tp=1, pp=2, dp=2, micro_batch=2, num_micro_batches=2)
    variants = branch.space.variants(degrees.flat())
    rows, stages, bound_s = branch._pipeline_bounds_s(variants)
    for row, number, least_s in zip(rows.tolist(), stages.tolist(), bound_s, strict=True):
        layouts = branch.space.scheduled(variants.take(np.array([row])))
        layouts = layouts.take(np.asarray(layouts.vpp) == number)
        full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
        layouts = replace(layouts, recompute_layers=full.astype(np.int64))
        assert least_s <= branch.pricing.lower_bound_s(layouts).min() * (1 + 1e-9)
