"""Activations that autograd keeps for one layer and micro-batch on one GPU. Bytes.

Counted tensor by tensor for fused attention, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4) do for
unfused attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.adapters import (
    adapted_outputs,
    backward_share,
    copied_input_bytes,
    frozen,
    inner_bytes,
    keeps_input,
    kept_input_bytes,
    kept_outputs_bytes,
)
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS
from meshwright.costmodel.layout import Floats, Ints, Layout, Recompute, recomputes_experts
from meshwright.costmodel.other_blocks import CHUNK, saved_bytes, sparse_saved, uncut_saved_bytes
from meshwright.costmodel.stacks import memory_profile, stack_constants
from meshwright.costmodel.workload import (
    CHOICE_BYTES,
    GATHERS,
    PROBABILITY_BYTES,
    Workload,
    rank_tokens,
    sequence_shards,
    swaps_heads,
)
from meshwright.frameworks.catalog import input_offload
from meshwright.model_specs.adapters import INPUTS_BACK, INPUTS_GATE, LATENT_DOWN, LATENT_UP
from meshwright.model_specs.blocks import AttentionShares, BlockShares
from meshwright.model_specs.parameters import attention_matmul_parameters
from meshwright.model_specs.schema import ModelSpec

# Activations that are offloaded to the host.


LEAST_ELEMENTS = 2**20
"""Of a tensor that is offloaded: Megatron's `min_offloaded_tensor_size`, which launch files leave alone."""
LAYERS_AT_HAND = 2.0
"""Layers whose offloaded tensors are in HBM at a time: one at work, one on its way to the host or back."""


class Offloaded(NamedTuple):
    """Bytes of one layer and micro-batch on one GPU."""

    freed: Floats
    """That leave HBM."""
    copied: Floats
    """That go to the host forward and come back backward, and that it holds in between."""


def offloads(workload: Workload, module: str) -> bool:
    """Whether a module's saved tensors go to the host.

    Parameters
    ----------
    workload : Workload
        Its `offload_modules`.
    module : str
        A name of Megatron's `--offload-modules`, such as core_attn (`offloaded_per_layer` lists them).

    Returns
    -------
    bool
        True where the module is among them.
    """
    return module in workload.offload_modules.split("+")


def offloads_any(workload: Workload) -> bool:
    """Whether any module's saved tensors go to the host.

    Parameters
    ----------
    workload : Workload
        Its `offload_modules`.

    Returns
    -------
    bool
        False where they are "none".
    """
    return workload.offload_modules != "none"


def offloads_inputs(workload: Workload) -> bool:
    """Whether inputs of fully recomputed layers go to the host.

    Parameters
    ----------
    workload : Workload
        Its `offload_modules`.

    Returns
    -------
    bool
        True for layer_inputs and saved_tensors. Of a recomputed layer nothing else is saved: its input goes
        through the hooks of saved tensors, what its second forward pass saves does not (torch 2.13,
        utils/checkpoint.py, _NoopSaveInputs and _checkpoint_hook).
    """
    return workload.offload_modules in OFFLOADED_INPUTS


def layers_at_hand(workload: Workload) -> float:
    """Layers whose offloaded tensors are in HBM at a time.

    Parameters
    ----------
    workload : Workload
        Its framework and what it offloads.

    Returns
    -------
    float
        1 or more; `InputOffload` of the framework's record has the source.
    """
    setting = input_offload(workload.framework, workload.offload_modules)
    return LAYERS_AT_HAND if setting is None else setting.layers_at_hand


def _offloaded_per_token(
    workload: Workload, layout: Layout, tokens: Floats, narrow: float, shares: BlockShares
) -> Offloaded:
    """Offloaded bytes a token of one layer. Tensors of fewer than `LEAST_ELEMENTS` elements stay.

    `narrow`: bytes of an element of a saved GEMM input, 1 or 2.
    """
    freed: Floats = 0.0 * tokens
    copied: Floats = 0.0 * tokens
    if offloads_inputs(workload):
        # One input a layer, of at least 1,024 bytes (`min_offload_size` of the hooks).
        inputs = freed + 2.0 * workload.model.hidden / sequence_shards(layout)
        return Offloaded(inputs, inputs)
    if shares.attention and offloads(workload, "core_attn"):
        attention = _of_attention(workload, layout, tokens)
        freed = freed + shares.attention * attention.freed
        copied = copied + shares.attention * attention.copied
    if shares.experts:
        of_experts = shares.experts * _of_experts(workload, layout, tokens, narrow)
        freed, copied = freed + of_experts, copied + of_experts
    return Offloaded(freed, copied)


