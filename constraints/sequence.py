"""How a sequence is cut: by context parallelism, and again by sequence parallelism."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule


class SequenceByContext(Rule):
    """cp > 1: seq_len mod 2 cp = 0.

    Each rank takes one chunk from the front and one from the back, which evens out the causal mask. Megatron
    and torchtitan refuse anything else. PyTorch (2.13, experimental/_context_parallel/_load_balancer.py),
    which accelerate uses, silently falls back to plain chunks, of unequal length where cp does not divide the
    sequence: left out by choice, the cost model prices equal work.
    """

    name = "sequence-by-cp"
    unit = "tokens left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        cp = column(table, "cp")
        return as_excess(np.where(cp > 1, table.workload.seq_len % (2 * cp), 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        tokens, cp = plan.workload.seq_len, int(plan.layout.cp)
        chunks = 1 if cp == 1 else 2 * cp
        left = tokens - (tokens // chunks) * chunks
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{tokens} tokens do not divide into the {chunks} chunks of cp {cp}",
            remedy=f"Take a cp of which twice divides {tokens}, or pad the sequences.",
        )


class SequenceByTensor(Rule):
    """With sequence parallelism: seq_len mod (tp cp) = 0."""

    name = "sequence-by-tp"
    unit = "tokens left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        parts = column(table, "tp") * column(table, "cp")
        return as_excess((table.workload.seq_len % parts) * column(table, "sequence_parallel"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        one, tokens = plan.layout, plan.workload.seq_len
        if not one.sequence_parallel:
            return None
        parts = int(one.tp) * int(one.cp)
        left = tokens - (tokens // parts) * parts
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{tokens} tokens do not divide by tp {one.tp} x cp {one.cp} under sequence parallelism",
            remedy=f"Take tp and cp whose product divides {tokens}, or turn sequence parallelism off.",
        )


class SequenceParallelNeedsTensor(Rule):
    """tp = 1 has nothing to share: sequence parallelism is off."""

    name = "sequence-parallel-needs-tp"
    unit = "switches"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess((column(table, "tp") == 1) & (column(table, "sequence_parallel") == 1))

    def check(self, plan: FinishedPlan) -> Finding | None:
        if int(plan.layout.tp) > 1 or not plan.layout.sequence_parallel:
            return None
        return self.finding(
            value=1,
            words="sequence parallelism is on at tp 1, where it does nothing",
            remedy="Turn it off, or raise tp to 2 or more.",
        )
