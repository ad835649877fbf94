"""What is trained on what: everything that a layout does not choose."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.calibration import Calibration, Factors
from meshwright.costmodel.execution_names import (
    PRETRAINING,
    STEP_KINDS,
    ContextExchange,
    Dispatcher,
    GraphScope,
    MuonMode,
    OffloadedModules,
    ParameterOffload,
    StateType,
    StepKind,
)
from meshwright.costmodel.layout import Floats, Ints, Layout, Placement
from meshwright.costmodel.lengths import PackedLengths
from meshwright.frameworks.catalog import (
    DEFAULT_FRAMEWORK,
    as_compiled,
    framework_of_stack,
    stack_named,
)
from meshwright.model_specs.adapters import AdapterSpec, frozen_parameters, with_layers_ahead
from meshwright.model_specs.parameters import flops_per_token
from meshwright.model_specs.schema import ModelSpec

AttentionKernel = Literal[
    "unfused",
    "fused-softmax",
    "memory-efficient",
    "flash-1",
    "flash-2",
    "cudnn-9.0",
    "sdpa",
    "flash-3",
]
"""PyTorch's operators one by one; Megatron's fused softmax between two matrix products; PyTorch's
memory-efficient kernel; FlashAttention 1 and 2; cuDNN up to 9.0, as containers of early 2024 have it; what
PyTorch's own attention takes; FlashAttention 3, which also stands for later kernels of cuDNN."""


Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "rowwise", "rowwise_with_gw_hp"]
"""Scales from the steps before, from each tensor itself, from each of its blocks of 128 elements, or from
each row; by row with weight gradients at 16 bits. The names are those of Transformer Engine and torchao."""


WIDEST_FLASH_HEAD = 256
"""Elements of the widest head that FlashAttention and cuDNN take (Dao-AILab/flash-attention issue 2427;
torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
MEMORY_EFFICIENT: AttentionKernel = "memory-efficient"


def has_wide_heads(model: ModelSpec) -> bool:
    """Whether some layers have heads that neither FlashAttention nor cuDNN takes.

    Parameters
    ----------
    model : ModelSpec
        Latent attention has kernels of its own.

    Returns
    -------
    bool
        Of transformers, which runs every layer by one implementation, all layers need another kernel then
        (transformers 5.23, models/gemma4/modeling_gemma4.py, Gemma4TextAttention.forward).
    """
    return model.attention is None and model.qk_head_dim > WIDEST_FLASH_HEAD


_TYPE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How software runs a layout: what an `Execution` chooses and a `Workload` is priced with."""

    moe_dispatch: Dispatcher = "alltoall"
    """NCCL's all-to-all (a copy of a token for each expert), its all-gather (every token to every rank of the
    expert group), or one copy per destination: DeepEP, HybridEP."""
    ep_overlap: bool = False
    """The expert all-to-all of one micro-batch runs under another's compute."""
    tp_overlap: bool = False
    """GEMMs run beside their tensor-parallel transfers."""
    dp_overlap: bool = False
    """Gradients are reduced under the last backward passes."""
    pp_overlap: bool = False
    """Interleaved stages send under compute."""
    cuda_graph: GraphScope = "none"
    """What CUDA graphs launch: nothing, the feed-forward part, attention and router, the whole step."""
    cp_comm: ContextExchange = "p2p"
    """Context parallelism passes keys and values around a ring (p2p), or swaps heads for tokens (a2a), or
    does both in groups (a2a+p2p), or gathers them all before attention (all_gather; not planned)."""
    cp_inner: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Ranks that swap heads for tokens in a2a+p2p; None for as many as follow from the layout."""
    compiled: bool = False
    """Layers run under torch.compile, where the framework leaves that open."""
    gradient_dtype: StateType | None = None
    """Type in which gradients are added up and reduced; None where the framework leaves no choice."""
    moment_dtype: StateType = "fp32"
    """Type of the optimizer's moments."""
    fp8_params: bool | None = None
    """Parameters are kept and gathered at the narrow precision, without a 16-bit copy; None for what the
    software stack does."""
    fp8_attention: bool = False
    """The matrix products of attention run in FP8 beside those of the layers."""
    fp8_recipe: Fp8Recipe | None = None
    """How FP8 scales come about; None in other precisions, and where the framework leaves no choice."""
    te_loss: bool | None = None
    """Cross entropy is one kernel over 16-bit logits, Transformer Engine's or compiled; None for the
    framework's own."""
    offload_modules: OffloadedModules = "none"
    """Modules of each layer whose saved tensors are copied to the host's memory and back."""
    parameter_offload: ParameterOffload = "none"
    """Where the 16-bit shards of ZeRO 3 lie (DeepSpeed's `offload_param`)."""
    sync_each_batch: bool = False
    """Gradients of each micro-batch are reduced by themselves, where the framework would else add up whole
    ones until the last (accelerate's `sync_each_batch`)."""
    bucket_mb: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Gradients that are reduced together, MB of 10^6 bytes; None for the framework's own size."""

    @property
    def gradient_bytes(self) -> int | None:
        """Bytes of a gradient element when it is reduced, 2 or 4; None for what the stack reduces."""
        return None if self.gradient_dtype is None else _TYPE_BYTES[self.gradient_dtype]

    @property
    def moment_bytes(self) -> int:
        """Bytes of a moment of the optimizer, 2 or 4."""
        return _TYPE_BYTES[self.moment_dtype]