def _leaving(tokens: Floats, width: Floats) -> Floats:
    """Elements a token of a tensor, 0 where it is too small to be offloaded."""
    return np.where(tokens * width >= LEAST_ELEMENTS, width, 0.0)


def _of_attention(workload: Workload, layout: Layout, tokens: Floats) -> Offloaded:
    """Bytes a token of queries, keys, values and the output, which its kernel and the projection keep."""
    model, tp = workload.model, np.asarray(layout.tp)
    heads = model.heads / tp
    latent = model.attention is not None
    kv_heads = heads if latent else np.maximum(model.kv_heads / tp, 1.0)
    widths = (heads * model.qk_head_dim, kv_heads * model.qk_head_dim, kv_heads * model.v_head_dim)
    query, key, value = (_leaving(tokens, width) for width in widths)
    inputs = np.asarray(2.0 * (query + key + value), dtype=np.float64)
    if latent:
        again = np.asarray(layout.recompute) & int(Recompute.MLA_UP_PROJECTION)
        inputs = inputs * np.where(again, 0.0, 1.0)
    output = _leaving(tokens, heads * model.v_head_dim)
    freed, copied = inputs, inputs + 2.0 * output
    if offloads(workload, "attn_proj"):
        freed = freed + _WIDE_BYTES * (1.0 + swaps_heads(workload, layout)) * output
        copied = copied + _WIDE_BYTES * output
    return Offloaded(freed, copied)


def _of_experts(workload: Workload, layout: Layout, tokens: Floats, narrow: float) -> Floats:
    """Bytes a token of what the busiest rank's experts take in, and of their activation function's input."""
    model, moe = workload.model, workload.model.moe
    assert moe is not None
    copies = workload.imbalance(layout.ep) * moe.top_k / np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    saved: Floats = 0.0 * copies
    if offloads(workload, "expert_fc1"):
        gathered = copies * model.routed_width * np.asarray(layout.etp)
        saved = saved + narrow * _leaving(tokens, gathered)
    if offloads(workload, "moe_act"):
        saved = saved + 2.0 * _leaving(tokens, copies * matrices * moe.moe_ffn_hidden)
    return saved


_MLP_INPUTS = ("gate_proj", "up_proj")
_MIXER_INPUTS = (
    "q_proj", "k_proj", "v_proj", "g_proj", "q_a_proj", "kv_a_proj_with_mqa", "in_proj",
)  # fmt: skip
"""Matrices that read what the norm before them returns."""
_WIDE_BYTES = 2.0
"""Of an element of an input that is kept at 16 bits."""
_SCORE_BYTES = 5.0
"""Of an attention score that is kept: softmax output, dropout output and its mask."""
_PLAIN_SCORE_BYTES = 6.0
"""Of a score that PyTorch's separate operators keep: softmax output at 32 bits, and its 16-bit cast."""
_EAGER_NORM_BYTES, _EAGER_NORM_WEIGHT_BYTES = 2.0, 2.0
"""Of an element under an RMSNorm of PyTorch's operators: its 32-bit input in the place of the 16-bit one, and
what the gradient of its weight needs, the product at 16 bits (transformers/models/llama/modeling_llama.py,
LlamaRMSNorm)."""
_WIDE_NORM_BYTES = 4.0
"""Of an element under a norm that casts down behind its weight, for each of two tensors of 32 bits: its input
and the product that the gradient of the weight needs (transformers/models/gemma4/modeling_gemma4.py). The
16-bit input is kept by no other operator."""
_DROPOUT_BYTES = 3.0
"""Of `_SCORE_BYTES`, what dropout keeps; models with rotary embeddings are trained without."""
_BLOCK_MASK_BYTES = 1.0
"""Of an element behind attention and behind the feed-forward: the mask of its dropout (Korthikanti et al.
2022, section 4.1), where that of scores is kept in a model with learned positions."""


def _saved_input_bytes(workload: Workload) -> float:
    """Bytes of an element of a saved GEMM input."""
    quantised = workload.precision in ("fp8", "mxfp8", "nvfp4")
    return 1.0 if quantised and memory_profile(workload.framework).fp8_saved_inputs else 2.0


