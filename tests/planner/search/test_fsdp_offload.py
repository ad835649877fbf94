"""CPU offload of PyTorch's FSDP2: price, memory, launch files and the way back, that search is sound."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshwright.costmodel.estimate import estimate_layout, stage_memory_parts_gib
from meshwright.costmodel.footprint import GIB, offloaded_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from tests.planner.search.test_planner_optimum import (
    check_against_brute_force,
    cluster,
    model,
    search,
)
from tests.soaked import some

FRAMEWORKS = ("torchtitan", "fsdp2")
HOST_BYTES_PER_S = 18.2e9
PCIE_BYTES_PER_S = 0.4 * 64e9
PARAMETERS = 8.03e9
OFFLOADED = Layout(dp=8, zero_stage=3, num_micro_batches=8, optimizer_offload=100)


def request(framework: str, **changes: Any) -> PlanRequest:
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 64,
        "seq_len": 8192,
        "framework": framework,
    }
    return read_request(**options | changes)


def optimizer_s(framework: str, layout: Layout) -> float:
    workload = request(framework).workload()
    placement = nested_placement(workload.cluster, layout)
    layers = workload.model.layers // int(layout.pp)
    estimate = estimate_layout(workload, layout, placement, ((layers,),) * int(layout.pp))
    return float(np.asarray(estimate.breakdown_s["optimizer"]))


@pytest.mark.parametrize(
    ("framework", "host_bytes", "pcie_bytes"),
    [
        # Adam 28, clipping 12, seven sums of 12; eight micro-batches of two gathers (8) and a gradient (4).
        ("torchtitan", 40.0 + 7 * 12.0, 8 * 12.0),
        # Gradients are reduced once.
        ("fsdp2", 40.0, 8 * 8.0 + 4.0),
    ],
)
def test_the_update_by_hand(framework: str, host_bytes: float, pcie_bytes: float) -> None:
    by_hand_s = PARAMETERS / 8 * (host_bytes / HOST_BYTES_PER_S + pcie_bytes / PCIE_BYTES_PER_S)
    assert optimizer_s(framework, OFFLOADED) == pytest.approx(by_hand_s, rel=1e-3)


def test_pipelines_bring_gradients_down_once() -> None:
    """Each of two ranks has half of the parameters: one has the token table, the other a head as large."""
    piped = replace(OFFLOADED, pp=2, dp=4)
    per_rank = PARAMETERS / 2 / 4
    by_hand_s = per_rank * (40.0 / HOST_BYTES_PER_S + (8 * 8.0 + 4.0) / PCIE_BYTES_PER_S)
    assert optimizer_s("torchtitan", piped) == pytest.approx(by_hand_s, rel=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_gpu_keeps_no_shard(framework: str) -> None:
    workload = request(framework).workload()
    layout = replace(OFFLOADED, num_micro_batches=1)
    stages = ((workload.model.layers,),)
    parts = stage_memory_parts_gib(workload, layout, stages)
    assert [parts[name][0] for name in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert offloaded_gib(workload, layout, stages)[0] == pytest.approx(
        16 * PARAMETERS / 8 / GIB, rel=1e-3
    )
    plain = stage_memory_parts_gib(workload, replace(layout, optimizer_offload=0), stages)
    table = 128_256 * 4096
    more_gib = parts["buffers"][0] - plain["buffers"][0]
    assert more_gib == pytest.approx(4.0 * table / 8 / GIB, rel=1e-6)


NF4_BYTES = 0.516
"""Of a 4-bit weight with its scales (docs/cost_model.md, "Adapters")."""


def test_frozen_weights_go_with_the_adapters() -> None:
    """Llama-2 70B on two cards of 24 GB: table and head, 524 million parameters, keep 16 bits. PEFT's guide
    (docs/source/accelerate/fsdp.md) measured 35.6 GB a GPU without offloading and 19.6 GB with it, 107 GB of
    the host's memory while the model is loaded. All frozen weights were counted on the GPUs here.
    """
    asked = request(
        "fsdp2",
        model="llama-2-70b",
        cluster="rtx-4090-pcie",
        gpus=2,
        seq_len=2048,
        train="qlora",
        lora_rank=8,
    )
    workload, stages = asked.workload(), ((80,),)
    layout = replace(OFFLOADED, dp=2, micro_batch=2, num_micro_batches=2)
    on_gpus = replace(layout, optimizer_offload=0)
    of_gpu, of_host = (stage_memory_parts_gib(workload, each, stages) for each in (on_gpus, layout))
    tables = 2 * 32_000 * 8192
    frozen_bytes = NF4_BYTES * (68.98e9 - tables) + 2.0 * tables
    assert of_gpu["weights"][0] == pytest.approx((frozen_bytes + 4 * 103.5e6) / 2 / GIB, rel=2e-3)
    assert of_host["weights"][0] == 0.0
    offloaded = frozen_bytes + 16 * 103.5e6
    assert offloaded_gib(workload, layout, stages)[0] == pytest.approx(
        offloaded / 2 / GIB, rel=2e-3
    )
    spared_gb = sum(of_gpu[name][0] - of_host[name][0] for name in of_gpu) * GIB / 1e9
    assert spared_gb == pytest.approx(35.6 - 19.6, rel=0.2)
    placement = nested_placement(workload.cluster, layout)
    more_s = [
        float(
            np.asarray(estimate_layout(workload, each, placement, stages).breakdown_s["optimizer"])
        )
        for each in (layout, replace(layout, num_micro_batches=3))
    ]
    # Another micro-batch is gathered twice, adapters in 32 bits.
    again_s = 2 * (frozen_bytes + 4 * 103.5e6) / 2 / (0.4 * 32e9)
    assert more_s[1] - more_s[0] == pytest.approx(again_s, rel=2e-3)


def test_seventy_billion_parameters_are_tuned_on_two_cards_of_24_gb() -> None:
    """Answer.AI's fsdp_qlora did it in March 2024; there was no plan."""
    asked = read_request(
        model="llama-3-70b",
        cluster="rtx-4090-pcie",
        gpus=2,
        global_batch=8,
        seq_len=512,
        framework="fsdp2",
        train="qlora",
    )
    plan = fastest_plan(asked)
    assert plan.layout is not None
    assert plan.layout.optimizer_offload == 100


