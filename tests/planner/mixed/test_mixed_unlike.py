"""Pipelines of models whose layers differ, through unlike parts, against a brute force of its own.

Each rank holds one part of the sequence of layers. The search keeps few ways to cut it up, and its bounds
count layers in units: either may claim an optimum that is none.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import yaml

import meshwright
from meshwright.cluster_specs.reader import MixedClusterSpec, PartSpec
from meshwright.costmodel.mixed import hand_overs_s
from meshwright.costmodel.rank_load import chunk_loads
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.analysis.neighbours import parts_neighbours
from meshwright.planner.analysis.timeline import trace_of
from meshwright.planner.launch.plan_files import mixed_files
from meshwright.planner.mixed.document import MixedRequest, Pipeline
from meshwright.planner.mixed.promising import KernelMaker, PromisingRow, promising_rows
from meshwright.planner.mixed.service import make_mixed_plan
from meshwright.planner.mixed.verify import mixed_faults
from tests.planner.mixed.plain_oracle import step_times_s
from tests.planner.mixed.test_mixed_optimum import asked, compare, other_part
from tests.planner.search.test_unlike_optimum import sharing_indexers, unlike
from tests.soaked import examples, some


def asked_unlike(seed: int) -> MixedRequest:
    """A small problem on two parts, of a model with windows, a hybrid, or with layers of unlike bytes."""
    draw = random.Random(f"unlike {seed}")
    model = unlike(draw, draw.choice([4, 5, 6])).model_copy(update={"tied_embeddings": False})
    return with_model(asked(seed), model, draw)


def with_model(request: MixedRequest, model: ModelSpec, draw: random.Random) -> MixedRequest:
    """The same of another model, with short or long sequences, in less memory or more."""
    seq_len, hbm = draw.choice([4096, 16_384]), draw.choice([0.7, 1.0, 1.5, 3.0])
    specs, parts = [], []
    for part in request.parts:
        device = part.cluster.device
        device = device.model_copy(update={"hbm_gib": device.hbm_gib * hbm})
        cluster = part.cluster.model_copy(update={"device": device})
        specs.append(PartSpec(cluster=cluster, gpus=part.gpus))
        parts.append(replace(part, cluster=cluster, model=model, seq_len=seq_len))
    spec = request.cluster.model_copy(update={"parts": tuple(specs), "between_gbps_per_gpu": None})
    return replace(request, cluster=spec, parts=tuple(parts))


def asked_longer(seed: int) -> MixedRequest:
    """Seven to nine layers, every third time on three parts."""
    draw = random.Random(f"longer {seed}")
    model = unlike(draw, draw.choice([7, 8, 9])).model_copy(update={"tied_embeddings": False})
    request = with_model(asked(seed), model, draw)
    if seed % 3:
        return request
    first = request.parts[0]
    cluster = other_part(draw, first.cluster)
    specs = (*request.cluster.parts, PartSpec(cluster=cluster, gpus=4, name="third"))
    third = replace(first, cluster=cluster, gpus=4)
    return replace(request, cluster=MixedClusterSpec(parts=specs), parts=(*request.parts, third))


def check_kernels(request: MixedRequest, seed: int, most: int) -> int:
    """Holds the best split of some rows, whatever their bounds, against all partitions; how many fit."""
    rows, maker = promising_rows(request, inf, lambda: None), KernelMaker(request)
    fitting = 0
    for row in random.Random(seed).sample(rows, min(len(rows), most)):
        price = maker.kernel(row).best_split(inf)
        steps_s = step_times_s(list(request.parts), row.layout, row.composition)
        least_s = min(steps_s, default=inf)
        if price is None:
            assert least_s == inf
            continue
        fitting += 1
        assert price.step_time_s == pytest.approx(least_s, rel=1e-9)
        assert row.bound_s <= least_s
        assert maker.kernel(row).best_split(least_s * (1 - 1e-6)) is None
        again = maker.kernel(row).best_split(least_s * (1 + 1e-6))
        assert again is not None
        assert again.step_time_s == pytest.approx(least_s, rel=1e-9)
        check_bound_below(request, row, least_s)
    return fitting


def check_bound_below(request: MixedRequest, row: PromisingRow, price_s: float) -> None:
    """A price to beat says how long ranks may take, and leaves no row out whose price is below it."""
    below = promising_rows(request, price_s * (1 + 1e-6), lambda: None)
    key = row.execution, row.layout, row.composition
    same = [each for each in below if (each.execution, each.layout, each.composition) == key]
    assert [each.bound_s <= price_s for each in same] == [True]


KINDS = {
    1: "experts in each second layer",
    3: "hybrid",
    6: "linear attention",
    10: "windows",
    14: "windows, experts everywhere",
    17: "hybrid with experts",
    23: "windows, experts behind a dense layer",
}


TIERS = {6: pytest.mark.slow, 23: pytest.mark.soak}
"""Of the kinds that take longest."""


@pytest.mark.parametrize("seed", [pytest.param(n, marks=TIERS.get(n, ())) for n in KINDS])
def test_a_pipeline_is_cut_up_as_well_as_can_be(seed: int) -> None:
    assert check_kernels(asked_unlike(seed), seed, 3)


def test_cases_have_every_kind_of_model() -> None:
    models = {seed: asked_unlike(seed).first.model for seed in KINDS}
    assert models[1].moe is not None
    assert models[1].moe.every == 2
    assert models[6].linear_layers
    assert [bool(models[seed].hybrid_pattern) for seed in KINDS] == [
        "hybrid" in words for words in KINDS.values()
    ]
    assert [bool(models[seed].windowed_layers) for seed in KINDS] == [
        "windows" in words for words in KINDS.values()
    ]
    assert models[23].moe_layers
    assert models[23].dense_layers == 1
    assert models[17].moe is not None


@pytest.mark.parametrize(
    "seed",
    [
        *(1, 2),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some(range(6, 60))),
    ],
)
def test_stages_of_both_parts_begin_at_an_indexer(seed: int) -> None:
    draw = random.Random(f"indexers {seed}")
    model = sharing_indexers(draw, draw.choice([6, 7, 8])).model_copy(
        update={"tied_embeddings": False}
    )
    request = with_model(asked(seed), model, draw)
    assert model.stage_begins
    check_kernels(request, seed, 3)


def test_neighbours_of_a_plan_begin_at_an_indexer() -> None:
    """Each change was said to break the rule, by an even split that no pipeline of the model has."""
    draw = random.Random("indexers 1")
    fields = sharing_indexers(draw, 7).model_dump(exclude_unset=True)
    fields |= {"attention_order": "FffffFf", "tied_embeddings": False}
    request = with_model(asked(1), ModelSpec.model_validate(fields), draw)
    plan = make_mixed_plan(request).document
    assert plan.layout is not None
    assert plan.layout.stages == [[5], [2]]
    changes = {each.change: each for each in parts_neighbours(plan)}
    assert "as many layers on every rank" not in changes
    assert changes["zero_stage 1 -> 0"].layers == [5, 2]
    assert not any("reuses" in (each.broken or "") for each in changes.values())
    assert changes["pp 2 -> 4, dp 2 -> 1"].broken == (
        "pp = 4, the model has 7 layers, at 2 of which a stage may begin"
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(24, 120)))
def test_pipelines_are_always_cut_up_as_well_as_can_be(seed: int) -> None:
    check_kernels(asked_unlike(seed), seed, examples(12))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in (0, 4, 9)]
)
def test_longer_sequences_and_three_parts_are_cut_up_as_well(seed: int) -> None:
    check_kernels(asked_longer(seed), seed, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(range(10, 60)))
def test_longer_sequences_and_three_parts_are_always_cut_up_as_well(seed: int) -> None:
    check_kernels(asked_longer(seed), seed, examples(6))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [4, 11])
def test_the_plan_is_the_best_pipeline_through_both_parts(seed: int) -> None:
    compare(seed, asked_unlike)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some(n for n in range(60) if n not in (4, 11)))
def test_the_plan_is_always_the_best_pipeline_through_both_parts(seed: int) -> None:
    compare(seed, asked_unlike)


PINS = {
    "gpt-oss-20b": "tp=2,pp=4,ep=4,micro_batch=1,zero_stage=1,recompute=none",
    "nemotron-h-8b": "tp=4,pp=4,micro_batch=1,zero_stage=1,recompute=none",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nemotron-h-8b", marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", marks=pytest.mark.soak),
    ],
)
def test_plans_are_verified_launched_and_played(name: str, tmp_path: Path) -> None:
    """As every plan is; each rank is busy for its own layers, and a step plays as long as it costs."""
    parts = [{"cluster": "dgx-h100", "gpus": 16}, {"cluster": "dgx-a100", "gpus": 16}]
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump({"name": "old-and-new", "parts": parts}))
    result = meshwright.plan_mixed(
        name, cluster=path, global_batch=64, seq_len=8192, pin=PINS[name]
    )
    plan = result.document
    assert plan.status == "optimal"
    assert plan.runs_on
    assert plan.layout is not None
    assert plan.predicted is not None
    assert "launch.sh" in mixed_files(result)
    pipeline, m = Pipeline.of(plan), plan.layout.num_micro_batches
    loads = np.concatenate(
        [
            chunk_loads(each.part.context, each.part.times, pipeline.stages)[0][each.own]
            for each in pipeline.segments
        ]
    )
    played = trace_of(plan)
    loads += hand_overs_s(pipeline.segments).sum(axis=0)
    assert list(played.timeline.busy_s) == pytest.approx(list(m * loads))
    assert played.seconds == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert list(mixed_faults(plan)) == []
    counts = [rank.layers for rank in plan.ranks]
    counts[:2] = counts[0] - 1, counts[1] + 1
    moved = [
        rank.model_copy(update={"layers": count})
        for rank, count in zip(plan.ranks, counts, strict=True)
    ]
    layout = plan.layout.model_copy(update={"stages": [[rank.layers] for rank in moved]})
    changed = plan.model_copy(update={"ranks": moved, "layout": layout})
    faults = " ".join(mixed_faults(changed))
    assert "priced again" in faults
    assert "memory_gib" in faults
