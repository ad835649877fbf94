"""Offloading the optimizer as a choice: what it costs, what it saves, and that the best share is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.estimate import estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.footprint import GIB, offloaded_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import read_model
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.space import space_of

SHARES = (0, 25, 50, 75, 100)


def request(**changes: Any) -> PlanRequest:
    """Llama-3 8B on two H100, whose HBM its states alone would fill twice."""
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 2,
        "global_batch": 512,
        "seq_len": 8192,
    }
    return read_request(**options | changes)


def least_s(asked: PlanRequest) -> float | None:
    outcome = search_executions(asked, pricing_of)
    return outcome.best[0].step_time_s if outcome.best else None


def optimizer_s(workload: Workload, layout: Layout) -> float:
    placement = nested_placement(workload.cluster, layout)
    stages = ((workload.model.layers,),)
    estimate = estimate_layout(workload, layout, placement, stages)
    return float(np.asarray(estimate.breakdown_s["optimizer"]))


def test_what_a_run_of_qwen3_0_6b_measured() -> None:
    """0.752 s a step on one H100, 1.678 with all of the optimizer offloaded (NVIDIA-NeMo/RL, pull request
    3628).
    """
    sizes = {"layers": 28, "hidden": 1024, "ffn_hidden": 3072, "heads": 16, "kv_heads": 8}
    small = read_model("qwen3-8b").model_copy(update=sizes | {"tied_embeddings": True})
    workload = request(model=small, gpus=1, global_batch=8, seq_len=1024).workload()
    layout = Layout(zero_stage=1, num_micro_batches=8)
    more_s = optimizer_s(workload, replace(layout, optimizer_offload=100))
    more_s -= optimizer_s(workload, layout)
    assert more_s == pytest.approx(1.678 - 0.752, rel=0.03)


def test_what_a_run_of_qwen3_30b_measured() -> None:
    """996 ms a step on 16 H100 with tp 2, pp 2 and ep 4; 3,877 ms with all of the optimizer offloaded
    (Megatron-Bridge, skills/perf-techniques/cpu-offloading/card.yaml).
    """
    workload = request(model="qwen3-30b-a3b", gpus=16, global_batch=8, seq_len=4096).workload()
    layout = Layout(tp=2, pp=2, dp=4, ep=4, zero_stage=1, num_micro_batches=2)
    stages, placement = ((24,), (24,)), nested_placement(workload.cluster, layout)
    steps_s = [
        float(
            np.asarray(
                estimate_layout(
                    workload, replace(layout, optimizer_offload=share), placement, stages
                ).breakdown_s["optimizer"]
            )
        )
        for share in (0, 100)
    ]
    assert steps_s[1] - steps_s[0] == pytest.approx(3.877 - 0.996, rel=0.03)


def test_memory_that_moves_to_the_host() -> None:
    """12 bytes of a parameter leave the GPU, and its host keeps 16: the gradient too."""
    workload, layout = request().workload(), Layout(tp=2, zero_stage=1, num_micro_batches=512)
    stages = ((workload.model.layers,),)
    parts = [
        stage_memory_parts_gib(workload, replace(layout, optimizer_offload=share), stages)
        for share in SHARES
    ]
    whole_gib = parts[0]["optimizer"][0]
    for share, with_share in zip(SHARES, parts, strict=True):
        assert with_share["optimizer"][0] == pytest.approx(whole_gib * (1 - share / 100))
        assert with_share["weights"][0] == parts[0]["weights"][0]
        host_gib = offloaded_gib(workload, replace(layout, optimizer_offload=share), stages)[0]
        assert host_gib == pytest.approx(whole_gib * share / 100 * 16 / 12)
    assert whole_gib == pytest.approx(12 * 8.03e9 / 2 / GIB, rel=1e-3)


@pytest.mark.soak
def test_the_best_share_is_the_best_of_all_pinned_ones() -> None:
    """In the room that is left a quarter of the optimizer has to leave, and more would cost more."""
    asked: dict[str, Any] = {"gpus": 4, "global_batch": 64, "reserve_gib": 30.0}
    few = {"pp": 1, "cp": 1}
    best_s = least_s(request(**asked, pin=few))
    pinned_s = {
        share: least_s(request(**asked, pin={**few, "optimizer_offload": share}))
        for share in SHARES
    }
    known_s = {share: seconds for share, seconds in pinned_s.items() if seconds is not None}
    assert best_s == pytest.approx(min(known_s.values()), rel=1e-12)
    assert min(known_s, key=known_s.__getitem__) == 25


@pytest.mark.slow
def test_a_plan_where_nothing_else_fits() -> None:
    plan = make_plan(request(), robustness=False)
    assert plan.layout is not None
    assert plan.predicted is not None
    assert plan.layout.optimizer_offload == 100
    # Both GPUs of the host count as the one with more layers.
    (layers,) = {max(map(sum, plan.layout.stages))}
    fullest = 0.5 * 8.03e9 + (layers - 16) * 0.218e9
    assert plan.predicted.host_memory_gib == pytest.approx(2 * 16 * fullest / GIB, rel=1e-3)
    assert least_s(request(forbid=["optimizer-offload"])) is None
    choice = next(each for each in plan.choices or [] if each.choice == "optimizer_offload")
    assert choice.step_time_s_without is None
    assert choice.proven


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd"},
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"allow": "bf16-moments"}, marks=pytest.mark.slow),
        {"framework": "fsdp2"},
        {"forbid": ["optimizer-offload"]},
    ],
)
def test_where_there_is_none(changes: dict[str, Any]) -> None:
    outcome = search_executions(request(gpus=8, **changes), pricing_of)
    assert all(int(each.layout.optimizer_offload) == 0 for each in outcome.best)


def test_any_share_can_be_pinned() -> None:
    assert {share for _, share in space_of(request(pin={"optimizer_offload": 37})).offloads} == {37}
