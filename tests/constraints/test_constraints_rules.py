"""Every rule, two-sided: what it forbids is infeasible and found, what it allows is feasible and passes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from meshwright.cluster_specs.schema import Architecture, ClusterSpec, DeviceSpec
from meshwright.constraints.fabric import ScaleUpDomain
from meshwright.constraints.registry import GENERAL, rules_for, rules_of
from meshwright.constraints.rule import FinishedPlan, Rule
from meshwright.costmodel.execution_names import OPTIMIZERS
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.lengths import packed_lengths
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import RECORDS
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.blocks import (
    EncoderUse,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    MoeSpec,
    RopeScaling,
    RopeSpec,
    SparseIndexerSpec,
    VisionSpec,
    WindowHeadsSpec,
)
from meshwright.model_specs.reader import load_catalog_model
from meshwright.model_specs.schema import ModelSpec
from tests.soaked import examples

DENSE = ModelSpec(layers=12, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=4, vocab=32000)
MLA = MlaSpec(
    q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
)
MOE = ModelSpec(
    layers=12,
    hidden=1024,
    ffn_hidden=4096,
    heads=16,
    kv_heads=16,
    vocab=32000,
    attention=MLA,
    moe=MoeSpec(experts=24, top_k=2, moe_ffn_hidden=768, shared_experts=1, dense_layers=2),
)
BIASED = MOE.model_copy(
    update={
        "moe": MoeSpec(experts=24, top_k=2, moe_ffn_hidden=768, router_bias=True, expert_bias=True)
    }
)
WINDOWED = DENSE.model_copy(update={"sliding_window": 512, "full_attention_every": 2})
UNLIKE_HEADS = WINDOWED.model_copy(
    update={"window_heads": WindowHeadsSpec(kv_heads=8, head_dim=32)}
)
SINKS = DENSE.model_copy(update={"attention_sinks": True})
TIED = DENSE.model_copy(update={"tied_embeddings": True})
SEEING = DENSE.model_copy(
    update={
        "vision": VisionSpec(
            kind="qwen3_vl",
            layers=4,
            hidden=96,
            ffn_hidden=384,
            heads=12,
            out_hidden=1024,
            patch_size=16,
            merge=2,
            use=EncoderUse(tokens=64, images=1, trained=True, tensor_parallel=True),
        )
    }
)
LINEAR = DENSE.model_copy(
    update={
        "linear_attention": LinearAttentionSpec(
            key_heads=8, value_heads=16, key_head_dim=64, value_head_dim=64
        ),
        "full_attention_every": 4,
    }
)
LIGHTNING = DENSE.model_copy(
    update={
        "linear_attention": LinearAttentionSpec(
            type="lightning", key_heads=16, value_heads=16, key_head_dim=64, value_head_dim=64
        ),
        "full_attention_every": 4,
    }
)
HYBRID = DENSE.model_copy(
    update={
        "hybrid_pattern": "M*-" * 4,
        "mamba": Mamba2Spec(heads=32, head_dim=64, state_dim=64, groups=4),
    }
)
INDEXED = MLA.model_copy(update={"indexer": SparseIndexerSpec(heads=4, head_dim=32, top_k=128)})
SPARSE = DENSE.model_copy(update={"attention": INDEXED})
OLDER = HYBRID.model_copy(
    update={"mamba": None, "mamba1": Mamba1Spec(channels=32, step_rank=2, state_dim=4)}
)
LATENT = MOE.model_copy(update={"moe": MOE.moe and MOE.moe.model_copy(update={"latent_size": 256})})
IN_A_PATTERN = LATENT.model_copy(update={"hybrid_pattern": "*E" * 6})
BESIDE = HYBRID.model_copy(update={"hybrid_pattern": None, "mamba_beside_attention": True})


def cluster(architecture: Architecture = "hopper", nvlink_domain: int = 8) -> ClusterSpec:
    device = DeviceSpec(
        name="a device",
        architecture=architecture,
        hbm_gib=80,
        hbm_gb_per_s=3000,
        peak_fp16_tflops=900,
        scale_up_gb_per_s=450,
        pcie_gb_per_s=64,
        sms=132,
        tdp_w=700,
    )
    return ClusterSpec(
        device=device, gpus=1024, gpus_per_node=8, nvlink_domain=nvlink_domain, nic_gbps_per_gpu=400
    )


def workload(model: ModelSpec = DENSE, **changes: Any) -> Workload:
    base = Workload(model=model, cluster=cluster(), gpus=1024, global_batch=96, seq_len=4096)
    return replace(base, **changes)


_LENGTHS = packed_lengths([64, 4096], [60, 1], pack_size=4096)
DEALT = workload(lengths=replace(_LENGTHS, dealt=((64, 60 / 61), (4096, 1 / 61))))
DEALT_EXPERTS = replace(DEALT, model=MOE)


def with_host_gib(host_memory_gib: float) -> Workload:
    spec = cluster().model_copy(update={"host_memory_gib": host_memory_gib})
    return replace(workload(), cluster=spec)


@dataclass(frozen=True, kw_only=True)
class Table:
    workload: Workload
    layouts: Layout
    memory_gib: NDArray[np.float64]


def as_table(work: Workload, layouts: list[Layout], memory_gib: list[float]) -> Table:
    columns = {f.name: np.array([getattr(one, f.name) for one in layouts]) for f in fields(Layout)}
    return Table(workload=work, layouts=Layout(**columns), memory_gib=np.array(memory_gib))


def finished(work: Workload, layout: Layout, memory_gib: float) -> FinishedPlan:
    pp, vpp, layers = int(layout.pp), int(layout.vpp), work.model.layers
    chunks = [layers // (pp * vpp) + (i < layers % (pp * vpp)) for i in range(pp * vpp)]
    stages = tuple(tuple(chunks[v * pp + r] for v in range(vpp)) for r in range(pp))
    return FinishedPlan(
        workload=work, layout=layout, stages=stages, memory_gib=(1.0, memory_gib), spans={}
    )


# name of the rule: (workload, what it allows, what it forbids)
CASES: dict[str, tuple[Workload, dict[str, Any], dict[str, Any]]] = {
    "hbm": (workload(reserve_gib=4), {"memory_gib": 69.69}, {"memory_gib": 69.71}),
    "gpu-budget": (workload(gpus=64), {"tp": 8, "pp": 4, "dp": 2}, {"tp": 8, "pp": 4, "dp": 3}),
    "scale-up-tp": (workload(), {"tp": 8}, {"tp": 16}),
    "scale-up-etp": (workload(cluster=cluster(nvlink_domain=1)), {"etp": 8}, {"etp": 9}),
    "nvlink-domain": (
        workload(MOE, inside_domain=("cp", "ep")),
        {"tp": 2, "cp": 2, "dp": 4, "ep": 8},
        {"tp": 2, "cp": 3, "dp": 4, "ep": 4},
    ),
    "scale-up-tp-cp": (workload(), {"tp": 2, "cp": 4}, {"tp": 4, "cp": 4}),
    "scale-up-ep": (workload(cluster=cluster(nvlink_domain=16)), {"ep": 16}, {"ep": 24}),
    "heads-by-tp": (workload(), {"tp": 8}, {"tp": 6}),
    "kv-heads-by-tp": (workload(), {"tp": 8}, {"tp": 6}),
    "ffn-by-tp": (workload(MOE), {"tp": 8}, {"tp": 3}),
    "expert-ffn-by-etp": (workload(MOE), {"etp": 3}, {"etp": 5}),
    "sequence-by-cp": (workload(seq_len=4100), {"cp": 1}, {"cp": 4}),
    "sequence-by-tp": (
        workload(seq_len=24),
        {"tp": 4, "cp": 3, "sequence_parallel": True},
        {"tp": 8, "cp": 4, "sequence_parallel": True},
    ),
    "sequence-parallel-needs-tp": (
        workload(),
        {"tp": 2, "sequence_parallel": True},
        {"tp": 1, "sequence_parallel": True},
    ),
    "layers-by-stages": (workload(), {"pp": 4, "vpp": 3}, {"pp": 4, "vpp": 4}),
    "expert-axes-need-experts": (workload(), {}, {"ep": 2}),
    "experts-by-ep": (workload(MOE), {"ep": 8}, {"ep": 16}),
    "expert-grid": (
        workload(MOE),
        {"tp": 2, "dp": 6, "ep": 4, "etp": 3},
        {"tp": 2, "dp": 6, "ep": 8},
    ),
    "batch-split": (
        workload(),
        {"dp": 8, "micro_batch": 2, "num_micro_batches": 6},
        {"dp": 8, "micro_batch": 2, "num_micro_batches": 5},
    ),
    "replicas-by-shard-groups": (
        workload(),
        {"dp": 3, "cp": 2, "zero_stage": 1, "shard_groups": 2},
        {"dp": 3, "cp": 2, "zero_stage": 1, "shard_groups": 4},
    ),
    "shard-groups-need-zero": (
        workload(),
        {"dp": 4, "zero_stage": 1, "shard_groups": 2},
        {"dp": 4, "shard_groups": 2},
    ),
    "shard-groups-of-several": (
        workload(),
        {"dp": 2, "cp": 2, "shard_groups": 2},
        {"dp": 2, "shard_groups": 2},
    ),
    "offloaded-share": (
        workload(),
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 100},
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 101},
    ),
    "host-memory": (
        with_host_gib(1.0),
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 0},
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 100},
    ),
    "megatron-offload-zero": (
        workload(),
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 25},
        {"dp": 4, "optimizer_offload": 25},
    ),
    "megatron-offload-adam": (
        workload(optimizer="sgd"),
        {"dp": 4, "zero_stage": 1},
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 25},
    ),
    "deepspeed-offload-zero": (
        workload(),
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 100},
        {"dp": 4, "optimizer_offload": 100},
    ),
    "deepspeed-offload-whole": (
        workload(),
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 100},
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 50},
    ),
    "deepspeed-offload-adam": (
        workload(optimizer="sgd"),
        {"dp": 4, "zero_stage": 1},
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 100},
    ),
    "fsdp-offload-zero": (
        workload(),
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 100},
        {"dp": 4, "zero_stage": 2, "optimizer_offload": 100},
    ),
    "fsdp-offload-shards": (
        workload(),
        {"dp": 1, "cp": 2, "zero_stage": 3, "optimizer_offload": 100},
        {"dp": 1, "tp": 2, "zero_stage": 3, "optimizer_offload": 100},
    ),
    "fsdp-offload-whole": (
        workload(),
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 100},
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 50},
    ),
    "fsdp-offload-adam": (
        workload(precision="fp8"),
        {"dp": 4, "zero_stage": 3},
        {"dp": 4, "zero_stage": 3, "optimizer_offload": 100},
    ),
    "megatron-offload-fp8": (
        workload(precision="fp8", fp8_params=True),
        {"dp": 4, "zero_stage": 1},
        {"dp": 4, "zero_stage": 1, "optimizer_offload": 25},
    ),
    "megatron-expert-shard-groups": (
        workload(MOE),
        {"tp": 2, "dp": 8, "ep": 8, "shard_groups": 2},
        {"tp": 2, "dp": 8, "ep": 8, "shard_groups": 4},
    ),
    "megatron-shard-groups-optimizer": (
        workload(optimizer="muon"),
        {"dp": 4},
        {"dp": 4, "shard_groups": 2},
    ),
    "torchtitan-shard-groups": (
        workload(),
        {"dp": 6, "cp": 2, "shard_groups": 3},
        {"dp": 6, "cp": 2, "shard_groups": 4},
    ),
    "fsdp2-shard-groups": (
        workload(),
        {"dp": 6, "cp": 2, "shard_groups": 3},
        {"dp": 6, "cp": 2, "shard_groups": 4},
    ),
    "fsdp2-whole-groups": (
        workload(),
        {"dp": 8, "shard_groups": 4},
        {"dp": 8, "shard_groups": 8},
    ),
    "vpp-needs-pp": (workload(), {"pp": 2, "vpp": 2}, {"pp": 1, "vpp": 2}),
    "interleaved-micro-batches": (
        workload(),
        {"pp": 4, "vpp": 2, "num_micro_batches": 8},
        {"pp": 4, "vpp": 2, "num_micro_batches": 6},
    ),
    "schedule-shape": (
        workload(),
        {"pp": 4, "vpp": 2, "num_micro_batches": 8, "schedule": 4},
        {"pp": 4, "vpp": 2, "num_micro_batches": 7, "schedule": 4},
    ),
    "megatron-schedule": (workload(), {"pp": 2, "vpp": 2}, {"pp": 2, "schedule": 3}),
    "torchtitan-schedule": (
        workload(),
        {"pp": 2, "vpp": 2, "schedule": 5},
        {"pp": 2, "schedule": 6},
    ),
    "deepspeed-schedule": (workload(), {"pp": 2}, {"pp": 2, "schedule": 1}),
    "fsdp2-schedule": (workload(), {}, {"schedule": 1}),
    "torchtitan-1f1b-micro-batches": (
        workload(),
        {"pp": 4, "num_micro_batches": 4},
        {"pp": 4, "num_micro_batches": 3},
    ),
    "torchtitan-split-backward": (
        workload(precision="fp8"),
        {"pp": 2, "vpp": 2, "schedule": 2},
        {"pp": 2, "vpp": 2, "schedule": 3},
    ),
    "torchtitan-zero-bubble-chunks": (
        workload(),
        {"pp": 2, "vpp": 2, "schedule": 3},
        {"pp": 2, "schedule": 3},
    ),
    "recomputed-modules": (
        workload(MOE),
        {"recompute": Recompute.MLA_UP_PROJECTION | Recompute.MOE_ACTIVATION},
        {"recompute": 256},
    ),
    "full-recompute-alone": (
        workload(),
        {"recompute": Recompute.FULL},
        {"recompute": Recompute.FULL | Recompute.LAYERNORM},
    ),
    "megatron-zero-needs-pp-1": (
        workload(),
        {"zero_stage": 1, "pp": 2},
        {"zero_stage": 3, "pp": 2},
    ),
    "megatron-dealt-pipeline": (DEALT, {"pp": 1}, {"pp": 2}),
    "megatron-dealt-sharding": (DEALT, {"zero_stage": 1}, {"zero_stage": 3}),
    "megatron-dealt-experts": (DEALT_EXPERTS, {"ep": 1, "dp": 2}, {"ep": 2, "dp": 2}),
    "megatron-dealt-micro-batch": (DEALT, {"micro_batch": 1}, {"micro_batch": 2}),
    "megatron-dealt-replicas": (DEALT, {"dp": 4}, {"dp": 3}),
    "megatron-dealt-context": (DEALT, {"cp": 4}, {"cp": 3}),
    "megatron-dealt-padding": (DEALT, {"tp": 2, "dp": 64}, {"tp": 2, "dp": 3}),
    "megatron-zero-optimizer": (workload(optimizer="muon"), {"zero_stage": 1}, {"zero_stage": 2}),
    "megatron-emerging-expert-bias": (
        workload(BIASED, optimizer="muon"),
        {"zero_stage": 0},
        {"zero_stage": 1},
    ),
    "megatron-sparse-attention": (
        workload(SPARSE),
        {"tp": 2, "sequence_parallel": True, "recompute": Recompute.MLA_UP_PROJECTION},
        {"cp": 2},
    ),
    "megatron-moe-tp-needs-sp": (workload(MOE), {"tp": 2, "sequence_parallel": True}, {"tp": 2}),
    "megatron-expert-bias-needs-etp-1": (workload(BIASED), {"etp": 1}, {"etp": 2}),
    "megatron-expert-overlap": (
        workload(MOE, ep_overlap=True),
        {"ep": 2, "pp": 2, "vpp": 2},
        {"ep": 2, "pp": 2, "recompute": Recompute.FULL},
    ),
    "heads-by-tp-cp": (workload(cp_comm="a2a"), {"tp": 2, "cp": 8}, {"tp": 2, "cp": 16}),
    "kv-heads-by-tp-cp": (workload(cp_comm="a2a"), {"tp": 2, "cp": 2}, {"tp": 2, "cp": 4}),
    "linear-heads-by-tp-cp": (workload(LINEAR), {"tp": 2, "cp": 4}, {"tp": 4, "cp": 4}),
    "mamba-heads-by-tp-cp": (workload(HYBRID), {"tp": 4, "cp": 8}, {"tp": 4, "cp": 16}),
    "mamba-groups-by-tp-cp": (workload(HYBRID), {"tp": 2, "cp": 4}, {"tp": 8}),
    "fsdp2-context-mask": (workload(WINDOWED), {"tp": 2, "dp": 4}, {"cp": 2, "dp": 4}),
    "fsdp2-mamba": (workload(HYBRID), {"dp": 8}, {"cp": 2}),
    "fsdp2-whole-delta-net": (workload(LINEAR), {"dp": 8}, {"tp": 2, "dp": 4}),
    "fsdp2-latent-experts": (workload(LATENT), {"dp": 8}, {"tp": 2, "dp": 4}),
    "fsdp2-window-heads": (workload(UNLIKE_HEADS), {"dp": 8}, {"tp": 2, "dp": 4}),
    "peft-degrees": (
        workload(DENSE, adapters=AdapterSpec()),
        {"dp": 8, "zero_stage": 3},
        {"tp": 2, "dp": 4},
    ),
    "trl-kto-batch": (workload(DENSE, kind="kto"), {"dp": 8, "micro_batch": 2}, {"dp": 8}),
    "peft-whole-base": (
        workload(DENSE, adapters=AdapterSpec(method="lora-8bit"), framework="deepspeed"),
        {"dp": 8, "zero_stage": 2},
        {"dp": 8, "zero_stage": 3},
    ),
    "offload-recomputed": (
        workload(DENSE, framework="fsdp2", offload_modules="layer_inputs"),
        {"dp": 8, "zero_stage": 3, "recompute": Recompute.FULL},
        {"dp": 8, "zero_stage": 3},
    ),
    "offloaded-inputs-degrees": (
        workload(DENSE, framework="deepspeed", offload_modules="saved_tensors"),
        {"dp": 8, "recompute": Recompute.FULL},
        {"pp": 2, "dp": 4, "recompute": Recompute.FULL},
    ),
    "offloaded-parameters-zero": (
        workload(DENSE, framework="deepspeed", parameter_offload="cpu"),
        {"dp": 8, "zero_stage": 3},
        {"dp": 8, "zero_stage": 2},
    ),
    "host-inputs": (
        workload(
            DENSE,
            framework="fsdp2",
            offload_modules="layer_inputs",
            cluster=with_host_gib(1.0).cluster,
        ),
        {"dp": 8, "zero_stage": 3, "recompute": Recompute.FULL},
        {"dp": 8, "zero_stage": 3, "recompute": Recompute.FULL, "micro_batch": 2},
    ),
    "trl-degrees": (workload(DENSE, kind="dpo"), {"dp": 8, "zero_stage": 3}, {"cp": 2, "dp": 4}),
    "encoder-degrees": (
        workload(SEEING, framework="fsdp2"),
        {"dp": 8, "zero_stage": 3},
        {"tp": 2, "dp": 4},
    ),
    "encoder-context": (workload(SEEING), {"tp": 4}, {"cp": 2}),
    "encoder-heads": (workload(SEEING), {"tp": 4}, {"tp": 8}),
    "whole-head": (
        workload(DENSE, framework="fsdp2", loss="liger"),
        {"cp": 2, "dp": 4, "zero_stage": 3},
        {"tp": 2, "dp": 4},
    ),
    "deepspeed-reference": (
        workload(DENSE, kind="dpo", reference="offloaded"),
        {"dp": 8, "zero_stage": 3},
        {"dp": 8, "zero_stage": 2},
    ),
    "megatron-flex-dispatcher": (workload(MOE, moe_dispatch="deepep"), {"ep": 2}, {"dp": 2}),
    "megatron-dispatcher-reach": (
        workload(MOE, cluster=cluster("ampere"), moe_dispatch="deepep"),
        {"dp": 16, "ep": 8},
        {"dp": 16, "ep": 16},
    ),
    "megatron-dispatcher-ranks": (
        workload(MOE, moe_dispatch="deepep"),
        {"dp": 16, "ep": 16},
        {"dp": 12, "ep": 12},
    ),
    "megatron-partial-graphs": (
        workload(MOE, moe_dispatch="deepep", cuda_graph="partial"),
        {"recompute": Recompute.MOE_ACTIVATION},
        {"recompute": Recompute.LAYERNORM},
    ),
    "megatron-zero-graphs": (
        workload(cuda_graph="partial"),
        {"zero_stage": 1},
        {"zero_stage": 3},
    ),
    "megatron-zero-fp8-params": (
        workload(precision="fp8", fp8_params=True),
        {"zero_stage": 3},
        {"zero_stage": 2},
    ),
    "megatron-zero-bridge": (
        workload(adapters=AdapterSpec(method="lora")),
        {"zero_stage": 1},
        {"zero_stage": 2},
    ),
    "megatron-full-graph": (
        workload(MOE, precision="mxfp8", moe_dispatch="hybridep", cuda_graph="full"),
        {"recompute": Recompute.LAYERNORM},
        {"recompute": Recompute.MOE_ACTIVATION},
    ),
    "megatron-narrow-states": (workload(moment_dtype="bf16"), {"zero_stage": 1}, {"zero_stage": 0}),
    "megatron-delayed-scaling": (
        workload(MOE, precision="fp8", fp8_recipe="delayed"),
        {"recompute": Recompute.MLP},
        {"recompute": Recompute.MLP | Recompute.MOE_ACTIVATION},
    ),
    "megatron-offload-recompute": (
        workload(offload_modules="core_attn"),
        {"recompute": Recompute.MLP},
        {"recompute": Recompute.FULL},
    ),
    "megatron-offload-up-projection": (
        workload(MOE, offload_modules="core_attn+moe_act"),
        {"recompute": Recompute.MOE_ACTIVATION},
        {"recompute": Recompute.MLA_UP_PROJECTION},
    ),
    "megatron-offload-experts": (
        workload(MOE, offload_modules="core_attn+expert_fc1"),
        {"recompute": Recompute.MOE_ACTIVATION},
        {"recompute": Recompute.MOE_ACTIVATION | Recompute.EXPERTS},
    ),
    # 16 heads and 4 key-value heads: tp 1 leaves groups of 4, or of 2; tp 4 leaves none.
    "megatron-hierarchical-context": (
        workload(cp_comm="a2a+p2p"),
        {"tp": 1, "cp": 8},
        {"tp": 4, "cp": 8},
    ),
    "megatron-context-windows": (workload(WINDOWED), {"tp": 4, "cp": 1}, {"tp": 4, "cp": 2}),
    "megatron-context-sinks": (workload(SINKS, cp_comm="all_gather"), {"cp": 1}, {"cp": 2}),
    "megatron-context-unfused": (workload(cluster=cluster("volta")), {"cp": 1}, {"cp": 2}),
    "megatron-tp-overlap": (workload(MOE, tp_overlap=True), {"tp": 1}, {"tp": 2}),
    "torchtitan-kv-heads": (workload(), {"tp": 4}, {"tp": 8}),
    "torchtitan-sequence": (
        workload(seq_len=48),
        {"tp": 4, "cp": 6, "sequence_parallel": True},
        {"tp": 4, "cp": 4, "sequence_parallel": True},
    ),
    "torchtitan-context-shards": (
        workload(),
        {"zero_stage": 2, "cp": 2},
        {"zero_stage": 0, "cp": 2},
    ),
    "torchtitan-tied-embeddings": (workload(TIED), {"pp": 1}, {"pp": 2}),
    "torchtitan-degrees": (workload(), {"zero_stage": 2}, {"zero_stage": 1}),
    "torchtitan-recompute": (
        workload(),
        {"pp": 2, "recompute": Recompute.FULL, "recompute_layers": 6},
        {"pp": 2, "recompute": Recompute.FULL, "recompute_layers": 5},
    ),
    "torchtitan-expert-shards": (
        workload(MOE),
        {"zero_stage": 2, "dp": 4, "ep": 8, "tp": 2},
        {"zero_stage": 0, "dp": 4, "ep": 8, "tp": 2},
    ),
    "torchtitan-spread-experts": (
        workload(MOE),
        {"tp": 2, "ep": 2, "zero_stage": 2},
        {"tp": 2, "ep": 2},
    ),
    "torchtitan-expert-tensor": (
        workload(MOE),
        {"zero_stage": 2, "dp": 4, "tp": 2, "etp": 2},
        {"zero_stage": 2, "dp": 4, "tp": 2},
    ),
    "torchtitan-mtp": (workload(DENSE.model_copy(update={"mtp_layers": 1})), {"tp": 2}, {"cp": 2}),
    "deepspeed-experts": (workload(MOE), {"dp": 8, "ep": 8}, {"dp": 4, "tp": 2, "ep": 8}),
    "deepspeed-pipeline-zero": (workload(), {"pp": 2, "zero_stage": 1}, {"pp": 2, "zero_stage": 2}),
    "deepspeed-degrees": (workload(), {"tp": 2}, {"tp": 2, "sequence_parallel": True}),
    "deepspeed-recompute": (workload(), {}, {"recompute": Recompute.CORE_ATTENTION}),
    "fsdp2-kv-heads": (workload(), {"tp": 4, "dp": 2}, {"tp": 8, "dp": 2}),
    "deepspeed-script-optimizer": (
        workload(optimizer="paged-adam"),
        {"dp": 8, "zero_stage": 3},
        {"tp": 2, "dp": 4},
    ),
    "deepspeed-muon-zero": (workload(optimizer="muon"), {"zero_stage": 2}, {"zero_stage": 3}),
    "fsdp2-muon-tensor": (workload(optimizer="muon"), {"dp": 8}, {"tp": 2, "dp": 4}),
    "sync-each-batch": (
        workload(sync_each_batch=True),
        {"dp": 2, "num_micro_batches": 2},
        {"dp": 2, "num_micro_batches": 1},
    ),
    "fsdp2-shards": (workload(), {"tp": 2, "cp": 2}, {"tp": 2}),
    "fsdp2-degrees": (workload(), {"tp": 2, "cp": 2, "zero_stage": 3}, {"zero_stage": 3, "pp": 2}),
    "fsdp2-recompute": (
        workload(),
        {"recompute": 32, "recompute_layers": 10**6},
        {"recompute": 33},
    ),
}
STRICT: tuple[Rule, ...] = (ScaleUpDomain(("tp", "cp")), ScaleUpDomain(("ep",)))
OWN = [rule for record in RECORDS for rule in rules_of(record)]
RULES = {rule.name: rule for rule in (*GENERAL, *STRICT, *OWN)}
OF_WORKLOADS = {
    "megatron-allgather-dispatcher",
    "megatron-dispatcher-device",
    "megatron-offloaded-modules",
    "precision-on-device",
    "torchtitan-precision",
    "deepspeed-precision",
    "fsdp2-precision",
    "megatron-optimizer",
    "torchtitan-optimizer",
    "deepspeed-optimizer",
    "fsdp2-optimizer",
    "megatron-emerging-precision",
    "megatron-dealt-layers",
    "megatron-dealt-execution",
    "megatron-dealt-precision",
    "deepspeed-muon-experts",
    "fsdp2-muon-experts",
    "torchtitan-linear-attention",
    "deepspeed-linear-attention",
    "megatron-linear-kinds",
    "torchtitan-linear-kinds",
    "deepspeed-linear-kinds",
    "megatron-window-heads",
    "torchtitan-window-heads",
    "deepspeed-window-heads",
    "torchtitan-sparse-attention",
    "deepspeed-sparse-attention",
    "fsdp2-sparse-attention",
    "torchtitan-hybrid-layers",
    "deepspeed-hybrid-layers",
    "torchtitan-latent-experts",
    "deepspeed-latent-experts",
    "megatron-latent-experts",
    "fsdp2-latent-layers",
    "megatron-hybrid",
    "megatron-mtp-positions",
    "bisection",
}


def feasible(rule: Rule, excess: NDArray[np.float64]) -> bool:
    """Whether CP-SAT finds an assignment when exactly one of these layouts is chosen."""
    model = cp_model.CpModel()
    literals = [model.new_bool_var(f"layout {i}") for i in range(len(excess))]
    model.add_exactly_one(literals)
    rule.post(model, literals, excess)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return bool(solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE))


def test_every_rule_has_a_case_and_its_own_name() -> None:
    different = {id(rule) for rule in (*GENERAL, *STRICT, *OWN)}
    assert len(RULES) == len(different)
    assert set(RULES) == set(CASES) | OF_WORKLOADS | {"torchtitan-architecture"}


@pytest.mark.parametrize("name", CASES)
def test_forbidden_is_infeasible_and_found_allowed_is_neither(name: str) -> None:
    rule, (work, *sides) = RULES[name], CASES[name]
    outcomes = []
    for side in sides:
        layout = Layout(**{key: value for key, value in side.items() if key != "memory_gib"})
        memory = side.get("memory_gib", 10.0)
        excess = rule.excess(as_table(work, [layout], [memory]))
        assert excess.shape == (1,)
        finding = rule.check(finished(work, layout, memory))
        outcomes.append((feasible(rule, excess), finding))
    (allowed, nothing), (forbidden, finding) = outcomes
    assert allowed
    assert nothing is None
    assert not forbidden
    assert finding is not None
    assert (finding.rule, finding.unit) == (name, rule.unit)
    assert finding.value != finding.limit
    line = finding.line
    assert line.startswith(f"{name}: ")
    assert line.endswith(f". {finding.remedy}")


@pytest.mark.parametrize(
    ("architecture", "precision", "legal"),
    [
        ("volta", "fp16", True),
        ("volta", "bf16", False),
        ("ampere", "bf16", True),
        ("ampere", "fp8", False),
        ("ada", "fp8", True),
        ("hopper", "fp8", True),
        ("cdna3", "fp8", True),
        ("hopper", "mxfp8", False),
        ("hopper", "nvfp4", False),
        ("blackwell", "mxfp8", True),
        ("blackwell", "nvfp4", True),
        ("blackwell", "int4", False),
    ],
)
def test_precision_follows_the_device(
    architecture: Architecture, precision: str, legal: bool
) -> None:
    work, rule = (
        workload(cluster=cluster(architecture), precision=precision),
        RULES["precision-on-device"],
    )
    excess = rule.excess(as_table(work, [Layout()], [1.0]))
    assert feasible(rule, excess) is legal
    assert (rule.check(finished(work, Layout(), 1.0)) is None) is legal


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_every_architecture_multiplies_what_the_check_says(architecture: Architecture) -> None:
    """CDNA 4 and the workstation Blackwell once fitted no format at all, though the check knew them."""
    rule, legal = RULES["precision-on-device"], []
    for precision in ("fp16", "bf16", "fp8", "mxfp8", "nvfp4"):
        work = workload(cluster=cluster(architecture), precision=precision)
        allowed = feasible(rule, rule.excess(as_table(work, [Layout()], [1.0])))
        assert (rule.check(finished(work, Layout(), 1.0)) is None) is allowed
        legal += [precision] * allowed
    assert "fp16" in legal
    assert ("bf16" in legal) is (architecture != "volta")


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("torchtitan-precision", "mxfp8", "fp16"),
        ("deepspeed-precision", "fp16", "fp8"),
        ("fsdp2-precision", "fp8", "mxfp8"),
    ],
)
def test_precision_follows_the_framework(name: str, legal: str, illegal: str) -> None:
    rule = RULES[name]
    for precision, expected in ((legal, True), (illegal, False)):
        work = workload(precision=precision)
        assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is expected
        assert (rule.check(finished(work, Layout(), 1.0)) is None) is expected


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("megatron-optimizer", {"optimizer": "lion"}, {"optimizer": "adam-8bit"}),
        ("torchtitan-optimizer", {"optimizer": "adam"}, {"optimizer": "muon"}),
        ("fsdp2-optimizer", {"optimizer": "muon"}, {"optimizer": "paged-adam"}),
        (
            "megatron-emerging-precision",
            {"optimizer": "muon"},
            {"optimizer": "muon", "precision": "fp16"},
        ),
        ("fsdp2-muon-experts", {"optimizer": "muon"}, {"optimizer": "muon", "model": MOE}),
        (
            "deepspeed-muon-experts",
            {"optimizer": "lion", "model": MOE},
            {"optimizer": "muon", "model": MOE},
        ),
    ],
)
def test_optimizers_follow_the_framework(
    name: str, legal: dict[str, Any], illegal: dict[str, Any]
) -> None:
    rule = RULES[name]
    for asked_for, expected in ((legal, True), (illegal, False)):
        work = workload(
            asked_for.get("model", DENSE),
            **{k: v for k, v in asked_for.items() if k != "model"},
        )
        assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is expected
        assert (rule.check(finished(work, Layout(), 1.0)) is None) is expected


@pytest.mark.parametrize(
    ("name", "illegal"),
    [
        ("megatron-dealt-layers", {"model": DENSE.model_copy(update={"attention": MLA})}),
        ("megatron-dealt-layers", {"model": HYBRID}),
        ("megatron-dealt-layers", {"model": LINEAR}),
        ("megatron-dealt-layers", {"model": DENSE.model_copy(update={"mtp_layers": 1})}),
        ("megatron-dealt-execution", {"cuda_graph": "full"}),
        ("megatron-dealt-execution", {"tp_overlap": True}),
        ("megatron-dealt-execution", {"cp_comm": "a2a"}),
        ("megatron-dealt-precision", {"precision": "fp8"}),
    ],
)
def test_dealt_samples_are_for_plain_layers_run_plainly(name: str, illegal: dict[str, Any]) -> None:
    rule, refused = RULES[name], replace(DEALT, **illegal)
    for work in (DEALT, replace(refused, lengths=_LENGTHS), replace(refused, lengths=None)):
        assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0])))
        assert rule.check(finished(work, Layout(), 1.0)) is None
    assert not feasible(rule, rule.excess(as_table(refused, [Layout()], [1.0])))
    assert rule.check(finished(refused, Layout(), 1.0)) is not None


def test_deepspeed_has_every_optimizer() -> None:
    rule = RULES["deepspeed-optimizer"]
    for optimizer in OPTIMIZERS:
        assert rule.check(finished(workload(optimizer=optimizer), Layout(), 1.0)) is None


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_linear_attention_is_for_frameworks_that_have_it(framework: str) -> None:
    work = workload(LIGHTNING)
    assert not RULES[f"{framework}-linear-attention"].applies(work)
    refused = RULES[f"{framework}-linear-kinds"].check(finished(work, Layout(), 1.0))
    assert refused is not None
    assert "9 layers of lightning attention (linear_attention.type lightning)" in refused.words
    assert "Choose the fsdp2 framework" in refused.remedy
    rule = RULES[f"{framework}-linear-attention"]
    for model, expected in ((DENSE, True), (LINEAR, False)):
        work = workload(model)
        assert rule.applies(work) is not expected
        assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is expected
        finding = rule.check(finished(work, Layout(), 1.0))
        assert finding is None if expected else finding is not None
        if finding is not None:
            assert "9 layers of linear attention" in finding.line


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (HYBRID, "4 layers of Mamba-2"),
        (OLDER, "4 layers of Mamba-1"),
        (BESIDE, "12 layers of Mamba-2"),
        (DENSE.model_copy(update={"hybrid_pattern": "*-" * 6}), "a pattern of unlike layers"),
        (DENSE, None),
    ],
)
def test_hybrid_layers_are_for_frameworks_that_have_them(
    framework: str, model: ModelSpec, words: str | None
) -> None:
    rule, work = RULES[f"{framework}-hybrid-layers"], workload(model)
    assert rule.applies(work) is (words is not None)
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is (words is None)
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (workload(HYBRID), None),
        (workload(DENSE, ep_overlap=True, precision="fp8"), None),
        (workload(BESIDE), "Mamba-2 beside attention"),
        (workload(OLDER), "no layers of Mamba-1"),
        (workload(HYBRID, ep_overlap=True), "expert traffic hidden"),
        (workload(HYBRID, precision="fp8"), None),
        (
            workload(
                HYBRID.model_copy(
                    update={"mamba": Mamba2Spec(heads=4, head_dim=8, state_dim=4, groups=1)}
                ),
                precision="fp8",
            ),
            "76 columns",
        ),
    ],
)
def test_what_megatron_builds_of_hybrid_models(work: Workload, words: str | None) -> None:
    rule = RULES["megatron-hybrid"]
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is (words is None)
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line


MTP = {"mtp_layers": 1}
YARN = RopeSpec(scaling=RopeScaling(type="yarn", factor=4.0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (DENSE.model_copy(update=MTP), None),
        (DENSE.model_copy(update={"rope": YARN}), None),
        (DENSE.model_copy(update={**MTP, "rope": YARN}), "beside YaRN"),
        (DENSE.model_copy(update={**MTP, "position": "learned"}), "beside learned positions"),
        (load_catalog_model("deepseek-v3"), None),
    ],
)
def test_megatron_predicts_further_tokens_beside_plain_rope_alone(
    model: ModelSpec, words: str | None
) -> None:
    rule, work = RULES["megatron-mtp-positions"], workload(model)
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is (words is None)
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed", "fsdp2"])
@pytest.mark.parametrize("model", [SPARSE, DENSE])
def test_sparse_attention_is_for_frameworks_that_have_it(framework: str, model: ModelSpec) -> None:
    rule, work = RULES[f"{framework}-sparse-attention"], workload(model)
    legal = model is DENSE
    assert rule.applies(work) is not legal
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is legal
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is legal
    if finding is not None:
        assert "the 128 positions" in finding.line


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed", "fsdp2"])
def test_chosen_blocks_are_for_megatron_alone(framework: str) -> None:
    blocks = {"layers": 1, "heads": 2, "head_dim": 8, "block": 128, "top_k": 16}
    chooses = ModelSpec.model_validate(
        DENSE.model_dump(exclude_unset=True) | {"block_selection": blocks}
    )
    rule = RULES[f"{framework}-sparse-attention"]
    finding = rule.check(finished(workload(chooses), Layout(), 1.0))
    assert finding is not None
    assert "16 chosen blocks of 128 positions" in finding.line


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("FFFfffFf", None),
        ("FfFFffff", "indexers that layers share in another order than by a frequency"),
        (None, None),
    ],
)
def test_layers_share_an_indexer_by_a_frequency(order: str | None, words: str | None) -> None:
    fields = SPARSE.model_dump(exclude_unset=True) | {"layers": 8, "attention_order": order}
    work, layout = workload(ModelSpec.model_validate(fields)), Layout(pp=2, num_micro_batches=2)
    rule = RULES["megatron-sparse-attention"]
    assert feasible(rule, rule.excess(as_table(work, [layout], [1.0]))) is (words is None)
    finding = rule.check(finished(work, layout, 1.0))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (((3, 3), (3, 7)), None),  # layers 0 to 2, 3 to 5, 6 to 8 and 9 to 15: each from an indexer
        (((2, 4), (3, 7)), "layer 5 reuses what a layer of an earlier stage made"),
        (((3, 0), (3, 10)), "leaves a virtual stage without a layer"),
    ],
)
def test_stages_begin_with_an_indexer_of_their_own(
    stages: tuple[tuple[int, ...], ...], words: str | None
) -> None:
    fields = SPARSE.model_dump(exclude_unset=True)
    fields |= {"layers": 16, "attention_order": "FFFFffFffFffFfff"}
    work = workload(ModelSpec.model_validate(fields))
    assert work.model.stage_begins == (0, 1, 2, 3, 6, 9, 12)
    layout = Layout(pp=2, vpp=2, num_micro_batches=2)
    rule = RULES["layers-by-stages"]
    finding = rule.check(replace(finished(work, layout, 1.0), stages=stages))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line
    for pp, fits in ((2, True), (4, True), (7, False)):
        table = as_table(work, [replace(layout, pp=pp, num_micro_batches=pp)], [1.0])
        assert feasible(rule, rule.excess(table)) is fits


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
@pytest.mark.parametrize("model", [LATENT, MOE, DENSE])
def test_latent_experts_are_for_frameworks_that_have_them(framework: str, model: ModelSpec) -> None:
    rule, work = RULES[f"{framework}-latent-experts"], workload(model)
    legal = model is not LATENT
    assert rule.applies(work) is not legal
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is legal
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is legal
    if finding is not None:
        assert f"{framework} is not planned with experts on a projection" in finding.line


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed"])
@pytest.mark.parametrize("model", [UNLIKE_HEADS, WINDOWED, DENSE])
def test_heads_by_kind_of_layer_are_for_frameworks_that_have_them(
    framework: str, model: ModelSpec
) -> None:
    rule, work = RULES[f"{framework}-window-heads"], workload(model)
    legal = model is not UNLIKE_HEADS
    assert rule.applies(work) is not legal
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is legal
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is legal
    if finding is not None:
        assert "(window_heads)" in finding.line
        assert finding.remedy == "Choose the fsdp2 framework for this model."


@pytest.mark.parametrize(
    ("model", "legal"),
    [(LATENT, False), (MOE, True), (DENSE, True), (IN_A_PATTERN, True)],
)
def test_transformers_has_latent_experts_in_layers_of_a_pattern(
    model: ModelSpec, legal: bool
) -> None:
    rule, work = RULES["fsdp2-latent-layers"], workload(model)
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is legal
    assert (rule.check(finished(work, Layout(), 1.0)) is None) is legal


@pytest.mark.parametrize(
    ("latent", "precision", "legal"),
    [(256, "fp8", True), (248, "bf16", True), (248, "fp8", False), (None, "fp8", True)],
)
def test_narrow_products_want_whole_columns_ahead_of_the_experts(
    latent: int | None, precision: str, legal: bool
) -> None:
    assert MOE.moe is not None
    experts = MOE.moe.model_copy(update={"latent_size": latent})
    work = workload(MOE.model_copy(update={"moe": experts}), precision=precision)
    rule = RULES["megatron-latent-experts"]
    assert feasible(rule, rule.excess(as_table(work, [Layout()], [1.0]))) is legal
    finding = rule.check(finished(work, Layout(), 1.0))
    assert (finding is None) is legal
    if finding is not None:
        assert "16 does not divide in fp8" in finding.line


@pytest.mark.parametrize(
    ("work", "layout", "words"),
    [
        (workload(SPARSE), Layout(), None),
        (workload(SPARSE, cuda_graph="partial"), Layout(), "CUDA graphs (partial)"),
        (workload(SPARSE, precision="fp8", fp8_params=True), Layout(), "parameters in FP8"),
        (workload(SPARSE, cluster=cluster("ampere")), Layout(), "kernels for ampere"),
        (workload(SPARSE), Layout(cp=2), "cp 2"),
        (workload(SPARSE.model_copy(update={"mtp_layers": 1})), Layout(), "multi-token prediction"),
        (workload(SPARSE, precision="fp8"), Layout(recompute=4), None),
        (
            workload(SPARSE, precision="fp8"),
            Layout(recompute=12),
            "up-projections recomputed in fp8",
        ),
        (workload(SPARSE), Layout(recompute=12), None),
        (workload(SPARSE), Layout(tp=2), "without sequence parallelism"),
        (workload(SPARSE), Layout(tp=2, sequence_parallel=True), None),
    ],
)
def test_what_megatron_asks_of_sparse_attention(
    work: Workload, layout: Layout, words: str | None
) -> None:
    rule = RULES["megatron-sparse-attention"]
    assert feasible(rule, rule.excess(as_table(work, [layout], [1.0]))) is (words is None)
    finding = rule.check(finished(work, layout, 1.0))
    assert (finding is None) is (words is None)
    if finding is not None and words is not None:
        assert words in finding.line


@pytest.mark.parametrize(("tp", "cp", "legal"), [(4, 8, True), (2, 3, False), (3, 1, False)])
def test_groups_of_mamba_are_copied_over_context_ranks_alone(tp: int, cp: int, legal: bool) -> None:
    rule, work, layout = RULES["mamba-groups-by-tp-cp"], workload(HYBRID), Layout(tp=tp, cp=cp)
    assert feasible(rule, rule.excess(as_table(work, [layout], [1.0]))) is legal
    assert (rule.check(finished(work, layout, 1.0)) is None) is legal


def test_expert_overlap_is_free_without_pipeline_or_without_the_wish() -> None:
    rule = RULES["megatron-expert-overlap"]
    layout = Layout(ep=2, pp=2, recompute=int(Recompute.FULL))
    assert rule.check(finished(workload(MOE), layout, 1.0)) is None
    wish = workload(MOE, ep_overlap=True)
    assert rule.check(finished(wish, Layout(ep=2, num_micro_batches=2), 1.0)) is None
    assert rule.check(finished(wish, Layout(ep=2), 1.0)) is not None


def test_the_dense_width_counts_only_where_a_layer_is_dense() -> None:
    rule = RULES["ffn-by-tp"]
    assert BIASED.dense_layers == 0
    assert rule.check(finished(workload(BIASED), Layout(tp=3), 1.0)) is None
    assert rule.excess(as_table(workload(BIASED), [Layout(tp=3)], [1.0])).tolist() == [0.0]


def test_stages_are_counted_on_the_finished_plan() -> None:
    rule = RULES["layers-by-stages"]
    good = finished(workload(), Layout(pp=4), 1.0)
    for stages in (((3,), (3,), (3,), (2,)), ((6,), (6,)), ((4,), (4,), (4,), (0,)), ((2, 1),) * 4):
        finding = rule.check(replace(good, stages=stages))
        assert finding is not None
        assert "12" in finding.remedy


MODELS = (DENSE, MOE, BIASED, TIED)
DEGREE = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])


@st.composite
def plans(draw: st.DrawFn) -> tuple[Workload, Layout, float]:
    work = workload(
        draw(st.sampled_from(MODELS)),
        gpus=draw(st.sampled_from([8, 96, 1024])),
        seq_len=draw(st.sampled_from([48, 4096, 4100])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp8", "mxfp8"])),
        optimizer=draw(st.sampled_from(["adam", "muon", "lion", "paged-adam", "adam-8bit"])),
        ep_overlap=draw(st.booleans()),
        reserve_gib=draw(st.sampled_from([0.0, 4.0])),
        cluster=cluster(
            draw(st.sampled_from(["volta", "hopper", "blackwell"])),
            draw(st.sampled_from([1, 8, 16])),
        ),
    )
    axes = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "num_micro_batches")
    layout = Layout(
        **{axis: draw(DEGREE) for axis in axes},
        sequence_parallel=draw(st.booleans()),
        zero_stage=draw(st.integers(0, 3)),
        recompute=draw(st.integers(0, 64)),
        recompute_layers=draw(st.sampled_from([0, 1, 3, 6, 12, 10**6])),
    )
    return work, layout, draw(st.sampled_from([1.0, 76.0, 79.5, 80.0, 80.01, 500.0]))


@settings(max_examples=examples(150, 8), deadline=None)
@given(plans(), plans())
def test_excess_is_positive_exactly_where_check_finds_something(
    one: tuple[Workload, Layout, float], other: tuple[Workload, Layout, float]
) -> None:
    work, layout, memory = one
    layouts, memories = [layout, other[1]], [memory, other[2]]
    table = as_table(work, layouts, memories)
    for rule in RULES.values():
        excess = rule.excess(table)
        assert excess.shape == (2,)
        for i in range(2):
            found = rule.check(finished(work, layouts[i], memories[i]))
            assert (excess[i] > 0) == (found is not None), rule.name


@settings(max_examples=examples(50), deadline=None)
@given(plans(), plans())
def test_fields_that_a_rule_does_not_read_change_nothing(
    one: tuple[Workload, Layout, float], other: tuple[Workload, Layout, float]
) -> None:
    work, layout, memory = one
    for rule in RULES.values():
        read = rule.fields_read()
        if read is None:
            continue
        others = {key: value for key, value in vars(other[1]).items() if key not in read}
        table = as_table(work, [layout, replace(layout, **others)], [memory, other[2]])
        before, after = rule.excess(table)
        assert before == after, rule.name


def test_fields_read_are_named() -> None:
    assert RULES["heads-by-tp-cp"].fields_read() == frozenset(("tp", "cp"))
    assert RULES["hbm"].fields_read() is None


def test_post_keeps_the_legal_of_many_and_may_be_conditional() -> None:
    rule, work = RULES["gpu-budget"], workload(gpus=8)
    layouts = [Layout(dp=dp) for dp in (4, 8, 16)]
    excess = rule.excess(as_table(work, layouts, [1.0] * 3))
    model = cp_model.CpModel()
    literals = [model.new_bool_var(f"dp {one.dp}") for one in layouts]
    switch = model.new_bool_var("rule on")
    model.add_exactly_one(literals)
    rule.post(model, literals, excess).only_enforce_if(switch)
    model.maximize(
        sum(int(one.dp) * x for one, x in zip(layouts, literals, strict=True)) + 100 * switch
    )
    solver = cp_model.CpSolver()
    assert solver.solve(model) == cp_model.OPTIMAL
    assert solver.value(literals[1]) == 1
    assert solver.value(switch) == 1


@pytest.mark.parametrize("worst", [np.inf, np.nan, 1e300, 1e-300])
def test_post_forbids_any_positive_or_undefined_excess(worst: float) -> None:
    # An infinite excess once became int64's minimum, a negative coefficient, and so was allowed.
    rule = RULES["hbm"]
    assert not feasible(rule, np.array([worst, worst]))
    assert feasible(rule, np.array([worst, -np.inf]))


def test_post_refuses_lists_of_different_length() -> None:
    model = cp_model.CpModel()
    with pytest.raises(ValueError, match="2 excesses for 1 literals"):
        RULES["hbm"].post(model, [model.new_bool_var("only")], np.array([0.0, 0.0]))


def test_rules_for_takes_the_general_rules_and_those_of_the_framework() -> None:
    names = {rule.name for rule in rules_for(workload())}
    assert {"hbm", "scale-up-tp", "heads-by-tp", "megatron-zero-needs-pp-1"} <= names
    assert "experts-by-ep" not in names
    assert "expert-axes-need-experts" not in {rule.name for rule in rules_for(workload(MOE))}
    asked = rules_for(replace(workload(), inside_domain=("cp",)))
    assert "nvlink-domain" in {rule.name for rule in asked} - names
    torchtitan = {rule.name for rule in rules_for(workload(framework="torchtitan-compile"))}
    assert "torchtitan-kv-heads" in torchtitan
    assert not any(name.startswith("megatron") for name in torchtitan)


def test_scale_up_domain_refuses_other_axes() -> None:
    with pytest.raises(ValueError, match="give one or more of tp, cp, ep, etp"):
        ScaleUpDomain(())


def test_a_long_context_layout_that_was_really_trained_is_legal() -> None:
    """Llama 3 405B at 131,072 tokens: tp 8, cp 16, pp 16, dp 8 on 16,384 GPUs (arXiv 2407.21783, table 4)."""
    model = ModelSpec(
        layers=126, hidden=16384, ffn_hidden=53248, heads=128, kv_heads=8, vocab=128256
    )
    work = workload(model, gpus=16384, global_batch=128, seq_len=131072)
    layout = Layout(
        tp=8, cp=16, pp=16, dp=8, num_micro_batches=16, sequence_parallel=True, zero_stage=1
    )
    plan = finished(work, layout, 69.0)
    assert [rule.name for rule in rules_for(work) if rule.check(plan) is not None] == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"qk_norm": True}, None),
        ({"activation": "gelu"}, "gelu"),
        ({"position": "learned"}, "learned"),
        ({"attention": MLA}, "latent attention"),
    ],
)
def test_torchtitan_builds_some_architectures_only(
    changes: dict[str, Any], word: str | None
) -> None:
    rule, work = RULES["torchtitan-architecture"], workload(DENSE.model_copy(update=changes))
    excess = rule.excess(as_table(work, [Layout()], [1.0]))
    finding = rule.check(finished(work, Layout(), 1.0))
    assert rule.applies(work) is (word is not None)
    assert feasible(rule, excess) is (finding is None) is (word is None)
    assert word is None or (finding is not None and word in finding.words)


@pytest.mark.parametrize(
    ("dispatcher", "architecture", "device", "runs"),
    [
        ("deepep", "hopper", "h100", True),
        ("deepep", "blackwell", "gb200", False),
        ("hybridep", "blackwell", "gb300", True),
        ("hybridep", "ampere", "a100", False),
        ("deepep", "ampere", "a100", True),
        ("hybridep", "ada", "l40s", False),
        ("alltoall", "ada", "l40s", True),
    ],
)
def test_dispatchers_run_on_their_devices(
    dispatcher: str, architecture: Architecture, device: str, runs: bool
) -> None:
    spec = cluster(architecture)
    spec = spec.model_copy(update={"device": spec.device.model_copy(update={"name": device})})
    work = workload(MOE, cluster=spec, moe_dispatch=dispatcher)
    rule, layout = RULES["megatron-dispatcher-device"], Layout(dp=2, ep=2)
    assert (rule.excess(as_table(work, [layout], [1.0]))[0] <= 0) == runs
    assert (rule.check(finished(work, layout, 1.0)) is None) == runs


@pytest.mark.parametrize(
    ("dispatcher", "domain", "ep", "fits"),
    [
        ("deepep", 8, 8, True),
        ("deepep", 8, 6, False),  # deep_ep/buffers/legacy.py: Unsupported number of EP ranks
        ("deepep", 8, 64, True),
        ("deepep", 8, 256, False),
        ("deepep", 4, 8, False),  # it counts on 8 GPUs joined by NVLink
        ("deepep", 4, 4, True),
        ("hybridep", 8, 6, True),
        ("hybridep", 8, 12, False),  # hybrid_ep_buffer.py: divisible by the ranks of a domain
        ("hybridep", 8, 64, True),
        ("hybridep", 72, 64, True),
        ("hybridep", 72, 128, False),
        ("hybridep", 72, 144, True),
        ("alltoall", 8, 12, True),
    ],
)
def test_groups_of_experts_that_dispatchers_know(
    dispatcher: str, domain: int, ep: int, fits: bool
) -> None:
    work = workload(MOE, cluster=cluster("blackwell", domain), moe_dispatch=dispatcher)
    rule, layout = RULES["megatron-dispatcher-ranks"], Layout(dp=ep, ep=ep)
    assert (rule.excess(as_table(work, [layout], [1.0]))[0] <= 0) == fits
    assert (rule.check(finished(work, layout, 1.0)) is None) == fits


@pytest.mark.parametrize("mask", [0, 2, 4, 6, 32])
@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [DENSE, MOE])
def test_graphs_refuse_the_same_recomputation_on_both_sides(
    model: ModelSpec, precision: str, dispatcher: str, mask: int
) -> None:
    work = workload(model, precision=precision, moe_dispatch=dispatcher, cuda_graph="partial")
    rule, layout = RULES["megatron-partial-graphs"], Layout(dp=2, recompute=mask)
    legal = rule.excess(as_table(work, [layout], [1.0]))[0] <= 0
    assert legal == (rule.check(finished(work, layout, 1.0)) is None)


@pytest.mark.parametrize(
    ("model", "dispatcher", "precision", "layout", "legal"),
    [
        (DENSE, "alltoall", "bf16", Layout(dp=2, recompute=32), True),
        (MOE, "hybridep", "mxfp8", Layout(dp=2, ep=2, recompute=8), True),
        (MOE, "deduplicated", "mxfp8", Layout(dp=2, ep=2), True),
        (MOE, "alltoall", "mxfp8", Layout(dp=2, ep=2), False),
        (MOE, "hybridep", "bf16", Layout(dp=2, ep=2), False),
        (MOE, "hybridep", "mxfp8", Layout(dp=2, etp=2), False),
        (MOE, "hybridep", "mxfp8", Layout(dp=2, ep=2, recompute=4), False),
        (MOE, "hybridep", "mxfp8", Layout(dp=2, ep=2, recompute=32), False),
    ],
)
def test_whole_step_graphs_hold_experts_without_questions_to_the_host(
    model: ModelSpec, dispatcher: str, precision: str, layout: Layout, legal: bool
) -> None:
    work = workload(model, precision=precision, moe_dispatch=dispatcher, cuda_graph="full")
    rule = RULES["megatron-full-graph"]
    assert (rule.excess(as_table(work, [layout], [1.0]))[0] <= 0) == legal
    assert (rule.check(finished(work, layout, 1.0)) is None) == legal
