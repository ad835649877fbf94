"""Bytes per element that norms, residuals, rotary embeddings and activations move, by how they are run.

Fused: one kernel each, as in Transformer Engine or from torch.compile. Separate: a fused norm, the rest
apart (Megatron-DeepSpeed). Operator by operator, as eager PyTorch runs a model's Python code: an RMSNorm
casts up (6 bytes), squares (8), takes the mean (4), multiplies (8), casts down (6) and multiplies by its
weight (4); its gradient takes 12 for the weight, 6 + 6 for the casts, 24 for the product, 16 for the square
and 12 for their sum. A rotary embedding casts up (6), multiplies (8) and casts down (6), and so does its
gradient (torchtitan/models/norms.py and models/llama/model.py, December 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.workload import Workload

_FUSED_NORM = (4.0, 6.0)
_EAGER_RMS_NORM = (36.0, 76.0)


@dataclass(frozen=True)
class ElementBytes:
    """Forward and backward bytes of an element."""

    norm: tuple[float, float]
    """An element of the hidden width under one norm."""
    residual: tuple[float, float]
    """The bias, dropout and sum after a block; backward the sum of two gradients."""
    rotary: tuple[float, float]
    """An element that the rotary embedding turns."""
    activation: tuple[float, float]
    """An element of the feed-forward width, behind all of its input matrices."""

    @property
    def around(self) -> tuple[float, float]:
        """A norm and a residual, which surround every block."""
        return self.norm[0] + self.residual[0], self.norm[1] + self.residual[1]


def element_bytes(
    workload: Workload, *, fused: bool, eager: bool, fused_norm: bool
) -> ElementBytes:
    """Bytes that a software stack moves per element of its memory-bound operators.

    Parameters
    ----------
    workload : Workload
        Its model says which norm it has and whether its feed-forward is gated.
    fused : bool
        Whether each operator is one kernel.
    eager : bool
        Whether they run one PyTorch operator at a time; goes before `fused`.
    fused_norm : bool
        Whether norms are one kernel all the same.

    Returns
    -------
    ElementBytes
        Bytes per element; the module's text has the counts and their sources.
    """
    model = workload.model
    matrices = 2.0 if model.gated else 1.0
    activation = 2.0 * matrices + 2.0, 4.0 * matrices + 2.0
    if eager:
        eager_norm = model.norm == "rmsnorm" and not fused_norm
        norm = _EAGER_RMS_NORM if eager_norm else _FUSED_NORM
        if model.gated:
            activation = (10.0, 18.0)
        return ElementBytes(norm, (6.0, 6.0), (20.0, 20.0), activation)
    if fused:
        return ElementBytes(_FUSED_NORM, (6.0, 6.0), (4.0, 4.0), activation)
    apart = 1.5 * activation[0], 1.5 * activation[1]
    return ElementBytes(_FUSED_NORM, (8.0, 8.0), (4.0, 4.0), apart)
