"""The levels of the fabric under one allocation, as arrays: what the cost model prices traffic with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster_specs.allocation import check_gpus, expand_nodes
from cluster_specs.errors import ClusterError
from cluster_specs.schema import ClusterSpec, Medium, NodeSpec

Number = TypeVar("Number", np.int64, np.float64)

HOP_LATENCY_US: dict[Medium, float] = {
    "nvlink": 1.9,
    "xgmi": 2.2,
    "pcie": 2.5,
    "infiniband": 4.0,
    "omnipath": 5.0,
    "slingshot": 6.0,
    "roce": 6.0,
    "efa": 15.0,
}
"""One hop of a collective, in microseconds, by medium: nominal, used where a level states no `latency_us`.

nvlink, pcie, infiniband: NCCL's tuning table, ring and LL128 protocol (`hwLat` in NVIDIA/nccl
src/graph/tuning.cc). xgmi: between the 0.8 us (LL) and 3.6 us (Simple) of RCCL's table. omnipath, slingshot,
roce: InfiniBand's and 1 to 2 us for a slower NIC and switch; estimates. efa: AWS gave about 15 us for small
messages when it introduced the adapter; newer generations are faster.
"""

TIER_LATENCY_US = 0.5
"""Every further tier of switches: two more switch crossings of about 0.2 us and some 20 m of fibre."""


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


@dataclass(frozen=True, kw_only=True)
class _Tier:
    """One level before it is fitted to an allocation; `gpus` is the size of its block in the machine."""

    name: str
    medium: Medium
    gpus: int
    gb_per_s: float
    latency_us: float
    attained: float | None = None
    all_to_all_attained: float | None = None


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
    and these do not have the same number of free GPUs, blocks are those of the fullest leaf and pod, and none
    is left out for holding the whole allocation: a mapping need not put it into one block.

    Raises ClusterError if `gpus` is below 1 or above what the cluster has.
    """
    check_gpus(cluster, gpus)
    if is_irregular(cluster):
        return _fullest(cluster, gpus)
    nodes, piece = _node_pieces(cluster, gpus)
    return _fitted(
        tuple(_measured_tiers(cluster)),
        gpus,
        cluster_gpus=cluster.gpus,
        per_node=cluster.gpus_per_node,
        nodes=nodes,
        piece=piece,
    )


def is_irregular(cluster: ClusterSpec) -> bool:
    """Whether listed nodes hang on leaves, or stand in pods, with unequal numbers of free GPUs."""
    return any(len(set(free)) > 1 for free in _free_by_block(cluster.nodes, cluster.gpus_per_node))


