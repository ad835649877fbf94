"""Plans as YAML and JSON texts, and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshwright.constraints.registry import findings
from meshwright.constraints.rule import Finding, FinishedPlan, spans_of
from meshwright.costmodel.estimate import Estimate, estimate_layout, stage_memory_gib
from meshwright.costmodel.layout import AXES, Layout, Placement, StagedPlacement
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.schedules import schedule_name, schedule_named, traits
from meshwright.costmodel.workload import Workload
from meshwright.documents import (
    LARGE_FILE_BYTES,
    finite,
    path_of,
    path_text,
    read_mapping,
    validated,
)
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.bounds.exact_cost import Matrix, Priced, Stages
from meshwright.planner.bounds.mappings import Matrices
from meshwright.planner.mapping.counted import counted_placement
from meshwright.planner.mapping.slots import Place
from meshwright.planner.plan.document import MOST_LISTED_RANKS, Mapping, Plan
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.prediction import planned_workload
from meshwright.planner.runs.run_terms import LayoutDoc, layout_from_document

MOST_RANKS = 1_048_576
NO_PLAN = "this is not a plan; give the plan.yaml that `meshwright plan -o DIR` writes"
MIXED_KIND = "mixed-plan"
"""What the document of a plan on a mixed cluster calls itself; `planner.mixed` reads it."""
MIXED_FILE = "mixed_plan.yaml"
_DUMPER: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PlainDumper(_DUMPER):  # type: ignore[misc]
    """Writes a shared value out each time: the readers of this project accept no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def plan_document(plan: Plan, most_ranks: int = MOST_LISTED_RANKS) -> dict[str, Any]:
    """A plan as plain data, its `schema` first; what has no number (NaN, infinity) is None.

    A mapping of more than `most_ranks` ranks is left out: it lies in a file.

    Parameters
    ----------
    plan
        Of any status.
    most_ranks
        That a mapping may list, from 0.
    """
    data: dict[str, Any] = plan.model_dump(mode="json", by_alias=True)
    mapping = data["mapping"]
    if mapping is not None and (mapping["ranks"] is None or len(mapping["ranks"]) > most_ranks):
        del mapping["ranks"]
    cleaned: dict[str, Any] = finite(data)
    return cleaned


def plan_text(plan: Plan) -> str:
    """The text of `plan.yaml`; `read_plan` gives the plan back.

    Parameters
    ----------
    plan
        Of any status; up to `MOST_RANKS` ranks are listed.
    """
    data = plan_document(plan, most_ranks=MOST_RANKS)
    # Keys that say nothing make the file longer than a person wants to read.
    data["inputs"] = _without_nulls(data["inputs"])
    return document_text(data)


def document_text(data: dict[str, Any]) -> str:
    """Plain data as YAML without aliases, its keys in their order.

    Parameters
    ----------
    data
        Mappings, lists, texts, numbers, truth values and None.
    """
    text: str = yaml.dump(
        data,
        Dumper=_PlainDumper,
        sort_keys=False,
        default_flow_style=None,
        width=110,
        allow_unicode=True,
    )
    return text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def read_plan(path: str | PathLike[str]) -> Plan:
    """The plan that a file holds.

    Parameters
    ----------
    path
        A `plan.yaml`, its folder, or saved `plan --json` output.

    Returns
    -------
    Plan
        Its parts fit together.

    Raises
    ------
    InputError
        If there is no such file, or what it holds is no plan or contradicts itself.
    """
    path = plan_path(path_of(path, "plan"))
    where = path_text(path)
    if path.suffix in (".sh", ".toml"):
        what = "`estimate FILE --from-launch` reads what a framework is started with"
        raise InputError(f"{NO_PLAN}; {what}", where=where)
    data = read_mapping(path, LARGE_FILE_BYTES)
    if data.get("kind") == MIXED_KIND:
        what = (
            "this is a plan on a mixed cluster, which `verify`, `explain`, `report`, `launch`, `map`, "
            "`compare`, `trace` and `traffic` read; what was asked takes a plan on one kind of device"
        )
        raise InputError(what, where=where)
    if "status" not in data or "solver" not in data:
        raise InputError(NO_PLAN, where=where, value=data)
    if data.get("schema") != 1:
        raise InputError(
            "must be 1, the version that this program reads",
            where=f"{where}: schema",
            value=data.get("schema"),
        )
    plan = validated(Plan, data, where)
    for path_in_plan, wrong in _contradictions(plan):
        raise InputError(wrong, where=f"{where}: {path_in_plan}")
    return plan


