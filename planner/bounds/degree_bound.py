"""Lower bounds from degrees and micro-batch alone, for every way of running them at once.

Layers are at their cheapest, every group is packed as far inside the fabric as it can be, the pipeline is
even, and nothing comes after it. A layer's time depends on (tp, cp, ep, etp, micro-batch) alone: the shape.
Shapes are few, so they are priced once for each execution, and degrees read them by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.constants.calibrated import calibrated_constants
from meshwright.costmodel.estimate import LayerCosts, costs_of_layers
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.pipeline.rank_load import least_busiest_s
from meshwright.costmodel.step_time import scale_share
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.packed import packed_context

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SHAPE = ("tp", "cp", "ep", "etp", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class ShapeTable:
    """Layer costs of every shape."""

    shapes: Layout
    """Shape [shapes]."""
    costs: tuple[LayerCosts, ...]
    """Of each execution, [shapes]."""
    least: LayerCosts
    """The least of any execution, [shapes]."""

    def rows(self, degrees: Layout) -> IntArray:
        """Which shape each of some degrees [n] has, [n]."""
        most, keys, order = self._sorted
        return np.asarray(order[np.searchsorted(keys, _keys(degrees, most))])

    @cached_property
    def _sorted(self) -> tuple[list[int], IntArray, IntArray]:
        """One more than the most of each size, keys of the shapes in rising order, and that order."""
        most = [int(np.max(getattr(self.shapes, name), initial=0)) + 1 for name in SHAPE]
        keys = _keys(self.shapes, most)
        order = np.argsort(keys)
        return most, keys[order], order


def shape_table(workloads: Sequence[Workload], shapes: Layout) -> ShapeTable:
    """Prices shapes under each of some workloads.

    Parameters
    ----------
    workloads
        The same model and machine, run differently; at least one.
    shapes
        Every shape once; fields may broadcast.

    Returns
    -------
    ShapeTable
    """
    shapes = replace(shapes, pp=1, vpp=1, zero_stage=0, recompute=0, recompute_layers=0, schedule=0)
    costs = tuple(_costs(_Asked(workload, shapes)) for workload in workloads)
    names = [f.name for f in fields(LayerCosts)]
    least = {name: np.min([getattr(each, name) for each in costs], axis=0) for name in names}
    return ShapeTable(shapes=shapes.flat(), costs=costs, least=LayerCosts(**least))


def _keys(layouts: Layout, most: Sequence[int]) -> IntArray:
    """A number for each shape."""
    key = np.zeros(layouts.broadcast_shape(), dtype=np.int64)
    for name, size in zip(SHAPE, most, strict=True):
        key = key * size + np.asarray(getattr(layouts, name), dtype=np.int64)
    return key


class _Asked:
    """Shapes under a workload as a key: the same model and cluster are the same objects, unhashed."""

    def __init__(self, workload: Workload, shapes: Layout) -> None:
        # Neither changes what a layer takes.
        self.workload = replace(workload, chooses_buckets=False, memory_margin=1.0)
        self.shapes = shapes
        columns = map(np.asarray, vars(shapes).values())
        self._key = tuple((column.shape, column.tobytes()) for column in columns)

    def __hash__(self) -> int:
        return hash((id(self.workload.model), id(self.workload.cluster), self._key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Asked):
            return False
        return self._key == other._key and self.workload == other.workload


@lru_cache(maxsize=128)
def _costs(asked: _Asked) -> LayerCosts:
    """Layer costs of shapes, one after the other; those of one request's executions are kept.

    What becomes of its plan without a choice is searched with the same ones.
    """
    workload, shapes = asked.workload, asked.shapes
    size = shapes.broadcast_shape()
    if not np.prod(size):
        return LayerCosts(*(np.zeros(0) for _ in fields(LayerCosts)))
    costs = costs_of_layers(packed_context(workload, shapes))
    columns = [np.asarray(cost, dtype=np.float64) for cost in vars(costs).values()]
    return LayerCosts(*(np.broadcast_to(column, size).ravel() for column in columns))


def compute_bound_s(
    workload: Workload, degrees: Layout, costs: LayerCosts, smallest_bubble: FloatArray
) -> FloatArray:
    """Layers at their cheapest, with every group packed as far inside as it can be, through an even pipeline,
    and what that loses on many nodes.

    Parameters
    ----------
    workload
        Its model counts, and its cluster.
    degrees
        Shape [n].
    costs
        Of a layer of each of the degrees, [n].
    smallest_bubble
        Share of the other ranks' seconds that any schedule waits at the least, [n].

    Returns
    -------
    FloatArray
        Seconds of a step, [n].
    """
    model = workload.model
    work_s, cheapest, end = loads(model.dense_layers, model.moe_layers, costs)
    micro_batches = np.asarray(degrees.num_micro_batches, dtype=np.float64)
    pp = np.asarray(degrees.pp, dtype=np.float64)
    main = costs.moe_layer_s if model.moe_layers else costs.dense_layer_s
    group = model.layers_in_group
    busiest = np.maximum(work_s / pp, group * np.ceil(model.layers / group / pp) * cheapest)
    busiest = np.maximum(busiest, end + group * cheapest)
    groups = (model.moe_layers or model.dense_layers) // group
    split = least_busiest_s(groups, group * main, end, pp)
    busiest = np.maximum(busiest, split)
    bubble_s = np.maximum(work_s - busiest, 0.0) * smallest_bubble
    scale = 1.0 + scale_share(workload, degrees, calibrated_constants(workload))
    bound_s: FloatArray = (micro_batches * busiest + bubble_s) * scale
    return bound_s


def gpu_seconds(workload: Workload, table: ShapeTable) -> float:
    """What a step costs at the least, GPUs times seconds, whatever the number of GPUs.

    From the least that a sequence costs in any of the shapes; infinite without any.
    """
    model, shapes = workload.model, table.shapes
    work_s, _, _ = loads(model.dense_layers, model.moe_layers, table.least)
    if not len(work_s):
        return float("inf")
    group = np.asarray(shapes.tp) * np.asarray(shapes.cp) / np.asarray(shapes.micro_batch)
    return float(np.min(work_s * group)) * workload.global_batch


def rows_of(costs: LayerCosts, rows: IntArray) -> LayerCosts:
    """The costs at some indices."""
    return LayerCosts(*(np.asarray(column)[rows] for column in vars(costs).values()))


def loads(dense: int, moe: int, costs: LayerCosts) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per micro-batch: all layers together, the cheapest layer, and what else the last rank carries.

    Parameters
    ----------
    dense, moe
        Layers of each kind.
    costs
        Seconds, [n].

    Returns
    -------
    tuple of three arrays
        Seconds, [n].
    """
    ends = np.asarray(costs.head_s) + np.asarray(costs.mtp_s)
    all_layers = dense * np.asarray(costs.dense_layer_s) + moe * np.asarray(costs.moe_layer_s)
    cheapest = np.asarray(costs.dense_layer_s if dense else costs.moe_layer_s)
    if dense and moe:
        cheapest = np.minimum(cheapest, np.asarray(costs.moe_layer_s))
    return all_layers + np.asarray(costs.embedding_s) + ends, cheapest, ends
