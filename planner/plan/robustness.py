"""Whether the same plan wins where the cost model is off by what it was measured to be off by.

One thing is off at a time: all compute, each fabric level's bandwidth, memory. The plan is priced as it
stands under the changed cluster, and the search is run again on it, with the plan's layout to begin from.
Where searching again would take long, what monotony proves is still said: nothing gets faster on slower
parts, and by no more than their factor on faster ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from meshwright.cluster_specs.allocation import first_gpus, is_irregular
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.data_parallel import LEAST_GAIN
from meshwright.costmodel.footprint import hbm_gib_for, usable_hbm_gib
from meshwright.costmodel.layout import ROUNDING, Layout
from meshwright.costmodel.rates import peak_memory_band, step_time_band
from meshwright.costmodel.records import POINT_ESTIMATE, ErrorBand, measured_gain
from meshwright.costmodel.workload import Execution, Workload
from meshwright.errors import InputError
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.pricing import pricing_of
from meshwright.planner.plan.assemble import (
    alternative,
    claim_of,
    compared_choices,
    is_closed,
    risk_with_cost,
)
from meshwright.planner.plan.best_plan import BestPlan, Question, best_plan
from meshwright.planner.plan.document import ExecutionChoice, MemoryRisk, Plan, Robustness, Scenario
from meshwright.planner.plan.texts import setup_of
from meshwright.planner.request.choices import Choice
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.run_terms import layout_document, layout_from_document
from meshwright.planner.search.loop import KnownSurvey, Survey, survey_part
from meshwright.planner.search.pricing import Certificate, Outcome
from meshwright.planner.search.space import space_of
from meshwright.planner.solvers.clock import is_over, limit_left_s
from meshwright.planner.solvers.processes import copies_at, copies_for, side_by_side


@dataclass(frozen=True, kw_only=True)
class RobustnessParams:
    """How much work goes into each change. Work, not time, so that the answer does not depend on the
    machine.
    """

    most_rounds: int = 4
    """A plan that took more CP-SAT models than this is not searched for again under every change."""
    largest_space: int = 5_000_000
    """Nor is a space of more layouts."""
    most_priced: int = 32
    """Layouts priced exactly in one search."""
    surveyed: float = 1.15
    """Layouts of so many times the plan's step are listed once, for all searches about the plan together."""
    survey_parts: int = 2
    """Parts of the executions that are surveyed side by side."""
    same: float = 1e-3
    """Share of the step time by which a layout must be faster to count as another winner."""


