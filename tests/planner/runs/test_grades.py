"""Marks of plans against the usual targets."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.prediction import Grade, GradeTargets, grades
from tests.plans import make_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    words = "plan llama-3-8b --cluster dgx-h100 --gpus 8 --global-batch 64 --seq-len 4096 --pin pp=2,vpp=1"
    done = CliRunner().invoke(main, [*words.split(), "--json"])
    assert done.exit_code == 0, done.output
    return Plan.model_validate({k: v for k, v in json.loads(done.stdout).items() if k != "schema"})


def marked(plan: Plan, targets: GradeTargets) -> list[Grade]:
    assert plan.layout is not None
    assert plan.predicted is not None
    return grades(plan.layout, plan.predicted, targets)


def test_a_pipeline_is_graded_by_every_target(plan: Plan) -> None:
    assert plan.predicted is not None
    marks = {grade.what: grade for grade in plan.grades}
    assert set(marks) == {
        "MFU", "pipeline bubble", "micro-batches a stage", "communication hidden"
    }  # fmt: skip
    assert marks["MFU"].value == plan.predicted.mfu
    assert all(0 <= grade.value <= 1 for grade in marks.values() if grade.is_share)


def test_marks_follow_the_targets(plan: Plan) -> None:
    easy = GradeTargets(
        mfu=0.0, excellent_mfu=0.0, bubble=1.0, hidden=0.0, micro_batches_a_stage=0.0
    )
    hard = GradeTargets(
        mfu=1.0, excellent_mfu=1.0, bubble=0.0, hidden=1.1, micro_batches_a_stage=1e9
    )
    assert [grade.mark for grade in marked(plan, easy)] == ["excellent", "good", "good", "good"]
    assert {grade.mark for grade in marked(plan, hard)} == {"below target"}


def test_nothing_is_graded_without_a_prediction() -> None:
    assert make_plan().grades == []