@dataclass(frozen=True, kw_only=True)
class Workload(RunSettings):
    """A model, a cluster and a batch, and how the software runs them."""

    model: ModelSpec
    """Without a head of its own where the kind of step has none over the vocabulary."""
    cluster: ClusterSpec
    gpus: int
    """GPUs in use, 1 to the cluster's size."""
    global_batch: int
    """Samples per step, at least 1: sequences, or pairs of them where `kind` has pairs."""
    seq_len: int
    """Tokens per sequence, at least 1."""
    precision: str = "bf16"
    """bf16, fp16, fp8, mxfp8 or nvfp4."""
    optimizer: str = "adam"
    """A name of `optimizers.OPTIMIZER_TRAITS`."""
    muon_tp_mode: MuonMode = "blockwise"
    """Muon's matrices that tensor ranks share: each rank orthogonalises its piece, or all of them the whole
    matrix, or they share its products."""
    framework: str = DEFAULT_FRAMEWORK
    """Name of a software stack: one of `meshwright.frameworks.catalog.STACK_NAMES`."""
    compiled: bool = field(init=False, default=False)
    """Whether the stack is the compiled one of two."""
    moe_dispatch: Dispatcher = "deduplicated"
    other_dispatchers: tuple[Dispatcher, ...] = ()
    """Beside `moe_dispatch`, those of the same price that a layout may have in its place
    (`buffers.dispatchers_of`)."""
    launch_blocking: bool = False
    """CUDA_LAUNCH_BLOCKING=1: every kernel waits for the one before."""
    checked_collectives: bool = False
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks compare each collective through Gloo before they start it."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert-parallel rank over the mean, at least 1."""
    expert_imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    """That load for single expert-parallel degrees, where it was measured: (ep, load over mean)."""
    expert_copies_by_ep: tuple[tuple[int, int, float], ...] = ()
    """Where a token's experts lie, measured: (ep, equal blocks of the expert group, of them touched)."""
    reserve_gib: float = 0.0
    """HBM that the plan must leave free on every GPU, GiB, at least 0."""
    memory_margin: float = 1.0
    """Measured over predicted peak that the plan must have room for, at least 1."""
    inside_domain: tuple[str, ...] = ()
    """Axes whose groups must each lie in one scale-up domain: any of tp, cp, ep."""
    max_cut_use: float = 1.0
    """Share of the capacity of every cut of the fabric that may be used in a phase; 1 limits nothing."""
    attention_kernel: AttentionKernel | None = None
    """Of the run; None for the one that the software stack has."""
    first_fp8_kernels: bool = False
    """Whether FP8 matrix products on Blackwell are those of the first containers for it (cuBLAS 12.8)."""
    stepwise_loss: bool | None = None
    """Whether a cross entropy that is not one kernel is one for each of its steps; None as the stack does."""
    z_loss: bool = False
    """Whether the loss also has squared logarithms of sums of exponentials: nothing more in one kernel."""
    fill_exposed: bool | None = None
    """Whether transfers of virtual stages are exposed in fill and drain; None as the stack does."""
    fused_norm: bool | None = None
    """Whether each norm is one kernel; None for what the stack does."""
    stepwise_rotary: bool | None = None
    """Whether rotary embeddings are one operator after the other; None for what the stack does."""
    stepwise_activation: bool | None = None
    """The same of the activation function of a gated feed-forward."""
    permutes_in_dispatch: bool = False
    """Whether HybridEP's transfers put tokens into the experts' order and back, without kernels for it."""
    checks_gradients: bool = False
    """Whether the host looks at each weight's gradient before it is reduced (`check_for_nan_in_grad`)."""
    keeps_gathered_inputs: bool = False
    """Whether sequence parallelism keeps the gathered inputs of column-parallel products for the backward
    pass, instead of gathering them again."""
    optimizer_on_drives: bool = False
    """Whether an offloaded optimizer's states lie on the node's drives (DeepSpeed, device nvme)."""
    chooses_buckets: bool = False
    """Whether a layout may have buckets of another size where that saves enough
    (`data_parallel.size_range`)."""
    flushes: int = 1
    """Times that the pipeline fills and drains in a step, at least 1."""
    calibration: Calibration | None = None
    """What the user's own runs say of the constants; None for the shipped ones."""
    adapters: AdapterSpec | None = None
    """What is trained beside frozen weights; None where every parameter is trained."""
    autocast: bool = False
    """Whether autocast narrows weights of 32 bits at each use, which FSDP and DeepSpeed cast ahead."""
    lengths: PackedLengths | None = None
    """Samples in each sequence of `seq_len` tokens, which is a pack then; None where a sequence is one."""
    loss: str | None = None
    """How the head and its cross-entropy run, of `losses.CHUNKED_LOSSES`; None for what the stack does."""
    kind: str = PRETRAINING
    """What a step does with a sample: one of `execution_names.KIND_NAMES`."""
    reference: str | None = None
    """Where a separate reference model is, one of `execution_names.REFERENCE_PLACES`; None where there is
    none, or where the frozen base beside adapters is the reference."""

    def __post_init__(self) -> None:
        has_both = bool(framework_of_stack(self.framework).eager_stack)
        object.__setattr__(self, "compiled", has_both and stack_named(self.framework).compiled)
        if not (self.step_kind.has_vocabulary_head or self.model.tied_embeddings):
            # One output stands in place of the head: parameters are those of a model without one.
            without_head = self.model.model_copy(update={"tied_embeddings": True})
            object.__setattr__(self, "model", without_head)
        if self.adapters is not None:
            object.__setattr__(self, "model", with_layers_ahead(self.model, self.adapters))

    def of_kind(self, model: ModelSpec) -> Workload:
        """The run with a model whose layers are all of one kind, by the kernel that all of them have.

        Parameters
        ----------
        model : ModelSpec
            `ModelSpec.in_full` or `ModelSpec.in_windows` of the workload's own.

        Returns
        -------
        Workload
            Itself where that is its model already.
        """
        if model is self.model:
            return self
        kernel = self.attention_kernel
        if has_wide_heads(self.model) and not has_wide_heads(model):
            kernel = kernel or MEMORY_EFFICIENT
        return replace(self, model=model, attention_kernel=kernel)

    @cached_property
    def factors(self) -> Factors | None:
        """Factors of the calibration that hold for this device and framework; None without one."""
        if self.calibration is None:
            return None
        return self.calibration.factors_on(self.cluster.device.name, self.framework)

    @cached_property
    def trained_shares(self) -> tuple[float, float]:
        """Trained parameters for each of the model's dense ones, and for each of its routed experts' ones."""
        if self.adapters is None:
            return 1.0, 1.0
        return frozen_parameters(self.model, self.adapters).trained

    @cached_property
    def frozen_weight_bytes(self) -> tuple[float, float]:
        """Bytes of a frozen dense parameter, and of a frozen one of routed experts; 2 without adapters."""
        if self.adapters is None:
            return 2.0, 2.0
        return frozen_parameters(self.model, self.adapters).weight_bytes

    @property
    def activates_stepwise(self) -> bool:
        """Whether the activation function of a feed-forward is one operator after the other."""
        return bool(self.stepwise_activation) and self.model.gated

    @property
    def step_kind(self) -> StepKind:
        """The passes of a step."""
        return STEP_KINDS[self.kind]

    @property
    def reference_passes(self) -> int:
        """Forward passes of the reference for each sequence; 0 where its log-probabilities are data."""
        return 0 if self.reference == "precomputed" else self.step_kind.reference_passes

    @property
    def scoring_passes(self) -> int:
        """Forward passes without gradients for each sequence, of the reference and of the model itself."""
        return self.step_kind.own_passes + self.reference_passes

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference model of its own runs in a step, from HBM or from the host."""
        return self.reference_passes > 0 and self.adapters is None

    @property
    def offload_parameters(self) -> bool:
        """Whether 16-bit shards lie in the host's memory, or on its drives."""
        return self.parameter_offload != "none"

    @property
    def parameters_on_drives(self) -> bool:
        """Whether they lie on the node's drives."""
        return self.parameter_offload == "nvme"

    @property
    def nodes(self) -> float:
        """How many nodes the GPUs fill."""
        return self.gpus / self.cluster.gpus_per_node

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step that are trained on, without the padding of packs."""
        tokens = self.global_batch * self.step_kind.sequences * self.seq_len
        return tokens if self.lengths is None else tokens * self.lengths.fill

    @property
    def model_flops_per_token(self) -> float:
        """Model FLOP of a token that is trained on, with those of passes that score."""
        length: float = self.seq_len
        if self.lengths is not None:
            length = self.lengths.mean_length(self.seq_len)
        return flops_per_token(
            self.model,
            length,
            frozen_weights=self.adapters is not None,
            forward_passes=self.scoring_passes,
            has_head=self.step_kind.has_vocabulary_head,
        )

    def on(self, gpus: int) -> Workload:
        """The same training on another number of GPUs of the cluster.

        Parameters
        ----------
        gpus : int
            1 to the cluster's size.

        Returns
        -------
        Workload
            Itself where it has as many GPUs already.
        """
        return self if gpus == self.gpus else replace(self, gpus=gpus)

    def imbalance(self, ep: ArrayLike) -> NDArray[np.float64]:
        """Load of the busiest rank of an expert group over the mean.

        Parameters
        ----------
        ep : int or array of int
            Expert-parallel degrees, at least 1.

        Returns
        -------
        array of float
            Shaped like `ep`, at least 1.
        """
        factor = np.full(np.shape(ep), self.expert_imbalance)
        for degree, measured in self.expert_imbalance_by_ep:
            factor = np.where(np.asarray(ep) == degree, measured, factor)
        return np.asarray(factor)

    def copies(
        self, ep: ArrayLike, blocks: NDArray[np.float64], even: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Blocks of an expert group that hold at least one of a token's experts.

        Straight lines between the numbers of blocks that were measured: groups do not always split evenly.

        Parameters
        ----------
        ep : int or array of int, shape [...]
            Expert-parallel degrees, at least 1.
        blocks : array of float, shape [..., levels]
            Equal blocks that the group lies in, at least 1.
        even : array of float, shape [..., levels]
            The answer for degrees that were not measured, at least 1.

        Returns
        -------
        array of float, shape [..., levels]
            Blocks, at least 0.
        """
        degrees = np.asarray(ep)[..., None]
        for degree in {entry[0] for entry in self.expert_copies_by_ep}:
            points = sorted(entry[1:] for entry in self.expert_copies_by_ep if entry[0] == degree)
            measured = np.interp(blocks, *np.array(points).T)
            even = np.where(degrees == degree, measured, even)
        return np.asarray(even)


