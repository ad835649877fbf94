"""What hierarchical context parallelism asks for: groups that swap heads for tokens inside rings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.context_groups import HIERARCHICAL, largest_swap
from meshwright.costmodel.workload import Workload


class HierarchicalContext(Rule):
    """Of a2a+p2p, cp mod A = 0, heads and kv_heads mod (tp A) = 0, no window and no attention sink.

    A ranks swap heads for tokens. Where it is not given, there has to be one between 1 and cp whose tp A GPUs
    lie in a scale-up domain or node. Megatron asserts that both sizes multiply to cp
    (megatron/training/arguments.py); Transformer Engine 2.15 views the heads of Q, K and V as A parts
    (flash_attn_a2a_communicate) and has neither sliding windows nor sinks under this exchange
    (pytorch/attention/dot_product_attention/context_parallel.py, attn_forward_func_with_cp).
    """

    name = "megatron-hierarchical-context"
    unit = "conditions"

    def applies(self, workload: Workload) -> bool:
        return workload.cp_comm == HIERARCHICAL

    def fields_read(self) -> frozenset[str]:
        return frozenset(("tp", "cp"))

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work, tp, cp = table.workload, column(table, "tp"), column(table, "cp")
        if not self.applies(work):
            return as_excess(np.zeros_like(tp))
        model, inner = work.model, work.cp_inner
        unlike = int(model.sliding_window is not None) + int(model.attention_sinks)
        if inner is None:
            broken = unlike + (largest_swap(work, tp, cp) == 1).astype(np.int64)
        else:
            whole = (cp % inner == 0).astype(np.int64)
            parted = (model.heads % (tp * inner) != 0) | (model.kv_heads % (tp * inner) != 0)
            broken = unlike + (1 - whole) + (parted & (inner > 1))
        return as_excess(np.where(cp > 1, broken, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, tp, cp = plan.workload, int(plan.layout.tp), int(plan.layout.cp)
        if not self.applies(work) or cp == 1:
            return None
        model, inner = work.model, work.cp_inner
        broken = ["sliding windows"] if model.sliding_window is not None else []
        if model.attention_sinks:
            broken.append("attention sinks")
        if inner is None:
            if not _sizes(work, tp, cp):
                broken.append(
                    f"group of ranks that tp {tp}, cp {cp}, heads and nodes leave room for"
                )
        else:
            if cp // inner * inner != cp:
                broken.append(f"{inner} ranks in a group of cp {cp}")
            if inner > 1 and _left_over(work, tp * inner):
                broken.append(
                    f"{model.heads} heads and {model.kv_heads} key-value heads over tp {tp} x {inner} ranks"
                )
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"hierarchical context parallelism has no {' and no '.join(broken)}",
            remedy="Pass keys and values round one ring (p2p), or lower tp.",
        )


def _left_over(work: Workload, ranks: int) -> bool:
    """Whether heads or key-value heads do not divide."""
    return any(
        number // ranks * ranks != number for number in (work.model.heads, work.model.kv_heads)
    )


def _sizes(work: Workload, tp: int, cp: int) -> list[int]:
    """Every group size that a plan may have."""
    cluster = work.cluster
    room = (cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node) // tp
    powers = [1 << bit for bit in range(1, cp.bit_length())]
    return [
        size
        for size in powers
        if size < cp
        and cp // size * size == cp
        and size <= room
        and not _left_over(work, tp * size)
    ]
