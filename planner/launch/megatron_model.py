"""A model's architecture as arguments of Megatron-LM's pretrain_gpt.py (names as in megatron-core 0.19.2)."""

from __future__ import annotations

import math

from meshwright.frameworks.megatron import MEGATRON
from meshwright.model_specs.attention import GatedDeltaNetSpec, SparseIndexerSpec
from meshwright.model_specs.experts import MoeSpec
from meshwright.model_specs.layer_order import LINEAR, WINDOWED
from meshwright.model_specs.rope import RopeScaling
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.layer_list import layer_list
from meshwright.planner.launch.megatron_shortfalls import linear_bias
from meshwright.planner.runs.launches.megatron_names import (
    ACTIVATIONS,
    HYBRID_PATTERN,
    LATENT_ATTENTION,
    LINEAR_ATTENTION,
    MAMBA,
    POSITIONS,
    SPARSE_INDEXER,
)

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp."""


def model_flags(model: ModelSpec, seq_len: int) -> dict[str, object]:
    """Flags that define the network, as `flag_words` writes them; `seq_len` in tokens."""
    flags = _size_flags(model, seq_len)
    flags |= _attention_flags(model)
    flags |= _layer_flags(model)
    if model.position == "rope":
        flags |= _rope_flags(model)
    if model.moe is not None:
        flags |= _moe_flags(model, model.moe)
    if model.hybrid_pattern is not None:
        # Module and name of the layers' specification, which pretrain_hybrid.py asks for.
        spec = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
        flags |= {HYBRID_PATTERN: model.hybrid_pattern, "--spec": spec}
    if model.hybrid_pattern is not None and model.mamba is not None:
        flags |= {size.flag: getattr(model.mamba, size.field) for size in MAMBA}
    flags["--mtp-num-layers"] = model.mtp_layers or None
    return flags


def feed_forward_width(model: ModelSpec) -> int:
    """Width of a dense layer; of an expert where no layer is dense."""
    if model.ffn_hidden:
        return model.ffn_hidden
    return 0 if model.moe is None else model.moe.moe_ffn_hidden


def _size_flags(model: ModelSpec, seq_len: int) -> dict[str, object]:
    return {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": feed_forward_width(model),
        "--num-attention-heads": model.heads,
        "--seq-length": seq_len,
        "--max-position-embeddings": max(seq_len, model.max_positions or 0),
        "--vocab-size": model.vocab,
        "--make-vocab-size-divisible-by": VOCAB_MULTIPLE,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
    }


def _attention_flags(model: ModelSpec) -> dict[str, object]:
    flags: dict[str, object] = {"--kv-channels": model.v_head_dim}
    latent = model.attention
    if latent is not None:
        flags["--multi-latent-attention"] = True
        flags |= {size.flag: getattr(latent, size.field) for size in LATENT_ATTENTION}
        flags |= _indexer_flags(latent.indexer)
    elif model.kv_heads < model.heads:
        flags["--group-query-attention"] = True
        flags["--num-query-groups"] = model.kv_heads
    # With MLA this switch is the norm on the two latents, which DeepSeek's models have.
    flags["--qk-layernorm"] = model.qk_norm or latent is not None
    flags["--attention-output-gate"] = model.attention_output_gate
    if model.linear_attention is not None:
        flags |= _linear_attention_flags(model.linear_attention, model)
    if model.attention_sinks:
        flags["--softmax-type"] = "learnable"
    if model.sliding_window is not None and model.windowed_layers:
        # The pair counts the tokens to the left and right of the query; the window includes the query itself.
        flags["--window-size"] = f"{model.sliding_window - 1},0"
        flags["--window-attn-skip-freq"] = model.full_attention_every or None
        if model.attention_order is not None:
            flags["--window-attn-skip-freq"] = layer_list(model.attention_order, WINDOWED)
    return flags


def _indexer_flags(indexer: SparseIndexerSpec | None) -> dict[str, object]:
    """The indexer and its loss, as Megatron-Bridge has them (models/glm_moe_dsa/glm5_bridge.py)."""
    setting = MEGATRON.sparse_attention
    if indexer is None or setting is None:
        return {}
    sizes = {size.flag: getattr(indexer, size.field) for size in SPARSE_INDEXER}
    return sizes | {
        setting.flag: setting.value,
        "--dsa-kernel-backend": "cudnn",
        "--dsa-indexer-loss-coeff": 0.001,
        "--dsa-indexer-use-sparse-loss": True,
        "--no-rope-fusion": True,
    }


def _linear_attention_flags(linear: GatedDeltaNetSpec, model: ModelSpec) -> dict[str, object]:
    setting = MEGATRON.linear_attention
    assert setting is not None
    flags: dict[str, object] = {setting.flag: setting.value}
    # A frequency of n makes each n-th layer attend in full; no number makes none do.
    every = None if model.attention_order is not None else model.full_attention_every
    flags["--linear-attention-freq"] = every or layer_list(model.attention_letters, LINEAR)
    return flags | {size.flag: getattr(linear, size.field) for size in LINEAR_ATTENTION}


def _layer_flags(model: ModelSpec) -> dict[str, object]:
    biases = linear_bias(model)
    flags: dict[str, object] = {
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": model.norm_epsilon,
        "--apply-layernorm-1p": model.norm_zero_centered,
        "--position-embedding-type": POSITIONS[model.position],
    }
    flags |= _activation_flags(model, biases=biases)
    flags["--disable-bias-linear"] = not biases
    flags["--add-qkv-bias"] = model.attention_bias and not biases
    flags["--hidden-dropout"] = 0.0
    flags["--attention-dropout"] = 0.0
    return flags


def _activation_flags(model: ModelSpec, *, biases: bool) -> dict[str, object]:
    flags: dict[str, object] = {}
    activation = model.activation
    quick_gate = activation == "swiglu" and model.swiglu_alpha != 1
    if quick_gate:
        flags[ACTIVATIONS["geglu"]] = True
    elif activation in ACTIVATIONS:
        flags[ACTIVATIONS[activation]] = True
    flags["--glu-linear-offset"] = model.glu_offset or None
    flags["--activation-func-clamp-value"] = model.glu_limit
    # The fused kernels of bias and GELU: tanh approximation alone, no squared ReLU, gated for experts alone.
    exact_gelu = activation == "gelu" and model.gelu_form == "exact"
    gated_gelu = quick_gate or activation == "geglu"
    unfused = (
        exact_gelu or activation == "squared_relu" or (gated_gelu and model.has_dense_feed_forward)
    )
    flags["--no-bias-gelu-fusion"] = biases and unfused
    # The fused kernel of SwiGLU knows neither offset nor limit.
    plain_swiglu = activation == "swiglu" and not quick_gate
    changed = model.glu_offset > 0 or model.glu_limit is not None
    flags["--no-bias-swiglu-fusion"] = plain_swiglu and changed
    return flags


def _rope_flags(model: ModelSpec) -> dict[str, object]:
    rope, scaling = model.rope, model.rope.scaling
    flags: dict[str, object] = {"--rotary-base": int(rope.base)}
    if rope.fraction != 1:
        flags["--rotary-percent"] = rope.fraction
    if model.attention is not None:
        # MLA needs YaRN for the fused kernel; at factor 1 it is plain rope.
        flags["--rope-type"] = "yarn"
        flags["--rotary-scaling-factor"] = 1.0
        if scaling is not None and scaling.type == "yarn":
            flags |= _yarn_flags(scaling)
    elif scaling is None:
        return flags
    elif scaling.type == "linear":
        flags["--rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    elif scaling.type == "llama3":
        flags["--use-rope-scaling"] = True
        flags["--rope-scaling-factor"] = scaling.factor
    elif scaling.type == "yarn":
        flags["--position-embedding-type"] = "yarn"
        flags |= _yarn_flags(scaling)
        flags["--yarn-original-max-position-embeddings"] = scaling.original_positions
        flags["--yarn-beta-fast"] = scaling.beta_fast
        flags["--yarn-beta-slow"] = scaling.beta_slow
        flags["--no-yarn-correction-range-round-to-int"] = not scaling.whole_range
    return flags


def _yarn_flags(scaling: RopeScaling) -> dict[str, object]:
    """Factor and temperature. Megatron multiplies rotated elements by g(mscale) / g(mscale_all_dim), with
    g(m) = 0.1 m ln(factor) + 1 (yarn_rotary_pos_embedding.py): any other temperature is said by an mscale."""
    mscale, of_all = scaling.mscale, scaling.mscale_all_dim
    plain = replaced_temperature(scaling)
    if plain is not None:
        mscale, of_all = plain, of_all or 0.0
    return {
        "--rotary-scaling-factor": scaling.factor,
        "--mscale": mscale,
        "--mscale-all-dim": of_all,
    }


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


def _moe_flags(model: ModelSpec, moe: MoeSpec) -> dict[str, object]:
    flags: dict[str, object] = {
        "--num-experts": moe.experts,
        "--moe-router-topk": moe.top_k,
        "--moe-ffn-hidden-size": moe.moe_ffn_hidden,
        "--moe-grouped-gemm": True,
        "--moe-permute-fusion": True,
        "--moe-router-dtype": "fp32",
    }
    if moe.dense_layers:
        flags["--moe-layer-freq"] = f"([0]*{moe.dense_layers}+[1]*{model.moe_layers})"
    if moe.every > 1:
        group = ",".join(["0"] * (moe.every - 1) + ["1"])
        flags["--moe-layer-freq"] = f"([{group}]*{model.layers // moe.every})"
    flags["--moe-shared-expert-intermediate-size"] = moe.shared_width or None
    flags["--moe-shared-expert-gate"] = moe.shared_expert_gate and moe.shared_width > 0
    groups, chosen_groups = moe.router_groups, moe.router_groups_per_token
    if groups is not None and chosen_groups is not None and chosen_groups < groups:
        flags["--moe-router-num-groups"] = groups
        flags["--moe-router-group-topk"] = chosen_groups
    if moe.router_score == "sigmoid":
        flags["--moe-router-score-function"] = "sigmoid"
        flags["--moe-router-enable-expert-bias"] = moe.router_bias
    else:
        # A softmax over the chosen experts makes their weights add up to 1; one alone has no gradient.
        flags["--moe-router-pre-softmax"] = not moe.router_normalized or moe.top_k == 1
    if moe.router_scaling_factor != 1:
        flags["--moe-router-topk-scaling-factor"] = moe.router_scaling_factor
    return flags
