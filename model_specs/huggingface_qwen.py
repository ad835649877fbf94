"""How the Qwen families of config.json map to fields of a ModelSpec."""

from __future__ import annotations

from meshwright.model_specs.config_fields import ConfigFields
from meshwright.model_specs.huggingface_parts import (
    Fields,
    attention_biases,
    full_layers,
    gated_decoder,
    rope_fields,
    window_everywhere,
    window_length,
    window_order,
    windows,
)
from meshwright.model_specs.layer_order import LINEAR, order_fields


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
