"""Losses that take the head's product and the cross-entropy chunk by chunk, and never hold all logits.

Symbols: T tokens of a micro-batch on a rank, R of a chunk, C logits of each of them that are computed at a
time, h hidden width, V vocabulary. A further loss, or one in another version, is a row of `CHUNKED_LOSSES`
and a word of `LossName`.
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

LossName = Literal["liger", "chunked", "fused-head", "all-logits"]
"""Words of `--loss`."""
ALL_LOGITS = "all-logits"
"""The word for the framework's own loss, which holds the logits of all tokens."""
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """What a loss does with each chunk; bytes are read and written, or held, for each element."""

    source: str
    rows: int
    """R; 0 for the power of two at or above T / ceil(V / h)."""
    columns: int = 0
    """C, at the most; 0 for V."""
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
    sums_in_products: bool = False
    """Whether products of gradients read and write sums at 32 bits, which are set to zero before them and
    narrowed after them, in place of a result that is added by itself."""
    input_moved: tuple[float, float] = (0.0, 0.0)
    """Of an element of the head's input, forward and backward, to leave masked tokens out."""


CHUNKED_LOSSES: Mapping[str, ChunkedLoss] = {
    # Logits at 16 bits are read for the sum, then read and replaced by their gradient. A chunk's gradient of
    # the weight is added within its product (torch.addmm), which reads the sum: from 0.8.3 on, of 16-bit
    # weights on devices from Ampere on. Versions 0.6.2 to 0.8.2 widened it and added it by itself.
    "liger": ChunkedLoss(
        source="liger_kernel/ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward",
        rows=0,
        forward_products=1,
        gradients_at_once=True,
        logit_moved=(6.0, 0.0),
        weight_moved=(0.0, 0.0),
        weight_summed=(2.0, 0.0),
        logit_held=2.0,
        weight_held=2.0,
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
    # A tile of 16-bit logits is read for the sums of its rows; backward it is computed again, read, and its
    # gradient written over it. Gradients of the weight and of the input are sums at 32 bits beside their
    # narrowed copies (4, 2). Tokens that count are copied together (2, 2); backward, zeros are written and
    # their gradients copied among them (2, 2, 2).
    "fused-head": ChunkedLoss(
        source="trl/kernels/chunked_logprob.py, ChunkedLogProbFunction, as trl/trainer/utils.py, "
        "add_fused_lm_head, calls it",
        rows=4096,
        columns=32768,
        forward_products=2,
        gradients_at_once=False,
        logit_moved=(2.0, 4.0),
        weight_moved=(0.0, 0.0),
        weight_summed=(0.0, 0.0),
        logit_held=2.0,
        weight_held=6.0,
        frozen_weight_held=0.0,
        input_held=6.0,
        sums_in_products=True,
        input_moved=(4.0, 6.0),
    ),
}
"""Read in Liger-Kernel 0.8.5, TRL at f2cd577 (1.10.0.dev0; `chunked`, so up to 1.14) and in TRL 1.16.0
(`fused-head`, from 1.15 on)."""
_SUM_BYTES, _ENDS_BYTES = 8.0, 10.0
"""Of an element of a 32-bit sum: for each product that adds to it, and to set it to zero and narrow it."""


def in_chunks(loss: str | None) -> str | None:
    """The row of `CHUNKED_LOSSES` that a loss is, as the sources in that table say.

    Parameters
    ----------
    loss : str or None
        Any of `LOSS_NAMES`; None where nothing is said.

    Returns
    -------
    str or None
        None for all logits, said or not.

    Examples
    --------
    >>> in_chunks("all-logits"), in_chunks("liger")
    (None, 'liger')
    """
    return None if loss == ALL_LOGITS else loss


def rows_of_a_chunk(workload: Workload, tokens: Floats) -> Floats:
    """Tokens that the head takes at once.

    As liger_kernel/ops/fused_linear_cross_entropy.py, trl/trainer/sft_trainer.py and
    trl/kernels/chunked_logprob.py cut them.

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


def logits_at_a_time(workload: Workload) -> float:
    """Logits of a token that the head computes at once.

    As trl/kernels/chunked_logprob.py cuts the vocabulary (chunk_size); other losses do not.

    Parameters
    ----------
    workload : Workload
        With a `loss` of `CHUNKED_LOSSES`; its model is used.

    Returns
    -------
    float
        C, at least 1 and at most V.
    """
    vocab, columns = workload.model.vocab, CHUNKED_LOSSES[str(workload.loss)].columns
    return float(min(columns or vocab, vocab))


def head_passes_s(c: Context) -> tuple[Passes, Passes]:
    """Seconds of the head's products and of the rest of its loss.

    Bytes and products of each are those of liger_kernel/ops/fused_linear_cross_entropy.py, of
    trl/trainer/sft_trainer.py, _chunked_cross_entropy_loss, and of trl/kernels/chunked_logprob.py. Pieces of
    the vocabulary count as equally wide.

    Parameters
    ----------
    c : Context
        Of a workload with a `loss`.

    Returns
    -------
    tuple of two Passes
        Seconds of products, and of memory-bound operators without the final norm, at least 0.
    """
    loss = CHUNKED_LOSSES[str(c.workload.loss)]
    model = c.workload.model
    tokens = c.tokens
    rows = rows_of_a_chunk(c.workload, tokens)
    chunks = np.ceil(np.asarray(tokens) / rows)
    vocab, hidden = float(model.vocab), float(model.hidden)
    pieces = float(np.ceil(vocab / logits_at_a_time(c.workload)))
    tiles, columns = chunks * pieces, vocab / pieces
    result_bytes = _SUM_BYTES if loss.sums_in_products else 2.0
    logits_s = tiles * gemm_s(rows, columns, hidden, c.rates, sixteen_bit=True)
    by_input = gemm_s(rows, hidden, columns, c.rates, sixteen_bit=True, output_bytes=result_bytes)
    gradients_s = tiles * by_input
    weights = chunks * vocab * hidden
    trained = 0.0
    if not frozen(c.workload):
        trained = 1.0
        gradients_s = gradients_s + tiles * _by_weight_s(loss, hidden, columns, rows, c)
    logits = tokens * vocab
    each = zip(
        loss.logit_moved, loss.weight_moved, loss.weight_summed, loss.input_moved, strict=True
    )
    moved = [
        of_logit * logits + (of_weight + trained * summed) * weights + of_input * tokens * hidden
        for of_logit, of_weight, summed, of_input in each
    ]
    if loss.sums_in_products:
        moved[1] = moved[1] + _ENDS_BYTES * (trained * vocab + tokens) * hidden
    forward_s, backward_s = (streamed_s(size, c.rates) for size in moved)
    again_s = (loss.forward_products - 1) * logits_s
    streamed = Passes(forward_s, backward_s)
    if loss.gradients_at_once:
        return Passes(logits_s + gradients_s, again_s), streamed
    return Passes(logits_s, again_s + gradients_s), streamed


def _by_weight_s(
    loss: ChunkedLoss, hidden: float, columns: float, rows: Floats, c: Context
) -> Floats:
    """The product of a weight gradient, for one piece of the vocabulary and one chunk of tokens."""
    if loss.sums_in_products:
        return gemm_s(columns, hidden, rows, c.rates, sixteen_bit=True, output_bytes=_SUM_BYTES)
    return weight_gradient_s(hidden, columns, rows, c.rates, sixteen_bit=True)


def chunk_bytes(workload: Workload, tokens: Floats) -> Floats:
    """What the logits of a chunk take, with what is made of them.

    As trl/kernels/chunked_logprob.py and the sources of the other losses allocate them.

    Parameters
    ----------
    workload : Workload
        With a `loss`.
    tokens : float or array
        T, above 0.

    Returns
    -------
    float or array
        Bytes on one GPU, above 0.
    """
    held = CHUNKED_LOSSES[str(workload.loss)].logit_held * rows_of_a_chunk(workload, tokens)
    return held * logits_at_a_time(workload)


def loss_held_bytes(workload: Workload, tokens: Floats) -> Floats:
    """What the loss holds at its peak, beside the input of the head.

    As the same kernels allocate it (liger_kernel/ops/fused_linear_cross_entropy.py;
    trl/kernels/chunked_logprob.py, ChunkedLogProbFunction.backward).

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
    held: Floats = chunk_bytes(workload, tokens) + of_weight * model.vocab * model.hidden
    return held + loss.input_held * np.asarray(tokens) * model.hidden
