"""What Megatron-LM refuses to start, beyond the general rules (read in megatron-core 0.19.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.layers import has_experts
from meshwright.constraints.memory import offload_refuses_recompute
from meshwright.constraints.rule import (
    AtLeast,
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
from meshwright.costmodel.hybrid_context import is_dealt
from meshwright.costmodel.layout import Recompute
from meshwright.costmodel.optimizers import deals_out_matrices
from meshwright.costmodel.workload import Workload, deduplicates


def has_linear_bias(workload: Workload) -> bool:
    """Whether Megatron's single switch for biases (`--disable-bias-linear` absent) has to be on."""
    model = workload.model
    expert_bias = model.moe is not None and model.moe.expert_bias
    return model.mlp_bias or model.attention_output_bias or expert_bias


MEGATRON_SHARDING_NEEDS_ONE_STAGE = AtMost(
    name="megatron-zero-needs-pp-1",
    sentence="pp <= 1 under ZeRO 2 and 3",
    unit="pipeline stages",
    when=(When("zero_stage", least=2),),
    value=of("pp"),
    words="ZeRO stage {zero_stage} with pp {pp}",
    remedy="Use ZeRO stage 1 (the distributed optimizer) with a pipeline, or set pp to 1.",
)
"""The distributed optimizer shards optimizer states only (ZeRO 1). Megatron-FSDP (`--use-megatron-fsdp`) or
torch's FSDP2 (`--use-torch-fsdp2`) shard gradients and parameters. The parser refuses the second with pp >
1. It accepts the first, but each stage would gather its weights anew for every micro-batch: no plan relies
on that."""

MEGATRON_SHARDING_GRAPHS = AtMost(
    name="megatron-zero-graphs",
    sentence="zero_stage <= 1 with CUDA graphs of parts of layers",
    unit="stages of ZeRO",
    binds=lambda work: work.cuda_graph in ("feed_forward", "partial"),
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with CUDA graphs of parts of layers",
    remedy="Lower the ZeRO stage to 1, or use no CUDA graphs.",
)
"""Megatron-FSDP gathers weights, and collects gradients, in memory that it takes and frees
(megatron_fsdp/param_and_grad_buffer.py, TemporaryBucketAllocator). A graph that was captured inside a layer
reads them where they were; a graph of the whole step has the memory for itself."""

MEGATRON_SHARDING_FP8_PARAMETERS = Requires(
    name="megatron-zero-fp8-params",
    sentence="zero_stage 0, 1 or 3 with FP8 parameters",
    unit="stages of ZeRO",
    binds=lambda work: bool(work.fp8_params),
    needs=When("zero_stage", among=(0, 1, 3)),
    words="ZeRO stage {zero_stage} with FP8 parameters",
    remedy="Take ZeRO stage 1 or 3, or do not allow fp8-params.",
)
"""Megatron-FSDP quantises weights that it shards, and no others (megatron_fsdp/param_and_grad_buffer.py,
copy_main_weights_to_model_weights)."""

MEGATRON_SHARDING_OPTIMIZER = AtMost(
    name="megatron-zero-optimizer",
    sentence="zero_stage <= 1 with muon and lion, whose steps take whole matrices",
    unit="stages of ZeRO",
    binds=deals_out_matrices,
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with the {optimizer} optimizer",
    remedy="Lower the ZeRO stage to 1, or train with adam or sgd.",
)
"""Megatron-FSDP steps with no other."""


def _started_by_bridge(workload: Workload) -> bool:
    return bool(workload.adapters or workload.fp8_attention or workload.te_loss)


MEGATRON_SHARDING_BRIDGE = AtMost(
    name="megatron-zero-bridge",
    sentence="zero_stage <= 1 with gradients of 32 bits beside adapters, FP8 attention or Transformer "
    "Engine's loss",
    unit="stages of ZeRO",
    binds=lambda work: work.gradient_dtype != "bf16" and _started_by_bridge(work),
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with gradients of 32 bits in a run that Megatron-Bridge alone starts",
    remedy="Lower the ZeRO stage to 1, or allow bf16-grads.",
)
"""Overrides of Megatron-Bridge, which alone starts such runs, hold no torch types: Megatron-FSDP would add
gradients up at 16 bits (megatron_fsdp/megatron_fsdp.py, main_grads_dtype)."""

