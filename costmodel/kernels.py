"""Times of single kernels on one GPU. Sizes may be arrays that broadcast; seconds out, elements and bytes in.

A GEMM takes sqrt(C^2 + M^2), with C its FLOP over the rate that its shape reaches and M its bytes over the
attained HBM bandwidth; a memory-bound kernel takes its bytes over that bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.layout import Floats
from meshwright.costmodel.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What kernels reach on one device at one precision."""

    gemm_flops: float
    """FLOP/s of a large, deep GEMM at the run's precision."""
    head_gemm_flops: float
    """FLOP/s of such a GEMM at 16 bits, for what stays there (router, LM head)."""
    attention_forward_flops: float
    """FLOP/s of fused attention, by the causal half of its FLOP."""
    attention_backward_flops: float
    """FLOP/s of its backward pass, by the causal half of 2.5 times the forward FLOP."""
    attention_forward_keys: float
    """What fused attention does beside its scores, in keys of a query, twice: rows begin and end, and
    the last block is half masked. s tokens take 1 + keys / s of their time at the rate of long sequences."""
    attention_backward_keys: float
    """The same of its backward pass."""
    hbm_bytes_per_s: float
    """Attained by streaming kernels."""
    operand_bytes: float
    """Bytes of a GEMM operand's element at the run's precision, with its share of the scales."""
    weight_gradient_bytes: float
    """Bytes that a weight-gradient GEMM moves per element of its output: 2 to write it, or more to add it
    to the gradient of the micro-batches before."""
    sms: int
    gemm_half_k: float
    """K at which a GEMM reaches half its rate: K / (K + half_k) covers prologue and epilogue of a tile."""
    gemm_half_edge: float
    """Rows, and columns, at which a GEMM reaches half its rate."""
    grouped_half_edge: float
    """Rows, and columns, at which each GEMM of a group reaches half its rate."""
    tile: int
    """Edge of an output tile, for the count of waves."""
    grouped_factor: float
    """Rate of a grouped GEMM over that of as many separate rows in one."""
    wave_weight: float
    """0: partial waves cost nothing; 1: a partial wave costs a whole one."""


def gemm_s(
    m: Floats,
    n: Floats,
    k: Floats,
    rates: Rates,
    *,
    sixteen_bit: bool = False,
    groups: Floats = 1.0,
    imbalance: Floats = 1.0,
    output_bytes: float = 2.0,
) -> Floats:
    """`groups` GEMMs of [m, k] x [k, n] in one launch: 2 m n k FLOP each.

    sqrt(C^2 + M^2), with C = 2 m n k / (peak k/(k+k0) m/(m+e0) n/(n+e0) wave) and M the bytes of operands and
    results over HBM's rate. The rate falls with few rows or columns, with shallow K, and with the last,
    partly filled wave of output tiles over the SMs (tile and wave quantisation: NVIDIA "Matrix Multiplication
    Background User's Guide", sections 3 and 4). Operands and results go through HBM meanwhile: the two
    overlap but for the first and last tiles (a p-norm of 2 fits the measured shapes best).

    Parameters
    ----------
    m, n, k : float or array
        Rows, columns and depth; counted as at least 1.
    rates : Rates
        What the device attains.
    sixteen_bit : bool
        Whether it runs at 16 bits whatever the run's precision.
    groups : float or array
        Matrices in the launch, at least 1; above 1 at the rate of grouped GEMMs.
    imbalance : float or array
        Rows of the busiest rank over the mean `m`, at least 1. Tiles and waves are counted at the mean: where
        rows differ by expert and step their rounding averages out, and more rows never take less time.
    output_bytes : float
        Bytes moved per element of the result, at least 0.

    Returns
    -------
    float or array
        Seconds, above 0.
    """
    alone = rates.head_gemm_flops if sixteen_bit else rates.gemm_flops
    m = np.maximum(m, 1.0)
    n = np.maximum(n, 1.0)
    k = np.maximum(k, 1.0)
    peak: Floats = alone
    half_edge: Floats = rates.gemm_half_edge
    if not isinstance(groups, float) or groups > 1:
        grouped = np.asarray(groups) > 1
        peak = alone * np.where(grouped, rates.grouped_factor, 1.0)
        half_edge = np.where(grouped, rates.grouped_half_edge, rates.gemm_half_edge)
    tiles = groups * (np.ceil(m / rates.tile)) * np.ceil(n / rates.tile)
    waves = tiles / rates.sms
    filled = waves / np.ceil(waves)
    m = m * imbalance
    # A start-up of so many rows or so deep at 16 bits takes as long at any precision.
    faster = alone / rates.head_gemm_flops
    half_edge = faster * half_edge
    edges = m / (m + half_edge) * n / (n + half_edge)
    quantised = (1.0 - rates.wave_weight) + rates.wave_weight * filled
    depth = k / (k + faster * rates.gemm_half_k)
    compute = groups * 2.0 * m * n * k / (peak * depth * quantised * edges)
    operand = 2.0 if sixteen_bit else rates.operand_bytes
    moved = groups * (operand * (m * k + k * n) + output_bytes * m * n)
    streaming = moved / rates.hbm_bytes_per_s
    seconds: Floats = np.sqrt(compute**2 + streaming**2)
    return seconds


