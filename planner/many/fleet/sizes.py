"""What a fleet's jobs can choose from: sizes, and what each job makes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.many.fleet.jobs import FleetJobDoc


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
