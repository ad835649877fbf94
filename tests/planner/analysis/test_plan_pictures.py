"""What the page's charts of traffic and kernels draw, against the parts of the cost model."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.costmodel.attention import attention_block
from meshwright.costmodel.feed_forward import dense_mlp, moe_mlp
from meshwright.costmodel.kernels import gemm_s
from meshwright.costmodel.layer_kinds import head
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.analysis.roofline import KernelShape, products_of, roofline_of
from meshwright.planner.analysis.traffic import PlanTraffic, plan_traffic, traffic_matrix
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from tests.planner.analysis.test_trace import piped
from tests.planner.plan.test_planner_service import request


@pytest.fixture(scope="module")
def traffic() -> PlanTraffic:
    return plan_traffic(piped("1f1b"))


def test_the_matrix_holds_what_the_groups_send(traffic: PlanTraffic) -> None:
    """Volumes added up by hand: every member of a ring sends its volume once, of a chain to both sides."""
    document = traffic_matrix(traffic.use)
    sent = np.array(document["bytes"])
    assert document["unit"] == "node"
    assert sent.shape == (4, 4)
    total = 0.0
    for flow in traffic.use.axes:
        groups, members = flow.groups.shape
        if flow.kind == "ring":
            total += groups * members * flow.volume
        elif flow.kind == "chain":
            total += groups * 2 * ((members - 1) * flow.volume + flow.wrap)
    assert sent.sum() == pytest.approx(total)
    tensor = sum(flow.groups.size * flow.volume for flow in traffic.use.axes if flow.axis == "tp")
    assert np.trace(sent) >= tensor > 0


def test_blocks_are_put_together(traffic: PlanTraffic) -> None:
    fine = np.array(traffic_matrix(traffic.use)["bytes"])
    coarse = traffic_matrix(traffic.use, most_blocks=2)
    assert coarse["per_block"] == 2
    folded = fine.reshape(2, 2, 2, 2).sum(axis=(1, 3))
    assert np.array(coarse["bytes"]) == pytest.approx(folded)


def seconds(products: list[KernelShape], traffic: PlanTraffic) -> float:
    return sum(
        float(
            np.asarray(
                gemm_s(
                    each.rows,
                    each.columns,
                    each.depth,
                    traffic.use.context.rates,
                    groups=each.groups,
                    sixteen_bit=each.sixteen_bit,
                )
            )
        )
        for each in products
    )


def test_the_products_are_those_that_the_layers_are_priced_by(traffic: PlanTraffic) -> None:
    c = traffic.use.context
    products = {product.name: product for product in products_of(c)}
    attention = [products["attention inputs"], products["attention output"]]
    mlp = [products["MLP up"], products["MLP down"]]
    assert seconds(attention, traffic) == pytest.approx(attention_block(c).forward["gemm"])
    priced = dense_mlp(c, c.workload.model.ffn_hidden).forward["gemm"]
    assert seconds(mlp, traffic) == pytest.approx(priced)
    assert seconds([products["LM head"]], traffic) == pytest.approx(head(c).forward["gemm"])


def test_products_of_experts_and_no_point_above_the_roof() -> None:
    pins = {"tp": 2, "pp": 2, "ep": 4, "micro_batch": 1, "recompute": "none"}
    asked = request(model=load_catalog_model("mixtral-8x7b"), pins=pins, without=WITHOUT)
    traffic = plan_traffic(fastest_plan(asked))
    c = traffic.use.context
    experts = [product for product in products_of(c) if product.name.startswith("experts")]
    priced = moe_mlp(c).forward["expert_gemm"]
    assert seconds(experts, traffic) <= float(np.asarray(priced)) * (1 + 1e-9)
    roof = roofline_of(c)
    for point in roof["products"]:
        limit = min(roof["peak_tflops"], point["flop_per_byte"] * roof["hbm_gb_per_s"] / 1e3)
        assert 0 < point["tflops"] <= limit
