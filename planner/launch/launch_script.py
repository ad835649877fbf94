"""launch.sh, which starts a run on every node: in a Slurm allocation, or by hand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.launch.legal_launch import Launch
from meshwright.planner.launch.ranks.placed import PlacedRanks

_HEADER = """\
#!/usr/bin/env bash
# Starts {framework} for {title}.
#{notes}
# In a Slurm allocation of the plan's nodes:       bash launch.sh slurm [{more}]
# By hand, on each of those nodes:                 bash launch.sh node [{more}]
#
# {usage}
# The folder of this script must be visible on all nodes. MASTER_PORT is 29500 unless set. The node's place in
# hostfile is NODE_RANK, else its place in the Slurm job step, else where its host name stands.
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
"""

LISTED_HOSTS = 'mapfile -t hosts < "$here/hostfile"\n'
"""Shell line that fills `hosts` where the plan names them."""

_JOB_HOSTS = """\
# The plan's cluster names no hosts. They are those of hostfile, if you make one of hostfile.template; else
# the job's, in the scheduler's order, and the planned nodes of every block stay next to each other.
hosts=()
if [ -s "$here/hostfile" ]; then
  mapfile -t hosts < "$here/hostfile"
else
  allocated=()
  if [ -n "${{SLURM_JOB_NODELIST:-}}" ]; then
    mapfile -t allocated < <({hostnames})
  elif [ -n "${{PBS_NODEFILE:-}}" ]; then
    mapfile -t allocated < <(awk '!seen[$0]++' "$PBS_NODEFILE")
  fi
  {turns}
  if [ "${{#allocated[@]}}" -eq 0 ] && [ "${{#turns[@]}}" -eq 1 ]; then allocated=("$(hostname)"); fi
  if [ "${{#allocated[@]}}" -gt 0 ] && [ "${{#allocated[@]}}" -ne "${{#turns[@]}}" ]; then
    echo "the job has ${{#allocated[@]}} nodes, the plan needs ${{#turns[@]}}" >&2
    exit 2
  fi
  if [ "${{#allocated[@]}}" -gt 0 ]; then
    for turn in "${{turns[@]}}"; do hosts+=("${{allocated[$turn]}}"); done
  fi
fi
"""
"""Shell lines that fill `hosts`, with the command that prints those of a Slurm job, and their turns."""

_CHECK_JOB_HOSTS = """\
if [ "${{#hosts[@]}}" -eq 0 ] && {{ [ -z "${{NODE_RANK:-}}" ] || [ -z "${{MASTER_ADDR:-}}" ]; }}; then
  echo "launch.sh: which hosts? Start inside a job, or make hostfile of hostfile.template," \\
    "or set NODE_RANK and MASTER_ADDR on every node" >&2
  exit 2
fi
if [ "${{#hosts[@]}}" -ne 0 ] && [ "${{#hosts[@]}}" -ne {hosts} ]; then
  echo "launch.sh: there are ${{#hosts[@]}} hosts, the plan needs {hosts} nodes" >&2
  exit 2
fi
"""

_CHECK_HOSTS = """\
if [ "${{#hosts[@]}}" -ne {hosts} ]; then
  echo "launch.sh: hostfile has ${{#hosts[@]}} lines, the plan needs {hosts} nodes" >&2
  exit 2
fi
"""

_SLURM = """\
mode=${{1:-}}
if [ "$#" -gt 0 ]; then shift; fi
case "$mode" in
  slurm)
{parts}    # One task per host, in their order; --nodelist would sort the names.
    ordered=$(mktemp)
    printf '%s\\n' "${{hosts[@]}}" > "$ordered"
    SLURM_HOSTFILE="$ordered" exec srun --distribution=arbitrary --nodes={hosts} --ntasks={hosts} \\
      --kill-on-bad-exit=1 bash "$here/launch.sh" node "$@"
    ;;
  node) ;;
  *)
    echo "launch.sh: say 'slurm' or 'node' (see the top of this file)" >&2
    exit 2
    ;;
