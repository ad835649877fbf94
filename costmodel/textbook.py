"""Textbook formulas on a handful of numbers: collectives on a flat network, ratios, volumes, bubbles.

For calculators, and for checking the full model by hand. Bytes, FLOP, seconds; arguments may be arrays that
broadcast.

A collective takes start-ups alpha + bytes moved beta + bytes reduced gamma. P is the size of the group, n
bytes are in the full buffer, alpha is seconds a message, 1 / beta bytes a second, gamma seconds a byte that a
member reduces. Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH" (IJHPCA 19(1)), sections 3 and 4. `costmodel/collectives.py` prices fabrics with levels;
these are the forms that the others reduce to. A group of one costs nothing.

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


# Rules of thumb with a name: volumes of one layer, ratios of compute to communication, pipeline bubbles.


ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Of an input element, by precision."""

Regime = Literal[
    "severely communication-bound", "communication-bound", "near the ridge", "compute-bound"
]


def data_parallel_flop_per_byte(tokens: Floats, gradient_bytes: Floats = 2.0) -> Floats:
    """FLOP of a rank over bytes it moves under plain data parallelism: 6 N tokens / (2 N bytes).

    6 N FLOP a token are Kaplan et al. 2020, arXiv 2001.08361, section 2.1; a ring all-reduce moves each
    gradient twice. The N parameters drop out.

    Parameters
    ----------
    tokens : float or array
        Of one rank and step, more than 0.
    gradient_bytes : float or array
        Bytes of a gradient's element, more than 0.

    Returns
    -------
    float or array
        FLOP per byte, more than 0.
    """
    ratio: Floats = 3.0 * np.asarray(tokens) / gradient_bytes
    return ratio


def ridge_flop_per_byte(peak_flops: Floats, bytes_per_s: Floats) -> Floats:
    """Intensity at which compute and communication take equally long (Williams et al. 2009, roofline).

    Parameters
    ----------
    peak_flops : float or array
        FLOP/s, more than 0.
    bytes_per_s : float or array
        Bytes per second, more than 0.

    Returns
    -------
    float or array
        FLOP per byte, more than 0.
    """
    ridge: Floats = np.asarray(peak_flops) / bytes_per_s
    return ridge


def regime(flop_per_byte: float, ridge: float) -> Regime:
    """Where an intensity lies against the ridge point.

    The guides' convention (docs/worked_examples.md).

    Parameters
    ----------
    flop_per_byte : float
        Intensity, FLOP per byte, at least 0.
    ridge : float
        FLOP per byte, more than 0 (`ridge_flop_per_byte`).

    Returns
    -------
    str
        By shares of the ridge below 0.2, below 0.8, up to 1.2, and above.
    """
    position = flop_per_byte / ridge
    if position < 0.2:
        return "severely communication-bound"
    if position < 0.8:
        return "communication-bound"
    return "near the ridge" if position <= 1.2 else "compute-bound"


def overlap_ratio(communication_s: Floats, compute_s: Floats) -> Floats:
    """R = T_comm / T_comp; up to 1 the communication can be hidden.

    The guides' convention (docs/worked_examples.md).

    Parameters
    ----------
    communication_s : float or array
        Seconds, at least 0.
    compute_s : float or array
        Seconds, more than 0.

    Returns
    -------
    float or array
        Without unit.
    """
    ratio: Floats = np.asarray(communication_s) / compute_s
    return ratio


def overlapped_step_s(
    compute_s: Floats, communication_s: Floats, synchronisation_s: Floats = 0.0
) -> Floats:
    """A step whose communication overlaps fully: max(T_comp, T_comm) + T_sync.

    The guides' convention (docs/worked_examples.md).

    Parameters
    ----------
    compute_s, communication_s, synchronisation_s : float or array
        Seconds, at least 0.

    Returns
    -------
    float or array
        Seconds.
    """
    seconds: Floats = np.maximum(compute_s, communication_s) + synchronisation_s
    return seconds


def tensor_parallel_layer_bytes(
    tokens: Floats, hidden: Ints, tp: Ints, element_bytes: float = 2.0
) -> Floats:
    """Bytes a rank sends for one layer and micro-batch: 4 ring all-reduces of b s h, two in each pass.

    4 x 2 (T-1)/T x b s h x bytes (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Sequence parallelism
    splits each into a gather and a scatter of the same volume (Korthikanti et al. 2022, section 4.2.2).

    Parameters
    ----------
    tokens : float or array
        b s, of one micro-batch, at least 0.
    hidden : int or array
        h, the width of the model, at least 1.
    tp : int or array
        T, at least 1.
    element_bytes : float
        Of an activation, above 0; 2 for 16 bits.

    Returns
    -------
    float or array
        Bytes.
    """
    size = np.asarray(tp)
    activation = np.asarray(tokens) * hidden * element_bytes
    sent: Floats = 8.0 * (size - 1) / size * activation
    return sent


def expert_parallel_layer_bytes(
    tokens: Floats, top_k: Ints, hidden: Ints, ep: Ints, element_bytes: float = 2.0
) -> Floats:
    """Bytes a rank sends for one MoE layer and micro-batch: dispatch and combine, forward and backward.

    4 x tokens x top_k x h x bytes x (E-1)/E: one copy per chosen expert, evenly routed.

    Dispatch and combination of Lepikhin et al. 2020 (GShard), arXiv 2006.16668, in both passes.

    Parameters
    ----------
    tokens : float or array
        Of one rank and micro-batch, at least 0.
    top_k : int or array
        Experts that a token goes to, at least 1.
    hidden : int or array
        h, the width of the model, at least 1.
    ep : int or array
        E, at least 1.
    element_bytes : float
        Of an activation, above 0; 2 for 16 bits.

    Returns
    -------
    float or array
        Bytes.
    """
    size = np.asarray(ep)
    copies = np.asarray(tokens) * top_k * hidden * element_bytes
    sent: Floats = 4.0 * copies * (size - 1) / size
    return sent


