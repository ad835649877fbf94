"""Why there is no plan: rules that together leave no layout, what is missing, and the smallest changes that
help.

Rules, pins and forbidden choices become assumptions of a CP-SAT model without an objective. Layouts that
break the same of them are alike, so one representative of each kind stands for all; the solver's sufficient
assumptions are then thinned out one by one until every one that is left is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.fabric import is_irregular
from meshwright.constraints.gpu_budget import GpuBudget
from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.pipeline_schedules import AllowedSchedules
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.memory.footprint import ALLOCATOR_SHARE, usable_hbm_gib
from meshwright.costmodel.pipeline.schedules import schedule_named, traits
from meshwright.errors import InternalError
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.choice.pricing import MappedPricing
from meshwright.planner.plan.document import Infeasible
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.loop import LayoutSearch
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import divisors, recompute_name, space_of
from meshwright.planner.solvers.cp_sat import repeatable_solver

FloatArray = NDArray[np.float64]

MOST_CANDIDATES = 200_000
TRIAL_PRICED = 30
"""Layouts that one trial of a change may price; a change that is not found to help by then is not offered."""


class _RequestRule(Rule):
    """A pin or a forbidden choice as a rule over layouts. On a finished plan `plan.verify` checks it."""

    unit = "choices"

    def __init__(self, name: str, broken: Callable[[Layout], NDArray[np.bool_]]) -> None:
        self.name = name
        self._broken = broken

    def excess(self, table: LayoutTable) -> FloatArray:
        return np.asarray(self._broken(table.layouts), dtype=np.float64)

    def check(self, plan: FinishedPlan) -> Finding | None:
        one = Layout(**{name: np.array([value]) for name, value in vars(plan.layout).items()})
        if not self._broken(one)[0]:
            return None
        return Finding(
            rule=self.name,
            value=1,
            limit=0,
            unit=self.unit,
            words="not as asked",
            remedy="Drop the wish.",
        )


def explain_infeasible(request: PlanRequest) -> Infeasible:
    """The conflict behind an infeasible request, and single changes that make it feasible."""
    candidates = _candidates(request)
    limits = [*rules_for(request.workload()), *_request_rules(request)]
    excess = np.stack([np.maximum(limit.excess(candidates), 0.0) for limit in limits])
    kinds = _representatives(excess)
    core = _conflict(limits, excess[:, kinds], request.seed)
    words = [_words(limits[row], excess[row], excess, row, request) for row in core]
    if not words:
        words = [_split_words(request)]
    names = {limits[row].name for row in core}
    more_gpus = not names or bool(names & {HbmCapacity.name, GpuBudget.name})
    return Infeasible(
        conflict=words, smallest_changes=list(_changes(request, limits, excess, more_gpus))
    )


def _candidates(request: PlanRequest) -> Candidates:
    """Layouts around the request: its own space and, with one pin or ban lifted at a time, those next to
    it.
    """
    relaxed = [
        request,
        *(replace(request, pins=_without(request.pins, pin)) for pin in request.pins),
    ]
    relaxed += [
        replace(request, forbids=tuple(f for f in request.forbids if f != ban))
        for ban in request.forbids
    ]
    share = MOST_CANDIDATES // len(relaxed)
    tables = [_choices_around(one, share) for one in relaxed]
    rows = np.unique(np.concatenate(tables), axis=0)
    layouts = _as_layouts(rows, request)
    pricing = CostModelPricing(request.workload())
    memory, again = pricing.least_memory_gib(_priceable(layouts, request))
    return Candidates(
        workload=request.workload(),
        layouts=replace(layouts, recompute_layers=again),
        memory_gib=memory,
    )


def _without(pins: object, name: str) -> dict[str, int | str]:
    return {key: value for key, value in dict(pins).items() if key != name}  # type: ignore[call-overload]


def _choices_around(request: PlanRequest, most: int) -> NDArray[np.int64]:
    """Combinations of choices, pinned ones as pinned even where they cannot be; thinned to about `most`
    rows.
    """
    space, pins = space_of(replace(request, pins={})), request.pins

    def options(name: str, free: Sequence[int]) -> list[int]:
        return [int(pins[name])] if name in pins else list(free) or [1]

    masks = [m for m in space.recompute if m in (0, int(Recompute.FULL)) or "recompute" in pins]
    masks = [m for m in masks if pins.get("recompute", recompute_name(m)) == recompute_name(m)]
    axes = [
        options("tp", space.tp),
        options("cp", space.cp),
        options("pp", space.pp),
        options("dp", [d for d in divisors(request.global_batch) if d <= request.gpus]),
        options("ep", space.ep),
        options("etp", [1]),
        options("vpp", _chunks(pins)),
        options("micro_batch", [1]),
        options("zero_stage", space.zero),
        masks or [int(Recompute.NONE)],
        [int(schedule_named(str(pins.get("schedule", "1f1b"))))],
    ]
    while np.prod([len(axis) for axis in axes], dtype=np.float64) > most:
        longest = max(range(len(axes)), key=lambda k: len(axes[k]))
        axes[longest] = sorted({*axes[longest][::2], axes[longest][-1]})
        if len(axes[longest]) <= 2:
            break
    rows = np.array(list(product(*axes)), dtype=np.int64)
    used = rows[:, 0] * rows[:, 1] * rows[:, 2] * rows[:, 3]
    fits = used <= request.gpus
    return rows[fits] if fits.any() else rows[[int(np.argmin(used))]]


def _as_layouts(rows: NDArray[np.int64], request: PlanRequest) -> Layout:
    tp, cp, pp, dp, ep, etp, vpp, size, zero, mask, schedule = rows.T
    sequence_parallel = (tp > 1) & space_of(replace(request, pins={})).sequence_parallel
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch=size,
        num_micro_batches=np.maximum(request.global_batch // (dp * size), 1),
        sequence_parallel=sequence_parallel,
        zero_stage=zero,
        recompute=mask,
        recompute_layers=np.zeros(len(rows), dtype=np.int64),
        schedule=schedule,
    )


def _chunks(pins: Mapping[str, int | str]) -> list[int]:
    """Virtual stages that a pinned schedule takes; 1 without one."""
    name = str(pins.get("schedule", "1f1b"))
    fewest = 2 if name == "interleaved-1f1b" else traits(schedule_named(name)).fewest_chunks
    return [max(fewest, 2)] if name == "zb-h1" else [fewest]


def _priceable(layouts: Layout, request: PlanRequest) -> Layout:
    """The same layouts where the memory formulas hold: whole expert replicas, no more stages than layers."""
    pp = np.minimum(np.asarray(layouts.pp), request.model.layers)
    ep = np.minimum(layouts.ep, np.maximum(layouts.tp * layouts.cp * layouts.dp // layouts.etp, 1))
    etp = np.minimum(layouts.etp, layouts.tp * layouts.cp * layouts.dp)
    vpp = np.minimum(layouts.vpp, np.maximum(request.model.layers // pp, 1))
    return replace(layouts, pp=pp, ep=ep, etp=etp, vpp=np.where(pp > 1, vpp, 1))


def _request_rules(request: PlanRequest) -> Iterator[Rule]:
    for name, value in request.pins.items():
        yield _RequestRule(f"pin {name}={value}", partial(_not_as_pinned, name, value))
    for ban in request.forbids:
        yield _RequestRule(f"forbid {ban}", partial(_as_forbidden, ban, request.gpus))


def _not_as_pinned(name: str, value: int | str, layouts: Layout) -> NDArray[np.bool_]:
    """Which layouts are not as pinned."""
    if name == "schedule":
        wanted_code, several = int(schedule_named(str(value))), np.asarray(layouts.vpp) > 1
        other = {"1f1b": several, "interleaved-1f1b": ~several}.get(
            str(value), np.zeros_like(several)
        )
        return np.asarray((np.asarray(layouts.schedule) != wanted_code) | other)
    if name == "recompute":
        wanted = np.array([recompute_name(mask) == value for mask in range(64)])
        return np.asarray(~wanted[np.asarray(layouts.recompute)])
    return np.asarray(getattr(layouts, name) != value)


def _as_forbidden(ban: str, gpus: int, layouts: Layout) -> NDArray[np.bool_]:
    """Which layouts make a forbidden choice."""
    mask = np.asarray(layouts.recompute)
    full = (mask & int(Recompute.FULL)) != 0
    by_name = {
        "interleaving": np.asarray(layouts.vpp) > 1,
        "recompute": mask != 0,
        "selective-recompute": (mask != 0) & ~full,
        "full-recompute": full,
        "idle-gpus": np.asarray(layouts.gpus) < gpus,
        **{f"zero-{stage}": np.asarray(layouts.zero_stage) == stage for stage in range(4)},
    }
    return by_name[ban] if ban in by_name else np.asarray(getattr(layouts, ban)) > 1


def _representatives(excess: FloatArray) -> NDArray[np.int64]:
    """One column for each set of broken limits: the one with the least excess."""
    signature = (excess > 0).T
    order = np.argsort(np.sum(excess, axis=0), kind="stable")
    _, first = np.unique(signature[order], axis=0, return_index=True)
    return np.asarray(order[first], dtype=np.int64)


def _conflict(limits: Sequence[Rule], excess: FloatArray, seed: int) -> list[int]:
    """Rows of a minimal set of limits that no representative keeps; empty where some keeps all."""
    needed = _refuted(limits, excess, list(range(len(limits))), seed)
    if needed is None:
        return []
    for row in list(needed):
        fewer = _refuted(limits, excess, [other for other in needed if other != row], seed)
        if fewer is not None:
            needed = fewer
    return sorted(needed)


def _refuted(
    limits: Sequence[Rule], excess: FloatArray, active: list[int], seed: int
) -> list[int] | None:
    """Which of the active limits suffice to leave no layout; None where a layout is left."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    kinds = [model.new_bool_var(f"kind_{k}") for k in range(excess.shape[1])]
    model.add_exactly_one(kinds)
    switches = {}
    for row in active:
        switch = model.new_bool_var(limits[row].name)
        limits[row].post(model, kinds, excess[row]).only_enforce_if(switch)
        switches[switch.index] = row
        model.add_assumption(switch)
    solver = repeatable_solver(seed)
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    if status != cp_model.INFEASIBLE:
        raise InternalError(
            f"CP-SAT answered {solver.status_name(status)} while explaining a conflict"
        )
    return [switches[index] for index in solver.sufficient_assumptions_for_infeasibility()]


