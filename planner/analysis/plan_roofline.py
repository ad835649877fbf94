"""The matrix products of a plan's layers under the roofline of its device.

Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak, FLOP per byte x bytes/s).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kernels import gemm_s


class KernelShape(NamedTuple):
    """`groups` products [rows, depth] x [depth, columns] of one micro-batch on one GPU."""

    name: str
    rows: float
    columns: float
    depth: float
    groups: float = 1.0
    sixteen_bit: bool = False


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
    """The large products of a layer and the LM head; of latent attention the output alone."""
    model, layout = c.workload.model, c.layout
    tokens, tp = float(np.asarray(c.tokens)), int(layout.tp)
    heads, hidden = model.heads / tp, model.hidden
    if (mamba := model.state_space) is not None:
        yield KernelShape(f"{mamba.title} inputs", tokens, mamba.projected_width / tp, hidden)
        yield KernelShape(f"{mamba.title} output", tokens, hidden, mamba.width / tp)
    if model.attention is None and model.blocks.attention:
        query = heads * model.qk_head_dim
        keys = max(model.kv_heads / tp, 1.0) * (model.qk_head_dim + model.v_head_dim)
        yield KernelShape("attention inputs", tokens, query + keys, hidden)
    if model.blocks.attention:
        yield KernelShape("attention output", tokens, hidden, heads * model.v_head_dim)
    matrices = 2 if model.gated else 1
    moe = model.moe
    if model.has_dense_feed_forward:
        width = model.ffn_hidden / tp
        yield KernelShape("MLP up", tokens, matrices * width, hidden)
        yield KernelShape("MLP down", tokens, hidden, width)
    if moe is not None:
        etp, experts = int(layout.etp), moe.experts / int(layout.ep)
        rows = tokens / tp * moe.top_k * etp / experts
        width = moe.moe_ffn_hidden / etp
        yield KernelShape("experts up", rows, matrices * width, hidden, experts)
        yield KernelShape("experts down", rows, hidden, width, experts)
    yield KernelShape("LM head", tokens, model.vocab / tp, hidden, sixteen_bit=True)


def _point(product: KernelShape, c: Context) -> dict[str, Any]:
    name, rows, columns, depth, groups, sixteen_bit = product
    seconds = gemm_s(rows, columns, depth, c.rates, groups=groups, sixteen_bit=sixteen_bit)
    operand_bytes = 2.0 if sixteen_bit else c.rates.operand_bytes
    moved_bytes = operand_bytes * (rows + columns) * depth + 2.0 * rows * columns
    flop = 2.0 * rows * columns * depth
    return {
        "name": name,
        "shape": [rows, columns, depth],
        "groups": groups,
        "flop_per_byte": flop / moved_bytes,
        "tflops": groups * flop / float(np.asarray(seconds)) / 1e12,
    }
