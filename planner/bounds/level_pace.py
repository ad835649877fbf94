"""The least pace of ranks in step over all splits that a search looks at.

Ranks that interleave work on chunks of the same number at the same time, so the slowest chunk of each number
sets the pace (`schedules.pace_excess_s`). The splits that are looked at there (`stages.level_splits`) are few
enough to add all of them up for many layouts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.stages import may_have_empty_ends
from meshwright.costmodel.layers.context import Context
from meshwright.costmodel.layers.kinds import KindTimes
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.schedules import has_trait
from meshwright.costmodel.pipeline.split import Stages, chunk_counts
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.stages import balanced_stages, level_splits

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ROUNDING = 1e-12
"""What bounds leave for sums in another order."""
_Chunk = tuple[float, ...]
"""Dense layers, layers with experts, whether it is the first of the model, whether the last."""
_MOST_STAGES = 1 << 20
"""More virtual stages than any model has layers."""


class _Splits(NamedTuple):
    """All splits of a model over so many ranks and virtual stages, by what is in their chunks."""

    chunks: FloatArray
    """Distinct chunks, [chunks, 4], as `_Chunk` has them."""
    rounds: IntArray
    """Rows of `chunks` that stand in each distinct set of chunks of one number, one set after the other."""
    starts: IntArray
    """Where each set begins, [sets]."""
    counts: FloatArray
    """How often each split has each set, [splits, sets]."""
    main_layers: FloatArray
    """Of each rank, leading dense ones left out, [splits, pp]."""


class ChunkTimes(NamedTuple):
    """Seconds of a micro-batch, forward and backward, of what chunks consist of, arrays of shape [n]."""

    dense_s: FloatArray
    """A layer without experts."""
    moe_s: FloatArray
    first_s: FloatArray
    """The embedding."""
    last_s: FloatArray
    """Head, loss and multi-token-prediction modules."""

    def take(self, rows: IntArray) -> ChunkTimes:
        """Those of some layouts."""
        return ChunkTimes(*(column[rows] for column in self))

    def with_every_layer_taking(self, more_s: FloatArray) -> ChunkTimes:
        """The same where each layer takes so many seconds more, [n]."""
        return self._replace(dense_s=self.dense_s + more_s, moe_s=self.moe_s + more_s)


def chunk_times(context: Context, times: KindTimes) -> ChunkTimes:
    """Seconds of what chunks consist of.

    Parameters
    ----------
    context
        Workload and layouts of shape [n].
    times
        `kind_times(context)`.
    """
    last_s = np.asarray(times.head.seconds, dtype=np.float64)
    if times.mtp is not None:
        last_s = last_s + context.workload.model.mtp_layers * np.asarray(times.mtp.seconds)
    kinds = (times.dense, times.moe, times.embedding)
    seconds = (0.0 if kind is None else kind.seconds for kind in kinds)
    shape = context.layout.broadcast_shape()
    columns = (np.asarray(column, dtype=np.float64) for column in (*seconds, last_s))
    return ChunkTimes(*(np.broadcast_to(column, shape) for column in columns))


def least_level_pace_s(
    workload: Workload, layouts: Layout, times: ChunkTimes, rooms: FloatArray | None = None
) -> FloatArray:
    """The least sum_v max_r t_vr of the splits that a search looks at, where ranks are in step.

    Parameters
    ----------
    workload
        Its model and framework.
    layouts
        Shape [n].
    times
        Of the layouts.
    rooms
        Main layers that each rank has room for, [n, ranks]; without a limit by default.

    Returns
    -------
    FloatArray
        Seconds per micro-batch, [n]; 0 where ranks are not in step or have one virtual stage, infinite where
        no split fits.
    """
    shape = layouts.broadcast_shape()
    pp, vpp = (np.broadcast_to(np.asarray(x), shape) for x in (layouts.pp, layouts.vpp))
    pace_s = np.zeros(shape)
    own = np.flatnonzero((vpp > 1) & has_trait(layouts.schedule, "in_step"))
    if not len(own):
        return pace_s
    values, back = np.unique(pp[own] * _MOST_STAGES + vpp[own], return_inverse=True)
    for which, value in enumerate(values.tolist()):
        splits, rows = _splits_of(workload, *divmod(value, _MOST_STAGES)), own[back == which]
        if splits is None:
            pace_s[rows] = np.inf
            continue
        seconds = splits.chunks @ np.stack(times.take(rows))
        slowest_s = np.maximum.reduceat(seconds[splits.rounds], splits.starts, axis=0)
        paces_s = splits.counts @ slowest_s
        if rooms is not None:
            roomy = (
                splits.main_layers[:, None, :] <= rooms[None, rows, : splits.main_layers.shape[1]]
            )
            paces_s = np.where(roomy.all(axis=2), paces_s, np.inf)
        pace_s[rows] = paces_s.min(axis=0) * (1 - _ROUNDING)
    return pace_s


class _Pipeline(NamedTuple):
    """All that the splits follow from."""

    layers: int
    dense_layers: int
    """The first ones, all where there are no experts."""
    leading: int
    """The dense layers in front of others."""
    group: int
    uneven_stages: bool
    empty_ends: bool
    pp: int
    vpp: int


def _splits_of(workload: Workload, pp: int, vpp: int) -> _Splits | None:
    model = workload.model
    return _splits(
        _Pipeline(
            layers=model.layers,
            dense_layers=model.dense_layers,
            leading=model.dense_layers if model.moe_layers else 0,
            group=model.layers_in_group,
            uneven_stages=framework_of_stack(workload.framework).uneven_stages,
            empty_ends=may_have_empty_ends(workload),
            pp=pp,
            vpp=vpp,
        )
    )


@lru_cache(maxsize=4096)
def _splits(pipeline: _Pipeline) -> _Splits | None:
    """The splits of ranks in step; None where some virtual stage would be empty."""
    layers, dense_layers, leading, group, uneven_stages, empty_ends, pp, vpp = pipeline
    even = balanced_stages(layers, pp, vpp, group)
    found: Sequence[Stages] = () if even is None else (even,)
    if uneven_stages:
        found = level_splits(layers, pp, vpp, group, empty_ends=empty_ends)
    if not found:
        return None
    chunks: dict[_Chunk, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    of_splits, main_layers = [], []
    for stages in found:
        rounds = _rounds(dense_layers, stages)
        rows = (
            tuple(sorted(chunks.setdefault(one, len(chunks)) for one in each)) for each in rounds
        )
        of_splits.append([sets.setdefault(each, len(sets)) for each in rows])
        main_layers.append(
            np.sum(stages, axis=1) - chunk_counts(leading, stages, 0).dense.sum(axis=0)
        )
    sizes = np.array([len(each) for each in sets])
    counts = np.stack([np.bincount(own, minlength=len(sets)) for own in of_splits])
    return _Splits(
        chunks=np.array(list(chunks), dtype=np.float64),
        rounds=np.array(list(chain.from_iterable(sets))),
        starts=np.cumsum(sizes) - sizes,
        counts=counts.astype(np.float64),
        main_layers=np.array(main_layers, dtype=np.float64),
    )


def _rounds(dense_layers: int, stages: Stages) -> list[set[_Chunk]]:
    """The chunks of each number, without those that hold no more than another one beside them."""
    counts = chunk_counts(dense_layers, stages, 0)
    ends = np.zeros((2, *counts.dense.shape))
    ends[0, 0, 0] = ends[1, -1, -1] = 1.0
    held = np.stack([counts.dense, counts.moe, *ends], axis=-1)
    rounds = [set(map(tuple, each)) for each in held.tolist()]
    return [{one for one in each if not _is_less(one, each)} for each in rounds]


def _is_less(chunk: _Chunk, others: set[_Chunk]) -> bool:
    """Whether another chunk holds as much of everything."""
    return any(
        other != chunk and all(a <= b for a, b in zip(chunk, other, strict=True))
        for other in others
    )