esac
"""

_SRUN_PARTS = """\
    # job.sbatch asks for nodes by their number of GPUs: a part of the job for each number, and one step for
    # all parts, in which a node finds its place by its name.
    if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then
      exec srun \\
{parts}        bash "$here/launch.sh" node "$@"
    fi
"""

_NODE_RANK_OF_PARTS = """\
if [ -z "${NODE_RANK:-}" ] && [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
  for i in "${!hosts[@]}"; do
    if [ "${hosts[$i]}" = "${SLURMD_NODENAME:-$(hostname)}" ]; then NODE_RANK=$i; fi
  done
fi
"""
"""Tasks of a job of parts are numbered part by part, so SLURM_PROCID is no place in `hosts`."""

_NODE_RANK = """\
node_rank=${NODE_RANK:-${SLURM_PROCID:-}}
if [ -z "$node_rank" ]; then
  me=$(hostname)
  for i in "${!hosts[@]}"; do
    if [ "${hosts[$i]}" = "$me" ]; then node_rank=$i; fi
  done
  for i in "${!hosts[@]}"; do
    if [ -z "$node_rank" ] && [ "${hosts[$i]%%.*}" = "${me%%.*}" ]; then node_rank=$i; fi
  done
  if [ -z "$node_rank" ]; then
    echo "launch.sh: $me is not in hostfile; set NODE_RANK to the line it stands for, from 0" >&2
    exit 2
  fi
fi
export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}" MASTER_PORT="${MASTER_PORT:-29500}"
"""

_TORCHRUN = """\
exec torchrun --nnodes={hosts} --nproc-per-node={gpus} --node-rank="$node_rank" \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  {command} {arguments} "$@"
"""

_PROCESSES = """\
# The plan's ranks do not run through the nodes in turn, so each process is told its own.
# rankfile: rank, line of hostfile from 0, local GPU.
export WORLD_SIZE={world}
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true' EXIT
while read -r rank host gpu; do
  if [ "$host" -ne "$node_rank" ]; then continue; fi
  RANK=$rank LOCAL_RANK=$gpu "${{PYTHON:-python3}}" {command}{space}{arguments} "$@" < /dev/null &
  pids+=("$!")
done < "$here/rankfile"
for _ in "${{pids[@]}}"; do wait -n; done
"""

FABRIC_NOTE = (
    "NCCL_IB_HCA (order of the adapters), NCCL_IB_SL and NCCL_IB_TC (service level, traffic class) depend on "
    "your fabric and are left to you."
)
_TITLE_AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the processes of a framework run."""

    framework: str
    """As the script's first line names it."""
    command: str
    """Shell words after torchrun's own, already quoted."""
    usage: str
    """Comment: what to set before the start."""
    variant: str = ""
    """What tells the model that is trained from others of its name."""
    notes: tuple[str, ...] = ()
    """Single lines, printed at the start: where the run is another than the plan's, for want of a switch."""
    checks: str = ""
    """Shell lines ahead of the environment: they see to what the user must set."""
    data_arguments: str = ""
    """Shell words after the planned arguments, from variables that `checks` sets."""
    takes: str = "more arguments"
    """What may follow on the command line, for the usage."""
    before: str = ""
    """Shell lines ahead of the start, with `$node_rank`, `$MASTER_ADDR` and `$here` set."""


def launch_script(
    launch: Launch, program: Program, args: Sequence[str], env: Mapping[str, str]
) -> str:
    """The text of launch.sh.

    Where ranks run through the nodes in turn the nodes start torchrun with a static rendezvous (its c10d
    rendezvous sorts the nodes), elsewhere every rank of `rankfile` by itself.

    Parameters
    ----------
    launch
        The plan and the places of its ranks.
    program
        What a process runs.
    args
        The program's arguments, not yet quoted.
    env
        Environment variables by name.
    """
    hosts = len(launch.placed.hosts)
    notes = "".join(f"\n# Note: {note}" for note in (*program.notes, FABRIC_NOTE))
    header = _HEADER.format(
        framework=program.framework,
        title=_title(launch, program.variant),
        notes=notes,
        more=program.takes,
        usage=program.usage,
    )
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items())]
    arguments = "".join(f"  {line}\n" for line in _argument_lines(args))
    parts = [
        header,
        *_hosts(launch.placed),
        _SLURM.format(hosts=hosts, parts=_srun_parts(launch.placed)),
        program.checks,
        *exports,
        f"args=(\n{arguments})\n",
        _NODE_RANK_OF_PARTS if len(launch.placed.alike) > 1 else "",
        _NODE_RANK,
        _spoken(program.notes),
        program.before,
        _start(launch, program),
    ]
    return "".join(parts)


