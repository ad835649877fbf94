"""How Llama 4's config.json maps to a ModelSpec.

Where three layers in four see their own chunk of the sequence alone, the fourth has no position embedding
(`no_rope_layers` is 0 there): huggingface/transformers, modeling_llama4.py.
"""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_parts import (
    Fields,
    attention_biases,
    gated_decoder,
    one_in,
    windows,
)


def llama4_fields(config: ConfigFields) -> Fields:
    """Fields of a Llama 4: experts in each n-th layer; three layers in four see their own chunk alone."""
    layers = config.layers()
    every = config.count("no_rope_layer_interval", 4)
    rope_switches = config.entries("no_rope_layers")
    if rope_switches:
        every = one_in(config, "no_rope_layers", rope_switches.count(0), layers)
    chunk = config.count("attention_chunk_size", optional=True)
    window = windows(config, chunk, every, "chunked_attention")
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
