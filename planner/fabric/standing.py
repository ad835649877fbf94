"""Where the ranks of a mapping stand in the fabric: the block of every level, and the up-links they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cluster_specs.drawing import Joint
from cluster_specs.fabric import FabricLevels, fabric_levels, full_levels
from cluster_specs.graph import fabric_graph
from cluster_specs.node_graph import node_graph
from cluster_specs.places import Place, allocated_places
from cluster_specs.schema import ClusterSpec
from cluster_specs.tiers import level_rates
from cluster_specs.uplinks import leaves_are_domains
from planner.fabric.problem import FloatArray, IntArray

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One level: the blocks that ranks are in, and the sub-blocks that the level joins."""

    level: str
    depth: int
    """Its place among the levels of `Stand`; of the level below where the allocation does not span it."""
    joint: Joint
    sub: IntArray
    """The sub-block of every rank, shape [ranks]; at the innermost level a GPU."""
    block: IntArray
    """Its block."""
    unit: IntArray
    """The up-link that it uses: that of its sub-block, or of its sub-block and rail."""
    names: tuple[str, ...]
    """Of the sub-blocks."""
    unit_names: tuple[str, ...]
    links_gb_per_s: FloatArray
    """Nominal, of every up-link in one direction, as far as they are the job's."""
    rail_apart: bool
    """Whether the sub-blocks hold rails that only this level joins."""

    @property
    def sub_links_gb_per_s(self) -> FloatArray:
        """The links of every sub-block, all rails together."""
        rails = len(self.unit_names) // len(self.names)
        return np.asarray(self.links_gb_per_s.reshape(-1, rails).sum(axis=1), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Stand:
    """A mapping on a fabric."""

    levels: FabricLevels
    standings: tuple[Standing, ...]
    """From the inside out."""
    node: IntArray
    """The node of every rank."""
    gpu: IntArray
    """Its GPU in the node; it hangs on the rail of that number, modulo the rails."""


@dataclass(frozen=True)
class _Ground:
    """A graph, and the node of it that every rank is in."""

    graph: nx.Graph[str]
    levels: FabricLevels
    names: list[str]
    """Of the nodes in use."""
    at: IntArray
    """Which of them every rank is in."""
    within: IntArray
    """Which of its GPUs."""
    size: int
    outer: list[int]
    """The levels that join nodes and larger blocks, by their place in `levels`; as many as a path has."""


def stand(cluster: ClusterSpec, places: Sequence[Place]) -> Stand:
    """The levels that a mapping touches; `places[r]` is the GPU of rank r.

    Links are those of `node_graph` where nodes are listed with their leaves, of `fabric_graph` otherwise.
    """
    listed = any(node.leaf is not None for node in cluster.nodes)
    ground = _listed(cluster, places) if listed else _regular(cluster, places)
    found = [*_inside(ground), *_outside(cluster, ground)]
    gpu = np.array([gpu for _, gpu in places], dtype=np.int64)
    found += _joining(cluster, ground, found, gpu)
    node = np.array([node for node, _ in places], dtype=np.int64)
    railed = tuple(_with_rails(cluster, one, gpu, found[:at]) for at, one in enumerate(found))
    return Stand(levels=ground.levels, standings=railed, node=node, gpu=gpu)


def _regular(cluster: ClusterSpec, places: Sequence[Place]) -> _Ground:
    gpus = len(places)
    levels = fabric_levels(cluster, gpus)
    order = {place: at for at, place in enumerate(allocated_places(cluster, gpus))}
    per_node = cluster.gpus_per_node
    position = np.array([order.get(p, p[0] * per_node + p[1]) for p in places], dtype=np.int64)
    graph = fabric_graph(cluster, gpus)
    nodes = [name for name in graph if "path" in graph.nodes[name]]
    size = int(graph.nodes[nodes[0]]["gpus"])
    return _Ground(
        graph=graph,
        levels=levels,
        names=nodes,
        at=np.minimum(position // size, len(nodes) - 1),
        within=position % size,
        size=size,
        outer=[int(depth) for depth in np.flatnonzero(levels.blocks > size)],
    )


def _listed(cluster: ClusterSpec, places: Sequence[Place]) -> _Ground:
    graph, levels = node_graph(cluster), full_levels(cluster)
    used = sorted({node for node, _ in places})
    index = {node: at for at, node in enumerate(used)}
    joints, last = len(graph.graph["joints"]), len(levels.names) - 1
    network = list(range(len(levels.names) - len(cluster.levels), len(levels.names))) or [last]
    reached = [0, *network] if leaves_are_domains(cluster) else network
    outer = [reached[min(at, len(reached) - 1)] for at in range(joints - 1)] + [last]
    return _Ground(
        graph=graph,
        levels=levels,
        names=[cluster.nodes[node].name for node in used],
        at=np.array([index[node] for node, _ in places], dtype=np.int64),
        within=np.array([gpu for _, gpu in places], dtype=np.int64),
        size=cluster.gpus_per_node,
        outer=outer,
    )


def _inside(ground: _Ground) -> list[Standing]:
    """Levels up to the node; sub-blocks count through the nodes in use."""
    found, below = [], 1
    blocks, rates = ground.levels.blocks.tolist(), ground.levels.gb_per_s.tolist()
    for depth in range(min(ground.outer, default=len(blocks))):
        block = min(blocks[depth], ground.size)
        each = -(-ground.size // below)
        sub = ground.at * each + ground.within // below
        what = "GPU" if below == 1 else ground.levels.names[depth - 1]
        names = tuple(f"{node} {what} {at}" for node in ground.names for at in range(each))
        found.append(
            Standing(
                level=ground.levels.names[depth],
                depth=depth,
                joint=Joint(level=ground.levels.names[depth]),
                sub=sub,
                block=ground.at * -(-ground.size // block) + ground.within // block,
                unit=sub,
                names=names,
                unit_names=names,
                links_gb_per_s=np.full(len(names), below * rates[depth]),
                rail_apart=False,
            )
        )
        below = block
    return found


def _outside(cluster: ClusterSpec, ground: _Ground) -> list[Standing]:
    """Levels that join nodes and what lies around them."""
    paths = [_path(ground, name) for name in ground.names]
    up: dict[str, float] = ground.graph.graph["up_gb_per_s"]
    joints: tuple[Joint, ...] = ground.graph.graph["joints"]
    found = []
    for step, depth in enumerate(ground.outer):
        names = list(dict.fromkeys(path[step] for path in paths))
        number = {name: at for at, name in enumerate(names)}
        blocks = {name: at for at, name in enumerate(dict.fromkeys(path[step + 1] for path in paths))}
        sub = np.array([number[path[step]] for path in paths], dtype=np.int64)[ground.at]
        links = np.array([up[name] for name in names])
        if depth == 0:  # NVLink reaches beyond the node: what it joins are GPUs, not nodes
            names = [f"{name} GPU {at}" for name in names for at in range(ground.size)]
            sub = ground.at * ground.size + ground.within
            links = np.full(len(names), float(ground.levels.gb_per_s[0]))
        found.append(
            Standing(
                level=ground.levels.names[depth],
                depth=depth,
                joint=joints[step],
                sub=sub,
                block=np.array([blocks[path[step + 1]] for path in paths], dtype=np.int64)[ground.at],
                unit=sub,
                names=tuple(_shown(name) for name in names),
                unit_names=tuple(_shown(name) for name in names),
                links_gb_per_s=links,
                rail_apart=False,
            )
        )
    return found


def _shown(vertex: str) -> str:
    """A block of `node_graph` in words: leaf/pod-1/leaf-a is leaf-a of pod-1."""
    kind, _, rest = vertex.partition("/")
    pod, parted, leaf = rest.partition("/")
    if kind == "leaf" and parted:
        return f"{leaf} of {pod}" if pod else leaf
    return pod or vertex if kind == "pod" else vertex


def _path(ground: _Ground, node: str) -> list[str]:
    """The node, its blocks, and the outermost one; a node without a leaf stands for its own blocks."""
    path: tuple[str, ...] = ground.graph.nodes[node]["path"]
    missing = len(ground.outer) - len(path)
    return [*[node] * (1 + missing), *path]


def _joining(cluster: ClusterSpec, ground: _Ground, found: list[Standing], gpu: IntArray) -> list[Standing]:
    """The level that joins rails, where the allocation lies inside one set of them and does not span it."""
    last = found[-1]
    if cluster.crosses_rails_inside or last.joint.rails == 1:
        return []
    at = next(k for k, level in enumerate(cluster.levels) if level.rails == 1)
    whole = np.zeros(len(gpu), dtype=np.int64)
    return [
        Standing(
            level=cluster.levels[at].name,
            depth=last.depth,
            joint=Joint(level=cluster.levels[at].name),
            sub=whole,
            block=whole,
            unit=whole,
            names=(last.level,),
            unit_names=(last.level,),
            links_gb_per_s=np.array([len(gpu) * level_rates(cluster)[at]]),
            rail_apart=False,
        )
    ]


def _with_rails(cluster: ClusterSpec, one: Standing, gpu: IntArray, inner: Sequence[Standing]) -> Standing:
    """Up-links by rail, where the sub-blocks have rails or hang on some."""
    below = inner[-1].joint.rails if inner else 1
    rails = below if below > 1 else one.joint.rails
    if rails == 1 or not inner:
        return one
    return Standing(
        **{
            **vars(one),
            "unit": one.sub * rails + gpu % rails,
            "unit_names": tuple(f"{name} rail {rail}" for name in one.names for rail in range(rails)),
            "links_gb_per_s": np.repeat(one.links_gb_per_s / rails, rails),
            "rail_apart": below > 1 and one.joint.rails == 1 and not cluster.crosses_rails_inside,
        }
    )