MEGATRON_EMERGING_PRECISION = Refuses(
    name="megatron-emerging-precision",
    sentence="Muon and Lion do not train in fp16",
    unit="formats",
    binds=lambda work: deals_out_matrices(work) and work.precision == "fp16",
    words="{optimizer} in {precision}",
    remedy="Train in bf16, or with adam or sgd.",
)
"""`_get_megatron_emerging_optimizer` of megatron/core/optimizer/__init__.py raises."""

MEGATRON_EMERGING_EXPERT_BIAS = AtMost(
    name="megatron-emerging-expert-bias",
    sentence="zero_stage = 0 with muon and lion where experts have biases",
    unit="stages of ZeRO",
    binds=lambda work: deals_out_matrices(work) and has_experts(work) and has_linear_bias(work),
    value=of("zero_stage"),
    limit=of(number=0),
    words="ZeRO stage {zero_stage} with {optimizer} and biases of experts",
    remedy="Lower the ZeRO stage to 0, or train with adam or sgd.",
)
"""Biases go to Adam, whose distributed optimizer beside the layer-wise one takes none of experts: asserted in
megatron/core/optimizer/__init__.py, _get_megatron_emerging_optimizer."""

MEGATRON_EXPERTS_NEED_SEQUENCE_PARALLEL = Requires(
    name="megatron-moe-tp-needs-sp",
    sentence="sequence parallelism where experts are trained at tp > 1",
    unit="switches",
    binds=has_experts,
    when=(When("tp", least=2),),
    needs=When("sequence_parallel", least=1),
    words="experts at tp {tp} without sequence parallelism",
    remedy="Turn sequence parallelism on, or set tp to 1.",
)
"""MoELayer.forward raises otherwise."""

MEGATRON_EXPERT_BIAS_NEEDS_WHOLE_EXPERTS = AtMost(
    name="megatron-expert-bias-needs-etp-1",
    sentence="etp <= 1 where experts have biases",
    binds=lambda work: has_experts(work) and has_linear_bias(work),
    value=of("etp"),
    words="experts with bias cut by etp {etp}",
    remedy="Set etp to 1 and raise ep instead.",
)


MEGATRON_FLEX_NEEDS_EXPERT_RANKS = AtLeast(
    name="megatron-flex-dispatcher",
    sentence="ep etp >= 2 with DeepEP and HybridEP",
    unit="ranks",
    binds=lambda work: has_experts(work) and deduplicates(work),
    value=of("ep", "etp"),
    limit=of(number=2),
    words="a flexible dispatcher for experts that one rank holds",
    remedy="Raise ep, or dispatch with alltoall.",
)
"""megatron/core/transformer/moe/token_dispatcher.py asserts it."""

MEGATRON_TENSOR_OVERLAP = AtMost(
    name="megatron-tp-overlap",
    sentence="tp <= 1 with tensor-parallel overlap under multi-head latent attention",
    binds=lambda work: work.tp_overlap and work.model.attention is not None,
    value=of("tp"),
    words="tensor-parallel overlap at tp {tp} under multi-head latent attention",
    remedy="Turn the overlap off, or set tp to 1.",
)
"""Layers whose user buffer is not called qkv, proj, fc1 or fc2 switch the overlap of the whole model off
(megatron/core/extensions/transformer_engine.py, TELinear.__init__); those of multi-head latent attention are
called q_down_proj and the like (megatron/core/transformer/multi_latent_attention.py)."""


def _narrow_states(workload: Workload) -> bool:
    """Whether parameters live in FP8, or moments in 16 bits."""
    return bool(workload.fp8_params) or workload.moment_bytes < _WIDE_MOMENT_BYTES


_WIDE_MOMENT_BYTES = 4

