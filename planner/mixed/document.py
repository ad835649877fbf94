"""What is asked of a mixed cluster, and the document of its plan.

The same training runs on each of its parts, and something joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.cluster_specs.reader import MixedClusterSpec, read_cluster, read_mixed_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import free_of
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.footprint import stage_memory_gib, stage_memory_parts_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.losses import ALL_LOGITS
from meshwright.costmodel.mixed import PlacedPart, Segment
from meshwright.costmodel.rank_load import Stages
from meshwright.documents import (
    LARGE_FILE_BYTES,
    ClosedDocument,
    finite,
    is_file,
    left_out_at,
    path_of,
    path_text,
    read_mapping,
    read_text,
    validated,
)
from meshwright.errors import InfeasibleError, InputError, check_choice
from meshwright.frameworks.catalog import DEFAULT_FRAMEWORK, RECORDS, planned
from meshwright.frameworks.record import Framework
from meshwright.model_specs.adapters import EVERY_PARAMETER
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.plan.document import (
    LAYOUT_COLUMNS,
    BaselineDoc,
    CostDoc,
    ExecutionChoice,
    ExecutionDoc,
    ExpectedByPairs,
    LengthsDoc,
    Objective,
    Plan,
    Robustness,
    SoftwareNeed,
    Status,
    TrainingCost,
)
from meshwright.planner.plan.texts import MIXED_KIND, document_text, plan_path, read_feasible_plan
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.request.choices import ALLOW_PLACED
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.request.reader import named_nodes, read_request
from meshwright.planner.runs.run_terms import ErrorBandDoc, LayoutDoc, layout_from_document

MOST_LEADING = 6
"""Dense layers before those with experts: ways to lay them on the first ranks double with each."""
_NOT_MIXED: Mapping[str, object] = {"hybrid_cp": False}
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
    def top_k(self) -> int:
        """How many of the best plans are found, the plan included."""
        return self.first.top_k

    @property
    def plan_alone(self) -> MixedRequest:
        """The same without the next best plans, of the least price, searched as is quickest."""
        plain: dict[str, Any] = {"top_k": 1, "method": "cp-sat", "objective": "nominal"}
        parts = tuple(replace(part, **plain) for part in self.parts)
        return replace(self, parts=parts)

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
        As `read_request` takes them; `nodes` are of all parts.

    Raises
    ------
    InputError
        If a name, a file or an option cannot be used, or the model has too many dense layers in front.
    """
    spec = cluster if isinstance(cluster, MixedClusterSpec) else read_mixed_cluster(cluster)
    nodes = options.pop("nodes", None)
    is_text = nodes is None or isinstance(nodes, str)
    names = named_nodes(nodes, spec.free_by_name) if is_text else list(nodes)
    if names is not None:
        spec = spec.only_nodes(names)
    spec.check_pipeline()
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
    if ALLOW_PLACED[0] in str(options.get("allow", ())):
        what = (
            "not for a mixed cluster, where experts keep their own order: plan on one of its parts"
        )
        raise InputError(what, where="allow", value=ALLOW_PLACED[0])
    offloads = {"offload_modules": "activation-offload", "parameter_offload": "parameter-offload"}
    for pin, allowed in offloads.items():
        if allowed in str(asked) or pin in str(asked):
            what = "not for a mixed cluster: plan on one of its parts to offload activations or parameters"
            raise InputError(what, where="allow", value=allowed)
    if options.get("objective") == "expected" and options.get("calibration") is not None:
        what = (
            "not for a mixed cluster with --calibration, whose posterior is of one kind of device: "
            "leave that out, so that measured pairs of runs say what is expected, or plan on one part"
        )
        raise InputError(what, where="objective", value="expected")
    _refuse_what_no_framework_trains_so(options)
    time_limit_s = options.pop("time_limit_s", None)
    if "top" in options:
        options["top_k"] = options.pop("top")
    parts = []
    for index, part in enumerate(spec.parts):
        free = [node.name for node in part.cluster.nodes if node.free_gpus != 0]
        own = read_request(
            model=model, cluster=part.cluster, gpus=part.gpus, nodes=free or None, **options
        )
        check_part(own.cluster, spec.name_of(index))
        parts.append(own)
    _refuse_what_no_pipeline_takes(parts[0])
    return MixedRequest(cluster=spec, parts=tuple(parts), time_limit_s=time_limit_s)


