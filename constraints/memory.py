"""HBM: the fullest pipeline rank must fit into one GPU."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import (
    AtLeast,
    AtMost,
    Finding,
    FinishedPlan,
    LayoutTable,
    Refuses,
    Requires,
    Rule,
    When,
    as_excess,
    column,
    of,
    set_bits,
)
from meshwright.costmodel.activations import (
    offloaded_per_layer,
    offloads,
    offloads_any,
    offloads_inputs,
)
from meshwright.costmodel.execution_names import OFFLOADED_INPUTS
from meshwright.costmodel.footprint import (
    ALLOCATOR_SHARE,
    CONTEXT_GIB,
    GIB,
    offloaded_states_gib,
    usable_hbm_gib,
)
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.states import offloaded_bytes, rank_parameters
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec


class HbmCapacity(Rule):
    """peak memory <= HBM of one GPU, less fragments, the CUDA and NCCL context, and the user's reserve."""

    name = "hbm"
    unit = "GiB"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return np.asarray(table.memory_gib, dtype=np.float64) - usable_hbm_gib(table.workload)

    def check(self, plan: FinishedPlan) -> Finding | None:
        hbm, reserve = plan.workload.cluster.device.hbm_gib, plan.workload.reserve_gib
        margin = plan.workload.memory_margin
        limit = (ALLOCATOR_SHARE * hbm - CONTEXT_GIB - reserve) / margin
        fullest = max(range(len(plan.memory_gib)), key=lambda rank: plan.memory_gib[rank])
        peak = plan.memory_gib[fullest]
        if peak <= limit:
            return None
        reserved = f" and {reserve:g} GiB in reserve" if reserve else ""
        if margin > 1:
            reserved += f" and {margin - 1:.1%} for the error of the prediction"
        return self.finding(
            value=peak,
            limit=limit,
            words=(
                f"pipeline rank {fullest} needs {peak:.1f} GiB, {peak - limit:.1f} more than the {limit:.1f} "
                f"that a {hbm:g} GiB GPU has beside fragments, {CONTEXT_GIB:g} GiB of context{reserved}"
            ),
            remedy="Raise tp, pp, cp or the ZeRO stage, recompute more, or lower micro_batch.",
        )


# The host's memory: what all GPUs of a node offload must fit into it.


class HostMemory(Rule):
    """GPUs of a node in use x what the rank that offloads most keeps there <= the cluster's host_memory_gib.

    Of parameters, gradients and optimizer states; a node counts as full of that rank, wherever the mapping
    puts the others.
    """

    name = "host-memory"
    unit = "GiB"

    def applies(self, workload: Workload) -> bool:
        return workload.cluster.host_memory_gib is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        """With parameters spread evenly over the ranks: no split keeps less on its fullest host."""
        workload, layouts = table.workload, table.layouts
        return _host_excess(workload, layouts, _even_states(workload, layouts))

    def check(self, plan: FinishedPlan) -> Finding | None:
        remedy = "Offload a smaller share, shard over more ranks, or raise host_memory_gib."
        return _over_host(self, plan, "optimizer states", 0.0, remedy)


def _over_host(
    rule: Rule, plan: FinishedPlan, what: str, inputs_gib: float, remedy: str
) -> Finding | None:
    """What a rule finds of a host, on which each GPU keeps optimizer states and so much beside them."""
    work, layout, limit = plan.workload, plan.layout, _host_gib(plan.workload)
    gpus = min(work.cluster.gpus_per_node, int(layout.gpus))
    states_gib = float(np.max(offloaded_states_gib(work, layout, plan.stages)))
    held_gib = gpus * (inputs_gib + states_gib)
    words = (
        f"{gpus} GPUs of a node keep {held_gib:.0f} GiB of {what} on their host, "
        f"{held_gib - limit:.0f} more than the {limit:g} that it has"
    )
    return rule.over(value=held_gib, limit=limit, words=words, remedy=remedy)


def _even_states(workload: Workload, layouts: Layout) -> Floats:
    """Bytes that a GPU keeps on its host, with parameters spread evenly over the ranks."""
    dense, expert = rank_parameters(workload.model, layouts, None)
    of_dense, of_expert = offloaded_bytes(workload, layouts)
    return dense * of_dense + expert * of_expert


def _host_excess(workload: Workload, layouts: Layout, each: Floats) -> NDArray[np.float64]:
    """GiB over what a host has, with so many bytes of each GPU of a node in use."""
    gpus = np.minimum(workload.cluster.gpus_per_node, np.asarray(layouts.gpus))
    return as_excess(gpus * np.asarray(each / GIB, dtype=np.float64) - _host_gib(workload))


