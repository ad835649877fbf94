"""What hands a launch to a cluster: a Slurm batch script, an OpenMPI rankfile.

Syntax read in Slurm 22.05 (`--segment` in 24.05) and OpenMPI 4.1; `kubernetes` has the JobSet.
"""

from __future__ import annotations

import re
from collections import Counter

from meshwright.planner.launch.launch_script import job_hosts
from meshwright.planner.launch.ranks.placed import PlacedRanks, placed_ranks
from meshwright.planner.plan.document import Plan

_SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
{parts}# sbatch sorts the nodes, so the job step inside is given their planned order.
# Account, partition and time limit are yours: sbatch --account=... --partition=... --time=... job.sbatch
{shared}set -euo pipefail

# Slurm runs a copy of this script: LAUNCH_DIR is the folder of launch.sh.
export LAUNCH_DIR="${{LAUNCH_DIR:-${{SLURM_SUBMIT_DIR:-.}}}}"
exec bash "$LAUNCH_DIR/launch.sh" slurm "$@"
"""
_PART = """\
#SBATCH --nodes={hosts}
#SBATCH --ntasks={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
"""
_SHARED = """\
# Other jobs may run on the nodes that the plan does not fill: where your site gives a job no processors and
# memory by its GPUs (DefCpuPerGPU, DefMemPerGPU), add --cpus-per-gpu=... and --mem-per-gpu=...
"""

_MPI_SCRIPT = """\
#!/usr/bin/env bash
# Starts one process per line of rankfile.openmpi; each runs `bash mpi.sh rank PROGRAM...` on its own GPU.
# Usage: bash mpi.sh PROGRAM [arguments]
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
if [ "${{1:-}}" = rank ]; then
  shift
  gpus=({gpus})
  export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
  export LOCAL_RANK="${{gpus[$RANK]}}"
  exec "$@"
fi
{hosts}master=${{hosts[0]:-}}
if [ -z "${{MASTER_ADDR:-}}$master" ]; then
  echo "mpi.sh: set MASTER_ADDR to the first host of the job" >&2
  exit 2
fi
MASTER_ADDR="${{MASTER_ADDR:-$master}}" MASTER_PORT="${{MASTER_PORT:-29500}}" \\
  exec mpirun -np {world} --rankfile "$here/rankfile.openmpi" -x MASTER_ADDR -x MASTER_PORT \\
  bash "$here/mpi.sh" rank "$@"
"""


def slurm_files(plan: Plan) -> dict[str, str]:
    """job.sbatch: nodes with the GPUs that the plan uses of them, alone on them where it uses all.

    Nodes with unequal numbers of GPUs are the parts of a heterogeneous job (Slurm's
    heterogeneous_jobs.html), one for each number. Where one NVLink domain spans several nodes the job asks
    for whole segments of it.
    """
    placed, cluster = placed_ranks(plan), plan.inputs.cluster
    names = [host for host in placed.hosts if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host)]
    named = len(names) == len(placed.hosts) and bool(cluster.nodes)
    segment, parts = segment_of(plan, placed), []
    for gpus, hosts in placed.alike:
        text = _PART.format(hosts=len(hosts), gpus=gpus)
        if gpus == cluster.gpus_per_node:
            text += "#SBATCH --exclusive\n"
        if named:
            in_turn = hosts if len(placed.alike) > 1 else range(len(placed.hosts))
            text += f"#SBATCH --nodelist={','.join(placed.hosts[host] for host in in_turn)}\n"
        if segment > 1 and len(placed.alike) == 1 and len(hosts) % segment == 0:
            text += f"#SBATCH --segment={segment}\n"
        parts.append(text)
    shares = any(gpus < cluster.gpus_per_node for gpus, _ in placed.alike)
    text = _SBATCH.format(
        name=job_name(plan),
        parts="#SBATCH hetjob\n".join(parts),
        shared=_SHARED if shares else "",
    )
    return {"job.sbatch": text}


def openmpi_files(plan: Plan) -> dict[str, str]:
    """rankfile.openmpi (rank r on its host, bound to the slot of its GPU) and mpi.sh."""
    placed = placed_ranks(plan)
    gpus = " ".join(str(gpu) for _, gpu in placed.places)
    hosts = 'mapfile -t hosts < "$here/hostfile"\n'
    if not placed.names_known:
        hosts = job_hosts(placed)
    script = _MPI_SCRIPT.format(gpus=gpus, world=len(placed.places), hosts=hosts)
    return {"rankfile.openmpi": placed.openmpi_rankfile(), "mpi.sh": script}


def job_name(plan: Plan) -> str:
    """The model's name as a DNS label: lower-case letters, digits and dashes, at most 40 characters."""
    label = re.sub(r"[^a-z0-9]+", "-", plan.inputs.model.name.lower()).strip("-")[:40].strip("-")
    return label if re.match(r"[a-z]", label) else f"train-{label}".strip("-")


def segment_of(plan: Plan, placed: PlacedRanks) -> int:
    """Nodes that the plan uses of every scale-up domain of several nodes; 1 where they differ."""
    cluster = plan.inputs.cluster
    domain = max(1, cluster.nvlink_domain // cluster.gpus_per_node)
    in_domain = Counter(node // domain for node in placed.nodes)
    nodes = set(in_domain.values())
    return nodes.pop() if domain > 1 and len(nodes) == 1 else 1
