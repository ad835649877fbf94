"""Megatron-LM: flags of `megatron.training.arguments`, and fields of megatron-core that become flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.frameworks.record import (
    AdapterSetting,
    Argument,
    ContextExchange,
    EncoderSetting,
    Framework,
    GradientBuckets,
    OptimizerOffload,
    OptimizerSetting,
    QueuedSharding,
    ReferenceSetting,
    Setting,
    ShardGroups,
    Stack,
    StepKindSetting,
    TokenDispatcher,
)

# The arguments of pretrain_gpt.py that say a model and a run, in the order in which launch files have them.


ACTIVATIONS = ("swiglu", "geglu", "squared_relu")
"""Activations that have a switch; GELU is the default."""
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "alibi": "none", "none": "none"}
"""Values of `position` by the model's; ALiBi is not available."""
QUICK_GELU_ALPHA = 1.702
"""Of x sigmoid(alpha x), which `--quick-geglu` gates with (megatron/core/fusions/fused_bias_geglu.py)."""
LLAMA3_FACTOR = 8.0
"""What `--use-rope-scaling` scales by: `gpt_config_from_args` (megatron/training/argument_utils.py) drops
`--rope-scaling-factor`."""

DELTA_NET, SPARSE = "gated_delta_net", "dsa"
"""Variants of attention: Gated DeltaNet, and positions that an indexer chooses."""

