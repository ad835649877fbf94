"""Overlap of a plan by axis: the parts of the price, and what the links carry."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.errors import InfeasibleError
from meshwright.planner.analysis.roofline import COMPUTE_PARTS, EXPOSED_PARTS, plan_overlap
from meshwright.planner.plan.document import Plan
from tests.plans import make_plan


def planned(words: str) -> Plan:
    done = CliRunner().invoke(main, ["plan", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    return Plan.model_validate_json(done.stdout)


def test_parts_of_a_plan_are_taken_once() -> None:
    plan = planned(
        "llama-3-8b --cluster dgx-h100 --gpus 16 --global-batch 64 --seq-len 4096 --pin micro_batch=1,tp=2"
    )
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
    plan = planned(
        "olmoe-1b-7b --cluster dgx-h100 --gpus 8 --global-batch 64 --seq-len 4096 --pin micro_batch=1,ep=8"
    )
    assert plan.predicted is not None
    named = {name for names in EXPOSED_PARTS.values() for name in names}
    assert {name for name in plan.predicted.breakdown_s if name.endswith("_comm")} <= named


def test_a_plan_without_a_layout_has_no_overlap() -> None:
    with pytest.raises(InfeasibleError, match="nothing is sent"):
        plan_overlap(make_plan())
