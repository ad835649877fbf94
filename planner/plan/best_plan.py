"""The best plan of a request: the one search that every answer of this program asks.

`plan`, `batch`, sweeps, `recommend`, `fleet` and mixed clusters come here for their plans; what each choice
brings, what becomes of a plan where the cost model is off, single changes and what-if rows come here for the
seconds that they print. All search one space: every execution that the request leaves open, every size of
gradient buckets, every choice of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import is_irregular
from meshwright.constraints.fabric import domain_gpus
from meshwright.costmodel.calibration import Calibration
from meshwright.costmodel.data_parallel import LEAST_GAIN, size_range
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes, kind_times
from meshwright.costmodel.layout import AXES, ROUNDING, Layout
from meshwright.costmodel.measured_settings import (
    GainCorrections,
    gain_corrections,
    priced_settings,
)
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.costmodel.workload import Execution, Workload
from meshwright.documents import write_files
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.pricing import cut_uses, pricing_of
from meshwright.planner.plan.assemble import Claim, claim_of, predict
from meshwright.planner.plan.document import (
    Expected,
    ExpectedByPairs,
    Plan,
    PromisedStep,
    SettingCorrection,
)
from meshwright.planner.plan.nodes import better_of, decide_on_nodes
from meshwright.planner.plan.texts import Setup
from meshwright.planner.request.choices import DOUBLED
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.run_terms import layout_document
from meshwright.planner.search.branches import Combination
from meshwright.planner.search.choosers import model_of_places
from meshwright.planner.search.kernel_model import KernelModel
from meshwright.planner.search.loop import KnownSurvey, Progress, search_executions
from meshwright.planner.search.pricing import ALL_PLANS, Certificate, Outcome, SearchParams, Sought
from meshwright.planner.solvers.clock import Shares, is_over
from meshwright.planner.solvers.processes import side_by_side

# How many parameters' gradients are reduced together: the size that the price of a layout assumes.
#
# The search prices every layout with the best of the sizes (`costmodel.data_parallel`); here the plans that
# it returns are told which one that is.


class SearchSettings(TypedDict, total=False):
    """What `search_with_buckets` hands on to `search_executions`, which says what it is."""

    on_first: Callable[[Priced], None] | None
    begin_with: Layout | None
    run_as: Execution | None
    counts: bool
    most_priced: int | None
    params: SearchParams | None
    sought: Sought
    known_survey: KnownSurvey | None


def search_with_buckets(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    own_buckets: bool = False,
    **settings: Unpack[SearchSettings],
) -> Outcome:
    """The best layouts of a request, with the best size of their gradient buckets.

    Answers come from `best_plan`, which also decides on nodes.

    Parameters
    ----------
    request
        What to plan.
    progress
        Called with one line whenever a better plan is found.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    settings
        The others of `search_executions`.

    Returns
    -------
    Outcome
        As `with_gradient_buckets` says.
    """
    outcome = search_executions(request, pricing_of, progress, own_buckets=own_buckets, **settings)
    return outcome if own_buckets else with_gradient_buckets(request, outcome)


def with_gradient_buckets(request: PlanRequest, outcome: Outcome) -> Outcome:
    """The layouts of a search with the best size of their gradient buckets.

    Parameters
    ----------
    request
        What was searched.
    outcome
        Priced with the best size.

    Returns
    -------
    Outcome
        No layout is slower than before.
    """
    # As in the search: see `branches_of`.
    if not outcome.best or request.max_cut_use < 1:
        return outcome
    best = sorted(
        (_with_best_bucket(request, priced) for priced in outcome.best),
        key=lambda priced: priced.step_time_s,
    )
    bound_s = outcome.lower_bound_s
    if outcome.status == "optimal":
        bound_s = best[0].step_time_s  # summed up again, it may differ in its last digit
    elif bound_s is not None:
        bound_s = min(bound_s, best[0].step_time_s)
    return replace(outcome, best=tuple(best), lower_bound_s=bound_s)


def _with_best_bucket(request: PlanRequest, priced: Priced) -> Priced:
    layout = priced.layout
    workload = request.workload(priced.execution.of_layout(layout)).on(int(layout.gpus))
    placement = Setup.of_priced(workload, priced).placement
    context = make_context(replace(workload, chooses_buckets=True), layout, placement)
    sizes = size_range(context)
    if sizes is None:
        return priced
    in_mb = context.constants.framework.gradients_mb
    wanted = [in_mb(float(size)) for size in sizes.others()[1]]
    seconds_of = partial(_step_s, context, kind_times(context), priced)
    step_s = {size_mb: seconds_of(size_mb) for size_mb in wanted}
    best_mb = min(step_s, key=lambda size_mb: step_s[size_mb])
    # Rounding must not keep a plan from the size that its price assumes.
    if step_s[best_mb] > (1.0 - LEAST_GAIN) * seconds_of(None) * (1.0 + 1e-9):
        return priced
    chosen = replace(priced.execution, bucket_mb=best_mb)
    return replace(priced, execution=chosen, step_time_s=step_s[best_mb])


def _step_s(context: Context, times: KindTimes, priced: Priced, size_mb: float | None) -> float:
    workload = replace(context.workload, bucket_mb=size_mb, chooses_buckets=False)
    step = exact_step(replace(context, workload=workload), priced.stages, times)
    return float(np.asarray(step.seconds))


# The plan of the least mean step time over scenarios of the constants, such as samples of a posterior.
#
# With f_s(x) the step time of plan x in scenario s of N, no plan has a mean below that of the scenarios' own
# optima, (1/N) sum_s min_x f_s(x) (Madansky 1960, Management Science 6, 'wait and see'). The nominal winner,
# its runners-up and every scenario's winner are priced in all scenarios. The least mean is a plan's, the
# bound says how far any other could be below it; where one plan wins every scenario the two meet.


Search = Callable[[PlanRequest, Layout], Outcome]
"""The best plan for a request; the layout is likely good and priced first."""

SCENARIOS = 8
"""Samples of a posterior, in pairs that mirror each other."""
MOST_ROUNDS = 4
LARGEST_SPACE = 5_000_000
"""A search of more CP-SAT models or layouts is not repeated for every scenario unless that is asked for."""
_NAMED = (*DOUBLED, "etp", "num_micro_batches")
"""What a plan is named by, and what follows from it."""


@dataclass(frozen=True)
class Expectation:
    """What scenarios say of a nominal outcome."""

    chosen: Priced
    document: Expected


def expectation(
    request: PlanRequest,
    outcome: Outcome,
    search: Search,
    scenarios: Sequence[Calibration],
) -> Expectation:
    """The plan of the least mean among the candidates, and how far any other could be below it.

    Parameters
    ----------
    request
        What was planned.
    outcome
        Of its search with the nominal constants; has a plan.
    search
        Searches again under other constants.
    scenarios
        At least one; all count the same.
    """
    nominal = outcome.best[0]
    likely = replace(nominal.layout, recompute_layers=0)
    candidates = list(outcome.best)
    bounds = []
    shares = Shares(len(scenarios))
    for scenario in scenarios:
        asked = replace(request, top_k=1, time_limit_s=shares.next_s(), calibration=scenario)
        found = search(asked, likely)
        candidates += found.best
        bounds.append(found.lower_bound_s or 0.0)
    unlike = list(_unlike(candidates))
    prices = np.array([_prices(request, plan, scenarios) for plan in unlike])
    means = prices.mean(axis=1)
    best = int(np.argmin(means))
    lower_bound_s = min(float(np.mean(bounds)), float(means[best]))
    if means[0] <= means[best] * (1.0 + ROUNDING):
        best = 0
    mean_s = float(means[best])
    document = Expected(
        scenarios=len(scenarios),
        step_time_s=mean_s,
        lower_bound_s=lower_bound_s,
        gap=(mean_s - lower_bound_s) / mean_s,
        nominal_step_time_s=float(means[0]),
        regret=float(means[0]) / lower_bound_s - 1.0 if lower_bound_s else None,
        same_as_nominal=best == 0,
        winners=len({int(row) for row in np.argmin(prices, axis=0)}),
        chosen=_words(unlike[best], unlike[0]),
    )
    return Expectation(unlike[best], document)


def is_quick(request: PlanRequest, outcome: Outcome) -> bool:
    """Whether the search can be repeated for every scenario without being asked for.

    Parameters
    ----------
    request
        What was searched.
    outcome
        Of the search, which counted its layouts and its CP-SAT models.
    """
    done, overlaps = outcome.certificate, len(request.execution_options.values["tp_overlap"])
    return done.rounds <= MOST_ROUNDS and done.layouts <= LARGEST_SPACE * overlaps


def _unlike(candidates: Sequence[Priced]) -> Iterator[Priced]:
    """Each plan once, the nominal winner first."""
    seen = set()
    for plan in candidates:
        key = (plan.layout, plan.stages, repr(plan.matrix), plan.ranks, plan.execution)
        if key not in seen:
            seen.add(key)
            yield plan


def _prices(
    request: PlanRequest, plan: Priced, scenarios: Sequence[Calibration]
) -> NDArray[np.float64]:
    """Seconds of a step of a plan as it stands, in every scenario."""
    seconds = []
    for scenario in scenarios:
        workload = replace(request, calibration=scenario).workload(plan.execution)
        setup = Setup.of_priced(workload.on(int(plan.layout.gpus)), plan)
        seconds.append(setup.step_time_s)
    return np.array(seconds)


def _words(plan: Priced, nominal: Priced) -> str:
    """The degrees of a plan, and what else sets it apart from the nominal winner."""
    settings, usual = _settings(plan), _settings(nominal)
    words = degrees_in_words(plan)
    further = [name for name in settings if settings[name] != usual[name] and name not in _NAMED]
    if not further and plan.layout == nominal.layout:
        return f"{words}, another mapping or split of the layers"
    return ", ".join([words, *(f"{name} {_value(settings[name])}" for name in further)])


def degrees_in_words(plan: Priced) -> str:
    """The degrees of a plan in words, those of `DOUBLED`.

    Parameters
    ----------
    plan
        As a search found it.
    """
    settings = _settings(plan)
    return " ".join(f"{name} {settings[name]}" for name in DOUBLED)


def _settings(plan: Priced) -> dict[str, Any]:
    layout = layout_document(plan.layout, plan.stages).model_dump(exclude={"stages"})
    return {**layout, **asdict(plan.execution)}


def _value(setting: object) -> str:
    return "by default" if setting is None or setting == [] else str(setting)


# The plan of the least expected step by measured pairs: its price times the corrections of its settings.
#
# Corrections are constants of a layout with its execution, so that the search multiplies each bound by the
# least factor of what it bounds, and proves the least product as it proves the least price.


def expectation_by_pairs(
    request: PlanRequest,
    outcome: Outcome,
    corrections: GainCorrections,
    *,
    own_buckets: bool = False,
) -> tuple[Outcome, ExpectedByPairs]:
    """The plan of the least expected step on the nodes of the fastest plan.

    Parameters
    ----------
    request
        What was planned; its time limit is that of this search.
    outcome
        Of the search for the fastest plan; has one.
    corrections
        What measured pairs say of settings.
    own_buckets
        As of the search before.

    Returns
    -------
    tuple of (Outcome, ExpectedByPairs)
        With the chosen plan first, which is feasible alone where another is faster.
    """
    likely = replace(outcome.best[0].layout, recompute_layers=0)
    corrected = search_executions(
        replace(request, top_k=1),
        pricing_of,
        begin_with=likely,
        corrections=corrections,
        own_buckets=own_buckets,
    )
    candidates = list(outcome.best)
    for plan in corrected.best:
        step_time_s = plan.step_time_s / _correction(request, plan, corrections)
        uncorrected = replace(plan, step_time_s=step_time_s)
        candidates.append(uncorrected if own_buckets else _with_best_bucket(request, uncorrected))
    expected_s = [plan.step_time_s * _correction(request, plan, corrections) for plan in candidates]
    # Behind a time limit this search may meet a faster plan than the one before.
    fastest = _least([plan.step_time_s for plan in candidates], 0)
    best = _least(expected_s, fastest)
    chosen, bound_s = candidates[best], corrected.lower_bound_s
    proven = corrected.status == "optimal"
    if bound_s is not None:
        # What was proven is summed up again, and may differ in its last digits.
        bound_s = expected_s[best] if proven else min(bound_s, expected_s[best])
    document = ExpectedByPairs(
        chosen=_promised(request, chosen, candidates[fastest], expected_s[best], corrections),
        fastest=_promised(request, candidates[fastest], chosen, expected_s[fastest], corrections),
        same_as_fastest=best == fastest,
        lower_bound_s=bound_s,
        gap=None if bound_s is None else (expected_s[best] - bound_s) / expected_s[best],
        proven=proven,
    )
    if best == 0:
        return outcome, document
    # Multiplied and divided again, a price may differ in its last digit.
    step_time_s = predict(_as_run(request, chosen), chosen).step_time_s
    return _led_by(outcome, replace(chosen, step_time_s=step_time_s)), document


def _least(seconds: Sequence[float], preferred: int) -> int:
    """Where the least is; the preferred one if it is as little."""
    smallest = int(np.argmin(seconds))
    return preferred if seconds[preferred] <= seconds[smallest] * (1.0 + ROUNDING) else smallest


def _led_by(outcome: Outcome, chosen: Priced) -> Outcome:
    """An outcome whose plan is not the fastest one that is known."""
    others = tuple(
        plan
        for plan in outcome.best
        if plan.step_time_s >= chosen.step_time_s and _as_started(plan) != _as_started(chosen)
    )
    return replace(outcome, status="feasible", best=(chosen, *others))


def _as_started(plan: Priced) -> tuple[Layout, Execution]:
    return plan.layout, replace(plan.execution, bucket_mb=None).of_layout(plan.layout)


def _correction(request: PlanRequest, plan: Priced, corrections: GainCorrections) -> float:
    return corrections.of(priced_settings(_as_run(request, plan), plan.layout))


def _as_run(request: PlanRequest, plan: Priced) -> Workload:
    return request.workload(plan.execution.of_layout(plan.layout)).on(int(plan.layout.gpus))


def _promised(
    request: PlanRequest,
    plan: Priced,
    beside: Priced,
    expected_s: float,
    corrections: GainCorrections,
) -> PromisedStep:
    settings = priced_settings(_as_run(request, plan), plan.layout)
    return PromisedStep(
        plan=degrees_in_words(plan) if plan is beside else _words(plan, beside),
        step_time_s=plan.step_time_s,
        expected_step_time_s=expected_s,
        corrections=setting_corrections(corrections, settings),
    )


def setting_corrections(
    corrections: GainCorrections, settings: Collection[str]
) -> list[SettingCorrection]:
    """What is corrected of a run with some settings, in the order of the corrections.

    Parameters
    ----------
    corrections
        What measured pairs say of settings.
    settings
        Names that a run has, of `priced_settings`.
    """
    return [
        SettingCorrection(
            setting=name, factor=shift.factor, deviation=shift.deviation, pairs=shift.pairs
        )
        for name, shift in corrections.shifts.items()
        if name in settings
    ]


@dataclass(frozen=True, kw_only=True)
class BestPlan:
    """How the search for the best plan of a request ended."""

    request: PlanRequest
    """With the nodes taken, and no others, free; its GPUs are theirs."""
    outcome: Outcome
    full: Outcome | None
    """Of the layouts on all GPUs, where those were searched apart."""
    note: str | None
    """What was left out of the nodes and why, in a sentence."""
    expected: Expected | None
    """With a calibration, what its posterior says."""
    expected_by_pairs: ExpectedByPairs | None
    """Without one, what measured pairs say, where that is the objective."""
    comparison: Callable[[], Outcome] | None = None
    """The search over layouts on all GPUs where it was left for later; its outcome: `beside_all_gpus`."""

    @property
    def step_time_s(self) -> float | None:
        """Of the plan; None without one."""
        return self.outcome.best[0].step_time_s if self.outcome.best else None

    @property
    def claim(self) -> Claim:
        """What may be said of the plan, or of there being none."""
        return claim_of(self.outcome.status)


@dataclass(frozen=True, kw_only=True)
class Likely:
    """Layouts that are likely good, and how they are likely run."""

    layouts: Layout
    """An array of some."""
    run_as: Execution | None = None


def likely_as(
    request: PlanRequest, plans: Sequence[tuple[Layout, Execution | None]]
) -> Likely | None:
    """Layouts for a request like plans of the same work on other numbers of GPUs; None where there are none.

    Each plan has one of its degrees as many times larger as there are more GPUs; what is left over is idle.
    They are run as the first plan.

    Parameters
    ----------
    request
        Whose GPUs, batch and layers the layouts are for.
    plans
        Layouts with how they are run, None where that is not known; of the first one that is taken over.
    """
    batch, layers = request.global_batch, request.model.layers
    layouts: dict[Layout, None] = {}
    for layout, _ in plans:
        more = request.gpus // int(layout.gpus)
        # Of tensor groups larger ones are seldom fast where smaller ones were.
        for axis in AXES[2:] + AXES[1:2] if more > 1 else ("dp",):
            like = replace(layout, **{axis: getattr(layout, axis) * more})
            if layers % (int(like.pp) * int(like.vpp)):
                like = replace(like, vpp=1)
            count, uneven = divmod(batch, int(like.dp) * int(like.micro_batch))
            if count and not uneven:
                like = replace(like, num_micro_batches=count, recompute_layers=0)
                layouts.setdefault(like)
    if not layouts:
        return None
    columns = {
        name: np.array([getattr(each, name) for each in layouts]) for name in vars(plans[0][0])
    }
    return Likely(layouts=Layout(**columns), run_as=plans[0][1])


def best_plan(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    on_first: Callable[[Priced], None] | None = None,
    hedged: bool = False,
    begin_with: Layout | None = None,
    run_as: Execution | None = None,
    most_priced: int | None = None,
    params: SearchParams | None = None,
    own_buckets: bool = False,
    compares: bool = True,
    compares_later: bool = False,
    counts: bool = False,
    known_survey: KnownSurvey | None = None,
) -> BestPlan:
    """Searches for the best plan of a request.

    Parameters
    ----------
    request
        What to plan; its time limit is that of all searches together.
    progress
        Called with one line whenever a better plan is found.
    on_first
        Called with the price that the first search begins with, where it has one.
    hedged
        Whether a calibrated plan says how it does over the posterior, where that is quick.
    begin_with
        A layout that is likely good, or an array of some, priced first.
    run_as
        How they are likely run.
    most_priced
        Layouts that a search may price.
    params
        How far a search goes at a time; the answer does not depend on it.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    compares
        Whether a plan that leaves GPUs idle is held against the best on all of them, which takes a search.
    compares_later
        Whether the caller runs that search, where nothing else depends on it: `BestPlan.comparison`.
    counts
        Whether what the search counts is read where it begins with a layout; without one it is.
    known_survey
        What was surveyed of this request, or of one with a larger space.
    """
    likely, likely_run_as = begin_with, run_as
    are_counts_read = counts or likely is None

    def searched(
        asked: PlanRequest,
        /,
        *,
        begin_with: Layout | None = None,
        run_as: Execution | None = None,
        counts: bool = False,
        sought: Sought = ALL_PLANS,
        is_told: bool = True,
    ) -> Outcome:
        if begin_with is None and likely is not None:
            run_as = likely_run_as
        return search_with_buckets(
            asked,
            progress if is_told else None,
            on_first=on_first if counts else None,
            begin_with=begin_with or likely,
            run_as=run_as,
            # With a layout from outside the plan is most often another one's, and its counts are not read.
            counts=counts and are_counts_read,
            most_priced=most_priced,
            params=params,
            own_buckets=own_buckets,
            sought=sought,
            known_survey=known_survey if asked.cluster is request.cluster else None,
        )

    is_expected = request.objective == "expected"
    is_apart = compares_later and not is_expected and request.calibration is None
    later = partial(searched, is_told=False) if is_apart else None
    decision = decide_on_nodes(request, searched, compares=compares, later=later)
    outcome, expected, by_pairs = decision.settled.outcome, None, None
    comparison = decision.settled.comparison
    if outcome.best and is_expected and request.calibration is None:
        corrections = gain_corrections(decision.request.workload())
        outcome, by_pairs = expectation_by_pairs(
            decision.request, outcome, corrections, own_buckets=own_buckets
        )
    elif outcome.best and (is_expected or (hedged and is_quick(decision.request, outcome))):
        outcome, expected = _over_posterior(decision.request, outcome)
    return BestPlan(
        request=decision.request,
        outcome=outcome,
        full=decision.settled.full,
        note=decision.note,
        expected=expected,
        expected_by_pairs=by_pairs,
        comparison=None if comparison is None else partial(_without_counts, comparison),
    )


def _without_counts(comparison: Callable[[], Outcome]) -> Outcome:
    """What a search finds; a model that it solved cannot be handed from one process to another."""
    return replace(comparison(), certificate=Certificate())


def beside_all_gpus(ended: BestPlan, full: Outcome) -> BestPlan:
    """How the search for the best plan ended, held against the best layout on all GPUs.

    Parameters
    ----------
    ended
        Has a `comparison`.
    full
        What that found.

    Returns
    -------
    BestPlan
        Its outcome is that of `ended` itself, unless a layout on all GPUs is as fast.
    """
    outcome = better_of(ended.outcome, full)
    return replace(ended, outcome=outcome, full=full, comparison=None)


def adopted(request: PlanRequest, ended: BestPlan, faster: BestPlan, *, hedged: bool) -> BestPlan:
    """How the search for the best plan ended, with a faster plan of the same space in place of its own.

    Parameters
    ----------
    request
        As it was asked.
    ended
        Of its search, which time or a gap ended before the faster plan; its objective is the step.
    faster
        Of a search with more pins.
    hedged
        As `best_plan` takes it.

    Returns
    -------
    BestPlan
        Its bound is that of the search for all plans, as far as the faster plan does not refute it. It is
        proven only where the bound is its own step.
    """
    best, before = faster.outcome.best[0], ended.outcome
    bound_s = before.lower_bound_s
    if bound_s is not None and bound_s > best.step_time_s * (1.0 + ROUNDING):
        bound_s = None
    is_proven = bound_s is not None and bound_s >= best.step_time_s * (1.0 - ROUNDING)
    own = replace(
        faster.request,
        pins=request.pins,
        top_k=request.top_k,
        time_limit_s=ended.request.time_limit_s,
    )
    full = ended.full
    on_all = int(before.best[0].layout.gpus) == ended.request.gpus
    if full is None and on_all:
        full = replace(before, status="feasible")
    outcome = replace(
        before,
        status="optimal" if is_proven else "feasible",
        best=(best, *before.best)[: request.top_k],
        lower_bound_s=bound_s,
    )
    expected = None
    if hedged and is_quick(own, outcome) and not is_over():
        outcome, expected = _over_posterior(own, outcome)
    return BestPlan(
        request=own,
        outcome=outcome,
        full=full if own.gpus == ended.request.gpus else None,
        note=faster.note,
        expected=expected,
        expected_by_pairs=None,
    )


def _over_posterior(request: PlanRequest, outcome: Outcome) -> tuple[Outcome, Expected | None]:
    """With a calibration, what its posterior says; the outcome is changed if that is the objective."""
    if request.calibration is None:
        return outcome, None
    scenarios = request.calibration.scenarios(SCENARIOS, request.seed)
    expected = expectation(request, outcome, _searched_again, scenarios)
    if request.objective == "nominal" or expected.document.same_as_nominal:
        return outcome, expected.document
    workload = request.workload(expected.chosen.execution).on(int(expected.chosen.layout.gpus))
    nominal_s = predict(workload, expected.chosen).step_time_s
    chosen = replace(expected.chosen, step_time_s=nominal_s)
    return _led_by(outcome, chosen), expected.document


def _searched_again(request: PlanRequest, likely: Layout) -> Outcome:
    return search_with_buckets(request, begin_with=likely)


# The last CP-SAT model of a search as a file, so that anyone can solve it again.


NO_MODEL = "no model was written to"
"""What a plan says of a file that was asked for, not of itself."""


def export_model(request: PlanRequest, outcome: Outcome, path: Path) -> str | None:
    """Writes the last model of a search; what is already in the file is replaced.

    Parameters
    ----------
    request
        What was searched.
    outcome
        How the search ended.
    path
        Where to write `CpModelProto` as text (OR-Tools, sat/cp_model.proto). Its objective is the step in
        nanoseconds.

    Returns
    -------
    str or None
        Why nothing was written, in a sentence; None where the file is there.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    last = outcome.certificate.model
    model = last if isinstance(last, KernelModel) else None
    if model is not None:
        limits = [limits_of_combination(request, each) for each in model.combinations]
        model.state_limits({"tp": [inside for inside, _ in limits]}, [uses for _, uses in limits])
    elif outcome.best and is_irregular(request.cluster) and request.method != "exhaustive":
        model = _model_of_places(request, outcome.best)
    return written_model(request, model, path)


