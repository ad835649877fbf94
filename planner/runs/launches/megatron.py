"""A command line of Megatron-LM's or Megatron-DeepSpeed's pretrain_gpt.py as a run."""

from __future__ import annotations

from typing import Any, get_args

from meshwright.costmodel.execution_names import DISPATCHERS
from meshwright.costmodel.workload import Fp8Recipe
from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED, MEGATRON_DEEPSPEED
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import Axis
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.runs.context_groups import megatron_exchange
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.megatron_model import (
    GPT2_VOCAB,
    hybrid_pattern,
    megatron_model,
)
from meshwright.planner.runs.offloaded import offloaded_modules
from meshwright.planner.runs.pipeline_notation import layers_of_layout
from meshwright.planner.runs.run_terms import cuda_graph_kind

_DEGREES: tuple[Axis, ...] = ("tp", "pp", "cp")
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages by Megatron-FSDP's sharding strategy."""
_OPTIMIZER_INSTANCES = "--num-distributed-optimizer-instances"
_LAYOUT = "--pipeline-model-parallel-layout"

_DEEPSPEED_FLASH = (
    "--use-flash-attn",
    "--use-flash-attn-v1",
    "--use-flash-attn-v2",
    "--use-flash-attn-triton",
)
"""Megatron-DeepSpeed's switches of fused attention, off by default (4efb479, megatron/arguments.py)."""

_CPU_OPTIMIZER = "--cpu-optimizer"
"""Megatron-DeepSpeed's switch of an offloaded optimizer (4efb479, megatron/optimizer/__init__.py)."""

_HARMLESS_NAMES = """
use-mcore-models bf16 fp16 mock-data data-path split tokenizer-type tokenizer-model vocab-file
merge-file train-iters train-samples lr min-lr lr-decay-style lr-warmup-iters lr-warmup-fraction
lr-decay-iters weight-decay clip-grad adam-beta1 adam-beta2 adam-eps init-method-std seed
log-interval save load save-interval eval-interval eval-iters tensorboard-dir wandb-project
wandb-exp-name distributed-backend distributed-timeout-minutes use-flash-attn attention-backend
transformer-impl attention-dropout hidden-dropout no-load-optim no-load-rng ckpt-format
log-throughput exit-duration-in-mins no-check-for-nan-in-loss-and-grad use-transformer-engine-op-fuser
moe-expert-rank-capacity-factor moe-paged-stash
make-vocab-size-divisible-by data-cache-path num-workers deepspeed deepspeed_config nnodes
nproc-per-node nproc_per_node node-rank node_rank master-addr master_addr master-port master_port
rdzv-backend rdzv-endpoint no-gradient-accumulation-fusion moe-permute-fusion moe-grouped-gemm
moe-router-dtype moe-aux-loss-coeff moe-router-load-balancing-type attention-softmax-in-fp32
no-masked-softmax-fusion cross-entropy-loss-fusion no-bias-swiglu-fusion
no-rope-fusion kill-on-bad-exit distribution nodes ntasks ntasks-per-node gpus-per-node spec
dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss
"""
"""Flags of Megatron, torchrun and srun that leave a step's time as it is, or that all readers here assume."""
_HARMLESS = frozenset(f"--{name}" for name in _HARMLESS_NAMES.split())


