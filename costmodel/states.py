"""Parameters of each pipeline rank, and bytes of weights, gradients and optimizer states of a parameter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.image_encoder import encoder_of
from meshwright.costmodel.kernels import OPERAND_BYTES
from meshwright.costmodel.layout import Floats, Ints, Layout
from meshwright.costmodel.optimizers import (
    FP32_BYTES,
    keeps_more_of_tables,
    moments_bytes,
    pages_states,
    stepping_ranks,
)
from meshwright.costmodel.rank_load import Stages, byte_counts
from meshwright.costmodel.schedules import is_v_shaped, last_rank, on_both_ranks
from meshwright.costmodel.stacks import memory_profile, stack_constants
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.frameworks.record import QueuedSharding, ReferenceSetting
from meshwright.model_specs.blocks import AttentionShares, BlockShares, VisionSpec
from meshwright.model_specs.parameters import (
    attention_parameters,
    dense_layer_parameters,
    dense_mlp_parameters,
    embedding_parameters,
    encoder_end_parameters,
    encoder_layers,
    expert_parameters,
    experts_norm_parameters,
    latent_parameters,
    linear_attention_parameters,
    mamba_parameters,
    mtp_join_parameters,
    norm_parameters_per_layer,
    router_parameters,
    shared_expert_parameters,
    whole_attention_parameters,
    whole_linear_attention_parameters,
)
from meshwright.model_specs.schema import ModelSpec

StateBytes = tuple[Floats, Floats, Floats]
"""Bytes of weights, of gradients, of optimizer states."""

_HOST_WEIGHT_BYTES = 2.0
"""Of a weight whose shard DeepSpeed's `offload_param` keeps on the host."""
_HOST_GRADIENT_BYTES = 4.0


def layer_parameters_on_gpu(
    model: ModelSpec, layout: Layout, blocks: BlockShares | None = None
) -> tuple[Floats, Floats, Floats]:
    """Parameters of one layer on one GPU, before data-parallel sharding.

    A tensor rank holds 1 / tp of every matrix, and MLA's down-projections, norms, the router and the
    projections around routed experts whole (docs/cost_model.md, "Memory"); `model_specs/parameters.py` counts
    those of the whole model. Where layers differ in their attention, or by a hybrid pattern, it is their
    mean.

    Parameters
    ----------
    model : ModelSpec
        Widths, experts and kinds of layers.
    layout : Layout
        One layout, or many of shape [n]; tp, ep and etp are used.
    blocks : BlockShares, optional
        Of a layer other than the mean one of a hybrid pattern.

    Returns
    -------
    tuple of three floats or arrays
        Parameters of a dense layer, of a layer with experts without them, and of the rank's experts of such a
        layer, shaped like the layout; 0 where the model has no such layer.
    """
    tp, ep, etp = (np.asarray(x) for x in (layout.tp, layout.ep, layout.etp))
    common = _mixer_on_gpu(model, layout, blocks or model.blocks, model.attention_shares)
    if model.has_mean_layers:
        return _pattern_layer(model, layout, common, blocks or model.blocks, model.attention_shares)
    dense = 0.0 * tp
    if model.dense_layers:
        dense = common + _feed_forward(model, model.attention_shares) / tp
    if model.moe is None:
        return dense, 0.0 * tp, 0.0 * tp
    rest = common + shared_expert_parameters(model) / tp + _whole_beside_experts(model)
    return dense, rest, model.moe.experts * expert_parameters(model) / (ep * etp)


def kind_parameters_on_gpu(model: ModelSpec, layout: Layout) -> tuple[tuple[Floats, Floats], ...]:
    """Parameters on one GPU of a layer of each kind in `ModelSpec.unlike_bytes`.

    As `layer_parameters_on_gpu`, which has the sources, counts those of their mean.

    Parameters
    ----------
    model : ModelSpec
        Widths, experts and kinds of layers.
    layout : Layout
        One layout, or many of shape [n]; tp, ep and etp are used.

    Returns
    -------
    tuple of pairs of float or array
        Parameters outside experts and in the rank's experts, before data-parallel sharding; kinds in the
        order in which they first appear.
    """
    parameters = []
    for symbols in dict.fromkeys(model.unlike_bytes):
        blocks, attention = model.kind_of(symbols)
        mixer = _mixer_on_gpu(model, layout, blocks, attention)
        dense, rest, experts = _pattern_layer(model, layout, mixer, blocks, attention)
        parameters.append((dense + rest, experts))
    return tuple(parameters)


