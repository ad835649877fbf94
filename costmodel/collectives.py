"""Collective times on a fabric with levels: alpha-beta with a size-dependent bandwidth.

Symbols: n bytes in the full buffer, P members, alpha seconds a hop, B bytes a second. A ring moves (P-1)/P n
past every member (Thakur, Rabenseifner, Gropp 2005, sections 3.1 and 4.1; NCCL calls n-independent B "bus
bandwidth"). Across levels the same buffer leaves each block over the links of those members that sit inside
it, so the level's rate for a group is (members inside the sub-block) x (link rate of one GPU), all groups
being active at once on their own share; the slowest level paces the ring. `textbook` has the textbook forms
on a flat network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import FabricLevels, fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.calibration import Factors
from meshwright.costmodel.layout import Floats, Ints
from meshwright.costmodel.records import data_table
from meshwright.costmodel.textbook import Operation

TWO_NODE_TREE_RATE = 0.92
"""Rate of NCCL's tree all-reduce over that of its ring on the same links (src/graph/tuning.cc)."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What collectives reach on each fabric level, inside out; arrays of shape [levels]."""

    bytes_per_s: NDArray[np.float64]
    """Attained ring bandwidth of one GPU, one direction."""
    all_to_all_bytes_per_s: NDArray[np.float64]
    """Attained bandwidth of one GPU in an all-to-all, one direction."""
    latency_s: NDArray[np.float64]
    """One hop."""
    half_bytes: NDArray[np.float64]
    """n0 of B(n) = B / (1 + sqrt(n0 / n)): small messages do not fill the links inside a node."""
    rails: NDArray[np.int64] | None = None
    """Rails between which nothing passes inside a block, 1 where there are none; None: none anywhere."""
    cross_rail_bytes_per_s: NDArray[np.float64] | None = None
    """As `all_to_all_bytes_per_s`, of the level that joins the rails."""
    moving_bytes_per_s: NDArray[np.float64] | None = None
    """As `bytes_per_s`, where no NIC moves less than those of measured runs; None where none does."""
    exchange_half_bytes: NDArray[np.float64] | None = None
    """As `half_bytes`, of an all-to-all; None: the same."""
    fill_s: NDArray[np.float64] | None = None
    """What a ring's or a tree's first pieces take for one hop; None: no time."""
    tree_bytes_per_s: float = inf
    """The most that a tree between two blocks moves through the links of a block, up and down."""
    dispatched_bytes_per_s: NDArray[np.float64] | None = None
    """As `all_to_all_bytes_per_s`, of a dispatcher with kernels of its own (DeepEP); None: the same."""

    @property
    def moving(self) -> Links:
        """These links with rings at `moving_bytes_per_s`."""
        rates = self.moving_bytes_per_s
        return self if rates is None else replace(self, bytes_per_s=rates, moving_bytes_per_s=None)


def best_beyond(links: Links) -> Links:
    """At each level the best of that level and all levels outside it.

    A group too large for a block crosses some level at or beyond that block's. With these links no placement
    beats the one that packs every group as far inside as it can be, even where an outer level is the faster
    one (a NIC faster than the PCIe bus of its node). Rails are left out: a group with one member a node would
    not feel them.

    Parameters
    ----------
    links : Links
        Rates of the levels, inside out.

    Returns
    -------
    Links
        Rates that never fall and latencies that never rise from the outside in.
    """

    highest, lowest = np.maximum.accumulate, np.minimum.accumulate
    moving, exchanged, fill = links.moving_bytes_per_s, links.exchange_half_bytes, links.fill_s
    dispatched = links.dispatched_bytes_per_s
    best = Links(
        bytes_per_s=highest(links.bytes_per_s[::-1])[::-1],
        all_to_all_bytes_per_s=highest(links.all_to_all_bytes_per_s[::-1])[::-1],
        latency_s=lowest(links.latency_s[::-1])[::-1],
        half_bytes=lowest(links.half_bytes[::-1])[::-1],
        moving_bytes_per_s=None if moving is None else highest(moving[::-1])[::-1],
        exchange_half_bytes=None if exchanged is None else lowest(exchanged[::-1])[::-1],
        fill_s=None if fill is None else lowest(fill[::-1])[::-1],
        tree_bytes_per_s=links.tree_bytes_per_s,
        dispatched_bytes_per_s=None if dispatched is None else highest(dispatched[::-1])[::-1],
    )
    return replace(best, half_bytes=_half_bytes_beyond(links.half_bytes, best))


