"""Constants of software stacks, and what a run itself says of its kernels and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Ints
from meshwright.costmodel.records import Overrides, data_table, layered_values, names_in
from meshwright.costmodel.workload import (
    MEMORY_EFFICIENT,
    AttentionKernel,
    Workload,
    has_wide_heads,
)

OF_PYTORCH = 2.9
"""Generation of what PyTorch's own attention takes."""
_OF_EARLIER_PYTORCH = 2.1
"""What it took before it preferred cuDNN."""
_OF_TRAINERS = 2.8
"""What launch files of trainers ask for: as PyTorch's own, but FlashAttention-2 where that is in Triton."""
OF_WIDE_HEADS = 0.5
"""In the place of a generation: PyTorch's memory-efficient kernel."""
OF_FIRST_KERNELS = 0.9
"""In the place of a generation: flash-attn 1, whose kernels are slower than those in Triton."""
_FLASH_GENERATIONS = {
    MEMORY_EFFICIENT: OF_WIDE_HEADS,
    "flash-1": OF_FIRST_KERNELS,
    "flash-2": 2,
    "cudnn-9.0": 2.5,
    "sdpa": OF_PYTORCH,
    "flash-3": 3,
}
_PREFERS_CUDNN = ("hopper", "blackwell")
"""Where PyTorch's attention is cuDNN's: compute capabilities 9 and 10, from cuDNN 9.15.1 on (torch 2.13,
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention)."""
UP_TO_FLASH_2 = ("volta", "ampere", "ada")
"""Where no kernel after FlashAttention-2 runs: FlashAttention-3 is of compute capability 9.0 alone, below
which Transformer Engine takes FlashAttention-2 before cuDNN
(transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_attention_backend)."""
_ATTENTION_IN_TRITON = ("cdna3", "cdna4")
"""Where PyTorch's attention is AOTriton, kernels in Triton (torch 2.13, aten/src/ATen/Context.cpp,
getROCmFAPreferredBackend: AOTriton where nobody asks for another)."""
WITHOUT_FLASH = ("volta",)
"""Where neither FlashAttention nor cuDNN's fused attention runs, which ask for compute capability 8.0
(Transformer Engine 2.15, the same function: "for compute capability < sm80"). Transformer Engine then leaves
attention unfused; PyTorch takes its memory-efficient kernel, which runs from 5.0 on (torch 2.13,
sdp_utils.cpp, check_flash_attention_hardware_support and check_mem_efficient_hardware_support)."""
_WRITTEN_ONCE_BYTES = 2.0
"""A weight gradient that is written and not added to; a kernel that adds reads and writes each element."""


