"""What part of a cluster a job takes: how many GPUs, and which nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.schema import ClusterSpec, Medium, NodeSpec
from meshwright.cluster_specs.tiers import (
    Key,
    SameCluster,
    Tier,
    Uplink,
    first_outside_a_leaf,
    free_of,
    measured_tiers,
    uplinks,
)
from meshwright.errors import InputError, require_whole, shown, suggestion

# The names of nodes, as hostfiles and start scripts write them.


def node_name(cluster: ClusterSpec, index: int) -> str:
    """The name of a node, counted from 0: as listed, or by the cluster's pattern, which counts from 1.

    Parameters
    ----------
    cluster
        Whose nodes are listed, or numbered by its pattern.
    index
        From 0, below the number of nodes.
    """
    if cluster.nodes:
        return cluster.nodes[index].name
    return cluster.node_name_pattern.format(index + 1)


def names_are_known(cluster: ClusterSpec) -> bool:
    """Whether node names are those of hosts: listed, or by a pattern of the cluster's own.

    The default pattern only counts nodes: there are no hosts of these names.

    Parameters
    ----------
    cluster
        Whose nodes are listed, or numbered by its pattern.
    """
    default = ClusterSpec.model_fields["node_name_pattern"].default
    return bool(cluster.nodes) or cluster.node_name_pattern != default


def check_gpus(cluster: ClusterSpec, gpus: int) -> None:
    """Raises InputError, with both numbers, if the cluster has not that many GPUs.

    Parameters
    ----------
    cluster
        As far as it is free: of listed nodes their free GPUs count.
    gpus
        Asked for, from 1; a whole number.
    """
    require_whole("gpus", gpus)
    if not 1 <= gpus <= cluster.gpus:
        chosen = any(node.free_gpus == 0 for node in cluster.nodes)
        where = " free on the nodes to take" if chosen else ""
        raise InputError(
            f"gpus: {shown(gpus)} asked for, but cluster {cluster.name!r} has {cluster.gpus}{where}; "
            f"choose 1 to {cluster.gpus}"
        )


def allocated_gpus(cluster: ClusterSpec, gpus: int | None) -> int:
    """The GPUs to plan for: those asked for, or all of a cluster that has a size of its own.

    Raises InputError if the cluster has fewer, or is a kind of node in any number and `gpus` is not given.

    Parameters
    ----------
    cluster
        A machine, or a kind of node in any number (`elastic`).
    gpus
        Asked for, from 1; None for all of a machine.

    Returns
    -------
    int
        From 1 to the cluster's GPUs.
    """
    if gpus is None and cluster.elastic:
        raise InputError(
            f"gpus: missing; {cluster.name!r} is a kind of node, not one machine; "
            f"say how many GPUs with --gpus (1 to {cluster.gpus})"
        )
    if gpus is not None:
        check_gpus(cluster, gpus)
    return cluster.gpus if gpus is None else gpus


def expand_nodes(cluster: ClusterSpec, gpus: int) -> list[tuple[str, int]]:
    """(name, GPUs to use) of the nodes of an allocation, as listed; one of them may be part-filled.

    Without a list, the first nodes: they are numbered without gaps, also where racks are not filled (64 of
    72 GPUs). Of listed nodes those with the most free GPUs, so that their order in the list decides nothing.
    Raises InputError if the cluster has fewer.

    Parameters
    ----------
    cluster
        With a list of nodes, or without.
    gpus
        From 1 to the cluster's free GPUs.

    Returns
    -------
    list of (str, int)
        Nodes that are used, in the order of the list, each with 1 to `gpus_per_node` GPUs; together `gpus`.
    """
    check_gpus(cluster, gpus)
    nodes = list(_nodes(cluster, gpus))
    used = [0] * len(nodes)
    for index in _fullest_first(cluster) if cluster.nodes else range(len(nodes)):
        used[index] = min(nodes[index][1], gpus)
        gpus -= used[index]
        if not gpus:
            break
    return [(name, count) for (name, _), count in zip(nodes, used, strict=True) if count]


def _fullest_first(cluster: ClusterSpec) -> list[int]:
    """Listed nodes, those with the most free GPUs first; of equal ones a pod's, then a leaf's, together.

    Pods and leaves come in the order of their free GPUs, then of what is left of their links.
    """
    links = uplinks(cluster)

    def most_first(blocks: Mapping[Key, Uplink]) -> dict[Key, int]:
        """Position of each block; of equal ones in the order of the list."""
        order = sorted(blocks, key=lambda key: (-blocks[key].free, -blocks[key].gb_per_s))
        return {key: position for position, key in enumerate(order)}

    pods, leaves = most_first(links.pods), most_first(links.leaves)

    def rank(index: int) -> tuple[int, int, int, int]:
        """What the nodes are sorted by."""
        node = cluster.nodes[index]
        pod = node.pod or ""
        free = free_of(node, cluster.gpus_per_node)
        return -free, pods.get((pod, ""), 0), leaves.get((pod, node.leaf or ""), 0), index

    return sorted(range(len(cluster.nodes)), key=rank)


def first_gpus(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """The same cluster with only the GPUs of `expand_nodes` free; itself without a list.

    Nodes keep their places in the list. Raises InputError if the cluster has fewer.

    Parameters
    ----------
    cluster
        With a list of nodes, or without.
    gpus
        From 1 to the cluster's free GPUs.
    """
    if not cluster.nodes or gpus == cluster.gpus:
        return cluster
    used = dict(expand_nodes(cluster, gpus))
    nodes = tuple(
        node.model_copy(update={"free_gpus": used.get(node.name, 0)}) for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes, "gpus": gpus})


def only_nodes(cluster: ClusterSpec, names: Collection[str]) -> ClusterSpec:
    """The same cluster with only the nodes of these names free; they keep their places in the list.

    Raises InputError where the cluster lists no nodes, or none of a name, or nothing of them is free.

    Parameters
    ----------
    cluster
        That lists its nodes.
    names
        Of nodes in the list, at least one of them with a free GPU.

    Raises
    ------
    InputError
        Where the cluster lists no nodes or none of a name, or nothing of them is free.
    """
    listed_names = {node.name for node in cluster.nodes}
    if not listed_names:
        number = next(iter(names), "")
        instead = ""
        if len(names) == 1 and number.isdecimal() and len(number) < 7:
            instead = f"; {number} whole nodes are --gpus {int(number) * cluster.gpus_per_node}"
        raise InputError(
            f"cluster {cluster.name!r} lists no nodes to choose from: give a cluster file with `base: "
            f"{cluster.name}` and `nodes`; "
            "without --nodes the plan is for any of its nodes, and launch.sh takes those of the job"
            f"{instead}",
            where="nodes",
        )
    for name in names:
        if name not in listed_names:
            near = suggestion(name, listed_names)
            raise InputError(
                f"cluster {cluster.name!r} has no node {shown(name)}{near}", where="nodes"
            )
    wanted = set(names)
    nodes = tuple(
        node if node.name in wanted else node.model_copy(update={"free_gpus": 0})
        for node in cluster.nodes
    )
    free = sum(free_of(node, cluster.gpus_per_node) for node in nodes)
    if not free:
        raise InputError(
            f"no GPU of these nodes of cluster {cluster.name!r} is free", where="nodes"
        )
    return cluster.model_copy(update={"nodes": nodes, "gpus": free})


def lies_alike(cluster: ClusterSpec) -> bool:
    """Whether a cluster is a kind of node in any number on one switch: no matter which of them a job gets.

    Parameters
    ----------
    cluster
        A catalog's entry, or what a file made of one.
    """
    one_node = cluster.nvlink_domain <= cluster.gpus_per_node
    return cluster.elastic and not cluster.nodes and not cluster.levels and one_node


def of_nodes(cluster: ClusterSpec, free: Mapping[str, int]) -> ClusterSpec:
    """The nodes of these names and free GPUs, all of the kind of a cluster that `lies_alike`.

    Parameters
    ----------
    cluster
        A kind of node, for which `lies_alike` holds.
    free
        Free GPUs by name of node, each 0 to `gpus_per_node`, not all 0.
    """
    nodes = tuple(NodeSpec(name=name, free_gpus=gpus) for name, gpus in free.items())
    if not any(free.values()):
        raise InputError("no GPU of these nodes is free", where="nodes")
    listed = {"nodes": nodes, "gpus": sum(free.values()), "elastic": False}
    return cluster.model_copy(update=listed)


def _nodes(cluster: ClusterSpec, gpus: int) -> Iterator[tuple[str, int]]:
    """Every listed node and its free GPUs; without a list the nodes that the first `gpus` GPUs stand on. A
    cluster of 20 GPUs on nodes of 8 ends with a node of 4.
    """
    if cluster.nodes:
        for node in cluster.nodes:
            yield node.name, free_of(node, cluster.gpus_per_node)
        return
    for index, start in enumerate(range(0, gpus, cluster.gpus_per_node)):
        yield node_name(cluster, index), min(cluster.gpus_per_node, cluster.gpus - start)


# The levels of the fabric under one allocation, as arrays: what the cost model prices traffic with.


Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class FabricLevels:
    """The levels under an allocation, from the inside out. Arrays have shape [levels] and are read-only."""

    names: tuple[str, ...]
    media: tuple[Medium, ...]
    blocks: NDArray[np.int64]
    """GPUs in one block: strictly increasing, each divides the next, the last is the allocation. Where leaves
    are not equally free, neither holds."""
    gb_per_s: NDArray[np.float64]
    """Nominal, of one GPU in one direction, for traffic between blocks of the level below inside this one."""
    latency_s: NDArray[np.float64]
    """One hop of a collective that crosses this level."""
    attained: NDArray[np.float64]
    """Measured share of `gb_per_s` that ring collectives reach; NaN where nothing was measured."""
    all_to_all_attained: NDArray[np.float64]
    """The same of all-to-alls."""
    rails: NDArray[np.int64]
    """Rails between which nothing passes inside a block; 1 where there are none, or NVLink joins them."""
    cross_rail_gb_per_s: NDArray[np.float64]
    """As `gb_per_s`, of the level that joins the rails; 0 where `rails` is 1."""
    neighbour_share: NDArray[np.float64]
    """Of `gb_per_s`, what is left when all of a block's traffic goes to one other block: less than 1 where
    blocks are joined directly."""
    host_share: NDArray[np.float64]
    """Of `gb_per_s`, what is left to rings where the node's CPUs are between its GPUs, as over PCIe."""
    host_share_of_exchanges: NDArray[np.float64]
    """The same of all-to-alls."""


