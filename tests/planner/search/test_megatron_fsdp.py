"""ZeRO 2 and 3 of Megatron-FSDP: price and memory by hand, plans only where asked, flags and the way back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.buffers import transients
from meshwright.costmodel.collectives import long_ring_pass_s
from meshwright.costmodel.data_parallel import data_parallel_traffic
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.states import layer_parameters_on_gpu, state_bytes
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.launches.reader import read_launch
from meshwright.planner.search.space import space_of
from tests.planner.search.test_planner_optimum import check_against_brute_force, cluster, model
from tests.soaked import some

TABLE = 128_256 * 4096
ALLOWED = ("megatron-fsdp",)


def workload(**changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "model": load_catalog_model("llama-3-8b"),
        "cluster": read_cluster("dgx-h100"),
        "gpus": 8,
        "global_batch": 32,
        "seq_len": 4096,
        "framework": "megatron",
        "dp_overlap": True,
    }
    return Workload(**settings | changes)


@pytest.mark.parametrize(
    ("zero", "changes", "expected"),
    [
        (2, {}, (2, 4 / 8, 12 / 8)),
        (3, {}, ((2 + 4) / 8, 4 / 8, 8 / 8)),  # 16-bit shards beside fp32 ones, fp32 sums, moments
        (3, {"gradient_dtype": "bf16"}, ((2 + 4) / 8, 2 / 8, 8 / 8)),
        (3, {"precision": "fp8"}, ((2 + 4) / 8 + 2, 4 / 8, 8 / 8)),  # copies for kernels stay whole
        (3, {"precision": "fp8", "fp8_params": True}, ((2 + 4) / 8, 4 / 8, 8 / 8)),
    ],
)
def test_states_by_hand(
    zero: int, changes: dict[str, Any], expected: tuple[float, float, float]
) -> None:
    layout = Layout(dp=8, zero_stage=zero, num_micro_batches=4)
    each = state_bytes(workload(**changes), layout, 8)
    assert tuple(float(np.asarray(part)) for part in each) == pytest.approx(expected)


def test_buffers_by_hand() -> None:
    """Half of 10^9 weights ahead of the layer in use and its 16-bit gradients; 10^9 fp32 gradients wait."""
    work = workload()
    layer, _, _ = (float(np.asarray(x)) for x in layer_parameters_on_gpu(work.model, Layout()))
    held = {}
    for zero in (1, 2, 3):
        layout = Layout(dp=8, zero_stage=zero, num_micro_batches=4)
        held[zero] = transients(work, layout, saved_activations(work, layout))
    waiting = 4 * (1e9 + layer)
    assert [float(np.asarray(held[zero].bucket)) for zero in held] == pytest.approx(
        [0.0, waiting, waiting]
    )
    graphs = float(np.asarray(held[1].gathered)) - 2.0 * layer
    gathered = float(np.asarray(held[3].gathered)) - graphs
    assert gathered == pytest.approx(2 * (5e8 + layer) + 2 * layer)
    assert float(np.asarray(held[3].gathered_table)) == pytest.approx(2 * TABLE)
    assert float(np.asarray(held[2].gathered_table)) == 0.0


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 8)])
def test_traffic_by_hand(zero: int, gathers: int) -> None:
    """Four micro-batches: gradients go after each, weights come once or twice for each; their first, and the
    gradients' last bucket are waited for.
    """
    layout = Layout(dp=8, zero_stage=zero, num_micro_batches=4)
    work = workload()
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    layer, _, _ = (float(np.asarray(x)) for x in layer_parameters_on_gpu(work.model, layout))
    bucket = layer if zero == 3 else 40e6
    traffic = data_parallel_traffic(c, 8.03e9, 0.0)
    gradient_s, weight_s = (
        float(np.asarray(long_ring_pass_s(size * bucket, c.placement.dp_cp, c.links)))
        for size in (4.0, 2.0)
    )
    waits_s = 4 * gradient_s + gathers * weight_s
    assert float(np.asarray(traffic.tail_s)) == pytest.approx(waits_s)
    assert float(np.asarray(traffic.seconds)) == pytest.approx(waits_s * 8.03e9 / bucket)


def request(**changes: Any) -> PlanRequest:
    options: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "gpus": 8,
        "global_batch": 16,
        "seq_len": 4096,
        "framework": "megatron",
    }
    return read_request(**options | changes)


def test_stages_that_no_run_stands_behind_are_asked_for() -> None:
    asked = request()
    assert space_of(asked).zero == (0, 1)
    assert space_of(replace(asked, allow=ALLOWED)).zero == (0, 1, 2, 3)
    assert space_of(replace(asked, pins={"zero_stage": 3})).zero == (3,)
    both = replace(asked, allow=ALLOWED, forbids=("zero-3",))
    assert space_of(both).zero == (0, 1, 2)
    for record in RECORDS:
        words = {setting.allow for setting in record.zero_stages.values()}
        assert words == ({"", *ALLOWED} if record.name == "megatron" else {""})


@pytest.mark.parametrize(("zero", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_a_pinned_stage_is_planned_written_and_read_back(
    zero: int, strategy: str, tmp_path: Path
) -> None:
    pins: dict[str, int | str] = {"zero_stage": zero, "tp": 1, "micro_batch": 1, "cp": 1}
    plan = fastest_plan(replace(request(), pins=pins))
    assert plan.layout is not None
    assert plan.layout.zero_stage == zero
    assert plan.layout.pp == 1
    assert any("no measured run stands" in text for text in plan.warnings)
    for name, text in plan_files(plan).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    words = json.loads((tmp_path / "megatron_args.json").read_text(encoding="utf-8"))
    said = dict(pairwise(words))
    assert said["--data-parallel-sharding-strategy"] == strategy
    assert said["--megatron-fsdp-main-grads-dtype"] == "fp32"
    assert said["--ckpt-format"] == "fsdp_dtensor"
    assert {"--use-megatron-fsdp", "--no-gradient-accumulation-fusion"} <= set(words)
    run = read_launch(tmp_path / "launch.sh")
    assert run.settings["zero_stage"] == zero
    assert run.settings["gradient_dtype"] == "fp32"
    assert not run.unread


@pytest.mark.parametrize(
    ("changes", "zero", "te_loss"),
    [
        ({"pin": {"zero_stage": 2}, "train": "lora"}, None, None),
        ({"pin": {"zero_stage": 2}, "train": "lora", "allow": ("bf16-grads",)}, 2, False),
        ({"pin": {"zero_stage": 3}, "allow": ("te-loss",)}, 3, False),
        ({"pin": {"zero_stage": 3}, "allow": ("te-loss", "bf16-grads")}, 3, True),
        ({"optimizer": "lion", "allow": ("te-loss",)}, 1, False),
    ],
)
def test_what_bridge_alone_starts_is_planned_as_bridge_can_say_it(
    changes: dict[str, Any], zero: int | None, te_loss: bool | None
) -> None:
    """Such plans were proven, and then no file could be written for them."""
    plan = fastest_plan(request(model="llama-3.2-1b", seq_len=2048, **changes))
    assert (plan.layout and plan.layout.zero_stage) == zero
    assert (plan.execution and plan.execution.te_loss) == te_loss
    if zero is None:
        assert plan.infeasible is not None
        assert any("megatron-zero-bridge" in words for words in plan.infeasible.conflict)
    else:
        assert "plan.yaml" in plan_files(plan)


def sharded(seed: int) -> PlanRequest:
    """A small problem in little memory with every stage of ZeRO."""
    draw = random.Random(f"megatron-fsdp {seed}")
    spec = model(draw).model_copy(update={"mtp_layers": 0, "vocab": 8192})
    return PlanRequest(
        model=spec,
        cluster=cluster(draw.choice([2.5, 3.5, 5.0]) + draw.random(), 16, None),
        gpus=draw.choice([2, 4]),
        global_batch=draw.choice([4, 8]),
        seq_len=2048,
        framework="megatron",
        allow=ALLOWED,
        pins={"zero_stage": draw.choice([2, 3])} if seed % 2 else {},
        forbids=("optimizer-offload",),
    )


@pytest.mark.parametrize(
    "seed",
    [
        9,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in some([2, 3, 4, 5, 0, 7])),
    ],
)
def test_search_equals_brute_force(seed: int) -> None:
    check_against_brute_force(sharded(seed))