def _mixer_on_gpu(
    model: ModelSpec, layout: Layout, blocks: BlockShares, attention: AttentionShares
) -> Floats:
    """Parameters of attention, of each kind so much, and of Mamba, with a layer's norms."""
    whole, split = 0.0, 0.0
    for letter, share in attention.softmax:
        kind = model.kinds_apart.get(letter, model)
        whole_of_kind = whole_attention_parameters(kind)
        whole += share * whole_of_kind
        split += share * (attention_parameters(kind) - whole_of_kind)
    if attention.linear:
        whole_of_linear = whole_linear_attention_parameters(model)
        whole += attention.linear * whole_of_linear
        split += attention.linear * (linear_attention_parameters(model) - whole_of_linear)
    if model.state_space is not None or model.hybrid_pattern is not None:
        whole = blocks.attention * whole
        split = blocks.attention * split + blocks.mamba * mamba_parameters(model)
    norms = norm_parameters_per_layer(model)
    if model.hybrid_pattern is not None:
        norms = norms * round(blocks.total)
    return split / np.asarray(layout.tp) + whole + norms


def _feed_forward(model: ModelSpec, attention: AttentionShares) -> float:
    """Parameters of a dense feed-forward, in the mean over layers that attend so."""
    if not model.kinds_apart:
        return float(dense_mlp_parameters(model))
    return sum(
        share * dense_mlp_parameters(model.kinds_apart[letter])
        for letter, share in attention.softmax
    )


def _pattern_layer(
    model: ModelSpec,
    layout: Layout,
    mixers: Floats,
    blocks: BlockShares,
    attention: AttentionShares,
) -> tuple[Floats, Floats, Floats]:
    """A layer of unlike ones with its share of feed-forward and experts, beside its mixers."""
    tp, ep, etp = (np.asarray(x) for x in (layout.tp, layout.ep, layout.etp))
    layer = mixers + blocks.feed_forward * _feed_forward(model, attention) / tp
    if model.moe is None:
        return layer, 0.0 * tp, 0.0 * tp
    beside = shared_expert_parameters(model) / tp + _whole_beside_experts(model)
    experts = model.moe.experts * expert_parameters(model) / (ep * etp)
    return 0.0 * tp, layer + blocks.experts * beside, blocks.experts * experts


def _whole_beside_experts(model: ModelSpec) -> int:
    """The router, a norm behind the experts, and the projections around routed ones: TELinear in the mode
    "duplicated" of Megatron (megatron/core/transformer/moe/moe_layer.py, fc1_latent_proj), and outside the
    plan of transformers (models/nemotron_h/configuration_nemotron_h.py, base_model_tp_plan)."""
    return router_parameters(model) + experts_norm_parameters(model) + latent_parameters(model)


def rank_parameters(
    model: ModelSpec, layout: Layout, stages: Stages | None
) -> tuple[Floats, Floats]:
    """Dense and expert parameters on one GPU of each rank, before data-parallel sharding.

    Sums of `layer_parameters_on_gpu` and `end_parameters`, which have the sources.

    Parameters
    ----------
    model : ModelSpec
        Widths, experts and kinds of layers.
    layout : Layout
        One layout with `stages`, else one or many of shape [n].
    stages : tuple of tuple of int, or None
        Layers of each [pipeline rank][virtual stage]; None for the mean over ranks, which is a lower bound
        on the largest.

    Returns
    -------
    tuple of two floats or arrays
        Parameters, of shape [pp] with stages and shaped like the layout without.
    """
    layer = dense, rest, experts = layer_parameters_on_gpu(model, layout)
    table, last, mtp_experts = end_parameters(model, layout, layer)
    if stages is None:
        pp = np.asarray(layout.pp)
        of_dense = model.dense_layers * dense + model.moe_layers * rest + table + last
        return of_dense / pp, (model.moe_layers * experts + mtp_experts) / pp
    kinds = kind_parameters_on_gpu(model, layout) or ((dense, 0.0), (rest, experts))
    rank = np.arange(len(stages))
    on_last = rank == last_rank(layout.schedule, len(stages))
    of_dense = np.where(rank == 0, table, 0.0) + np.where(on_last, last, 0.0)
    of_experts = np.where(on_last, mtp_experts, 0.0)
    counts = byte_counts(model, stages, 0, v_shaped=is_v_shaped(layout))
    for (own_dense, own_experts), (number, _) in zip(kinds, counts, strict=True):
        of_dense = of_dense + number * own_dense
        of_experts = of_experts + number * own_experts
    return on_both_ranks(of_dense, layout.schedule), on_both_ranks(of_experts, layout.schedule)


