"""What accelerate with PyTorch FSDP2 refuses, beyond the general rules (read in accelerate 1.15.0)."""

from __future__ import annotations

from meshwright.constraints.attention_heads import whole_kv_heads
from meshwright.constraints.kinds import AtMost, When, of
from meshwright.constraints.rule import Rule
from meshwright.frameworks.fsdp2 import FSDP2

SHARDS_BESIDE_TENSOR = AtMost(
    name="fsdp2-shards",
    sentence="tp <= 1 where dp cp = 1: FSDP2 has nothing to shard over where every rank is a tensor rank",
    unit="ranks",
    when=(When("dp", most=1), When("cp", most=1)),
    value=of("tp"),
    words="tp {tp} takes every rank and leaves FSDP none to shard over",
    remedy="Lower tp, or raise dp or cp to 2 or more.",
)
"""Raised by the Accelerator, not by the parser (accelerate 1.15.0, parallelism_config.py)."""

WHOLE_MAMBA = AtMost(
    name="fsdp2-mamba",
    sentence="tp cp <= 1 where layers have Mamba",
    unit="ranks",
    binds=lambda work: work.model.state_space is not None,
    value=of("tp", "cp"),
    words="tp {tp} x cp {cp} for layers of Mamba, which transformers cuts neither way",
    remedy="Set tp and cp to 1, and shard with dp.",
)
"""transformers 5.23 has no tensor-parallel plan for these blocks (models/nemotron_h, falcon_h1, mamba2,
bamba, granitemoehybrid, mamba, falcon_mamba and jamba, configuration_*.py: Jamba's is of its experts), and
accelerate's context parallelism knows attention alone: a scan would start anew on each rank
(accelerate/parallelism_config.py)."""

CAUSAL_CONTEXT = AtMost(
    name="fsdp2-context-mask",
    sentence="cp <= 1 with sliding windows or attention sinks: accelerate has causal masks alone",
    unit="context-parallel ranks",
    binds=lambda work: work.model.windowed_layers > 0 or work.model.attention_sinks,
    value=of("cp"),
    words="cp {cp} for a model with sliding windows or attention sinks; beside cp accelerate has causal "
    "masks alone",
    remedy="Set cp to 1, or choose the megatron or the torchtitan framework.",
)
"""Its hook puts `is_causal` in place of every mask (accelerate/big_modeling.py,
_attach_context_parallel_hooks), and it asks for plain causal SDPA, which has no sinks
(docs/source/concept_guides/context_parallelism.md)."""

FSDP2_RULES: tuple[Rule, ...] = (
    SHARDS_BESIDE_TENSOR,
    whole_kv_heads(FSDP2),
    WHOLE_MAMBA,
    CAUSAL_CONTEXT,
)
