"""Hugging Face models that cannot be read: why, and the model YAML that would say the same.

A family is refused by the field that makes it another kind of model, whatever its name; only where no field
tells, by its name alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import InputError, near_miss, shown

_STATE_SPACE = (
    "state-space layers of this family are not supported: only Mamba as in jamba, mamba, falcon_mamba, "
    "mamba2, nemotron_h, falcon_h1, bamba and granitemoehybrid can be priced"
)
_LINEAR_ATTENTION = (
    "layers with linear attention are not supported in this family: only Qwen3-Next's Gated DeltaNet "
    "can be priced"
)
_VISION = (
    "vision towers are not supported; the language model beside one is read where it stands in a part "
    "of its own, such as text_config"
)
_SPARSE = (
    "attention to positions that an indexer chooses is not supported in this family: only that of "
    "deepseek_v32 and glm_moe_dsa can be priced"
)

REFUSING_FIELDS = {
    "state_size": _STATE_SPACE,
    "ssm_state_size": _STATE_SPACE,
    "mamba_d_state": _STATE_SPACE,
    "mamba_d_ssm": _STATE_SPACE,
    "linear_num_value_heads": _LINEAR_ATTENTION,
    "linear_attn_config": _LINEAR_ATTENTION,
    "linear_attn_alpha_factor": _LINEAR_ATTENTION,
    "layernorm_linear_attention_alpha": _LINEAR_ATTENTION,
    "attn_type_list": _LINEAR_ATTENTION,
    "index_topk": _SPARSE,
    "cross_attention_layers": "layers that attend to another model's output are not supported",
    "vision_config": _VISION,
    "image_size": _VISION,
    "patch_size": _VISION,
}
"""Fields of families that are not read, and what each says of the model."""

_YAML_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
"""Required fields of a dense model YAML, by what families call them."""
_MOE_FIELDS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "moe_ffn_hidden": ("moe_intermediate_size", "intermediate_size"),
}
_UNKNOWN = "...  # fill this in"


def refuse_encoder_decoder(data: Mapping[str, object], where: str, prefix: str) -> None:
    """Raises InputError for a model whose decoder attends to an encoder."""
    if data.get("is_encoder_decoder") is True:
        raise InputError(
            "encoder-decoder models are not supported: only decoders alone",
            where=f"{where}: {prefix}is_encoder_decoder",
            value=True,
        )


def refusal(
    data: Mapping[str, object],
    model_type: str,
    where: str,
    prefix: str,
    families: Mapping[str, object],
) -> InputError:
    """The error for a family that is not read, for the caller to raise.

    `data` is the config.json or its text part, `where` and `prefix` name both in the message, and `families`
    holds the values of `model_type` that are read.
    """
    for field, reason in REFUSING_FIELDS.items():
        if data.get(field) is not None:
            return InputError(reason, where=f"{where}: {prefix}{field}", value=data[field])
    unsupported = InputError(
        "this model family is not supported",
        where=f"{where}: {prefix}model_type",
        value=model_type,
        did_you_mean=near_miss(model_type, families),
        allowed=families,
    )
    return InputError(
        f"{unsupported}\nWhere its layers are attention and feed-forward, a model YAML would do, "
        f"such as this one; check every line, then give it as MODEL:\n{model_yaml(data, model_type)}"
    )


def model_yaml(data: Mapping[str, object], model_type: str) -> str:
    """A model YAML with what the common fields of a config.json say; the rest is for the user to fill in.

    >>> print(model_yaml({"n_layer": 2, "n_embd": 8, "vocab_size": 32}, "toy"))
    name: 'toy'
    layers: 2
    hidden: 8
    ffn_hidden: ...  # fill this in
    heads: ...  # fill this in
    kv_heads: ...  # fill this in
    vocab: 32
    activation: swiglu  # or gelu, relu, squared_relu, geglu
    tied_embeddings: false
    """
    lines = [f"name: {shown(model_type)}"]
    lines += [f"{field}: {_first_count(data, names)}" for field, names in _YAML_FIELDS.items()]
    if isinstance(data.get("head_dim"), int):
        lines.append(f"head_dim: {_first_count(data, ('head_dim',))}")
    lines.append("activation: swiglu  # or gelu, relu, squared_relu, geglu")
    tied = data.get("tie_word_embeddings") is True
    lines.append(f"tied_embeddings: {shown(tied)}")
    if any(data.get(name) is not None for name in _MOE_FIELDS["experts"]):
        lines.append("moe:")
        lines += [f"  {field}: {_first_count(data, names)}" for field, names in _MOE_FIELDS.items()]
    return "\n".join(lines)


def _first_count(data: Mapping[str, object], names: tuple[str, ...]) -> str:
    """The first of these fields that holds an integer, as YAML."""
    for name in names:
        value = data.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return shown(value)
    return _UNKNOWN


ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "FalconForCausalLM": "falcon",
    "OPTForCausalLM": "opt",
    "NemotronHForCausalLM": "nemotron_h",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "FalconMambaForCausalLM": "falcon_mamba",
    "JambaForCausalLM": "jamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
}
"""`model_type` by the class named in `architectures`, for a file without the former."""
