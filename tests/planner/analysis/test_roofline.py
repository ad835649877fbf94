"""A plan under its roofs, by hand: 8 billion parameters, tensor groups of 2, 8 sequences a rank and step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.calibration import Factors
from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.parameters import attention_parameters, dense_mlp_parameters
from meshwright.planner.analysis.roofline import (
    network_roofline,
    plan_roofline,
    products_of_a_layer,
    roofline_of,
)
from meshwright.planner.analysis.traffic import plan_traffic
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.calculators_view import roofline_view
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.calibration.service import draft_stack
from tests.plans import make_plan


def test_products_and_gradients_by_hand() -> None:
    pin = "micro_batch=2,tp=2,pp=1,cp=1"
    asked: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "pin": pin}
    document = plan_roofline(fastest_plan(read_request(**asked, global_batch=64, seq_len=4096)))
    assert document["batch_of_a_rank"] == 64 / 8
    down = {row["what"]: row for row in document["products"]}["feed-forward down"]
    m, n, k = 2 * 4096, 4096, 14336 / 2
    assert (down["m"], down["n"], down["k"]) == (m, n, k)
    assert down["flop_per_byte"] == pytest.approx(2 * m * n * k / (2 * (m * k + k * n + m * n)))
    assert down["bound"] == "compute"
    levels = {level["level"]: level for level in document["network"]["levels"]}
    assert set(levels) == {"nvlink", "fabric"}
    own = levels["fabric"]["batches"][1]
    # 3 tokens FLOP a byte of 32-bit gradients over 4 bytes, against 989 TFLOP/s over 50 GB/s.
    assert own["flop_per_byte"] == 3 * 8 * 4096 / 4
    assert levels["fabric"]["ridge_flop_per_byte"] == pytest.approx(989e12 / 50e9)
    assert own["regime"] == "compute-bound"
    assert roofline_view({"plan": document})
    json.dumps(document)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl"])
def test_the_products_hold_every_parameter_of_a_layer(name: str) -> None:
    plan = make_plan(name)
    assert plan.layout is not None
    model = plan.inputs.model
    whole = plan.layout.model_copy(update={"tp": 1})
    shapes = products_of_a_layer(model, whole, 1024)
    layers = [product for what, product in shapes.items() if what != "output head"]
    held = sum(product.columns * product.depth for product in layers)
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
    assert flop_per_byte[1] == pytest.approx(3 * 32 * 4096 / 4 * 12.88 / 46.70, rel=0.01)
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
    assert head["what"] == "output head"
    assert head["peak_tflops"] == 989
    assert (
        head["bytes"]
        == 2 * (head["m"] * head["k"] + head["k"] * head["n"]) + 2 * head["m"] * head["n"]
    )


def test_a_plan_without_a_layout_has_no_roofs() -> None:
    plan = make_plan().model_copy(update={"layout": None})
    with pytest.raises(InfeasibleError, match="nothing is computed"):
        plan_roofline(plan)


@pytest.mark.parametrize("size", [0.0, -2.0, float("inf"), float("nan")])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(InputError, match="must be above 0, and finite"):
        network_roofline(1e15, {"a": 1e9}, seq_len=8, batches=(1.0,), gradient_bytes=size)