PARAMS = RobustnessParams()
_RATES = (
    "peak_bf16_tflops",
    "peak_fp16_tflops",
    "peak_fp8_tflops",
    "peak_fp4_tflops",
    "hbm_gb_per_s",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is off: `factor` is measured over predicted, of its time or of its GiB."""

    what: str
    factor: float
    cluster: ClusterSpec
    memory: bool = False

    def applied(self, request: PlanRequest) -> PlanRequest:
        """The request on the changed cluster; a known error of memory needs no margin for unknown ones.

        Parameters
        ----------
        request
            On the cluster before the change.
        """
        risk = POINT_ESTIMATE if self.memory else request.memory_risk
        return replace(request, cluster=self.cluster, memory_risk=risk)

    @property
    def words(self) -> str:
        """Such as `compute 8.3 % slower`."""
        harmful, less = ("more", "less") if self.memory else ("slower", "faster")
        return f"{self.what} {abs(self.factor - 1):.1%} {harmful if self.factor > 1 else less}".replace(
            "%", " %"
        )


def survey_of(request: PlanRequest, plan: Plan) -> Survey | None:
    """The layouts that searches about a plan may look at, with as much memory as any of these gives.

    Parameters
    ----------
    request
        What was planned, with the plan's cluster.
    plan
        Its plan.

    Returns
    -------
    Survey or None
        None where the plan is not searched again under every change: listing them takes as long as several of
        the other searches.
    """
    step_s = plan.objective.step_time_s
    if plan.layout is None or step_s is None or request.objective != "nominal":
        return None
    if _too_long(request, plan) or request.method == "exhaustive":
        return None
    band, memory = step_time_band(request.workload()), peak_memory_band(request.workload())
    asked = [
        request,
        replace(request, memory_risk=POINT_ESTIMATE),
        *(each.applied(request) for each in changes(request, band, memory) if each.memory),
    ]
    roomiest = max(asked, key=lambda each: usable_hbm_gib(each.workload()))
    roomiest = replace(roomiest, time_limit_s=limit_left_s(), top_k=1)
    likely = _likely(plan)
    below_s, parts = PARAMS.surveyed * step_s, PARAMS.survey_parts
    surveys = side_by_side(
        [
            partial(survey_part, roomiest, pricing_of, likely, below_s, part=part, parts=parts)
            for part in range(parts)
        ]
    )
    complete = [each for each in surveys if each is not None]
    if len(complete) < parts:
        return None
    return Survey(
        below_s=below_s, branches=tuple(branch for each in complete for branch in each.branches)
    )


def question_of_robustness(
    request: PlanRequest, plan: Plan, survey: Survey | None = None
) -> Question:
    """What becomes of a plan under every change, and what its safety costs; nothing without a layout.

    Parameters
    ----------
    request
        What was planned.
    plan
        Its plan.
    survey
        Of the same request.
    """
    if plan.layout is None or plan.objective.step_time_s is None:
        return Question()
    if is_irregular(request.cluster):
        request = replace(request, cluster=first_gpus(request.cluster, request.gpus))
    workload = request.workload()
    band, memory = step_time_band(workload), peak_memory_band(workload)
    scenarios = (
        partial(_scenario, request, plan, survey, change)
        for change in changes(request, band, memory)
    )
    return Question(
        tasks=(partial(_risk, request, plan, survey), *scenarios),
        answered=partial(_with_robustness, band, memory),
    )


def _risk(request: PlanRequest, plan: Plan, survey: Survey | None) -> MemoryRisk | None:
    def searched(wanted: PlanRequest) -> Outcome:
        return _searched_again(wanted, plan, _known_survey(survey))

    return risk_with_cost(request, plan, None if _too_long(request, plan) else searched)


def _with_robustness(band: ErrorBand, memory: ErrorBand, plan: Plan, found: list[Any]) -> Plan:
    risk: MemoryRisk | None = found[0]
    scenarios: list[Scenario] = found[1:]
    robustness = robustness_of(band, memory, scenarios)
    return plan.model_copy(update={"memory_risk": risk, "robustness": robustness})


def robustness_of(band: ErrorBand, memory: ErrorBand, scenarios: list[Scenario]) -> Robustness:
    """What scenarios say together.

    Parameters
    ----------
    band, memory
        Of steps and of memory, from which the changes come.
    scenarios
        One for each change.
    """
    return Robustness(
        step_time_band=(band.low, band.high),
        memory_band=(memory.low, memory.high),
        same_winner=same_winner(scenarios),
        scenarios=scenarios,
    )


def same_winner(scenarios: Sequence[Scenario]) -> bool | None:
    """Whether no other layout wins any of some scenarios; None where not all of that is proven.

    Parameters
    ----------
    scenarios
        One for each change.
    """
    if any(scenario.winner for scenario in scenarios):
        return False
    return True if all(map(_stays, scenarios)) else None


def _stays(scenario: Scenario) -> bool:
    """Whether it is proven that no other layout counts as faster."""
    loss = scenario.loss_at_most
    within = loss is not None and loss <= PARAMS.same / (1 - PARAMS.same)
    return scenario.winner is None and (scenario.proven or within)


def changes(request: PlanRequest, band: ErrorBand, memory: ErrorBand) -> Iterator[Change]:
    """Every change to the cluster; a level that nothing can make faster is only made slower.

    Parameters
    ----------
    request
        Whose cluster is changed; of its memory the margin is left out.
    band
        Of measured steps over predicted ones: both ends are tried.
    memory
        The same of memory.
    """
    cluster = request.cluster
    for factor in (band.high, band.low):
        rates = {name: getattr(cluster.device, name) for name in _RATES}
        faster = {name: rate / factor for name, rate in rates.items() if rate is not None}
        yield Change(what="compute", factor=factor, cluster=_with_device(cluster, **faster))
    for factor in (band.high, band.low):
        if cluster.nvlink_domain > 1:
            rate = cluster.nvlink_gb_per_s or cluster.device.scale_up_gb_per_s or 0.0
            changed = cluster.model_copy(update={"nvlink_gb_per_s": rate / factor})
            yield Change(what=cluster.level_names[0], factor=factor, cluster=changed)
    for factor in (band.high, band.low):
        if request.gpus > max(cluster.nvlink_domain, cluster.gpus_per_node):
            yield Change(what="network", factor=factor, cluster=_with_network(cluster, factor))
    for position, level in enumerate(cluster.levels):
        for factor in (band.high, band.low):
            if level.oversubscription * factor >= 1 and level.oversubscription > 1:
                slower = level.model_copy(
                    update={"oversubscription": level.oversubscription * factor}
                )
                levels = (*cluster.levels[:position], slower, *cluster.levels[position + 1 :])
                yield Change(
                    what=level.name,
                    factor=factor,
                    cluster=cluster.model_copy(update={"levels": levels}),
                )
    workload = replace(request, memory_risk=POINT_ESTIMATE).workload()
    for factor in (memory.high, memory.low):
        hbm_gib = hbm_gib_for(workload, usable_hbm_gib(workload) / factor)
        yield Change(
            what="memory",
            factor=factor,
            cluster=_with_device(cluster, hbm_gib=hbm_gib),
            memory=True,
        )


def _with_device(cluster: ClusterSpec, **rates: float) -> ClusterSpec:
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=rates)})


def _with_network(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    nodes = tuple(
        node
        if node.nic_gbps_per_gpu is None
        else node.model_copy(update={"nic_gbps_per_gpu": node.nic_gbps_per_gpu / factor})
        for node in cluster.nodes
    )
    return cluster.model_copy(
        update={"nic_gbps_per_gpu": cluster.nic_gbps_per_gpu / factor, "nodes": nodes}
    )


def _known_survey(survey: Survey | None, factor: float = 1.0) -> KnownSurvey | None:
    return None if survey is None else KnownSurvey(survey=survey, factor=factor)


def _scenario(request: PlanRequest, plan: Plan, survey: Survey | None, change: Change) -> Scenario:
    changed = replace(change.applied(request), top_k=1)
    now_s = step_as_it_stands_s(request, plan, change)
    bound_s = monotone_bound_s(change, plan.objective.lower_bound_s, request.workload())
    search = None
    if not _too_long(request, plan):
        # The survey has the most memory of all changes; of faster parts see `monotone_bound_s`.
        factor = 1.0 if change.memory else min(change.factor, 1.0) * (1 - ROUNDING)
        search = partial(_rival, changed, plan, _known_survey(survey, factor))
    return scenario_of(change.words, now_s, bound_s, search)


@dataclass(frozen=True, kw_only=True)
class BestUnderChange:
    """What a search under a change found."""

    status: str
    lower_bound_s: float | None
    step_time_s: float | None
    document: dict[str, object] | None
    """Its layout, of the fastest plan; None without one."""


def _rival(changed: PlanRequest, plan: Plan, known_survey: KnownSurvey | None) -> BestUnderChange:
    outcome = _searched_again(changed, plan, known_survey)
    best = outcome.best[0] if outcome.best else None
    return BestUnderChange(
        status=outcome.status,
        lower_bound_s=outcome.lower_bound_s,
        step_time_s=None if best is None else best.step_time_s,
        document=None if best is None else alternative(best, best.step_time_s),
    )


def scenario_of(
    words: str, now_s: float | None, bound_s: float, search: Callable[[], BestUnderChange] | None
) -> Scenario:
    """What becomes of a plan under a change.

    Parameters
    ----------
    words
        The change.
    now_s
        The step of the plan as it stands; None where it no longer fits.
    bound_s
        No plan is faster then, 0 where nothing is known.
    search
        For the best plan under the change, made where the bound does not settle it; None where that would
        take long.
    """
    best_s, winner, status = now_s, None, "unknown"
    settled = now_s is not None and bound_s >= now_s * (1 - PARAMS.same)
    if not settled and search is not None:
        rival = search()
        bound_s, status = max(bound_s, rival.lower_bound_s or 0.0), rival.status
        rival_s = rival.step_time_s
        if rival_s is not None and (now_s is None or rival_s < now_s):
            best_s = rival_s
            if rival.document is not None and (
                now_s is None or rival_s < now_s * (1 - PARAMS.same)
            ):
                lost = 100.0 * (rival_s / (rival_s if now_s is None else now_s) - 1.0)
                winner = rival.document | {"slower_pct": lost}
    claim = claim_of(status)
    if best_s is not None and claim != "optimal":
        # Without a search to its end, the plan as it stands, or what a bound proves of it.
        claim = "optimal" if bound_s >= best_s * (1 - ROUNDING) else "feasible"
    return Scenario(
        change=words,
        step_time_s=now_s,
        best_step_time_s=best_s,
        loss_at_most=None if now_s is None or bound_s <= 0 else max(0.0, now_s / bound_s - 1.0),
        status=claim,
        proven=is_closed(claim),
        winner=winner,
    )


def step_as_it_stands_s(request: PlanRequest, plan: Plan, change: Change) -> float | None:
    """The step of the plan under a change, nothing in it moved; None where it no longer fits.

    Parameters
    ----------
    request
        What was planned.
    plan
        With a layout and a mapping.
    change
        What is off.
    """
    setup = setup_of(plan, change.applied(request).workload(plan.execution))
    fits = max(setup.memory_gib) <= usable_hbm_gib(setup.workload)
    return setup.step_time_s if fits else None


def monotone_bound_s(change: Change, before_s: float | None, workload: Workload) -> float:
    """A bound under a change from that before.

    Nothing is faster than before on slower parts or in less memory, nor by more than `factor` on faster ones;
    with more memory than the plan was given nothing is known, nor where cuts may be used in part: mappings
    that were out come in where a phase takes longer.

    Parameters
    ----------
    change
        What is off.
    before_s
        No plan was faster; None where nothing is known.
    workload
        What was planned, with the margin that memory was given.
    """
    bound_s = 0.0 if workload.max_cut_use < 1 else before_s or 0.0
    if change.memory:
        margin = workload.memory_margin
        return bound_s if change.factor >= margin * (1 - ROUNDING) else 0.0
    return bound_s if change.factor >= 1 else bound_s * change.factor


def _too_long(request: PlanRequest, plan: Plan) -> bool:
    """Whether searching again is left out: by work, so that the answer does not depend on the machine, and
    where the time limit is over.
    """
    solver = plan.solver
    return (
        is_over()
        or solver.layouts_considered > PARAMS.largest_space * _alike(request, plan)
        or solver.bound_rounds > PARAMS.most_rounds
        or is_irregular(request.cluster)
    )


def _alike(request: PlanRequest, plan: Plan) -> int:
    """How many layouts there are for each that offloads nothing and overlaps its tensor-parallel traffic:
    few of them are priced.
    """
    space = plan.solver.space
    overlaps = len(request.execution_options.values["tp_overlap"])
    return overlaps * (1 if space is None else len(space.optimizer_offloads))


def _searched_again(changed: PlanRequest, plan: Plan, known_survey: KnownSurvey | None) -> Outcome:
    """The best plan with the nominal constants of a changed request."""
    assert plan.layout is not None
    return best_plan(
        replace(changed, time_limit_s=limit_left_s(), objective="nominal"),
        most_priced=PARAMS.most_priced,
        begin_with=_likely(plan),
        run_as=plan.execution,
        known_survey=known_survey,
    ).outcome


# What each execution choice of a plan brings: the best plan with the plain value in its place.


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a choice of a plan brings, and the plan of the search without it."""

    choice: ExecutionChoice
    without: BestPlan | None = None
    """None where there is none; without what its search counted."""

    @property
    def step_time_s(self) -> float:
        """Of the plan without the choice; infinite where there is none."""
        return self.choice.step_time_s_without or inf

    def of_value(self, value: int | str | bool | float) -> Answer:
        """The same of a plan that has this value: what is found without a choice does not depend on it.

        Parameters
        ----------
        value
            What the plan has of the choice; a number of a gradient bucket is in MB.
        """
        return replace(self, choice=ExecutionChoice(**(vars(self.choice) | {"value": value})))


Task = Callable[[], Answer]


def question_of_choices(
    request: PlanRequest,
    plan: Plan,
    earlier: Mapping[str, Answer] | None = None,
    survey: Survey | None = None,
) -> Question:
    """What each of a plan's execution choices brings, the largest gain first.

    Pinned choices are left out, and those that the framework always makes: there is no plan without them.
    Each figure is that of `plan` for the same request with the plain value pinned: by the same search, over
    all nodes that were asked for.

    Parameters
    ----------
    request
        As it was asked.
    plan
        Its plan.
    earlier
        Answers of the same request by choice, asked about another plan of it: a plan without a choice is the
        same whatever plan has it.
    survey
        Of the same request.
    """
    if plan.layout is None or plan.execution is None:
        return Question()
    known_survey, answers, likely = _known_survey(survey), earlier or {}, _likely(plan)
    tasks, sizes = list[Task](), list[int]()
    for choice, value, without, search in _searches(request, likely, plan.execution, known_survey):
        earlier_answer = answers.get(choice.name)
        tasks.append(partial(_choice, plan.inputs, choice, value, earlier_answer, search))
        sizes.append(0 if earlier_answer else len(without.execution_options.executions()))
    if plan.execution.bucket_mb is not None:
        # The best plan that keeps the framework's own size.
        search = partial(
            _answered, "bucket_mb", request, likely, plan.execution, known_survey, own_buckets=True
        )
        tasks.append(partial(_of_value, plan.execution.bucket_mb, answers.get("bucket_mb"), search))
        sizes.append(len(request.execution_options.executions()))
    return Question(tasks=tasks, sizes=sizes, answered=partial(_with_choices, request))


def _searches(
    request: PlanRequest, layout: Layout, execution: Execution, known_survey: KnownSurvey | None
) -> Iterator[tuple[Choice, int | str | bool, PlanRequest, Task]]:
    """Choices of a layout and its execution with their values, and the request and search without each."""
    for choice, value in compared_choices(layout_document(layout, ((0,),)), execution):
        without = without_choice(request, choice)
        if without is not None:
            plain: dict[str, Any] = {choice.name: choice.plain}
            begin_with = replace(layout, **plain) if choice.of == "layout" else layout
            asked = (choice.name, without, begin_with, execution, known_survey)
            yield choice, value, without, partial(_answered, *asked)


class AnsweredAhead:
    """What choices bring that a plan likely makes, asked by copies of this process while it searches.

    Parameters
    ----------
    request
        As it was asked.
    until
        Ends the copies.
    """

    def __init__(self, request: PlanRequest, until: ExitStack) -> None:
        self._request, self._until = request, until
        self._names: list[str] = []
        self._results: Callable[[Sequence[int], bool], dict[int, Answer]] = lambda *_: {}

    def begin(self, first: Priced) -> None:
        """Begins with the choices of a first price, where cores are idle.

        Parameters
        ----------
        first
            The price that a search begins with.
        """
        layout = replace(first.layout, recompute_layers=0)
        execution = first.execution.of_layout(layout)
        searches = list(_searches(self._request, layout, execution, None))
        copies = copies_for(len(searches))
        if copies > 0 and not self._names:
            self._names = [choice.name for choice, *_ in searches]
            at_work = copies_at([search for *_, search in searches], copies)
            self._results = self._until.enter_context(at_work)

    def answers(self, plan: Plan) -> dict[str, Answer]:
        """Proven answers on choices of a plan, by choice: those that were begun; no other begins.

        Parameters
        ----------
        plan
            The one that was found: choices that it does not make are passed over.
        """
        if plan.layout is None or plan.execution is None:
            return {}
        made = {choice.name for choice, _ in compared_choices(plan.layout, plan.execution)}
        wanted = [number for number, name in enumerate(self._names) if name in made]
        answers = self._results(wanted, True).values()
        return {answer.choice.choice: answer for answer in answers if answer.choice.proven}


def _with_choices(request: PlanRequest, plan: Plan, answers: list[Answer]) -> Plan:
    choices = sorted((answer.choice for answer in answers), key=gain_of, reverse=True)
    warnings = [*plan.warnings, *_not_adopted(request, plan, answers)]
    return plan.model_copy(update={"choices": choices, "warnings": warnings})


def plan_to_adopt(request: PlanRequest, plan: Plan, answers: Sequence[Answer]) -> BestPlan | None:
    """The fastest plan that was found without a choice of another plan, and is faster than that one.

    Time may end a search before such a plan, and a gap of its proof may hide it.

    Parameters
    ----------
    request
        As it was asked.
    plan
        What the answers were asked about.
    answers
        On its choices.

    Returns
    -------
    BestPlan or None
        None where no plan is faster, or none of them may take its place.
    """
    faster = [answer for answer in answers if _is_faster(plan, answer)]
    able = [answer for answer in faster if _obstacle(request, answer) is None]
    return min(able, key=lambda answer: answer.step_time_s).without if able else None


def _is_faster(plan: Plan, answer: Answer) -> bool:
    """Whether a plan without a choice is faster than the one with it. Proofs hold up to the gain that another
    size of gradient buckets must bring.
    """
    planned_s = plan.objective.step_time_s
    slack = LEAST_GAIN if plan.status == "optimal" else ROUNDING
    return planned_s is not None and answer.step_time_s < planned_s * (1.0 - slack)


def _obstacle(request: PlanRequest, answer: Answer) -> str | None:
    """Why a faster plan cannot take the place of the plan, in words; None where it can."""
    if request.objective != "nominal":
        return "plans are chosen by their expected step here, which was not asked of it"
    if answer.without is None:
        return "it was not kept"
    best = answer.without.outcome.best[0]
    unpinned = replace(answer.without.request, pins=request.pins)
    execution = replace(best.execution, bucket_mb=None)
    runs = execution in unpinned.execution_options.executions()
    if not runs or not space_of(unpinned, execution).has(best.layout):
        return "the space of the plan does not have it"
    return None


def _not_adopted(request: PlanRequest, plan: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    """A warning that a faster plan is known which could not take the place of the plan."""
    faster = sorted(
        (answer for answer in answers if _is_faster(plan, answer)),
        key=lambda answer: answer.step_time_s,
    )
    for fastest in faster[:1]:
        obstacle = _obstacle(request, fastest)
        if obstacle is not None:
            yield words_of_faster(fastest.choice, obstacle)


def words_of_faster(choice: ExecutionChoice, why: str) -> str:
    """That a faster plan without a choice is known, and why it is not planned.

    Parameters
    ----------
    choice
        With the step of that plan.
    why
        In words.
    """
    by_pin = f"--pin {choice.pin}, or with " if choice.pin else ""
    step_s = choice.step_time_s_without or inf
    return (
        f"a plan of {step_s:.4g} s a step was found when the search had ended, and is not planned: {why}; "
        f"plan with {by_pin}a longer --time-limit"
    )


def gain_of(choice: ExecutionChoice) -> float:
    """What a choice is ordered by: seconds without it, infinite without a plan, last where unknown.

    Parameters
    ----------
    choice
        With the best plan without it, as far as that was searched.
    """
    if choice.status == "not searched":
        return 0.0
    return choice.step_time_s_without or inf


def _choice(
    inputs: PlanInputs,
    choice: Choice,
    value: int | str | bool,
    earlier: Answer | None,
    search: Task,
) -> Answer:
    """A choice of the plan with the best plan for the request without it."""
    answer = _of_value(value, earlier, search)
    return replace(answer, choice=described(answer.choice, choice, value, inputs))


def _of_value(value: int | str | bool | float, earlier: Answer | None, search: Task) -> Answer:
    """What is known of a choice, or a search finds, of a plan that has this value."""
    return (earlier or search()).of_value(value)


def described(
    found: ExecutionChoice, choice: Choice, value: int | str | bool, inputs: PlanInputs
) -> ExecutionChoice:
    """What a search without a choice found, with its pin, its software and what was measured of it.

    Parameters
    ----------
    found
        The choice with the best plan without it.
    choice
        Its record.
    value
        What the plan has of it; the document's is a float where it is a number.
    inputs
        Of the plan that makes it.
    """
    setting = choice.setting(framework_named(inputs.framework), value)
    pin = f"{choice.name}={choice.word(choice.plain)}"
    update: dict[str, Any] = {"pin": pin, "installs": setting.installs if setting else ""}
    experts = inputs.model.moe is not None
    gain = measured_gain(choice.name, value, inputs.cluster.device.name, experts=experts)
    if gain is not None:
        update |= {"measured_gain": gain.gain, "pairs": gain.pairs, "measured_on": gain.measured_on}
    return found.model_copy(update=update)


def _likely(plan: Plan) -> Layout:
    """The layout of a plan, with as many layers recomputed as it then needs."""
    assert plan.layout is not None
    return replace(layout_from_document(plan.layout), recompute_layers=0)


def _answered(
    name: str,
    without: PlanRequest,
    likely: Layout,
    run_as: Execution | None,
    known_survey: KnownSurvey | None,
    *,
    own_buckets: bool = False,
) -> Answer:
    """A choice with the best plan of a request that has another; the search is left out behind the limit."""
    best = None
    if not is_over():
        limited = replace(without, time_limit_s=limit_left_s(), top_k=1)
        best = best_plan(
            limited,
            begin_with=likely,
            run_as=run_as,
            own_buckets=own_buckets,
            compares=False,
            known_survey=known_survey,
        )
    claim = "not searched" if best is None else best.claim
    choice = ExecutionChoice(
        choice=name,
        value="",
        step_time_s_without=None if best is None else best.step_time_s,
        lower_bound_s_without=None if best is None else best.outcome.lower_bound_s,
        status=claim,
        proven=is_closed(claim),
    )
    if best is None or not best.outcome.best:
        return Answer(choice=choice)
    outcome = replace(best.outcome, certificate=Certificate())
    return Answer(choice=choice, without=replace(best, outcome=outcome))


def without_choice(request: PlanRequest, choice: Choice) -> PlanRequest | None:
    """The request with the plain value of a choice pinned; None where it is pinned, or cannot be plain.

    Parameters
    ----------
    request
        As it was asked.
    choice
        Of a layout or of its execution.
    """
    plain = choice.word(choice.plain)
    if choice.name in request.pins:
        return None
    try:
        pins = {**request.pins, choice.name: plain if choice.words else int(plain)}
        return replace(request, pins=pins)
    except InputError:
        return None
