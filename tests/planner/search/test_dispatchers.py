"""DeepEP and HybridEP in one space: of one price, with unlike buffers and sizes of groups."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright.constraints.registry import rules_for
from meshwright.costmodel.buffers import dispatch_buffers, dispatchers_of
from meshwright.costmodel.estimate import stage_memory_gib
from meshwright.costmodel.execution_names import Dispatcher
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import Layout
from meshwright.model_specs.blocks import MoeSpec
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.search.loop import branches_of, search_executions
from meshwright.planner.search.model import Candidates
from tests.planner.search.test_planner_optimum import best_of_executions
from tests.planner.search.test_planner_optimum import request as small_request
from tests.soaked import some

NAMES: tuple[Dispatcher, ...] = ("deepep", "hybridep")
CASES = 60


def asked(seed: int, hbm_gib: float = 80.0) -> PlanRequest:
    """A small problem with experts on one node of eight, whose tokens either dispatcher sends."""
    draw, base = random.Random(f"dispatchers {seed}"), small_request(seed)
    experts = draw.choice([2, 4, 6])
    moe = MoeSpec(experts=experts, top_k=2, moe_ffn_hidden=1024, shared_experts=0, dense_layers=0)
    changes = {"moe": moe, "layers": draw.choice([2, 3]), "mtp_layers": 0}
    device = base.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    node = {"gpus": 8, "gpus_per_node": 8, "nvlink_domain": 8, "levels": (), "device": device}
    return replace(
        base,
        model=base.model.model_copy(update=changes),
        cluster=base.cluster.model_copy(update=node),
        gpus=draw.choice([2, 3, 4, 6, 6]),
        global_batch=draw.choice([4, 6, 12]),
        seq_len=draw.choice([512, 2048, 8192, 32_768]),
        pins={"zero_stage": draw.choice([0, 1]), "cp": 1, "moe_dispatch": "deduplicated"},
        forbids=("interleaving", "selective-recompute", "optimizer-offload"),
        without=("ep-overlap", "tp-overlap", "cp-a2a", "cp-hierarchical", "cuda-graph"),
    )


@cache
def fullest_gib(seed: int, name: str) -> float | None:
    """HBM in which the fastest plan of one dispatcher just fits; None without a plan."""
    request = asked(seed)
    request = replace(request, pins={**request.pins, "moe_dispatch": name})
    best = search_executions(request, CostModelPricing).best
    if not best:
        return None
    workload = request.workload(best[0].execution).on(int(best[0].layout.gpus))
    needed_gib = float(stage_memory_gib(workload, best[0].layout, best[0].stages).max())
    # What is usable rises with the HBM in a straight line.
    at_80 = usable_hbm_gib(workload)
    at_40 = usable_hbm_gib(asked(seed, 40.0).workload(best[0].execution))
    return 80.0 - 40.0 * (at_80 - needed_gib) / (at_80 - at_40) + 1e-6


def compare(seed: int, name: str) -> tuple[float | None, ...]:
    """The best steps of both dispatchers by brute force, where the fastest plan of one of them just fits."""
    hbm_gib = fullest_gib(seed, name)
    request = asked(seed, hbm_gib or 80.0)
    every = request.execution_options.executions()
    assert [execution.moe_dispatch for execution in every] == list(NAMES)
    steps = tuple(best_of_executions(request, [execution]) for execution in every)
    for method in ("cp-sat", "exhaustive"):
        outcome = search_executions(replace(request, method=method), CostModelPricing)
        if set(steps) == {None}:
            assert outcome.status == "infeasible"
            continue
        least_s = min(step_s for step_s in steps if step_s is not None)
        assert outcome.status == "optimal"
        assert outcome.best[0].step_time_s == pytest.approx(least_s, rel=1e-9)
        assert outcome.lower_bound_s == pytest.approx(least_s, rel=1e-9)
        of_its_own = steps[NAMES.index(outcome.best[0].execution.moe_dispatch)]
        assert of_its_own == pytest.approx(least_s, rel=1e-9)
    return steps


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", some(range(CASES)))
def test_the_plan_is_always_the_best_of_both(seed: int, name: str) -> None:
    compare(seed, name)


@pytest.mark.parametrize(("seed", "name"), [(3, "deepep"), (11, "hybridep")])
def test_each_is_planned_where_the_other_has_no_room(seed: int, name: Dispatcher) -> None:
    """Once the best of one in two was planned: a slower step was called optimal."""
    steps = dict(zip(NAMES, compare(seed, name), strict=True))
    (other,) = set(NAMES) - {name}
    of_name, of_other = steps[name], steps[other]
    assert of_name is not None
    assert of_other is None or of_name < of_other * 0.999


def test_a_number_of_ranks_that_one_has_no_settings_for_is_left_to_the_other() -> None:
    """DeepEP has none for groups of 6."""
    request = asked(8)
    request = replace(request, pins={**request.pins, "ep": 6, "etp": 1})
    assert request.gpus == 6
    outcome = search_executions(request, CostModelPricing)
    assert outcome.best[0].execution.moe_dispatch == "hybridep"
    least_s = best_of_executions(request, request.execution_options.executions())
    assert outcome.best[0].step_time_s == pytest.approx(least_s, rel=1e-9)


def of_deepseek(cluster: str, **settings: object) -> PlanRequest:
    return read_request(
        model="deepseek-v3",
        cluster=cluster,
        gpus=64,
        global_batch=512,
        seq_len=4096,
        **settings,  # type: ignore[arg-type]
    )


def shapes_with_experts(count: int) -> Layout:
    """Random degrees that may share experts."""
    draw = np.random.default_rng(7)
    powers = 2 ** draw.integers(0, 8, size=(3, count))
    return Layout(
        tp=2 ** draw.integers(0, 4, size=count),
        cp=2 ** draw.integers(0, 3, size=count),
        dp=powers[0] * 3,
        ep=np.where(draw.random(count) < 0.3, 3, 1) * powers[1],
        etp=2 ** draw.integers(0, 3, size=count),
        micro_batch=2 ** draw.integers(0, 4, size=count),
        pp=np.full(count, 4),
        num_micro_batches=np.full(count, 8),
    )


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-b200", "gb200-nvl72"])
def test_a_layout_has_the_smallest_buffers_of_those_that_the_rules_allow(cluster: str) -> None:
    """By the rules of each dispatcher alone, and by its own buffers."""
    request, layouts = of_deepseek(cluster), shapes_with_experts(400)
    base = request.workload()
    alone = [replace(base, moe_dispatch=name) for name in NAMES]
    both = replace(base, moe_dispatch="deepep", other_dispatchers=("hybridep",))
    legal = []
    for workload in (*alone, both):
        table = Candidates(workload=workload, layouts=layouts, memory_gib=np.zeros(400))
        rules = [r for r in rules_for(workload) if r.name == "megatron-dispatcher-ranks"]
        legal.append(np.logical_and.reduce([rule.excess(table) <= 0 for rule in rules]))
    sizes = np.stack([dispatch_buffers(workload, layouts) for workload in alone])
    assert np.array_equal(legal[2], legal[0] | legal[1])
    smallest = np.where(np.stack(legal[:2]), sizes, np.inf).min(axis=0)
    assert np.array_equal(np.asarray(dispatch_buffers(both, layouts))[legal[2]], smallest[legal[2]])
    names = np.array(dispatchers_of(both, layouts))
    for number, name in enumerate(NAMES):
        chosen = legal[2] & (names == name)
        assert chosen.any() == bool((legal[number] & (sizes[number] == smallest)).any())
        assert np.array_equal(sizes[number][chosen], smallest[chosen])
        assert legal[number][chosen].all()


@pytest.mark.parametrize(("cluster", "precision"), [("dgx-h100", "bf16"), ("dgx-b200", "mxfp8")])
def test_prices_and_other_rules_are_those_of_either(cluster: str, precision: str) -> None:
    """What one branch for both rests on: but for buffers and their own rules they are one execution."""
    request = of_deepseek(cluster, precision=precision)
    seen, draw = 0, np.random.default_rng(3)
    for branch in branches_of(request, CostModelPricing):
        if not branch.pricing.workload.other_dispatchers:
            continue
        seen += 1
        degrees = branch.space.degrees(64)
        layouts = degrees.take(draw.integers(0, len(np.asarray(degrees.pp)), size=200))
        first, second = (
            replace(branch.space.workload, moe_dispatch=name, other_dispatchers=())
            for name in NAMES
        )
        steps = [CostModelPricing(each).lower_bound_s(layouts) for each in (first, second)]
        assert np.array_equal(steps[0], steps[1])
        tables = [
            Candidates(workload=workload, layouts=layouts, memory_gib=np.zeros(200))
            for workload in (first, second)
        ]
        rules = [{rule.name: rule for rule in rules_for(table.workload)} for table in tables]
        assert set(rules[0]) == set(rules[1])
        for name in set(rules[0]) - {"megatron-dispatcher-ranks"}:
            pairs = zip(rules, tables, strict=True)
            excess = [by_name[name].excess(table) for by_name, table in pairs]
            assert np.array_equal(excess[0], excess[1]), name
    assert seen > 1


def test_only_hybridep_is_inside_graphs_of_the_whole_step() -> None:
    request = of_deepseek("dgx-b200", precision="mxfp8")
    branches = branches_of(request, CostModelPricing)
    runs = [run for branch in branches for run in branch.executions]
    assert {run.moe_dispatch for run in runs if run.cuda_graph == "full"} == {"hybridep"}
    assert {run.moe_dispatch for run in runs if run.cuda_graph == "partial"} > set(NAMES)


@pytest.mark.slow
def test_one_search_is_no_slower_than_the_best_of_two() -> None:
    """DeepSeek-V3 on 2,048 H100: 21.77 s was called optimal, as HybridEP alone was in the space."""
    request = read_request(
        model="deepseek-v3", cluster="dgx-h100", gpus=2048, global_batch=15360, seq_len=4096
    )
    steps = []
    for name in (*NAMES, "deduplicated"):
        pinned = replace(request, pins={"moe_dispatch": name})
        outcome = search_executions(pinned, CostModelPricing)
        assert outcome.status == "optimal"
        steps.append(outcome.best[0].step_time_s)
    assert steps[2] == pytest.approx(min(steps[:2]), rel=1e-9)
    assert steps[0] < 0.99 * steps[1]
