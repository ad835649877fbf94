"""The fewest GPUs that reach a target, proven; the cheapest cluster; a sweep with its Pareto front.

Let t(n) be the step time of the best plan on up to n GPUs. Such a plan may leave some idle, so t never rises
with n: bisection over the sizes finds the fewest n with t(n) <= target, and the next smaller size, planned to
its optimum too, proves it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.cluster_specs.allocation import check_gpus
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError, OutOfTimeError
from meshwright.planner.many.batch.engines import local_engine
from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.many.batch.work import do_job
from meshwright.planner.many.recommend.answer import Recommendation, SizedPlan, SizeRequest
from meshwright.planner.plan.training_cost import Budget
from meshwright.planner.solvers.processes import usable_cores

Progress = Callable[[str], None]
SWEEP_STEPS = 12
"""Sizes of a sweep: this many halvings of the largest one, at most."""


def plan_sizes(request: SizeRequest, progress: Progress) -> Recommendation:
    """Plans as many sizes as the answer needs.

    Parameters
    ----------
    request
        Targets, clusters and sizes.
    progress
        Hears what is planned.

    Returns
    -------
    Recommendation
        Without a target only the sweep; with one, the sweep only over sizes that are asked for.

    Raises
    ------
    InputError
        For a cluster that cannot be read, a size that it does not have, or a job that cannot be planned.
    OutOfTimeError
        Where the plan of a size has a time limit, and it came before any plan.
    """
    clusters = {name: read_cluster(name) for name in request.clusters}
    for cluster in clusters.values():
        _check_sizes(request, cluster)
    sizes = _SizePlanner(request, clusters, progress)
    target_s = request.target_s
    if target_s is None:
        return Recommendation(request=request, sweep=tuple(sizes.sweep()))
    reached: list[SizedPlan] = []
    missed: list[SizedPlan] = []
    smaller: dict[str, SizedPlan | None] = {}
    for name in request.clusters:
        best, smaller[name] = sizes.fewest(name, target_s)
        side = reached if best.step_time_s <= target_s else missed
        side.append(best)
    if all(plan.usd_per_h is not None for plan in reached):
        reached.sort(key=lambda plan: (plan.usd_per_h or 0.0, plan.gpus))
    else:
        reached.sort(key=lambda plan: plan.gpus)
    return Recommendation(
        request=request,
        reached=tuple(reached),
        missed=tuple(missed),
        smaller=smaller,
        sweep=tuple(sizes.sweep()) if request.sizes else (),
    )


def _check_sizes(request: SizeRequest, cluster: ClusterSpec) -> None:
    for size in request.sizes:
        check_gpus(cluster, size)
    if request.most_gpus:
        check_gpus(cluster, request.most_gpus)
    elif cluster.elastic and request.most_gpus is None and not request.sizes:
        what = "this is a kind of node, in any number; say the most that may be taken"
        raise InputError(what, where="--gpus", value=cluster.name)


_Task = tuple[str, int, float]
"""(cluster, GPUs, GiB kept free)."""


class _SizePlanner:
    """Plans a cluster at a size, once."""

    def __init__(
        self, request: SizeRequest, clusters: Mapping[str, ClusterSpec], progress: Progress
    ) -> None:
        self._request = request
        self._clusters = clusters
        self._progress = progress
        self._cache = str(request.cache.absolute()) if request.cache else None
        self._plans: dict[_Task, SizedPlan] = {}

    def fewest(self, name: str, target_s: float) -> tuple[SizedPlan, SizedPlan | None]:
        """(the smallest size that reaches the target, or the largest, if none does; the next smaller one)."""
        sizes = self._sizes(name)
        largest = self._plan(name, sizes[-1])
        if largest.step_time_s > target_s:
            return largest, None
        index = bisect_left(
            sizes, True, key=lambda size: self._plan(name, size).step_time_s <= target_s
        )
        smaller = self._plan(name, sizes[index - 1]) if index else None
        return self._plan(name, sizes[index]), smaller

    def sweep(self) -> list[SizedPlan]:
        """Every cluster at every size of the sweep, with every reserve."""
        tasks = [
            (name, size, reserve)
            for name in self._request.clusters
            for size in self._request.sizes or self._halvings(name)
            for reserve in self._request.reserves_gib
        ]
        waiting = [task for task in tasks if task not in self._plans]
        workers = min(self._request.workers or usable_cores(), max(len(waiting), 1))
        engine = local_engine(workers, self._cache)
        jobs = ((index, self._fields(*task)) for index, task in enumerate(waiting))
        for done, (index, result) in enumerate(engine(jobs), 1):
            self._progress(f"{done} of {len(waiting)} plans")
            self._keep(waiting[index], result)
        return [self._plans[task] for task in tasks]

    def _halvings(self, name: str) -> list[int]:
        sizes = self._sizes(name)
        halvings = {sizes[-1]}
        for step in range(1, SWEEP_STEPS):
            halvings.add(sizes[bisect_left(sizes, sizes[-1] / 2**step)])
        return sorted(halvings)

    def _sizes(self, name: str) -> list[int]:
        """Parts of a node that divide it, then whole nodes."""
        cluster = self._clusters[name]
        per_node = cluster.gpus_per_node
        limit = min(self._request.most_gpus or cluster.gpus, cluster.gpus)
        parts = [size for size in range(1, per_node) if per_node % size == 0]
        sizes = [size for size in parts if size <= limit]
        return [*sizes, *range(per_node, limit + 1, per_node)] or [limit]

    def _plan(self, name: str, size: int) -> SizedPlan:
        task = (name, size, 0.0)
        if task not in self._plans:
            self._progress(f"{name}, {size} GPUs")
            self._keep(task, do_job(self._fields(*task), self._cache))
        return self._plans[task]

    def _fields(self, name: str, size: int, reserve_gib: float) -> dict[str, Any]:
        plan = self._request.plan
        fields = {
            **plan,
            "model": self._request.model,
            "cluster": name,
            "gpus": size,
            "name": "size",
            "reserve_gib": plan.get("reserve_gib", 0.0) + reserve_gib,
        }
        return JobDoc.model_validate(fields).model_dump(mode="json")

    def _keep(self, task: _Task, result: Mapping[str, Any]) -> None:
        name, size, reserve_gib = task
        row, cluster = result["row"], self._clusters[name]
        if row["status"] == "unknown":
            raise OutOfTimeError(f"{name}, {size} GPUs: the time limit came before any plan")
        if row["status"] == "failed":
            raise InputError(row["message"], where=f"{name}, {size} GPUs")
        price = Budget.of(self._request.plan).price(cluster)
        peak_gib = row.get("peak_memory_gib")
        self._plans[task] = SizedPlan(
            cluster=name,
            gpus=size,
            reserve_gib=reserve_gib,
            usd_per_h=None if price is None else price * size,
            row=row,
            files=result["files"],
            headroom_gib=None if peak_gib is None else cluster.device.hbm_gib - peak_gib,
        )