def _host_gib(workload: Workload) -> float:
    limit = workload.cluster.host_memory_gib
    return float("inf") if limit is None else limit


# Optimizer states in the host's memory: what they go together with.


_FP32_BYTES = 4

OFFLOADED_SHARE = AtMost(
    name="offloaded-share",
    sentence="optimizer_offload <= 100: percent of the parameters",
    unit="percent",
    value=of("optimizer_offload"),
    limit=of(number=100),
    words="{value} % of the optimizer's states offloaded",
    remedy="Give a share of 0 to 100 %.",
)

MEGATRON_OFFLOAD_ZERO = Requires(
    name="megatron-offload-zero",
    sentence="zero_stage = 1 where optimizer states are offloaded",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=1, most=1),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 1 (the distributed optimizer), or offload nothing.",
)
"""--optimizer-cpu-offload needs --use-precision-aware-optimizer (megatron/training/arguments.py), which
needs the distributed optimizer (megatron/core/optimizer/optimizer_config.py)."""


def _other_states(workload: Workload) -> bool:
    """Whether states are not those of Adam in fp32 beside bf16 weights."""
    narrow = workload.moment_bytes < _FP32_BYTES
    return workload.optimizer != "adam" or narrow or workload.precision == "fp16"


MEGATRON_OFFLOAD_ADAM = AtMost(
    name="megatron-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments, and not in fp16",
    unit="percent",
    binds=_other_states,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded in {precision}",
    remedy="Train with adam in another precision and without 16-bit moments, or offload nothing.",
)
"""The flag that it needs is for Adam alone (optimizer_config.py); hybrid_optimizer.py passes no type of
moments on, and speaks of mixed precision in bf16."""


def _narrow_parameters(workload: Workload) -> bool:
    """Whether parameters live in FP8 under scales of the tensor's own."""
    return bool(workload.fp8_params) and workload.fp8_recipe != "delayed"


MEGATRON_OFFLOAD_FP8 = AtMost(
    name="megatron-offload-fp8",
    sentence="optimizer_offload = 0 with FP8 parameters unless their scales are delayed",
    unit="percent",
    binds=_narrow_parameters,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the optimizer's states offloaded beside FP8 parameters",
    remedy="Do not allow fp8-params, or offload nothing.",
)
"""megatron/training/arguments.py asserts it of --fp8-param-gather."""

DEEPSPEED_OFFLOAD_ZERO = Requires(
    name="deepspeed-offload-zero",
    sentence="zero_stage >= 1 where optimizer states are offloaded",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=1),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 1, 2 or 3, or offload nothing.",
)
"""Only the optimizers of ZeRO read offload_optimizer (DeepSpeed 0.19.8, runtime/engine.py)."""

DEEPSPEED_OFFLOAD_WHOLE = Requires(
    name="deepspeed-offload-whole",
    sentence="optimizer_offload = 100 where optimizer states are offloaded",
    when=(When("optimizer_offload", least=1),),
    needs=When("optimizer_offload", least=100),
    words="{optimizer_offload} % of the optimizer's states offloaded",
    remedy="Offload 0 or 100 %.",
)
"""A ratio is for ZeRO 3 alone (DeepSpeed 0.19.8, runtime/zero/config.py), where it counts whole groups of
1e9 elements of a rank (runtime/zero/stage3.py): left out by choice."""


def _not_adam_in_fp32(workload: Workload) -> bool:
    """Whether states are not those of Adam in fp32."""
    return workload.optimizer != "adam" or workload.moment_bytes < _FP32_BYTES


DEEPSPEED_OFFLOAD_ADAM = AtMost(
    name="deepspeed-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments",
    unit="percent",
    binds=_not_adam_in_fp32,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded",
    remedy="Train with adam without 16-bit moments, or offload nothing.",
)
"""Asserted of --cpu-optimizer (Megatron-DeepSpeed 4efb479, megatron/optimizer/__init__.py); DeepSpeed
refuses most other optimizers of the GPU (runtime/engine.py, zero_force_ds_cpu_optimizer)."""

DEEPSPEED_OFFLOAD_RULES: tuple[Rule, ...] = (
    DEEPSPEED_OFFLOAD_ZERO,
    DEEPSPEED_OFFLOAD_WHOLE,
    DEEPSPEED_OFFLOAD_ADAM,
)

