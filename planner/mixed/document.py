"""The document of a plan on a mixed cluster: what `plan --json` prints for a cluster file with parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.cluster_specs.mixed import MixedClusterSpec
from meshwright.costmodel.execution import Execution
from meshwright.documents.json_text import finite
from meshwright.planner.plan.baseline_document import CostDoc
from meshwright.planner.plan.document import Objective, SoftwareNeed, Status
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.predicted import ErrorBandDoc, LayoutDoc

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NOT_MEASURED = "the widest of its parts' bands; no pipeline through unlike devices was measured"
"""What the band of a pipeline through parts rests on."""
_DOC = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RankDoc(BaseModel):
    """One pipeline rank."""

    model_config = _DOC

    rank: int
    part: str
    device: str
    layers: int
    dense_layers: int = 0
    """Among them, of those in front of the layers with experts; 0 where all layers are alike."""
    memory_gib: float
    """Peak on one of its GPUs."""
    usable_gib: float
    """What the peak may reach there."""


class AloneDoc(BaseModel):
    """The best plan on one part, the others idle."""

    model_config = _DOC

    part: str
    device: str
    gpus: int
    status: Status
    step_time_s: Seconds | None
    lower_bound_s: float | None


class MixedSolverDoc(BaseModel):
    """How the answer was found."""

    model_config = _DOC

    wall_s: float
    seed: int
    version: str
    program: str
    rows: int
    """Layouts with pipeline ranks on each part whose bound was below the best plan on a single part."""
    priced: int
    rounds: int
    """CP-SAT models solved."""
    kernels: int
    """In the last of them."""
    model_bound_s: float | None
    """What that proved of them."""


class MixedPredicted(BaseModel):
    """What the cost model expects of a pipeline through several parts."""

    model_config = _DOC

    step_time_s: Seconds
    breakdown_s: dict[str, float]
    """Named parts that add up to `step_time_s`."""
    tokens_per_s: float
    mfu: float
    """Of the peaks of all GPUs in use together."""
    host_memory_gib: float | None = None
    """What the host of a node holds of the optimizer where it is offloaded, on the part that holds most."""
    error_band: ErrorBandDoc


class MixedPlan(BaseModel):
    """The fastest plan on a mixed cluster: a pipeline through parts of it, or a plan on one part alone."""

    model_config = _DOC

    schema_: Literal[1] = Field(default=1, alias="schema")
    kind: Literal["mixed-plan"] = "mixed-plan"
    status: Status
    objective: Objective
    runs_on: list[str]
    """The parts along the pipeline; one where a part alone is fastest; empty where nothing fits."""
    layout: LayoutDoc | None
    """Null where a part alone is fastest: its own plan has it."""
    execution: Execution | None
    installs: list[SoftwareNeed] = Field(default_factory=list)
    """What a pipeline through parts needs beside the framework, chosen or pinned."""
    predicted: MixedPredicted | None
    cost: CostDoc | None = None
    """Of the whole training on the parts in use, where its tokens or days were given."""
    ranks: list[RankDoc]
    nodes: list[tuple[str, int]]
    """(part, nodes of it), in the order in which ranks run through them."""
    alone: list[AloneDoc]
    solver: MixedSolverDoc
    cluster: MixedClusterSpec
    inputs: PlanInputs
    """As on the first part."""
    digest: str | None = None
    """Of the rest of the document, so that `verify` notices what was edited by hand."""


def mixed_document(plan: MixedPlan) -> dict[str, Any]:
    """A mixed plan as plain data; what has no number (NaN, infinity) is None."""
    cleaned: dict[str, Any] = finite(plan.model_dump(mode="json", by_alias=True))
    return cleaned