def activation_bytes_per_layer(
    workload: Workload,
    layout: Layout,
    *,
    experts: bool,
    blocks: BlockShares | None = None,
    attention: AttentionShares | None = None,
) -> tuple[Floats, Floats]:
    """Bytes that autograd saves for one layer and micro-batch on one GPU.

    Counted tensor by tensor for fused attention, as Korthikanti et al. 2022 (arXiv 2205.05198, section 4) do
    for unfused attention.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many of shape [n].
    experts : bool
        Whether the layer has experts instead of a dense feed-forward.
    blocks : BlockShares, optional
        Of a layer other than the mean one of a hybrid pattern.
    attention : AttentionShares, optional
        How much of its attention is of which kind; the model's mean by default.

    Returns
    -------
    tuple of two floats or arrays
        Bytes under the layout's own recomputation, and those of the layer's input alone, which are kept where
        the layer is fully recomputed.
    """
    model, mask = workload.model, np.asarray(layout.recompute)
    if model.kinds_apart:
        return _of_each_kind(workload, layout, attention or model.attention_shares, experts, blocks)
    sequence, narrow = sequence_shards(layout), _saved_input_bytes(workload)
    by_operators = (mask & int(Recompute.OPERATORS)) != 0
    of_stream = _stream_bytes(workload)
    block_input = of_stream * model.hidden / sequence
    normed = np.where(by_operators, 0.0, narrow * model.hidden) / sequence
    before_mlp = normed * keeps_input(workload, *_MLP_INPUTS)
    before_mixers = normed * keeps_input(workload, *_MIXER_INPUTS)
    # The router reads 16 bits, and two projections of MLA quantise what they read each for itself.
    apart = np.where(by_operators, 0.0, _WIDE_BYTES * model.hidden) / sequence
    kept_apart = np.where(mask & int(Recompute.LAYERNORM), 0.0, apart)
    before_attention = kept_apart if norm_before_attention_apart(model) else before_mixers
    shares = blocks or model.blocks_of(experts=experts)
    around_attention = block_input + before_attention
    between = np.where(by_operators, _operator_outputs(workload, layout), block_input)
    saved: Floats = 0.0
    if shares.attention:
        share = model.linear_fraction if attention is None else attention.linear
        mixer = _mixer_saved(workload, layout, narrow, share)
        saved = saved + shares.attention * (around_attention + mixer)
    if shares.mamba:
        own = 0.0 if model.mamba_beside_attention else around_attention
        saved = saved + shares.mamba * (own + _mamba_saved(model, layout, narrow))
    if shares.experts:
        inside = np.where(recomputes_experts(layout), 0.0, _moe_saved(workload, layout, narrow))
        routed = between + kept_apart + inside
        saved = saved + shares.experts * routed
    if shares.feed_forward:
        mlp = between + before_mlp + _dense_saved(model.ffn_hidden, workload, layout, narrow)
        mlp = np.where(mask & int(Recompute.MLP), block_input, mlp)
        saved = saved + shares.feed_forward * mlp
    tokens = rank_tokens(workload, layout)
    if workload.factors is not None:
        tokens = tokens * workload.factors.activation_memory
    saved = saved + _kept_besides(workload, layout, shares)
    if workload.adapters is not None:
        saved = saved + _between_adapters(workload, shares)
    if workload.precision == "fp8" and workload.fp8_recipe == "delayed":
        saved = saved + _quantised_besides(model, layout, narrow, shares)
    inputs = tokens * of_stream * model.hidden / sequence
    of_layer, of_all = _layer_inputs_saved(workload)
    saved = saved + of_layer + of_all
    if offloads_inputs(workload):
        return tokens * saved, tokens * of_all
    inputs = inputs + tokens * of_all
    if offloads_any(workload):
        plain_tokens = rank_tokens(workload, layout)
        saved = saved - _offloaded_per_token(workload, layout, plain_tokens, narrow, shares).freed
    magnitudes = np.where(by_operators, _magnitudes_saved(workload, layout, tokens, shares), 0.0)
    return tokens * saved + magnitudes, inputs


def _magnitudes_saved(
    workload: Workload, layout: Layout, tokens: Floats, shares: BlockShares
) -> Floats:
    """Bytes of magnitudes that operator-level recomputation keeps where casts run one operator at a time.

    Of each product's input and weight, at 16 bits (torchtitan 0.1, parallelisms/parallelize_llama.py,
    _save_list: aten.abs; torchao 0.8.0, float8/float8_utils.py, tensor_to_amax). Products of experts and of
    latent attention are left out.
    """
    model, tp = workload.model, np.asarray(layout.tp)
    if not (workload.precision == "fp8" and stack_constants(workload).casts_stepwise):
        return 0.0
    matrices = 2.0 if model.gated else 1.0
    inputs = shares.feed_forward * (matrices * model.hidden + model.ffn_hidden / tp)
    weights = shares.feed_forward * (matrices + 1.0) * model.hidden * model.ffn_hidden / tp
    if model.attention is None:
        output = model.heads * model.v_head_dim / tp
        inputs = inputs + shares.attention * (3.0 * model.hidden + output)
        weights = weights + shares.attention * attention_matmul_parameters(model) / tp
    return _WIDE_BYTES * (tokens * inputs + weights)


