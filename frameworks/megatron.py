"""Megatron-LM: flags of `megatron.training.arguments`, and fields of megatron-core that become flags."""

from __future__ import annotations

from meshwright.frameworks.record import (
    ContextExchange,
    Framework,
    GradientBuckets,
    OptimizerOffload,
    Setting,
    ShardGroups,
    Stack,
    TokenDispatcher,
)

# How Megatron-LM sends tokens to their experts, and what DeepEP and HybridEP need for it.


TRANSFORMER = "megatron/core/transformer/transformer_config.py"


def _flex(
    backend: str,
    since: str,
    *,
    planned: bool,
    installs: str,
    architectures: tuple[str, ...] = ("ampere", "hopper", "blackwell"),
    not_on: tuple[str, ...] = (),
    installs_between: str = "",
    group_sizes: tuple[int, ...] = (),
    domain_gpus: int = 0,
) -> TokenDispatcher:
    return TokenDispatcher(
        flag="--moe-flex-dispatcher-backend",
        value=backend,
        since=since,
        source=TRANSFORMER,
        planned=planned,
        installs=installs,
        installs_between=installs_between,
        deduplicates=True,
        architectures=architectures,
        not_on=not_on,
        between=("hopper", "blackwell"),
        group_sizes=group_sizes,
        domain_gpus=domain_gpus,
        rules=(
            "megatron-flex-dispatcher",
            "megatron-dispatcher-device",
            "megatron-dispatcher-reach",
            "megatron-dispatcher-ranks",
        ),
    )


