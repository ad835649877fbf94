"""How the image encoder of a Hugging Face config.json maps to a VisionSpec.

Defaults are those of the configuration classes in huggingface/transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

from meshwright.model_specs.config_fields import ConfigFields, Fields

_KINDS = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "gemma3": "siglip",
    "mllama": "mllama",
}
"""Kinds of encoders by `model_type` of the whole model; those of other models are not read."""

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
    whole = ConfigFields(data, where)
    config = None if kind is None else whole.section("vision_config")
    if kind is None or config is None:
        return {}
    if kind == "siglip":
        return {"kind": kind, **_siglip(whole, config, model)}
    if kind == "mllama":
        return {"kind": kind, **_mllama(whole, config, model)}
    fields: Fields = {
        "kind": kind,
        "layers": config.count("depth", 27 if kind == "qwen3_vl" else 32),
        "heads": config.count("num_heads", 16),
        "patch_size": config.count("patch_size", 16 if kind == "qwen3_vl" else 14),
        "temporal_patch": config.count("temporal_patch_size", 2),
        "merge": config.count("spatial_merge_size", 2),
    }
    return fields | _QWEN[kind](config)


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


def _siglip(whole: ConfigFields, config: ConfigFields, model: Mapping[str, object]) -> Fields:
    """SigLIP ahead of Gemma 3, which pools the patches of an image to a fixed number of tokens."""
    patch = config.count("patch_size", 16)
    side = max(config.count("image_size", 224) // patch, 1)
    tokens = whole.count("mm_tokens_per_image", 256)
    if isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        what = f"must be a square that {side} patches a side can be pooled to"
        raise whole.fail("mm_tokens_per_image", what, tokens)
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


def _mllama(whole: ConfigFields, config: ConfigFields, model: Mapping[str, object]) -> Fields:
    """Llama 3.2 Vision: local layers and global ones with two gates each, tiles, cross-attention.

    A tile has one token more than patches. Tables: positions in a tile, positions by shape of the image and
    tile, and two for the tiles; three of them have a gate (modeling_mllama.py, MllamaVisionModel).
    """
    hidden, patch = config.count("hidden_size", 1280), config.count("patch_size", 14)
    further = config.count("num_global_layers", 8, least=0)
    tiles = config.count("max_num_tiles", 4)
    of_tile = (config.count("image_size", 448) // patch) ** 2 + 1
    shapes = 1 + (len(config.entries("supported_aspect_ratios")) or 8)
    text = whole.section("text_config")
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
