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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Floats, Ints

TREE_RATE = 0.92
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
    """

    def suffix(
        values: NDArray[np.float64], best: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        return best(values[::-1])[::-1]

    return Links(
        bytes_per_s=suffix(links.bytes_per_s, np.maximum.accumulate),
        all_to_all_bytes_per_s=suffix(links.all_to_all_bytes_per_s, np.maximum.accumulate),
        latency_s=suffix(links.latency_s, np.minimum.accumulate),
        half_bytes=suffix(links.half_bytes, np.minimum.accumulate),
    )


def members_inside(members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Members inside one block of the level below; 1 below the innermost level. Shape [..., levels]."""
    inside = np.ones_like(members)
    inside[..., 1:] = members[..., :-1]
    return inside


def _over_levels(function: np.ufunc, values: NDArray[np.float64]) -> Floats:
    """Folds the last axis; with a handful of levels much faster than a reduction along it."""
    out: Floats = values[..., 0]
    for level in range(1, values.shape[-1]):
        out = function(out, values[..., level])
    return out


def ring_pass_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """All-gather or reduce-scatter of a buffer of n bytes in all; 0 for a group of one.

    sum over levels of log2(blocks) alpha + (P-1)/P n / B, with B the rate of the slowest level crossed. The
    hops are those of a tree: small messages, the only ones that feel them, take the algorithm with the fewest
    (NCCL's choice by size), and a half-empty ring is already in B(n).
    """
    size = members[..., -1:]
    return _pass_s(buffer_bytes, members, links, (size - 1) / size)


def all_reduce_s(buffer_bytes: Floats, members: NDArray[np.int64], links: Links) -> Floats:
    """All-reduce of n bytes: two ring passes, or a double binary tree where the group lies in two blocks.

    A ring carries 2 (P-1)/P n over each boundary. Between two blocks a tree carries n each way: the sum of
    one block goes over and the result comes back, for one half of the buffer in either direction (Sanders,
    Speck, Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"). NCCL prices
    a tree on two nodes by the links inside the node (`bwIntra` for nNodes <= 2) at 0.92 of the ring's rate
    (src/graph/tuning.cc).
    """
    size = members[..., -1:]
    ring = (size - 1) / size
    between_two = (members > members[..., :1]) & (size <= 2 * members[..., :1])
    return 2.0 * _pass_s(
        buffer_bytes, members, links, np.where(between_two, np.minimum(0.5 / TREE_RATE, ring), ring)
    )


def _pass_s(
    buffer_bytes: Floats, members: NDArray[np.int64], links: Links, share: NDArray[np.float64]
) -> Floats:
    """One pass, `share` of the buffer going over every boundary of a level, shape [..., levels or 1]."""
    inside = members_inside(members)
    crossed = members > inside
    n = np.asarray(buffer_bytes, dtype=np.float64)[..., None]
    filled = 1.0 + np.sqrt(links.half_bytes / np.maximum(n, 1.0))
    slowest = _over_levels(np.maximum, crossed * share * filled / (inside * links.bytes_per_s))
    latency = _over_levels(np.add, np.log2(members / inside) * links.latency_s)
    out: Floats = latency + np.asarray(buffer_bytes) * slowest
    return out


def all_to_all_s(
    sent_bytes: Floats, members: NDArray[np.int64], links: Links, reach: Floats | None = None
) -> Floats:
    """All-to-all in which every member sends `sent_bytes` in all, evenly to P members, itself among them.

    The share (P - inside)/P leaves the sub-block at each level over the GPU's own links; levels drain at the
    same time, the slowest ends it. `reach` scales the bytes that cross each level, shape [..., levels], where
    one copy serves several receivers of a block (node-limited routing, DeepSeek-V3 section 3.2.2).
    """
    size = members[..., -1:]
    inside = members_inside(members)
    crossed = members > inside
    share = (size - inside) / size
    scale = np.ones(1) if reach is None else np.asarray(reach)
    volume = np.asarray(sent_bytes, dtype=np.float64)[..., None] * share * scale
    filled = 1.0 + np.sqrt(links.half_bytes / np.maximum(volume, 1.0))
    seconds = np.where(
        crossed, volume * filled / links.all_to_all_bytes_per_s + links.latency_s, 0.0
    )
    out = _over_levels(np.maximum, seconds)
    if links.rails is None or links.cross_rail_bytes_per_s is None or not np.any(links.rails > 1):
        return out
    first = int(np.argmax(links.rails > 1))
    up = cross_rail_bytes(volume, members, links.rails)
    rate, alpha = links.cross_rail_bytes_per_s[first], links.latency_s[first]
    slower: Floats = np.maximum(out, np.where(up > 0, up * filled[..., first] / rate + alpha, 0.0))
    return slower


def cross_rail_bytes(
    volume: NDArray[np.float64], members: NDArray[np.int64], rails: NDArray[np.int64]
) -> NDArray[np.float64]:
    """What an all-to-all sends up to the level that joins the rails, of one GPU; shape [...].

    `volume` [..., levels] leaves the sub-blocks of each level, what goes further included. Of what stays
    under one set of rails, 1 - 1/R goes from one rail to another, R being the rails that the members in a
    node lie on; a group with one member in a node stays on its rail. What goes further crosses anyway.
    """
    first, last = (int(at) for at in np.flatnonzero(rails > 1)[[0, -1]])
    on = np.minimum(members_inside(members)[..., first], rails[first])
    further = (
        volume[..., last + 1] if last + 1 < volume.shape[-1] else np.zeros_like(volume[..., 0])
    )
    out: NDArray[np.float64] = (1.0 - 1.0 / on) * np.maximum(
        volume[..., first] - further, 0.0
    ) + further
    return np.where(members[..., last] > members_inside(members)[..., first], out, further)


def point_to_point_s(payload_bytes: Floats, stride_level: Ints, links: Links) -> Floats:
    """One neighbour sends `payload_bytes` to the next across fabric level `stride_level`: alpha + n / B."""
    level = np.asarray(stride_level)
    out: Floats = links.latency_s[level] + np.asarray(payload_bytes) / links.bytes_per_s[level]
    return out