MODEL_ARGUMENTS = (
    Argument("mcore_models", "--use-mcore-models", "switch"),
    Argument("layers", "--num-layers"),
    Argument("hidden", "--hidden-size"),
    Argument("ffn_hidden", "--ffn-hidden-size"),
    Argument("heads", "--num-attention-heads"),
    Argument("seq_len", "--seq-length", default=0),
    Argument("max_positions", "--max-position-embeddings", default=0),
    Argument("vocab", "--vocab-size", also=("--padded-vocab-size",)),
    Argument("vocab_multiple", "--make-vocab-size-divisible-by"),
    Argument("tied_embeddings", "--untie-embeddings-and-output-weights", "switch", True),
    Argument("head_dim", "--kv-channels", default=0),
    # Multi-head latent attention.
    Argument("latent", "--multi-latent-attention", "switch"),
    Argument("attention.q_lora_rank", "--q-lora-rank", default=0),
    Argument("attention.kv_lora_rank", "--kv-lora-rank", default=32),
    Argument("attention.qk_nope_head_dim", "--qk-head-dim", default=128),
    Argument("attention.qk_rope_head_dim", "--qk-pos-emb-head-dim", default=64),
    Argument("attention.v_head_dim", "--v-head-dim", default=128),
    # What chooses positions for it.
    Argument("attention.indexer.heads", "--dsa-indexer-n-heads"),
    Argument("attention.indexer.head_dim", "--dsa-indexer-head-dim"),
    Argument("attention.indexer.top_k", "--dsa-indexer-topk"),
    Argument("indexer_every", "--dsa-indexer-topk-freq", default=1),
    Argument("indexer_first", "--dsa-indexer-skip-topk-offset", default=0),
    Argument("attention_variant", "--experimental-attention-variant", "text"),
    Argument("indexer_kernels", "--dsa-kernel-backend", "text"),
    Argument("indexer_loss", "--dsa-indexer-loss-coeff", "number"),
    Argument("indexer_sparse_loss", "--dsa-indexer-use-sparse-loss", "switch"),
    Argument("rope_fusion", "--no-rope-fusion", "switch", True),
    Argument("grouped_queries", "--group-query-attention", "switch"),
    Argument("query_groups", "--num-query-groups", default=1),
    Argument("qk_norm", "--qk-layernorm", "switch"),
    Argument("weightless_qk_norm", "--qk-l2-norm", "switch"),
    Argument("attention_output_gate", "--attention-output-gate", "switch"),
    # Gated DeltaNet.
    Argument("linear_every", "--linear-attention-freq", "text", "1"),
    Argument("linear_attention.key_heads", "--linear-num-key-heads", default=16),
    Argument("linear_attention.value_heads", "--linear-num-value-heads", default=32),
    Argument("linear_attention.key_head_dim", "--linear-key-head-dim", default=128),
    Argument("linear_attention.value_head_dim", "--linear-value-head-dim", default=128),
    Argument("linear_attention.conv_kernel", "--linear-conv-kernel-dim", default=4),
    Argument("softmax", "--softmax-type", "text"),
    Argument("window", "--window-size", "text"),
    Argument("full_attention_every", "--window-attn-skip-freq", "text", "0"),
    Argument("norm", "--normalization", "text", "LayerNorm"),
    Argument("norm_epsilon", "--norm-epsilon", "number", 1e-5),
    Argument("norm_zero_centered", "--apply-layernorm-1p", "switch"),
    Argument("position", "--position-embedding-type", "text", POSITIONS["learned"]),
    Argument("swiglu", "--swiglu", "switch"),
    Argument("geglu", "--quick-geglu", "switch"),
    Argument("squared_relu", "--squared-relu", "switch"),
    Argument("glu_offset", "--glu-linear-offset", "number", 0, optional=True),
    Argument("glu_limit", "--activation-func-clamp-value", "number", 0),
    Argument("bias_gelu_fusion", "--no-bias-gelu-fusion", "switch", True),
    Argument("bias_swiglu_fusion", "--no-bias-swiglu-fusion", "switch", True),
    Argument("mlp_bias", "--disable-bias-linear", "switch", True),
    Argument("attention_bias", "--add-qkv-bias", "switch"),
    Argument("hidden_dropout", "--hidden-dropout", "number"),
    Argument("attention_dropout", "--attention-dropout", "number"),
    # Maximal update parametrization at its own width: no more than factors (transformer_config.py, use_mup).
    Argument("scales", "--use-mup", "switch"),
    Argument("embedding_scale", "--mup-embedding-mult", "number", 1, optional=True),
    Argument("output_scale", "--mup-output-mult", "number", 1, optional=True),
    Argument("scale_power", "--mup-attn-scale-power", "number", 1),
    Argument("scale_width", "--mup-base-head-dim", "number", 1),
    Argument("rope.base", "--rotary-base", "number", 10_000),
    Argument("rope.fraction", "--rotary-percent", "number", 1, optional=True),
    Argument("unturned", "--no-rope-freq", "text", "0"),
    Argument("rope_type", "--rope-type", "text"),
    Argument("rope.scaling.factor", "--rotary-scaling-factor", "number", 1),
    Argument("interpolation", "--rotary-seq-len-interpolation-factor", "number", 1),
    Argument("llama3_scaling", "--use-rope-scaling", "switch"),
    Argument("llama3_factor", "--rope-scaling-factor", "text"),
    Argument("mscale", "--mscale", "text", "1"),
    Argument("mscale_all_dim", "--mscale-all-dim", "number", 0),
    Argument(
        "rope.scaling.original_positions", "--yarn-original-max-position-embeddings", default=4096
    ),
    Argument("rope.scaling.beta_fast", "--yarn-beta-fast", "number", 32),
    Argument("rope.scaling.beta_slow", "--yarn-beta-slow", "number", 1),
    Argument("rope.scaling.whole_range", "--no-yarn-correction-range-round-to-int", "switch", True),
    Argument("moe.experts", "--num-experts", default=0),
    Argument("moe.top_k", "--moe-router-topk", default=2),
    Argument("moe.moe_ffn_hidden", "--moe-ffn-hidden-size"),
    Argument("grouped_gemm", "--moe-grouped-gemm", "switch"),
    Argument("permute_fusion", "--moe-permute-fusion", "switch"),
    Argument("router_dtype", "--moe-router-dtype", "text"),
    Argument("moe.every", "--moe-layer-freq", "text", "1"),
    Argument(
        "moe.shared_ffn_hidden", "--moe-shared-expert-intermediate-size", default=0, optional=True
    ),
    Argument("moe.shared_expert_gate", "--moe-shared-expert-gate", "switch"),
    Argument("moe.latent_size", "--moe-latent-size", default=0, optional=True),
    Argument("moe.router_groups", "--moe-router-num-groups", default=0),
    Argument("moe.router_groups_per_token", "--moe-router-group-topk"),
    Argument("moe.router_score", "--moe-router-score-function", "text", "softmax", optional=True),
    Argument("balancing_bias", "--moe-router-enable-expert-bias", "switch"),
    Argument("pre_softmax", "--moe-router-pre-softmax", "switch"),
    Argument(
        "moe.router_scaling_factor", "--moe-router-topk-scaling-factor", "number", 1, optional=True
    ),
    # The block of each layer, chunks of a pipeline apart by |, and Mamba-2. Without a number of heads they
    # are twice as wide as the model.
    Argument(
        "hybrid_pattern", "--hybrid-layer-pattern", "text", also=("--hybrid-override-pattern",)
    ),
    Argument("layer_specification", "--spec", "several"),
    Argument("mamba.state_dim", "--mamba-state-dim", default=128),
    Argument("mamba.head_dim", "--mamba-head-dim", default=64),
    Argument("mamba.groups", "--mamba-num-groups", default=8),
    Argument("mamba.heads", "--mamba-num-heads", default=0),
    Argument("mtp_layers", "--mtp-num-layers", default=0, optional=True),
    Argument("mtp_shared", "--mtp-use-repeated-layer", "switch"),
)
"""Defaults are Megatron's own. Names and defaults were read in `megatron.training.arguments`."""

