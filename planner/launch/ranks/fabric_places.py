"""Where the hosts of a plan hang: the leaf and pod of each, by the cluster file or by the level table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cluster_specs.fabric import FabricLevels, fabric_levels, full_levels
from meshwright.cluster_specs.schema import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """The smallest and the next larger block of switches around a host; '' where there is none."""

    leaf: str
    pod: str


def host_places(cluster: ClusterSpec, gpus: int, nodes: Sequence[int]) -> list[HostPlace]:
    """Places of nodes, given by their number in the cluster.

    Nodes that the cluster file lists have the leaf and pod that it gives; otherwise they stand in the blocks
    of the machine in turn, of which those count that part an allocation of `gpus` GPUs.
    """
    if cluster.nodes:
        listed = [cluster.nodes[node] for node in nodes]
        return [HostPlace(leaf=entry.leaf or "", pod=entry.pod or "") for entry in listed]
    levels = fabric_levels(cluster, gpus)
    depths = _switch_depths(cluster, levels)
    leaf, pod = (*depths, None, None)[:2]
    return [
        HostPlace(leaf=_block(cluster, levels, leaf, node), pod=_block(cluster, levels, pod, node))
        for node in nodes
    ]


def _switch_depths(cluster: ClusterSpec, levels: FabricLevels) -> list[int]:
    """Levels above the node whose blocks are smaller than the allocation, inside out."""
    return [
        int(k)
        for k in np.flatnonzero(levels.blocks > cluster.gpus_per_node)
        if k < len(levels.blocks) - 1
    ]


def _block(cluster: ClusterSpec, levels: FabricLevels, depth: int | None, node: int) -> str:
    if depth is None:
        return ""
    full = full_levels(cluster)
    size = int(full.blocks[full.names.index(levels.names[depth])])
    number = node * cluster.gpus_per_node // size
    return f"{levels.names[depth]} {number + 1}"
