"""Planning on a mixed cluster from end to end: each part alone, pipelines through several, what is best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.cluster_specs.reader import MixedClusterSpec
from meshwright.constraints.fabric import domain_gpus, inside_domains, members_in_domain
from meshwright.constraints.pipeline import may_have_empty_ends
from meshwright.costmodel.data_parallel import LEAST_GAIN
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import ROUNDING, Layout
from meshwright.costmodel.lengths import PackedLengths
from meshwright.costmodel.measured_settings import (
    GainCorrections,
    gain_corrections,
    priced_settings,
)
from meshwright.costmodel.mixed import Segment, host_memory_gib, mixed_memory_gib, mixed_step
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.rank_load import Stages
from meshwright.costmodel.rates import peak_flops, peak_memory_band, step_time_band
from meshwright.costmodel.records import ErrorBand
from meshwright.costmodel.schedules import least_by_work
from meshwright.costmodel.step_time import StepTime
from meshwright.costmodel.workload import Execution, Workload
from meshwright.documents import program_version
from meshwright.errors import InfeasibleError, OutOfTimeError, check_choice
from meshwright.planner.bounds.combination_costs import (
    CombinationCosts,
    RankCosts,
    combination_costs,
    memory_rows,
)
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.paces import HostRow, RankRow, host_limit_gib
from meshwright.planner.mapping.cuts import parts_cut_uses
from meshwright.planner.mapping.pricing import cut_uses
from meshwright.planner.mixed.document import (
    NOT_MEASURED,
    AloneDoc,
    MixedPlan,
    MixedPredicted,
    MixedRequest,
    MixedSolverDoc,
    Pipeline,
    RankDoc,
    check_part,
    cost_on_parts,
    request_of_parts,
    request_on,
)
from meshwright.planner.mixed.kernel import (
    Composition,
    MixedKernel,
    MixedPrice,
    least_again_s,
    shortest_s,
)
from meshwright.planner.mixed.promising import (
    KernelMaker,
    PromisingRow,
    PromisingRows,
    every_row,
    promising_rows,
)
from meshwright.planner.mixed.verify import rule_faults, verify_mixed
from meshwright.planner.plan.assemble import (
    claim_of,
    compared_choices,
    is_closed,
    lengths_document,
    objective_of,
    overfull_cuts,
    software_needs,
    training_warnings,
)
from meshwright.planner.plan.best_plan import degrees_in_words, setting_corrections, written_model
from meshwright.planner.plan.document import (
    ExecutionChoice,
    ExpectedByPairs,
    Plan,
    PromisedStep,
    Scenario,
    SettingCorrection,
    Status,
    with_digest,
    without_later_choices,
)
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.plan.robustness import (
    BestUnderChange,
    Change,
    changes,
    described,
    gain_of,
    monotone_bound_s,
    robustness_of,
    scenario_of,
    without_choice,
    words_of_faster,
)
from meshwright.planner.plan.texts import priced_of
from meshwright.planner.plan.training_cost import Budget, with_cost
from meshwright.planner.request.choices import OF_EXECUTION, OF_LAYOUT, Choice
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.run_terms import ErrorBandDoc, LayoutDoc, layout_document
from meshwright.planner.search.branches import Combination
from meshwright.planner.search.kernel_model import KernelModel
from meshwright.planner.search.model import solver_version
from meshwright.planner.solvers.processes import side_by_side

# The fastest pipeline through several parts of a cluster: bounds, and exact prices in the order of them.
#
# An exact price takes no longer than a kernel's rows in a CP-SAT model would, so none is asked: kernels are
# priced until none is left whose bound is below the best price, or that of the last plan that is asked for.


_FIRST_PRICED = 4
"""Kernels of an execution that are priced, until one has a price, before the next one is looked at."""
_MOST_WAITING = 100
"""Pipelines that an exported model has beside those with a price, where time ended a search."""


@dataclass
class MixedOutcome:
    """How a search ended, and what it looked at."""

    status: str = "infeasible"
    best: MixedKernel | None = None
    best_priced: list[MixedKernel] = field(default_factory=list)
    """Those with a price that were among the best asked for, each launch once."""
    lower_bound_s: float | None = None
    """No pipeline through all parts is faster; None where nothing is known."""
    rows: int = 0
    """Layouts with ranks on each part whose bound was below the price to beat."""
    priced: int = 0
    """Kernels priced exactly."""
    known: list[tuple[MixedKernel, MixedPrice]] = field(default_factory=list)
    """Kernels with the price of their fastest split, those that fill a cut beyond the limit among them."""
    waiting: Sequence[PromisingRow] = ()
    """What time left without a price, some of the least bounds."""
    unlisted_s: float = inf
    """What splits take at the least that were too many to be played, of any kernel; infinite without any."""
    least_cut_use: float = inf
    """Of the kernels that are out as they fill a cut beyond the limit, that of the one that uses least."""

    @property
    def price_s(self) -> float:
        """Of the best kernel; infinite without one."""
        return inf if self.best is None else self.best.price_s


@dataclass(eq=False)
class MixedSearch:
    """One search."""

    request: MixedRequest
    cutoff_s: float
    """What a plan must beat: the price of the best plan on a single part, or of as many of them as are asked
    for the slowest; infinite where there are not so many.
    """
    deadline: float = inf
    """On the clock of `time.monotonic`."""
    progress: Callable[[str], None] = lambda _: None
    rivals_s: Sequence[float] = ()
    """Prices of plans on single parts, where more than one plan is asked for."""
    corrections: Sequence[GainCorrections] = ()
    """What measured pairs say on the device of each part: prices times that count then, of the part where it
    is most, as a pipeline runs at the pace of its slowest part. None without any.
    """
    outcome: MixedOutcome = field(default_factory=MixedOutcome)
    _priced: set[tuple[Execution, Layout, Composition]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._maker = KernelMaker(self.request)

    def run(self) -> MixedOutcome:
        """The fastest pipeline through all parts that beats the cutoff, proven where time allows."""
        outcome, rows, position = self.outcome, PromisingRows(), 0
        try:
            rows = promising_rows(
                self.request, self._cutoff_by_price_s, self._look_at_clock, self._price_first
            )
            outcome.rows = len(rows)
            while position < len(rows) and rows[position].bound_s < self._cutoff_by_price_s:
                self._price(rows[position])
                position += 1
            outcome.lower_bound_s = min(self._limit_s, outcome.unlisted_s)
            outcome.status = self._ended(is_proven=outcome.unlisted_s >= self._limit_s)
        except OutOfTimeError:
            outcome.waiting = rows[position : position + _MOST_WAITING]
            first_waiting = [row.bound_s * self._least_factor for row in outcome.waiting[:1]]
            least_s = min([*first_waiting, self._limit_s, outcome.unlisted_s])
            outcome.lower_bound_s = least_s if rows else None
            outcome.status = self._ended(is_proven=False)
        # Some are priced before all are counted, and the count leaves out what those prices rule out.
        outcome.rows = max(outcome.rows, outcome.priced)
        if outcome.lower_bound_s == inf:
            outcome.lower_bound_s = None
        return outcome

    def run_through_all(self, cutoff_s: float) -> MixedOutcome:
        """The fastest of all pipelines, each with its best split: no bounds, nothing left out, no solver.

        Parameters
        ----------
        cutoff_s
            No pipeline is kept that takes this or longer.
        """
        outcome, least_s = self.outcome, inf
        try:
            for row in every_row(self.request, self._look_at_clock):
                self._look_at_clock()
                if not self._maker.keeps_inside(row):
                    continue
                kernel = self._maker.kernel(row)
                kernel.price = self._within_cuts(kernel, kernel.best_split(inf))
                outcome.rows += 1
                # Of a kernel with too many splits to be played, one may fit though none of those played does.
                outcome.unlisted_s = min(outcome.unlisted_s, kernel.unlisted_s)
                least_s = min(least_s, kernel.price_s, kernel.unlisted_s)
                if kernel.price is not None:
                    outcome.priced += 1
                    if kernel.price_s < cutoff_s:
                        self._take(kernel)
            outcome.lower_bound_s = None if least_s == inf else least_s
            is_proven = outcome.unlisted_s >= min(self._limit_s, cutoff_s)
            outcome.status = self._ended(is_proven=is_proven)
        except OutOfTimeError:
            outcome.status = self._ended(is_proven=False)
        return outcome

    def _ended(self, *, is_proven: bool) -> str:
        """The status of a search that looked at all that counts, or that did not."""
        if self.outcome.best is None:
            return "infeasible" if is_proven else "unknown"
        return "optimal" if is_proven else "feasible"

    @property
    def _limit_s(self) -> float:
        """What a kernel must beat: the best plan, or the slowest of as many as are asked for."""
        prices_s = [self._counted_s(each) for each in self.outcome.best_priced]
        prices_s = sorted([*self.rivals_s, *prices_s, self.cutoff_s])
        return prices_s[self.request.top_k - 1] if len(prices_s) >= self.request.top_k else inf

    @property
    def _cutoff_by_price_s(self) -> float:
        """No pipeline whose price is this or more counts as less than the limit."""
        return self._limit_s / self._least_factor

    @cached_property
    def _least_factor(self) -> float:
        return max((each.least for each in self.corrections), default=1.0)

    def _factor(self, execution: Execution, layout: Layout) -> float:
        """What counts of a layout's price."""
        if not self.corrections:
            return 1.0
        return most_corrected(self.request, self.corrections, execution, layout)[0]

    def _counted_s(self, kernel: MixedKernel) -> float:
        """The price of a kernel, corrected where that counts."""
        return kernel.price_s * self._factor(kernel.execution, kernel.layout)

    def _look_at_clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def _price_first(self, rows: PromisingRows) -> float:
        """Prices some of the first rows, so that there is a price to beat, and returns it."""
        before, position = self.outcome.priced, 0
        while position < len(rows) and self.outcome.priced < before + _FIRST_PRICED:
            row = rows[position]
            if row.bound_s >= self._cutoff_by_price_s or self._price(row):
                break
            position += 1
        return self._cutoff_by_price_s

    def _price(self, row: PromisingRow) -> bool:
        """Prices a row exactly, unless that was done or cannot bring anything; whether it has a price."""
        self._look_at_clock()
        key = row.execution, row.layout, row.composition
        if key in self._priced or not self._maker.keeps_inside(row):
            return False
        if not self._maker.gains_by_grouping(row):
            return False
        limit_s = self._limit_s / self._factor(row.execution, row.layout)
        if row.bound_s >= limit_s:
            return False
        self._priced.add(key)
        kernel = self._maker.kernel(row)
        kernel.price = self._within_cuts(kernel, kernel.best_split(limit_s))
        self.outcome.priced += 1
        unlisted_s = kernel.unlisted_s * self._factor(row.execution, row.layout)
        self.outcome.unlisted_s = min(self.outcome.unlisted_s, unlisted_s)
        if kernel.price is None:
            return False
        self._take(kernel)
        if kernel is self.outcome.best:
            self.progress(f"{kernel.price_s:.4g} s a step, {self.outcome.priced} kernels priced")
        return True

    def _within_cuts(self, kernel: MixedKernel, price: MixedPrice | None) -> MixedPrice | None:
        """The fastest split of a kernel, unless it fills a cut beyond the limit: the kernel is out then."""
        limit = self.request.first.max_cut_use
        if price is None:
            return None
        self.outcome.known.append((kernel, price))
        if limit >= 1:
            return price
        use = max(_cut_uses(self.request, kernel, price).values())
        if use <= limit * (1 + ROUNDING):
            return price
        self.outcome.least_cut_use = min(self.outcome.least_cut_use, use)
        return None

    def _take(self, kernel: MixedKernel) -> None:
        """Takes a kernel among the best."""
        priced = self.outcome.best_priced
        equal = [each for each in priced if _launch_of(each) == _launch_of(kernel)]
        if any(self._counted_s(each) <= self._counted_s(kernel) for each in equal):
            return
        unlike = [each for each in priced if each not in equal]
        priced[:] = sorted([*unlike, kernel], key=self._counted_s)
        del priced[self.request.top_k :]
        self.outcome.best = priced[0]


