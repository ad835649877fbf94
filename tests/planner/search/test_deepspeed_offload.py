"""DeepSpeed's offload of the optimizer: its price and memory, how a launch is read, that search is sound."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.estimate import estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.footprint import GIB, offloaded_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.errors import InputError
from meshwright.model_specs.reader import read_model
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.search.space import space_of
from tests.planner.search.test_planner_optimum import (
    check_against_brute_force,
    cluster,
    model,
    search,
)
from tests.soaked import some

HOST_BYTES_PER_S = 18.2e9
PCIE_BYTES_PER_S = 0.4 * 64e9


def request(**changes: Any) -> PlanRequest:
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq_len": 8192,
        "framework": "deepspeed",
    }
    return read_request(**options | changes)


def optimizer_s(asked: PlanRequest, layout: Layout) -> float:
    workload = asked.workload()
    placement = nested_placement(workload.cluster, layout)
    stages = ((workload.model.layers,),)
    estimate = estimate_layout(workload, layout, placement, stages)
    return float(np.asarray(estimate.breakdown_s["optimizer"]))


@pytest.mark.parametrize(
    ("zero_stage", "pcie_bytes"), [(1, 6.0), (2, 6.0 + 4.0 * 8), (3, 6.0 + 4.0 * 8)]
)
def test_the_update_by_hand(zero_stage: int, pcie_bytes: float) -> None:
    """42 bytes of the host's memory, and PCIe's of 8 micro-batches, for an eighth of 8.03e9 parameters."""
    layout = Layout(dp=8, zero_stage=zero_stage, num_micro_batches=8, optimizer_offload=100)
    by_hand_s = 8.03e9 / 8 * (42.0 / HOST_BYTES_PER_S + pcie_bytes / PCIE_BYTES_PER_S)
    assert optimizer_s(request(), layout) == pytest.approx(by_hand_s, rel=1e-3)


def test_a_measured_step_is_no_slower_than_the_update() -> None:
    """Qwen2.5-3B on two A100 takes 3.08 s a step, 2.38 s with cores bound (DeepSpeed, pull request 7474).

    Its ranks had 64 cores each, where torchrun leaves a thread: the update is to be the slower one.
    """
    sizes = {"layers": 36, "hidden": 2048, "ffn_hidden": 11008, "heads": 16, "kv_heads": 2}
    small = read_model("qwen3-8b").model_copy(update=sizes | {"tied_embeddings": True})
    asked = request(model=small, cluster="dgx-a100-40gb", gpus=2, global_batch=2, seq_len=1024)
    layout = Layout(dp=2, zero_stage=2, num_micro_batches=1, optimizer_offload=100)
    assert 3.08 < optimizer_s(asked, layout) < 2 * 3.08


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_memory_that_moves_to_the_host(zero_stage: int) -> None:
    """ZeRO 1 keeps 16-bit weights and gradients whole, 2 shards gradients, 3 both; the host has 20 bytes."""
    workload = request().workload()
    layout = Layout(dp=8, zero_stage=zero_stage, num_micro_batches=8, optimizer_offload=100)
    stages = ((workload.model.layers,),)
    parts = stage_memory_parts_gib(workload, layout, stages)
    billions_gib = 8.03e9 / GIB
    gradients = {1: 2.0, 2: 2.0 / 8, 3: 2.0 / 8}[zero_stage]
    weights = 2.0 if zero_stage < 3 else 2.0 / 8
    assert parts["optimizer"][0] == 0
    assert parts["gradients"][0] == pytest.approx(gradients * billions_gib, rel=1e-3)
    assert parts["weights"][0] == pytest.approx(weights * billions_gib, rel=1e-3)
    assert offloaded_gib(workload, layout, stages)[0] == pytest.approx(
        20 * billions_gib / 8, rel=1e-3
    )
    plain = stage_memory_parts_gib(workload, replace(layout, optimizer_offload=0), stages)
    more_gib = parts["buffers"][0] - plain["buffers"][0]
    table = 128_256 * 4096
    assert more_gib == pytest.approx(0 if zero_stage == 3 else 6 * table / GIB, rel=1e-6)


def on_host(seed: int) -> PlanRequest:
    """A small problem in little memory, so that offloading makes room where nothing else does."""
    draw = random.Random(f"host {seed}")
    spec = model(draw).model_copy(update={"moe": None, "mtp_layers": 0, "vocab": 8192})
    gpus = draw.choice([1, 2, 4])
    return PlanRequest(
        model=spec,
        cluster=cluster(draw.choice([3.0, 3.5, 4.0, 5.0]) + draw.random(), 16, None),
        gpus=gpus,
        global_batch=draw.choice([4, 8]),
        seq_len=2048,
        framework="deepspeed",
        pins={"recompute": "none"} if draw.random() < 0.5 else {},
    )


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5)),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((4, 3, 6, 7))),
    ],
)
def test_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(on_host(seed))


@pytest.mark.slow
def test_some_of_these_plans_offload() -> None:
    shares = [
        int(outcome.best[0].layout.optimizer_offload) if outcome.best else -1
        for outcome in (search(on_host(seed)) for seed in range(16))
    ]
    assert min(shares.count(0), shares.count(100)) >= 4


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_bounds(seed: int) -> None:
    """Bound <= exact price and least memory <= memory of the plan, of layouts that offload."""
    space = space_of(replace(on_host(seed), pins={"optimizer_offload": 100}))
    pricing = CostModelPricing(space.workload)
    layouts = space.layouts(space.degrees(space.workload.gpus))
    rows = np.random.default_rng(seed).permutation(len(np.asarray(layouts.tp)))[:20]
    _, again = pricing.least_memory_gib(layouts)
    some = replace(layouts, recompute_layers=again).take(rows)
    assert np.all(np.asarray(some.optimizer_offload) == 100)
    lower = pricing.lower_bound_s(some)
    for at, bounds in enumerate(pricing.mapping_bounds(some)):
        assert lower[at] <= bounds.least_s * (1 + 1e-9)
        free = replace(bounds, bound_s=np.full_like(bounds.bound_s, -np.inf))
        priced = pricing.exact(some.scalar(at), free, np.inf)
        if priced is not None:
            assert bounds.least_s <= priced.step_time_s * (1 + 1e-9)


def test_shares_of_the_space() -> None:
    assert set(space_of(request()).offloads) == {
        (0, 0),
        *((z, s) for z in (1, 2, 3) for s in (0, 100)),
    }
    assert {s for _, s in space_of(request(forbid=["optimizer-offload"])).offloads} == {0}
    pinned = space_of(request(pin={"optimizer_offload": 100})).offloads
    assert pinned == ((1, 100), (2, 100), (3, 100))


def read_percent(tmp_path: Path, **zero: Any) -> int:
    path = tmp_path / "ds_config.json"
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3} | zero}
    path.write_text(json.dumps(document), encoding="utf-8")
    percent: int = read_launch(path).settings.get("optimizer_offload", 0)
    return percent


def test_what_other_configurations_offload(tmp_path: Path) -> None:
    assert read_percent(tmp_path) == 0
    assert read_percent(tmp_path, offload_optimizer={"device": "none"}) == 0
    assert read_percent(tmp_path, offload_optimizer={"device": "cpu"}) == 100
    assert read_percent(tmp_path, offload_optimizer={"device": "cpu", "ratio": 0.3}) == 30
    assert read_percent(tmp_path, cpu_offload=True) == 100
    assert read_percent(tmp_path, offload_optimizer={"device": "nvme"}) == 100
    with pytest.raises(InputError, match="ratio"):
        read_percent(tmp_path, offload_optimizer={"device": "cpu", "ratio": 3})