def _stream_bytes(workload: Workload) -> float:
    """Bytes of an element between blocks."""
    widens = workload.adapters is not None and workload.adapters.widens_stream
    return 2.0 * _WIDE_BYTES if widens else _WIDE_BYTES


def _layer_inputs_saved(workload: Workload) -> tuple[float, float]:
    """Bytes a token of a layer with inputs of its own, and those that recomputing the layer does not spare.

    What the gate reads, what it returns, its activation and the product with the input; outside of the layer
    the input itself and, where it is trained, two tensors of 32 bits that its norm keeps.
    """
    model, trained = workload.model, not frozen(workload)
    width = model.layer_inputs
    if width is None:
        return 0.0, 0.0
    gate, back = (keeps_input(workload, name) for name in (INPUTS_GATE, INPUTS_BACK))
    of_layer = _WIDE_BYTES * (model.hidden * gate + (2.0 + back) * width)
    return of_layer, (_WIDE_BYTES + 2.0 * _WIDE_NORM_BYTES * trained) * width


def _of_each_kind(
    workload: Workload,
    layout: Layout,
    shares: AttentionShares,
    experts: bool,
    blocks: BlockShares | None,
) -> tuple[Floats, Floats]:
    """`activation_bytes_per_layer` where kinds of softmax attention have matrices of their own."""
    model = workload.model
    saved: Floats = 0.0
    inputs: Floats = 0.0
    for letter, share in shares.softmax:
        of_kind = workload.of_kind(model.kinds_apart[letter])
        bytes_saved, inputs = activation_bytes_per_layer(
            of_kind, layout, experts=experts, blocks=blocks
        )
        saved = saved + share * bytes_saved
    return saved, inputs


def offloaded_per_layer(workload: Workload, layout: Layout, shares: BlockShares) -> Offloaded:
    """What one layer sends to the host's memory in the forward pass of a micro-batch, and takes back.

    Megatron's `--offload-modules` copies the tensors that autograd saves inside a module to pinned memory of
    the host, on a stream of its own, and back before the module's backward pass (megatron-core 0.19,
    megatron/core/pipeline_parallel/fine_grained_activation_offload.py). What a module saves:

        core_attn    queries, keys, values and the output, which stays in HBM while the projection keeps it
        attn_proj    its input, that output: with it, the output leaves HBM and is copied twice
        expert_fc1   the input of the experts' first product
        moe_act      the input of the experts' activation function

    Of layers that are recomputed in full other frameworks copy the input (`offloads_inputs`): 2 h bytes a
    token.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and modules.
    layout : Layout
        One layout, or many of shape [n].
    shares : BlockShares
        Blocks of the layer.

    Returns
    -------
    Offloaded
        Bytes of one micro-batch on one GPU, shaped like the layout.
    """
    tokens, narrow = rank_tokens(workload, layout), _saved_input_bytes(workload)
    each = _offloaded_per_token(workload, layout, tokens, narrow, shares)
    return Offloaded(tokens * each.freed, tokens * each.copied)


@dataclass(frozen=True)
class SavedActivations:
    """Saved bytes of one layer and micro-batch: under the layout's recomputation, and fully recomputed."""

    dense: tuple[Floats, Floats]
    main: tuple[Floats, Floats]
    """Of a layer with experts where the model has them."""
    module: Floats
    """Of a multi-token-prediction module, under the layout's recomputation."""


def saved_activations(workload: Workload, layout: Layout) -> SavedActivations:
    """`activation_bytes_per_layer` of a dense layer, of one with experts and of a prediction module.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    SavedActivations
        Bytes of one micro-batch on one GPU.
    """
    model = workload.model
    main = dense = activation_bytes_per_layer(workload, layout, experts=False)
    if model.moe is not None:
        main = activation_bytes_per_layer(workload, layout, experts=True)
    module = main[0]
    if model.mtp_differs:
        blocks, attention = model.mtp_kind
        module, _ = activation_bytes_per_layer(
            workload, layout, experts=blocks.experts > 0, blocks=blocks, attention=attention
        )
    return SavedActivations(dense, main, module + _around_module(workload, layout))