def from_megatron(line: CommandLine, known: ModelSpec | None = None) -> LaunchRun:
    """The run of a Megatron command line; of a `known` model its flags say nothing.

    Raises InputError without sequence length or the sizes of the model, and for values of the wrong kind.
    """
    deepspeed = line.has("--deepspeed") or line.has("--deepspeed_config")
    flash_flags = [flag for flag in _DEEPSPEED_FLASH if line.has(flag)]
    deepspeed_stack = DEEPSPEED if flash_flags else MEGATRON_DEEPSPEED
    model = megatron_model(line) if known is None else known.model_dump(exclude_none=True)
    settings: dict[str, Any] = {
        "seq_len": line.integer("--seq-length", 0),
        "micro_batch": line.integer("--micro-batch-size", 1),
        **{axis: line.count(MEGATRON.axes[axis].flag) for axis in _DEGREES},
        "sequence_parallel": line.has("--sequence-parallel"),
        "optimizer": line.text("--optimizer", "adam"),
        "framework": deepspeed_stack.name if deepspeed else MEGATRON.name,
        "precision": _precision(line),
        "zero_stage": _zero_stage(line),
        **_numerics(line),
        "overlap": _overlap(line),
    }
    bucket = line.integer("--ddp-bucket-size", 0)
    if bucket > 0:
        settings["bucket_parameters"] = bucket
    if settings["seq_len"] < 1:
        raise InputError("is needed for the price of a step", where=f"{line.where}: --seq-length")
    if settings["precision"] == "fp8":
        # Megatron's default (megatron/core/transformer/transformer_config.py, fp8_recipe).
        recipe = line.text("--fp8-recipe", "delayed")
        settings["fp8_recipe"] = recipe if recipe in get_args(Fp8Recipe) else "delayed"
    settings |= _recompute(line)
    settings |= _stages(line, settings["pp"], model["layers"])
    if "moe" in model:
        settings |= _experts(line, 1 if deepspeed else settings["tp"])
        if deepspeed:
            settings["moe_dispatch"] = "alltoall"
    batch = line.integer("--global-batch-size", 0)
    if batch:
        settings["global_batch"] = batch
    settings |= megatron_exchange(line, settings["cp"])
    settings["cuda_graph"] = _cuda_graph(line)
    if line.has("--use-tp-pp-dp-mapping"):
        settings["rank_order"] = "tp-cp-pp-dp"
    gpus = line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    instances = line.count(_OPTIMIZER_INSTANCES)
    if instances > 1:
        settings["shard_groups"] = instances
    settings |= offloaded_modules(line)
    offloaded = _offloaded_percent(line)
    if offloaded:
        settings["optimizer_offload"] = offloaded
    assumed = []
    if known is None and not (line.has("--vocab-size") or line.has("--padded-vocab-size")):
        assumed.append(
            f"no --vocab-size: {GPT2_VOCAB:,} tokens are assumed, as GPT-2 has; --with model=... tells"
        )
    unread = tuple(line.unread(_HARMLESS))
    return LaunchRun(settings=settings, model=model, unread=unread, assumed=tuple(assumed))


def _cuda_graph(line: CommandLine) -> str:
    modules = line.several("--cuda-graph-modules") or None
    recipe = {"cuda_graph_impl": line.text("--cuda-graph-impl"), "cuda_graph_scope": modules}
    return cuda_graph_kind(recipe)


def _overlap(line: CommandLine) -> dict[str, bool]:
    line.has("--overlap-param-gather")
    return {
        "dp": line.has("--overlap-grad-reduce"),
        "tp": line.has("--tp-comm-overlap"),
        "pp": not line.has("--no-overlap-p2p-communication"),
        "ep": line.has("--overlap-moe-expert-parallel-comm"),
    }


def _experts(line: CommandLine, default_etp: int) -> dict[str, Any]:
    deepspeed_ep = line.integer(DEEPSPEED.axes["ep"].flag, 1)
    dispatcher = line.text("--moe-token-dispatcher-type", "allgather")
    backend = line.text("--moe-flex-dispatcher-backend") or "deepep"
    if backend not in DISPATCHERS:
        backend = "deduplicated"
    plain = "allgather" if dispatcher == "allgather" else "alltoall"
    return {
        "ep": line.integer(MEGATRON.axes["ep"].flag, deepspeed_ep),
        "etp": line.integer(MEGATRON.axes["etp"].flag, default_etp),
        "moe_dispatch": backend if dispatcher == "flex" else plain,
    }


def _numerics(line: CommandLine) -> dict[str, Any]:
    """Types of gradients, moments and parameters. Without a flag gradients are those of the stack."""
    settings: dict[str, Any] = {}
    if line.has("--grad-reduce-in-bf16"):
        settings["gradient_dtype"] = "bf16"
    elif line.has("--accumulate-allreduce-grads-in-fp32"):
        settings["gradient_dtype"] = "fp32"
    line.has("--use-precision-aware-optimizer")
    moments = {line.text("--exp-avg-dtype", "fp32"), line.text("--exp-avg-sq-dtype", "fp32")}
    if moments == {"bf16"}:
        settings["moment_dtype"] = "bf16"
    line.has("--reuse-grad-buf-for-mxfp8-param-ag")
    kept = [line.has(flag) for flag in ("--fp8-param-gather", "--fp4-param-gather")]
    if any(kept):
        settings["fp8_params"] = True
    return settings


