"""The search against a brute force over layouts, mappings, splits and recomputed layers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec, FabricLevelSpec
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.estimate import estimate_layout, stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout, Recompute
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.schedules import schedule_name, traits
from meshwright.costmodel.workload import Execution
from meshwright.errors import OutOfTimeError
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.combination_costs import shape_table
from meshwright.planner.bounds.exact_cost import MappingBounds
from meshwright.planner.bounds.layer_split import ALL_LAYERS, any_stages, even_chunks, level_splits
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.branches import DegreeScan
from meshwright.planner.search.choosers import SlotChooser
from meshwright.planner.search.loop import (
    LARGEST_SPACE,
    LayoutSearch,
    branch_of,
    search_executions,
    search_exhaustively,
)
from meshwright.planner.search.model import Candidates, build_model, price_ns, solve
from meshwright.planner.search.pricing import Certificate, Outcome, SearchParams, Sought
from meshwright.planner.search.space import Space, space_of
from meshwright.planner.solvers.processes import on_processes
from tests.planner.search.rows_of_rules import with_rules
from tests.soaked import some

Stages = tuple[tuple[int, ...], ...]


def device(hbm_gib: float) -> DeviceSpec:
    return DeviceSpec(
        name="made-up",
        architecture="hopper",
        hbm_gib=hbm_gib,
        hbm_gb_per_s=3350,
        peak_bf16_tflops=990,
        peak_fp16_tflops=990,
        peak_fp8_tflops=1980,
        scale_up_gb_per_s=450,
        pcie_gb_per_s=64,
        sms=132,
        tdp_w=700,
    )


def cluster(hbm_gib: float, gpus: int, leaf: int | None = None) -> ClusterSpec:
    levels = () if leaf is None else (
        FabricLevelSpec(name="leaf", gpus=leaf), FabricLevelSpec(name="spine", gpus=gpus, oversubscription=3),
    )  # fmt: skip
    return ClusterSpec(
        device=device(hbm_gib),
        gpus=gpus,
        gpus_per_node=4,
        nvlink_domain=4,
        nic_gbps_per_gpu=400,
        levels=levels,
    )


def model(draw: random.Random) -> ModelSpec:
    layers = draw.randint(2, 5)
    moe = None
    if draw.random() < 0.5:
        moe = MoeSpec(
            experts=draw.choice([4, 6]),
            top_k=2,
            moe_ffn_hidden=1024,
            shared_experts=draw.choice([0, 1]),
            dense_layers=draw.choice([0, 1]),
        )
    return ModelSpec(
        layers=layers,
        hidden=2048,
        ffn_hidden=draw.choice([4096, 8192]),
        heads=16,
        kv_heads=draw.choice([4, 16]),
        vocab=draw.choice([8192, 65536]),
        tied_embeddings=draw.random() < 0.3,
        mtp_layers=draw.choice([0, 0, 0, 1]),
        moe=moe,
    )


def request(seed: int) -> PlanRequest:
    """A small problem; some have no plan, some have one that barely fits."""
    draw = random.Random(seed)
    spec, gpus = model(draw), draw.choice([1, 2, 3, 4, 6, 8, 8, 12, 16])
    pins: dict[str, int | str] = {"zero_stage": draw.choice([0, 1])}
    if draw.random() < 0.5:
        pins["recompute"] = draw.choice(["none", "full"])
    if gpus > 4:
        pins["cp"] = draw.choice([1, 2])
        pins["micro_batch"] = draw.choice([1, 1, 2])
    if gpus >= 4 and draw.random() < 0.3:
        pins.update(pp=2, vpp=2)
        spec = spec.model_copy(update={"layers": draw.choice([4, 5, 6])})
    forbids = ("selective-recompute",) if draw.random() < 0.8 and "recompute" not in pins else ()
    hbm_gib = draw.choice([4.0, 5.0, 6.0, 8.0, 16.0]) + draw.random()
    # Shares are five times the work by brute force: one request in four may offload, in little memory.
    apart = random.Random(f"offload {seed}")
    if apart.random() < 0.75:
        forbids = (*forbids, "optimizer-offload")
    else:
        pins["zero_stage"] = 1
        hbm_gib = apart.choice([3.0, 3.5, 4.0, 5.0]) + apart.random()
    return PlanRequest(
        model=spec,
        cluster=cluster(hbm_gib, 16, draw.choice([None, 8])),
        gpus=gpus,
        global_batch=draw.choice([4, 6, 8, 12]),
        seq_len=draw.choice([2048, 4096]),
        pins=pins,
        forbids=forbids,
    )


def best_by_brute_force(space: Space) -> float | None:
    """The least step time over every layout, matrix, split and number of recomputed layers; None without
    any.
    """
    degrees = space.degrees(space.workload.gpus)
    layouts = space.layouts(degrees)
    times = [
        seconds
        for row in range(len(np.atleast_1d(np.asarray(layouts.tp))))
        for seconds in step_times(space, layouts.scalar(row))
    ]
    return min(times, default=None)


def best_of_executions(request: PlanRequest, executions: Iterable[Execution]) -> float | None:
    """The same over some executions, with every size of gradient buckets."""
    space = space_of(request)
    times = [
        best_by_brute_force(
            replace(space, workload=replace(request.workload(each), chooses_buckets=True))
        )
        for each in executions
    ]
    return min((seconds for seconds in times if seconds is not None), default=None)


def step_times(space: Space, layout: Layout) -> Iterator[float]:
    """The least of all matrices, for every split and number of recomputed layers of a layout that fit and no
    rule forbids.
    """
    workload = replace(space.workload, gpus=int(layout.gpus))
    layers, pp, vpp = workload.model.layers, int(layout.pp), int(layout.vpp)
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    in_step = vpp > 1 and traits(int(layout.schedule)).in_step
    ends, begins = may_have_empty_ends(workload), workload.model.stage_begins
    splits = list(
        level_splits(layers, pp, vpp, empty_ends=ends, begins=begins)
        if in_step
        else _splits(layers, pp, vpp, leading)
    )
    full = int(layout.recompute) & Recompute.FULL
    tables = list(_matrices(layout, level_factors(workload.cluster, workload.gpus).tolist()))
    if not tables:
        return
    stacked = {axis: np.stack([table[axis] for table in tables]) for axis in AXES}
    placements = placement_on(workload.cluster, layout, stacked)
    for again in [*range(1, layers + 1), ALL_LAYERS] if full else [0]:
        one = replace(layout, recompute_layers=again)
        for stages in splits:
            if again < layers and again > min(min(rank) for rank in stages):
                continue
            memory = stage_memory_gib(workload, one, stages)
            if max(memory) > usable_hbm_gib(workload) or not _legal(space, one, stages, memory):
                continue
            # One field as an array gives every part of the price the mappings' axis.
            many = replace(one, micro_batch=np.full(len(tables), int(one.micro_batch)))
            estimate = estimate_layout(workload, many, placements, stages)
            yield float(np.min(estimate.step_time_s))


def _legal(space: Space, layout: Layout, stages: Stages, memory: NDArray[np.float64]) -> bool:
    plan = FinishedPlan(
        workload=space.workload,
        layout=replace(
            layout, recompute_layers=min(int(layout.recompute_layers), max(map(max, stages)))
        ),
        stages=stages,
        memory_gib=tuple(float(x) for x in memory),
        spans={},
    )
    return all(rule.check(plan) is None for rule in rules_for(space.workload))


def _splits(layers: int, pp: int, vpp: int, leading: int) -> Iterator[Stages]:
    for counts in product(range(vpp, layers + 1), repeat=pp):
        if sum(counts) == layers:
            stages = tuple(even_chunks(rank, n, vpp) for rank, n in enumerate(counts))
            if sum(rank[0] for rank in stages) >= leading:
                yield stages


def _matrices(layout: Layout, sizes: list[int]) -> Iterator[dict[str, NDArray[np.int64]]]:
    rows = []
    for axis in AXES:
        degree = int(getattr(layout, axis))
        options = [
            r for r in product(range(1, degree + 1), repeat=len(sizes)) if np.prod(r) == degree
        ]
        rows.append([r for r in options if axis != "tp" or r[0] == degree])
    for table in product(*rows):
        if [int(np.prod(column)) for column in zip(*table, strict=True)] == sizes:
            yield {axis: np.array(row) for axis, row in zip(AXES, table, strict=True)}


def search(asked: PlanRequest, top_k: int = 1, params: SearchParams | None = None) -> Outcome:
    space = space_of(asked)
    branches = [branch_of(space, CostModelPricing(space.workload))]
    return LayoutSearch(space, branches, top_k=top_k, params=params).run()


@cache
def found(seed: int) -> Outcome:
    """The plan of a small problem, of which several tests ask."""
    return search(request(seed))


def compare(seed: int) -> None:
    check_against_brute_force(request(seed))


def check_against_brute_force(asked: PlanRequest) -> None:
    outcome, best_s = search(asked), best_by_brute_force(space_of(asked))
    if best_s is None:
        assert outcome.status == "infeasible"
        assert not outcome.best
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(best_s, rel=1e-9)
    assert outcome.lower_bound_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(
    "seed",
    [
        *(1001, 1003, 1004),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1000, 1002)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((1006, 1007, 1008))),
    ],
)
def test_search_equals_brute_force(seed: int) -> None:
    compare(seed)


SOME = (1002, 1005)
LATER = [
    pytest.param(1012, marks=pytest.mark.slow),
    *(
        pytest.param(n, marks=pytest.mark.soak)
        for n in some(sorted({*range(1000, 1024)} - {*SOME, 1012}))
    ),
]


@pytest.mark.parametrize("seed", [*SOME, *LATER])
def test_degrees_enumerated_as_they_are_asked_for_change_nothing(seed: int) -> None:
    """Neither the plan nor a count of the proof: the same degrees come in the same order."""
    in_parts = search(request(seed), params=SearchParams(enumerated_whole=0))
    at_once = found(seed)
    assert (in_parts.status, in_parts.best) == (at_once.status, at_once.best)
    assert in_parts.certificate == at_once.certificate


@pytest.mark.parametrize("seed", [*SOME, *LATER])
def test_a_first_look_at_a_part_of_the_space_leaves_the_optimum(seed: int) -> None:
    looked = search(request(seed), params=SearchParams(looked_over_first=0))
    at_once = found(seed)
    assert looked.status == at_once.status
    assert looked.certificate.layouts == at_once.certificate.layouts
    if at_once.best:
        assert looked.lower_bound_s == pytest.approx(at_once.lower_bound_s, rel=1e-9)
        assert looked.best[0].step_time_s == pytest.approx(at_once.best[0].step_time_s, rel=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(240), 1005, *range(1009, 1012)]))
def test_search_equals_brute_force_many(seed: int) -> None:
    compare(seed)


def grouped(seed: int) -> PlanRequest:
    """A small problem with experts in each second or third layer."""
    draw, asked = random.Random(seed), request(seed)
    every = draw.choice([2, 2, 3])
    moe = MoeSpec(experts=4, top_k=2, moe_ffn_hidden=draw.choice([512, 2048]), every=every)
    layers = every * draw.choice([2, 3, 4])
    spec = asked.model.model_copy(update={"layers": layers, "mtp_layers": 0, "moe": moe})
    return replace(asked, model=spec)


@pytest.mark.parametrize(
    "seed",
    [3, *(pytest.param(n, marks=pytest.mark.soak) for n in some((127, 129)))],
)
def test_search_over_groups_of_layers_equals_brute_force(seed: int) -> None:
    check_against_brute_force(grouped(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(120, 140), 7, 11]))
def test_search_over_groups_of_layers_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(grouped(seed))


def on_a_projection(seed: int) -> PlanRequest:
    """A small problem whose experts work on a projection of the hidden width."""
    draw, asked = random.Random(f"latent {seed}"), request(seed)
    moe = MoeSpec(
        experts=4,
        top_k=2,
        moe_ffn_hidden=draw.choice([512, 2048]),
        shared_experts=draw.choice([0, 1]),
        latent_size=draw.choice([128, 512, 1024]),
    )
    return replace(asked, model=asked.model.model_copy(update={"moe": moe}))


@pytest.mark.parametrize("seed", [pytest.param(8, marks=pytest.mark.slow)])
def test_search_over_experts_on_a_projection_equals_brute_force(seed: int) -> None:
    check_against_brute_force(on_a_projection(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(1, 40)]))
def test_search_over_experts_on_a_projection_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(on_a_projection(seed))


def pipelined(seed: int) -> PlanRequest:
    """A small problem in a framework with seven schedules; memory decides between some of them."""
    draw = random.Random(seed)
    pp = draw.choice([2, 2, 4])
    spec = model(draw).model_copy(
        update={
            "layers": 2 * pp * draw.choice([1, 2]) - draw.choice([0, 0, 1]),
            "tied_embeddings": False,
            "mtp_layers": 0,
        }
    )
    moe = (
        None
        if spec.moe is None
        else spec.moe.model_copy(update={"shared_experts": 0, "dense_layers": 0})
    )
    return PlanRequest(
        model=spec.model_copy(update={"moe": moe}),
        cluster=cluster(draw.choice([4.0, 6.0, 8.0, 16.0]) + draw.random(), 16, None),
        gpus=2 * pp,
        global_batch=draw.choice([8, 16]),
        seq_len=2048,
        framework="torchtitan",
        pins={
            "cp": 1,
            "micro_batch": 1,
            "zero_stage": draw.choice([0, 2]),
            "pp": pp,
            "recompute": draw.choice(["none", "none", "full"]),
        },
        forbids=("ep", "idle-gpus"),
    )


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))]
)
def test_search_over_schedules_equals_brute_force(seed: int) -> None:
    check_against_brute_force(pipelined(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(4, 40), 1, 3]))
def test_search_over_schedules_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(pipelined(seed))


@pytest.mark.slow
def test_schedules_that_win_are_several() -> None:
    """Otherwise brute force would say little about them."""
    found = [search(pipelined(seed)).best for seed in (*range(16), 33)]
    names = {schedule_name(int(b[0].layout.schedule), int(b[0].layout.vpp)) for b in found if b}
    assert len(names) >= 3
    spaces = [space_of(pipelined(seed)) for seed in range(8)]
    offered = {schedule for one in spaces for pp in one.pp for _, schedule in one.pipelines(pp)}
    assert offered == {0, 1, 2, 3, 4, 5}


def test_cases_cover_what_they_should() -> None:
    asked = [request(seed) for seed in range(240)]
    assert sum(one.model.moe is not None for one in asked) > 60
    assert sum(one.gpus in (3, 6, 12) for one in asked) > 60
    assert sum(one.cluster.levels != () for one in asked) > 60


@pytest.mark.parametrize(
    "seed",
    [
        *(2003, 2004),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2001, 2017)),
        *(
            pytest.param(seed, marks=pytest.mark.soak)
            for seed in some((2005, 2000, 2002, 2006, 2007))
        ),
    ],
)
def test_bounds_are_bounds(seed: int) -> None:
    """Compute bound <= lower bound <= bound by mapping <= exact price; least memory <= memory of the plan."""
    space = space_of(request(seed))
    pricing = CostModelPricing(space.workload)
    degrees = space.degrees(space.workload.gpus)
    table = shape_table([space.workload], space.shapes())
    branches = [branch_of(space, pricing)]
    compute = DegreeScan(space, branches, table, degrees, lambda: None).bound_s
    layouts = space.layouts(degrees)
    rows = np.random.default_rng(seed).permutation(len(np.asarray(layouts.tp)))[:40]
    owner = np.repeat(np.arange(len(compute)), space.layouts_per_degrees(degrees))[rows]
    memory, again = pricing.least_memory_gib(layouts)
    some = replace(layouts, recompute_layers=again).take(rows)
    lower, mappings = pricing.lower_bound_s(some), pricing.mapping_bounds(some)
    assert np.all(compute[owner] <= lower * (1 + 1e-9))
    for at, bounds in enumerate(mappings):
        assert lower[at] <= bounds.least_s * (1 + 1e-9)
        free = replace(bounds, bound_s=np.full_like(bounds.bound_s, -np.inf))
        priced = pricing.exact(some.scalar(at), free, np.inf)
        if priced is not None:
            assert bounds.least_s <= priced.step_time_s * (1 + 1e-9)
            used = stage_memory_gib(space.workload, priced.layout, priced.stages)
            assert memory[rows[at]] <= max(used) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2000, 2006))
def test_virtual_stages_never_save_memory(seed: int) -> None:
    """What the search relies on when it drops layouts before it gives them virtual stages."""
    space = space_of(request(seed))
    pricing = CostModelPricing(space.workload)
    plain = space.variants(space.degrees(space.workload.gpus))
    scheduled = space.scheduled(plain)
    single, many = pricing.least_memory_gib(plain)[0], pricing.least_memory_gib(scheduled)[0]
    counts = space.pipeline_counts[np.asarray(plain.pp)]
    limit = usable_hbm_gib(space.workload)
    never = np.repeat(single > limit, counts)
    assert np.all(many[never] > limit)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1000, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some((8, 2))),
    ],
)
def test_one_joint_model_gives_the_same_optimum(seed: int) -> None:
    """Every (layout, mapping) priced exactly, in one CP-SAT model and in one shot."""
    asked = request(seed)
    space = space_of(asked)
    pricing, rules = CostModelPricing(space.workload), rules_for(space.workload)
    layouts = space.layouts(space.degrees(asked.gpus))
    memory, again = pricing.least_memory_gib(layouts)
    layouts = replace(layouts, recompute_layers=again)
    never = price_ns(1000.0)
    times = []
    for row, bounds in enumerate(pricing.mapping_bounds(layouts)):
        prices = []
        for k in range(len(bounds.bound_s)):
            one = replace(
                bounds,
                matrices={a: m[[k]] for a, m in bounds.matrices.items()},
                bound_s=np.zeros(1),
            )
            priced = pricing.exact(layouts.scalar(row), one, np.inf)
            prices.append(never if priced is None else price_ns(priced.step_time_s))
        times.append(np.array(prices or [never], dtype=np.int64))
    table = Candidates(workload=space.workload, layouts=layouts, memory_gib=memory)
    choice = solve(with_rules(build_model(times), rules, table), seed=0, time_limit_s=None)
    outcome = search(asked)
    assert choice.status == outcome.status == "optimal"
    assert times[choice.layout][choice.mapping] == price_ns(outcome.best[0].step_time_s)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1008, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in some((1005, 2))),
    ],
)
def test_the_k_best_are_the_k_best(seed: int) -> None:
    asked = request(seed)
    space = space_of(asked)
    layouts = space.layouts(space.degrees(asked.gpus))
    every = [
        seconds
        for row in range(len(np.asarray(layouts.tp)))
        for seconds in _least(space, layouts.scalar(row))
    ]
    found = [priced.step_time_s for priced in search(asked, top_k=5).best]
    assert len(found) == 5
    assert found == pytest.approx(sorted(every)[:5], rel=1e-9)


def test_of_a_layout_under_several_mappings_the_fastest_alone_is_among_the_k_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mappings come that no list has: one slower than the layout's price, then two that are faster."""
    asked = request(1008)
    before = search(asked, top_k=3).best
    second = before[1]
    shares = (1.5, 0.999, 0.998)
    further = [replace(second, step_time_s=share * second.step_time_s) for share in shares]
    monkeypatch.setattr(CostModelPricing, "beyond_the_list", lambda *_: further)
    best = search(asked, top_k=3).best
    layouts = [replace(each.layout, recompute_layers=0) for each in best]
    assert sorted(map(str, layouts)) == sorted(
        str(replace(each.layout, recompute_layers=0)) for each in before
    )
    seconds = [each.step_time_s for each in before]
    assert [each.step_time_s for each in best] == sorted(
        [seconds[0], further[2].step_time_s, seconds[2]]
    )


