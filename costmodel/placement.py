"""From a layout and a factorisation of its axes over the fabric levels to the members that a level holds.

A *parallelism matrix* has a row for each axis of `AXES` and a column for each fabric level, inside out; entry
[a, l] is how many ways axis a is spread over the sub-blocks of a level-l block. Row products are the degrees,
column products the level sizes. (The idea of axis-by-level factor matrices: Xie et al. 2022, "Synthesizing
optimal parallelism placement and reduction strategies on hierarchical systems", MLSys, section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import (
    AllocatedBlocks,
    allocation_of,
    fabric_levels,
    is_irregular,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import AXES, STAGE_AXES, Layout, Placement

# Members of groups inside the blocks of the fabric, counted rank by rank.


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

    For mappings whose groups are not alike in every block: expert groups that end inside a tensor group,
    nodes and blocks of the machine that hold unequal parts of an allocation. A ring is paced by the block
    whose links it shares with most others: of the GPUs in use there, divided by the rings that leave it, a
    ring has so many. An all-to-all is paced by the GPU that sends the largest share outside, which it does
    over its own links: one whose block holds the smallest part of its group. Where every block holds m
    members of every group that it cuts, both give m.

    Parameters
    ----------
    matrix : tuple of tuple of int
        The parallelism matrix, rows tp, cp, dp, pp; its product is the GPUs of the allocation.
    etp, ep : int
        Expert degrees, at least 1; their product divides tp cp dp.
    allocation : AllocatedBlocks
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
    """Members of a group inside the block of each level that paces it, as `counted_members` explains.

    Parameters
    ----------
    where : array of int, shape [..., levels, ranks]
        The block of every rank, levels inside out; ranks count by tp, cp, dp, pp.
    degrees : tuple of four int
        Of tp, cp, dp and pp, at least 1 each.
    etp, ep : int
        Expert degrees, at least 1; their product divides tp cp dp.

    Returns
    -------
    dict of str to array of int, shape [..., levels]
        At least 1 each, by axis of `Placement`, never fewer further out.
    """
    rows = [_members_in(where[..., k, :], degrees, etp, ep) for k in range(where.shape[-2])]
    columns = {name: np.stack([row[name] for row in rows], axis=-1) for name in rows[0]}
    return {name: np.maximum.accumulate(column, axis=-1) for name, column in columns.items()}


def placement_in(where: IntArray, layout: Layout) -> Placement:
    """Members of the groups of one layout, counted where its ranks stand.

    Parameters
    ----------
    where : array of int, shape [levels, ranks]
        The block of every rank, levels inside out; ranks count by tp, cp, dp, pp.
    layout : Layout
        One layout.

    Returns
    -------
    Placement
        Arrays of shape [levels].
    """
    degrees = (int(layout.tp), int(layout.cp), int(layout.dp), int(layout.pp))
    return Placement(**members_by_level(where, degrees, int(layout.etp), int(layout.ep)))


def position_of_ranks(matrix: MatrixRows) -> IntArray:
    """The position among the allocation's GPUs of every rank in Megatron's default order.

    Parameters
    ----------
    matrix : tuple of tuple of int
        The parallelism matrix, rows tp, cp, dp, pp; entries at least 1.

    Returns
    -------
    array of int, shape [ranks]
        From 0.
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