RUN_ARGUMENTS = (
    Argument("tp", "--tensor-model-parallel-size", "count", 1),
    Argument("pp", "--pipeline-model-parallel-size", "count", 1),
    Argument("cp", "--context-parallel-size", "count", 1),
    Argument("sequence_parallel", "--sequence-parallel", "switch"),
    Argument("pipeline_before_data", "--use-tp-pp-dp-mapping", "switch"),
    Argument("layout", "--pipeline-model-parallel-layout", "text"),
    # The other name is that of ms-swift's field.
    Argument(
        "vpp",
        "--num-virtual-stages-per-pipeline-rank",
        default=0,
        also=("--virtual-pipeline-model-parallel-size",),
    ),
    Argument("overlap.pp", "--no-overlap-p2p-communication", "switch", True),
    Argument("overlaps_ends", "--overlap-p2p-communication-warmup-flush", "switch"),
    Argument("ep", "--expert-model-parallel-size", default=1),
    Argument("etp", "--expert-tensor-parallel-size"),
    Argument("padded_experts", "--moe-router-padding-for-quantization", "switch"),
    Argument("overlap.tp", "--tp-comm-overlap", "switch"),
    Argument("cp_comm", "--cp-comm-type", "several"),
    Argument("context_sizes", "--hierarchical-context-parallel-sizes", "several"),
    Argument("hybrid_context", "--hybrid-context-parallel", "switch"),
    Argument("rank_tokens", "--max-seqlen-per-dp-cp-rank", default=0),
    Argument("token_mean_loss", "--calculate-per-token-loss", "switch"),
    Argument("loss_fusion", "--cross-entropy-loss-fusion", "switch"),
    Argument("graph_kind", "--cuda-graph-impl", "text"),
    Argument("graph_modules", "--cuda-graph-modules", "several", also=("--cuda-graph-scope",)),
    Argument("op_fuser", "--use-transformer-engine-op-fuser", "switch"),
    Argument("expert_budget", "--moe-expert-rank-capacity-factor", "number"),
    Argument("paged_stash", "--moe-paged-stash", "switch"),
    Argument("offloads_activations", "--fine-grained-activation-offloading", "switch"),
    Argument("offload_modules", "--offload-modules", "several"),
    Argument("dispatcher", "--moe-token-dispatcher-type", "text", "allgather"),
    Argument("flex_backend", "--moe-flex-dispatcher-backend", "text", "deepep"),
    Argument("overlap.ep", "--overlap-moe-expert-parallel-comm", "switch"),
    Argument("micro_batch", "--micro-batch-size", default=1),
    Argument("global_batch", "--global-batch-size", default=0),
    Argument("recompute", "--recompute-granularity", "text"),
    Argument("recompute_method", "--recompute-method", "text"),
    Argument("recompute_layers", "--recompute-num-layers", default=0),
    Argument("recompute_modules", "--recompute-modules", "several"),
    Argument("bf16", "--bf16", "switch"),
    Argument("fp16", "--fp16", "switch"),
    Argument("fp8_format", "--fp8-format", "text"),
    Argument("fp8_recipe", "--fp8-recipe", "text"),
    Argument("fp4_format", "--fp4-format", "text"),
    Argument("fp4_recipe", "--fp4-recipe", "text"),
    Argument("checks_for_nan", "--no-check-for-nan-in-loss-and-grad", "switch", True),
    Argument("optimizer", "--optimizer", "text", "adam"),
    Argument("muon_pieces", "--muon-tp-mode", "text", "blockwise"),
    Argument("distributed_optimizer", "--use-distributed-optimizer", "switch"),
    Argument("narrow_sums", "--grad-reduce-in-bf16", "switch"),
    Argument("moment_dtype", "--exp-avg-dtype", "text", "fp32"),
    Argument("square_dtype", "--exp-avg-sq-dtype", "text", "fp32"),
    Argument("fp8_params", "--fp8-param-gather", "switch"),
    Argument("fp4_params", "--fp4-param-gather", "switch"),
    # MXFP8 is gathered at 16 bits, in the place of the gradients.
    Argument("gathers_over_gradients", "--reuse-grad-buf-for-mxfp8-param-ag", "switch"),
    Argument("fsdp", "--use-megatron-fsdp", "switch"),
    Argument("sharding", "--data-parallel-sharding-strategy", "text", "no_shard"),
    # Megatron-FSDP sums gradients in the type of the parameters, unless told another.
    Argument("fsdp_gradients", "--megatron-fsdp-main-grads-dtype", "text", "auto"),
    Argument("checkpoint_format", "--ckpt-format", "text"),
    Argument("gradient_fusion", "--no-gradient-accumulation-fusion", "switch", True),
    Argument("shard_groups", "--num-distributed-optimizer-instances", "count", 1, optional=True),
    Argument("optimizer_offload", "--optimizer-cpu-offload", "switch"),
    Argument("offloaded_share", "--optimizer-offload-fraction", "number", 1.0),
    Argument("overlaps_offload", "--overlap-cpu-optimizer-d2h-h2d", "switch"),
    Argument("precision_aware", "--use-precision-aware-optimizer", "switch"),
    Argument("overlap.dp", "--overlap-grad-reduce", "switch"),
    Argument("bucket_parameters", "--ddp-bucket-size", default=0),
    Argument("overlaps_gathers", "--overlap-param-gather", "switch"),
)
MEGATRON_ARGUMENTS = {row.word: row for row in (*MODEL_ARGUMENTS, *RUN_ARGUMENTS)}
_FLAGS = {word: row.flag for word, row in MEGATRON_ARGUMENTS.items()}

