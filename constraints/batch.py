"""The global batch, cut into micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class BatchSplit(Rule):
    """global_batch = micro_batch * dp * num_micro_batches."""

    name = "batch-split"
    unit = "sequences"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        trained = (
            column(table, "micro_batch") * column(table, "dp") * column(table, "num_micro_batches")
        )
        return as_excess(np.abs(trained - table.workload.global_batch))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one, wanted = plan.layout, plan.workload.global_batch
        per_replica, rest = divmod(wanted, int(one.dp))
        micro_batches, left = divmod(per_replica, int(one.micro_batch))
        if rest == left == 0 and micro_batches == one.num_micro_batches:
            return None
        trained = int(one.micro_batch) * int(one.dp) * int(one.num_micro_batches)
        return self.finding(
            value=trained,
            limit=wanted,
            words=f"micro_batch {one.micro_batch} x dp {one.dp} x {one.num_micro_batches} micro-batches = "
            f"{trained} sequences, not the global batch of {wanted}",
            remedy=f"Choose dp and micro_batch so that their product divides {wanted}.",
        )
