"""The files of `plan -o` and `launch`: the plan itself, and what starts it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from meshwright.cluster_specs.allocation import allocated_places
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.errors import InfeasibleError, InputError, InternalError, check_choice
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.drawing import one_line
from meshwright.planner.launch import schedulers
from meshwright.planner.launch.configurations import (
    DEEPSPEED_WRITER,
    FSDP2_WRITER,
    axolotl_files,
    llamafactory_files,
    swift_files,
    trl_files,
)
from meshwright.planner.launch.megatron import MEGATRON_WRITER, bridge_files
from meshwright.planner.launch.rank_files import FOLDER, mapping_files, planned_layout
from meshwright.planner.launch.torchtitan import TORCHTITAN_WRITER
from meshwright.planner.launch.writer import LISTED_HOSTS, Writer, unlaunched
from meshwright.planner.mixed.document import MixedPlan, mixed_text
from meshwright.planner.mixed.service import MixedResult
from meshwright.planner.plan.document import (
    MOST_LISTED_RANKS,
    Objective,
    Plan,
    SolverReport,
    SpaceReport,
)
from meshwright.planner.plan.texts import MIXED_FILE, plan_text

_WRITERS: dict[str, Writer] = {
    writer.framework.name: writer
    for writer in (MEGATRON_WRITER, TORCHTITAN_WRITER, DEEPSPEED_WRITER, FSDP2_WRITER)
}
_SCHEDULERS = {
    "slurm": schedulers.slurm_files,
    "openmpi": schedulers.openmpi_files,
    "kubernetes": schedulers.kubernetes_files,
    "volcano": schedulers.volcano_files,
    "trainjob": schedulers.trainjob_files,
    "skypilot": schedulers.skypilot_files,
    "ray": schedulers.ray_files,
}
_RECIPES = {
    "bridge": bridge_files,
    "llama-factory": llamafactory_files,
    "axolotl": axolotl_files,
    "trl": trl_files,
    "ms-swift": swift_files,
}
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
    "accelerator_config.json",
    "llama_factory.yaml",
    "axolotl.yaml",
    "trl.yaml",
    "trl.sh",
    "swift.yaml",
    "swift.sh",
    "fsdp.json",
    "bridge_overrides.json",
    "env.json",
    "launch.sh",
    "rankfile",
    "ranks.json",
    FOLDER,
)


def plan_files(plan: Plan | MixedPlan, target: str | None = None) -> dict[str, str]:
    """The plan and what starts it, as texts by file name.

    Parameters
    ----------
    plan
        A plan with a layout, of a pipeline through parts of a mixed cluster too.
    target
        One of `TARGETS`; by default the plan's own framework, or its recipes where only they can say it, or
        none where its scripts have no such step: then the plan and its mapping alone. A pipeline through
        parts takes its own framework alone, whose launch.sh starts it under any scheduler.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or one that the framework refuses.
    InputError
        An unknown target, or one that does not start a pipeline through parts.
    """
    if isinstance(plan, MixedPlan):
        if target not in (None, plan.inputs.framework):
            what = (
                f"a pipeline through parts of a cluster is started by {plan.inputs.framework}'s launch.sh, "
                "whose hostfile has the plan's order: leave --target out"
            )
            raise InputError(what, where="--target", value=target)
        return {MIXED_FILE: mixed_text(plan)} | pipeline_files(plan)
    planned_layout(plan)
    written = {"plan.yaml": plan_text(plan)}
    if target is None and unlaunched(plan.inputs):
        return written | mapping_files(plan) | _long_rank_list(plan)
    target = target or _own_target(plan)
    check_choice(target, TARGETS, "--target", "unknown target")
    writer = _WRITERS.get(target, _WRITERS[plan.inputs.framework])
    files = written | (_RECIPES[target](plan) if target in _RECIPES else writer.files(plan))
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
    if plan.inputs.framework == DEFAULT_FRAMEWORK and plan.inputs.adapters is not None:
        only_bridge = True
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
    """What to do with a plan, or where its files went, in words.

    Parameters
    ----------
    plan
        Of any status.
    directory
        Where its files were to be written; None where none were asked for.
    """
    if plan.layout is None:
        advice = "change what is asked for"
        if plan.status == "unknown":
            advice = "give it more time with --time-limit"
        written = "" if directory is None else f" Nothing was written to {directory}."
        return f"Next: {advice}.{written}"
    if directory is None:
        files = "its mapping" if unlaunched(plan.inputs) else "the files that start it"
        return f"Next: the same command with -o DIR writes this plan and {files}."
    if why := unlaunched(plan.inputs):
        return f"Next: {why}."
    if _own_target(plan) == "bridge":
        return f"Next: {_BRIDGE_NEXT.format(file=directory / 'bridge_overrides.json')}."
    # Without neighbours the script starts on the node that it is called on, under Slurm or not.
    ranks = None if plan.mapping is None else plan.mapping.ranks
    mode = "node" if ranks and len({node for node, _ in ranks}) == 1 else "slurm"
    script = shlex.join(["bash", str(directory / "launch.sh"), mode])
    return f"Next: {script}\n      (the first lines of that script say what to set)"


_BRIDGE_NEXT = (
    "hand the overrides of {file} to a Megatron-Bridge recipe of the same model, "
    "with env.json beside it as the environment"
)


def next_step_on_parts(result: MixedResult, directory: Path | None) -> str:
    """What to do with a plan on a mixed cluster, or where its files went, in words.

    Parameters
    ----------
    result
        Of a search over a mixed cluster, with any status.
    directory
        Where its files were to be written; None where none were asked for.
    """
    document = result.document
    if document.layout is None:
        if result.alone is not None:
            return next_step(result.alone, directory)
        return "Next: change what is asked for, or give it more time with --time-limit."
    plan = stand_in(document)
    why = unlaunched(plan.inputs)
    if directory is None:
        files = "the order of its hosts" if why else "the files that start it"
        return f"Next: the same command with -o DIR writes this plan and {files}."
    made = f"make {directory / 'hostfile'} of {_HOSTFILE}"
    if names_hosts(document):
        made = f"keep the order of {directory / 'hostfile'}"
    if why:
        return f"Next: {made}, which is the plan's; {why}."
    if _own_target(plan) == "bridge":
        return f"Next: {made}, and {_BRIDGE_NEXT.format(file=directory / 'bridge_overrides.json')}."
    script = shlex.join(["bash", str(directory / "launch.sh"), "slurm"])
    return f"Next: {script}" if names_hosts(document) else f"Next: {made}, then {script}"


# The files that start a pipeline through parts of a mixed cluster.
#
# Ranks run through the nodes in turn, so that the order of the hosts decides which part runs which pipeline
# rank. A scheduler lists a job's nodes by name: the hosts are never taken from it.


MIXED_FILES = (MIXED_FILE, *PLAN_FILES)
_OLDEST_FIRST = ("volta", "ampere", "ada", "hopper", "blackwell")
_HOSTFILE = "hostfile.template"
LONGEST_STEM = 200
"""Letters of a part's name in those of its nodes, which have 253 at most."""
_TEMPLATE = """\
# One host a line, in this order, as ranks run through them in turn: {order}.
# Put your hosts in place of these lines and call the file hostfile.
"""
_CHECK = """\
# The order of hostfile decides which nodes run which part of the pipeline: a job's own order is not taken.
if [ ! -s "$here/hostfile" ]; then
  echo "launch.sh: make hostfile of hostfile.template: the order of its hosts is the plan's" >&2
  exit 2
fi
"""


