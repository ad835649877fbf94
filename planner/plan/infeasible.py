"""Why there is no plan: the rules that conflict, what is missing, and the smallest changes that help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import ceil, lcm

from meshwright.constraints.fabric import GPU_BUDGET, Bisection, NvlinkDomain
from meshwright.constraints.layers import PrecisionOnDevice
from meshwright.constraints.memory import HbmCapacity, HostMemory
from meshwright.constraints.pipeline import AllowedSchedules
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.footprint import ALLOCATOR_SHARE, usable_hbm_gib
from meshwright.costmodel.records import POINT_ESTIMATE
from meshwright.costmodel.workload import Execution, Workload
from meshwright.planner.bounds.layer_split import any_stages
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.conflict import (
    Conflict,
    RequestRule,
    conflict_of,
    executions_to_try,
    without_pin,
)
from meshwright.planner.plan.document import (
    ConflictingRule,
    Infeasible,
    SmallestChange,
    change_sentence,
    rule_sentence,
)
from meshwright.planner.request.choices import BY_NAME, DEGREES
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.loop import LayoutSearch, branch_of
from meshwright.planner.search.space import space_of
from meshwright.planner.solvers.clock import is_over, limit_left_s

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
ROUNDING = 1e-9
"""GiB."""
TRIAL_PRICED = 30
"""Layouts that one trial of a change may price; a change that is not found to help by then is not offered."""


def explain_infeasible(request: PlanRequest, workload: Workload) -> Infeasible:
    """The conflict behind an infeasible request, and single changes that make it feasible."""
    conflict = conflict_of(request)
    rules = [_conflicting_rule(conflict, row, workload) for row in conflict.core]
    names = {conflict.limits[row].name for row in conflict.core}
    more_gpus = not names or bool(names & {HbmCapacity.name, GPU_BUDGET.name})
    changes = list(_changes(request, conflict, more_gpus))
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
    finished = FinishedPlan(
        workload=workload, layout=layout, stages=stages, memory_gib=(), spans={}
    )
    finding = conflict.limits[row].check(finished)
    return None if finding is None else f"{finding.words}. {finding.remedy}".rstrip(". ")


def _changes(request: PlanRequest, conflict: Conflict, more_gpus: bool) -> Iterator[SmallestChange]:
    """Single changes, each tried before it is offered."""
    names = {conflict.limits[row].name for row in conflict.core}
    yield from _wishes_lifted(request)
    if request.reserve_gib and _feasible(replace(request, reserve_gib=0.0)):
        yield SmallestChange(
            change="reserve-gib", value=_largest_reserve(request), asked=request.reserve_gib
        )
    if PRECISION_NAME in names:
        for precision in ("bf16", "fp16"):
            if _feasible(replace(request, precision=precision)):
                yield SmallestChange(change="precision", value=precision, asked=request.precision)
                break
    if HostMemory.name in names:
        yield from _of_hosts(request)
    yield from _of_mappings(request, names)
    if request.memory_risk < POINT_ESTIMATE and _feasible(
        replace(request, memory_risk=POINT_ESTIMATE)
    ):
        yield SmallestChange(change="memory-risk", value=POINT_ESTIMATE, asked=request.memory_risk)
    for gpus in _other_gpus(request, more_gpus):
        yield SmallestChange(change="gpus", value=gpus, asked=request.gpus)
    is_unbound = request.max_cut_use == 1 and not request.inside_domain
    hbm_gib = _hbm_needed_gib(request, conflict) if names or is_unbound else None
    if hbm_gib is not None:
        yield SmallestChange(
            change="device-hbm-gib", value=hbm_gib, asked=request.cluster.device.hbm_gib
        )


def _wishes_lifted(request: PlanRequest) -> Iterator[SmallestChange]:
    """Each pin with its nearest values or dropped, each ban and each lack of software lifted."""
    for name, value in request.pins.items():
        yield from _nearest_pins(request, name, value)
        if _feasible(replace(request, pins=without_pin(request.pins, name))):
            yield SmallestChange(change="drop-pin", field=name, asked=value)
    for ban in request.forbids:
        if _feasible(replace(request, forbids=tuple(f for f in request.forbids if f != ban))):
            yield SmallestChange(change="allow", field=ban)
    for lack in request.without:
        has_it = tuple(each for each in request.without if each != lack)
        if _feasible(replace(request, without=has_it)):
            yield SmallestChange(change="do-with", field=lack)


def _of_hosts(request: PlanRequest) -> Iterator[SmallestChange]:
    """The least memory of a host with which a plan is found, in whole GiB, where that alone helps."""
    asked = request.cluster.host_memory_gib
    if asked is None or not _feasible(_with_host(request, LARGEST_HOST_GIB)):
        return
    low, high = int(asked), LARGEST_HOST_GIB
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = _feasible(_with_host(request, middle))
        low, high = (low, middle) if is_enough else (middle, high)
    yield SmallestChange(change="host-memory-gib", value=high, asked=asked)


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
    asked = request.inside_domain
    helping: list[tuple[str, ...]] = [
        (axis,) for axis in asked if _feasible(_without_inside(request, (axis,)))
    ]
    if not helping and len(asked) > 1 and _feasible(_without_inside(request, asked)):
        helping = [asked]
    for axes in helping:
        yield SmallestChange(change="inside-domain", field=",".join(axes), asked=",".join(asked))


def _fuller_cuts(request: PlanRequest) -> Iterator[SmallestChange]:
    """The least share of cuts with which a plan is found, to a hundredth."""
    low, high = int(100 * request.max_cut_use), 100
    if not _feasible(replace(request, max_cut_use=1.0)):
        return
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = _feasible(replace(request, max_cut_use=middle / 100))
        low, high = (low, middle) if is_enough else (middle, high)
    yield SmallestChange(change="max-cut-use", value=high / 100, asked=request.max_cut_use)


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

    No layout fits in less than the candidate that misses the limit by least.
    """
    for row, limit in enumerate(conflict.limits):
        over = conflict.excess[row][conflict.only_missed(row)]
        if isinstance(limit, HbmCapacity) and len(over):
            more_gib = float(over.min()) * request.workload().memory_margin
            least = ceil(request.cluster.device.hbm_gib + more_gib / ALLOCATOR_SHARE - ROUNDING)
            return _least_hbm_gib(request, least)
    return None


