"""Where ranks go on a regular fabric: every parallelism matrix of a layout, and the GPU of every rank.

A parallelism matrix says how many ways each axis is spread at each fabric level (rows `AXES`, columns levels,
inside out); row products are the degrees, column products the level sizes. On a fabric of equal blocks these
matrices are all the mappings that treat blocks alike, so choosing one of them is choosing the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import allocated_places, full_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster
from meshwright.constraints.fabric import binds_mappings, keeps_inside
from meshwright.costmodel.collectives import best_beyond
from meshwright.costmodel.data_parallel import (
    DataParallelTraffic,
    data_parallel_traffic,
    size_range,
    traffic_by_kind,
)
from meshwright.costmodel.estimate import LayerCosts, costs_of_layers
from meshwright.costmodel.footprint import OF_PIPELINE
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import (
    AXES,
    LAYER_AXES,
    PLACED_AXES,
    Floats,
    Ints,
    Layout,
    Placement,
    in_shape,
)
from meshwright.costmodel.optimizers import sends_by_shards
from meshwright.costmodel.placement import level_factors, placement_on
from meshwright.costmodel.rates import calibrated_constants, links_of
from meshwright.costmodel.states import rank_parameters
from meshwright.costmodel.step_time import make_context, waits_by_shards
from meshwright.costmodel.workload import Execution, Workload

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Layouts and mappings that layers, or data-parallel traffic, cannot tell apart are priced once.
#
# Many layouts share their degrees, and many mappings differ only in where other groups lie.


SHAPE = (*LAYER_AXES, "micro_batch")
"""Fields of a layout on which the least time of a layer depends."""
_OF_LAYERS = (*SHAPE, "sequence_parallel", "recompute")
"""Fields of a layout on which the time of a layer depends, beside its groups, without overlap."""
OF_TRAFFIC = (*LAYER_AXES, "dp", *OF_PIPELINE, "zero_stage")
"""Fields of a layout on which its data-parallel traffic depends, beside its groups and shard groups."""
GROUPS_OF_TRAFFIC = ("dp_cp", "edp")
"""Groups over which gradients are reduced."""

MOST_KEPT = 4096
"""Times of layers that are kept, and looked for: those of more take no longer to price."""
_LARGEST_KEY = 1 << 62


def of_layers(workload: Workload) -> tuple[str, ...]:
    """Fields of a layout on which the time of a layer depends, beside its groups.

    Where exchanges of experts overlap, the pipeline decides how many chunks have a pair
    (`schedules.unpaired_share`).

    Parameters
    ----------
    workload
        Run in any way.

    Returns
    -------
    tuple of str
    """
    return (*_OF_LAYERS, *OF_PIPELINE) if workload.ep_overlap else _OF_LAYERS


def rows_by_value(
    layouts: Layout,
    names: Sequence[str],
    placement: Placement | None = None,
    groups: Sequence[str] = (),
) -> tuple[IntArray, IntArray]:
    """Which layouts agree in some fields, and in where some of their groups lie.

    Parameters
    ----------
    layouts
        Shape [n].
    names
        Fields of a layout, integers from 0 on.
    placement
        Of the layouts, arrays [n, levels]; not needed without `groups`.
    groups
        Fields of a placement.

    Returns
    -------
    tuple of two arrays of int
        Rows with distinct values, and for each layout which of them it equals, [n].
    """
    shape = layouts.broadcast_shape()
    columns = [
        in_shape(np.asarray(getattr(layouts, name), dtype=np.int64), shape) for name in names
    ]
    for group in groups:
        columns += list(np.asarray(getattr(placement, group)).T)
    key, size = np.zeros(shape, dtype=np.int64), 1
    for column in columns:
        values = int(column.max(initial=0)) + 1
        if size * values > _LARGEST_KEY:
            distinct, key = np.unique(key, return_inverse=True)
            size = len(distinct)
        key, size = key * values + column, size * values
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back


def rows_of_context(context: Context, rows: IntArray) -> Context:
    """Some of the layouts [n] of a context, as they lie.

    Parameters
    ----------
    context
        Of n layouts.
    rows
        Positions, 0 to n - 1, shape [k].

    Returns
    -------
    Context
        Of k layouts.
    """
    placement = context.placement.take(rows)
    return replace(context, layout=context.layout.take(rows), placement=placement)


def shared_times(context: Context, groups: Sequence[str] = ()) -> KindTimes | None:
    """Times of layers, priced once for layouts that a layer cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    groups
        `LAYER_AXES` where placements do not follow from the layouts.

    Returns
    -------
    KindTimes
        Seconds, [n]; None where there are no layouts.
    """
    if not len(np.atleast_1d(np.asarray(context.layout.tp))):
        return None
    first, back = rows_by_value(
        context.layout, of_layers(context.workload), context.placement, groups
    )
    return kind_times(rows_of_context(context, first)).rows(back, len(first))


def times_under_mappings(context: Context, owner: IntArray) -> tuple[KindTimes, IntArray, IntArray]:
    """Times of layers under mappings, and which mappings of a layout they tell apart.

    Parameters
    ----------
    context
        Layouts [n], n at least 1, and their placements.
    owner
        Which layout's mapping each of them is, rising, [n].

    Returns
    -------
    tuple of KindTimes and two arrays of int
        Seconds, [n]; rows of which no two have one owner and the same times, in the order of their owners,
        [k]; and for each row which of these it equals, [n].
    """
    first, back = rows_by_value(
        context.layout, of_layers(context.workload), context.placement, LAYER_AXES
    )
    times = kind_times(rows_of_context(context, first)).rows(back, len(first))
    _, rows, equal = np.unique(owner * len(first) + back, return_index=True, return_inverse=True)
    return times, rows, equal


T = TypeVar("T")


class KeptRows(Generic[T]):
    """What is known of rows, about so many, kept for those that come again; `joined` makes one of two."""

    def __init__(self, most: int, joined: Callable[[T, T], T]) -> None:
        self._most, self._joined = most, joined
        self._places: dict[bytes, int] = {}
        self._known: T | None = None

    def of(self, keys: Sequence[bytes], asked: Callable[[IntArray], T]) -> tuple[T, IntArray]:
        """What is known of some rows, those that are new among them found out first.

        Parameters
        ----------
        keys
            What tells rows apart, one at least.
        asked
            From positions of unknown rows in `keys` to what is known of them, in their order.

        Returns
        -------
        tuple of T, and array of int, shape [keys]
            All that is known, and which row of it each of the keys has.
        """
        if len(self._places) > self._most:
            self._places, self._known = {}, None
        new = [row for row, key in enumerate(keys) if key not in self._places]
        if new:
            fresh = asked(np.array(new))
            self._known = fresh if self._known is None else self._joined(self._known, fresh)
            self._places |= {keys[row]: len(self._places) + at for at, row in enumerate(new)}
        assert self._known is not None
        return self._known, np.array([self._places[key] for key in keys])

    def __len__(self) -> int:
        return len(self._places)


class KnownTimes:
    """Times of layers as well placed as they can be, kept for those that come again.

    Of one workload, whose placements follow from the layouts.
    """

    def __init__(self) -> None:
        self._kept = KeptRows[KindTimes](MOST_KEPT, KindTimes.beside)

    def times(self, context: Context) -> KindTimes | None:
        """`shared_times` of layouts [n]; None where there are none.

        Parameters
        ----------
        context
            Of layouts [n], their groups packed as far inside as they can be.
        """
        if not len(np.atleast_1d(np.asarray(context.layout.tp))):
            return None
        first, back = rows_by_value(context.layout, of_layers(context.workload))
        distinct = rows_of_context(context, first)
        if len(first) > MOST_KEPT:
            return kind_times(distinct).rows(back, len(first))

        def asked(new: IntArray) -> KindTimes:
            times = kind_times(rows_of_context(distinct, new))
            return times.rows(np.arange(len(new)), len(new))

        times, places = self._kept.of(row_keys(distinct.layout, of_layers(context.workload)), asked)
        return times.rows(places[back], len(self._kept))


def row_keys(layouts: Layout, names: Sequence[str]) -> list[bytes]:
    """What tells some layouts [n] apart by some of their fields.

    Parameters
    ----------
    layouts
        Arrays of shape [n].
    names
        Fields of `Layout`.

    Returns
    -------
    list of bytes
        Equal where all of these fields are.
    """
    columns = [np.asarray(getattr(layouts, name), np.int64) for name in names]
    return [key.tobytes() for key in np.stack(columns, axis=1)]


def shared_costs(context: Context) -> LayerCosts:
    """Costs of layers under mappings, priced once for those that a layer cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n], n at least 1, and their placements.

    Returns
    -------
    LayerCosts
        Seconds, [n].
    """
    first, back = rows_by_value(
        context.layout, of_layers(context.workload), context.placement, LAYER_AXES
    )
    costs = costs_of_layers(rows_of_context(context, first))
    columns = (np.broadcast_to(np.asarray(column), first.shape) for column in vars(costs).values())
    return LayerCosts(*(column[back] for column in columns))


def shared_traffic(context: Context, groups: Sequence[str] = ()) -> tuple[DataParallelTraffic, ...]:
    """Data-parallel traffic, priced once for layouts that it cannot tell apart.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    groups
        `GROUPS_OF_TRAFFIC` where placements do not follow from the layouts.

    Returns
    -------
    tuple of DataParallelTraffic
        Of parameters spread evenly over the ranks, seconds, [n]; as `bucket_sizes.open_traffic` has it.
    """
    fields = (*OF_TRAFFIC, "shard_groups")
    first, back = rows_by_value(context.layout, fields, context.placement, groups)

    def traffic_of(part: Context, size: Floats | None) -> DataParallelTraffic:
        dense, expert = rank_parameters(part.workload.model, part.layout, None)
        return data_parallel_traffic(part, dense, expert, size)

    return joined_traffic(rows_of_context(context, first), traffic_of, back)


def joined_traffic(
    context: Context,
    traffic_of: Callable[[Context, Floats | None], DataParallelTraffic],
    back: IntArray,
) -> tuple[DataParallelTraffic, ...]:
    """Traffic of layouts from that of distinct ones, with each size of gradient buckets.

    Parameters
    ----------
    context
        Distinct layouts [k] and their placements.
    traffic_of
        Of some of the layouts [m] with each of some sizes [sizes, m] of buckets, or less than with any of
        them, arrays [..., m]; None for the framework's own.
    back
        Which of the distinct layouts each layout is, [n].

    Returns
    -------
    tuple of DataParallelTraffic
        As `bucket_sizes.open_traffic` has it, seconds, [n].
    """
    sizes, count = size_range(context), context.layout.broadcast_shape()
    own = _rows_of_traffic(traffic_of(context, None), count, back)
    if sizes is None:
        return (own,)
    chooses = np.flatnonzero(sizes.is_open)
    _, size = sizes.rows(chooses).others()
    with_others = traffic_of(rows_of_context(context, chooses), size)
    rows = np.flatnonzero(sizes.is_open[back])
    among = np.cumsum(sizes.is_open) - 1
    columns = []
    for of_own, of_others in zip(own, with_others, strict=True):
        column = np.repeat(np.asarray(of_own)[None], len(np.asarray(of_others)), axis=0)
        column[:, rows] = np.asarray(of_others)[:, among[back[rows]]]
        columns.append(column)
    return own, DataParallelTraffic(*columns)


def _rows_of_traffic(
    traffic: DataParallelTraffic, count: tuple[int, ...], back: IntArray
) -> DataParallelTraffic:
    columns = (np.broadcast_to(np.asarray(column), count) for column in traffic)
    return DataParallelTraffic(*(column[back] for column in columns))


Matrices = dict[str, NDArray[np.int64]]

MEGATRON_DEFAULT = ("tp", "cp", "ep", "dp", "pp")
"""Megatron-LM's rank order, fastest first (`RankGenerator` in megatron-core parallel_state)."""
MEGATRON_TP_PP_DP = (*MEGATRON_DEFAULT[:-2], "pp", "dp")
"""The order of `--use-tp-pp-dp-mapping`."""


