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
    leave_model_flags,
    megatron_model,
    names_sizes,
)
from meshwright.planner.runs.offloaded import offloaded_modules
from meshwright.planner.runs.pipeline_notation import layers_of_layout
from meshwright.planner.runs.run_terms import cuda_graph_kind

_DEGREES: tuple[Axis, ...] = ("tp", "pp", "cp")
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages by Megatron-FSDP's sharding strategy."""
_OPTIMIZER_INSTANCES = "--num-distributed-optimizer-instances"
_END_SLOTS = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Switches that count the embedding and the head as a layer each; what one of them alone does is not read."""
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


def from_megatron(
    line: CommandLine, known: ModelSpec | None = None, *, sized: bool = True
) -> LaunchRun:
    """The run of a Megatron command line.

    Parameters
    ----------
    line
        Its words.
    known
        The model, where the caller has one. It is the run's where the flags do not give its sizes; where they
        do, layers and experts are still its own.
    sized
        Whether flags of the model are looked for; those of a recipe say nothing of it.

    Raises
    ------
    InputError
        No sequence length, no sizes and no known model, or a value of the wrong kind.
    """
    deepspeed = line.has("--deepspeed") or line.has("--deepspeed_config")
    flash_flags = [flag for flag in _DEEPSPEED_FLASH if line.has(flag)]
    deepspeed_stack = DEEPSPEED if flash_flags else MEGATRON_DEEPSPEED
    written = megatron_model(line) if sized and (known is None or names_sizes(line)) else None
    model = known.model_dump(exclude_none=True) if known is not None else written
    assert model is not None
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
    if written is None:
        leave_model_flags(line)
    elif not (line.has("--vocab-size") or line.has("--padded-vocab-size")):
        assumed.append(
            f"no --vocab-size: {GPT2_VOCAB:,} tokens are assumed, as GPT-2 has; --with model=... tells"
        )
    if settings["seq_len"] < 1:
        raise InputError("is needed for the price of a step", where=f"{line.where}: --seq-length")
    unread = tuple(line.unread("megatron"))
    return LaunchRun(
        settings=settings,
        model=model if written is None else written,
        unread=unread,
        assumed=tuple(assumed),
    )


def _cuda_graph(line: CommandLine) -> str:
    # The older name of the same, in releases before 0.19.
    scope = line.several("--cuda-graph-scope")
    modules = line.several("--cuda-graph-modules") or scope or None
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
    loss = line.text("--cross-entropy-fusion-impl")
    if loss is not None and line.has("--cross-entropy-loss-fusion"):
        settings["fused_loss"] = loss == "te"
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
        return 2 if line.has("--torch-fsdp2-no-reshard-after-forward") else 3
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
    ends = [flag for flag in _END_SLOTS if line.words.count(flag)]
    vpp = line.integer("--num-virtual-stages-per-pipeline-rank", 0)
    layers_per_chunk = line.integer("--num-layers-per-virtual-pipeline-stage", 0)
    if layers_per_chunk:
        vpp = layers // (pp * layers_per_chunk)
    first = line.integer("--decoder-first-pipeline-num-layers", 0)
    last = line.integer("--decoder-last-pipeline-num-layers", 0)
    if pp > 1 and (first or last) and not vpp:
        return {"stages": [[count] for count in _uneven_ends(layers, pp, first, last)]}
    settings: dict[str, Any] = {"vpp": vpp} if vpp > 1 else {}
    if len(ends) == len(_END_SLOTS):
        for flag in ends:
            line.has(flag)
        settings["layer_split"] = "embedding and LM head each occupy one layer slot"
    return settings


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