def mixed_files(result: MixedResult) -> dict[str, str]:
    """The plan and what starts it, as texts by file name.

    Parameters
    ----------
    result
        With a pipeline through parts, or the plan of a part that is fastest alone.

    Raises
    ------
    InfeasibleError
        There is no plan, or the framework refuses it.
    """
    if result.alone is not None:
        return {MIXED_FILE: mixed_text(result.document)} | plan_files(result.alone)
    return plan_files(result.document)


def pipeline_files(document: MixedPlan) -> dict[str, str]:
    """What starts a pipeline through parts, as texts by file name.

    Parameters
    ----------
    document
        The plan, whose own file is not among them.

    Raises
    ------
    InfeasibleError
        There is no such pipeline, or the framework refuses it.
    """
    if document.layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {document.status}): nothing to launch."
        )
    plan = stand_in(document)
    order = one_line(", then ".join(f"{count} of {part}" for part, count in document.nodes))
    hosts = "".join(f"{node.name}\n" for node in plan.inputs.cluster.nodes)
    named = {_HOSTFILE: _TEMPLATE.format(order=order) + hosts}
    if names_hosts(document):
        named = {"hostfile": hosts}
    if unlaunched(plan.inputs):
        return named
    target = _own_target(plan)
    if target in _RECIPES:
        return named | _RECIPES[target](plan)
    files = writer_of(target).files(plan)
    if "rankfile" in files:
        raise InternalError("ranks of a mixed plan do not run through whole nodes")
    if "hostfile" in named:
        return files
    del files["hostfile"]
    files |= named
    files["launch.sh"] = files["launch.sh"].replace(LISTED_HOSTS, _CHECK + LISTED_HOSTS, 1)
    return files


