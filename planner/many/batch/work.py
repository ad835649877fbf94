"""One job from its fields to its files, in plain data, so that any process or machine can do it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from meshwright.errors import message_of
from meshwright.planner.many.batch.cache import AnswerCache
from meshwright.planner.many.batch.fingerprint import request_key
from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.many.batch.rows import job_row, plan_figures
from meshwright.planner.plan.training_cost import COST_FIELDS, Budget, cost_figures
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.solvers.clock import until

_OF_A_JOB = {"name", "top", "time_limit", *COST_FIELDS}
"""Fields of a job that a request does not read under the same name."""


def request_of(job: JobDoc) -> PlanRequest:
    """The plan request of a job. Raises InputError."""
    from meshwright.planner.request.reader import read_request

    options = job.model_dump(exclude=_OF_A_JOB)
    return read_request(**options, top_k=job.top, time_limit_s=job.time_limit)


def do_job(
    fields: Mapping[str, Any], cache_folder: str | None, end_s: float = inf
) -> dict[str, Any]:
    """Plans one job.

    Parameters
    ----------
    fields
        Those of a JobDoc.
    cache_folder
        Where answers are kept; None keeps nothing.
    end_s
        When the job has to end, in seconds of the machine's monotonic clock.

    Returns
    -------
    dict
        Its `row` of results, its `files` by name, whether it was `cached`, and its `seconds`. Whatever goes
        wrong is said in the row, status `failed`.
    """
    began = time.monotonic()
    job = JobDoc.model_validate(fields)
    cached, cost = False, {}
    try:
        request = request_of(job)
        cache = AnswerCache(Path(cache_folder)) if cache_folder else None
        # An answer that took its time is as good for a job with a time limit.
        key = request_key(replace(request, time_limit_s=None))
        answer = cache.get(key) if cache else None
        cached = answer is not None
        if answer is None:
            with until(end_s):
                answer = _answer(request)
            if cache and request.time_limit_s is None:
                cache.put(key, answer)
        budget = Budget.of(job.model_dump(include=set(COST_FIELDS)))
        cost = cost_figures(budget, answer["figures"], request.cluster)
    except Exception as error:  # noqa: BLE001 - one job must not stop the others
        figures = {"status": "failed", "message": message_of(error)[0]}
        answer = {"figures": figures, "files": {}}
    return {
        "row": job_row(job, {**answer["figures"], **cost}),
        "files": answer["files"],
        "cached": cached,
        "seconds": time.monotonic() - began,
    }


def _answer(request: PlanRequest) -> dict[str, Any]:
    """What is kept of a plan: its figures and its files, without how long it took, which always differs."""
    from meshwright.planner.launch.plan_files import plan_files
    from meshwright.planner.plan.make_plan import make_plan

    plan = make_plan(request, robustness=False, choices=False)
    solver = plan.solver.model_copy(update={"wall_s": None})
    plan = plan.model_copy(update={"solver": solver})
    return {"figures": plan_figures(plan), "files": plan_files(plan) if plan.layout else {}}
