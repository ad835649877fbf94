"""Optimizer states in the host's memory: what they go together with."""

from __future__ import annotations

from meshwright.constraints.kinds import AtLeast, AtMost, Requires, When, of
from meshwright.constraints.rule import Rule
from meshwright.costmodel.workload import Workload

_FP32_BYTES = 4

OFFLOADED_SHARE = AtMost(
    name="offloaded-share",
    sentence="optimizer_offload <= 100: percent of the parameters",
    unit="percent",
    value=of("optimizer_offload"),
    limit=of(number=100),
    words="{value} % of the optimizer's states offloaded",
    remedy="Give a share of 0 to 100 %.",
)

MEGATRON_OFFLOAD_ZERO = Requires(
    name="megatron-offload-zero",
    sentence="zero_stage = 1 where optimizer states are offloaded",
    unit="settings",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=1, most=1),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 1 (the distributed optimizer), or offload nothing.",
)
"""--optimizer-cpu-offload needs --use-precision-aware-optimizer (megatron/training/arguments.py), which
needs the distributed optimizer (megatron/core/optimizer/optimizer_config.py)."""


def _other_states(workload: Workload) -> bool:
    """Whether states are not those of Adam in fp32 beside bf16 weights."""
    narrow = workload.moment_bytes < _FP32_BYTES
    return workload.optimizer != "adam" or narrow or workload.precision == "fp16"


MEGATRON_OFFLOAD_ADAM = AtMost(
    name="megatron-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments, and not in fp16",
    unit="percent",
    binds=_other_states,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded in {precision}",
    remedy="Train with adam in another precision and without 16-bit moments, or offload nothing.",
)
"""The flag that it needs is for Adam alone (optimizer_config.py); hybrid_optimizer.py passes no type of
moments on, and speaks of mixed precision in bf16."""


def _narrow_parameters(workload: Workload) -> bool:
    """Whether parameters live in FP8 under scales of the tensor's own."""
    return bool(workload.fp8_parameters) and workload.fp8_recipe != "delayed"


MEGATRON_OFFLOAD_FP8 = AtMost(
    name="megatron-offload-fp8",
    sentence="optimizer_offload = 0 with FP8 parameters unless their scales are delayed",
    unit="percent",
    binds=_narrow_parameters,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the optimizer's states offloaded beside FP8 parameters",
    remedy="Do not allow fp8-params, or offload nothing.",
)
"""megatron/training/arguments.py asserts it of --fp8-param-gather."""

DEEPSPEED_OFFLOAD_ZERO = Requires(
    name="deepspeed-offload-zero",
    sentence="zero_stage >= 1 where optimizer states are offloaded",
    unit="settings",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=1),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 1, 2 or 3, or offload nothing.",
)
"""Only the optimizers of ZeRO read offload_optimizer (DeepSpeed 0.19.8, runtime/engine.py)."""

DEEPSPEED_OFFLOAD_WHOLE = Requires(
    name="deepspeed-offload-whole",
    sentence="optimizer_offload = 100 where optimizer states are offloaded",
    unit="settings",
    when=(When("optimizer_offload", least=1),),
    needs=When("optimizer_offload", least=100),
    words="{optimizer_offload} % of the optimizer's states offloaded",
    remedy="Offload 0 or 100 %.",
)
"""A ratio is for ZeRO 3 alone (DeepSpeed 0.19.8, runtime/zero/config.py), where it counts whole groups of
1e9 elements of a rank (runtime/zero/stage3.py): left out by choice."""


def _not_adam_in_fp32(workload: Workload) -> bool:
    """Whether states are not those of Adam in fp32."""
    return workload.optimizer != "adam" or workload.moment_bytes < _FP32_BYTES


DEEPSPEED_OFFLOAD_ADAM = AtMost(
    name="deepspeed-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments",
    unit="percent",
    binds=_not_adam_in_fp32,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded",
    remedy="Train with adam without 16-bit moments, or offload nothing.",
)
"""Asserted of --cpu-optimizer (Megatron-DeepSpeed 4efb479, megatron/optimizer/__init__.py); DeepSpeed
refuses most other optimizers of the GPU (runtime/engine.py, zero_force_ds_cpu_optimizer)."""

DEEPSPEED_OFFLOAD_RULES: tuple[Rule, ...] = (
    DEEPSPEED_OFFLOAD_ZERO,
    DEEPSPEED_OFFLOAD_WHOLE,
    DEEPSPEED_OFFLOAD_ADAM,
)

FSDP_OFFLOAD_ZERO = Requires(
    name="fsdp-offload-zero",
    sentence="zero_stage = 3 where parameters, gradients and optimizer states are offloaded",
    unit="settings",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=3),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 3 (reshard after forward), or offload nothing.",
)
"""FSDP2 offloads with resharding or without (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_api.py,
CPUOffloadPolicy); without it the weights it would make room for stay whole: left out by choice."""

FSDP_OFFLOAD_SHARDS = AtLeast(
    name="fsdp-offload-shards",
    sentence="dp x cp >= 2 where parameters, gradients and optimizer states are offloaded",
    unit="ranks",
    when=(When("optimizer_offload", least=1),),
    value=of("dp", "cp"),
    limit=of(number=2),
    words="{optimizer_offload} % of the optimizer's states offloaded with dp {dp} and cp {cp}",
    remedy="Shard over two ranks or more, or offload nothing.",
)
"""torchtitan shards, and offloads, where its mesh has an axis to shard over
(torchtitan/distributed/parallel_dims.py, fsdp_enabled)."""

FSDP_OFFLOAD_WHOLE = Requires(
    name="fsdp-offload-whole",
    sentence="optimizer_offload = 100 where parameters, gradients and optimizer states are offloaded",
    unit="settings",
    when=(When("optimizer_offload", least=1),),
    needs=When("optimizer_offload", least=100),
    words="{optimizer_offload} % of the optimizer's states offloaded",
    remedy="Offload 0 or 100 %.",
)
"""A switch for all parameters (torchtitan/config/configs.py; accelerate/utils/dataclasses.py)."""


def _not_adam_in_bf16(workload: Workload) -> bool:
    """Whether the run is another than Adam in fp32 beside 16-bit weights of bf16's range."""
    return _not_adam_in_fp32(workload) or workload.precision != "bf16"


FSDP_OFFLOAD_ADAM = AtMost(
    name="fsdp-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments, in bf16",
    unit="percent",
    binds=_not_adam_in_bf16,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded in {precision}",
    remedy="Train with adam in bf16 without 16-bit moments, or offload nothing.",
)
"""By choice: how long other optimizers take on a host, and what loss scaling and FP8 gathers do to parameters
that lie there, is not priced."""

FSDP_OFFLOAD_RULES: tuple[Rule, ...] = (
    FSDP_OFFLOAD_ZERO,
    FSDP_OFFLOAD_SHARDS,
    FSDP_OFFLOAD_WHOLE,
    FSDP_OFFLOAD_ADAM,
)

MEGATRON_OFFLOAD_RULES: tuple[Rule, ...] = (
    MEGATRON_OFFLOAD_ZERO,
    MEGATRON_OFFLOAD_ADAM,
    MEGATRON_OFFLOAD_FP8,
)
