"""The free GPUs of listed nodes: in which blocks they are, and orders in which ranks can run through them.

Ranks go in *units*, the GPUs of one tensor group, which no node cuts. A way to take nodes says how many units
of each are used; an order, which node comes after which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

import numpy as np

from meshwright.cluster_specs.places import blocks_of
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.uplinks import SameCluster, free_of
from meshwright.planner.mapping.problem import IntArray

MOST_WAYS = 6
"""Ways to take the nodes that are looked at for a layout."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOfGpus:
    """GPUs in the order in which ranks run through them."""

    gpus: IntArray
    """Numbers of free GPUs, as `FreeGpus.places` has them; [ranks]."""
    pieces: tuple[int, ...]
    """GPUs of equal pieces that nodes, then leaves, then pods are made of; each divides the next, the last
    is all of them."""


class FreeGpus:
    """The free GPUs of a cluster that lists its nodes, node by node."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._blocks: dict[int, IntArray] = {}
        self.free = np.array(
            [free_of(node, cluster.gpus_per_node) for node in cluster.nodes], dtype=np.int64
        )
        """Of every node."""
        node = np.repeat(np.arange(len(self.free)), self.free)
        first = np.cumsum(self.free) - self.free
        self._first = first
        self.places: IntArray = np.stack([node, np.arange(len(node)) - first[node]], axis=1)
        """(node, local GPU), both from 0, shape [free GPUs, 2]."""

    @cached_property
    def are_part_filled(self) -> bool:
        """Whether a node has some, but not all of its GPUs free."""
        return bool(np.any((self.free > 0) & (self.free < self._cluster.gpus_per_node)))

    def blocks(self, gpus: int) -> IntArray:
        """The block of every free GPU at each level of an allocation of `gpus`; [levels, free GPUs]."""
        if gpus not in self._blocks:
            self._blocks[gpus] = blocks_of(self._cluster, gpus, self.places)
        return self._blocks[gpus]

    def runs(self, unit: int, units: int, shares: Sequence[int]) -> Iterator[RunOfGpus]:
        """Different runs over so many units of so many GPUs each.

        Parameters
        ----------
        unit
            GPUs of one, at least 1.
        units
            How many, at least 1.
        shares
            GPUs that nodes may give each: one whole number of them, or several; multiples of `unit`.
        """
        seen = set()
        for used in self._ways(unit, units, shares):
            for order in (self._by_leaf(used), np.flatnonzero(used)):
                key = (used.tobytes(), order.tobytes())
                if key not in seen:
                    seen.add(key)
                    yield self._run(used * unit, order)

    def _ways(self, unit: int, units: int, shares: Sequence[int]) -> Iterator[IntArray]:
        """Units to take of every node: the fullest nodes, nodes of the fullest leaves, equal shares, and the
        same of all of the fewest nodes and of all nodes as far as they go: a ring is as fast as its smallest
        part, and 7, 7 and 6 GPUs are a faster 20 than 8, 8 and 4.
        """
        room = self.free // unit
        if room.sum() < units:
            return
        leaf, pod = self._labels
        fullest = np.lexsort((np.arange(len(room)), leaf, pod, -room))
        yield _taken(room, fullest, units)
        yield _taken(room, np.lexsort((np.arange(len(room)), -room, leaf, pod)), units)
        fewest = int(np.searchsorted(np.cumsum(room[fullest]), units)) + 1
        for nodes in dict.fromkeys((fewest, int(np.count_nonzero(room)))):
            yield _levelled(room, fullest[:nodes], units)
        for share in list(dict.fromkeys(shares))[:MOST_WAYS]:
            each = share // unit
            parts = room // each
            if units % each == 0 and parts.sum() * each >= units:
                yield _taken(parts, fullest, units // each) * each

    @cached_property
    def _labels(self) -> tuple[IntArray, IntArray]:
        """The position of every node's leaf and pod, those with the most free GPUs first."""
        nodes = self._cluster.nodes
        sides = []
        for keys in (
            [(node.pod or "", node.leaf or "") for node in nodes],
            [(node.pod or "", "") for node in nodes],
        ):
            free: dict[tuple[str, str], int] = {}
            for key, count in zip(keys, self.free.tolist(), strict=True):
                free[key] = free.get(key, 0) + count
            order = {key: at for at, key in enumerate(sorted(free, key=lambda key: -free[key]))}
            sides.append(np.array([order[key] for key in keys], dtype=np.int64))
        return sides[0], sides[1]

    def _by_leaf(self, used: IntArray) -> IntArray:
        """Nodes in use, pod by pod, leaf by leaf, the fullest first."""
        leaf, pod = self._labels
        order = np.lexsort((np.arange(len(used)), -used, leaf, pod))
        return order[used[order] > 0]

    def _run(self, used: IntArray, order: IntArray) -> RunOfGpus:
        """`used` is in GPUs."""
        count = used[order]
        start = np.repeat(self._first[order], count)
        gpus = start + np.arange(len(start)) - np.repeat(np.cumsum(count) - count, count)
        leaf, pod = self._labels
        pieces = [int(np.gcd.reduce(count))]
        for label in (pod * (int(leaf.max()) + 1) + leaf, pod):
            own = label[order]
            ends = np.flatnonzero(np.diff(own, append=-1))
            held = np.diff(np.cumsum(count)[ends], prepend=0)
            pieces.append(gcd(int(np.gcd.reduce(held)), len(gpus)))
        pieces.append(len(gpus))
        rising = [pieces[0]]
        for piece in pieces[1:]:
            if piece > rising[-1] and piece % rising[-1] == 0:
                rising.append(piece)
        return RunOfGpus(gpus=gpus, pieces=tuple(rising))


def _taken(room: IntArray, order: IntArray, wanted: int) -> IntArray:
    """What is taken of each node when they are emptied in an order until there is enough."""
    before = np.cumsum(room[order]) - room[order]
    taken = np.zeros_like(room)
    taken[order] = np.clip(wanted - before, 0, room[order])
    return taken


def _levelled(room: IntArray, nodes: IntArray, wanted: int) -> IntArray:
    """What is taken of each node when all of some give the same, as far as they have it; the first of them
    give what is then missing.
    """
    held = room[nodes]
    # The level is the largest at which no more is taken than is wanted.
    level = max(x for x in range(int(held.max()) + 1) if np.minimum(held, x).sum() <= wanted)
    taken = np.zeros_like(room)
    taken[nodes] = np.minimum(held, level)
    more = nodes[held > level][: wanted - int(taken.sum())]
    taken[more] += 1
    return taken


def free_gpus_of(cluster: ClusterSpec) -> FreeGpus:
    """The free GPUs of a cluster that lists its nodes; kept for the cluster."""
    return _free_gpus(SameCluster(cluster))


@lru_cache(maxsize=16)
def _free_gpus(same: SameCluster) -> FreeGpus:
    return FreeGpus(same.cluster)
