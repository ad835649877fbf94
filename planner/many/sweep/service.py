"""A sweep: the best plan at every combination of some options, as rows of one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import MeshwrightError, message_of
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.many.batch.rows import plan_figures
from meshwright.planner.many.sweep.axes import Axes, Value, combinations_of, read_axes
from meshwright.planner.plan.digest import with_digest
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures, with_cost
from meshwright.planner.request.reader import read_request
from meshwright.planner.solvers.clock import Shares, is_over, within

_ASKED = ("global_batch", "seq_len", "precision", "framework")


@dataclass(frozen=True)
class SweepReport:
    """The rows of a sweep, in the order of its combinations."""

    axes: Mapping[str, tuple[Value, ...]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The options' values, then `status`, figures and layout of the plan; `message` where there is none."""
    plans: list[Plan | None] = field(default_factory=list)
    """The plans themselves; None where one could not be asked for."""

    def document(self) -> dict[str, Any]:
        """What `plan --sweep --json` prints, without `schema`."""
        axes = {name: list(values) for name, values in self.axes.items()}
        return {"sweep": axes, "rows": self.rows}


def sweep(
    model: str | PathLike[str] | ModelSpec,
    *,
    over: str | Axes,
    cluster: str | PathLike[str] | ClusterSpec,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> SweepReport:
    """The best plan at every combination of some options.

    Parameters
    ----------
    model, cluster
        As for `plan`.
    over
        `gpus=256:2048:x2,precision=bf16+fp8`, or values by option. Besides options of `plan` there are
        `hbm_gib`, a GPU's HBM, and `nic_gbps`, its share of the network.
    progress
        Called with a line for every plan.
    options
        Further options of `plan`, those of a training's cost included; those that are swept over may be left
        out. `time_limit_s` is for all plans together.

    Returns
    -------
    SweepReport
        A row for each combination. A combination that cannot be planned is a row that says why.

    Raises
    ------
    InputError
        If the sweep or the model cannot be read.
    """
    budget = Budget.of({name: options.pop(name, None) for name in COST_FIELDS})
    axes = read_axes(over)
    report = SweepReport(axes=axes)
    spec = read_model(model)
    combinations = list(combinations_of(axes))
    shares = Shares(len(combinations))
    with within(options.get("time_limit_s")):
        for values in combinations:
            words = ", ".join(f"{name} {value}" for name, value in values.items())
            if progress is not None:
                progress(words)
            asked = {**options, **values, "time_limit_s": shares.next_s()}
            row, plan = _planned(spec, cluster, asked, budget)
            report.rows.append({**values, **row})
            report.plans.append(plan)
    return report


def _planned(
    model: ModelSpec,
    cluster: str | PathLike[str] | ClusterSpec,
    options: dict[str, Any],
    budget: Budget,
) -> tuple[dict[str, Any], Plan | None]:
    """The figures of one plan, and the plan."""
    if is_over():
        return {"status": "unknown", "message": "the time limit came before this plan"}, None
    changes: dict[str, float] = {}
    for name in ("hbm_gib", "nic_gbps"):
        if name in options:
            changes[name] = options.pop(name)
    gpus = options.pop("gpus", None)
    try:
        spec = changed_cluster(read_cluster(options.pop("cluster", cluster), gpus), changes)
        request = read_request(model=model, cluster=spec, gpus=gpus, **options)
        plan = make_plan(request, robustness=False, choices=False)
    except MeshwrightError as error:
        return {"status": "failed", "message": message_of(error)[0]}, None
    inputs = plan.inputs
    asked = {name: getattr(inputs, name) for name in _ASKED}
    names = {"model": inputs.model.name, "cluster": inputs.cluster.name}
    figures = plan_figures(plan)
    cost = cost_figures(budget, figures, inputs.cluster)
    priced = with_cost(plan, budget)
    return {**names, **asked, **figures, **cost}, plan if priced is plan else with_digest(priced)


def changed_cluster(cluster: ClusterSpec, changes: Mapping[str, float]) -> ClusterSpec:
    """A cluster with other HBM (`hbm_gib`) or another network (`nic_gbps`, of a GPU)."""
    if "hbm_gib" in changes:
        device = cluster.device.model_copy(update={"hbm_gib": changes["hbm_gib"]})
        cluster = cluster.model_copy(update={"device": device})
    if "nic_gbps" in changes:
        cluster = cluster.model_copy(update={"nic_gbps_per_gpu": changes["nic_gbps"]})
    return cluster
