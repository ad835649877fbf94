"""What is trained on what: everything that a layout does not choose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration, Factors
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.model_specs.schema import ModelSpec

AttentionKernel = Literal["unfused", "fused-softmax", "flash-1", "flash-2", "flash-3"]
"""PyTorch's operators one by one; Megatron's fused softmax between two matrix products; FlashAttention 1
to 3, where 3 also stands for cuDNN's kernels."""


Fp8Recipe = Literal["delayed", "tensorwise", "blockwise"]
"""Scales from the steps before, from each tensor itself, or from each of its blocks of 128 elements."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Which communication the run tries to hide under compute."""

    dp: bool = False
    tp: bool = False
    pp: bool = False
    ep: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a cluster and a batch, and how the software runs them."""

    model: ModelSpec
    cluster: ClusterSpec
    gpus: int
    global_batch: int
    """Sequences per step."""
    seq_len: int
    """Tokens per sequence."""
    precision: str = "bf16"
    """bf16, fp16, fp8, mxfp8 or nvfp4."""
    optimizer: str = "adam"
    framework: str = DEFAULT_FRAMEWORK
    """Name of a software stack: one of `meshwright.frameworks.catalog.STACK_NAMES`."""
    overlap: Overlap = field(default_factory=Overlap)
    cuda_graph: str = "none"
    """none, feed_forward (of each layer, or just its router), partial (attention too) or full (the step)."""
    launch_blocking: bool = False
    """CUDA_LAUNCH_BLOCKING=1: every kernel waits for the one before."""
    cp_comm: str = "p2p"
    """How context parallelism moves keys and values: p2p (ring), a2a (heads for tokens, Ulysses), a2a+p2p
    (both: rings of groups that swap), or all_gather (of all of them before attention)."""
    cp_inner: int | None = None
    """Ranks of a context group that swap heads for tokens in a2a+p2p, at least 1; None for as many as
    `context_groups.largest_swap` says."""
    moe_dispatch: str = "deduplicated"
    """alltoall (one copy per chosen expert), allgather (every token to every rank), or one copy per
    destination: deepep, hybridep, deduplicated."""
    expert_imbalance: float = 1.0
    """Load of the busiest expert-parallel rank over the mean."""
    expert_imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    """The same for single expert-parallel degrees, where loads were measured: (ep, load over mean)."""
    expert_copies_by_ep: tuple[tuple[int, int, float], ...] = ()
    """Where a token's experts lie, measured: (ep, equal blocks of the expert group, of them touched)."""
    reserve_gib: float = 0.0
    """HBM that the plan must leave free."""
    memory_margin: float = 1.0
    """Measured over predicted peak that the plan must have room for, at least 1."""
    inside_domain: tuple[str, ...] = ()
    """Axes whose groups must each lie in one scale-up domain: any of tp, cp, ep."""
    max_cut_use: float = 1.0
    """Share of the capacity of every cut of the fabric that may be used in a phase; 1 limits nothing."""
    attention_kernel: AttentionKernel | None = None
    """Of the run; None for the one that the software stack has."""
    gradient_bytes: int | None = None
    """Bytes of a gradient element when it is reduced, 2 or 4; None for what the software stack reduces."""
    fp8_recipe: Fp8Recipe | None = None
    """How FP8 scales come about; None for what the software stack does."""
    fp8_attention: bool = False
    """Whether attention's matrix products run in FP8 too."""
    moment_bytes: int = 4
    """Bytes of a moment of the optimizer, 2 or 4."""
    fp8_parameters: bool | None = None
    """Whether parameters are kept and gathered at the run's narrow precision only, without a 16-bit copy;
    None for what the software stack does."""
    fused_loss: bool | None = None
    """Whether cross entropy is one kernel over 16-bit logits; None for the software stack's."""
    fused_norm: bool | None = None
    """Whether each norm is one kernel; None for what the stack does."""
    keeps_gathered_inputs: bool = False
    """Whether sequence parallelism keeps the gathered inputs of column-parallel products for the backward
    pass, instead of gathering them again."""
    offload_modules: str = "none"
    """Modules whose saved tensors lie in the host's memory until the backward pass, joined by `+`: one of
    `meshwright.costmodel.execution_names.OFFLOADED_MODULES`."""
    offload_parameters: bool = False
    """Whether the 16-bit shards of ZeRO 3 lie in the host's memory too (DeepSpeed's `offload_param`)."""
    bucket_mb: float | None = None
    """Gradients that are reduced together, MB of 10^6 bytes, above 0; None for the software stack's own.
    Counts where the stack has buckets of a set size."""
    chooses_buckets: bool = False
    """Whether a layout may have buckets of another size where that saves enough (`bucket_sizes`)."""
    flushes: int = 1
    """Times that the pipeline fills and drains in a step."""
    calibration: Calibration | None = None
    """What the user's own runs say of the constants; None for the shipped ones."""

    @cached_property
    def factors(self) -> Factors | None:
        """The factors of the calibration that hold for this device and this framework."""
        if self.calibration is None:
            return None
        return self.calibration.factors_on(self.cluster.device.name, self.framework)

    def on(self, gpus: int) -> Workload:
        """The same training on another number of GPUs of the cluster.

        Parameters
        ----------
        gpus : int
            1 to the cluster's size.

        Returns
        -------
        Workload
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
            Expert-parallel degrees.
        blocks : array of float, shape [..., levels]
            Equal blocks that the group lies in.
        even : array of float, shape [..., levels]
            The answer for degrees that were not measured.

        Returns
        -------
        array of float, shape [..., levels]
        """
        degrees = np.asarray(ep)[..., None]
        for degree in {entry[0] for entry in self.expert_copies_by_ep}:
            points = sorted(entry[1:] for entry in self.expert_copies_by_ep if entry[0] == degree)
            measured = np.interp(blocks, *np.array(points).T)
            even = np.where(degrees == degree, measured, even)
        return np.asarray(even)
