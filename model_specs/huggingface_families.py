"""How each Hugging Face model family maps to a ModelSpec.

A family is a list of parts: records of which key each field is read from, and functions where fields depend
on one another. Defaults are those of the family's configuration class in huggingface/transformers, for
published files leave out what equals the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.model_specs.blocks import LINEAR, order_fields
from meshwright.model_specs.config_fields import (
    ALL_BIASES,
    BIASES,
    DECODER,
    DECODER_1E5,
    GATED,
    HEADS,
    LARGEST_COUNT,
    MOST_LAYERS,
    PLAIN,
    SIGMOID,
    SIZES,
    SMALLER_EPSILON,
    ConfigFields,
    FieldReader,
    Fields,
    Part,
    Parts,
    Reader,
    Record,
    absent,
    activation,
    biases,
    boolean,
    full_layers,
    integer,
    layer_norms,
    only,
    read_fields,
    real,
    rope,
    rope_fields,
    rope_scaling,
    routed_experts,
    string,
    window_everywhere,
    window_length,
    window_order,
    windows,
)

# How the families with Mamba in config.json map to fields of a ModelSpec.
#
# Field names and defaults were read in transformers 5 (models/nemotron_h, mamba2, falcon_h1, bamba,
# granitemoehybrid, jamba, mamba and falcon_mamba, configuration_*.py).


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


def _pattern(
    config: ConfigFields, text: str = "hybrid_override_pattern", listed: str = "layers_block_type"
) -> str:
    """One symbol a layer, of the field `text` or the list of names `listed`."""
    kinds = config.entries(listed)
    # The pattern alone counts (configuration_nemotron_h.py).
    config.passed_over("num_hidden_layers")
    if not kinds:
        pattern = config.text(text, "")
        if not pattern or not set(pattern) <= set("M*-E") or len(pattern) > MOST_LAYERS:
            what = f"must be 1 to {MOST_LAYERS} of M, *, - and E, a symbol for each layer"
            raise config.fail(text, what, pattern)
        return pattern
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _BLOCKS:
            raise config.fail(listed, f"must list {', '.join(_BLOCKS)}", kind)
    return "".join(_BLOCKS[str(kind)] for kind in kinds)


_NEMOTRON_H: Record = {
    **_MAMBA_MODEL,
    "layers": lambda config: len(_pattern(config)),
    "hybrid_pattern": _pattern,
    "kv_heads": integer("num_key_value_heads", HEADS),
    "head_dim": integer("head_dim", integer("attention_head_dim", 128)),
    **ALL_BIASES,
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


_OF_EXPERTS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)


def _nemotron_h(config: ConfigFields) -> Fields:
    """Nemotron-H and Nemotron 3: one block a layer, by a pattern; attention knows no positions."""
    pattern = _pattern(config)
    of_modules = "mtp_hybrid_override_pattern", "mtp_layers_block_type"
    modules = config.count("num_nextn_predict_layers", 0, least=0)
    config.passed_over(*of_modules)
    if "E" not in pattern:
        config.passed_over(*_OF_EXPERTS)
    mamba = read_fields(config, _NEMOTRON_MAMBA)
    return {
        "mtp_layers": modules,
        "mtp_pattern": _pattern(config, *of_modules) if modules else None,
        "ffn_hidden": config.count("intermediate_size") if "-" in pattern else 0,
        "mamba": mamba if "M" in pattern else None,
        "moe": _nemotron_experts(config) if "E" in pattern else None,
    }


def _nemotron_experts(config: ConfigFields) -> Fields:
    config.passed_over("topk_group", "intermediate_size")
    moe = read_fields(config, _NEMOTRON_EXPERTS, lambda each: _groups(each, 1))
    latent = config.count("moe_latent_size", optional=True)
    if latent is not None:
        moe["latent_size"] = latent
    if moe["shared_experts"]:
        moe["shared_ffn_hidden"] = config.count("moe_shared_expert_intermediate_size")
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
    "output_scale": lambda config: _one_over(config, "logits_scaling"),
    "attention_scale": real("attention_multiplier"),
}


def _one_over(config: ConfigFields, name: str) -> float:
    number = config.number(name, 1.0)
    if number <= 0:
        raise config.fail(name, "must be above 0", number)
    return 1.0 / number


def _granite_hybrid(config: ConfigFields) -> Fields:
    """Granite 4.0-H: Mamba-2 or attention and then experts beside a shared one, or the shared one alone."""
    kinds = config.entries("layer_types") or ["mamba"] * config.layers()
    mixers = "".join(_BLOCKS.get(str(kind), "?") for kind in kinds)
    if len(kinds) != config.layers() or not set(mixers) <= {"M", "*"}:
        raise config.fail("layer_types", "must name mamba or attention for every layer", kinds)
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

_HALF_ROPE: Record = {**DECODER_1E5, "rope": rope(fraction=0.5)}
_FALCON_H1: Record = {
    **DECODER_1E5,
    **ALL_BIASES,
}
NEMOTRON_H: Parts = (
    only("use_bias", False, _NO_MAMBA2_BIAS),
    only("mamba_proj_bias", False, _NO_MAMBA2_BIAS),
    _NEMOTRON_H,
    _nemotron_h,
)
MAMBA2: Parts = (only("use_bias", False, _NO_MAMBA2_BIAS), _MAMBA2)
MAMBA: Parts = (only("use_bias", False, _NO_MAMBA1_BIAS), _MAMBA)
FALCON_H1: Parts = (
    only("projectors_bias", False, "biases on projections are not supported"),
    _FALCON_H1,
    _falcon_h1,
)
BAMBA: Parts = (_HALF_ROPE, _bamba)
GRANITE_HYBRID: Parts = (DECODER, BIASES, _GRANITE_SCALES, _granite_hybrid)
JAMBA: Parts = (only("mamba_proj_bias", False, _NO_MAMBA1_BIAS), DECODER, _jamba)


# Gemma: norms after the blocks too, capped logits, and windows of which the third generation's turn by a
# base of their own.

_GEMMA: Record = {
    **DECODER,
    "head_dim": integer("head_dim", 256),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "norms_per_layer": 4,
    "norm_zero_centered": True,
    "embedding_scale": lambda config: config.count("hidden_size") ** 0.5,
    **activation("hidden_activation", "gelu_pytorch_tanh", GATED),
    **BIASES,
}
_GEMMA1: Record = {**_GEMMA, "norms_per_layer": 2, **activation("hidden_act", "gelu", GATED)}
_GEMMA2: Record = {
    **_GEMMA,
    "attention_logit_cap": real("attn_logit_softcapping", 50.0),
    "final_logit_cap": real("final_logit_softcapping", 30.0),
}
# Files of multimodal Gemma 3 name only what differs from the defaults.
_GEMMA3: Record = {
    **_GEMMA,
    "heads": integer("num_attention_heads", 8),
    "kv_heads": integer("num_key_value_heads", 4),
    "vocab": integer("vocab_size", 262_208),
    "qk_norm": True,
    "rope": lambda config: {
        "windowed_base": config.number("rope_local_base_freq", 10_000),
        **rope_fields(config, base=1e6),
    },
    "attention_logit_cap": real("attn_logit_softcapping"),
    "final_logit_cap": real("final_logit_softcapping"),
}


def _gemma_scale(config: ConfigFields) -> Fields:
    """The factor on attention scores, where it is not that of the width of a head."""
    scalar = config.number("query_pre_attn_scalar", 256)
    if scalar > 0 and scalar != config.count("head_dim", 256):
        return {"attention_scale": scalar**-0.5}
    return {}


def _gemma3_windows(config: ConfigFields) -> Fields:
    pattern = config.count("_sliding_window_pattern", config.count("sliding_window_pattern", 6))
    return windows(config, 4096, pattern)


# Gemma 4: layers that attend in full have heads of their own, and experts stand beside the feed-forward of
# every layer, which is a shared expert here (models/gemma4 and gemma4_unified, modeling_*.py).


def _gemma4_rope(config: ConfigFields) -> Fields:
    """Rotary embeddings of either kind of layer: by default a quarter of wide heads turns"""
    parameters = config.section("rope_parameters")
    windowed = None if parameters is None else parameters.section("sliding_attention")
    fields: Fields = {"windowed_base": 1e4, "windowed_fraction": 1.0}
    if parameters is None:
        fields["scaling"] = {"type": "proportional"}
    elif windowed is not None:
        windowed.passed_over("rope_type")
        fields["windowed_fraction"] = windowed.number("partial_rotary_factor", 1.0)
    fraction = 0.25 if parameters is None else 1.0
    return fields | rope_fields(config, base=1e6, fraction=fraction)


_GEMMA4: Record = {
    **_GEMMA,
    "hidden": integer("hidden_size", 2304),
    "ffn_hidden": integer("intermediate_size", 9216),
    "heads": integer("num_attention_heads", 8),
    "kv_heads": integer("num_key_value_heads", 4),
    "vocab": integer("vocab_size", 262_144),
    "rope": _gemma4_rope,
    "norm_zero_centered": False,
    "embedding_scale": lambda config: config.count("hidden_size", 2304) ** 0.5,
    "qk_norm": True,
    "value_norm": True,
    "attention_scale": 1.0,
    "final_logit_cap": real("final_logit_softcapping"),
}


def _gemma4_heads(config: ConfigFields, window: int) -> Fields:
    """Heads of either kind of layer, and the window, by default so long; the last layer attends in full."""
    window = config.count("sliding_window", window)
    usual = [(i + 1) % 6 == 0 for i in range(config.layers())]
    full = _full_layers(config, "sliding_attention", usual)
    full[-1] = True
    width, kv_heads = config.count("head_dim", 256), config.count("num_key_value_heads", 4)
    are_keys = config.flag("attention_k_eq_v", False)
    global_width, global_kv_heads = _gemma4_global_heads(config, full, are_keys)
    fields: Fields = {"kv_heads": global_kv_heads, "head_dim": global_width}
    if all(full):
        if are_keys:
            raise config.fail(
                "attention_k_eq_v", "is supported beside layers with a window alone", True
            )
        return fields
    fields |= window_order(config, window, full)
    fields |= _gemma4_reuse(config, full)
    if (kv_heads, width) != (global_kv_heads, global_width) or are_keys:
        windowed = {"kv_heads": kv_heads, "head_dim": width}
        fields |= {"window_heads": windowed, "values_are_keys": are_keys}
    return fields


def _gemma4_reuse(config: ConfigFields, full: list[bool]) -> Fields:
    """The last layers, which reuse keys and values, and the width of their feed-forward."""
    reusing = config.count("num_kv_shared_layers", 0, least=0)
    wide = config.flag("use_double_wide_mlp", False)
    if not reusing:
        return {}
    first = len(full) - reusing
    if first < 1 or set(full[first:]) - set(full[:first]):
        what = "must leave a layer of each kind that makes keys and values"
        raise config.fail("num_kv_shared_layers", what, reusing)
    order = "".join("F" if attends else "W" for attends in full)
    width = config.count("intermediate_size", 9216)
    return {
        "full_attention_every": 1,
        "attention_order": order[:first] + order[first:].lower(),
        "reusing_ffn_hidden": 2 * width if wide else None,
    }


def _gemma4_global_heads(config: ConfigFields, full: list[bool], are_keys: bool) -> tuple[int, int]:
    """Width and number of the heads of keys and values, in layers that attend in full.

    Files that transformers 5.2x has saved give them layer by layer, in `per_layer_config`.
    """
    kv_heads = config.count("num_key_value_heads", 4)
    layers = config.section("per_layer_config")
    if layers is None:
        width = config.count("global_head_dim", 512)
        number = config.count("num_global_key_value_heads", kv_heads)
        # Without `attention_k_eq_v` the file's number is not used.
        return width, number if are_keys else kv_heads
    heads = {
        (
            inner.count("head_dim", config.count("head_dim", 256)),
            inner.count("num_key_value_heads", kv_heads),
        )
        for _, inner in layers.sections()
    }
    numbers = {name.lstrip("0") or "0" for name, _ in layers.sections()}
    if len(heads) != 1 or numbers != {str(layer) for layer, attends in enumerate(full) if attends}:
        what = "must give all layers that attend in full, and no others, the same heads"
        raise config.fail("per_layer_config", what)
    return heads.pop()


def _gemma4_experts(config: ConfigFields) -> Fields:
    """Experts beside the feed-forward of every layer, whose weights add up to 1 before the scale of each."""
    config.passed_over("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.flag("enable_moe_block", False):
        return {}
    moe: Fields = {
        "experts": config.count("num_experts"),
        "top_k": config.count("top_k_experts"),
        "moe_ffn_hidden": config.count("moe_intermediate_size"),
        "shared_experts": 1,
        "shared_ffn_hidden": config.count("intermediate_size", 9216),
        "router_scales": True,
    }
    return {"moe": moe, "norms_per_layer": 7}


def _gemma4_refusals(config: ConfigFields) -> Fields:
    """Refuses attention that sees later positions."""
    if config.text("use_bidirectional_attention", "vision") != "vision":
        raise config.fail(
            "use_bidirectional_attention", "only causal attention to text is supported"
        )
    return {}


def _layer_tables(config: ConfigFields, default: int) -> Fields:
    """A token table for each layer; `default` is its width in a file that says nothing of it."""
    name, words = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
    width = 0 if config.names(name) and not config.has(name) else default
    width = config.count(name, width, least=0)
    vocab = config.count("vocab_size", 262_144)
    if config.count(words, vocab) != vocab and width:
        raise config.fail(words, f"only vocab_size {vocab} is supported", config.count(words))
    return {"layer_inputs": width, "norms_per_layer": 5} if width else {}


def _gemma4_parts(table_width: int, window: int) -> Parts:
    """What both kinds of files have in common, with what holds where they are silent."""
    return (
        _GEMMA4,
        lambda config: _layer_tables(config, table_width),
        _gemma4_refusals,
        lambda config: _gemma4_heads(config, window),
    )


# How Llama 4's config.json maps to a ModelSpec.
#
# Where three layers in four see their own chunk of the sequence alone, the fourth has no position embedding
# (`no_rope_layers` is 0 there): huggingface/transformers, modeling_llama4.py.


def _llama4_chunks(config: ConfigFields) -> Fields:
    """The length of chunks, and the layers that see the whole sequence: those without position embedding."""
    layers = config.layers()
    every = config.count("no_rope_layer_interval", 4)
    switches = config.entries("no_rope_layers")
    if switches and (len(switches) != layers or not set(map(str, switches)) <= {"0", "1"}):
        what = f"must list 0 or 1 for each of {layers} layers"
        raise config.fail("no_rope_layers", what, switches)
    turning = [bool(switch) for switch in switches]
    full = [not turns for turns in turning] or [(i + 1) % every == 0 for i in range(layers)]
    kinds = config.entries("layer_types")
    if kinds and full_layers(config, kinds, "chunked_attention") != full:
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
    window = window_order(config, chunk, full, "attention_chunk_size")
    return window | {"rope_in_windows_alone": bool(window), "chunked_windows": bool(window)}


def _layers_a_group(config: ConfigFields) -> int:
    """Layers of which the last has experts: `interleave_moe_layer_step`, or what `moe_layers` lists."""
    layers, step = config.layers(), config.count("interleave_moe_layer_step", 1)
    listed = config.entries("moe_layers")
    if not listed:
        return step
    every = layers // len(listed)
    if listed != list(range(every - 1, layers, every)) or layers % every:
        what = f"experts in each n-th of the {layers} layers are all that can be planned"
        raise config.fail("moe_layers", what)
    return every


_LLAMA4: Record = {
    **DECODER_1E5,
    "rope": rope(base=500_000),
    "head_dim": integer("head_dim", 128),
    "ffn_hidden": integer("intermediate_size_mlp", 16_384),
    "qk_norm": boolean("use_qk_norm", True),
    "qk_norm_weights": False,
    "moe": {
        **routed_experts("num_local_experts", 16, 1),
        "every": _layers_a_group,
        "shared_experts": 1,
        "router_score": "sigmoid",
        "router_normalized": False,
        "router_scales_inputs": True,
    },
    **BIASES,
}


# How the Qwen families of config.json map to fields of a ModelSpec.


_InFull = Callable[[int, int], bool]
"""Whether a layer, from 0, attends in full, given another number: all layers, or how many come first."""


def _qwen_window(config: ConfigFields) -> int | None:
    """The window, which is off by default."""
    if config.flag("use_sliding_window", False):
        return window_length(config, 4096)
    config.passed_over("sliding_window", "max_window_layers")
    return None


def _qwen_windows(config: ConfigFields) -> Fields:
    """The first `max_window_layers` layers attend in full, or those that are listed."""
    return _windows_behind(config, lambda layer, first: layer < first)


def _qwen2_moe_windows(config: ConfigFields) -> Fields:
    """Every second of the first `max_window_layers` layers is windowed: the first, the third and so on.

    huggingface/transformers, configuration_qwen2_moe.py.
    """
    return _windows_behind(config, lambda layer, first: layer % 2 == 1 or layer >= first)


def _windows_behind(config: ConfigFields, is_full: _InFull) -> Fields:
    window = _qwen_window(config)
    first = config.count("max_window_layers", 28, least=0)
    full = [window is None or is_full(layer, first) for layer in range(config.layers())]
    return _listed_windows(config, window, full, "max_window_layers")


def _listed_windows(
    config: ConfigFields, window: int | None, full: list[bool], name: str
) -> Fields:
    """The window and which layers attend in full: as `layer_types` lists, else `full`, which `name` says."""
    kinds = config.entries("layer_types")
    if kinds:
        return window_order(config, window, full_layers(config, kinds, "sliding_attention"))
    return window_order(config, window, full, name)


def _qwen_experts(config: ConfigFields) -> Fields | None:
    number = config.count("num_experts", least=0)
    placed = _qwen_dense_layers(config)
    if number == 0 or placed.get("dense_layers") == config.layers():
        return None
    moe = routed_experts("num_experts", None, None, "moe_intermediate_size")
    normalized = {"router_normalized": boolean("norm_topk_prob", False)}
    return read_fields(config, moe, placed, normalized)


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


def _qwen3_vl_experts(config: ConfigFields) -> Fields | None:
    """Routed experts, whose weights always add up to 1 (modeling_qwen3_vl_moe.py)."""
    config.passed_over("norm_topk_prob")
    moe = _qwen_experts(config)
    return moe and moe | {"router_normalized": True}


def _qwen3_omni_experts(config: ConfigFields) -> Fields | None:
    """As Qwen3's; no layer has a window or a shared expert, and all have norms, whatever the fields say."""
    config.passed_over(
        "sliding_window", "use_sliding_window", "shared_expert_intermediate_size", "use_qk_norm"
    )
    moe = _qwen_experts(config)
    return moe and moe | {"router_normalized": config.flag("norm_topk_prob", True)}