def _offloaded_percent(line: CommandLine) -> int:
    """Of the optimizer's states, to a whole number. The share is 1 where the switch stands alone."""
    line.has("--overlap-cpu-optimizer-d2h-h2d")
    share = line.number("--optimizer-offload-fraction", 1.0)
    if line.has(_CPU_OPTIMIZER):
        return 100
    return round(100 * share) if line.has("--optimizer-cpu-offload") else 0


def _precision(line: CommandLine) -> str:
    recipe, fp16 = line.text("--fp8-recipe"), line.has("--fp16")
    if line.text("--fp4-format"):
        line.text("--fp4-recipe")
        return "nvfp4"
    if line.text("--fp8-format"):
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    return "fp16" if fp16 else "bf16"


def _zero_stage(line: CommandLine) -> int:
    strategy = line.text("--data-parallel-sharding-strategy") or "no_shard"
    distributed = line.has("--use-distributed-optimizer")
    if line.has("--use-megatron-fsdp"):
        return _SHARDED.get(strategy, 3)
    if line.has("--use-torch-fsdp2"):
        return 3
    return line.integer("--zero-stage", 1 if distributed else 0)


def _recompute(line: CommandLine) -> dict[str, Any]:
    old_switches = ("--checkpoint-activations", "--deepspeed-activation-checkpointing")
    switched_on = [line.has(flag) for flag in old_switches]
    kind = line.text("--recompute-granularity", "full" if any(switched_on) else "none")
    if line.has("--recompute-activations"):
        kind = "selective"
    if kind == "selective":
        modules = line.several("--recompute-modules") or ["core_attn"]
        return {"recompute": kind, "recompute_modules": modules}
    if kind != "full":
        return {"recompute": "none"}
    layers = line.integer("--recompute-num-layers", 0)
    if line.text("--recompute-method") == "block" and layers:
        return {"recompute": kind, "recompute_layers": layers}
    return {"recompute": kind}


def _stages(line: CommandLine, pp: int, layers: int) -> dict[str, Any]:
    """Virtual stages and, where it is not even, the split of the layers."""
    pattern = hybrid_pattern(line)
    if pattern is not None and "|" in pattern:
        return _chunk_stages(tuple(map(len, pattern.split("|"))), pp, line.where)
    text = line.text(_LAYOUT)
    if text is not None:
        return _written_stages(text, pp, line.where)
    vpp = line.integer("--num-virtual-stages-per-pipeline-rank", 0)
    layers_per_chunk = line.integer("--num-layers-per-virtual-pipeline-stage", 0)
    if layers_per_chunk:
        vpp = layers // (pp * layers_per_chunk)
    first = line.integer("--decoder-first-pipeline-num-layers", 0)
    last = line.integer("--decoder-last-pipeline-num-layers", 0)
    if pp > 1 and (first or last) and not vpp:
        return {"stages": [[count] for count in _uneven_ends(layers, pp, first, last)]}
    return {"vpp": vpp} if vpp > 1 else {}


def _written_stages(text: str, pp: int, where: str) -> dict[str, Any]:
    chunks = layers_of_layout(text)
    if chunks is None:
        what = "must be a layout of E, t, m, L and |"
        raise InputError(what, where=f"{where}: {_LAYOUT}", value=text)
    return _chunk_stages(chunks, pp, where)


def _chunk_stages(chunks: tuple[int, ...], pp: int, where: str) -> dict[str, Any]:
    """Stages of chunks that are written in the order of the model."""
    if len(chunks) % pp:
        raise InputError(f"has {len(chunks)} stages, which pp {pp} does not divide", where=where)
    stages = [list(chunks[rank::pp]) for rank in range(pp)]
    return {"vpp": len(chunks) // pp, "stages": stages}


def _uneven_ends(layers: int, pp: int, first: int, last: int) -> list[int]:
    """Layers of each stage; a first or last of 0 is like the stages between."""
    front = [first] if first else []
    back = [last] if last else []
    between = pp - len(front) - len(back)
    size = (layers - first - last) // between if between else 0
    return [*front, *[size] * between, *back]
