"""One choice otherwise: all else kept, and at its best."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.neighbours import neighbours, single_choices
from meshwright.planner.plan.make_plan import fastest_plan
from meshwright.planner.request.reader import read_request


@pytest.mark.slow
def test_the_best_plan_with_a_choice_is_the_pinned_plan() -> None:
    """Searched on its own, `tp 4` loses what a plan pinned to it loses; kept, it cannot lose less."""
    asked = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    request = read_request(**asked, global_batch=32, seq_len=4096, pin="pp=1,cp=1")  # type: ignore[arg-type]
    plan = fastest_plan(request)
    assert plan.layout is not None
    assert plan.predicted is not None
    choices = {row.choice: row for row in single_choices(plan, neighbours(plan))}
    assert not any(name.startswith(("pp", "cp", "ep")) for name in choices)
    name, row = next((name, row) for name, row in choices.items() if name.startswith("tp"))
    pins = f"pp=1,cp=1,{name.replace(' ', '=')}"
    pinned = fastest_plan(read_request(**asked, global_batch=32, seq_len=4096, pin=pins))  # type: ignore[arg-type]
    assert pinned.predicted is not None
    lost = 100 * (pinned.predicted.step_time_s / plan.predicted.step_time_s - 1)
    assert row.best_pct == pytest.approx(lost)
    for row in choices.values():
        assert row.best_pct is None or row.best_pct >= -1e-9
        if row.kept_pct is not None and row.best_pct is not None:
            assert row.kept_pct >= row.best_pct - 1e-6
