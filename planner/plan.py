"""The plan document: what `plan --json` prints and `plan.yaml` holds, and nothing else does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster_specs.schema import ClusterSpec
from model_specs.schema import ModelSpec

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
ScheduleName = Literal[
    "1f1b", "interleaved-1f1b", "gpipe", "breadth-first", "zb-h1", "zbv", "dualpipe-v", "dualpipe"
]
RecomputeName = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "op"]
Framework = Literal["megatron", "torchtitan", "deepspeed", "fsdp2"]

MOST_LISTED_RANKS = 4096
"""With more ranks, the list of a mapping's places lies in a file, not in `plan --json`."""

_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PlanInputs(BaseModel):
    """Everything that decided the plan; the same inputs give the same plan."""

    model_config = _DOC

    model: ModelSpec
    cluster: ClusterSpec
    gpus: Degree
    global_batch: Annotated[int, Field(ge=1, le=10_000_000)]
    """Sequences."""
    seq_len: Annotated[int, Field(ge=1, le=16_777_216)]
    """Tokens of a sequence."""
    precision: Precision = "bf16"
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    framework: Framework = "megatron"
    reserve_gib: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    pins: dict[str, int | str] = Field(default_factory=dict)
    forbids: tuple[str, ...] = ()
    expert_imbalance_by_ep: tuple[tuple[Degree, Annotated[float, Field(ge=1, le=1e6)]], ...] = ()
    """Measured load of the busiest rank over the mean, by expert-parallel degree."""
    expert_copies_by_ep: tuple[tuple[Degree, Degree, Annotated[float, Field(ge=0, le=1e6)]], ...] = ()
    """Measured blocks that a token touches: degree, equal blocks of the expert group, of them touched."""
    moe_dispatch: Literal["alltoall", "deduplicated"] = "alltoall"


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
    recompute: RecomputeName
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With `selective`."""
    recompute_layers: Annotated[int, Field(ge=0)] = 0
    """With `full`: layers recomputed in each virtual stage (Megatron's block method)."""
    schedule: ScheduleName = "1f1b"
    stages: list[list[int]]


class Objective(BaseModel):
    """`gap` is (step_time_s - lower_bound_s) / step_time_s; an unknown bound is null, never 0."""

    model_config = _DOC

    step_time_s: float | None
    lower_bound_s: float | None
    gap: float | None


class LevelTraffic(BaseModel):
    """Bytes that leave a GPU across one fabric level in a step, and how long its share of links is busy."""

    model_config = _DOC

    level: str
    bytes_per_step: float
    busy_s: float
    utilisation: float
    by_axis: dict[str, float] = Field(default_factory=dict)
    """The same bytes by axis."""


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
    memory_context_gib: float | None = None
    """CUDA context and NCCL buffers, which the driver shows besides."""
    level_traffic: list[LevelTraffic]
    error_band: ErrorBandDoc


class Mapping(BaseModel):
    """Rank r runs on ranks[r] = [node, local GPU]; left out above 4,096 ranks.

    `matrix[axis]` holds the axis' factor at every fabric level, from the inside out; column products are
    the sizes of the levels.
    """

    model_config = _DOC

    order: list[str]
    levels: list[str]
    matrix: dict[str, list[int]]
    ranks: list[tuple[int, int]] | None = None


class Binding(BaseModel):
    """A constraint that holds the plan back."""

    model_config = _DOC

    rule: str
    value: float
    limit: float
    slack: float
    unit: str
    note: str


class Infeasible(BaseModel):
    """Rules that together leave no layout, and the smallest changes that would."""

    model_config = _DOC

    conflict: list[str]
    smallest_changes: list[str]


class IdleDoc(BaseModel):
    """GPUs that a plan leaves idle, and what the best layout on all of them costs."""

    model_config = _DOC

    gpus: int
    nodes: list[str]
    """Those without a rank; a node may be idle in part besides."""
    full_step_time_s: float | None
    """Of the best layout on all GPUs; null where there is none."""
    full_lower_bound_s: float | None
    reason: str


class Scenario(BaseModel):
    """What becomes of the plan where one thing is off."""

    model_config = _DOC

    change: str
    """Such as `nvlink 8.3 % slower`."""
    step_time_s: float | None
    """Of the plan as it stands; null where it no longer fits."""
    best_step_time_s: float | None
    """Of the fastest layout that was found for the changed cluster."""
    loss_at_most: float | None
    """Proven: by what share the plan is slower than the fastest layout could be; null where unknown."""
    proven: bool
    """Whether no layout is faster than `best_step_time_s`."""
    winner: dict[str, object] | None = None
    """The faster layout, if there is one."""


class Robustness(BaseModel):
    """Whether the same plan wins with the cost model off by its error band, one thing at a time."""

    model_config = _DOC

    step_time_band: tuple[float, float]
    """Measured over predicted step time, which compute and every level are off by."""
    memory_band: tuple[float, float]
    same_winner: bool | None
    """Null where no other winner was found, but not all was proven."""
    scenarios: list[Scenario]


class SolverReport(BaseModel):
    """How the answer was found."""

    model_config = _DOC

    wall_s: float | None
    """Seconds from request to plan; null where files must not depend on the machine, as in a batch."""
    bound_rounds: int
    workers: int
    seed: int
    version: str
    method: str = "cp-sat"
    layouts_considered: int = 0
    space: str = ""


class Plan(BaseModel):
    """One plan: a layout with its proof and its reasons, or the reason why there is none."""

    model_config = _DOC

    schema_: Literal[1] = Field(default=1, alias="schema")
    status: Status
    objective: Objective
    layout: LayoutDoc | None
    predicted: Predicted | None
    mapping: Mapping | None
    expert_placement: dict[str, object] | None = None
    idle: IdleDoc | None = None
    binding: list[Binding] = Field(default_factory=list)
    infeasible: Infeasible | None = None
    warnings: list[str] = Field(default_factory=list)
    alternatives: list[dict[str, object]] = Field(default_factory=list)
    robustness: Robustness | None = None
    """Left out where many plans are made at once."""
    solver: SolverReport
    inputs: PlanInputs
