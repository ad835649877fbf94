"""One job from its fields to its files, in plain data, so that any process or machine can do it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import message_of
from meshwright.planner.many.batch.cache import AnswerCache
from meshwright.planner.many.batch.fingerprint import request_key
from meshwright.planner.many.batch.jobs import JobDoc
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.plan_request import PlanRequest

ROW_FIELDS = (
    "name",
    "status",
    "model",
    "cluster",
    "gpus",
    "global_batch",
    "seq_len",
    "precision",
    "framework",
    "step_time_s",
    "lower_bound_s",
    "gap",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "peak_memory_gib",
    "tp",
    "cp",
    "pp",
    "dp",
    "ep",
    "etp",
    "vpp",
    "micro_batch",
    "num_micro_batches",
    "zero_stage",
    "recompute",
    "schedule",
    "message",
)
"""Columns of the results."""
ASKED = ROW_FIELDS[2:9]
LAYOUT = ROW_FIELDS[17:29]
TEXTS = (
    "name",
    "status",
    "model",
    "cluster",
    "precision",
    "framework",
    "recompute",
    "schedule",
    "message",
)
WHOLE = ("gpus", "global_batch", "seq_len", *(name for name in LAYOUT if name not in TEXTS))


def request_of(job: JobDoc) -> PlanRequest:
    """The plan request of a job. Raises InputError."""
    from meshwright.planner.request.reader import read_request

    pins = (
        job.pin
        if isinstance(job.pin, str)
        else ",".join(f"{name}={value}" for name, value in job.pin.items())
    )
    return read_request(
        model=job.model,
        cluster=job.cluster,
        gpus=job.gpus,
        pins=(pins,),
        forbids=(job.forbid,) if isinstance(job.forbid, str) else job.forbid,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        precision=job.precision,
        optimizer=job.optimizer,
        framework=job.framework,
        reserve_gib=job.reserve_gib,
        method=job.method,
        top_k=job.top,
        time_limit_s=job.time_limit,
        seed=job.seed,
    )


def do_job(fields: Mapping[str, Any], cache_folder: str | None) -> dict[str, Any]:
    """Plans one job: its `row` of results, its `files` by name, whether it was `cached`, its `seconds`.

    `fields` are those of a JobDoc. Whatever goes wrong is said in the row, status `failed`.
    """
    began = time.monotonic()
    job = JobDoc.model_validate(fields)
    cached = False
    try:
        request = request_of(job)
        cache = AnswerCache(Path(cache_folder)) if cache_folder else None
        key = request_key(request)
        answer = cache.get(key) if cache else None
        cached = answer is not None
        if answer is None:
            answer = _answer(request)
            if cache and request.time_limit_s is None:
                cache.put(key, answer)
    except Exception as error:  # noqa: BLE001 - one job must not stop the others
        answer = {"row": {"status": "failed", "message": message_of(error)[0]}, "files": {}}
    asked = {key: getattr(job, key) for key in ASKED}
    return {
        "row": {**asked, **answer["row"], "name": job.name},
        "files": answer["files"],
        "cached": cached,
        "seconds": time.monotonic() - began,
    }


def _answer(request: PlanRequest) -> dict[str, Any]:
    """What is kept of a plan: its row and its files. How long it took is left out: it differs every time."""
    from meshwright.planner.launch.plan_files import plan_files
    from meshwright.planner.plan.make_plan import make_plan

    found = make_plan(request, robustness=False)
    solver = found.solver.model_copy(update={"wall_s": None})
    found = found.model_copy(update={"solver": solver})
    return {"row": row_of(found), "files": plan_files(found) if found.layout else {}}


def row_of(plan: Plan) -> dict[str, Any]:
    """A plan in one row of the results, without the names that the job has for things."""
    row: dict[str, Any] = {"status": plan.status, "gpus": plan.inputs.gpus, "message": ""}
    row |= plan.objective.model_dump()
    if plan.infeasible is not None:
        words = [
            *plan.infeasible.conflict,
            *(f"or {change}" for change in plan.infeasible.smallest_changes),
        ]
        row["message"] = "; ".join(words)
    if plan.layout is not None and plan.predicted is not None:
        layout, predicted = plan.layout.model_dump(), plan.predicted
        row |= {name: layout[name] for name in LAYOUT}
        row |= {
            "tokens_per_s": plan.inputs.global_batch * plan.inputs.seq_len / predicted.step_time_s,
            "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
            "tflops_per_gpu": predicted.tflops_per_gpu,
            "mfu": predicted.mfu,
            "peak_memory_gib": max(predicted.memory_gib),
        }
    return row
