"""Seconds of what stands before and behind the layers: token table, head and loss."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts

LOGIT_BYTES_FORWARD = 12.0
"""Cross entropy on 32-bit logits: cast, max, exponent-sum, pick."""


LOGIT_BYTES_BACKWARD = 18.0


FUSED_LOSS_BYTES = (6.0, 4.0)
"""Transformer Engine's cross entropy on 16-bit logits: read for the sum, read and replaced by the gradient;
the backward pass scales it (transformer_engine/pytorch/triton/cross_entropy.py)."""


def embedding(c: Context) -> LayerTime:
    """Table look-up and its gradient scatter; with TP the partial rows are reduced."""
    volume = c.tokens * c.workload.model.hidden
    reduce = 2.0 * c.tensor_pass_s
    forward: Parts = {"memory_bound": streamed_s(4.0 * volume, c.rates), "tp_comm": reduce}
    backward: Parts = {"memory_bound": streamed_s(8.0 * volume, c.rates), "tp_comm": 0.0 * reduce}
    return LayerTime(forward, backward, {})


def head(c: Context) -> LayerTime:
    """Final norm, LM head and vocabulary-parallel cross entropy, at 16 and 32 bits."""
    model, tokens = c.workload.model, c.tokens
    vocab = model.vocab / np.asarray(c.layout.tp)
    forward_gemm = gemm_s(tokens, vocab, model.hidden, c.rates, sixteen_bit=True)
    backward_gemm = gemm_s(
        tokens, model.hidden, vocab, c.rates, sixteen_bit=True
    ) + weight_gradient_s(model.hidden, vocab, tokens, c.rates, sixteen_bit=True)
    norm = 4.0 * tokens * model.hidden / c.sequence_shards
    logits = tokens * vocab
    fused = c.constants.framework.fused_loss
    loss_f, loss_b = FUSED_LOSS_BYTES if fused else (LOGIT_BYTES_FORWARD, LOGIT_BYTES_BACKWARD)
    gather = c.tensor_pass_s
    forward: Parts = {
        "gemm": forward_gemm,
        "memory_bound": streamed_s(norm + loss_f * logits, c.rates),
        "tp_comm": gather,
    }
    backward: Parts = {
        "gemm": backward_gemm,
        "memory_bound": streamed_s(1.5 * norm + loss_b * logits, c.rates),
        "tp_comm": 2.0 * gather,
    }
    return LayerTime(forward, backward, {})
