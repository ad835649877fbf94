"""Buffers in HBM through which DeepEP and HybridEP send tokens, one set for all layers of a process.

Their sizes are what Megatron-LM asks for (megatron-core 0.19.2, core/transformer/moe/fused_a2a.py, get_buffer
and init_hybrid_ep_buffer).
"""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layout import Floats, Layout
from meshwright.costmodel.memory.activations import rank_tokens, sequence_shards
from meshwright.costmodel.workload import Workload

_CHANNELS = 10
"""Half of the 20 multiprocessors that Megatron gives DeepEP (--moe-deepep-num-sms)."""
_PEERS = 8
"""LEGACY_NUM_MAX_NVL_PEERS of DeepEP."""
_NVLINK_TOKENS = ((8, 256), (64, 288), (96, 480), (128, 560), (160, 720))
"""Tokens of a channel and peer by the most ranks: get_dispatch_config of DeepEP's buffers/legacy.py."""
_RDMA_TOKENS = 128
_TOPK, _SCALES = 128, 128
_META_BYTES = 8 + _TOPK * (8 + 4) + 4 * _SCALES
"""Beside a token: its source, indices and weights of experts, and scales, at their widest."""
_BF16_BYTES, _FP32_BYTES = 2.0, 4.0
_SCALED = 128
"""Elements of a token that share a scaling factor of HybridEP."""


def dispatch_buffers(workload: Workload, layout: Layout) -> Floats:
    """Bytes of the buffers of tokens on one GPU; 0 with other dispatchers and without experts.

    DeepEP, csrc/legacy/config.hpp, get_nvl_buffer_size_hint and get_rdma_buffer_size_hint: a number of
    tokens for each channel and peer, whatever the batch. HybridEP, branch hybrid-ep, intranode.cu and
    internode_doca.cu in csrc/hybrid_ep/buffer: room for all tokens of all ranks of the group, which one rank
    may have to take, with a probability for each expert of the domain; between domains also the tokens of a
    rank, and three times those that every other domain sends to it.

    Parameters
    ----------
    workload : Workload
        Model, cluster, sequence length and dispatcher of tokens.
    layout : Layout
        One layout, or many of shape [n]; micro_batch, cp, tp, ep and etp are used.

    Returns
    -------
    float or array
        Bytes, shaped like the layout.
    """
    moe = workload.model.moe
    ranks = np.asarray(layout.ep, dtype=np.float64) * layout.etp
    if moe is None or workload.moe_dispatch not in ("deepep", "hybridep"):
        return 0.0 * ranks
    hidden = float(workload.model.hidden)
    if workload.moe_dispatch == "deepep":
        return np.where(ranks > 1, _deepep(ranks, hidden), 0.0)
    tokens = rank_tokens(workload, layout) / sequence_shards(layout)
    local = moe.experts / np.asarray(layout.ep)
    domain = max(workload.cluster.nvlink_domain, 1)
    return np.where(
        ranks > 1, _hybridep(tokens, ranks, np.minimum(ranks, domain), local, hidden), 0.0
    )


def _deepep(ranks: Floats, hidden: float) -> Floats:
    token = _BF16_BYTES * hidden + _META_BYTES
    tokens = np.select(
        [np.asarray(ranks) <= most for most, _ in _NVLINK_TOKENS],
        [float(count) for _, count in _NVLINK_TOKENS],
        float(_NVLINK_TOKENS[-1][1]),
    )
    nvlink = _CHANNELS * np.minimum(ranks, _PEERS) * tokens * token
    nodes = np.where(np.asarray(ranks) > _PEERS, np.asarray(ranks) / _PEERS, 0.0)
    rdma = 2.0 * _CHANNELS * nodes * _RDMA_TOKENS * (token + 16.0)
    return np.asarray(nvlink + rdma, dtype=np.float64)


def _hybridep(
    tokens: Floats, ranks: Floats, inside: Floats, local: Floats, hidden: float
) -> Floats:
    """`inside`: ranks of the group in one domain; `local`: experts of a rank."""
    scales = _FP32_BYTES * hidden / _SCALED
    token, chosen = _BF16_BYTES * hidden, _FP32_BYTES * np.asarray(local)
    at_worst = tokens * ranks * (token + chosen * inside + scales)
    others = np.asarray(ranks) / inside - 1.0
    own = np.where(others > 0, tokens * (token + chosen * ranks + scales), 0.0)
    received = tokens * others * (3.0 * (token + chosen * inside) + scales)
    return at_worst + own + received
