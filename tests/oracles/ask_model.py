"""What Megatron's own parser and configuration make of a model's flags. Used by ask.py."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def import_model() -> None:
    importlib.import_module("ask").import_megatron()


def ask_model(case: dict[str, Any]) -> dict[str, Any]:
    importlib.import_module("ask").pretend_gpu(case["arch"])
    os.environ.update(WORLD_SIZE=str(case["world"]), RANK="0", LOCAL_RANK="0", NO_VCS_VERSION="1")
    arguments = importlib.import_module("megatron.training.arguments")
    utils = importlib.import_module("megatron.training.argument_utils")

    flags = json.loads((Path(case["dir"]) / "megatron_args.json").read_text(encoding="utf-8"))
    sys.argv = ["pretrain_gpt.py", *flags]
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    config = utils.core_transformer_config_from_args(args)
    latent = args.multi_latent_attention
    prefix = "" if latent else "yarn_"
    yarn = latent or args.position_embedding_type == "yarn"
    return {
        "position": args.position_embedding_type,
        "rope_base": float(args.rotary_base),
        "rope_fraction": args.rotary_percent,
        "llama3": args.use_rope_scaling,
        "yarn_factor": getattr(config, f"{prefix}rotary_scaling_factor") if yarn else 1.0,
        "mscale_all_dim": getattr(config, f"{prefix}mscale_all_dim") if yarn else 0.0,
        "norm_epsilon": config.layernorm_epsilon,
        "norm_zero_centered": config.layernorm_zero_centered_gamma,
        "normalization": config.normalization,
        "activation": config.activation_func.__name__,
        "gated": config.gated_linear_unit,
        "glu_offset": config.glu_linear_offset,
        "glu_limit": config.activation_func_clamp_value,
        "softmax_type": config.softmax_type,
        "window": config.window_size,
        "router_score": config.moe_router_score_function,
        "pre_softmax": config.moe_router_pre_softmax,
        "router_scale": config.moe_router_topk_scaling_factor,
        "expert_bias": config.moe_router_enable_expert_bias,
        "groups": config.moe_router_num_groups,
        "biases": config.add_bias_linear,
        "qkv_bias": config.add_qkv_bias,
        "tied": not args.untie_embeddings_and_output_weights,
        "mtp": config.mtp_num_layers or 0,
        "embedding_scale": config.mup_embedding_mult,
        "output_scale": config.mup_output_mult,
        # Of a mu-parametrization, which scales nothing else at the width that it starts from.
        "attention_scale": config.softmax_scale,
        "width_scale": config.mup_width_mult,
        "unturned": config.no_rope_freq,
        "weightless_qk_norm": config.qk_l2_norm,
        "qk_norm": config.qk_layernorm,
    }
