"""The levels of a cluster at their full size, with what one GPU has across each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cluster_specs.schema import XGMI, ClusterSpec, FabricLevelSpec, Medium, NodeSpec
from meshwright.errors import InputError

# What one job has of the up-links of leaves and pods: the links, less what other jobs send over them.
#
# Capacities are GB/s in one direction. `oversubscription` is that of the links of a block whose GPUs all have
# the cluster's NIC; a slower node sends less, but its switches keep their links.


Key = tuple[str, str]
"""(pod, leaf); the leaf is '' for a pod."""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """The links from one leaf or pod to the level above it."""

    free: int
    """Free GPUs of the block."""
    gb_per_s: float
    """The job's share."""
    stated: bool
    """Whether a `background` says so; otherwise it is the share of the free GPUs."""


@dataclass(frozen=True, kw_only=True)
class Uplinks:
    """By leaf, and by pod, of the blocks with free GPUs; in the order of the nodes."""

    leaves: dict[Key, Uplink]
    pods: dict[Key, Uplink]

    @property
    def differ(self) -> bool:
        """Whether leaves, or pods, differ in free GPUs or in what is left of their links."""
        return any(
            len({(link.free, round(link.gb_per_s, 6)) for link in links.values()}) > 1
            for links in (self.leaves, self.pods)
        )


def nominal_nic_gb_per_s(cluster: ClusterSpec) -> float:
    """Of one GPU: the rate that levels divide by their oversubscription. 8 gigabit are a gigabyte.

    Parameters
    ----------
    cluster
        With or without listed nodes whose NICs differ.

    Returns
    -------
    float
        GB/s in one direction: of the cluster's NIC, or of the slowest that is in use where all are faster.
    """
    return max(cluster.nic_gbps_per_gpu, cluster.slowest_nic_gbps_per_gpu) / 8


def free_of(node: NodeSpec, gpus_per_node: int) -> int:
    """Free GPUs of a node.

    Parameters
    ----------
    node
        Of a list.
    gpus_per_node
        GPUs of a whole node, which are free where the list does not say.
    """
    return gpus_per_node if node.free_gpus is None else node.free_gpus


def free_by_name(cluster: ClusterSpec) -> dict[str, int]:
    """Free GPUs of the nodes that a cluster lists.

    Parameters
    ----------
    cluster
        Without a list there are none.
    """
    return {node.name: free_of(node, cluster.gpus_per_node) for node in cluster.nodes}


def leaves_are_domains(cluster: ClusterSpec) -> bool:
    """Whether the leaves of listed nodes are scale-up domains: racks of several nodes, no leaf larger.

    Parameters
    ----------
    cluster
        One that lists no leaves has none that are.
    """
    if cluster.nvlink_domain <= cluster.gpus_per_node:
        return False
    sizes: dict[Key, int] = {}
    for node in cluster.nodes:
        if node.leaf is not None:
            key = (node.pod or "", node.leaf)
            sizes[key] = sizes.get(key, 0) + cluster.gpus_per_node
    return bool(sizes) and max(sizes.values()) <= cluster.nvlink_domain


def first_outside_a_leaf(cluster: ClusterSpec) -> int:
    """Which of the cluster's levels the up-links of a leaf run in; those of a pod run in the next.

    Parameters
    ----------
    cluster
        One that lists no leaves counts as one whose leaves join nodes.

    Returns
    -------
    int
        Position in `levels`: 0 where leaves are scale-up domains, else 1.
    """
    return 0 if leaves_are_domains(cluster) else 1


def link_gb_per_s(cluster: ClusterSpec, level: int) -> float:
    """Of one GPU, the links that join the blocks below level `level` of the cluster, whoever uses them.

    What crosses a level crosses all inside it, so the worst oversubscription so far counts.

    Parameters
    ----------
    cluster
        With levels, or without: then nothing is oversubscribed.
    level
        Position in `levels`, from 0; past the last one all levels count.

    Returns
    -------
    float
        GB/s in one direction.
    """
    inside = cluster.levels[: level + 1]
    worst = max((inner.oversubscription for inner in inside), default=1.0)
    return nominal_nic_gb_per_s(cluster) / worst


