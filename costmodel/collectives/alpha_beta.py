"""Textbook collective times on a flat network: alpha seconds a message, 1 / beta bytes a second.

P is the size of the group, n bytes are in the full buffer unless said otherwise. Sources: Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (IJHPCA 19(1)),
sections 3 and 4. `on_levels` prices fabrics with levels; these are the forms that a calculator shows and that
the others reduce to. Sizes and groups may be arrays that broadcast; a group of one costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.layout import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Link:
    """What every member of a group has, in each direction at once."""

    alpha_s: float
    """Start-up of one message, seconds."""
    bytes_per_s: float
    gamma_s_per_byte: float = 0.0
    """Reduction of one byte by the member itself; on GPUs it hides behind the transfer."""

    def send_s(self, message_bytes: Floats) -> Floats:
        """One message: alpha + n beta.

        Parameters
        ----------
        message_bytes : float or array
            n, at least 0.

        Returns
        -------
        float or array
            Seconds.
        """
        seconds: Floats = self.alpha_s + np.asarray(message_bytes) / self.bytes_per_s
        return seconds


def naive_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """All-reduce through one member, one message after the other: 2 (P-1) (alpha + n beta) + (P-1) n gamma.

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member holds, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds, in the cost model of Thakur, Rabenseifner and Gropp 2005, section 3.
    """
    messages = np.asarray(members) - 1
    sending = 2 * messages * link.send_s(buffer_bytes)
    seconds: Floats = sending + messages * np.asarray(buffer_bytes) * link.gamma_s_per_byte
    return seconds


def binomial_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """All-reduce up and down a binomial tree, unpipelined: ceil(log2 P) (2 (alpha + n beta) + n gamma).

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member holds, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    depth = np.ceil(np.log2(members))
    sending = 2 * depth * link.send_s(buffer_bytes)
    seconds: Floats = sending + depth * np.asarray(buffer_bytes) * link.gamma_s_per_byte
    return seconds


def ring_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """All-reduce as a reduce-scatter and an all-gather round a ring: 2 (P-1) alpha + 2 (P-1)/P n beta.

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member holds, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds, with (P-1)/P n gamma. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    share = np.asarray(buffer_bytes) / members
    scatter = ring_reduce_scatter_s(buffer_bytes, members, link)
    return scatter + ring_all_gather_s(share, members, link)


def halving_doubling_all_reduce_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """All-reduce by recursive halving, then doubling: 2 log2(P) alpha + 2 (P-1)/P n beta + (P-1)/P n gamma.

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member holds, at least 0.
    members : int or array of int
        P, a power of two.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.

    Raises
    ------
    ValueError
        Where P is not a power of two.
    """
    size = np.asarray(members)
    if np.any((size < 1) | (size & (size - 1))):
        raise ValueError(f"members: {members} is not a power of two; use a ring, or pad the group")
    moved = (size - 1) / size * np.asarray(buffer_bytes)
    one_way = np.log2(size) * link.alpha_s + moved / link.bytes_per_s
    seconds: Floats = 2 * one_way + moved * link.gamma_s_per_byte
    return seconds


def ring_all_gather_s(bytes_per_member: Floats, members: Ints, link: Link) -> Floats:
    """All-gather round a ring: (P-1) (alpha + n beta).

    Parameters
    ----------
    bytes_per_member : float or array
        n, the share of one member, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    seconds: Floats = (np.asarray(members) - 1) * link.send_s(bytes_per_member)
    return seconds


def ring_reduce_scatter_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """Reduce-scatter round a ring: (P-1) alpha + (P-1)/P n (beta + gamma).

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member starts with, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    share = np.asarray(buffer_bytes) / members
    step_s = link.send_s(share) + share * link.gamma_s_per_byte
    seconds: Floats = (np.asarray(members) - 1) * step_s
    return seconds


def pairwise_all_to_all_s(buffer_bytes: Floats, members: Ints, link: Link) -> Floats:
    """All-to-all by pairwise exchange of the P shares of each buffer: (P-1) alpha + (P-1)/P n beta.

    Parameters
    ----------
    buffer_bytes : float or array
        n, what every member sends in all, its own share included, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    size = np.asarray(members)
    seconds: Floats = (size - 1) * link.send_s(np.asarray(buffer_bytes) / size)
    return seconds


