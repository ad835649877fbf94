"""Which rules, pins and forbidden choices together leave no layout.

Each becomes an assumption of a CP-SAT model without an objective. Layouts that break the same of them are
alike, so one representative of each kind stands for all; the solver's sufficient assumptions are then thinned
out one by one until every one that is left is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import schedule_named, traits
from meshwright.costmodel.workload import Workload
from meshwright.errors import InternalError
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.request_space import recompute_name, space_of
from meshwright.planner.search.space import divisors
from meshwright.planner.solvers.clock import until
from meshwright.planner.solvers.cp_sat import repeatable_solver

FloatArray = NDArray[np.float64]

MOST_CANDIDATES = 200_000
"""Layouts around an infeasible request that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """All limits on a request, how far candidate layouts are over them, and which of them conflict."""

    limits: tuple[Rule, ...]
    excess: FloatArray
    """Shape [limits, candidates], at least 0, in each limit's unit."""
    candidates: Layout
    """The layouts, shape [candidates]."""
    core: tuple[int, ...]
    """Rows of a minimal set of limits that no candidate keeps; empty where some candidate keeps all."""

    def least_excess(self, row: int) -> float | None:
        """The least by which a limit is missed where all others hold, or anywhere if it never is alone."""
        alone = self.only_missed(row)
        over = self.excess[row][alone if alone.any() else self.excess[row] > 0]
        return float(over.min()) if len(over) else None

    def nearest_miss(self, row: int) -> Layout | None:
        """The candidate that misses a limit by least, and no other where there is such a one."""
        alone = self.only_missed(row)
        missing = alone if alone.any() else self.excess[row] > 0
        if not missing.any():
            return None
        over = np.where(missing, self.excess[row], np.inf)
        return self.candidates.scalar(int(np.argmin(over)))

    def only_missed(self, row: int) -> NDArray[np.bool_]:
        """Candidates that break this limit and no other, shape [candidates]."""
        other_excess = np.delete(self.excess, row, axis=0)
        return np.asarray((self.excess[row] > 0) & ~(other_excess > 0).any(axis=0))


def conflict_of(request: PlanRequest, workload: Workload) -> Conflict:
    """The limits of a request and a minimal set of them that conflict."""
    candidates = _candidates(request, workload)
    limits = (*rules_for(workload), *_request_rules(request))
    excess = np.stack([np.maximum(limit.excess(candidates), 0.0) for limit in limits])
    core = _conflict(limits, excess[:, _representatives(excess)], request.seed)
    return Conflict(limits=limits, excess=excess, candidates=candidates.layouts, core=tuple(core))


class RequestRule(Rule):
    """A pin or a forbidden choice as a rule over layouts. On a finished plan `plan.verify` checks it."""

    unit = "choices"

    def __init__(
        self,
        kind: Literal["pin", "forbid"],
        choice: str,
        pinned: int | str | None,
        broken: Callable[[Layout], NDArray[np.bool_]],
    ) -> None:
        self.kind, self.choice, self.pinned = kind, choice, pinned
        self.name = f"{kind} {choice}"
        self._broken = broken

    def excess(self, table: LayoutTable) -> FloatArray:
        return np.asarray(self._broken(table.layouts), dtype=np.float64)

    def check(self, plan: FinishedPlan) -> Finding | None:
        array_of_one = Layout(
            **{name: np.array([value]) for name, value in vars(plan.layout).items()}
        )
        if not self._broken(array_of_one)[0]:
            return None
        return Finding(
            rule=self.name,
            value=1,
            limit=0,
            unit=self.unit,
            words="not as asked",
            remedy="Drop the wish.",
        )


def _candidates(request: PlanRequest, workload: Workload) -> Candidates:
    """Layouts around the request: its own space and, with one pin or ban lifted at a time, those next to
    it.
    """
    relaxed = [
        request,
        *(replace(request, pins=without_pin(request.pins, pin)) for pin in request.pins),
    ]
    relaxed += [
        replace(request, forbids=tuple(f for f in request.forbids if f != ban))
        for ban in request.forbids
    ]
    share = MOST_CANDIDATES // len(relaxed)
    tables = [_choices_around(relaxed_request, share) for relaxed_request in relaxed]
    rows = np.unique(np.concatenate(tables), axis=0)
    layouts = _as_layouts(rows, request)
    pricing = CostModelPricing(workload)
    memory, recomputed_layers = pricing.least_memory_gib(_priceable(layouts, request))
    return Candidates(
        workload=workload,
        layouts=replace(layouts, recompute_layers=recomputed_layers),
        memory_gib=memory,
    )


