"""Why there is no plan: the rules that conflict, what is missing, and the smallest changes that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice, product
from math import ceil, inf, lcm, prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.fabric import GPU_BUDGET, Bisection, NvlinkDomain
from meshwright.constraints.layers import PrecisionOnDevice
from meshwright.constraints.memory import HbmCapacity, HostMemory
from meshwright.constraints.pipeline import AllowedSchedules
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import Finding, FinishedPlan, LayoutTable, Rule
from meshwright.costmodel.execution_names import REFERENCE_PLACES
from meshwright.costmodel.footprint import ALLOCATOR_SHARE, stage_memory_gib, usable_hbm_gib
from meshwright.costmodel.layout import AXES, ROUNDING, Layout, Recompute
from meshwright.costmodel.losses import in_chunks
from meshwright.costmodel.records import POINT_ESTIMATE
from meshwright.costmodel.schedules import schedule_named, traits
from meshwright.costmodel.workload import Execution, Workload
from meshwright.errors import InputError, InternalError
from meshwright.frameworks.catalog import FRAMEWORK_NAMES, framework_named, planned
from meshwright.model_specs.adapters import AdapterMethod, AdapterSpec
from meshwright.planner.bounds.layer_split import any_stages
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.document import (
    ConflictingRule,
    Infeasible,
    SmallestChange,
    change_sentence,
    rule_sentence,
)
from meshwright.planner.request.choices import (
    ALLOW_PLACED,
    BY_NAME,
    DEGREES,
    IDLE_GPUS,
    OF_EXECUTION,
    OF_LAYOUT,
    PERMISSIONS,
    is_forbidden,
)
from meshwright.planner.request.executions import ExecutionOptions
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import recompute_name, space_of
from meshwright.planner.solvers.clock import is_over, limit_left_s, until
from meshwright.planner.solvers.programmes import repeatable_solver

# Layouts around a request without a plan, as tables for the rules: its own, and those with a wish lifted.


MOST_CANDIDATES = 60_000
"""Layouts around an infeasible request that are looked at."""
PROBED_CANDIDATES = 2_000
"""Of them, to see which executions keep rules that the plainest one breaks."""


def executions_to_try(request: PlanRequest) -> list[Execution]:
    """The plainest execution, and those that differ from it in one choice and keep a rule that it breaks, or
    miss the HBM by less.

    Sliding windows are one reason: keys and values may not pass around a ring then, but heads may be swapped.

    Parameters
    ----------
    request
        Whose executions are compared; most often one without a plan.
    """
    plainest, (choices, *_) = request.plainest, _relaxed_rows([request], PROBED_CANDIDATES)
    own = _table(request, plainest, choices)
    broken = {rule.name: rule.excess(own) > 0 for rule in rules_for(own.workload)}
    over = broken[HbmCapacity.name]
    executions = [plainest]
    if not any(is_broken.any() for is_broken in broken.values()):
        return executions
    for execution in request.execution_options.executions():
        differing = [
            choice.name
            for choice in OF_EXECUTION
            if getattr(execution, choice.name) != getattr(plainest, choice.name)
        ]
        if len(differing) == 1:
            table = _table(request, execution, choices)
            still = {rule.name: rule.excess(table) > 0 for rule in rules_for(table.workload)}
            none = np.zeros(len(table.memory_gib), dtype=bool)
            keeps = any((rows & ~still.get(name, none)).any() for name, rows in broken.items())
            leaner = over & (table.memory_gib < own.memory_gib - ROUNDING)
            if keeps or leaner.any():
                executions.append(execution)
    return executions


def tables_around(request: PlanRequest) -> tuple[Candidates, ...]:
    """Layouts around the request: its own space and, with one wish lifted at a time, those next to it; run
    as the request would be, and as it would be with a wish lifted.

    Parameters
    ----------
    request
        Without a plan.
    """
    relaxed = [request, *(changed for _, changed in _lifting(request))]
    executions = dict.fromkeys(
        execution for each in relaxed for execution in executions_to_try(each)
    )
    wishes = (request.layout_pins, request.forbids)
    others = [each for each in relaxed if (each.layout_pins, each.forbids) != wishes]
    share = MOST_CANDIDATES // len(executions)
    rows = np.unique(np.concatenate(_relaxed_rows([request, *others], share)), axis=0)
    return tuple(_table(request, execution, rows) for execution in executions)


def _relaxed_rows(requests: Sequence[PlanRequest], most_rows: int) -> list[NDArray[np.int64]]:
    share = max(most_rows // len(requests), 1)
    return [_choices_around(each, share) for each in requests]


def _table(request: PlanRequest, execution: Execution, rows: NDArray[np.int64]) -> Candidates:
    """Layouts of rows of choices, run in one way."""
    workload = request.workload(execution)
    layouts = _as_layouts(rows, request)
    memory, recomputed_layers = CostModelPricing(workload).least_memory_gib(
        _priceable(layouts, request)
    )
    return Candidates(
        workload=workload,
        layouts=replace(layouts, recompute_layers=recomputed_layers),
        memory_gib=memory,
    )


def _choices_around(request: PlanRequest, most_rows: int) -> NDArray[np.int64]:
    """Combinations of choices that the GPUs hold, pinned ones as pinned even where they cannot be; thinned to
    about `most_rows`.
    """
    space, pins = space_of(replace(request, pins={})), request.pins

    def options(name: str, free: Sequence[int]) -> list[int]:
        return [int(pins[name])] if name in pins else list(free) or [1]

    stage = pins.get("zero_stage")
    offloads = [share for zero, share in space.offloads if stage in (None, zero)]
    masks = [m for m in space.recompute if m in (0, int(Recompute.FULL)) or "recompute" in pins]
    masks = [m for m in masks if pins.get("recompute", recompute_name(m)) == recompute_name(m)]
    plain = {choice.name: [choice.plain] for choice in OF_LAYOUT if not choice.words}
    tried: dict[str, list[Any]] = plain | {
        **{name: list(getattr(space, name)) for name in DEGREES if name != "etp"},
        "vpp": _chunks(pins, interleaving=space.interleaving),
        "optimizer_offload": sorted({min(offloads), max(offloads)}) if offloads else [0],
    }
    tried["zero_stage"] = list(space.zero)
    axes = {name: options(name, values) for name, values in tried.items()}
    axes["schedule"] = [int(schedule_named(str(pins.get("schedule", "1f1b"))))]
    axes["recompute"] = masks or [int(Recompute.NONE)]
    others = [name for name in axes if name not in AXES]
    while True:
        degrees = _degrees(axes, request.gpus)
        longest = max(axes, key=lambda name: len(axes[name]))
        count = len(degrees) * prod(len(axes[name]) for name in others)
        if count <= most_rows or len(axes[longest]) <= 2:
            break
        axes[longest] = _thinned(axes[longest], request.gpus if longest in DEGREES else 0)
    rest = np.array(list(product(*(axes[name] for name in others))), dtype=np.int64)
    both = (np.repeat(degrees, len(rest), axis=0), np.tile(rest, (len(degrees), 1)))
    in_order = [[*AXES, *others].index(choice.name) for choice in OF_LAYOUT]
    rows = np.concatenate(both, axis=1)[:, in_order]
    columns = _columns(rows)
    if "optimizer_offload" not in pins:
        pairs = set(space.offloads)
        stages, shares = (columns[name].tolist() for name in ("zero_stage", "optimizer_offload"))
        goes = [pair in pairs or pair[1] == 0 for pair in zip(stages, shares, strict=True)]
        rows = rows[np.array(goes, dtype=np.bool_)]
    return rows


def _degrees(axes: Mapping[str, Sequence[int]], gpus: int) -> NDArray[np.int64]:
    """Degrees of `AXES` that so many GPUs hold; the smallest ones where they hold none."""
    grid = np.meshgrid(*(np.array(axes[name], dtype=np.int64) for name in AXES), indexing="ij")
    degrees = np.stack([axis.ravel() for axis in grid], axis=1)
    used = degrees.prod(axis=1)
    fits = used <= gpus
    return degrees[fits] if fits.any() else degrees[[int(np.argmin(used))]]


def _thinned(values: Sequence[int], gpus: int) -> list[int]:
    """About half of some values, the last one among them; of degrees those that divide the GPUs are left out
    after all others.
    """
    spare = [value for value in values[:-1] if gpus % value] if gpus else []
    if spare:
        return sorted({*values} - {*(spare[1::2] or spare)})
    return sorted({*values[::2], values[-1]})


def _columns(rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Rows of choices by the name of the choice."""
    return dict(zip((choice.name for choice in OF_LAYOUT), rows.T, strict=True))


