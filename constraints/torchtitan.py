"""What torchtitan refuses to start, beyond the general rules (read in torchtitan 0.3.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.attention_heads import whole_kv_heads
from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import AtLeast, AtMost, When, of
from meshwright.constraints.pipeline_schedules import TORCHTITAN_SCHEDULE_RULES
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.constraints.torchtitan_model import (
    TORCHTITAN_TOKEN_PREDICTION,
    TorchtitanArchitecture,
    TorchtitanExpertShards,
    TorchtitanExpertTensor,
)
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
        remainder = tokens - (tokens // parts) * parts
        if remainder == 0:
            return None
        return self.finding(
            value=remainder,
            words=f"{tokens} tokens do not divide into the {parts} pieces of tp {tp} and cp {cp}",
            remedy=f"Take tp and cp of which tp x 2 cp divides {tokens}.",
        )


TORCHTITAN_TIED_EMBEDDINGS = AtMost(
    name="torchtitan-tied-embeddings",
    sentence="pp <= 1 with tied embeddings: a pipeline cannot hold an embedding that the output layer shares",
    unit="pipeline stages",
    binds=lambda work: work.model.tied_embeddings,
    value=of("pp"),
    words="tied embeddings on {pp} pipeline stages",
    remedy="Set pp to 1, or train with untied embeddings.",
)

TORCHTITAN_CONTEXT_SHARDS = AtMost(
    name="torchtitan-context-shards",
    sentence="cp <= 1 where nothing is sharded: FSDP shards over context-parallel ranks too",
    unit="context-parallel ranks",
    when=(When("zero_stage", most=0),),
    value=of("cp"),
    words="ZeRO 0 on {cp} context-parallel ranks",
    remedy="Shard with ZeRO 2 or 3, or set cp to 1.",
)
"""`ParallelDims.fsdp_enabled` of torchtitan/distributed/parallel_dims.py."""

TORCHTITAN_SPREAD_EXPERTS = AtLeast(
    name="torchtitan-spread-experts",
    sentence="zero_stage >= 2 where ep spreads experts on dp 1 and cp 1, whose other ranks shard them",
    unit="stages of ZeRO",
    when=(When("ep", least=2), When("dp", most=1), When("cp", most=1)),
    value=of("zero_stage"),
    limit=of(number=2),
    words="ZeRO {zero_stage} with experts spread over ep {ep} of one replica",
    remedy="Shard with ZeRO 2 or 3.",
)
"""Experts are sharded over the ranks that ep leaves of dp, cp and tp, `efsdp` of
torchtitan/distributed/parallel_dims.py, which `parallelize` of every model hands to FSDP."""

TORCHTITAN_RULES: tuple[Rule, ...] = (
    *TORCHTITAN_SCHEDULE_RULES,
    whole_kv_heads(TORCHTITAN),
    TorchtitanSequence(),
    TORCHTITAN_TIED_EMBEDDINGS,
    TORCHTITAN_CONTEXT_SHARDS,
    TORCHTITAN_SPREAD_EXPERTS,
    TorchtitanArchitecture(),
    TorchtitanExpertShards(),
    TorchtitanExpertTensor(),
    TORCHTITAN_TOKEN_PREDICTION,
)
