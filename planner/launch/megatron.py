"""A plan as a Megatron-LM launch: arguments of pretrain_gpt.py, environment, hostfile and start script.

Flag names and rules were read in megatron-core 0.19.2 (`megatron.training.arguments`).
"""

from __future__ import annotations

from meshwright.costmodel.workload import HIERARCHICAL
from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import layer_needs
from meshwright.planner.launch.megatron_model import (
    MEGATRON_SAYS,
    linear_bias,
    megatron_shortfalls,
    model_flags,
)
from meshwright.planner.launch.writer import (
    Launch,
    Program,
    Start,
    Writer,
    flag_words,
    json_file,
    legal_launch,
    notes_of,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.launches.megatron import HYBRID_PATTERN
from meshwright.planner.runs.run_terms import LayoutDoc, layout_string, pattern_chunks

SHARDING_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""What Megatron FSDP calls ZeRO stages."""
FSDP_CHECKPOINTS = "fsdp_dtensor"
"""The only format of checkpoints that Megatron FSDP writes."""
Flags = dict[str, object]
"""Values by flag, as `flag_words` writes them."""

_PRECISIONS: dict[str, Flags] = {
    "bf16": {"--bf16": True},
    "fp16": {"--fp16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
_QUANTIZED = ("fp8", "mxfp8", "nvfp4")
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
    """
    inputs = launch.inputs
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
    flags: Flags = {"--use-mcore-models": True}
    flags |= model_flags(inputs.model, inputs.seq_len)
    flags |= _degree_flags(launch)
    flags |= _pipeline_flags(launch)
    flags |= _expert_flags(launch)
    flags |= execution_flags(launch)
    flags["--micro-batch-size"] = launch.layout.micro_batch
    flags["--global-batch-size"] = inputs.global_batch
    flags |= recompute_flags(launch.layout)
    flags |= _PRECISIONS[inputs.precision]
    if inputs.precision == "fp8" and launch.execution.fp8_recipe is not None:
        flags["--fp8-recipe"] = launch.execution.fp8_recipe
    # A check would make the host wait inside the graph.
    flags["--no-check-for-nan-in-loss-and-grad"] = launch.execution.cuda_graph == "full"
    flags |= _optimizer_flags(launch)
    return flag_words(flags)


def megatron_env(launch: Launch) -> dict[str, str]:
    """Environment variables that the plan needs.

    Before Blackwell, tensor and context parallelism rely on kernels starting in the order they are issued,
    which one hardware queue brings about; FSDP and the expert overlap need several.
    """
    layout, variables = launch.layout, _graph_env(launch) | _offload_env(launch)
    blackwell = launch.inputs.cluster.device.architecture == "blackwell"
    if layout.zero_stage >= 2:
        return variables
    if launch.execution.ep_overlap:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **variables}
    if (layout.tp > 1 or layout.cp > 1) and not blackwell:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    return variables


def _graph_env(launch: Launch) -> dict[str, str]:
    """What the fused grouped MLP of a graph of the whole step is switched on by."""
    captured = launch.execution.cuda_graph == "full" and launch.inputs.model.moe is not None
    return {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"} if captured else {}


def _offload_env(launch: Launch) -> dict[str, str]:
    """What megatron/training/arguments.py asks for beside offloading, so that weights stay on the GPU."""
    offloads = launch.execution.offload_modules != "none"
    return {"NVTE_CPU_OFFLOAD_V1": "1"} if offloads else {}


def megatron_start(launch: Launch) -> Start:
    """pretrain_gpt.py, or pretrain_hybrid.py for a pattern of layers, with the plan's arguments.

    Data and tokenizer come from the user's environment.
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


def recompute_flags(layout: LayoutDoc) -> Flags:
    """Flags of a layout's recomputation; of a full one, no more layers than its largest chunk has."""
    if layout.recompute == "full" and layout.recompute_layers > 0:
        largest = max(max(rank) for rank in layout.stages)
        return {
            "--recompute-granularity": "full",
            "--recompute-method": "block",
            "--recompute-num-layers": min(layout.recompute_layers, largest),
        }
    if layout.recompute == "selective" and layout.recompute_modules:
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": layout.recompute_modules,
        }
    return {}


MEGATRON_WRITER = Writer(framework=MEGATRON, start=megatron_start)


def _degree_flags(launch: Launch) -> Flags:
    layout = launch.layout
    flags: Flags = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
        "--sequence-parallel": layout.sequence_parallel,
    }
    if launch.placed.pipeline_before_data:
        flags["--use-tp-pp-dp-mapping"] = True
        if launch.inputs.model.moe is None and layout.cp > 1:
            # Megatron builds expert groups for dense models too, and wants as many replicas as dense groups.
            flags["--expert-tensor-parallel-size"] = layout.tp * layout.cp
    return flags


