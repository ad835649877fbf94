"""A model from the architecture arguments of Megatron-LM or Megatron-DeepSpeed."""

from __future__ import annotations

import re
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.runs.launch_flags import Words


def megatron_model(words: Words) -> dict[str, Any]:
    """The model as a mapping of a run file. Raises InputError if layers, width or heads are not given."""
    layers, hidden, heads = (_needed(words, flag) for flag in _SIZES)
    gated = words.has("--swiglu")
    # Megatron's own defaults: four times the width, two thirds of that for a gated layer.
    default_ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    model: dict[str, Any] = {
        "name": "from launch file",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn_hidden": words.integer("--ffn-hidden-size", default_ffn),
        "kv_heads": _kv_heads(words, heads),
        "vocab": words.integer("--vocab-size", words.integer("--padded-vocab-size", 50_257)),
        "activation": _activation(words, gated),
        "tied_embeddings": not words.has("--untie-embeddings-and-output-weights"),
        "norm": "rmsnorm"
        if (words.text("--normalization") or "").lower() == "rmsnorm"
        else "layernorm",
        "qk_norm": words.has("--qk-layernorm"),
        "mtp_layers": words.integer("--mtp-num-layers", 0),
    }
    biases = not words.has("--disable-bias-linear")
    model |= dict.fromkeys(("mlp_bias", "attention_output_bias"), biases)
    model["attention_bias"] = words.has("--add-qkv-bias") or biases
    model |= _position(words)
    channels = words.integer("--kv-channels", 0)
    if channels:
        model["head_dim"] = channels
    if words.has("--multi-latent-attention"):
        model["attention"] = _mla(words)
        model["qk_norm"] = False
        model.pop("head_dim", None)
    experts = words.integer("--num-experts", 0)
    if experts > 1:
        model["moe"] = _moe(words, experts, layers, model["ffn_hidden"])
    return model | _window(words)


_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads")


def _needed(words: Words, flag: str) -> int:
    value = words.integer(flag, 0)
    if value < 1:
        raise InputError("is needed to know the model", where=f"{words.where}: {flag}")
    return value


def _kv_heads(words: Words, heads: int) -> int:
    grouped = words.has("--group-query-attention")
    groups = words.integer("--num-query-groups", 1)
    return groups if grouped else words.integer("--num-key-value-heads", heads)


def _activation(words: Words, gated: bool) -> str:
    squared, quick = words.has("--squared-relu"), words.has("--quick-geglu")
    words.has("--no-bias-gelu-fusion")
    return "swiglu" if gated else "geglu" if quick else "squared_relu" if squared else "gelu"


def _position(words: Words) -> dict[str, Any]:
    kind = words.text("--position-embedding-type", "learned_absolute")
    if words.has("--use-rotary-position-embeddings") or words.has("--use-rotary-embeddings"):
        kind = "rope"
    rows = words.integer("--max-position-embeddings", 0)
    words.text("--rope-type")
    words.text("--rotary-scaling-factor")
    if kind == "learned_absolute":
        return {"position": "learned", **({"max_positions": rows} if rows else {})}
    return {"position": "none" if kind == "none" else "rope"}


def _mla(words: Words) -> dict[str, int]:
    rank = words.integer("--q-lora-rank", 0)
    return {
        **({"q_lora_rank": rank} if rank else {}),
        "kv_lora_rank": words.integer("--kv-lora-rank", 32),
        "qk_nope_head_dim": words.integer("--qk-head-dim", 128),
        "qk_rope_head_dim": words.integer("--qk-pos-emb-head-dim", 64),
        "v_head_dim": words.integer("--v-head-dim", 128),
    }


def _moe(words: Words, experts: int, layers: int, ffn: int) -> dict[str, Any]:
    width = words.integer("--moe-ffn-hidden-size", ffn)
    shared = words.integer("--moe-shared-expert-intermediate-size", 0)
    moe: dict[str, Any] = {
        "experts": experts,
        "top_k": words.integer("--moe-router-topk", words.integer("--topk", 2)),
        "moe_ffn_hidden": width,
        "dense_layers": _dense_layers(words, layers),
        "router_bias": words.has("--moe-router-enable-expert-bias"),
    }
    if shared:
        moe |= {"shared_experts": max(1, shared // width), "shared_ffn_hidden": shared}
        moe["shared_expert_gate"] = words.has("--moe-shared-expert-gate")
    groups = words.integer("--moe-router-num-groups", 0)
    if groups:
        moe["router_groups"] = groups
        moe["router_groups_per_token"] = words.integer("--moe-router-group-topk", groups)
    for flag in ("--moe-router-score-function", "--moe-router-pre-softmax"):
        words.has(flag)
    words.has("--moe-router-padding-for-quantization")
    return moe


def _dense_layers(words: Words, layers: int) -> int:
    """Leading dense layers of `--moe-layer-freq`, such as ([0]*3+[1]*58)."""
    text = (words.text("--moe-layer-freq") or "1").replace(" ", "")
    found = re.fullmatch(r"\(?\[0\](?:\*(\d+))?\+\[1\](?:\*\d+)?\)?", text)
    if found:
        return min(int(found[1] or 1), layers)
    if text not in ("1", f"[1]*{layers}", f"([1]*{layers})"):
        raise InputError(
            "experts in every layer, or after some dense layers, are all that a run file can say",
            where=f"{words.where}: --moe-layer-freq",
            value=text,
        )
    return 0


def _window(words: Words) -> dict[str, Any]:
    sides, sinks = words.text("--window-size"), words.text("--softmax-type") == "learnable"
    every = words.integer("--window-attn-skip-freq", 0)
    found = re.match(r"\(?(\d{1,9})", sides or "")
    if found is None:
        return {"attention_sinks": sinks}
    return {
        "attention_sinks": sinks,
        "sliding_window": int(found[1]) + 1,
        "full_attention_every": every,
    }