def _around_module(workload: Workload, layout: Layout) -> Floats:
    """Bytes of one micro-batch that a prediction module keeps beside its blocks; 0 without modules.

    Inputs of three norms (token embeddings, states that come in and go out), the 2 h that the joining product
    reads, and the head's input (megatron-core 0.19.2, core/transformer/multi_token_prediction.py,
    _concat_embeddings, _postprocess and process_mtp_loss).
    """
    if not workload.model.mtp_layers:
        return 0.0
    per_element = 3.0 * _WIDE_BYTES + 2.0 * _saved_input_bytes(workload) + _WIDE_BYTES
    elements = rank_tokens(workload, layout) * workload.model.hidden / sequence_shards(layout)
    return np.asarray(per_element * elements)


def saved_of_kinds(workload: Workload, layout: Layout) -> tuple[tuple[Floats, Floats], ...]:
    """`activation_bytes_per_layer` of each kind of layer in `ModelSpec.unlike_bytes`.

    A layer that runs forward alone keeps nothing.

    Parameters
    ----------
    workload : Workload
        Model, sequence length, precision and software.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    tuple of pairs of float or array
        Bytes of one micro-batch on one GPU, kinds in the order in which they first appear: under the layout's
        recomputation, and fully recomputed.
    """
    model = workload.model
    of_kinds = []
    for symbols in dict.fromkeys(model.unlike_bytes):
        kind, share = model.kind_of(symbols), backward_share(layout, symbols)
        saved, dropped = activation_bytes_per_layer(
            workload,
            layout,
            experts=kind.blocks.experts > 0,
            blocks=kind.blocks,
            attention=kind.attention,
        )
        of_kinds.append((saved * share, dropped * share))
    return tuple(of_kinds)


def is_masked(workload: Workload, *, windowed: bool) -> bool:
    """Whether PyTorch's attention has a mask in a matrix, where a kernel does not know what it hides.

    It does under a window that is shorter than the sequence, or as long, and where a sequence is a pack of
    samples (transformers 5.23, masking_utils.py, _ignore_causal_mask_sdpa and packed sequences).

    Parameters
    ----------
    workload : Workload
        Its model, sequence length and samples are looked at.
    windowed : bool
        Whether the layer has the model's window.

    Returns
    -------
    bool
        False for the causal mask alone.
    """
    window = workload.model.sliding_window
    shortened = windowed and window is not None and window <= workload.seq_len
    return shortened or workload.lengths is not None


def norm_before_attention_apart(model: ModelSpec) -> bool:
    """Whether the norm ahead of attention is a module of its own, which alone can be recomputed.

    Transformer Engine fuses it into the product behind it, as it does with that of a dense feed-forward
    (megatron/core/models/gpt/gpt_layer_specs.py, IdentityOp), but for MLA; that of experts stands apart.

    Parameters
    ----------
    model : ModelSpec
        Its attention is looked at.

    Returns
    -------
    bool
        True for MLA.
    """
    return model.attention is not None


def _operator_outputs(workload: Workload, layout: Layout) -> Floats:
    """Bytes a token that operator-level recomputation keeps besides attention and every second GEMM.

    It saves what reduce-scatters return (two a layer); an eager run also holds the last GEMM's output, which
    compiled code drops because its gradient needs no value (torchtitan parallelize_llama.py, _save_list).
    """
    width = 2.0 * workload.model.hidden
    scattered = np.where(np.asarray(layout.tp) > 1, 2.0 * width / sequence_shards(layout), 0.0)
    last = width if memory_profile(workload.framework).keeps_unread_outputs else 0.0
    saved: Floats = scattered + last
    return saved


