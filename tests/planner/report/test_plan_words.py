"""How good a plan is and what lies on the hosts, said where it is read first."""

from __future__ import annotations

import pytest

from meshwright.planner.report.many_view import row_layout_text
from meshwright.planner.report.plan_page import plan_page
from meshwright.planner.report.plan_view import first_screen, plan_view
from meshwright.planner.report.plan_words import host_words, status_words
from meshwright.planner.report.prediction_view import recompute_text
from tests.planner.report.test_views import text
from tests.priced_plans import priced_plan


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.00008, "within 0.01 % of the best"),
        (0.0001, "within 0.01 % of the best"),
        (0.000101, "within 0.02 % of the best"),
        (0.00099, "within 0.10 % of the best"),
        (0.001, "feasible"),
        (0.14, "feasible"),
        (None, "feasible"),
    ],
)
def test_a_small_gap_is_an_answer(gap: float | None, words: str) -> None:
    assert status_words("feasible", gap) == words
    for other in ("optimal", "infeasible", "unknown"):
        assert status_words(other, gap) == other


def test_the_first_screen_and_the_page_say_the_gap() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    for gap, words in ((0.00004, "within 0.01 % of the best"), (0.145, "more than 14.50 %")):
        objective = plan.objective.model_copy(update={"gap": gap})
        near = plan.model_copy(update={"status": "feasible", "objective": objective})
        assert words in text(*first_screen(near), width=200)
        assert near.status == "feasible"
    near = plan.model_copy(
        update={
            "status": "feasible",
            "objective": plan.objective.model_copy(update={"gap": 0.00004}),
        }
    )
    assert "Within 0.01 % of the best" in plan_page(near)


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (60, "in 9 of 10 comparable jobs (60 measured) the fastest measured step was so near"),
        (2, "so near its plan; only 2 comparable jobs were measured"),
        (1, "so near its plan; only 1 comparable job was measured"),
    ],
)
def test_the_band_of_a_plan_says_how_many_jobs_like_it_were_measured(jobs: int, words: str) -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    assert plan.predicted is not None
    band = plan.predicted.error_band.model_copy(update={"rows": jobs})
    update = {"error_band": band, "band_of": "optima"}
    told = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})
    assert words in text(*first_screen(told), width=300)


def test_the_band_of_own_runs_is_theirs_on_the_screen_in_full_and_on_the_page() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, sequence_parallel=True)
    assert plan.predicted is not None
    band = plan.predicted.error_band.model_copy(
        update={"rows": 24, "basis": "24 own runs of my-stack"}
    )
    update = {"error_band": band, "band_of": "own runs"}
    own = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})
    for words in (text(*first_screen(own), width=300), text(*plan_view(own), width=300)):
        assert ", by 24 own runs of my-stack" in words
    assert "Likely is by 24 own runs of my-stack." in plan_page(own)


@pytest.mark.slow
def test_what_lies_on_the_hosts_stands_on_the_first_screen_in_rows_and_on_the_page() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, optimizer_offload=50, zero_stage=1)
    assert plan.predicted is not None
    held_gib = plan.predicted.host_memory_gib
    assert held_gib is not None
    words = f"{held_gib:,.0f} GiB of every host: 50 % of the optimizer"
    assert words in text(*first_screen(plan), width=200)
    row = {"tp": 2, "dp": 4, "optimizer_offload": 50, "host_memory_gib": held_gib}
    assert row_layout_text(row) == f"tp2 dp4; {words}"
    assert "GiB of every host" in plan_page(plan)
    assert host_words(0, None) == ""
    other = {"kind": "dpo", "reference": "offloaded", "optimizer": "paged-adam"}
    both = plan.model_copy(update={"inputs": plan.inputs.model_copy(update=other)})
    assert f"{words}, moments, reference" in text(*first_screen(both), width=200)


def test_a_reference_model_on_the_hosts_is_no_activation() -> None:
    """Its 16-bit weights were called activations; rows, which do not say what lies there, said so too."""
    plan = priced_plan("llama-3-8b", tp=1, dp=8, zero_stage=3)
    inputs = plan.inputs.model_copy(update={"kind": "dpo", "reference": "offloaded"})
    assert plan.predicted is not None
    predicted = plan.predicted.model_copy(update={"host_memory_gib": 15.2})
    shown = plan.model_copy(update={"inputs": inputs, "predicted": predicted})
    words = "15 GiB of every host: reference"
    assert words in text(*first_screen(shown), width=200)
    assert row_layout_text({"tp": 1, "host_memory_gib": 15.2}).endswith("15 GiB of every host")


def test_recomputation_is_said_with_and_without_the_stages() -> None:
    plan = priced_plan(tp=2, dp=4, num_micro_batches=16, recompute="full", recompute_layers=2)
    assert plan.layout is not None
    two = plan.layout.model_copy(update={"stages": [[2]], "recompute_layers": 2})
    assert recompute_text(two) == "full, every layer"
    assert recompute_text(two.model_copy(update={"stages": [[3]]})).startswith("full, 2 layers")
    assert recompute_text(two.model_copy(update={"stages": []})).startswith("full, 2 layers")