def test_the_model_of_slots_closes_nothing_while_the_next_best_is_wanted() -> None:
    """One price is there and two are asked for: the other layout is next, though its bound is above it."""
    asked = request(1008)
    priced = search(asked).best[0]
    space = space_of(asked)
    branches = [branch_of(space, CostModelPricing(space.workload))]
    chooser = SlotChooser(branches, SearchParams(), None, 0, Certificate())
    bounds = MappingBounds(matrices={}, bound_s=np.array([2.0 * priced.step_time_s]))
    other = chooser.add(0, replace(priced.layout, recompute_layers=0), bounds)
    assert chooser.choose(np.inf, [priced], 2, None) is other
    assert not chooser.is_settled
    assert chooser.choose(np.inf, [priced], 1, None) is None
    assert chooser.is_settled


def _least(space: Space, layout: Layout) -> list[float]:
    times = list(step_times(space, layout))
    return [min(times)] if times else []


def test_more_memory_or_bandwidth_never_hurts() -> None:
    asked = request(12)
    cluster = asked.cluster
    before = search(asked).best[0].step_time_s
    roomier = cluster.model_copy(
        update={"device": cluster.device.model_copy(update={"hbm_gib": 80.0})}
    )
    faster = cluster.model_copy(update={"nic_gbps_per_gpu": 800.0})
    assert search(replace(asked, cluster=roomier)).best[0].step_time_s <= before * (1 + 1e-9)
    assert search(replace(asked, cluster=faster)).best[0].step_time_s <= before * (1 + 1e-9)


