"""What hands a launch to a cluster: files of Slurm, OpenMPI, Kubernetes, SkyPilot and Ray.

Syntax read in Slurm 22.05 (`--segment` in 24.05) and OpenMPI 4.1; each section names its own.
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
from meshwright.planner.launch.rank_files import PlacedRanks, placed_ranks
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

    Parameters
    ----------
    plan
        With a layout.
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
    """rankfile.openmpi (rank r on its host, bound to the slot of its GPU) and mpi.sh.

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    gpus = " ".join(str(gpu) for _, gpu in placed.places)
    hosts = 'mapfile -t hosts < "$here/hostfile"\n'
    if not placed.names_known:
        hosts = job_hosts(placed)
    script = _MPI_SCRIPT.format(gpus=gpus, world=len(placed.places), hosts=hosts)
    return {"rankfile.openmpi": placed.openmpi_rankfile(), "mpi.sh": script}


def job_name(plan: Plan) -> str:
    """The model's name as a DNS label: lower-case letters, digits and dashes, at most 40 characters.

    Parameters
    ----------
    plan
        Of any model: its name may hold anything.
    """
    label = re.sub(r"[^a-z0-9]+", "-", plan.inputs.model.name.lower()).strip("-")[:40].strip("-")
    return label if re.match(r"[a-z]", label) else f"train-{label}".strip("-")


def segment_of(plan: Plan, placed: PlacedRanks) -> int:
    """Nodes that the plan uses of every scale-up domain of several nodes; 1 where they differ.

    Parameters
    ----------
    plan
        Whose cluster says how many GPUs a scale-up domain has.
    placed
        The nodes of its ranks.
    """
    cluster = plan.inputs.cluster
    domain = max(1, cluster.nvlink_domain // cluster.gpus_per_node)
    in_domain = Counter(node // domain for node in placed.nodes)
    nodes = set(in_domain.values())
    return nodes.pop() if domain > 1 and len(nodes) == 1 else 1


# On Kubernetes, a JobSet, Volcano Job or TrainJob: pods with the GPUs and devices that they need.
#
# Syntax read in JobSet v1alpha2, Kueue 0.12, Volcano's batch.volcano.sh/v1alpha1 (plugins env and svc: its
# docs/user-guide) and Kubeflow Trainer 2.3 (pkg/runtime/framework/plugins/torch).


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
_OWN_ORDER_HEAD = """\
# Kubernetes gives the plan's hosts an order of its own.
"""
_CHOSEN_HEAD = """\
# Kubernetes chooses the nodes: pod k stands for line k of the plan's hosts, counted from 0.
"""
_PLACES_LOST = """\
# Which node comes where is the choice of {scheduler}: ranks may run elsewhere than the plan places them.
# Where that counts, take --target {others}.
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

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    pods = _pods(plan, placed, "a JobSet")
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
    return {"jobset.yaml": _head(plan, pods, resources) + _yaml(document)}


def volcano_files(plan: Plan) -> dict[str, str]:
    """volcano.yaml: a Volcano Job whose tasks are the pods of the plan's nodes, all of them started or none.

    Where the plan names its hosts, each pod is bound to its own; elsewhere Volcano chooses nodes near each
    other (`networkTopology`, soft). Raises InfeasibleError as `kubernetes_files` does.

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    pods = _pods(plan, placed, "a Volcano Job")
    name, resources = job_name(plan), _devices(plan.inputs.cluster, len(placed.hosts))
    tasks = []
    for each in pods:
        master = f"{name}-{pods[0].name}-0.{name}"
        pod = _pod(_node_script(each, "VC_TASK_INDEX", master), _gpus(plan, each.gpus, resources))
        if each.host is not None:
            pod["nodeSelector"] = {_HOST_LABEL: each.host}
        tasks.append({"name": each.name, "replicas": each.count, "template": {"spec": pod}})
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        "queue": "replace-me",
        "minAvailable": len(placed.hosts),
        "maxRetry": 1,
        # env gives a pod its place in the task, svc a name that the others find it by.
        "plugins": {"env": [], "svc": ["--inject-hosts-env=false"]},
        "policies": [
            {"event": "PodFailed", "action": "AbortJob"},
            {"event": "PodEvicted", "action": "AbortJob"},
        ],
        "tasks": tasks,
    }
    if pods[0].host is None:
        spec["networkTopology"] = {"mode": "soft"}
    document = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": spec,
    }
    return {"volcano.yaml": _head(plan, pods, resources) + _yaml(document)}


