"""Which rules, pins and forbidden choices together leave no layout.

Each becomes an assumption of a CP-SAT model without an objective. Layouts that break the same of them are
alike, so one representative of each kind stands for all; the solver's sufficient assumptions are then thinned
out one by one until every one that is left is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.pipeline.schedules import schedule_named
from meshwright.costmodel.workload import Workload
from meshwright.errors import InternalError
from meshwright.planner.plan.conflict_tables import tables_around
from meshwright.planner.request.executions import EXECUTION_PINS, ExecutionOptions
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.request_space import recompute_name
from meshwright.planner.solvers.clock import until
from meshwright.planner.solvers.cp_sat import repeatable_solver

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """All limits on a request, how far candidate layouts are over them, and which of them conflict."""

    limits: tuple[Rule, ...]
    excess: FloatArray
    """Shape [limits, candidates], at least 0, in each limit's unit."""
    candidates: tuple[Candidates, ...]
    """The layouts, a table for each execution that is looked at; together [candidates]."""
    core: tuple[int, ...]
    """Rows of a minimal set of limits that no candidate keeps; empty where some candidate keeps all."""

    def least_excess(self, row: int) -> float | None:
        """The least by which a limit is missed where all others hold, or anywhere if it never is alone."""
        alone = self.only_missed(row)
        over = self.excess[row][alone if alone.any() else self.excess[row] > 0]
        return float(over.min()) if len(over) else None

    def nearest_miss(self, row: int) -> tuple[Workload, Layout] | None:
        """The candidate that misses a limit by least, and no other where there is such a one."""
        alone = self.only_missed(row)
        missing = alone if alone.any() else self.excess[row] > 0
        if not missing.any():
            return None
        position = int(np.argmin(np.where(missing, self.excess[row], np.inf)))
        for table in self.candidates:
            if position < len(table.memory_gib):
                return table.workload, table.layouts.scalar(position)
            position -= len(table.memory_gib)
        return None

    def only_missed(self, row: int) -> NDArray[np.bool_]:
        """Candidates that break this limit and no other, shape [candidates]."""
        other_excess = np.delete(self.excess, row, axis=0)
        return np.asarray((self.excess[row] > 0) & ~(other_excess > 0).any(axis=0))


def conflict_of(request: PlanRequest) -> Conflict:
    """The limits of a request that no layout keeps, and a minimal set of them that conflict."""
    tables = tables_around(request)
    rules = {rule.name: rule for table in tables for rule in rules_for(table.workload)}
    limits = (*rules.values(), *_request_rules(request))
    excess = np.concatenate([_excess(limits, table) for table in tables], axis=1)
    core = _conflict(limits, excess[:, _representatives(excess)], request.seed)
    return Conflict(limits=limits, excess=excess, candidates=tables, core=tuple(core))


def _excess(limits: Sequence[Rule], table: Candidates) -> FloatArray:
    """How far layouts are over each limit, at least 0: shape [limits, layouts]. What says nothing of a
    workload is kept.
    """
    applying = {rule.name for rule in rules_for(table.workload)}
    kept = np.zeros(len(table.memory_gib))
    return np.stack(
        [
            np.maximum(limit.excess(table), 0.0)
            if isinstance(limit, RequestRule) or limit.name in applying
            else kept
            for limit in limits
        ]
    )


class RequestRule(Rule):
    """A pin or a forbidden choice as a rule over layouts. On a finished plan `plan.verify` checks it."""

    unit = "choices"

    def __init__(
        self,
        kind: Literal["pin", "forbid", "without"],
        choice: str,
        pinned: int | str | None,
        broken: Callable[[Layout], NDArray[np.bool_]],
        runs_otherwise: Callable[[Execution], bool] = lambda execution: False,
    ) -> None:
        self.kind, self.choice, self.pinned = kind, choice, pinned
        self.name = f"{kind} {choice}"
        self._broken = broken
        self._runs_otherwise = runs_otherwise

    def excess(self, table: LayoutTable) -> FloatArray:
        if self._runs_otherwise(Execution.within(table.workload)):
            return np.ones(table.layouts.broadcast_shape())
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


def _request_rules(request: PlanRequest) -> Iterator[Rule]:
    for name, value in request.pins.items():
        if name in EXECUTION_PINS:
            allowed = getattr(request.execution_options, name)
            otherwise = partial(_runs_otherwise, name, allowed)
            yield RequestRule("pin", name, value, _never_broken, otherwise)
        else:
            yield RequestRule("pin", name, value, partial(_not_as_pinned, name, value))
    for lack in request.without:
        alone = replace(request, pins={}, without=(lack,)).execution_options
        yield RequestRule("without", lack, None, _never_broken, partial(_needs_more, alone))
    for ban in request.forbids:
        yield RequestRule("forbid", ban, None, partial(_as_forbidden, ban, request.gpus))


def _never_broken(layouts: Layout) -> NDArray[np.bool_]:
    return np.zeros(layouts.broadcast_shape(), dtype=np.bool_)


def _runs_otherwise(name: str, allowed: Sequence[object], execution: Execution) -> bool:
    """Whether an execution makes another choice than a pin allows."""
    return getattr(execution, name) not in allowed


def _needs_more(options: ExecutionOptions, execution: Execution) -> bool:
    """Whether an execution makes a choice that is not there."""
    return any(_runs_otherwise(name, getattr(options, name), execution) for name in EXECUTION_PINS)


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
