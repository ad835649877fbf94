"""How many layers of each kind a split puts on every pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Stages = tuple[tuple[int, ...], ...]
"""Layers of each [pipeline rank][virtual stage]; chunk c of the model is stages[c % pp][c // pp]."""


@dataclass(frozen=True)
class LayerCounts:
    """Layers of each pipeline rank by kind, arrays of shape [pp]; those recomputed are among the others."""

    dense: NDArray[np.float64]
    moe: NDArray[np.float64]
    dense_recomputed: NDArray[np.float64]
    moe_recomputed: NDArray[np.float64]


@lru_cache(maxsize=4096)
def layer_counts(dense_layers: int, stages: Stages, recomputed: int) -> LayerCounts:
    """Counts of a split of a model whose first `dense_layers` layers are dense and the others have experts.

    The first `recomputed` layers of every virtual stage are computed again in the backward pass. The arrays
    are read-only.
    """
    sizes = np.array(stages, dtype=np.float64).T
    first = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    dense = np.clip(dense_layers - first, 0.0, sizes)
    again = np.minimum(sizes, recomputed)
    again_dense = np.minimum(again, dense)
    rows = [np.sum(x, axis=0) for x in (dense, sizes - dense, again_dense, again - again_dense)]
    for row in rows:
        row.flags.writeable = False
    return LayerCounts(*rows)
