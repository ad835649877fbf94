"""What Megatron-LM's arguments carry of a model, and what they cannot say (read in megatron-core 0.19.2)."""

from __future__ import annotations

from meshwright.model_specs.experts import MoeSpec
from meshwright.model_specs.hybrid import Mamba2Spec
from meshwright.model_specs.rope import RopeScaling
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.model_notes import Shortfalls
from meshwright.planner.runs.launches.megatron_names import LLAMA3_FACTOR, QUICK_GELU_ALPHA

_LLAMA3_FIXED = (8192, 1.0, 4.0)
"""Context, low and high frequency factors of `--use-rope-scaling` (rotary_pos_embedding.py)."""
_LATENT_YARN_FIXED = (4096, 32.0, 1.0, True)
"""Context, betas and rounding of `MLATransformerConfig`, which have no flags."""

_NAMES = """
layers hidden ffn_hidden heads kv_heads head_dim vocab activation gelu_form swiglu_alpha glu_offset
glu_limit tied_embeddings position max_positions rope.base rope.fraction rope.scaling.type
rope.scaling.factor rope.scaling.original_positions rope.scaling.low_freq_factor
rope.scaling.high_freq_factor rope.scaling.beta_fast rope.scaling.beta_slow rope.scaling.whole_range
rope.scaling.mscale rope.scaling.mscale_all_dim norm norm_epsilon norm_zero_centered qk_norm
attention_bias attention_output_bias mlp_bias attention_sinks sliding_window full_attention_every
attention_order rope.scaling.attention_factor
attention.q_lora_rank attention.kv_lora_rank attention.qk_nope_head_dim attention.qk_rope_head_dim
attention.v_head_dim
attention.indexer.heads attention.indexer.head_dim
attention.indexer.top_k mtp_layers moe.experts moe.top_k moe.moe_ffn_hidden moe.shared_experts
moe.shared_ffn_hidden moe.shared_expert_gate moe.dense_layers moe.every moe.router_groups
moe.router_groups_per_token moe.router_bias moe.expert_bias moe.router_score moe.router_normalized
moe.router_scaling_factor attention_output_gate linear_attention.key_heads linear_attention.value_heads
linear_attention.key_head_dim linear_attention.value_head_dim linear_attention.conv_kernel
norms_per_layer hybrid_pattern mamba.heads mamba.head_dim mamba.state_dim mamba.groups
"""
MEGATRON_SAYS = frozenset(_NAMES.split())
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
