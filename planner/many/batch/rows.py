"""A row of a batch's results: what was asked, how it ended, and the figures of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc, Predicted


class JobRow(BaseModel):
    """The columns of results.csv, results.json and results.parquet; what there is none of is null."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    status: str
    """That of the plan, or `failed`."""
    model: str | None = None
    cluster: str | None = None
    gpus: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    framework: str | None = None
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    """Of the fullest GPU."""
    host_memory_gib: float | None = None
    """Of a node, for what is offloaded; null where nothing is."""
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    zero_stage: int | None = None
    shard_groups: int | None = None
    optimizer_offload: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    tokens: float | None = None
    """Of the whole training."""
    days: float | None = None
    """That the training takes."""
    gpu_hours: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""
    days_late: float | None = None
    """Past the days that were asked for; null without a deadline."""
    message: str = ""
    """Why there is no plan."""


COLUMNS = tuple(JobRow.model_fields)
_ASKED = tuple(
    name for name in COLUMNS if name in JobDoc.model_fields and name not in ("name", "days")
)
_CHOSEN = tuple(name for name in COLUMNS if name in LayoutDoc.model_fields)
_PREDICTED = tuple(name for name in COLUMNS if name in Predicted.model_fields)


def column_type(name: str) -> type:
    """The type of a column's values, beside null: str, int or float."""
    annotation = JobRow.model_fields[name].annotation
    for kind in (str, int, float):
        if annotation is kind or kind in get_args(annotation):
            return kind
    raise TypeError(f"column {name} is of type {annotation}")


def failed_row(fields: Mapping[str, Any], message: str) -> dict[str, Any]:
    """The row of a job without an answer.

    Parameters
    ----------
    fields
        Of the job as its author wrote them; values of a wrong type are left out of the row.
    message
        What went wrong.
    """
    fitting = {
        name: fields[name] for name in _ASKED if isinstance(fields.get(name), column_type(name))
    }
    row = JobRow(**fitting, name=str(fields["name"]), status="failed", message=message)
    return row.model_dump()


def job_row(job: JobDoc, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a job: what it asks for, under its own names, and the figures of its answer."""
    fields = {name: getattr(job, name) for name in _ASKED}
    return JobRow(**{**fields, **figures, "name": job.name}).model_dump()


def plan_figures(plan: Plan) -> dict[str, Any]:
    """What a row says of a plan, without the names that its job has for things."""
    figures = {"status": plan.status, "gpus": plan.inputs.gpus, **plan.objective.model_dump()}
    if plan.infeasible is not None:
        changes = [f"or {change}" for change in plan.infeasible.smallest_changes]
        figures["message"] = "; ".join([*plan.infeasible.conflict, *changes])
    layout, predicted = plan.layout, plan.predicted
    if layout is not None and predicted is not None:
        figures |= {name: getattr(layout, name) for name in _CHOSEN}
        figures |= {name: getattr(predicted, name) for name in _PREDICTED}
        tokens = plan.inputs.global_batch * plan.inputs.seq_len
        figures["tokens_per_s"] = tokens / predicted.step_time_s
        figures["peak_memory_gib"] = max(predicted.memory_gib)
    return figures
