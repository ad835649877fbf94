"""The part of a request that decides its plan, as documents carry it, and the names that it is written in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK
from meshwright.frameworks.record import FrameworkName
from meshwright.model_specs.schema import ModelSpec

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
ScheduleName = Literal[
    "1f1b", "interleaved-1f1b", "gpipe", "breadth-first", "zb-h1", "zbv", "dualpipe-v", "dualpipe"
]
RecomputeName = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "op"]

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
    framework: FrameworkName = DEFAULT_FRAMEWORK
    reserve_gib: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    memory_risk: Annotated[float, Field(ge=1e-6, le=0.5)] = 0.5
    """Share of measured errors of memory with which the plan may not fit; plans that do not say took the
    prediction as it stands."""
    inside_domain: tuple[Literal["tp", "cp", "ep"], ...] = ()
    """Axes whose groups each lie in one NVLink domain, as was asked."""
    max_cut_use: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the capacity of every cut that may be used in a phase, as was asked."""
    pins: dict[str, int | str] = Field(default_factory=dict)
    forbids: tuple[str, ...] = ()
    expert_imbalance_by_ep: tuple[tuple[Degree, Annotated[float, Field(ge=1, le=1e6)]], ...] = ()
    """Measured load of the busiest rank over the mean, by expert-parallel degree."""
    expert_copies_by_ep: tuple[
        tuple[Degree, Degree, Annotated[float, Field(ge=0, le=1e6)]], ...
    ] = ()
    """Measured blocks that a token touches: degree, equal blocks of the expert group, of them touched."""
    without: tuple[str, ...] = ()
    """Software that is not there, or not wanted."""
    allow: tuple[str, ...] = ()
    """What may change the numbers of the run."""
    calibration: Calibration | None = None
    """What the user's own runs say of the constants; None for the shipped ones."""
    objective: Literal["nominal", "expected"] = "nominal"

    @model_validator(mode="before")
    @classmethod
    def _dispatch_is_pinned(cls, data: Any) -> Any:
        """Plans written before dispatchers were chosen carried the one that was given."""
        if not isinstance(data, dict) or "moe_dispatch" not in data:
            return data
        others = {name: value for name, value in data.items() if name != "moe_dispatch"}
        pins = {**(data.get("pins") or {}), "moe_dispatch": data["moe_dispatch"]}
        return {**others, "pins": pins}