def weight_gradient_s(
    m: Floats,
    n: Floats,
    k: Floats,
    rates: Rates,
    *,
    sixteen_bit: bool = False,
    groups: Floats = 1.0,
) -> Floats:
    """The GEMM of a weight gradient, added to the gradient of earlier micro-batches.

    `gemm_s` has the formula and its sources.

    Parameters
    ----------
    m, n : float or array
        Rows and columns of the weight; counted as at least 1.
    k : float or array
        Tokens; counted as at least 1.
    rates : Rates
        What the device attains; `weight_gradient_bytes` of it are moved per element of the gradient.
    sixteen_bit : bool
        Whether it runs at 16 bits whatever the run's precision.
    groups : float or array
        Weights in the launch, at least 1.

    Returns
    -------
    float or array
        Seconds, above 0.
    """
    output_bytes = rates.weight_gradient_bytes
    return gemm_s(m, n, k, rates, sixteen_bit=sixteen_bit, groups=groups, output_bytes=output_bytes)


_LANES = {"volta": 64.0, "ampere": 64.0}
"""Instructions of 32 bits that an SM begins in a cycle, where not 128 (CUDA C++ Programming Guide, arithmetic
instructions, throughput of native 32-bit additions; A100 of compute capability 8.0)."""
_CLOCK_HZ = 1.6e9
"""Between the boost clocks of 1.41 GHz of an A100 and 1.83 GHz of an H100."""


def instructions_per_s(architecture: str, rates: Rates) -> float:
    """Instructions of 32 bits that a device begins in a second, outside its tensor cores.

    Parameters
    ----------
    architecture : str
        Of the device, such as hopper or blackwell.
    rates : Rates
        Its SMs are used.

    Returns
    -------
    float
        Above 0.
    """
    return rates.sms * _LANES.get(architecture, 128.0) * _CLOCK_HZ


def attention_pair_flops(
    seq_queries: Floats, seq_keys: Floats, heads: Floats, qk_dim: Floats, v_dim: Floats
) -> Floats:
    """FLOP of the two batched GEMMs of attention, in full: 2 sq sk (dqk + dv) per head.

    Parameters
    ----------
    seq_queries, seq_keys : float or array
        Tokens, sq and sk, at least 0.
    heads : float or array
        Query heads on the rank, above 0.
    qk_dim, v_dim : float or array
        Width of a head's queries and keys, dqk, and of its values, dv, above 0.

    Returns
    -------
    float or array
        FLOP of a forward pass without a mask (Korthikanti et al. 2022, arXiv 2205.05198, appendix A).
    """
    widths = np.asarray(qk_dim) + v_dim
    return 2.0 * np.asarray(seq_queries) * seq_keys * heads * widths


def streamed_s(moved_bytes: Floats, rates: Rates) -> Floats:
    """A memory-bound kernel: its bytes over the attained HBM bandwidth (Williams et al. 2009, roofline).

    Parameters
    ----------
    moved_bytes : float or array
        Bytes read and written, at least 0.
    rates : Rates
        What the device attains.

    Returns
    -------
    float or array
        Seconds.
    """
    return np.asarray(moved_bytes) / rates.hbm_bytes_per_s


# What the narrow precisions read and write: operands, scales, casts, gathered activations.


OPERAND_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes of an operand's element: one of scale for every 32 elements of MXFP8, for every 16 of NVFP4."""

GATHERED_SHARE = {precision: size / 2.0 for precision, size in OPERAND_BYTES.items()}
"""Activations are gathered after the cast (Transformer Engine, `gather_along_first_dim`): bytes over those
at 16 bits."""


_TRANSPOSED_BYTES_PER_S_OF_SM = 6.4e9
"""Read and written by one SM in compiled kernels that cast along columns or write transposed."""


def transposed_slower(rates: Rates) -> float:
    """How much slower than streaming kernels those are that cast along columns or write transposed.

    PyTorch compiles them so that neighbouring elements lie apart in memory, and the SMs pace them instead of
    HBM. 6.4 GB/s an SM is what the kernels of Llama 3's layers took by torchao 0.18 and PyTorch 2.11 on an
    H200; `tests/data/own_runs/h200_float8.yaml` has the profile.

    Parameters
    ----------
    rates : Rates
        What the device attains.

    Returns
    -------
    float
        Ratio of rates, at least 1.
    """
    return max(1.0, rates.hbm_bytes_per_s / (rates.sms * _TRANSPOSED_BYTES_PER_S_OF_SM))


