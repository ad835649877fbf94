"""Where ranks go on a regular fabric: every parallelism matrix of a layout, and the GPU of every rank.

A parallelism matrix says how many ways each axis is spread at each fabric level (rows `AXES`, columns levels,
inside out); row products are the degrees, column products the level sizes. On a fabric of equal blocks these
matrices are all the mappings that treat blocks alike, so choosing one of them is choosing the mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.places import allocated_places
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import AXES, Layout

Matrices = dict[str, NDArray[np.int64]]

MEGATRON_DEFAULT = ("tp", "cp", "ep", "dp", "pp")
"""Megatron-LM's rank order, fastest first (`RankGenerator` in megatron-core parallel_state)."""
MEGATRON_TP_PP_DP = ("tp", "cp", "ep", "pp", "dp")
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
    """`matrices` of the degrees of `AXES` in their order."""
    degrees, sizes = tuple(degrees), tuple(int(size) for size in factors)
    if prod(sizes) != prod(degrees):
        raise ValueError(f"levels {sizes} hold {prod(sizes)} GPUs, the layout uses {prod(degrees)}")
    table = _all_matrices(degrees, sizes, tuple(sorted(AXES.index(axis) for axis in inside)))
    return {axis: table[:, row, :] for row, axis in enumerate(AXES)}


def pick(table: Mapping[str, NDArray[np.int64]], rows: NDArray[np.int64]) -> Matrices:
    """The matrices at some indices of the leading axis."""
    return {axis: factors[rows] for axis, factors in table.items()}


def rows_under(
    table: Mapping[str, NDArray[np.int64]], matrix: Mapping[str, Sequence[int]]
) -> NDArray[np.int64]:
    """The rows of a table that are one matrix: one, or none."""
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
    """Rank r runs on entry r, as (node, local GPU), both from 0, on the GPUs that the cluster has free."""
    position = gpu_of_rank(matrix)
    places = allocated_places(cluster, len(position))
    return [places[gpu] for gpu in position.tolist()]


def order_name(matrix: Mapping[str, Sequence[int] | NDArray[np.int64]]) -> tuple[str, ...]:
    """The mapping in Megatron's terms, innermost axis first.

    Where the GPUs, taken in turn, are one of Megatron's two orders, that order (`MEGATRON_DEFAULT` wins a
    tie); otherwise the axes by where they lie, which needs a hostfile to bring about.
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
