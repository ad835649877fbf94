"""Overlap of a plan by axis: the parts of the price, and what the links carry."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshwright.errors import InfeasibleError
from meshwright.planner.analysis.roofline import COMPUTE_PARTS, EXPOSED_PARTS, plan_overlap
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request
from tests.plans import make_plan


def planned(model: str, gpus: int, pin: str) -> Plan:
    asked: dict[str, Any] = {"cluster": "dgx-h100", "global_batch": 64, "seq_len": 4096}
    return fastest_plan(read_request(model=model, gpus=gpus, pin=pin, **asked))


def test_parts_of_a_plan_are_taken_once() -> None:
    plan = planned("llama-3-8b", 16, "micro_batch=1,tp=2")
    assert plan.predicted is not None
    parts = plan.predicted.breakdown_s
    answer = plan_overlap(plan)
    assert answer["compute_s"] == pytest.approx(sum(parts.get(name, 0) for name in COMPUTE_PARTS))
    carried_s = sum(row["communication_s"] for row in answer["axes"].values())
    busy_s = sum(level.busy_s for level in plan.predicted.level_traffic)
    assert carried_s == pytest.approx(busy_s)
    buckets = answer["gradient_buckets"]
    assert buckets["count"] == math.ceil(8.03e9 / 2 * 4 / 1e6 / buckets["bucket_mb"])
    assert buckets["chosen_by"] in ("plan", "framework")
    for axis, row in answer["axes"].items():
        exposed_s = sum(parts.get(name, 0.0) for name in EXPOSED_PARTS[axis])
        assert row["exposed_s"] == exposed_s
        assert row["overlap_ratio"] == row["communication_s"] / answer["compute_s"]
        assert 0 <= row["hidden_share"] <= 1


def test_every_exposed_part_belongs_to_an_axis() -> None:
    plan = planned("olmoe-1b-7b", 8, "micro_batch=1,ep=8")
    assert plan.predicted is not None
    named = {name for names in EXPOSED_PARTS.values() for name in names}
    assert {name for name in plan.predicted.breakdown_s if name.endswith("_comm")} <= named


def test_compute_is_all_of_the_step_but_waits() -> None:
    """Products of experts, most of what Mixtral computes, are among it."""
    plan = planned("mixtral-8x7b", 16, "micro_batch=1,tp=2,pp=2,ep=4,cp=1")
    assert plan.predicted is not None
    parts = plan.predicted.breakdown_s
    waits = {name for name in parts if name.endswith("_comm") or name.startswith("pipeline_")}
    waits |= {"host", "step_overhead", "scale"}
    computed_s = sum(seconds for name, seconds in parts.items() if name not in waits)
    assert plan_overlap(plan)["compute_s"] == pytest.approx(computed_s)
    assert parts["expert_gemm"] > 0.5 * computed_s


def test_buckets_hold_gradients_of_adapters_alone() -> None:
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16}
    asked |= {"global_batch": 64, "seq_len": 4096, "pin": "micro_batch=1,tp=1,pp=1"}
    lora = plan_overlap(fastest_plan(read_request(**asked, train="lora")))
    full = plan_overlap(fastest_plan(read_request(**asked)))
    assert lora["gradient_buckets"]["count"] == 1
    assert full["gradient_buckets"]["count"] > 20
    # 36 million of 8.03 billion parameters have gradients to send.
    sent = [each["axes"]["dp"]["communication_s"] for each in (lora, full)]
    assert sent[0] < 0.01 * sent[1]


def test_a_plan_without_a_layout_has_no_overlap() -> None:
    with pytest.raises(InfeasibleError, match="nothing is sent"):
        plan_overlap(make_plan())