DISPATCHERS = {
    "alltoall": TokenDispatcher(
        flag="--moe-token-dispatcher-type",
        value="alltoall",
        since="0.8.0",
        source=TRANSFORMER,
    ),
    "allgather": TokenDispatcher(
        flag="--moe-token-dispatcher-type",
        value="allgather",
        since="0.8.0",
        source=TRANSFORMER,
        rules=("megatron-allgather-dispatcher",),
    ),
    # Devices as in megatron/bridge/training/flex_dispatcher_backend.py of megatron-bridge 0.6.2. Group
    # sizes: DeepEP, deep_ep/buffers/legacy.py, get_dispatch_config, which fused_a2a.py asks.
    "deepep": _flex(
        "deepep",
        "0.12.0",
        planned=True,
        installs="DeepEP",
        installs_between="DeepEP built with NVSHMEM_DIR, for groups between nodes (RDMA by IBGDA)",
        not_on=("gb200", "gb300"),
        group_sizes=(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
        domain_gpus=8,
    ),
    # Its kernels copy by TMA, which Hopper brought (DeepEP's branch hybrid-ep, docs/README_Hybrid-EP.md
    # and hybrid_ep_backend.cuh). A build of one node ends with "rebuild with HYBRID_EP_MULTINODE flag".
    "hybridep": _flex(
        "hybridep",
        "0.16.0",
        planned=True,
        installs="HybridEP",
        installs_between="HybridEP built with HYBRID_EP_MULTINODE=1 and rdma-core 60 or USE_NIXL=1, "
        "for groups beyond one NVLink domain",
        architectures=("hopper", "blackwell"),
    ),
    "ncclep": _flex("ncclep", "", planned=False, installs="Transformer Engine with NCCL EP"),
}
"""By the plan's word for each."""


ARGUMENTS = "megatron/training/arguments.py"
PARALLEL = "megatron/core/model_parallel_config.py"
DATA_PARALLEL = "megatron/core/distributed/distributed_data_parallel_config.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
COMMON = "megatron/training/config/common_config.py"
OPTIMIZER = "megatron/core/optimizer/optimizer_config.py"

MEGATRON_LM = Stack(
    name="megatron-lm", maker="NVIDIA", written=r"(megatron-lm|megatron-core|megatron core)\b"
)

PYTORCH = Stack(name="pytorch", written=r"pytorch 3d\b", bound=False)
"""A training loop of its own over eager PyTorch, with Megatron's axes, where no stack of its own is known."""


def _module(name: str, since: str, *, planned: bool = True) -> Setting:
    return Setting(
        flag="--recompute-modules", value=name, since=since, source=TRANSFORMER, planned=planned
    )


def _context(
    value: str,
    *rules: str,
    default: bool = False,
    planned: bool = True,
    gathers: bool = False,
) -> ContextExchange:
    return ContextExchange(
        flag="--cp-comm-type",
        value=value,
        since="0.10.0",
        source=TRANSFORMER,
        default=default,
        planned=planned,
        gathers=gathers,
        rules=rules,
    )


def _attention(value: str, *, default: bool = False) -> Setting:
    return Setting(
        flag="--attention-backend",
        value=value,
        since="0.12.0",
        source=TRANSFORMER,
        default=default,
        planned=default,
    )


MEGATRON = Framework(
    name="megatron",
    title="Megatron-LM",
    package="megatron-core",
    version="0.19.2",
    stacks=(
        Stack(name="megatron", maker="NVIDIA"),
        Stack(name="megatron-2022", written=r"megatron-lm 2022\b"),
        Stack(name="megatron-bridge", maker="NVIDIA", written=r"megatron-bridge\b"),
        Stack(name="nemo-2024", maker="NVIDIA", written=r"nemo 24\.0[1-7]\b", bound=False),
        Stack(name="nemo", maker="NVIDIA", written=r"nemo\b", bound=False),
        MEGATRON_LM,
        Stack(name="aa-scaling", written=r"aa-scaling\b", bound=False),
        Stack(name="internevo", written=r"internevo\b", bound=False),
        Stack(name="nanotron", written=r"nanotron\b", bound=False),
        PYTORCH,
    ),
    measured_as=("megatron-lm", "megatron-bridge", "nemo"),
    axes={
        "tp": Setting(flag="--tensor-model-parallel-size", since="0.8.0", source=PARALLEL),
        "cp": Setting(flag="--context-parallel-size", since="0.8.0", source=PARALLEL),
        "pp": Setting(flag="--pipeline-model-parallel-size", since="0.8.0", source=PARALLEL),
        "dp": Setting(source=ARGUMENTS),
        "vpp": Setting(
            flag="--num-virtual-stages-per-pipeline-rank",
            since="0.12.0",
            source=ARGUMENTS,
            rules=("vpp-needs-pp", "interleaved-micro-batches"),
        ),
        "ep": Setting(flag="--expert-model-parallel-size", since="0.8.0", source=PARALLEL),
        "etp": Setting(
            flag="--expert-tensor-parallel-size",
            since="0.10.0",
            source=PARALLEL,
            rules=("megatron-expert-bias-needs-etp-1",),
        ),
    },
    sequence_parallel=Setting(
        flag="--sequence-parallel",
        since="0.8.0",
        source=PARALLEL,
        rules=("sequence-by-tp", "sequence-parallel-needs-tp", "megatron-moe-tp-needs-sp"),
    ),
    zero_stages={
        0: Setting(source=DATA_PARALLEL),
        1: Setting(flag="--use-distributed-optimizer", since="0.8.0", source=DATA_PARALLEL),
        2: Setting(
            flag="--data-parallel-sharding-strategy",
            value="optim_grads",
            since="0.12.0",
            source=DATA_PARALLEL,
            planned=False,
            rules=("megatron-zero-needs-pp-1", "megatron-zero-optimizer"),
        ),
        3: Setting(
            flag="--data-parallel-sharding-strategy",
            value="optim_grads_params",
            since="0.12.0",
            source=DATA_PARALLEL,
            planned=False,
            rules=("megatron-zero-needs-pp-1", "megatron-zero-optimizer"),
        ),
    },
    # Its combined 1F1B for experts is one of the two with other overlap.
    schedules={
        "1f1b": Setting(source=SCHEDULES, since="0.8.0"),
        "interleaved-1f1b": Setting(
            flag="--num-virtual-stages-per-pipeline-rank", since="0.12.0", source=ARGUMENTS
        ),
    },
    full_recompute=Setting(
        flag="--recompute-granularity", value="full", since="0.8.0", source=TRANSFORMER
    ),
    recompute_amount=Setting(flag="--recompute-num-layers", since="0.8.0", source=TRANSFORMER),
    recompute_modules={
        "layernorm": _module("layernorm", "0.12.0"),
        "moe_act": _module("moe_act", "0.12.0"),
        "mla_up_proj": _module("mla_up_proj", "0.12.0"),
        "mlp": _module("mlp", "0.12.0"),
        # Fused attention recomputes its products anyway.
        "core_attn": _module("core_attn", "0.12.0", planned=False),
        "moe": _module("moe", "0.12.0", planned=False),
        "shared_experts": _module("shared_experts", "0.14.0", planned=False),
        "gdn_norm_out": _module("gdn_norm_out", "", planned=False),
    },
    precisions={
        "bf16": Setting(flag="--bf16", since="0.8.0", source=ARGUMENTS),
        "fp16": Setting(flag="--fp16", since="0.8.0", source=ARGUMENTS),
        # Current scaling; delayed scaling, the default recipe, is among the numerics.
        "fp8": Setting(flag="--fp8-recipe", value="tensorwise", since="0.12.0", source=TRANSFORMER),
        "mxfp8": Setting(flag="--fp8-recipe", value="mxfp8", since="0.12.0", source=TRANSFORMER),
        "nvfp4": Setting(flag="--fp4-recipe", value="nvfp4", since="0.14.0", source=TRANSFORMER),
    },
    dispatchers=DISPATCHERS,
    overlaps={
        "dp": Setting(flag="--overlap-grad-reduce", since="0.8.0", source=DATA_PARALLEL),
        "tp": Setting(
            flag="--tp-comm-overlap",
            since="0.8.0",
            source=PARALLEL,
            installs="Transformer Engine's user buffers",
            rules=("megatron-tp-overlap",),
        ),
        # The flag turns it off.
        "pp": Setting(
            flag="--no-overlap-p2p-communication", since="0.8.0", source=ARGUMENTS, default=True
        ),
        "ep": Setting(
            flag="--overlap-moe-expert-parallel-comm",
            since="0.14.0",
            source=PARALLEL,
            rules=("megatron-expert-overlap",),
        ),
    },
    gradient_buckets=GradientBuckets(
        flag="--ddp-bucket-size", source=ARGUMENTS, zero_stages=(0, 1)
    ),
    context_exchanges={
        "p2p": _context("p2p", "megatron-context-windows", "megatron-context-sinks", default=True),
        "a2a": _context("a2a", "heads-by-tp-cp", "kv-heads-by-tp-cp"),
        "all_gather": _context("all_gather", "megatron-context-sinks", planned=False, gathers=True),
        # With --hierarchical-context-parallel-sizes.
        "a2a+p2p": _context("a2a+p2p", "megatron-hierarchical-context"),
    },
    cuda_graphs={
        "none": Setting(flag="--cuda-graph-impl", value="none", source=TRANSFORMER, default=True),
        # Of each layer's feed-forward part or router alone; with attention; of the whole step.
        "feed_forward": Setting(
            flag="--cuda-graph-modules", value="moe_router", source=TRANSFORMER, planned=False
        ),
        "partial": Setting(
            flag="--cuda-graph-modules",
            value="attn",
            source=TRANSFORMER,
            rules=("megatron-partial-graphs",),
        ),
        "full": Setting(
            flag="--cuda-graph-impl",
            value="full_iteration",
            source=TRANSFORMER,
            rules=("megatron-full-graph",),
        ),
    },
    offloads={
        "activations": Setting(
            flag="--offload-modules",
            since="0.16.0",
            source=TRANSFORMER,
            installs="cuda-python and pynvml",
            rules=(
                "megatron-offloaded-modules",
                "megatron-offload-recompute",
                "megatron-offload-up-projection",
            ),
        ),
    },
    # Any share can be had: steps of a quarter are what a plan tries.
    optimizer_offload=OptimizerOffload(
        flag="--optimizer-offload-fraction",
        since="0.12.0",
        source=OPTIMIZER,
        percents=(25, 50, 75, 100),
        zero_stages=(1,),
        rules=("megatron-offload-zero", "megatron-offload-adam", "megatron-offload-fp8"),
    ),
    shard_groups=ShardGroups(
        flag="--num-distributed-optimizer-instances",
        since="0.10.0",
        source=DATA_PARALLEL,
        zero_stages=(1, 2, 3),
        rules=("megatron-expert-shard-groups", "megatron-shard-groups-optimizer"),
    ),
    numerics={
        "bf16-grads": Setting(flag="--grad-reduce-in-bf16", source=ARGUMENTS),
        "bf16-moments": Setting(
            flag="--exp-avg-dtype",
            value="bf16",
            since="0.12.0",
            source=OPTIMIZER,
            installs="Transformer Engine's FusedAdam",
            rules=("megatron-narrow-states",),
        ),
        "fp8-params": Setting(
            flag="--fp8-param-gather",
            since="0.10.0",
            source=DATA_PARALLEL,
            rules=("megatron-narrow-states",),
        ),
        # Scales from the maxima of earlier steps in place of the tensor's own.
        "delayed-scaling": Setting(
            flag="--fp8-recipe",
            value="delayed",
            since="0.12.0",
            source=TRANSFORMER,
            rules=("megatron-delayed-scaling",),
        ),
        # Set by Megatron-Bridge alone (megatron/training/arguments.py: "no CLI argument exists").
        "fp8-attention": Setting(
            flag="mixed_precision.fp8_dot_product_attention",
            value="true",
            source="megatron/bridge/training/mixed_precision.py",
            installs="Megatron-Bridge",
        ),
        # Megatron-LM's arguments refuse it, "due to stability issues": Megatron-Bridge alone starts it.
        "te-loss": Setting(
            flag="model.cross_entropy_fusion_impl",
            value="te",
            source="megatron/bridge/perf_recipes/_common.py",
            installs="Megatron-Bridge",
        ),
    },
    compilation=None,
    eager_stack="",
    attention={
        "auto": _attention("auto", default=True),
        "flash": _attention("flash"),
        "fused": _attention("fused"),
        "unfused": _attention("unfused"),
        "local": _attention("local"),
    },
    linear_attention=Setting(
        flag="--experimental-attention-variant",
        value="gated_delta_net",
        source=TRANSFORMER,
        installs="flash-linear-attention",
        rules=("linear-heads-by-tp-cp",),
    ),
    # cuDNN's kernels as in megatron/bridge/perf_recipes/glm_moe_dsa of Megatron-Bridge.
    sparse_attention=Setting(
        flag="--experimental-attention-variant",
        value="dsa",
        source=TRANSFORMER,
        installs="FlashMLA, nvidia-cudnn-frontend[cutedsl] and fast-hadamard-transform",
        rules=("megatron-sparse-attention",),
    ),
    hybrid_layers=Setting(
        flag="--hybrid-layer-pattern",
        source=ARGUMENTS,
        since="0.17.0",
        installs="mamba-ssm and causal-conv1d",
        rules=("mamba-heads-by-tp-cp", "mamba-groups-by-tp-cp", "megatron-hybrid"),
    ),
    rank_orders={
        "tp-cp-ep-dp-pp": Setting(source=ARGUMENTS),
        "tp-cp-ep-pp-dp": Setting(flag="--use-tp-pp-dp-mapping", source=COMMON),
    },
    rules=(
        "megatron-zero-needs-pp-1",
        "megatron-zero-optimizer",
        "megatron-moe-tp-needs-sp",
        "megatron-expert-bias-needs-etp-1",
        "megatron-expert-overlap",
        "megatron-flex-dispatcher",
        "megatron-dispatcher-device",
        "megatron-dispatcher-reach",
        "megatron-dispatcher-ranks",
        "megatron-allgather-dispatcher",
        "megatron-partial-graphs",
        "megatron-full-graph",
        "megatron-narrow-states",
        "megatron-expert-shard-groups",
        "megatron-shard-groups-optimizer",
        "megatron-offload-zero",
        "megatron-offload-adam",
        "megatron-offload-fp8",
        "megatron-offloaded-modules",
        "megatron-offload-recompute",
        "megatron-offload-up-projection",
        "megatron-delayed-scaling",
        "megatron-tp-overlap",
        "megatron-context-windows",
        "megatron-context-sinks",
        "megatron-hierarchical-context",
        "megatron-hybrid",
        "megatron-sparse-attention",
    ),
)
"""Read in megatron-core 0.19.2; `since` in 0.8, 0.10, 0.12, 0.14 and 0.16."""
