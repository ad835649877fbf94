"""A layout and what the cost model expects of it, as documents carry them."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, Field

from meshwright.costmodel.estimate import Stages
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import schedule_name, schedule_named
from meshwright.planner.request.inputs import Degree, RecomputeModule, RecomputeName, ScheduleName

RECOMPUTED: dict[RecomputeModule, Recompute] = {
    "core_attn": Recompute.CORE_ATTENTION,
    "layernorm": Recompute.LAYERNORM,
    "moe_act": Recompute.MOE_ACTIVATION,
    "mla_up_proj": Recompute.MLA_UP_PROJECTION,
    "mlp": Recompute.MLP,
    "op": Recompute.OPERATORS,
}
"""Modules of selective recomputation, by the names that documents and Megatron's flags use."""

_NUMBERS = (
    "tp", "cp", "pp", "dp", "ep", "etp", "vpp", "micro_batch", "num_micro_batches", "zero_stage",
    "shard_groups", "optimizer_offload",
)  # fmt: skip
"""Whole numbers that a layout and its document hold under one name."""

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LayoutDoc(BaseModel):
    """The chosen layout. `stages[rank][virtual stage]` is a number of transformer layers; chunk v of rank r
    is the (v * pp + r)-th of the model; under zbv and dualpipe-v the second chunk of rank r is the
    (2 pp - 1 - r)-th. The first also holds the embedding, the last MTP and head.
    """

    model_config = _DOC

    tp: Degree
    cp: Degree
    pp: Degree
    dp: Degree
    ep: Degree
    etp: Degree
    vpp: Degree
    micro_batch: Degree
    num_micro_batches: Degree
    sequence_parallel: bool
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    shard_groups: Degree = 1
    """Groups of replicas that each hold all that ZeRO shards."""
    optimizer_offload: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of the parameters whose optimizer states lie in the host's memory."""
    recompute: RecomputeName
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With `selective`."""
    recompute_layers: Annotated[int, Field(ge=0)] = 0
    """With `full`: layers recomputed in each virtual stage (Megatron's block method)."""
    schedule: ScheduleName = "1f1b"
    stages: list[list[int]]


class LevelTraffic(BaseModel):
    """Bytes that leave a GPU across one fabric level in a step, and how long its share of links is busy."""

    model_config = _DOC

    level: str
    bytes_per_step: float
    """Of the mean GPU."""
    busy_s: float
    """Of the GPU that sends most across the level."""
    utilisation: float
    """`busy_s` over the step."""
    most_bytes_per_step: float | None = None
    """Of the GPU that sends most; null in plans of earlier versions, whose `busy_s` is the mean GPU's."""
    mean_busy_s: float | None = None
    """Of the mean GPU."""
    by_axis: dict[str, float] = Field(default_factory=dict)
    """The bytes of the mean GPU by axis."""

    @property
    def mean_s(self) -> float:
        """How long the mean GPU's share of the links is busy."""
        return self.busy_s if self.mean_busy_s is None else self.mean_busy_s


class ErrorBandDoc(BaseModel):
    """Where 90 % of measured steps lay, over predicted ones, on runs whose source was not fitted on."""

    model_config = _DOC

    low: float
    high: float
    rows: int
    basis: str = "the device's class"
    """Whose runs these are: a device class and a framework, or the wider group that stands in for them."""


class Predicted(BaseModel):
    """What the cost model expects of the plan."""

    model_config = _DOC

    step_time_s: float
    tflops_per_gpu: float
    mfu: float
    tokens_per_s_per_gpu: float
    breakdown_s: dict[str, float]
    """Named parts that add up to `step_time_s`."""
    memory_gib: list[float]
    """Per pipeline stage, the peak on one GPU."""
    memory_parts_gib: list[dict[str, float]] = Field(default_factory=list)
    """Per pipeline stage: weights, gradients, optimizer, activations, logits, work (one layer's way back),
    buffers, fragmentation and workspace, which add up to `memory_gib`."""
    host_memory_gib: float | None = None
    """What a node's host holds of offloaded activations, and of optimizer states with their gradients; null
    where nothing is offloaded."""
    memory_context_gib: float | None = None
    """CUDA context and NCCL buffers, which the driver shows besides."""
    level_traffic: list[LevelTraffic]
    error_band: ErrorBandDoc


def layout_document(layout: Layout, stages: Stages) -> LayoutDoc:
    """The `layout` part of a document.

    Parameters
    ----------
    layout
        One layout, in plain numbers.
    stages
        Transformer layers of each [pipeline rank][virtual stage].
    """
    mask = Recompute(int(layout.recompute))
    kind, modules, layers = recompute_words(mask, int(layout.recompute_layers))
    longest = max(max(rank) for rank in stages)
    return LayoutDoc(
        **{name: int(getattr(layout, name)) for name in _NUMBERS},
        sequence_parallel=bool(layout.sequence_parallel),
        recompute=kind,
        recompute_modules=modules,
        recompute_layers=min(layers, longest),
        schedule=cast("ScheduleName", schedule_name(int(layout.schedule), int(layout.vpp))),
        stages=[list(rank) for rank in stages],
    )


def recompute_words(
    mask: Recompute, layers: int
) -> tuple[RecomputeName, tuple[RecomputeModule, ...], int]:
    """How documents write a recomputation: kind, modules (selective), layers of a virtual stage (full).

    Parameters
    ----------
    mask
        Of a layout.
    layers
        `Layout.recompute_layers`, fully recomputed layers of each virtual stage.
    """
    if Recompute.FULL in mask:
        return "full", (), layers
    modules = tuple(name for name, flag in RECOMPUTED.items() if flag in mask)
    return ("selective" if mask else "none"), modules, 0


def layout_from_document(document: LayoutDoc) -> Layout:
    """The layout that a document describes, in plain numbers; its stages are not part of a `Layout`."""
    mask = Recompute.FULL if document.recompute == "full" else Recompute.NONE
    for module in document.recompute_modules:
        mask |= RECOMPUTED[module]
    return Layout(
        **{name: getattr(document, name) for name in _NUMBERS},
        sequence_parallel=document.sequence_parallel,
        recompute=int(mask),
        recompute_layers=document.recompute_layers,
        schedule=int(schedule_named(document.schedule)),
    )