_BRIDGE_NAMES = {
    "vpp": "virtual_pipeline_model_parallel_size",
    "gradient_fusion": "gradient_accumulation_fusion",
    "bucket_parameters": "bucket_size",
    "overlaps_ends": "overlap_p2p_comm_warmup_flush",
    "loss": "cross_entropy_fusion_impl",
    "precision": "",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fp8_attention": "fp8_dot_product_attention",
    "wide_ends": "first_last_layers_bf16",
    "wide_sums": "grad_reduce_in_fp32",
    "expert_overlap": "overlap_moe_expert_parallel_comm",
}
"""Fields of Megatron-Bridge that are not called like a flag of Megatron-LM."""
_BRIDGE_SECTIONS = (
    ("model", "tp pp cp sequence_parallel hybrid_pattern layout vpp seq_len"),
    ("dataset", "seq_len"),
    ("train", "micro_batch global_batch"),
    ("ddp", "distributed_optimizer"),
    ("optimizer", "distributed_optimizer"),
    ("ddp", "overlap.dp overlaps_gathers shard_groups"),
    ("model", "ep etp"),
    ("dist", "fsdp"),
    ("ddp", "fsdp sharding"),
    ("checkpoint", "checkpoint_format"),
    ("model", "gradient_fusion"),
    ("optimizer", "optimizer optimizer_offload offloaded_share overlaps_offload precision_aware"),
    ("ddp", "bucket_parameters"),
    ("comm_overlap", "bucket_parameters overlap.tp overlap.ep overlap.dp overlaps_gathers"),
    ("model", "overlaps_ends loss_fusion loss"),
    ("mixed_precision", "precision fp8_format fp8_recipe fp4_format fp4_recipe"),
    ("mixed_precision", "fp8_params fp4_params gathers_over_gradients fp8_attention"),
    ("mixed_precision", "wide_ends wide_sums"),
    ("optimizer", "moment_dtype square_dtype"),
    ("model", "recompute recompute_method recompute_layers recompute_modules"),
    ("model", "overlap.tp cp_comm context_sizes graph_kind graph_modules op_fuser expert_budget"),
    ("model", "paged_stash offloads_activations offload_modules dispatcher flex_backend"),
    ("model", "expert_overlap"),
)


def _overrides() -> Iterator[tuple[str, str]]:
    for section, words in _BRIDGE_SECTIONS:
        for word in words.split():
            named = _BRIDGE_NAMES.get(word)
            field = _FLAGS[word][2:].replace("-", "_") if named is None else named
            yield f"{section}.{field}".removesuffix("."), word


BRIDGE_OVERRIDES = tuple(_overrides())
"""Overrides of a Megatron-Bridge recipe by what they say, in the order in which launch files have them.

Other fields of the recipe's model are called like Megatron-LM's flags. Those of `comm_overlap` win over those
of `ddp` and `model` (megatron/bridge/training/comm_overlap.py). Read in megatron-bridge 0.6.2."""


_UNSET = "null"
BRIDGE_RESETS = {
    "model.virtual_pipeline_model_parallel_size": _UNSET,
    "model.pipeline_model_parallel_layout": _UNSET,
    "model.num_layers_in_first_pipeline_stage": _UNSET,
    "model.num_layers_in_last_pipeline_stage": _UNSET,
    "model.account_for_embedding_in_pipeline_split": "false",
    "model.account_for_loss_in_pipeline_split": "false",
    "model.recompute_granularity": _UNSET,
    "model.recompute_method": _UNSET,
    "model.recompute_num_layers": _UNSET,
    "model.recompute_modules": _UNSET,
    "model.cuda_graph_scope": _UNSET,
    "model.cuda_graph_impl": "none",
    "model.cuda_graph_modules": _UNSET,
    "model.cp_comm_type": _UNSET,
    "model.hierarchical_context_parallel_sizes": _UNSET,
    "model.fine_grained_activation_offloading": "false",
    "model.offload_modules": _UNSET,
    "optimizer.optimizer_cpu_offload": "false",
}
"""What a plan that says nothing of a field does without, and a recipe may have: that of Qwen3-30B-A3B on H100
recomputes every layer, which a plan's overlap of the experts' all-to-all does not start beside
(megatron/bridge/recipes/qwen/h100/qwen3_moe.py; megatron/core/transformer/transformer_config.py)."""


