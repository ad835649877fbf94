"""The run file, field by field: one fully given configuration, and what was measured of it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.execution_names import (
    PRETRAINING,
    MuonMode,
    Optimizer,
    Precision,
    RecomputeName,
    ReferencePlace,
    ScheduleName,
    StepKindName,
)
from meshwright.costmodel.losses import LossName
from meshwright.costmodel.workload import AttentionKernel, Fp8Recipe
from meshwright.documents import ClosedDocument
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.model_specs.adapters import AdapterSpec
from meshwright.model_specs.schema import ModelSpec

MOST_LAYERS = 2000
MOST_HOSTS = 131_072
LONGEST_WORDS = 4000
"""Letters of a text that a run file holds."""

Degree = Annotated[int, Field(strict=True, ge=1, le=1_048_576)]
Sequences = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
Layers = Annotated[int, Field(strict=True, ge=0, le=MOST_LAYERS)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e12, allow_inf_nan=False)]
Words = Annotated[str, Field(max_length=LONGEST_WORDS)]
Descriptive = Annotated[
    Any, Field(description="Kept in the file for its readers; the cost model does not use it.")
]


def _split_words(value: object) -> object:
    """Words between commas, as a list."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",")]


def _first_number(value: object) -> object:
    """The first whole number of a text that has one."""
    if not isinstance(value, str):
        return value
    number = re.search(r"\d{1,9}", value)
    return value if number is None else int(number[0])


def _said(value: object) -> object:
    """A sentence about a switch, as sources write it, says that it was set."""
    return bool(value.strip()) if isinstance(value, str) else value