def trainjob_files(plan: Plan) -> dict[str, str]:
    """trainjob.yaml: a TrainJob of Kubeflow Trainer on the runtime `torch-distributed`.

    All nodes of a TrainJob are pods alike, and Kubernetes decides which of them runs where: on the plan's
    hosts where it names them, in an order of its own. Raises InfeasibleError where nodes are unlike, or no
    order of pods is that of the plan's nodes.

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    cluster, name = plan.inputs.cluster, job_name(plan)
    gpus = _gpus_of_nodes_alike(placed, "a TrainJob")
    resources = _devices(cluster, len(placed.hosts))
    pods = [_Pods(name="node", first_rank=0, count=len(placed.hosts), gpus=gpus, host=None)]
    _refuse_out_of_turn(placed, "a TrainJob")
    script = _node_script(pods[0], "PET_NODE_RANK", "$PET_MASTER_ADDR")
    pod = _pod(script, _gpus(plan, gpus, resources))
    container = pod["containers"][0]
    patch: dict[str, Any] = {
        "containers": [
            {key: container[key] for key in ("securityContext", "volumeMounts")} | {"name": "node"}
        ],
        "volumes": pod["volumes"],
    }
    if _named(plan, placed):
        hosts = {"key": _HOST_LABEL, "operator": "In", "values": sorted(placed.hosts)}
        required = {"nodeSelectorTerms": [{"matchExpressions": [hosts]}]}
        patch["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
        }
    template = {"metadata": {"annotations": _topology(plan, placed, pods)}, "spec": patch}
    job = {"name": "node", "template": {"spec": {"template": template}}}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "replace-me"}},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "numNodes": len(placed.hosts),
                "numProcPerNode": gpus,
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "meshwright/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
                }
            ],
        },
    }
    head = _head(plan, pods, resources, ordered=not _named(plan, placed))
    head += _places_lost(placed, "Kubernetes")
    return {"trainjob.yaml": head + _yaml(document)}


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False)


def _head(
    plan: Plan, pods: list[_Pods], resources: Mapping[str, int], *, ordered: bool = True
) -> str:
    """Comments ahead of a manifest: what to replace, and who chooses the nodes."""
    head = _HEAD
    if pods[0].host is None:
        head += _CHOSEN_HEAD if ordered else _OWN_ORDER_HEAD
    for resource in resources:
        head += _RDMA_HEAD.format(resource=resource, fabric=plan.inputs.cluster.nic_medium)
    return head


def _places_lost(placed: PlacedRanks, scheduler: str) -> str:
    """A comment for files that cannot bind a node to its place, where there is more than one."""
    if len(placed.hosts) == 1:
        return ""
    # Those that start every rank where it was planned.
    schedulers = (
        "slurm, openmpi, kubernetes or volcano" if placed.names_known else "slurm or openmpi"
    )
    return _PLACES_LOST.format(scheduler=scheduler, others=schedulers)


def _refuse_out_of_turn(placed: PlacedRanks, start: str, remedy: str = "") -> None:
    """Raise InfeasibleError for ranks that do not run through nodes which a start numbers itself."""
    if placed.gpus_per_host is None and placed.turns != sorted(placed.turns):
        raise InfeasibleError(
            f"{start} numbers its nodes one after the other, but this plan's ranks do not run through the "
            f"nodes in turn. Use --target slurm or openmpi{remedy}."
        )


def _gpus_of_nodes_alike(placed: PlacedRanks, start: str) -> int:
    """GPUs of every node. Raises InfeasibleError where their numbers differ."""
    gpus = sorted(set(placed.gpus_of_hosts))
    if len(gpus) > 1:
        raise InfeasibleError(
            f"all nodes of {start} are alike, but the plan uses {gpus[0]} GPUs of one node and {gpus[-1]} "
            "of another. Use --target slurm, openmpi, kubernetes or volcano."
        )
    return gpus[0]


def _named(plan: Plan, placed: PlacedRanks) -> bool:
    """Whether all hosts have names that a node's label can be, and are few enough to be bound one by one."""
    label = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    labels = bool(plan.inputs.cluster.nodes) and all(map(label.fullmatch, placed.hosts))
    return labels and len(placed.hosts) <= MOST_NAMED_HOSTS