def sequences_in_micro_batch(workload: Workload, layout: Layout) -> Ints:
    """Sequences of a micro-batch: its samples, or twice as many in pairs.

    Parameters
    ----------
    workload : Workload
        Its kind is used.
    layout : Layout
        One layout, or many of shape [n]; micro_batch is used.

    Returns
    -------
    int or array of int
        At least 1, shaped like the layout.
    """
    return np.asarray(layout.micro_batch) * workload.step_kind.sequences


def rank_tokens(workload: Workload, layout: Layout) -> Floats:
    """Tokens of one micro-batch on one rank: T = b s / cp, with b sequences of s tokens, or 2 b in pairs.

    The T of docs/cost_model.md, "One layer".

    Parameters
    ----------
    workload : Workload
        Its sequence length and its kind are used.
    layout : Layout
        One layout, or many of shape [n]; micro_batch and cp are used.

    Returns
    -------
    float or array
        Tokens, above 0, shaped like the layout.
    """
    tokens = sequences_in_micro_batch(workload, layout) * workload.seq_len
    per_rank: Floats = tokens / layout.cp
    return per_rank


def sequence_shards(layout: Layout) -> Floats:
    """Ways in which tensor parallelism splits what lies between its matrix products.

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        tp with sequence parallelism, else 1.
    """
    shards: Floats = np.where(layout.sequence_parallel, layout.tp, 1)
    return shards


