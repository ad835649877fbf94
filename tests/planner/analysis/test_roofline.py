"""A plan under its roofs, by hand: 8 billion parameters, tensor groups of 2, 8 sequences a rank and step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.adapters import frozen_passes_s
from meshwright.costmodel.attention import attention_block
from meshwright.costmodel.calibration import Factors
from meshwright.costmodel.feed_forward import dense_mlp
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.parameters import (
    attention_parameters,
    dense_mlp_parameters,
    parameter_count,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.analysis.roofline import (
    network_roofline,
    plan_roofline,
    products_of,
    roofline_of,
)
from meshwright.planner.analysis.traffic import plan_traffic
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.calculators_view import roofline_view
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.calibration.service import draft_stack
from tests.plans import make_plan


def test_products_and_gradients_by_hand() -> None:
    pin = "micro_batch=2,tp=2,pp=1,cp=1,zero_stage=1"
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "pin": pin}
    document = plan_roofline(fastest_plan(read_request(**asked, global_batch=64, seq_len=4096)))
    assert document["batch_of_a_rank"] == 64 / 8
    down = {row["what"]: row for row in document["products"]}["MLP down"]
    m, n, k = 2 * 4096, 4096, 14336 / 2
    assert (down["m"], down["n"], down["k"]) == (m, n, k)
    assert down["flop_per_byte"] == pytest.approx(2 * m * n * k / (2 * (m * k + k * n + m * n)))
    assert down["bound"] == "compute"
    levels = {level["level"]: level for level in document["network"]["levels"]}
    assert set(levels) == {"nvlink", "fabric"}
    own = levels["fabric"]["batches"][1]
    # 6 FLOP a token and parameter; 4 bytes of its gradient scattered and 2 gathered pass 7 of 8 hops, one of
    # four rings of a node over each adapter: against 989 TFLOP/s over 50 GB/s.
    assert own["flop_per_byte"] == pytest.approx(6 * 8 * 4096 / (6 * 7 / 8 / 4))
    assert levels["nvlink"]["batches"][1]["flop_per_byte"] == pytest.approx(
        own["flop_per_byte"] / 4
    )
    assert levels["fabric"]["critical_batch"] == pytest.approx(
        8 * 989e12 / 50e9 / own["flop_per_byte"]
    )
    assert levels["fabric"]["ridge_flop_per_byte"] == pytest.approx(989e12 / 50e9)
    assert own["regime"] == "compute-bound"
    assert roofline_view({"plan": document})
    json.dumps(document)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl"])
def test_the_products_hold_every_parameter_of_a_layer(name: str) -> None:
    work = Workload(
        model=load_catalog_model(name),
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=1024,
    )
    layout, model = Layout(dp=8), work.model
    shapes = products_of(make_context(work, layout, nested_placement(work.cluster, layout)))
    held = sum(each.columns * each.depth for each in shapes if each.name != "LM head")
    biases = model.hidden * 20
    assert abs(held - attention_parameters(model) - dense_mlp_parameters(model)) <= biases


def test_gradients_of_experts_that_few_tokens_work_with() -> None:
    """Mixtral takes 2 of 8 experts: 12.9 of 46.7 billion parameters work, the gradients of all are sent."""
    asked: dict[str, Any] = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "gpus": 64}
    flop_per_byte = {}
    for ep in (1, 8):
        pin = f"micro_batch=1,tp=8,pp=4,cp=1,ep={ep},etp={8 // ep},zero_stage=1"
        request = read_request(**asked, pin=pin, global_batch=64, seq_len=4096)
        network = plan_roofline(fastest_plan(request))["network"]
        flop_per_byte[ep] = network["levels"][-1]["batches"][1]["flop_per_byte"]
        assert network["gradient_bytes"] == 4
    # 32 sequences a replica of 8 GPUs in each of two; 6 bytes a parameter pass one of two hops.
    assert flop_per_byte[1] == pytest.approx(6 * 32 * 4096 / (6 / 2) * 12.88 / 46.70, rel=0.02)
    assert flop_per_byte[8] == pytest.approx(flop_per_byte[1], rel=0.01)


def test_products_reach_what_the_plan_is_priced_with() -> None:
    """The head runs at 16 bits (an FP8 plan had it at 1,264 TFLOP/s), the rest at calibrated rates."""
    pin = "micro_batch=2,tp=2,pp=1,cp=1"
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "pin": pin}
    own = draft_stack("own", "megatron-lm", "h100-sxm-80gb")
    own = own.model_copy(update={"factors": Factors(gemm=0.8)})
    request = read_request(**asked, global_batch=64, seq_len=4096, precision="fp8")
    plan = fastest_plan(replace(request, calibration=own))
    document = plan_roofline(plan)
    priced = roofline_of(plan_traffic(plan).use.context)
    reached = [row["attained"]["tflops"] for row in document["products"]]
    assert reached == pytest.approx([row["tflops"] for row in priced["products"]])
    head = document["products"][-1]
    assert head["what"] == "LM head"
    assert head["peak_tflops"] == 989
    assert (
        head["bytes"]
        == 2 * (head["m"] * head["k"] + head["k"] * head["n"]) + 2 * head["m"] * head["n"]
    )


def planned(framework: str, pin: str, **changes: Any) -> Plan:
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "pin": pin}
    request = read_request(**asked, framework=framework, global_batch=64, seq_len=4096, **changes)
    return fastest_plan(request)


@pytest.mark.parametrize("train", ["full", "lora", "qlora"])
def test_parts_sum_to_the_compute_of_the_step(train: Any) -> None:
    plan = planned("fsdp2", "micro_batch=1,zero_stage=2", train=train)
    assert plan.predicted is not None
    document = plan_roofline(plan)
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["compute_s"])
    rest = ("dp_comm", "host", "step_overhead", "scale", "pipeline_bubble", "pipeline_p2p")
    waits_s = sum(plan.predicted.breakdown_s.get(name, 0.0) for name in rest)
    assert document["compute_s"] == pytest.approx(plan.predicted.step_time_s - waits_s)


@pytest.mark.parametrize("method", ["lora", "qlora", "lora-8bit"])
def test_products_beside_adapters_are_priced_as_layers_are(method: Any) -> None:
    """All of a block's products but what scales and adds up the adapters' results, ten bytes an output."""
    work = Workload(
        model=load_catalog_model("llama-3-8b"),
        cluster=read_cluster("dgx-h100"),
        gpus=8,
        global_batch=8,
        seq_len=4096,
        framework="fsdp2",
        adapters=AdapterSpec(method=method, rank=8, targets=("o_proj", "down_proj")),
    )
    layout = Layout(dp=8, zero_stage=2)
    c = make_context(work, layout, nested_placement(work.cluster, layout))
    rows = roofline_of(c)["products"]
    by_name = {row["name"]: row for row in rows}
    listed_s = sum(
        2.0 * row["shape"][0] * row["shape"][1] * row["shape"][2] / row["tflops"] / 1e12
        for row in rows
        if row["name"] != "LM head"
    )
    priced_s = attention_block(c).forward["gemm"] + dense_mlp(c, 14336).forward["gemm"]
    added_s = 2 * 10.0 * 4096 * 4096 / c.rates.hbm_bytes_per_s
    assert listed_s == pytest.approx(float(priced_s) - added_s)
    assert [name for name in by_name if " to " in name] == [
        *("attention output, 4096 to 8", "attention output, 8 to 4096"),
        *("MLP down, 14336 to 8", "MLP down, 8 to 4096"),
    ]
    bare = frozen_passes_s(c, 4096.0, 4096.0, 14336.0, 1).forward
    assert by_name["MLP down"]["tflops"] == pytest.approx(
        2.0 * 4096 * 4096 * 14336 / float(bare) / 1e12
    )
    if method == "lora-8bit":  # at the rate of 8-bit integers, less what quantising takes
        assert by_name["MLP down"]["flop_per_byte"] > 2300


def test_every_micro_batch_of_zero_3_gathers_again() -> None:
    """torchtitan's 10 bytes a parameter and micro-batch: two gathers and a sum in 4. No batch is long enough
    to hide them one after the other at 90 %."""
    plan = planned("torchtitan", "micro_batch=1,tp=1,pp=1,cp=1,zero_stage=3")
    network = plan_roofline(plan)["network"]
    inner = network["levels"][0]
    ratio = 6 * 4096 / ((2 * 2 + network["gradient_bytes"]) * 15 / 16)
    assert [row["flop_per_byte"] for row in inner["batches"]] == pytest.approx([ratio] * 3)
    assert inner["critical_batch"] == pytest.approx(0.0)
    assert inner["batch_90"]["serial"] is None
    assert roofline_view({"plan": plan_roofline(plan)})


def test_frozen_weights_are_worked_with_and_not_sent() -> None:
    """LoRA: 4 FLOP of a frozen parameter, 6 of an adapter's; bytes of the adapters alone."""
    plan = planned("megatron", "micro_batch=1,tp=1,pp=1,cp=1,zero_stage=1", train="lora")
    inner = plan_roofline(plan)["network"]["levels"][0]
    adapters = 32 * 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096)
    whole = parameter_count(plan.inputs.model)
    by_hand = 4 * 4096 * (4 * whole + 6 * adapters) / (6 * adapters * 15 / 16)
    assert inner["batches"][1]["flop_per_byte"] == pytest.approx(by_hand, rel=1e-3)


def test_a_plan_without_a_layout_has_no_roofs() -> None:
    plan = make_plan().model_copy(update={"layout": None})
    with pytest.raises(InfeasibleError, match="nothing is computed"):
        plan_roofline(plan)


@pytest.mark.parametrize("size", [0.0, -2.0, float("inf"), float("nan")])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(InputError, match="must be above 0, and finite"):
        network_roofline(1e15, {"a": 1e9}, seq_len=8, batches=(1.0,), gradient_bytes=size)
