"""A product or a whole plan under the roofs of compute, of memory and of the network of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import load_device, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.kernels import Rates, gemm_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.rates import (
    calibrated_constants,
    device_rates,
    kernel_rates,
    named_constants,
    peak_flops,
)
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.textbook import (
    ELEMENT_BYTES,
    data_parallel_flop_per_byte,
    overlap_ratio,
    regime,
    ridge_flop_per_byte,
)
from meshwright.errors import InfeasibleError, InputError, check_choice
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.model_specs.blocks import ATTENTION_NAMES, FULL
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted, layout_from_document

RESULT_BYTES = 2.0
"""Of a result element: results are written in 16 bits."""
MOST = 2**40


class KernelShape(NamedTuple):
    """`groups` products [rows, depth] x [depth, columns] of one micro-batch on one GPU."""

    name: str
    rows: float
    columns: float
    depth: float
    groups: float = 1.0
    sixteen_bit: bool = False


def roofline_document(device: str, m: int, n: int, k: int, precision: str) -> dict[str, Any]:
    """The product [m, k] x [k, n] under a device's roofline, at nominal peaks.

    Parameters
    ----------
    device
        Name of a device of the catalog.
    m, n, k
        Rows and columns of the result, and depth of the product; 1 to `MOST` each.
    precision
        Of the inputs, one of `ELEMENT_BYTES`.

    Returns
    -------
    dict
        FLOP, bytes moved once, FLOP per byte beside the ridge point, attainable TFLOP/s, and the least time
        in seconds; under `attained` what such a product reaches in a training step, as `estimate` prices it.

    Raises
    ------
    InputError
        For a size or precision that is not allowed, or an unknown device.
    """
    for name, size in (("--m", m), ("--n", n), ("--k", k)):
        if not 1 <= size <= MOST:
            raise InputError(f"must be from 1 to {MOST}", where=name, value=size)
    check_choice(precision, ELEMENT_BYTES, "--precision", "no such precision")
    spec = load_device(device)
    constants = named_constants(spec.name, spec.architecture, DEFAULT_FRAMEWORK, {})
    shape = KernelShape("product", float(m), float(n), float(k))
    product = product_under_roof(spec, shape, precision, device_rates(spec, precision, constants))
    return {"device": spec.name, "precision": precision, **product, "m": m, "n": n, "k": k}


def nominal_level_rates(cluster: ClusterSpec) -> dict[str, float]:
    """Nominal bytes a second of one GPU at every level of a cluster, one direction.

    Parameters
    ----------
    cluster
        All of its GPUs, whatever a run takes.
    """
    levels = fabric_levels(cluster, cluster.gpus)
    rates = zip(levels.names, levels.gb_per_s, strict=True)
    return {name: float(gb_per_s) * 1e9 for name, gb_per_s in rates}


def peak_and_rates(
    device: str | None, cluster: str | None, precision: str
) -> tuple[float | None, dict[str, float]]:
    """Nominal FLOP/s of a device, and bytes a second at every level of a cluster.

    Parameters
    ----------
    device
        Name of a device of the catalog; without one, the cluster's.
    cluster
        Catalog name or file of a cluster; without one there are no levels.
    precision
        Of the products, one of `ELEMENT_BYTES`.

    Raises
    ------
    InputError
        For an unknown device, or a cluster that cannot be read.
    """
    spec = None if cluster is None else read_cluster(cluster)
    rates = {} if spec is None else nominal_level_rates(spec)
    if device is not None:
        return peak_flops(load_device(device), precision), rates
    return None if spec is None else peak_flops(spec.device, precision), rates


def product_under_roof(
    spec: DeviceSpec, product: KernelShape, precision: str, rates: Rates
) -> dict[str, Any]:
    """One product under the roof of a device, and what such a product reaches in a training step.

    Parameters
    ----------
    spec
        The device.
    product
        Rows, columns and depth above 0. Of several in one launch each counts alone, at the rate of them all.
    precision
        Of the inputs, one of `ELEMENT_BYTES`; a product that stays at 16 bits has those of bf16.
    rates
        What the device attains at that precision.

    Returns
    -------
    dict
        What `roofline_document` says of a product.
    """
    m, n, k, groups = product.rows, product.columns, product.depth, product.groups
    if product.sixteen_bit and ELEMENT_BYTES[precision] < 2.0:
        precision = "bf16"
    flop = 2.0 * m * n * k
    moved_bytes = ELEMENT_BYTES[precision] * (m * k + k * n) + RESULT_BYTES * m * n
    intensity = flop / moved_bytes
    peak, bytes_per_s = peak_flops(spec, precision), spec.hbm_gb_per_s * 1e9
    ridge = float(ridge_flop_per_byte(peak, bytes_per_s))
    attainable = min(peak, intensity * bytes_per_s)
    launch_s = gemm_s(m, n, k, rates, groups=groups, sixteen_bit=product.sixteen_bit)
    seconds = float(np.asarray(launch_s)) / groups
    attained_flops = rates.head_gemm_flops if product.sixteen_bit else rates.gemm_flops
    return {
        "m": m,
        "n": n,
        "k": k,
        "flop": flop,
        "bytes": moved_bytes,
        "flop_per_byte": intensity,
        "ridge_flop_per_byte": ridge,
        "bound": "compute" if intensity >= ridge else "memory",
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": spec.hbm_gb_per_s,
        "attainable_tflops": attainable / 1e12,
        "least_seconds": flop / attainable,
        "attained": {
            "tflops": flop / seconds / 1e12,
            "seconds": seconds,
            "peak_tflops": attained_flops / 1e12,
            "hbm_gb_per_s": rates.hbm_bytes_per_s / 1e9,
        },
    }


# Compute against the network: FLOP per byte of data parallelism beside the ridge point of every level.
#
# A step of N parameters on a rank takes 6 N tokens FLOP and moves each of N gradients twice, so that the
# ratio of a dense model depends on the tokens alone: CCR = 3 tokens / gradient bytes. Against the ridge
# CCR* = peak FLOP/s over bytes/s it says what bounds the step.


ADVICE = {
    "severely communication-bound": "raise the micro-batches of a step (accumulate gradients), or shard less",
    "communication-bound": "raise the batch of a rank, overlap the exchange, or send gradients in fewer bits",
    "near the ridge": "overlap the exchange with the backward pass: both take about as long",
    "compute-bound": "nothing to gain from the network: look at kernels and precision",
}
"""What helps, by regime."""


def network_roofline(
    peak_flops: float,
    bytes_per_s: Mapping[str, float],
    *,
    seq_len: int,
    batches: Sequence[float],
    gradient_bytes: float = 2.0,
    efficiency: float = 0.9,
) -> dict[str, Any]:
    """Where batches of a rank lie under the roofs of the levels that their gradients may cross.

    Parameters
    ----------
    peak_flops
        Of a GPU, FLOP/s, above 0.
    bytes_per_s
        Of a GPU, by level, above 0.
    seq_len, batches
        Tokens of a sequence, and sequences of a rank and step; above 0.
    gradient_bytes
        Of an element as it is sent.
    efficiency
        Wished, above 0 and below 1: the batch that reaches it is said too.

    Returns
    -------
    dict
        Ridge (FLOP per byte), critical batch (sequences a rank), and by batch the ratio, the regime, what
        helps, and the efficiency with the exchange hidden and with none of it hidden. `batch_90`, or
        what percentage was wished, has the batch of a rank from which both reach it.

    Raises
    ------
    InputError
        For sizes that are not above 0.
    """
    sizes = (seq_len, gradient_bytes, peak_flops, *batches, *bytes_per_s.values())
    if not all(0 < size < inf for size in sizes):
        raise InputError(
            "must be above 0, and finite", where="--seq-len, --batch, --gradient-bytes"
        )
    if not 0 < efficiency < 1:
        raise InputError("must be above 0 and below 1", where="--efficiency", value=efficiency)
    rows = {
        batch: float(data_parallel_flop_per_byte(batch * seq_len, gradient_bytes))
        for batch in batches
    }
    levels = []
    for name, rate in bytes_per_s.items():
        ridge = float(ridge_flop_per_byte(peak_flops, rate))
        critical = ridge / float(data_parallel_flop_per_byte(seq_len, gradient_bytes))
        of_batches = [_batch(batch, ratio, ridge) for batch, ratio in rows.items()]
        levels.append(
            {
                "level": name,
                "gb_per_s": rate / 1e9,
                "ridge_flop_per_byte": ridge,
                "critical_batch": critical,
                f"batch_{100 * efficiency:.4g}": {
                    "overlapped": critical * efficiency,
                    "serial": critical * efficiency / (1.0 - efficiency),
                },
                "batches": of_batches,
            }
        )
    return {
        "efficiency_wished": efficiency,
        "peak_tflops": peak_flops / 1e12,
        "seq_len": seq_len,
        "gradient_bytes": gradient_bytes,
        "levels": levels,
    }


def _batch(batch: float, ratio: float, ridge: float) -> dict[str, Any]:
    bounds = regime(ratio, ridge)
    return {
        "batch": batch,
        "flop_per_byte": ratio,
        "regime": bounds,
        "advice": ADVICE[bounds],
        "efficiency_overlapped": min(1.0, ratio / ridge),
        "efficiency_serial": ratio / (ratio + ridge),
    }


# A plan under the roofs of its GPUs' compute, of their memory, and of the network that gradients cross.


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
        with the regime at that batch, a quarter and four times of it (None where no gradients are sent);
        a rank's work is that of the experts that its tokens choose, its gradients those of all it holds.

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
    products = products_of_a_layer(inputs.model, layout, tokens_of_a_sample(inputs))
    workload = workload_of_plan(plan)
    rates = kernel_rates(workload, calibrated_constants(workload))
    return {
        "device": device.name,
        "precision": precision,
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": device.hbm_gb_per_s,
        "memory_ridge_flop_per_byte": float(ridge_flop_per_byte(peak, device.hbm_gb_per_s * 1e9)),
        "products": [
            {"what": what, **product_under_roof(device, product, precision, rates)}
            for what, product in products.items()
        ],
        "batch_of_a_rank": _batch_of_a_rank(plan, layout),
        "network": _network(plan, layout, peak),
    }


def tokens_of_a_sample(inputs: PlanInputs) -> int:
    """Tokens of a sequence, or of both of a pair.

    Parameters
    ----------
    inputs
        Of a plan.
    """
    return STEP_KINDS[inputs.kind].sequences * inputs.seq_len


def products_of_a_layer(
    model: ModelSpec, layout: LayoutDoc, seq_len: int
) -> dict[str, KernelShape]:
    """Forward products [m, k] x [k, n] of one micro-batch on one GPU, by what they are for.

    Latent attention projects in several small steps before its heads; of it only the output is listed.

    Parameters
    ----------
    model
        What is trained.
    layout
        Degrees and micro-batch.
    seq_len
        Tokens of a sample.

    Returns
    -------
    dict
        By name. Of experts the mean rows of one expert, were all as popular.
    """
    tokens = layout.micro_batch * seq_len / layout.cp
    products = _products(model, tokens, (layout.tp, layout.etp, layout.ep))
    return {_PRODUCTS_OF_A_PLAN.get(each.name, each.name): each for each in products}


_PRODUCTS_OF_A_PLAN = {
    "MLP up": "feed-forward up",
    "MLP down": "feed-forward down",
    "experts up": "expert up",
    "experts down": "expert down",
    "LM head": "output head",
}
"""Other names of products, in the documents of plans."""


def _batch_of_a_rank(plan: Plan, layout: LayoutDoc) -> float:
    """Sequences whose gradients a rank adds up before they are exchanged."""
    return plan.inputs.global_batch / (layout.dp * layout.cp)


def _network(plan: Plan, layout: LayoutDoc, peak: float) -> dict[str, Any] | None:
    assert plan.predicted is not None
    crossed = {level.level for level in plan.predicted.level_traffic if level.by_axis.get("dp")}
    if not crossed:
        return None
    rates = nominal_level_rates(plan.inputs.cluster)
    workload = workload_of_plan(plan)
    batch = _batch_of_a_rank(plan, layout)
    sent_bytes = float(calibrated_constants(workload).framework.gradient_bytes)
    document = network_roofline(
        peak,
        {name: rate for name, rate in rates.items() if name in crossed},
        seq_len=tokens_of_a_sample(plan.inputs),
        batches=[factor * batch for factor in BATCH_FACTORS],
        gradient_bytes=sent_bytes / _work_of_a_gradient(workload.model, layout),
    )
    return document | {"gradient_bytes": sent_bytes}


def _work_of_a_gradient(model: ModelSpec, layout: LayoutDoc) -> float:
    """Parameters that a token works with on the mean rank, over gradients that the rank exchanges.

    1 of a dense model. Of a layer's E experts, E / ep on a rank, tokens work with k each; a tensor group
    shares its tokens among etp. Experts that no other rank has are not exchanged.
    """
    moe = model.moe
    if moe is None:
        return 1.0
    plain = layout_from_document(layout)
    dense, experts = (float(np.asarray(part)) for part in rank_parameters(model, plain, None))
    share = moe.top_k * layout.expert_group / (layout.tp * moe.experts)
    return (dense + share * experts) / (dense + (experts if int(plain.edp) > 1 else 0.0))


# The matrix products of a plan's layers under the roofline of its device.
#
# Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
# architectures": attainable FLOP/s = min(peak, FLOP per byte x bytes/s).


def roofline_of(c: Context) -> dict[str, Any]:
    """The forward products of one micro-batch on one GPU.

    Parameters
    ----------
    c
        Of one layout, in plain numbers.

    Returns
    -------
    dict
        The device's nominal `peak_tflops` and `hbm_gb_per_s`, and the `products`: shape, FLOP per byte of
        operands and result, and the TFLOP/s that the cost model expects.
    """
    device, precision = c.workload.cluster.device, c.workload.precision
    return {
        "device": device.name,
        "precision": precision,
        "peak_tflops": peak_flops(device, precision) / 1e12,
        "hbm_gb_per_s": device.hbm_gb_per_s,
        "products": [_point(product, c) for product in products_of(c)],
    }


def _attention_widths(model: ModelSpec, tp: int) -> Iterator[tuple[str, float | None, float]]:
    """Name of attention of each kind with heads of its own, and its widths on a tensor rank: what its inputs
    are projected to, None of latent attention, and what its output is projected from."""
    if not model.blocks.attention:
        return
    kinds = {"attention": model}
    for letter, kind in model.kinds_apart.items():
        if letter != FULL and kind.attention is None:
            kinds[f"{ATTENTION_NAMES[letter]} attention"] = kind
    for name, kind in kinds.items():
        of_head = kind.qk_head_dim + (0 if kind.values_are_keys else kind.v_head_dim)
        key_value = 0.0 if kind.reuses else max(kind.kv_heads / tp, 1.0) * of_head
        inputs = None if kind.attention else kind.heads / tp * kind.qk_head_dim + key_value
        yield name, inputs, kind.heads / tp * kind.v_head_dim


def products_of(c: Context) -> Iterator[KernelShape]:
    """The large products of a layer and the LM head; of latent attention the output alone.

    Parameters
    ----------
    c
        Of one layout, in plain numbers.
    """
    degrees = int(c.layout.tp), int(c.layout.etp), int(c.layout.ep)
    return _products(c.workload.model, float(np.asarray(c.tokens)), degrees)


def _products(
    model: ModelSpec, tokens: float, degrees: tuple[int, int, int]
) -> Iterator[KernelShape]:
    """The same of so many tokens of a micro-batch, on ranks of the degrees tp, etp and ep."""
    hidden, (tp, etp, ep) = model.hidden, degrees
    if (mamba := model.state_space) is not None:
        yield KernelShape(f"{mamba.title} inputs", tokens, mamba.projected_width / tp, hidden)
        yield KernelShape(f"{mamba.title} output", tokens, hidden, mamba.width / tp)
    for name, inputs_width, output_width in _attention_widths(model, tp):
        if inputs_width is not None:
            yield KernelShape(f"{name} inputs", tokens, inputs_width, hidden)
        yield KernelShape(f"{name} output", tokens, hidden, output_width)
    matrices = 2 if model.gated else 1
    if model.has_dense_feed_forward:
        width = model.ffn_hidden / tp
        yield KernelShape("MLP up", tokens, matrices * width, hidden)
        yield KernelShape("MLP down", tokens, hidden, width)
    moe = model.moe
    if moe is not None:
        experts, width, outside = moe.experts / ep, moe.moe_ffn_hidden / etp, model.routed_width
        rows = tokens / tp * moe.top_k * etp / experts
        if moe.latent_size is not None:
            yield KernelShape("projection to experts", tokens / tp, outside, hidden)
            yield KernelShape("projection from experts", tokens / tp, hidden, outside)
        yield KernelShape("experts up", rows, matrices * width, outside, experts)
        yield KernelShape("experts down", rows, outside, width, experts)
    yield KernelShape("LM head", tokens, model.vocab / tp, hidden, sixteen_bit=True)


def _point(product: KernelShape, c: Context) -> dict[str, Any]:
    workload = c.workload
    row = product_under_roof(workload.cluster.device, product, workload.precision, c.rates)
    return {
        "name": product.name,
        "shape": [product.rows, product.columns, product.depth],
        "groups": product.groups,
        "flop_per_byte": row["flop_per_byte"],
        "tflops": row["attained"]["tflops"],
    }


# What a plan's communication hides beside its compute, axis by axis.


COMPUTE_PARTS = (
    *("gemm", "expert_gemm", "attention", "memory_bound", "head", "image_encoder"),
    *("recompute", "scoring", "optimizer"),
)
"""Parts of the breakdown in which a GPU computes."""
EXPOSED_PARTS = {axis: (f"{axis}_comm",) for axis in MEGATRON_DEFAULT} | {"pp": ("pipeline_p2p",)}
"""Parts of the breakdown in which nothing hides an axis' communication."""


