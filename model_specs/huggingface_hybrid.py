"""How the families with Mamba in config.json map to fields of a ModelSpec.

Field names and defaults were read in transformers 5 (models/nemotron_h, mamba2, falcon_h1, bamba,
granitemoehybrid, jamba, mamba and falcon_mamba, configuration_*.py).
"""

from __future__ import annotations

from meshwright.model_specs.config_fields import (
    BIASES,
    DECODER,
    HEADS,
    MOST_LAYERS,
    PLAIN,
    SIZES,
    SMALLER_EPSILON,
    ConfigFields,
    Fields,
    Part,
    Record,
    activation,
    boolean,
    integer,
    only,
    read_fields,
    real,
    rope,
    routed_experts,
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
_NO_MAMBA1_BIAS = "biases on the projections of Mamba-1 are not supported"
_NO_MAMBA2_BIAS = "biases on the projections of Mamba-2 are not supported"
_SCALES = "multipliers of the config.json, which change no price, are left out"


_MAMBA_MODEL: Record = {
    **SIZES,
    "hybrid_pattern": lambda config: "M" * config.layers(),
    "norms_per_layer": 1,
    "ffn_hidden": 0,
    "position": "none",
    "norm_epsilon": real("layer_norm_epsilon", 1e-5),
}
"""What models share that are Mamba alone, or nearly."""


def _pattern_fields(pattern: str) -> Fields:
    return {"layers": len(pattern), "hybrid_pattern": pattern, "norms_per_layer": 1}


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


_NEMOTRON_H: Record = {
    **_MAMBA_MODEL,
    "layers": lambda config: len(_pattern(config)),
    "hybrid_pattern": _pattern,
    "kv_heads": integer("num_key_value_heads", HEADS),
    "head_dim": integer("head_dim", integer("attention_head_dim", 128)),
    **BIASES,
    "mlp_bias": boolean("mlp_bias", False),
    **activation("mlp_hidden_act", "relu2", PLAIN),
}
_NEMOTRON_MAMBA: Record = {
    "heads": integer("mamba_num_heads"),
    "head_dim": integer("mamba_head_dim"),
    "state_dim": integer("ssm_state_size"),
    "groups": integer("n_groups", 8),
    "conv_kernel": integer("conv_kernel", 4),
    "conv_bias": boolean("use_conv_bias", True),
    "chunk": integer("chunk_size", 128),
}
_NEMOTRON_EXPERTS: Record = {
    **routed_experts("n_routed_experts", None, None, "moe_intermediate_size"),
    "shared_experts": integer("n_shared_experts", 1, least=0),
    "router_score": "sigmoid",
    "router_bias": True,
    "router_normalized": boolean("norm_topk_prob", True),
    "router_scaling_factor": real("routed_scaling_factor", 1.0),
}


def _nemotron_h(config: ConfigFields) -> Fields:
    """Nemotron-H and Nemotron 3: one block a layer, by a pattern; attention knows no positions."""
    pattern = _pattern(config)
    mamba = read_fields(config, _NEMOTRON_MAMBA)
    return {
        "ffn_hidden": config.count("intermediate_size") if "-" in pattern else 0,
        "mamba": mamba if "M" in pattern else None,
        "moe": _nemotron_experts(config) if "E" in pattern else None,
    }


def _nemotron_experts(config: ConfigFields) -> Fields:
    if config.has("moe_latent_size"):
        what = "experts that work on a projection of the hidden width are not supported"
        raise config.fail("moe_latent_size", what)
    groups = config.count("n_group", 1)
    config.passed_over("topk_group", "intermediate_size")
    moe = read_fields(config, _NEMOTRON_EXPERTS)
    if moe["shared_experts"]:
        moe["shared_ffn_hidden"] = config.count("moe_shared_expert_intermediate_size")
    if groups > 1:
        moe |= {
            "router_groups": groups,
            "router_groups_per_token": config.count("topk_group", 1),
        }
    return moe


# Attention does not occur in Mamba alone: heads of Mamba-2 are for frameworks that ask for some.

_MAMBA2_HEADS = integer("num_heads")
_MAMBA2_WIDTH = integer("head_dim", 64)
_MAMBA2: Record = {
    **_MAMBA_MODEL,
    "heads": _MAMBA2_HEADS,
    "kv_heads": _MAMBA2_HEADS,
    "head_dim": _MAMBA2_WIDTH,
    "mamba": {
        "heads": _MAMBA2_HEADS,
        "head_dim": _MAMBA2_WIDTH,
        "state_dim": integer("state_size", 128),
        "groups": integer("n_groups", 8),
        "conv_kernel": integer("conv_kernel", 4),
        "conv_bias": boolean("use_conv_bias", True),
        "chunk": integer("chunk_size", 256),
        "gated_norm": boolean("rms_norm", True),
    },
}


def _mamba_fields(config: ConfigFields, width: int) -> Fields:
    """Mamba-2 as Falcon-H1, Bamba and Granite name it; `width` is that of all heads."""
    no_bias = only("mamba_proj_bias", False, _NO_MAMBA2_BIAS)
    heads = config.count("mamba_n_heads", 128)
    if width % heads:
        raise config.fail("mamba_n_heads", f"must divide the width {width} of Mamba-2", heads)
    record: Record = {
        "heads": heads,
        "head_dim": width // heads,
        "state_dim": integer("mamba_d_state", 256),
        "groups": integer("mamba_n_groups", 1),
        "conv_kernel": integer("mamba_d_conv", 4),
        "conv_bias": boolean("mamba_conv_bias", True),
        "chunk": integer("mamba_chunk_size", 256),
    }
    return read_fields(config, no_bias, record)


def _expanded(config: ConfigFields) -> int:
    """Width of all heads or channels of Mamba."""
    return config.count("mamba_expand", 2) * config.count("hidden_size")


def _falcon_h1(config: ConfigFields) -> Fields:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, then a feed-forward."""
    width = config.count("mamba_d_ssm", optional=True)
    mamba = _mamba_fields(config, _expanded(config) if width is None else width)
    mamba["gated_norm"] = config.flag("mamba_rms_norm", False)
    return {"mamba": mamba, "mamba_beside_attention": True, "attention_note": _SCALES}


def _bamba(config: ConfigFields) -> Fields:
    """Bamba: Mamba-2 or attention and then a feed-forward, two blocks of a pattern for each of its layers."""
    attending = config.entries("attn_layer_indices")
    mixers = "".join("*" if layer in attending else "M" for layer in range(config.layers()))
    return _two_blocks(config, mixers, "-")


def _two_blocks(config: ConfigFields, mixers: str, feed_forward: str) -> Fields:
    """A pattern of layers that have a mixer, Mamba-2 or attention, and a feed-forward each."""
    width = _expanded(config)
    mamba = _mamba_fields(config, width) if "M" in mixers else None
    pattern = "".join(mixer + feed_forward for mixer in mixers)
    return {**_pattern_fields(pattern), "mamba": mamba}


_GRANITE_EXPERTS: Record = {
    "experts": integer("num_local_experts", 8, least=0),
    "top_k": integer("num_experts_per_tok", 2, least=0),
    "moe_ffn_hidden": integer("intermediate_size"),
    "shared_experts": 1,
    "shared_ffn_hidden": integer("shared_intermediate_size", 1024),
}
_GRANITE_SCALES: Record = {
    "embedding_scale": real("embedding_multiplier", 1.0),
    "output_scale": lambda config: 1.0 / config.number("logits_scaling", 1.0),
    "attention_scale": real("attention_multiplier"),
}


def _granite_hybrid(config: ConfigFields) -> Fields:
    """Granite 4.0-H: Mamba-2 or attention and then experts beside a shared one, or the shared one alone."""
    kinds = config.entries("layer_types") or ["mamba"] * config.layers()
    if len(kinds) != config.layers() or not set(map(str, kinds)) <= {"mamba", "attention"}:
        raise config.fail("layer_types", "must name mamba or attention for every layer", kinds)
    mixers = "".join(_BLOCKS[str(kind)] for kind in kinds)
    moe = read_fields(config, _GRANITE_EXPERTS)
    rotary = config.text("position_embedding_type", "none") == "rope"
    return {
        **_two_blocks(config, mixers, "E" if moe["experts"] else "-"),
        "ffn_hidden": 0 if moe["experts"] else moe["shared_ffn_hidden"],
        "position": "rope" if rotary else "none",
        "moe": moe if moe["experts"] else None,
    }


_JAMBA_MAMBA: Record = {
    "channels": _expanded,
    "step_rank": lambda config: _step_rank(config, "mamba_dt_rank"),
    "state_dim": integer("mamba_d_state", 16),
    "conv_kernel": integer("mamba_d_conv", 4),
    "conv_bias": boolean("mamba_conv_bias", True),
    "inner_norms": True,
}
_JAMBA_EXPERTS: Record = {**routed_experts("num_experts", 16, 2), "router_normalized": False}


def _jamba(config: ConfigFields) -> Fields:
    """Jamba: Mamba-1 or attention and then a feed-forward or experts, each placed by period and offset."""
    moe, mamba = (read_fields(config, record) for record in (_JAMBA_EXPERTS, _JAMBA_MAMBA))
    attends = _periodic(config, "attn_layer", 8, 4)
    has_experts = config.count("num_experts", 16) > 1
    routes = _periodic(config, "expert_layer", 2, 1) if has_experts else [False] * len(attends)
    pairs = zip(attends, routes, strict=True)
    pattern = "".join(("*" if full else "M") + ("E" if routed else "-") for full, routed in pairs)
    return {
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


# Mamba and Falcon-Mamba, whose norms of step, B and C have no weights.

_MAMBA: Record = {
    **_MAMBA_MODEL,
    "heads": 1,
    "kv_heads": 1,
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "mamba1": {
        "channels": lambda config: config.count(
            "intermediate_size", config.count("expand", 2) * config.count("hidden_size")
        ),
        "step_rank": lambda config: _step_rank(config, "time_step_rank"),
        "state_dim": integer("state_size", 16),
        "conv_kernel": integer("conv_kernel", 4),
        "conv_bias": boolean("use_conv_bias", True),
    },
}

# Parts of the families, refusals first.

_HALF_ROPE: Record = {**DECODER, **SMALLER_EPSILON, "rope": rope(fraction=0.5)}
_FALCON_H1: Record = {
    **DECODER,
    **SMALLER_EPSILON,
    **BIASES,
    "mlp_bias": boolean("mlp_bias", False),
}
NEMOTRON_H: tuple[Part, ...] = (
    only("use_bias", False, _NO_MAMBA2_BIAS),
    only("mamba_proj_bias", False, _NO_MAMBA2_BIAS),
    only(
        "num_nextn_predict_layers",
        0,
        "is not supported beside Mamba-2: set it to 0",
        shows_value=False,
    ),
    _NEMOTRON_H,
    _nemotron_h,
)
MAMBA2: tuple[Part, ...] = (only("use_bias", False, _NO_MAMBA2_BIAS), _MAMBA2)
MAMBA: tuple[Part, ...] = (only("use_bias", False, _NO_MAMBA1_BIAS), _MAMBA)
FALCON_H1: tuple[Part, ...] = (
    only("projectors_bias", False, "biases on projections are not supported"),
    _FALCON_H1,
    _falcon_h1,
)
BAMBA: tuple[Part, ...] = (_HALF_ROPE, _bamba)
GRANITE_HYBRID: tuple[Part, ...] = (DECODER, BIASES, _GRANITE_SCALES, _granite_hybrid)
JAMBA: tuple[Part, ...] = (only("mamba_proj_bias", False, _NO_MAMBA1_BIAS), DECODER, _jamba)