def without_pin(pins: Mapping[str, int | str], name: str) -> dict[str, int | str]:
    """The pins without one of them."""
    return {key: value for key, value in pins.items() if key != name}


def _choices_around(request: PlanRequest, most_rows: int) -> NDArray[np.int64]:
    """Combinations of choices, pinned ones as pinned even where they cannot be; thinned to about `most`
    rows.
    """
    space, pins = space_of(replace(request, pins={})), request.pins

    def options(name: str, free: Sequence[int]) -> list[int]:
        return [int(pins[name])] if name in pins else list(free) or [1]

    stage = pins.get("zero_stage")
    offloads = [share for zero, share in space.offloads if stage in (None, zero)]
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
        options("shard_groups", [1]),
        options("optimizer_offload", _ends(offloads)),
        masks or [int(Recompute.NONE)],
        [int(schedule_named(str(pins.get("schedule", "1f1b"))))],
    ]
    while np.prod([len(axis) for axis in axes], dtype=np.float64) > most_rows:
        longest = max(range(len(axes)), key=lambda k: len(axes[k]))
        axes[longest] = sorted({*axes[longest][::2], axes[longest][-1]})
        if len(axes[longest]) <= 2:
            break
    rows = np.array(list(product(*axes)), dtype=np.int64)
    if "optimizer_offload" not in pins:
        rows = rows[_offload_goes(rows[:, _ZERO_STAGE], rows[:, _OFFLOAD], space.offloads)]
    used = rows[:, 0] * rows[:, 1] * rows[:, 2] * rows[:, 3]
    fits = used <= request.gpus
    return rows[fits] if fits.any() else rows[[int(np.argmin(used))]]


_ZERO_STAGE, _OFFLOAD = 8, 10
"""Columns of a row of choices."""


def _offload_goes(
    zero_stages: NDArray[np.int64], shares: NDArray[np.int64], pairs: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Whether nothing is offloaded, or that share under that ZeRO stage is in the space."""
    codes = [200 * zero + share for zero, share in pairs]
    return np.asarray((shares == 0) | np.isin(200 * zero_stages + shares, codes))


def _ends(values: Sequence[int]) -> list[int]:
    """The least and the largest."""
    return sorted({min(values), max(values)}) if values else [0]


def _as_layouts(rows: NDArray[np.int64], request: PlanRequest) -> Layout:
    tp, cp, pp, dp, ep, etp, vpp, size, zero, groups, offload, mask, schedule = rows.T
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
        shard_groups=groups,
        optimizer_offload=offload,
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
    for name, value in request.layout_pins.items():
        yield RequestRule("pin", name, value, partial(_not_as_pinned, name, value))
    for ban in request.forbids:
        yield RequestRule("forbid", ban, None, partial(_as_forbidden, ban, request.gpus))


def _not_as_pinned(name: str, value: int | str, layouts: Layout) -> NDArray[np.bool_]:
    """Which layouts are not as pinned."""
    if name == "schedule":
        wanted_code, several = int(schedule_named(str(value))), np.asarray(layouts.vpp) > 1
        wrong_chunks = {"1f1b": several, "interleaved-1f1b": ~several}.get(
            str(value), np.zeros_like(several)
        )
        return np.asarray((np.asarray(layouts.schedule) != wanted_code) | wrong_chunks)
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
        "shard-groups": np.asarray(layouts.shard_groups) > 1,
        "optimizer-offload": np.asarray(layouts.optimizer_offload) > 0,
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
        fewer = _refuted(limits, excess, [active for active in needed if active != row], seed)
        if fewer is not None:
            needed = fewer
    return sorted(needed)


def _refuted(
    limits: Sequence[Rule], excess: FloatArray, active: list[int], seed: int
) -> list[int] | None:
    """Which of the active limits suffice to leave no layout; None where a layout is left."""
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    kinds = [model.new_bool_var(f"kind_{k}") for k in range(excess.shape[1])]
    model.add_exactly_one(kinds)
    switches = {}
    for row in active:
        switch = model.new_bool_var(limits[row].name)
        limits[row].post(model, kinds, excess[row]).only_enforce_if(switch)
        switches[switch.index] = row
        model.add_assumption(switch)
    # Always answered: it takes milliseconds, and there is nothing to print without.
    with until(inf):
        solver = repeatable_solver(seed)
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    if status != cp_model.INFEASIBLE:
        raise InternalError(
            f"CP-SAT answered {solver.status_name(status)} while explaining a conflict"
        )
    return [switches[index] for index in solver.sufficient_assumptions_for_infeasibility()]