FSDP_OFFLOAD_ZERO = Requires(
    name="fsdp-offload-zero",
    sentence="zero_stage = 3 where parameters, gradients and optimizer states are offloaded",
    when=(When("optimizer_offload", least=1),),
    needs=When("zero_stage", least=3),
    words="{optimizer_offload} % of the optimizer's states offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 3 (reshard after forward), or offload nothing.",
)
"""FSDP2 offloads with resharding or without (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_api.py,
CPUOffloadPolicy); without it the weights it would make room for stay whole: left out by choice."""

FSDP_OFFLOAD_SHARDS = AtLeast(
    name="fsdp-offload-shards",
    sentence="dp x cp >= 2 where parameters, gradients and optimizer states are offloaded",
    unit="ranks",
    when=(When("optimizer_offload", least=1),),
    value=of("dp", "cp"),
    limit=of(number=2),
    words="{optimizer_offload} % of the optimizer's states offloaded with dp {dp} and cp {cp}",
    remedy="Shard over two ranks or more, or offload nothing.",
)
"""torchtitan shards, and offloads, where its mesh has an axis to shard over
(torchtitan/distributed/parallel_dims.py, fsdp_enabled)."""

FSDP_OFFLOAD_WHOLE = Requires(
    name="fsdp-offload-whole",
    sentence="optimizer_offload = 100 where parameters, gradients and optimizer states are offloaded",
    when=(When("optimizer_offload", least=1),),
    needs=When("optimizer_offload", least=100),
    words="{optimizer_offload} % of the optimizer's states offloaded",
    remedy="Offload 0 or 100 %.",
)
"""A switch for all parameters (torchtitan/config/configs.py; accelerate/utils/dataclasses.py)."""


def _not_adam_in_bf16(workload: Workload) -> bool:
    """Whether the run is another than Adam in fp32 beside 16-bit weights of bf16's range."""
    return _not_adam_in_fp32(workload) or workload.precision != "bf16"


FSDP_OFFLOAD_ADAM = AtMost(
    name="fsdp-offload-adam",
    sentence="optimizer_offload = 0 unless the optimizer is Adam with fp32 moments, in bf16",
    unit="percent",
    binds=_not_adam_in_bf16,
    value=of("optimizer_offload"),
    limit=of(number=0),
    words="{value} % of the states of {optimizer} offloaded in {precision}",
    remedy="Train with adam in bf16 without 16-bit moments, or offload nothing.",
)
"""By choice: how long other optimizers take on a host, and what loss scaling and FP8 gathers do to parameters
that lie there, is not priced."""

FSDP_OFFLOAD_RULES: tuple[Rule, ...] = (
    FSDP_OFFLOAD_ZERO,
    FSDP_OFFLOAD_SHARDS,
    FSDP_OFFLOAD_WHOLE,
    FSDP_OFFLOAD_ADAM,
)

MEGATRON_OFFLOAD_RULES: tuple[Rule, ...] = (
    MEGATRON_OFFLOAD_ZERO,
    MEGATRON_OFFLOAD_ADAM,
    MEGATRON_OFFLOAD_FP8,
)


# What Megatron-LM's offloading of activations does not go with (megatron-core 0.19.2).


_EXPERT_MODULES = ("expert_fc1", "moe_act")


def has_modules(model: ModelSpec, modules: Collection[str]) -> bool:
    """Whether all modules of a list can be offloaded in a model.

    Parameters
    ----------
    model : ModelSpec
        Any.
    modules : collection of str
        Of `meshwright.costmodel.execution_names.OFFLOADED_MODULES`, one by one.

    Returns
    -------
    bool
        False where there are no experts, or where not every layer attends alike, and of inputs of layers.
    """
    if {*modules} & {*OFFLOADED_INPUTS}:
        return False
    of_experts = any(module in _EXPERT_MODULES for module in modules)
    of_attention = any(module not in _EXPERT_MODULES for module in modules)
    alike = model.indexer is None and not model.linear_layers
    return (model.moe is not None or not of_experts) and (alike or not of_attention)


def has_mamba(model: ModelSpec) -> bool:
    """Whether some layer has a Mamba block, or a pattern says what layers are.

    Parameters
    ----------
    model : ModelSpec
        Any.

    Returns
    -------
    bool
    """
    return model.hybrid_pattern is not None or model.mamba_beside_attention


def _beside_offloaded_modules(workload: Workload) -> list[str]:
    """What the offloaded modules of a workload do not go with, whatever the layout."""
    model, modules = workload.model, workload.offload_modules.split("+")
    by_words = {
        "a model without experts": model.moe is None and not {*modules}.isdisjoint(_EXPERT_MODULES),
        "linear or sparse attention": "core_attn" in modules
        and (model.linear_layers > 0 or model.indexer is not None),
        "Mamba blocks": has_mamba(model),
        "a CUDA graph of the whole step": workload.cuda_graph == "full",
        "Megatron's modules": workload.offload_modules in OFFLOADED_INPUTS,
    }
    return [words for words, is_so in by_words.items() if is_so]