def matrices(
    layout: Layout, factors: Sequence[int] | NDArray[np.int64], inside: tuple[str, ...] = ()
) -> Matrices:
    """Every parallelism matrix of one layout.

    Primes do not interact, so the matrices are the products of one exponent table per prime.

    Parameters
    ----------
    layout
        One layout, its degrees scalars.
    factors
        Level sizes, inside out, with product `layout.gpus`; shape [levels].
    inside
        Axes that lie wholly in level 0.

    Returns
    -------
    Matrices
        By axis, how many ways it is spread at each level, [k, levels]; k is 0 where there is no matrix.

    Raises
    ------
    ValueError
        Where the level sizes do not multiply to the layout's GPUs.
    """
    return matrices_of([int(getattr(layout, axis)) for axis in AXES], factors, inside)


def matrices_of(
    degrees: Sequence[int],
    factors: Sequence[int] | NDArray[np.int64],
    inside: tuple[str, ...] = (),
) -> Matrices:
    """`matrices` by degrees in place of a layout.

    Parameters
    ----------
    degrees
        Of `AXES`, in their order.
    factors
        Level sizes, inside out, with the product of the degrees; shape [levels].
    inside
        Axes that lie wholly in level 0.

    Raises
    ------
    ValueError
        Where the level sizes do not multiply to that product.
    """
    degrees, sizes = tuple(degrees), tuple(int(size) for size in factors)
    if prod(sizes) != prod(degrees):
        raise ValueError(f"levels {sizes} hold {prod(sizes)} GPUs, the layout uses {prod(degrees)}")
    table = _all_matrices(degrees, sizes, tuple(sorted(AXES.index(axis) for axis in inside)))
    return {axis: table[:, row, :] for row, axis in enumerate(AXES)}


