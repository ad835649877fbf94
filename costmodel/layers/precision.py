"""What the narrow precisions read and write: operands, scales, casts, gathered activations."""

from __future__ import annotations

OPERAND_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes of an operand's element: one of scale for every 32 elements of MXFP8, for every 16 of NVFP4."""

GATHERED_SHARE = {precision: size / 2.0 for precision, size in OPERAND_BYTES.items()}
"""Activations are gathered after the cast (Transformer Engine, `gather_along_first_dim`): bytes over those
at 16 bits."""


def cast_bytes_per_element(
    precision: str,
    architecture: str,
    *,
    current_scaling: bool,
    transposes_apart: bool = False,
    in_blocks: bool = False,
) -> float:
    """Bytes that moving one element to a narrower format costs, reads and writes.

    FP8 reads 2 and writes 1, and once more transposed before Blackwell, whose FP8 GEMMs take either order; a
    scale from the tensor's own maximum needs one more read of 2. Blocks of 128 are read once and written by
    rows and by columns, with 4 bytes of scale each. MXFP8 writes rows and columns, each with its scales.
    NVFP4 reads for the maximum, for the rows and for the Hadamard-rotated columns (Transformer Engine
    documentation, "Low precision training").

    docs/cost_model.md, "One layer", has the source.

    Parameters
    ----------
    precision : str
        bf16, fp16, fp8, mxfp8 or nvfp4.
    architecture : str
        Of the device, such as hopper or blackwell.
    current_scaling : bool
        Whether FP8 scales come from the tensor itself instead of the steps before.
    transposes_apart : bool
        Whether the transpose is made in a kernel of its own, which reads the FP8 tensor once more.

    in_blocks : bool
        Whether FP8 scales are those of blocks.

    Returns
    -------
    float
        Bytes; 0 at 16 bits.
    """
    if precision == "fp8" and in_blocks:
        return 2.0 + 2.0 * (1.0 + 4.0 / 128.0)
    if precision == "fp8":
        written = 1.0 if architecture == "blackwell" else 2.0
        maximum = 2.0 if current_scaling else 0.0
        again = 1.0 if transposes_apart and written > 1.0 else 0.0
        return 2.0 + written + again + maximum
    reads = {"mxfp8": 2.0, "nvfp4": 6.0}
    if precision not in reads:
        return 0.0
    return reads[precision] + 2.0 * OPERAND_BYTES[precision]