_QWEN2: Record = {**DECODER, "attention_bias": True}
_QWEN3: Record = {**DECODER, "head_dim": integer("head_dim", 128), "qk_norm": True, **BIASES}
# Of models with experts heads are as wide as the hidden width leaves (configuration_qwen3_moe.py).
_QWEN3_MOE: Record = {**_QWEN3, "head_dim": integer("head_dim", optional=True)}


def _qwen_shared(width: int | None) -> Record:
    """A shared expert behind a gate."""
    return {
        "shared_experts": 1,
        "shared_ffn_hidden": integer("shared_expert_intermediate_size", width),
        "shared_expert_gate": True,
    }


def _qwen2_experts(config: ConfigFields) -> Fields:
    """Routed experts, and shared ones behind a gate; biases by a key, where there are experts."""
    moe = _qwen_experts(config)
    if moe is None:
        return {}
    bias = config.flag("qkv_bias", True)
    return {"attention_bias": bias, "moe": moe | read_fields(config, _qwen_shared(None))}


def _qwen3_moe_windows(config: ConfigFields) -> Fields:
    """A window covers every layer (modeling_qwen3_moe.py, `mask_function`)."""
    config.passed_over("max_window_layers")
    return window_everywhere(config, _qwen_window(config))


# Mellum 2: Qwen3 with experts, layers in an order of their own, and rotary embeddings by kind of layer.

_MELLUM: Record = {
    **_QWEN3,
    "rope": rope(base=5e5),
    "mtp_layers": integer("num_nextn_predict_layers", 0, least=0),
}


def _mellum(config: ConfigFields) -> Fields:
    full = [True] * config.layers()
    order = _listed_windows(config, window_length(config, 1024), full, "sliding_window")
    experts: Record = {
        **routed_experts("num_experts", 64, 8, "moe_intermediate_size"),
        "router_normalized": boolean("norm_topk_prob", True),
    }
    return order | _experts_behind(config, _experts_listed(config, 0), experts)


def _qwen3_next_experts(config: ConfigFields) -> Fields | None:
    moe = _qwen_experts(config)
    if moe is None:
        return None
    normalized = {"router_normalized": boolean("norm_topk_prob", True)}
    return moe | read_fields(config, _qwen_shared(512), normalized)


def _qwen3_next_order(config: ConfigFields) -> Fields:
    _qwen_window(config)
    if not config.flag("attn_output_gate", True):
        raise config.fail("attn_output_gate", "only true is supported: a gate on the output", False)
    every = config.count("full_attention_interval", 4)
    kinds = config.entries("layer_types")
    if kinds:
        return order_fields(full_layers(config, kinds, "linear_attention"), LINEAR)
    return {"full_attention_every": every}


_DELTA_NET: Record = {
    "key_heads": integer("linear_num_key_heads", 16),
    "value_heads": integer("linear_num_value_heads", 32),
    "key_head_dim": integer("linear_key_head_dim", 128),
    "value_head_dim": integer("linear_value_head_dim", 128),
    "conv_kernel": integer("linear_conv_kernel_dim", 4),
}
_QWEN3_NEXT: Record = {
    **DECODER,
    "head_dim": integer("head_dim", 256),
    "rope": rope(fraction=0.25),
    "qk_norm": True,
    "norm_zero_centered": True,
    "attention_output_gate": True,
    **BIASES,
    "moe": _qwen3_next_experts,
    "linear_attention": _DELTA_NET,
}


_QWEN35: Record = {
    **{name: value for name, value in _QWEN3_NEXT.items() if name != "moe"},
    "linear_attention": {**_DELTA_NET, "own_gates": True},
}
_QWEN35_MOE: Record = {
    **_QWEN35,
    "ffn_hidden": integer("moe_intermediate_size", 512),
    "moe": {
        **routed_experts("num_experts", 256, 8, "moe_intermediate_size"),
        **_qwen_shared(512),
        "router_normalized": True,
    },
}
"""Experts in every layer: a width of dense ones is not in these files (configuration_qwen3_5_moe.py)."""


# MiniMax-M2 and gpt-oss.

_MINIMAX_M2_REFUSAL = only(
    "shared_intermediate_size", 0, "only 0 is supported: no shared expert", shows_value=False
)
_MINIMAX_M2: Record = {
    **DECODER,
    "head_dim": integer("head_dim", 128),
    "rope": lambda config: rope_fields(config, base=5e6, fraction=_turning_share(config)),
    "qk_norm": boolean("use_qk_norm", True),
    "qk_norm_full_width": boolean("use_qk_norm", True),
    "moe": {
        **routed_experts("num_local_experts", 256, 8),
        "router_bias": boolean("use_routing_bias", True),
        "router_score": string("scoring_func", "sigmoid"),
    },
}


def _turning_share(config: ConfigFields) -> float:
    head_dim = config.count("head_dim", 128)
    return config.count("rotary_dim", head_dim) / head_dim


def _minimax_mtp(config: ConfigFields) -> Fields:
    kinds = config.entries("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise config.fail(
            "attn_type_list", "only 1 is supported: every layer attends in full", kinds
        )
    modules = config.count("num_mtp_modules", 0, least=0)
    return {"mtp_layers": modules if config.flag("use_mtp", False) else 0}


# MiniMax-M3: most layers choose blocks of positions, and Megatron-Bridge trains them with attention in full.


def _minimax_m3(config: ConfigFields) -> Fields:
    """Experts behind dense layers, and the layers that choose blocks; older files hold flags of both."""
    layers = config.layers()
    dense = _experts_listed(config, 0)
    freq = config.entries("moe_layer_freq")
    if freq:
        dense = freq.count(0)
        if freq != [0] * dense + [1] * (layers - dense):
            raise config.fail(
                "moe_layer_freq", f"must be 0, then 1, for each of {layers} layers", freq
            )
    older = config.section("sparse_attention_config")
    chooses = [kind == "minimax_m3_sparse" for kind in config.entries("layer_types")]
    names = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
    sizes = [
        config.count(name, usual) for name, usual in zip(names, (4, 128, 128, 16), strict=True)
    ]
    config.passed_over("index_local_blocks", "hidden_act", "num_nextn_predict_layers")
    if older is not None:
        named = (
            "sparse_num_index_heads",
            "sparse_index_dim",
            "sparse_block_size",
            "sparse_topk_blocks",
        )
        sizes = [older.count(name, size) for name, size in zip(named, sizes, strict=True)]
        chooses = chooses or [flag == 1 for flag in older.entries("sparse_attention_freq")]
        older.passed_over("sparse_local_block", "sparse_init_block", "sparse_attention_freq")
        older.passed_over("sparse_disable_index_value", "sparse_score_type", "use_sparse_attention")
    selection = dict(zip(("heads", "head_dim", "block", "top_k"), sizes, strict=True))
    moe = {**_MINIMAX_M3_EXPERTS, "dense_layers": dense}
    return {
        "moe": read_fields(config, moe) if dense < layers else None,
        "block_selection": selection | {"layers": sum(chooses)} if any(chooses) else None,
    }


_MINIMAX_M3_EXPERTS: Record = {
    **routed_experts("num_local_experts", 128, 4),
    "shared_experts": integer("n_shared_experts", 1),
    "shared_ffn_hidden": integer("shared_intermediate_size", 3072),
    **SIGMOID,
    "router_scaling_factor": real("routed_scaling_factor", 2.0),
}
_MINIMAX_M3: Record = {
    **DECODER,
    "ffn_hidden": integer("dense_intermediate_size", 12_288),
    "head_dim": integer("head_dim", 128),
    "rope": lambda config: rope_fields(
        config, base=5e6, fraction=config.count("rotary_dim", 64) / config.count("head_dim", 128)
    ),
    "qk_norm": True,
    "norm_zero_centered": True,
    "activation": "swiglu",
    "swiglu_alpha": real("swiglu_alpha", 1.702),
    "glu_offset": 1.0,
    "glu_limit": real("swiglu_limit", 7.0),
    "attention_note": "attention is priced in full, as Megatron-Bridge trains it: indexers of blocks stay as "
    "they are; modules of multi-token prediction, which the checkpoint has none of, are left out",
}


# MiniMax-01 and M1: lightning attention, in most layers.


def _lightning_order(config: ConfigFields) -> Fields:
    """Which layers attend in full: those of `layer_types`, or a 1 in the older `attn_type_list`."""
    layers, older = config.layers(), config.entries("attn_type_list")
    if older and (len(older) != layers or not all(kind in (0, 1) for kind in older)):
        what = f"must list 0 (linear) or 1 (full) for each of {layers} layers"
        raise config.fail("attn_type_list", what, older)
    # Without either the first layer attends in full, then every second one (configuration_minimax.py).
    usual = [kind == 1 for kind in older] or [layer % 2 == 0 for layer in range(layers)]
    return _linear_order(config, usual)


