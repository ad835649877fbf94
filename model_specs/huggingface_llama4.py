"""How Llama 4's config.json maps to a ModelSpec.

Where three layers in four see their own chunk of the sequence alone, the fourth has no position embedding
(`no_rope_layers` is 0 there): huggingface/transformers, modeling_llama4.py.
"""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_parts import (
    Fields,
    attention_biases,
    full_layers,
    gated_decoder,
    window_order,
)


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
