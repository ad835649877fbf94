"""Tensor parallelism gives every rank whole attention heads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.layers import is_narrow
from meshwright.constraints.rule import (
    AtMost,
    Divides,
    Finding,
    FinishedPlan,
    LayoutTable,
    Requires,
    Rule,
    When,
    as_excess,
    column,
    of,
)
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.workload import HIERARCHICAL, Workload, largest_swap
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


# Which models Megatron's ways of context parallelism take; what groups that swap inside rings ask for.


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


# How a sequence is cut: by context parallelism, and again by sequence parallelism.


SEQUENCE_BY_CONTEXT = Divides(
    name="sequence-by-cp",
    sentence="seq_len mod 2 cp = 0 where cp > 1",
    unit="tokens left over",
    when=(When("cp", least=2),),
    number=of(number=lambda work: work.seq_len),
    by=of("cp", number=2),
    words="{number} tokens do not divide into the {divisor} chunks of cp {cp}",
    remedy="Take a cp of which twice divides {number}, or pad the sequences.",
)
"""Each rank takes one chunk from the front and one from the back, which evens out the causal mask. Megatron
and torchtitan refuse anything else. PyTorch (2.13, experimental/_context_parallel/_load_balancer.py), which
accelerate uses, silently falls back to plain chunks, of unequal length where cp does not divide the
sequence: left out by choice, the cost model prices equal work."""

SEQUENCE_BY_TENSOR = Divides(
    name="sequence-by-tp",
    sentence="seq_len mod (tp cp) = 0 under sequence parallelism",
    unit="tokens left over",
    when=(When("sequence_parallel", least=1),),
    number=of(number=lambda work: work.seq_len),
    by=of("tp", "cp"),
    words="{number} tokens do not divide by tp {tp} x cp {cp} under sequence parallelism",
    remedy="Take tp and cp whose product divides {number}, or turn sequence parallelism off.",
)

SEQUENCE_PARALLEL_NEEDS_TENSOR = Requires(
    name="sequence-parallel-needs-tp",
    sentence="tp > 1 where sequence parallelism is on: tp = 1 has nothing to share",
    unit="switches",
    when=(When("sequence_parallel", least=1),),
    needs=When("tp", least=2),
    words="sequence parallelism is on at tp 1, where it does nothing",
    remedy="Turn it off, or raise tp to 2 or more.",
)


# What Megatron-LM asks of attention to positions that an indexer chooses (megatron-core 0.19.2).


class MegatronSparseAttention(Rule):
    """Sparse attention on Hopper or Blackwell, with cp 1, no CUDA graphs, no multi-token prediction.

    cp_comm_type has to be allgather, which is not planned (transformer_config.py). AbsorbedMLA wants sequence
    parallelism beside tp, recomputes no up-projections in FP8 and reads its weights at 16 bits
    (experimental_attention_variant/absorbed_mla.py). pretrain_gpt.py asserts against modules of multi-token
    prediction (megatron/training/models/gpt.py, mtp_block_spec). FlashMLA is for the two architectures
    (dsa_cudnn_kernels.py), and recipes that use it capture no graphs (Megatron-Bridge,
    perf_recipes/glm_moe_dsa).
    """

    name = "megatron-sparse-attention"
    unit = "conditions"

    def applies(self, workload: Workload) -> bool:
        return workload.model.indexer is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work, tp = table.workload, column(table, "tp")
        if not self.applies(work):
            return as_excess(np.zeros_like(tp))
        narrow = is_narrow(work)
        of_run = int(work.cuda_graph != "none") + int(bool(work.fp8_params))
        of_run += int(work.model.mtp_layers > 0)
        of_run += int(work.cluster.device.architecture not in ("hopper", "blackwell"))
        recomputed = (column(table, "recompute") & int(Recompute.MLA_UP_PROJECTION)) != 0
        broken = of_run + (column(table, "cp") > 1) + (recomputed & narrow)
        return as_excess(broken + ((tp > 1) & (column(table, "sequence_parallel") == 0)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, layout = plan.workload, plan.layout
        if not self.applies(work):
            return None
        architecture, broken = work.cluster.device.architecture, []
        if work.cuda_graph != "none":
            broken.append(f"CUDA graphs ({work.cuda_graph})")
        if work.fp8_params:
            broken.append("parameters in FP8")
        if work.model.mtp_layers:
            broken.append("multi-token prediction")
        if architecture not in ("hopper", "blackwell"):
            broken.append(f"kernels for {architecture}")
        if int(layout.cp) > 1:
            broken.append(f"cp {int(layout.cp)}")
        if int(layout.recompute) & Recompute.MLA_UP_PROJECTION and is_narrow(work):
            broken.append(f"up-projections recomputed in {work.precision}")
        if int(layout.tp) > 1 and not layout.sequence_parallel:
            broken.append("tensor parallelism without sequence parallelism")
        if not broken:
            return None
        return self.finding(
            value=len(broken),
            words=f"sparse attention is planned with no {' and no '.join(broken)}",
            remedy="Set cp to 1 and mtp_layers to 0, on Hopper or Blackwell, without CUDA graphs and FP8 "
            "parameters; or plan the model with full attention, as deepseek_v3.",
        )
