"""From a layout and a factorisation of its axes over the fabric levels to the members that a level holds.

A *parallelism matrix* has a row for each axis of `AXES` and a column for each fabric level, inside out; entry
[a, l] is how many ways axis a is spread over the sub-blocks of a level-l block. Row products are the degrees,
column products the level sizes. (The idea of axis-by-level factor matrices: Xie et al. 2022, "Synthesizing
optimal parallelism placement and reduction strategies on hierarchical systems", MLSys, section 3.)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import Layout, Placement

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
    """Members inside a block of each level, from a parallelism matrix.

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
    tp, cp, dp, pp = (
        np.cumprod(np.asarray(matrix[axis], dtype=np.int64), axis=-1)
        for axis in ("tp", "cp", "dp", "pp")
    )
    return _with_experts(layout, tp, cp, dp, pp)


def _with_experts(
    layout: Layout,
    tp: NDArray[np.int64],
    cp: NDArray[np.int64],
    dp: NDArray[np.int64],
    pp: NDArray[np.int64],
) -> Placement:
    """The placement whose dense groups have these members; the expert groups follow from them."""
    etp_size = np.asarray(layout.etp, dtype=np.int64)[..., None]
    expert_size = etp_size * np.asarray(layout.ep, dtype=np.int64)[..., None]
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
    cluster: ClusterSpec, layout: Layout, order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
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
    return _with_experts(layout, members["tp"], members["cp"], members["dp"], members["pp"])