def _kept_besides(workload: Workload, layout: Layout, shares: BlockShares) -> Floats:
    """Bytes a token that eager stacks keep beside what fused kernels do.

    Rotary embeddings on their own keep queries and keys from before and after them, and a gate keeps what its
    activation function returns (nanotron, models/llama.py, GLUActivation; transformers 5.17,
    models/mixtral/modeling_mixtral.py, MixtralExperts). Sequence parallelism that does not gather again for
    the backward pass keeps the gathered inputs of both column-parallel products (nanotron,
    parallel/tensor_parallel/functional.py, tp_recompute_allgather; huggingface/nanotron pull request 208:
    69 GB instead of 61). Paddle copies an input for each column-parallel product that reads it (fleet/layers/
    mpu/mp_ops.py, c_identity_eager).
    """
    model, tp, profile = workload.model, np.asarray(layout.tp), memory_profile(workload.framework)
    width = model.hidden / sequence_shards(layout)
    saved: Floats = 0.0
    apart, stack = profile.separate_operators, stack_constants(workload)
    if "rotary" in apart and model.position == "rope" and model.attention is None:
        heads = model.heads / tp + np.maximum(model.kv_heads / tp, 1.0) * (not model.reuses)
        saved = saved + shares.attention * 2.0 * heads * model.qk_head_dim
    if "norm" in apart and model.norm == "rmsnorm" and not stack.fused_norm:
        per_element = _EAGER_NORM_BYTES + _EAGER_NORM_WEIGHT_BYTES * (not frozen(workload))
        each = _WIDE_NORM_BYTES * (1.0 + (not frozen(workload)))
        saved = saved + (shares.total * per_element + model.further_norms * each) * width
    if not stack.flash_attention and stack.fused_softmax and model.position == "learned":
        saved = saved + shares.total * _BLOCK_MASK_BYTES * width
    if "gate" in apart and model.gated:
        gates: Floats = shares.feed_forward * model.ffn_hidden
        if model.moe is not None:
            copies = workload.imbalance(layout.ep) * model.moe.top_k
            routed = copies * model.moe.moe_ffn_hidden
            gates = gates + shares.experts * (routed + model.moe.shared_width)
        saved = saved + 2.0 * gates / tp
    if profile.copies_inputs:
        further = 2.0 * shares.attention + float(model.gated) * shares.feed_forward
        saved = saved + np.where(tp > 1, further, 0.0) * 2.0 * model.hidden
    if workload.keeps_gathered_inputs:
        rest = 1.0 - 1.0 / sequence_shards(layout)
        saved = saved + shares.total * 2.0 * model.hidden * rest
    return saved


def _quantised_besides(
    model: ModelSpec, layout: Layout, narrow: float, shares: BlockShares
) -> Floats:
    """Bytes a token of inputs that products keep quantised although their 16-bit values are kept already.

    Those are attention's output and the input of shared experts. Under every recipe but delayed scaling the
    products keep the 16-bit values themselves (megatron-core 0.19.2, transformer/attention.py and
    moe/shared_experts.py, set_save_original_input).
    """
    outputs = shares.attention * narrow * model.heads * model.v_head_dim
    saved: Floats = outputs / np.asarray(layout.tp)
    if model.moe is not None and model.moe.shared_width:
        saved = saved + shares.experts * narrow * model.hidden / sequence_shards(layout)
    return saved


def _mixer_saved(workload: Workload, layout: Layout, narrow: float, linear_share: float) -> Floats:
    """Bytes a token of attention, of which a share is linear."""
    saved = _attention_saved(workload, layout)
    if not linear_share:
        return saved
    of_linear = _linear_attention_saved(workload, layout, narrow)
    return (1.0 - linear_share) * saved + linear_share * of_linear


