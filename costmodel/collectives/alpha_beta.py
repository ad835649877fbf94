"""Textbook collective times on a flat network: alpha seconds a message, one over beta bytes a second.

P is the size of the group, n bytes are in the full buffer unless said otherwise. Sources: Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (IJHPCA 19(1)),
sections 3 and 4. `on_levels` prices fabrics with levels; these are the forms that a calculator shows and that
the others reduce to. All broadcast; a group of one costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.layout import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Link:
    """What every member of a group has, in each direction at once."""

    alpha_s: float
    """Start-up of one message."""
    bytes_per_s: float
    gamma_s_per_byte: float = 0.0
    """Reduction of one byte by the member itself; on GPUs it hides behind the transfer."""


def naive_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Reduce to one member, then broadcast, one message after the other: 2 (P-1) (alpha + n beta)."""
    others = np.asarray(members) - 1
    n = np.asarray(buffer_bytes)
    out: Floats = (
        2 * others * (link.alpha_s + n / link.bytes_per_s) + others * n * link.gamma_s_per_byte
    )
    return out


def tree_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Binomial tree up and down, unpipelined: 2 ceil(log2 P) (alpha + n beta)."""
    depth, n = np.ceil(np.log2(members)), np.asarray(buffer_bytes)
    out: Floats = (
        2 * depth * (link.alpha_s + n / link.bytes_per_s) + depth * n * link.gamma_s_per_byte
    )
    return out


def ring_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Reduce-scatter and all-gather round a ring: 2 (P-1) alpha + 2 (P-1)/P n beta."""
    return ring_reduce_scatter_s(buffer_bytes, members, link) + ring_all_gather_s(
        np.asarray(buffer_bytes) / members, members, link
    )


def halving_doubling_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Recursive halving, then doubling: 2 log2(P) alpha + 2 (P-1)/P n beta.

    Raises ValueError where P is not a power of two.
    """
    size = np.asarray(members)
    if np.any((size < 1) | (size & (size - 1))):
        raise ValueError(f"members: {members} is not a power of two; use a ring, or pad the group")
    moved = (size - 1) / size * np.asarray(buffer_bytes)
    out: Floats = (
        2 * (np.log2(size) * link.alpha_s + moved / link.bytes_per_s)
        + moved * link.gamma_s_per_byte
    )
    return out


def ring_all_gather_s(bytes_per_member: Floats, members: Ints, link: Link) -> Floats:
    """Every member ends with all P shares of `bytes_per_member`: (P-1) (alpha + n beta)."""
    out: Floats = (np.asarray(members) - 1) * (
        link.alpha_s + np.asarray(bytes_per_member) / link.bytes_per_s
    )
    return out


def ring_reduce_scatter_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Every member ends with its share of the sum: (P-1) alpha + (P-1)/P n beta."""
    size, each = np.asarray(members), np.asarray(buffer_bytes) / members
    step_s = link.alpha_s + each / link.bytes_per_s + each * link.gamma_s_per_byte
    out: Floats = (size - 1) * step_s
    return out


def all_to_all_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Pairwise exchange of the P shares of each member's buffer: (P-1) alpha + (P-1)/P n beta."""
    size = np.asarray(members)
    out: Floats = (size - 1) * (link.alpha_s + np.asarray(buffer_bytes) / size / link.bytes_per_s)
    return out


def broadcast_s(
    buffer_bytes: Floats, members: Ints, link: Link, *, pipelined: bool = False
) -> Floats:
    """Binomial tree: ceil(log2 P) (alpha + n beta), or ceil(log2 P) alpha + n beta in small pieces.

    A reduce without its gamma costs the same.
    """
    depth = np.ceil(np.log2(members))
    sends = np.minimum(depth, 1) if pipelined else depth
    out: Floats = depth * link.alpha_s + sends * np.asarray(buffer_bytes) / link.bytes_per_s
    return out


def hierarchical_all_reduce_s(
    buffer_bytes: Floats, per_node: Ints, nodes: Ints, *, inside: Link, between: Link
) -> Floats:
    """Reduce-scatter in the node, all-reduce of each share over nodes, all-gather in the node, all rings."""
    share = np.asarray(buffer_bytes) / per_node
    out: Floats = (
        ring_reduce_scatter_s(buffer_bytes, per_node, inside)
        + ring_all_reduce_s(share, nodes, between)
        + ring_all_gather_s(share, per_node, inside)
    )
    return out


def crossover_bytes(link: Link) -> float:
    """Message whose start-up takes as long as its transfer: n* = alpha / beta. Smaller is latency-bound."""
    return link.alpha_s * link.bytes_per_s


def chunked_s(buffer_bytes: Floats, chunks: Ints, link: Link) -> Floats:
    """A transfer in equal chunks, one after the other: chunks alpha + n beta."""
    out: Floats = np.asarray(chunks) * link.alpha_s + np.asarray(buffer_bytes) / link.bytes_per_s
    return out


def best_chunk_count(buffer_bytes: float, link: Link) -> int:
    """Chunks that expose least when all but the last hide: the least of c alpha + n beta / c.

    That is c = sqrt(n beta / alpha), up or down to a whole number. Raises ValueError where a chunk costs
    nothing.
    """
    if link.alpha_s <= 0.0:
        raise ValueError("alpha_s: must be positive, without it more chunks are always better")
    ideal = np.sqrt(buffer_bytes / link.bytes_per_s / link.alpha_s)
    low = max(int(ideal), 1)

    def exposed_s(chunks: int) -> float:
        return chunks * link.alpha_s + buffer_bytes / link.bytes_per_s / chunks

    return min((low, low + 1), key=exposed_s)
