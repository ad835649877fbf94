"""Searches for models with heads by kind of layer equal brute force over all layouts of accelerate."""

from __future__ import annotations

import random

import pytest

from meshwright.model_specs.adapters import AdapterSpec, resolved
from meshwright.model_specs.blocks import WindowHeadsSpec
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.search.test_planner_optimum import (
    check_against_brute_force,
    cluster,
    model,
    search,
)
from tests.soaked import some


def request(seed: int, *, gated: bool = False) -> PlanRequest:
    """A small problem whose layers differ in their heads; some heads are too wide for FlashAttention.

    Gated ones have twice the query heads under a window, with sinks, and narrower values.
    """
    draw = random.Random(f"heads by kind {seed}")
    own = {
        "mtp_layers": 0,
        "layers": draw.randint(4, 9),
        "head_dim": draw.choice([128, 512]),
        "kv_heads": draw.choice([1, 4]),
        "qk_norm": True,
        "value_norm": True,
        "norms_per_layer": 4,
        "sliding_window": draw.choice([256, 2048]),
        "full_attention_every": draw.choice([2, 3]),
        "window_heads": WindowHeadsSpec(kv_heads=8, head_dim=draw.choice([128, 256])),
        "values_are_keys": draw.random() < 0.5,
    }
    if gated:
        windowed = WindowHeadsSpec(heads=16, kv_heads=8, head_dim=128, sinks=True)
        own |= {"window_heads": windowed, "head_dim": 128, "values_are_keys": False}
        own |= {"value_head_dim": 64, "attention_head_gates": True, "value_norm": False}
    spec = ModelSpec.model_validate(model(draw).model_dump(exclude_unset=True) | own)
    adapters = AdapterSpec(rank=16) if draw.random() < 0.4 else None
    return PlanRequest(
        model=spec,
        cluster=cluster(draw.choice([4.0, 6.0, 8.0, 16.0]) + draw.random(), 16, None),
        gpus=draw.choice([2, 4]),
        global_batch=draw.choice([4, 8]),
        seq_len=draw.choice([2048, 8192]),
        framework="fsdp2",
        adapters=None if adapters is None else resolved(spec, adapters, fused=False),
    )


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(request(seed))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_search_equals_brute_force_with_gates(seed: int) -> None:
    check_against_brute_force(request(seed, gated=True))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [*range(2, 6), *some(range(6, 40))])
def test_the_search_equals_brute_force_with_gates_many(seed: int) -> None:
    check_against_brute_force(request(seed, gated=True))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 4, 5, *some(range(6, 60))])
def test_the_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(request(seed))


def test_these_problems_have_plans_and_none() -> None:
    outcomes = [search(request(seed)) for seed in range(12)]
    assert {outcome.status for outcome in outcomes} == {"optimal", "infeasible"}
    recomputed = {int(each.best[0].layout.recompute) for each in outcomes if each.best}
    assert len(recomputed) > 1
