"""What combinations of choices cost as linear functions of the split of the layers, never above the truth.

A combination is a layout, an execution and a mapping. Its split is left open: n_r layers on pipeline rank r,
d_r of them leading dense ones, k_r recomputed in full. With t_r the seconds of rank r and micro-batch and
R = sum_r k_r,

    t_r = layer n_r + (leading - layer) d_r + again k_r + ends_r
    T  >= weight max_r t_r + rest_j + rest_again_j R        for every line j
    HBM of rank r = fixed_r + layer_r n_r + leading_r d_r - relief_r k_r

The lines are the lower convex hull of what the step takes beside the busiest rank: pipeline fill, exposed
gradients, optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.estimate import LayerCosts, costs_of_layers, layer_costs
from meshwright.costmodel.layer_context import Context, KnownExperts
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.rank_load import least_busiest_s
from meshwright.costmodel.rates import calibrated_constants
from meshwright.costmodel.schedules import has_trait, is_v_shaped, least_fill, least_waits
from meshwright.costmodel.step_time import StepTime, loaded_step, make_context, scale_share
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.bounds.mappings import SHAPE, WorkloadKey, packed_context
from meshwright.planner.bounds.paces import MemoryFit, RankRow

# Lower bounds from degrees and micro-batch alone, for every way of running them at once.
#
# Layers are at their cheapest, every group is packed as far inside the fabric as it can be, the pipeline is
# even, and nothing comes after it. A layer's time depends on its shape alone (`LAYER_AXES` and micro-batch),
# and where exchanges overlap on the pipeline, which is then taken as the one that leaves fewest unhidden.
# Shapes are few, so they are priced once for each execution, and degrees read them by index.


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ShapeTable:
    """Layer costs of every shape."""

    shapes: Layout
    """Shape [shapes]."""
    size: tuple[int, ...]
    """Of the axes that they are flattened from."""
    costs: tuple[LayerCosts, ...]
    """Of each execution, arrays that broadcast to these axes; nothing for recomputation."""
    least: LayerCosts
    """The least of any execution, the same."""

    def rows(self, degrees: Layout) -> IntArray:
        """Which shape each of some degrees [n] has, [n].

        Parameters
        ----------
        degrees
            Of n layouts, each with the degrees of some shape of the table.

        Returns
        -------
        array of int, shape [n]
            Positions in `shapes`.
        """
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
    # No pipeline has fewer chunks without a pair than one rank with the most micro-batches.
    most = np.maximum(workloads[0].global_batch // np.asarray(shapes.micro_batch), 1)
    shapes = replace(shapes, num_micro_batches=most)
    experts = KnownExperts(shapes, packed_context(workloads[0], shapes).placement)
    costs = tuple(_costs(_asked(workload, experts)) for workload in workloads)
    experts.forget()
    names = [f.name for f in fields(LayerCosts)]
    least = {name: reduce(np.minimum, (getattr(each, name) for each in costs)) for name in names}
    size = shapes.broadcast_shape()
    return ShapeTable(shapes=shapes.flat(), size=size, costs=costs, least=LayerCosts(**least))


def _keys(layouts: Layout, most: Sequence[int]) -> IntArray:
    """A number for each shape."""
    key = np.zeros(layouts.broadcast_shape(), dtype=np.int64)
    for name, size in zip(SHAPE, most, strict=True):
        key = key * size + np.asarray(getattr(layouts, name), dtype=np.int64)
    return key


def _asked(workload: Workload, experts: KnownExperts) -> WorkloadKey:
    """Shapes under a workload as a key."""
    # None of these changes what a layer takes.
    alike = replace(workload, chooses_buckets=False, memory_margin=1.0, sync_each_batch=False)
    columns = map(np.asarray, vars(experts.layout).values())
    key = tuple((column.shape, column.tobytes()) for column in columns)
    return WorkloadKey(alike, key, experts)


@lru_cache(maxsize=128)
def _costs(asked: WorkloadKey) -> LayerCosts:
    """Layer costs of shapes, one after the other; those of one request's executions are kept.

    What becomes of its plan without a choice is searched with the same ones.
    """
    workload, experts = asked.workload, asked.beside
    size = experts.layout.broadcast_shape()
    if not np.prod(size):
        return LayerCosts(*(np.zeros(size) for _ in fields(LayerCosts)))
    context = packed_context(workload, experts.layout)
    costs = costs_of_layers(replace(context, placement=experts.placement, experts=experts))
    return replace(costs, dense_recompute_s=0.0, moe_recompute_s=0.0, least_recompute_s=0.0)


def compute_bound_s(
    workload: Workload, degrees: Layout, costs: LayerCosts, smallest_bubble: FloatArray
) -> FloatArray:
    """Layers at their cheapest, with every group packed as far inside as it can be, through an even pipeline,
    what a step takes around them, and what that loses on many nodes.

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
    if model.unlike_layers:
        main = cheapest = np.asarray(costs.least_layer_s)
        # What interleaved ranks wait depends on their order.
        smallest_bubble = np.where(smallest_bubble < 1.0, 0.0, smallest_bubble)
    busiest = np.maximum(work_s / pp, np.ceil(model.layers / pp) * cheapest)
    busiest = np.maximum(busiest, end + cheapest)
    split = least_busiest_s(model.moe_layers or model.dense_layers, main, end, pp)
    busiest = np.maximum(busiest, split)
    bubble_s = np.maximum(work_s - busiest, 0.0)
    if model.unlike_layers:
        each, share = micro_batches / workload.flushes, np.asarray(costs.longer_pass_share)
        of_work, of_busiest = least_waits(pp, each, share)
        waits_s = np.maximum(
            of_work * work_s - of_busiest * busiest,
            (1 + least_fill(pp, each, share)) * work_s - each * busiest,
        )
        bubble_s = np.minimum(bubble_s, workload.flushes * waits_s)
    bubble_s = np.maximum(bubble_s, 0.0) * smallest_bubble
    constants = calibrated_constants(workload)
    scale = 1.0 + scale_share(workload, degrees, constants)
    around_s = constants.framework.step_overhead_s
    bound_s: FloatArray = (micro_batches * busiest + bubble_s + around_s) * scale
    return bound_s


