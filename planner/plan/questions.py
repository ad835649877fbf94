"""What is asked of a plan beside itself: independent searches, side by side, and what they add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from meshwright.planner.plan.document import Plan
from meshwright.planner.solvers.processes import side_by_side


@dataclass(frozen=True, kw_only=True)
class Question:
    """Searches whose results together add something to a plan."""

    tasks: Sequence[Callable[[], Any]] = ()
    """Without effects beside their results, which can be pickled."""
    answered: Callable[[Plan, list[Any]], Plan] = lambda plan, _: plan
    """The plan with the results of all tasks, in their order."""


def with_answers(plan: Plan, questions: Sequence[Question]) -> Plan:
    """The plan with the answers of some questions.

    Parameters
    ----------
    plan
        What is asked about.
    questions
        Their tasks begin in this order.
    """
    results = side_by_side([task for question in questions for task in question.tasks])
    ends = accumulate((len(question.tasks) for question in questions), initial=0)
    for question, (start, end) in zip(questions, pairwise(ends), strict=True):
        plan = question.answered(plan, results[start:end])
    return plan