def _words(limit: Rule, own: FloatArray, excess: FloatArray, row: int, request: PlanRequest) -> str:
    """A limit of the conflict, with the least by which it is missed where all others hold."""
    if isinstance(limit, AllowedSchedules):
        return f"{limit.name}: {limit.framework.name} runs {', '.join(limit.allowed)}"
    others = np.delete(excess, row, axis=0)
    alone = (own > 0) & ~(others > 0).any(axis=0)
    if limit.unit == "choices" or not (own > 0).any():
        return limit.name
    least = float(own[alone].min()) if alone.any() else float(own[own > 0].min())
    if isinstance(limit, HbmCapacity):
        usable = usable_hbm_gib(request.workload())
        return f"{limit.name}: the fullest GPU needs at least {least:.1f} GiB beyond the usable {usable:.1f}"
    return f"{limit.name}: missed by at least {least:g} {limit.unit}"


def _split_words(request: PlanRequest) -> str:
    return (
        f"hbm: layouts fit on average, but no split of the {request.model.layers} layers leaves room for the "
        "embedding, head and logits on the first and last stage"
    )


def _changes(
    request: PlanRequest, limits: Sequence[Rule], excess: FloatArray, more_gpus: bool
) -> Iterator[str]:
    """Single changes, each tried before it is offered."""
    for name, value in request.pins.items():
        if _feasible(replace(request, pins=_without(request.pins, name))):
            yield f"drop the pin {name}={value}"
    for ban in request.forbids:
        if _feasible(replace(request, forbids=tuple(f for f in request.forbids if f != ban))):
            yield f"allow {ban}"
    if request.reserve_gib and _feasible(replace(request, reserve_gib=0.0)):
        yield f"reserve {_largest_reserve(request):.1f} GiB or less, not {request.reserve_gib:g}"
    more = _fewest_gpus(request) if more_gpus else None
    if more is not None:
        yield f"take {more} GPUs, not {request.gpus}"
    row = next((k for k, limit in enumerate(limits) if isinstance(limit, HbmCapacity)), None)
    if row is not None:
        others = np.delete(excess, row, axis=0)
        only = (excess[row] > 0) & ~(others > 0).any(axis=0)
        if only.any():
            need = request.cluster.device.hbm_gib + float(excess[row][only].min()) / ALLOCATOR_SHARE
            yield f"take GPUs with at least {need:.0f} GiB"


