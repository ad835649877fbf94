"""What a fleet shares out: whole nodes, or whole NVLink domains, and where they hang."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

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
class Floor:
    """The free units of a cluster, in its order."""

    gpus_per_unit: int
    units: tuple[Unit, ...]

    @property
    def leaves(self) -> dict[str, list[int]]:
        """Units by leaf."""
        found: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            found.setdefault(unit.leaf, []).append(index)
        return found

    @property
    def pod_of(self) -> dict[str, str]:
        """The pod of each leaf."""
        return {unit.leaf: unit.pod for unit in self.units}


def floor_of(cluster: ClusterSpec, gpus: int, busy: Collection[str] = ()) -> Floor:
    """The units of the cluster's first `gpus` GPUs that are wholly free, those of `busy` nodes left out.

    Raises InputError for a busy node that there is not, or if nothing is free.
    """
    per_node = cluster.gpus_per_node
    size = max(per_node, cluster.nvlink_domain)
    free, known = _free_nodes(cluster, gpus)
    for name in busy:
        if name not in known:
            raise InputError(
                "no such node", where="--busy", value=name, did_you_mean=near_miss(name, known)
            )
    units: list[Unit] = []
    group: list[tuple[str, str, str]] = []
    for entry in free:
        if group and (group[-1][1:] != entry[1:] or len(group) == size // per_node):
            group = []
        group.append(entry)
        if len(group) == size // per_node:
            names = tuple(name for name, _, _ in group)
            if not set(names) & set(busy):
                units.append(Unit(nodes=names, leaf=entry[1], pod=entry[2]))
            group = []
    if not units:
        what = f"no {'node' if size == per_node else 'NVLink domain'} is wholly free"
        raise InputError(what, where=f"cluster {cluster.name}")
    return Floor(gpus_per_unit=size, units=tuple(units))


def _free_nodes(cluster: ClusterSpec, gpus: int) -> tuple[list[tuple[str, str, str]], set[str]]:
    """((name, leaf, pod) of the nodes that are wholly free, all names)."""
    found, known = [], set()
    for index, (name, free, leaf, pod) in enumerate(_all_nodes(cluster)):
        if index * cluster.gpus_per_node >= gpus and not cluster.nodes:
            break
        known.add(name)
        if free >= cluster.gpus_per_node:
            found.append((name, leaf, pod))
    return (found[: gpus // cluster.gpus_per_node], known)


def _all_nodes(cluster: ClusterSpec) -> Iterator[tuple[str, int, str, str]]:
    per_node = cluster.gpus_per_node
    if cluster.nodes:
        for node in cluster.nodes:
            free = per_node if node.free_gpus is None else node.free_gpus
            yield node.name, free, node.leaf or "fabric", node.pod or "fabric"
        return
    blocks = [level.gpus for level in cluster.levels[:-1]] or [cluster.gpus]
    leaf, pod = blocks[0], blocks[1] if len(blocks) > 1 else cluster.gpus
    for index in range(cluster.gpus // per_node):
        at = index * per_node
        yield (
            node_name(cluster, index),
            per_node,
            f"leaf-{at // leaf + 1:03d}",
            f"pod-{at // pod + 1:02d}",
        )