def _as_layouts(rows: NDArray[np.int64], request: PlanRequest) -> Layout:
    framework = framework_named(request.framework)
    columns = _columns(rows)
    sequences = columns["dp"] * columns["micro_batch"]
    return Layout(
        **columns,
        num_micro_batches=np.maximum(request.global_batch // sequences, 1),
        sequence_parallel=(columns["tp"] > 1) & (framework.sequence_parallel is not None),
        recompute_layers=np.zeros(len(rows), dtype=np.int64),
    )


def _chunks(pins: Mapping[str, int | str], *, interleaving: bool) -> list[int]:
    """Virtual stages that a pinned schedule takes; without one, also two where stages may be interleaved."""
    if "schedule" not in pins:
        return [1, 2] if interleaving else [1]
    name = str(pins["schedule"])
    fewest = 2 if name == "interleaved-1f1b" else traits(schedule_named(name)).fewest_chunks
    return [max(fewest, 2)] if name == "zb-h1" else [fewest]


def _priceable(layouts: Layout, request: PlanRequest) -> Layout:
    """The same layouts where the memory formulas hold: whole expert replicas, no more stages than layers."""
    pp = np.minimum(np.asarray(layouts.pp), request.model.layers)
    ep = np.minimum(layouts.ep, np.maximum(layouts.tp * layouts.cp * layouts.dp // layouts.etp, 1))
    etp = np.minimum(layouts.etp, layouts.tp * layouts.cp * layouts.dp)
    vpp = np.minimum(layouts.vpp, np.maximum(request.model.layers // pp, 1))
    return replace(layouts, pp=pp, ep=ep, etp=etp, vpp=np.where(pp > 1, vpp, 1))


# Which rules, pins and forbidden choices together leave no layout.
#
# Each becomes an assumption of a CP-SAT model without an objective. Layouts that break the same of them
# are alike, so one representative of each kind stands for all; the solver's sufficient assumptions are
# then thinned out one by one until every one that is left is needed.


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
        """The least by which a limit is missed where all others hold, or anywhere if it never is alone.

        Parameters
        ----------
        row
            Of the limit, in `limits`.
        """
        alone = self.only_missed(row)
        over = self.excess[row][alone if alone.any() else self.excess[row] > 0]
        return float(over.min()) if len(over) else None

    def nearest_miss(self, row: int) -> tuple[Workload, Layout] | None:
        """The candidate that misses a limit by least, and no other where there is such a one.

        Parameters
        ----------
        row
            Of the limit, in `limits`.
        """
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
        """Candidates that break this limit and no other, shape [candidates].

        Parameters
        ----------
        row
            Of the limit, in `limits`.
        """
        other_excess = np.delete(self.excess, row, axis=0)
        return np.asarray((self.excess[row] > 0) & ~(other_excess > 0).any(axis=0))


def conflict_of(request: PlanRequest) -> Conflict:
    """The limits of a request that no layout keeps, and a minimal set of them that conflict.

    Parameters
    ----------
    request
        Without a plan; where some layout keeps all limits the core is empty.
    """
    tables = tables_around(request)
    rules = {rule.name: rule for table in tables for rule in rules_for(table.workload)}
    limits = (*rules.values(), *_request_rules(request))
    excess = np.concatenate([_excess(limits, table) for table in tables], axis=1)
    # One column for each set of broken limits: the one with the least excess.
    signature = (excess > 0).T
    order = np.argsort(np.sum(excess, axis=0), kind="stable")
    _, first = np.unique(signature[order], axis=0, return_index=True)
    core = _conflict(limits, excess[:, np.asarray(order[first], dtype=np.int64)], request.seed)
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
        if not self._broken(plan.layout.flat())[0]:
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
        if BY_NAME[name].of == "execution":
            allowed = request.execution_options.values[name]
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
    return any(_runs_otherwise(name, able, execution) for name, able in options.values.items())


def _not_as_pinned(name: str, value: int | str, layouts: Layout) -> NDArray[np.bool_]:
    """Which layouts are not as pinned."""
    if name == "schedule":
        wanted_code, several = int(schedule_named(str(value))), np.asarray(layouts.vpp) > 1
        wrong_chunks = {"1f1b": several, "interleaved-1f1b": ~several}.get(
            str(value), np.zeros_like(several)
        )
        return np.asarray((np.asarray(layouts.schedule) != wanted_code) | wrong_chunks)
    return np.asarray(_pin_words(layouts, name) != value)


def _pin_words(layouts: Layout, name: str) -> NDArray[Any]:
    """A choice of layouts as pins write it, the schedule aside."""
    values = np.asarray(getattr(layouts, name))
    if name != "recompute":
        return values
    names = np.array([recompute_name(mask) for mask in range(int(values.max(initial=0)) + 1)])
    return np.asarray(names[values])


def _as_forbidden(ban: str, gpus: int, layouts: Layout) -> NDArray[np.bool_]:
    """Which layouts make a forbidden choice."""
    if ban == IDLE_GPUS:
        return np.asarray(layouts.gpus) < gpus
    return np.asarray(is_forbidden(ban, partial(_pin_words, layouts)))


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


PRECISION_NAME = PrecisionOnDevice.name
LARGEST_HOST_GIB = 1 << 14
"""That is tried."""
MOST_TRIES = 8
"""Values that are tried on each side of a pin."""
MOST_SIZES = 4
"""Numbers of GPUs that are tried on each side, where no memory is missing."""
MAPPING_LIMITS = {
    "inside-domain": (NvlinkDomain.name, "no mapping keeps the groups in one domain each"),
    "max-cut-use": (Bisection.name, "every mapping that fits uses some cut more than is allowed"),
}
"""The rule that a change lifts, of those that bind mappings, and what it says of a layout without any."""
RESIDENT = "resident"
"""A reference model on the GPUs."""
FROZEN_BITS_FALLING: tuple[AdapterMethod, ...] = ("lora", "lora-8bit", "qlora")
"""Kinds of adapters that are offered, the one with the most bits of a frozen weight that fits."""
ROOMY = {"permit", "loss", "reference", "train"}
"""Changes that make room."""
ELSEWHERE = {"gpus", "device-hbm-gib", "host-memory-gib", "framework"}
"""Changes that take the run to another machine or framework."""
MOST_PAIRS = 40
"""Pairs of changes that are tried where no single one helps on the machine and framework that are there."""
TRIAL_PRICED = 30
"""Layouts that one trial of a change may price; a change that is not found to help by then is not offered."""


def explain_infeasible(request: PlanRequest, workload: Workload) -> Infeasible:
    """The conflict behind an infeasible request, and changes that make it feasible: single ones, one pair
    where no single one does on the same machine and framework, and what makes room under another framework
    where no pair does either.

    Parameters
    ----------
    request
        Without a plan.
    workload
        What it was priced with, for the memory that a GPU has to give.
    """
    conflict = conflict_of(request)
    rules = [_conflicting_rule(conflict, row, workload) for row in conflict.core]
    names = {conflict.limits[row].name for row in conflict.core}
    more_gpus = not names or bool(names & {HbmCapacity.name, GPU_BUDGET.name})
    changes = list(_changes(request, conflict, more_gpus))
    if all(change.change in ELSEWHERE for change in changes):
        is_memory = not names or HbmCapacity.name in names
        changes += _least_pair(request, is_memory)
        if is_memory and {change.change for change in changes} <= ELSEWHERE - {"framework"}:
            changes += _roomier_frameworks(request)
    if not rules:
        rules = list(_rules_of_mappings(request, changes))
    if not rules:
        rules = [ConflictingRule(kind="layer-split", rule=HbmCapacity.name)]
    layers = request.model.layers
    return Infeasible(
        conflict=[rule_sentence(rule, request.framework, layers) for rule in rules],
        smallest_changes=[change_sentence(change) for change in changes],
        rules=rules,
        changes=changes,
    )


def _rules_of_mappings(
    request: PlanRequest, changes: Sequence[SmallestChange]
) -> Iterator[ConflictingRule]:
    """What no layout breaks before it is mapped: a rule is at fault where lifting it was found to help. A pin
    whose change helps as well is part of the conflict.
    """
    at_fault = {change.change for change in changes} & set(MAPPING_LIMITS)
    for kind in sorted(at_fault):
        name, words = MAPPING_LIMITS[kind]
        yield ConflictingRule(kind="rule", rule=name, words=words)
    for change in changes:
        if at_fault and change.change == "drop-pin":
            name = str(change.field)
            yield ConflictingRule(kind="pin", rule=name, pinned=request.pins[name])


def _conflicting_rule(conflict: Conflict, row: int, workload: Workload) -> ConflictingRule:
    """A limit of the conflict, with the least by which it is missed."""
    limit = conflict.limits[row]
    if isinstance(limit, RequestRule):
        return ConflictingRule(kind=limit.kind, rule=limit.choice, pinned=limit.pinned)
    if isinstance(limit, AllowedSchedules):
        return ConflictingRule(kind="rule", rule=limit.name, allowed=list(limit.allowed))
    usable_gib = usable_hbm_gib(workload) if isinstance(limit, HbmCapacity) else None
    words = None if isinstance(limit, HbmCapacity) else _words(conflict, row)
    return ConflictingRule(
        kind="rule",
        rule=limit.name,
        missed_by=conflict.least_excess(row),
        limit=usable_gib,
        unit=limit.unit,
        words=words,
    )


def _words(conflict: Conflict, row: int) -> str | None:
    """What the rule says of the layout that misses it by least; None where it can say nothing of one."""
    nearest = conflict.nearest_miss(row)
    if nearest is None:
        return None
    workload, layout = nearest
    stages = any_stages(workload, layout)
    if stages is None:
        # More virtual stages than layers: the last ones are empty, as the rule on that says.
        stages = ((0,) * int(layout.vpp),) * int(layout.pp)
    finished = FinishedPlan(workload=workload, layout=layout, stages=stages)
    finding = conflict.limits[row].check(finished)
    return None if finding is None else f"{finding.words}. {finding.remedy}".rstrip(". ")


def _changes(request: PlanRequest, conflict: Conflict, more_gpus: bool) -> Iterator[SmallestChange]:
    """Single changes, each tried before it is offered."""
    names = {conflict.limits[row].name for row in conflict.core}
    yield from _wishes_lifted(request)
    if request.reserve_gib and _feasible(replace(request, reserve_gib=0.0)):
        yield SmallestChange(
            change="reserve-gib",
            value=_largest_reserve(request, conflict),
            asked=request.reserve_gib,
        )
    if PRECISION_NAME in names:
        for precision in ("bf16", "fp16"):
            if _feasible(replace(request, precision=precision)):
                yield SmallestChange(change="precision", value=precision, asked=request.precision)
                break
    yield from _other_frameworks(request, names)
    if HostMemory.name in names:
        yield from _of_hosts(request)
    yield from _of_mappings(request, names)
    if request.memory_risk < POINT_ESTIMATE and _feasible(
        replace(request, memory_risk=POINT_ESTIMATE)
    ):
        yield SmallestChange(change="memory-risk", value=POINT_ESTIMATE, asked=request.memory_risk)
    if HbmCapacity.name in names:
        # Each permission with which a plan is found; the first loss in chunks, the first other place of the
        # reference and the first adapters that fit; with the memory of the layout that was found.
        decided: set[str] = set()
        for change, changed in _with_room(request):
            if change.change not in decided and not _opens_nothing(request, changed):
                fitting = _fitting(change, changed)
                if fitting is not None:
                    decided |= {change.change} - {"permit"}
                    yield fitting
    yield from _other_batches(request)
    for gpus in _other_gpus(request, more_gpus):
        yield SmallestChange(change="gpus", value=gpus, asked=request.gpus)
    is_unbound = request.max_cut_use == 1 and not request.inside_domain
    hbm_gib = _hbm_needed_gib(request, conflict) if names or is_unbound else None
    if hbm_gib is not None:
        yield SmallestChange(
            change="device-hbm-gib", value=hbm_gib, asked=request.cluster.device.hbm_gib
        )


def _other_frameworks(request: PlanRequest, conflicting: Set[str]) -> Iterator[SmallestChange]:
    """The first framework under whose rules a plan is found, where rules of the one asked for are broken, or
    in whose memory one is found without that of the hosts, where memory is missing.
    """
    is_broken = any(name.startswith(f"{request.framework}-") for name in conflicting)
    may_help = is_broken or HbmCapacity.name in conflicting
    forbids = request.forbids if is_broken else (*request.forbids, "optimizer-offload")
    forbidding = replace(request, forbids=tuple(dict.fromkeys(forbids)))
    for change, changed in _on_frameworks(forbidding) if may_help else ():
        if _feasible(changed):
            yield change
            return


def _on_frameworks(request: PlanRequest) -> Iterator[tuple[SmallestChange, PlanRequest]]:
    """Each other framework that knows what is asked for, with the request under it."""
    for name in FRAMEWORK_NAMES:
        if name == request.framework:
            continue
        try:
            changed = replace(request, framework=name)
        except InputError:
            continue
        yield SmallestChange(change="framework", value=name, asked=request.framework), changed


def _roomier_frameworks(request: PlanRequest) -> Iterator[SmallestChange]:
    """The first framework under which one change that makes room, or else two, let a plan be found."""
    frameworks = list(_on_frameworks(request))
    for most in (1, 2):
        for change, changed in frameworks:
            for room in _least_room(changed) if most == 1 else _least_pair(changed, is_memory=True):
                fits = {"needs_gib": room.needs_gib, "usable_gib": room.usable_gib}
                alone = room.model_copy(update={"needs_gib": None, "usable_gib": None})
                yield change.model_copy(update={"together_with": alone, **fits})
                return


def _least_room(request: PlanRequest) -> Iterator[SmallestChange]:
    """What makes room and lets a plan be found, that which changes the training least first."""
    for change, changed in _with_room(request):
        fitting = None if _opens_nothing(request, changed) else _fitting(change, changed)
        if fitting is not None:
            yield fitting


def _wishes_lifted(request: PlanRequest) -> Iterator[SmallestChange]:
    """The nearest values of pins, and each pin, ban and lack of software lifted."""
    for name, value in request.pins.items():
        yield from _nearest_pins(request, name, value)
    for change, changed in _lifting(request):
        if _feasible(changed):
            yield change


def _lifting(request: PlanRequest) -> Iterator[tuple[SmallestChange, PlanRequest]]:
    """Each pin, ban and lack of software that may be lifted, with the request changed."""
    for name, value in request.pins.items():
        others = {each: pin for each, pin in request.pins.items() if each != name}
        dropped = replace(request, pins=others)
        yield SmallestChange(change="drop-pin", field=name, asked=value), dropped
    for ban in request.forbids:
        allowed = tuple(each for each in request.forbids if each != ban)
        yield SmallestChange(change="allow", field=ban), replace(request, forbids=allowed)
    for lack in request.without:
        has_it = tuple(each for each in request.without if each != lack)
        yield SmallestChange(change="do-with", field=lack), replace(request, without=has_it)


def _with_room(request: PlanRequest) -> Iterator[tuple[SmallestChange, PlanRequest]]:
    """What may make room, that which changes the training least first; each with the request changed."""
    framework = framework_named(request.framework)
    tried: list[tuple[Literal["permit", "loss", "reference", "train"], str, dict[str, Any]]] = [
        ("permit", word, {"allow": (*request.allow, word)})
        for word in PERMISSIONS
        if word not in (*request.allow, *ALLOW_PLACED)
    ]
    if in_chunks(request.loss) is None:
        tried += [("loss", name, {"loss": name}) for name in planned(framework.losses)]
    if request.reference == RESIDENT:
        places = [each for each in REFERENCE_PLACES if each != RESIDENT]
        tried += [("reference", place, {"reference": place}) for place in places]
    if request.adapters is None:
        methods = planned(framework.adapters)
        # The frozen base is the reference of preferences.
        tried += [
            ("train", method, {"adapters": AdapterSpec(method=method), "reference": None})
            for method in FROZEN_BITS_FALLING
            if method in methods
        ]
    for change, value, fields_changed in tried:
        try:
            changed = replace(request, **fields_changed)
        except InputError:
            continue
        yield SmallestChange(change=change, value=value), changed


def _fitting(change: SmallestChange, changed: PlanRequest) -> SmallestChange | None:
    """The change with the memory of the plan that is found with it; None where none is."""
    fullest_gib = _fullest_gib(changed)
    if fullest_gib is None:
        return None
    usable_gib = usable_hbm_gib(changed.workload())
    return change.model_copy(update={"needs_gib": fullest_gib, "usable_gib": usable_gib})


def _least_pair(request: PlanRequest, is_memory: bool) -> Iterator[SmallestChange]:
    """The first pair of changes with which a plan is found, those first that change the request least."""
    tried = 0
    singles = [
        (change, changed)
        for change, changed in _single_changes(request, is_memory)
        if change.change not in ROOMY or not _opens_nothing(request, changed)
    ]
    for later, (second, _) in enumerate(singles):
        for first, with_first in singles[:later]:
            # Asked of the changed request: words of --allow add up, and adapters exclude one another.
            both = dict(_single_changes(with_first, is_memory)).get(second)
            if both is None or (second.change in ROOMY and _opens_nothing(with_first, both)):
                continue
            fitting = _fitting(first, both)
            if fitting is not None:
                yield fitting.model_copy(update={"together_with": second})
                return
            tried += 1
            if tried == MOST_PAIRS:
                return


def _single_changes(
    request: PlanRequest, is_memory: bool
) -> Iterator[tuple[SmallestChange, PlanRequest]]:
    """Wishes to lift, and where memory is missing what makes room; each with the request changed."""
    yield from _lifting(request)
    if not is_memory:
        return
    if request.reserve_gib:
        nothing = SmallestChange(change="reserve-gib", value=0.0, asked=request.reserve_gib)
        yield nothing, replace(request, reserve_gib=0.0)
    yield from _with_room(request)
    if request.memory_risk < POINT_ESTIMATE:
        risk = SmallestChange(change="memory-risk", value=POINT_ESTIMATE, asked=request.memory_risk)
        yield risk, replace(request, memory_risk=POINT_ESTIMATE)


def _opens_nothing(request: PlanRequest, changed: PlanRequest) -> bool:
    """Whether a change leaves the workload, the ways to run it and the stages of ZeRO as they are."""
    same_way = request.execution_options == changed.execution_options
    same_work = request.workload() == changed.workload()
    return same_way and same_work and space_of(request).zero == space_of(changed).zero


def _fewest_enough(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """The least number that is enough, above one that is not and up to one that is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _of_hosts(request: PlanRequest) -> Iterator[SmallestChange]:
    """The least memory of a host with which a plan is found, in whole GiB, where that alone helps."""
    host_gib = request.cluster.host_memory_gib
    if host_gib is None or not _feasible(_with_host(request, LARGEST_HOST_GIB)):
        return
    fewest_gib = _fewest_enough(
        int(host_gib), LARGEST_HOST_GIB, lambda gib: _feasible(_with_host(request, gib))
    )
    yield SmallestChange(change="host-memory-gib", value=fewest_gib, asked=host_gib)


def _other_batches(request: PlanRequest) -> Iterator[SmallestChange]:
    """The nearest batches that all GPUs divide with which a plan is found, where the one that is asked for
    leaves few ranks to shard over.
    """
    sequences, gpus = request.global_batch, request.gpus
    if sequences % gpus == 0 or request.lengths is not None:
        return
    below = sequences // gpus * gpus
    for batch in (below, below + gpus):
        if batch > 0 and _feasible(replace(request, global_batch=batch)):
            yield SmallestChange(change="global-batch", value=batch, asked=sequences)


def _with_host(request: PlanRequest, host_memory_gib: float) -> PlanRequest:
    spec = request.cluster.model_copy(update={"host_memory_gib": host_memory_gib})
    return replace(request, cluster=spec)


def _of_mappings(request: PlanRequest, conflicting: Set[str]) -> Iterator[SmallestChange]:
    """Changes of what binds mappings; rules that leave no layout at all are no fault of these."""
    if not conflicting or NvlinkDomain.name in conflicting:
        yield from _outside_domain(request)
    if not conflicting and request.max_cut_use < 1:
        yield from _fuller_cuts(request)


def _outside_domain(request: PlanRequest) -> Iterator[SmallestChange]:
    """Each axis that may leave the domain while the others stay inside, or all where none alone helps."""
    axes_inside = request.inside_domain
    helping: list[tuple[str, ...]] = [
        (axis,) for axis in axes_inside if _feasible(_without_inside(request, (axis,)))
    ]
    if not helping and len(axes_inside) > 1 and _feasible(_without_inside(request, axes_inside)):
        helping = [axes_inside]
    for axes in helping:
        yield SmallestChange(
            change="inside-domain", field=",".join(axes), asked=",".join(axes_inside)
        )


def _fuller_cuts(request: PlanRequest) -> Iterator[SmallestChange]:
    """The least share of cuts with which a plan is found, to a hundredth."""

    def is_enough(hundredths: int) -> bool:
        return _feasible(replace(request, max_cut_use=hundredths / 100))

    if is_enough(100):
        least = _fewest_enough(int(100 * request.max_cut_use), 100, is_enough)
        yield SmallestChange(change="max-cut-use", value=least / 100, asked=request.max_cut_use)


def _without_inside(request: PlanRequest, axes: Sequence[str]) -> PlanRequest:
    kept = tuple(axis for axis in request.inside_domain if axis not in axes)
    return replace(request, inside_domain=kept)


def _nearest_pins(request: PlanRequest, name: str, value: int | str) -> Iterator[SmallestChange]:
    """The nearest values of a pinned number with which a plan is found, below and above."""
    if not BY_NAME[name].pinned_near or not isinstance(value, int):
        return
    below = range(value - 1, max(value - MOST_TRIES, 1) - 1, -1)
    above = range(value + 1, min(value + MOST_TRIES, request.gpus) + 1)
    for values in (below, above):
        for nearest in values:
            pins = {**request.pins, name: nearest}
            if _feasible(replace(request, pins=pins)):
                yield SmallestChange(change="pin", field=name, value=nearest, asked=value)
                break


def _hbm_needed_gib(request: PlanRequest, conflict: Conflict) -> int | None:
    """The least HBM of a GPU with which a plan is found, in whole GiB; None where memory alone does not help.

    The candidate that misses the limit by least says where to begin.
    """
    missed_gib = _least_missed_gib(conflict)
    if missed_gib is None:
        return None
    more_gib = missed_gib * request.workload().memory_margin
    least = ceil(request.cluster.device.hbm_gib + more_gib / ALLOCATOR_SHARE - ROUNDING)
    return _least_hbm_gib(request, least)


def _least_missed_gib(conflict: Conflict) -> float | None:
    """The least by which a layout that misses memory alone misses it; None where there is none such."""
    for row, limit in enumerate(conflict.limits):
        over = conflict.excess[row][conflict.only_missed(row)]
        if isinstance(limit, HbmCapacity) and len(over):
            return float(over.min())
    return None


def _least_hbm_gib(request: PlanRequest, least: int) -> int | None:
    """The fewest GiB from `least` on with which a plan is found; None where the last try finds none."""

    def is_enough(gib: int) -> bool:
        return _feasible(_with_hbm(request, gib))

    if is_enough(least):
        return least
    most = least + MOST_TRIES - 1
    return _fewest_enough(least, most, is_enough) if is_enough(most) else None


def _with_hbm(request: PlanRequest, hbm_gib: float) -> PlanRequest:
    device = request.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    return replace(request, cluster=request.cluster.model_copy(update={"device": device}))


def _feasible(request: PlanRequest) -> bool:
    """Whether a plan is found with little effort; False behind the time limit."""
    return _fullest_gib(request) is not None


def _fullest_gib(request: PlanRequest) -> float | None:
    """Memory of the fullest GPU under the first plan that is found with little effort; None without one, and
    behind the time limit.
    """
    if is_over():
        return None
    if limit_left_s() is not None or request.expert_loads is not None:
        return _found_gib(request)
    # What documents say nothing of.
    beside = (request.cluster.takes_any_gpus, request.method, request.top_k, request.seed)
    return _answer_kept(
        _Trial(asked=f"{request.inputs().model_dump_json()} {beside}", request=request)
    )


@dataclass(frozen=True)
class _Trial:
    """A request, equal to another where all is equal that its answer depends on."""

    asked: str
    request: PlanRequest = field(compare=False, repr=False)


@lru_cache(maxsize=256)
def _answer_kept(trial: _Trial) -> float | None:
    """Jobs of a batch that differ in their GPUs try the same larger numbers."""
    return _found_gib(trial.request)


def _found_gib(request: PlanRequest) -> float | None:
    """Memory of a plan that is run as plainly as can be, or in a way that keeps a rule which that breaks."""
    if usable_hbm_gib(request.workload()) <= 0:
        return None
    fullest_gib = _found_run_so_gib(request, None)
    others = iter(executions_to_try(request)[1:] if fullest_gib is None else ())
    while fullest_gib is None and (execution := next(others, None)) is not None:
        fullest_gib = _found_run_so_gib(request, execution)
    return fullest_gib


def _found_run_so_gib(request: PlanRequest, execution: Execution | None) -> float | None:
    space = space_of(request, execution)
    search = LayoutSearch(
        space,
        [branch_of(space, pricing_of(space.workload), execution)],
        any_plan=True,
        most_priced=TRIAL_PRICED,
        seed=request.seed,
        time_limit_s=limit_left_s(),
    )
    for found in search.run().best:
        memory_gib = stage_memory_gib(space.workload, found.layout, found.stages)
        return float(memory_gib.max())
    return None


def _largest_reserve(request: PlanRequest, conflict: Conflict) -> float:
    """In tenths of a GiB. A plan that is found holds under all reserves that leave its fullest GPU room."""

    def with_reserve(tenths: int) -> PlanRequest:
        return replace(request, reserve_gib=tenths / 10)

    def first_below(low: int, high: int, gib: float) -> int:
        """The least reserve that leaves less than so many GiB usable, `high` where that leaves as much."""
        return _fewest_enough(
            low, high, lambda tenths: usable_hbm_gib(with_reserve(tenths).workload()) < gib
        )

    low, high = 0, ceil(10 * request.reserve_gib)
    tried, more_gib = 0, _least_missed_gib(conflict)
    # After none at all the one that leaves room for the leanest layout that was looked at comes first.
    likely = None if more_gib is None else usable_hbm_gib(request.workload()) + more_gib
    while True:
        fullest_gib = _fullest_gib(with_reserve(tried))
        if fullest_gib is None:
            high = tried
        else:
            low = max(tried, first_below(tried, high, fullest_gib) - 1)
        if high - low <= 1:
            return low / 10
        tried = (low + high) // 2
        if likely is not None:
            tried, likely = max(low, first_below(low, high, likely) - 1), None


def _other_gpus(request: PlanRequest, more_gpus: bool) -> Iterator[int]:
    """Numbers of GPUs with which a plan is found: the fewest above; where all must be used, the most below.

    Where neither memory nor GPUs are missing, the next multiples of what the pinned degrees take are tried,
    if the GPUs are none.
    """
    # GPUs of the smallest job that pinned degrees allow: stages of whole tensor and expert groups.
    degree = {axis: int(request.pins.get(axis, 1)) for axis in DEGREES}
    stage = lcm(degree["tp"] * degree["cp"] * degree["dp"], degree["ep"] * degree["etp"])
    taken, all_used = degree["pp"] * stage, "idle-gpus" in request.forbids
    step = lcm(taken, min(request.cluster.gpus_per_node, request.gpus))
    first = request.gpus // step * step
    if all_used:
        below = range(first if first < request.gpus else first - step, 0, -step)
        yield from _first_feasible(request, below)
    if more_gpus:
        fewest = _fewest_gpus(request)
        yield from () if fewest is None else (fewest,)
    elif all_used or request.gpus % taken:
        yield from _first_feasible(request, range(first + step, request.cluster.gpus + 1, step))


def _first_feasible(request: PlanRequest, sizes: Sequence[int]) -> Iterator[int]:
    """The first of a few numbers of GPUs with which a plan is found."""
    few = sizes[:MOST_SIZES]
    yield from islice((gpus for gpus in few if _feasible(replace(request, gpus=gpus))), 1)


def _fewest_gpus(request: PlanRequest) -> int | None:
    """The fewest GPUs of the cluster on which a plan is found, in whole nodes or doubled inside one; None if
    not on all of them.
    """
    if usable_hbm_gib(request.workload()) <= 0:
        return None
    node, cluster_gpus = request.cluster.gpus_per_node, request.cluster.gpus
    low, high = request.gpus, request.gpus
    while 2 * low < min(node, cluster_gpus + 1):
        low = high = 2 * low
        if _feasible(replace(request, gpus=low)):
            return low
    while True:
        if high >= cluster_gpus:
            return None
        low, high = high, min(-(-2 * high // node) * node, cluster_gpus)
        if _feasible(replace(request, gpus=high)):
            break
    while high - low > node:
        middle = (low + high) // 2 // node * node
        if middle <= low:
            break
        low, high = (low, middle) if _feasible(replace(request, gpus=middle)) else (middle, high)
    return high