def gpu_seconds(workload: Workload, table: ShapeTable) -> FloatArray:
    """What a step costs at the least in each of the shapes, GPUs times seconds, whatever their number.

    Parameters
    ----------
    workload
        Its model and global batch.
    table
        With the least of what a layer takes under any of the executions.

    Returns
    -------
    array, shape [shapes]
    """
    model, shapes = workload.model, table.shapes
    work_s, _, _ = loads(model.dense_layers, model.moe_layers, table.least)
    group = np.asarray(shapes.tp) * np.asarray(shapes.cp) / np.asarray(shapes.micro_batch)
    work_s = np.broadcast_to(work_s, table.size).ravel()
    return np.asarray(work_s * group * float(workload.global_batch))


def rows_of(costs: LayerCosts, size: tuple[int, ...], rows: IntArray) -> LayerCosts:
    """The costs of some layouts.

    Parameters
    ----------
    costs
        Arrays that broadcast to `size`; along an axis of length 1 layouts cost the same.
    size
        Lengths of the axes together.
    rows
        Positions as if flattened to one axis of prod(size), shape [k].

    Returns
    -------
    LayerCosts
        Arrays of shape [k].
    """
    places = np.unravel_index(rows, size)

    def at(column: FloatArray) -> FloatArray:
        axes = zip(places[len(size) - column.ndim :], column.shape, strict=True)
        return np.asarray(column[tuple(place if length > 1 else 0 for place, length in axes)])

    return LayerCosts(*(at(np.asarray(column)) for column in vars(costs).values()))


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


Lines = tuple[tuple[float, float], ...]