def _members_in(
    where: IntArray, degrees: tuple[int, int, int, int], etp: int, ep: int
) -> dict[str, IntArray]:
    """Members of a group inside a block, by axis, [...]; `where` is the block of every rank, [..., ranks]."""
    tp, cp, dp, pp = degrees
    before = where.shape[:-1]
    dense = where.reshape(-1, pp, dp, cp, tp)
    experts = where.reshape(len(dense), pp, -1, ep, etp)
    each = len(dense)

    def groups(of: IntArray, order: tuple[int, ...], size: int) -> IntArray:
        return of.transpose(0, *order).reshape(each, -1, size)

    members_of = {
        "tp": ring_members(groups(dense, (1, 2, 3, 4), tp)),
        "cp": ring_members(groups(dense, (1, 2, 4, 3), cp)),
        "dp": ring_members(groups(dense, (1, 3, 4, 2), dp)),
        "pp": _chain_members(dense.reshape(each, pp, -1)),
        "etp": ring_members(groups(experts, (1, 2, 3, 4), etp)),
        "ep": _exchange_members(groups(experts, (1, 2, 4, 3), ep)),
        "edp": ring_members(groups(experts, (1, 3, 4, 2), experts.shape[2])),
        "dp_cp": ring_members(groups(dense, (1, 4, 2, 3), dp * cp)),
    }
    return {name: members.reshape(before) for name, members in members_of.items()}


