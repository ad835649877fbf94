"""A plan as a Megatron-LM launch: arguments of pretrain_gpt.py, environment, hostfile and start script.

Flag names and rules were read in megatron-core 0.19.2 (`megatron.training.arguments`).
"""

from __future__ import annotations

from meshwright.costmodel.workload import HIERARCHICAL
from meshwright.errors import InfeasibleError
from meshwright.frameworks.megatron import (
    ADAPTER_RANK,
    BRIDGE_OVERRIDES,
    MEGATRON,
    MEGATRON_ARGUMENTS,
)
from meshwright.frameworks.record import layer_needs
from meshwright.model_specs.adapters import EXPERTS, layer_matrices
from meshwright.planner.launch.megatron_model import (
    MEGATRON_SAYS,
    linear_bias,
    megatron_shortfalls,
    said_of_model,
)
from meshwright.planner.launch.writer import (
    Launch,
    Program,
    Start,
    Writer,
    flag_words,
    flags_of,
    json_file,
    legal_launch,
    notes_of,
    said_of_degrees,
)
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.run_terms import LayoutDoc, layout_string, pattern_chunks

SHARDING_STRATEGIES = {stage: MEGATRON.zero_stages[stage].value for stage in (2, 3)}
"""What Megatron FSDP calls ZeRO stages."""
FSDP_CHECKPOINTS = "fsdp_dtensor"
"""The only format of checkpoints that Megatron FSDP writes."""
Said = dict[str, object]
"""Values by the words of the record's arguments."""

_NARROW: dict[str, Said] = {
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}
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
    if inputs.adapters is not None:
        raise InfeasibleError(
            "Megatron-LM's arguments train every parameter, and the plan trains adapters: launch it with "
            "--target bridge."
        )
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
    said = said_of_model(inputs.model, inputs.seq_len) | said_of_launch(launch)
    if launch.placed.pipeline_before_data and inputs.model.moe is None and launch.layout.cp > 1:
        # Megatron builds expert groups for dense models too, and wants as many replicas as dense groups.
        said["etp"] = launch.layout.tp * launch.layout.cp
    said["bf16"] = inputs.precision != "fp16"
    if launch.execution.bucket_mb is None:
        said["bucket_parameters"] = None
    return flag_words(flags_of(MEGATRON_ARGUMENTS.values(), said))


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


MEGATRON_WRITER = Writer(framework=MEGATRON, start=megatron_start)


def said_of_launch(launch: Launch) -> Said:
    """What arguments say of a plan's layout, batch and execution, by their words."""
    layout, inputs, execution = launch.layout, launch.inputs, launch.execution
    sharded = layout.zero_stage >= 1
    # Megatron overlaps in the interleaved schedule of more than two stages, unless told not to.
    overlaps_alone = layout.vpp > 1 and layout.pp > 2
    experts = inputs.model.moe is not None
    said: Said = said_of_degrees(layout, experts=experts) | {
        "mcore_models": True,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_before_data": launch.placed.pipeline_before_data,
        **_pipeline(launch),
        "overlap.pp": execution.pp_overlap or not overlaps_alone,
        # The tensor-parallel overlap of Transformer Engine gathers and scatters along the sequence.
        "overlap.tp": layout.sequence_parallel and execution.tp_overlap,
        "seq_len": inputs.seq_len,
        "global_batch": inputs.global_batch,
        "optimizer": inputs.optimizer,
        # What is priced; later versions have another default.
        "muon_pieces": "blockwise" if inputs.optimizer == "muon" else None,
        "distributed_optimizer": sharded,
        "shard_groups": layout.shard_groups,
        "overlap.dp": execution.dp_overlap,
        "overlaps_gathers": execution.dp_overlap and sharded,
        "bucket_parameters": launch.bucket_parameters,
        **_recompute(layout),
        **_numbers(launch),
        **_graphs(launch),
        **_dealing(launch),
    }
    if execution.cp_comm != "p2p" and layout.cp > 1:
        said["cp_comm"] = execution.cp_comm
        if execution.cp_comm == HIERARCHICAL:
            said["context_sizes"] = launch.context_sizes
    if execution.offload_modules != "none":
        said["offloads_activations"] = True
        said["offload_modules"] = tuple(execution.offload_modules.split("+"))
    if experts:
        plain = execution.moe_dispatch in ("alltoall", "allgather")
        said |= {
            "overlap.ep": execution.ep_overlap,
            # Tokens per expert are padded to the tile that the format multiplies.
            "padded_experts": inputs.precision in _NARROW,
            "dispatcher": execution.moe_dispatch if plain else "flex",
            "flex_backend": None if plain else execution.moe_dispatch,
        }
    if layout.zero_stage >= 2:
        said |= {
            "fsdp": True,
            "sharding": SHARDING_STRATEGIES[layout.zero_stage],
            "fsdp_gradients": "bf16" if execution.gradient_dtype == "bf16" else "fp32",
            "checkpoint_format": FSDP_CHECKPOINTS,
            "gradient_fusion": False,
        }
    if layout.optimizer_offload > 0:
        said |= {
            "optimizer_offload": True,
            "offloaded_share": layout.optimizer_offload / 100,
            "overlaps_offload": True,
            "precision_aware": True,
        }
    return said


