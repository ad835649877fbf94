"""What is asked of a mixed cluster, and the document of its plan.

The same training runs on each of its parts, and something joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.reader import MixedClusterSpec, read_mixed_cluster
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.documents import (
    LARGE_FILE_BYTES,
    ClosedDocument,
    finite,
    is_file,
    path_text,
    read_mapping,
    read_text,
    validation_message,
)
from meshwright.errors import InfeasibleError, InputError
from meshwright.frameworks.catalog import RECORDS, planned
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import CostDoc, ExecutionDoc, Objective, SoftwareNeed, Status
from meshwright.planner.plan.texts import MIXED_KIND, document_text, plan_path
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.request.reader import read_request
from meshwright.planner.runs.run_terms import ErrorBandDoc, LayoutDoc

MOST_LEADING = 6
"""Dense layers before those with experts: ways to lay them on the first ranks double with each."""
_NOT_MIXED: Mapping[str, object] = {
    "max_cut_use": 1.0,
    "inside_domain": (),
    "objective": "nominal",
    "method": "cp-sat",
    "top": 1,
    "expert_loads": None,
    "nodes": None,
    "train": "full",
    "lora_rank": None,
    "lora_targets": None,
    "image_tokens": 0,
    "images_per_sequence": None,
    "freeze_encoder": False,
    "loss": None,
    "kind": PRETRAINING,
    "reference": None,
    "lengths": None,
    "pack_size": None,
    "packing": None,
}
"""What cannot be asked of a pipeline through several parts, and what stands for not asking it."""


@dataclass(frozen=True, kw_only=True)
class MixedRequest:
    """The same training on each part of a cluster."""

    cluster: MixedClusterSpec
    parts: tuple[PlanRequest, ...]
    """One for each part, on all of its GPUs."""
    time_limit_s: float | None = None
    """Of the whole search."""

    @property
    def gpus(self) -> int:
        """Of all parts."""
        return sum(part.gpus for part in self.parts)

    @property
    def first(self) -> PlanRequest:
        """The request on the first part: model, batch and choices are those of all."""
        return self.parts[0]

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.first.model.layers

    def name_of(self, part: int) -> str:
        """How a part is called: by its own name, or by its cluster's."""
        return self.cluster.name_of(part)


def read_mixed_request(
    *,
    model: str | PathLike[str] | ModelSpec,
    cluster: MixedClusterSpec | str | PathLike[str],
    gpus: int | None = None,
    **options: Any,
) -> MixedRequest:
    """The request for a model on a mixed cluster.

    Parameters
    ----------
    model
        As `read_request` takes it.
    cluster
        The mixed cluster, or the path of its file.
    gpus
        All of its GPUs, or None.
    options
        As `read_request` takes them.

    Raises
    ------
    InputError
        If a name, a file or an option cannot be used, or the model has layers that take turns.
    """
    spec = cluster if isinstance(cluster, MixedClusterSpec) else read_mixed_cluster(cluster)
    if gpus is not None and gpus != spec.gpus:
        raise InputError(
            f"the parts of {spec.name} have {spec.gpus} GPUs together; say in its file how many each has",
            where="gpus",
            value=gpus,
        )
    for name, plain in _NOT_MIXED.items():
        if options.pop(name, plain) not in (plain, None, (), ""):
            raise InputError(
                "not for a mixed cluster: plan on one of its parts to ask for this",
                where=name.replace("_", "-"),
            )
    if "idle-gpus" in str(options.get("forbid", "")):
        raise InputError(
            "a plan on a mixed cluster may leave a part idle: forbid it on one part to ask for this",
            where="forbid",
            value="idle-gpus",
        )
    asked = (options.get("allow", ()), options.get("pin", ()))
    offloads = {"offload_modules": "activation-offload", "parameter_offload": "parameter-offload"}
    for pin, allowed in offloads.items():
        if allowed in str(asked) or pin in str(asked):
            what = "not for a mixed cluster: plan on one of its parts to offload activations or parameters"
            raise InputError(what, where="allow", value=allowed)
    time_limit_s = options.pop("time_limit_s", None)
    parts = []
    for part in spec.parts:
        own = read_request(model=model, cluster=part.cluster, gpus=part.gpus, **options)
        if is_irregular(own.cluster):
            raise InputError(
                "a part of a mixed cluster has equal nodes, without a list of them and without other jobs",
                where="parts",
                value=part.cluster.name,
            )
        if own.cluster.host_memory_gib is not None:
            raise InputError(
                "is not kept to by plans on a mixed cluster, which say what hosts hold: leave it out",
                where=f"{part.cluster.name}: host_memory_gib",
                value=own.cluster.host_memory_gib,
            )
        parts.append(own)
    _refuse_what_no_pipeline_takes(parts[0])
    return MixedRequest(cluster=spec, parts=tuple(parts), time_limit_s=time_limit_s)