MEGATRON_OFFLOADED_MODULES = Refuses(
    name="megatron-offloaded-modules",
    sentence="Offloaded are modules of experts where there are experts, and of attention where every layer "
    "attends alike; no CUDA graph holds the whole step, and no layer is a Mamba block",
    binds=offloads_any,
    broken=_beside_offloaded_modules,
    joined_by=" and ",
    words="offloading {offload_modules} does not go with {broken}",
    remedy="Offload other modules or nothing, or capture attention and router only.",
)
"""In a graph of the whole step Megatron asks for a cap on copies under way, which has no price here
(megatron/core/transformer/transformer_config.py, fine_grained_offloading_max_inflight_offloads)."""


MEGATRON_OFFLOAD_RECOMPUTE = Requires(
    name="megatron-offload-recompute",
    sentence="no full recomputation where activations are offloaded",
    binds=offloads_any,
    needs=When("recompute", lacks=int(Recompute.FULL)),
    words="activations offloaded of layers that are recomputed in full",
    remedy="Recompute single modules, or offload nothing.",
)
"""The forward pass of such a layer saves its input alone, which is no module's."""

MEGATRON_OFFLOAD_UP_PROJECTION = Requires(
    name="megatron-offload-up-projection",
    sentence="MLA's up-projection not recomputed where core_attn is offloaded",
    binds=lambda work: offloads(work, "core_attn"),
    needs=When("recompute", lacks=int(Recompute.MLA_UP_PROJECTION)),
    words="queries, keys and values offloaded that are recomputed as well",
    remedy="Do not recompute mla_up_proj, or offload other modules.",
)
"""Both would give back the same tensors (megatron/core/transformer/multi_latent_attention.py)."""

MEGATRON_OFFLOAD_EXPERTS = Requires(
    name="megatron-offload-experts",
    sentence="experts not recomputed where expert_fc1 or moe_act is offloaded",
    binds=lambda work: offloads(work, "expert_fc1") or offloads(work, "moe_act"),
    needs=When("recompute", lacks=int(Recompute.EXPERTS)),
    words="activations of experts offloaded that are recomputed as well",
    remedy="Do not recompute moe, or offload other modules.",
)
"""What the checkpoint around experts drops there is nothing to offload of, and later releases refuse it
(megatron/core/transformer/transformer_config.py)."""


