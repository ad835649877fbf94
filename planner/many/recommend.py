"""How many GPUs, and of which cluster: the fewest or cheapest that reach a target."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, isnan, log, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from meshwright.cluster_specs.allocation import check_gpus
from meshwright.cluster_specs.reader import (
    MixedClusterSpec,
    is_mixed_cluster,
    read_cluster,
    read_mixed_cluster,
)
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.execution_names import PRETRAINING, STEP_KINDS
from meshwright.documents import csv_text, frame_of, validated
from meshwright.errors import InputError, OutOfTimeError
from meshwright.planner.drawing import Chart, LogScale, empty_chart, seconds
from meshwright.planner.many.batch import do_job, local_engine
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.plan.training_cost import SECONDS_PER_DAY, Budget
from meshwright.planner.request.choices import IDLE_GPUS
from meshwright.planner.request.plan_request import parse_forbids
from meshwright.planner.solvers.processes import usable_cores

if TYPE_CHECKING:
    import pandas

# What `recommend` is asked, and what it answers, also as plain data and files.


RECOMMENDATION_FILES = ("recommend.json", "sweep.csv", "sweep.svg", "plan")
"""What is written to a folder; some of it only where there is something to say."""


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """What is to be reached, on which clusters, and the options of `plan` that hold for all."""

    model: str
    clusters: Sequence[str]
    plan: Mapping[str, Any]
    """Fields of a JobDoc, without `model`, `cluster` and `gpus`."""
    step_time_s: float | None = None
    """The target, as seconds of a step; at most one of the three targets."""
    tokens_per_s: float | None = None
    """The target, as tokens per second of all GPUs."""
    days: float | None = None
    """The target, as days in which the `tokens` of `plan` are to be trained."""
    most_gpus: int | None = None
    """That may be taken; all of the cluster's when None."""
    sizes: Sequence[int] = ()
    """GPUs to sweep over; halvings of the largest, and sizes between them, when empty."""
    reserves_gib: Sequence[float] = ()
    """HBM kept free beside none, for the sweep: each makes plans of its own."""
    workers: int | None = None
    """Processes; one for every core when None."""
    cache: Path | None = None
    """Folder of kept answers; None keeps nothing."""

    def __post_init__(self) -> None:
        """Raises InputError for two targets, or one that is not positive."""
        targets = (self.step_time_s, self.tokens_per_s, self.days)
        if sum(target is not None for target in targets) > 1:
            raise InputError("one target at a time", where="--step-time, --tokens-per-s and --days")
        if self.days is not None and Budget.of(self.plan).tokens is None:
            what = "in which what is trained? Give --tokens"
            raise InputError(what, where="--days", value=self.days)
        asked = (("--step-time", self.step_time_s), ("--tokens-per-s", self._tokens_per_s))
        for name, target in asked:
            if target is not None and not 0 < target < 1e18:
                raise InputError("must be more than 0 and below 1e18", where=name, value=target)

    @property
    def _tokens_per_s(self) -> float | None:
        tokens = Budget.of(self.plan).tokens
        if self.days is None or tokens is None:
            return self.tokens_per_s
        return tokens / (self.days * SECONDS_PER_DAY)

    @property
    def target_s(self) -> float | None:
        """The step time that is asked for, directly, as tokens per second or as days."""
        if self._tokens_per_s is None:
            return self.step_time_s
        kind = STEP_KINDS[str(self.plan.get("kind", PRETRAINING))]
        tokens: float = self.plan["global_batch"] * kind.sequences * self.plan["seq_len"]
        return tokens / self._tokens_per_s


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
    rack_gpus: int | None = None
    """GPUs of an NVLink domain of several nodes; None where a domain is a node."""
    headroom_gib: float | None = None
    """HBM that the plan leaves free on its fullest GPU; None without a plan. Of unlike parts the least HBM
    counts."""

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

        Parameters
        ----------
        other
            Of the same sweep.
        """
        if self.headroom_gib is None or other.headroom_gib is None:
            return other.headroom_gib is None and self.headroom_gib is not None
        costs = (self.step_time_s, self.gpus, -self.headroom_gib)
        other_costs = (other.step_time_s, other.gpus, -other.headroom_gib)
        nowhere_worse = all(a <= b for a, b in zip(costs, other_costs, strict=True))
        return nowhere_worse and costs != other_costs


def misses_for_sure(plan: SizedPlan, target_s: float | None) -> bool:
    """Whether it is proven that no plan of a size takes at most so many seconds.

    Parameters
    ----------
    plan
        Of a size, with its bound or its status.
    target_s
        Seconds of a step; None where only what has no plan at all misses.
    """
    bound_s = plan.row.get("lower_bound_s")
    if not plan.has_plan:
        return plan.row.get("status") == "infeasible"
    return bound_s is not None and target_s is not None and bound_s > target_s


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

    def to_frame(self) -> pandas.DataFrame:
        """Every size that was looked at, as a table of pandas: those that reach the target, then those that
        miss it, then the sweep. Raises InputError where pandas is not installed.
        """
        front = self.front
        kinds = {"reached": self.reached, "missed": self.missed, "sweep": self.sweep}
        return frame_of(
            {"kind": kind, **size_row(plan, front)}
            for kind, plans in kinds.items()
            for plan in plans
        )

    @property
    def front(self) -> tuple[SizedPlan, ...]:
        """Plans of the sweep that no other beats (the Pareto front)."""
        return tuple(
            plan
            for plan in self.sweep
            if plan.has_plan and not any(other.beats(plan) for other in self.sweep)
        )


class SizeRow(BaseModel):
    """A size in `recommend --json` and sweep.csv."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    gpus: int
    reserve_gib: float
    status: str | None = None
    step_time_s: float | None = None
    lower_bound_s: float | None = None
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