def _pods(plan: Plan, placed: PlacedRanks, start: str) -> list[_Pods]:
    """One each where hosts have names that a node's label can be; else runs of nodes with as many GPUs.

    Raises InfeasibleError where these are numbered and ranks do not run through them in turn.
    """
    gpus = placed.gpus_of_hosts
    if _named(plan, placed):
        return [
            _Pods(name=f"node-{rank}", first_rank=rank, count=1, gpus=gpus[rank], host=host)
            for rank, host in enumerate(placed.hosts)
        ]
    _refuse_out_of_turn(placed, start, ", or a cluster file that names its nodes")
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
    plan: Plan,
    placed: PlacedRanks,
    pods: list[_Pods],
    first_pods: _Pods,
    devices: Mapping[str, int],
) -> dict[str, Any]:
    name = job_name(plan)
    script = _node_script(first_pods, "JOB_COMPLETION_INDEX", f"{name}-{pods[0].name}-0-0.{name}")
    pod = _pod(script, _gpus(plan, first_pods.gpus, devices))
    template: dict[str, Any] = {"spec": pod}
    if first_pods.host is None:
        template = {"metadata": {"annotations": _topology(plan, placed, pods)}, "spec": pod}
    else:
        pod["nodeSelector"] = {_HOST_LABEL: first_pods.host}
    return {
        "parallelism": first_pods.count,
        "completions": first_pods.count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }


def _node_script(pods: _Pods, index: str, master: str) -> str:
    """Shell words that start a node: `index` is the variable of a pod's place among its like."""
    node_rank = f"${index}"
    if pods.count == 1:
        node_rank = str(pods.first_rank)
    elif pods.first_rank:
        node_rank = f"$(({pods.first_rank} + {index}))"
    return f"NODE_RANK={node_rank} MASTER_ADDR={master} exec bash /launch/launch.sh node"


def _gpus(plan: Plan, gpus: int, devices: Mapping[str, int]) -> dict[str, int]:
    """What a pod takes: GPUs by the name of their maker's device plugin, and adapters."""
    amd = plan.inputs.cluster.device.architecture in XGMI
    return {"amd.com/gpu" if amd else "nvidia.com/gpu": gpus, **devices}