def test_same_request_same_answer() -> None:
    assert search(request(12)) == search(request(12))


def test_an_interrupted_search_knows_a_bound() -> None:
    """Whatever was found and not found by then, the bound holds for the optimum."""
    asked = request(1005)
    best_s = search(asked).best[0].step_time_s
    space = space_of(asked)
    statuses = set()
    for limit_s in (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 10.0):
        branches = [branch_of(space, CostModelPricing(space.workload))]
        outcome = LayoutSearch(space, branches, time_limit_s=limit_s).run()
        statuses.add(outcome.status)
        if outcome.lower_bound_s is not None:
            assert outcome.lower_bound_s <= best_s * (1 + 1e-9)
        if outcome.best:
            assert outcome.best[0].step_time_s >= best_s * (1 - 1e-9)
    assert {"unknown", "optimal"} <= statuses


def test_time_that_ends_after_the_first_look_leaves_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = request(1005)
    best_s = search(asked).best[0].step_time_s

    def over(search: LayoutSearch, layout: object) -> None:
        raise OutOfTimeError

    monkeypatch.setattr(LayoutSearch, "_price_first", over)
    found = search(asked, params=SearchParams(looked_over_first=0))
    assert found.status == "feasible"
    assert found.best[0].step_time_s >= best_s * (1 - 1e-9)
    assert found.lower_bound_s is None or found.lower_bound_s <= best_s * (1 + 1e-9)


