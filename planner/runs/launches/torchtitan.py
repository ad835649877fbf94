"""Flags of torchtitan's trainer as a run; the model is known for torchtitan's own configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.frameworks.catalog import as_compiled
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.planner.runs.launches.flags import CommandLine
from meshwright.planner.runs.launches.launch_run import LaunchRun
from meshwright.planner.runs.launches.torchtitan_registry import registry_settings

_CATALOG_NAMES = {
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
"""Models by the names of torchtitan's configurations."""
_SCHEDULES = {setting.value.lower(): name for name, setting in TORCHTITAN.schedules.items()}
"""torch reads their names in any case (`get_schedule_class`)."""
_HARMLESS = frozenset(
    """
    --training.disable-cuda-graphs --training.steps --training.no-enable-cpu-offload
    --node-rank --master-addr --master-port --rdzv-backend --rdzv-endpoint
    --kill-on-bad-exit --distribution --nodes --ntasks --ntasks-per-node --gpus-per-node
    """.split()  # noqa: SIM905
)
"""Flags of torchtitan, torchrun and srun that leave the time of a step as it is."""


def from_torchtitan(command_line: CommandLine, folder: Path) -> LaunchRun:
    """The run of a torchtitan command line, with the stages and the precision of a module of ours beside it.

    Raises InputError for a value of the wrong kind.
    """
    line = command_line.with_dashes()
    pp = line.count("--parallelism.pipeline-parallel-degree")
    settings: dict[str, Any] = {
        "seq_len": line.integer("--training.seq-len", 2048),
        "pp": pp,
        "tp": line.count("--parallelism.tensor-parallel-degree"),
        "cp": line.count("--parallelism.context-parallel-degree"),
        "ep": line.count("--parallelism.expert-parallel-degree"),
        **_checkpointing(line),
        "overlap": {"dp": True, "pp": True},
        "moe_dispatch": "alltoall",
    }
    one_sequence = line.has("--parallelism.no-enable-sequence-parallel")
    settings["sequence_parallel"] = settings["tp"] > 1 and not one_sequence
    compiled = line.has("--compile.enable")
    settings["framework"] = as_compiled(TORCHTITAN.name, compiled=compiled)
    settings |= _sharding(line, pp) | _batch(line, pp) | _schedule(line, pp)
    settings |= registry_settings(folder, line.text("--module") or "", settings)
    gpus = line.torchrun_gpus()
    if gpus:
        settings["gpus"] = gpus
    model, remarks = _model(line)
    repeated = _repeats_pipeline(line, settings)
    if repeated:
        what = "the pipeline fills and drains for every training.local_batch_size sequences"
        remarks.append(f"{what}, and is priced as filled once a step")
    unread = tuple(line.unread(_HARMLESS))
    return LaunchRun(
        settings=settings,
        model=model,
        unread=unread,
        remarks=tuple(remarks),
        repeats_pipeline=repeated,
    )


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
    if line.has("--training.enable-cpu-offload"):
        settings["optimizer_offload"] = 100
    if replicas > 1 and shards * context != 1:
        settings["shard_groups"] = replicas
    return settings


def _checkpointing(line: CommandLine) -> dict[str, Any]:
    """What is recomputed; `selective` means all but attention and every second product."""
    if "activation-checkpoint:selective" in line.words:
        return {"recompute": "selective", "recompute_modules": ["op"]}
    return {"recompute": "full" if "activation-checkpoint:full" in line.words else "none"}


def _batch(line: CommandLine, pp: int) -> dict[str, int]:
    local_batch = line.integer("--training.local-batch-size", 8)
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
    local_batch, dp = line.integer("--training.local-batch-size", 8), settings.get("dp")
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


def _model(line: CommandLine) -> tuple[str | None, list[str]]:
    """The model's catalog name where the configuration is torchtitan's own, and remarks."""
    remarks = []
    config, module = line.text("--config"), line.text("--module")
    model = _CATALOG_NAMES.get(config or "")
    if model is None:
        remarks.append(
            f"the model of --module {module} --config {config} is written in Python: name it yourself"
        )
    return model, remarks
