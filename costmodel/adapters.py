"""What training adapters beside frozen weights takes: seconds of their products, and what autograd keeps.

A frozen weight has no gradient: of the three products of a matrix (forward, by its input, by its weight) the
last falls away (LoRA, arXiv 2106.09685, section 4.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.costmodel.kernels import (
    Rates,
    gemm_s,
    instructions_per_s,
    streamed_s,
    weight_gradient_s,
)
from meshwright.costmodel.layer_context import Context, Passes
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.adapters import (
    EXPERTS,
    INPUTS_BACK,
    INPUTS_GATE,
    LATENT_DOWN,
    LATENT_UP,
    adapted_matrices,
    adapted_outputs_of_blocks,
    layer_matrices,
)
from meshwright.model_specs.blocks import AHEAD, BlockShares

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrices that some models keep as one, which then has one adapter."""
_DECOMPOSED_BYTES = (14.0, 30.0)
"""Of an element of the output of a matrix with DoRA, over those of LoRA (peft/tuners/lora/dora.py, forward).
Forward the frozen output is scaled (4), the adapter's scaled once more (4), and one more sum taken (6);
backward both are scaled (8), their gradients' products with them are written and summed (16), and the two
gradients of the frozen output are added (6)."""
_NORM_BYTES = 12.0
"""Of a weight of an adapted matrix in each forward pass of DoRA: B A scaled (4), added to it (6), and the
norm of the sum read (2) (peft/tuners/lora/dora.py, get_weight_norm); all of 16 bits, as FSDP2's mixed
precision and DeepSpeed hand them over."""
_KEPT_BYTES = 4.0
"""Of an element of the output of a matrix with DoRA: the frozen output and the adapter's, which the gradients
of the magnitudes need."""
_NORMED_BYTES: dict[int, float] = {16: 6.0, 8: 10.0, 4: 8.0}
"""Of a weight at its norm, by the bits of the base: B A (2), scaled (2), the sum (2), and the widened weight
(2); at 8 bits, before, B A and two tensors of 32 bits (`_INT8_NORM_BYTES` has the source)."""
_EYE_BYTES = 2.0
"""Of the identity that A and B are multiplied with to get B A: written (get_lora_weight)."""
INT8_SPEED = 2.0
"""FLOP/s of products of 8-bit integers over those of 16 bits (datasheets of A100: 624 and 312; of H100: 1979
and 989)."""
_INT8_INPUT_BYTES, _INT8_OUTPUT_BYTES, _INT8_CAST_BYTES = 12.0, 6.0, 4.0
"""Of an element of the input of a matrix of 8 bits: outliers sought by their size (9) and the rest quantised
(3); of its output, which comes as 32-bit integers: scaled to fp16 (6); of each, where the run is not in fp16:
a cast (bitsandbytes, autograd/_functions.py, MatMul8bitLt.forward; backends/cuda/ops.py,
int8_vectorwise_quant). The product of outliers is left out: in a few columns, by the data (LLM.int8(), arXiv
2208.07339, section 4)."""
_INT8_ACCUMULATED_BYTES = 4.0
SUMMED_BYTES, _SCALE_BYTES = 6.0, 4.0
"""Of an element of an adapter's output: read twice and written as it is added to the matrix's own, and read
and written as it is scaled (peft/tuners/lora/layer.py, Linear.forward). Backward the gradient is scaled, and
the adapter's part of the gradient of the input is added to the matrix's."""
_COPIED_BYTES = 12.0
"""Of an element of an adapter's input, widened (2, 4) and narrowed again (4, 2); and of its gradient."""
_WIDE_INPUT_BYTES, _WIDE_OUTPUT_BYTES = (6.0, 12.0), (24.0, 20.0)
"""Beside 16-bit weights where nothing narrows adapters, forward and backward, without what their products
read and write. An element of the input is widened (6), its gradient narrowed (6) and added to the matrix's
(6); one of the output is scaled (8), added to the matrix's (10) and narrowed (6), its gradient widened (6),
narrowed for the matrix (6) and scaled (8) (peft/tuners/lora/layer.py, Linear.forward; torch,
csrc/autograd/engine.cpp, validate_outputs)."""
_STREAM_CAST_BYTES = 6.0
"""Of an element of 32 bits that a product takes at 16, or back (bitsandbytes, nn/modules.py,
Linear4bit.forward: its input to the type that it computes in, its output to that of the input)."""
_STREAM_INPUT_BYTES, _STREAM_OUTPUT_BYTES = (6.0, 18.0), (14.0, 10.0)
"""Of an adapter beside such a product under autocast: its input narrowed (6), the gradient widened (6) and
added (12); its output scaled (4) and added to the matrix's (10), the gradient narrowed (6) and scaled (4)."""
_NARROW_INPUT = "o_proj"
"""The matrix that reads what attention returns, at 16 bits whatever the residuals have."""
_MASK_BYTES = 1.0
"""Of an element that dropout has read (torch, native_dropout)."""
_WIDE_BYTES, _INT8_WIDE_BYTES, _INT8_NORM_BYTES = 2.0, 6.0, 18.0
"""Of a weight of 4 bits as products read it; of one of 8 beside itself as the backward pass widens it: it is
written and then scaled in place (MatMul8bitLt.backward); and as DoRA's norm reads it: by way of 32 bits
(peft/utils/integrations.py, dequantize_bnb_weight; bitsandbytes, _ops.py, int8_vectorwise_dequant)."""

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