def size_row(plan: SizedPlan, front: Sequence[SizedPlan] = ()) -> dict[str, Any]:
    """A size as `recommend --json` has it.

    Parameters
    ----------
    plan
        Of a size; without a layout its figures are null.
    front
        Sizes that no other beats, in which this one is looked for.
    """
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
    """What `recommend --json` prints, without `schema`.

    Parameters
    ----------
    answer
        With a target or with a sweep, or both.
    """
    front = answer.front
    return {
        "model": answer.request.model,
        "target_step_time_s": answer.request.target_s,
        "recommended": size_row(answer.reached[0]) if answer.reached else None,
        "reached": [size_row(plan) for plan in answer.reached],
        "missed": [size_row(plan) for plan in answer.missed],
        "proven_fewest": {
            plan.cluster: not plan.row.get("runs_on")
            and (smaller is None or misses_for_sure(smaller, answer.request.target_s))
            for plan in answer.reached
            for smaller in (answer.smaller[plan.cluster],)
        },
        "next_smaller": {
            cluster: None if plan is None else size_row(plan)
            for cluster, plan in answer.smaller.items()
        },
        "sweep": [size_row(plan, front) for plan in answer.sweep],
    }


def recommendation_files(answer: Recommendation) -> dict[str, str]:
    """Texts by name: the answer, the sweep as a table and a picture, the recommended plan's files.

    Parameters
    ----------
    answer
        With a target or with a sweep, or both.
    """
    document = recommendation_document(answer)
    files = {"recommend.json": json.dumps({"schema": 1, **document}, indent=1) + "\n"}
    if answer.sweep:
        files["sweep.csv"] = csv_text(list(SizeRow.model_fields), document["sweep"])
        files["sweep.svg"] = sweep_svg(answer)
    if answer.reached:
        files |= {f"plan/{name}": text for name, text in answer.reached[0].files.items()}
    return files


_TITLE = "Step time by GPUs; filled: on the Pareto front of time, GPUs and free memory"


def sweep_svg(answer: Recommendation) -> str:
    """The sweep as SVG text: GPUs against step time, both logarithmic, the Pareto front joined; an ideal
    speed-up is a straight line down.

    Parameters
    ----------
    answer
        Its sweep; sizes without a plan are left out.
    """
    plans = [plan for plan in answer.sweep if plan.headroom_gib is not None]
    if not plans:
        return empty_chart(_TITLE, "no plan at any size")
    chart = Chart(
        across=LogScale.of_twos([plan.gpus for plan in plans]),
        down=LogScale.of_twos([plan.step_time_s for plan in plans]),
        title=_TITLE,
        across_title="GPUs",
        down_title="step, s",
    )
    front = sorted(answer.front, key=lambda plan: (plan.gpus, -plan.step_time_s))
    for name in dict.fromkeys(plan.cluster for plan in plans):
        colour = chart.named_colour(name)
        best = [plan for plan in front if plan.cluster == name and plan in plans]
        chart.line([(plan.gpus, plan.step_time_s) for plan in best], colour)
        for plan in (plan for plan in plans if plan.cluster == name):
            tip = f"{name}, {plan.gpus} GPUs: {seconds(plan.step_time_s)}, {plan.headroom_gib:.1f} GiB free"
            chart.dot((plan.gpus, plan.step_time_s), colour, hollow=plan not in front, tip=tip)
    return chart.document()


