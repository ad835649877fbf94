"""The best plan of a request: the one search that every answer of this program asks.

`plan`, `batch`, sweeps, `recommend`, `fleet` and mixed clusters come here for their plans; what each choice
brings, what becomes of a plan where the cost model is off, single changes and what-if rows come here for the
seconds that they print. All search one space: every execution that the request leaves open, every size of
gradient buckets, every choice of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.costmodel.layout import Layout
from meshwright.planner.plan.assemble import predict
from meshwright.planner.plan.claims import Claim, claim_of
from meshwright.planner.plan.document import Expected
from meshwright.planner.plan.expected import SCENARIOS, expectation, is_quick
from meshwright.planner.plan.gradient_buckets import search_with_buckets
from meshwright.planner.plan.nodes import decide_on_nodes
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.loop import Progress
from meshwright.planner.search.params import SearchParams


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

    @property
    def step_time_s(self) -> float | None:
        """Of the plan; None without one."""
        return self.outcome.best[0].step_time_s if self.outcome.best else None

    @property
    def claim(self) -> Claim:
        """What may be said of the plan, or of there being none."""
        return claim_of(self.outcome.status)


def best_plan(
    request: PlanRequest,
    progress: Progress | None = None,
    *,
    hedged: bool = False,
    begin_with: Layout | None = None,
    most_priced: int | None = None,
    params: SearchParams | None = None,
    own_buckets: bool = False,
) -> BestPlan:
    """Searches for the best plan of a request.

    Parameters
    ----------
    request
        What to plan; its time limit is that of all searches together.
    progress
        Called with one line whenever a better plan is found.
    hedged
        Whether a calibrated plan says how it does over the posterior, where that is quick.
    begin_with
        A layout that is likely good, priced first.
    most_priced
        Layouts that a search may price.
    params
        How far a search goes at a time; the answer does not depend on it.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    """

    def searched(asked: PlanRequest) -> Outcome:
        return search_with_buckets(
            asked,
            progress,
            begin_with=begin_with,
            most_priced=most_priced,
            params=params,
            own_buckets=own_buckets,
        )

    decision = decide_on_nodes(request, searched)
    outcome, expected = decision.settled.outcome, None
    wanted = request.objective == "expected" or (hedged and is_quick(decision.request, outcome))
    if outcome.best and wanted:
        outcome, expected = _over_posterior(decision.request, outcome)
    return BestPlan(
        request=decision.request,
        outcome=outcome,
        full=decision.settled.full,
        note=decision.note,
        expected=expected,
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
    others = tuple(plan for plan in outcome.best if plan.step_time_s >= nominal_s)
    changed = replace(outcome, status="feasible", best=(chosen, *others))
    return changed, expected.document


def _searched_again(request: PlanRequest, likely: Layout) -> Outcome:
    return search_with_buckets(request, begin_with=likely)
