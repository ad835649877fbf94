"""What each layer of a model is, in the layers' order, as frameworks build it. Used by ask.py."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_EPSILONS = ("rms_norm_eps", "norm_eps", "norm_epsilon")
"""What families call the number that a norm adds."""


def import_transformers_layers() -> None:
    """Also the code of every family that is asked for: cases, forked from here, need not load it again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for case in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        document = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
        kind = type(AutoConfig.for_model(document["model_type"]).get_text_config())
        AutoModelForCausalLM._model_mapping[kind]


def ask_transformers_layers(case: dict[str, Any]) -> dict[str, Any]:
    """Kinds and weights of each layer that transformers builds of a config.json, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    document = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**document).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = importlib.import_module("ask_built").counts(model, 1)
    body = model.model
    turning = getattr(body, "rotary_emb", None)
    scaling = getattr(turning, "attention_scaling", 1.0)
    layers = [_layer(layer, i, config) for i, layer in enumerate(body.layers)]
    tied = model.lm_head.weight is body.embed_tokens.weight
    return {
        **counts,
        "layers": layers,
        "temperature": float(scaling),
        "tied": bool(tied or config.tie_word_embeddings),
        "embedding": list(body.embed_tokens.weight.shape),
        "epsilon": next(
            value for name in _EPSILONS if (value := getattr(config, name, None)) is not None
        ),
    }


def _layer(layer: Any, number: int, config: Any) -> dict[str, Any]:
    mixer = getattr(layer, "self_attn", None)
    names = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    return {
        "linear": mixer is None,
        "window": None if mixer is None else _window(mixer, number, config),
        "experts": any("experts" in name.split(".") for name in names),
        "rope": bool(getattr(mixer, "use_rope", _turns(mixer))),
        "mixer": _sum(names, ("self_attn", "linear_attn")),
        "feed_forward": _sum(names, ("mlp", "feed_forward", "block_sparse_moe")),
        "all": _sum(names, ()),
        "shapes": {
            name.removeprefix("self_attn."): list(shape)
            for name, shape in names.items()
            if name.startswith("self_attn.") and name.endswith("proj.weight")
        },
        "biases": sorted(
            name.split(".")[-2] for name in names if "attn." in name and name.endswith("proj.bias")
        ),
        "sinks": any(name.endswith("sinks") for name in names),
    }


def _turns(mixer: Any) -> bool:
    """Whether queries turn by their position: under EXAONE 4's windows alone, where it has some."""
    return (
        not hasattr(mixer, "sliding_window_pattern") or not mixer.sliding_window or mixer.is_sliding
    )


def _window(mixer: Any, number: int, config: Any) -> int | None:
    """Positions that a query sees: a module's own, of a list, or of all layers alike."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type.startswith("llama4"):
        return config.attention_chunk_size if kinds[number] == "chunked_attention" else None
    if kinds is not None:
        has_window = getattr(mixer, "is_sliding", True) and kinds[number] != "full_attention"
        return getattr(mixer, "sliding_window", None) if has_window else None
    return getattr(config, "sliding_window", None)


def _sum(names: dict[str, tuple[int, ...]], parts: tuple[str, ...]) -> int:
    total = 0
    for name, shape in names.items():
        if not parts or name.split(".")[0] in parts:
            number = 1
            for width in shape:
                number *= width
            total += number
    return total


def import_megatron_layers() -> None:
    importlib.import_module("ask").import_megatron()


def ask_megatron_layers(case: dict[str, Any]) -> dict[str, Any]:
    """Which layers of Megatron's own configuration have a window, linear attention and experts, in order."""
    ask = importlib.import_module("ask")
    ask.pretend_gpu(case["arch"])
    os.environ.update(WORLD_SIZE=str(case["world"]), RANK="0", LOCAL_RANK="0", NO_VCS_VERSION="1")
    arguments = importlib.import_module("megatron.training.arguments")
    utils = importlib.import_module("megatron.training.argument_utils")
    of_layers = importlib.import_module("megatron.core.transformer.utils")
    yarn = importlib.import_module(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
    )
    sys.argv = ["pretrain_gpt.py", *ask.read(case, "megatron_args.json")]
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    config = utils.core_transformer_config_from_args(args)
    count = config.num_layers
    windowed = [
        bool(
            of_layers.is_layer_window_attention(
                config.window_size, config.window_attn_skip_freq, number + 1
            )
        )
        for number in range(count)
    ]
    routed = [False] * count
    if config.num_moe_experts:
        frequency = config.moe_layer_freq
        routed = (
            [bool(digit) for digit in frequency]
            if isinstance(frequency, list)
            else [number % frequency == 0 for number in range(count)]
        )
    temperature = 1.0
    prefix = "" if args.multi_latent_attention else "yarn_"
    if args.multi_latent_attention or args.position_embedding_type == "yarn":
        temperature = yarn._yarn_get_concentration_factor(
            *(
                getattr(config, f"{prefix}{name}")
                for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")
            )
        )
    return {
        "windowed": windowed,
        "routed": routed,
        "window": config.window_size[0] + 1 if config.window_size else None,
        "temperature": temperature,
    }