def unlisted_gb_per_s(cluster: ClusterSpec, level: int) -> float:
    """The same of what others leave, where none of the blocks that it uses is listed.

    Parameters
    ----------
    cluster
        With levels.
    level
        Position in `levels`, from 0.

    Returns
    -------
    float
        GB/s in one direction, less the `background` of the level below.
    """
    background = cluster.levels[level - 1].background or 0.0 if level else 0.0
    return link_gb_per_s(cluster, level) * (1.0 - background)


class SameCluster:
    """A cluster as a key: the same object is the same cluster, without hashing its nodes."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameCluster) and self.cluster is other.cluster


def uplinks(cluster: ClusterSpec) -> Uplinks:
    """The up-links of the leaves and pods that listed nodes hang on.

    Without a `background`, a job has the share of its free GPUs: the others' GPUs use theirs. With one it has
    what that leaves of the whole link, but no more than the NICs of its free GPUs.

    Parameters
    ----------
    cluster
        Without listed leaves there are none.
    """
    return _uplinks(SameCluster(cluster))


@lru_cache(maxsize=16)
def _uplinks(same: SameCluster) -> Uplinks:
    cluster = same.cluster
    gpus_per_node, nic = cluster.gpus_per_node, cluster.slowest_nic_gbps_per_gpu / 8
    first = first_outside_a_leaf(cluster)
    stated = [level.background for level in cluster.levels[:-1]]
    of_level = [stated[k] if 0 <= k < len(stated) else None for k in (first - 1, first)]
    counts: tuple[dict[Key, list[int]], dict[Key, list[int]]] = ({}, {})
    for node in cluster.nodes:
        if node.leaf is None:
            continue
        pod = node.pod or ""
        for blocks, key in zip(counts, ((pod, node.leaf), (pod, "")), strict=True):
            count = blocks.setdefault(key, [0, 0])
            count[0] += free_of(node, gpus_per_node)
            count[1] += gpus_per_node
    of_block = {(block.pod, block.leaf or ""): block.background for block in cluster.blocks}
    sides: list[dict[Key, Uplink]] = []
    for step, blocks in enumerate(counts):
        rate = link_gb_per_s(cluster, first + step)
        links = {}
        for key, (free, all_gpus) in blocks.items():
            anywhere = of_block.get((None, key[1]), of_level[step])
            if free:
                links[key] = _link(free, all_gpus, nic, rate, of_block.get(key, anywhere))
        sides.append(links)
    return Uplinks(leaves=sides[0], pods=sides[1])


def _link(free: int, all_gpus: int, nic: float, rate: float, background: float | None) -> Uplink:
    if background is None:
        return Uplink(free=free, gb_per_s=free * min(nic, rate), stated=False)
    return Uplink(
        free=free, gb_per_s=min((1.0 - background) * all_gpus * rate, free * nic), stated=True
    )


HOP_LATENCY_US: dict[Medium, float] = {
    "nvlink": 1.9,
    "xgmi": 2.2,
    "pcie": 2.5,
    "infiniband": 4.0,
    "omnipath": 5.0,
    "slingshot": 6.0,
    "roce": 6.0,
    "efa": 60.0,
}
"""One hop of a collective, in microseconds, by medium: nominal, used where a level states no `latency_us`.