@dataclass(frozen=True, kw_only=True)
class FrameworkConstants:
    """What one software stack adds; see `frameworks.yaml`."""

    flash_attention: bool
    """Fused attention; without it every score is written to HBM."""
    fused_softmax: bool
    """Whether an attention that is not fused at least has scale, mask and softmax in one kernel."""
    flash_generation: float
    """1: FlashAttention in Triton; 2: FlashAttention-2 or PyTorch's own kernel; 2.5: cuDNN up to 9.0; 3:
    FlashAttention-3 or a later cuDNN; `OF_WIDE_HEADS` and `OF_FIRST_KERNELS` as they say. A device has its
    own, `generation_on`."""
    operator_launch_s: float
    """Host time of one operator of PyTorch between modules that launch their kernels themselves."""
    launch_layer_s: float
    """Host time to launch the forward pass of one dense layer (the backward pass costs twice that)."""
    launch_moe_layer_s: float
    """Host time to launch the forward pass of one layer with experts."""
    piece_launch_s: float
    """Host time of one piece of a GEMM beside its transfer, or of one step of ring attention."""
    collective_launch_s: float
    """Host time of one tensor-parallel collective and what is done around it, where `launch_layer_s` is of a
    layer without."""
    loops_over_experts: bool
    """Whether experts run one after the other, each on a gather of its own tokens, in place of one grouped
    product."""
    adds_biases_by_expert: bool
    """Whether biases behind experts are added to one expert's tokens after the other's."""
    moe_sync_s: float
    """Wait of an expert layer and micro-batch for token counts; none where a graph holds the attention."""
    serial_launch_s: float
    """Launch gaps that even a busy GPU does not hide, per layer and pass."""
    recompute_fraction: float
    """Part of a layer's forward pass that full recomputation runs again."""
    combines_again: bool
    """Whether it sends the outputs of experts back to their tokens again."""
    dp_interference: float
    """Slow-down of compute and communication that run at the same time: share of the lesser of the two."""
    tp_interference: float
    """The same of a product and a tensor-parallel collective beside it."""
    ring_waits: bool
    """Whether ring attention waits for its transfers as soon as it has started them."""
    ring_repeats_keys: bool
    """Whether it passes on the keys and values of each query head, where several share one."""
    ring_gradient_bytes: float
    """Bytes of an element of their gradients on its way round."""
    overlap_cuts_products: bool
    """Whether overlapped tensor parallelism cuts products into pieces beside pieces of their transfers."""
    tp_hidden: float
    """Share of tensor-parallel communication that user buffers hide."""
    ep_hidden: float
    """Share of the expert all-to-all that overlap hides."""
    head_factor: float
    """Time of the last norm, the LM head and the loss over what their bytes and FLOP take."""
    virtual_stage_s: float
    """Time that a micro-batch loses at each virtual stage of a pipeline rank."""
    step_overhead_s: float
    """Time of a step for data, logging and the host."""
    collective_wait_s: float
    """Wait at a blocking tensor-parallel collective for the slowest rank and two stream hand-overs."""
    async_tensor_backward: bool
    """Whether backward collectives of column-parallel products run beside its GEMMs."""
    reduces_each_input: bool
    """Whether tensor-parallel ranks add up the gradient of attention's input behind each of its products."""
    reduces_gate_apart: bool
    """Whether they add up that of a feed-forward's input behind its gate and behind the product beside it."""
    gathers_after_update: bool
    """Whether parameters of ZeRO 1 and 2 are gathered when the optimizer has ended, with nothing beside."""
    broadcasts_shards: bool
    """Whether each rank broadcasts its shard of the parameters, one after the other, instead of a gather."""
    zero1_all_reduces: bool
    """Whether ZeRO-1 all-reduces gradients (DeepSpeed) instead of scattering them."""
    p2p_exposed: float
    """Share of the steady-state pipeline transfers that the schedule waits for."""
    fill_exposed: bool
    """Whether transfers of virtual stages are hidden in the steady phase alone, not in fill and drain."""
    launch_blocking_s: float
    """By how much a pass of a layer is longer under CUDA_LAUNCH_BLOCKING=1, on top of the host's launches,
    which nothing hides then."""
    gradient_bytes: float
    """Bytes of a gradient element when it is reduced."""
    weight_gradient_bytes: float
    """Bytes that a weight-gradient GEMM moves per element of its result."""
    fused_loss: bool
    """Whether cross entropy is one kernel over 16-bit logits."""
    stepwise_loss: bool
    """Whether a cross entropy that is not one kernel is one for each of its steps."""
    current_scaling: bool
    """Whether FP8 scales come from the tensor itself (a pass more) instead of the steps before."""
    transposes_apart: bool
    """Whether an FP8 operand's transpose is made in a kernel of its own."""
    casts_stepwise: bool
    """Whether FP8 operands are cast one operator of PyTorch at a time, and by each product for itself."""
    narrow_gathers: bool
    """Whether parameters are kept and gathered at the run's precision (FP8) instead of 16 bits."""
    bucket_parameters: float
    """Parameters of one data-parallel collective, at the least; 0: those of a layer."""
    bucket_parameters_per_rank: float
    """Parameters of one such collective for each data-parallel rank, where that is more."""
    reduces_after_backward: bool
    """Whether nothing hides gradients' reduction in a pipeline, or where no states are sharded."""
    reduces_each_micro_batch: bool
    """Whether gradients of ZeRO 2 and 3 are reduced after each micro-batch, not once a step."""
    gathers_each_micro_batch: bool
    """Whether parameters of ZeRO 2 are gathered for each micro-batch, and in a pipeline once a step."""
    copies_shards: bool
    """Whether sharded parameters are copied out of what was gathered, gradients into what is reduced, and
    those of micro-batches that are not reduced added to a whole sum."""
    fused_norm: bool
    """Whether each norm is one kernel, also where other operators are not."""
    whole_logits: bool
    """Whether tensor-parallel ranks gather the logits and take the loss of all of them."""
    eager_operators: bool
    """Whether norms, rotary embeddings and activations run operator by operator, as the model's code says."""
    fused_elementwise: bool
    """Whether norms, biases, activations and residual adds run as fused kernels."""
    host_update_bytes: float
    """Bytes of the host's memory that the update of one offloaded parameter moves."""
    host_transfer_bytes: float
    """Bytes of an offloaded parameter over PCIe that a step waits for."""
    host_accumulation_bytes: float
    """More of them for each reduction of its gradients, of a micro-batch or of the step (ZeRO 2 and 3)."""
    host_gather_bytes: float
    """More of them for each micro-batch, where weights are gathered from the host (ZeRO 3)."""
    host_sum_bytes: float
    """Bytes of the host's memory that adding the gradient of one more reduction moves."""

    def shards_frozen(self, stage: Ints) -> NDArray[np.bool_]:
        """Whether frozen parameters are sharded at a ZeRO stage, and gathered with the trained ones.

        DeepSpeed's ZeRO 2 shards gradients and states alone; PyTorch's wraps every parameter, and its shards
        are gathered for each micro-batch (torch 2.13, fsdp/_fully_shard/_fsdp_param_group.py, post_backward).

        Parameters
        ----------
        stage : int or array of int
            ZeRO stages, 0 to 3.

        Returns
        -------
        array of bool
            Shaped like them.
        """
        stages = np.asarray(stage)
        return np.asarray((stages == 3) | (stages == 2) & self.gathers_each_micro_batch)

    @property
    def memory_efficient(self) -> bool:
        """Whether attention is PyTorch's memory-efficient kernel: keys and values are repeated for it, and a
        mask is a matrix of all scores, every one of which it computes."""
        return self.flash_attention and self.flash_generation == OF_WIDE_HEADS

    def gradients_mb(self, parameters: float) -> float:
        """Size of gradients when they are reduced: `gradient_bytes` each.

        `costmodel/data/frameworks.yaml` has the source of these.

        Parameters
        ----------
        parameters : float
            Number of parameters that the gradients are of, at least 0.

        Returns
        -------
        float
            MB of 10^6 bytes, at least 0.
        """
        return parameters * self.gradient_bytes / 1e6

    def gradients_in(self, size_mb: float) -> float:
        """Number of gradients in a bucket: the inverse of `gradients_mb`.

        Parameters
        ----------
        size_mb : float
            Size of the bucket, MB of 10^6 bytes, at least 0.

        Returns
        -------
        float
            Gradients, at least 0.
        """
        return 1e6 * size_mb / self.gradient_bytes