def _lightning(config: ConfigFields) -> Fields:
    """As many heads as attention has, all with keys and values of their own."""
    heads = config.count("num_attention_heads")
    width = config.count("head_dim", config.count("hidden_size") // heads)
    return {
        "type": "lightning",
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": width,
        "value_head_dim": width,
        "block": config.count("block_size", 256),
    }


_MINIMAX: Record = {
    **DECODER_1E5,
    "rope": lambda config: rope_fields(config, base=1e6, fraction=_turning_share(config)),
    "moe": routed_experts("num_local_experts", 8, 2),
    "linear_attention": _lightning,
    "attention_note": "factors on residuals and on what is added to them have no price",
}
_MINIMAX_01: Parts = (
    _MINIMAX_M2_REFUSAL,
    only("postnorm", True, "only true is supported: residuals that start behind the norms"),
    _MINIMAX,
    _lightning_order,
)


# Kimi Linear: Kimi Delta Attention, and latent attention that knows no positions.

_NOT_KDA = "only plain Kimi Delta Attention is supported, as Kimi Linear has it"


def _kimi_order(config: ConfigFields) -> Fields:
    """Layers of either kind, by `layer_types` or by their numbers, from 1, in `linear_attn_config`."""
    layers, section = config.layers(), config.section("linear_attn_config")
    # As KimiLinearConfig has it: each fourth but the first.
    usual = [layer > 0 and layer % 4 == 0 for layer in range(layers)]
    if section is not None and section.entries("full_attn_layers"):
        full, delta = section.entries("full_attn_layers"), section.entries("kda_layers")
        if sorted(map(str, [*full, *delta])) != sorted(map(str, range(1, layers + 1))):
            what = f"and full_attn_layers must name each of the layers 1 to {layers} once"
            raise section.fail("kda_layers", what, delta)
        usual = [number in full for number in range(1, layers + 1)]
    return _linear_order(config, usual)


def _kimi_delta(config: ConfigFields) -> Fields:
    """Heads and widths; gates come from matrices whose inner width is that of a head."""
    section = config.section("linear_attn_config")
    if section is None:
        heads, width = config.count("linear_num_heads", 32), config.count("linear_head_dim", 128)
        kernel = config.count("linear_conv_kernel_dim", 4)
    else:
        for name in ("use_full_rank_gate", "gate_lower_bound"):
            if section.has(name):
                raise section.fail(name, _NOT_KDA)
        # Files saved by transformers 5 say the same a second time.
        config.passed_over("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        heads, width = section.count("num_heads", 32), section.count("head_dim", 128)
        kernel = section.count("short_conv_kernel_size", 4)
    return {
        "type": "kda",
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": width,
        "value_head_dim": width,
        "conv_kernel": kernel,
        "gate_rank": width,
    }


def _kimi_experts(
    config: ConfigFields,
    *,
    dense: int = 1,
    experts: int = 256,
    width: int = 1024,
    groups: int = 1,
    chosen: int = 1,
    factor: float = 2.446,
) -> Fields:
    """Experts behind the first layers; older files have other names for the same fields."""
    if config.count("moe_layer_freq", 1) != 1:
        raise config.fail("moe_layer_freq", "only 1 is supported: every later layer has experts")
    dense = _experts_listed(config, dense)
    if dense >= config.layers():
        return {}
    top_k = config.count("num_experts_per_tok", config.count("num_experts_per_token", 8))
    normalized = config.flag("norm_topk_prob", config.flag("moe_renormalize", True))
    shared = config.count(
        "n_shared_experts", config.count("num_shared_experts", 1, least=0), least=0
    )
    groups = config.count("n_group", config.count("num_expert_group", groups))
    moe: Fields = {
        "experts": config.count("num_local_experts", config.count("num_experts", experts)),
        "top_k": top_k,
        "moe_ffn_hidden": config.count("moe_intermediate_size", width),
        "shared_experts": shared,
        "dense_layers": dense,
        **SIGMOID,
        "router_normalized": normalized,
        "router_scaling_factor": config.number("routed_scaling_factor", factor),
    }
    chosen = config.count("topk_group", chosen)
    if groups > 1:
        moe |= {"router_groups": groups, "router_groups_per_token": chosen}
    return {"moe": moe}


_KIMI_LINEAR_REFUSALS: Parts = (
    only("mla_use_nope", True, "only true is supported: latent attention without positions"),
    only("mla_use_output_gate", False, "a gate on latent attention is not supported"),
    absent("attn_res_block_size", "attention over the outputs of earlier layers is not supported"),
    absent("routed_expert_hidden_size", "experts on a projection with a norm are not supported"),
    only("num_nextn_predict_layers", 0, "is not supported beside linear attention: set it to 0"),
    only("moe_router_activation_func", "sigmoid", "only sigmoid is supported"),
)


def _gpt_oss_rope(config: ConfigFields) -> Fields:
    """Rotary embeddings, by YaRN where the file says nothing of it (configuration_gpt_oss.py)."""
    turning = rope_fields(config, base=150_000)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        scaling = {"type": "yarn", "factor": 32.0, "original_positions": 4096, "whole_range": False}
        turning["scaling"] = scaling
    return turning


_GPT_OSS: Record = {
    **DECODER_1E5,
    "head_dim": integer("head_dim", 64),
    "attention_sinks": True,
    "rope": _gpt_oss_rope,
    "swiglu_alpha": real("swiglu_alpha", 1.702),
    "glu_offset": 1.0,
    "glu_limit": real("swiglu_limit", 7.0),
    "moe": {
        **routed_experts("num_local_experts", None, 4),
        "router_bias": True,
        "expert_bias": True,
    },
    **biases(boolean("attention_bias", True)),
}


# DeepSeek, and GLM with its experts.


def _deepseek_experts(
    router: Record, dense_layers: int = 0, *, always: bool = False
) -> FieldReader:
    """Experts behind the first layers, with a family's `router`; `always`, or where a file has some."""

    def read(config: ConfigFields) -> Fields:
        has_experts = always or config.has("n_routed_experts")
        dense = _experts_listed(config, dense_layers)
        if not has_experts or dense >= config.layers():
            return {}
        if config.count("moe_layer_freq", 1) != 1:
            what = "only 1 is supported: every later layer has experts"
            raise config.fail("moe_layer_freq", what)
        balancing = config.text("topk_method", "")
        record: Record = {
            **routed_experts("n_routed_experts", None, None, "moe_intermediate_size"),
            "shared_experts": integer("n_shared_experts", 0, least=0),
            "dense_layers": dense,
            "router_bias": balancing == "noaux_tc",
            "router_score": string("scoring_func", "softmax"),
            "router_normalized": boolean("norm_topk_prob", False),
            "router_scaling_factor": real("routed_scaling_factor", 1.0),
        }
        moe = read_fields(config, record, router)
        groups = config.count("n_group", 1)
        config.passed_over("topk_group")
        if groups > 1 and balancing != "greedy":
            chosen = config.count("topk_group", groups)
            moe |= {"router_groups": groups, "router_groups_per_token": chosen}
        return {"moe": moe}

    return read


_GLM_ROUTER: Record = {
    **SIGMOID,
    "router_normalized": boolean("norm_topk_prob", True),
}
_V3_ROUTER: Record = {
    **_GLM_ROUTER,
    "router_score": string("scoring_func", "sigmoid"),
    "router_scaling_factor": real("routed_scaling_factor", 2.5),
}


def _latent(**widths: int | Reader) -> Record:
    """Widths of latent attention, with defaults of those that a file may leave out."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: integer(name, widths.get(name)) for name in names}


_DEEPSEEK: Record = {
    **DECODER,
    # Every head has its own keys and values once the latent is expanded.
    "kv_heads": HEADS,
    "head_dim": None,
    "attention": {
        "q_lora_rank": integer("q_lora_rank", optional=True),
        **_latent(),
    },
    **BIASES,
}


def _kimi_linear_attention(config: ConfigFields) -> Fields:
    # Sizes and switches that others imply (modeling_kimi_linear.py reads none of them).
    config.passed_over(
        "head_dim", "num_key_value_heads", "rope_theta", "use_grouped_topk", "topk_method"
    )
    return {"position": "none", "linear_attention": _kimi_delta(config), **_kimi_order(config)}


_KIMI_LINEAR: Parts = (
    *_KIMI_LINEAR_REFUSALS,
    _DEEPSEEK,
    SMALLER_EPSILON,
    _kimi_linear_attention,
    _kimi_experts,
)


# Ling 3.0: Kimi Delta Attention with whole gates, and latent attention with a gate on each head
# (transformers 5.23, models/bailing_hybrid, modular_bailing_hybrid.py).


def _ling_attention(config: ConfigFields) -> Fields:
    """Heads of both kinds of layers, and their order."""
    heads, kinds = config.count("num_attention_heads", 32), config.entries("layer_types")
    width = config.count("linear_head_dim", config.count("head_dim", 128))
    delta: Fields = {
        "type": "kda",
        "key_heads": config.count("linear_num_heads", heads),
        "value_heads": config.count("linear_num_heads", heads),
        "key_head_dim": width,
        "value_head_dim": width,
        "conv_kernel": config.count(
            "linear_conv_kernel_dim", config.count("short_conv_kernel_size", 4)
        ),
    }
    order: Fields = {"full_attention_every": config.count("layer_group_size", 6)}
    if kinds:
        order = order_fields(full_layers(config, kinds, "linear_attention"), LINEAR)
    note = "the bound of decays has no price"
    if config.count("num_nextn_predict_layers", 1, least=0):
        note += "; multi-token prediction is left out: it is not planned beside gates on heads"
    config.passed_over(
        "head_dim", "num_key_value_heads", "kda_safe_gate", "kda_lower_bound", "short_conv_kernel_size",
        "layer_group_size", "mtp_loss_scaling_factor",
    )  # fmt: skip
    return {"linear_attention": delta, "attention_note": note, **order}


_NOT_LING3 = "only layers of Ling 3.0 are supported in this family, not those of Ling and Ring 2.5"
_LING3: Parts = (
    absent("q_lora_rank", _NOT_LING3),
    absent("group_norm_size", _NOT_LING3),
    {
        **_DEEPSEEK,
        "heads": integer("num_attention_heads", 32),
        "kv_heads": integer("num_attention_heads", 32),
        "attention": _latent(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        "rope": rope(base=6e6),
        "attention_head_gates": True,
    },
    _ling_attention,
    lambda config: _kimi_experts(
        config, dense=2, experts=512, width=768, groups=8, chosen=4, factor=2.5
    ),
)
_NEXT_TOKENS: Record = {"mtp_layers": integer("num_nextn_predict_layers", 0, least=0)}
_DEEPSEEK_V3: Parts = (
    DECODER,
    _DEEPSEEK,
    _deepseek_experts(_V3_ROUTER, dense_layers=3),
    _NEXT_TOKENS,
)


# A.X K1: DeepSeek-V3 with a norm behind its experts (modular_axk1.py).


def _axk1_experts(config: ConfigFields) -> Fields:
    fields = _deepseek_experts(_V3_ROUTER, dense_layers=1, always=True)(config)
    moe = fields.get("moe")
    return {"moe": {**moe, "output_norm": True}} if isinstance(moe, dict) else {}


_AXK1: Parts = (DECODER, _DEEPSEEK, _axk1_experts, _NEXT_TOKENS)


def _indexer(config: ConfigFields) -> Fields:
    """DeepSeek-V3.2, GLM-5 and 5.2: positions chosen by an indexer, that of the layer or an earlier one."""
    indexer = {
        "heads": integer("index_n_heads", 64),
        "head_dim": integer("index_head_dim", 128),
        "top_k": integer("index_topk", 2048),
    }
    fields = read_fields(config, *_DEEPSEEK_V3)
    latent = fields["attention"]
    assert isinstance(latent, dict)
    # Megatron-LM, which alone is planned with indexers, builds no such module beside one.
    note = "multi-token prediction is left out: Megatron-LM builds none beside sparse attention"
    return fields | {
        "attention": latent | {"indexer": read_fields(config, indexer)},
        "mtp_layers": 0,
        "attention_note": note if fields["mtp_layers"] else None,
        **_shared_indexers(config),
    }


def _shared_indexers(config: ConfigFields) -> Fields:
    """Which layers have an indexer of their own: listed, by a pattern of F and S, or by a frequency.

    The last three fields are read in this order (transformers 5.24, configuration_glm_moe_dsa.py).
    """
    layers, name = config.layers(), "indexer_types"
    listed = config.entries(name)
    every = config.count("index_topk_freq", 1)
    first = config.count("index_skip_topk_offset", 2, least=0)
    # Of modules of multi-token prediction, which are left out.
    config.passed_over("index_share_for_mtp_iteration")
    if not listed and config.has("index_topk_pattern"):
        name = "index_topk_pattern"
        listed = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in config.text(name, "")]
    if not listed:
        has_indexer = [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]
        listed = ["full" if has_one else "shared" for has_one in has_indexer]
    if len(listed) != layers or not set(map(str, listed)) <= {"full", "shared"}:
        what = f"must say full or shared for each of {layers} layers"
        raise config.fail(name, what, listed)
    order = "".join("F" if kind == "full" else "f" for kind in listed)
    return {"attention_order": order} if "f" in order else {}


def _indexer_everywhere(config: ConfigFields) -> Fields:
    """Refuses a file whose layers do not all attend to positions that an indexer chooses."""
    for kind in config.entries("layer_types"):
        if kind != "indexed_attention":
            raise config.fail(
                "layer_types", "only indexed_attention in every layer is supported", kind
            )
    return {}


_DEEPSEEK_V32: Parts = (
    _indexer_everywhere,
    _indexer,
)
# Youtu and MiniCPM3: latent attention, and a dense feed-forward in every layer.

_YOUTU: Record = {**_DEEPSEEK, "tied_embeddings": boolean("tie_word_embeddings", True)}
_MINICPM3: Record = {
    **_YOUTU,
    **SMALLER_EPSILON,
    "attention": {
        "q_lora_rank": integer("q_lora_rank", optional=True),
        **_latent(
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=lambda config: (
                config.count("hidden_size") // config.count("num_attention_heads")
            ),
        ),
    },
    "embedding_scale": real("scale_emb", 12.0),
    "output_scale": lambda config: (
        config.number("dim_model_base", 256.0) / config.count("hidden_size")
    ),
    "mlp_bias": boolean("mlp_bias", False),
}
_GLM4: Record = {
    **_HALF_ROPE,
    "norms_per_layer": 4,
    "attention_bias": boolean("attention_bias", True),
}
_GLM: Record = {**_HALF_ROPE, "attention_bias": boolean("attention_bias", True)}
_GLM4_MOE: Record = {
    **_HALF_ROPE,
    "attention_bias": boolean("attention_bias", False),
    "qk_norm": boolean("use_qk_norm", False),
    "mtp_layers": integer("num_nextn_predict_layers", 1, least=0),
}
_SARVAM_MOE: Record = {
    **_GLM4_MOE,
    **_NEXT_TOKENS,
    "rope": rope(base=8e6),
    "head_dim": integer("head_dim", 64),
    "attention_bias": boolean("attention_bias", boolean("use_qkv_bias", False)),
    "qk_norm": boolean("use_qk_norm", True),
}


def _glm4_lite_order(config: ConfigFields) -> Fields:
    """Dense layers in front, which newer files list (`mlp_layer_types`) and older ones count."""
    default = _experts_listed(config, 1)
    return _deepseek_experts(_GLM_LITE_ROUTER, dense_layers=default, always=True)(config)


_GLM_LITE_ROUTER: Record = {
    **_GLM_ROUTER,
    "router_scaling_factor": real("routed_scaling_factor", 1.8),
}
_MISTRAL4_ROUTER: Record = {
    "router_bias": False,
    "router_score": "softmax",
    "router_normalized": boolean("norm_topk_prob", True),
}
_DOTS1: Record = {**DECODER, **BIASES, "qk_norm": True}


def _dots_windows(config: ConfigFields) -> Fields:
    """Layers behind the first `max_window_layers` have a window (configuration_dots1.py)."""
    window = window_length(config, 4096)
    first = config.count("max_window_layers", 62, least=0)
    full = [window is None or layer < first for layer in range(config.layers())]
    return _listed_windows(config, window, full, "max_window_layers")


# Ernie 4.5: experts from one layer to another, and one switch for all biases.

_ERNIE: Record = {
    **DECODER_1E5,
    "rope": rope(base=5e5),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    **biases(boolean("use_bias", False)),
    "mlp_bias": boolean("use_bias", False),
}


def _ernie_experts(config: ConfigFields) -> Fields:
    """Experts in all layers behind the first ones: other orders are refused."""
    layers = config.layers()
    if config.count("moe_layer_interval", 1) != 1:
        raise config.fail(
            "moe_layer_interval", "only 1 is supported: every later layer has experts"
        )
    last = config.count("moe_layer_end_index", layers - 1, least=-1)
    if last not in (-1, layers - 1):
        what = f"only the last of the {layers} layers is supported, {layers - 1} or -1"
        raise config.fail("moe_layer_end_index", what, last)
    experts: Record = {
        "experts": integer("moe_num_experts", 64),
        "top_k": integer("moe_k", 6),
        "moe_ffn_hidden": integer("moe_intermediate_size", 1536),
        "shared_experts": integer("moe_num_shared_experts", 2, least=0),
        "router_bias": True,
        "router_score": "softmax",
    }
    return _experts_behind(config, config.dense_layers("moe_layer_start_index", 1), experts)


# Aria: experts of a softmax in every layer, beside shared ones.

_ARIA: Record = {
    **DECODER,
    **BIASES,
    "moe": {
        "experts": integer("moe_num_experts", 8),
        "top_k": integer("moe_topk", 2),
        "moe_ffn_hidden": integer("intermediate_size"),
        "shared_experts": integer("moe_num_shared_experts", 2, least=0),
    },
}


# Ling and Ring (BailingMoE): the first generation by softmax, the second as DeepSeek-V3, with norms on
# queries and keys. Their code comes with the files (modeling_bailing_moe.py, modeling_bailing_moe_v2.py).


def _bailing_experts(config: ConfigFields) -> Fields:
    dense = config.dense_layers("first_k_dense_replace", 0)
    config.passed_over("router_dtype", "topk_group")
    experts: Record = {
        **routed_experts("num_experts", None, None, "moe_intermediate_size"),
        "shared_experts": integer("num_shared_experts", 0, least=0),
        "router_score": string("score_function", "softmax"),
        "router_bias": boolean("moe_router_enable_expert_bias", False),
        "router_normalized": boolean("norm_topk_prob", True),
        "router_scaling_factor": real("routed_scaling_factor", 1.0),
    }
    return _experts_behind(config, dense, experts, _bailing_shared, _groups)


def _bailing_shared(config: ConfigFields) -> Fields:
    """The width of all shared experts together, where the file gives that of one."""
    width = config.count("moe_shared_expert_intermediate_size", optional=True)
    number = config.count("num_shared_experts", 0, least=0)
    return {} if width is None or not number else {"shared_ffn_hidden": width * number}


_BAILING: Record = {
    **DECODER,
    "attention_bias": boolean("use_qkv_bias", False),
    "attention_output_bias": boolean("use_bias", False),
    "qk_norm": boolean("use_qk_norm", False),
}
_BAILING_REFUSALS: Parts = (
    only("norm_head", False, "a head whose columns are normed is not supported"),
    only("norm_softmax", False, "a softmax whose logits are normed is not supported"),
    only("use_rmsnorm", True, "only RMS norms are supported"),
)


# Granite without Mamba: the scales of Granite 4.0-H round a Llama, or round experts.

_GRANITE: Record = {
    **DECODER,
    **BIASES,
    **_GRANITE_SCALES,
    "attention_scale": real("attention_multiplier", 1.0),
}
_GRANITE_MOE: Record = {
    **_GRANITE,
    "moe": routed_experts("num_local_experts", 8, 2),
}


def _granite_shared(config: ConfigFields) -> Fields:
    """Experts beside a shared feed-forward, where its width is not 0 (modeling_granitemoeshared.py)."""
    moe = read_fields(config, routed_experts("num_local_experts", 8, 2))
    shared = config.count("shared_intermediate_size", 0, least=0)
    return {"moe": moe | ({"shared_experts": 1, "shared_ffn_hidden": shared} if shared else {})}


def _windows_and_bases(is_full: _InFull, window: int, *, all_turn: bool) -> Part:
    """A window over the layers that the file lists, or all but those of `is_full`.

    Each kind of layer turns by its base, not at all where that is 0: where the file gives none and not all
    turn, in those that attend in full (transformers, modeling_granite_swa.py, modeling_muse_glimmer.py).
    """

    def read(config: ConfigFields) -> Fields:
        layers = config.layers()
        usual = [is_full(layer, layers) for layer in range(layers)]
        full = _full_layers(config, "sliding_attention", usual)
        turning = rope_fields(config)
        unsaid = [turning["base"] if all_turn or not attends else 0 for attends in full]
        bases = config.entries("layer_rope_theta") or unsaid
        numbers = [base for base in bases if isinstance(base, int | float)]
        of_full = {base for base, attends in zip(numbers, full, strict=False) if attends}
        of_windowed = {base for base, attends in zip(numbers, full, strict=False) if not attends}
        if not len(bases) == len(numbers) == layers or max(len(of_full), len(of_windowed)) > 1:
            what = "must give all layers with a window one base, and all others one"
            raise config.fail("layer_rope_theta", what, bases)
        order = window_order(config, window_length(config, window), full)
        base = next(iter(of_full or of_windowed))
        windowed = next(iter(of_windowed or of_full))
        if not base and windowed:
            return order | {"rope": turning | {"base": windowed}, "rope_in_windows_alone": True}
        if not windowed:
            if base:
                what = "is 0 for layers with a window alone, which is not supported"
                raise config.fail("layer_rope_theta", what)
            return order | {"position": "none"}
        base_of_windows = {} if windowed == base else {"windowed_base": windowed}
        return order | {"rope": turning | {"base": base, **base_of_windows}}

    return read


_granite_windows = _windows_and_bases(lambda layer, _: layer % 4 == 0, 128, all_turn=True)


# HyperCLOVA X: Granite with norms behind the blocks too, whose logits are multiplied and not divided.

_HYPERCLOVAX: Record = {
    **_GRANITE,
    "norms_per_layer": lambda config: 4 if config.flag("use_post_norm", True) else 2,
    "output_scale": real("logits_scaling", 1.0),
    "attention_scale": real("attention_multiplier"),
    "mlp_bias": boolean("mlp_bias", False),
}


# EXAONE 4: norms after the blocks; where layers have a window, the others know no positions.

_EXAONE4: Record = {**DECODER_1E5, "qk_norm": True, "norms_after_blocks": True}


def _exaone_windows(config: ConfigFields) -> Fields:
    if window_length(config, 4096) is None:
        config.passed_over("sliding_window_pattern", "layer_types")
        return {}
    if config.is_text("sliding_window_pattern"):
        pattern = config.text("sliding_window_pattern", "LLLG")
        every = len(pattern)
        if pattern != "L" * (every - 1) + "G":
            what = "must be L for layers with a window, and G for the last of each group"
            raise config.fail("sliding_window_pattern", what, pattern)
    else:
        every = config.count("sliding_window_pattern", 4)
    order = windows(config, 4096, every)
    return order | {"rope_in_windows_alone": bool(order)}


def _full_layers(config: ConfigFields, other: str, usual: list[bool]) -> list[bool]:
    """Which layers attend in full: as `layer_types` tells them from those of kind `other`, else `usual`."""
    kinds = config.entries("layer_types")
    return full_layers(config, kinds, other) if kinds else usual


def _linear_order(config: ConfigFields, usual: list[bool]) -> Fields:
    """Which layers attend in full, and not by linear attention: as `layer_types` says, else `usual`."""
    return order_fields(_full_layers(config, "linear_attention", usual), LINEAR)


def _experts_behind(config: ConfigFields, dense: int, *experts: Part) -> Fields:
    """Experts in every layer behind the first `dense` ones; nothing where these are all."""
    if dense >= config.layers():
        return {}
    return {"moe": read_fields(config, {"dense_layers": dense}, *experts)}


def _groups(config: ConfigFields, chosen: int | None = None) -> Fields:
    """Groups of experts, and how many a token may choose from: by default `chosen`, or all of them."""
    groups = config.count("n_group", 1)
    config.passed_over("topk_group")
    if groups == 1:
        return {}
    per_token = config.count("topk_group", groups if chosen is None else chosen)
    return {"router_groups": groups, "router_groups_per_token": per_token}


def _experts_listed(config: ConfigFields, default: int) -> int:
    """Dense layers in front, as `mlp_layer_types` lists them or `first_k_dense_replace` counts them."""
    kinds = config.entries("mlp_layer_types")
    dense = config.dense_layers("first_k_dense_replace", default)
    if not kinds:
        return dense
    front = kinds.count("dense")
    listed = ["dense"] * front + ["sparse"] * (len(kinds) - front)
    if kinds != listed or len(kinds) != config.layers():
        what = f"must name dense, then sparse, for each of {config.layers()} layers"
        raise config.fail("mlp_layer_types", what, kinds)
    return front


# EXAONE-MoE (K-EXAONE) and Hy3: DeepSeek-V3's router, norms before the blocks.


def _sigmoid_experts(factor: Record) -> Part:
    """Experts behind dense layers, with shared ones and a router as DeepSeek-V3 has it."""

    def read(config: ConfigFields) -> Fields:
        config.passed_over("is_moe_layer", "first_last_k_dense_replace")
        experts: Record = {
            **routed_experts("num_experts", None, 8, "moe_intermediate_size"),
            "shared_experts": integer("num_shared_experts", 1, least=0),
            **SIGMOID,
        }
        return _experts_behind(
            config,
            _experts_listed(config, 1),
            experts,
            factor,
            lambda each: _groups(each, each.count("topk_group", 1)),
        )

    return read


_EXAONE_MOE: Record = {**DECODER_1E5, "qk_norm": True}
_EXAONE_FACTOR: Record = {
    "router_normalized": boolean("norm_topk_prob", True),
    "router_scaling_factor": real("routed_scaling_factor", 2.5),
}
_EXAONE_ROUTER = only("scoring_func", "sigmoid", "only sigmoid is supported")
_HY3: Record = {
    **DECODER_1E5,
    **ALL_BIASES,
    "head_dim": integer("head_dim", 128),
    "rope": rope(base=11_158_840.0),
    "qk_norm": True,
}
_HY3_FACTOR: Record = {"router_scaling_factor": real("router_scaling_factor", 2.826)}


# Cohere (Command R and A, Aya): attention and feed-forward side by side behind one layer norm without shift.

_COHERE: Record = {
    **DECODER,
    **BIASES,
    "norm": "layernorm",
    "norm_bias": False,
    "norms_per_layer": 1,
    "parallel_block": True,
    "norm_epsilon": real("layer_norm_eps", 1e-5),
    "rope": rope(base=5e5),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "output_scale": real("logit_scale", 0.0625),
    "qk_norm": boolean("use_qk_norm", False),
    "qk_norm_full_width": boolean("use_qk_norm", False),
}
_COHERE2: Record = {**_COHERE, "rope": rope(), "head_dim": integer("head_dim", optional=True)}
_COHERE_BLOCK = only("use_parallel_block", True, "only blocks side by side are supported")


def _cohere2_windows(config: ConfigFields) -> Fields:
    """Layers with a window turn queries and keys, the others know no positions (modeling_cohere2.py)."""
    # Both follow from other fields.
    config.passed_over("layer_switch", "order_of_interleaved_layers")
    every = config.count("_sliding_window_pattern", config.count("sliding_window_pattern", 4))
    order = windows(config, 4096, every)
    return order | {"rope_in_windows_alone": bool(order)}


_COHERE2_MOE: Record = {
    **_COHERE2,
    "head_dim": integer("head_dim", 128),
    "norm": lambda config: "rmsnorm" if config.has("rms_norm_eps") else "layernorm",
    "norm_bias": lambda config: config.has("rms_norm_eps"),
    "norm_epsilon": lambda config: config.number(
        "rms_norm_eps", config.number("layer_norm_eps", 1e-5)
    ),
}


def _cohere2_experts(config: ConfigFields) -> Fields:
    """Experts in every layer, shared ones as wide as routed ones (modeling_cohere2_moe.py)."""
    if _experts_listed(config, 0):
        what = "dense layers beside those with experts are not supported in this family"
        raise config.fail("first_k_dense_replace", what)
    score = config.text("expert_selection_fn", "softmax")
    record: Record = {
        **routed_experts("num_experts", 8, 2),
        "shared_experts": integer("num_shared_experts", 0, least=0),
        "router_score": score,
        "router_normalized": score == "softmax" or config.flag("norm_topk_prob", True),
    }
    config.passed_over("norm_topk_prob", "prefix_dense_sliding_window_pattern")
    return {"moe": read_fields(config, record)}


# Phi-2 and Phi-3.5-MoE: layer norms, and biases up to the logits.

_PHI: Record = {
    **SIZES,
    **layer_norms(True),
    "kv_heads": integer("num_key_value_heads", HEADS),
    "norms_per_layer": 1,
    "parallel_block": True,
    "output_bias": True,
    "norm_epsilon": real("layer_norm_eps", 1e-5),
    "rope": rope(fraction=0.5),
    **activation("hidden_act", "gelu_new", PLAIN),
}
_PHI_NORMS = only(
    "qk_layernorm", False, "norms on queries and keys are not supported in this family"
)
_PHIMOE: Record = {
    **DECODER_1E5,
    **BIASES,
    "norm": "layernorm",
    "rope": rope(base=1e6),
    "output_bias": boolean("lm_head_bias", False),
    "moe": {
        **routed_experts("num_local_experts", 16, 2),
        "router_score": "sparsemixer",
        "router_normalized": False,
    },
}


# StableLM: layer norms round a Llama, side by side in the larger one.

_STABLELM: Record = {
    **DECODER,
    "head_dim": None,
    "norm": "layernorm",
    "norm_epsilon": real("layer_norm_eps", 1e-5),
    "rope": rope(fraction=0.25),
    "attention_bias": boolean("use_qkv_bias", False),
    "qk_norm": boolean("qk_layernorm", False),
    "qk_norm_full_width": boolean("qk_layernorm", False),
    "parallel_block": boolean("use_parallel_residual", False),
    "norms_per_layer": lambda config: 1 if config.flag("use_parallel_residual", False) else 2,
}


# Hunyuan with experts: one shared expert as wide as a routed one; Solar Open and Trinity (AFMoE).


def _alike(config: ConfigFields, name: str, default: int) -> int:
    """A number that a file may list once for each layer, where all are the same."""
    listed = config.entries(name) if config.is_list(name) else []
    if not listed:
        return config.count(name, default)
    first = listed[0]
    if isinstance(first, bool) or not isinstance(first, int):
        raise config.fail(name, "must list integers", first)
    if len(listed) < config.layers() or any(each != first for each in listed):
        what = f"only one number for all {config.layers()} layers is supported"
        raise config.fail(name, what, listed)
    return first


def _hunyuan_experts(config: ConfigFields) -> Fields:
    """Experts in every layer beside a shared one; all are `intermediate_size` wide (HunYuanMoEV1Moe)."""
    width = config.count("intermediate_size")
    for name, value in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if _alike(config, name, value) != value:
            raise config.fail(name, f"only {value} is supported: the code reads no other")
    experts = {
        "experts": _alike(config, "num_experts", 1),
        "top_k": _alike(config, "moe_topk", 1),
        "moe_ffn_hidden": width,
        "shared_experts": 1,
        "router_normalized": True,
    }
    return {"moe": experts}


_HUNYUAN_MOE: Parts = (
    only("use_qk_norm", True, "only true is supported"),
    only("use_cla", False, "keys and values that layers share are not supported"),
    only("use_mixed_mlp_moe", True, "only experts beside a shared one are supported"),
    only("moe_layer_num_skipped", 0, "only experts in every layer are supported"),
)
_SOLAR: Record = {
    **DECODER_1E5,
    "head_dim": integer("head_dim", 128),
    "rope": rope(base=1e6),
    # Experts are in every layer: a width of dense ones is of no use.
    "ffn_hidden": integer("moe_intermediate_size", 1280),
    "attention_bias": boolean("attention_bias", False),
}
_SOLAR_REFUSALS: Parts = (
    only("first_k_dense_replace", 0, "only 0 is supported: every layer has experts"),
    only("use_qk_norm", False, "norms on queries and keys are not supported in this family"),
)
_AFMOE: Record = {
    **DECODER_1E5,
    **BIASES,
    "head_dim": integer("head_dim", 128),
    "qk_norm": True,
    "attention_output_gate": True,
    "norms_per_layer": 4,
    "embedding_scale": lambda config: (
        config.count("hidden_size") ** 0.5 if config.flag("mup_enabled", False) else 1.0
    ),
}
_AFMOE_REFUSALS: Parts = (
    only("score_func", "sigmoid", "only sigmoid is supported"),
    only("route_norm", True, "only true is supported: the code knows nothing else"),
    only("n_group", 1, "groups of experts are not supported in this family"),
    only("num_expert_groups", 1, "groups of experts are not supported in this family"),
)


def _afmoe(config: ConfigFields) -> Fields:
    """Layers with a window, which alone know positions, and experts behind the first layers."""
    config.passed_over("topk_group", "num_limited_groups", "use_grouped_mm")
    order = windows(config, 1024, config.count("global_attn_every_n_layers", 4))
    fields = order | {"rope_in_windows_alone": bool(order)}
    experts: Record = {
        **routed_experts("num_experts", 64, 6, "moe_intermediate_size"),
        "shared_experts": integer("num_shared_experts", 2, least=0),
        **SIGMOID,
        "router_scaling_factor": real("route_scale", 1.0),
    }
    return fields | _experts_behind(config, config.dense_layers("num_dense_layers", 1), experts)


# Muse Glimmer: norms as Gemma has them, gates as wide as the queries, and norms without weights on queries,
# keys and embeddings (transformers 5.24, models/muse_glimmer, modular_muse_glimmer.py).

_MUSE_GLIMMER: Record = {
    **DECODER_1E5,
    **BIASES,
    "head_dim": integer("head_dim", 128),
    "qk_norm": True,
    "qk_norm_weights": False,
    "norms_per_layer": 4,
    "norm_zero_centered": True,
    "attention_output_gate": True,
    "attention_scale": lambda config: (
        config.number("qk_scale_factor", 3.87) / config.count("head_dim", 128) ** 0.5
    ),
    "output_scale": real("output_multiplier", 0.19611613513818404),
    "final_logit_cap": real("final_logit_softcapping", 20.0),
    "attention_note": "the norm of embeddings, which has no weights, has no price",
    **activation("hidden_activation", "silu", GATED),
}
_muse_windows = _windows_and_bases(
    lambda layer, layers: (layers - 1 - layer) % 4 == 0, 2048, all_turn=False
)


# Llama-like families that differ in a switch or two.

_EXAONE: Record = {
    **DECODER,
    "layers": lambda config: config.layers("num_layers"),
    "norm_epsilon": real("layer_norm_epsilon", 1e-5),
    **activation("activation_function", "silu", GATED),
}
_INTERNLM2: Record = {**DECODER, **biases(boolean("bias", False))}
_INTERNLM3: Record = {
    **DECODER_1E5,
    "head_dim": integer("head_dim", 128),
    **biases(boolean("qkv_bias", False)),
    "mlp_bias": boolean("bias", False),
}
_MIMO: Record = {
    **DECODER,
    "attention_bias": boolean("attention_bias", True),
    "mtp_layers": integer("num_nextn_predict_layers", 0, least=0),
}
_NO_POSITIONS = (
    "layers without position embedding (no_rope_layers) are counted as layers with one: the price of either "
    "is the same, and a launch file does not say which they are"
)


def _smollm3_positions(config: ConfigFields) -> Fields:
    """SmolLM3 turns queries and keys in three layers of four."""
    config.passed_over("no_rope_layers", "no_rope_layer_interval")
    return {"attention_note": _NO_POSITIONS, **_qwen_windows(config)}


_SMOLLM3: Record = {
    **DECODER,
    **ALL_BIASES,
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "rope": rope(base=2e6),
}
_SEED_OSS: Record = {
    **DECODER,
    "head_dim": integer("head_dim", 128),
    "attention_bias": boolean("attention_bias", True),
    "attention_output_bias": boolean("attention_out_bias", False),
    "mlp_bias": boolean("mlp_bias", False),
}
_HUNYUAN: Record = {**DECODER_1E5, **BIASES, "qk_norm": True}
_ARCEE: Record = {
    **DECODER_1E5,
    **ALL_BIASES,
    **activation("hidden_act", "relu2", PLAIN),
}
_COSMOS_EDGE: Record = {**_ARCEE, "head_dim": integer("head_dim", 128), "rope": rope(base=1e8)}
_MINISTRAL3: Record = {**DECODER_1E5, "rope": rope(base=1e6)}


def _helium_output(config: ConfigFields) -> Fields:
    """Refuses heads that together are not as wide as the layer: its last projection takes them to be."""
    width = config.count("num_attention_heads") * config.count("head_dim", 128)
    if width != config.count("hidden_size"):
        raise config.fail("head_dim", "heads must together be as wide as hidden_size", width)
    return {}


_HELIUM: Record = {
    **DECODER,
    "attention_bias": boolean("attention_bias", False),
    "head_dim": integer("head_dim", 128),
    "rope": rope(base=1e5),
    "norm_epsilon": real("rms_norm_eps", 1e-8),
    "mlp_bias": boolean("mlp_bias", False),
}
_IQUEST: Record = {
    **DECODER_1E5,
    **ALL_BIASES,
    "head_dim": integer("head_dim", 128),
}


def _ministral_windows(config: ConfigFields) -> Fields:
    """Layers in the order that the file lists, or all with the window that it gives."""
    window = window_length(config, 4096)
    return _listed_windows(config, window, [window is None] * config.layers(), "sliding_window")


# Apertus: norms on queries and keys, a feed-forward without a gate, Llama 3.1's rope scaling by default.


def _apertus_rope(config: ConfigFields) -> Fields:
    turning = rope_fields(config, base=12e6)
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        turning["scaling"] = {"type": "llama3", "factor": 8.0}
    return turning


_APERTUS: Record = {
    **DECODER_1E5,
    **BIASES,
    "qk_norm": True,
    "rope": _apertus_rope,
    **activation("hidden_act", "xielu", {**PLAIN, "xielu": "xielu"}),
}


# LFM2: gates around a short convolution in place of attention, but in the layers that are named.


def _short_convolutions(config: ConfigFields) -> Fields:
    # Older files say sizes twice.
    config.passed_over("block_dim", "conv_dim", "conv_dim_out", "num_heads", "theta")
    hidden, kinds = config.count("hidden_size"), config.entries("layer_types")
    kernel = config.count("conv_L_cache", 3)
    full = full_layers(config, kinds, "conv") if kinds else [True] * config.layers()
    listed = config.entries("full_attn_idxs")
    if listed and not kinds:
        full = [layer in listed for layer in range(config.layers())]
    if all(full):
        return {}
    convolution: Fields = {
        "type": "short_conv",
        "key_heads": 1,
        "value_heads": 1,
        "key_head_dim": hidden,
        "value_head_dim": hidden,
        "conv_kernel": kernel,
    }
    return {"linear_attention": convolution, **order_fields(full, LINEAR)}


def _lfm2_width(config: ConfigFields) -> int:
    """Two thirds of what the file says, times a factor, rounded up to a multiple (modeling_lfm2.py)."""
    width = config.count("block_ff_dim", config.count("intermediate_size", 12_288))
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    multiple = config.count("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    if not 0 < factor < LARGEST_COUNT:
        raise config.fail("block_ffn_dim_multiplier", "must be above 0", factor)
    return multiple * -(-int(factor * int(2 * width / 3)) // multiple)


_LFM2_MOE: Record = {
    **DECODER,
    "head_dim": None,
    "norm_epsilon": real("norm_eps", 1e-5),
    "tied_embeddings": boolean("tie_embedding", boolean("tie_word_embeddings", True)),
    "rope": rope(base=1e6),
    "qk_norm": True,
}
_LFM2: Record = {**_LFM2_MOE, "ffn_hidden": _lfm2_width}
_LFM2_BIAS = only("conv_bias", False, "biases of short convolutions are not supported")


def _lfm2_experts(config: ConfigFields) -> Fields:
    experts: Record = {
        **routed_experts("num_experts", 32, 4, "moe_intermediate_size"),
        "router_bias": boolean("use_expert_bias", True),
        "router_score": "sigmoid",
        "router_normalized": boolean("norm_topk_prob", True),
        "router_scaling_factor": real("routed_scaling_factor", 1.0),
    }
    return _experts_behind(config, config.dense_layers("num_dense_layers", 2), experts)


_CWM: Record = {
    **DECODER_1E5,
    "head_dim": integer("head_dim", 128),
    "rope": rope(base=1e6),
    "mlp_bias": boolean("mlp_bias", False),
}


def _cwm_windows(config: ConfigFields) -> Fields:
    """The first of each four layers attends in full, and the last one (configuration_cwm.py)."""
    layers = config.layers()
    full = [layer % 4 == 0 or layer == layers - 1 for layer in range(layers)]
    return _listed_windows(config, window_length(config, 8192), full, "sliding_window")


_STARCODER2: Record = {
    **SIZES,
    **layer_norms(boolean("use_bias", True)),
    "kv_heads": integer("num_key_value_heads", 2),
    "norm_epsilon": real("norm_epsilon", 1e-5),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "rope": rope(),
    **activation("hidden_act", "gelu_pytorch_tanh", PLAIN),
}
_NEMOTRON: Record = {
    **SIZES,
    **layer_norms(boolean("mlp_bias", False)),
    **BIASES,
    "kv_heads": integer("num_key_value_heads", HEADS),
    "head_dim": integer("head_dim", optional=True),
    "norm_epsilon": real("norm_eps", 1e-5),
    "norm_zero_centered": True,
    "rope": rope(fraction=0.5),
    **activation("hidden_act", "relu2", PLAIN),
}

_JAIS2: Record = {
    **_NEMOTRON,
    **biases(boolean("attention_bias", True)),
    "mlp_bias": boolean("mlp_bias", True),
    "norm_epsilon": real("layer_norm_eps", 1e-5),
    "norm_zero_centered": False,
    "rope": rope(),
}


# GPT-like families, with layer norms and feed-forwards without a gate.

_GPT2: Record = {
    **layer_norms(True),
    "layers": lambda config: config.layers("n_layer"),
    "hidden": integer("n_embd"),
    "ffn_hidden": lambda config: config.count("n_inner", 4 * config.count("n_embd")),
    "heads": integer("n_head"),
    "kv_heads": integer("n_head"),
    "vocab": integer("vocab_size"),
    "norm_epsilon": real("layer_norm_epsilon", 1e-5),
    **activation("activation_function", "gelu_new", PLAIN),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "position": "learned",
    "max_positions": integer("n_positions", 1024),
}


def _bigcode_heads(config: ConfigFields) -> int:
    config.passed_over("num_key_value_heads")
    return 1 if config.flag("multi_query", True) else config.count("n_head")


_BIGCODE: Record = {
    **_GPT2,
    "kv_heads": _bigcode_heads,
    **activation("activation_function", "gelu_pytorch_tanh", PLAIN),
}
_GPTJ: Record = {
    **_GPT2,
    **biases(False),
    "norms_per_layer": 1,
    "parallel_block": True,
    "output_bias": True,
    "tied_embeddings": boolean("tie_word_embeddings", False),
    "position": "rope",
    "max_positions": None,
    "rope": lambda config: rope_fields(
        config,
        fraction=config.count("rotary_dim", 64) * config.count("n_head") / config.count("n_embd"),
    ),
}
_BLOOM: Record = {
    **layer_norms(True),
    "layers": lambda config: config.layers("n_layer"),
    "hidden": integer("hidden_size"),
    "ffn_hidden": lambda config: 4 * config.count("hidden_size"),
    "heads": integer("n_head"),
    "kv_heads": integer("n_head"),
    "vocab": integer("vocab_size"),
    "norm_epsilon": real("layer_norm_epsilon", 1e-5),
    "activation": "gelu",
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "position": "alibi",
    "embedding_norm": True,
}
_BLOOM_REFUSAL = only(
    "apply_residual_connection_post_layernorm",
    False,
    "only false is supported: residuals that start before the norms",
)
_GPT_NEOX: Record = {
    **SIZES,
    **layer_norms(True),
    **biases(boolean("attention_bias", True)),
    "norm_epsilon": real("layer_norm_eps", 1e-5),
    "rope": lambda config: rope_fields(
        config,
        base=config.number("rotary_emb_base", 10_000),
        fraction=config.number("rotary_pct", 0.25),
    ),
    **activation("hidden_act", "gelu", PLAIN),
    "parallel_block": boolean("use_parallel_residual", True),
}
_FALCON: Record = {
    **SIZES,
    **layer_norms(boolean("bias", False)),
    "ffn_hidden": lambda config: config.count("ffn_hidden_size", 4 * config.count("hidden_size")),
    "norm_epsilon": real("layer_norm_epsilon", 1e-5),
    "rope": rope(),
    **activation("activation", "gelu", PLAIN),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "position": lambda config: "alibi" if config.flag("alibi", False) else "rope",
}
_OPT_REFUSAL = only(
    "do_layer_norm_before", True, "only norms before the blocks are supported", shows_value=False
)
_OPT: Record = {
    **SIZES,
    **layer_norms(boolean("enable_bias", True)),
    "ffn_hidden": integer("ffn_dim"),
    **activation("activation_function", "relu", PLAIN),
    "tied_embeddings": boolean("tie_word_embeddings", True),
    "position": "learned",
    # OPT keeps two unused rows before the first position.
    "max_positions": lambda config: config.count("max_position_embeddings", 2048) + 2,
}


def _falcon_blocks(config: ConfigFields) -> Fields:
    """Keys and values of all heads, and the norms of a layer, by the generation of the file."""
    new = config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True) or new
    heads = config.count("num_attention_heads")
    config.passed_over("multi_query" if new else "num_kv_heads")
    if new:
        kv_heads = config.count("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    norms = config.count("num_ln_in_parallel_attn", 2 if new else 1) if parallel else 2
    return {"kv_heads": kv_heads, "parallel_block": parallel, "norms_per_layer": norms}


def _opt_width(config: ConfigFields) -> Fields:
    hidden = config.count("hidden_size")
    if config.count("word_embed_proj_dim", hidden) != hidden:
        what = "only a token table as wide as hidden_size is supported"
        raise config.fail("word_embed_proj_dim", what)
    return {}


# The language model of Llama 3.2 Vision.

_CROSS_ATTENTION = (
    "layers with cross-attention to images are counted as layers with attention to the text, whose widths "
    "they have"
)


def _cross_layers(config: ConfigFields) -> str:
    config.passed_over("cross_attention_layers")
    return _CROSS_ATTENTION


_MLLAMA: Record = {
    **DECODER_1E5,
    "rope": rope(base=5e5),
    "attention_note": _cross_layers,
}


# OLMo, whose norms have no weights, and nanochat, whose norms on queries and keys have none either.

_OLMO1: Record = {
    **DECODER,
    **BIASES,
    "norm": "layernorm",
    "norm_bias": False,
    "norm_weights": False,
    "norm_epsilon": 1e-5,
}
_NANOCHAT: Record = {
    **DECODER,
    **BIASES,
    "norm_weights": False,
    "embedding_norm": True,
    "qk_norm": True,
    "qk_norm_weights": False,
    "final_logit_cap": real("final_logit_softcapping", 15.0),
    **activation("hidden_act", "relu2", PLAIN),
}


# OLMo 2 and 3: the two norms of a layer come after its blocks, and keys and queries have wide ones.

_OLMO: Record = {
    **DECODER_1E5,
    **BIASES,
    "qk_norm": True,
    "qk_norm_full_width": True,
}
_OLMO2: Record = {**_OLMO, "norms_after_blocks": True}
_ROUTER = {"router_normalized": boolean("norm_topk_prob", False)}
_OLMOE: Record = {**_OLMO, "moe": {**routed_experts("num_experts", 64, 8), **_ROUTER}}
_FLEX_OLMO: Record = {
    **_OLMO2,
    "norm_epsilon": real("rms_norm_eps", 1e-6),
    "rope": rope(base=5e5),
    "moe": {**routed_experts("num_experts", 7, 5), **_ROUTER},
}


# OLMo Hybrid: Gated DeltaNet in three layers of four, whose norms stand before the blocks.


def _olmo_hybrid(config: ConfigFields) -> Fields:
    heads = config.count("num_attention_heads")
    usual = [layer % 4 == 3 for layer in range(config.layers())]
    key_heads = config.count("linear_num_key_heads", heads)
    width = config.count("linear_key_head_dim", int(0.75 * config.count("hidden_size") / key_heads))
    parameters = config.section("rope_parameters")
    turns = parameters is not None and parameters.has("rope_theta")
    config.passed_over("linear_allow_neg_eigval")
    return {
        "position": "rope" if turns or config.has("rope_theta") else "none",
        "linear_attention": {
            "key_heads": key_heads,
            "value_heads": config.count("linear_num_value_heads", heads),
            "key_head_dim": width,
            "value_head_dim": config.count("linear_value_head_dim", 2 * width),
            "conv_kernel": config.count("linear_conv_kernel_dim", 4),
            "own_gates": True,
        },
        **_linear_order(config, usual),
    }


_MIXTRAL: Record = {
    **DECODER_1E5,
    "rope": rope(base=1e6),
    "moe": routed_experts("num_local_experts", 8, 2),
}


def _window_everywhere(default: int | None) -> Part:
    return lambda config: window_everywhere(config, window_length(config, default))


def _windows(default: int, every: int) -> Part:
    return lambda config: windows(config, default, every)


# MiMo-V2, Step 3.5 and 3.7, Laguna: layers with a window have heads of their own, and a sigmoid routes behind
# dense layers (transformers 5.23, models/mimo_v2_flash, step3p7 and laguna, modular_*.py).


def _kinds_of_rope(
    config: ConfigFields, full: tuple[float, float], windowed: tuple[float, float]
) -> Fields:
    """Rotary embeddings of either kind of layer, by default of these bases and shares of a head."""
    (base, fraction), (windowed_base, windowed_fraction) = full, windowed
    parameters = config.section("rope_parameters")
    of_windows = None if parameters is None else parameters.section("sliding_attention")
    if parameters is not None:
        parameters.passed_over("original_max_position_embeddings")
    if of_windows is not None:
        of_windows.passed_over("rope_type")
        windowed_base = of_windows.number("rope_theta", windowed_base)
        windowed_fraction = of_windows.number("partial_rotary_factor", windowed_fraction)
    fields = rope_fields(config, base=base, fraction=fraction)
    fields.setdefault("windowed_base", windowed_base)
    if windowed_fraction != fields["fraction"]:
        fields["windowed_fraction"] = windowed_fraction
    return fields


def _with_window_heads(
    config: ConfigFields, full: list[bool], window: int | None, windowed: Fields
) -> Fields:
    """The window and the heads under it, where layers have both kinds and these are unlike."""
    order = window_order(config, window, full)
    heads = config.count("num_attention_heads")
    if windowed.get("heads") == heads:
        windowed = {name: value for name, value in windowed.items() if name != "heads"}
    return order | ({"window_heads": windowed} if any(full) and not all(full) else {})


def _dense_in_front(config: ConfigFields, name: str, routed: list[bool]) -> int:
    """How many layers have no experts, of a list that must put them first."""
    dense = routed.count(False)
    if routed != [False] * dense + [True] * (len(routed) - dense) or len(routed) != config.layers():
        what = f"must put layers without experts first, of {config.layers()} layers"
        raise config.fail(name, what)
    return dense


_MIMO_V2_NOTE = (
    "transformers runs attention with values of another width by FlashAttention 4 or unfused; the price is "
    "that of the framework's own fused kernel, and what values are multiplied by has none"
)


def _mimo_v2(config: ConfigFields) -> Fields:
    layers, kinds = config.layers(), config.entries("layer_types")
    older = config.entries("hybrid_layer_pattern")
    full = [layer == 0 or (layer + 1) % 6 == 0 for layer in range(layers)]
    if kinds:
        full = full_layers(config, kinds, "sliding_attention")
    elif older:
        if len(older) != layers or not set(map(str, older)) <= {"0", "1"}:
            what = f"must list 0 (full) or 1 (windowed) for each of {layers} layers"
            raise config.fail("hybrid_layer_pattern", what, older)
        full = [kind == 0 for kind in older]
    width, values = config.count("head_dim", 192), config.count("v_head_dim", 128)
    if config.count("swa_v_head_dim", values) != values:
        what = f"only that of layers in full, v_head_dim {values}, is supported"
        raise config.fail("swa_v_head_dim", what, config.count("swa_v_head_dim"))
    # A query sees so many positions before its own (modular_mimo_v2_flash.py).
    window = config.count("sliding_window", 129)
    before = config.count("sliding_window_size", optional=True)
    windowed: Fields = {
        "heads": config.count("swa_num_attention_heads", config.count("num_attention_heads")),
        "kv_heads": config.count(
            "swa_num_key_value_heads", 2 * config.count("num_key_value_heads")
        ),
        "head_dim": config.count("swa_head_dim", width),
        "sinks": config.flag("add_swa_attention_sink_bias", True),
    }
    config.passed_over("attention_chunk_size", "attention_value_scale")
    return {
        "head_dim": width,
        "value_head_dim": None if values == width else values,
        **_with_window_heads(config, full, window if before is None else before + 1, windowed),
        "attention_note": _MIMO_V2_NOTE,
    }


def _mimo_v2_experts(config: ConfigFields) -> Fields:
    dense = _experts_listed(config, 1)
    if config.is_list("moe_layer_freq") and not config.has("mlp_layer_types"):
        routed = [layer == 1 for layer in config.entries("moe_layer_freq")]
        dense = _dense_in_front(config, "moe_layer_freq", routed)
    config.passed_over("topk_method", "topk_group", "moe_layer_freq")
    record: Record = {
        **routed_experts("n_routed_experts", 256, 8, "moe_intermediate_size"),
        **_GLM_ROUTER,
        "dense_layers": dense,
        "router_scaling_factor": real("routed_scaling_factor", 1.0),
    }
    return {"moe": read_fields(config, record)}


def _mimo_v2_rope(config: ConfigFields) -> Fields:
    share = config.number("partial_rotary_factor", 0.334)
    return _kinds_of_rope(config, (5e6, share), (config.number("swa_rope_theta", 1e4), share))


_MIMO_V2: Record = {
    **DECODER,
    "rope": _mimo_v2_rope,
    "norm_epsilon": lambda config: config.number(
        "layernorm_epsilon", config.number("rms_norm_eps", 1e-5)
    ),
    "attention_bias": boolean("attention_bias", False),
    "attention_sinks": boolean("add_full_attention_sink_bias", False),
}
_MIMO_V2_REFUSALS: Parts = (
    only("n_group", 1, "only 1 is supported: experts in one group"),
    only("scoring_func", "sigmoid", "only sigmoid is supported"),
    only("n_shared_experts", 0, "only 0 is supported: no shared expert"),
)


def _step_lists(config: ConfigFields) -> Fields:
    """Order and heads, of lists that may go on with the layers of prediction modules."""
    layers = config.layers()
    modules = config.count("num_nextn_predict_layers", 0, least=0)
    kinds = config.entries("layer_types")
    if len(kinds) == layers + modules:
        kinds = kinds[:layers]
    full = full_layers(config, kinds, "sliding_attention") if kinds else [True] * layers
    section = config.section("attention_other_setting")
    heads, kv_heads = config.count("num_attention_heads", 64), _step_kv_heads(config)
    width = config.count("head_dim", 128)
    if section is not None:
        section.passed_over("attention_type")
        heads = section.count("num_attention_heads", heads)
        kv_heads = section.count("num_attention_groups", kv_heads)
        width = section.count("head_dim", width)
    heads = config.count("num_sliding_attention_heads", heads)
    scalar = config.number("query_pre_attn_scalar", width)
    windowed: Fields = {"heads": heads, "kv_heads": kv_heads, "head_dim": width}
    config.passed_over(
        "per_layer_config", "mtp_layer_types", "mtp_mlp_layer_types", "swiglu_limits",
        "swiglu_limits_shared", "num_nextn_predict_layers", "max_seq_len", "yarn_only_types",
        "need_fp32_gate", "att_impl_type", "use_moe", "moe_every_n_layer", "moe_layer_offset",
    )  # fmt: skip
    dropped = "limits of single layers' gates have no price"
    if modules:
        dropped += (
            "; multi-token prediction is left out: it is not planned beside heads of two kinds"
        )
    return {
        **_with_window_heads(config, full, config.count("sliding_window", optional=True), windowed),
        "attention_scale": None if scalar == width or scalar <= 0 else scalar**-0.5,
        "attention_note": dropped,
    }


def _step_kv_heads(config: ConfigFields) -> int:
    return config.count("num_attention_groups", config.count("num_key_value_heads", 8))


def _step_rope(config: ConfigFields) -> Fields:
    """Bases and shares of a head, which older files list layer by layer."""
    kinds = config.entries("layer_types")
    bases = config.entries("rope_theta") if config.is_list("rope_theta") else []
    shares = config.entries("partial_rotary_factors")
    of_kinds: list[tuple[float, float]] = []
    for kind in ("full_attention", "sliding_attention"):
        first_layer = kinds.index(kind) if kind in kinds else 0
        base = bases[first_layer] if first_layer < len(bases) else 1e4
        share = shares[first_layer] if first_layer < len(shares) else 1.0
        if not isinstance(base, int | float) or not isinstance(share, int | float):
            name = "rope_theta" if not isinstance(base, int | float) else "partial_rotary_factors"
            raise config.fail(name, "must list a number for each layer")
        of_kinds.append((float(base), float(share)))
    full, windowed = of_kinds
    if not bases:
        return _kinds_of_rope(config, full, windowed)
    scaling = config.section("rope_scaling")
    fields: Fields = {"base": full[0], "fraction": full[1], "windowed_base": windowed[0]}
    if windowed[1] != full[1]:
        fields["windowed_fraction"] = windowed[1]
    return fields | ({} if scaling is None else {"scaling": rope_scaling(config, scaling)})


def _step_experts(config: ConfigFields) -> Fields:
    layers, kinds = config.layers(), config.entries("mlp_layer_types")
    routed = [layer >= 3 for layer in range(layers)]
    name = "mlp_layer_types" if kinds else "moe_layers_enum"
    if kinds:
        routed = [kind == "sparse" for kind in kinds[:layers]]
    elif config.has(name):
        listed = config.entries(name) if config.is_list(name) else config.text(name, "").split(",")
        numbers = {str(number).strip() for number in listed}
        routed = [str(layer) in numbers for layer in range(layers)]
    return _experts_behind(config, _dense_in_front(config, name, routed), _STEP_EXPERTS)


_STEP_EXPERTS: Record = {
    "experts": integer("moe_num_experts", integer("n_routed_experts", 288)),
    "top_k": integer("moe_top_k", integer("num_experts_per_tok", 8)),
    "moe_ffn_hidden": integer("moe_intermediate_size", 1280),
    "shared_experts": 1,
    "shared_ffn_hidden": integer("share_expert_dim", integer("share_expert_dims", 1280)),
    **SIGMOID,
    "router_normalized": True,
    "router_scaling_factor": real("moe_router_scaling_factor", 1.0),
}


_STEP: Record = {
    **DECODER,
    "heads": integer("num_attention_heads", 64),
    "hidden": integer("hidden_size", 4096),
    "ffn_hidden": integer("intermediate_size", 11_264),
    "kv_heads": _step_kv_heads,
    "head_dim": integer("head_dim", 128),
    "vocab": integer("vocab_size", 128_815),
    **SMALLER_EPSILON,
    "norm_zero_centered": True,
    "qk_norm": True,
    "attention_head_gates": True,
    "rope": _step_rope,
    **ALL_BIASES,
}
_STEP_REFUSALS: Parts = (
    only("use_head_wise_attn_gate", True, "only true is supported: a gate on each head"),
    only("use_qk_norm", True, "only true is supported"),
    only("zero_centered", True, "only true is supported: norms that multiply by 1 + weight"),
    only("sink", False, "sinks are not supported in this family"),
    only("moe_router_activation", "sigmoid", "only sigmoid is supported"),
    only("norm_expert_weight", True, "only true is supported: weights of experts that add up to 1"),
    only("use_moe_router_bias", True, "only true is supported"),
    absent("sparse_attention_config", "attention to chosen blocks of positions is not supported"),
)


def _laguna(config: ConfigFields) -> Fields:
    """Heads, which the file gives layer by layer, alike in all layers of a kind."""
    if config.has("gating") and config.is_text("gating"):
        if config.text("gating", "") != "per-head":
            raise config.fail(
                "gating", "only true, or per-head, is supported", config.text("gating", "")
            )
    elif not config.flag("gating", True):
        raise config.fail("gating", "only true, or per-head, is supported", False)
    config.passed_over("gating_types", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
    layers = config.layers()
    full = _full_layers(config, "sliding_attention", [True] * layers)
    listed = config.entries("num_attention_heads_per_layer")
    heads = config.count("num_attention_heads", 48)
    of_layers = listed or [heads] * layers
    of_kinds = {
        kind: {
            str(number) for number, attends in zip(of_layers, full, strict=False) if attends is kind
        }
        for kind in (True, False)
    }
    of_full, of_windowed = (next(iter(of_kinds[kind] or {str(heads)})) for kind in (True, False))
    if len(of_layers) != layers or max(map(len, of_kinds.values())) > 1 or of_full != str(heads):
        what = f"must give layers of a kind as many heads each, those in full num_attention_heads {heads}"
        raise config.fail("num_attention_heads_per_layer", what)
    if not of_windowed.isdecimal() or not 1 <= int(of_windowed) <= LARGEST_COUNT:
        what = f"must list numbers from 1 to {LARGEST_COUNT}"
        raise config.fail("num_attention_heads_per_layer", what, of_windowed)
    windowed: Fields = {
        "heads": int(of_windowed),
        "kv_heads": config.count("num_key_value_heads", 8),
        "head_dim": config.count("head_dim", 128),
    }
    return _with_window_heads(config, full, config.count("sliding_window", 512), windowed)


def _laguna_experts(config: ConfigFields) -> Fields:
    experts: Record = {
        **routed_experts("num_experts", 256, 8, "moe_intermediate_size"),
        "shared_experts": 1,
        "shared_ffn_hidden": integer("shared_expert_intermediate_size", 512),
        **SIGMOID,
        "router_scaling_factor": real("moe_routed_scaling_factor", 1.0),
    }
    return _experts_behind(config, _experts_listed(config, 1), experts)


_LAGUNA: Record = {
    **DECODER,
    "heads": integer("num_attention_heads", 48),
    "kv_heads": integer("num_key_value_heads", 8),
    "head_dim": integer("head_dim", 128),
    "rope": lambda config: _kinds_of_rope(config, (5e5, 0.5), (1e4, 1.0)),
    "qk_norm": True,
    "attention_head_gates": True,
    **BIASES,
}


def _no_router_cap(config: ConfigFields) -> Fields:
    if config.number("moe_router_logit_softcapping", 0.0):
        raise config.fail(
            "moe_router_logit_softcapping", "only 0 is supported: scores without a cap"
        )
    return {}


_LAGUNA_REFUSALS: Parts = (
    only("moe_apply_router_weight_on_input", False, "only false is supported"),
    _no_router_cap,
)


# Flint and Kolibri 1: Qwen3's attention, which knows positions under windows alone, and experts by a sigmoid
# (transformers 5.23, models/flint and kolibri1, modular_*.py).


def _rope_under_windows(is_full: _InFull) -> Part:
    """A window of 513 positions over the layers that the file lists, or all but those of `is_full`."""

    def read(config: ConfigFields) -> Fields:
        layers = config.layers()
        full = [is_full(layer, layers) for layer in range(layers)]
        order = _listed_windows(config, window_length(config, 513), full, "sliding_window")
        return order | {"rope_in_windows_alone": bool(order)}

    return read


def _flint_experts(config: ConfigFields) -> Fields:
    listed = config.entries("mlp_only_layers")
    dense = len(listed) if config.has("mlp_only_layers") else 2
    if listed != list(range(dense))[: len(listed)] or config.count("decoder_sparse_step", 1) != 1:
        raise config.fail("mlp_only_layers", "must list the first layers", listed)
    return _experts_behind(config, dense, lambda each: _sigmoid_moe(each, 256, {}))


def _sigmoid_moe(config: ConfigFields, experts: int, router: Fields) -> Fields:
    """Routed experts of a width of their own beside one that every token takes."""
    record: Record = {
        **routed_experts("num_experts", experts, 6, "moe_intermediate_size"),
        "shared_experts": 1,
        "shared_ffn_hidden": integer("shared_expert_intermediate_size"),
        "router_score": "sigmoid",
    }
    return read_fields(config, record) | router


def _kolibri_experts(config: ConfigFields) -> Fields:
    normalized = config.flag("norm_topk_prob", False)
    router: Fields = {"router_bias": True, "router_normalized": normalized}
    return {"moe": _sigmoid_moe(config, 384, router)}


_FLINT: Record = {**_QWEN3, "attention_sinks": True}
_KOLIBRI: Record = {
    **{name: value for name, value in _QWEN3.items() if name not in BIASES},
    "ffn_hidden": 0,
    "norms_per_layer": 4,
}
_FLINT_PARTS: Parts = (
    only("norm_topk_prob", True, "only true is supported: weights of experts that add up to 1"),
    _FLINT,
    _rope_under_windows(lambda layer, layers: layer < 2 or layer % 4 == 1 or layer == layers - 1),
    _flint_experts,
)
_KOLIBRI_PARTS: Parts = (
    _KOLIBRI,
    _rope_under_windows(lambda layer, layers: (layer + 1) % 5 == 0),
    _kolibri_experts,
)


@dataclass(frozen=True)
class Family:
    """A family of models that can be read."""

    architecture: str
    """The class that `architectures` names, for a file without `model_type`; empty where none tells."""
    parts: Parts
    """What is read, the later parts over the earlier ones."""


_GEMMA3_PARTS = (_GEMMA3, _gemma_scale, _gemma3_windows)
_GEMMA4_PARTS: Parts = (*_gemma4_parts(table_width=256, window=512), _gemma4_experts)
_GEMMA4_UNIFIED_PARTS: Parts = (
    only(
        "hidden_size_per_layer_input", 0, "only 0 is supported: layers have no inputs of their own"
    ),
    *_gemma4_parts(table_width=0, window=1024),
)
_LLAMA4_PARTS = (_LLAMA4, _llama4_chunks)
_QWEN2_PARTS = (_QWEN2, _qwen_windows)
# Layers of the text part of Qwen3-VL know no window (modeling_qwen3_vl.py).
_QWEN3_VL_PARTS: Parts = ({**_QWEN3, "rope": rope(base=5e5)},)

_GRANITE_DENSE: Parts = (_GRANITE, {"mlp_bias": boolean("mlp_bias", False)})

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", (DECODER, BIASES, {"mlp_bias": boolean("mlp_bias", False)})
    ),
    "llama4": Family("Llama4ForConditionalGeneration", _LLAMA4_PARTS),
    "llama4_text": Family("Llama4ForCausalLM", _LLAMA4_PARTS),
    "mistral": Family("MistralForCausalLM", (DECODER, _window_everywhere(4096))),
    "mixtral": Family("MixtralForCausalLM", (_MIXTRAL, _window_everywhere(None))),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN2_PARTS),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", (_QWEN2, _qwen2_moe_windows, _qwen2_experts)),
    "qwen3": Family("Qwen3ForCausalLM", (_QWEN3, _qwen_windows)),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", (_QWEN3_MOE, _qwen3_moe_windows, {"moe": _qwen_experts})
    ),
    # The language model of Qwen3-Omni's thinker, whose layers know no window (modeling_qwen3_omni_moe.py).
    "qwen3_omni_moe_text": Family("", (_QWEN3_MOE, {"moe": _qwen3_omni_experts})),
    "qwen2_5_omni_text": Family("", _QWEN2_PARTS),
    "mellum": Family("MellumForCausalLM", (_MELLUM, _mellum)),
    "qwen3_next": Family("Qwen3NextForCausalLM", (_QWEN3_NEXT, _qwen3_next_order)),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", (_QWEN35, _qwen3_next_order)),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", (_QWEN35, _qwen3_next_order)),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", (_QWEN35_MOE, _qwen3_next_order)),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", (_QWEN35_MOE, _qwen3_next_order)),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", (DECODER, _DEEPSEEK, _deepseek_experts({}))),
    # DeepSeek-V2's experts beside a Llama's attention (modular_deepseek_ocr2.py).
    "deepseek_ocr2_text": Family(
        "", (DECODER, BIASES, _deepseek_experts({"router_normalized": False}))
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK_V3),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", _DEEPSEEK_V32),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", _DEEPSEEK_V32),
    "kimi_k2": Family("", _DEEPSEEK_V3),
    "axk1": Family("AXK1ForCausalLM", _AXK1),
    "sarvam_mla": Family(
        "SarvamMLAForCausalLM",
        (DECODER, _DEEPSEEK, _deepseek_experts(_V3_ROUTER, dense_layers=1), _NEXT_TOKENS),
    ),
    "bailing_moe": Family(
        "BailingMoeV2ForCausalLM", (*_BAILING_REFUSALS, _BAILING, _bailing_experts)
    ),
    "exaone": Family("ExaoneForCausalLM", (_EXAONE,)),
    "internlm2": Family("InternLM2ForCausalLM", (_INTERNLM2,)),
    "internlm3": Family("InternLM3ForCausalLM", (_INTERNLM3,)),
    "mimo": Family("MiMoForCausalLM", (_MIMO, _qwen_windows)),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM", (*_MIMO_V2_REFUSALS, _MIMO_V2, _mimo_v2, _mimo_v2_experts)
    ),
    "step3p5": Family("Step3p5ForCausalLM", (*_STEP_REFUSALS, _STEP, _step_lists, _step_experts)),
    "flint": Family("FlintForCausalLM", _FLINT_PARTS),
    "kolibri1": Family("Kolibri1ForCausalLM", _KOLIBRI_PARTS),
    "laguna": Family("LagunaForCausalLM", (*_LAGUNA_REFUSALS, _LAGUNA, _laguna, _laguna_experts)),
    "bailing_hybrid": Family("BailingHybridForCausalLM", _LING3),
    "kimi_linear": Family("KimiLinearForCausalLM", _KIMI_LINEAR),
    "minimax": Family("MiniMaxForCausalLM", _MINIMAX_01),
    "minimax_text_01": Family("MiniMaxText01ForCausalLM", _MINIMAX_01),
    "minimax_m1": Family("MiniMaxM1ForCausalLM", _MINIMAX_01),
    "gpt_oss": Family("GptOssForCausalLM", (_GPT_OSS, _windows(128, 2))),
    "olmo": Family("OlmoForCausalLM", (_OLMO1,)),
    "nanochat": Family("NanoChatForCausalLM", (_NANOCHAT,)),
    "olmo2": Family("Olmo2ForCausalLM", (_OLMO2,)),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        ({**_OLMO, "norm_epsilon": real("rms_norm_eps", 1e-6)}, _olmo_hybrid),
    ),
    "flex_olmo": Family("FlexOlmoForCausalLM", (_FLEX_OLMO,)),
    "olmo3": Family("Olmo3ForCausalLM", ({**_OLMO2, "rope": rope(base=5e5)}, _windows(4096, 4))),
    "olmoe": Family("OlmoeForCausalLM", (_OLMOE,)),
    "glm": Family("GlmForCausalLM", (_GLM,)),
    "glm4": Family("Glm4ForCausalLM", (_GLM4,)),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        (DECODER, _DEEPSEEK, SMALLER_EPSILON, _glm4_lite_order, _NEXT_TOKENS),
    ),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        (DECODER, _DEEPSEEK, _deepseek_experts(_MISTRAL4_ROUTER, always=True)),
    ),
    "dots1": Family("Dots1ForCausalLM", (_DOTS1, _dots_windows, _deepseek_experts(_GLM_ROUTER))),
    "ernie4_5": Family("Ernie4_5ForCausalLM", ({**_ERNIE, "head_dim": integer("head_dim", 128)},)),
    "paddleocr_vl_text": Family("", ({**_ERNIE, "head_dim": integer("head_dim", 128)},)),
    "aria_text": Family(
        "AriaTextForCausalLM",
        (only("mlp_bias", False, "biases beside experts are not supported"), _ARIA),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        (
            only("use_bias", False, "biases beside experts are not supported"),
            _ERNIE,
            _ernie_experts,
        ),
    ),
    "granite": Family("GraniteForCausalLM", _GRANITE_DENSE),
    "granite4_vision_text": Family("", _GRANITE_DENSE),
    "granite_docling_text": Family("", _GRANITE_DENSE),
    "granite_swa": Family(
        "GraniteSWAForCausalLM", (*_GRANITE_DENSE, {"attention_sinks": True}, _granite_windows)
    ),
    "granitemoe": Family("GraniteMoeForCausalLM", (_GRANITE_MOE,)),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", (_GRANITE, _granite_shared)),
    "granitemoe_swa": Family(
        "GraniteMoeSWAForCausalLM",
        (_GRANITE, _granite_shared, {"attention_sinks": True}, _granite_windows),
    ),
    "hyperclovax": Family("HyperCLOVAXForCausalLM", (_HYPERCLOVAX,)),
    "exaone4": Family("Exaone4ForCausalLM", (_EXAONE4, _exaone_windows)),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        (_EXAONE_ROUTER, _EXAONE_MOE, _exaone_windows, _sigmoid_experts(_EXAONE_FACTOR)),
    ),
    "hy_v3": Family("HYV3ForCausalLM", (_HY3, _sigmoid_experts(_HY3_FACTOR))),
    "cohere": Family("CohereForCausalLM", (_COHERE,)),
    "cohere2": Family("Cohere2ForCausalLM", (_COHERE_BLOCK, _COHERE2, _cohere2_windows)),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM", (_COHERE2_MOE, _cohere2_windows, _cohere2_experts)
    ),
    "phi": Family("PhiForCausalLM", (_PHI_NORMS, _PHI)),
    "phimoe": Family("PhimoeForCausalLM", (_PHIMOE, _window_everywhere(None))),
    "stablelm": Family("StableLmForCausalLM", (_STABLELM,)),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM", (*_HUNYUAN_MOE, _HUNYUAN, _hunyuan_experts)
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        (*_SOLAR_REFUSALS, _SOLAR, _deepseek_experts(_GLM_ROUTER, always=True)),
    ),
    "afmoe": Family("AfmoeForCausalLM", (*_AFMOE_REFUSALS, _AFMOE, _afmoe)),
    "muse_glimmer_text": Family("", (_MUSE_GLIMMER, _muse_windows)),
    "smollm3": Family("SmolLM3ForCausalLM", (_SMOLLM3, _smollm3_positions)),
    "seed_oss": Family("SeedOssForCausalLM", (_SEED_OSS,)),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", (_HUNYUAN,)),
    "cosmos3_edge_text": Family("", (_COSMOS_EDGE,)),
    "arcee": Family("ArceeForCausalLM", (_ARCEE,)),
    "apertus": Family(
        "ApertusForCausalLM",
        (
            only("qk_norm", True, "only true is supported"),
            only("post_norm", False, "norms behind the blocks are not supported"),
            _APERTUS,
        ),
    ),
    "lfm2": Family("Lfm2ForCausalLM", (_LFM2_BIAS, _LFM2, _short_convolutions)),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", (_LFM2_BIAS, _LFM2_MOE, _short_convolutions, _lfm2_experts)
    ),
    "helium": Family("HeliumForCausalLM", (_helium_output, _HELIUM)),
    "iquestcoder": Family("IQuestCoderForCausalLM", (_IQUEST,)),
    "youtu": Family("YoutuForCausalLM", (DECODER, _YOUTU)),
    "minicpm3": Family("MiniCPM3ForCausalLM", (DECODER, _MINICPM3)),
    "jais2": Family("Jais2ForCausalLM", (_JAIS2,)),
    "ministral": Family("MinistralForCausalLM", (DECODER, _ministral_windows)),
    "ministral3": Family("Ministral3ForCausalLM", (_MINISTRAL3, _window_everywhere(None))),
    "cwm": Family("CwmForCausalLM", (_CWM, _cwm_windows)),
    "starcoder2": Family("Starcoder2ForCausalLM", (_STARCODER2, _window_everywhere(None))),
    "nemotron": Family("NemotronForCausalLM", (_NEMOTRON,)),
    "gemma": Family("GemmaForCausalLM", (_GEMMA1,)),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (_GLM4_MOE, _deepseek_experts(_GLM_ROUTER, dense_layers=1, always=True)),
    ),
    "sarvam_moe": Family(
        "SarvamMoEForCausalLM",
        (_SARVAM_MOE, _deepseek_experts(_V3_ROUTER, dense_layers=1, always=True)),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        (
            only("qk_norm_type", "per_layer", "only per_layer is supported"),
            _MINIMAX_M2_REFUSAL,
            _MINIMAX_M2,
            _minimax_mtp,
        ),
    ),
    "minimax_m3_vl_text": Family("MiniMaxM3SparseForCausalLM", (_MINIMAX_M3, _minimax_m3)),
    "phi3": Family("Phi3ForCausalLM", (DECODER, SMALLER_EPSILON, _window_everywhere(None))),
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        ({**_GEMMA2, "norms_per_layer": 2}, _gemma_scale, _windows(4096, 2)),
    ),
    "gemma2": Family("Gemma2ForCausalLM", (_GEMMA2, _gemma_scale, _windows(4096, 2))),
    "gemma3": Family("Gemma3ForConditionalGeneration", _GEMMA3_PARTS),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA3_PARTS),
    "gemma4": Family("Gemma4ForConditionalGeneration", _GEMMA4_PARTS),
    "gemma4_text": Family("Gemma4ForCausalLM", _GEMMA4_PARTS),
    "gemma4_unified": Family("Gemma4UnifiedForConditionalGeneration", _GEMMA4_UNIFIED_PARTS),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", _GEMMA4_UNIFIED_PARTS),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", _QWEN2_PARTS),
    "qwen2_vl_text": Family("", _QWEN2_PARTS),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", _QWEN2_PARTS),
    "qwen2_5_vl_text": Family("", _QWEN2_PARTS),
    "glm4v_text": Family("", (_GLM4,)),
    "glm_ocr_text": Family("", ({**_GLM4, "attention_bias": False},)),
    "hunyuan_vl_text": Family(
        "", ({**_HUNYUAN, "tied_embeddings": boolean("tie_word_embeddings", True)},)
    ),
    "glm4v_moe_text": Family(
        "",
        (
            {**_GLM4_MOE, "attention_bias": boolean("attention_bias", True), "mtp_layers": 0},
            _deepseek_experts(_GLM_ROUTER, dense_layers=1, always=True),
        ),
    ),
    "qwen3_vl_text": Family("", _QWEN3_VL_PARTS),
    "qwen3_vl_moe_text": Family("", (*_QWEN3_VL_PARTS, {"moe": _qwen3_vl_experts})),
    "mllama_text_model": Family("", (_MLLAMA,)),
    "gpt2": Family("GPT2LMHeadModel", (_GPT2,)),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", (_BIGCODE,)),
    "gptj": Family("GPTJForCausalLM", (_GPTJ,)),
    "codegen": Family("CodeGenForCausalLM", (_GPTJ,)),
    "bloom": Family("BloomForCausalLM", (_BLOOM_REFUSAL, _BLOOM)),
    "gpt_neox": Family("GPTNeoXForCausalLM", (_GPT_NEOX,)),
    "falcon": Family("FalconForCausalLM", (_FALCON, _falcon_blocks)),
    "opt": Family("OPTForCausalLM", (_opt_width, _OPT_REFUSAL, _OPT)),
    "nemotron_h": Family("NemotronHForCausalLM", NEMOTRON_H),
    "mamba2": Family("Mamba2ForCausalLM", MAMBA2),
    "mamba": Family("MambaForCausalLM", MAMBA),
    "falcon_mamba": Family("FalconMambaForCausalLM", MAMBA),
    "jamba": Family("JambaForCausalLM", JAMBA),
    "falcon_h1": Family("FalconH1ForCausalLM", FALCON_H1),
    "bamba": Family("BambaForCausalLM", BAMBA),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
}
"""By `model_type`."""


# Fields that a file leaves out where they are what the family's configuration class has.
#
# transformers writes no field that is at its class's default (save_pretrained), and reads an absent one as
# that default, where null often stands for another thing: as many key-value heads as heads, or no latent.


_KEY_VALUE_HEADS = {
    2: "qwen3_next qwen3_5_moe qwen3_5_moe_text internlm3 glm glm4 glm4v_text ernie4_5 starcoder2 "
    "paddleocr_vl_text muse_glimmer_text",
    4: "qwen3_moe qwen3_omni_moe_text qwen2_5_omni_text mellum qwen3_5 qwen3_5_text flint kolibri1 "
    "ernie4_5_moe granite_docling_text granite_swa smollm3 sarvam_moe gemma2 vaultgemma minimax_m3_vl_text",
    8: "llama4 llama4_text mistral mixtral exaone laguna minimax gpt_oss hy_v3 phimoe solar_open seed_oss "
    "lfm2 lfm2_moe iquestcoder ministral ministral3 cwm glm4_moe glm4v_moe_text minimax_m2 qwen2_vl_text "
    "qwen2_5_vl_text glm_ocr_text mllama_text_model nemotron_h jamba falcon_h1 bamba cosmos3_edge_text",
    16: "qwen2_moe gemma qwen3_vl_moe_text",
    20: "helium",
    32: "qwen2 qwen3 dots1 exaone4 exaone_moe stablelm qwen3_vl_text",
}
_OF_DEEPSEEK: dict[str, object] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
}
_OF_FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v2": {"n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_ocr2_text": {"n_routed_experts": 64, "n_shared_experts": 2},
    "deepseek_v3": _OF_DEEPSEEK,
    "deepseek_v32": _OF_DEEPSEEK,
    "glm_moe_dsa": {**_OF_DEEPSEEK, "q_lora_rank": 2048, "index_n_heads": 32},
    "kimi_k2": _OF_DEEPSEEK,
    "axk1": {**_OF_DEEPSEEK, "n_routed_experts": 192},
    "sarvam_mla": {"n_routed_experts": 128, "n_shared_experts": 1},
    "sarvam_moe": {"n_routed_experts": 128, "n_shared_experts": 1},
    "glm4_moe": {"n_routed_experts": 128, "n_shared_experts": 1},
    "glm4v_moe_text": {"n_routed_experts": 128, "n_shared_experts": 1},
    "glm4_moe_lite": {"n_routed_experts": 64, "n_shared_experts": 1, "q_lora_rank": 768},
    "mistral4": {"n_routed_experts": 128, "n_shared_experts": 1, "q_lora_rank": 1024},
    "solar_open": {"n_routed_experts": 128, "n_shared_experts": 1},
    "youtu": {"q_lora_rank": 1536},
    "minicpm3": {"q_lora_rank": 768},
    "granite_swa": {"tie_word_embeddings": True},
}


def class_defaults(model_type: str) -> dict[str, object]:
    """Fields that a file of a family may leave out, with what its configuration class has of them.

    Parameters
    ----------
    model_type
        One of `FAMILIES`.

    Returns
    -------
    dict of str to object
        As transformers 5.24 has them. Fields whose absence is refused, or changes nothing, are left out.

    >>> class_defaults("mistral"), class_defaults("llama")
    ({'num_key_value_heads': 8}, {})
    """
    heads = (count for count, names in _KEY_VALUE_HEADS.items() if model_type in names.split())
    of_heads = [("num_key_value_heads", count) for count in heads]
    return {**dict(of_heads), **_OF_FAMILIES.get(model_type, {})}