def _linear_attention_saved(workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Bytes a token that one layer with linear attention keeps.

    Inputs and outputs of the convolution; queries and keys once for each head of values; the triangle of a
    chunk, step and decay of a head; output, gate, and the input of the last projection
    (megatron/core/ssm/gated_delta_net/gdn.py; fla/ops/gated_delta_rule/chunk.py, ctx.save_for_backward).
    Where the norm is apart from the gate, what it returns waits for the gate's copy, and the convolution and
    the decays read views of the first projection, which stays whole (megatron/core/ssm/gated_delta_net/
    common.py, _apply_gated_norm and _prepare_input_for_gated_delta_rule; flash-linear-attention pull request
    712).
    """
    spec = workload.model.linear_attention
    assert spec is not None
    if spec.type != "gated_delta_net":
        return uncut_saved_bytes(spec, narrow)
    convolved = 2.0 * spec.key_width + spec.value_width
    copied = 2.0 * spec.value_heads * spec.key_head_dim
    per_head = 2.0 * CHUNK + 8.0
    saved = 2.0 * 2.0 * convolved + 2.0 * copied + per_head * spec.value_heads
    saved += (2.0 + 2.0 + narrow) * spec.value_width
    if "delta_norm" in memory_profile(workload.framework).separate_operators:
        saved += 2.0 * (2.0 * spec.value_width + 2.0 * spec.value_heads)
    return saved / np.asarray(layout.tp)


def _mamba_saved(model: ModelSpec, layout: Layout, narrow: float) -> Floats:
    """Bytes a token that one Mamba block keeps.

    What its first projection returns and the scan's output (mamba_ssm/ops/triton/ssd_combined.py,
    MambaSplitConv1dScanCombinedFn, ctx.save_for_backward: convolution and states run again backward), the
    gated output and 4 bytes a group for the norm, and the input of the last projection. Of Mamba-1 what
    `saved_bytes` says.
    """
    if model.mamba1 is not None:
        return saved_bytes(model.mamba1, narrow)
    spec = model.mamba
    assert spec is not None
    saved = 2.0 * spec.projected_width + (2.0 + narrow) * spec.width
    if spec.gated_norm:
        saved += 2.0 * spec.width + 4.0 * spec.groups
    return saved / np.asarray(layout.tp)


def _attention_saved(workload: Workload, layout: Layout) -> Floats:
    """Bytes a token: query, key, value, output, log-sum-exp; latents of MLA; scores of unfused attention.

    Its kernel keeps the output at 16 bits in every precision, and the projection behind it reads that
    (megatron-core 0.19.2, transformer/attention.py, set_save_original_input).

    A token has a score for every key of its sequence, also for those that other context-parallel ranks hold.
    All-to-all context parallelism keeps the output in both layouts (Transformer Engine 2.8,
    AttnFuncWithCPAndQKVOA2A; of a2a+p2p AttnFuncWithCPAndKVP2P, out_part). Of the three projections
    operator-level recomputation keeps first and third.
    """
    model, mask, tp = workload.model, np.asarray(layout.recompute), np.asarray(layout.tp)
    heads = model.heads / tp
    query = 2.0 * heads * model.qk_head_dim
    swapped_bytes = 2.0 * swaps_heads(workload, layout)
    output = (_WIDE_BYTES + swapped_bytes) * heads * model.v_head_dim + 4.0 * heads
    # Gates of heads, and their product with the output, which the last projection reads.
    output = output + 2.0 * heads * (1.0 + model.v_head_dim) * model.attention_head_gates
    if model.attention is not None:
        keys = 2.0 * heads * (model.qk_head_dim + model.v_head_dim)
        latent = 2.0 * 2.0 * ((model.attention.q_lora_rank or 0) + model.attention.kv_lora_rank)
        kept = np.where(mask & int(Recompute.MLA_UP_PROJECTION), 0.0, 1.0)
        if model.indexer is not None:
            return sparse_saved(workload, tp, kept) + latent + output
        return kept * (query + keys) + latent + output
    # What is reused is kept by the layer that made it.
    kv_heads = 2.0 * np.maximum(model.kv_heads / tp, 1.0) * (not model.reuses)
    keys, values = kv_heads * model.qk_head_dim, kv_heads * model.v_head_dim
    scores: Floats = 0.0
    stack = stack_constants(workload)
    if stack.memory_efficient:
        return _memory_efficient_saved(workload, tp, projected=query + keys, values=values) + output
    if not stack.flash_attention:
        per_score = _SCORE_BYTES if stack.fused_softmax else _PLAIN_SCORE_BYTES
        if stack.fused_softmax and model.position == "rope":
            per_score -= _DROPOUT_BYTES
        score_bytes = per_score * heads * workload.seq_len
        scores = np.where(mask & int(Recompute.CORE_ATTENTION), 0.0, score_bytes)
    rotated = query + keys + values if model.position == "rope" and model.qk_norm else 0.0
    every_output = query + keys + values + rotated
    projected = np.where(mask & int(Recompute.OPERATORS), query + values, every_output)
    # The gate, and its product with the output, which the last projection reads.
    gated = (query + output) * model.attention_output_gate
    return projected + output + scores + gated


def _memory_efficient_saved(
    workload: Workload, tp: Ints, projected: Floats, values: Floats
) -> Floats:
    """Bytes a token of what PyTorch's memory-efficient kernel keeps beside its output.

    `projected` are queries and keys as norms and rotary embeddings read them, `values` as a norm does.
    Queries, and keys and values repeated for every query head; of a mask what is added to the scores, at 16
    bits, which each layer makes anew (torch, aten/src/ATen/native/transformers/attention.cpp,
    convert_boolean_attn_mask; derivatives.yaml, _scaled_dot_product_efficient_attention).
    """
    model = workload.model
    read = 2.0 * model.heads / tp * (2 * model.qk_head_dim + model.v_head_dim)
    # Norms of PyTorch's operators widen their input to 32 bits, as `_WIDE_NORM_BYTES` says.
    normed = projected * model.qk_norm * (1.0 + (not frozen(workload))) + values * model.value_norm
    masked = is_masked(workload, windowed=model.windowed_layers > 0)
    return read + 0.5 * _WIDE_NORM_BYTES * normed + 2.0 * workload.seq_len * masked


def _between_adapters(workload: Workload, shares: BlockShares) -> float:
    """Bytes a token of what adapters keep for themselves, on every rank whole: what lies between their two
    products, and inputs that each has copied.
    """
    model, width = workload.model, workload.model.hidden
    before = inner_bytes(workload, *_MIXER_INPUTS)
    before += copied_input_bytes(workload, *_MIXER_INPUTS) * width
    mixers = (shares.attention + shares.mamba) * before
    mixers += shares.attention * inner_bytes(workload, "o_proj")
    if adapted_outputs(workload, {"o_proj": 1.0}):
        # The kernel of attention keeps its output itself.
        own_bytes = kept_input_bytes(workload) * model.heads * model.v_head_dim
        mixers += shares.attention * own_bytes
    mixers += shares.mamba * inner_bytes(workload, "out_proj")
    blocks = shares.feed_forward
    if model.moe is not None and model.moe.shared_width:
        blocks += shares.experts
    mlp = inner_bytes(workload, *_MLP_INPUTS) + inner_bytes(workload, "down_proj")
    mlp += copied_input_bytes(workload, *_MLP_INPUTS) * width
    mlp += copied_input_bytes(workload, "down_proj") * model.ffn_hidden
    around = inner_bytes(workload, LATENT_DOWN) + inner_bytes(workload, LATENT_UP)
    # The projection ahead of the dispatch reads what shared experts read.
    copied = copied_input_bytes(workload, *_MLP_INPUTS, LATENT_DOWN)
    around += (copied - copied_input_bytes(workload, *_MLP_INPUTS)) * width
    return mixers + blocks * mlp + shares.experts * around + kept_outputs_bytes(workload, shares)


def _dense_saved(width: float, workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Input and output of the activation; operator-level recomputation keeps one GEMM's output.

    A frozen last product does not need its input. Step by step, the factors of the output are kept too.
    """
    model = workload.model
    matrices = 2.0 if model.gated else 1.0
    narrow = narrow * keeps_input(workload, "down_proj")
    by_operators = np.asarray(layout.recompute) & int(Recompute.OPERATORS)
    apart = _WIDE_BYTES * 2.0 * workload.activates_stepwise
    per_element = np.where(by_operators, 2.0, 2.0 * matrices + narrow + apart)
    saved: Floats = per_element * width / layout.tp
    return saved


