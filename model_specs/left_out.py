"""Fields of a config.json that no description of a model holds, and which of them say nothing.

What the readers of a family do not ask for is either without effect on the network and its training, or at
the value that every launch has anyhow, or named by the launch: nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshwright.model_specs.config_fields import ConfigFields

_LONGEST_VALUE = 80
_MOST_NAMED = 100

_ABOUT_FILES = """
architectures model_type _name_or_path name_or_path transformers_version auto_map torch_dtype dtype
quantization_config _commit_hash torchscript tf_legacy_loss is_decoder is_encoder_decoder tie_encoder_decoder
num_labels id2label label2id problem_type finetuning_task tokenizer_class pruned_heads
"""
_ABOUT_RUNNING = """
use_cache return_dict use_return_dict output_attentions output_hidden_states attn_implementation
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation
experts_implementation use_mamba_kernels num_logits_to_keep cache_implementation gradient_checkpointing
ep_size pretraining_tp use_bfloat16 chunk_size_feed_forward head_dtype max_window_size
"""
_ABOUT_TEXT = """
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id cls_token_id
begin_suppress_tokens suppress_tokens bad_words_ids prefix max_length min_length do_sample temperature
top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams num_beam_groups
diversity_penalty early_stopping task_specific_params summary_type summary_use_proj summary_activation
summary_proj_to_labels summary_first_dropout boi_token_index eoi_token_index image_token_index
"""
_SAID_OTHERWISE = """
max_position_embeddings original_max_position_embeddings initial_context_length n_ctx qk_head_dim
experts_per_token mamba_d_head mamba_expand expand rope_interleave indexer_rope_interleave
"""
WITHOUT_EFFECT = frozenset(
    f"{_ABOUT_FILES} {_ABOUT_RUNNING} {_ABOUT_TEXT} {_SAID_OTHERWISE}".split()
)
"""Fields about files, about running a model, about text, and those that repeat what others say."""
AS_LAUNCHED: Mapping[str, tuple[object, ...]] = {
    "initializer_range": (0.02,),
    "attention_dropout": (0, 0.0),
    "attn_pdrop": (0, 0.0),
    "resid_pdrop": (0, 0.0),
    "embd_pdrop": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "resid_dropout": (0, 0.0),
    "dropout": (0, 0.0),
    "activation_dropout": (0, 0.0),
    "layerdrop": (0, 0.0),
    "classifier_dropout": (0, 0.0, 0.1),
    "router_aux_loss_coef": (0, 0.0),
    "router_z_loss_coef": (0, 0.0),
    "router_jitter_noise": (0, 0.0),
    "aux_loss_alpha": (0, 0.0),
    "output_router_logits": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "hidden_act": ("silu", "gelu_pytorch_tanh"),
    "mamba_hidden_act": ("silu",),
    "norm_before_gate": (True,),
    "mtp_transformer_layers": (1,),
    "moe_layer_freq": (1,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "use_bidirectional_attention": (False,),
    "residual_multiplier": (1, 1.0),
    "use_sliding_window": (False,),
    "residual_in_fp32": (False,),
}
"""Values of further fields at which a launch file says the same by saying nothing."""


def left_out(config: ConfigFields) -> tuple[str, ...]:
    """Fields with their values that no reader of the family asked for and a launch does not have anyhow.

    >>> left_out(ConfigFields({"use_cache": True, "initializer_range": 0.5}, "config.json"))
    ('initializer_range 0.5',)
    """
    named = [
        f"{name} {_shown(value)}"[:300]
        for name, value in config.unread()
        if name.rpartition(".")[2] not in WITHOUT_EFFECT
        and not any(_same(value, usual) for usual in AS_LAUNCHED.get(name, ()))
    ]
    if len(named) > _MOST_NAMED:
        named[_MOST_NAMED:] = [f"and {len(named) - _MOST_NAMED} more fields"]
    return tuple(named)


def _same(value: object, usual: object) -> bool:
    """Equal, where a number and a truth value are not."""
    return value == usual and isinstance(value, bool) == isinstance(usual, bool)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."
