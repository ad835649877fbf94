"""Which models Megatron's ways of context parallelism take; what groups that swap inside rings ask for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.columns import as_excess, column
from meshwright.constraints.kinds import AtMost, of
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.context_groups import HIERARCHICAL, largest_swap
from meshwright.costmodel.workload import Workload

WINDOWS_IN_CONTEXT = AtMost(
    name="megatron-context-windows",
    sentence="cp <= 1 where keys and values go round a ring (p2p) and layers have sliding windows",
    unit="context-parallel ranks",
    binds=lambda work: work.cp_comm == "p2p" and work.model.windowed_layers > 0,
    value=of("cp"),
    words="a ring of {cp} ranks (cp_comm p2p) for layers with sliding windows, which Transformer Engine "
    "refuses",
    remedy="Swap heads for tokens (--cp-comm-type a2a; tp x cp divides heads and key-value heads), or set cp "
    "to 1.",
)
"""Since Transformer Engine 1.11 (1.10 gathers wherever there is a window) windows ask for a2a or all_gather:
attn_forward_func_with_cp of pytorch/attention.py, since 2.3 of
pytorch/attention/dot_product_attention/context_parallel.py, read up to 2.18. It asks for the window alone,
also where sequences are shorter than that."""

SINKS_IN_CONTEXT = AtMost(
    name="megatron-context-sinks",
    sentence="cp <= 1 with attention sinks where no heads are swapped for tokens (p2p, all_gather)",
    unit="context-parallel ranks",
    binds=lambda work: work.cp_comm in ("p2p", "all_gather") and work.model.attention_sinks,
    value=of("cp"),
    words="cp {cp} without a swap of heads for attention with sinks, which Transformer Engine refuses",
    remedy="Swap heads for tokens (--cp-comm-type a2a; tp x cp divides heads and key-value heads), or set cp "
    "to 1.",
)
"""Transformer Engine has sinks (`softmax_type`) since 2.8, under context parallelism with a2a alone (the same
function, read up to 2.18)."""


class HierarchicalContext(Rule):
    """Of a2a+p2p, cp mod A = 0, heads and kv_heads mod (tp A) = 0, no window and no attention sink.

    A ranks swap heads for tokens. Where it is not given, there has to be one between 1 and cp whose tp A GPUs
    lie in a scale-up domain or node. Megatron asserts that both sizes multiply to cp
    (megatron/training/arguments.py); Transformer Engine 2.15 views the heads of Q, K and V as A parts
    (flash_attn_a2a_communicate) and has neither sliding windows nor sinks under this exchange, unless A is cp
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
        unlike = int(model.windowed_layers > 0) + int(model.attention_sinks)
        if inner is None:
            broken = unlike + (largest_swap(work, tp, cp) == 1).astype(np.int64)
        else:
            whole = (cp % inner == 0).astype(np.int64)
            parted = (model.heads % (tp * inner) != 0) | (model.kv_heads % (tp * inner) != 0)
            broken = unlike * (cp != inner) + (1 - whole) + (parted & (inner > 1))
        return as_excess(np.where(cp > 1, broken, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, tp, cp = plan.workload, int(plan.layout.tp), int(plan.layout.cp)
        if not self.applies(work) or cp == 1:
            return None
        model, inner = work.model, work.cp_inner
        broken = []
        if inner != cp:
            if model.sliding_window is not None and model.full_attention_layers < model.layers:
                broken.append("sliding windows")
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
