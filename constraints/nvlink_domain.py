"""Groups that the user keeps inside one NVLink domain, where the default lets them leave it.

Only tensor and expert tensor groups stay inside by themselves (`scale_up`). megatron-core advises it of
experts too ("Communications of EP and TP should remain within the NVLink domain as much as possible, as both
are communication-intensive": megatron/core/transformer/moe/README.md); who shares a network may insist on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.workload import Workload

INSIDE_DOMAIN = ("tp", "cp", "ep")
"""Axes whose groups can be asked to stay inside."""


class NvlinkDomain(Rule):
    """Groups of the axes of `--inside-domain` lie in one scale-up domain each, or in one node.

    GPUs that share a group are in the same domain, and so are those that share one with them: tp x cp ranks,
    etp x ep ranks, and where one is no multiple of the other the least common multiple of the two.
    """

    name = "nvlink-domain"
    unit = "GPUs"

    def applies(self, workload: Workload) -> bool:
        return bool(workload.inside_domain)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        asked = table.workload.inside_domain
        together = column(table, "tp")
        if "cp" in asked:
            together = together * column(table, "cp")
        if "ep" in asked:
            together = np.lcm(together, column(table, "etp") * column(table, "ep"))
        return as_excess(together - _domain_gpus(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        limit, asked = _domain_gpus(plan.workload), plan.workload.inside_domain
        for axis in asked:
            members = int(getattr(plan.layout, axis))
            inside = plan.spans[axis][0] if plan.spans else members
            if inside < members:
                return self._outside(f"{axis} groups of {members} leave their domain", members)
        dense = int(plan.layout.tp) * (int(plan.layout.cp) if "cp" in asked else 1)
        experts = int(plan.layout.etp) * int(plan.layout.ep) if "ep" in asked else 1
        together = dense
        while together % experts:
            together += dense
        if together <= limit:
            return None
        names = ", ".join(asked)
        return self._outside(f"groups of {names} tie {together} GPUs together", together, limit)

    def _outside(self, words: str, value: int, limit: int = 0) -> Finding:
        if limit:
            words += f", a domain has {limit}"
        remedy = "Lower the degree, or take the axis out of --inside-domain."
        return self.finding(value=value, limit=limit, words=words, remedy=remedy)


def keeps_inside(workload: Workload, layout: Layout, placement: Placement) -> NDArray[np.bool_]:
    """Whether placements keep the groups that the workload's `inside_domain` names in one domain each.

    So with groups of experts whose dispatcher's kernels ask for it: see `dispatcher_reaches`.

    Parameters
    ----------
    workload
        What is placed.
    layout
        Degrees as numbers, or as arrays of the placements' shape.
    placement
        Arrays [..., levels]; level 0 is the scale-up domain.

    Returns
    -------
    array of bool, shape [...]
    """
    keep = np.ones(np.shape(placement.tp)[:-1], dtype=np.bool_)
    for axis in workload.inside_domain:
        keep &= members_in_domain(placement, axis) >= np.asarray(getattr(layout, axis))
    return keep & dispatcher_reaches(workload, layout, placement)


def binds_mappings(workload: Workload) -> bool:
    """Whether some groups of the workload have to lie in one domain each, by wish or for their dispatcher."""
    return bool(workload.inside_domain) or _joins_by_memory(workload)


def dispatcher_reaches(
    workload: Workload, layout: Layout, placement: Placement
) -> NDArray[np.bool_]:
    """Whether ranks that share experts by DeepEP or HybridEP, and fit into one domain, lie in one.

    DeepEP takes up to NUM_MAX_NVL_PEERS = 8 ranks for one NVLink domain and opens each other's memory
    (csrc/deep_ep.cpp, Buffer::sync: cudaIpcOpenMemHandle); HybridEP asks that every domain holds equally many
    of them (deep_ep/hybrid_ep_buffer.py). A group across the edge of a domain starts with neither.

    Parameters
    ----------
    workload
        What is placed.
    layout
        Degrees as numbers, or as arrays of the placements' shape.
    placement
        Arrays [..., levels]; level 0 is the scale-up domain.

    Returns
    -------
    array of bool, shape [...]
    """
    if not _joins_by_memory(workload):
        return np.ones(np.shape(placement.tp)[:-1], dtype=np.bool_)
    ep = np.asarray(layout.ep)
    is_larger = ep * np.asarray(layout.etp) > _domain_gpus(workload)
    return np.asarray(is_larger | (members_in_domain(placement, "ep") >= ep))


def _joins_by_memory(workload: Workload) -> bool:
    return workload.model.moe is not None and workload.moe_dispatch in ("deepep", "hybridep")


def members_in_domain(placement: Placement, axis: str) -> NDArray[np.int64]:
    """How many members of a group of one axis share a domain under some placements, shape [...]."""
    return np.asarray(getattr(placement, axis), dtype=np.int64)[..., 0]


def _domain_gpus(workload: Workload) -> int:
    domain, node = workload.cluster.nvlink_domain, workload.cluster.gpus_per_node
    return domain if domain > 1 else node
