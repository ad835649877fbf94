"""The host's memory: the rule by hand, and plans that offload less, or otherwise, where it is short."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ortools.sat.python import cp_model

from meshwright.constraints.memory import HostMemory
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.layout import Layout
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.choosers import KernelChooser
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import space_of
from tests.planner.search.test_planner_optimum import check_against_brute_force, cluster, model
from tests.soaked import some

PARAMETERS = 8.03e9
GIB = 2**30


def request(host_gib: float | None, **changes: Any) -> PlanRequest:
    """Llama-3 8B on eight H100 of one node."""
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq_len": 8192,
    }
    asked = read_request(**options | changes)
    return with_host(asked, host_gib)


def with_host(asked: PlanRequest, host_gib: float | None) -> PlanRequest:
    spec = asked.cluster.model_copy(update={"host_memory_gib": host_gib})
    return replace(asked, cluster=spec)


@pytest.mark.parametrize(("share", "dp", "gpus"), [(100, 8, 8), (50, 8, 8), (100, 2, 2)])
def test_the_node_by_hand(share: int, dp: int, gpus: int) -> None:
    """Megatron keeps 16 bytes of an offloaded parameter there, of which dp ranks share each."""
    held_gib = share / 100 * gpus * 16 * PARAMETERS / dp / GIB
    layout = Layout(dp=dp, zero_stage=1, num_micro_batches=8, optimizer_offload=share)
    one_row = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    for limit, fits in ((held_gib * 1.001, True), (held_gib * 0.999, False)):
        workload = request(limit, gpus=gpus).workload()
        plan = FinishedPlan(
            workload=workload, layout=layout, stages=((32,),), memory_gib=(0.0,), spans={}
        )
        table = Candidates(workload=workload, layouts=one_row, memory_gib=np.zeros(1))
        assert (HostMemory().check(plan) is None) == fits
        assert (HostMemory().excess(table)[0] <= 0) == fits


def test_the_rank_with_the_most_layers_counts_by_hand() -> None:
    """28 of 32 layers and one of two token tables of 128,256 by 4,096, shared by 4 ranks."""
    table = 128_256 * 4096
    most = 28 / 32 * (PARAMETERS - 2 * table) + table
    held_gib = 8 * 16 * most / 4 / GIB
    layout = Layout(pp=2, dp=4, zero_stage=1, num_micro_batches=16, optimizer_offload=100)
    for limit, fits in ((held_gib * 1.001, True), (held_gib * 0.999, False)):
        plan = FinishedPlan(
            workload=request(limit).workload(),
            layout=layout,
            stages=((28,), (4,)),
            memory_gib=(0.0, 0.0),
            spans={},
        )
        assert (HostMemory().check(plan) is None) == fits


def test_experts_without_adapters_take_no_room_on_the_host() -> None:
    """Rank-16 adapters of queries and values of Mixtral: 2 x 16 x 4,096 + 16 x (4,096 + 1,024) a layer.

    20 bytes each under DeepSpeed, of which 8 ranks share each; as many for each expert's parameter would be
    refused.
    """
    adapters = AdapterSpec(rank=16, targets=("q_proj", "v_proj"))
    held_gib = 20 * 32 * (2 * 16 * 4096 + 16 * (4096 + 1024)) / GIB
    layout = Layout(dp=8, zero_stage=3, num_micro_batches=8, optimizer_offload=100)
    one_row = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
    for limit, fits in ((held_gib * 1.001, True), (held_gib * 0.999, False)):
        workload = replace(
            request(limit, model="mixtral-8x7b").workload(),
            framework="deepspeed",
            adapters=adapters,
        )
        plan = FinishedPlan(workload=workload, layout=layout, stages=((32,),), memory_gib=(0.0,))
        table = Candidates(workload=workload, layouts=one_row, memory_gib=np.zeros(1))
        assert (HostMemory().check(plan) is None) == fits
        assert (HostMemory().excess(table)[0] <= 0) == fits


def test_clusters_that_say_nothing_are_not_limited() -> None:
    assert not HostMemory().applies(request(None).workload())


PINS = {"tp": 1, "pp": 2, "cp": 1, "dp": 1, "micro_batch": 1, "vpp": 1}
WITHOUT = ("cuda-graph", "tp-overlap", "cp-a2a", "deepep")
"""Leaves plans one execution to search."""
SMALL = {"gpus": 2, "global_batch": 128, "seq_len": 4096, "pin": PINS, "without": WITHOUT}


def test_two_stages_on_one_host_offload_less_than_each_would_alone() -> None:
    """Half of either stage's optimizer fits into the host alone, both do not: layers are recomputed."""
    free = fastest_plan(request(None, **SMALL))
    assert free.layout is not None
    assert free.predicted is not None
    held_gib = free.predicted.host_memory_gib
    assert held_gib is not None
    assert (free.layout.optimizer_offload, free.layout.recompute) == (50, "none")
    tight = fastest_plan(request(0.8 * held_gib, **SMALL))
    assert tight.status == "optimal"
    assert tight.layout is not None
    assert tight.predicted is not None
    assert (tight.layout.optimizer_offload, tight.layout.recompute) == (25, "full")
    assert (tight.predicted.host_memory_gib or 0.0) <= 0.8 * held_gib
    assert free.objective.step_time_s is not None
    assert tight.objective.step_time_s is not None
    assert tight.objective.step_time_s > free.objective.step_time_s


