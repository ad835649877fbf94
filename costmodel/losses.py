"""Losses that take the head's product and the cross-entropy chunk by chunk, and never hold all logits.

Symbols: T tokens of a micro-batch on a rank, R of a chunk, h hidden width, V vocabulary. A further loss is a
row of `CHUNKED_LOSSES` and a word of `LossName`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from meshwright.costmodel.adapters import frozen
from meshwright.costmodel.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layer_context import Context, Passes
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.workload import Workload

LossName = Literal["liger", "chunked"]
"""Words of `--loss`."""
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """What a loss does with each chunk; bytes are read and written, or held, for each element."""

    source: str
    rows: int
    """R; 0 for the power of two at or above T / ceil(V / h)."""
    forward_products: int
    """Times that a chunk's logits are computed, those computed again for the backward pass among them."""
    gradients_at_once: bool
    """Whether the forward pass takes the gradients too, so that backward they are scaled alone."""
    logit_moved: tuple[float, float]
    """Of a logit, forward and backward."""
    weight_moved: tuple[float, float]
    """Of a weight of the head for each chunk, forward and backward, to cast it."""
    weight_summed: tuple[float, float]
    """The same of its gradient, where it has one, to cast and to add it."""
    logit_held: float
    """Of a chunk's logits."""
    weight_held: float
    """Of a trained weight of the head: its gradient, what is added to it, and casts."""
    frozen_weight_held: float
    """Of a frozen one."""
    input_held: float
    """Of the head's input and its gradient, beside the input itself."""


CHUNKED_LOSSES: Mapping[str, ChunkedLoss] = {
    # Logits at 16 bits are read for the sum, then read and replaced by their gradient. A chunk's gradient of
    # the weight is written at 16 bits by its product, widened (2, 4) and added (2, 4, 2).
    "liger": ChunkedLoss(
        source="liger_kernel/ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward",
        rows=0,
        forward_products=1,
        gradients_at_once=True,
        logit_moved=(6.0, 0.0),
        weight_moved=(0.0, 0.0),
        weight_summed=(14.0, 0.0),
        logit_held=2.0,
        weight_held=8.0,
        frozen_weight_held=0.0,
        input_held=2.0,
    ),
    # Input and weight are widened, and narrowed again by autocast (2, 4, 4, 2 a weight). On logits a
    # log-softmax (12), the best one (2) and the entropy (24), in the forward pass and once more; backward 18.
    # The gradient of the weight is widened, narrowed and added (2, 4, 4, 2 and 6). Tokens are sorted into
    # another tensor, as is their gradient.
    "chunked": ChunkedLoss(
        source="trl/trainer/sft_trainer.py, _chunked_cross_entropy_loss",
        rows=256,
        forward_products=2,
        gradients_at_once=False,
        logit_moved=(38.0, 38.0 + 18.0),
        weight_moved=(12.0, 12.0),
        weight_summed=(0.0, 18.0),
        logit_held=18.0,
        weight_held=8.0,
        frozen_weight_held=6.0,
        input_held=6.0,
    ),
}
"""Read in Liger-Kernel at ead96b6 and TRL at f2cd577 (1.10.0.dev0)."""


def rows_of_a_chunk(workload: Workload, tokens: Floats) -> Floats:
    """Tokens that the head takes at once.

    As liger_kernel/ops/fused_linear_cross_entropy.py and trl/trainer/sft_trainer.py cut them.

    Parameters
    ----------
    workload : Workload
        With a `loss` of `CHUNKED_LOSSES`; its model is used.
    tokens : float or array
        T, above 0.

    Returns
    -------
    float or array
        R, at least 1 and at most T.
    """
    model, fixed = workload.model, CHUNKED_LOSSES[str(workload.loss)].rows
    if fixed:
        return np.minimum(float(fixed), tokens)
    share = np.ceil(np.asarray(tokens) / np.ceil(model.vocab / model.hidden))
    power: Floats = 2.0 ** np.ceil(np.log2(np.maximum(share, 1.0)))
    return np.minimum(power, tokens)


def head_passes_s(c: Context) -> tuple[Passes, Passes]:
    """Seconds of the head's products and of the rest of its loss.

    Bytes and products of each are those of liger_kernel/ops/fused_linear_cross_entropy.py and of
    trl/trainer/sft_trainer.py, _chunked_cross_entropy_loss.

    Parameters
    ----------
    c : Context
        Of a workload with a `loss`.

    Returns
    -------
    tuple of two Passes
        Seconds of products, and of memory-bound operators without the final norm, at least 0.
    """
    loss, model, tokens = CHUNKED_LOSSES[str(c.workload.loss)], c.workload.model, c.tokens
    rows = rows_of_a_chunk(c.workload, tokens)
    chunks = np.ceil(np.asarray(tokens) / rows)
    vocab, hidden = float(model.vocab), float(model.hidden)
    logits_s = chunks * gemm_s(rows, vocab, hidden, c.rates, sixteen_bit=True)
    gradients_s = chunks * gemm_s(rows, hidden, vocab, c.rates, sixteen_bit=True)
    weights = chunks * vocab * hidden
    trained = 0.0
    if not frozen(c.workload):
        trained = 1.0
        by_weight = weight_gradient_s(hidden, vocab, rows, c.rates, sixteen_bit=True)
        gradients_s = gradients_s + chunks * by_weight
    logits = tokens * vocab
    each = zip(loss.logit_moved, loss.weight_moved, loss.weight_summed, strict=True)
    moved = [
        streamed_s(of_logit * logits + (of_weight + trained * summed) * weights, c.rates)
        for of_logit, of_weight, summed in each
    ]
    again_s = (loss.forward_products - 1) * logits_s
    if loss.gradients_at_once:
        return Passes(logits_s + gradients_s, again_s), Passes(*moved)
    return Passes(logits_s, again_s + gradients_s), Passes(*moved)


def loss_held_bytes(workload: Workload, tokens: Floats) -> Floats:
    """What the loss holds at its peak, beside the input of the head.

    As the same kernels allocate it (liger_kernel/ops/fused_linear_cross_entropy.py).

    Parameters
    ----------
    workload : Workload
        With a `loss`.
    tokens : float or array
        T, above 0.

    Returns
    -------
    float or array
        Bytes on one GPU.
    """
    loss, model = CHUNKED_LOSSES[str(workload.loss)], workload.model
    of_weight = loss.frozen_weight_held if frozen(workload) else loss.weight_held
    chunk = loss.logit_held * rows_of_a_chunk(workload, tokens) * model.vocab
    held: Floats = chunk + of_weight * model.vocab * model.hidden
    return held + loss.input_held * np.asarray(tokens) * model.hidden
