"""Which process runs where: ranks in the framework's order, against the nodes' GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster_specs.naming import node_name
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc

RankPlace = tuple[int, int]
"""(node, local GPU), both from 0."""


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Nodes in the order of their first rank, and the place of every rank among them."""

    hosts: tuple[str, ...]
    places: tuple[RankPlace, ...]
    """`places[rank]` = (index into `hosts`, local GPU)."""
    nodes: tuple[int, ...]
    """`nodes[i]` is the number of `hosts[i]` in the cluster, from 0."""
    pipeline_before_data: bool
    """Ranks count tp, cp, pp, dp from the inside (`--use-tp-pp-dp-mapping`), not tp, cp, dp, pp."""

    @property
    def gpus_per_host(self) -> int | None:
        """GPUs n of every node if torchrun can start the ranks: node k runs ranks k n to (k + 1) n - 1."""
        size = len(self.places) // len(self.hosts)
        in_turn = tuple((rank // size, rank % size) for rank in range(size * len(self.hosts)))
        return size if in_turn == self.places else None

    def rankfile(self) -> str:
        """One line per rank: rank, index of the node in the hostfile, local GPU."""
        return "".join(f"{rank} {host} {gpu}\n" for rank, (host, gpu) in enumerate(self.places))


def rank_files(
    plan: Plan,
    layout: LayoutDoc,
    node_names: Sequence[str] | None,
    ranks: Sequence[RankPlace] | None,
    *,
    reorder: bool = True,
) -> RankFiles:
    """The places of a plan's ranks; `ranks` (in Megatron's default order) goes before the plan's own mapping.

    Where the default order would need a process-by-process start but Megatron's other order is legal and does
    not, the ranks are counted in that one; `reorder` is False for a framework that has no other order.
    """
    world = layout.tp * layout.cp * layout.pp * layout.dp
    places = list(ranks) if ranks is not None else _places(plan, world)
    if len(places) != world:
        raise InfeasibleError(f"the mapping places {len(places)} ranks, the layout has {world}.")
    if len(set(places)) != world:
        raise InfeasibleError("the mapping puts two ranks on one GPU.")
    default = _files(plan, places, node_names, pipeline_before_data=False)
    if reorder and default.gpus_per_host is None and _other_order_is_legal(plan, layout):
        other = _files(plan, _recounted(places, layout), node_names, pipeline_before_data=True)
        if other.gpus_per_host is not None:
            return other
    return default


def _places(plan: Plan, world: int) -> list[RankPlace]:
    mapping, per_node = plan.mapping, plan.inputs.cluster.gpus_per_node
    if mapping is not None and mapping.ranks is not None:
        return list(mapping.ranks)
    if mapping is not None and mapping.matrix:
        return ranks_on(plan.inputs.cluster, mapping.matrix)
    return [(rank // per_node, rank % per_node) for rank in range(world)]


def _other_order_is_legal(plan: Plan, layout: LayoutDoc) -> bool:
    """Megatron wants as many expert replicas as dense ones; a dense model's expert axes are free to fit."""
    return plan.inputs.model.moe is None or layout.etp * layout.ep == layout.tp * layout.cp


def _recounted(places: Sequence[RankPlace], layout: LayoutDoc) -> list[RankPlace]:
    """The places in the order tp, cp, pp, dp, from those in the order tp, cp, dp, pp."""
    inner = layout.tp * layout.cp
    return [
        places[part + inner * (replica + layout.dp * stage)]
        for replica in range(layout.dp)
        for stage in range(layout.pp)
        for part in range(inner)
    ]


def _files(
    plan: Plan,
    places: Sequence[RankPlace],
    node_names: Sequence[str] | None,
    *,
    pipeline_before_data: bool,
) -> RankFiles:
    nodes = list(dict.fromkeys(node for node, _ in places))
    index = {node: position for position, node in enumerate(nodes)}
    hosts = _names(plan, nodes, node_names)
    if len(set(hosts)) != len(hosts):
        raise InfeasibleError("two nodes of the mapping have the same name.")
    return RankFiles(
        hosts=hosts,
        nodes=tuple(nodes),
        places=tuple((index[node], gpu) for node, gpu in places),
        pipeline_before_data=pipeline_before_data,
    )


def _names(plan: Plan, nodes: Sequence[int], node_names: Sequence[str] | None) -> tuple[str, ...]:
    cluster = plan.inputs.cluster
    known = len(cluster.nodes) or -(-cluster.gpus // cluster.gpus_per_node)
    known = known if node_names is None else len(node_names)
    if min(nodes) < 0 or max(nodes) >= known:
        raise InfeasibleError(
            f"the mapping uses node {max(nodes)} (from 0), but only {known} nodes are known."
        )
    names = [node_name(cluster, node) if node_names is None else node_names[node] for node in nodes]
    return tuple(checked_host(name) for name in names)


def checked_host(name: str) -> str:
    """A node name that fits on a line of a hostfile. Raises InfeasibleError otherwise."""
    if not name or not name.isprintable() or name != name.strip() or name.startswith(("#", "-")):
        raise InfeasibleError(
            f"{name[:80]!r} cannot be a node name in a hostfile. Correct it in the cluster file."
        )
    return name
