"""How each Hugging Face model family maps to a ModelSpec.

One function per family returns the fields of `ModelSpec`. Defaults are those of the family's configuration
class in huggingface/transformers, for published files leave out what equals the default.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.model_specs.blocks import LINEAR, order_fields
from meshwright.model_specs.config_fields import (
    GATED,
    PLAIN,
    ConfigFields,
    Fields,
    activation_fields,
    attention_biases,
    full_layers,
    gated_decoder,
    layer_norm_decoder,
    rope_fields,
    window_everywhere,
    window_length,
    window_order,
    windows,
)
from meshwright.model_specs.huggingface_hybrid import (
    bamba_fields,
    falcon_h1_fields,
    granite_hybrid_fields,
    jamba_fields,
    mamba1_fields,
    mamba2_fields,
    nemotron_h_fields,
)

# How Gemma 2 and 3 map to a ModelSpec.


def gemma2_fields(config: ConfigFields) -> Fields:
    """Fields of a Gemma 2: norms after the blocks, capped logits, every second layer windowed."""
    return (
        gated_decoder(config, activation_field="hidden_activation", activation="gelu_pytorch_tanh")
        | {
            "head_dim": config.count("head_dim", 256),
            "tied_embeddings": config.flag("tie_word_embeddings", True),
            "norms_per_layer": 4,
            "attention_logit_cap": config.number("attn_logit_softcapping", 50.0),
            "final_logit_cap": config.number("final_logit_softcapping", 30.0),
            **_gemma_scales(config),
        }
        | attention_biases(config)
        | windows(config, window_length(config, 4096), 2)
    )


def _gemma_scales(config: ConfigFields) -> Fields:
    """Factors on embeddings, attention scores and norms that Gemma 2 and 3 share."""
    fields: Fields = {
        "norm_zero_centered": True,
        "embedding_scale": config.count("hidden_size") ** 0.5,
    }
    scalar = config.number("query_pre_attn_scalar", 256)
    if scalar > 0 and scalar != config.count("head_dim", 256):
        fields["attention_scale"] = scalar**-0.5
    return fields


def gemma3_fields(config: ConfigFields) -> Fields:
    """Fields of a Gemma 3, whose windowed layers turn by a base of their own.

    Files of multimodal Gemma 3 name only what differs from the defaults.
    """
    heads = config.count("num_attention_heads", 8)
    windowed_base = config.number("rope_local_base_freq", 10_000)
    pattern = config.count("_sliding_window_pattern", config.count("sliding_window_pattern", 6))
    return {
        "layers": config.layers(),
        "hidden": config.count("hidden_size"),
        "ffn_hidden": config.count("intermediate_size"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", 4),
        "head_dim": config.count("head_dim", 256),
        "vocab": config.count("vocab_size", 262_208),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "norms_per_layer": 4,
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "qk_norm": True,
        "rope": {"windowed_base": windowed_base, **rope_fields(config, base=1e6)},
        "final_logit_cap": config.number("final_logit_softcapping"),
        "attention_logit_cap": config.number("attn_logit_softcapping"),
        **activation_fields(config, "hidden_activation", "gelu_pytorch_tanh", GATED),
        **_gemma_scales(config),
        **attention_biases(config),
        **windows(config, window_length(config, 4096), pattern),
    }


# How Llama 4's config.json maps to a ModelSpec.
#
# Where three layers in four see their own chunk of the sequence alone, the fourth has no position embedding
# (`no_rope_layers` is 0 there): huggingface/transformers, modeling_llama4.py.


def llama4_fields(config: ConfigFields) -> Fields:
    """Fields of a Llama 4: experts in each n-th layer; three layers in four see their own chunk alone."""
    layers = config.layers()
    window = _chunks(config, layers)
    moe = {
        "experts": config.count("num_local_experts", 16),
        "top_k": config.count("num_experts_per_tok", 1),
        "every": _layers_a_group(config, layers),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "shared_experts": 1,
        "router_score": "sigmoid",
        "router_normalized": False,
        "router_scales_inputs": True,
    }
    return gated_decoder(config, norm_epsilon=1e-5, rope_base=500_000) | {
        "head_dim": config.count("head_dim", 128),
        "ffn_hidden": config.count("intermediate_size_mlp", 16_384),
        "qk_norm": config.flag("use_qk_norm", True),
        "qk_norm_weights": False,
        "rope_in_windows_alone": bool(window),
        "moe": moe,
        **attention_biases(config),
        **window,
        "chunked_windows": bool(window),
    }


def _chunks(config: ConfigFields, layers: int) -> Fields:
    """The length of chunks, and the layers that see the whole sequence: those without position embedding."""
    every = config.count("no_rope_layer_interval", 4)
    switches = config.entries("no_rope_layers")
    if switches and (len(switches) != layers or not set(map(str, switches)) <= {"0", "1"}):
        what = f"must list 0 or 1 for each of {layers} layers"
        raise config.fail("no_rope_layers", what, switches)
    turning = [bool(switch) for switch in switches]
    full = [not turns for turns in turning] or [(i + 1) % every == 0 for i in range(layers)]
    kinds = config.entries("layer_types")
    if kinds and full_layers(config, kinds, layers, "chunked_attention") != full:
        what = (
            "must name full_attention for the layers without position embedding, and for no others"
        )
        raise config.fail("layer_types", what, kinds)
    if not any(full):
        what = "names no layer that sees the whole sequence, and is not supported"
        raise config.fail("no_rope_layers", what)
    if all(full):
        what = "leaves no layer a position embedding, and is not supported"
        raise config.fail("no_rope_layers", what)
    default = None if config.names("attention_chunk_size") else 8192
    chunk = config.count("attention_chunk_size", default, optional=True)
    return window_order(config, chunk, full, "attention_chunk_size")


def _layers_a_group(config: ConfigFields, layers: int) -> int:
    """Layers of which the last has experts: `interleave_moe_layer_step`, or what `moe_layers` lists."""
    step = config.count("interleave_moe_layer_step", 1)
    listed = config.entries("moe_layers")
    if not listed:
        return step
    every = layers // len(listed)
    if listed != list(range(every - 1, layers, every)) or layers % every:
        what = f"experts in each n-th of the {layers} layers are all that can be planned"
        raise config.fail("moe_layers", what)
    return every


# How the Qwen families of config.json map to fields of a ModelSpec.


def _window(config: ConfigFields) -> int | None:
    """The window, which is off by default."""
    if config.flag("use_sliding_window", False):
        return window_length(config, 4096)
    config.passed_over("sliding_window", "max_window_layers")
    return None


def _windows(config: ConfigFields) -> Fields:
    """Qwen2 and Qwen3: the first `max_window_layers` layers attend in full, or those that are listed."""
    window = _window(config)
    most = config.count("max_window_layers", 28, least=0)
    if config.entries("layer_types"):
        return windows(config, window, 1)
    if window is None:
        return {}
    full = [layer < most for layer in range(config.layers())]
    return window_order(config, window, full, "max_window_layers")


def _moe_windows(config: ConfigFields) -> Fields:
    """Qwen2 with experts: every second of the first `max_window_layers` layers is windowed.

    huggingface/transformers, configuration_qwen2_moe.py: the first, the third and so on.
    """
    window = _window(config)
    most = config.count("max_window_layers", 28, least=0)
    if config.entries("layer_types"):
        return windows(config, window, 1)
    if window is None:
        return {}
    full = [layer % 2 == 1 or layer >= most for layer in range(config.layers())]
    return window_order(config, window, full, "max_window_layers")


def qwen2_fields(config: ConfigFields) -> Fields:
    """Qwen2: biases on queries, keys and values."""
    return _qwen2(config) | _windows(config)


def _qwen2(config: ConfigFields) -> Fields:
    return gated_decoder(config) | {"attention_bias": True}


def qwen3_fields(config: ConfigFields) -> Fields:
    """Qwen3: norms on queries and keys."""
    return _qwen3(config) | _windows(config)


def _qwen3(config: ConfigFields) -> Fields:
    return (
        gated_decoder(config)
        | {"head_dim": config.count("head_dim", 128), "qk_norm": True}
        | attention_biases(config)
    )


def _qwen_experts(config: ConfigFields) -> Fields:
    experts = config.count("num_experts", least=0)
    placed = _qwen_dense_layers(config)
    if experts == 0 or placed.get("dense_layers") == config.layers():
        return {}
    return {
        "experts": experts,
        "top_k": config.count("num_experts_per_tok"),
        "moe_ffn_hidden": config.count("moe_intermediate_size"),
        **placed,
        "router_normalized": config.flag("norm_topk_prob", False),
    }


def _qwen_dense_layers(config: ConfigFields) -> dict[str, int]:
    """Which layers have no experts: the first ones, or all but each n-th."""
    step, layers = config.count("decoder_sparse_step", 1), config.layers()
    listed: set[int] = set()
    for layer in config.entries("mlp_only_layers"):
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise config.fail("mlp_only_layers", "must list layer numbers", layer)
        listed.add(layer)
    dense = {layer for layer in range(layers) if (layer + 1) % step or layer in listed}
    if dense == set(range(len(dense))):
        return {"dense_layers": len(dense)}
    if dense == {layer for layer in range(layers) if (layer + 1) % step} and layers % step == 0:
        return {"every": step}
    name = "decoder_sparse_step" if step > 1 else "mlp_only_layers"
    what = "dense layers are only supported before all layers with experts, or n - 1 of each n"
    raise config.fail(name, what)


def qwen2_moe_fields(config: ConfigFields) -> Fields:
    """Qwen2 with routed experts, and shared ones behind a gate."""
    experts = _qwen_experts(config)
    base = _qwen2(config) | _moe_windows(config)
    if not experts:
        return base
    shared = {
        "shared_experts": 1,
        "shared_ffn_hidden": config.count("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }
    bias = {"attention_bias": config.flag("qkv_bias", True)}
    return base | bias | {"moe": experts | shared}


def qwen3_moe_fields(config: ConfigFields) -> Fields:
    """Qwen3 with routed experts; a window covers every layer (modeling_qwen3_moe.py, `mask_function`)."""
    config.passed_over("max_window_layers")
    window = window_everywhere(config, _window(config))
    return _qwen3(config) | window | {"moe": _qwen_experts(config) or None}


def qwen3_next_fields(config: ConfigFields) -> Fields:
    """Qwen3-Next: Gated DeltaNet in three of four layers, and gates on what attention returns."""
    experts = _qwen_experts(config)
    if experts:
        width = config.count("shared_expert_intermediate_size", 512)
        experts |= {"shared_experts": 1, "shared_ffn_hidden": width, "shared_expert_gate": True}
        experts["router_normalized"] = config.flag("norm_topk_prob", True)
    layers = config.layers()
    every = config.count("full_attention_interval", 4)
    kinds = config.entries("layer_types")
    order: Fields = {"full_attention_every": every}
    if kinds:
        order = order_fields(full_layers(config, kinds, layers, "linear_attention"), LINEAR)
    _window(config)
    return gated_decoder(config) | {
        "head_dim": config.count("head_dim", 256),
        "rope": rope_fields(config, fraction=0.25),
        "qk_norm": True,
        "norm_zero_centered": True,
        "attention_output_gate": True,
        **attention_biases(config),
        "moe": experts or None,
        **order,
        "linear_attention": {
            "key_heads": config.count("linear_num_key_heads", 16),
            "value_heads": config.count("linear_num_value_heads", 32),
            "key_head_dim": config.count("linear_key_head_dim", 128),
            "value_head_dim": config.count("linear_value_head_dim", 128),
            "conv_kernel": config.count("linear_conv_kernel_dim", 4),
        },
    }


def _llama(config: ConfigFields) -> Fields:
    return (
        gated_decoder(config)
        | attention_biases(config)
        | {"mlp_bias": config.flag("mlp_bias", False)}
    )


def _mistral(config: ConfigFields) -> Fields:
    return gated_decoder(config) | window_everywhere(config, window_length(config, 4096))


def _mixtral(config: ConfigFields) -> Fields:
    moe: Fields = {
        "experts": config.count("num_local_experts", 8),
        "top_k": config.count("num_experts_per_tok", 2),
        "moe_ffn_hidden": config.count("intermediate_size"),
    }
    window = window_length(config, None)
    return (
        gated_decoder(config, norm_epsilon=1e-5, rope_base=1e6)
        | {"moe": moe}
        | window_everywhere(config, window)
    )


def _phi3(config: ConfigFields) -> Fields:
    window = window_length(config, None)
    return gated_decoder(config, norm_epsilon=1e-5) | window_everywhere(config, window)


def _olmoe(config: ConfigFields) -> Fields:
    moe = {
        "experts": config.count("num_experts", 64),
        "top_k": config.count("num_experts_per_tok", 8),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "router_normalized": config.flag("norm_topk_prob", False),
    }
    norms = {"qk_norm": True, "qk_norm_full_width": True}
    return (
        gated_decoder(config, norm_epsilon=1e-5) | attention_biases(config) | norms | {"moe": moe}
    )


def _olmo2(config: ConfigFields) -> Fields:
    """OLMo 2 and 3: the two norms of a layer come after its blocks, and keys and queries have wide ones."""
    norms = {"norms_after_blocks": True, "qk_norm": True, "qk_norm_full_width": True}
    return gated_decoder(config, norm_epsilon=1e-5) | attention_biases(config) | norms


def _olmo3(config: ConfigFields) -> Fields:
    return _olmo2(config) | windows(config, window_length(config, 4096), 4)


def _minimax_m2(config: ConfigFields) -> Fields:
    norm_form = config.text("qk_norm_type", "per_layer")
    if norm_form != "per_layer":
        raise config.fail("qk_norm_type", "only per_layer is supported", norm_form)
    if config.count("shared_intermediate_size", 0, least=0):
        raise config.fail("shared_intermediate_size", "only 0 is supported: no shared expert")
    moe = {
        "experts": config.count("num_local_experts", 256),
        "top_k": config.count("num_experts_per_tok", 8),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "router_bias": config.flag("use_routing_bias", True),
        "router_score": config.text("scoring_func", "sigmoid"),
    }
    head_dim = config.count("head_dim", 128)
    turning = config.count("rotary_dim", head_dim)
    has_norms = config.flag("use_qk_norm", True)
    modules = config.count("num_mtp_modules", 0, least=0)
    return gated_decoder(config, rope_base=5e6) | {
        "head_dim": head_dim,
        "rope": rope_fields(config, base=5e6, fraction=turning / head_dim),
        "qk_norm": has_norms,
        "qk_norm_full_width": has_norms,
        "mtp_layers": modules if config.flag("use_mtp", False) else 0,
        "moe": moe,
    }


def _gpt_oss(config: ConfigFields) -> Fields:
    moe = {
        "experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok", 4),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "router_bias": True,
        "expert_bias": True,
    }
    fields = gated_decoder(config, norm_epsilon=1e-5, rope_base=150_000) | {
        "head_dim": config.count("head_dim", 64),
        "attention_sinks": True,
        "rope": _gpt_oss_rope(config),
        "swiglu_alpha": config.number("swiglu_alpha", 1.702),
        "glu_offset": 1.0,
        "glu_limit": config.number("swiglu_limit", 7.0),
        "moe": moe,
    }
    return fields | attention_biases(config, True) | windows(config, window_length(config, 128), 2)


def _gpt_oss_rope(config: ConfigFields) -> Fields:
    """Rotary embeddings, by YaRN where the file says nothing of it (configuration_gpt_oss.py)."""
    rope = rope_fields(config, base=150_000)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        scaling = {"type": "yarn", "factor": 32.0, "original_positions": 4096, "whole_range": False}
        rope["scaling"] = scaling
    return rope


def _deepseek(config: ConfigFields) -> Fields:
    layers = config.layers()
    heads = config.count("num_attention_heads")
    fields: Fields = gated_decoder(config) | {
        # Every head has its own keys and values once the latent is expanded.
        "kv_heads": heads,
        "head_dim": None,
        "attention": {
            "q_lora_rank": config.count("q_lora_rank", optional=True),
            "kv_lora_rank": config.count("kv_lora_rank"),
            "qk_nope_head_dim": config.count("qk_nope_head_dim"),
            "qk_rope_head_dim": config.count("qk_rope_head_dim"),
            "v_head_dim": config.count("v_head_dim"),
        },
    }
    dense = config.count("first_k_dense_replace", 0, least=0)
    if config.has("n_routed_experts") and dense < layers:
        fields["moe"] = _deepseek_moe(config, dense)
    return fields | attention_biases(config)


def _deepseek_moe(config: ConfigFields, dense_layers: int) -> Fields:
    if config.count("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "only 1 is supported: every later layer has experts")
    balancing = config.text("topk_method", "")
    moe: Fields = {
        "experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "moe_ffn_hidden": config.count("moe_intermediate_size"),
        "shared_experts": config.count("n_shared_experts", 0, least=0),
        "dense_layers": dense_layers,
        "router_bias": balancing == "noaux_tc",
        "router_score": config.text("scoring_func", "softmax"),
        "router_normalized": config.flag("norm_topk_prob", False),
        "router_scaling_factor": config.number("routed_scaling_factor", 1.0),
    }
    groups = config.count("n_group", 1)
    config.passed_over("topk_group")
    if groups > 1 and balancing != "greedy":
        moe |= {
            "router_groups": groups,
            "router_groups_per_token": config.count("topk_group", groups),
        }
    return moe


def _deepseek_v3(config: ConfigFields) -> Fields:
    fields = _deepseek(config) | {
        "mtp_layers": config.count("num_nextn_predict_layers", 0, least=0)
    }
    moe = fields.get("moe")
    if isinstance(moe, dict):
        fields["moe"] = moe | {
            "router_bias": True,
            "router_score": config.text("scoring_func", "sigmoid"),
            "router_normalized": config.flag("norm_topk_prob", True),
            "router_scaling_factor": config.number("routed_scaling_factor", 2.5),
        }
    return fields


def _deepseek_v32(config: ConfigFields) -> Fields:
    """DeepSeek-V3.2, and GLM-5 where every layer has an indexer of its own: positions chosen by one."""
    shared = [kind for kind in config.entries("indexer_types") if kind != "full"]
    if shared:
        raise config.fail(
            "indexer_types", "only full is supported: an indexer in every layer", shared[0]
        )
    if config.count("index_topk_freq", 1) > 1:
        raise config.fail("index_topk_freq", "only 1 is supported: an indexer in every layer")
    fields = _deepseek_v3(config)
    indexer = {
        "heads": config.count("index_n_heads", 64),
        "head_dim": config.count("index_head_dim", 128),
        "top_k": config.count("index_topk", 2048),
    }
    latent = fields["attention"]
    assert isinstance(latent, dict)
    # Megatron-LM, which alone is planned with indexers, builds no such module beside one.
    note = "multi-token prediction is left out: Megatron-LM builds none beside sparse attention"
    without = {"mtp_layers": 0, "attention_note": note if fields["mtp_layers"] else None}
    return fields | {"attention": latent | {"indexer": indexer}} | without


def _glm4_moe(config: ConfigFields) -> Fields:
    """GLM-4.5 and 4.6: experts as in DeepSeek-V3, and biases on queries, keys and values alone."""
    fields = gated_decoder(config, norm_epsilon=1e-5) | {
        "rope": rope_fields(config, fraction=0.5),
        "attention_bias": config.flag("attention_bias", False),
        "qk_norm": config.flag("use_qk_norm", False),
        "mtp_layers": config.count("num_nextn_predict_layers", 1, least=0),
    }
    dense = config.count("first_k_dense_replace", 1, least=0)
    if dense < config.layers():
        fields["moe"] = _deepseek_moe(config, dense) | {
            "router_bias": True,
            "router_score": "sigmoid",
            "router_normalized": config.flag("norm_topk_prob", True),
        }
    return fields


def _gpt2(config: ConfigFields) -> Fields:
    hidden = config.count("n_embd")
    heads = config.count("n_head")
    return layer_norm_decoder(bias=True) | {
        "layers": config.layers("n_layer"),
        "hidden": hidden,
        "ffn_hidden": config.count("n_inner", 4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "vocab": config.count("vocab_size"),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        **activation_fields(config, "activation_function", "gelu_new", PLAIN),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "position": "learned",
        "max_positions": config.count("n_positions", 1024),
    }


def _gpt_neox(config: ConfigFields) -> Fields:
    heads = config.count("num_attention_heads")
    return (
        layer_norm_decoder(bias=True)
        | attention_biases(config, True)
        | {
            "layers": config.layers(),
            "hidden": config.count("hidden_size"),
            "ffn_hidden": config.count("intermediate_size"),
            "heads": heads,
            "kv_heads": heads,
            "vocab": config.count("vocab_size"),
            "norm_epsilon": config.number("layer_norm_eps", 1e-5),
            "rope": rope_fields(
                config,
                base=config.number("rotary_emb_base", 10_000),
                fraction=config.number("rotary_pct", 0.25),
            ),
            **activation_fields(config, "hidden_act", "gelu", PLAIN),
            "tied_embeddings": config.flag("tie_word_embeddings", False),
            "parallel_block": config.flag("use_parallel_residual", True),
        }
    )


def _falcon(config: ConfigFields) -> Fields:
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    new = config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True) or new
    if new:
        kv_heads = config.count("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    norms = config.count("num_ln_in_parallel_attn", 2 if new else 1) if parallel else 2
    return layer_norm_decoder(bias=config.flag("bias", False)) | {
        "layers": config.layers(),
        "hidden": hidden,
        "ffn_hidden": config.count("ffn_hidden_size", 4 * hidden),
        "heads": heads,
        "kv_heads": kv_heads,
        "vocab": config.count("vocab_size"),
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "rope": rope_fields(config),
        **activation_fields(config, "activation", "gelu", PLAIN),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "position": "alibi" if config.flag("alibi", False) else "rope",
        "parallel_block": parallel,
        "norms_per_layer": norms,
    }


def _opt(config: ConfigFields) -> Fields:
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    if config.count("word_embed_proj_dim", hidden) != hidden:
        raise config.fail(
            "word_embed_proj_dim", "only a token table as wide as hidden_size is supported"
        )
    if not config.flag("do_layer_norm_before", True):
        raise config.fail("do_layer_norm_before", "only norms before the blocks are supported")
    return layer_norm_decoder(bias=config.flag("enable_bias", True)) | {
        "layers": config.layers(),
        "hidden": hidden,
        "ffn_hidden": config.count("ffn_dim"),
        "heads": heads,
        "kv_heads": heads,
        "vocab": config.count("vocab_size"),
        **activation_fields(config, "activation_function", "relu", PLAIN),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "position": "learned",
        # OPT keeps two unused rows before the first position.
        "max_positions": config.count("max_position_embeddings", 2048) + 2,
    }


FAMILIES: dict[str, Callable[[ConfigFields], Fields]] = {
    "llama": _llama,
    "llama4": llama4_fields,
    "llama4_text": llama4_fields,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": qwen2_fields,
    "qwen2_moe": qwen2_moe_fields,
    "qwen3": qwen3_fields,
    "qwen3_moe": qwen3_moe_fields,
    "qwen3_next": qwen3_next_fields,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _deepseek_v32,
    "kimi_k2": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "phi3": _phi3,
    "gemma2": gemma2_fields,
    "gemma3": gemma3_fields,
    "gemma3_text": gemma3_fields,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "opt": _opt,
    "nemotron_h": nemotron_h_fields,
    "mamba2": mamba2_fields,
    "mamba": mamba1_fields,
    "falcon_mamba": mamba1_fields,
    "jamba": jamba_fields,
    "falcon_h1": falcon_h1_fields,
    "bamba": bamba_fields,
    "granitemoehybrid": granite_hybrid_fields,
}
"""By `model_type`."""