class RankCosts(NamedTuple):
    """Seconds of a micro-batch on one rank of a pipeline through unlike parts of a cluster."""

    layer_s: float
    leading_s: float
    again_s: float
    """At the least, for a layer that is recomputed in full; 0 where the layout recomputes none so."""
    beside_s: float
    """Of what the rank runs beside layers."""


@dataclass(frozen=True, kw_only=True)
class CombinationCosts:
    """One combination. Seconds of a micro-batch, forward and backward, unless said."""

    layer_s: float
    leading_s: float
    """Of a leading dense layer; that of any layer where there are none."""
    again_s: float
    """At the least, for a layer that is recomputed in full; 0 where the layout recomputes none so."""
    first_s: float
    """Of what rank 0 runs beside layers."""
    last_s: float
    """Of what the last rank runs beside layers; 0 where that is rank 0."""
    weight: float
    """Seconds of a step for a second of the busiest rank."""
    lines: Lines
    """(seconds of a step, the same for each recomputed layer)."""
    ranks: tuple[RankCosts, ...] = ()
    """Of each pipeline rank, where these run on unlike parts of a cluster: in place of the first five."""
    work_weight: float = 0.0
    """Seconds of a step for a second of all such ranks together, whose work the split decides."""

    def times(self, factor: float) -> CombinationCosts:
        """With a step so many times as long.

        Parameters
        ----------
        factor
            Above 0.
        """
        lines = tuple((line_s * factor, again_s * factor) for line_s, again_s in self.lines)
        return replace(
            self,
            weight=self.weight * factor,
            work_weight=self.work_weight * factor,
            lines=lines,
        )


def combination_costs(
    workload: Workload, layouts: Layout, placement: Placement
) -> list[CombinationCosts]:
    """Costs of combinations on one allocation.

    Parameters
    ----------
    workload
        Run as the combinations' execution says, on as many GPUs as the layouts use.
    layouts
        Shape [n].
    placement
        Of each layout, arrays [n, levels].

    Returns
    -------
    list of CombinationCosts
        n of them.
    """
    context = make_context(workload, layouts, placement)
    times, costs = kind_times(context), layer_costs(workload, layouts, placement)
    count = layouts.broadcast_shape()[0]
    columns = [
        np.broadcast_to(np.asarray(x, dtype=np.float64), (count,)) for x in vars(costs).values()
    ]
    costs = LayerCosts(*columns)
    model = workload.model
    work_s, _, ends_s = loads(model.dense_layers, model.moe_layers, costs)
    leading = model.dense_layers if model.moe_layers else 0
    main_s, again_s = costs.moe_layer_s, costs.moe_recompute_s
    if not model.moe_layers:
        main_s, again_s = costs.dense_layer_s, costs.dense_recompute_s
    if leading:
        again_s = np.minimum(again_s, costs.dense_recompute_s)
    leading_s = costs.dense_layer_s if leading else main_s
    if model.unlike_layers:
        main_s = leading_s = costs.least_layer_s
        again_s = costs.least_recompute_s
    again_s = np.where(layouts.recomputes_layers, again_s, 0.0)
    step = _Steps(context, times, count)
    weight = step.seconds(1.0, work_s) - step.seconds(0.0, work_s)
    lines = _lines(step, work_s, again_s, layers=model.layers, leading=leading)
    in_front = np.asarray(has_trait(layouts.schedule, "v_shaped"))
    by_name = {
        "layer_s": main_s,
        "leading_s": leading_s,
        "again_s": again_s,
        "first_s": np.asarray(costs.embedding_s) + np.where(in_front, ends_s, 0.0),
        "last_s": np.where(in_front, 0.0, ends_s),
        "weight": weight,
    }
    rows = zip(
        *(np.broadcast_to(column, (count,)).tolist() for column in by_name.values()), strict=True
    )
    return [
        CombinationCosts(**dict(zip(by_name, row, strict=True)), lines=line)
        for row, line in zip(rows, lines, strict=True)
    ]