def _model_of_places(request: PlanRequest, best: Sequence[Priced]) -> KernelModel:
    """Of the best layouts of an irregular fabric."""
    works = [request.workload(each.execution).on(int(each.layout.gpus)) for each in best]
    return model_of_places(
        [
            (workload, each, Setup.of_priced(workload, each).placement)
            for workload, each in zip(works, best, strict=True)
        ]
    )


def limits_of_combination(
    request: PlanRequest, combination: Combination
) -> tuple[int, dict[str, float]]:
    """What the rows on domains and cuts say of a combination on one cluster.

    Parameters
    ----------
    request
        What was searched.
    combination
        On a regular fabric.

    Returns
    -------
    tuple of (int, dict of str to float)
        GPUs of a domain, which a tensor group has no more of; and as `cut_uses`, empty without a price.
    """
    layout, priced = combination.layout, combination.priced
    workload = request.workload(combination.execution).on(int(layout.gpus))
    return domain_gpus(workload), {} if priced is None else cut_uses(workload, priced)


def written_model(request: PlanRequest, model: KernelModel | None, path: Path) -> str | None:
    """Writes a model with all its rows, as `export_model` does.

    Parameters
    ----------
    request
        What was searched.
    model
        None where there is none.
    path
        Where to write it.

    Returns
    -------
    str or None
        As `export_model`.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    if model is None:
        return f"{NO_MODEL} {path}: {_why_none(request)}"
    write_files(path.parent, {path.name: str(model.model.proto)}, force=True)
    return None


def _why_none(request: PlanRequest) -> str:
    if request.method == "exhaustive":
        return "an exhaustive search solves none"
    return "rules and memory left no layout that a model could choose"


# What is asked of a plan beside itself: independent searches, side by side, and what they add to it.


@dataclass(frozen=True, kw_only=True)
class Question:
    """Searches whose results together add something to a plan."""

    tasks: Sequence[Callable[[], Any]] = ()
    """Without effects beside their results, which can be pickled."""
    sizes: Sequence[int] = ()
    """How long each of them takes: executions that it searches. None where all are short."""
    answered: Callable[[Plan, list[Any]], Plan] = lambda plan, _: plan
    """The plan with the results of all tasks, in their order."""


def answers_to(questions: Sequence[Question]) -> list[list[Any]]:
    """The results of the tasks of some questions, of each in their order.

    Parameters
    ----------
    questions
        Their longest tasks begin first, so that no process waits long for another one.
    """
    tasks = [task for question in questions for task in question.tasks]
    sizes = [size for each in questions for size in each.sizes or [0] * len(each.tasks)]
    order = sorted(range(len(tasks)), key=lambda number: -sizes[number])
    results = dict(zip(order, side_by_side([tasks[number] for number in order]), strict=True))
    ends = accumulate((len(question.tasks) for question in questions), initial=0)
    return [[results[number] for number in range(*part)] for part in pairwise(ends)]
