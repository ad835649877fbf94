"""The fabric of a cluster whose nodes are listed, node by node, as a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.cluster_specs.drawing import Joint, Terminal, draw
from meshwright.cluster_specs.fabric import full_levels
from meshwright.cluster_specs.graph import level_joints
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.uplinks import (
    first_outside_a_leaf,
    free_of,
    leaves_are_domains,
    uplinks,
)
from meshwright.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

CORE = "core"


def node_graph(cluster: ClusterSpec) -> nx.Graph[str]:
    """The free GPUs of nodes, their leaves and pods, and the core: `leaf/POD/LEAF`, `pod/POD`, `core`.

    See `drawing.draw`. A node's link is that of its free GPUs' NICs (inside a rack, NVLink); those of leaves
    and pods are what the job has of them (`uplinks`). A node without a leaf hangs on the core. Raises
    InputError where no nodes are listed.
    """
    if not cluster.nodes:
        raise InputError(
            f"nodes: cluster {cluster.name!r} lists none; `fabric_graph` draws its levels"
        )
    levels, links = full_levels(cluster), uplinks(cluster)
    inside = float(levels.gb_per_s[0])
    pods = _has_pods(cluster)
    racks = leaves_are_domains(cluster)
    up = {f"leaf/{pod}/{leaf}": link.gb_per_s for (pod, leaf), link in links.leaves.items()}
    up |= {f"pod/{pod}": link.gb_per_s for (pod, _), link in links.pods.items()}
    terminals = []
    for node in cluster.nodes:
        free = free_of(node, cluster.gpus_per_node)
        path: tuple[tuple[int, str], ...] = ((2 if pods else 1, CORE),)
        if node.leaf is not None and free:
            pod = ((1, f"pod/{node.pod or ''}"),) if pods else ()
            path = ((0, f"leaf/{node.pod or ''}/{node.leaf}"), *pod, *path)
        nic = (node.nic_gbps_per_gpu or cluster.nic_gbps_per_gpu) / 8
        up[node.name] = free * (inside if racks and node.leaf is not None else nic)
        terminals.append(Terminal(name=node.name, gpus=free, inside_gb_per_s=inside, path=path))
    return draw(terminals, listed_joints(cluster), up, apart=not cluster.crosses_rails_inside)


def _has_pods(cluster: ClusterSpec) -> bool:
    """Whether something lies between leaves and core: several pods, or a level for the only one."""
    return len(uplinks(cluster).pods) > 1 or first_outside_a_leaf(cluster) < len(cluster.levels) - 1


def listed_joints(cluster: ClusterSpec) -> list[Joint]:
    """How nodes are joined in leaves, leaves in pods (or in the core, where there are none), pods in it."""
    first = first_outside_a_leaf(cluster)
    names = [level.name for level in cluster.levels]
    joints = []
    tiers = ("leaf", "pod", CORE) if _has_pods(cluster) else ("leaf", CORE)
    for depth, tier in enumerate(tiers, start=first - 1):
        joint = Joint(level=tier)
        if 0 <= depth < len(names):
            (stated,) = level_joints(cluster, [names[depth]])
            joint = replace(stated, level=tier)
        joints.append(joint)
    return joints