def _pipeline_flags(launch: Launch) -> Flags:
    layout, pattern = launch.layout, launch.inputs.model.hybrid_pattern
    if pattern is not None:
        return {HYBRID_PATTERN: pattern_chunks(pattern, layout.stages)} | _p2p_flags(launch)
    if layout.pp == 1:
        return {}
    flags: Flags = {}
    chunk_sizes = {count for rank in layout.stages for count in rank}
    if len(chunk_sizes) > 1:
        split = layout_string(layout.stages, launch.inputs.model.mtp_layers)
        flags["--pipeline-model-parallel-layout"] = split
    elif layout.vpp > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = layout.vpp
    return flags | _p2p_flags(launch)


def _p2p_flags(launch: Launch) -> Flags:
    """Megatron overlaps in the interleaved schedule of more than two stages, unless told not to."""
    overlaps_alone = launch.layout.vpp > 1 and launch.layout.pp > 2
    return {"--no-overlap-p2p-communication": overlaps_alone and not launch.execution.pp_overlap}


def _expert_flags(launch: Launch) -> Flags:
    layout, inputs = launch.layout, launch.inputs
    if inputs.model.moe is None:
        return {}
    flags: Flags = {
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,
    }
    # Tokens per expert are padded to the tile that the format multiplies.
    flags["--moe-router-padding-for-quantization"] = inputs.precision in _QUANTIZED
    return flags


def execution_flags(launch: Launch) -> Flags:
    """Flags of the execution choices: overlaps, dispatcher, CUDA graphs, context parallelism."""
    execution, model = launch.execution, launch.inputs.model
    flags: Flags = {
        # The tensor-parallel overlap of Transformer Engine gathers and scatters along the sequence.
        "--tp-comm-overlap": launch.layout.sequence_parallel and execution.tp_overlap,
    }
    if execution.cp_comm != "p2p" and launch.layout.cp > 1:
        flags["--cp-comm-type"] = execution.cp_comm
        if execution.cp_comm == HIERARCHICAL:
            flags["--hierarchical-context-parallel-sizes"] = launch.context_sizes
    flags |= _graph_flags(launch)
    if execution.offload_modules != "none":
        flags["--fine-grained-activation-offloading"] = True
        flags["--offload-modules"] = tuple(execution.offload_modules.split("+"))
    if model.moe is not None:
        backend = execution.moe_dispatch
        plain = backend in ("alltoall", "allgather")
        flags["--moe-token-dispatcher-type"] = backend if plain else "flex"
        if not plain:
            flags["--moe-flex-dispatcher-backend"] = backend
        flags["--overlap-moe-expert-parallel-comm"] = execution.ep_overlap
    return flags


def _graph_flags(launch: Launch) -> Flags:
    """Flags of CUDA graphs. Experts in a graph of the whole step have buffers for a budget of tokens."""
    scope = launch.execution.cuda_graph
    if scope == "partial":
        return {
            "--cuda-graph-impl": "transformer_engine",
            "--cuda-graph-modules": _graph_modules(launch),
        }
    if scope != "full":
        return {}
    flags: Flags = {"--cuda-graph-impl": "full_iteration"}
    if launch.inputs.model.moe is not None:
        flags["--use-transformer-engine-op-fuser"] = True
        flags["--moe-expert-rank-capacity-factor"] = _expert_budget(launch)
        flags["--moe-paged-stash"] = True
    return flags


def _expert_budget(launch: Launch) -> float:
    """Tokens that the experts of a rank have buffers for, over the even share: 10 % over measured loads."""
    measured = [load for _, load in launch.inputs.expert_imbalance_by_ep]
    return max(_EXPERT_BUDGET, round(1.1 * max(measured, default=1.0), 2))


def _graph_modules(launch: Launch) -> tuple[str, ...]:
    """What partial CUDA graphs capture. An all-to-all waits for its counts where tokens are padded."""
    inputs = launch.inputs
    blocks = inputs.model.blocks
    mamba = ("mamba",) if blocks.mamba else ()
    if inputs.model.moe is None:
        return (*mamba, "attn", "mlp")
    waits = launch.execution.moe_dispatch == "alltoall" and inputs.precision in _QUANTIZED
    modules = (*mamba, "attn", "moe_router")
    return modules if waits else (*modules, "moe_preprocess")


