"""torchtitan, with the options of `torchtitan.config` and the registry module that holds the model."""

from __future__ import annotations

from typing import Any

from meshwright.frameworks.fsdp2 import FSDP_OFFLOAD_RULES
from meshwright.frameworks.record import (
    AdapterSetting,
    Argument,
    ContextExchange,
    Framework,
    OptimizerOffload,
    OptimizerSetting,
    Setting,
    ShardGroups,
    Stack,
    StepKindSetting,
    TokenDispatcher,
)

CONFIG = "torchtitan/config/configs.py"
OPTIMIZER = "torchtitan/components/optimizer/optimizer.py"
CHECKPOINTS = "torchtitan/distributed/activation_checkpoint.py"
EXPERTS = "torchtitan/models/common/config_utils.py"
TORCH_SCHEDULES = "torch/distributed/pipelining/schedules.py"

TORCHTITAN_COMPILED = Stack(name="torchtitan-compile", written=r"torchtitan\b", compiled=True)


TORCHTITAN_ARGUMENTS = {
    argument.word: argument
    for argument in (
        Argument("module", "--module", "text"),
        Argument("configuration", "--config", "text"),
        Argument("replicas", "--parallelism.data-parallel-replicate-degree", default=1),
        # What is left is -1.
        Argument("shards", "--parallelism.data-parallel-shard-degree", default=-1),
        Argument("tp", "--parallelism.tensor-parallel-degree", "count", 1),
        Argument("cp", "--parallelism.context-parallel-degree", "count", 1),
        Argument("pp", "--parallelism.pipeline-parallel-degree", "count", 1),
        Argument("ep", "--parallelism.expert-parallel-degree", "count", 1),
        Argument("reshard", "--parallelism.fsdp-reshard-after-forward", "text", "default"),
        Argument("local_batch", "--training.local-batch-size", "count", 8),
        Argument("global_batch", "--training.global-batch-size", default=-1),
        Argument("seq_len", "--training.seq-len", default=2048),
        Argument("schedule", "--parallelism.pipeline-parallel-schedule", "text", "1F1B"),
        Argument("micro_batch", "--parallelism.pipeline-parallel-microbatch-size", default=1),
        Argument("sequence_parallel", "--parallelism.no-enable-sequence-parallel", "switch", True),
        Argument("cuda_graphs", "--training.disable-cuda-graphs", "switch", True),
        Argument("offloads", "--training.enable-cpu-offload", "toggle"),
        Argument("compiled", "--compile.enable", "toggle"),
    )
}
"""By their words, in the order in which launch files have them."""
CHECKPOINTING = "activation-checkpoint:"
"""Subcommand that the kind of checkpointing follows."""
MODEL_PARTS = "module_fqns_per_model_part"
"""Key with the modules of each chunk of the pipeline."""


def _said(word: str, value: str = "", **fields: Any) -> Setting:
    return Setting(flag=TORCHTITAN_ARGUMENTS[word].flag, value=value, **{"source": CONFIG} | fields)


def _schedule(name: str, *rules: str) -> Setting:
    return _said("schedule", name, source=f"{CONFIG} and {TORCH_SCHEDULES}", rules=rules)