def fabric_levels(cluster: ClusterSpec, gpus: int) -> FabricLevels:
    """The levels that an allocation of `gpus` GPUs of the cluster spans.

    Level 0 is the scale-up domain (the node over PCIe where there is none). A scale-up domain smaller than
    the node is followed by the node over PCIe; one that is as large or larger (NVL72) stands for the node.
    Then come the cluster's levels at the NIC's rate divided by the worst oversubscription so far, because
    what crosses a level also crosses every level inside it. Without levels there is one, non-blocking.

    An allocation is spread evenly: the block of a level is the largest divisor of the allocation that is a
    multiple of the block below and of which the machine holds enough. So 256 GPUs of NVL72 racks are 4 x 64,
    144 are 2 x 72, and 16,384 GPUs of 8 pods of 3,072 are 8 x 2,048. An allocation with
    part-filled nodes counts by the piece that its nodes share: 20 GPUs on nodes of 8 are 5 x 4. A level whose
    block is no larger than the one below is left out, level 0 never. Where nodes are listed with their leaves
    blocks are no larger than what these have free; where that differs, they are those of the fullest leaf and
    pod, and none is left out for holding the whole allocation: a mapping need not put it into one block.

    Raises InputError if `gpus` is below 1 or above what the cluster has.

    Parameters
    ----------
    cluster
        The machine.
    gpus
        Size of the allocation, from 1 to the cluster's GPUs.
    """
    check_gpus(cluster, gpus)
    return _levels(SameCluster(cluster), gpus)