def check_part(cluster: ClusterSpec, name: str) -> None:
    """Raises InputError where a part of this name is no regular one of whole nodes.

    Parameters
    ----------
    cluster
        Of the part, with its nodes where its file lists them.
    name
        What the user calls the part.
    """
    sizes = {free_of(node, cluster.gpus_per_node) for node in cluster.nodes} - {0}
    if is_irregular(cluster) or not sizes <= {cluster.gpus_per_node}:
        raise InputError(
            "a part of a mixed cluster has whole nodes, as many on each leaf, with links that are alike",
            where="parts",
            value=name,
        )


_TRAININGS: Mapping[str, tuple[str, object]] = {
    "train": ("adapters", EVERY_PARAMETER),
    "kind": ("step_kinds", PRETRAINING),
    "loss": ("losses", ALL_LOGITS),
    "reference": ("references", None),
}
"""Options that say what is trained, with the field of a framework's record that has them, and what none asks
for."""


def _able() -> list[Framework]:
    """Frameworks whose pipelines may have any number of layers on each rank."""
    return [each for each in RECORDS if "pp" in planned(each.axes) and each.uneven_stages]


def _refuse_what_no_framework_trains_so(options: Mapping[str, Any]) -> None:
    """Raises InputError for training that no uneven pipeline of the framework is planned for."""
    framework = options.get("framework", DEFAULT_FRAMEWORK)
    for option, (field, plain) in _TRAININGS.items():
        value = options.get(option)
        if value in (None, plain) or not any(value in getattr(each, field) for each in RECORDS):
            continue
        trains = [each.name for each in _able() if value in planned(getattr(each, field))]
        if framework not in trains:
            instead = (
                f"choose --framework {' or '.join(trains)}" if trains else "plan on one part alone"
            )
            what = f"is not planned in a pipeline through unlike parts with {framework}: {instead}"
            raise InputError(what, where=option, value=value)


def _refuse_what_no_pipeline_takes(request: PlanRequest) -> None:
    """Raises InputError for many dense layers in front of alike ones, and for frameworks without uneven
    pipelines.

    Up to `MOST_LEADING` dense layers before those with experts are taken: their ways over the first ranks are
    tried one by one. Of unlike layers each rank has a part of their sequence, with any number of dense ones.
    """
    model = request.model
    if not model.unlike_layers and model.moe_layers and model.dense_layers > MOST_LEADING:
        raise InputError(
            f"a pipeline through a mixed cluster takes up to {MOST_LEADING} dense layers before those with "
            f"experts, and this model has {model.dense_layers}; plan it on one part at a time",
            where="model",
            value=model.name,
        )
    able = [each.name for each in _able()]
    what = (
        "a mixed cluster asks for a pipeline with as many layers on each rank as its device takes, which "
        "this framework has not"
    )
    check_choice(request.framework, able, "framework", what)


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
    """Layouts with pipeline ranks on each part whose bound was below the best plan on a single part; by the
    method exhaustive all of them."""
    priced: int
    """Of these; by the method exhaustive those with a split that fits."""
    method: str = left_out_at("cp-sat")
    """Of the search through parts, and of that on each part."""


class PartBaselineDoc(BaselineDoc):
    """Today's layout on the part that it runs on."""

    part: str
    """Empty where it runs on a cluster that is no part."""