def _dispatcher(name: str, *, planned: bool = False, installs: str = "") -> TokenDispatcher:
    return TokenDispatcher(
        flag="comm_backend",
        value=name,
        source=EXPERTS,
        planned=planned,
        installs=installs,
        deduplicates=bool(installs),
    )


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    package="torchtitan",
    version="0.3.0",
    stacks=(
        Stack(
            name="torchtitan",
            written=r"torchtitan (v|>=)?(0\.([2-9]|\d\d)|[1-9]\d?\.)(?!.*\beager\b)",
            compiled=True,
        ),
        Stack(name="torchtitan-eager", written=r"torchtitan\b.*\beager\b"),
        TORCHTITAN_COMPILED,
    ),
    measured_as=("torchtitan-compile", "torchtitan-eager"),
    axes={
        "tp": _said("tp"),
        "cp": _said("cp"),
        "pp": _said("pp"),
        "dp": _said("shards"),
        "vpp": Setting(flag=MODEL_PARTS, source=CONFIG),
        "ep": _said("ep", rules=("torchtitan-expert-shards",)),
        # No flag: see models/common/MOE_SHARDING.md, "Configurations".
        "etp": Setting(
            source="torchtitan/models/common/moe_sharding.py",
            rules=("torchtitan-expert-tensor",),
        ),
    },
    experts_follow_tp=True,
    # The flag turns it off.
    sequence_parallel=_said("sequence_parallel", default=True),
    zero_stages={
        0: _said("replicas"),
        2: _said("reshard", "never"),
        3: _said("reshard", "always"),
    },
    schedules={
        "1f1b": _schedule("1F1B", "torchtitan-1f1b-micro-batches"),
        "interleaved-1f1b": _schedule("Interleaved1F1B"),
        "gpipe": _schedule("GPipe"),
        "breadth-first": _schedule("LoopedBFS"),
        "zb-h1": _schedule(
            "InterleavedZeroBubble", "torchtitan-split-backward", "torchtitan-zero-bubble-chunks"
        ),
        "zbv": _schedule("ZBVZeroBubble", "torchtitan-split-backward"),
        "dualpipe-v": _schedule("DualPipeV", "torchtitan-split-backward"),
    },
    full_recompute=Setting(flag=f"{CHECKPOINTING}full", source=CHECKPOINTS),
    recompute_modules={
        "op": Setting(flag=f"{CHECKPOINTING}selective", source=CHECKPOINTS, planned=False)
    },
    precisions={
        "bf16": Setting(
            flag="--training.mixed-precision-param",
            value="bfloat16",
            source=CONFIG,
            default=True,
        ),
        "fp8": Setting(
            flag="Float8LinearConverter",
            source="torchtitan/components/quantization/float8.py",
            installs="torchao",
        ),
        "mxfp8": Setting(
            flag="MXFP8LinearConverter",
            source="torchtitan/components/quantization/mx.py",
            installs="torchao",
        ),
        "nvfp4": Setting(
            flag="NVFP4LinearConverter",
            source="torchtitan/components/quantization/nvfp4.py",
            planned=False,
            installs="torchao",
        ),
    },
    optimizers={
        "adam": OptimizerSetting(source=OPTIMIZER, default=True),
        # Its owners and buckets are written out weight by weight, for Kimi K2 alone, without tp and pp
        # (models/kimi_k2_7/config_registry.py).
        "muon": OptimizerSetting(
            flag="optimizer_name",
            whole=True,
            value="DistMuon",
            source=f"{OPTIMIZER} and torchtitan/distributed/flex_shard/dist_muon.py",
            planned=False,
        ),
    },
    dispatchers={
        "alltoall": _dispatcher("standard", planned=True),
        "deepep": _dispatcher("deepep", installs="DeepEP"),
        "hybridep": _dispatcher("hybridep", installs="HybridEP"),
        "minimal_async_ep": _dispatcher("minimal_async_ep"),
    },
    overlaps={
        "dp": Setting(source="torchtitan/distributed/fsdp.py"),
        "pp": Setting(source=TORCH_SCHEDULES),
        "tp": Setting(flag="--compile.enable-async-tensor-parallel", source=CONFIG, planned=False),
    },
    # torch/distributed/tensor/experimental/_context_parallel/_attention.py, rotate_method ALL_GATHER.
    context_exchanges={
        "p2p": ContextExchange(source="torchtitan/distributed/context_parallel", gathers=True)
    },
    cuda_graphs={
        "none": _said("cuda_graphs"),
        "full": Setting(source="torchtitan/distributed/cudagraph.py", default=True, planned=False),
    },
    # Parameters and gradients go with the states.
    optimizer_offload=OptimizerOffload(
        flag=TORCHTITAN_ARGUMENTS["offloads"].flag,
        source=CONFIG,
        percents=(100,),
        zero_stages=(3,),
        measured=False,
        rules=FSDP_OFFLOAD_RULES,
    ),
    shard_groups=ShardGroups(
        flag=TORCHTITAN_ARGUMENTS["replicas"].flag,
        source=CONFIG,
        zero_stages=(2, 3),
        rules=("torchtitan-shard-groups", "torchtitan-expert-shards"),
    ),
    compilation=_said("compiled"),
    eager_stack="torchtitan-eager",
    attention={
        "flex": Setting(flag="get_attention_config", value="flex", source=EXPERTS),
        "flex_flash": Setting(
            flag="get_attention_config", value="flex_flash", source=EXPERTS, planned=False
        ),
        "varlen": Setting(
            flag="get_attention_config", value="varlen", source=EXPERTS, planned=False
        ),
    },
    adapters={
        "lora": AdapterSetting(source="torchtitan/components/lora.py", planned=False),
    },
    step_kinds={"sft": StepKindSetting(source="torchtitan/hf_datasets/text_datasets.py")},
    rank_orders={"tp-cp-dp-pp": Setting(source="torchtitan/distributed/parallel_dims.py")},
    own_rules=(
        "torchtitan-kv-heads",
        "torchtitan-sequence",
        "torchtitan-tied-embeddings",
        "torchtitan-context-shards",
        "torchtitan-architecture",
        "torchtitan-spread-experts",
        "torchtitan-mtp",
    ),
    degrees_remedy="Replicate (0), or shard with fsdp-reshard-after-forward never (2) or always "
    "(3).",
)
"""Read in torchtitan 0.3.0 and torch 2.13."""
