"""Reads a Hugging Face config.json into a ModelSpec, with the image encoder in front of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isqrt

from meshwright.documents import validated
from meshwright.errors import InputError, name_text, near_miss, shown
from meshwright.model_specs.adapters import NF4, SINGLE_SCALES
from meshwright.model_specs.config_fields import ConfigFields, Fields, read_fields
from meshwright.model_specs.huggingface_families import FAMILIES, class_defaults
from meshwright.model_specs.schema import ModelSpec

# How the image encoder maps to a VisionSpec.
#
# Defaults are those of the configuration classes in huggingface/transformers 5.23.


_KINDS = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "gemma3": "siglip",
    "mllama": "mllama",
}
"""Kinds of encoders by `model_type` of the whole model; those of other models are not read."""

_LAYERS_SEE = ("qwen3_vl", "qwen3_vl_moe")
"""Of which the encoder hands values of its inner layers to the first layers of the language model."""

HAS_ENCODER = tuple(_KINDS)
"""Values of `model_type` whose `vision_config` is read."""


def vision_fields(data: Mapping[str, object], where: str, model: Mapping[str, object]) -> Fields:
    """The image encoder of a config.json, as fields of VisionSpec; empty without one that is read.

    Parameters
    ----------
    data
        The whole file.
    where
        Names the file in errors.
    model
        What its text part says, as fields of ModelSpec.

    Raises
    ------
    InputError
        For missing and ill-typed fields.
    """
    kind = _KINDS.get(str(data.get("model_type")))
    file_fields = ConfigFields(data, where)
    config = None if kind is None else file_fields.section("vision_config")
    if kind is None or config is None:
        return {}
    if kind == "siglip":
        return {"kind": kind, **_siglip(file_fields, config, model)}
    if kind == "mllama":
        return {"kind": kind, **_mllama(file_fields, config, model)}
    fields: Fields = {
        "kind": kind,
        "layers": config.count("depth", 27 if kind == "qwen3_vl" else 32),
        "heads": config.count("num_heads", 16),
        "patch_size": config.count("patch_size", 16 if kind == "qwen3_vl" else 14),
        "temporal_patch": config.count("temporal_patch_size", 2),
        "merge": config.count("spatial_merge_size", 2),
    }
    of_kind = _QWEN[kind](config)
    if kind == "qwen3_vl" and str(data.get("model_type")) not in _LAYERS_SEE:
        # Layers of Qwen3.5 see no images beside the tokens: they have Qwen3-VL's encoder without its taps.
        of_kind["deepstack"] = 0
    if of_kind["out_hidden"] != model["hidden"]:
        name = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
        what = f"must be the language model's width, {model['hidden']}"
        raise config.fail(name, what, of_kind["out_hidden"])
    return fields | of_kind


def _qwen2(config: ConfigFields) -> Fields:
    hidden = config.count("embed_dim", 1280)
    return {
        "hidden": hidden,
        "ffn_hidden": config.count("mlp_ratio", 4) * hidden,
        "out_hidden": config.count("hidden_size", 3584),
    }


def _qwen2_5(config: ConfigFields) -> Fields:
    patch = config.count("patch_size", 14)
    full = config.entries("fullatt_block_indexes")
    return {
        "hidden": config.count("hidden_size", 3584),
        "ffn_hidden": config.count("intermediate_size", 3420),
        "out_hidden": config.count("out_hidden_size", 3584),
        "window": max(config.count("window_size", 112) // patch, 1),
        "full_layers": len(full) if config.has("fullatt_block_indexes") else 4,
    }


def _qwen3(config: ConfigFields) -> Fields:
    deepstack = config.entries("deepstack_visual_indexes")
    return {
        "hidden": config.count("hidden_size", 1152),
        "ffn_hidden": config.count("intermediate_size", 4304),
        "out_hidden": config.count("out_hidden_size", 3584),
        "positions": config.count("num_position_embeddings", 2304),
        "deepstack": len(deepstack) if config.has("deepstack_visual_indexes") else 3,
    }


_QWEN = {"qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3}


def _siglip(file_fields: ConfigFields, config: ConfigFields, model: Mapping[str, object]) -> Fields:
    """SigLIP ahead of Gemma 3, which pools the patches of an image to a fixed number of tokens."""
    patch = config.count("patch_size", 16)
    side = max(config.count("image_size", 224) // patch, 1)
    tokens = file_fields.count("mm_tokens_per_image", 256)
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        what = f"must be a square that {side} patches a side can be pooled to"
        raise file_fields.fail("mm_tokens_per_image", what, tokens)
    return {
        "layers": config.count("num_hidden_layers", 12),
        "hidden": config.count("hidden_size", 768),
        "ffn_hidden": config.count("intermediate_size", 3072),
        "heads": config.count("num_attention_heads", 12),
        "out_hidden": model["hidden"],
        "patch_size": patch,
        "merge": side // isqrt(tokens),
        "positions": side**2,
        "pooling_head": config.flag("vision_use_head", True),
        "image_tokens": tokens,
    }


def _mllama(file_fields: ConfigFields, config: ConfigFields, model: Mapping[str, object]) -> Fields:
    """Llama 3.2 Vision: local layers and global ones with two gates each, tiles, cross-attention.

    A tile has one token more than patches. Tables: positions in a tile, positions by shape of the image and
    tile, and two for the tiles; three of them have a gate (modeling_mllama.py, MllamaVisionModel).
    """
    hidden, patch = config.count("hidden_size", 1280), config.count("patch_size", 14)
    further = config.count("num_global_layers", 8, least=0)
    tiles = config.count("max_num_tiles", 4)
    of_tile = (config.count("image_size", 448) // patch) ** 2 + 1
    shapes = 1 + (len(config.entries("supported_aspect_ratios")) or 8)
    text = file_fields.section("text_config")
    cross = text.entries("cross_attention_layers") if text is not None else []
    numbers = {name: value for name, value in model.items() if isinstance(value, int)}
    head_dim = numbers["hidden"] // numbers["heads"]
    gates = 2 * further + 3
    return {
        "layers": config.count("num_hidden_layers", 32) + further,
        "hidden": hidden,
        "ffn_hidden": config.count("intermediate_size", 5120),
        "heads": config.count("attention_heads", 16),
        "out_hidden": numbers["hidden"],
        "patch_size": patch,
        "merge": 1,
        "positions": 1 + of_tile + shapes * tiles * (of_tile + 2),
        "image_tokens": tiles * of_tile,
        "merged_width": config.count("vision_output_dim", 7680),
        "beside": gates + (len(cross) or 8) * (2 * head_dim + 2) + 8 * numbers["hidden"],
    }


# Hugging Face models that cannot be read: why, and the model YAML that would say the same.
#
# A family is refused by the field that makes it another kind of model, whatever its name; only where no field
# tells, by its name alone.


_STATE_SPACE = (
    "state-space layers of this family are not supported: only Mamba as in jamba, mamba, falcon_mamba, "
    "mamba2, nemotron_h, falcon_h1, bamba and granitemoehybrid can be priced"
)
_LINEAR_ATTENTION = (
    "layers with linear attention are not supported in this family: only those of qwen3_next, qwen3_5, "
    "kimi_linear, bailing_hybrid, minimax, minimax_text_01 and minimax_m1 can be priced"
)
_VISION = (
    "vision towers of this family are not supported; the language model beside one is read where it stands "
    "in a part of its own, such as text_config"
)
_SPARSE = (
    "attention to positions that an indexer chooses is not supported in this family: only that of "
    "deepseek_v32 and glm_moe_dsa can be priced"
)

_UNLIKE_WIDTHS = (
    "layers whose attention differs in heads or widths by their kind are not supported in this family: only "
    "those of gemma4, mimo_v2_flash, step3p5 and laguna can be priced"
)

_COMPRESSED = (
    "attention to compressed keys and values (DeepSeek-V4) is not supported: megatron-core 0.19.2 has no "
    "such layer, and transformers computes it operator by operator, which has no price"
)
"""No `csa_compress_ratios` in megatron-core 0.19.2, which Megatron-Bridge 0.6.2 sets for it; eager attention
alone in transformers 5.24 (modular_deepseek_v4.py, DeepseekV4PreTrainedModel)."""

REFUSING_FIELDS = {
    "global_head_dim": _UNLIKE_WIDTHS,
    "hidden_size_per_layer_input": "residuals in several streams beside a token table for each layer (Gemma "
    "3n) are not supported",
    "swa_num_key_value_heads": _UNLIKE_WIDTHS,
    "swa_head_dim": _UNLIKE_WIDTHS,
    "num_sliding_attention_heads": _UNLIKE_WIDTHS,
    "attention_other_setting": _UNLIKE_WIDTHS,
    "num_attention_heads_per_layer": _UNLIKE_WIDTHS,
    "attention_value_scale": "values of another width than keys outside latent attention are not supported "
    "in this family: only those of mimo_v2_flash can be priced",
    "compress_ratios": _COMPRESSED,
    "compress_rates": _COMPRESSED,
    "sparse_attention_config": "attention to chosen blocks of positions is not supported in this family: "
    "only that of minimax_m3_vl can be priced",
    "block_configs": "layers that each have widths of their own (Nemotron from architecture search) are not "
    "supported",
    "zero_expert_num": "experts that compute nothing (LongCat) are not supported: tokens have unlike numbers "
    "of experts",
    "hc_mult": "residuals in several streams (hyper-connections) are not supported",
    "conv_L_cache": "layers with a short convolution in place of attention are not supported in this family: "
    "only those of lfm2 and lfm2_moe can be priced",
    "residual_gate_temperature": "gates on residuals, and experts with a norm of their own (Muse Spark), are "
    "not supported",
    "additional_vocab_size": "a token table with more rows than the head has (Molmo2) is not supported",
    "kda_lower_bound": _LINEAR_ATTENTION,
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
    "cross_attention_layers": "layers that attend to another model's output are not supported in this family",
    "vision_config": _VISION,
    "image_size": _VISION,
    "patch_size": _VISION,
}
"""Fields of families that are not read, and what each says of the model."""
_AT_THEIR_DEFAULT = {
    "deepseek_v4": "compress_ratios",
    "hy_v4": "hc_mult",
    "glm5_next_text": "hc_mult",
    "gemma3n": "hidden_size_per_layer_input",
    "gemma3n_text": "hidden_size_per_layer_input",
    "inkling_text": "swa_num_key_value_heads",
    "lfm3": "conv_L_cache",
    "longcat_flash": "zero_expert_num",
    "nemotron-nas": "block_configs",
    "axk2": "index_topk",
    "qwen4_exp_text": "linear_num_value_heads",
    "zamba": "mamba_d_state",
    "zamba2": "mamba_d_state",
}
"""Of families whose files may leave such a field out, for it is at its class's default: which it is."""
_INSTEAD = "a model YAML with layers that `meshwright schema model` has plans the nearest model with a price"

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
    """Raises InputError for a model whose decoder attends to an encoder.

    Parameters
    ----------
    data
        The file, or its text part.
    where
        The file's name.
    prefix
        Path of the part in the file, with a dot behind it; empty for the file itself.
    """
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

    Parameters
    ----------
    data
        The file, or its text part.
    model_type
        Of it.
    where
        The file's name.
    prefix
        Path of the part in the file, with a dot behind it; empty for the file itself.
    families
        By the values of `model_type` that are read.
    """
    for field, reason in REFUSING_FIELDS.items():
        if data.get(field) is not None:
            what = f"{reason}; {_INSTEAD}"
            return InputError(what, where=f"{where}: {prefix}{field}", value=data[field])
    if model_type in _AT_THEIR_DEFAULT:
        field = _AT_THEIR_DEFAULT[model_type]
        what = f"{REFUSING_FIELDS[field]} (its {field} is left out, at its default); {_INSTEAD}"
        return InputError(what, where=f"{where}: {prefix}model_type", value=model_type)
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

    Parameters
    ----------
    data
        Fields of a config.json; those that are no integers are passed over.
    model_type
        What to call the model.

    >>> print(model_yaml({"n_layer": 2, "n_embd": 8, "vocab_size": 32}, "toy"))
    name: 'toy'
    layers: 2
    hidden: 8
    ffn_hidden: ...  # fill this in
    heads: ...  # fill this in
    kv_heads: ...  # fill this in
    vocab: 32
    activation: swiglu  # or gelu, relu, squared_relu, geglu, xielu
    tied_embeddings: false
    """
    lines = [f"name: {shown(model_type)}"]
    lines += [f"{field}: {_first_count(data, names)}" for field, names in _YAML_FIELDS.items()]
    if isinstance(data.get("head_dim"), int):
        lines.append(f"head_dim: {_first_count(data, ('head_dim',))}")
    lines.append("activation: swiglu  # or gelu, relu, squared_relu, geglu, xielu")
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