def through_parts(
    request: MixedRequest,
    cutoff_s: float,
    deadline: float,
    *,
    progress: Callable[[str], None] = lambda _: None,
    rivals_s: Sequence[float] = (),
    corrections: Sequence[GainCorrections] = (),
) -> MixedOutcome:
    """The fastest pipeline through all parts of a request, by the method that it asks for.

    Parameters
    ----------
    request
        What to plan.
    cutoff_s, deadline, progress, rivals_s, corrections
        As `MixedSearch` has them.

    Raises
    ------
    InputError
        If every pipeline is to be priced, and there are too many.
    """
    if request.first.method == "exhaustive" and not corrections:
        return MixedSearch(request, inf, deadline).run_through_all(cutoff_s)
    return MixedSearch(
        request, cutoff_s, deadline, progress, rivals_s=rivals_s, corrections=corrections
    ).run()


def most_corrected(
    request: MixedRequest,
    corrections: Sequence[GainCorrections],
    execution: Execution,
    layout: Layout,
) -> tuple[float, list[SettingCorrection]]:
    """What measured pairs make of a pipeline's step on the part where they add most, and its settings there.

    Parameters
    ----------
    request
        Whose parts all run the pipeline.
    corrections
        Of each part.
    execution
        As searched.
    layout
        Plain numbers.
    """
    settings = [
        priced_settings(part.workload(execution.of_layout(layout)), layout)
        for part in request.parts
    ]
    pairs = list(zip(corrections, settings, strict=True))
    slowest, own = max(pairs, key=lambda pair: pair[0].of(pair[1]))
    return slowest.of(own), setting_corrections(slowest, own)


