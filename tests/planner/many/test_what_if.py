"""Plans made beforehand are those that `plan` finds."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import InputError
from meshwright.planner.many.sweep import AXES, WhatIfParams, what_if
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.choices import WITHOUT
from meshwright.planner.request.plan_request import PlanRequest
from tests.planner.plan.test_planner_service import request

QUICK: dict[str, int | str] = {"pp": 1, "micro_batch": 1, "recompute": "none"}
ALONE = WhatIfParams(workers=1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return fastest_plan(request(gpus=8, pins=QUICK, without=WITHOUT))


@pytest.mark.slow
def test_every_row_is_what_plan_finds(plan: Plan) -> None:
    document = what_if(plan, "gpus=4+8,global_batch=32", ALONE)
    (gpus, batch) = document["axes"]
    assert gpus == {"name": "gpus", "values": [4, 8], "now": 1}
    assert batch["values"][batch["now"]] == plan.inputs.global_batch
    assert len(document["rows"]) == 2 * len(batch["values"])
    for row in document["rows"]:
        planned = fastest_plan(PlanRequest.of_inputs(plan.inputs, **row["values"]))
        assert planned.predicted is not None
        assert planned.layout is not None
        assert row["status"] == planned.status
        assert row["step_time_s"] == pytest.approx(planned.predicted.step_time_s, rel=1e-12)
        assert row["peak_memory_gib"] == pytest.approx(max(planned.predicted.memory_gib))
    assert json.loads(json.dumps(document)) == document


def test_tokens_are_those_of_the_step_where_gpus_stay_idle() -> None:
    pinned = fastest_plan(request(gpus=24, pins={**QUICK, "tp": 8, "dp": 2}, without=WITHOUT))
    assert pinned.idle is not None
    row = what_if(pinned, {"gpus": (24,)}, ALONE)["rows"][0]
    assert row["tokens_per_s"] == pytest.approx(pinned.figures()["tokens_per_s"])


@pytest.mark.slow
def test_by_default_one_thing_changes_at_a_time(plan: Plan) -> None:
    document = what_if(plan, params=ALONE)
    assert [axis["name"] for axis in document["axes"]] == list(AXES)
    now = {axis["name"]: axis["values"][axis["now"]] for axis in document["axes"]}
    changes = [sum(row["values"][name] != now[name] for name in now) for row in document["rows"]]
    assert sorted(changes)[:2] == [0, 1]
    assert max(changes) == 1
    assert len(document["rows"]) == 1 + sum(len(axis["values"]) - 1 for axis in document["axes"])
    own = next(row for row in document["rows"] if row["values"] == now)
    assert plan.predicted is not None
    assert own["step_time_s"] == plan.predicted.step_time_s


@pytest.mark.slow
def test_more_network_or_hbm_is_never_slower(plan: Plan) -> None:
    rows = what_if(plan, {"nic_gbps": (200.0, 800.0), "hbm_gib": (141.0,)}, ALONE)["rows"]
    times = {
        (row["values"]["nic_gbps"], row["values"]["hbm_gib"]): row["step_time_s"] for row in rows
    }
    for (nic, hbm), seconds in times.items():
        for (other_nic, other_hbm), other_s in times.items():
            if other_nic >= nic and other_hbm >= hbm:
                assert other_s <= seconds * (1 + 1e-9)


def test_what_cannot_be_planned_says_why(plan: Plan) -> None:
    rows = what_if(plan, {"hbm_gib": (2.0,)}, ALONE)["rows"]
    small = next(row for row in rows if row["values"]["hbm_gib"] == 2.0)
    assert small["status"] == "infeasible"
    assert "no layout fits" in small["message"]


def test_only_options_with_a_control(plan: Plan) -> None:
    with pytest.raises(InputError, match="no control"):
        what_if(plan, "optimizer=sgd", ALONE)
