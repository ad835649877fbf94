"""How Gemma 2 and 3 map to a ModelSpec."""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_parts import (
    GATED,
    Fields,
    activation_fields,
    attention_biases,
    gated_decoder,
    rope_fields,
    window_length,
    windows,
)


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
