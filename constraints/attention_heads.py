"""Tensor parallelism gives every rank whole attention heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import Divides, When, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.record import Framework

HEADS_BY_TENSOR = Divides(
    name="heads-by-tp",
    sentence="heads mod tp = 0",
    unit="heads left over",
    number=of(number=lambda work: work.model.heads),
    by=of("tp"),
    words="{number} attention heads do not divide by tp {tp}",
    remedy="Take a tp that divides {number}.",
)
"""Megatron's parser and torchtitan's decoder refuse it; transformers 5.23 (LlamaAttention.forward) and
Megatron-DeepSpeed (4efb479, megatron/core/utils.py `divide`) fail as the model is built or run."""


def linear_key_heads(workload: Workload) -> int:
    """Heads of queries and keys in layers with linear attention; 0 without such layers."""
    linear = workload.model.linear_attention
    return 0 if linear is None else linear.key_heads


def _heads_swapped(workload: Workload) -> bool:
    """Whether context parallelism swaps heads for tokens, as DeepSpeed Ulysses does."""
    return workload.cp_comm == "a2a"


HEADS_BY_CONTEXT = Divides(
    name="heads-by-tp-cp",
    sentence="heads mod (tp cp) = 0 where context parallelism swaps heads for tokens",
    unit="heads left over",
    binds=_heads_swapped,
    when=(When("cp", least=2),),
    number=of(number=lambda work: work.model.heads),
    by=of("tp", "cp"),
    words="{number} attention heads do not divide by tp {tp} x cp {cp}",
    remedy="Lower cp or tp, or pass keys and values around a ring (p2p).",
)
KV_HEADS_BY_CONTEXT = Divides(
    name="kv-heads-by-tp-cp",
    sentence="kv_heads mod (tp cp) = 0 where context parallelism swaps heads for tokens",
    unit="heads left over",
    binds=_heads_swapped,
    when=(When("cp", least=2),),
    number=of(number=lambda work: work.model.kv_heads),
    by=of("tp", "cp"),
    words="{number} key-value heads do not divide by tp {tp} x cp {cp}",
    remedy="Lower cp or tp, or pass keys and values around a ring (p2p).",
)
"""Transformer Engine asserts both of a tensor rank's heads (pytorch/attention/dot_product_attention/
context_parallel.py, AttnFuncWithCPAndQKVOA2A.forward: num_heads % cp_size == 0 for Q, K, V)."""


LINEAR_HEADS = Divides(
    name="linear-heads-by-tp-cp",
    sentence="key heads of linear attention mod (tp cp) = 0",
    unit="heads left over",
    binds=lambda work: work.model.linear_attention is not None,
    number=of(number=linear_key_heads),
    by=of("tp", "cp"),
    words="{number} key heads of linear attention do not divide by tp {tp} x cp {cp}",
    remedy="Lower cp or tp.",
)
"""Asserted by Megatron's configuration, since context parallelism swaps tokens for these heads
(megatron/core/transformer/transformer_config.py, linear_num_key_heads % tp_cp_size)."""


class KvHeadsByTensor(Rule):
    """kv_heads mod tp = 0 or, with the heads copied, tp mod kv_heads = 0."""

    name = "kv-heads-by-tp"
    unit = "heads left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        groups, tp = table.workload.model.kv_heads, column(table, "tp")
        return as_excess(np.minimum(groups % tp, tp % groups))

    def check(self, plan: FinishedPlan) -> Finding | None:
        groups, tp = plan.workload.model.kv_heads, int(plan.layout.tp)
        small, large = sorted((groups, tp))
        remainder = large - (large // small) * small
        if remainder == 0:
            return None
        return self.finding(
            value=remainder,
            words=f"{groups} key-value heads are neither a multiple nor a divisor of tp {tp}",
            remedy=f"Take a tp that divides {groups} or is a multiple of it.",
        )


def whole_kv_heads(framework: Framework) -> Divides:
    """The rule of frameworks that never copy key and value heads.

    torchtitan 0.3.0 refuses it (models/common/decoder.py). transformers 5.23, which accelerate trains with,
    splits the projection evenly and then cannot view a rank's part as heads (LlamaAttention.forward).
    """
    return Divides(
        name=f"{framework.name}-kv-heads",
        sentence="kv_heads mod tp = 0",
        unit="heads left over",
        number=of(number=lambda work: work.model.kv_heads),
        by=of("tp"),
        words="{number} key-value heads do not divide by tp {tp}",
        remedy="Take a tp that divides {number}.",
    )