def _refuse_what_no_pipeline_takes(request: PlanRequest) -> None:
    """Raises InputError for models whose layers differ, and for frameworks without uneven pipelines.

    Dense layers before those with experts are taken: their ways over the first ranks are tried one by one.
    """
    model = request.model
    if model.layers_in_group > 1 or model.hybrid_pattern is not None:
        raise InputError(
            "a pipeline through a mixed cluster takes layers that are all alike but for dense ones in front, "
            "and this model's take turns; plan it on one part at a time",
            where="model",
            value=model.name,
        )
    if model.moe_layers and model.dense_layers > MOST_LEADING:
        raise InputError(
            f"a pipeline through a mixed cluster takes up to {MOST_LEADING} dense layers before those with "
            f"experts, and this model has {model.dense_layers}; plan it on one part at a time",
            where="model",
            value=model.name,
        )
    able = [each.name for each in RECORDS if "pp" in planned(each.axes) and each.uneven_stages]
    if request.framework not in able:
        raise InputError(
            "a mixed cluster asks for a pipeline with as many layers on each rank as its device takes, which "
            "this framework has not",
            where="framework",
            value=request.framework,
            allowed=able,
        )


# The document of a plan on a mixed cluster: what `plan --json` prints for a cluster file with parts.


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NOT_MEASURED = "the widest of its parts' bands; no pipeline through unlike devices was measured"
"""What the band of a pipeline through parts rests on."""


class RankDoc(ClosedDocument):
    """One pipeline rank."""

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


class AloneDoc(ClosedDocument):
    """The best plan on one part, the others idle."""

    part: str
    device: str
    gpus: int
    status: Status
    step_time_s: Seconds | None
    lower_bound_s: float | None


class MixedSolverDoc(ClosedDocument):
    """How the answer was found."""

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


class MixedPredicted(ClosedDocument):
    """What the cost model expects of a pipeline through several parts."""

    step_time_s: Seconds
    breakdown_s: dict[str, float]
    """Named parts that add up to `step_time_s`."""
    tokens_per_s: float
    mfu: float
    """Of the peaks of all GPUs in use together."""
    host_memory_gib: float | None = None
    """What the host of a node holds of the optimizer where it is offloaded, on the part that holds most."""
    error_band: ErrorBandDoc


class MixedPlan(ClosedDocument):
    """The fastest plan on a mixed cluster: a pipeline through parts of it, or a plan on one part alone."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    kind: Literal["mixed-plan"] = "mixed-plan"
    status: Status
    objective: Objective
    runs_on: list[str]
    """The parts along the pipeline; one where a part alone is fastest; empty where nothing fits."""
    layout: LayoutDoc | None
    """Null where a part alone is fastest: its own plan has it."""
    execution: ExecutionDoc | None
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


# Plans on mixed clusters as YAML texts, and back.


MIXED_FILE = "mixed_plan.yaml"


def mixed_text(plan: MixedPlan) -> str:
    """The text of `mixed_plan.yaml`; `read_mixed_plan` gives the plan back."""
    return document_text(mixed_document(plan))


def mixed_plan_path(path: Path) -> Path | None:
    """The file of a plan on a mixed cluster that a user names; None where it is another plan or none.

    Parameters
    ----------
    path
        A file, or a folder: of a folder that has a `plan.yaml`, that is meant.
    """
    file = plan_path(path)
    if file != path and not is_file(str(file)):
        file = path / MIXED_FILE
    # The word first: the plan of a large cluster takes long to parse, and is parsed again as a plan.
    if not is_file(str(file)) or MIXED_KIND not in read_text(file, LARGE_FILE_BYTES):
        return None
    return file if read_mapping(file, LARGE_FILE_BYTES).get("kind") == MIXED_KIND else None


def read_mixed_plan(path: str | PathLike[str]) -> MixedPlan:
    """The plan on a mixed cluster that a file holds.

    Parameters
    ----------
    path
        A `mixed_plan.yaml`, or saved `plan --json` output.

    Raises
    ------
    InputError
        If there is no such file, or what it holds is no such plan.
    """
    where = path_text(Path(path))
    data = read_mapping(Path(path), LARGE_FILE_BYTES)
    if data.get("kind") != MIXED_KIND:
        raise InputError(
            "this is no plan on a mixed cluster; give the mixed_plan.yaml that `meshwright plan -o DIR` "
            "writes for a cluster file with parts",
            where=where,
            value=data.get("kind"),
        )
    try:
        return MixedPlan.model_validate(data)
    except ValidationError as error:
        raise InputError(validation_message(error, where, MixedPlan)) from None


def read_mixed_answer(path: str | PathLike[str]) -> MixedPlan:
    """The plan of a file, as `read_mixed_plan` reads it, that says what is fastest.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If it says that nothing fits, or that nothing was found.
    """
    plan = read_mixed_plan(path)
    if not plan.runs_on:
        raise InfeasibleError(
            f"{path_text(Path(path))}: this plan has no layout, its status is {plan.status}"
        )
    return plan
