"""Small config.json files with unusual but legal fields: orders of windows, dense layers in front, biases."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "olmoe",
    "llama4_text",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "glm4",
    "glm4_moe_lite",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "granite",
    "granitemoe",
    "exaone4",
    "smollm3",
    "seed_oss",
    "hunyuan_v1_dense",
    "arcee",
    "ministral3",
    "cwm",
    "starcoder2",
    "nemotron",
    "gemma",
)
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
_LISTED = (
    "qwen2", "qwen3", "qwen2_moe", "gpt_oss", "gemma2", "gemma3_text", "olmo3", "dots1", "exaone4", "cwm",
)  # fmt: skip
"""Families whose code reads `layer_types`."""
_BIASED = (
    "glm4", "dots1", "granite", "granitemoe", "smollm3", "seed_oss", "hunyuan_v1_dense", "arcee", "nemotron",
    "qwen3_5_text", "qwen3_5_moe_text", "gemma",
)  # fmt: skip
"""Further families with a switch for biases of attention."""
_YARN = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe")


def random_config(rng: random.Random, family: str) -> Config:
    """One configuration, of a few layers; the same for the same state of `rng`."""
    layers, heads = rng.choice((4, 6, 7, 9, 12)), rng.choice((4, 8))
    kv_heads = rng.choice((1, 2, heads))
    head_dim = rng.choice((16, 32))
    config: Config = {
        "model_type": family,
        "hidden_size": heads * 32,
        "intermediate_size": rng.choice((96, 160, 352)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": rng.choice((512, 1000)),
        "max_position_embeddings": 4096,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family not in (
        *_LATENT,
        "phi3",
        "olmoe",
        "ernie4_5_moe",
        "granite",
        "granitemoe",
        "starcoder2",
    ):
        config["head_dim"] = head_dim
    if family in ("phi3", "glm4", "smollm3"):
        # Their default is a token beyond these vocabularies.
        config["pad_token_id"] = 0
    if family in ("nemotron", "starcoder2"):
        name = "norm_eps" if family == "nemotron" else "norm_epsilon"
        config[name] = config.pop("rms_norm_eps")
    if family in ("llama", "qwen3", "gpt_oss", "olmo3", "olmoe", "glm4_moe", "gemma2", *_BIASED):
        config["attention_bias"] = rng.random() < 0.5
    if family in ("llama", "granite", "smollm3", "seed_oss", "arcee", "cwm", "nemotron"):
        config["mlp_bias"] = rng.random() < 0.5
    if family == "seed_oss":
        config["attention_out_bias"] = rng.random() < 0.5
    if family in ("ernie4_5", "starcoder2"):
        config["use_bias"] = rng.random() < 0.5
    config |= _windows(rng, family, layers)
    config |= _experts(rng, family, layers)
    config |= _rope(rng, family)
    if family == "gpt_oss":
        config["swiglu_limit"] = rng.choice((5.0, 7.0))
    if family in _LATENT:
        config |= {
            "q_lora_rank": rng.choice((None, 48)) if family == "deepseek_v2" else 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": rng.choice((16, 24)),
            "num_key_value_heads": heads,
            "attention_bias": rng.random() < 0.5,
        }
    return config


def _windows(rng: random.Random, family: str, layers: int) -> Config:
    window = rng.choice((16, 64))
    if family in ("mistral", "mixtral", "phi3", "ministral3", "starcoder2"):
        return {"sliding_window": rng.choice((None, window))}
    if family == "qwen3_moe":
        return {"use_sliding_window": rng.random() < 0.5, "sliding_window": window}
    return _listed_windows(rng, family, layers, window)


def _listed_windows(rng: random.Random, family: str, layers: int, window: int) -> Config:
    """Of families that treat layers unlike, by a list or by a number of first ones."""
    if family in ("qwen2", "qwen3", "qwen2_moe") and rng.random() < 0.5:
        return {
            "use_sliding_window": rng.random() < 0.8,
            "sliding_window": window,
            "max_window_layers": rng.randint(0, layers),
        }
    if family == "llama4_text":
        rope = [rng.randint(0, 1) for _ in range(layers - 2)]
        return {"no_rope_layers": [0, *rope, 1], "attention_chunk_size": window}
    if family.startswith(("qwen3_next", "qwen3_5")):
        kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers - 2)]
        return {"layer_types": ["full_attention", *kinds, "linear_attention"]}
    if family in _LISTED:
        kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)]
        listed = {"layer_types": [*kinds, "sliding_attention"], "sliding_window": window}
        return listed | ({"use_sliding_window": True} if family.startswith("qwen") else {})
    return {}


def _experts(rng: random.Random, family: str, layers: int) -> Config:
    experts = rng.choice((4, 8))
    width = rng.choice((32, 48))
    front = rng.randint(0, layers)
    if family in ("mixtral", "gpt_oss"):
        return {"num_local_experts": experts, "num_experts_per_tok": 2}
    if family == "olmoe":
        return {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        steps = [step for step in (2, 3) if layers % step == 0]
        apart: Config = {"mlp_only_layers": list(range(front))}
        if steps and rng.random() < 0.5:
            apart = {"decoder_sparse_step": rng.choice(steps)}
        return apart | {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": rng.choice((64, 96)),
            "norm_topk_prob": rng.random() < 0.5,
        }
    if family == "llama4_text":
        step = rng.choice([step for step in (1, 2, 3) if layers % step == 0])
        return {
            "num_local_experts": experts,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": step,
            "intermediate_size_mlp": 128,
        }
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mistral4", "dots1"):
        shared: Config = {
            "first_k_dense_replace": front,
            "n_routed_experts": experts,
            "n_shared_experts": rng.choice((1, 2)),
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": rng.choice((1.0, 2.5)),
        }
        if family == "glm4_moe_lite":
            del shared["first_k_dense_replace"]
            shared["mlp_layer_types"] = ["dense"] * front + ["sparse"] * (layers - front)
        return shared | ({"topk_method": "group_limited_greedy"} if family == "deepseek_v2" else {})
    return _named_otherwise(rng, family, experts, width, min(front, layers - 1))


def _named_otherwise(
    rng: random.Random, family: str, experts: int, width: int, front: int
) -> Config:
    """Experts of families that have fields of their own for them."""
    if family == "qwen3_5_moe_text":
        return {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": rng.choice((64, 96)),
        }
    if family == "granitemoe":
        return {"num_local_experts": experts, "num_experts_per_tok": 2}
    if family == "ernie4_5_moe":
        return {
            "moe_num_experts": experts,
            "moe_k": 2,
            "moe_intermediate_size": width,
            "moe_num_shared_experts": rng.choice((1, 2)),
            "moe_layer_start_index": front,
        }
    return {}


def _rope(rng: random.Random, family: str) -> Config:
    config: Config = {"rope_theta": float(rng.choice((10_000, 500_000)))}
    kind = rng.choice(("default", "linear", "llama3", "yarn", "yarn"))
    if family not in _YARN or kind == "default":
        return {} if family.startswith("gemma3") else config
    scaling: Config = {"rope_type": kind, "factor": rng.choice((2.0, 4.0))}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = 1024
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        scaling |= rng.choice(
            (
                {},
                {"attention_factor": rng.choice((0.8, 1.0, 1.3))},
                {"mscale": 0.7, "mscale_all_dim": 1.0},
                {"mscale": 0.7},
                {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
            )
        )
    return config | {"rope_scaling": scaling}
