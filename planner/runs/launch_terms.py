"""What the flags and keys of each framework mean in a run file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.deepspeed import DEEPSPEED, MEGATRON_DEEPSPEED
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.torchtitan import TORCHTITAN, TORCHTITAN_COMPILED
from meshwright.planner.runs.launch_flags import Words
from meshwright.planner.runs.launch_model import megatron_model


@dataclass(frozen=True, kw_only=True)
class LaunchRun:
    """The parts of a run file that a launch file states."""

    settings: dict[str, Any]
    model: object = None
    """A mapping, a catalog name, or None where the file does not say."""
    unread: tuple[str, ...] = ()
    """Flags or keys that were not understood."""
    remarks: tuple[str, ...] = field(default=())


_MEGATRON_HARMLESS = """
use-mcore-models bf16 fp16 mock-data data-path split tokenizer-type tokenizer-model vocab-file
merge-file train-iters train-samples lr min-lr lr-decay-style lr-warmup-iters lr-warmup-fraction
lr-decay-iters weight-decay clip-grad adam-beta1 adam-beta2 adam-eps init-method-std seed
log-interval save load save-interval eval-interval eval-iters tensorboard-dir wandb-project
wandb-exp-name distributed-backend distributed-timeout-minutes use-flash-attn attention-backend
transformer-impl attention-dropout hidden-dropout no-load-optim no-load-rng ckpt-format
log-throughput exit-duration-in-mins rotary-base rotary-percent norm-epsilon
make-vocab-size-divisible-by data-cache-path num-workers deepspeed deepspeed_config nnodes
nproc-per-node nproc_per_node node-rank node_rank master-addr master_addr master-port master_port
rdzv-backend rdzv-endpoint no-gradient-accumulation-fusion moe-permute-fusion moe-grouped-gemm
moe-router-dtype moe-aux-loss-coeff moe-router-load-balancing-type attention-softmax-in-fp32
no-masked-softmax-fusion apply-layernorm-1p cross-entropy-loss-fusion no-bias-swiglu-fusion
no-rope-fusion kill-on-bad-exit distribution nodes ntasks
"""
"""Flags of Megatron and torchrun that leave the time of a step as it is, or that all readers here assume."""


def from_megatron(words: Words) -> LaunchRun:
    """A command line of Megatron-LM's or Megatron-DeepSpeed's pretrain_gpt.py."""
    deepspeed = words.has("--deepspeed") or words.has("--deepspeed_config")
    model = megatron_model(words)
    pp, layers = words.integer("--pipeline-model-parallel-size", 1), model["layers"]
    settings: dict[str, Any] = {
        "seq_len": words.integer("--seq-length", 0),
        "micro_batch": words.integer("--micro-batch-size", 1),
        "tp": words.integer("--tensor-model-parallel-size", 1),
        "pp": pp,
        "cp": words.integer("--context-parallel-size", 1),
        "sequence_parallel": words.has("--sequence-parallel"),
        "optimizer": words.text("--optimizer", "adam"),
        "framework": MEGATRON_DEEPSPEED.name if deepspeed else MEGATRON.name,
        "precision": _megatron_precision(words),
        "zero_stage": _megatron_zero(words),
        **_megatron_recompute(words),
    }
    if settings["seq_len"] < 1:
        raise InputError("is needed for the price of a step", where=f"{words.where}: --seq-length")
    batch = words.integer("--global-batch-size", 0)
    if batch:
        settings["global_batch"] = batch
    settings |= _megatron_stages(words, pp, layers)
    if "moe" in model:
        settings["ep"] = words.integer(
            "--expert-model-parallel-size", words.integer("--moe-expert-parallel-size", 1)
        )
        settings["etp"] = words.integer(
            "--expert-tensor-parallel-size", 1 if deepspeed else settings["tp"]
        )
        dispatcher = words.text("--moe-token-dispatcher-type", "allgather")
        words.text("--moe-flex-dispatcher-backend")
        settings["moe_dispatch"] = "deduplicated" if dispatcher == "flex" else "alltoall"
    settings["overlap"] = {
        "dp": words.has("--overlap-grad-reduce"),
        "tp": words.has("--tp-comm-overlap"),
        "pp": not words.has("--no-overlap-p2p-communication"),
        "ep": words.has("--overlap-moe-expert-parallel-comm"),
    }
    words.has("--overlap-param-gather")
    if (words.text("--cp-comm-type") or "p2p").startswith("a2a"):
        settings["cp_comm"] = "a2a"
    world = _torchrun_world(words)
    if world:
        settings["gpus"] = world
    return LaunchRun(
        settings=settings,
        model=model,
        unread=tuple(words.unread(frozenset(f"--{name}" for name in _MEGATRON_HARMLESS.split()))),
    )


def _torchrun_world(words: Words) -> int | None:
    counts = []
    for flag in ("nnodes", "nproc-per-node"):
        value = words.text(f"--{flag}") or words.text(f"--{flag.replace('-', '_')}") or ""
        if not value.isdigit():
            return None
        counts.append(int(value))
    return counts[0] * counts[1]


def _megatron_precision(words: Words) -> str:
    recipe, fp16 = words.text("--fp8-recipe"), words.has("--fp16")
    if words.text("--fp4-format"):
        words.text("--fp4-recipe")
        return "nvfp4"
    if words.text("--fp8-format"):
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    return "fp16" if fp16 else "bf16"


def _megatron_zero(words: Words) -> int:
    strategy = words.text("--data-parallel-sharding-strategy", "no_shard")
    distributed = words.has("--use-distributed-optimizer")
    if words.has("--use-megatron-fsdp"):
        return {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(
            strategy or "", 3
        )
    if words.has("--use-torch-fsdp2"):
        return 3
    return words.integer("--zero-stage", 1 if distributed else 0)


def _megatron_recompute(words: Words) -> dict[str, Any]:
    whole = words.has("--checkpoint-activations") or words.has(
        "--deepspeed-activation-checkpointing"
    )
    kind = words.text("--recompute-granularity", "full" if whole else None)
    if words.has("--recompute-activations"):
        kind = "selective"
    if kind == "selective":
        return {
            "recompute": "selective",
            "recompute_modules": words.several("--recompute-modules") or ["core_attn"],
        }
    if kind == "full":
        layers = words.integer("--recompute-num-layers", 0)
        block = words.text("--recompute-method") == "block"
        return {"recompute": "full", **({"recompute_layers": layers} if block and layers else {})}
    return {"recompute": "none"}


def _megatron_stages(words: Words, pp: int, layers: int) -> dict[str, Any]:
    text = words.text("--pipeline-model-parallel-layout")
    if text is not None:
        chunks = _chunks(text, f"{words.where}: --pipeline-model-parallel-layout")
        if len(chunks) % pp:
            raise InputError(
                f"has {len(chunks)} stages, which pp {pp} does not divide", where=words.where
            )
        return {
            "vpp": len(chunks) // pp,
            "stages": [chunks[rank::pp] for rank in range(pp)],
        }
    per_chunk = words.integer("--num-layers-per-virtual-pipeline-stage", 0)
    vpp = words.integer("--num-virtual-stages-per-pipeline-rank", 0)
    if per_chunk:
        vpp = layers // (pp * per_chunk)
    first = words.integer("--decoder-first-pipeline-num-layers", 0)
    last = words.integer("--decoder-last-pipeline-num-layers", 0)
    if pp > 1 and (first or last) and not vpp:
        middle = pp - bool(first) - bool(last)
        each = (layers - first - last) // middle if middle else 0
        row = [first] * bool(first) + [each] * middle + [last] * bool(last)
        return {"stages": [[count] for count in row]}
    return {"vpp": vpp} if vpp > 1 else {}


def _chunks(text: str, where: str) -> list[int]:
    """Layers of each chunk of a Megatron layout such as Et*3|(tt|)*29m|L."""
    if len(text) > 10_000 or not re.fullmatch(r"[EtmL|()*\d]+", text):
        raise InputError("must be a layout of E, t, m, L and |", where=where, value=text)
    flat = text
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        flat = re.sub(pattern, lambda found: found[1] * int(found[2]), flat)
        if len(flat) > 100_000:
            raise InputError("is longer than 100,000 letters", where=where)
    return [chunk.count("t") for chunk in flat.split("|")]


_TITAN_MODELS = {
    "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b",
    "llama3_405b": "llama-3.1-405b",
    "qwen3_8b": "qwen3-8b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "deepseek_v3_671b": "deepseek-v3",
    "deepseek_v3_236b": "deepseek-v2",
    "gpt_oss_20b": "gpt-oss-20b",
    "gpt_oss_120b": "gpt-oss-120b",
}


def from_torchtitan(words: Words) -> LaunchRun:
    """Flags of torchtitan's trainer; the model is known for torchtitan's own configurations."""
    plain = Words(
        [re.sub("_", "-", w) if w.startswith("--") else w for w in words.words], words.where
    )
    parallel, training = "--parallelism.", "--training."
    pp = plain.integer(f"{parallel}pipeline-parallel-degree", 1)
    replicate = plain.integer(f"{parallel}data-parallel-replicate-degree", 1)
    shard = plain.integer(f"{parallel}data-parallel-shard-degree", -1)
    tp = plain.integer(f"{parallel}tensor-parallel-degree", 1)
    local = plain.integer(f"{training}local-batch-size", 8)
    reshard = plain.text(f"{parallel}fsdp-reshard-after-forward", "default")
    never = reshard == "never" or (reshard == "default" and pp > 1)
    compiled = plain.has("--compile.enable")
    settings: dict[str, Any] = {
        "seq_len": plain.integer(f"{training}seq-len", 2048),
        "micro_batch": plain.integer(f"{parallel}pipeline-parallel-microbatch-size", 1)
        if pp > 1
        else local,
        "tp": tp,
        "pp": pp,
        "cp": plain.integer(f"{parallel}context-parallel-degree", 1),
        "ep": plain.integer(f"{parallel}expert-parallel-degree", 1),
        "sequence_parallel": tp > 1 and not plain.has(f"{parallel}no-enable-sequence-parallel"),
        "zero_stage": 0 if shard == 1 else (2 if never else 3),
        "recompute": "full" if "activation-checkpoint:full" in words.words else "none",
        "framework": TORCHTITAN_COMPILED.name if compiled else TORCHTITAN.name,
        "overlap": {"dp": True},
    }
    if shard > 0:
        settings["dp"] = replicate * shard
        batch = plain.integer(f"{training}global-batch-size", -1)
        settings["global_batch"] = batch if batch > 0 else local * replicate * shard
    elif plain.has(f"{training}global-batch-size"):
        settings["global_batch"] = plain.integer(f"{training}global-batch-size", 1)
    schedule = plain.text(f"{parallel}pipeline-parallel-schedule", "1F1B") or "1F1B"
    if pp > 1:
        # torch reads these names in any case (`get_schedule_class`).
        names = {setting.value.lower(): name for name, setting in TORCHTITAN.schedules.items()}
        settings["schedule"] = names.get(schedule.lower(), "1f1b")
        if settings["schedule"] not in ("1f1b", "gpipe"):
            settings["vpp"] = 2  # torchtitan's default; the registry module may say otherwise
    config, module = plain.text("--config"), plain.text("--module")
    remarks = (
        ["selective checkpointing is priced as none"]
        if any(word == "activation-checkpoint:selective" for word in words.words)
        else []
    )
    world = _torchrun_world(plain)
    if world:
        settings["gpus"] = world
    unread = plain.unread(frozenset({"--training.disable-cuda-graphs", "--training.steps"}))
    model = _TITAN_MODELS.get(config or "")
    if model is None:
        remarks.append(
            f"the model of --module {module} --config {config} is written in Python: name it yourself"
        )
    return LaunchRun(settings=settings, model=model, unread=tuple(unread), remarks=tuple(remarks))


def from_deepspeed(document: dict[str, Any], where: str) -> LaunchRun:
    """A DeepSpeed configuration; model, sequence length and cluster are not part of it."""
    zero, known = _section(document, "zero_optimization", where), {"zero_optimization"}
    known |= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    micro = _whole(document, "train_micro_batch_size_per_gpu", where)
    steps = _whole(document, "gradient_accumulation_steps", where)
    batch = _whole(document, "train_batch_size", where)
    if micro is None:
        raise InputError("is needed", where=f"{where}: train_micro_batch_size_per_gpu")
    settings: dict[str, Any] = {
        "micro_batch": micro,
        "zero_stage": _whole(zero, "stage", where) or 0,
        "framework": DEEPSPEED.name,
        "tp": _whole(_section(document, "tensor_parallel", where), "autotp_size", where) or 1,
        "overlap": {"dp": bool(zero.get("overlap_comm", False))},
    }
    if batch is not None:
        settings["global_batch"] = batch
        if steps is not None and batch % (micro * steps) == 0:
            settings["dp"] = batch // (micro * steps)
    if _section(document, "fp16", where).get("enabled") is True:
        settings["precision"] = "fp16"
    checkpointing = _section(document, "activation_checkpointing", where)
    if checkpointing.get("number_checkpoints"):
        settings["recompute"] = "full"
    known |= {"bf16", "fp16", "tensor_parallel", "activation_checkpointing", "gradient_clipping"}
    known |= {"optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown"}
    read = {
        "stage",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_bucket_size",
        "allgather_bucket_size",
    }
    unread = [str(key) for key in document if key not in known]
    unread += [f"zero_optimization.{key}" for key in zero if key not in read]
    return LaunchRun(settings=settings, unread=tuple(unread))


def from_accelerate(document: dict[str, Any], where: str) -> LaunchRun:
    """An accelerate configuration with FSDP2; model, batch and cluster are not part of it."""
    fsdp, mesh = (
        _section(document, "fsdp_config", where),
        _section(document, "parallelism_config", where),
    )
    sizes = {
        axis: _whole(mesh, f"parallelism_config_{axis}_size", where) or 1
        for axis in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    gpus = _whole(document, "num_processes", where)
    inner = sizes["tp"] * sizes["cp"]
    dp = sizes["dp_replicate"] * sizes["dp_shard"]
    if gpus is not None and dp == 1:
        dp = gpus // inner
    settings: dict[str, Any] = {
        "dp": dp,
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "framework": FSDP2.name,
        "zero_stage": 2
        if fsdp.get("fsdp_reshard_after_forward") in (False, "SHARD_GRAD_OP")
        else 3,
        "recompute": "full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        "overlap": {"dp": True},
    }
    if document.get("mixed_precision") in ("fp16", "bf16", "fp8"):
        settings["precision"] = document["mixed_precision"]
    known = {
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "num_machines",
        "num_processes",
    }
    known |= {
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "same_network",
        "use_cpu",
    }
    known |= {
        "fsdp_config",
        "parallelism_config",
        "debug",
        "main_training_function",
        "downcast_bf16",
    }
    read = {"version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap"}
    read |= {
        "activation_checkpointing",
        "state_dict_type",
        "cpu_ram_efficient_loading",
        "sync_module_states",
    }
    unread = [str(key) for key in document if key not in known]
    unread += [
        f"fsdp_config.{k}"
        for k, v in fsdp.items()
        if str(k).removeprefix("fsdp_") not in read and v
    ]
    unread += [
        f"parallelism_config.{k}"
        for k, v in mesh.items()
        if str(k).removeprefix("parallelism_config_").removesuffix("_size") not in sizes
        and v not in (1, None)
    ]
    return LaunchRun(settings=settings, unread=tuple(unread))


def _section(document: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise InputError("must be a mapping", where=f"{where}: {key}", value=value)
    return value


def _whole(document: dict[str, Any], key: str, where: str) -> int | None:
    value = document.get(key)
    if value is None or value == "auto":
        return None
    if type(value) is not int:
        raise InputError("must be a whole number", where=f"{where}: {key}", value=value)
    return value
