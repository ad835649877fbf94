"""Flags of torchtitan's trainer as a run; the model is known for torchtitan's own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.catalog import as_compiled
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.catalog import catalog_names
from meshwright.model_specs.torchtitan_flavors import (
    NamedConfig,
    flavor_named,
    flavor_of_config,
    named_config,
)
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.torchtitan_registry import registry_settings
from meshwright.planner.runs.run_terms import EVERY_SECOND_LAYER

CONVERTERS = {
    "float8": "fp8",
    "quantize.linear.float8": "fp8",
    "mx": "mxfp8",
    "quantize.linear.mx": "mxfp8",
}
"""Precision of the run by the name in `converters` of `model`."""
_SCHEDULES = {setting.value.lower(): name for name, setting in TORCHTITAN.schedules.items()}
"""torch reads their names in any case (`get_schedule_class`)."""
_SUBCOMMAND = "activation-checkpoint:"
"""Of 0.3; the kind of checkpointing follows."""
_CHECKPOINTS = ("none", "selective", "full", "memory_budget")
_BY_OPERATOR, _EVERY_SECOND = "op", "2"
"""Values of `selective_ac_option`, whose default is the second."""
_LOCAL_BATCH = 8
"""`training.local_batch_size` where nothing says."""


def is_torchtitan(line: CommandLine) -> bool:
    """Whether a command line has torchtitan's flags."""
    return line.has("--module") or any(word.startswith("--parallelism.") for word in line.words)


def from_torchtitan(command_line: CommandLine, folder: Path) -> LaunchRun:
    """The run of a torchtitan command line, with the stages and the precision of a module of ours beside it.

    A configuration of torchtitan's own sets what no flag says. Raises InputError for a value of the wrong
    kind.
    """
    line = command_line.with_dashes()
    config = named_config(line.text("--config") or "")
    if config is not None:
        line = line.after(config.words)
    pp = line.count("--parallelism.pipeline-parallel-degree")
    model, remarks = _model(line)
    settings: dict[str, Any] = {
        "seq_len": line.integer("--training.seq-len", 2048),
        "pp": pp,
        "tp": line.count("--parallelism.tensor-parallel-degree"),
        "cp": line.count("--parallelism.context-parallel-degree"),
        "ep": line.count("--parallelism.expert-parallel-degree"),
        "overlap": {"dp": True, "pp": True},
        "moe_dispatch": "alltoall",
    }
    one_sequence = line.has("--parallelism.no-enable-sequence-parallel")
    settings["sequence_parallel"] = settings["tp"] > 1 and not one_sequence
    settings["framework"] = as_compiled(TORCHTITAN.name, compiled=_compiles(line))
    settings |= _sharding(line, pp) | _batch(line, pp) | _schedule(line, pp)
    settings |= _precision(line, config)
    settings |= registry_settings(folder, line.text("--module") or "", settings)
    checkpointing, unread = _checkpointing(line)
    settings |= checkpointing
    gpus = line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    repeated = _repeats_pipeline(line, settings)
    if repeated:
        what = "the pipeline fills and drains for every training.local_batch_size sequences"
        remarks.append(f"{what}, and is priced as filled once a step")
    unread += _other_converters(line)
    return LaunchRun(
        settings=settings,
        model=model,
        local_batch=line.integer("--training.local-batch-size", _LOCAL_BATCH),
        unread=(*line.unread("torchtitan"), *unread),
        remarks=tuple(remarks),
        repeats_pipeline=repeated,
    )


def _compiles(line: CommandLine) -> bool:
    """Whether the model is compiled, and not the loss alone."""
    parts = line.several("--compile.components")
    return line.switch("--compile.enable") and (not parts or "model" in ",".join(parts).split(","))


def _converters(line: CommandLine) -> list[str] | None:
    """Names of the model's converters; None where no flag says."""
    if not line.has("--model.converters"):
        return None
    return [name for text in line.several("--model.converters") for name in text.split(",") if name]


def _precision(line: CommandLine, config: NamedConfig | None) -> dict[str, str]:
    """The precision of the last converter that has one; nothing where none is said."""
    names = _converters(line)
    if names is not None:
        known = [CONVERTERS[name] for name in names if name in CONVERTERS]
        return {"precision": known[-1] if known else "bf16"}
    if config is not None and config.precision is not None:
        return {"precision": config.precision}
    return {}


def _other_converters(line: CommandLine) -> list[str]:
    others = [name for name in _converters(line) or [] if name not in CONVERTERS]
    return [f"--model.converters {name}" for name in others]


