"""Seconds of the expert feed-forward: router, permutation, all-to-all, grouped GEMMs, shared experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.costmodel.collectives.on_levels import (
    Links,
    all_to_all_s,
    members_inside,
    ring_pass_s,
)
from meshwright.costmodel.layers.context import Context, quantise_bytes
from meshwright.costmodel.layers.exposed import less_hidden
from meshwright.costmodel.layers.feed_forward import dense_mlp
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts, add, total
from meshwright.costmodel.layout import Floats, Recompute
from meshwright.costmodel.workload import Workload

PERMUTE_BYTES = {"deduplicated": 8.0, "alltoall": 12.0}
"""Bytes for each copy of a token and element, in and out of the experts' order: a read and a write each way,
or before, between and after the transfers of NCCL's all-to-all, which sorts by rank and then by expert
(Megatron-LM, megatron/core/transformer/moe/token_dispatcher.py)."""


def moe_mlp(c: Context) -> LayerTime:
    """Router, permutation, all-to-all, grouped GEMMs of the local experts, and the shared experts."""
    model, layout = c.workload.model, c.layout
    moe = model.moe
    assert moe is not None
    tp, ep, etp = np.asarray(layout.tp), np.asarray(layout.ep), np.asarray(layout.etp)
    mine = c.tokens / tp
    arriving = mine * moe.top_k * etp * c.workload.imbalance(ep)
    local_experts = moe.experts / ep
    matrices = 2 if model.gated else 1
    width = moe.moe_ffn_hidden / etp
    rows = arriving / local_experts
    up = gemm_s(rows, matrices * width, model.hidden, c.rates, groups=local_experts)
    down = gemm_s(rows, model.hidden, width, c.rates, groups=local_experts)
    grads = (
        gemm_s(rows, model.hidden, matrices * width, c.rates, groups=local_experts)
        + weight_gradient_s(model.hidden, matrices * width, rows, c.rates, groups=local_experts)
        + gemm_s(rows, width, model.hidden, c.rates, groups=local_experts)
        + weight_gradient_s(width, model.hidden, rows, c.rates, groups=local_experts)
    )
    router = gemm_s(mine, moe.experts, model.hidden, c.rates, sixteen_bit=True)
    unfused = c.constants.shared["expert_bias_bytes_factor"] if moe.expert_bias else 1.0
    act_f = arriving * width * (2.0 * matrices + 2.0) * unfused
    act_b = arriving * width * (4.0 * matrices + 2.0) * unfused
    permute = PERMUTE_BYTES[c.workload.moe_dispatch] * arriving * model.hidden
    norm = 10.0 * c.tokens * model.hidden / c.sequence_shards + 40.0 * mine * moe.experts
    cast_f = quantise_bytes(c, arriving, model.hidden + width)
    cast_b = quantise_bytes(c, arriving, matrices * width + model.hidden)
    ep_s = _expert_all_to_all(c, mine)
    mlp_f: Parts = {
        "gemm": router,
        "expert_gemm": up + down,
        "memory_bound": streamed_s(norm + permute + act_f + cast_f, c.rates),
        "ep_comm": ep_s,
    }
    mlp_b: Parts = {
        "gemm": 2.0 * router,
        "expert_gemm": grads,
        "memory_bound": streamed_s(1.2 * norm + 1.5 * permute + act_b + cast_b, c.rates),
        "ep_comm": ep_s,
    }
    again: Parts = {
        "memory_bound": np.where(
            np.asarray(layout.recompute) & Recompute.MOE_ACTIVATION, streamed_s(act_f, c.rates), 0.0
        )
    }
    if moe.shared_width:
        shared = dense_mlp(c, moe.shared_width, norm=False)
        return LayerTime(add(mlp_f, shared.forward), add(mlp_b, shared.backward), again)
    return LayerTime(mlp_f, mlp_b, again)


def _expert_all_to_all(c: Context, tokens: Floats) -> Floats:
    """Dispatch and combine of one pass, with etp's gather and scatter."""
    model, members = c.workload.model, c.placement.ep
    moe = model.moe
    assert moe is not None
    copies = routed_copies(c.workload, members[..., -1:] / members_inside(members), c.layout.ep)
    sent = 2.0 * tokens * model.hidden * c.workload.imbalance(c.layout.ep)
    once = all_to_all_s(sent, members, dispatch_links(c), copies)
    gathered = ring_pass_s(sent * moe.top_k * np.asarray(c.layout.etp), c.placement.etp, c.links)
    out: Floats = 2.0 * (once + gathered)
    return out


def dispatch_links(c: Context) -> Links:
    """The links of the dispatcher. One that sends a copy per node (DeepEP) sends it to the GPU of the own
    index there and on over NVLink, so it never changes rails on the network, whatever NCCL does.
    """
    cluster = c.workload.cluster
    relayed = (
        c.workload.moe_dispatch != "alltoall" and cluster.nvlink_domain >= cluster.gpus_per_node > 1
    )
    return replace(c.links, rails=None) if relayed else c.links


def hide_expert_traffic(c: Context, layer: LayerTime) -> LayerTime:
    """With EP overlap the all-to-all of one micro-batch runs under another's layer, in either pass
    (Megatron-LM `--overlap-moe-expert-parallel-comm`; DualPipe, DeepSeek-V3, arXiv 2412.19437, 3.2.1).
    """
    sent_f, sent_b = layer.forward["ep_comm"], layer.backward["ep_comm"]
    under_f, under_b = total(layer.forward) - sent_f, total(layer.backward) - sent_b
    overlaps, most = c.workload.overlap.ep, c.constants.framework.ep_hidden
    shown_f, _ = less_hidden(overlaps, most, sent_f, under_f, under_b)
    _, shown_b = less_hidden(overlaps, most, sent_b, under_f, under_b)
    return LayerTime(
        {**layer.forward, "ep_comm": shown_f},
        {**layer.backward, "ep_comm": shown_b},
        layer.recompute,
    )


def routed_copies(
    workload: Workload, blocks: NDArray[np.float64], ep: ArrayLike = 0
) -> NDArray[np.float64]:
    """Copies of a token, one for each of N equal blocks of the expert-parallel group that holds its experts.

    M (1 - (1 - 1/M)^k) under even routing, M the blocks that a token can choose from: all N, or with
    node-limited routing those of its g of G groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). An
    all-to-all without deduplication sends k. Where a trace was placed for the degree `ep`, what it counts.
    """
    moe = workload.model.moe
    assert moe is not None
    if workload.moe_dispatch == "alltoall":
        return np.full(blocks.shape, float(moe.top_k))
    open_blocks = blocks
    if moe.router_groups and moe.router_groups_per_token:
        chosen = float(moe.router_groups_per_token)
        open_blocks = np.maximum(np.minimum(blocks, chosen), blocks * chosen / moe.router_groups)
    even = open_blocks * (1.0 - (1.0 - 1.0 / open_blocks) ** moe.top_k)
    return workload.copies(ep, blocks, np.asarray(even))
