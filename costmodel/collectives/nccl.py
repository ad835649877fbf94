"""Collectives alone on a fabric, by algorithm: ring, tree, and reduction in the NVLink switches (NVLS).

n bytes in the full buffer, P members, a node's N; the fastest algorithm counts, as NCCL's tuner picks it
(NVIDIA/nccl, src/graph/tuning.cc). These are benchmark conditions; steps are priced with
`on_levels` at the rates that are left beside compute. Concurrent groups share a node's NICs: a
group has as many of them as members in the node, its own, so groups of one axis do not slow each other down;
that is in the level's rate, (members inside) x (link of one GPU).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import FabricLevels, fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.collectives.alpha_beta import Operation
from meshwright.costmodel.collectives.on_levels import (
    Links,
    all_to_all_s,
    long_ring_pass_s,
    members_inside,
    point_to_point_s,
)
from meshwright.costmodel.constants.calibration import Factors
from meshwright.costmodel.constants.data_files import data_table

_WHOLE_BUFFER = ("broadcast", "reduce", "send")
"""Operations whose bus bandwidth is n / t: the whole buffer goes through a link once."""
_LEAST_IN_SWITCH = 3
"""Members from which switches reduce; two copy directly."""
_PIPELINED_TREE_RATE = 0.85
"""Of a ring's bandwidth that the pipelined double binary tree keeps between nodes (tuning.cc)."""
_SCALE_UP_MEDIA = ("nvlink", "xgmi", "pcie")


@dataclass(frozen=True, kw_only=True)
class IsolatedFabric:
    """Attained rates of one group's levels when nothing else runs."""

    links: Links
    members: NDArray[np.int64]
    """Of the group inside one block of each level, shape [levels]."""
    exchange_half_bytes: NDArray[np.float64]
    """As `links.half_bytes`, of an all-to-all."""
    in_switch_bytes_per_s: float
    """Attained by one GPU when the innermost level's switches reduce; 0 where they cannot."""
    copy_bytes_per_s: NDArray[np.float64]
    """Attained by one GPU that sends to a neighbour, shape [levels]."""
    call_s: float
    """Start of an operation, seconds."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Seconds of an operation under each algorithm that can run it, and the bandwidths of the fastest.

    Bus bandwidth is n / t scaled by 2 (P-1)/P for an all-reduce, by 1 for a broadcast and a reduce, by
    (P-1)/P for gathers, scatters and an all-to-all (NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that it
    compares with a link.
    """

    algorithm: str
    seconds: float
    by_algorithm_s: dict[str, float]
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


def _constant(name: str) -> float:
    return float(data_table("collectives.yaml")[name]["value"])


def _value(section: str, *names: str) -> float:
    """The first of some entries that a section has; 0 where it has none of them."""
    rows = data_table("collectives.yaml")[section]
    for name in names:
        if name in rows:
            return float(rows[name]["value"])
    return 0.0


