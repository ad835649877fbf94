"""How much of a plan's gain over the nearest measured run was measured."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from benchmarks.optimum_bands import recipes_text
from benchmarks.recipes import MEASURED, every_run
from meshwright.costmodel.records import choices_in_pairs
from meshwright.costmodel.workload import Execution
from meshwright.model_specs.parameters import parameter_count
from meshwright.planner.analysis.waterfall import setup_of_plan
from meshwright.planner.plan import measured_share
from meshwright.planner.plan.document import GainEvidence, NearestRun, Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.measured_share import (
    MeasuredRecipe,
    distance,
    evidence_of,
    is_same_work,
    measured_recipes,
    nearest_recipes,
)
from meshwright.planner.plan.texts import plan_document, workload_of_plan
from meshwright.planner.report.plan_view import evidence_text
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_file import Run
from meshwright.planner.runs.run_terms import layout_from_document
from tests.priced_plans import priced_plan

EXPERTS: dict[str, Any] = {
    "model": "olmoe-1b-7b",
    "cluster": "dgx-h100",
    "dp": 16,
    "ep": 8,
    "num_micro_batches": 4,
}
"""64 sequences of 4,096 tokens on 16 GPUs."""


def run_of(plan: Plan, **changes: Any) -> MeasuredRecipe:
    """A measured run of a plan's work with its very choices, but for some changes."""
    assert plan.layout is not None
    work = workload_of_plan(plan)
    first = nearest_recipes(work, layout_from_document(plan.layout))[0]
    same: dict[str, Any] = {
        "layers": work.model.layers,
        "parameters": parameter_count(work.model),
        "device": work.cluster.device.name,
        "gpus": work.gpus,
        "global_batch": work.global_batch,
        "seq_len": work.seq_len,
        "precision": work.precision,
        "layout": {"dp": plan.layout.dp, "ep": plan.layout.ep},
        "execution": {},
    }
    return replace(first, **(same | changes))


def run_otherwise(plan: Plan, **settings: Any) -> Plan:
    """A plan's layout under other execution settings, priced."""
    assert plan.predicted is not None
    changed = plan.model_copy(update={"execution": replace(Execution(), **settings)})
    step_s = setup_of_plan(changed).step_time_s
    predicted = plan.predicted.model_copy(update={"step_time_s": step_s})
    return changed.model_copy(update={"predicted": predicted})


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return list(every_run())


@pytest.mark.soak
def test_the_runs_are_those_of_the_repository(runs: list[Run]) -> None:
    """`python -m benchmarks.recipes --measured` writes them again."""
    assert MEASURED.read_text(encoding="utf-8") == recipes_text(runs)
    assert len(measured_recipes()) > 300


@pytest.mark.slow
def test_no_recipe_stands_twice_and_each_is_the_fastest_of_its_work(runs: list[Run]) -> None:
    works = [
        (
            each.layers,
            each.parameters,
            each.device,
            each.gpus,
            each.global_batch,
            each.seq_len,
            each.precision,
        )
        for each in measured_recipes()
    ]
    assert len(set(works)) == len(works)
    steps = {
        run.id: run.measured.step_time_s
        for run in runs
        if run.suspect is None and run.measured is not None
    }
    assert all(steps[each.id] == each.step_time_s for each in measured_recipes())


def test_distance_counts_settings_and_doublings() -> None:
    """Another recomputation is 2 settings; half the parameters, 4 x the GPUs and 2 x the tokens 2.5."""
    plan = priced_plan(**EXPERTS)
    assert plan.layout is not None
    work, layout = workload_of_plan(plan), layout_from_document(plan.layout)
    settings = ("moe_dispatch alltoall", "precision bf16", "recompute none")
    near = run_of(plan, settings=settings, framework="megatron")
    assert distance(near, work, layout) == 0
    recomputed = tuple(word.replace("none", "full") for word in settings)
    assert distance(replace(near, settings=recomputed), work, layout) == 2
    far = replace(
        near,
        parameters=near.parameters // 2,
        gpus=4 * near.gpus,
        seq_len=near.seq_len * 2,
        device="h200-sxm-141gb",
        framework="torchtitan",
    )
    # Another device of the class, another framework and another model besides.
    assert distance(far, work, layout) == pytest.approx(1 + 1 + 0.5 + 3)
    assert is_same_work(near, work)
    assert not is_same_work(far, work)


def test_the_fastest_of_the_same_work_goes_before_what_is_nearer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = priced_plan(**EXPERTS)
    assert plan.layout is not None
    near = run_of(plan, settings=("ep",), id="slow", step_time_s=3.0)
    fast = replace(near, settings=("tp", "pp", "cp"), id="fast", step_time_s=2.0)
    other = replace(near, global_batch=near.global_batch * 2, id="other", step_time_s=1.0)
    monkeypatch.setattr(measured_share, "measured_recipes", lambda: (other, near, fast))
    found = nearest_recipes(workload_of_plan(plan), layout_from_document(plan.layout))
    assert [each.id for each in found] == ["fast", "slow", "other"]


def evidence(plan: Plan, monkeypatch: pytest.MonkeyPatch, *recipes: MeasuredRecipe) -> GainEvidence:
    monkeypatch.setattr(measured_share, "nearest_recipes", lambda *_: list(recipes))
    found = evidence_of(plan)
    assert found is not None
    return found