@lru_cache(maxsize=64)
def _levels(same: SameCluster, gpus: int) -> FabricLevels:
    cluster = same.cluster
    if is_irregular(cluster):
        return _fullest(cluster, gpus)
    nodes, piece = _node_pieces(cluster, gpus)
    tiers = tuple(measured_tiers(cluster))
    # The tiers with blocks no larger than what listed leaves and pods, which are alike, have free.
    fitted = list(tiers)
    for k, blocks in _listed(cluster, tiers):
        free = next(iter(blocks.values())).free
        fitted[k] = replace(tiers[k], gpus=min(tiers[k].gpus, free))
    return _fitted(
        tuple(fitted),
        gpus,
        cluster_gpus=cluster.gpus,
        per_node=cluster.gpus_per_node,
        nodes=nodes,
        piece=piece,
        listed=_held_by_listed(cluster, tiers, gpus),
    )


def _held_by_listed(cluster: ClusterSpec, tiers: tuple[Tier, ...], gpus: int) -> tuple[int, ...]:
    """GPUs of an allocation in each of the listed blocks, which are alike, of every tier; 0 where the list
    does not say.
    """
    sizes = [0] * len(tiers)
    for k, blocks in _listed(cluster, tiers):
        if len(blocks) == 1:
            sizes[k] = gpus
        elif gpus == cluster.gpus:
            sizes[k] = next(iter(blocks.values())).free
    return tuple(sizes)


