"""Layouts near a plan: they keep the rules, cost what they say, and the front is what no other beats."""

from __future__ import annotations

import itertools

import pytest

import meshwright
from meshwright.planner.analysis.neighbours import NearLayout, near_optimal, neighbours
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
    few = near_optimal(plan, most_priced=10, slowest=1.2)
    assert 1 <= len(few) <= 11
    assert max(near.step_time_s for near in few) <= 1.2 * few[0].step_time_s * 1.2


def test_only_layouts_of_the_printed_space_are_drawn() -> None:
    """ZeRO 2, which Megatron's space has not, stood there as faster than the optimum."""
    plan = meshwright.plan(
        "llama-3-8b",
        cluster="dgx-h100",
        gpus=16,
        global_batch=64,
        seq_len=8192,
        pin={"pp": 1, "cp": 1},
        forbid=("full-recompute",),
    )
    assert plan.status == "optimal"
    assert plan.solver.space is not None
    assert plan.objective.step_time_s is not None
    near = near_optimal(plan, most_priced=60)
    assert len(near) > 5
    for each in near:
        assert each.step_time_s >= plan.objective.step_time_s * (1 - 1e-3)
        assert each.layout.zero_stage in plan.solver.space.zero_stages
        assert each.layout.recompute != "full"
        assert (each.layout.pp, each.layout.cp) == (1, 1)
    outside = [change for change in neighbours(plan) if change.outside is not None]
    assert any("zero_stage" in str(change.outside) for change in outside)
    assert any("pinned" in str(change.outside) for change in outside)