class _Steps:
    """Seconds of a step from the busiest rank and the work of all ranks, for some combinations."""

    def __init__(self, context: Context, times: KindTimes, count: int) -> None:
        self._context, self._times, self._count = context, times, count

    def seconds(self, busiest_s: float, work_s: FloatArray) -> FloatArray:
        """Seconds of the whole step, [..., n] for work of that shape."""
        return np.broadcast_to(self._step(busiest_s, work_s).seconds, work_s.shape)

    def without_gradients(self, work_s: FloatArray) -> FloatArray:
        """Seconds of a step beside the busiest rank, and without exposed gradient traffic, [n]."""
        parts = self._step(0.0, work_s).parts
        before_s = sum(
            np.asarray(seconds)
            for name, seconds in parts.items()
            if name not in ("dp_comm", "scale")
        )
        return np.broadcast_to(before_s, work_s.shape)

    def _step(self, busiest_s: float, work_s: FloatArray) -> StepTime:
        busiest = np.full(self._count, busiest_s)
        return loaded_step(self._context, self._times, busiest, work_s)


def _lines(
    step: _Steps, work_s: FloatArray, again_s: FloatArray, *, layers: int, leading: int
) -> list[Lines]:
    """The lower convex hull over the number of recomputed layers, for each combination.

    Where leading layers may be among the recomputed ones, their number does not give the work, and less work
    may hide less: gradients are left out.
    """
    rest_s = step.seconds(0.0, work_s)
    lines: list[Lines] = [((float(seconds), 0.0),) for seconds in rest_s]
    rows = np.flatnonzero(again_s > 0)
    if not len(rows):
        return lines
    if leading:
        least_s = step.without_gradients(work_s)
        for row in rows:
            lines[row] = ((float(least_s[row]), 0.0),)
        return lines
    amounts = np.arange(layers + 1)[:, None]
    by_amount = step.seconds(0.0, work_s + again_s * amounts)
    for row in rows:
        lines[row] = _lower_hull(by_amount[:, row])
    return lines


def _lower_hull(values: FloatArray) -> Lines:
    """Lines (value at 0, slope) whose maximum is never above values[0], values[1], ..."""
    hull: list[int] = []
    for x in range(len(values)):
        while len(hull) > 1 and _turns_down(values, hull[-2], hull[-1], x):
            hull.pop()
        hull.append(x)
    lines = []
    for left, right in pairwise(hull):
        slope = float(values[right] - values[left]) / (right - left)
        lines.append((float(values[left]) - slope * left, slope))
    return tuple(lines) or ((float(values[0]), 0.0),)


def _turns_down(values: FloatArray, first: int, middle: int, last: int) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    before = (values[middle] - values[first]) * (last - first)
    return bool(before >= (values[last] - values[first]) * (middle - first))


def memory_rows(workload: Workload, layout: Layout) -> list[RankRow]:
    """HBM of every pipeline rank of one layout, for any number of recomputed layers.

    Empty where a rank's layers do not say what it holds: V-shaped pipelines put leading dense layers
    elsewhere.

    Parameters
    ----------
    workload
        Its model and cluster.
    layout
        Scalars. With full recomputation the rows bound any number of recomputed layers from below.

    Returns
    -------
    list of RankRow
        One for each pipeline rank, or none at all.
    """
    leading = workload.model.dense_layers and workload.model.moe_layers
    if is_v_shaped(layout) and leading:
        return []
    rows = MemoryFit(workload, replace(layout, recompute_layers=1)).rank_rows()
    if not layout.recomputes_layers:
        return rows
    every = MemoryFit(workload, replace(layout, recompute_layers=ALL_LAYERS)).rank_rows()
    return [
        replace(row, fixed_gib=min(row.fixed_gib, other.fixed_gib))
        for row, other in zip(rows, every, strict=True)
    ]