def _pod(script: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """The pod of a node, which runs a script in bash."""
    container = {
        "name": "train",
        "image": "replace-me/training-image:latest",
        "command": ["bash", "-c", script],
        "resources": {"limits": dict(limits)},
        # Adapters register the memory that they read and write: it must stay in place.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "launch", "mountPath": "/launch", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "launch", "persistentVolumeClaim": {"claimName": "replace-me"}},
            # A container has 64 MiB of /dev/shm by default; NCCL and data loaders need more.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
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


# A SkyPilot task: machines of a cloud, or pods of a cluster that SkyPilot knows, a node of the plan each.
#
# Read in SkyPilot 0.14: fields in sky/utils/schemas.py, accelerators in sky/utils/gpu_names.py, a node's
# variables in the documentation's "Distributed Multi-Node Jobs".


SKYPILOT_NAMES = {
    "a10": "A10",
    "a10g": "A10G",
    "a40": "A40",
    "a100-pcie-40gb": "A100",
    "a100-pcie-80gb": "A100-80GB",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "b200-sxm-180gb": "B200",
    "b300-sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "gh200-96gb": "GH200",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "rtx-6000-ada": "RTX6000-Ada",
    "rtx-a6000": "A6000",
    "v100-sxm-32gb": "V100-32GB",
}
"""SkyPilot's names of accelerators, by those of the catalog's devices."""
_SKYPILOT_HEAD = """\
# Start it in this folder, which goes to every node: sky launch skypilot.yaml
# Left to you: infra (cloud or cluster), image_id, disks and mounts for data and checkpoints.
"""
_UNKNOWN = "replace-me"
_UNKNOWN_HEAD = """\
# Replace replace-me: `sky gpus list` names the accelerators.
"""
_SKYPILOT_RUN = """\
run: |
  NODE_RANK="$SKYPILOT_NODE_RANK" MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n1)" \\
    exec bash launch.sh node
"""


def skypilot_files(plan: Plan) -> dict[str, str]:
    """skypilot.yaml: a task on as many nodes as the plan has, each with the GPUs that the plan uses of it.

    SkyPilot picks the machines, and numbers them itself. Raises InfeasibleError where nodes are unlike or
    ranks do not run through the nodes in turn.

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    gpus = _gpus_of_nodes_alike(placed, "a SkyPilot task")
    _refuse_out_of_turn(placed, "a SkyPilot task")
    accelerator = SKYPILOT_NAMES.get(plan.inputs.cluster.device.name, _UNKNOWN)
    resources: dict[str, Any] = {"accelerators": f"{accelerator}:{gpus}"}
    if len(placed.hosts) > 1:
        resources["network_tier"] = "best"
    document = {
        "name": job_name(plan),
        "num_nodes": len(placed.hosts),
        "resources": resources,
        "workdir": ".",
    }
    head = _SKYPILOT_HEAD + (_UNKNOWN_HEAD if accelerator == _UNKNOWN else "")
    text = head + _places_lost(placed, "SkyPilot") + _yaml(document) + _SKYPILOT_RUN
    return {"skypilot.yaml": text}


# Ray Train: one worker for each node, which starts the node's processes as a scheduler's job step would.
#
# Read in Ray 2.60: ScalingConfig, RunConfig, TorchTrainer, TorchConfig of ray.train. Its torch backend tells
# all workers the address of the first in MASTER_ADDR.


_RAY_SCRIPT = '''\
#!/usr/bin/env python3
"""Starts launch.sh on {hosts} nodes of a Ray cluster, a Ray worker on each: {gpus} GPUs of every node.

Usage: python ray_train.py [more arguments for the framework]
The cluster is that of RAY_ADDRESS, or this machine; all of it needs pip install 'ray[train]'. The folder of
this file must be visible on all nodes. MASTER_PORT is 29500 unless set.
{order}"""

import os
import subprocess
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig{context}
from ray.train.torch import TorchConfig, TorchTrainer

HERE = Path(__file__).resolve().parent
SCALING = ScalingConfig(
    num_workers={hosts},
    use_gpu=True,
    resources_per_worker={{"CPU": 1, "GPU": {gpus}}},
    placement_strategy="STRICT_SPREAD",
)
# What Ray tells a worker of itself is not what the node's processes are to know, nor is a job that the whole
# Ray cluster runs in.
OF_WORKERS = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_", "LOCAL_", "SLURM_", "PBS_")


def start_node(settings):
    kept = {{name: value for name, value in os.environ.items() if not name.startswith(OF_WORKERS)}}
    kept["MASTER_PORT"] = settings["master_port"]
{place}    command = ["bash", settings["script"], "node", *settings["arguments"]]
    subprocess.run(command, env=kept, check=True)


if __name__ == "__main__":
    TorchTrainer(
        start_node,
        train_loop_config={{
            "script": str(HERE / "launch.sh"),
            "arguments": sys.argv[1:],
            "master_port": os.environ.get("MASTER_PORT", "29500"),
        }},
        scaling_config=SCALING,
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name="{name}", storage_path=str(HERE / "ray_results")),
    ).fit()
'''
_RAY_BY_NAME = """\
Ray numbers the nodes as it likes: launch.sh finds the place of each by its host name in hostfile.
"""
_RAY_BY_NUMBER = """\
Which node comes where is Ray's choice: ranks may run elsewhere than the plan places them. Where that counts,
take --target slurm or openmpi.
"""
_RAY_NUMBERS = """\
    kept["NODE_RANK"] = str(get_context().get_world_rank())
    kept["MASTER_ADDR"] = os.environ["MASTER_ADDR"]
"""


def ray_files(plan: Plan) -> dict[str, str]:
    """ray_train.py: a Ray Train program with one worker for each node, which runs launch.sh there.

    Where the plan names its hosts, each node takes the place that `hostfile` gives it, whatever Ray's number;
    elsewhere nodes are counted as Ray counts its workers. Raises InfeasibleError where nodes are unlike, or
    where Ray numbers the nodes and ranks do not run through them in turn.

    Parameters
    ----------
    plan
        With a layout.
    """
    placed = placed_ranks(plan)
    gpus = _gpus_of_nodes_alike(placed, "a Ray Train run")
    if not placed.names_known:
        _refuse_out_of_turn(placed, "a Ray Train run")
    by_name = placed.names_known
    text = _RAY_SCRIPT.format(
        hosts=len(placed.hosts),
        gpus=gpus,
        name=job_name(plan),
        context="" if by_name else ", get_context",
        order=_RAY_BY_NAME if by_name else _RAY_BY_NUMBER,
        place="" if by_name else _RAY_NUMBERS,
    )
    return {"ray_train.py": text}