def _cut_uses(request: MixedRequest, kernel: MixedKernel, price: MixedPrice) -> dict[str, float]:
    """`parts_cut_uses` of a kernel at a split."""
    segments = kernel.segments_of(price.layout)
    names = [request.name_of(part) for part, _ in kernel.composition]
    return parts_cut_uses(segments, names, price.stages, mixed_step(segments, price.stages))


def _launch_of(kernel: MixedKernel) -> tuple[Execution, Layout, Composition]:
    """What tells a kernel from others once it is started: executions differ only in what the layout uses."""
    assert kernel.price is not None
    return kernel.execution.of_layout(kernel.price.layout), kernel.layout, kernel.composition


_SHARE_ALONE = 0.25
"""Of a time limit, at most, for the best plan on one part."""
_SHARE_BY_PRICE = 0.6
"""Of a time limit, until when pipelines of the least price are sought where the expected step counts."""


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """What came out: the document, and the plan of a part where that alone is fastest."""

    document: MixedPlan
    alone: Plan | None = None


def make_mixed_plan(
    request: MixedRequest,
    progress: Callable[[str], None] | None = None,
    *,
    choices: bool = False,
    robustness: bool = False,
    model_file: Path | None = None,
) -> MixedResult:
    """The fastest plan on a mixed cluster: never slower than the best on any part alone.

    Parameters
    ----------
    request
        What to plan.
    progress
        Called with one line whenever a better plan is found.
    choices
        Whether to search for the best plan without each execution choice of a pipeline through parts.
    robustness
        Whether to search again under each error of the cost model.
    model_file
        Where to write all that was priced as one CP-SAT model, as `export_model` does.

    Raises
    ------
    InputError
        If the request cannot be searched as asked.
    InternalError
        If the plan fails its own verification: a fault of the planner.
    """
    began, progress = time.monotonic(), progress or (lambda _: None)
    searched = _searched(request, progress, began)
    picked, outcomes = searched.picked(request), [each for _, each in searched.outcomes]
    bounds = [_least_s(plan.status, plan.objective.lower_bound_s) for plan in searched.alone]
    bounds += [_least_s(each.status, each.lower_bound_s) for each in outcomes]
    bound_s = None if None in bounds else min(bound for bound in bounds if bound is not None)
    step_s, kernel = picked.step_s, picked.kernel
    objective = objective_of(
        None if step_s == inf else step_s, None if bound_s in (None, inf) else bound_s
    )
    least_cut_use = min(outcome.least_cut_use for outcome in outcomes)
    document = MixedPlan(
        status=_status(step_s, bound_s),
        objective=objective,
        runs_on=[] if picked.part is None else [request.name_of(picked.part)],
        layout=None,
        execution=None,
        predicted=None,
        expected_by_pairs=picked.expected,
        warnings=[] if step_s < inf else list(overfull_cuts(request.first, least_cut_use)),
        ranks=[],
        nodes=[],
        alone=[_alone_document(request, part, plan) for part, plan in enumerate(searched.alone)],
        solver=_solver_document(request, outcomes, time.monotonic() - began),
        cluster=request.cluster,
        inputs=request.first.inputs(),
    )
    if kernel is not None and kernel.price is not None:
        document = _through_parts(document, picked.request, kernel, kernel.price)
    document = _with_alternatives(document, searched.rivals, searched.outcomes, request.top_k)
    if model_file is not None:
        is_listed = request.first.method == "exhaustive"
        model = None if is_listed else _model_of(request, searched, step_s)
        why = written_model(request.first, model, model_file)
        words = [] if why is None else [why]
        document = document.model_copy(update={"warnings": [*document.warnings, *words]})
    request = request.plan_alone
    if document.layout is not None:
        if choices:
            progress(f"{step_s:.4g} s a step; its choices one by one")
            document = _with_choices(request, document, searched.deadline)
        if robustness:
            progress(f"{step_s:.4g} s a step; errors of the prediction")
            document = _with_robustness(request, document, searched.deadline)
    document = with_digest(document)
    verify_mixed(document)
    single = None if picked.part is None else with_digest(searched.alone[picked.part])
    return MixedResult(document=document, alone=single)


class _Picked(NamedTuple):
    """What the plan is: a part alone, or a pipeline through the parts of a request, or nothing."""

    step_s: float
    """Infinite without one."""
    part: int | None
    request: MixedRequest
    kernel: MixedKernel | None
    expected: ExpectedByPairs | None = None


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """The best plan of each part alone, and how the searches for pipelines through several ended."""

    alone: list[Plan]
    rivals: list[dict[str, Any]]
    """Plans on parts alone, as alternatives are written."""
    outcomes: list[tuple[MixedRequest, MixedOutcome]]
    """By the parts that pipelines run through."""
    deadline: float
    """On the clock of `time.monotonic`."""

    def picked(self, request: MixedRequest) -> _Picked:
        """The plan of the least price, or of the least expected step where that is asked."""
        prices_s = [plan.objective.step_time_s or inf for plan in self.alone]
        chosen, outcome = min(self.outcomes, key=lambda pair: pair[1].price_s)
        least_s = min(*prices_s, outcome.price_s)
        if least_s == inf:
            return _Picked(inf, None, request, None)
        if request.first.objective == "expected":
            return _by_pairs(request, self)
        if least_s in prices_s:
            return _Picked(least_s, prices_s.index(least_s), request, None)
        return _Picked(least_s, None, chosen, outcome.best)