def test_what_pairs_show_counts_as_far_as_it_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """EP overlap on H100 was measured at 0.7968 of the step without (tests/costmodel/test_measured.py)."""
    plan = run_otherwise(priced_plan(**EXPERTS), ep_overlap=True)
    assert plan.predicted is not None
    step_s = plan.predicted.step_time_s
    run = run_of(plan, step_time_s=2.0 * step_s)
    found = evidence(plan, monkeypatch, run)
    assert found.basis == "measured"
    assert found.gain == pytest.approx(0.5)
    (knob,) = found.knobs
    assert (knob.choice, knob.value, knob.value_of_run, knob.pairs) == (
        "ep_overlap",
        True,
        False,
        3,
    )
    without = priced_plan(**EXPERTS)
    assert without.predicted is not None
    assert knob.predicted_gain == pytest.approx(1 - step_s / without.predicted.step_time_s)
    assert knob.measured_gain == pytest.approx(1 - 0.7968, abs=1e-4)
    lesser = min(math.log(without.predicted.step_time_s / step_s), -math.log(0.7968))
    assert found.measured_share == pytest.approx(lesser / math.log(2.0), abs=1e-4)


def test_a_choice_that_cost_time_where_it_was_measured_bears_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = priced_plan(**EXPERTS)
    assert plan.predicted is not None
    run = run_of(plan, step_time_s=2.0 * plan.predicted.step_time_s, execution={"ep_overlap": True})
    found = evidence(plan, monkeypatch, run)
    # The plan leaves out what saved 20 % in measurements: that speaks against it.
    (knob,) = found.knobs
    assert knob.measured_gain == pytest.approx(1 - 1 / 0.7968, abs=1e-4)
    assert found.measured_share == 0.0


def test_a_plan_that_promises_no_gain_needs_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = priced_plan(**EXPERTS)
    assert plan.predicted is not None
    run = run_of(plan, step_time_s=plan.predicted.step_time_s / 1.25)
    found = evidence(plan, monkeypatch, run)
    assert found.gain == pytest.approx(-0.25)
    assert found.measured_share == 1.0


def test_another_work_is_held_against_the_runs_choices_priced_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run on half the GPUs has the plan's choices: priced on the plan's work, both take the same."""
    plan = priced_plan(**EXPERTS)
    assert plan.predicted is not None
    small = run_of(plan, gpus=8, layout={"dp": 8, "ep": 8, "zero_stage": 1}, step_time_s=99.0)
    # 16 GPUs are no multiple of 32: such a run is passed over.
    large = replace(small, gpus=64, layout={"tp": 8, "pp": 4, "dp": 2, "ep": 8}, id="large")
    found = evidence(plan, monkeypatch, large, small)
    assert found.basis == "priced"
    assert found.nearest_run is not None
    assert (found.nearest_run.id, found.nearest_run.same_work) == (small.id, False)
    assert found.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert found.gain == pytest.approx(0.0, abs=1e-9)
    alone = evidence(plan, monkeypatch, large)
    assert alone.nearest_run is not None
    assert (alone.basis, alone.gain, alone.measured_share) == (None, None, None)


def test_plans_without_a_layout_have_none() -> None:
    plan = priced_plan(**EXPERTS)
    assert evidence_of(plan.model_copy(update={"layout": None})) is None


def test_every_choice_in_pairs_is_a_setting_of_a_plan() -> None:
    settings = {each.name for each in fields(Execution)}
    assert {"cuda_graph", "ep_overlap", "moe_dispatch"} <= set(choices_in_pairs()) <= settings


@pytest.mark.parametrize(
    ("gain", "share", "basis", "words"),
    [
        (0.31, 12 / 31, "measured", "31.0 % below the fastest step measured of this work, 12.3 s (near): "
         "12.0 % measured elsewhere, 19.0 % the model's word"),
        (-0.0, 1.0, "priced", "as long as the choices of the nearest measured run, near"),
        (-0.02, 1.0, "measured", "2.0 % above the fastest step measured of this work, 12.3 s (near)"),
        (0.1, 0.0, "priced", "10.0 % below the choices of the nearest measured run, near: 0.0 % measured "
         "elsewhere, 10.0 % the model's word"),
        (None, None, None, "no measured run's choices fit here (nearest: near): all is the model's word"),
    ],
)  # fmt: skip
def test_the_sentence_of_the_first_screen(
    gain: float | None, share: float | None, basis: Any, words: str
) -> None:
    run = NearestRun(
        id="near", source="s", model="m", device="d", gpus=8, global_batch=8, seq_len=8, precision="bf16",
        framework="megatron", settings=[], step_time_s=12.3, same_work=basis == "measured",
    )  # fmt: skip
    base_s = None if gain is None else 12.3
    found = GainEvidence(
        nearest_run=run, basis=basis, step_time_s=base_s, gain=gain, measured_share=share
    )
    assert evidence_text(found).replace("12.300 s", "12.3 s").replace("12.30 s", "12.3 s") == words


@pytest.mark.slow
def test_a_plan_says_what_it_rests_on() -> None:
    """The Llama 3 8B recipe of DGX Cloud ran in 12.27 s (tests/data/published_runs.yaml)."""
    request = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=128,
        seq_len=8192,
        pin="cp=2,tp=2",
    )
    document = plan_document(fastest_plan(request))
    found = document["evidence"]
    assert found["nearest_run"]["id"] == "dgxc-v25.04-h100-llama3_8b-bf16-8g"
    assert found["nearest_run"]["source"] == "NVIDIA DGX Cloud Benchmarking recipes"
    assert found["step_time_s"] == 12.27
    assert found["gain"] == pytest.approx(1 - document["objective"]["step_time_s"] / 12.27)
    assert 0 <= found["measured_share"] <= 1
