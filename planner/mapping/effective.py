"""What an irregular mapping means to the cost model: members of groups inside the blocks of each level.

The cost model prices a group by how many of its members share the up-links of a block. Under an irregular
mapping that differs from block to block; the worst one paces a collective, so it is the one that counts:
GPUs in use in the block over the groups that it cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import (
    FabricLevels,
    blocks_of,
    fabric_levels,
    full_levels,
    leaves_are_nodes,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster, free_of
from meshwright.costmodel.layout import (
    AXES,
    GROUPS,
    PLACED_AXES,
    Ints,
    Layout,
    Placement,
    StagedPlacement,
)
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import LayoutPricing, Stages
from meshwright.planner.bounds.mappings import Matrices
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.problem import IntArray, cut_groups, held_by
from meshwright.planner.mapping.slots import Instance


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Members of a group of each axis inside the block of a level that paces it: all that its price knows of
    a mapping.
    """

    dp_cp: Ints
    cp: Ints
    ep: Ints
    edp: Ints
    together: bool | NDArray[np.bool_]
    """Whether every pipeline lies in one block."""
    stage_ep: Ints
    """`ep` of each pipeline stage, [..., stages]."""


def placement_of(workload: Workload, instance: Instance, assignment: IntArray) -> Placement:
    """The members inside a block of every level, rounded down; arrays [levels].

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    instance
        Whose slots they are.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    return placement_with(workload, instance, *reaches_of(instance, assignment))


def reaches_of(instance: Instance, assignment: IntArray) -> tuple[Reach, Reach]:
    """In leaves and in pods, with the GPUs that are in use there: idle ones lend their adapters to nobody.

    Parameters
    ----------
    instance
        Whose slots they are.
    assignment
        The leaf of every slot, shape [stages, slots].
    """
    problem = instance.problem
    leaf_slots = np.bincount(assignment.ravel(), minlength=len(problem.leaf_slots))
    leaf_gpus = leaf_slots.astype(np.int64) * instance.slots.gpus
    pod_gpus = np.zeros(problem.pods, dtype=np.int64)
    np.add.at(pod_gpus, problem.pod_of, leaf_gpus)
    return (
        _reach(instance, assignment, leaf_gpus),
        _reach(instance, problem.pod_of[assignment], pod_gpus),
    )


def free_gpus(instance: Instance) -> tuple[IntArray, IntArray]:
    """Free GPUs, in whole slots, of each leaf and of each pod.

    Parameters
    ----------
    instance
        Its slots that are free, whether in use or not.

    Returns
    -------
    tuple of array of int, shapes [leaves] and [pods]
        GPUs.
    """
    problem = instance.problem
    leaves = np.asarray(problem.leaf_slots, dtype=np.int64) * instance.slots.gpus
    pods = np.zeros(problem.pods, dtype=np.int64)
    np.add.at(pods, problem.pod_of, leaves)
    return leaves, pods


def placement_with(workload: Workload, instance: Instance, leaf: Reach, pod: Reach) -> Placement:
    """The placement of any assignment that reaches so far in leaves and pods; arrays [..., levels].

    A `StagedPlacement` where some stage's expert groups reach further than another one's, and count.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    instance
        Whose slots they are.
    leaf, pod
        How far groups reach in leaves and in pods; fields broadcast against each other.
    """
    levels = fabric_levels(workload.cluster, workload.gpus)
    sizes = _degrees(instance)
    at_leaf, at_pod = _depths(workload, levels)
    at_full_size = full_levels(workload.cluster)
    full = dict(zip(at_full_size.names, at_full_size.blocks.tolist(), strict=True))
    members: dict[str, list[Ints]] = {name: [] for name in (*GROUPS, "stage_ep")}
    for depth in range(len(levels.blocks)):
        in_block: Mapping[str, Ints] = sizes
        if depth < len(levels.blocks) - 1:
            if depth == at_leaf:
                in_block = _members(instance, sizes, leaf)
            elif depth == at_pod:
                in_block = _members(instance, sizes, pod)
            else:
                in_block = _within(instance, full[levels.names[depth]])
        for name, inside in members.items():
            below = inside[-1] if inside else 1
            inside.append(np.maximum(below, np.minimum(in_block[name], sizes[name])))
    of_stages = np.stack(
        np.broadcast_arrays(*members.pop("stage_ep"), leaf.stage_ep, pod.stage_ep)[:-2], axis=-1
    )
    placement = Placement(
        **{
            name: np.stack(np.broadcast_arrays(*inside, leaf.dp_cp, pod.dp_cp)[:-2], axis=-1)
            for name, inside in members.items()
        }
    )
    alike = np.array_equal(of_stages, np.broadcast_to(placement.ep[..., None, :], of_stages.shape))
    if alike or not instance.stages_apart:
        return placement
    return StagedPlacement(**vars(placement), stage_ep=of_stages)


def _members(instance: Instance, sizes: dict[str, int], reach: Reach) -> dict[str, Ints]:
    return {
        "tp": sizes["tp"],
        "cp": reach.cp,
        "dp": np.maximum(1, reach.dp_cp // reach.cp),
        "dp_cp": reach.dp_cp,
        "pp": np.where(reach.together, sizes["pp"], instance.inside.pp),
        "etp": sizes["etp"],
        "ep": reach.ep,
        "edp": reach.edp,
        "stage_ep": reach.stage_ep,
    }


def _degrees(instance: Instance) -> dict[str, int]:
    layout = instance.layout
    degrees = {name: int(getattr(layout, name)) for name in (*PLACED_AXES, "edp")}
    return degrees | {"dp_cp": degrees["dp"] * degrees["cp"], "stage_ep": degrees["ep"]}


def levels_seen(workload: Workload) -> tuple[bool, bool]:
    """Whether the price of a layout on these GPUs sees in which leaf, and in which pod, a slot is.

    Parameters
    ----------
    workload
        On as many GPUs as the layouts in question.

    Returns
    -------
    tuple of (bool, bool)
        Of leaves and of pods; the outermost level holds everything and tells nothing apart.
    """
    levels = fabric_levels(workload.cluster, workload.gpus)
    leaf, pod = _depths(workload, levels)
    last = len(levels.blocks) - 1
    return 0 <= leaf < last, 0 <= pod < last


def _depths(workload: Workload, levels: FabricLevels) -> tuple[int, int]:
    """The levels whose blocks are leaves and pods; -1 where an allocation has no such level."""
    full = full_levels(workload.cluster)
    outside = [
        name for name, block in zip(full.names, full.blocks, strict=True)
        if block > workload.cluster.gpus_per_node
    ]  # fmt: skip
    depths = [levels.names.index(name) if name in levels.names else -1 for name in outside]
    if leaves_are_nodes(workload.cluster):
        depths = [-1, *depths]
    return (*depths, -1, -1)[0], (*depths, -1, -1)[1]


def _within(instance: Instance, block: int) -> dict[str, int]:
    """Inside a slot the axes nest in Megatron's order."""
    inside, stride = instance.inside, 1
    degrees: dict[str, int] = {}
    for axis in AXES:
        degree = getattr(inside, axis)
        ranks = gcd(block, stride * degree)
        degrees[axis] = ranks // stride if ranks % stride == 0 else 1
        degrees[axis] = degree if block >= stride * degree else max(degrees[axis], 1)
        stride *= degree
    layout, dense = instance.layout, degrees["tp"] * degrees["cp"] * degrees["dp"]
    etp = gcd(int(layout.etp), dense)
    expert = gcd(int(layout.expert_group), dense)
    return degrees | {
        "etp": etp,
        "ep": max(expert // etp, 1),
        "edp": max(dense // expert, 1),
        "dp_cp": degrees["dp"] * degrees["cp"],
        "stage_ep": max(expert // etp, 1),
    }


def rings_per_slot(instance: Instance) -> tuple[int, int, int]:
    """Groups that one cut of slots cuts at once: dense rings of a stage, context groups, expert rings.

    Parameters
    ----------
    instance
        Whose slots are cut.
    """
    inside, layout = instance.inside, instance.layout
    rings = inside.tp * inside.pp
    experts = min(int(layout.expert_group), inside.tp * inside.cp * inside.dp)
    return rings, rings * inside.dp, experts * inside.pp


def _reach(instance: Instance, where: IntArray, free: IntArray) -> Reach:
    """For the block of every slot and the GPUs of blocks that count."""
    traffic, layout, blocks = instance.problem.traffic, instance.layout, len(free)
    sizes, stages = _degrees(instance), len(where)
    dense, context, expert = rings_per_slot(instance)

    def worst(groups: IntArray, per_group: int, degree: int) -> int:
        cut = cut_groups(groups, blocks) * per_group
        if not cut.any():
            return degree
        return max(1, min(int(np.min(free[cut > 0] // cut[cut > 0])), degree - 1))

    by_slot = where.reshape(stages, -1, traffic.expert_slots)
    edp_groups = by_slot.transpose(0, 2, 1).reshape(-1, by_slot.shape[1])
    of_stages = [_expert_members(stage[None], blocks, int(layout.ep)) for stage in by_slot]
    return Reach(
        dp_cp=worst(where, dense, sizes["dp_cp"]),
        cp=worst(where.reshape(-1, traffic.context_slots), context, sizes["cp"]),
        ep=min(of_stages),
        edp=worst(edp_groups, expert, sizes["edp"]),
        stage_ep=np.array(of_stages, dtype=np.int64),
        together=stages == 1 or not bool(np.any(where[:-1] != where[1:])),
    )


def _expert_members(by_slot: IntArray, blocks: int, degree: int) -> int:
    """Of the smallest part of a group that a block holds: its GPUs send the largest share outside."""
    size = by_slot.shape[2]
    members = held_by(by_slot.reshape(-1, size), blocks)
    smallest = int(members[members > 0].min())
    return max(1, degree * smallest // int(size))


# The free GPUs of listed nodes: in which blocks they are, and orders in which ranks can run through them.
#
# Ranks go in *units*, the GPUs of one tensor group, which no node cuts. A way to take nodes says how many
# units of each are used; an order, which node comes after which.


MOST_WAYS = 6
"""Ways to take the nodes that are looked at for a layout."""
MOST_ORDERED = 64
"""Nodes, and units on them, of which every order is sought."""


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
        self._orders: dict[tuple[int, int, int, int], list[IntArray] | None] = {}
        self.free = np.array(
            [free_of(node, cluster.gpus_per_node) for node in cluster.nodes], dtype=np.int64
        )
        """Of every node."""
        node = np.repeat(np.arange(len(self.free)), self.free)
        first = np.cumsum(self.free) - self.free
        self.first: IntArray = first
        """The number of each node's first free GPU, [nodes]; of no meaning where it has none."""
        self.places: IntArray = np.stack([node, np.arange(len(node)) - first[node]], axis=1)
        """(node, local GPU), both from 0, shape [free GPUs, 2]."""

    @cached_property
    def are_part_filled(self) -> bool:
        """Whether a node has some, but not all of its GPUs free."""
        return bool(np.any((self.free > 0) & (self.free < self._cluster.gpus_per_node)))

    def blocks(self, gpus: int) -> IntArray:
        """The block of every free GPU at each level of an allocation of `gpus`; [levels, free GPUs].

        Parameters
        ----------
        gpus
            Of the allocation, at least 1: it decides which levels there are.
        """
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

    def every_order(self, unit: int, units: int, gpus: int, limit: int) -> list[IntArray] | None:
        """The number of every GPU in turn, under every order of units on nodes that blocks tell apart.

        Parameters
        ----------
        unit
            GPUs of one, at least 1, all on one node.
        units
            How many, at least 1.
        gpus
            Of the allocation whose blocks count.
        limit
            Orders at the most.

        Returns
        -------
        list of array of int, shape [unit * units]
            None where there are more than `limit`, a node lies in several blocks, or nodes or units are more
            than `MOST_ORDERED`.
        """
        key = (unit, units, gpus, limit)
        if key not in self._orders:
            self._orders[key] = self._ordered(unit, units, gpus, limit)
        return self._orders[key]

    def _ordered(self, unit: int, units: int, gpus: int, limit: int) -> list[IntArray] | None:
        used = np.flatnonzero(self.free // unit)
        if max(len(used), units) > MOST_ORDERED:
            return None
        blocks = self.blocks(gpus)
        paths = blocks[:, self.first[used]].T
        if np.any(blocks != blocks[:, self.first[self.places[:, 0]]]):
            return None
        room = (self.free // unit)[used]
        like = _likeness(paths, room)
        orders: list[tuple[int, ...]] = []
        taken = [0] * len(used)

        def extend(order: tuple[int, ...], touched: frozenset[tuple[int, int]]) -> bool:
            """Whether no more than `limit` were found."""
            if len(order) == units:
                orders.append(order)
                return len(orders) <= limit
            seen = set()
            for node in range(len(used)):
                path = [(level, int(block)) for level, block in enumerate(paths[node])]
                # A block without a rank yet is as good as any other like it.
                sight = tuple(
                    pair if pair in touched else like[pair] for pair in [*path, (-1, node)]
                )
                if taken[node] == room[node] or sight in seen:
                    continue
                seen.add(sight)
                taken[node] += 1
                ended = not extend((*order, node), touched | {*path, (-1, node)})
                taken[node] -= 1
                if ended:
                    return False
            return True

        if not extend((), frozenset()):
            return None
        return [self.in_order(used, order, unit) for order in orders]

    def in_tree(self, rooms: IntArray) -> IntArray:
        """Nodes pod by pod, leaf by leaf, those with the most free GPUs and room first, [nodes].

        Parameters
        ----------
        rooms
            Of each node, shape [nodes]: what counts among nodes of one leaf.
        """
        leaf, pod = self._labels
        return np.asarray(np.lexsort((np.arange(len(rooms)), -rooms, leaf, pod)), dtype=np.int64)

    def in_order(self, used: IntArray, order: tuple[int, ...], unit: int) -> IntArray:
        """The GPUs of units on nodes in turn; a node gives its own from the first on.

        Parameters
        ----------
        used
            Numbers of nodes, which `order` counts through.
        order
            The position in `used` of the node of each unit, in the order of the ranks.
        unit
            GPUs of one, at least 1.

        Returns
        -------
        array of int, shape [units * unit]
            Numbers of free GPUs, as `places` has them.
        """
        begun = [order[:at].count(node) for at, node in enumerate(order)]
        start = self.first[used[list(order)]] + np.array(begun) * unit
        return np.asarray((start[:, None] + np.arange(unit)).reshape(-1), dtype=np.int64)

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
            yield levelled(room, fullest[:nodes], units)
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
        start = np.repeat(self.first[order], count)
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


def _likeness(paths: IntArray, room: IntArray) -> dict[tuple[int, int], object]:
    """Of every block (level, number) and node (-1, position) what it holds: equal where two are alike.

    `paths` has the blocks of every node, levels inside out, [nodes, levels]; `room` its units.
    """
    like: dict[tuple[int, int], object] = {
        (-1, node): (int(units),) for node, units in enumerate(room)
    }
    inner = [(-1, node) for node in range(len(room))]
    for level in range(paths.shape[1]):
        pairs = [(level, int(block)) for block in paths[:, level]]
        for pair in dict.fromkeys(pairs):
            parts = {
                part: repr(like[part]) for part, of in zip(inner, pairs, strict=True) if of == pair
            }
            like[pair] = tuple(sorted(parts.values()))
        inner = pairs
    return like


def _taken(room: IntArray, order: IntArray, wanted: int) -> IntArray:
    """What is taken of each node when they are emptied in an order until there is enough."""
    before = np.cumsum(room[order]) - room[order]
    taken = np.zeros_like(room)
    taken[order] = np.clip(wanted - before, 0, room[order])
    return taken


def levelled(room: IntArray, nodes: IntArray, wanted: int) -> IntArray:
    """What is taken of each node when all of some give the same, as far as they have it; the first of them
    give what is then missing.

    Parameters
    ----------
    room
        What each node has, shape [nodes].
    nodes
        Numbers of the nodes that give, in the order in which one more is asked of them.
    wanted
        Taken in all, at least 0, at most what these nodes have.

    Returns
    -------
    array of int, shape [nodes]
        What each gives; 0 of those that are not named.
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
    """The free GPUs of a cluster that lists its nodes; kept for the cluster.

    Parameters
    ----------
    cluster
        With its nodes listed.
    """
    return _free_gpus(SameCluster(cluster))


@lru_cache(maxsize=16)
def _free_gpus(same: SameCluster) -> FreeGpus:
    return FreeGpus(same.cluster)


# Prices of a layout under placements that are given.


PROFILE = "profile"
"""The table of a layout's mappings has one column: the number of its placement."""


Peaks = dict[Layout, dict[Stages, NDArray[np.float64]]]
"""What each rank of a split holds, in GiB, by layout and split: wherever its groups lie."""


class PlacedAs(CostModelPricing):
    """Prices of a layout under given placements, arrays [k, levels]; its mappings are their numbers."""

    def __init__(
        self, workload: Workload, placement: Placement, peaks_gib: Peaks | None = None
    ) -> None:
        super().__init__(workload)
        self._placement = placement
        self._known_gib: Peaks = {} if peaks_gib is None else peaks_gib

    @property
    def is_staged(self) -> bool:
        """Whether stages lie unlike each other under some of them."""
        return isinstance(self._placement, StagedPlacement)

    def _pricing_of(self, workload: Workload, layout: Layout) -> LayoutPricing:
        return _PlacedPricing(workload, layout, self._placement, self._known_gib)


class _PlacedPricing(LayoutPricing):
    def __init__(
        self, workload: Workload, layout: Layout, placement: Placement, known_gib: Peaks
    ) -> None:
        super().__init__(workload, layout)
        self._placement = placement
        self._peaks_gib = known_gib.setdefault(layout, {})

    def _placed(self, table: Matrices) -> Placement:
        return self._placement.take(table[PROFILE][:, 0])