def plan_path(path: Path) -> Path:
    """The `plan.yaml` of a folder, or its `mixed_plan.yaml` alone; else the path. Raises InputError for an
    impossible path.

    Parameters
    ----------
    path
        Of a file or a folder, which need not exist.
    """
    try:
        if not path.is_dir():
            return path
        own, mixed = path / "plan.yaml", path / MIXED_FILE
        return mixed if mixed.is_file() and not own.is_file() else own
    except (OSError, ValueError):
        raise InputError("no such file", where=path_text(path)) from None


def read_feasible_plan(path: str | PathLike[str]) -> Plan:
    """The plan of a file, as `read_plan` reads it, that has a layout.

    Parameters
    ----------
    path
        As `read_plan` takes it.

    Raises
    ------
    InputError
        If the file cannot be used.
    InfeasibleError
        If its plan has no layout.
    """
    plan = read_plan(path)
    if plan.layout is None:
        reasons = plan.infeasible.conflict if plan.infeasible is not None else []
        because = f", because these exclude every layout: {', '.join(reasons)}" if reasons else ""
        what = f"this plan has no layout, its status is {plan.status}{because}"
        raise InfeasibleError(f"{path_text(Path(path))}: {what}")
    return plan


def _schedule_contradictions(layout: LayoutDoc) -> Iterator[tuple[str, str]]:
    """The same for the schedule."""
    schedule = schedule_named(layout.schedule)
    if schedule_name(schedule, layout.vpp) != layout.schedule or (schedule and layout.pp == 1):
        yield (
            "layout.schedule",
            f"{layout.schedule} does not go with pp {layout.pp} and vpp {layout.vpp}",
        )
    elif schedule and (
        shape := traits(schedule).faults(layout.pp, layout.vpp, layout.num_micro_batches)
    ):
        yield "layout.schedule", "; ".join(shape)


def _mapping_contradictions(
    plan: Plan, layout: LayoutDoc, mapping: Mapping
) -> Iterator[tuple[str, str]]:
    """The same for the mapping of a layout."""
    if mapping.matrix:
        rows = {axis: mapping.matrix.get(axis, []) for axis in AXES}
        shapes = {axis: (len(row), math.prod(row)) for axis, row in rows.items()}
        if shapes != {axis: (len(mapping.levels), getattr(layout, axis)) for axis in AXES}:
            yield (
                "mapping.matrix",
                f"must have a factor of {', '.join(AXES)} for each of mapping.levels",
            )
    if mapping.ranks is not None:
        gpus, cluster = layout.gpus, plan.inputs.cluster
        nodes, per_node = cluster.node_count, cluster.gpus_per_node
        are_places = (0 <= at < nodes and 0 <= gpu < per_node for at, gpu in mapping.ranks)
        if len(mapping.ranks) != gpus or not all(are_places):
            yield "mapping.ranks", f"must be {gpus} places, of {nodes} nodes of {per_node} GPUs"


