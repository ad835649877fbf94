"""How software runs a layout: the settings of a launch file that change the price and not the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import Field

from meshwright.costmodel.context_groups import HIERARCHICAL
from meshwright.costmodel.execution_names import (
    ContextExchange,
    Dispatcher,
    GraphScope,
    OffloadedModules,
    StateType,
)
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Fp8Recipe, Overlap, Workload
from meshwright.frameworks.catalog import as_compiled, framework_of_stack, stack_named

_TYPE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Every execution setting of a plan, once."""

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
    fp8_params: bool = False
    """Parameters are kept and gathered at the narrow precision, without a 16-bit copy."""
    fp8_attention: bool = False
    """The matrix products of attention run in FP8 beside those of the layers."""
    fp8_recipe: Fp8Recipe | None = None
    """How FP8 scales come about; None in other precisions, and where the framework leaves no choice."""
    te_loss: bool | None = None
    """Cross entropy is Transformer Engine's one kernel over 16-bit logits; None for the framework's own."""
    offload_modules: OffloadedModules = "none"
    """Modules of each layer whose saved tensors are copied to the host's memory and back."""
    bucket_mb: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Gradients that are reduced together, MB of 10^6 bytes; None for the framework's own size."""

    def applied(self, workload: Workload) -> Workload:
        """The workload run so.

        Parameters
        ----------
        workload : Workload
            Its own execution settings are replaced.

        Returns
        -------
        Workload
        """
        overlap = Overlap(
            dp=self.dp_overlap, tp=self.tp_overlap, pp=self.pp_overlap, ep=self.ep_overlap
        )
        return replace(
            workload,
            overlap=overlap,
            moe_dispatch=self.moe_dispatch,
            cuda_graph=self.cuda_graph,
            cp_comm=self.cp_comm,
            cp_inner=self.cp_inner,
            framework=as_compiled(workload.framework, compiled=self.compiled),
            gradient_bytes=_TYPE_BYTES[self.gradient_dtype] if self.gradient_dtype else None,
            moment_bytes=_TYPE_BYTES[self.moment_dtype],
            fp8_parameters=self.fp8_params,
            fp8_attention=self.fp8_attention,
            fp8_recipe=self.fp8_recipe,
            fused_loss=self.te_loss,
            offload_modules=self.offload_modules,
            bucket_mb=self.bucket_mb,
        )

    @classmethod
    def within(cls, workload: Workload) -> Self:
        """The settings that a workload holds: what `applied` puts there.

        Parameters
        ----------
        workload : Workload

        Returns
        -------
        Execution
        """
        types: dict[int | None, Any] = {size: name for name, size in _TYPE_BYTES.items()}
        overlap = workload.overlap
        settings: dict[str, Any] = {
            "moe_dispatch": workload.moe_dispatch,
            "cuda_graph": workload.cuda_graph,
            "cp_comm": workload.cp_comm,
            "offload_modules": workload.offload_modules,
            "cp_inner": workload.cp_inner if workload.cp_comm == HIERARCHICAL else None,
        }
        has_both = bool(framework_of_stack(workload.framework).eager_stack)
        return cls(
            **settings,
            compiled=has_both and stack_named(workload.framework).compiled,
            ep_overlap=overlap.ep,
            tp_overlap=overlap.tp,
            dp_overlap=overlap.dp,
            pp_overlap=overlap.pp,
            gradient_dtype=types.get(workload.gradient_bytes),
            moment_dtype=types.get(workload.moment_bytes, "fp32"),
            fp8_params=bool(workload.fp8_parameters),
            fp8_attention=workload.fp8_attention,
            fp8_recipe=workload.fp8_recipe,
            te_loss=workload.fused_loss,
            bucket_mb=workload.bucket_mb,
        )

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
        return replace(
            self,
            tp_overlap=self.tp_overlap and bool(layout.sequence_parallel),
            dp_overlap=self.dp_overlap and sends_gradients,
            pp_overlap=self.pp_overlap and int(layout.vpp) > 1,
            bucket_mb=self.bucket_mb if sends_gradients else None,
        )
