"""A product or a whole plan under the roofs of compute, of memory and of the network of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.reader import load_device, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, DeviceSpec
from meshwright.costmodel.adapters import INT8_SPEED, adapted_outputs, frozen_passes_s, widening_s
from meshwright.costmodel.attention import latent_shapes, projected_outputs
from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.kernels import Rates, gemm_s
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Ints
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.rates import device_rates, named_constants, peak_flops
from meshwright.costmodel.stacks import stack_constants
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.textbook import (
    ELEMENT_BYTES,
    data_parallel_flop_per_byte,
    overlap_ratio,
    regime,
    ridge_flop_per_byte,
)
from meshwright.costmodel.volumes import group_traffic
from meshwright.errors import InfeasibleError, InputError, check_choice
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.model_specs.adapters import LATENT_DOWN, LATENT_UP
from meshwright.model_specs.blocks import ATTENTION_NAMES, FULL
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import workload_of_plan
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
    eight_bit: bool = False
    """Whether its inputs are 8-bit integers, whatever the run's precision."""
    attained_s: float | None = None
    """What it takes in a step where `kernels.gemm_s` alone does not say so."""


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
    faster = INT8_SPEED if product.eight_bit else 1.0
    flop = 2.0 * m * n * k
    moved_bytes = ELEMENT_BYTES[precision] / faster * (m * k + k * n) + RESULT_BYTES * m * n
    intensity = flop / moved_bytes
    peak, bytes_per_s = faster * peak_flops(spec, precision), spec.hbm_gb_per_s * 1e9
    ridge = float(ridge_flop_per_byte(peak, bytes_per_s))
    attainable = min(peak, intensity * bytes_per_s)
    launch_s: Floats | None = product.attained_s
    if launch_s is None:
        launch_s = gemm_s(m, n, k, rates, groups=groups, sixteen_bit=product.sixteen_bit)
    seconds = float(np.asarray(launch_s)) / groups
    attained_flops = rates.head_gemm_flops if product.sixteen_bit else faster * rates.gemm_flops
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
# CCR* = peak FLOP/s over bytes/s it says what bounds the step. Of a plan its own bytes count, level by level.


ADVICE = {
    "severely communication-bound": "raise the micro-batches of a step (accumulate gradients), or shard less",
    "communication-bound": "raise the batch of a rank, overlap the exchange, or send gradients in fewer bits",
    "near the ridge": "overlap the exchange with the backward pass: both take about as long",
    "compute-bound": "nothing to gain from the network: look at kernels and precision",
}
"""What helps, by regime."""
ADVICE_OF_EACH = "larger micro-batches, or shard less: every micro-batch sends this again"
"""Where more micro-batches do not help."""


class Exchange(NamedTuple):
    """FLOP of a rank for each of its sequences; bytes that it sends in a step, and for each besides."""

    flop: float
    step_bytes: float
    sequence_bytes: float = 0.0

    def flop_per_byte(self, batch: float) -> float:
        """Intensity of so many sequences of a rank and step, above 0."""
        return self.flop * batch / (self.step_bytes + self.sequence_bytes * batch)

    def batch_of(self, flop_per_byte: float) -> float | None:
        """Sequences of a rank and step from which on an intensity is reached; None where none are enough."""
        gained = self.flop - flop_per_byte * self.sequence_bytes
        return flop_per_byte * self.step_bytes / gained if gained > 0 else None


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
    ratio = float(data_parallel_flop_per_byte(seq_len, gradient_bytes))
    exchanges = dict.fromkeys(bytes_per_s, Exchange(ratio, 1.0))
    return {
        "efficiency_wished": efficiency,
        "peak_tflops": peak_flops / 1e12,
        "seq_len": seq_len,
        "gradient_bytes": gradient_bytes,
        "levels": _levels(peak_flops, bytes_per_s, exchanges, batches, efficiency),
    }


def _levels(
    peak_flops: float,
    bytes_per_s: Mapping[str, float],
    exchanges: Mapping[str, Exchange],
    batches: Sequence[float],
    efficiency: float,
) -> list[dict[str, Any]]:
    """Ridge, critical batch and batches of every level, each with what crosses it."""
    levels = []
    for name, rate in bytes_per_s.items():
        exchange = exchanges[name]
        ridge = float(ridge_flop_per_byte(peak_flops, rate))
        levels.append(
            {
                "level": name,
                "gb_per_s": rate / 1e9,
                "ridge_flop_per_byte": ridge,
                "critical_batch": exchange.batch_of(ridge),
                f"batch_{100 * efficiency:.4g}": {
                    "overlapped": exchange.batch_of(ridge * efficiency),
                    "serial": exchange.batch_of(ridge * efficiency / (1.0 - efficiency)),
                },
                "batches": [_batch(batch, exchange, ridge) for batch in batches],
            }
        )
    return levels


