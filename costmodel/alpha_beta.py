"""Textbook collective times on a flat network: start-ups alpha + bytes moved beta + bytes reduced gamma.

P is the size of the group, n bytes are in the full buffer, alpha is seconds a message, 1 / beta bytes a
second, gamma seconds a byte that a member reduces. Sources: Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH" (IJHPCA 19(1)), sections 3 and 4.
`costmodel/collectives.py` prices fabrics with levels; these are the forms that a calculator shows and that
the others reduce to. Sizes and groups may be arrays that broadcast; a group of one costs nothing.

>>> nvlink = Link(alpha_s=1e-6, bytes_per_s=450e9)
>>> round(float(textbook_s("all-reduce", "ring", 1e9, 8, nvlink)) * 1e3, 3)
3.903
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from meshwright.costmodel.layout import Floats, Ints

Operation = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "scatter", "gather",
    "send",
]  # fmt: skip
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What every member of a group has, in each direction at once."""

    alpha_s: float
    """Start-up of one message, seconds."""
    bytes_per_s: float
    gamma_s_per_byte: float = 0.0
    """Reduction of one byte by the member itself; on GPUs it hides behind the transfer."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of a collective: what a member does, by the size P of the group."""

    formula: str
    startups: Callable[[Floats], Floats]
    """Messages one after the other."""
    moved: Callable[[Floats], Floats]
    """Bytes past a member, one direction, over n."""
    reduced: Callable[[Floats], Floats] = np.zeros_like
    """Bytes that a member adds up, over n."""
    power_of_two: bool = False
    """Whether P must be one."""
    in_switch: bool = False
    """Whether the network's switches must reduce (NVLS, SHARP)."""


def _depth(members: Floats) -> Floats:
    """Levels of a binomial tree."""
    return np.asarray(np.ceil(np.log2(members)))


def _hops(members: Floats) -> Floats:
    """Messages of a member that reaches each other one."""
    return np.asarray(members) - 1.0


def _others(members: Floats) -> Floats:
    """The part of a buffer that belongs to other members."""
    return 1.0 - 1.0 / np.asarray(members)


def _once(members: Floats) -> Floats:
    """1 in a group of two or more."""
    return np.asarray(np.minimum(_depth(members), 1.0))


def _twice(terms: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda members: 2.0 * terms(members)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all-reduce": {
        "naive": Algorithm(
            "2(P-1)α + 2(P-1) n β + (P-1) n γ", _twice(_hops), _twice(_hops), _hops
        ),
        "tree": Algorithm(
            "2 log2(P) α + 2 log2(P) n β + log2(P) n γ", _twice(_depth), _twice(_depth), _depth
        ),
        "ring": Algorithm(
            "2(P-1)α + 2(P-1)/P n β + (P-1)/P n γ", _twice(_hops), _twice(_others), _others
        ),
        "halving-doubling": Algorithm(
            "2 log2(P) α + 2(P-1)/P n β + (P-1)/P n γ", _twice(_depth), _twice(_others), _others,
            power_of_two=True,
        ),
        "nvls": Algorithm(
            "2α + (1 + 1/P) n β", _twice(_once), lambda p: _once(p) * (2.0 - _others(p)),
            in_switch=True,
        ),
    },
    "all-gather": {
        "ring": Algorithm("(P-1)α + (P-1)/P n β", _hops, _others),
        "recursive-doubling": Algorithm(
            "log2(P) α + (P-1)/P n β", _depth, _others, power_of_two=True
        ),
    },
    "reduce-scatter": {
        "ring": Algorithm("(P-1)α + (P-1)/P n (β + γ)", _hops, _others, _others),
        "recursive-halving": Algorithm(
            "log2(P) α + (P-1)/P n (β + γ)", _depth, _others, _others, power_of_two=True
        ),
    },
    "all-to-all": {
        "pairwise": Algorithm("(P-1)α + (P-1)/P n β", _hops, _others),
        "bruck": Algorithm(
            "log2(P) α + log2(P)/2 n β", _depth, lambda p: 0.5 * _depth(p), power_of_two=True
        ),
    },
    "broadcast": {
        "tree": Algorithm("log2(P) (α + n β)", _depth, _depth),
        "pipelined-tree": Algorithm("log2(P) α + n β", _depth, _once),
        "scatter-gather": Algorithm(
            "(log2(P) + P-1) α + 2(P-1)/P n β", lambda p: _depth(p) + _hops(p), _twice(_others)
        ),
    },
    "reduce": {
        "tree": Algorithm("log2(P) (α + n (β + γ))", _depth, _depth, _depth),
        "pipelined-tree": Algorithm("log2(P) α + n (β + γ)", _depth, _once, _once),
        "halving-gather": Algorithm(
            "2 log2(P) α + 2(P-1)/P n β + (P-1)/P n γ", _twice(_depth), _twice(_others), _others,
            power_of_two=True,
        ),
    },
    "scatter": {
        "linear": Algorithm("(P-1)α + (P-1)/P n β", _hops, _others),
        "tree": Algorithm("log2(P) α + (P-1)/P n β", _depth, _others),
    },
    "gather": {
        "linear": Algorithm("(P-1)α + (P-1)/P n β", _hops, _others),
        "tree": Algorithm("log2(P) α + (P-1)/P n β", _depth, _others),
    },
    "send": {"direct": Algorithm("α + n β", _once, _once)},
}  # fmt: skip
"""By operation and name."""