def _yes_or_no(value: object) -> object:
    """A switch as `--with` has it, in letters."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _name_or_mapping(value: object) -> object:
    if isinstance(value, dict | ModelSpec | ClusterSpec):
        return value
    if isinstance(value, str) and 0 < len(value) <= LONGEST_WORDS:
        return value
    raise ValueError("must be a catalog name, a file name or a mapping of fields")


def _words_or_layers(value: object) -> object:
    """Words, layers of each chunk, or layers of each [rank][virtual stage]."""
    if isinstance(value, str) and len(value) <= LONGEST_WORDS:
        return value
    if isinstance(value, list):
        rows = [row if isinstance(row, list) else [row] for row in value]
        if all(type(count) is int and 0 <= count <= MOST_LAYERS for row in rows for count in row):
            return value
    raise ValueError(f"must be a Megatron layout in words, or lists of layers (0 to {MOST_LAYERS})")


NameOrMapping = Annotated[Any, AfterValidator(_name_or_mapping)]
WordsOrLayers = Annotated[Any, AfterValidator(_words_or_layers)]


class OverlapDoc(ClosedDocument):
    """Communication that the run tries to hide under compute."""

    dp: Flag = False
    tp: Flag = False
    pp: Flag = False
    ep: Flag = False


class SettingsDoc(ClosedDocument):
    """The `run` section: batch, degrees and schedule of one run.

    `dp` leaves context parallelism out: GPUs = tp * pp * cp * dp. The experts use the same GPUs as
    etp * ep * edp * pp.
    """

    seq_len: Annotated[int, Field(strict=True, ge=1, le=16_777_216)]
    global_batch: Sequences
    micro_batch: Sequences = 1
    gpus: Degree | None = None
    tp: Degree = 1
    pp: Degree = 1
    vpp: Degree = 1
    schedule: ScheduleName | None = None
    """Of the pipeline; by default 1f1b, interleaved where vpp is more than 1."""
    cp: Degree = 1
    dp: Degree | None = None
    ep: Degree = 1
    etp: Degree = 1
    sequence_parallel: Flag = False
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] = 0
    recompute: RecomputeName = "none"
    recompute_modules: Annotated[list[Words], BeforeValidator(_split_words)] = Field(
        default=[], max_length=20
    )
    recompute_layers: Annotated[Layers | None, BeforeValidator(_first_number)] = None
    precision: Precision = "bf16"
    optimizer: Optimizer = "adam"
    muon_tp_mode: MuonMode = "blockwise"
    """How Muon orthogonalises matrices that tensor ranks share, as Megatron's --muon-tp-mode: blockwise, each
    rank its piece; duplicated, every rank the whole, which is gathered; distributed, all ranks together."""
    adapters: AdapterSpec | None = None
    """Low-rank adapters that are trained beside frozen weights: method (lora, or qlora beside weights of 4
    bits, lora-8bit beside those of 8; dora, qdora, dora-8bit with magnitudes), rank, and targets, names of
    matrices. Every parameter is trained where absent."""
    loss: LossName | None = None
    """Head and cross-entropy chunk by chunk: liger (LigerFusedLinearCrossEntropy), fused-head (TRL's trainers
    from 1.15 on, of dpo and kto too) or chunked (TRL's chunked_nll, up to 1.14); the framework's own, on the
    logits of all tokens, where absent or all-logits."""
    kind: StepKindName = PRETRAINING
    """What a step does with a sample: pretrain, sft, dpo, kto, orpo or reward. global_batch and micro_batch
    count pairs of sequences in dpo, orpo and reward."""
    reference: ReferencePlace | None = None
    """Where the reference model of dpo and kto is: resident (by default), offloaded to the host, or
    precomputed, its log-probabilities being in the data. With adapters it is their base."""
    image_tokens: Annotated[int, Field(strict=True, ge=0, le=10_000_000)] = 0
    """Tokens of a sequence that are of images, after patches are merged, for a model whose config.json has an
    image encoder; 0 for text alone. Those of Llama 3.2 are beside its tokens."""
    images_per_sequence: Sequences | None = None
    """Images that share image_tokens evenly; one, or as many as a fixed size makes, where absent."""
    freeze_encoder: Annotated[Flag, BeforeValidator(_yes_or_no)] = False
    """Whether image encoder and projector are left as they are, as they are beside adapters."""
    overlap: OverlapDoc = OverlapDoc()
    framework: Words = DEFAULT_FRAMEWORK
    expert_imbalance: Annotated[float, Field(strict=True, ge=1, le=1e6, allow_inf_nan=False)] = 1.0
    reserve_gib: Annotated[float, Field(strict=True, ge=0, le=10_000, allow_inf_nan=False)] = 0.0
    cuda_graph: Literal["none", "feed_forward", "partial", "full"] | None = None
    cp_comm: Words | None = None
    cp_inner: Degree | None = None
    """Neighbours of a context group that swap heads for tokens under cp_comm: a2a+p2p, the first of
    Megatron's --hierarchical-context-parallel-sizes; by default as many as a plan would take."""
    moe_dispatch: Literal["deduplicated", "alltoall", "allgather", "deepep", "hybridep"] | None = (
        None
    )
    fp8_recipe: Fp8Recipe | None = None
    """How FP8 scales come about, where it is not the software stack's own way."""
    attention_kernel: AttentionKernel | None = None
    """Attention of the run, where it is not the software stack's own: unfused (PyTorch's operators),
    fused-softmax (Megatron), flash-1, flash-2, cudnn-9.0 (cuDNN up to that version), sdpa (PyTorch's own:
    cuDNN on Hopper and Blackwell, else flash-2), flash-3 (also later cuDNN). Rows of sources may say it in
    words, as recipe.attention_kernel, or name a container that has one: NeMo 24.05."""
    first_fp8_kernels: Flag | None = None
    """Whether FP8 matrix products on Blackwell are those of the first containers for it (cuBLAS 12.8), which
    reach a smaller share of the peak; where absent, framework words that name NeMo 25.01 to 25.05 or MLPerf
    Training v5.0 say so."""
    shard_group: Degree | None = None
    """Data-parallel ranks over which optimizer states (ZeRO 3: also weights) are sharded; groups of so many
    replicate each other. HSDP's shard size, InternEvo's zero1 size, dp * cp over Megatron's
    --num-distributed-optimizer-instances. All ranks where absent; rows of sources: recipe.zero1_group."""
    shard_groups: Degree | None = None
    """The same as a number of groups: HSDP's replicate degree, Megatron's
    --num-distributed-optimizer-instances. 1 where absent; at most one of the two is given."""
    optimizer_offload: Annotated[int, Field(strict=True, ge=0, le=100)] = 0
    """Percent of the parameters whose optimizer states lie in the host's memory and are updated by its CPU:
    100 times Megatron's --optimizer-offload-fraction under --optimizer-cpu-offload, 100 under DeepSpeed's
    offload_optimizer and PyTorch FSDP2's CPU offload."""
    parameter_offload: Flag = False
    """Whether the 16-bit shards of ZeRO 3 lie in the host's memory, and are copied up for every forward and
    backward pass: DeepSpeed's offload_param with device cpu."""
    optimizer_on_drives: Flag = False
    """Whether the offloaded optimizer's states lie on the node's drives: DeepSpeed's offload_optimizer with
    device nvme, under ZeRO 3. The cluster's nvme_gb_per_s is their rate."""
    parameters_on_drives: Flag = False
    """Whether shards of parameter_offload lie there: offload_param with device nvme."""
    offload_modules: Annotated[list[Words], BeforeValidator(_split_words)] = Field(
        default=[], max_length=20
    )
    """Modules whose saved tensors lie in the host's memory until the backward pass: any of core_attn,
    attn_proj (with core_attn), expert_fc1 and moe_act, as in Megatron's --offload-modules. Or inputs of fully
    recomputed layers: layer_inputs by a switch of accelerate or DeepSpeed, saved_tensors by the hooks of TRL,
    torchtune and Axolotl."""
    sync_each_batch: Flag = False
    """Whether gradients of each micro-batch are reduced by themselves, so that shards of them are added up,
    where accelerate with FSDP2 keeps whole ones until the last: sync_each_batch of its
    GradientAccumulationPlugin, and of a Trainer's accelerator_config. torchtune does so by itself."""
    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which gradients are kept and reduced; the software stack's where absent. That they are not
    reduced beside the backward pass is overlap.dp: false."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the optimizer's moments."""
    fp8_params: Flag | None = None
    """Whether parameters are kept and gathered at the run's narrow precision, without a 16-bit copy
    (Megatron's --fp8-param-gather); the software stack's where absent."""
    fp8_attention: Flag | None = None
    """Whether the products of attention run in FP8 too, as under --allow fp8-attention (Megatron's
    fp8_dot_product_attention); they do not where absent. Rows of sources: recipe.fp8_attention."""
    fused_loss: Flag | None = None
    """Whether cross entropy is Transformer Engine's one kernel over 16-bit logits; the software stack's where
    absent."""
    stepwise_loss: Flag | None = None
    """Whether a cross entropy that is not one kernel is one for each of its steps, as under Megatron without
    --cross-entropy-loss-fusion; the software stack's where absent."""
    stepwise_rotary: Flag | None = None
    """Whether rotary embeddings are one operator of PyTorch after the other, as under Megatron's
    --no-rope-fusion and in recipes without apply_rope_fusion; the software stack's where absent."""
    stepwise_activation: Flag | None = None
    """The same of the activation function of a gated feed-forward, as under Megatron's
    --no-bias-swiglu-fusion and in recipes without bias_activation_fusion."""
    fill_exposed: Flag | None = None
    """Whether transfers of virtual stages are waited for in fill and drain, as under Megatron without
    --overlap-p2p-communication-warmup-flush; the software stack's where absent."""
    keeps_gathered_inputs: Flag = False
    """Whether sequence parallelism keeps the gathered inputs of column-parallel products; rows of sources:
    recipe.tp_recompute_allgather: false (nanotron)."""
    bucket_parameters: Annotated[int, Field(strict=True, ge=1, le=10**12)] | None = None
    """Parameters whose gradients are reduced together (Megatron's --ddp-bucket-size, DeepSpeed's
    reduce_bucket_size); the software stack's own number where absent."""
    flushes: Degree = 1
    """Times that the pipeline fills and drains in a step, for instance once a local batch."""
    launch_blocking: Annotated[Flag, BeforeValidator(_said)] = False
    checked_collectives: Flag | None = None
    """Whether ranks compare each collective through Gloo before they start it
    (TORCH_DISTRIBUTED_DEBUG=DETAIL); absent: as the framework's own launcher sets it for such a run."""
    stages: list[list[Layers]] | None = Field(default=None, max_length=4096)
    """Transformer layers of each [pipeline rank][virtual stage]."""
    rank_order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = "tp-cp-dp-pp"
    """How ranks run through the axes, innermost first."""
    hosts: list[Words] | None = Field(default=None, max_length=MOST_HOSTS)
    """Names of the cluster's nodes in the order of their ranks; ranks are nested in its blocks without."""
    layer_split: Words | None = None
    pp_layout: WordsOrLayers = None
    moe_routing: Words | None = None
    recipe: dict[str, Any] = Field(default={}, max_length=200)

    activation_offload: Descriptive = None
    container: Descriptive = None
    era: Descriptive = None
    mixed_precision: Descriptive = None
    note: Descriptive = None
    recompute_method: Descriptive = None


class MeasuredDoc(BaseModel):
    """What was measured: a step (`step_time_s`, or `tokens_per_s_per_gpu` to derive it from), memory, or
    both; or that the run ended out of memory.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    step_time_s: Positive | None = None
    tokens_per_s_per_gpu: Positive | None = None
    memory_gib: Positive | None = None
    memory_note: Words | None = None
    out_of_memory: Flag = Field(
        default=False, description="The run did not fit into HBM: there is no step and no peak."
    )


class RunDoc(ClosedDocument):
    """One run. `model` and `cluster` are written out, or name a catalog entry or a file."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    id: Annotated[str, Field(min_length=1, max_length=300)] | None = None
    source: Words = ""
    model: NameOrMapping
    cluster: NameOrMapping
    run: SettingsDoc
    measured: MeasuredDoc | None = None
    suspect: Words | None = None
    tags: list[Words] = Field(default=[], max_length=100)
    tflops_convention: Descriptive = None
    note: Descriptive = None
