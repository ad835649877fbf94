"""A plan that is found faster while the choices of another are asked about takes its place.

Which one that is comes of constructed parts: what a clock would end is put together from searches to their
end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from meshwright.planner.plan import make_plan as module
from meshwright.planner.plan.assemble import claim_of, is_closed
from meshwright.planner.plan.best_plan import BestPlan, adopted, best_plan
from meshwright.planner.plan.document import ExecutionChoice, Plan
from meshwright.planner.plan.make_plan import fastest_plan, make_plan
from meshwright.planner.plan.robustness import Answer, plan_to_adopt, question_of_choices
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request


def asked() -> PlanRequest:
    """Tensor-parallel overlap is a choice here, and the fastest plan does without it."""
    return read_request(
        model="olmoe-1b-7b",
        cluster="dgx-h100",
        gpus=8,
        global_batch=8,
        seq_len=1024,
        without="deepep,hybridep,allgather,ep-overlap,cuda-graph",
        pin="tp=2,pp=1",
    )


@cache
def searched(overlap: str | None = None) -> BestPlan:
    """A search to its end, with the overlap pinned or open."""
    request = asked()
    pins = request.pins if overlap is None else {**request.pins, "tp_overlap": overlap}
    return best_plan(replace(request, pins=pins))


def early(lower_bound_s: float | None = None) -> BestPlan:
    """What a search holds that time ends at the best plan with the overlap."""
    slower = searched("on")
    outcome = replace(slower.outcome, status="feasible", lower_bound_s=lower_bound_s)
    return replace(slower, request=asked(), outcome=outcome)


def planned(found: BestPlan) -> Plan:
    """The document of a search."""
    return module._document(found, 0.0)


def answer(found: BestPlan, step_time_s: float | None = None) -> Answer:
    """What is known of a plan without the overlap."""
    claim = claim_of(found.outcome.status)
    choice = ExecutionChoice(
        choice="tp_overlap",
        value=True,
        step_time_s_without=step_time_s or found.step_time_s,
        pin="tp_overlap=off",
        status=claim,
        proven=is_closed(claim),
    )
    return Answer(choice=choice, without=found)


def test_the_faster_plan_is_the_one_to_adopt() -> None:
    slower, faster = planned(early()), searched("off")
    assert plan_to_adopt(asked(), slower, [answer(faster)]) is faster
    assert plan_to_adopt(asked(), slower, []) is None
    assert plan_to_adopt(asked(), planned(searched("off")), [answer(searched("on"))]) is None


@pytest.mark.parametrize(("share", "status"), [(0.9999, "optimal"), (1.1, "feasible")])
def test_no_plan_is_adopted_for_nothing(share: float, status: str) -> None:
    """Beside a proof, other gradient buckets may save a little; a slower plan is none to adopt."""
    plan = planned(early()).model_copy(update={"status": status})
    assert plan.objective.step_time_s is not None
    rival = answer(searched("off"), share * plan.objective.step_time_s)
    assert plan_to_adopt(asked(), plan, [rival]) is None
    told = question_of_choices(asked(), plan).answered(plan, [rival])
    assert told.warnings == plan.warnings
    assert told.choices == [rival.choice]


def test_what_cannot_be_adopted_is_told_with_the_reason() -> None:
    slower, faster = planned(early()), searched("off")
    request = replace(asked(), objective="expected")
    assert plan_to_adopt(request, slower, [answer(faster)]) is None
    told = question_of_choices(request, slower).answered(slower, [answer(faster)])
    assert "chosen by their expected step" in told.warnings[-1]
    assert told.warnings[-1].endswith(
        "plan with --pin tp_overlap=off, or with a longer --time-limit"
    )
    narrow = replace(asked(), pins={**asked().pins, "tp_overlap": "on"})
    assert plan_to_adopt(narrow, slower, [answer(faster)]) is None
    told = question_of_choices(narrow, slower).answered(slower, [answer(faster)])
    assert "the space of the plan does not have it" in told.warnings[-1]


def test_its_document_is_that_of_the_search_which_found_it() -> None:
    faster, whole = searched("off"), planned(searched())
    taken = adopted(asked(), early(), faster, hedged=False)
    plan = planned(taken)
    assert plan.inputs == whole.inputs
    same = ("layout", "execution", "predicted", "mapping", "memory_risk", "binding", "installs")
    for name in same:
        assert getattr(plan, name) == getattr(whole, name), name
    assert plan.objective.step_time_s == whole.objective.step_time_s
    assert list(faults(asked(), plan)) == []


@pytest.mark.parametrize(
    ("bound", "status"),
    [(None, "feasible"), (0.5, "feasible"), (1.0, "optimal"), (1.01, "feasible")],
)
def test_it_is_proven_by_the_bound_of_all_plans_alone(bound: float | None, status: str) -> None:
    """Its own search was to the end, of plans without the choice; a bound above its step is refuted."""
    faster = searched("off")
    assert faster.step_time_s is not None
    bound_s = None if bound is None else bound * faster.step_time_s
    outcome = adopted(asked(), early(bound_s), faster, hedged=False).outcome
    assert faster.outcome.status == "optimal"
    assert outcome.status == status
    assert outcome.lower_bound_s == (None if bound == 1.01 else bound_s)


def test_a_plan_that_leaves_gpus_idle_is_held_against_the_one_on_all_of_them() -> None:
    faster = searched("off")
    best = faster.outcome.best[0]
    less = replace(best, layout=replace(best.layout, dp=int(best.layout.dp) // 2))
    idle = replace(faster, outcome=replace(faster.outcome, best=(less,)))
    full = adopted(asked(), early(), idle, hedged=False).full
    assert full is not None
    assert full.best == early().outcome.best
    assert full.status == "feasible"


@pytest.mark.slow
def test_plan_gives_the_faster_one_and_all_that_is_said_is_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = make_plan(asked(), choices=False).robustness
    monkeypatch.setattr(module, "best_plan", lambda *_given, **_how: early())
    plan, whole = make_plan(asked()), planned(searched())
    assert plan.status == "feasible"
    assert plan.objective.lower_bound_s is None
    assert plan.layout == whole.layout
    assert plan.execution == whole.execution
    assert plan.objective.step_time_s == whole.objective.step_time_s
    assert not any("was found when the search had ended" in words for words in plan.warnings)
    assert plan.choices is not None
    assert "tp_overlap" not in {choice.choice for choice in plan.choices}
    assert plan.robustness is not None
    assert expected is not None
    steps_s = [one.step_time_s for one in plan.robustness.scenarios]
    assert steps_s == [one.step_time_s for one in expected.scenarios]
    assert list(faults(asked(), plan)) == []


def test_answers_that_are_known_are_not_asked_again() -> None:
    slower, faster = planned(early()), searched("off")
    question = question_of_choices(asked(), slower, {"tp_overlap": answer(faster)})
    names = [found.choice.choice for found in (task() for task in question.tasks)]
    assert names.count("tp_overlap") == 1
    told = next(task() for task in question.tasks if task().choice.choice == "tp_overlap")
    assert told.without is faster


def test_the_fastest_plan_is_that_of_one_search() -> None:
    assert fastest_plan(asked()).objective == planned(searched()).objective