ARCHITECTURES = {
    family.architecture: model_type
    for model_type, family in FAMILIES.items()
    if family.architecture
}
"""`model_type` by the class named in `architectures`, for a file without the former."""


# Fields of a config.json that no description of a model holds, and which of them say nothing.
#
# What the readers of a family do not ask for is either without effect on the network and its training, or at
# the value that every launch has anyhow, or named by the launch: nothing is dropped in silence.


_LONGEST_VALUE = 80
_MOST_NAMED = 100

_ABOUT_FILES = """
architectures model_type _name_or_path name_or_path transformers_version auto_map torch_dtype dtype
quantization_config _commit_hash torchscript tf_legacy_loss is_decoder is_encoder_decoder tie_encoder_decoder
num_labels id2label label2id problem_type finetuning_task tokenizer_class pruned_heads
"""
_ABOUT_RUNNING = """
use_cache return_dict use_return_dict output_attentions output_hidden_states attn_implementation
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation
experts_implementation use_mamba_kernels num_logits_to_keep cache_implementation gradient_checkpointing
ep_size pretraining_tp use_bfloat16 chunk_size_feed_forward head_dtype max_window_size
use_associative_scan use_mambapy mamba_ssm_cache_dtype moe_shared_expert_overlap
"""
_ABOUT_TEXT = """
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id cls_token_id
begin_suppress_tokens suppress_tokens bad_words_ids prefix max_length min_length do_sample temperature
top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams num_beam_groups
diversity_penalty early_stopping task_specific_params summary_type summary_use_proj summary_activation
summary_proj_to_labels summary_first_dropout boi_token_index eoi_token_index image_token_index
image_token_id video_token_id vision_token_id vision_start_token_id vision_end_token_id eod_token_id
"""
_SAID_OTHERWISE = """
n_positions max_position_embeddings original_max_position_embeddings initial_context_length n_ctx qk_head_dim
experts_per_token mamba_d_head mamba_expand expand rope_interleave indexer_rope_interleave
model_max_length
"""
WITHOUT_EFFECT = frozenset(
    f"{_ABOUT_FILES} {_ABOUT_RUNNING} {_ABOUT_TEXT} {_SAID_OTHERWISE}".split()
)
"""Fields about files, about running a model, about text, and those that repeat what others say."""
_ABSENT_OR_ZERO = """
attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout resid_dropout dropout activation_dropout
layerdrop classifier_dropout router_aux_loss_coef router_z_loss_coef router_jitter_noise aux_loss_alpha
embedding_dropout residual_dropout z_loss_coefficient
"""
_ABSENT_OR_ONE = """
attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier lm_head_multiplier
ssm_in_multiplier ssm_out_multiplier residual_multiplier moe_layer_freq mtp_transformer_layers
"""
_ABSENT_OR_FALSE = """
output_router_logits attention_bias mlp_bias use_bias add_cross_attention scale_attn_by_inverse_layer_idx
reorder_and_upcast_attn use_bidirectional_attention use_sliding_window residual_in_fp32
rescale_prenorm_residual _remove_final_layer_norm
"""
AS_LAUNCHED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_ABSENT_OR_ZERO.split(), (0,)),
    **dict.fromkeys(_ABSENT_OR_FALSE.split(), (False,)),
    **dict.fromkeys(_ABSENT_OR_ONE.split(), (1,)),
    "classifier_dropout": (0, 0.1),
    "initializer_range": (0.02,),
    "hidden_act": ("silu", "gelu_pytorch_tanh"),
    "mamba_hidden_act": ("silu",),
    "norm_before_gate": (True,),
    "scale_attn_weights": (True,),
    "rope_type": ("default",),
    "attention_softmax_in_fp32": (True,),
    "scale_attention_softmax_in_fp32": (True,),
    "mlp_multipliers": ([1, 1],),
    "ssm_multipliers": ([1, 1, 1, 1, 1],),
    "mamba_norm_before_gate": (True,),
    "layer_norm_elementwise_affine": (True,),
    "init_std": (0.02,),
    "time_step_min": (0.001,),
    "time_step_max": (0.1,),
    "time_step_floor": (1e-4,),
    "time_step_limit": ([0.0, {"__float__": "Infinity"}],),
    "time_step_init_scheme": ("random",),
    "time_step_scale": (1,),
}
"""Values of further fields at which a launch file says the same by saying nothing."""