def _least_hbm_gib(request: PlanRequest, least: int) -> int | None:
    """The fewest GiB from `least` on with which a plan is found; None where the last try finds none."""
    if _feasible(_with_hbm(request, least)):
        return least
    low, high = least, least + MOST_TRIES - 1
    if not _feasible(_with_hbm(request, high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = _feasible(_with_hbm(request, middle))
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _with_hbm(request: PlanRequest, hbm_gib: float) -> PlanRequest:
    device = request.cluster.device.model_copy(update={"hbm_gib": hbm_gib})
    return replace(request, cluster=request.cluster.model_copy(update={"device": device}))


def _feasible(request: PlanRequest) -> bool:
    """Whether a plan is found with little effort; False behind the time limit."""
    if is_over():
        return False
    if limit_left_s() is not None or request.expert_loads is not None:
        return _has_plan(request)
    beside = (request.expert_imbalance, request.method, request.top_k, request.seed)
    return _answer_kept(
        _Trial(asked=f"{request.inputs().model_dump_json()} {beside}", request=request)
    )


@dataclass(frozen=True)
class _Trial:
    """A request, equal to another where all is equal that its answer depends on."""

    asked: str
    request: PlanRequest = field(compare=False, repr=False)


@lru_cache(maxsize=256)
def _answer_kept(trial: _Trial) -> bool:
    """Jobs of a batch that differ in their GPUs try the same larger numbers."""
    return _has_plan(trial.request)


def _has_plan(request: PlanRequest) -> bool:
    """Whether there is one, run as plainly as can be or in a way that keeps a rule which that breaks."""
    if _has_plan_run_so(request, None):
        return True
    return any(_has_plan_run_so(request, each) for each in executions_to_try(request)[1:])


def _has_plan_run_so(request: PlanRequest, execution: Execution | None) -> bool:
    space = space_of(request, execution)
    search = LayoutSearch(
        space,
        [branch_of(space, pricing_of(space.workload), execution)],
        any_plan=True,
        most_priced=TRIAL_PRICED,
        seed=request.seed,
        time_limit_s=limit_left_s(),
    )
    return bool(search.run().best)


def _largest_reserve(request: PlanRequest) -> float:
    """In tenths of a GiB."""
    low, high = 0, ceil(10 * request.reserve_gib)
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = _feasible(replace(request, reserve_gib=middle / 10))
        low, high = (middle, high) if is_enough else (low, middle)
    return low / 10


def _other_gpus(request: PlanRequest, more_gpus: bool) -> Iterator[int]:
    """Numbers of GPUs with which a plan is found: the fewest above; where all must be used, the most below.

    Where neither memory nor GPUs are missing, the next multiples of what the pinned degrees take are tried,
    if the GPUs are none.
    """
    taken, all_used = _pinned_gpus(request.pins), "idle-gpus" in request.forbids
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


def _pinned_gpus(pins: Mapping[str, int | str]) -> int:
    """GPUs of the smallest job that pinned degrees allow: stages of whole tensor and expert groups."""
    degree = {axis: int(pins.get(axis, 1)) for axis in DEGREES}
    stage = lcm(degree["tp"] * degree["cp"] * degree["dp"], degree["ep"] * degree["etp"])
    return degree["pp"] * stage


def _fewest_gpus(request: PlanRequest) -> int | None:
    """The fewest GPUs of the cluster, in whole nodes, on which a plan is found; None if not on all of
    them.
    """
    node, cluster_gpus = request.cluster.gpus_per_node, request.cluster.gpus
    low, high = request.gpus, request.gpus
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
