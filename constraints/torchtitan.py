"""What torchtitan refuses to start, beyond the general rules (read in torchtitan 0.3.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.attention_heads import WholeKvHeads
from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.pipeline_schedules import TORCHTITAN_SCHEDULE_RULES
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.constraints.torchtitan_model import (
    TorchtitanArchitecture,
    TorchtitanExpertShards,
    TorchtitanTokenPrediction,
)
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.torchtitan import TORCHTITAN


class TorchtitanSequence(Rule):
    """seq_len mod (tp 2 cp) = 0 as soon as tp or cp is more than 1."""

    name = "torchtitan-sequence"
    unit = "tokens left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        tp, cp = column(table, "tp"), column(table, "cp")
        parts = np.where(cp > 1, 2 * cp, 1) * tp
        return as_excess(table.workload.seq_len % parts)

    def check(self, plan: FinishedPlan) -> Finding | None:
        tokens, tp, cp = plan.workload.seq_len, int(plan.layout.tp), int(plan.layout.cp)
        parts = tp if cp == 1 else tp * cp + tp * cp
        left = tokens - (tokens // parts) * parts
        if left == 0:
            return None
        return self.finding(
            value=left,
            words=f"{tokens} tokens do not divide into the {parts} pieces of tp {tp} and cp {cp}",
            remedy=f"Take tp and cp of which tp x 2 cp divides {tokens}.",
        )


class TorchtitanTiedEmbeddings(Rule):
    """A pipeline cannot hold an embedding that the output layer shares."""

    name = "torchtitan-tied-embeddings"
    unit = "pipeline stages"

    def applies(self, workload: Workload) -> bool:
        return workload.model.tied_embeddings

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess((column(table, "pp") - 1) * table.workload.model.tied_embeddings)

    def check(self, plan: FinishedPlan) -> Finding | None:
        if not plan.workload.model.tied_embeddings or int(plan.layout.pp) == 1:
            return None
        return self.finding(
            value=int(plan.layout.pp),
            limit=1,
            words=f"tied embeddings on {plan.layout.pp} pipeline stages",
            remedy="Set pp to 1, or train with untied embeddings.",
        )


TORCHTITAN_RULES: tuple[Rule, ...] = (
    *TORCHTITAN_SCHEDULE_RULES,
    WholeKvHeads(TORCHTITAN),
    TorchtitanSequence(),
    TorchtitanTiedEmbeddings(),
    TorchtitanArchitecture(),
    TorchtitanExpertShards(),
    TorchtitanTokenPrediction(),
)
