"""How the Qwen families of config.json map to fields of a ModelSpec."""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_parts import (
    Fields,
    attention_biases,
    full_every,
    gated_decoder,
    qwen_windows,
    rope_fields,
)


def qwen2_fields(config: ConfigFields) -> Fields:
    """Qwen2: biases on queries, keys and values."""
    return gated_decoder(config) | {"attention_bias": True} | qwen_windows(config)


def qwen3_fields(config: ConfigFields) -> Fields:
    """Qwen3: norms on queries and keys."""
    return (
        gated_decoder(config)
        | {"head_dim": config.count("head_dim", 128), "qk_norm": True}
        | attention_biases(config)
        | qwen_windows(config)
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
    if not experts:
        return qwen2_fields(config)
    shared = {
        "shared_experts": 1,
        "shared_ffn_hidden": config.count("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }
    return qwen2_fields(config) | {"moe": experts | shared}


def qwen3_moe_fields(config: ConfigFields) -> Fields:
    """Qwen3 with routed experts."""
    return qwen3_fields(config) | {"moe": _qwen_experts(config) or None}


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
    if kinds:
        every = full_every(config, kinds, layers, "linear_attention")
    return gated_decoder(config) | {
        "head_dim": config.count("head_dim", 256),
        "rope": rope_fields(config, fraction=0.25),
        "qk_norm": True,
        "norm_zero_centered": True,
        "attention_output_gate": True,
        **attention_biases(config),
        "moe": experts or None,
        "full_attention_every": every,
        "linear_attention": {
            "key_heads": config.count("linear_num_key_heads", 16),
            "value_heads": config.count("linear_num_value_heads", 32),
            "key_head_dim": config.count("linear_key_head_dim", 128),
            "value_head_dim": config.count("linear_value_head_dim", 128),
            "conv_kernel": config.count("linear_conv_kernel_dim", 4),
        },
    }
