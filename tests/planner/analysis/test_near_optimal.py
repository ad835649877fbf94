"""Layouts near a plan: they keep the rules, cost what they say, and the front is what no other beats."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.analysis.near_optimal import NearLayout, NearParams, near_optimal
from meshwright.planner.plan.document import Plan
from tests.planner.analysis.test_trace import piped


@pytest.fixture(scope="module")
def plan() -> Plan:
    return piped("1f1b")


@pytest.fixture(scope="module")
def layouts(plan: Plan) -> list[NearLayout]:
    return near_optimal(plan)


def test_the_plan_is_among_them_and_none_stands_twice(
    plan: Plan, layouts: list[NearLayout]
) -> None:
    assert plan.predicted is not None
    (own,) = [near for near in layouts if near.is_plan]
    assert own.step_time_s == plan.predicted.step_time_s
    assert own.memory_gib == max(plan.predicted.memory_gib)
    assert len(layouts) > 10
    assert len({near.layout.model_dump_json() for near in layouts}) == len(layouts)


def test_the_front_is_what_no_other_beats_in_both(layouts: list[NearLayout]) -> None:
    for near in layouts:
        beaten = any(
            other.step_time_s <= near.step_time_s
            and other.memory_gib <= near.memory_gib
            and (other.step_time_s, other.memory_gib) != (near.step_time_s, near.memory_gib)
            for other in layouts
        )
        if near.on_front:
            assert not beaten
    front = [near for near in layouts if near.on_front]
    assert all(b.memory_gib < a.memory_gib for a, b in itertools.pairwise(front))
    assert layouts[0].on_front


def test_the_degrees_make_the_same_gpus_and_batch(plan: Plan, layouts: list[NearLayout]) -> None:
    for near in layouts:
        layout = near.layout
        assert layout.tp * layout.cp * layout.pp * layout.dp == plan.inputs.gpus
        sequences = layout.micro_batch * layout.num_micro_batches * layout.dp
        assert sequences == plan.inputs.global_batch


def test_bounds_are_kept(plan: Plan) -> None:
    few = near_optimal(plan, NearParams(most_priced=10, slowest=1.2))
    assert 1 <= len(few) <= 11
    assert max(near.step_time_s for near in few) <= 1.2 * few[0].step_time_s * 1.2
