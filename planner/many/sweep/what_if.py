"""What would become of a plan with other GPUs, another batch or another network: plans made beforehand.

They are searched as `plan` searches, with the same formulas and the same proof, so a page that shows them
agrees with `plan`; without files, robustness and the second opinion on the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.errors import InputError, MeshwrightError, message_of
from meshwright.planner.many.sweep.axes import Axes, Value, combinations_of, read_axes
from meshwright.planner.many.sweep.service import changed_cluster
from meshwright.planner.plan.assemble import objective_of, predict
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.gradient_buckets import search_with_buckets
from meshwright.planner.plan.nodes import decide_on_nodes
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import layout_document
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.params import SearchParams
from meshwright.planner.solvers.processes import on_processes, side_by_side, usable_cores

AXES = ("gpus", "global_batch", "seq_len", "precision", "nic_gbps", "hbm_gib")
"""What the page has controls for."""
_WIDE = SearchParams(first_batch=4096, priced_per_round=1, bounded_together=32)
"""Many plans are wanted, none of them early: large steps take a third less time."""
_FACTORS: dict[str, tuple[float, ...]] = {
    "gpus": (0.5, 1, 2),
    "global_batch": (0.5, 1, 2),
    "seq_len": (0.5, 1, 2),
    "nic_gbps": (0.5, 1, 2),
    "hbm_gib": (1, 1.75),
}
"""Of the plan's own values; 1.75 is from an H100's HBM to an H200's."""


@dataclass(frozen=True, kw_only=True)
class WhatIfParams:
    """Bounds of the plans that are made beforehand."""

    time_limit_s: float = 20.0
    """Of one search; a plan that it cuts short says that it is not proven."""
    workers: int | None = None
    """Processes; as many as there are cores by default."""


def what_if(
    plan: Plan, over: str | Axes | None = None, params: WhatIfParams | None = None
) -> dict[str, Any]:
    """Plans for other values of some inputs.

    Parameters
    ----------
    plan
        Whose inputs are varied.
    over
        `gpus=256:2048:x2,precision=bf16+fp8`, or values by option, any of `AXES`: every combination is
        planned, the plan's own values among them. By default half and twice of the plan's values, and the
        other precision, one option at a time.
    params
        Bounds.

    Returns
    -------
    dict
        `axes`: for each option its values and which of them is the plan's own (`now`). `rows`: for each
        combination its `values`, the `status` and the figures of its plan, or a `message` why there is none.

    Raises
    ------
    InputError
        The options cannot be read.
    """
    params = params or WhatIfParams()
    now = _values_now(plan.inputs)
    axes = _around(plan.inputs, now) if over is None else _with_now(read_axes(over), now)
    asked = combinations_of(axes)
    if over is None:
        asked = [values for values in asked if _changes(values, now) <= 1]
    rows = _all_planned(partial(_row, plan.inputs, params.time_limit_s), asked, params.workers)
    return {
        "axes": [
            {"name": name, "values": list(values), "now": list(values).index(now[name])}
            for name, values in axes.items()
        ],
        "rows": rows,
    }


def _values_now(inputs: PlanInputs) -> dict[str, Value]:
    return {
        "gpus": inputs.gpus,
        "global_batch": inputs.global_batch,
        "seq_len": inputs.seq_len,
        "precision": inputs.precision,
        "nic_gbps": inputs.cluster.nic_gbps_per_gpu,
        "hbm_gib": inputs.cluster.device.hbm_gib,
    }


def _around(inputs: PlanInputs, now: Mapping[str, Value]) -> dict[str, tuple[Value, ...]]:
    """Half and twice the plan's values, as far as there are such."""
    axes: dict[str, tuple[Value, ...]] = {}
    for name in AXES:
        value = now[name]
        if isinstance(value, str):
            axes[name] = _precisions(inputs)
            continue
        whole = isinstance(value, int)
        scaled = [value * factor for factor in _FACTORS[name]]
        axes[name] = tuple(
            round(number) if whole else number
            for number in scaled
            if number == value or not whole or (number == round(number) and number >= 1)
        )
    axes["gpus"] = tuple(gpus for gpus in axes["gpus"] if float(gpus) <= inputs.cluster.gpus)
    return axes


def _precisions(inputs: PlanInputs) -> tuple[Value, ...]:
    """The plan's precision, and the one of 16 or 8 bits that it is not."""
    if inputs.precision != "bf16":
        return "bf16", inputs.precision
    return ("bf16", "fp8") if inputs.cluster.device.peak_fp8_tflops else ("bf16",)


def _with_now(axes: Axes, now: Mapping[str, Value]) -> dict[str, tuple[Value, ...]]:
    """The options with the plan's own values among theirs."""
    whole: dict[str, tuple[Value, ...]] = {}
    for name, values in axes.items():
        if name not in AXES:
            raise InputError(
                "the page has no control for it", where="--sweep", value=name, allowed=AXES
            )
        own = now[name]
        if own in values:
            whole[name] = tuple(values)
        elif isinstance(own, str):
            whole[name] = (own, *values)
        else:
            whole[name] = tuple(sorted((own, *values), key=float))
    return whole


def _changes(values: Mapping[str, Value], now: Mapping[str, Value]) -> int:
    return sum(value != now[name] for name, value in values.items())


def _all_planned(
    planned: partial[dict[str, Any]], asked: Sequence[dict[str, Value]], workers: int | None
) -> list[dict[str, Any]]:
    """The rows in order, from several processes where there are cores."""
    with on_processes(workers or usable_cores()):
        return side_by_side([partial(planned, values) for values in asked])


def _row(inputs: PlanInputs, time_limit_s: float, values: Mapping[str, Value]) -> dict[str, Any]:
    """The figures of the plan for some values, or why there is none."""
    try:
        return {"values": dict(values), **_figures(_asked(inputs, values, time_limit_s))}
    except MeshwrightError as error:
        return {"values": dict(values), "status": "failed", "message": message_of(error)[0]}


def _asked(inputs: PlanInputs, values: Mapping[str, Value], time_limit_s: float) -> PlanRequest:
    changes: dict[str, Any] = dict(values)
    own = _values_now(inputs)
    changed: dict[str, float] = {}
    for name in ("nic_gbps", "hbm_gib"):
        size = changes.pop(name, own[name])
        if size != own[name]:
            changed[name] = size
    cluster = changed_cluster(inputs.cluster, changed)
    return PlanRequest.of_inputs(inputs, cluster=cluster, time_limit_s=time_limit_s, **changes)


def _figures(request: PlanRequest) -> dict[str, Any]:
    """Status, and of the fastest layout its time, throughput, memory and layout."""
    decision = decide_on_nodes(request, _searched)
    outcome = decision.settled.outcome
    if not outcome.best:
        return {"status": outcome.status, "message": f"{outcome.status}: no layout fits"}
    best = outcome.best[0]
    workload = decision.request.workload(best.execution.of_layout(best.layout))
    predicted = predict(workload.on(int(best.layout.gpus)), best)
    layout = layout_document(best.layout, best.stages).model_dump(mode="json", exclude={"stages"})
    return {
        "status": outcome.status,
        "gap": objective_of(predicted.step_time_s, outcome.lower_bound_s).gap,
        "step_time_s": predicted.step_time_s,
        "tokens_per_s": predicted.tokens_per_s_per_gpu * request.gpus,
        "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
        "mfu": predicted.mfu,
        "peak_memory_gib": max(predicted.memory_gib),
        "host_memory_gib": predicted.host_memory_gib,
        "layout": layout,
    }


def _searched(request: PlanRequest) -> Outcome:
    return search_with_buckets(request, params=_WIDE)
