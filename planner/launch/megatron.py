"""A plan as a Megatron-LM launch: arguments of pretrain_gpt.py, environment, hostfile and start script.

A model's architecture becomes arguments here too. Names and rules were read in megatron-core 0.19.2
(`megatron.training.arguments`).
"""

from __future__ import annotations

import math

from meshwright.costmodel.workload import HIERARCHICAL
from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import (
    ACTIVATIONS,
    ADAPTED_MODULES,
    ADAPTER_RANK,
    BRIDGE_MODULES,
    BRIDGE_OVERRIDES,
    BRIDGE_RESETS,
    DELTA_NET,
    LLAMA3_FACTOR,
    MEGATRON,
    MEGATRON_ARGUMENTS,
    MODEL_ARGUMENTS,
    POSITIONS,
    QUICK_GELU_ALPHA,
    SHARES_EXPERT_ADAPTERS,
    SPARSE,
    SWIFT_EXTRA,
    SWIFT_EXTRAS,
    SWIFT_FIELDS,
    SWIFT_SWITCHES,
)
from meshwright.frameworks.record import layer_needs
from meshwright.model_specs.adapters import EXPERTS, layer_matrices
from meshwright.model_specs.blocks import (
    FULL,
    LINEAR,
    WINDOWED,
    Mamba2Spec,
    MoeSpec,
    RopeScaling,
    repeated_part,
    runs,
    sharing_schedule,
)
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.launch.writer import (
    Launch,
    Program,
    Shortfalls,
    Start,
    Writer,
    flag_words,
    flags_of,
    json_file,
    legal_launch,
    model_fields,
    nccl_env,
    notes_of,
    said_of_degrees,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.run_terms import LayoutDoc, layout_string, pattern_chunks

# What Megatron-LM's arguments carry of a model, and what they cannot say.


_LLAMA3_FIXED = (8192, 1.0, 4.0)
"""Context, low and high frequency factors of `--use-rope-scaling` (rotary_pos_embedding.py)."""
_LATENT_YARN_FIXED = (4096, 32.0, 1.0, True)
"""Context, betas and rounding of `MLATransformerConfig`, which have no flags."""

_OTHERWISE = """
kv_heads activation gelu_form swiglu_alpha rope.scaling.type rope.scaling.low_freq_factor
rope.scaling.high_freq_factor rope.scaling.mscale rope.scaling.mscale_all_dim
rope.scaling.attention_factor attention_output_bias attention_sinks sliding_window attention_order
moe.shared_experts moe.dense_layers moe.router_bias moe.expert_bias moe.router_normalized norms_per_layer
mtp_pattern qk_norm_weights rope_in_windows_alone attention_scale
"""
"""Fields that several arguments say together."""
MEGATRON_SAYS = {argument.word for argument in MODEL_ARGUMENTS} | set(_OTHERWISE.split())
"""Fields of a model that arguments carry, unless `megatron_shortfalls` has a sentence on them."""


def linear_bias(model: ModelSpec) -> bool:
    """Whether Megatron's one switch for biases is on.

    Parameters
    ----------
    model
        Its projections, feed-forwards and experts may each have biases or not: one switch stands for all.
    """
    return (
        model.mlp_bias
        or model.attention_output_bias
        or (model.moe is not None and model.moe.expert_bias)
    )


_SENTENCES = {
    "embedding_norm": "The norm after the embedding is left out.",
    "output_bias": "Logits have no bias.",
    "norm_bias": "Layer norms have a shift beside their scale.",
    "final_logit_cap": "Logits are not capped at {model.final_logit_cap:g}.",
    "window_heads": "Layers with a window have the heads of those in full.",
    "reusing_ffn_hidden": "Dense feed-forwards all have one width.",
    "layer_inputs": "Layers read no token table of their own.",
    "block_selection": "Layers attend to all positions, not to {model.block_selection.top_k} chosen blocks "
    "of {model.block_selection.block}, as Megatron-Bridge has it.",
    "value_head_dim": "Values are as wide as keys.",
    "attention_head_gates": "Heads of attention have no gates.",
    "values_are_keys": "Values have a projection of their own.",
    "value_norm": "Values have no norm.",
    "moe.output_norm": "No norm stands behind the experts.",
    "moe.router_scales": "Routers have no scales beside their matrix.",
    "norms_per_layer": "Each layer has {norms}.",
    "mamba.conv_kernel": "Convolutions see 4 positions, not {model.mamba.conv_kernel}.",
    "mamba.conv_bias": "Convolutions have biases.",
    "mamba.chunk": "Scans work on 128 positions at once, not {model.mamba.chunk}.",
    "mamba.gated_norm": "The output of Mamba-2 has a norm.",
    "norms_after_blocks": "Norms come before attention and feed-forward, not after them.",
    "parallel_block": "Attention and feed-forward run one after the other, not side by side.",
    "biases": "Megatron has one switch for biases: all linear layers have one.",
    "activation": "{activation}",
    "gelu_form": "GELU is exact: its tanh approximation is fused with a bias only.",
    "swiglu_alpha": f"The gate's alpha is {QUICK_GELU_ALPHA}, not {{model.swiglu_alpha:g}}.",
    "position": "ALiBi is not available: the model is trained without position embedding.",
    "rope.base": "--rotary-base takes whole numbers: {whole_base}, not {model.rope.base}.",
    "rope.windowed_base": "Windowed layers turn by the base of all layers, not by "
    "{model.rope.windowed_base:g}.",
    "rope.windowed_fraction": "Of heads under a window the same share turns, {model.rope.fraction:g}.",
    "rope.scaling": "{scaling}",
    "qk_norm_full_width": "Query and key norms work head by head, not over all heads together.",
    "chunked_windows": "Windows slide: attention is not cut into chunks.",
    "rope_in_windows_alone": "Layers that attend to all positions have position embeddings too.",
    "qk_norm_weights": "Layers without position embeddings norm queries and keys too.",
    "attention_scale": "Attention scores are divided by the root of a head's width, not multiplied by "
    "{model.attention_scale:g}.",
    "attention_logit_cap": "Attention scores are not capped at {model.attention_logit_cap:g}.",
    "moe.router_bias": "{router_bias}",
    "moe.router_normalized": "The weights of a token's experts are made to add up to 1.",
    "moe.router_score": "The experts of a token are the best two by softmax, not two that SparseMixer draws.",
    "moe.router_scales_inputs": "A token's weight multiplies what its expert returns, not what it reads.",
    "moe.router_groups": "A group of experts is chosen by the sum of its best scores, not by its single "
    "best.",
}
"""By the field of a model that Megatron has no switch for, in the order of a launch's notes."""
_STAND_INS = {
    "relu": "ReLU is not available: GELU stands in, at the same cost.",
    "xielu": "xIELU is not available: GELU stands in, at the same cost.",
    "geglu": "GeGLU is computed with the sigmoid approximation of GELU (--quick-geglu).",
}


_WITHOUT_SWITCH = (
    *("embedding_norm", "output_bias", "final_logit_cap", "window_heads", "reusing_ffn_hidden"),
    *("layer_inputs", "block_selection", "value_head_dim", "attention_head_gates", "value_norm"),
    *("values_are_keys", "norms_after_blocks", "parallel_block", "qk_norm_full_width"),
    *("chunked_windows", "attention_logit_cap"),
)
"""Fields of a model that Megatron has no switch for, whatever they hold beside `_OFF`."""
_OFF = (None, False)


def megatron_shortfalls(model: ModelSpec) -> Shortfalls:
    """Where the arguments train another network than the specification, for want of a switch.

    Parameters
    ----------
    model
        The model to be trained.
    """
    patterned, rope, latent = model.hybrid_pattern is not None, model.rope, model.attention
    norms, biased = model.norms_per_layer, linear_bias(model)
    more_norms = "2 norms, not one for both of its parts" if norms == 1 else f"2 norms, not {norms}"
    scaling = ""
    if model.position == "rope" and rope.scaling is not None:
        scaling = _scaling_shortfall(rope.scaling, latent=latent is not None)
    words = {
        "norms": f"1 norm, not {norms}" if patterned else more_norms,
        "activation": _STAND_INS.get(model.activation, ""),
        "whole_base": int(rope.base),
        "scaling": scaling,
        "router_bias": "The router has a bias." if biased else "The router's bias is left out.",
    }
    differing = {name: getattr(model, name) not in _OFF for name in _WITHOUT_SWITCH} | {
        # Latent attention asks neither argument (megatron/core/transformer/multi_latent_attention.py).
        "rope_in_windows_alone": model.rope_in_windows_alone and latent is not None,
        "attention_scale": model.attention_scale is not None and latent is not None,
        "norm_bias": not model.norm_bias,
        "norms_per_layer": norms != (1 if patterned else 2),
        "biases": biased and not all(_biases(model)),
        "activation": bool(words["activation"]),
        "gelu_form": model.activation == "gelu" and model.gelu_form == "tanh" and not biased,
        "swiglu_alpha": model.activation == "swiglu"
        and model.swiglu_alpha not in (1, QUICK_GELU_ALPHA),
        "position": model.position == "alibi",
        "rope.scaling": bool(scaling),
        # Llama 4, which alone has chunks, norms where it turns (transformers, modeling_llama4.py).
        "qk_norm_weights": model.qk_norm and not model.qk_norm_weights and model.chunked_windows,
    }
    if model.position == "rope":
        differing |= {
            "rope.base": rope.base != int(rope.base),
            "rope.windowed_base": rope.windowed_base is not None,
            "rope.windowed_fraction": rope.windowed_fraction not in (None, rope.fraction),
        }
    if patterned and model.mamba is not None:
        # What Megatron's blocks of a hybrid pattern have fixed (megatron/core/ssm/mamba_mixer.py).
        differing |= {
            "mamba.conv_kernel": model.mamba.conv_kernel != 4,
            "mamba.conv_bias": not model.mamba.conv_bias,
            "mamba.chunk": model.mamba.chunk != Mamba2Spec.model_fields["chunk"].default,
            "mamba.gated_norm": not model.mamba.gated_norm,
        }
    if model.moe is not None:
        differing |= _differing_experts(model.moe, biased=biased)
    return {
        field: sentence.format(model=model, **words)
        for field, sentence in _SENTENCES.items()
        if differing.get(field)
    }


def _differing_experts(moe: MoeSpec, *, biased: bool) -> dict[str, bool]:
    """Which fields of experts Megatron has no switch for; `biased` is its one switch of biases."""
    by_softmax, by_sigmoid = moe.router_score == "softmax", moe.router_score == "sigmoid"
    return {
        "moe.output_norm": moe.output_norm,
        "moe.router_scales": moe.router_scales,
        "moe.router_scales_inputs": moe.router_scales_inputs,
        "moe.router_bias": by_softmax and moe.router_bias != biased,
        "moe.router_normalized": by_sigmoid and not moe.router_normalized and moe.top_k > 1,
        "moe.router_score": moe.router_score == "sparsemixer",
        "moe.router_groups": (moe.router_groups or 1) > 1 and by_softmax,
    }


def _biases(model: ModelSpec) -> tuple[bool, bool, bool]:
    """Biases of the projections into attention, out of it, and of the feed-forward part."""
    feed_forward = model.mlp_bias
    if model.moe is not None and not model.has_dense_feed_forward:
        feed_forward = model.moe.expert_bias
    return model.attention_bias, model.attention_output_bias, feed_forward


def _scaling_shortfall(scaling: RopeScaling, *, latent: bool) -> str:
    if scaling.type == "yarn":
        return _yarn_shortfall(scaling, latent=latent)
    if scaling.type in ("dynamic", "longrope", "proportional"):
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
            low, high = frequencies
            figures = f"{scaling.factor:g} x {scaling.original_positions:,}, {low:g} and {high:g}"
            return f"Rope is scaled as in Llama 3.1 (8 x 8,192, frequency factors 1 and 4), not by {figures}."
    return ""


def _yarn_shortfall(scaling: RopeScaling, *, latent: bool) -> str:
    temperature = scaling.temperature
    if scaling.factor <= 1 and temperature != 1:
        return f"Rotated elements are not multiplied by {temperature:g}: YaRN's factor is 1."
    ramp = (scaling.original_positions, scaling.beta_fast, scaling.beta_slow, scaling.whole_range)
    if latent and ramp != _LATENT_YARN_FIXED:
        return "YaRN's ramp is that of DeepSeek-V3 (4,096 positions, beta_fast 32, beta_slow 1)."
    return ""


# Which layers are of a kind, in the notation of Megatron-LM's flags: a Python list of 0 and 1.


def layer_list(order: str, counted_letter: str) -> str:
    """A list with a 1 for each layer of a kind, as `moe_freq_type` of Megatron-LM evaluates it.

    Parameters
    ----------
    order
        A letter for the kind of each layer, the first one first; at least one.
    counted_letter
        That of the kind.

    >>> layer_list("FFFWW", "W"), layer_list("FWFWFW", "W"), layer_list("LL", "L")
    ('([0]*3+[1]*2)', '([0,1]*3)', '([1]*2)')
    """
    digits = "".join("1" if letter == counted_letter else "0" for letter in order)
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
    """What arguments say of a model, by their words.

    Parameters
    ----------
    model
        The model to be trained.
    seq_len
        Tokens of a sequence, from 1: positions go as far at least.
    """
    said = model_fields(MODEL_ARGUMENTS, model) | {
        "ffn_hidden": feed_forward_width(model),
        "seq_len": seq_len,
        "max_positions": max(seq_len, model.max_positions or 0),
        "vocab_multiple": VOCAB_MULTIPLE,
        "head_dim": model.v_head_dim if model.attention else model.qk_head_dim,
        "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position": POSITIONS[model.position],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mlp_bias": linear_bias(model),
        "attention_bias": model.attention_bias and not linear_bias(model),
        **_attention(model),
        **_scales(model),
        **_activation(model),
    }
    said |= _rope(model)
    if model.moe is not None:
        said |= _experts(model, model.moe)
    if model.hybrid_pattern is not None:
        # Module and name of the layers' specification, which pretrain_hybrid.py asks for.
        spec = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
        said["layer_specification"] = spec
        said["hybrid_pattern"] = model.hybrid_pattern + _module_patterns(model)
    else:
        said |= dict.fromkeys(word for word in said if word.startswith("mamba."))
    return said


def _module_patterns(model: ModelSpec) -> str:
    """What stands behind a hybrid pattern: / and the blocks of each prediction module."""
    return f"/{model.mtp_pattern}" * model.mtp_layers


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
        "qk_norm": (model.qk_norm and model.qk_norm_weights) or latent is not None,
        "weightless_qk_norm": model.qk_norm and not model.qk_norm_weights,
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
        schedule = sharing_schedule(model.attention_order or "")
        if schedule is not None and model.kinds_apart:
            said["indexer_first"], said["indexer_every"] = schedule
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
            said["full_attention_every"] = layer_list(model.attention_order.upper(), WINDOWED)
    if model.rope_in_windows_alone and model.position == "rope" and latent is None:
        said["unturned"] = layer_list(model.attention_letters.upper(), FULL)
    return said


def _scales(model: ModelSpec) -> dict[str, object]:
    """Factors on embeddings, logits and attention scores.

    Of scores the factor is the root of one argument over the width of a head to the power of another
    (megatron/core/transformer/transformer_config.py), whose default of 1 is not that of other models.
    """
    scale = None if model.attention is not None else model.attention_scale
    if scale is None and model.embedding_scale == model.output_scale == 1:
        return {}
    if scale is None:
        return {"scales": True, "scale_power": 0.5}
    return {"scales": True, "scale_power": 0, "scale_width": scale**2}


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
        # Megatron multiplies rotated elements by g(mscale) / g(mscale_all_dim), g(m) = 0.1 m ln(factor) + 1
        # (yarn_rotary_pos_embedding.py): any other temperature is said by an mscale.
        mscale, of_all = scaling.mscale, scaling.mscale_all_dim
        plain = replaced_temperature(scaling)
        if plain is not None:
            mscale, of_all = plain, of_all or 0.0
        said |= {"rope.scaling.factor": scaling.factor, "mscale": mscale, "mscale_all_dim": of_all}
        if not latent:
            said["position"] = "yarn"
            ramp = ("original_positions", "beta_fast", "beta_slow", "whole_range")
            said |= {f"rope.scaling.{name}": getattr(scaling, name) for name in ramp}
    elif scaling.type == "linear" and not latent:
        said["interpolation"] = int(scaling.factor)
    elif scaling.type == "llama3" and not latent:
        said |= {"llama3_scaling": True, "llama3_factor": scaling.factor}
    return said


def replaced_temperature(scaling: RopeScaling) -> float | None:
    """The mscale that gives the model's temperature; None where the model's own weights do.

    Parameters
    ----------
    scaling
        YaRN's; its temperature multiplies rotated elements.
    """
    if scaling.factor <= 1:
        return None
    tenth = 0.1 * math.log(scaling.factor)
    under = tenth * (scaling.mscale_all_dim or 0.0) + 1.0
    temperature = (tenth * (scaling.mscale or 1.0) + 1.0) / under
    if math.isclose(temperature, scaling.temperature, rel_tol=1e-9):
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
    if moe.dense_layers or moe.every > 1:
        order = ("E" if layer in model.expert_layers else "D" for layer in range(model.layers))
        said["moe.every"] = layer_list("".join(order), "E")
    groups, chosen_groups = moe.router_groups, moe.router_groups_per_token
    if groups is None or chosen_groups is None or chosen_groups >= groups:
        said |= {"moe.router_groups": None, "moe.router_groups_per_token": None}
    if moe.router_score == "sigmoid":
        said["balancing_bias"] = moe.router_bias
    else:
        # SparseMixer is not there: `_differing_experts` says so.
        said["moe.router_score"] = "softmax"
        # A softmax over the chosen experts makes their weights add up to 1; one alone has no gradient.
        said["pre_softmax"] = not moe.router_normalized or moe.top_k == 1
    return said


# Arguments of the layout and of its execution, and the files that start it.


SHARDING_STRATEGIES = {stage: MEGATRON.zero_stages[stage].value for stage in (2, 3)}
"""What Megatron FSDP calls ZeRO stages."""
FSDP_CHECKPOINTS = "fsdp_dtensor"
"""The only format of checkpoints that Megatron FSDP writes."""
Said = dict[str, object]
"""Values by the words of the record's arguments."""

_NARROW: dict[str, Said] = {
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}
_EXPERT_BUDGET = 1.5
"""Least budget of tokens of a rank's experts over the even share (Megatron-Bridge, perf_recipes/deepseek).
A step that needs more is run again without (megatron/core/transformer/moe/paged_stash.py)."""

_USAGE = """\
Set MEGATRON_ENTRY to Megatron-LM's pretrain_gpt.py, and
#   DATA_PATH          prefix of the tokenized data; several prefixes and weights are separated by spaces
#   TOKENIZER_MODEL    with TOKENIZER_TYPE, HuggingFaceTokenizer unless set
#   TRAIN_ITERS, LR    steps and peak learning rate
# or, for a trial without data, MOCK_DATA=1 (then 50 steps unless TRAIN_ITERS is set)."""

_DATA_CHECKS = """\
: "${MEGATRON_ENTRY:?set it to the path of Megatron-LM pretrain_gpt.py}"
if [ "${MOCK_DATA:-0}" = 1 ]; then
  data=(--mock-data --tokenizer-type NullTokenizer)
  train=(--train-iters "${TRAIN_ITERS:-50}" --lr "${LR:-1e-4}")
else
  : "${DATA_PATH:?set it to the prefix of the tokenized data, or MOCK_DATA=1 for a trial}"
  : "${TOKENIZER_MODEL:?set it to the tokenizer, or MOCK_DATA=1 for a trial}"
  : "${TRAIN_ITERS:?set it to the number of steps}"
  : "${LR:?set it to the peak learning rate}"
  read -r -a prefixes <<< "$DATA_PATH"
  data=(--data-path "${prefixes[@]}" --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}"
    --tokenizer-model "$TOKENIZER_MODEL")
  train=(--train-iters "$TRAIN_ITERS" --lr "$LR")
fi
"""


def megatron_args(launch: Launch) -> list[str]:
    """Arguments of pretrain_gpt.py: architecture, parallelism, batch, precision, recomputation.

    Left to the caller: data, tokenizer, learning rate, length of training, checkpoints. Raises
    InfeasibleError for Transformer Engine's loss and for attention in FP8.

    Parameters
    ----------
    launch
        A plan that keeps Megatron-LM's rules.
    """
    inputs = launch.inputs
    if inputs.adapters is not None:
        raise InfeasibleError(
            "Megatron-LM's arguments train every parameter, and the plan trains adapters: launch it with "
            "--target bridge."
        )
    if launch.execution.te_loss:
        raise InfeasibleError(
            "Megatron-LM's arguments refuse Transformer Engine's cross entropy, which the plan was allowed: "
            "launch it with --target bridge, or plan without --allow te-loss."
        )
    if launch.execution.fp8_attention:
        raise InfeasibleError(
            "Megatron-LM has no argument for attention in FP8, which the plan was allowed: "
            "launch it with --target bridge, or plan without --allow fp8-attention."
        )
    said = said_of_model(inputs.model, inputs.seq_len) | said_of_launch(launch)
    if launch.placed.pipeline_before_data and inputs.model.moe is None and launch.layout.cp > 1:
        # Megatron builds expert groups for dense models too, and wants as many replicas as dense groups.
        said["etp"] = launch.layout.tp * launch.layout.cp
    said["bf16"] = inputs.precision != "fp16"
    if launch.execution.bucket_mb is None:
        said["bucket_parameters"] = None
    return flag_words(flags_of(MEGATRON_ARGUMENTS.values(), said))


def megatron_env(launch: Launch) -> dict[str, str]:
    """Environment variables that the plan needs.

    Before Blackwell, tensor and context parallelism rely on kernels starting in the order they are issued,
    which one hardware queue brings about; FSDP and the expert overlap need several.

    Parameters
    ----------
    launch
        A plan that keeps Megatron-LM's rules, whichever program starts it.
    """
    layout, execution, variables = launch.layout, launch.execution, dict[str, str]()
    if execution.cuda_graph == "full" and launch.inputs.model.moe is not None:
        # The fused grouped MLP of a graph of the whole step.
        variables["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    if execution.offload_modules != "none":
        # Weights stay on the GPU: megatron/training/arguments.py asks for it beside offloading.
        variables["NVTE_CPU_OFFLOAD_V1"] = "1"
    blackwell = launch.inputs.cluster.device.architecture == "blackwell"
    if layout.zero_stage >= 2:
        return variables
    if execution.ep_overlap:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **variables}
    if (layout.tp > 1 or layout.cp > 1) and not blackwell:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    return variables


def megatron_start(launch: Launch) -> Start:
    """pretrain_gpt.py, or pretrain_hybrid.py for a pattern of layers, with the plan's arguments.

    Data and tokenizer come from the user's environment.

    Parameters
    ----------
    launch
        A plan that keeps Megatron-LM's rules. InfeasibleError is raised as by `megatron_args`.
    """
    model = launch.inputs.model
    args = megatron_args(launch)
    needs = layer_needs(MEGATRON, model).items()
    installs = tuple(f"Layers of {kind} need {packages}." for kind, packages in needs)
    if launch.execution.offload_modules != "none":
        installs += (f"Offloading needs {MEGATRON.offloads['activations'].installs}.",)
    entry = "pretrain_gpt.py" if model.hybrid_pattern is None else "pretrain_hybrid.py"
    program = Program(
        framework=MEGATRON.title,
        command='"$MEGATRON_ENTRY"',
        usage=_USAGE.replace("pretrain_gpt.py", entry),
        variant=", with biases" if linear_bias(model) else "",
        notes=(*notes_of(model, MEGATRON_SAYS, megatron_shortfalls(model)), *installs),
        checks=_DATA_CHECKS.replace("pretrain_gpt.py", entry),
        data_arguments='"${data[@]}" "${train[@]}"',
        takes=f"more arguments of {entry}",
    )
    files = {"megatron_args.json": json_file(args)}
    return Start(program=program, args=args, env=megatron_env(launch), files=files)


MEGATRON_WRITER = Writer(framework=MEGATRON, start=megatron_start)


def said_of_launch(launch: Launch) -> Said:
    """What arguments say of a plan's layout, batch and execution, by their words.

    Parameters
    ----------
    launch
        A plan that keeps Megatron-LM's rules.
    """
    layout, inputs, execution = launch.layout, launch.inputs, launch.execution
    sharded = layout.zero_stage >= 1
    # Megatron overlaps in the interleaved schedule of more than two stages, unless told not to.
    overlaps_alone = layout.vpp > 1 and layout.pp > 2
    experts = inputs.model.moe is not None
    said: Said = said_of_degrees(layout, experts=experts) | {
        "mcore_models": True,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_before_data": launch.placed.pipeline_before_data,
        **_pipeline(launch),
        "overlap.pp": execution.pp_overlap or not overlaps_alone,
        # Transfers in fill and drain are priced as those of the steady phase, the loss in few kernels.
        "overlaps_ends": execution.pp_overlap and layout.vpp > 1 and layout.pp > 1,
        "loss_fusion": True,
        # The tensor-parallel overlap of Transformer Engine gathers and scatters along the sequence.
        "overlap.tp": layout.sequence_parallel and execution.tp_overlap,
        "seq_len": inputs.seq_len,
        "global_batch": inputs.global_batch,
        "optimizer": inputs.optimizer,
        # What is priced; later versions have another default.
        "muon_pieces": "blockwise" if inputs.optimizer == "muon" else None,
        "distributed_optimizer": sharded,
        "shard_groups": layout.shard_groups,
        "overlap.dp": execution.dp_overlap,
        "overlaps_gathers": execution.dp_overlap and sharded,
        "bucket_parameters": launch.bucket_parameters,
        **_recompute(layout),
        **_numbers(launch),
        **_graphs(launch),
        **_dealing(launch),
    }
    if execution.cp_comm != "p2p" and layout.cp > 1:
        said["cp_comm"] = execution.cp_comm
        if execution.cp_comm == HIERARCHICAL:
            said["context_sizes"] = launch.context_sizes
    if execution.offload_modules != "none":
        said["offloads_activations"] = True
        said["offload_modules"] = tuple(execution.offload_modules.split("+"))
    if experts:
        plain = execution.moe_dispatch in ("alltoall", "allgather")
        said |= {
            "overlap.ep": execution.ep_overlap,
            # Tokens per expert are padded to the tile that the format multiplies.
            "padded_experts": inputs.precision in _NARROW,
            "dispatcher": execution.moe_dispatch if plain else "flex",
            "flex_backend": None if plain else execution.moe_dispatch,
        }
    if layout.zero_stage >= 2:
        said |= {
            "fsdp": True,
            "sharding": SHARDING_STRATEGIES[layout.zero_stage],
            "fsdp_gradients": "bf16" if execution.gradient_dtype == "bf16" else "fp32",
            "checkpoint_format": FSDP_CHECKPOINTS,
            "gradient_fusion": False,
        }
    if layout.optimizer_offload > 0:
        said |= {
            "optimizer_offload": True,
            "offloaded_share": layout.optimizer_offload / 100,
            "overlaps_offload": True,
            "precision_aware": True,
        }
    return said


def _dealing(launch: Launch) -> Said:
    """Hybrid context parallelism, under which the longest sample, a whole pack, takes cp ranks."""
    inputs = launch.inputs
    if inputs.lengths is None or not inputs.lengths.dealt:
        return {}
    rank_tokens = inputs.seq_len // launch.layout.cp
    return {"hybrid_context": True, "rank_tokens": rank_tokens, "token_mean_loss": True}


def _recompute(layout: LayoutDoc) -> Said:
    """A layout's recomputation; of a full one, no more layers than its largest chunk has."""
    if layout.recompute == "full" and layout.recompute_layers > 0:
        layers = min(layout.recompute_layers, max(max(rank) for rank in layout.stages))
        return {"recompute": "full", "recompute_method": "block", "recompute_layers": layers}
    if layout.recompute == "selective" and layout.recompute_modules:
        return {"recompute": "selective", "recompute_modules": layout.recompute_modules}
    return {}


def _pipeline(launch: Launch) -> Said:
    layout, model = launch.layout, launch.inputs.model
    if model.hybrid_pattern is not None:
        chunks = pattern_chunks(model.hybrid_pattern, layout.stages)
        return {"hybrid_pattern": chunks + _module_patterns(model)}
    if layout.pp == 1:
        return {}
    if len({count for rank in layout.stages for count in rank}) > 1:
        return {"layout": layout_string(layout.stages, model.mtp_layers)}
    return {"vpp": layout.vpp} if layout.vpp > 1 else {}


def _graphs(launch: Launch) -> Said:
    """CUDA graphs. Experts in a graph of the whole step have buffers for a budget of tokens."""
    scope = launch.execution.cuda_graph
    if scope == "partial":
        return {"graph_kind": "transformer_engine", "graph_modules": _graph_modules(launch)}
    if scope != "full":
        return {}
    # A check would make the host wait inside the graph.
    said: Said = {
        "graph_kind": MEGATRON.cuda_graphs[scope].value,
        "checks_for_nan": False,
    }
    if launch.inputs.model.moe is not None:
        # Tokens that a rank's experts have buffers for, over the even share: 10 % over measured loads.
        measured = max((load for _, load in launch.inputs.expert_imbalance_by_ep), default=1.0)
        budget = max(_EXPERT_BUDGET, round(1.1 * measured, 2))
        said |= {"op_fuser": True, "expert_budget": budget, "paged_stash": True}
    return said


def _graph_modules(launch: Launch) -> tuple[str, ...]:
    """What partial CUDA graphs capture. An all-to-all waits for its counts where tokens are padded."""
    inputs = launch.inputs
    blocks = inputs.model.blocks
    mamba = ("mamba",) if blocks.mamba else ()
    if inputs.model.moe is None:
        return (*mamba, "attn", "mlp")
    waits = launch.execution.moe_dispatch == "alltoall" and inputs.precision in _NARROW
    modules = (*mamba, "attn", "moe_router")
    return modules if waits else (*modules, "moe_preprocess")


def _numbers(launch: Launch) -> Said:
    """The precision, and the types of gradients, moments and parameters."""
    execution, precision = launch.execution, launch.inputs.precision
    four_bit, narrow = precision == "nvfp4", execution.gradient_dtype == "bf16"
    said: Said = {
        "fp16": precision == "fp16",
        "narrow_sums": narrow,
        "fp8_params": execution.fp8_params and not four_bit,
        "fp4_params": execution.fp8_params and four_bit,
        "gathers_over_gradients": execution.fp8_params and precision == "mxfp8",
        **_NARROW.get(precision, {}),
    }
    if precision == "fp8" and execution.fp8_recipe is not None:
        said["fp8_recipe"] = execution.fp8_recipe
    if execution.moment_dtype == "bf16":
        said |= {"precision_aware": True, "moment_dtype": "bf16", "square_dtype": "bf16"}
    return said


# A plan as overrides of a Megatron-Bridge recipe: `model.*`, `train.*`, `ddp.*` in Hydra's notation.


def bridge_overrides(plan: Plan) -> list[str]:
    """Overrides for a recipe of the same model. Raises InfeasibleError if Megatron or Bridge would refuse it.

    The architecture is the recipe's own. What the plan decided is set, what it does without taken back.

    Parameters
    ----------
    plan
        With a layout; of Megatron-LM, or of a framework whose plan Megatron-LM can start.
    """
    launch = legal_launch(plan, MEGATRON)
    if launch.inputs.lengths is not None and launch.inputs.lengths.dealt:
        # megatron/bridge/training/gpt_step.py, get_batch, says is_hybrid_cp=False.
        raise InfeasibleError(
            "Megatron-Bridge deals no samples to ranks: launch the plan with --target megatron, or plan "
            "without --hybrid-cp."
        )
    if MEGATRON.optimizers[launch.inputs.optimizer].whole:
        raise InfeasibleError(
            f"Megatron-Bridge reduces gradients whole for {launch.inputs.optimizer}, which the plan's price "
            "does not have: launch it with --target megatron."
        )
    if launch.layout.zero_stage >= 2 and launch.execution.gradient_dtype != "bf16":
        raise InfeasibleError(
            "Overrides of Megatron-Bridge hold no torch types, so that Megatron-FSDP would add gradients up "
            "at 16 bits: launch the plan with --target megatron, or plan with --allow bf16-grads."
        )
    said = said_of_launch(launch) | _bridge_numbers(launch) | _bridge_pipeline(launch)
    said |= {"optimizer": None, "overlap.ep": launch.execution.ep_overlap}
    if launch.inputs.model.moe is not None:
        said["expert_overlap"] = launch.execution.ep_overlap
    if not launch.execution.dp_overlap:
        said["bucket_parameters"] = None
    values: dict[str, object] = {
        name: said[word] for name, word in BRIDGE_OVERRIDES if said.get(word) is not None
    }
    values |= {name: value for name, value in BRIDGE_RESETS.items() if name not in values}
    values |= _bridge_adapters(launch.inputs)
    if launch.execution.cuda_graph == "full":
        values["rerun_state_machine.check_for_nan_in_loss"] = False
        values["ddp.check_for_nan_in_grad"] = False
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def bridge_files(plan: Plan) -> dict[str, str]:
    """Overrides for the recipe's command line, and variables, which go before the recipe's own."""
    overrides, launch = bridge_overrides(plan), legal_launch(plan, MEGATRON)
    env = megatron_env(launch) | nccl_env(launch)
    return {
        "bridge_overrides.json": json_file(overrides),
        "env.json": json_file(dict(sorted(env.items()))),
    }


# A plan as fields of ms-swift's `megatron sft`, which takes a model by its name and Megatron-LM's arguments.


_SWIFT_LACKS = {
    "pipeline_before_data": "the order of ranks tp, pp, dp: plan whole nodes",
    "context_sizes": "sizes of hierarchical context parallelism: plan --without cp-hierarchical",
    "graph_kind": "CUDA graphs: plan --without cuda-graph",
    "overlap.ep": "overlap of the experts' all-to-all: plan --without ep-overlap",
    # Its packs end where samples do, and Transformer Engine copies into buffers of one size alone
    # (swift/megatron/utils/utils.py, get_padding_to; comm_gemm_overlap.cpp, copy_into_buffer).
    "overlap.tp": "tp overlap, as its packs have unlike lengths: plan --without tp-overlap",
    "offloads_activations": "offloaded activations: pin offload_modules=none",
    "narrow_sums": "gradients at 16 bits: plan without --allow bf16-grads",
    "gathers_over_gradients": "parameters in MXFP8: plan without --allow fp8-params",
    "fsdp": "ZeRO 2 and 3: forbid zero-2,zero-3",
    "hybrid_context": "samples dealt to ranks: plan without --hybrid-cp",
    "hybrid_pattern": "layers in a pattern: launch the plan with --target megatron",
}
"""Words of arguments that it has no field for, and what to do."""


def megatron_swift_fields(launch: Launch) -> dict[str, object]:
    """What `megatron sft` is told of a plan's layout, batch and execution.

    Names are those of ms-swift 4.6.0 (swift/megatron/arguments/megatron_args.py). The size of gradient
    buckets has none: Megatron's own is taken. Raises InfeasibleError for what else it does not have.

    Parameters
    ----------
    launch
        A plan that keeps Megatron-LM's rules.
    """
    inputs, layout, execution = launch.inputs, launch.layout, launch.execution
    said = said_of_launch(launch)
    lacking = [why for word, why in _SWIFT_LACKS.items() if said.get(word)]
    if layout.shard_groups > 1:
        lacking.append("shard groups: forbid shard-groups")
    if inputs.optimizer not in ("adam", "sgd"):
        lacking.append(f"{inputs.optimizer}: plan with adam")
    if execution.te_loss or execution.fp8_attention:
        lacking.append("what was allowed of numbers: plan without te-loss and fp8-attention")
    if inputs.model.attention is not None and inputs.model.attention.indexer is not None:
        lacking.append("sparse attention: launch the plan with --target megatron")
    by_library = said.get("flex_backend")
    if by_library not in (None, "deepep"):
        lacking.append(f"{by_library}: plan --without {by_library}")
    if said.get("dispatcher") == "allgather":
        # Nor has Megatron-Core, where lengths vary (transformer_config.py), as mcore-bridge has them do.
        lacking.append("allgather dispatcher: plan --without allgather")
    if lacking:
        raise InfeasibleError(f"ms-swift's megatron commands have no {'; no '.join(lacking)}.")
    if layout.pp > 1 and layout.vpp > 1:
        said["layout"] = layout_string(layout.stages, inputs.model.mtp_layers)
    # What is left out has another default there: one module is recomputed.
    said |= {"recompute": said.get("recompute", "none"), "bf16": inputs.precision != "fp16"}
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for word, name in SWIFT_FIELDS.items()
        if (value := said.get(word)) is not None
    }
    # Megatron-LM's own choice of attention, and its kernels around attention and experts.
    fields |= {"attention_backend": "auto", SWIFT_SWITCHES["rope_fusion"]: True}
    if not said["overlap.pp"]:
        fields[SWIFT_SWITCHES["overlap.pp"]] = False
    if inputs.model.moe is not None:
        fields |= {"moe_permute_fusion": True, "moe_enable_deepep": by_library == "deepep"}
    if inputs.model.mtp_layers:
        fields["mtp_num_layers"] = inputs.model.mtp_layers
    extra = {name: True for word, name in SWIFT_EXTRAS.items() if said.get(word)}
    return fields | ({SWIFT_EXTRA: extra} if extra else {})


