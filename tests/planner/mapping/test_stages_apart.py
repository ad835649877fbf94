"""Stages priced by where their own expert groups lie: steps, splits and mappings, against own sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from meshwright.cluster_specs.schema import ClusterSpec, FabricLevelSpec, NodeSpec
from meshwright.costmodel.estimate import estimate_layout, stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layer_kinds import kind_times
from meshwright.costmodel.layout import Layout, Placement, StagedPlacement
from meshwright.costmodel.rank_load import chunk_passes
from meshwright.costmodel.recount import recounted_placement
from meshwright.costmodel.simulator import simulate
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.exact_cost import MappingBounds
from meshwright.planner.bounds.layer_split import level_splits
from meshwright.planner.mapping.effective import PROFILE, PlacedAs
from meshwright.planner.mapping.pricing import MappedPricing
from meshwright.planner.mapping.slots import ranks_of
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from tests.attack.own_places import placement_by_stage
from tests.planner.mapping.irregular import assignments, legal_layouts, random_request


def uneven_request(seed: int) -> PlanRequest:
    """OLMoE in stages whose expert groups take two nodes each, on leaves that cut some of them."""
    chance = np.random.default_rng(seed)
    leaves = [(3, 1), (5, 1), (2, 1, 1), (3, 2, 1), (1, 3), (3, 1, 1, 1)][seed % 6]
    nodes = sum(leaves)
    base = random_request(3).cluster
    over = float(chance.choice([4, 8, 16]))
    cluster = base.model_copy(
        update={
            "levels": tuple(
                FabricLevelSpec(name=name, gpus=gpus, oversubscription=ratio)
                for name, gpus, ratio in (("leaf", 32, 1.0), ("pod", 64, over), ("core", 256, over))
            ),
            "nodes": tuple(
                NodeSpec(name=f"n{leaf}-{at}", leaf=f"leaf-{leaf}", pod="pod-0")
                for leaf, count in enumerate(leaves)
                for at in range(count)
            ),
            "gpus": 8 * nodes,
        }
    )
    pins: dict[str, int | str] = {
        "tp": 4, "cp": 1, "etp": 1, "ep": 16, "pp": nodes // 2, "vpp": 2, "micro_batch": 1,
        "recompute": "none", "zero_stage": 1,
    }  # fmt: skip
    return replace(
        random_request(3),
        model=load_catalog_model("olmoe-1b-7b"),
        cluster=cluster,
        gpus=8 * nodes,
        global_batch=4 * (nodes // 2) * int(chance.choice([1, 2, 4])),
        seq_len=int(chance.choice([2048, 4096])),
        pins=pins,
        forbids=("optimizer-offload",),
        without=("deepep", "hybridep", "ep-overlap", "cuda-graph", "cp-a2a"),
    )


def own_members(cluster: ClusterSpec, layout: Layout, ranks: list[tuple[int, int]]) -> list[int]:
    """The fewest members of an expert group beside any of its ranks in a leaf, stage by stage."""
    per_stage, size = len(ranks) // int(layout.pp), int(layout.ep)
    fewest = []
    for stage in range(int(layout.pp)):
        own = ranks[stage * per_stage : (stage + 1) * per_stage]
        groups = [own[first : first + size] for first in range(0, per_stage, size)]
        leaves = [[cluster.nodes[node].leaf for node, _ in group] for group in groups]
        fewest.append(min(leaf.count(each) for leaf in leaves for each in leaf))
    return fewest


def best_split_s(workload: Workload, layout: Layout, worst: Placement, members: list[int]) -> float:
    """Interleaved 1F1B under level splits: layers of each stage as long as where all stages lie so."""
    layers, pp, vpp = workload.model.layers, int(layout.pp), int(layout.vpp)
    times = []
    for each in members:
        ep = np.array(worst.ep)
        ep[1:-1] = np.maximum(ep[0], each)
        times.append(kind_times(make_context(workload, layout, replace(worst, ep=ep))))
    best = inf
    for stages in level_splits(layers, pp, vpp):
        seconds = np.array(
            [
                [n * float(np.asarray(t.layers[-1].seconds)) for n in own]
                for own, t in zip(stages, times, strict=True)
            ]
        )
        seconds[0, 0] += float(np.asarray(times[0].embedding.seconds))
        seconds[-1, -1] += float(np.asarray(times[-1].head.seconds))
        rest = exact_step(make_context(workload, layout, worst), stages).parts
        ranks_s = seconds.sum(axis=1)
        pipeline_s = (
            int(layout.num_micro_batches) * seconds.max(axis=0).sum()
            + (ranks_s.sum() - ranks_s.max()) / vpp
        )
        beside_s = sum(float(np.asarray(rest[name])) for name in ("optimizer", "step_overhead"))
        best = min(best, float(pipeline_s) + beside_s)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_plan_is_no_slower_than_any_assignment_with_stages_of_their_own(
    seed: int,
) -> None:
    request = uneven_request(seed)
    tables, least_s, least_sum_s = legal_layouts(request), inf, inf
    pricing: MappedPricing = tables.pricing
    for layout in tables.layouts():
        instance = pricing.instance(layout)
        if instance is None:
            continue
        workload = pricing.workload.on(int(layout.gpus))
        alone = Layout(**{name: np.array([value]) for name, value in vars(layout).items()})
        bound_s = float(pricing.apart_bounds_s(alone)[0])
        at_worst = pricing.exact(layout, pricing.mapping_bounds(alone)[0], inf)
        worst_s = inf if at_worst is None else at_worst.step_time_s
        seen = set()
        for assignment in assignments(instance.problem):
            ranks = ranks_of(instance, assignment)
            placed = recounted_placement(workload.cluster, layout, ranks, by_stage=True)
            assert isinstance(placed, StagedPlacement)
            members = own_members(workload.cluster, layout, ranks)
            assert placed.stage_ep[:, 1].tolist() == members
            key = b"".join(np.asarray(m).tobytes() for m in vars(placed).values())
            if key in seen:
                continue
            seen.add(key)
            one = replace(placed, **{name: np.asarray(m)[None] for name, m in vars(placed).items()})
            table = MappingBounds(
                matrices={PROFILE: np.zeros((1, 1), dtype=np.int64)}, bound_s=np.full(1, -inf)
            )
            priced = PlacedAs(pricing.workload, one).exact(layout, table, inf)
            least_s = min(least_s, inf if priced is None else priced.step_time_s)
            assert priced is None or min(bound_s, worst_s) <= priced.step_time_s * (1 + 1e-9)
            worst = Placement(**{name: m for name, m in vars(placed).items() if name != "stage_ep"})
            least_sum_s = min(least_sum_s, best_split_s(workload, layout, worst, members))
    plan = fastest_plan(request)
    assert plan.objective.step_time_s is not None
    assert plan.objective.lower_bound_s is not None
    assert plan.objective.step_time_s == pytest.approx(least_s, rel=1e-9)
    assert plan.objective.lower_bound_s <= least_s * (1 + 1e-9)
    assert plan.status == "optimal"
    assert least_sum_s > 0.9 * least_s
    assert not list(faults(request, plan))


def test_a_staged_step_is_the_sum_of_its_stages_and_of_its_passes() -> None:
    request = uneven_request(3)
    tables = legal_layouts(replace(request, pins={**request.pins, "vpp": 1}))
    layout = next(tables.layouts())
    workload = tables.pricing.workload
    instance = tables.pricing.instance(layout)
    assert instance is not None
    ranks = ranks_of(instance, instance.problem.hostname_assignment())
    placed = recounted_placement(workload.cluster, layout, ranks)
    ep = np.repeat(placed.ep[None], 3, axis=0)
    ep[0, 1:] = 8
    ep[1:, 1:] = 16
    staged = StagedPlacement(**{**vars(placed), "ep": ep[0]}, stage_ep=ep)
    context, stages = make_context(workload, layout, staged), ((4,), (6,), (6,))
    step = exact_step(context, stages)
    seconds = []
    for stage, (size,) in enumerate(stages):
        alone = make_context(workload, layout, Placement(**{**vars(placed), "ep": ep[stage]}))
        times = kind_times(alone)
        assert times.moe is not None
        seconds.append(size * float(np.asarray(times.moe.seconds)))
        seconds[-1] += float(np.asarray(times.embedding.seconds)) * (stage == 0)
        seconds[-1] += float(np.asarray(times.head.seconds)) * (stage == 2)
    beside = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
    pipeline_s = float(np.asarray(step.seconds)) - sum(
        float(np.asarray(step.parts[name])) for name in beside
    )
    m = int(layout.num_micro_batches)
    assert pipeline_s == pytest.approx((m - 1) * max(seconds) + sum(seconds), rel=1e-12)
    passes = chunk_passes(context, stages)
    assert passes.forward_s.sum() + passes.backward_s.sum() == pytest.approx(sum(seconds))


# One virtual stage each: every assignment under every partition of the layers.


ONE_EACH = ("moonlight-16b-a3b", "olmoe-1b-7b", "gpt-oss-20b")
"""Dense layers ahead of those with experts, layers alike, windows in turn with full attention."""


def one_each_request(number: int) -> PlanRequest:
    """Expert groups over two nodes on leaves that cut some of them, behind thin links; a stage on two."""
    chance = np.random.default_rng(number)
    leaves = [(3, 1), (3, 2, 1), (2, 1, 1), (5, 1), (3, 1, 1, 1)][number % 5]
    request = uneven_request(number)
    over = float(chance.choice([4, 16, 64]))
    levels = tuple(
        level.model_copy(update={"oversubscription": over}) if level.name != "leaf" else level
        for level in request.cluster.levels
    )
    nodes = tuple(
        NodeSpec(name=f"n{leaf}-{at}", leaf=f"leaf-{leaf}", pod="pod-0")
        for leaf, count in enumerate(leaves)
        for at in range(count)
    )
    cluster = request.cluster.model_copy(
        update={"levels": levels, "nodes": nodes, "gpus": 8 * len(nodes)}
    )
    pp = len(nodes) // 2
    recompute = str(chance.choice(["none", "none", "full"]))
    return replace(
        request,
        model=load_catalog_model(ONE_EACH[number % 3]),
        cluster=cluster,
        gpus=cluster.gpus,
        global_batch=4 * int(chance.choice([max(pp - 1, 1), pp, 2 * pp, 4 * pp])),
        pins={**request.pins, "pp": pp, "vpp": 1, "recompute": recompute},
    )


def partitions(workload: Workload, layout: Layout) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All that memory holds."""
    model, pp = workload.model, int(layout.pp)
    for cuts in combinations((model.stage_begins or range(model.layers))[1:], pp - 1):
        stages = tuple((end - begin,) for begin, end in pairwise([0, *cuts, model.layers]))
        if np.max(stage_memory_gib(workload, layout, stages)) <= usable_hbm_gib(workload):
            yield stages