def end_parameters(
    model: ModelSpec, layout: Layout, layer: tuple[Floats, Floats, Floats] | None = None
) -> tuple[Floats, Floats, Floats]:
    """Parameters on one GPU of the ranks with the token table and with the head, beside their layers.

    An image encoder that is trained counts on the first (`encoder_parameters_on_gpu`). The last rank holds
    the MTP modules and, to feed them, its own copy of the token table (megatron-core gpt_model.py builds an
    embedding on the first rank and on that of the MTP modules).

    Parameters
    ----------
    model : ModelSpec
        Widths, experts, MTP modules and whether tables are tied.
    layout : Layout
        One layout, or many of shape [n]; tp, pp, ep and etp are used.
    layer : tuple of three floats or arrays, optional
        `layer_parameters_on_gpu(model, layout)`, where the caller has them.

    Returns
    -------
    tuple of three floats or arrays
        Dense parameters on the first rank and on the last, and experts' on the last, at least 0; where one
        rank is both, it has their sum.
    """
    dense, rest, experts = layer or layer_parameters_on_gpu(model, layout)
    tp = np.asarray(layout.tp)
    table = embedding_parameters(model) / tp
    if model.mtp_differs:
        blocks, attention = model.mtp_kind
        mixers = _mixer_on_gpu(model, layout, blocks, attention)
        dense, rest, experts = _pattern_layer(model, layout, mixers, blocks, attention)
    main = dense if model.moe is None else rest
    mtp_dense = model.mtp_weights * main + mtp_join_parameters(model) / tp
    first, vision = table, model.encoder
    if vision is not None and vision.use is not None and vision.use.trained:
        first = table + encoder_parameters_on_gpu(vision, layout)
    return first, _tables_at_head(model, layout) * table + mtp_dense, model.mtp_weights * experts


def encoder_parameters_on_gpu(vision: VisionSpec, layout: Layout) -> Floats:
    """Parameters of an image encoder on one GPU of the first pipeline rank, before data-parallel sharding.

    Whole on every tensor rank, but where the framework cuts it: Megatron-Bridge builds the encoder on the
    first pipeline stage, from transformers' own class (models/qwen_vl/modeling_qwen25_vl.py, Qwen25VLModel;
    models/gemma_vl/modeling_gemma3_vl.py) or of Megatron's layers (models/qwen_vl/modelling_qwen3_vl/
    model.py, Qwen3VLModel).

    Parameters
    ----------
    vision : VisionSpec
        With its `use`.
    layout : Layout
        One layout, or many of shape [n]; tp is used.

    Returns
    -------
    float or array
        Parameters, above 0, shaped like the layout.
    """
    layers, ends = encoder_layers(vision), encoder_end_parameters(vision)
    tp = np.asarray(layout.tp)
    if vision.use is None or not vision.use.tensor_parallel:
        whole: Floats = vision.layers * dense_layer_parameters(layers) + ends + 0.0 * tp
        return whole
    return vision.layers * layer_parameters_on_gpu(layers, layout)[0] + ends / tp


def _tables_at_head(model: ModelSpec, layout: Layout) -> Ints:
    """Token tables and heads of the last rank, beside those of the first."""
    untied = 0 if model.tied_embeddings else 1
    several = np.asarray(layout.pp) > 1
    return np.where(several, max(1, untied + (model.mtp_layers > 0)), untied)