_ROW_CAST = 2.0 + 1.0
"""Bytes of an element that is cast by row: read once for the maximum and the cast, written at 8 bits."""
_COLUMN_CAST = 2.0 + 2.0 + 1.0
"""By column: read for the maximum, read for the cast, and written transposed."""


def cast_bytes_per_element(
    precision: str,
    architecture: str,
    *,
    current_scaling: bool,
    transposes_apart: bool = False,
    recipe: str | None = None,
    slower: float = 1.0,
) -> float:
    """Bytes that moving one element to a narrower format costs, reads and writes.

    FP8 reads 2 and writes 1, and once more transposed before Blackwell, whose FP8 GEMMs take either order; a
    scale from the tensor's own maximum needs one more read of 2. Blocks of 128 are read once and written by
    rows and by columns, with 4 bytes of scale each. Scales by row need a cast along rows for one product and
    one along columns for another, unless weight gradients stay at 16 bits (torchao 0.18, float8/config.py,
    Float8LinearRecipeName). MXFP8 writes rows and columns, each with its scales. NVFP4 reads for the maximum,
    for the rows and for the Hadamard-rotated columns (Transformer Engine documentation, "Low precision
    training").

    Parameters
    ----------
    precision : str
        bf16, fp16, fp8, mxfp8 or nvfp4.
    architecture : str
        Of the device, such as hopper or blackwell.
    current_scaling : bool
        Whether FP8 scales come from the tensor itself instead of the steps before; a recipe goes before it.
    transposes_apart : bool
        Whether the transpose is made in a kernel of its own, which reads the FP8 tensor once more.
    recipe : str, optional
        How FP8 scales come about (`workload.Fp8Recipe`), where it is not the stack's own way.
    slower : float
        `transposed_slower`: what a byte counts that is cast along columns for scales by row, at least 1.

    Returns
    -------
    float
        Bytes; 0 at 16 bits.
    """
    if precision == "fp8" and recipe == "blockwise":
        return 2.0 + 2.0 * (1.0 + 4.0 / 128.0)
    if precision == "fp8" and recipe in ("rowwise", "rowwise_with_gw_hp"):
        return _ROW_CAST + (_COLUMN_CAST * slower if recipe == "rowwise" else 0.0)
    if precision == "fp8":
        written = 1.0 if architecture == "blackwell" else 2.0
        maximum = 2.0 if (recipe == "tensorwise" if recipe else current_scaling) else 0.0
        transpose = 1.0 if transposes_apart and written > 1.0 else 0.0
        return 2.0 + written + transpose + maximum
    reads = {"mxfp8": 2.0, "nvfp4": 6.0}
    if precision not in reads:
        return 0.0
    return reads[precision] + 2.0 * OPERAND_BYTES[precision]


_STEPWISE_MAXIMUM, _STEPWISE_NARROWING, _TRANSPOSED_COPY = 6.0, 27.0, 2.0
"""Of an element cast one operator of PyTorch at a time: its magnitude (4) and the maximum (2); widened to 32
bits (6), scaled (8), clamped (8) and narrowed (5) (torchao 0.8.0, float8/float8_utils.py, tensor_to_amax and
to_fp8_saturated; float8_tensor.py, _ToFloat8ConstrFunc.forward). A copy in the other order, at 8 bits, where
a product wants it (float8_ops.py, preprocess_addmm)."""


class CastBytes(NamedTuple):
    """Bytes of casts by what is cast: an element of a product's input, of its weight, of its gradient."""

    inputs: float
    weights: float
    gradients: float


def stepwise_cast_bytes(recipe: str | None) -> tuple[CastBytes, CastBytes, CastBytes]:
    """Bytes that casts of one product move where PyTorch runs each of their operators by itself.

    With scales by tensor, input, weight and gradient are cast once, and the backward products copy all three
    into the other order. Scales by row are taken anew along the other order: input, weight and gradient once
    more, unless weight gradients stay at 16 bits (torchao 0.8.0, float8/float8_linear.py,
    manual_float8_matmul_with_args_in_float8 and manual_float8_matmul_with_args_in_hp).

    Parameters
    ----------
    recipe : str, optional
        How FP8 scales come about (`workload.Fp8Recipe`).

    Returns
    -------
    tuple of three CastBytes
        Forward, backward, and again where operators are recomputed, which keeps magnitudes and maxima
        (torchtitan 0.1, parallelisms/parallelize_llama.py, _save_list).
    """
    cast = _STEPWISE_MAXIMUM + _STEPWISE_NARROWING
    forward = CastBytes(cast, cast, 0.0)
    again = CastBytes(_STEPWISE_NARROWING, _STEPWISE_NARROWING, 0.0)
    copied = cast + _TRANSPOSED_COPY
    if recipe == "rowwise":
        return forward, CastBytes(copied, copied, cast + copied), again
    if recipe == "rowwise_with_gw_hp":
        return forward, CastBytes(0.0, copied, cast), again
    return forward, CastBytes(_TRANSPOSED_COPY, _TRANSPOSED_COPY, copied), again


