"""What accelerate with PyTorch FSDP2 has settings for (read in accelerate 1.15.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.attention_heads import WholeKvHeads
from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.frameworks.fsdp2 import FSDP2


class ShardsBesideTensor(Rule):
    """tp > 1 needs dp cp > 1: FSDP2 has nothing to shard over where every rank is a tensor rank.

    Raised by the Accelerator, not by the parser (accelerate 1.15.0, parallelism_config.py).
    """

    name = "fsdp2-shards"
    unit = "ranks"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        alone = (column(table, "dp") == 1) & (column(table, "cp") == 1)
        return as_excess(np.where(alone, column(table, "tp") - 1, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = plan.layout
        if int(one.tp) == 1 or int(one.dp) * int(one.cp) > 1:
            return None
        return self.finding(
            value=1,
            limit=2,
            words=f"tp {one.tp} takes every rank and leaves FSDP none to shard over",
            remedy="Lower tp, or raise dp or cp to 2 or more.",
        )


FSDP2_RULES: tuple[Rule, ...] = (
    ShardsBesideTensor(),
    WholeKvHeads(FSDP2),
)
