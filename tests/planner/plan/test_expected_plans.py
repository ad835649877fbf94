"""Forty requests give the plans that they gave before: status, step time, bound, layout and mapping.

All forty were equal to the digit before nodes with unequal free GPUs were planned one by one; one mapping was
recorded again then, as the file says.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli import main
from tests.places import DATA

PLANS = DATA / "plans"
EXPECTED = json.loads((PLANS / "expected.json").read_text(encoding="utf-8"))["plans"]
SOME = EXPECTED[::8]
PREDICTED_MEMORY = ("--memory-risk", "0.5")
"""The plans were recorded before memory had a margin for its error."""


def check(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PLANS)
    answer = CliRunner().invoke(
        main, ["plan", *shlex.split(expected["request"]), *PREDICTED_MEMORY, "--json"]
    )
    assert answer.exit_code == (1 if expected["status"] == "infeasible" else 0), answer.stderr
    plan = json.loads(answer.stdout)
    assert plan["status"] == expected["status"]
    assert plan["objective"]["step_time_s"] == expected["step_time_s"]
    assert plan["objective"]["lower_bound_s"] == expected["lower_bound_s"]
    assert plan["layout"] == expected["layout"]
    mapping = plan["mapping"] and {key: plan["mapping"][key] for key in expected["mapping"]}
    assert mapping == expected["mapping"]
    reasons = expected["infeasible"]
    sentences = reasons and {key: plan["infeasible"][key] for key in reasons}
    assert sentences == reasons


def test_there_are_forty() -> None:
    assert len({expected["request"] for expected in EXPECTED}) == 40


@pytest.mark.parametrize("expected", SOME, ids=lambda expected: expected["request"])
def test_plans_are_as_before(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected",
    [expected for expected in EXPECTED if expected not in SOME],
    ids=lambda expected: expected["request"],
)
def test_all_plans_are_as_before(expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(expected, monkeypatch)
