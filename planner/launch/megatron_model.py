"""A model's architecture as arguments of Megatron-LM's pretrain_gpt.py (names as in megatron-core 0.19.2)."""

from __future__ import annotations

from meshwright.model_specs.schema import ModelSpec, MoeSpec

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp."""


def model_args(model: ModelSpec, seq_len: int) -> list[str]:
    """Arguments that define the network; `seq_len` in tokens."""
    return [
        *_size_args(model, seq_len),
        *_attention_args(model),
        *_layer_args(model),
        *(_moe_args(model, model.moe) if model.moe is not None else []),
        *_value("--mtp-num-layers", model.mtp_layers or None),
    ]


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


def _biases(model: ModelSpec) -> tuple[bool, bool, bool]:
    mlp = (
        model.moe.expert_bias
        if model.moe is not None and model.dense_layers == 0
        else model.mlp_bias
    )
    return model.attention_bias, model.attention_output_bias, mlp


def _value(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _switch(flag: str, on: bool) -> list[str]:
    return [flag] if on else []


def _size_args(model: ModelSpec, seq_len: int) -> list[str]:
    ffn_hidden = model.ffn_hidden or (model.moe.moe_ffn_hidden if model.moe is not None else 0)
    return [
        *_value("--num-layers", model.layers),
        *_value("--hidden-size", model.hidden),
        *_value("--ffn-hidden-size", ffn_hidden),
        *_value("--num-attention-heads", model.heads),
        *_value("--seq-length", seq_len),
        *_value("--max-position-embeddings", max(seq_len, model.max_positions or 0)),
        *_value("--vocab-size", model.vocab),
        *_value("--make-vocab-size-divisible-by", VOCAB_MULTIPLE),
        *_switch("--untie-embeddings-and-output-weights", not model.tied_embeddings),
    ]


def _attention_args(model: ModelSpec) -> list[str]:
    args = _value("--kv-channels", model.v_head_dim)
    if model.attention is not None:
        mla = model.attention
        args += ["--multi-latent-attention", *_value("--q-lora-rank", mla.q_lora_rank)]
        args += _value("--kv-lora-rank", mla.kv_lora_rank)
        args += _value("--qk-head-dim", mla.qk_nope_head_dim)
        args += _value("--qk-pos-emb-head-dim", mla.qk_rope_head_dim)
        args += _value("--v-head-dim", mla.v_head_dim)
        # YaRN, which MLA needs for the fused kernel, at factor 1 is plain RoPE, as in pre-training.
        args += ["--rope-type", "yarn", *_value("--rotary-scaling-factor", 1.0)]
    elif model.kv_heads < model.heads:
        args += ["--group-query-attention", *_value("--num-query-groups", model.kv_heads)]
    # With MLA this switch is the norm on the two latents, which DeepSeek's models have.
    args += _switch("--qk-layernorm", model.qk_norm or model.attention is not None)
    if model.attention_sinks:
        args += ["--softmax-type", "learnable"]
    if model.sliding_window is not None and model.full_attention_every != 1:
        # The pair counts the tokens to the left and right of the query; the window includes the query itself.
        args += _value("--window-size", f"{model.sliding_window - 1},0")
        args += _value("--window-attn-skip-freq", model.full_attention_every or None)
    return args


def _layer_args(model: ModelSpec) -> list[str]:
    positions = {"rope": "rope", "learned": "learned_absolute", "alibi": "none", "none": "none"}
    activations = {
        "swiglu": ["--swiglu"],
        "geglu": ["--quick-geglu"],
        # The fused bias and activation kernels know GELU and SwiGLU only.
        "squared_relu": ["--squared-relu", *_switch("--no-bias-gelu-fusion", linear_bias(model))],
        "gelu": [],
        "relu": [],
    }
    return [
        *_value("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        *_value("--position-embedding-type", positions[model.position]),
        *activations[model.activation],
        *_switch("--disable-bias-linear", not linear_bias(model)),
        *_switch("--add-qkv-bias", model.attention_bias and not linear_bias(model)),
        *_value("--hidden-dropout", 0.0),
        *_value("--attention-dropout", 0.0),
    ]


def _moe_args(model: ModelSpec, moe: MoeSpec) -> list[str]:
    args = [
        *_value("--num-experts", moe.experts),
        *_value("--moe-router-topk", moe.top_k),
        *_value("--moe-ffn-hidden-size", moe.moe_ffn_hidden),
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        *_value("--moe-router-dtype", "fp32"),
    ]
    if moe.dense_layers:
        args += _value("--moe-layer-freq", f"([0]*{moe.dense_layers}+[1]*{model.moe_layers})")
    args += _value("--moe-shared-expert-intermediate-size", moe.shared_width or None)
    args += _switch("--moe-shared-expert-gate", moe.shared_expert_gate and moe.shared_width > 0)
    groups, chosen = moe.router_groups, moe.router_groups_per_token
    if groups is not None and chosen is not None and chosen < groups:
        args += [
            *_value("--moe-router-num-groups", groups),
            *_value("--moe-router-group-topk", chosen),
        ]
    if has_expert_balance_bias(model):
        args += [
            *_value("--moe-router-score-function", "sigmoid"),
            "--moe-router-enable-expert-bias",
        ]
    else:
        # A softmax over one chosen expert would have no gradient.
        args += _switch("--moe-router-pre-softmax", moe.top_k == 1)
    return args
