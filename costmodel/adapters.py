"""What training adapters beside frozen weights takes: seconds of their products, and what autograd keeps.

A frozen weight has no gradient: of the three products of a matrix (forward, by its input, by its weight) the
last falls away (LoRA, arXiv 2106.09685, section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.costmodel.kernels import gemm_s, streamed_s, weight_gradient_s
from meshwright.costmodel.layer_context import Context, Passes
from meshwright.costmodel.layout import Floats
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import EXPERTS
from meshwright.model_specs.blocks import BlockShares

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrices that some models keep as one, which then has one adapter."""
SUMMED_BYTES, _SCALE_BYTES = 6.0, 4.0
"""Of an element of an adapter's output: read twice and written as it is added to the matrix's own, and read
and written as it is scaled (peft/tuners/lora/layer.py, Linear.forward). Backward the gradient is scaled, and
the adapter's part of the gradient of the input is added to the matrix's."""
_WIDE_BYTES = 2.0
"""Of a weight of 4 bits as products read it."""

Outputs = Mapping[str, Floats]
"""Names of matrices that share an input, and the outputs of each on one rank."""


def frozen(workload: Workload) -> bool:
    """Whether the model's own parameters are left as they are.

    Parameters
    ----------
    workload : Workload
        Its `adapters` are looked at.

    Returns
    -------
    bool
        False where every parameter is trained.
    """
    return workload.adapters is not None


def adapted_outputs(workload: Workload, outputs: Outputs) -> list[Floats]:
    """Outputs of each adapter beside matrices that share an input.

    Parameters
    ----------
    workload : Workload
        Its `adapters` say which matrices have one.
    outputs : mapping of str to float or array
        Of each matrix on one rank, above 0.

    Returns
    -------
    list of float or array
        One number for each adapter; none where nothing is adapted.
    """
    adapters = workload.adapters
    if adapters is None:
        return []
    for fused, names in _FUSED.items():
        if adapters.has(fused) and set(names) & set(outputs):
            return [sum(outputs.values(), start=np.float64(0.0))]
    return [width for name, width in outputs.items() if adapters.has(name)]


def adapter_passes_s(c: Context, tokens: Floats, inputs: Floats, outputs: Outputs) -> Passes:
    """Products of the adapters beside matrices that share an input, their scaling and their sums.

    Two products forward, and backward two for each of them. Few columns, r, leave a GEMM far below its rate:
    HBM paces it (`kernels.gemm_s`).

    Parameters
    ----------
    c : Context
        Workload and rates.
    tokens : float or array
        Rows, at least 0.
    inputs : float or array
        Width of the input on one rank, above 0.
    outputs : mapping of str to float or array
        Of each matrix on one rank, above 0.

    Returns
    -------
    Passes
        Seconds, at least 0.
    """
    widths = adapted_outputs(c.workload, outputs)
    none = 0.0 * np.asarray(tokens, dtype=np.float64)
    forward: Floats = none
    backward: Floats = none
    if c.workload.adapters is None:
        return Passes(forward, backward)
    rank, rates = float(c.workload.adapters.rank), c.rates
    for width in widths:
        down = gemm_s(tokens, rank, inputs, rates, sixteen_bit=True)
        up = gemm_s(tokens, width, rank, rates, sixteen_bit=True)
        forward = forward + down + up
        forward = forward + streamed_s((SUMMED_BYTES + _SCALE_BYTES) * tokens * width, rates)
        by_input = gemm_s(tokens, rank, width, rates, sixteen_bit=True)
        by_input = by_input + gemm_s(tokens, inputs, rank, rates, sixteen_bit=True)
        by_weight = weight_gradient_s(rank, width, tokens, rates, sixteen_bit=True)
        by_weight = by_weight + weight_gradient_s(inputs, rank, tokens, rates, sixteen_bit=True)
        moved = tokens * (_SCALE_BYTES * width + SUMMED_BYTES * inputs)
        backward = backward + by_input + by_weight + streamed_s(moved, rates)
    return Passes(forward, backward)


