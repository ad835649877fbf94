"""What torchtitan refuses to start, beyond the general rules (read in torchtitan 0.3.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints import pipeline_schedules
from meshwright.constraints.attention_heads import WholeKvHeads
from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.constraints.torchtitan_model import (
    TorchtitanArchitecture,
    TorchtitanExpertShards,
    TorchtitanTokenPrediction,
)
from meshwright.constraints.unsupported import AllowedPrecisions, AllowedValues, WholeModelRecompute
from meshwright.costmodel.workload import Workload


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


RULES: tuple[Rule, ...] = (
    *pipeline_schedules.TORCHTITAN,
    WholeKvHeads("torchtitan"),
    TorchtitanSequence(),
    TorchtitanTiedEmbeddings(),
    TorchtitanArchitecture(),
    TorchtitanExpertShards(),
    TorchtitanTokenPrediction(),
    AllowedValues(
        "torchtitan-degrees",
        "torchtitan",
        {"etp": (1,), "zero_stage": (0, 2, 3)},
        "Experts have no tensor degree of their own (etp 1). Replicate (0), or shard with "
        "parallelism.fsdp_reshard_after_forward never (2) or always (3).",
    ),
    AllowedPrecisions("torchtitan", ("bf16", "fp8", "mxfp8")),
    WholeModelRecompute("torchtitan"),
)