def _optimizer_flags(launch: Launch) -> Flags:
    layout, optimizer = launch.layout, launch.inputs.optimizer
    sharded = layout.zero_stage >= 1
    flags: Flags = {"--optimizer": optimizer, "--use-distributed-optimizer": sharded}
    flags |= _numeric_flags(launch)
    if layout.zero_stage >= 2:
        flags["--use-megatron-fsdp"] = True
        flags["--data-parallel-sharding-strategy"] = SHARDING_STRATEGIES[layout.zero_stage]
        flags["--ckpt-format"] = FSDP_CHECKPOINTS
        flags["--no-gradient-accumulation-fusion"] = True
    if layout.shard_groups > 1:
        flags["--num-distributed-optimizer-instances"] = layout.shard_groups
    if layout.optimizer_offload > 0:
        flags["--optimizer-cpu-offload"] = True
        flags["--optimizer-offload-fraction"] = layout.optimizer_offload / 100
        flags["--overlap-cpu-optimizer-d2h-h2d"] = True
        flags["--use-precision-aware-optimizer"] = True
    overlaps = launch.execution.dp_overlap
    flags["--overlap-grad-reduce"] = overlaps
    if launch.execution.bucket_mb is not None:
        flags["--ddp-bucket-size"] = launch.bucket_parameters
    # Megatron's other optimizers gather parameters by layer, on their own.
    flags["--overlap-param-gather"] = overlaps and sharded and optimizer != "muon"
    return flags


def _numeric_flags(launch: Launch) -> Flags:
    """Flags of the types of gradients, moments and parameters."""
    execution, precision = launch.execution, launch.inputs.precision
    flags: Flags = {"--grad-reduce-in-bf16": execution.gradient_dtype == "bf16"}
    if execution.moment_dtype == "bf16":
        flags["--use-precision-aware-optimizer"] = True
        flags["--exp-avg-dtype"] = "bf16"
        flags["--exp-avg-sq-dtype"] = "bf16"
    if execution.fp8_params:
        flags["--fp4-param-gather" if precision == "nvfp4" else "--fp8-param-gather"] = True
        # MXFP8 is gathered at 16 bits, in the place of the gradients.
        flags["--reuse-grad-buf-for-mxfp8-param-ag"] = precision == "mxfp8"
    return flags


# A plan as overrides of a Megatron-Bridge recipe: `model.*`, `train.*`, `ddp.*` in Hydra's notation.
#
# Names were read in megatron-bridge 0.6.2.


_SIXTEEN_BIT = {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}
_NARROW: dict[str, dict[str, object]] = {
    "fp8": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}


def bridge_overrides(plan: Plan) -> list[str]:
    """Overrides for a recipe of the same model. Raises InfeasibleError if Megatron or Bridge would refuse it.

    The architecture is the recipe's own: only what the plan decided is set.
    """
    launch = legal_launch(plan, MEGATRON)
    layout, inputs = launch.layout, launch.inputs
    sharded = layout.zero_stage >= 1
    values: dict[str, object] = {
        "model.tensor_model_parallel_size": layout.tp,
        "model.pipeline_model_parallel_size": layout.pp,
        "model.context_parallel_size": layout.cp,
        "model.sequence_parallel": layout.sequence_parallel,
        **_pipeline(launch),
        "model.seq_length": inputs.seq_len,
        "dataset.seq_length": inputs.seq_len,
        "train.micro_batch_size": layout.micro_batch,
        "train.global_batch_size": inputs.global_batch,
        "ddp.use_distributed_optimizer": sharded,
        "optimizer.use_distributed_optimizer": sharded,
        "ddp.overlap_grad_reduce": launch.execution.dp_overlap,
        "ddp.overlap_param_gather": launch.execution.dp_overlap and sharded,
        "ddp.num_distributed_optimizer_instances": layout.shard_groups,
    }
    if inputs.model.moe is not None:
        values["model.expert_model_parallel_size"] = layout.ep
        values["model.expert_tensor_parallel_size"] = layout.etp
    values |= _sharding_values(launch)
    if layout.optimizer_offload > 0:
        values["optimizer.optimizer_cpu_offload"] = True
        values["optimizer.optimizer_offload_fraction"] = layout.optimizer_offload / 100
        values["optimizer.overlap_cpu_optimizer_d2h_h2d"] = True
        values["optimizer.use_precision_aware_optimizer"] = True
    values |= _overlap_values(launch)
    values |= _numeric_values(launch)
    values |= _of_model(recompute_flags(layout))
    values |= _of_model(execution_flags(launch))
    if launch.execution.cuda_graph == "full":
        values["rerun_state_machine.check_for_nan_in_loss"] = False
        values["ddp.check_for_nan_in_grad"] = False
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def bridge_files(plan: Plan) -> dict[str, str]:
    """bridge_overrides.json: a list of overrides for the recipe's command line."""
    return {"bridge_overrides.json": json_file(bridge_overrides(plan))}


