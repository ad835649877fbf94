"""Textbook counts that the model's own are checked against."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.layout import Floats, Ints


def data_parallel_elements(parameters: Floats, zero_stage: Ints) -> Floats:
    """Elements a rank moves in a step of one micro-batch: 2 N, with ZeRO-3 3 N (arXiv 1910.02054, 7)."""
    elements: Floats = np.asarray(parameters) * np.where(np.asarray(zero_stage) == 3, 3.0, 2.0)
    return elements


def unfused_activation_bytes(
    tokens: Floats, seq_len: Ints, hidden: Ints, heads: Ints, layers: Ints
) -> Floats:
    """16-bit activations of a GPT without recomputation or sharding: s b h (34 + 5 a s / h) L.

    Korthikanti et al. 2022, arXiv 2205.05198, equation 1; `tokens` is s b.
    """
    per_token = 34.0 * np.asarray(hidden) + 5.0 * np.asarray(heads) * seq_len
    saved: Floats = np.asarray(tokens) * per_token * layers
    return saved
