"""Rules of thumb with a name: volumes of one layer, ratios of compute to communication, pipeline bubbles.

Pure arithmetic on a handful of numbers, for calculators and for checking the full model by hand. Bytes, FLOP,
seconds; arguments may be arrays that broadcast.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from meshwright.costmodel.layout import Floats, Ints

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
