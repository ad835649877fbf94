"""How many members of each group blocks can hold at the most, whatever GPU every rank of a layout is on.

For each kind of group on its own: no mapping reaches further in any of them, so a price under these numbers
is at or below that of every mapping. Slots, orders and the other groups are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import Layout, Placement
from meshwright.planner.mapping.choice.free_gpus import FreeGpus

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What the blocks of one level hold, counted in some unit."""

    blocks: IntArray
    """Of each block, at least 1."""
    idle: int
    """What stays free of all of them."""

    @property
    def least_used(self) -> IntArray:
        """Of each block, where all that stays free is in it."""
        return np.maximum(self.blocks - self.idle, 0)


def most_members(cluster: ClusterSpec, free: FreeGpus, layout: Layout) -> Placement:
    """Members of a group inside the block that paces it, at most; arrays [levels].

    Parameters
    ----------
    cluster
        With its nodes listed.
    free
        Its free GPUs.
    layout
        One layout, on no more GPUs than are free.
    """
    degrees = {name: int(getattr(layout, name)) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    tp, world = degrees["tp"], int(layout.gpus)
    every: list[_Room] = []
    units: list[_Room | None] = []
    node = free.places[:, 0]
    # Where a domain is no larger than a node, tensor groups lie in nodes: others see whole units of them.
    in_nodes = cluster.nvlink_domain <= cluster.gpus_per_node and tp <= cluster.gpus_per_node
    unit_of_node = (free.free // tp)[node] / np.maximum(free.free[node], 1)
    for of_level in free.blocks(world):
        gpus = np.bincount(of_level)
        gpus = gpus[gpus > 0]
        every.append(_Room(blocks=gpus, idle=len(node) - world))
        whole = gpus // tp
        if in_nodes:
            whole = np.rint(np.bincount(of_level, weights=unit_of_node)).astype(np.int64)
        if in_nodes and not _holds_nodes(of_level, node):
            units.append(None)
            continue
        whole = whole[whole > 0]
        units.append(_Room(blocks=whole, idle=int(whole.sum()) - world // tp))
    edp = tp * degrees["cp"] * degrees["dp"] // (degrees["etp"] * degrees["ep"])
    levels = range(len(every))

    def rings(size: int, *, of_units: bool = True) -> IntArray:
        found = []
        for level in levels:
            counted = units[level] if of_units else None
            room, groups = (every[level], world // size)
            if counted is not None:
                room, groups = counted, world // tp // size
            found.append(_of_a_ring(room, size, groups))
        return np.maximum.accumulate(np.array(found, dtype=np.int64))

    def chains() -> IntArray:
        rooms = [every[level] if room is None else room for level, room in enumerate(units)]
        pipelines = [world if room is None else world // tp for room in units]
        found = [
            _of_a_chain(room, degrees["pp"], count // degrees["pp"])
            for room, count in zip(rooms, pipelines, strict=True)
        ]
        return np.maximum.accumulate(np.array(found, dtype=np.int64))

    exchanges = [_of_an_exchange(room, degrees["ep"], world // degrees["ep"]) for room in every]
    return Placement(
        tp=np.full(len(every), tp, dtype=np.int64),
        cp=rings(degrees["cp"]),
        dp=rings(degrees["dp"]),
        pp=chains(),
        etp=rings(degrees["etp"], of_units=False),
        ep=np.maximum.accumulate(np.array(exchanges, dtype=np.int64)),
        edp=rings(edp, of_units=False),
        dp_cp=rings(degrees["dp"] * degrees["cp"]),
    )


def _holds_nodes(of_level: IntArray, node: IntArray) -> bool:
    """Whether no node is in several blocks."""
    pairs = len(np.unique(of_level * (int(node.max()) + 1) + node))
    return pairs == len(np.unique(node))


def _fits_whole(room: _Room, size: int, groups: int) -> bool:
    """Whether blocks could hold that many groups without cutting one."""
    return int((room.blocks // size).sum()) >= groups


def _of_a_ring(room: _Room, size: int, groups: int) -> int:
    """What a ring has at most: of the GPUs in use in a block, over the rings that leave it, the least.

    A block that cannot use a whole number of groups cuts one at least. Where no block must, but not all
    groups fit, two blocks cut one.
    """
    if size == 1 or _fits_whole(room, size, groups):
        return size
    cuts = room.blocks[room.blocks // size * size < room.least_used]
    most = int(cuts.min()) if len(cuts) else int(np.sort(room.blocks)[-2:][0])
    return max(1, min(most, size - 1))


def _of_a_chain(room: _Room, stages: int, pipelines: int) -> int:
    """Stages between two crossings of the pipeline that crosses most, on average."""
    if stages == 1 or _fits_whole(room, stages, pipelines):
        return stages
    crossings = max(1, -(-stages // int(room.blocks.max())) - 1)
    return stages // (crossings + 1)


def _of_an_exchange(room: _Room, size: int, groups: int) -> int:
    """What an all-to-all keeps inside a block, of `size` parts, in the block that keeps least.

    With parts of c members a block that uses u keeps sum c^2 / u of them, at most as many whole groups as it
    can hold and the rest together. Between two whole numbers of groups that is convex in u.
    """
    if size == 1 or _fits_whole(room, size, groups):
        return size
    low, high = np.maximum(room.least_used, 1), room.blocks

    def kept(used: IntArray) -> IntArray:
        whole, rest = used // size, used % size
        return np.asarray((whole * size * size + rest * rest) // used, dtype=np.int64)

    best = np.maximum(kept(low), kept(high))
    best = np.where(high // size * size >= low, size, best)
    in_use = room.least_used > 0
    most = int(best[in_use].min()) if np.any(in_use) else size
    return max(1, min(most, size - 1))