# Hierarchical context parallelism: small groups swap heads for tokens, rings join these groups.


HIERARCHICAL = "a2a+p2p"
"""Groups of A neighbours swap heads for tokens, and rings join these groups (`swapping_ranks`)."""
GATHERED = "all_gather"
"""Keys and values of the whole group are gathered before attention, their gradients scattered after it."""
IntArray = NDArray[np.int64]


def swapping_ranks(workload: Workload, layout: Layout) -> IntArray:
    """A: ranks of a context group that swap heads for tokens among themselves, in `a2a+p2p`.

    Of a context group of C ranks every A neighbours swap heads for tokens (all-to-all, DeepSpeed Ulysses,
    arXiv 2309.14509) and pass keys and values round rings of C / A ranks, each A apart (USP, arXiv
    2405.07719, section 3; Megatron's `--cp-comm-type a2a+p2p`, whose groups `create_hierarchical_groups` of
    megatron/core/parallel_state.py makes; Transformer Engine 2.15, AttnFuncWithCPAndKVP2P, cp_size_a2a).

    Parameters
    ----------
    workload : Workload
        Its `cp_inner` where that is given; else `largest_swap` says.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of int
        At least 1, shaped like the layouts' tp and cp.
    """
    if workload.cp_inner is not None:
        return np.asarray(np.minimum(workload.cp_inner, layout.cp), dtype=np.int64)
    return largest_swap(workload, layout.tp, layout.cp)