def textbook_s(
    operation: str, algorithm: str, buffer_bytes: Floats, members: Ints, link: Link
) -> Floats:
    """Time of a collective by one algorithm: start-ups alpha + bytes moved beta + bytes reduced gamma.

    Thakur, Rabenseifner and Gropp 2005, sections 3 and 4; for `nvls` see
    `collectives.in_switch_all_reduce_s`.

    Parameters
    ----------
    operation, algorithm : str
        Keys of `ALGORITHMS`.
    buffer_bytes : float or array
        n, the full buffer, at least 0: what a member starts an all-reduce, a reduce-scatter or an all-to-all
        with, what it ends an all-gather with, what the root of the others holds.
    members : int or array of int
        P, at least 1.
    link : Link
        The network.

    Returns
    -------
    float or array
        Seconds, in the common shape of sizes and groups.

    Raises
    ------
    KeyError
        For an operation or algorithm that is not in `ALGORITHMS`.
    ValueError
        Where the algorithm needs a power of two and P is none.
    """
    terms, size = ALGORITHMS[operation][algorithm], np.asarray(members)
    if terms.power_of_two and np.any((size < 1) | (size & (size - 1))):
        raise ValueError(f"members: {members} is not a power of two; use a ring, or pad the group")
    per_byte = terms.moved(size) / link.bytes_per_s + terms.reduced(size) * link.gamma_s_per_byte
    seconds: Floats = terms.startups(size) * link.alpha_s + np.asarray(buffer_bytes) * per_byte
    return seconds


def hierarchical_all_reduce_s(
    buffer_bytes: Floats, per_node: Ints, nodes: Ints, *, inside: Link, between: Link
) -> Floats:
    """Reduce-scatter in the node, all-reduce of each share over nodes, all-gather in the node, all rings.

    The sum of the three as `textbook_s` prices them (Thakur, Rabenseifner and Gropp 2005, section 4).

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
    scatter = textbook_s("reduce-scatter", "ring", buffer_bytes, per_node, inside)
    reduced = textbook_s("all-reduce", "ring", share, nodes, between)
    gather = textbook_s("all-gather", "ring", buffer_bytes, per_node, inside)
    seconds: Floats = scatter + reduced + gather
    return seconds


def crossover_bytes(link: Link) -> float:
    """Message whose start-up takes as long as its transfer: n* = alpha / beta.

    Follows from alpha + n beta, the time of a message (Thakur, Rabenseifner and Gropp 2005, section 3).

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

    c messages of n / c bytes, each alpha + n beta / c (Thakur, Rabenseifner and Gropp 2005, section 3).

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
    transfer_s = buffer_bytes / link.bytes_per_s
    below = max(int(np.sqrt(transfer_s / link.alpha_s)), 1)
    return min((below, below + 1), key=lambda chunks: chunks * link.alpha_s + transfer_s / chunks)


# Ways to compress gradients before they are exchanged.


_ELEMENT_BYTES, _INDEX_BYTES = 2.0, 4.0


@dataclass(frozen=True, kw_only=True)
class Compression:
    """One way to compress 16-bit gradients, as Agarwal et al. 2022 (arXiv 2103.00543) compare them.

    Its codec reads and writes all gradients at a rate of its own, before the exchange and after it.
    """

    name: str
    operation: Literal["all-reduce", "all-gather"]
    """An all-gather where what ranks send cannot be added up on the way."""
    kept: float
    """Bytes that a rank hands in, over those of its gradients."""
    passes: float
    """Times that the codec goes through all gradients."""

    def traffic_ratio(self, ranks: int) -> float:
        """Bytes that a ring sends, over those of an all-reduce of all gradients.

        From every rank a ring all-reduce of n bytes sends 2 (P-1)/P n, an all-gather of k bytes (P-1) k
        (Thakur, Rabenseifner and Gropp 2005, section 4).

        Parameters
        ----------
        ranks : int
            P, at least 2.

        Returns
        -------
        float
            Above 0; more than 1 where compressing sends more.
        """
        return self.kept * (ranks / 2.0 if self.operation == "all-gather" else 1.0)


def compressions(keep: float = 0.01, rank: int = 4, width: int = 4096) -> tuple[Compression, ...]:
    """Quantised (Alistarh et al. 2017), top-k (Lin et al. 2018) and low-rank (Vogels et al. 2019) gradients.

    Parameters
    ----------
    keep : float
        Share of the values that top-k sends, above 0 and at most 1; each with a 4-byte index.
    rank, width : int
        Of PowerSGD: columns of its two factors, and edge of a gradient taken as square; at least 1.

    Returns
    -------
    tuple of Compression
        8 bits, 4 bits, top-k, PowerSGD.
    """
    indexed = keep * (1.0 + _INDEX_BYTES / _ELEMENT_BYTES)
    low_rank = min(1.0, 2.0 * rank / width)
    return (
        Compression(name="8 bits", operation="all-reduce", kept=0.5, passes=2.0),
        Compression(name="4 bits", operation="all-reduce", kept=0.25, passes=2.0),
        Compression(name="top-k", operation="all-gather", kept=indexed, passes=2.0),
        Compression(name="PowerSGD", operation="all-reduce", kept=low_rank, passes=4.0),
    )