@pytest.mark.slow
def test_a_host_that_is_too_small_for_any_plan_is_named_with_what_would_do() -> None:
    asked = request(10.0, **SMALL | {"pin": {**PINS, "recompute": "none"}})
    plan = fastest_plan(asked)
    assert plan.status == "infeasible"
    assert plan.infeasible is not None
    assert "host-memory" in {rule.rule for rule in plan.infeasible.rules}
    change = next(each for each in plan.infeasible.changes if each.change == "host-memory-gib")
    assert change.asked == 10.0
    assert isinstance(change.value, int)
    assert fastest_plan(with_host(asked, change.value)).layout is not None
    assert fastest_plan(with_host(asked, change.value - 1), explained=False).layout is None


def on_host(seed: int) -> PlanRequest:
    """A small problem in little memory of GPUs and of hosts."""
    draw = random.Random(f"host memory {seed}")
    spec = model(draw).model_copy(update={"moe": None, "mtp_layers": 0, "vocab": 8192})
    asked = PlanRequest(
        model=spec,
        cluster=cluster(draw.choice([3.0, 3.5, 4.0, 5.0]) + draw.random(), 16, None),
        gpus=draw.choice([2, 4]),
        global_batch=draw.choice([4, 8]),
        seq_len=2048,
        pins={"zero_stage": 1, "recompute": "none"},
    )
    return with_host(asked, draw.choice([2.0, 4.0, 8.0, 12.0]))


@pytest.mark.parametrize(
    "seed",
    [
        7,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (6, 9)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some([3, 0, 1, 2, 4, 5, 8])),
    ],
)
def test_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(on_host(seed))


@pytest.mark.soak
def test_the_limit_changes_some_of_these_plans_and_rows_of_the_model_keep_it() -> None:
    changed = rows = 0
    for seed in range(24):
        if changed >= 4 and rows >= 8:
            break
        asked = on_host(seed)
        space = space_of(asked)
        search = LayoutSearch(space, [branch_of(space, pricing_of(space.workload))])
        found, free = search.run(), fastest_plan(with_host(asked, None))
        if free.objective.step_time_s is None:
            continue
        own_s = found.best[0].step_time_s if found.best else float("inf")
        changed += own_s > free.objective.step_time_s * (1 + 1e-9)
        assert isinstance(search.chooser, KernelChooser)
        if search.chooser.last is not None:
            names = {each.name for each in search.chooser.last.model.proto.constraints}
            rows += "host_r0" in names
    assert changed >= 4
    assert rows >= 8


def test_the_model_alone_refuses_a_host_that_is_too_small() -> None:
    """Solved again with less room on every host than any offload takes, nothing as fast is left."""
    search = None
    for seed in range(24):
        asked = on_host(seed)
        space = space_of(asked)
        search = LayoutSearch(space, [branch_of(space, pricing_of(space.workload))])
        found = search.run()
        if found.best and int(found.best[0].layout.optimizer_offload):
            break
    assert search is not None
    assert isinstance(search.chooser, KernelChooser)
    assert search.chooser.last is not None
    model = search.chooser.last.model.clone()
    for row in model.proto.constraints:
        if row.name.startswith("host_r"):
            row.linear.domain.clear()
            row.linear.domain.extend([-(2**60), 0])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status == cp_model.INFEASIBLE or solver.objective_value > 1e9 * found.best[0].step_time_s