def ring_members(groups: IntArray) -> IntArray:
    """Members of a ring inside the block that paces it.

    Parameters
    ----------
    groups : array of int, shape [..., groups, members]
        The block of every member.

    Returns
    -------
    array of int, shape [...]
        All members where no group is cut, else from 1 to all but one.
    """
    *before, number, size = groups.shape
    every = np.full(prod(before), size, dtype=np.int64)
    if size == 1:
        return every.reshape(before)
    owner, blocks, counts = _held(groups.reshape(-1, number, size))
    width = int(blocks.max()) + 1
    place = owner * width + blocks
    used = np.bincount(place, weights=counts, minlength=len(every) * width)
    rings = np.bincount(place[counts < size], minlength=len(every) * width)
    each = np.where(rings > 0, used // np.maximum(rings, 1), size).reshape(-1, width)
    is_cut = np.any(rings.reshape(-1, width) > 0, axis=1)
    paced = np.clip(each.min(axis=1), 1, size - 1).astype(np.int64)
    return np.where(is_cut, paced, every).reshape(before)


def _exchange_members(groups: IntArray) -> IntArray:
    """Members of an all-to-all in the block of the GPU that paces it: of the smallest part of a group.

    Of 8 members, 6 in one block and 2 in the next, each of the 2 sends 6/8 of its bytes outside, and all
    members end with them.

    `groups` has the block of every member, [..., groups, members]. All members where no group is cut, else
    from 1 to half of them; [...].
    """
    *before, number, size = groups.shape
    owner, _, counts = _held(groups.reshape(-1, number, size))
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    return np.asarray(np.minimum.reduceat(counts, first), dtype=np.int64).reshape(before)


def _chain_members(chains: IntArray) -> IntArray:
    """Stages of a pipeline inside a block: the mean of the pipeline that is cut most often.

    `chains` is the block of every [..., stage, pipeline].
    """
    stages = chains.shape[-2]
    crossings = np.sum(chains[..., 1:, :] != chains[..., :-1, :], axis=-2)
    return np.asarray(stages // (np.max(crossings, axis=-1, initial=0) + 1), dtype=np.int64)


def _held(groups: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Of every group's part in a block which of the first axis has it, the block, and the members, in turn;
    `groups` is [n, groups, members].
    """
    number, blocks = groups.shape[1], int(groups.max()) + 1
    group = np.arange(len(groups) * number, dtype=np.int64).reshape(len(groups), number, 1)
    codes = group * blocks + groups
    if group.size * blocks <= LARGEST_TABLE * groups.size:
        table = np.bincount(codes.ravel())
        parts = np.flatnonzero(table)
        counts = table[parts]
    else:
        parts, counts = np.unique(codes, return_counts=True)
    held, block = np.divmod(parts, blocks)
    return held // number, block, counts.astype(np.int64)


ParallelismMatrix = Mapping[str, NDArray[np.int64]]
"""Row of each axis of `AXES`, entries of shape [..., levels]."""


def level_factors(cluster: ClusterSpec, gpus: int) -> NDArray[np.int64]:
    """Sub-blocks of each fabric level, inside out; their product is `gpus`.

    Where an allocation is not a whole number of blocks, the largest aligned sub-block that divides it stands
    for the block: 20 GPUs on nodes of 8 count as five half-nodes of 4.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    gpus : int
        Size of the allocation, 1 to the cluster's size.

    Returns
    -------
    array of int, shape [levels]
        At least 1 each.
    """
    factors: list[int] = []
    inner = 1
    for block in fabric_levels(cluster, gpus).blocks.tolist():
        factor = gcd(block // inner, gpus // inner)
        factors.append(factor)
        inner *= factor
    factors[-1] *= gpus // inner
    return np.array(factors, dtype=np.int64)


def placement_from_matrix(layout: Layout, matrix: ParallelismMatrix) -> Placement:
    """Members inside a block of each level, from a parallelism matrix whose blocks hold groups alike.

    Inside a level the axes nest in Megatron's order (tp, cp, dp, pp from the inside). The expert axes are
    carved out of the dense rank index t + tp (c + cp d) in the order etp, ep, edp (megatron-core
    parallel_state).

    Parameters
    ----------
    layout : Layout
        Degrees, of which the expert axes are used.
    matrix : mapping of axis to array of int, shape [..., levels]
        Ways that each of tp, cp, dp, pp is spread over the sub-blocks of a block, at least 1.

    Returns
    -------
    Placement
        Arrays of shape [..., levels].
    """
    return _with_experts(layout, **_inside(matrix))


def _inside(matrix: ParallelismMatrix) -> dict[str, NDArray[np.int64]]:
    """Members of the dense groups inside a block of each level."""
    return {axis: np.cumprod(np.asarray(matrix[axis], dtype=np.int64), axis=-1) for axis in AXES}


def placement_on(cluster: ClusterSpec, layout: Layout, matrix: ParallelismMatrix) -> Placement:
    """Members inside a block of each level, as the ranks of a parallelism matrix stand on a machine.

    As `placement_from_matrix` has them, but counted where expert groups do not nest in the factors: in part
    of a stage, or rank by rank (`counted_members`) if blocks of the allocation share one of the machine.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    layout : Layout
        Degrees, all on one number of GPUs: one layout, or as many as the matrix has rows.
    matrix : mapping of axis to array of int, shape [..., levels]
        As `placement_from_matrix` takes it.

    Returns
    -------
    Placement
        Arrays of shape [..., levels].
    """
    inside = _inside(matrix)
    placement = _with_experts(layout, **inside)
    if not inside["tp"].size:
        return placement
    gpus = int(np.prod([inside[axis].reshape(-1)[-1] for axis in AXES]))
    allocation = allocation_of(cluster, gpus)
    nests = _experts_nest(layout, inside) & allocation.even
    if np.all(nests):
        return placement
    shape = inside["tp"].shape[:-1]
    return _counted(placement, layout, matrix, np.broadcast_to(nests, shape), allocation)


def _counted(
    placement: Placement,
    layout: Layout,
    rows: ParallelismMatrix,
    nests: NDArray[np.bool_],
    allocation: AllocatedBlocks,
) -> Placement:
    """A placement with the members of every mapping that does not nest counted."""
    levels = np.asarray(rows["tp"]).shape[-1]
    columns = {
        name: np.array(np.broadcast_to(members, (*nests.shape, levels))).reshape(-1, levels)
        for name, members in vars(placement).items()
    }
    etp = np.broadcast_to(np.asarray(layout.etp), nests.shape).reshape(-1)
    ep = np.broadcast_to(np.asarray(layout.ep), nests.shape).reshape(-1)
    flat = {axis: np.asarray(rows[axis]).reshape(-1, levels) for axis in AXES}
    for row in np.flatnonzero(~nests.reshape(-1)).tolist():
        mapping = tuple(tuple(flat[axis][row].tolist()) for axis in AXES)
        sizes = int(etp[row]), int(ep[row])
        if allocation.even:
            members = _experts_alike(mapping[:-1], *sizes)
        else:
            members = counted_members(mapping, *sizes, allocation)
        for name, of_levels in members.items():
            columns[name][row] = of_levels
    shape = (*nests.shape, levels)
    return Placement(**{name: column.reshape(shape) for name, column in columns.items()})


def _experts_alike(stage: MatrixRows, etp: int, ep: int) -> dict[str, IntArray]:
    """Members of expert groups where blocks hold equal parts of all dense groups, as `counted_members` has
    them.

    Derived here: every block holds as many stages, each with a translation of the same ranks, so that one
    stage tells; and where data parallelism goes on beyond the last block, expert groups come to lie as they
    did after lcm(etp ep, ranks) / ranks of its steps, of so many ranks. Two such periods show it all: a ring
    of replicas that goes on beyond them leaves its blocks within them too. `stage` has the rows of tp, cp
    and dp.
    """
    tp, cp, dp = stage
    inner = prod(tp) * prod(cp) * prod(dp[:-1])
    period = etp * ep // gcd(etp * ep, inner)
    beyond = dp[-1] if dp[-1] <= 2 * period else 2 * period
    paced = _paced_experts((tp, cp, (*dp[:-1], beyond)), etp, ep)
    sizes = {"etp": etp, "ep": ep, "edp": inner * dp[-1] // (etp * ep)}
    return {
        name: np.maximum.accumulate(
            [
                sizes[name] if not least else max(1, min(least, sizes[name] - 1))
                for least in of_levels
            ]
        )
        for name, of_levels in paced.items()
    }


@lru_cache(maxsize=65536)
def _paced_experts(stage: MatrixRows, etp: int, ep: int) -> dict[str, list[int]]:
    """Members of expert groups of one stage by level, 0 where no block of that level cuts one."""
    levels, ranks = len(stage[0]), prod(prod(row) for row in stage)
    sizes = [row[level] for row in reversed(stage) for level in reversed(range(levels))]
    digits = np.unravel_index(np.arange(ranks), sizes)
    paced: dict[str, list[int]] = {"etp": [], "ep": [], "edp": []}
    for level in range(levels):
        where, blocks = np.zeros(ranks, dtype=np.int64), 1
        for column, size in enumerate(sizes):
            if levels - 1 - column % levels > level:
                where, blocks = where * size + digits[column], blocks * size
        experts = where.reshape(-1, ep, etp)
        paced["etp"].append(_least_of_rings(experts.reshape(-1, etp), ranks // blocks))
        exchange = int(_exchange_members(experts.transpose(0, 2, 1).reshape(-1, ep)))
        paced["ep"].append(0 if exchange == ep else exchange)
        edp = experts.transpose(1, 2, 0).reshape(etp * ep, -1)
        paced["edp"].append(_least_of_rings(edp, ranks // blocks))
    return paced


def _least_of_rings(groups: IntArray, ranks: int) -> int:
    """Ranks of a block for each ring that leaves it, the fewest; 0 where no group is cut.

    `groups` has the block of every member, [groups, members], blocks of so many ranks.
    """
    _, blocks, counts = _held(groups[None])
    cut = blocks[counts < groups.shape[1]]
    return ranks // int(np.bincount(cut).max()) if len(cut) else 0


def _experts_nest(layout: Layout, inside: ParallelismMatrix) -> NDArray[np.bool_]:
    """Whether the groups of the lowest dense ranks fill whole factors of tp, then of cp, then of dp."""
    nests: NDArray[np.bool_] = np.ones((), dtype=np.bool_)
    for size in (layout.etp, layout.expert_group):
        rest = np.asarray(size, dtype=np.int64)[..., None]
        for axis in STAGE_AXES:
            part = np.gcd(rest, inside[axis][..., -1:])
            whole = (part == rest) | (part == inside[axis][..., -1:])
            divides = (part % inside[axis] == 0) | (inside[axis] % part == 0)
            nests = nests & np.all(whole & divides, axis=-1)
            rest = rest // part
    return nests


def _with_experts(
    layout: Layout,
    tp: NDArray[np.int64],
    cp: NDArray[np.int64],
    dp: NDArray[np.int64],
    pp: NDArray[np.int64],
) -> Placement:
    """The placement whose dense groups have these members; the expert groups follow from them."""
    etp_size = np.asarray(layout.etp, dtype=np.int64)[..., None]
    expert_size = np.asarray(layout.expert_group, dtype=np.int64)[..., None]
    etp = _lowest_ranks(etp_size, tp, cp, dp)
    expert = _lowest_ranks(expert_size, tp, cp, dp)
    return Placement(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        etp=etp,
        ep=np.maximum(expert // np.maximum(etp, 1), 1),
        edp=np.maximum((tp * cp * dp) // np.maximum(expert, 1), 1),
        dp_cp=cp * dp,
    )


def _lowest_ranks(
    size: NDArray[np.int64], tp: NDArray[np.int64], cp: NDArray[np.int64], dp: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Members, per level, of the group of the `size` lowest dense rank indices (tp, then cp, then dp)."""
    of_tp = np.gcd(size, tp[..., -1:])
    rest = size // of_tp
    of_cp = np.gcd(rest, cp[..., -1:])
    of_dp = rest // of_cp
    return np.gcd(of_tp, tp) * np.gcd(of_cp, cp) * np.gcd(of_dp, dp)


def nested_placement(
    cluster: ClusterSpec, layout: Layout, order: tuple[str, ...] = AXES
) -> Placement:
    """The placement of axes nested in `order`, ranks running through the GPUs in turn.

    A group of stride s and size d holds gcd(block, s d) / s members in an aligned block that s divides.

    Parameters
    ----------
    cluster : ClusterSpec
        The machine.
    layout : Layout
        One layout, or many of shape [n].
    order : tuple of str
        The four dense axes, innermost first; Megatron's order by default.

    Returns
    -------
    Placement
        Arrays of shape [..., levels].
    """
    gpus = np.asarray(layout.gpus, dtype=np.int64)
    blocks = fabric_levels(cluster, int(np.max(gpus))).blocks
    stride = np.ones(np.shape(gpus), dtype=np.int64)[..., None]
    members: dict[str, NDArray[np.int64]] = {}
    for axis in order:
        degree = np.asarray(getattr(layout, axis), dtype=np.int64)[..., None]
        inside = np.gcd(blocks, stride * degree)
        divided = np.where(inside % stride == 0, np.maximum(inside // stride, 1), 1)
        members[axis] = np.where(blocks >= gpus[..., None], degree, divided)
        stride = stride * degree
    placement = _with_experts(layout, **members)
    if gpus.ndim or is_irregular(cluster):
        return placement
    allocation = allocation_of(cluster, int(gpus))
    if allocation.even and _dense_nest(layout, blocks, order) and _experts_nest(layout, members):
        return placement
    position = nested_positions(layout, order)
    where = allocation.blocks[:, position]
    return placement_in(where, layout)


def _dense_nest(layout: Layout, blocks: NDArray[np.int64], order: tuple[str, ...]) -> bool:
    """Whether every block holds whole parts of the axes nested in `order`."""
    stride = 1
    for axis in order:
        stride *= int(getattr(layout, axis))
        if not all(block % stride == 0 or stride % block == 0 for block in blocks.tolist()):
            return False
    return True


def nested_positions(layout: Layout, order: tuple[str, ...]) -> NDArray[np.int64]:
    """The position of every rank among the allocation's GPUs when the axes nest in an order.

    Parameters
    ----------
    layout : Layout
        One layout.
    order : tuple of str
        The four dense axes, innermost first.

    Returns
    -------
    array of int, shape [ranks]
        From 0; ranks count tp, cp, dp, pp.
    """
    outermost_first = tuple(reversed(order))
    shape = [int(getattr(layout, axis)) for axis in outermost_first]
    positions = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    counted = [outermost_first.index(axis) for axis in reversed(AXES)]
    return positions.transpose(counted).reshape(-1)