MEGATRON_NARROW_STATES = AtLeast(
    name="megatron-narrow-states",
    sentence="zero_stage >= 1 with FP8 parameters and with 16-bit moments",
    unit="stages of ZeRO",
    binds=_narrow_states,
    value=of("zero_stage"),
    limit=of(number=1),
    words="ZeRO stage {zero_stage} with FP8 parameters or 16-bit moments",
    remedy="Use ZeRO stage 1 (the distributed optimizer), or do not allow them.",
)
"""megatron/training/arguments.py (--fp8-param-gather) and megatron/core/optimizer/optimizer_config.py
(--use-precision-aware-optimizer) assert it; the second wants Adam besides."""


def _delays_scales(workload: Workload) -> bool:
    """Whether FP8 scales come from the maxima of earlier steps."""
    return workload.precision == "fp8" and workload.fp8_recipe == "delayed"


_NEEDS_CURRENT_SCALES = int(Recompute.LAYERNORM | Recompute.MOE_ACTIVATION)
"""What is not recomputed under delayed scaling."""

MEGATRON_DELAYED_SCALING = Requires(
    name="megatron-delayed-scaling",
    sentence="norms and expert activations not recomputed under delayed scaling of FP8",
    binds=_delays_scales,
    needs=When("recompute", lacks=_NEEDS_CURRENT_SCALES),
    words="norms or expert activations recomputed under delayed scaling",
    remedy="Scale with --fp8-recipe tensorwise, or recompute other modules.",
)
"""megatron/core/transformer/transformer_config.py refuses either module in `recompute_modules` then."""


_NOT_IN_PARTIAL_GRAPHS = int(Recompute.FULL | Recompute.EXPERTS)
"""What is not recomputed under graphs of attention and router: either checkpoint is around the router."""


