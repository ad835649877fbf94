"""The bound on the slowest rank, against every split that fits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.footprint import (
    layer_rooms,
    main_layer_rooms,
    stage_memory_gib,
    usable_hbm_gib,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.rank_load import least_busiest_in_rooms_s
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.layer_split import (
    ALL_LAYERS,
    SplitCosts,
    balanced_stages,
    least_busiest_rank_s,
    level_splits,
)
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.space import space_of
from tests.planner.bounds.test_level_pace import main_layers
from tests.planner.search.test_planner_optimum import cluster, request, step_times


def slowest_of_best(costs: SplitCosts, rooms: list[list[int]]) -> float:
    """The least slowest rank over every way to deal the layers out, leading ones first."""
    best = inf
    for counts in product(range(costs.fewest, costs.most + 1), repeat=costs.pp):
        if sum(counts) != costs.layers:
            continue
        left, times = costs.leading, []
        for rank, layers in enumerate(counts):
            leading = min(left, layers)
            left -= leading
            if leading >= len(rooms[rank]) or layers > rooms[rank][leading]:
                break
            times.append(costs.rank_s(rank, layers, leading))
        else:
            best = min(best, max(times))
    return best


def test_never_above_the_best_split_and_often_equal() -> None:
    chance = random.Random(4)
    equal = infeasible = 0
    for _ in range(300):
        pp, layers = chance.randint(1, 4), chance.randint(4, 9)
        leading = chance.choice([0, 0, 1, 2])
        costs = SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            leading=leading,
            num_micro_batches=4,
            layer_s=chance.uniform(1, 3),
            leading_s=chance.uniform(0.2, 3),
            first_s=chance.uniform(0, 2),
            last_s=chance.uniform(0, 4),
        )
        rooms = []
        for rank in range(pp):
            room = chance.randint(1, layers)
            rooms.append(
                [min(layers, room + some) for some in range(leading + 1 if rank < leading else 1)]
            )
        bound, best = least_busiest_rank_s(costs, rooms), slowest_of_best(costs, rooms)
        assert bound <= best
        equal += bound == best < inf
        infeasible += best == inf
    assert equal > 150
    assert infeasible > 10


def test_a_rank_without_room_for_its_layer_leaves_nothing() -> None:
    costs = SplitCosts(pp=2, vpp=1, layers=4, num_micro_batches=1, layer_s=1.0)
    assert least_busiest_rank_s(costs, [[4], [0]]) == inf
    assert least_busiest_rank_s(costs, [[4], [1]]) == 3.0
    assert least_busiest_rank_s(costs, [[4], [4]]) == 2.0


def test_the_bound_of_many_layouts_at_once_is_that_of_the_best_split() -> None:
    chance = random.Random(5)
    for _ in range(400):
        ranks, layers = chance.randint(1, 4), chance.randint(2, 9)
        rooms = [chance.randint(0, layers) for _ in range(ranks)]
        layer_s, end_s, at = (
            chance.uniform(1, 2),
            chance.choice([0.0, chance.uniform(0, 5)]),
            ranks - 1,
        )
        first_s = chance.choice([0.0, chance.uniform(0, 5)])
        splits = (
            split for split in product(*(range(room + 1) for room in rooms)) if sum(split) == layers
        )
        best = min(
            (
                max(
                    n * layer_s + end_s * (rank == at) + first_s * (rank == 0)
                    for rank, n in enumerate(split)
                )
                for split in splits
            ),
            default=inf,
        )
        bounds = least_busiest_in_rooms_s(
            np.array([rooms], dtype=float), layers, layer_s, end_s, at, first_s=first_s
        )
        bound = float(bounds[0])
        assert bound <= best * (1 + 1e-12)
        assert (bound == inf) == (best == inf)
        # A rank that holds no layer may take longer than the bound counts.
        if max(first_s, end_s) <= bound:
            assert bound >= best * (1 - 1e-8)


def test_no_rank_of_a_split_that_fits_holds_more_than_its_room() -> None:
    assert sum(ranks_in_their_rooms(seed) for seed in range(3000, 3008)) > 100


def ranks_in_their_rooms(seed: int) -> int:
    """Checks balanced splits of some layouts; returns how many ranks that were."""
    space = space_of(request(seed))
    workload, limit = space.workload, usable_hbm_gib(space.workload)
    layouts = space.layouts(space.degrees(workload.gpus))
    rooms = main_layer_rooms(workload, layouts, limit)
    model, checked = workload.model, 0
    for row in np.random.default_rng(seed).permutation(len(rooms))[:60]:
        one = layouts.scalar(int(row))
        stages = balanced_stages(model.layers, int(one.pp), int(one.vpp))
        if stages is None or max(stage_memory_gib(workload, one, stages)) > limit:
            continue
        leading = model.dense_layers if model.moe_layers else 0
        for rank, sizes in enumerate(stages):
            assert sum(sizes) - (leading if rank < leading else 0) <= rooms[row, rank]
            checked += 1
    return checked


def request_with_leading(seed: int) -> PlanRequest:
    """A pipeline of a model with leading dense layers in about as much memory as it needs."""
    draw = random.Random(seed)
    leading = draw.randint(1, 3)
    spec = ModelSpec(
        layers=leading + draw.randint(2, 5),
        hidden=2048,
        ffn_hidden=draw.choice([2048, 8192, 16384]),
        heads=16,
        kv_heads=draw.choice([4, 16]),
        vocab=8192,
        mtp_layers=draw.choice([0, 1]),
        moe=MoeSpec(experts=4, top_k=2, moe_ffn_hidden=1024, dense_layers=leading),
    )
    pp = draw.choice([2, 3, 4])
    return PlanRequest(
        model=spec,
        cluster=cluster(draw.uniform(4.0, 8.0), 16),
        gpus=pp,
        global_batch=draw.choice([4, 8]),
        seq_len=draw.choice([2048, 4096]),
        pins={"pp": pp, "vpp": 1, "recompute": draw.choice(["none", "full"]), "micro_batch": 1},
    )


@pytest.mark.soak
def test_leading_dense_layers_and_their_room_are_bounded_below_every_split() -> None:
    tight = sum(bounded_with_leading(seed) for seed in range(8))
    assert tight > 8


def bounded_with_leading(seed: int) -> int:
    """Checks the bounds of some layouts; returns how many are near the best split."""
    space = space_of(request_with_leading(seed))
    pricing = CostModelPricing(space.workload)
    layouts = space.layouts(space.degrees(space.workload.gpus))
    order = np.random.default_rng(seed).permutation(layouts.broadcast_shape()[0])[:4]
    layouts = layouts.take(order)
    _, again = pricing.least_memory_gib(layouts)
    layouts = replace(layouts, recompute_layers=again)
    tight = 0
    for row, bounds in enumerate(pricing.mapping_bounds(layouts)):
        best_s = min(step_times(space, layouts.scalar(row)), default=inf)
        assert bounds.least_s <= best_s * (1 + 1e-9)
        tight += 0.75 * best_s < bounds.least_s < inf
    return tight


@pytest.mark.slow
def test_rank_0_has_the_room_for_all_leading_layers_that_memory_leaves() -> None:
    assert sum(main_layers_beside_leading(seed) for seed in range(100, 120)) > 60


def main_layers_beside_leading(seed: int) -> int:
    """Checks splits that fit with all leading layers on rank 0; returns how many that were."""
    space = space_of(request_with_leading(seed))
    workload, limit = space.workload, usable_hbm_gib(space.workload)
    layouts = space.layouts(space.degrees(workload.gpus))
    every = np.where(np.asarray(layouts.recompute) & int(Recompute.FULL), ALL_LAYERS, 0)
    layouts = replace(layouts, recompute_layers=every)
    in_front = np.ones(layouts.broadcast_shape(), dtype=np.bool_)
    rooms, checked = main_layer_rooms(workload, layouts, limit, in_front), 0
    model = workload.model
    for row in range(0, len(rooms), max(1, len(rooms) // 20)):
        one = layouts.scalar(row)
        for counts in product(range(1, model.layers + 1), repeat=int(one.pp)):
            if sum(counts) != model.layers or counts[0] < model.dense_layers:
                continue
            stages = tuple((count,) for count in counts)
            if max(stage_memory_gib(workload, one, stages)) <= limit:
                assert counts[0] - model.dense_layers <= rooms[row, 0]
                checked += 1
    return checked


@pytest.mark.parametrize("recomputed", [0, 1, 2, 40])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 8), (4, 4), (2, 3)])
def test_no_split_that_fits_is_without_room_for_its_first_virtual_stage(
    pp: int, vpp: int, recomputed: int
) -> None:
    """Rank 0 holds its first virtual stage of more micro-batches than its others."""
    layout = Layout(
        dp=2,
        pp=pp,
        vpp=vpp,
        micro_batch=2,
        num_micro_batches=4 * pp,
        recompute=int(Recompute.FULL) if recomputed else 0,
        recompute_layers=recomputed,
    )
    for name in ("llama-3-8b", "qwen3-30b-a3b", "deepseek-v2-lite"):
        model = load_catalog_model(name)
        work = Workload(
            model=model,
            cluster=read_cluster("dgx-h100"),
            gpus=2 * pp,
            global_batch=16 * pp,
            seq_len=4096,
        )
        leading = model.dense_layers if model.moe_layers else 0
        splits = level_splits(model.layers, pp, vpp, empty_ends=True)
        every_gib = [float(max(stage_memory_gib(work, layout, stages))) for stages in splits]
        limits = np.quantile(every_gib, [0.0, 0.25, 0.5, 0.75])
        refused = 0
        for limit in limits:
            rooms = layer_rooms(work, layout.flat(), float(limit) * (1 + 1e-9))
            for stages, held_gib in zip(splits, every_gib, strict=True):
                main = np.array([main_layers(stages, leading)], dtype=np.float64)
                in_first = np.array([max(stages[0][0] - leading, 0.0)])
                holds = bool(rooms.hold(main, in_first)[0, 0])
                assert holds or held_gib > limit
                refused += not holds
        assert refused > 0
