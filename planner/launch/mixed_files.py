"""The files that start a pipeline through parts of a mixed cluster.

Ranks run through the nodes in turn, so that the order of the hosts decides which part runs which pipeline
rank. A scheduler lists a job's nodes by name: the hosts are never taken from it.
"""

from __future__ import annotations

import re

from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.launch.launch_script import LISTED_HOSTS
from meshwright.planner.launch.plan_files import PLAN_FILES, plan_files, writer_of
from meshwright.planner.mixed.document import MixedPlan
from meshwright.planner.mixed.service import MixedResult
from meshwright.planner.mixed.texts import MIXED_FILE, mixed_text
from meshwright.planner.plan.document import Objective, Plan
from meshwright.planner.plan.solver_document import SolverReport, SpaceReport

MIXED_FILES = (MIXED_FILE, *PLAN_FILES)
_OLDEST_FIRST = ("volta", "ampere", "ada", "hopper", "blackwell")
_HOSTFILE = "hostfile.template"
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
    files = {MIXED_FILE: mixed_text(result.document)}
    if result.alone is not None:
        return files | plan_files(result.alone)
    return files | pipeline_files(result.document)


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
    files = writer_of(document.inputs.framework).files(stand_in(document))
    if "rankfile" in files:
        raise InternalError("ranks of a mixed plan do not run through whole nodes")
    order = ", then ".join(f"{count} of {part}" for part, count in document.nodes)
    files[_HOSTFILE] = _TEMPLATE.format(order=order) + files.pop("hostfile")
    files["launch.sh"] = files["launch.sh"].replace(LISTED_HOSTS, _CHECK + LISTED_HOSTS, 1)
    return files


def stand_in(document: MixedPlan) -> Plan:
    """The plan on nodes that are all of the oldest kind, whose settings the others take too."""
    assert document.layout is not None
    clusters = {
        document.cluster.name_of(index): part.cluster
        for index, part in enumerate(document.cluster.parts)
    }
    oldest = min((clusters[name] for name in document.runs_on), key=_age)
    names = [
        f"{re.sub(r'[^A-Za-z0-9.-]', '-', part)}-node-{number:05d}"
        for part, count in document.nodes
        for number in range(1, count + 1)
    ]
    gpus = len(names) * oldest.gpus_per_node
    cluster = oldest.model_copy(
        update={
            "name": document.cluster.name,
            "gpus": gpus,
            "elastic": False,
            "levels": (),
            "measured": (),
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
