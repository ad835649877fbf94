"""What `recommend` is asked, and what it answers, also as plain data and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from meshwright.documents.tables import csv_text
from meshwright.planner.many.recommend.picture import SweepDot, sweep_svg

RECOMMENDATION_FILES = ("recommend.json", "sweep.csv", "sweep.svg", "plan")
"""What is written to a folder; some of it only where there is something to say."""


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What is to be reached, on which clusters, and the options of `plan` that hold for all."""

    model: str
    clusters: tuple[str, ...]
    plan: Mapping[str, Any]
    """Fields of a JobDoc, without `model`, `cluster` and `gpus`."""
    step_time_s: float | None = None
    """The target, as seconds of a step; at most one of the two targets."""
    tokens_per_s: float | None = None
    """The target, as tokens per second of all GPUs."""
    most_gpus: int | None = None
    sizes: tuple[int, ...] = ()
    """GPUs to sweep over; halvings of the largest when empty."""
    reserves_gib: tuple[float, ...] = (0.0,)
    """HBM kept free, for the sweep: each makes plans of its own."""
    workers: int | None = None
    """Processes; one for every core when None."""
    cache: Path | None = None
    """Folder of kept answers; None keeps nothing."""

    @property
    def target_s(self) -> float | None:
        """The step time that is asked for, directly or as tokens per second."""
        if self.tokens_per_s is None:
            return self.step_time_s
        tokens: float = self.plan["global_batch"] * self.plan["seq_len"]
        return tokens / self.tokens_per_s


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """The best plan of a cluster at a size: its row of results and its files."""

    cluster: str
    gpus: int
    reserve_gib: float
    usd_per_h: float | None
    row: Mapping[str, Any]
    """As in the results of a batch."""
    files: Mapping[str, str]
    headroom_gib: float | None = None
    """HBM that the plan leaves free on its fullest GPU; None without a plan."""

    @property
    def has_plan(self) -> bool:
        """Whether there is a layout at this size."""
        return bool(self.row.get("step_time_s"))

    @property
    def step_time_s(self) -> float:
        """Infinite without a plan."""
        return self.row.get("step_time_s") or float("inf")

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """What training costs at this speed; None without a price or a plan."""
        tokens_per_s = self.row.get("tokens_per_s")
        if self.usd_per_h is None or not tokens_per_s:
            return None
        return float(self.usd_per_h * 1e9 / (3600 * tokens_per_s))

    def beats(self, other: SizedPlan) -> bool:
        """Whether this one is nowhere worse and somewhere better in step time, GPUs and free memory.

        Any plan beats none.
        """
        if self.headroom_gib is None or other.headroom_gib is None:
            return other.headroom_gib is None and self.headroom_gib is not None
        costs = (self.step_time_s, self.gpus, -self.headroom_gib)
        other_costs = (other.step_time_s, other.gpus, -other.headroom_gib)
        nowhere_worse = all(a <= b for a, b in zip(costs, other_costs, strict=True))
        return nowhere_worse and costs != other_costs


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """For each cluster the fewest GPUs that reach the target, and the sweep."""

    request: SizeRequest
    reached: tuple[SizedPlan, ...] = ()
    """Cheapest first where all have prices, else fewest GPUs first."""
    smaller: Mapping[str, SizedPlan | None] = field(default_factory=dict)
    """By cluster, the next smaller size, which misses the target; None where there is none."""
    missed: tuple[SizedPlan, ...] = ()
    """Clusters that miss the target at their largest size."""
    sweep: tuple[SizedPlan, ...] = ()

    @property
    def front(self) -> tuple[SizedPlan, ...]:
        """Plans of the sweep that no other beats (the Pareto front)."""
        return tuple(
            plan for plan in self.sweep if not any(other.beats(plan) for other in self.sweep)
        )


class SizeRow(BaseModel):
    """A size in `recommend --json` and sweep.csv."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    gpus: int
    reserve_gib: float
    status: str | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    optimizer_offload: int | None = None
    """Percent of the optimizer's states in the hosts' memory."""
    host_memory_gib: float | None = None
    """Of a node, for what is offloaded."""
    gap: float | None = None
    headroom_gib: float | None = None
    usd_per_h: float | None = None
    usd_per_billion_tokens: float | None = None
    tokens: float | None = None
    """Of the whole training."""
    days: float | None = None
    gpu_hours: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    """Of the GPUs at their board power; hosts, network and cooling are left out."""
    pareto: bool = False
    """Whether no other size of the sweep beats it."""


def _row(plan: SizedPlan, front: Sequence[SizedPlan] = ()) -> dict[str, Any]:
    fields = {
        "cluster": plan.cluster,
        "gpus": plan.gpus,
        "reserve_gib": plan.reserve_gib,
        "headroom_gib": plan.headroom_gib,
        "usd_per_h": plan.usd_per_h,
        "usd_per_billion_tokens": plan.usd_per_billion_tokens,
        "pareto": any(plan is best for best in front),
    }
    return SizeRow(**{**plan.row, **fields}).model_dump(mode="json")


def recommendation_document(answer: Recommendation) -> dict[str, Any]:
    """What `recommend --json` prints, without `schema`."""
    front = answer.front
    return {
        "model": answer.request.model,
        "target_step_time_s": answer.request.target_s,
        "recommended": _row(answer.reached[0]) if answer.reached else None,
        "reached": [_row(plan) for plan in answer.reached],
        "missed": [_row(plan) for plan in answer.missed],
        "next_smaller": {
            cluster: None if plan is None else _row(plan)
            for cluster, plan in answer.smaller.items()
        },
        "sweep": [_row(plan, front) for plan in answer.sweep],
    }


def recommendation_files(answer: Recommendation) -> dict[str, str]:
    """Texts by name: the answer, the sweep as a table and a picture, the recommended plan's files."""
    document = recommendation_document(answer)
    files = {"recommend.json": json.dumps({"schema": 1, **document}, indent=1) + "\n"}
    if answer.sweep:
        files["sweep.csv"] = csv_text(list(SizeRow.model_fields), document["sweep"])
        files["sweep.svg"] = sweep_svg(_dots(answer))
    if answer.reached:
        files |= {f"plan/{name}": text for name, text in answer.reached[0].files.items()}
    return files


def _dots(answer: Recommendation) -> list[SweepDot]:
    front = answer.front
    return [
        SweepDot(
            cluster=plan.cluster,
            gpus=plan.gpus,
            step_time_s=plan.step_time_s,
            headroom_gib=plan.headroom_gib,
            on_front=any(plan is best for best in front),
        )
        for plan in answer.sweep
        if plan.headroom_gib is not None
    ]