@pytest.mark.parametrize("framework", [pytest.param("torchtitan", marks=pytest.mark.slow), "fsdp2"])
def test_a_model_that_fits_no_other_way_is_planned_written_and_read_back(
    framework: str, tmp_path: Path
) -> None:
    """Llama-3 70B on eight GPUs: 16 bytes a parameter are 1,052 GiB, of which eight H100 have 640."""
    asked = request(framework, model="llama-3-70b", global_batch=16, seq_len=4096)
    plan = fastest_plan(asked)
    assert plan.layout is not None
    assert plan.layout.optimizer_offload == 100
    without = replace(asked, forbids=("optimizer-offload",))
    assert fastest_plan(without, explained=False).status == "infeasible"
    for name, text in plan_files(plan).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if framework == "torchtitan":
        words = json.loads((tmp_path / "torchtitan_args.json").read_text(encoding="utf-8"))
        assert "--training.enable-cpu-offload" in words
        launch = tmp_path / "launch.sh"
    else:
        launch = tmp_path / "accelerate.yaml"
        config = yaml.safe_load(launch.read_text(encoding="utf-8"))
        assert config["fsdp_config"]["fsdp_offload_params"] is True
    run = read_launch(launch)
    assert run.settings["optimizer_offload"] == 100
    assert not run.unread


def on_host(seed: int) -> PlanRequest:
    """A small problem in little memory, so that offloading makes room where nothing else does."""
    draw = random.Random(f"fsdp {seed}")
    spec = model(draw).model_copy(update={"moe": None, "mtp_layers": 0, "vocab": 8192})
    return PlanRequest(
        model=spec,
        cluster=cluster(draw.choice([1.5, 2.0, 2.5, 3.5]) + draw.random(), 16, None),
        gpus=draw.choice([2, 4]),
        global_batch=draw.choice([4, 8]),
        seq_len=2048,
        framework=FRAMEWORKS[seed % 2],
        pins={"recompute": "none"} if draw.random() < 0.5 else {},
    )


@pytest.mark.parametrize(
    "seed",
    [
        *(5, 7),
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((0, 2, 3, 4, 6))),
    ],
)
def test_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(on_host(seed))


def adapters_on_host(seed: int) -> PlanRequest:
    """Adapters beside many layers, most of whose memory is that of frozen weights."""
    draw, asked = random.Random(f"frozen {seed}"), on_host(2 * seed + 1)
    hbm_gib = draw.choice([2.6, 2.9, 3.2, 3.5])
    return replace(
        asked,
        model=asked.model.model_copy(update={"layers": 96, "vocab": 2048}),
        cluster=cluster(hbm_gib, 16, None),
        seq_len=512,
        adapters=AdapterSpec(method=draw.choice(["lora", "qlora"]), rank=16),
    )


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(5, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some((0, 1, 2, 3, 8, 9))),
    ],
)
def test_search_equals_brute_force_beside_frozen_weights(seed: int) -> None:
    check_against_brute_force(adapters_on_host(seed))


@pytest.mark.slow
def test_some_of_these_plans_offload() -> None:
    shares = [
        int(outcome.best[0].layout.optimizer_offload) if outcome.best else -1
        for outcome in (search(on_host(seed)) for seed in range(16))
    ]
    assert min(shares.count(0), shares.count(100)) >= 3


def test_plans_say_that_no_run_stands_behind_their_offload() -> None:
    asked = request("fsdp2", model="llama-3-70b", global_batch=16, seq_len=4096)
    assert any("no measured run stands" in text for text in fastest_plan(asked).warnings)
    assert not any(
        "no measured run stands" in text for text in fastest_plan(request("fsdp2")).warnings
    )
