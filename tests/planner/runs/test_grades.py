"""Marks of plans against the usual targets."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.prediction import grades
from tests.plans import make_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = read_request(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=64,
        seq_len=4096,
        pin="pp=2,vpp=1,micro_batch=1,zero_stage=1",
        without=WITHOUT,
    )
    return fastest_plan(request)


def test_a_pipeline_is_graded_by_every_target(plan: Plan) -> None:
    assert plan.predicted is not None
    marks = {grade.what: grade for grade in plan.grades}
    assert set(marks) == {
        "MFU", "pipeline bubble", "micro-batches a stage", "communication hidden"
    }  # fmt: skip
    assert marks["MFU"].value == plan.predicted.mfu
    assert all(0 <= grade.value <= 1 for grade in marks.values() if grade.is_share)


@pytest.mark.parametrize(
    ("mfu", "bubble_s", "exposed_s", "marks"),
    [
        (0.50, 0.9, 2.0, ["excellent", "good", "good", "good"]),
        (0.49, 1.0, 2.1, ["good", "below target", "good", "below target"]),
        (0.39, 0.0, 0.0, ["below target", "good", "good", "good"]),
    ],
)
def test_marks_follow_the_targets(
    plan: Plan, mfu: float, bubble_s: float, exposed_s: float, marks: list[str]
) -> None:
    """A step of 10 s, links busy for 10 s, 8 micro-batches on 2 stages."""
    assert plan.layout is not None
    assert plan.predicted is not None
    level = plan.predicted.level_traffic[0].model_copy(update={"busy_s": 10.0, "mean_busy_s": None})
    predicted = plan.predicted.model_copy(
        update={
            "step_time_s": 10.0,
            "mfu": mfu,
            "breakdown_s": {"pipeline_bubble": bubble_s, "tp_comm": exposed_s},
            "level_traffic": [level],
        }
    )
    graded = grades(plan.layout.model_copy(update={"num_micro_batches": 8}), predicted)
    assert [grade.mark for grade in graded] == marks
    assert graded[2].value == 4.0


def test_nothing_is_graded_without_a_prediction() -> None:
    assert make_plan().grades == []