def _hosts(placed: PlacedRanks) -> tuple[str, str]:
    """Shell lines that fill `hosts`, and that check their number."""
    count = len(placed.hosts)
    if placed.names_known:
        return LISTED_HOSTS, _CHECK_HOSTS.format(hosts=count)
    return (
        job_hosts(placed),
        _CHECK_JOB_HOSTS.format(hosts=count),
    )


def job_hosts(placed: PlacedRanks) -> str:
    """Shell lines that fill `hosts` where the plan names none."""
    turns, hostnames = _turns_text(placed.turns), 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    groups = [f"SLURM_JOB_NODELIST_HET_GROUP_{part}" for part in range(len(placed.alike))]
    if len(groups) > 1:
        lists = " ".join(f'"${{{group}:-}}"' for group in groups)
        each = f'for list in {lists}; do scontrol show hostnames "$list"; done'
        hostnames = f'if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then {each}; else {hostnames}; fi'
    if placed.turns_by_gpus != placed.turns:
        by_gpus = _turns_text(placed.turns_by_gpus)
        turns += f'\n  if [ "${{SLURM_HET_SIZE:-1}}" -gt 1 ]; then {by_gpus}; fi'
    return _JOB_HOSTS.format(hostnames=hostnames, turns=turns)


def _turns_text(turns: list[int]) -> str:
    """A shell line: the place of every planned node among the nodes of a job, in the order of ranks."""
    if turns == list(range(len(turns))):
        return f"mapfile -t turns < <(seq 0 {len(turns) - 1})"
    return f"turns=({' '.join(map(str, turns))})"


def _srun_parts(placed: PlacedRanks) -> str:
    """Shell lines that start the step of a job that has a part for each number of GPUs; none for one."""
    if len(placed.alike) == 1:
        return ""
    parts = [
        f"        --kill-on-bad-exit=1 --nodes={len(hosts)} --ntasks={len(hosts)} --gpus-per-node={gpus} "
        for gpus, hosts in placed.alike
    ]
    return _SRUN_PARTS.format(parts=": \\\n".join(parts) + "\\\n")


def _spoken(notes: Sequence[str]) -> str:
    """Shell lines that print the notes once, on the first node."""
    if not notes:
        return ""
    sentences = " \\\n".join(f"    {shlex.quote(note)}" for note in notes)
    return f"""\
if [ "$node_rank" = 0 ]; then
  printf 'launch.sh: note: %s\\n' \\
{sentences} >&2
fi
"""


def _title(launch: Launch, variant: str) -> str:
    """The plan on one line; a name may hold anything, as JSON it holds no line break."""
    layout = launch.layout
    name = json.dumps(launch.inputs.model.name)
    degrees = " ".join(f"{axis} {getattr(layout, axis)}" for axis in _TITLE_AXES)
    batch = f"{layout.num_micro_batches} micro-batches of {layout.micro_batch}"
    return f"{name}{variant}: {degrees}, {batch}"


def _start(launch: Launch, program: Program) -> str:
    placed = launch.placed
    arguments = f'"${{args[@]}}" {program.data_arguments}'.rstrip()
    if placed.gpus_per_host is not None:
        return _TORCHRUN.format(
            hosts=len(placed.hosts),
            gpus=placed.gpus_per_host,
            command=program.command,
            arguments=arguments,
        )
    return _PROCESSES.format(
        world=len(placed.places),
        command=program.command,
        space=" \\\n    " if program.data_arguments else " ",
        arguments=arguments,
    )


def _argument_lines(args: Sequence[str]) -> list[str]:
    """One flag with its values per line, quoted for the shell."""
    lines: list[list[str]] = []
    for arg in args:
        if arg.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(arg))
    return [" ".join(line) for line in lines]
