"""torchtitan, with the options of `torchtitan.config` and the registry module that holds the model."""

from __future__ import annotations

from meshwright.frameworks.fsdp2 import FSDP_OFFLOAD_RULES
from meshwright.frameworks.record import (
    ContextExchange,
    Framework,
    OptimizerOffload,
    Setting,
    ShardGroups,
    Stack,
    TokenDispatcher,
)

CONFIG = "torchtitan/config/configs.py"
CHECKPOINTS = "torchtitan/distributed/activation_checkpoint.py"
EXPERTS = "torchtitan/models/common/config_utils.py"
TORCH_SCHEDULES = "torch/distributed/pipelining/schedules.py"

TORCHTITAN_COMPILED = Stack(name="torchtitan-compile", written=r"torchtitan\b", compiled=True)


def _degree(name: str) -> Setting:
    return Setting(flag=f"--parallelism.{name}-degree", source=CONFIG)


def _schedule(name: str, *rules: str) -> Setting:
    return Setting(
        flag="--parallelism.pipeline-parallel-schedule",
        value=name,
        source=f"{CONFIG} and {TORCH_SCHEDULES}",
        rules=rules,
    )


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
        Stack(name="torchtitan", compiled=True),
        Stack(name="torchtitan-eager", written=r"torchtitan\b.*\beager\b"),
        TORCHTITAN_COMPILED,
    ),
    measured_as=("torchtitan-compile", "torchtitan-eager"),
    axes={
        "tp": _degree("tensor-parallel"),
        "cp": _degree("context-parallel"),
        "pp": _degree("pipeline-parallel"),
        "dp": _degree("data-parallel-shard"),
        "vpp": Setting(flag="module_fqns_per_model_part", source=CONFIG),
        "ep": Setting(
            flag="--parallelism.expert-parallel-degree",
            source=CONFIG,
            rules=("torchtitan-expert-shards",),
        ),
        # No flag: see models/common/MOE_SHARDING.md, "Configurations".
        "etp": Setting(
            source="torchtitan/models/common/moe_sharding.py",
            rules=("torchtitan-expert-tensor",),
        ),
    },
    experts_follow_tp=True,
    # The flag turns it off.
    sequence_parallel=Setting(
        flag="--parallelism.no-enable-sequence-parallel", source=CONFIG, default=True
    ),
    zero_stages={
        0: Setting(flag="--parallelism.data-parallel-replicate-degree", source=CONFIG),
        2: Setting(flag="--parallelism.fsdp-reshard-after-forward", value="never", source=CONFIG),
        3: Setting(flag="--parallelism.fsdp-reshard-after-forward", value="always", source=CONFIG),
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
    full_recompute=Setting(flag="activation-checkpoint:full", source=CHECKPOINTS),
    recompute_amount=None,
    recompute_modules={
        "op": Setting(flag="activation-checkpoint:selective", source=CHECKPOINTS, planned=False)
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
    gradient_buckets=None,
    # torch/distributed/tensor/experimental/_context_parallel/_attention.py, rotate_method ALL_GATHER.
    context_exchanges={
        "p2p": ContextExchange(source="torchtitan/distributed/context_parallel", gathers=True)
    },
    cuda_graphs={
        "none": Setting(flag="--training.disable-cuda-graphs", source=CONFIG),
        "full": Setting(source="torchtitan/distributed/cudagraph.py", default=True, planned=False),
    },
    offloads={},
    # Parameters and gradients go with the states.
    optimizer_offload=OptimizerOffload(
        flag="--training.enable-cpu-offload",
        source=CONFIG,
        percents=(100,),
        zero_stages=(3,),
        measured=False,
        rules=FSDP_OFFLOAD_RULES,
    ),
    shard_groups=ShardGroups(
        flag="--parallelism.data-parallel-replicate-degree",
        source=CONFIG,
        zero_stages=(2, 3),
        rules=("torchtitan-shard-groups", "torchtitan-expert-shards"),
    ),
    numerics={},
    compilation=Setting(flag="--compile.enable", source=CONFIG),
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
    linear_attention=None,
    sparse_attention=None,
    hybrid_layers=None,
    rank_orders={"tp-cp-dp-pp": Setting(source="torchtitan/distributed/parallel_dims.py")},
    rules=(
        "torchtitan-1f1b-micro-batches",
        "torchtitan-split-backward",
        "torchtitan-zero-bubble-chunks",
        "torchtitan-kv-heads",
        "torchtitan-sequence",
        "torchtitan-tied-embeddings",
        "torchtitan-context-shards",
        "torchtitan-architecture",
        "torchtitan-expert-shards",
        "torchtitan-expert-tensor",
        "torchtitan-spread-experts",
        "torchtitan-shard-groups",
        "torchtitan-mtp",
        *FSDP_OFFLOAD_RULES,
    ),
    degrees_remedy="Replicate (0), or shard with parallelism.fsdp_reshard_after_forward never (2) or always "
    "(3).",
)
"""Read in torchtitan 0.3.0 and torch 2.13."""