class MixedPredicted(ClosedDocument):
    """What the cost model expects of a pipeline through several parts."""

    step_time_s: Seconds
    breakdown_s: dict[str, float]
    """Named parts that add up to `step_time_s`."""
    tokens_per_s: float
    tokens_per_s_per_gpu: float | None = None
    """The mean over the GPUs in use; null in plans of versions that did not write it, as are the next two."""
    tflops_per_gpu: float | None = None
    """The mean over the GPUs in use, of FLOP that the model asks for."""
    mfu: float
    """Of the peaks of all GPUs in use together."""
    memory_gib: list[float] | None = None
    """Peak on one GPU of each pipeline rank, as in `ranks`."""
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
    expected_by_pairs: ExpectedByPairs | None = left_out_at(None)
    """Where the least expected step was asked; corrections of a pipeline are those of the part where they add
    most."""
    choices: list[ExecutionChoice] | None = left_out_at(None)
    """What each execution choice of a pipeline through parts brings: the best plan without it, on any parts;
    left out where that was not asked."""
    robustness: Robustness | None = left_out_at(None)
    """What becomes of a pipeline through parts where all are off alike; left out where that was not asked."""
    cost: CostDoc | None = None
    """Of the whole training on the parts in use, where its tokens or days were given."""
    baseline: PartBaselineDoc | None = left_out_at(None)
    """What is run today, where it was given; left out of the document where it was not."""
    lengths: LengthsDoc | None = left_out_at(None)
    """Where samples of unlike lengths are packed, of a pipeline through parts."""
    warnings: list[str] = left_out_at([])
    """What the price of such training leaves out or to the run, of a pipeline through parts."""
    alternatives: list[dict[str, object]] = left_out_at([])
    """The next best plans, where these were asked: of a pipeline through parts each layout once, with its
    best split; `runs_on` says on which parts."""
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

    @property
    def memory_gib(self) -> list[float]:
        """Peak on one GPU of each pipeline rank."""
        return [rank.memory_gib for rank in self.ranks]

    @property
    def gpus_in_use(self) -> int:
        """Of all parts that the plan runs on."""
        if self.layout is not None:
            return self.layout.pp * stage_gpus(self.layout)
        return sum(each.gpus for each in self.alone if each.part in self.runs_on)

    def figures(self) -> dict[str, Any]:
        """What a row of results says of it, under the names that an ordinary plan's row has.

        Returns
        -------
        dict
            Status, price, bound and what it runs on; of a pipeline through parts its layout, speed and peak.
        """
        figures: dict[str, Any] = {"status": self.status, "gpus": self.gpus_in_use}
        figures |= {**self.objective.model_dump(), "runs_on": " then ".join(self.runs_on)}
        if self.layout is None or self.predicted is None:
            return figures
        layout, predicted, gpus = self.layout, self.predicted, self.gpus_in_use
        figures |= {name: getattr(layout, name) for name in LAYOUT_COLUMNS}
        step_s, workload = predicted.step_time_s, request_on(self, 0).workload()
        flops = workload.model_flops_per_token * workload.tokens_per_step
        return figures | {
            "tokens_per_s": predicted.tokens_per_s,
            "tokens_per_s_per_gpu": predicted.tokens_per_s / gpus,
            "tflops_per_gpu": flops / step_s / gpus / 1e12,
            "mfu": predicted.mfu,
            "host_memory_gib": predicted.host_memory_gib,
            "peak_memory_gib": max(self.memory_gib),
        }


AnyPlan: TypeAlias = Plan | MixedPlan
"""On one cluster of equal nodes or not, or through parts of a mixed one."""


def mixed_document(plan: MixedPlan) -> dict[str, Any]:
    """A mixed plan as plain data; what has no number (NaN, infinity) is None."""
    cleaned: dict[str, Any] = finite(plan.model_dump(mode="json", by_alias=True))
    return cleaned


