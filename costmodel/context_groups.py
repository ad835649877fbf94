"""Hierarchical context parallelism: small groups swap heads for tokens, rings join these groups.

Of a context group of C ranks every A neighbours swap heads for tokens (all-to-all, DeepSpeed Ulysses, arXiv
2309.14509) and pass keys and values round rings of C / A ranks, each A apart (USP, arXiv 2405.07719, section
3; Megatron's `--cp-comm-type a2a+p2p`, whose groups `create_hierarchical_groups` of
megatron/core/parallel_state.py makes; Transformer Engine 2.15, AttnFuncWithCPAndKVP2P, cp_size_a2a).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Ints, Layout
from meshwright.costmodel.workload import Workload

HIERARCHICAL = "a2a+p2p"
GATHERED = "all_gather"
"""Keys and values of the whole group are gathered before attention, their gradients scattered after it."""
IntArray = NDArray[np.int64]


def swapping_ranks(workload: Workload, layout: Layout) -> IntArray:
    """A: ranks of a context group that swap heads for tokens among themselves, in `a2a+p2p`.

    Parameters
    ----------
    workload : Workload
        Its `cp_inner` where that is given; else `largest_swap` says.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of int
        At least 1, shaped like the layouts' tp and cp.
    """
    if workload.cp_inner is not None:
        return np.asarray(np.minimum(workload.cp_inner, layout.cp), dtype=np.int64)
    return largest_swap(workload, layout.tp, layout.cp)


def swaps_heads(workload: Workload, layout: Layout) -> NDArray[np.bool_]:
    """Whether context parallelism swaps heads for tokens at all.

    Parameters
    ----------
    workload : Workload
        Its `cp_comm`.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of bool
        Shaped like the layouts' cp, or tp and cp.
    """
    if workload.cp_comm == HIERARCHICAL:
        return swapping_ranks(workload, layout) > 1
    return (np.asarray(layout.cp) > 1) & (workload.cp_comm == "a2a")


def one_ring(workload: Workload) -> bool:
    """Whether all that a context group sends goes round one ring of all its ranks.

    Parameters
    ----------
    workload : Workload
        Its `cp_comm`.

    Returns
    -------
    bool
        True of p2p, and of all_gather: NCCL gathers round rings.
    """
    return workload.cp_comm in ("p2p", GATHERED)


def largest_swap(workload: Workload, tp: Ints, cp: Ints) -> IntArray:
    """The A of a plan: the largest power of two below cp that leaves rings between whole groups.

    A divides cp, and the heads and key-value heads of a tensor rank (Transformer Engine splits each of Q, K
    and V so: flash_attn_a2a_communicate); its tp A GPUs fit into a scale-up domain, or a node.

    Parameters
    ----------
    workload : Workload
        Model and cluster.
    tp, cp : int or array of int
        Degrees, at least 1.

    Returns
    -------
    array of int
        1 where there is none.
    """
    model, cluster = workload.model, workload.cluster
    tp, cp = np.asarray(tp), np.asarray(cp)
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    largest = np.ones(np.broadcast_shapes(tp.shape, cp.shape), dtype=np.int64)
    size = 2
    while size <= min(domain, int(np.max(cp, initial=1)) - 1):
        ranks = tp * size
        fits = (cp > size) & (cp % size == 0) & (ranks <= domain)
        fits &= (model.heads % ranks == 0) & (model.kv_heads % ranks == 0)
        largest = np.where(fits, size, largest)
        size *= 2
    return largest


def inside_and_between(members: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """Members of the two kinds of groups inside a block of each level.

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Of the context group, inside out.
    size : array of int, shape [...]
        A.

    Returns
    -------
    tuple of two arrays of int, shape [..., levels]
        Of the A neighbours, and of the ring through every A-th rank.
    """
    swapping = np.asarray(size)[..., None]
    return np.minimum(members, swapping), np.maximum(members // swapping, 1)
