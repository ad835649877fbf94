"""The scale-up domain (NVLink switch, xGMI mesh, or the node): which groups may not leave it.

Tensor parallelism communicates in every layer with nothing to hide behind, so its groups stay inside by
default. Context and expert parallelism do leave it in practice (Llama 3 405B trained at tp 8 and cp 16 on
nodes of 8 GPUs, arXiv 2407.21783, table 4; DeepSeek-V3 at ep 64, arXiv 2412.19437, 3.2): the fabric prices
that, and `ScaleUpDomain(("tp", "cp"))` or `ScaleUpDomain(("ep",))` forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule

ScaleUpAxis = Literal["tp", "cp", "ep", "etp"]


class ScaleUpDomain(Rule):
    """The product of the given degrees <= GPUs of the scale-up domain (of the node where there is none)."""

    unit = "GPUs"

    def __init__(self, axes: Sequence[ScaleUpAxis]) -> None:
        if not axes or set(axes) - {"tp", "cp", "ep", "etp"}:
            raise ValueError(f"axes {tuple(axes)}: give one or more of tp, cp, ep, etp")
        self.axes = tuple(axes)
        self.name = "scale-up-" + "-".join(self.axes)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        members = np.multiply.reduce([column(table, axis) for axis in self.axes])
        cluster = table.workload.cluster
        limit = np.where(cluster.nvlink_domain > 1, cluster.nvlink_domain, cluster.gpus_per_node)
        return as_excess(members - limit)

    def check(self, plan: FinishedPlan) -> Finding | None:
        members = 1
        for axis in self.axes:
            members *= int(getattr(plan.layout, axis))
        limit, domain = _domain(plan.workload.cluster)
        if members <= limit:
            return None
        degrees = " x ".join(f"{axis} {getattr(plan.layout, axis)}" for axis in self.axes)
        return self.finding(
            value=members,
            limit=limit,
            words=f"{degrees} = {members} GPUs do not fit into {domain} of {limit}",
            remedy=f"Lower {' or '.join(self.axes)} to {limit} or less together, or raise pp or dp instead.",
        )


def _domain(cluster: ClusterSpec) -> tuple[int, str]:
    if cluster.nvlink_domain == 1:
        return cluster.gpus_per_node, "a node"
    return cluster.nvlink_domain, "a scale-up domain"