@lru_cache(maxsize=16)
def _free_by_block(
    nodes: tuple[NodeSpec, ...], gpus_per_node: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Free GPUs of every leaf and of every pod that has any."""
    leaves: dict[str, int] = {}
    pods: dict[str, int] = {}
    for node in nodes:
        free = gpus_per_node if node.free_gpus is None else node.free_gpus
        if free and node.leaf is not None:
            leaf = f"{node.pod or ''}/{node.leaf}"
            leaves[leaf] = leaves.get(leaf, 0) + free
            pods[node.pod or ""] = pods.get(node.pod or "", 0) + free
    return tuple(leaves.values()), tuple(pods.values())


def _fullest(cluster: ClusterSpec, gpus: int) -> FabricLevels:
    """The levels of an irregular allocation: no leaf or pod has more free GPUs than its block here."""
    full = full_levels(cluster)
    fullest = [max(free) for free in _free_by_block(cluster.nodes, cluster.gpus_per_node)]
    outside = [k for k, block in enumerate(full.blocks) if block > cluster.gpus_per_node]
    _, piece = _node_pieces(cluster, gpus)
    inside = [piece if block >= cluster.gpus_per_node else gcd(int(block), piece) for block in full.blocks]
    blocks = [min(int(block), gpus) if k in outside else inside[k] for k, block in enumerate(full.blocks)]
    for k, most in zip(outside, fullest, strict=False):
        blocks[k] = min(blocks[k], most)
    blocks[-1] = gpus
    # Blocks that could hold the whole allocation stay: a mapping need not put it into one of them.
    kept = [k for k, block in enumerate(blocks) if k == 0 or k in outside or block > max(blocks[:k])]
    return FabricLevels(
        names=tuple(full.names[k] for k in kept),
        media=tuple(full.media[k] for k in kept),
        blocks=_read_only(np.array([blocks[k] for k in kept], dtype=np.int64)),
        gb_per_s=_read_only(full.gb_per_s[kept]),
        latency_s=_read_only(full.latency_s[kept]),
        attained=_read_only(full.attained[kept]),
        all_to_all_attained=_read_only(full.all_to_all_attained[kept]),
    )


def full_levels(cluster: ClusterSpec) -> FabricLevels:
    """The levels at their full size, whatever the allocation: no allocation packs more GPUs into a block."""
    tiers = list(_measured_tiers(cluster))
    blocks = np.maximum.accumulate(np.array([tier.gpus for tier in tiers], dtype=np.int64))
    blocks[-1] = max(int(blocks[-1]), cluster.gpus)
    return FabricLevels(
        names=tuple(tier.name for tier in tiers),
        media=tuple(tier.medium for tier in tiers),
        blocks=_read_only(blocks),
        gb_per_s=_read_only(np.array([tier.gb_per_s for tier in tiers], dtype=np.float64)),
        latency_s=_read_only(np.array([tier.latency_us * 1e-6 for tier in tiers], dtype=np.float64)),
        attained=_read_only(np.array([tier.attained for tier in tiers], dtype=np.float64)),
        all_to_all_attained=_read_only(
            np.array([tier.all_to_all_attained for tier in tiers], dtype=np.float64)
        ),
    )


def _node_pieces(cluster: ClusterSpec, gpus: int) -> tuple[int, int]:
    """Nodes in the allocation, and the largest piece that divides what it uses of each of them."""
    if not cluster.nodes:
        return -(-gpus // cluster.gpus_per_node), gcd(cluster.gpus_per_node, gpus)
    used = [count for _, count in expand_nodes(cluster, gpus)]
    return len(used), gcd(*used)


def _measured_tiers(cluster: ClusterSpec) -> Iterator[_Tier]:
    """The tiers with what was measured of them; of several measurements the last one counts."""
    for tier in _tiers(cluster):
        changed = tier
        for entry in cluster.measured:
            if entry.level == tier.name and entry.collective == "alltoall":
                changed = replace(changed, all_to_all_attained=entry.attained_fraction)
            elif entry.level == tier.name:
                latency_us = entry.latency_us or changed.latency_us
                changed = replace(changed, attained=entry.attained_fraction, latency_us=latency_us)
        yield changed


def _tiers(cluster: ClusterSpec) -> Iterator[_Tier]:
    """The cluster's levels at their full size, from the inside outwards."""
    device = cluster.device
    if cluster.nvlink_domain > 1:
        medium: Medium = "xgmi" if device.architecture == "cdna3" else "nvlink"
        rate = cluster.nvlink_gb_per_s or device.scale_up_gb_per_s
        if rate is None:
            raise ClusterError(
                f"nvlink_gb_per_s: missing, cluster {cluster.name!r} has an nvlink_domain of "
                f"{cluster.nvlink_domain} and device {device.name!r} states no scale_up_gb_per_s"
            )
        yield _Tier(
            name=medium,
            medium=medium,
            gpus=cluster.nvlink_domain,
            gb_per_s=rate,
            latency_us=HOP_LATENCY_US[medium],
        )
    if cluster.nvlink_domain < cluster.gpus_per_node or cluster.nvlink_domain == 1:
        yield _Tier(
            name="node",
            medium="pcie",
            gpus=cluster.gpus_per_node,
            gb_per_s=device.pcie_gb_per_s,
            latency_us=HOP_LATENCY_US["pcie"],
        )
    yield from _network_tiers(cluster)


def _network_tiers(cluster: ClusterSpec) -> Iterator[_Tier]:
    """The levels above the node and the scale-up domain. 8 gigabit are a gigabyte."""
    nic_gb_per_s, base_us = cluster.slowest_nic_gbps_per_gpu / 8, HOP_LATENCY_US[cluster.nic_medium]
    if not cluster.levels:
        yield _Tier(
            name="fabric",
            medium=cluster.nic_medium,
            gpus=cluster.gpus,
            gb_per_s=nic_gb_per_s,
            latency_us=base_us,
        )
    worst = 1.0
    for depth, level in enumerate(cluster.levels):
        worst = max(worst, level.oversubscription)
        yield _Tier(
            name=level.name,
            medium=cluster.nic_medium,
            gpus=level.gpus,
            gb_per_s=nic_gb_per_s / worst,
            latency_us=level.latency_us or base_us + depth * TIER_LATENCY_US,
        )


@lru_cache(maxsize=512)
def _fitted(
    tiers: tuple[_Tier, ...], gpus: int, *, cluster_gpus: int, per_node: int, nodes: int, piece: int
) -> FabricLevels:
    """The tiers with their blocks fitted to an allocation of `gpus` GPUs on `nodes` nodes."""
    sizes = tuple(tier.gpus for tier in tiers)
    if piece == per_node:
        blocks = _even_blocks(sizes, cluster_gpus, per_node, gpus)
    else:
        blocks = _shared_pieces(sizes, per_node, gpus, nodes, piece)
    blocks[-1] = gpus
    kept = [k for k, block in enumerate(blocks) if k == 0 or block > blocks[k - 1]]
    return FabricLevels(
        names=tuple(tiers[k].name for k in kept),
        media=tuple(tiers[k].medium for k in kept),
        blocks=_read_only(np.array([blocks[k] for k in kept], dtype=np.int64)),
        gb_per_s=_read_only(np.array([tiers[k].gb_per_s for k in kept], dtype=np.float64)),
        latency_s=_read_only(np.array([tiers[k].latency_us * 1e-6 for k in kept], dtype=np.float64)),
        attained=_read_only(np.array([tiers[k].attained for k in kept], dtype=np.float64)),
        all_to_all_attained=_read_only(
            np.array([tiers[k].all_to_all_attained for k in kept], dtype=np.float64)
        ),
    )


def _shared_pieces(sizes: tuple[int, ...], per_node: int, gpus: int, nodes: int, piece: int) -> list[int]:
    """Blocks when nodes are part-filled: all GPUs where they fit one, else the piece that the nodes share."""
    return [
        gpus
        if gpus <= size and nodes <= max(1, size // per_node)
        else (piece if size >= per_node else gcd(size, piece))
        for size in sizes
    ]


def _even_blocks(sizes: tuple[int, ...], cluster_gpus: int, node: int, gpus: int) -> list[int]:
    """Blocks when whole nodes are spread evenly.

    `room` is what even inner blocks can use of one block of the tier (64 of 72, say). Where the cluster is
    not a whole number of a tier's blocks, their number is unknown, and as many as needed are assumed.
    """
    inner, below, room = gcd(node, sizes[0]), sizes[0], sizes[0]
    blocks: list[int] = []
    for size in sizes:
        room = size // below * (room // inner * inner)
        count = gpus if cluster_gpus % size else cluster_gpus // size
        inner, below = _largest_block(gpus, room, count, inner), size
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
