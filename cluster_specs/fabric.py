"""The levels of the fabric under one allocation, as arrays: what the cost model prices traffic with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import check_gpus, expand_nodes
from meshwright.cluster_specs.schema import ClusterSpec, Medium
from meshwright.cluster_specs.tiers import Tier, measured_tiers
from meshwright.cluster_specs.uplinks import SameCluster, first_outside_a_leaf, free_of, uplinks

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
    """
    check_gpus(cluster, gpus)
    return _levels(SameCluster(cluster), gpus)


@lru_cache(maxsize=64)
def _levels(same: SameCluster, gpus: int) -> FabricLevels:
    cluster = same.cluster
    if is_irregular(cluster):
        return _fullest(cluster, gpus)
    nodes, piece = _node_pieces(cluster, gpus)
    return _fitted(
        _as_listed(cluster, tuple(measured_tiers(cluster))),
        gpus,
        cluster_gpus=cluster.gpus,
        per_node=cluster.gpus_per_node,
        nodes=nodes,
        piece=piece,
    )


def _as_listed(cluster: ClusterSpec, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """The tiers with blocks no larger than what listed leaves and pods, which are alike, have free."""
    links = uplinks(cluster)
    leaf_tier = len(tiers) - len(cluster.levels) + first_outside_a_leaf(cluster) - 1
    fitted = list(tiers)
    for k, blocks in ((leaf_tier, links.leaves), (leaf_tier + 1, links.pods)):
        if blocks and 0 <= k < len(tiers) - 1:
            free = next(iter(blocks.values())).free
            fitted[k] = replace(tiers[k], gpus=min(tiers[k].gpus, free))
    return tuple(fitted)


def is_irregular(cluster: ClusterSpec) -> bool:
    """Whether listed nodes hang on leaves, or stand in pods, with unequal free GPUs or unequal links left.

    Nodes of one leaf with unequal free GPUs are irregular too: their largest common piece would otherwise be
    the NVLink block of all of them. So is an allocation from which a search may leave out any GPU.
    """
    links = uplinks(cluster)
    if links.leaves and (cluster.takes_any_gpus or len(_free_counts(cluster)) > 1):
        return True
    return links.differ


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
    for k, free in zip(outside, fullest, strict=False):
        blocks[k] = min(blocks[k], free)
    blocks[-1] = gpus
    # Blocks that could hold the whole allocation stay: a mapping need not put it into one of them.
    spanned = [
        k for k, block in enumerate(blocks) if k == 0 or k in outside or block > max(blocks[:k])
    ]
    return _of_tiers(tuple(tiers[k] for k in spanned), [blocks[k] for k in spanned])


def full_levels(cluster: ClusterSpec) -> FabricLevels:
    """The levels at their full size, whatever the allocation: no allocation packs more GPUs into a block."""
    return _full_levels(SameCluster(cluster))


@lru_cache(maxsize=16)
def _full_levels(same: SameCluster) -> FabricLevels:
    tiers = tuple(measured_tiers(same.cluster))
    return _of_tiers(tiers, _full_blocks(same.cluster, tiers))


def _full_blocks(cluster: ClusterSpec, tiers: tuple[Tier, ...]) -> list[int]:
    blocks = [max(tier.gpus for tier in tiers[: k + 1]) for k in range(len(tiers))]
    blocks[-1] = max(blocks[-1], cluster.gpus)
    return blocks


def _of_tiers(tiers: tuple[Tier, ...], blocks: list[int]) -> FabricLevels:
    """Tiers with their blocks in an allocation, as read-only arrays."""

    def numbers(name: str) -> NDArray[np.float64]:
        return _read_only(np.array([getattr(tier, name) for tier in tiers], dtype=np.float64))

    return FabricLevels(
        names=tuple(tier.name for tier in tiers),
        media=tuple(tier.medium for tier in tiers),
        blocks=_read_only(np.array(blocks, dtype=np.int64)),
        gb_per_s=numbers("gb_per_s"),
        latency_s=_read_only(
            np.array([tier.latency_us * 1e-6 for tier in tiers], dtype=np.float64)
        ),
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
    tiers: tuple[Tier, ...], gpus: int, *, cluster_gpus: int, per_node: int, nodes: int, piece: int
) -> FabricLevels:
    """The tiers with their blocks fitted to an allocation of `gpus` GPUs on `nodes` nodes."""
    sizes = tuple(tier.gpus for tier in tiers)
    if piece == per_node:
        blocks = _even_blocks(sizes, cluster_gpus, per_node, gpus)
    else:
        blocks = _shared_pieces(sizes, per_node, gpus, nodes, piece)
    blocks[-1] = gpus
    spanned = [k for k, block in enumerate(blocks) if k == 0 or block > blocks[k - 1]]
    return _of_tiers(tuple(tiers[k] for k in spanned), [blocks[k] for k in spanned])


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
