"""Where the ranks of a mapping stand in the fabric: the block of every level, and the up-links they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cluster_specs.allocation import FabricLevels, Place, allocated_places, full_levels
from meshwright.cluster_specs.graph import Joint, Outline, node_graph, outline_of
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import leaves_are_domains, level_rates
from meshwright.planner.mapping.problem import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class LevelPositions:
    """One level: the blocks that ranks are in, and the sub-blocks that the level joins."""

    level: str
    depth: int
    """Its place among the fabric's levels; of the level below where the allocation does not span it."""
    joint: Joint
    sub: IntArray
    """The sub-block of every rank, shape [ranks]; at the innermost level a GPU."""
    block: IntArray
    """Its block."""
    sub_links_gb_per_s: FloatArray
    """Nominal, of the up-links of every sub-block in one direction, as far as they are the job's."""
    name_of: Callable[[int], str]
    """Of a sub-block."""
    rails: int = 1
    """Rails that a sub-block's up-links are spread over."""
    rail: IntArray | None = None
    """The rail of every rank, where there are some."""
    rail_apart: bool = False
    """Whether only this level joins the rails that the sub-blocks hold."""

    @property
    def unit(self) -> IntArray:
        """The up-link that every rank uses: that of its sub-block, or of its sub-block and rail."""
        return self.sub if self.rail is None else self.sub * self.rails + self.rail

    @property
    def links_gb_per_s(self) -> FloatArray:
        """Of every such up-link."""
        return np.repeat(self.sub_links_gb_per_s / self.rails, self.rails)

    def unit_name(self, unit: int) -> str:
        """Whose up-link it is."""
        sub, rail = divmod(unit, self.rails)
        return self.name_of(sub) + (f" rail {rail}" if self.rails > 1 else "")


@dataclass(frozen=True, kw_only=True)
class RankPositions:
    """A mapping on a fabric."""

    levels: FabricLevels
    by_level: tuple[LevelPositions, ...]
    """From the inside out."""
    node: IntArray
    """The node of every rank."""


@dataclass(frozen=True, kw_only=True)
class _Outer:
    """A level that joins nodes or what is larger, for every node in use."""

    depth: int
    joint: Joint
    sub: IntArray
    """The sub-block of every node in use."""
    block: IntArray
    links_gb_per_s: FloatArray
    """Of every sub-block."""
    name_of: Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class _NodesInUse:
    """The nodes in use, and which of them every rank is in."""

    levels: FabricLevels
    node: IntArray
    """The node of every rank, counted through those in use."""
    within: IntArray
    """Its GPU there."""
    size: int
    """GPUs of a node."""
    nodes: int
    node_name: Callable[[int], str]
    outer: tuple[_Outer, ...]


def rank_positions(cluster: ClusterSpec, places: Sequence[Place]) -> RankPositions:
    """The levels that a mapping touches; `places[r]` is the GPU of rank r.

    Links are those of `node_graph` where nodes are listed with their leaves, of `fabric_graph` otherwise.
    """
    listed = any(node.leaf is not None for node in cluster.nodes)
    in_use = _listed(cluster, places) if listed else _regular(cluster, places)
    levels = [*_inside(in_use), *_outside(in_use)]
    levels += _joining(cluster, levels, len(places))
    gpu = np.array([gpu for _, gpu in places], dtype=np.int64)
    railed = tuple(
        _with_rails(cluster, level, gpu, levels[:depth]) for depth, level in enumerate(levels)
    )
    node = np.array([node for node, _ in places], dtype=np.int64)
    return RankPositions(levels=in_use.levels, by_level=railed, node=node)