def broadcast_s(
    buffer_bytes: Floats, members: Ints, link: Link, *, pipelined: bool = False
) -> Floats:
    """Broadcast down a binomial tree: ceil(log2 P) (alpha + n beta).

    A reduce without its gamma costs the same.

    Parameters
    ----------
    buffer_bytes : float or array
        n, at least 0.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.
    pipelined : bool
        Whether the buffer goes in small chunks, which gives ceil(log2 P) alpha + n beta.

    Returns
    -------
    float or array
        Seconds. Thakur, Rabenseifner and Gropp 2005, section 4.
    """
    depth = np.ceil(np.log2(members))
    sends = np.minimum(depth, 1) if pipelined else depth
    seconds: Floats = depth * link.alpha_s + sends * np.asarray(buffer_bytes) / link.bytes_per_s
    return seconds


def hierarchical_all_reduce_s(
    buffer_bytes: Floats, per_node: Ints, nodes: Ints, *, inside: Link, between: Link
) -> Floats:
    """Reduce-scatter in the node, all-reduce of each share over nodes, all-gather in the node, all rings.

    Parameters
    ----------
    buffer_bytes : float or array
        What every member holds, at least 0.
    per_node : int or array of int
        Members in a node, at least 1.
    nodes : int or array of int
        Nodes, at least 1.
    inside : Link
        The network of a node.
    between : Link
        The network between nodes, as one member has it when all of its node use it at once.

    Returns
    -------
    float or array
        Seconds.
    """
    share = np.asarray(buffer_bytes) / per_node
    scatter = ring_reduce_scatter_s(buffer_bytes, per_node, inside)
    reduced = ring_all_reduce_s(share, nodes, between)
    gather = ring_all_gather_s(share, per_node, inside)
    seconds: Floats = scatter + reduced + gather
    return seconds


def crossover_bytes(link: Link) -> float:
    """Message whose start-up takes as long as its transfer: n* = alpha / beta.

    Parameters
    ----------
    link : Link
        The network.

    Returns
    -------
    float
        Bytes; smaller messages are latency-bound.
    """
    return link.alpha_s * link.bytes_per_s


def chunked_s(buffer_bytes: Floats, chunks: Ints, link: Link) -> Floats:
    """A transfer in equal chunks, one after the other: c alpha + n beta.

    Parameters
    ----------
    buffer_bytes : float or array
        n, at least 0.
    chunks : int or array of int
        c, at least 0.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds.
    """
    transfer = np.asarray(buffer_bytes) / link.bytes_per_s
    seconds: Floats = np.asarray(chunks) * link.alpha_s + transfer
    return seconds


def best_chunk_count(buffer_bytes: float, link: Link) -> int:
    """Chunks that expose least of a transfer when all but the last hide: the least of c alpha + n beta / c.

    That is c = sqrt(n beta / alpha), up or down to a whole number.

    Parameters
    ----------
    buffer_bytes : float
        n, at least 0.
    link : Link
        The network.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        Where a chunk costs nothing to start: more of them are always better then.
    """
    if link.alpha_s <= 0.0:
        raise ValueError("alpha_s: must be positive, without it more chunks are always better")
    ideal = np.sqrt(buffer_bytes / link.bytes_per_s / link.alpha_s)
    below = max(int(ideal), 1)

    def exposed_s(chunks: int) -> float:
        return chunks * link.alpha_s + buffer_bytes / link.bytes_per_s / chunks

    return min((below, below + 1), key=exposed_s)