def pick(table: Mapping[str, NDArray[np.int64]], rows: NDArray[np.int64]) -> Matrices:
    """The matrices at some indices of the leading axis.

    Parameters
    ----------
    table
        By axis, [k, ...].
    rows
        Positions, 0 to k - 1.
    """
    return {axis: factors[rows] for axis, factors in table.items()}


def rows_under(
    table: Mapping[str, NDArray[np.int64]], matrix: Mapping[str, Sequence[int]]
) -> NDArray[np.int64]:
    """The rows of a table that are one matrix: one, or none.

    Parameters
    ----------
    table
        By axis, [k, levels].
    matrix
        By axis how many ways it is spread at each level.
    """
    same = [np.all(table[axis] == np.asarray(row), axis=1) for axis, row in matrix.items()]
    return np.flatnonzero(np.logical_and.reduce(same))


@lru_cache(maxsize=1 << 15)
def _all_matrices(
    degrees: tuple[int, ...], sizes: tuple[int, ...], inside: tuple[int, ...]
) -> NDArray[np.int64]:
    """All matrices as one read-only array [k, axes, levels]."""
    table = np.ones((1, len(degrees), len(sizes)), dtype=np.int64)
    for prime in _primes(prod(sizes)):
        powers = _exponent_tables(
            tuple(_exponent(d, prime) for d in degrees),
            tuple(_exponent(s, prime) for s in sizes),
            inside,
        )
        table = (table[:, None] * prime ** powers[None]).reshape(-1, len(degrees), len(sizes))
    table.flags.writeable = False
    return table


