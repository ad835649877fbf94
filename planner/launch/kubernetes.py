"""A Kubernetes JobSet of a plan: pods on the plan's hosts, with the GPUs and the devices that they need.

Syntax read in JobSet v1alpha2 and Kueue 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from meshwright.cluster_specs.schema import XGMI, ClusterSpec
from meshwright.errors import InfeasibleError
from meshwright.planner.launch.ranks.placed import PlacedRanks, placed_ranks
from meshwright.planner.launch.schedulers import job_name, segment_of
from meshwright.planner.plan.document import Plan

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