def plan_overlap(plan: Plan) -> dict[str, Any]:
    """R = T_comm / T_comp of every axis that sends, and how much of it runs beside compute.

    T_comm is the time that a GPU's share of the links carries the axis' bytes, over all levels; T_comp what
    the busiest GPU computes in a step; hidden is 1 less exposed over T_comm, at least 0: start-ups and
    waiting for the slowest member are exposed without keeping a link busy.

    Parameters
    ----------
    plan
        A finished plan.

    Returns
    -------
    dict
        `compute_s`; under `axes` by axis `communication_s`, which a step would wait for were nothing done at
        once (for context parallelism: with a single buffer), `exposed_s`, `overlap_ratio` and `hidden_share`;
        `gradient_buckets`, None where they are not of a set size.

    Raises
    ------
    InfeasibleError
        Where the plan has no layout.
    """
    predicted = plan.predicted
    if predicted is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status}): nothing is sent")
    compute_s = sum(predicted.breakdown_s.get(name, 0.0) for name in COMPUTE_PARTS)
    busy_s = _busy_by_axis(predicted)
    return {
        "compute_s": compute_s,
        "axes": {axis: _axis_row(predicted, axis, busy_s[axis], compute_s) for axis in busy_s},
        "gradient_buckets": _gradient_buckets(plan),
    }


