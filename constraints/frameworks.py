"""What frameworks beside Megatron refuse to start, or start and fail in, beyond the general rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.layers import ARCHITECTURES, whole_kv_heads
from meshwright.constraints.pipeline import TORCHTITAN_SCHEDULE_RULES
from meshwright.constraints.rule import (
    AtLeast,
    AtMost,
    Divides,
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
from meshwright.costmodel.layout import AXES, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK, RECORDS, planned
from meshwright.frameworks.deepspeed import SCRIPT_OPTIMIZERS
from meshwright.frameworks.fsdp2 import FSDP2
from meshwright.frameworks.record import DEGREES_OF_FRAMEWORKS, Framework
from meshwright.frameworks.torchtitan import TORCHTITAN
from meshwright.model_specs.blocks import LINEAR_TITLES
from meshwright.model_specs.reader import Flavor, built_alike
from meshwright.model_specs.schema import ModelSpec

DEEPSPEED_PIPELINE_SHARDING = AtMost(
    name="deepspeed-pipeline-zero",
    sentence="zero_stage <= 1 where pp > 1: the pipeline engine accumulates whole gradients",
    unit="stages of ZeRO",
    when=(When("pp", least=2),),
    value=of("zero_stage"),
    words="ZeRO stage {zero_stage} with pp {pp}",
    remedy="Lower the ZeRO stage to 1, or set pp to 1.",
)
"""Asserted as the engine is made, not by the parser (DeepSpeed 0.19.8, runtime/pipe/engine.py)."""


PEFT_DEGREES = AtMost(
    name="peft-degrees",
    sentence="tp pp ep <= 1 beside adapters: PEFT puts them beside whole layers of a whole model",
    binds=lambda work: work.adapters is not None,
    value=of("tp", "pp", "ep"),
    words="tp {tp} x pp {pp} x ep {ep} beside adapters of PEFT, which stand beside whole layers",
    remedy="Keep tp, pp and ep at 1 and shard with dp, or choose the megatron framework.",
)
"""The base layer is a whole nn.Linear (peft/tuners/lora/layer.py, Linear); what is sharded is left to FSDP or
ZeRO (peft/docs/source/accelerate/fsdp.md and deepspeed.md)."""


def _has_whole_base(work: Workload) -> bool:
    """Whether frozen weights have 8 bits, or 4 beside DoRA."""
    adapters = work.adapters
    return adapters is not None and (
        adapters.base_bits == 8 or (adapters.base_bits == 4 and adapters.decomposed)
    )


PEFT_WHOLE_BASE = AtMost(
    name="peft-whole-base",
    sentence="zero_stage <= 2 beside weights of 8 bits, and of 4 bits under DoRA",
    unit="stages of ZeRO",
    binds=_has_whole_base,
    value=of("zero_stage"),
    limit=of(number=2),
    words="ZeRO stage {zero_stage} of frozen weights that PEFT does not have sharded",
    remedy="Lower the ZeRO stage to 2, or train lora or qlora.",
)
"""ZeRO 3 has been tried with LoRA beside weights of 4 bits (peft/docs/source/accelerate/deepspeed.md); with
QDoRA there are reports of trouble (peft/docs/source/developer_guides/lora.md, caveats of DoRA), and 8-bit
weights are not sharded at all (peft, issue 2833; LLaMA-Factory, issue 3543)."""


TRL_DEGREES = AtMost(
    name="trl-degrees",
    sentence="tp cp pp ep <= 1 in preference training: TRL runs whole sequences through a whole model",
    binds=lambda work: work.step_kind.on_preferences,
    value=of("tp", "cp", "pp", "ep"),
    words="tp {tp} x cp {cp} x pp {pp} x ep {ep} under a trainer of TRL for preferences",
    remedy="Keep tp, cp, pp and ep at 1 and shard with dp, or choose the megatron framework.",
)
"""Chosen and rejected sequences are joined, and their log-probabilities summed, on one rank
(trl/trainer/dpo_trainer.py, _compute_loss; trl/trainer/kto_trainer.py)."""

TRL_KTO_BATCH = AtLeast(
    name="trl-kto-batch",
    sentence="micro_batch >= 2 in kto: TRL pairs every prompt with another one's completion",
    unit="sequences",
    binds=lambda work: work.kind == "kto",
    value=of("micro_batch"),
    limit=of(number=2),
    words="micro-batches of {micro_batch} under TRL's trainer of kto",
    remedy="Take micro_batch 2 or more, or choose the megatron framework.",
)
"""trl/trainer/kto_trainer.py, KTOTrainer.__init__, raises below 2: completions rotate within a batch."""

WHOLE_HEAD = AtMost(
    name="whole-head",
    sentence="tp pp ep <= 1 where the loss takes the head's product too: it reads the whole weight",
    binds=lambda work: work.loss is not None,
    value=of("tp", "pp", "ep"),
    words="tp {tp} x pp {pp} x ep {ep} beside a loss that takes the head's product too",
    remedy="Keep tp, pp and ep at 1 and shard with dp or cp, or leave the loss out.",
)
"""LigerFusedLinearCrossEntropy and TRL's losses take the weight of `lm_head` as one tensor
(liger_kernel/ops/fused_linear_cross_entropy.py; trl/trainer/sft_trainer.py, _patch_chunked_ce_lm_head, up to
1.14; trl/trainer/utils.py, add_fused_lm_head)."""

ENCODER_DEGREES = AtMost(
    name="encoder-degrees",
    sentence="tp cp pp ep <= 1 with images: an encoder of transformers stands in front of a whole model",
    binds=lambda work: work.model.encoder is not None,
    value=of("tp", "cp", "pp", "ep"),
    words="tp {tp} x cp {cp} x pp {pp} x ep {ep} for a model that reads images",
    remedy="Keep tp, cp, pp and ep at 1 and shard with dp, or choose the megatron framework.",
)
"""Plans for tensor parallelism name the language model's matrices alone, and images are not cut with the
sequence (transformers/models/qwen2_5_vl/configuration_qwen2_5_vl.py, base_model_tp_plan)."""

ENCODER_CONTEXT = AtMost(
    name="encoder-context",
    sentence="cp <= 1 with images whose encoder does not run beside context parallelism",
    unit="context-parallel ranks",
    binds=lambda work: work.model.encoder is not None and not _use_of(work, "context_parallel"),
    value=of("cp"),
    words="cp {cp} for a model whose images are not cut with the sequence",
    remedy="Set cp to 1.",
)
"""Gemma 3 refuses it, and Qwen2.5-VL hands whole sequences on (megatron/bridge/models/gemma_vl/
gemma3_vl_provider.py, provide; models/qwen_vl/modeling_qwen25_vl.py, Qwen25VLModel.forward)."""


ENCODER_HEADS = Divides(
    name="encoder-heads",
    sentence="heads of the image encoder mod tp = 0 where tensor parallelism cuts it",
    unit="heads left over",
    binds=lambda work: _use_of(work, "tensor_parallel"),
    number=of(number=lambda work: 0 if work.model.encoder is None else work.model.encoder.heads),
    by=of("tp"),
    words="{number} heads of the image encoder do not divide by tp {tp}",
    remedy="Take a tp that divides {number}.",
)
"""Its layers are those of the language model (megatron/bridge/models/qwen_vl/modelling_qwen3_vl/model.py)."""


def _use_of(workload: Workload, field: str) -> bool:
    """A field of what the run makes of its image encoder; False without one."""
    vision = workload.model.encoder
    return vision is not None and bool(getattr(vision.use, field))


DEEPSPEED_REFERENCE = AtLeast(
    name="deepspeed-reference",
    sentence="zero_stage >= 3 where the reference is offloaded: no other parameters leave the GPU",
    unit="stages of ZeRO",
    binds=lambda work: work.reference == "offloaded",
    value=of("zero_stage"),
    limit=of(number=3),
    words="ZeRO stage {zero_stage} beside a reference in the host's memory",
    remedy="Set the ZeRO stage to 3, or keep the reference resident.",
)
"""openrlhf/utils/deepspeed/deepspeed.py, get_ds_eval_config: stage 3 or none; DeepSpeed 0.19.8,
deepspeed/runtime/zero/config.py, offload_param."""


class DeepspeedExpertGroups(Rule):
    """dp mod ep = 0, and experts stand on one pipeline stage: expert groups are cut from the replicas.

    DeepSpeed 0.19.8 asserts (dp tp) mod ep = 0 (utils/groups.py) and experts mod ep = 0 (moe/layer.py). It
    could also spread experts over tensor ranks, and over every stage of a pipeline: left out by choice, its
    all-to-all over copied tokens is not what the cost model prices.
    """

    name = "deepspeed-experts"
    unit = "replicas left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        return as_excess(column(table, "dp") % column(table, "ep") + column(table, "pp") - 1)

    def check(self, plan: FinishedPlan) -> Finding | None:
        dp = int(plan.layout.dp)
        ep = int(plan.layout.ep)
        pp = int(plan.layout.pp)
        remainder = dp - dp // ep * ep
        return self.over(
            value=remainder + pp - 1,
            words=f"experts on ep {ep} of dp {dp} replicas and pp {pp} stages",
            remedy="Set pp to 1 and take an ep that divides dp.",
        )


def _of_muon(workload: Workload) -> bool:
    return workload.optimizer == "muon"


FSDP2_MUON_TENSOR = AtMost(
    name="fsdp2-muon-tensor",
    sentence="tp <= 1 with muon",
    binds=_of_muon,
    value=of("tp"),
    words="tp {tp} with muon",
    remedy="Keep tp at 1, or train with another optimizer.",
)
"""By choice: how torch.optim.Muon communicates over a mesh of two axes is not priced."""


def _no_experts_for_muon(name: str) -> Rule:
    """Muon trains models without experts: those of transformers share a tensor of three dimensions.

    torch.optim.Muon takes matrices alone (torch 2.13, optim/_muon.py); experts are one parameter of all of
    them (transformers 5.23, models/mixtral/modeling_mixtral.py, MixtralExperts). DeepSpeed 0.19.8 tags a
    weight for Muon by its two dimensions (deepspeed/__init__.py).
    """
    return Refuses(
        name=name,
        sentence="Muon trains models without experts, which share a tensor of three dimensions",
        unit="models",
        binds=lambda work: _of_muon(work) and work.model.moe is not None,
        words="muon on a model with experts",
        remedy="Train with another optimizer, or choose the megatron framework.",
    )


DEEPSPEED_SCRIPT_OPTIMIZER = AtMost(
    name="deepspeed-script-optimizer",
    sentence="tp pp ep <= 1 with other optimizers than adam and sgd",
    binds=lambda work: work.optimizer not in SCRIPT_OPTIMIZERS,
    value=of("tp", "pp", "ep"),
    words="tp {tp} x pp {pp} x ep {ep} with {optimizer}",
    remedy="Keep tp, pp and ep at 1 and shard with dp, or train with adam or sgd.",
)
"""Megatron-DeepSpeed's script hands DeepSpeed its own; a script around the Trainer of transformers has the
others and no such axes."""

DEEPSPEED_MUON_ZERO = Requires(
    name="deepspeed-muon-zero",
    sentence="zero_stage 1 or 2 with muon",
    unit="stages of ZeRO",
    binds=_of_muon,
    needs=When("zero_stage", least=1, most=2),
    words="ZeRO stage {zero_stage} with muon",
    remedy="Take ZeRO stage 1 or 2, or train with another optimizer.",
)
"""By choice: stage 3 gathers every gradient and momentum, and reduces without scattering (DeepSpeed 0.19.8,
runtime/zero/stage3.py, _muon_update_sub_group), which is not priced."""


DEEPSPEED_RULES: tuple[Rule, ...] = (
    DEEPSPEED_PIPELINE_SHARDING,
    DeepspeedExpertGroups(),
    PEFT_DEGREES,
    PEFT_WHOLE_BASE,
    TRL_DEGREES,
    TRL_KTO_BATCH,
    ENCODER_DEGREES,
    DEEPSPEED_REFERENCE,
    WHOLE_HEAD,
    DEEPSPEED_SCRIPT_OPTIMIZER,
    DEEPSPEED_MUON_ZERO,
    _no_experts_for_muon("deepspeed-muon-experts"),
)


# What accelerate with PyTorch FSDP2 refuses, beyond the general rules (read in accelerate 1.15.0).


class SyncEachBatch(Rule):
    """Reducing each micro-batch's gradients takes two micro-batches and two replicas: else nothing changes.

    The last micro-batch's are always reduced (accelerate/accelerator.py, accumulate: sync_gradients).
    """

    name = "sync-each-batch"
    unit = "layouts"

    def applies(self, workload: Workload) -> bool:
        return workload.sync_each_batch

    def fields_read(self) -> frozenset[str]:
        return frozenset((*AXES, "num_micro_batches"))

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        replicas = column(table, "dp") * column(table, "cp")
        alone = np.minimum(column(table, "num_micro_batches"), replicas) < 2
        return as_excess(alone & self.applies(table.workload))

    def check(self, plan: FinishedPlan) -> Finding | None:
        micro_batches = int(plan.layout.num_micro_batches)
        dp, cp = int(plan.layout.dp), int(plan.layout.cp)
        if not plan.workload.sync_each_batch or (micro_batches > 1 and (dp > 1 or cp > 1)):
            return None
        return self.finding(
            value=1,
            words=f"gradients of each micro-batch of {micro_batches} reduced on dp {dp} x cp {cp}",
            remedy="Leave the gradients to the last micro-batch.",
        )


SHARDS_BESIDE_TENSOR = AtMost(
    name="fsdp2-shards",
    sentence="tp <= 1 where dp cp = 1: FSDP2 has nothing to shard over where every rank is a tensor rank",
    when=(When("dp", most=1), When("cp", most=1)),
    value=of("tp"),
    words="tp {tp} takes every rank and leaves FSDP none to shard over",
    remedy="Lower tp, or raise dp or cp to 2 or more.",
)
"""Raised by the Accelerator, not by the parser (accelerate 1.15.0, parallelism_config.py)."""

WHOLE_MAMBA = AtMost(
    name="fsdp2-mamba",
    sentence="tp cp <= 1 where layers have Mamba",
    binds=lambda work: work.model.state_space is not None,
    value=of("tp", "cp"),
    words="tp {tp} x cp {cp} for layers of Mamba, which transformers cuts neither way",
    remedy="Set tp and cp to 1, and shard with dp.",
)
"""transformers 5.23 has no tensor-parallel plan for these blocks (models/nemotron_h, falcon_h1, mamba2,
bamba, granitemoehybrid, mamba, falcon_mamba and jamba, configuration_*.py: Jamba's is of its experts), and
accelerate's context parallelism knows attention alone: a scan would start anew on each rank
(accelerate/parallelism_config.py)."""

WHOLE_DELTA_NET = AtMost(
    name="fsdp2-whole-delta-net",
    sentence="tp cp <= 1 where layers have linear attention",
    binds=lambda work: work.model.linear_attention is not None,
    value=of("tp", "cp"),
    words="tp {tp} x cp {cp} for layers with linear attention, which run whole here",
    remedy="Set tp and cp to 1, and shard with dp.",
)
"""Tensor ranks gather what every projection of Gated DeltaNet returns and run the same rule over all heads
(transformers 5.23, models/qwen3_5, configuration_qwen3_5.py: colwise_gather_output), and accelerate's context
parallelism knows attention alone."""


def has_latent_experts(workload: Workload) -> bool:
    """Whether routed experts work on a projection of the hidden width."""
    return workload.model.latent_size is not None


WHOLE_LATENT = AtMost(
    name="fsdp2-latent-experts",
    sentence="tp <= 1 where experts work on a projection of the hidden width",
    unit="tensor-parallel ranks",
    binds=has_latent_experts,
    value=of("tp"),
    words="tp {tp} for experts on a projection, beside which transformers cuts no other matrix of a layer",
    remedy="Set tp to 1, and shard with dp.",
)
"""Only Nemotron-H has such experts, and its tensor-parallel plan names them and the token table alone
(transformers 5.23, models/nemotron_h/configuration_nemotron_h.py, base_model_tp_plan)."""

PATTERN_OF_LATENT = Refuses(
    name="fsdp2-latent-layers",
    sentence="experts on a projection of the hidden width in layers of a pattern alone (Nemotron-H)",
    unit="models",
    binds=lambda work: has_latent_experts(work) and work.model.hybrid_pattern is None,
    words="experts on a projection of the hidden width in layers with attention of their own",
    remedy="Choose the megatron framework for this model.",
)

WHOLE_WINDOW_HEADS = AtMost(
    name="fsdp2-window-heads",
    sentence="tp <= 1 where kinds of layers have heads of their own, reuse keys or read further inputs",
    unit="tensor-parallel ranks",
    binds=lambda work: bool(work.model.kinds_apart or work.model.layer_inputs),
    value=of("tp"),
    words="tp {tp} for layers with heads of their own by kind (window_heads), or that reuse keys and values "
    "(attention_order) or read inputs of their own (layer_inputs)",
    remedy="Set tp to 1, and shard with dp.",
)
"""By choice: the plan of transformers cuts them (transformers 5.23, models/gemma4/configuration_gemma4.py,
base_model_tp_plan), but its own plan for experts leaves attention whole, for want of key-value heads."""

CAUSAL_CONTEXT = AtMost(
    name="fsdp2-context-mask",
    sentence="cp <= 1 with sliding windows or attention sinks: accelerate has causal masks alone",
    unit="context-parallel ranks",
    binds=lambda work: work.model.windowed_layers > 0 or work.model.attention_sinks,
    value=of("cp"),
    words="cp {cp} for a model with sliding windows or attention sinks; beside cp accelerate has causal "
    "masks alone",
    remedy="Set cp to 1, or choose the megatron or the torchtitan framework.",
)
"""Its hook puts `is_causal` in place of every mask (accelerate/big_modeling.py,
_attach_context_parallel_hooks), and it asks for plain causal SDPA, which has no sinks
(docs/source/concept_guides/context_parallelism.md)."""

FSDP2_RULES: tuple[Rule, ...] = (
    SHARDS_BESIDE_TENSOR,
    whole_kv_heads(FSDP2),
    WHOLE_MAMBA,
    WHOLE_DELTA_NET,
    WHOLE_LATENT,
    PATTERN_OF_LATENT,
    WHOLE_WINDOW_HEADS,
    CAUSAL_CONTEXT,
    PEFT_DEGREES,
    TRL_DEGREES,
    TRL_KTO_BATCH,
    WHOLE_HEAD,
    FSDP2_MUON_TENSOR,
    _no_experts_for_muon("fsdp2-muon-experts"),
    SyncEachBatch(),
)


# Which architectures torchtitan 0.3.0 can build, and over what its experts spread.


_OWN_REGISTRY = ("deepseek_v3", "gpt_oss")
"""Models of torchtitan that only its own registry builds, at the sizes that it has them in."""


def registry_flavor(model: ModelSpec) -> Flavor | None:
    """What torchtitan's own registry builds of a model's sizes, where nothing else there can build it.

    Parameters
    ----------
    model : ModelSpec
        Any.

    Returns
    -------
    Flavor or None
        None where the registry has no model of these sizes.
    """
    alike = (built_alike(model, family) for family in _OWN_REGISTRY)
    return next((flavor for flavor in alike if flavor is not None), None)


def foreign_parts(model: ModelSpec) -> list[str]:
    """What of an architecture torchtitan has no layer for.

    Parameters
    ----------
    model : ModelSpec
        Any.

    Returns
    -------
    list of str
        In words; empty where it can be built.
    """
    moe = model.moe
    if registry_flavor(model) is not None:
        return []
    parts = {
        f"position {model.position}": model.position != "rope",
        f"activation {model.activation}": model.activation != "swiglu",
        f"norm {model.norm}": model.norm != "rmsnorm",
        "norms without weights": not model.norm_weights,
        f"{model.norms_per_layer} norms per layer": model.norms_per_layer != 2,
        "a norm after the embedding": model.embedding_norm,
        "parallel blocks": model.parallel_block,
        "biases": model.attention_bias or model.attention_output_bias or model.mlp_bias,
        "attention sinks": model.attention_sinks,
        "values of another width than keys": model.value_head_dim is not None,
        "gates on heads": model.attention_head_gates,
        "latent attention of these sizes": model.attention is not None,
        "a bias on the logits": model.output_bias,
        "multi-token prediction": model.mtp_layers > 0,
    }
    if moe is not None:
        parts |= {
            "shared experts": moe.shared_width > 0,
            "a norm behind the experts": moe.output_norm,
            "dense layers beside those with experts": moe.dense_layers > 0 or moe.every > 1,
            "router or expert biases": moe.router_bias or moe.expert_bias,
            "router groups": (moe.router_groups or 1) > 1,
            f"router score {moe.router_score}": moe.router_score == "sparsemixer",
        }
    return [name for name, present in parts.items() if present]


TORCHTITAN_ARCHITECTURE = Refuses(
    name="torchtitan-architecture",
    sentence="torchtitan's registry builds Llama, Qwen3, Mixtral-like, DeepSeek-V2/V3 and gpt-oss models "
    "only",
    unit="parts of the model",
    broken=lambda work: foreign_parts(work.model),
    words="torchtitan 0.3 has no layer for {broken}",
    remedy="Choose the megatron framework for this model, or fsdp2 where that has no layer for it either.",
)


class TorchtitanExpertShards(Rule):
    """(dp_shard cp tp) mod ep = 0: replicas (ZeRO 0, and other shard groups) lend the experts no ranks."""

    name = "torchtitan-expert-shards"
    unit = "ranks left over"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        group = column(table, "dp") // column(table, "shard_groups")
        shard = np.where(column(table, "zero_stage") > 0, group, 1)
        return as_excess((shard * column(table, "cp") * column(table, "tp")) % column(table, "ep"))

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        inner = int(layout.tp) * int(layout.cp)
        group = int(layout.dp) // int(layout.shard_groups)
        ranks = inner * group if int(layout.zero_stage) else inner
        remainder = ranks - ranks // int(layout.ep) * int(layout.ep)
        return self.over(
            value=remainder,
            words=f"{ranks} ranks that share the weights do not divide by ep {layout.ep}",
            remedy=f"Take an ep that divides {ranks}, or shard over more replicas with ZeRO 2 or 3.",
        )


class TorchtitanExpertTensor(Rule):
    """etp = tp where ep = 1, else etp = 1: tp cuts experts that ep does not spread, and no others.

    torchtitan/models/common/moe_sharding.py, `expert_param_placement_dense` and `_sparse`.
    """

    name = "torchtitan-expert-tensor"
    unit = "ranks"

    def applies(self, workload: Workload) -> bool:
        return workload.model.moe is not None

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        follows = np.where(column(table, "ep") == 1, column(table, "tp"), 1)
        return as_excess(np.abs(column(table, "etp") - follows))

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        follows = int(layout.tp) if int(layout.ep) == 1 else 1
        return self.over(
            value=abs(int(layout.etp) - follows),
            words=f"etp {layout.etp} with tp {layout.tp} and ep {layout.ep}, where torchtitan has {follows}",
            remedy=f"Set etp to {follows}: torchtitan has no setting for it.",
        )


TORCHTITAN_TOKEN_PREDICTION = AtMost(
    name="torchtitan-mtp",
    sentence="pp cp <= 1 with multi-token prediction (DeepSeek-V3), which takes whole sequences on one stage",
    binds=lambda work: work.model.mtp_layers > 0,
    value=of("pp", "cp"),
    words="multi-token prediction on pp {pp} and cp {cp}",
    remedy="Set pp and cp to 1, or train without the multi-token-prediction modules (mtp_layers: 0).",
)


# What torchtitan refuses to start, beyond the general rules (read in torchtitan 0.3.0).


class TorchtitanSequence(Rule):
    """seq_len mod (tp 2 cp) = 0, tp under sequence parallelism and 2 cp where cp is more than 1."""

    name = "torchtitan-sequence"
    unit = "tokens left over"

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        tp, cp = column(table, "tp"), column(table, "cp")
        cut_by_tp = np.where(column(table, "sequence_parallel"), tp, 1)
        parts = np.where(cp > 1, 2 * cp, 1) * cut_by_tp
        return as_excess(table.workload.seq_len % parts)

    def check(self, plan: FinishedPlan) -> Finding | None:
        tokens, cp = plan.workload.seq_len, int(plan.layout.cp)
        tp = int(plan.layout.tp) if plan.layout.sequence_parallel else 1
        parts = tp if cp == 1 else tp * cp + tp * cp
        remainder = tokens - (tokens // parts) * parts
        return self.over(
            value=remainder,
            words=f"{tokens} tokens do not divide into the {parts} pieces of tp {tp} and cp {cp}",
            remedy=f"Take tp and cp of which tp x 2 cp divides {tokens}.",
        )


TORCHTITAN_TIED_EMBEDDINGS = AtMost(
    name="torchtitan-tied-embeddings",
    sentence="pp <= 1 with tied embeddings: a pipeline cannot hold an embedding that the output layer shares",
    unit="pipeline stages",
    binds=lambda work: work.model.tied_embeddings,
    value=of("pp"),
    words="tied embeddings on {pp} pipeline stages",
    remedy="Set pp to 1, or train with untied embeddings.",
)

TORCHTITAN_CONTEXT_SHARDS = AtMost(
    name="torchtitan-context-shards",
    sentence="cp <= 1 where nothing is sharded: FSDP shards over context-parallel ranks too",
    unit="context-parallel ranks",
    when=(When("zero_stage", most=0),),
    value=of("cp"),
    words="ZeRO 0 on {cp} context-parallel ranks",
    remedy="Shard with ZeRO 2 or 3, or set cp to 1.",
)
"""`ParallelDims.fsdp_enabled` of torchtitan/distributed/parallel_dims.py."""

TORCHTITAN_SPREAD_EXPERTS = AtLeast(
    name="torchtitan-spread-experts",
    sentence="zero_stage >= 2 where ep spreads experts on dp 1 and cp 1, whose other ranks shard them",
    unit="stages of ZeRO",
    when=(When("ep", least=2), When("dp", most=1), When("cp", most=1)),
    value=of("zero_stage"),
    limit=of(number=2),
    words="ZeRO {zero_stage} with experts spread over ep {ep} of one replica",
    remedy="Shard with ZeRO 2 or 3.",
)
"""Experts are sharded over the ranks that ep leaves of dp, cp and tp, `efsdp` of
torchtitan/distributed/parallel_dims.py, which `parallelize` of every model hands to FSDP."""

TORCHTITAN_RULES: tuple[Rule, ...] = (
    *TORCHTITAN_SCHEDULE_RULES,
    whole_kv_heads(TORCHTITAN),
    TorchtitanSequence(),
    TORCHTITAN_TIED_EMBEDDINGS,
    TORCHTITAN_CONTEXT_SHARDS,
    TORCHTITAN_ARCHITECTURE,
    TorchtitanExpertShards(),
    TorchtitanExpertTensor(),
    TORCHTITAN_SPREAD_EXPERTS,
)


# What a framework has no setting for: rules that follow from the fields of its record.


ZERO_STAGES = (0, 1, 2, 3)


class AllowedDegrees(Rule):
    """Degrees without a setting are 1, sequence parallelism without one is off; ZeRO has its stages."""

    unit = "fields"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-degrees"
        self.framework = framework
        allowed: dict[str, tuple[int, ...]] = {
            axis: (1,) for axis in DEGREES_OF_FRAMEWORKS if axis not in framework.axes
        }
        stages = tuple(framework.zero_stages)
        if len(stages) < len(ZERO_STAGES):
            allowed["zero_stage"] = stages
        if framework.shard_groups is None or not framework.shard_groups.planned:
            allowed["shard_groups"] = (1,)
        if framework.optimizer_offload is None or not framework.optimizer_offload.planned:
            allowed["optimizer_offload"] = (0,)
        if framework.sequence_parallel is None:
            allowed["sequence_parallel"] = (0,)
        self.allowed = allowed

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        over = np.zeros_like(column(table, "tp"))
        for field, values in self.allowed.items():
            over = over + ~np.isin(column(table, field), values)
        return as_excess(over)

    def check(self, plan: FinishedPlan) -> Finding | None:
        wrong = []
        for field, values in self.allowed.items():
            value = int(getattr(plan.layout, field))
            if value not in values:
                wrong.append(f"{field} {value} (only {', '.join(map(str, values))})")
        return self.over(
            value=len(wrong),
            words=f"{self.framework.name} cannot run {'; '.join(wrong)}",
            remedy=self.framework.degrees_remedy,
        )


def allowed_precisions(framework: Framework) -> Rule | None:
    """The rule that a framework trains in the number format.

    Parameters
    ----------
    framework : Framework
        Its `precisions`.

    Returns
    -------
    Rule or None
        None for a framework that trains in all of `ARCHITECTURES`.
    """
    precisions = planned(framework.precisions)
    if not set(precisions) < set(ARCHITECTURES):
        return None
    return Refuses(
        name=f"{framework.name}-precision",
        sentence="The number format is one that the framework trains in",
        unit="formats",
        broken=lambda work: [] if work.precision in precisions else [work.precision],
        words=f"{framework.name} has no training in {{broken}}",
        remedy=f"Choose one of {', '.join(precisions)}, or the {DEFAULT_FRAMEWORK} framework.",
    )


def allowed_optimizers(framework: Framework) -> Rule:
    """The rule that a framework can be started with the optimizer."""
    optimizers = planned(framework.optimizers)

    def refused(workload: Workload) -> list[str]:
        wanted = workload.optimizer
        if wanted in optimizers:
            return []
        is_listed = wanted in framework.optimizers
        return [
            f"has no launch file for {wanted} here" if is_listed else f"cannot train with {wanted}"
        ]

    return Refuses(
        name=f"{framework.name}-optimizer",
        sentence="The optimizer is one that the framework can be started with",
        unit="optimizers",
        broken=refused,
        words=f"{framework.name} {{broken}}",
        remedy=f"Choose one of {', '.join(optimizers)}, or another framework.",
    )


DELTA_NET = "gated_delta_net"
"""The kind of linear attention that most frameworks with any have."""


def _not_planned(
    framework: Framework,
    what: str,
    sentence: str,
    broken: Callable[[Workload], Sequence[str]],
    having: Sequence[str] = (DEFAULT_FRAMEWORK,),
) -> Rule:
    """The rule of a framework that has none of some kind of layers, beside those `having` it."""
    return Refuses(
        name=f"{framework.name}-{what}",
        sentence=sentence,
        unit="kinds of layers",
        broken=broken,
        words=f"{framework.name} is not planned with {{broken}}",
        remedy=f"Choose the {' or '.join(having)} framework for this model.",
    )


def no_linear_attention(framework: Framework) -> Rule:
    """The rule of a framework whose layers have no Gated DeltaNet."""

    def broken(workload: Workload) -> list[str]:
        spec, layers = workload.model.linear_attention, workload.model.linear_layers
        has_others = spec is not None and spec.type != DELTA_NET
        return [f"the {layers} layers of linear attention"] if layers and not has_others else []

    says = "Every layer has attention: the framework's model has no layer with Gated DeltaNet"
    return _not_planned(framework, "linear-attention", says, broken)


def other_linear_attention(framework: Framework) -> Rule:
    """The rule of a framework that lacks some kind of linear attention beside Gated DeltaNet."""
    missing = {
        kind: title
        for kind, title in LINEAR_TITLES.items()
        if kind != DELTA_NET and kind not in framework.linear_attention
    }

    def broken(workload: Workload) -> list[str]:
        spec, layers = workload.model.linear_attention, workload.model.linear_layers
        if spec is None or not layers or spec.type not in missing:
            return []
        return [f"the {layers} layers of {spec.title} (linear_attention.type {spec.type})"]

    having = [each.name for each in RECORDS if missing.keys() <= each.linear_attention.keys()]
    says = f"The framework's model has no layer with {' or '.join(missing.values())}"
    return _not_planned(framework, "linear-kinds", says, broken, having)


def no_sparse_attention(framework: Framework) -> Rule:
    """The rule of a framework whose queries attend to every earlier position."""

    def broken(workload: Workload) -> list[str]:
        indexer, blocks = workload.model.indexer, workload.model.block_selection
        if blocks is not None:
            return [f"attention to {blocks.top_k} chosen blocks of {blocks.block} positions"]
        chosen = "attention to the {} positions that an indexer chooses"
        return [] if indexer is None else [chosen.format(indexer.top_k)]

    says = "Queries attend to every earlier position: the framework's model has no indexer that chooses some"
    return _not_planned(framework, "sparse-attention", says, broken)


def no_hybrid_layers(framework: Framework) -> Rule:
    """The rule of a framework whose layers all have attention and a feed-forward part."""

    def broken(workload: Workload) -> list[str]:
        model = workload.model
        if model.state_space is not None:
            return [f"the {model.mamba_layers} layers of {model.state_space.title}"]
        return [] if model.hybrid_pattern is None else ["a pattern of unlike layers"]

    says = "Every layer has attention and a feed-forward: no Mamba, and no pattern of single blocks"
    return _not_planned(framework, "hybrid-layers", says, broken)


def no_latent_experts(framework: Framework) -> Rule:
    """The rule of a framework whose routed experts read the hidden width itself."""

    def broken(workload: Workload) -> list[str]:
        latent = "experts on a projection of the hidden width"
        return [latent] if has_latent_experts(workload) else []

    says = (
        "Routed experts read the hidden width: the framework projects it to none that is narrower"
    )
    return _not_planned(framework, "latent-experts", says, broken)


def no_window_heads(framework: Framework) -> Rule:
    """The rule of a framework that is planned with one set of heads for all layers, and no more inputs."""

    def broken(workload: Workload) -> list[str]:
        model, heads = workload.model, workload.model.window_heads
        missing = []
        if heads is not None:
            words = "{} layers with a window and {} heads, {} key-value heads of {} (window_heads)"
            layers, of_each = model.windowed_layers, model.in_windows.heads
            missing.append(words.format(layers, of_each, heads.kv_heads, heads.head_dim))
        reusing = sum(letter.islower() for letter in model.attention_order or "")
        if reusing and model.indexer is None:
            missing.append(f"{reusing} layers that reuse keys and values (attention_order)")
        if model.layer_inputs is not None:
            words = "{} elements that each layer reads of a token table of its own (layer_inputs)"
            missing.append(words.format(model.layer_inputs))
        return missing

    having = [each.name for each in RECORDS if each.window_heads is not None]
    says = (
        "Plans are of models whose layers have the same heads, windows or not, and one input alone"
    )
    return _not_planned(framework, "window-heads", says, broken, having)


class WholeModelRecompute(Rule):
    """Recomputation is off, or covers every layer: the framework wraps all alike."""

    unit = "settings"

    def __init__(self, framework: Framework) -> None:
        self.name = f"{framework.name}-recompute"
        self.framework = framework

    def excess(self, table: LayoutTable) -> NDArray[np.float64]:
        mask = column(table, "recompute")
        chunks = column(table, "pp") * column(table, "vpp")
        # Division, because "a large number means all" may be too large to multiply.
        covered = column(table, "recompute_layers") >= -(-table.workload.model.layers // chunks)
        legal = (mask == 0) | ((mask == int(Recompute.FULL)) & covered)
        if "op" in self.framework.recompute_modules:
            legal |= mask == int(Recompute.OPERATORS)
        return as_excess(~legal)

    def check(self, plan: FinishedPlan) -> Finding | None:
        layout = plan.layout
        if int(layout.recompute) == 0:
            return None
        if int(layout.recompute) == 64 and "op" in self.framework.recompute_modules:
            return None
        chunks = int(layout.pp) * int(layout.vpp)
        recomputes_all = int(layout.recompute) == 32
        if recomputes_all and int(layout.recompute_layers) * chunks >= plan.workload.model.layers:
            return None
        words = "recomputes some layers only" if recomputes_all else "recomputes single modules"
        return self.finding(
            value=1,
            words=f"the plan {words}, {self.framework.name} recomputes every layer in full or none",
            remedy="Choose no recomputation or all of it.",
        )