def _listed(
    cluster: ClusterSpec, tiers: tuple[Tier, ...]
) -> Iterator[tuple[int, dict[Key, Uplink]]]:
    """Tiers inside the outermost whose blocks are listed leaves or pods, and these."""
    links = uplinks(cluster)
    leaf = leaf_tier(cluster, len(tiers))
    for k, blocks in ((leaf, links.leaves), (leaf + 1, links.pods)):
        if blocks and 0 <= k < len(tiers) - 1:
            yield k, blocks


def leaf_tier(cluster: ClusterSpec, tiers: int) -> int:
    """Which of a cluster's tiers the listed leaves are blocks of; one joins the domains where no levels are.

    Parameters
    ----------
    cluster
        With or without levels.
    tiers
        How many it has in all, those inside nodes included.

    Returns
    -------
    int
        From 0, the innermost. Pods are blocks of the next one.
    """
    return tiers - max(len(cluster.levels), 1) + first_outside_a_leaf(cluster) - 1


def is_irregular(cluster: ClusterSpec) -> bool:
    """Whether listed nodes hang on leaves, or stand in pods, with unequal free GPUs or unequal links left.

    Nodes of one leaf with unequal free GPUs are irregular too: their largest common piece would otherwise be
    the NVLink block of all of them. So is an allocation from which a search may leave out any GPU.

    Parameters
    ----------
    cluster
        With a list of nodes, or without: without one it never is.
    """
    links = uplinks(cluster)
    if links.leaves and (cluster.takes_any_gpus or len(_free_counts(cluster)) > 1):
        return True
    return links.differ


def leaves_are_nodes(cluster: ClusterSpec) -> bool:
    """Whether a listed leaf is one node, so that the first level outside nodes is that of pods.

    Parameters
    ----------
    cluster
        One that lists no leaves has none that are.
    """
    is_listed = any(node.leaf is not None for node in cluster.nodes)
    return is_listed and bool(cluster.levels) and cluster.levels[0].gpus == cluster.gpus_per_node


def _free_counts(cluster: ClusterSpec) -> set[int]:
    """Free GPUs of the nodes that have any, each number once."""
    counts = {free_of(node, cluster.gpus_per_node) for node in cluster.nodes}
    return counts - {0}