def swaps_heads(workload: Workload, layout: Layout) -> NDArray[np.bool_]:
    """Whether context parallelism swaps heads for tokens at all.

    Parameters
    ----------
    workload : Workload
        Its `cp_comm`.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    array of bool
        Shaped like the layouts' cp, or tp and cp.
    """
    if workload.cp_comm == HIERARCHICAL:
        return swapping_ranks(workload, layout) > 1
    return (np.asarray(layout.cp) > 1) & (workload.cp_comm == "a2a")


def one_ring(workload: Workload) -> bool:
    """Whether all that a context group sends goes round one ring of all its ranks.

    Parameters
    ----------
    workload : Workload
        Its `cp_comm`.

    Returns
    -------
    bool
        True of p2p, and of all_gather: NCCL gathers round rings.
    """
    return workload.cp_comm in ("p2p", GATHERED)


def largest_swap(workload: Workload, tp: Ints, cp: Ints) -> IntArray:
    """The A that a plan takes: the largest power of two below cp that leaves rings between whole groups.

    A divides cp, and the heads and key-value heads of a tensor rank (Transformer Engine splits each of Q, K
    and V so: flash_attn_a2a_communicate); its tp A GPUs fit into a scale-up domain, or a node.

    Parameters
    ----------
    workload : Workload
        Model and cluster.
    tp, cp : int or array of int
        Degrees, at least 1.

    Returns
    -------
    array of int
        1 where there is none.
    """
    model, cluster = workload.model, workload.cluster
    tp, cp = np.asarray(tp), np.asarray(cp)
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    largest = np.ones(np.broadcast_shapes(tp.shape, cp.shape), dtype=np.int64)
    size = 2
    while size <= min(domain, int(np.max(cp, initial=1)) - 1):
        ranks = tp * size
        fits = (cp > size) & (cp % size == 0) & (ranks <= domain)
        fits &= (model.heads % ranks == 0) & (model.kv_heads % ranks == 0)
        largest = np.where(fits, size, largest)
        size *= 2
    return largest