def framework_prefixes(name: str) -> tuple[str, ...]:
    """Where a software profile's constants stand: the defaults, then its own entry.

    Parameters
    ----------
    name : str
        One of `framework_names()`.

    Returns
    -------
    tuple of str
        Paths for `records.layered_values`, in which later ones win.
    """
    return "framework_defaults", f"frameworks.{name}"


def framework_names() -> tuple[str, ...]:
    """Every software profile.

    Returns
    -------
    tuple of str
        In alphabetical order.
    """
    return names_in("frameworks")


@cache
def framework_constants(name: str) -> FrameworkConstants:
    """Constants of a software profile.

    Parameters
    ----------
    name : str
        One of `framework_names()`.

    Returns
    -------
    FrameworkConstants
        `costmodel/data/frameworks.yaml` has the source of each.

    Raises
    ------
    KeyError
        For another name, with those that there are.
    """
    return named_framework_constants(name, {})


def named_framework_constants(name: str, overrides: Overrides) -> FrameworkConstants:
    """Constants of a software profile with other values for some of them; not cached.

    Parameters
    ----------
    name : str
        One of `framework_names()`.
    overrides : mapping of str to float
        Other values, by the path of the record.

    Returns
    -------
    FrameworkConstants
        `costmodel/data/frameworks.yaml` has the source of each.

    Raises
    ------
    KeyError
        For another name, with those that there are.
    """
    if name not in framework_names():
        raise KeyError(f"no software profile {name!r}: known are {', '.join(framework_names())}")
    return FrameworkConstants(**layered_values(*framework_prefixes(name), overrides=overrides))


