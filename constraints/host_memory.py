"""The host's memory: what all GPUs of a node offload must fit into it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.memory.footprint import GIB, offloaded_states_gib
from meshwright.costmodel.memory.states import offloaded_bytes, optimizer_shards, rank_parameters
from meshwright.costmodel.workload import Workload


class HostMemory(Rule):
    """GPUs of a node in use x what the rank that offloads most keeps there <= the cluster's host_memory_gib.

    Of parameters, gradients and optimizer states; a node counts as full of that rank, wherever the mapping
    puts the others.
    """

    name = "host-memory"
    unit = "GiB"

    def applies(self, workload: Workload) -> bool:
        return workload.cluster.host_memory_gib is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        """With parameters spread evenly over the ranks: no split keeps less on its fullest host."""
        workload, layouts = table.workload, table.layouts
        dense, expert = rank_parameters(workload.model, layouts, None)
        of_dense, of_expert = (
            offloaded_bytes(workload, layouts, shards) for shards in optimizer_shards(layouts)
        )
        each_gib = (dense * of_dense + expert * of_expert) / GIB
        gpus = np.minimum(workload.cluster.gpus_per_node, np.asarray(layouts.gpus))
        held_gib = gpus * np.asarray(each_gib, dtype=np.float64)
        return as_excess(held_gib - _host_gib(workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        limit = _host_gib(plan.workload)
        gpus = min(plan.workload.cluster.gpus_per_node, int(plan.layout.gpus))
        each_gib = float(np.max(offloaded_states_gib(plan.workload, plan.layout, plan.stages)))
        held_gib = gpus * each_gib
        if held_gib <= limit:
            return None
        return self.finding(
            value=held_gib,
            limit=limit,
            words=(
                f"{gpus} GPUs of a node keep {held_gib:.0f} GiB of optimizer states on their host, "
                f"{held_gib - limit:.0f} more than the {limit:g} that it has"
            ),
            remedy="Offload a smaller share, shard over more ranks, or raise host_memory_gib.",
        )


def _host_gib(workload: Workload) -> float:
    limit = workload.cluster.host_memory_gib
    return float("inf") if limit is None else limit