def widening_s(c: Context, elements: Floats) -> Floats:
    """Making weights of 4 bits readable to a product, in each pass in which one reads them.

    They are read, and written at 16 bits (bitsandbytes, autograd/_functions.py, MatMul4Bit: `dequantize_4bit`
    in the forward and in the backward pass).

    Parameters
    ----------
    c : Context
        Workload and rates.
    elements : float or array
        Weights on one rank, at least 0.

    Returns
    -------
    float or array
        Seconds; 0 where weights are not of 4 bits.
    """
    adapters = c.workload.adapters
    if adapters is None or adapters.method != "qlora":
        return 0.0 * np.asarray(elements, dtype=np.float64)
    narrow = c.workload.frozen_weight_bytes[1]
    return streamed_s((narrow + _WIDE_BYTES) * np.asarray(elements), c.rates)


def keeps_input(workload: Workload, *names: str) -> bool:
    """Whether some product of matrices that share an input needs it in the backward pass.

    A frozen matrix gives the gradient of its input without it (torch, autograd of `linear`: the input is
    saved where the weight has a gradient).

    Parameters
    ----------
    workload : Workload
        Its `adapters` say which matrices have one.
    *names : str
        The matrices.

    Returns
    -------
    bool
        True where every parameter is trained.
    """
    if workload.adapters is None:
        return True
    return bool(adapted_outputs(workload, dict.fromkeys(names, 1.0)))


def inner_bytes(workload: Workload, *names: str) -> float:
    """Bytes a token between the two products of each adapter, which the second one's gradient needs.

    Parameters
    ----------
    workload : Workload
        Its `adapters`.
    *names : str
        Matrices that share an input.

    Returns
    -------
    float
        2 r for each adapter; 0 where nothing is adapted.
    """
    if workload.adapters is None:
        return 0.0
    return 2.0 * workload.adapters.rank * len(adapted_outputs(workload, dict.fromkeys(names, 1.0)))


_ADAPTER_LAUNCHES = 5.0
"""Kernels of an adapter forward: two products, a cast, the scaling and the sum (peft/tuners/lora/layer.py)."""
_WIDENING_LAUNCHES = 2.0
"""Kernels that make a weight of 4 bits readable: its scales, and itself (bitsandbytes, functional.py,
dequantize_4bit)."""
_LAYER_LAUNCHES, _EAGER_LAYER_LAUNCHES = 13.0, 36.0
"""Kernels of a layer forward: of Transformer Engine (`buffers.graph_bytes`, a third of its nodes), and one
PyTorch operator at a time: six a norm, ten of rotary embeddings, seven products, attention, sums and the gate."""


def adapter_launches(c: Context, shares: BlockShares) -> float:
    """Launches of a layer's adapters in a forward pass, over those of the layer without.

    Parameters
    ----------
    c : Context
        Workload and software.
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    float
        At least 0; 0 where every parameter is trained.
    """
    workload, model = c.workload, c.workload.model
    if workload.adapters is None:
        return 0.0
    blocks = shares.feed_forward
    if model.moe is not None and model.moe.shared_width:
        blocks += shares.experts
    in_blocks = {
        "attention": (("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("o_proj",)),
        "mamba": (("in_proj",), ("out_proj",)),
    }
    number = blocks * _adapters(workload, (("gate_proj", "up_proj"), ("down_proj",)))
    number += shares.attention * _adapters(workload, in_blocks["attention"])
    number += shares.mamba * _adapters(workload, in_blocks["mamba"])
    launches = _ADAPTER_LAUNCHES * number
    if workload.adapters.method == "qlora":
        matrices = 4.0 * shares.attention + 3.0 * blocks + 2.0 * shares.mamba
        launches += _WIDENING_LAUNCHES * matrices
    eager = c.constants.framework.eager_operators
    return launches / (_EAGER_LAYER_LAUNCHES if eager else _LAYER_LAUNCHES)


def _adapters(workload: Workload, groups: tuple[tuple[str, ...], ...]) -> int:
    """Adapters beside matrices, in groups that share an input."""
    return sum(len(adapted_outputs(workload, dict.fromkeys(names, 1.0))) for names in groups)


def adapts_experts(workload: Workload) -> bool:
    """Whether routed experts have adapters.

    Parameters
    ----------
    workload : Workload
        Its `adapters`.

    Returns
    -------
    bool
        False where every parameter is trained.
    """
    return workload.adapters is not None and workload.adapters.has(EXPERTS)
