"""What a fleet's jobs can choose from: sizes, and what each job makes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.many.fleet.jobs import FleetJobDoc


@dataclass(frozen=True, kw_only=True)
class Option:
    """A job at one size."""

    units: int
    tokens_per_s: float
    result: dict[str, Any]
    """The row and the files of its plan."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A job and the sizes at which it has a plan, in rising order; larger ones are faster."""

    job: FleetJobDoc
    options: tuple[Option, ...]

    @property
    def best_tokens_per_s(self) -> float:
        """At its fastest size."""
        return max(option.tokens_per_s for option in self.options)


def candidate_units(job: FleetJobDoc, gpus_per_unit: int, most: int) -> tuple[int, ...]:
    """Sizes to plan, in units: 1, 2, 3, 4, 6, 8, 12, 16, ... and the job's own limits."""
    low = -(-(job.min_gpus or 1) // gpus_per_unit)
    high = min(most, (job.max_gpus or most * gpus_per_unit) // gpus_per_unit)
    steps = {1 << k for k in range(high.bit_length())} | {3 << k for k in range(high.bit_length())}
    return tuple(sorted(size for size in steps | {low, high} if low <= size <= high))


def useful(options: Sequence[Option]) -> tuple[Option, ...]:
    """Without the sizes at which a smaller one is as fast."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.units, -option.tokens_per_s)):
        if not kept or option.tokens_per_s > kept[-1].tokens_per_s:
            kept.append(option)
    return tuple(kept)