def _batch(batch: float, exchange: Exchange, ridge: float) -> dict[str, Any]:
    ratio = exchange.flop_per_byte(batch)
    bounds = regime(ratio, ridge)
    each_time = bounds != "compute-bound" and exchange.batch_of(ridge) is None
    return {
        "batch": batch,
        "flop_per_byte": ratio,
        "regime": bounds,
        "advice": ADVICE_OF_EACH if each_time else ADVICE[bounds],
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
        with `what`, its shape, FLOP per byte, what bounds it, attainable and attained TFLOP/s; `compute_s`,
        what the busiest rank computes in a step, the sum of the parts under `breakdown_s`;
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
    c = _context(plan, plan.layout)
    device = c.workload.cluster.device
    precision = c.workload.precision
    peak = peak_flops(device, precision)
    parts = plan.predicted.breakdown_s
    compute_s = {name: parts[name] for name in COMPUTE_PARTS if parts.get(name)}
    return {
        "device": device.name,
        "precision": precision,
        "peak_tflops": peak / 1e12,
        "hbm_gb_per_s": device.hbm_gb_per_s,
        "memory_ridge_flop_per_byte": float(ridge_flop_per_byte(peak, device.hbm_gb_per_s * 1e9)),
        "products": [
            {"what": each.name, **product_under_roof(device, each, precision, c.rates)}
            for each in products_of(c)
        ],
        "compute_s": sum(compute_s.values()),
        "breakdown_s": compute_s,
        "batch_of_a_rank": plan.inputs.global_batch / (plan.layout.dp * plan.layout.cp),
        "network": _network(plan, c, peak),
    }


def _context(plan: Plan, document: LayoutDoc) -> Context:
    """What the kernels of a plan are priced with; wherever its groups lie."""
    layout = layout_from_document(document)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    return make_context(workload, layout, nested_placement(workload.cluster, layout))


def _network(plan: Plan, c: Context, peak: float) -> dict[str, Any] | None:
    """Gradients and gathered weights of a rank under the levels that they cross, by the plan's own bytes."""
    assert plan.predicted is not None
    assert plan.layout is not None
    sent = {row.level: row.by_axis.get("dp", 0.0) for row in plan.predicted.level_traffic}
    rates = nominal_level_rates(plan.inputs.cluster)
    crossed = {name: rate for name, rate in rates.items() if sent.get(name)}
    if not crossed:
        return None
    batch = plan.inputs.global_batch / (plan.layout.dp * plan.layout.cp)
    tokens = STEP_KINDS[plan.inputs.kind].sequences * plan.inputs.seq_len
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    flop = tokens * _flop_of_a_token(c, stages)
    once = _sent_once(c, stages)
    exchanges = {
        name: Exchange(
            flop=flop,
            step_bytes=once * sent[name],
            sequence_bytes=(1.0 - once) * sent[name] / batch,
        )
        for name in crossed
    }
    batches = [factor * batch for factor in BATCH_FACTORS]
    efficiency = 0.9
    return {
        "efficiency_wished": efficiency,
        "peak_tflops": peak / 1e12,
        "seq_len": tokens,
        "gradient_bytes": float(c.constants.framework.gradient_bytes),
        "levels": _levels(peak, crossed, exchanges, batches, efficiency),
    }


def _flop_of_a_token(c: Context, stages: Stages) -> float:
    """FLOP of the products of the rank with the most parameters, for each token of its replica.

    6 a parameter (Kaplan et al. 2020, arXiv 2001.08361, section 2.1); of a frozen one 4, as it has no
    gradient, and 6 of each that an adapter adds; 2 for each pass that scores. Of a layer's E experts, E / ep
    on a rank, tokens work with k each; a tensor group shares its tokens among etp.
    """
    workload = c.workload
    layout = c.layout
    share = 1.0
    moe = workload.model.moe
    if moe is not None:
        share = moe.top_k * int(np.asarray(layout.expert_group)) / (int(layout.tp) * moe.experts)
    held = rank_parameters(workload.model, layout, stages)
    passes = (6.0 if workload.adapters is None else 4.0) + 2.0 * workload.scoring_passes
    adapters = 0.0 if workload.adapters is None else 6.0
    return sum(
        works * float(np.max(part)) * (passes + adapters * trained)
        for part, trained, works in zip(held, workload.trained_shares, (1.0, share), strict=True)
    )


def _sent_once(c: Context, stages: Stages) -> float:
    """Share of the bytes of data parallelism that a step sends whatever the number of its micro-batches."""
    twice = replace(c.layout, num_micro_batches=2 * np.asarray(c.layout.num_micro_batches))
    own = _gradient_bytes(c, stages)
    doubled = _gradient_bytes(replace(c, layout=twice), stages)
    return max(2.0 - doubled / own, 0.0) if own else 1.0


def _gradient_bytes(c: Context, stages: Stages) -> float:
    sent = group_traffic(c, stages)
    dense = sent.gradients + sent.gradients_between
    return dense + sent.expert_gradients + sent.expert_gradients_between


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


def products_of(c: Context) -> Iterator[KernelShape]:
    """The large products of a layer of each kind, of the adapters beside them, and of the LM head.

    Parameters
    ----------
    c
        Of one layout, in plain numbers. Of experts the mean rows of one, were all as popular.
    """
    model = c.workload.model
    tokens = _number(c.tokens)
    tp, etp, ep = (_number(x) for x in (c.layout.tp, c.layout.etp, c.layout.ep))
    hidden = model.hidden
    if (mamba := model.state_space) is not None:
        inputs, width = mamba.projected_width / tp, mamba.width / tp
        yield from _linear(c, f"{mamba.title} inputs", tokens, hidden, {"in_proj": inputs})
        yield from _linear(c, f"{mamba.title} output", tokens, width, {"out_proj": hidden})
    yield from _attention_products(c)
    if model.has_dense_feed_forward:
        yield from _feed_forward_products(c, "MLP", model.ffn_hidden / tp)
    moe = model.moe
    if moe is not None:
        if moe.shared_width:
            yield from _feed_forward_products(c, "shared expert", moe.shared_width / tp)
        experts, width, outside = moe.experts / ep, moe.moe_ffn_hidden / etp, model.routed_width
        rows = tokens / tp * moe.top_k * etp / experts
        if moe.latent_size is not None:
            own = tokens / tp
            yield from _linear(c, "projection to experts", own, hidden, {LATENT_DOWN: outside})
            yield from _linear(c, "projection from experts", own, outside, {LATENT_UP: hidden})
        inner = (2 if model.gated else 1) * width
        for name, columns, depth in (("up", inner, outside), ("down", outside, width)):
            each = KernelShape(f"experts {name}", rows, columns, depth, experts)
            grouped_s = gemm_s(rows, columns, depth, c.rates, groups=experts)
            widened_s = widening_s(c, experts * columns * depth)
            yield each._replace(attained_s=_number(grouped_s + widened_s))
    if c.workload.step_kind.has_vocabulary_head:
        yield KernelShape("LM head", tokens, model.vocab / tp, hidden, sixteen_bit=True)


def _number(value: Floats | Ints) -> float:
    """Of one layout."""
    return float(np.asarray(value))


def _attention_products(c: Context) -> Iterator[KernelShape]:
    """Projections of attention of each kind with heads of its own."""
    model = c.workload.model
    tokens = _number(c.tokens)
    if not model.blocks.attention:
        return
    kinds = {"attention": model}
    for letter, kind in model.kinds_apart.items():
        if letter != FULL and kind.attention is None:
            kinds[f"{ATTENTION_NAMES[letter]} attention"] = kind
    for name, kind in kinds.items():
        own = replace(c, workload=c.workload.of_kind(kind))
        if kind.attention is None:
            yield from _linear(own, f"{name} inputs", tokens, kind.hidden, projected_outputs(own))
        else:
            shared = tokens / _number(own.sequence_shards)
            for rows, matrices in zip((shared, tokens), latent_shapes(own), strict=True):
                for matrix, columns, depth in matrices:
                    yield from _linear(own, f"{name} {matrix}", rows, depth, {matrix: columns})
        width = kind.heads / _number(c.layout.tp) * kind.v_head_dim
        yield from _linear(own, f"{name} output", tokens, width, {"o_proj": kind.hidden})


def _feed_forward_products(c: Context, name: str, width: float) -> Iterator[KernelShape]:
    tokens = _number(c.tokens)
    model = c.workload.model
    names = ("gate_proj", "up_proj") if model.gated else ("up_proj",)
    yield from _linear(c, f"{name} up", tokens, model.hidden, dict.fromkeys(names, width))
    yield from _linear(c, f"{name} down", tokens, width, {"down_proj": model.hidden})


def _linear(
    c: Context, name: str, tokens: float, depth: float, outputs: Mapping[str, Floats]
) -> Iterator[KernelShape]:
    """Matrices that share an input, as `feed_forward.linear` runs them forward: one product, and of each
    adapter beside them one to its rank and one from it.
    """
    columns = float(sum(np.asarray(width) for width in outputs.values()))
    product = KernelShape(name, tokens, columns, depth)
    adapters = c.workload.adapters
    if adapters is None:
        yield product
        return
    passes = frozen_passes_s(c, tokens, columns, depth, len(outputs))
    yield product._replace(
        eight_bit=adapters.base_bits == 8,
        attained_s=_number(passes.forward),
    )
    rank = float(adapters.rank)
    widths = dict.fromkeys(_number(width) for width in adapted_outputs(c.workload, outputs))
    if widths:
        yield KernelShape(f"{name}, {depth:g} to {rank:g}", tokens, rank, depth, sixteen_bit=True)
    for width in widths:
        yield KernelShape(f"{name}, {rank:g} to {width:g}", tokens, width, rank, sixteen_bit=True)


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
    parameters = _number(bucket_parameters(workload, stack, layout))
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