def _bridge_numbers(launch: Launch) -> Said:
    """Precision and loss, as Bridge says them.

    Its named precisions fix the types of gradients and parameters. Where the plan has others, the fields of
    the precision are set: the recipe must hold it as a configuration, as performance recipes do.
    """
    execution, precision = launch.execution, launch.inputs.precision
    narrow_sums, said = execution.gradient_dtype == "bf16", Said(loss="native")
    if execution.te_loss:
        said["loss"] = MEGATRON.numerics["te-loss"].value
    if precision in _NARROW:
        said |= {"fp8_attention": execution.fp8_attention, "wide_ends": False}
    else:
        said |= {"fp8_params": None, "fp4_params": None, "gathers_over_gradients": None}
    if precision not in _NARROW and not narrow_sums:
        return said | {"precision": f"{precision}_mixed"}
    return said | {"wide_sums": not narrow_sums}


def _bridge_adapters(inputs: PlanInputs) -> dict[str, object]:
    """Fields of the recipe's `peft`, a LoRA configuration: width and modules.

    Modules are found by their names, and a name that finds none is an error (megatron/bridge/peft/
    module_matcher.py, match). Feed-forwards, experts and shared experts name their modules alike: where some
    of them have no adapter, the names of the others say what they stand in.
    """
    adapters, model = inputs.adapters, inputs.model
    if adapters is None:
        return {}
    have = {matrix.name for matrix in layer_matrices(model)}
    if model.attention is None:
        have -= {"q_proj"}  # There it is a part of linear_qkv.
    modules = [
        name for name, matrix in BRIDGE_MODULES.items() if matrix in have and adapters.has(matrix)
    ]
    said = {matrix for name, matrix in BRIDGE_MODULES.items() if name in modules}
    for name, matrix in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        if adapters.has(matrix) and (model.moe is None or adapters.has(EXPERTS)):
            modules.append(name)
        elif adapters.has(matrix):
            modules += [f"*.mlp.{name}"] if model.has_dense_feed_forward else []
            modules += [f"*.shared_experts.{name}"] if model.moe and model.moe.shared_width else []
        elif adapters.has(EXPERTS):
            modules.append(f"*.experts.{name}")
        said |= {matrix}
    of_model = {matrix.name for matrix in layer_matrices(model)}
    apart = sorted({*adapters.matrices} & of_model - said)
    if apart:
        raise InfeasibleError(
            f"Megatron-Bridge's LoRA has no adapter beside {', '.join(apart)} alone: queries, keys and "
            "values share one, gate and up projection another: give --lora-targets linear_qkv,linear_fc1."
        )
    values: dict[str, object] = {
        ADAPTER_RANK: adapters.rank,
        ADAPTED_MODULES: tuple(modules),
    }
    if adapters.has(EXPERTS):
        values[SHARES_EXPERT_ADAPTERS] = False
    return values


def _bridge_pipeline(launch: Launch) -> Said:
    """Layers of the stages between quotes, which Hydra asks for around its own signs."""
    said = _pipeline(launch)
    if "hybrid_pattern" in said and launch.layout.pp == 1:
        return {"hybrid_pattern": None}
    if "hybrid_pattern" in said and launch.layout.vpp > 1:
        # megatron/bridge/models/hybrid/hybrid_provider.py, provide, asserts it.
        raise InfeasibleError(
            "Megatron-Bridge runs no virtual stages of hybrid models: launch the plan with --target "
            "megatron, or plan with --forbid interleaving."
        )
    return {word: f"'{text}'" for word, text in said.items() if word != "vpp"}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
