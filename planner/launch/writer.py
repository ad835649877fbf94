"""The shape that every framework's launch has: a program, its arguments, its environment, its own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.frameworks.record import Framework
from meshwright.planner.launch.launch_script import Program, launch_script
from meshwright.planner.launch.legal_launch import Launch, legal_launch
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.executions import ALLOW_PLACED

_NVLS_DEVICES = ("hopper", "blackwell")
"""Architectures whose NVLink switch can reduce."""
_LEAST_NVLS_TP = 4
_DEALT_IN_ORDER = "it deals them out in their own order, whose step is the plan's (in_order)"
"""What frameworks do with experts whose placement they cannot be told."""
_PERMUTED = (
    "the plan's step is that of experts as expert_placement puts them: start from a checkpoint whose experts "
    "and router rows are permuted so"
)
"""What a plan with `--allow expert-placement` assumes."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a framework's processes are started with."""

    program: Program
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables beside NCCL's, which are the same for all frameworks."""
    files: dict[str, str] = field(default_factory=dict)
    """The framework's own files: texts by name."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """How the launch files of one framework are made from a legal plan."""

    framework: Framework
    start: Callable[[Launch], Start]
    """Raises InfeasibleError for what no rule of the framework says."""

    def files(self, plan: Plan) -> dict[str, str]:
        """Texts by file name: the framework's own, env.json, hostfile (or its template), launch.sh.

        Where ranks do not run through the nodes in turn there is a rankfile too. Raises InfeasibleError if
        the framework would refuse the plan.
        """
        launch = legal_launch(plan, self.framework)
        start = self.start(launch)
        env = start.env | nccl_env(launch)
        program = start.program
        if plan.expert_placement is not None:
            how = _PERMUTED if set(ALLOW_PLACED) <= set(plan.inputs.allow) else _DEALT_IN_ORDER
            note = f"{self.framework.title} takes no placement of experts: {how}."
            program = replace(program, notes=(*program.notes, note))
        files = start.files | {
            "env.json": json_file(dict(sorted(env.items()))),
            **launch.placed.hostfile(),
            "launch.sh": launch_script(launch, program, start.args, env),
        }
        if launch.placed.gpus_per_host is None:
            files["rankfile"] = launch.placed.rankfile()
        return files


def json_file(document: Mapping[str, object] | list[str]) -> str:
    """The text of a JSON file for people to read."""
    return json.dumps(document, indent=1) + "\n"


def nccl_env(launch: Launch) -> dict[str, str]:
    """NCCL settings that the plan's use of the scale-up domain asks for.

    A domain of several nodes (GB200 NVL72) needs multi-node NVLink. Reductions in the NVLink switch (NVLS)
    are there from Hopper on; they are asked for where tensor parallelism would use them.
    """
    cluster = launch.inputs.cluster
    env = {}
    if cluster.nvlink_domain > cluster.gpus_per_node:
        env["NCCL_MNNVL_ENABLE"] = "1"
    if launch.layout.tp >= _LEAST_NVLS_TP and cluster.device.architecture in _NVLS_DEVICES:
        env["NCCL_NVLS_ENABLE"] = "1"
    return env
