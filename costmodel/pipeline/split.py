"""How many layers of each kind a split puts on every pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout, Recompute

Stages = tuple[tuple[int, ...], ...]
"""Layers of each [pipeline rank][virtual stage]; chunk c of the model is stages[c % pp][c // pp]. In a
V-shaped schedule the second half runs back: stages[2 pp - 1 - c][1]."""


@dataclass(frozen=True)
class LayerCounts:
    """Layers of each pipeline rank by kind, arrays of shape [pp]; those recomputed are among the others.

    Or of each chunk, shape [virtual stages, pp].
    """

    dense: NDArray[np.float64]
    moe: NDArray[np.float64]
    dense_recomputed: NDArray[np.float64]
    moe_recomputed: NDArray[np.float64]


def recomputed_layers(layout: Layout) -> int:
    """Layers of every virtual stage that are recomputed in full.

    Parameters
    ----------
    layout : Layout
        One layout.

    Returns
    -------
    int
        0 where it recomputes none in full; may be larger than a stage, which means all.
    """
    if not int(np.asarray(layout.recompute)) & Recompute.FULL:
        return 0
    return int(np.asarray(layout.recompute_layers))


@lru_cache(maxsize=4096)
def layer_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """Layers of each kind on every pipeline rank.

    Parameters
    ----------
    dense_layers : int
        How many of the model's first layers are dense, from 0; the others have experts.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    LayerCounts
        Read-only arrays of shape [pp].
    """
    chunks = chunk_counts(dense_layers, stages, recomputed, v_shaped=v_shaped)
    return _read_only([np.sum(x, axis=0) for x in vars(chunks).values()])


@lru_cache(maxsize=4096)
def chunk_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """Layers of each kind in every chunk of the model.

    Parameters
    ----------
    dense_layers : int
        How many of the model's first layers are dense, from 0; the others have experts.
    stages : tuple of tuple of int
        Layers of each [pipeline rank][virtual stage].
    recomputed : int
        How many of the first layers of every virtual stage are computed again in the backward pass, from 0.
    v_shaped : bool
        Whether the second half of the model runs back up the ranks.

    Returns
    -------
    LayerCounts
        Read-only arrays of shape [virtual stages, pp].
    """
    sizes = np.array(stages, dtype=np.float64).T
    in_order = _in_model_order(sizes) if v_shaped else sizes
    first = (np.cumsum(in_order) - in_order.ravel()).reshape(sizes.shape)
    if v_shaped:
        first = _in_model_order(first)
    dense = np.clip(dense_layers - first, 0.0, sizes)
    full = np.minimum(sizes, recomputed)
    dense_full = np.minimum(full, dense)
    return _read_only([dense, sizes - dense, dense_full, full - dense_full])


def _in_model_order(chunks: NDArray[np.float64]) -> NDArray[np.float64]:
    """[virtual stages, pp] with every second row turned round; its own inverse."""
    return np.stack([row[::-1] if v % 2 else row for v, row in enumerate(chunks)])


def _read_only(rows: list[NDArray[np.float64]]) -> LayerCounts:
    for row in rows:
        row.flags.writeable = False
    return LayerCounts(*rows)
