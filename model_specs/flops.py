"""Products of weights and activations that a token takes part in, and the FLOPs of training on it."""

from __future__ import annotations

from meshwright.model_specs.parameters import (
    attention_matmul_parameters,
    feed_forward_parameters,
    linear_attention_matmul_parameters,
    mamba_matmul_parameters,
)
from meshwright.model_specs.schema import ModelSpec

BACKWARD_AND_FORWARD = 3
"""FLOPs of a matrix product's forward and backward pass over those of its forward pass."""


def active_matmul_parameters(model: ModelSpec) -> int:
    """Weights that multiply every token's activations, the head (tied or not) and the MTP modules included.

    Lookups, norms and biases do no matrix product and are left out; of the experts only `top_k` count.
    """
    if model.hybrid_pattern is not None:
        return model.vocab * model.hidden + _hybrid_matrices(model, model.hybrid_pattern)
    attention = attention_matmul_parameters(model)
    dense_layer = attention + feed_forward_parameters(model, model.ffn_hidden, bias=False)
    moe_layer = attention + _active_moe_matrices(model)
    head = model.vocab * model.hidden
    mtp_layer = moe_layer if model.moe_layers else dense_layer
    with_experts = len(model.expert_layers)
    mtp_module = mtp_layer + 2 * model.hidden * model.hidden + head
    linear = linear_attention_matmul_parameters(model) - attention
    return (
        (model.layers - with_experts) * dense_layer
        + with_experts * moe_layer
        + model.linear_layers * linear
        + model.mamba_layers * mamba_matmul_parameters(model)
        + head
        + model.mtp_layers * mtp_module
    )


def _hybrid_matrices(model: ModelSpec, pattern: str) -> int:
    """Of `active_matmul_parameters`, those of the layers of a pattern."""
    of_blocks = {
        "M": mamba_matmul_parameters(model),
        "*": attention_matmul_parameters(model),
        "-": feed_forward_parameters(model, model.ffn_hidden, bias=False),
        "E": _active_moe_matrices(model),
    }
    return sum(pattern.count(symbol) * number for symbol, number in of_blocks.items())


def _active_moe_matrices(model: ModelSpec) -> int:
    if model.moe is None:
        return 0
    width = model.moe.top_k * model.moe.moe_ffn_hidden + model.moe.shared_width
    gate = model.hidden if model.moe.shared_expert_gate and model.moe.shared_width else 0
    return (
        feed_forward_parameters(model, width, bias=False) + model.moe.experts * model.hidden + gate
    )


def attended_positions(seq_len: int, window: int | None = None, *, chunked: bool = False) -> float:
    """Mean number of positions that a query attends to under a causal mask: half the sequence.

    With a window w shorter than the sequence s the mean is w - w^2 / 2s, the integral of min(t, w) over s.
    Chunks of w instead of a sliding window leave half a chunk, and less in a last chunk that is shorter.
    The half, and not (s + 1) / 2, is the convention of Megatron-LM's FLOP count.
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    if chunked:
        chunks, last_chunk = divmod(seq_len, window)
        return (chunks * window * window + last_chunk * last_chunk) / (2 * seq_len)
    return window - window * window / (2 * seq_len)


def attention_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """FLOPs of scores and weighted values, or of states instead of them, of one token in all layers.

    Forward and backward; causal. States are those of linear attention and of Mamba. An indexer scores every
    position forward, and has gradients of those that it chose.
    """
    per_position = 2 * model.heads * (model.qk_head_dim + model.v_head_dim)
    full, indexer = model.full_attention_layers + model.mtp_layers, model.indexer
    chosen = attended_positions(seq_len, None if indexer is None else indexer.top_k)
    positions = full * chosen
    windowed = attended_positions(seq_len, model.sliding_window, chunked=model.chunked_windows)
    positions += model.windowed_layers * windowed
    linear = model.linear_layers * _linear_attention_flops(model)
    scans = model.mamba_layers * _mamba_scan_flops(model)
    attended = BACKWARD_AND_FORWARD * (per_position * positions + linear + scans)
    if indexer is None:
        return attended
    return attended + full * 2 * indexer.width * (attended_positions(seq_len) + 2 * chosen)


def _mamba_scan_flops(model: ModelSpec) -> float:
    """Forward FLOPs of one token in the scan of one layer with Mamba: 7 a channel and number of its state.

    As Megatron-LM counts it for Mamba-2 (megatron/training/training.py, mamba_layer_flops), so that MFU
    compares: it leaves the convolution out and does not depend on the chunk.
    """
    mamba = model.state_space
    return 0.0 if mamba is None else 7.0 * mamba.width * mamba.state_dim


def _linear_attention_flops(model: ModelSpec) -> float:
    """Forward FLOPs of one token in the convolution and the delta rule of one layer with linear attention.

    The rule makes four products with a head's state of key by value width, as Megatron-LM counts it
    (megatron/training/training.py, gdn_layer_flops).
    """
    linear = model.linear_attention
    if linear is None:
        return 0.0
    convolution = linear.conv_kernel * (2 * linear.key_width + linear.value_width)
    return 2.0 * (convolution + 4 * linear.value_width * linear.key_head_dim)


def flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of the forward and backward pass of one token in a sequence of `seq_len` tokens.

    6 per active matrix weight (two forward, four backward) plus attention with the causal mask counted half;
    the head and the MTP modules count; recomputation, norms, softmax and the optimizer do not. For a dense
    GPT this is 72 L h^2 (1 + s / 12h + V / 12Lh): Narayanan et al. 2021, arXiv 2104.04473, without its
    recomputed forward pass and with half its attention.

    Raises ValueError for a sequence shorter than one token.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    matrices = 2 * BACKWARD_AND_FORWARD * active_matmul_parameters(model)
    return matrices + attention_flops_per_token(model, seq_len)
