"""What Megatron-LM's flags call the sizes of a model: one table for what writes them and what reads them.

Names and defaults were read in megatron-core 0.19.2 (`megatron.training.arguments`).
"""

from __future__ import annotations

from typing import NamedTuple


class SizeFlag(NamedTuple):
    """A whole number of the model."""

    flag: str
    field: str
    """Of the model's schema."""
    default: int = 0
    """Megatron's own, where the flag is absent; 0 where it has none."""


LATENT_ATTENTION = (
    SizeFlag("--q-lora-rank", "q_lora_rank"),
    SizeFlag("--kv-lora-rank", "kv_lora_rank", 32),
    SizeFlag("--qk-head-dim", "qk_nope_head_dim", 128),
    SizeFlag("--qk-pos-emb-head-dim", "qk_rope_head_dim", 64),
    SizeFlag("--v-head-dim", "v_head_dim", 128),
)
"""Multi-head latent attention, fields of `MlaSpec`."""

SPARSE_INDEXER = (
    SizeFlag("--dsa-indexer-n-heads", "heads"),
    SizeFlag("--dsa-indexer-head-dim", "head_dim"),
    SizeFlag("--dsa-indexer-topk", "top_k"),
)
"""What chooses positions for latent attention, fields of `SparseIndexerSpec`."""

LINEAR_ATTENTION = (
    SizeFlag("--linear-num-key-heads", "key_heads", 16),
    SizeFlag("--linear-num-value-heads", "value_heads", 32),
    SizeFlag("--linear-key-head-dim", "key_head_dim", 128),
    SizeFlag("--linear-value-head-dim", "value_head_dim", 128),
    SizeFlag("--linear-conv-kernel-dim", "conv_kernel", 4),
)
"""Gated DeltaNet, fields of `GatedDeltaNetSpec`."""

MAMBA = (
    SizeFlag("--mamba-state-dim", "state_dim", 128),
    SizeFlag("--mamba-head-dim", "head_dim", 64),
    SizeFlag("--mamba-num-groups", "groups", 8),
    SizeFlag("--mamba-num-heads", "heads"),
)
"""Mamba-2, fields of `Mamba2Spec`; without a number of heads they are twice as wide as the model."""
HYBRID_PATTERN = "--hybrid-layer-pattern"
"""The block of each layer, chunks of a pipeline apart by |."""
OLD_HYBRID_PATTERN = "--hybrid-override-pattern"

ACTIVATIONS = {
    "swiglu": "--swiglu",
    "geglu": "--quick-geglu",
    "squared_relu": "--squared-relu",
}
"""Switches of the activations other than GELU, which is Megatron's default."""

POSITIONS = {"rope": "rope", "learned": "learned_absolute", "alibi": "none", "none": "none"}
"""Values of `--position-embedding-type` by the model's; ALiBi is not available."""

QUICK_GELU_ALPHA = 1.702
"""Of x sigmoid(alpha x), which `--quick-geglu` gates with (megatron/core/fusions/fused_bias_geglu.py)."""
LLAMA3_FACTOR = 8.0
"""What `--use-rope-scaling` scales by: `gpt_config_from_args` (megatron/training/argument_utils.py) drops
`--rope-scaling-factor`."""
