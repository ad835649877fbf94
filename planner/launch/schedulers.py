"""What hands a launch to a cluster: a Slurm batch script, an OpenMPI rankfile, a Kubernetes JobSet.

Syntax read in Slurm 22.05 (`--segment` in 24.05), OpenMPI 4.1, JobSet v1alpha2 and Kueue 0.12.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

from meshwright.errors import InfeasibleError
from meshwright.planner.launch.launch_script import JOB_HOSTS, turns_text
from meshwright.planner.launch.ranks.placed import PlacedRanks, placed_ranks
from meshwright.planner.plan.document import Plan

_SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
{options}# sbatch sorts the nodes, so the job step inside is given their planned order.
# Account, partition and time limit are yours: sbatch --account=... --partition=... --time=... job.sbatch
set -euo pipefail

# Slurm runs a copy of this script: LAUNCH_DIR is the folder of launch.sh.
export LAUNCH_DIR="${{LAUNCH_DIR:-${{SLURM_SUBMIT_DIR:-.}}}}"
exec bash "$LAUNCH_DIR/launch.sh" slurm "$@"
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
    """job.sbatch; where one NVLink domain spans several nodes the job asks for whole segments of it."""
    placed = placed_ranks(plan)
    hosts = len(placed.hosts)
    segment = _segment(plan, placed)
    options = []
    names = [host for host in placed.hosts if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host)]
    if len(names) == hosts and plan.inputs.cluster.nodes:
        options.append(f"#SBATCH --nodelist={','.join(names)}\n")
    if segment > 1 and hosts % segment == 0:
        options.append(f"#SBATCH --segment={segment}\n")
    gpus = max(len(ranks) for ranks in placed.ranks_of_hosts())
    text = _SBATCH.format(name=job_name(plan), hosts=hosts, gpus=gpus, options="".join(options))
    return {"job.sbatch": text}


def openmpi_files(plan: Plan) -> dict[str, str]:
    """rankfile.openmpi (rank r on its host, bound to the slot of its GPU) and mpi.sh."""
    placed = placed_ranks(plan)
    gpus = " ".join(str(gpu) for _, gpu in placed.places)
    hosts = 'mapfile -t hosts < "$here/hostfile"\n'
    if not placed.names_known:
        hosts = JOB_HOSTS.format(turns=turns_text(placed))
    script = _MPI_SCRIPT.format(gpus=gpus, world=len(placed.places), hosts=hosts)
    return {"rankfile.openmpi": placed.openmpi_rankfile(), "mpi.sh": script}


def kubernetes_files(plan: Plan) -> dict[str, str]:
    """jobset.yaml: one indexed Job, one pod per node, and Kueue's topology request.

    Image, queue and volume claim say replace-me. Kubernetes chooses the nodes: a pod's index is its
    node's rank.
    """
    placed = placed_ranks(plan)
    if placed.gpus_per_host is None:
        raise InfeasibleError(
            "kubernetes: a JobSet numbers its pods node by node, but this plan's ranks do not run through "
            "the nodes in turn. Use --target slurm or openmpi, or plan for whole nodes."
        )
    return {
        "jobset.yaml": yaml.safe_dump(_jobset(plan, placed, placed.gpus_per_host), sort_keys=False)
    }


def job_name(plan: Plan) -> str:
    """The model's name as a DNS label: lower-case letters, digits and dashes, at most 40 characters."""
    label = re.sub(r"[^a-z0-9]+", "-", plan.inputs.model.name.lower()).strip("-")[:40].strip("-")
    return label if re.match(r"[a-z]", label) else f"train-{label}".strip("-")


def _jobset(plan: Plan, placed: PlacedRanks, gpus: int) -> dict[str, Any]:
    name, hosts = job_name(plan), len(placed.hosts)
    domain = _segment(plan, placed)
    topology = {"kueue.x-k8s.io/podset-preferred-topology": "cloud.provider.com/topology-block"}
    if domain > 1 and hosts % domain == 0:
        topology |= {
            "kueue.x-k8s.io/podset-slice-required-topology": "cloud.provider.com/topology-rack",
            "kueue.x-k8s.io/podset-slice-size": str(domain),
        }
    script = (
        "NODE_RANK=$JOB_COMPLETION_INDEX "
        f"MASTER_ADDR={name}-nodes-0-0.{name} "
        "exec bash /launch/launch.sh node"
    )
    container = {
        "name": "train",
        "image": "replace-me/training-image:latest",
        "command": ["bash", "-c", script],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [{"name": "launch", "mountPath": "/launch", "readOnly": True}],
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "launch", "persistentVolumeClaim": {"claimName": "replace-me"}}],
    }
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"annotations": topology}, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "replace-me"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _segment(plan: Plan, placed: PlacedRanks) -> int:
    """Nodes that the plan uses of every scale-up domain of several nodes; 1 where they differ."""
    cluster = plan.inputs.cluster
    domain = max(1, cluster.nvlink_domain // cluster.gpus_per_node)
    in_domain = Counter(node // domain for node in placed.nodes)
    nodes = set(in_domain.values())
    return nodes.pop() if domain > 1 and len(nodes) == 1 else 1