def _half_bytes_beyond(half_bytes: NDArray[np.float64], best: Links) -> NDArray[np.float64]:
    """Those of each level, or the least beyond it where small messages may gain by reaching farther.

    When k members of a group inside a level's blocks begin to cross that level, n bytes lose at most
    n (1 + sqrt(n0 / n)) / (k B) against n / (k b) beyond: n0 / (4 k B^2 (1 / b - 1 / B)) at the worst size.
    They have log2((k + 1) / k) hops less beyond, at least 1 / k, and as many more there.
    """
    hop_s = best.latency_s if best.fill_s is None else best.latency_s + best.fill_s
    rates = [best.bytes_per_s]
    if best.moving_bytes_per_s is not None:
        rates.append(best.moving_bytes_per_s)
    result = best.half_bytes.copy()
    for level, half in enumerate(half_bytes):
        beyond = slice(level + 1, None)
        is_packed = np.ones(len(half_bytes) - level - 1, dtype=bool)
        for rate in rates:
            # No loss is made up for where a level beyond is as fast.
            falls = np.maximum(1.0 / rate[beyond] - 1.0 / rate[level], 0.0)
            gained = 4.0 * rate[level] ** 2 * falls * (hop_s[beyond] - hop_s[level])
            is_packed &= half <= gained
        if np.all(is_packed | (half_bytes[beyond] >= half)):
            result[level] = half
    return result


