"""What hands a launch to a cluster: a Slurm batch script, an OpenMPI rankfile.

Syntax read in Slurm 22.05 (`--segment` in 24.05) and OpenMPI 4.1; `kubernetes` has the JobSet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from meshwright.cluster_specs.schema import XGMI, ClusterSpec
from meshwright.errors import InfeasibleError
from meshwright.planner.launch.ranks import PlacedRanks, placed_ranks
from meshwright.planner.launch.writer import job_hosts
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


# A Kubernetes JobSet of a plan: pods on the plan's hosts, with the GPUs and the devices that they need.
#
# Syntax read in JobSet v1alpha2 and Kueue 0.12.


MOST_NAMED_HOSTS = 500
"""Pods that are bound to a host each: at 1.3 kB a pod the whole stays below the 1.5 MiB that etcd takes."""
RDMA = "rdma/hca_shared_devices_a"
"""The name in the examples of k8s-rdma-shared-dev-plugin (README.md, example/test-hca-pod.yaml)."""
EFA = "vpc.amazonaws.com/efa"
"""Amazon's device plugin (aws-efa-k8s-device-plugin)."""
_HOST_LABEL = "kubernetes.io/hostname"

_HEAD = """\
# Replace what says replace-me: image, queue, volume claim. The volume holds this folder.
"""
_RDMA_HEAD = """\
# {resource} is what your cluster's device plugin calls its {fabric} adapters, and how many
# of them a pod takes: `kubectl describe node` lists the names. Without such a plugin take the line out.
"""
_CHOSEN_HEAD = """\
# Kubernetes chooses the nodes: pod k stands for line k of the plan's hosts, counted from 0.
"""


@dataclass(frozen=True, kw_only=True)
class _Pods:
    """Pods alike, whose node ranks follow each other."""

    name: str
    first_rank: int
    count: int
    gpus: int
    host: str | None
    """Where the only one of them runs; None where Kubernetes chooses."""


def kubernetes_files(plan: Plan) -> dict[str, str]:
    """jobset.yaml: a pod for every node, with the GPUs that the plan uses of it.

    Where the plan names its hosts, each pod is bound to its own, so that ranks run where they were planned.
    Elsewhere Kubernetes chooses: pods are indexed, and carry Kueue's topology request. Raises InfeasibleError
    where no order of pods is that of the plan's nodes.
    """
    placed = placed_ranks(plan)
    pods = _pods(plan, placed)
    chosen = pods[0].host is None
    if chosen and placed.gpus_per_host is None and placed.turns != sorted(placed.turns):
        raise InfeasibleError(
            "kubernetes: a JobSet numbers its pods node by node, but this plan's ranks do not run through "
            "the nodes in turn. Use --target slurm or openmpi, or a cluster file that names its nodes."
        )
    name, resources = job_name(plan), _devices(plan.inputs.cluster, len(placed.hosts))
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "replace-me"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [
                {
                    "name": each.name,
                    "replicas": 1,
                    "template": {"spec": _job(plan, placed, pods, each, resources)},
                }
                for each in pods
            ],
        },
    }
    head = _HEAD + (_CHOSEN_HEAD if chosen else "")
    for resource in resources:
        fabric = plan.inputs.cluster.nic_medium
        head += _RDMA_HEAD.format(resource=resource, fabric=fabric)
    return {"jobset.yaml": head + yaml.safe_dump(document, sort_keys=False)}


def _pods(plan: Plan, placed: PlacedRanks) -> list[_Pods]:
    """One each where hosts have names that a node's label can be; else runs of nodes with as many GPUs."""
    gpus = placed.gpus_of_hosts
    label = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    named = bool(plan.inputs.cluster.nodes) and all(map(label.fullmatch, placed.hosts))
    if named and len(gpus) <= MOST_NAMED_HOSTS:
        return [
            _Pods(name=f"node-{rank}", first_rank=rank, count=1, gpus=gpus[rank], host=host)
            for rank, host in enumerate(placed.hosts)
        ]
    starts = [rank for rank in range(len(gpus)) if rank == 0 or gpus[rank] != gpus[rank - 1]]
    ends = [*starts[1:], len(gpus)]
    return [
        _Pods(
            name="nodes" if len(starts) == 1 else f"nodes-{first}",
            first_rank=first,
            count=end - first,
            gpus=gpus[first],
            host=None,
        )
        for first, end in zip(starts, ends, strict=True)
    ]


def _devices(cluster: ClusterSpec, hosts: int) -> dict[str, int]:
    """What a pod takes of the network's adapters, beside its GPUs; nothing where one node is all."""
    if hosts == 1:
        return {}
    return {EFA if cluster.nic_medium == "efa" else RDMA: 1}


def _job(
    plan: Plan, placed: PlacedRanks, pods: list[_Pods], own: _Pods, devices: Mapping[str, int]
) -> dict[str, Any]:
    name, cluster = job_name(plan), plan.inputs.cluster
    node_rank = "$JOB_COMPLETION_INDEX"
    if own.count == 1:
        node_rank = str(own.first_rank)
    elif own.first_rank:
        node_rank = f"$(({own.first_rank} + JOB_COMPLETION_INDEX))"
    script = (
        f"NODE_RANK={node_rank} MASTER_ADDR={name}-{pods[0].name}-0-0.{name} "
        "exec bash /launch/launch.sh node"
    )
    gpu = "amd.com/gpu" if cluster.device.architecture in XGMI else "nvidia.com/gpu"
    container = {
        "name": "train",
        "image": "replace-me/training-image:latest",
        "command": ["bash", "-c", script],
        "resources": {"limits": {gpu: own.gpus, **devices}},
        # Adapters register the memory that they read and write: it must stay in place.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "launch", "mountPath": "/launch", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "launch", "persistentVolumeClaim": {"claimName": "replace-me"}},
            # A container has 64 MiB of /dev/shm by default; NCCL and data loaders need more.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    template: dict[str, Any] = {"spec": pod}
    if own.host is None:
        template = {"metadata": {"annotations": _topology(plan, placed, pods)}, "spec": pod}
    else:
        pod["nodeSelector"] = {_HOST_LABEL: own.host}
    return {
        "parallelism": own.count,
        "completions": own.count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }


def _topology(plan: Plan, placed: PlacedRanks, pods: list[_Pods]) -> dict[str, str]:
    """What Kueue is asked for: nodes close to each other, whole NVLink domains."""
    domain = segment_of(plan, placed)
    topology = {"kueue.x-k8s.io/podset-preferred-topology": "cloud.provider.com/topology-block"}
    if domain > 1 and len(pods) == 1 and len(placed.hosts) % domain == 0:
        topology |= {
            "kueue.x-k8s.io/podset-slice-required-topology": "cloud.provider.com/topology-rack",
            "kueue.x-k8s.io/podset-slice-size": str(domain),
        }
    return topology
