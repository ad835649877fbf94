"""Output files of a mapping: who runs where, with whom, and a picture of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cluster_specs.allocation import (
    FabricLevels,
    fabric_levels,
    full_levels,
    names_are_known,
    node_name,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InfeasibleError
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.record import Framework
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.run_terms import LayoutDoc

# Where the hosts of a plan hang: the leaf and pod of each, by the cluster file or by the level table.


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
    # Levels above the node whose blocks are smaller than the allocation, inside out.
    depths = [
        int(k)
        for k in np.flatnonzero(levels.blocks > cluster.gpus_per_node)
        if k < len(levels.blocks) - 1
    ]
    leaf, pod = (*depths, None, None)[:2]
    return [
        HostPlace(leaf=_block(cluster, levels, leaf, node), pod=_block(cluster, levels, pod, node))
        for node in nodes
    ]


def _block(cluster: ClusterSpec, levels: FabricLevels, depth: int | None, node: int) -> str:
    if depth is None:
        return ""
    full = full_levels(cluster)
    size = int(full.blocks[full.names.index(levels.names[depth])])
    number = node * cluster.gpus_per_node // size
    return f"{levels.names[depth]} {number + 1}"


# Which process runs where: ranks in the framework's order, against the nodes' GPUs.


RankPlace = tuple[int, int]
"""(node, local GPU), both from 0."""


_TEMPLATE = (
    "# The plan's cluster names no hosts: these lines only count its nodes. Put your hosts in their place\n"
    "# and call the file {file}; or start inside a job, whose hosts are then taken.\n"
)


@dataclass(frozen=True, kw_only=True)
class PlacedRanks:
    """Nodes in the order of their first rank, and the place of every rank among them."""

    hosts: tuple[str, ...]
    places: tuple[RankPlace, ...]
    """`places[rank]` = (index into `hosts`, local GPU)."""
    nodes: tuple[int, ...]
    """`nodes[i]` is the number of `hosts[i]` in the cluster, from 0."""
    pipeline_before_data: bool
    """Ranks count tp, cp, pp, dp from the inside (`--use-tp-pp-dp-mapping`), not tp, cp, dp, pp."""
    names_known: bool = True
    """Whether `hosts` are names of hosts; else they only count the nodes of the cluster."""

    @property
    def gpus_per_host(self) -> int | None:
        """GPUs n of every node if torchrun can start the ranks: node k runs ranks k n to (k + 1) n - 1."""
        size = len(self.places) // len(self.hosts)
        in_turn = tuple((rank // size, rank % size) for rank in range(size * len(self.hosts)))
        return size if in_turn == self.places else None

    @property
    def gpus_of_hosts(self) -> tuple[int, ...]:
        """GPUs to ask for of every host: up to the last one that holds a rank, counted from 0."""
        last = [0] * len(self.hosts)
        for host, gpu in self.places:
            last[host] = max(last[host], gpu + 1)
        return tuple(last)

    @property
    def alike(self) -> list[tuple[int, list[int]]]:
        """(GPUs, hosts with so many) by index, the most GPUs first; hosts in the order of their nodes."""
        gpus_of_hosts = self.gpus_of_hosts
        by_gpus: dict[int, list[int]] = {}
        for host in sorted(range(len(self.hosts)), key=lambda host: self.nodes[host]):
            by_gpus.setdefault(gpus_of_hosts[host], []).append(host)
        return sorted(by_gpus.items(), reverse=True)

    def ranks_of_hosts(self) -> list[list[int]]:
        """Ranks of every host, ascending."""
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, (host, _) in enumerate(self.places):
            ranks[host].append(rank)
        return ranks

    def rankfile(self) -> str:
        """One line per rank: rank, index of the node in the hostfile, local GPU."""
        return "".join(f"{rank} {host} {gpu}\n" for rank, (host, gpu) in enumerate(self.places))

    @property
    def turns(self) -> list[int]:
        """The place of every host among the nodes in use, by their number: its place in an allocation."""
        place = {node: turn for turn, node in enumerate(sorted(self.nodes))}
        return [place[node] for node in self.nodes]

    @property
    def turns_by_gpus(self) -> list[int]:
        """The same in an allocation that lists the hosts of `alike` one after the other."""
        order = [host for _, hosts in self.alike for host in hosts]
        turns = {host: turn for turn, host in enumerate(order)}
        return [turns[host] for host in range(len(self.hosts))]

    def hostfile(self) -> dict[str, str]:
        """By file name: one host a line, in the order of their first ranks.

        A template, which says so, where the names of the hosts are not known.
        """
        return self._by_name("hostfile", self.hosts)

    def slurm_hostfile(self) -> dict[str, str]:
        """By file name: a host per rank, for SLURM_HOSTFILE and `srun --distribution=arbitrary`."""
        return self._by_name("slurm_hostfile", [self.hosts[host] for host, _ in self.places])

    def _by_name(self, file: str, hosts: Sequence[str]) -> dict[str, str]:
        text = "".join(f"{host}\n" for host in hosts)
        return (
            {file: text}
            if self.names_known
            else {f"{file}.template": _TEMPLATE.format(file=file) + text}
        )

    def openmpi_rankfile(self) -> str:
        """A line per rank for `mpirun --rankfile`: its host, and the slot of its GPU.

        Hosts whose names are not known are counted through the job's: `+n0` is the first (mpirun(1) of
        OpenMPI 4.1, "relative host indices"). Raises InfeasibleError for a host name that the file cannot
        hold.
        """
        if not self.names_known:
            turns = self.turns
            return "".join(
                f"rank {rank}=+n{turns[host]} slot={gpu}\n"
                for rank, (host, gpu) in enumerate(self.places)
            )
        for host in self.hosts:
            if re.search(r"[\s=#;]", host):
                raise InfeasibleError(
                    f"{host!r} cannot stand in an OpenMPI rankfile: no spaces, '=', '#' or ';'."
                )
        return "".join(
            f"rank {rank}={self.hosts[host]} slot={gpu}\n"
            for rank, (host, gpu) in enumerate(self.places)
        )


def planned_layout(plan: Plan) -> LayoutDoc:
    """The layout of a plan. Raises InfeasibleError if it has none."""
    if plan.layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to launch."
        )
    return plan.layout


def placed_ranks(plan: Plan, framework: Framework | None = None) -> PlacedRanks:
    """The places of a plan's ranks, counted as a framework counts them (the plan's own, unless one is named).

    Where Megatron's default order would need a process-by-process start but its other order is legal and does
    not, the ranks are counted in that one.

    Raises
    ------
    InfeasibleError
        The plan has no layout, or its mapping does not fit it or the cluster's nodes.
    """
    layout = planned_layout(plan)
    places = _places(plan, layout)
    default = _on_hosts(plan, places, pipeline_before_data=False)
    if framework is None:
        framework = framework_named(plan.inputs.framework)
    if not framework.reorders_ranks or default.gpus_per_host is not None:
        return default
    if not _other_order_is_legal(plan, layout):
        return default
    reordered = _on_hosts(plan, _recounted(places, layout), pipeline_before_data=True)
    return default if reordered.gpus_per_host is None else reordered


def _places(plan: Plan, layout: LayoutDoc) -> list[RankPlace]:
    """(node, local GPU) of every rank in the default order, as the plan maps them."""
    world = layout.tp * layout.cp * layout.pp * layout.dp
    mapping, cluster = plan.mapping, plan.inputs.cluster
    if mapping is not None and mapping.ranks is not None:
        places = list(mapping.ranks)
    elif mapping is not None and mapping.matrix:
        places = ranks_on(cluster, mapping.matrix)
    else:
        places = [divmod(rank, cluster.gpus_per_node) for rank in range(world)]
    if len(places) != world:
        raise InfeasibleError(f"the mapping places {len(places)} ranks, the layout has {world}.")
    if len(set(places)) != world:
        raise InfeasibleError("the mapping puts two ranks on one GPU.")
    return places


def _other_order_is_legal(plan: Plan, layout: LayoutDoc) -> bool:
    """Megatron wants as many expert replicas as dense ones; a dense model's expert axes are free to fit."""
    return plan.inputs.model.moe is None or layout.expert_group == layout.tp * layout.cp


