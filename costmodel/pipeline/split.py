"""How many layers of each kind a split puts on every pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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


@lru_cache(maxsize=4096)
def layer_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """Counts of a split of a model whose first `dense_layers` layers are dense and the others have experts.

    The first `recomputed` layers of every virtual stage are computed again in the backward pass. The arrays
    are read-only.
    """
    chunks = chunk_counts(dense_layers, stages, recomputed, v_shaped=v_shaped)
    return _read_only([np.sum(x, axis=0) for x in vars(chunks).values()])


@lru_cache(maxsize=4096)
def chunk_counts(
    dense_layers: int, stages: Stages, recomputed: int, *, v_shaped: bool = False
) -> LayerCounts:
    """The same of every chunk."""
    sizes = np.array(stages, dtype=np.float64).T
    in_order = _in_model_order(sizes) if v_shaped else sizes
    first = (np.cumsum(in_order) - in_order.ravel()).reshape(sizes.shape)
    first = _in_model_order(first) if v_shaped else first
    dense = np.clip(dense_layers - first, 0.0, sizes)
    again = np.minimum(sizes, recomputed)
    again_dense = np.minimum(again, dense)
    return _read_only([dense, sizes - dense, again_dense, again - again_dense])


def _in_model_order(chunks: NDArray[np.float64]) -> NDArray[np.float64]:
    """[virtual stages, pp] with every second row turned round; its own inverse."""
    return np.stack([row[::-1] if v % 2 else row for v, row in enumerate(chunks)])


def _read_only(rows: list[NDArray[np.float64]]) -> LayerCounts:
    for row in rows:
        row.flags.writeable = False
    return LayerCounts(*rows)