def _searched(request: MixedRequest, progress: Callable[[str], None], began: float) -> _Searched:
    """Each part alone, then every pipeline through several; `began` is when, on the clock of `monotonic`."""
    limit_s = request.time_limit_s
    own_limit_s = None if limit_s is None else _SHARE_ALONE * limit_s
    if request.first.method == "exhaustive":
        # Too many pipelines are refused before the parts are planned alone.
        for chosen in _choices_of_parts(request):
            next(every_row(chosen, lambda: None), None)
    progress("each part alone")
    alone = side_by_side([partial(_alone, part, own_limit_s) for part in request.parts])
    deadline = inf if limit_s is None else began + 0.95 * limit_s
    rivals = [
        each for part, plan in enumerate(alone) for each in _rivals_alone(request, part, plan)
    ]
    rivals_s = sorted(each["step_time_s"] for each in rivals)
    cutoff_s = rivals_s[request.top_k - 1] if len(rivals_s) >= request.top_k else inf
    until = deadline
    if limit_s is not None and request.first.objective == "expected":
        # Behind the search for the least price comes that for the least expected step.
        until = began + _SHARE_BY_PRICE * limit_s
    outcomes = []
    for chosen in _choices_of_parts(request):
        outcome = through_parts(chosen, cutoff_s, until, progress=progress, rivals_s=rivals_s)
        outcomes.append((chosen, outcome))
    return _Searched(alone=alone, rivals=rivals, outcomes=outcomes, deadline=deadline)


def _alone(part: PlanRequest, limit_s: float | None) -> Plan:
    """The fastest plan on a part alone, within so many seconds."""
    return fastest_plan(replace(part, time_limit_s=limit_s), explained=False)


def _rivals_alone(request: MixedRequest, part: int, plan: Plan) -> list[dict[str, Any]]:
    """A part's own plan and its next best ones, as alternatives are written."""
    if plan.layout is None or plan.execution is None or plan.objective.step_time_s is None:
        return []
    best = _alternative(plan.layout, plan.execution, plan.objective.step_time_s)
    return [{**each, "runs_on": [request.name_of(part)]} for each in (best, *plan.alternatives)]


def _alternative(layout: LayoutDoc, execution: Execution, step_s: float) -> dict[str, Any]:
    """A plan among several: what it is in plain numbers, and its step."""
    of_execution = {choice.name: getattr(execution, choice.name) for choice in OF_EXECUTION}
    return {
        "step_time_s": step_s,
        **{choice.name: getattr(layout, choice.name) for choice in OF_LAYOUT},
        **without_later_choices(of_execution),
        "recompute_modules": list(layout.recompute_modules),
        "recompute_layers": layout.recompute_layers,
        "stages": layout.stages,
    }


def _with_alternatives(
    document: MixedPlan,
    rivals: Sequence[dict[str, Any]],
    outcomes: Sequence[tuple[MixedRequest, MixedOutcome]],
    top_k: int,
) -> MixedPlan:
    """The document with the next best plans, on parts alone and through several."""
    if top_k == 1 or document.objective.step_time_s is None:
        return document
    every = list(rivals)
    for request, outcome in outcomes:
        for kernel in outcome.best_priced:
            assert kernel.price is not None
            price = kernel.price
            layout = layout_document(price.layout, price.stages)
            each = _alternative(layout, kernel.execution.of_layout(price.layout), price.step_time_s)
            ranks = {request.name_of(part): count for part, count in kernel.composition}
            every.append({**each, "runs_on": list(ranks), "ranks_on": list(ranks.values())})
    best_s = document.objective.step_time_s
    # What is faster than the plan of the least expected step is no next best one.
    every = [each for each in every if each["step_time_s"] >= best_s]
    every.sort(key=lambda each: each["step_time_s"])
    next_best = [
        {**each, "slower_pct": 100.0 * (each["step_time_s"] / best_s - 1.0)}
        for each in every[1:top_k]
    ]
    is_proven = all(each.status in ("optimal", "infeasible") for _, each in outcomes)
    is_proven &= all(part.status in ("optimal", "infeasible") for part in document.alone)
    words = [] if is_proven else ["the time limit came before the next best plans were proven"]
    return document.model_copy(
        update={"alternatives": next_best, "warnings": [*document.warnings, *words]}
    )


# The plan of the least expected step: what measured pairs of runs correct of settings, times the price.


def _by_pairs(request: MixedRequest, searched: _Searched) -> _Picked:
    """The least expected step, of a part alone or a pipeline, beside the fastest plan."""
    on_parts = [plan.expected_by_pairs for plan in searched.alone]
    least_s = min((each.chosen.expected_step_time_s for each in on_parts if each), default=inf)
    rows: list[tuple[PromisedStep, _Picked]] = []
    bounds: list[float | None] = []
    for part, each in enumerate(on_parts):
        if each is None:
            bounds.append(inf if searched.alone[part].status == "infeasible" else None)
            continue
        bounds.append(each.lower_bound_s)
        for promised in (each.chosen, each.fastest):
            words = f"{promised.plan} on {request.name_of(part)}"
            picked = _Picked(promised.step_time_s, part, request, None)
            rows.append((promised.model_copy(update={"plan": words}), picked))
    for chosen, by_price in searched.outcomes:
        corrections = [gain_corrections(part.workload()) for part in chosen.parts]
        corrected = through_parts(chosen, least_s, searched.deadline, corrections=corrections)
        bounds.append(_least_s(corrected.status, corrected.lower_bound_s))
        for kernel in (corrected.best, by_price.best):
            if kernel is not None and kernel.price is not None:
                picked = _Picked(kernel.price_s, None, chosen, kernel)
                rows.append((_promise(chosen, corrections, kernel, kernel.price), picked))
    fastest = min(rows, key=lambda row: row[0].step_time_s)
    best = min(rows, key=lambda row: row[0].expected_step_time_s)
    expected_s = best[0].expected_step_time_s
    if fastest[0].expected_step_time_s <= expected_s * (1.0 + ROUNDING):
        best, expected_s = fastest, fastest[0].expected_step_time_s
    bound_s = None if None in bounds else min(bound for bound in bounds if bound is not None)
    is_proven = bound_s is not None and bound_s >= expected_s * (1.0 - ROUNDING)
    bound_s = None if bound_s is None else min(bound_s, expected_s)
    document = ExpectedByPairs(
        chosen=best[0],
        fastest=fastest[0],
        same_as_fastest=best is fastest,
        lower_bound_s=bound_s,
        gap=None if bound_s is None else (expected_s - bound_s) / expected_s,
        proven=is_proven,
    )
    return best[1]._replace(expected=document)


def _promise(
    request: MixedRequest,
    corrections: Sequence[GainCorrections],
    kernel: MixedKernel,
    price: MixedPrice,
) -> PromisedStep:
    """What price and pairs promise of a pipeline."""
    factor, settings = most_corrected(request, corrections, kernel.execution, kernel.layout)
    layout = Priced(layout=price.layout, matrix={}, stages=price.stages, step_time_s=inf)
    parts = " then ".join(request.name_of(part) for part, _ in kernel.composition)
    return PromisedStep(
        plan=f"{degrees_in_words(layout)} through {parts}",
        step_time_s=price.step_time_s,
        expected_step_time_s=price.step_time_s * factor,
        corrections=settings,
    )