def isolated_fabric(
    cluster: ClusterSpec, members: int, *, deduplicated: bool = True, factors: Factors | None = None
) -> IsolatedFabric:
    """Rates for a group packed as far inside as it can be.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    members : int
        GPUs in the group, 1 to the cluster's size.
    deduplicated : bool
        Whether all-to-alls run on kernels of their own (DeepEP), or else on NCCL's sends and receives.
    factors : Factors, optional
        What the user's own runs and logs say of links inside nodes and between them.

    Returns
    -------
    IsolatedFabric
        Fractions of the nominal rates as `costmodel/data/collectives.yaml` has them, with their sources, or
        those that the cluster's own measurements gave.

    Raises
    ------
    InputError
        Where the cluster has fewer GPUs.
    """
    levels = fabric_levels(cluster, members)
    architecture = cluster.device.architecture
    usual = np.array([_ring_fraction(medium, architecture) for medium in levels.media])
    ring = np.where(np.isnan(levels.attained), usual * levels.host_share, levels.attained)
    scale_up = np.array([medium in _SCALE_UP_MEDIA for medium in levels.media])
    network_exchange = np.where(ring < 0.5, ring, _value("exchange", "infiniband"))
    kernels = "nvlink" if deduplicated else "nccl"
    usual = np.where(scale_up, _value("exchange", kernels), network_exchange)
    unmeasured = np.isnan(levels.all_to_all_attained)
    exchange = np.where(
        unmeasured, usual * levels.host_share_of_exchanges, levels.all_to_all_attained
    )
    own = factors or Factors()
    nominal = levels.gb_per_s * 1e9 * _mesh_share(levels, cluster)
    nominal = nominal * np.where(scale_up, own.scale_up, own.network)
    packed = np.minimum(levels.blocks, members)
    relayed = deduplicated and cluster.nvlink_domain >= cluster.gpus_per_node > 1
    links = Links(
        bytes_per_s=nominal * ring * levels.neighbour_share,
        all_to_all_bytes_per_s=nominal * exchange,
        latency_s=levels.latency_s,
        half_bytes=levels.gb_per_s * 1e9 * members_inside(packed) * _constant("fill_s"),
        rails=None if relayed else levels.rails,
        cross_rail_bytes_per_s=levels.cross_rail_gb_per_s * 1e9 * exchange,
    )
    return IsolatedFabric(
        links=links,
        members=packed,
        exchange_half_bytes=nominal * _constant("exchange_fill_s" if deduplicated else "fill_s"),
        in_switch_bytes_per_s=float(nominal[0]) * _in_switch_fraction(levels, cluster),
        copy_bytes_per_s=nominal * np.where(scale_up, _constant("copy"), ring),
        call_s=_constant("call_latency_s"),
    )


def _ring_fraction(medium: str, architecture: str) -> float:
    """Attained over nominal rate of a ring."""
    if medium == "nvlink":
        return _value("ring", architecture, "nvlink")
    return _value("ring", medium)


def _in_switch_fraction(levels: FabricLevels, cluster: ClusterSpec) -> float:
    """Attained over nominal rate of a reduction in the NVLink switches; 0 without such switches."""
    if levels.media[0] != "nvlink":
        return 0.0
    architecture = cluster.device.architecture
    if cluster.nvlink_domain > cluster.gpus_per_node:
        return _value("in_switch", f"{architecture}-rack", architecture)
    return _value("in_switch", architecture)


def _mesh_share(levels: FabricLevels, cluster: ClusterSpec) -> NDArray[np.float64]:
    """xGMI joins GPUs pair by pair: a group has its links to its own members only."""
    to_members = (levels.blocks - 1) / max(cluster.nvlink_domain - 1, 1)
    mesh = np.array([medium == "xgmi" for medium in levels.media])
    share = np.where(mesh, np.minimum(to_members, 1.0), 1.0)
    return np.asarray(share, dtype=np.float64)


def collective_time(
    operation: Operation, buffer_bytes: float, fabric: IsolatedFabric
) -> CollectiveTime:
    """One operation alone on the fabric, by the fastest algorithm.

    Parameters
    ----------
    operation : str
        One of `OPERATIONS`.
    buffer_bytes : float
        What every member starts an all-reduce or a reduce-scatter with and ends an all-gather with, what it
        sends in an all-to-all in all, or to one neighbour, and what the root of the others holds; above 0.
    fabric : IsolatedFabric
        The group and its rates, from `isolated_fabric`.

    Returns
    -------
    CollectiveTime
        Seconds and bytes per second.

    Raises
    ------
    ValueError
        For fewer than two members or no bytes.
    """
    size = int(fabric.members[-1])
    if size < 2 or buffer_bytes <= 0:
        raise ValueError(
            f"a collective needs two members and some bytes, not {size} and {buffer_bytes:g}"
        )
    by_algorithm = {
        name: seconds + fabric.call_s
        for name, seconds in _algorithms(operation, buffer_bytes, fabric).items()
    }
    fastest = min(by_algorithm, key=lambda name: by_algorithm[name])
    seconds = by_algorithm[fastest]
    return CollectiveTime(
        algorithm=fastest,
        seconds=seconds,
        by_algorithm_s=by_algorithm,
        algorithm_bytes_per_s=buffer_bytes / seconds,
        bus_bytes_per_s=_bus_factor(operation, size) * buffer_bytes / seconds,
    )


def _bus_factor(operation: Operation, size: int) -> float:
    """Bus bandwidth over n / t."""
    if operation in _WHOLE_BUFFER:
        return 1.0
    passes = 2.0 if operation == "all-reduce" else 1.0
    return passes * (size - 1) / size


