"""Options are declared once: what a function shows of them is what requests and jobs take without them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import meshwright
from meshwright.planner.many.jobs import JobDoc
from meshwright.planner.request.options import PLAIN, PlanOptions
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.request.reader import read_request

NAMES = PlanOptions.__annotations__.keys()


def taken_without() -> Mapping[str, Any]:
    """What a request takes for each option that is left out."""
    of_request = {each.name: each.default for each in fields(PlanRequest)}
    parameters = inspect.signature(read_request).parameters.values()
    taken = {**of_request, "top": of_request["top_k"]}
    return taken | {
        each.name: each.default for each in parameters if each.default is not each.empty
    }


def test_options_stand_for_what_requests_and_jobs_take_without_them() -> None:
    taken = taken_without()
    assert PLAIN.keys() <= NAMES <= taken.keys()
    for name in NAMES:
        assert taken[name] is not MISSING, name
        assert taken[name] == PLAIN.get(name), name
        if name in JobDoc.model_fields and name != "seq_len":
            assert JobDoc.model_fields[name].default == PLAIN.get(name), name


def test_functions_show_options_one_by_one() -> None:
    for function in (meshwright.plan, meshwright.plan_mixed, meshwright.recommend):
        parameters = inspect.signature(function).parameters
        assert "options" not in parameters
        for name in ("precision", "forbid", "kind"):
            assert parameters[name].default == PLAIN[name], (function.__name__, name)
            assert parameters[name].annotation == str(
                PlanOptions.__annotations__[name].__forward_arg__
            )