_SWIFT_WORDS = (
    "tp pp cp sequence_parallel layout ep etp overlap.tp cp_comm loss_fusion dispatcher micro_batch "
    "global_batch recompute recompute_method recompute_layers recompute_modules bf16 fp16 fp8_format "
    "fp8_recipe fp4_format fp4_recipe optimizer distributed_optimizer moment_dtype square_dtype "
    "optimizer_offload offloaded_share precision_aware overlap.dp overlaps_gathers fp8_params fp4_params"
)
SWIFT_FIELDS = {word: _FLAGS[word][2:].replace("-", "_") for word in _SWIFT_WORDS.split()}
"""Fields of ms-swift's `megatron sft` by what they say, which are called like Megatron-LM's arguments."""
SWIFT_SWITCHES = {"overlap.pp": "overlap_p2p_comm", "rope_fusion": "apply_rope_fusion"}
"""Fields of its own, by what they say, for what Megatron-LM has a flag to switch off."""
SWIFT_EXTRAS = {
    "overlaps_ends": _BRIDGE_NAMES["overlaps_ends"],
    "padded_experts": _FLAGS["padded_experts"][2:].replace("-", "_"),
}
"""Fields of Megatron-Core's configuration of the model that it takes in `SWIFT_EXTRA` alone."""
SWIFT_EXTRA = "megatron_extra_kwargs"
"""What it hands on to Megatron-Core's configuration of the model, a mapping.

Read in ms-swift 4.6.0, swift/megatron/arguments/megatron_args.py and swift/megatron/model/utils.py."""


ADAPTER_RANK = "peft.dim"
ADAPTED_MODULES = "peft.target_modules"
SHARES_EXPERT_ADAPTERS = "peft.share_expert_adapters"
"""Overrides of a recipe whose `peft` is a LoRA configuration; Megatron-LM's own arguments have none."""
BRIDGE_MODULES = {
    "linear_qkv": "qkv_proj",
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "in_proj": "in_proj",
    "out_proj": "out_proj",
    "fc1_latent_proj": "fc1_latent_proj",
    "fc2_latent_proj": "fc2_latent_proj",
}
"""Modules of Megatron by the matrix that they hold (megatron/core/transformer/multi_latent_attention.py,
moe/moe_layer.py and ssm/mamba_mixer.py)."""


# How Megatron-LM sends tokens to their experts, and what DeepEP and HybridEP need for it.


ARGUMENTS = "megatron/training/arguments.py"
TRANSFORMER = "megatron/core/transformer/transformer_config.py"


def _said(word: str, source: str, since: str = "", value: str = "", **fields: Any) -> Setting:
    """A setting that an argument says."""
    flag = MEGATRON_ARGUMENTS[word].flag
    return Setting(flag=flag, source=source, since=since, value=value, **fields)


def _flex(backend: str, since: str = "", **fields: Any) -> TokenDispatcher:
    return TokenDispatcher(
        flag=_FLAGS["flex_backend"],
        value=backend,
        since=since,
        source=TRANSFORMER,
        deduplicates=True,
        between=("hopper", "blackwell"),
        rules=(
            "megatron-flex-dispatcher",
            "megatron-dispatcher-device",
            "megatron-dispatcher-reach",
            "megatron-dispatcher-ranks",
        ),
        **fields,
    )


_FLEX_DEVICES = ("ampere", "hopper", "blackwell")
DISPATCHERS = {
    "alltoall": TokenDispatcher(
        flag=_FLAGS["dispatcher"],
        value="alltoall",
        since="0.8.0",
        source=TRANSFORMER,
    ),
    "allgather": TokenDispatcher(
        flag=_FLAGS["dispatcher"],
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
        architectures=_FLEX_DEVICES,
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
        installs="HybridEP",
        installs_between="HybridEP built with HYBRID_EP_MULTINODE=1 and rdma-core 60 or USE_NIXL=1, "
        "for groups beyond one NVLink domain",
        architectures=("hopper", "blackwell"),
    ),
    "ncclep": _flex(
        "ncclep",
        planned=False,
        architectures=_FLEX_DEVICES,
        installs="Transformer Engine with NCCL EP",
    ),
}
"""By the plan's word for each."""


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
    return _said("recompute_modules", TRANSFORMER, since, name, planned=planned)


def _context(value: str, *rules: str, **fields: Any) -> ContextExchange:
    return ContextExchange(
        flag=_FLAGS["cp_comm"],
        value=value,
        since="0.10.0",
        source=TRANSFORMER,
        rules=("megatron-context-unfused", *rules),
        **fields,
    )


