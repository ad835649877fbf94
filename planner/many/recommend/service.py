"""The fewest GPUs that reach a target, proven; the cheapest cluster; a sweep with its Pareto front.

A plan for up to n GPUs may leave some idle, so more GPUs never make the best step slower: bisection over
the sizes finds the fewest, and the next smaller size, planned to its optimum too, proves it.
"""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cluster_specs.allocation import check_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError
from meshwright.planner.many.batch.engines import local_engine, usable_cores
from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.many.batch.work import do_job

Progress = Callable[[str], None]
SWEEP_STEPS = 12
"""Sizes of a sweep: this many halvings of the largest one, at most."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be reached, on which clusters, and the options of `plan` that hold for all."""

    model: str
    clusters: tuple[str, ...]
    plan: Mapping[str, Any]
    """Fields of a JobDoc, without `model`, `cluster` and `gpus`."""
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    most_gpus: int | None = None
    sizes: tuple[int, ...] = ()
    """GPUs to sweep over; halvings of the largest when empty."""
    reserves_gib: tuple[float, ...] = (0.0,)
    """HBM kept free, for the sweep: each makes plans of its own."""
    workers: int | None = None
    cache: Path | None = None

    @property
    def target_s(self) -> float | None:
        """The step time that is asked for, directly or as tokens per second."""
        if self.tokens_per_s is not None:
            tokens: float = self.plan["global_batch"] * self.plan["seq_len"]
            return tokens / self.tokens_per_s
        return self.step_time_s


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cluster at a size: the row of its best plan, and its files."""

    cluster: str
    gpus: int
    reserve_gib: float
    usd_per_h: float | None
    row: Mapping[str, Any]
    files: Mapping[str, str]
    headroom_gib: float | None = None
    """HBM that the plan leaves free on its fullest GPU."""

    @property
    def step_time_s(self) -> float:
        """Infinite without a plan."""
        return self.row.get("step_time_s") or float("inf")

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """What training costs at this speed."""
        if self.usd_per_h is None or not self.row.get("tokens_per_s"):
            return None
        return float(self.usd_per_h * 1e9 / (3600 * self.row["tokens_per_s"]))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """For each cluster the fewest GPUs that reach the target, and the sweep."""

    wish: Wish
    reached: tuple[Point, ...] = ()
    """Cheapest first where all have prices, else fewest GPUs first."""
    smaller: Mapping[str, Point | None] = field(default_factory=dict)
    """By cluster, the next smaller size, which misses the target; None where there is none."""
    missed: tuple[Point, ...] = ()
    """Clusters that miss the target at their largest size."""
    sweep: tuple[Point, ...] = ()

    @property
    def front(self) -> tuple[Point, ...]:
        """Points of the sweep that no other beats in step time, GPUs and headroom together."""
        return tuple(
            point for point in self.sweep if not any(_beats(other, point) for other in self.sweep)
        )


def recommend(wish: Wish, progress: Progress) -> Answer:
    """Answers a wish. Raises InputError where it cannot be asked so."""
    clusters = {name: read_cluster(name) for name in wish.clusters}
    for cluster in clusters.values():
        for size in (*wish.sizes, *([wish.most_gpus] if wish.most_gpus else [])):
            check_gpus(cluster, size)
        if cluster.elastic and wish.most_gpus is None and not wish.sizes:
            what = "this is a kind of node, in any number; say the most that may be taken"
            raise InputError(what, where="--gpus", value=cluster.name)
    ask = _Asker(wish, clusters, progress)
    if wish.target_s is None:
        return Answer(wish=wish, sweep=tuple(ask.sweep()))
    reached: list[Point] = []
    missed: list[Point] = []
    smaller: dict[str, Point | None] = {}
    for name in wish.clusters:
        found, below = ask.fewest(name, wish.target_s)
        (reached if found.step_time_s <= wish.target_s else missed).append(found)
        smaller[name] = below
    priced = all(point.usd_per_h is not None for point in reached)
    reached.sort(key=lambda point: ((point.usd_per_h or 0.0) if priced else 0.0, point.gpus))
    return Answer(
        wish=wish,
        reached=tuple(reached),
        missed=tuple(missed),
        smaller=smaller,
        sweep=tuple(ask.sweep()) if wish.sizes else (),
    )


class _Asker:
    """Plans a cluster at a size, once."""

    def __init__(self, wish: Wish, clusters: Mapping[str, ClusterSpec], progress: Progress) -> None:
        self._wish, self._clusters, self._say = wish, clusters, progress
        self._cache = str(wish.cache.absolute()) if wish.cache else None
        self._known: dict[tuple[str, int, float], Point] = {}

    def fewest(self, name: str, target_s: float) -> tuple[Point, Point | None]:
        """(the smallest size that reaches the target, or the largest, if none does; the next smaller one)."""
        sizes = self._sizes(name)
        most = self._point(name, sizes[-1])
        if most.step_time_s > target_s:
            return most, None
        at = bisect_left(
            sizes, True, key=lambda size: self._point(name, size).step_time_s <= target_s
        )
        found = self._point(name, sizes[at])
        return found, self._point(name, sizes[at - 1]) if at else None

    def sweep(self) -> list[Point]:
        """Every cluster at every size of the sweep, with every reserve."""
        tasks = [
            (name, size, reserve)
            for name in self._wish.clusters
            for size in self._wish.sizes or self._halvings(name)
            for reserve in self._wish.reserves_gib
        ]
        waiting = [task for task in tasks if task not in self._known]
        workers = min(self._wish.workers or usable_cores(), max(len(waiting), 1))
        engine = local_engine(workers, self._cache)
        for done, (at, result) in enumerate(
            engine((k, self._fields(*task)) for k, task in enumerate(waiting)), 1
        ):
            self._say(f"{done} of {len(waiting)} plans")
            self._keep(waiting[at], result)
        return [self._known[task] for task in tasks]

    def _halvings(self, name: str) -> list[int]:
        sizes = self._sizes(name)
        found = {sizes[-1]}
        for step in range(1, SWEEP_STEPS):
            found.add(sizes[max(bisect_left(sizes, sizes[-1] / 2**step), 0)])
        return sorted(found)

    def _sizes(self, name: str) -> list[int]:
        """Parts of a node that divide it, then whole nodes."""
        cluster = self._clusters[name]
        node, most = cluster.gpus_per_node, min(self._wish.most_gpus or cluster.gpus, cluster.gpus)
        parts = [size for size in range(1, node) if node % size == 0]
        return [size for size in (*parts, *range(node, most + 1, node)) if size <= most] or [most]

    def _point(self, name: str, size: int) -> Point:
        task = (name, size, 0.0)
        if task not in self._known:
            self._say(f"{name}, {size} GPUs")
            self._keep(task, do_job(self._fields(*task), self._cache))
        return self._known[task]

    def _fields(self, name: str, size: int, reserve_gib: float) -> dict[str, Any]:
        job = JobDoc.model_validate(
            {
                **self._wish.plan,
                "model": self._wish.model,
                "cluster": name,
                "gpus": size,
                "name": "size",
                "reserve_gib": self._wish.plan.get("reserve_gib", 0.0) + reserve_gib,
            }
        )
        return job.model_dump(mode="json")

    def _keep(self, task: tuple[str, int, float], result: Mapping[str, Any]) -> None:
        name, size, reserve_gib = task
        row, cluster = result["row"], self._clusters[name]
        if row["status"] in ("failed", "unknown"):
            raise InputError(
                row["message"] or "the time limit came before any plan",
                where=f"{name}, {size} GPUs",
            )
        price = cluster.usd_per_gpu_hour
        peak = row.get("peak_memory_gib")
        self._known[task] = Point(
            cluster=name,
            gpus=size,
            reserve_gib=reserve_gib,
            usd_per_h=None if price is None else price * size,
            row=row,
            files=result["files"],
            headroom_gib=None if peak is None else cluster.device.hbm_gib - peak,
        )


def _beats(one: Point, other: Point) -> bool:
    """Whether `one` is nowhere worse and somewhere better; no plan is worse than any."""
    if other.headroom_gib is None or one.headroom_gib is None:
        return other.headroom_gib is None and one.headroom_gib is not None
    mine = (one.step_time_s, one.gpus, -one.headroom_gib)
    its = (other.step_time_s, other.gpus, -other.headroom_gib)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


COLUMNS = (
    "cluster",
    "gpus",
    "reserve_gib",
    "status",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_memory_gib",
    "headroom_gib",
    "usd_per_h",
    "usd_per_billion_tokens",
    "pareto",
)


def point_document(point: Point, front: Sequence[Point] = ()) -> dict[str, Any]:
    """A point as plain data."""
    own = {
        "cluster": point.cluster,
        "gpus": point.gpus,
        "reserve_gib": point.reserve_gib,
        "headroom_gib": point.headroom_gib,
        "usd_per_h": point.usd_per_h,
        "usd_per_billion_tokens": point.usd_per_billion_tokens,
        "pareto": any(point is other for other in front),
    }
    return {key: own[key] if key in own else point.row.get(key) for key in COLUMNS}


def answer_document(answer: Answer) -> dict[str, Any]:
    """An answer as plain data."""
    front = answer.front
    return {
        "model": answer.wish.model,
        "target_step_time_s": answer.wish.target_s,
        "recommended": point_document(answer.reached[0]) if answer.reached else None,
        "reached": [point_document(point) for point in answer.reached],
        "missed": [point_document(point) for point in answer.missed],
        "next_smaller": {
            name: None if point is None else point_document(point)
            for name, point in answer.smaller.items()
        },
        "sweep": [point_document(point, front) for point in answer.sweep],
    }


def answer_files(answer: Answer) -> dict[str, str]:
    """Texts by name: the answer, the sweep as a table and a picture, the recommended plan's files."""
    from meshwright.planner.many.recommend.picture import sweep_svg

    document = answer_document(answer)
    files = {"recommend.json": json.dumps({"schema": 1, **document}, indent=1) + "\n"}
    if answer.sweep:
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: "" if value is None else value for key, value in row.items()}
            for row in document["sweep"]
        )
        files |= {
            "sweep.csv": stream.getvalue(),
            "sweep.svg": sweep_svg(answer.sweep, answer.front),
        }
    if answer.reached:
        files |= {f"plan/{name}": text for name, text in answer.reached[0].files.items()}
    return files
