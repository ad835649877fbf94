"""What every rule finds, to the number: at the limit nothing, beyond it by how much."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from meshwright.constraints.fabric import ScaleUpDomain, keeps_inside
from meshwright.constraints.frameworks import AllowedDegrees, foreign_parts
from meshwright.constraints.megatron import refused_recompute
from meshwright.constraints.registry import findings, rule_named, rules_for, rules_of
from meshwright.constraints.rule import (
    AtLeast,
    AtMost,
    Divides,
    Equals,
    Finding,
    FinishedPlan,
    Requires,
    When,
    of,
    set_bits,
    spans_of,
)
from meshwright.costmodel.layout import Layout, Placement, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.record import Framework
from meshwright.model_specs.blocks import MoeSpec
from meshwright.model_specs.reader import Flavor, flavors
from tests.constraints.test_constraints_rules import (
    BIASED,
    DENSE,
    HYBRID,
    LINEAR,
    MOE,
    RULES,
    SINKS,
    WINDOWED,
    as_table,
    cluster,
    finished,
    workload,
)

MTP_2 = MOE.model_copy(update={"mtp_layers": 2})
MTP_1 = MOE.model_copy(update={"mtp_layers": 1})
OVERLAPPED = workload(MOE, ep_overlap=True)
GELU_LEARNED = DENSE.model_copy(update={"activation": "gelu", "position": "learned"})
DEEPEP_ON_VOLTA = workload(MOE, cluster=cluster("volta"), moe_dispatch="deepep")
DELAYED = workload(precision="fp8", fp8_recipe="delayed")
CAPTURED = workload(MOE, cuda_graph="full", moe_dispatch="hybridep", precision="mxfp8")
FULL = int(Recompute.FULL)
OFFLOADED = workload(MOE, offload_modules="core_attn+expert_fc1")
GATHERED = workload(MOE, moe_dispatch="allgather")
HIERARCHICAL = "megatron-hierarchical-context"
GROUPED = workload(cp_comm="a2a+p2p")
LOOKS_BACK = WINDOWED.model_copy(update={"attention_sinks": True})
FULL_EVERYWHERE = WINDOWED.model_copy(update={"full_attention_every": 1})
RING_OF_WINDOWS = "megatron-context-windows"
RING_WITH_SINKS = "megatron-context-sinks"

# rule, workload, layout, how far it is over the limit (0: at the limit), words of the finding
CASES: list[tuple[str, Workload, dict[str, Any], int, str]] = [
    ("gpu-budget", workload(gpus=64), {"tp": 2, "cp": 2, "pp": 4, "dp": 4}, 0, ""),
    ("gpu-budget", workload(gpus=64), {"tp": 5, "cp": 13}, 1, "= 65 GPUs, of 64"),
    ("scale-up-tp", workload(), {"tp": 8}, 0, ""),
    ("scale-up-tp", workload(), {"tp": 9}, 1, "a scale-up domain of 8"),
    ("scale-up-tp", workload(cluster=cluster(nvlink_domain=2)), {"tp": 3}, 1, "domain of 2"),
    ("scale-up-tp", workload(cluster=cluster(nvlink_domain=1)), {"tp": 9}, 1, "a node of 8"),
    ("scale-up-tp-cp", workload(), {"tp": 3, "cp": 4}, 4, "tp 3 x cp 4 = 12 GPUs"),
    ("heads-by-tp", workload(), {"tp": 5}, 1, "16 attention heads"),
    ("kv-heads-by-tp", workload(), {"tp": 4}, 0, ""),
    ("kv-heads-by-tp", workload(), {"tp": 2}, 0, ""),
    ("kv-heads-by-tp", workload(), {"tp": 3}, 1, "4 key-value heads"),
    ("kv-heads-by-tp", workload(), {"tp": 7}, 3, "tp 7"),
    ("kv-heads-by-tp", workload(), {"tp": 11}, 3, "tp 11"),
    ("heads-by-tp-cp", workload(cp_comm="a2a"), {"tp": 3, "cp": 1}, 0, ""),
    ("heads-by-tp-cp", workload(cp_comm="a2a"), {"tp": 1, "cp": 3}, 1, "16 attention heads"),
    ("heads-by-tp-cp", workload(), {"cp": 3}, 0, ""),
    ("kv-heads-by-tp-cp", workload(cp_comm="a2a"), {"tp": 3, "cp": 1}, 0, ""),
    ("kv-heads-by-tp-cp", workload(cp_comm="a2a"), {"cp": 3}, 1, "4 key-value heads"),
    (HIERARCHICAL, GROUPED, {"tp": 1, "cp": 1}, 0, ""),
    (HIERARCHICAL, GROUPED, {"tp": 2, "cp": 4}, 0, ""),
    (HIERARCHICAL, GROUPED, {"tp": 2, "cp": 2}, 1, "tp 2, cp 2"),
    (HIERARCHICAL, GROUPED, {"tp": 1, "cp": 6}, 0, ""),
    (HIERARCHICAL, GROUPED, {"tp": 1, "cp": 9}, 1, "tp 1, cp 9"),
    (HIERARCHICAL, workload(cp_comm="a2a+p2p", cp_inner=1), {"tp": 4, "cp": 2}, 0, ""),
    (HIERARCHICAL, workload(cp_comm="a2a+p2p", cp_inner=4), {"tp": 1, "cp": 4}, 0, ""),
    (HIERARCHICAL, workload(cp_comm="a2a+p2p", cp_inner=4), {"tp": 1, "cp": 6}, 1, "cp 6"),
    (HIERARCHICAL, workload(cp_comm="a2a+p2p", cp_inner=4), {"tp": 2, "cp": 8}, 1, "tp 2 x 4"),
    (HIERARCHICAL, workload(cp_comm="a2a+p2p", cp_inner=8), {"tp": 2, "cp": 4}, 2, "cp 4"),
    (HIERARCHICAL, workload(LOOKS_BACK, cp_comm="a2a+p2p"), {"cp": 8}, 2, "windows and no att"),
    (HIERARCHICAL, workload(LOOKS_BACK, cp_comm="a2a+p2p", cp_inner=2), {"cp": 4}, 2, "no att"),
    (HIERARCHICAL, workload(LOOKS_BACK, cp_comm="a2a+p2p", cp_inner=4), {"cp": 4}, 0, ""),
    (HIERARCHICAL, workload(FULL_EVERYWHERE, cp_comm="a2a+p2p"), {"cp": 8}, 0, ""),
    (HIERARCHICAL, workload(LOOKS_BACK), {"cp": 8}, 0, ""),
    (RING_OF_WINDOWS, workload(WINDOWED), {"cp": 2}, 1, "Transformer Engine refuses"),
    (RING_OF_WINDOWS, workload(WINDOWED), {"tp": 8, "cp": 1}, 0, ""),
    (RING_OF_WINDOWS, workload(WINDOWED, seq_len=256), {"cp": 4}, 3, "a ring of 4 ranks"),
    (RING_OF_WINDOWS, workload(WINDOWED, cp_comm="a2a"), {"cp": 2}, 0, ""),
    (RING_OF_WINDOWS, workload(WINDOWED, cp_comm="all_gather"), {"cp": 2}, 0, ""),
    (RING_OF_WINDOWS, workload(FULL_EVERYWHERE), {"cp": 2}, 0, ""),
    (RING_OF_WINDOWS, workload(SINKS), {"cp": 2}, 0, ""),
    (RING_WITH_SINKS, workload(SINKS), {"cp": 2}, 1, "cp 2 without a swap"),
    (RING_WITH_SINKS, workload(SINKS, cp_comm="all_gather"), {"cp": 3}, 2, "cp 3"),
    (RING_WITH_SINKS, workload(SINKS, cp_comm="a2a"), {"cp": 4}, 0, ""),
    (RING_WITH_SINKS, workload(SINKS), {"cp": 1}, 0, ""),
    (RING_WITH_SINKS, workload(WINDOWED), {"cp": 2}, 0, ""),
    ("fsdp2-context-mask", workload(SINKS), {"cp": 4}, 3, "causal masks alone"),
    ("fsdp2-context-mask", workload(WINDOWED), {"cp": 2}, 1, "cp 2"),
    ("fsdp2-context-mask", workload(), {"cp": 2}, 0, ""),
    ("linear-heads-by-tp-cp", workload(LINEAR), {"tp": 3}, 2, "8 key heads"),
    ("linear-heads-by-tp-cp", workload(), {"tp": 3}, 0, ""),
    ("ffn-by-tp", workload(), {"tp": 7}, 1, "ffn_hidden 4096"),
    ("ffn-by-tp", workload(BIASED), {"tp": 5}, 0, ""),
    ("expert-ffn-by-etp", workload(MOE), {"etp": 5}, 3, "expert width 768"),
    ("sequence-by-cp", workload(seq_len=36), {"cp": 1}, 0, ""),
    ("sequence-by-cp", workload(seq_len=36), {"cp": 2}, 0, ""),
    ("sequence-by-cp", workload(seq_len=38), {"cp": 2}, 2, "the 4 chunks of cp 2"),
    ("sequence-by-tp", workload(seq_len=38), {"tp": 4}, 0, ""),
    ("sequence-by-tp", workload(seq_len=38), {"tp": 4, "sequence_parallel": True}, 2, "tp 4"),
    ("layers-by-stages", workload(), {"pp": 12}, 0, ""),
    ("experts-by-ep", workload(MOE), {"ep": 7}, 3, "24 experts"),
    ("expert-grid", workload(MOE), {"tp": 2, "cp": 3, "dp": 5, "ep": 4}, 2, "the 30 GPUs"),
    ("expert-axes-need-experts", workload(), {"ep": 2, "etp": 3}, 5, "ep 2 and etp 3"),
    ("batch-split", workload(), {"dp": 5, "micro_batch": 19}, 1, "= 95 sequences"),
    ("batch-split", workload(), {"dp": 97}, 1, "= 97 sequences"),
    ("vpp-needs-pp", workload(), {"pp": 1, "vpp": 3}, 2, "vpp 3"),
    ("interleaved-micro-batches", workload(), {"pp": 4, "vpp": 1, "num_micro_batches": 7}, 0, ""),
    ("interleaved-micro-batches", workload(), {"pp": 4, "vpp": 2, "num_micro_batches": 7}, 3, "7"),
    ("schedule-shape", workload(), {"pp": 1, "schedule": 1}, 1, "is a schedule of a pipeline"),
    ("schedule-shape", workload(), {"pp": 2, "vpp": 2, "schedule": 1}, 1, "gpipe takes 1 virtual"),
    ("schedule-shape", workload(), {"pp": 2, "schedule": 2, "num_micro_batches": 2}, 1, "vpp: 1"),
    (
        "schedule-shape",
        workload(),
        {"pp": 3, "vpp": 3, "schedule": 4, "num_micro_batches": 5},
        2,
        "num_micro_batches: 5, zbv needs 6",
    ),
    ("schedule-shape", workload(), {"pp": 2, "schedule": 6, "num_micro_batches": 4}, 0, ""),
    ("schedule-shape", workload(), {"pp": 2, "schedule": 6, "num_micro_batches": 5}, 1, "even"),
    ("schedule-shape", workload(), {"pp": 3, "schedule": 6, "num_micro_batches": 6}, 1, "even"),
    ("torchtitan-1f1b-micro-batches", workload(), {"pp": 4, "num_micro_batches": 3}, 1, "4 stages"),
    ("torchtitan-1f1b-micro-batches", workload(), {"pp": 4, "vpp": 2}, 0, ""),
    ("torchtitan-1f1b-micro-batches", workload(), {"pp": 2, "schedule": 1}, 0, ""),
    ("torchtitan-zero-bubble-chunks", workload(), {"pp": 2, "schedule": 3}, 1, "one virtual stage"),
    ("torchtitan-split-backward", workload(), {"pp": 2, "schedule": 3}, 0, ""),
    (
        "torchtitan-split-backward",
        workload(framework="torchtitan-compile"),
        {"pp": 2, "schedule": 3},
        1,
        "zb-h1 with compiled layers (bf16)",
    ),
    ("recomputed-modules", workload(), {"recompute": 4 | 8 | 1}, 2, "moe activation, mla up"),
    ("recomputed-modules", workload(), {"recompute": 128}, 1, "experts, which"),
    ("recomputed-modules", workload(MOE), {"recompute": 255}, 0, ""),
    ("recomputed-modules", workload(MOE), {"recompute": 256 | 512}, 2, "bit 8, bit 9"),
    ("full-recompute-alone", workload(), {"recompute": FULL | 2 | 16}, 2, "2 single module(s)"),
    ("full-recompute-alone", workload(), {"recompute": 31}, 0, ""),
    ("full-recompute-alone", workload(), {"recompute": FULL | 64}, 1, "1 single module(s)"),
    ("megatron-zero-needs-pp-1", workload(), {"zero_stage": 2, "pp": 3}, 2, "ZeRO stage 2"),
    ("megatron-zero-optimizer", workload(optimizer="sgd"), {"zero_stage": 3}, 0, ""),
    ("megatron-zero-optimizer", workload(optimizer="adam"), {"zero_stage": 3}, 0, ""),
    ("megatron-zero-optimizer", workload(optimizer="muon"), {"zero_stage": 3}, 2, "muon"),
    ("megatron-moe-tp-needs-sp", workload(MOE), {"tp": 1}, 0, ""),
    ("megatron-moe-tp-needs-sp", workload(), {"tp": 2}, 0, ""),
    ("megatron-expert-bias-needs-etp-1", workload(MOE), {"etp": 2}, 0, ""),
    ("megatron-expert-bias-needs-etp-1", workload(BIASED), {"etp": 3}, 2, "etp 3"),
    (
        "megatron-expert-bias-needs-etp-1",
        workload(MOE.model_copy(update={"mlp_bias": True})),
        {"etp": 2},
        1,
        "etp 2",
    ),
    (
        "megatron-expert-bias-needs-etp-1",
        workload(DENSE.model_copy(update={"mlp_bias": True})),
        {"etp": 2},
        0,
        "",
    ),
    ("megatron-flex-dispatcher", workload(MOE, moe_dispatch="deepep"), {"dp": 2}, 1, "one rank"),
    ("megatron-flex-dispatcher", workload(MOE, moe_dispatch="deepep"), {"etp": 2}, 0, ""),
    ("megatron-flex-dispatcher", workload(MOE, moe_dispatch="alltoall"), {"dp": 2}, 0, ""),
    ("megatron-flex-dispatcher", workload(moe_dispatch="deepep"), {"dp": 2}, 0, ""),
    ("megatron-tp-overlap", workload(tp_overlap=True), {"tp": 2}, 0, ""),
    ("megatron-tp-overlap", workload(MOE), {"tp": 2}, 0, ""),
    ("megatron-narrow-states", workload(moment_dtype="fp32"), {}, 0, ""),
    ("megatron-narrow-states", workload(moment_dtype="bf16"), {}, 1, "ZeRO stage 0"),
    ("megatron-narrow-states", workload(fp8_params=True), {}, 1, "ZeRO stage 0"),
    ("megatron-expert-overlap", OVERLAPPED, {"ep": 1, "num_micro_batches": 2}, 1, "under ep 1"),
    ("megatron-expert-overlap", OVERLAPPED, {"ep": 2, "pp": 2}, 1, "pp 2 without virtual stages"),
    ("megatron-expert-overlap", OVERLAPPED, {"ep": 2}, 1, "under one micro-batch"),
    ("megatron-expert-overlap", OVERLAPPED, {"ep": 2, "pp": 2, "vpp": 2, "recompute": 31}, 0, ""),
    (
        "megatron-expert-overlap",
        OVERLAPPED,
        {"ep": 1, "pp": 3, "recompute": FULL},
        3,
        "ep 1 and pp 3 without virtual stages and full recomputation",
    ),
    (
        "megatron-expert-overlap",
        OVERLAPPED,
        {"ep": 2, "num_micro_batches": 2, "recompute": 128},
        1,
        "under recomputation of whole experts",
    ),
    (
        "megatron-expert-overlap",
        replace(OVERLAPPED, model=MTP_2),
        {"ep": 2, "num_micro_batches": 2},
        1,
        "2 MTP modules",
    ),
    (
        "megatron-expert-overlap",
        replace(OVERLAPPED, model=MTP_1),
        {"ep": 2, "num_micro_batches": 2},
        0,
        "",
    ),
    ("megatron-expert-overlap", workload(ep_overlap=True), {}, 0, ""),
    ("megatron-partial-graphs", workload(), {"recompute": FULL}, 0, ""),
    (
        "megatron-partial-graphs",
        workload(cuda_graph="feed_forward"),
        {"recompute": FULL},
        1,
        "full",
    ),
    ("megatron-partial-graphs", workload(cuda_graph="partial"), {"recompute": 2}, 0, ""),
    (
        "megatron-partial-graphs",
        workload(MOE, cuda_graph="partial"),
        {"recompute": 128},
        1,
        "recomputation of whole experts does not go",
    ),
    (
        "megatron-partial-graphs",
        workload(MOE, cuda_graph="partial", moe_dispatch="deepep"),
        {"recompute": 2},
        1,
        "recomputation of the norms before experts",
    ),
    (
        "megatron-full-graph",
        workload(MOE, cuda_graph="full", moe_dispatch="alltoall"),
        {"etp": 2, "recompute": 4},
        3,
        "the alltoall dispatcher and etp 2 and recomputed experts",
    ),
    (
        "megatron-full-graph",
        workload(
            MOE.model_copy(update={"activation": "gelu"}),
            cuda_graph="full",
            moe_dispatch="hybridep",
            precision="mxfp8",
        ),
        {},
        1,
        "experts without a gate",
    ),
    (
        "megatron-full-graph",
        workload(MOE, cuda_graph="full", moe_dispatch="hybridep", precision="nvfp4"),
        {},
        1,
        "experts in nvfp4",
    ),
    ("megatron-full-graph", workload(MOE), {"etp": 2}, 0, ""),
    ("megatron-delayed-scaling", workload(MOE, precision="fp8"), {"recompute": 2}, 0, ""),
    ("megatron-delayed-scaling", workload(fp8_recipe="delayed"), {"recompute": 2}, 0, ""),
    ("megatron-delayed-scaling", DELAYED, {"recompute": 1 | 8 | 16 | 32 | 64}, 0, ""),
    ("megatron-delayed-scaling", DELAYED, {"recompute": 2}, 1, "norms or expert activations"),
    ("megatron-delayed-scaling", DELAYED, {"recompute": 4}, 1, "norms or expert activations"),
    ("megatron-offload-recompute", OFFLOADED, {"recompute": FULL | 64}, 1, "recomputed in full"),
    ("megatron-offload-recompute", OFFLOADED, {"recompute": 31 | 64}, 0, ""),
    ("megatron-offload-up-projection", OFFLOADED, {"recompute": 8 | 64}, 1, "recomputed as well"),
    ("megatron-offload-up-projection", OFFLOADED, {"recompute": FULL | 23}, 0, ""),
    (
        "megatron-offload-up-projection",
        workload(MOE, offload_modules="moe_act"),
        {"recompute": 8},
        0,
        "",
    ),
    (
        "megatron-offload-experts",
        workload(MOE, offload_modules="moe_act"),
        {"recompute": 128 | 2},
        1,
        "experts offloaded that are recomputed as well",
    ),
    (
        "megatron-offload-experts",
        workload(MOE, offload_modules="core_attn"),
        {"recompute": 128},
        0,
        "",
    ),
    ("megatron-offloaded-modules", OFFLOADED, {}, 0, ""),
    (
        "megatron-offloaded-modules",
        workload(offload_modules="moe_act"),
        {},
        1,
        "offloading moe_act does not go with a model without experts",
    ),
    (
        "megatron-offloaded-modules",
        workload(LINEAR, offload_modules="core_attn", cuda_graph="full"),
        {},
        2,
        "linear or sparse attention and a CUDA graph of the whole step",
    ),
    (
        "megatron-offloaded-modules",
        workload(LINEAR, offload_modules="expert_fc1", cuda_graph="partial"),
        {},
        1,
        "a model without experts",
    ),
    (
        "megatron-offloaded-modules",
        workload(HYBRID, offload_modules="core_attn"),
        {},
        1,
        "Mamba blocks",
    ),
    ("megatron-full-graph", CAPTURED, {"recompute": 4 | 8}, 1, "hold recomputed experts"),
    ("megatron-full-graph", CAPTURED, {"recompute": FULL | 64}, 1, "hold recomputed experts"),
    ("megatron-full-graph", CAPTURED, {"recompute": 1 | 2 | 8 | 16 | 64}, 0, ""),
    (
        "megatron-partial-graphs",
        workload(cuda_graph="partial"),
        {"recompute": FULL | 64},
        1,
        "full recomputation",
    ),
    ("megatron-partial-graphs", workload(cuda_graph="partial"), {"recompute": 64 | 31}, 0, ""),
    (
        "megatron-expert-overlap",
        OVERLAPPED,
        {"ep": 2, "pp": 2, "vpp": 2, "recompute": FULL | 64},
        1,
        "full recomputation",
    ),
    ("torchtitan-kv-heads", workload(), {"tp": 3}, 1, "4 key-value heads"),
    (
        "torchtitan-sequence",
        workload(seq_len=50),
        {"tp": 3, "sequence_parallel": True},
        2,
        "the 3 pieces",
    ),
    ("torchtitan-sequence", workload(seq_len=50), {"tp": 3}, 0, ""),
    ("torchtitan-sequence", workload(seq_len=50), {"cp": 3}, 2, "the 6 pieces"),
    ("torchtitan-sequence", workload(seq_len=50), {"cp": 2}, 2, "the 4 pieces"),
    ("torchtitan-sequence", workload(seq_len=51), {}, 0, ""),
    ("torchtitan-context-shards", workload(), {"cp": 3}, 2, "3 context-parallel ranks"),
    ("torchtitan-context-shards", workload(), {"cp": 3, "zero_stage": 1}, 0, ""),
    ("torchtitan-expert-shards", workload(MOE), {"tp": 3, "cp": 5, "ep": 4}, 3, "15 ranks"),
    (
        "torchtitan-expert-shards",
        workload(MOE),
        {"zero_stage": 1, "dp": 2, "tp": 3, "cp": 5, "ep": 4},
        2,
        "30 ranks",
    ),
    ("torchtitan-spread-experts", workload(MOE), {"tp": 2, "ep": 2}, 2, "over ep 2 of one replica"),
    ("torchtitan-spread-experts", workload(MOE), {"tp": 2, "ep": 2, "dp": 2}, 0, ""),
    (
        "torchtitan-expert-shards",
        workload(MOE),
        {"zero_stage": 3, "dp": 8, "shard_groups": 4, "ep": 4},
        2,
        "2 ranks",
    ),
    (
        "replicas-by-shard-groups",
        workload(),
        {"dp": 5, "cp": 3, "shard_groups": 4},
        3,
        "15 replicas",
    ),
    (
        "replicas-by-shard-groups",
        workload(),
        {"dp": 5, "cp": 3, "shard_groups": 15},
        0,
        "",
    ),
    ("shard-groups-of-several", workload(), {"dp": 5, "shard_groups": 5}, 5, "5 groups of 5"),
    ("shard-groups-of-several", workload(), {"dp": 5, "cp": 2, "shard_groups": 5}, 0, ""),
    ("shard-groups-need-zero", workload(), {"shard_groups": 3}, 2, "3 shard groups"),
    ("shard-groups-need-zero", workload(), {"zero_stage": 1, "shard_groups": 3}, 0, ""),
    (
        "megatron-expert-shard-groups",
        workload(MOE),
        {"tp": 3, "dp": 5, "ep": 2, "shard_groups": 4},
        7,
        "15 ranks of a stage",
    ),
    ("megatron-expert-shard-groups", workload(MOE), {"dp": 5, "ep": 3, "shard_groups": 1}, 0, ""),
    (
        "megatron-shard-groups-optimizer",
        workload(optimizer="muon"),
        {"shard_groups": 5},
        4,
        "the muon optimizer",
    ),
    ("offloaded-share", workload(), {"optimizer_offload": 103}, 3, "103 %"),
    ("megatron-offload-zero", workload(), {"optimizer_offload": 25}, 1, "ZeRO 0"),
    ("megatron-offload-zero", workload(), {"optimizer_offload": 25, "zero_stage": 1}, 0, ""),
    ("megatron-offload-adam", workload(moment_dtype="bf16"), {"optimizer_offload": 75}, 75, "75 %"),
    ("megatron-offload-adam", workload(), {"optimizer_offload": 75}, 0, ""),
    ("deepspeed-offload-zero", workload(), {"optimizer_offload": 100}, 1, "ZeRO 0"),
    ("deepspeed-offload-zero", workload(), {"optimizer_offload": 100, "zero_stage": 2}, 0, ""),
    ("deepspeed-offload-whole", workload(), {"optimizer_offload": 50, "zero_stage": 3}, 1, "50 %"),
    ("fsdp-offload-zero", workload(), {"optimizer_offload": 100, "zero_stage": 2}, 1, "ZeRO 2"),
    ("fsdp-offload-zero", workload(), {"optimizer_offload": 100, "zero_stage": 3}, 0, ""),
    ("fsdp-offload-shards", workload(), {"optimizer_offload": 100, "dp": 1}, 1, "dp 1"),
    ("fsdp-offload-shards", workload(), {"optimizer_offload": 100, "dp": 2}, 0, ""),
    ("fsdp-offload-whole", workload(), {"optimizer_offload": 50, "zero_stage": 3}, 1, "50 %"),
    ("fsdp-offload-whole", workload(), {"optimizer_offload": 100, "zero_stage": 3}, 0, ""),
    ("fsdp-offload-adam", workload(precision="fp16"), {"optimizer_offload": 100}, 100, "fp16"),
    ("fsdp-offload-adam", workload(precision="bf16"), {"optimizer_offload": 100}, 0, ""),
    ("deepspeed-offload-whole", workload(), {"optimizer_offload": 100, "zero_stage": 3}, 0, ""),
    ("deepspeed-offload-adam", workload(optimizer="sgd"), {"optimizer_offload": 100}, 100, "sgd"),
    ("deepspeed-offload-adam", workload(precision="fp16"), {"optimizer_offload": 100}, 0, ""),
    ("megatron-offload-fp8", workload(fp8_params=True), {"optimizer_offload": 50}, 50, "50 %"),
    ("torchtitan-shard-groups", workload(), {"dp": 7, "shard_groups": 4}, 3, "dp 7"),
    ("fsdp2-shard-groups", workload(), {"dp": 7, "shard_groups": 5}, 2, "dp 7"),
    ("fsdp2-whole-groups", workload(), {"dp": 7, "shard_groups": 4}, 1, "4 groups of dp 7"),
    ("fsdp2-whole-groups", workload(), {"dp": 1, "shard_groups": 1}, 0, ""),
    ("torchtitan-expert-tensor", workload(MOE), {"tp": 4}, 3, "where torchtitan has 4"),
    ("torchtitan-expert-tensor", workload(MOE), {"tp": 4, "etp": 4}, 0, ""),
    ("torchtitan-expert-tensor", workload(MOE), {"tp": 4, "ep": 2, "etp": 4}, 3, "has 1"),
    ("torchtitan-expert-tensor", workload(MOE), {"tp": 4, "ep": 2}, 0, ""),
    ("torchtitan-mtp", workload(MTP_1), {"pp": 2, "cp": 2}, 3, "pp 2 and cp 2"),
    ("deepspeed-experts", workload(MOE), {"dp": 8, "ep": 3}, 2, "ep 3 of dp 8"),
    ("deepspeed-experts", workload(MOE), {"dp": 8, "ep": 3, "pp": 3}, 4, "pp 3 stages"),
    ("deepspeed-experts", workload(MOE), {"dp": 8, "ep": 4, "pp": 2}, 1, "pp 2 stages"),
    ("deepspeed-pipeline-zero", workload(), {"pp": 2, "zero_stage": 3}, 2, "ZeRO stage 3"),
    ("deepspeed-pipeline-zero", workload(), {"zero_stage": 3}, 0, ""),
    (
        "deepspeed-degrees",
        workload(),
        {"cp": 2, "vpp": 2, "sequence_parallel": True},
        3,
        "cp 2 (only 1); vpp 2 (only 1); sequence_parallel 1 (only 0)",
    ),
    ("torchtitan-degrees", workload(), {"zero_stage": 1}, 1, "zero_stage 1 (only 0, 2, 3)"),
    ("fsdp2-shards", workload(), {"tp": 3}, 2, "tp 3"),
    ("fsdp2-shards", workload(), {"tp": 3, "dp": 2}, 0, ""),
    ("fsdp2-shards", workload(), {"tp": 3, "cp": 2}, 0, ""),
    ("precision-on-device", workload(precision="int4"), {}, 1, "no int4 matrix units"),
    ("torchtitan-precision", workload(precision="fp16"), {}, 1, "no training in fp16"),
    ("torchtitan-linear-attention", workload(LINEAR), {}, 1, "the 9 layers"),
    ("torchtitan-architecture", workload(GELU_LEARNED), {}, 2, "position learned, activation gelu"),
    ("deepspeed-schedule", workload(), {"schedule": 1}, 1, "no gpipe schedule"),
    ("megatron-allgather-dispatcher", workload(), {}, 0, ""),
    ("megatron-allgather-dispatcher", workload(moe_dispatch="allgather"), {}, 0, ""),
    ("megatron-allgather-dispatcher", GATHERED, {"ep": 2}, 0, ""),
    ("megatron-allgather-dispatcher", replace(GATHERED, precision="fp8"), {}, 1, "tokens in fp8"),
    (
        "megatron-allgather-dispatcher",
        replace(GATHERED, precision="mxfp8", ep_overlap=True),
        {"ep": 2},
        2,
        "communication and with tokens in mxfp8",
    ),
    ("megatron-flex-dispatcher", GATHERED, {}, 0, ""),
    ("megatron-dispatcher-device", workload(), {}, 0, ""),
    ("megatron-dispatcher-device", workload(moe_dispatch="deepep"), {}, 0, ""),
    ("megatron-dispatcher-device", DEEPEP_ON_VOLTA, {}, 1, "deepep does not run on a device"),
    ("fsdp2-recompute", workload(), {"recompute": FULL, "recompute_layers": 12}, 0, ""),
    ("fsdp2-recompute", workload(), {"recompute": FULL, "recompute_layers": 11}, 1, "some layers"),
    ("fsdp2-recompute", workload(), {"recompute": 1}, 1, "single modules"),
    (
        "torchtitan-recompute",
        workload(),
        {"pp": 2, "vpp": 2, "recompute": FULL, "recompute_layers": 3},
        0,
        "",
    ),
    (
        "torchtitan-recompute",
        workload(),
        {"pp": 5, "recompute": FULL, "recompute_layers": 2},
        1,
        "some layers only",
    ),
]


@pytest.mark.parametrize(
    ("name", "work", "degrees", "over", "words"), CASES, ids=[case[0] for case in CASES]
)
def test_a_rule_is_over_by_so_much_and_says_so(
    name: str, work: Workload, degrees: dict[str, Any], over: int, words: str
) -> None:
    rule, layout = RULES[name], Layout(**degrees)
    assert rule.excess(as_table(work, [layout], [1.0])).tolist() == [over]
    finding = rule.check(finished(work, layout, 1.0))
    assert (finding is None) == (over == 0)
    if finding is not None:
        assert abs(finding.value - finding.limit) == over
        assert words in finding.words


@pytest.mark.parametrize(
    ("name", "applies", "silent"),
    [
        ("bisection", workload(max_cut_use=0.99), workload()),
        ("nvlink-domain", workload(inside_domain=("cp",)), workload()),
        ("linear-heads-by-tp-cp", workload(LINEAR), workload()),
        ("heads-by-tp-cp", workload(cp_comm="a2a"), workload()),
        ("expert-axes-need-experts", workload(), workload(MOE)),
        ("deepspeed-experts", workload(MOE), workload()),
        ("torchtitan-expert-shards", workload(MOE), workload()),
        ("torchtitan-expert-tensor", workload(MOE), workload()),
        ("torchtitan-split-backward", workload(precision="fp8"), workload()),
        ("megatron-dispatcher-device", workload(MOE, moe_dispatch="deepep"), workload()),
        ("megatron-partial-graphs", workload(cuda_graph="partial"), workload(cuda_graph="full")),
        ("megatron-full-graph", workload(MOE, cuda_graph="full"), workload(cuda_graph="full")),
        ("megatron-full-graph", workload(MOE, cuda_graph="full"), workload(MOE)),
        ("megatron-full-graph", CAPTURED, workload(MOE, cuda_graph="feed_forward")),
        ("megatron-expert-overlap", OVERLAPPED, workload(ep_overlap=True)),
        ("megatron-expert-overlap", OVERLAPPED, workload(MOE)),
    ],
)
def test_a_rule_applies_where_it_has_something_to_say(
    name: str, applies: Workload, silent: Workload
) -> None:
    assert RULES[name].applies(applies)
    assert not RULES[name].applies(silent)


@pytest.mark.parametrize(
    ("work", "refused"),
    [
        (workload(), ()),
        (OVERLAPPED, (FULL, FULL | 64)),
        (workload(cuda_graph="partial"), (FULL, FULL | 64)),
        (workload(cuda_graph="full"), ()),
        (CAPTURED, (4, FULL, FULL | 64)),
        (replace(CAPTURED, moe_dispatch="alltoall"), (0, 2, 4, FULL, FULL | 64)),
        (DELAYED, (2, 4)),
        (workload(precision="fp8"), ()),
        (workload(fp8_recipe="delayed"), ()),
        (workload(offload_modules="moe_act"), (FULL, FULL | 64)),
        (workload(offload_modules="core_attn"), (FULL, FULL | 64)),
    ],
)
def test_an_execution_refuses_recomputation_whatever_the_degrees(
    work: Workload, refused: tuple[int, ...]
) -> None:
    masks = np.array([0, 2, 4, FULL, FULL | 64])
    assert tuple(masks[refused_recompute(work, masks)]) == refused


def test_memory_at_the_limit_fits_and_the_words_name_the_fullest_rank() -> None:
    # 0.94 x 80 - 1.5 = 73.7 GiB; less a reserve of 4 GiB, over a margin of 1.25: 55.76 GiB.
    rule, work = RULES["hbm"], workload(reserve_gib=4.0, memory_margin=1.25)
    plan = finished(work, Layout(pp=3), 1.0)
    assert rule.check(replace(plan, memory_gib=(1.0, 55.75, 2.0))) is None
    finding = rule.check(replace(plan, memory_gib=(1.0, 60.76, 2.0)))
    assert finding is not None
    assert finding.value == 60.76
    assert finding.limit == pytest.approx(55.76)
    assert "pipeline rank 1 needs 60.8 GiB, 5.0 more than the 55.8" in finding.words
    assert "4 GiB in reserve and 25.0% for the error" in finding.words
    assert rule.excess(as_table(work, [Layout()], [60.76]))[0] == pytest.approx(5.0)
    bare = rule.check(finished(workload(), Layout(), 80.0))
    assert bare is not None
    assert bare.words.endswith("1.5 GiB of context")


def test_memory_of_exactly_the_limit_fits() -> None:
    rule, plan = RULES["hbm"], finished(workload(), Layout(), 1.0)
    assert rule.check(replace(plan, memory_gib=(0.94 * 80 - 1.5,))) is None


@pytest.mark.parametrize(
    ("use", "finds"), [(None, False), (0.5, False), (0.5 * (1 + 1e-10), False), (0.51, True)]
)
def test_a_cut_may_be_used_to_the_limit(use: float | None, finds: bool) -> None:
    rule, work = RULES["bisection"], workload(max_cut_use=0.5)
    finding = rule.check(replace(finished(work, Layout(), 1.0), cut_use=use))
    assert (finding is not None) is finds
    if finding is not None:
        assert (finding.value, finding.limit) == (0.51, 0.5)
    assert rule.excess(as_table(work, [Layout(tp=3)], [1.0])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("asked", "degrees", "together"),
    [
        (("cp",), {"tp": 2, "cp": 4, "ep": 16}, 8),
        (("cp",), {"tp": 3, "cp": 3}, 9),
        (("ep",), {"tp": 4, "cp": 9, "ep": 2, "etp": 3}, 12),
        (("ep",), {"tp": 2, "ep": 8}, 8),
        (("tp",), {"tp": 9, "cp": 2, "ep": 2}, 9),
    ],
)
def test_groups_inside_a_domain_tie_the_least_common_multiple_together(
    asked: tuple[str, ...], degrees: dict[str, Any], together: int
) -> None:
    rule, work = RULES["nvlink-domain"], workload(MOE, inside_domain=asked)
    layout = Layout(**degrees)
    assert rule.excess(as_table(work, [layout], [1.0])).tolist() == [together - 8]
    finding = rule.check(finished(work, layout, 1.0))
    assert (finding is not None) == (together > 8)
    if finding is not None:
        assert (finding.value, finding.limit) == (together, 8)
        assert f"tie {together} GPUs together, a domain has 8" in finding.words


def test_the_domain_of_a_cluster_without_nvlink_is_the_node() -> None:
    rule = RULES["nvlink-domain"]
    for domain, limit in ((1, 8), (2, 2), (16, 16)):
        work = workload(inside_domain=("cp",), cluster=cluster(nvlink_domain=domain))
        assert rule.excess(as_table(work, [Layout(cp=16)], [1.0])).tolist() == [16 - limit]


def test_a_mapped_group_that_leaves_its_domain_is_found() -> None:
    rule, work = RULES["nvlink-domain"], workload(inside_domain=("cp",))
    plan = finished(work, Layout(cp=4), 1.0)
    assert rule.check(replace(plan, spans={"cp": (4, 4)})) is None
    finding = rule.check(replace(plan, spans={"cp": (3, 4)}))
    assert finding is not None
    assert (finding.value, finding.limit) == (4, 0)
    assert finding.words == "cp groups of 4 leave their domain"


def placed(**inside: list[int]) -> Placement:
    """Two placements with so many members of each group inside the lowest level, of two."""
    levels = {name: np.ones((2, 2), dtype=np.int64) for name in Placement.__annotations__}
    for axis, counts in inside.items():
        levels[axis][:, 0] = counts
    return Placement(**levels)


def test_placements_keep_groups_inside_where_all_members_are() -> None:
    placement = placed(cp=[4, 3], ep=[2, 2])
    work, layout = workload(MOE, inside_domain=("cp", "ep")), Layout(cp=4, ep=2)
    assert keeps_inside(work, layout, placement).tolist() == [True, False]
    assert keeps_inside(work, replace(layout, ep=3), placement).tolist() == [False, False]
    assert keeps_inside(workload(), layout, placement).tolist() == [True, True]


def test_spans_are_the_placement_as_numbers() -> None:
    levels = {name: np.array([1, 1]) for name in Placement.__annotations__}
    placement = Placement(**(levels | {"cp": np.array([3, 4])}))
    assert spans_of(placement) == dict.fromkeys(levels, (1, 1)) | {"cp": (3, 4)}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"norm": "layernorm"}, "norm layernorm"),
        ({"norms_per_layer": 4}, "4 norms per layer"),
        ({"embedding_norm": True}, "a norm after the embedding"),
        ({"parallel_block": True}, "parallel blocks"),
        ({"attention_bias": True}, "biases"),
        ({"attention_output_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"attention_sinks": True}, "attention sinks"),
        ({"mtp_layers": 1}, "multi-token prediction"),
    ],
)
def test_torchtitan_has_no_layer_for_each_of_these(changes: dict[str, Any], part: str) -> None:
    assert foreign_parts(DENSE.model_copy(update=changes)) == [part]


@pytest.mark.parametrize(
    ("moe", "parts"),
    [
        ({}, []),
        ({"shared_experts": 1}, ["shared experts"]),
        ({"dense_layers": 1}, ["dense layers beside those with experts"]),
        ({"every": 2}, ["dense layers beside those with experts"]),
        ({"router_bias": True}, ["router or expert biases"]),
        ({"expert_bias": True}, ["router or expert biases"]),
        ({"router_groups": 1}, []),
        ({"router_groups": 2}, ["router groups"]),
    ],
)
def test_torchtitan_builds_plain_experts(moe: dict[str, Any], parts: list[str]) -> None:
    spec = MoeSpec(experts=32, top_k=2, moe_ffn_hidden=768, **moe)
    assert foreign_parts(DENSE.model_copy(update={"moe": spec})) == parts


@pytest.mark.parametrize("flavor", flavors(), ids=lambda flavor: f"{flavor.family} {flavor.name}")
def test_torchtitan_builds_these_models_itself(flavor: Flavor) -> None:
    """Its DeepSeek-V3 16B was refused for its latent attention."""
    assert foreign_parts(flavor.model) == []
    if flavor.family in ("deepseek_v3", "gpt_oss"):
        assert foreign_parts(flavor.model.model_copy(update={"hidden": 4096})) != []
        assert foreign_parts(flavor.model.model_copy(update={"heads": 8})) != []


def test_deepep_does_not_run_on_superchips_of_longer_names() -> None:
    spec = cluster("blackwell")
    device = spec.device.model_copy(update={"name": "GB300-NVL72"})
    work = workload(MOE, cluster=spec.model_copy(update={"device": device}), moe_dispatch="deepep")
    rule, layout = RULES["megatron-dispatcher-device"], Layout(ep=2)
    assert rule.check(finished(work, layout, 1.0)) is not None
    assert rule.excess(as_table(work, [layout], [1.0])).tolist() == [1.0]


def test_a_single_layout_is_judged_with_every_memory() -> None:
    table = as_table(workload(), [Layout(tp=9)], [1.0, 2.0, 3.0])
    assert RULES["scale-up-tp"].excess(table).tolist() == [1.0, 1.0, 1.0]


def test_what_a_rule_found_stays_as_it_is() -> None:
    plan = finished(workload(), Layout(tp=9), 1.0)
    finding = RULES["scale-up-tp"].check(plan)
    for value in (plan, finding, When("tp"), of("tp")):
        assert is_dataclass(value)
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, None)


@pytest.mark.parametrize(
    "record", [AtLeast, AtMost, Divides, Equals, Requires, Finding, FinishedPlan]
)
def test_every_part_of_a_rule_is_given_by_its_name(record: type) -> None:
    parameters = inspect.signature(record).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("axes", [("dp",), ("tp", "pp")])
def test_only_axes_of_a_layer_can_be_kept_in_a_domain(axes: Any) -> None:
    with pytest.raises(ValueError, match="give one or more of tp, cp, ep, etp"):
        ScaleUpDomain(axes)


def test_a_precision_that_no_device_has_is_found_with_those_it_has() -> None:
    finding = RULES["precision-on-device"].check(
        finished(workload(cluster=cluster("ampere"), precision="fp8"), Layout(), 1.0)
    )
    assert finding is not None
    assert "Choose one of fp16, bf16, or another device" in finding.remedy


def test_a_foreign_schedule_is_found_with_the_frameworks_that_have_it() -> None:
    finding = RULES["deepspeed-schedule"].check(finished(workload(), Layout(schedule=5), 1.0))
    assert finding is not None
    assert "deepspeed has no dualpipe-v schedule" in finding.words
    assert "torchtitan" in finding.remedy
    nowhere = RULES["deepspeed-schedule"].check(finished(workload(), Layout(schedule=6), 1.0))
    assert nowhere is not None
    assert "none of those known here" in nowhere.remedy


def test_stages_found_wrong_are_counted() -> None:
    rule = RULES["layers-by-stages"]
    good = finished(workload(), Layout(pp=2, vpp=2), 1.0)
    counted = {
        ((3, 3), (3, 3)): None,
        ((3, 3), (3,)): (3, 4),
        ((3, 3), (3, 3), (3, 3)): (6, 4),
        ((3, 0), (6, 3)): (4, 12),
        ((0, 6), (6, 0)): None,
        ((3, 3), (7, -1)): (4, 12),
        ((3, 3), (3, 2)): (11, 12),
        ((1, 5), (1, 5)): None,
    }
    for stages, numbers in counted.items():
        finding = rule.check(replace(good, stages=stages))
        assert numbers == (None if finding is None else (finding.value, finding.limit))


def test_a_stage_may_part_layers_with_experts_from_dense_ones() -> None:
    every_second = MoeSpec(experts=24, top_k=2, moe_ffn_hidden=768, every=2)
    good = finished(workload(MOE.model_copy(update={"moe": every_second})), Layout(pp=2), 1.0)
    rule = RULES["layers-by-stages"]
    assert rule.check(replace(good, stages=((6,), (6,)))) is None
    assert rule.check(replace(good, stages=((5,), (7,)))) is None
    finding = rule.check(replace(good, stages=((12,), (0,))))
    assert finding is not None
    assert "at least one of the 12 layers" in finding.remedy


def test_rules_are_found_by_the_names_that_refusals_use() -> None:
    assert rule_named("hbm") is not None
    assert rule_named("megatron-sparse-attention") is not None
    assert rule_named("no-such-rule") is None


def test_bits_are_counted() -> None:
    assert set_bits(np.array([0, 1, 6, 127, 2**62])).tolist() == [0, 1, 2, 7, 1]


def test_findings_leave_out_the_rules_not_asked_for() -> None:
    plan = finished(workload(gpus=1), Layout(tp=16), 500.0)
    names = {finding.rule for finding in findings(plan)}
    assert {"hbm", "gpu-budget", "scale-up-tp"} <= names
    kept = {finding.rule for finding in findings(plan, without=("hbm", "gpu-budget"))}
    assert kept == names - {"hbm", "gpu-budget"}


def test_a_framework_is_bound_by_what_its_record_lacks() -> None:
    fsdp2 = {rule.name for rule in rules_of(FSDP2)}
    lacking = {"degrees", "precision", "recompute", "schedule"}
    assert {f"fsdp2-{what}" for what in lacking} <= fsdp2
    deepspeed = {rule.name for rule in rules_for(workload(LINEAR, framework="deepspeed"))}
    assert "deepspeed-linear-attention" in deepspeed
    megatron = lacking - {"schedule"} | {"linear-attention"}
    assert not {f"megatron-{what}" for what in megatron} & set(RULES)


@pytest.mark.parametrize("framework", RECORDS, ids=lambda framework: framework.name)
def test_a_remedy_names_every_degree_that_a_framework_lacks(framework: Framework) -> None:
    words = {"zero_stage": "shard", "sequence_parallel": "sequence parallelism"}
    lacking = AllowedDegrees(framework).allowed
    assert all(words.get(field, field) in framework.degrees_remedy for field in lacking)