def left_out(config: ConfigFields) -> tuple[str, ...]:
    """Fields with their values that no reader of the family asked for and a launch does not have anyhow.

    Parameters
    ----------
    config
        The file, once its family has read it.

    Returns
    -------
    tuple of str
        Name and value of each, cut to 300 characters; at most 101.

    >>> left_out(ConfigFields({"use_cache": True, "initializer_range": 0.5}, "config.json"))
    ('initializer_range 0.5',)
    """
    named = [
        f"{name_text(name)} {_shown(value)}"[:300]
        for name, value in config.unread()
        if name.rpartition(".")[2] not in WITHOUT_EFFECT
        and not any(_same(value, usual) for usual in AS_LAUNCHED.get(name.rpartition(".")[2], ()))
    ]
    if len(named) > _MOST_NAMED:
        named[_MOST_NAMED:] = [f"and {len(named) - _MOST_NAMED} more fields"]
    return tuple(named)


def _same(value: object, usual: object) -> bool:
    """Equal, where a number and a truth value are not."""
    return value == usual and isinstance(value, bool) == isinstance(usual, bool)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


AND_ENCODER = " and vision_config"
"""What the source of a model ends in whose image encoder was read."""
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal wrappers keep their language model."""
_DEEPEST = 4
_NESTED_DEFAULTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mllama": "mllama_text_model",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "kimi_k25": "kimi_k2",
    "step3p7": "step3p5",
}
"""`model_type` of a text part that does not say, by that of its wrapper."""


def is_huggingface_config(data: Mapping[str, object]) -> bool:
    """Whether a mapping looks like a config.json rather than a model description of ours.

    Parameters
    ----------
    data
        Fields by name.
    """
    return "model_type" in data or "architectures" in data


def model_from_huggingface(
    data: Mapping[str, object], where: str, name: str | None = None
) -> ModelSpec:
    """The model that a config.json describes; of a multimodal one its text part, and its image encoder where
    that is one of `HAS_ENCODER`.

    `where` names the file in errors; the model is called `name`, or what the file says it was loaded from.
    Raises InputError on an unknown `model_type` and on missing, ill-typed or inconsistent fields.

    Parameters
    ----------
    data
        Fields of the file by name.
    where
        A path, or what the data is.
    name
        What to call the model; None for what the file says it was loaded from, else its `model_type`.
    """
    config_name = data.get("_name_or_path")
    if not name:
        name = config_name if isinstance(config_name, str) and 0 < len(config_name) <= 200 else None
    part, model_type, prefix = _text_part(data, where)
    config = ConfigFields(part, where, prefix)
    unsaid = class_defaults(model_type).items()
    part = {**part, **{name: value for name, value in unsaid if not config.names(name)}}
    config = ConfigFields(part, where, prefix)
    if not prefix and model_type in HAS_ENCODER:
        # Older files have the text part's fields beside the encoder's section.
        config.passed_over("vision_config")
    fields = read_fields(config, *FAMILIES[model_type].parts)
    fields["left_out"] = left_out(config)
    fields["stored_as"] = _stored_as(data, where, "") or _stored_as(part, where, prefix)
    fields["name"] = (name or model_type)[:200]
    fields["source"] = f"config.json, {prefix.rstrip('.')} alone" if prefix else "config.json"
    vision = vision_fields(data, where, fields)
    if vision:
        part_name = prefix.rstrip(".") or "language model"
        fields |= {"vision": vision, "source": f"config.json, {part_name}{AND_ENCODER}"}
    return validated(ModelSpec, fields, where)


_TRITS = "bitnet"
_BITS = {"load_in_4bit": 4, "_load_in_4bit": 4, "load_in_8bit": 8, "_load_in_8bit": 8}
"""Of a weight that bitsandbytes keeps, by the switch of it."""


def _stored_as(data: Mapping[str, object], where: str, prefix: str) -> str | None:
    """How the checkpoint keeps its matrices: method and bits of `quantization_config`; None without one.

    Fields and methods: huggingface/transformers 5.23, utils/quantization_config.py and quantizers/auto.py.
    """
    name = "quantization_config"
    stored = ConfigFields(data, where, prefix).section(name)
    if stored is None or not data[name]:
        return None
    algorithm = stored.text("quant_algo", "")
    # Older files of ModelOpt give its algorithm alone.
    method = stored.text("quant_method", "modelopt" if algorithm else "")
    if not method or len(method) > _LONGEST_VALUE:
        raise stored.fail("quant_method", "must name how the checkpoint keeps its weights", method)
    if method == _TRITS:
        what = (
            "layers of ternary weights are another model (BitNet), which is not supported: give the "
            "config.json of a checkpoint with weights of 16 bits"
        )
        raise stored.fail("quant_method", what, method)
    bits = next((bits for switch, bits in _BITS.items() if stored.flag(switch, False)), None)
    bits = stored.count("bits", bits, optional=True)
    words = method if bits is None else f"{method} {bits}-bit"
    if method == "modelopt":
        words = f"{words} {algorithm}".strip()[:_LONGEST_VALUE]
    single = words == NF4 and not stored.flag("bnb_4bit_use_double_quant", False)
    return words + SINGLE_SCALES if single else words


def _text_part(data: Mapping[str, object], where: str) -> tuple[Mapping[str, object], str, str]:
    """The language model's own mapping, its model type, and the path to it."""
    prefix = ""
    inherited: str | None = None
    for _ in range(_DEEPEST):
        refuse_encoder_decoder(data, where, prefix)
        model_type = _model_type(data, where, prefix) or inherited
        nested = next((key for key in _TEXT_PARTS if data.get(key) is not None), None)
        if nested is None:
            return data, _known(data, model_type, where, prefix), prefix
        inner = data[nested]
        if not isinstance(inner, dict):
            raise InputError(
                "must be a mapping of fields", where=f"{where}: {prefix}{nested}", value=inner
            )
        tied = data.get("tie_word_embeddings")
        # The head is the wrapper's, which says whether it is tied (get_expanded_tied_weights_keys).
        data = inner if tied is None else inner | {"tie_word_embeddings": tied}
        inherited = _NESTED_DEFAULTS.get(model_type or "")
        prefix += f"{nested}."
    raise InputError(f"text parts are nested more than {_DEEPEST} levels deep", where=where)


def _model_type(data: Mapping[str, object], where: str, prefix: str) -> str | None:
    value = data.get("model_type")
    if value is not None:
        if not isinstance(value, str):
            raise InputError("must be a text", where=f"{where}: {prefix}model_type", value=value)
        return value
    classes = data.get("architectures")
    if isinstance(classes, list) and classes and isinstance(classes[0], str):
        return ARCHITECTURES.get(classes[0], classes[0])
    return None


def _known(data: Mapping[str, object], model_type: str | None, where: str, prefix: str) -> str:
    if model_type is None:
        raise InputError(
            "this field is required and missing",
            where=f"{where}: {prefix}model_type",
            allowed=FAMILIES,
        )
    if model_type not in FAMILIES:
        raise refusal(data, model_type, where, prefix, FAMILIES)
    return model_type