def _choices_of_parts(request: MixedRequest) -> Iterator[MixedRequest]:
    """The request on every two or more of its parts."""
    count = len(request.parts)
    for size in range(count, 1, -1):
        for chosen in combinations(range(count), size):
            parts = tuple(request.cluster.parts[part] for part in chosen)
            cluster = request.cluster.model_copy(update={"parts": parts})
            own = tuple(request.parts[part] for part in chosen)
            yield replace(request, cluster=cluster, parts=own)


def _least_s(status: str, lower_bound_s: float | None) -> float | None:
    """A bound as a search left it: infinite where nothing exists, None where nothing is known."""
    return inf if status == "infeasible" and lower_bound_s is None else lower_bound_s


def _status(step_s: float, bound_s: float | None) -> Status:
    if step_s < inf:
        return "optimal" if bound_s is not None and bound_s >= step_s * (1 - 1e-9) else "feasible"
    return "infeasible" if bound_s == inf else "unknown"


def _alone_document(request: MixedRequest, part: int, plan: Plan) -> AloneDoc:
    return AloneDoc(
        part=request.name_of(part),
        device=request.parts[part].cluster.device.name,
        gpus=request.parts[part].gpus,
        status=plan.status,
        step_time_s=plan.objective.step_time_s,
        lower_bound_s=plan.objective.lower_bound_s,
    )


def _solver_document(
    request: MixedRequest, outcomes: list[MixedOutcome], wall_s: float
) -> MixedSolverDoc:
    return MixedSolverDoc(
        wall_s=wall_s,
        seed=request.first.seed,
        method=request.first.method,
        version=solver_version(),
        program=program_version(),
        rows=sum(each.rows for each in outcomes),
        priced=sum(each.priced for each in outcomes),
    )


def _through_parts(
    document: MixedPlan, request: MixedRequest, kernel: MixedKernel, price: MixedPrice
) -> MixedPlan:
    """The document of a pipeline through parts."""
    segments = kernel.segments_of(price.layout)
    execution = kernel.execution.of_layout(price.layout)
    planned = document.model_copy(
        update={
            "runs_on": [request.name_of(part) for part, _ in kernel.composition],
            "layout": layout_document(price.layout, price.stages),
            "execution": execution,
        }
    )
    return _with_figures(planned, request, segments, price.stages)