# The fewest GPUs that reach a target, proven; the cheapest cluster; a sweep with its Pareto front.
#
# Let t(n) be the step time of the best plan on up to n GPUs. Such a plan may leave some idle, so t never
# rises with n: a search over the sizes finds the fewest n with t(n) <= target, and the next smaller size,
# planned to its optimum too, proves it. A size without a plan when its time is over counts as one that
# misses, unproven. Where none may be idle, no size below that n reaches the target, and those from n on are
# planned one after the other.


Progress = Callable[[str], None]
MOST_GUESSES = 4
"""Sizes tried by the speed of others: with them the worst case plans three sizes more than halving does."""
SWEEP_STEPS = 12
"""Sizes of a sweep: this many halvings of the largest one, at most, beside those between them."""


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
    clusters: dict[str, ClusterSpec | MixedClusterSpec] = {}
    for name in request.clusters:
        cluster = read_mixed_cluster(name) if is_mixed_cluster(name) else read_cluster(name)
        _check_sizes(request, cluster)
        if isinstance(cluster, MixedClusterSpec):
            clusters |= {f"{name}#{part}": cluster.part(part) for part in cluster.names}
        clusters[name] = cluster
    sizes = _SizePlanner(request, clusters, progress)
    target_s = request.target_s
    if target_s is None:
        return Recommendation(request=request, sweep=tuple(sizes.sweep()))
    reached: list[SizedPlan] = []
    missed: list[SizedPlan] = []
    smaller: dict[str, SizedPlan | None] = {}
    for name, cluster in clusters.items():
        if isinstance(cluster, MixedClusterSpec) and (
            cluster.gpus > (request.most_gpus or cluster.gpus)
            or any(plan.cluster.startswith(f"{name}#") for plan in reached)
        ):
            # All parts together are more GPUs than one that reaches the target.
            continue
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