def backward_share(layout: Layout, symbols: str) -> Floats:
    """Whether a layer has a backward pass, as a share of it.

    Layers ahead of the first adapter have none, but where layers are recomputed in full: their checkpoint
    wants an input with a gradient, which the stacks then ask of the embeddings (megatron/bridge/peft/
    recompute.py, maybe_enable_recompute_inputs_grad; peft/peft_model.py,
    _prepare_model_for_gradient_checkpointing).

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].
    symbols : str
        The kind of layer, an entry of `ModelSpec.unlike_layers` or `ModelSpec.unlike_bytes`.

    Returns
    -------
    float or array
        Without unit, 0 or 1.
    """
    if not symbols.endswith(AHEAD):
        return 1.0
    return np.where(np.asarray(layout.recompute) & int(Recompute.FULL), 1.0, 0.0)


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
    if workload.adapters is None:
        return []
    adapted = adapted_matrices(workload.model, workload.adapters)
    for fused, names in _FUSED.items():
        if fused in adapted and set(names) & set(outputs):
            return [sum(outputs.values(), start=np.float64(0.0))]
    return [width for name, width in outputs.items() if name in adapted]


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
    of_inputs, of_outputs = _streamed_bytes(c.workload, outputs)
    wide = adapters_are_wide(c.workload)
    narrow = not wide
    products = _wide_rates(c) if wide else rates
    result = 4.0 if wide else 2.0
    for width in widths:
        down = gemm_s(tokens, rank, inputs, products, sixteen_bit=narrow, output_bytes=result)
        up = gemm_s(tokens, width, rank, products, sixteen_bit=narrow, output_bytes=result)
        streamed_f, streamed_b = (
            streamed_s(tokens * (of_input * inputs + of_output * width), rates)
            for of_input, of_output in zip(of_inputs, of_outputs, strict=True)
        )
        forward = forward + down + up + streamed_f
        by_input = gemm_s(tokens, rank, width, products, sixteen_bit=narrow, output_bytes=result)
        by_input = by_input + gemm_s(
            tokens, inputs, rank, products, sixteen_bit=narrow, output_bytes=result
        )
        by_weight = weight_gradient_s(rank, width, tokens, products, sixteen_bit=narrow)
        by_weight = by_weight + weight_gradient_s(
            inputs, rank, tokens, products, sixteen_bit=narrow
        )
        backward = backward + by_input + by_weight + streamed_b
        if c.workload.adapters.decomposed:
            scaled_f, scaled_b = (streamed_s(n * tokens * width, rates) for n in _DECOMPOSED_BYTES)
            forward = forward + scaled_f + _norm_s(c, inputs, width)
            backward = backward + scaled_b
    return Passes(forward, backward)


