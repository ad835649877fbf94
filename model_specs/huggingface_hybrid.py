"""How the families with Mamba in config.json map to fields of a ModelSpec.

Field names and defaults were read in transformers 5 (models/nemotron_h, mamba2, falcon_h1, bamba,
granitemoehybrid, jamba, mamba and falcon_mamba, configuration_*.py).
"""

from __future__ import annotations

from meshwright.model_specs.config_fields import (
    MOST_LAYERS,
    PLAIN,
    ConfigFields,
    Fields,
    activation_fields,
    attention_biases,
    gated_decoder,
    rope_fields,
)

_BLOCKS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Symbols of a hybrid pattern by the names of `layers_block_type`."""
_SCALES = "multipliers of the config.json, which change no price, are left out"


def nemotron_h_fields(config: ConfigFields) -> Fields:
    """Nemotron-H and Nemotron 3: one block a layer, by a pattern; attention knows no positions."""
    pattern = _pattern(config)
    for name in ("use_bias", "mamba_proj_bias"):
        if config.flag(name, False):
            raise config.fail(name, "biases on the projections of Mamba-2 are not supported", True)
    if config.count("num_nextn_predict_layers", 0, least=0):
        raise config.fail(
            "num_nextn_predict_layers", "is not supported beside Mamba-2: set it to 0"
        )
    heads = config.count("num_attention_heads")
    mamba = {
        "heads": config.count("mamba_num_heads"),
        "head_dim": config.count("mamba_head_dim"),
        "state_dim": config.count("ssm_state_size"),
        "groups": config.count("n_groups", 8),
        "conv_kernel": config.count("conv_kernel", 4),
        "conv_bias": config.flag("use_conv_bias", True),
        "chunk": config.count("chunk_size", 128),
    }
    return {
        **_pattern_fields(pattern),
        "hidden": config.count("hidden_size"),
        "ffn_hidden": config.count("intermediate_size") if "-" in pattern else 0,
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "head_dim": config.count("head_dim", config.count("attention_head_dim", 128)),
        "vocab": config.count("vocab_size"),
        "position": "none",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        **attention_biases(config),
        "mlp_bias": config.flag("mlp_bias", False),
        **activation_fields(config, "mlp_hidden_act", "relu2", PLAIN),
        "mamba": mamba if "M" in pattern else None,
        "moe": _nemotron_experts(config) if "E" in pattern else None,
    }


def _pattern(config: ConfigFields) -> str:
    """One symbol a layer, of `hybrid_override_pattern` or `layers_block_type`."""
    kinds = config.entries("layers_block_type")
    # The pattern alone counts (configuration_nemotron_h.py).
    config.passed_over("num_hidden_layers")
    if not kinds:
        pattern = config.text("hybrid_override_pattern", "")
        if not pattern or not set(pattern) <= set("M*-E") or len(pattern) > MOST_LAYERS:
            what = f"must be 1 to {MOST_LAYERS} of M, *, - and E, a symbol for each layer"
            raise config.fail("hybrid_override_pattern", what, pattern)
        return pattern
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _BLOCKS:
            raise config.fail("layers_block_type", f"must list {', '.join(_BLOCKS)}", kind)
    return "".join(_BLOCKS[str(kind)] for kind in kinds)


def _pattern_fields(pattern: str) -> Fields:
    return {"layers": len(pattern), "hybrid_pattern": pattern, "norms_per_layer": 1}


def _nemotron_experts(config: ConfigFields) -> Fields:
    if config.has("moe_latent_size"):
        what = "experts that work on a projection of the hidden width are not supported"
        raise config.fail("moe_latent_size", what)
    groups = config.count("n_group", 1)
    config.passed_over("topk_group", "intermediate_size")
    experts: Fields = {
        "experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "moe_ffn_hidden": config.count("moe_intermediate_size"),
        "shared_experts": config.count("n_shared_experts", 1, least=0),
        "router_score": "sigmoid",
        "router_bias": True,
        "router_normalized": config.flag("norm_topk_prob", True),
        "router_scaling_factor": config.number("routed_scaling_factor", 1.0),
    }
    if experts["shared_experts"]:
        experts["shared_ffn_hidden"] = config.count("moe_shared_expert_intermediate_size")
    if groups > 1:
        experts["router_groups"] = groups
        experts["router_groups_per_token"] = config.count("topk_group", 1)
    return experts


def mamba2_fields(config: ConfigFields) -> Fields:
    """Mamba-2 alone. Without attention, heads are those of Mamba-2, for frameworks that ask for some."""
    layers = config.layers()
    if config.flag("use_bias", False):
        raise config.fail(
            "use_bias", "biases on the projections of Mamba-2 are not supported", True
        )
    heads, width = config.count("num_heads"), config.count("head_dim", 64)
    return {
        **_pattern_fields("M" * layers),
        "hidden": config.count("hidden_size"),
        "ffn_hidden": 0,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width,
        "vocab": config.count("vocab_size"),
        "position": "none",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "mamba": {
            "heads": heads,
            "head_dim": width,
            "state_dim": config.count("state_size", 128),
            "groups": config.count("n_groups", 8),
            "conv_kernel": config.count("conv_kernel", 4),
            "conv_bias": config.flag("use_conv_bias", True),
            "chunk": config.count("chunk_size", 256),
            "gated_norm": config.flag("rms_norm", True),
        },
    }


def falcon_h1_fields(config: ConfigFields) -> Fields:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, then a feed-forward."""
    if config.flag("projectors_bias", False):
        raise config.fail("projectors_bias", "biases on projections are not supported", True)
    width = config.count("mamba_d_ssm", optional=True)
    if width is None:
        width = config.count("mamba_expand", 2) * config.count("hidden_size")
    mamba = _mamba_fields(config, width)
    mamba["gated_norm"] = config.flag("mamba_rms_norm", False)
    return {
        **gated_decoder(config, norm_epsilon=1e-5),
        **attention_biases(config),
        "mlp_bias": config.flag("mlp_bias", False),
        "mamba": mamba,
        "mamba_beside_attention": True,
        "attention_note": _SCALES,
    }