def _dealing(launch: Launch) -> Said:
    """Hybrid context parallelism, under which the longest sample, a whole pack, takes cp ranks."""
    inputs = launch.inputs
    if inputs.lengths is None or not inputs.lengths.dealt:
        return {}
    rank_tokens = inputs.seq_len // launch.layout.cp
    return {"hybrid_context": True, "rank_tokens": rank_tokens, "token_mean_loss": True}


def _recompute(layout: LayoutDoc) -> Said:
    """A layout's recomputation; of a full one, no more layers than its largest chunk has."""
    if layout.recompute == "full" and layout.recompute_layers > 0:
        layers = min(layout.recompute_layers, max(max(rank) for rank in layout.stages))
        return {"recompute": "full", "recompute_method": "block", "recompute_layers": layers}
    if layout.recompute == "selective" and layout.recompute_modules:
        return {"recompute": "selective", "recompute_modules": layout.recompute_modules}
    return {}


def _pipeline(launch: Launch) -> Said:
    layout, pattern = launch.layout, launch.inputs.model.hybrid_pattern
    if pattern is not None:
        return {"hybrid_pattern": pattern_chunks(pattern, layout.stages)}
    if layout.pp == 1:
        return {}
    if len({count for rank in layout.stages for count in rank}) > 1:
        return {"layout": layout_string(layout.stages, launch.inputs.model.mtp_layers)}
    return {"vpp": layout.vpp} if layout.vpp > 1 else {}


def _graphs(launch: Launch) -> Said:
    """CUDA graphs. Experts in a graph of the whole step have buffers for a budget of tokens."""
    scope = launch.execution.cuda_graph
    if scope == "partial":
        return {"graph_kind": "transformer_engine", "graph_modules": _graph_modules(launch)}
    if scope != "full":
        return {}
    # A check would make the host wait inside the graph.
    said: Said = {
        "graph_kind": MEGATRON.cuda_graphs[scope].value,
        "checks_for_nan": False,
    }
    if launch.inputs.model.moe is not None:
        said |= {"op_fuser": True, "expert_budget": _expert_budget(launch), "paged_stash": True}
    return said


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
    waits = launch.execution.moe_dispatch == "alltoall" and inputs.precision in _NARROW
    modules = (*mamba, "attn", "moe_router")
    return modules if waits else (*modules, "moe_preprocess")


def _numbers(launch: Launch) -> Said:
    """The precision, and the types of gradients, moments and parameters."""
    execution, precision = launch.execution, launch.inputs.precision
    four_bit, narrow = precision == "nvfp4", execution.gradient_dtype == "bf16"
    said: Said = {
        "fp16": precision == "fp16",
        "narrow_sums": narrow,
        "fp8_params": execution.fp8_params and not four_bit,
        "fp4_params": execution.fp8_params and four_bit,
        "gathers_over_gradients": execution.fp8_params and precision == "mxfp8",
        **_NARROW.get(precision, {}),
    }
    if precision == "fp8" and execution.fp8_recipe is not None:
        said["fp8_recipe"] = execution.fp8_recipe
    if execution.moment_dtype == "bf16":
        said |= {"precision_aware": True, "moment_dtype": "bf16", "square_dtype": "bf16"}
    return said


# A plan as overrides of a Megatron-Bridge recipe: `model.*`, `train.*`, `ddp.*` in Hydra's notation.


def bridge_overrides(plan: Plan) -> list[str]:
    """Overrides for a recipe of the same model. Raises InfeasibleError if Megatron or Bridge would refuse it.

    The architecture is the recipe's own: only what the plan decided is set.
    """
    launch = legal_launch(plan, MEGATRON)
    if launch.inputs.lengths is not None and launch.inputs.lengths.dealt:
        # megatron/bridge/training/gpt_step.py, get_batch, says is_hybrid_cp=False.
        raise InfeasibleError(
            "Megatron-Bridge deals no samples to ranks: launch the plan with --target megatron, or plan "
            "without --hybrid-cp."
        )
    if MEGATRON.optimizers[launch.inputs.optimizer].whole:
        raise InfeasibleError(
            f"Megatron-Bridge reduces gradients whole for {launch.inputs.optimizer}, which the plan's price "
            "does not have: launch it with --target megatron."
        )
    if launch.layout.zero_stage >= 2 and launch.execution.gradient_dtype != "bf16":
        raise InfeasibleError(
            "Overrides of Megatron-Bridge hold no torch types, so that Megatron-FSDP would add gradients up "
            "at 16 bits: launch the plan with --target megatron, or plan with --allow bf16-grads."
        )
    said = said_of_launch(launch) | _bridge_numbers(launch) | _bridge_pipeline(launch)
    said |= {"optimizer": None, "overlap.ep": launch.execution.ep_overlap}
    if launch.inputs.model.moe is not None:
        said["expert_overlap"] = launch.execution.ep_overlap
    if not launch.execution.dp_overlap:
        said["bucket_parameters"] = None
    values = {name: said[word] for name, word in BRIDGE_OVERRIDES if said.get(word) is not None}
    values |= _bridge_adapters(launch.inputs)
    if launch.execution.cuda_graph == "full":
        values["rerun_state_machine.check_for_nan_in_loss"] = False
        values["ddp.check_for_nan_in_grad"] = False
    return [f"{name}={_shown(value)}" for name, value in values.items()]