def stack_constants(workload: Workload) -> FrameworkConstants:
    """Constants of the software profile that runs a workload, with the run's own settings.

    Parameters
    ----------
    workload : Workload
        Its framework and its settings of kernels, gradients and parameters are used.

    Returns
    -------
    FrameworkConstants
        `costmodel/data/frameworks.yaml` has the source of each.

    Raises
    ------
    KeyError
        For a framework without constants.
    """
    return of_run(framework_constants(workload.framework), workload)


def of_run(stack: FrameworkConstants, workload: Workload) -> FrameworkConstants:
    """Constants of a software stack with what the run says of its kernels, gradients and parameters.

    Parameters
    ----------
    stack : FrameworkConstants
        Of the workload's framework.
    workload : Workload
        Its settings of kernels, gradients and parameters are used.

    Returns
    -------
    FrameworkConstants
        Those of the stack where the run says nothing.
    """
    return _with_settings(
        stack,
        _Settings(
            kernel=_kernel_of(workload),
            architecture=workload.cluster.device.architecture,
            gradient_bytes=workload.gradient_bytes,
            fp8_parameters=workload.fp8_params,
            fused_loss=workload.te_loss,
            fused_norm=workload.fused_norm,
            stepwise_loss=workload.stepwise_loss,
            fill_exposed=workload.fill_exposed,
            reduces_each_micro_batch=workload.sync_each_batch or None,
        ),
    )


def generation_on(architecture: str, generation: float) -> float:
    """The generation of fused attention that a device runs where a stack asks for one.

    Parameters
    ----------
    architecture : str
        Of the device.
    generation : float
        As `FrameworkConstants.flash_generation`; PyTorch's own leave it to the device.

    Returns
    -------
    float
        1 where PyTorch's is in Triton, 2 where the device has nothing later, and `OF_WIDE_HEADS` where it has
        none but PyTorch's other one.
    """
    if generation in (OF_PYTORCH, _OF_EARLIER_PYTORCH, _OF_TRAINERS):
        if architecture in WITHOUT_FLASH:
            return OF_WIDE_HEADS
        if architecture in _ATTENTION_IN_TRITON and generation != _OF_TRAINERS:
            return 1
        return 3 if generation != _OF_EARLIER_PYTORCH and architecture in _PREFERS_CUDNN else 2
    return min(generation, 2) if architecture in UP_TO_FLASH_2 else generation


def _kernel_of(workload: Workload) -> AttentionKernel | None:
    """The attention kernel that a run names, or the only fused one that takes its model's heads."""
    kernel = workload.attention_kernel
    if has_wide_heads(workload.model) and kernel not in ("unfused", "fused-softmax"):
        return MEMORY_EFFICIENT
    return kernel


class _Settings(NamedTuple):
    """Settings of a run that go before its stack's; None where it sets none."""

    kernel: AttentionKernel | None
    architecture: str
    gradient_bytes: int | None
    fp8_parameters: bool | None
    fused_loss: bool | None
    fused_norm: bool | None
    stepwise_loss: bool | None
    fill_exposed: bool | None
    reduces_each_micro_batch: bool | None


@lru_cache(maxsize=256)
def _with_settings(stack: FrameworkConstants, run: _Settings) -> FrameworkConstants:
    """The constants with the settings of a run; cached, because every price asks for them."""
    same = ("fused_loss", "fused_norm", "stepwise_loss", "fill_exposed", "reduces_each_micro_batch")
    said = {name: getattr(run, name) for name in same}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    generation = stack.flash_generation
    if run.kernel is not None:
        changes["flash_attention"] = run.kernel in _FLASH_GENERATIONS
        changes["fused_softmax"] = run.kernel != "unfused"
        generation = _FLASH_GENERATIONS.get(run.kernel, generation)
    generation = changes["flash_generation"] = generation_on(run.architecture, generation)
    if run.architecture in WITHOUT_FLASH and generation != OF_WIDE_HEADS:
        changes["flash_attention"] = False
    if run.gradient_bytes is not None:
        changes["gradient_bytes"] = run.gradient_bytes
        if stack.weight_gradient_bytes > _WRITTEN_ONCE_BYTES:
            changes["weight_gradient_bytes"] = 2.0 * run.gradient_bytes
    if run.fp8_parameters is not None:
        changes["narrow_gathers"] = run.fp8_parameters
    return replace(stack, **changes)


