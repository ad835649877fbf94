"""Seconds and kept bytes of attention to positions that an indexer chooses, on one rank and micro-batch.

Read in megatron-core 0.19.2 (megatron/core/transformer/experimental_attention_variant: dsa.py,
absorbed_mla.py, dsa_cudnn_kernels.py). Tensor parallelism splits the heads of attention; every rank runs the
whole indexer, over the tokens of the tensor group.
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.collectives.on_levels import all_reduce_s
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.feed_forward import Passes
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.attention import MlaSpec, SparseIndexerSpec
from meshwright.model_specs.flops import attended_positions

_HEAD_BLOCK = 64.0
"""Heads that the kernels work on at once, or padded to (dsa_cudnn_kernels.py, _flash_mla_head_padding)."""
_SPARSE_BACKWARD_FLOPS = 2.5
"""Products of the backward pass over those of the forward: scores once more, and four gradients."""
_SCORE_BYTES = 16.0
"""A score of 4 bytes, written by the indexer and read by three passes of the selection."""
_INDEXER_BYTES = (8.0, 8.0)
"""An element of the indexer's queries under rotary embedding and Hadamard transform."""


def _parts_of(workload: Workload) -> tuple[MlaSpec, SparseIndexerSpec]:
    latent = workload.model.attention
    assert latent is not None
    assert latent.indexer is not None
    return latent, latent.indexer


def _chosen(workload: Workload) -> float:
    """Positions that the kernels read for each query, those that a causal mask hides among them."""
    return float(min(_parts_of(workload)[1].top_k, workload.seq_len))


def sparse_core_s(c: Context) -> Passes:
    """Attention over the latents of the chosen positions: sqrt(C^2 + M^2) of its products and what they read.

    A query makes 2 (2 r + d) k FLOP a head with k positions, latents of r and d elements of position, for
    keys and values are the latent itself (absorbed_mla.py); heads are padded to 64. The latents of its
    positions, 2 (r + d) k bytes, are read once for all heads, backward three times (read, read again for the
    gradient, gradient added).

    Parameters
    ----------
    c : Context
        Workload, layouts and rates; the model has an indexer.

    Returns
    -------
    Passes
        Seconds of one layer.
    """
    latent, _ = _parts_of(c.workload)
    chosen, rates = _chosen(c.workload), c.rates
    heads = np.maximum(c.workload.model.heads / np.asarray(c.layout.tp), _HEAD_BLOCK)
    keys = latent.kv_lora_rank + latent.qk_rope_head_dim
    flops = 2.0 * heads * (keys + latent.kv_lora_rank) * chosen
    read_s = 2.0 * keys * chosen / rates.hbm_bytes_per_s
    forward = np.hypot(flops / rates.attention_forward_flops, read_s)
    backward = np.hypot(
        _SPARSE_BACKWARD_FLOPS * flops / rates.attention_backward_flops, 3.0 * read_s
    )
    return Passes(c.tokens * forward, c.tokens * backward)


def indexer_block(c: Context) -> LayerTime:
    """Projections, scores of every earlier position, their selection and the loss that trains the indexer.

    With heads of D elements, H of them, s positions and k chosen: 2 H D FLOP an earlier position forward,
    6 H D a chosen one backward, and once more attention's scores of the chosen ones, which the loss compares
    with (arXiv 2512.02556, equations 1 to 4). The indexer's inputs have no gradients (dsa.py, detach), and
    the tensor group adds up the k probabilities of each query (compute_dsa_indexer_loss).

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates; the model has an indexer.

    Returns
    -------
    LayerTime
        Seconds by part, beside those of attention.
    """
    latent, indexer = _parts_of(c.workload)
    model, rates, chosen = c.workload.model, c.rates, _chosen(c.workload)
    rank = latent.q_lora_rank or model.hidden
    of_hidden = indexer.head_dim + indexer.heads
    shapes = ((indexer.width, rank), (of_hidden, model.hidden))
    gemm_f = sum((gemm_s(c.tokens, n, k, rates) for n, k in shapes), start=np.float64(0.0))
    gemm_b = sum(
        (weight_gradient_s(k, n, c.tokens, rates) for n, k in shapes), start=np.float64(0.0)
    )
    heads = np.maximum(model.heads / np.asarray(c.layout.tp), _HEAD_BLOCK)
    scored = 2.0 * indexer.width * attended_positions(c.workload.seq_len)
    compared = 2.0 * heads * (latent.kv_lora_rank + latent.qk_rope_head_dim) * chosen
    core_f = c.tokens * (scored + compared) / rates.attention_forward_flops
    core_b = c.tokens * 6.0 * indexer.width * chosen / rates.attention_backward_flops
    score_bytes = _SCORE_BYTES * c.workload.seq_len
    moved_f = c.tokens * (score_bytes + _INDEXER_BYTES[0] * indexer.width)
    moved_b = c.tokens * (4.0 * chosen + _INDEXER_BYTES[1] * indexer.width)
    gathered_s = c.tensor_pass_s * (1.0 + rank / model.hidden)
    target_s = all_reduce_s(4.0 * c.tokens * chosen, c.placement.tp, c.links)
    forward: Parts = {
        "gemm": gemm_f,
        "attention": core_f,
        "memory_bound": streamed_s(moved_f, rates),
        "tp_comm": gathered_s + target_s,
    }
    backward: Parts = {
        "gemm": gemm_b,
        "attention": core_b,
        "memory_bound": streamed_s(moved_b, rates),
    }
    return LayerTime(forward, backward, {})


def sparse_saved(workload: Workload, tp: Floats, kept: Floats) -> Floats:
    """Bytes a token that sparse attention keeps in place of expanded queries, keys and values.

    Queries before and after they absorb the up-projection, unless they are recomputed; attention's output
    over the latent; the chosen positions; gradients of the indexer, which the forward pass makes already, and
    its gathered inputs (dsa_cudnn_kernels.py, ctx.save_for_backward). The latents themselves are not counted.

    Parameters
    ----------
    workload : Workload
        The model has an indexer.
    tp : float or array
        Tensor-parallel degree, at least 1.
    kept : float or array
        1 where the up-projections are kept, 0 where they are recomputed.

    Returns
    -------
    float or array
    """
    latent, indexer = _parts_of(workload)
    model = workload.model
    absorbed = latent.kv_lora_rank + latent.qk_rope_head_dim + latent.qk_nope_head_dim
    of_heads = 2.0 * model.heads / tp * (kept * absorbed + latent.kv_lora_rank)
    of_indexer = 2.0 * (indexer.width + indexer.head_dim + indexer.heads)
    gathered = 2.0 * (model.hidden + (latent.q_lora_rank or model.hidden))
    inputs = np.where(np.asarray(tp) > 1, gathered, 0.0)
    saved: Floats = of_heads + of_indexer + 4.0 * _chosen(workload) + inputs
    return saved
