"""A fleet from its jobs file to its plans: price every job at every size, share out, place, write."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.cluster_specs.allocation import allocated_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec, NodeSpec
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.launch.plan_files import plan_files
from meshwright.planner.many.batch.engines import local_engine, usable_cores
from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.many.fleet.floor import Floor, floor_of
from meshwright.planner.many.fleet.jobs import FleetJobDoc, read_fleet
from meshwright.planner.many.fleet.model import (
    OBJECTIVES,
    Effort,
    Share,
    Sharing,
    share_over_time,
    share_throughput,
)
from meshwright.planner.many.fleet.options import Choices, Option, candidate_units, useful
from meshwright.planner.many.fleet.pictures import floor_svg, gantt_svg
from meshwright.planner.many.fleet.places import Places, place
from meshwright.planner.plan.document import Plan

Progress = Callable[[int, int], None]
"""Hears (sizes planned, sizes in all)."""


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How a fleet is shared out."""

    cluster: str
    gpus: int | None = None
    objective: str = "throughput"
    busy: tuple[str, ...] = ()
    """Nodes in use already."""
    workers: int | None = None
    cache: Path | None = None
    time_limit_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Who got what."""

    floor: Floor
    objective: str
    jobs: tuple[Choices, ...]
    sharing: Sharing
    places: Places
    cluster: ClusterSpec
    planned: int
    """Plans that were looked at."""
    planning_s: float
    solving_s: float

    def gets(self, at: int) -> tuple[Option | None, Share, tuple[int, ...]]:
        """(size, time, units) of a job."""
        share = self.sharing.shares[at]
        option = None if share.option is None else self.jobs[at].options[share.option]
        return option, share, self.places.units[at]


def run_fleet(path: Path, options: FleetOptions, progress: Progress) -> Fleet:
    """Shares a cluster out among the jobs of a file.

    Raises InputError for bad input, InfeasibleError where there is no way to share.
    """
    if options.objective not in OBJECTIVES:
        raise InputError(
            "unknown objective", where="--objective", value=options.objective, allowed=OBJECTIVES
        )
    cluster = read_cluster(options.cluster, options.gpus)
    floor = floor_of(cluster, allocated_gpus(cluster, options.gpus), options.busy)
    jobs = read_fleet(path, options.cluster)
    if options.objective != "throughput":
        for job in jobs:
            if job.tokens is None:
                what = f"the objective {options.objective} needs the tokens left to train"
                raise InputError(what, where=f"{path}: {job.name}.tokens")
    began = time.monotonic()
    choices, planned = _choices(jobs, floor, options, progress)
    priced = time.monotonic()
    effort = Effort(seed=options.seed, wall_s=options.time_limit_s)
    if options.objective == "throughput":
        sharing = share_throughput(choices, len(floor.units), effort)
    else:
        sharing = share_over_time(choices, len(floor.units), options.objective, effort)
    return Fleet(
        floor=floor,
        objective=options.objective,
        jobs=tuple(choices),
        sharing=sharing,
        places=place(choices, sharing.shares, floor, effort),
        cluster=cluster,
        planned=planned,
        planning_s=priced - began,
        solving_s=time.monotonic() - priced,
    )


def _choices(
    jobs: Sequence[FleetJobDoc], floor: Floor, options: FleetOptions, progress: Progress
) -> tuple[list[Choices], int]:
    """Every job with the sizes at which it has a plan; equal questions are asked once."""
    asked: dict[str, int] = {}
    tasks: list[tuple[int, dict[str, Any]]] = []
    wanted: list[list[tuple[int, int]]] = []
    for job in jobs:
        row = []
        for units in candidate_units(job, floor.gpus_per_unit, len(floor.units)):
            plain = {name: getattr(job, name) for name in JobDoc.model_fields if name != "name"}
            fields = {**plain, "gpus": units * floor.gpus_per_unit, "name": "size"}
            key = json.dumps(fields, sort_keys=True, default=str)
            if key not in asked:
                asked[key] = len(tasks)
                tasks.append((len(tasks), JobDoc(**fields).model_dump(mode="json")))
            row.append((units, asked[key]))
        wanted.append(row)
    cache = str(options.cache.absolute()) if options.cache else None
    engine = local_engine(min(options.workers or usable_cores(), max(1, len(tasks))), cache)
    results: dict[int, dict[str, Any]] = {}
    for position, result in engine(tasks) if tasks else ():
        results[position] = result
        progress(len(results), len(tasks))
    return [_choice(job, row, results) for job, row in zip(jobs, wanted, strict=True)], len(tasks)


def _choice(
    job: FleetJobDoc, row: Sequence[tuple[int, int]], results: Mapping[int, dict[str, Any]]
) -> Choices:
    found = [
        Option(units=units, tokens_per_s=results[at]["row"]["tokens_per_s"], result=results[at])
        for units, at in row
        if results[at]["row"].get("tokens_per_s")
    ]
    if not found:
        why = (
            results[row[-1][1]]["row"]["message"]
            if row
            else "the cluster has fewer free GPUs than min_gpus"
        )
        raise InfeasibleError(f"{job.name}: no plan at any size; at the largest: {why}")
    return Choices(job=job, options=useful(found))


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """The answer as plain data."""
    sharing, places = fleet.sharing, fleet.places
    return {
        "objective": {
            "name": fleet.objective,
            "value": sharing.value,
            "bound": sharing.bound,
            "gap": sharing.gap,
            "status": "optimal" if sharing.proven else "feasible",
        },
        "gpus_per_unit": fleet.floor.gpus_per_unit,
        "units": len(fleet.floor.units),
        "leaves_touched": places.leaves_touched,
        "least_leaves_touched": places.least_leaves,
        "jobs": [_job_document(fleet, at) for at in range(len(fleet.jobs))],
    }


def _job_document(fleet: Fleet, at: int) -> dict[str, Any]:
    job = fleet.jobs[at]
    option, share, units = fleet.gets(at)
    chosen = [fleet.floor.units[unit] for unit in units]
    row = option.result["row"] if option else {}
    scheduled = share.end_s is not None
    late_s = None
    if scheduled and job.job.deadline_h is not None:
        late_s = max(0.0, (share.end_s or 0.0) - job.job.deadline_h * 3600)
    return {
        "name": job.job.name,
        "model": job.job.model,
        "status": "waits" if option is None else "scheduled" if scheduled else "runs",
        "gpus": option.units * fleet.floor.gpus_per_unit if option else 0,
        "tokens_per_s": option.tokens_per_s if option else 0.0,
        "share_of_best": option.tokens_per_s / job.best_tokens_per_s if option else 0.0,
        "step_time_s": row.get("step_time_s"),
        "mfu": row.get("mfu"),
        "start_s": share.start_s if scheduled else None,
        "end_s": share.end_s,
        "late_s": late_s,
        "leaves": sorted({unit.leaf for unit in chosen}),
        "nodes": [name for unit in chosen for name in unit.nodes],
    }


_COLUMNS = (
    "name",
    "model",
    "status",
    "gpus",
    "tokens_per_s",
    "share_of_best",
    "step_time_s",
    "mfu",
)
_TIMES = ("start_s", "end_s", "late_s")


def fleet_files(fleet: Fleet) -> dict[str, str]:
    """Texts by name: the answer, its pictures, and the plan and launch files of every job that runs."""
    document = fleet_document(fleet)
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_COLUMNS, *_TIMES, "leaves", "nodes"])
    for job in document["jobs"]:
        plain = ["" if job[name] is None else job[name] for name in (*_COLUMNS, *_TIMES)]
        writer.writerow([*plain, " ".join(job["leaves"]), " ".join(job["nodes"])])
    files = {
        "fleet.json": json.dumps({"schema": 1, **document}, indent=1) + "\n",
        "fleet.csv": stream.getvalue(),
        "floor.svg": floor_svg(document, fleet.floor, fleet.places.units),
    }
    if fleet.objective != "throughput":
        files["gantt.svg"] = gantt_svg(document, len(fleet.floor.units) * fleet.floor.gpus_per_unit)
    for at, job in enumerate(fleet.jobs):
        option, _, units = fleet.gets(at)
        if option is not None:
            for name, text in plan_files(_on_its_nodes(fleet, option, units)).items():
                files[f"plans/{job.job.name}/{name}"] = text
    return files


def _on_its_nodes(fleet: Fleet, option: Option, units: tuple[int, ...]) -> Plan:
    """The plan of a size, on the nodes that the job got."""
    plan = Plan.model_validate(yaml.safe_load(option.result["files"]["plan.yaml"]))
    chosen = [fleet.floor.units[unit] for unit in units]
    nodes = tuple(
        NodeSpec(name=name, leaf=unit.leaf, pod=unit.pod) for unit in chosen for name in unit.nodes
    )
    fields = {"nodes": nodes, "gpus": len(nodes) * fleet.cluster.gpus_per_node, "elastic": False}
    inputs = plan.inputs.model_copy(update={"cluster": fleet.cluster.model_copy(update=fields)})
    return plan.model_copy(update={"inputs": inputs})