def bridge_files(plan: Plan) -> dict[str, str]:
    """bridge_overrides.json: a list of overrides for the recipe's command line."""
    return {"bridge_overrides.json": json_file(bridge_overrides(plan))}


def _bridge_numbers(launch: Launch) -> Said:
    """Precision and loss, as Bridge says them.

    Its named precisions fix the types of gradients and parameters. Where the plan has others, the fields of
    the precision are set: the recipe must hold it as a configuration, as performance recipes do.
    """
    execution, precision = launch.execution, launch.inputs.precision
    narrow_sums, said = execution.gradient_dtype == "bf16", Said(loss="native")
    if execution.te_loss:
        said["loss"] = MEGATRON.numerics["te-loss"].value
    if precision in _NARROW:
        said |= {"fp8_attention": execution.fp8_attention, "wide_ends": False}
    else:
        said |= {"fp8_params": None, "fp4_params": None, "gathers_over_gradients": None}
    if precision not in _NARROW and not narrow_sums:
        return said | {"precision": f"{precision}_mixed"}
    return said | {"wide_sums": not narrow_sums}


_BRIDGE_MODULES = {
    "linear_qkv": "qkv_proj",
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "in_proj": "in_proj",
    "out_proj": "out_proj",
}
"""Modules of Megatron by the matrix that they hold (megatron/core/transformer/multi_latent_attention.py and
ssm/mamba_mixer.py)."""


def _bridge_adapters(inputs: PlanInputs) -> dict[str, object]:
    """Fields of the recipe's `peft`, a LoRA configuration: width and modules.

    Modules are found by their names, and a name that finds none is an error (megatron/bridge/peft/
    module_matcher.py, match). Feed-forwards, experts and shared experts name their modules alike: where some
    of them have no adapter, the names of the others say what they stand in.
    """
    adapters, model = inputs.adapters, inputs.model
    if adapters is None:
        return {}
    have = {matrix.name for matrix in layer_matrices(model)}
    if model.attention is None:
        have -= {"q_proj"}  # There it is a part of linear_qkv.
    modules = [
        name for name, matrix in _BRIDGE_MODULES.items() if matrix in have and adapters.has(matrix)
    ]
    said = {matrix for name, matrix in _BRIDGE_MODULES.items() if name in modules}
    for name, matrix in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        if adapters.has(matrix) and (model.moe is None or adapters.has(EXPERTS)):
            modules.append(name)
        elif adapters.has(matrix):
            modules += [f"*.mlp.{name}"] if model.has_dense_feed_forward else []
            modules += [f"*.shared_experts.{name}"] if model.moe and model.moe.shared_width else []
        elif adapters.has(EXPERTS):
            modules.append(f"*.experts.{name}")
        said |= {matrix}
    of_model = {matrix.name for matrix in layer_matrices(model)}
    apart = sorted({*adapters.matrices} & of_model - said)
    if apart:
        raise InfeasibleError(
            f"Megatron-Bridge's LoRA has no adapter beside {', '.join(apart)} alone: queries, keys and "
            "values share one, gate and up projection another: give --lora-targets linear_qkv,linear_fc1."
        )
    values: dict[str, object] = {
        ADAPTER_RANK: adapters.rank,
        "peft.target_modules": tuple(modules),
    }
    if adapters.has(EXPERTS):
        values["peft.share_expert_adapters"] = False
    return values


def _bridge_pipeline(launch: Launch) -> Said:
    """Layers of the stages between quotes, which Hydra asks for around its own signs."""
    said = _pipeline(launch)
    if "hybrid_pattern" in said and launch.layout.pp == 1:
        return {"hybrid_pattern": None}
    if "hybrid_pattern" in said and launch.layout.vpp > 1:
        # megatron/bridge/models/hybrid/hybrid_provider.py, provide, asserts it.
        raise InfeasibleError(
            "Megatron-Bridge runs no virtual stages of hybrid models: launch the plan with --target "
            "megatron, or plan with --forbid interleaving."
        )
    return {word: f"'{text}'" for word, text in said.items() if word != "vpp"}


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
