"""A plan under its roofs, by hand: 8 billion parameters, tensor groups of 2, 8 sequences a rank and step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.errors import InfeasibleError, InputError
from meshwright.model_specs.parameters import attention_parameters, dense_mlp_parameters
from meshwright.planner.analysis.roofline import (
    network_roofline,
    plan_roofline,
    products_of_a_layer,
)
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.report.calculators_view import roofline_view
from meshwright.planner.request.reader import read_request
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
    held = sum(n * k for what, (_, n, k) in shapes.items() if what != "output head")
    biases = model.hidden * 20
    assert abs(held - attention_parameters(model) - dense_mlp_parameters(model)) <= biases


def test_a_plan_without_a_layout_has_no_roofs() -> None:
    plan = make_plan().model_copy(update={"layout": None})
    with pytest.raises(InfeasibleError, match="nothing is computed"):
        plan_roofline(plan)


@pytest.mark.parametrize("size", [0.0, -2.0, float("inf"), float("nan")])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(InputError, match="must be above 0, and finite"):
        network_roofline(1e15, {"a": 1e9}, seq_len=8, batches=(1.0,), gradient_bytes=size)
