"""Members of groups inside the blocks of the fabric, counted rank by rank.

For mappings whose groups are not alike in every block: expert groups that end inside a tensor group, nodes
and blocks of the machine that hold unequal parts of an allocation.

A ring is paced by the block whose links it shares with most others: of the GPUs in use there, divided by the
rings that leave it, a ring has so many. An all-to-all is paced by the block that sends the largest share
outside. Where every block holds m members of every group that it cuts, both give m.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.places import AllocatedBlocks

IntArray = NDArray[np.int64]
LARGEST_TABLE = 16
"""Cells for each member, up to which members are counted in a table of groups by blocks, without sorting."""
MatrixRows = tuple[tuple[int, ...], ...]
"""Of tp, cp, dp and pp: ways by level."""


@lru_cache(maxsize=65536)
def counted_members(
    matrix: MatrixRows, etp: int, ep: int, allocation: AllocatedBlocks
) -> dict[str, IntArray]:
    """Members of a group inside the block that paces it, by axis of `Placement` and level.

    Parameters
    ----------
    matrix
        The parallelism matrix, rows tp, cp, dp, pp; its product is the GPUs of the allocation.
    etp, ep
        Expert degrees, at least 1; their product divides tp cp dp.
    allocation
        Where the GPUs stand.

    Returns
    -------
    dict of str to array of int
        At least 1 each, shape [levels], never fewer further out.
    """
    tp, cp, dp, pp = (prod(row) for row in matrix)
    where = allocation.blocks[:, position_of_ranks(matrix)]
    return members_by_level(where, (tp, cp, dp, pp), etp, ep)


def members_by_level(
    where: IntArray, degrees: tuple[int, int, int, int], etp: int, ep: int
) -> dict[str, IntArray]:
    """`members_in` of every level.

    Parameters
    ----------
    where
        The block of every rank, [levels, ranks], levels inside out.
    degrees
        Of tp, cp, dp and pp, at least 1 each.
    etp, ep
        Expert degrees, at least 1; their product divides tp cp dp.

    Returns
    -------
    dict of str to array of int
        By axis, shape [levels], never fewer further out.
    """
    rows = [members_in(of_level, degrees, etp, ep) for of_level in where]
    columns = {name: np.array([row[name] for row in rows], dtype=np.int64) for name in rows[0]}
    return {name: np.maximum.accumulate(column) for name, column in columns.items()}


def position_of_ranks(matrix: MatrixRows) -> IntArray:
    """The position among the allocation's GPUs of every rank in Megatron's default order.

    Parameters
    ----------
    matrix
        The parallelism matrix, rows tp, cp, dp, pp.

    Returns
    -------
    array of int
        From 0, shape [ranks].
    """
    levels = len(matrix[0])
    shape = [row[level] for level in range(levels) for row in matrix]
    positions = np.arange(prod(shape), dtype=np.int64).reshape(shape[::-1])
    ways = len(matrix)
    # Array axes run from the outermost level inwards, pp before dp before cp before tp in each.
    order = [
        (levels - 1 - level) * ways + (ways - 1 - axis)
        for axis in reversed(range(ways))
        for level in reversed(range(levels))
    ]
    return positions.transpose(order).reshape(-1)


def members_in(
    where: IntArray, degrees: tuple[int, int, int, int], etp: int, ep: int
) -> dict[str, int]:
    """Members of a group inside a block of one level.

    Parameters
    ----------
    where
        The block of every rank, [ranks]; ranks count by tp, cp, dp, pp.
    degrees
        Of tp, cp, dp and pp, at least 1 each.
    etp, ep
        Expert degrees, at least 1; their product divides tp cp dp.

    Returns
    -------
    dict of str to int
        By axis of `Placement`, at least 1.
    """
    tp, cp, dp, pp = degrees
    dense = where.reshape(pp, dp, cp, tp)
    experts = where.reshape(pp, -1, ep, etp)
    edp = experts.shape[1]
    return {
        "tp": ring_members(dense.reshape(-1, tp)),
        "cp": ring_members(dense.transpose(0, 1, 3, 2).reshape(-1, cp)),
        "dp": ring_members(dense.transpose(0, 2, 3, 1).reshape(-1, dp)),
        "pp": chain_members(dense.reshape(pp, -1)),
        "etp": ring_members(experts.reshape(-1, etp)),
        "ep": exchange_members(experts.transpose(0, 1, 3, 2).reshape(-1, ep)),
        "edp": ring_members(experts.transpose(0, 2, 3, 1).reshape(-1, edp)),
        "dp_cp": ring_members(dense.transpose(0, 3, 1, 2).reshape(-1, dp * cp)),
    }


def ring_members(groups: IntArray) -> int:
    """Members of a ring inside the block that paces it.

    Parameters
    ----------
    groups
        The block of every member, [groups, members].

    Returns
    -------
    int
        All members where no group is cut, else from 1 to all but one.
    """
    size = int(groups.shape[1])
    if size == 1:
        return 1
    blocks, counts = _held(groups)
    cut = blocks[counts < size]
    if not len(cut):
        return size
    used = np.bincount(blocks, weights=counts)
    rings = np.bincount(cut, minlength=len(used))
    least = int(np.min(used[rings > 0] // rings[rings > 0]))
    return max(1, min(least, size - 1))


def exchange_members(groups: IntArray) -> int:
    """Members of an all-to-all inside the block that paces it.

    Parameters
    ----------
    groups
        The block of every member, [groups, members].

    Returns
    -------
    int
        All members where no group is cut, else from 1 to all but one.
    """
    size = int(groups.shape[1])
    if size == 1:
        return 1
    blocks, counts = _held(groups)
    if np.all(counts == size):
        return size
    sent = np.bincount(blocks, weights=size * counts)
    kept = np.bincount(blocks, weights=counts * counts)
    used = sent > 0
    inside = int(np.min(size * kept[used] // sent[used]))
    return max(1, min(inside, size - 1))


def chain_members(chains: IntArray) -> int:
    """Stages of a pipeline inside a block: the mean of the pipeline that is cut most often.

    Parameters
    ----------
    chains
        The block of every stage, [stages, pipelines].

    Returns
    -------
    int
        From 1 to all stages.
    """
    stages = len(chains)
    crossings = int(np.max(np.sum(chains[1:] != chains[:-1], axis=0), initial=0))
    return stages // (crossings + 1)


def _held(groups: IntArray) -> tuple[IntArray, IntArray]:
    """The block and the members of every group's part in a block."""
    blocks = int(groups.max()) + 1
    codes = np.arange(len(groups), dtype=np.int64)[:, None] * blocks + groups
    if len(groups) * blocks <= LARGEST_TABLE * groups.size:
        table = np.bincount(codes.ravel())
        parts = np.flatnonzero(table)
        return parts % blocks, table[parts]
    parts, counts = np.unique(codes, return_counts=True)
    return parts % blocks, counts.astype(np.int64)
