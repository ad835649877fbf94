"""The files of `plan -o` and `launch`: the plan itself, and what starts it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from meshwright.errors import InputError
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.launch import schedulers
from meshwright.planner.launch.accelerate import FSDP2_WRITER
from meshwright.planner.launch.bridge import bridge_files
from meshwright.planner.launch.deepspeed import DEEPSPEED_WRITER
from meshwright.planner.launch.kubernetes import kubernetes_files
from meshwright.planner.launch.megatron import MEGATRON_WRITER
from meshwright.planner.launch.ranks.placed import planned_layout
from meshwright.planner.launch.ranks.texts import FOLDER, mapping_files
from meshwright.planner.launch.torchtitan import TORCHTITAN_WRITER
from meshwright.planner.launch.writer import Writer
from meshwright.planner.plan.document import MOST_LISTED_RANKS, Plan
from meshwright.planner.plan.texts import plan_text

_WRITERS: dict[str, Writer] = {
    writer.framework.name: writer
    for writer in (MEGATRON_WRITER, TORCHTITAN_WRITER, DEEPSPEED_WRITER, FSDP2_WRITER)
}
_SCHEDULERS = {
    "slurm": schedulers.slurm_files,
    "openmpi": schedulers.openmpi_files,
    "kubernetes": kubernetes_files,
}
_RECIPES = {"bridge": bridge_files}
"""What starts the framework by itself, and takes settings only."""
TARGETS = (*_WRITERS, *_RECIPES, *_SCHEDULERS)
"""Frameworks, and the schedulers that start a plan in its own framework."""
PLAN_FILES = (
    "plan.yaml",
    "hostfile",
    "hostfile.template",
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
    """The plan and what starts it, as texts by file name.

    Parameters
    ----------
    plan
        A plan with a layout.
    target
        One of `TARGETS`; by default the plan's own framework, or its recipes where only they can say it.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or one that the framework refuses.
    InputError
        An unknown target.
    """
    planned_layout(plan)
    target = target or _own_target(plan)
    if target not in TARGETS:
        raise InputError("unknown target", where="--target", value=target, allowed=TARGETS)
    files = {"plan.yaml": plan_text(plan)}
    writer = _WRITERS.get(target, _WRITERS[plan.inputs.framework])
    if target in _RECIPES:
        files |= _RECIPES[target](plan)
    else:
        files |= writer.files(plan)
    if target in _SCHEDULERS:
        files |= _SCHEDULERS[target](plan)
    return files | mapping_files(plan, writer.framework) | _long_rank_list(plan)


def writer_of(framework: str) -> Writer:
    """How the launch files of a framework are made.

    Parameters
    ----------
    framework
        Its name, as plans have it.
    """
    return _WRITERS[framework]


def _own_target(plan: Plan) -> str:
    """The target of a plan that names none."""
    execution = plan.execution
    only_bridge = execution is not None and (execution.te_loss or execution.fp8_attention)
    return "bridge" if only_bridge else plan.inputs.framework


def _long_rank_list(plan: Plan) -> dict[str, str]:
    """ranks.json, where the ranks are too many for the plan document to list."""
    mapping = plan.mapping
    if mapping is None or (mapping.ranks is None and not mapping.matrix):
        return {}
    places = mapping.ranks or ranks_on(plan.inputs.cluster, mapping.matrix)
    if len(places) <= MOST_LISTED_RANKS:
        return {}
    return {"ranks.json": json.dumps([list(place) for place in places]) + "\n"}


def next_step(plan: Plan, directory: Path | None) -> str:
    """What to do with a plan, or where its files went, in words."""
    if plan.layout is None:
        advice = "change what is asked for"
        if plan.status == "unknown":
            advice = "give it more time with --time-limit"
        written = "" if directory is None else f" Nothing was written to {directory}."
        return f"Next: {advice}.{written}"
    if directory is None:
        return "Next: the same command with -o DIR writes this plan and the files that start it."
    script = shlex.join(["bash", str(directory / "launch.sh"), "slurm"])
    return f"Next: {script}\n      (the first lines of that script say what to set)"