def weight_cast_bytes(recipe: str | None, slower: float) -> float:
    """Bytes per element of a weight that every micro-batch casts again.

    Where scales are by row, whole weights are gathered at 16 bits and cast for the forward product and, along
    the other order, for the gradient of the inputs (torchao 0.18, float8/float8_linear.py,
    matmul_with_hp_or_float8_args). Other stacks cast shards, or once a step, which has no price.

    Parameters
    ----------
    recipe : str, optional
        How FP8 scales come about (`workload.Fp8Recipe`).
    slower : float
        `transposed_slower`: what a byte counts that is written transposed, at least 1.

    Returns
    -------
    float
        Bytes, at least 0.
    """
    again = {
        "rowwise": _COLUMN_CAST * slower,
        "rowwise_with_gw_hp": 2.0 + (2.0 + 1.0) * slower,
    }
    return _ROW_CAST + again[recipe] if recipe in again else 0.0


# Bytes per element that norms, residuals, rotary embeddings and activations move, by how they are run.


_FUSED_NORM = (4.0, 6.0)
_EAGER_RMS_NORM = (36.0, 76.0)


_WIDE_STREAM = (28.0, 60.0), (11.0, 12.0), (46.0, 46.0), (20.0, 36.0)
"""Norm, residual, rotary and gate of eager layers whose norms have 32 bits. A norm squares (8), takes the
mean (4), multiplies (8) and multiplies by its weight (8), without casts; backward its products take 8, 24 and
16, and their sum 12. A residual adds what has 16 bits (10) behind attention, and 32 (12) behind a
feed-forward. Queries and keys are turned at twice their 16-bit bytes (40) and narrowed for attention (6); the
gate has twice its own (transformers 4.48, models/mistral/modeling_mistral.py; integrations/
flash_attention.py)."""


_STEPWISE_ACTIVATION = 14.0, 26.0
"""Of a gated feed-forward in Megatron without `bias_activation_fusion`: forward the activation of one half
(4), the other half plus an offset, nought or not (4), and their product (6); backward the gradients of both
(12), of the activation (6), and halves joined (8; megatron/core/transformer/mlp.py, forward, and autograd of
its operators)."""


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

    Fused: one kernel each, as in Transformer Engine or from torch.compile. Separate: a fused norm, the rest
    apart (Megatron-DeepSpeed). Operator by operator, as eager PyTorch runs a model's Python code: an RMSNorm
    casts up (6 bytes), squares (8), takes the mean (4), multiplies (8), casts down (6) and multiplies by its
    weight (4); its gradient takes 12 for the weight, 6 + 6 for the casts, 24 for the product, 16 for the
    square and 12 for their sum. A rotary embedding casts up (6), multiplies (8) and casts down (6), and so
    does its gradient (torchtitan/models/norms.py and models/llama/model.py, December 2024).

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
        Bytes read and written per element.
    """
    model = workload.model
    matrices = 2.0 if model.gated else 1.0
    activation = 2.0 * matrices + 2.0, 4.0 * matrices + 2.0
    if eager and workload.adapters is not None and workload.adapters.widens_stream:
        norm, residual, rotary, gate = _WIDE_STREAM
        plain = 2.0 * activation[0], 2.0 * activation[1]
        return ElementBytes(norm, residual, rotary, gate if model.gated else plain)
    if eager:
        eager_norm = model.norm == "rmsnorm" and not fused_norm
        norm = _EAGER_RMS_NORM if eager_norm else _FUSED_NORM
        if model.gated:
            activation = (10.0, 18.0)
        return ElementBytes(norm, (6.0, 6.0), (20.0, 20.0), activation)
    if fused:
        if workload.activates_stepwise:
            activation = _STEPWISE_ACTIVATION
        return ElementBytes(_FUSED_NORM, (6.0, 6.0), (4.0, 4.0), activation)
    apart = 1.5 * activation[0], 1.5 * activation[1]
    return ElementBytes(_FUSED_NORM, (8.0, 8.0), (4.0, 4.0), apart)