nvlink, pcie, infiniband: NCCL's tuning table, ring and LL128 protocol (`hwLat` in NVIDIA/nccl
src/graph/tuning.cc). xgmi: between the 0.8 us (LL) and 3.6 us (Simple) of RCCL's table. omnipath, slingshot,
roce: InfiniBand's and 1 to 2 us for a slower NIC and switch; estimates. efa: NCCL's all-gather over 2, 4, 8,
16 and 32 nodes of 8 H100 takes 0.14, 0.28, 0.59, 1.18 and 2.48 ms beyond its bytes: 59 to 64 us a node, less
the hops inside nodes (crazyguitar/aws-gpu-communication-benchmark fd167f97, data/nccl_all_gather.csv: p5).
"""

TIER_LATENCY_US = 0.5
"""Every further tier of switches: two more switch crossings of about 0.2 us and some 20 m of fibre."""

GPUS_OF_A_SOCKET = 4
"""GPUs on the PCIe lanes of one CPU of a usual two-socket server."""

WITHIN_A_SOCKET, BETWEEN_SOCKETS = (0.83, 1.0), (0.5, 0.43)
"""Of what a PCIe link carries, what is left to rings and to all-to-alls where a node's GPUs exchange data
through its CPUs.

Every byte between two GPUs without NVLink passes the host bridges, which all GPUs use at once, and between
sockets the CPUs' own link ("On PCI systems, the performance you get is usually determined by the bandwidth
your CPU and memory can deliver", a maintainer in NVIDIA/nccl issue 1639). Measured on A100 over PCIe 4.0
(MooreThreads/SimuMax, configs/system/a100_pcie.json, shares of 30 GB/s): 8 GPUs 12.5 GB/s of bus bandwidth in
an all-reduce, 13.5 and 11.1 in gathers and scatters, 8.3 in an all-to-all; 4 GPUs 20.8, 20.7, 20.5 and 19.1;
2 as 4. Of 32 GB/s nominal times what links attain where nothing is shared (0.783 in a ring, 0.6 in NCCL's
all-to-all: costmodel/data/collectives.yaml) all-reduces are 0.50 and 0.83, all-to-alls 0.43 and 1.0. Beside
them: 28 GB/s of 64 among 8 RTX 5090 and 35 among 4 (that issue), which are 0.56 and 0.70.
"""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level before it is fitted to an allocation; `gpus` is the size of its block in the machine."""

    name: str
    medium: Medium
    gpus: int
    gb_per_s: float
    latency_us: float
    attained: float | None = None
    all_to_all_attained: float | None = None
    rails: int = 1
    """Rails between which nothing passes inside a block; 1 where traffic between rails passes NVLink."""
    cross_rail_gb_per_s: float = 0.0
    """Of one GPU, at the level that joins the rails; 0 where `rails` is 1."""
    neighbour_share: float = 1.0
    """Of `gb_per_s`, what is left when all of it goes from each block to one other."""
    host_share: float = 1.0
    """Of `gb_per_s`, what is left to rings where the node's CPUs are between its GPUs."""
    host_share_of_exchanges: float = 1.0
    """The same of all-to-alls."""


def measured_tiers(cluster: ClusterSpec) -> Iterator[Tier]:
    """The tiers, from the inside outwards, with what was measured; of several measurements the last counts.

    Raises InputError where a scale-up domain has no rate.

    Parameters
    ----------
    cluster
        With its `measured` entries.
    """
    for tier in _tiers(cluster):
        changed = tier
        for entry in cluster.measured:
            if entry.level == tier.name and entry.collective == "alltoall":
                changed = replace(changed, all_to_all_attained=entry.attained_fraction)
            elif entry.level == tier.name:
                latency_us = entry.latency_us or changed.latency_us
                changed = replace(changed, attained=entry.attained_fraction, latency_us=latency_us)
        yield changed


def _tiers(cluster: ClusterSpec) -> Iterator[Tier]:
    device = cluster.device
    if cluster.nvlink_domain > 1:
        medium: Medium = "xgmi" if device.architecture in XGMI else "nvlink"
        rate = cluster.nvlink_gb_per_s or device.scale_up_gb_per_s
        if rate is None:
            raise InputError(
                f"nvlink_gb_per_s: missing, cluster {cluster.name!r} has an nvlink_domain of "
                f"{cluster.nvlink_domain} and device {device.name!r} states no scale_up_gb_per_s"
            )
        yield Tier(
            name=medium,
            medium=medium,
            gpus=cluster.nvlink_domain,
            gb_per_s=rate,
            latency_us=HOP_LATENCY_US[medium],
        )
    if cluster.nvlink_domain < cluster.gpus_per_node or cluster.nvlink_domain == 1:
        one_socket = cluster.gpus_per_node <= GPUS_OF_A_SOCKET
        rings, exchanges = WITHIN_A_SOCKET if one_socket else BETWEEN_SOCKETS
        yield Tier(
            name="node",
            medium="pcie",
            gpus=cluster.gpus_per_node,
            gb_per_s=device.pcie_gb_per_s,
            latency_us=HOP_LATENCY_US["pcie"],
            host_share=rings,
            host_share_of_exchanges=exchanges,
        )
    yield from _network_tiers(cluster)


