"""Names of execution settings and of options of a plan.

Importing them costs nothing, so that `--help` can show them.
"""

from __future__ import annotations

from typing import Literal, get_args

Dispatcher = Literal["alltoall", "allgather", "deduplicated", "deepep", "hybridep"]
GraphScope = Literal["none", "feed_forward", "partial", "full"]
ContextExchange = Literal["p2p", "a2a", "a2a+p2p", "all_gather"]
OffloadedModules = Literal[
    "none",
    "layer_inputs",
    "saved_tensors",
    "core_attn",
    "core_attn+attn_proj",
    "expert_fc1",
    "moe_act",
    "expert_fc1+moe_act",
    "core_attn+expert_fc1",
    "core_attn+moe_act",
    "core_attn+expert_fc1+moe_act",
    "core_attn+attn_proj+expert_fc1",
    "core_attn+attn_proj+moe_act",
    "core_attn+attn_proj+expert_fc1+moe_act",
]
"""What waits for the backward pass in the host's memory. Inputs of recomputed layers, by the framework's own
switch or by a trainer's hooks on all saved tensors; or tensors that modules of a layer save: those of
Megatron's `--offload-modules` that are priced, where the attention projection goes with attention only."""
ParameterOffload = Literal["none", "cpu", "nvme"]
"""Where 16-bit shards of parameters lie: on the GPU, in the host's memory, or on the node's drives."""
StateType = Literal["fp32", "bf16"]
DISPATCHERS: tuple[str, ...] = get_args(Dispatcher)
OFFLOADED_MODULES: tuple[str, ...] = get_args(OffloadedModules)
PARAMETER_OFFLOADS: tuple[str, ...] = get_args(ParameterOffload)
OFFLOADED_INPUTS = ("layer_inputs", "saved_tensors")
"""Those that are no modules of a layer."""

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Optimizer = Literal[
    "adam",
    "sgd",
    "muon",
    "lion",
    "adafactor",
    "adam-8bit",
    "paged-adam",
    "paged-adam-8bit",
]
MuonMode = Literal["blockwise", "duplicated", "distributed"]
ScheduleName = Literal[
    "1f1b", "interleaved-1f1b", "gpipe", "breadth-first", "zb-h1", "zbv", "dualpipe-v", "dualpipe"
]
RecomputeName = Literal["none", "selective", "full"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)
"""Pipeline schedules as plans, run files and pins write them."""
RECOMPUTE_NAMES: tuple[str, ...] = get_args(RecomputeName)
Method = Literal["cp-sat", "exhaustive"]
METHODS: tuple[str, ...] = get_args(Method)
DEFAULT_MEMORY_RISK = 0.05
"""Share of measured errors of memory with which a plan may not fit."""
PlanObjective = Literal["nominal", "expected"]
OBJECTIVES: tuple[str, ...] = get_args(PlanObjective)