def _with_figures(
    document: MixedPlan, request: MixedRequest, segments: list[Segment], stages: Stages
) -> MixedPlan:
    """The document of a pipeline with all that follows from its layout and where it runs."""
    assert document.layout is not None
    assert document.execution is not None
    layout = segments[0].part.layout
    names = request.cluster.names
    step = mixed_step(segments, stages)
    step_s = float(np.asarray(step.seconds))
    memory_gib = mixed_memory_gib(segments, stages)
    workload = request.first.workload()
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    dense_layers = _leading_on_ranks(leading, [sum(rank) for rank in stages])
    ranks, nodes, peak = [], [], 0.0
    for segment, name in zip(segments, document.runs_on, strict=True):
        own = request.parts[names.index(name)]
        gpus, cluster = segment.part.workload.gpus, own.cluster
        peak += gpus * peak_flops(cluster.device, own.precision)
        nodes.append((name, gpus // cluster.gpus_per_node))
        for rank in range(segment.first, segment.first + segment.ranks):
            ranks.append(
                RankDoc(
                    rank=rank,
                    part=name,
                    device=cluster.device.name,
                    layers=sum(stages[rank]),
                    dense_layers=dense_layers[rank],
                    memory_gib=float(memory_gib[rank]),
                    usable_gib=segment.part.limit_gib,
                )
            )
    in_use, tokens = int(layout.gpus), workload.tokens_per_step
    flops = workload.model_flops_per_token * tokens
    predicted = MixedPredicted(
        step_time_s=step_s,
        breakdown_s={name: float(np.asarray(part)) for name, part in step.parts.items()},
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_gpu=tokens / step_s / in_use,
        tflops_per_gpu=flops / step_s / in_use / 1e12,
        memory_gib=[rank.memory_gib for rank in ranks],
        mfu=flops / step_s / peak,
        host_memory_gib=host_memory_gib(segments, stages) or None,
        error_band=_band(segments),
    )
    planned = document.model_copy(
        update={
            "installs": software_needs(document.inputs, document.layout, document.execution),
            "predicted": predicted,
            "warnings": list(training_warnings(request.first)),
            "ranks": ranks,
            "nodes": nodes,
        }
    )
    lengths = lengths_document(request.first, partial(_step_of_packs, planned))
    return planned.model_copy(update={"lengths": lengths})


def placed_on_parts(plan: MixedPlan, onto: MixedClusterSpec) -> MixedPlan:
    """A pipeline with its ranks on other nodes of its parts, in turn, and all that follows from these.

    Parameters
    ----------
    plan
        A pipeline through parts.
    onto
        Has parts of the same names.

    Returns
    -------
    MixedPlan
        Feasible, without a bound: whether another plan is faster there was not asked.

    Raises
    ------
    InputError
        If these parts cannot run a pipeline.
    InfeasibleError
        If a part has too few nodes, or a rule does not hold there, memory included.
    """
    onto.check_pipeline()
    names = onto.names
    for name, nodes in plan.nodes:
        check_choice(name, names, "parts", "the plan runs on a part that the cluster does not have")
        part = onto.parts[names.index(name)]
        if part.gpus < nodes * part.cluster.gpus_per_node:
            raise InfeasibleError(
                f"the plan needs {nodes} nodes of {name}, {onto.name} has "
                f"{part.gpus // part.cluster.gpus_per_node} free"
            )
    moved = plan.model_copy(update={"cluster": onto})
    moved = moved.model_copy(update={"inputs": request_on(moved, 0).inputs()})
    request = request_of_parts(moved)
    for name, each in zip(names, request.parts, strict=True):
        check_part(each.cluster, name)
    pipeline = Pipeline.of(moved)
    plain: dict[str, Any] = {
        name: MixedPlan.model_fields[name].get_default(call_default_factory=True)
        for name in ("choices", "robustness", "cost", "baseline", "alternatives")
    }
    moved = _with_figures(moved, request, pipeline.segments, pipeline.stages)
    assert moved.predicted is not None
    moved = moved.model_copy(
        update={
            **plain,
            "expected_by_pairs": None,
            "status": "feasible",
            "objective": objective_of(moved.predicted.step_time_s, None),
            "alone": [
                AloneDoc(
                    part=name,
                    device=each.cluster.device.name,
                    gpus=each.gpus,
                    status="unknown",
                    step_time_s=None,
                    lower_bound_s=None,
                )
                for name, each in zip(names, request.parts, strict=True)
            ],
        }
    )
    broken = list(rule_faults(Pipeline.of(moved)))
    if broken:
        raise InfeasibleError("the plan does not run there: " + "; ".join(broken))
    moved = with_digest(moved)
    verify_mixed(moved)
    return moved


def _step_of_packs(planned: MixedPlan, lengths: PackedLengths) -> StepTime:
    """The step of a pipeline whose sequences are packs such as these, nothing else moved."""
    inputs = planned.inputs.model_copy(update={"lengths": lengths})
    pipeline = Pipeline.of(planned.model_copy(update={"inputs": inputs}))
    return mixed_step(pipeline.segments, pipeline.stages)


def _leading_on_ranks(leading: int, counts: Sequence[int]) -> list[int]:
    """Dense layers in front of those with experts on each rank of so many layers."""
    dealt = []
    for count in counts:
        dealt.append(min(leading, count))
        leading -= dealt[-1]
    return dealt


def _band(segments: list[Segment]) -> ErrorBandDoc:
    """The widest of the parts' bands."""
    bands = [step_time_band(each.part.workload) for each in segments]
    return ErrorBandDoc(
        low=min(band.low for band in bands),
        high=max(band.high for band in bands),
        rows=min(band.rows for band in bands),
        basis=NOT_MEASURED,
    )


# All that was priced as one CP-SAT model, which the search itself does not need: whoever reads the file can
# solve it again. The best plan of each part alone is a combination among pipelines: its optimum is the plan.
# A rank holds what its part's memory lacks of the largest, too, as the rows have one limit.


def _model_of(request: MixedRequest, searched: _Searched, step_s: float) -> KernelModel | None:
    """The choice among plans on parts alone and pipelines through several; None where nothing was priced.

    `step_s` is the plan's: what has no price yet must be faster.
    """
    largest = _Largest.of(request)
    rows = [
        _alone_combination(request, part, plan, largest)
        for part, plan in enumerate(searched.alone)
        if plan.layout is not None and plan.mapping is not None
    ]
    for chosen, outcome in searched.outcomes:
        maker = KernelMaker(chosen)
        rows += [_combination(chosen, kernel, price, largest) for kernel, price in outcome.known]
        for row in outcome.waiting:
            rows.append(_combination(chosen, maker.kernel(row), None, largest, row.bound_s))
    if not rows:
        return None
    workload = request.first.workload()
    model = KernelModel(
        layers=workload.model.layers,
        leading=workload.model.dense_layers if workload.model.moe_layers else 0,
        combinations=[combination for combination, _ in rows],
        cutoff_s=step_s,
        empty_ends=may_have_empty_ends(workload),
        max_cut_use=workload.max_cut_use,
        host_limit_gib=largest.host_gib,
    )
    uses = [dict(each.priced.cut_uses) if each.priced else {} for each in model.combinations]
    model.state_limits({"tp": [inside for _, inside in rows]}, uses)
    return model


class _Largest(NamedTuple):
    """The most that a GPU of any part may hold, GiB."""

    hbm_gib: float
    host_gib: float
    """On its host; infinite where no part says it."""

    @classmethod
    def of(cls, request: MixedRequest) -> _Largest:
        """Of the parts of a request."""
        works = [part.workload() for part in request.parts]
        hosts_gib = [host_limit_gib(work) for work in works]
        stated_gib = [gib for gib in hosts_gib if gib < inf]
        return cls(max(map(usable_hbm_gib, works)), max(stated_gib, default=inf))

    def rows(self, workload: Workload, layout: Layout) -> list[RankRow]:
        """What each pipeline rank holds on the part of a workload, with what the part has less.

        Parameters
        ----------
        workload
            On a part, under the execution of the pipeline.
        layout
            In plain numbers; of all ranks of its pipeline, rows come back.
        """
        host_gib, less_gib = host_limit_gib(workload), self.hbm_gib - usable_hbm_gib(workload)
        return [
            replace(
                row,
                fixed_gib=row.fixed_gib + less_gib,
                host=row.host._replace(fixed_gib=row.host.fixed_gib + self.host_gib - host_gib)
                if host_gib < inf
                else HostRow(),
            )
            for row in memory_rows(workload, layout)
        ]


def _combination(
    request: MixedRequest,
    kernel: MixedKernel,
    price: MixedPrice | None,
    largest: _Largest,
    bound_s: float = 0.0,
) -> tuple[Combination, int]:
    """A pipeline through parts, and the GPUs of a scale-up domain on each of them.

    `bound_s` is of one without a price.
    """
    layout, last = kernel.layout, int(kernel.layout.pp) - 1
    ranks: list[RankCosts] = []
    memory: list[RankRow] = []
    beside_s = 0.0
    for segment, costs in zip(kernel.segments, kernel.costs, strict=True):
        layer_s = shortest_s(costs) if costs.order else costs.layer_s
        leading_s = costs.leading_s if costs.leading and not costs.order else layer_s
        again_s = least_again_s(costs) if kernel.full else 0.0
        memory += largest.rows(segment.part.workload, layout)[segment.own]
        for rank in range(segment.first, segment.first + segment.ranks):
            own_s = costs.first_s * (rank == 0) + costs.last_s * (rank == last)
            ranks.append(RankCosts(layer_s, leading_s, again_s, own_s))
            beside_s += own_s
    fill = min(int(layout.num_micro_batches), request.first.workload().flushes)
    of_work, of_busiest = (
        float(x) for x in least_by_work(layout.pp, int(layout.num_micro_batches) / fill)[0]
    )
    execution = kernel.execution.of_layout(layout if price is None else price.layout)
    priced = None
    if price is not None:
        priced = Priced(
            layout=price.layout,
            matrix={},
            stages=price.stages,
            step_time_s=price.step_time_s,
            execution=execution,
            cut_uses=tuple(_cut_uses(request, kernel, price).items()),
        )
    placements = [each.part.context.placement for each in kernel.segments]
    inside = {
        axis: min(int(members_in_domain(each, axis)) for each in placements)
        for axis in request.first.inside_domain
    }
    combination = Combination(
        layout=layout,
        execution=execution,
        matrix={},
        bound_s=bound_s if price is None else price.step_time_s,
        costs=CombinationCosts(
            layer_s=0.0,
            leading_s=0.0,
            again_s=0.0,
            first_s=0.0,
            last_s=0.0,
            weight=fill * of_busiest * kernel.scale,
            lines=(((kernel.rest_s + fill * of_work * beside_s) * kernel.scale, 0.0),),
            ranks=tuple(ranks),
            work_weight=fill * of_work * kernel.scale,
        ),
        memory=memory,
        limit_gib=largest.hbm_gib,
        is_open=price is None,
        priced=priced,
        inside=inside,
        on_parts="_".join(f"{request.name_of(part)}_{count}" for part, count in kernel.composition),
    )
    return combination, min(domain_gpus(each.part.workload) for each in kernel.segments)


def _alone_combination(
    request: MixedRequest, part: int, plan: Plan, largest: _Largest
) -> tuple[Combination, int]:
    """The best plan on a part alone, as `_combination` has pipelines."""
    priced = priced_of(plan)
    layout = priced.layout.flat()
    workload = request.parts[part].workload(priced.execution).on(int(priced.layout.gpus))
    matrix = {axis: np.array([row]) for axis, row in priced.matrix.items()}
    placement = placement_on(workload.cluster, layout, matrix)
    inside = {axis: int(count[0]) for axis, count in inside_domains(workload, placement).items()}
    combination = Combination(
        layout=replace(priced.layout, recompute_layers=0),
        execution=priced.execution,
        matrix=priced.matrix,
        bound_s=priced.step_time_s,
        costs=combination_costs(workload, layout, placement)[0],
        memory=largest.rows(workload, priced.layout),
        limit_gib=largest.hbm_gib,
        is_open=False,
        priced=replace(
            priced,
            cut_uses=tuple(
                (f"{request.name_of(part)}_{name}", use)
                for name, use in cut_uses(workload, priced).items()
            ),
        ),
        inside=inside,
        on_parts=request.name_of(part),
    )
    return combination, domain_gpus(workload)


# What each execution choice of a pipeline through parts brings: the best plan without it, on any parts.
#
# The pipeline itself with the plain value, where that is legal, has a price that any better plan must beat:
# a part whose bound is above it is not searched again, and pipelines are searched below it alone.


def _with_choices(request: MixedRequest, document: MixedPlan, deadline: float) -> MixedPlan:
    """The document with what each of its execution choices brings, the largest gain first."""
    assert document.layout is not None
    assert document.execution is not None
    tasks = []
    for choice, value in compared_choices(document.layout, document.execution):
        parts = [without_choice(part, choice) for part in request.parts]
        if None not in parts:
            pinned = replace(request, parts=tuple(part for part in parts if part is not None))
            tasks.append(partial(_without, pinned, document, choice, value, deadline))
    gains = sorted(side_by_side(tasks), key=gain_of, reverse=True)
    faster = [] if document.expected_by_pairs else list(_faster_on_parts(document, gains))
    warnings = [*document.warnings, *faster]
    return document.model_copy(update={"choices": gains, "warnings": warnings})


def _faster_on_parts(document: MixedPlan, choices: Sequence[ExecutionChoice]) -> Iterator[str]:
    """A warning where a plan without a choice is faster than the pipeline, which time ended."""
    planned_s = document.objective.step_time_s or 0.0
    faster = [
        choice
        for choice in choices
        if (choice.step_time_s_without or inf) < planned_s * (1.0 - LEAST_GAIN)
    ]
    if faster:
        fastest = min(faster, key=lambda choice: choice.step_time_s_without or inf)
        yield words_of_faster(fastest, "of pipelines through parts its seconds alone are kept")


def _without(
    request: MixedRequest,
    document: MixedPlan,
    choice: Choice,
    value: int | str | bool,
    deadline: float,
) -> ExecutionChoice:
    """A choice with the best plan for the request without it; the search is left out behind the deadline."""
    step_s, bound_s = inf, None
    if time.monotonic() < deadline:
        # A request with less to choose from has no faster plan.
        bounds = [_least_s(part.status, part.lower_bound_s) for part in document.alone]
        limit_s = _as_it_stands_s(document, choice)
        rival = best_on_parts(request, bounds, limit_s, deadline)
        step_s, bound_s = rival.step_s, rival.bound_s
    claim = claim_of(_status(step_s, bound_s))
    answer = ExecutionChoice(
        choice=choice.name,
        value=value,
        step_time_s_without=None if step_s == inf else step_s,
        lower_bound_s_without=None if bound_s in (None, inf) else bound_s,
        status=claim,
        proven=is_closed(claim),
    )
    return described(answer, choice, value, document.inputs)


@dataclass(frozen=True, kw_only=True)
class BestOnParts:
    """The least step of a request."""

    step_s: float
    """Infinite without one."""
    bound_s: float | None
    """Infinite where nothing exists, None where nothing is known."""
    layout: LayoutDoc | None = None
    """None where the step is the one that was known before."""
    runs_on: tuple[str, ...] = ()
    """The parts along the pipeline, or the one that is fastest alone; none without a layout."""

    @property
    def status(self) -> Status:
        """What the search lets one say of it."""
        return _status(self.step_s, self.bound_s)


def best_on_parts(
    request: MixedRequest,
    alone_bounds_s: list[float | None],
    limit_s: float = inf,
    deadline: float = inf,
) -> BestOnParts:
    """The least step of a request, with a bound.

    Parameters
    ----------
    request
        What to plan.
    alone_bounds_s
        No plan on a part alone is faster than this, for each part; None where nothing is known of it.
    limit_s
        A step that the request can have; infinite where none is known.
    deadline
        On the clock of `time.monotonic`.
    """
    bounds: list[float | None] = []
    step_s, layout = limit_s, None
    runs_on: tuple[str, ...] = ()
    for index, (part, known_s) in enumerate(zip(request.parts, alone_bounds_s, strict=True)):
        bound_s = known_s
        if bound_s is None or bound_s < step_s:
            left_s = None if deadline == inf else max(deadline - time.monotonic(), 0.0)
            plan = _alone(part, left_s)
            bound_s = _least_s(plan.status, plan.objective.lower_bound_s)
            if (plan.objective.step_time_s or inf) < step_s:
                step_s, layout = plan.objective.step_time_s or inf, plan.layout
                runs_on = (request.name_of(index),)
        bounds.append(bound_s)
    for chosen in _choices_of_parts(request):
        outcome = through_parts(chosen, step_s, deadline)
        if outcome.best is not None and outcome.best.price is not None:
            price = outcome.best.price
            step_s, layout = price.step_time_s, layout_document(price.layout, price.stages)
            runs_on = tuple(chosen.name_of(part) for part, _ in outcome.best.composition)
        bounds.append(_least_s(outcome.status, outcome.lower_bound_s))
    bound = None
    if None not in bounds:
        bound = min([step_s, *(each for each in bounds if each is not None)])
    return BestOnParts(step_s=step_s, bound_s=bound, layout=layout, runs_on=runs_on)


def _as_it_stands_s(document: MixedPlan, choice: Choice) -> float:
    """The step of a pipeline with the plain value of a choice, nothing else moved.

    Infinite where that breaks a rule or does not fit, or where the layout is what changes.
    """
    assert document.execution is not None
    if choice.of == "layout":
        return inf
    plain: dict[str, Any] = {choice.name: choice.plain}
    execution = replace(document.execution, **plain)
    pipeline = Pipeline.of(document.model_copy(update={"execution": execution}))
    if any(rule_faults(pipeline)):
        return inf
    return float(np.asarray(mixed_step(pipeline.segments, pipeline.stages).seconds))


# Whether the same pipeline wins where the cost model is off: as for plans on one cluster (`plan.robustness`),
# the same thing off by the same factor on all parts, by the widest of their bands.


def _with_robustness(request: MixedRequest, document: MixedPlan, deadline: float) -> MixedPlan:
    """The document with what becomes of it under every change of its parts."""
    band, memory, rows = changes_of_parts(request)
    tasks = [partial(_scenario, request, document, row, deadline) for row in rows.values()]
    found = robustness_of(band, memory, side_by_side(tasks))
    return document.model_copy(update={"robustness": found})


def changes_of_parts(
    request: MixedRequest,
) -> tuple[ErrorBand, ErrorBand, dict[str, list[Change | None]]]:
    """The widest bands of steps and of memory of any part, and by its words what is off on each part.

    Parameters
    ----------
    request
        What is planned; each part has the bands of its own device and stack.
    """
    works = [part.workload() for part in request.parts]
    band = _widest([step_time_band(work) for work in works])
    memory = _widest([peak_memory_band(work) for work in works])
    by_words: dict[str, list[Change | None]] = {}
    for index, part in enumerate(request.parts):
        for change in changes(part, band, memory):
            row = by_words.setdefault(change.words, [None] * len(request.parts))
            row[index] = change
    return band, memory, by_words


def changed_parts(request: MixedRequest, by_part: Sequence[Change | None]) -> MixedRequest:
    """A request with what is off on each part; None is nothing.

    Parameters
    ----------
    request
        As it was searched.
    by_part
        For each part what is off there; None where nothing is.
    """
    pairs = zip(by_part, request.parts, strict=True)
    parts = tuple(part if change is None else change.applied(part) for change, part in pairs)
    return replace(request, parts=parts)


def _widest(bands: Sequence[ErrorBand]) -> ErrorBand:
    return replace(
        bands[0], low=min(band.low for band in bands), high=max(band.high for band in bands)
    )


def _scenario(
    request: MixedRequest,
    document: MixedPlan,
    by_part: Sequence[Change | None],
    deadline: float,
) -> Scenario:
    """What becomes of a pipeline where something is off on each part that has it."""
    pairs = zip(by_part, request.parts, strict=True)
    off = [(change, part.workload()) for change, part in pairs if change is not None]
    changed = changed_parts(request, by_part)
    now_s = moved_step_s(changed, document)

    def bound_s(before_s: float | None) -> float:
        return min(monotone_bound_s(change, before_s, workload) for change, workload in off)

    def rival() -> BestUnderChange:
        alone = [_least_s(part.status, part.lower_bound_s) for part in document.alone]
        bounds: list[float | None] = [bound_s(before_s) for before_s in alone]
        best = best_on_parts(changed, bounds, inf if now_s is None else now_s, deadline)
        step_s = None if best.step_s == inf else best.step_s
        known = None if best.layout is None else best.layout.model_dump() | {"step_time_s": step_s}
        status = _status(best.step_s, best.bound_s)
        bound = None if best.bound_s in (None, inf) else best.bound_s
        return BestUnderChange(
            status=status, lower_bound_s=bound, step_time_s=step_s, document=known
        )

    is_quick = time.monotonic() < deadline
    least_s = bound_s(document.objective.lower_bound_s)
    return scenario_of(off[0][0].words, now_s, least_s, rival if is_quick else None)


def moved_step_s(changed: MixedRequest, document: MixedPlan) -> float | None:
    """The step of a pipeline on changed parts, nothing in it moved; None where it no longer fits.

    Parameters
    ----------
    changed
        The request with what is off on its parts, in the order of the cluster file.
    document
        A pipeline through parts, as it was planned.
    """
    parts = tuple(
        stated.model_copy(update={"cluster": part.cluster})
        for stated, part in zip(document.cluster.parts, changed.parts, strict=True)
    )
    cluster = document.cluster.model_copy(update={"parts": parts})
    inputs = document.inputs.model_copy(update={"memory_risk": changed.first.memory_risk})
    pipeline = Pipeline.of(document.model_copy(update={"cluster": cluster, "inputs": inputs}))
    pairs = zip(pipeline.segments, pipeline.memory_gib, strict=True)
    if any(max(peaks_gib) > segment.part.limit_gib for segment, peaks_gib in pairs):
        return None
    return float(np.asarray(mixed_step(pipeline.segments, pipeline.stages).seconds))


# What a whole training takes on a mixed cluster: the parts in use, each at its own power and price.


def with_mixed_cost(result: MixedResult, budget: Budget) -> MixedResult:
    """A result with what the training takes; as it is where there is no plan, or nothing is asked.

    Parameters
    ----------
    result
        Of any status.
    budget
        Tokens or days of the training, and a price in place of the parts' own.
    """
    cost = cost_on_parts(result.document, budget)
    if cost is None:
        return result
    document = with_digest(result.document.model_copy(update={"cost": cost}))
    alone = result.alone
    return replace(
        result,
        document=document,
        alone=None if alone is None else with_digest(with_cost(alone, budget)),
    )


def figures_on_parts(result: MixedResult) -> dict[str, Any]:
    """What a row of results says of a plan on a mixed cluster, with what its training takes.

    Parameters
    ----------
    result
        As `with_mixed_cost` left it.
    """
    document, plan = result.document, result.alone or result.document
    cost: dict[str, Any] = {}
    if document.cost is not None:
        days, days_asked = document.cost.plan.days, document.cost.days_asked
        late = None if days_asked is None else max(0.0, days - days_asked)
        cost = {
            "tokens": document.cost.tokens,
            **document.cost.plan.model_dump(),
            "days_late": late,
        }
    # Where a part alone is fastest the bound is still on all parts.
    return plan.figures() | document.figures() | cost
