"""One plan for each combination of some options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any

from meshwright.cluster_specs.reader import is_mixed_cluster, read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.documents import frame_of
from meshwright.errors import InputError, MeshwrightError, check_choice, message_of, near_miss
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.mixed.document import AnyPlan, read_mixed_request
from meshwright.planner.mixed.service import figures_on_parts, make_mixed_plan, with_mixed_cost
from meshwright.planner.plan.assemble import objective_of, predict
from meshwright.planner.plan.best_plan import best_plan
from meshwright.planner.plan.document import Plan, with_digest
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures, with_cost
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.request.reader import check_options, read_request
from meshwright.planner.runs.run_terms import layout_document
from meshwright.planner.search.pricing import SearchParams
from meshwright.planner.solvers.clock import Shares, is_over, within
from meshwright.planner.solvers.processes import on_processes, side_by_side, usable_cores

if TYPE_CHECKING:
    import pandas

# What a sweep varies: `gpus=256:2048:x2,precision=bf16+fp8` as values by option.


Value = int | float | str
Axes = Mapping[str, Sequence[Value]]
Over = str | Mapping[str, Value | Sequence[Value]]
"""As `read_axes` takes it."""

COUNTS = ("gpus", "global_batch", "seq_len", "pack_size")
AMOUNTS = ("reserve_gib", "hbm_gib", "nic_gbps")
"""GiB to leave free, GiB of a GPU's HBM, gigabits per second of a GPU's share of the network."""
NAMES = ("precision", "optimizer", "framework", "cluster", "packing")
OPTIONS = (*COUNTS, *AMOUNTS, *NAMES)
_RANGE = re.compile(r"^([\d.]+):([\d.]+):([x+])([\d.]+)$")


MOST_PLANS = 512
"""Combinations of a sweep; each is a search of seconds."""


def read_axes(text: Over) -> dict[str, tuple[Value, ...]]:
    """The options that a sweep varies, with their values.

    Parameters
    ----------
    text
        `gpus=256:2048:x2` doubles from 256 to 2048, `seq_len=4096:16384:+4096` adds, `precision=bf16+fp8`
        lists; several with commas between them. Or the values themselves by option, or its one value.

    Raises
    ------
    InputError
        An unknown option, a value of the wrong kind, or too many combinations.

    >>> read_axes("gpus=8:32:x2,precision=bf16+fp8")
    {'gpus': (8, 16, 32), 'precision': ('bf16', 'fp8')}
    """
    axes: dict[str, tuple[Value, ...]] = {}
    if isinstance(text, str):
        for part in text.split(","):
            name, sign, values = part.strip().partition("=")
            if not sign or not values:
                what = (
                    "must be OPTION=VALUES; values of one option are joined by +, as in gpus=8+16"
                )
                raise InputError(what, where="--sweep", value=part)
            option = _option(name)
            if option in axes:
                raise InputError(
                    "is given twice; join its values by +", where="--sweep", value=option
                )
            axes[option] = _values(option, values)
    else:
        if not isinstance(text, Mapping) or not all(isinstance(name, str) for name in text):
            what = "must be a text such as gpus=8+16, or values by option"
            raise InputError(what, where="--sweep", value=text)
        axes = {
            _option(name): (values,) if isinstance(values, str | int | float) else tuple(values)
            for name, values in text.items()
        }
    count = prod(len(values) for values in axes.values())
    if not 1 <= count <= MOST_PLANS:
        # Ranges are read up to one value more than is allowed.
        said = f"more than {MOST_PLANS} combinations" if count > MOST_PLANS else "no combination"
        raise InputError(f"has {said}; give 1 to {MOST_PLANS}", where="--sweep")
    return axes


def combinations_of(axes: Axes) -> list[dict[str, Value]]:
    """Every combination of the values, the last option changing fastest.

    Parameters
    ----------
    axes
        Values by option.
    """
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _option(name: str) -> str:
    option = name.strip().replace("-", "_")
    if option not in OPTIONS:
        raise InputError(
            "cannot be swept over",
            where="--sweep",
            value=name,
            did_you_mean=near_miss(option, OPTIONS),
            allowed=OPTIONS,
        )
    return option


def _values(option: str, text: str) -> tuple[Value, ...]:
    if option in NAMES:
        return tuple(dict.fromkeys(text.split("+")))
    span = _RANGE.match(text)
    numbers = _spanned(span, text) if span else [_number(part, text) for part in text.split("+")]
    if option in COUNTS:
        if span is None and any(number % 1 for number in numbers):
            raise InputError(f"{option} must be whole numbers", where="--sweep", value=text)
        return tuple(dict.fromkeys(round(number) for number in numbers))
    return tuple(dict.fromkeys(numbers))


def _spanned(span: re.Match[str], text: str) -> list[float]:
    """From the first to the last number by factors or steps, both included where they are met."""
    first, last, step = (_number(span[group], text) for group in (1, 2, 4))
    grows = step > 1 and first > 0 if span[3] == "x" else step > 0
    if not grows or last < first:
        raise InputError("must rise, as in 256:2048:x2 or 8:64:+8", where="--sweep", value=text)
    numbers = [first]
    while len(numbers) <= MOST_PLANS:
        number = numbers[-1] * step if span[3] == "x" else numbers[-1] + step
        if number > last * (1 + 1e-9):
            break
        numbers.append(number)
    return numbers


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e12:
        what = "must be numbers, as in gpus=8+16 or gpus=8:64:x2"
        raise InputError(what, where="--sweep", value=whole)
    return number


# A sweep: the best plan at every combination of some options, as rows of one table.


_ASKED = ("global_batch", "seq_len", "precision", "framework")


@dataclass(frozen=True, repr=False)
class SweepReport:
    """The rows of a sweep, in the order of its combinations."""

    axes: Mapping[str, tuple[Value, ...]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The options' values, then `status`, figures and layout of the plan; `message` where there is none."""
    plans: list[AnyPlan | None] = field(default_factory=list)
    """The plans themselves; None where one could not be asked for. On a mixed cluster the pipeline through
    its parts, or the plan of the part that is fastest alone."""

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} ({len(values)})" for name, values in self.axes.items())
        found = sum(plan is not None and plan.layout is not None for plan in self.plans)
        return f"SweepReport({axes}: {found} of {len(self.rows)} with a plan)"

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table of pandas. Raises InputError where pandas is not installed."""
        return frame_of(self.rows)

    def document(self) -> dict[str, Any]:
        """What `plan --sweep --json` prints, without `schema`."""
        axes = {name: list(values) for name, values in self.axes.items()}
        return {"sweep": axes, "rows": self.rows}


def sweep(
    model: str | PathLike[str] | ModelSpec,
    *,
    over: Over,
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
        `hbm_gib`, a GPU's HBM, and `nic_gbps`, its share of the network. A mixed cluster's own file says what
        its parts have: there, what is asked of them is swept over.
    progress
        Called with a line for every plan.
    **options
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
    check_options({**options, **axes}, *AMOUNTS)
    _check_parts((cluster, *axes.get("cluster", ())), axes)
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


_OF_ONE_CLUSTER = ("gpus", "hbm_gib", "nic_gbps")


def _check_parts(clusters: Sequence[object], axes: Axes) -> None:
    """Raises InputError where a mixed cluster is to have what its file says."""
    for name in (name for name in _OF_ONE_CLUSTER if name in axes):
        if any(is_mixed_cluster(each) for each in clusters):
            what = "cannot be swept over on a mixed cluster, whose file says what each part has"
            allowed = tuple(option for option in OPTIONS if option not in _OF_ONE_CLUSTER)
            raise InputError(what, where="--sweep", value=name, allowed=allowed)


def _planned(
    model: ModelSpec,
    cluster: str | PathLike[str] | ClusterSpec,
    options: dict[str, Any],
    budget: Budget,
) -> tuple[dict[str, Any], AnyPlan | None]:
    """The figures of one plan, and the plan."""
    if is_over():
        return {"status": "not searched", "message": "the time limit came before this plan"}, None
    changes: dict[str, float] = {}
    for name in ("hbm_gib", "nic_gbps"):
        if name in options:
            changes[name] = options.pop(name)
    gpus, machine = options.pop("gpus", None), options.pop("cluster", cluster)
    try:
        if is_mixed_cluster(machine):
            on_parts = read_mixed_request(model=model, cluster=machine, gpus=gpus, **options)
            result = with_mixed_cost(make_mixed_plan(on_parts), budget)
            chosen = result.alone or result.document
            asked = {name: getattr(chosen.inputs, name) for name in _ASKED}
            of_model = {"model": chosen.inputs.model.name, **asked, **figures_on_parts(result)}
            return of_model | {"cluster": result.document.cluster.name}, chosen
        spec = changed_cluster(read_cluster(machine, gpus), changes)
        request = read_request(model=model, cluster=spec, gpus=gpus, **options)
        plan = make_plan(request, robustness=False, choices=False)
    except MeshwrightError as error:
        return {"status": "failed", "message": message_of(error)[0]}, None
    inputs = plan.inputs
    asked = {name: getattr(inputs, name) for name in _ASKED}
    names = {"model": inputs.model.name, "cluster": inputs.cluster.name}
    figures = plan.figures()
    cost = cost_figures(budget, figures, inputs.cluster)
    priced = with_cost(plan, budget)
    return {**names, **asked, **figures, **cost}, plan if priced is plan else with_digest(priced)


def changed_cluster(cluster: ClusterSpec, changes: Mapping[str, float]) -> ClusterSpec:
    """A cluster with other HBM (`hbm_gib`) or another network (`nic_gbps`, of a GPU).

    Parameters
    ----------
    cluster
        Whose spec is copied.
    changes
        `hbm_gib`, GiB of a GPU, and `nic_gbps`, gigabits per second of a GPU; others say nothing.
    """
    if "hbm_gib" in changes:
        device = cluster.device.model_copy(update={"hbm_gib": changes["hbm_gib"]})
        cluster = cluster.model_copy(update={"device": device})
    if "nic_gbps" in changes:
        cluster = cluster.model_copy(update={"nic_gbps_per_gpu": changes["nic_gbps"]})
    return cluster


# What would become of a plan with other GPUs, another batch or another network: plans made beforehand.
#
# They are searched as `plan` searches, with the same formulas and the same proof, so a page that shows them
# agrees with `plan`; without files, robustness and the second opinion on the ranks.


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
    plan: Plan, over: Over | None = None, params: WhatIfParams | None = None
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
        asked = [each for each in asked if sum(each[name] != now[name] for name in each) <= 1]
    planned = partial(_row, plan.inputs, params.time_limit_s)
    with on_processes(params.workers or usable_cores()):
        rows = side_by_side([partial(planned, values) for values in asked])
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
        if name == "seq_len" and inputs.lengths is not None:
            axes[name] = (value,)  # packs were made for this size
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
        check_choice(name, AXES, "--sweep", "the page has no control for it")
        own = now[name]
        if own in values:
            whole[name] = tuple(values)
        elif isinstance(own, str):
            whole[name] = (own, *values)
        else:
            whole[name] = tuple(sorted((own, *values), key=float))
    return whole


def _row(inputs: PlanInputs, time_limit_s: float, values: Mapping[str, Value]) -> dict[str, Any]:
    """The figures of the plan for some values, or why there is none."""
    try:
        return {"values": dict(values), **_figures(_asked(inputs, values, time_limit_s))}
    except MeshwrightError as error:
        return {"values": dict(values), "status": "failed", "message": message_of(error)[0]}


def _asked(inputs: PlanInputs, values: Mapping[str, Value], time_limit_s: float) -> PlanRequest:
    changes: dict[str, Any] = dict(values)
    own = _values_now(inputs)
    if inputs.lengths is not None and changes.get("seq_len", inputs.seq_len) != inputs.seq_len:
        raise InputError(
            "samples were packed to another size", where="seq_len", value=changes["seq_len"]
        )
    changed: dict[str, float] = {}
    for name in ("nic_gbps", "hbm_gib"):
        size = changes.pop(name, own[name])
        if size != own[name]:
            changed[name] = size
    cluster = changed_cluster(inputs.cluster, changed)
    return PlanRequest.of_inputs(inputs, cluster=cluster, time_limit_s=time_limit_s, **changes)


def _figures(request: PlanRequest) -> dict[str, Any]:
    """Status, and of the fastest layout its time, throughput, memory and layout."""
    found = best_plan(request, params=_WIDE)
    outcome = found.outcome
    if not outcome.best:
        words = "no layout fits" if found.claim == "infeasible" else "the time limit came first"
        return {"status": found.claim, "message": f"{found.claim}: {words}"}
    best = outcome.best[0]
    workload = found.request.workload(best.execution.of_layout(best.layout))
    predicted = predict(workload.on(int(best.layout.gpus)), best)
    layout = layout_document(best.layout, best.stages).model_dump(mode="json", exclude={"stages"})
    return {
        "status": found.claim,
        "gap": objective_of(predicted.step_time_s, outcome.lower_bound_s).gap,
        "step_time_s": predicted.step_time_s,
        "tokens_per_s": workload.tokens_per_step / predicted.step_time_s,
        "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
        "mfu": predicted.mfu,
        "peak_memory_gib": max(predicted.memory_gib),
        "host_memory_gib": predicted.host_memory_gib,
        "layout": layout,
    }