# What each software stack holds in HBM beside the textbook counts, from `costmodel/data/memory.yaml`.


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Facts about one software stack; `memory.yaml` has the source of each."""

    logit_bytes: float
    """Bytes of a logit at the peak of the loss; 0 where it is Megatron's, which `fused_loss` and
    `stepwise_loss` tell apart."""
    split_logit_bytes: float
    """Bytes of a logit at that peak where tensor-parallel ranks share the vocabulary."""
    placeholder_gradients: bool
    """Whether one 16-bit tensor of every weight's shape stands in for gradients that were added elsewhere."""
    fp8_weight_copies: bool
    """Whether FP8 kernels keep quantised copies of the weights."""
    fp8_saved_inputs: bool
    """Whether inputs of matrix products are saved for the backward pass quantised."""
    keeps_unread_outputs: bool
    """Whether operator-level recomputation stores outputs that no backward pass reads."""
    separate_operators: tuple[str, ...]
    """What keeps all that each of its PyTorch operators reads: of rotary, norm, gate and delta_norm, the norm
    behind a Gated DeltaNet."""
    copies_inputs: bool
    """Whether column-parallel modules keep a copy each of an input that they share, on tensor ranks."""
    sums_beside_gradients: bool
    """Whether fp32 sums of gradients lie beside the 16-bit gradients of a micro-batch."""
    keeps_stage_outputs: Literal["none", "backward", "step"]
    """Until when a pipeline stage keeps what it sent: not at all, until the backward pass of it, or until the
    step ends, the last stage its logits too."""
    receives_apart: bool
    """Whether a stage has a buffer for each activation and gradient that it receives in a step, and keeps
    the gradients that it sent."""
    stranding: Literal["none", "forward", "step"]
    """What a caching allocator cannot use again: `none` (the stack's figures are bytes allocated), `forward`
    (blocks of a layer's forward pass, too small for logits), `step` (contiguous buffers of the optimizer
    step)."""
    step_bytes: float
    """Bytes of a parameter that the optimizer step holds on each data-parallel rank's share (16-bit
    gradients)."""
    bf16_gradient_copies_bytes: float
    """Further bytes of a gradient element that stages 0 to 2 keep in bf16; below 0 where it is kept in fewer
    than it is reduced in."""
    unsharded_in_pipeline: bool
    """Whether a pipeline keeps fp32 gradients whole for a step under ZeRO 2 and 3, and under ZeRO 3 16-bit
    weights too."""
    whole_while_accumulating: bool
    """Whether ZeRO 2 and 3 keep 16-bit gradients whole until the last micro-batch, unless the run reduces
    each one's."""
    gradients_arrive: bool
    """Whether a backward pass makes the gradients, layer by layer, and the step after it frees them."""
    bucket_elements: float
    """Elements of the buffer in which gradients are reduced."""
    reuse_elements: float
    """Weights that pass before a gathered one is used again, up to which it stays gathered under stage 3; 0
    where layers are gathered and freed one by one."""
    prefetch_elements: float
    """Weights that are gathered ahead under stage 3, where `reuse_elements` is above 0."""
    offload_buffer_bytes: float
    """Bytes of an element of the largest matrix, in buffers through which stages 1 and 2 offload."""
    offloaded_shard_bytes: float
    """Bytes of a weight, and of its gradient, that stage 3 keeps on the GPU beside an offloaded optimizer."""
    upload_bytes: float
    """Bytes of an offloaded weight on its way from the host to where it is gathered."""
    host_copies_bytes: float
    """Bytes of an offloaded parameter in the host's memory beside its states and its fp32 gradient."""


@cache
def memory_profile(name: str) -> MemoryProfile:
    """The facts about a software profile.

    Parameters
    ----------
    name : str
        As in `frameworks.yaml`.

    Returns
    -------
    MemoryProfile
        From `costmodel/data/memory.yaml`, where each value has its source.

    Raises
    ------
    KeyError
        For another name, with those that there are.
    """
    table = data_table("memory.yaml")
    stacks = table["stacks"]
    if name not in stacks:
        raise KeyError(f"no memory profile {name!r}: known are {', '.join(sorted(stacks))}")
    facts = {**table["defaults"], **stacks[name]}
    facts["separate_operators"] = tuple(facts["separate_operators"])
    return MemoryProfile(**facts)
