"""Collective times on a fabric with levels: alpha-beta with a size-dependent bandwidth.

Symbols: n bytes in the full buffer, P members, alpha seconds a hop, B bytes a second. A ring moves (P-1)/P n
past every member (Thakur, Rabenseifner, Gropp 2005, sections 3.1 and 4.1; NCCL calls n-independent B "bus
bandwidth"). Across levels the same buffer leaves each block over the links of those members that sit inside
it, so the level's rate for a group is (members inside the sub-block) x (link rate of one GPU), all groups
being active at once on their own share; the slowest level paces the ring. `alpha_beta` has the textbook forms
on a flat network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Ints

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
    """n0 of B(n) = B / (1 + sqrt(n0 / n)): small messages do not fill the links."""
    rails: NDArray[np.int64] | None = None
    """Rails between which nothing passes inside a block, 1 where there are none; None: none anywhere."""
    cross_rail_bytes_per_s: NDArray[np.float64] | None = None
    """As `all_to_all_bytes_per_s`, of the level that joins the rails."""


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

    def running(
        best: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        from_outside = values[::-1]
        return best(from_outside)[::-1]

    highest, lowest = np.maximum.accumulate, np.minimum.accumulate
    return Links(
        bytes_per_s=running(highest, links.bytes_per_s),
        all_to_all_bytes_per_s=running(highest, links.all_to_all_bytes_per_s),
        latency_s=running(lowest, links.latency_s),
        half_bytes=running(lowest, links.half_bytes),
    )


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

    sum over levels of log2(blocks) alpha + (P-1)/P n / B, with B the rate of the slowest level crossed. The
    hops are those of a tree: small messages, the only ones that feel them, take the algorithm with the fewest
    (NCCL's choice by size), and a half-empty ring is already in B(n). Thakur, Rabenseifner and Gropp 2005,
    section 4.1.

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
    where NCCL's collectives run as many rings as there are NICs.

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
    """`ring_pass_s` with the (P-1) hops of a ring, each over the level that it crosses.

    NCCL gathers and scatters large buffers round rings only, however many ranks there are (src/graph/
    tuning.cc). Of the P links of a ring P/inside - P/members cross a level (its outermost: P/inside).

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
    a tree on two nodes by the links inside the node (`bwIntra` for nNodes <= 2) at 0.92 of the ring's rate
    (src/graph/tuning.cc).

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
    size, innermost = members[..., -1:], members[..., :1]
    ring = (size - 1) / size
    tree = np.minimum(0.5 / TWO_NODE_TREE_RATE, ring)
    between_two = (members > innermost) & (size <= 2 * innermost)
    share = np.where(between_two, tree, ring)
    return 2.0 * _pass_s(buffer_bytes, members, links, share)


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
    latency = _over_levels(np.add, hops * links.latency_s)
    seconds: Floats = latency + np.asarray(buffer_bytes) * slowest
    return seconds


def all_to_all_s(
    sent_bytes: Floats, members: NDArray[np.int64], links: Links, copies: Floats | None = None
) -> Floats:
    """All-to-all in which every member sends as much to each of P members, itself among them.

    The share (P - inside)/P leaves the sub-block at each level over the GPU's own links; levels drain at the
    same time, the slowest ends it. Where NICs are joined in rails, what changes rails is also sent up to the
    level that joins them.

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
    slow_down = 1.0 + np.sqrt(links.half_bytes / np.maximum(volume, 1.0))
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
    anyway.

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
    """One neighbour sends to the next: alpha + n / B.

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