def own_pipeline_s(
    workload: Workload, layout: Layout, placed: StagedPlacement, sizes: Sequence[int]
) -> float:
    """1F1B, layer by layer: as it is played where layers are unlike, else of even ranks' passes."""
    model, begin = workload.model, 0
    names = model.unlike_layers or ("dense",) * model.dense_layers + ("moe",) * model.moe_layers
    number = {name: at for at, name in enumerate(dict.fromkeys(names))}
    forward, backward = [], []
    for stage, size in enumerate(sizes):
        plain = {name: m for name, m in vars(placed).items() if name not in ("ep", "stage_ep")}
        alone = Placement(**plain, ep=placed.stage_ep[stage])
        times = kind_times(make_context(workload, layout, alone))
        held = [times.layers[number[name]] for name in names[begin : begin + size]]
        held += [times.embedding] * (stage == 0) + [times.head] * (stage == len(sizes) - 1)
        assert times.mtp is None
        backward.append(sum(float(np.asarray(kind.backward_s)) for kind in held))
        forward.append(sum(float(np.asarray(kind.seconds)) for kind in held) - backward[-1])
        begin += size
    m = int(layout.num_micro_batches)
    if model.unlike_layers:
        return simulate(forward, backward, pp=len(sizes), num_micro_batches=m).seconds
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return (m - 1) * max(both) + sum(both)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 7))]
)
def test_no_assignment_and_partition_beats_the_plan_with_one_virtual_stage_each(
    number: int,
) -> None:
    request = one_each_request(number)
    tables, least_s, best = legal_layouts(request), inf, None
    for layout in tables.layouts():
        instance = tables.pricing.instance(layout)
        if instance is None:
            continue
        workload = tables.pricing.workload.on(int(layout.gpus))
        every: dict[bytes, Placement] = {}
        for assignment in assignments(instance.problem):
            ranks = ranks_of(instance, assignment)
            placed = placement_by_stage(workload.cluster, len(ranks), layout, ranks)
            every[b"".join(np.asarray(m).tobytes() for m in vars(placed).values())] = placed
        for stages in partitions(workload, layout):
            for placed in every.values():
                step_s = float(
                    np.asarray(estimate_layout(workload, layout, placed, stages).step_time_s)
                )
                if step_s < least_s:
                    least_s, best = step_s, (workload, layout, placed, stages)
    plan = fastest_plan(request)
    assert plan.status == "optimal"
    assert plan.objective.step_time_s == pytest.approx(least_s, rel=1e-9)
    assert not list(faults(request, plan))
    assert best is not None
    workload, layout, placed, stages = best
    assert isinstance(placed, StagedPlacement)
    if int(layout.recompute):
        return
    step = exact_step(make_context(workload, layout, placed), stages)
    beside = ("pipeline_p2p", "dp_comm", "optimizer", "step_overhead", "scale")
    beside_s = sum(float(np.asarray(step.parts[name])) for name in beside)
    pipeline_s = own_pipeline_s(workload, layout, placed, [size for (size,) in stages])
    assert least_s == pytest.approx(pipeline_s + beside_s, rel=1e-9)
