"""What a fleet shares out: whole nodes, or whole NVLink domains, and where they hang."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby

from meshwright.cluster_specs.naming import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, near_miss


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The least that a job can get: a node, or the nodes of an NVLink domain."""

    nodes: tuple[str, ...]
    leaf: str
    pod: str


@dataclass(frozen=True, kw_only=True)
class FreeUnits:
    """The free units of a cluster, in its order."""

    gpus_per_unit: int
    units: tuple[Unit, ...]

    @property
    def by_leaf(self) -> dict[str, list[int]]:
        """Units by leaf, as indices into `units`."""
        leaves: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            leaves.setdefault(unit.leaf, []).append(index)
        return leaves

    @property
    def pod_of(self) -> dict[str, str]:
        """The pod of each leaf."""
        return {unit.leaf: unit.pod for unit in self.units}


@dataclass(frozen=True)
class _Node:
    name: str
    free_gpus: int
    leaf: str
    pod: str


def free_units(cluster: ClusterSpec, gpus: int, busy: Collection[str] = ()) -> FreeUnits:
    """The units that are wholly free.

    Parameters
    ----------
    cluster
        With its nodes, or a kind of node.
    gpus
        The first so many GPUs are looked at.
    busy
        Names of nodes in use already; their units are left out.

    Raises
    ------
    InputError
        For a busy node that there is not, or if nothing is free.
    """
    per_node = cluster.gpus_per_node
    gpus_per_unit = max(per_node, cluster.nvlink_domain)
    nodes_per_unit = gpus_per_unit // per_node
    nodes = _nodes(cluster, gpus)
    names = {node.name for node in nodes}
    for name in busy:
        if name not in names:
            hint = near_miss(name, names)
            raise InputError("no such node", where="--busy", value=name, did_you_mean=hint)
    free = [node for node in nodes if node.free_gpus >= per_node][: gpus // per_node]
    units: list[Unit] = []
    for (leaf, pod), group in groupby(free, key=lambda node: (node.leaf, node.pod)):
        together = [node.name for node in group]
        for first in range(0, len(together) - nodes_per_unit + 1, nodes_per_unit):
            members = tuple(together[first : first + nodes_per_unit])
            if not set(members) & set(busy):
                units.append(Unit(nodes=members, leaf=leaf, pod=pod))
    if not units:
        kind = "node" if nodes_per_unit == 1 else "NVLink domain"
        raise InputError(f"no {kind} is wholly free", where=f"cluster {cluster.name}")
    return FreeUnits(gpus_per_unit=gpus_per_unit, units=tuple(units))


def _nodes(cluster: ClusterSpec, gpus: int) -> list[_Node]:
    """The nodes of a cluster; of a kind of node those of the first GPUs."""
    if cluster.nodes:
        return list(_listed_nodes(cluster))
    per_node = cluster.gpus_per_node
    blocks = [level.gpus for level in cluster.levels[:-1]] or [cluster.gpus]
    leaf_gpus = blocks[0]
    pod_gpus = blocks[1] if len(blocks) > 1 else cluster.gpus
    nodes = []
    for index in range(-(-gpus // per_node)):
        first_gpu = index * per_node
        leaf = f"leaf-{first_gpu // leaf_gpus + 1:03d}"
        pod = f"pod-{first_gpu // pod_gpus + 1:02d}"
        nodes.append(_Node(node_name(cluster, index), per_node, leaf, pod))
    return nodes


def _listed_nodes(cluster: ClusterSpec) -> Iterator[_Node]:
    for node in cluster.nodes:
        free = cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        yield _Node(node.name, free, node.leaf or "fabric", node.pod or "fabric")