def pipeline_boundary_bytes(tokens: Floats, hidden: Ints, element_bytes: float = 2.0) -> Floats:
    """Over one boundary and micro-batch: an activation forward and its gradient backward.

    Narayanan et al. 2021, arXiv 2104.04473, section 3.2.

    Parameters
    ----------
    tokens : float or array
        Of one micro-batch, at least 0.
    hidden : int or array
        Width of the model, at least 1.
    element_bytes : float
        Of an activation, above 0; 2 for 16 bits.

    Returns
    -------
    float or array
        Bytes.
    """
    sent: Floats = 2.0 * np.asarray(tokens) * hidden * element_bytes
    return sent


def bubble_of_ideal(pp: Ints, num_micro_batches: Ints, vpp: Ints = 1) -> Floats:
    """Bubble over ideal compute: (p-1)/(v m) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Parameters
    ----------
    pp, num_micro_batches, vpp : int or array
        p ranks, m micro-batches, v virtual stages, each at least 1.

    Returns
    -------
    float or array
        Without unit, at least 0.
    """
    share: Floats = (np.asarray(pp) - 1) / (np.asarray(vpp) * num_micro_batches)
    return share


def bubble_of_step(pp: Ints, num_micro_batches: Ints, vpp: Ints = 1) -> Floats:
    """Bubble over the step: (p-1)/(v m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Parameters
    ----------
    pp, num_micro_batches, vpp : int or array
        p ranks, m micro-batches, v virtual stages, each at least 1.

    Returns
    -------
    float or array
        Without unit, 0 to 1.
    """
    idle = np.asarray(pp) - 1
    share: Floats = idle / (np.asarray(vpp) * num_micro_batches + idle)
    return share


def ring_attention_buffer_bytes(
    seq_len: Ints, cp: Ints, width: Ints, element_bytes: float = 2.0
) -> Floats:
    """Keys and values of a block on their way round the ring: 2 S/N H bytes (arXiv 2310.01889, section 3).

    Parameters
    ----------
    seq_len : int or array
        S, tokens of a sequence, at least 1.
    cp : int or array
        N, ranks of the ring, at least 1.
    width : int or array
        H, of keys or values of a token, at least 1.
    element_bytes : float
        Of a key's element, above 0.

    Returns
    -------
    float or array
        Bytes.
    """
    block = 2.0 * np.asarray(seq_len) / cp
    buffer: Floats = block * width * element_bytes
    return buffer


def data_parallel_elements(parameters: Floats, zero_stage: Ints) -> Floats:
    """Elements a rank moves in a step of one micro-batch: 2 N, with ZeRO-3 3 N.

    Parameters
    ----------
    parameters : float or array
        N, of one rank before sharding, at least 0.
    zero_stage : int or array
        0 to 3.

    Returns
    -------
    float or array
        Elements (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).
    """
    elements: Floats = np.asarray(parameters) * np.where(np.asarray(zero_stage) == 3, 3.0, 2.0)
    return elements


def hybrid_sharded_elements(parameters: Floats, shard_group: Ints) -> tuple[Floats, Floats]:
    """Elements a rank moves in a step of hybrid sharding: 3 N in its group, 2 N / shards between groups.

    Parameters
    ----------
    parameters : float or array
        N, of one rank before sharding, at least 0.
    shard_group : int or array
        Ranks over which weights are sharded, at least 1; the groups replicate each other.

    Returns
    -------
    tuple of two floats or arrays
        Elements inside the group (two gathers and a scatter) and between groups, where each rank's shard is
        all-reduced (Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, section 3.2.2).
    """
    size = np.asarray(parameters)
    return 3.0 * size, 2.0 * size / np.asarray(shard_group)


def adam_state_bytes(
    parameters: Floats, zero_stage: Ints, shards: Ints, gradient_bytes: float = 2.0
) -> Floats:
    """Weights, gradients and optimizer states of mixed-precision Adam on a rank: 2 N + 2 N + 12 N bytes.

    Stage 1 divides the 12 N by the ranks, stage 2 the gradients too, stage 3 the weights as well.

    Parameters
    ----------
    parameters : float or array
        N, before sharding, at least 0.
    zero_stage : int or array
        0 to 3.
    shards : int or array
        Data-parallel ranks, at least 1.
    gradient_bytes : float
        Of a gradient as it is added up: 2, or 4.

    Returns
    -------
    float or array
        Bytes (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1 and figure 1).
    """
    stage, share = np.asarray(zero_stage), 1.0 / np.asarray(shards)
    optimizer = 12.0 * np.where(stage >= 1, share, 1.0)
    gradients = gradient_bytes * np.where(stage >= 2, share, 1.0)
    weights = 2.0 * np.where(stage >= 3, share, 1.0)
    held: Floats = np.asarray(parameters) * (weights + gradients + optimizer)
    return held


def unfused_activation_bytes(
    tokens: Floats, seq_len: Ints, hidden: Ints, heads: Ints, layers: Ints
) -> Floats:
    """16-bit activations of a GPT without recomputation or sharding: s b h (34 + 5 a s / h) L.

    Parameters
    ----------
    tokens : float or array
        s b, of one micro-batch, at least 0.
    seq_len, hidden, heads, layers : int or array
        s, h, a and L, at least 1 each.

    Returns
    -------
    float or array
        Bytes (Korthikanti et al. 2022, arXiv 2205.05198, equation 1).
    """
    per_token = 34.0 * np.asarray(hidden) + 5.0 * np.asarray(heads) * seq_len
    saved: Floats = np.asarray(tokens) * per_token * layers
    return saved