def offload_refuses_recompute(workload: Workload, mask: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which recomputation does not go with the modules that a workload offloads.

    Parameters
    ----------
    workload : Workload
        With its modules.
    mask : array of int, shape [n]
        `Recompute` masks.

    Returns
    -------
    array of bool, shape [n]
    """
    refused = 0
    if offloads_inputs(workload):
        return np.asarray((mask & int(Recompute.FULL)) == 0)
    if offloads_any(workload):
        refused |= int(Recompute.FULL)
    if offloads(workload, "core_attn"):
        refused |= int(Recompute.MLA_UP_PROJECTION)
    if offloads(workload, "expert_fc1") or offloads(workload, "moe_act"):
        refused |= int(Recompute.EXPERTS)
    return np.asarray((mask & refused) > 0)


OFFLOAD_RECOMPUTED = Requires(
    name="offload-recomputed",
    sentence="full recomputation where inputs of layers are offloaded",
    binds=offloads_inputs,
    needs=When("recompute", has=int(Recompute.FULL)),
    words="inputs of layers offloaded that are not recomputed in full",
    remedy="Recompute every layer, or offload nothing.",
)
"""accelerate asks for it (accelerate/utils/dataclasses.py, activation_checkpointing_offload), and DeepSpeed's
checkpoints are such inputs. Hooks of TRL and torchtune take other saved tensors too; by choice, not without
recomputation: under FSDP2 gathered weights, which views of linear layers save, would go to the host with
them (trl/models/activation_offloading.py, update_model_params knows the sharded ones)."""

OFFLOADED_INPUTS_DEGREES = AtMost(
    name="offloaded-inputs-degrees",
    sentence="pp ep <= 1 where inputs of layers are offloaded",
    binds=offloads_inputs,
    value=of("pp", "ep"),
    words="pp {pp} x ep {ep} beside inputs of layers on the host",
    remedy="Keep pp and ep at 1, or offload nothing.",
)
"""TRL's trainers, torchtune's recipes and Axolotl run whole models (trl/trainer/sft_trainer.py). By choice of
DeepSpeed's checkpoints too: those of a pipeline's micro-batches in flight would all wait on the host."""


class HostInputs(Rule):
    """GPUs of a node in use x inputs of layers, parameters and states that each keeps there <= the cluster's
    host_memory_gib.
    """

    name = "host-inputs"
    unit = "GiB"

    def applies(self, workload: Workload) -> bool:
        return workload.cluster.host_memory_gib is not None and offloads_inputs(workload)

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        workload, layouts = table.workload, table.layouts
        experts = workload.model.moe is not None
        blocks = workload.model.blocks_of(experts=experts)
        inputs = workload.model.layers * offloaded_per_layer(workload, layouts, blocks).copied
        return _host_excess(workload, layouts, inputs + _even_states(workload, layouts))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, layout = plan.workload, plan.layout
        if not self.applies(work):
            return None
        tokens = work.seq_len * int(layout.micro_batch) * work.step_kind.sequences // int(layout.cp)
        layers = sum(sum(rank) for rank in plan.stages)
        shards = int(layout.tp) if layout.sequence_parallel else 1
        inputs_gib = layers * tokens * 2 * work.model.hidden / shards / GIB
        remedy = "Lower micro_batch, raise cp, offload less, or raise host_memory_gib."
        return _over_host(self, plan, "inputs and states", inputs_gib, remedy)


OFFLOADED_PARAMETERS_ZERO = Requires(
    name="offloaded-parameters-zero",
    sentence="zero_stage = 3 where parameters are offloaded",
    binds=lambda work: work.offload_parameters,
    needs=When("zero_stage", least=3),
    words="parameters offloaded under ZeRO {zero_stage}",
    remedy="Use ZeRO stage 3, or leave parameters on the GPUs.",
)
"""Below it no shard of theirs is there to be offloaded (DeepSpeed 0.19.8, runtime/zero/stage3.py alone reads
offload_param)."""

INPUT_OFFLOAD_RULES: tuple[Rule, ...] = (
    OFFLOAD_RECOMPUTED,
    OFFLOADED_INPUTS_DEGREES,
    HostInputs(),
)


MEGATRON_ACTIVATION_RULES: tuple[Rule, ...] = (
    MEGATRON_OFFLOADED_MODULES,
    MEGATRON_OFFLOAD_RECOMPUTE,
    MEGATRON_OFFLOAD_UP_PROJECTION,
    MEGATRON_OFFLOAD_EXPERTS,
)


# What recomputation can name: modules that the model has, and not beside all of a layer.


class RecomputedModulesExist(Rule):
    """Only known modules; experts and their activation need experts, the MLA up-projection needs MLA."""

    name = "recomputed-modules"
    unit = "modules"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model, mask = table.workload.model, column(table, "recompute")
        allowed = sum(Recompute)
        if model.moe is None:
            allowed &= ~int(Recompute.MOE_ACTIVATION | Recompute.EXPERTS)
        if model.attention is None:
            allowed &= ~int(Recompute.MLA_UP_PROJECTION)
        return as_excess(set_bits(mask & ~np.int64(allowed)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model = plan.workload.model
        names = [module.name for module in Recompute if module is not Recompute.NONE]
        missing = []
        for bit, is_on in enumerate(reversed(f"{int(plan.layout.recompute):b}")):
            name = names[bit] if bit < len(names) else f"bit {bit}"
            exists = bit < len(names)
            if name in ("MOE_ACTIVATION", "EXPERTS"):
                exists = model.moe is not None
            elif name == "MLA_UP_PROJECTION":
                exists = model.attention is not None
            if is_on == "1" and not exists:
                missing.append(str(name).lower().replace("_", " "))
        return self.over(
            value=len(missing),
            words=f"recomputes {', '.join(missing)}, which {model.name} does not have",
            remedy="Leave it out: moe and moe_act need experts, mla_up_proj multi-head latent attention.",
        )


class FullRecomputeStandsAlone(Rule):
    """Recomputing whole layers excludes naming modules of them."""

    name = "full-recompute-alone"
    unit = "modules"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mask = column(table, "recompute")
        modules = set_bits(mask & ~np.int64(Recompute.FULL))
        return as_excess(np.where(mask & int(Recompute.FULL), modules, 0))

    def check(self, plan: FinishedPlan) -> Finding | None:
        digits = f"{int(plan.layout.recompute):06b}"
        full, modules = digits[-6] == "1", digits.count("1") - 1
        if not full or modules == 0:
            return None
        return self.finding(
            value=modules,
            words=f"full recomputation together with {modules} single module(s)",
            remedy="Choose either full recomputation or a list of modules.",
        )
