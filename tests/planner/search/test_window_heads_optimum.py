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


def request(seed: int) -> PlanRequest:
    """A small problem whose layers differ in their heads; some heads are too wide for FlashAttention."""
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


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 4, 5, *some(range(6, 60))])
def test_the_search_equals_brute_force_many(seed: int) -> None:
    check_against_brute_force(request(seed))


def test_these_problems_have_plans_and_none() -> None:
    outcomes = [search(request(seed)) for seed in range(12)]
    assert {outcome.status for outcome in outcomes} == {"optimal", "infeasible"}
    recomputed = {int(each.best[0].layout.recompute) for each in outcomes if each.best}
    assert len(recomputed) > 1
