"""The search over models whose layers differ, against layouts that are generated and priced apart from it.

Unlike layers have bounds of their own (partitions of a sequence, ranks that wait for those above them) and a
split that is found over places, not numbers, of layers: each may claim an optimum that is none.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.layout import Layout
from meshwright.errors import InputError
from meshwright.model_specs.adapters import AdapterSpec, with_layers_ahead
from meshwright.model_specs.blocks import AHEAD, Mamba2Spec, MoeSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.space import space_of
from tests.planner.search import plain_oracle
from tests.planner.search.test_planner_optimum import (
    check_against_brute_force,
    cluster,
    model,
    search,
)
from tests.soaked import some

ALL_AMOUNTS = plain_oracle.amounts


def unlike(draw: random.Random, layers: int) -> ModelSpec:
    """Full attention and windows, dense or with experts, or the blocks of a hybrid, in any order."""
    spec = model(draw).model_dump(exclude_unset=True)
    spec |= {"layers": layers, "mtp_layers": 0}
    if draw.random() < 0.3:
        return with_unlike_bytes(draw, spec)
    if draw.random() < 0.3:
        pattern = "-" + "".join(draw.choice("M-*") for _ in range(layers - 2)) + "M"
        mamba = Mamba2Spec(state_dim=64, head_dim=64, heads=32, groups=4)
        return ModelSpec.model_validate(
            spec | {"moe": None, "mamba": mamba, "hybrid_pattern": pattern}
        )
    order = "W" + "".join(draw.choice("WWF") for _ in range(layers - 2)) + "F"
    return ModelSpec.model_validate(spec | {"sliding_window": 256, "attention_order": order})


def with_unlike_bytes(draw: random.Random, spec: dict[str, Any]) -> ModelSpec:
    """Experts in each second layer, linear attention in most layers, or a hybrid with experts."""
    layers = spec["layers"]
    wide = MoeSpec(experts=4, top_k=1, moe_ffn_hidden=draw.choice([1024, 4096]))
    kind = draw.choice(["every", "linear", "hybrid"])
    if kind == "every" and layers % 2 == 0:
        return ModelSpec.model_validate(spec | {"moe": wide.model_copy(update={"every": 2})})
    if kind == "linear":
        delta = {"key_heads": 8, "value_heads": 16, "key_head_dim": 128, "value_head_dim": 128}
        return ModelSpec.model_validate(
            spec | {"linear_attention": delta, "full_attention_every": draw.choice([2, 3])}
        )
    pattern = "M" + "".join(draw.choice("ME*") for _ in range(layers - 2)) + "E"
    mamba = Mamba2Spec(state_dim=64, head_dim=64, heads=32, groups=4)
    return ModelSpec.model_validate(spec | {"moe": wide, "mamba": mamba, "hybrid_pattern": pattern})


def sharing_indexers(draw: random.Random, layers: int) -> ModelSpec:
    """Latent attention to positions that an indexer of the layer or of an earlier one chose (GLM-5.2)."""
    spec = model(draw).model_dump(exclude_unset=True)
    first, every = draw.choice([1, 1, 2, 3]), draw.choice([2, 3, 4])
    order = "F" * first
    order += "".join("F" if (n + 1) % every == 0 else "f" for n in range(layers - first))
    latent: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    indexer = {"heads": draw.choice([16, 64]), "head_dim": 128, "top_k": 1024}
    latent |= {"q_lora_rank": 1024, "v_head_dim": 128, "indexer": indexer}
    spec |= {"layers": layers, "mtp_layers": 0, "attention_order": order, "attention": latent}
    return ModelSpec.model_validate(spec | {"kv_heads": spec["heads"]})


def tiny_request(seed: int) -> PlanRequest:
    """One virtual stage; long sequences, so that kinds of layers take unlike times."""
    draw = random.Random(seed)
    pins: dict[str, int | str] = {
        "zero_stage": draw.choice([0, 1]),
        "recompute": draw.choice(["none", "full", "full"]),
        "pp": draw.choice([2, 2, 3]),
    }
    return PlanRequest(
        model=unlike(draw, draw.randint(4, 6)),
        cluster=cluster(draw.choice([6.0, 8.0, 12.0, 40.0]) + draw.random(), 16, None),
        gpus=6 if pins["pp"] == 3 else draw.choice([2, 4]),
        global_batch=draw.choice([6, 8, 12]),
        seq_len=16_384,
        pins=pins,
        forbids=("interleaving", "optimizer-offload"),
    )


def interleaved_request(seed: int) -> PlanRequest:
    """Several virtual stages where they are faster."""
    draw = random.Random(seed)
    pp = draw.choice([2, 2, 4])
    return PlanRequest(
        model=unlike(draw, pp * draw.choice([2, 3, 4]) - draw.choice([0, 0, 1])),
        cluster=cluster(draw.choice([8.0, 12.0, 40.0]) + draw.random(), 16, None),
        gpus=2 * pp,
        global_batch=draw.choice([8, 16]),
        seq_len=16_384,
        pins={
            "cp": 1,
            "micro_batch": 1,
            "zero_stage": 1,
            "pp": pp,
            "recompute": draw.choice(["none", "full"]),
        },
        forbids=("optimizer-offload", "idle-gpus", "shard-groups"),
    )


def amounts_of_the_space(layout: Layout, stages: plain_oracle.Stages) -> list[int]:
    """As many recomputed layers as the shortest stage has at most, or all: others are not planned."""
    shortest, longest = min(map(min, stages)), max(map(max, stages))
    every = ALL_AMOUNTS(layout, stages)
    return [amount for amount in every if amount <= shortest or amount >= longest]


def on_a_projection(seed: int) -> PlanRequest:
    """The same of a hybrid model whose experts work on a projection of the hidden width."""
    draw, asked = random.Random(f"latent {seed}"), tiny_request(seed)
    layers = asked.model.layers
    pattern = "M" + "".join(draw.choice("ME*E") for _ in range(layers - 2)) + "E"
    hybrid = {
        "moe": MoeSpec(
            experts=4,
            top_k=2,
            moe_ffn_hidden=1024,
            shared_experts=1,
            latent_size=draw.choice([256, 1024]),
        ),
        "mamba": Mamba2Spec(state_dim=64, head_dim=64, heads=32, groups=4),
        "hybrid_pattern": pattern,
        "norms_per_layer": 1,
    }
    spec = {**model(draw).model_dump(exclude_unset=True), "layers": layers, "mtp_layers": 0}
    return replace(asked, model=ModelSpec.model_validate(spec | hybrid))


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(5, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4)),
    ],
)
def test_experts_on_a_projection_are_those_of_the_plain_oracle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_plain_oracle(on_a_projection(seed), monkeypatch)


def with_adapters(asked: PlanRequest, seed: int) -> PlanRequest:
    """Beside some of the blocks: ahead of the first of them, the first stage runs forward alone."""
    draw, symbols = random.Random(f"adapters {seed}"), {each[0] for each in asked.model.symbols}
    places: list[tuple[str, ...]] = [("qkv_proj", "o_proj")] if symbols & {*"FW*"} else []
    places += [("in_proj",)] if symbols & {*"ML"} else []
    targets = draw.choice([*places, ("gate_up_proj",)])
    if targets == ("gate_up_proj",) and asked.model.moe is not None:
        targets = places[0]
    return replace(asked, adapters=AdapterSpec(rank=64, targets=targets))


def layers_ahead(asked: PlanRequest) -> int:
    assert asked.adapters is not None
    layers = with_layers_ahead(asked.model, asked.adapters).unlike_layers
    return sum(symbols.endswith(AHEAD) for symbols in layers)


def with_token_prediction(asked: PlanRequest, seed: int) -> PlanRequest:
    """The same with prediction modules that are no main layers: blocks beside a pattern, or full attention
    beside linear one; as many weights as modules, or one set of them."""
    draw, layers = random.Random(f"mtp {seed}"), asked.model.layers
    spec = {**model(draw).model_dump(exclude_unset=True), "layers": layers}
    spec |= {"mtp_layers": draw.choice([1, 2]), "mtp_shared": draw.random() < 0.5}
    kinds = with_unlike_bytes(draw, spec | {"mtp_layers": 0, "mtp_shared": False})
    stated = kinds.model_dump(exclude_unset=True) | {
        name: spec[name] for name in ("mtp_layers", "mtp_shared")
    }
    if kinds.hybrid_pattern is not None:
        stated["mtp_pattern"] = draw.choice(["*E", "E", "*-"])
    elif kinds.linear_attention is None:
        stated |= {"moe": spec.get("moe")}
    return replace(asked, model=ModelSpec.model_validate(stated))


@pytest.mark.parametrize(
    "seed",
    [
        *(15, 18, 24),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (35, 37)),
    ],
)
def test_layers_ahead_of_adapters_are_those_of_the_plain_oracle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = with_adapters(tiny_request(seed), seed)
    assert layers_ahead(asked)
    check_against_plain_oracle(asked, monkeypatch)


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in range(5, 20)),
    ],
)
def test_prediction_modules_are_those_of_the_plain_oracle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_plain_oracle(with_token_prediction(tiny_request(seed), seed), monkeypatch)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 17)),
    ],
)
def test_prediction_modules_are_those_of_brute_force(seed: int) -> None:
    check_against_brute_force(with_token_prediction(interleaved_request(seed), seed))


def check_against_plain_oracle(asked: PlanRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_oracle, "amounts", amounts_of_the_space)
    outcome, least_s = search(asked), plain_oracle.least_step_time_s(asked)
    if least_s is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "optimal"
    assert outcome.best[0].step_time_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 2, 7),
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.soak),
    ],
)
def test_one_virtual_stage_is_that_of_the_plain_oracle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_plain_oracle(tiny_request(seed), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(8, 60), 1, 4, 6]))
def test_one_virtual_stage_is_that_of_the_plain_oracle_many(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_plain_oracle(tiny_request(seed), monkeypatch)


@pytest.mark.parametrize(
    "seed", [0, 15, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7))]
)
def test_virtual_stages_are_those_of_brute_force(seed: int) -> None:
    check_against_brute_force(interleaved_request(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", some([*range(8, 60), 1, *range(3, 7)]))
def test_virtual_stages_are_those_of_brute_force_many(seed: int) -> None:
    check_against_brute_force(interleaved_request(seed))


def forward_first_request(seed: int) -> PlanRequest:
    """GPipe under torchtitan, of layers that are alike or not."""
    draw, asked = random.Random(f"gpipe {seed}"), tiny_request(seed)
    if seed % 2:
        spec = model(draw).model_dump(exclude_unset=True)
        spec |= {"layers": asked.model.layers, "mtp_layers": 0}
        asked = replace(asked, model=ModelSpec.model_validate(spec))
    recompute = draw.choice(["none", "full"])
    return replace(
        asked,
        cluster=cluster(draw.choice([16.0, 24.0, 40.0]), 16, None),
        framework="torchtitan",
        pins={"pp": asked.pins["pp"], "schedule": "gpipe", "cp": 1, "recompute": recompute},
        forbids=("optimizer-offload",),
    )


@pytest.mark.parametrize(
    "seed",
    [
        *(25, 43),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (52, 3)),
        *(
            pytest.param(n, marks=pytest.mark.soak)
            for n in some((13, 54, 2, 23, 26, 31, 33, 35, 47, 57))
        ),
    ],
)
def test_all_forward_passes_first_is_that_of_brute_force(seed: int) -> None:
    check_against_brute_force(forward_first_request(seed))


def test_bounds_below_a_price_are_the_tightest_that_are_known() -> None:
    space = space_of(interleaved_request(1))
    pricing, layouts = CostModelPricing(space.workload), space.layouts(space.degrees(8))
    tightest = np.array([each.least_s for each in pricing.mapping_bounds(layouts)])
    price_s = float(np.quantile(tightest[np.isfinite(tightest)], 0.3))
    bounds = pricing.mapping_bounds(layouts, below_s=price_s)
    quick = np.array([each.least_s for each in bounds])
    assert np.all(quick <= tightest)
    assert np.any(quick < tightest)
    assert np.array_equal(quick[quick < price_s], tightest[quick < price_s])


def check_no_pin_is_faster(asked: PlanRequest) -> None:
    """Of a plan that is called optimal each choice is pinned to further values, one at a time."""
    outcome = search(asked)
    if not outcome.best:
        return
    assert outcome.status == "optimal"
    layout, least_s = outcome.best[0].layout, outcome.best[0].step_time_s * (1 - 1e-9)
    values = {"vpp": range(1, 7), "tp": (1, 2), "dp": (1, 2), "zero_stage": (0, 1)}
    for name, each in values.items():
        own = int(getattr(layout, name))
        for value in {*each} - {own} if name not in asked.pins else ():
            try:
                pinned = search(replace(asked, pins={**asked.pins, name: value}))
            except InputError:
                continue
            assert all(priced.step_time_s >= least_s for priced in pinned.best), (name, value)


@pytest.mark.parametrize(
    "seed", [2, 5, *(pytest.param(n, marks=pytest.mark.soak) for n in some([*range(100, 140)]))]
)
def test_no_pin_makes_a_plan_faster(seed: int) -> None:
    check_no_pin_is_faster(interleaved_request(seed))


def with_shared_indexers(asked: PlanRequest, seed: int, longer: int = 0) -> PlanRequest:
    """The same of a model whose stages begin at some layers alone."""
    draw = random.Random(f"indexers {seed}")
    spec = sharing_indexers(draw, asked.model.layers + longer)
    return replace(asked, model=spec, pins={**asked.pins, "cp": 1})


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 2),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 8)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some(range(8, 60))),
    ],
)
def test_stages_that_begin_at_an_indexer_are_those_of_the_plain_oracle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = with_shared_indexers(tiny_request(seed), seed)
    assert asked.model.stage_begins
    check_against_plain_oracle(asked, monkeypatch)


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some(range(6, 60))),
    ],
)
def test_virtual_stages_that_begin_at_an_indexer_are_those_of_brute_force(seed: int) -> None:
    check_against_brute_force(with_shared_indexers(interleaved_request(seed), seed, longer=5))


@pytest.mark.slow
def test_cases_cover_both_families_and_several_virtual_stages() -> None:
    asked = [interleaved_request(seed) for seed in range(8)]
    hybrid = [each.model.hybrid_pattern is not None for each in asked]
    assert {True, False} == set(hybrid)
    found = [outcome.best[0].layout for each in asked if (outcome := search(each)).best]
    assert any(int(layout.vpp) > 1 for layout in found)
    assert any(int(layout.vpp) == 1 for layout in found)


def test_schedules_that_run_down_and_up_are_not_planned() -> None:
    asked = replace(tiny_request(1), framework="torchtitan", pins={}, forbids=())
    space = space_of(asked)
    assert "interleaved-1f1b" in space.schedules
    assert not {"zbv", "dualpipe-v"} & set(space.schedules)
    with pytest.raises(InputError, match="zbv puts chunks from both halves"):
        space_of(replace(asked, pins={"schedule": "zbv"}))