@lru_cache(maxsize=4096)
def _exponent_tables(
    rows: tuple[int, ...], columns: tuple[int, ...], inside: tuple[int, ...]
) -> NDArray[np.int64]:
    """Non-negative integer tables with the given row and column sums, shape [k, rows, columns]."""
    tables: list[list[tuple[int, ...]]] = []
    _fill(rows, columns, inside, [], tables)
    return np.array(tables, dtype=np.int64).reshape(-1, len(rows), len(columns))


def _fill(
    rows: tuple[int, ...],
    room: tuple[int, ...],
    inside: tuple[int, ...],
    done: list[tuple[int, ...]],
    tables: list[list[tuple[int, ...]]],
) -> None:
    if len(done) == len(rows):
        tables.append(list(done))
        return
    row = len(done)
    last = row == len(rows) - 1
    options: Iterable[tuple[int, ...]] = [room]
    if row in inside:
        options = [(rows[row], *[0] * (len(room) - 1))]
    elif not last:
        options = _splits(rows[row], room)
    for option in options:
        columns_left = tuple(r - o for r, o in zip(room, option, strict=True))
        if min(columns_left) >= 0 and (not last or not any(columns_left)):
            _fill(rows, columns_left, inside, [*done, option], tables)


def _splits(total: int, room: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum over the columns within their room, largest inner part first."""
    if len(room) == 1:
        if total <= room[0]:
            yield (total,)
        return
    for first in range(min(total, room[0]), -1, -1):
        for rest in _splits(total - first, room[1:]):
            yield (first, *rest)


def _primes(number: int) -> list[int]:
    primes, factor = [], 2
    while factor * factor <= number:
        if number % factor == 0:
            primes.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return [*primes, number] if number > 1 else primes


def _exponent(number: int, prime: int) -> int:
    count = 0
    while number % prime == 0:
        number //= prime
        count += 1
    return count


def gpu_of_rank(matrix: Mapping[str, Sequence[int] | NDArray[np.int64]]) -> NDArray[np.int64]:
    """The position of every rank among the allocation's GPUs, shape [gpus]: a permutation.

    Ranks count in Megatron's order (tp fastest, then cp, dp, pp; the expert axes are carved out of tp, cp,
    dp). GPUs count from the inside of the fabric outwards; inside a level the axes nest in the same order.

    Parameters
    ----------
    matrix
        By axis how many ways it is spread at each level, inside out.
    """
    levels = len(matrix[AXES[0]])
    shape = [int(matrix[axis][level]) for level in range(levels) for axis in AXES]
    gpus = np.arange(prod(shape), dtype=np.int64)
    digits = np.unravel_index(gpus, shape[::-1])[::-1]
    rank = np.zeros_like(gpus)
    stride = 1
    for row, axis in enumerate(AXES):
        for level in range(levels):
            rank += stride * digits[level * len(AXES) + row]
            stride *= int(matrix[axis][level])
    position = np.empty_like(gpus)
    position[rank] = gpus
    return position


def ranks_on(
    cluster: ClusterSpec, matrix: Mapping[str, Sequence[int] | NDArray[np.int64]]
) -> list[tuple[int, int]]:
    """The GPU of every rank, on the GPUs that a cluster has free.

    Parameters
    ----------
    cluster
        Its nodes.
    matrix
        By axis how many ways it is spread at each level, inside out.

    Returns
    -------
    list of tuple of int
        Node and GPU of the node, both from 0, of rank 0, 1, 2 and so on.
    """
    rows = tuple((axis, tuple(map(int, row))) for axis, row in matrix.items())
    return list(_ranks_on(SameCluster(cluster), rows))


@lru_cache(maxsize=4)
def _ranks_on(
    same: SameCluster, rows: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[tuple[int, int], ...]:
    """`ranks_on`, kept for what writes a plan and what verifies it."""
    position = gpu_of_rank(dict(rows))
    places = allocated_places(same.cluster, len(position))
    return tuple(places[gpu] for gpu in position.tolist())


def order_name(matrix: Mapping[str, Sequence[int] | NDArray[np.int64]]) -> tuple[str, ...]:
    """The mapping in Megatron's terms, innermost axis first.

    Where the GPUs, taken in turn, are one of Megatron's two orders, that order (`MEGATRON_DEFAULT` wins a
    tie); otherwise the axes by where they lie, which needs a hostfile to bring about.

    Parameters
    ----------
    matrix
        By axis how many ways it is spread at each level, inside out.

    Returns
    -------
    tuple of str
        All of `AXES`.
    """
    position = gpu_of_rank(matrix)
    degrees = {axis: int(np.prod(np.asarray(matrix[axis], dtype=np.int64))) for axis in AXES}
    for order in (MEGATRON_DEFAULT, MEGATRON_TP_PP_DP):
        dense = [axis for axis in order if axis != "ep"]
        if np.array_equal(position, _nested_position(degrees, dense)):
            return order
    for nested in permutations(AXES):
        if np.array_equal(position, _nested_position(degrees, nested)):
            return nested

    def mean_level(axis: str) -> float:
        reach = float(np.dot(np.log(matrix[axis]), np.arange(len(matrix[axis]))))
        return reach / max(float(np.log(degrees[axis])), 1e-9)

    return tuple(sorted(AXES, key=mean_level))


def _nested_position(degrees: Mapping[str, int], order: Sequence[str]) -> NDArray[np.int64]:
    """Positions of ranks when the axes simply nest in `order`, innermost first."""
    stride, strides = 1, {}
    for axis in order:
        strides[axis] = stride
        stride *= degrees[axis]
    ranks_in_turn = np.arange(stride, dtype=np.int64)
    index = np.unravel_index(ranks_in_turn, [degrees[axis] for axis in reversed(AXES)])[::-1]
    position = np.zeros_like(ranks_in_turn)
    for row, axis in enumerate(AXES):
        position += strides[axis] * index[row]
    return position


# Layouts under each of their mappings on a regular fabric, as one table.


class MappedLayouts(NamedTuple):
    """Layouts under each of their mappings."""

    tables: list[Matrices]
    """Of each layout."""
    counts: IntArray
    """Mappings of each layout."""
    context: Context | None
    """Of all mappings of the first layout, then of the next; None where there are none."""
    inside: BoolArray
    """Which of these mappings keep in a domain what the workload wants there."""

    def by_layout(self, seconds: FloatArray) -> list[FloatArray]:
        """Of the mappings of each layout.

        Parameters
        ----------
        seconds
            Of every mapping: those of the first layout, then those of the next.
        """
        return np.split(seconds, np.cumsum(self.counts)[:-1])

    def least(self, seconds: FloatArray) -> FloatArray:
        """The least of each layout's mappings that keep inside what they must, [layouts].

        0 where it has no mapping, infinite where all leave a domain.

        Parameters
        ----------
        seconds
            Of every mapping: those of the first layout, then those of the next.
        """
        least_s, has_any = np.zeros(len(self.counts)), self.counts > 0
        starts = np.cumsum(self.counts) - self.counts
        own = np.where(self.inside, seconds, np.inf)
        least_s[has_any] = np.minimum.reduceat(own, starts[has_any])
        return least_s


def mapped_layouts(workload: Workload, gpus: int, layouts: Layout) -> MappedLayouts:
    """Some layouts under each of their mappings.

    Parameters
    ----------
    workload
        Its cluster, and the axes that are to stay inside a domain.
    gpus
        Of the allocation that all of the layouts use.
    layouts
        Shape [n].

    Returns
    -------
    MappedLayouts
        Layouts with the same degrees share their placements.
    """
    first, table_of = rows_by_value(layouts, PLACED_AXES)
    degrees = np.stack([np.asarray(getattr(layouts, axis))[first] for axis in AXES], axis=1)
    factors = level_factors(workload.cluster, gpus)
    tables = [matrices_of(each, factors, inside=("tp",)) for each in degrees.tolist()]
    sizes = np.array([len(table["tp"]) for table in tables])
    counts = sizes[table_of]
    own = [tables[index] for index in table_of]
    if not counts.sum():
        return MappedLayouts(own, counts, None, np.zeros(0, dtype=np.bool_))
    joined = {axis: np.concatenate([table[axis] for table in tables]) for axis in AXES}
    placement = placement_on(workload.cluster, layouts.take(np.repeat(first, sizes)), joined)
    # Row of the joined tables that each mapping of each layout is.
    starts, own_starts = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts
    rows = np.arange(counts.sum()) + np.repeat(starts[table_of] - own_starts, counts)
    each = layouts.take(np.repeat(np.arange(len(counts)), counts))
    context = make_context(workload.on(gpus), each, placement.take(rows))
    return MappedLayouts(own, counts, context, keeps_inside(workload, each, context.placement))


def mappings_of(workload: Workload, layout: Layout) -> Matrices:
    """Every parallelism matrix of a layout that keeps the groups inside that must not leave a domain.

    Tensor groups stay inside the innermost level; so do the groups that the workload names.

    Parameters
    ----------
    workload
        Its cluster, and what has to lie in one domain.
    layout
        Scalars.

    Returns
    -------
    Matrices
        By axis how many ways it is spread at each level, [k, levels]; k is 0 where there is no mapping.
    """
    factors = level_factors(workload.cluster, int(layout.gpus))
    table = matrices(layout, factors, inside=("tp",))
    if not binds_mappings(workload):
        return table
    placement = placement_on(workload.cluster, layout, table)
    return pick(table, np.flatnonzero(keeps_inside(workload, layout, placement)))


# The best that any mapping could give a group: packed as far inside the fabric as it can be.


def packed_context(workload: Workload, layouts: Layout) -> Context:
    """Layouts under a placement and links that no mapping on any allocation beats.

    Parameters
    ----------
    workload
        Its cluster counts at its full size.
    layouts
        Shape [...].

    Returns
    -------
    Context
        Placements of shape [..., levels].
    """
    levels = full_levels(workload.cluster)
    links = best_beyond(links_of(levels, calibrated_constants(workload)))
    context = make_context(workload, layouts, packed_placement(layouts, levels.blocks))
    return replace(context, links=links)


def packed_placement(layouts: Layout, blocks: IntArray) -> Placement:
    """Every group packed as far inside as it can be while tensor groups lie inside the innermost level.

    Members of a group of another axis belong to different tensor groups, each of which fills tp GPUs of the
    block; expert groups take only the tensor ranks that tp and etp x ep have in common
    (`meshwright.costmodel.placement`).

    Parameters
    ----------
    layouts
        Shape [n].
    blocks
        GPUs in one block of each level, shape [levels].

    Returns
    -------
    Placement
        Members of a group inside a block of each level, [n, levels].
    """
    tp = np.asarray(layouts.tp, dtype=np.int64)[..., None]
    experts = np.asarray(layouts.expert_group, dtype=np.int64)[..., None]

    def packed(size: object, apart: object = 1) -> IntArray:
        room = np.maximum(-(-blocks // np.asarray(apart, dtype=np.int64)), 1)
        return np.minimum(np.asarray(size, dtype=np.int64)[..., None], room)

    return Placement(
        tp=packed(layouts.tp),
        cp=packed(layouts.cp, tp),
        dp=packed(layouts.dp, tp),
        pp=packed(layouts.pp, tp),
        ep=packed(layouts.ep),
        etp=packed(layouts.etp),
        edp=packed(layouts.edp, np.gcd(tp, experts)),
        dp_cp=packed(layouts.dp * layouts.cp, tp),
    )


# Numbers of shard groups: which can be best, and the least that any of them sends.
#
# More groups hold larger shards: they need more memory, and their optimizers take longer. A number of groups
# is worth having only if it sends less than every divisor of it. Divisors are legal wherever it is. Where
# the size of gradient buckets is to choose, it is worth having if that is so with some size: with every
# other size a divisor of it is as fast with that size.


class _ByGroups(NamedTuple):
    """Traffic of some layouts with each number of groups, parameters spread evenly over the ranks."""

    seconds: FloatArray
    """[kinds of parameters, layouts, numbers]; infinite where replicas do not divide so."""
    tail_s: FloatArray
    moving_s: FloatArray
    is_proportional: BoolArray
    """Whether it grows in proportion to the parameters, or no split changes these; [layouts, numbers]."""


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def divides_into(groups: Ints, dp: Ints, cp: Ints) -> BoolArray:
    """Whether replicas divide into so many groups, of two ranks or more where there are several.

    Parameters
    ----------
    groups
        Shard groups, at least 1; numbers or arrays that broadcast with the degrees.
    dp
        Replicas.
    cp
        Context-parallel ranks, which share shards with the replicas.
    """
    number, ranks = np.asarray(groups), np.asarray(dp) * np.asarray(cp)
    return np.asarray((dp % number == 0) & ((number == 1) | (ranks >= 2 * number)))


def useful_groups(context: Context, numbers: Sequence[int]) -> BoolArray:
    """Whether the shard groups of some layouts may be the best of some numbers of groups, as they lie.

    More groups only pay where they send less; but where the optimizer itself sends less in smaller groups
    (`sends_by_shards`), or ranks wait less for unlike packs (`waits_by_shards`), any number may be the best.

    Parameters
    ----------
    context
        Layouts [n] and their placements.
    numbers
        Of groups that the layouts could have instead.

    Returns
    -------
    BoolArray
        [n]
    """
    own = np.asarray(context.layout.shard_groups)
    useful = np.ones(len(own), dtype=bool)
    rows = np.flatnonzero((own > min(numbers, default=1)) & ~waits_by_shards(context))
    if not len(rows) or sends_by_shards(context.workload):
        return useful
    few = rows_of_context(context, rows)
    first, back = rows_by_value(few.layout, OF_TRAFFIC, few.placement, GROUPS_OF_TRAFFIC)
    each = rows_of_context(few, first)
    useful[rows] = _are_useful(_by_groups(each, numbers), numbers, back, own[rows])
    sizes = size_range(each)
    if sizes is None:
        return useful
    for has, size in zip(*sizes.others(), strict=True):
        asked = np.flatnonzero(has[back] & ~useful[rows])
        if len(asked):
            distinct, of_asked = np.unique(back[asked], return_inverse=True)
            part = _by_groups(rows_of_context(each, distinct), numbers, size[distinct, None])
            useful[rows[asked]] = _are_useful(part, numbers, of_asked, own[rows[asked]])
    return useful


def _are_useful(
    by_groups: _ByGroups, numbers: Sequence[int], kind: IntArray, own: IntArray
) -> BoolArray:
    """Whether each layout's own number of groups sends less than every divisor of it, [layouts].

    `kind` is which of the layouts of `by_groups` each of them equals: those with one number are asked once.
    """
    _, first, back = np.unique(
        kind * (max(numbers) + 1) + own, return_index=True, return_inverse=True
    )
    kind, own = kind[first], own[first]
    useful, column = np.ones(len(own), dtype=bool), np.searchsorted(numbers, own)
    for other, divisor in enumerate(numbers):
        rows = np.flatnonzero(useful & (own % divisor == 0) & (divisor < own))
        useful[rows] = ~_sends_no_more(by_groups, kind[rows], other, column[rows])
    return np.asarray(useful[back])


def divisors_suffice(context: Context, dense: float, experts: float) -> BoolArray:
    """Which divisors of a number of shard groups send no more, whatever more the ranks hold.

    Parameters
    ----------
    context
        One layout, in plain numbers, of several pipeline ranks; what holds of `useful_groups` holds here.
    dense, experts
        The fewest parameters outside experts and in them on a GPU.

    Returns
    -------
    BoolArray
        Of the divisors, rising, without the number itself.
    """
    numbers = divisors(int(context.layout.shard_groups))
    rows = np.zeros(len(numbers) - 1, dtype=np.int64)
    if sends_by_shards(context.workload) or np.any(waits_by_shards(context)):
        return np.zeros(len(rows), dtype=bool)
    placement = context.placement.take(None)
    alone = replace(context, layout=context.layout.flat(), placement=placement)
    by_groups = _by_groups(alone, numbers, parameters=(dense, experts))
    return _sends_no_more(by_groups, rows, np.arange(len(rows)), rows + len(rows))


def least_group_traffic(
    context: Context, numbers: Sequence[int], groups: Sequence[str] = ()
) -> tuple[DataParallelTraffic, ...]:
    """Some of it is never more than the traffic of any split with any of some numbers of groups.

    Parameters
    ----------
    context
        Layouts [n] that shard over all replicas, on placements that are bounds.
    numbers
        Of groups; one at least goes with each of the layouts.
    groups
        `GROUPS_OF_TRAFFIC` where placements do not follow from the layouts.

    Returns
    -------
    tuple of DataParallelTraffic
        Seconds, arrays [n]; as `bucket_sizes.open_traffic` has it.
    """
    first, back = rows_by_value(context.layout, OF_TRAFFIC, context.placement, groups)

    def traffic_of(part: Context, size: Floats | None) -> DataParallelTraffic:
        if size is None:
            return least(_by_groups(part, numbers))
        # Larger buckets send no longer in all, smaller ones no longer at last: two sizes stand for any.
        ends = np.stack([np.max(size, axis=0), np.min(size, axis=0)])
        by_size = least(_by_groups(part, numbers, ends[..., None]))
        seconds, tail_s, moving_s = (np.asarray(column) for column in by_size)
        return DataParallelTraffic(seconds[:1], tail_s[1:], moving_s[:1])

    def least(by_groups: _ByGroups) -> DataParallelTraffic:
        columns = (by_groups.seconds, by_groups.tail_s, by_groups.moving_s)
        return DataParallelTraffic(*(column.sum(axis=0).min(axis=-1) for column in columns))

    return joined_traffic(rows_of_context(context, first), traffic_of, back)


MOST_TRAFFIC_KEPT = 1 << 16
"""Layouts whose traffic is kept."""


class KnownTraffic:
    """`least_group_traffic` of layouts as well placed as they can be, kept for the executions and searches
    that cannot tell it apart.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._kept = KeptRows[FloatArray](MOST_TRAFFIC_KEPT, lambda *rows: np.concatenate(rows))

    def least(self, context: Context) -> tuple[DataParallelTraffic, ...]:
        """The traffic of layouts [n], n at least 1: [n] with the framework's own sizes of buckets, then
        [1, n] with the other sizes, which is left out where it is the same.
        """
        first, back = rows_by_value(context.layout, OF_TRAFFIC)
        distinct = rows_of_context(context, first)

        def asked(new: IntArray) -> FloatArray:
            traffic = least_group_traffic(rows_of_context(distinct, new), self._numbers)
            # Where there is no choice of a size, the others are the framework's own.
            columns = [*traffic[0], *(np.reshape(each, len(new)) for each in traffic[-1])]
            return np.stack(columns, axis=1)

        rows, places = self._kept.of(row_keys(distinct.layout, OF_TRAFFIC), asked)
        columns_here = np.ascontiguousarray(rows[places[back]].T)
        own = DataParallelTraffic(*columns_here[:3])
        if np.array_equal(columns_here[:3], columns_here[3:]):
            return (own,)
        return own, DataParallelTraffic(*columns_here[3:, None])


