"""The pipeline split against enumeration of every split."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.footprint import main_layer_rooms, peak_bounds, stage_memory_gib
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds.combination_costs import memory_rows
from meshwright.planner.bounds.layer_split import (
    ALL_LAYERS,
    FitsRank,
    SplitCosts,
    balanced_stages,
    even_chunks,
    frontier,
    level_splits,
)
from meshwright.planner.bounds.paces import MemoryFit
from meshwright.planner.search.space import even_virtual_stages
from tests.planner.bounds.best_split import best_split

Counts = tuple[int, ...]


def _all_splits(costs: SplitCosts) -> Iterator[tuple[Counts, Counts]]:
    """(layers, leading layers) of every rank, for every split of the space: straight from its definition."""

    def grow(
        rank: int, left: int, before: int, counts: Counts, leading: Counts
    ) -> Iterator[tuple[Counts, Counts]]:
        if rank == costs.pp:
            if left == 0 and sum(leading) == costs.leading:
                yield counts, leading
            return
        for n in range(1, left + 1):
            stages = even_chunks(rank, n, costs.vpp)
            if min(stages) < max(
                1, costs.recompute_layers if costs.recompute_layers < costs.layers else 1
            ):
                continue
            d = min(max(costs.leading - before, 0), stages[0])
            yield from grow(rank + 1, left - n, before + stages[0], (*counts, n), (*leading, d))

    yield from grow(0, costs.layers, 0, (), ())


def _price(
    costs: SplitCosts, counts: Counts, leading: Counts, per_load: float, per_expert: float
) -> float:
    times = [costs.rank_s(r, n, d) for r, (n, d) in enumerate(zip(counts, leading, strict=True))]
    loads = [costs.rank_load(r, n, d) for r, (n, d) in enumerate(zip(counts, leading, strict=True))]
    experts = [n - d for n, d in zip(counts, leading, strict=True)]
    experts[-1] += costs.last_experts
    return costs.time_s(times) + per_load * max(loads) + per_expert * max(experts)


def _random_costs(draw: random.Random) -> SplitCosts:
    pp, vpp = draw.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
    layers = draw.randint(pp * vpp, pp * vpp + 7)
    return SplitCosts(
        pp=pp,
        vpp=vpp,
        layers=layers,
        leading=draw.choice([0, 0, 1, 2]) if layers > 2 else 0,
        num_micro_batches=draw.choice([pp, 2 * pp, 8 * pp]),
        layer_s=draw.uniform(1, 2),
        leading_s=draw.uniform(0.3, 2),
        first_s=draw.uniform(0, 1),
        last_s=draw.uniform(0, 3),
        layer_recompute_s=draw.uniform(0, 1),
        leading_recompute_s=draw.uniform(0, 1),
        recompute_layers=draw.choice([0, 0, 1, 2, ALL_LAYERS]),
        layer_load=draw.uniform(1, 2),
        leading_load=draw.uniform(1, 2),
        first_load=draw.uniform(0, 2),
        last_load=draw.uniform(0, 2),
        experts=True,
        last_experts=draw.choice([0, 0, 1]),
    )


def _random_limit(draw: random.Random, costs: SplitCosts) -> FitsRank | None:
    if draw.random() < 0.5:
        return None
    caps = [draw.randint(1, costs.layers) for _ in range(costs.pp)]
    return lambda rank, layers, leading: layers + leading <= caps[rank]


@pytest.mark.parametrize("seed", range(400))
def test_frontier_holds_the_best_of_all_splits(seed: int) -> None:
    draw = random.Random(seed)
    costs = _random_costs(draw)
    fits = _random_limit(draw, costs)
    per_load, per_expert = (
        draw.choice([0.0, draw.uniform(0, 2)]),
        draw.choice([0.0, draw.uniform(0, 2)]),
    )
    prices = [
        _price(costs, counts, leading, per_load, per_expert)
        for counts, leading in _all_splits(costs)
        if fits is None
        or all(fits(r, n, d) for r, (n, d) in enumerate(zip(counts, leading, strict=True)))
    ]
    slack = (per_load + per_expert) * 1000
    found = []
    for split in frontier(costs, slack, fits):
        counts = tuple(sum(rank) for rank in split.stages)
        before, leading = 0, []
        for rank in split.stages:
            leading.append(min(max(costs.leading - before, 0), rank[0]))
            before += rank[0]
        assert sum(counts) == costs.layers
        found.append(_price(costs, counts, tuple(leading), per_load, per_expert))
    if not prices:
        assert not found
        return
    assert min(found) == pytest.approx(min(prices), rel=1e-12)


def test_head_takes_layers_from_the_last_rank() -> None:
    # 8 layers of 1 s and a head of 2 s on 2 ranks: 5 + 3 is even, 4 + 4 is not. m = 4: 4 * 5 + 5.
    split = best_split(
        SplitCosts(pp=2, vpp=1, layers=8, num_micro_batches=4, layer_s=1.0, last_s=2.0)
    )
    assert split is not None
    assert split.stages == ((5,), (3,))
    assert split.time_s == pytest.approx(25.0)


def test_interleaving_divides_the_bubble() -> None:
    # Two ranks of two virtual stages, 1 s a layer: 4 * 4 + 4 / 2.
    split = best_split(SplitCosts(pp=2, vpp=2, layers=8, num_micro_batches=4, layer_s=1.0))
    assert split is not None
    assert split.stages == ((2, 2), (2, 2))
    assert split.time_s == pytest.approx(18.0)


def test_memory_moves_layers_off_a_full_rank() -> None:
    costs = SplitCosts(pp=2, vpp=1, layers=8, num_micro_batches=4, layer_s=1.0)
    tight = best_split(costs, lambda rank, layers, leading: rank > 0 or layers <= 3)
    assert tight is not None
    assert tight.stages == ((3,), (5,))
    assert best_split(costs, lambda rank, layers, leading: layers <= 3) is None


def test_no_split_has_an_empty_stage() -> None:
    assert best_split(SplitCosts(pp=4, vpp=2, layers=7, num_micro_batches=4, layer_s=1.0)) is None
    assert balanced_stages(7, 4, 2) is None
    assert balanced_stages(7, 3, 2) == ((1, 2), (1, 1), (1, 1))


@pytest.mark.parametrize("recomputed", [0, 1, ALL_LAYERS])
@pytest.mark.parametrize(
    ("name", "pp", "vpp"),
    [("llama-3-70b", 4, 4), ("deepseek-v2", 4, 3), ("qwen3-30b-a3b", 8, 2)],
)
def test_memory_bounds_lie_below_splits_with_shorter_ends(
    name: str, pp: int, vpp: int, recomputed: int
) -> None:
    """Rows of the CP-SAT model, rooms and peaks, where the first virtual stage may be shorter or empty."""
    layout = Layout(
        dp=2,
        pp=pp,
        vpp=vpp,
        micro_batch=1,
        num_micro_batches=2 * pp,
        recompute=int(Recompute.FULL) if recomputed else 0,
        recompute_layers=recomputed,
    )
    model = load_catalog_model(name)
    work = Workload(
        model=model,
        cluster=read_cluster("dgx-a100"),
        gpus=2 * pp,
        global_batch=4 * pp,
        seq_len=4096,
    )
    rows, peaks = memory_rows(work, layout), peak_bounds(work, layout)
    least_gib = float(peaks.peak_gib(np.array([recomputed]))[0])
    splits = level_splits(model.layers, pp, vpp, empty_ends=True)
    assert len({stages[0][0] for stages in splits}) > 1
    for stages in splits:
        if recomputed == 1 and min(map(min, stages)) < 1:
            continue
        held_gib = stage_memory_gib(work, layout, stages)
        assert least_gib <= max(held_gib) * (1 + 1e-9)
        rooms = main_layer_rooms(work, layout.flat(), float(max(held_gib)) * (1 + 1e-9))[0]
        leading = 1 if model.moe_layers and model.dense_layers else 0  # DeepSeek's one dense layer
        for rank, (row, chunks) in enumerate(zip(rows, stages, strict=True)):
            # The first chunk of the model that is not empty holds it.
            dense = leading * (rank == (0 if stages[0][0] else 1))
            again = sum(min(recomputed, layers) for layers in chunks)
            row_gib = row.fixed_gib + row.layer_gib * sum(chunks) + row.leading_gib * dense
            assert row_gib - row.relief_gib * again <= held_gib[rank] * (1 + 1e-9)
            assert rooms[rank] >= sum(chunks) - dense


def test_leading_layers_may_begin_behind_an_empty_first_chunk() -> None:
    """DeepSeek's one dense layer may lie on rank 1 then; with one stage a rank it lies on rank 0."""
    work = Workload(
        model=load_catalog_model("deepseek-v2-lite"),
        cluster=read_cluster("dgx-a100"),
        gpus=4,
        global_batch=16,
        seq_len=4096,
    )
    numbers = {}
    for vpp in (1, 2):
        fit = MemoryFit(work, Layout(pp=4, vpp=vpp, num_micro_batches=16))
        numbers[vpp] = [len(by_leading) for by_leading in fit.rooms(27)]
    assert numbers == {1: [2, 1, 1, 1], 2: [2, 2, 1, 1]}


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 5), (2, 10), (5, 4), (16, 1), (21, 1)])
def test_splits_of_runs_begin_where_stages_may(pp: int, vpp: int) -> None:
    """GLM-5.2: two layers, then nineteen runs of four; as many stages as runs at most."""
    begins = load_catalog_model("glm-5.2").stage_begins
    splits = [*level_splits(78, pp, vpp, begins=begins), balanced_stages(78, pp, vpp, begins)]
    for stages in splits:
        assert stages is not None
        chunks = [size for level in zip(*stages, strict=True) for size in level]
        assert sum(chunks) == 78
        assert {sum(chunks[:number]) for number in range(len(chunks))} <= set(begins)
    assert balanced_stages(78, 22, 1, begins) is None
    assert ((2, 4, 4, 4, 4), *((4,) * 5,) * 3) in level_splits(78, 4, 5, begins=begins)


def test_virtual_stages_deal_runs_out_evenly() -> None:
    """In 19.5 runs of four layers: 20 virtual stages, or 21 and 22 with the ends counted."""
    begins = load_catalog_model("glm-5.2").stage_begins
    assert even_virtual_stages(4, 78, 0, begins=begins) == (1, 5)
    assert even_virtual_stages(2, 78, 0, empty_ends=True, begins=begins) == (1, 2, 5, 10, 11)
