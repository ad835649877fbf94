"""Seconds of what stands before and behind the layers: token table, head and loss."""

from __future__ import annotations

from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layers.layer_time import LayerTime, Parts

_LOSS_BYTES = (12.0, 18.0)
"""Cross entropy on 32-bit logits, bytes a logit forward (cast, max, exponent-sum, pick) and backward."""
_FUSED_LOSS_BYTES = (6.0, 4.0)
"""Transformer Engine's cross entropy on 16-bit logits: read for the sum, read and replaced by the gradient;
the backward pass scales it (transformer_engine/pytorch/triton/cross_entropy.py)."""


def embedding(c: Context) -> LayerTime:
    """Table look-up and its gradient scatter; with TP the partial rows are reduced.

    docs/cost_model.md, "One layer", has the source.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch: 4 bytes an element forward, 8 backward.
    """
    elements = c.tokens * c.workload.model.hidden
    reduce = 2.0 * c.tensor_pass_s
    forward: Parts = {"memory_bound": streamed_s(4.0 * elements, c.rates), "tp_comm": reduce}
    backward: Parts = {"memory_bound": streamed_s(8.0 * elements, c.rates), "tp_comm": 0.0 * reduce}
    return LayerTime(forward, backward, {})


def head(c: Context) -> LayerTime:
    """Final norm, LM head and vocabulary-parallel cross entropy, at 16 and 32 bits.

    Parameters
    ----------
    c : Context
        Workload, layouts, placements and rates.

    Returns
    -------
    LayerTime
        Seconds by part of one micro-batch (docs/cost_model.md, "One layer").
    """
    model, tokens = c.workload.model, c.tokens
    vocab = model.vocab / c.layout.tp
    gemm_f = gemm_s(tokens, vocab, model.hidden, c.rates, sixteen_bit=True)
    gemm_b = gemm_s(tokens, model.hidden, vocab, c.rates, sixteen_bit=True)
    gemm_b = gemm_b + weight_gradient_s(model.hidden, vocab, tokens, c.rates, sixteen_bit=True)
    norm = 4.0 * tokens * model.hidden / c.sequence_shards
    logits = tokens * (model.vocab if c.constants.framework.whole_logits else vocab)
    loss_f, loss_b = _FUSED_LOSS_BYTES if c.constants.framework.fused_loss else _LOSS_BYTES
    forward: Parts = {
        "gemm": gemm_f,
        "memory_bound": streamed_s(norm + loss_f * logits, c.rates),
        "tp_comm": c.tensor_pass_s,
    }
    backward: Parts = {
        "gemm": gemm_b,
        "memory_bound": streamed_s(1.5 * norm + loss_b * logits, c.rates),
        "tp_comm": 2.0 * c.tensor_pass_s,
    }
    return LayerTime(forward, backward, {})