def table_excess(workload: Workload, layout: Layout) -> tuple[Floats, Floats]:
    """What states of token tables and heads take beyond as many parameters of matrices of layers.

    Muon's have Adam's (`optimizers.beside_matrices`).

    Parameters
    ----------
    workload : Workload
        Model, optimizer and software.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    tuple of two floats or arrays
        Bytes on one GPU of the first pipeline rank and of the last, which add up where one rank is both; 0
        where the optimizer keeps as much of all of them.
    """
    if not keeps_more_of_tables(workload):
        return 0.0, 0.0
    shards, _ = optimizer_shards(layout)
    _, _, of_dense = state_bytes(workload, layout, shards)
    _, _, of_table = state_bytes(workload, layout, shards, tables=True)
    table = np.asarray(table_parameters(workload.model, layout))
    excess = np.asarray(of_table) - of_dense
    return excess * table, excess * table * _tables_at_head(workload.model, layout)


def optimizer_shards(layout: Layout) -> tuple[Ints, Ints]:
    """Ranks that share the optimizer states of a parameter, and under ZeRO 3 the parameter itself.

    All replicas, or those of a shard group, innermost ranks first (HSDP; InternEvo's zero1 size; Megatron
    --num-distributed-optimizer-instances, which splits the replicas of experts into as many groups).

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    tuple of two int or arrays of int
        Of dense parameters, and of experts; at least 1.
    """
    dense = np.asarray(layout.dp) * np.asarray(layout.cp)
    expert = np.asarray(layout.edp)
    return np.maximum(dense // layout.shard_groups, 1), np.maximum(expert // layout.shard_groups, 1)


def queued_sharding(workload: Workload) -> QueuedSharding | None:
    """How the software gathers ahead and reduces by a queue under ZeRO 2 and 3 (Megatron-FSDP).

    Parameters
    ----------
    workload : Workload
        Its framework is used.

    Returns
    -------
    QueuedSharding or None
        None where buckets are gathered and reduced one by one.
    """
    setting = framework_of_stack(workload.framework).zero_stages.get(3)
    return setting if isinstance(setting, QueuedSharding) else None


def reference_setting(workload: Workload) -> ReferenceSetting:
    """How the software keeps a reference model of its own.

    Parameters
    ----------
    workload : Workload
        Its framework and the place of its reference, `resident` where it says none.

    Returns
    -------
    ReferenceSetting
        Of the framework's record.

    Raises
    ------
    KeyError
        For a framework that keeps no reference there.
    """
    return framework_of_stack(workload.framework).references[workload.reference or "resident"]


def reference_bytes(
    workload: Workload, layout: Layout, shards: Ints, copies: float = 0.0
) -> tuple[Floats, Floats]:
    """Bytes of one parameter of a frozen reference model, on one GPU and in its host's memory.

    A 16-bit weight, whole where the framework does not shard it: Megatron-SWIFT builds a second model beside
    the one that is wrapped for data parallelism (swift/megatron/trainers/rlhf_mixin.py, prepare_model), TRL
    gives it to DeepSpeed with ZeRO switched off below stage 3 (trl/models/utils.py, prepare_deepspeed). FSDP2
    keeps shards of what was loaded, fp32, and where weights are not resharded after the forward pass the
    gathered ones for good, as no backward pass gives them up (prepare_fsdp). What DeepSpeed's ZeRO 3 or a
    swap of both models keeps on the host: `step_time.reference_copies_s` has the sources.

    Parameters
    ----------
    workload : Workload
        Its kind, its reference and its software.
    layout : Layout
        One layout, or many of shape [n]; the ZeRO stage and the offloaded share are used.
    shards : int or array of int
        Data-parallel ranks that share the parameter, at least 1.
    copies : float
        Quantised copies beside a weight, bytes, at least 0.

    Returns
    -------
    tuple of two floats or arrays
        Bytes, at least 0; 0 where no reference of its own is kept.
    """
    if not workload.keeps_reference:
        return 0.0, 0.0
    setting, d = reference_setting(workload), np.asarray(shards, dtype=np.float64)
    stage = np.asarray(layout.zero_stage)
    if workload.reference == "offloaded":
        of_shard = 2.0 / d
        return 0.0 * of_shard, of_shard if setting.uploads_shards else np.full_like(of_shard, 4.0)
    whole = np.full_like(d, 2.0 + copies) + 0.0 * stage
    if not setting.is_sharded:
        return whole, 0.0 * whole
    of_shard = setting.shard_bytes / d
    if not setting.gathers_whole:
        return np.where(stage == 3, of_shard, whole), 0.0 * whole
    gpu_share = 1.0 - np.asarray(layout.optimizer_offload) / 100.0
    on_gpu = gpu_share * of_shard + np.where(stage == 3, 0.0, whole)
    return on_gpu, (1.0 - gpu_share) * of_shard


def state_bytes(
    workload: Workload,
    layout: Layout,
    shards: Ints,
    *,
    experts: bool = False,
    tables: bool = False,
) -> StateBytes:
    """Weights, gradients and optimizer states of one parameter on one GPU.

    Mixed-precision Adam: a 2-byte weight, a gradient, fp32 master weight and two moments (12). Megatron keeps
    the gradient in fp32 (4 bytes), stacks that reduce in 16 bits in 2 (Megatron-LM docs, dist_optimizer.md:
    6 + 12/d). Under ZeRO 3 the fp32 weight is the only one, but for stacks that keep 16-bit weights whole
    between the micro-batches of a pipeline. These keep gradients whole too, under ZeRO 2 and 3, and in fp32,
    in which they are reduced: shards come only as the last micro-batch gives whole ones up, layer by layer
    (torch 2.13, pipelining/stage.py, backward_maybe_with_nosync: set_requires_gradient_sync(False), and
    perform_reduce_grad; fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed: reduce_dtype, which
    torchtitan 0.3.0 fixes to float32 in config/configs.py, mixed_precision_reduce). Accelerate keeps 16-bit
    ones whole until the last micro-batch, unless each one's are reduced (`sync_each_batch`); shards have the
    parameter's 32 bits (_fully_shard/_fsdp_collectives.py, foreach_reduce: orig_dtype). FP8 kernels keep a
    quantised copy of the weight and mostly of its transpose, beside the 16-bit weight or, with FP8
    parameters, instead of it. States of offloaded parameters are the host's
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py: fp32 weight and moments of an
    offloaded parameter are made on the CPU; torch 2.13, CPUOffloadPolicy of FSDP2: weights and
    gradients lie there too; deepspeed/runtime/zero/stage3.py: under ZeRO 3 16-bit weights stay on
    the GPU unless `offload_param` keeps their shards on the host, and gradients pass through it in
    16 bits).
    Megatron-FSDP keeps shards of 16-bit weights beside the fp32 ones, and gradients in the type that the run
    says (megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, model_weight_buffer,
    main_weight_buffer and main_grad_buffer); Transformer Engine knows nothing of it and keeps its quantised
    copies whole (megatron/core/extensions/transformer_engine.py, TELinear.forward, is_first_microbatch).
    Further copies of gradients are those of an optimizer that DeepSpeed takes for states on the GPU alone
    (deepspeed/runtime/engine.py, `_do_optimizer_sanity_check`). Other optimizers keep other moments
    (`optimizers.moments_bytes`), the paged ones on the host, and those that step whole matrices share them
    among fewer ranks (`optimizers.stepping_ranks`). A reference model of its own counts among weights
    (`reference_bytes`).

    Parameters
    ----------
    workload : Workload
        Precision, optimizer and software.
    layout : Layout
        One layout, or many of shape [n]; pp, the ZeRO stage and the offloaded share are used.
    shards : int or array of int
        d, data-parallel ranks that share the parameter, at least 1.
    experts : bool
        Whether it is one of routed experts. Beside a frozen parameter is its share of the adapters.
    tables : bool
        Whether it is one of token tables and heads.

    Returns
    -------
    tuple of three floats or arrays
        Bytes of weights, of gradients, of optimizer states, at least 0 each.

    Raises
    ------
    KeyError
        For an optimizer without traits.
    """
    stack, profile = stack_constants(workload), memory_profile(workload.framework)
    bf16 = workload.precision == "bf16"
    offloaded = np.asarray(layout.optimizer_offload) / 100.0
    on_gpu = 1.0 - offloaded
    grad = float(stack.gradient_bytes) + np.where(
        bf16, on_gpu * profile.bf16_gradient_copies_bytes, 0.0
    )
    if profile.sums_beside_gradients and stack.gradient_bytes == 4:
        grad = grad + 2.0
    copies, weight = 0.0, 2.0
    if profile.fp8_weight_copies and workload.precision in OPERAND_BYTES:
        copies = _narrow_weight_bytes(workload)
        weight = 0.0 if stack.narrow_gathers else 2.0
    step = 0.0 if bf16 else profile.step_bytes
    moments = moments_bytes(workload, experts=experts, tables=tables)
    optimizer = FP32_BYTES + (0.0 if pages_states(workload) else moments)
    d = np.asarray(shards, dtype=np.float64)
    stage = np.asarray(layout.zero_stage)
    fsdp = stage == 3
    low = 4.0 - (4.0 - profile.offloaded_shard_bytes) * offloaded
    kept = low - (_HOST_WEIGHT_BYTES if workload.offload_parameters else 0.0)
    weights: Floats = np.where(fsdp, (kept + copies) / d, weight + copies)
    unsharded = np.where(stage == 2, grad / d, grad)
    gradients: Floats = np.where(fsdp, low / d, unsharded)
    if queued_sharding(workload) is not None:
        whole = 0.0 if stack.narrow_gathers else copies
        weights = np.where(fsdp, (kept + weight + copies - whole) / d + whole, weights)
        gradients = np.where(fsdp, grad / d, gradients)
    if profile.unsharded_in_pipeline:
        in_full = (stage >= 2) & (np.asarray(layout.pp) > 1) & (d > 1)
        weights = weights + np.where(in_full & fsdp, 2.0, 0.0)
        gradients = np.maximum(gradients, np.where(in_full, 4.0, 0.0))
    if profile.whole_while_accumulating:
        accumulates = (stage >= 2) & (np.asarray(layout.num_micro_batches) > 1) & (d > 1)
        accumulates &= not workload.sync_each_batch
        of_shard = np.where(stage == 2, 4.0 / d, 0.0)
        gradients = np.maximum(gradients, np.where(accumulates, 2.0, of_shard))
    stepping = d if tables else stepping_ranks(workload, layout, shards, experts=experts)
    share = np.where(stage == 0, 1.0, 1.0 / stepping)
    of_shard = np.where(fsdp, (optimizer - 4.0) / d, optimizer * share + step / d)
    states: Floats = on_gpu * of_shard
    if workload.adapters is not None:
        trained, frozen = workload.trained_shares[experts], workload.frozen_weight_bytes[experts]
        base = frozen * weight / 2.0 * (1.0 - _frozen_offloaded(workload, layout)) + copies
        # Under ZeRO 2 of PyTorch what is gathered lies beside the shards.
        beside = (stage == 2) & stack.shards_frozen(stage) & (d > 1.0)
        weights = np.where(fsdp, 1.0 / d, 1.0 + beside / d) * base + trained * weights
        gradients, states = trained * gradients, trained * states
    if workload.keeps_reference:
        weights = weights + reference_bytes(workload, layout, shards, copies)[0]
    if workload.factors is not None:
        factor = workload.factors.state_memory
        return weights * factor, gradients * factor, states * factor
    return weights, gradients, states


def parameters_go_with_states(framework: str) -> bool:
    """Whether offloading the optimizer takes every parameter to the host, with a gradient or without.

    FSDP2's CPUOffloadPolicy does (torch 2.13, fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param);
    DeepSpeed and Megatron move what they step.

    Parameters
    ----------
    framework : str
        Or the stack of a measured run.

    Returns
    -------
    bool
        True of frameworks on FSDP2.
    """
    return memory_profile(framework).offloaded_shard_bytes == 0.0


def _frozen_offloaded(workload: Workload, layout: Layout) -> Floats:
    """Share of frozen weights that lie off the GPU, 0 to 1: all of them under `offload_param`.

    DeepSpeed asks no parameter for its gradient (runtime/zero/partition_parameters.py, _partition_param).
    """
    if workload.adapters is None:
        return 0.0
    if workload.offload_parameters:
        return np.where(np.asarray(layout.zero_stage) == 3, 1.0, 0.0)
    goes = parameters_go_with_states(workload.framework)
    return np.asarray(layout.optimizer_offload) / 100.0 * goes


def frozen_encoder_bytes(workload: Workload, layout: Layout) -> Floats:
    """Weights of a frozen encoder on one GPU of the first rank, sharded as others are under ZeRO 3.

    Parameters
    ----------
    workload : Workload
        Of the whole model.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        Bytes, at least 0; 0 without an encoder that is frozen.
    """
    found = encoder_of(workload)
    if found is None or found[1].trained:
        return 0.0
    shards = optimizer_shards(layout)[0]
    plain = replace(workload, adapters=None, precision="bf16", fp8_recipe=None)
    if workload.adapters is not None:
        plain = replace(plain, reference=None, kind=PRETRAINING)
    weights = np.asarray(state_bytes(plain, layout, shards)[0])
    held: Floats = weights * np.asarray(encoder_parameters_on_gpu(found[0], layout))
    return held


def offloaded_bytes(workload: Workload, layout: Layout) -> tuple[Floats, Floats]:
    """What offloading or paging the optimizer keeps in the host's memory, of one parameter on one GPU.

    The fp32 weight, the moments and the gradient, which is copied there in fp32 each step
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py), what the stack's profile adds, and offloaded
    16-bit shards (deepspeed/runtime/zero/partition_parameters.py, _partition_param), with what a reference
    keeps there (`reference_bytes`). Paged optimizers keep their moments there alone. States on drives, and
    shards, leave the buffers that they pass through (`footprint.offloaded_states_gib`).

    Parameters
    ----------
    workload : Workload
        Its optimizer and software.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    tuple of two floats or arrays
        Bytes of a parameter outside routed experts, and of one in them; 0 where nothing is offloaded.
    """
    of_dense, of_expert = (
        _offloaded_of_one(workload, layout, shards, experts=experts)
        for shards, experts in zip(optimizer_shards(layout), (False, True), strict=True)
    )
    return of_dense, of_expert


def _offloaded_of_one(workload: Workload, layout: Layout, shards: Ints, *, experts: bool) -> Floats:
    moments = moments_bytes(workload, experts=experts)
    share = np.where(np.asarray(layout.zero_stage) == 0, 1.0, 1.0 / np.asarray(shards))
    kept: Floats = np.asarray(layout.optimizer_offload) / 100.0 * share
    kept = kept * workload.trained_shares[experts]
    copies = memory_profile(workload.framework).host_copies_bytes
    each = 0.0 if workload.optimizer_on_drives else FP32_BYTES + moments + _HOST_GRADIENT_BYTES
    states: Floats = kept * (each + copies)
    if pages_states(workload):
        states = states + workload.trained_shares[experts] * share * moments
    states = states + reference_bytes(workload, layout, shards)[1]
    if workload.parameters_on_drives:
        return states
    moved = _frozen_offloaded(workload, layout) * workload.frozen_weight_bytes[experts]
    if workload.offload_parameters:
        moved = moved + _HOST_WEIGHT_BYTES * workload.trained_shares[experts]
    return states + moved * share


def _narrow_weight_bytes(workload: Workload) -> float:
    """Bytes of a parameter at the run's narrow precision, rows and columns.

    One copy serves both on Blackwell, whose FP8 products take either order (Transformer Engine,
    tensor/float8_tensor.py, is_non_tn_fp8_gemm_supported); blocks of MXFP8 and NVFP4 are scaled apart.
    """
    either_order = workload.cluster.device.architecture == "blackwell"
    orders = 1.0 if workload.precision == "fp8" and either_order else 2.0
    return orders * OPERAND_BYTES[workload.precision]


def state_bytes_per_parameter(
    workload: Workload,
    layout: Layout,
    shards: Ints,
    *,
    experts: bool = False,
) -> Floats:
    """Weights, gradients and optimizer states of one parameter on one GPU: the sum of `state_bytes`.

    That function has the sources (docs/cost_model.md, "Memory").

    Parameters
    ----------
    workload : Workload
        Precision, optimizer and software.
    layout : Layout
        One layout, or many of shape [n].
    shards : int or array of int
        Data-parallel ranks that share the parameter, at least 1.
    experts : bool
        Whether it is one of routed experts.

    Returns
    -------
    float or array
        Bytes, at least 0.
    """
    weights, gradients, states = state_bytes(workload, layout, shards, experts=experts)
    together: Floats = np.asarray(weights) + gradients + states
    return together


def table_parameters(model: ModelSpec, layout: Layout) -> Floats:
    """Parameters of one token table or head on one GPU: V h / tp.

    Vocabulary-parallel (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Parameters
    ----------
    model : ModelSpec
        Its vocabulary V and hidden width h are used.
    layout : Layout
        One layout, or many of shape [n]; tp is used.

    Returns
    -------
    float or array
        Parameters, above 0, shaped like the layout.
    """
    parameters: Floats = embedding_parameters(model) / layout.tp
    return parameters
