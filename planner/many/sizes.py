"""What a fleet's jobs can choose from: sizes, and what each job makes of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from meshwright.cluster_specs.allocation import node_name
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, near_miss
from meshwright.planner.many.jobs import Job, JobDoc, read_jobs

# The jobs of a fleet: what a batch job has, and what the sharing needs to know.


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


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """A job on so many units."""

    units: int
    tokens_per_s: float
    result: dict[str, Any]
    """The row and the files of its plan."""


@dataclass(frozen=True, kw_only=True)
class SizedJob:
    """A job and the sizes at which it has a plan, in rising order; larger ones are faster."""

    job: FleetJobDoc
    sizes: tuple[JobSize, ...]

    @property
    def best_tokens_per_s(self) -> float:
        """At its fastest size."""
        return max(size.tokens_per_s for size in self.sizes)

    def train_s(self, size: int) -> float:
        """Seconds that the job's tokens take at one of its sizes, by index."""
        assert self.job.tokens is not None
        return self.job.tokens / self.sizes[size].tokens_per_s


@dataclass(frozen=True, kw_only=True)
class UnplannedJob:
    """A job without a plan at any of its sizes: the others are shared out without it."""

    job: FleetJobDoc
    status: str
    """`infeasible`, `failed`, or `unknown` where the time limit came first."""
    reason: str


def sized_job(
    job: FleetJobDoc, answers: Sequence[tuple[int, dict[str, Any]]], asked: int
) -> SizedJob | UnplannedJob:
    """A job with the sizes at which it has a plan, or why it has none.

    Parameters
    ----------
    job
        As the file has it.
    answers
        (units, result of the plan) of the sizes that were answered, in rising order.
    asked
        Sizes that were to be answered.
    """
    sizes = [
        JobSize(units=units, tokens_per_s=result["row"]["tokens_per_s"], result=result)
        for units, result in answers
        if result["row"].get("tokens_per_s")
    ]
    if sizes:
        return SizedJob(job=job, sizes=faster_sizes(sizes))
    if not asked:
        reason = "the cluster has fewer free GPUs than min_gpus"
        return UnplannedJob(job=job, status="infeasible", reason=reason)
    if len(answers) < asked or any(result["row"]["status"] == "unknown" for _, result in answers):
        reason = "the time limit came before any plan; plans that were made are in the cache"
        return UnplannedJob(job=job, status="unknown", reason=reason)
    row = answers[-1][1]["row"]
    reason = f"no plan at any size; at the largest: {row['message']}"
    return UnplannedJob(job=job, status=row["status"], reason=reason)


def candidate_units(job: FleetJobDoc, gpus_per_unit: int, most_units: int) -> tuple[int, ...]:
    """Sizes to plan, in units: 1, 2, 3, 4, 6, 8, 12, 16, ... and the job's own limits."""
    low = -(-(job.min_gpus or 1) // gpus_per_unit)
    high = most_units
    if job.max_gpus is not None:
        high = min(most_units, job.max_gpus // gpus_per_unit)
    sizes = {low, high}
    for power in range(high.bit_length()):
        sizes |= {1 << power, 3 << power}
    return tuple(sorted(size for size in sizes if low <= size <= high))


def faster_sizes(sizes: Sequence[JobSize]) -> tuple[JobSize, ...]:
    """In rising order, without the sizes at which a smaller one is as fast."""
    faster: list[JobSize] = []
    for size in sorted(sizes, key=lambda size: (size.units, -size.tokens_per_s)):
        if not faster or size.tokens_per_s > faster[-1].tokens_per_s:
            faster.append(size)
    return tuple(faster)


# What a fleet shares out: whole nodes, or whole NVLink domains, and where they hang.


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The least that a job can get: a node, or the nodes of an NVLink domain."""

    nodes: tuple[str, ...]
    leaf: str
    pod: str


@dataclass(frozen=True, kw_only=True)
class FreeUnits:
    """The free units of a cluster, in its order."""

    gpus_per_unit: int
    units: tuple[Unit, ...]

    @property
    def by_leaf(self) -> dict[str, list[int]]:
        """Units by leaf, as indices into `units`."""
        leaves: dict[str, list[int]] = {}
        for index, unit in enumerate(self.units):
            leaves.setdefault(unit.leaf, []).append(index)
        return leaves

    @property
    def pod_of(self) -> dict[str, str]:
        """The pod of each leaf."""
        return {unit.leaf: unit.pod for unit in self.units}


@dataclass(frozen=True)
class _Node:
    name: str
    free_gpus: int
    leaf: str
    pod: str


def free_units(cluster: ClusterSpec, gpus: int, busy: Collection[str] = ()) -> FreeUnits:
    """The units that are wholly free.

    Parameters
    ----------
    cluster
        With its nodes, or a kind of node.
    gpus
        The first so many GPUs are looked at.
    busy
        Names of nodes in use already; their units are left out.

    Raises
    ------
    InputError
        For a busy node that there is not, or if nothing is free.
    """
    per_node = cluster.gpus_per_node
    gpus_per_unit = max(per_node, cluster.nvlink_domain)
    nodes_per_unit = gpus_per_unit // per_node
    nodes = _nodes(cluster, gpus)
    names = {node.name for node in nodes}
    for name in busy:
        if name not in names:
            hint = near_miss(name, names)
            raise InputError("no such node", where="--busy", value=name, did_you_mean=hint)
    free = [node for node in nodes if node.free_gpus >= per_node][: gpus // per_node]
    units: list[Unit] = []
    for (leaf, pod), group in groupby(free, key=lambda node: (node.leaf, node.pod)):
        together = [node.name for node in group]
        for first in range(0, len(together) - nodes_per_unit + 1, nodes_per_unit):
            members = tuple(together[first : first + nodes_per_unit])
            if not set(members) & set(busy):
                units.append(Unit(nodes=members, leaf=leaf, pod=pod))
    if not units:
        kind = "node" if nodes_per_unit == 1 else "NVLink domain"
        raise InputError(f"no {kind} is wholly free", where=f"cluster {cluster.name}")
    return FreeUnits(gpus_per_unit=gpus_per_unit, units=tuple(units))


def _nodes(cluster: ClusterSpec, gpus: int) -> list[_Node]:
    """The nodes of a cluster; of a kind of node those of the first GPUs."""
    if cluster.nodes:
        return list(_listed_nodes(cluster))
    per_node = cluster.gpus_per_node
    blocks = [level.gpus for level in cluster.levels[:-1]] or [cluster.gpus]
    leaf_gpus = blocks[0]
    pod_gpus = blocks[1] if len(blocks) > 1 else cluster.gpus
    nodes = []
    for index in range(-(-gpus // per_node)):
        first_gpu = index * per_node
        leaf = f"leaf-{first_gpu // leaf_gpus + 1:03d}"
        pod = f"pod-{first_gpu // pod_gpus + 1:02d}"
        nodes.append(_Node(node_name(cluster, index), per_node, leaf, pod))
    return nodes


def _listed_nodes(cluster: ClusterSpec) -> Iterator[_Node]:
    for node in cluster.nodes:
        free = cluster.gpus_per_node if node.free_gpus is None else node.free_gpus
        yield _Node(node.name, free, node.leaf or "fabric", node.pod or "fabric")