def _network_tiers(cluster: ClusterSpec) -> Iterator[Tier]:
    """The levels above the node and the scale-up domain. 8 gigabit are a gigabyte."""
    nic_gb_per_s, base_us = cluster.slowest_nic_gbps_per_gpu / 8, HOP_LATENCY_US[cluster.nic_medium]
    if not cluster.levels:
        yield Tier(
            name="fabric",
            medium=cluster.nic_medium,
            gpus=cluster.gpus,
            gb_per_s=nic_gb_per_s,
            latency_us=base_us,
        )
    rates = level_rates(cluster)
    apart = not cluster.crosses_rails_inside
    without_rails = [depth for depth, level in enumerate(cluster.levels) if level.rails == 1]
    joining = min(without_rails, default=len(rates) - 1)
    below = max(cluster.nvlink_domain, cluster.gpus_per_node)
    for depth, level in enumerate(cluster.levels):
        rails = level.rails if apart else 1
        yield Tier(
            name=level.name,
            medium=cluster.nic_medium,
            gpus=level.gpus,
            gb_per_s=rates[depth],
            latency_us=level.latency_us or base_us + depth * TIER_LATENCY_US,
            rails=rails,
            cross_rail_gb_per_s=rates[joining] if rails > 1 else 0.0,
            neighbour_share=neighbour_share(level, level.gpus // below),
        )
        below = level.gpus


def level_rates(cluster: ClusterSpec) -> list[float]:
    """What one GPU of the job has across each of the cluster's levels, GB/s in one direction.

    Where leaves and pods are listed, that of the block with the least left for each free GPU: it paces what
    crosses the level, wherever it is used.

    Parameters
    ----------
    cluster
        With levels; none gives an empty list.

    Returns
    -------
    list of float
        By level, from the inside out; never rising.
    """
    nic = cluster.slowest_nic_gbps_per_gpu / 8
    first, listed = first_outside_a_leaf(cluster), uplinks(cluster)
    worst_block: dict[int, float] = {}
    for depth, links in ((first, listed.leaves), (first + 1, listed.pods)):
        if links:
            worst_block[depth] = min(link.gb_per_s / link.free for link in links.values())
    rates: list[float] = []
    for depth in range(len(cluster.levels)):
        rate = worst_block.get(depth, unlisted_gb_per_s(cluster, depth))
        rates.append(min([nic, rate, *rates[-1:]]))
    return rates


def neighbour_share(level: FabricLevelSpec, blocks: int) -> float:
    """Of what a block's links carry, the part that reaches one other block when all of it goes there.

    Links spread evenly over the B - 1 others carry 1 / (B - 1) of it directly. The rest takes two links, over
    a third block, of which all have B - 2 (non-minimal routing; Kim et al. 2008, "Technology-driven,
    highly-scalable dragonfly topology", ISCA, section 4): with c + 2 (r - c) = 1 and c = 1 / (B - 1),
    r = B / (2 (B - 1)). An all-to-all over all blocks uses every link once and loses nothing.

    Parameters
    ----------
    level
        Joined by switches, for which the share is 1, or directly.
    blocks
        B, how many blocks the level joins, from 1.

    Returns
    -------
    float
        Above 1/2 to 1.
    """
    if level.joined != "direct" or blocks < 3:
        return 1.0
    return blocks / (2.0 * (blocks - 1.0))