def _sharding(line: CommandLine, pp: int) -> dict[str, int]:
    """ZeRO stage; where the flags give them, the data-parallel degree and the groups of replicas.

    A shard degree of -1 is what is left. Weights are sharded over dp_shard and cp together
    (torchtitan/distributed/fsdp.py, resolve_fsdp_mesh).
    """
    shards = line.integer("--parallelism.data-parallel-shard-degree", -1)
    replicas = line.integer("--parallelism.data-parallel-replicate-degree", 1)
    reshard = line.text("--parallelism.fsdp-reshard-after-forward", "default")
    keeps_parameters = reshard == "never" or (reshard == "default" and pp > 1)
    settings = {"zero_stage": 2 if keeps_parameters else 3}
    context = line.count("--parallelism.context-parallel-degree")
    # Experts are sharded over what ep leaves, whatever the shard degree (parallel_dims.py, efsdp).
    spreads = line.count("--parallelism.expert-parallel-degree") > 1
    if shards * context == 1 and (replicas > 1 or (keeps_parameters and not spreads)):
        settings["zero_stage"] = 0
    if shards > 0:
        settings["dp"] = replicas * shards
    if line.switch("--training.enable-cpu-offload"):
        settings["optimizer_offload"] = 100
    if replicas > 1 and shards * context != 1:
        settings["shard_groups"] = replicas
    return settings


def _checkpointing(line: CommandLine) -> tuple[dict[str, Any], list[str]]:
    """What is recomputed, and what of it has no price.

    By operator: all but attention and every second product. By layer (`selective_ac_option` of n, up to 0.2):
    every n-th layer in full (torchtitan/distributed/activation_checkpoint.py of v0.2.2, _apply_layer_sac).
    """
    flag, option = "--activation-checkpoint.mode", "--activation-checkpoint.selective-ac-option"
    mode = line.text(flag)
    of_layers = line.text(option)
    early = mode is not None
    for word in line.words:
        if word.startswith(_SUBCOMMAND):
            mode, early = word.removeprefix(_SUBCOMMAND), False
    if mode is not None and mode not in _CHECKPOINTS:
        raise InputError(
            "is no kind of checkpointing",
            where=f"{line.where}: activation_checkpoint.mode",
            value=mode,
            allowed=_CHECKPOINTS,
        )
    if mode == "memory_budget":
        return {"recompute": "none"}, [f"{flag} memory_budget"]
    if mode != "selective":
        return {"recompute": "full" if mode == "full" else "none"}, []
    every = of_layers or (_EVERY_SECOND if early else _BY_OPERATOR)
    if every == _BY_OPERATOR:
        return {"recompute": "selective", "recompute_modules": [_BY_OPERATOR]}, []
    if every == _EVERY_SECOND:
        return {"recompute": "selective", "recompute_modules": [EVERY_SECOND_LAYER]}, []
    if every == "1":
        return {"recompute": "full"}, []
    return {"recompute": "full"}, [f"{option} {every}"]


def _batch(line: CommandLine, pp: int) -> dict[str, int]:
    local_batch = line.count("--training.local-batch-size", _LOCAL_BATCH)
    micro_batch = local_batch
    if pp > 1:
        micro_batch = line.integer("--parallelism.pipeline-parallel-microbatch-size", 1)
    settings = {"micro_batch": micro_batch}
    dp = _sharding(line, pp).get("dp")
    global_batch = line.integer("--training.global-batch-size", -1)
    if global_batch > 0:
        settings["global_batch"] = global_batch
    elif dp is not None:
        settings["global_batch"] = local_batch * dp
    return settings


def _repeats_pipeline(line: CommandLine, settings: Mapping[str, Any]) -> bool:
    """Whether a step is several local batches, one after the other through the pipeline."""
    local_batch, dp = line.integer("--training.local-batch-size", _LOCAL_BATCH), settings.get("dp")
    if settings["pp"] == 1 or dp is None:
        return False
    return bool(settings.get("global_batch") != local_batch * dp)


def _schedule(line: CommandLine, pp: int) -> dict[str, Any]:
    name = line.text("--parallelism.pipeline-parallel-schedule") or "1F1B"
    if pp == 1:
        return {}
    schedule = _SCHEDULES.get(name.lower(), "1f1b")
    if schedule in ("1f1b", "gpipe"):
        return {"schedule": schedule}
    # Two virtual stages are torchtitan's default; the registry module may say otherwise.
    return {"schedule": schedule, "vpp": 2}


def _model(line: CommandLine) -> tuple[object, list[str]]:
    """The model where it is of torchtitan's own registry: a catalog name or its fields, and remarks."""
    family, name = line.text("--model.name"), line.text("--model.flavor")
    config, module = line.text("--config"), line.text("--module")
    if family is not None:
        flavor = flavor_named(family, name or "debugmodel")
        said = f"{family} {name or 'debugmodel'}"
    else:
        flavor, said = flavor_of_config(config or ""), f"--module {module} --config {config}"
    if flavor is None:
        return None, [f"the model of {said} is written in Python: name it yourself"]
    if flavor.model.name in catalog_names():
        return flavor.model.name, []
    return flavor.model.model_dump(exclude_none=True, exclude_defaults=True), []
