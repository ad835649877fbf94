"""What offloading the activations of single modules takes out of HBM, and what it copies.

Megatron's `--offload-modules` copies the tensors that autograd saves inside a module to pinned memory of the
host, on a stream of its own, and back before the module's backward pass (megatron-core 0.19,
megatron/core/pipeline_parallel/fine_grained_activation_offload.py). What a module saves:

    core_attn    queries, keys, values and the output, which stays in HBM while the projection keeps it
    attn_proj    its input, that output: with it, the output leaves HBM and is copied twice
    expert_fc1   the input of the experts' first product
    moe_act      the input of the experts' activation function
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.costmodel.context_groups import swaps_heads
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.hybrid import BlockShares

LEAST_ELEMENTS = 2**20
"""Of a tensor that is offloaded: Megatron's `min_offloaded_tensor_size`, which launch files leave alone."""
LAYERS_AT_HAND = 2.0
"""Layers whose offloaded tensors are in HBM at a time: one at work, one on its way to the host or back."""


class Offloaded(NamedTuple):
    """Bytes of one layer and micro-batch on one GPU."""

    freed: Floats
    """That leave HBM."""
    copied: Floats
    """That go to the host forward and come back backward, and that it holds in between."""


def offloads(workload: Workload, module: str) -> bool:
    """Whether a module's saved tensors go to the host.

    Parameters
    ----------
    workload : Workload
        Its `offload_modules`.
    module : str
        Of Megatron's `--offload-modules`.

    Returns
    -------
    bool
    """
    return module in workload.offload_modules.split("+")


def offloads_any(workload: Workload) -> bool:
    """Whether any module's saved tensors go to the host.

    Parameters
    ----------
    workload : Workload
        Its `offload_modules`.

    Returns
    -------
    bool
    """
    return workload.offload_modules != "none"


def offloaded_per_token(
    workload: Workload, layout: Layout, tokens: Floats, narrow: float, shares: BlockShares
) -> Offloaded:
    """Offloaded bytes a token of one layer. Tensors of fewer than `LEAST_ELEMENTS` elements stay.

    Parameters
    ----------
    workload : Workload
        Model and modules.
    layout : Layout
        One layout, or many of shape [n].
    tokens : float or array
        Of one micro-batch on one rank, at least 0.
    narrow : float
        Bytes of an element of a saved GEMM input, 1 or 2.
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    Offloaded
        Shaped like the layout.
    """
    freed: Floats = 0.0 * tokens
    copied: Floats = 0.0 * tokens
    if shares.attention and offloads(workload, "core_attn"):
        attention = _of_attention(workload, layout, tokens, narrow)
        freed = freed + shares.attention * attention.freed
        copied = copied + shares.attention * attention.copied
    if shares.experts:
        of_experts = shares.experts * _of_experts(workload, layout, tokens, narrow)
        freed, copied = freed + of_experts, copied + of_experts
    return Offloaded(freed, copied)


def _leaving(tokens: Floats, width: Floats) -> Floats:
    """Elements a token of a tensor, 0 where it is too small to be offloaded."""
    return np.where(tokens * width >= LEAST_ELEMENTS, width, 0.0)


def _of_attention(workload: Workload, layout: Layout, tokens: Floats, narrow: float) -> Offloaded:
    """Bytes a token of queries, keys, values at 16 bits, and the output in the projection's format."""
    model, tp = workload.model, np.asarray(layout.tp)
    heads = model.heads / tp
    latent = model.attention is not None
    kv_heads = heads if latent else np.maximum(model.kv_heads / tp, 1.0)
    widths = (heads * model.qk_head_dim, kv_heads * model.qk_head_dim, kv_heads * model.v_head_dim)
    query, key, value = (_leaving(tokens, width) for width in widths)
    inputs = np.asarray(2.0 * (query + key + value), dtype=np.float64)
    if latent:
        again = np.asarray(layout.recompute) & Recompute.MLA_UP_PROJECTION
        inputs = inputs * np.where(again, 0.0, 1.0)
    output = _leaving(tokens, heads * model.v_head_dim)
    freed, copied = inputs, inputs + 2.0 * output
    if offloads(workload, "attn_proj"):
        freed = freed + (narrow + 2.0 * swaps_heads(workload, layout)) * output
        copied = copied + narrow * output
    return Offloaded(freed, copied)


def _of_experts(workload: Workload, layout: Layout, tokens: Floats, narrow: float) -> Floats:
    """Bytes a token of what the busiest rank's experts take in, and of their activation function's input."""
    model, moe = workload.model, workload.model.moe
    assert moe is not None
    copies = workload.imbalance(layout.ep) * moe.top_k / np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    saved: Floats = 0.0 * copies
    if offloads(workload, "expert_fc1"):
        gathered = copies * model.hidden * np.asarray(layout.etp)
        saved = saved + narrow * _leaving(tokens, gathered)
    if offloads(workload, "moe_act"):
        saved = saved + 2.0 * _leaving(tokens, copies * matrices * moe.moe_ffn_hidden)
    return saved
