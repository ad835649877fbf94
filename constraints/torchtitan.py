"""What torchtitan refuses to start, beyond the general rules (read in torchtitan 0.3.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from constraints.attention_heads import WholeKvHeads
from constraints.columns import as_excess, column
from constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from constraints.torchtitan_model import (
    TorchtitanArchitecture,
    TorchtitanExpertShards,
    TorchtitanTokenPrediction,
)
from constraints.unsupported import AllowedPrecisions, AllowedValues, WholeModelRecompute
from costmodel.workload import Workload


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
        return Finding(
            rule=self.name,
            value=left,
            limit=0,
            unit=self.unit,
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
        return Finding(
            rule=self.name,
            value=int(plan.layout.pp),
            limit=1,
            unit=self.unit,
            words=f"tied embeddings on {plan.layout.pp} pipeline stages",
            remedy="Set pp to 1, or train with untied embeddings.",
        )


class TorchtitanMicroBatches(Rule):
    """pp > 1 without virtual stages: num_micro_batches >= pp.

    PyTorch's Schedule1F1B raises ValueError otherwise (torch 2.13, distributed/pipelining/schedules.py).
    """

    name = "torchtitan-micro-batches"
    unit = "micro-batches"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        pp = column(table, "pp")
        plain = (pp > 1) & (column(table, "vpp") == 1)
        return as_excess(np.where(plain, pp - column(table, "num_micro_batches"), 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        pp, count = int(plan.layout.pp), int(plan.layout.num_micro_batches)
        if pp == 1 or int(plan.layout.vpp) > 1 or count >= pp:
            return None
        return Finding(
            rule=self.name,
            value=count,
            limit=pp,
            unit=self.unit,
            words=f"{count} micro-batches on {pp} pipeline stages",
            remedy=f"Lower pp to {count} or less, or lower dp or micro_batch for more micro-batches.",
        )


RULES: tuple[Rule, ...] = (
    WholeKvHeads("torchtitan"),
    TorchtitanMicroBatches(),
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
