"""Forty requests give the plans that they gave before: status, step time, bound, layout and mapping.

All forty were equal before nodes with unequal free GPUs were planned one by one; one mapping was
recorded again then, as the file says.
"""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.make_plan import make_plan
from meshwright.planner.request.plan_request import PlanRequest
from tests.places import DATA
from tests.soaked import some

PLANS = DATA / "plans"
FILE = PLANS / "expected.json"
EXPECTED = json.loads(FILE.read_text(encoding="utf-8"))["plans"]
SOME = EXPECTED[::8]
ROUNDING = 1e-12
"""Sums of many floats differ in their last digit from one processor to another: numpy adds as many at a time
as the processor's vectors hold."""

AS_BEFORE = (
    *("--memory-risk", "0.5", "--forbid", "shard-groups,optimizer-offload"),
    *("--without", "allgather,sync-each-batch"),
)
"""The plans were recorded before memory had a margin for its error, and shard groups, offloading, the
all-gather dispatcher and reductions of each micro-batch were choices."""
PLACED = ("--allow", "expert-placement")
"""Those with measured loads were recorded with the price of the placement, which a launch does not run."""


def planned(request: str) -> dict[str, Any]:
    """What `plan --json` answers, in the folder of the requests' files."""
    placed = PLACED if "--expert-loads" in request else ()
    words = ["plan", *shlex.split(request), *AS_BEFORE, *placed, "--json"]
    answer = CliRunner().invoke(main, words)
    document: dict[str, Any] = json.loads(answer.stdout)
    infeasible = document["status"] == "infeasible"
    assert answer.exit_code == (1 if infeasible else 0), answer.stderr
    return document


def kept(plan: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that is kept; of layout, mapping and reasons, the keys that were kept before."""
    entry: dict[str, Any] = {
        "request": before["request"],
        "status": plan["status"],
        "step_time_s": plan["objective"]["step_time_s"],
        "lower_bound_s": plan["objective"]["lower_bound_s"],
    }
    for name in ("layout", "mapping", "infeasible"):
        keys, value = before[name] or {}, plan[name]
        entry[name] = value and {key: value[key] for key in keys or value}
    return entry


def unquestioned(request: PlanRequest, *, robustness: bool, **others: Any) -> Plan:
    """The plan without what its choices bring and what errors of the prediction would change."""
    del robustness
    return make_plan(request, robustness=False, choices=False, **others)


def check(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PLANS)
    # What is kept of a plan is there before it is asked what its choices bring and how sure it is.
    monkeypatch.setattr("meshwright.planner.plan.make_plan.make_plan", unquestioned)
    times = {
        name: pytest.approx(expected[name], rel=ROUNDING)
        for name in ("step_time_s", "lower_bound_s")
        if expected[name] is not None
    }
    assert kept(planned(expected["request"]), expected) == expected | times


def test_there_are_forty() -> None:
    assert len({expected["request"] for expected in EXPECTED}) == 40


@pytest.mark.slow
@pytest.mark.parametrize("expected", SOME, ids=lambda expected: expected["request"])
def test_plans_are_as_before(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(expected, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(
    "expected",
    some(expected for expected in EXPECTED if expected not in SOME),
    ids=lambda expected: expected["request"],
)
def test_all_plans_are_as_before(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(expected, monkeypatch)


def record() -> None:
    """Plans every request anew and says what changed: `python -m tests.planner.plan.test_expected_plans`."""
    os.chdir(PLANS)
    document = json.loads(FILE.read_text(encoding="utf-8"))
    for index, before in enumerate(document["plans"]):
        entry = kept(planned(before["request"]), before)
        if entry != before:
            print(before["request"], before["step_time_s"], "->", entry["step_time_s"], flush=True)
        document["plans"][index] = entry
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