def _feasible(request: PlanRequest) -> bool:
    """Whether a plan is found with little effort."""
    space = space_of(request)
    pricing = MappedPricing if is_irregular(request.cluster) else CostModelPricing
    search = LayoutSearch(
        space,
        pricing(space.workload),
        rules_for(space.workload),
        any_plan=True,
        most_priced=TRIAL_PRICED,
        seed=request.seed,
    )
    return bool(search.run().best)


def _largest_reserve(request: PlanRequest) -> float:
    """To a tenth of a GiB."""
    low, high = 0.0, request.reserve_gib
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _feasible(replace(request, reserve_gib=middle)) else (low, middle)
        )
    return low


def _fewest_gpus(request: PlanRequest) -> int | None:
    """The fewest GPUs of the cluster, in whole nodes, on which a plan is found; None if not on all of
    them.
    """
    node, most = request.cluster.gpus_per_node, request.cluster.gpus
    low, high = request.gpus, request.gpus
    while True:
        if high >= most:
            return None
        low, high = high, min(-(-2 * high // node) * node, most)
        if _feasible(replace(request, gpus=high)):
            break
    while high - low > node:
        middle = (low + high) // 2 // node * node
        if middle <= low:
            break
        low, high = (low, middle) if _feasible(replace(request, gpus=middle)) else (middle, high)
    return high
