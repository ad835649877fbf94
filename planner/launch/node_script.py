"""The bash script that starts a run of torchtitan, DeepSpeed or accelerate on every node."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import InfeasibleError
from meshwright.planner.launch.common_env import NOTES
from meshwright.planner.launch.rank_files import RankFiles
from meshwright.planner.launch.start_script import CHECK_HOSTS, NODE_RANK, SLURM, argument_lines
from meshwright.planner.plan.document import Plan

_HEADER = """\
#!/usr/bin/env bash
# Starts {framework} for {title}.
#{notes}
# In a Slurm allocation of the nodes in hostfile:  bash launch.sh slurm [more arguments]
# By hand, on each of those nodes:                 bash launch.sh node [more arguments]
#
# {usage}
# The folder of this script must be visible on all nodes. MASTER_PORT is 29500 unless set. The node's place in
# hostfile is NODE_RANK, else its place in the Slurm job step, else where its host name stands.
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
mapfile -t hosts < "$here/hostfile"
"""

_TORCHRUN = """\
exec torchrun --nnodes={hosts} --nproc-per-node={gpus} --node-rank="$node_rank" \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  {program} "${{args[@]}}" "$@"
"""

_PROCESSES = """\
# The plan's ranks do not run through the nodes in turn, so each process is told its own.
# rankfile: rank, line of hostfile from 0, local GPU.
export WORLD_SIZE={world}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true' EXIT
while read -r rank host gpu; do
  if [ "$host" -ne "$node_rank" ]; then continue; fi
  RANK=$rank LOCAL_RANK=$gpu "${{PYTHON:-python3}}" {program} "${{args[@]}}" "$@" < /dev/null &
  pids+=("$!")
done < "$here/rankfile"
for _ in "${{pids[@]}}"; do wait -n; done
"""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a framework's processes run."""

    framework: str
    words: str
    """Shell words after torchrun's own, already quoted."""
    usage: str
    """One line: what to set before the start."""
    before: str = ""
    """Shell lines ahead of the start, with `$node_rank`, `$MASTER_ADDR` and `$here` set."""
    notes: tuple[str, ...] = ()


def node_files(
    plan: Plan,
    placed: RankFiles,
    program: Program,
    args: Sequence[str],
    env: Mapping[str, str],
) -> dict[str, str]:
    """env.json, hostfile, launch.sh and, where ranks do not follow the nodes, rankfile."""
    files = {
        "env.json": json.dumps(dict(env), indent=1, sort_keys=True) + "\n",
        "hostfile": "".join(f"{host}\n" for host in placed.hosts),
        "launch.sh": _script(plan, placed, program, args, env),
    }
    if placed.gpus_per_host is None:
        files["rankfile"] = placed.rankfile()
    return files


def _title(plan: Plan) -> str:
    """The plan on one line; a name may hold anything, as JSON it holds no line break."""
    layout = plan.layout
    if layout is None:
        raise InfeasibleError("the plan has no layout: there is nothing to launch.")
    axes = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")
    degrees = " ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    name = json.dumps(plan.inputs.model.name)
    return f"{name}: {degrees}, {layout.num_micro_batches} micro-batches of {layout.micro_batch}"


def _script(
    plan: Plan,
    placed: RankFiles,
    program: Program,
    args: Sequence[str],
    env: Mapping[str, str],
) -> str:
    hosts = len(placed.hosts)
    parts = [
        _HEADER.format(
            framework=program.framework,
            title=_title(plan),
            notes="".join(f"\n# Note: {note}" for note in (*program.notes, *NOTES)),
            usage=program.usage,
        ),
        CHECK_HOSTS.format(hosts=hosts),
        SLURM.format(hosts=hosts),
        *(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())),
        "args=(\n" + "".join(f"  {line}\n" for line in argument_lines(args)) + ")\n",
        NODE_RANK,
        program.before,
    ]
    if placed.gpus_per_host is None:
        parts.append(_PROCESSES.format(world=len(placed.places), program=program.words))
    else:
        parts.append(
            _TORCHRUN.format(hosts=hosts, gpus=placed.gpus_per_host, program=program.words)
        )
    return "".join(parts)