def test_the_first_look_takes_more_than_its_share_until_it_has_a_price() -> None:
    space = space_of(request(1005))
    branches = [branch_of(space, CostModelPricing(space.workload))]
    assert LayoutSearch(space, branches, time_limit_s=0.0).run().status == "unknown"
    found = LayoutSearch(
        space, branches, time_limit_s=0.0, sought=Sought(until_priced_s=60.0)
    ).run()
    assert found.status == "feasible"
    assert found.certificate.priced == 1


@pytest.mark.parametrize(
    "asked",
    [request(1000), request(1007), request(1013), request(1014), grouped(100), pipelined(8)],
    ids=["plain", "recomputed", "virtual", "dense-first", "unlike", "schedules"],
)
def test_layouts_priced_together_cost_what_they_cost_alone(asked: PlanRequest) -> None:
    """To the digit, with the same mapping, split and recomputed layers."""
    space = space_of(asked)
    pricing = CostModelPricing(space.workload)
    layouts = space.layouts(space.degrees(space.workload.gpus))
    count = layouts.broadcast_shape()[0]
    has_split = [
        any_stages(space.workload, layouts.scalar(row)) is not None for row in range(count)
    ]
    layouts = layouts.take(np.flatnonzero(has_split)[:: 1 + count // 100])
    together = dict(pricing.exact_each(layouts))
    assert list(together) == list(range(layouts.broadcast_shape()[0]))
    assert any(together.values())
    for row, priced in together.items():
        layout = layouts.scalar(row)
        table = pricing.mappings(layout)
        every = MappingBounds(matrices=table, bound_s=np.full(len(table["tp"]), -np.inf))
        assert priced == pricing.exact(layout, every, np.inf)


def test_two_processes_price_what_one_does() -> None:
    asked = replace(request(1001), method="exhaustive", top_k=20)
    lines: list[str] = []
    one = search_executions(asked, CostModelPricing, lines.append)
    with on_processes(2):
        two = search_executions(asked, CostModelPricing)
    assert one == two
    assert one.certificate.priced > 20
    assert lines[-1].endswith("layouts priced")
    done, every = lines[-1].split()[0:3:2]
    assert done == every


def test_every_layout_of_a_space_of_tens_of_thousands_is_priced() -> None:
    spec = ModelSpec(layers=8, hidden=2048, ffn_hidden=8192, heads=16, kv_heads=8, vocab=32768)
    asked = PlanRequest(
        model=spec, cluster=cluster(2.6, 16), gpus=16, global_batch=512, seq_len=4096
    )
    space = space_of(asked)
    branches = [branch_of(space, CostModelPricing(space.workload))]
    every, found = search_exhaustively(branches), LayoutSearch(space, branches).run()
    assert 50_000 < every.certificate.layouts < LARGEST_SPACE == 200_000
    assert every.status == found.status == "optimal"
    assert found.best[0].step_time_s == pytest.approx(every.best[0].step_time_s, rel=1e-12)