def _mamba_fields(config: ConfigFields, width: int) -> Fields:
    """Mamba-2 as Falcon-H1, Bamba and Granite name it; `width` is that of all heads."""
    if config.flag("mamba_proj_bias", False):
        what = "biases on the projections of Mamba-2 are not supported"
        raise config.fail("mamba_proj_bias", what, True)
    heads = config.count("mamba_n_heads", 128)
    if width % heads:
        raise config.fail("mamba_n_heads", f"must divide the width {width} of Mamba-2", heads)
    return {
        "heads": heads,
        "head_dim": width // heads,
        "state_dim": config.count("mamba_d_state", 256),
        "groups": config.count("mamba_n_groups", 1),
        "conv_kernel": config.count("mamba_d_conv", 4),
        "conv_bias": config.flag("mamba_conv_bias", True),
        "chunk": config.count("mamba_chunk_size", 256),
    }


def bamba_fields(config: ConfigFields) -> Fields:
    """Bamba: Mamba-2 or attention and then a feed-forward, two blocks of a pattern for each of its layers."""
    layers, attending = config.layers(), config.entries("attn_layer_indices")
    mixers = "".join("*" if layer in attending else "M" for layer in range(layers))
    width = config.count("mamba_expand", 2) * config.count("hidden_size")
    return {
        **gated_decoder(config, norm_epsilon=1e-5),
        **_two_blocks(mixers, "-"),
        "rope": rope_fields(config, fraction=0.5),
        "mamba": _mamba_fields(config, width) if "M" in mixers else None,
    }