def inside_and_between(members: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """Members of `a2a+p2p`'s two kinds of groups inside a block of each level.

    Parameters
    ----------
    members : array of int, shape [..., levels]
        Members of the context group inside one block of each level, inside out.
    size : array of int, shape [...]
        A, ranks that swap heads for tokens, at least 1 (`swapping_ranks`).

    Returns
    -------
    tuple of two arrays of int, shape [..., levels]
        At least 1: of the A neighbours, and of the ring through every A-th rank.
    """
    swapping = np.asarray(size)[..., None]
    return np.minimum(members, swapping), np.maximum(members // swapping, 1)


# How software runs a layout: the settings of a launch file that change the price and not the arithmetic.


@dataclass(frozen=True, kw_only=True)
class Execution(RunSettings):
    """Every execution setting of a plan, once."""

    fp8_params: bool = False

    def applied(self, workload: Workload) -> Workload:
        """The workload run so.

        Parameters
        ----------
        workload : Workload
            Its own execution settings are replaced.

        Returns
        -------
        Workload
            With these settings.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS if name != "compiled"}
        framework = as_compiled(workload.framework, compiled=self.compiled)
        return replace(workload, framework=framework, **settings)

    @classmethod
    def within(cls, workload: Workload) -> Self:
        """The settings that a workload holds: what `applied` puts there.

        Parameters
        ----------
        workload : Workload
            Its execution settings are read.

        Returns
        -------
        Execution
            So that `applied` to the workload changes no price.
        """
        settings = {name: getattr(workload, name) for name in _SETTINGS}
        grouped = workload.cp_comm == HIERARCHICAL
        settings["cp_inner"] = workload.cp_inner if grouped else None
        settings["fp8_params"] = bool(workload.fp8_params)
        return cls(**settings)

    def of_layout(self, layout: Layout) -> Execution:
        """What a launch file of one layout sets: nothing is overlapped that is not sent.

        Parameters
        ----------
        layout : Layout
            Of plain numbers.

        Returns
        -------
        Execution
            With the same price.
        """
        replicas = int(layout.dp) * int(layout.cp)
        sends_gradients = replicas > 1 or int(layout.edp) > 1
        accumulates = replicas > 1 and int(layout.num_micro_batches) > 1
        return replace(
            self,
            tp_overlap=self.tp_overlap and bool(layout.sequence_parallel),
            dp_overlap=self.dp_overlap and sends_gradients,
            pp_overlap=self.pp_overlap and int(layout.vpp) > 1,
            bucket_mb=self.bucket_mb if sends_gradients else None,
            sync_each_batch=self.sync_each_batch and accumulates,
        )


_SETTINGS = tuple(each.name for each in fields(RunSettings))


def with_needed_syncs(workload: Workload, layout: Layout) -> Workload:
    """A workload whose `sync_each_batch` is on only where that changes something.

    Parameters
    ----------
    workload : Workload
        Any.
    layout : Layout
        Of plain numbers.

    Returns
    -------
    Workload
        With the same price of the layout: one micro-batch, or one replica, is reduced once anyway.
    """
    if not workload.sync_each_batch:
        return workload
    needed = Execution.within(workload).of_layout(layout).sync_each_batch
    return replace(workload, sync_each_batch=needed)


# What the dispatchers of tokens differ in, and the all-gather of one of them.


GATHERS = "allgather"
"""The dispatcher that gathers all tokens of a group on each of its ranks (`pass_bytes`)."""
TOKEN_BYTES, SUM_BYTES = 2.0, 4.0
"""Of an element of a gathered token, and of a sum that is scattered; backward their gradients, each in the
other direction."""
PROBABILITY_BYTES, CHOICE_BYTES = 4.0, 1.0
"""Of the routing of a token to an expert: both forward, the gradient of the first backward."""


def deduplicates(workload: Workload) -> bool:
    """Whether a token travels once to each rank that holds some of its experts.

    Parameters
    ----------
    workload : Workload
        Its `moe_dispatch`.

    Returns
    -------
    bool
        False of alltoall, which sends a copy for each expert, and of allgather.
    """
    return workload.moe_dispatch not in ("alltoall", GATHERS)


def sends_routing(workload: Workload) -> bool:
    """Whether tokens take the probabilities of experts with them, as HybridEP's do.

    DeepEP sends a token's k choices alone. Where it runs the two share a price, which is its own.

    Parameters
    ----------
    workload : Workload
        Its dispatcher, framework and device.

    Returns
    -------
    bool
        True where tokens go once to a rank and HybridEP alone sends them so: on Blackwell superchips.
    """
    if not deduplicates(workload) or workload.moe_dispatch == "deepep":
        return False
    device, records = workload.cluster.device, framework_of_stack(workload.framework).dispatchers
    able = [
        name
        for name in ("deepep", "hybridep")
        if name in records and records[name].runs_on(device.architecture, device.name)
    ]
    return able == ["hybridep"]


def sent_routing_bytes(workload: Workload, layout: Layout) -> tuple[Floats, Floats]:
    """What HybridEP sends of the routing beside tokens; nothing with other dispatchers.

    A token goes forward to the experts, and its gradient back from them, with a 32-bit probability for every
    expert of the group's ranks in a domain; and all ranks gather a byte a token and expert, whether it goes
    there, ahead of the pass forward (DeepEP, branch hybrid-ep at 94a9f8f, in csrc/hybrid_ep: FORWARD_DISPATCH
    and BACKWARD_COMBINE of backend/hybrid_ep_backend.cuh, allgather_routing_map of executor/executor.cu).

    Parameters
    ----------
    workload : Workload
        Of a model with experts.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    tuple of two floats or arrays
        Bytes beside each copy of a token, of the mean of two transfers, one with and one without; bytes of a
        token that are gathered once a pass forward.
    """
    moe = workload.model.moe
    if moe is None or not sends_routing(workload):
        return 0.0, 0.0
    ranks = gathered_ranks(layout)
    of_rank = moe.experts / np.asarray(layout.ep)
    in_domain = np.minimum(ranks, max(workload.cluster.nvlink_domain, 1))
    return 0.5 * PROBABILITY_BYTES * of_rank * in_domain, CHOICE_BYTES * of_rank * ranks


def activates_in_products(workload: Workload) -> bool:
    """Whether grouped products of experts apply the activation function and cast what it returns.

    A CUDA graph of the whole step holds experts by the fused grouped MLP of Transformer Engine alone: a
    product with activation and cast, then a plain one; backward a product with the gradients of both, and
    three more (Transformer Engine 2.15, pytorch/ops/fused/forward_grouped_mlp.py, backward_grouped_mlp.py;
    Megatron-Bridge 0.5.0, scripts/performance/configs: cutedsl_fused_grouped_mlp wherever a recipe with
    experts has full_iteration, and nowhere else). It is written for MXFP8.

    Parameters
    ----------
    workload : Workload
        Its model, precision and CUDA graph are used.

    Returns
    -------
    bool
    """
    return (
        workload.model.moe is not None
        and workload.cuda_graph == "full"
        and workload.precision == "mxfp8"
    )


def gathered_ranks(layout: Layout) -> Floats:
    """Ranks of a group, etp ep, whose tokens each of them gathers; `pass_bytes` has the source.

    Parameters
    ----------
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        At least 1, shaped like the layout.
    """
    ranks: Floats = np.asarray(layout.expert_group, dtype=np.float64)
    return ranks


def gathering_members(placement: Placement) -> NDArray[np.int64]:
    """Members of a group of `gathered_ranks` inside a block of each level: expert-tensor groups nest in it.

    Parameters
    ----------
    placement : Placement
        Arrays of shape [..., levels].

    Returns
    -------
    array of int, shape [..., levels]
        At least 1.
    """
    return np.asarray(placement.ep * placement.etp)


def pass_bytes(workload: Workload) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes a token of each ring pass of a layer under the all-gather dispatcher, forward and backward.

    Megatron's `--moe-token-dispatcher-type allgather` gathers the tokens of all etp ep ranks of a group on
    each of them, which keeps those of its own experts, and scatters the sums of what the experts return
    (megatron-core 0.19, megatron/core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher). The
    routing goes with them: a byte and a probability for each expert. What is summed has the type of the
    probabilities, 32 bits with `--moe-router-dtype fp32`, as in every launch file.

    Parameters
    ----------
    workload : Workload
        Of a model with experts.

    Returns
    -------
    tuple of two tuples of float
        Bytes, above 0: of tokens, sums, probabilities and choices forward, of the first three backward.
    """
    moe, width = workload.model.moe, workload.model.routed_width
    assert moe is not None
    both = (TOKEN_BYTES * width, SUM_BYTES * width, PROBABILITY_BYTES * moe.experts)
    return (*both, CHOICE_BYTES * moe.experts), both
