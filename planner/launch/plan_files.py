"""The files of `plan -o` and `launch`: the plan itself, and what starts it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.deepspeed import DEEPSPEED
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.launch import (
    accelerate,
    bridge,
    deepspeed,
    megatron,
    schedulers,
    torchtitan,
)
from meshwright.planner.launch.ranks.texts import FOLDER, mapping_files
from meshwright.planner.plan.document import MOST_LISTED_RANKS, Plan
from meshwright.planner.plan.texts import plan_text

_WRITERS: dict[str, Callable[[Plan], dict[str, str]]] = {
    MEGATRON.name: megatron.launch_files,
    TORCHTITAN.name: torchtitan.launch_files,
    DEEPSPEED.name: deepspeed.launch_files,
    FSDP2.name: accelerate.launch_files,
}
_WRAPPERS = {
    "slurm": schedulers.slurm_files,
    "openmpi": schedulers.openmpi_files,
    "kubernetes": schedulers.kubernetes_files,
}
TARGETS = (*_WRITERS, "bridge", *_WRAPPERS)
"""Frameworks, and the schedulers that start a plan in its own framework."""
NAMES = (
    "plan.yaml",
    "hostfile",
    "megatron_args.json",
    "torchtitan_args.json",
    "ds_config.json",
    "accelerate.yaml",
    "env.json",
    "launch.sh",
    "rankfile",
    "ranks.json",
    FOLDER,
)


def plan_files(plan: Plan, target: str | None = None) -> dict[str, str]:
    """Texts by file name. `target` is one of `TARGETS`, the plan's own framework when absent.

    Raises InfeasibleError if the plan has no layout, or one that the framework refuses.
    """
    if plan.layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to launch."
        )
    files = {"plan.yaml": plan_text(plan)}
    target = target or plan.inputs.framework
    if target not in TARGETS:
        raise InputError("unknown target", where="--target", value=target, allowed=TARGETS)
    if target == "bridge":
        files |= bridge.bridge_files(plan)
    else:
        files |= _WRITERS[plan.inputs.framework if target in _WRAPPERS else target](plan)
        files |= _WRAPPERS[target](plan) if target in _WRAPPERS else {}
    files |= mapping_files(plan)
    mapping = plan.mapping
    if mapping is not None and (mapping.ranks is not None or mapping.matrix):
        places = mapping.ranks or ranks_on(plan.inputs.cluster, mapping.matrix)
        if len(places) > MOST_LISTED_RANKS:
            files["ranks.json"] = json.dumps([list(place) for place in places]) + "\n"
    return files


def refuse_taken(directory: Path, force: bool) -> None:
    """Says before a long search what would stop its result from being written. Raises InputError."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, not a folder. Choose another place with -o.")
    taken = [name for name in NAMES if (directory / name).exists()] if not force else []
    if taken:
        raise InputError(
            f"{directory} already holds {', '.join(taken)}. Choose another folder, or say --force to replace."
        )


def next_step(plan: Plan, directory: Path | None) -> str:
    """What to do with a plan, or where its files went, in words."""
    if plan.layout is None:
        written = "" if directory is None else f" Nothing was written to {directory}."
        more = (
            "give it more time with --time-limit"
            if plan.status == "unknown"
            else "change what is asked for"
        )
        return f"Next: {more}.{written}"
    if directory is None:
        return "Next: the same command with -o DIR writes this plan and the files that start it."
    script = shlex.join(["bash", str(directory / "launch.sh"), "slurm"])
    return f"Next: {script}\n      (the first lines of that script say what to set)"
