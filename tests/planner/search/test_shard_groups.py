"""Shard groups as a choice: every number of them is a layout, and the best is found without pricing each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.schema import NodeSpec
from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.loop import search_executions
from meshwright.planner.search.space import space_of


def request(**changes: Any) -> PlanRequest:
    """Llama-3 8B with FSDP2 on 256 H100."""
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 256,
        "global_batch": 256,
        "seq_len": 8192,
        "framework": "fsdp2",
    }
    return read_request(**options | changes)


def least_s(asked: PlanRequest) -> float:
    outcome = search_executions(asked, pricing_of)
    assert outcome.status == "optimal"
    return outcome.best[0].step_time_s


def test_the_best_number_of_groups_is_the_best_of_all_pinned_ones() -> None:
    outcome = search_executions(request(), pricing_of)
    best = outcome.best[0]
    assert int(best.layout.shard_groups) > 1
    each_s = {groups: least_s(request(pin={"shard_groups": groups})) for groups in (1, 2, 4, 8, 16)}
    assert best.step_time_s == pytest.approx(min(each_s.values()), rel=1e-12)
    assert best.step_time_s == each_s[int(best.layout.shard_groups)]
    assert best.step_time_s < each_s[1]


def test_groups_can_be_forbidden() -> None:
    assert least_s(request(forbid=["shard-groups"])) == least_s(request(pin={"shard_groups": 1}))
    with pytest.raises(InputError, match="shard-group"):
        request(forbid=["shard-group"])


def test_a_plan_says_what_groups_bring() -> None:
    plan = make_plan(request(), robustness=False)
    assert plan.layout is not None
    choice = next(each for each in plan.choices or [] if each.choice == "shard_groups")
    assert choice.value == plan.layout.shard_groups
    assert choice.proven
    assert choice.step_time_s_without == pytest.approx(least_s(request(pin={"shard_groups": 1})))


def test_the_next_best_plans_have_every_number_of_groups() -> None:
    """The second best, two groups under ZeRO 2, was none of them: it sends no less than one group does."""
    asked = request(model="gpt2-xl", cluster="dgx-a100", gpus=8, global_batch=8, seq_len=2048)
    found, everything = (
        search_executions(replace(asked, top_k=6, method=method), pricing_of).best
        for method in ("cp-sat", "exhaustive")
    )
    assert int(everything[1].layout.shard_groups) == 2
    assert [plan.step_time_s for plan in found] == [plan.step_time_s for plan in everything]


@pytest.mark.slow
def test_a_number_that_few_replicas_have_can_be_pinned() -> None:
    """Degrees without it have no layout: their bound was taken from infinite traffic, with a warning."""
    asked = request(
        framework="megatron", gpus=8, global_batch=128, pin={"shard_groups": 2, "tp": 2}
    )
    outcome = search_executions(asked, pricing_of)
    assert outcome.status == "optimal"
    assert int(outcome.best[0].layout.shard_groups) == 2


def test_every_number_that_divides_is_in_the_space_once() -> None:
    space = space_of(request(framework="megatron", global_batch=48, gpus=48))
    degrees = Layout(dp=np.array([12, 12, 1]), cp=np.array([1, 2, 4]), pp=np.ones(3, dtype=int))
    degrees = degrees.flat()
    layouts = space.layouts(degrees)
    rows = list(
        zip(
            np.asarray(layouts.cp).tolist(),
            np.asarray(layouts.zero_stage).tolist(),
            np.asarray(layouts.shard_groups).tolist(),
            np.asarray(layouts.optimizer_offload).tolist(),
            np.asarray(layouts.recompute).tolist(),
            strict=True,
        )
    )
    assert len(rows) == len(set(rows)) == space.layouts_per_degrees(degrees).sum()
    groups: dict[tuple[int, int], list[int]] = {(cp, zero): [] for cp, zero, *_ in rows}
    for cp, zero, number, offloaded, mask in rows:
        if mask == 0 and offloaded == 0:
            groups[cp, zero].append(number)
    assert groups == {
        (1, 0): [1],
        (1, 1): [1, 2, 3, 4, 6],
        (2, 0): [1],
        (2, 1): [1, 2, 3, 4, 6, 12],
        (4, 0): [1],
        (4, 1): [1],
    }


def test_irregular_allocations_have_as_many_groups_as_regular_ones() -> None:
    asked = request(framework="megatron")
    leaves = ["l0"] * 5 + ["l1"] * 3
    nodes = tuple(NodeSpec(name=f"n{at}", leaf=leaf) for at, leaf in enumerate(leaves))
    listed = asked.cluster.model_copy(update={"nodes": nodes, "gpus": 64, "elastic": False})
    regular = space_of(replace(asked, gpus=64)).shard_groups
    assert len(regular) > 1
    assert space_of(replace(asked, cluster=listed, gpus=64)).shard_groups == regular
    assert space_of(request(framework="deepspeed")).shard_groups == (1,)