@dataclass(frozen=True, eq=False)
class WorkloadKey:
    """What is asked of a workload as a key: the model of one request is the same object, unhashed."""

    workload: Workload
    asked: Hashable
    beside: Any = None
    """What follows from these two, or has a key among what is asked."""

    def __hash__(self) -> int:
        run = self.workload
        settings = (run.moe_dispatch, run.ep_overlap, run.tp_overlap, run.cuda_graph, run.cp_comm)
        return hash((id(run.model), settings, run.memory_margin, run.gpus, self.asked))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkloadKey):
            return False
        return self.asked == other.asked and self.workload == other.workload


def known_traffic(workload: Workload, numbers: Sequence[int]) -> KnownTraffic:
    """The kept traffic of a workload's layouts, each with the best of some numbers of groups.

    Workloads share it that differ in overlaps, graphs, dispatchers or context exchanges alone: data-parallel
    traffic depends on none of them.

    Parameters
    ----------
    workload
        Of any execution.
    numbers
        Of shard groups; the traffic is never above that with any of them.
    """
    plain = Execution()
    alike = replace(
        workload,
        memory_margin=1.0,
        moe_dispatch=plain.moe_dispatch,
        ep_overlap=plain.ep_overlap,
        tp_overlap=plain.tp_overlap,
        cuda_graph=plain.cuda_graph,
        cp_comm=plain.cp_comm,
        cp_inner=plain.cp_inner,
    )
    return _known_traffic(WorkloadKey(alike, tuple(numbers), numbers))


