"""A model's architecture as arguments of Megatron-LM's pretrain_gpt.py (names as in megatron-core 0.19.2)."""

from __future__ import annotations

import math

from meshwright.frameworks.megatron import (
    ACTIVATIONS,
    DELTA_NET,
    LLAMA3_FACTOR,
    MODEL_ARGUMENTS,
    POSITIONS,
    QUICK_GELU_ALPHA,
    SPARSE,
)
from meshwright.model_specs.blocks import (
    LINEAR,
    WINDOWED,
    Mamba2Spec,
    MoeSpec,
    RopeScaling,
    repeated_part,
    runs,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.writer import Shortfalls, flags_of, model_fields

# What Megatron-LM's arguments carry of a model, and what they cannot say (read in megatron-core 0.19.2).


_LLAMA3_FIXED = (8192, 1.0, 4.0)
"""Context, low and high frequency factors of `--use-rope-scaling` (rotary_pos_embedding.py)."""
_LATENT_YARN_FIXED = (4096, 32.0, 1.0, True)
"""Context, betas and rounding of `MLATransformerConfig`, which have no flags."""

_OTHERWISE = """
kv_heads activation gelu_form swiglu_alpha rope.scaling.type rope.scaling.low_freq_factor
rope.scaling.high_freq_factor rope.scaling.mscale rope.scaling.mscale_all_dim
rope.scaling.attention_factor attention_output_bias attention_sinks sliding_window attention_order
moe.shared_experts moe.dense_layers moe.router_bias moe.expert_bias moe.router_normalized norms_per_layer
"""
"""Fields that several arguments say together."""
MEGATRON_SAYS = {argument.word for argument in MODEL_ARGUMENTS} | set(_OTHERWISE.split())
"""Fields of a model that arguments carry, unless `megatron_shortfalls` has a sentence on them."""


def linear_bias(model: ModelSpec) -> bool:
    """Whether Megatron's one switch for biases is on."""
    return (
        model.mlp_bias
        or model.attention_output_bias
        or (model.moe is not None and model.moe.expert_bias)
    )


def megatron_shortfalls(model: ModelSpec) -> Shortfalls:
    """Where the arguments train another network than the specification, for want of a switch."""
    differing = _block_shortfalls(model)
    differing |= _activation_shortfalls(model)
    differing |= _rope_shortfalls(model)
    differing |= _attention_shortfalls(model)
    if model.moe is not None:
        differing |= _router_shortfalls(model, model.moe)
    return differing


def _block_shortfalls(model: ModelSpec) -> dict[str, str]:
    differing = {}
    if model.embedding_norm:
        differing["embedding_norm"] = "The norm after the embedding is left out."
    if model.embedding_scale != 1:
        differing["embedding_scale"] = (
            f"Embeddings are not multiplied by {model.embedding_scale:g}."
        )
    if model.output_scale != 1:
        differing["output_scale"] = f"Logits are not multiplied by {model.output_scale:g}."
    if model.final_logit_cap is not None:
        differing["final_logit_cap"] = f"Logits are not capped at {model.final_logit_cap:g}."
    if model.hybrid_pattern is not None:
        differing |= _pattern_shortfalls(model)
    elif model.norms_per_layer not in (1, 2):
        differing["norms_per_layer"] = f"Each layer has 2 norms, not {model.norms_per_layer}."
    elif model.norms_per_layer == 1:
        differing["norms_per_layer"] = "Each layer has 2 norms, not one for both of its parts."
    if model.norms_after_blocks:
        differing["norms_after_blocks"] = (
            "Norms come before attention and feed-forward, not after them."
        )
    if model.parallel_block:
        differing["parallel_block"] = (
            "Attention and feed-forward run one after the other, not side by side."
        )
    if linear_bias(model) and not all(_biases(model)):
        differing["biases"] = "Megatron has one switch for biases: all linear layers have one."
    return differing


def _pattern_shortfalls(model: ModelSpec) -> dict[str, str]:
    """What Megatron's blocks of a hybrid pattern have fixed (megatron/core/ssm/mamba_mixer.py)."""
    differing, mamba = {}, model.mamba
    if model.norms_per_layer != 1:
        differing["norms_per_layer"] = f"Each layer has 1 norm, not {model.norms_per_layer}."
    if mamba is None:
        return differing
    if mamba.conv_kernel != 4:
        differing["mamba.conv_kernel"] = f"Convolutions see 4 positions, not {mamba.conv_kernel}."
    if not mamba.conv_bias:
        differing["mamba.conv_bias"] = "Convolutions have biases."
    if mamba.chunk != Mamba2Spec.model_fields["chunk"].default:
        differing["mamba.chunk"] = f"Scans work on 128 positions at once, not {mamba.chunk}."
    if not mamba.gated_norm:
        differing["mamba.gated_norm"] = "The output of Mamba-2 has a norm."
    return differing


def _biases(model: ModelSpec) -> tuple[bool, bool, bool]:
    """Biases of the projections into attention, out of it, and of the feed-forward part."""
    feed_forward = model.mlp_bias
    if model.moe is not None and not model.has_dense_feed_forward:
        feed_forward = model.moe.expert_bias
    return model.attention_bias, model.attention_output_bias, feed_forward


def _activation_shortfalls(model: ModelSpec) -> dict[str, str]:
    differing = {}
    if model.activation == "relu":
        differing["activation"] = "ReLU is not available: GELU stands in, at the same cost."
    if model.activation == "geglu":
        differing["activation"] = (
            "GeGLU is computed with the sigmoid approximation of GELU (--quick-geglu)."
        )
    if model.activation == "gelu" and model.gelu_form == "tanh" and not linear_bias(model):
        differing["gelu_form"] = "GELU is exact: its tanh approximation is fused with a bias only."
    if model.activation == "swiglu" and model.swiglu_alpha not in (1, QUICK_GELU_ALPHA):
        differing["swiglu_alpha"] = (
            f"The gate's alpha is {QUICK_GELU_ALPHA}, not {model.swiglu_alpha:g}."
        )
    return differing


def _rope_shortfalls(model: ModelSpec) -> dict[str, str]:
    if model.position == "alibi":
        return {
            "position": "ALiBi is not available: the model is trained without position embedding."
        }
    if model.position != "rope":
        return {}
    differing = {}
    rope = model.rope
    if rope.base != int(rope.base):
        differing["rope.base"] = (
            f"--rotary-base takes whole numbers: {int(rope.base)}, not {rope.base}."
        )
    if rope.windowed_base is not None:
        differing["rope.windowed_base"] = (
            f"Windowed layers turn by the base of all layers, not by {rope.windowed_base:g}."
        )
    if rope.scaling is not None:
        text = _scaling_shortfall(rope.scaling, latent=model.attention is not None)
        if text:
            differing["rope.scaling"] = text
    return differing


def _scaling_shortfall(scaling: RopeScaling, *, latent: bool) -> str:
    if scaling.type == "yarn":
        return _yarn_shortfall(scaling, latent=latent)
    if scaling.type in ("dynamic", "longrope"):
        return f"Rope scaling {scaling.type} is left out."
    if latent:
        return f"Rope scaling {scaling.type} is left out: latent attention has YaRN alone."
    if scaling.type == "linear" and scaling.factor != int(scaling.factor):
        return f"Positions are divided by {int(scaling.factor)}, not {scaling.factor:g}."
    if scaling.type == "llama3":
        frequencies = (scaling.low_freq_factor, scaling.high_freq_factor)
        if (scaling.factor, scaling.original_positions, *frequencies) != (
            LLAMA3_FACTOR,
            *_LLAMA3_FIXED,
        ):
            return "Rope is scaled as in Llama 3.1 (8 x 8,192, frequency factors 1 and 4)."
    return ""


def _yarn_shortfall(scaling: RopeScaling, *, latent: bool) -> str:
    temperature = scaling.temperature
    if scaling.factor <= 1 and temperature != 1:
        return f"Rotated elements are not multiplied by {temperature:g}: YaRN's factor is 1."
    ramp = (scaling.original_positions, scaling.beta_fast, scaling.beta_slow, scaling.whole_range)
    if latent and ramp != _LATENT_YARN_FIXED:
        return "YaRN's ramp is that of DeepSeek-V3 (4,096 positions, beta_fast 32, beta_slow 1)."
    return ""


def _attention_shortfalls(model: ModelSpec) -> dict[str, str]:
    differing = {}
    if model.qk_norm_full_width:
        differing["qk_norm_full_width"] = (
            "Query and key norms work head by head, not over all heads together."
        )
    if model.chunked_windows:
        differing["chunked_windows"] = "Windows slide: attention is not cut into chunks."
    if model.qk_norm and not model.qk_norm_weights:
        differing["qk_norm_weights"] = "The norms of queries and keys have weights."
    if model.attention_scale is not None:
        differing["attention_scale"] = (
            f"Attention scores are divided by the root of a head's width, "
            f"not multiplied by {model.attention_scale:g}."
        )
    if model.attention_logit_cap is not None:
        differing["attention_logit_cap"] = (
            f"Attention scores are not capped at {model.attention_logit_cap:g}."
        )
    return differing


def _router_shortfalls(model: ModelSpec, moe: MoeSpec) -> dict[str, str]:
    differing = {}
    biases = linear_bias(model)
    if moe.router_score == "softmax" and moe.router_bias != biases:
        differing["moe.router_bias"] = (
            "The router has a bias." if biases else "The router's bias is left out."
        )
    if moe.router_score == "sigmoid" and not moe.router_normalized and moe.top_k > 1:
        differing["moe.router_normalized"] = (
            "The weights of a token's experts are made to add up to 1."
        )
    if (moe.router_groups or 1) > 1 and moe.router_score == "softmax":
        differing["moe.router_groups"] = (
            "A group of experts is chosen by the sum of its best scores, not by its single best."
        )
    return differing


# Which layers are of a kind, in the notation of Megatron-LM's flags: a Python list of 0 and 1.


def layer_list(order: str, one: str) -> str:
    """A list with a 1 for each layer whose letter is `one`, as `moe_freq_type` of Megatron-LM evaluates it.

    >>> layer_list("FFFWW", "W"), layer_list("FWFWFW", "W"), layer_list("LL", "L")
    ('([0]*3+[1]*2)', '([0,1]*3)', '([1]*2)')
    """
    digits = "".join("1" if letter == one else "0" for letter in order)
    part = repeated_part(digits)
    terms = "+".join(f"[{digit}]*{count}" for digit, count in runs(digits))
    repeated = f"[{','.join(digits[:part])}]*{len(digits) // part}"
    return f"({min(terms, repeated, key=len)})"


VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp."""


def model_flags(model: ModelSpec, seq_len: int) -> dict[str, object]:
    """Flags that define the network, as `flag_words` writes them; `seq_len` in tokens."""
    return flags_of(MODEL_ARGUMENTS, said_of_model(model, seq_len))


def said_of_model(model: ModelSpec, seq_len: int) -> dict[str, object]:
    """What arguments say of a model, by their words."""
    said = model_fields(MODEL_ARGUMENTS, model) | {
        "ffn_hidden": feed_forward_width(model),
        "seq_len": seq_len,
        "max_positions": max(seq_len, model.max_positions or 0),
        "vocab_multiple": VOCAB_MULTIPLE,
        "head_dim": model.v_head_dim,
        "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position": POSITIONS[model.position],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mlp_bias": linear_bias(model),
        "attention_bias": model.attention_bias and not linear_bias(model),
        **_attention(model),
        **_activation(model),
    }
    said |= _rope(model)
    if model.moe is not None:
        said |= _experts(model, model.moe)
    if model.hybrid_pattern is not None:
        # Module and name of the layers' specification, which pretrain_hybrid.py asks for.
        spec = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
        said["layer_specification"] = spec
    else:
        said |= dict.fromkeys(word for word in said if word.startswith("mamba."))
    return said


def feed_forward_width(model: ModelSpec) -> int:
    """Width of a dense layer; of an expert where no layer is dense."""
    if model.ffn_hidden:
        return model.ffn_hidden
    return 0 if model.moe is None else model.moe.moe_ffn_hidden


def _attention(model: ModelSpec) -> dict[str, object]:
    latent = model.attention
    # With MLA the switch of norms is that on the two latents, which DeepSeek's models have.
    said: dict[str, object] = {
        "latent": latent is not None,
        "qk_norm": model.qk_norm or latent is not None,
        "full_attention_every": None,
    }
    if latent is None and model.kv_heads < model.heads:
        said |= {"grouped_queries": True, "query_groups": model.kv_heads}
    if latent is not None and latent.indexer is not None:
        # As Megatron-Bridge has them (models/glm_moe_dsa/glm5_bridge.py).
        said |= {
            "attention_variant": SPARSE,
            "indexer_kernels": "cudnn",
            "indexer_loss": 0.001,
            "indexer_sparse_loss": True,
            "rope_fusion": False,
        }
    if model.linear_attention is not None:
        # A frequency of n makes each n-th layer attend in full; no number makes none do.
        every = None if model.attention_order is not None else model.full_attention_every
        every_or_list = every or layer_list(model.attention_letters, LINEAR)
        said |= {"attention_variant": DELTA_NET, "linear_every": every_or_list}
    if model.attention_sinks:
        said["softmax"] = "learnable"
    if model.sliding_window is not None and model.windowed_layers:
        # The pair counts the tokens to the left and right of the query; the window includes the query itself.
        said["window"] = f"{model.sliding_window - 1},0"
        said["full_attention_every"] = model.full_attention_every or None
        if model.attention_order is not None:
            said["full_attention_every"] = layer_list(model.attention_order, WINDOWED)
    return said


def _activation(model: ModelSpec) -> dict[str, object]:
    activation = model.activation
    if activation == "swiglu" and model.swiglu_alpha != 1:
        activation = "geglu"
    # The fused kernels of bias and GELU: tanh approximation alone, no squared ReLU, gated for experts alone.
    exact_gelu = activation == "gelu" and model.gelu_form == "exact"
    gated_gelu = activation == "geglu" and model.has_dense_feed_forward
    unfused = exact_gelu or activation == "squared_relu" or gated_gelu
    # The fused kernel of SwiGLU knows neither offset nor limit.
    changed = model.glu_offset > 0 or model.glu_limit is not None
    return {
        **{name: name == activation for name in ACTIVATIONS},
        "bias_gelu_fusion": not (linear_bias(model) and unfused),
        "bias_swiglu_fusion": not (activation == "swiglu" and changed),
    }


def _rope(model: ModelSpec) -> dict[str, object]:
    """Base, share and scaling. MLA needs YaRN for the fused kernel; at factor 1 it is plain rope."""
    rope, scaling, latent = model.rope, model.rope.scaling, model.attention is not None
    words = [argument.word for argument in MODEL_ARGUMENTS if argument.word.startswith("rope.")]
    said: dict[str, object] = dict.fromkeys(words)
    if model.position != "rope":
        return said
    said |= {"rope.base": int(rope.base), "rope.fraction": rope.fraction}
    if latent:
        said |= {"rope_type": "yarn", "rope.scaling.factor": 1.0}
    if scaling is None:
        return said
    if scaling.type == "yarn":
        said |= _yarn(scaling)
        if not latent:
            said["position"] = "yarn"
            ramp = ("original_positions", "beta_fast", "beta_slow", "whole_range")
            said |= {f"rope.scaling.{name}": getattr(scaling, name) for name in ramp}
    elif scaling.type == "linear" and not latent:
        said["interpolation"] = int(scaling.factor)
    elif scaling.type == "llama3" and not latent:
        said |= {"llama3_scaling": True, "llama3_factor": scaling.factor}
    return said


def _yarn(scaling: RopeScaling) -> dict[str, object]:
    """Factor and temperature. Megatron multiplies rotated elements by g(mscale) / g(mscale_all_dim), with
    g(m) = 0.1 m ln(factor) + 1 (yarn_rotary_pos_embedding.py): any other temperature is said by an mscale."""
    mscale, of_all = scaling.mscale, scaling.mscale_all_dim
    plain = replaced_temperature(scaling)
    if plain is not None:
        mscale, of_all = plain, of_all or 0.0
    return {"rope.scaling.factor": scaling.factor, "mscale": mscale, "mscale_all_dim": of_all}


def replaced_temperature(scaling: RopeScaling) -> float | None:
    """The mscale that gives the model's temperature; None where the model's own weights do."""
    if scaling.factor <= 1:
        return None
    tenth = 0.1 * math.log(scaling.factor)
    under = tenth * (scaling.mscale_all_dim or 0.0) + 1.0
    own = (tenth * (scaling.mscale or 1.0) + 1.0) / under
    if math.isclose(own, scaling.temperature, rel_tol=1e-9):
        return None
    return round((scaling.temperature * under - 1.0) / tenth, 12)


def _experts(model: ModelSpec, moe: MoeSpec) -> dict[str, object]:
    said: dict[str, object] = {
        "grouped_gemm": True,
        "permute_fusion": True,
        "router_dtype": "fp32",
        "moe.every": None,
        "moe.shared_ffn_hidden": moe.shared_width,
        "moe.shared_expert_gate": moe.shared_expert_gate and moe.shared_width > 0,
    }
    if moe.dense_layers:
        said["moe.every"] = f"([0]*{moe.dense_layers}+[1]*{model.moe_layers})"
    if moe.every > 1:
        group = ",".join(["0"] * (moe.every - 1) + ["1"])
        said["moe.every"] = f"([{group}]*{model.layers // moe.every})"
    groups, chosen_groups = moe.router_groups, moe.router_groups_per_token
    if groups is None or chosen_groups is None or chosen_groups >= groups:
        said |= {"moe.router_groups": None, "moe.router_groups_per_token": None}
    if moe.router_score == "sigmoid":
        said["balancing_bias"] = moe.router_bias
    else:
        # A softmax over the chosen experts makes their weights add up to 1; one alone has no gradient.
        said["pre_softmax"] = not moe.router_normalized or moe.top_k == 1
    return said
