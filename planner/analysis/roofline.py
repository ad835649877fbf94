"""A plan under the roofs of its GPUs' compute, of their memory, and of the network that gradients cross."""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.constants.calibrated import calibrated_constants
from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.ratios import ridge_flop_per_byte
from meshwright.errors import InfeasibleError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.calculators.network_roofline import network_roofline
from meshwright.planner.calculators.roofline import nominal_level_rates, product_under_roof
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.runs.predicted import LayoutDoc

Shape = tuple[float, float, float]
BATCH_FACTORS = (0.25, 1.0, 4.0)
"""Batches of a rank that are shown, over the plan's own."""


def plan_roofline(plan: Plan) -> dict[str, Any]:
    """Where the matrix products and the gradients of a plan lie under the roofs of its machine.

    Parameters
    ----------
    plan
        A finished plan.

    Returns
    -------
    dict
        `device`, `precision`, `peak_tflops`, `hbm_gb_per_s`, `memory_ridge_flop_per_byte`; `products`, each
        with `what`, its shape, FLOP per byte, what bounds it, attainable and attained TFLOP/s;
        `batch_of_a_rank`, sequences a step; and `network`, the ridge of every level that gradients cross,
        with the regime at that batch, a quarter and four times of it (None where no gradients are sent).

    Raises
    ------
    InfeasibleError
        Where the plan has no layout.
    """
    if plan.layout is None or plan.predicted is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status}): nothing is computed")
    layout, inputs = plan.layout, plan.inputs
    device, precision = inputs.cluster.device, inputs.precision
    peak = peak_flops(device, precision)
    shapes = products_of_a_layer(inputs.model, layout, inputs.seq_len)
    return {
        "device": device.name,
        "precision": precision,
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": device.hbm_gb_per_s,
        "memory_ridge_flop_per_byte": float(ridge_flop_per_byte(peak, device.hbm_gb_per_s * 1e9)),
        "products": [
            {"what": what, **product_under_roof(device, shape, precision)}
            for what, shape in shapes.items()
        ],
        "batch_of_a_rank": _batch_of_a_rank(plan, layout),
        "network": _network(plan, layout, peak),
    }


def products_of_a_layer(model: ModelSpec, layout: LayoutDoc, seq_len: int) -> dict[str, Shape]:
    """Forward products [m, k] x [k, n] of one micro-batch on one GPU, by what they are for.

    Latent attention projects in several small steps before its heads; of it only the output is listed.

    Parameters
    ----------
    model
        What is trained.
    layout
        Degrees and micro-batch.
    seq_len
        Tokens of a sequence.

    Returns
    -------
    dict
        (m, n, k) by name. Of experts the mean rows of one expert, were all as popular.
    """
    tokens = layout.micro_batch * seq_len / layout.cp
    hidden, tp = float(model.hidden), layout.tp
    inputs = 2 if model.gated else 1
    shapes: dict[str, Shape] = {}
    if (mamba := model.state_space) is not None:
        shapes[f"{mamba.title} inputs"] = (tokens, mamba.projected_width / tp, hidden)
        shapes[f"{mamba.title} output"] = (tokens, hidden, mamba.width / tp)
    if model.attention is None and model.blocks.attention:
        key_value = max(model.kv_heads / tp, 1.0) * (model.qk_head_dim + model.v_head_dim)
        shapes["attention inputs"] = (
            tokens,
            model.heads / tp * model.qk_head_dim + key_value,
            hidden,
        )
    if model.blocks.attention:
        shapes["attention output"] = (tokens, hidden, model.heads / tp * model.v_head_dim)
    if model.has_dense_feed_forward:
        width = model.ffn_hidden / tp
        shapes["feed-forward up"] = (tokens, inputs * width, hidden)
        shapes["feed-forward down"] = (tokens, hidden, width)
    if model.moe is not None:
        rows = tokens / tp * model.moe.top_k * layout.etp * layout.ep / model.moe.experts
        width = model.moe.moe_ffn_hidden / layout.etp
        shapes["expert up"] = (rows, inputs * width, hidden)
        shapes["expert down"] = (rows, hidden, width)
    shapes["output head"] = (tokens, model.vocab / tp, hidden)
    return shapes


def _batch_of_a_rank(plan: Plan, layout: LayoutDoc) -> float:
    """Sequences whose gradients a rank adds up before they are exchanged."""
    return plan.inputs.global_batch / (layout.dp * layout.cp)


def _network(plan: Plan, layout: LayoutDoc, peak: float) -> dict[str, Any] | None:
    assert plan.predicted is not None
    crossed = {level.level for level in plan.predicted.level_traffic if level.by_axis.get("dp")}
    if not crossed:
        return None
    rates = nominal_level_rates(plan.inputs.cluster)
    constants = calibrated_constants(workload_of_plan(plan))
    batch = _batch_of_a_rank(plan, layout)
    return network_roofline(
        peak,
        {name: rate for name, rate in rates.items() if name in crossed},
        seq_len=plan.inputs.seq_len,
        batches=[factor * batch for factor in BATCH_FACTORS],
        gradient_bytes=float(constants.framework.gradient_bytes),
    )
