"""The expert axes: the experts are dealt over the GPUs of one pipeline stage as etp * ep * edp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.rule import (
    AtMost,
    Condition,
    Divides,
    Excludes,
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
)
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.stacks import WITHOUT_FLASH
from meshwright.costmodel.workload import GATHERS, HIERARCHICAL, Workload, largest_swap
from meshwright.frameworks.megatron import MEGATRON
from meshwright.frameworks.record import Framework, TokenDispatcher
from meshwright.model_specs.blocks import sharing_schedule


def has_experts(workload: Workload) -> bool:
    """Whether the model has experts."""
    return workload.model.moe is not None


def is_dense(workload: Workload) -> bool:
    """Whether the model has no experts."""
    return workload.model.moe is None


def experts(workload: Workload) -> int:
    """Routed experts of a layer; 0 where there are none."""
    moe = workload.model.moe
    return 0 if moe is None else moe.experts


EXPERTS_BY_EXPERT_PARALLEL = Divides(
    name="experts-by-ep",
    sentence="experts mod ep = 0",
    unit="experts left over",
    binds=has_experts,
    number=of(number=experts),
    by=of("ep"),
    words="{number} experts do not divide by ep {ep}",
    remedy="Take an ep that divides {number}.",
)

EXPERT_GRID = Divides(
    name="expert-grid",
    sentence="(tp cp dp) mod (etp ep) = 0: whole replicas of the experts fill the stage",
    unit="GPUs left over",
    number=of("tp", "cp", "dp"),
    by=of("etp", "ep"),
    words="etp {etp} x ep {ep} = {divisor} does not divide the {number} GPUs of a stage",
    remedy="Take etp and ep whose product divides tp x cp x dp = {number}.",
)

EXPERT_AXES_NEED_EXPERTS = AtMost(
    name="expert-axes-need-experts",
    sentence="ep etp <= 1 in a dense model",
    binds=is_dense,
    value=of("ep", "etp"),
    words="ep {ep} and etp {etp} on a model without experts",
    remedy="Set ep and etp to 1.",
)
"""Megatron (core 0.19.2, training/arguments.py) refuses ep and takes etp; torchtitan 0.3.0 takes ep;
neither cuts anything. A plan that says so would not be what runs."""


# Tensor parallelism cuts the feed-forward width into equal slices.


class FeedForwardByTensor(Rule):
    """ffn_hidden mod tp = 0 where a layer is dense, and the shared experts' width mod tp = 0."""

    name = "ffn-by-tp"
    unit = "columns left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        model, tp = table.workload.model, column(table, "tp")
        dense = model.ffn_hidden if model.has_dense_feed_forward else 0
        shared = model.moe.shared_width if model.moe is not None else 0
        return as_excess(np.maximum(dense % tp, shared % tp))

    def check(self, plan: FinishedPlan) -> Finding | None:
        model, tp = plan.workload.model, int(plan.layout.tp)
        widths = {}
        dense = model.moe is None or model.moe.dense_layers > 0 or model.moe.every > 1
        if model.hybrid_pattern is not None:
            dense = model.hybrid_pattern.count("-") > 0
        if dense:
            widths["ffn_hidden"] = model.ffn_hidden
        if model.moe is not None and model.moe.shared_width > 0:
            widths["shared expert width"] = model.moe.shared_width
        for what, width in widths.items():
            remainder = width - (width // tp) * tp
            if remainder:
                return self.finding(
                    value=remainder,
                    words=f"{what} {width} does not divide by tp {tp}",
                    remedy=f"Take a tp that divides {width}.",
                )
        return None


EXPERT_WIDTH_BY_EXPERT_TENSOR = Divides(
    name="expert-ffn-by-etp",
    sentence="moe_ffn_hidden mod etp = 0",
    unit="columns left over",
    binds=has_experts,
    number=of(number=lambda work: 0 if work.model.moe is None else work.model.moe.moe_ffn_hidden),
    by=of("etp"),
    words="expert width {number} does not divide by etp {etp}",
    remedy="Take an etp that divides {number}; 1 always does.",
)


# Which number formats a device multiplies.


ARCHITECTURES = {
    "fp16": {"volta", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "bf16": {"ampere", "ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "fp8": {"ada", "hopper", "blackwell", "blackwell-rtx", "cdna3", "cdna4"},
    "mxfp8": {"blackwell"},
    "nvfp4": {"blackwell"},
}
"""By number format: the architectures that multiply it."""


def is_narrow(workload: Workload) -> bool:
    """Whether products take numbers of fewer than 16 bits."""
    return workload.precision not in ("bf16", "fp16")


class PrecisionOnDevice(Rule):
    """bf16 from Ampere on, fp8 on Ada, Hopper, Blackwell, CDNA 3 and 4, mxfp8 and nvfp4 on Blackwell."""

    name = "precision-on-device"
    unit = "formats"
    of_workload = True

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        architecture = table.workload.cluster.device.architecture
        supported = architecture in ARCHITECTURES.get(table.workload.precision, set())
        return as_excess(np.full_like(column(table, "tp"), 0 if supported else 1))

    def check(self, plan: FinishedPlan) -> Finding | None:
        device, wanted = plan.workload.cluster.device, plan.workload.precision
        formats = ["fp16"]
        if device.architecture != "volta":
            formats.append("bf16")
        if device.architecture not in ("volta", "ampere"):
            formats.append("fp8")
        if device.architecture == "blackwell":
            formats += ["mxfp8", "nvfp4"]
        if wanted in formats:
            return None
        return self.finding(
            value=1,
            words=f"{device.name} ({device.architecture}) has no {wanted} matrix units",
            remedy=f"Choose one of {', '.join(formats)}, or another device.",
        )


# What Megatron-LM's dispatchers of tokens do not go with (megatron-core 0.19.2): devices, ranks, formats.


def _flexible(workload: Workload) -> list[TokenDispatcher]:
    """The records of DeepEP and HybridEP, as far as the run may dispatch with them."""
    if workload.model.moe is None:
        return []
    names = (workload.moe_dispatch, *workload.other_dispatchers)
    records = [MEGATRON.dispatchers[name] for name in names if name in MEGATRON.dispatchers]
    return [dispatcher for dispatcher in records if dispatcher.deduplicates]


class MegatronDispatcherDevice(Rule):
    """DeepEP and HybridEP run on some devices only."""

    name = "megatron-dispatcher-device"
    unit = "dispatchers"

    def applies(self, workload: Workload) -> bool:
        return bool(_flexible(workload))

    def fields_read(self) -> frozenset[str]:
        return frozenset()

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        device, able = table.workload.cluster.device, _flexible(table.workload)
        runs = any(each.runs_on(device.architecture, device.name) for each in able) or not able
        return as_excess(np.full_like(column(table, "tp"), 1 - int(runs)))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        name, device = work.moe_dispatch, work.cluster.device
        if work.model.moe is None or name not in ("deepep", "hybridep"):
            return None
        superchip = name == "deepep" and device.name.lower()[:5] in ("gb200", "gb300")
        old = device.architecture == "ampere" and name == "deepep"
        if (old or device.architecture in ("hopper", "blackwell")) and not superchip:
            return None
        return self.finding(
            value=1,
            words=f"{name} does not run on {device.name}",
            remedy="Dispatch with alltoall, or on Blackwell superchips with hybridep.",
        )


def _is_inside_domains(workload: Workload) -> bool:
    """Whether the run dispatches with kernels that do not go beyond one domain on its devices."""
    able, architecture = _flexible(workload), workload.cluster.device.architecture
    return bool(able) and all(architecture not in each.between for each in able)


MEGATRON_DISPATCHER_REACH = AtMost(
    name="megatron-dispatcher-reach",
    sentence="ep etp <= GPUs of the scale-up domain with DeepEP before Hopper, whose kernels between nodes "
    "need it",
    unit="GPUs",
    binds=_is_inside_domains,
    value=of("ep", "etp"),
    limit=of(number=lambda work: work.cluster.nvlink_domain),
    words="{moe_dispatch} reaches {limit} GPUs of {device}, and {value} ranks share the experts",
    remedy="Dispatch with alltoall, or lower ep to {limit} or less.",
)
"""DeepEP, issues 149 and 234: on Ampere kernels inside a node run, those between nodes are not supported."""


class MegatronDispatcherRanks(Rule):
    """ep etp is a number that DeepEP has settings for; beyond one domain it fills domains whole.

    Groups that fit into a domain lie in one: `nvlink_domain.dispatcher_reaches` says so of every mapping.

    DeepEP, deep_ep/buffers/legacy.py, get_dispatch_config: 'Unsupported number of EP ranks'; between nodes it
    counts on 8 GPUs joined by NVLink (csrc/legacy/config.hpp, LEGACY_NUM_MAX_NVL_PEERS). HybridEP's branch,
    deep_ep/hybrid_ep_buffer.py: the number of ranks has to be divisible by that of a domain.
    """

    name = "megatron-dispatcher-ranks"
    unit = "groups"

    def applies(self, workload: Workload) -> bool:
        return bool(_flexible(workload))

    def fields_read(self) -> frozenset[str]:
        return frozenset(("ep", "etp"))

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        members = column(table, "ep") * column(table, "etp")
        able, domain = _flexible(table.workload), table.workload.cluster.nvlink_domain
        joined = [dispatcher.joins(members, domain) for dispatcher in able]
        # One rank alone is another rule's.
        wrong = ~np.logical_or.reduce(joined) if able else np.zeros_like(members, dtype=bool)
        return as_excess(wrong.astype(np.int64))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work = plan.workload
        name, domain = work.moe_dispatch, int(work.cluster.nvlink_domain)
        members = int(plan.layout.expert_group)
        if work.model.moe is None or members == 1:
            return None
        words = ""
        if name == "deepep":
            if members not in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160):
                words = f"DeepEP has no settings for {members} ranks that share the experts"
            elif members > domain and domain % 8:
                words = f"DeepEP counts on 8 GPUs joined by NVLink, and a domain has {domain}"
        elif name == "hybridep" and members > domain and members % domain:
            words = f"{members} ranks that share the experts do not fill domains of {domain} whole"
        inside = plan.spans["ep"][0] if plan.spans else int(plan.layout.ep)
        if name in ("deepep", "hybridep") and members <= domain and inside < int(plan.layout.ep):
            words = (
                f"a group of {members} ranks that share the experts lies across NVLink domains, "
                f"and {name} joins it as one"
            )
        if not words:
            return None
        return self.finding(
            value=1,
            words=words,
            remedy="Take another ep, or dispatch with alltoall.",
        )


def _beside_gathers(workload: Workload) -> list[str]:
    """What the all-gather dispatcher does not go with."""
    narrow = [f"tokens in {workload.precision}"] if is_narrow(workload) else []
    return [*(["overlap of expert communication"] if workload.ep_overlap else []), *narrow]


MEGATRON_ALL_GATHER = Refuses(
    name="megatron-allgather-dispatcher",
    sentence="The all-gather dispatcher goes without overlap of expert communication and in 16 bits",
    binds=lambda work: has_experts(work) and work.moe_dispatch == GATHERS,
    broken=_beside_gathers,
    joined_by=" and with ",
    words="the all-gather dispatcher does not go with {broken}",
    remedy="Dispatch with alltoall.",
)
"""megatron/core/transformer/transformer_config.py asserts the first, and refuses tokens padded for FP8 and
narrower formats (moe_router_padding_for_quantization), as launch files have them."""


# How the layers of hybrid models can be cut, and what Megatron-LM runs of them (megatron-core 0.19.2).


def mamba_heads(workload: Workload) -> int:
    """Heads of Mamba-2 layers; 0 without such layers."""
    mamba = workload.model.mamba
    return 0 if mamba is None else mamba.heads


MAMBA_HEADS = Divides(
    name="mamba-heads-by-tp-cp",
    sentence="heads of Mamba-2 mod (tp cp) = 0",
    unit="heads left over",
    binds=lambda work: work.model.mamba is not None,
    number=of(number=mamba_heads),
    by=of("tp", "cp"),
    words="{number} heads of Mamba-2 do not divide by tp {tp} x cp {cp}",
    remedy="Lower cp or tp.",
)
"""Asserted by Megatron's mixer and its context parallelism, which swaps tokens for these heads
(megatron/core/ssm/mamba_mixer.py, nheads; mamba_context_parallel.py, nheads_local_tp)."""


class MambaGroups(Rule):
    """groups of Mamba-2 mod tp = 0; groups / tp and cp divide one another, as cp may copy groups.

    megatron/core/ssm/mamba_mixer.py (ngroups) and mamba_context_parallel.py (ngroups_local_tp) assert it.
    """

    name = "mamba-groups-by-tp-cp"
    unit = "groups left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.mamba is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mamba, tp, cp = table.workload.model.mamba, column(table, "tp"), column(table, "cp")
        if mamba is None:
            return as_excess(np.zeros_like(tp))
        local = np.maximum(mamba.groups // tp, 1)
        return as_excess(mamba.groups % tp + np.minimum(local % cp, cp % local))

    def check(self, plan: FinishedPlan) -> Finding | None:
        mamba = plan.workload.model.mamba
        tp = int(plan.layout.tp)
        cp = int(plan.layout.cp)
        if mamba is None:
            return None
        left_over = mamba.groups - mamba.groups // tp * tp
        if left_over:
            return self.finding(
                value=left_over,
                words=f"{mamba.groups} groups of Mamba-2 do not divide by tp {tp}",
                remedy=f"Take a tp that divides {mamba.groups}.",
            )
        small, large = sorted((mamba.groups // tp, cp))
        left_over = large - large // small * small
        return self.over(
            value=left_over,
            words=f"{mamba.groups} groups of Mamba-2 over tp {tp} neither divide cp {cp} nor by it",
            remedy="Lower cp, or take a power of two.",
        )


def _beside_token_prediction(workload: Workload) -> list[str]:
    """Position embeddings that Megatron-LM does not have beside multi-token prediction."""
    model = workload.model
    if model.attention is not None:
        return []
    scaling = model.rope.scaling
    is_yarn = model.position == "rope" and scaling is not None and scaling.type == "yarn"
    return ["YaRN"] if is_yarn else ["learned positions"] if model.position == "learned" else []


MEGATRON_TOKEN_PREDICTION = Refuses(
    name="megatron-mtp-positions",
    sentence="No multi-token prediction beside learned positions, nor beside YaRN outside latent attention",
    binds=lambda work: work.model.mtp_layers > 0,
    broken=_beside_token_prediction,
    words="Megatron-LM has no multi-token prediction beside {broken}",
    remedy="Train without the multi-token-prediction modules (mtp_layers: 0), or without YaRN.",
)
"""megatron/training/arguments.py takes `--mtp-num-layers` with position embeddings `rope` and `none` alone;
under latent attention YaRN is a `--rope-type` of the first."""


class MegatronHybrid(Rule):
    """No Mamba-1, no Mamba-2 beside attention; no expert overlap under a pattern; FP8 in whole 16 columns.

    megatron/core/ssm has no mixer of Mamba-1, megatron/core/models/hybrid/hybrid_block.py builds one block a
    layer, hybrid_model.py has no schedule plan for the overlap, and mamba_mixer.py asserts the last.
    """

    name = "megatron-hybrid"
    unit = "conditions"
    of_workload = True

    def applies(self, workload: Workload) -> bool:
        return workload.model.state_space is not None or workload.model.hybrid_pattern is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        work = table.workload
        model, broken = work.model, 0
        if self.applies(work):
            odd = model.mamba is not None and model.mamba.projected_width % 16 > 0
            broken = int(model.mamba_beside_attention) + int(odd and is_narrow(work))
            broken += int(model.mamba1 is not None)
            broken += int(work.ep_overlap and model.hybrid_pattern is not None)
        return as_excess(np.full_like(column(table, "tp"), broken))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, broken = plan.workload, []
        mamba = work.model.mamba
        if work.model.mamba_beside_attention:
            broken.append("Mamba-2 beside attention in a layer")
        if work.model.mamba1 is not None:
            broken.append("layers of Mamba-1")
        if mamba is not None and is_narrow(work):
            columns = mamba.projected_width
            if columns != columns // 16 * 16:
                broken.append(f"{columns} columns of a Mamba-2 projection in {work.precision}")
        if work.model.hybrid_pattern is not None and work.ep_overlap:
            broken.append("expert traffic hidden under a pattern of layers")
        return self.over(
            value=len(broken),
            words=f"Megatron-LM has no {' and no '.join(broken)}",
            remedy=_remedy(work),
        )


def _remedy(workload: Workload) -> str:
    """What runs the model instead: another framework, or another setting of this one."""
    model = workload.model
    if model.mamba1 is not None or model.mamba_beside_attention:
        return "Choose --framework fsdp2: transformers, which accelerate trains, have these layers."
    return "Plan in bf16 without the expert overlap."


# Tensor parallelism gives every rank whole attention heads.


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
        return self.over(
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

UNFUSED_IN_CONTEXT = AtMost(
    name="megatron-context-unfused",
    sentence="cp <= 1 on devices without fused attention",
    unit="context-parallel ranks",
    binds=lambda work: work.cluster.device.architecture in WITHOUT_FLASH,
    value=of("cp"),
    words="cp {cp} on a device whose attention Transformer Engine leaves unfused",
    remedy="Set cp to 1, or take devices from Ampere on.",
)
"""Fused attention asks for compute capability 8.0, and unfused attention knows no context parallelism:
get_attention_backend of pytorch/attention/dot_product_attention/utils.py (Transformer Engine 2.15)."""


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
            divides = (cp % inner == 0).astype(np.int64)
            parted = (model.heads % (tp * inner) != 0) | (model.kv_heads % (tp * inner) != 0)
            broken = unlike * (cp != inner) + (1 - divides) + (parted & (inner > 1))
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
        return self.over(
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


# Experts on a projection of the hidden width, in narrow formats.


MEGATRON_LATENT_EXPERTS = Refuses(
    name="megatron-latent-experts",
    sentence="width of the projection ahead of experts mod 16 = 0 in FP8 and narrower formats",
    unit="models",
    binds=lambda work: is_narrow(work) and (work.model.latent_size or 0) % 16 > 0,
    words="experts on a projection whose width 16 does not divide in {precision}",
    remedy="Plan in bf16.",
)
"""transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec."""


# What Megatron-LM asks of attention to positions that an indexer chooses (megatron-core 0.19.2).


MEGATRON_SPARSE_ATTENTION = Excludes(
    name="megatron-sparse-attention",
    sentence="Sparse attention on Hopper or Blackwell, with cp 1, no CUDA graphs, no multi-token prediction",
    binds=lambda work: work.model.indexer is not None,
    conditions=(
        Condition("CUDA graphs ({cuda_graph})", lambda work: work.cuda_graph != "none"),
        Condition("parameters in FP8", lambda work: bool(work.fp8_params)),
        Condition("multi-token prediction", lambda work: work.model.mtp_layers > 0),
        Condition(
            "kernels for {architecture}",
            lambda work: work.cluster.device.architecture not in ("hopper", "blackwell"),
        ),
        Condition("cp {cp}", when=(When("cp", least=2),)),
        Condition(
            "indexers that layers share in another order than by a frequency",
            lambda work: (
                bool(work.model.kinds_apart)
                and sharing_schedule(work.model.attention_order or "") is None
            ),
        ),
        Condition(
            "up-projections recomputed in {precision}",
            is_narrow,
            (When("recompute", has=int(Recompute.MLA_UP_PROJECTION)),),
        ),
        Condition(
            "tensor parallelism without sequence parallelism",
            when=(When("tp", least=2), When("sequence_parallel", most=0)),
        ),
    ),
    joined_by=" and no ",
    words="sparse attention is planned with no {broken}",
    remedy="Set cp to 1 and mtp_layers to 0, on Hopper or Blackwell, without CUDA graphs and FP8 "
    "parameters; or plan the model with full attention, as deepseek_v3.",
)
"""cp_comm_type has to be allgather, which is not planned (transformer_config.py). AbsorbedMLA wants sequence
parallelism beside tp, recomputes no up-projections in FP8 and reads its weights at 16 bits
(experimental_attention_variant/absorbed_mla.py). pretrain_gpt.py asserts against modules of multi-token
prediction (megatron/training/models/gpt.py, mtp_block_spec). FlashMLA is for the two architectures
(dsa_cudnn_kernels.py), and recipes that use it capture no graphs (Megatron-Bridge,
perf_recipes/glm_moe_dsa)."""
