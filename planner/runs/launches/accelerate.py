"""An accelerate configuration with FSDP2 as a run; model, batch and cluster are not part of it."""

from __future__ import annotations

from typing import Any

from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.planner.runs.launches.launch_run import (
    LaunchRun,
    section_of,
    unread_keys,
    whole_number,
)

_ACCELERATE_READ = frozenset(
    ("mixed_precision", "num_processes", "fsdp_config", "parallelism_config")
)
_FSDP_READ = tuple(
    f"fsdp_{name}"
    for name in (
        "reshard_after_forward",
        "auto_wrap_policy",
        "activation_checkpointing",
        "offload_params",
    )
)
_AXES = ("dp_replicate", "dp_shard", "tp", "cp")
_SIZES = {f"parallelism_config_{axis}_size": axis for axis in _AXES}
_PRECISIONS = ("fp16", "bf16", "fp8")


def from_accelerate(document: dict[str, Any], where: str) -> LaunchRun:
    """The run of an accelerate configuration.

    Parameters
    ----------
    document
        Of a YAML file.
    where
        The file's name, for messages.

    Raises
    ------
    InputError
        A value of the wrong kind.
    """
    fsdp = section_of(document, "fsdp_config", where)
    mesh = section_of(document, "parallelism_config", where)
    sizes = {axis: whole_number(mesh, key, where) or 1 for key, axis in _SIZES.items()}
    gpus = whole_number(document, "num_processes", where)
    dp = sizes["dp_replicate"] * sizes["dp_shard"]
    if gpus is not None and dp == 1:
        dp = gpus // (sizes["tp"] * sizes["cp"])
    keeps_parameters = fsdp.get("fsdp_reshard_after_forward") in (False, "SHARD_GRAD_OP")
    settings: dict[str, Any] = {
        "dp": dp,
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "framework": FSDP2.name,
        "zero_stage": 2 if keeps_parameters else 3,
        "recompute": "full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        "overlap": {"dp": True},
        "moe_dispatch": "alltoall",
    }
    if fsdp.get("fsdp_offload_params"):
        settings["optimizer_offload"] = 100
    if sizes["dp_replicate"] > 1:
        # Weights are sharded over dp_shard and cp together (accelerate/parallelism_config.py).
        settings["shard_groups"] = sizes["dp_replicate"]
    if document.get("mixed_precision") in _PRECISIONS:
        settings["precision"] = document["mixed_precision"]
    # Options that are off, and axes of one GPU, change nothing.
    switched_on = {key: value for key, value in fsdp.items() if value}
    wide = {key: size for key, size in mesh.items() if size not in (1, None)}
    unread = unread_keys(document, "accelerate", _ACCELERATE_READ)
    unread += unread_keys(switched_on, "accelerate", _FSDP_READ, "fsdp_config")
    unread += unread_keys(wide, "accelerate", _SIZES, "parallelism_config")
    return LaunchRun(settings=settings, unread=tuple(unread))