def _streamed_bytes(
    workload: Workload, outputs: Outputs
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes of an element of an adapter's input and of its output, forward and backward, around its products.

    Dropout reads and writes the input at the width that it comes in, beside a mask; so does its gradient
    (torch, native_dropout and native_dropout_backward).
    """
    copies, wide = adapters_copy_inputs(workload), adapters_are_wide(workload)
    streams = _reads_wide_stream(workload, outputs)
    dropped = (8.0 if copies or wide or streams else 4.0) + _MASK_BYTES
    dropped *= _drops(workload)
    if streams:
        forward, backward = _STREAM_INPUT_BYTES
        return (forward + dropped, backward + dropped), _STREAM_OUTPUT_BYTES
    if wide:
        forward, backward = _WIDE_INPUT_BYTES
        return (forward + dropped, backward + dropped), _WIDE_OUTPUT_BYTES
    copied = _COPIED_BYTES * copies + dropped
    return (copied, SUMMED_BYTES + copied), (SUMMED_BYTES + _SCALE_BYTES, _SCALE_BYTES)


def _reads_wide_stream(workload: Workload, outputs: Outputs) -> bool:
    """Whether matrices read what norms return, or gates, at 32 bits."""
    widens = workload.adapters is not None and workload.adapters.widens_stream
    return widens and _NARROW_INPUT not in outputs


def stream_casts_s(c: Context, tokens: Floats, n: Floats, k: Floats, outputs: Outputs) -> Floats:
    """Casts of the inputs and outputs of frozen matrices that stand in a stream of 32 bits, in either pass.

    As `_STREAM_CAST_BYTES` says (bitsandbytes, nn/modules.py).

    Parameters
    ----------
    c : Context
        Workload and rates.
    tokens : float or array
        Rows, at least 0.
    n, k : float or array
        Width of the output and of the input on one rank, above 0.
    outputs : mapping of str to float or array
        What n is the sum of, by the name of each matrix: each casts the input for itself.

    Returns
    -------
    float or array
        Seconds; 0 where residuals have 16 bits.
    """
    if not _reads_wide_stream(c.workload, outputs):
        return 0.0 * np.asarray(tokens, dtype=np.float64)
    return streamed_s(_STREAM_CAST_BYTES * tokens * (len(outputs) * k + n), c.rates)


def _drops(workload: Workload) -> bool:
    """Whether adapters drop some of their input."""
    return workload.adapters is not None and workload.adapters.dropout > 0.0


def _wide_rates(c: Context) -> Rates:
    """Rates of products at 32 bits, which PyTorch keeps off the tensor cores.

    torch.backends.cuda.matmul.allow_tf32 is false unless a script sets it; a multiplication and its sum are
    one instruction.
    """
    flops = 2.0 * instructions_per_s(c.workload.cluster.device.architecture, c.rates)
    return replace(c.rates, gemm_flops=flops, operand_bytes=4.0)


def _norm_s(c: Context, inputs: Floats, outputs: Floats) -> Floats:
    """Norms of the rows of W + B A, which DoRA divides by: B A by way of an identity, summed and squared.

    They are taken in each forward pass of a micro-batch, and without a gradient (DoRA, arXiv 2402.09353,
    section 4.3; peft/tuners/lora/dora.py, get_lora_weight and get_weight_norm).
    """
    adapters, rates = c.workload.adapters, c.rates
    assert adapters is not None
    rank = float(adapters.rank)
    products = gemm_s(inputs, rank, inputs, rates, sixteen_bit=True)
    products = products + gemm_s(inputs, outputs, rank, rates, sixteen_bit=True)
    narrow = c.workload.frozen_weight_bytes[1]
    widened = {16: 0.0, 8: narrow + _INT8_NORM_BYTES, 4: narrow + _WIDE_BYTES}[adapters.base_bits]
    moved = (_NORM_BYTES + widened) * inputs * outputs + _EYE_BYTES * inputs * inputs
    return products + streamed_s(moved, rates)


def frozen_passes_s(c: Context, tokens: Floats, n: Floats, k: Floats, matrices: int) -> Passes:
    """The products of y[tokens, n] = x[tokens, k] W with a frozen W: no gradient of W.

    One of 4 bits is widened in both passes. One of 8 bits multiplies a quantised input forward, at the rate
    of 8-bit integers, and is widened backward (LLM.int8(), arXiv 2208.07339; bitsandbytes,
    autograd/_functions.py, MatMul8bitLt).

    Parameters
    ----------
    c : Context
        Workload and rates.
    tokens : float or array
        Rows, at least 0.
    n, k : float or array
        Width of the output and of the input on one rank, above 0.
    matrices : int
        What n is the sum of, at least 1: each quantises the input for itself.

    Returns
    -------
    Passes
        Seconds, above 0.
    """
    backward, widened_s = gemm_s(tokens, k, n, c.rates), widening_s(c, n * k)
    adapters = c.workload.adapters
    if adapters is None or adapters.base_bits != 8:
        return Passes(gemm_s(tokens, n, k, c.rates) + widened_s, backward + widened_s)
    rate = INT8_SPEED * c.rates.head_gemm_flops
    narrow = replace(c.rates, gemm_flops=rate, operand_bytes=1.0)
    forward = gemm_s(tokens, n, k, narrow, output_bytes=_INT8_ACCUMULATED_BYTES)
    cast = 0.0 if c.workload.precision == "fp16" else _INT8_CAST_BYTES
    moved = (_INT8_INPUT_BYTES + cast) * matrices * k + (_INT8_OUTPUT_BYTES + cast) * n
    return Passes(forward + streamed_s(moved * tokens, c.rates), backward + widened_s)


def widening_s(c: Context, elements: Floats) -> Floats:
    """Making weights of few bits readable to a product of 16 bits.

    Those of 4 bits are read, and written at 16, in each pass in which one reads them (bitsandbytes,
    autograd/_functions.py, MatMul4Bit: `dequantize_4bit` in the forward and in the backward pass); those of 8
    in the backward pass (MatMul8bitLt.backward), and of experts in both.

    Parameters
    ----------
    c : Context
        Workload and rates.
    elements : float or array
        Weights on one rank, at least 0.

    Returns
    -------
    float or array
        Seconds; 0 where weights are of 16 bits.
    """
    adapters = c.workload.adapters
    if adapters is None or adapters.base_bits == 16:
        return 0.0 * np.asarray(elements, dtype=np.float64)
    narrow = c.workload.frozen_weight_bytes[1]
    wide = _WIDE_BYTES if adapters.base_bits == 4 else _INT8_WIDE_BYTES
    return streamed_s((narrow + wide) * np.asarray(elements), c.rates)


def normed_bytes(workload: Workload) -> float:
    """What is in HBM while DoRA takes the norms of the largest matrix that it adapts.

    B A, itself scaled, and its sum with the matrix, of 16 bits each; of few bits, the matrix widened too
    (peft/tuners/lora/dora.py, get_weight_norm). Beside them lies the identity that A and B are multiplied
    with.

    Parameters
    ----------
    workload : Workload
        Its `adapters`, beside whole matrices.

    Returns
    -------
    float
        Bytes; 0 but of DoRA.
    """
    adapters = workload.adapters
    if adapters is None or not adapters.decomposed:
        return 0.0
    each = _NORMED_BYTES[adapters.base_bits]
    sizes = (
        each * matrix.inputs * matrix.outputs + _EYE_BYTES * matrix.inputs**2
        for matrix in layer_matrices(workload.model)
        if adapters.has(matrix.name)
    )
    return max(sizes, default=0.0)


def keeps_input(workload: Workload, *names: str) -> bool:
    """Whether some product of matrices that share an input needs it in the backward pass.

    A frozen matrix gives the gradient of its input without it (torch, autograd of `linear`: the input is
    saved where the weight has a gradient). One of 8 bits keeps it all the same (bitsandbytes,
    autograd/_functions.py, MatMul8bitLt.forward, tensors of its context).

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
    if workload.adapters is None or workload.adapters.base_bits == 8:
        return True
    return bool(adapted_outputs(workload, dict.fromkeys(names, 1.0)))


def inner_bytes(workload: Workload, *names: str) -> float:
    """Bytes a token between the two products of each adapter, which the second one's gradient needs.

    An adapter is a product to its rank and one from it (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    Parameters
    ----------
    workload : Workload
        Its `adapters`.
    *names : str
        Matrices that share an input.

    Returns
    -------
    float
        2 r for each adapter, 4 r at 32 bits; 0 where nothing is adapted.
    """
    if workload.adapters is None:
        return 0.0
    each = 4.0 if adapters_are_wide(workload) else 2.0
    return each * workload.adapters.rank * len(adapted_outputs(workload, dict.fromkeys(names, 1.0)))


def adapters_copy_inputs(workload: Workload) -> bool:
    """Whether each adapter widens its input to its own 32 bits, and autocast narrows it again.

    PEFT keeps adapters at 32 bits, and beside 16-bit weights casts to that (peft/tuners/tuners_utils.py,
    `_cast_input_dtype`; autocast of `linear`). Beside weights of fewer bits it leaves the input to autocast
    (peft/tuners/lora/bnb.py, forward).

    Parameters
    ----------
    workload : Workload
        Its `adapters` and `autocast` are used.

    Returns
    -------
    bool
        False where every parameter is trained.
    """
    adapters = workload.adapters
    return (
        adapters is not None
        and adapters.base_bits == 16
        and workload.autocast
        and not adapters_are_wide(workload)
    )


def adapters_are_wide(workload: Workload) -> bool:
    """Whether adapters beside weights of 16 bits multiply at 32.

    PEFT widens what it makes beside a model loaded at 16 bits (peft/tuners/tuners_utils.py,
    `cast_adapter_dtype`) and casts their input to that; a script without mixed precision narrows nothing.

    Parameters
    ----------
    workload : Workload
        Its `adapters` say so.

    Returns
    -------
    bool
        False where every parameter is trained.
    """
    adapters = workload.adapters
    return adapters is not None and adapters.base_bits == 16 and adapters.wide


def copied_input_bytes(workload: Workload, *names: str) -> float:
    """Bytes an element of the input of matrices that share it, which adapters keep beyond 2 that all share.

    Each keeps what its first product has read: the input itself where that is shared, else its own copy,
    widened or dropped, and what dropout kept (`kept_input_bytes`).

    Parameters
    ----------
    workload : Workload
        Its `adapters` and `autocast` are used.
    *names : str
        The matrices.

    Returns
    -------
    float
        At least 0; 0 where adapters share the input.
    """
    each = kept_input_bytes(workload)
    adapters = len(adapted_outputs(workload, dict.fromkeys(names, 1.0)))
    return max(each * adapters - 2.0, 0.0)


def kept_input_bytes(workload: Workload) -> float:
    """Bytes an element of the input that each adapter keeps for itself (`adapters_copy_inputs`).

    Parameters
    ----------
    workload : Workload
        Its `adapters` and `autocast` are used.

    Returns
    -------
    float
        0 where adapters share the input.
    """
    drops, wide = _drops(workload), adapters_are_wide(workload)
    if not (drops or wide or adapters_copy_inputs(workload)):
        return 0.0
    return (4.0 if wide else 2.0) + _MASK_BYTES * drops


def kept_outputs_bytes(workload: Workload, shares: BlockShares) -> float:
    """Bytes a token of outputs that DoRA keeps, over what LoRA does: frozen and adapter's apart.

    The gradient of a magnitude is the sum over tokens of the output's gradient and what it scales
    (peft/tuners/lora/dora.py, forward; autograd of a product).

    Parameters
    ----------
    workload : Workload
        Its `adapters`.
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    float
        At least 0; 0 but of DoRA.
    """
    if workload.adapters is None or not workload.adapters.decomposed:
        return 0.0
    outputs = adapted_outputs_of_blocks(workload.model, workload.adapters)
    elements = shares.attention * outputs.attention + shares.mamba * outputs.mamba
    elements += shares.feed_forward * outputs.feed_forward
    return _KEPT_BYTES * (elements + shares.experts * outputs.beside_experts)


_ADAPTER_PRODUCTS, _ADAPTER_OPERATORS = 2.0, 2.0
_COPIED_ADAPTER_LAUNCHES, _WIDE_ADAPTER_LAUNCHES = 8.0, 6.0
"""Kernels of an adapter forward: two products, which are modules, scaling and sum, which are not; and of all
four with casts of the input, there and back, and of both matrices; at 32 bits with casts of the input and of
the sum (peft/tuners/lora/layer.py;
megatron/bridge/peft/lora_layers.py and utils.py, ParallelLinearAdapter)."""
_DECOMPOSED_LAUNCHES = 12.0
"""Kernels of DoRA beside those: an identity, two products, scaling, sum and norm; of the outputs a quotient,
a difference, three products and sums (peft/tuners/lora/dora.py)."""
_WIDENING_LAUNCHES: dict[int, float] = {16: 0.0, 8: 11.0, 4: 2.0}
"""Kernels forward around a weight of few bits. At 4: its scales, and itself (bitsandbytes, functional.py,
dequantize_4bit). At 8: two casts, size, comparison and choice of outliers (5), quantising and zeroing (2),
scaling the result, and the outliers' own product (backends/cuda/ops.py)."""
_LAYER_LAUNCHES, _EAGER_LAYER_LAUNCHES = 13.0, 36.0
"""Kernels of a layer forward: of Transformer Engine (`buffers.graph_bytes`, a third of its nodes), and one
PyTorch operator at a time: six a norm, ten of rotary embeddings, seven products, attention, two sums and two
of the gate."""


def adapter_launches(c: Context, shares: BlockShares) -> float:
    """Launches of a layer's adapters in a forward pass, over those of the layer without.

    Each product of an adapter is a launch, and so is its sum with the matrix's (peft/tuners/lora/layer.py).

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
        "attention": (
            ("q_proj", "k_proj", "v_proj", "g_proj", "q_a_proj", "kv_a_proj_with_mqa"),
            ("o_proj",),
        ),
        "mamba": (("in_proj",), ("out_proj",)),
    }
    number = blocks * _adapters(workload, (("gate_proj", "up_proj"), ("down_proj",)))
    number += shares.experts * _adapters(workload, ((LATENT_DOWN,), (LATENT_UP,)))
    if model.layer_inputs is not None:
        number += _adapters(workload, ((INPUTS_GATE,), (INPUTS_BACK,)))
    number += shares.attention * _adapters(workload, in_blocks["attention"])
    number += shares.mamba * _adapters(workload, in_blocks["mamba"])
    each = _ADAPTER_PRODUCTS + _ADAPTER_OPERATORS * operator_share(c)
    if adapters_copy_inputs(workload):
        each = _COPIED_ADAPTER_LAUNCHES
    if adapters_are_wide(workload):
        each = _WIDE_ADAPTER_LAUNCHES
    each += operator_share(c) * _drops(workload)
    launches = each * number
    if workload.adapters.decomposed:
        launches += _DECOMPOSED_LAUNCHES * number
    if workload.adapters.base_bits < 16:
        matrices = 4.0 * shares.attention + 3.0 * blocks + 2.0 * shares.mamba
        if model.latent_size is not None:
            matrices += 2.0 * shares.experts
        if model.layer_inputs is not None:
            matrices += 2.0
        launches += _WIDENING_LAUNCHES[workload.adapters.base_bits] * matrices
    return launches / layer_launches(c)


def layer_launches(c: Context) -> float:
    """Kernels that a layer of the run's software launches in a forward pass.

    Those of transformers/models/llama/modeling_llama.py one at a time, or of Transformer Engine's modules.

    Parameters
    ----------
    c : Context
        Its constants say whether operators run one at a time.

    Returns
    -------
    float
        Above 0.
    """
    eager = c.constants.framework.eager_operators
    return _EAGER_LAYER_LAUNCHES if eager else _LAYER_LAUNCHES


def operator_share(c: Context) -> float:
    """Host time of one operator of PyTorch over that of a kernel of the stack's layers.

    Where operators run one at a time they are the kernels; a module of Transformer Engine takes longer for
    each of its own (`layer_launches`; transformer_engine/pytorch/module/base.py, prepare_forward).

    Parameters
    ----------
    c : Context
        Its constants are used.

    Returns
    -------
    float
        Without unit, above 0.
    """
    stack = c.constants.framework
    if stack.eager_operators:
        return 1.0
    return stack.operator_launch_s * layer_launches(c) / stack.launch_layer_s


_GRADIENT_LAUNCHES, _EAGER_GRADIENT_LAUNCHES = 6.0, 9.0
"""Kernels backward of the gradients of a layer's own weights: of four products, or of seven one at a time,
and of two norms."""


def gradient_launches(c: Context) -> float:
    """Launches of the gradients of a layer's own weights, over those of its forward pass.

    Frozen weights do not have them (megatron/core/tensor_parallel/layers.py, LinearWithFrozenWeight). The
    counts are of dense layers; a layer with experts is taken to have the same share.

    Parameters
    ----------
    c : Context
        Its constants say whether operators run one at a time.

    Returns
    -------
    float
        Above 0, below the 2 of a backward pass.
    """
    eager = c.constants.framework.eager_operators
    return (_EAGER_GRADIENT_LAUNCHES if eager else _GRADIENT_LAUNCHES) / layer_launches(c)


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
