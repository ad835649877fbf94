"""A model's architecture as arguments of Megatron-LM's pretrain_gpt.py (names as in megatron-core 0.19.2)."""

from __future__ import annotations

from meshwright.model_specs.schema import ModelSpec, MoeSpec
from meshwright.planner.runs.launches.megatron_names import ACTIVATIONS, LATENT_ATTENTION, POSITIONS

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp."""


def model_flags(model: ModelSpec, seq_len: int) -> dict[str, object]:
    """Flags that define the network, as `flag_words` writes them; `seq_len` in tokens."""
    flags = _size_flags(model, seq_len)
    flags |= _attention_flags(model)
    flags |= _layer_flags(model)
    if model.moe is not None:
        flags |= _moe_flags(model, model.moe)
    flags["--mtp-num-layers"] = model.mtp_layers or None
    return flags


def feed_forward_width(model: ModelSpec) -> int:
    """Width of a dense layer; of an expert where no layer is dense."""
    if model.ffn_hidden:
        return model.ffn_hidden
    return 0 if model.moe is None else model.moe.moe_ffn_hidden


def model_notes(model: ModelSpec) -> list[str]:
    """Where the arguments train another network than the specification, for want of a switch in Megatron."""
    notes = []
    if model.position == "alibi":
        notes.append("ALiBi is not available: the model is trained without position embedding.")
    if model.activation == "relu":
        notes.append("ReLU is not available: GELU stands in, at the same cost.")
    if model.activation == "geglu":
        notes.append("GeGLU is computed with the sigmoid approximation of GELU (--quick-geglu).")
    if model.embedding_norm:
        notes.append("The norm after the embedding is left out.")
    if model.norms_per_layer not in (1, 2):
        notes.append(f"Each layer has 2 norms, not {model.norms_per_layer}.")
    if model.parallel_block:
        notes.append("Attention and feed-forward run one after the other, not side by side.")
    if model.norms_after_blocks:
        notes.append("Norms come before attention and feed-forward, not after them.")
    if model.chunked_windows:
        notes.append("Windows slide: attention is not cut into chunks.")
    if model.qk_norm_full_width:
        notes.append("Query and key norms work head by head, not over all heads together.")
    if linear_bias(model) and not all(_biases(model)):
        notes.append("Megatron has one switch for biases: all linear layers have one.")
    steered = has_expert_balance_bias(model) or linear_bias(model)
    if model.moe is not None and model.moe.router_bias and not steered:
        notes.append("The router's bias is left out.")
    return notes


def linear_bias(model: ModelSpec) -> bool:
    """Whether Megatron's one switch for biases is on."""
    return (
        model.mlp_bias
        or model.attention_output_bias
        or (model.moe is not None and model.moe.expert_bias)
    )


def has_expert_balance_bias(model: ModelSpec) -> bool:
    """Whether a bias steers the choice of experts by sigmoid scores (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

    Models with multi-head latent attention whose router has a bias are of that family; elsewhere (gpt-oss) it
    is the bias of the router's linear layer.
    """
    return model.attention is not None and model.moe is not None and model.moe.router_bias


def _size_flags(model: ModelSpec, seq_len: int) -> dict[str, object]:
    return {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": feed_forward_width(model),
        "--num-attention-heads": model.heads,
        "--seq-length": seq_len,
        "--max-position-embeddings": max(seq_len, model.max_positions or 0),
        "--vocab-size": model.vocab,
        "--make-vocab-size-divisible-by": VOCAB_MULTIPLE,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
    }


def _attention_flags(model: ModelSpec) -> dict[str, object]:
    flags: dict[str, object] = {"--kv-channels": model.v_head_dim}
    latent = model.attention
    if latent is not None:
        flags["--multi-latent-attention"] = True
        flags |= {size.flag: getattr(latent, size.field) for size in LATENT_ATTENTION}
        # YaRN, which MLA needs for the fused kernel, at factor 1 is plain RoPE, as in pre-training.
        flags["--rope-type"] = "yarn"
        flags["--rotary-scaling-factor"] = 1.0
    elif model.kv_heads < model.heads:
        flags["--group-query-attention"] = True
        flags["--num-query-groups"] = model.kv_heads
    # With MLA this switch is the norm on the two latents, which DeepSeek's models have.
    flags["--qk-layernorm"] = model.qk_norm or latent is not None
    if model.attention_sinks:
        flags["--softmax-type"] = "learnable"
    if model.sliding_window is not None and model.full_attention_every != 1:
        # The pair counts the tokens to the left and right of the query; the window includes the query itself.
        flags["--window-size"] = f"{model.sliding_window - 1},0"
        flags["--window-attn-skip-freq"] = model.full_attention_every or None
    return flags


def _layer_flags(model: ModelSpec) -> dict[str, object]:
    biases = linear_bias(model)
    flags: dict[str, object] = {
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--position-embedding-type": POSITIONS[model.position],
    }
    if model.activation in ACTIVATIONS:
        flags[ACTIVATIONS[model.activation]] = True
    # The fused bias and activation kernels know GELU and SwiGLU only.
    flags["--no-bias-gelu-fusion"] = model.activation == "squared_relu" and biases
    flags["--disable-bias-linear"] = not biases
    flags["--add-qkv-bias"] = model.attention_bias and not biases
    flags["--hidden-dropout"] = 0.0
    flags["--attention-dropout"] = 0.0
    return flags


def _moe_flags(model: ModelSpec, moe: MoeSpec) -> dict[str, object]:
    flags: dict[str, object] = {
        "--num-experts": moe.experts,
        "--moe-router-topk": moe.top_k,
        "--moe-ffn-hidden-size": moe.moe_ffn_hidden,
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
        "--moe-router-dtype": "fp32",
    }
    if moe.dense_layers:
        flags["--moe-layer-freq"] = f"([0]*{moe.dense_layers}+[1]*{model.moe_layers})"
    flags["--moe-shared-expert-intermediate-size"] = moe.shared_width or None
    flags["--moe-shared-expert-gate"] = moe.shared_expert_gate and moe.shared_width > 0
    groups, chosen_groups = moe.router_groups, moe.router_groups_per_token
    if groups is not None and chosen_groups is not None and chosen_groups < groups:
        flags["--moe-router-num-groups"] = groups
        flags["--moe-router-group-topk"] = chosen_groups
    if has_expert_balance_bias(model):
        flags["--moe-router-score-function"] = "sigmoid"
        flags["--moe-router-enable-expert-bias"] = True
    else:
        # A softmax over one chosen expert would have no gradient.
        flags["--moe-router-pre-softmax"] = moe.top_k == 1
    return flags


def _biases(model: ModelSpec) -> tuple[bool, bool, bool]:
    """Biases of the projections into attention, out of it, and of the feed-forward part."""
    feed_forward = model.mlp_bias
    if model.moe is not None and model.dense_layers == 0:
        feed_forward = model.moe.expert_bias
    return model.attention_bias, model.attention_output_bias, feed_forward