@lru_cache(maxsize=8)
def _known_traffic(key: WorkloadKey) -> KnownTraffic:
    return KnownTraffic(key.beside)


def _by_groups(
    context: Context,
    numbers: Sequence[int],
    bucket: Floats | None = None,
    parameters: tuple[float, float] | None = None,
) -> _ByGroups:
    """With `bucket` parameters reduced together, a number or [..., layouts, 1]; else the stack's own. Of so
    many `parameters` outside experts and in them on a rank; else of those of an even spread.

    Only numbers that divide the replicas are priced: of 131,040 GPUs' a quarter.
    """
    layouts, groups = context.layout, np.array(numbers)
    count = layouts.broadcast_shape()[0]
    dp, cp, pp = (
        np.broadcast_to(np.asarray(x), count)[:, None] for x in (layouts.dp, layouts.cp, layouts.pp)
    )
    goes = divides_into(groups, dp, cp)
    rows, columns = np.nonzero(goes)
    grouped = rows_of_context(context, rows)
    grouped = replace(grouped, layout=replace(grouped.layout, shard_groups=groups[columns]))
    dense, expert = parameters or rank_parameters(context.workload.model, grouped.layout, None)
    if bucket is not None:
        size = np.asarray(bucket)
        bucket = np.broadcast_to(size, (*size.shape[:-2], count, 1))[..., rows, 0]
    kinds = traffic_by_kind(grouped, dense, expert, bucket)

    def spread(values: Floats | BoolArray, without: float) -> FloatArray:
        """From numbers that divide to all, [..., layouts, numbers]."""
        flat = np.asarray(values)
        flat = np.broadcast_to(flat, np.broadcast_shapes(flat.shape, rows.shape))
        table = np.full((*flat.shape[:-1], *goes.shape), without)
        table[..., rows, columns] = flat
        return table

    keeps_parameters = goes & (pp == 1)
    full = [(spread(is_full, 0.0) > 0.0) | keeps_parameters for _, is_full in kinds]
    return _ByGroups(
        seconds=np.stack([spread(traffic.seconds, np.inf) for traffic, _ in kinds]),
        tail_s=np.stack([spread(traffic.tail_s, np.inf) for traffic, _ in kinds]),
        moving_s=np.stack([spread(traffic.moving_s, np.inf) for traffic, _ in kinds]),
        is_proportional=np.logical_and.reduce(full),
    )


def _sends_no_more(
    by_groups: _ByGroups, rows: IntArray, other: int | IntArray, column: IntArray
) -> BoolArray:
    """Whether one number of groups sends no more than another one under any split, [rows]."""
    columns = (by_groups.seconds, by_groups.tail_s, by_groups.moving_s)
    no_more = [(each[:, rows, other] <= each[:, rows, column]).all(axis=0) for each in columns]
    full = by_groups.is_proportional
    return np.asarray(np.logical_and.reduce(no_more) & full[rows, other] & full[rows, column])