def granite_hybrid_fields(config: ConfigFields) -> Fields:
    """Granite 4.0-H: Mamba-2 or attention and then experts beside a shared one, or the shared one alone."""
    kinds = config.entries("layer_types") or ["mamba"] * config.layers()
    if len(kinds) != config.layers() or not set(map(str, kinds)) <= {"mamba", "attention"}:
        raise config.fail("layer_types", "must name mamba or attention for every layer", kinds)
    mixers = "".join(_BLOCKS[str(kind)] for kind in kinds)
    width = config.count("mamba_expand", 2) * config.count("hidden_size")
    experts = config.count("num_local_experts", 8, least=0)
    shared = config.count("shared_intermediate_size", 1024)
    fields = gated_decoder(config)
    moe = {
        "experts": experts,
        "top_k": config.count("num_experts_per_tok", 2, least=0),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "shared_experts": 1,
        "shared_ffn_hidden": shared,
    }
    rotary = config.text("position_embedding_type", "none") == "rope"
    return {
        **fields,
        **_two_blocks(mixers, "E" if experts else "-"),
        **attention_biases(config),
        "ffn_hidden": 0 if experts else shared,
        "position": "rope" if rotary else "none",
        "moe": moe if experts else None,
        "mamba": _mamba_fields(config, width) if "M" in mixers else None,
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "output_scale": 1.0 / config.number("logits_scaling", 1.0),
        "attention_scale": config.number("attention_multiplier"),
    }


def _two_blocks(mixers: str, feed_forward: str) -> Fields:
    """A pattern of layers that have a mixer and a feed-forward each."""
    return _pattern_fields("".join(mixer + feed_forward for mixer in mixers))


def jamba_fields(config: ConfigFields) -> Fields:
    """Jamba: Mamba-1 or attention and then a feed-forward or experts, each placed by period and offset."""
    if config.flag("mamba_proj_bias", False):
        what = "biases on the projections of Mamba-1 are not supported"
        raise config.fail("mamba_proj_bias", what, True)
    experts = config.count("num_experts", 16)
    attends = _periodic(config, "attn_layer", 8, 4)
    routes = _periodic(config, "expert_layer", 2, 1) if experts > 1 else [False] * len(attends)
    pairs = zip(attends, routes, strict=True)
    pattern = "".join(("*" if full else "M") + ("E" if moe else "-") for full, moe in pairs)
    moe = {
        "experts": experts,
        "top_k": config.count("num_experts_per_tok", 2),
        "moe_ffn_hidden": config.count("intermediate_size"),
        "router_normalized": False,
    }
    width = config.count("mamba_expand", 2) * config.count("hidden_size")
    mamba = {
        "channels": width,
        "step_rank": _step_rank(config, "mamba_dt_rank"),
        "state_dim": config.count("mamba_d_state", 16),
        "conv_kernel": config.count("mamba_d_conv", 4),
        "conv_bias": config.flag("mamba_conv_bias", True),
        "inner_norms": True,
    }
    return {
        **gated_decoder(config),
        **_pattern_fields(pattern),
        "position": "none",
        "mamba1": mamba if "M" in pattern else None,
        "moe": moe if "E" in pattern else None,
    }


def _periodic(config: ConfigFields, name: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is one of those that `name`_period and `name`_offset count."""
    period = config.count(f"{name}_period", period)
    offset = config.count(f"{name}_offset", offset, least=0)
    if offset >= period:
        raise config.fail(f"{name}_offset", f"must be below {name}_period {period}", offset)
    return [layer % period == offset for layer in range(config.layers())]


def _step_rank(config: ConfigFields, name: str) -> int:
    """Rank of the step sizes: a sixteenth of the hidden width, rounded up, where the file says "auto"."""
    if config.is_text(name) and config.text(name, "auto") == "auto":
        return -(-config.count("hidden_size") // 16)
    return config.count(name, -(-config.count("hidden_size") // 16))


def mamba1_fields(config: ConfigFields) -> Fields:
    """Mamba and Falcon-Mamba, whose norms of step, B and C have no weights; attention does not occur."""
    if config.flag("use_bias", False):
        what = "biases on the projections of Mamba-1 are not supported"
        raise config.fail("use_bias", what, True)
    hidden = config.count("hidden_size")
    width = config.count("intermediate_size", config.count("expand", 2) * hidden)
    return {
        **_pattern_fields("M" * config.layers()),
        "hidden": hidden,
        "ffn_hidden": 0,
        "heads": 1,
        "kv_heads": 1,
        "vocab": config.count("vocab_size"),
        "position": "none",
        "norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "mamba1": {
            "channels": width,
            "step_rank": _step_rank(config, "time_step_rank"),
            "state_dim": config.count("state_size", 16),
            "conv_kernel": config.count("conv_kernel", 4),
            "conv_bias": config.flag("use_conv_bias", True),
        },
    }