def _moe_saved(workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Routed activations scale with top_k and do not shrink with ep: what leaves comes back from others.

    Those of the rank whose experts are chosen most. Expert-tensor ranks each keep the tokens gathered from
    all of them (megatron/core/transformer/moe/token_dispatcher.py, gather_from_sequence_parallel_region).
    """
    model, mask = workload.model, np.asarray(layout.recompute)
    moe = model.moe
    assert moe is not None
    tp = np.asarray(layout.tp)
    matrices = 2.0 if model.gated else 1.0
    width = moe.moe_ffn_hidden
    # Step by step: the factors of the output, and the output without its probability.
    apart = _WIDE_BYTES * 3.0 * workload.activates_stepwise
    activated = np.where(mask & int(Recompute.MOE_ACTIVATION), 0.0, (narrow + apart) * width)
    gathered = narrow * model.routed_width * np.asarray(layout.etp)
    per_copy = gathered + 2.0 * matrices * width + activated
    saved: Floats = workload.imbalance(layout.ep) * moe.top_k / tp * per_copy
    router = 8.0 * moe.experts / tp
    if workload.moe_dispatch == GATHERS:
        # Choices and probabilities of all gathered tokens for the rank's own experts.
        routing = PROBABILITY_BYTES + CHOICE_BYTES
        router = router + routing * moe.experts * np.asarray(layout.etp) / tp
    shared = _dense_saved(moe.shared_width, workload, layout, narrow) if moe.shared_width else 0.0
    return saved + router + shared + _latent_saved(workload, layout, narrow)


def _latent_saved(workload: Workload, layout: Layout, narrow: float) -> Floats:
    """Bytes a token of what the projections around routed experts read.

    The one behind the experts keeps their combined outputs. The one ahead of the dispatch reads what the norm
    returns, which router and shared experts keep at 16 bits; quantised, it keeps a copy of its own
    (transformer_engine/pytorch/module/linear.py, saves its quantised input).
    """
    model = workload.model
    if model.latent_size is None:
        return 0.0
    combined = narrow * model.latent_size * keeps_input(workload, LATENT_UP)
    own_copy = narrow * model.hidden * (narrow < _WIDE_BYTES) * keeps_input(workload, LATENT_DOWN)
    saved: Floats = (combined + own_copy) / np.asarray(layout.tp)
    return saved