def _sharded(strategy: str) -> QueuedSharding:
    """Megatron-FSDP. Its queue is no less than 10^9 elements (fsdp/src/megatron_fsdp/megatron_fsdp.py)."""
    return QueuedSharding(
        flag=_FLAGS["sharding"],
        value=strategy,
        since="0.12.0",
        source=DATA_PARALLEL,
        allow="megatron-fsdp",
        queue_elements=1_000_000_000,
        rules=(
            "megatron-zero-needs-pp-1",
            "megatron-zero-optimizer",
            "megatron-zero-graphs",
            "megatron-zero-fp8-params",
            "megatron-zero-bridge",
        ),
    )


def _optimizer(name: str, source: str, since: str, **fields: Any) -> OptimizerSetting:
    """Gate and up projection are linear_fc1."""
    return OptimizerSetting(
        flag=_FLAGS["optimizer"], value=name, source=source, since=since, fused_gate=True, **fields
    )


def _emerging(name: str, since: str, **fields: Any) -> OptimizerSetting:
    """One of the package that Megatron keeps apart: Adam has what is no matrix of a layer.

    Each rank owns whole matrices (megatron/core/optimizer/layer_wise_optimizer.py).
    """
    return _optimizer(
        name,
        "megatron/core/optimizer/emerging_optimizers.py and megatron/core/optimizer/__init__.py",
        since,
        beside="adam",
        whole=True,
        installs="emerging-optimizers, from github.com/NVIDIA-NeMo/Emerging-Optimizers",
        rules=("megatron-emerging-precision", "megatron-emerging-expert-bias"),
        **fields,
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


_IMAGES_ELSEWHERE = (
    "pretrain_gpt.py of Megatron-LM builds no image encoder: set the plan's degrees in a recipe of "
    "Megatron-Bridge"
)
_FREEZES = "freeze_vision_model and freeze_vision_projection of the provider"
_BRIDGE = "megatron/bridge/models"


def _encoder(source: str, *rules: str, whole: bool = True) -> EncoderSetting:
    """An encoder of Megatron-Bridge: `whole` where transformers' own class is, else of Megatron's layers."""
    return EncoderSetting(
        source=f"{_BRIDGE}/{source}",
        tensor_parallel=not whole,
        context_parallel=not whole,
        recomputed=not whole,
        rules=rules,
        installs="megatron-bridge",
        freezes=_FREEZES,
        in_launch=_IMAGES_ELSEWHERE,
    )


_PREFERENCES_ELSEWHERE = (
    "scripts of Megatron-LM and Megatron-Bridge train on no preferences: launch the plan with --target "
    "ms-swift, or give its degrees, batch and recomputation to NeMo-RL, which runs Megatron-Core"
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
        Stack(name="nemo", maker="NVIDIA", written=r"nemo\b(?! automodel\b)", bound=False),
        MEGATRON_LM,
        Stack(name="aa-scaling", written=r"aa-scaling\b", bound=False),
        Stack(name="internevo", written=r"internevo\b", bound=False),
        Stack(name="paddle", written=r"paddle", bound=False),
        Stack(
            name="nanotron",
            written=r"nanotron\b",
            bound=False,
            # run_multinode.sh (huggingface/nanotron 77f54c10); rows of one node or stage have none.
            checks_pipelines_across_nodes=True,
        ),
        PYTORCH,
    ),
    measured_as=("megatron-lm", "megatron-bridge", "nemo"),
    axes={
        "tp": _said("tp", PARALLEL, "0.8.0"),
        "cp": _said("cp", PARALLEL, "0.8.0"),
        "pp": _said("pp", PARALLEL, "0.8.0"),
        "dp": Setting(source=ARGUMENTS),
        "vpp": _said(
            "vpp", ARGUMENTS, "0.12.0", rules=("vpp-needs-pp", "interleaved-micro-batches")
        ),
        "ep": _said("ep", PARALLEL, "0.8.0"),
        "etp": _said("etp", PARALLEL, "0.10.0", rules=("megatron-expert-bias-needs-etp-1",)),
    },
    sequence_parallel=_said(
        "sequence_parallel",
        PARALLEL,
        "0.8.0",
        rules=("sequence-by-tp", "sequence-parallel-needs-tp", "megatron-moe-tp-needs-sp"),
    ),
    zero_stages={
        0: Setting(source=DATA_PARALLEL),
        1: _said("distributed_optimizer", DATA_PARALLEL, "0.8.0"),
        2: _sharded("optim_grads"),
        3: _sharded("optim_grads_params"),
    },
    # Its combined 1F1B for experts is one of the two with other overlap.
    schedules={
        "1f1b": Setting(source=SCHEDULES, since="0.8.0"),
        "interleaved-1f1b": _said("vpp", ARGUMENTS, "0.12.0"),
    },
    full_recompute=_said("recompute", TRANSFORMER, "0.8.0", "full"),
    recompute_amount=_said("recompute_layers", TRANSFORMER, "0.8.0"),
    recompute_modules={
        "layernorm": _module("layernorm", "0.12.0"),
        "moe_act": _module("moe_act", "0.12.0"),
        "mla_up_proj": _module("mla_up_proj", "0.12.0"),
        "mlp": _module("mlp", "0.12.0"),
        # Fused attention recomputes its products anyway.
        "core_attn": _module("core_attn", "0.12.0", planned=False),
        "moe": _module("moe", "0.12.0"),
        "shared_experts": _module("shared_experts", "0.14.0", planned=False),
        "gdn_norm_out": _module("gdn_norm_out", "", planned=False),
    },
    precisions={
        "bf16": _said("bf16", ARGUMENTS, "0.8.0"),
        "fp16": _said("fp16", ARGUMENTS, "0.8.0"),
        # Current scaling; delayed scaling, the default recipe, is among the numerics.
        "fp8": _said("fp8_recipe", TRANSFORMER, "0.12.0", "tensorwise"),
        "mxfp8": _said("fp8_recipe", TRANSFORMER, "0.12.0", "mxfp8"),
        "nvfp4": _said("fp4_recipe", TRANSFORMER, "0.14.0", "nvfp4"),
    },
    optimizers={
        "adam": _optimizer("adam", OPTIMIZER, "0.8.0", default=True),
        "sgd": _optimizer("sgd", OPTIMIZER, "0.8.0"),
        "muon": _emerging("muon", "0.16.0"),
        # Weight decay 8, gradient and update 8, the weight 12, its 16 bits 6: emerging_optimizers/
        # scalar_optimizers/base.py, `step`, and update_functions/lion.py, which is compiled.
        "lion": _emerging("lion", "0.19.0", step_bytes=34.0),
    },
    dispatchers=DISPATCHERS,
    overlaps={
        "dp": _said("overlap.dp", DATA_PARALLEL, "0.8.0"),
        "tp": _said(
            "overlap.tp",
            PARALLEL,
            "0.8.0",
            installs="Transformer Engine's user buffers",
            rules=("megatron-tp-overlap",),
        ),
        # The flag turns it off.
        "pp": _said("overlap.pp", ARGUMENTS, "0.8.0", default=True),
        "ep": _said("overlap.ep", PARALLEL, "0.14.0", rules=("megatron-expert-overlap",)),
    },
    gradient_buckets=GradientBuckets(
        flag=_FLAGS["bucket_parameters"], source=ARGUMENTS, zero_stages=(0, 1)
    ),
    context_exchanges={
        "p2p": _context("p2p", "megatron-context-windows", "megatron-context-sinks", default=True),
        "a2a": _context("a2a", "heads-by-tp-cp", "kv-heads-by-tp-cp"),
        "all_gather": _context("all_gather", "megatron-context-sinks", planned=False, gathers=True),
        # With --hierarchical-context-parallel-sizes.
        "a2a+p2p": _context("a2a+p2p", "megatron-hierarchical-context"),
    },
    hybrid_context=_said(
        "hybrid_context",
        f"{PARALLEL} and {ARGUMENTS}",
        rules=(
            "megatron-dealt-pipeline",
            "megatron-dealt-sharding",
            "megatron-dealt-experts",
            "megatron-dealt-micro-batch",
            "megatron-dealt-replicas",
            "megatron-dealt-context",
            "megatron-dealt-padding",
            "megatron-dealt-layers",
            "megatron-dealt-execution",
            "megatron-dealt-precision",
        ),
    ),
    cuda_graphs={
        "none": _said("graph_kind", TRANSFORMER, value="none", default=True),
        # Of each layer's feed-forward part or router alone; with attention; of the whole step.
        "feed_forward": _said("graph_modules", TRANSFORMER, value="moe_router", planned=False),
        "partial": _said(
            "graph_modules", TRANSFORMER, value="attn", rules=("megatron-partial-graphs",)
        ),
        "full": _said(
            "graph_kind", TRANSFORMER, value="full_iteration", rules=("megatron-full-graph",)
        ),
    },
    offloads={
        "activations": _said(
            "offload_modules",
            TRANSFORMER,
            "0.16.0",
            installs="cuda-python and pynvml",
            rules=(
                "megatron-offloaded-modules",
                "megatron-offload-recompute",
                "megatron-offload-up-projection",
                "megatron-offload-experts",
            ),
        ),
    },
    # Any share can be had: steps of a quarter are what a plan tries.
    optimizer_offload=OptimizerOffload(
        flag=_FLAGS["offloaded_share"],
        since="0.12.0",
        source=OPTIMIZER,
        percents=(25, 50, 75, 100),
        zero_stages=(1,),
        rules=("megatron-offload-zero", "megatron-offload-adam", "megatron-offload-fp8"),
    ),
    shard_groups=ShardGroups(
        flag=_FLAGS["shard_groups"],
        since="0.10.0",
        source=DATA_PARALLEL,
        zero_stages=(1, 2, 3),
        rules=("megatron-expert-shard-groups", "megatron-shard-groups-optimizer"),
    ),
    numerics={
        "bf16-grads": _said("narrow_sums", ARGUMENTS),
        "bf16-moments": _said(
            "moment_dtype",
            OPTIMIZER,
            "0.12.0",
            "bf16",
            installs="Transformer Engine's FusedAdam",
            rules=("megatron-narrow-states",),
        ),
        "fp8-params": _said(
            "fp8_params", DATA_PARALLEL, "0.10.0", rules=("megatron-narrow-states",)
        ),
        # Scales from the maxima of earlier steps in place of the tensor's own.
        "delayed-scaling": _said(
            "fp8_recipe", TRANSFORMER, "0.12.0", "delayed", rules=("megatron-delayed-scaling",)
        ),
        # Set by Megatron-Bridge alone (megatron/training/arguments.py: "no CLI argument exists").
        "fp8-attention": Setting(
            flag=f"mixed_precision.{_BRIDGE_NAMES['fp8_attention']}",
            value="true",
            source="megatron/bridge/training/mixed_precision.py",
            installs="Megatron-Bridge",
        ),
        # Megatron-LM's arguments refuse it, "due to stability issues": Megatron-Bridge alone starts it.
        "te-loss": Setting(
            flag=f"model.{_BRIDGE_NAMES['loss']}",
            value="te",
            source="megatron/bridge/perf_recipes/_common.py",
            installs="Megatron-Bridge",
        ),
    },
    attention={
        "auto": _attention("auto", default=True),
        "flash": _attention("flash"),
        "fused": _attention("fused"),
        "unfused": _attention("unfused"),
        "local": _attention("local"),
    },
    linear_attention={
        "gated_delta_net": _said(
            "attention_variant",
            TRANSFORMER,
            value=DELTA_NET,
            installs="flash-linear-attention",
            rules=("linear-heads-by-tp-cp",),
        )
    },
    # cuDNN's kernels as in megatron/bridge/perf_recipes/glm_moe_dsa of Megatron-Bridge.
    sparse_attention=_said(
        "attention_variant",
        TRANSFORMER,
        value=SPARSE,
        installs="FlashMLA, nvidia-cudnn-frontend[cutedsl] and fast-hadamard-transform",
        rules=("megatron-sparse-attention",),
    ),
    hybrid_layers=_said(
        "hybrid_pattern",
        ARGUMENTS,
        "0.17.0",
        installs="mamba-ssm and causal-conv1d",
        rules=("mamba-heads-by-tp-cp", "mamba-groups-by-tp-cp", "megatron-hybrid"),
    ),
    # Attention takes `window_size` alone (core/extensions/transformer_engine.py, TEDotProductAttention), and
    # nothing sets the `chunk_size` of a mixer (core/ssm/mamba_mixer.py).
    slides_chunks=True,
    scan_positions=128,
    latent_experts=_said("moe.latent_size", ARGUMENTS, rules=("megatron-latent-experts",)),
    adapters={
        "lora": AdapterSetting(
            flag=ADAPTER_RANK,
            source="megatron/bridge/peft/lora.py",
            installs="megatron-bridge",
            fused=True,
        )
    },
    step_kinds={
        "sft": StepKindSetting(source="megatron/bridge/training/finetune.py"),
        "dpo": StepKindSetting(
            source="swift/megatron/trainers/dpo_trainer.py", in_launch=_PREFERENCES_ELSEWHERE
        ),
        "kto": StepKindSetting(
            source="swift/megatron/trainers/kto_trainer.py", in_launch=_PREFERENCES_ELSEWHERE
        ),
    },
    image_encoders={
        "qwen2_5_vl": _encoder("qwen_vl/modeling_qwen25_vl.py", "encoder-context"),
        "qwen3_vl": _encoder("qwen_vl/modelling_qwen3_vl/model.py", "encoder-heads", whole=False),
        "siglip": _encoder("gemma_vl/gemma3_vl_provider.py", "encoder-context"),
    },
    references={
        "resident": ReferenceSetting(source="swift/megatron/trainers/rlhf_mixin.py"),
        "offloaded": ReferenceSetting(
            source="nemo_rl/models/policy/workers/megatron_policy_worker.py", kinds=("dpo",)
        ),
    },
    rank_orders={
        "tp-cp-ep-dp-pp": Setting(source=ARGUMENTS),
        "tp-cp-ep-pp-dp": _said("pipeline_before_data", COMMON),
    },
    unfused_rope=("yarn",),
    own_rules=("megatron-mtp-positions",),
)
"""Read in megatron-core 0.19.2; `since` in 0.8, 0.10, 0.12, 0.14 and 0.16."""