def _check_sizes(request: SizeRequest, cluster: ClusterSpec | MixedClusterSpec) -> None:
    if isinstance(cluster, MixedClusterSpec):
        for size in filter(None, (*request.sizes, request.most_gpus)):
            if not 1 <= size <= cluster.gpus:
                what = f"the parts of {cluster.name} have {cluster.gpus} GPUs together"
                raise InputError(what, where="--sizes" if request.sizes else "--gpus", value=size)
        return
    for size in sorted(request.sizes):
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
        self,
        request: SizeRequest,
        clusters: Mapping[str, ClusterSpec | MixedClusterSpec],
        progress: Progress,
    ) -> None:
        self._request = request
        self._clusters = clusters
        self._progress = progress
        self._cache = str(request.cache.absolute()) if request.cache else None
        self._plans: dict[_Task, SizedPlan] = {}

    def fewest(self, name: str, target_s: float) -> tuple[SizedPlan, SizedPlan | None]:
        """(the smallest size that reaches the target, or the largest, if none does; the next smaller one).

        Of smaller ones that were planned one after the other, it is the first that may reach it after all.

        Parameters
        ----------
        name
            Of a cluster, as it was asked for.
        target_s
            Seconds of a step.
        """
        sizes, falling = self._sizes(name), self._leaving_gpus_idle()
        most = falling._plan(name, sizes[-1])
        if most.row["status"] == "unknown":
            words = "the time limit came before any plan"
            raise OutOfTimeError(f"{name}, {most.gpus} GPUs: {words}")
        if most.step_time_s > target_s:
            return self._plan(name, sizes[-1]), None
        index = falling._first_that_reaches(name, target_s)
        smaller = falling._plan(name, sizes[index - 1]) if index else None
        for size in sizes[index:]:
            plan = self._plan(name, size)
            if plan.step_time_s <= target_s:
                return plan, smaller
            if smaller is None or misses_for_sure(smaller, target_s):
                smaller = plan
        return plan, None

    def _first_that_reaches(self, name: str, target_s: float) -> int:
        """Index of the smallest size that reaches the target, where the largest does and steps never rise.

        Of the sizes between one that misses and one that reaches it, the next tried is where a power of the
        GPUs through both meets the target, 1 / n at first; or the middle, where the last did not halve them,
        and after a few.
        """
        sizes, guesses = self._sizes(name), MOST_GUESSES
        low, high, halved = -1, len(sizes) - 1, True
        while high - low > 1:
            index, width = (low + high) // 2, high - low
            if halved and guesses:
                guesses -= 1
                many, power = self._plan(name, sizes[high]), 1.0
                few = self._plan(name, sizes[low]) if low >= 0 else None
                if few is not None and few.has_plan:
                    power = log(few.step_time_s / many.step_time_s) / log(many.gpus / few.gpus)
                enough = many.gpus * (many.step_time_s / target_s) ** (1 / power)
                index = min(max(bisect_left(sizes, enough), low + 1), high - 1)
            if self._plan(name, sizes[index]).step_time_s <= target_s:
                high = index
            else:
                low = index
            halved = 2 * (high - low) <= width + 1
        return high

    def _leaving_gpus_idle(self) -> _SizePlanner:
        """The same plans with fewer GPUs allowed, whose steps never rise with the size."""
        texts = self._request.plan.get("forbid", ())
        words = parse_forbids(texts)
        if IDLE_GPUS not in words:
            return self
        others = tuple(word for word in words if word != IDLE_GPUS)
        request = replace(self._request, plan={**self._request.plan, "forbid": others})
        return _SizePlanner(request, self._clusters, self._progress)

    def sweep(self) -> list[SizedPlan]:
        """Every cluster at every size of the sweep, with every reserve."""
        tasks = [
            (name, size, reserve)
            for name in self._clusters
            for size in self._swept(name)
            for reserve in sorted({0.0, *self._request.reserves_gib})
        ]
        waiting = [task for task in tasks if task not in self._plans]
        workers = min(self._request.workers or usable_cores(), max(len(waiting), 1))
        engine = local_engine(workers, self._cache)
        jobs = ((index, self._fields(*task)) for index, task in enumerate(waiting))
        for done, (index, result) in enumerate(engine(jobs), 1):
            self._progress(f"{done} of {len(waiting)} plans")
            self._keep(waiting[index], result)
        return [self._plans[task] for task in tasks]

    def _swept(self, name: str) -> Sequence[int]:
        """Sizes of the sweep that a cluster has: parts of a mixed one are smaller than all together."""
        cluster = self._clusters[name]
        if not self._request.sizes:
            return self._spread(name)
        return sorted(
            size
            for size in set(self._request.sizes)
            if size <= cluster.gpus
            and (size == cluster.gpus or not isinstance(cluster, MixedClusterSpec))
        )

    def _spread(self, name: str) -> list[int]:
        """Halvings of the largest size, and of three quarters of it as long as these are whole nodes."""
        sizes, cluster = self._sizes(name), self._clusters[name]
        if isinstance(cluster, MixedClusterSpec):
            return [size for size in sizes if size <= (self._request.most_gpus or size)]
        per_node = cluster.gpus_per_node
        halvings = [sizes[-1] / 2**step for step in range(SWEEP_STEPS)]
        between = [size * 0.75 for size in halvings if size * 0.75 >= per_node]
        return sorted({sizes[bisect_left(sizes, size)] for size in [*halvings, *between]})

    def _sizes(self, name: str) -> list[int]:
        """Any number of GPUs of one node, then whole nodes; between part-filled nodes what all of them divide
        into; and the most there are. Of a mixed cluster all GPUs: its parts are clusters of their own.
        """
        cluster = self._clusters[name]
        if isinstance(cluster, MixedClusterSpec):
            return [cluster.gpus]
        per_node = cluster.gpus_per_node
        limit = min(self._request.most_gpus or cluster.gpus, cluster.gpus)
        step = gcd(per_node, *(node.free_gpus or 0 for node in cluster.nodes))
        sizes = {*range(1, per_node), *range(step, limit, step), limit}
        return sorted(size for size in sizes if size <= limit)

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
        return validated(JobDoc, fields, "options").model_dump(mode="json")

    def _keep(self, task: _Task, result: Mapping[str, Any]) -> None:
        name, size, reserve_gib = task
        row, cluster = result["row"], self._clusters[name]
        if row["status"] == "failed":
            raise InputError(row["message"], where=f"{name}, {size} GPUs")
        budget, peak_gib = Budget.of(self._request.plan), row.get("peak_memory_gib")
        if isinstance(cluster, MixedClusterSpec):
            parts = [(part.cluster, part.gpus) for part in cluster.parts]
        else:
            parts = [(cluster, size)]
        prices = [(budget.price(part), gpus) for part, gpus in parts]
        usd_per_h = sum(nan if price is None else price * gpus for price, gpus in prices)
        hbm_gib = min(part.device.hbm_gib for part, _ in parts)
        domain, node = parts[0][0].nvlink_domain, parts[0][0].gpus_per_node
        self._plans[task] = SizedPlan(
            cluster=name,
            gpus=size,
            reserve_gib=reserve_gib,
            usd_per_h=None if isnan(usd_per_h) else usd_per_h,
            row=row,
            files=result["files"],
            rack_gpus=domain if len(parts) == 1 and domain > node else None,
            headroom_gib=None if peak_gib is None else hbm_gib - peak_gib,
        )