def members_inside(members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Members of a group inside one block of the level below each level.

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Members inside one block of each level, inside out.

    Returns
    -------
    array of int, shape [..., levels]
        1 below the innermost level.
    """
    inside = np.ones_like(members)
    inside[..., 1:] = members[..., :-1]
    return inside


def _over_levels(function: np.ufunc, values: NDArray[np.float64]) -> Floats:
    """Folds the last axis; with a handful of levels much faster than a reduction along it."""
    result: Floats = values[..., 0]
    for level in range(1, values.shape[-1]):
        result = function(result, values[..., level])
    return result


def ring_pass_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """All-gather or reduce-scatter: one pass round a ring.

    sum over levels of log2(blocks) (alpha + fill) + (P-1)/P n / B, with B the rate of the slowest level
    crossed. The hops are those of a tree: small messages, the only ones that feel them, take the algorithm
    with the fewest (NCCL's choice by size). Inside a node a half-empty ring is in B(n), between nodes what
    the first pieces take is in `fill`. Thakur, Rabenseifner and Gropp 2005, section 4.1.

    Parameters
    ----------
    buffer_bytes : float or array, shape [...]
        n, the gathered (or not yet scattered) buffer, at least 0.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size = members[..., -1:]
    return _pass_s(buffer_bytes, members, links, (size - 1) / size)


def neighbour_ring_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """`ring_pass_s` of a program that sends to the next rank and receives from the one before, step by step.

    There is one ring, so that of the members in a block only the last sends out of it, over its own links,
    where NCCL's collectives run as many rings as there are NICs (Transformer Engine 2.15,
    flash_attn_p2p_communicate).

    Parameters
    ----------
    buffer_bytes : float or array, shape [...]
        n, what has passed every member but itself in the end, at least 0.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size = members[..., -1:]
    return _pass_s(buffer_bytes, members, links, (size - 1) / size * members_inside(members))


def long_ring_pass_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """`ring_pass_s` with the latency of the (P-1) hops of a ring, each over the level that it crosses.

    NCCL gathers and scatters large buffers round rings only, however many ranks there are (src/graph/
    tuning.cc; Thakur, Rabenseifner and Gropp 2005, section 4.1, with a latency for every level). Of the P
    links of a ring P/inside - P/members cross a level (its outermost: P/inside).

    Parameters
    ----------
    buffer_bytes : float or array, shape [...]
        n, the gathered (or not yet scattered) buffer, at least 0.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size, inside = members[..., -1:], members_inside(members)
    beyond = np.where(members < size, size / members, 0.0)
    crossing = np.where(members > inside, size / inside - beyond, 0.0)
    hops = crossing * (size - 1) / size
    moving = replace(links, latency_s=np.zeros_like(links.latency_s))
    return _over_levels(np.add, hops * links.latency_s) + ring_pass_s(buffer_bytes, members, moving)


def all_reduce_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """All-reduce: two ring passes, or a double binary tree where the group lies in two blocks.

    A ring carries 2 (P-1)/P n over each boundary. Between two blocks a tree carries n each way: the sum of
    one block goes over and the result comes back, for one half of the buffer in either direction (Sanders,
    Speck, Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"). NCCL prices
    a tree on two nodes by the links inside the node (`bwIntra` for nNodes <= 2) at 0.92 of the ring's rate,
    and at no more than `tree_bytes_per_s`, and takes the faster of the two (src/graph/tuning.cc).

    Parameters
    ----------
    buffer_bytes : float or array, shape [...]
        n, what every member holds, at least 0.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size = members[..., -1:]
    ring = (size - 1) / size
    tree = np.minimum(_tree_share(members, links), ring)
    between_two = (members > members[..., :1]) & is_in_two_blocks(members)[..., None]
    share = np.where(between_two, tree, ring)
    return 2.0 * _pass_s(buffer_bytes, members, links, share)


def _tree_share(members: NDArray[np.int64], links: Links) -> NDArray[np.float64]:
    """Half of what passes a boundary by tree, n each way, over the rate that trees keep of each level."""
    block_rate = members_inside(members) * links.bytes_per_s
    return np.maximum(0.5 / TWO_NODE_TREE_RATE, block_rate / links.tree_bytes_per_s)


def goes_by_tree(members: NDArray[np.int64], links: Links) -> NDArray[np.bool_]:
    """Whether `all_reduce_s` takes the tree, which it does where a group lies in two blocks and gains by it.

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.

    Returns
    -------
    array of bool, shape [...]
        False for a group of two, whose ring moves as much.
    """
    size = members[..., -1:]
    gains = _tree_share(members, links) < (size - 1) / size
    by_tree: NDArray[np.bool_] = is_in_two_blocks(members) & np.any(gains[..., 1:], axis=-1)
    return by_tree


def halves_go_by_tree(size: int, links: Links) -> bool:
    """`goes_by_tree` of a group with half of its members in each of two innermost blocks.

    Parameters
    ----------
    size : int
        Members of the group, at least 1.
    links : Links
        Rates of the levels.

    Returns
    -------
    bool
        False on a single level.
    """
    members = np.full(len(links.bytes_per_s), size)
    members[0] = -(-size // 2)
    return bool(goes_by_tree(members, links))


def is_in_two_blocks(members: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a group lies in two innermost blocks, so that `all_reduce_s` may go by tree.

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.

    Returns
    -------
    array of bool, shape [...]
        False for a group that lies in one, or in more.
    """
    size, innermost = members[..., -1], members[..., 0]
    return (size > innermost) & (size <= 2 * innermost)


def _pass_s(
    buffer_bytes: Floats, members: NDArray[np.int64], links: Links, share: NDArray[np.float64]
) -> Floats:
    """One pass, `share` of the buffer going over every boundary of a level, shape [..., levels or 1]."""
    inside = members_inside(members)
    crossed = members > inside
    n = np.asarray(buffer_bytes, dtype=np.float64)[..., None]
    slow_down = 1.0 + np.sqrt(links.half_bytes / np.maximum(n, 1.0))
    block_rate = inside * links.bytes_per_s
    slowest = _over_levels(np.maximum, crossed * share * slow_down / block_rate)
    hops = np.log2(members / inside)
    hop_s = links.latency_s if links.fill_s is None else links.latency_s + links.fill_s
    latency = _over_levels(np.add, hops * hop_s)
    seconds: Floats = latency + np.asarray(buffer_bytes) * slowest
    return seconds


def all_to_all_s(
    sent_bytes: Floats, members: NDArray[np.int64], links: Links, copies: Floats | None = None
) -> Floats:
    """All-to-all in which every member sends as much to each of P members, itself among them.

    The share (P - inside)/P leaves the sub-block at each level over the GPU's own links; levels drain at the
    same time, the slowest ends it. Where NICs are joined in rails, what changes rails is also sent up to the
    level that joins them (`cross_rail_bytes`). docs/cost_model.md, "Collectives".

    Parameters
    ----------
    sent_bytes : float or array, shape [...]
        What one member sends in all, at least 0.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Rates of the levels.
    copies : array, shape [..., levels], optional
        Scale of the bytes that cross each level, where one copy serves several receivers of a block
        (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 3.2.2); 1 by default.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size = members[..., -1:]
    inside = members_inside(members)
    crossed = members > inside
    share = (size - inside) / size
    scale = np.ones(1) if copies is None else np.asarray(copies)
    volume = np.asarray(sent_bytes, dtype=np.float64)[..., None] * share * scale
    own = links.exchange_half_bytes
    half_bytes = links.half_bytes if own is None else own
    slow_down = 1.0 + np.sqrt(half_bytes / np.maximum(volume, 1.0))
    transfer = volume * slow_down / links.all_to_all_bytes_per_s
    on_level = np.where(crossed, transfer + links.latency_s, 0.0)
    seconds = _over_levels(np.maximum, on_level)
    rails, rail_rates = links.rails, links.cross_rail_bytes_per_s
    if rails is None or rail_rates is None or not np.any(rails > 1):
        return seconds
    first = int(np.argmax(rails > 1))
    up = cross_rail_bytes(volume, members, rails)
    climb = up * slow_down[..., first] / rail_rates[first] + links.latency_s[first]
    with_rails: Floats = np.maximum(seconds, np.where(up > 0, climb, 0.0))
    return with_rails


def cross_rail_bytes(
    volume: NDArray[np.float64], members: NDArray[np.int64], rails: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What one GPU sends up to the level that joins the rails in an all-to-all.

    Of what stays under one set of rails, 1 - 1/R goes from one rail to another, R being the rails that the
    members in a node lie on; a group with one member in a node stays on its rail. What goes further crosses
    anyway. Counted from even exchanges between all members; docs/fabric.md says what rails are.

    Parameters
    ----------
    volume : array of float, shape [..., levels]
        Bytes that leave the sub-blocks of each level, what goes further included.
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    rails : array of int, shape [levels]
        Rails of each level, 1 where there are none; more than 1 somewhere.

    Returns
    -------
    array of float, shape [...]
        Bytes.
    """
    railed = np.flatnonzero(rails > 1)
    first, last = int(railed[0]), int(railed[-1])
    in_node = members_inside(members)[..., first]
    on_rails = np.minimum(in_node, rails[first])
    beyond = np.zeros_like(volume[..., 0])
    if last + 1 < volume.shape[-1]:
        beyond = volume[..., last + 1]
    within = np.maximum(volume[..., first] - beyond, 0.0)
    changing: NDArray[np.float64] = (1.0 - 1.0 / on_rails) * within + beyond
    return np.where(members[..., last] > in_node, changing, beyond)


def chain_latency_s(members: NDArray[np.int64], links: Links) -> Floats:
    """Latency of a message that passes every member of a group one after the other.

    Of the P - 1 hops, P / inside - P / members cross each level (NCCL adds
    hops so, `nsteps` of src/graph/tuning.cc).

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Members of the group inside one block of each level.
    links : Links
        Latencies of the levels.

    Returns
    -------
    float or array, shape [...]
        Seconds; 0 for a group of one.
    """
    size, inside = members[..., -1:], members_inside(members)
    hops = size / inside - size / members
    return _over_levels(np.add, hops * links.latency_s)


def point_to_point_s(payload_bytes: Floats, level: Ints, links: Links) -> Floats:
    """One neighbour sends to the next: alpha + n / B (Thakur, Rabenseifner and Gropp 2005, section 3).

    Parameters
    ----------
    payload_bytes : float or array
        n, at least 0.
    level : int or array of int
        Index of the fabric level that lies between the two, 0 the innermost.
    links : Links
        Rates of the levels.

    Returns
    -------
    float or array
        Seconds, in the common shape of `payload_bytes` and `level`.
    """
    index = np.asarray(level)
    transfer = np.asarray(payload_bytes) / links.bytes_per_s[index]
    seconds: Floats = links.latency_s[index] + transfer
    return seconds


# Collectives alone on a fabric, by algorithm: ring, tree, and reduction in the NVLink switches (NVLS).
#
# These are benchmark conditions; the functions above price steps, at the rates that are left beside compute.


_WHOLE_BUFFER = ("broadcast", "reduce", "send")
"""Operations whose bus bandwidth is n / t: the whole buffer goes through a link once."""
_LEAST_IN_SWITCH = 3
"""Members from which switches reduce; two copy directly."""
_PIPELINED_TREE_RATE = 0.85
"""Of a ring's bandwidth that the pipelined double binary tree keeps between nodes (tuning.cc)."""
SCALE_UP_MEDIA = ("nvlink", "xgmi", "pcie")
"""What joins GPUs inside a node or an NVLink domain."""


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
        Where the cluster has fewer GPUs than members.
    """
    levels = fabric_levels(cluster, members)
    architecture = cluster.device.architecture
    usual = np.array([_ring_fraction(medium, architecture) for medium in levels.media])
    ring = np.where(np.isnan(levels.attained), usual * levels.host_share, levels.attained)
    scale_up = np.array([medium in SCALE_UP_MEDIA for medium in levels.media])
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
    exchange = exchange * np.where(scale_up, own.exchange, 1.0)
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
    """One operation alone on the fabric, by the fastest algorithm, as NCCL's tuner picks it.

    NVIDIA/nccl, src/graph/tuning.cc. Concurrent groups share a node's NICs: a group has as many of them as
    members in the node, its own, so that groups of one axis do not slow each other down.

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
    ring = float(np.asarray(long_ring_pass_s(passed, members, links)))
    if operation != "all-reduce":
        return {"ring": ring}
    seconds = {"ring": 2.0 * ring}
    if len(members) > 1:
        seconds["tree"] = double_tree_all_reduce_s(buffer_bytes, members, links)
    elif fabric.in_switch_bytes_per_s and int(members[-1]) >= _LEAST_IN_SWITCH:
        seconds["nvls"] = in_switch_all_reduce_s(buffer_bytes, fabric)
    return seconds


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

    Bus bandwidth is 2 (P-1)/(P+1) of the link, so that four GPUs gain nothing and eight reach 1.3 times that
    of a ring (docs/cost_model.md, "Collectives").

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