def _algorithms(
    operation: Operation, buffer_bytes: float, fabric: IsolatedFabric
) -> dict[str, float]:
    """Seconds of every algorithm that can run an operation, without the start of the call."""
    links, members = fabric.links, fabric.members
    if operation == "send":
        rates = replace(links, bytes_per_s=fabric.copy_bytes_per_s)
        outermost = len(members) - 1
        return {"copy": float(np.asarray(point_to_point_s(buffer_bytes, outermost, rates)))}
    if operation in ("all-to-all", "scatter", "gather"):
        # The root of a scatter or a gather is as busy as every member of an all-to-all.
        links = replace(links, half_bytes=fabric.exchange_half_bytes)
        return {"exchange": float(np.asarray(all_to_all_s(buffer_bytes, members, links)))}
    size = int(members[-1])
    passed = buffer_bytes * size / (size - 1) if operation in _WHOLE_BUFFER else buffer_bytes
    ring = ring_s(passed, members, links)
    if operation != "all-reduce":
        return {"ring": ring}
    seconds = {"ring": 2.0 * ring}
    if len(members) > 1:
        seconds["tree"] = double_tree_all_reduce_s(buffer_bytes, members, links)
    elif fabric.in_switch_bytes_per_s and int(members[-1]) >= _LEAST_IN_SWITCH:
        seconds["nvls"] = in_switch_all_reduce_s(buffer_bytes, fabric)
    return seconds


def ring_s(buffer_bytes: float, members: NDArray[np.int64], links: Links) -> float:
    """One pass round a ring: (P-1) hops, each over the level it crosses, and (P-1)/P n over the slowest.

    Of the P links of a ring P/inside - P/members cross a level (its outermost: P/inside).

    Parameters
    ----------
    buffer_bytes : float
        n, the gathered (or not yet scattered) buffer, more than 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    float
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.1, with a latency for every level.
    """
    return float(np.asarray(long_ring_pass_s(buffer_bytes, members, links)))


def double_tree_all_reduce_s(
    buffer_bytes: float, members: NDArray[np.int64], links: Links
) -> float:
    """Chains in the node joined by a double binary tree: up and down, 2 ((P/N - 1) a_in + log2(N) a_out).

    Every byte goes up and down once through a node's NICs (Sanders, Speck and Traeff 2009, two-tree
    algorithms; NCCL 2.4), hence 2 n over the outermost level's rate, of which a tree keeps 0.85.

    Parameters
    ----------
    buffer_bytes : float
        n, what every member holds, more than 0.
    members : array of int, shape [levels]
        Members of the group inside one block of each of two or more levels.
    links : Links
        Rates of the levels.

    Returns
    -------
    float
        Seconds.
    """
    in_node = int(members[0])
    inside = members_inside(members)[1:]
    depth = np.log2(members[1:] / inside)
    latency = (in_node - 1) * links.latency_s[0] + float(np.sum(depth * links.latency_s[1:]))
    rate = np.min(inside * links.bytes_per_s[1:]) * _PIPELINED_TREE_RATE
    slow_down = 1.0 + np.sqrt(float(links.half_bytes[-1]) / buffer_bytes)
    return float(2.0 * latency + 2.0 * buffer_bytes * slow_down / rate)


def in_switch_all_reduce_s(buffer_bytes: float, fabric: IsolatedFabric) -> float:
    """NVLS: every GPU has the switch sum its n/P, then write the sum to all: n + n/P through each link.

    Bus bandwidth is 2 (P-1)/(P+1) of the link, so that four GPUs gain nothing and eight 1.3 times a ring.

    Parameters
    ----------
    buffer_bytes : float
        n, what every member holds, more than 0.
    fabric : IsolatedFabric
        A group inside one NVLink domain whose switches reduce.

    Returns
    -------
    float
        Seconds.
    """
    size = int(fabric.members[-1])
    slow_down = 1.0 + np.sqrt(float(fabric.links.half_bytes[0]) / 2.0 / buffer_bytes)
    moved = buffer_bytes * (1.0 + 1.0 / size) / fabric.in_switch_bytes_per_s
    return float(2.0 * fabric.links.latency_s[0] + moved * slow_down)