def _gradient_buckets(plan: Plan) -> dict[str, Any] | None:
    """Size and number of the collectives that reduce a rank's gradients, and who chose the size."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    stack = stack_constants(workload)
    parameters = float(np.asarray(bucket_parameters(workload, stack, layout)))
    if not parameters or not workload.dp_overlap:
        return None
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    held = rank_parameters(workload.model, layout, stages)
    largest = max(
        share * float(np.max(part))
        for part, share in zip(held, workload.trained_shares, strict=True)
    )
    return {
        "bucket_mb": stack.gradients_mb(min(parameters, largest)),
        "count": ceil(largest / parameters),
        "chosen_by": "framework" if workload.bucket_mb is None else "plan",
    }


def _axis_row(
    predicted: Predicted, axis: str, communication_s: float, compute_s: float
) -> dict[str, float]:
    parts = EXPOSED_PARTS.get(axis, ())
    exposed_s = sum(predicted.breakdown_s.get(name, 0.0) for name in parts)
    return {
        "communication_s": communication_s,
        "exposed_s": exposed_s,
        "overlap_ratio": float(overlap_ratio(communication_s, compute_s)),
        "hidden_share": max(0.0, 1.0 - exposed_s / communication_s),
    }


def _busy_by_axis(predicted: Predicted) -> dict[str, float]:
    """Seconds that a GPU's share of the links carries each axis, summed over the levels."""
    busy_s: dict[str, float] = {}
    for level in predicted.level_traffic:
        for axis, sent_bytes in level.by_axis.items():
            share = sent_bytes / level.bytes_per_step
            busy_s[axis] = busy_s.get(axis, 0.0) + level.mean_s * share
    return {axis: seconds for axis, seconds in sorted(busy_s.items()) if seconds > 0}