def graphs_refuse(workload: Workload, mask: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which recomputation does not go with partial CUDA graphs of Megatron.

    Parameters
    ----------
    workload : Workload
        Run with a dispatcher and a precision.
    mask : array of int, shape [n]
        `Recompute` masks.

    Returns
    -------
    array of bool, shape [n]
    """
    refused = (mask & _NOT_IN_PARTIAL_GRAPHS) > 0
    if workload.model.moe is not None and not _preprocess_captured(workload):
        refused = refused | ((mask & int(Recompute.LAYERNORM)) > 0)
    return np.asarray(refused)


def _preprocess_captured(workload: Workload) -> bool:
    """Whether graphs hold the all-to-all's preparation, so that norms before experts can be recomputed."""
    return workload.moe_dispatch == "alltoall" and workload.precision in ("bf16", "fp16")


class MegatronPartialGraphs(Rule):
    """CUDA graphs of attention and router go with no full recomputation, none of experts, and mostly none of
    experts' norms.

    megatron/core/transformer/transformer_config.py asserts the first two. transformer_layer.py warns and
    turns the third off, unless an all-to-all is prepared inside the graph: memory would not be as planned.
    """

    name = "megatron-partial-graphs"
    unit = "settings"

    def applies(self, workload: Workload) -> bool:
        return workload.cuda_graph in ("feed_forward", "partial")

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        refused = graphs_refuse(table.workload, column(table, "recompute"))
        return as_excess(refused & self.applies(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, mask = plan.workload, int(plan.layout.recompute)
        if work.cuda_graph not in ("feed_forward", "partial"):
            return None
        words = ""
        if mask // 32 % 2 == 1:
            words = "full recomputation"
        elif mask // 128 % 2 == 1:
            words = "recomputation of whole experts"
        norms = mask // 2 % 2 == 1 and work.model.moe is not None
        quantised = work.precision in ("fp8", "mxfp8", "nvfp4")
        if norms and (work.moe_dispatch != "alltoall" or quantised):
            words = words or "recomputation of the norms before experts"
        if not words:
            return None
        return self.finding(
            value=1,
            words=f"{words} does not go with CUDA graphs of attention and router",
            remedy="Recompute other modules, or use no CUDA graphs.",
        )


def full_graph_refuses(workload: Workload) -> bool:
    """Whether experts keep a step from being captured whole, whatever the layout.

    Their dispatcher must not ask the host for counts: HybridEP with a budget of tokens, into the fused
    grouped MLP of Transformer Engine, which takes gated activations in MXFP8 (megatron-core 0.19.2,
    transformer_config.py, moe_expert_rank_capacity_factor; moe/experts.py, _is_fused_impl_supported).

    Parameters
    ----------
    workload : Workload
        Run with a dispatcher and a precision.

    Returns
    -------
    bool
    """
    model = workload.model
    if model.moe is None:
        return False
    dispatched = workload.moe_dispatch in ("hybridep", "deduplicated")
    return not (dispatched and workload.precision == "mxfp8" and model.gated)


_NOT_IN_FULL_GRAPH = int(Recompute.FULL | Recompute.MOE_ACTIVATION | Recompute.EXPERTS)
"""What of a layer with experts is not recomputed inside a graph of the whole step."""


class MegatronFullGraph(Rule):
    """A CUDA graph of the whole step holds experts under HybridEP in MXFP8 only, at etp 1, recomputing
    neither their activations nor whole layers.
    """

    name = "megatron-full-graph"
    unit = "conditions"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None and workload.cuda_graph == "full"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        refused = int(full_graph_refuses(table.workload))
        recomputed = (column(table, "recompute") & _NOT_IN_FULL_GRAPH) > 0
        cut = column(table, "etp") > 1
        broken = refused + recomputed.astype(np.int64) + cut
        return as_excess(broken * self.applies(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        work, layout = plan.workload, plan.layout
        if work.model.moe is None or work.cuda_graph != "full":
            return None
        broken = []
        if work.moe_dispatch in {"alltoall", "allgather", "deepep"}:
            broken.append(f"the {work.moe_dispatch} dispatcher")
        elif work.precision != "mxfp8":
            broken.append(f"experts in {work.precision}")
        elif not work.model.gated:
            broken.append("experts without a gate")
        if int(layout.etp) > 1:
            broken.append(f"etp {layout.etp}")
        if any(int(layout.recompute) // bit % 2 == 1 for bit in (4, 32, 128)):
            broken.append("recomputed experts")
        return self.over(
            value=len(broken),
            words=f"a CUDA graph of the whole step cannot hold {' and '.join(broken)}",
            remedy="Dispatch with hybridep in mxfp8 at etp 1, or capture attention and router only.",
        )


def refused_recompute(workload: Workload, mask: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which recomputation does not go with the execution of a workload, whatever the degrees.

    Parameters
    ----------
    workload : Workload
        Run with overlaps, CUDA graphs, a dispatcher and a recipe of FP8.
    mask : array of int, shape [n]
        `Recompute` masks.

    Returns
    -------
    array of bool, shape [n]
    """
    refused = ((mask & _NOT_UNDER_OVERLAP) > 0) & workload.ep_overlap
    if workload.cuda_graph == "partial":
        refused |= graphs_refuse(workload, mask)
    if workload.cuda_graph == "full" and workload.model.moe is not None:
        refused |= (mask & _NOT_IN_FULL_GRAPH) > 0
        refused |= full_graph_refuses(workload)
    refused |= offload_refuses_recompute(workload, mask)
    if _delays_scales(workload):
        refused |= (mask & _NEEDS_CURRENT_SCALES) > 0
    return np.asarray(refused)


_NOT_UNDER_OVERLAP = int(Recompute.FULL | Recompute.EXPERTS)
"""What is not recomputed where compute of another micro-batch hides the expert all-to-all."""


MEGATRON_EXPERT_OVERLAP = Excludes(
    name="megatron-expert-overlap",
    sentence="Hiding the expert all-to-all needs ep > 1, vpp > 1 with a pipeline and two micro-batches "
    "without, recomputation of neither layers nor experts in full, and at most one MTP module",
    binds=lambda work: has_experts(work) and work.ep_overlap,
    conditions=(
        Condition("ep 1", when=(When("ep", most=1),)),
        Condition("{mtp_layers} MTP modules", lambda work: work.model.mtp_layers > 1),
        Condition(
            "pp {pp} without virtual stages", when=(When("pp", least=2), When("vpp", most=1))
        ),
        Condition("one micro-batch", when=(When("pp", most=1), When("num_micro_batches", most=1))),
        Condition("full recomputation", when=(When("recompute", has=int(Recompute.FULL)),)),
        Condition(
            "recomputation of whole experts", when=(When("recompute", has=int(Recompute.EXPERTS)),)
        ),
    ),
    words="expert communication cannot overlap under {broken}",
    remedy="Set ep and vpp to 2 or more, take more micro-batches, recompute single modules only, or turn the "
    "overlap off.",
)
"""What hides it is the compute of another micro-batch (megatron/core/pipeline_parallel/combined_1f1b.py,
combined_1f1b_schedule_for_no_pipelining). Of experts Megatron-Bridge asserts it (its
training/comm_overlap.py)."""


# Samples that are dealt to ranks one by one: hybrid context parallelism.


_POWERS = tuple(1 << power for power in range(24))

MEGATRON_DEALT_PIPELINE = AtMost(
    name="megatron-dealt-pipeline",
    sentence="pp <= 1 with hybrid context parallelism",
    unit="pipeline stages",
    binds=is_dealt,
    value=of("pp"),
    words="hybrid context parallelism with pp {pp}",
    remedy="Set pp to 1, or plan without --hybrid-cp.",
)
"""Asserted in megatron/training/arguments.py, validate_args."""

MEGATRON_DEALT_SHARDING = AtMost(
    name="megatron-dealt-sharding",
    sentence="zero_stage <= 1 with hybrid context parallelism",
    unit="stages of ZeRO",
    binds=is_dealt,
    value=of("zero_stage"),
    words="hybrid context parallelism with ZeRO stage {zero_stage}",
    remedy="Take ZeRO stage 1, or plan without --hybrid-cp.",
)
"""Megatron-FSDP is refused (megatron/training/arguments.py, validate_args)."""

MEGATRON_DEALT_EXPERTS = AtMost(
    name="megatron-dealt-experts",
    sentence="ep <= 1 with hybrid context parallelism",
    binds=is_dealt,
    value=of("ep"),
    words="hybrid context parallelism with ep {ep}",
    remedy="Set ep to 1, or plan without --hybrid-cp.",
)
"""Derived here: ranks run unlike numbers of samples (hybrid_cp_schedule.py, num_samples_this_group), and an
exchange of experts' tokens waits for every rank of its group in each."""

MEGATRON_DEALT_MICRO_BATCH = AtMost(
    name="megatron-dealt-micro-batch",
    sentence="micro_batch <= 1 with hybrid context parallelism",
    unit="packs",
    binds=is_dealt,
    value=of("micro_batch"),
    words="hybrid context parallelism with micro-batches of {micro_batch}",
    remedy="Set the micro-batch to 1: every sample is a micro-batch of its own.",
)
"""Samples are taken out of their packs and run one by one (megatron/core/datasets/data_schedule.py,
unpack_batch): a larger micro-batch changes nothing."""


def _power_of_two(name: str, axis: str) -> Requires:
    """That a degree is one of those for which there are groups, where samples are dealt."""
    return Requires(
        name=name,
        sentence=f"{axis} a power of two with hybrid context parallelism",
        unit="degrees",
        binds=is_dealt,
        needs=When(axis, among=_POWERS),
        words=f"hybrid context parallelism with {axis} {{{axis}}}",
        remedy=f"Take a {axis} that is a power of two, or plan without --hybrid-cp.",
    )


MEGATRON_DEALT_REPLICAS = _power_of_two("megatron-dealt-replicas", "dp")
"""Groups are built of every power of two below dp cp, and of all of it (megatron/core/parallel_state.py,
create_hybrid_dp_cp_groups): of another number a team may have no group."""

MEGATRON_DEALT_CONTEXT = _power_of_two("megatron-dealt-context", "cp")
"""As for dp."""

MEGATRON_DEALT_PADDING = Divides(
    name="megatron-dealt-padding",
    sentence="seq_len mod (2 tp cp dp) = 0 with hybrid context parallelism",
    unit="tokens left over",
    binds=is_dealt,
    number=of(number=lambda work: work.seq_len),
    by=of("tp", "cp", "dp", number=2),
    words="packs of {number} tokens do not divide by 2 tp cp dp = {divisor}",
    remedy="Give a --pack-size that divides by {divisor}.",
)
"""Samples are padded so (megatron/core/datasets/gpt_dataset.py, GPTDatasetConfig, hybrid_context_parallel),
and the longest one fills a pack."""

MEGATRON_DEALT_LAYERS = Refuses(
    name="megatron-dealt-layers",
    sentence="hybrid context parallelism with softmax attention alone, and without latent attention",
    unit="models",
    binds=lambda work: is_dealt(work) and not _follows_teams(work),
    words="hybrid context parallelism of a model with other layers than plain softmax attention",
    remedy="Plan without --hybrid-cp.",
)
"""Latent attention asserts that it is off (megatron/core/transformer/multi_latent_attention.py). Mamba,
linear attention and multi-token prediction take the group of all cp ranks (mamba_mixer.py,
multi_token_prediction.py), whichever ranks share the sample."""

MEGATRON_DEALT_EXECUTION = Refuses(
    name="megatron-dealt-execution",
    sentence="no CUDA graphs, tensor-parallel overlap or other exchange than p2p with hybrid context "
    "parallelism",
    unit="executions",
    binds=lambda work: (
        is_dealt(work) and (work.cuda_graph != "none" or work.tp_overlap or work.cp_comm != "p2p")
    ),
    words="hybrid context parallelism with CUDA graphs, tensor-parallel overlap or another exchange than p2p",
    remedy="Plan with --without cuda-graph,tp-overlap,cp-a2a, or without --hybrid-cp.",
)
"""CUDA graphs are refused (megatron/training/arguments.py, validate_args). Buffers of the tensor-parallel
overlap have the size of a whole sequence (megatron/training/initialize.py, _initialize_tp_communicators). a2a
would have to divide heads by every size of team; a2a+p2p has groups for one size."""

MEGATRON_DEALT_PRECISION = Refuses(
    name="megatron-dealt-precision",
    sentence="16 bits with hybrid context parallelism",
    unit="formats",
    binds=lambda work: is_dealt(work) and work.precision not in ("bf16", "fp16"),
    words="hybrid context parallelism in {precision}",
    remedy="Train in bf16, or plan without --hybrid-cp.",
)
"""Nothing pads a rank's part of a sample to the tokens whose multiple products of narrower formats take."""


def _follows_teams(workload: Workload) -> bool:
    """Whether every layer is shared by the ranks that share the sample."""
    model = workload.model
    plain = model.attention is None and model.indexer is None and model.linear_attention is None
    return plain and model.hybrid_pattern is None and not model.mtp_layers


MEGATRON_DEALT_RULES: tuple[Rule, ...] = (
    MEGATRON_DEALT_PIPELINE,
    MEGATRON_DEALT_SHARDING,
    MEGATRON_DEALT_EXPERTS,
    MEGATRON_DEALT_MICRO_BATCH,
    MEGATRON_DEALT_REPLICAS,
    MEGATRON_DEALT_CONTEXT,
    MEGATRON_DEALT_PADDING,
    MEGATRON_DEALT_LAYERS,
    MEGATRON_DEALT_EXECUTION,
    MEGATRON_DEALT_PRECISION,
)
MEGATRON_RULES: tuple[Rule, ...] = (
    MEGATRON_SHARDING_NEEDS_ONE_STAGE,
    MEGATRON_SHARDING_OPTIMIZER,
    MEGATRON_SHARDING_BRIDGE,
    MEGATRON_EMERGING_PRECISION,
    MEGATRON_EMERGING_EXPERT_BIAS,
    MEGATRON_EXPERTS_NEED_SEQUENCE_PARALLEL,
    MEGATRON_EXPERT_BIAS_NEEDS_WHOLE_EXPERTS,
    MEGATRON_EXPERT_OVERLAP,
    MEGATRON_FLEX_NEEDS_EXPERT_RANKS,
)
MEGATRON_EXECUTION_RULES: tuple[Rule, ...] = (
    MegatronPartialGraphs(),
    MegatronFullGraph(),
    MEGATRON_NARROW_STATES,
    MEGATRON_SHARDING_GRAPHS,
    MEGATRON_SHARDING_FP8_PARAMETERS,
)