def _sharding_values(launch: Launch) -> dict[str, object]:
    """ZeRO 2 and 3 are Megatron FSDP's (docs/training/megatron-fsdp.md, "Stable Requirements")."""
    if launch.layout.zero_stage < 2:
        return {}
    return {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": SHARDING_STRATEGIES[launch.layout.zero_stage],
        "checkpoint.ckpt_format": FSDP_CHECKPOINTS,
        "model.gradient_accumulation_fusion": False,
    }


def _overlap_values(launch: Launch) -> dict[str, object]:
    """The overlaps once more, in the section that overrides those of model and ddp where a recipe has it.

    megatron/bridge/training/comm_overlap.py, _apply_cfgs: what it does not name is off for tensor and expert
    parallelism and on for data parallelism, whatever `model` and `ddp` say, and gradients are reduced 128 Mi
    at a time.
    """
    execution, sharded = launch.execution, launch.layout.zero_stage >= 1
    buckets = {}
    if execution.dp_overlap:
        size = launch.bucket_parameters
        buckets = {"ddp.bucket_size": size, "comm_overlap.bucket_size": size}
    return {
        **buckets,
        "comm_overlap.tp_comm_overlap": launch.layout.sequence_parallel and execution.tp_overlap,
        "comm_overlap.overlap_moe_expert_parallel_comm": execution.ep_overlap,
        "comm_overlap.overlap_grad_reduce": execution.dp_overlap,
        "comm_overlap.overlap_param_gather": execution.dp_overlap and sharded,
    }


def _numeric_values(launch: Launch) -> dict[str, object]:
    """Precision, types of gradients, moments and parameters, and the loss.

    Bridge's named precisions fix the types of gradients and parameters. Where the plan has others, the
    fields of the precision are set: the recipe must hold it as a configuration, as performance recipes do.
    """
    execution, precision = launch.execution, launch.inputs.precision
    values: dict[str, object] = {
        "model.cross_entropy_fusion_impl": "te" if execution.te_loss else "native",
    }
    fields: dict[str, object] = dict(_NARROW.get(precision, {}))
    if fields:
        four_bit = precision == "nvfp4"
        fields["fp8_param_gather"] = execution.fp8_params and not four_bit
        fields["fp4_param_gather"] = execution.fp8_params and four_bit
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = execution.fp8_params and precision == "mxfp8"
        fields["fp8_dot_product_attention"] = execution.fp8_attention
        fields["first_last_layers_bf16"] = False
    if precision == "fp8" and execution.fp8_recipe is not None:
        fields["fp8_recipe"] = execution.fp8_recipe
    if fields or execution.gradient_dtype == "bf16":
        fields["grad_reduce_in_fp32"] = execution.gradient_dtype != "bf16"
        values |= {f"mixed_precision.{name}": value for name, value in fields.items()}
    else:
        values["mixed_precision"] = _SIXTEEN_BIT[precision]
    if execution.moment_dtype == "bf16":
        values["optimizer.use_precision_aware_optimizer"] = True
        values["optimizer.exp_avg_dtype"] = "bf16"
        values["optimizer.exp_avg_sq_dtype"] = "bf16"
    return values


def _pipeline(launch: Launch) -> dict[str, object]:
    layout, pattern = launch.layout, launch.inputs.model.hybrid_pattern
    if layout.pp == 1:
        return {}
    if pattern is not None:
        if layout.vpp > 1:
            # megatron/bridge/models/hybrid/hybrid_provider.py, provide, asserts it.
            raise InfeasibleError(
                "Megatron-Bridge runs no virtual stages of hybrid models: launch the plan with --target "
                "megatron, or plan with --forbid interleaving."
            )
        return {"model.hybrid_layer_pattern": f"'{pattern_chunks(pattern, layout.stages)}'"}
    chunk_sizes = {count for rank in layout.stages for count in rank}
    if len(chunk_sizes) > 1:
        split = layout_string(layout.stages, launch.inputs.model.mtp_layers)
        return {"model.pipeline_model_parallel_layout": f"'{split}'"}
    if layout.vpp > 1:
        return {"model.virtual_pipeline_model_parallel_size": layout.vpp}
    return {}


def _of_model(flags: Flags) -> dict[str, object]:
    """Megatron's flags, as fields of the recipe's model."""
    return {f"model.{name[2:].replace('-', '_')}": value for name, value in flags.items()}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
