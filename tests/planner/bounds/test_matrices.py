"""Parallelism matrices against enumeration, and rank-to-GPU maps as permutations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.placement import placement_from_matrix
from meshwright.planner.bounds.mappings import (
    MEGATRON_DEFAULT,
    MEGATRON_TP_PP_DP,
    gpu_of_rank,
    matrices,
    order_name,
)


def ranks(matrix: Mapping[str, Sequence[int]], gpus_per_node: int) -> list[tuple[int, int]]:
    """Rank r runs on entry r, as (node, local GPU), both from 0."""
    return [divmod(gpu, gpus_per_node) for gpu in gpu_of_rank(matrix).tolist()]


def layout_of(degrees: dict[str, int]) -> Layout:
    return Layout(tp=degrees["tp"], cp=degrees["cp"], dp=degrees["dp"], pp=degrees["pp"])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _brute(degrees: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[tuple[int, ...], ...]]:
    rows = [
        [row for row in product(_divisors(d), repeat=len(sizes)) if prod(row) == d] for d in degrees
    ]
    return {
        table
        for table in product(*rows)
        if all(prod(row[level] for row in table) == size for level, size in enumerate(sizes))
    }


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [
        ((2, 1, 4, 2), (4, 4)),
        ((2, 2, 3, 2), (4, 6)),
        ((1, 1, 6, 6), (2, 3, 6)),
        ((8, 1, 1, 1), (8,)),
        ((4, 2, 2, 2), (8, 2, 2)),
    ],
)
def test_all_matrices(degrees: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    layout = layout_of(dict(zip(AXES, degrees, strict=True)))
    table = matrices(layout, sizes)
    found = [
        tuple(tuple(int(x) for x in table[axis][k]) for axis in AXES)
        for k in range(len(table["tp"]))
    ]
    assert len(found) == len(set(found))
    assert set(found) == _brute(degrees, sizes)


def test_axes_kept_inside() -> None:
    table = matrices(Layout(tp=4, dp=4, pp=2), (8, 4), inside=("tp",))
    assert len(table["tp"]) == 2
    assert (table["tp"][:, 0] == 4).all()
    assert len(matrices(Layout(tp=8, dp=2), (4, 4), inside=("tp",))["tp"]) == 0


def test_wrong_number_of_gpus() -> None:
    with pytest.raises(ValueError, match="hold 8 GPUs, the layout uses 4"):
        matrices(Layout(tp=4), (8,))


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8])
)
def test_ranks_are_a_permutation(entries: list[int], per_node: int) -> None:
    matrix = {axis: entries[2 * row : 2 * row + 2] for row, axis in enumerate(AXES)}
    size = prod(entries)
    position = gpu_of_rank(matrix)
    assert sorted(position.tolist()) == list(range(size))
    assert len(set(ranks(matrix, per_node))) == size


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=8, max_size=8))
def test_ranks_realise_the_placement(entries: list[int]) -> None:
    """Members of a group inside one block, counted on the map, are those that the cost model assumes."""
    matrix = {axis: np.array(entries[2 * row : 2 * row + 2]) for row, axis in enumerate(AXES)}
    layout = layout_of({axis: int(np.prod(row)) for axis, row in matrix.items()})
    placement = placement_from_matrix(layout, matrix)
    position, block = gpu_of_rank(matrix), int(np.prod([matrix[axis][0] for axis in AXES]))
    strides = np.cumprod([1] + [int(np.prod(matrix[axis])) for axis in AXES])
    for row, axis in enumerate(AXES):
        members = np.arange(getattr(layout, axis)) * strides[row]
        inside = np.bincount(position[members] // block)
        assert inside.max() == getattr(placement, axis)[0]


def test_tensor_groups_fill_a_node_first() -> None:
    # tp 2 x dp 2 in a node of 4, pp 2 across two nodes: rank 4 starts the second stage on node 1.
    matrix = {"tp": [2, 1], "cp": [1, 1], "dp": [2, 1], "pp": [1, 2]}
    assert ranks(matrix, 4) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert order_name(matrix) == MEGATRON_DEFAULT


def test_names_of_orders() -> None:
    inside_pp = {"tp": [2, 1], "cp": [1, 1], "dp": [1, 4], "pp": [2, 1]}
    assert order_name(inside_pp) == MEGATRON_TP_PP_DP
    assert ranks(inside_pp, 4)[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    neither = {"tp": [2, 1], "cp": [1, 1], "dp": [2, 2], "pp": [2, 2]}
    assert order_name(neither)[0] == "tp"
    assert order_name(neither) not in (MEGATRON_DEFAULT, MEGATRON_TP_PP_DP)