def _clusters_by_name(document: MixedPlan) -> dict[str, ClusterSpec]:
    """The clusters of all parts."""
    parts = document.cluster.parts
    return {document.cluster.name_of(index): part.cluster for index, part in enumerate(parts)}


def names_hosts(document: MixedPlan) -> bool:
    """Whether every part that a pipeline runs on lists its nodes, so that its hosts are known.

    Parameters
    ----------
    document
        With a pipeline through parts.
    """
    clusters = _clusters_by_name(document)
    return all(clusters[part].nodes for part in document.runs_on)


def stand_in(document: MixedPlan) -> Plan:
    """The plan on nodes that are all of the oldest kind, whose settings the others take too.

    Parameters
    ----------
    document
        With a pipeline through parts: launch files are made as if all of its nodes were one cluster.
    """
    assert document.layout is not None
    clusters = _clusters_by_name(document)
    oldest = min((clusters[name] for name in document.runs_on), key=_age)
    names: list[str] = []
    for part, count in document.nodes:
        cluster = clusters[part]
        if names_hosts(document):
            places = allocated_places(cluster, count * cluster.gpus_per_node)
            names += [
                cluster.nodes[node].name for node in dict.fromkeys(node for node, _ in places)
            ]
            continue
        stem = re.sub(r"[^A-Za-z0-9.-]", "-", part)[:LONGEST_STEM].lstrip("-.") or "part"
        if f"{stem}-node-00001" in names:
            stem += f"-{len(names)}"
        names += [f"{stem}-node-{number:05d}" for number in range(1, count + 1)]
    gpus = len(names) * oldest.gpus_per_node
    cluster = oldest.model_copy(
        update={
            "name": document.cluster.name,
            "gpus": gpus,
            "elastic": False,
            "levels": (),
            "measured": (),
            "host_memory_gib": None,
            "nodes": tuple(NodeSpec(name=name) for name in names),
        }
    )
    solver = document.solver
    return Plan.model_construct(
        schema_=1,
        status=document.status,
        objective=Objective(step_time_s=None, lower_bound_s=None, gap=None),
        layout=document.layout,
        execution=document.execution,
        predicted=None,
        mapping=None,
        expert_placement=None,
        solver=SolverReport.model_construct(
            wall_s=solver.wall_s, space=SpaceReport.model_construct()
        ),
        inputs=document.inputs.model_copy(update={"cluster": cluster, "gpus": gpus}),
    )


def _age(cluster: ClusterSpec) -> int:
    architecture = cluster.device.architecture
    return _OLDEST_FIRST.index(architecture) if architecture in _OLDEST_FIRST else 0
