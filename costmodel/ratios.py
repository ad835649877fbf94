"""Rules of thumb with a name: volumes of one layer, ratios of compute to communication, pipeline bubbles.

Pure arithmetic on a handful of numbers, for calculators and for checking the full model by hand. Bytes, FLOP,
seconds; all broadcast.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from meshwright.costmodel.layout import Floats, Ints

Regime = Literal[
    "severely communication-bound", "communication-bound", "near the ridge", "compute-bound"
]


def data_parallel_flop_per_byte(tokens: Floats, gradient_bytes: Floats = 2.0) -> Floats:
    """FLOP of a rank over bytes it moves under plain data parallelism: 6 N tokens / (2 N bytes); N drops out.

    `tokens` are those of one rank and step; a ring all-reduce moves each gradient twice.
    """
    out: Floats = 3.0 * np.asarray(tokens) / gradient_bytes
    return out


def ridge_flop_per_byte(peak_flops: Floats, bytes_per_s: Floats) -> Floats:
    """FLOP per byte at which compute and communication take equally long (Williams et al. 2009, roofline)."""
    out: Floats = np.asarray(peak_flops) / bytes_per_s
    return out


def regime(flop_per_byte: float, ridge: float) -> Regime:
    """Where a ratio lies: below 0.2, 0.8 or up to 1.2 of the ridge point, or above."""
    position = flop_per_byte / ridge
    if position < 0.2:
        return "severely communication-bound"
    if position < 0.8:
        return "communication-bound"
    return "near the ridge" if position <= 1.2 else "compute-bound"


def overlap_ratio(communication_s: Floats, compute_s: Floats) -> Floats:
    """R = T_comm / T_comp; up to 1 the communication can be hidden."""
    out: Floats = np.asarray(communication_s) / compute_s
    return out


def overlapped_step_s(
    compute_s: Floats, communication_s: Floats, synchronisation_s: Floats = 0.0
) -> Floats:
    """A step whose communication overlaps fully: max(T_comp, T_comm) + T_sync."""
    out: Floats = np.maximum(compute_s, communication_s) + synchronisation_s
    return out


def tensor_parallel_layer_bytes(
    tokens: Floats, hidden: Ints, tp: Ints, element_bytes: float = 2.0
) -> Floats:
    """Bytes a rank sends for one layer and micro-batch: 4 ring all-reduces of b s h, two in each pass.

    4 x 2 (T-1)/T x b s h x bytes (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Sequence parallelism
    splits each into a gather and a scatter of the same volume (Korthikanti et al. 2022, section 4.2.2).
    """
    size = np.asarray(tp)
    out: Floats = 8.0 * (size - 1) / size * np.asarray(tokens) * hidden * element_bytes
    return out


def expert_parallel_layer_bytes(
    tokens: Floats, top_k: Ints, hidden: Ints, ep: Ints, element_bytes: float = 2.0
) -> Floats:
    """Bytes a rank sends for one MoE layer and micro-batch: dispatch and combine, forward and backward.

    4 x tokens x top_k x h x bytes x (E-1)/E: one copy per chosen expert, evenly routed.
    """
    size = np.asarray(ep)
    out: Floats = 4.0 * np.asarray(tokens) * top_k * hidden * element_bytes * (size - 1) / size
    return out


def data_parallel_elements(parameters: Floats, zero_stage: Ints) -> Floats:
    """Elements a rank moves in a step of one micro-batch: 2 N, with ZeRO-3 3 N (arXiv 1910.02054, 7)."""
    out: Floats = np.asarray(parameters) * np.where(np.asarray(zero_stage) == 3, 3.0, 2.0)
    return out


def pipeline_boundary_bytes(tokens: Floats, hidden: Ints, element_bytes: float = 2.0) -> Floats:
    """Over one boundary and micro-batch: an activation forward and its gradient backward."""
    out: Floats = 2.0 * np.asarray(tokens) * hidden * element_bytes
    return out


def bubble_of_ideal(pp: Ints, num_micro_batches: Ints, vpp: Ints = 1) -> Floats:
    """Bubble over ideal compute: (p-1)/(v m) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    out: Floats = (np.asarray(pp) - 1) / (np.asarray(vpp) * num_micro_batches)
    return out


def bubble_of_step(pp: Ints, num_micro_batches: Ints, vpp: Ints = 1) -> Floats:
    """Bubble over the whole step: (p-1)/(v m + p - 1)."""
    idle = np.asarray(pp) - 1
    out: Floats = idle / (np.asarray(vpp) * num_micro_batches + idle)
    return out


def unfused_activation_bytes(
    tokens: Floats, seq_len: Ints, hidden: Ints, heads: Ints, layers: Ints
) -> Floats:
    """16-bit activations of a GPT without recomputation or sharding: s b h (34 + 5 a s / h) L.

    Korthikanti et al. 2022, arXiv 2205.05198, equation 1; `tokens` is s b.
    """
    per_token = 34.0 * np.asarray(hidden) + 5.0 * np.asarray(heads) * seq_len
    out: Floats = np.asarray(tokens) * per_token * layers
    return out


def ring_attention_buffer_bytes(
    seq_len: Ints, cp: Ints, width: Ints, element_bytes: float = 2.0
) -> Floats:
    """Keys and values of a block on their way round the ring: 2 S/N H bytes (arXiv 2310.01889, section 3)."""
    out: Floats = 2.0 * np.asarray(seq_len) / cp * width * element_bytes
    return out