# A pipeline through parts as its document has it, for what reads one: segments, and what each rank holds.


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A document whose ranks stand in order, with what the cost model takes of it."""

    plan: MixedPlan
    doc: LayoutDoc
    layout: Layout
    """Plain numbers."""
    stages: Stages
    """Layers of each [pipeline rank][virtual stage]."""

    @classmethod
    def of(cls, plan: MixedPlan) -> Pipeline:
        """The pipeline of a plan that runs through parts. Raises InfeasibleError where it has none.

        Parameters
        ----------
        plan
            Of any status; without a layout it is refused.
        """
        if plan.layout is None:
            raise InfeasibleError(f"the plan has no layout (status {plan.status})")
        return cls(
            plan=plan,
            doc=plan.layout,
            layout=layout_from_document(plan.layout),
            stages=tuple(tuple(rank) for rank in plan.layout.stages),
        )

    @cached_property
    def requests(self) -> list[PlanRequest]:
        """The request on each part of the pipeline, in its order."""
        names = self.plan.cluster.names
        return [request_on(self.plan, names.index(name)) for name in self.plan.runs_on]

    @cached_property
    def segments(self) -> list[Segment]:
        """Each part with the ranks that the document gives it."""
        segments: list[Segment] = []
        for request, name in zip(self.requests, self.plan.runs_on, strict=True):
            own = [rank.rank for rank in self.plan.ranks if rank.part == name]
            workload = request.workload(self.plan.execution)
            part = PlacedPart(
                workload=workload.on(len(own) * stage_gpus(self.doc)),
                layout=self.layout,
                ranks=len(own),
                part_gpus=request.gpus,
                between_gbps_per_gpu=self.plan.cluster.between_gbps_per_gpu,
            )
            segments.append(Segment(part=part, first=own[0]))
        return segments

    @cached_property
    def memory_gib(self) -> list[list[float]]:
        """Peaks of the ranks of each part, on its own device."""
        peaks = (
            stage_memory_gib(each.part.workload, self.layout, self.stages)[each.own]
            for each in self.segments
        )
        return [[float(gib) for gib in own] for own in peaks]

    @cached_property
    def memory_parts_gib(self) -> list[dict[str, float]]:
        """Peaks of each rank by component, as `footprint.stage_memory_parts_gib` names them."""
        rows: list[dict[str, float]] = []
        for each in self.segments:
            parts = stage_memory_parts_gib(each.part.workload, self.layout, self.stages)
            ranks = range(each.own.start, each.own.stop)
            rows += [{name: float(gib[rank]) for name, gib in parts.items()} for rank in ranks]
        return rows


def request_on(plan: MixedPlan, part: int) -> PlanRequest:
    """What was asked, on one part of the cluster, counted from 0.

    Parameters
    ----------
    plan
        Of any status.
    part
        Its place in the cluster file, from 0.
    """
    own = plan.cluster.parts[part]
    return PlanRequest.of_inputs(
        plan.inputs, cluster=read_cluster(own.cluster, own.gpus), gpus=own.gpus
    )


def request_of_parts(plan: MixedPlan, names: Sequence[str] | None = None) -> MixedRequest:
    """What was asked, without a time limit and without the next best plans.

    Parameters
    ----------
    plan
        Of any status.
    names
        The parts that it is asked on, in this order; None for all of the cluster.
    """
    every = plan.cluster.names
    chosen = [every.index(name) for name in names or every]
    chosen_parts = tuple(plan.cluster.parts[part] for part in chosen)
    cluster = plan.cluster.model_copy(update={"parts": chosen_parts})
    parts = tuple(request_on(plan, part) for part in chosen)
    return MixedRequest(cluster=cluster, parts=parts).plan_alone


def inputs_by_part(plan: MixedPlan) -> dict[str, PlanInputs]:
    """What was asked on each part of the cluster, by its name."""
    names = enumerate(plan.cluster.names)
    return {name: request_on(plan, part).inputs() for part, name in names}


def stage_gpus(layout: LayoutDoc) -> int:
    """GPUs of one pipeline rank."""
    return layout.tp * layout.cp * layout.dp


def cost_on_parts(plan: MixedPlan, budget: Budget) -> CostDoc | None:
    """What a whole training takes on the parts in use, each at its own power and price.

    Parameters
    ----------
    plan
        Of any status.
    budget
        Tokens or days of the training, and a price of a GPU hour in place of the parts' own.

    Returns
    -------
    CostDoc or None
        None where there is no plan, or nothing is asked.
    """
    if plan.objective.step_time_s is None:
        return None
    tokens_per_s = plan.inputs.tokens_per_step / plan.objective.step_time_s
    gpus = {each.part: each.gpus for each in plan.alone}
    parts = [
        (gpus[name], part.cluster)
        for name, part in zip(plan.cluster.names, plan.cluster.parts, strict=True)
        if name in plan.runs_on
    ]
    each = [(budget.cost(tokens_per_s, number, cluster), number) for number, cluster in parts]
    costs = [(cost, number) for cost, number in each if cost is not None]
    if not costs:
        return None
    first, total = costs[0][0], sum(number for _, number in costs)
    dollars = [cost.plan.dollars for cost, _ in costs]
    prices = {cost.gpu_hour_price for cost, _ in costs}
    return first.model_copy(
        update={
            "gpu_hour_price": first.gpu_hour_price if len(prices) == 1 else None,
            "gpu_power_w": sum(cost.gpu_power_w * number for cost, number in costs) / total,
            "plan": TrainingCost(
                days=first.plan.days,
                gpu_hours=sum(cost.plan.gpu_hours for cost, _ in costs),
                dollars=None if None in dollars else sum(value or 0.0 for value in dollars),
                kwh=sum(cost.plan.kwh or 0.0 for cost, _ in costs),
            ),
        }
    )


# Plans on mixed clusters as YAML texts, and back.


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
    plan = validated(MixedPlan, data, where)
    for field, what in _contradictions(plan):
        raise InputError(what, where=f"{where}: {field}")
    return plan


def _contradictions(plan: MixedPlan) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) where parts of a pipeline that was edited by hand do not fit together."""
    layout, layers = plan.layout, plan.inputs.model.layers
    if layout is None or not plan.runs_on:
        return
    if plan.predicted is None or plan.execution is None:
        yield "layout", "there is one, but no prediction or no execution of it"
    names = plan.cluster.names
    if not set(plan.runs_on) <= set(names) or [part for part, _ in plan.nodes] != plan.runs_on:
        yield "runs_on", f"must be those of nodes, parts of the cluster: {', '.join(names)}"
    if stage_gpus(layout) % layout.expert_group:
        yield "layout", "degrees of experts must divide tp * cp * dp"
    stages = layout.stages
    if [len(rank) for rank in stages] != [1] * layout.pp or sum(map(sum, stages)) != layers:
        yield (
            "layout.stages",
            f"must be {layout.pp} ranks (pp) of one stage, of {layers} layers together",
        )
    if [rank.rank for rank in plan.ranks] != list(range(layout.pp)):
        yield "ranks", f"must be 0 to {layout.pp - 1}, one of each pipeline rank"
    if [part for part, _ in groupby(rank.part for rank in plan.ranks)] != plan.runs_on:
        yield "ranks", f"must run through {', '.join(plan.runs_on)} (runs_on), in turn"


def read_mixed_answer(path: str | PathLike[str]) -> MixedPlan:
    """The plan of a file, as `read_mixed_plan` reads it, that says what is fastest.

    Parameters
    ----------
    path
        Of a `mixed_plan.yaml`, or of saved `plan --json` output.

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


def read_any_plan(path: str | PathLike[str]) -> AnyPlan:
    """The plan of a file or folder that has a layout: a pipeline through parts, or a plan on one cluster.

    Where a part alone is fastest, that part's own plan is read, which lies beside the `mixed_plan.yaml`.

    Parameters
    ----------
    path
        Of a plan file of either kind, or of the folder that `plan -o` wrote.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If its plan has no layout.
    """
    mixed = mixed_plan_path(path_of(path, "plan"))
    if mixed is None:
        return read_feasible_plan(path)
    plan = read_mixed_answer(mixed)
    if plan.layout is not None:
        return plan
    beside = mixed.parent / "plan.yaml"
    if not is_file(str(beside)):
        what = f"{plan.runs_on[0]} alone is fastest: give the plan.yaml that was written beside this file"
        raise InputError(what, where=path_text(mixed))
    return read_feasible_plan(beside)