def _fullest(cluster: ClusterSpec, gpus: int) -> FabricLevels:
    """The levels of an irregular allocation: no leaf or pod has more free GPUs than its block here."""
    tiers = tuple(measured_tiers(cluster))
    full = _full_blocks(cluster, tiers)
    links = uplinks(cluster)
    fullest = [max(link.free for link in side.values()) for side in (links.leaves, links.pods)]
    outside = [k for k, block in enumerate(full) if block > cluster.gpus_per_node]
    _, piece = _node_pieces(cluster, gpus)
    inside = [piece if block >= cluster.gpus_per_node else gcd(block, piece) for block in full]
    blocks = [min(block, gpus) if k in outside else inside[k] for k, block in enumerate(full)]
    fullest_outside = fullest[1:] if leaves_are_nodes(cluster) else fullest
    for k, free in zip(outside, fullest_outside, strict=False):
        blocks[k] = min(blocks[k], free)
    blocks[-1] = gpus
    # Blocks that could hold the whole allocation stay: a mapping need not put it into one of them.
    spanned = [
        k for k, block in enumerate(blocks) if k == 0 or k in outside or block > max(blocks[:k])
    ]
    return _of_tiers(tiers, blocks, spanned)


def full_levels(cluster: ClusterSpec) -> FabricLevels:
    """The levels at their full size, whatever the allocation: no allocation packs more GPUs into a block.

    Parameters
    ----------
    cluster
        The machine; free GPUs do not matter but for the outermost block.
    """
    return _full_levels(SameCluster(cluster))


@lru_cache(maxsize=16)
def _full_levels(same: SameCluster) -> FabricLevels:
    tiers = tuple(measured_tiers(same.cluster))
    return _of_tiers(tiers, _full_blocks(same.cluster, tiers), range(len(tiers)))


def _full_blocks(cluster: ClusterSpec, tiers: tuple[Tier, ...]) -> list[int]:
    blocks = [max(tier.gpus for tier in tiers[: k + 1]) for k in range(len(tiers))]
    # All that is free may be less than one node, and still be on several.
    blocks[-1] = max(blocks[-1], cluster.gpus, len(cluster.nodes) * cluster.gpus_per_node)
    return blocks


def _of_tiers(tiers: Sequence[Tier], blocks: Sequence[int], spanned: Iterable[int]) -> FabricLevels:
    """Those tiers that are spanned with their blocks in an allocation, as read-only arrays."""
    tiers, blocks = zip(*((tiers[k], blocks[k]) for k in spanned), strict=True)

    def numbers(name: str) -> NDArray[np.float64]:
        return _read_only(np.array([getattr(tier, name) for tier in tiers], dtype=np.float64))

    return FabricLevels(
        names=tuple(tier.name for tier in tiers),
        media=tuple(tier.medium for tier in tiers),
        blocks=_read_only(np.array(blocks, dtype=np.int64)),
        gb_per_s=numbers("gb_per_s"),
        latency_s=_read_only(numbers("latency_us") * 1e-6),
        attained=numbers("attained"),
        all_to_all_attained=numbers("all_to_all_attained"),
        rails=_read_only(np.array([tier.rails for tier in tiers], dtype=np.int64)),
        cross_rail_gb_per_s=numbers("cross_rail_gb_per_s"),
        neighbour_share=numbers("neighbour_share"),
        host_share=numbers("host_share"),
        host_share_of_exchanges=numbers("host_share_of_exchanges"),
    )