def _recounted(places: Sequence[RankPlace], layout: LayoutDoc) -> list[RankPlace]:
    """The places in the order tp, cp, pp, dp, from those in the order tp, cp, dp, pp."""
    inner = layout.tp * layout.cp
    return [
        places[part + inner * (replica + layout.dp * stage)]
        for replica in range(layout.dp)
        for stage in range(layout.pp)
        for part in range(inner)
    ]


def _on_hosts(
    plan: Plan, places: Sequence[RankPlace], *, pipeline_before_data: bool
) -> PlacedRanks:
    nodes = list(dict.fromkeys(node for node, _ in places))
    hosts = _host_names(plan, nodes)
    index = {node: position for position, node in enumerate(nodes)}
    return PlacedRanks(
        hosts=hosts,
        nodes=tuple(nodes),
        places=tuple((index[node], gpu) for node, gpu in places),
        pipeline_before_data=pipeline_before_data,
        names_known=names_are_known(plan.inputs.cluster),
    )


def _host_names(plan: Plan, nodes: Sequence[int]) -> tuple[str, ...]:
    cluster = plan.inputs.cluster
    count = len(cluster.nodes) or -(-cluster.gpus // cluster.gpus_per_node)
    if min(nodes) < 0 or max(nodes) >= count:
        raise InfeasibleError(
            f"the mapping uses node {max(nodes)} (from 0), but only {count} nodes are known."
        )
    names = tuple(checked_host(node_name(cluster, node)) for node in nodes)
    if len(set(names)) != len(names):
        raise InfeasibleError("two nodes of the mapping have the same name.")
    return names


def checked_host(name: str) -> str:
    """A node name that fits on a line of a hostfile. Raises InfeasibleError otherwise."""
    if not name or not name.isprintable() or name != name.strip() or name.startswith(("#", "-")):
        raise InfeasibleError(
            f"{name[:80]!r} cannot be a node name in a hostfile. Correct it in the cluster file."
        )
    return name