def _contradictions(plan: Plan) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) where parts of a plan that was edited by hand do not fit together."""
    layout, inputs, predicted, mapping = plan.layout, plan.inputs, plan.predicted, plan.mapping
    if layout is None:
        if predicted is not None or mapping is not None:
            yield "layout", "null, but there is a prediction or a mapping of it"
        return
    gpus = layout.gpus
    if not gpus <= inputs.gpus <= inputs.cluster.gpus:
        yield (
            "layout",
            f"{gpus} GPUs (tp cp pp dp), inputs.gpus {inputs.gpus}, the cluster {inputs.cluster.gpus}",
        )
    if (layout.tp * layout.cp * layout.dp) % layout.expert_group:
        yield "layout.ep", "ep * etp must divide tp * cp * dp"
    if layout.micro_batch * layout.dp * layout.num_micro_batches != inputs.global_batch:
        yield (
            "layout.num_micro_batches",
            "micro_batch * dp * num_micro_batches must be inputs.global_batch",
        )
    if [len(rank) for rank in layout.stages] != [layout.vpp] * layout.pp or min(
        map(min, layout.stages)
    ) < 0:
        yield "layout.stages", f"must be {layout.pp} ranks (pp) of {layout.vpp} layer counts (vpp)"
    yield from _schedule_contradictions(layout)
    if sum(map(sum, layout.stages)) != inputs.model.layers:
        yield "layout.stages", f"must add up to the model's {inputs.model.layers} layers"
    if predicted is not None:
        if len(predicted.memory_gib) != layout.pp or len(predicted.memory_parts_gib) not in (
            0,
            layout.pp,
        ):
            yield (
                "predicted.memory_gib",
                f"must have {layout.pp} entries, one of each pipeline stage",
            )
        if not predicted.step_time_s > 0 or not predicted.breakdown_s:
            yield "predicted", "must have a step time above 0 and its parts"
    if mapping is not None:
        yield from _mapping_contradictions(plan, layout, mapping)


# Where the groups of a plan document lie, as the cost model reads it.


def workload_of_plan(plan: Plan) -> Workload:
    """What the cost model prices of a plan, run as it says, on all GPUs that were asked for.

    Parameters
    ----------
    plan
        Of any status.
    """
    return planned_workload(plan.inputs, plan.execution)


def matrix_arrays(matrix: Matrix) -> Matrices:
    """A parallelism matrix as the cost model reads it.

    Parameters
    ----------
    matrix
        Factors of each axis by level, from the inside out.
    """
    return {axis: np.asarray(row, dtype=np.int64) for axis, row in matrix.items()}


def group_placement(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    matrix: Matrix,
    ranks: Sequence[Place] | None,
) -> Placement:
    """Where groups lie: by the matrix, or rank by rank where there is none.

    Parameters
    ----------
    workload
        On the GPUs that the layout uses.
    layout
        Plain integers.
    stages
        Layers of each [pipeline rank][virtual stage].
    matrix
        Factors of each axis by level; empty where ranks are placed one by one.
    ranks
        (node, local GPU) of every rank in the order tp, cp, dp, pp; None with a matrix.
    """
    if matrix or ranks is None:
        return placement_on(workload.cluster, layout, matrix_arrays(matrix))
    return counted_placement(workload.cluster, layout, ranks)


def with_stages(placement: Placement, stage_ep: Sequence[Sequence[int]] | None) -> Placement:
    """A placement with what a plan says of its stages, if it says anything.

    Parameters
    ----------
    placement
        Of the whole plan.
    stage_ep
        Members of an expert group in one block, [stage][level]; None where all stages have those of the
        placement.
    """
    if stage_ep is None:
        return placement
    return StagedPlacement(**vars(placement), stage_ep=np.array(stage_ep, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train a model: a layout on its workload, its split of the layers and its groups' places."""

    workload: Workload
    """On as many GPUs as the layout has."""
    layout: Layout
    """Plain integers."""
    stages: Stages
    """Transformer layers of each [pipeline rank][virtual stage]."""
    placement: Placement

    @staticmethod
    def of_priced(workload: Workload, best: Priced) -> Setup:
        """What a search priced, as it is mapped.

        Parameters
        ----------
        workload
            On the GPUs that the layout uses, run as the plan runs it.
        best
            With a matrix, or with the GPU of every rank.
        """
        placement = group_placement(workload, best.layout, best.stages, best.matrix, best.ranks)
        placement = with_stages(placement, best.stage_ep)
        return Setup(workload=workload, layout=best.layout, stages=best.stages, placement=placement)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return round(self.workload.tokens_per_step)

    @property
    def estimate(self) -> Estimate:
        """The price with all its parts."""
        return estimate_layout(self.workload, self.layout, self.placement, self.stages)

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return float(np.asarray(self.estimate.step_time_s))

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Peak on one GPU of each pipeline rank."""
        memory = stage_memory_gib(self.workload, self.layout, self.stages)
        return tuple(float(gib) for gib in memory)

    def broken_rules(
        self, *, without: Collection[str] = (), cut_use: float | None = None
    ) -> list[Finding]:
        """Rules of arithmetic, hardware and framework that the setup breaks.

        Parameters
        ----------
        without
            Names of rules that are not asked.
        cut_use
            As `FinishedPlan` has it.
        """
        finished = FinishedPlan(
            workload=self.workload,
            layout=self.layout,
            stages=self.stages,
            memory_gib=self.memory_gib,
            spans=spans_of(self.placement),
            cut_use=cut_use,
        )
        return list(findings(finished, without=without))


def setup_of(plan: Plan, workload: Workload | None = None) -> Setup:
    """A plan that has a layout, as it stands.

    Parameters
    ----------
    plan
        Finished, with a mapping.
    workload
        What it is priced on instead of its own inputs.
    """
    priced = priced_of(plan)
    workload = workload or workload_of_plan(plan)
    return Setup.of_priced(workload.on(int(priced.layout.gpus)), priced)


def priced_of(plan: Plan) -> Priced:
    """A plan that has a layout, as a search found it.

    Parameters
    ----------
    plan
        With a mapping.
    """
    assert plan.layout is not None
    assert plan.mapping is not None
    matrix = {axis: tuple(row) for axis, row in plan.mapping.matrix.items()}
    ranks, stage_ep = plan.mapping.ranks, plan.mapping.stage_ep
    return Priced(
        layout=layout_from_document(plan.layout),
        matrix=matrix,
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        step_time_s=plan.objective.step_time_s or 0.0,
        ranks=None if matrix or ranks is None else tuple(ranks),
        stage_ep=None if stage_ep is None else tuple(map(tuple, stage_ep)),
        execution=plan.execution or PlanRequest.of_inputs(plan.inputs).plainest,
    )