def _node_pieces(cluster: ClusterSpec, gpus: int) -> tuple[int, int]:
    """Nodes in the allocation, and the largest piece that divides what it uses of each of them."""
    if not cluster.nodes:
        return -(-gpus // cluster.gpus_per_node), gcd(cluster.gpus_per_node, gpus)
    used = [count for _, count in expand_nodes(cluster, gpus)]
    return len(used), gcd(*used)


@lru_cache(maxsize=512)
def _fitted(
    tiers: tuple[Tier, ...],
    gpus: int,
    *,
    cluster_gpus: int,
    per_node: int,
    nodes: int,
    piece: int,
    listed: tuple[int, ...],
) -> FabricLevels:
    """The tiers with their blocks fitted to an allocation of `gpus` GPUs on `nodes` nodes."""
    sizes = tuple(tier.gpus for tier in tiers)
    if piece == per_node:
        blocks = _even_blocks(sizes, cluster_gpus, per_node, gpus)
    else:
        blocks = _shared_pieces(sizes, per_node, gpus, nodes, piece)
        blocks = [size or block for size, block in zip(listed, blocks, strict=True)]
    blocks[-1] = gpus
    spanned = [k for k, block in enumerate(blocks) if k == 0 or block > blocks[k - 1]]
    return _of_tiers(tiers, blocks, spanned)


def _shared_pieces(
    sizes: tuple[int, ...], per_node: int, gpus: int, nodes: int, piece: int
) -> list[int]:
    """Blocks when nodes are part-filled: all GPUs where they fit one, else the piece that the nodes share."""
    blocks = []
    for size in sizes:
        if gpus <= size and nodes <= max(1, size // per_node):
            blocks.append(gpus)
        elif size >= per_node:
            blocks.append(piece)
        else:
            blocks.append(gcd(size, piece))
    return blocks


def _even_blocks(sizes: tuple[int, ...], cluster_gpus: int, node: int, gpus: int) -> list[int]:
    """Blocks when whole nodes are spread evenly.

    `room` is what even inner blocks can use of one block of the tier (64 of 72, say). Where the cluster is
    not a whole number of a tier's blocks, their number is unknown, and as many as needed are assumed.
    """
    inner = gcd(node, sizes[0])
    below = room = sizes[0]
    blocks: list[int] = []
    for size in sizes:
        room = size // below * (room // inner * inner)
        count = gpus if cluster_gpus % size else cluster_gpus // size
        inner = _largest_block(gpus, room, count, inner)
        below = size
        blocks.append(inner)
    return blocks


def _largest_block(gpus: int, room: int, count: int, step: int) -> int:
    """The largest multiple of `step` that divides `gpus`; `count` blocks of `room` GPUs must hold enough."""
    limit = min(room, gpus)
    for block in range(limit - limit % step, step, -step):
        if gpus % block == 0 and count * (room // block) * block >= gpus:
            return block
    return step


def _read_only(array: NDArray[Number]) -> NDArray[Number]:
    array.flags.writeable = False
    return array


# Which GPUs an allocation has, in the order in which the levels of the fabric are filled.


Place = tuple[int, int]
"""(node, local GPU), both from 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatedBlocks:
    """The GPUs of an allocation and the blocks of the machine that they stand in."""

    places: NDArray[np.int64]
    """(node, local GPU) of every GPU, [gpus, 2]; consecutive ones share the blocks of `fabric_levels`."""
    blocks: NDArray[np.int64]
    """The block of the machine that every GPU is in, by level of `fabric_levels`; shape [levels, gpus]."""
    even: bool
    """Whether every block of `fabric_levels` has a block of the machine to itself."""


def allocation_of(cluster: ClusterSpec, gpus: int) -> AllocatedBlocks:
    """The GPUs that an allocation uses, and where they stand.

    No block of `fabric_levels` straddles blocks of the machine: 128 GPUs of NVL72 racks are 64 of one rack
    and 64 of the next, 8 of each idle. As many as fit stand in one block of the machine, so that an
    allocation touches as few as they need: 25 parts of five nodes fill 7 leaves of 20 nodes, four parts each,
    and it is not even then. Nodes are taken in turn where the machine is too small for that, and at levels
    of the network that no narrower one surrounds. Nodes that are listed with their leaves are taken leaf by
    leaf, from each as many blocks as it has free, and pod by pod; lists without leaves and with part-filled
    nodes in their order. Nodes without free GPUs are passed over.

    Raises InputError if the cluster has fewer than `gpus`.

    Parameters
    ----------
    cluster
        The machine.
    gpus
        Size of the allocation, from 1 to the cluster's GPUs.
    """
    return _allocation(SameCluster(cluster), gpus)


def allocated_places(cluster: ClusterSpec, gpus: int) -> list[Place]:
    """(node, local GPU) of every GPU of `allocation_of`.

    Parameters
    ----------
    cluster
        The machine.
    gpus
        Size of the allocation, from 1 to the cluster's GPUs.

    Returns
    -------
    list of (int, int)
        One for each GPU, both from 0, in the order of `allocation_of`.
    """
    return list(_allocated_places(SameCluster(cluster), gpus))


@lru_cache(maxsize=4)
def _allocated_places(same: SameCluster, gpus: int) -> tuple[Place, ...]:
    """A plan, its traffic and its verification ask for the same ones, of up to a hundred thousand GPUs."""
    return tuple((node, gpu) for node, gpu in _allocation(same, gpus).places.tolist())


def nodes_in_turn(cluster: ClusterSpec, gpus: int) -> AllocatedBlocks:
    """The first nodes of a cluster that lists none, whatever blocks they cut: in as few as there can be.

    Parameters
    ----------
    cluster
        Without a list of nodes.
    gpus
        Size of the allocation, from 1 to the cluster's GPUs.
    """
    numbers = np.arange(gpus, dtype=np.int64)
    places = np.stack([numbers // cluster.gpus_per_node, numbers % cluster.gpus_per_node], axis=1)
    return _standing_at(cluster, places)


@lru_cache(maxsize=256)
def _allocation(same: SameCluster, gpus: int) -> AllocatedBlocks:
    return _standing_at(same.cluster, _places(same.cluster, gpus))


def _standing_at(cluster: ClusterSpec, places: NDArray[np.int64]) -> AllocatedBlocks:
    gpus = len(places)
    levels = fabric_levels(cluster, gpus)
    blocks = blocks_of(cluster, gpus, places)
    sizes = levels.blocks.tolist()
    even = all(_one_to_one(size, row) for size, row in zip(sizes, blocks, strict=True))
    return AllocatedBlocks(places=places, blocks=blocks, even=even)


def blocks_of(cluster: ClusterSpec, gpus: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block of the machine that each of some GPUs is in, by level of an allocation.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    gpus : int
        Size of the allocation whose `fabric_levels` count.
    places : array of int, shape [n, 2]
        (node, local GPU), both from 0; any GPUs of the machine.

    Returns
    -------
    array of int, shape [levels, n]
        Numbers from 0; the last level is one block.
    """
    names = fabric_levels(cluster, gpus).names
    rows = [_blocks_at(cluster, name, places) for name in names[:-1]]
    return np.stack([*rows, np.zeros(len(places), dtype=np.int64)])


def _one_to_one(size: int, blocks: NDArray[np.int64]) -> bool:
    """Whether every part of so many GPUs of an allocation is in one block that holds no other part."""
    of_parts = blocks[::size]
    is_in_one = np.array_equal(np.repeat(of_parts, size)[: len(blocks)], blocks)
    return is_in_one and len(np.unique(of_parts)) == len(of_parts)


def _blocks_at(cluster: ClusterSpec, level: str, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block of a level that each GPU is in: by its leaf and pod where they are listed."""
    full = full_levels(cluster)
    depth = full.names.index(level)
    listed = uplinks(cluster)
    leaf = leaf_tier(cluster, len(full.names))
    named = {leaf: listed.leaves, leaf + 1: listed.pods}.get(depth)
    if not named or depth == len(full.names) - 1:
        numbers = places[:, 0] * cluster.gpus_per_node + places[:, 1]
        return np.asarray(numbers // int(full.blocks[depth]))
    number_of = {key: number for number, key in enumerate(named)}
    numbers_of_nodes = [
        number_of.get((node.pod or "", (depth == leaf and node.leaf) or ""), -1)
        for node in cluster.nodes
    ]
    return np.array(numbers_of_nodes, dtype=np.int64)[places[:, 0]]


def _places(cluster: ClusterSpec, gpus: int) -> NDArray[np.int64]:
    per_node = cluster.gpus_per_node
    in_turn = all(free_of(node, per_node) == per_node for node in cluster.nodes)
    if any(node.leaf is not None for node in cluster.nodes) and not is_irregular(cluster):
        places = _leaf_by_leaf(cluster, gpus)
        if len(places) == gpus:
            return np.array(places, dtype=np.int64)
    elif in_turn and not is_irregular(cluster):
        return _block_by_block(cluster, gpus)
    used_gpus = dict(expand_nodes(cluster, gpus))
    in_order = [
        (index, gpu)
        for index, node in enumerate(cluster.nodes)
        for gpu in range(used_gpus.get(node.name, 0))
    ]
    return np.array(in_order, dtype=np.int64)


def _block_by_block(cluster: ClusterSpec, gpus: int) -> NDArray[np.int64]:
    """The nodes of a machine whose blocks are filled in turn, no part straddling one if that can be."""
    per_node = cluster.gpus_per_node
    nodes = list(range(-(-gpus // per_node)))
    if gpus % per_node == 0:
        steps = _steps(cluster, gpus)
        packed = _packed(len(nodes), steps)
        if packed[-1] < cluster.gpus // per_node:
            nodes = packed
    numbers = np.arange(gpus, dtype=np.int64)
    return np.stack([np.array(nodes)[numbers // per_node], numbers % per_node], axis=1)


def _steps(cluster: ClusterSpec, gpus: int) -> list[tuple[int, int]]:
    """(nodes of a part, nodes of the block that it stands in) of every level that must not cut a part.

    A level that no narrower one surrounds may: where crossing it costs no bandwidth, neighbours in turn are
    as fast, and touch fewer blocks.
    """
    levels, full = fabric_levels(cluster, gpus), full_levels(cluster)
    parts = dict(zip(levels.names, levels.blocks.tolist(), strict=True))
    rates = full.gb_per_s * full.neighbour_share
    steps, part = [], cluster.gpus_per_node
    for depth, (name, size) in enumerate(zip(full.names, full.blocks.tolist(), strict=True)):
        part = max(part, parts.get(name, part))
        parts_it = cluster.gpus_per_node < size < full.blocks[-1] and part < gpus and name in parts
        if parts_it and np.any(rates[depth + 1 :] < rates[depth]):
            steps.append((part // cluster.gpus_per_node, size // cluster.gpus_per_node))
    return steps


def _packed(count: int, steps: Sequence[tuple[int, int]]) -> list[int]:
    """Nodes of an allocation: a part begins a block of its own where it would straddle one."""
    nodes, node = [], 0
    for index in range(count):
        for part, block in steps:
            if index % part == 0 and node % block + part > block:
                node += block - node % block
        nodes.append(node)
        node += 1
    return nodes


def _leaf_by_leaf(cluster: ClusterSpec, gpus: int) -> list[Place]:
    pods: dict[str, dict[str, list[tuple[int, NodeSpec]]]] = {}
    for index, node in enumerate(cluster.nodes):
        leaves = pods.setdefault(node.pod or "", {})
        leaves.setdefault(node.leaf or "", []).append((index, node))
    links = uplinks(cluster)
    gpus_of_a_leaf = _quota(cluster, gpus, links.leaves)
    gpus_of_a_pod = _quota(cluster, gpus, links.pods)
    places: list[Place] = []
    for leaves in pods.values():
        in_pod: list[Place] = []
        for nodes in leaves.values():
            in_leaf = [
                (index, gpu)
                for index, node in nodes
                for gpu in range(free_of(node, cluster.gpus_per_node))
            ]
            in_pod += in_leaf[:gpus_of_a_leaf]
        places += in_pod[:gpus_of_a_pod]
    return places[:gpus]


def _quota(cluster: ClusterSpec, gpus: int, links: Mapping[Key, Uplink]) -> int:
    """GPUs to take of each leaf, or pod: as many as it has free of the largest block that it can hold."""
    free = next(iter(links.values())).free
    blocks = fabric_levels(cluster, gpus).blocks.tolist()
    block = max((block for block in blocks if block <= free), default=gpus)
    return max(free // block, 1) * block