def _regular(cluster: ClusterSpec, places: Sequence[Place]) -> _NodesInUse:
    gpus, per_node = len(places), cluster.gpus_per_node
    outline = outline_of(cluster, gpus)
    order = {place: index for index, place in enumerate(allocated_places(cluster, gpus))}
    position = np.array([order.get(p, p[0] * per_node + p[1]) for p in places], dtype=np.int64)
    size = outline.node_gpus
    first = np.arange(max(gpus, int(position.max()) + 1) // size) * size
    below, outer = size, []
    for step, depth in enumerate(outline.outer):
        block = int(outline.levels.blocks[depth])
        sub = first // below
        outer.append(
            _Outer(
                depth=depth,
                joint=outline.joints[step],
                sub=sub,
                block=first // block,
                links_gb_per_s=np.full(int(sub[-1]) + 1, outline.up_gb_per_s[step]),
                name_of=_block_of(outline, below, step),
            )
        )
        below = block
    return _NodesInUse(
        levels=outline.levels,
        node=position // size,
        within=position % size,
        size=size,
        nodes=len(first),
        node_name=lambda index: f"node{index}",
        outer=tuple(outer),
    )


def _listed(cluster: ClusterSpec, places: Sequence[Place]) -> _NodesInUse:
    graph, levels = node_graph(cluster), full_levels(cluster)
    used = sorted({node for node, _ in places})
    index = {node: index for index, node in enumerate(used)}
    names = [cluster.nodes[node].name for node in used]
    up: dict[str, float] = graph.graph["up_gb_per_s"]
    joints: tuple[Joint, ...] = graph.graph["joints"]
    paths = []
    for name in names:
        path: tuple[str, ...] = graph.nodes[name]["path"]
        # A node without a leaf stands for its own blocks.
        paths.append([*[name] * (1 + len(joints) - len(path)), *path])
    outer = []
    for step, depth in enumerate(_outer_depths(cluster, levels, len(joints))):
        subs = list(dict.fromkeys(path[step] for path in paths))
        blocks = {
            name: index
            for index, name in enumerate(dict.fromkeys(path[step + 1] for path in paths))
        }
        number = {name: index for index, name in enumerate(subs)}
        outer.append(
            _Outer(
                depth=depth,
                joint=joints[step],
                sub=np.array([number[path[step]] for path in paths], dtype=np.int64),
                block=np.array([blocks[path[step + 1]] for path in paths], dtype=np.int64),
                links_gb_per_s=np.array([up[name] for name in subs]),
                name_of=_listed_name(subs),
            )
        )
    return _NodesInUse(
        levels=levels,
        node=np.array([index[node] for node, _ in places], dtype=np.int64),
        within=np.array([gpu for _, gpu in places], dtype=np.int64),
        size=cluster.gpus_per_node,
        nodes=len(names),
        node_name=names.__getitem__,
        outer=tuple(outer),
    )


def _block_of(outline: Outline, gpus: int, step: int) -> Callable[[int], str]:
    return lambda sub: outline.names_at(sub * gpus)[step]


def _listed_name(names: Sequence[str]) -> Callable[[int], str]:
    return lambda sub: _shown(names[sub])


def _outer_depths(cluster: ClusterSpec, levels: FabricLevels, joints: int) -> list[int]:
    """The levels that join nodes, leaves and pods; the last joins all."""
    last = len(levels.names) - 1
    network = list(range(len(levels.names) - len(cluster.levels), len(levels.names))) or [last]
    reached = [0, *network] if leaves_are_domains(cluster) else network
    return [*(reached[min(step, len(reached) - 1)] for step in range(joints - 1)), last]


def _inside(in_use: _NodesInUse) -> list[LevelPositions]:
    """Levels up to the node; sub-blocks count through the nodes in use."""
    levels, below = [], 1
    blocks, rates = in_use.levels.blocks.tolist(), in_use.levels.gb_per_s.tolist()
    for depth in range(min((level.depth for level in in_use.outer), default=len(blocks))):
        block = min(blocks[depth], in_use.size)
        each = -(-in_use.size // below)
        what = "GPU" if below == 1 else in_use.levels.names[depth - 1]
        levels.append(
            LevelPositions(
                level=in_use.levels.names[depth],
                depth=depth,
                joint=Joint(level=in_use.levels.names[depth]),
                sub=in_use.node * each + in_use.within // below,
                block=in_use.node * -(-in_use.size // block) + in_use.within // block,
                sub_links_gb_per_s=np.full(in_use.nodes * each, below * rates[depth]),
                name_of=_part_of(in_use, what, each),
            )
        )
        below = block
    return levels


def _part_of(in_use: _NodesInUse, what: str, each: int) -> Callable[[int], str]:
    return lambda sub: f"{in_use.node_name(sub // each)} {what} {sub % each}"


def _outside(in_use: _NodesInUse) -> list[LevelPositions]:
    """Levels that join nodes and what lies around them."""
    levels = []
    for outer in in_use.outer:
        sub, links, name_of = outer.sub[in_use.node], outer.links_gb_per_s, outer.name_of
        if outer.depth == 0:  # NVLink reaches beyond the node: what it joins are GPUs, not nodes
            sub = in_use.node * in_use.size + in_use.within
            links = np.full(in_use.nodes * in_use.size, float(in_use.levels.gb_per_s[0]))
            name_of = _part_of(in_use, "GPU", in_use.size)
        levels.append(
            LevelPositions(
                level=in_use.levels.names[outer.depth],
                depth=outer.depth,
                joint=outer.joint,
                sub=sub,
                block=outer.block[in_use.node],
                sub_links_gb_per_s=links,
                name_of=name_of,
            )
        )
    return levels


def _shown(vertex: str) -> str:
    """A block of `node_graph` in words: leaf/pod-1/leaf-a is leaf-a of pod-1."""
    kind, _, rest = vertex.partition("/")
    pod, parted, leaf = rest.partition("/")
    if kind == "leaf" and parted:
        return f"{leaf} of {pod}" if pod else leaf
    return pod or vertex if kind == "pod" else vertex


def _joining(
    cluster: ClusterSpec, levels: Sequence[LevelPositions], ranks: int
) -> list[LevelPositions]:
    """The level that joins rails, where the allocation lies inside one set of them and does not span it."""
    last = levels[-1]
    if cluster.crosses_rails_inside or last.joint.rails == 1:
        return []
    outer_level = next(k for k, level in enumerate(cluster.levels) if level.rails == 1)
    all_ranks = np.zeros(ranks, dtype=np.int64)
    return [
        LevelPositions(
            level=cluster.levels[outer_level].name,
            depth=last.depth,
            joint=Joint(level=cluster.levels[outer_level].name),
            sub=all_ranks,
            block=all_ranks,
            sub_links_gb_per_s=np.array([ranks * level_rates(cluster)[outer_level]]),
            name_of=lambda _: last.level,
        )
    ]


def _with_rails(
    cluster: ClusterSpec, level: LevelPositions, gpu: IntArray, inner: Sequence[LevelPositions]
) -> LevelPositions:
    """Up-links by rail, where the sub-blocks have rails or hang on some."""
    below = inner[-1].joint.rails if inner else 1
    rails = below if below > 1 else level.joint.rails
    if rails == 1 or not inner:
        return level
    apart = below > 1 and level.joint.rails == 1 and not cluster.crosses_rails_inside
    return replace(level, rails=rails, rail=gpu % rails, rail_apart=apart)
