"""The jobs of a fleet: what a batch job has, and what the sharing needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from meshwright.errors import InputError
from meshwright.planner.many.batch.jobs import Job, JobDoc, read_jobs

MOST_FLEET_JOBS = 500
HOURS_PER_DAY = 24
Gpus = Annotated[int, Field(ge=1, le=1_048_576)]


class FleetJobDoc(JobDoc):
    """A job that shares the cluster. `gpus` fixes its size; `cluster` is the shared one, or left out."""

    cluster: str = ""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """What the job at its fastest counts, against others of its priority."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Jobs of higher priority are served first, whatever that costs the others."""
    min_gpus: Gpus | None = None
    max_gpus: Gpus | None = None
    tokens: Annotated[float, Field(gt=0, le=1e18)] | None = None
    """Left to train; the objectives makespan and deadlines need it."""
    deadline_h: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Hours from now."""
    may_wait: bool = False
    """Whether the job may get nothing now; under makespan and deadlines every job may start later."""


def read_fleet(
    path: Path,
    cluster: str,
    calibration: Path | None = None,
    budget: Mapping[str, float | None] | None = None,
) -> list[FleetJobDoc]:
    """The jobs of a fleet, on its cluster. Raises InputError with every mistake.

    `calibration` is the stack file of those that name none; `budget` has their tokens, their days, which are
    deadlines, and the price of a GPU hour.
    """
    jobs = read_jobs(path, FleetJobDoc, calibration, budget)
    mistakes = [words for job in jobs if (words := _mistake(job, str(path), cluster))]
    if mistakes:
        raise InputError("\n".join(mistakes[:20]))
    if len(jobs) > MOST_FLEET_JOBS:
        what = f"at most {MOST_FLEET_JOBS} jobs share a cluster"
        raise InputError(what, where=str(path), value=len(jobs))
    return [_on(cluster, job.document) for job in jobs if isinstance(job.document, FleetJobDoc)]


def _on(cluster: str, job: FleetJobDoc) -> FleetJobDoc:
    size = {} if job.gpus is None else {"min_gpus": job.gpus, "max_gpus": job.gpus, "gpus": None}
    deadline_h = job.deadline_h
    if deadline_h is None and job.days is not None:
        deadline_h = HOURS_PER_DAY * job.days
    return job.model_copy(update={"cluster": cluster, "deadline_h": deadline_h, **size})


def _mistake(job: Job, where: str, cluster: str) -> str | None:
    document = job.document
    if not isinstance(document, FleetJobDoc):
        return job.mistake
    place = f"{where}: {job.name}"
    if document.cluster and job.fields.get("cluster") != cluster and document.cluster != cluster:
        return f"{place}.cluster: {document.cluster!r} is not the shared cluster, {cluster!r}; leave it out"
    if document.gpus is not None and (document.min_gpus or document.max_gpus):
        return f"{place}.gpus: a fixed size leaves no room for min_gpus and max_gpus; give one or the other"
    if document.min_gpus and document.max_gpus and document.min_gpus > document.max_gpus:
        return f"{place}.min_gpus: {document.min_gpus} is more than max_gpus {document.max_gpus}"
    return None
